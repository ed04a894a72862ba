//! Importing: who may import, what the kernel returns, and how long the memory lives.

use super::share::{bare_tgid, device_exporter, exporter, importer, invite};
use crate::host::Host;
use crate::peer::{End, Peer, fork, leave, wait};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{ABSENT, GIB, Handle, MIB2, MODULE, Session, create_of, eventually, peek, poke};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, HOST_ID, MemImport, Op};
use libc::{EACCES, EFAULT, EINVAL, ENODEV, ENOMEM, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(importing_an_unknown_type_is_eopnotsupp, Ran).decided_by("devmm_import_para_check, svm_master_mem_share.c"),
    rule!(importing_an_unknown_share_is_efault, Ran)
        .decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(importing_from_no_device_is_refused, Ran).decided_by("devmm_get_share_devid, svm_master_mem_share.c"),
    rule!(importing_ones_own_share_where_it_is_is_eacces, Ran)
        .decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(a_refused_own_import_burns_no_id, Ran)
        .decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(an_untrusted_process_is_eacces, Ran).decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(a_refused_import_burns_an_id, Ran).decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(a_trusted_process_imports_host_memory, Ran).decided_by("devmm_master_mem_import, svm_master_mem_share.c"),
    rule!(a_trusted_process_imports_device_memory, Inferred)
        .decided_by("devmm_agent_mem_import, svm_master_mem_share.c"),
    rule!(an_import_reports_what_was_exported, Ran)
        .decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(an_import_counts_pages_as_their_owner_does, Source)
        .decided_by("devmm_ioctl_mem_import_local_server, svm_master_mem_share.c"),
    rule!(a_device_maps_giant_pages_of_the_host_in_gibibytes, Inferred)
        .decided_by("devmm_ioctl_vmma_info_pack, svm_master_mem_map.c"),
    rule!(importing_twice_on_a_device_is_efault, Ran).decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(importing_again_after_releasing_is_granted, Ran)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(an_import_cannot_be_exported, Ran).decided_by("devmm_master_mem_export, svm_master_mem_share.c"),
    rule!(releasing_an_import_tells_so, Source).decided_by("devmm_mem_release_proc, svm_master_mem_create.c"),
    rule!(without_a_list_anyone_imports, Ran).decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(an_importer_does_not_stop_giving_up_the_list_again, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
    rule!(a_process_that_started_after_it_was_listed_is_eacces, Ran)
        .decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(a_process_may_be_listed_before_it_opens_a_session, Ran)
        .decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(imported_host_memory_is_the_exporters, Ran).decided_by("devmm_phy_addr_blk_init_in_same_os, svm_mem_share.c"),
    rule!(imported_device_memory_is_the_exporters, Inferred)
        .decided_by("devmm_agent_mem_import, svm_master_mem_share.c"),
    rule!(imported_memory_is_not_local, Source).decided_by("devmm_ioctl_mem_map, svm_master_mem_map.c"),
    rule!(normal_host_memory_is_not_imported_on_a_device, Ran)
        .decided_by("devmm_agent_mem_import, svm_master_mem_share.c")
        .since(Generation::V9_0_0),
    rule!(an_exporter_imports_on_the_host_what_a_device_has, Inferred)
        .decided_by("devmm_get_agent_target_blk_info, svm_master_mem_share.c"),
    rule!(host_views_of_device_memory_are_not_copied_to_device_memory, Ran)
        .decided_by("devmm_make_single_dma_blk_list, devmm_proc_mem_copy.c"),
    rule!(host_views_of_device_memory_belong_to_the_host, Ran)
        .decided_by("devmm_ioctl_mem_query_owner, svm_master_mem_map.c"),
    rule!(an_exporter_imports_on_another_device, Inferred)
        .decided_by("devmm_agent_mem_import, svm_master_mem_share.c")
        .needs(&[Need::TwoDevices]),
    rule!(local_handles_of_other_types_are_imported_alike, Ran)
        .decided_by("_devmm_ioctl_mem_import, svm_master_mem_share.c")
        .needs(&[Need::Sdid]),
    rule!(the_host_imports_nothing_of_another_server, Ran)
        .decided_by("devmm_import_para_check, svm_master_mem_share.c")
        .needs(&[Need::Sdid]),
    rule!(memory_outlives_its_exporters_handle, Ran)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(memory_outlives_its_killed_exporter, Inferred)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(a_share_can_be_imported_after_its_exporters_death_while_someone_holds_it, Inferred)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(a_share_dies_with_its_last_holder, Ran)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(a_killed_exporters_share_is_gone, Inferred)
        .decided_by("devmm_share_id_map_node_destroy_all, svm_master_mem_share.c"),
    rule!(a_closed_device_drops_its_shares, Inferred)
        .decided_by("devmm_share_id_map_node_destroy_by_devid, svm_master_mem_share.c"),
    rule!(a_closed_device_leaves_host_shares_alone, Ran)
        .decided_by("devmm_share_id_map_node_destroy_by_devid, svm_master_mem_share.c"),
    rule!(an_importers_listing_outlives_its_closed_device, Inferred)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(of_two_threads_that_import_one_wins, Ran).decided_by("devmm_pid_set_share_status, svm_master_mem_share.c"),
    rule!(importing_on_no_device_is_refused, Source).decided_by("devmm_convert_id_from_vir_to_phy, devmm_proc_info.c"),
    rule!(host_views_are_mapped_in_heaps_of_both_kinds, Ran).decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(host_views_are_mapped_with_the_reported_parameters, Ran)
        .decided_by("devmm_mem_map_info_check, svm_mem_map.c"),
    rule!(a_share_outlives_its_closed_device_while_the_host_sees_it, Ran)
        .decided_by("devmm_share_agent_blk_put_with_share_id, svm_master_mem_share.c"),
    rule!(an_import_in_the_name_of_another_server_is_never_forgotten, Ran)
        .decided_by("devmm_agent_mem_release_private_proc, svm_master_mem_create.c")
        .since(Generation::V26_1)
        .needs(&[Need::Sdid, Need::Leak]),
    rule!(an_exporter_is_known_by_its_process_id_alone, Ran)
        .decided_by("devmm_share_mem_set_attr_no_wlist_in_server, svm_master_mem_share.c"),
];

fn importing_an_unknown_type_is_eopnotsupp(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    let first_unknown = if host.generation < Generation::V9_0_0 { 2 } else { 3 };
    for kind in [first_unknown, 99] {
        let para = MemImport { share, exporter: HOST_ID, kind, ..Default::default() };
        session.import_raw(HOST_ID, para).refused(EOPNOTSUPP)?;
    }
    Ok(())
}

fn importing_an_unknown_share_is_efault(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.import(HOST_ID, HOST_ID, share + 1000).refused(EFAULT)?;
    session.import(HOST_ID, HOST_ID, -1).refused(EFAULT)
}

fn importing_from_no_device_is_refused(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.import(HOST_ID, ABSENT, share).refused(EINVAL)?;
    session.import(HOST_ID, svm::DEVICE_IDS, share).refused(ENODEV)?;
    // The share is not looked up by the physical id.
    let para = MemImport { share, exporter: ABSENT, exporter_physical: HOST_ID, ..Default::default() };
    session.import_raw(HOST_ID, para).refused(EINVAL)
}

fn importing_ones_own_share_where_it_is_is_eacces(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.import(HOST_ID, HOST_ID, share).refused(EACCES)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    session.import(HOST_ID, HOST_ID, share).refused(EACCES)
}

fn a_refused_own_import_burns_no_id(host: &Host) -> Verdict {
    let (session, handle, share) = exporter(host)?;
    session.import(HOST_ID, HOST_ID, share).refused(EACCES)?;
    equal("next id", session.host_huge(MIB2).granted()?.id, handle.id + 1)
}

fn an_untrusted_process_is_eacces(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| Session::host(host)?.import(HOST_ID, HOST_ID, share).refused(EACCES))?;
    let (_session, _, share) = exporter(host)?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

fn a_refused_import_burns_an_id(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| {
        let session = Session::host(host)?;
        session.import(HOST_ID, HOST_ID, share).refused(EACCES)?;
        equal("first id", session.host_huge(MIB2).granted()?.id, 1)
    })?;
    let (_session, _, share) = exporter(host)?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

/// Another process, trusted, runs `body` with a host share.
fn as_importer(host: &Host, body: impl FnOnce(&Session, i32) -> Verdict) -> Verdict {
    let mut peer = importer(|_, share| body(&Session::host(host)?, share))?;
    let (session, _, share) = exporter(host)?;
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.finish()
}

/// Another process, trusted, runs `body` with a share of device 0.
fn as_device_importer(host: &Host, body: impl FnOnce(&Session, i32) -> Verdict) -> Verdict {
    let mut peer = importer(|_, share| body(&Session::start(host)?, share))?;
    let (session, _, share) = device_exporter(host)?;
    invite(&mut peer, &session, 0, share)?;
    peer.finish()
}

fn a_trusted_process_imports_host_memory(host: &Host) -> Verdict {
    as_importer(host, |session, share| session.import(HOST_ID, HOST_ID, share).granted().map(drop))
}

fn a_trusted_process_imports_device_memory(host: &Host) -> Verdict {
    as_device_importer(host, |session, share| session.import(0, 0, share).granted().map(drop))
}

fn an_import_reports_what_was_exported(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        let para = MemImport { share, exporter: HOST_ID, memory: 77, ..Default::default() };
        let answer = session.import_raw(HOST_ID, para).granted()?;
        equal("side", answer.side, svm::SIDE_HOST)?;
        equal("module", answer.module, MODULE)?;
        equal("page", answer.page, svm::PAGE_HUGE)?;
        equal("pages", answer.pages, 2)?;
        // 8.5.0 does not return the kind of memory: the value passed in stays.
        equal("memory", answer.memory, if host.generation.delta().import_tells_memory { 0 } else { 77 })
    })
}

