//! Heaps: whole GiBs of the address range, each of one kind.

use crate::host::Host;
use crate::rule::{Failure, Judge, Rule, Verdict, equal, holds, rule};
use crate::session::{FIRST_HEAP, GIB, MIB2, Session, heap_address, peek, poke};
use ascend_ioctl::svm::{self, Op, UpdateHeap};
use libc::{EADDRNOTAVAIL, EINVAL, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(a_heap_is_enabled_once, Ran).decided_by("devmm_check_input_heap_info, devmm_common.c"),
    rule!(a_heap_of_no_size_is_einval, Ran).decided_by("devmm_check_common_input_heap_id_and_size, devmm_common.c"),
    rule!(a_heap_of_broken_gibibytes_is_einval, Ran)
        .decided_by("devmm_check_common_input_heap_id_and_size, devmm_common.c"),
    rule!(a_static_reserve_heap_is_at_most_128_gib, Ran).decided_by("devmm_check_reserve_heap_size, devmm_proc_info.c"),
    rule!(a_dynamic_reserve_heap_may_be_larger, Ran).decided_by("devmm_check_reserve_heap_size, devmm_proc_info.c"),
    rule!(heaps_do_not_overlap, Ran).decided_by("devmm_check_input_heap_info, devmm_common.c"),
    rule!(an_unknown_kind_of_heap_is_einval, Ran).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(an_unknown_sub_kind_of_heap_is_einval, Ran).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(managed_memory_has_no_heap, Ran).decided_by("devmm_check_input_heap_size, devmm_proc_info.c"),
    rule!(an_unknown_heap_operation_is_einval, Ran).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(a_heap_beyond_the_last_index_is_einval, Ran)
        .decided_by("devmm_check_common_input_heap_id_and_size, devmm_common.c"),
    rule!(a_static_heap_does_not_leave_the_static_range, Ran)
        .decided_by("devmm_check_common_input_heap_id_and_size, devmm_common.c"),
    rule!(a_reserve_heap_may_lie_in_the_video_area, Ran)
        .decided_by("devmm_check_common_input_heap_id_and_size, devmm_common.c"),
    rule!(a_reserve_heap_of_small_chunks_is_granted, Ran)
        .decided_by("devmm_get_chunk_page_size_by_heap_type, devmm_common.c"),
    rule!(the_host_agent_has_no_heap, Source).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(a_device_heap_is_granted, Ran).decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
    rule!(a_device_heap_of_a_device_that_is_not_set_up_is_esrch, Ran)
        .decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
    rule!(a_host_heap_is_granted, Ran).decided_by("devmm_check_host_heap_size, devmm_proc_info.c"),
    rule!(an_svm_heap_is_granted_up_to_128_gib, Source).decided_by("devmm_check_svm_heap_size, devmm_proc_info.c"),
    rule!(a_video_heap_has_4_or_16_gib, Ran).decided_by("devmm_check_dvpp_heap_size, devmm_proc_info.c"),
    rule!(a_read_only_heap_has_4_gib, Ran).decided_by("devmm_check_read_only_heap_size, devmm_proc_info.c"),
    rule!(a_device_read_only_heap_has_8_gib, Ran).decided_by("devmm_check_dev_read_only_heap_size, devmm_proc_info.c"),
    rule!(a_dynamic_heap_needs_no_mapping, Ran).decided_by("devmm_ioctl_enable_heap, devmm_proc_info.c"),
    rule!(a_dynamic_heap_matches_its_mapping, Ran).decided_by("devmm_ioctl_enable_heap, devmm_proc_info.c"),
    rule!(mapping_exactly_where_a_dynamic_heap_is_kills_the_session, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(mapping_otherwise_where_a_dynamic_heap_is_is_einval, Ran).decided_by("svm_da_add_addr, svm_dynamic_addr.c"),
    rule!(a_heap_of_the_host_agent_needs_no_device, Ran).decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
    rule!(a_dynamic_mapping_may_lie_anywhere_above_24_tib, Ran).decided_by("svm_da_add_addr, svm_dynamic_addr.c"),
    rule!(without_a_mapping_a_dynamic_heap_holds_device_memory_only, Ran)
        .decided_by("devmm_remap_huge_pages, devmm_proc_info.c"),
    rule!(host_and_device_memory_share_a_dynamic_reservation, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(disabling_an_unknown_heap_is_einval, Ran).decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(disabling_wants_the_first_index_and_the_exact_size, Source)
        .decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(disabling_compares_nothing_but_index_and_size, Ran)
        .decided_by("devmm_check_common_input_heap_info, devmm_common.c"),
    rule!(disabling_forgets_reservations_and_mappings, Ran)
        .decided_by("devmm_destroy_reserve_heap_mem, svm_heap_mng.c"),
    rule!(memory_of_a_disabled_heap_can_be_released, Ran).decided_by("devmm_vmmas_destroy, svm_vmma_mng.c"),
    rule!(disabling_under_an_exported_mapping_is_granted, Ran).decided_by("devmm_vmmas_destroy, svm_vmma_mng.c"),
    rule!(a_pinned_host_reserve_heap_takes_normal_memory_in_huge_steps, Ran)
        .decided_by("devmm_ioctl_vmma_info_pack, svm_master_mem_map.c"),
    rule!(a_host_heap_is_at_most_the_hosts_memory, Ran).decided_by("devmm_check_host_heap_size, devmm_proc_info.c"),
    rule!(a_device_heap_is_at_most_the_devices_memory, Ran).decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
    rule!(a_device_heap_takes_reservations_but_no_mappings, Ran)
        .decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(a_dynamic_mapping_without_a_hint_is_put_somewhere, Ran)
        .decided_by("drv_ascend_intf_get_unmapped_area, davinci_intf_init.c"),
    rule!(a_device_heap_of_an_id_out_of_range_is_enodev, Source)
        .decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
];

/// An index that no other heap of a rule uses.
const PLACE: u32 = FIRST_HEAP + 500;

fn of(sub_kind: u32, index: u32, size: u64) -> UpdateHeap {
    UpdateHeap { operation: svm::HEAP_ENABLE, kind: svm::HEAP_HUGE, sub_kind, index, size }
}

fn reserve(index: u32, size: u64) -> UpdateHeap {
    of(svm::SUB_RESERVE, index, size)
}

fn a_heap_is_enabled_once(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(PLACE, GIB)).granted()?;
    session.update_heap(reserve(PLACE, GIB)).refused(EINVAL)?;
    session.disable(PLACE, GIB).granted()?;
    session.update_heap(reserve(PLACE, GIB)).granted()
}

fn a_heap_of_no_size_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.update_heap(reserve(PLACE, 0)).refused(EINVAL)
}

