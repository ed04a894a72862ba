//! What a process may do to the segments in its address space, and what ends its session.

use crate::host::Host;
use crate::manager::{anonymous, answer, errno, madvise, mprotect, munmap, page_size};
use crate::peer::{End, in_child, leave};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, note_command, rule};
use crate::session::{GIB, MIB2, Session, Svm, heap_address, peek, poke};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, HOST_ID, Segment};
use libc::{EEXIST, EFAULT, EINVAL, MAP_FIXED, PROT_NONE, PROT_READ, PROT_WRITE};
use std::ops::Range;

pub const RULES: &[Rule] = &[
    rule!(unmapping_the_svm_segment_ends_the_session, Ran).decided_by("_devmm_mem_is_in_vma_range, svm_mmu_notifier.c"),
    rule!(unmapping_the_host_pin_segment_ends_the_session, Ran)
        .decided_by("_devmm_mem_is_in_vma_range, svm_mmu_notifier.c")
        .since(Generation::V9_0_0),
    rule!(unmapping_the_pool_or_managed_segment_is_harmless, Ran)
        .decided_by("_devmm_mem_is_in_vma_range, svm_mmu_notifier.c")
        .since(Generation::V26_1),
    rule!(the_pool_and_managed_segments_cannot_be_mapped_again, Ran)
        .decided_by("svm_da_add_addr, svm_dynamic_addr.c")
        .since(Generation::V26_1),
    rule!(unmapping_more_than_a_segment_hides_from_the_driver, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c")
        .needs(&[Need::Leak]),
    rule!(unmapping_a_part_of_the_svm_segment_ends_the_session, Ran).decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(unmapping_a_part_of_the_host_pin_segment_ends_the_session, Ran)
        .decided_by("devmm_vm_open, svm_master_vma_ops.c")
        .since(Generation::V9_0_0),
    rule!(unmapping_a_part_of_the_pool_or_managed_segment_is_harmless, Ran)
        .decided_by("devmm_setup_vma_ops, svm_module_ops.c")
        .since(Generation::V26_1),
    rule!(mapping_over_a_part_of_the_svm_segment_ends_the_session, Ran)
        .decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(protecting_a_part_of_the_svm_segment_ends_the_session, Ran).decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(protecting_a_part_as_it_is_is_harmless, Ran).decided_by("mprotect_fixup, linux/mm/mprotect.c"),
    rule!(protecting_the_whole_segment_is_harmless, Ran).decided_by("mprotect_fixup, linux/mm/mprotect.c"),
    rule!(protecting_the_pool_and_managed_segments_before_initialising_is_harmless, Ran)
        .decided_by("devmm_check_and_get_svm_static_reserve_vma, svm_module_ops.c")
        .since(Generation::V26_1),
    rule!(advice_that_splits_the_svm_segment_ends_the_session, Ran).decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(advice_on_the_whole_segment_is_harmless, Ran).decided_by("madvise_update_vma, linux/mm/madvise.c"),
    rule!(advice_that_the_segment_has_already_is_harmless, Ran).decided_by("madvise_update_vma, linux/mm/madvise.c"),
    rule!(advice_against_the_segments_nature_is_einval, Ran).decided_by("madvise_vma_behavior, linux/mm/madvise.c"),
    rule!(locking_a_part_is_harmless, Ran).decided_by("mlock_fixup, linux/mm/mlock.c"),
    rule!(locking_everything_is_harmless_and_costs_nothing, Ran).decided_by("mlock_fixup, linux/mm/mlock.c"),
    rule!(locking_everything_that_will_be_mapped_is_harmless, Ran).decided_by("mlock_fixup, linux/mm/mlock.c"),
    rule!(advice_to_page_out_is_einval, Ran).decided_by("can_madv_lru_vma, linux/mm/madvise.c"),
    rule!(populating_the_segment_is_einval, Ran).decided_by("madvise_populate, linux/mm/madvise.c"),
    rule!(memory_mapped_under_a_read_only_segment_is_writable, Ran)
        .decided_by("devmm_insert_pages_to_vma_owner, devmm_dev.c"),
    rule!(shrinking_the_svm_segment_ends_the_session, Ran).decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(growing_the_svm_segment_is_efault, Ran).decided_by("vma_to_resize, linux/mm/mremap.c"),
    rule!(moving_the_svm_segment_is_einval, Ran).decided_by("drv_ascend_intf_get_unmapped_area, davinci_intf_init.c"),
    rule!(without_segments_foreign_unmappings_of_certain_ranges_end_the_session, Ran)
        .decided_by("_devmm_mem_is_in_vma_range, svm_mmu_notifier.c"),
    rule!(without_segments_dropping_the_svm_range_ends_the_session, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(without_segments_unmapping_nothing_is_harmless, Ran).decided_by("do_vmi_munmap, linux/mm/mmap.c"),
    rule!(without_segments_dropping_nothing_is_harmless, Ran).decided_by("madvise_walk_vmas, linux/mm/madvise.c"),
    rule!(without_segments_one_page_in_the_svm_range_is_enough_to_end_the_session, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(without_segments_other_unmappings_are_harmless, Ran)
        .decided_by("_devmm_mem_is_in_vma_range, svm_mmu_notifier.c"),
    rule!(an_unused_dynamic_mapping_can_go_and_come_back, Ran).decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(unmapping_a_dynamic_mapping_with_a_heap_ends_the_session, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c"),
    rule!(unmapping_a_part_of_a_dynamic_mapping_ends_the_session, Ran)
        .decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(a_touch_of_a_reservation_is_a_segmentation_fault, Ran)
        .decided_by("_devmm_svm_vm_fault_host, svm_master_vma_ops.c")
        .needs(&[Need::OwnFiles]),
    rule!(a_touch_of_device_memory_is_a_segmentation_fault, Ran)
        .decided_by("_devmm_svm_vm_fault_host, svm_master_vma_ops.c")
        .needs(&[Need::OwnFiles]),
    rule!(a_touch_after_unmapping_is_a_segmentation_fault, Ran)
        .decided_by("_devmm_svm_vm_fault_host, svm_master_vma_ops.c")
        .needs(&[Need::OwnFiles]),
    rule!(a_touch_after_disabling_the_heap_is_a_segmentation_fault, Ran)
        .decided_by("_devmm_svm_vm_fault_host, svm_master_vma_ops.c")
        .needs(&[Need::OwnFiles]),
    rule!(segments_do_not_survive_a_fork, Ran).decided_by("devmm_svm_mmap, svm_module_ops.c").needs(&[Need::OwnFiles]),
    rule!(huge_pages_for_a_part_of_the_svm_segment_end_the_session, Ran)
        .decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(binding_a_part_of_the_svm_segment_to_a_node_ends_the_session, Ran)
        .decided_by("devmm_vm_open, svm_master_vma_ops.c"),
    rule!(a_second_users_clean_up_ends_a_session_without_segments, Ran)
        .decided_by("_devmm_notifier_start, svm_mmu_notifier.c")
        .needs(&[Need::Leak]),
];

/// Calls `act` with the first segment; returns whether the session still works.
fn after(host: &Host, act: impl FnOnce(&Session, Segment) -> Verdict) -> Result<bool, Failure> {
    let session = Session::host(host)?;
    act(&session, session.segments[0])?;
    Ok(session.alive())
}

fn ends(host: &Host, act: impl FnOnce(&Session, Segment) -> Verdict) -> Verdict {
    equal("the session works", after(host, act)?, false)
}

fn harmless(host: &Host, act: impl FnOnce(&Session, Segment) -> Verdict) -> Verdict {
    equal("the session works", after(host, act)?, true)
}

fn unmapping_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    munmap(svm::SVM_START, svm::SVM_SIZE).granted()?;
    session.host_huge(MIB2).refused(EINVAL)?;
    session.setup_device(0).refused(EINVAL)
}

fn unmapping_the_host_pin_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |session, _| {
        let last = session.segments[session.segments.len() - 1];
        munmap(last.start, last.size).granted()
    })
}

fn unmapping_the_pool_or_managed_segment_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, _| {
        munmap(svm::SOMA_START, svm::SOMA_SIZE).granted()?;
        munmap(svm::UVM_START, svm::UVM_SIZE).granted()
    })
}

