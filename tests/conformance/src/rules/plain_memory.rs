//! Plain memory: allocations outside of reserve heaps, behind which ADVISE and PREFETCH put pages.
//! This is how the vendor's library allocates.

use crate::host::Host;
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{FIRST_HEAP, GIB, MIB2, Session, heap_address, peek, poke};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{
    self, Advice, COPY_DETECT, COPY_DEVICE_TO_HOST, COPY_HOST_TO_DEVICE, COPY_HOST_TO_HOST, HEAP_CHUNK, HEAP_HUGE,
    HEAP_PINNED_HOST, Op, SUB_DEVICE, SUB_HOST, SUB_READ_ONLY, SUB_SVM,
};
use libc::{EADDRINUSE, EADDRNOTAVAIL, EBUSY, EFAULT, EINVAL, ENOMEM, EOPNOTSUPP, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(populated_memory_holds_bytes, Inferred).decided_by("devmm_populate_to_device_frame, svm_master_advise.c"),
    rule!(populated_memory_in_small_pages_holds_bytes, Inferred)
        .decided_by("devmm_populate_to_device_frame, svm_master_advise.c"),
    rule!(copies_know_where_populated_memory_is, Ran).decided_by("devmm_find_memcpy_dir, svm_master_memcpy.c"),
    rule!(populating_twice_is_einval, Ran).decided_by("devmm_advise_check, svm_master_advise.c"),
    rule!(populating_for_another_device_is_einval, Ran)
        .decided_by("devmm_advise_populate_arg_check, svm_master_advise.c")
        .needs(&[Need::TwoDevices]),
    rule!(a_device_heap_needs_its_device, Ran).decided_by("devmm_check_dev_heap_size, devmm_proc_info.c"),
    rule!(populating_for_a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("devmm_query_page_by_msg, devmm_channel.c"),
    rule!(advice_needs_an_allocation, Ran).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(advice_beyond_the_allocation_is_einval, Ran).decided_by("devmm_advise_check, svm_master_advise.c"),
    rule!(advice_beyond_the_heap_is_einval, Ran).decided_by("devmm_check_va_add_size_by_heap, devmm_common.c"),
    rule!(huge_advice_in_a_heap_of_small_pages_is_eaddrnotavail, Ran)
        .decided_by("devmm_advise_check_type, svm_master_advise.c"),
    rule!(memory_without_pages_is_no_source, Ran).decided_by("devmm_memcpy_para_check, svm_master_memcpy.c"),
    rule!(locked_memory_without_pages_is_no_destination, Ran)
        .decided_by("devmm_insert_host_page_range, devmm_proc_info.c"),
    rule!(filling_locked_memory_without_pages_is_einval, Ran)
        .decided_by("devmm_ioctl_memset_device_process, svm_master_memset.c"),
    rule!(a_copy_to_managed_memory_gives_it_host_pages, Ran)
        .decided_by("devmm_insert_host_page_range, devmm_proc_info.c"),
    rule!(a_fill_of_managed_memory_gives_it_host_pages, Ran)
        .decided_by("devmm_ioctl_memset_process, svm_master_memset.c"),
    rule!(populating_managed_memory_moves_its_bytes, Inferred)
        .decided_by("devmm_prefetch_to_device, svm_master_advise.c"),
    rule!(a_touch_of_the_cpu_gives_managed_memory_host_pages, Ran)
        .decided_by("devmm_svm_vm_fault_host_proc, svm_master_vma_ops.c"),
    rule!(what_the_cpu_wrote_moves_to_the_device, Inferred).decided_by("devmm_prefetch_to_device, svm_master_advise.c"),
    rule!(the_cpu_reads_what_managed_memory_had_on_the_device, Inferred)
        .decided_by("devmm_svm_vm_fault_host_sync_device_data, svm_master_vma_ops.c"),
    rule!(managed_memory_that_was_touched_is_freed, Ran)
        .decided_by("devmm_svm_vm_fault_host_proc, svm_master_vma_ops.c"),
    rule!(managed_memory_is_populated_on_its_home, Ran)
        .decided_by("devmm_advise_svm_check, svm_master_advise.c")
        .needs(&[Need::TwoDevices]),
    rule!(prefetching_populates, Inferred).decided_by("devmm_ioctl_advise_populate, svm_master_advise.c"),
    rule!(prefetching_populated_memory_again_is_granted, Ran)
        .decided_by("devmm_advise_d2d_populate_process, svm_master_advise.c"),
    rule!(prefetching_for_a_peer_is_granted, Inferred)
        .decided_by("devmm_advise_d2d_populate_process, svm_master_advise.c")
        .needs(&[Need::TwoDevices]),
    rule!(pinned_host_memory_is_the_cpus, Ran).decided_by("devmm_ioctl_advise_master, svm_master_advise.c"),
    rule!(pinned_host_memory_is_copied_by_the_device, Inferred)
        .decided_by("devmm_find_memcpy_dir, svm_master_memcpy.c"),
    rule!(pinning_wants_a_whole_allocation, Ran).decided_by("devmm_ioctl_advise_master, svm_master_advise.c"),
    rule!(pinning_twice_is_eaddrinuse, Ran).decided_by("devmm_ioctl_advise_master, svm_master_advise.c"),
    rule!(pinned_host_memory_is_not_prefetched, Ran).decided_by("devmm_prefetch_para_check, svm_master_advise.c"),
    rule!(huge_pages_can_be_pinned, Ran)
        .decided_by("devmm_advise_check_type, svm_master_advise.c")
        .since(Generation::V9_0_0),
    rule!(huge_pages_cannot_be_pinned_before_9_0_0, Source)
        .decided_by("devmm_advise_check_type, svm_master_advise.c")
        .before(Generation::V9_0_0),
    rule!(a_read_only_heap_wants_read_only_advice, Ran).decided_by("devmm_advise_check, svm_master_advise.c"),
    rule!(read_only_memory_is_not_copied, Ran).decided_by("devmm_memcpy_para_check, svm_master_memcpy.c"),
    rule!(freeing_populated_memory_frees_it_once, Ran).decided_by("devmm_free_page_process, devmm_proc_info.c"),
    rule!(an_asynchronous_copy_keeps_populated_memory, Ran).decided_by("devmm_set_page_ref_free, svm_heap_mng.h"),
    rule!(populated_memory_is_no_mapping, Ran).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(populated_memory_is_found_by_its_kind, Ran).decided_by("devmm_check_meminfo, devmm_proc_info.c"),
    rule!(disabling_a_heap_frees_its_pages, Inferred).decided_by("devmm_ioctl_disable_heap, devmm_proc_info.c"),
    rule!(closing_the_device_leaves_the_addresses, Ran).decided_by("devmm_ioctl_close_device, devmm_proc_info.c"),
    rule!(populating_more_than_the_device_has_is_enomem, Inferred)
        .decided_by("devmm_populate_to_device_frame, svm_master_advise.c")
        .needs(&[Need::Exhaustion]),
];

/// The advice with which the vendor's library allocates device memory in huge pages.
const DEVICE_MEMORY: Advice = Advice::HUGE.union(Advice::POPULATE).union(Advice::LOCK_DEVICE);

/// A heap at a place that rules do not use otherwise. `place` tells several apart.
pub(super) fn heap(session: &Session, device: u32, kind: u32, sub_kind: u32, place: u32) -> Answer<u64> {
    heap_of(session, device, kind, sub_kind, place, GIB)
}

fn heap_of(session: &Session, device: u32, kind: u32, sub_kind: u32, place: u32, size: u64) -> Answer<u64> {
    let index = FIRST_HEAP + 512 + 128 * place;
    let para = svm::UpdateHeap { operation: svm::HEAP_ENABLE, kind, sub_kind, index, size };
    session.svm.call(Op::UpdateHeap, device, &para)?;
    Ok(heap_address(index))
}

/// An allocation of a device in huge pages, without pages.
fn allocated(session: &Session, size: u64) -> Result<u64, Failure> {
    let address = heap(session, 0, HEAP_HUGE, SUB_DEVICE, 0).granted()?;
    session.alloc(address, size).granted()?;
    Ok(address)
}

/// An allocation of device 0 with its pages.
pub(super) fn populated(session: &Session, size: u64) -> Result<u64, Failure> {
    let address = allocated(session, size)?;
    session.advise(0, address, size, DEVICE_MEMORY).granted()?;
    Ok(address)
}

/// An allocation of managed memory in huge pages, without pages.
pub(super) fn managed(session: &Session, size: u64) -> Result<u64, Failure> {
    let address = heap(session, 0, HEAP_HUGE, SUB_SVM, 1).granted()?;
    session.alloc(address, size).granted()?;
    Ok(address)
}

fn round_trip(session: &Session, address: u64) -> Verdict {
    session.write(address, b"some bytes").granted()?;
    equal("bytes", session.read(address, 10).granted()?, b"some bytes".to_vec())
}

fn populated_memory_holds_bytes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, 2 * MIB2)?;
    round_trip(&session, address)?;
    round_trip(&session, address + 2 * MIB2 - 10)?;
    // Across the border of two pages.
    round_trip(&session, address + MIB2 - 5)?;
    session.free(address).granted()
}

