//! Export and import in one call each, over a connected Unix socket.
//!
//! ```text
//! importer                               exporter
//!   hello: version, own bare tgid  ──►
//!                                  ◄──   ticket (the importer is on the trust list now)
//!   result of the import           ──►
//! ```
//!
//! For many at once the hello says so, and the number of tickets comes before them.
//!
//! Each message has a fixed length, so nothing that a hostile peer sends can make the other side
//! read without end. When either side dies the kernel closes the socket, which ends the other with
//! an error; a timeout ends a peer that lives but says nothing.
//!
//! Who the importer is does not come from the message but from the kernel, which vouches for the
//! sender of the hello (SCM_CREDENTIALS): also on one half of a socketpair, or on a socket that was
//! connected by another process and passed on.

use super::bare_tgid::is_initial_namespace;
use super::peer_process::{Credentials, PeerProcess};
use super::{BareTgid, Place, Ticket, import};
use crate::deadline::Deadline;
use crate::error::{Errno, Error, Exchange, Invalid, Result};
use crate::physical::PhysicalMemory;
use crate::session::Session;
use crate::trace;
use nix::cmsg_space;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, UnixCredentials, recvmsg, send as send_bytes};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zerocopy::little_endian::{I32, U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"AVMH";
const VERSION: u16 = 1;
const SEND: &str = "send memory to another process";
const RECEIVE: &str = "receive memory from another process";

/// What the importer says first.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Hello {
    magic: [u8; 4],
    version: U16,
    /// 1 if any number of tickets is wanted, 0 for one.
    many: u8,
    reserved: u8,
    tgid: I32,
}

/// How many tickets come, where many are wanted.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Number {
    tickets: U32,
}

/// More are not sent at once: a peer must not be able to make us wait for, and keep, any number.
const MANY: usize = 65_536;

/// What the importer says last: 0, or the errno of the import.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Outcome {
    errno: U16,
}

/// [`Outcome::errno`] of an import that failed before the kernel was asked.
const NO_ERRNO: u16 = u16::MAX;

/// Exports `memory` to the process at the other end of `socket`, which calls [`receive`]: it is put
/// on the trust list, gets the ticket, and imports.
///
/// Returns when the other side has imported, so that the memory may be dropped here and lives on
/// there. The process that is trusted is the one that the kernel saw sending; if this process lives
/// in a pid namespace of its own it cannot know that one's number outside, and believes what the
/// other says. `timeout` bounds the whole exchange. The socket may be blocking or not, and can be
/// used for something else afterwards.
///
/// # Errors
///
/// [`Error::Exchange`] if the other side is late, dies, or is not what it says; those of
/// [`PhysicalMemory::export`] and of [`Export::trust`](super::Export::trust).
pub fn send(socket: &UnixStream, memory: &PhysicalMemory, timeout: Duration) -> Result<()> {
    send_all(socket, std::slice::from_ref(memory), false, timeout)
}

/// Exports many at once to a process that calls [`receive_many`]: all of them or none, as [`send`]
/// does one. At most 65 536.
///
/// # Errors
///
/// Those of [`send`]; [`Error::Invalid`] for more.
pub fn send_many(socket: &UnixStream, memories: &[PhysicalMemory], timeout: Duration) -> Result<()> {
    if memories.len() > MANY {
        let problem = format!("{} memories are too many", memories.len());
        return Err(Invalid::because(SEND, problem, "At most 65 536 are sent at once."));
    }
    send_all(socket, memories, true, timeout)
}

fn send_all(socket: &UnixStream, memories: &[PhysicalMemory], many: bool, timeout: Duration) -> Result<()> {
    // A child of the process that has the memory waits for no peer.
    memories.first().map_or(Ok(()), |memory| memory.block.device.session.check_process())?;
    let wire = Wire::new(socket, timeout, SEND);
    let mut hello = Hello::new_zeroed();
    let sender = wire.read_signed(hello.as_mut_bytes(), "hello")?;
    if hello.magic != MAGIC || hello.version != VERSION {
        return Err(wire.wrong(
            "the other process speaks something else",
            "Both sides must use this library, in versions that know each other.",
        ));
    }
    if hello.many != u8::from(many) {
        return Err(wire.wrong(
            if many { "the other process wants one memory" } else { "the other process wants many at once" },
            "send goes with receive, and send_many with receive_many.",
        ));
    }
    let mut message = Vec::new();
    if many {
        message.extend_from_slice(Number { tickets: (memories.len() as u32).into() }.as_bytes());
    }
    let mut importer = None;
    if let Some(first) = memories.first() {
        importer = Some(trusted_peer(&wire, &first.session(), hello.tgid.get(), &sender)?);
    }
    for memory in memories {
        if let Some(importer) = importer {
            message.extend(trust(&wire, memory, importer, &sender)?.to_bytes());
        }
    }
    wire.write_signed(&message, "ticket")?;
    let mut outcome = Outcome { errno: 0.into() };
    wire.read(outcome.as_mut_bytes(), "result of the import")?;
    let reason = match outcome.errno.get() {
        0 => return Ok(()),
        NO_ERRNO => "it refused the ticket".to_owned(),
        errno => format!("the driver answered {}", Errno::from_raw(errno.into())),
    };
    let importer = importer.map_or_else(String::new, |importer| format!(" {importer}"));
    Err(wire.wrong(format!("process{importer} could not import it: {reason}"), "Its own error says more."))
}

