//! `/dev/davinci_manager`: one character device in front of all modules.
//!
//! [`OPEN`] binds a file to the module that it names; from then on every ioctl whose magic is not
//! `'Z'` goes to that module. **[`CLOSE`] must come before close(2)**: the kernel takes a bound
//! file that is closed without it for a dying process and releases every davinci file of the
//! process. Of magic, direction and size bits only the magic `'Z'` matters.

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};

/// Path of the device.
pub const PATH: &str = "/dev/davinci_manager";

/// Module names for [`OPEN`]. Letter case matters.
pub mod module {
    /// Device numbering and namespaces.
    pub const UDA: &str = "uda";
    /// Feature queries by (main, sub, filter) keys.
    pub const URD: &str = "URD";
    /// Device management: identity of processes and devices.
    pub const DEVMNG: &str = "DEVMNG";
    /// Memory, second generation: Ascend910, 910B, 910_93, 310P.
    pub const SVM: &str = "SVM";
    /// Memory, third generation: Ascend950. Not supported by this project.
    pub const SVM_V3: &str = "svm";
    /// Task scheduler of a device: streams, events and queues.
    pub const TSDRV: &str = "TSDRV";
    /// Mappings of the task scheduler's queues.
    pub const TSDRV_MMAP: &str = "TSDRV_MMAP";
    /// Events between processes of the host and of a device.
    pub const ESCHED: &str = "ESCHED";
}

declare_layouts! {
    /// Argument of [`OPEN`] and [`CLOSE`].
    pub struct OpenArg = "davinci_intf_open_arg", 260 {
        /// NUL-terminated; the kernel forces the last byte to NUL.
        pub module_name: [u8; 256] = "module_name" @ 0,
        /// Physical id of a device for `TSDRV`, `TSDRV_MMAP` and `ESCHED`; the other modules do not
        /// use it.
        pub device_id: i32 = "device_id" @ 256,
    }

    /// Argument of [`GET_MODULE_STATUS`].
    pub struct StatusArg = "davinci_intf_check_no_use_arg", 260 {
        pub module_name: [u8; 256] = "module_name" @ 0,
        /// 1: no process has a file bound to this name (also when there is no such module); 0: in
        /// use.
        pub status: u32 = "status" @ 256,
    }
}

declare_constants! {
    /// Magic of the multiplexer's own commands.
    pub const MAGIC: u8 = b'Z', "DAVINCI_INTF_IOC_MAGIC";
    /// Numbers from here on are EINVAL.
    pub const NUMBERS: u8 = 3, "DAVINCI_INTF_IOCTL_CMD_MAX_NR";
    /// Length of a module name with its NUL.
    pub const NAME_LENGTH: usize = 256, "DAVINIC_MODULE_NAME_MAX";
}

impl OpenArg {
    /// The argument that binds a file to `module`. Names longer than 255 bytes are cut.
    pub fn new(module: &str) -> Self {
        let mut arg = OpenArg::default();
        for (to, from) in arg.module_name[..NAME_LENGTH - 1].iter_mut().zip(module.bytes()) {
            *to = from;
        }
        arg
    }
}

const fn command<A>(name: &'static str, c_name: &'static str, number: u8, argument: &'static str) -> Typed<A> {
    Typed::new(name, c_name, MAGIC, number, Direction::None, 0, Some(argument))
}

/// Binds the file to a module.
pub const OPEN: Typed<OpenArg> = command("OPEN", "DAVINCI_INTF_IOCTL_OPEN", 0, "OpenArg");
/// Announces an orderly close(2). The argument is not read. A file that is not bound yet can never
/// be bound afterwards.
pub const CLOSE: Typed<OpenArg> = command("CLOSE", "DAVINCI_INTF_IOCTL_CLOSE", 1, "OpenArg");
/// Reports whether a module is in use.
pub const GET_MODULE_STATUS: Typed<StatusArg> =
    command("GET_MODULE_STATUS", "DAVINCI_INTF_IOCTL_GET_MODULE_STATUS", 2, "StatusArg");

/// The multiplexer's commands.
pub const COMMANDS: &[Command] = &[OPEN.command, CLOSE.command, GET_MODULE_STATUS.command];
