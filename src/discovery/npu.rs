//! One NPU, and the questions that its description is made from.
//!
//! No single command says whether a device can be used. GET_DEVINFO is refused with EBUSY if the
//! device was removed or is being reset, although it is still listed and has its node; GET_PCIINFO
//! distinguishes the two. ENODEV means that it is still starting, even if the state is "working"
//! already. Everything else may be missing for its own reason (firmware, environment, generation),
//! so it is optional.

use super::host_files;
use super::identity::{Identity, PciAddress};
use super::visible_devices::VisibleDevices;
use crate::driver::Answer;
use crate::driver::devmng::{DevInfo, Devmng, Machine};
use crate::driver::uda::Listed;
use crate::driver::urd::Urd;
use crate::error::{Errno, Finding, Health};
use crate::id::{LogicalId, PhysicalId, SuperPod, UserId};
use ascend_ioctl::Generation;
use std::fmt;

/// An NPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Npu {
    /// The number in this namespace, which the library's calls take.
    pub logical: LogicalId,
    /// The number on the host.
    pub physical: PhysicalId,
    /// The number in `ASCEND_RT_VISIBLE_DEVICES`; `None` if that hides the device.
    pub user: Option<UserId>,
    /// A name that is the same in every container.
    pub identity: Identity,
    /// For a virtual instance, the card and the instance's number on it.
    pub instance: Option<Instance>,
    /// See [`Npu::is_usable`].
    pub state: DeviceState,
    /// Name of the chip, like `910B3`.
    pub chip: Option<String>,
    /// Name of the chip with its family, like `Ascend910B3`.
    pub soc: Option<String>,
    /// Number of AI cores.
    pub ai_cores: Option<u32>,
    /// The PCI address.
    pub pci: Option<PciAddress>,
    /// Memory, as the firmware publishes it.
    pub hbm: Option<Hbm>,
    /// Health.
    pub health: Option<Health>,
    /// The place in a super pod.
    pub super_pod: Option<SuperPod>,
    /// Whether the device is split into virtual instances.
    pub split: Option<Split>,
    /// The kind of machine, according to the driver.
    pub machine: Option<Machine>,
}

/// The card of a virtual instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Instance {
    /// The card that it is a part of.
    pub card: PhysicalId,
    /// Its number on the card.
    pub number: u32,
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hbm {
    /// All memory.
    pub total: u64,
    /// Free memory.
    pub free: u64,
}

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceState {
    /// It can be used.
    Working,
    /// Not ready yet.
    Starting,
    /// It reports an exception.
    Exception,
    /// It sleeps.
    Sleeping,
    /// Its link or heartbeat is lost.
    Lost,
    /// It was removed; the driver still lists it.
    Removed,
    /// It is being reset.
    Resetting,
    /// The driver does not say.
    Unknown,
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DeviceState::Working => "working",
            DeviceState::Starting => "starting",
            DeviceState::Exception => "exception",
            DeviceState::Sleeping => "sleeping",
            DeviceState::Lost => "lost",
            DeviceState::Removed => "removed",
            DeviceState::Resetting => "resetting",
            DeviceState::Unknown => "unknown",
        })
    }
}

/// Whether a device is split into virtual instances.
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

/// What the questions about a device are asked of.
pub(super) struct Sources<'a> {
    /// `None` if its file must not be opened.
    pub(super) devmng: Option<&'a Devmng>,
    pub(super) urd: Option<&'a Urd>,
    /// The generation of these modules, if it is known.
    pub(super) generation: Option<Generation>,
    pub(super) visible: &'a VisibleDevices,
    pub(super) on_pci: &'a [PciAddress],
}

impl Npu {
    /// Asks everything about a device of the list.
    pub(super) fn ask(sources: &Sources<'_>, listed: &Listed) -> Npu {
        let unasked = Npu::unasked(listed, sources.visible);
        let logical = unasked.logical;
        let info = sources.devmng.map(|devmng| devmng.get_devinfo(logical));
        let pci = sources.devmng.map(|devmng| devmng.get_pciinfo(logical));
        let state = sources.state(logical, info.as_ref(), pci.as_ref());
        let pci = match pci {
            Some(pci) => pci.ok(),
            None => sources.urd.and_then(|urd| urd.pcie_info(logical)),
        };
        let pci = pci.map(|(bus, device, function)| {
            let domain = host_files::domain(sources.on_pci, bus, device, function);
            PciAddress { domain, bus, device, function }
        });
        let info = info.and_then(Result::ok);
        let chip = sources.urd.and_then(|urd| urd.chip_info(logical));
        let soc = match sources.devmng {
            Some(_) => info.as_ref().and_then(|info| info.soc.clone()),
            None => chip.as_ref().map(|chip| format!("Ascend{chip}")),
        };
        let published = sources.urd.zip(sources.generation).and_then(|(urd, generation)| urd.hbm(logical, generation));
        let super_pod = sources.urd.and_then(|urd| urd.spod_info(logical));
        let machine = sources.devmng.and_then(|devmng| devmng.get_host_phy_mach_flag(logical));
        Npu {
            identity: Identity {
                pci: pci.map(|pci| (pci.bus, pci.device, pci.function)),
                sdid: super_pod.map(|pod| pod.sdid),
                ..unasked.identity
            },
            state,
            chip,
            soc,
            ai_cores: info.and_then(|info| info.ai_cores),
            pci,
            hbm: published.map(|(total, free)| Hbm { total, free }),
            health: sources.health(logical),
            super_pod,
            split: sources.split(logical, machine),
            machine,
            ..unasked
        }
    }

