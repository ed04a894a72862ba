//! Module `URD`: feature queries.
//!
//! One ioctl, [`CALL`], serves all features; a [`Key`] names the feature. An unknown key is
//! EOPNOTSUPP without a line in the kernel log. The answer may be a *positive* number: 46 (not
//! allowed for the caller's role), 65534 (not in this environment), or an error number of the
//! feature's handler. **In a container every known key loses the devices if it is used before the
//! table was set up** ([`crate::uda::SETUP_DEV_TABLE`]).

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};

declare_layouts! {
    /// Argument of [`CALL`].
    pub struct CallArg = "urd_ioctl_arg", 64 {
        /// Logical id; used by some features only (the others take it from the input).
        pub device: u32 = "devid" @ 0,
        pub _pad0: [u8; 4],
        pub key: CallKey = "cmd" @ 8,
        pub buffers: CallBuffers = "cmd_para" @ 32,
    }

    /// The feature in a [`CallArg`].
    pub struct CallKey = "urd_cmd", 24 {
        pub main: u32 = "main_cmd" @ 0,
        pub sub: u32 = "sub_cmd" @ 4,
        /// Address of the filter text, 0 if there is none.
        pub filter: u64 = "filter" @ 8,
        /// Its length, at most 128.
        pub filter_length: u32 = "filter_len" @ 16,
        pub _pad0: [u8; 4],
    }

    /// Input and output of a [`CallArg`]: at most 4096 bytes each.
    pub struct CallBuffers = "urd_cmd_para", 32 {
        pub input: u64 = "input" @ 0,
        pub input_length: u32 = "input_len" @ 8,
        pub _pad0: [u8; 4],
        pub output: u64 = "output" @ 16,
        /// On success exactly this many bytes are written.
        pub output_length: u32 = "output_len" @ 24,
        pub _pad1: [u8; 4],
    }

    /// Output of [`CHIP_INFO`]: exactly 112 bytes.
    pub struct ChipInfo = "dms_query_chip_info", 112 {
        /// Physical id.
        pub device: u32 = "dev_id" @ 0,
        pub register: u32 = "reg_val" @ 4,
        pub text: ChipText = "info" @ 8,
        pub reserved: [u8; 8] = "resv" @ 104,
    }

    /// NUL-terminated names in a [`ChipInfo`]. Bytes after the NUL are stale.
    pub struct ChipText = "dms_chip_info", 96 {
        /// `Ascend`.
        pub kind: [u8; 32] = "type" @ 0,
        /// `910B3` and the like.
        pub name: [u8; 32] = "name" @ 32,
        pub version: [u8; 32] = "version" @ 64,
    }

    /// Input of [`SPOD_INFO`].
    pub struct DeviceInfoIn = "dms_get_device_info_in", 24 {
        pub device: u32 = "dev_id" @ 0,
        /// 1.
        pub sub_command: u32 = "sub_cmd" @ 4,
        /// Address of a [`SpodInfo`].
        pub buffer: u64 = "buff" @ 8,
        pub buffer_size: u32 = "buff_size" @ 16,
        pub _pad0: [u8; 4],
    }

    /// Output of [`SPOD_INFO`].
    pub struct DeviceInfoOut = "dms_get_device_info_out", 4 {
        pub size: u32 = "out_size" @ 0,
    }

    /// What [`SPOD_INFO`] writes to [`DeviceInfoIn::buffer`].
    pub struct SpodInfo = "dsmi_spod_info", 48 {
        /// Super-pod device id. Bits from the low end: physical id 16, die 2, chip 4, server 10.
        pub sdid: u32 = "sdid" @ 0,
        pub scale_type: u32 = "scale_type" @ 4,
        pub super_pod_id: u32 = "super_pod_id" @ 8,
        pub server_id: u32 = "server_id" @ 12,
        pub chassis_id: u32 = "chassis_id" @ 16,
        pub super_pod_type: u32 = "super_pod_type" @ 20,
        /// From 26.1 on; reserved before.
        pub intercon_type: u32 = "super_pod_intercon_type" @ 24,
        pub reserved: [u32; 5],
    }

    /// Input and output of [`P2P`] from 9.0.0 on: both lengths exactly 32.
    pub struct P2pAttr = "urd_p2p_attr", 32, since V9_0_0 {
        /// One of the `P2P_*` operations.
        pub operation: u32 = "op" @ 0,
        /// Logical id.
        pub device: u32 = "dev_id" @ 4,
        /// *Physical* id.
        pub peer: u32 = "peer_dev_id" @ 8,
        /// 0 all, 1 memory, 2 notify.
        pub kind: u32 = "type" @ 12,
        pub status: i32 = "status" @ 16,
        pub _pad0: [u8; 4],
        pub capability: u64 = "capability" @ 24,
    }

    /// Input and output of [`P2P`] in 8.5.0: both lengths exactly 24.
    pub struct P2pAttr85 = "urd_p2p_attr", 24, until V8_5_0 {
        pub operation: u32 = "op" @ 0,
        pub device: u32 = "dev_id" @ 4,
        pub peer: u32 = "peer_dev_id" @ 8,
        pub status: i32 = "status" @ 12,
        pub capability: u64 = "capability" @ 16,
    }

    /// Output of [`PCIE_INFO`]. No PCI domain in any generation.
    pub struct PcieInfo = "urd_vender_id_info", 28 {
        pub vendor: u32 = "venderid" @ 0,
        pub subvendor: u32 = "subvenderid" @ 4,
        pub device: u32 = "deviceid" @ 8,
        pub subdevice: u32 = "subdeviceid" @ 12,
        pub bus: u32 = "bus" @ 16,
        pub slot: u32 = "device" @ 20,
        pub function: u32 = "fn" @ 24,
    }

    /// Input of [`TS_HEARTBEAT`].
    pub struct TsHeartbeatIn = "dms_ts_hb_status_in", 12 {
        pub device: u32 = "dev_id" @ 0,
        pub vf: u32 = "vf_id" @ 4,
        pub ts: u32 = "ts_id" @ 8,
    }

    /// Input of [`UDIS_GET`]: a value that the device's firmware publishes under a name.
    pub struct UdisIn = "udis_get_ioctl_in", 32 {
        pub module: u32 = "module_type" @ 0,
        /// [`HBM_MEM_INFO`] for the memory's size.
        pub name: [u8; 16] = "name" @ 4,
        /// 1 to 208, and at least the length of what was published.
        pub length: u32 = "in_len" @ 20,
        /// Address of the data.
        pub data: u64 = "data" @ 24,
    }

    /// Output of [`UDIS_GET`].
    pub struct UdisOut = "udis_get_ioctl_out", 16 {
        pub last_update: u64 = "last_update_time" @ 0,
        pub access: u32 = "acc_ctrl" @ 8,
        pub length: u32 = "out_len" @ 12,
    }

    /// Input of [`MEMORY_INFO`].
    pub struct MemoryInfoIn = "urd_dev_mem_type", 8, since V26_1 {
        pub device: u32 = "dev_id" @ 0,
        /// 2 for HBM.
        pub kind: u32 = "type" @ 4,
    }

    /// Output of [`PHYSICAL_INFO`]; shorter buffers are EINVAL.
    pub struct PhysicalInfo = "dms_get_phy_dev_info_out", 136, since V9_0_0 {
        pub chip: u32 = "chip_id" @ 0,
        pub die: u32 = "die_id" @ 4,
        pub reserved: [u32; 32] = "reserved" @ 8,
    }
}

