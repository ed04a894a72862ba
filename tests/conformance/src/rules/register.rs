//! Registrations: addresses for tasks of the device, and host memory for its engines.

use super::plain_memory::{managed, pinned, populated};
use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, page_size};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{MIB2, Session, peek, poke, poke_by_kernel};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Op};
use libc::{EADDRNOTAVAIL, EBUSY, EFAULT, EINVAL, ENOENT, EOPNOTSUPP, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(device_memory_is_translated, Inferred).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(host_memory_is_not_translated, Ran).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(memory_without_pages_is_not_translated, Ran).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(host_memory_is_registered_for_transfers_once, Ran)
        .decided_by("devmm_insert_register_dma_node, devmm_register_dma.c"),
    rule!(an_empty_range_is_not_registered, Ran).decided_by("devmm_register_dma_para_check, devmm_register_dma.c"),
    rule!(unmapped_memory_is_not_registered, Ran).decided_by("devmm_get_host_addr_pa_list, devmm_register_dma.c"),
    rule!(a_registration_ends_by_its_first_address, Ran).decided_by("devmm_ioctl_unregister_dma, devmm_register_dma.c"),
    rule!(a_registration_ends_with_its_device, Ran)
        .decided_by("devmm_destory_register_dma_mng_by_devid, devmm_register_dma.c"),
    rule!(host_memory_is_mapped_for_a_device_by_whole_pages, Ran)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(remote_mappings_have_the_kinds_of_their_generation, Ran)
        .decided_by("devmm_ioctl_mem_remote_map, svm_master_remote_map.c"),
    rule!(ordinary_memory_is_mapped_in_one_of_two_ways, Source)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(memory_that_is_mapped_through_the_link_is_mapped_once, Inferred)
        .decided_by("devmm_mem_remote_map_of_local_mem, svm_master_remote_map.c"),
    rule!(pinned_memory_is_mapped_through_the_link, Inferred)
        .decided_by("devmm_is_local_remote_map, svm_master_remote_map.c"),
    rule!(ordinary_memory_is_not_mapped_as_pinned, Ran)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(remote_mappings_are_for_the_first_process, Ran)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(remote_unmapping_wants_a_mapping, Ran).decided_by("devmm_unmap_local_mem, svm_master_remote_map.c"),
    rule!(pinned_memory_that_a_device_maps_is_not_freed, Inferred)
        .decided_by("devmm_svm_mem_remote_map, svm_master_remote_map.c"),
    rule!(the_cpu_sees_device_memory_that_is_mapped_for_it, Inferred)
        .decided_by("devmm_map_agent_svm_mem_to_master, svm_master_remote_map.c"),
    rule!(device_memory_is_mapped_for_the_cpu_once, Inferred)
        .decided_by("devmm_check_and_set_remote_map_state, svm_master_remote_map.c"),
    rule!(parts_of_device_memory_are_mapped_for_the_cpu, Ran)
        .decided_by("devmm_get_remote_map_size_from_va, svm_master_remote_map.c"),
    rule!(device_memory_that_the_cpu_sees_is_not_freed, Inferred)
        .decided_by("devmm_mem_remote_map_of_svm_mem, svm_master_remote_map.c"),
    rule!(device_memory_is_mapped_as_such_and_by_whole_pages, Ran)
        .decided_by("devmm_svm_mem_map_para_check, svm_master_remote_map.c"),
    rule!(memory_without_pages_is_not_mapped_for_others, Ran)
        .decided_by("devmm_get_remote_mem_type, svm_master_remote_map.c"),
    rule!(host_memory_of_a_handle_is_not_mapped_for_a_device, Ran)
        .decided_by("devmm_check_and_set_remote_map_state, svm_master_remote_map.c"),
    rule!(managed_memory_on_the_host_is_not_mapped_for_others, Ran)
        .decided_by("devmm_get_remote_mem_type, svm_master_remote_map.c"),
    rule!(pinned_memory_is_mapped_for_one_device, Inferred)
        .decided_by("devmm_check_and_set_remote_map_state, svm_master_remote_map.c"),
    rule!(mapping_for_a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("devmm_shm_send_info_to_dev, svm_master_remote_map.c"),
    rule!(the_cpu_sees_memory_of_a_handle_that_is_mapped_for_it, Inferred)
        .decided_by("devmm_map_agent_svm_mem_to_master, svm_master_remote_map.c"),
    rule!(the_cpu_writes_device_memory_if_the_access_allows_it, Source)
        .decided_by("devmm_is_read_only_mem, svm_master_remote_map.c"),
    rule!(memory_of_a_handle_that_the_cpu_sees_is_not_unmapped, Ran)
        .decided_by("devmm_vmma_exclusive_set, svm_vmma_mng.c"),
    rule!(memory_of_a_handle_is_mapped_for_the_cpu_by_whole_pages, Ran)
        .decided_by("devmm_mem_remote_map_of_svm_mem, svm_master_remote_map.c"),
    rule!(memory_of_a_handle_is_mapped_for_the_cpu_as_such, Ran)
        .decided_by("devmm_dev_svm_map_para_check, svm_master_remote_map.c"),
    rule!(a_remote_mapping_holds_each_mapping_that_it_covers, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    // The driver forgets to unmap here, and in the next three: what happens to the mapping is not
    // known.
    rule!(a_remote_mapping_from_inside_a_mapping_holds_that_one_only, Ran)
        .decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c")
        .needs(&[Need::Leak]),
    rule!(a_remote_mapping_ends_with_the_reservation_it_begins_in, Ran)
        .decided_by("devmm_get_remote_map_size_from_va, svm_master_remote_map.c")
        .needs(&[Need::Leak]),
    rule!(a_remote_mapping_outlives_its_closed_device, Ran)
        .decided_by("devmm_destroy_all_heap_vmmas_by_devid, svm_master_mem_map.c")
        .needs(&[Need::Leak]),
    rule!(a_remote_mapping_ends_with_its_heap, Ran)
        .decided_by("devmm_destroy_reserve_heap_mem, svm_heap_mng.c")
        .needs(&[Need::Leak]),
];

fn translate(session: &Session, address: u64) -> Answer<u64> {
    let para = svm::Translate { address, ..Default::default() };
    session.svm.ask(Op::Translate, 0, &para).map(|answer| answer.translated)
}

fn register(session: &Session, address: u64, size: u64) -> Answer<()> {
    session.svm.call(Op::RegisterDma, 0, &svm::RegisterDma { address, size }).map(drop)
}

fn unregister(session: &Session, address: u64) -> Answer<()> {
    session.svm.call(Op::UnregisterDma, 0, &svm::UnregisterDma { address }).map(drop)
}

fn map(session: &Session, address: u64, size: u64, kind: u32, process: u32) -> Answer<()> {
    let access = svm::ACCESS_READ_WRITE;
    let para =
        svm::RemoteMap { src_va: address, size, map_type: kind, proc_type: process, access, ..Default::default() };
    session.svm.call(Op::MemRemoteMap, 0, &para).map(drop)
}

fn unmap(session: &Session, address: u64, kind: u32) -> Answer<()> {
    let para = svm::RemoteUnmap { src_va: address, map_type: kind, ..Default::default() };
    session.svm.call(Op::MemRemoteUnmap, 0, &para).map(drop)
}

const HOST_MEMORY: u32 = 0;
const PINNED_MEMORY: u32 = 1;
const DEVICE_MEMORY: u32 = 2;
/// Ordinary or pinned memory that the device accesses through the link.
const THROUGH_LINK: u32 = 3;
/// Memory of another process on the device.
const FOREIGN_MEMORY: u32 = 4;

fn device_memory_is_translated(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    translate(&session, address + 64).granted()?;
    session.free(address).granted()?;
    let (_, mapped) = session.device_mapping(0, MIB2)?;
    translate(&session, mapped).granted()?;
    session.unmap(mapped).granted().map(drop)
}

fn host_memory_is_not_translated(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let word = 0u64;
    translate(&session, std::ptr::from_ref(&word) as u64).refused(EINVAL)?;
    let (_, mapped) = session.host_mapping(MIB2)?;
    translate(&session, mapped).refused(EINVAL)
}

fn memory_without_pages_is_not_translated(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    translate(&session, address).refused(EINVAL)?;
    let reserved = session.reserve(MIB2)?;
    // The step before the command looks for a mapping.
    translate(&session, reserved).refused(EINVAL)
}

fn host_memory_is_registered_for_transfers_once(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, 4 * page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    register(&session, near, 2 * page_size()).granted()?;
    register(&session, near, 2 * page_size()).refused(EINVAL)?;
    register(&session, near + page_size(), 2 * page_size()).refused(EINVAL)?;
    register(&session, near + 2 * page_size(), page_size()).granted()
}

fn an_empty_range_is_not_registered(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let word = 0u64;
    register(&session, std::ptr::from_ref(&word) as u64, 0).refused(EINVAL)?;
    register(&session, 0, 4096).refused(EINVAL)
}

fn unmapped_memory_is_not_registered(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    register(&session, NOWHERE, 64).refused(EFAULT)
}

fn a_registration_ends_by_its_first_address(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, 2 * page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    register(&session, near, 2 * page_size()).granted()?;
    unregister(&session, near + page_size()).refused(EFAULT)?;
    unregister(&session, near).granted()?;
    unregister(&session, near).refused(EFAULT)
}

fn a_registration_ends_with_its_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    register(&session, near, page_size()).granted()?;
    session.close_device(0).granted()?;
    unregister(&session, near).refused(EFAULT)
}

fn host_memory_is_mapped_for_a_device_by_whole_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, 2 * page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    map(&session, near + 8, 8, HOST_MEMORY, 0).refused(EINVAL)?;
    map(&session, near, 0, HOST_MEMORY, 0).refused(EINVAL)
}