fn populated_memory_in_small_pages_holds_bytes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = heap(&session, 0, HEAP_CHUNK, SUB_DEVICE, 0).granted()?;
    session.alloc(address, 3 * 4096).granted()?;
    session.advise(0, address, 3 * 4096, Advice::POPULATE | Advice::LOCK_DEVICE).granted()?;
    round_trip(&session, address + 4096 - 5)?;
    session.free(address).granted()
}

fn copies_know_where_populated_memory_is(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let mut bytes = [0u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    equal("to it", session.copy(address, near, 64, COPY_DETECT).granted()?, COPY_HOST_TO_DEVICE)?;
    equal("from it", session.copy(near, address, 64, COPY_DETECT).granted()?, COPY_DEVICE_TO_HOST)?;
    session.copy(near, address, 64, COPY_HOST_TO_DEVICE).refused(EINVAL)
}

fn populating_twice_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY).refused(EINVAL)
}

fn populating_for_another_device_is_einval(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let address = populated(&session, MIB2)?;
    session.advise(1, address, MIB2, DEVICE_MEMORY).refused(EINVAL)?;
    let locked = heap(&session, 0, HEAP_HUGE, SUB_DEVICE, 1).granted()?;
    session.alloc(locked, MIB2).granted()?;
    session.advise(0, locked, MIB2, Advice::LOCK_DEVICE).granted()?;
    session.advise(1, locked, MIB2, Advice::POPULATE).refused(EINVAL)
}

