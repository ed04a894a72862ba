//! `/dev/davinci_manager`: a file is bound to one module, and close(2) without the CLOSE command
//! counts as the end of the process.

use crate::host::Host;
use crate::manager::{Manager, NOWHERE, answer, mmap};
use crate::peer::{End, in_child};
use crate::rule::{Judge, Rule, Verdict, equal, rule};
use ascend_ioctl::davinci::{self, module};
use ascend_ioctl::svm;
use ascend_ioctl::uda;
use libc::{EBADFD, EFAULT, EINVAL, ENODEV, ENOSYS};

pub const RULES: &[Rule] = &[
    rule!(a_command_before_binding_is_enodev, Ran).decided_by("drv_ascend_intf_ioctl, davinci_intf_init.c"),
    rule!(a_mapping_before_binding_is_ebadfd, Ran).decided_by("drv_ascend_intf_mmap, davinci_intf_init.c"),
    rule!(binding_with_a_null_argument_is_einval, Ran)
        .decided_by("drv_ascend_intf_ioctl_open_cmd, davinci_intf_init.c"),
    rule!(binding_with_an_unmapped_argument_is_efault, Ran)
        .decided_by("drv_ascend_intf_ioctl_open_cmd, davinci_intf_init.c"),
    rule!(binding_an_empty_name_is_einval, Ran).decided_by("drv_ascend_intf_ioctl_open_cmd, davinci_intf_init.c"),
    rule!(binding_an_unknown_name_is_einval, Ran).decided_by("drv_ascend_set_file_ops, davinci_intf_init.c"),
    rule!(names_of_modules_are_case_sensitive, Ran).decided_by("drv_ascend_set_file_ops, davinci_intf_init.c"),
    rule!(a_failed_binding_leaves_the_file_as_it_was, Ran)
        .decided_by("drv_ascend_intf_ioctl_open_cmd, davinci_intf_init.c"),
    rule!(binding_twice_is_enosys, Ran).decided_by("drv_ascend_intf_init_file_private, davinci_intf_init.c"),
    rule!(binding_twice_looks_at_the_name_first, Ran).decided_by("drv_ascend_intf_ioctl_open_cmd, davinci_intf_init.c"),
    rule!(binding_again_to_an_unknown_name_is_enosys, Ran)
        .decided_by("drv_ascend_intf_init_file_private, davinci_intf_init.c"),
    rule!(unknown_commands_of_the_multiplexer_are_einval, Ran)
        .decided_by("drv_ascend_intf_ioctl_local, davinci_intf_init.c"),
    rule!(announcing_the_close_poisons_an_unbound_file, Ran)
        .decided_by("drv_ascend_intf_ioctl_close_cmd, davinci_intf_init.c"),
    rule!(announcing_the_close_leaves_a_bound_file_working, Ran)
        .decided_by("drv_ascend_intf_ioctl_close_cmd, davinci_intf_init.c"),
    rule!(announcing_the_close_twice_is_granted, Ran)
        .decided_by("drv_ascend_intf_ioctl_close_cmd, davinci_intf_init.c"),
    rule!(binding_after_announcing_the_close_is_enosys, Ran)
        .decided_by("drv_ascend_intf_init_file_private, davinci_intf_init.c"),
    rule!(a_close_that_was_not_announced_releases_every_file_of_the_process, Ran)
        .decided_by("drv_ascend_intf_release, davinci_intf_init.c"),
    rule!(released_files_answer_ebadfd_to_the_multiplexers_commands_too, Ran)
        .decided_by("drv_ascend_intf_ioctl, davinci_intf_init.c"),
    rule!(a_new_file_works_after_all_were_released, Ran).decided_by("drv_ascend_intf_open, davinci_intf_init.c"),
    rule!(an_announced_close_leaves_other_files_alone, Ran)
        .decided_by("drv_ascend_make_release_list, davinci_intf_init.c"),
    rule!(closing_an_unbound_file_disturbs_nothing, Ran).decided_by("drv_ascend_intf_release, davinci_intf_init.c"),
    rule!(a_dying_child_does_not_hurt_an_inherited_file, Ran).decided_by("__fput, linux/fs/file_table.c"),
    rule!(a_childs_announcement_does_nothing, Ran).decided_by("drv_ascend_intf_ioctl_close_cmd, davinci_intf_init.c"),
    rule!(reading_is_einval, Ran).decided_by("vfs_read, linux/fs/read_write.c"),
    rule!(writing_is_einval, Ran).decided_by("vfs_write, linux/fs/read_write.c"),
    rule!(a_node_of_a_device_cannot_be_read, Ran).decided_by("vfs_read, linux/fs/read_write.c"),
    rule!(a_file_keeps_the_flags_that_it_was_opened_with, Ran).decided_by("do_fcntl, linux/fs/fcntl.c"),
    rule!(the_status_of_an_unknown_module_is_unused, Ran).decided_by("check_module_file_close, davinci_intf_process.c"),
    rule!(the_status_of_a_bound_module_is_used, Ran).decided_by("check_module_file_close, davinci_intf_process.c"),
    rule!(the_status_of_no_name_is_einval, Ran)
        .decided_by("drv_ascend_intf_ioctl_check_module_no_use, davinci_intf_init.c"),
    rule!(the_status_of_a_name_without_an_end_is_einval, Ran)
        .decided_by("drv_ascend_intf_ioctl_check_module_no_use, davinci_intf_init.c"),
    rule!(every_module_that_a_client_needs_binds, Ran)
        .decided_by("drv_davinci_register_sub_module, davinci_intf_init.c"),
];