fn remote_mappings_have_the_kinds_of_their_generation(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    // 9.0.0 added the host's I/O memory.
    let kinds = if host.generation < Generation::V9_0_0 { 6 } else { 7 };
    map(&session, near, page_size(), kinds, 0).refused(EINVAL)?;
    unmap(&session, near, kinds).refused(EINVAL)?;
    unmap(&session, near, kinds - 1).refused(ENOENT)
}

/// Ordinary memory.
fn pages(count: u64) -> Result<u64, Failure> {
    anonymous(0, count * page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()
}

fn ordinary_memory_is_mapped_in_one_of_two_ways(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = pages(2)?;
    let through = map(&session, near, page_size(), THROUGH_LINK, 0);
    let plain = map(&session, near + page_size(), page_size(), HOST_MEMORY, 0);
    match (&through, &plain) {
        (Err(EOPNOTSUPP), Err(EOPNOTSUPP)) => Err(Failure::skipped("the host maps no memory for its devices")),
        (Err(EOPNOTSUPP), _) => plain.granted().map(drop),
        _ => {
            through.granted()?;
            plain.refused(EOPNOTSUPP)
        }
    }
}

/// A session of which the device maps memory through the link.
fn through_link(host: &Host) -> Result<(Session, u64), Failure> {
    let (session, near) = (Session::start(host)?, pages(4)?);
    match map(&session, near, page_size(), THROUGH_LINK, 0) {
        Err(EOPNOTSUPP) => Err(Failure::skipped("the device maps no memory through the link")),
        answer => answer.granted().map(|_| (session, near)),
    }
}

fn memory_that_is_mapped_through_the_link_is_mapped_once(host: &Host) -> Verdict {
    let (session, near) = through_link(host)?;
    map(&session, near, page_size(), THROUGH_LINK, 0).refused(EINVAL)?;
    // Sizes are of whole pages.
    map(&session, near + page_size(), 1, THROUGH_LINK, 0).granted()?;
    map(&session, near + 8, page_size(), THROUGH_LINK, 0).refused(EINVAL)?;
    map(&session, near + 2 * page_size(), page_size(), THROUGH_LINK, 1).refused(EOPNOTSUPP)?;
    for address in [near, near + page_size()] {
        unmap(&session, address, HOST_MEMORY).granted()?;
        unmap(&session, address, THROUGH_LINK).refused(ENOENT)?;
    }
    map(&session, near, 2 * page_size(), THROUGH_LINK, 0).granted()?;
    unmap(&session, near, THROUGH_LINK).granted().map(drop)
}

fn pinned_memory_is_mapped_through_the_link(host: &Host) -> Verdict {
    let (session, _) = through_link(host)?;
    let near = pinned(&session, MIB2)?;
    map(&session, near, MIB2, THROUGH_LINK, 0).granted()?;
    session.free(near).refused(EBUSY)?;
    unmap(&session, near, THROUGH_LINK).granted()?;
    session.free(near).granted()
}

fn ordinary_memory_is_not_mapped_as_pinned(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    map(&session, near, page_size(), PINNED_MEMORY, 0).refused(EINVAL)
}

fn remote_mappings_are_for_the_first_process(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    map(&session, near, page_size(), HOST_MEMORY, 1).refused(EOPNOTSUPP)
}

fn remote_unmapping_wants_a_mapping(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    unmap(&session, near, HOST_MEMORY).refused(ENOENT)?;
    let reserved = session.reserve(MIB2)?;
    unmap(&session, reserved, PINNED_MEMORY).refused(EADDRNOTAVAIL)
}

fn pinned_memory_that_a_device_maps_is_not_freed(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = pinned(&session, MIB2)?;
    match map(&session, near, MIB2, PINNED_MEMORY, 0) {
        // With an IOMMU, or in a virtual machine.
        Err(EOPNOTSUPP) => return Err(Failure::skipped("the host maps no memory for its devices")),
        answer => answer.granted()?,
    }
    session.free(near).refused(EBUSY)?;
    unmap(&session, near, PINNED_MEMORY).granted()?;
    session.free(near).granted()
}

/// Device memory that the CPU sees, or a skip where the device has no such window.
fn visible(session: &Session) -> Result<u64, crate::rule::Failure> {
    let address = populated(session, MIB2)?;
    match map(session, address, MIB2, DEVICE_MEMORY, 0) {
        Err(EOPNOTSUPP | EINVAL) => Err(Failure::skipped("the memory is not behind a window of the device")),
        answer => answer.granted().map(|()| address),
    }
}

fn the_cpu_sees_device_memory_that_is_mapped_for_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = visible(&session)?;
    session.write(address, &7u64.to_le_bytes()).granted()?;
    equal("what the CPU reads", peek(address), 7)?;
    if is_writable(host) {
        poke(address + 8, 9);
        equal("what the device has", session.read(address + 8, 8).granted()?, 9u64.to_le_bytes().to_vec())?;
    }
    unmap(&session, address, DEVICE_MEMORY).granted()
}

