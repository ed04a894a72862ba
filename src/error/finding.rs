//! What is wrong with a host, or worth knowing: one sentence and a remedy.
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
    /// Nothing can be used.
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

/// A situation of the host or of a device, each with its code.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// `driver-not-loaded`: no device node and no kernel module.
    DriverNotLoaded,
    /// `node-missing`: the driver is loaded on the host (or that cannot be known), its node is not
    /// here.
    NodeMissing(PathBuf),
    /// `stale-node`: the node leads to no driver.
    StaleNode(PathBuf),
    /// `no-permission`: the file's mode forbids it.
    Forbidden(PathBuf),
    /// `denied-by-cgroup`: a device cgroup or a security module forbids it.
    Denied(PathBuf),
    /// `unopenable`: open(2) failed for another reason.
    Unopenable(PathBuf, Errno),
    /// `module-missing`: a module of the driver is not there.
    ModuleMissing(&'static str),
    /// `module-unloading`: a module of the driver is being unloaded.
    ModuleUnloading(&'static str),
    /// `module-refused`: a module of the driver refused to be opened for another reason.
    ModuleRefused(&'static str, Errno),
    /// `no-device`: the driver is loaded and has no device.
    NoDevice,
    /// `none-came-up`: NPUs are on PCI, the driver has none of them.
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
    /// `no-device-passed`: in a container: the manager was passed in, no device was.
    NoDevicePassed,
    /// `partly-passed`: in a container: fewer devices than the host has.
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
        /// Whether this process can open another node.
        others: bool,
    },
    /// `node-of-nothing`: the node is left over from a virtual instance that is gone.
    NodeOfNothing(PhysicalId),
    /// `table-frozen`: in a container: the table was made before these nodes were opened, and is
    /// frozen.
    TableFrozen {
        /// How many nodes were opened.
        opened: usize,
        /// How many devices the table has.
        listed: usize,
    },
    /// `taken-away`: in a container: the driver says that devices were taken away again.
    TakenAway,
    /// `still-starting`: the driver waits for devices to start, longer than was allowed.
    StillStarting {
        /// How long we waited.
        waited: Duration,
    },
    /// `unanswered`: the driver lists the devices and did not answer questions about them in the
    /// time that was allowed.
    Unanswered {
        /// How long that was.
        waited: Duration,
    },
    /// `setup-refused`: SETUP was refused.
    SetupRefused(Errno),
    /// `hidden`: on the host: the list is empty although the nodes can be opened; a restricted
    /// process was first and hides all devices.
    Hidden,
    /// `device-removed`: the device was taken away; the driver still lists it.
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
    /// `memory-driver-v3`: the memory driver is the next generation's.
    MemoryDriverV3,
    /// `memory-driver-missing`: there is no memory driver.
    MemoryDriverMissing,
    /// `unknown-generation`: a driver that fits no known generation.
    UnknownGeneration(String),
    /// `small-address-space`: the kernel gives processes fewer addresses than the memory driver
    /// needs.
    SmallAddressSpace {
        /// How many bits an address has.
        bits: u32,
    },
    /// `no-daemon-node`: `/dev/hisi_hdc` cannot be opened, so device processes cannot be started.
    NoDaemonNode(PathBuf, Errno),
    /// `driver-used-here`: other code in this process has the driver open, so the questions that
    /// would disturb it were left out.
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
    /// `unexpected`: something that the table of situations does not have.
    Unexpected(String),
}

/// All that is said of a finding. A new one needs its row, or this does not compile.
struct Row {
    code: &'static str,
    severity: Severity,
    /// The device that it is about, if it is about one of the listed.
    device: Option<LogicalId>,
    sentence: String,
    remedy: &'static str,
    /// What the vendor's programs show in this situation.
    vendor: Option<&'static str>,
}

impl Row {
    /// With the codes that the vendor's programs show in this situation.
    fn shown_as(self, vendor: &'static str) -> Row {
        Row { vendor: Some(vendor), ..self }
    }
}

impl Finding {
    /// A short name that does not change: for programs.
    pub fn code(&self) -> &'static str {
        self.row().code
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        self.row().severity
    }

    /// The device that it is about, if it is about one of the listed.
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

    fn row(&self) -> Row {
        use Severity::{Fatal, Note, Warning};
        const NODE_GROUP: &str = "Join the group that owns the nodes (HwHiAiUser by default), or \
            wait: right after boot they belong to root alone.";
        const DID_NOT_COME_UP: &str = "Wait if the host has just started; otherwise the kernel log \
            says why the card did not come up.";
        const KERNEL_LOG: &str = "Look into the kernel log.";
        const UNSET: &str = "Set it to logical ids separated by commas, such as 0,1, or unset it.";
        const WAIT: &str = "Wait until it is ready.";
        const HEALTH: &str = "Look at npu-smi info -t health and the kernel log; reset the device.";
        let row = |code, severity, sentence: String, remedy| Row {
            code,
            severity,
            device: None,
            sentence,
            remedy,
            vendor: None,
        };
        let of = |device: &LogicalId, code, severity, sentence: String, remedy| Row {
            code,
            severity,
            device: Some(*device),
            sentence: format!("device {device} {sentence}"),
            remedy,
            vendor: None,
        };
        const NPU_SMI_INIT: &str = "npu-smi: dcmi module initialize failed, -8005";
        const OCCUPIED: &str = "npu-smi: -8020 or -8005; driver error 87";
        const NOT_SET_UP: &str = "aclrtSetDevice: 507033";
        match self {
            Finding::DriverNotLoaded => row(
                "driver-not-loaded",
                Fatal,
                "the Ascend driver is not loaded on this host".into(),
                "Install the driver and firmware package and load it (modprobe, or reboot).",
            ),
            Finding::NodeMissing(path) => row(
                "node-missing",
                Fatal,
                format!("{} is not here: a container without it, or a host without the driver", printable_path(path)),
                "Start the container with the node, for example docker run \
                 --device=/dev/davinci_manager --device=/dev/davinci0 --device=/dev/devmm_svm \
                 --device=/dev/hisi_hdc. With the Ascend Docker Runtime set \
                 ASCEND_VISIBLE_DEVICES=0; in Kubernetes request the device plug-in's resource, \
                 such as huawei.com/Ascend910: 1. On a host, load the driver.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::StaleNode(path) => row(
                "stale-node",
                Fatal,
                format!("{} leads to no driver: it is left over", printable_path(path)),
                "Load the driver; in a container, start it again so that it gets the present nodes.",
            ),
            Finding::Forbidden(path) => row(
                "no-permission",
                Fatal,
                format!("this user may not open {} (file mode)", printable_path(path)),
                NODE_GROUP,
            )
            .shown_as(NPU_SMI_INIT),
            Finding::Denied(path) => row(
                "denied-by-cgroup",
                Fatal,
                format!("{} may not be opened here (device cgroup or security module)", printable_path(path)),
                "Allow the device in the container's device list (--device), or in its cgroup.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::Unopenable(path, errno) => row(
                "unopenable",
                Fatal,
                format!("{} could not be opened: {errno}", printable_path(path)),
                "See open(2) for this errno, and the kernel log.",
            ),
            Finding::ModuleMissing(module) => row(
                "module-missing",
                Fatal,
                format!("the driver's module {module} is not loaded"),
                "Load the rest of the driver; if it is loaded, the kernel log says why the module gave up.",
            ),
            Finding::ModuleUnloading(module) => row(
                "module-unloading",
                Fatal,
                format!("the driver's module {module} is being unloaded"),
                "Wait until the driver is loaded again.",
            ),
            Finding::ModuleRefused(module, errno) => row(
                "module-refused",
                Fatal,
                format!("the driver's module {module} could not be opened: {errno}"),
                KERNEL_LOG,
            ),
            Finding::NoDevice => row(
                "no-device",
                Fatal,
                "the driver is loaded and has no NPU".into(),
                "Check that the card is seated and that the host shows it (lspci -d 19e5:).",
            ),
            Finding::NoneCameUp { on_pci } => row(
                "none-came-up",
                Fatal,
                match on_pci {
                    1 => "1 NPU is on PCI and has not come up".into(),
                    _ => format!("{on_pci} NPUs are on PCI and none has come up"),
                },
                DID_NOT_COME_UP,
            ),
            Finding::SomeDidNotComeUp { on_pci, listed } => row(
                "some-did-not-come-up",
                Warning,
                format!("{on_pci} NPUs are on PCI, the driver lists {listed}: some did not come up"),
                DID_NOT_COME_UP,
            ),
            Finding::NodesForbidden { nodes } => row(
                "nodes-no-permission",
                Fatal,
                match nodes {
                    1 => "this user may not open the only /dev/davinciN, so the driver shows it no NPU".into(),
                    _ => format!(
                        "this user may not open any of the {nodes} /dev/davinciN, so the driver shows it no NPU"
                    ),
                },
                NODE_GROUP,
            ),
            Finding::SomeNodesForbidden { nodes } => row(
                "some-nodes-no-permission",
                Warning,
                format!(
                    "this user may not open {}, so the driver leaves {} out and numbers the others from 0",
                    numbered(nodes),
                    if nodes.len() == 1 { "it" } else { "them" }
                ),
                NODE_GROUP,
            ),
            Finding::NoDevicePassed => row(
                "no-device-passed",
                Fatal,
                "this container has the driver's manager and no /dev/davinciN".into(),
                "Start the container with the wanted device, for example --device=/dev/davinci0. With \
                 the Ascend Docker Runtime set ASCEND_VISIBLE_DEVICES=0; in Kubernetes request the \
                 device plug-in's resource, such as huawei.com/Ascend910: 1.",
            )
            .shown_as(NPU_SMI_INIT),
            Finding::PartlyPassed { listed, on_pci } => row(
                "partly-passed",
                Note,
                format!("this container has {listed} of the host's {on_pci} NPUs, numbered from 0"),
                "Nothing, if this is what the container was meant to have; otherwise pass more nodes.",
            ),
            Finding::Occupied { nodes, others } => row(
                "occupied",
                if *others { Warning } else { Fatal },
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
            Finding::NodeOfNothing(node) => row(
                "node-of-nothing",
                Warning,
                format!("/dev/davinci{node} is left over: its device is gone"),
                "Create the virtual instance again, or start the container without it.",
            ),
            Finding::TableFrozen { opened, listed } => row(
                "table-frozen",
                Warning,
                format!(
                    "{opened} /dev/davinciN can be opened and the driver lists {listed}: an earlier process of \
                     this container asked before all were opened, and the table stays so until the container ends"
                ),
                "Start the container again and let this program, or the vendor's runtime, be the \
                 first to use the NPUs there.",
            ),
            Finding::TakenAway => row(
                "taken-away",
                Fatal,
                "another container took the devices while this one was setting them up".into(),
                "End the other container that uses these devices, then try again.",
            )
            .shown_as(OCCUPIED),
            Finding::StillStarting { waited } => row(
                "still-starting",
                Fatal,
                format!("the driver still waits for devices to start, after {:.1} s", waited.as_secs_f64()),
                "Wait and try again: after the driver was loaded it may take three minutes.",
            ),
            Finding::Unanswered { waited } => row(
                "unanswered",
                Warning,
                format!(
                    "the devices are listed, but questions about them were not answered within {:.1} s",
                    waited.as_secs_f64()
                ),
                "Allow more time; if that does not help, look at the devices' health and the kernel log.",
            ),
            Finding::SetupRefused(errno) => row(
                "setup-refused",
                Fatal,
                format!("the driver refused to set up this process's devices: {errno}"),
                match *errno {
                    Errno::ENOMEM => "End containers that use NPUs: the driver serves 128 at a time.",
                    _ => KERNEL_LOG,
                },
            ),
            Finding::Hidden => row(
                "hidden",
                Fatal,
                "the nodes can be opened and the driver lists no NPU: a process without permission \
                 asked first and hides them"
                    .into(),
                "End the process that was first (see /proc/uda/namespace_node), wait two seconds and try again.",
            ),
            Finding::Removed(device) => of(
                device,
                "device-removed",
                Warning,
                "was removed, although the driver still lists it".into(),
                "Put the device back or reset it (npu-smi set -t reset); until then leave it out.",
            )
            .shown_as("aclrt…: 507899"),
            Finding::Resetting(device) => of(device, "device-resetting", Warning, "is being reset".into(), WAIT),
            Finding::Starting(device) => of(device, "device-starting", Warning, "is still starting".into(), WAIT),
            Finding::Exception(device) => {
                of(device, "device-exception", Warning, "reports an exception".into(), HEALTH)
            }
            Finding::Sleeping(device) => {
                of(device, "device-sleeping", Warning, "sleeps".into(), "Wake it up (npu-smi), or use another.")
            }
            Finding::Lost(device) => {
                of(device, "device-lost", Warning, "does not answer: its link or heartbeat is lost".into(), HEALTH)
            }
            Finding::Unhealthy(device, health) => {
                of(device, "device-unhealthy", Warning, format!("has a {health} fault"), HEALTH)
            }
            Finding::VirtualInstance(device) => of(
                device,
                "virtual-instance",
                Note,
                "is a virtual instance: a part of a card, whose memory cannot be shared".into(),
                "Allocate and map as usual; to share memory between processes, use a whole device.",
            ),
            Finding::Split(device) => of(
                device,
                "split-device",
                Note,
                "is split into virtual instances: its memory cannot be shared".into(),
                "To share memory between processes, use a device that is not split.",
            ),
            Finding::MemoryDriverV3 => row(
                "memory-driver-v3",
                Fatal,
                "the memory driver is of the third kind (Ascend 950), which ascend-vmm does not speak".into(),
                "ascend-vmm drives Ascend 910, 910B, 910_93 and 310P; use the vendor's library here.",
            ),
            Finding::MemoryDriverMissing => row(
                "memory-driver-missing",
                Fatal,
                "the driver's memory module is not loaded".into(),
                "Load the driver's memory module (asdrv_svm).",
            ),
            Finding::UnknownGeneration(what) => row(
                "unknown-generation",
                Fatal,
                format!("the driver fits no generation that ascend-vmm knows ({what})"),
                "Use a newer ascend-vmm, and please report the driver's version.",
            ),
            Finding::SmallAddressSpace { bits } => row(
                "small-address-space",
                Fatal,
                format!(
                    "this kernel gives a process addresses of {bits} bits (CONFIG_ARM64_VA_BITS_{bits}), \
                     and the memory driver uses some of 45 bits"
                ),
                "Boot a kernel that was built with CONFIG_ARM64_VA_BITS_48.",
            ),
            Finding::NoDaemonNode(path, errno) => row(
                "no-daemon-node",
                Warning,
                format!("{} could not be opened: {errno}", printable_path(path)),
                "Pass /dev/hisi_hdc into the container and let this user read it; without it no \
                 device process can be started.",
            )
            .shown_as(NOT_SET_UP),
            Finding::DriverUsedHere => row(
                "driver-used-here",
                Note,
                "other code in this process has the driver open, most likely the vendor's library: the number of AI \
                 cores, the kind of machine, and whether a device was removed or is being reset were not asked, \
                 because that would end its device processes"
                    .into(),
                "Nothing; a process of its own (ascend-vmm probe) sees all facts.",
            ),
            Finding::VisibleDevicesEmpty => row(
                "visible-devices-empty",
                Warning,
                "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every device".into(),
                UNSET,
            )
            .shown_as("aclrtGetDeviceCount: 0 devices"),
            Finding::VisibleDevicesUnreadable { value, entry, kept } => row(
                "visible-devices-unreadable",
                Warning,
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
            Finding::VisibleDevicesAbsent { value, absent, listed } => row(
                "visible-devices-absent",
                Warning,
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
            Finding::Unexpected(what) => row(
                "unexpected",
                Warning,
                what.clone(),
                "Please report this with the driver's version and the kernel log.",
            ),
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