fn a_heap_of_broken_gibibytes_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.update_heap(reserve(PLACE, GIB + MIB2)).refused(EINVAL)
}

fn a_static_reserve_heap_is_at_most_128_gib(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(PLACE, 129 * GIB)).refused(EINVAL)?;
    session.update_heap(reserve(PLACE, 128 * GIB)).granted()
}

fn a_dynamic_reserve_heap_may_be_larger(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let index = svm::STATIC_HEAPS + 1000;
    session.update_heap(reserve(index, 200 * GIB)).granted()?;
    session.disable(index, 200 * GIB).granted()
}

fn heaps_do_not_overlap(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(PLACE, 2 * GIB)).granted()?;
    session.update_heap(reserve(PLACE - 1, 2 * GIB)).refused(EINVAL)?;
    session.update_heap(reserve(PLACE + 1, GIB)).refused(EINVAL)?;
    session.update_heap(reserve(PLACE - 1, 4 * GIB)).refused(EINVAL)?;
    session.update_heap(reserve(PLACE - 1, GIB)).granted()?;
    session.update_heap(reserve(PLACE + 2, GIB)).granted()
}

fn an_unknown_kind_of_heap_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for kind in [0, 0xEFEF_0000, 0xEFEF_0004] {
        session.update_heap(UpdateHeap { kind, ..reserve(PLACE, GIB) }).refused(EINVAL)?;
    }
    Ok(())
}

