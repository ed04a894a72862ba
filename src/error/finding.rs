//! What is wrong with a host or worth knowing about it: one sentence and a remedy each.
//!
//! The driver answers the same errno for very different situations, and some situations with
//! success and an empty list. A [`Finding`] names the situation; [`Finding::code`] is stable for
//! programs, the sentence is for people and may change.

use super::{Errno, printable_path};
use crate::id::{LogicalId, PhysicalId};
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
    /// No device can be used.
    Fatal,
}

/// Health of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Health {
    /// Good.
    Normal,
    /// A minor fault.
    Minor,
    /// A major fault.
    Major,
    /// A fatal fault.
    Fatal,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Health::Normal => "normal",
            Health::Minor => "minor",
            Health::Major => "major",
            Health::Fatal => "fatal",
        })
    }
}

/// A situation of the host or of a device. Each has a code.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// `driver-not-loaded`: no device node and no kernel module.
    DriverNotLoaded,
    /// `node-missing`: the node is not here, although the driver is or may be loaded on the host.
    NodeMissing(PathBuf),
    /// `stale-node`: the node leads to no driver.
    StaleNode(PathBuf),
    /// `no-permission`: the file's mode forbids it.
    Forbidden(PathBuf),
    /// `denied-by-cgroup`: a device cgroup or a security module forbids it.
    Denied(PathBuf),
    /// `unopenable`: open(2) failed for another reason.
    Unopenable(PathBuf, Errno),
    /// `module-missing`: a module of the driver is not loaded.
    ModuleMissing(&'static str),
    /// `module-unloading`: a module of the driver is being unloaded.
    ModuleUnloading(&'static str),
    /// `module-refused`: a module of the driver could not be opened for another reason.
    ModuleRefused(&'static str, Errno),
    /// `no-device`: the driver is loaded and has no device.
    NoDevice,
    /// `none-came-up`: NPUs are on PCI, but the driver has none of them.
    NoneCameUp {
        /// How many are on PCI.
        on_pci: usize,
    },
    /// `some-did-not-come-up`: NPUs are on PCI that the driver does not list.
    SomeDidNotComeUp {
        /// How many are on PCI.
        on_pci: usize,
        /// How many the driver lists.
        listed: usize,
    },
    /// `nodes-no-permission`: this user may not open any `/dev/davinciN`; on the host, for writing.
    NodesForbidden {
        /// How many there are.
        nodes: usize,
    },
    /// `some-nodes-no-permission`: this user may not open some `/dev/davinciN`.
    SomeNodesForbidden {
        /// Their numbers.
        nodes: Vec<u32>,
    },
    /// `no-device-passed`: the container has the manager's node and no device's.
    NoDevicePassed,
    /// `partly-passed`: the container has fewer devices than the host.
    PartlyPassed {
        /// How many are listed here.
        listed: usize,
        /// How many are on PCI.
        on_pci: usize,
    },
    /// `occupied`: another container has these devices.
    Occupied {
        /// The numbers of the nodes.
        nodes: Vec<u32>,
        /// True if this process can open another node.
        others: bool,
    },
    /// `orphan-node`: the node is left over from a virtual instance that is gone.
    OrphanNode(PhysicalId),
    /// `table-frozen`: the container's table was made before these nodes were opened, and is
    /// frozen.
    TableFrozen {
        /// How many nodes were opened.
        opened: usize,
        /// How many devices the table has.
        listed: usize,
    },
    /// `taken-away`: another container took this container's devices.
    TakenAway,
    /// `still-starting`: the driver waits for devices to start, longer than allowed.
    StillStarting {
        /// How long we waited.
        waited: Duration,
    },
    /// `unanswered`: the driver lists the devices, but did not answer questions about them in time.
    Unanswered {
        /// How long that was.
        waited: Duration,
    },
    /// `no-thread`: no thread could be started to set the devices up, or to ask about them.
    NoThread {
        /// How many devices are listed; 0 if they could not be set up.
        listed: usize,
    },
    /// `setup-refused`: SETUP was refused.
    SetupRefused(Errno),
    /// `hidden`: the host's list is empty although the nodes can be opened: a restricted process
    /// was first and hides all devices.
    Hidden,
    /// `device-removed`: the device was removed; the driver still lists it.
    Removed(LogicalId),
    /// `device-resetting`: the device is being reset.
    Resetting(LogicalId),
    /// `device-starting`: the device is not ready yet.
    Starting(LogicalId),
    /// `device-exception`: the device reports an exception.
    Exception(LogicalId),
    /// `device-sleeping`: the device sleeps.
    Sleeping(LogicalId),
    /// `device-lost`: the device does not answer.
    Lost(LogicalId),
    /// `device-unhealthy`: the device's health is not good.
    Unhealthy(LogicalId, Health),
    /// `virtual-instance`: a part of a card.
    VirtualInstance(LogicalId),
    /// `split-device`: the card is split for others.
    Split(LogicalId),
    /// `virtual-machine`: this is a virtual machine, which has a part of a card.
    VirtualMachine(LogicalId),
    /// `memory-driver-v3`: the memory driver is the next generation's.
    MemoryDriverV3,
    /// `memory-driver-missing`: there is no memory driver.
    MemoryDriverMissing,
    /// `unknown-generation`: the driver fits no known generation.
    UnknownGeneration(String),
    /// `small-address-space`: the kernel gives processes fewer addresses than the memory driver
    /// needs.
    SmallAddressSpace {
        /// How many bits an address has.
        bits: u32,
    },
    /// `no-daemon-node`: `/dev/hisi_hdc` cannot be opened, so device processes cannot be started.
    NoDaemonNode(PathBuf, Errno),
    /// `driver-used-here`: other code in this process has the driver open, so questions that would
    /// disturb it were not asked.
    DriverUsedHere,
    /// `visible-devices-empty`: `ASCEND_RT_VISIBLE_DEVICES` is set to nothing.
    VisibleDevicesEmpty,
    /// `visible-devices-unreadable`: `ASCEND_RT_VISIBLE_DEVICES` is not a list of different numbers
    /// to its end.
    VisibleDevicesUnreadable {
        /// The value.
        value: String,
        /// The entry at which the list ends.
        entry: String,
        /// How many entries come before it.
        kept: usize,
    },
    /// `visible-devices-absent`: `ASCEND_RT_VISIBLE_DEVICES` has numbers of devices that are not
    /// here.
    VisibleDevicesAbsent {
        /// The value.
        value: String,
        /// The numbers that no device has.
        absent: Vec<u32>,
        /// How many devices are here.
        listed: usize,
    },
    /// `unexpected`: anything else.
    Unexpected(String),
}

/// Everything about a finding.
struct FindingRow {
    code: &'static str,
    severity: Severity,
    /// The listed device that it is about.
    device: Option<LogicalId>,
    sentence: String,
    remedy: &'static str,
    /// What the vendor's programs show in this situation.
    vendor: Option<&'static str>,
}

fn row(severity: Severity, code: &'static str, sentence: impl Into<String>, remedy: &'static str) -> FindingRow {
    FindingRow { code, severity, device: None, sentence: sentence.into(), remedy, vendor: None }
}

fn fatal(code: &'static str, sentence: impl Into<String>, remedy: &'static str) -> FindingRow {
    row(Severity::Fatal, code, sentence, remedy)
}

fn warning(code: &'static str, sentence: impl Into<String>, remedy: &'static str) -> FindingRow {
    row(Severity::Warning, code, sentence, remedy)
}

fn note(code: &'static str, sentence: impl Into<String>, remedy: &'static str) -> FindingRow {
    row(Severity::Note, code, sentence, remedy)
}

impl FindingRow {
    /// Adds the listed device that it is about, and puts it in front of the sentence.
    fn of(self, device: &LogicalId) -> FindingRow {
        FindingRow { device: Some(*device), sentence: format!("device {device} {}", self.sentence), ..self }
    }

    /// Adds what the vendor's programs show in this situation.
    fn shown_as(self, vendor: &'static str) -> FindingRow {
        FindingRow { vendor: Some(vendor), ..self }
    }
}

impl Finding {
    /// A short name for programs. It does not change.
    pub fn code(&self) -> &'static str {
        self.row().code
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        self.row().severity
    }

    /// The listed device that it is about, if there is one.
    pub fn device(&self) -> Option<LogicalId> {
        self.row().device
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.row().remedy
    }

    /// What the vendor's programs show in this situation, for people who search for a code. They
    /// show the same codes in other situations too. From public reports; not tried here.
    pub fn vendor_codes(&self) -> Option<&'static str> {
        self.row().vendor
    }

    fn row(&self) -> FindingRow {
        const NODE_GROUP: &str = "Join the group that owns the nodes (HwHiAiUser by default), or \
            wait: right after boot they belong to root alone.";
        const DID_NOT_COME_UP: &str = "Wait if the host has just started; otherwise the kernel log \
            says why the card did not come up.";
        const KERNEL_LOG: &str = "Look into the kernel log.";
        const UNSET: &str = "Set it to logical ids separated by commas, such as 0,1, or unset it.";
        const WAIT: &str = "Wait until it is ready.";
        const HEALTH: &str = "Look at npu-smi info -t health and the kernel log; reset the \
            device (of a virtual machine, on its host).";
        const NPU_SMI_INIT: &str = "npu-smi: dcmi module initialize failed, -8005";
        const OCCUPIED: &str = "npu-smi: -8020 or -8005; driver error 87";
        const NOT_SET_UP: &str = "aclrtSetDevice: 507033";
        match self {
            Finding::DriverNotLoaded => fatal(
                "driver-not-loaded",
                "the Ascend driver is not loaded on this host",
                "Install the driver and firmware package and load it (modprobe, or reboot).",
            ),
            Finding::NodeMissing(path) => fatal(
                "node-missing",
                format!("{} is not here: a container without it, or a host without the driver", printable_path(path)),
                "Start the container with the node, for example docker run \
                 --device=/dev/davinci_manager --device=/dev/davinci0 --device=/dev/devmm_svm \
                 --device=/dev/hisi_hdc. With the Ascend Docker Runtime set \
                 ASCEND_VISIBLE_DEVICES=0; in Kubernetes request the device plug-in's resource, \
                 such as huawei.com/Ascend910: 1. On a host, load the driver.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::StaleNode(path) => fatal(
                "stale-node",
                format!("{} leads to no driver: it is left over", printable_path(path)),
                "Load the driver; in a container, start it again so that it gets the present nodes.",
            ),
            Finding::Forbidden(path) => fatal(
                "no-permission",
                format!("this user may not open {} (file mode)", printable_path(path)),
                NODE_GROUP,
            )
            .shown_as(NPU_SMI_INIT),
            Finding::Denied(path) => fatal(
                "denied-by-cgroup",
                format!("{} may not be opened here (device cgroup or security module)", printable_path(path)),
                "Allow the device in the container's device list (--device), or in its cgroup.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::Unopenable(path, errno) => fatal(
                "unopenable",
                format!("{} could not be opened: {errno}", printable_path(path)),
                "See open(2) for this errno, and the kernel log.",
            ),
            Finding::ModuleMissing(module) => fatal(
                "module-missing",
                format!("the driver's module {module} is not loaded"),
                "Load the rest of the driver; if it is loaded, the kernel log says why the module gave up.",
            ),
            Finding::ModuleUnloading(module) => fatal(
                "module-unloading",
                format!("the driver's module {module} is being unloaded"),
                "Wait until the driver is loaded again.",
            ),
            Finding::ModuleRefused(module, errno) => fatal(
                "module-refused",
                format!("the driver's module {module} could not be opened: {errno}"),
                KERNEL_LOG,
            ),
            Finding::NoDevice => fatal(
                "no-device",
                "the driver is loaded and has no NPU",
                "Check that the card is seated and that the host shows it (lspci -d 19e5:); of a virtual machine, that \
                 its definition gives it one.",
            ),
            Finding::NoneCameUp { on_pci } => fatal(
                "none-came-up",
                match on_pci {
                    1 => "1 NPU is on PCI and has not come up".into(),
                    _ => format!("{on_pci} NPUs are on PCI and none has come up"),
                },
                DID_NOT_COME_UP,
            ),
            Finding::SomeDidNotComeUp { on_pci, listed } => warning(
                "some-did-not-come-up",
                format!("{on_pci} NPUs are on PCI, the driver lists {listed}: some did not come up"),
                DID_NOT_COME_UP,
            ),
            Finding::NodesForbidden { nodes } => fatal(
                "nodes-no-permission",
                match nodes {
                    1 => "this user may not open the only /dev/davinciN, so the driver shows it no NPU".into(),
                    _ => format!(
                        "this user may not open any of the {nodes} /dev/davinciN, so the driver shows it no NPU"
                    ),
                },
                NODE_GROUP,
            ),
            Finding::SomeNodesForbidden { nodes } => warning(
                "some-nodes-no-permission",
                format!(
                    "this user may not open {}, so the driver leaves {} out and numbers the others from 0",
                    numbered(nodes),
                    if nodes.len() == 1 { "it" } else { "them" }
                ),
                NODE_GROUP,
            ),
            Finding::NoDevicePassed => fatal(
                "no-device-passed",
                "this container has the driver's manager and no /dev/davinciN",
                "Start the container with the wanted device, for example --device=/dev/davinci0. With \
                 the Ascend Docker Runtime set ASCEND_VISIBLE_DEVICES=0; in Kubernetes request the \
                 device plug-in's resource, such as huawei.com/Ascend910: 1.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::PartlyPassed { listed, on_pci } => note(
                "partly-passed",
                format!("this container has {listed} of the host's {on_pci} NPUs, numbered from 0"),
                "Nothing, if this is what the container was meant to have; otherwise pass more nodes.",
            ),
            Finding::Occupied { nodes, others } => row(
                if *others { Severity::Warning } else { Severity::Fatal },
                "occupied",
                format!(
                    "{} used by another container{}",
                    match &nodes[..] {
                        [node] => format!("/dev/davinci{node} is"),
                        _ => format!("{} are", numbered(nodes)),
                    },
                    if *others { "" } else { ", and this one has no other NPU" }
                ),
                "End the other container, or give this one another device. On the host, root finds the \
                 container in /proc/uda/namespace_node: root_tgid is its first process.",
            )
            .shown_as(OCCUPIED),
            Finding::OrphanNode(node) => warning(
                "orphan-node",
                format!("/dev/davinci{node} is left over: its device is gone"),
                "Create the virtual instance again, or start the container without it.",
            ),
            Finding::TableFrozen { opened, listed } => warning(
                "table-frozen",
                format!(
                    "{opened} /dev/davinciN can be opened and the driver lists {listed}: an earlier process of \
                     this container asked before all were opened, and the table stays so until the container ends"
                ),
                "Start the container again and let this program, or the vendor's runtime, be the \
                 first to use the NPUs there.",
            ),
            Finding::TakenAway => fatal(
                "taken-away",
                "another container took the devices while this one was setting them up",
                "End the other container that uses these devices, then try again.",
            )
            .shown_as(OCCUPIED),
            Finding::StillStarting { waited } => fatal(
                "still-starting",
                format!("the driver still waits for devices to start, after {:.1} s", waited.as_secs_f64()),
                "Wait and try again: after the driver was loaded it may take three minutes.",
            ),
            Finding::Unanswered { waited } => warning(
                "unanswered",
                format!(
                    "the devices are listed, but questions about them were not answered within {:.1} s",
                    waited.as_secs_f64()
                ),
                "Allow more time; if that does not help, look at the devices' health and the kernel log.",
            ),
            Finding::NoThread { listed } => row(
                if *listed > 0 { Severity::Warning } else { Severity::Fatal },
                "no-thread",
                match listed {
                    0 => "no thread could be started to set up the devices",
                    _ => "the devices are listed, but no thread could be started to ask about them",
                },
                "Allow this process more threads or memory (ulimit -u, ulimit -v, the limits of its cgroup).",
            ),
            Finding::SetupRefused(errno) => fatal(
                "setup-refused",
                format!("the driver refused to set up this process's devices: {errno}"),
                match *errno {
                    Errno::ENOMEM => "End containers that use NPUs: the driver serves 128 at a time.",
                    _ => KERNEL_LOG,
                },
            ),
            Finding::Hidden => fatal(
                "hidden",
                "the nodes can be opened and the driver lists no NPU: a process without permission \
                 asked first and hides them",
                "End the process that was first (see /proc/uda/namespace_node), wait two seconds and try again.",
            ),
            Finding::Removed(device) => warning(
                "device-removed",
                "was removed, although the driver still lists it",
                "Put the device back or reset it (npu-smi set -t reset; of a virtual machine, on its host); until then \
                 leave it out.",
            )
            .of(device)
            .shown_as("aclrt…: 507899"),
            Finding::Resetting(device) => warning("device-resetting", "is being reset", WAIT).of(device),
            Finding::Starting(device) => warning("device-starting", "is still starting", WAIT).of(device),
            Finding::Exception(device) => warning("device-exception", "reports an exception", HEALTH).of(device),
            Finding::Sleeping(device) => {
                warning("device-sleeping", "sleeps", "Wake it up (npu-smi), or use another.").of(device)
            }
            Finding::Lost(device) => {
                warning("device-lost", "does not answer: its link or heartbeat is lost", HEALTH).of(device)
            }
            Finding::Unhealthy(device, health) => {
                warning("device-unhealthy", format!("has a {health} fault"), HEALTH).of(device)
            }
            Finding::VirtualInstance(device) => note(
                "virtual-instance",
                "is a virtual instance: a part of a card, whose memory cannot be shared",
                "Allocate and map as usual; to share memory between processes, use a whole device.",
            )
            .of(device),
            Finding::Split(device) => note(
                "split-device",
                "is split into virtual instances: its memory cannot be shared",
                "To share memory between processes, use a device that is not split.",
            )
            .of(device),
            Finding::VirtualMachine(device) => note(
                "virtual-machine",
                "is the part of a card that this virtual machine has: its memory cannot be shared",
                "Allocate and map as usual, and keep what several would share in one process. A card is split on \
                 the virtual machine's host: nothing in here changes that.",
            )
            .of(device),
            Finding::MemoryDriverV3 => fatal(
                "memory-driver-v3",
                "the memory driver is of the third kind (Ascend950), which ascend-vmm does not speak",
                "ascend-vmm drives Ascend910, 910B, 910_93 and 310P; use the vendor's library here.",
            ),
            Finding::MemoryDriverMissing => fatal(
                "memory-driver-missing",
                "the driver's memory module is not loaded",
                "Load the driver's memory module (asdrv_svm).",
            ),
            Finding::UnknownGeneration(what) => fatal(
                "unknown-generation",
                format!("the driver fits no generation that ascend-vmm knows ({what})"),
                "Use a newer ascend-vmm, and please report the driver's version.",
            ),
            Finding::SmallAddressSpace { bits } => fatal(
                "small-address-space",
                format!(
                    "this kernel gives a process addresses of {bits} bits (CONFIG_ARM64_VA_BITS_{bits}), \
                     and the memory driver uses some of 45 bits"
                ),
                "Boot a kernel that was built with CONFIG_ARM64_VA_BITS_48.",
            ),
            Finding::NoDaemonNode(path, errno) => warning(
                "no-daemon-node",
                format!("{} could not be opened: {errno}", printable_path(path)),
                "Pass /dev/hisi_hdc into the container and let this user read it; without it no \
                 device process can be started.",
            )
            .shown_as(NOT_SET_UP),
            Finding::DriverUsedHere => note(
                "driver-used-here",
                "other code in this process has the driver open, most likely the vendor's library: the number of AI \
                 cores, the kind of machine, and whether a device was removed or is being reset were not asked, \
                 because that would end its device processes",
                "Nothing; a process of its own (ascend-vmm probe) sees all facts.",
            ),
            Finding::VisibleDevicesEmpty => {
                warning("visible-devices-empty", "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every device", UNSET)
                    .shown_as("aclrtGetDeviceCount: 0 devices")
            }
            Finding::VisibleDevicesUnreadable { value, entry, kept } => warning(
                "visible-devices-unreadable",
                format!(
                    "ASCEND_RT_VISIBLE_DEVICES is {}: the list ends before {}, which is {}, and shows {}",
                    quoted(value),
                    quoted(entry),
                    if entry.trim().parse::<u32>().is_ok() { "in it already" } else { "no number of a device" },
                    match kept {
                        0 => "no device".to_owned(),
                        1 => "only the first entry".to_owned(),
                        kept => format!("only the first {kept} entries"),
                    }
                ),
                UNSET,
            ),
            Finding::VisibleDevicesAbsent { value, absent, listed } => warning(
                "visible-devices-absent",
                format!(
                    "ASCEND_RT_VISIBLE_DEVICES is {} and names {} not here: the driver lists {}",
                    quoted(value),
                    match &absent[..] {
                        [one] => format!("device {one}, which is"),
                        _ => format!("devices {}, which are", list(absent)),
                    },
                    match listed {
                        1 => "device 0 alone".to_owned(),
                        listed => format!("devices 0 to {}", listed.saturating_sub(1)),
                    }
                ),
                "Set it to logical ids that are here, separated by commas. In a container devices are \
                 numbered from 0, whatever the names of their nodes.",
            )
            .shown_as("aclInit log: ASCEND_RT_VISIBLE_DEVICES error, input data range"),
            Finding::Unexpected(what) => {
                warning("unexpected", what.clone(), "Please report this with the driver's version and the kernel log.")
            }
        }
    }
}

/// A list of numbers, shortened if it is long.
fn list(numbers: &[u32]) -> String {
    const SHOWN: usize = 16;
    let mut texts: Vec<String> = numbers.iter().take(SHOWN).map(u32::to_string).collect();
    if numbers.len() > SHOWN {
        texts.push("…".into());
    }
    texts.join(", ")
}

/// Nodes by their numbers, as a shell would write them.
fn numbered(nodes: &[u32]) -> String {
    match nodes {
        [node] => format!("/dev/davinci{node}"),
        _ => format!("/dev/davinci{{{}}}", list(nodes).replace(' ', "")),
    }
}

/// A value of the environment in quotes, shortened if it is long.
fn quoted(value: &str) -> String {
    const SHOWN: usize = 40;
    let mut text: String = value.chars().take(SHOWN).collect();
    if text.len() < value.len() {
        text.push('…');
    }
    format!("{text:?}")
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.row().sentence)
    }
}
