//! The state of the model for tests: what clients hold.

use crate::svm::SvmState;
use crate::tsdrv::TasksState;
use serde::Serialize;

/// Everything that clients hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct State {
    /// Open files, in the order of their opening.
    pub files: Vec<FileState>,
    /// Processes that run on devices for host processes.
    pub device_processes: Vec<DeviceProcessState>,
    /// Host processes that are registered with the devices.
    pub registrations: Vec<i32>,
    /// Connections to daemons on devices.
    pub sessions: Vec<ConnectionState>,
    /// Requests for access between devices: process, device, peer (physical ids), count.
    pub peer_requests: Vec<(i32, u32, u32, u32)>,
    /// What the memory module holds.
    pub memory: SvmState,
    /// What the task schedulers hold.
    pub tasks: TasksState,
    /// Groups that wait for events.
    pub event_groups: usize,
}

impl State {
    /// Whether no client holds anything, as on a freshly booted host.
    pub fn is_empty(&self) -> bool {
        self == &State::default()
    }
}

/// An open file of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileState {
    /// Its path.
    pub path: String,
    /// The process that opened it.
    pub tgid: i32,
    /// The module that it is bound to.
    pub module: Option<String>,
}

/// A device process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceProcessState {
    /// Physical id of the device.
    pub device: u32,
    /// The host process that it belongs to.
    pub tgid: i32,
    /// Its pid on the device.
    pub pid: i32,
    /// The device believes that the host process is gone.
    pub orphaned: bool,
}

/// A connection of `/dev/hisi_hdc`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConnectionState {
    /// Physical id of the device.
    pub device: u32,
    /// The host process that made it.
    pub tgid: i32,
    /// Service type; 9 is the daemon that starts device processes.
    pub service: i32,
    /// Whether it is bound to a file.
    pub owned: bool,
}
