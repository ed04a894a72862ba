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
//! Or `error` and a sentence. It is text, so that a process that runs the vendor's stack, and
//! cannot load this library, can ask in any language: the handle is what
//! `aclrtMemImportFromShareableHandle` takes, and the number that it sends is what
//! `aclrtDeviceGetBareTgid` returns (docs/hosts.md has such a client).
//!
//! Each client has a thread and a time limit, so one that is stuck keeps no other waiting; how many
//! one user or process has at a time is limited too (`places.rs`).

use super::exchange::{Wire, own_ticket, trust, trusted_peer};
use super::peer_process::{Credentials, PeerProcess, sign_from_the_first};
use super::places::{Connector, Guest, Places};
use super::{BareTgid, Place, Ticket, import};
use crate::error::{Errno, Error, Result, printable};
use crate::fork::ForkGuard;
use crate::physical::PhysicalMemory;
use crate::session::Session;
use crate::signals;
use crate::slots::lock;
use crate::trace;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{UnixCredentials, getsockopt, sockopt::PeerCredentials};
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a broker treats its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct BrokerOptions {
    timeout: Duration,
    clients: usize,
}

impl Default for BrokerOptions {
    fn default() -> Self {
        BrokerOptions { timeout: Duration::from_secs(10), clients: 256 }
    }
}

impl BrokerOptions {
    /// Ten seconds for each of at most 256 clients at a time.
    pub fn new() -> BrokerOptions {
        BrokerOptions::default()
    }

    /// How long a client may take, from the time that it has a place to its last import. Then it is
    /// cut off.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many clients are served at a time, at least one. Of these places one process gets a
    /// quarter at most, and one user three quarters: all but one if there are fewer than four.
    /// Others wait, 256 at most. A client that has not sent its request after a second, or after an
    /// eighth of its time, gives its place to one that waits for it.
    pub fn clients(mut self, clients: usize) -> Self {
        self.clients = clients.max(1);
        self
    }
}

/// What a client asks for, and who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The name that it asks for: text without white space and control characters, of at most 1024
    /// bytes.
    pub name: String,
    /// The process, as trust lists know it. It is the one that the kernel saw asking, unless this
    /// process lives in a pid namespace of its own: see [`send`](super::send).
    pub process: BareTgid,
    /// The real user of the process when it asked, as this process's user namespace numbers it.
    /// Another one may have connected the socket.
    pub user: u32,
}

/// Serves memory by name until it is dropped. Clients that are being served then are served to
/// their end.
///
/// ```standalone_crate
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
/// let broker = Broker::start(&session, listener, BrokerOptions::new(), answer)?;
/// // Others call share::request(&UnixStream::connect(path)?, "kv-cache", &device, timeout).
/// # drop(broker);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Broker {
    shared: Arc<Shared>,
    /// The thread that accepts, and what wakes it.
    acceptor: Option<(JoinHandle<()>, UnixStream)>,
    guard: ForkGuard,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Broker({:?})", self.shared.options)
    }
}

/// What the program answers to a request.
type Answer = Box<dyn Fn(&Request) -> Result<Vec<PhysicalMemory>, String> + Send + Sync>;

struct Shared {
    session: Session,
    options: BrokerOptions,
    answer: Answer,
    places: Mutex<Places>,
}

const SERVE: &str = "serve memory to another process";
const REQUEST: &str = "request memory from another process";
/// Longest line of a request or an answer.
const LINE: usize = 2048;
const NAME: usize = 1024;
/// As in [`super::send_many`].
const MANY: usize = 65_536;