/// Puts the process at the other end on the trust list, and makes the ticket for it.
pub(super) fn trust(
    wire: &Wire<'_>,
    memory: &PhysicalMemory,
    importer: BareTgid,
    sender: &PeerProcess,
) -> Result<Ticket> {
    let export = memory.export()?;
    // The list holds numbers. The number was the sender's all the time if the sender is still there
    // after it was listed; otherwise it may be another process's by now, which gets no ticket.
    if !sender.is_there(wire.socket) {
        return Err(wire.gone("ticket"));
    }
    export.trust(&[importer])?;
    if !sender.is_there(wire.socket) {
        return Err(wire.wrong(
            format!("process {importer} ended while it was being trusted"),
            "If another process gets its number it is on the trust list: free this memory and export other memory.",
        ));
    }
    export.ticket()
}

/// Imports at `place` what the process at the other end of `socket` gives by [`send`]. `timeout`
/// bounds the whole exchange.
///
/// The ticket must name the process that sent it as its exporter, by number and start time. The
/// number of the share is the sender's word: the kernel tells a share's size, pages and device, not
/// who exported it. So a hostile sender can name a share that somebody else trusts this process
/// with. That is an error if the share was imported here before and is still held, or if the sizes
/// differ; otherwise this process gets that other memory.
///
/// # Errors
///
/// [`Error::Exchange`] if the other side is late or dies; those of [`import`].
pub fn receive<'a>(socket: &UnixStream, place: impl Into<Place<'a>>, timeout: Duration) -> Result<PhysicalMemory> {
    let place = place.into();
    let (wire, session) = greet(socket, &place, false, timeout)?;
    let imported = receive_one(&wire, &session, place)?;
    report(&wire, imported)
}

/// Imports at `place` all that the process at the other end of `socket` gives by [`send_many`], or
/// nothing.
///
/// # Errors
///
/// Those of [`receive`].
pub fn receive_many<'a>(
    socket: &UnixStream,
    place: impl Into<Place<'a>>,
    timeout: Duration,
) -> Result<Vec<PhysicalMemory>> {
    let place = place.into();
    let (wire, session) = greet(socket, &place, true, timeout)?;
    let mut number = Number { tickets: 0.into() };
    wire.read_signed(number.as_mut_bytes(), "number of tickets")?;
    let number = number.tickets.get();
    if number as usize > MANY {
        return Err(wire.wrong(format!("{number} tickets are too many"), "At most 65 536 are sent at once."));
    }
    let mut memories = Vec::new();
    for _ in 0..number {
        match receive_one(&wire, &session, place)? {
            Ok(memory) => memories.push(memory),
            Err(error) => {
                // Released before the exporter hears that nothing was imported.
                drop(memories);
                return report(&wire, Err(error));
            }
        }
    }
    report(&wire, Ok(memories))
}

/// Says to the exporter who this is and what is wanted.
fn greet<'s>(socket: &'s UnixStream, place: &Place<'_>, many: bool, timeout: Duration) -> Result<(Wire<'s>, Session)> {
    let wire = Wire::new(socket, timeout, RECEIVE);
    let session = Session { inner: place.inner().session.clone() };
    let tgid = BareTgid::of_this_process(&session)?.as_raw().into();
    let hello = Hello { magic: MAGIC, version: VERSION.into(), many: many.into(), reserved: 0, tgid };
    wire.write_signed(hello.as_bytes(), "hello")?;
    Ok((wire, session))
}