/// A session that imported 1 GiB pages of the host, two of them, on its device 0.
fn importer_of_giant_pages(host: &Host) -> Result<(Session, MemImport), Failure> {
    let session = Session::start(host)?;
    let para = svm::MemCreate { memory: svm::MEMORY_P2P_DDR, ..create_of(svm::SIDE_HOST, svm::PAGE_GIANT, 2 * GIB) };
    let handle = match session.create(HOST_ID, para) {
        Err(ENOMEM) => return Err(Failure::skipped("this host has no two free pages of 1 GiB")),
        answer => answer.granted()?,
    };
    let share = session.export(&handle).granted()?;
    session.trust(HOST_ID, share, &[bare_tgid_of(&session)?]).granted()?;
    let answer = session.import_raw(0, MemImport { share, exporter: HOST_ID, ..Default::default() }).granted()?;
    Ok((session, answer))
}

fn an_import_counts_pages_as_their_owner_does(host: &Host) -> Verdict {
    let (_session, answer) = importer_of_giant_pages(host)?;
    equal("side", answer.side, svm::SIDE_DEVICE)?;
    equal("page", answer.page, svm::PAGE_GIANT)?;
    equal("pages", answer.pages, 2)
}

fn a_device_maps_giant_pages_of_the_host_in_gibibytes(host: &Host) -> Verdict {
    let (session, MemImport { id, side, page, pages, module, .. }) = importer_of_giant_pages(host)?;
    let handle = Handle { device: 0, id, side, page, pages, module };
    let address = session.reserve(GIB)?;
    session.map(&Handle { page: svm::PAGE_HUGE, ..handle }, address, GIB).refused(EINVAL)?;
    session.map(&handle, address, MIB2).refused(EINVAL)?;
    session.map(&handle, address, GIB).granted()?;
    session.unmap(address).granted()?;
    session.release(&handle).granted().map(drop)
}

