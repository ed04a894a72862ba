//! Reservations: runs of chunks in a heap, each allocated and freed by one command.

use crate::host::Host;
use crate::rule::{Failure, Judge, Rule, Verdict, rule};
use crate::session::{GIB, MIB2, Session, heap_address};
use ascend_ioctl::Generation;
use ascend_ioctl::svm;
use libc::{EADDRNOTAVAIL, EBUSY, EINVAL};

pub const RULES: &[Rule] = &[
    rule!(a_reservation_is_made_once, Ran).decided_by("devmm_set_page_ref_malloc, svm_heap_mng.h"),
    rule!(a_reservation_inside_another_is_ebusy, Ran).decided_by("devmm_set_page_ref_malloc, svm_heap_mng.h"),
    rule!(a_reservation_that_runs_into_another_is_einval_and_takes_nothing, Ran)
        .decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(a_reservation_of_no_size_is_eaddrnotavail, Ran).decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(a_reservation_of_no_size_at_an_odd_address_takes_a_chunk, Ran)
        .decided_by("devmm_get_pagecount_by_size, devmm_common.c"),
    rule!(a_reservation_past_the_heaps_end_is_eaddrnotavail, Ran).decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(a_reservation_larger_than_the_heap_is_eaddrnotavail, Source)
        .decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(a_reservation_does_not_cross_heaps, Ran).decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(a_reservation_without_heap_is_einval, Ran).decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c"),
    rule!(a_reservation_outside_the_ranges_is_eaddrnotavail, Source).decided_by("devmm_ioctl_alloc, devmm_proc_info.c"),
    rule!(an_odd_address_reserves_the_chunks_that_it_touches, Ran)
        .decided_by("devmm_get_pagecount_by_size, devmm_common.c"),
    rule!(a_taken_chunk_is_reported_before_a_wrong_size, Ran).decided_by("_devmm_ioctl_dispatch, devmm_proc_info.c"),
    rule!(chunks_of_small_heaps_are_host_pages, Source)
        .decided_by("devmm_get_chunk_page_size_by_heap_type, devmm_common.c"),
    rule!(reservations_in_the_pool_segment_are_granted, Ran)
        .decided_by("devmm_svm_get_heap, devmm_dev.c")
        .since(Generation::V26_1),
    rule!(freeing_in_the_pool_segment_without_a_device_is_einval, Ran)
        .decided_by("devmm_free_page_process_soma, devmm_proc_info.c")
        .since(Generation::V26_1),
    rule!(freeing_in_the_pool_segment_is_granted_unchecked_with_a_device, Inferred)
        .decided_by("devmm_free_page_process_soma, devmm_proc_info.c")
        .since(Generation::V26_1),
    rule!(reservations_in_the_managed_segment_are_refused, Ran)
        .decided_by("devmm_ioctl_alloc, devmm_proc_info.c")
        .since(Generation::V26_1),
    rule!(reservations_in_the_host_pin_segment_are_granted, Ran)
        .decided_by("devmm_svm_get_heap, devmm_dev.c")
        .since(Generation::V26_1),
    rule!(freeing_gives_the_whole_reservation_back, Source)
        .decided_by("devmm_free_page_clear_bitmap, devmm_proc_info.c"),
    rule!(freeing_twice_is_einval, Ran).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(freeing_outside_the_ranges_is_eaddrnotavail, Source).decided_by("devmm_ioctl_free_pages, devmm_proc_info.c"),
    rule!(freeing_without_heap_is_einval, Source).decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c"),
    rule!(freeing_what_is_not_reserved_is_einval, Ran).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(freeing_from_the_middle_is_einval, Ran).decided_by("devmm_get_fst_alloc_bitmap_by_heap, devmm_proc_info.c"),
    rule!(freeing_at_an_odd_address_is_eaddrnotavail, Ran).decided_by("devmm_ioctl_free_pages, devmm_proc_info.c"),
    rule!(freeing_what_is_mapped_is_ebusy, Source).decided_by("devmm_set_page_ref_free, svm_heap_mng.c"),
    rule!(busy_is_reported_before_an_odd_address, Ran).decided_by("_devmm_ioctl_dispatch, devmm_proc_info.c"),
];

/// A session and the address of a heap.
fn with_heap(host: &Host) -> Result<(Session, u64), Failure> {
    let session = Session::host(host)?;
    let address = heap_address(session.heap()?);
    Ok((session, address))
}

fn a_reservation_is_made_once(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 16 * MIB2).granted()?;
    session.alloc(heap, 16 * MIB2).refused(EBUSY)
}

fn a_reservation_inside_another_is_ebusy(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 16 * MIB2).granted()?;
    session.alloc(heap + 15 * MIB2, 4 * MIB2).refused(EBUSY)?;
    session.alloc(heap + 5 * MIB2, MIB2).refused(EBUSY)
}

fn a_reservation_that_runs_into_another_is_einval_and_takes_nothing(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap + 2 * MIB2, MIB2).granted()?;
    session.alloc(heap, 4 * MIB2).refused(EINVAL)?;
    session.free(heap).refused(EINVAL)?;
    session.alloc(heap, 2 * MIB2).granted()?;
    session.alloc(heap + 3 * MIB2, MIB2).granted()
}

