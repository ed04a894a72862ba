//! Finding devices: modules `uda`, `URD` and `DEVMNG`, and the device nodes.

use crate::host::{Host, list};
use crate::manager::{Manager, NOWHERE, ioctl, open};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, note_command, rule};
use crate::session::ABSENT;
use ascend_ioctl::davinci::module;
use ascend_ioctl::urd::{self, CallArg, CallBuffers, CallKey, Key};
use ascend_ioctl::{Command, Generation, devmng, uda};
use libc::{EACCES, EFAULT, EINVAL, ENODEV, ENOMEM, ENOTTY, EOPNOTSUPP};
use std::mem::offset_of;

pub const RULES: &[Rule] = &[
    rule!(the_memory_node_cannot_be_opened, Source).decided_by("devmm_svm_fake_open, svm_module_ops.c"),
    rule!(a_device_node_opens_and_takes_no_commands, Ran).decided_by("uda_access_open, uda_access.c"),
    rule!(the_caller_is_told_its_limits, Ran).decided_by("ioctl_uda_get_user_info, uda_fops.c").needs(&[Need::Admin]),
    rule!(uda_answers_unmapped_arguments_with_what_was_not_copied, Ran).decided_by("uda_ioctl, uda_fops.c"),
    rule!(uda_looks_at_the_number_only, Ran).decided_by("uda_ioctl, uda_fops.c"),
    rule!(unknown_numbers_of_uda_are_einval, Ran).decided_by("uda_ioctl, uda_fops.c"),
    rule!(setting_up_the_table_again_is_granted, Ran)
        .decided_by("_uda_setup_ns_node, uda_access.c")
        .needs(&[Need::Admin]),
    rule!(the_list_wants_a_range_of_ids, Ran).decided_by("check_uda_dev_list_para, uda_fops.c"),
    rule!(the_list_tells_devices_in_order, Ran).decided_by("ioctl_uda_get_dev_list, uda_fops.c"),
    rule!(the_list_writes_at_absolute_places, Ran)
        .decided_by("ioctl_uda_get_dev_list, uda_fops.c")
        .needs(&[Need::TwoDevices]),
    rule!(a_list_to_nowhere_tells_what_was_not_copied, Ran).decided_by("ioctl_uda_get_dev_list, uda_fops.c"),
    rule!(logical_ids_become_physical, Ran).decided_by("uda_devid_to_udevid, uda_access.c"),
    rule!(an_absent_logical_id_is_einval_and_writes_nothing, Ran).decided_by("uda_devid_to_udevid, uda_access.c"),
    rule!(physical_ids_of_whole_devices_do_not_become_logical, Ran)
        .decided_by("uda_udevid_to_devid, uda_access.c")
        .needs(&[Need::Admin]),
    rule!(local_and_remote_ids_are_translated, Ran).decided_by("uda_udevid_to_remote_udevid, uda_dev.c"),
    rule!(the_platform_is_a_host, Ran).decided_by("devdrv_manager_ioctl_get_plat_info, devdrv_manager_ioctl.c"),
    rule!(the_host_is_no_container, Ran)
        .decided_by("devdrv_manager_get_container_flag, devdrv_manager_ioctl.c")
        .needs(&[Need::Admin]),
    rule!(the_process_is_told_its_ids, Ran)
        .decided_by("devdrv_manager_container_get_bare_tgid, devdrv_manager_container.c"),
    rule!(unknown_questions_for_ids_are_einval, Ran)
        .decided_by("devdrv_manager_container_process, devdrv_manager_container.c"),
    rule!(unreadable_questions_for_ids_have_their_own_errors, Ran)
        .decided_by("devdrv_manager_container_process, devdrv_manager_container.c"),
    rule!(the_sign_is_48_zeros_and_always_the_same, Ran).decided_by("devdrv_creat_random_sign, devdrv_manager_ioctl.c"),
    rule!(no_device_process_is_found_before_one_was_started, Inferred)
        .decided_by("devdrv_host_query_process_by_host_pid, devdrv_manager_ioctl.c"),
    rule!(devmng_looks_at_the_number_only, Ran).decided_by("devdrv_manager_ioctl, devdrv_manager_ioctl.c"),
    rule!(device_facts_want_the_plain_number, Ran).decided_by("devdrv_manager_devinfo_ioctl, devdrv_manager_ioctl.c"),
    rule!(device_facts_lie_where_the_generation_has_them, Ran)
        .decided_by("devdrv_manager_get_devinfo, devdrv_manager_ioctl.c"),
    rule!(an_absent_device_has_no_facts, Ran).decided_by("devdrv_manager_trans_and_check_id, devdrv_manager_ioctl.c"),
    rule!(an_absent_device_has_no_state, Ran)
        .decided_by("devdrv_manager_get_device_status, devdrv_device_status.c")
        .needs(&[Need::Firmware]),
    rule!(an_id_out_of_range_has_no_facts, Ran).decided_by("devdrv_manager_trans_and_check_id, devdrv_manager_ioctl.c"),
    rule!(unreadable_questions_for_facts_have_their_own_errors, Ran)
        .decided_by("copy_from_user_safe, devdrv_manager.c"),
    rule!(a_null_question_for_the_device_info_is_einval, Ran).decided_by("copy_from_user_safe, devdrv_manager.c"),
    rule!(a_null_question_for_the_pci_address_is_efault, Ran)
        .decided_by("devdrv_manager_get_pci_info, devdrv_pci_info.c"),
    rule!(null_questions_for_ids_and_platform_are_einval, Ran)
        .decided_by("devdrv_manager_devinfo_ioctl, devdrv_manager_ioctl.c"),
    rule!(unknown_numbers_of_devmng_are_einval, Ran).decided_by("devdrv_manager_ioctl, devdrv_manager_ioctl.c"),
    rule!(pci_ids_come_with_the_logical_id, Ran).decided_by("devdrv_get_pcie_id, devdrv_pci_info.c"),
    rule!(an_unknown_feature_is_eopnotsupp, Ran).decided_by("dms_feature_process, urd_feature.c"),
    rule!(a_feature_call_needs_its_argument, Ran).decided_by("dms_ioctl, urd_init.c"),
    rule!(lengths_are_looked_at_before_the_feature, Ran).decided_by("dms_cmd_process, urd_init.c"),
    rule!(an_unmapped_input_is_efault, Ran).decided_by("dms_make_feature_input, urd_init.c"),
    rule!(filters_have_their_own_lengths, Ran).decided_by("dms_make_feature_key, urd_init.c"),
    rule!(a_filter_may_count_its_nul, Ran).decided_by("dms_feature_make_key, urd_feature.c"),
    rule!(a_feature_is_called_by_one_number_or_its_own, Ran).decided_by("check_cmd_arg_valid, urd_init.c"),
    rule!(the_split_mode_is_told_of_exact_lengths, Ran).decided_by("dms_get_device_split_mode, dms_basic_info.c"),
    rule!(the_chip_query_wants_its_exact_length, Ran).decided_by("dms_feature_get_chip_info, dms_chip_info.c"),
    rule!(an_absent_device_has_no_features, Ran).decided_by("dms_trans_and_check_id, dms_feature_pub.c"),
    rule!(health_answers_positive_numbers, Ran)
        .decided_by("dms_get_device_health, dms_event.c")
        .needs(&[Need::Firmware]),
    rule!(the_pci_address_wants_28_bytes, Ran).decided_by("devdrv_get_device_info_urd, msg_chan_urd.c"),
    rule!(chip_and_die_want_136_bytes, Ran)
        .decided_by("dms_get_phy_device_info, dms_chip_info_adapt.c")
        .since(Generation::V9_0_0),
    rule!(empty_probes_tell_the_generation, Ran).decided_by("dms_feature_process, urd_feature.c"),
    rule!(peer_attributes_have_the_generations_size, Ran).decided_by("devdrv_get_p2p_attr_urd, msg_chan_urd.c"),
    rule!(published_values_want_exact_lengths, Ran).decided_by("udis_feature_get_device_info, udis_cmd.c"),
    rule!(the_other_modules_of_the_driver_bind_too, Ran)
        .decided_by("drv_davinci_register_sub_module, davinci_intf_init.c"),
    rule!(a_device_process_of_no_device_is_einval, Ran).decided_by("devdrv_host_query_devpid, devdrv_manager_ioctl.c"),
    rule!(the_machine_is_one_of_three, Ran).decided_by("devdrv_manager_get_host_phy_mach_flag, devdrv_pcie.c"),
    rule!(boot_state_goes_by_physical_id, Ran).decided_by("devdrv_get_device_boot_status_urd, msg_chan_urd.c"),
    rule!(probed_devices_are_counted, Ran)
        .decided_by("devdrv_get_device_probe_num_urd, msg_chan_urd_adapt.c")
        .needs(&[Need::Admin]),
    rule!(peer_attributes_of_no_device_are_efault, Ran)
        .decided_by("devdrv_get_p2p_attr_urd, msg_chan_urd.c")
        .since(Generation::V9_0_0),
];