fn importing_twice_on_a_device_is_efault(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        session.import(HOST_ID, HOST_ID, share).granted()?;
        session.import(HOST_ID, HOST_ID, share).refused(EFAULT)
    })
}

fn importing_again_after_releasing_is_granted(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        session.release(&handle).granted()?;
        session.import(HOST_ID, HOST_ID, share).granted().map(drop)
    })
}

fn an_import_cannot_be_exported(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        session.export(&handle).refused(EINVAL)
    })
}

fn releasing_an_import_tells_so(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        equal("kind", session.release(&handle).granted()?.kind, svm::RELEASED_IMPORT)
    })
}

fn without_a_list_anyone_imports(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| Session::host(host)?.import(HOST_ID, HOST_ID, share).granted().map(drop))?;
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

fn an_importer_does_not_stop_giving_up_the_list_again(host: &Host) -> Verdict {
    let mut peer = importer(|link, share| {
        let session = Session::host(host)?;
        session.import(HOST_ID, HOST_ID, share).granted()?;
        link.send(0)?;
        link.receive().map(drop)
    })?;
    let (session, _, share) = exporter(host)?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    peer.link.receive()?;
    peer.link.send(share as u64)?;
    peer.link.receive()?;
    session.set_attr(HOST_ID, share, 0, 1).granted()?;
    peer.link.send(0)?;
    peer.finish()
}