fn the_pool_and_managed_segments_cannot_be_mapped_again(host: &Host) -> Verdict {
    harmless(host, |session, _| {
        munmap(svm::SOMA_START, svm::SOMA_SIZE).granted()?;
        session.svm.map_segment(&Segment { start: svm::SOMA_START, size: svm::SOMA_SIZE }).refused(EINVAL)?;
        munmap(svm::UVM_START, svm::UVM_SIZE).granted()?;
        session.svm.map_segment(&Segment { start: svm::UVM_START, size: svm::UVM_SIZE }).refused(EINVAL)
    })
}

fn unmapping_more_than_a_segment_hides_from_the_driver(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page_size();
    munmap(svm::SVM_START - page, svm::SVM_SIZE + page).granted()?;
    holds("the session works", session.alive())?;
    drop(session);
    let next = Svm::open(host)?;
    next.alloc_process().granted()?;
    next.init().refused(EEXIST)?;
    // Linux does not notify the driver about an empty range, so this ends nothing.
    munmap(svm::SVM_START, svm::SVM_SIZE).granted()?;
    next.init().refused(EEXIST)?;
    // Unless the first session ends before this process does, the kernel never frees its memory.
    let inside = svm::SVM_START + GIB;
    map_and_unmap(inside..inside + page, svm::SVM_START..svm::SVM_START + svm::SVM_SIZE)?;
    crate::session::eventually("the next session begins", || next.init().is_ok())
}

