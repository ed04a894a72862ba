//! `/dev/hisi_hdc` and the daemon behind it, which starts the device process that memory needs.

use crate::host::Host;
use crate::manager::Manager;
use crate::peer::check_in_child;
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::eventually;
use crate::tsd::{Channel, Identity, hdc_command, hdc_open, register, shake_hands, start, start_device_process};
use ascend_ioctl::davinci::module;
use ascend_ioctl::devmng;
use ascend_ioctl::hdc::{self, error};

pub const RULES: &[Rule] = &[
    rule!(nobody_listens_for_other_services, Inferred).decided_by("hdcdrv_connect, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(a_session_is_connected_until_closed, Ran)
        .decided_by("hdcdrv_attr_get_session_status, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(a_session_has_one_owner, Ran).decided_by("hdcdrv_set_session_owner, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(a_file_owns_one_session, Ran).decided_by("hdcdrv_set_session_owner, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(waiting_for_a_packet_ends_with_its_own_code, Ran)
        .decided_by("hdcdrv_recv_peek_wait, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(receiving_never_waits, Ran).decided_by("hdcdrv_recv, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(empty_packets_are_refused, Ran).decided_by("hdcdrv_send, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(unreadable_packets_are_refused, Ran).decided_by("hdcdrv_copy_from_user, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(a_small_buffer_leaves_the_packet, Ran).decided_by("hdcdrv_recv, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(closing_by_a_wrong_counter_does_nothing, Ran)
        .decided_by("hdcdrv_session_state_to_closing, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(closing_twice_is_granted, Ran).decided_by("hdcdrv_close, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(a_child_may_not_use_its_parents_session, Ran)
        .decided_by("hdcdrv_check_session_owner, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(the_daemon_shakes_hands, Inferred).decided_by("hdcdrv_send, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(the_daemon_starts_a_registered_process, Inferred)
        .decided_by("hdcdrv_send, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(the_daemon_refuses_a_process_that_did_not_register, Inferred)
        .decided_by("devdrv_manager_check_process_sign, devdrv_chan_msg_process.c")
        .needs(&[Need::Hdc]),
    rule!(the_daemon_refuses_a_process_whose_devmng_file_was_closed, Inferred)
        .decided_by("devdrv_manage_release_prepare, devdrv_manager.c")
        .needs(&[Need::Hdc]),
    rule!(a_device_process_ends_with_its_session, Inferred)
        .decided_by("hdcdrv_close_remote_session, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
];

fn registered() -> Result<(Manager, Identity), Failure> {
    let file = Manager::bound(module::DEVMNG)?;
    let identity = register(&file)?;
    Ok((file, identity))
}

fn nobody_listens_for_other_services(_: &Host) -> Verdict {
    let fd = hdc_open().granted()?;
    let view = hdc::Connect { peer_pid: -1, service: 100, timeout: 30, ..Default::default() };
    hdc_command(fd, &hdc::CONNECT, &view).refused(error::NOBODY_LISTENS)
}

fn a_session_is_connected_until_closed(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    equal("status", channel.status().granted()?, 0)?;
    channel.close_with(channel.index).granted()?;
    match channel.peek(1000) {
        Err(error::CLOSED | error::PEER_REBOOT) => Ok(()),
        Ok(answer) => equal("length of a packet of a closed session", answer.length, 0),
        other => other.refused(error::CLOSED),
    }
}

fn a_session_has_one_owner(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    let other = hdc_open().granted()?;
    channel.own(other).refused(error::FAILED)
}

fn a_file_owns_one_session(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    let view = hdc::Connect { peer_pid: -1, service: hdc::SERVICE_TSD, timeout: 30, ..Default::default() };
    let second = hdc_command(channel.fd(), &hdc::CONNECT, &view).granted()?;
    let view = hdc::SetSessionOwner { session: second.session, ..Default::default() };
    let answer = hdc_command(channel.fd(), &hdc::SET_SESSION_OWNER, &view);
    // The second session has no owner, so closing the file would not close it.
    let view = hdc::Close { session: second.session, alloc_index: second.alloc_index, ..Default::default() };
    hdc_command(channel.fd(), &hdc::CLOSE, &view).granted()?;
    answer.map(drop).refused(error::PARAMETER)
}

fn waiting_for_a_packet_ends_with_its_own_code(_: &Host) -> Verdict {
    Channel::connect(0)?.peek(20).refused(error::RECEIVE_TIMEOUT)
}

fn receiving_never_waits(_: &Host) -> Verdict {
    equal("bytes", Channel::connect(0)?.receive(64).granted()?.len(), 0)
}

fn empty_packets_are_refused(_: &Host) -> Verdict {
    Channel::connect(0)?.send(&[]).refused(error::LENGTH)
}

fn unreadable_packets_are_refused(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    let view = hdc::Send {
        session: channel.session,
        source: crate::manager::NOWHERE,
        length: 64,
        wait: hdc::WAIT_TIMEOUT,
        timeout: 1000,
        ..Default::default()
    };
    hdc_command(channel.fd(), &hdc::SEND, &view).refused(error::COPY_IN)
}

fn a_small_buffer_leaves_the_packet(_: &Host) -> Verdict {
    let (_file, identity) = registered()?;
    let channel = Channel::connect(0)?;
    channel.send(&crate::tsd::handshake(identity.tgid)).granted()?;
    let length = channel.peek(30_000).granted()?.length as usize;
    channel.receive(4).refused(error::BUFFER_SMALL)?;
    equal("length of the packet", channel.receive(length).granted()?.len(), length)
}

fn closing_by_a_wrong_counter_does_nothing(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    channel.close_with(channel.index.wrapping_add(1)).granted()?;
    equal("status", channel.status().granted()?, 0)
}

fn closing_twice_is_granted(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    channel.close_with(channel.index).granted()?;
    channel.close_with(channel.index).granted()
}

fn a_child_may_not_use_its_parents_session(_: &Host) -> Verdict {
    let (_file, identity) = registered()?;
    let channel = Channel::connect(0)?;
    check_in_child(|| channel.send(&crate::tsd::handshake(identity.tgid)).refused(error::PERMISSION))?;
    equal("status", channel.status().granted()?, 0)
}

fn the_daemon_shakes_hands(_: &Host) -> Verdict {
    let (_file, identity) = registered()?;
    shake_hands(&Channel::connect(0)?, &identity).map(drop)
}

/// QUERY_DEV_PID of this process on device 0.
fn device_pid(file: &Manager) -> Option<i32> {
    // SAFETY: getpid has no preconditions.
    let host_pid = unsafe { libc::getpid() };
    let mut arg = devmng::QueryPid { device: 0, host_pid, ..Default::default() };
    (file.command(&devmng::QUERY_DEV_PID, &mut arg) == Ok(0)).then_some(arg.pid)
}

fn the_daemon_starts_a_registered_process(_: &Host) -> Verdict {
    let (file, identity) = registered()?;
    equal("device process before", device_pid(&file), None)?;
    let _channel = start_device_process(&identity, 0)?;
    holds("a device process is found", device_pid(&file).is_some_and(|pid| pid > 0))
}

/// START must be refused or stay unanswered: the device's program does not report every error.
fn refused_start(identity: &Identity) -> Verdict {
    let channel = Channel::connect(0)?;
    shake_hands(&channel, identity)?;
    channel.send(&start(identity.tgid, &identity.sign, 0)).granted()?;
    holds("the daemon refuses", channel.wait_for(8, 20).map_or(true, |reply| reply.code != 0))
}

fn the_daemon_refuses_a_process_that_did_not_register(_: &Host) -> Verdict {
    // SAFETY: getpid has no preconditions.
    let tgid = unsafe { libc::getpid() };
    refused_start(&Identity { tgid, sign: vec![b'0'; 48] })
}

fn the_daemon_refuses_a_process_whose_devmng_file_was_closed(_: &Host) -> Verdict {
    let (file, identity) = registered()?;
    // Closing any DEVMNG file counts, also a short-lived one.
    drop(Manager::bound(module::DEVMNG)?);
    refused_start(&identity)?;
    drop(file);
    Ok(())
}

fn a_device_process_ends_with_its_session(_: &Host) -> Verdict {
    let (file, identity) = registered()?;
    let channel = start_device_process(&identity, 0)?;
    holds("a device process is found", device_pid(&file).is_some())?;
    drop(channel);
    eventually("the device process is gone", || device_pid(&file).is_none())
}
