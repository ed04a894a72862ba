//! Physical memory of a device. Most answers come from the device, which shares code with the host.

use crate::host::Host;
use crate::rule::{Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{Handle, MIB2, MODULE, Session, create_of, heap_address};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, MemMap, Op};
use libc::{EADDRINUSE, EBUSY, EINVAL, ENOMEM, EOPNOTSUPP, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(device_memory_is_counted_in_its_pages, Inferred)
        .decided_by("devmm_agent_mem_create, svm_master_mem_create.c"),
    rule!(device_memory_holds_bytes, Inferred).decided_by("devmm_ioctl_memcpy_process, devmm_proc_mem_copy.c"),
    rule!(handles_of_one_device_are_different, Inferred).decided_by("_devmm_agent_mem_create, svm_master_mem_create.c"),
    rule!(devices_number_their_handles_apart, Inferred)
        .decided_by("_devmm_agent_mem_create, svm_master_mem_create.c")
        .needs(&[Need::TwoDevices]),
    rule!(device_memory_runs_out_with_enomem, Inferred)
        .decided_by("_devmm_agent_mem_create, svm_master_mem_create.c")
        .needs(&[Need::Exhaustion]),
    rule!(releasing_mapped_device_memory_is_ebusy, Inferred)
        .decided_by("devmm_agent_normal_mem_release, svm_master_mem_create.c"),
    rule!(releasing_unknown_device_memory_is_einval, Inferred)
        .decided_by("devmm_agent_normal_mem_release, svm_master_mem_create.c"),
    rule!(releasing_no_pages_of_device_memory_does_nothing, Ran)
        .decided_by("devmm_agent_normal_mem_release, svm_master_mem_create.c"),
    rule!(mapping_unknown_device_memory_is_einval, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(mapping_device_memory_with_another_page_count_is_einval, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(mapping_device_memory_under_another_module_is_einval, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(mapping_more_device_memory_than_there_is_is_enomem, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(mapping_device_memory_where_something_is_mapped_is_eaddrinuse, Source)
        .decided_by("devmm_mem_map_pg_bitmap_state_set, svm_master_mem_map.c"),
    rule!(mapping_device_memory_on_a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(device_memory_can_be_mapped_twice, Inferred).decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(a_part_of_device_memory_can_be_mapped, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(a_reservation_takes_memory_of_one_device, Ran)
        .decided_by("devmm_page_bitmap_mem_mapped_state_set, svm_master_mem_map.c")
        .needs(&[Need::TwoDevices]),
    rule!(unmapping_device_memory_tells_its_device, Source).decided_by("devmm_ioctl_mem_unmap, svm_master_mem_map.c"),
    rule!(the_owner_of_device_memory_is_reported_by_physical_id, Source)
        .decided_by("devmm_ioctl_mem_query_owner, svm_master_mem_map.c"),
    rule!(the_owner_of_host_memory_is_the_host, Source).decided_by("devmm_ioctl_mem_query_owner, svm_master_mem_map.c"),
    rule!(the_owner_is_reported_for_whole_mappings_only, Source)
        .decided_by("devmm_vmma_matched_get, svm_master_mem_map.c"),
    rule!(an_address_tells_its_device, Source).decided_by("devmm_ioctl_resv_addr_info_query, svm_master_mem_map.c"),
    rule!(bytes_stay_with_the_memory_over_mappings, Inferred)
        .decided_by("devmm_msg_to_agent_mem_map, svm_pmaster_mem_map.c"),
    rule!(free_memory_is_not_more_than_all_memory, Inferred)
        .decided_by("devmm_ioctl_query_device_mem_info, devmm_proc_info.c"),
    rule!(created_memory_is_missing_from_free_memory, Inferred)
        .decided_by("devmm_ioctl_query_device_mem_info, devmm_proc_info.c")
        .needs(&[Need::Exhaustion]),
    rule!(attributes_of_a_handle_are_of_one_kind, Ran)
        .decided_by("devmm_ioctl_mem_handle_set_attr, svm_master_mem_share.c")
        .since(Generation::V26_1),
    rule!(attributes_of_a_handle_have_two_values, Ran)
        .decided_by("devmm_set_mem_map_route, svm_master_mem_share.c")
        .since(Generation::V26_1),
    rule!(attributes_of_host_handles_are_eopnotsupp, Ran)
        .decided_by("devmm_set_mem_map_route, svm_master_mem_share.c")
        .since(Generation::V26_1),
    rule!(an_attribute_of_a_handle_is_remembered, Inferred)
        .decided_by("devmm_get_mem_map_route, svm_master_mem_share.c")
        .since(Generation::V26_1),
    rule!(a_released_handle_has_no_attribute, Inferred)
        .decided_by("devmm_get_mem_map_route, svm_master_mem_share.c")
        .since(Generation::V26_1),
    rule!(attributes_of_handles_are_unknown_before_26_1, Ran)
        .decided_by("devmm_dispatch_ioctl_use_svm_proc, svm_module_ops.c")
        .before(Generation::V26_1),
];

fn device_memory_is_counted_in_its_pages(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    equal("huge pages", session.device_huge(0, 3 * MIB2).granted()?.pages, 3)?;
    let normal = session.create(0, create_of(svm::SIDE_DEVICE, svm::PAGE_NORMAL, 8 * 65536)).granted()?;
    equal("normal pages", normal.pages, 8 * 65536 / 4096)
}

fn device_memory_holds_bytes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, 2 * MIB2)?;
    let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    session.write(address + MIB2 - 5000, &bytes).granted()?;
    equal("bytes", session.read(address + MIB2 - 5000, bytes.len()).granted()? == bytes, true)
}

fn handles_of_one_device_are_different(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let first = session.device_huge(0, MIB2).granted()?;
    let second = session.device_huge(0, MIB2).granted()?;
    holds("two handles have different ids", first.id != second.id)?;
    session.release(&first).granted()?;
    holds("an id is not reused at once", session.device_huge(0, MIB2).granted()?.id != first.id)
}

fn devices_number_their_handles_apart(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let first = session.device_huge(0, MIB2).granted()?;
    let second = session.device_huge(1, MIB2).granted()?;
    equal("first ids", first.id, second.id)
}

fn device_memory_runs_out_with_enomem(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    // No device has this much. The pages that were allocated before it ran out are freed.
    session.device_huge(0, 1 << 42).refused(ENOMEM)?;
    session.device_huge(0, MIB2).granted().map(drop)
}

fn releasing_mapped_device_memory_is_ebusy(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    session.release(&handle).refused(EBUSY)?;
    session.unmap(address).granted()?;
    session.release(&handle).granted().map(drop)
}

fn releasing_unknown_device_memory_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.release(&Handle { id: 4711, ..handle }).refused(EINVAL)?;
    session.release(&handle).granted()?;
    session.release(&handle).refused(EINVAL)
}

fn releasing_no_pages_of_device_memory_does_nothing(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    session.write(address, b"kept").granted()?;
    session.release_pages(&handle, 0).granted()?;
    equal("bytes", session.read(address, 4).granted()?, b"kept".to_vec())?;
    session.unmap(address).granted()?;
    session.release_pages(&handle, 0).granted()?;
    session.map(&handle, address, MIB2).granted()
}

/// MEM_MAP of 4 MiB of device memory must be refused with `change` and succeed without it.
#[track_caller]
fn refused_if(host: &Host, code: i32, change: impl FnOnce(&mut MemMap)) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, 2 * MIB2).granted()?;
    let address = session.reserve(8 * MIB2)?;
    let good = Session::map_para(&handle, address, 2 * MIB2);
    let mut para = good;
    change(&mut para);
    session.map_raw(0, para).refused(code)?;
    session.map_raw(0, good).granted()
}

fn mapping_unknown_device_memory_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |para| para.id = 4711)
}

