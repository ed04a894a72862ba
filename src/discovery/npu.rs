//! One NPU, and the questions that its description is made from.
//!
//! No single command tells whether a device can be used. GET_DEVINFO is refused with EBUSY when it was removed or is being reset, although
//! the list and the node are still there; GET_PCIINFO tells these two apart. ENODEV means that it is still starting, even when the state
//! says "working" already. Everything else may be missing on its own (firmware, environment, generation), so it is optional.

use super::finding::Finding;
use super::host;
use super::identity::{Identity, PciAddress, SuperPod};
use super::urd::Urd;
use super::{LogicalId, PhysicalId, UserId, VisibleDevices};
use crate::devmng::{Answer, Devmng};
use ascend_ioctl::{devmng, uda, urd};
use nix::errno::Errno;
use std::ffi::CStr;
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An NPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Npu {
    /// Its number in this namespace: what the library's calls take.
    pub logical: LogicalId,
    /// Its number on the host.
    pub physical: PhysicalId,
    /// Its number in `ASCEND_RT_VISIBLE_DEVICES`; `None` if that hides it.
    pub user: Option<UserId>,
    /// The same name for it in every container.
    pub identity: Identity,
    /// For a virtual instance, the card and the instance's number on it.
    pub instance: Option<Instance>,
    /// Whether it can be used.
    pub state: State,
    /// Name of the chip, like `910B3`.
    pub chip: Option<String>,
    /// Name of the chip with its family, like `Ascend910B3`.
    pub soc: Option<String>,
    /// Number of AI cores.
    pub ai_cores: Option<u32>,
    /// Where it is on PCI.
    pub pci: Option<PciAddress>,
    /// Its memory, as its firmware publishes it.
    pub hbm: Option<Hbm>,
    /// Its health.
    pub health: Option<Health>,
    /// Its place in a super pod.
    pub super_pod: Option<SuperPod>,
    /// Whether it is cut up.
    pub split: Option<Split>,
    /// What kind of machine the driver takes this for.
    pub machine: Option<Machine>,
}

/// A virtual instance's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Instance {
    /// The card that it is cut from.
    pub card: PhysicalId,
    /// Its number on the card.
    pub number: u32,
}

impl Instance {
    fn of(listed: &uda::LogicalDevice) -> Option<Instance> {
        let instance = Instance { card: PhysicalId(listed.card.into()), number: listed.sub_device.into() };
        (u32::from(listed.physical) >= uda::FIRST_VIRTUAL).then_some(instance)
    }
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hbm {
    /// All of it.
    pub total: u64,
    /// What nobody uses.
    pub free: u64,
}

/// Whether a device can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It can.
    Working,
    /// Not ready yet.
    Starting,
    /// It reports an exception.
    Exception,
    /// It sleeps.
    Sleeping,
    /// Its link or heartbeat is lost.
    Lost,
    /// It was taken away; the driver still lists it.
    Removed,
    /// It is being reset.
    Resetting,
    /// The driver does not say.
    Unknown,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::Working => "working",
            State::Starting => "starting",
            State::Exception => "exception",
            State::Sleeping => "sleeping",
            State::Lost => "lost",
            State::Removed => "removed",
            State::Resetting => "resetting",
            State::Unknown => "unknown",
        })
    }
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

/// Whether a device is cut up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// It is whole.
    Whole,
    /// For virtual machines.
    VirtualMachines,
    /// For containers.
    Containers,
    /// A mode that this library does not know.
    Other(u32),
}

/// What the driver takes a machine for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// A physical machine.
    Physical,
    /// A virtual machine.
    Virtual,
    /// A container.
    Container,
}

/// Longer than any known generation's GET_DEVINFO struct: the kernel copies its own size.
#[repr(C, align(8))]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
struct DevInfoBuffer([u8; 512]);

/// Where a device's questions go.
pub(super) struct Sources<'a> {
    pub(super) devmng: &'a Devmng,
    pub(super) urd: Option<&'a Urd>,
    /// The key of published values, if the generation is known.
    pub(super) published: Option<urd::Key>,
    pub(super) visible: &'a VisibleDevices,
    pub(super) functions: &'a [PciAddress],
}

