//! `/dev/hisi_hdc`: packets to daemons on the device.
//!
//! CONNECT returns a slot number and a reuse counter. SET_SESSION_OWNER, due within a minute, binds
//! the session to a file; releasing that file closes the session. The process that connected may do
//! that, or its child, and only the owner may send and receive. Signals interrupt waits. Every
//! command copies the same 200 bytes in and few copy them out. Errors are private codes that reach
//! the client as errno. Packets of service 9 go to the daemon ([`crate::tsd`]); other services have
//! no listener. From the driver's `hdc/pcie/common/hdcdrv_core.c`.

use crate::caller::{Caller, Outcome};
use crate::config::{Daemon, Phase};
use crate::devmng::Devmng;
use crate::driver::FileId;
use crate::machine::{Machine, parent};
use crate::state::ConnectionState;
use crate::tsd::{Dialogue, Requester, Said, unasked};
use ascend_ioctl::command::{magic, number};
use ascend_ioctl::hdc::{
    ARG_SIZE, ATTR_STATUS, Arg, CLOSE, CONFIG, CONNECT, Close, Config, Connect, GET_PAGE_SIZE, GET_PEER_DEV_ID,
    GET_SESSION_ATTR, GetSessionAttr, MAGIC, MAX_PACKET, RECV, RECV_PEEK, Recv, RecvPeek, SEND, SERVICE_TSD, SERVICES,
    SET_SESSION_OWNER, Send, SetSessionOwner, View, WAIT_FOREVER, WAIT_NOT, error,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Session numbers per device, in one pool for all devices.
const SESSIONS: usize = 2048;
/// How many of them are for services with long connections, of which the daemon's is one.
const LONG_SESSIONS: usize = 1920;
/// Packets that a session can hold unread. The next one blocks the channel, which all sessions of
/// the service on the device share.
const UNREAD: usize = 7;
/// Packets that can be on their way to a device.
const SEND_QUEUE: usize = 15;
/// Attributes of a session other than its state: environment, virtual function, the processes that
/// made it on both sides, and a dump into the kernel's log.
const ATTRIBUTES: [i32; 5] = [0, 1, 2, 3, 5];
/// The number of the attribute that is the maker's process id.
const ATTR_LOCAL_CREATE_PID: i32 = 2;
/// The code of a command that found none of its memory blocks (HDCDRV_F_NODE_SEARCH_FAIL).
const NO_NODE: Code = 33;
/// A session without an owner is closed after this time.
const RECLAIM: Duration = Duration::from_secs(60);
/// How long a session that the device closed can still be read.
const HALF_CLOSED: Duration = Duration::from_secs(3);
/// How long a receiver waits that gave no timeout.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a control message.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
/// How often a sleeping receiver checks whether its session was closed.
const GLANCE: Duration = Duration::from_millis(20);

/// A private error code.
type Code = i32;

/// What an ioctl that did not fail does next.
enum Progress {
    /// Returns 0 and copies nothing back.
    Done,
    /// Returns 0 and copies the argument back.
    Copied,
    /// Sleeps. A signal interrupts it.
    Later(Instant),
    /// Sleeps, whatever happens.
    LaterUninterrupted(Instant),
}

#[derive(Debug)]
struct Session {
    /// Physical id.
    device: u32,
    /// The device's revival count when the session was made.
    revivals: u32,
    service: i32,
    /// The place where it was made; other containers do not see it.
    place: usize,
    /// The process that connected.
    maker: i32,
    /// The process that may use it, by tgid and start time.
    owner: (i32, u64),
    alloc_index: u32,
    /// The file that it is bound to.
    file: Option<FileId>,
    reclaimed_at: Option<Instant>,
    /// When the device closed its end.
    closed: Option<Instant>,
    /// Packets from the device, and when they arrive.
    inbox: VecDeque<(Instant, Vec<u8>)>,
    dialogue: Dialogue,
}

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Hdc {
    slots: BTreeMap<usize, Session>,
    /// Reuse counters by slot.
    counters: BTreeMap<usize, u32>,
    /// Where the search for a free slot begins.
    cursor: usize,
    /// When packets reach their device, by device.
    sent: BTreeMap<u32, Vec<Instant>>,
}

impl Hdc {
    /// The state of all sessions, for tests.
    pub fn sessions(&self) -> impl Iterator<Item = ConnectionState> + '_ {
        self.slots.values().map(|session| ConnectionState {
            device: session.device,
            tgid: session.owner.0,
            service: session.service,
            owned: session.file.is_some(),
        })
    }

    /// The last reference to a file is gone: closes its session.
    pub fn release(&mut self, machine: &mut Machine, file: FileId) {
        let tied = self.slots.iter().find(|(_, session)| session.file == Some(file)).map(|(index, _)| *index);
        if let Some(index) = tied {
            self.free(machine, index);
        }
    }

    fn free(&mut self, machine: &mut Machine, index: usize) {
        if let Some(mut session) = self.slots.remove(&index) {
            session.dialogue.end(machine, session.owner.0, session.device);
        }
    }

    /// Closes sessions without an owner, sessions that the device closed a while ago, and sessions
    /// of a device that was reset.
    pub fn expire(&mut self, machine: &mut Machine, now: Instant) {
        let over = |session: &Session| {
            let unclaimed = session.reclaimed_at.is_some_and(|at| at <= now);
            let closed = session.closed.is_some_and(|at| at + HALF_CLOSED <= now);
            // A device that was reset or removed loses its sessions, and has forgotten them when it
            // comes back.
            let device = machine.device(session.device);
            let reset = device.is_none_or(|device| device.revivals != session.revivals || !device.answers());
            unclaimed || closed || reset
        };
        let over: Vec<usize> = self.slots.iter().filter(|(_, it)| over(it)).map(|(index, _)| *index).collect();
        for index in over {
            self.free(machine, index);
        }
    }

    /// ioctl(2).
    pub fn ioctl(
        &mut self,
        machine: &mut Machine,
        devmng: &Devmng,
        caller: &Caller,
        file: FileId,
        request: u32,
        arg: u64,
    ) -> Outcome {
        // A failure is a negative private code, which may not be an errno.
        let failed = |code: Code| Outcome::Done(Ok(-i64::from(code)));
        if arg == 0 {
            return failed(error::PARAMETER);
        }
        let mut data = Arg([0; ARG_SIZE]);
        if caller.memory.read(arg, &mut data.0).is_err() {
            return failed(error::COPY_IN);
        }
        self.expire(machine, Instant::now());
        match self.command(machine, devmng, caller, file, request, &mut data) {
            Err(code) => failed(code),
            Ok(Progress::Later(wake)) => Outcome::Wait(wake),
            Ok(Progress::LaterUninterrupted(wake)) => Outcome::Sleep(wake),
            Ok(Progress::Done) => Outcome::Done(Ok(0)),
            Ok(Progress::Copied) => match caller.memory.write(arg, &data.0) {
                Ok(()) => Outcome::Done(Ok(0)),
                Err(_) => failed(error::COPY_OUT),
            },
        }
    }

    fn command(
        &mut self,
        machine: &mut Machine,
        devmng: &Devmng,
        caller: &Caller,
        file: FileId,
        request: u32,
        data: &mut Arg,
    ) -> Result<Progress, Code> {
        let number = number(request);
        // These take a device id, which is translated in place.
        const BY_DEVICE: [u8; 9] = [0x06, 0x07, 0x10, 0x11, 0x12, 0x13, 0x20, 0x24, 0x26];
        if BY_DEVICE.contains(&number) {
            let mut view: Connect = data.view();
            let physical = machine.physical(caller, view.device as u32).map_err(|_| error::TRANSLATION)?;
            view.device = physical as i32;
            put(data, &view);
        }
        let mut head: Config = data.view();
        head.pid = caller.tgid as u64;
        put(data, &head);
        if magic(request) != MAGIC {
            return Err(error::PARAMETER);
        }
        match number {
            n if n == GET_PEER_DEV_ID.number => peer_device(machine, data),
            n if n == CONFIG.number => config(machine, data),
            n if n == CONNECT.number => self.connect(machine, caller, data),
            n if n == CLOSE.number => self.close(machine, caller, &data.view()),
            n if n == SEND.number => self.send(machine, devmng, caller, &data.view()),
            n if n == RECV_PEEK.number => self.peek(machine, caller, data),
            n if n == RECV.number => self.receive(machine, caller, data),
            n if n == SET_SESSION_OWNER.number => self.claim(machine, caller, file, &data.view()),
            n if n == GET_SESSION_ATTR.number => self.attribute(machine, caller, data),
            n if n == GET_PAGE_SIZE.number => Ok(page_size(data)),
            // Wake-ups and the end of a service that the caller does not offer, and a level that is
            // not used any more.
            0x04..=0x06 | 0x09 => Ok(Progress::Done),
            // Timeouts, user and environment of a session.
            0x1B => self.owned(machine, caller, data.view::<SetSessionOwner>().session).map(|_| Progress::Done),
            0x1C | 0x1E => {
                self.owned(machine, caller, data.view::<SetSessionOwner>().session).map(|_| Progress::Copied)
            }
            // Transfers without copies need memory that was allocated here, which nobody has.
            0x22 | 0x23 => self.owned(machine, caller, data.view::<SetSessionOwner>().session).and(Err(NO_NODE)),
            0x21 | 0x24..=0x26 => Err(NO_NODE),
            _ => Err(error::PARAMETER),
        }
    }

    fn connect(&mut self, machine: &Machine, caller: &Caller, data: &mut Arg) -> Result<Progress, Code> {
        let mut view: Connect = data.view();
        if !(0..SERVICES).contains(&view.service) {
            return Err(error::PARAMETER);
        }
        let physical = view.device as u32;
        let device = machine.device(physical).filter(|device| device.phase == Phase::Ready);
        let device = device.ok_or(error::NOT_READY)?;
        if device.dead {
            return Err(error::CONTROL);
        }
        if let Some(until) = device.silent_until.filter(|until| Instant::now() < *until) {
            let deadline = caller.arrived + CONNECT_PATIENCE;
            return if Instant::now() < deadline {
                Ok(Progress::Later(until.min(deadline).min(Instant::now() + GLANCE)))
            } else {
                Err(error::CONTROL)
            };
        }
        if view.service != SERVICE_TSD || view.peer_pid != -1 || machine.daemon == Daemon::Absent {
            return Err(error::NOBODY_LISTENS);
        }
        let numbers = LONG_SESSIONS * machine.physical_ids().count();
        let mut candidates = (0..numbers).map(|step| (self.cursor + step) % numbers);
        let index = candidates.find(|index| !self.slots.contains_key(index)).ok_or(error::NO_SESSION)?;
        self.cursor = (index + 1) % numbers;
        let counter = self.counters.entry(index).or_default();
        *counter += 1;
        let alloc_index = *counter;
        let session = Session {
            device: physical,
            revivals: device.revivals,
            service: view.service,
            place: machine.place_of(caller.tgid),
            maker: caller.tgid,
            owner: (caller.tgid, caller.start_time),
            alloc_index,
            file: None,
            reclaimed_at: Some(Instant::now() + RECLAIM),
            closed: None,
            inbox: VecDeque::new(),
            dialogue: Dialogue::default(),
        };
        self.slots.insert(index, session);
        (view.session, view.alloc_index) = (index as i32, alloc_index);
        put(data, &view);
        Ok(Progress::Copied)
    }

    /// The session of a slot, for any process of its container.
    fn visible(&mut self, machine: &Machine, caller: &Caller, slot: i32) -> Result<&mut Session, Code> {
        let limit = SESSIONS * machine.physical_ids().count();
        let index = usize::try_from(slot).ok().filter(|index| *index < limit).ok_or(error::PARAMETER)?;
        let session = self.slots.get_mut(&index).ok_or(error::CLOSED)?;
        if session.place == machine.place_of(caller.tgid) { Ok(session) } else { Err(error::PARAMETER) }
    }

    /// The session of a slot, for its owner.
    fn owned(&mut self, machine: &Machine, caller: &Caller, slot: i32) -> Result<&mut Session, Code> {
        let session = self.visible(machine, caller, slot)?;
        if session.owner != (caller.tgid, caller.start_time) {
            return Err(error::PERMISSION);
        }
        Ok(session)
    }

    /// How many packets of a session have arrived. A session with too many unread ones keeps back
    /// those of all sessions of its service on the device.
    fn arrived(&self, index: usize, now: Instant) -> usize {
        let Some(session) = self.slots.get(&index) else { return 0 };
        let same = |it: &&Session| (it.device, it.service) == (session.device, session.service);
        let full_since = |it: &Session| it.inbox.get(UNREAD - 1).map(|(at, _)| *at).filter(|at| *at <= now);
        let blocked_since = self.slots.values().filter(same).filter_map(full_since).min();
        let reached = |at: Instant| at <= now && blocked_since.is_none_or(|since| at <= since);
        session.inbox.iter().take(UNREAD).filter(|(at, _)| reached(*at)).count()
    }

    fn claim(
        &mut self,
        machine: &Machine,
        caller: &Caller,
        file: FileId,
        view: &SetSessionOwner,
    ) -> Result<Progress, Code> {
        if self.slots.values().any(|session| session.file == Some(file)) {
            return Err(error::PARAMETER);
        }
        let session = self.visible(machine, caller, view.session)?;
        if session.maker != caller.tgid && parent(caller.tgid) != Some(session.maker) {
            return Err(error::PERMISSION);
        }
        if session.file.is_some() {
            return Err(error::FAILED);
        }
        session.owner = (caller.tgid, caller.start_time);
        session.file = Some(file);
        session.reclaimed_at = None;
        Ok(Progress::Done)
    }

    fn close(&mut self, machine: &mut Machine, caller: &Caller, view: &Close) -> Result<Progress, Code> {
        let limit = SESSIONS * machine.physical_ids().count();
        let index = usize::try_from(view.session).ok().filter(|index| *index < limit).ok_or(error::PARAMETER)?;
        // Closed already, or the slot was reused: nothing to do.
        let Some(session) = self.slots.get(&index) else { return Ok(Progress::Done) };
        if session.alloc_index != view.alloc_index {
            return Ok(Progress::Done);
        }
        let own = session.owner == (caller.tgid, caller.start_time);
        if !own || session.place != machine.place_of(caller.tgid) {
            return Err(error::PARAMETER);
        }
        self.free(machine, index);
        Ok(Progress::Done)
    }

    fn send(&mut self, machine: &mut Machine, devmng: &Devmng, caller: &Caller, view: &Send) -> Result<Progress, Code> {
        if view.source == 0 {
            return Err(error::PARAMETER);
        }
        let session = self.owned(machine, caller, view.session)?;
        let length = usize::try_from(view.length).ok().filter(|length| (1..=MAX_PACKET).contains(length));
        let mut packet = vec![0; length.ok_or(error::LENGTH)?];
        if session.closed.is_some() {
            return Err(error::PEER_CLOSED);
        }
        caller.memory.read(view.source, &mut packet).map_err(|_| error::COPY_IN)?;
        let now = Instant::now();
        let device = session.device;
        let silence = machine.device(device).and_then(|device| device.silent_until);
        let arrival = silence.map_or(now, |until| until.max(now));
        let queue = self.sent.entry(device).or_default();
        queue.retain(|at| *at > now);
        if queue.len() >= SEND_QUEUE {
            return wait_for_room(caller, view, now);
        }
        queue.push(arrival);
        let session = self.owned(machine, caller, view.session)?;
        let client =
            Requester { tgid: session.owner.0, device: session.device, registered: devmng.knows(session.owner.0) };
        match session.dialogue.hear(machine, &client, &packet) {
            Said::Nothing => {}
            Said::Reply(after, reply) => session.inbox.push_back((arrival + after, reply)),
            Said::Replies(replies) => session.inbox.extend(replies.into_iter().map(|reply| (arrival, reply))),
            Said::HungUp => session.closed = Some(arrival),
        }
        Ok(Progress::Done)
    }

    fn peek(&mut self, machine: &Machine, caller: &Caller, data: &mut Arg) -> Result<Progress, Code> {
        let mut view: RecvPeek = data.view();
        let limit = SESSIONS * machine.physical_ids().count();
        let index = usize::try_from(view.session).ok().filter(|index| *index < limit).ok_or(error::PARAMETER)?;
        if self.slots.get(&index).is_none_or(|it| it.alloc_index != view.alloc_index) {
            return Err(error::CLOSED);
        }
        let now = Instant::now();
        let session = self.owned(machine, caller, view.session)?;
        if machine.daemon == Daemon::Floods && session.inbox.is_empty() {
            session.inbox.push_back((now, unasked()));
        }
        let count = self.arrived(index, now);
        let session = self.owned(machine, caller, view.session)?;
        let arrived: Vec<i32> = session.inbox.iter().take(count).map(|(_, packet)| packet.len() as i32).collect();
        if let Some(first) = arrived.first() {
            let whole = (arrived.iter().sum(), arrived.len() as i32);
            (view.length, view.count) = if view.group == 0 { (*first, 1) } else { whole };
            put(data, &view);
            return Ok(Progress::Copied);
        }
        let (patience, over) = match view.wait {
            WAIT_FOREVER => (None, error::RECEIVE_TIMEOUT),
            // On such a session the driver nevertheless retries for about three seconds.
            WAIT_NOT => (Some(DEFAULT_TIMEOUT), error::NOTHING),
            _ if view.timeout == 0 => (Some(DEFAULT_TIMEOUT), error::RECEIVE_TIMEOUT),
            _ => (Some(Duration::from_millis(view.timeout.into())), error::RECEIVE_TIMEOUT),
        };
        let deadline = patience.map(|patience| caller.arrived + patience);
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(over);
        }
        let next = session.inbox.iter().map(|(at, _)| *at).min();
        let wake = [Some(now + GLANCE), deadline, next].into_iter().flatten().min();
        let wake = wake.unwrap_or(now).max(now + Duration::from_micros(100));
        // The retries of a wait that should not be one are not interrupted.
        Ok(if view.wait == WAIT_NOT { Progress::LaterUninterrupted(wake) } else { Progress::Later(wake) })
    }

    fn receive(&mut self, machine: &Machine, caller: &Caller, data: &mut Arg) -> Result<Progress, Code> {
        let mut view: Recv = data.view();
        if view.destination == 0 || !(1..8).contains(&view.buffers) {
            return Err(error::PARAMETER);
        }
        self.owned(machine, caller, view.session)?;
        let arrived = self.arrived(view.session as usize, Instant::now());
        let session = self.owned(machine, caller, view.session)?;
        view.received = 0;
        if arrived > 0 {
            let wanted = view.buffers as usize;
            let bytes: Vec<u8> =
                session.inbox.iter().take(wanted.min(arrived)).flat_map(|(_, packet)| packet.clone()).collect();
            if bytes.len() as i64 > i64::from(view.length) || arrived < wanted {
                return Err(error::BUFFER_SMALL);
            }
            for (slot, (_, packet)) in view.buffer_lengths.iter_mut().zip(session.inbox.drain(..wanted)) {
                *slot = packet.len() as u32;
            }
            // The packets are lost if this fails.
            caller.memory.write(view.destination, &bytes).map_err(|_| error::COPY_OUT)?;
            view.received = bytes.len() as i32;
        }
        put(data, &view);
        Ok(Progress::Copied)
    }

    fn attribute(&mut self, machine: &Machine, caller: &Caller, data: &mut Arg) -> Result<Progress, Code> {
        let mut view: GetSessionAttr = data.view();
        if view.kind != ATTR_STATUS {
            let maker = self.owned(machine, caller, view.session)?.maker;
            if !ATTRIBUTES.contains(&view.kind) {
                return Err(error::FAILED);
            }
            // The others are 0 on a plain host; the daemon's process id is not known.
            view.output = if view.kind == ATTR_LOCAL_CREATE_PID { maker } else { 0 };
            put(data, &view);
            return Ok(Progress::Copied);
        }
        let expected = view.alloc_index;
        view.output = match self.owned(machine, caller, view.session) {
            Ok(session) if session.alloc_index == expected => 0,
            Err(error::PARAMETER) => return Err(error::PARAMETER),
            _ => -error::CLOSED,
        };
        put(data, &view);
        Ok(Progress::Copied)
    }
}