fn a_reservation_of_no_size_is_eaddrnotavail(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 0).refused(EADDRNOTAVAIL)
}

fn a_reservation_of_no_size_at_an_odd_address_takes_a_chunk(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap + 4096, 0).granted()?;
    session.alloc(heap, MIB2).refused(EBUSY)?;
    session.free(heap).granted()
}

fn a_reservation_past_the_heaps_end_is_eaddrnotavail(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap + GIB - MIB2, 2 * MIB2).refused(EADDRNOTAVAIL)?;
    session.alloc(heap + GIB - MIB2, MIB2).granted()
}

fn a_reservation_larger_than_the_heap_is_eaddrnotavail(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, GIB + MIB2).refused(EADDRNOTAVAIL)?;
    session.alloc(heap, u64::MAX).refused(EADDRNOTAVAIL)?;
    session.alloc(heap, GIB).granted()
}

fn a_reservation_does_not_cross_heaps(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.heap()?;
    session.alloc(heap + GIB - MIB2, 2 * MIB2).refused(EADDRNOTAVAIL)
}

fn a_reservation_without_heap_is_einval(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap + 10 * GIB, MIB2).refused(EINVAL)
}

fn a_reservation_outside_the_ranges_is_eaddrnotavail(host: &Host) -> Verdict {
    let (session, _) = with_heap(host)?;
    session.alloc(0x1000, MIB2).refused(EADDRNOTAVAIL)
}

fn an_odd_address_reserves_the_chunks_that_it_touches(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap + 4096, MIB2).granted()?;
    session.alloc(heap, MIB2).refused(EBUSY)?;
    session.alloc(heap + MIB2, MIB2).refused(EBUSY)?;
    session.alloc(heap + 2 * MIB2, MIB2).granted()?;
    session.free(heap).granted()
}

fn a_taken_chunk_is_reported_before_a_wrong_size(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, MIB2).granted()?;
    session.alloc(heap, 2 * GIB).refused(EBUSY)?;
    session.alloc(heap, 0).refused(EBUSY)
}

fn chunks_of_small_heaps_are_host_pages(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = crate::manager::page_size();
    let heap = heap_address(session.heap_of(svm::HEAP_CHUNK)?);
    session.alloc(heap, page).granted()?;
    session.alloc(heap + page, 2 * page).granted()?;
    session.alloc(heap + 2 * page, page).refused(EBUSY)?;
    session.alloc(heap + 3 * page, page).granted()
}

fn reservations_in_the_pool_segment_are_granted(host: &Host) -> Verdict {
    Session::host(host)?.alloc(svm::SOMA_START, MIB2).granted()
}

fn freeing_in_the_pool_segment_without_a_device_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.free(svm::SOMA_START + GIB).refused(EINVAL)
}

fn freeing_in_the_pool_segment_is_granted_unchecked_with_a_device(host: &Host) -> Verdict {
    Session::start(host)?.free(svm::SOMA_START + GIB).granted()
}

fn reservations_in_the_managed_segment_are_refused(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.alloc(svm::UVM_START, MIB2).refused(EADDRNOTAVAIL)?;
    session.free(svm::UVM_START).refused(EINVAL)
}

fn reservations_in_the_host_pin_segment_are_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let start = session.segments.last().map_or(0, |segment| segment.start);
    session.free(start).refused(EINVAL)?;
    session.alloc(start, MIB2).granted()
}

fn freeing_gives_the_whole_reservation_back(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 8 * MIB2).granted()?;
    session.free(heap).granted()?;
    session.alloc(heap + 3 * MIB2, MIB2).granted()?;
    session.alloc(heap + 7 * MIB2, MIB2).granted()
}

fn freeing_twice_is_einval(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, MIB2).granted()?;
    session.free(heap).granted()?;
    session.free(heap).refused(EINVAL)
}

fn freeing_outside_the_ranges_is_eaddrnotavail(host: &Host) -> Verdict {
    Session::host(host)?.free(0x1000).refused(EADDRNOTAVAIL)
}

fn freeing_without_heap_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.free(heap_address(3000)).refused(EINVAL)
}

fn freeing_what_is_not_reserved_is_einval(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.free(heap).refused(EINVAL)?;
    session.free(heap + 4096).refused(EINVAL)
}

fn freeing_from_the_middle_is_einval(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 4 * MIB2).granted()?;
    session.free(heap + MIB2).refused(EINVAL)?;
    session.free(heap).granted()
}

fn freeing_at_an_odd_address_is_eaddrnotavail(host: &Host) -> Verdict {
    let (session, heap) = with_heap(host)?;
    session.alloc(heap, 4 * MIB2).granted()?;
    session.free(heap + 4096).refused(EADDRNOTAVAIL)?;
    session.free(heap + MIB2 + 4096).refused(EADDRNOTAVAIL)?;
    session.free(heap).granted()
}

fn freeing_what_is_mapped_is_ebusy(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.free(address).refused(EBUSY)?;
    session.unmap(address).granted()?;
    session.free(address).granted()
}

fn busy_is_reported_before_an_odd_address(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(2 * MIB2)?;
    session.free(address + 4096).refused(EBUSY)?;
    session.free(address + MIB2).refused(EBUSY)
}
