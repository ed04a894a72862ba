//! Export and import in one call each, over a connected Unix socket.
//!
//! ```text
//! importer                               exporter
//!   hello: version, own bare tgid  ──►
//!                                  ◄──   ticket (the importer is on the trust list now)
//!   result of the import           ──►
//! ```
//!
//! Each message has a fixed length, so nothing that a hostile peer sends can make the other side
//! read without end. When either side dies the kernel closes the socket, which ends the other with
//! an error; a timeout ends a peer that lives but says nothing.
//!
//! Who the importer is does not come from the message but from the kernel, which vouches for the
//! sender of the hello (SCM_CREDENTIALS): also on one half of a socketpair, or on a socket that was
//! connected by another process and passed on.

use super::bare_tgid::{exists, is_initial_namespace};
use super::{BareTgid, Place, Ticket, import};
use crate::deadline::Deadline;
use crate::error::{Errno, Error, Exchange, Result};
use crate::physical::PhysicalMemory;
use crate::session::Session;
use crate::trace;
use nix::cmsg_space;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::PassCred;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, UnixCredentials, getsockopt, recvmsg, send as send_bytes, setsockopt,
};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zerocopy::little_endian::{I32, U16};
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
    reserved: [u8; 2],
    tgid: I32,
}

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
    let wire = Wire::new(socket, timeout, SEND);
    let (hello, sender) = wire.read_hello()?;
    if hello.magic != MAGIC || hello.version != VERSION {
        return Err(wire.wrong(
            "the other process speaks something else",
            "Both sides must use this library, in versions that know each other.",
        ));
    }
    let importer = trusted_peer(&wire, memory, hello.tgid.get(), sender)?;
    let export = memory.export()?;
    export.trust(&[importer])?;
    wire.write(&export.ticket()?.to_bytes(), "ticket")?;
    let mut outcome = Outcome { errno: 0.into() };
    wire.read(outcome.as_mut_bytes(), "result of the import")?;
    let reason = match outcome.errno.get() {
        0 => return Ok(()),
        NO_ERRNO => "it refused the ticket".to_owned(),
        errno => format!("the driver answered {}", Errno::from_raw(errno.into())),
    };
    Err(wire.wrong(format!("process {importer} could not import it: {reason}"), "Its own error says more."))
}