/// Whether the CPU may write through a window of [`map`]: see
/// [`the_cpu_writes_device_memory_if_the_access_allows_it`].
fn is_writable(host: &Host) -> bool {
    host.generation != Generation::V9_0_0
}

fn device_memory_is_mapped_for_the_cpu_once(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = visible(&session)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    unmap(&session, address, DEVICE_MEMORY).granted()?;
    unmap(&session, address, DEVICE_MEMORY).refused(EINVAL)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 0).granted()
}

fn parts_of_device_memory_are_mapped_for_the_cpu(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, 4 * MIB2)?;
    let second = address + MIB2;
    match map(&session, second, MIB2, DEVICE_MEMORY, 0) {
        Err(EOPNOTSUPP | EINVAL) => {
            return Err(Failure::skipped("the memory is not behind a window of the device"));
        }
        answer => answer.granted()?,
    }
    map(&session, address, 2 * MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, second + MIB2, 2 * MIB2, DEVICE_MEMORY, 0).granted()?;
    for part in [second, second + MIB2, second + 2 * MIB2] {
        session.write(part, &7u64.to_le_bytes()).granted()?;
        equal("what the CPU reads", peek(part), 7)?;
    }
    unmap(&session, second, DEVICE_MEMORY).granted()?;
    equal("what the CPU reads of the other part", peek(second + MIB2), 7)?;
    session.free(address).refused(EBUSY)?;
    unmap(&session, second + MIB2, DEVICE_MEMORY).granted()?;
    session.free(address).granted()
}

