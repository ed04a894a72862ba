//! MEM_MAP maps the beginning of a handle inside a reservation; MEM_UNMAP removes a whole mapping.

use crate::host::Host;
use crate::manager::page_size;
use crate::rule::{Failure, Judge, Rule, Verdict, equal, rule};
use crate::session::{GIB, Handle, MIB2, MODULE, Session, heap_address, peek, poke};
use ascend_ioctl::svm::{self, HOST_ID, MemMap, Op};
use libc::{EADDRINUSE, EBUSY, EINVAL, ENOMEM};

pub const RULES: &[Rule] = &[
    rule!(mapped_host_memory_is_the_cpus, Ran).decided_by("devmm_remap_huge_pages, devmm_proc_info.c"),
    rule!(mapping_where_something_is_mapped_is_eaddrinuse, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(a_handle_can_be_mapped_twice, Ran).decided_by("devmm_phy_addr_blk_occupy_inc, svm_phy_addr_blk_mng.c"),
    rule!(a_mapping_may_be_smaller_than_its_handle, Ran)
        .decided_by("devmm_phy_addr_blk_get_pages, svm_phy_addr_blk_mng.c"),
    rule!(a_mapping_larger_than_its_handle_is_enomem, Ran).decided_by("_devmm_mem_map, svm_mem_map.c"),
    rule!(mapping_under_another_module_is_einval, Ran).decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(mapping_with_another_page_count_is_einval, Ran).decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(mapping_an_unknown_handle_is_einval, Ran).decided_by("devmm_mem_map, svm_mem_map.c"),
    rule!(mapping_nothing_is_einval, Ran).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_at_an_odd_address_is_einval, Ran).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_an_odd_size_is_einval, Source).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_beyond_the_reservation_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_where_nothing_is_reserved_is_einval, Ran).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(mapping_without_heap_is_einval, Ran).decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c"),
    rule!(mapping_outside_the_ranges_is_einval, Ran).decided_by("devmm_ioctl_mem_map, svm_master_mem_map.c"),
    rule!(mapping_by_the_node_side_is_einval, Ran).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_host_memory_on_a_device_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(mapping_an_unknown_page_is_einval, Ran).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(normal_and_huge_pages_of_the_host_follow_the_heap, Ran)
        .decided_by("devmm_ioctl_vmma_info_pack, svm_master_mem_map.c"),
    rule!(normal_memory_does_not_fit_a_huge_heap, Ran).decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(huge_memory_does_not_fit_a_heap_of_small_chunks, Source)
        .decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(normal_memory_fits_a_heap_of_small_chunks, Source)
        .decided_by("devmm_ioctl_vmma_info_pack, svm_master_mem_map.c"),
    rule!(only_reserve_heaps_take_mappings, Ran).decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(device_memory_is_not_mapped_on_the_host, Ran)
        .decided_by("devmm_device_chan_msg_send, svm_device_msg_client.c"),
    rule!(a_reservation_belongs_to_the_first_that_is_mapped_in_it, Ran)
        .decided_by("devmm_page_bitmap_mem_mapped_state_set, svm_master_mem_map.c"),
    rule!(the_owner_of_a_reservation_outlives_the_mapping, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_clear, svm_master_mem_map.c"),
    rule!(a_failed_mapping_leaves_no_owner, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_clear, svm_master_mem_map.c"),
    rule!(a_reservation_holds_many_mappings_of_its_owner, Ran)
        .decided_by("devmm_page_bitmap_mem_mapped_state_set, svm_master_mem_map.c"),
    rule!(a_collision_leaves_the_free_chunks_before_it_unusable, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(unusable_chunks_spread, Ran).decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(unusable_chunks_answer_no_question, Ran).decided_by("devmm_vmma_get, svm_vmma_mng.c"),
    rule!(a_mapping_beside_unusable_chunks_still_works, Ran)
        .decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(a_mapping_may_run_into_the_next_reservation, Ran)
        .decided_by("devmm_ioctl_mem_map_para_check, svm_master_mem_map.c"),
    rule!(unmapping_reports_what_was_mapped, Ran).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(unmapping_from_the_middle_is_einval, Ran).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(unmapping_twice_is_einval, Ran).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(unmapping_without_heap_is_einval, Ran).decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c"),
    rule!(unmapping_outside_the_ranges_is_einval, Source).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(unmapping_what_is_not_reserved_is_einval, Source).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(unmapping_wants_some_id, Source).decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(an_address_tells_its_mapping, Ran).decided_by("devmm_ioctl_resv_addr_info_query, svm_master_mem_map.c"),
    rule!(an_address_without_mapping_tells_nothing, Ran)
        .decided_by("devmm_ioctl_resv_addr_info_query, svm_master_mem_map.c"),
    rule!(cpu_and_kernel_see_the_same_host_memory, Ran).decided_by("devmm_remap_huge_pages, devmm_proc_info.c"),
    rule!(mapping_as_giant_pages_what_has_none_is_einval, Ran).decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(of_two_threads_that_map_one_wins, Ran).decided_by("devmm_page_bitmap_check_and_set_flag, svm_heap_mng.h"),
];

/// A session with a huge handle of 4 MiB and a reservation of 32 MiB.
fn prepared(host: &Host) -> Result<(Session, Handle, u64), Failure> {
    let session = Session::host(host)?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    let address = session.reserve(16 * MIB2)?;
    Ok((session, handle, address))
}

/// MEM_MAP of 4 MiB must be refused with `change` and succeed without it.
#[track_caller]
fn refused_if(host: &Host, code: i32, change: impl FnOnce(&mut u32, &mut MemMap)) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    let good = Session::map_para(&handle, address, 2 * MIB2);
    let (mut device, mut para) = (HOST_ID, good);
    change(&mut device, &mut para);
    session.map_raw(device, para).refused(code)?;
    session.map_raw(HOST_ID, good).granted()
}

fn mapped_host_memory_is_the_cpus(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    poke(address, 0xABCD_1234);
    poke(address + 2 * MIB2 - 8, 7);
    equal("first word", peek(address), 0xABCD_1234)?;
    equal("last word", peek(address + 2 * MIB2 - 8), 7)
}

fn mapping_where_something_is_mapped_is_eaddrinuse(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    session.map(&handle, address, 2 * MIB2).refused(EADDRINUSE)?;
    session.map(&handle, address + MIB2, MIB2).refused(EADDRINUSE)
}

fn a_handle_can_be_mapped_twice(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    poke(address + 64, 1);
    session.map(&handle, address + 4 * MIB2, 2 * MIB2).granted()?;
    equal("word at the second address", peek(address + 4 * MIB2 + 64), 1)?;
    session.unmap(address).granted()?;
    session.release(&handle).refused(EBUSY)?;
    session.unmap(address + 4 * MIB2).granted()?;
    session.release(&handle).granted().map(drop)
}

fn a_mapping_may_be_smaller_than_its_handle(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, MIB2).granted()?;
    equal("size", session.unmap(address).granted()?.size, MIB2)
}

