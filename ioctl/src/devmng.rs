//! Module `DEVMNG`: identity of devices and of processes.
//!
//! Commands are `_IO('M', n)`. The kernel copies its own struct size, so the buffers here are those
//! of the newest generation. **Closing any DEVMNG file of a process removes the process's
//! registration and reports its death to every device**: a process opens exactly one and closes it
//! last. ENODEV and EFAULT may mean an unreadable pointer here instead of a missing device.

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

declare_layouts! {
    /// Argument of [`GET_PCIINFO`].
    pub struct PciInfo = "devdrv_pci_info", 8 {
        pub device: u32 = "dev_id" @ 0,
        pub bus: u8 = "bus_number" @ 4,
        pub slot: u8 = "dev_number" @ 5,
        pub function: u8 = "function_number" @ 6,
        pub _pad0: [u8; 1],
    }

    /// Argument of [`GET_PCIE_ID_INFO`].
    pub struct PcieIdInfo = "dmanage_pcie_id_info", 32 {
        pub vendor: u32 = "venderid" @ 0,
        pub subvendor: u32 = "subvenderid" @ 4,
        pub device: u32 = "deviceid" @ 8,
        pub subdevice: u32 = "subdeviceid" @ 12,
        pub bus: u32 = "bus" @ 16,
        pub slot: u32 = "device" @ 20,
        pub function: u32 = "fn" @ 24,
        /// Logical id.
        pub logical: u32 = "davinci_id" @ 28,
    }

    /// Argument of [`GET_DEVINFO`] in 26.1.
    pub struct DevInfo = "devdrv_manager_hccl_devinfo", 320, since V26_1 {
        pub env_type: u8 = "env_type" @ 0,
        pub _pad0: [u8; 3],
        /// Logical id.
        pub device: u32 = "dev_id" @ 4,
        pub ctrl_cpu_ip: u32 = "ctrl_cpu_ip" @ 8,
        pub ctrl_cpu_id: u32 = "ctrl_cpu_id" @ 12,
        pub ctrl_cpu_core_num: u32 = "ctrl_cpu_core_num" @ 16,
        pub _pad1: [u8; 4],
        pub ctrl_cpu_occupy_bitmap: u64 = "ctrl_cpu_occupy_bitmap" @ 24,
        pub ctrl_cpu_endian_little: u32 = "ctrl_cpu_endian_little" @ 32,
        pub ts_cpu_core_num: u32 = "ts_cpu_core_num" @ 36,
        pub ai_cpu_core_num: u32 = "ai_cpu_core_num" @ 40,
        pub ai_core_num: u32 = "ai_core_num" @ 44,
        pub ai_cpu_bitmap: u64 = "ai_cpu_bitmap" @ 48,
        pub ai_core_id: u32 = "ai_core_id" @ 56,
        pub ai_cpu_core_id: u32 = "ai_cpu_core_id" @ 60,
        pub hardware_version: u32 = "hardware_version" @ 64,
        pub ts_num: u32 = "ts_num" @ 68,
        pub aicore_freq: u64 = "aicore_freq" @ 72,
        pub cpu_system_count: u64 = "cpu_system_count" @ 80,
        pub monotonic_raw_time_ns: u64 = "monotonic_raw_time_ns" @ 88,
        pub vector_core_num: u32 = "vector_core_num" @ 96,
        pub _pad2: [u8; 4],
        pub vector_core_freq: u64 = "vector_core_freq" @ 104,
        pub computing_power: [u64; 1] = "computing_power" @ 112,
        pub ffts_type: u32 = "ffts_type" @ 120,
        pub chip_id: u32 = "chip_id" @ 124,
        pub die_id: u32 = "die_id" @ 128,
        pub addr_mode: u32 = "addr_mode" @ 132,
        pub connect_type: u32 = "host_device_connect_type" @ 136,
        pub mainboard_id: u32 = "mainboard_id" @ 140,
        /// `Ascend910B3` and the like. "Ascend" is here from 26.1 on, and at 0x88 before.
        pub soc_version: [u8; 32] = "soc_version" @ 144,
        pub aicore_bitmap: [u64; 2] = "aicore_bitmap" @ 176,
        pub vector_core_bitmap: [u64; 2] = "vector_core_bitmap" @ 192,
        pub product_type: u8 = "product_type" @ 208,
        pub _pad3: [u8; 3],
        pub reserved: [u32; 27] = "resv" @ 212,
    }

    /// Argument of [`GET_DEVINFO`] in 8.5.0 and 9.0.0.
    pub struct DevInfo85 = "devdrv_manager_hccl_devinfo", 312, until V9_0_0 {
        pub env_type: u8 = "env_type" @ 0,
        pub _pad0: [u8; 3],
        pub device: u32 = "dev_id" @ 4,
        pub ctrl_cpu_ip: u32 = "ctrl_cpu_ip" @ 8,
        pub ctrl_cpu_id: u32 = "ctrl_cpu_id" @ 12,
        pub ctrl_cpu_core_num: u32 = "ctrl_cpu_core_num" @ 16,
        pub ctrl_cpu_occupy_bitmap: u32 = "ctrl_cpu_occupy_bitmap" @ 20,
        pub ctrl_cpu_endian_little: u32 = "ctrl_cpu_endian_little" @ 24,
        pub ts_cpu_core_num: u32 = "ts_cpu_core_num" @ 28,
        pub ai_cpu_core_num: u32 = "ai_cpu_core_num" @ 32,
        pub ai_core_num: u32 = "ai_core_num" @ 36,
        pub ai_cpu_bitmap: u32 = "ai_cpu_bitmap" @ 40,
        pub ai_core_id: u32 = "ai_core_id" @ 44,
        pub ai_cpu_core_id: u32 = "ai_cpu_core_id" @ 48,
        pub hardware_version: u32 = "hardware_version" @ 52,
        pub ts_num: u32 = "ts_num" @ 56,
        pub _pad1: [u8; 4],
        pub aicore_freq: u64 = "aicore_freq" @ 64,
        pub cpu_system_count: u64 = "cpu_system_count" @ 72,
        pub monotonic_raw_time_ns: u64 = "monotonic_raw_time_ns" @ 80,
        pub vector_core_num: u32 = "vector_core_num" @ 88,
        pub _pad2: [u8; 4],
        pub vector_core_freq: u64 = "vector_core_freq" @ 96,
        pub computing_power: [u64; 1] = "computing_power" @ 104,
        pub ffts_type: u32 = "ffts_type" @ 112,
        pub chip_id: u32 = "chip_id" @ 116,
        pub die_id: u32 = "die_id" @ 120,
        pub addr_mode: u32 = "addr_mode" @ 124,
        pub connect_type: u32 = "host_device_connect_type" @ 128,
        pub mainboard_id: u32 = "mainboard_id" @ 132,
        pub soc_version: [u8; 32] = "soc_version" @ 136,
        pub aicore_bitmap: [u64; 2] = "aicore_bitmap" @ 168,
        pub product_type: u8 = "product_type" @ 184,
        pub _pad3: [u8; 3],
        pub reserved: [u32; 31] = "resv" @ 188,
    }

    /// Argument of [`GET_HOST_PHY_MACH_FLAG`].
    pub struct MachineFlag = "devdrv_get_host_phy_mach_flag_para", 8 {
        pub device: u32 = "devId" @ 0,
        /// One of the `MACHINE_*` values.
        pub flag: u32 = "host_flag" @ 4,
    }

    /// Argument of [`GET_DEVICE_HEALTH_STATUS`].
    pub struct Health = "devdrv_device_health_status", 8 {
        pub device: u32 = "device_id" @ 0,
        /// 0 normal, 1 minor, 2 major, 3 fatal.
        pub health: u32 = "device_health_status" @ 4,
    }

    /// Argument of [`CONTAINER_CMD`].
    pub struct ContainerArg = "devdrv_container_para", 32 {
        pub call: ContainerCall = "para" @ 0,
        pub admin: u32 = "admin" @ 24,
        pub _pad0: [u8; 4],
    }

    /// The query in a [`ContainerArg`].
    pub struct ContainerCall = "devdrv_dfx_para", 24 {
        /// Ignored.
        pub device: u32 = "devid" @ 0,
        /// [`BARE_TGID`] or [`BARE_PID`].
        pub command: u32 = "cmd" @ 4,
        pub input: u64 = "in" @ 8,
        /// Address of an i32.
        pub output: u64 = "out" @ 16,
    }

    /// Answer of [`GET_PROCESS_SIGN`].
    pub struct ProcessSign = "process_sign", 60 {
        /// The process's id in the initial pid namespace.
        pub tgid: i32 = "tgid" @ 0,
        /// NUL-terminated text; 48 zeros in every generation.
        pub sign: [u8; 49] = "sign" @ 4,
        pub reserved: [u8; 4] = "resv" @ 53,
        pub _pad0: [u8; 3],
    }

    /// Argument of [`QUERY_DEV_PID`].
    pub struct QueryPid = "devdrv_ioctl_para_query_pid", 20 {
        /// Out: the device process's pid.
        pub pid: i32 = "pid" @ 0,
        /// Logical id.
        pub device: u32 = "chip_id" @ 4,
        pub vf: u32 = "vfid" @ 8,
        /// In the caller's pid namespace.
        pub host_pid: i32 = "host_pid" @ 12,
        /// 0: the process that memory needs.
        pub cp_type: u32 = "cp_type" @ 16,
    }
}

