//! Synchronous copies: directions, sizes, ranges, imported memory.

use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, page_size};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{GIB, Handle, MIB2, Session, heap_address, peek, poke};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{
    self, COPY_DETECT, COPY_DEVICE_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_HOST_TO_DEVICE, COPY_HOST_TO_HOST, Memcpy, Op,
};
use libc::{EBUSY, EFAULT, EINVAL, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(copies_find_out_their_direction, Ran).decided_by("devmm_find_memcpy_dir, svm_master_memcpy.c"),
    rule!(copies_in_the_wrong_direction_are_einval, Ran).decided_by("devmm_check_va_direction, svm_master_memcpy.c"),
    rule!(copies_of_an_unknown_direction_find_out_theirs, Source)
        .decided_by("devmm_memcpy_pre_process, svm_master_memcpy.c"),
    rule!(copies_between_host_addresses_are_left_to_the_caller, Ran)
        .decided_by("devmm_normal_memcpy_proc, svm_master_memcpy.c"),
    rule!(copies_between_host_addresses_are_not_checked, Ran)
        .decided_by("devmm_normal_memcpy_proc, svm_master_memcpy.c"),
    rule!(copies_of_nothing_are_einval, Source).decided_by("devmm_memcpy_para_check, svm_master_memcpy.c"),
    rule!(copies_need_no_alignment, Source).decided_by("devmm_ioctl_memcpy_process_frame, svm_master_memcpy.c"),
    rule!(copies_within_a_device_are_done, Inferred).decided_by("devmm_memcpy_d2d_process, svm_master_memcpy.c"),
    rule!(copies_between_devices_are_done, Inferred)
        .decided_by("devmm_ioctl_p2p_memcpy_process, svm_master_memcpy.c")
        .needs(&[Need::TwoDevices]),
    rule!(copies_from_mapped_host_memory_are_done, Source)
        .decided_by("devmm_ioctl_memcpy_process_frame, svm_master_memcpy.c"),
    rule!(copies_to_where_nothing_is_mapped_are_einval, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(copies_to_where_nothing_is_reserved_are_einval, Source)
        .decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(copies_without_heap_are_einval, Source).decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c"),
    rule!(copies_that_run_out_of_a_mapping_are_einval, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(copies_that_run_out_of_a_heap_are_einval, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(copies_over_neighbouring_mappings_are_done, Ran).decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c"),
    rule!(copies_over_host_and_device_memory_are_einval, Ran)
        .decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c"),
    rule!(copies_over_two_devices_are_einval, Ran)
        .decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c")
        .needs(&[Need::TwoDevices]),
    rule!(copies_from_unmapped_memory_are_efault, Source).decided_by("devmm_pin_user_pages_fast, devmm_common.c"),
    rule!(copies_to_read_only_memory_are_efault, Source).decided_by("devmm_pin_user_pages_fast, devmm_common.c"),
    rule!(copies_of_device_local_addresses_only_go_to_the_host, Ran)
        .decided_by("devmm_ioctl_memcpy_proc, svm_master_memcpy.c"),
    rule!(copies_from_mapped_memory_ignore_the_device_local_flag, Ran)
        .decided_by("_devmm_get_memcpy_mem_attrs, svm_master_memcpy.c"),
    rule!(copies_with_unallocated_addresses_of_the_host_pin_segment_are_einval, Ran)
        .decided_by("devmm_set_page_ref_before_ioctl, devmm_proc_info.c")
        .since(Generation::V9_0_0),
    rule!(copies_from_unallocated_addresses_of_the_pool_segment_are_einval, Ran)
        .decided_by("devmm_get_soma_mem_attrs, devmm_proc_info.c")
        .since(Generation::V26_1),
    rule!(copies_with_unallocated_addresses_of_the_managed_segment_are_refused, Ran)
        .decided_by("_devmm_get_memcpy_mem_attrs, svm_master_memcpy.c")
        .since(Generation::V26_1),
    rule!(copies_of_host_memory_imported_on_a_device_are_einval, Ran)
        .decided_by("devmm_get_dma_copy_devid, devmm_proc_mem_copy.c")
        .needs(&[Need::Leak]),
    rule!(asynchronous_copies_of_host_memory_imported_on_a_device_are_einval, Ran)
        .decided_by("devmm_get_dma_copy_devid, devmm_proc_mem_copy.c")
        .needs(&[Need::Leak]),
    rule!(copies_between_device_memory_and_imported_host_memory_are_eopnotsupp, Ran)
        .decided_by("devmm_ioctl_p2p_memcpy_process, svm_master_memcpy.c"),
    rule!(copies_between_mapped_and_imported_host_memory_are_einval, Ran)
        .decided_by("devmm_get_dma_copy_devid, devmm_proc_mem_copy.c")
        .needs(&[Need::Leak]),
    rule!(host_memory_imported_on_a_device_is_mapped_and_released, Ran)
        .decided_by("devmm_agent_mem_import, svm_master_mem_share.c"),
    rule!(copies_within_a_device_of_imported_memory_are_eopnotsupp, Ran)
        .decided_by("devmm_ioctl_p2p_memcpy_process, svm_master_memcpy.c"),
    rule!(a_copy_keeps_no_reference, Ran).decided_by("devmm_clear_page_ref_after_ioctl, devmm_proc_info.c"),
    rule!(the_tail_of_a_copy_within_the_host_goes_unchecked, Ran).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(copies_over_imported_and_local_memory_are_einval, Ran)
        .decided_by("devmm_va_is_multi_dev_map, svm_master_memcpy.c"),
    rule!(a_copy_that_cannot_read_its_source_writes_nothing, Ran)
        .decided_by("devmm_pin_user_pages_fast, devmm_common.c"),
    rule!(copies_beside_unmapping_answer_as_if_before_or_after, Ran)
        .decided_by("devmm_vmma_occupy_inc, svm_vmma_mng.c"),
];

/// A session with 4 MiB of device memory mapped.
pub(super) fn on_device(host: &Host) -> Result<(Session, u64), Failure> {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, 2 * MIB2)?;
    Ok((session, address))
}

fn copies_find_out_their_direction(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = *b"direction";
    let near = bytes.as_mut_ptr() as u64;
    equal("to the device", session.copy(far, near, 9, COPY_DETECT).granted()?, COPY_HOST_TO_DEVICE)?;
    equal("to the host", session.copy(near, far, 9, COPY_DETECT).granted()?, COPY_DEVICE_TO_HOST)?;
    equal("on the device", session.copy(far + 64, far, 9, COPY_DETECT).granted()?, COPY_DEVICE_TO_DEVICE)
}

fn copies_in_the_wrong_direction_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = [0u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    session.copy(far, near, 64, COPY_HOST_TO_DEVICE).granted()?;
    for direction in [COPY_HOST_TO_HOST, COPY_DEVICE_TO_HOST, COPY_DEVICE_TO_DEVICE] {
        session.copy(far, near, 64, direction).refused(EINVAL)?;
    }
    session.copy(near, far, 64, COPY_HOST_TO_DEVICE).refused(EINVAL)
}

fn copies_of_an_unknown_direction_find_out_theirs(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 64];
    equal("direction", session.copy(far, bytes.as_ptr() as u64, 64, 5).granted()?, COPY_HOST_TO_DEVICE)
}

fn copies_between_host_addresses_are_left_to_the_caller(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    let bytes = 0x99u64.to_le_bytes();
    equal("direction", session.copy(near, bytes.as_ptr() as u64, 8, COPY_DETECT).granted()?, COPY_HOST_TO_HOST)?;
    equal("word", peek(near), 0)
}

fn copies_between_host_addresses_are_not_checked(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    equal("direction", session.copy(0x1000, 0x2000, 64, COPY_DETECT).granted()?, COPY_HOST_TO_HOST)
}

fn copies_of_nothing_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 8];
    session.copy(far, bytes.as_ptr() as u64, 0, COPY_DETECT).refused(EINVAL)
}