/// The next memory, or why it is not imported, which the exporter is told. An error if no ticket
/// came.
fn receive_one(wire: &Wire<'_>, session: &Session, place: Place<'_>) -> Result<Result<PhysicalMemory>> {
    let mut bytes = [0; Ticket::LENGTH];
    let sender = wire.read_signed(&mut bytes, "ticket")?;
    let ticket = Ticket::from_bytes(&bytes).map_err(Error::from);
    let ticket = ticket.and_then(|ticket| own_ticket(wire, session, ticket, &sender));
    Ok(ticket.and_then(|ticket| import(place, &ticket)))
}

/// Says to the exporter what became of the import.
fn report<T>(wire: &Wire<'_>, imported: Result<T>) -> Result<T> {
    let errno = match &imported {
        Ok(_) => 0,
        Err(error) => error.errno().map_or(NO_ERRNO, |errno| errno.raw() as u16),
    };
    let sent = wire.write(Outcome { errno: errno.into() }.as_bytes(), "result of the import");
    // If the exporter is gone by now the memory is ours all the same.
    if let (Ok(_), Err(error)) = (&imported, sent) {
        trace::debug(error, "the exporter did not wait for the result");
    }
    imported
}

/// The process to trust: the one that the kernel saw sending, if we can know it by the number that
/// counts; else the one that it says it is.
pub(super) fn trusted_peer(wire: &Wire<'_>, session: &Session, claimed: i32, sender: &PeerProcess) -> Result<BareTgid> {
    let claimed = BareTgid::from_raw(claimed)?;
    if !is_initial_namespace(session)? {
        return Ok(claimed);
    }
    let Some(sender) = sender.pid else {
        return Err(wire.wrong(
            "the kernel does not say which process asks",
            "It must use this library's share::receive, in a pid namespace that this process can see.",
        ));
    };
    if sender != claimed.as_raw() {
        return Err(wire.wrong(
            format!("process {sender} asks in the name of process {claimed}"),
            "The process that imports must ask itself; for another one, use Export::trust and a ticket.",
        ));
    }
    Ok(claimed)
}

/// A ticket of the process that sent it. One that names another exporter would make this process
/// import, and perhaps write to, memory that was shared with it by somebody else.
pub(super) fn own_ticket(wire: &Wire<'_>, session: &Session, ticket: Ticket, sender: &PeerProcess) -> Result<Ticket> {
    if is_exporter(sender, &ticket, is_initial_namespace(session)?) {
        return Ok(ticket);
    }
    Err(wire.wrong(
        format!("the ticket names process {} as the exporter, and another process sent it", ticket.exporter),
        "The exporter must send its memory itself; for a ticket that was passed on, use share::import.",
    ))
}

/// Whether a process is the exporter that a ticket names, as far as this one can tell.
fn is_exporter(sender: &PeerProcess, ticket: &Ticket, initial: bool) -> bool {
    // Outside of the initial pid namespace the two numbers are of different kinds; the times when
    // the processes started are not, and there a ticket must say its exporter's.
    let unknown = initial && ticket.exporter_start == 0;
    let started = sender.start.is_none_or(|start| unknown || start == ticket.exporter_start);
    started && (!initial || sender.pid == Some(ticket.exporter))
}

/// A socket with a deadline. Nothing of the socket's own settings is changed for longer than a
/// call.
pub(super) struct Wire<'a> {
    pub(super) socket: &'a UnixStream,
    deadline: Deadline,
    operation: &'static str,
}

impl<'a> Wire<'a> {
    pub(super) fn new(socket: &'a UnixStream, timeout: Duration, operation: &'static str) -> Self {
        Wire { socket, deadline: Deadline::after(timeout), operation }
    }