fn the_memory_node_cannot_be_opened(_: &Host) -> Verdict {
    match open("/dev/devmm_svm", libc::O_RDWR | libc::O_CLOEXEC) {
        Err(libc::ENOENT) => Err(Failure::skipped("there is no /dev/devmm_svm here")),
        other => other.refused(EACCES),
    }
}

fn a_device_node_opens_and_takes_no_commands(host: &Host) -> Verdict {
    let path = format!("/dev/davinci{}", host.physical[0]);
    let fd = open(&path, libc::O_RDONLY | libc::O_CLOEXEC).granted()?;
    note_command("a command");
    ioctl(fd, uda::GET_USER_INFO.request(), std::ptr::from_mut(&mut uda::UserInfo::default()) as u64).refused(ENOTTY)
}

fn table() -> Result<Manager, Failure> {
    Manager::bound(module::UDA)
}

fn the_caller_is_told_its_limits(_: &Host) -> Verdict {
    let mut info = uda::UserInfo::default();
    table()?.command(&uda::GET_USER_INFO, &mut info).granted()?;
    let expected =
        uda::UserInfo { admin: 1, local: 0, max_devices: 100, max_physical: uda::MAX_PHYSICAL, support_physical: 1 };
    equal("user info", info, expected)
}

/// The ioctl must return this positive number.
#[track_caller]
fn positive(what: &str, answer: Answer<i32>, expected: i32) -> Verdict {
    equal(what, answer.map_err(crate::rule::errno_name), Ok(expected))
}