fn copies_need_no_alignment(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes: Vec<u8> = (1..=13).collect();
    session.write(far + 4093, &bytes[1..]).granted()?;
    equal("bytes", session.read(far + 4093, 12).granted()?, bytes[1..].to_vec())
}

fn copies_within_a_device_are_done(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far, b"inside").granted()?;
    session.copy(far + MIB2 + 3, far, 6, COPY_DEVICE_TO_DEVICE).granted()?;
    equal("bytes", session.read(far + MIB2 + 3, 6).granted()?, b"inside".to_vec())
}

fn copies_between_devices_are_done(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, first) = session.device_mapping(0, MIB2)?;
    let (_, second) = session.device_mapping(1, MIB2)?;
    session.write(first, b"across").granted()?;
    equal("direction", session.copy(second + 5, first, 6, COPY_DETECT).granted()?, COPY_DEVICE_TO_DEVICE)?;
    equal("bytes", session.read(second + 5, 6).granted()?, b"across".to_vec())
}

fn copies_from_mapped_host_memory_are_done(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    poke(near + 8, 0x5A5A);
    equal("direction", session.copy(far, near + 8, 8, COPY_DETECT).granted()?, COPY_HOST_TO_DEVICE)?;
    equal("word on the device", session.read(far, 8).granted()?, 0x5A5Au64.to_le_bytes().to_vec())?;
    equal("direction back", session.copy(near + 64, far, 8, COPY_DETECT).granted()?, COPY_DEVICE_TO_HOST)?;
    equal("word through the CPU", peek(near + 64), 0x5A5A)
}

