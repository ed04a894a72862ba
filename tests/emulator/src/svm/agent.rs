//! The device's side: messages to the agent, the process that the device runs for a host process.
//!
//! The agent is not part of the public driver. That it has the same checks as the host, in the same order, is inferred: it shares the code. What a lost
//! or late device makes of a command is in the host's source: no link is ENODEV, no answer in time is ENOSYS, and an agent that does not know
//! the process answers ESRCH.

use super::handle::HandleTable;
use super::{Answer, Call, Stop, refuse};
use crate::config::DeviceProcess;
use crate::machine::{HOST, Machine};
use ascend_ioctl::svm::HOST_AGENT_ID;
use nix::errno::Errno;
use std::time::{Duration, Instant};

/// How long the host waits for a device's answer. The real number is the link driver's; only that there is one matters here.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a session knows of a device that it set up.
pub struct Agent {
    /// Pid of the process on the device.
    pub pid: i32,
    /// Whether ASYNC_MEMCPY is allowed: not after PREPARE_CLOSE_DEVICE, and an idempotent SETUP_DEVICE does not allow it again.
    pub allows_async: bool,
    /// The handles of device memory, by the device's own ids.
    pub handles: HandleTable,
}

/// Whether a message would reach the device, and when it would be answered.
pub fn link(machine: &Machine, physical: u32, arrived: Instant) -> Answer {
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
    /// Sends a message to the caller's agent; what the agent does with it is up to the caller of this.
    pub fn message(&mut self, physical: u32) -> Answer {
        link(self.machine, physical, self.caller.arrived)?;
        let Some(agent) = self.process.agents.get(&physical) else {
            return refuse(Errno::ESRCH, "the device has no process for the caller: it was not set up");
        };
        if self.machine.device_process(self.process.tgid, physical) != Some(agent.pid) {
            return refuse(Errno::ESRCH, "the caller's process on the device is gone");
        }
        Ok(())
    }

    /// The link part of a copy: a dead device is offline rather than unreachable, and a broken link fails the transfer.
    pub fn transfer(&mut self, physical: u32) -> Answer {
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

/// Whether a super-pod id is of this server (`svm_is_sdid_in_local_server`).
pub fn is_local(machine: &Machine, sdid: u32) -> bool {
    sdid >> 22 == machine.config.server & 0x3FF
}

/// The device was told to end the session's process. Where the host starts device processes by itself it ends them too; otherwise they are the daemon's.
pub fn part(machine: &mut Machine, tgid: i32, physical: u32) {
    if machine.config.device_process == DeviceProcess::Automatic {
        machine.end_device_process(tgid, physical);
    }
}
