//! `/dev/hisi_hdc` and the daemon behind it, which starts the device process that memory needs.

use crate::host::Host;
use crate::manager::{Manager, answer, ioctl, mmap, munmap, page_size};
use crate::peer::check_in_child;
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, note_command, rule};
use crate::session::eventually;
use crate::tsd::{Channel, Identity, hdc_command, hdc_open, register, shake_hands, start, start_device_process};
use ascend_ioctl::davinci::module;
use ascend_ioctl::devmng;
use ascend_ioctl::hdc::{self, error};
use std::sync::atomic::{AtomicU64, Ordering};

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
    rule!(a_signal_interrupts_the_wait_for_a_packet, Ran)
        .decided_by("hdcdrv_recv_peek_wait, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(a_signal_that_restarts_calls_starts_the_wait_anew, Ran)
        .decided_by("hdcdrv_recv_peek_wait, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(session_numbers_go_round, Ran).decided_by("hdcdrv_alloc_session, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(there_are_2048_session_numbers_for_each_device, Ran)
        .decided_by("hdcdrv_session_para_check, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(a_session_tells_its_attributes, Ran).decided_by("hdcdrv_get_session_attr, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(a_session_tells_who_made_it, Source).decided_by("hdcdrv_get_session_attr, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(an_unknown_attribute_of_a_session_fails, Ran)
        .decided_by("hdcdrv_get_session_attr, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(a_child_may_claim_its_parents_unclaimed_session, Ran)
        .decided_by("hdcdrv_set_session_owner, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(a_child_may_not_claim_its_parents_claimed_session, Ran)
        .decided_by("hdcdrv_set_session_owner, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(the_node_of_the_packets_cannot_be_read, Ran)
        .decided_by("vfs_read, linux/fs/read_write.c")
        .needs(&[Need::Hdc]),
    rule!(the_node_of_the_packets_can_be_mapped, Ran).decided_by("hdcdrv_mmap, hdcdrv_core.c").needs(&[Need::Hdc]),
    rule!(questions_about_a_closed_session_say_so, Source)
        .decided_by("hdcdrv_get_uid_state, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(wake_ups_of_a_service_that_one_does_not_offer_do_nothing, Source)
        .decided_by("hdcdrv_client_wakeup_wait, hdcdrv_core.c")
        .needs(&[Need::Hdc]),
    rule!(freeing_memory_that_was_not_allocated_finds_nothing, Source)
        .decided_by("hdcdrv_fast_free_mem, hdcdrv_mem.c")
        .needs(&[Need::Hdc]),
    rule!(unknown_commands_for_packets_are_bad_parameters, Source)
        .decided_by("hdcdrv_operation, hdcdrv_core.c")
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

/// When the signal was handled, in nanoseconds of the monotonic clock.
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn note(_: i32) {
    HANDLED.store(now(), Ordering::Relaxed);
}

/// Nanoseconds of the monotonic clock; usable in a handler.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the address of a local.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs `body` with a signal 200 ms later, and again and again if it is to be `repeated`.
fn with_signal<T>(flags: i32, repeated: bool, body: impl FnOnce() -> T) -> T {
    let timer = |after: i64| libc::itimerval {
        it_interval: libc::timeval { tv_sec: 0, tv_usec: if repeated { after } else { 0 } },
        it_value: libc::timeval { tv_sec: 0, tv_usec: after },
    };
    // SAFETY: the handler stores a number, and the structs are locals that outlive the calls; zero
    // bytes are a valid sigaction.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note as extern "C" fn(i32) as usize;
        action.sa_flags = flags;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        libc::setitimer(libc::ITIMER_REAL, &timer(200_000), std::ptr::null_mut());
    }
    let result = body();
    // SAFETY: as above.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer(0), std::ptr::null_mut()) };
    result
}

fn a_signal_interrupts_the_wait_for_a_packet(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    // The first may come before the wait begins.
    with_signal(0, true, || channel.peek(50_000)).refused(libc::EINTR)
}

fn a_signal_that_restarts_calls_starts_the_wait_anew(_: &Host) -> Verdict {
    const TIME: u64 = 400_000_000;
    let channel = Channel::connect(0)?;
    let mut longer = 0;
    for _ in 0..20 {
        with_signal(libc::SA_RESTART, false, || channel.peek(400)).refused(error::RECEIVE_TIMEOUT)?;
        longer = now() - HANDLED.load(Ordering::Relaxed);
        // On a machine that is so busy that the signal was handled when the wait was over, it says
        // nothing.
        if longer > TIME / 4 {
            break;
        }
    }
    holds("the wait began again at the signal", longer >= TIME)
}

fn session_numbers_go_round(_: &Host) -> Verdict {
    let first = Channel::connect(0)?;
    first.close_with(first.index).granted()?;
    let second = Channel::connect(0)?;
    holds("the next session has another number", second.session != first.session)
}

/// The status of a session number with an impossible counter.
fn number_is_known(channel: &Channel, session: i32) -> Answer<i32> {
    let view = hdc::GetSessionAttr { kind: hdc::ATTR_STATUS, session, alloc_index: u32::MAX, ..Default::default() };
    hdc_command(channel.fd(), &hdc::GET_SESSION_ATTR, &view).map(|answer| answer.output)
}

fn there_are_2048_session_numbers_for_each_device(host: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    // The driver counts the devices of the host, of which a container may see only some.
    number_is_known(&channel, 2048 * host.physical.len() as i32 - 1).granted()?;
    if host.admin {
        number_is_known(&channel, 2048 * host.physical.len() as i32).refused(error::PARAMETER)?;
    }
    number_is_known(&channel, -1).refused(error::PARAMETER)
}

fn a_session_tells_its_attributes(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    for kind in [0, 1, 2, 3, 5] {
        channel.attribute(kind).granted()?;
    }
    Ok(())
}

fn a_session_tells_who_made_it(_: &Host) -> Verdict {
    let (_file, identity) = registered()?;
    equal("process", Channel::connect(0)?.attribute(2).granted()?, identity.tgid)
}

fn an_unknown_attribute_of_a_session_fails(_: &Host) -> Verdict {
    Channel::connect(0)?.attribute(6).refused(error::FAILED)
}

fn a_child_may_claim_its_parents_unclaimed_session(_: &Host) -> Verdict {
    let channel = Channel::connect_only(0)?;
    check_in_child(|| {
        let file = hdc_open().granted()?;
        channel.own(file).granted()?;
        channel.attribute(0).granted()?;
        channel.close_with(channel.index).granted()
    })?;
    channel.attribute(0).refused(error::CLOSED)
}

fn a_child_may_not_claim_its_parents_claimed_session(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    check_in_child(|| channel.own(hdc_open().granted()?).refused(error::FAILED))
}

fn the_node_of_the_packets_cannot_be_read(_: &Host) -> Verdict {
    let fd = hdc_open().granted()?;
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is a local that outlives the call.
    answer(unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), 8) } as i64).refused(libc::EINVAL)
}

fn the_node_of_the_packets_can_be_mapped(_: &Host) -> Verdict {
    let fd = hdc_open().granted()?;
    let address = mmap(0, page_size(), libc::PROT_READ, libc::MAP_SHARED, fd).granted()?;
    munmap(address, page_size()).granted()
}

/// A command with the number of a session and nothing else.
fn by_number(fd: i32, number: u32, session: i32) -> Answer<i32> {
    let mut argument = hdc::Arg::new(&hdc::SetSessionOwner { session, ..Default::default() });
    note_command("the ioctl");
    ioctl(fd, u32::from(hdc::MAGIC) << 8 | number, std::ptr::from_mut(&mut argument) as u64)
}

fn questions_about_a_closed_session_say_so(_: &Host) -> Verdict {
    let channel = Channel::connect(0)?;
    by_number(channel.fd(), 0x1C, channel.session).granted()?;
    channel.close_with(channel.index).granted()?;
    by_number(channel.fd(), 0x1B, channel.session).refused(error::CLOSED)?;
    by_number(channel.fd(), 0x1C, channel.session).refused(error::CLOSED)
}

fn wake_ups_of_a_service_that_one_does_not_offer_do_nothing(_: &Host) -> Verdict {
    let fd = hdc_open().granted()?;
    by_number(fd, 0x04, 0).granted()?;
    by_number(fd, 0x05, 0).granted().map(drop)
}

fn freeing_memory_that_was_not_allocated_finds_nothing(_: &Host) -> Verdict {
    by_number(hdc_open().granted()?, 0x21, 0).refused(33)
}

fn unknown_commands_for_packets_are_bad_parameters(_: &Host) -> Verdict {
    let fd = hdc_open().granted()?;
    for number in [0x00, 0x0F, 0x19, 0x1F] {
        by_number(fd, number, 0).refused(error::PARAMETER)?;
    }
    Ok(())
}