fn copies_to_where_nothing_is_mapped_are_einval(host: &Host) -> Verdict {
    let (session, _) = on_device(host)?;
    let address = session.reserve(MIB2)?;
    session.write(address, b"x").refused(EINVAL)
}

fn copies_to_where_nothing_is_reserved_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far + 100 * MIB2, b"x").refused(EINVAL)
}

fn copies_without_heap_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far + 100 * GIB, b"x").refused(EINVAL)
}

fn copies_that_run_out_of_a_mapping_are_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&handle, address, MIB2).granted()?;
    // From the mapping's start the kernel's walk over mappings finds the hole.
    session.write(address, &vec![1; MIB2 as usize + 1]).refused(EINVAL)?;
    session.write(address, &vec![1; MIB2 as usize]).granted()
}

fn copies_that_run_out_of_a_heap_are_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let first = heap_address(session.heap()?);
    let second = heap_address(session.heap()?);
    session.alloc(second - MIB2, MIB2).granted()?;
    session.alloc(second, MIB2).granted()?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.map(&handle, second - MIB2, MIB2).granted()?;
    session.map(&handle, second, MIB2).granted()?;
    equal("the heaps are neighbours", second - first, GIB)?;
    session.write(second - MIB2, &vec![1; 2 * MIB2 as usize]).refused(EINVAL)
}

fn copies_over_neighbouring_mappings_are_done(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = heap_address(session.heap()?);
    session.alloc(address, 2 * MIB2).granted()?;
    session.alloc(address + 2 * MIB2, MIB2).granted()?;
    for index in 0..3 {
        let handle = session.device_huge(0, MIB2).granted()?;
        session.map(&handle, address + index * MIB2, MIB2).granted()?;
    }
    let bytes: Vec<u8> = (0..=250).cycle().take(MIB2 as usize + 200).collect();
    session.write(address + MIB2 - 100, &bytes).granted()?;
    equal("bytes", session.read(address + MIB2 - 100, bytes.len()).granted()? == bytes, true)
}

fn copies_over_host_and_device_memory_are_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = heap_address(session.heap()?);
    session.alloc(address, MIB2).granted()?;
    session.alloc(address + MIB2, MIB2).granted()?;
    let far = session.device_huge(0, MIB2).granted()?;
    let near = session.host_huge(MIB2).granted()?;
    session.map(&far, address, MIB2).granted()?;
    session.map(&near, address + MIB2, MIB2).granted()?;
    session.write(address, &vec![1; 2 * MIB2 as usize]).refused(EINVAL)
}

fn copies_over_two_devices_are_einval(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let address = heap_address(session.heap()?);
    for device in 0..2 {
        let place = address + u64::from(device) * MIB2;
        session.alloc(place, MIB2).granted()?;
        let handle = session.device_huge(device, MIB2).granted()?;
        session.map(&handle, place, MIB2).granted()?;
    }
    session.write(address, &vec![1; 2 * MIB2 as usize]).refused(EINVAL)
}

