//! The front: the process that talks to clients.
//!
//! One thread waits for the listening socket, the keeper and all clients. What a message means is
//! decided by [`Books`](crate::books::Books); here are sockets, buffers and time limits. A client
//! that stalls, floods or talks nonsense loses its own connection and nothing else.

use crate::books::{Books, ClientId, Effect, Order};
use crate::journal::{Journal, Token};
use crate::keeper::lives;
use crate::link::KeeperLink;
use crate::policy::{Peer, Policy};
use crate::protocol::{self, Answer, Code, Request, ServiceError};
use nix::errno::Errno;
use nix::libc::{SO_PEERGROUPS, SOL_SOCKET, getsockopt as getsockopt_raw, socklen_t};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, sendmsg};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// How long a client may take for its hello, and for each frame from its first byte to its last.
const PATIENCE: Duration = Duration::from_secs(10);
/// Answers that a client has not read are at most so many bytes.
const UNREAD: usize = 2 * protocol::FRAME_MAX;
/// Most bytes that are read of a client before others have their turn.
const READ: u64 = 256 << 10;
/// How often the keeper is asked for free memory while there are clients.
const LOOK: Duration = Duration::from_secs(2);
/// A journal that is shorter is not written anew.
const SHORT_JOURNAL: u64 = 64 << 10;

/// Why the front ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Another front has taken over.
    Replaced,
    /// The keeper is gone, and with it all memory that nobody maps.
    KeeperGone,
}

struct Connection {
    socket: UnixStream,
    /// The process at the other end.
    pidfd: Option<OwnedFd>,
    user: u32,
    pid: i32,
    input: Vec<u8>,
    output: VecDeque<u8>,
    /// When the frame that is not whole began, or the connection that has not said hello.
    unfinished: Option<Instant>,
    /// It is closed when its output is sent.
    ending: bool,
}

/// The front's process.
pub(crate) struct Front {
    link: KeeperLink,
    listener: UnixListener,
    books: Books,
    journal: Journal,
    /// Bytes of the journal when it was written anew.
    compact: u64,
    connections: BTreeMap<ClientId, Connection>,
    /// Processes with a role that have not come back to this front.
    absent: BTreeMap<ClientId, OwnedFd>,
    orders: VecDeque<(u64, Order)>,
    clients: usize,
    last_client: u64,
    look: Instant,
    handed_over: bool,
    /// The keeper is gone, and what somebody maps can still be read.
    orphaned: bool,
}

impl Front {
    /// Takes over whatever the keeper has.
    pub(crate) fn start(link: KeeperLink, listener: UnixListener, policy: Policy) -> io::Result<Front> {
        let inventory = link.start()?;
        let now = Instant::now();
        let clients = policy.clients;
        let front = std::process::id() as i32;
        let mut npus = inventory.npus;
        npus.retain(|npu| policy.devices.is_empty() || policy.devices.contains(&npu.physical));
        let mut books = Books::new(policy, npus, inventory.keeper, front, random);
        let mut effects = Vec::new();
        if let Some(journal) = inventory.journal {
            let (_, records) = Journal::read(File::from(journal))?;
            effects = books.recover(records, inventory.held, inventory.tickets, now);
        }
        listener.set_nonblocking(true)?;
        let mut front = Front {
            link,
            listener,
            books,
            journal: Journal::create()?,
            compact: 0,
            connections: BTreeMap::new(),
            absent: BTreeMap::new(),
            orders: VecDeque::new(),
            clients,
            last_client: 0,
            look: now,
            handed_over: false,
            orphaned: false,
        };
        // The keeper has answered, so it can take the journal.
        front.rewrite_journal(MsgFlags::empty())?;
        front.carry_out(effects)?;
        for (id, pid, start) in front.books.absentees() {
            // The number may have another process by now; that one started later.
            if let Some(pidfd) = pidfd_of(pid).filter(|_| start != 0 && started(pid) == start) {
                front.books.watch(id);
                front.absent.insert(id, pidfd);
            }
        }
        Ok(front)
    }

