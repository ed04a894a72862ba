//! Memory shared by name: the vendor's own way to share plain allocations between processes.

use super::plain_memory::{heap, managed, populated};
use crate::host::Host;
use crate::peer::{Link, Peer};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{MIB2, Session, eventually};
use ascend_ioctl::svm::{self, COPY_DETECT, HEAP_HUGE, Op, SUB_SVM};
use libc::{EACCES, EADDRINUSE, EADDRNOTAVAIL, EBUSY, EFAULT, EINVAL, EOPNOTSUPP, EPERM};

pub const RULES: &[Rule] = &[
    rule!(a_name_has_64_characters, Ran).decided_by("_devmm_ipc_mem_name_create, svm_shmem_interprocess.c"),
    rule!(a_name_can_be_queried_for_its_memory, Ran).decided_by("devmm_ioctl_ipc_mem_query, svm_shmem_interprocess.c"),
    rule!(an_unknown_name_is_einval, Ran).decided_by("_devmm_ipc_node_get, svm_shmem_node.c"),
    rule!(a_name_needs_room_for_65_bytes, Ran).decided_by("devmm_ioctl_ipc_mem_create, svm_shmem_interprocess.c"),
    rule!(memory_of_the_host_has_no_name, Ran).decided_by("devmm_ipc_mem_create_para_check, svm_shmem_interprocess.c"),
    rule!(memory_without_pages_has_no_name, Ran)
        .decided_by("devmm_ipc_mem_create_para_check, svm_shmem_interprocess.c"),
    rule!(a_named_range_begins_at_a_page_and_stays_in_its_heap, Ran)
        .decided_by("devmm_ipc_mem_create_para_check, svm_shmem_interprocess.c"),
    rule!(memory_can_have_several_names, Ran).decided_by("devmm_ipc_node_create, svm_shmem_node.c"),
    rule!(mapped_device_memory_can_have_a_name, Ran).decided_by("devmm_ipc_mem_node_init, svm_shmem_interprocess.c"),
    rule!(named_memory_cannot_be_unmapped, Ran).decided_by("devmm_ipc_vmmas_occupy_inc, svm_shmem_interprocess.c"),
    rule!(exported_memory_has_no_name, Ran).decided_by("devmm_ipc_mem_create_para_check, svm_shmem_interprocess.c"),
    rule!(destroying_a_name_twice_is_einval, Ran).decided_by("devmm_ioctl_ipc_mem_destroy, svm_shmem_interprocess.c"),
    rule!(only_the_creator_destroys_a_name, Ran).decided_by("_devmm_ipc_node_uninit, svm_shmem_node.c"),
    rule!(between_1_and_31_processes_are_listed_at_once, Ran)
        .decided_by("devmm_ipc_node_set_pids_check, svm_shmem_node.c"),
    rule!(the_creator_cannot_list_itself, Ran).decided_by("_devmm_ipc_node_set_pids, svm_shmem_node.c"),
    rule!(only_the_creator_lists_processes, Ran).decided_by("devmm_ipc_node_set_pids_check, svm_shmem_node.c"),
    rule!(processes_of_this_server_are_listed_with_its_id, Ran)
        .decided_by("devmm_ipc_pod_get_devid_and_sdid, svm_shmem_node_pod.c")
        .needs(&[Need::Sdid]),
    rule!(processes_of_a_server_that_does_not_answer_are_efault, Inferred)
        .decided_by("devmm_ipc_pod_setpid_msg_send, svm_shmem_node_pod.c")
        .needs(&[Need::Sdid]),
    rule!(a_name_of_another_form_lists_nobody_in_the_pod, Ran)
        .decided_by("devmm_ipc_node_get_inst_by_name, svm_shmem_node.c"),
    rule!(a_name_has_two_attributes, Ran).decided_by("devmm_ioctl_ipc_set_attr, svm_shmem_interprocess.c"),
    rule!(attributes_of_a_name_have_two_values, Ran)
        .decided_by("devmm_ipc_set_no_wlist_in_server_attr, svm_shmem_node.c"),
    rule!(only_the_creator_sets_attributes_of_a_name, Ran).decided_by("devmm_ipc_set_mem_map_attr, svm_shmem_node.c"),
    rule!(a_name_without_a_trust_list_lists_nobody, Ran).decided_by("devmm_ipc_node_set_pids, svm_shmem_node.c"),
    rule!(a_name_with_listed_processes_keeps_its_trust_list, Ran)
        .decided_by("devmm_ipc_set_no_wlist_in_server_attr, svm_shmem_node.c"),
    rule!(a_listed_process_opens_prefetches_and_reads, Inferred)
        .decided_by("devmm_ipc_page_table_create_process, svm_master_advise.c"),
    rule!(an_opener_writes_the_owners_memory, Inferred)
        .decided_by("devmm_ipc_page_table_create_process, svm_master_advise.c"),
    rule!(mapped_memory_is_opened_by_its_name, Inferred)
        .decided_by("devmm_ipc_page_table_create_process, svm_master_advise.c"),
    rule!(a_process_that_is_not_listed_cannot_open, Ran).decided_by("_devmm_ipc_node_get_wlist, svm_shmem_node.c"),
    rule!(any_process_opens_a_name_without_a_trust_list, Ran).decided_by("_devmm_ipc_node_get_wlist, svm_shmem_node.c"),
    rule!(any_process_queries_a_name, Ran).decided_by("devmm_ipc_query_node_attr, svm_shmem_node.c"),
    rule!(a_process_opens_a_name_once, Ran).decided_by("_devmm_ipc_node_get_wlist, svm_shmem_node.c"),
    rule!(two_names_at_one_address_are_eaddrinuse, Ran).decided_by("_devmm_ipc_open_check, svm_shmem_node.c"),
    rule!(a_name_is_opened_outside_of_reservations, Ran).decided_by("devmm_get_reserve_mem_attr, devmm_proc_info.c"),
    rule!(a_name_is_opened_in_an_allocation, Ran).decided_by("_devmm_find_first_page_ref, devmm_proc_info.c"),
    rule!(opened_memory_has_no_pages_before_the_prefetch, Ran)
        .decided_by("devmm_insert_host_page_range, devmm_proc_info.c"),
    rule!(opened_memory_belongs_to_one_device, Ran)
        .decided_by("devmm_ioctl_advise_populate, svm_master_advise.c")
        .needs(&[Need::TwoDevices]),
    rule!(opened_memory_is_not_copied_in_a_batch, Ran)
        .decided_by("devmm_memcpy_batch_mem_attr_check, svm_master_memcpy.c"),
    rule!(opened_memory_has_no_name_of_its_own, Ran)
        .decided_by("devmm_ipc_mem_create_para_check, svm_shmem_interprocess.c"),
    rule!(closing_where_nothing_is_open_is_einval, Ran).decided_by("devmm_ipc_proc_query_name_by_va, svm_shmem_node.c"),
    rule!(a_closed_name_can_be_opened_again, Ran).decided_by("_devmm_ipc_node_close, svm_shmem_node.c"),
    rule!(a_destroyed_name_cannot_be_opened, Ran).decided_by("_devmm_ipc_open_check, svm_shmem_node.c"),
    rule!(a_name_of_freed_memory_cannot_be_opened, Ran)
        .decided_by("devmm_ipc_proc_node_free_open_pages, svm_shmem_node.c"),
    rule!(a_destroyed_name_is_known_while_it_is_open, Ran).decided_by("devmm_ipc_node_destroy, svm_shmem_node.c"),
    rule!(a_name_ends_with_its_creator, Ran).decided_by("devmm_ipc_proc_node_recycle, svm_shmem_node.c"),
    rule!(closing_the_device_ends_its_names, Ran).decided_by("devmm_ipc_proc_node_create_recycle, svm_shmem_node.c"),
];

