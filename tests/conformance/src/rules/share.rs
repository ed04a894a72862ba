//! Exporting: a handle becomes a share, open to a list of trusted processes or to every process.

use crate::host::Host;
use crate::manager::NOWHERE;
use crate::peer::{Link, Peer};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{ABSENT, Handle, MIB2, MODULE, Session};
use ascend_ioctl::svm::{self, HOST_ID, Op};
use libc::{EACCES, EBUSY, EFAULT, EINVAL, ENODEV, EOPNOTSUPP, EPERM, ESRCH};

pub const RULES: &[Rule] = &[
    rule!(a_handle_is_exported_once, Ran).decided_by("devmm_master_mem_export, svm_master_mem_share.c"),
    rule!(exporting_an_unknown_handle_is_einval, Ran).decided_by("devmm_master_mem_export, svm_master_mem_share.c"),
    rule!(exporting_host_memory_on_a_device_is_einval, Ran)
        .decided_by("devmm_ioctl_mem_export, svm_master_mem_share.c"),
    rule!(a_mapped_handle_can_be_exported, Ran).decided_by("devmm_master_mem_export, svm_master_mem_share.c"),
    rule!(device_memory_is_exported_once, Inferred).decided_by("devmm_agent_mem_export, svm_master_mem_share.c"),
    rule!(exporting_unknown_device_memory_is_einval, Inferred)
        .decided_by("devmm_agent_mem_export, svm_master_mem_share.c"),
    rule!(exporting_on_a_device_that_is_not_set_up_is_esrch, Inferred)
        .decided_by("devmm_agent_mem_export, svm_master_mem_share.c"),
    rule!(numbers_of_shares_are_not_reused, Ran).decided_by("devmm_phy_addr_blk_create, svm_phy_addr_blk_mng.c"),
    rule!(trusting_nobody_is_einval, Ran).decided_by("devmm_set_pid_para_check, svm_master_mem_share.c"),
    rule!(trusting_too_many_is_einval, Ran).decided_by("devmm_set_pid_para_check, svm_master_mem_share.c"),
    rule!(trusting_a_null_list_is_einval, Ran).decided_by("devmm_set_pid_para_check, svm_master_mem_share.c"),
    rule!(trusting_an_unmapped_list_is_efault, Ran).decided_by("devmm_ioctl_mem_set_pid, svm_master_mem_share.c"),
    rule!(trusting_for_an_unknown_share_is_efault, Ran).decided_by("devmm_ioctl_mem_set_pid, svm_master_mem_share.c"),
    rule!(only_the_exporter_trusts, Ran).decided_by("devmm_ioctl_mem_set_pid, svm_master_mem_share.c"),
    rule!(trusting_zeros_only_is_einval, Ran).decided_by("devmm_set_pids, svm_master_mem_share.c"),
    rule!(zeros_in_a_list_are_passed_over, Ran).decided_by("devmm_set_pids, svm_master_mem_share.c"),
    rule!(trusting_a_process_twice_is_granted, Ran).decided_by("_devmm_pid_list_insert, svm_master_mem_share.c"),
    rule!(a_full_list_takes_nobody, Ran)
        .decided_by("_devmm_pid_list_insert, svm_master_mem_share.c")
        .needs(&[Need::Exhaustion]),
    rule!(trusting_after_giving_up_the_list_is_eperm, Ran).decided_by("devmm_pid_list_insert, svm_master_mem_share.c"),
    rule!(zeros_are_einval_without_a_list_too, Ran).decided_by("devmm_set_pids, svm_master_mem_share.c"),
    rule!(attributes_of_an_unknown_kind_are_eopnotsupp, Ran)
        .decided_by("devmm_ioctl_mem_set_attr, svm_master_mem_share.c"),
    rule!(attributes_of_an_unknown_share_are_efault, Ran)
        .decided_by("devmm_ioctl_mem_set_attr, svm_master_mem_share.c"),
    rule!(an_attribute_has_two_values, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(only_the_exporter_sets_attributes, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(the_list_cannot_be_taken_up_again, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(a_list_with_entries_cannot_be_given_up, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(giving_up_the_list_twice_is_granted, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(reasons_against_an_attribute_come_in_order, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(anyone_may_ask_for_attributes, Ran)
        .decided_by("devmm_share_mem_get_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(questions_about_a_share_of_no_device_are_refused, Ran)
        .decided_by("devmm_get_share_devid, svm_master_mem_share.c"),
    rule!(the_kind_of_an_attribute_is_looked_at_first, Ran)
        .decided_by("devmm_ioctl_mem_get_attr, svm_master_mem_share.c"),
    rule!(a_share_tells_its_physical_device, Ran).decided_by("devmm_ioctl_mem_get_info, svm_master_mem_share.c"),
    rule!(releasing_an_exported_handle_counts_no_pages, Ran)
        .decided_by("devmm_mem_release_proc, svm_master_mem_create.c"),
    rule!(releasing_an_exported_mapped_handle_is_ebusy, Ran)
        .decided_by("devmm_phy_addr_blk_uninit, svm_phy_addr_blk_mng.c"),
];

/// A session that exports host memory.
pub(super) fn exporter(host: &Host) -> Result<(Session, Handle, i32), Failure> {
    let session = Session::host(host)?;
    let handle = session.host_huge(2 * MIB2).granted()?;
    let share = session.export(&handle).granted()?;
    Ok((session, handle, share))
}

/// A session that exports memory of device 0.
pub(super) fn device_exporter(host: &Host) -> Result<(Session, Handle, i32), Failure> {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, 2 * MIB2).granted()?;
    let share = session.export(&handle).granted()?;
    Ok((session, handle, share))
}

/// A process that sends its id, waits for the id of a share and runs `body` with it.
pub(super) fn importer(body: impl FnOnce(&mut Link, i32) -> Verdict) -> Result<Peer, Failure> {
    Peer::start(|link| {
        link.send(bare_tgid()? as u64)?;
        let share = link.receive()? as i32;
        body(link, share)
    })
}

/// This process's id in the initial pid namespace.
pub(super) fn bare_tgid() -> Result<i32, Failure> {
    use ascend_ioctl::{davinci::module, devmng};
    let file = crate::manager::Manager::bound(module::DEVMNG)?;
    let mut id = 0i32;
    let call = devmng::ContainerCall {
        command: devmng::BARE_TGID,
        output: std::ptr::from_mut(&mut id) as u64,
        ..Default::default()
    };
    let mut arg = devmng::ContainerArg { call, ..Default::default() };
    file.command(&devmng::CONTAINER_CMD, &mut arg).granted()?;
    // Closing a DEVMNG file reports the process as dead to every device, so it stays open.
    file.leak();
    Ok(std::hint::black_box(id))
}

/// Lists the waiting importer as trusted and sends it the id of the share.
pub(super) fn invite(peer: &mut Peer, session: &Session, device: u32, share: i32) -> Verdict {
    let pid = peer.link.receive()? as i32;
    session.trust(device, share, &[pid]).granted()?;
    peer.link.send(share as u64)
}

fn a_handle_is_exported_once(host: &Host) -> Verdict {
    let (session, handle, _) = exporter(host)?;
    session.export(&handle).refused(EINVAL)
}

fn exporting_an_unknown_handle_is_einval(host: &Host) -> Verdict {
    let (session, handle, _) = exporter(host)?;
    session.export(&Handle { id: 4711, ..handle }).refused(EINVAL)
}

fn exporting_host_memory_on_a_device_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    session.export(&Handle { device: 0, ..handle }).refused(EINVAL)
}

fn a_mapped_handle_can_be_exported(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, _) = session.host_mapping(MIB2)?;
    session.export(&handle).granted().map(drop)
}

fn device_memory_is_exported_once(host: &Host) -> Verdict {
    let (session, handle, _) = device_exporter(host)?;
    session.export(&handle).refused(EINVAL)
}

fn exporting_unknown_device_memory_is_einval(host: &Host) -> Verdict {
    let (session, handle, _) = device_exporter(host)?;
    session.export(&Handle { id: 4711, ..handle }).refused(EINVAL)
}

fn exporting_on_a_device_that_is_not_set_up_is_esrch(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let handle = Handle { device: 0, id: 0, side: svm::SIDE_DEVICE, page: svm::PAGE_HUGE, pages: 1, module: MODULE };
    session.export(&handle).refused(ESRCH)
}

fn numbers_of_shares_are_not_reused(host: &Host) -> Verdict {
    let (session, handle, first) = exporter(host)?;
    session.release(&handle).granted()?;
    let next = session.host_huge(MIB2).granted()?;
    holds("the next share has another number", session.export(&next).granted()? != first)
}

fn trusting_nobody_is_einval(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share, &[]).refused(EINVAL)
}

/// MEM_SET_PID with any address as the list.
fn trust_raw(session: &Session, share: i32, count: u32, pids: u64) -> Result<svm::Arg, i32> {
    session.svm.call(Op::MemSetPid, HOST_ID, &svm::MemSetPid { share, count, pids })
}

fn trusting_too_many_is_einval(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    let pids = vec![1; svm::TRUST_LIST as usize + 1];
    session.trust(HOST_ID, share, &pids).refused(EINVAL)
}

fn trusting_a_null_list_is_einval(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    trust_raw(&session, share, 1, 0).refused(EINVAL)
}

fn trusting_an_unmapped_list_is_efault(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    trust_raw(&session, share, 1, NOWHERE).refused(EFAULT)?;
    // Even for a share that does not exist: the list is read first.
    trust_raw(&session, 1 << 20, 1, NOWHERE).refused(EFAULT)
}

fn trusting_for_an_unknown_share_is_efault(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share + 1000, &[1]).refused(EFAULT)?;
    session.trust(0, share + 1000, &[1]).refused(EFAULT)
}

fn only_the_exporter_trusts(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| {
        let session = Session::host(host)?;
        session.trust(HOST_ID, share, &[1]).refused(EACCES)?;
        // The exporter is checked before the entries.
        session.trust(HOST_ID, share, &[0]).refused(EACCES)
    })?;
    let (session, _, share) = exporter(host)?;
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.finish()
}

fn trusting_zeros_only_is_einval(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share, &[0, 0]).refused(EINVAL)
}