fn copies_from_unmapped_memory_are_efault(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.copy(far, NOWHERE, 64, COPY_DETECT).refused(EFAULT)?;
    session.copy(NOWHERE, far, 64, COPY_DETECT).refused(EFAULT)
}

fn copies_to_read_only_memory_are_efault(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let page = anonymous(0, page_size(), libc::PROT_READ).granted()?;
    session.copy(page, far, 64, COPY_DETECT).refused(EFAULT)?;
    session.copy(far, page, 64, COPY_DETECT).granted().map(drop)
}

fn copies_of_device_local_addresses_only_go_to_the_host(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = [0u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    let para = Memcpy {
        destination: far,
        source: near,
        size: 64,
        device_local: 1,
        direction: COPY_HOST_TO_DEVICE,
        ..Default::default()
    };
    session.svm.call(Op::Memcpy, 0, &para).refused(EOPNOTSUPP)
}

/// Runs `body` in another process that maps 4 MiB of device memory that this one exports.
pub(super) fn with_import(host: &Host, body: impl FnOnce(&Session, u64) -> Verdict) -> Verdict {
    let mut peer = crate::peer::Peer::start(|link| {
        let session = Session::start(host)?;
        link.send(session.identity()?.tgid as u64)?;
        let share = link.receive()? as i32;
        let handle = session.import(0, 0, share).granted()?;
        let address = session.reserve(2 * MIB2)?;
        session.map(&handle, address, 2 * MIB2).granted()?;
        body(&session, address)
    })?;
    let session = Session::start(host)?;
    let handle = session.device_huge(0, 2 * MIB2).granted()?;
    let share = session.export(&handle).granted()?;
    let pid = peer.link.receive()? as i32;
    session.trust(0, share, &[pid]).granted()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

fn copies_from_mapped_memory_ignore_the_device_local_flag(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far, b"device local").granted()?;
    let mut bytes = [0u8; 12];
    let para = Memcpy {
        destination: bytes.as_mut_ptr() as u64,
        source: far,
        size: 12,
        device_local: 1,
        direction: svm::COPY_DEVICE_TO_HOST,
        ..Default::default()
    };
    session.svm.call(Op::Memcpy, 0, &para).granted()?;
    equal("bytes", std::hint::black_box(bytes), *b"device local")
}

/// Copies between `address` and device memory, both ways.
fn with_device_memory(session: &Session, far: u64, address: u64) -> [Answer<u32>; 2] {
    [session.copy(far, address, 64, COPY_DETECT), session.copy(address, far, 64, COPY_DETECT)]
}

fn copies_with_unallocated_addresses_of_the_host_pin_segment_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let start = session.segments.last().map_or(0, |segment| segment.start);
    for answer in with_device_memory(&session, far, start + MIB2) {
        answer.refused(EINVAL)?;
    }
    Ok(())
}

fn copies_from_unallocated_addresses_of_the_pool_segment_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.copy(far, svm::SOMA_START + MIB2, 64, COPY_DETECT).refused(EINVAL)
}

fn copies_with_unallocated_addresses_of_the_managed_segment_are_refused(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    for answer in with_device_memory(&session, far, svm::UVM_START + MIB2) {
        holds("EINVAL or EFAULT", matches!(answer, Err(EINVAL | EFAULT)))?;
    }
    Ok(())
}