type Name = [u8; 65];

/// A name of the right form that no process created.
const UNKNOWN: &[u8; 64] = b"7fffffff0fffffffffffffff0000000000000000000000000000000000000000";

fn unknown() -> Name {
    let mut name = [0; 65];
    name[..64].copy_from_slice(UNKNOWN);
    name
}

fn create(session: &Session, address: u64, size: u64) -> Answer<Name> {
    let para = svm::IpcCreate { address, len: size, name_len: 65, ..Default::default() };
    session.svm.ask(Op::IpcMemCreate, 0, &para).map(|answer| answer.name)
}

fn destroy(session: &Session, name: &Name) -> Answer<()> {
    session.svm.call(Op::IpcMemDestroy, 0, &svm::IpcDestroy { name: *name }).map(drop)
}

fn query(session: &Session, name: &Name) -> Answer<svm::IpcQuery> {
    session.svm.ask(Op::IpcMemQuery, 0, &svm::IpcQuery { name: *name, ..Default::default() })
}

fn list(session: &Session, name: &Name, pids: &[i32]) -> Answer<()> {
    let mut para = svm::IpcSetPid { name: *name, num: pids.len() as u32, ..Default::default() };
    for (place, pid) in para.pids.iter_mut().zip(pids) {
        *place = *pid;
    }
    session.svm.call(Op::IpcMemSetPid, 0, &para).map(drop)
}

