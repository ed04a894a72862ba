//! The Rust client: roles in domains, for a process that has a session of this library.
//!
//! A process that runs the vendor's stack cannot use this: it speaks the protocol and imports with
//! the vendor's functions.
//!
//! **There is no read-only mapping on this driver**: whoever maps served memory can write to it.
//! *Reader* is a promise of the program, not a protection.

use crate::layout::{Allocation, Entry, PageSize};
use crate::name::DomainName;
use crate::protocol::{self, Answer, Code, Event, Mode, Request, ServiceError, Share, Status, VERSION};
use ascend_vmm::copy::Slice;
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Device, Mapping, Reservation, discovery};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// An error of the client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The service refused.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The library or the driver refused.
    #[error(transparent)]
    Memory(#[from] ascend_vmm::Error),
    /// The service cannot be reached.
    #[error("the memory service at {path} cannot be reached: {error}")]
    Unreachable {
        /// Its socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// What is served now is not what was mapped before.
    #[error("version {now} of {domain} has another layout than version {before}, which was put to sleep: {difference}")]
    Stale {
        /// The domain.
        domain: DomainName,
        /// The version that was asleep.
        before: u64,
        /// The version that is served.
        now: u64,
        /// The first thing that differs.
        difference: String,
    },
    /// There is no such key.
    #[error("{domain} has no {key:?}")]
    NoKey {
        /// The domain.
        domain: DomainName,
        /// The key.
        key: String,
    },
    /// The memory is not mapped.
    #[error("{0} is asleep; wake it first")]
    Asleep(DomainName),
}

impl Error {
    /// What kind of error of the service it is, if it is one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Service(error) => Some(error.code),
            _ => None,
        }
    }
}

/// The result of the client's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Chunks of memory in which a writer allocates.
const CHUNK: u64 = 1 << 30;
/// Entries begin at multiples of this.
const ALIGNMENT: u64 = 512;
/// How long the front may take for an answer that waits for nobody.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a client tries to reach a front that is being replaced.
const REACH: Duration = Duration::from_secs(10);

/// How a domain is opened.
#[derive(Debug, Clone)]
#[must_use]
pub struct OpenOptions {
    wait: Duration,
    allow_update: bool,
    lends: bool,
    page: PageSize,
    program: String,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        let program =
            std::env::current_exe().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        OpenOptions {
            wait: Duration::from_secs(60),
            allow_update: false,
            lends: false,
            page: PageSize::Huge,
            program: program.unwrap_or_default(),
        }
    }
}

impl OpenOptions {
    /// Waits up to a minute for the role.
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// How long to wait for the role, and later for memory.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// A reader that stays mapped while a writer changes the memory in place.
    pub fn allow_update(mut self, allow: bool) -> Self {
        self.allow_update = allow;
        self
    }

    /// A writer that can give memory back when others wait for it: see [`Writer::reclaim`].
    pub fn lends(mut self, lends: bool) -> Self {
        self.lends = lends;
        self
    }

    /// Size of the pages of new memory.
    pub fn page(mut self, page: PageSize) -> Self {
        self.page = page;
        self
    }

    /// What this program is called in lists: its rank, for instance.
    pub fn program(mut self, program: impl Into<String>) -> Self {
        self.program = program.into();
        self
    }
}

/// A connection to the service.
#[derive(Debug)]
struct Line {
    path: PathBuf,
    socket: UnixStream,
    /// Bytes that arrived and were not looked at.
    arrived: Vec<u8>,
    /// Requests of the service for memory.
    reclaims: Vec<(u64, u64)>,
    process: i32,
    program: String,
    instance: u64,
}

impl Line {
    fn connect(path: &Path, process: i32, program: &str) -> Result<Line> {
        let unreachable = |error| Error::Unreachable { path: path.to_owned(), error };
        let socket = UnixStream::connect(path).map_err(unreachable)?;
        let mut line = Line {
            path: path.to_owned(),
            socket,
            arrived: Vec::new(),
            reclaims: Vec::new(),
            process,
            program: program.to_owned(),
            instance: 0,
        };
        let hello = Request::Hello { version: VERSION, process, program: program.to_owned() };
        match line.ask(&hello, ANSWER)? {
            Answer::Hello { instance, .. } => line.instance = instance,
            other => return Err(strange(&other)),
        }
        Ok(line)
    }

    fn unreachable(&self, error: io::Error) -> Error {
        Error::Unreachable { path: self.path.clone(), error }
    }

