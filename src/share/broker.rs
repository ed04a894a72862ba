//! A server that hands out memory by name, to any number of processes.
//!
//! ```text
//! client                                 broker
//!   name own-bare-tgid\n           ──►
//!                                  ◄──   ok 2\n      (the client is on the trust lists now)
//!                                  ◄──   handle size ticket\n for each
//!   imports, then closes           ──►
//! ```
//!
//! A refusal is `error` and a sentence. The protocol is text, so that a process that runs the
//! vendor's stack, and cannot load this library, can ask in any language: the handle is what
//! `aclrtMemImportFromShareableHandle` takes, and the number that the client sends is what
//! `aclrtDeviceGetBareTgid` returns (docs/hosts.md has such a client).
//!
//! Each client has a thread and a time limit, so a stuck client delays no other. The number of
//! clients that one user or process has at a time is limited too (`places.rs`).

use super::exchange::{SignedReader, TimedSocket, check_exporter, trust, trusted_peer};
use super::peer_process::{PeerProcess, sign_from_the_first};
use super::places::{Connector, Places, Visitor};
use super::{BareTgid, Place, Ticket, import};
use crate::error::{Error, Exchange, Result, printable};
use crate::fork::ForkGuard;
use crate::physical::PhysicalMemory;
use crate::session::Session;
use crate::signals;
use crate::slots::lock;
use crate::trace;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The limits of a broker's clients.
///
/// ```
/// use ascend_vmm::share::BrokerOptions;
/// use std::time::Duration;
///
/// let few_and_quick = BrokerOptions::default().clients(8).timeout(Duration::from_secs(1));
/// assert_ne!(few_and_quick, BrokerOptions::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct BrokerOptions {
    timeout: Duration,
    clients: usize,
}

/// Ten seconds for each of at most 256 clients at a time.
impl Default for BrokerOptions {
    fn default() -> Self {
        BrokerOptions { timeout: Duration::from_secs(10), clients: 256 }
    }
}

impl BrokerOptions {
    /// Limits how long a client may take, from the time that it has a place to its last import.
    /// Then it is cut off.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how many clients are served at a time: at least one. Of these places one process gets a
    /// quarter at most, and one user three quarters, or all but one if there are fewer than four.
    /// Up to 256 others wait. A client that has not sent its request after a second, or after an
    /// eighth of its time, loses its place to one that waits for it.
    pub fn clients(mut self, clients: usize) -> Self {
        self.clients = clients.max(1);
        self
    }
}

/// What a client asks for, and who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The name: text without white space and control characters, of at most 1024 bytes.
    pub name: String,
    /// The process, as trust lists know it. It is the one that the kernel saw asking, unless this
    /// process lives in a pid namespace of its own: see [`send`](super::send).
    pub process: BareTgid,
    /// The real user of the process when it asked, as this process's user namespace numbers it.
    /// Another user may have connected the socket.
    pub user: u32,
}

/// Serves memory by name until it is dropped. Clients that have a place then are served to their
/// end.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::share::{Broker, BrokerOptions, Request};
/// use ascend_vmm::{LogicalId, Session};
/// use std::os::unix::net::UnixListener;
///
/// let session = Session::open()?;
/// let device = session.device(LogicalId(0))?;
/// let pages = vec![device.create(2 << 20)?];
/// let path = std::env::temp_dir().join(format!("ascend-vmm-broker-{}", std::process::id()));
/// let listener = UnixListener::bind(&path)?;
/// let answer = move |request: &Request| match &*request.name {
///     "kv-cache" => Ok(pages.clone()),
///     other => Err(format!("there is no {other}")),
/// };
/// let broker = Broker::start(&session, listener, BrokerOptions::default(), answer)?;
/// // Others call share::request(&UnixStream::connect(path)?, "kv-cache", &device, timeout).
/// # drop(broker);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Broker {
    service: Arc<Service>,
    /// The thread that accepts clients, and the socket that wakes it.
    acceptor: Option<(JoinHandle<()>, UnixStream)>,
    guard: ForkGuard,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Broker({:?})", self.service.options)
    }
}

/// What the threads of a broker share.
struct Service {
    session: Session,
    options: BrokerOptions,
    /// The program's answer to a request.
    #[expect(clippy::type_complexity, reason = "it is written once more, in `Broker::start`")]
    answer: Box<dyn Fn(&Request) -> Result<Vec<PhysicalMemory>, String> + Send + Sync>,
    places: Mutex<Places>,
}