fn unmapping_a_part_of_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| munmap(svm.start + 100 * GIB, page_size()).granted())
}

fn unmapping_a_part_of_the_host_pin_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |session, _| {
        let last = session.segments[session.segments.len() - 1];
        munmap(last.start + GIB, GIB).granted()
    })
}

fn unmapping_a_part_of_the_pool_or_managed_segment_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, _| {
        munmap(svm::SOMA_START + GIB, GIB).granted()?;
        munmap(svm::UVM_START, GIB).granted()
    })
}

fn mapping_over_a_part_of_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | MAP_FIXED;
        crate::manager::mmap(svm.start + 7000 * GIB, GIB, PROT_NONE, flags | libc::MAP_NORESERVE, -1)
            .granted()
            .map(drop)
    })
}

fn protecting_a_part_of_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| mprotect(svm.start + 100 * GIB, GIB, PROT_NONE).granted())
}

fn protecting_a_part_as_it_is_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, svm| mprotect(svm.start + 100 * GIB, GIB, PROT_READ | PROT_WRITE).granted())
}

fn protecting_the_whole_segment_is_harmless(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    mprotect(svm::SVM_START, svm::SVM_SIZE, PROT_NONE).granted()?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    session.write(far, b"bytes").granted()?;
    equal("bytes", session.read(far, 5).granted()?, b"bytes".to_vec())?;
    mprotect(svm::SVM_START, svm::SVM_SIZE, PROT_READ | PROT_WRITE).granted()?;
    let (_, near) = session.host_mapping(MIB2)?;
    poke(near, 3);
    equal("word", peek(near), 3)
}

fn protecting_the_pool_and_managed_segments_before_initialising_is_harmless(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let segments = svm.prepare()?;
    mprotect(svm::SOMA_START, svm::SOMA_SIZE, PROT_NONE).granted()?;
    mprotect(svm::UVM_START, svm::UVM_SIZE, PROT_NONE).granted()?;
    svm.init().granted()?;
    let session = Session::of(svm, segments);
    session.setup(0)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    session.write(far, b"bytes").granted()?;
    let (_, near) = session.host_mapping(MIB2)?;
    poke(near, 3);
    equal("word", peek(near), 3)?;
    session.close_device(0).granted()?;
    session.shut_down()?;
    holds("the next session works", Session::host(host)?.alive())
}

fn advice_that_splits_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| madvise(svm.start + 100 * GIB, GIB, libc::MADV_RANDOM).granted())
}

fn advice_on_the_whole_segment_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        madvise(svm.start, svm.size, libc::MADV_RANDOM).granted()?;
        madvise(svm.start, svm.size, libc::MADV_DONTDUMP).granted()
    })
}

fn advice_that_the_segment_has_already_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        madvise(svm.start + 100 * GIB, GIB, libc::MADV_DONTDUMP).granted()?;
        madvise(svm.start + 100 * GIB, GIB, libc::MADV_DONTFORK).granted()
    })
}

fn advice_against_the_segments_nature_is_einval(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        for advice in [libc::MADV_DODUMP, libc::MADV_DOFORK, libc::MADV_DONTNEED] {
            madvise(svm.start + 100 * GIB, GIB, advice).refused(EINVAL)?;
        }
        Ok(())
    })
}