declare_constants! {
    /// Main command of most features.
    pub const MAIN_BASIC: u32 = 0x45, "DMS_MAIN_CMD_BASIC";
    /// Main command of memory features.
    pub const MAIN_MEMORY: u32 = 0x47, "DMS_MAIN_CMD_MEMORY";
    /// Main command of the task scheduler.
    pub const MAIN_TRS: u32 = 0x4B, "DMS_MAIN_CMD_TRS";
    /// [`HEALTH`].
    pub const SUB_HEALTH: u32 = 2, "DMS_SUBCMD_GET_HEALTH_CODE";
    /// [`PCIE_INFO`].
    pub const SUB_PCIE_INFO: u32 = 7, "DMS_SUBCMD_GET_PCIE_INFO";
    /// [`SPLIT_MODE`].
    pub const SUB_SPLIT_MODE: u32 = 15, "DMS_SUBCMD_GET_DEV_SPLIT_MODE";
    /// [`INIT_STATUS`].
    pub const SUB_INIT_STATUS: u32 = 25, "DMS_SUBCMD_GET_DEV_INIT_STATUS";
    /// [`CHIP_INFO`].
    pub const SUB_CHIP_INFO: u32 = 29, "DMS_SUBCMD_GET_CHIP_INFO";
    /// [`BOOT_STATUS`].
    pub const SUB_BOOT_STATUS: u32 = 35, "DMS_SUBCMD_GET_DEV_BOOT_STATUS";
    /// [`MASTER_ID`].
    pub const SUB_MASTER_ID: u32 = 37, "DMS_SUBCMD_GET_MASTER_DEV";
    /// [`PROBED`].
    pub const SUB_PROBED: u32 = 38, "DMS_SUBCMD_GET_DEV_PROBE_NUM";
    /// [`P2P`].
    pub const SUB_P2P: u32 = 40, "DMS_SUBCMD_DEV_P2P_ATTR";
    /// [`PHYSICAL_INFO`].
    pub const SUB_PHYSICAL_INFO: u32 = 58, "DMS_SUBCMD_GET_PHY_DEVICE_INFO", since V9_0_0;
    /// [`MEMORY_INFO`].
    pub const SUB_MEMORY_INFO: u32 = 39, "DMS_SUBCMD_DEV_MEM_INFO", since V26_1;
    /// [`TS_HEARTBEAT`].
    pub const SUB_TS_HEARTBEAT: u32 = 4, "DMS_SUBCMD_GET_TS_HB_STATUS";
    /// [`UDIS_GET`].
    pub const SUB_UDIS_GET: u32 = 56, "DMS_SUBCMD_GET_UDIS_DEVICE_INFO", since V9_0_0;
    /// [`UDIS_GET_85`].
    pub const MAIN_UDIS_GET_85: u32 = 0x60063, "DMS_GET_UDIS_DEVICE_INFO_CMD", until V8_5_0;
    /// [`SPOD_INFO`].
    pub const MAIN_DEVICE_INFO: u32 = 0x6003F, "DMS_GET_GET_DEVICE_INFO_CMD";
    /// Requests peer access.
    pub const P2P_ENABLE: u32 = 0, "DEVDRV_P2P_ADD";
    /// Withdraws the request.
    pub const P2P_DISABLE: u32 = 1, "DEVDRV_P2P_DEL";
    /// Queries whether both directions are requested.
    pub const P2P_STATUS: u32 = 2, "DEVDRV_P2P_QUERY";
    /// Queries whether the two devices can reach each other.
    pub const P2P_CAN_ACCESS: u32 = 3, "DEVDRV_P2P_ACCESS_STATUS_QUERY";
    /// Queries the capability word.
    pub const P2P_CAPABILITY: u32 = 4, "DEVDRV_P2P_CAPABILITY_QUERY";
    /// Positive answer: not allowed for the caller's role.
    pub const NOT_PERMITTED: i32 = 46, "DRV_ERROR_OPER_NOT_PERMITTED";
    /// Positive answer: not in this environment (container, virtual instance).
    pub const NOT_SUPPORTED_HERE: i32 = 65534, "DRV_ERROR_NOT_SUPPORT";
}