/// Imports at `place` what the process at the other end of `socket` gives by [`send`]. `timeout`
/// bounds the whole exchange.
///
/// # Errors
///
/// [`Error::Exchange`] if the other side is late or dies; those of [`import`].
pub fn receive<'a>(socket: &UnixStream, place: impl Into<Place<'a>>, timeout: Duration) -> Result<PhysicalMemory> {
    let wire = Wire::new(socket, timeout, RECEIVE);
    let place = place.into();
    let session = Session { inner: place.inner().session.clone() };
    let tgid = BareTgid::of_this_process(&session)?;
    let hello = Hello { magic: MAGIC, version: VERSION.into(), reserved: [0; 2], tgid: tgid.as_raw().into() };
    wire.write_hello(&hello)?;
    let mut bytes = [0; Ticket::LENGTH];
    wire.read(&mut bytes, "ticket")?;
    let imported = Ticket::from_bytes(&bytes).map_err(Error::from).and_then(|ticket| import(place, &ticket));
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
fn trusted_peer(wire: &Wire<'_>, memory: &PhysicalMemory, claimed: i32, sender: Option<i32>) -> Result<BareTgid> {
    let session = memory.session();
    let claimed = BareTgid::from_raw(claimed)?;
    if !is_initial_namespace(&session)? {
        return Ok(claimed);
    }
    let Some(sender) = sender else {
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
    exists(sender).map_err(|_| wire.gone("ticket"))?;
    Ok(claimed)
}

/// A socket with a deadline. Nothing of the socket's own settings is changed for longer than a
/// call.
struct Wire<'a> {
    socket: &'a UnixStream,
    deadline: Deadline,
    operation: &'static str,
}

impl<'a> Wire<'a> {
    fn new(socket: &'a UnixStream, timeout: Duration, operation: &'static str) -> Self {
        Wire { socket, deadline: Deadline::after(timeout), operation }
    }

    /// The hello, and the pid of its sender in our pid namespace, if the kernel reports it.
    fn read_hello(&self) -> Result<(Hello, Option<i32>)> {
        let mut hello = Hello::new_zeroed();
        let sender = self.with_credentials(|| self.fill(hello.as_mut_bytes(), "hello", true))?;
        Ok((hello, sender))
    }

    /// Says hello. The kernel adds whom it sees, which also works where this process's user has no
    /// number, as in some containers.
    fn write_hello(&self, hello: &Hello) -> Result<()> {
        self.with_credentials(|| self.write(hello.as_bytes(), "hello"))
    }

    /// With credentials on all messages that come and go.
    fn with_credentials<T>(&self, action: impl FnOnce() -> Result<T>) -> Result<T> {
        let failed = |errno| self.failed("hello", Errno::of(errno));
        let before = getsockopt(self.socket, PassCred).map_err(failed)?;
        setsockopt(self.socket, PassCred, &true).map_err(failed)?;
        let result = action();
        setsockopt(self.socket, PassCred, &before).map_err(failed)?;
        result
    }

    /// Fills `bytes`.
    fn read(&self, bytes: &mut [u8], what: &str) -> Result<()> {
        self.fill(bytes, what, false).map(drop)
    }

    /// Fills `rest`; the pid of its one sender, if that is asked for and the kernel tells.
    fn fill(&self, mut rest: &mut [u8], what: &str, ask: bool) -> Result<Option<i32>> {
        let mut sender = None;
        while !rest.is_empty() {
            self.wait(PollFlags::POLLIN, what)?;
            // Room for the credentials and nothing else: descriptors that a peer may send along are
            // not taken.
            let mut room = cmsg_space!(UnixCredentials);
            let control = ask.then_some(&mut room[..]);
            let mut buffer = [IoSliceMut::new(rest)];
            let message = recvmsg::<()>(self.socket.as_raw_fd(), &mut buffer, control, MsgFlags::MSG_DONTWAIT);
            let message = match message.map_err(Errno::of) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(errno) => return Err(self.failed(what, errno)),
            };
            let now = message.cmsgs().into_iter().flatten().find_map(|control| match control {
                ControlMessageOwned::ScmCredentials(credentials) => Some(credentials.pid()).filter(|&pid| pid != 0),
                _ => None,
            });
            let count = message.bytes;
            if count == 0 {
                return Err(self.gone(what));
            }
            if *sender.get_or_insert(now) != now {
                return Err(self.wrong(format!("two processes sent the {what}"), "One process must ask for itself."));
            }
            rest = &mut rest[count..];
        }
        Ok(sender.flatten())
    }

    /// Sends all of `bytes`.
    fn write(&self, mut bytes: &[u8], what: &str) -> Result<()> {
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

    #[cold]
    fn failed(&self, what: &str, errno: Errno) -> Error {
        match errno {
            Errno::EPIPE | Errno::ECONNRESET => self.gone(what),
            _ => self.wrong(format!("the socket failed at the {what}: {errno}"), "A connected Unix socket is needed."),
        }
    }

    #[cold]
    fn gone(&self, what: &str) -> Error {
        self.wrong(
            format!("the other process closed the socket or died before the {what}"),
            "Start it again, and both sides anew.",
        )
    }

    #[cold]
    fn late(&self, what: &str) -> Error {
        self.wrong(
            format!("the {what} did not come in time"),
            "Is the other process alive, and at its call? Allow more time if it is busy.",
        )
    }

    #[cold]
    fn wrong(&self, problem: impl Into<String>, remedy: &'static str) -> Error {
        Error::Exchange(Box::new(Exchange { operation: self.operation, problem: problem.into(), remedy }))
    }
}