fn locking_a_part_is_harmless(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        let part = (svm.start + 100 * GIB) as *const libc::c_void;
        // SAFETY: locking a range of a mapping that this process made changes no contents.
        unsafe {
            libc::mlock(part, MIB2 as usize);
            libc::munlock(part, MIB2 as usize);
        }
        Ok(())
    })
}

/// mlockall(2), where this process may.
fn lock_all(flags: i32) -> Verdict {
    note_command("mlockall");
    // SAFETY: locking pages changes no contents.
    match answer(i64::from(unsafe { libc::mlockall(flags) })) {
        Err(libc::EPERM | libc::ENOMEM) => Err(Failure::skipped("this process may not lock so much memory")),
        locked => locked.granted().map(drop),
    }
}

/// How much memory this process has in RAM, in KiB.
fn resident() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(Failure::broken)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok());
    number.ok_or_else(|| Failure::broken("/proc/self/status has no VmRSS"))
}

fn locking_everything_is_harmless_and_costs_nothing(host: &Host) -> Verdict {
    let before = resident()?;
    harmless(host, |session, _| {
        lock_all(libc::MCL_CURRENT)?;
        holds("less than 1 GiB was locked", resident()? < before + (1 << 20))?;
        let (_, near) = session.host_mapping(MIB2)?;
        poke(near, 3);
        equal("word", peek(near), 3)
    })
}

fn locking_everything_that_will_be_mapped_is_harmless(host: &Host) -> Verdict {
    let before = resident()?;
    lock_all(libc::MCL_FUTURE)?;
    harmless(host, |_, _| holds("less than 1 GiB was locked", resident()? < before + (1 << 20)))
}

fn advice_to_page_out_is_einval(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        for advice in [libc::MADV_COLD, libc::MADV_PAGEOUT] {
            madvise(svm.start + 100 * GIB, GIB, advice).refused(EINVAL)?;
        }
        Ok(())
    })
}

fn populating_the_segment_is_einval(host: &Host) -> Verdict {
    harmless(host, |_, svm| match madvise(svm.start + 100 * GIB, MIB2, libc::MADV_POPULATE_READ) {
        // Kernels before 6.0 say that this is not memory.
        Err(EFAULT) => Ok(()),
        populated => populated.refused(EINVAL),
    })
}

fn memory_mapped_under_a_read_only_segment_is_writable(host: &Host) -> Verdict {
    harmless(host, |session, svm| {
        mprotect(svm.start, svm.size, PROT_READ).granted()?;
        let (_, near) = session.host_mapping(MIB2)?;
        poke(near, 9);
        equal("word", peek(near), 9)
    })
}

/// mremap(2).
fn mremap(address: u64, old: u64, new: u64, flags: i32, place: u64) -> Answer<u64> {
    note_command("mremap");
    // SAFETY: only ranges that this process mapped and to which nothing refers.
    let moved = unsafe { libc::mremap(address as *mut libc::c_void, old as usize, new as usize, flags, place) };
    if moved == libc::MAP_FAILED { Err(errno()) } else { Ok(moved as u64) }
}

fn shrinking_the_svm_segment_ends_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| mremap(svm.start, svm.size, svm.size - GIB, 0, 0).granted().map(drop))
}

fn growing_the_svm_segment_is_efault(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        mremap(svm.start, svm.size, svm.size + GIB, libc::MREMAP_MAYMOVE, 0).refused(EFAULT)?;
        mremap(svm.start, 0, svm.size, libc::MREMAP_MAYMOVE, 0).refused(EFAULT)
    })
}

fn moving_the_svm_segment_is_einval(host: &Host) -> Verdict {
    harmless(host, |_, svm| {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        mremap(svm.start, svm.size, svm.size, flags, 0x2000_0000_0000).refused(EINVAL)
    })
}

/// Maps anonymous memory exactly there, and unmaps it.
fn come_and_go(start: u64, size: u64) -> Verdict {
    map_and_unmap(start..start + size, start..start + size)
}

/// Maps anonymous memory in one range and unmaps another.
fn map_and_unmap(mapped: Range<u64>, unmapped: Range<u64>) -> Verdict {
    let address = anonymous(mapped.start, mapped.end - mapped.start, PROT_NONE).granted()?;
    equal("address", address, mapped.start)?;
    munmap(unmapped.start, unmapped.end - unmapped.start).granted()
}

