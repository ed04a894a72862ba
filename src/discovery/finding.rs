//! What is wrong with a host, or worth knowing, in one sentence and with a remedy.
//!
//! The driver answers the same errno for very different situations, and some situations with success and an empty list. A [`Finding`] names
//! the situation; [`Finding::code`] is stable for programs, the sentence is for people and may change.

use super::{Health, LogicalId, PhysicalId};
use nix::errno::Errno;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// Something does not work as it could.
    Warning,
    /// Nothing can be used.
    Fatal,
}

/// A situation of the host or of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// No device node and no kernel module.
    DriverNotLoaded,
    /// The driver is loaded on the host (or that cannot be told), its node is not here.
    NodeMissing(PathBuf),
    /// The node leads to no driver.
    StaleNode(PathBuf),
    /// The file's mode forbids it.
    Forbidden(PathBuf),
    /// A device cgroup or a security module forbids it.
    Denied(PathBuf),
    /// open(2) failed for another reason.
    Unopenable(PathBuf, Errno),
    /// A module of the driver is not there.
    ModuleMissing(&'static str),
    /// A module of the driver is being unloaded.
    ModuleUnloading(&'static str),
    /// A module of the driver refused to be opened for another reason.
    ModuleRefused(&'static str, Errno),
    /// The driver is loaded and has no device.
    NoDevice,
    /// NPUs are on PCI, the driver has none of them.
    NoneCameUp {
        /// How many are on PCI.
        on_pci: usize,
    },
    /// NPUs are on PCI that the driver does not list.
    SomeDidNotComeUp {
        /// How many are on PCI.
        on_pci: usize,
        /// How many the driver lists.
        listed: usize,
    },
    /// On the host: this user may not write to any `/dev/davinciN`.
    NodesForbidden {
        /// How many there are.
        nodes: usize,
    },
    /// This user may not open some `/dev/davinciN`.
    SomeNodesForbidden {
        /// Their numbers.
        nodes: Vec<u32>,
    },
    /// In a container: the manager was passed in, no device was.
    NoDevicePassed,
    /// In a container: fewer devices than the host has.
    PartlyPassed {
        /// How many are listed here.
        listed: usize,
        /// How many are on PCI.
        on_pci: usize,
    },
    /// Another container has the device.
    Occupied(PhysicalId),
    /// The node is left over from a virtual instance that is gone.
    NodeOfNothing(PhysicalId),
    /// In a container: the table was made before these nodes were opened, and is frozen.
    TableFrozen {
        /// How many nodes were opened.
        opened: usize,
        /// How many devices the table has.
        listed: usize,
    },
    /// In a container: the driver says that devices were taken away again.
    TakenAway,
    /// The driver waits for devices to start, longer than was allowed.
    StillStarting {
        /// How long we waited.
        waited: Duration,
    },
    /// The driver lists the devices and did not answer questions about them in the time that was allowed.
    Unanswered {
        /// How long that was.
        waited: Duration,
    },
    /// SETUP was refused.
    SetupRefused(Errno),
    /// On the host: the list is empty although the nodes can be opened; a restricted process was first and hides all devices.
    Hidden,
    /// The device was taken away; the driver still lists it.
    Removed(LogicalId),
    /// The device is being reset.
    Resetting(LogicalId),
    /// The device is not ready yet.
    Starting(LogicalId),
    /// The device reports an exception.
    Exception(LogicalId),
    /// The device sleeps.
    Sleeping(LogicalId),
    /// The device does not answer.
    Lost(LogicalId),
    /// The device's health is not good.
    Unhealthy(LogicalId, Health),
    /// A part of a card.
    VirtualInstance(LogicalId),
    /// The card is cut up for others.
    Split(LogicalId),
    /// The memory driver is the next generation's.
    MemoryDriverV3,
    /// There is no memory driver.
    MemoryDriverMissing,
    /// A driver that fits no known generation.
    UnknownGeneration(String),
    /// `/dev/hisi_hdc` cannot be opened, so device processes cannot be started.
    NoDaemonNode(PathBuf, Errno),
    /// Something that the table of situations does not have.
    Unexpected(String),
}

impl Finding {
    /// A short name that does not change: for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Finding::DriverNotLoaded => "driver-not-loaded",
            Finding::NodeMissing(_) => "node-missing",
            Finding::StaleNode(_) => "stale-node",
            Finding::Forbidden(_) => "no-permission",
            Finding::Denied(_) => "denied-by-cgroup",
            Finding::Unopenable(..) => "unopenable",
            Finding::ModuleMissing(_) => "module-missing",
            Finding::ModuleUnloading(_) => "module-unloading",
            Finding::ModuleRefused(..) => "module-refused",
            Finding::NoDevice => "no-device",
            Finding::NoneCameUp { .. } => "none-came-up",
            Finding::SomeDidNotComeUp { .. } => "some-did-not-come-up",
            Finding::NodesForbidden { .. } => "nodes-no-permission",
            Finding::SomeNodesForbidden { .. } => "some-nodes-no-permission",
            Finding::NoDevicePassed => "no-device-passed",
            Finding::PartlyPassed { .. } => "partly-passed",
            Finding::Occupied(_) => "occupied",
            Finding::NodeOfNothing(_) => "node-of-nothing",
            Finding::TableFrozen { .. } => "table-frozen",
            Finding::TakenAway => "taken-away",
            Finding::StillStarting { .. } => "still-starting",
            Finding::Unanswered { .. } => "unanswered",
            Finding::SetupRefused(_) => "setup-refused",
            Finding::Hidden => "hidden",
            Finding::Removed(_) => "device-removed",
            Finding::Resetting(_) => "device-resetting",
            Finding::Starting(_) => "device-starting",
            Finding::Exception(_) => "device-exception",
            Finding::Sleeping(_) => "device-sleeping",
            Finding::Lost(_) => "device-lost",
            Finding::Unhealthy(..) => "device-unhealthy",
            Finding::VirtualInstance(_) => "virtual-instance",
            Finding::Split(_) => "split-device",
            Finding::MemoryDriverV3 => "memory-driver-v3",
            Finding::MemoryDriverMissing => "memory-driver-missing",
            Finding::UnknownGeneration(_) => "unknown-generation",
            Finding::NoDaemonNode(..) => "no-daemon-node",
            Finding::Unexpected(_) => "unexpected",
        }
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Finding::PartlyPassed { .. } | Finding::VirtualInstance(_) | Finding::Split(_) => Severity::Note,
            Finding::SomeDidNotComeUp { .. }
            | Finding::SomeNodesForbidden { .. }
            | Finding::Occupied(_)
            | Finding::NodeOfNothing(_)
            | Finding::TableFrozen { .. }
            | Finding::Unanswered { .. }
            | Finding::Removed(_)
            | Finding::Resetting(_)
            | Finding::Starting(_)
            | Finding::Exception(_)
            | Finding::Sleeping(_)
            | Finding::Lost(_)
            | Finding::Unhealthy(..)
            | Finding::NoDaemonNode(..)
            | Finding::Unexpected(_) => Severity::Warning,
            _ => Severity::Fatal,
        }
    }

    /// The device that it is about, if it is about one of the listed.
    pub fn device(&self) -> Option<LogicalId> {
        match self {
            Finding::Removed(device)
            | Finding::Resetting(device)
            | Finding::Starting(device)
            | Finding::Exception(device)
            | Finding::Sleeping(device)
            | Finding::Lost(device)
            | Finding::Unhealthy(device, _)
            | Finding::VirtualInstance(device)
            | Finding::Split(device) => Some(*device),
            _ => None,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Finding::DriverNotLoaded => "Install the driver and firmware package and load it (modprobe, or reboot).",
            Finding::NodeMissing(_) => {
                "Start the container with the node, for example docker run --device=/dev/davinci_manager --device=/dev/davinci0 \
                 --device=/dev/devmm_svm --device=/dev/hisi_hdc; on a host, load the driver."
            }
            Finding::StaleNode(_) => {
                "Load the driver; in a container, start it again so that it gets the present nodes."
            }
            Finding::Forbidden(_) | Finding::NodesForbidden { .. } | Finding::SomeNodesForbidden { .. } => {
                "Join the group that owns the nodes (HwHiAiUser by default), or wait: right after boot they belong to root alone."
            }
            Finding::Denied(_) => "Allow the device in the container's device list (--device), or in its cgroup.",
            Finding::Unopenable(..) => "See open(2) for this errno, and the kernel log.",
            Finding::ModuleMissing(_) => {
                "Load the rest of the driver; if it is loaded, the kernel log says why the module gave up."
            }
            Finding::ModuleUnloading(_) => "Wait until the driver is loaded again.",
            Finding::ModuleRefused(..) => "Look into the kernel log.",
            Finding::NoDevice => "Check that the card is seated and that the host shows it (lspci -d 19e5:).",
            Finding::NoneCameUp { .. } | Finding::SomeDidNotComeUp { .. } => {
                "Wait if the host has just started; otherwise the kernel log says why the card did not come up."
            }
            Finding::NoDevicePassed => {
                "Start the container with the wanted device, for example --device=/dev/davinci0."
            }
            Finding::PartlyPassed { .. } => {
                "Nothing, if this is what the container was meant to have; otherwise pass more nodes."
            }
            Finding::Occupied(_) => "End the other container, or give this one another device.",
            Finding::NodeOfNothing(_) => "Create the virtual instance again, or start the container without it.",
            Finding::TableFrozen { .. } => {
                "Start the container again and let this program, or the vendor's runtime, be the first to use the NPUs there."
            }
            Finding::TakenAway => "End the other container that uses these devices, then try again.",
            Finding::StillStarting { .. } => {
                "Wait and try again: after the driver was loaded it may take three minutes."
            }
            Finding::Unanswered { .. } => {
                "Allow more time; if that does not help, look at the devices' health and the kernel log."
            }
            Finding::SetupRefused(Errno::ENOMEM) => "End containers that use NPUs: the driver serves 128 at a time.",
            Finding::SetupRefused(_) => "Look into the kernel log.",
            Finding::Hidden => {
                "End the process that was first (see /proc/uda/namespace_node), wait two seconds and try again."
            }
            Finding::Removed(_) => "Put the device back or reset it (npu-smi set -t reset); until then leave it out.",
            Finding::Resetting(_) | Finding::Starting(_) => "Wait until it is ready.",
            Finding::Exception(_) | Finding::Lost(_) | Finding::Unhealthy(..) => {
                "Look at npu-smi info -t health and the kernel log; reset the device."
            }
            Finding::Sleeping(_) => "Wake it up (npu-smi), or use another.",
            Finding::VirtualInstance(_) => {
                "Allocate and map as usual; to share memory between processes, use a whole device."
            }
            Finding::Split(_) => "To share memory between processes, use a device that is not cut up.",
            Finding::MemoryDriverV3 => {
                "ascend-vmm drives Ascend 910, 910B, 910_93 and 310P; use the vendor's library here."
            }
            Finding::MemoryDriverMissing => "Load the driver's memory module (asdrv_svm).",
            Finding::UnknownGeneration(_) => "Use a newer ascend-vmm, and please report the driver's version.",
            Finding::NoDaemonNode(..) => {
                "Pass /dev/hisi_hdc into the container and let this user read it; without it no device process can be started."
            }
            Finding::Unexpected(_) => "Please report this with the driver's version and the kernel log.",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::DriverNotLoaded => f.write_str("the Ascend driver is not loaded on this host"),
            Finding::NodeMissing(path) => {
                write!(f, "{} is not here: a container without it, or a host without the driver", path.display())
            }
            Finding::StaleNode(path) => write!(f, "{} leads to no driver: it is left over", path.display()),
            Finding::Forbidden(path) => write!(f, "this user may not open {} (file mode)", path.display()),
            Finding::Denied(path) => {
                write!(f, "{} may not be opened here (device cgroup or security module)", path.display())
            }
            Finding::Unopenable(path, errno) => write!(f, "{} could not be opened: {errno}", path.display()),
            Finding::ModuleMissing(module) => write!(f, "the driver's module {module} is not loaded"),
            Finding::ModuleUnloading(module) => write!(f, "the driver's module {module} is being unloaded"),
            Finding::ModuleRefused(module, errno) => write!(f, "the driver's module {module} could not be opened: {errno}"),
            Finding::NoDevice => f.write_str("the driver is loaded and has no NPU"),
            Finding::NoneCameUp { on_pci } => write!(f, "{on_pci} NPUs are on PCI and none has come up"),
            Finding::SomeDidNotComeUp { on_pci, listed } => {
                write!(f, "{on_pci} NPUs are on PCI, the driver lists {listed}: some did not come up")
            }
            Finding::NodesForbidden { nodes } => {
                write!(f, "this user may not write to any of the {nodes} /dev/davinciN, so the driver shows it no NPU")
            }
            Finding::SomeNodesForbidden { nodes } => {
                write!(f, "this user may not open /dev/davinci{{")?;
                for (at, node) in nodes.iter().enumerate() {
                    write!(f, "{}{node}", if at == 0 { "" } else { "," })?;
                }
                write!(f, "}}, so the driver leaves them out and numbers the others from 0")
            }
            Finding::NoDevicePassed => f.write_str("this container has the driver's manager and no /dev/davinciN"),
            Finding::PartlyPassed { listed, on_pci } => {
                write!(f, "this container has {listed} of the host's {on_pci} NPUs, numbered from 0")
            }
            Finding::Occupied(node) => write!(f, "/dev/davinci{node} is used by another container"),
            Finding::NodeOfNothing(node) => write!(f, "/dev/davinci{node} is left over: its device is gone"),
            Finding::TableFrozen { opened, listed } => write!(
                f,
                "{opened} /dev/davinciN can be opened and the driver lists {listed}: an earlier process of this container asked before all \
                 were opened, and the table stays so until the container ends"
            ),
            Finding::TakenAway => f.write_str("another container took the devices while this one was setting them up"),
            Finding::StillStarting { waited } => {
                write!(f, "the driver still waits for devices to start, after {:.1} s", waited.as_secs_f64())
            }
            Finding::Unanswered { waited } => write!(
                f,
                "the devices are listed, but questions about them were not answered within {:.1} s",
                waited.as_secs_f64()
            ),
            Finding::SetupRefused(errno) => write!(f, "the driver refused to set up this process's devices: {errno}"),
            Finding::Hidden => f.write_str(
                "the nodes can be opened and the driver lists no NPU: a process without permission asked first and hides them",
            ),
            Finding::Removed(device) => write!(f, "device {device} was removed, although the driver still lists it"),
            Finding::Resetting(device) => write!(f, "device {device} is being reset"),
            Finding::Starting(device) => write!(f, "device {device} is still starting"),
            Finding::Exception(device) => write!(f, "device {device} reports an exception"),
            Finding::Sleeping(device) => write!(f, "device {device} sleeps"),
            Finding::Lost(device) => write!(f, "device {device} does not answer: its link or heartbeat is lost"),
            Finding::Unhealthy(device, health) => write!(f, "device {device} has a {health} fault"),
            Finding::VirtualInstance(device) => {
                write!(f, "device {device} is a virtual instance: a part of a card, whose memory cannot be shared")
            }
            Finding::Split(device) => {
                write!(f, "device {device} is cut into virtual instances: its memory cannot be shared")
            }
            Finding::MemoryDriverV3 => f.write_str("the memory driver is of the third kind (Ascend 950), which ascend-vmm does not speak"),
            Finding::MemoryDriverMissing => f.write_str("the driver's memory module is not loaded"),
            Finding::UnknownGeneration(what) => {
                write!(f, "the driver fits no generation that ascend-vmm knows ({what})")
            }
            Finding::NoDaemonNode(path, errno) => write!(f, "{} could not be opened: {errno}", path.display()),
            Finding::Unexpected(what) => f.write_str(what),
        }
    }
}
