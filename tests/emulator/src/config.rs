//! Configuration of the emulated host.
//!
//! The default is a healthy host: two NPUs, all nodes accessible, a daemon that starts device
//! processes. Other settings are situations that a client must handle or report: missing nodes,
//! modules that are not loaded, containers, cards that boot or were removed.

use crate::pod::Pod;
use crate::schedule::Schedule;
use ascend_ioctl::Generation;
use nix::errno::Errno;
use std::time::Duration;

/// How the devices are attached to the host.
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
    /// SETUP_DEVICE is EFAULT until the TSD dialogue has started one.
    #[default]
    Required,
    /// SETUP_DEVICE starts one by itself.
    Automatic,
}

/// Whether open(2) of a node reaches the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Door {
    /// It does.
    #[default]
    Open,
    /// No such node: the driver is not loaded, or the container was not given it (ENOENT).
    Missing,
    /// Refused by the file's mode (EACCES).
    Forbidden,
    /// Refused by a device cgroup or a security module (EPERM).
    Denied,
    /// A node whose driver is gone (ENXIO).
    Stale,
}

impl Door {
    /// The errno of open(2), if it does not reach the driver.
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

/// The kind of mount namespace that a process runs in, as the driver classifies it.
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

/// A place where processes run. It has one mount namespace, whose first process lives as long as
/// the emulator.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Kind of mount namespace.
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

    /// A user on the host who may not open these nodes.
    pub fn host_without(closed: &[u32]) -> Self {
        Place { closed: closed.to_vec(), ..Place::default() }
    }

    /// An ordinary container with these nodes.
    pub fn container(nodes: &[u32]) -> Self {
        Place { namespace: Namespace::Container, nodes: Some(nodes.to_vec()), ..Place::default() }
    }
}

/// The state of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Found on the PCI bus; not known to the driver yet.
    Detected,
    /// Known to the driver; its firmware is not ready.
    Registered,
    /// In use.
    #[default]
    Ready,
    /// Removed. The driver still lists it.
    Removed,
    /// A reset was announced.
    Resetting,
}

/// Behaviour of the daemon on the device that starts device processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Daemon {
    /// It answers.
    #[default]
    Works,
    /// It does not run: CONNECT fails with the private code 20.
    Absent,
    /// It answers after this delay.
    Late(Duration),
    /// It takes messages and never answers.
    Silent,
    /// It answers with bytes that are not a message.
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
    /// It refuses START unless the client queried the capabilities first, as the vendor's client
    /// does.
    VendorOrder,
    /// It closes the session instead of answering START.
    HangsUp,
    /// After its answer to START it sends this many packets that nobody requested.
    Chatty(usize),
    /// It never answers, and as soon as a packet is read there is another that nobody requested.
    Floods,
    /// It does not answer messages of this type.
    Ignores(i32),
    /// Before each answer about a device it sends a refusal about the next device.
    Confused,
}

/// The emulated host.
#[derive(Debug, Clone)]
pub struct Config {
    /// Driver generation.
    pub generation: Generation,
    /// Generation of the modules besides the memory module, if it is another one.
    pub other_modules: Option<Generation>,
    /// Number of NPUs. Without any, the first SETUP waits for one: see [`Config::setup_patience`].
    pub devices: u32,
    /// Bytes of HBM per NPU.
    pub hbm: u64,
    /// Whether the NPUs report their memory as DDR, as cards without HBM do. Only the report
    /// depends on it: which kinds such a card refuses to create is not known.
    pub ddr: bool,
    /// Bytes of host memory available to the driver.
    pub host_memory: u64,
    /// NUMA nodes of the host. They share its memory.
    pub numa_nodes: u32,
    /// Whether the NPUs have pages of 1 GiB.
    pub giant_pages: bool,
    /// Whether the host has pages of 1 GiB (on real hosts: aarch64 on HCCS), for P2P DDR only.
    pub host_giant_pages: bool,
    /// Whether the NPUs report that memory may be shared by name over PCI Express. Only the report
    /// depends on it.
    pub share_over_external_bus: bool,
    /// Name of the chip, at most 31 bytes, with its family: `Ascend910B3`.
    pub chip: String,
    /// How the NPUs are attached.
    pub attachment: Attachment,
    /// Whether the device process must be started by the client.
    pub device_process: DeviceProcess,
    /// Access to `/dev/davinci_manager` and `/dev/davinciN`.
    pub door: Door,
    /// Access to `/dev/hisi_hdc`.
    pub hdc_door: Door,
    /// Modules that are not loaded: OPEN of their name is EINVAL.
    pub missing_modules: Vec<String>,
    /// The host has only the next memory driver: module `svm` instead of `SVM`, with no commands.
    pub svm_v3: bool,
    /// The memory driver is of an unknown generation: the commands that identify generations are
    /// EINVAL.
    pub unknown_generation: bool,
    /// Physical ids of virtual instances besides the whole devices: 100 + card * 16 + instance.
    pub virtual_instances: Vec<u32>,
    /// URD's split mode of every device: 0 whole, 1 split for virtual machines, 2 split for
    /// containers.
    pub split_mode: u32,
    /// Whether the host is a virtual machine.
    pub virtual_machine: bool,
    /// Places where processes run. They run in the first unless a test places them elsewhere.
    pub places: Vec<Place>,
    /// Devices that are occupied by a container outside of the emulator, by physical id.
    pub occupied: Vec<u32>,
    /// Devices that are not ready, by physical id.
    pub phases: Vec<(u32, Phase)>,
    /// How long after the emulator's start [`Phase::Detected`] devices become ready; `None` for
    /// never.
    pub boot: Option<Duration>,
    /// How long the first SETUP waits for detected devices. The real driver waits 1501 times 100
    /// ms.
    pub setup_patience: Duration,
    /// The memory that firmware shares with the host has not the magic number and version that the
    /// driver knows, so the driver has no health of any device.
    pub strange_firmware: bool,
    /// How long each copy and each fill takes; other commands are answered meanwhile. Half of the
    /// bytes are moved before and half after it.
    pub copy_time: Duration,
    /// Behaviour of the daemon.
    pub daemon: Daemon,
    /// Limit of device processes per device; START beyond it is refused with E30003. The firmware's
    /// real limit is unknown.
    pub device_process_limit: usize,
    /// Whether the host is in a super pod. Without one, `server` must be 0.
    pub super_pod: bool,
    /// This host's number in its super pod.
    pub server: u32,
    /// The super pod in which other emulated servers answer; without one, none answers.
    pub pod: Option<Pod>,
    /// The seed that decides in which order calls are answered; without one, as they come.
    pub schedule: Option<Schedule>,
}

impl Config {
    /// Generation of the modules besides the memory module.
    pub fn rest_of_driver(&self) -> Generation {
        self.other_modules.unwrap_or(self.generation)
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            generation: Generation::NEWEST,
            other_modules: None,
            devices: 2,
            hbm: 64 << 30,
            ddr: false,
            host_memory: 16 << 30,
            numa_nodes: 1,
            giant_pages: true,
            host_giant_pages: false,
            share_over_external_bus: false,
            chip: "Ascend910B3".into(),
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
            strange_firmware: false,
            copy_time: Duration::ZERO,
            daemon: Daemon::default(),
            device_process_limit: 64,
            super_pod: true,
            server: 3,
            pod: None,
            schedule: None,
        }
    }
}