    /// Serves until another front takes over, or the keeper is gone and nobody has a role any more.
    pub(crate) fn run(mut self) -> io::Result<Ended> {
        loop {
            let ready = self.wait()?;
            let now = Instant::now();
            if ready.keeper {
                loop {
                    match self.link.answer() {
                        Ok(Some((number, kept))) => {
                            let effects = self.books.kept(number, kept, now);
                            self.carry_out(effects)?;
                        }
                        Ok(None) => break,
                        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                            self.orphaned = true;
                            self.orders.clear();
                            let effects = self.books.orphan();
                            self.carry_out(effects)?;
                            break;
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            if ready.listener {
                self.accept(now);
            }
            for id in ready.readable {
                self.read(id, now)?;
            }
            for id in ready.writable {
                self.write(id);
            }
            for id in ready.dead {
                self.bury(id, now)?;
            }
            for id in ready.absent {
                self.absent.remove(&id);
                // Nothing happens if it has come back meanwhile.
                let effects = self.books.disconnect(id, now);
                self.carry_out(effects)?;
            }
            let effects = self.books.tick(now);
            self.carry_out(effects)?;
            self.end_the_slow(now)?;
            self.serve_waiting_frames(now)?;
            if self.handed_over {
                return Ok(Ended::Replaced);
            }
            if self.orphaned && !self.books.has_roles() {
                return Ok(Ended::KeeperGone);
            }
            if !self.connections.is_empty() && self.look <= now && !self.orphaned {
                self.look = now + LOOK;
                let effects = self.books.look_at_memory();
                self.carry_out(effects)?;
            }
            self.send_orders()?;
            let grown = self.journal.length() > SHORT_JOURNAL && self.journal.length() > self.compact / 2 * 3;
            if grown && self.orders.is_empty() && !self.orphaned {
                self.rewrite_journal(MsgFlags::MSG_DONTWAIT)?;
            }
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let orders = if self.orders.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        // The end of the keeper would be reported for ever.
        let (link, events) = match self.orphaned {
            true => (self.listener.as_fd(), PollFlags::empty()),
            false => (self.link.as_fd(), PollFlags::POLLIN | orders),
        };
        let mut polled = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN), PollFd::new(link, events)];
        let mut ids = Vec::new();
        for (id, connection) in &self.connections {
            // A copy of the socket in a child does not keep the role of a process that ended.
            let (process, events) = match &connection.pidfd {
                Some(pidfd) => (pidfd.as_fd(), PollFlags::POLLIN),
                None => (connection.socket.as_fd(), PollFlags::empty()),
            };
            polled.push(PollFd::new(process, events));
            let mut events = PollFlags::empty();
            if self.listens(*id, connection) {
                events |= PollFlags::POLLIN;
            }
            if !connection.output.is_empty() {
                events |= PollFlags::POLLOUT;
            }
            polled.push(PollFd::new(connection.socket.as_fd(), events));
            ids.push(*id);
        }
        let first_absent = polled.len();
        polled.extend(self.absent.values().map(|pidfd| PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)));
        let slow = self.connections.values().filter_map(|connection| connection.unfinished).min();
        let look = (!self.connections.is_empty() && !self.orphaned).then_some(self.look);
        let next = [self.books.next_tick(), slow.map(|since| since + PATIENCE), look].into_iter().flatten().min();
        let timeout = match next {
            None => PollTimeout::NONE,
            // Rounded up: a poll of 0 ms in the last millisecond would turn in circles.
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut polled, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |at: usize, events: PollFlags| polled[at].revents().is_some_and(|it| it.intersects(events));
        let ended = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        let of = |place: usize, events: PollFlags| {
            ids.iter().enumerate().filter(move |(at, _)| ready(2 * at + place, events)).map(|(_, id)| *id)
        };
        Ok(Ready {
            listener: ready(0, PollFlags::POLLIN),
            keeper: !self.orphaned && ready(1, PollFlags::POLLIN | ended),
            absent: (self.absent.keys().enumerate())
                .filter(|(at, _)| ready(first_absent + at, PollFlags::POLLIN))
                .map(|(_, id)| *id)
                .collect(),
            dead: of(2, PollFlags::POLLIN).collect(),
            readable: of(3, PollFlags::POLLIN | ended).collect(),
            writable: of(3, PollFlags::POLLOUT).collect(),
        })
    }

    /// True if more input of a client is wanted now.
    fn listens(&self, id: ClientId, connection: &Connection) -> bool {
        !connection.ending && self.books.is_ready(id) && connection.output.len() < protocol::FRAME_MAX
    }

    fn accept(&mut self, now: Instant) {
        // A few at a time, so that those who are connected are served in between.
        for _ in 0..16 {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "a client could not be accepted");
                    // Most likely no descriptor is left, and the socket stays readable.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            let Ok(credentials) = getsockopt(&socket, PeerCredentials) else { continue };
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            let (pid, user) = (credentials.pid(), credentials.uid());
            let mut connection = Connection {
                pidfd: process_of(&socket, pid),
                socket,
                user,
                pid,
                input: Vec::new(),
                output: VecDeque::new(),
                unfinished: Some(now),
                ending: false,
            };
            if let Some(refused) = self.no_room(&connection) {
                connection.say(&Answer::Error(refused));
                let _ = connection.flush();
                continue;
            }
            self.last_client += 1;
            let id = ClientId(self.last_client);
            let (mut groups, mut start, mut container) =
                (groups_of(&connection.socket), started(pid), container_of(pid));
            groups.push(credentials.gid());
            if !connection.pidfd.as_ref().is_some_and(lives) {
                // The number may be that of another process by now.
                (start, container) = (0, String::new());
            }
            self.books.connect(id, Peer { pid, start, user, groups, container }, now);
            self.connections.insert(id, connection);
        }
    }

    /// Why there is no room for one more client: all places are taken, or too many by its user or
    /// process.
    fn no_room(&self, new: &Connection) -> Option<ServiceError> {
        let count = |same: fn(&Connection, &Connection) -> bool| {
            self.connections.values().filter(|connection| same(connection, new)).count()
        };
        let of_user = count(|one, other| one.user == other.user);
        let of_process = count(|one, other| one.pid == other.pid && one.pid != 0);
        let problem = if self.connections.len() >= self.clients {
            format!("all {} places are taken", self.clients)
        } else if self.clients >= 8 && of_process >= self.clients / 4 {
            format!("process {} has {of_process} of {} places already", new.pid, self.clients)
        } else if self.clients >= 8 && of_user >= self.clients / 4 * 3 && new.user != 0 {
            format!("user {} has {of_user} of {} places already", new.user, self.clients)
        } else {
            return None;
        };
        Some(ServiceError { code: Code::Busy, problem, remedy: "close some connections, or allow more clients".into() })
    }

    fn read(&mut self, id: ClientId, now: Instant) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let before = connection.input.len();
        let read = (&connection.socket).take(READ).read_to_end(&mut connection.input);
        let blocked = read.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        if connection.input.len() == before {
            return if blocked { Ok(()) } else { self.gone(id, now) };
        }
        if before == 0 && connection.unfinished.is_none() {
            connection.unfinished = Some(now);
        }
        self.serve(id, now)
    }