fn a_mapping_larger_than_its_handle_is_enomem(host: &Host) -> Verdict {
    refused_if(host, ENOMEM, |_, para| para.size = 3 * MIB2)
}

fn mapping_under_another_module_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.module = MODULE + 1)
}

fn mapping_with_another_page_count_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.pages += 1)
}

fn mapping_an_unknown_handle_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.id = 4711)
}

fn mapping_nothing_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.size = 0)
}

fn mapping_at_an_odd_address_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.address += 4096)
}

fn mapping_an_odd_size_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.size = MIB2 + 4096)
}

fn mapping_beyond_the_reservation_is_einval(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    let large = session.host_huge(20 * MIB2).granted()?;
    session.map(&handle, address + 15 * MIB2, 2 * MIB2).refused(EINVAL)?;
    session.map(&large, address, 17 * MIB2).refused(EINVAL)?;
    session.map(&large, address, 16 * MIB2).granted()
}

fn mapping_where_nothing_is_reserved_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.address += 100 * MIB2)
}

fn mapping_without_heap_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.address += 10 * GIB)
}

fn mapping_outside_the_ranges_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.address = 0x1000)
}

fn mapping_by_the_node_side_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.side = svm::SIDE_HOST_NUMA)
}

fn mapping_host_memory_on_a_device_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |device, _| *device = 0)
}