fn list_in_pod(session: &Session, name: &Name, pids: &[i32], sdid: u32) -> Answer<()> {
    let mut para = svm::IpcSetPid { name: *name, num: pids.len() as u32, sdid, ..Default::default() };
    for (place, pid) in para.pids.iter_mut().zip(pids) {
        *place = *pid;
    }
    session.svm.call(Op::IpcMemSetPidPod, 0, &para).map(drop)
}

fn set_attr(session: &Session, name: &Name, kind: u32, attr: u64) -> Answer<()> {
    session.svm.call(Op::IpcMemSetAttr, 0, &svm::IpcSetAttr { kind, attr, name: *name, ..Default::default() }).map(drop)
}

fn get_attr(session: &Session, name: &Name, kind: u32) -> Answer<u64> {
    let para = svm::IpcGetAttr { kind, name: *name, ..Default::default() };
    session.svm.ask(Op::IpcMemGetAttr, 0, &para).map(|answer| answer.attr)
}

fn open_on(session: &Session, device: u32, address: u64, name: &Name) -> Answer<()> {
    session.svm.call(Op::IpcMemOpen, device, &svm::IpcOpen { address, name: *name, ..Default::default() }).map(drop)
}

fn open(session: &Session, address: u64, name: &Name) -> Answer<()> {
    open_on(session, 0, address, name)
}

fn close(session: &Session, address: u64) -> Answer<()> {
    session.svm.call(Op::IpcMemClose, 0, &svm::IpcClose { address }).map(drop)
}

/// The route of a name's mappings, and whether it needs no trust list.
const ROUTE: u32 = 0;
const NO_TRUST_LIST: u32 = 1;

/// A session of a creator, its memory of 4 MiB, and its name.
fn creator(host: &Host) -> Result<(Session, u64, Name), Failure> {
    let session = Session::start(host)?;
    let address = populated(&session, 2 * MIB2)?;
    let name = create(&session, address, 2 * MIB2).granted()?;
    Ok((session, address, name))
}