impl Npu {
    /// Asks everything about a device of the list.
    pub(super) fn ask(sources: &Sources<'_>, listed: &uda::LogicalDevice) -> Npu {
        let unasked = Npu::unasked(listed, sources.visible);
        let logical = unasked.logical;
        let info = sources.info(logical);
        let pci = sources.pci(logical);
        let state = sources.state(logical, &info, &pci);
        let pci = pci.ok();
        let info = info.ok();
        let super_pod = sources.super_pod(logical);
        Npu {
            identity: Identity {
                pci: pci.map(|pci| (pci.bus, pci.device, pci.function)),
                sdid: super_pod.map(|pod| pod.sdid),
                ..unasked.identity
            },
            state,
            chip: sources.chip(logical),
            soc: info.as_ref().and_then(|info| info.soc.clone()),
            ai_cores: info.and_then(|info| info.ai_cores),
            pci,
            hbm: sources.hbm(logical),
            health: sources.health(logical),
            super_pod,
            split: sources.split(logical),
            machine: sources.machine(logical),
            ..unasked
        }
    }

    /// A device of the list about which nothing could be asked.
    pub(super) fn unasked(listed: &uda::LogicalDevice, visible: &VisibleDevices) -> Npu {
        let logical = LogicalId(listed.logical.into());
        let physical = PhysicalId(listed.physical.into());
        Npu {
            logical,
            physical,
            user: visible.user(logical),
            identity: Identity { pci: None, physical: physical.0, sdid: None },
            instance: Instance::of(listed),
            state: State::Unknown,
            chip: None,
            soc: None,
            ai_cores: None,
            pci: None,
            hbm: None,
            health: None,
            super_pod: None,
            split: None,
            machine: None,
        }
    }

    /// Whether memory can be allocated on it.
    pub fn is_usable(&self) -> bool {
        self.state == State::Working
    }

    /// Why memory of this device cannot be shared between processes; `None` if it can. The host's driver does not check this itself.
    pub fn sharing_obstacle(&self) -> Option<&'static str> {
        match (self.instance, self.split) {
            (Some(_), _) => Some("it is a virtual instance"),
            (None, Some(Split::VirtualMachines)) => Some("the device is cut up for virtual machines"),
            (None, Some(Split::Containers)) => Some("the device is cut up for containers"),
            (None, Some(Split::Other(_))) => Some("the device is cut up in a way that ascend-vmm does not know"),
            (None, Some(Split::Whole) | None) => None,
        }
    }

    /// What is wrong with it or worth knowing.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        match self.state {
            State::Working | State::Unknown => {}
            State::Starting => findings.push(Finding::Starting(self.logical)),
            State::Exception => findings.push(Finding::Exception(self.logical)),
            State::Sleeping => findings.push(Finding::Sleeping(self.logical)),
            State::Lost => findings.push(Finding::Lost(self.logical)),
            State::Removed => findings.push(Finding::Removed(self.logical)),
            State::Resetting => findings.push(Finding::Resetting(self.logical)),
        }
        if let Some(health @ (Health::Minor | Health::Major | Health::Fatal)) = self.health {
            findings.push(Finding::Unhealthy(self.logical, health));
        }
        match (self.instance, self.split) {
            (Some(_), _) => findings.push(Finding::VirtualInstance(self.logical)),
            (None, Some(Split::Whole) | None) => {}
            (None, Some(_)) => findings.push(Finding::Split(self.logical)),
        }
        findings
    }
}

/// What GET_DEVINFO tells that we use.
struct Info {
    soc: Option<String>,
    ai_cores: Option<u32>,
}