    /// Sends a request and waits for its answer. `wait` is how long the service itself may wait.
    fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        let frame = protocol::encode(request)?;
        // The service gives up by itself; this is for a service that does not answer at all.
        let deadline = Instant::now().checked_add(wait.saturating_add(ANSWER));
        self.socket.set_write_timeout(Some(ANSWER)).map_err(|error| self.unreachable(error))?;
        if let Err(error) = self.socket.write_all(&frame) {
            return Err(self.unreachable(error));
        }
        loop {
            match self.next(deadline)? {
                Some(Answer::Waiting { reason }) => tracing::debug!("{reason}"),
                Some(Answer::Error(error)) => return Err(error.into()),
                Some(answer) => return Ok(answer),
                None => return Err(self.unreachable(io::ErrorKind::TimedOut.into())),
            }
        }
    }

    /// The next message that is no request for memory; `None` if none comes in time.
    fn next(&mut self, deadline: Option<Instant>) -> Result<Option<Answer>> {
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

fn strange(answer: &Answer) -> Error {
    let problem = format!("the service answered {answer:?}").chars().take(200).collect();
    ServiceError { code: Code::Protocol, problem, remedy: "is it a memory service at this socket?".into() }.into()
}

fn done(answer: Answer) -> Result<()> {
    match answer {
        Answer::Done {} => Ok(()),
        other => Err(strange(&other)),
    }
}

/// A connection with a role, which comes back when the front is replaced.
#[derive(Debug)]
struct Role {
    line: Line,
    domain: DomainName,
    token: Vec<u8>,
    version: u64,
    hash: Vec<u8>,
    allocations: u64,
    entries: u64,
    bytes: u64,
    writes: bool,
    /// The connection failed, and the role was not taken back yet.
    broken: bool,
}

impl Drop for Role {
    fn drop(&mut self) {
        // A front that was replaced keeps the role for a while: this one will not come back for it.
        if self.broken && self.come_back().is_err() {
            tracing::debug!("the service keeps a role of {} until its time is over", self.domain);
        }
    }
}

impl Role {
    fn open(path: &Path, device: &Device, domain: &DomainName, mode: Mode, options: &OpenOptions) -> Result<Role> {
        let process = BareTgid::of_this_process(&device.session())?.as_raw();
        let line = Line::connect(path, process, &options.program)?;
        let npus = discovery::list()?;
        let physical = npus.iter().find(|npu| npu.logical == device.id()).map(|npu| npu.physical.0);
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
        let request = Request::Open {
            domain: domain.clone(),
            mode,
            device: physical.unwrap_or(u32::MAX),
            wait_ms: milliseconds(options.wait),
            allow_update: options.allow_update,
            lends: options.lends,
        };
        let answer = role.line.ask(&request, options.wait)?;
        role.opened(answer)?;
        Ok(role)
    }

    fn opened(&mut self, answer: Answer) -> Result<()> {
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
    fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        self.persist(|role| role.line.ask(request, wait))
    }

    /// Tries until the service can be reached, and takes the role back in between.
    fn persist<T>(&mut self, mut step: impl FnMut(&mut Role) -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + REACH;
        loop {
            let tried = match self.broken {
                true => self.come_back().and_then(|()| step(self)),
                false => step(self),
            };
            match tried {
                Err(Error::Unreachable { .. }) if Instant::now() < deadline => {
                    self.broken = true;
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
    fn come_back(&mut self) -> Result<()> {
        let mut line = Line::connect(&self.line.path, self.line.process, &self.line.program)?;
        let answer = line.ask(&Request::Resume { token: self.token.clone() }, ANSWER)?;
        line.reclaims = std::mem::take(&mut self.line.reclaims);
        (self.line, self.broken) = (line, false);
        self.opened(answer)
    }

    fn all_allocations(&mut self) -> Result<Vec<Allocation>> {
        let mut all: Vec<Allocation> = Vec::new();
        while (all.len() as u64) < self.allocations {
            match self.ask(&Request::Allocations { from: all.len() as u64 }, ANSWER)? {
                Answer::Allocations { allocations } if !allocations.is_empty() => all.extend(allocations),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    fn all_entries(&mut self) -> Result<BTreeMap<String, Entry>> {
        let mut all = BTreeMap::new();
        while (all.len() as u64) < self.entries {
            let after = all.last_key_value().map(|(key, _): (&String, &Entry)| key.clone());
            match self.ask(&Request::Entries { after }, ANSWER)? {
                Answer::Entries { entries } if !entries.is_empty() => all.extend(entries),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    fn shares(&mut self, ids: &[u64]) -> Result<Vec<Share>> {
        let mut all = Vec::new();
        for part in ids.chunks(protocol::PAGE_MAX) {
            match self.ask(&Request::Shares { allocations: part.to_vec() }, ANSWER)? {
                Answer::Shares { shares } if shares.len() == part.len() => all.extend(shares),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Served memory behind addresses: the allocations of a layout side by side.
#[derive(Debug)]
struct Space {
    device: Device,
    reservation: Reservation,
    /// Allocation and where it begins.
    places: Vec<(Allocation, u64)>,
    mappings: Vec<Mapping>,
    end: u64,
}

impl Space {
    fn new(device: &Device, capacity: u64) -> Result<Space> {
        let reservation = device.session().reserve(capacity.max(PageSize::Huge.bytes()))?;
        Ok(Space { device: device.clone(), reservation, places: Vec::new(), mappings: Vec::new(), end: 0 })
    }

    /// Imports and maps an allocation behind those that are there.
    fn add(&mut self, allocation: &Allocation, share: &Share) -> Result<()> {
        let mapping = self.map(self.end, share)?;
        self.mappings.push(mapping);
        self.places.push((allocation.clone(), self.end));
        self.end += allocation.size;
        Ok(())
    }

    fn map(&self, offset: u64, share: &Share) -> Result<Mapping> {
        let ticket = Ticket::from_bytes(&share.ticket).map_err(ascend_vmm::Error::from)?;
        let memory = share::import(&self.device, &ticket)?;
        Ok(self.reservation.map(offset, &memory)?)
    }

    fn offset_of(&self, entry: &Entry) -> Option<u64> {
        let at = self.places.binary_search_by_key(&entry.allocation, |(allocation, _)| allocation.id).ok()?;
        self.places[at].1.checked_add(entry.offset)
    }

    fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Ok(self.reservation.slice(offset, size)?)
    }
}

/// Writes a layout.
///
/// Until [`Writer::commit`], readers see what was committed before. A writer that is dropped, or
/// dies, leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    role: Role,
    space: Space,
    entries: BTreeMap<String, Entry>,
    used: u64,
    options: OpenOptions,
    in_place: bool,
}

impl Writer {
    /// The domain.
    pub fn domain(&self) -> &DomainName {
        &self.role.domain
    }

    /// Names `size` bytes, and returns their memory. `value` is what readers get to know about
    /// them. New memory is asked for in chunks of 1 GiB, or as much as the writer's capacity
    /// allows.
    ///
    /// # Errors
    ///
    /// No memory, quota, or capacity; a writer in place can only name what was named before.
    pub fn put(&mut self, key: &str, size: u64, value: &[u8]) -> Result<Slice<'_>> {
        if self.in_place {
            let Some(entry) = self.entries.get_mut(key) else {
                return Err(Error::NoKey { domain: self.role.domain.clone(), key: key.into() });
            };
            if size > entry.size {
                let problem = format!("{key} has {} bytes, and {size} are wanted", entry.size);
                let remedy = "open the domain to write new memory".into();
                return Err(ServiceError { code: Code::Invalid, problem, remedy }.into());
            }
            entry.value = value.to_vec();
            let entry = entry.clone();
            return self.entry_slice(&entry, size);
        }
        let offset = self.used.next_multiple_of(ALIGNMENT);
        while offset + size > self.space.end {
            self.grow(offset + size - self.space.end)?;
        }
        let at = self.space.places.partition_point(|(_, start)| *start <= offset).saturating_sub(1);
        let Some((allocation, start)) = self.space.places.get(at) else {
            return Err(Error::Asleep(self.role.domain.clone()));
        };
        let entry = Entry { allocation: allocation.id, offset: offset - start, size, value: value.to_vec() };
        self.entries.insert(key.to_owned(), entry);
        self.used = offset + size;
        self.space.slice(offset, size)
    }

    fn entry_slice(&self, entry: &Entry, size: u64) -> Result<Slice<'_>> {
        let offset = self.space.offset_of(entry).ok_or_else(|| Error::Asleep(self.role.domain.clone()))?;
        self.space.slice(offset, size)
    }

    /// Gets one more chunk that holds `missing` bytes if the capacity allows.
    fn grow(&mut self, missing: u64) -> Result<()> {
        let page = self.options.page.bytes();
        let room = (self.space.reservation.size() - self.space.end) / page * page;
        let size = missing.max(CHUNK).next_multiple_of(page).min(room);
        if size == 0 || size < missing.next_multiple_of(page).min(CHUNK) {
            let problem = format!("the writer's capacity of {} bytes is used up", self.space.reservation.size());
            let remedy = "open the domain with a greater capacity".into();
            return Err(ServiceError { code: Code::Invalid, problem, remedy }.into());
        }
        self.allocate(size, "").map(drop)
    }

    /// New memory at the end of the writer's space, for programs that place things themselves:
    /// its number and its offset.
    ///
    /// # Errors
    ///
    /// No memory, quota, or capacity.
    pub fn allocate(&mut self, size: u64, tag: &str) -> Result<(u64, u64)> {
        let wait = self.options.wait;
        let request =
            Request::Allocate { size, page: self.options.page, tag: tag.to_owned(), wait_ms: milliseconds(wait) };
        let known = self.space.places.len() as u64;
        let allocation = self.role.persist(|role| {
            // A front that was replaced in the middle may have carried it out.
            let answer = match role.allocations > known {
                true => role.line.ask(&Request::Allocations { from: known }, ANSWER)?,
                false => role.line.ask(&request, wait)?,
            };
            match answer {
                Answer::Allocated { allocation } => Ok(allocation),
                Answer::Allocations { mut allocations } if !allocations.is_empty() => Ok(allocations.swap_remove(0)),
                other => Err(strange(&other)),
            }
        })?;
        self.role.allocations = known + 1;
        let shares = self.role.shares(&[allocation.id])?;
        let offset = self.space.end;
        for share in &shares {
            self.space.add(&allocation, share)?;
        }
        Ok((allocation.id, offset))
    }

    /// Memory of the writer's space by its offset.
    ///
    /// # Errors
    ///
    /// An offset at which nothing is mapped.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        self.space.slice(offset, size)
    }

    /// How much others wait for; `None` if nobody does. A writer that lends frees what it can
    /// ([`Writer::free_last`]) and then calls this again, which tells the service.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn reclaim(&mut self) -> Result<Option<u64>> {
        // Whatever has arrived is read with the answer.
        done(self.role.ask(&Request::Ping {}, ANSWER)?)?;
        Ok(self.role.line.reclaims.iter().map(|(_, bytes)| *bytes).max())
    }

    /// Unmaps the newest memory and gives it back to the service: bytes, 0 if there is none. Then
    /// tells the service that what it asked for was answered.
    ///
    /// # Errors
    ///
    /// Something was put, or the driver refuses to unmap.
    pub fn free_last(&mut self) -> Result<u64> {
        let freed = match (self.space.mappings.pop(), self.space.places.pop()) {
            (Some(mapping), Some((allocation, start))) => {
                mapping.unmap().map_err(|failed| failed.error)?;
                self.space.end = start;
                let known = self.space.places.len() as u64;
                self.role.persist(|role| match role.allocations {
                    // A front that was replaced in the middle may have carried it out.
                    left if left == known => Ok(()),
                    _ => done(role.line.ask(&Request::Free { allocations: vec![allocation.id] }, ANSWER)?),
                })?;
                self.role.allocations = known;
                allocation.size
            }
            _ => 0,
        };
        for (reclaim, _) in std::mem::take(&mut self.role.line.reclaims) {
            // It may be too late by now.
            match self.role.ask(&Request::Gave { reclaim }, ANSWER) {
                Ok(_) | Err(Error::Service(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(freed)
    }

    /// Publishes what was put, and goes on as its reader.
    ///
    /// # Errors
    ///
    /// The service refuses or cannot be reached; then nothing is published, and the domain serves
    /// what it served before.
    pub fn commit(mut self) -> Result<Reader> {
        let entries = &self.entries;
        // A front that was replaced in the middle may have carried it out.
        self.role.persist(|role| if role.writes { publish(role, entries) } else { Ok(()) })?;
        let Writer { role, space, entries, .. } = self;
        Ok(Reader { role, space, entries, awake: true })
    }
}

/// Puts all entries, and commits.
fn publish(role: &mut Role, entries: &BTreeMap<String, Entry>) -> Result<()> {
    let mut part = Vec::new();
    let mut bytes = 0;
    let mut rest = entries.iter().peekable();
    while let Some((key, entry)) = rest.next() {
        bytes += key.len() + entry.value.len() + 64;
        part.push((key.clone(), entry.clone()));
        if bytes > protocol::FRAME_MAX / 4 || rest.peek().is_none() {
            bytes = 0;
            done(role.line.ask(&Request::Put { entries: std::mem::take(&mut part) }, ANSWER)?)?;
        }
    }
    match role.line.ask(&Request::Commit {}, ANSWER)? {
        Answer::Committed { version, hash } => {
            (role.version, role.hash, role.writes) = (version, hash, false);
            Ok(())
        }
        other => Err(strange(&other)),
    }
}

/// Reads a committed layout.
#[derive(Debug)]
pub struct Reader {
    role: Role,
    space: Space,
    entries: BTreeMap<String, Entry>,
    awake: bool,
}

impl Reader {
    /// The domain.
    pub fn domain(&self) -> &DomainName {
        &self.role.domain
    }

    /// The version that is mapped.
    pub fn version(&self) -> u64 {
        self.role.version
    }

    /// The first address of the memory, which stays the same while it sleeps.
    pub fn address(&self) -> u64 {
        self.space.reservation.address()
    }

    /// Bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.space.end
    }

    /// The allocations, in their order.
    pub fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.space.places.iter().map(|(allocation, _)| allocation)
    }

    /// What the writer put, by key.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The memory of a key.
    ///
    /// # Errors
    ///
    /// [`Error::NoKey`]; [`Error::Asleep`].
    pub fn get(&self, key: &str) -> Result<Slice<'_>> {
        let Some(entry) = self.entries.get(key) else {
            return Err(Error::NoKey { domain: self.role.domain.clone(), key: key.into() });
        };
        if !self.awake {
            return Err(Error::Asleep(self.role.domain.clone()));
        }
        let offset = self.space.offset_of(entry).ok_or_else(|| Error::Asleep(self.role.domain.clone()))?;
        self.space.slice(offset, entry.size)
    }

    /// Waits until a newer version is committed. This reader keeps the one that it has: open the
    /// domain again for the new one.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`].
    pub fn wait_for_newer(&mut self, wait: Duration) -> Result<u64> {
        let request = Request::Wait { newer_than: self.role.version, domain: None, wait_ms: milliseconds(wait) };
        match self.role.ask(&request, wait)? {
            Answer::Version { version, .. } => Ok(version),
            other => Err(strange(&other)),
        }
    }

    /// Unmaps the memory and gives the import back; the addresses and the role stay. Refused if the
    /// owner of the memory does not answer: if everybody sleeps then, the memory is lost.
    ///
    /// # Errors
    ///
    /// The service cannot be reached, or the driver refuses to unmap: then it is awake.
    pub fn sleep(&mut self) -> Result<()> {
        if !self.awake {
            return Ok(());
        }
        done(self.role.ask(&Request::Ping {}, ANSWER)?)?;
        while let Some(mapping) = self.space.mappings.pop() {
            if let Err(failed) = mapping.unmap() {
                let error = failed.error;
                self.space.mappings.push(failed.object);
                self.map_all()?;
                return Err(error.into());
            }
        }
        self.awake = false;
        Ok(())
    }

    /// Maps the memory again at the same addresses.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if something else is served by now; the service or the driver refuses: then
    /// it is asleep.
    pub fn wake(&mut self) -> Result<()> {
        if self.awake {
            return Ok(());
        }
        let (before, hash) = (self.role.version, self.role.hash.clone());
        done(self.role.ask(&Request::Ping {}, ANSWER)?)?;
        if self.role.hash != hash {
            let allocations = self.role.all_allocations()?;
            let sizes = |all: &mut dyn Iterator<Item = &Allocation>| all.map(|it| it.size).sum::<u64>();
            let (was, is) = (sizes(&mut self.allocations()), sizes(&mut allocations.iter()));
            let difference = if was != is {
                format!("{was} bytes then, {is} bytes now")
            } else {
                "keys or places differ".to_owned()
            };
            return Err(Error::Stale { domain: self.role.domain.clone(), before, now: self.role.version, difference });
        }
        self.map_all()?;
        self.awake = true;
        Ok(())
    }

    /// Maps what is not mapped, or nothing.
    fn map_all(&mut self) -> Result<()> {
        let mapped = self.space.mappings.len();
        let missing: Vec<(Allocation, u64)> = self.space.places[mapped..].to_vec();
        let ids: Vec<u64> = missing.iter().map(|(allocation, _)| allocation.id).collect();
        if ids.is_empty() {
            return Ok(());
        }
        for ((_, start), share) in missing.iter().zip(self.role.shares(&ids)?) {
            match self.space.map(*start, &share) {
                Ok(mapping) => self.space.mappings.push(mapping),
                Err(error) => {
                    self.space.mappings.truncate(mapped);
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// What one gets who writes or reads.
#[derive(Debug)]
pub enum Opened {
    /// Nothing was committed, and nobody wrote.
    Writer(Writer),
    /// Something is committed.
    Reader(Reader),
}

/// A memory service.
///
/// Holds no connection by itself: each role has one of its own.
#[derive(Debug, Clone)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// The service at a socket.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into() }
    }

    /// Reads what a domain has committed; waits for it.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`], [`Code::Dirty`], [`Code::OtherDevice`] and others of the service.
    pub fn read(&self, device: &Device, domain: &DomainName, options: &OpenOptions) -> Result<Reader> {
        reader(Role::open(&self.path, device, domain, Mode::Read, options)?, device)
    }

    /// Writes a new layout in new memory of at most `capacity` bytes. With [`Mode::Discard`] what
    /// is committed is given up first; with [`Mode::Update`] it is changed in place.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`] and others of the service.
    pub fn write(
        &self,
        device: &Device,
        domain: &DomainName,
        mode: Mode,
        capacity: u64,
        options: &OpenOptions,
    ) -> Result<Writer> {
        let mode = if mode == Mode::Read { Mode::Write } else { mode };
        writer(Role::open(&self.path, device, domain, mode, options)?, device, capacity, options)
    }

    /// Writes if nothing is committed and nobody writes; otherwise waits, and reads.
    ///
    /// # Errors
    ///
    /// Those of [`Client::read`] and [`Client::write`].
    pub fn write_or_read(
        &self,
        device: &Device,
        domain: &DomainName,
        capacity: u64,
        options: &OpenOptions,
    ) -> Result<Opened> {
        let role = Role::open(&self.path, device, domain, Mode::WriteOrRead, options)?;
        if role.writes {
            writer(role, device, capacity, options).map(Opened::Writer)
        } else {
            reader(role, device).map(Opened::Reader)
        }
    }

    /// What the service holds, and for whom. Needs no driver.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn status(&self) -> Result<Status> {
        match self.line()?.ask(&Request::Status {}, ANSWER)? {
            Answer::Status(status) => Ok(status),
            other => Err(strange(&other)),
        }
    }

    /// Events with a greater number than `after`, the oldest first. Needs no driver.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn events(&self, after: u64) -> Result<Vec<Event>> {
        match self.line()?.ask(&Request::Events { after }, ANSWER)? {
            Answer::Events { events } => Ok(events),
            other => Err(strange(&other)),
        }
    }

    /// Removes what a domain has committed.
    ///
    /// # Errors
    ///
    /// [`Code::Busy`] while somebody uses it.
    pub fn remove(&self, domain: &DomainName) -> Result<()> {
        done(self.line()?.ask(&Request::Remove { domain: domain.clone() }, ANSWER)?)
    }

    /// A connection without a role. The number of the process counts for imports only.
    fn line(&self) -> Result<Line> {
        Line::connect(&self.path, std::process::id() as i32, &OpenOptions::default().program)
    }
}

fn writer(role: Role, device: &Device, capacity: u64, options: &OpenOptions) -> Result<Writer> {
    let in_place = role.writes && role.version != 0;
    if !in_place {
        let space = Space::new(device, capacity.next_multiple_of(options.page.bytes()))?;
        let (entries, options) = (BTreeMap::new(), options.clone());
        return Ok(Writer { role, space, entries, used: 0, options, in_place });
    }
    let mut reader = reader(role, device)?;
    // From the first write on the domain is dirty, and nobody knows better when that is than here.
    done(reader.role.ask(&Request::Begin {}, ANSWER)?)?;
    let used = reader.space.end;
    Ok(Writer {
        role: reader.role,
        space: reader.space,
        entries: reader.entries,
        used,
        options: options.clone(),
        in_place,
    })
}

fn reader(mut role: Role, device: &Device) -> Result<Reader> {
    let allocations = role.all_allocations()?;
    let entries = role.all_entries()?;
    let mut space = Space::new(device, role.bytes)?;
    let ids: Vec<u64> = allocations.iter().map(|allocation| allocation.id).collect();
    let shares = role.shares(&ids)?;
    for (allocation, share) in allocations.iter().zip(&shares) {
        space.add(allocation, share)?;
    }
    Ok(Reader { role, space, entries, awake: true })
}