impl Broker {
    /// Serves the clients of a listening socket, and keeps the session open meanwhile. For each,
    /// `answer` says what it gets, or a sentence why it gets nothing. It may be called by several
    /// threads at once; if it panics, its client gets nothing.
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
            Error::Exchange(crate::error::Exchange {
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
        let shared = Arc::new(Shared { session, options, answer: Box::new(answer), places });
        let serving = shared.clone();
        let thread = signals::spawn("ascend-vmm-broker", move || accept_all(&listener, &woken, &serving));
        let acceptor = Some((thread.map_err(failed)?, waker));
        Ok(Broker { shared, acceptor, guard: ForkGuard::new() })
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let Some((thread, waker)) = self.acceptor.take() else { return };
        if self.guard.in_child() {
            // The thread is the parent's.
            return;
        }
        lock(&self.shared.places).stop();
        // Closing it would not do: a child of fork may have it too.
        let _ = waker.shutdown(Shutdown::Both);
        let _ = thread.join();
    }
}

/// Accepts clients until the other end of `woken` is shut down. All of them, at once: while they
/// wait in the kernel nobody knows whose they are.
fn accept_all(listener: &UnixListener, woken: &UnixStream, shared: &Arc<Shared>) {
    loop {
        let mut places = lock(&shared.places);
        if places.is_stopped() {
            return;
        }
        places.make_room(Instant::now());
        let look_again = places.is_wanted().then(|| places.grace());
        drop(places);
        let mut polled =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(woken.as_fd(), PollFlags::POLLIN)];
        // No signal is taken by this thread.
        let timeout = look_again.and_then(|grace| PollTimeout::try_from(grace).ok());
        let _ = poll(&mut polled, timeout.unwrap_or(PollTimeout::NONE));
        match listener.accept() {
            Ok((socket, _)) => arrive(socket, shared),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Most likely no descriptor is left: others may be closed soon.
                trace::warn(error, "a client could not be accepted");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        while let Some(client) = next(shared) {
            let _ = signals::spawn("ascend-vmm-client", move || client.serve_on());
        }
    }
}

/// Lets a client wait for a place.
fn arrive(socket: UnixStream, shared: &Shared) {
    let credentials = getsockopt(&socket, PeerCredentials);
    let (user, process) = credentials.map_or((u32::MAX, 0), |credentials| (credentials.uid(), credentials.pid()));
    let connector = Connector { user, process: (process > 0).then_some(process) };
    let refused = lock(&shared.places).arrive(connector, socket);
    if let Some(refused) = refused {
        let wire = Wire::new(&refused, Duration::ZERO, SERVE);
        let error = wire.wrong("too many clients wait, most of them of this user", "Try again later.");
        let _ = wire.write(error_line(&error).as_bytes(), "answer");
        trace::debug(error, "a client was not served");
    }
}

/// The next client that has a place.
fn next(shared: &Arc<Shared>) -> Option<Served> {
    let guest = lock(&shared.places).next()?;
    Some(Served { guest, shared: shared.clone() })
}

/// A client with a place, which it leaves when this is dropped.
struct Served {
    guest: Guest,
    shared: Arc<Shared>,
}

impl Drop for Served {
    fn drop(&mut self) {
        lock(&self.shared.places).leave(self.guest.0);
    }
}

impl Served {
    /// Serves this client, and then those that wait for its place.
    fn serve_on(self) {
        let mut client = Some(self);
        while let Some(served) = client {
            let shared = served.shared.clone();
            serve(&served.guest, &shared);
            drop(served);
            client = next(&shared);
        }
    }
}

/// Serves one client.
fn serve((number, socket): &Guest, shared: &Shared) {
    let wire = Wire::new(socket, shared.options.timeout, SERVE);
    // Held until the client has imported it, and says so by closing.
    let mut held = Vec::new();
    let answered = answer(&wire, *number, shared, &mut held);
    let sent = match &answered {
        Ok(text) => wire.write_signed(text.as_bytes(), "answer"),
        Err(error) => wire.write_signed(error_line(error).as_bytes(), "answer"),
    };
    if let Err(error) = answered.map(drop).and(sent) {
        return trace::debug(error, "a client was not served");
    }
    await_end(&wire);
    drop(held);
}

/// Waits until a client closes its end or its time is over, also if it never stops sending.
fn await_end(wire: &Wire<'_>) {
    let mut nothing = [0; LINE];
    while !wire.is_over() && wire.receive(&mut nothing, "end of the client", None).is_ok() {}
}

/// The answer for one client, who is trusted with the memory.
fn answer(wire: &Wire<'_>, number: u64, shared: &Shared, held: &mut Vec<PhysicalMemory>) -> Result<String> {
    let mut lines = Lines::new(wire)?;
    let received = lines.next("request");
    if !lock(&shared.places).ask(number) {
        return Err(wire.wrong("no request came, and others waited", "Send it right after connecting."));
    }
    let (line, sender) = received?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let wrong = || {
        wire.wrong("the request is not understood", "It is a printable name, a space and the asking process's number.")
    };
    let [name, process] = words[..] else { return Err(wrong()) };
    if name.len() > NAME || printable(name) != name {
        return Err(wrong());
    }
    let Some(user) = sender.user else {
        return Err(wire.wrong("the kernel does not say which user asks", "Send the request on a Unix socket."));
    };
    let claimed: BareTgid = process.parse().map_err(|_| wrong())?;
    let request = Request { name: name.to_owned(), process: claimed, user };
    // Before the program's own code runs: it may decide by who asks.
    trusted_peer(wire, &shared.session, claimed.as_raw(), sender)?;
    let refused = |problem: String| wire.wrong(problem, "Ask the process that serves it.");
    let answered = catch_unwind(AssertUnwindSafe(|| (shared.answer)(&request)));
    *held = answered.map_err(|_| refused("the server failed".to_owned()))?.map_err(refused)?;
    if held.len() > MANY {
        return Err(refused(format!("{} memories are too many for one request", held.len())));
    }
    let mut text = format!("ok {}\n", held.len());
    for memory in held.iter() {
        let ticket = trust(wire, memory, claimed, sender)?;
        text += &format!("{} {} {ticket}\n", ticket.handle, memory.size());
    }
    Ok(text)
}

/// Requests memory by name from a [`Broker`] at the other end of a socket that was just connected,
/// and imports it at `place`, all of it or nothing. Close the socket after that.
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
    let wire = Wire::new(socket, timeout, REQUEST);
    let place = place.into();
    let session = Session { inner: place.inner().session.clone() };
    let tgid = BareTgid::of_this_process(&session)?;
    if name.is_empty() || name.len() > NAME || name.contains(char::is_whitespace) || printable(name) != name {
        return Err(wire.wrong(
            format!("{name:?} is not a name"),
            "A name is text without white space and control characters, of at most 1024 bytes.",
        ));
    }
    // Before the broker can answer: it may not sign by itself.
    let mut lines = Lines::new(&wire)?;
    wire.write(format!("{name} {tgid}\n").as_bytes(), "request")?;
    let (first, _) = lines.next("answer")?;
    let strange = || wire.wrong("the answer is not understood", "Is it a broker of this library's at the other end?");
    if let Some(reason) = first.strip_prefix("error ") {
        return Err(wire.wrong(format!("it answered: {}", printable(reason)), "Nothing was imported."));
    }
    let count: usize = first.strip_prefix("ok ").and_then(|count| count.parse().ok()).ok_or_else(strange)?;
    if count > MANY {
        return Err(strange());
    }
    let mut memories = Vec::new();
    for _ in 0..count {
        let (line, sender) = lines.next("ticket")?;
        let ticket: Ticket = line.split(' ').nth(2).ok_or_else(strange)?.parse()?;
        let ticket = own_ticket(&wire, &session, ticket, sender)?;
        memories.push(import(place, &ticket)?);
    }
    Ok(memories)
}