impl Sources<'_> {
    fn info(&self, device: LogicalId) -> Result<Info, Answer> {
        let mut buffer = DevInfoBuffer([0; 512]);
        buffer.0[4..8].copy_from_slice(&device.0.to_ne_bytes());
        match self.command(&devmng::GET_DEVINFO, &mut buffer) {
            Answer::Done => {}
            refused => return Err(refused),
        }
        // Two fields in front of the name grew in 26.1: the place of the name tells which layout this is.
        let of = |soc: &[u8; 32], cores: u32| {
            let soc = text(soc).filter(|name| name.starts_with("Ascend"))?;
            Some(Info { soc: Some(soc), ai_cores: (cores != 0).then_some(cores) })
        };
        let newest = devmng::DevInfo::read_from_prefix(&buffer.0).ok();
        let older = devmng::DevInfo85::read_from_prefix(&buffer.0).ok();
        Ok(newest
            .and_then(|(info, _)| of(&info.soc_version, info.ai_core_num))
            .or_else(|| older.and_then(|(info, _)| of(&info.soc_version, info.ai_core_num)))
            .unwrap_or(Info { soc: None, ai_cores: None }))
    }

    fn pci(&self, device: LogicalId) -> Result<PciAddress, Answer> {
        let mut info = devmng::PciInfo { device: device.0, ..Default::default() };
        match self.command(&devmng::GET_PCIINFO, &mut info) {
            Answer::Done => {
                let domain = host::domain(self.functions, info.bus, info.slot, info.function);
                Ok(PciAddress { domain, bus: info.bus, device: info.slot, function: info.function })
            }
            refused => Err(refused),
        }
    }

    fn state(&self, device: LogicalId, info: &Result<Info, Answer>, pci: &Result<PciAddress, Answer>) -> State {
        const BUSY: Answer = Answer::Refused(Errno::EBUSY);
        match (info, pci) {
            (Err(BUSY), Err(BUSY)) => return State::Removed,
            (Err(BUSY), _) => return State::Resetting,
            (Err(Answer::Refused(Errno::ENODEV)), _) => return State::Starting,
            _ => {}
        }
        match self.number(device, &urd::INIT_STATUS).map(status) {
            // The task scheduler's heartbeat says more, where its module is loaded.
            Some(State::Working) => {
                let input = urd::TsHeartbeatIn { device: device.0, ..Default::default() };
                let heartbeat = self.urd.and_then(|urd| urd.ask::<_, u32>(device, &urd::TS_HEARTBEAT, &input).ok());
                heartbeat.map_or(State::Working, status)
            }
            Some(state) => state,
            None => State::Unknown,
        }
    }

    fn chip(&self, device: LogicalId) -> Option<String> {
        let info: urd::ChipInfo = self.urd?.ask(device, &urd::CHIP_INFO, &device.0).ok()?;
        text(&info.text.name)
    }

    fn hbm(&self, device: LogicalId) -> Option<Hbm> {
        let (total, free) = self.urd?.hbm(device, self.published.as_ref()?)?;
        Some(Hbm { total, free })
    }

    /// Two parts of the driver keep it; the worse counts.
    fn health(&self, device: LogicalId) -> Option<Health> {
        let mut arg = devmng::Health { device: device.0, health: 0 };
        let first = (self.command(&devmng::GET_DEVICE_HEALTH_STATUS, &mut arg) == Answer::Done).then_some(arg.health);
        let second = self.number(device, &urd::HEALTH);
        Some(match first.max(second)? {
            0 => Health::Normal,
            1 => Health::Minor,
            2 => Health::Major,
            _ => Health::Fatal,
        })
    }

    fn super_pod(&self, device: LogicalId) -> Option<SuperPod> {
        self.urd?.super_pod(device)
    }

    /// In a virtual machine the device that the guest sees is a part, whatever URD says.
    fn split(&self, device: LogicalId) -> Option<Split> {
        if self.machine(device) == Some(Machine::Virtual) {
            return Some(Split::VirtualMachines);
        }
        Some(match self.number(device, &urd::SPLIT_MODE)? {
            0 => Split::Whole,
            1 => Split::VirtualMachines,
            2 => Split::Containers,
            other => Split::Other(other),
        })
    }

    fn machine(&self, device: LogicalId) -> Option<Machine> {
        let mut arg = devmng::MachineFlag { device: device.0, flag: 0 };
        match (self.command(&devmng::GET_HOST_PHY_MACH_FLAG, &mut arg), arg.flag) {
            (Answer::Done, devmng::MACHINE_PHYSICAL) => Some(Machine::Physical),
            (Answer::Done, devmng::MACHINE_VIRTUAL) => Some(Machine::Virtual),
            (Answer::Done, devmng::MACHINE_CONTAINER) => Some(Machine::Container),
            _ => None,
        }
    }

    /// The many keys that take a logical id and answer a number.
    fn number(&self, device: LogicalId, key: &urd::Key) -> Option<u32> {
        self.urd?.ask(device, key, &device.0).ok()
    }

    fn command<T: FromBytes + IntoBytes + Immutable>(&self, command: &ascend_ioctl::Command, arg: &mut T) -> Answer {
        match self.devmng.command(command, arg) {
            Ok(answer) => answer,
            Err(error) => Answer::Refused(error.errno().unwrap_or(Errno::EIO)),
        }
    }
}

fn status(number: u32) -> State {
    match number {
        0 => State::Starting,
        1 => State::Working,
        2 => State::Exception,
        3 => State::Sleeping,
        4 => State::Lost,
        _ => State::Unknown,
    }
}

/// A NUL-terminated text; what is behind the NUL is left over from before.
fn text(bytes: &[u8]) -> Option<String> {
    let text = CStr::from_bytes_until_nul(bytes).ok()?.to_str().ok()?;
    (!text.is_empty()).then(|| text.to_owned())
}