fn mapping_an_unknown_page_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.page = svm::PAGES)
}

fn normal_and_huge_pages_of_the_host_follow_the_heap(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    let para = MemMap { page: svm::PAGE_NORMAL, ..Session::map_para(&handle, address, MIB2) };
    session.map_raw(HOST_ID, para).granted()
}

fn normal_memory_does_not_fit_a_huge_heap(host: &Host) -> Verdict {
    let (session, _, address) = prepared(host)?;
    let normal = session.host_normal(MIB2).granted()?;
    session.map(&normal, address, MIB2).refused(EINVAL)
}

fn huge_memory_does_not_fit_a_heap_of_small_chunks(host: &Host) -> Verdict {
    let (session, handle, _) = prepared(host)?;
    let address = heap_address(session.heap_of(svm::HEAP_CHUNK)?);
    session.alloc(address, 2 * MIB2).granted()?;
    session.map(&handle, address, 2 * MIB2).refused(EINVAL)
}

fn normal_memory_fits_a_heap_of_small_chunks(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page_size();
    let address = heap_address(session.heap_of(svm::HEAP_CHUNK)?);
    session.alloc(address, 4 * page).granted()?;
    let handle = session.host_normal(2 * page).granted()?;
    session.map(&handle, address + page, 2 * page).granted()?;
    poke(address + page, 3);
    poke(address + 3 * page - 8, 4);
    equal("first word", peek(address + page), 3)?;
    equal("last word", peek(address + 3 * page - 8), 4)?;
    equal("size", session.unmap(address + page).granted()?.size, 2 * page)
}

fn only_reserve_heaps_take_mappings(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let heap = svm::UpdateHeap {
        operation: svm::HEAP_ENABLE,
        kind: svm::HEAP_HUGE,
        sub_kind: svm::SUB_SVM,
        index: 3000,
        size: GIB,
    };
    session.update_heap(heap).granted()?;
    session.alloc(heap_address(3000), 2 * MIB2).granted()?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    session.map(&handle, heap_address(3000), 2 * MIB2).refused(EINVAL)
}

fn device_memory_is_not_mapped_on_the_host(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.side = svm::SIDE_DEVICE)
}

fn a_reservation_belongs_to_the_first_that_is_mapped_in_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = session.host_huge(MIB2).granted()?;
    let far = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&near, address, MIB2).granted()?;
    session.map(&far, address + MIB2, MIB2).refused(EINVAL)?;
    let other = session.reserve(4 * MIB2)?;
    session.map(&far, other, MIB2).granted()?;
    session.map(&near, other + MIB2, MIB2).refused(EINVAL)
}

fn the_owner_of_a_reservation_outlives_the_mapping(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = session.host_huge(MIB2).granted()?;
    let far = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&near, address, MIB2).granted()?;
    session.unmap(address).granted()?;
    session.map(&far, address, MIB2).refused(EINVAL)?;
    session.free(address).granted()?;
    session.alloc(address, 4 * MIB2).granted()?;
    session.map(&far, address, MIB2).granted()
}

fn a_failed_mapping_leaves_no_owner(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = session.host_huge(MIB2).granted()?;
    let far = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&Handle { id: 4711, ..near }, address, MIB2).refused(EINVAL)?;
    session.map(&near, address, 2 * MIB2).refused(ENOMEM)?;
    session.map(&far, address, MIB2).granted()
}