fn a_process_that_started_after_it_was_listed_is_eacces(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        let (session, _, share) = exporter(host)?;
        let pid = link.receive()? as i32;
        session.trust(HOST_ID, share, &[pid]).granted()?;
        link.send(share as u64)?;
        link.receive().map(drop)
    })?;
    // SAFETY: getpid has no preconditions.
    if bare_tgid()? != unsafe { libc::getpid() } {
        return Err(Failure::skipped("process ids can only be chosen outside of pid namespaces"));
    }
    // Reuses the id of a process that just ended.
    let pid = match fork() {
        0 => leave(0),
        pid => pid,
    };
    wait(pid);
    peer.link.send(pid as u64)?;
    let share = peer.link.receive()? as i32;
    let child = fork_as(pid);
    if child == 0 {
        let code = match Session::host(host).map(|session| session.import(HOST_ID, HOST_ID, share)) {
            Ok(Err(EACCES)) => 0,
            Ok(Ok(_)) => 1,
            Ok(Err(_)) => 2,
            Err(_) => 3,
        };
        leave(code);
    }
    if child != pid {
        return Err(Failure::skipped("a process's id cannot be chosen here (it needs CAP_CHECKPOINT_RESTORE)"));
    }
    equal("end of the process (0 refused with EACCES, 1 granted, 2 refused otherwise)", wait(child), End::Exit(0))?;
    peer.link.send(0)?;
    peer.finish()
}

fn bare_tgid_of(session: &Session) -> Result<i32, Failure> {
    session.identity().map(|identity| identity.tgid)
}

/// fork(2) with a chosen process id; negative if that is not allowed.
fn fork_as(pid: i32) -> i32 {
    #[repr(C)]
    #[derive(Default)]
    struct CloneArgs {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
        cgroup: u64,
    }
    let ids = [pid];
    let args = CloneArgs {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: ids.as_ptr() as u64,
        set_tid_size: 1,
        ..Default::default()
    };
    // SAFETY: without flags clone3 is a fork: the child continues here with copies of everything.
    // It only makes system calls of its own and ends with _exit.
    unsafe { libc::syscall(libc::SYS_clone3, std::ptr::from_ref(&args), size_of::<CloneArgs>()) as i32 }
}

fn a_process_may_be_listed_before_it_opens_a_session(host: &Host) -> Verdict {
    // Every importer of this file is listed before it opens its session; this one has not opened
    // any file of the driver by then.
    let mut peer = Peer::start(|link| {
        let share = link.receive()? as i32;
        Session::host(host)?.import(HOST_ID, HOST_ID, share).granted().map(drop)
    })?;
    let (session, _, share) = exporter(host)?;
    // SAFETY: getpid has no preconditions.
    if bare_tgid_of(&session)? != unsafe { libc::getpid() } {
        return Err(Failure::skipped("the other process's id in the initial pid namespace is not known"));
    }
    session.trust(HOST_ID, share, &[peer.pid]).granted()?;
    peer.link.send(share as u64)?;
    peer.finish()
}