fn a_device_heap_needs_its_device(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    heap(&session, 0, HEAP_HUGE, SUB_DEVICE, 0).refused(ESRCH)
}

fn populating_for_a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = managed(&session, MIB2)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY).refused(ESRCH)
}

fn advice_needs_an_allocation(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = heap(&session, 0, HEAP_HUGE, SUB_DEVICE, 0).granted()?;
    session.advise(0, address, MIB2, DEVICE_MEMORY).refused(EINVAL)
}

fn advice_beyond_the_allocation_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.advise(0, address, 2 * MIB2, DEVICE_MEMORY).refused(EINVAL)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY).granted()
}

fn advice_beyond_the_heap_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.advise(0, address, GIB + MIB2, DEVICE_MEMORY).refused(EINVAL)?;
    session.advise(0, address, 0, DEVICE_MEMORY).refused(EINVAL)
}

fn huge_advice_in_a_heap_of_small_pages_is_eaddrnotavail(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = heap(&session, 0, HEAP_CHUNK, SUB_DEVICE, 0).granted()?;
    session.alloc(address, 4096).granted()?;
    session.advise(0, address, 4096, DEVICE_MEMORY).refused(EADDRNOTAVAIL)
}

fn memory_without_pages_is_no_source(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.read(address, 64).refused(EINVAL)?;
    session.advise(0, address, MIB2, Advice::HUGE).granted()?;
    session.read(address, 64).refused(EINVAL)
}

fn locked_memory_without_pages_is_no_destination(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.advise(0, address, MIB2, Advice::LOCK_DEVICE).granted()?;
    session.write(address, b"x").refused(EINVAL)
}

fn filling_locked_memory_without_pages_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.advise(0, address, MIB2, Advice::LOCK_DEVICE).granted()?;
    session.fill(address, 1, 64).refused(EINVAL)
}

fn a_copy_to_managed_memory_gives_it_host_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    let bytes = [7u8; 64];
    let direction = session.copy(address, bytes.as_ptr() as u64, 64, COPY_DETECT).granted()?;
    equal("direction", direction, COPY_HOST_TO_HOST)?;
    equal("new pages", peek(address), 0)?;
    poke(address + MIB2 - 8, 5);
    equal("word", peek(address + MIB2 - 8), 5)?;
    session.free(address).granted()
}

fn a_fill_of_managed_memory_gives_it_host_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    holds("the fill is left to the caller", session.fill(address, 1, 64).granted()?)?;
    poke(address, 9);
    equal("word", peek(address), 9)
}

fn populating_managed_memory_moves_its_bytes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    session.fill(address, 1, 64).granted()?;
    poke(address, 0x1234_5678_9ABC_DEF0);
    session.advise(0, address, MIB2, DEVICE_MEMORY).granted()?;
    let mut word = 0u64;
    let direction = session.copy(std::ptr::from_mut(&mut word) as u64, address, 8, COPY_DETECT).granted()?;
    equal("direction", direction, COPY_DEVICE_TO_HOST)?;
    equal("bytes", std::hint::black_box(word), 0x1234_5678_9ABC_DEF0)
}

