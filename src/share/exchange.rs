//! Export and import in one call each, over a connected Unix socket.
//!
//! ```text
//! importer                               exporter
//!   hello: version, own bare tgid  ──►
//!                                  ◄──   ticket (the importer is on the trust list now)
//!   result of the import           ──►
//! ```
//!
//! Each message has a fixed length, so a hostile peer cannot make the other side read without end.
//! When either side dies, the kernel closes the socket and the other side fails. A timeout ends the
//! exchange with a peer that lives but says nothing.
//!
//! The message does not decide who the importer is. The kernel vouches for the sender of the hello
//! (SCM_CREDENTIALS), even on one half of a socketpair, or on a socket that another process
//! connected and passed on.

use super::peer_process::{Credentials, PeerProcess};
use super::{BareTgid, Place, Ticket, import};
use crate::deadline::Deadline;
use crate::error::{Errno, Error, Exchange, Result};
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
use zerocopy::little_endian::{I32, U16};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"AVMH";
const VERSION: u16 = 1;
const SEND: &str = "send memory to another process";
const RECEIVE: &str = "receive memory from another process";

/// The importer's first message.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Hello {
    magic: [u8; 4],
    version: U16,
    reserved: U16,
    tgid: I32,
}

/// The importer's last message is 0, or the errno of the import: this if the kernel was not called.
const NO_ERRNO: u16 = u16::MAX;

/// Exports `memory` to the process at the other end of `socket`, which calls [`receive`]. That
/// process is put on the trust list, gets the ticket, and imports.
///
/// Returns when the other side has imported: the memory may then be dropped here and lives on
/// there. The trusted process is the one that the kernel saw sending. A process in a pid namespace
/// of its own cannot translate that pid to the initial namespace, and believes the number that the
/// peer sends. `timeout` bounds the whole exchange. The socket may be blocking or not, and can be
/// used for something else afterwards.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session, share};
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
///
/// const TIMEOUT: Duration = Duration::from_secs(60);
/// let (socket, other) = UnixStream::pair()?;
/// // In the importing process:
/// let importer = ascend_emulator::fork(move || {
///     let session = Session::open().unwrap();
///     let device = session.device(LogicalId(0)).unwrap();
///     let memory = share::receive(&other, &device, TIMEOUT).unwrap();
///     assert!(memory.is_imported());
/// });
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// share::send(&socket, &memory, TIMEOUT)?;
/// importer.join();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Exchange`] if the other side is late, dies, or asks in another process's name; those of
/// [`PhysicalMemory::export`] and of [`Export::trust`](super::Export::trust).
pub fn send(socket: &UnixStream, memory: &PhysicalMemory, timeout: Duration) -> Result<()> {
    // In a child of fork, fail before waiting for the peer.
    memory.block.device.session.check_process()?;
    let socket = TimedSocket::new(socket, timeout, SEND);
    let mut hello = Hello::new_zeroed();
    let sender = socket.read_signed(hello.as_mut_bytes(), "hello")?;
    if hello.magic != MAGIC || hello.version != VERSION || hello.reserved != 0 {
        return Err(socket.failed(
            "the other process does not speak this protocol",
            "Both sides must use this library, in versions that know each other.",
        ));
    }
    let importer = trusted_peer(&socket, &memory.session(), hello.tgid.get(), &sender)?;
    let ticket = trust(&socket, memory, importer, &sender)?;
    socket.write_signed(&ticket.to_bytes(), "ticket")?;
    let mut errno = [0; 2];
    socket.read(&mut errno, "result of the import")?;
    let reason = match u16::from_le_bytes(errno) {
        0 => return Ok(()),
        NO_ERRNO => "it refused the ticket".to_owned(),
        errno => format!("the driver answered {}", Errno::from_raw(errno.into())),
    };
    Err(socket.failed(format!("process {importer} could not import it: {reason}"), "Its own error says more."))
}

/// Puts the process at the other end on the trust list, and makes the ticket for it.
pub(super) fn trust(
    socket: &TimedSocket<'_>,
    memory: &PhysicalMemory,
    importer: BareTgid,
    sender: &PeerProcess,
) -> Result<Ticket> {
    let export = memory.export()?;
    // The list holds numbers. If the sender is still there after it was listed, it had the number
    // all the time. Otherwise the number may belong to another process, which gets no ticket.
    if !sender.is_there(socket.stream) {
        return Err(socket.closed("ticket"));
    }
    export.trust(&[importer])?;
    if !sender.is_there(socket.stream) {
        return Err(socket.failed(
            format!("process {importer} ended while it was being trusted"),
            "If another process gets its number it is on the trust list: free this memory and export other memory.",
        ));
    }
    export.ticket()
}