const TIB: u64 = 1 << 40;

/// Ranges whose unmapping the driver takes for that of a segment.
const DANGEROUS: [(u64, u64); 6] = [
    (svm::SVM_START, svm::SVM_SIZE),
    (svm::SVM_START, 2 * TIB),
    (svm::SVM_START + 3 * 32 * GIB, 16 * GIB),
    (svm::SVM_START + 2 * TIB, 256 * GIB),
    (svm::SVM_START + 2 * TIB + 256 * GIB, 512 * GIB),
    (svm::NORMAL_START, svm::DYNAMIC_START - svm::NORMAL_START),
];

fn without_segments_foreign_unmappings_of_certain_ranges_end_the_session(host: &Host) -> Verdict {
    for (start, size) in DANGEROUS {
        crate::peer::check_in_child(|| {
            let session = Session::unmapped(host)?;
            come_and_go(start, size)?;
            equal(&format!("the session works after unmapping {start:#x}+{size:#x}"), session.alive(), false)
        })?;
    }
    Ok(())
}

fn without_segments_dropping_the_svm_range_ends_the_session(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    anonymous(svm::SVM_START, svm::SVM_SIZE, PROT_NONE).granted()?;
    madvise(svm::SVM_START, svm::SVM_SIZE, libc::MADV_DONTNEED).granted()?;
    equal("the session works", session.alive(), false)
}

fn without_segments_unmapping_nothing_is_harmless(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    for (start, size) in DANGEROUS {
        munmap(start, size).granted()?;
        equal(&format!("the session works after unmapping {start:#x}+{size:#x}"), session.alive(), true)?;
    }
    Ok(())
}

fn without_segments_dropping_nothing_is_harmless(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    madvise(svm::SVM_START, svm::SVM_SIZE, libc::MADV_DONTNEED).refused(libc::ENOMEM)?;
    equal("the session works", session.alive(), true)
}

fn without_segments_one_page_in_the_svm_range_is_enough_to_end_the_session(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    let inside = svm::SVM_START + 5000 * GIB;
    map_and_unmap(inside..inside + page_size(), svm::SVM_START..svm::SVM_START + svm::SVM_SIZE)?;
    equal("the session works", session.alive(), false)
}

fn without_segments_other_unmappings_are_harmless(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    for (start, size) in [
        (svm::SVM_START, GIB),
        (svm::SVM_START + GIB, 16 * GIB),
        (svm::SVM_START + TIB, TIB),
        (svm::SOMA_START, svm::SOMA_SIZE),
        (svm::UVM_START, svm::UVM_SIZE),
        (svm::HOST_PIN_START_PCIE, svm::HOST_PIN_SIZE),
    ] {
        come_and_go(start, size)?;
        equal(&format!("the session works after unmapping {start:#x}+{size:#x}"), session.alive(), true)?;
    }
    Ok(())
}

/// A dynamic range of 2 GiB.
const DYNAMIC: Segment = Segment { start: svm::DYNAMIC_START + 16 * GIB, size: 2 * GIB };

/// A session with the dynamic range mapped.
fn with_dynamic(host: &Host) -> Result<Session, Failure> {
    let session = Session::host(host)?;
    equal("address", session.svm.map_segment(&DYNAMIC).granted()?, DYNAMIC.start)?;
    Ok(session)
}

fn an_unused_dynamic_mapping_can_go_and_come_back(host: &Host) -> Verdict {
    let session = with_dynamic(host)?;
    munmap(DYNAMIC.start, DYNAMIC.size).granted()?;
    holds("the session works", session.alive())?;
    equal("address", session.svm.map_segment(&DYNAMIC).granted()?, DYNAMIC.start)
}

fn unmapping_a_dynamic_mapping_with_a_heap_ends_the_session(host: &Host) -> Verdict {
    let session = with_dynamic(host)?;
    session.enable(svm::HEAP_HUGE, svm::STATIC_HEAPS + 16, DYNAMIC.size).granted()?;
    munmap(DYNAMIC.start, DYNAMIC.size).granted()?;
    equal("the session works", session.alive(), false)
}