const SERVE: &str = "serve memory to another process";
const REQUEST: &str = "request memory from another process";
/// Bytes of the longest line of a request or an answer.
const MAX_LINE: usize = 2048;
const MAX_NAME: usize = 1024;
/// Most memories of one answer: a broker must not make a client import without end.
const MAX_MEMORIES: usize = 65_536;

impl Broker {
    /// Serves the clients of a listening socket, and keeps the session open meanwhile. `answer`
    /// returns the memory that a client gets, or a sentence that says why it gets none. Several
    /// threads may call it at once. If it panics, its client gets nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Exchange`] if no thread can be started; [`Error::OtherProcess`] in a child of fork.
    pub fn start(
        session: &Session,
        listener: UnixListener,
        options: BrokerOptions,
        answer: impl Fn(&Request) -> Result<Vec<PhysicalMemory>, String> + Send + Sync + 'static,
    ) -> Result<Broker> {
        session.inner.check_process()?;
        let failed = |error: io::Error| {
            Error::Exchange(Exchange {
                operation: "start a broker",
                problem: error.to_string(),
                remedy: "It needs a thread and a few descriptors.",
            })
        };
        let (waker, woken) = UnixStream::pair().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        sign_from_the_first(&listener).map_err(|errno| failed(errno.into()))?;
        let grace = (options.timeout / 8).clamp(Duration::from_millis(1), Duration::from_secs(1));
        let (session, places) = (session.clone(), Mutex::new(Places::new(options.clients, grace)));
        let service = Arc::new(Service { session, options, answer: Box::new(answer), places });
        let serving = service.clone();
        let thread = signals::spawn("ascend-vmm-broker", move || accept_clients(&listener, &woken, &serving));
        let acceptor = Some((thread.map_err(failed)?, waker));
        Ok(Broker { service, acceptor, guard: ForkGuard::new() })
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let Some((thread, waker)) = self.acceptor.take() else { return };
        if self.guard.in_child() {
            // The thread is the parent's.
            return;
        }
        lock(&self.service.places).stop();
        // Closing it would not wake the thread: a child of fork may have it too.
        let _ = waker.shutdown(Shutdown::Both);
        let _ = thread.join();
    }
}

/// Accepts clients until the other end of `woken` is shut down. It accepts all of them at once,
/// because a client that waits in the kernel's queue is not counted for its user.
fn accept_clients(listener: &UnixListener, woken: &UnixStream, service: &Arc<Service>) {
    loop {
        let mut places = lock(&service.places);
        if places.is_stopped() {
            return;
        }
        places.cut_off_silent_client(Instant::now());
        let look_again = places.has_waiting().then(|| places.grace());
        drop(places);
        let mut polled =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(woken.as_fd(), PollFlags::POLLIN)];
        // This thread takes no signals, so nothing interrupts the poll.
        let timeout = look_again.and_then(|grace| PollTimeout::try_from(grace).ok());
        let _ = poll(&mut polled, timeout.unwrap_or(PollTimeout::NONE));
        match listener.accept() {
            Ok((socket, _)) => queue_client(socket, service),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Most likely no descriptor is left: others may be closed soon.
                trace::warn(error, "a client could not be accepted");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        while let Some(client) = ServedClient::next(service) {
            let _ = signals::spawn("ascend-vmm-client", move || client.serve_until_none_waits());
        }
    }
}

/// Lets a client wait for a place.
fn queue_client(socket: UnixStream, service: &Service) {
    let credentials = getsockopt(&socket, PeerCredentials);
    let (user, process) = credentials.map_or((u32::MAX, 0), |credentials| (credentials.uid(), credentials.pid()));
    let connector = Connector { user, process: (process > 0).then_some(process) };
    let refused = lock(&service.places).queue(connector, socket);
    if let Some(refused) = refused {
        let socket = TimedSocket::new(&refused, Duration::ZERO, SERVE);
        let error = socket.failed("too many clients wait, most of them of this user", "Try again later.");
        let _ = socket.write(error_line(&error).as_bytes(), "answer");
        trace::debug(error, "a client was not served");
    }
}

/// A client with a place, which becomes free when this is dropped.
struct ServedClient {
    visitor: Visitor,
    service: Arc<Service>,
}