    /// A device of the list, without any answers.
    pub(super) fn unasked(listed: &Listed, visible: &VisibleDevices) -> Npu {
        let (logical, physical) = (listed.logical, listed.physical);
        Npu {
            logical,
            physical,
            user: visible.user(logical),
            identity: Identity { pci: None, physical: physical.0, sdid: None },
            instance: listed.instance.map(|number| Instance { card: listed.card, number }),
            state: DeviceState::Unknown,
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

    /// True if memory can be allocated on the device.
    pub fn is_usable(&self) -> bool {
        self.state == DeviceState::Working
    }

    /// Why memory of this device cannot be shared between processes; `None` if it can. The host
    /// driver does not check this.
    pub fn sharing_obstacle(&self) -> Option<&'static str> {
        match (self.instance, self.split) {
            (Some(_), _) => Some("it is a virtual instance"),
            (None, Some(Split::VirtualMachines)) => Some("the device is split for virtual machines"),
            (None, Some(Split::Containers)) => Some("the device is split for containers"),
            (None, Some(Split::Other(_))) => Some("the device is split in a way that ascend-vmm does not know"),
            (None, Some(Split::Whole) | None) => None,
        }
    }

    /// What is wrong with it or worth knowing.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        match self.state {
            DeviceState::Working | DeviceState::Unknown => {}
            DeviceState::Starting => findings.push(Finding::Starting(self.logical)),
            DeviceState::Exception => findings.push(Finding::Exception(self.logical)),
            DeviceState::Sleeping => findings.push(Finding::Sleeping(self.logical)),
            DeviceState::Lost => findings.push(Finding::Lost(self.logical)),
            DeviceState::Removed => findings.push(Finding::Removed(self.logical)),
            DeviceState::Resetting => findings.push(Finding::Resetting(self.logical)),
        }
        if let Some(health @ (Health::Minor | Health::Major | Health::Fatal)) = self.health {
            findings.push(Finding::Unhealthy(self.logical, health));
        }
        match (self.instance, self.split) {
            (Some(_), _) => findings.push(Finding::VirtualInstance(self.logical)),
            _ if self.machine == Some(Machine::Virtual) => findings.push(Finding::VirtualMachine(self.logical)),
            (None, Some(Split::Whole) | None) => {}
            (None, Some(_)) => findings.push(Finding::Split(self.logical)),
        }
        findings
    }
}

impl Sources<'_> {
    fn state<P>(
        &self,
        device: LogicalId,
        info: Option<&Result<DevInfo, Answer>>,
        pci: Option<&Result<P, Answer>>,
    ) -> DeviceState {
        const BUSY: Answer = Answer::Refused(Errno::EBUSY);
        match (info, pci) {
            (Some(Err(BUSY)), Some(Err(BUSY))) => return DeviceState::Removed,
            (Some(Err(BUSY)), _) => return DeviceState::Resetting,
            (Some(Err(Answer::Refused(Errno::ENODEV))), _) => return DeviceState::Starting,
            _ => {}
        }
        match self.urd.and_then(|urd| urd.init_status(device)).map(status) {
            // The task scheduler's heartbeat says more, if its module is loaded.
            Some(DeviceState::Working) => {
                self.urd.and_then(|urd| urd.ts_heartbeat(device)).map_or(DeviceState::Working, status)
            }
            Some(state) => state,
            None => DeviceState::Unknown,
        }
    }

    /// The worse of the two that the driver keeps.
    fn health(&self, device: LogicalId) -> Option<Health> {
        let first = self.devmng.and_then(|devmng| devmng.get_device_health_status(device));
        let second = self.urd.and_then(|urd| urd.health(device));
        Some(match first.max(second)? {
            0 => Health::Normal,
            1 => Health::Minor,
            2 => Health::Major,
            _ => Health::Fatal,
        })
    }

    /// A guest of a virtual machine sees a part of a device, whatever URD says.
    fn split(&self, device: LogicalId, machine: Option<Machine>) -> Option<Split> {
        if machine == Some(Machine::Virtual) {
            return Some(Split::VirtualMachines);
        }
        Some(match self.urd?.split_mode(device)? {
            0 => Split::Whole,
            1 => Split::VirtualMachines,
            2 => Split::Containers,
            other => Split::Other(other),
        })
    }
}

fn status(number: u32) -> DeviceState {
    match number {
        0 => DeviceState::Starting,
        1 => DeviceState::Working,
        2 => DeviceState::Exception,
        3 => DeviceState::Sleeping,
        4 => DeviceState::Lost,
        _ => DeviceState::Unknown,
    }
}
