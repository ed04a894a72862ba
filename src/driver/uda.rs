//! The module uda: which devices this process has, and under which numbers.
//!
//! SETUP_DEV_TABLE makes the table of the caller's mount namespace. It must come before every other
//! query except GET_USER_INFO, because in a container any other query loses the devices.
//! [`crate::discovery`] keeps this order.

use super::Answer;
use super::davinci::{DavinciFile, module};
use crate::error::Result;
use crate::id::{LogicalId, PhysicalId};
use ascend_ioctl::uda;

/// Most nodes `/dev/davinciN` that a host can have.
pub(crate) const MAX_PHYSICAL: u32 = uda::MAX_PHYSICAL;

/// A file of the module.
#[derive(Debug)]
pub(crate) struct Uda {
    file: DavinciFile,
    user: uda::UserInfo,
}

/// A device of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) logical: LogicalId,
    pub(crate) physical: PhysicalId,
    /// The card, and for a virtual instance its number on the card.
    pub(crate) card: PhysicalId,
    pub(crate) instance: Option<u32>,
}

impl Uda {
    /// Opens a file and sends GET_USER_INFO: the caller's rights. Safe at any time.
    pub(crate) fn open() -> Result<Uda> {
        let file = DavinciFile::open(module::UDA)?;
        let mut user = uda::UserInfo::default();
        match file.command(&uda::GET_USER_INFO, &mut user) {
            Answer::Done => {
                // These size the list of devices, so a number beyond every driver's is not
                // believed.
                user.max_devices = user.max_devices.min(MAX_PHYSICAL);
                user.max_physical = user.max_physical.min(MAX_PHYSICAL);
                Ok(Uda { file, user })
            }
            answer => Err(answer.refused(uda::GET_USER_INFO.name).operation("query this process's rights").into()),
        }
    }

    /// True if the caller sees the host's own table: on the host, or in a privileged container.
    pub(crate) fn is_admin(&self) -> bool {
        self.user.admin != 0
    }

    /// Logical ids are below this.
    pub(crate) fn max_devices(&self) -> u32 {
        self.user.max_devices
    }

    /// Physical ids are below this.
    pub(crate) fn max_physical(&self) -> u32 {
        self.user.max_physical
    }

    /// SETUP_DEV_TABLE with the number of devices whose nodes the caller opened. The first call
    /// after the driver was loaded waits for all devices, up to 160 s.
    pub(crate) fn setup_dev_table(&self, devices: u32) -> Answer {
        self.file.command(&uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices })
    }

    /// GET_DEV_LIST: the devices of the table.
    pub(crate) fn get_dev_list(&self) -> Result<Vec<Listed>, Answer> {
        let end = if self.is_admin() { self.user.max_physical } else { self.user.max_devices };
        let mut devices = vec![uda::LogicalDevice::default(); end as usize];
        let mut arg = uda::DeviceList { start: 0, end, array: devices.as_mut_ptr().expose_provenance() as u64 };
        self.file.command(&uda::GET_DEV_LIST, &mut arg).with(())?;
        let npus = devices.iter().filter(|device| device.valid() && device.hardware() == uda::HARDWARE_DAVINCI);
        let listed = npus.map(|device| Listed {
            logical: LogicalId(device.logical.into()),
            physical: PhysicalId(device.physical.into()),
            card: PhysicalId(device.card.into()),
            instance: (u32::from(device.physical) >= uda::FIRST_VIRTUAL).then_some(device.sub_device.into()),
        });
        Ok(listed.collect())
    }

    /// DEVID_TO_UDEVID: the physical id of a device.
    pub(crate) fn devid_to_udevid(&self, logical: LogicalId) -> Result<PhysicalId> {
        let mut arg = uda::Translation { from: logical.0, to: 0 };
        match self.file.command(&uda::DEVID_TO_UDEVID, &mut arg) {
            Answer::Done => Ok(PhysicalId(arg.to)),
            answer => Err(answer
                .refused(uda::DEVID_TO_UDEVID.name)
                .operation("find a device's physical id")
                .object(format!("device {logical}"))
                .into()),
        }
    }
}