/// Argument of [`GET_DEVINFO`] with room behind it: the kernel copies its own size, and a newer
/// kernel's struct may be longer than any that is known.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DevInfoRoom {
    /// In the layout of 26.1; that of older generations begins at the same place.
    pub info: DevInfo,
    /// Room.
    pub room: [u64; 24],
}

declare_constants! {
    /// Length of [`ProcessSign::sign`].
    pub const SIGN_LENGTH: usize = 49, "PROCESS_SIGN_LENGTH";
    /// Magic of the module's commands. It is not checked.
    pub const MAGIC: u8 = b'M', "DEVDRV_MANAGER_MAGIC";
    /// [`ContainerCall::command`]: the calling thread's id in the initial pid namespace.
    pub const BARE_PID: u32 = 1, "DEVDRV_CONTAINER_GET_BARE_PID";
    /// [`ContainerCall::command`]: the calling process's id in the initial pid namespace.
    pub const BARE_TGID: u32 = 2, "DEVDRV_CONTAINER_GET_BARE_TGID";
    /// [`MachineFlag::flag`]: physical machine.
    pub const MACHINE_PHYSICAL: u32 = 0x5A6B_7C8D, "DEVDRV_HOST_PHY_MACH_FLAG";
    /// [`MachineFlag::flag`]: virtual machine.
    pub const MACHINE_VIRTUAL: u32 = 0x1A2B_3C4D, "DEVDRV_HOST_VM_MACH_FLAG";
    /// [`MachineFlag::flag`]: container.
    pub const MACHINE_CONTAINER: u32 = 0xA4B3_C2D1, "DEVDRV_HOST_CONTAINER_MACH_FLAG";
    /// Positive answer of [`QUERY_DEV_PID`]: no device process is bound to this host process.
    pub const NO_PROCESS: i32 = 62, "DRV_ERROR_NO_PROCESS";
}