fn an_unknown_sub_kind_of_heap_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(of(host.generation.delta().sub_kinds, PLACE, GIB)).refused(EINVAL)?;
    session.update_heap(of(99, PLACE, GIB)).refused(EINVAL)
}

fn managed_memory_has_no_heap(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(of(7, PLACE, GIB)).refused(EINVAL)?;
    session.update_heap(of(8, PLACE, GIB)).refused(EINVAL)
}

fn an_unknown_heap_operation_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.update_heap(UpdateHeap { operation: 2, ..reserve(PLACE, GIB) }).refused(EINVAL)
}

fn a_heap_beyond_the_last_index_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(svm::HEAPS, GIB)).refused(EINVAL)?;
    session.update_heap(reserve(svm::HEAPS - 1, 2 * GIB)).refused(EINVAL)?;
    session.update_heap(reserve(u32::MAX, GIB)).refused(EINVAL)
}

fn a_static_heap_does_not_leave_the_static_range(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(svm::STATIC_HEAPS - 1, 2 * GIB)).refused(EINVAL)?;
    session.update_heap(reserve(svm::STATIC_HEAPS - 1, GIB)).granted()
}

fn a_reserve_heap_may_lie_in_the_video_area(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(0, GIB)).granted()?;
    session.disable(0, GIB).granted()
}

fn a_reserve_heap_of_small_chunks_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = crate::manager::page_size();
    let address = heap_address(session.heap_of(svm::HEAP_CHUNK)?);
    session.alloc(address, page).granted()?;
    session.alloc(address + page, page).granted()
}

fn the_host_agent_has_no_heap(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.svm.call(Op::UpdateHeap, svm::HOST_AGENT_ID, &reserve(PLACE, GIB)).refused(EINVAL)
}

fn a_device_heap_is_granted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(of(svm::SUB_DEVICE, PLACE, GIB)).granted()?;
    session.disable(PLACE, GIB).granted()
}

fn a_device_heap_of_a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    Session::host(host)?.update_heap(of(svm::SUB_DEVICE, PLACE, GIB)).refused(ESRCH)
}

fn a_host_heap_is_granted(host: &Host) -> Verdict {
    Session::host(host)?.update_heap(of(svm::SUB_HOST, PLACE, GIB)).granted()
}

fn an_svm_heap_is_granted_up_to_128_gib(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(of(svm::SUB_SVM, PLACE, 129 * GIB)).refused(EINVAL)?;
    session.update_heap(of(svm::SUB_SVM, PLACE, GIB)).granted()
}

fn a_video_heap_has_4_or_16_gib(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(of(svm::SUB_DVPP, PLACE, GIB)).refused(EINVAL)?;
    session.update_heap(of(svm::SUB_DVPP, PLACE, 8 * GIB)).refused(EINVAL)?;
    session.update_heap(of(svm::SUB_DVPP, PLACE, 4 * GIB)).granted()
}

fn a_read_only_heap_has_4_gib(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(of(svm::SUB_READ_ONLY, PLACE, GIB)).refused(EINVAL)?;
    session.update_heap(of(svm::SUB_READ_ONLY, PLACE, 4 * GIB)).granted()
}

fn a_device_read_only_heap_has_8_gib(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(of(svm::SUB_DEVICE_READ_ONLY, PLACE, 4 * GIB)).refused(EINVAL)?;
    session.update_heap(of(svm::SUB_DEVICE_READ_ONLY, PLACE, 8 * GIB)).granted()
}

/// A dynamic range of 2 GiB: its address and heap index.
const DYNAMIC: (u64, u32) = (svm::DYNAMIC_START + 16 * GIB, svm::STATIC_HEAPS + 16);

/// Maps the dynamic range.
fn map_dynamic(session: &Session) -> Verdict {
    let segment = svm::Segment { start: DYNAMIC.0, size: 2 * GIB };
    equal("address", session.svm.map_segment(&segment).granted()?, DYNAMIC.0)
}

