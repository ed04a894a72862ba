//! What the vendor's runtime asks beside memory: the chip, the state of an address and of the
//! device process, registers of the device, its statistics and its faults.

use super::plain_memory::managed;
use crate::host::Host;
use crate::manager::{Manager, NOWHERE};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, note_command, rule};
use crate::session::{ABSENT, GIB, MIB2, Session, heap_address, poke};
use crate::tsd::{Channel, question, register, shake_hands};
use ascend_ioctl::davinci::module;
use ascend_ioctl::svm::{self, Op};
use ascend_ioctl::urd::{self, CallArg, CallBuffers, CallKey};
use ascend_ioctl::{Generation, devmng};
use libc::{EINVAL, ENODEV, EOPNOTSUPP, ETIMEDOUT};
use std::mem::offset_of;

pub const RULES: &[Rule] = &[
    rule!(the_hardware_version_names_a_chip_of_this_driver, Inferred)
        .decided_by("devdrv_manager_get_devinfo, devdrv_manager_ioctl.c"),
    rule!(an_address_tells_what_lies_behind_it, Source).decided_by("devmm_ioctl_get_va_status_info, devmm_proc_info.c"),
    rule!(managed_memory_tells_where_its_pages_are, Source)
        .decided_by("devmm_ioctl_get_va_status_info, devmm_proc_info.c"),
    rule!(an_address_outside_of_heaps_tells_nothing, Source).decided_by("devmm_get_page_bitmap, devmm_proc_info.c"),
    rule!(a_new_device_process_has_no_status, Source)
        .decided_by("devmm_ioctl_query_process_status, svm_master_process_status_mng.c"),
    rule!(an_unknown_status_of_a_process_is_einval, Source)
        .decided_by("devmm_ioctl_query_process_status, svm_master_process_status_mng.c"),
    rule!(the_status_of_other_processes_is_answered_with_3, Source)
        .decided_by("devmm_ioctl_query_process_status, svm_master_process_status_mng.c"),
    rule!(a_device_tells_where_its_registers_are, Inferred)
        .decided_by("devmm_send_map_addr_msg, svm_master_addr_map.c"),
    rule!(unknown_registers_are_einval, Source).decided_by("devmm_map_dev_reserve, svm_master_addr_map.c"),
    rule!(statistics_of_device_processes_are_answered, Inferred)
        .decided_by("dp_proc_mng_ioctl_get_mem_stats, dp_proc_mng_proc_info.c"),
    rule!(statistics_want_a_device, Source)
        .decided_by("dp_proc_mng_convert_id_from_vir_to_phy, dp_proc_mng_module_ops.c"),
    rule!(the_host_has_no_other_command_for_statistics, Source)
        .decided_by("dp_proc_mng_dispatch_ioctl, dp_proc_mng_module_ops.c"),
    rule!(faults_of_wrong_lengths_are_answered_with_8, Source).decided_by("dms_event_get_fault_event, dms_event.c"),
    rule!(a_wait_for_a_fault_ends, Source).decided_by("dms_event_get_exception, dms_event_distribute.c"),
    rule!(a_wait_for_a_fault_has_a_limit, Source).decided_by("dms_event_wait_interrupt, dms_event_distribute.c"),
    rule!(the_faults_of_a_device_are_listed, Source).decided_by("dms_event_get_current_fault_event, dms_event.c"),
    rule!(the_connection_of_devices_is_told, Source).decided_by("devdrv_get_connect_type_urd, msg_chan_urd_adapt.c"),
    rule!(the_daemon_tells_its_class_of_service, Inferred).decided_by("hdcdrv_send, hdcdrv_core.c").needs(&[Need::Hdc]),
];

fn the_hardware_version_names_a_chip_of_this_driver(host: &Host) -> Verdict {
    let mut info = devmng::DevInfo::default();
    Manager::bound(module::DEVMNG)?.command(&devmng::GET_DEVINFO, &mut info).granted()?;
    let bytes = zerocopy::IntoBytes::as_bytes(&info);
    let offset = match host.generation.delta().devinfo_size {
        size if size == size_of::<devmng::DevInfo85>() => offset_of!(devmng::DevInfo85, hardware_version),
        _ => offset_of!(devmng::DevInfo, hardware_version),
    };
    // Bits 8 to 15: Ascend910, 310P, and 910B or 910_93.
    holds("the chip is 1, 4 or 5", [1, 4, 5].contains(&bytes[offset + 1]))
}