/// A harmless command of a file that is bound to uda.
fn ask(file: &Manager) -> Result<i32, i32> {
    file.command(&uda::GET_USER_INFO, &mut uda::UserInfo::default())
}

fn status(file: &Manager, name: &str) -> Result<u32, i32> {
    let mut arg = davinci::StatusArg { status: 77, ..Default::default() };
    arg.module_name[..name.len()].copy_from_slice(name.as_bytes());
    file.command(&davinci::GET_MODULE_STATUS, &mut arg).map(|_| arg.status)
}

fn a_command_before_binding_is_enodev(host: &Host) -> Verdict {
    let file = Manager::open()?;
    ask(&file).refused(ENODEV)?;
    let svm = crate::session::Svm::on(file, host);
    svm.alloc_process().refused(ENODEV)
}

fn a_mapping_before_binding_is_ebadfd(_: &Host) -> Verdict {
    let file = Manager::open()?;
    mmap(svm::SVM_START, svm::SVM_SIZE, libc::PROT_READ, libc::MAP_SHARED, file.fd()).refused(EBADFD)
}

fn binding_with_a_null_argument_is_einval(_: &Host) -> Verdict {
    Manager::open()?.command_at(&davinci::OPEN, 0).refused(EINVAL)
}

fn binding_with_an_unmapped_argument_is_efault(_: &Host) -> Verdict {
    Manager::open()?.command_at(&davinci::OPEN, NOWHERE).refused(EFAULT)
}

fn binding_an_empty_name_is_einval(_: &Host) -> Verdict {
    Manager::open()?.bind("").refused(EINVAL)
}

fn binding_an_unknown_name_is_einval(_: &Host) -> Verdict {
    Manager::open()?.bind("NOPE").refused(EINVAL)
}

fn names_of_modules_are_case_sensitive(_: &Host) -> Verdict {
    Manager::open()?.bind("UDA").refused(EINVAL)
}

fn a_failed_binding_leaves_the_file_as_it_was(_: &Host) -> Verdict {
    let file = Manager::open()?;
    file.bind("NOPE").refused(EINVAL)?;
    file.bind("").refused(EINVAL)?;
    file.bind(module::UDA).granted()?;
    ask(&file).granted().map(drop)
}

fn binding_twice_is_enosys(_: &Host) -> Verdict {
    Manager::bound(module::SVM)?.bind(module::SVM).refused(ENOSYS)
}

fn binding_twice_looks_at_the_name_first(_: &Host) -> Verdict {
    let file = Manager::bound(module::UDA)?;
    file.bind("").refused(EINVAL)?;
    file.command_at(&davinci::OPEN, 0).refused(EINVAL)
}

fn binding_again_to_an_unknown_name_is_enosys(_: &Host) -> Verdict {
    Manager::bound(module::UDA)?.bind("NOPE").refused(ENOSYS)
}

fn unknown_commands_of_the_multiplexer_are_einval(_: &Host) -> Verdict {
    let file = Manager::open()?;
    let request = davinci::OPEN.request();
    file.request(request + 3, 0).refused(EINVAL)?;
    file.request(request + 255, 0).refused(EINVAL)?;
    file.bind(module::UDA).granted()?;
    file.request(request + 3, 0).refused(EINVAL)
}

fn announcing_the_close_poisons_an_unbound_file(_: &Host) -> Verdict {
    let file = Manager::open()?;
    file.announce_close().granted()?;
    file.bind(module::UDA).refused(ENOSYS)
}

fn announcing_the_close_leaves_a_bound_file_working(host: &Host) -> Verdict {
    let svm = crate::session::Svm::open(host)?;
    svm.file.announce_close().granted()?;
    svm.prepare()?;
    svm.init().granted().map(drop)
}

fn announcing_the_close_twice_is_granted(_: &Host) -> Verdict {
    let file = Manager::bound(module::UDA)?;
    file.announce_close().granted()?;
    file.announce_close().granted().map(drop)
}