fn device_memory_that_the_cpu_sees_is_not_freed(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = visible(&session)?;
    session.free(address).refused(EBUSY)?;
    unmap(&session, address, DEVICE_MEMORY).granted()?;
    session.free(address).granted()
}

fn device_memory_is_mapped_as_such_and_by_whole_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    map(&session, address, MIB2, HOST_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, MIB2, PINNED_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, 0, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 1).refused(EOPNOTSUPP)?;
    unmap(&session, address, DEVICE_MEMORY).refused(EINVAL)
}

fn memory_without_pages_is_not_mapped_for_others(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 0).refused(EOPNOTSUPP)
}

fn host_memory_of_a_handle_is_not_mapped_for_a_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, 0, PINNED_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, MIB2, PINNED_MEMORY, 0).refused(EOPNOTSUPP)?;
    session.unmap(address).granted().map(drop)
}

fn mapping_for_a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    let through = map(&session, near, page_size(), THROUGH_LINK, 0);
    let plain = map(&session, near, page_size(), HOST_MEMORY, 0);
    match if through == Err(EOPNOTSUPP) { plain } else { through } {
        Err(EOPNOTSUPP) => Err(Failure::skipped("the host maps no memory for its devices")),
        answer => answer.refused(ESRCH),
    }
}

fn managed_memory_on_the_host_is_not_mapped_for_others(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    poke(address, 1);
    for kind in [PINNED_MEMORY, DEVICE_MEMORY] {
        map(&session, address, MIB2, kind, 0).refused(EOPNOTSUPP)?;
        unmap(&session, address, kind).refused(EOPNOTSUPP)?;
    }
    session.free(address).granted()
}

