//! Physical memory of the host: MEM_CREATE and MEM_RELEASE with side 0 and 2.

use crate::host::Host;
use crate::manager::page_size;
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{ABSENT, GIB, Handle, MIB2, Session, create_of, peek};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, HOST_ID, MemCreate};
use libc::{EBADRQC, EBUSY, EINVAL, ENODEV, ENOMEM, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(host_memory_is_counted_in_its_pages, Ran).decided_by("devmm_master_mem_create, svm_master_mem_create.c"),
    rule!(host_memory_is_zeroed, Source)
        .decided_by("devmm_master_alloc_normal_large_pages, svm_master_phy_allocator.c"),
    rule!(host_giant_pages_are_enomem_where_there_are_none, Ran)
        .decided_by("devmm_master_alloc_giant_pages, svm_master_phy_allocator.c"),
    rule!(host_giant_pages_come_in_gibibytes, Ran).decided_by("devmm_master_mem_create, svm_master_mem_create.c"),
    rule!(host_memory_of_a_node_is_granted, Ran).decided_by("devmm_host_numa_id_check, svm_master_mem_create.c"),
    rule!(host_memory_of_no_node_in_particular_is_granted, Ran)
        .decided_by("devmm_host_numa_id_check, svm_master_mem_create.c"),
    rule!(host_memory_of_an_absent_node_is_einval, Ran)
        .decided_by("devmm_host_numa_id_check, svm_master_mem_create.c")
        .since(Generation::V9_0_0),
    rule!(host_memory_of_an_absent_node_is_granted, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c")
        .before(Generation::V9_0_0),
    rule!(host_memory_of_an_impossible_node_is_einval, Source)
        .decided_by("devmm_host_numa_id_check, svm_master_mem_create.c"),
    rule!(plain_host_memory_ignores_the_node, Ran).decided_by("devmm_host_numa_id_check, svm_master_mem_create.c"),
    rule!(memory_of_no_size_is_einval, Ran).decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(huge_memory_comes_in_huge_pages, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(normal_memory_comes_in_pages, Ran).decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(memory_with_a_flag_is_einval, Ran).decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(memory_of_an_unknown_side_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(host_memory_on_a_device_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(device_memory_on_the_host_is_einval, Ran).decided_by("devmm_device_chan_msg_send, svm_device_msg_client.c"),
    rule!(memory_of_an_unknown_page_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(memory_of_an_unknown_kind_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(host_memory_of_every_kind_is_granted, Ran)
        .decided_by("devmm_master_alloc_huge_pages, svm_master_phy_allocator.c"),
    rule!(memory_of_the_host_agent_is_eopnotsupp, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(wrong_parameters_are_reported_before_the_host_agent, Ran)
        .decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(memory_on_an_absent_device_is_einval, Ran).decided_by("devmm_container_vir_to_phs_devid, devmm_proc_info.c"),
    rule!(memory_on_an_id_out_of_range_is_enodev, Ran)
        .decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(any_module_may_own_memory, Ran).decided_by("devmm_ioctl_mem_create_para_check, svm_master_mem_create.c"),
    rule!(host_ids_count_from_zero_and_are_not_reused_at_once, Ran)
        .decided_by("devmm_phy_addr_blk_create, svm_phy_addr_blk_mng.c"),
    rule!(refused_parameters_burn_no_id, Ran).decided_by("devmm_ioctl_mem_create, svm_master_mem_create.c"),
    rule!(a_failed_creation_burns_an_id, Ran).decided_by("devmm_mem_create_to_new_blk, svm_mem_create.c"),
    rule!(releasing_what_is_mapped_is_ebusy, Ran).decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(a_refused_release_changes_nothing, Ran).decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(releasing_after_unmapping_is_granted, Ran).decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(releasing_an_unknown_handle_is_einval, Ran).decided_by("_devmm_mem_release, svm_mem_create.c"),
    rule!(releasing_twice_is_einval, Source).decided_by("_devmm_mem_release, svm_mem_create.c"),
    rule!(releasing_by_the_node_side_is_einval, Ran).decided_by("devmm_ioctl_mem_release, svm_master_mem_create.c"),
    rule!(memory_of_a_node_is_released_as_host_memory, Ran)
        .decided_by("devmm_mem_create_phy_addr_attr_pack, svm_master_mem_create.c"),
    rule!(releasing_host_memory_on_a_device_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_release, svm_master_mem_create.c"),
    rule!(releasing_continues_page_by_page, Ran).decided_by("_devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(releasing_more_pages_than_there_are_frees_all, Ran)
        .decided_by("_devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(half_released_memory_cannot_be_mapped, Ran)
        .decided_by("devmm_phy_addr_blk_occupy_inc, svm_phy_addr_blk_mng.c"),
    rule!(releasing_no_pages_leaves_host_memory_half_released, Ran)
        .decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(releasing_a_part_of_what_is_mapped_is_ebusy, Ran)
        .decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
    rule!(host_memory_runs_out_with_enomem, Ran)
        .decided_by("devmm_master_alloc_huge_pages, svm_master_phy_allocator.c")
        .needs(&[Need::Exhaustion]),
];

fn host_huge(size: u64) -> MemCreate {
    create_of(svm::SIDE_HOST, svm::PAGE_HUGE, size)
}

/// MEM_CREATE on the host must be refused.
#[track_caller]
fn refused(session: &Session, para: MemCreate, code: i32) -> Verdict {
    session.create(HOST_ID, para).refused(code)
}

fn host_memory_is_counted_in_its_pages(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    equal("huge pages", session.host_huge(2 * MIB2).granted()?.pages, 2)?;
    equal("normal pages", session.host_normal(3 * page_size()).granted()?.pages, 3)
}

fn host_memory_is_zeroed(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    equal("first word", peek(address), 0)?;
    equal("last word", peek(address + MIB2 - 8), 0)
}

/// A session on a host that has no giant pages.
fn without_giant_pages(host: &Host) -> Result<Session, Failure> {
    let svm = crate::session::Svm::open(host)?;
    let segments = svm.prepare()?;
    if svm.init().granted()?.host_giant_page != 0 {
        return Err(Failure::skipped("this host has giant pages"));
    }
    Ok(Session::of(svm, segments))
}

fn host_giant_pages_are_enomem_where_there_are_none(host: &Host) -> Verdict {
    let session = without_giant_pages(host)?;
    refused(&session, create_of(svm::SIDE_HOST, svm::PAGE_GIANT, GIB), ENOMEM)
}

fn host_giant_pages_come_in_gibibytes(host: &Host) -> Verdict {
    refused(&Session::host(host)?, create_of(svm::SIDE_HOST, svm::PAGE_GIANT, MIB2), EINVAL)
}

fn of_node(node: u32) -> MemCreate {
    MemCreate { numa_node: node, ..create_of(svm::SIDE_HOST_NUMA, svm::PAGE_HUGE, MIB2) }
}

fn host_memory_of_a_node_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    equal("pages", session.create(HOST_ID, of_node(0)).granted()?.pages, 1)
}

fn host_memory_of_no_node_in_particular_is_granted(host: &Host) -> Verdict {
    Session::host(host)?.create(HOST_ID, of_node(u32::MAX)).granted().map(drop)
}

/// A node below the kernel's limit that is not online.
fn absent_node() -> Result<u32, Failure> {
    let online = |node: u32| std::fs::metadata(format!("/sys/devices/system/node/node{node}")).is_ok();
    (9..64).find(|&node| !online(node)).ok_or_else(|| Failure::skipped("every NUMA node is online"))
}

fn host_memory_of_an_absent_node_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, of_node(absent_node()?), EINVAL)
}

fn host_memory_of_an_absent_node_is_granted(host: &Host) -> Verdict {
    Session::host(host)?.create(HOST_ID, of_node(absent_node()?)).granted().map(drop)
}

fn host_memory_of_an_impossible_node_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, of_node(100_000), EINVAL)
}

fn plain_host_memory_ignores_the_node(host: &Host) -> Verdict {
    let para = MemCreate { numa_node: 100_000, ..host_huge(MIB2) };
    Session::host(host)?.create(HOST_ID, para).granted().map(drop)
}

fn memory_of_no_size_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, host_huge(0), EINVAL)
}

fn huge_memory_comes_in_huge_pages(host: &Host) -> Verdict {
    refused(&Session::host(host)?, host_huge(MIB2 + 4096), EINVAL)
}

fn normal_memory_comes_in_pages(host: &Host) -> Verdict {
    refused(&Session::host(host)?, create_of(svm::SIDE_HOST, svm::PAGE_NORMAL, 100), EINVAL)
}

fn memory_with_a_flag_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, MemCreate { flags: 1, ..host_huge(MIB2) }, EINVAL)
}

fn memory_of_an_unknown_side_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, MemCreate { side: svm::SIDES, ..host_huge(MIB2) }, EINVAL)
}