fn zeros_in_a_list_are_passed_over(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share, &[0, 1, 0]).granted()
}

fn trusting_a_process_twice_is_granted(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share, &[1]).granted()?;
    session.trust(HOST_ID, share, &[1, 1]).granted()
}

fn a_full_list_takes_nobody(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    let pids: Vec<i32> = (1..=svm::TRUST_LIST as i32).collect();
    session.trust(HOST_ID, share, &pids).granted()?;
    session.trust(HOST_ID, share, &[1 << 20]).refused(EINVAL)?;
    session.trust(HOST_ID, share, &[5]).refused(EINVAL)
}

fn trusting_after_giving_up_the_list_is_eperm(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    session.trust(HOST_ID, share, &[1]).refused(EPERM)
}

fn zeros_are_einval_without_a_list_too(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    session.trust(HOST_ID, share, &[0]).refused(EINVAL)
}

fn attributes_of_an_unknown_kind_are_eopnotsupp(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 1, 1).refused(EOPNOTSUPP)
}

fn attributes_of_an_unknown_share_are_efault(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share + 1000, 0, 1).refused(EFAULT)?;
    session.get_attr(HOST_ID, share + 1000, 0).refused(EFAULT)?;
    session.get_info(HOST_ID, share + 1000).refused(EFAULT)
}