/// DBG_VA_STATUS: kind and device.
fn status(session: &Session, address: u64) -> Answer<(u32, u32)> {
    let para = svm::DebugVaStatus { address, devid: 77, mem_type: 77 };
    session.svm.ask(Op::DbgVaStatus, 0, &para).map(|answer| (answer.mem_type, answer.devid))
}

fn an_address_tells_what_lies_behind_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let reserved = session.reserve(MIB2)?;
    equal("nothing is mapped", status(&session, reserved).granted()?, (1, 0))?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    equal("device memory", status(&session, far + 7).granted()?, (4, 0))?;
    let (_, near) = session.host_mapping(MIB2)?;
    equal("host memory", status(&session, near).granted()?, (2, 0))?;
    session.unmap(far).granted()?;
    equal("after the unmap", status(&session, far).granted()?, (1, 0))
}

fn managed_memory_tells_where_its_pages_are(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, 3 * MIB2)?;
    equal("no pages", status(&session, address).granted()?, (1, 0))?;
    session.prefetch(0, address, MIB2).granted()?;
    equal("on the device", status(&session, address + 7).granted()?, (4, 0))?;
    session.write(address + MIB2, b"some bytes").granted()?;
    equal("after a copy from the host", status(&session, address + MIB2).granted()?, (2, 0))?;
    poke(address + 2 * MIB2, 1);
    equal("after a touch of the CPU", status(&session, address + 2 * MIB2).granted()?, (2, 0))?;
    session.free(address).granted()
}

fn an_address_outside_of_heaps_tells_nothing(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let heap = heap_address(session.heap()?);
    status(&session, heap).granted()?;
    // Rules enable heaps of at most 1 GiB, from the front.
    for address in [0, svm::SVM_START, svm::DYNAMIC_START, heap_address(svm::HEAPS - 1) + GIB - 1] {
        status(&session, address).refused(EINVAL)?;
    }
    Ok(())
}

/// PROCESS_STATUS_QUERY; 0 or a positive answer, and the status.
fn process_status(session: &Session, process_type: u32, pid_status: u32) -> Answer<(i32, u32)> {
    let para = svm::ProcessStatusQuery { process_type, pid_status, status_result: 77 };
    let mut arg = svm::Arg::new(0, &para);
    let value = session.svm.raw(Op::ProcessStatusQuery, &mut arg)?;
    Ok((value, arg.para::<svm::ProcessStatusQuery>().status_result))
}

fn a_new_device_process_has_no_status(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for kind in 1..=3 {
        equal("status", process_status(&session, 0, kind).granted()?, (0, 0))?;
    }
    Ok(())
}

fn an_unknown_status_of_a_process_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for kind in [0, 4, u32::MAX] {
        process_status(&session, 0, kind).refused(EINVAL)?;
    }
    Ok(())
}

fn the_status_of_other_processes_is_answered_with_3(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    // Nothing is written back.
    equal("answer", process_status(&session, 1, 1).granted()?, (3, 77))?;
    equal("answer", process_status(&session, 1, 99).granted()?, (3, 77))
}

fn registers(session: &Session, kind: u32) -> Answer<svm::MapDevReserve> {
    session.svm.ask(Op::MapDevReserve, 0, &svm::MapDevReserve { addr_type: kind, ..Default::default() })
}

fn a_device_tells_where_its_registers_are(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    // The registers of the stars: the runtime does not start without them.
    let answer = registers(&session, 1).granted()?;
    holds("an address and a length", answer.address != 0 && answer.len != 0)
}

fn unknown_registers_are_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    registers(&session, 5).refused(EINVAL)?;
    registers(&session, u32::MAX).refused(EINVAL)
}

/// GET_MEM_STATS.
const STATISTICS: u32 = 0xC030_4702;

fn statistics(logical: u32) -> Result<Answer<[u64; 6]>, Failure> {
    let file = Manager::bound("DP_PROC_MNG")?;
    let mut arg = [u64::from(logical), 0, 0, 0, 0, 0];
    let answer = file.request(STATISTICS, arg.as_mut_ptr() as u64).map(|_| std::hint::black_box(arg));
    drop(file);
    note_command("GET_MEM_STATS");
    Ok(answer)
}

fn statistics_of_device_processes_are_answered(host: &Host) -> Verdict {
    let answer = statistics(0)?.granted()?;
    equal("logical and physical id", answer[0], u64::from(host.physical[0]) << 32)
}

fn statistics_want_a_device(_: &Host) -> Verdict {
    statistics(ABSENT)?.refused(EINVAL)?;
    statistics(1124)?.refused(ENODEV)?;
    let file = Manager::bound("DP_PROC_MNG")?;
    file.request(STATISTICS, 0).refused(EINVAL)?;
    file.request(STATISTICS, NOWHERE).refused(EINVAL)
}