fn a_touch_of_the_cpu_gives_managed_memory_host_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, 2 * MIB2)?;
    poke(address + 64, 0x55AA);
    let mut word = 0u64;
    let direction = session.copy(std::ptr::from_mut(&mut word) as u64, address + 64, 8, COPY_DETECT).granted()?;
    equal("direction", direction, COPY_HOST_TO_HOST)?;
    equal("word", peek(address + 64), 0x55AA)?;
    equal("the rest of the page", peek(address + MIB2 - 8), 0)?;
    // Its neighbour was not touched.
    session.copy(std::ptr::from_mut(&mut word) as u64, address + MIB2, 8, COPY_DETECT).refused(EINVAL)
}

fn what_the_cpu_wrote_moves_to_the_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    poke(address, 0x0123_4567_89AB_CDEF);
    session.prefetch(0, address, MIB2).granted()?;
    let mut word = 0u64;
    session.copy(std::ptr::from_mut(&mut word) as u64, address, 8, COPY_DEVICE_TO_HOST).granted()?;
    equal("word", std::hint::black_box(word), 0x0123_4567_89AB_CDEF)
}

fn the_cpu_reads_what_managed_memory_had_on_the_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    session.prefetch(0, address, MIB2).granted()?;
    session.write(address + 8, &77u64.to_le_bytes()).granted()?;
    equal("word", peek(address + 8), 77)
}

fn managed_memory_that_was_touched_is_freed(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    poke(address, 1);
    session.free(address).granted()?;
    session.alloc(address, MIB2).granted()?;
    equal("new pages", peek(address), 0)?;
    session.free(address).granted()
}

fn managed_memory_is_populated_on_its_home(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let address = managed(&session, MIB2)?;
    // Without a lock it counts as memory of device 0.
    session.advise(1, address, MIB2, Advice::HUGE | Advice::POPULATE).refused(EOPNOTSUPP)?;
    session.advise(1, address, MIB2, DEVICE_MEMORY).granted()
}

fn prefetching_populates(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = allocated(&session, MIB2)?;
    session.prefetch(0, address, MIB2).granted()?;
    round_trip(&session, address)
}

fn prefetching_populated_memory_again_is_granted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    session.prefetch(0, address, MIB2).granted()
}

fn prefetching_for_a_peer_is_granted(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let address = populated(&session, MIB2)?;
    session.prefetch(1, address, MIB2).granted()?;
    // It still belongs to device 0.
    session.advise(0, address, MIB2, DEVICE_MEMORY).refused(EINVAL)
}

/// Host memory of the vendor's library: allocated, pinned and visible to the CPU.
pub(super) fn pinned(session: &Session, size: u64) -> Result<u64, Failure> {
    let address = heap(session, 0, HEAP_PINNED_HOST, SUB_HOST, 2).granted()?;
    session.alloc(address, size).granted()?;
    session.advise(0, address, size, Advice::HOST).granted()?;
    Ok(address)
}

fn pinned_host_memory_is_the_cpus(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = pinned(&session, MIB2)?;
    equal("new memory", peek(address + 4096), 0)?;
    poke(address + 4096, 77);
    equal("word", peek(address + 4096), 77)?;
    session.free(address).granted()
}

fn pinned_host_memory_is_copied_by_the_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = pinned(&session, MIB2)?;
    let far = populated(&session, MIB2)?;
    poke(near, 0xABCD);
    equal("direction", session.copy(far, near, 8, COPY_DETECT).granted()?, COPY_HOST_TO_DEVICE)?;
    equal("back", session.copy(near + 64, far, 8, COPY_DETECT).granted()?, COPY_DEVICE_TO_HOST)?;
    equal("word", peek(near + 64), 0xABCD)
}

fn pinning_wants_a_whole_allocation(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = heap(&session, 0, HEAP_PINNED_HOST, SUB_HOST, 2).granted()?;
    session.alloc(address, 2 * MIB2).granted()?;
    session.advise(0, address, MIB2, Advice::HOST).refused(EINVAL)?;
    session.advise(0, address + MIB2, MIB2, Advice::HOST).refused(EINVAL)?;
    session.advise(0, address + 4096, 4096, Advice::HOST).refused(EINVAL)?;
    session.advise(0, address, 2 * MIB2, Advice::HOST).granted()
}

fn pinning_twice_is_eaddrinuse(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = pinned(&session, MIB2)?;
    session.advise(0, address, MIB2, Advice::HOST).refused(EADDRINUSE)
}