fn imported_host_memory_is_the_exporters(host: &Host) -> Verdict {
    let mut peer = importer(|link, share| {
        let session = Session::host(host)?;
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        let address = session.reserve(2 * MIB2)?;
        session.map(&handle, address, 2 * MIB2).granted()?;
        equal("the exporter's word", peek(address + 8), 0x1111)?;
        poke(address + 16, 0x2222);
        // An emulated driver may need a system call to make the store visible.
        session.address_info(address).granted()?;
        link.send(0)?;
        link.receive().map(drop)
    })?;
    let (session, handle, share) = exporter(host)?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    poke(address + 8, 0x1111);
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.link.receive()?;
    eventually("the importer's word is seen", || peek(address + 16) == 0x2222)?;
    peer.link.send(0)?;
    peer.finish()
}

/// Imports a share of device 0 and maps it.
fn map_import(session: &Session, share: i32) -> Result<(Handle, u64), Failure> {
    let handle = session.import(0, 0, share).granted()?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    Ok((handle, address))
}

fn imported_device_memory_is_the_exporters(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| {
        let session = Session::start(host)?;
        let (_, address) = map_import(&session, share)?;
        equal("the exporter's bytes", session.read(address + 100, 3).granted()?, b"one".to_vec())?;
        session.write(address + 200, b"two").granted()
    })?;
    let (session, handle, share) = device_exporter(host)?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    session.write(address + 100, b"one").granted()?;
    invite(&mut peer, &session, 0, share)?;
    peer.finish()?;
    equal("the importer's bytes", session.read(address + 200, 3).granted()?, b"two".to_vec())
}

fn imported_memory_is_not_local(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        let address = session.reserve(2 * MIB2)?;
        session.map(&handle, address, 2 * MIB2).granted()?;
        equal("local", session.owner(address, 2 * MIB2).granted()?.local, 0)
    })
}

fn normal_host_memory_is_not_imported_on_a_device(host: &Host) -> Verdict {
    let mut peer = importer(|_, share| {
        let session = Session::start(host)?;
        session.import(0, HOST_ID, share).refused(EOPNOTSUPP)
    })?;
    let session = Session::host(host)?;
    let handle = session.host_normal(crate::manager::page_size()).granted()?;
    let share = session.export(&handle).granted()?;
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.finish()
}

/// Memory of device 0 that is mapped twice: imported on the host by its own exporter (the second
/// value), and on the device (the third).
fn host_view(host: &Host) -> Result<(Session, u64, u64), Failure> {
    let session = Session::start(host)?;
    let (handle, far) = session.device_mapping(0, 2 * MIB2)?;
    let share = session.export(&handle).granted()?;
    session.trust(0, share, &[bare_tgid_of(&session)?]).granted()?;
    let view = session.import(HOST_ID, 0, share).granted()?;
    let near = session.reserve(2 * MIB2)?;
    session.map(&view, near, 2 * MIB2).granted()?;
    Ok((session, near, far))
}

fn an_exporter_imports_on_the_host_what_a_device_has(host: &Host) -> Verdict {
    let (session, near, far) = host_view(host)?;
    session.write(far + 8, &0x77u64.to_le_bytes()).granted()?;
    equal("word through the CPU", peek(near + 8), 0x77)?;
    poke(near + 16, 0x88);
    equal("word through a copy", session.read(far + 16, 8).granted()?, 0x88u64.to_le_bytes().to_vec())
}

fn host_views_of_device_memory_are_not_copied_to_device_memory(host: &Host) -> Verdict {
    let (session, near, far) = host_view(host)?;
    session.copy(far, near, 64, svm::COPY_DETECT).refused(EOPNOTSUPP)?;
    session.copy(near, far, 64, svm::COPY_DETECT).refused(EOPNOTSUPP)?;
    session.copy_async(far, near, 64).refused(EOPNOTSUPP)?;
    let bytes = [0u8; 64];
    equal("direction", session.copy(near, bytes.as_ptr() as u64, 64, svm::COPY_DETECT).granted()?, 0)?;
    equal("left to the caller", session.fill(near, 1, 64).granted()?, true)
}

fn host_views_of_device_memory_belong_to_the_host(host: &Host) -> Verdict {
    let (session, near, _) = host_view(host)?;
    let owner = session.owner(near, 2 * MIB2).granted()?;
    equal("device", owner.device, HOST_ID)?;
    equal("local", owner.local, 0)?;
    session.set_access(near, 2 * MIB2, HOST_ID, svm::ACCESS_READ_WRITE).granted()?;
    // Only seen on PCI Express, where devices have no access to host memory at all.
    if host.hccs {
        return Ok(());
    }
    session.set_access(near, 2 * MIB2, 0, svm::ACCESS_READ_WRITE).refused(EOPNOTSUPP)
}