fn a_name_has_64_characters(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    let text = String::from_utf8(name[..64].to_vec()).map_err(Failure::broken)?;
    equal("the process", &text[..8], &format!("{:08x}", session.identity()?.tgid))?;
    equal("the device", &text[24..26], &format!("{:02x}", host.physical[0]))?;
    equal("the end", name[64], 0)?;
    holds("digits only", text.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn a_name_can_be_queried_for_its_memory(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    let answer = query(&session, &name).granted()?;
    equal("size", answer.len, 2 * MIB2)?;
    equal("huge pages", answer.is_huge, 1)?;
    equal("device", answer.phy_devid, host.physical[0])
}

fn an_unknown_name_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    for name in [unknown(), [0; 65], [b'x'; 65]] {
        query(&session, &name).refused(EINVAL)?;
        destroy(&session, &name).refused(EINVAL)?;
        open(&session, address, &name).refused(EINVAL)?;
        list(&session, &name, &[1]).refused(EINVAL)?;
        set_attr(&session, &name, NO_TRUST_LIST, 1).refused(EINVAL)?;
        get_attr(&session, &name, NO_TRUST_LIST).refused(EINVAL)?;
    }
    Ok(())
}

fn a_name_needs_room_for_65_bytes(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let para = svm::IpcCreate { address, len: MIB2, name_len: 64, ..Default::default() };
    session.svm.call(Op::IpcMemCreate, 0, &para).refused(EINVAL)
}

fn memory_of_the_host_has_no_name(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let bytes = vec![0u8; 8192];
    create(&session, (bytes.as_ptr() as u64).next_multiple_of(4096), 4096).refused(EINVAL)?;
    let (_, mapped) = session.host_mapping(MIB2)?;
    create(&session, mapped, MIB2).refused(EINVAL)
}

fn memory_without_pages_has_no_name(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = managed(&session, MIB2)?;
    create(&session, address, MIB2).refused(EINVAL)?;
    let reserved = session.reserve(MIB2)?;
    create(&session, reserved, MIB2).refused(EADDRNOTAVAIL)
}

fn a_named_range_begins_at_a_page_and_stays_in_its_heap(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, 2 * MIB2)?;
    create(&session, address + 4096, 4096).refused(EINVAL)?;
    create(&session, address, 0).refused(EINVAL)?;
    create(&session, address, 2 << 30).refused(EINVAL)?;
    create(&session, address, 3 * MIB2).refused(EINVAL)?;
    // A part of the memory can have a name.
    create(&session, address + MIB2, 4096).granted().map(drop)
}

fn memory_can_have_several_names(host: &Host) -> Verdict {
    let (session, address, first) = creator(host)?;
    let second = create(&session, address, MIB2).granted()?;
    holds("the names differ", first != second)?;
    destroy(&session, &first).granted()?;
    equal("size", query(&session, &second).granted()?.len, MIB2)
}

fn mapped_device_memory_can_have_a_name(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    let name = create(&session, address, MIB2).granted()?;
    equal("huge pages", query(&session, &name).granted()?.is_huge, 1)?;
    destroy(&session, &name).granted()
}

fn named_memory_cannot_be_unmapped(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    let name = create(&session, address, MIB2).granted()?;
    session.unmap(address).refused(EBUSY)?;
    destroy(&session, &name).granted()?;
    session.unmap(address).granted()?;
    session.release(&handle).granted().map(drop)
}

fn exported_memory_has_no_name(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    session.export(&handle).granted()?;
    create(&session, address, MIB2).refused(EINVAL)
}

fn destroying_a_name_twice_is_einval(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    destroy(&session, &name).granted()?;
    destroy(&session, &name).refused(EINVAL)?;
    query(&session, &name).refused(EINVAL)
}

/// Sends a name.
fn send(link: &mut Link, name: &Name) -> Verdict {
    name[..64].chunks(8).try_for_each(|part| link.send(part.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))))
}

/// Receives a name.
fn receive(link: &mut Link) -> Result<Name, Failure> {
    let mut name = [0; 65];
    for part in name[..64].chunks_mut(8) {
        part.copy_from_slice(&link.receive()?.to_be_bytes());
    }
    Ok(name)
}