fn uda_answers_unmapped_arguments_with_what_was_not_copied(_: &Host) -> Verdict {
    let file = table()?;
    positive("GET_USER_INFO", file.command_at(&uda::GET_USER_INFO, NOWHERE), 20)?;
    positive("SETUP_DEV_TABLE", file.command_at(&uda::SETUP_DEV_TABLE, NOWHERE), 4)?;
    positive("GET_DEV_LIST", file.command_at(&uda::GET_DEV_LIST, NOWHERE), 16)?;
    positive("DEVID_TO_UDEVID", file.command_at(&uda::DEVID_TO_UDEVID, NOWHERE), 8)?;
    positive("UDEVID_TO_DEVID", file.command_at(&uda::UDEVID_TO_DEVID, NOWHERE), 8)
}

fn uda_looks_at_the_number_only(_: &Host) -> Verdict {
    let file = table()?;
    for request in [0x5500, 0x5800] {
        let mut info = uda::UserInfo::default();
        file.request(request, std::ptr::from_mut(&mut info) as u64).granted()?;
        equal("limit", info.max_devices, 100)?;
    }
    Ok(())
}

fn unknown_numbers_of_uda_are_einval(_: &Host) -> Verdict {
    let file = table()?;
    let mut words = [0u64; 8];
    for number in [7, 8, 255] {
        file.request(0x5500 + number, words.as_mut_ptr() as u64).refused(EINVAL)?;
    }
    Ok(())
}

fn setting_up_the_table_again_is_granted(_: &Host) -> Verdict {
    let file = table()?;
    for devices in [100, 0, 5000] {
        file.command(&uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices }).granted()?;
    }
    Ok(())
}

fn the_list_wants_a_range_of_ids(_: &Host) -> Verdict {
    let file = table()?;
    let mut array = vec![uda::LogicalDevice::default(); 1200];
    for (start, end) in [(0, 0), (5, 5), (6, 5), (0, 1125), (1124, 1125)] {
        let mut arg = uda::DeviceList { start, end, array: array.as_mut_ptr() as u64 };
        file.command(&uda::GET_DEV_LIST, &mut arg).refused(EINVAL)?;
    }
    Ok(())
}

fn the_list_tells_devices_in_order(host: &Host) -> Verdict {
    for (index, device) in list(&table()?)?.iter().enumerate() {
        equal("logical id", usize::from(device.logical), index)?;
        equal("physical id", u32::from(device.physical), host.physical[index])?;
        equal("hardware", device.hardware(), uda::HARDWARE_DAVINCI)?;
    }
    Ok(())
}

fn the_list_writes_at_absolute_places(host: &Host) -> Verdict {
    let mut array = [uda::LogicalDevice::default(); 4];
    let mut arg = uda::DeviceList { start: 1, end: 2, array: array.as_mut_ptr() as u64 };
    table()?.command(&uda::GET_DEV_LIST, &mut arg).granted()?;
    let array = std::hint::black_box(array);
    equal("valid elements", array.map(|element| element.valid()), [false, true, false, false])?;
    equal("physical id", u32::from(array[1].physical), host.physical[1])
}

fn a_list_to_nowhere_tells_what_was_not_copied(_: &Host) -> Verdict {
    let mut arg = uda::DeviceList { start: 0, end: 1, array: NOWHERE };
    positive("GET_DEV_LIST", table()?.command(&uda::GET_DEV_LIST, &mut arg), 8)
}

fn translate(command: &Command, from: u32) -> Result<(Answer<i32>, u32), Failure> {
    let mut arg = uda::Translation { from, to: 4711 };
    let answer = table()?.command(command, &mut arg);
    Ok((answer, std::hint::black_box(arg).to))
}

fn logical_ids_become_physical(host: &Host) -> Verdict {
    for (logical, &physical) in host.physical.iter().enumerate() {
        let (answer, to) = translate(&uda::DEVID_TO_UDEVID, logical as u32)?;
        answer.granted()?;
        equal("physical id", to, physical)?;
    }
    Ok(())
}