fn a_dynamic_heap_needs_no_mapping(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(DYNAMIC.1, 2 * GIB)).granted()?;
    session.alloc(DYNAMIC.0, MIB2).granted()?;
    session.free(DYNAMIC.0).granted()?;
    session.disable(DYNAMIC.1, 2 * GIB).granted()
}

fn a_dynamic_heap_matches_its_mapping(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    map_dynamic(&session)?;
    session.update_heap(reserve(DYNAMIC.1, GIB)).refused(EINVAL)?;
    session.update_heap(reserve(DYNAMIC.1 + 1, GIB)).refused(EINVAL)?;
    session.update_heap(reserve(DYNAMIC.1, 2 * GIB)).granted()
}

fn mapping_exactly_where_a_dynamic_heap_is_kills_the_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(DYNAMIC.1, 2 * GIB)).granted()?;
    session.svm.map_segment(&svm::Segment { start: DYNAMIC.0, size: 2 * GIB }).refused(EINVAL)?;
    equal("the session works", session.alive(), false)
}

fn mapping_otherwise_where_a_dynamic_heap_is_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for (heap, mapping) in [(GIB, 2 * GIB), (2 * GIB, GIB)] {
        session.update_heap(reserve(DYNAMIC.1, heap)).granted()?;
        session.svm.map_segment(&svm::Segment { start: DYNAMIC.0, size: mapping }).refused(EINVAL)?;
        holds("the session works", session.alive())?;
        session.disable(DYNAMIC.1, heap).granted()?;
    }
    map_dynamic(&session)
}

fn a_heap_of_the_host_agent_needs_no_device(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let heap = svm::UpdateHeap { kind: svm::HEAP_CHUNK, sub_kind: svm::SUB_DEVICE, ..reserve(PLACE, GIB) };
    session.svm.call(Op::UpdateHeap, svm::HOST_AGENT_ID, &heap).granted().map(drop)
}

fn a_dynamic_mapping_may_lie_anywhere_above_24_tib(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let segment = svm::Segment { start: DYNAMIC.0 + MIB2, size: 3 * MIB2 };
    equal("address", session.svm.map_segment(&segment).granted()?, segment.start)?;
    session.update_heap(reserve(DYNAMIC.1, GIB)).refused(EINVAL)?;
    let below = svm::Segment { start: svm::SVM_START - 64 * GIB, size: GIB };
    session.svm.map_segment(&below).refused(EINVAL)
}

fn without_a_mapping_a_dynamic_heap_holds_device_memory_only(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(reserve(DYNAMIC.1, 2 * GIB)).granted()?;
    session.alloc(DYNAMIC.0, 2 * MIB2).granted()?;
    let there = session.host_huge(MIB2).granted()?;
    session.map(&there, DYNAMIC.0, MIB2).refused(EADDRNOTAVAIL)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, DYNAMIC.0 + MIB2, MIB2).granted()?;
    session.set_access(DYNAMIC.0 + MIB2, MIB2, svm::HOST_ID, svm::ACCESS_READ_WRITE).refused(EINVAL)
}

fn host_and_device_memory_share_a_dynamic_reservation(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    map_dynamic(&session)?;
    session.update_heap(reserve(DYNAMIC.1, 2 * GIB)).granted()?;
    session.alloc(DYNAMIC.0, 2 * MIB2).granted()?;
    let near = session.host_huge(MIB2).granted()?;
    let far = session.device_huge(0, MIB2).granted()?;
    session.map(&near, DYNAMIC.0, MIB2).granted()?;
    session.map(&far, DYNAMIC.0 + MIB2, MIB2).granted()?;
    poke(DYNAMIC.0, 42);
    equal("word through the CPU", peek(DYNAMIC.0), 42)
}

fn disabling_an_unknown_heap_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.disable(PLACE, GIB).refused(EINVAL)
}

fn disabling_wants_the_first_index_and_the_exact_size(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.update_heap(reserve(PLACE, 2 * GIB)).granted()?;
    session.disable(PLACE, GIB).refused(EINVAL)?;
    session.disable(PLACE, 3 * GIB).refused(EINVAL)?;
    session.disable(PLACE + 1, GIB).refused(EINVAL)?;
    session.disable(PLACE, 2 * GIB).granted()?;
    session.disable(PLACE, 2 * GIB).refused(EINVAL)
}