fn an_exporter_imports_on_another_device(host: &Host) -> Verdict {
    let (session, _, share) = device_exporter(host)?;
    session.setup(1)?;
    session.import(0, 0, share).refused(EACCES)?;
    session.trust(0, share, &[bare_tgid_of(&session)?]).granted()?;
    session.import(1, 0, share).granted()?;
    session.import(1, 0, share).refused(EFAULT)
}

fn local_handles_of_other_types_are_imported_alike(host: &Host) -> Verdict {
    let Some(sdid) = host.sdid else { return Ok(()) };
    as_device_importer(host, |session, share| {
        // 8.5.0 knows one type fewer.
        let posix = (host.generation >= Generation::V9_0_0).then_some(svm::HANDLE_POSIX);
        for kind in [Some(svm::HANDLE_FABRIC), posix].into_iter().flatten() {
            let para = MemImport { share, kind, sdid, ..Default::default() };
            let answer = session.import_raw(0, para).granted()?;
            let para = svm::MemRelease { id: answer.id, side: answer.side, pages: answer.pages, ..Default::default() };
            session.svm.call(Op::MemRelease, 0, &para).granted()?;
        }
        Ok(())
    })
}

/// The super-pod id of a device like this one of another server. Never 0, which
/// [`Session::import_raw`] takes for this server.
fn another_server(sdid: u32) -> u32 {
    const SERVER: u32 = 1 << 22;
    if sdid == SERVER { 2 * SERVER } else { sdid ^ SERVER }
}

fn the_host_imports_nothing_of_another_server(host: &Host) -> Verdict {
    let Some(sdid) = host.sdid else { return Ok(()) };
    as_importer(host, |session, share| {
        let foreign = another_server(sdid);
        let para = MemImport { share, exporter: HOST_ID, sdid: foreign, ..Default::default() };
        session.import_raw(HOST_ID, para).refused(EOPNOTSUPP)
    })
}

fn memory_outlives_its_exporters_handle(host: &Host) -> Verdict {
    let mut peer = importer(|link, share| {
        let session = Session::host(host)?;
        let handle = session.import(HOST_ID, HOST_ID, share).granted()?;
        link.send(0)?;
        link.receive()?;
        let address = session.reserve(2 * MIB2)?;
        session.map(&handle, address, 2 * MIB2).granted()?;
        equal("word", peek(address), 0x4242)
    })?;
    let (session, handle, share) = exporter(host)?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&handle, address, 2 * MIB2).granted()?;
    poke(address, 0x4242);
    session.unmap(address).granted()?;
    invite(&mut peer, &session, HOST_ID, share)?;
    peer.link.receive()?;
    session.release(&handle).granted()?;
    peer.link.send(0)?;
    peer.finish()
}

/// A process that exports memory of device 0 that contains "held" to the two processes whose ids it
/// receives, and then waits.
fn exporting_peer(host: &Host) -> Result<Peer, Failure> {
    Peer::start(|link| {
        let (session, handle, share) = device_exporter(host)?;
        let address = session.reserve(2 * MIB2)?;
        session.map(&handle, address, 2 * MIB2).granted()?;
        session.write(address, b"held").granted()?;
        let pids = [link.receive()? as i32, link.receive()? as i32];
        session.trust(0, share, &pids).granted()?;
        link.send(share as u64)?;
        link.receive().map(drop)
    })
}

fn memory_outlives_its_killed_exporter(host: &Host) -> Verdict {
    let mut peer = exporting_peer(host)?;
    let session = Session::start(host)?;
    peer.link.send(bare_tgid_of(&session)? as u64)?;
    peer.link.send(0)?;
    let share = peer.link.receive()? as i32;
    let (_, address) = map_import(&session, share)?;
    peer.kill();
    equal("bytes", session.read(address, 4).granted()?, b"held".to_vec())?;
    session.write(address, b"more").granted()?;
    equal("bytes", session.read(address, 4).granted()?, b"more".to_vec())
}

