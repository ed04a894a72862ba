//! Module `DP_PROC_MNG`: how much memory the device's processes use on behalf of a host process.
//!
//! The host has one command, GET_MEM_STATS, and passes it to the device. From the driver's
//! `dpa/dp_proc_mng`.

use crate::caller::{Caller, Outcome};
use crate::machine::Machine;
use ascend_ioctl::command::{self, magic, number};
use ascend_ioctl::uda::MAX_PHYSICAL;
use nix::errno::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Magic of the module's commands.
const MAGIC: u8 = b'G';
/// Numbers of commands; the first has a handler on devices alone.
const NUMBERS: u8 = 3;
const GET_MEM_STATS: u8 = 2;

/// The argument, of which `logical` goes in and the rest comes out.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct MemStatsArg {
    logical: u32,
    device: u32,
    function: u32,
    padding: u32,
    /// Bytes of buffers, of the scheduler, of custom processes and of the network's process.
    used: [u64; 4],
}

/// Size of every command's argument.
pub(crate) const ARGUMENT_SIZE: usize = size_of::<MemStatsArg>();

/// ioctl(2) on a file that is bound to the module.
pub(crate) fn ioctl(machine: &mut Machine, caller: &Caller, request: u32, arg: u64) -> Outcome {
    if arg == 0 || magic(request) != MAGIC || number(request) >= NUMBERS {
        return Errno::EINVAL.into();
    }
    let mut stats = MemStatsArg::new_zeroed();
    if command::writes(request) && caller.memory.read(arg, stats.as_mut_bytes()).is_err() {
        return Errno::EINVAL.into();
    }
    if number(request) != GET_MEM_STATS {
        return Errno::EOPNOTSUPP.into();
    }
    if stats.logical >= MAX_PHYSICAL {
        return Errno::ENODEV.into();
    }
    let Ok(physical) = machine.physical(caller, stats.logical) else { return Errno::EINVAL.into() };
    // The message needs no device process: what the firmware says without one is not known.
    if machine.device(physical).is_none_or(|device| !device.answers()) {
        return Errno::ECOMM.into();
    }
    (stats.device, stats.function, stats.used) = (physical, 0, [0; 4]);
    if command::reads(request) && caller.memory.write(arg, stats.as_bytes()).is_err() {
        return Errno::EINVAL.into();
    }
    Ok(0).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::rig::{OK, Rig, TestProcess, refused};

    const A: TestProcess = TestProcess(100);
    const REQUEST: u32 = 0xC030_4702;

    #[test]
    fn the_statistics_of_a_device_are_answered() {
        let mut rig = Rig::new(Config::default());
        let file = rig.module(A, "DP_PROC_MNG").unwrap();
        let ask = |rig: &mut Rig, logical, request| {
            rig.call(A, file, request, MemStatsArg { logical, used: [7; 4], ..Default::default() })
        };
        let (outcome, answer) = ask(&mut rig, 1, REQUEST);
        assert_eq!((outcome, answer), (OK, MemStatsArg { logical: 1, device: 1, ..Default::default() }));
        for (logical, request, errno) in [
            (2, REQUEST, Errno::EINVAL),
            (MAX_PHYSICAL, REQUEST, Errno::ENODEV),
            (1, 0x4030_4701, Errno::EOPNOTSUPP),
            (1, 0xC030_4703, Errno::EINVAL),
            (1, 0xC030_4802, Errno::EINVAL),
        ] {
            assert_eq!(ask(&mut rig, logical, request).0, refused(errno), "{logical} {request:#x}");
        }
        assert_eq!(rig.ioctl(A, file, REQUEST, 16), refused(Errno::EINVAL));
        rig.driver.machine.kill_device(1);
        assert_eq!(ask(&mut rig, 1, REQUEST).0, refused(Errno::ECOMM));
    }
}