fn an_absent_logical_id_is_einval_and_writes_nothing(host: &Host) -> Verdict {
    for logical in [host.physical.len() as u32, 64, 99, 100, 1123, u32::MAX] {
        let (answer, to) = translate(&uda::DEVID_TO_UDEVID, logical)?;
        answer.refused(EINVAL)?;
        equal("output", to, 4711)?;
    }
    Ok(())
}

fn physical_ids_of_whole_devices_do_not_become_logical(host: &Host) -> Verdict {
    for physical in [host.physical[0], 100, 5000] {
        translate(&uda::UDEVID_TO_DEVID, physical)?.0.refused(EINVAL)?;
    }
    Ok(())
}

fn local_and_remote_ids_are_translated(host: &Host) -> Verdict {
    translate(&uda::LUDEVID_TO_RUDEVID, host.physical[0])?.0.granted()?;
    translate(&uda::RUDEVID_TO_LUDEVID, host.physical[0])?.0.granted().map(drop)
}

fn devmng_file() -> Result<Manager, Failure> {
    Manager::bound(module::DEVMNG)
}

fn the_platform_is_a_host(_: &Host) -> Verdict {
    let mut platform = 77u32;
    devmng_file()?.command(&devmng::GET_PLATINFO, &mut platform).granted()?;
    equal("platform", std::hint::black_box(platform), 1)
}

fn the_host_is_no_container(_: &Host) -> Verdict {
    let mut flag = 77u32;
    devmng_file()?.command(&devmng::GET_CONTAINER_FLAG, &mut flag).granted()?;
    equal("flag", std::hint::black_box(flag), 0)
}

/// CONTAINER_CMD with an output address.
fn ask_id(file: &Manager, command: u32, output: u64) -> Answer<i32> {
    let call = devmng::ContainerCall { device: 77, command, output, ..Default::default() };
    file.command(&devmng::CONTAINER_CMD, &mut devmng::ContainerArg { call, ..Default::default() })
}

fn the_process_is_told_its_ids(_: &Host) -> Verdict {
    let file = devmng_file()?;
    let fd = file.fd();
    let ask = move |command| {
        let mut id = 0i32;
        let call = devmng::ContainerCall { command, output: std::ptr::from_mut(&mut id) as u64, ..Default::default() };
        let mut arg = devmng::ContainerArg { call, ..Default::default() };
        let answer = ioctl(fd, devmng::CONTAINER_CMD.request(), std::ptr::from_mut(&mut arg) as u64);
        answer.map(|_| std::hint::black_box(id))
    };
    note_command("CONTAINER_CMD");
    let main = ask(devmng::BARE_TGID).granted()?;
    equal("thread id of the main thread", ask(devmng::BARE_PID).granted()?, main)?;
    let thread = std::thread::spawn(move || (ask(devmng::BARE_TGID), ask(devmng::BARE_PID)));
    let (process, thread) = thread.join().map_err(|_| Failure::broken("the thread panicked"))?;
    equal("process id in another thread", process.granted()?, main)?;
    holds("another thread has another thread id", thread.granted()? != main)
}

fn unknown_questions_for_ids_are_einval(_: &Host) -> Verdict {
    let file = devmng_file()?;
    let mut id = 0i32;
    for command in [0, 3, 99] {
        ask_id(&file, command, std::ptr::from_mut(&mut id) as u64).refused(EINVAL)?;
    }
    Ok(())
}

fn unreadable_questions_for_ids_have_their_own_errors(_: &Host) -> Verdict {
    let file = devmng_file()?;
    ask_id(&file, devmng::BARE_TGID, 0).refused(EINVAL)?;
    ask_id(&file, devmng::BARE_TGID, NOWHERE).refused(ENOMEM)?;
    file.command_at(&devmng::CONTAINER_CMD, 0).refused(EINVAL)?;
    file.command_at(&devmng::CONTAINER_CMD, NOWHERE).refused(ENODEV)
}

fn the_sign_is_48_zeros_and_always_the_same(_: &Host) -> Verdict {
    let file = devmng_file()?;
    let first = crate::tsd::register(&file)?;
    equal("sign", first.sign, vec![b'0'; 48])?;
    let mut id = 0i32;
    ask_id(&file, devmng::BARE_TGID, std::ptr::from_mut(&mut id) as u64).granted()?;
    equal("process id", first.tgid, std::hint::black_box(id))?;
    equal("process id, queried again", crate::tsd::register(&file)?.tgid, first.tgid)
}

fn no_device_process_is_found_before_one_was_started(_: &Host) -> Verdict {
    // SAFETY: getpid has no preconditions.
    let host_pid = unsafe { libc::getpid() };
    let mut arg = devmng::QueryPid { device: 0, host_pid, ..Default::default() };
    let answer = devmng_file()?.command(&devmng::QUERY_DEV_PID, &mut arg);
    holds("the answer is not 0", answer != Ok(0))
}