fn a_share_can_be_imported_after_its_exporters_death_while_someone_holds_it(host: &Host) -> Verdict {
    let mut other = importer(|_, share| {
        let session = Session::start(host)?;
        let (_, address) = map_import(&session, share)?;
        equal("bytes", session.read(address, 4).granted()?, b"held".to_vec())
    })?;
    let mut peer = exporting_peer(host)?;
    let session = Session::start(host)?;
    peer.link.send(bare_tgid_of(&session)? as u64)?;
    peer.link.send(other.link.receive()?)?;
    let share = peer.link.receive()? as i32;
    session.import(0, 0, share).granted()?;
    peer.kill();
    other.link.send(share as u64)?;
    other.finish()
}

fn a_share_dies_with_its_last_holder(host: &Host) -> Verdict {
    let (session, handle, share) = exporter(host)?;
    session.get_info(HOST_ID, share).granted()?;
    session.release(&handle).granted()?;
    session.get_info(HOST_ID, share).refused(EFAULT)?;
    session.trust(HOST_ID, share, &[1]).refused(EFAULT)
}

fn a_killed_exporters_share_is_gone(host: &Host) -> Verdict {
    let mut peer = exporting_peer(host)?;
    let session = Session::start(host)?;
    peer.link.send(bare_tgid_of(&session)? as u64)?;
    peer.link.send(0)?;
    let share = peer.link.receive()? as i32;
    session.get_info(0, share).granted()?;
    peer.kill();
    eventually("the share is gone", || session.get_info(0, share) == Err(EFAULT))?;
    session.import(0, 0, share).refused(EFAULT)
}

fn a_closed_device_drops_its_shares(host: &Host) -> Verdict {
    let (session, _, share) = device_exporter(host)?;
    session.close_device(0).granted()?;
    session.get_info(0, share).refused(EFAULT)
}

fn a_closed_device_leaves_host_shares_alone(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.host_huge(MIB2).granted()?;
    let share = session.export(&handle).granted()?;
    session.close_device(0).granted()?;
    session.get_info(HOST_ID, share).granted().map(drop)
}

fn an_importers_listing_outlives_its_closed_device(host: &Host) -> Verdict {
    as_device_importer(host, |session, share| {
        session.import(0, 0, share).granted()?;
        session.close_device(0).granted()?;
        session.setup(0)?;
        session.import(0, 0, share).granted().map(drop)
    })
}

fn of_two_threads_that_import_one_wins(host: &Host) -> Verdict {
    as_importer(host, |session, share| {
        for _ in 0..20 {
            let fd = session.svm.file.fd();
            let request = session.svm.request_of(Op::MemImport);
            let para = MemImport { share, exporter: HOST_ID, sdid: session.svm.sdid, ..Default::default() };
            let import = move || {
                let mut arg = svm::Arg::new(HOST_ID, &para);
                crate::manager::ioctl(fd, request, std::ptr::from_mut(&mut arg) as u64).map(|_| arg.para::<MemImport>())
            };
            let other = std::thread::spawn(import);
            let answers = [import(), other.join().map_err(|_| Failure::broken("a thread panicked"))?];
            let losers = answers.iter().filter(|answer| matches!(answer, Err(EFAULT))).count();
            let Some(Ok(won)) = answers.iter().find(|answer| answer.is_ok()) else {
                return Err(Failure::broken(format!("no thread succeeded: {answers:?}")));
            };
            equal("losers with EFAULT", losers, 1)?;
            let para = svm::MemRelease { id: won.id, side: won.side, pages: won.pages, ..Default::default() };
            session.svm.call(Op::MemRelease, HOST_ID, &para).granted()?;
        }
        Ok(())
    })
}

fn importing_on_no_device_is_refused(host: &Host) -> Verdict {
    let (session, _, share) = exporter(host)?;
    session.import(ABSENT, HOST_ID, share).refused(EINVAL)?;
    session.import(svm::DEVICE_IDS, HOST_ID, share).refused(ENODEV)
}

/// A share of device 0, imported on the host by its own exporter.
fn host_import(host: &Host) -> Result<(Session, Handle, i32), Failure> {
    let (session, _, share) = device_exporter(host)?;
    session.trust(0, share, &[bare_tgid_of(&session)?]).granted()?;
    let view = session.import(HOST_ID, 0, share).granted()?;
    Ok((session, view, share))
}