/// Lines that come on a socket, and who sends them.
struct Lines<'a> {
    wire: &'a Wire<'a>,
    _credentials: Credentials<'a>,
    /// What came after the last line.
    rest: Vec<u8>,
    sender: Option<PeerProcess>,
}

impl<'a> Lines<'a> {
    fn new(wire: &'a Wire<'a>) -> Result<Lines<'a>> {
        let credentials = Credentials::on(wire.socket).map_err(|errno| wire.failed("request", Errno::of(errno)))?;
        Ok(Lines { wire, _credentials: credentials, rest: Vec::new(), sender: None })
    }

    /// The next line, without its end, and who sent it.
    fn next(&mut self, what: &str) -> Result<(String, &PeerProcess)> {
        let wire = self.wire;
        let end = loop {
            if let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
                break end;
            }
            if self.rest.len() > LINE {
                return Err(wire.wrong(format!("the {what} is too long"), "Is this the right socket?"));
            }
            let mut room = nix::cmsg_space!(UnixCredentials, [RawFd; 1]);
            let mut bytes = [0; LINE];
            let count = wire.receive(&mut bytes, what, Some(&mut room))?;
            let sender = PeerProcess::of(&room);
            if self.sender.as_ref().is_some_and(|before| !before.is_same(&sender)) {
                return Err(
                    wire.wrong(format!("two processes or users sent the {what}"), "One process must ask for itself.")
                );
            }
            self.sender.get_or_insert(sender);
            self.rest.extend(&bytes[..count]);
        };
        let line: Vec<u8> = self.rest.drain(..=end).take(end).collect();
        match (String::from_utf8(line), &self.sender) {
            (Ok(line), Some(sender)) => Ok((line, sender)),
            _ => Err(wire.wrong(format!("the {what} is not text"), "Send UTF-8.")),
        }
    }
}

/// The answer to a client that gets nothing: one line, short enough to be read.
fn error_line(error: &Error) -> String {
    let text = printable(&error.to_string().replace('\n', " "));
    let short: String = text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= NAME).map(|(_, c)| c).collect();
    format!("error {short}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_client_whose_time_is_over_is_cut_off_however_much_it_has_sent() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let sent = [1; 2 * LINE];
        client.write_all(&sent).unwrap();
        await_end(&Wire::new(&server, Duration::ZERO, SERVE));
        client.shutdown(Shutdown::Both).unwrap();
        let mut unread = Vec::new();
        (&server).read_to_end(&mut unread).unwrap();
        assert_eq!(unread, sent);
    }

    #[test]
    fn a_client_that_closes_its_end_is_waited_for_until_then() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[1; 2 * LINE]).unwrap();
        drop(client);
        await_end(&Wire::new(&server, Duration::MAX, SERVE));
    }
}