fn host_memory_on_a_device_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.create(0, host_huge(MIB2)).refused(EINVAL)?;
    session.create(0, of_node(0)).refused(EINVAL)
}

fn device_memory_on_the_host_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, MIB2), EINVAL)
}

fn memory_of_an_unknown_page_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, MemCreate { page: svm::PAGES, ..host_huge(MIB2) }, EINVAL)
}

fn memory_of_an_unknown_kind_is_einval(host: &Host) -> Verdict {
    refused(&Session::host(host)?, MemCreate { memory: svm::MEMORIES, ..host_huge(MIB2) }, EINVAL)
}

fn host_memory_of_every_kind_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    for memory in 0..svm::MEMORIES {
        session.create(HOST_ID, MemCreate { memory, ..host_huge(MIB2) }).granted()?;
    }
    Ok(())
}

fn memory_of_the_host_agent_is_eopnotsupp(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.create(svm::HOST_AGENT_ID, create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, MIB2)).refused(EOPNOTSUPP)
}

fn wrong_parameters_are_reported_before_the_host_agent(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.create(svm::HOST_AGENT_ID, create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, 0)).refused(EINVAL)
}

fn memory_on_an_absent_device_is_einval(host: &Host) -> Verdict {
    Session::host(host)?.device_huge(ABSENT, MIB2).refused(EINVAL)
}