fn pinned_memory_is_mapped_for_one_device(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let near = pinned(&session, MIB2)?;
    match map(&session, near, MIB2, PINNED_MEMORY, 0) {
        Err(EOPNOTSUPP) => return Err(Failure::skipped("the host maps no memory for its devices")),
        answer => answer.granted()?,
    }
    let para = svm::RemoteMap { src_va: near, size: MIB2, map_type: PINNED_MEMORY, access: 3, ..Default::default() };
    session.svm.call(Op::MemRemoteMap, 1, &para).map(drop).refused(EINVAL)?;
    unmap(&session, near, PINNED_MEMORY).granted()?;
    session.free(near).granted()
}

/// Maps memory of handles for the CPU, or skips the rule where the device has no such window.
fn show(session: &Session, address: u64, size: u64) -> Verdict {
    match map(session, address, size, DEVICE_MEMORY, 0) {
        Err(EOPNOTSUPP | EINVAL) => Err(Failure::skipped("the memory is not behind a window of the device")),
        answer => answer.granted(),
    }
}

/// Mappings of two pages each, side by side in one reservation.
fn neighbours(session: &Session) -> Result<[u64; 2], crate::rule::Failure> {
    let first = session.reserve(4 * MIB2)?;
    let both = [first, first + 2 * MIB2];
    for address in both {
        let handle = session.device_huge(0, 2 * MIB2).granted()?;
        session.map(&handle, address, 2 * MIB2).granted()?;
    }
    Ok(both)
}

fn the_cpu_sees_memory_of_a_handle_that_is_mapped_for_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let [address, other] = neighbours(&session)?;
    show(&session, address, 4 * MIB2)?;
    for page in [address, address + MIB2, other, other + MIB2] {
        session.write(page, &page.to_le_bytes()).granted()?;
        equal("what the CPU reads", peek(page), page)?;
        match is_writable(host) {
            true => poke(page + 8, 9),
            false => session.write(page + 8, &9u64.to_le_bytes()).granted()?,
        }
        equal("what the device has", session.read(page + 8, 8).granted()?, 9u64.to_le_bytes().to_vec())?;
    }
    unmap(&session, address, DEVICE_MEMORY).granted()?;
    equal("what is left", session.read(other + 8, 8).granted()?, 9u64.to_le_bytes().to_vec())
}

/// The mapping itself says nothing: in `/proc/self/maps` the segment stays writable.
fn the_cpu_writes_device_memory_if_the_access_allows_it(host: &Host) -> Verdict {
    /// `MEM_REGISTER_READ_ONLY`.
    const READ_ONLY: u32 = 1 << 28;
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    for access in [0, svm::ACCESS_READ_WRITE, READ_ONLY] {
        let para =
            svm::RemoteMap { src_va: address, size: MIB2, map_type: DEVICE_MEMORY, access, ..Default::default() };
        match session.svm.call(Op::MemRemoteMap, 0, &para).map(drop) {
            Err(EOPNOTSUPP | EINVAL) => {
                return Err(Failure::skipped("the memory is not behind a window of the device"));
            }
            answer => answer.granted()?,
        }
        let read_only = match host.generation {
            // Its command has no access.
            Generation::V8_5_0 => false,
            Generation::V9_0_0 => access != 0,
            _ => access & READ_ONLY != 0,
        };
        session.write(address, &7u64.to_le_bytes()).granted()?;
        if !read_only {
            poke_by_kernel(address, 9).granted()?;
        } else if host.own_files {
            // An emulation on ordinary files can only find such a write later.
            poke_by_kernel(address, 9).refused(EFAULT)?;
        }
        let expected: u64 = if read_only { 7 } else { 9 };
        equal("what the device has", session.read(address, 8).granted()?, expected.to_le_bytes().to_vec())?;
        unmap(&session, address, DEVICE_MEMORY).granted()?;
    }
    session.unmap(address).granted().map(drop)
}

