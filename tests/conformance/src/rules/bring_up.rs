//! From a bound file to a session with a device, and back.

use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, ioctl, mmap, munmap, page_size};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{ABSENT, GIB, MIB2, MODULE, Session, Svm, create_of, eventually, heap_address};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, HOST_ID, Op};
use libc::{
    EADDRNOTAVAIL, EALREADY, EEXIST, EFAULT, EINVAL, ENODEV, ENONET, EOPNOTSUPP, ESRCH, MAP_FIXED, MAP_FIXED_NOREPLACE,
    MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
};

pub const RULES: &[Rule] = &[
    rule!(a_process_is_allocated_once_per_file, Ran).decided_by("devmm_alloc_svm_proc_set_to_file, svm_proc_mng.c"),
    rule!(initialising_before_allocating_is_einval, Ran).decided_by("devmm_is_svm_process_init, svm_module_ops.c"),
    rule!(segments_can_be_queried_before_anything_else, Ran).decided_by("devmm_dispatch_ioctl, svm_module_ops.c"),
    rule!(segments_are_those_of_the_generation, Ran).decided_by("devmm_init_dev_set_mmap_para, svm_master_mem_mng.c"),
    rule!(segments_need_room_for_all, Ran).decided_by("devmm_ioctl_get_mmap_para, devmm_proc_info.c"),
    rule!(segments_to_nowhere_are_einval, Ran).decided_by("devmm_ioctl_get_mmap_para, devmm_proc_info.c"),
    rule!(segments_to_an_unmapped_array_are_einval, Source).decided_by("devmm_ioctl_get_mmap_para, devmm_proc_info.c"),
    rule!(the_segment_question_answers_nothing_else, Ran).decided_by("devmm_ioctl_get_mmap_para, devmm_proc_info.c"),
    rule!(segments_by_a_write_only_word_come_without_their_count, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(mapping_before_allocating_is_einval, Ran).decided_by("devmm_file_priv_check, svm_module_ops.c"),
    rule!(segments_are_mapped_in_order, Ran)
        .decided_by("devmm_mmap_vma_check, svm_module_ops.c")
        .since(Generation::V9_0_0),
    rule!(segments_are_mapped_whole, Ran).decided_by("devmm_mmap_vma_check, svm_module_ops.c"),
    rule!(fixed_mappings_are_einval, Ran).decided_by("drv_ascend_intf_get_unmapped_area, davinci_intf_init.c"),
    rule!(an_occupied_segment_is_einval_and_can_be_tried_again, Ran)
        .decided_by("devmm_mmap_vma_check, svm_module_ops.c"),
    rule!(a_segment_is_mapped_once, Source)
        .decided_by("devmm_mmap_vma_check, svm_module_ops.c")
        .since(Generation::V9_0_0),
    rule!(a_file_opened_for_reading_carries_a_session, Ran).decided_by("devmm_svm_mmap, svm_module_ops.c"),
    rule!(commands_before_initialising_are_einval, Ran).decided_by("devmm_is_svm_process_init, svm_module_ops.c"),
    rule!(initialising_tells_page_sizes, Ran).decided_by("devmm_ioctl_init_process, devmm_proc_info.c"),
    rule!(initialising_twice_is_esrch, Ran).decided_by("devmm_ioctl_init_process, devmm_proc_info.c"),
    rule!(initialising_needs_the_exact_word, Ran).decided_by("devmm_is_svm_process_init, svm_module_ops.c"),
    rule!(a_session_without_segments_is_granted, Ran).decided_by("devmm_ioctl_init_process, devmm_proc_info.c"),
    rule!(without_segments_host_memory_cannot_be_mapped, Ran).decided_by("devmm_remap_huge_pages, devmm_proc_info.c"),
    rule!(without_segments_host_heaps_are_einval, Ran).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(without_segments_device_memory_works, Ran).decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(without_segments_cpu_access_is_einval, Ran).decided_by("devmm_access_remap_addrs, svm_master_mem_map.c"),
    rule!(a_late_first_segment_ends_the_session, Ran).decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(a_late_further_segment_is_refused_and_harmless, Ran)
        .decided_by("_devmm_svm_mmap_config_svm_proc, svm_module_ops.c")
        .since(Generation::V9_0_0),
    rule!(without_the_host_pin_segment_the_session_is_whole, Ran)
        .decided_by("devmm_check_and_set_svm_static_reserve_vma, svm_module_ops.c")
        .since(Generation::V9_0_0),
    rule!(without_the_svm_segment_dynamic_mappings_still_work, Ran)
        .decided_by("devmm_handle_svm_proc_addr, svm_module_ops.c"),
    rule!(a_second_session_is_eexist_until_the_first_is_gone, Ran)
        .decided_by("devmm_add_to_svm_proc_hashtable, svm_proc_mng.c")
        .needs(&[Need::Leak]),
    rule!(a_session_can_be_opened_again_after_an_orderly_end, Ran)
        .decided_by("devmm_svm_mmu_notifier_unreg, svm_mmu_notifier.c"),
    rule!(a_session_without_segments_blocks_the_next_until_its_range_is_unmapped, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c")
        .needs(&[Need::Leak]),
    rule!(closing_a_second_session_file_orderly_disturbs_nothing, Ran)
        .decided_by("drv_ascend_make_release_list, davinci_intf_init.c"),
    rule!(unknown_numbers_are_einval, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(a_foreign_magic_is_einval, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(a_null_argument_is_einval, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(an_unmapped_argument_is_einval, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(a_command_without_handler_is_eopnotsupp, Ran)
        .decided_by("devmm_dispatch_ioctl_use_svm_proc, svm_module_ops.c"),
    rule!(a_command_without_handler_needs_a_session, Ran)
        .decided_by("devmm_ioctl_get_svm_proc_from_file, svm_module_ops.c"),
    rule!(public_commands_without_handler_need_no_session, Ran)
        .decided_by("devmm_ioctl_get_svm_proc_from_file, svm_module_ops.c"),
    rule!(size_bits_are_not_looked_at, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(a_write_only_word_executes_and_tells_nothing, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(an_unwritable_argument_is_einval_but_executed, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(nothing_is_written_back_on_error, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(the_head_comes_back_with_the_physical_id, Ran)
        .decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(ids_out_of_range_are_enodev, Ran).decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(absent_ids_are_einval, Ran).decided_by("devmm_container_vir_to_phs_devid, devmm_proc_info.c"),
    rule!(heap_and_reservation_commands_take_any_id, Ran)
        .decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(setting_up_an_absent_device_is_einval, Ran).decided_by("devmm_container_vir_to_phs_devid, devmm_proc_info.c"),
    rule!(setting_up_the_host_is_efault, Ran).decided_by("devmm_setup_device_msg_send, devmm_proc_info.c"),
    rule!(setting_up_an_id_out_of_range_is_enodev, Ran)
        .decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(setting_up_twice_is_granted, Ran).decided_by("devmm_setup_device_proc, devmm_proc_info.c"),
    rule!(setting_up_tells_that_user_pages_can_be_pinned, Ran).decided_by("devmm_setup_dev_info, devmm_proc_info.c"),
    rule!(a_refused_set_up_can_be_repeated_with_a_device_process, Inferred)
        .decided_by("devmm_setup_device_msg_send, devmm_proc_info.c"),
    rule!(a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("_devmm_agent_mem_create, svm_master_mem_create.c"),
    rule!(closing_a_device_that_was_never_set_up_is_granted, Source)
        .decided_by("devmm_ioctl_close_device, devmm_proc_info.c"),
    rule!(closing_the_host_is_granted, Ran).decided_by("devmm_ioctl_close_device, devmm_proc_info.c"),
    rule!(a_closed_device_forgets_its_memory, Inferred)
        .decided_by("devmm_agent_normal_mem_release, svm_master_mem_create.c"),
    rule!(a_device_prepared_for_closing_takes_no_asynchronous_copies, Ran)
        .decided_by("devmm_check_memcpy_is_allow, svm_master_memcpy.c"),
    rule!(a_device_prepared_for_closing_still_copies_and_creates, Ran)
        .decided_by("devmm_check_memcpy_is_allow, svm_master_memcpy.c"),
    rule!(copies_after_closing_are_einval, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(closing_leaves_reservations_in_use_until_their_heap_goes, Ran)
        .decided_by("devmm_destroy_all_heap_vmmas_by_devid, svm_master_mem_map.c"),
    rule!(memory_can_be_mapped_again_where_a_closed_device_had_it, Ran)
        .decided_by("devmm_destroy_all_heap_vmmas_by_devid, svm_master_mem_map.c"),
    rule!(private_segments_take_no_host_memory, Ran).decided_by("devmm_remap_huge_pages, devmm_proc_info.c"),
    rule!(without_the_pool_or_managed_segment_host_heaps_are_einval, Ran)
        .decided_by("devmm_check_and_set_svm_static_reserve_vma, svm_module_ops.c")
        .since(Generation::V26_1),
    rule!(a_second_file_cannot_map_the_segments_of_a_session, Ran).decided_by("devmm_mmap_vma_check, svm_module_ops.c"),
    rule!(the_map_capability_has_its_generations_number, Ran)
        .decided_by("devmm_dispatch_ioctl_use_svm_proc, svm_module_ops.c")
        .since(Generation::V9_0_0),
];

fn a_process_is_allocated_once_per_file(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.alloc_process().granted()?;
    svm.alloc_process().refused(EALREADY)
}

fn initialising_before_allocating_is_einval(host: &Host) -> Verdict {
    Svm::open(host)?.init().refused(EINVAL)
}

fn segments_can_be_queried_before_anything_else(host: &Host) -> Verdict {
    Svm::open(host)?.segments(16).granted().map(drop)
}

fn segments_are_those_of_the_generation(host: &Host) -> Verdict {
    let delta = host.generation.delta();
    let mut expected = delta.segments.to_vec();
    if delta.host_pin {
        let start = if host.hccs { svm::HOST_PIN_START_HCCS } else { svm::HOST_PIN_START_PCIE };
        expected.push(svm::Segment { start, size: svm::HOST_PIN_SIZE });
    }
    equal("segments", Svm::open(host)?.segments(16).granted()?, expected)
}

fn segments_need_room_for_all(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let count = svm.segments(16).granted()?.len() as u32;
    svm.segments(0).refused(EINVAL)?;
    svm.segments(count - 1).refused(EINVAL)?;
    svm.segments(count).granted().map(drop)
}

fn segments_to_nowhere_are_einval(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.ask(Op::GetMmapInfo, 0, &svm::MmapInfo { segments: 16, ..Default::default() }).refused(EINVAL)
}

fn segments_to_an_unmapped_array_are_einval(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.ask(Op::GetMmapInfo, 0, &svm::MmapInfo { segments: 16, array: NOWHERE, ..Default::default() }).refused(EINVAL)
}

fn the_segment_question_answers_nothing_else(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let mut array = [svm::Segment::default(); 16];
    let para = svm::MmapInfo { segments: 16, array: array.as_mut_ptr() as u64, ..Default::default() };
    let answer = svm.ask(Op::GetMmapInfo, 0, &para).granted()?;
    equal("need_nptmv", answer.need_nptmv, 0)?;
    equal("host pid", answer.hostpid, 0)?;
    equal("device pid", answer.aicpupid, 0)
}

fn segments_by_a_write_only_word_come_without_their_count(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let mut array = [svm::Segment::default(); 16];
    let para = svm::MmapInfo { segments: 16, array: array.as_mut_ptr() as u64, ..Default::default() };
    let mut arg = svm::Arg::new(0, &para);
    let request = svm.request_of(Op::GetMmapInfo) & !(2 << 30);
    svm.file.request(request, std::ptr::from_mut(&mut arg) as u64).granted()?;
    equal("count", arg.para::<svm::MmapInfo>().segments, 16)?;
    // The kernel writes the array through its pointer, whatever the direction bits are.
    equal("first segment", std::hint::black_box(array)[0].start, svm::SVM_START)
}

fn mapping_before_allocating_is_einval(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let segments = svm.segments(16).granted()?;
    svm.map_segment(&segments[0]).refused(EINVAL)
}

/// A file with an allocated process, and its segments.
fn allocated(host: &Host) -> Result<(Svm, Vec<svm::Segment>), Failure> {
    let svm = Svm::open(host)?;
    svm.alloc_process().granted()?;
    let segments = svm.segments(16).granted()?;
    Ok((svm, segments))
}

fn segments_are_mapped_in_order(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    svm.map_segment(&segments[1]).refused(EINVAL)?;
    svm.map_segment(&segments[0]).granted()?;
    svm.map_segment(&segments[1]).granted().map(drop)
}

fn segments_are_mapped_whole(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    let half = svm::Segment { start: segments[0].start, size: segments[0].size / 2 };
    svm.map_segment(&half).refused(EINVAL)?;
    svm.map_segment(&segments[0]).granted().map(drop)
}

fn fixed_mappings_are_einval(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    for flag in [MAP_FIXED, MAP_FIXED_NOREPLACE] {
        let prot = PROT_READ | PROT_WRITE;
        mmap(segments[0].start, segments[0].size, prot, MAP_SHARED | flag, svm.file.fd()).refused(EINVAL)?;
    }
    svm.map_segment(&segments[0]).granted().map(drop)
}

fn an_occupied_segment_is_einval_and_can_be_tried_again(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    let page = page_size();
    let address = segments[0].start + 5 * GIB;
    equal("address of the obstacle", anonymous(address, page, PROT_NONE).granted()?, address)?;
    svm.map_segment(&segments[0]).refused(EINVAL)?;
    munmap(address, page).granted()?;
    equal("address", svm.map_segment(&segments[0]).granted()?, segments[0].start)
}

fn a_segment_is_mapped_once(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    svm.map_segment(&segments[0]).granted()?;
    svm.map_segment(&segments[0]).refused(EINVAL)
}

fn a_file_opened_for_reading_carries_a_session(host: &Host) -> Verdict {
    let file = crate::manager::Manager::open_with(libc::O_RDONLY | libc::O_CLOEXEC)?;
    file.bind(ascend_ioctl::davinci::module::SVM).granted()?;
    let svm = Svm::on(file, host);
    svm.alloc_process().granted()?;
    let segments = svm.segments(16).granted()?;
    svm.map_segment(&segments[0]).refused(libc::EACCES)?;
    for segment in &segments {
        mmap(segment.start, segment.size, PROT_READ, MAP_SHARED, svm.file.fd()).granted()?;
    }
    svm.init().granted()?;
    holds("the session works", Session::of(svm, segments).alive())
}

fn commands_before_initialising_are_einval(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let segments = svm.prepare()?;
    let session = Session::of(svm, segments);
    session.host_huge(MIB2).refused(EINVAL)?;
    session.setup_device(0).refused(EINVAL)?;
    session.enable(svm::HEAP_HUGE, 2816, GIB).refused(EINVAL)?;
    session.get_info(0, 0).refused(EINVAL)
}

fn initialising_tells_page_sizes(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.prepare()?;
    let answer = svm.init().granted()?;
    let page = page_size() as u32;
    equal("page of the module", answer.svm_page_size, page.max(4096))?;
    equal("page of the host", answer.host_page_size, page)?;
    equal("huge page", answer.huge_page_size, MIB2 as u32)?;
    let managed = host.generation.delta().segments.iter().any(|segment| segment.start == svm::UVM_START);
    equal("page of managed memory", answer.uvm_page_size, if managed { MIB2 as u32 } else { 0 })
}

fn initialising_twice_is_esrch(host: &Host) -> Verdict {
    Session::host(host)?.svm.init().refused(ESRCH)
}

fn initialising_needs_the_exact_word(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.prepare()?;
    let mut arg = svm::Arg::new(0, &svm::InitProcess::default());
    let address = std::ptr::from_mut(&mut arg) as u64;
    let other = svm.request_of(Op::InitProcess) ^ (1 << 16);
    svm.file.request(other, address).refused(EINVAL)?;
    svm.init().granted()?;
    svm.file.request(other, address).refused(ESRCH)
}

fn a_session_without_segments_is_granted(host: &Host) -> Verdict {
    holds("the session works", Session::unmapped(host)?.alive())
}

fn without_segments_host_memory_cannot_be_mapped(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    let address = session.reserve(MIB2)?;
    session.map(&handle, address, MIB2).refused(EADDRNOTAVAIL)
}

fn without_segments_host_heaps_are_einval(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    let heap = svm::UpdateHeap {
        operation: svm::HEAP_ENABLE,
        kind: svm::HEAP_HUGE,
        sub_kind: svm::SUB_HOST,
        index: 2820,
        size: GIB,
    };
    session.update_heap(heap).refused(EINVAL)
}

fn without_segments_device_memory_works(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    session.setup(0)?;
    let (handle, address) = session.device_mapping(0, 2 * MIB2)?;
    session.write(address, b"bytes").granted()?;
    equal("bytes", session.read(address, 5).granted()?, b"bytes".to_vec())?;
    session.unmap(address).granted()?;
    session.free(address).granted()?;
    session.release(&handle).granted().map(drop)
}

fn without_segments_cpu_access_is_einval(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    session.setup(0)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, HOST_ID, svm::ACCESS_READ_WRITE).refused(EINVAL)
}

fn a_late_first_segment_ends_the_session(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    let segments = session.svm.segments(16).granted()?;
    session.svm.map_segment(&segments[0]).refused(ESRCH)?;
    session.host_huge(MIB2).refused(EINVAL)
}

fn a_late_further_segment_is_refused_and_harmless(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    svm.map_segment(&segments[0]).granted()?;
    svm.init().granted()?;
    svm.map_segment(&segments[1]).refused(ESRCH)?;
    holds("the session works", Session::of(svm, Vec::new()).alive())
}

fn without_the_host_pin_segment_the_session_is_whole(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    for segment in &segments[..segments.len() - 1] {
        svm.map_segment(segment).granted()?;
    }
    svm.init().granted()?;
    let session = Session::of(svm, Vec::new());
    let (_, address) = session.host_mapping(MIB2)?;
    crate::session::poke(address, 7);
    equal("word through the CPU", crate::session::peek(address), 7)?;
    let dynamic = svm::Segment { start: svm::DYNAMIC_START + 16 * GIB, size: 2 * GIB };
    session.svm.map_segment(&dynamic).refused(EINVAL)
}

fn without_the_svm_segment_dynamic_mappings_still_work(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let segments = svm.prepare()?;
    munmap(segments[0].start, segments[0].size).granted()?;
    svm.init().granted()?;
    let session = Session::of(svm, Vec::new());
    let handle = session.host_huge(MIB2).granted()?;
    let address = session.reserve(MIB2)?;
    session.map(&handle, address, MIB2).refused(EADDRNOTAVAIL)?;
    let dynamic = svm::Segment { start: svm::DYNAMIC_START + 16 * GIB, size: 2 * GIB };
    equal("address", session.svm.map_segment(&dynamic).granted()?, dynamic.start)?;
    session.enable(svm::HEAP_HUGE, svm::STATIC_HEAPS + 16, 2 * GIB).granted()?;
    session.alloc(dynamic.start, MIB2).granted()?;
    session.map(&handle, dynamic.start, MIB2).granted()?;
    crate::session::poke(dynamic.start, 7);
    equal("word through the CPU", crate::session::peek(dynamic.start), 7)
}

fn a_second_session_is_eexist_until_the_first_is_gone(host: &Host) -> Verdict {
    let first = Session::host(host)?;
    let second = Svm::open(host)?;
    second.alloc_process().granted()?;
    second.init().refused(EEXIST)?;
    second.init().refused(EEXIST)?;
    holds("the first session works", first.alive())?;
    first.shut_down()?;
    // The file that got EEXIST is kept: closing it would leak kernel memory.
    eventually("the second session begins", || second.init().is_ok())?;
    holds("the second session works", Session::of(second, Vec::new()).alive())
}

fn a_session_can_be_opened_again_after_an_orderly_end(host: &Host) -> Verdict {
    for _ in 0..2 {
        let session = Session::start(host)?;
        session.device_huge(0, MIB2).granted()?;
        session.close_device(0).granted()?;
        session.shut_down()?;
    }
    Ok(())
}

fn a_session_without_segments_blocks_the_next_until_its_range_is_unmapped(host: &Host) -> Verdict {
    drop(Session::unmapped(host)?);
    let next = Svm::open(host)?;
    next.alloc_process().granted()?;
    next.init().refused(EEXIST)?;
    let address = anonymous(svm::SVM_START, svm::SVM_SIZE, PROT_NONE).granted()?;
    equal("address", address, svm::SVM_START)?;
    munmap(address, svm::SVM_SIZE).granted()?;
    eventually("the next session begins", || next.init().is_ok())?;
    holds("the next session works", Session::of(next, Vec::new()).alive())
}

fn closing_a_second_session_file_orderly_disturbs_nothing(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    drop(Svm::open(host)?);
    holds("the session works", session.alive())
}

fn unknown_numbers_are_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let mut arg = svm::Arg::new(0, &svm::Alloc::default());
    let word = session.svm.request_of(Op::InitProcess) & !0xFF;
    for number in [u32::from(host.generation.delta().svm_numbers), 200, 255] {
        session.svm.file.request(word | number, std::ptr::from_mut(&mut arg) as u64).refused(EINVAL)?;
    }
    Ok(())
}

fn a_foreign_magic_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let mut arg = svm::Arg::new(HOST_ID, &create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2));
    let request = session.svm.request_of(Op::MemCreate) & !0xFF00 | u32::from(b'N') << 8;
    session.svm.file.request(request, std::ptr::from_mut(&mut arg) as u64).refused(EINVAL)
}

fn a_null_argument_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.svm.file.request(session.svm.request_of(Op::MemCreate), 0).refused(EINVAL)
}

fn an_unmapped_argument_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.svm.file.request(session.svm.request_of(Op::MemCreate), NOWHERE).refused(EINVAL)?;
    let svm = Svm::open(host)?;
    svm.file.request(svm.request_of(Op::AllocProcStruct), NOWHERE).refused(EINVAL)
}

/// The request value of a number that needs a session and has no handler.
fn unused_word(svm: &Svm) -> u32 {
    svm.request_of(Op::InitProcess) & !0xFF | 18
}

fn a_command_without_handler_is_eopnotsupp(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for device in [0, ABSENT, 5000] {
        let mut arg = svm::Arg::new(device, &svm::Alloc::default());
        session.svm.file.request(unused_word(&session.svm), std::ptr::from_mut(&mut arg) as u64).refused(EOPNOTSUPP)?;
    }
    Ok(())
}

fn a_command_without_handler_needs_a_session(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let mut arg = svm::Arg::new(0, &svm::Alloc::default());
    svm.file.request(unused_word(&svm), std::ptr::from_mut(&mut arg) as u64).refused(EINVAL)?;
    svm.prepare()?;
    svm.file.request(unused_word(&svm), std::ptr::from_mut(&mut arg) as u64).refused(EINVAL)
}

fn public_commands_without_handler_need_no_session(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let mut arg = svm::Arg::new(0, &svm::Alloc::default());
    let address = std::ptr::from_mut(&mut arg) as u64;
    let word = svm.request_of(Op::AllocProcStruct) & !0xFF;
    svm.file.request(word | u32::from(host.generation.delta().svm_private_numbers), address).refused(EOPNOTSUPP)?;
    svm.file.request(svm.request_of(Op::DevSetSibling), address).refused(EOPNOTSUPP)?;
    svm.file.request(svm.request_of(Op::DevBindSibling), address).refused(EOPNOTSUPP)
}

fn size_bits_are_not_looked_at(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let mut arg = svm::Arg::new(HOST_ID, &create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2));
    let request = session.svm.request_of(Op::MemCreate) & !(0x3FFF << 16);
    session.svm.file.request(request, std::ptr::from_mut(&mut arg) as u64).granted()?;
    equal("pages", arg.para::<svm::MemCreate>().pages, 1)
}

fn a_write_only_word_executes_and_tells_nothing(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let mut handle = session.host_huge(MIB2).granted()?;
    let mut arg = svm::Arg::new(HOST_ID, &svm::MemCreate { id: -5, ..create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2) });
    let request = session.svm.request_of(Op::MemCreate) & !(2 << 30);
    session.svm.file.request(request, std::ptr::from_mut(&mut arg) as u64).granted()?;
    equal("id", arg.para::<svm::MemCreate>().id, -5)?;
    // Ids are consecutive, so the lost one is known.
    handle.id += 1;
    session.release(&handle).granted().map(drop)
}

fn an_unwritable_argument_is_einval_but_executed(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let mut handle = session.host_huge(MIB2).granted()?;
    let page = page_size();
    let address = anonymous(0, page, PROT_READ | PROT_WRITE).granted()?;
    let arg = svm::Arg::new(HOST_ID, &create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2));
    // SAFETY: the page was just mapped, is larger than the argument and page aligned.
    unsafe { std::ptr::write(address as *mut svm::Arg, arg) };
    crate::manager::mprotect(address, page, PROT_READ).granted()?;
    crate::rule::note_command("MEM_CREATE");
    ioctl(session.svm.file.fd(), session.svm.request_of(Op::MemCreate), address).refused(EINVAL)?;
    handle.id += 1;
    session.release(&handle).granted().map(drop)
}

fn nothing_is_written_back_on_error(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let para = svm::MemCreate { id: -5, pages: 99, flags: 1, ..create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2) };
    let mut arg = svm::Arg::new(HOST_ID, &para);
    arg.head.logical = 4711;
    let before = arg;
    session.svm.raw(Op::MemCreate, &mut arg).refused(EINVAL)?;
    equal("argument", arg, before)
}

fn the_head_comes_back_with_the_physical_id(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let mut arg = svm::Arg::new(0, &create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, MIB2));
    arg.head.logical = 4711;
    session.svm.raw(Op::MemCreate, &mut arg).granted()?;
    equal("logical", arg.head.logical, 0)?;
    equal("physical", arg.head.device, host.physical[0])?;
    let mut arg = svm::Arg::new(HOST_ID, &create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2));
    session.svm.raw(Op::MemCreate, &mut arg).granted()?;
    equal("logical of the host", arg.head.logical, HOST_ID)?;
    equal("physical of the host", arg.head.device, HOST_ID)
}