fn unmapping_a_part_of_a_dynamic_mapping_ends_the_session(host: &Host) -> Verdict {
    let session = with_dynamic(host)?;
    munmap(DYNAMIC.start, GIB).granted()?;
    equal("the session works", session.alive(), false)
}

/// A child that reads the address that `body` returns must be killed for it.
fn touch_is_fatal(body: impl FnOnce() -> Result<(Session, u64), Failure>) -> Verdict {
    let end = in_child(|| match body() {
        Ok((_session, address)) => {
            std::hint::black_box(peek(address));
        }
        Err(_) => leave(3),
    });
    equal("end of the process that touched it", end, End::Signal(libc::SIGSEGV))
}

fn a_touch_of_a_reservation_is_a_segmentation_fault(host: &Host) -> Verdict {
    touch_is_fatal(|| {
        let session = Session::host(host)?;
        let address = session.reserve(MIB2)?;
        Ok((session, address))
    })
}

fn a_touch_of_device_memory_is_a_segmentation_fault(host: &Host) -> Verdict {
    touch_is_fatal(|| {
        let session = Session::start(host)?;
        let (_, address) = session.device_mapping(0, MIB2)?;
        Ok((session, address))
    })
}

fn a_touch_after_unmapping_is_a_segmentation_fault(host: &Host) -> Verdict {
    touch_is_fatal(|| {
        let session = Session::host(host)?;
        let (_, address) = session.host_mapping(MIB2)?;
        poke(address, 1);
        session.unmap(address).granted()?;
        Ok((session, address))
    })
}

fn a_touch_after_disabling_the_heap_is_a_segmentation_fault(host: &Host) -> Verdict {
    touch_is_fatal(|| {
        let session = Session::host(host)?;
        let (_, address) = session.host_mapping(MIB2)?;
        poke(address, 1);
        session.disable(crate::session::FIRST_HEAP, GIB).granted()?;
        Ok((session, address))
    })
}

fn segments_do_not_survive_a_fork(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    equal("owner", session.owner(address, MIB2).granted()?.device, HOST_ID)?;
    let end = in_child(|| {
        // SAFETY: msync only checks whether the range is mapped.
        let result = unsafe { libc::msync(heap_address(0) as *mut libc::c_void, 4096, libc::MS_ASYNC) };
        let told = answer(i64::from(result));
        leave(i32::from(told != Err(libc::ENOMEM)));
    });
    equal("end of the child (0: the segment is absent)", end, End::Exit(0))
}

fn huge_pages_for_a_part_of_the_svm_segment_end_the_session(host: &Host) -> Verdict {
    ends(host, |_, svm| match madvise(svm.start + 100 * GIB, GIB, libc::MADV_HUGEPAGE) {
        Err(EINVAL) => Err(Failure::skipped("this kernel has no transparent huge pages")),
        answer => answer.granted(),
    })
}

/// mbind(2) of a range to node 0.
fn bind_to_node(start: u64, length: u64) -> Verdict {
    const MPOL_BIND: u64 = 2;
    let nodes = 1u64;
    note_command("mbind");
    // SAFETY: the node mask is a local that outlives the call; the range is our own mapping.
    let result =
        unsafe { libc::syscall(libc::SYS_mbind, start, length, MPOL_BIND, std::ptr::from_ref(&nodes), 64u64, 0u64) };
    match answer(result) {
        Err(libc::ENOSYS) => Err(Failure::skipped("this kernel has no NUMA policies")),
        told => told.granted().map(drop),
    }
}

fn binding_a_part_of_the_svm_segment_to_a_node_ends_the_session(host: &Host) -> Verdict {
    crate::peer::check_in_child(|| harmless(host, |_, svm| bind_to_node(svm.start, svm.size)))?;
    ends(host, |_, svm| bind_to_node(svm.start + 100 * GIB, GIB))
}

fn a_second_users_clean_up_ends_a_session_without_segments(host: &Host) -> Verdict {
    let session = Session::unmapped(host)?;
    let second = Svm::open(host)?;
    let segments = second.prepare()?;
    second.init().refused(EEXIST)?;
    holds("the first session works", session.alive())?;
    for segment in &segments {
        munmap(segment.start, segment.size).granted()?;
    }
    equal("the first session works", session.alive(), false)?;
    // The file that got EEXIST must not be closed in that state: that would leak kernel memory.
    crate::session::eventually("the second session begins", || second.init().is_ok())
}