fn memory_of_a_handle_that_the_cpu_sees_is_not_unmapped(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, 2 * MIB2)?;
    show(&session, address + MIB2, MIB2)?;
    map(&session, address, 2 * MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, address + MIB2, MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    session.unmap(address).map(drop).refused(EBUSY)?;
    session.free(address).refused(EBUSY)?;
    unmap(&session, address, DEVICE_MEMORY).refused(EINVAL)?;
    unmap(&session, address + MIB2, DEVICE_MEMORY).granted()?;
    unmap(&session, address + MIB2, DEVICE_MEMORY).refused(EINVAL)?;
    session.unmap(address).granted()?;
    session.free(address).granted()?;
    session.release(&handle).granted().map(drop)
}

fn memory_of_a_handle_is_mapped_for_the_cpu_by_whole_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, 2 * MIB2)?;
    map(&session, address + page_size(), MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, 0, DEVICE_MEMORY, 0).refused(EINVAL)?;
    // Beyond what is mapped, and beyond the heap.
    map(&session, address, 3 * MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, 1 << 50, DEVICE_MEMORY, 0).refused(EINVAL)?;
    show(&session, address, MIB2)?;
    unmap(&session, address, DEVICE_MEMORY).granted()?;
    let para = svm::RemoteMap { src_va: address, size: 1, map_type: DEVICE_MEMORY, ..Default::default() };
    let answer = session.svm.ask(Op::MemRemoteMap, 0, &para).granted()?;
    equal("address and size", (answer.dst_va, answer.size), (address, MIB2))?;
    unmap(&session, address, DEVICE_MEMORY).granted()
}

fn memory_of_a_handle_is_mapped_for_the_cpu_as_such(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    map(&session, address, MIB2, HOST_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, MIB2, PINNED_MEMORY, 0).refused(EINVAL)?;
    map(&session, address, MIB2, FOREIGN_MEMORY, 0).refused(EOPNOTSUPP)?;
    map(&session, address, MIB2, DEVICE_MEMORY, 1).refused(EOPNOTSUPP)?;
    unmap(&session, address, DEVICE_MEMORY).refused(EINVAL)?;
    unmap(&session, address, FOREIGN_MEMORY).refused(ENOENT)?;
    session.unmap(address).granted().map(drop)
}

fn a_remote_mapping_holds_each_mapping_that_it_covers(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let both = neighbours(&session)?;
    show(&session, both[0], 3 * MIB2)?;
    for address in both {
        session.unmap(address).map(drop).refused(EBUSY)?;
    }
    unmap(&session, both[0], DEVICE_MEMORY).granted()?;
    for address in both {
        session.unmap(address).granted()?;
    }
    session.free(both[0]).granted()
}

fn a_remote_mapping_from_inside_a_mapping_holds_that_one_only(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let [address, other] = neighbours(&session)?;
    show(&session, address + MIB2, 2 * MIB2)?;
    session.unmap(address).map(drop).refused(EBUSY)?;
    // The driver counts whole mappings from the first address on, and stops too early.
    session.unmap(other).granted()?;
    unmap(&session, address + MIB2, DEVICE_MEMORY).granted()?;
    session.unmap(address).granted()?;
    session.free(address).granted()
}

fn a_remote_mapping_ends_with_the_reservation_it_begins_in(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let index = session.heap()?;
    let first = crate::session::heap_address(index);
    let both = [first, first + MIB2];
    for address in both {
        session.alloc(address, MIB2).granted()?;
        let handle = session.device_huge(0, MIB2).granted()?;
        session.map(&handle, address, MIB2).granted()?;
    }
    show(&session, first, 2 * MIB2)?;
    unmap(&session, first, DEVICE_MEMORY).granted()?;
    session.unmap(first).granted()?;
    session.free(first).granted()?;
    // The rest cannot be unmapped any more.
    session.unmap(both[1]).map(drop).refused(EBUSY)?;
    map(&session, both[1], MIB2, DEVICE_MEMORY, 0).refused(EINVAL)?;
    unmap(&session, both[1], DEVICE_MEMORY).refused(EINVAL)
}

fn a_remote_mapping_outlives_its_closed_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    show(&session, address, MIB2)?;
    session.close_device(0).granted()?;
    unmap(&session, address, DEVICE_MEMORY).refused(EADDRNOTAVAIL)?;
    session.free(address).refused(EBUSY)
}

fn a_remote_mapping_ends_with_its_heap(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let index = session.heap()?;
    let address = crate::session::heap_address(index);
    let handle = session.device_huge(0, MIB2).granted()?;
    session.alloc(address, MIB2).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    show(&session, address, MIB2)?;
    session.disable(index, svm::HEAP_UNIT).granted()?;
    unmap(&session, address, DEVICE_MEMORY).refused(EINVAL)
}
