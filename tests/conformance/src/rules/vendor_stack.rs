//! What the vendor's user library asks of a host before it opens a session: the paths of the nodes,
//! the list of modules, the log level and the master of a device; and its copies that say which
//! device they are for.

use crate::host::Host;
use crate::manager::{Manager, NOWHERE, answer, open};
use crate::rule::{Answer, Failure, Judge, Rule, Verdict, equal, holds, note_command, rule};
use crate::session::{MIB2, Session};
use ascend_ioctl::davinci::{self, module};
use ascend_ioctl::devmng::GET_CONSOLE_LOG_LEVEL;
use ascend_ioctl::svm::{COPY_DETECT, COPY_DEVICE_TO_HOST, DEVICE_IDS, Memcpy, Op};
use ascend_ioctl::urd::{self, CallArg, CallBuffers, CallKey, MASTER_ID};
use libc::{EINVAL, ENODEV, ENOENT, EOPNOTSUPP};
use std::ffi::CString;

pub const RULES: &[Rule] = &[
    rule!(a_node_is_no_link, Ran).decided_by("do_readlinkat, linux/fs/stat.c"),
    rule!(a_node_is_its_own_real_path, Ran).decided_by("do_readlinkat, linux/fs/stat.c"),
    rule!(the_list_of_modules_names_the_base_module, Ran).decided_by("m_show, linux/kernel/module/procfs.c"),
    rule!(the_log_level_is_between_0_and_7, Ran)
        .decided_by("devdrv_manager_ioctl_get_console_loglevel, devdrv_manager_ioctl.c"),
    rule!(an_unwritable_log_level_is_enodev, Ran).decided_by("copy_to_user_safe, devdrv_manager.c"),
    rule!(the_master_of_a_device_is_a_device, Ran).decided_by("dms_get_master_dev, dms_basic_info.c"),
    rule!(the_master_is_asked_by_physical_id, Ran).decided_by("uda_get_master_id, uda_dev.c"),
    rule!(the_master_query_wants_four_bytes_each_way, Ran).decided_by("dms_get_master_dev, dms_basic_info.c"),
    rule!(a_copy_that_names_its_device_reads_managed_memory, Ran)
        .decided_by("_devmm_get_memcpy_mem_attrs, svm_master_memcpy.c"),
    rule!(a_device_local_source_must_lie_in_the_devices_pools, Ran)
        .decided_by("devmm_get_local_dev_mem_attrs, devmm_proc_info.c"),
    rule!(a_device_local_source_needs_a_device_id, Ran).decided_by("devmm_get_local_dev_mem_attrs, devmm_proc_info.c"),
];

/// readlink(2).
fn read_link(path: &str) -> Answer<i64> {
    note_command("readlink");
    let path = CString::new(path).unwrap_or_default();
    let mut target = [0u8; 256];
    // SAFETY: the path ends in NUL, and the buffer has the length that is passed.
    answer(unsafe { libc::readlink(path.as_ptr(), target.as_mut_ptr().cast(), target.len()) } as i64)
}

fn a_node_is_no_link(host: &Host) -> Verdict {
    read_link(davinci::PATH).refused(EINVAL)?;
    read_link(&format!("/dev/davinci{}", host.physical[0])).refused(EINVAL)?;
    read_link("/dev/davinci_nothing").refused(ENOENT)
}

fn a_node_is_its_own_real_path(_: &Host) -> Verdict {
    let path = std::fs::canonicalize(davinci::PATH).map_err(Failure::broken)?;
    equal("real path", path.as_path(), std::path::Path::new(davinci::PATH))
}

fn the_list_of_modules_names_the_base_module(_: &Host) -> Verdict {
    let list = std::fs::read_to_string("/proc/modules").map_err(Failure::skipped)?;
    let named = |name: &str| list.lines().any(|line| line.split(' ').next() == Some(name));
    // The second is the driver of virtual machines.
    holds("the base module is listed", named("asdrv_pbl") || named("asdrv_vpbl"))
}

fn the_log_level_is_between_0_and_7(_: &Host) -> Verdict {
    let mut level = -1i32;
    Manager::bound(module::DEVMNG)?.command(&GET_CONSOLE_LOG_LEVEL, &mut level).granted()?;
    holds("the level is between 0 and 7", (0..=7).contains(&std::hint::black_box(level)))
}

fn an_unwritable_log_level_is_enodev(_: &Host) -> Verdict {
    Manager::bound(module::DEVMNG)?.command_at(&GET_CONSOLE_LOG_LEVEL, NOWHERE).refused(ENODEV)
}

/// The query for the master of a device.
fn master(file: &Manager, physical: u32, input_length: u32, output_length: u32) -> Answer<u32> {
    let (input, mut output) = ([physical; 2], [u32::MAX; 2]);
    let mut arg = CallArg {
        key: CallKey { main: MASTER_ID.main, sub: MASTER_ID.sub, ..Default::default() },
        buffers: CallBuffers {
            input: input.as_ptr() as u64,
            input_length,
            output: output.as_mut_ptr() as u64,
            output_length,
            ..Default::default()
        },
        ..Default::default()
    };
    file.command(&urd::CALL, &mut arg)?;
    Ok(std::hint::black_box(output)[0])
}

fn the_master_of_a_device_is_a_device(host: &Host) -> Verdict {
    let file = Manager::bound(module::URD)?;
    let id = master(&file, host.physical[0], 4, 4).granted()?;
    let node = open(&format!("/dev/davinci{id}"), libc::O_RDWR | libc::O_CLOEXEC);
    let known = node.map(crate::manager::close) != Err(ENOENT);
    holds("the master has a node, or is a device of another container", known || !host.admin)
}

fn the_master_is_asked_by_physical_id(_: &Host) -> Verdict {
    let file = Manager::bound(module::URD)?;
    for absent in [63, 5000, u32::MAX] {
        master(&file, absent, 4, 4).refused(EINVAL)?;
    }
    Ok(())
}

fn the_master_query_wants_four_bytes_each_way(host: &Host) -> Verdict {
    let file = Manager::bound(module::URD)?;
    master(&file, host.physical[0], 8, 4).refused(EINVAL)?;
    master(&file, host.physical[0], 4, 8).refused(EINVAL)
}

/// MEMCPY that names its device and allows the source to be an address of the device itself.
fn copy_with_info(session: &Session, device: u32, destination: &mut [u8], source: u64) -> Answer<u32> {
    let para = Memcpy {
        destination: destination.as_mut_ptr() as u64,
        source,
        size: destination.len() as u64,
        device_local: 1,
        direction: COPY_DEVICE_TO_HOST,
        ..Default::default()
    };
    session.svm.ask(Op::Memcpy, device, &para).map(|answer| answer.direction)
}

fn a_copy_that_names_its_device_reads_managed_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    let sent = [0x5A; 64];
    session.copy(far, sent.as_ptr() as u64, 64, COPY_DETECT).granted()?;
    let mut received = [0; 64];
    let direction = copy_with_info(&session, 0, &mut received, far).granted()?;
    equal("direction", direction, COPY_DEVICE_TO_HOST)?;
    equal("bytes", std::hint::black_box(received), sent)
}

fn a_device_local_source_must_lie_in_the_devices_pools(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (source, mut destination) = ([1u8; 64], [0; 64]);
    copy_with_info(&session, 0, &mut destination, source.as_ptr() as u64).refused(EOPNOTSUPP)
}

fn a_device_local_source_needs_a_device_id(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (source, mut destination) = ([1u8; 64], [0; 64]);
    copy_with_info(&session, DEVICE_IDS, &mut destination, source.as_ptr() as u64).refused(EINVAL)
}