const fn command<A>(name: &'static str, c_name: &'static str, number: u8, argument: Option<&'static str>) -> Typed<A> {
    Typed::new(name, c_name, MAGIC, number, Direction::None, 0, argument)
}

/// PCI address.
pub const GET_PCIINFO: Typed<PciInfo> = command("GET_PCIINFO", "DEVDRV_MANAGER_GET_PCIINFO", 1, Some("PciInfo"));
/// Out u32: 1 on a host.
pub const GET_PLATINFO: Typed<u32> = command("GET_PLATINFO", "DEVDRV_MANAGER_GET_PLATINFO", 3, None);
/// In and out i32: the older query of a device's state.
pub const DEVICE_STATUS: Typed<i32> = command("DEVICE_STATUS", "DEVDRV_MANAGER_DEVICE_STATUS", 7, None);
/// Device facts: [`DevInfo`] or [`DevInfo85`]. Only the plain number works; with size bits it is
/// EINVAL.
pub const GET_DEVINFO: Typed<DevInfoRoom> = command("GET_DEVINFO", "DEVDRV_MANAGER_GET_DEVINFO", 20, Some("DevInfo"));
/// PCI ids. Only the plain number works.
pub const GET_PCIE_ID_INFO: Typed<PcieIdInfo> =
    command("GET_PCIE_ID_INFO", "DEVDRV_MANAGER_GET_PCIE_ID_INFO", 21, Some("PcieIdInfo"));