/// Runs `body` in another process that was listed for a name of this one's 4 MiB; `owner` runs here
/// before, with the name.
fn with_opener(
    host: &Host,
    listed: bool,
    owner: impl FnOnce(&Session, u64, &Name) -> Verdict,
    body: impl FnOnce(&Session, &Name) -> Verdict,
) -> Verdict {
    let mut peer = Peer::start(|link| {
        let session = Session::start(host)?;
        link.send(session.identity()?.tgid as u64)?;
        let name = receive(link)?;
        body(&session, &name)
    })?;
    let (session, address, name) = creator(host)?;
    let pid = peer.link.receive()? as i32;
    if listed {
        list(&session, &name, &[pid]).granted()?;
    }
    owner(&session, address, &name)?;
    send(&mut peer.link, &name)?;
    peer.finish()
}

fn nothing(_: &Session, _: u64, _: &Name) -> Verdict {
    Ok(())
}

fn only_the_creator_destroys_a_name(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| destroy(session, name).refused(EACCES))
}

fn between_1_and_31_processes_are_listed_at_once(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    list(&session, &name, &[]).refused(EINVAL)?;
    list(&session, &name, &[1; 32]).refused(EINVAL)?;
    list(&session, &name, &[0, 0]).refused(EINVAL)?;
    list(&session, &name, &[1; 31]).granted()
}

fn the_creator_cannot_list_itself(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    let own = session.identity()?.tgid;
    list(&session, &name, &[own]).refused(EINVAL)?;
    list(&session, &name, &[own, 1]).granted()
}

fn only_the_creator_lists_processes(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| list(session, name, &[1]).refused(EINVAL))
}

fn processes_of_this_server_are_listed_with_its_id(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    let sdid = session.svm.sdid;
    list_in_pod(&session, &name, &[1], sdid).granted()?;
    list_in_pod(&session, &name, &[], sdid).refused(EINVAL)?;
    list_in_pod(&session, &name, &[0], sdid).refused(EINVAL)?;
    list_in_pod(&session, &name, &[session.identity()?.tgid], sdid).refused(EINVAL)?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).refused(EPERM)
}

fn processes_of_a_server_that_does_not_answer_are_efault(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    // The server's number stands from bit 22 on.
    let elsewhere = session.svm.sdid ^ 1 << 31;
    list_in_pod(&session, &name, &[1], elsewhere).refused(EFAULT)?;
    list_in_pod(&session, &name, &[0], elsewhere).refused(EINVAL)
}

fn a_name_of_another_form_lists_nobody_in_the_pod(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for name in [[0; 65], [b'x'; 65], unknown()] {
        list_in_pod(&session, &name, &[1], session.svm.sdid).refused(EINVAL)?;
    }
    Ok(())
}

fn a_name_has_two_attributes(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    equal("route", get_attr(&session, &name, ROUTE).granted()?, 0)?;
    equal("no trust list", get_attr(&session, &name, NO_TRUST_LIST).granted()?, 0)?;
    set_attr(&session, &name, 2, 1).refused(EOPNOTSUPP)?;
    get_attr(&session, &name, 2).refused(EOPNOTSUPP)?;
    set_attr(&session, &name, ROUTE, 1).granted()?;
    equal("route", get_attr(&session, &name, ROUTE).granted()?, 1)
}

fn attributes_of_a_name_have_two_values(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    set_attr(&session, &name, ROUTE, 2).refused(EINVAL)?;
    set_attr(&session, &name, NO_TRUST_LIST, 2).refused(EINVAL)?;
    // The trust list cannot be switched on.
    set_attr(&session, &name, NO_TRUST_LIST, 0).refused(EOPNOTSUPP)?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).granted()?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).granted()
}

fn only_the_creator_sets_attributes_of_a_name(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        set_attr(session, name, ROUTE, 1).refused(EPERM)?;
        set_attr(session, name, NO_TRUST_LIST, 1).refused(EPERM)?;
        equal("read by another process", get_attr(session, name, ROUTE).granted()?, 0)
    })
}

fn a_name_without_a_trust_list_lists_nobody(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).granted()?;
    list(&session, &name, &[1]).refused(EPERM)
}

fn a_name_with_listed_processes_keeps_its_trust_list(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    list(&session, &name, &[1]).granted()?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).refused(EPERM)
}