    /// Serves what a process has sent before it ended, and ends its connection.
    fn bury(&mut self, id: ClientId, now: Instant) -> io::Result<()> {
        while self.connections.get(&id).is_some_and(|connection| self.listens(id, connection)) {
            let before = self.connections.get(&id).map(|connection| connection.input.len());
            self.read(id, now)?;
            // Nothing more has come.
            if self.connections.get(&id).map(|connection| connection.input.len()) == before {
                break;
            }
        }
        self.gone(id, now)
    }

    /// Serves the whole frames of a client, while it has none that waits.
    fn serve(&mut self, id: ClientId, now: Instant) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        // What is served is cut off once, at the end: a client may send thousands of small frames.
        let input = std::mem::take(&mut connection.input);
        let mut served = 0;
        while let Some(connection) = self.connections.get_mut(&id) {
            if connection.ending || !self.books.is_ready(id) || connection.output.len() >= protocol::FRAME_MAX {
                break;
            }
            match protocol::decode::<Request>(&input[served..]) {
                Ok(None) => break,
                Ok(Some((length, request))) => {
                    served += length;
                    connection.unfinished = (served < input.len()).then_some(now);
                    let effects = self.books.request(id, request, now);
                    self.carry_out(effects)?;
                }
                Err(error) => {
                    self.end(id, error);
                    return Ok(());
                }
            }
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            // A connection that sent much once does not keep the room for it.
            connection.input = if served == 0 { input } else { input[served..].to_vec() };
        }
        Ok(())
    }

    /// Serves frames that arrived while an earlier request of their client waited.
    fn serve_waiting_frames(&mut self, now: Instant) -> io::Result<()> {
        let waiting = self.connections.iter().filter(|(_, it)| it.input.len() >= 4).map(|(id, _)| *id);
        for id in waiting.collect::<Vec<_>>() {
            self.serve(id, now)?;
        }
        Ok(())
    }

    fn gone(&mut self, id: ClientId, now: Instant) -> io::Result<()> {
        self.connections.remove(&id);
        let effects = self.books.disconnect(id, now);
        self.carry_out(effects)
    }

    /// Sends an error, and closes the connection.
    fn end(&mut self, id: ClientId, error: ServiceError) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.say(&Answer::Error(error));
            (connection.ending, connection.unfinished) = (true, Some(Instant::now()));
            self.write(id);
        }
    }

    fn write(&mut self, id: ClientId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            // A connection that cannot be written to ends when it is read.
            let _ = connection.flush();
        }
    }

    fn end_the_slow(&mut self, now: Instant) -> io::Result<()> {
        let mut over = Vec::new();
        for (id, connection) in &self.connections {
            let late = connection.unfinished.is_some_and(|since| since + PATIENCE <= now);
            if connection.ending && (connection.output.is_empty() || late) || connection.output.len() > UNREAD {
                over.push((*id, true));
            } else if late && self.listens(*id, connection) {
                over.push((*id, false));
            }
        }
        for (id, at_once) in over {
            if at_once {
                self.gone(id, now)?;
            } else {
                let problem = "no whole message came in ten seconds".into();
                self.end(id, ServiceError { code: Code::Protocol, problem, remedy: "send it at once".into() });
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, effects: Vec<Effect>) -> io::Result<()> {
        for effect in effects {
            match effect {
                Effect::Record(record) => self.journal.append(&record)?,
                Effect::Answer(id, answer) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        if matches!(answer, Answer::Hello { .. }) {
                            connection.unfinished = None;
                        }
                        connection.say(&answer);
                        let _ = connection.flush();
                    }
                }
                Effect::End(id, error) => self.end(id, error),
                Effect::Keep(number, order) => self.orders.push_back((number, order)),
                Effect::HandOver(id) => self.hand_over(id),
            }
        }
        Ok(())
    }

    fn send_orders(&mut self) -> io::Result<()> {
        while let Some((number, order)) = self.orders.front() {
            let pidfd = match order {
                Order::Trust { client, .. } => self.connections.get(client).and_then(|it| it.pidfd.as_ref()),
                _ => None,
            };
            match self.link.order(*number, order, pidfd.map(AsFd::as_fd)) {
                Ok(()) => self.orders.pop_front(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // Its end of the socket tells next.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// Writes the journal anew, without what is history. Later, if the keeper is busy.
    fn rewrite_journal(&mut self, flags: MsgFlags) -> io::Result<()> {
        let mut journal = Journal::create()?;
        for record in self.books.snapshot() {
            journal.append(&record)?;
        }
        match self.link.keep_journal(journal.file().as_fd(), flags) {
            Ok(()) => {
                self.compact = journal.length();
                self.journal = journal;
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::BrokenPipe) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends the descriptors of the service to a client.
    fn hand_over(&mut self, id: ClientId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Ok(frame) = protocol::encode(&Answer::Replaced {}) else { return };
        let files = [self.listener.as_raw_fd(), self.link.as_fd().as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&files)];
        let parts = [IoSlice::new(&frame)];
        let sent = sendmsg::<()>(connection.socket.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None);
        // A frame of a few bytes goes whole into an empty socket, or not at all.
        match sent {
            Ok(length) if length == frame.len() => self.handed_over = true,
            _ => tracing::warn!("the service could not be handed over"),
        }
    }
}

#[derive(Default)]
struct Ready {
    listener: bool,
    keeper: bool,
    readable: Vec<ClientId>,
    writable: Vec<ClientId>,
    /// Clients whose process has ended.
    dead: Vec<ClientId>,
    /// The same of those who have not come back.
    absent: Vec<ClientId>,
}

impl Connection {
    fn say(&mut self, answer: &Answer) {
        match protocol::encode(answer) {
            Ok(frame) => self.output.extend(frame),
            Err(error) => {
                if let Ok(frame) = protocol::encode(&Answer::Error(error)) {
                    self.output.extend(frame);
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            let (first, _) = self.output.as_slices();
            match self.socket.write(first) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A descriptor of the process at the other end of a socket. Where the kernel does not give it
/// (before Linux 6.5), it is made from the number, which is right if the peer still has the socket.
fn process_of(socket: &UnixStream, pid: i32) -> Option<OwnedFd> {
    if let Ok(pidfd) = getsockopt(socket, PeerPidfd) {
        return Some(pidfd);
    }
    let pidfd = pidfd_of(pid)?;
    let mut polled = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let connected = poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready == 0);
    connected.then_some(pidfd)
}

/// A descriptor of the process that has a number now.
fn pidfd_of(pid: i32) -> Option<OwnedFd> {
    if pid <= 0 {
        return None;
    }
    // SAFETY: takes two numbers; the result is checked.
    let raw = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: a new descriptor, which nobody else has.
    i32::try_from(raw).ok().filter(|raw| *raw >= 0).map(|raw| unsafe { OwnedFd::from_raw_fd(raw) })
}

/// When a process started, in the kernel's clock ticks; 0 if it is not known.
fn started(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may have spaces and parentheses of its own.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.split_ascii_whitespace().nth(19).and_then(|start| start.parse().ok()).unwrap_or(0)
}

/// The supplementary groups that the process at the other end had when it connected. What it does
/// afterwards, such as running a program of another group, gives it no rights.
fn groups_of(socket: &UnixStream) -> Vec<u32> {
    let mut groups = vec![0u32; 64];
    loop {
        let mut length = size_of_val(&groups[..]) as socklen_t;
        let (level, option, buffer) = (SOL_SOCKET, SO_PEERGROUPS, groups.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most `length` bytes to the buffer, which has so many.
        let done = unsafe { getsockopt_raw(socket.as_raw_fd(), level, option, buffer, &raw mut length) };
        let count = length as usize / size_of::<u32>();
        match Errno::result(done) {
            Ok(_) => {
                groups.truncate(count);
                return groups;
            }
            Err(Errno::ERANGE) if count > groups.len() => groups.resize(count, 0),
            Err(_) => return Vec::new(),
        }
    }
}

/// The first characters of the id of a process's container: the longest word of hexadecimal digits
/// in its control group.
fn container_of(pid: i32) -> String {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let words = groups.split(|c: char| !c.is_ascii_hexdigit()).filter(|word| word.len() >= 32);
    words.max_by_key(|word| word.len()).map(|word| word.chars().take(12).collect()).unwrap_or_default()
}

/// Random bytes of the kernel's.
pub(crate) fn random() -> Token {
    let mut token = [0; 16];
    if let Ok(mut random) = File::open("/dev/urandom") {
        let _ = random.read_exact(&mut token);
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::{ForkResult, Gid, fork, getgroups, getuid, setgroups};

    #[test]
    fn a_peer_has_the_groups_with_which_it_connected() {
        let (own, _other) = UnixStream::pair().unwrap();
        let mut before: Vec<u32> = getgroups().unwrap().into_iter().map(Gid::as_raw).collect();
        let mut groups = groups_of(&own);
        before.sort_unstable();
        groups.sort_unstable();
        assert_eq!(groups, before);
        if !getuid().is_root() {
            return;
        }
        // Only root can have other groups, and more than are expected.
        // SAFETY: the child makes system calls, and ends.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let many: Vec<Gid> = (1..=300).map(Gid::from_raw).collect();
                let changed = setgroups(&many).is_ok();
                let same = groups_of(&own).len() == groups.len();
                let pair = UnixStream::pair();
                let all = pair.is_ok_and(|(new, _)| groups_of(&new).len() == many.len());
                // SAFETY: it ends this process.
                unsafe { nix::libc::_exit(i32::from(!(changed && same && all))) };
            }
            ForkResult::Parent { child } => {
                let ended = nix::sys::wait::waitpid(child, None).unwrap();
                assert_eq!(ended, nix::sys::wait::WaitStatus::Exited(child, 0));
            }
        }
    }
}