fn the_host_has_no_other_command_for_statistics(_: &Host) -> Verdict {
    let file = Manager::bound("DP_PROC_MNG")?;
    let mut arg = [0u64; 6];
    let address = arg.as_mut_ptr() as u64;
    file.request(0x4030_4701, address).refused(EOPNOTSUPP)?;
    file.request(0xC030_4703, address).refused(EINVAL)?;
    file.request(0xC030_4102, address).refused(EINVAL)
}

/// The next fault, the list of faults, and how the devices are connected.
const NEXT_FAULT: u32 = 0;
const FAULTS: u32 = 28;
const CONNECTION: u32 = 49;
const FAULT: usize = 344;
const FAULT_LIST: usize = 44_040;

/// A query about faults.
fn faults(sub: u32, input: &[u32], output: usize) -> Result<Answer<i32>, Failure> {
    query(sub, input, &mut vec![0u8; output])
}

fn query(sub: u32, input: &[u32], room: &mut [u8]) -> Result<Answer<i32>, Failure> {
    let file = Manager::bound(module::URD)?;
    let mut arg = CallArg {
        key: CallKey { main: urd::MAIN_BASIC, sub, ..Default::default() },
        buffers: CallBuffers {
            input: if input.is_empty() { 0 } else { input.as_ptr() as u64 },
            input_length: size_of_val(input) as u32,
            output: room.as_mut_ptr() as u64,
            output_length: room.len() as u32,
            ..Default::default()
        },
        ..Default::default()
    };
    let answer = file.command(&urd::CALL, &mut arg);
    drop(file);
    note_command("the question");
    Ok(answer)
}

/// The input of a wait for a fault of any device, by the vendor's user library.
fn wait(host: &Host, milliseconds: i32) -> Vec<u32> {
    let mut input = vec![1, milliseconds as u32];
    if host.generation >= Generation::V26_1 {
        input.push(u32::MAX);
        input.resize(16, 0);
    }
    input
}

fn faults_of_wrong_lengths_are_answered_with_8(host: &Host) -> Verdict {
    let input = wait(host, 0);
    equal("a short output", faults(NEXT_FAULT, &input, FAULT - 1)?.granted()?, 8)?;
    equal("a short input", faults(NEXT_FAULT, &input[1..], FAULT)?.granted()?, 8)?;
    equal("a short list", faults(FAULTS, &[0], FAULT)?.granted()?, 8)?;
    equal("two devices", faults(FAULTS, &[0, 0], FAULT_LIST)?.granted()?, 8)
}

fn a_wait_for_a_fault_ends(host: &Host) -> Verdict {
    for milliseconds in [0, 20] {
        // A host may have a fault to tell.
        let answer = faults(NEXT_FAULT, &wait(host, milliseconds), FAULT)?;
        holds("no fault, or one", [Err(ETIMEDOUT), Ok(0)].contains(&answer))?;
    }
    Ok(())
}

fn a_wait_for_a_fault_has_a_limit(host: &Host) -> Verdict {
    for milliseconds in [-2, 30_001] {
        equal("answer", faults(NEXT_FAULT, &wait(host, milliseconds), FAULT)?.granted()?, 8)?;
    }
    let mut other = wait(host, 0);
    other[0] = 2;
    equal("an unknown asker", faults(NEXT_FAULT, &other, FAULT)?.granted()?, 8)
}

fn the_faults_of_a_device_are_listed(_: &Host) -> Verdict {
    equal("a device", faults(FAULTS, &[0], FAULT_LIST)?.granted()?, 0)?;
    equal("an absent device", faults(FAULTS, &[ABSENT], FAULT_LIST)?.granted()?, 1)
}

fn the_connection_of_devices_is_told(_: &Host) -> Verdict {
    let mut connection = [0xFF; 8];
    equal("answer", query(CONNECTION, &[], &mut connection)?.granted()?, 0)?;
    // The link of Ascend 950 is 2.
    equal("the connection", std::hint::black_box(connection), [0; 8])?;
    query(CONNECTION, &[], &mut connection[..4])?.map(drop).refused(EINVAL)
}

fn the_daemon_tells_its_class_of_service(_: &Host) -> Verdict {
    let file = Manager::bound(module::DEVMNG)?;
    let identity = register(&file)?;
    let channel = Channel::connect(0)?;
    shake_hands(&channel, &identity)?;
    channel.send(&question(38, identity.tgid)).granted()?;
    channel.wait_for(39, 30).map(drop)
}