fn write(session: &Session, address: u64, _: &Name) -> Verdict {
    session.write(address + MIB2, b"the owner's bytes").granted()
}

/// Opens a name, with its pages; the address.
fn opened(session: &Session, name: &Name) -> Result<u64, Failure> {
    let size = query(session, name).granted()?.len;
    let address = managed(session, size)?;
    open(session, address, name).granted()?;
    session.prefetch(0, address, size).granted()?;
    Ok(address)
}

fn a_listed_process_opens_prefetches_and_reads(host: &Host) -> Verdict {
    with_opener(host, true, write, |session, name| {
        let address = opened(session, name)?;
        equal("bytes", session.read(address + MIB2, 17).granted()?, b"the owner's bytes".to_vec())?;
        close(session, address).granted()?;
        session.free(address).granted()
    })
}

fn an_opener_writes_the_owners_memory(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        let session = Session::start(host)?;
        link.send(session.identity()?.tgid as u64)?;
        let name = receive(link)?;
        let address = opened(&session, &name)?;
        session.write(address, b"the opener's").granted()?;
        link.send(1)?;
        link.receive().map(drop)
    })?;
    let (session, address, name) = creator(host)?;
    list(&session, &name, &[peer.link.receive()? as i32]).granted()?;
    send(&mut peer.link, &name)?;
    peer.link.receive()?;
    equal("bytes", session.read(address, 12).granted()?, b"the opener's".to_vec())?;
    peer.link.send(0)?;
    peer.finish()
}

fn mapped_memory_is_opened_by_its_name(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        let session = Session::start(host)?;
        let name = receive(link)?;
        let address = opened(&session, &name)?;
        equal("bytes", session.read(address, 6).granted()?, b"mapped".to_vec())
    })?;
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.write(address, b"mapped").granted()?;
    let name = create(&session, address, MIB2).granted()?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).granted()?;
    send(&mut peer.link, &name)?;
    peer.finish()
}

fn a_process_that_is_not_listed_cannot_open(host: &Host) -> Verdict {
    with_opener(host, false, nothing, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).refused(EINVAL)
    })
}

fn any_process_opens_a_name_without_a_trust_list(host: &Host) -> Verdict {
    let free = |session: &Session, _: u64, name: &Name| set_attr(session, name, NO_TRUST_LIST, 1).granted();
    with_opener(host, false, free, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).granted()
    })
}

fn any_process_queries_a_name(host: &Host) -> Verdict {
    with_opener(host, false, nothing, |session, name| equal("size", query(session, name).granted()?.len, 2 * MIB2))
}

fn a_process_opens_a_name_once(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).granted()?;
        let other = heap(session, 0, HEAP_HUGE, SUB_SVM, 2).granted()?;
        session.alloc(other, 2 * MIB2).granted()?;
        open(session, other, name).refused(EINVAL)
    })
}

fn two_names_at_one_address_are_eaddrinuse(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).granted()?;
        open(session, address, name).refused(EADDRINUSE)
    })
}

fn a_name_is_opened_outside_of_reservations(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = session.reserve(2 * MIB2)?;
        open(session, address, name).refused(EADDRNOTAVAIL)
    })
}

fn a_name_is_opened_in_an_allocation(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = heap(session, 0, HEAP_HUGE, SUB_SVM, 2).granted()?;
        open(session, address, name).refused(EINVAL)?;
        let bytes = [0u8; 8];
        open(session, bytes.as_ptr() as u64, name).refused(EINVAL)
    })
}

fn opened_memory_has_no_pages_before_the_prefetch(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).granted()?;
        session.read(address, 1).refused(EINVAL)?;
        session.write(address, b"x").refused(EINVAL)
    })
}