fn host_views_are_mapped_in_heaps_of_both_kinds(host: &Host) -> Verdict {
    let (session, view, _) = host_import(host)?;
    let huge = session.reserve(2 * MIB2)?;
    session.map(&view, huge, 2 * MIB2).granted()?;
    let small = crate::session::heap_address(session.heap_of(svm::HEAP_CHUNK)?);
    session.alloc(small, 2 * MIB2).granted()?;
    // The size must still be a multiple of the handle's own page.
    session.map(&view, small, 2 * crate::manager::page_size()).refused(EINVAL)?;
    session.map(&view, small, MIB2).granted()
}

fn host_views_are_mapped_with_the_reported_parameters(host: &Host) -> Verdict {
    let (session, view, _) = host_import(host)?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&Handle { module: MODULE + 1, ..view }, address, 2 * MIB2).refused(EINVAL)?;
    session.map(&Handle { pages: 1, ..view }, address, 2 * MIB2).refused(EINVAL)?;
    session.map(&view, address, 3 * MIB2).refused(libc::ENOMEM)?;
    session.map(&view, address, 2 * MIB2).granted()
}

fn a_share_outlives_its_closed_device_while_the_host_sees_it(host: &Host) -> Verdict {
    let (session, view, share) = host_import(host)?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&view, address, 2 * MIB2).granted()?;
    poke(address, 0x3131);
    session.close_device(0).granted()?;
    session.get_info(0, share).granted()?;
    equal("word through the CPU", peek(address), 0x3131)?;
    session.unmap(address).granted()?;
    session.release(&view).granted()?;
    session.get_info(0, share).refused(EFAULT)
}

fn an_exporter_is_known_by_its_process_id_alone(host: &Host) -> Verdict {
    // SAFETY: getpid has no preconditions.
    if bare_tgid()? != unsafe { libc::getpid() } {
        return Err(Failure::skipped("process ids can only be chosen outside of pid namespaces"));
    }
    let mut peer = Peer::start(|link| {
        let (session, _, share) = exporter(host)?;
        session.set_attr(HOST_ID, share, 0, 1).granted()?;
        link.send(share as u64)?;
        link.receive().map(drop)
    })?;
    let share = peer.link.receive()? as i32;
    let mut holder = Peer::start(|link| {
        let session = Session::host(host)?;
        session.import(HOST_ID, HOST_ID, share).granted()?;
        link.send(0)?;
        link.receive().map(drop)
    })?;
    holder.link.receive()?;
    peer.kill();
    let child = fork_as(peer.pid);
    if child == 0 {
        let told = Session::host(host).map(|session| {
            // Only the exporter may give up the list again.
            (session.set_attr(HOST_ID, share, 0, 1), session.import(HOST_ID, HOST_ID, share).map(drop))
        });
        leave(match told {
            Ok((Ok(()), Err(EACCES))) => 0,
            Ok((Ok(()), _)) => 1,
            Ok(_) => 2,
            Err(_) => 3,
        });
    }
    if child != peer.pid {
        return Err(Failure::skipped("a process's id cannot be chosen here (it needs CAP_CHECKPOINT_RESTORE)"));
    }
    equal("end of the process (0: taken for the exporter)", wait(child), End::Exit(0))?;
    holder.link.send(0)?;
    holder.finish()
}

fn an_import_in_the_name_of_another_server_is_never_forgotten(host: &Host) -> Verdict {
    let Some(sdid) = host.sdid else { return Ok(()) };
    as_device_importer(host, |session, share| {
        let foreign = MemImport { share, sdid: another_server(sdid), ..Default::default() };
        let answer = session.import_raw(0, foreign).granted()?;
        let para = svm::MemRelease { id: answer.id, side: answer.side, pages: answer.pages, ..Default::default() };
        // The release is sent to the other server; what it answers is not the question here.
        let _ = session.svm.call(Op::MemRelease, 0, &para);
        session.import_raw(0, foreign).refused(EFAULT)?;
        session.import(0, 0, share).refused(EFAULT)
    })
}
