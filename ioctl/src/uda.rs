//! Module `uda`: which devices a mount namespace has, and under which numbers.
//!
//! A *logical* id counts the devices of the caller's namespace from 0; a *physical* id (`udevid`)
//! is the minor number of `/dev/davinciN`. [`SETUP_DEV_TABLE`] builds the namespace's table from
//! the nodes that were opened before; **in a container any other query before it loses the
//! devices**. A copy that fails returns the number of bytes not copied as a *positive* value:
//! anything but 0 is a failure.

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};

declare_layouts! {
    /// Answer of [`GET_USER_INFO`].
    pub struct UserInfo = "uda_user_info", 20 {
        /// 1 on the host and in a privileged container.
        pub admin: u32 = "admin_flag" @ 0,
        pub local: u32 = "local_flag" @ 4,
        /// Logical ids are below this: 100.
        pub max_devices: u32 = "max_dev_num" @ 8,
        /// Physical ids are below this: 1124.
        pub max_physical: u32 = "max_udev_num" @ 12,
        pub support_physical: u32 = "support_udev_mng" @ 16,
    }

    /// Argument of [`SETUP_DEV_TABLE`].
    pub struct SetupTable = "uda_setup_table", 4 {
        /// Number of devices that the caller opened. More than it owns is EBUSY and drops all of
        /// them.
        pub devices: u32 = "dev_num" @ 0,
    }

    /// Argument of [`GET_DEV_LIST`].
    pub struct DeviceList = "uda_dev_list", 16 {
        pub start: u32 = "start_devid" @ 0,
        /// Exclusive; above `start` and at most [`UserInfo::max_physical`].
        pub end: u32 = "end_devid" @ 4,
        /// Address of an array of `end` [`LogicalDevice`]s, indexed by logical id. The kernel
        /// writes only the elements of devices that exist.
        pub array: u64 = "logic_dev" @ 8,
    }

    /// A device in the answer of [`GET_DEV_LIST`].
    pub struct LogicalDevice = "uda_logic_dev", 8 {
        /// Bit 0: valid. Bits 1 to 7: hardware type.
        pub valid_and_type: u8 = "valid" @ 0,
        /// 0 for a whole device, the virtual instance's number otherwise.
        pub sub_device: u8 = "sub_devid" @ 1,
        /// The card; for a virtual instance the card that it is part of.
        pub card: u16 = "phy_devid" @ 2,
        pub logical: u16 = "devid" @ 4,
        pub physical: u16 = "udevid" @ 6,
    }

    /// Argument of the id translations.
    pub struct Translation = "uda_devid_trans", 8 {
        pub from: u32 = "raw_devid" @ 0,
        pub to: u32 = "trans_devid" @ 4,
    }
}

declare_constants! {
    /// Hardware type of an NPU.
    pub const HARDWARE_DAVINCI: u8 = 0, "UDA_HW_DAVINCI";
    /// Number of ids, physical and virtual.
    pub const MAX_PHYSICAL: u32 = 1124, "ASCEND_DEV_MAX_NUM";
    /// Number of whole devices.
    pub const MAX_CARDS: u32 = 64, "ASCEND_PDEV_MAX_NUM";
    /// First physical id of a virtual instance.
    pub const FIRST_VIRTUAL: u32 = 100, "ASCEND_VDEV_ID_START";
    /// Numbers from here on are EINVAL.
    pub const NUMBERS: u8 = 8, "UDA_MAX_CMD";
}

impl LogicalDevice {
    /// Whether the kernel filled this element.
    pub const fn valid(&self) -> bool {
        self.valid_and_type & 1 != 0
    }

    /// Hardware type, [`HARDWARE_DAVINCI`] for an NPU.
    pub const fn hardware(&self) -> u8 {
        self.valid_and_type >> 1
    }
}

/// Magic of the module's commands. It is not checked.
pub const MAGIC: u8 = b'U';

const fn command<A>(
    name: &'static str,
    c_name: &'static str,
    number: u8,
    direction: Direction,
    size: u16,
    argument: &'static str,
) -> Typed<A> {
    Typed::new(name, c_name, MAGIC, number, direction, size, Some(argument))
}

/// The caller's rights and limits. Safe at any time.
pub const GET_USER_INFO: Typed<UserInfo> =
    command("GET_USER_INFO", "UDA_GET_USER_INFO", 0, Direction::Read, 20, "UserInfo");
/// Builds the namespace's table. The first call after the driver was loaded waits for all devices,
/// up to about 160 s.
pub const SETUP_DEV_TABLE: Typed<SetupTable> =
    command("SETUP_DEV_TABLE", "UDA_SETUP_DEV_TABLE", 1, Direction::Write, 4, "SetupTable");
/// The devices of the namespace.
pub const GET_DEV_LIST: Typed<DeviceList> =
    command("GET_DEV_LIST", "UDA_GET_DEV_LIST", 2, Direction::ReadWrite, 16, "DeviceList");
/// Physical to logical id, virtual instances only.
pub const UDEVID_TO_DEVID: Typed<Translation> =
    command("UDEVID_TO_DEVID", "UDA_UDEVID_TO_DEVID", 3, Direction::ReadWrite, 8, "Translation");
/// Logical to physical id.
pub const DEVID_TO_UDEVID: Typed<Translation> =
    command("DEVID_TO_UDEVID", "UDA_DEVID_TO_UDEVID", 4, Direction::ReadWrite, 8, "Translation");
/// Local to remote physical id.
pub const LUDEVID_TO_RUDEVID: Typed<Translation> =
    command("LUDEVID_TO_RUDEVID", "UDA_LUDEVID_TO_RUDEVID", 5, Direction::ReadWrite, 8, "Translation");
/// Remote to local physical id.
pub const RUDEVID_TO_LUDEVID: Typed<Translation> =
    command("RUDEVID_TO_LUDEVID", "UDA_RUDEVID_TO_LUDEVID", 6, Direction::ReadWrite, 8, "Translation");

/// The module's commands.
pub const COMMANDS: &[Command] = &[
    GET_USER_INFO.command,
    SETUP_DEV_TABLE.command,
    GET_DEV_LIST.command,
    UDEVID_TO_DEVID.command,
    DEVID_TO_UDEVID.command,
    LUDEVID_TO_RUDEVID.command,
    RUDEVID_TO_LUDEVID.command,
];