fn an_attribute_has_two_values(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 2).refused(EINVAL)
}

fn only_the_exporter_sets_attributes(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| Session::host(host)?.set_attr(HOST_ID, share, 0, 1).refused(EPERM))?;
    let (_session, _, share) = exporter(host)?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

fn the_list_cannot_be_taken_up_again(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 0).refused(EOPNOTSUPP)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    session.set_attr(HOST_ID, share, 0, 0).refused(EOPNOTSUPP)
}

fn a_list_with_entries_cannot_be_given_up(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.trust(HOST_ID, share, &[1]).granted()?;
    session.set_attr(HOST_ID, share, 0, 1).refused(EPERM)
}

fn giving_up_the_list_twice_is_granted(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    session.set_attr(HOST_ID, share, 0, 1).granted()
}

fn reasons_against_an_attribute_come_in_order(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| {
        let session = Session::host(host)?;
        session.set_attr(HOST_ID, share, 0, 2).refused(EINVAL)?;
        session.set_attr(HOST_ID, share, 0, 0).refused(EPERM)
    })?;
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share + 1000, 1, 2).refused(EOPNOTSUPP)?;
    session.set_attr(HOST_ID, share + 1000, 0, 2).refused(EFAULT)?;
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.finish()?;
    session.set_attr(HOST_ID, share, 0, 0).refused(EOPNOTSUPP)
}

fn anyone_may_ask_for_attributes(host: &Host) -> Verdict {
    let mut peer = importer(|link, share| {
        let session = Session::host(host)?;
        equal("flag with a list", session.get_attr(HOST_ID, share, 0).granted()?, 0)?;
        link.send(0)?;
        link.receive()?;
        equal("flag without a list", session.get_attr(HOST_ID, share, 0).granted()?, 1)
    })?;
    let (session, _, share) = exporter(host)?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.link.receive()?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    peer.link.send(0)?;
    peer.finish()
}

fn questions_about_a_share_of_no_device_are_refused(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.get_attr(svm::DEVICE_IDS, share, 0).refused(ENODEV)?;
    session.get_attr(ABSENT, share, 0).refused(EINVAL)?;
    session.get_info(svm::DEVICE_IDS, share).refused(ENODEV)?;
    session.get_info(ABSENT, share).refused(EINVAL)
}

fn the_kind_of_an_attribute_is_looked_at_first(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.get_attr(svm::DEVICE_IDS, share, 1).refused(EOPNOTSUPP)
}

fn a_share_tells_its_physical_device(host: &Host) -> Verdict {
    let (session, _, share) = device_exporter(host)?;
    equal("physical id", session.get_info(0, share).granted()?, host.physical[0])?;
    let near = session.host_huge(MIB2).granted()?;
    let share = session.export(&near).granted()?;
    equal("physical id of the host", session.get_info(HOST_ID, share).granted()?, HOST_ID)
}

fn releasing_an_exported_handle_counts_no_pages(host: &Host) -> Verdict {
    let (session, handle, share) = exporter(host)?;
    session.release_pages(&handle, 1).granted()?;
    session.get_info(HOST_ID, share).refused(EFAULT)?;
    session.release(&handle).refused(EINVAL)
}

fn releasing_an_exported_mapped_handle_is_ebusy(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (handle, address) = session.host_mapping(MIB2)?;
    session.export(&handle).granted()?;
    session.release(&handle).refused(EBUSY)?;
    session.unmap(address).granted()?;
    session.release(&handle).granted().map(drop)
}
