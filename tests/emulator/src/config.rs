//! What the emulated host is made of, and what is wrong with it.
//!
//! The default is a healthy host: two NPUs, all nodes open to everybody, a daemon that starts device processes. Everything else is a situation in which
//! a client must find its way or say what is wrong: nodes that are not there, modules that are not loaded, containers, cards that boot or were removed.

use ascend_ioctl::Generation;
use nix::errno::Errno;
use std::time::Duration;

/// How the devices hang on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Attachment {
    /// PCI Express: the host-pin segment is at 7 TiB, devices cannot reach host memory by address.
    #[default]
    Pcie,
    /// HCCS: the host-pin segment is at 8 TiB, devices can be granted access to host memory.
    Hccs,
}

/// Whether SETUP_DEVICE needs a device process that was started through `/dev/hisi_hdc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceProcess {
    /// SETUP_DEVICE answers EFAULT until the TSD dialogue started one.
    #[default]
    Required,
    /// SETUP_DEVICE starts one by itself.
    Automatic,
}

/// What open(2) of a node meets before the driver is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Door {
    /// The driver.
    #[default]
    Open,
    /// No such node: the driver is not loaded, or the container was not given it (ENOENT).
    Missing,
    /// The file's mode (EACCES).
    Forbidden,
    /// A device cgroup or a security module (EPERM).
    Denied,
    /// A node whose driver is gone (ENXIO).
    Stale,
}

impl Door {
    /// The errno of open(2), if it does not get to the driver.
    pub fn errno(self) -> Option<Errno> {
        match self {
            Door::Open => None,
            Door::Missing => Some(Errno::ENOENT),
            Door::Forbidden => Some(Errno::EACCES),
            Door::Denied => Some(Errno::EPERM),
            Door::Stale => Some(Errno::ENXIO),
        }
    }
}

/// Which mount namespace a process runs in, as the driver judges it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Namespace {
    /// The host's own.
    #[default]
    Host,
    /// A container that has all capabilities: it sees all devices under the host's numbers.
    Privileged,
    /// An ordinary container: it has the devices whose nodes it opened, under numbers of its own.
    Container,
}

/// A place where processes run. Each has one mount namespace; its first process lives as long as the emulator.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// How the driver judges it.
    pub namespace: Namespace,
    /// The `/dev/davinciN` that exist there, by physical id; `None` for all.
    pub nodes: Option<Vec<u32>>,
    /// Nodes that exist but cannot be opened there (EACCES), by physical id.
    pub closed: Vec<u32>,
}

impl Place {
    /// The host itself.
    pub fn host() -> Self {
        Place::default()
    }

    /// A user on the host who may open only some of the nodes.
    pub fn host_without(closed: &[u32]) -> Self {
        Place { closed: closed.to_vec(), ..Place::default() }
    }

    /// An ordinary container with these nodes.
    pub fn container(nodes: &[u32]) -> Self {
        Place { namespace: Namespace::Container, nodes: Some(nodes.to_vec()), ..Place::default() }
    }
}

/// How far a card is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Found on the PCI bus; the driver does not have it yet.
    Detected,
    /// The driver has it, its firmware has not reported ready.
    Registered,
    /// In use.
    #[default]
    Ready,
    /// Taken away. The driver still lists it.
    Removed,
    /// A reset was announced.
    Resetting,
}

/// What the daemon on the device does that starts device processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Daemon {
    /// It answers.
    #[default]
    Works,
    /// It is not there: CONNECT fails with the private code 20.
    Absent,
    /// It answers, each time after so long.
    Late(Duration),
    /// It takes messages and never answers.
    Silent,
    /// It answers with bytes that are no message.
    Garbage,
    /// It speaks this protocol version instead of 1230.
    OtherVersion(u32),
    /// It refuses START with this result and error code.
    Refuses {
        /// `tsd_rsp_code`.
        code: u32,
        /// `error_info.error_code`, such as `E30003`; empty for none.
        error: String,
    },
    /// It refuses START unless the client asked for its capabilities first, as the vendor's does.
    VendorOrder,
    /// It closes the session instead of answering START.
    HangsUp,
}

/// The emulated host.
#[derive(Debug, Clone)]
pub struct Config {
    /// Driver generation.
    pub generation: Generation,
    /// Number of NPUs. Without any, the first SETUP waits for one as the driver does: see [`Config::setup_patience`].
    pub devices: u32,
    /// Bytes of HBM of each.
    pub hbm: u64,
    /// Bytes of host memory that the driver can have.
    pub host_memory: u64,
    /// How they are attached.
    pub attachment: Attachment,
    /// Whether the device process must be started by the client.
    pub device_process: DeviceProcess,
    /// What open of `/dev/davinci_manager` and `/dev/davinciN` meets.
    pub door: Door,
    /// What open of `/dev/hisi_hdc` meets.
    pub hdc_door: Door,
    /// Modules that are not loaded: OPEN of their name is EINVAL.
    pub missing_modules: Vec<String>,
    /// A host with the next memory driver only: `SVM` is not there, `svm` is (and answers nothing).
    pub svm_v3: bool,
    /// A memory driver of a generation that nobody knows: the numbers that tell generations apart are all EINVAL.
    pub unknown_generation: bool,
    /// Physical ids of virtual instances besides the whole devices: 100 + card * 16 + instance.
    pub virtual_instances: Vec<u32>,
    /// URD's split mode of every device: 0 whole, 1 cut for virtual machines, 2 cut for containers.
    pub split_mode: u32,
    /// Whether the host is a virtual machine.
    pub virtual_machine: bool,
    /// Where processes run. The first is where they are unless a test places them elsewhere.
    pub places: Vec<Place>,
    /// Devices that a container outside of the emulator has taken and set up, by physical id.
    pub occupied: Vec<u32>,
    /// Devices that are not ready, by physical id.
    pub phases: Vec<(u32, Phase)>,
    /// How long after the emulator's start [`Phase::Detected`] devices become ready; `None` for never.
    pub boot: Option<Duration>,
    /// How long the first SETUP waits for detected devices. The driver's own is 1501 times 100 ms.
    pub setup_patience: Duration,
    /// What the daemon does.
    pub daemon: Daemon,
    /// How many device processes a device can run; START beyond it is refused with E30003. The real limit is the firmware's and unknown.
    pub device_process_limit: usize,
    /// This host's number in its super pod.
    pub server: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            generation: Generation::NEWEST,
            devices: 2,
            hbm: 64 << 30,
            host_memory: 16 << 30,
            attachment: Attachment::default(),
            device_process: DeviceProcess::default(),
            door: Door::default(),
            hdc_door: Door::default(),
            missing_modules: Vec::new(),
            svm_v3: false,
            unknown_generation: false,
            virtual_instances: Vec::new(),
            split_mode: 0,
            virtual_machine: false,
            places: vec![Place::host()],
            occupied: Vec::new(),
            phases: Vec::new(),
            boot: None,
            setup_patience: Duration::from_millis(1501 * 100),
            daemon: Daemon::default(),
            device_process_limit: 64,
            server: 3,
        }
    }
}