fn opened_memory_belongs_to_one_device(host: &Host) -> Verdict {
    with_opener(host, true, write, |session, name| {
        session.setup(1)?;
        let address = managed(session, 2 * MIB2)?;
        open_on(session, 1, address, name).granted()?;
        session.prefetch(1, address, 2 * MIB2).granted()?;
        session.prefetch(0, address, 2 * MIB2).refused(EINVAL)?;
        session.prefetch(1, address, 2 * MIB2).granted()
    })
}

fn opened_memory_is_not_copied_in_a_batch(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = opened(session, name)?;
        let bytes = [1u8; 64];
        let (destinations, sources, sizes) = ([address], [bytes.as_ptr() as u64], [64u64]);
        let para = svm::MemcpyBatch {
            destinations: destinations.as_ptr() as u64,
            sources: sources.as_ptr() as u64,
            sizes: sizes.as_ptr() as u64,
            count: 1,
            ..Default::default()
        };
        session.svm.call(Op::MemcpyBatch, 0, &para).refused(EOPNOTSUPP)?;
        session.copy(address, bytes.as_ptr() as u64, 64, COPY_DETECT).granted().map(drop)
    })
}

fn opened_memory_has_no_name_of_its_own(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = opened(session, name)?;
        create(session, address, MIB2).refused(EINVAL)
    })
}

fn closing_where_nothing_is_open_is_einval(host: &Host) -> Verdict {
    with_opener(host, true, nothing, |session, name| {
        let address = opened(session, name)?;
        close(session, address + MIB2).refused(EINVAL)?;
        close(session, address).granted()?;
        close(session, address).refused(EINVAL)
    })
}

fn a_closed_name_can_be_opened_again(host: &Host) -> Verdict {
    with_opener(host, true, write, |session, name| {
        let address = opened(session, name)?;
        close(session, address).granted()?;
        session.free(address).granted()?;
        session.alloc(address, 2 * MIB2).granted()?;
        open(session, address, name).granted()?;
        session.prefetch(0, address, 2 * MIB2).granted()?;
        equal("bytes", session.read(address + MIB2, 9).granted()?, b"the owner".to_vec())
    })
}

fn a_destroyed_name_cannot_be_opened(host: &Host) -> Verdict {
    let gone = |session: &Session, _: u64, name: &Name| destroy(session, name).granted();
    with_opener(host, true, gone, |session, name| {
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).refused(EINVAL)
    })
}

fn a_name_of_freed_memory_cannot_be_opened(host: &Host) -> Verdict {
    let gone = |session: &Session, address: u64, _: &Name| session.free(address).granted();
    with_opener(host, true, gone, |session, name| {
        query(session, name).granted()?;
        let address = managed(session, 2 * MIB2)?;
        open(session, address, name).refused(EINVAL)
    })
}

fn a_destroyed_name_is_known_while_it_is_open(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        let session = Session::start(host)?;
        let name = receive(link)?;
        let address = managed(&session, 2 * MIB2)?;
        open(&session, address, &name).granted()?;
        link.send(1)?;
        link.receive()?;
        query(&session, &name).granted()?;
        close(&session, address).granted()?;
        query(&session, &name).refused(EINVAL)
    })?;
    let (session, _, name) = creator(host)?;
    set_attr(&session, &name, NO_TRUST_LIST, 1).granted()?;
    send(&mut peer.link, &name)?;
    peer.link.receive()?;
    destroy(&session, &name).granted()?;
    peer.link.send(1)?;
    peer.finish()
}

fn a_name_ends_with_its_creator(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        let (session, _, name) = creator(host)?;
        send(link, &name)?;
        link.receive()?;
        drop(session);
        Ok(())
    })?;
    let session = Session::start(host)?;
    let name = receive(&mut peer.link)?;
    query(&session, &name).granted()?;
    peer.kill();
    eventually("the name is gone", || query(&session, &name) == Err(EINVAL))
}

fn closing_the_device_ends_its_names(host: &Host) -> Verdict {
    let (session, _, name) = creator(host)?;
    session.close_device(0).granted()?;
    query(&session, &name).refused(EINVAL)
}