fn binding_after_announcing_the_close_is_enosys(_: &Host) -> Verdict {
    let file = Manager::bound(module::UDA)?;
    file.announce_close().granted()?;
    file.bind(module::UDA).refused(ENOSYS)
}

fn a_close_that_was_not_announced_releases_every_file_of_the_process(host: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    let svm = crate::session::Svm::open(host)?;
    Manager::bound(module::UDA)?.abandon();
    ask(&kept).refused(EBADFD)?;
    svm.alloc_process().refused(EBADFD)
}

fn released_files_answer_ebadfd_to_the_multiplexers_commands_too(_: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    Manager::bound(module::UDA)?.abandon();
    kept.bind(module::UDA).refused(EBADFD)?;
    status(&kept, module::UDA).refused(EBADFD)
}

fn a_new_file_works_after_all_were_released(_: &Host) -> Verdict {
    Manager::bound(module::UDA)?.abandon();
    ask(&Manager::bound(module::UDA)?).granted().map(drop)
}

fn an_announced_close_leaves_other_files_alone(_: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    drop(Manager::bound(module::UDA)?);
    ask(&kept).granted().map(drop)
}

fn closing_an_unbound_file_disturbs_nothing(_: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    Manager::open()?.abandon();
    ask(&kept).granted().map(drop)
}

fn a_dying_child_does_not_hurt_an_inherited_file(_: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    let end = in_child(|| {
        if ask(&kept) != Ok(0) {
            crate::peer::leave(1);
        }
    });
    equal("end of the child that issued the command", end, End::Exit(0))?;
    ask(&kept).granted().map(drop)
}

fn a_childs_announcement_does_nothing(_: &Host) -> Verdict {
    let kept = Manager::bound(module::UDA)?;
    let other = Manager::bound(module::UDA)?;
    let end = in_child(|| {
        if other.announce_close() != Ok(0) {
            crate::peer::leave(1);
        }
    });
    equal("end of the child that issued CLOSE", end, End::Exit(0))?;
    ask(&kept).granted()?;
    other.abandon();
    ask(&kept).refused(EBADFD)
}

fn reading_is_einval(_: &Host) -> Verdict {
    let file = Manager::bound(module::SVM)?;
    let mut byte = 0u8;
    crate::rule::note_command("read");
    // SAFETY: one byte, a local that outlives the call.
    let result = unsafe { libc::read(file.fd(), std::ptr::from_mut(&mut byte).cast(), 1) };
    crate::manager::answer(result as i64).refused(EINVAL)
}

fn writing_is_einval(_: &Host) -> Verdict {
    let file = Manager::open()?;
    // SAFETY: the buffer is a local that outlives the call.
    answer(unsafe { libc::write(file.fd(), [0u8; 8].as_ptr().cast(), 8) } as i64).refused(EINVAL)
}

fn a_node_of_a_device_cannot_be_read(host: &Host) -> Verdict {
    let fd = crate::manager::open(&format!("/dev/davinci{}", host.physical[0]), libc::O_RDONLY).granted()?;
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is a local that outlives the call.
    answer(unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), 8) } as i64).refused(EINVAL)
}

fn a_file_keeps_the_flags_that_it_was_opened_with(_: &Host) -> Verdict {
    let file = Manager::open_with(libc::O_RDWR | libc::O_SYNC | libc::O_CLOEXEC)?;
    // SAFETY: F_GETFL takes no pointer.
    let flags = answer(unsafe { libc::fcntl(file.fd(), libc::F_GETFL) }.into()).granted()? as i32;
    equal("access mode", flags & libc::O_ACCMODE, libc::O_RDWR)?;
    equal("O_SYNC", flags & libc::O_SYNC, libc::O_SYNC)
}

fn the_status_of_an_unknown_module_is_unused(_: &Host) -> Verdict {
    equal("status", status(&Manager::open()?, "NOPE").granted()?, 1)
}

fn the_status_of_no_name_is_einval(_: &Host) -> Verdict {
    status(&Manager::open()?, "").refused(EINVAL)
}

fn the_status_of_a_name_without_an_end_is_einval(_: &Host) -> Verdict {
    status(&Manager::open()?, &"x".repeat(davinci::NAME_LENGTH)).refused(EINVAL)
}

fn the_status_of_a_bound_module_is_used(_: &Host) -> Verdict {
    let file = Manager::bound(module::SVM)?;
    equal("status on the bound file", status(&file, module::SVM).granted()?, 0)?;
    equal("status on an unbound file", status(&Manager::open()?, module::SVM).granted()?, 0)
}

fn every_module_that_a_client_needs_binds(_: &Host) -> Verdict {
    let mut files = Vec::new();
    for name in [module::UDA, module::URD, module::DEVMNG, module::SVM] {
        files.push(Manager::bound(name)?);
    }
    Ok(())
}
