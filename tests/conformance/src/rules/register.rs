//! Registrations: addresses for tasks of the device, and host memory for its engines.

use super::plain_memory::{managed, pinned, populated};
use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, page_size};
use crate::rule::{Answer, Judge, Rule, Verdict, equal, rule};
use crate::session::{MIB2, Session, peek, poke};
use ascend_ioctl::svm::{self, Op};
use libc::{EADDRNOTAVAIL, EBUSY, EFAULT, EINVAL, ENOENT, EOPNOTSUPP, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(device_memory_is_translated, Inferred).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(host_memory_is_not_translated, Source).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(memory_without_pages_is_not_translated, Source).decided_by("devmm_ioctl_translate, devmm_proc_info.c"),
    rule!(host_memory_is_registered_for_transfers_once, Source)
        .decided_by("devmm_insert_register_dma_node, devmm_register_dma.c"),
    rule!(an_empty_range_is_not_registered, Source).decided_by("devmm_register_dma_para_check, devmm_register_dma.c"),
    rule!(unmapped_memory_is_not_registered, Source).decided_by("devmm_get_host_addr_pa_list, devmm_register_dma.c"),
    rule!(a_registration_ends_by_its_first_address, Source)
        .decided_by("devmm_ioctl_unregister_dma, devmm_register_dma.c"),
    rule!(a_registration_ends_with_its_device, Source)
        .decided_by("devmm_destory_register_dma_mng_by_devid, devmm_register_dma.c"),
    rule!(host_memory_is_mapped_for_a_device_by_whole_pages, Source)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(there_are_seven_kinds_of_remote_mappings, Source)
        .decided_by("devmm_ioctl_mem_remote_map, svm_master_remote_map.c"),
    rule!(ordinary_memory_is_not_mapped_as_pinned, Source)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(remote_mappings_are_for_the_first_process, Source)
        .decided_by("devmm_local_host_map_para_check, svm_master_remote_map.c"),
    rule!(remote_unmapping_wants_a_mapping, Source).decided_by("devmm_unmap_local_mem, svm_master_remote_map.c"),
    rule!(pinned_memory_that_a_device_maps_is_not_freed, Inferred)
        .decided_by("devmm_svm_mem_remote_map, svm_master_remote_map.c"),
    rule!(the_cpu_sees_device_memory_that_is_mapped_for_it, Inferred)
        .decided_by("devmm_map_agent_svm_mem_to_master, svm_master_remote_map.c"),
    rule!(device_memory_is_mapped_for_the_cpu_once, Inferred)
        .decided_by("devmm_check_and_set_remote_map_state, svm_master_remote_map.c"),
    rule!(parts_of_device_memory_are_mapped_for_the_cpu, Source)
        .decided_by("devmm_get_remote_map_size_from_va, svm_master_remote_map.c"),
    rule!(device_memory_that_the_cpu_sees_is_not_freed, Inferred)
        .decided_by("devmm_mem_remote_map_of_svm_mem, svm_master_remote_map.c"),
    rule!(device_memory_is_mapped_as_such_and_by_whole_pages, Source)
        .decided_by("devmm_svm_mem_map_para_check, svm_master_remote_map.c"),
    rule!(memory_without_pages_is_not_mapped_for_others, Source)
        .decided_by("devmm_get_remote_mem_type, svm_master_remote_map.c"),
    rule!(host_memory_of_a_handle_is_not_mapped_for_a_device, Source)
        .decided_by("devmm_check_and_set_remote_map_state, svm_master_remote_map.c"),
    rule!(mapping_for_a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("devmm_shm_send_info_to_dev, svm_master_remote_map.c"),
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
    let para =
        svm::RemoteMap { src_va: address, size, map_type: kind, proc_type: process, access: 3, ..Default::default() };
    session.svm.call(Op::MemRemoteMap, 0, &para).map(drop)
}

fn unmap(session: &Session, address: u64, kind: u32) -> Answer<()> {
    let para = svm::RemoteUnmap { src_va: address, map_type: kind, ..Default::default() };
    session.svm.call(Op::MemRemoteUnmap, 0, &para).map(drop)
}

const HOST_MEMORY: u32 = 0;
const PINNED_MEMORY: u32 = 1;
const DEVICE_MEMORY: u32 = 2;

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

fn there_are_seven_kinds_of_remote_mappings(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let near = anonymous(0, page_size(), libc::PROT_READ | libc::PROT_WRITE).granted()?;
    map(&session, near, page_size(), 7, 0).refused(EINVAL)?;
    unmap(&session, near, 7).refused(EINVAL)
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
        Err(EOPNOTSUPP) => return Err(crate::rule::Failure::skipped("the host maps no memory for its devices")),
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
        Err(EOPNOTSUPP | EINVAL) => {
            Err(crate::rule::Failure::skipped("the memory is not behind a window of the device"))
        }
        answer => answer.granted().map(|()| address),
    }
}

fn the_cpu_sees_device_memory_that_is_mapped_for_it(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = visible(&session)?;
    session.write(address, &7u64.to_le_bytes()).granted()?;
    equal("what the CPU reads", peek(address), 7)?;
    poke(address + 8, 9);
    equal("what the device has", session.read(address + 8, 8).granted()?, 9u64.to_le_bytes().to_vec())?;
    unmap(&session, address, DEVICE_MEMORY).granted()
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
            return Err(crate::rule::Failure::skipped("the memory is not behind a window of the device"));
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
    match map(&session, near, page_size(), HOST_MEMORY, 0) {
        Err(EOPNOTSUPP) => Err(crate::rule::Failure::skipped("the host maps no memory for its devices")),
        answer => answer.refused(ESRCH),
    }
}