/// Host memory of this process, imported on device 0 and mapped in 2 MiB.
pub(super) fn host_memory_on_a_device(host: &Host) -> Result<(Session, Handle, u64), Failure> {
    let session = Session::start(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    let share = session.export(&handle).granted()?;
    session.trust(svm::HOST_ID, share, &[session.identity()?.tgid]).granted()?;
    let import = session.import(0, svm::HOST_ID, share).granted()?;
    let address = session.reserve(MIB2)?;
    session.map(&import, address, MIB2).granted()?;
    Ok((session, import, address))
}

fn copies_of_host_memory_imported_on_a_device_are_einval(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    session.write(address, b"bytes").refused(EINVAL)?;
    session.read(address, 5).refused(EINVAL)
}

fn asynchronous_copies_of_host_memory_imported_on_a_device_are_einval(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    let mut bytes = [0u8; 64];
    session.copy_async(address, bytes.as_ptr() as u64, 64).refused(EINVAL)?;
    session.copy_async(bytes.as_mut_ptr() as u64, address, 64).refused(EINVAL)
}

fn copies_between_device_memory_and_imported_host_memory_are_eopnotsupp(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    for answer in with_device_memory(&session, far, address) {
        answer.refused(EOPNOTSUPP)?;
    }
    Ok(())
}

fn copies_between_mapped_and_imported_host_memory_are_einval(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    for answer in with_device_memory(&session, near, address) {
        answer.refused(EINVAL)?;
    }
    Ok(())
}

fn host_memory_imported_on_a_device_is_mapped_and_released(host: &Host) -> Verdict {
    let (session, import, address) = host_memory_on_a_device(host)?;
    session.unmap(address).granted()?;
    session.release(&import).granted().map(drop)
}

fn copies_within_a_device_of_imported_memory_are_eopnotsupp(host: &Host) -> Verdict {
    with_import(host, |session, imported| {
        let (_, own) = session.device_mapping(0, MIB2)?;
        session.copy(own, imported, 64, COPY_DETECT).refused(EOPNOTSUPP)?;
        session.copy(imported, own, 64, COPY_DETECT).refused(EOPNOTSUPP)
    })
}

fn a_copy_keeps_no_reference(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far, b"x").granted()?;
    session.copy(far, NOWHERE, 64, COPY_DETECT).refused(EFAULT)?;
    session.unmap(far).granted()?;
    session.free(far).granted()
}

fn the_tail_of_a_copy_within_the_host_goes_unchecked(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    let near = session.reserve(2 * MIB2)?;
    session.map(&handle, near, MIB2).granted()?;
    let bytes = vec![0u8; MIB2 as usize];
    let source = bytes.as_ptr() as u64;
    session.copy(near, source, MIB2 + 8, COPY_DETECT).refused(EINVAL)?;
    // The walk advances by whole mappings, so from inside a mapping it misses the tail.
    equal("direction", session.copy(near + 8, source, MIB2, COPY_DETECT).granted()?, COPY_HOST_TO_HOST)
}

fn copies_over_imported_and_local_memory_are_einval(host: &Host) -> Verdict {
    with_import(host, |session, imported| {
        let next = imported + 2 * MIB2;
        session.alloc(next, MIB2).granted()?;
        let handle = session.device_huge(0, MIB2).granted()?;
        session.map(&handle, next, MIB2).granted()?;
        session.write(imported, &vec![1; 3 * MIB2 as usize]).refused(EINVAL)
    })
}

fn a_copy_that_cannot_read_its_source_writes_nothing(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let page = page_size();
    let near = anonymous(0, 2 * page, libc::PROT_READ | libc::PROT_WRITE).granted()?;
    poke(near, 0x9999);
    crate::manager::mprotect(near + page, page, libc::PROT_NONE).granted()?;
    session.write(far, &[5; 8]).granted()?;
    session.copy(far, near, 2 * page, COPY_DETECT).refused(EFAULT)?;
    equal("bytes", session.read(far, 8).granted()?, vec![5; 8])
}

fn copies_beside_unmapping_answer_as_if_before_or_after(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, far) = session.device_mapping(0, MIB2)?;
    let (fd, request) = (session.svm.file.fd(), session.svm.request_of(Op::Memcpy));
    let copier = std::thread::spawn(move || {
        let bytes = [7u8; 64];
        let source = bytes.as_ptr() as u64;
        for _ in 0..200 {
            let para = Memcpy { destination: far, source, size: 64, direction: COPY_DETECT, ..Default::default() };
            let mut arg = svm::Arg::new(0, &para);
            match crate::manager::ioctl(fd, request, std::ptr::from_mut(&mut arg) as u64) {
                Ok(_) | Err(EINVAL | EFAULT) => {}
                Err(code) => return Err(code),
            }
        }
        Ok(())
    });
    for _ in 0..100 {
        match session.unmap(far) {
            Ok(_) => session.map(&handle, far, MIB2).granted()?,
            busy => busy.refused(EBUSY)?,
        }
    }
    crate::rule::note_command("MEMCPY beside MEM_UNMAP");
    copier.join().map_err(|_| Failure::broken("a thread panicked"))?.granted()
}