fn mapping_device_memory_with_another_page_count_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |para| para.pages += 1)
}

fn mapping_device_memory_under_another_module_is_einval(host: &Host) -> Verdict {
    refused_if(host, EINVAL, |para| para.module = MODULE + 1)
}

fn mapping_more_device_memory_than_there_is_is_enomem(host: &Host) -> Verdict {
    refused_if(host, ENOMEM, |para| para.size = 3 * MIB2)
}

fn mapping_device_memory_where_something_is_mapped_is_eaddrinuse(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, 2 * MIB2)?;
    session.map(&handle, address, 2 * MIB2).refused(EADDRINUSE)?;
    session.map(&handle, address + MIB2, MIB2).refused(EADDRINUSE)
}

fn mapping_device_memory_on_a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.reserve(MIB2)?;
    let handle = Handle { device: 0, id: 0, side: svm::SIDE_DEVICE, page: svm::PAGE_HUGE, pages: 1, module: MODULE };
    session.map(&handle, address, MIB2).refused(ESRCH)
}

fn device_memory_can_be_mapped_twice(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    let other = session.reserve(MIB2)?;
    session.map(&handle, other, MIB2).granted()?;
    session.write(address, b"same").granted()?;
    equal("bytes at the second address", session.read(other, 4).granted()?, b"same".to_vec())?;
    session.unmap(address).granted()?;
    session.release(&handle).refused(EBUSY)?;
    session.unmap(other).granted()?;
    session.release(&handle).granted().map(drop)
}

fn a_part_of_device_memory_can_be_mapped(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, 4 * MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&handle, address, MIB2).granted()?;
    equal("size", session.unmap(address).granted()?.size, MIB2)
}

fn a_reservation_takes_memory_of_one_device(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let first = session.device_huge(0, MIB2).granted()?;
    let second = session.device_huge(1, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&first, address, MIB2).granted()?;
    session.map(&second, address + MIB2, MIB2).refused(EINVAL)?;
    session.map(&first, address + 2 * MIB2, MIB2).granted()
}

fn unmapping_device_memory_tells_its_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, 2 * MIB2)?;
    // Id 65 works for a device's mapping too.
    let answer = session.unmap(address).granted()?;
    equal("size", answer.size, 2 * MIB2)?;
    equal("side", answer.side, svm::SIDE_DEVICE)?;
    equal("device", answer.device, 0)
}