fn a_reservation_holds_many_mappings_of_its_owner(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.reserve(16 * MIB2)?;
    for index in 0..16 {
        let handle = session.host_huge(MIB2).granted()?;
        session.map(&handle, address + index * MIB2, MIB2).granted()?;
        poke(address + index * MIB2, index);
    }
    for index in 0..16 {
        equal("word", peek(address + index * MIB2), index)?;
    }
    Ok(())
}

/// A mapping at the third chunk, after a MEM_MAP from the first chunk that ran into it.
fn collided(host: &Host) -> Result<(Session, Handle, Handle, u64), Failure> {
    let session = Session::host(host)?;
    let small = session.host_huge(MIB2).granted()?;
    let large = session.host_huge(4 * MIB2).granted()?;
    let address = session.reserve(16 * MIB2)?;
    session.map(&small, address + 2 * MIB2, MIB2).granted()?;
    session.map(&large, address, 4 * MIB2).refused(EADDRINUSE)?;
    Ok((session, small, large, address))
}

fn a_collision_leaves_the_free_chunks_before_it_unusable(host: &Host) -> Verdict {
    let (session, small, large, address) = collided(host)?;
    session.map(&small, address, MIB2).refused(EADDRINUSE)?;
    session.map(&small, address + MIB2, MIB2).refused(EADDRINUSE)?;
    session.map(&small, address + 3 * MIB2, MIB2).granted()?;
    session.unmap(address + 3 * MIB2).granted()?;
    session.unmap(address + 2 * MIB2).granted()?;
    session.free(address).granted()?;
    session.alloc(address, 16 * MIB2).granted()?;
    session.map(&large, address, 4 * MIB2).granted()
}

fn unusable_chunks_spread(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let small = session.host_huge(MIB2).granted()?;
    let large = session.host_huge(4 * MIB2).granted()?;
    let address = session.reserve(16 * MIB2)?;
    session.map(&small, address + 6 * MIB2, MIB2).granted()?;
    session.map(&large, address + 4 * MIB2, 4 * MIB2).refused(EADDRINUSE)?;
    // Chunks 4 and 5 are unusable now; running into them makes 2 and 3 unusable too.
    session.map(&large, address + 2 * MIB2, 4 * MIB2).refused(EADDRINUSE)?;
    session.map(&small, address + 2 * MIB2, MIB2).refused(EADDRINUSE)?;
    session.map(&small, address + 3 * MIB2, MIB2).refused(EADDRINUSE)?;
    session.map(&small, address + MIB2, MIB2).granted()
}

fn unusable_chunks_answer_no_question(host: &Host) -> Verdict {
    let (session, _, _, address) = collided(host)?;
    let mut bytes = [0u8; 64];
    session.address_info(address).refused(EINVAL)?;
    session.fill(address, 1, 64).refused(EINVAL)?;
    session.copy(bytes.as_mut_ptr() as u64, address, 64, svm::COPY_DETECT).refused(EINVAL)
}

fn a_mapping_beside_unusable_chunks_still_works(host: &Host) -> Verdict {
    let (session, small, _, address) = collided(host)?;
    poke(address + 2 * MIB2, 5);
    session.unmap(address + 2 * MIB2).granted()?;
    session.map(&small, address + 2 * MIB2, MIB2).granted()?;
    equal("word", peek(address + 2 * MIB2), 5)
}

fn a_mapping_may_run_into_the_next_reservation(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = heap_address(session.heap()?);
    session.alloc(address, 2 * MIB2).granted()?;
    session.alloc(address + 2 * MIB2, 2 * MIB2).granted()?;
    let handle = session.host_huge(4 * MIB2).granted()?;
    session.map(&handle, address, 3 * MIB2).refused(EINVAL)?;
    session.map(&handle, address + MIB2, 2 * MIB2).granted()?;
    // A library must never do this: the second reservation could now be freed while it is mapped.
    session.free(address).refused(EBUSY)?;
    equal("size", session.unmap(address + MIB2).granted()?.size, 2 * MIB2)?;
    session.free(address).granted()?;
    session.free(address + 2 * MIB2).granted()
}