/// SEND finds the queue to the device full.
fn wait_for_room(caller: &Caller, view: &Send, now: Instant) -> Result<Progress, Code> {
    let patience = match view.wait {
        WAIT_NOT => return Err(error::NOTHING),
        WAIT_FOREVER => None,
        _ if view.timeout == 0 => Some(DEFAULT_TIMEOUT),
        _ => Some(Duration::from_millis(view.timeout.into())),
    };
    let deadline = patience.map(|patience| caller.arrived + patience);
    if deadline.is_some_and(|deadline| deadline <= now) {
        return Err(error::SEND_TIMEOUT);
    }
    Ok(Progress::Later(deadline.map_or(now + GLANCE, |deadline| deadline.min(now + GLANCE))))
}

/// Writes a view over the start of the argument.
fn put<V: View>(data: &mut Arg, view: &V) {
    // A view is never longer than the argument.
    let _ = view.write_to_prefix(&mut data.0);
}

fn peer_device(machine: &Machine, data: &mut Arg) -> Result<Progress, Code> {
    let mut view: Config = data.view();
    let ready = machine.device(view.device as u32).is_some_and(|device| device.phase == Phase::Ready);
    if !ready {
        return Err(error::NOT_READY);
    }
    // The answer has the offset of CONFIG's segment. The value is made up.
    view.segment = 0;
    put(data, &view);
    Ok(Progress::Copied)
}