fn devmng_looks_at_the_number_only(_: &Host) -> Verdict {
    let file = devmng_file()?;
    for request in [0xC008_4D01, 0x5501] {
        let mut info = devmng::PciInfo::default();
        file.request(request, std::ptr::from_mut(&mut info) as u64).granted()?;
    }
    Ok(())
}

fn device_facts_want_the_plain_number(_: &Host) -> Verdict {
    let file = devmng_file()?;
    for command in [devmng::GET_DEVINFO.command, devmng::GET_PCIE_ID_INFO.command] {
        let mut info = devmng::DevInfo::default();
        let address = std::ptr::from_mut(&mut info) as u64;
        file.request(command.request() | 0xC008_0000, address).refused(EINVAL)?;
        file.command_at(&command, address).granted()?;
    }
    Ok(())
}

fn device_facts_lie_where_the_generation_has_them(host: &Host) -> Verdict {
    let mut info = devmng::DevInfo::default();
    devmng_file()?.command(&devmng::GET_DEVINFO, &mut info).granted()?;
    let bytes = zerocopy::IntoBytes::as_bytes(&info);
    let offset = match host.generation.delta().devinfo_size {
        size if size == size_of::<devmng::DevInfo85>() => offset_of!(devmng::DevInfo85, soc_version),
        _ => offset_of!(devmng::DevInfo, soc_version),
    };
    equal("name of the chip", &bytes[offset..offset + 6], b"Ascend")
}

/// A query about a device; its id is at `offset` in the argument.
fn ask_device(file: &Manager, command: &Command, offset: usize, id: u32) -> Answer<i32> {
    let mut words = [0u32; 128];
    words[offset / 4] = id;
    file.command_at(command, words.as_mut_ptr() as u64)
}

/// Commands with the same check of the id, and the offset of the id.
const FACTS: [(Command, usize); 3] =
    [(devmng::GET_PCIINFO.command, 0), (devmng::GET_DEVINFO.command, 4), (devmng::GET_PCIE_ID_INFO.command, 28)];
/// Commands with checks of their own.
const STATES: [(Command, usize); 3] = [
    (devmng::GET_HOST_PHY_MACH_FLAG.command, 0),
    (devmng::DEVICE_STATUS.command, 0),
    (devmng::GET_DEVICE_HEALTH_STATUS.command, 0),
];

fn an_absent_device_has_no_facts(_: &Host) -> Verdict {
    let file = devmng_file()?;
    for (command, offset) in &FACTS {
        ask_device(&file, command, *offset, ABSENT).refused(EINVAL)?;
        ask_device(&file, command, *offset, 0).granted()?;
    }
    Ok(())
}

fn an_absent_device_has_no_state(_: &Host) -> Verdict {
    let file = devmng_file()?;
    for (command, offset) in &STATES {
        ask_device(&file, command, *offset, ABSENT).refused(EFAULT)?;
        ask_device(&file, command, *offset, 0).granted()?;
    }
    Ok(())
}

fn an_id_out_of_range_has_no_facts(_: &Host) -> Verdict {
    let file = devmng_file()?;
    for (command, offset, code) in [
        (devmng::GET_PCIINFO.command, 0, EINVAL),
        (devmng::GET_PCIE_ID_INFO.command, 28, EINVAL),
        (devmng::DEVICE_STATUS.command, 0, EINVAL),
        (devmng::GET_DEVINFO.command, 4, ENODEV),
        (devmng::GET_HOST_PHY_MACH_FLAG.command, 0, EFAULT),
        (devmng::GET_DEVICE_HEALTH_STATUS.command, 0, EFAULT),
    ] {
        ask_device(&file, &command, offset, 5000).refused(code)?;
    }
    Ok(())
}

fn unreadable_questions_for_facts_have_their_own_errors(_: &Host) -> Verdict {
    let file = devmng_file()?;
    file.command_at(&devmng::GET_DEVINFO, NOWHERE).refused(EINVAL)?;
    file.command_at(&devmng::GET_HOST_PHY_MACH_FLAG, NOWHERE).refused(EINVAL)?;
    file.command_at(&devmng::GET_PCIINFO, NOWHERE).refused(EFAULT)?;
    file.command_at(&devmng::GET_PCIE_ID_INFO, NOWHERE).refused(ENODEV)?;
    file.command_at(&devmng::GET_PLATINFO, NOWHERE).refused(ENODEV)
}

fn a_null_question_for_the_device_info_is_einval(_: &Host) -> Verdict {
    devmng_file()?.command_at(&devmng::GET_DEVINFO, 0).refused(EINVAL)
}

fn a_null_question_for_the_pci_address_is_efault(_: &Host) -> Verdict {
    devmng_file()?.command_at(&devmng::GET_PCIINFO, 0).refused(EFAULT)
}