/// Imports at `place` the memory that the process at the other end of `socket` gives by [`send`],
/// which has an example. `timeout` bounds the whole exchange.
///
/// The ticket must name the process that sent it as its exporter, by number and start time. The
/// kernel reports a share's size, pages and device, but not who exported it, so the share id is
/// only the sender's claim. A hostile sender can name a share that another process trusts this one
/// with. That is an error if the share was imported here before and is still held, or if the sizes
/// differ; otherwise this process gets that other memory.
///
/// # Errors
///
/// [`Error::Exchange`] if the other side is late or dies; those of [`import`].
pub fn receive<'a>(socket: &UnixStream, place: impl Into<Place<'a>>, timeout: Duration) -> Result<PhysicalMemory> {
    let place = place.into();
    let socket = TimedSocket::new(socket, timeout, RECEIVE);
    let session = Session { inner: place.0.session.clone() };
    let tgid = BareTgid::of_this_process(&session)?.as_raw().into();
    let hello = Hello { magic: MAGIC, version: VERSION.into(), reserved: 0.into(), tgid };
    socket.write_signed(hello.as_bytes(), "hello")?;
    let mut bytes = [0; Ticket::LENGTH];
    let sender = socket.read_signed(&mut bytes, "ticket")?;
    let imported = Ticket::from_bytes(&bytes)
        .map_err(Error::from)
        .and_then(|ticket| check_exporter(&socket, &session, &ticket, &sender).and_then(|()| import(place, &ticket)));
    let errno = match &imported {
        Ok(_) => 0,
        Err(error) => error.errno().map_or(NO_ERRNO, |errno| errno.raw() as u16),
    };
    let sent = socket.write(&errno.to_le_bytes(), "result of the import");
    // If the exporter is gone by now, this process has the memory all the same.
    if let (Ok(_), Err(error)) = (&imported, sent) {
        trace::debug(error, "the exporter did not wait for the result");
    }
    imported
}

/// The process to trust: the one that the kernel saw sending. Only a process outside of the initial
/// pid namespace, which cannot translate that one's pid, believes the claimed number.
pub(super) fn trusted_peer(
    socket: &TimedSocket<'_>,
    session: &Session,
    claimed: i32,
    sender: &PeerProcess,
) -> Result<BareTgid> {
    let claimed = BareTgid::from_raw(claimed)?;
    if !session.inner.is_initial_namespace()? {
        return Ok(claimed);
    }
    let Some(sender) = sender.pid else {
        return Err(socket.failed(
            "the kernel does not say which process asks",
            "It must use this library's share::receive, in a pid namespace that this process can see.",
        ));
    };
    if sender != claimed.as_raw() {
        return Err(socket.failed(
            format!("process {sender} asks in the name of process {claimed}"),
            "The process that imports must ask itself; for another one, use Export::trust and a ticket.",
        ));
    }
    Ok(claimed)
}

/// Refuses a ticket that names another exporter than its sender. It would make this process import,
/// and perhaps write to, memory that a third process shared with it.
pub(super) fn check_exporter(
    socket: &TimedSocket<'_>,
    session: &Session,
    ticket: &Ticket,
    sender: &PeerProcess,
) -> Result<()> {
    if is_exporter(sender, ticket, session.inner.is_initial_namespace()?) {
        return Ok(());
    }
    Err(socket.failed(
        format!("the ticket names process {} as the exporter, and another process sent it", ticket.exporter),
        "The exporter must send its memory itself; for a ticket that was passed on, use share::import.",
    ))
}

/// True if a process is the exporter that a ticket names, as far as this process can tell.
fn is_exporter(sender: &PeerProcess, ticket: &Ticket, initial: bool) -> bool {
    // Outside of the initial pid namespace the two pids cannot be compared. Start times can, and
    // there a ticket must have one.
    let unknown = initial && ticket.exporter_start == 0;
    let started = sender.start.is_none_or(|start| unknown || start == ticket.exporter_start);
    started && (!initial || sender.pid == Some(ticket.exporter))
}

/// A socket with a deadline. It changes no setting of the socket for longer than a call.
pub(super) struct TimedSocket<'a> {
    stream: &'a UnixStream,
    deadline: Deadline,
    operation: &'static str,
}

impl<'a> TimedSocket<'a> {
    pub(super) fn new(stream: &'a UnixStream, timeout: Duration, operation: &'static str) -> Self {
        TimedSocket { stream, deadline: Deadline::after(timeout), operation }
    }