fn ids_out_of_range_are_enodev(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let para = create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, MIB2);
    for device in [svm::DEVICE_IDS, 2000, u32::MAX] {
        session.create(device, para).refused(ENODEV)?;
        session.prefetch(device, heap_address(2816), MIB2).refused(ENODEV)?;
        session.close_device(device).refused(ENODEV)?;
    }
    Ok(())
}

fn absent_ids_are_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.create(ABSENT, create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, MIB2)).refused(EINVAL)?;
    session.close_device(ABSENT).refused(EINVAL)
}

fn heap_and_reservation_commands_take_any_id(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let heap = svm::UpdateHeap {
        operation: svm::HEAP_ENABLE,
        kind: svm::HEAP_HUGE,
        sub_kind: svm::SUB_RESERVE,
        index: 2900,
        size: GIB,
    };
    session.svm.call(Op::UpdateHeap, 5000, &heap).granted()?;
    let address = heap_address(2900);
    session.svm.call(Op::Alloc, 5000, &svm::Alloc { address, size: MIB2 }).granted()?;
    session.svm.call(Op::FreePages, 5000, &svm::FreePages { address }).granted().map(drop)
}

fn setting_up_an_absent_device_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.setup_device(ABSENT).refused(EINVAL)
}

fn setting_up_the_host_is_efault(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.setup_device(svm::HOST_AGENT_ID).refused(EFAULT)?;
    session.setup_device(HOST_ID).refused(EFAULT)
}