fn disabling_compares_nothing_but_index_and_size(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for (kind, sub_kind, device) in
        [(svm::HEAP_CHUNK, 5, 0), (0, 5, 0), (svm::HEAP_HUGE, 0, 0), (svm::HEAP_HUGE, 99, 0), (svm::HEAP_HUGE, 5, 5000)]
    {
        session.update_heap(reserve(PLACE, GIB)).granted()?;
        let wrong = UpdateHeap { operation: svm::HEAP_DISABLE, kind, sub_kind, index: PLACE, size: GIB };
        session.svm.call(Op::UpdateHeap, device, &wrong).granted()?;
        session.alloc(heap_address(PLACE), MIB2).refused(EINVAL)?;
    }
    Ok(())
}

fn disabling_forgets_reservations_and_mappings(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, address) = session.host_mapping(MIB2)?;
    session.disable(FIRST_HEAP, GIB).granted()?;
    session.unmap(address).refused(EINVAL)?;
    session.enable(svm::HEAP_HUGE, FIRST_HEAP, GIB).granted()?;
    session.address_info(address).refused(EINVAL)?;
    session.alloc(address, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()
}

fn memory_of_a_disabled_heap_can_be_released(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, _) = session.host_mapping(MIB2)?;
    session.disable(FIRST_HEAP, GIB).granted()?;
    session.release(&handle).granted().map(drop)
}

fn disabling_under_an_exported_mapping_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, _) = session.host_mapping(MIB2)?;
    session.export(&handle).granted()?;
    session.disable(FIRST_HEAP, GIB).granted()?;
    session.release(&handle).granted().map(drop)
}

fn a_pinned_host_reserve_heap_takes_normal_memory_in_huge_steps(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = heap_address(session.heap_of(svm::HEAP_PINNED_HOST)?);
    session.alloc(address, 4 * MIB2).granted()?;
    let normal = session.host_normal(2 * MIB2).granted()?;
    let huge = session.host_huge(2 * MIB2).granted()?;
    session.map(&huge, address, MIB2).refused(EINVAL)?;
    session.map(&normal, address, crate::manager::page_size()).refused(EINVAL)?;
    session.map(&normal, address, MIB2).granted()
}

fn a_host_heap_is_at_most_the_hosts_memory(host: &Host) -> Verdict {
    // SAFETY: sysconf has no preconditions.
    let memory = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) } as u64 * crate::manager::page_size();
    if memory > 4000 * GIB {
        return Err(Failure::skipped("this host has more memory than the static range leaves room for"));
    }
    Session::host(host)?.update_heap(of(svm::SUB_HOST, FIRST_HEAP, 5000 * GIB)).refused(EINVAL)
}

fn a_device_heap_is_at_most_the_devices_memory(host: &Host) -> Verdict {
    Session::start(host)?.update_heap(of(svm::SUB_DEVICE, FIRST_HEAP, 5000 * GIB)).refused(EINVAL)
}

fn a_device_heap_takes_reservations_but_no_mappings(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.update_heap(of(svm::SUB_DEVICE, PLACE, GIB)).granted()?;
    session.alloc(heap_address(PLACE), 2 * MIB2).granted()?;
    let handle = session.device_huge(0, 2 * MIB2).granted()?;
    session.map(&handle, heap_address(PLACE), 2 * MIB2).refused(EINVAL)
}

fn a_dynamic_mapping_without_a_hint_is_put_somewhere(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.svm.map_segment(&svm::Segment { start: 0, size: 2 * GIB }).granted()?;
    holds("the address is above the static range", address >= svm::DYNAMIC_START)?;
    holds("the session works", session.alive())
}

fn a_device_heap_of_an_id_out_of_range_is_enodev(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.svm.call(Op::UpdateHeap, svm::DEVICE_IDS, &of(svm::SUB_DEVICE, PLACE, GIB)).refused(libc::ENODEV)
}