    /// True if the deadline is over. Bytes that have arrived by then can still be received.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_over()
    }

    /// Fills `bytes`, and returns the process that sent them.
    fn read_signed(&self, mut bytes: &mut [u8], what: &str) -> Result<PeerProcess> {
        let mut reader = SignedReader::new(self, what)?;
        while !bytes.is_empty() {
            let count = reader.receive(bytes, what)?;
            bytes = &mut bytes[count..];
        }
        reader.sender.ok_or_else(|| self.closed(what))
    }

    /// Fills `bytes`.
    fn read(&self, mut bytes: &mut [u8], what: &str) -> Result<()> {
        while !bytes.is_empty() {
            let count = self.receive(bytes, what, None)?;
            bytes = &mut bytes[count..];
        }
        Ok(())
    }

    /// Receives at least one byte, and the control data that fit in `control`.
    pub(super) fn receive(&self, bytes: &mut [u8], what: &str, mut control: Option<&mut [u8]>) -> Result<usize> {
        loop {
            self.wait(PollFlags::POLLIN, what)?;
            let mut buffer = [IoSliceMut::new(bytes)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let received = recvmsg::<()>(self.stream.as_raw_fd(), &mut buffer, control.as_deref_mut(), flags);
            match received.map(|message| message.bytes).map_err(Errno::of) {
                Ok(0) => return Err(self.closed(what)),
                Ok(count) => return Ok(count),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(self.broken(what, errno)),
            }
        }
    }

    /// Sends all of `bytes`. The kernel adds which process sends them, even where this process's
    /// user has no number, as in some containers.
    pub(super) fn write_signed(&self, bytes: &[u8], what: &str) -> Result<()> {
        let _credentials = self.sign(what)?;
        self.write(bytes, what)
    }

    /// Sends all of `bytes`.
    pub(super) fn write(&self, mut bytes: &[u8], what: &str) -> Result<()> {
        while !bytes.is_empty() {
            self.wait(PollFlags::POLLOUT, what)?;
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send_bytes(self.stream.as_raw_fd(), bytes, flags).map_err(Errno::of) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(self.broken(what, errno)),
            }
        }
        Ok(())
    }

    /// Makes messages name their sender while the guard lives.
    fn sign(&self, what: &str) -> Result<Credentials<'a>> {
        Credentials::on(self.stream).map_err(|errno| self.broken(what, Errno::of(errno)))
    }

    /// Waits until the socket is ready.
    fn wait(&self, event: PollFlags, what: &str) -> Result<()> {
        loop {
            let left = self.deadline.left();
            // Rounded up: a poll of 0 ms in the last millisecond would spin.
            let rounded = left.saturating_add(Duration::from_micros(999));
            let timeout = PollTimeout::try_from(rounded).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.as_fd(), event)], timeout).map_err(Errno::of) {
                Ok(0) if left.is_zero() => {
                    return Err(self.failed(
                        format!("the {what} did not come in time"),
                        "Is the other process alive, and at its call? Allow more time if it is busy.",
                    ));
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(self.broken(what, errno)),
            }
        }
    }

    fn broken(&self, what: &str, errno: Errno) -> Error {
        match errno {
            Errno::EPIPE | Errno::ECONNRESET => self.closed(what),
            _ => self.failed(format!("the socket failed at the {what}: {errno}"), "A connected Unix socket is needed."),
        }
    }

    fn closed(&self, what: &str) -> Error {
        self.failed(
            format!("the other process closed the socket or died before the {what}"),
            "Start it again, and repeat the exchange on both sides.",
        )
    }

    pub(super) fn failed(&self, problem: impl Into<String>, remedy: &'static str) -> Error {
        Error::Exchange(Exchange { operation: self.operation, problem: problem.into(), remedy })
    }
}

/// Reads bytes that one process sent, for which the kernel vouches.
pub(super) struct SignedReader<'a> {
    socket: &'a TimedSocket<'a>,
    _credentials: Credentials<'a>,
    /// `None` until the first bytes came.
    pub(super) sender: Option<PeerProcess>,
}

impl<'a> SignedReader<'a> {
    pub(super) fn new(socket: &'a TimedSocket<'a>, what: &str) -> Result<SignedReader<'a>> {
        Ok(SignedReader { socket, _credentials: socket.sign(what)?, sender: None })
    }

    /// Receives at least one byte. Fails if another process or user sent it than those before.
    pub(super) fn receive(&mut self, bytes: &mut [u8], what: &str) -> Result<usize> {
        // Room for the credentials and the pidfd. Other descriptors that a peer may send along are
        // not taken.
        let mut control = cmsg_space!(UnixCredentials, [RawFd; 1]);
        let count = self.socket.receive(bytes, what, Some(&mut control))?;
        let sender = PeerProcess::of(&control);
        if self.sender.as_ref().is_some_and(|before| !before.is_same(&sender)) {
            let problem = format!("two processes or users sent the {what}");
            return Err(self.socket.failed(problem, "One process must ask for itself."));
        }
        self.sender.get_or_insert(sender);
        Ok(count)
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
        // In a container the number is one of another namespace.
        assert!(is_exporter(&own, &ticket, false) && is_exporter(&own, &number, false));
        assert!(!is_exporter(&own, &start, false) && !is_exporter(&own, &silent, false));
    }
}