/// The name of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Main command.
    pub main: u32,
    /// Sub command.
    pub sub: u32,
    /// Filter text, empty for none.
    pub filter: &'static str,
}

const fn key(main: u32, sub: u32) -> Key {
    Key { main, sub, filter: "" }
}

/// Health: in logical id, out u32 (0 normal, 1 minor, 2 major, 3 fatal). Positive answers: 1 (no
/// such device), 7 (not ready), 8 (wrong length).
pub const HEALTH: Key = key(MAIN_BASIC, SUB_HEALTH);
/// PCI ids and address: in logical id, out [`PcieInfo`].
pub const PCIE_INFO: Key = key(MAIN_BASIC, SUB_PCIE_INFO);
/// How the device is split: in logical id, out u32 (0 whole, 1 for virtual machines, 2 for
/// containers).
pub const SPLIT_MODE: Key = key(MAIN_BASIC, SUB_SPLIT_MODE);
/// State: in logical id, out u32 (0 initialising, 1 working, 2 exception, 3 sleep, 4 communication
/// lost).
pub const INIT_STATUS: Key = key(MAIN_BASIC, SUB_INIT_STATUS);
/// Names: in logical id, out [`ChipInfo`].
pub const CHIP_INFO: Key = key(MAIN_BASIC, SUB_CHIP_INFO);
/// Boot state: in *physical* id, out u32.
pub const BOOT_STATUS: Key = key(MAIN_BASIC, SUB_BOOT_STATUS);
/// The device that runs the operating system of a device: in *physical* id, out physical id. Its
/// own id, unless several devices share one operating system.
pub const MASTER_ID: Key = key(MAIN_BASIC, SUB_MASTER_ID);
/// Number of probed devices: out u32.
pub const PROBED: Key = key(MAIN_BASIC, SUB_PROBED);
/// Peer access: in and out [`P2pAttr`] or [`P2pAttr85`].
pub const P2P: Key = key(MAIN_BASIC, SUB_P2P);
/// Chip and die by physical id: in physical id, out [`PhysicalInfo`]. From 9.0.0 on.
pub const PHYSICAL_INFO: Key = key(MAIN_BASIC, SUB_PHYSICAL_INFO);
/// Memory of a device: in [`MemoryInfoIn`], out six u64. From 26.1 on. The host passes it to the
/// firmware, which may not answer it.
pub const MEMORY_INFO: Key = key(MAIN_MEMORY, SUB_MEMORY_INFO);
/// Heartbeat of the task scheduler: in [`TsHeartbeatIn`], out u32 as [`INIT_STATUS`].
pub const TS_HEARTBEAT: Key = key(MAIN_TRS, SUB_TS_HEARTBEAT);
/// Super-pod ids: in [`DeviceInfoIn`], out [`DeviceInfoOut`].
pub const SPOD_INFO: Key = Key { main: MAIN_DEVICE_INFO, sub: 0, filter: "main_cmd=0xc,sub_cmd=0x1" };
/// Published values from 9.0.0 on: in [`UdisIn`], out [`UdisOut`].
pub const UDIS_GET: Key = key(MAIN_BASIC, SUB_UDIS_GET);
/// Published values in 8.5.0.
pub const UDIS_GET_85: Key = key(MAIN_UDIS_GET_85, 0);

/// Name of the published memory size: three blocks of 64 bytes, of which the last starts with total
/// and free in KiB.
pub const HBM_MEM_INFO: &[u8; 16] = b"hbm_mem_info\0\0\0\0";

/// The only command.
pub const CALL: Typed<CallArg> = Typed::new("URD", "URD_IOCTL_CMD", b'V', 1, Direction::None, 0, Some("CallArg"));

/// The module's commands.
pub const COMMANDS: &[Command] = &[CALL.command];