fn memory_on_an_id_out_of_range_is_enodev(host: &Host) -> Verdict {
    Session::host(host)?.device_huge(2000, MIB2).refused(ENODEV)
}

fn any_module_may_own_memory(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    session.create(HOST_ID, MemCreate { module: 9999, ..host_huge(MIB2) }).granted().map(drop)
}

fn host_ids_count_from_zero_and_are_not_reused_at_once(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let first = session.host_huge(MIB2).granted()?;
    equal("first id", first.id, 0)?;
    session.release(&first).granted()?;
    equal("second id", session.host_huge(MIB2).granted()?.id, 1)
}

fn refused_parameters_burn_no_id(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    refused(&session, host_huge(0), EINVAL)?;
    refused(&session, create_of(svm::SIDE_HOST, svm::PAGE_GIANT, MIB2), EINVAL)?;
    equal("first id", session.host_huge(MIB2).granted()?.id, 0)
}

fn a_failed_creation_burns_an_id(host: &Host) -> Verdict {
    let session = without_giant_pages(host)?;
    refused(&session, create_of(svm::SIDE_HOST, svm::PAGE_GIANT, GIB), ENOMEM)?;
    equal("first id", session.host_huge(MIB2).granted()?.id, 1)
}

fn releasing_what_is_mapped_is_ebusy(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, _) = session.host_mapping(MIB2)?;
    session.release(&handle).refused(EBUSY)?;
    session.release(&handle).refused(EBUSY)
}

fn a_refused_release_changes_nothing(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, address) = session.host_mapping(2 * MIB2)?;
    crate::session::poke(address, 0xABCD_1234);
    session.release(&handle).refused(EBUSY)?;
    equal("word through the CPU", peek(address), 0xABCD_1234)?;
    session.unmap(address).granted()?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    equal("word after mapping again", peek(address), 0xABCD_1234)
}

fn releasing_after_unmapping_is_granted(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, address) = session.host_mapping(MIB2)?;
    session.unmap(address).granted()?;
    equal("kind", session.release(&handle).granted()?.kind, 0)
}

fn releasing_an_unknown_handle_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    session.release(&Handle { id: 4711, ..handle }).refused(EINVAL)?;
    session.release(&Handle { id: -1, ..handle }).refused(EINVAL)
}

fn releasing_twice_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    session.release(&handle).granted()?;
    session.release(&handle).refused(EINVAL)
}

fn releasing_by_the_node_side_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.create(HOST_ID, of_node(0)).granted()?;
    session.release(&Handle { side: svm::SIDE_HOST_NUMA, ..handle }).refused(EINVAL)
}

fn memory_of_a_node_is_released_as_host_memory(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.create(HOST_ID, of_node(0)).granted()?;
    equal("kind", session.release(&handle).granted()?.kind, 0)
}

fn releasing_host_memory_on_a_device_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    session.release(&Handle { device: 0, ..handle }).refused(EINVAL)
}

fn releasing_continues_page_by_page(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_normal(3 * page_size()).granted()?;
    session.release_pages(&handle, 1).granted()?;
    session.release_pages(&handle, 2).granted()?;
    session.release_pages(&handle, 1).refused(EINVAL)
}

fn releasing_more_pages_than_there_are_frees_all(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    session.release_pages(&handle, 100).granted()?;
    session.release(&handle).refused(EINVAL)
}

fn half_released_memory_cannot_be_mapped(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    let address = session.reserve(2 * MIB2)?;
    session.release_pages(&handle, 1).granted()?;
    session.map(&handle, address, MIB2).refused(EBADRQC)?;
    session.release_pages(&handle, 1).granted().map(drop)
}

fn releasing_no_pages_leaves_host_memory_half_released(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    let address = session.reserve(2 * MIB2)?;
    session.release_pages(&handle, 0).granted()?;
    session.map(&handle, address, MIB2).refused(EBADRQC)?;
    session.release(&handle).granted()?;
    session.release(&handle).refused(EINVAL)
}

fn releasing_a_part_of_what_is_mapped_is_ebusy(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, _) = session.host_mapping(2 * MIB2)?;
    session.release_pages(&handle, 1).refused(EBUSY)
}

fn host_memory_runs_out_with_enomem(host: &Host) -> Verdict {
    // SAFETY: sysconf has no preconditions.
    let memory = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) } as u64 * page_size();
    let session = Session::host(host)?;
    refused(&session, host_huge(4 * memory / MIB2 * MIB2), ENOMEM)?;
    session.host_huge(MIB2).granted().map(drop)
}
