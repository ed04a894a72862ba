//! The emulated host's hardware and firmware as the driver's modules see it: devices, their numbering, their memory, the processes that run on them.

use crate::caller::Caller;
use crate::config::Config;
use crate::trap::Trap;
use nix::errno::Errno;

/// The host id that stands for "the CPU" wherever a device id is expected.
pub const HOST: u32 = 65;

/// Hardware and firmware, shared by all modules of the driver.
pub struct Machine {
    /// What the host is made of.
    pub config: Config,
    /// What clients did that would have crashed the kernel. The front takes these after each call, and kills the client.
    pub traps: Vec<Trap>,
}

impl Machine {
    /// A host as configured, freshly booted.
    pub fn new(config: Config) -> Self {
        Machine { config, traps: Vec::new() }
    }

    /// The physical id (udevid) behind a logical id in the caller's namespace; EINVAL if there is none. 65 and 64 are the callers' business.
    pub fn physical(&self, _caller: &Caller, logical: u32) -> Result<u32, Errno> {
        if logical < self.config.devices { Ok(logical) } else { Err(Errno::EINVAL) }
    }

    /// The pid of the device process bound to a host process on a physical device, if one runs.
    pub fn device_process(&self, _tgid: i32, _physical: u32) -> Option<i32> {
        None
    }
}
