//! The device's side: messages to the agent, the process that the device runs for a host process.
//!
//! The agent is not part of the public driver. That it has the same checks as the host, in the same order, is inferred: it shares the code. What a lost
//! or late device makes of a command is in the host's source: no link is ENODEV, no answer in time is ENOSYS, and an agent that does not know
//! the process answers ESRCH.

use super::handle::HandleTable;
use super::{Answer, Call, Stop, refuse};
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
    let _ = (machine, arrived, PATIENCE);
    Ok(())
}

impl Call<'_, '_> {
    /// Sends a message to the caller's agent; what the agent does with it is up to the caller of this.
    pub fn message(&mut self, physical: u32) -> Answer {
        link(self.machine, physical, self.caller.arrived)?;
        let Some(agent) = self.process.agents.get(&physical) else {
            return refuse(Errno::ESRCH, "the device has no process for the caller: it was not set up");
        };
        if !alive(self.machine, self.process.tgid, physical, agent.pid) {
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
pub fn link_broken(_machine: &Machine) -> bool {
    false
}

/// Whether the device process that SETUP_DEVICE met still runs.
fn alive(_machine: &Machine, _tgid: i32, _physical: u32, _pid: i32) -> bool {
    true
}

/// The device process that SETUP_DEVICE meets, started now if this host does that by itself.
pub fn meet(machine: &mut Machine, tgid: i32, physical: u32) -> Option<i32> {
    let running = machine.device_process(tgid, physical);
    running.or((machine.config.device_process == crate::config::DeviceProcess::Automatic).then_some(1000 + tgid))
}

/// Whether a super-pod id is of this server; ids that say nothing are taken for local.
pub fn is_local(_machine: &Machine, sdid: u32) -> bool {
    sdid == u32::MAX || sdid >> 22 == 0
}

/// The device has been told that a session's memory is no more. A host that starts device processes by itself also ends them.
pub fn part(_machine: &mut Machine, _tgid: i32, _physical: u32) {}