fn pinned_host_memory_is_not_prefetched(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = pinned(&session, MIB2)?;
    session.prefetch(0, address, MIB2).refused(EINVAL)
}

fn pin_huge(host: &Host) -> Result<Answer<()>, Failure> {
    let session = Session::host(host)?;
    let address = heap(&session, 0, HEAP_PINNED_HOST, SUB_HOST, 2).granted()?;
    session.alloc(address, MIB2).granted()?;
    Ok(session.advise(0, address, MIB2, Advice::HOST | Advice::HUGE))
}

fn huge_pages_can_be_pinned(host: &Host) -> Verdict {
    pin_huge(host)?.granted()
}

fn huge_pages_cannot_be_pinned_before_9_0_0(host: &Host) -> Verdict {
    pin_huge(host)?.refused(EADDRNOTAVAIL)
}

/// An allocation in a read-only heap.
fn read_only(session: &Session) -> Result<u64, Failure> {
    let address = heap_of(session, 0, HEAP_HUGE, SUB_READ_ONLY, 3, 4 * GIB).granted()?;
    session.alloc(address, MIB2).granted()?;
    Ok(address)
}

fn a_read_only_heap_wants_read_only_advice(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = read_only(&session)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY).refused(EINVAL)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY | Advice::READ_ONLY).granted()
}

fn read_only_memory_is_not_copied(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = read_only(&session)?;
    session.advise(0, address, MIB2, DEVICE_MEMORY | Advice::READ_ONLY).granted()?;
    session.write(address, b"x").refused(EINVAL)?;
    session.read(address, 1).refused(EINVAL)
}

fn freeing_populated_memory_frees_it_once(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, 2 * MIB2)?;
    session.free(address + MIB2).refused(EINVAL)?;
    session.free(address).granted()?;
    session.free(address).refused(EINVAL)?;
    session.read(address, 1).refused(EINVAL)?;
    session.alloc(address, MIB2).granted()
}

fn an_asynchronous_copy_keeps_populated_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let bytes = [1u8; 64];
    let task = session.copy_async(address, bytes.as_ptr() as u64, 64).granted()?;
    session.free(address).refused(EBUSY)?;
    session.refresh(task).granted()?;
    session.free(address).granted()
}

fn populated_memory_is_no_mapping(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    session.unmap(address).refused(EINVAL)?;
    session.owner(address, MIB2).refused(EINVAL)?;
    session.set_access(address, MIB2, svm::HOST_ID, svm::ACCESS_READ_WRITE).refused(EINVAL)
}

fn populated_memory_is_found_by_its_kind(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let list = [address];
    let check = |sub_kind: u32| {
        let para = svm::CheckMemInfo { addresses: list.as_ptr() as u64, count: 1, heap_subtype_mask: 1 << sub_kind };
        session.svm.call(Op::CheckMemInfo, 0, &para)
    };
    check(SUB_DEVICE).granted()?;
    check(SUB_SVM).refused(EFAULT)
}

/// Bytes of huge pages that device 0 has left.
fn left(session: &Session) -> Result<u64, Failure> {
    let para = svm::MemUsedInfo { memory: 2, ..Default::default() };
    Ok(session.svm.ask(Op::QueryMemUsedInfo, 0, &para).granted()?.huge_free_size)
}

fn disabling_a_heap_frees_its_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, 64 * MIB2)?;
    let before = left(&session)?;
    let index = ((address - svm::SVM_START) / GIB) as u32;
    session.disable(index, GIB).granted()?;
    crate::session::eventually("the pages are free", || left(&session).is_ok_and(|now| now >= before + 32 * MIB2))?;
    session.read(address, 1).refused(EINVAL)
}

fn closing_the_device_leaves_the_addresses(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    session.close_device(0).granted()?;
    session.alloc(address, MIB2).refused(EBUSY)?;
    session.free(address).granted()?;
    session.free(address).refused(EINVAL)
}

fn populating_more_than_the_device_has_is_enomem(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let size = left(&session)?.next_multiple_of(GIB);
    let (first, second) = (
        heap_of(&session, 0, HEAP_HUGE, SUB_DEVICE, 0, size).granted()?,
        heap_of(&session, 0, HEAP_HUGE, SUB_DEVICE, 1, size).granted()?,
    );
    session.alloc(first, size).granted()?;
    session.alloc(second, size).granted()?;
    // The device may keep some of its memory to itself.
    let _ = session.advise(0, first, size, DEVICE_MEMORY);
    session.advise(0, second, size, DEVICE_MEMORY).refused(ENOMEM)?;
    session.read(second, 1).refused(EINVAL)?;
    session.free(first).granted()?;
    session.free(second).granted()
}