/// Process ids in the initial pid namespace. Needs no device and is safe at any time.
pub const CONTAINER_CMD: Typed<ContainerArg> =
    command("CONTAINER_CMD", "DEVDRV_MANAGER_CONTAINER_CMD", 58, Some("ContainerArg"));
/// Physical machine, virtual machine or container.
pub const GET_HOST_PHY_MACH_FLAG: Typed<MachineFlag> =
    command("GET_HOST_PHY_MACH_FLAG", "DEVDRV_MANAGER_GET_HOST_PHY_MACH_FLAG", 59, Some("MachineFlag"));
/// Out u32: 1 in an ordinary container. Safe at any time.
pub const GET_CONTAINER_FLAG: Typed<u32> =
    command("GET_CONTAINER_FLAG", "DEVDRV_MANAGER_GET_CONTAINER_FLAG", 108, None);
/// Registers the calling process and returns its identity. The device checks it when it binds a
/// device process to the caller.
pub const GET_PROCESS_SIGN: Typed<ProcessSign> =
    command("GET_PROCESS_SIGN", "DEVDRV_MANAGER_GET_PROCESS_SIGN", 112, Some("ProcessSign"));
/// Out i32: the level from which the driver's modules write to the kernel log, 0 to 7. Safe at any
/// time.
pub const GET_CONSOLE_LOG_LEVEL: Typed<i32> =
    command("GET_CONSOLE_LOG_LEVEL", "DEVDRV_MANAGER_GET_CONSOLE_LOG_LEVEL", 154, None);
/// Health of a device.
pub const GET_DEVICE_HEALTH_STATUS: Typed<Health> =
    command("GET_DEVICE_HEALTH_STATUS", "DEVDRV_MANAGER_GET_DEVICE_HEALTH_STATUS", 164, Some("Health"));
/// The device process that is bound to a host process.
pub const QUERY_DEV_PID: Typed<QueryPid> =
    command("QUERY_DEV_PID", "DEVDRV_MANAGER_QUERY_DEV_PID", 182, Some("QueryPid"));

/// The module's commands that this project knows.
pub const COMMANDS: &[Command] = &[
    GET_PCIINFO.command,
    GET_PLATINFO.command,
    DEVICE_STATUS.command,
    GET_DEVINFO.command,
    GET_PCIE_ID_INFO.command,
    CONTAINER_CMD.command,
    GET_HOST_PHY_MACH_FLAG.command,
    GET_CONTAINER_FLAG.command,
    GET_PROCESS_SIGN.command,
    GET_CONSOLE_LOG_LEVEL.command,
    GET_DEVICE_HEALTH_STATUS.command,
    QUERY_DEV_PID.command,
];
