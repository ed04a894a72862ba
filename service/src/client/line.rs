//! A connection to the service, and one that has a role.

use super::{Error, OpenOptions, Result};
use crate::entries::Entries;
use crate::entries::EntryRef;
use crate::layout::{Allocation, ENTRY_BYTES, Entry, PageSize};
use crate::name::DomainName;
use crate::protocol::{self, Answer, Code, Request, ServiceError, Share, VERSION, Waiting};
use std::any::Any;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long the front may take for an answer that waits for nobody.
pub(super) const ANSWER: Duration = Duration::from_secs(30);
/// How long a role that is dropped tries to say so to a front that is being replaced.
const GOODBYE: Duration = Duration::from_secs(2);
/// How long a client tries to reach a front that is being replaced.
const REACH: Duration = Duration::from_secs(10);

/// How often a program that may give up is asked.
const ASKING: Duration = Duration::from_millis(50);

/// So many bytes are worth sending before more is prepared. Buffers of this size come from memory
/// that was used before; larger ones are new pages of the kernel's each time.
pub(super) const PART: usize = 64 << 10;

/// A connection to the service.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) path: PathBuf,
    pub(super) socket: UnixStream,
    /// Bytes that arrived and were not looked at.
    pub(super) arrived: Vec<u8>,
    /// Requests of the service for memory.
    pub(super) reclaims: Vec<(u64, u64)>,
    pub(super) process: i32,
    pub(super) options: OpenOptions,
    /// The number of the service's life: versions of another one are others.
    pub(super) instance: u64,
    /// The process that made it: a child has a copy of the socket, and must not use it.
    pub(super) owner: u32,
    /// From a function that was told what a request waits for.
    pub(super) panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Line {
    pub(super) fn connect(path: &Path, process: i32, options: &OpenOptions) -> Result<Line> {
        Line::connect_with(path, process, options, None).map(|(line, _)| line)
    }

    /// Connects, and sends a first request together with the greeting.
    fn connect_with(
        path: &Path,
        process: i32,
        options: &OpenOptions,
        first: Option<(&Request, Duration)>,
    ) -> Result<(Line, Option<Answer>)> {
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Unreachable { path: path.to_owned(), error }),
            }
        };
        let mut line = Line {
            path: path.to_owned(),
            socket,
            arrived: Vec::new(),
            reclaims: Vec::new(),
            process,
            options: options.clone(),
            instance: 0,
            owner: std::process::id(),
            panic: Mutex::new(None),
        };
        let hello = Request::Hello { version: VERSION, process, program: options.program.clone() };
        let (requests, wait) = match first {
            Some((first, wait)) => (vec![&hello, first], wait),
            None => (vec![&hello], Duration::ZERO),
        };
        let mut answers = line.ask_all(requests, wait)?.into_iter();
        match answers.next() {
            Some(Answer::Hello { instance, .. }) => {
                line.instance = instance;
                Ok((line, answers.next()))
            }
            Some(other) => Err(strange(&other)),
            None => Err(line.unreachable(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Connects and opens a domain. If the front is replaced before it answers, it may have given
    /// the role or not: the token of the request tells.
    fn open(
        path: &Path,
        process: i32,
        options: &OpenOptions,
        request: &Request,
        wait: Duration,
        token: &[u8],
    ) -> Result<(Line, Option<Answer>)> {
        let (mut request, begun) = (request.clone(), Instant::now());
        let resume = Request::Resume { token: token.to_vec() };
        let mut tried = false;
        anew(|| {
            if std::mem::replace(&mut tried, true) {
                match Line::connect_with(path, process, options, Some((&resume, Duration::ZERO))) {
                    Err(error) if error.code() == Some(Code::Unknown) => {}
                    resumed => return resumed,
                }
            }
            let left = wait.saturating_sub(begun.elapsed());
            if let Request::Open { wait_ms, .. } = &mut request {
                *wait_ms = milliseconds(left);
            }
            Line::connect_with(path, process, options, Some((&request, left)))
        })
    }

    /// Ends the connection if the program gives up: an answer may still come, which nobody waits
    /// for.
    fn check_give_up(&self) -> Result<()> {
        if !self.options.give_up.0.as_ref().is_some_and(|give_up| give_up()) {
            return Ok(());
        }
        let _ = self.socket.shutdown(Shutdown::Both);
        Err(Error::Interrupted(self.path.clone()))
    }

    fn unreachable(&self, error: io::Error) -> Error {
        Error::Unreachable { path: self.path.clone(), error }
    }

    /// Sends a request and waits for its answer. `wait` is how long the service itself may wait.
    pub(super) fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        let mut answers = self.ask_all([request], wait)?;
        answers.pop().ok_or_else(|| self.unreachable(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Sends several requests at once, and waits for all of their answers: one round trip.
    pub(super) fn ask_all<R: Borrow<Request>>(
        &mut self,
        requests: impl IntoIterator<Item = R>,
        wait: Duration,
    ) -> Result<Vec<Answer>> {
        if self.owner != std::process::id() {
            return Err(Error::Forked(self.path.display().to_string()));
        }
        // The service gives up by itself; this is for a service that does not answer at all.
        let deadline = Instant::now().checked_add(wait.saturating_add(ANSWER));
        self.socket.set_write_timeout(Some(ANSWER)).map_err(|error| self.unreachable(error))?;
        let (mut frames, mut asked, mut refused) = (Vec::new(), 0, None);
        let mut requests = requests.into_iter();
        loop {
            let request = requests.next().filter(|_| refused.is_none());
            let last = request.is_none();
            match request.map(|request| protocol::encode(request.borrow())) {
                Some(Ok(frame)) if frames.is_empty() => (frames, asked) = (frame, asked + 1),
                Some(Ok(frame)) => {
                    frames.extend(frame);
                    asked += 1;
                }
                // Answers to those before it will come.
                Some(Err(too_long)) => refused = Some(too_long),
                None => {}
            }
            // While the service reads much, more is prepared.
            if frames.len() < PART && !last {
                continue;
            }
            if let Err(error) = self.socket.write_all(&frames) {
                // A service that has no place for a client says so before it hangs up.
                return Err(match self.next(deadline) {
                    Ok(Some(Answer::Error(refused))) => refused.into(),
                    _ => self.unreachable(error),
                });
            }
            if last {
                break;
            }
            frames.clear();
        }
        let mut answers = Vec::new();
        while answers.len() < asked {
            let next = match (self.next(deadline), refused.take()) {
                // A connection that ends with an error has nothing else to say.
                (Err(Error::Unreachable { .. }), Some(refused)) => return Err(Error::Service(refused)),
                (next, before) => {
                    refused = before;
                    next?
                }
            };
            match next {
                Some(Answer::Waiting(waiting)) => self.tell(&waiting),
                Some(Answer::Error(error)) => {
                    refused.get_or_insert(error);
                    answers.push(Answer::Done {});
                }
                Some(answer) => answers.push(answer),
                None => return Err(self.unreachable(io::ErrorKind::TimedOut.into())),
            }
        }
        refused.map_or(Ok(answers), |error| Err(error.into()))
    }

    /// Tells the program what a request waits for.
    fn tell(&mut self, waiting: &Waiting) {
        tracing::debug!("{}", waiting.reason);
        let Some(progress) = &self.options.progress.0 else { return };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| progress(waiting))) {
            self.options.progress.0 = None;
            self.panic = Mutex::new(Some(panic));
        }
    }

    /// Goes on with the panic of a function that was told what a request waits for.
    pub(super) fn deliver_panic(&mut self) {
        let panic = self.panic.get_mut().ok().and_then(Option::take);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// The next message that is no request for memory; `None` if none comes in time.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> Result<Option<Answer>> {
        loop {
            if let Some((length, answer)) = protocol::decode::<Answer>(&self.arrived)? {
                self.arrived.drain(..length);
                match answer {
                    Answer::Reclaim { reclaim, bytes, .. } => self.reclaims.push((reclaim, bytes)),
                    answer => return Ok(Some(answer)),
                }
                continue;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            self.check_give_up()?;
            let left = match self.options.give_up.0 {
                Some(_) => Some(left.unwrap_or(Duration::MAX).min(ASKING)),
                None => left,
            };
            self.socket.set_read_timeout(left).map_err(|error| self.unreachable(error))?;
            let mut part = [0; 64 << 10];
            match self.socket.read(&mut part) {
                Ok(0) => return Err(self.unreachable(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.arrived.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(self.unreachable(error)),
            }
        }
    }
}

/// Does something on a new connection, and again if that breaks: the front was killed or replaced.
/// While its keeper lives, nobody is refused a connection.
pub(super) fn anew<T>(mut step: impl FnMut() -> Result<T>) -> Result<T> {
    let mut first_break = None;
    loop {
        let begun = Instant::now();
        let error = match step() {
            Err(error) if is_broken(&error) => error,
            done => return done,
        };
        let now = Instant::now();
        // One that worked for long is not in a row with those before it.
        first_break = first_break.filter(|_| now < begun + REACH);
        if now > *first_break.get_or_insert(now) + REACH {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_broken(error: &Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let Error::Unreachable { error, .. } = error else { return false };
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

pub(super) fn strange(answer: &Answer) -> Error {
    let problem = format!("the service answered {answer:?}").chars().take(200).collect();
    ServiceError { code: Code::Protocol, problem, remedy: "is it a memory service at this socket?".into() }.into()
}

pub(super) fn done(answer: Answer) -> Result<()> {
    match answer {
        Answer::Done {} => Ok(()),
        other => Err(strange(&other)),
    }
}

/// A layout, with what is needed to import it.
#[derive(Debug)]
pub struct ServedLayout {
    /// Allocations in their order, and how this process imports them.
    pub allocations: Vec<(Allocation, Share)>,
    /// What the writer put, by key.
    pub entries: BTreeMap<String, Entry>,
}

/// A connection with a role, which comes back when the front is replaced.
///
/// For programs that import and map by other means than this library's: those that run the vendor's
/// stack. The others have [`Reader`](crate::Reader) and [`Writer`](crate::Writer).
#[derive(Debug)]
pub struct Role {
    pub(super) line: Line,
    pub(super) domain: DomainName,
    pub(super) token: Vec<u8>,
    pub(super) version: u64,
    pub(super) hash: Vec<u8>,
    pub(super) allocations: u64,
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) writes: bool,
    /// The connection failed, and the role was not taken back yet.
    pub(super) broken: bool,
}

impl Drop for Role {
    fn drop(&mut self) {
        if self.line.owner != std::process::id() {
            return;
        }
        // A front that is killed just now would leave the role to the next one, which keeps it as
        // long as this process lives.
        let closed = match self.broken {
            true => self.come_back().and_then(|()| self.line.ask(&Request::Close {}, Duration::ZERO)),
            false => self.line.ask(&Request::Close {}, Duration::ZERO),
        };
        if matches!(closed, Err(Error::Unreachable { .. })) && !self.broken {
            let deadline = Instant::now() + GOODBYE;
            while let Err(Error::Unreachable { .. }) = self.come_back() {
                if Instant::now() >= deadline {
                    tracing::debug!("the service may keep a role in {} until this process ends", self.domain);
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = self.line.ask(&Request::Close {}, Duration::ZERO);
        }
    }
}

impl Role {
    /// Opens a domain ([`OpenOptions::request`]) at the service of a socket. `process` is this
    /// process as the driver's trust lists know it. The service waits as long as the request says.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn open(path: &Path, process: i32, request: &Request, options: &OpenOptions) -> Result<Role> {
        let Request::Open { domain, wait_ms, token, .. } = request else {
            let problem = "a role begins with `open`".into();
            let remedy = "send another request to a role that is open".into();
            return Err(ServiceError { code: Code::Protocol, problem, remedy }.into());
        };
        let wait = Duration::from_millis(*wait_ms);
        let (line, answer) = Line::open(path, process, options, request, wait, token)?;
        let mut role = Role {
            line,
            domain: domain.clone(),
            token: Vec::new(),
            version: 0,
            hash: Vec::new(),
            allocations: 0,
            entries: 0,
            bytes: 0,
            writes: false,
            broken: false,
        };
        let Some(answer) = answer else { return Err(role.line.unreachable(io::ErrorKind::UnexpectedEof.into())) };
        role.opened(answer)?;
        role.line.deliver_panic();
        Ok(role)
    }

    /// The domain.
    pub fn domain(&self) -> &DomainName {
        &self.domain
    }

    /// The version that is read or updated; 0 for a writer of a new layout.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The hash of that version's layout.
    pub fn hash(&self) -> &[u8] {
        &self.hash
    }

    /// Bytes of all allocations of that version.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True for a writer.
    pub fn writes(&self) -> bool {
        self.writes
    }

    /// A number of the service's life: allocations of another one are others.
    pub fn instance(&self) -> u64 {
        self.line.instance
    }

    pub(super) fn opened(&mut self, answer: Answer) -> Result<()> {
        match answer {
            Answer::Opened { writes, version, hash, allocations, entries, bytes, token } => {
                (self.writes, self.version, self.hash, self.token) = (writes, version, hash, token);
                (self.allocations, self.entries, self.bytes) = (allocations, entries, bytes);
                Ok(())
            }
            other => Err(strange(&other)),
        }
    }

    /// Asks, again on a new connection if the front is replaced meanwhile. Only for requests that
    /// may be carried out twice.
    pub(super) fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        self.persist(|role| role.line.ask(request, wait))
    }

    /// Tries until the service can be reached, and takes the role back in between.
    pub(super) fn persist<T>(&mut self, mut step: impl FnMut(&mut Role) -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + REACH;
        loop {
            let tried = match self.broken {
                true => self.come_back().and_then(|()| step(self)),
                false => step(self),
            };
            match tried {
                Err(Error::Unreachable { .. }) if Instant::now() < deadline => {
                    self.broken = true;
                    self.line.check_give_up()?;
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error @ Error::Unreachable { .. }) => {
                    self.broken = true;
                    return Err(error);
                }
                tried => return tried,
            }
        }
    }

    /// Takes the role back on a new connection.
    pub(super) fn come_back(&mut self) -> Result<()> {
        if self.line.owner != std::process::id() {
            return Err(Error::Forked(self.domain.to_string()));
        }
        let resume = Request::Resume { token: self.token.clone() };
        let first = Some((&resume, Duration::ZERO));
        let (mut line, answer) = Line::connect_with(&self.line.path, self.line.process, &self.line.options, first)?;
        let Some(answer) = answer else { return Err(line.unreachable(io::ErrorKind::UnexpectedEof.into())) };
        line.reclaims = std::mem::take(&mut self.line.reclaims);
        (self.line, self.broken) = (line, false);
        self.opened(answer)
    }

    /// The whole layout with what is needed to import it, in one round trip for each thousand
    /// entries or less.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn layout(&mut self) -> Result<ServedLayout> {
        let first = [
            &Request::Allocations { from: 0 },
            &Request::Shares { allocations: Vec::new() },
            &Request::Entries { after: None },
        ];
        let mut answers = self.persist(|role| role.line.ask_all(first, Duration::ZERO))?.into_iter();
        let (mut allocations, mut shares, mut entries) = match (answers.next(), answers.next(), answers.next()) {
            (
                Some(Answer::Allocations { allocations }),
                Some(Answer::Shares { shares }),
                Some(Answer::Entries { entries }),
            ) => (allocations, shares, BTreeMap::from_iter(owned(&entries))),
            (other, ..) => return Err(strange(&other.unwrap_or(Answer::Done {}))),
        };
        while (allocations.len() as u64) < self.allocations {
            match self.ask(&Request::Allocations { from: allocations.len() as u64 }, ANSWER)? {
                Answer::Allocations { allocations: more } if !more.is_empty() => allocations.extend(more),
                other => return Err(strange(&other)),
            }
        }
        let rest: Vec<u64> = allocations.iter().skip(shares.len()).map(|allocation| allocation.id).collect();
        shares.extend(self.shares(&rest)?);
        while (entries.len() as u64) < self.entries {
            let after = entries.last_key_value().map(|(key, _): (&String, &Entry)| key.clone());
            match self.ask(&Request::Entries { after }, ANSWER)? {
                Answer::Entries { entries: more } if !more.is_empty() => entries.extend(owned(&more)),
                other => return Err(strange(&other)),
            }
        }
        if shares.iter().map(|share| share.allocation).ne(allocations.iter().map(|allocation| allocation.id)) {
            return Err(strange(&Answer::Shares { shares }));
        }
        Ok(ServedLayout { allocations: allocations.into_iter().zip(shares).collect(), entries })
    }

    /// Allocations of the layout, in their order.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn all_allocations(&mut self) -> Result<Vec<Allocation>> {
        let mut all: Vec<Allocation> = Vec::new();
        while (all.len() as u64) < self.allocations {
            match self.ask(&Request::Allocations { from: all.len() as u64 }, ANSWER)? {
                Answer::Allocations { allocations } if !allocations.is_empty() => all.extend(allocations),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    /// Lets this process import allocations of the layout, and says how.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn shares(&mut self, ids: &[u64]) -> Result<Vec<Share>> {
        let mut all = Vec::new();
        for part in ids.chunks(protocol::PAGE_MAX) {
            match self.ask(&Request::Shares { allocations: part.to_vec() }, ANSWER)? {
                Answer::Shares { shares } if shares.iter().map(|share| share.allocation).eq(part.iter().copied()) => {
                    all.extend(shares);
                }
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    /// New memory of a writer that has `known` allocations. A front that is replaced in the middle
    /// makes no second one.
    ///
    /// # Errors
    ///
    /// No memory, or quota; the service cannot be reached.
    pub fn allocate(
        &mut self,
        known: u64,
        size: u64,
        page: PageSize,
        tag: &str,
        id: Option<u64>,
        wait: Duration,
    ) -> Result<Allocation> {
        let request = Request::Allocate { size, page, tag: tag.to_owned(), wait_ms: milliseconds(wait), id };
        let allocation = self.persist(|role| {
            let answer = match role.allocations > known {
                true => role.line.ask(&Request::Allocations { from: known }, ANSWER)?,
                false => role.line.ask(&request, wait)?,
            };
            match answer {
                Answer::Allocated { allocation } => Ok(allocation),
                Answer::Allocations { mut allocations } if !allocations.is_empty() => Ok(allocations.swap_remove(0)),
                other => Err(strange(&other)),
            }
        });
        match allocation {
            Ok(allocation) => {
                self.allocations = known + 1;
                Ok(allocation)
            }
            Err(error) => {
                self.line.deliver_panic();
                Err(error)
            }
        }
    }

    /// Gives back the newest memory of a writer that has put nothing and has `known` allocations
    /// without it. It is unmapped already.
    ///
    /// # Errors
    ///
    /// Something was put; the service cannot be reached.
    pub fn free_last(&mut self, known: u64, id: u64) -> Result<()> {
        self.persist(|role| match role.allocations {
            // A front that was replaced in the middle may have carried it out.
            left if left == known => Ok(()),
            _ => done(role.line.ask(&Request::Free { allocations: vec![id] }, ANSWER)?),
        })?;
        self.allocations = known;
        Ok(())
    }

    /// Marks the domain as dirty before the first write in place.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn begin(&mut self) -> Result<()> {
        // From the first write on the domain is dirty, and nobody knows better when that is.
        done(self.ask(&Request::Begin {}, ANSWER)?)
    }

    /// Puts all entries and commits; the role reads from then on. A front that is replaced in the
    /// middle may have done it.
    ///
    /// # Errors
    ///
    /// The service refuses or cannot be reached; then nothing is published.
    pub fn commit(&mut self, entries: &BTreeMap<String, Entry>) -> Result<()> {
        self.persist(|role| if role.writes { role.publish(entries) } else { Ok(()) })
    }

    fn publish(&mut self, entries: &BTreeMap<String, Entry>) -> Result<()> {
        let mut rest = entries.iter();
        let puts = std::iter::from_fn(|| {
            let (mut part, mut bytes) = (Entries::default(), 0);
            for (key, entry) in rest.by_ref() {
                bytes += key.len() + entry.value.len() + ENTRY_BYTES;
                part.push(EntryRef::new(key, entry));
                if bytes > PART {
                    break;
                }
            }
            (!part.is_empty()).then_some(Request::Put { entries: part })
        });
        // None may fail: what is committed is whole.
        self.line.ask_all(puts, ANSWER)?.into_iter().try_for_each(done)?;
        match self.line.ask(&Request::Commit {}, ANSWER)? {
            Answer::Committed { version, hash } => {
                (self.version, self.hash, self.writes) = (version, hash, false);
                Ok(())
            }
            other => Err(strange(&other)),
        }
    }

    /// Asks whether the service and the owner of the memory live.
    ///
    /// # Errors
    ///
    /// One of them does not answer.
    pub fn ping(&mut self) -> Result<()> {
        done(self.ask(&Request::Ping {}, ANSWER)?)
    }

    /// Tells the service that this reader has unmapped the memory.
    ///
    /// # Errors
    ///
    /// The owner of the memory does not answer, or the service cannot be reached.
    pub fn sleep(&mut self) -> Result<()> {
        done(self.ask(&Request::Sleep {}, ANSWER)?)
    }

    /// Waits, before this reader imports again, until nobody changes the memory in place.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn wake(&mut self, wait: Duration) -> Result<()> {
        let answer = self.ask(&Request::Wake { wait_ms: milliseconds(wait) }, wait);
        self.line.deliver_panic();
        self.opened(answer?)
    }
}

fn owned(entries: &Entries) -> impl Iterator<Item = (String, Entry)> {
    entries.iter().map(|entry| (entry.key.to_owned(), entry.to_entry()))
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_heard_from_a_service_that_has_hung_up() {
        let (socket, mut service) = UnixStream::pair().unwrap();
        let refusal = ServiceError { code: Code::Busy, problem: "all places are taken".into(), remedy: "wait".into() };
        service.write_all(&protocol::encode(&Answer::Error(refusal)).unwrap()).unwrap();
        drop(service);
        let mut line = Line {
            path: "socket".into(),
            socket,
            arrived: Vec::new(),
            reclaims: Vec::new(),
            process: 0,
            options: OpenOptions::new(),
            instance: 0,
            owner: std::process::id(),
            panic: Mutex::new(None),
        };
        let refused = line.ask(&Request::Ping {}, ANSWER).unwrap_err();
        assert!(refused.to_string().contains("all places are taken"), "{refused}");
        // It said nothing else.
        let gone = line.ask(&Request::Ping {}, ANSWER).unwrap_err();
        assert!(matches!(gone, Error::Unreachable { .. }), "{gone}");
    }
}