impl Drop for ServedClient {
    fn drop(&mut self) {
        lock(&self.service.places).leave(self.visitor.number);
    }
}

impl ServedClient {
    /// The next client that has a place.
    fn next(service: &Arc<Service>) -> Option<ServedClient> {
        let visitor = lock(&service.places).admit()?;
        Some(ServedClient { visitor, service: service.clone() })
    }

    /// Serves this client, and then those that wait for its place.
    fn serve_until_none_waits(self) {
        let service = self.service.clone();
        let mut client = Some(self);
        while let Some(served) = client {
            served.serve();
            drop(served);
            client = ServedClient::next(&service);
        }
    }

    fn serve(&self) {
        let socket = TimedSocket::new(&self.visitor.socket, self.service.options.timeout, SERVE);
        let (text, answered) = match self.answer(&socket) {
            Ok((text, memories)) => (text, Ok(memories)),
            Err(error) => (error_line(&error), Err(error)),
        };
        let sent = socket.write_signed(text.as_bytes(), "answer");
        match answered.and_then(|memories| sent.map(|()| memories)) {
            // Held until the client has imported it, and says so by closing.
            Ok(_memories) => await_end(&socket),
            Err(error) => trace::debug(error, "a client was not served"),
        }
    }

    /// The answer for this client, and the memory that it names, with which the client is trusted
    /// now.
    fn answer(&self, socket: &TimedSocket<'_>) -> Result<(String, Vec<PhysicalMemory>)> {
        let service = &*self.service;
        let mut lines = Lines::new(socket)?;
        let received = lines.next("request");
        if !lock(&service.places).keep(self.visitor.number) {
            return Err(socket.failed("no request came, and others waited", "Send it right after connecting."));
        }
        let (line, sender) = received?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let malformed = || {
            socket
                .failed("the request is malformed", "It is a printable name, a space and the asking process's number.")
        };
        let [name, process] = words[..] else { return Err(malformed()) };
        if !is_name(name) {
            return Err(malformed());
        }
        let Some(user) = sender.user else {
            return Err(socket.failed("the kernel does not say which user asks", "Send the request on a Unix socket."));
        };
        let claimed: BareTgid = process.parse().map_err(|_| malformed())?;
        let request = Request { name: name.to_owned(), process: claimed, user };
        // Before the program's own code runs: it may decide by who asks.
        trusted_peer(socket, &service.session, claimed.as_raw(), sender)?;
        let refused = |problem: String| socket.failed(problem, "Ask the process that serves it.");
        let answered = catch_unwind(AssertUnwindSafe(|| (service.answer)(&request)));
        let memories = answered.map_err(|_| refused("the server failed".to_owned()))?.map_err(refused)?;
        if memories.len() > MAX_MEMORIES {
            return Err(refused(format!("{} memories are too many for one request", memories.len())));
        }
        let mut text = format!("ok {}\n", memories.len());
        for memory in &memories {
            let ticket = trust(socket, memory, claimed, sender)?;
            text += &format!("{} {} {ticket}\n", ticket.handle, memory.size());
        }
        Ok((text, memories))
    }
}

/// Waits until a client closes its end or its time is over, even if it never stops sending.
fn await_end(socket: &TimedSocket<'_>) {
    let mut ignored = [0; MAX_LINE];
    while !socket.is_over() && socket.receive(&mut ignored, "end of the client", None).is_ok() {}
}

/// True for a name of the protocol: one printable word.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && !name.contains(char::is_whitespace) && printable(name) == name
}