fn config(machine: &Machine, data: &mut Arg) -> Result<Progress, Code> {
    let any = machine.physical_ids().any(|id| machine.device(id).is_some_and(|device| device.phase != Phase::Detected));
    if !any {
        return Err(error::PARAMETER);
    }
    let mut view: Config = data.view();
    view.segment = view.segment.min(MAX_PACKET as i32);
    put(data, &view);
    Ok(Progress::Copied)
}

fn page_size(data: &mut Arg) -> Progress {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as u32;
    for (offset, value) in [(24, page), (28, 2 << 20), (32, page.trailing_zeros())] {
        data.0[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    }
    Progress::Copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config as Host, Place};
    use crate::rig::{OK, Rig, TestProcess};
    use ascend_ioctl::hdc::PATH;
    use ascend_ioctl::{Typed, devmng};

    const A: TestProcess = TestProcess(4242);
    const B: TestProcess = TestProcess(4243);
    const GREETING: [u8; 25] =
        [0x19, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x20, 0x72, 3, 8, 0x92, 0x21, 0x8A, 2, 3, 8, 0xCE, 9];

    /// The outcome for a private code.
    fn code(code: i32) -> Outcome {
        Outcome::Done(Ok(-i64::from(code)))
    }

    fn call<V: View>(rig: &mut Rig, process: TestProcess, file: FileId, command: Typed<V>, view: &V) -> (Outcome, V) {
        let (outcome, arg) = rig.call(process, file, command.request(), Arg::new(view));
        (outcome, arg.view())
    }

    const TO_DAEMON: Connect = Connect {
        peer_pid: -1,
        device: 1,
        pid: 0,
        _reserve_comm: 0,
        service: SERVICE_TSD,
        session: 0,
        timeout: 30,
        alloc_index: 0,
        ret: 0,
        unique: 0,
        user_va: 0,
        _reserved: [0; 8],
    };

    /// A claimed session: file, slot, counter.
    fn connected(rig: &mut Rig) -> (FileId, i32, u32) {
        let file = rig.open(A, PATH).unwrap();
        let (outcome, view) = call(rig, A, file, CONNECT, &TO_DAEMON);
        assert_eq!((outcome, view.device, view.pid), (OK, 1, 4242));
        let owner = SetSessionOwner { session: view.session, ..Default::default() };
        assert_eq!(call(rig, A, file, SET_SESSION_OWNER, &owner).0, OK);
        assert_eq!(call(rig, A, file, SET_SESSION_OWNER, &owner).0, code(error::PARAMETER), "one session per file");
        (file, view.session, view.alloc_index)
    }

    /// Milliseconds that no test takes, however busy the machine is.
    const PATIENCE: u32 = 600_000;

    fn send(rig: &mut Rig, process: TestProcess, file: FileId, session: i32, packet: &[u8]) -> Outcome {
        let source = rig.heap.put(packet);
        let view =
            Send { session, source, length: packet.len() as i32, wait: 2, timeout: PATIENCE, ..Default::default() };
        call(rig, process, file, SEND, &view).0
    }

    fn peek(rig: &mut Rig, file: FileId, session: i32, alloc_index: u32) -> (Outcome, RecvPeek) {
        let view = RecvPeek { session, alloc_index, wait: 2, timeout: PATIENCE, ..Default::default() };
        call(rig, A, file, RECV_PEEK, &view)
    }

    #[test]
    fn packets_go_to_the_daemon_and_come_back() {
        let mut rig = Rig::new(Host::default());
        let (file, session, index) = connected(&mut rig);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        let (outcome, view) = peek(&mut rig, file, session, index);
        assert_eq!((outcome, view.count), (OK, 1));
        let destination = rig.heap.put(&[0; 200]);
        let mut recv = Recv { session, destination, length: view.length - 1, buffers: 1, ..Default::default() };
        assert_eq!(call(&mut rig, A, file, RECV, &recv).0, code(error::BUFFER_SMALL));
        recv.length = view.length;
        let (outcome, answer) = call(&mut rig, A, file, RECV, &recv);
        assert_eq!((outcome, answer.received), (OK, view.length));
        assert_eq!(rig.heap.get::<u32>(destination), view.length as u32);
        assert_eq!(call(&mut rig, A, file, RECV, &recv).1.received, 0, "RECV does not wait");
        let Outcome::Wait(_) = peek(&mut rig, file, session, index).0 else { panic!("nothing is there") };
        rig.now -= Duration::from_millis(PATIENCE.into());
        assert_eq!(peek(&mut rig, file, session, index).0, code(error::RECEIVE_TIMEOUT));
    }

    #[test]
    fn only_the_process_that_connected_may_use_a_session() {
        let mut rig = Rig::new(Host::default());
        let (file, session, alloc_index) = connected(&mut rig);
        assert_eq!(send(&mut rig, B, file, session, &GREETING), code(error::PERMISSION));
        let close = Close { session, alloc_index, ..Default::default() };
        assert_eq!(call(&mut rig, B, file, CLOSE, &close).0, code(error::PARAMETER));
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
    }

    #[test]
    fn a_wrong_counter_closes_nothing_and_reports_closed() {
        let mut rig = Rig::new(Host::default());
        let (file, session, alloc_index) = connected(&mut rig);
        let mut close = Close { session, alloc_index: alloc_index + 1, ..Default::default() };
        assert_eq!(call(&mut rig, A, file, CLOSE, &close).0, OK);
        assert_eq!(rig.driver.state().sessions.len(), 1);
        assert_eq!(peek(&mut rig, file, session, alloc_index + 1).0, code(error::CLOSED));
        close.alloc_index = alloc_index;
        assert_eq!(call(&mut rig, A, file, CLOSE, &close).0, OK);
        assert_eq!(call(&mut rig, A, file, CLOSE, &close).0, OK, "twice is fine");
        assert_eq!(rig.driver.state().sessions, []);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), code(error::CLOSED));
        let (_, again, counter) = connected(&mut rig);
        assert_eq!((again, counter), (session + 1, 1), "numbers go round");
    }

    #[test]
    fn connect_has_a_code_for_each_failure() {
        let mut rig = Rig::new(Host { phases: vec![(0, Phase::Registered)], ..Host::default() });
        let file = rig.open(A, PATH).unwrap();
        let connect = |rig: &mut Rig, view: Connect| call(rig, A, file, CONNECT, &view).0;
        assert_eq!(connect(&mut rig, Connect { device: 2, ..TO_DAEMON }), code(error::TRANSLATION));
        assert_eq!(connect(&mut rig, Connect { device: 0, ..TO_DAEMON }), code(error::NOT_READY));
        assert_eq!(connect(&mut rig, Connect { service: 128, ..TO_DAEMON }), code(error::PARAMETER));
        assert_eq!(connect(&mut rig, Connect { service: 3, ..TO_DAEMON }), code(error::NOBODY_LISTENS));
        assert_eq!(connect(&mut rig, Connect { peer_pid: 0, ..TO_DAEMON }), code(error::NOBODY_LISTENS));
        rig.driver.machine.daemon = Daemon::Absent;
        assert_eq!(connect(&mut rig, TO_DAEMON), code(error::NOBODY_LISTENS));
        rig.driver.machine.kill_device(1);
        assert_eq!(connect(&mut rig, TO_DAEMON), code(error::CONTROL));
        assert_eq!(rig.ioctl(A, file, CONNECT.request(), 0), code(error::PARAMETER));
        assert_eq!(rig.ioctl(A, file, CONNECT.request(), 16), code(error::COPY_IN));
    }

    #[test]
    fn closing_the_file_ends_the_session_and_the_device_process() {
        let mut rig = Rig::new(Host::default());
        let manager = rig.module(A, "DEVMNG").unwrap();
        let sign = devmng::GET_PROCESS_SIGN.request();
        assert_eq!(rig.call(A, manager, sign, devmng::ProcessSign::default()).0, OK);
        let (file, session, _) = connected(&mut rig);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        // START for device 1, process 4242, sign of 48 zeros, log level 103.
        let mut start =
            vec![0x60, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x10, 6, 0x68, 1, 0x72, 0x35, 8, 0x92, 0x21, 0x12, 0x30];
        start.extend([b'0'; 48]);
        start.extend([0x78, 1, 0x80, 2, 1, 0x9A, 2, 5, 0x0A, 3, b'1', b'0', b'3', 0xD2, 2, 0, 0xEA, 3, 0, 0xF2, 3, 0]);
        start.extend([0xA0, 4, 2]);
        assert_eq!(send(&mut rig, A, file, session, &start), OK);
        assert!(rig.driver.machine.device_process(4242, 1).is_some());
        rig.exit(A, &[file]);
        assert_eq!(rig.driver.machine.device_process(4242, 1), None);
        rig.exit(A, &[manager]);
        assert!(rig.driver.state().is_empty());
    }

    #[test]
    fn a_session_that_the_daemon_closed_can_still_be_read_for_a_while() {
        let mut rig = Rig::new(Host::default());
        let (file, session, index) = connected(&mut rig);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        assert_eq!(send(&mut rig, A, file, session, &[1, 2, 3]), OK);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), code(error::PEER_CLOSED));
        assert_eq!(peek(&mut rig, file, session, index).0, OK);
        rig.driver.pass_time(HALF_CLOSED);
        assert_eq!(peek(&mut rig, file, session, index).0, code(error::CLOSED));
    }

    #[test]
    fn a_session_without_an_owner_is_closed_after_a_while() {
        let mut rig = Rig::new(Host::default());
        let file = rig.open(A, PATH).unwrap();
        assert_eq!(call(&mut rig, A, file, CONNECT, &TO_DAEMON).0, OK);
        rig.driver.close(file, true);
        assert_eq!(rig.driver.state().sessions.len(), 1, "closing a file that it is not tied to does nothing");
        rig.driver.pass_time(RECLAIM);
        assert_eq!(rig.driver.state().sessions, []);
    }

    #[test]
    fn a_device_that_comes_back_has_forgotten_its_sessions() {
        let mut rig = Rig::new(Host::default());
        let (file, session, index) = connected(&mut rig);
        let Outcome::Wait(_) = peek(&mut rig, file, session, index).0 else { panic!("nothing is there") };
        rig.driver.machine.remove_device(1);
        assert_eq!(peek(&mut rig, file, session, index).0, code(error::CLOSED), "the wait ends");
        assert_eq!(send(&mut rig, A, file, session, &GREETING), code(error::CLOSED));
        assert_eq!(call(&mut rig, A, file, CONNECT, &TO_DAEMON).0, code(17));
        rig.driver.machine.restore_device(1);
        assert_eq!(peek(&mut rig, file, session, index).0, code(error::CLOSED));
        assert_eq!(rig.driver.state().sessions, []);
        let (_, _, _) = connected(&mut rig);
    }

    #[test]
    fn another_container_does_not_see_the_session() {
        let places = vec![Place::host(), Place::container(&[1])];
        let mut rig = Rig::new(Host { places, ..Host::default() });
        rig.driver.machine.put(B.0, 1);
        let (_, session, _) = connected(&mut rig);
        let file = rig.open(B, PATH).unwrap();
        assert_eq!(send(&mut rig, B, file, session, &GREETING), code(error::PARAMETER));
        assert_eq!(call(&mut rig, B, file, CONNECT, &Connect { device: 0, ..TO_DAEMON }).0, code(error::TRANSLATION));
    }

    #[test]
    fn a_late_answer_comes_late_and_the_receiver_sleeps_until_then() {
        let late = |time| Host { daemon: Daemon::Late(time), ..Host::default() };
        let mut rig = Rig::new(late(Duration::from_secs(3600)));
        let (file, session, index) = connected(&mut rig);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        let Outcome::Wait(_) = peek(&mut rig, file, session, index).0 else { panic!("it is late") };
        let mut rig = Rig::new(late(Duration::from_millis(5)));
        let (file, session, index) = connected(&mut rig);
        let start = Instant::now();
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        let outcome = loop {
            match peek(&mut rig, file, session, index).0 {
                Outcome::Wait(wake) => std::thread::sleep(wake.saturating_duration_since(Instant::now())),
                outcome => break outcome,
            }
        };
        assert_eq!(outcome, OK);
        assert!(start.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn seven_unread_packets_block_the_other_sessions_of_the_service() {
        let mut rig = Rig::new(Host::default());
        let (full, slot, index) = connected(&mut rig);
        for _ in 0..UNREAD {
            assert_eq!(send(&mut rig, A, full, slot, &GREETING), OK);
        }
        let (file, session, other) = connected(&mut rig);
        assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        let Outcome::Wait(_) = peek(&mut rig, file, session, other).0 else { panic!("the channel is blocked") };
        let (outcome, view) = peek(&mut rig, full, slot, index);
        assert_eq!(outcome, OK);
        let destination = rig.heap.put(&[0; 200]);
        let recv = Recv { session: slot, destination, length: view.length, buffers: 1, ..Default::default() };
        assert_eq!(call(&mut rig, A, full, RECV, &recv).0, OK);
        assert_eq!(peek(&mut rig, file, session, other).0, OK);
    }

    #[test]
    fn fifteen_packets_fit_into_the_queue_to_a_silent_device() {
        let mut rig = Rig::new(Host::default());
        let (file, session, _) = connected(&mut rig);
        rig.driver.machine.silence_device(1, Duration::from_secs(3600));
        for _ in 0..SEND_QUEUE {
            assert_eq!(send(&mut rig, A, file, session, &GREETING), OK);
        }
        let source = rig.heap.put(&GREETING);
        let length = GREETING.len() as i32;
        let no_wait = Send { session, source, length, wait: WAIT_NOT, ..Default::default() };
        assert_eq!(call(&mut rig, A, file, SEND, &no_wait).0, code(error::NOTHING));
        let Outcome::Wait(_) = send(&mut rig, A, file, session, &GREETING) else { panic!("the queue is full") };
        rig.now -= Duration::from_millis(PATIENCE.into());
        assert_eq!(send(&mut rig, A, file, session, &GREETING), code(error::SEND_TIMEOUT));
    }

    #[test]
    fn the_pool_has_1920_sessions_of_the_daemon_for_each_device() {
        let mut rig = Rig::new(Host::default());
        let file = rig.open(A, PATH).unwrap();
        let mut numbers = std::collections::BTreeSet::new();
        for _ in 0..2 * LONG_SESSIONS {
            let (outcome, view) = call(&mut rig, A, file, CONNECT, &TO_DAEMON);
            assert_eq!(outcome, OK);
            assert!(numbers.insert(view.session));
        }
        assert_eq!(call(&mut rig, A, file, CONNECT, &TO_DAEMON).0, code(error::NO_SESSION));
    }

    #[test]
    fn a_container_without_a_table_translates_no_device() {
        let mut rig = Rig::new(Host { places: vec![Place::container(&[0])], ..Host::default() });
        let file = rig.open(A, PATH).unwrap();
        assert_eq!(call(&mut rig, A, file, CONNECT, &Connect { device: 0, ..TO_DAEMON }).0, code(error::TRANSLATION));
        let peer = rig.call(A, file, GET_PEER_DEV_ID.request(), Arg([0; ARG_SIZE])).0;
        assert_eq!(peer, code(error::TRANSLATION));
    }
}