fn null_questions_for_ids_and_platform_are_einval(_: &Host) -> Verdict {
    let file = devmng_file()?;
    file.command_at(&devmng::GET_PCIE_ID_INFO, 0).refused(EINVAL)?;
    file.command_at(&devmng::GET_PLATINFO, 0).refused(EINVAL)
}

fn unknown_numbers_of_devmng_are_einval(_: &Host) -> Verdict {
    let file = devmng_file()?;
    let mut words = [0u64; 64];
    for number in [0, 2, 205, 206, 207, 208, 209, 210, 211] {
        file.request(0x4D00 + number, words.as_mut_ptr() as u64).refused(EINVAL)?;
    }
    Ok(())
}

fn pci_ids_come_with_the_logical_id(_: &Host) -> Verdict {
    let mut info = devmng::PcieIdInfo::default();
    devmng_file()?.command(&devmng::GET_PCIE_ID_INFO, &mut info).granted()?;
    equal("logical id", info.logical, 0)?;
    holds("the vendor id is set", info.vendor != 0)
}

fn urd_file() -> Result<Manager, Failure> {
    Manager::bound(module::URD)
}

/// The argument of a feature call.
fn call(key: Key, input: &mut [u32], output: &mut [u32]) -> CallArg {
    let address = |slice: &mut [u32]| if slice.is_empty() { 0 } else { slice.as_mut_ptr() as u64 };
    CallArg {
        key: CallKey {
            main: key.main,
            sub: key.sub,
            filter: if key.filter.is_empty() { 0 } else { key.filter.as_ptr() as u64 },
            filter_length: key.filter.len() as u32,
            ..Default::default()
        },
        buffers: CallBuffers {
            input: address(input),
            input_length: size_of_val(input) as u32,
            output: address(output),
            output_length: size_of_val(output) as u32,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// A feature call with words as input and output.
fn feature(file: &Manager, key: Key, input: &mut [u32], output: &mut [u32]) -> Answer<i32> {
    file.command(&urd::CALL, &mut call(key, input, output))
}

const UNKNOWN: Key = Key { main: 0x45, sub: 9999, filter: "" };

fn an_unknown_feature_is_eopnotsupp(_: &Host) -> Verdict {
    feature(&urd_file()?, UNKNOWN, &mut [], &mut []).refused(EOPNOTSUPP)
}

fn a_feature_call_needs_its_argument(_: &Host) -> Verdict {
    let file = urd_file()?;
    file.command_at(&urd::CALL, 0).refused(EINVAL)?;
    positive("a call with an unmapped argument", file.command_at(&urd::CALL, NOWHERE), 64)
}

fn lengths_are_looked_at_before_the_feature(_: &Host) -> Verdict {
    let file = urd_file()?;
    let mut buffer = vec![0u32; 2000];
    let good = call(UNKNOWN, &mut [], &mut []);
    let there = buffer.as_mut_ptr() as u64;
    for buffers in [
        CallBuffers { input: there, input_length: 4097, ..good.buffers },
        CallBuffers { output: there, output_length: 4097, ..good.buffers },
        CallBuffers { input: 0, input_length: 4, ..good.buffers },
        CallBuffers { input: there, input_length: 0, ..good.buffers },
    ] {
        file.command(&urd::CALL, &mut CallArg { buffers, ..good }).refused(EINVAL)?;
    }
    Ok(())
}

fn an_unmapped_input_is_efault(_: &Host) -> Verdict {
    let good = call(UNKNOWN, &mut [], &mut []);
    let buffers = CallBuffers { input: NOWHERE, input_length: 4, ..good.buffers };
    urd_file()?.command(&urd::CALL, &mut CallArg { buffers, ..good }).refused(EFAULT)
}

fn filters_have_their_own_lengths(_: &Host) -> Verdict {
    let file = urd_file()?;
    let text = [b'x'; 256];
    let there = text.as_ptr() as u64;
    let with = |key: Key, filter: u64, filter_length: u32| {
        let good = call(key, &mut [], &mut []);
        let key = CallKey { filter, filter_length, ..good.key };
        file.command(&urd::CALL, &mut CallArg { key, ..good })
    };
    with(UNKNOWN, there, 0).refused(EINVAL)?;
    with(UNKNOWN, there, 129).refused(EINVAL)?;
    with(UNKNOWN, there, 128).refused(EOPNOTSUPP)?;
    with(UNKNOWN, NOWHERE, 7).refused(EFAULT)?;
    // A length without a filter is not checked.
    let mut output = [77u32];
    let mut arg = call(urd::PROBED, &mut [], &mut output);
    arg.key.filter_length = 7;
    file.command(&urd::CALL, &mut arg).granted().map(drop)
}

fn a_filter_may_count_its_nul(host: &Host) -> Verdict {
    let Some(sdid) = host.sdid else { return Err(Failure::skipped("needs a super-pod device id")) };
    let mut spod = urd::SpodInfo::default();
    let mut input = urd::DeviceInfoIn {
        sub_command: 1,
        buffer: std::ptr::from_mut(&mut spod) as u64,
        buffer_size: size_of::<urd::SpodInfo>() as u32,
        ..Default::default()
    };
    let mut output = [0u32];
    let filter = format!("{}\0", urd::SPOD_INFO.filter);
    let mut arg = call(urd::SPOD_INFO, &mut [], &mut output);
    arg.key.filter = filter.as_ptr() as u64;
    arg.key.filter_length = filter.len() as u32;
    arg.buffers.input = std::ptr::from_mut(&mut input) as u64;
    arg.buffers.input_length = size_of_val(&input) as u32;
    urd_file()?.command(&urd::CALL, &mut arg).granted()?;
    equal("super-pod id", std::hint::black_box(spod).sdid, sdid)
}

fn a_feature_is_called_by_one_number_or_its_own(_: &Host) -> Verdict {
    let file = urd_file()?;
    let (mut input, mut output) = ([0u32], [77u32]);
    let mut arg = call(urd::SPLIT_MODE, &mut input, &mut output);
    let address = std::ptr::from_mut(&mut arg) as u64;
    file.request(0x5602, address).refused(ENODEV)?;
    file.request(0x4500 | 16, address).refused(ENODEV)?;
    file.request(0x4500 | 15, address).granted()?;
    file.request(0xC040_4500 | 15, address).granted()?;
    file.request(0x5601, address).granted().map(drop)
}

fn the_split_mode_is_told_of_exact_lengths(_: &Host) -> Verdict {
    let file = urd_file()?;
    let mut output = [77u32];
    feature(&file, urd::SPLIT_MODE, &mut [0], &mut output).granted()?;
    holds("the mode is one of three", std::hint::black_box(output)[0] <= 2)?;
    feature(&file, urd::SPLIT_MODE, &mut [0, 0], &mut [0]).refused(EINVAL)?;
    feature(&file, urd::SPLIT_MODE, &mut [0], &mut [0, 0]).refused(EINVAL)?;
    let mut arg = call(urd::SPLIT_MODE, &mut [0], &mut [0]);
    let mut input = [0u32];
    arg.buffers = CallBuffers {
        input: input.as_mut_ptr() as u64,
        input_length: 4,
        output: NOWHERE,
        output_length: 4,
        ..Default::default()
    };
    file.command(&urd::CALL, &mut arg).refused(EFAULT)?;
    arg.buffers.output = 0;
    file.command(&urd::CALL, &mut arg).granted().map(drop)
}

fn the_chip_query_wants_its_exact_length(host: &Host) -> Verdict {
    let file = urd_file()?;
    feature(&file, urd::CHIP_INFO, &mut [0], &mut [0; 27]).refused(EINVAL)?;
    feature(&file, urd::CHIP_INFO, &mut [0], &mut [0; 29]).refused(EINVAL)?;
    let mut output = [0u32; 28];
    feature(&file, urd::CHIP_INFO, &mut [0], &mut output).granted()?;
    let output = std::hint::black_box(output);
    equal("physical id", output[0], host.physical[0])?;
    equal("name", &zerocopy::IntoBytes::as_bytes(&output)[8..15], b"Ascend\0")
}

fn an_absent_device_has_no_features(_: &Host) -> Verdict {
    let file = urd_file()?;
    feature(&file, urd::SPLIT_MODE, &mut [ABSENT], &mut [0]).refused(EINVAL)?;
    feature(&file, urd::INIT_STATUS, &mut [ABSENT], &mut [0]).refused(EINVAL)?;
    feature(&file, urd::CHIP_INFO, &mut [ABSENT], &mut [0; 28]).refused(EINVAL)
}

fn health_answers_positive_numbers(_: &Host) -> Verdict {
    let file = urd_file()?;
    positive("health", feature(&file, urd::HEALTH, &mut [0], &mut [0]), 0)?;
    positive("health of an absent device", feature(&file, urd::HEALTH, &mut [ABSENT], &mut [0]), 1)?;
    positive("health without a device id", feature(&file, urd::HEALTH, &mut [], &mut []), 8)
}

fn the_pci_address_wants_28_bytes(_: &Host) -> Verdict {
    let file = urd_file()?;
    feature(&file, urd::PCIE_INFO, &mut [0], &mut [0; 6]).refused(EINVAL)?;
    feature(&file, urd::PCIE_INFO, &mut [0], &mut [0; 7]).granted()?;
    let mut output = [77u32; 8];
    feature(&file, urd::PCIE_INFO, &mut [0], &mut output).granted()?;
    equal("eighth word", std::hint::black_box(output)[7], 0)?;
    feature(&file, urd::PCIE_INFO, &mut [0], &mut [0; 16]).granted().map(drop)
}

fn chip_and_die_want_136_bytes(host: &Host) -> Verdict {
    let file = urd_file()?;
    let mut physical = [host.physical[0]];
    feature(&file, urd::PHYSICAL_INFO, &mut physical, &mut [0; 2]).refused(EINVAL)?;
    feature(&file, urd::PHYSICAL_INFO, &mut physical, &mut [0; 33]).refused(EINVAL)?;
    feature(&file, urd::PHYSICAL_INFO, &mut physical, &mut [0; 34]).granted().map(drop)
}

fn empty_probes_tell_the_generation(host: &Host) -> Verdict {
    let file = urd_file()?;
    let nine = host.generation >= Generation::V9_0_0;
    for (key, known) in [
        (urd::UDIS_GET_85, !nine),
        (urd::UDIS_GET, nine),
        (urd::PHYSICAL_INFO, nine),
        (urd::MEMORY_INFO, host.generation >= Generation::V26_1),
    ] {
        feature(&file, key, &mut [], &mut []).refused(if known { EINVAL } else { EOPNOTSUPP })?;
    }
    Ok(())
}

fn peer_attributes_have_the_generations_size(host: &Host) -> Verdict {
    let file = urd_file()?;
    let size = host.generation.delta().p2p_size / 4;
    for words in [6, 8] {
        // P2P_CAN_ACCESS from device 0 to itself has no side effect.
        let mut input = vec![0u32; words];
        input[0] = urd::P2P_CAN_ACCESS;
        input[2] = host.physical[0];
        let answer = feature(&file, urd::P2P, &mut input, &mut vec![0; words]);
        if words == size {
            holds("the length is accepted", answer != Err(EINVAL))?;
        } else {
            answer.refused(EINVAL)?;
        }
    }
    Ok(())
}

fn published_values_want_exact_lengths(host: &Host) -> Verdict {
    let file = urd_file()?;
    let key = host.generation.delta().udis_get;
    feature(&file, key, &mut [0; 7], &mut [0; 4]).refused(EINVAL)?;
    feature(&file, key, &mut [0; 8], &mut [0; 3]).refused(EINVAL)?;
    let mut data = [0u8; 256];
    let mut input =
        urd::UdisIn { module: 1, name: *b"no_such_value\0\0\0", length: 208, data: data.as_mut_ptr() as u64 };
    let mut ask = |length| {
        input.length = length;
        let mut output = [0u32; 4];
        let mut arg = call(key, &mut [], &mut output);
        arg.buffers.input = std::ptr::from_mut(&mut input) as u64;
        arg.buffers.input_length = size_of::<urd::UdisIn>() as u32;
        file.command(&urd::CALL, &mut arg)
    };
    ask(208).refused(EOPNOTSUPP)?;
    ask(0).refused(EINVAL)?;
    ask(209).refused(EINVAL)
}

fn the_other_modules_of_the_driver_bind_too(_: &Host) -> Verdict {
    let mut files = Vec::new();
    for name in ["RESMNG", "rmo", "DP_PROC_MNG"] {
        files.push(Manager::bound(name)?);
    }
    Ok(())
}

fn a_device_process_of_no_device_is_einval(_: &Host) -> Verdict {
    let file = devmng_file()?;
    // SAFETY: getpid has no preconditions.
    let host_pid = unsafe { libc::getpid() };
    let mut arg = devmng::QueryPid { device: 5000, host_pid, ..Default::default() };
    file.command(&devmng::QUERY_DEV_PID, &mut arg).refused(EINVAL)?;
    file.command_at(&devmng::QUERY_DEV_PID, 0).refused(EINVAL)
}

fn the_machine_is_one_of_three(_: &Host) -> Verdict {
    let mut arg = devmng::MachineFlag::default();
    devmng_file()?.command(&devmng::GET_HOST_PHY_MACH_FLAG, &mut arg).granted()?;
    let known = [devmng::MACHINE_PHYSICAL, devmng::MACHINE_VIRTUAL, devmng::MACHINE_CONTAINER];
    holds("the flag is known", known.contains(&std::hint::black_box(arg).flag))
}

fn boot_state_goes_by_physical_id(host: &Host) -> Verdict {
    feature(&urd_file()?, urd::BOOT_STATUS, &mut [host.physical[0]], &mut [0]).granted().map(drop)
}

fn probed_devices_are_counted(host: &Host) -> Verdict {
    let mut output = [0u32];
    feature(&urd_file()?, urd::PROBED, &mut [], &mut output).granted()?;
    holds("the count includes the listed devices", std::hint::black_box(output)[0] as usize >= host.physical.len())
}

fn peer_attributes_of_no_device_are_efault(host: &Host) -> Verdict {
    let mut input = [0u32; 8];
    input[0] = urd::P2P_CAN_ACCESS;
    input[1] = ABSENT;
    input[2] = host.physical[0];
    feature(&urd_file()?, urd::P2P, &mut input, &mut [0; 8]).refused(EFAULT)
}