    /// Whether the time is over. What has arrived by then can still be received.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_over()
    }

    /// Fills `bytes`, and says which process sent them.
    fn read_signed(&self, bytes: &mut [u8], what: &str) -> Result<PeerProcess> {
        let _credentials = Credentials::on(self.socket).map_err(|errno| self.failed(what, Errno::of(errno)))?;
        let mut rest = bytes;
        let mut sender: Option<PeerProcess> = None;
        while !rest.is_empty() {
            // Room for the credentials and the pidfd: other descriptors that a peer may send along
            // are not taken.
            let mut room = cmsg_space!(UnixCredentials, [RawFd; 1]);
            let count = self.receive(rest, what, Some(&mut room))?;
            let now = PeerProcess::of(&room);
            match &sender {
                Some(before) if !before.is_same(&now) => {
                    return Err(self
                        .wrong(format!("two processes or users sent the {what}"), "One process must ask for itself."));
                }
                Some(_) => {}
                None => sender = Some(now),
            }
            rest = &mut rest[count..];
        }
        sender.ok_or_else(|| self.gone(what))
    }

    /// Fills `rest`.
    fn read(&self, mut rest: &mut [u8], what: &str) -> Result<()> {
        while !rest.is_empty() {
            let count = self.receive(rest, what, None)?;
            rest = &mut rest[count..];
        }
        Ok(())
    }

    /// Receives some bytes, at least one, and the control data that there is room for.
    pub(super) fn receive(&self, bytes: &mut [u8], what: &str, mut room: Option<&mut [u8]>) -> Result<usize> {
        loop {
            self.wait(PollFlags::POLLIN, what)?;
            let mut buffer = [IoSliceMut::new(bytes)];
            let control = room.as_deref_mut();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let message = match recvmsg::<()>(self.socket.as_raw_fd(), &mut buffer, control, flags).map_err(Errno::of) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(errno) => return Err(self.failed(what, errno)),
            };
            if message.bytes == 0 {
                return Err(self.gone(what));
            }
            return Ok(message.bytes);
        }
    }

    /// Sends all of `bytes`. The kernel adds which process sends them, which also works where this
    /// process's user has no number, as in some containers.
    pub(super) fn write_signed(&self, bytes: &[u8], what: &str) -> Result<()> {
        let _credentials = Credentials::on(self.socket).map_err(|errno| self.failed(what, Errno::of(errno)))?;
        self.write(bytes, what)
    }

    /// Sends all of `bytes`.
    pub(super) fn write(&self, mut bytes: &[u8], what: &str) -> Result<()> {
        while !bytes.is_empty() {
            self.wait(PollFlags::POLLOUT, what)?;
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send_bytes(self.socket.as_raw_fd(), bytes, flags).map_err(Errno::of) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(self.failed(what, errno)),
            }
        }
        Ok(())
    }

    /// Waits until the socket is worth a try.
    fn wait(&self, event: PollFlags, what: &str) -> Result<()> {
        loop {
            let left = self.deadline.left();
            // Rounded up: a poll of 0 ms in the last millisecond would turn in circles.
            let rounded = left.saturating_add(Duration::from_micros(999));
            let timeout = PollTimeout::try_from(rounded).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.socket.as_fd(), event)], timeout).map_err(Errno::of) {
                Ok(0) if left.is_zero() => return Err(self.late(what)),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(self.failed(what, errno)),
            }
        }
    }

    pub(super) fn failed(&self, what: &str, errno: Errno) -> Error {
        match errno {
            Errno::EPIPE | Errno::ECONNRESET => self.gone(what),
            _ => self.wrong(format!("the socket failed at the {what}: {errno}"), "A connected Unix socket is needed."),
        }
    }

    fn gone(&self, what: &str) -> Error {
        self.wrong(
            format!("the other process closed the socket or died before the {what}"),
            "Start it again, and both sides anew.",
        )
    }

    fn late(&self, what: &str) -> Error {
        self.wrong(
            format!("the {what} did not come in time"),
            "Is the other process alive, and at its call? Allow more time if it is busy.",
        )
    }

    pub(super) fn wrong(&self, problem: impl Into<String>, remedy: &'static str) -> Error {
        Error::Exchange(Exchange { operation: self.operation, problem: problem.into(), remedy })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::{MemoryKind, Page};
    use crate::share::ShareableHandle;

    #[test]
    fn an_exporter_is_known_by_its_number_and_start_or_in_a_container_by_its_start_alone() {
        let own = PeerProcess::this();
        let ticket = Ticket {
            handle: ShareableHandle::new(0, 1),
            size: 2 << 20,
            page: Page::Huge,
            memory: MemoryKind::Hbm,
            device: None,
            generation: ascend_ioctl::Generation::V26_1,
            exporter: own.pid.unwrap(),
            exporter_start: own.start.unwrap(),
            boot_id: [0; 16],
        };
        let number = Ticket { exporter: ticket.exporter + 1, ..ticket };
        let start = Ticket { exporter_start: ticket.exporter_start + 1, ..ticket };
        let silent = Ticket { exporter_start: 0, ..ticket };
        assert!(is_exporter(&own, &ticket, true) && is_exporter(&own, &silent, true));
        assert!(!is_exporter(&own, &number, true) && !is_exporter(&own, &start, true));
        // The number is one of another namespace there.
        assert!(is_exporter(&own, &ticket, false) && is_exporter(&own, &number, false));
        assert!(!is_exporter(&own, &start, false) && !is_exporter(&own, &silent, false));
    }
}