fn unmapping_reports_what_was_mapped(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    let answer = session.unmap(address).granted()?;
    equal("size", answer.size, 2 * MIB2)?;
    equal("side", answer.side, svm::SIDE_HOST)?;
    equal("device", answer.device, HOST_ID)
}

fn unmapping_from_the_middle_is_einval(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    session.unmap(address + MIB2).refused(EINVAL)?;
    session.unmap(address).granted().map(drop)
}

fn unmapping_twice_is_einval(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    session.unmap(address).granted()?;
    session.unmap(address).refused(EINVAL)
}

fn unmapping_without_heap_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.unmap(heap_address(3000)).refused(EINVAL)
}

fn unmapping_outside_the_ranges_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.unmap(0x1000).refused(EINVAL)
}

fn unmapping_what_is_not_reserved_is_einval(host: &Host) -> Verdict {
    let (session, _, address) = prepared(host)?;
    session.unmap(address + 100 * MIB2).refused(EINVAL)
}

fn unmapping_wants_some_id(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    let para = svm::MemUnmap { address, ..Default::default() };
    session.svm.call(Op::MemUnmap, svm::DEVICE_IDS, &para).refused(libc::ENODEV)?;
    session.svm.call(Op::MemUnmap, crate::session::ABSENT, &para).refused(EINVAL)?;
    session.svm.call(Op::MemUnmap, 0, &para).granted().map(drop)
}

fn an_address_tells_its_mapping(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address + MIB2, 2 * MIB2).granted()?;
    let answer = session.address_info(address + 2 * MIB2 + 5).granted()?;
    equal("start", answer.start, address + MIB2)?;
    equal("end", answer.end, address + 3 * MIB2 - 1)?;
    equal("module", answer.module, MODULE)?;
    equal("device", answer.device, HOST_ID)
}

fn an_address_without_mapping_tells_nothing(host: &Host) -> Verdict {
    let (session, _, address) = prepared(host)?;
    session.address_info(address).refused(EINVAL)?;
    session.address_info(address + 100 * MIB2).refused(EINVAL)?;
    session.address_info(address + 10 * GIB).refused(EINVAL)?;
    session.address_info(0x1000).refused(EINVAL)
}

fn cpu_and_kernel_see_the_same_host_memory(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    let (mut reader, mut writer) = std::os::unix::net::UnixStream::pair().map_err(Failure::broken)?;
    poke(address, 0x1122_3344);
    // SAFETY: the 8 bytes at the address were just mapped and nothing else refers to them.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, 8) };
    std::io::Write::write_all(&mut writer, bytes).map_err(Failure::broken)?;
    let mut word = [0; 8];
    std::io::Read::read_exact(&mut reader, &mut word).map_err(Failure::broken)?;
    equal("word through a socket", u64::from_le_bytes(word), 0x1122_3344)
}

fn mapping_as_giant_pages_what_has_none_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |_, para| para.page = svm::PAGE_GIANT)
}

fn of_two_threads_that_map_one_wins(host: &Host) -> Verdict {
    let (session, handle, address) = prepared(host)?;
    let (fd, request) = (session.svm.file.fd(), session.svm.request_of(Op::MemMap));
    for _ in 0..20 {
        let map = move || {
            let mut arg = svm::Arg::new(HOST_ID, &Session::map_para(&handle, address, 2 * MIB2));
            crate::manager::ioctl(fd, request, std::ptr::from_mut(&mut arg) as u64)
        };
        let other = std::thread::spawn(map);
        let answers = [map(), other.join().map_err(|_| Failure::broken("a thread panicked"))?];
        let losers = answers.iter().filter(|answer| matches!(answer, Err(EADDRINUSE | EINVAL))).count();
        equal("losers with EADDRINUSE or EINVAL", losers, 1)?;
        equal("winners", answers.iter().filter(|answer| answer.is_ok()).count(), 1)?;
        session.unmap(address).granted()?;
    }
    Ok(())
}