fn setting_up_an_id_out_of_range_is_enodev(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.setup_device(svm::DEVICE_IDS).refused(ENODEV)?;
    session.setup_device(u32::MAX).refused(ENODEV)
}

fn setting_up_twice_is_granted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.setup_device(0).granted().map(drop)
}

fn setting_up_tells_that_user_pages_can_be_pinned(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    equal("the flag", session.setup(0)?.host_support_pin_user_pages_interface, 1)
}

fn a_refused_set_up_can_be_repeated_with_a_device_process(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    if session.setup_device(0).is_ok() {
        return Err(Failure::skipped("this firmware sets up devices without a device process"));
    }
    session.setup_device(0).refused(EFAULT)?;
    session.start_process(0)?;
    session.setup_device(0).granted()?;
    session.device_huge(0, MIB2).granted().map(drop)
}

fn a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    Session::host(host)?.device_huge(0, MIB2).refused(ESRCH)
}

fn closing_a_device_that_was_never_set_up_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.prepare_close(0).granted()?;
    session.close_device(0).granted()?;
    session.close_device(0).granted()
}

fn closing_the_host_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for device in [svm::HOST_AGENT_ID, HOST_ID] {
        session.prepare_close(device).granted()?;
        session.close_device(device).granted()?;
    }
    Ok(())
}

