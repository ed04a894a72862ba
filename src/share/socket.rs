//! Export and import in one call each, over a connected Unix socket.
//!
//! ```text
//! importer                               exporter
//!   hello: version, own bare tgid  ──►
//!                                  ◄──   ticket (the importer is on the trust list now)
//!   result of the import           ──►
//! ```
//!
//! Each message has a fixed length, so nothing that a hostile peer sends can make the other side read without end. When either side dies the kernel closes
//! the socket, which ends the other with an error; a timeout ends a peer that lives but says nothing.

use crate::Session;
use crate::error::{Error, Exchange, Result};
use crate::physical::PhysicalMemory;
use crate::share::process::{is_initial_namespace, peer_pid};
use crate::share::{BareTgid, Place, Ticket, import};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::little_endian::{I32, U16};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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

/// What the importer says last: 0, or the errno of the import (0xFFFF for an error without one).
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Outcome {
    errno: U16,
}

/// Exports `memory` to the process at the other end of `socket`, which calls [`receive`]: it is put on the trust list, gets the ticket, and imports.
///
/// Returns when the other side has imported, so that the memory may be dropped here and lives on there. The trust list holds the process that *connected* the
/// socket; where this process can see its pid, a peer that claims to be another process is refused. `timeout` bounds the whole exchange.
pub fn send(socket: &UnixStream, memory: &PhysicalMemory, timeout: Duration) -> Result<()> {
    let wire = Wire::new(socket, timeout, SEND);
    let hello: Hello = wire.read("hello")?;
    if hello.magic != MAGIC || hello.version != VERSION {
        return Err(wire.wrong(
            "the other process speaks something else",
            "both sides must use this library, in versions that know each other",
        ));
    }
    let export = memory.export()?;
    let importer = trusted_peer(&wire, memory, hello.tgid.get())?;
    export.trust(&[importer])?;
    wire.write(&export.ticket()?.to_bytes(), "ticket")?;
    let outcome: Outcome = wire.read("result of the import")?;
    match outcome.errno.get() {
        0 => Ok(()),
        errno => {
            Err(wire.wrong(format!("process {importer} could not import it (errno {errno})"), "its own error says why"))
        }
    }
}

/// Imports at `place` what the process at the other end of `socket` gives by [`send`]. `timeout` bounds the whole exchange.
pub fn receive<'a>(socket: &UnixStream, place: impl Into<Place<'a>>, timeout: Duration) -> Result<PhysicalMemory> {
    let wire = Wire::new(socket, timeout, RECEIVE);
    let place = place.into();
    let session = Session { inner: place.inner().session.clone() };
    let tgid = BareTgid::of_this_process(&session)?;
    let hello = Hello { magic: MAGIC, version: VERSION.into(), reserved: [0; 2], tgid: tgid.as_raw().into() };
    wire.write(hello.as_bytes(), "hello")?;
    let bytes: [u8; Ticket::LENGTH] = wire.read("ticket")?;
    let imported = Ticket::from_bytes(&bytes).map_err(Error::from).and_then(|ticket| import(place, &ticket));
    let errno = match &imported {
        Ok(_) => 0,
        Err(error) => error.errno().map_or(u16::MAX, |errno| errno as u16),
    };
    let told = wire.write(Outcome { errno: errno.into() }.as_bytes(), "result of the import");
    // If the exporter is gone by now the memory is ours all the same.
    if let (Ok(_), Err(error)) = (&imported, told) {
        tracing::debug!(%error, "the exporter did not wait for the result");
    }
    imported
}

/// The process to trust: the one that the kernel saw at the other end, if we can see that; else the one that it says it is.
fn trusted_peer(wire: &Wire<'_>, memory: &PhysicalMemory, claimed: i32) -> Result<BareTgid> {
    let session = memory.session();
    let claimed = BareTgid::from_raw(claimed)?;
    if !is_initial_namespace(&session)? {
        return Ok(claimed);
    }
    match peer_pid(wire.socket) {
        Ok(pid) if pid as i32 == claimed.as_raw() => Ok(claimed),
        Ok(pid) => Err(wire.wrong(
            format!("process {pid} connected the socket, but asks in the name of process {claimed}"),
            "the process that connects must be the one that imports; for another one, use Export::trust and a ticket",
        )),
        Err(error) => Err(error),
    }
}

/// A socket with a deadline.
struct Wire<'a> {
    socket: &'a UnixStream,
    deadline: Instant,
    operation: &'static str,
}

impl<'a> Wire<'a> {
    fn new(socket: &'a UnixStream, timeout: Duration, operation: &'static str) -> Self {
        Wire { socket, deadline: Instant::now() + timeout, operation }
    }

    fn read<T: FromBytes + IntoBytes>(&self, what: &str) -> Result<T> {
        let mut value = T::new_zeroed();
        let mut rest = value.as_mut_bytes();
        while !rest.is_empty() {
            let left = self.left(what)?;
            let read = self.socket.set_read_timeout(Some(left)).and_then(|()| (&mut &*self.socket).read(rest));
            match read {
                Ok(0) => return Err(self.gone(what)),
                Ok(count) => rest = &mut rest[count..],
                Err(error) => self.survive(error, what)?,
            }
        }
        Ok(value)
    }

    fn write(&self, mut bytes: &[u8], what: &str) -> Result<()> {
        while !bytes.is_empty() {
            let left = self.left(what)?;
            let written = self.socket.set_write_timeout(Some(left)).and_then(|()| (&mut &*self.socket).write(bytes));
            match written {
                Ok(0) => return Err(self.gone(what)),
                Ok(count) => bytes = &bytes[count..],
                Err(error) => self.survive(error, what)?,
            }
        }
        Ok(())
    }

    /// The time that is left, never 0: a timeout of 0 would mean none.
    fn left(&self, what: &str) -> Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(self.late(what)) } else { Ok(left.max(Duration::from_millis(1))) }
    }

    fn survive(&self, error: std::io::Error, what: &str) -> Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            // The socket's own timeout: the next look at the clock says whether it was ours.
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Err(self.gone(what)),
            _ => Err(self.wrong(
                format!("the socket failed at the {what}: {error}"),
                "a connected, blocking Unix socket is needed",
            )),
        }
    }

    #[cold]
    fn gone(&self, what: &str) -> Error {
        self.wrong(
            format!("the other process closed the socket or died before the {what}"),
            "start it again, and both sides anew",
        )
    }

    #[cold]
    fn late(&self, what: &str) -> Error {
        self.wrong(
            format!("the {what} did not come in time"),
            "is the other process alive, and at its call? Allow more time if it is busy",
        )
    }

    #[cold]
    fn wrong(&self, problem: impl Into<String>, remedy: &'static str) -> Error {
        Error::Exchange(Box::new(Exchange { operation: self.operation, problem: problem.into(), remedy }))
    }
}
