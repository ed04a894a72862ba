//! Dynamic ranges: heaps and mappings between 24 and 256 TiB.
//!
//! What hangs the real kernel there is not tried: SETUP_DEVICE below 26.1 while a heap lies beyond
//! 80 TiB; MEM_UNMAP in 8.5.0, and disabling the heap in all, of host memory that fills a mapped
//! range; a munmap that is larger than the range.

use crate::host::Host;
use crate::manager::{mprotect, munmap};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{GIB, MIB2, Session};
use ascend_ioctl::svm::{self, COPY_DETECT, HEAP_CHUNK, HEAP_HUGE, Segment};
use libc::{EBUSY, EINVAL, ENOMEM};

pub const RULES: &[Rule] = &[
    rule!(a_dynamic_heap_begins_at_any_gibibyte, Ran).decided_by("devmm_ioctl_update_heap, devmm_proc_info.c"),
    rule!(a_dynamic_heap_is_at_most_128_tib, Ran)
        .decided_by("devmm_check_reserve_heap_size, devmm_proc_info.c")
        .needs(&[Need::Exhaustion]),
    rule!(a_dynamic_heap_of_small_chunks_needs_much_memory, Ran)
        .decided_by("devmm_alloc_new_heap_pagebitmap, svm_heap_mng.c")
        .needs(&[Need::Exhaustion]),
    rule!(a_dynamic_heap_is_disabled_with_what_is_in_it, Ran).decided_by("devmm_ioctl_update_heap, devmm_proc_info.c"),
    rule!(a_dynamic_reservation_holds_memory_of_two_devices, Ran)
        .decided_by("devmm_mem_map, svm_master_mem_map.c")
        .needs(&[Need::TwoDevices]),
    rule!(a_handle_is_mapped_twice_in_a_dynamic_reservation, Ran).decided_by("devmm_mem_map, svm_master_mem_map.c"),
    rule!(copies_do_not_cross_from_a_device_to_another_in_a_dynamic_reservation, Ran)
        .decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c")
        .needs(&[Need::TwoDevices]),
    rule!(copies_do_not_cross_from_a_device_to_the_host_in_a_dynamic_reservation, Ran)
        .decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c"),
    rule!(a_dynamic_reservation_of_a_closed_device_goes_with_its_heap, Ran)
        .decided_by("devmm_ioctl_free_pages, devmm_proc_info.c"),
    rule!(protecting_a_dynamic_mapping_that_shows_memory_ends_the_session, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(a_mapping_over_a_dynamic_mapping_is_put_elsewhere, Ran).decided_by("get_unmapped_area, linux/mm/mmap.c"),
];

/// A place in the dynamic range: its address and heap index.
const PLACE: (u64, u32) = (svm::DYNAMIC_START + 32 * GIB, svm::STATIC_HEAPS + 32);

/// A session on all devices with a dynamic heap of 2 GiB, of which `size` is reserved.
fn reserved(session: Session, size: u64) -> Result<(Session, u64), Failure> {
    session.enable(HEAP_HUGE, PLACE.1, 2 * GIB).granted()?;
    session.alloc(PLACE.0, size).granted()?;
    Ok((session, PLACE.0))
}

fn a_dynamic_heap_begins_at_any_gibibyte(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for index in [svm::STATIC_HEAPS, svm::STATIC_HEAPS + 7, 65_535, 65_536, svm::HEAPS - 1] {
        session.enable(HEAP_HUGE, index, GIB).granted()?;
        session.disable(index, 2 * GIB).refused(EINVAL)?;
        session.disable(index, GIB).granted()?;
    }
    Ok(())
}

fn a_dynamic_heap_is_at_most_128_tib(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.enable(HEAP_HUGE, svm::STATIC_HEAPS, (128 << 10) * GIB + GIB).refused(EINVAL)?;
    session.enable(HEAP_HUGE, svm::STATIC_HEAPS, (128 << 10) * GIB).granted()?;
    session.disable(svm::STATIC_HEAPS, (128 << 10) * GIB).granted()
}

fn a_dynamic_heap_of_small_chunks_needs_much_memory(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.enable(HEAP_CHUNK, svm::STATIC_HEAPS, (32 << 10) * GIB).refused(ENOMEM)?;
    holds("the session works", session.alive())
}

fn a_dynamic_heap_is_disabled_with_what_is_in_it(host: &Host) -> Verdict {
    let (session, address) = reserved(Session::start(host)?, MIB2)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    session.disable(PLACE.1, 2 * GIB).granted()?;
    session.release(&handle).granted().map(drop)
}

fn a_dynamic_reservation_holds_memory_of_two_devices(host: &Host) -> Verdict {
    let (session, address) = reserved(Session::with_two(host)?, 2 * MIB2)?;
    for device in [0, 1] {
        let handle = session.device_huge(device, MIB2).granted()?;
        session.map(&handle, address + u64::from(device) * MIB2, MIB2).granted()?;
    }
    Ok(())
}

fn a_handle_is_mapped_twice_in_a_dynamic_reservation(host: &Host) -> Verdict {
    let (session, address) = reserved(Session::start(host)?, 2 * MIB2)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    session.map(&handle, address + MIB2, MIB2).granted()?;
    let sent = [0x3C; 64];
    session.copy(address, sent.as_ptr() as u64, 64, COPY_DETECT).granted()?;
    let mut received = [0u8; 64];
    session.copy(received.as_mut_ptr() as u64, address + MIB2, 64, COPY_DETECT).granted()?;
    equal("bytes at the other address", std::hint::black_box(received), sent)
}

/// Copies over the border at the end of the first 2 MiB are EINVAL, and within each side granted.
fn border_stops_copies(session: &Session, address: u64) -> Verdict {
    let bytes = vec![1u8; 4096];
    let source = bytes.as_ptr() as u64;
    session.copy(address + MIB2 - 4096, source, 4096, COPY_DETECT).granted()?;
    session.copy(address + MIB2 - 2048, source, 4096, COPY_DETECT).refused(EINVAL)
}

fn copies_do_not_cross_from_a_device_to_another_in_a_dynamic_reservation(host: &Host) -> Verdict {
    let (session, address) = reserved(Session::with_two(host)?, 2 * MIB2)?;
    for device in [0, 1] {
        let handle = session.device_huge(device, MIB2).granted()?;
        session.map(&handle, address + u64::from(device) * MIB2, MIB2).granted()?;
    }
    border_stops_copies(&session, address)
}

fn copies_do_not_cross_from_a_device_to_the_host_in_a_dynamic_reservation(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let segment = Segment { start: PLACE.0, size: 2 * GIB };
    equal("address", session.svm.map_segment(&segment).granted()?, PLACE.0)?;
    let (session, address) = reserved(session, 2 * MIB2)?;
    let far = session.device_huge(0, MIB2).granted()?;
    session.map(&far, address, MIB2).granted()?;
    let near = session.host_huge(MIB2).granted()?;
    session.map(&near, address + MIB2, MIB2).granted()?;
    border_stops_copies(&session, address)
}

fn a_dynamic_reservation_of_a_closed_device_goes_with_its_heap(host: &Host) -> Verdict {
    let (session, address) = reserved(Session::start(host)?, MIB2)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    session.prepare_close(0).granted()?;
    session.close_device(0).granted()?;
    session.free(address).refused(EBUSY)?;
    session.disable(PLACE.1, 2 * GIB).granted()?;
    session.enable(HEAP_HUGE, PLACE.1, 2 * GIB).granted()?;
    session.alloc(address, MIB2).granted()
}

fn protecting_a_dynamic_mapping_that_shows_memory_ends_the_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let segment = Segment { start: PLACE.0, size: GIB };
    equal("address", session.svm.map_segment(&segment).granted()?, PLACE.0)?;
    session.enable(HEAP_HUGE, PLACE.1, GIB).granted()?;
    session.alloc(PLACE.0, MIB2).granted()?;
    let handle = session.host_huge(MIB2).granted()?;
    session.map(&handle, PLACE.0, MIB2).granted()?;
    mprotect(PLACE.0, GIB, libc::PROT_READ).granted()?;
    equal("the session works", session.alive(), false)
}

fn a_mapping_over_a_dynamic_mapping_is_put_elsewhere(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let segment = Segment { start: PLACE.0, size: 2 * GIB };
    equal("address", session.svm.map_segment(&segment).granted()?, PLACE.0)?;
    let other = session.svm.map_segment(&Segment { start: PLACE.0 + GIB, size: GIB }).granted()?;
    holds("the second mapping is elsewhere", !(PLACE.0..PLACE.0 + 2 * GIB).contains(&other))?;
    munmap(other, GIB).granted()?;
    holds("the session works", session.alive())
}