fn a_closed_device_forgets_its_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.close_device(0).granted()?;
    session.release(&handle).refused(ESRCH)?;
    session.setup(0)?;
    session.release(&handle).refused(EINVAL)
}

fn a_device_prepared_for_closing_takes_no_asynchronous_copies(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    let bytes = [1u8; 64];
    session.prepare_close(0).granted()?;
    session.copy_async(address, bytes.as_ptr() as u64, 64).refused(ENONET)?;
    session.setup_device(0).granted()?;
    session.copy_async(address, bytes.as_ptr() as u64, 64).refused(ENONET)
}

fn a_device_prepared_for_closing_still_copies_and_creates(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.prepare_close(0).granted()?;
    session.write(address, b"bytes").granted()?;
    session.device_huge(0, MIB2).granted().map(drop)
}

fn copies_after_closing_are_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.close_device(0).granted()?;
    let bytes = [1u8; 64];
    session.copy_async(address, bytes.as_ptr() as u64, 64).refused(EINVAL)?;
    session.write(address, &bytes).refused(EINVAL)
}

fn closing_leaves_reservations_in_use_until_their_heap_goes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let index = session.heap()?;
    let address = heap_address(index);
    session.alloc(address, MIB2).granted()?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    session.close_device(0).granted()?;
    session.free(address).refused(libc::EBUSY)?;
    session.disable(index, GIB).granted()?;
    session.enable(svm::HEAP_HUGE, index, GIB).granted()?;
    session.alloc(address, MIB2).granted()
}