/// Requests memory by name from a [`Broker`] at the other end of a socket that was just connected,
/// and imports it at `place`, all of it or nothing. Close the socket after that.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::share::{self, Broker, BrokerOptions};
/// use ascend_vmm::{LogicalId, Session};
/// use std::os::unix::net::{UnixListener, UnixStream};
/// use std::time::Duration;
///
/// let session = Session::open()?;
/// let page = session.device(LogicalId(0))?.create(2 << 20)?;
/// let path = std::env::temp_dir().join(format!("ascend-vmm-request-{}", std::process::id()));
/// let listener = UnixListener::bind(&path)?;
/// let answer = move |_: &_| Ok(vec![page.clone()]);
/// let broker = Broker::start(&session, listener, BrokerOptions::default(), answer)?;
/// // A client is another process, or imports on another device.
/// let socket = UnixStream::connect(&path)?;
/// let device = session.device(LogicalId(1))?;
/// let memories = share::request(&socket, "page", &device, Duration::from_secs(60))?;
/// assert_eq!(memories.len(), 1);
/// # drop(broker);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Exchange`] if the broker refuses, is late or dies; those of [`import`].
pub fn request<'a>(
    socket: &UnixStream,
    name: &str,
    place: impl Into<Place<'a>>,
    timeout: Duration,
) -> Result<Vec<PhysicalMemory>> {
    let socket = TimedSocket::new(socket, timeout, REQUEST);
    let place = place.into();
    let session = Session { inner: place.0.session.clone() };
    let tgid = BareTgid::of_this_process(&session)?;
    if !is_name(name) {
        return Err(socket.failed(
            format!("{name:?} is not a name"),
            "A name is text without white space and control characters, of at most 1024 bytes.",
        ));
    }
    // Before the broker can answer: it may not sign by itself.
    let mut lines = Lines::new(&socket)?;
    socket.write(format!("{name} {tgid}\n").as_bytes(), "request")?;
    let (answer, _) = lines.next("answer")?;
    let malformed = || socket.failed("the answer is malformed", "Is a broker of this library at the other end?");
    if let Some(reason) = answer.strip_prefix("error ") {
        return Err(socket.failed(format!("it answered: {}", printable(reason)), "Nothing was imported."));
    }
    let count = answer.strip_prefix("ok ").and_then(|count| count.parse().ok());
    let count = count.filter(|&count: &usize| count <= MAX_MEMORIES).ok_or_else(malformed)?;
    let mut memories = Vec::new();
    for _ in 0..count {
        let (line, sender) = lines.next("ticket")?;
        let ticket: Ticket = line.split(' ').nth(2).ok_or_else(malformed)?.parse()?;
        check_exporter(&socket, &session, &ticket, sender)?;
        memories.push(import(place, &ticket)?);
    }
    Ok(memories)
}

/// Reads lines from a socket, all of one sender.
struct Lines<'a> {
    socket: &'a TimedSocket<'a>,
    reader: SignedReader<'a>,
    /// What came after the last line.
    rest: Vec<u8>,
}

impl<'a> Lines<'a> {
    fn new(socket: &'a TimedSocket<'a>) -> Result<Lines<'a>> {
        Ok(Lines { socket, reader: SignedReader::new(socket, "request")?, rest: Vec::new() })
    }

    /// The next line, without its end, and its sender.
    fn next(&mut self, what: &str) -> Result<(String, &PeerProcess)> {
        let end = loop {
            if let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
                break end;
            }
            if self.rest.len() > MAX_LINE {
                return Err(self.socket.failed(format!("the {what} is too long"), "Is this the right socket?"));
            }
            let mut bytes = [0; MAX_LINE];
            let count = self.reader.receive(&mut bytes, what)?;
            self.rest.extend(&bytes[..count]);
        };
        let line: Vec<u8> = self.rest.drain(..=end).take(end).collect();
        match (String::from_utf8(line), &self.reader.sender) {
            (Ok(line), Some(sender)) => Ok((line, sender)),
            _ => Err(self.socket.failed(format!("the {what} is not text"), "Send UTF-8.")),
        }
    }
}

/// The answer to a client that gets nothing: one line, short enough for [`Lines`].
fn error_line(error: &Error) -> String {
    let text = printable(&error.to_string().replace('\n', " "));
    let short: String =
        text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= MAX_NAME).map(|(_, c)| c).collect();
    format!("error {short}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_client_whose_time_is_over_is_cut_off_even_if_it_sent_more() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let sent = [1; 2 * MAX_LINE];
        client.write_all(&sent).unwrap();
        await_end(&TimedSocket::new(&server, Duration::ZERO, SERVE));
        client.shutdown(Shutdown::Both).unwrap();
        let mut unread = Vec::new();
        (&server).read_to_end(&mut unread).unwrap();
        assert_eq!(unread, sent);
    }

    #[test]
    fn a_client_that_closes_its_end_is_waited_for_until_then() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[1; 2 * MAX_LINE]).unwrap();
        drop(client);
        await_end(&TimedSocket::new(&server, Duration::MAX, SERVE));
    }
}