fn the_owner_of_device_memory_is_reported_by_physical_id(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    let answer = session.owner(address, MIB2).granted()?;
    equal("device", answer.device, host.physical[0])?;
    equal("local", answer.local, 1)
}

fn the_owner_of_host_memory_is_the_host(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    let answer = session.owner(address, MIB2).granted()?;
    equal("device", answer.device, svm::HOST_ID)?;
    equal("local", answer.local, 1)
}

fn the_owner_is_reported_for_whole_mappings_only(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(2 * MIB2)?;
    session.owner(address, MIB2).refused(EINVAL)?;
    session.owner(address + MIB2, MIB2).refused(EINVAL)?;
    session.owner(address, 4 * MIB2).refused(EINVAL)?;
    session.owner(heap_address(3000), MIB2).refused(EINVAL)?;
    session.owner(address, 2 * MIB2).granted().map(drop)
}

fn an_address_tells_its_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, 2 * MIB2)?;
    let answer = session.address_info(address + MIB2).granted()?;
    equal("start", answer.start, address)?;
    equal("end", answer.end, address + 2 * MIB2 - 1)?;
    equal("device", answer.device, 0)
}

fn bytes_stay_with_the_memory_over_mappings(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    session.write(address + 77, b"stay").granted()?;
    session.unmap(address).granted()?;
    let other = session.reserve(MIB2)?;
    session.map(&handle, other, MIB2).granted()?;
    equal("bytes", session.read(other + 77, 4).granted()?, b"stay".to_vec())
}

/// QUERY_MEM_USEDINFO of the HBM of device 0.
fn used(session: &Session) -> Result<svm::MemUsedInfo, crate::rule::Failure> {
    session.svm.ask(Op::QueryMemUsedInfo, 0, &svm::MemUsedInfo { memory: 2, ..Default::default() }).granted()
}

fn free_memory_is_not_more_than_all_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let info = used(&session)?;
    holds("there is memory in huge pages", info.huge_total_size > 0)?;
    holds("free is at most total", info.huge_free_size <= info.huge_total_size)
}

fn created_memory_is_missing_from_free_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let before = used(&session)?.huge_free_size;
    let handle = session.device_huge(0, 64 * MIB2).granted()?;
    equal("free memory", used(&session)?.huge_free_size, before - 64 * MIB2)?;
    session.release(&handle).granted()?;
    equal("free memory after releasing", used(&session)?.huge_free_size, before)
}

/// MEM_HANDLE_SET_ATTR of a new handle of device 0.
fn set_attr(session: &Session, change: impl FnOnce(&mut svm::MemHandleAttr)) -> Result<svm::Arg, i32> {
    let handle = session.device_huge(0, MIB2)?;
    let mut para = svm::MemHandleAttr { id: handle.id, side: svm::SIDE_DEVICE, ..Default::default() };
    change(&mut para);
    session.svm.call(Op::MemHandleSetAttr, 0, &para)
}

fn attributes_of_a_handle_are_of_one_kind(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    set_attr(&session, |para| para.kind = 1).refused(EOPNOTSUPP)?;
    let para = svm::MemHandleAttr { kind: 1, side: svm::SIDE_DEVICE, ..Default::default() };
    session.svm.call(Op::MemHandleGetAttr, 0, &para).refused(EOPNOTSUPP)
}

fn attributes_of_a_handle_have_two_values(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    set_attr(&session, |para| para.value.route = 2).refused(EINVAL)
}

fn attributes_of_host_handles_are_eopnotsupp(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    set_attr(&session, |para| para.side = svm::SIDE_HOST).refused(EOPNOTSUPP)?;
    // The value is checked before the side.
    set_attr(&session, |para| (para.side, para.value.route) = (svm::SIDE_HOST, 2)).refused(EINVAL)
}

fn an_attribute_of_a_handle_is_remembered(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    let mut para = svm::MemHandleAttr { id: handle.id, side: svm::SIDE_DEVICE, ..Default::default() };
    equal("first", session.svm.ask(Op::MemHandleGetAttr, 0, &para).granted()?.value.route, 0)?;
    para.value.route = 1;
    session.svm.call(Op::MemHandleSetAttr, 0, &para).granted()?;
    para.value.route = 0;
    equal("after setting", session.svm.ask(Op::MemHandleGetAttr, 0, &para).granted()?.value.route, 1)
}

fn a_released_handle_has_no_attribute(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    session.release(&handle).granted()?;
    // The host takes an answer without a route for EINVAL, too.
    let para = svm::MemHandleAttr { id: handle.id, side: svm::SIDE_DEVICE, ..Default::default() };
    session.svm.call(Op::MemHandleGetAttr, 0, &para).refused(EINVAL)
}

fn attributes_of_handles_are_unknown_before_26_1(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    // The numbers are too high for 8.5.0; 9.0.0 has no handler for them.
    let code = if host.generation < Generation::V9_0_0 { EINVAL } else { EOPNOTSUPP };
    set_attr(&session, |_| ()).refused(code)?;
    session.svm.call(Op::MemHandleGetAttr, 0, &svm::MemHandleAttr::default()).refused(code)
}