fn memory_can_be_mapped_again_where_a_closed_device_had_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.close_device(0).granted()?;
    session.setup(0)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    equal("module", handle.module, MODULE)?;
    session.map(&handle, address, MIB2).granted()?;
    session.write(address, b"again").granted()?;
    equal("bytes", session.read(address, 5).granted()?, b"again".to_vec())?;
    session.unmap(address).granted()?;
    session.free(address).refused(libc::EBUSY)
}

fn private_segments_take_no_host_memory(host: &Host) -> Verdict {
    let (svm, segments) = allocated(host)?;
    let prot = PROT_READ | PROT_WRITE;
    for segment in &segments {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        match mmap(segment.start, segment.size, prot, flags, svm.file.fd()) {
            Err(libc::ENOMEM) => return Err(Failure::skipped("this host never overcommits memory")),
            answer => equal("address", answer.granted()?, segment.start)?,
        }
    }
    svm.init().granted()?;
    let session = Session::of(svm, segments);
    let handle = session.host_huge(MIB2).granted()?;
    let address = session.reserve(MIB2)?;
    session.map(&handle, address, MIB2).refused(libc::ENOMEM)?;
    session.setup(0)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    session.set_access(far, MIB2, HOST_ID, svm::ACCESS_READ_WRITE).refused(EINVAL)
}

