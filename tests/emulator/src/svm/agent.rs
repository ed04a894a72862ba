//! The device side: messages to the agent, the process that the device runs for a host process.
//!
//! The agent is not part of the public driver. That it makes the same checks as the host in the
//! same order is inferred from the code that they share. How a command fails without the device is
//! in the host's source: no link is ENODEV, no answer in time is ENOSYS, and an agent that does not
//! know the process returns ESRCH.

use super::handle::HandleTable;
use super::store::BlockId;
use super::{Call, Stop, SvmResult, refuse};
use crate::config::DeviceProcess;
use crate::machine::{HOST, Machine};
use ascend_ioctl::svm::HOST_AGENT_ID;
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long the host waits for a device's answer. The real limit is in the link driver; its value
/// does not matter here.
const PATIENCE: Duration = Duration::from_secs(5);

/// A session's record of a device that it set up.
pub struct Agent {
    /// Pid of the process on the device.
    pub pid: i32,
    /// Whether ASYNC_MEMCPY is allowed. PREPARE_CLOSE_DEVICE forbids it, and another SETUP_DEVICE
    /// does not allow it again.
    pub allows_async: bool,
    /// The handles of device memory, by the device's own ids.
    pub handles: HandleTable,
    /// Its pages behind plain allocations.
    pub plain: BTreeSet<BlockId>,
}

/// Checks the link to a device: fails if it is down, sleeps while the device is silent.
pub fn link(machine: &Machine, physical: u32, arrived: Instant) -> SvmResult {
    if physical == HOST || physical == HOST_AGENT_ID {
        return refuse(Errno::EINVAL, "the host has no channel to itself");
    }
    let Some(device) = machine.device(physical).filter(|device| device.answers()) else {
        return refuse(Errno::ENODEV, "the device cannot be reached");
    };
    let now = Instant::now();
    if let Some(until) = device.silent_until.filter(|until| *until > now) {
        let given_up = arrived + PATIENCE;
        if now >= given_up {
            return refuse(Errno::ENOSYS, "the device does not answer");
        }
        return Err(Stop::Sleep(until.min(given_up)));
    }
    Ok(())
}

impl Call<'_, '_> {
    /// Sends a message to the caller's agent. The caller of this function does what the agent would
    /// do.
    pub fn message(&mut self, physical: u32) -> SvmResult {
        link(self.machine, physical, self.caller.arrived)?;
        let Some(agent) = self.process.agents.get(&physical) else {
            return refuse(Errno::ESRCH, "the device has no process for the caller: it was not set up");
        };
        if self.machine.device_process(self.process.tgid, physical) != Some(agent.pid) {
            return refuse(Errno::ESRCH, "the caller's process on the device is gone");
        }
        Ok(())
    }

    /// The link checks of a copy. A dead device is ENXIO here, and a broken link is EIO.
    pub fn transfer(&mut self, physical: u32) -> SvmResult {
        match self.message(physical) {
            Err(Stop::Refused(Errno::ENODEV, _)) => refuse(Errno::ENXIO, "the device is offline"),
            Ok(()) if link_broken(self.machine) => refuse(Errno::EIO, "the transfer failed on the link"),
            other => other,
        }
    }
}

/// Whether copies fail on the link.
pub fn link_broken(machine: &Machine) -> bool {
    machine.link_broken
}

/// Whether a super-pod id belongs to this server (`svm_is_sdid_in_local_server`).
pub fn is_local(machine: &Machine, sdid: u32) -> bool {
    sdid >> 22 == machine.config.server & 0x3FF
}

/// Ends the session's process on the device, if this host starts device processes by itself.
/// Otherwise the daemon does.
pub fn part(machine: &mut Machine, tgid: i32, physical: u32) {
    if machine.config.device_process == DeviceProcess::Automatic {
        machine.end_device_process(tgid, physical);
    }
}