fn without_the_pool_or_managed_segment_host_heaps_are_einval(host: &Host) -> Verdict {
    for (start, size) in [(svm::SOMA_START, svm::SOMA_SIZE), (svm::UVM_START, svm::UVM_SIZE)] {
        crate::peer::check_in_child(|| {
            let svm = Svm::open(host)?;
            let segments = svm.prepare()?;
            munmap(start, size).granted()?;
            svm.init().granted()?;
            let heap = svm::UpdateHeap {
                operation: svm::HEAP_ENABLE,
                kind: svm::HEAP_HUGE,
                sub_kind: svm::SUB_HOST,
                index: 2820,
                size: GIB,
            };
            Session::of(svm, segments).update_heap(heap).refused(EINVAL)
        })?;
    }
    Ok(())
}

fn a_second_file_cannot_map_the_segments_of_a_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let second = Svm::open(host)?;
    second.alloc_process().granted()?;
    second.map_segment(&session.segments[0]).refused(EINVAL)?;
    holds("the session works", session.alive())
}

fn the_map_capability_has_its_generations_number(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.svm.call(Op::MemMapCap, 0, &svm::MapCapability::default()).granted()?;
    // The numbers of other generations: unused here, or above the last one.
    for number in
        Generation::ALL.iter().filter_map(|other| other.svm(Op::MemMapCap)).map(|command| command.command.number)
    {
        let code = match host.generation.svm_by_number(number) {
            Some(_) => continue,
            None if number >= host.generation.delta().svm_numbers => EINVAL,
            None => EOPNOTSUPP,
        };
        let mut arg = svm::Arg::new(0, &svm::MapCapability::default());
        let word = session.svm.request_of(Op::MemMapCap) & !0xFF | u32::from(number);
        session.svm.file.request(word, std::ptr::from_mut(&mut arg) as u64).refused(code)?;
    }
    Ok(())
}
