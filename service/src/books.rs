//! The books of the service: who has which role in which domain, and which memory is whose.
//!
//! This module does nothing itself. It is told what happened ([`Books::request`],
//! [`Books::disconnect`], [`Books::kept`], [`Books::tick`]) and returns [`Effect`]s, which the
//! front carries out in their order. So it can be tested without sockets, processes and time.
//!
//! The connection is the lock: a role lasts as long as the connection that has it. A domain is
//! *empty* until a writer commits, and then *committed*; while a writer changes it in place it is
//! *dirty*, and stays so if that writer dies.

mod recover;
mod status;
#[cfg(test)]
mod tests;

use crate::journal::{Record, RoleRecord, Token};
use crate::layout::{ALLOCATIONS_MAX, Allocation, Entry, Layout, PageSize, TAG_MAX};
use crate::name::DomainName;
use crate::policy::{Peer, Policy};
use crate::protocol::{Answer, Code, Event, Mode, PAGE_MAX, Request, ServiceError, Share, VERSION};
use ascend_vmm::Bytes;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A connection, or a role whose connection ended with an earlier front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClientId(pub(crate) u64);

/// What the front has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Write this down, before anything else.
    Record(Record),
    /// Send this.
    Answer(ClientId, Answer),
    /// Send this, then end the connection.
    End(ClientId, ServiceError),
    /// Ask the keeper. Its answer comes back with the number.
    Keep(u64, Order),
    /// Send the descriptors of the service to this client, and end.
    HandOver(ClientId),
}

/// What the keeper is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// Create and export memory.
    Create { id: u64, device: u32, size: u64, page: PageSize, everyone: bool },
    /// Release memory.
    Release { id: u64 },
    /// Let a process import.
    Trust { client: ClientId, process: i32, ids: Vec<u64> },
    /// How much memory is free.
    Memory { device: u32 },
}

/// What the keeper answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It is done.
    Done,
    /// The memory is there: the vendor's handle and the ticket.
    Created { handle: u64, ticket: Vec<u8> },
    /// Bytes of a device.
    Memory { free: u64, total: u64 },
    /// There is not enough memory.
    OutOfMemory { free: Option<u64>, text: String },
    /// It was refused.
    Refused { text: String },
}

/// An NPU that the keeper can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Npu {
    pub(crate) logical: u32,
    pub(crate) physical: u32,
    pub(crate) identity: String,
}

/// Memory that the keeper holds.
#[derive(Debug, Clone)]
struct Held {
    handle: u64,
    ticket: Rc<[u8]>,
    /// Of the device in the service's numbering.
    device: u32,
    size: u64,
    user: u32,
    domain: DomainName,
}

#[derive(Debug)]
struct Committed {
    layout: Rc<Layout>,
    hash: [u8; 16],
    version: u64,
    dirty: bool,
    time: u64,
}

#[derive(Debug, Default)]
struct Domain {
    /// Physical id of the NPU; the first writer says which.
    device: Option<u32>,
    committed: Option<Committed>,
    /// Versions that were replaced and are still read.
    older: BTreeMap<u64, Rc<Layout>>,
    writer: Option<ClientId>,
    readers: BTreeMap<ClientId, u64>,
    /// Clients whose open waits, oldest first.
    queue: VecDeque<ClientId>,
    /// Clients that wait for a newer version.
    watchers: Vec<ClientId>,
}

impl Domain {
    fn is_unused(&self) -> bool {
        self.committed.is_none()
            && self.older.is_empty()
            && self.writer.is_none()
            && self.readers.is_empty()
            && self.queue.is_empty()
            && self.watchers.is_empty()
    }

    /// The number of those who read a version.
    fn readers_of(&self, version: u64) -> usize {
        self.readers.values().filter(|&&of| of == version).count()
    }
}

/// What a client has in a domain.
#[derive(Debug)]
struct Role {
    token: Token,
    domain: DomainName,
    device: u32,
    mode: Mode,
    /// The version that is read or updated; 0 for a new layout.
    version: u64,
    layout: Rc<Layout>,
    allow_update: bool,
    lends: bool,
    /// A writer that may have written to committed memory.
    began: bool,
}

impl Role {
    fn writes(&self) -> bool {
        self.mode != Mode::Read
    }

    fn name(&self) -> &'static str {
        match self.mode {
            Mode::Read => "reader",
            Mode::Update => "updater",
            _ => "writer",
        }
    }
}

/// What a client waits for.
#[derive(Debug)]
enum Wait {
    Role { domain: DomainName, mode: Mode, device: u32, allow_update: bool, lends: bool },
    Memory { size: u64, page: PageSize, tag: String, tried: bool },
    Version { domain: DomainName, newer_than: u64 },
    Keeper,
}

#[derive(Debug)]
struct Client {
    peer: Peer,
    process: i32,
    program: String,
    /// False for the role of a connection that ended with an earlier front.
    connected: bool,
    role: Option<Role>,
    wait: Option<(Wait, Option<Instant>)>,
    /// Reclaims that it has not answered, with their deadlines.
    asked: BTreeMap<u64, Instant>,
    since: Instant,
}

/// Why the keeper was asked.
#[derive(Debug)]
enum Pending {
    Create { client: ClientId, allocation: Allocation, user: u32, domain: DomainName, device: u32 },
    Trust { client: ClientId, ids: Vec<u64> },
    Memory { device: u32 },
    Release,
}

#[derive(Debug, Clone, Copy, Default)]
struct DeviceMemory {
    total: u64,
    free: u64,
    held: u64,
}

/// The state of the service.
#[derive(Debug)]
pub(crate) struct Books {
    policy: Policy,
    npus: Vec<Npu>,
    memory: HashMap<u32, DeviceMemory>,
    /// Bytes that count for each quota of the policy.
    used: Vec<u64>,
    domains: HashMap<DomainName, Domain>,
    clients: HashMap<ClientId, Client>,
    held: HashMap<u64, Held>,
    pending: HashMap<u64, Pending>,
    /// Clients that wait for memory, oldest first, by device.
    hungry: HashMap<u32, VecDeque<ClientId>>,
    events: VecDeque<Event>,
    last_event: u64,
    last_id: u64,
    last_version: u64,
    last_order: u64,
    last_reclaim: u64,
    instance: u64,
    retry: Option<Instant>,
    effects: Vec<Effect>,
    /// For tokens; a test gives its own.
    random: fn() -> Token,
    keeper: i32,
    front: i32,
}

/// Events that are kept.
const EVENTS: usize = 1024;
/// Most bytes of an allocation: more than any machine has, and far from where sums overflow.
const ALLOCATION_MAX: u64 = 1 << 46;
/// How often memory is asked for again.
const RETRY: Duration = Duration::from_millis(500);

fn error(code: Code, problem: impl Into<String>, remedy: impl Into<String>) -> ServiceError {
    ServiceError { code, problem: problem.into(), remedy: remedy.into() }
}

type Outcome = Result<Option<Answer>, ServiceError>;

impl Books {
    /// An empty service.
    pub(crate) fn new(policy: Policy, npus: Vec<Npu>, keeper: i32, front: i32, random: fn() -> Token) -> Books {
        let used = vec![0; policy.quotas.len()];
        Books {
            policy,
            npus,
            memory: HashMap::new(),
            used,
            domains: HashMap::new(),
            clients: HashMap::new(),
            held: HashMap::new(),
            pending: HashMap::new(),
            hungry: HashMap::new(),
            events: VecDeque::new(),
            last_event: 0,
            last_id: 0,
            last_version: 0,
            last_order: 0,
            last_reclaim: 0,
            instance: u64::from_le_bytes(*random().first_chunk().unwrap_or(&[0; 8])),
            retry: None,
            effects: Vec::new(),
            random,
            keeper,
            front,
        }
    }

    /// A client has connected.
    pub(crate) fn connect(&mut self, id: ClientId, peer: Peer, now: Instant) {
        self.clients.insert(
            id,
            Client {
                peer,
                process: 0,
                program: String::new(),
                connected: true,
                role: None,
                wait: None,
                asked: BTreeMap::new(),
                since: now,
            },
        );
    }

    /// True if the client's last request was answered, so that its next one may be given.
    pub(crate) fn is_ready(&self, id: ClientId) -> bool {
        self.clients.get(&id).is_some_and(|client| client.wait.is_none())
    }

    /// A request has arrived.
    pub(crate) fn request(&mut self, id: ClientId, request: Request, now: Instant) -> Vec<Effect> {
        match self.answer(id, request, now) {
            Ok(Some(answer)) => self.effects.push(Effect::Answer(id, answer)),
            Ok(None) => {}
            Err(error) if error.code == Code::Protocol => self.effects.push(Effect::End(id, error)),
            Err(error) => self.effects.push(Effect::Answer(id, Answer::Error(error))),
        }
        std::mem::take(&mut self.effects)
    }

    fn answer(&mut self, id: ClientId, request: Request, now: Instant) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        if client.process == 0 && !matches!(request, Request::Hello { .. }) {
            return Err(error(Code::Protocol, "the first message is not hello", "say hello first"));
        }
        match request {
            Request::Hello { version, process, program } => self.hello(id, version, process, program),
            Request::Open { domain, mode, device, wait_ms, allow_update, lends } => {
                self.open(id, Wait::Role { domain, mode, device, allow_update, lends }, wait_ms, now)
            }
            Request::Resume { token } => self.resume(id, &token),
            Request::Allocate { size, page, tag, wait_ms } => self.allocate(id, size, page, tag, wait_ms, now),
            Request::Free { allocations } => self.free(id, &allocations),
            Request::Put { entries } => {
                let role = writer(client)?;
                let put = Rc::make_mut(&mut role.layout).put(entries);
                put.map_err(|bad| error(Code::Invalid, bad.to_string(), "nothing of this request was put"))?;
                Ok(Some(Answer::Done {}))
            }
            Request::Begin {} => self.begin(id),
            Request::Commit {} => self.commit(id),
            Request::Allocations { from } => {
                let layout = &any_role(client)?.layout;
                let from = usize::try_from(from).unwrap_or(usize::MAX).min(layout.allocations.len());
                let page = layout.allocations[from..].iter().take(PAGE_MAX).cloned().collect();
                Ok(Some(Answer::Allocations { allocations: page }))
            }
            Request::Entries { after } => {
                Ok(Some(Answer::Entries { entries: page_of(&any_role(client)?.layout, after) }))
            }
            Request::Shares { allocations } => self.shares(id, allocations),
            Request::Wait { newer_than, domain, wait_ms } => self.wait(id, newer_than, domain, wait_ms, now),
            Request::Gave { reclaim } => {
                if client.asked.remove(&reclaim).is_none() {
                    return Err(error(Code::Invalid, "reclaim: nobody waits for this number", "it may be too late"));
                }
                Ok(Some(Answer::Done {}))
            }
            Request::Remove { domain } => self.remove(id, &domain),
            Request::Ping {} => Ok(Some(Answer::Done {})),
            Request::Status {} => Ok(Some(Answer::Status(self.status(now)))),
            Request::Events { after } => {
                let events = self.events.iter().filter(|event| event.number > after).take(PAGE_MAX).cloned().collect();
                Ok(Some(Answer::Events { events }))
            }
            Request::Replace {} => {
                if client.peer.user != 0 && client.peer.user != nix::unistd::getuid().as_raw() {
                    let problem = format!("user {} may not replace the service", client.peer.user);
                    return Err(error(Code::Forbidden, problem, "its own user and root may"));
                }
                self.effects.push(Effect::HandOver(id));
                Ok(None)
            }
        }
    }

    fn hello(&mut self, id: ClientId, version: u32, process: i32, program: String) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        if client.process != 0 {
            return Err(error(Code::Protocol, "a second hello", "one is enough"));
        }
        if version != VERSION {
            let problem = format!("protocol version {version} is not known");
            return Err(error(Code::Protocol, problem, format!("this service speaks version {VERSION}")));
        }
        if process <= 0 || program.len() > 256 {
            return Err(error(Code::Protocol, "hello: process is positive, program has at most 256 bytes", "mend it"));
        }
        if client.peer.pid != process && !self.policy.believe_processes {
            let problem = match client.peer.pid {
                0 => format!("process {process} lives in a pid namespace that the service cannot see"),
                pid => format!("process {pid} says that the driver knows it as {process}"),
            };
            let remedy = "run both outside of pid namespaces, or set processes = \"claimed\" in the configuration";
            return Err(error(Code::Protocol, problem, remedy));
        }
        client.process = process;
        client.program = program.chars().filter(|c| !c.is_control()).collect();
        Ok(Some(Answer::Hello { version: VERSION, instance: self.instance }))
    }

    fn open(&mut self, id: ClientId, wait: Wait, wait_ms: u64, now: Instant) -> Outcome {
        let Wait::Role { domain: name, mode, device, allow_update, lends } = wait else { return Ok(None) };
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        if client.role.is_some() {
            return Err(error(Code::Protocol, "open: this connection has a role already", "use another connection"));
        }
        let mut mode = mode;
        match self.policy.check(&client.peer, &name, mode != Mode::Read) {
            Ok(()) => {}
            Err(_) if mode == Mode::WriteOrRead => {
                self.policy.check(&client.peer, &name, false)?;
                mode = Mode::Read;
            }
            Err(forbidden) => return Err(forbidden),
        }
        if !self.npus.iter().any(|npu| npu.physical == device) {
            let known: Vec<_> = self.npus.iter().map(|npu| npu.physical.to_string()).collect();
            let remedy = format!("this service has the NPUs with the physical ids {}", known.join(", "));
            return Err(error(Code::OtherDevice, format!("device: there is no NPU {device} here"), remedy));
        }
        let domain = self.domains.entry(name.clone()).or_default();
        let other = domain.device.filter(|&of| of != device && !domain.is_unused());
        if let Some(other) = other {
            let problem = format!("{name} is on NPU {other} (physical id), and this process uses NPU {device}");
            return Err(error(Code::OtherDevice, problem, "use that NPU, or another domain for this one"));
        }
        domain.queue.push_back(id);
        let deadline = now.checked_add(Duration::from_millis(wait_ms));
        client.wait = Some((Wait::Role { domain: name.clone(), mode, device, allow_update, lends }, deadline));
        self.admit(&name);
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        if client.wait.is_none() {
            return Ok(None);
        }
        let reason = self.obstacle(&name, mode);
        if wait_ms == 0 {
            return Err(self.give_up(id, now).unwrap_or_else(|| error(Code::Timeout, reason, "wait for it")));
        }
        Ok(Some(Answer::Waiting { reason }))
    }

    /// Why a role in a domain is not given now.
    fn obstacle(&self, name: &DomainName, mode: Mode) -> String {
        let Some(domain) = self.domains.get(name) else { return format!("{name} is empty") };
        let readers = domain.readers.len();
        match (mode, domain.writer.and_then(|id| self.clients.get(&id))) {
            (_, Some(writer)) => format!("process {} ({}) writes {name}", writer.process, writer.program),
            (Mode::Read | Mode::WriteOrRead, None) if domain.committed.is_none() => {
                format!("nothing is committed in {name}")
            }
            (Mode::Read | Mode::WriteOrRead, None) => format!("a writer waits for {name}"),
            (_, None) => format!("{readers} processes read {name}"),
        }
    }

    /// Gives roles to those who wait for a domain, as far as that is possible now.
    fn admit(&mut self, name: &DomainName) {
        let Some(domain) = self.domains.get(name) else { return };
        let mut writer_waits = false;
        for id in domain.queue.clone() {
            let Some(domain) = self.domains.get(name) else { return };
            let Some(client) = self.clients.get(&id) else { continue };
            let Some((Wait::Role { mode, .. }, _)) = client.wait else { continue };
            let committed = domain.committed.as_ref();
            let dirty = committed.is_some_and(|committed| committed.dirty);
            let free = domain.writer.is_none();
            let granted = match mode {
                Mode::Read | Mode::WriteOrRead if committed.is_some() && !dirty => {
                    (!writer_waits).then_some(Ok(Mode::Read))
                }
                Mode::Read if dirty && free => Some(Err(error(
                    Code::Dirty,
                    format!("a writer of {name} ended while it changed the memory in place"),
                    "its contents are not whole: write the domain again",
                ))),
                Mode::Read => None,
                Mode::WriteOrRead | Mode::Write => free.then_some(Ok(Mode::Write)),
                Mode::Update if committed.is_none() && free => Some(Err(error(
                    Code::Empty,
                    format!("nothing is committed in {name}"),
                    "only what is committed can be updated: open it to write",
                ))),
                Mode::Update => {
                    let asleep = domain.readers.keys().all(|reader| {
                        self.clients.get(reader).and_then(|it| it.role.as_ref()).is_some_and(|role| role.allow_update)
                    });
                    (free && asleep).then_some(Ok(Mode::Update))
                }
                Mode::Discard => (free && domain.readers.is_empty()).then_some(Ok(Mode::Discard)),
            };
            match granted {
                None => writer_waits |= matches!(mode, Mode::Discard | Mode::Update),
                Some(granted) => {
                    self.leave_queue(id, name);
                    match granted {
                        Ok(mode) => self.give_role(id, name, mode),
                        Err(refused) => {
                            self.unwait(id);
                            self.effects.push(Effect::Answer(id, Answer::Error(refused)));
                        }
                    }
                }
            }
        }
        self.forget_if_unused(name);
    }

    fn leave_queue(&mut self, id: ClientId, name: &DomainName) {
        if let Some(domain) = self.domains.get_mut(name) {
            domain.queue.retain(|&waiting| waiting != id);
        }
    }

    fn unwait(&mut self, id: ClientId) -> Option<Wait> {
        self.clients.get_mut(&id)?.wait.take().map(|(wait, _)| wait)
    }

    fn forget_if_unused(&mut self, name: &DomainName) {
        if self.domains.get(name).is_some_and(Domain::is_unused) {
            self.domains.remove(name);
        }
    }

    fn give_role(&mut self, id: ClientId, name: &DomainName, mode: Mode) {
        let Some(Wait::Role { device, allow_update, lends, .. }) = self.unwait(id) else { return };
        if mode == Mode::Discard {
            let version = self.domains.get(name).and_then(|it| it.committed.as_ref()).map(|it| it.version);
            if let Some(version) = version {
                self.drop_version(name, version);
                self.event(Some(name), format!("version {version} was discarded by its next writer"));
            }
        }
        let token = (self.random)();
        let Some(domain) = self.domains.get_mut(name) else { return };
        domain.device = Some(device);
        let committed = domain.committed.as_ref().filter(|_| matches!(mode, Mode::Read | Mode::Update));
        let version = committed.map_or(0, |committed| committed.version);
        let layout = committed.map_or_else(Rc::default, |committed| committed.layout.clone());
        if mode == Mode::Read {
            domain.readers.insert(id, version);
        } else {
            domain.writer = Some(id);
        }
        let role =
            Role { token, domain: name.clone(), device, mode, version, layout, allow_update, lends, began: false };
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.role = Some(role);
        let text = match mode {
            Mode::Read => format!("process {} ({}) reads version {version}", client.process, client.program),
            _ => format!("process {} ({}) writes, mode {}", client.process, client.program, mode.name()),
        };
        self.record_role(id);
        self.event(Some(name), text);
        self.answer_opened(id);
    }

    fn record_role(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let Some(role) = &client.role else { return };
        self.effects.push(Effect::Record(Record::Role(RoleRecord {
            token: role.token,
            domain: role.domain.clone(),
            device: role.device,
            mode: role.mode,
            version: role.version,
            allow_update: role.allow_update,
            lends: role.lends,
            began: role.began,
            process: client.process,
            user: client.peer.user,
        })));
    }

    fn answer_opened(&mut self, id: ClientId) {
        let Some(role) = self.clients.get(&id).and_then(|client| client.role.as_ref()) else { return };
        let hash = if role.version == 0 { [0; 16] } else { role.layout.hash() };
        let answer = Answer::Opened {
            writes: role.writes(),
            version: role.version,
            hash: hash.to_vec(),
            allocations: role.layout.allocations.len() as u64,
            entries: role.layout.entries.len() as u64,
            bytes: role.layout.bytes(),
            token: role.token.to_vec(),
        };
        self.effects.push(Effect::Answer(id, answer));
    }

    fn resume(&mut self, id: ClientId, token: &[u8]) -> Outcome {
        let Some(client) = self.clients.get(&id) else { return Ok(None) };
        if client.role.is_some() {
            return Err(error(Code::Protocol, "resume: this connection has a role already", "use another connection"));
        }
        let same = |other: &Client| {
            other.role.as_ref().is_some_and(|role| role.token == token)
                && (other.process, other.peer.user) == (client.process, client.peer.user)
                && !other.connected
        };
        let Some(earlier) = self.clients.iter().find(|(_, other)| same(other)).map(|(id, _)| *id) else {
            return Err(error(
                Code::Unknown,
                "resume: the service does not know this role",
                "its owner was started anew, or it took too long: open the domain again",
            ));
        };
        let role = self.clients.remove(&earlier).and_then(|client| client.role);
        if let (Some(role), Some(client)) = (role, self.clients.get_mut(&id)) {
            if let Some(domain) = self.domains.get_mut(&role.domain) {
                if let Some(version) = domain.readers.remove(&earlier) {
                    domain.readers.insert(id, version);
                }
                domain.writer = domain.writer.map(|writer| if writer == earlier { id } else { writer });
            }
            client.role = Some(role);
        }
        self.answer_opened(id);
        Ok(None)
    }

    fn allocate(
        &mut self,
        id: ClientId,
        size: u64,
        page: PageSize,
        tag: String,
        wait_ms: u64,
        now: Instant,
    ) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let role = writer(client)?;
        if role.mode == Mode::Update {
            let remedy = "open it with mode write for memory of another shape";
            return Err(error(Code::Invalid, "allocate: a writer in place has the memory that there is", remedy));
        }
        if size > ALLOCATION_MAX {
            let remedy = "no NPU has that much memory";
            return Err(error(Code::Invalid, format!("size: {size} bytes in one allocation"), remedy));
        }
        if size == 0 || size % page.bytes() != 0 {
            let remedy = format!("use a multiple of {}", Bytes(page.bytes()));
            return Err(error(Code::Invalid, format!("size: {size} bytes are not whole pages"), remedy));
        }
        if tag.len() > TAG_MAX {
            return Err(error(Code::Invalid, format!("tag: {} bytes", tag.len()), format!("at most {TAG_MAX}")));
        }
        if role.layout.allocations.len() >= ALLOCATIONS_MAX {
            let remedy = "use fewer and larger ones";
            return Err(error(Code::Invalid, format!("a layout has at most {ALLOCATIONS_MAX} allocations"), remedy));
        }
        let device = role.device;
        client.wait = Some((
            Wait::Memory { size, page, tag, tried: false },
            (wait_ms > 0).then(|| now.checked_add(Duration::from_millis(wait_ms))).flatten(),
        ));
        let queue = self.hungry.entry(device).or_default();
        if queue.is_empty() {
            return self.create(id);
        }
        // Whoever waits is served before.
        if wait_ms == 0 {
            self.unwait(id);
            let problem = "other writers wait for memory of this NPU";
            return Err(error(Code::OutOfMemory, problem, "wait for it, or free memory"));
        }
        queue.push_back(id);
        Ok(Some(Answer::Waiting { reason: "other writers wait for memory of this NPU".into() }))
    }

    /// Asks the keeper for what a client waits for.
    fn create(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get(&id) else { return Ok(None) };
        let (Some((Wait::Memory { size, page, tag, .. }, _)), Some(role)) = (&client.wait, &client.role) else {
            return Ok(None);
        };
        let (size, page, user, domain, device) = (*size, *page, client.peer.user, role.domain.clone(), role.device);
        for (quota, used) in self.policy.quotas.iter().zip(&self.used) {
            if quota.counts(user, &domain) && size > quota.bytes.saturating_sub(*used) {
                let problem = format!(
                    "{} more would exceed {}: {} of {} are used",
                    Bytes(size),
                    quota.describe(),
                    Bytes(*used),
                    Bytes(quota.bytes)
                );
                self.unwait(id);
                return Err(error(Code::Quota, problem, "free memory, or ask the administrator"));
            }
        }
        let Some(logical) = self.npus.iter().find(|npu| npu.physical == device).map(|npu| npu.logical) else {
            return Ok(None);
        };
        self.last_id += 1;
        let allocation = Allocation { id: self.last_id, size, page, tag: tag.clone() };
        self.charge(user, &domain, device, size);
        let everyone = self.policy.trust_everyone;
        let order = Order::Create { id: allocation.id, device: logical, size, page, everyone };
        self.order(order, Pending::Create { client: id, allocation, user, domain, device });
        Ok(None)
    }

    fn order(&mut self, order: Order, pending: Pending) {
        self.last_order += 1;
        self.pending.insert(self.last_order, pending);
        self.effects.push(Effect::Keep(self.last_order, order));
    }

    fn charge(&mut self, user: u32, domain: &DomainName, device: u32, size: u64) {
        for (quota, used) in self.policy.quotas.iter().zip(&mut self.used) {
            if quota.counts(user, domain) {
                *used += size;
            }
        }
        self.memory.entry(device).or_default().held += size;
    }

    fn refund(&mut self, user: u32, domain: &DomainName, device: u32, size: u64) {
        for (quota, used) in self.policy.quotas.iter().zip(&mut self.used) {
            if quota.counts(user, domain) {
                *used = used.saturating_sub(size);
            }
        }
        let held = &mut self.memory.entry(device).or_default().held;
        *held = held.saturating_sub(size);
    }

    /// The keeper has answered.
    pub(crate) fn kept(&mut self, number: u64, kept: Kept, now: Instant) -> Vec<Effect> {
        match (self.pending.remove(&number), kept) {
            (Some(Pending::Create { client, allocation, user, domain, device }), kept) => {
                self.created(client, allocation, user, domain, device, kept, now);
            }
            (Some(Pending::Trust { client, ids }), kept) => self.trusted(client, &ids, kept),
            (Some(Pending::Memory { device }), Kept::Memory { free, total }) => {
                let memory = self.memory.entry(device).or_default();
                (memory.free, memory.total) = (free, total);
            }
            (Some(Pending::Release), Kept::Refused { text }) => {
                self.event(None, format!("memory could not be released: {text}"));
            }
            (Some(Pending::Release), _) => self.feed_all(now),
            _ => {}
        }
        std::mem::take(&mut self.effects)
    }

    fn trusted(&mut self, client: ClientId, ids: &[u64], kept: Kept) {
        if self.unwait(client).is_none() {
            return;
        }
        let answer = match kept {
            Kept::Refused { text } | Kept::OutOfMemory { text, .. } => {
                let remedy = "the process cannot import; open the domain again in a new process";
                Answer::Error(error(Code::Driver, text, remedy))
            }
            Kept::Done | Kept::Created { .. } | Kept::Memory { .. } => self.share_list(ids),
        };
        self.effects.push(Effect::Answer(client, answer));
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one pending order")]
    fn created(
        &mut self,
        id: ClientId,
        allocation: Allocation,
        user: u32,
        domain: DomainName,
        device: u32,
        kept: Kept,
        now: Instant,
    ) {
        let queue = self.hungry.entry(device).or_default();
        let was_first = queue.front() == Some(&id);
        let waiting = self.clients.get(&id).is_some_and(|client| matches!(client.wait, Some((Wait::Memory { .. }, _))));
        let failure = match kept {
            Kept::Created { handle, ticket } => {
                if was_first {
                    queue.pop_front();
                }
                let held = Held { handle, ticket: ticket.into(), device, size: allocation.size, user, domain };
                self.held.insert(allocation.id, held);
                let role = self.clients.get_mut(&id).filter(|_| waiting).and_then(|client| client.role.as_mut());
                match role {
                    Some(role) => {
                        let token = role.token;
                        Rc::make_mut(&mut role.layout).allocations.push(allocation.clone());
                        self.unwait(id);
                        let record = Record::Allocated { token, allocation: allocation.clone(), user };
                        self.effects.push(Effect::Record(record));
                        self.effects.push(Effect::Answer(id, Answer::Allocated { allocation }));
                    }
                    // Its writer is gone.
                    None => self.release(allocation.id),
                }
                self.feed(device, now);
                return;
            }
            Kept::OutOfMemory { free, .. } => {
                if let Some(free) = free {
                    self.memory.entry(device).or_default().free = free;
                }
                None
            }
            Kept::Refused { text } => Some(error(Code::Driver, text, "the service's log has more")),
            Kept::Done | Kept::Memory { .. } => Some(error(Code::Driver, "the keeper did not create it", "try again")),
        };
        self.refund(user, &domain, device, allocation.size);
        if !waiting {
            return;
        }
        let no_limit =
            self.clients.get(&id).and_then(|client| client.wait.as_ref()).and_then(|(_, until)| *until).is_none();
        match failure {
            None if !no_limit => {
                if !was_first {
                    self.hungry.entry(device).or_default().push_back(id);
                }
                self.retry = Some(now + RETRY);
                let first_time = match self.clients.get_mut(&id).and_then(|client| client.wait.as_mut()) {
                    Some((Wait::Memory { tried, .. }, _)) => !std::mem::replace(tried, true),
                    _ => false,
                };
                if first_time {
                    let reason = self.shortage(&domain, device, allocation.size);
                    self.effects.push(Effect::Answer(id, Answer::Waiting { reason }));
                    self.reclaim(device, allocation.size, now);
                }
            }
            failure => {
                self.hungry.entry(device).or_default().retain(|&waiting| waiting != id);
                let problem = self.shortage(&domain, device, allocation.size);
                let remedy = "wait for it, free memory, or open the domain with mode discard";
                let failure = failure.unwrap_or_else(|| error(Code::OutOfMemory, problem, remedy));
                self.unwait(id);
                self.effects.push(Effect::Answer(id, Answer::Error(failure)));
                self.feed(device, now);
            }
        }
    }

    /// A sentence with the numbers.
    fn shortage(&self, name: &DomainName, device: u32, asked: u64) -> String {
        let memory = self.memory.get(&device).copied().unwrap_or_default();
        let committed = self.domains.get(name).and_then(|it| it.committed.as_ref()).map_or(0, |it| it.layout.bytes());
        let mut text = format!(
            "{} were asked for, {} are free on NPU {device}; the service holds {} there",
            Bytes(asked),
            Bytes(memory.free),
            Bytes(memory.held)
        );
        if committed > 0 {
            text += &format!(", {} of them are what {name} has committed", Bytes(committed));
        }
        text
    }

    /// Asks the keeper again for the one who has waited longest.
    fn feed(&mut self, device: u32, _now: Instant) {
        let in_flight = |pending: &Pending| matches!(pending, Pending::Create { device: of, .. } if *of == device);
        if self.pending.values().any(in_flight) {
            return;
        }
        while let Some(&first) = self.hungry.get(&device).and_then(VecDeque::front) {
            match self.create(first) {
                Ok(_) if self.pending.values().any(in_flight) => return,
                Ok(_) => {}
                Err(refused) => self.effects.push(Effect::Answer(first, Answer::Error(refused))),
            }
            self.hungry.entry(device).or_default().pop_front();
        }
    }

    fn feed_all(&mut self, now: Instant) {
        let devices: Vec<u32> = self.hungry.iter().filter(|(_, queue)| !queue.is_empty()).map(|(it, _)| *it).collect();
        for device in devices {
            self.feed(device, now);
        }
    }

    /// Asks those who lend to give memory back.
    fn reclaim(&mut self, device: u32, bytes: u64, now: Instant) {
        let free = self.memory.get(&device).map_or(0, |memory| memory.free);
        let missing = bytes.saturating_sub(free).max(1);
        self.last_reclaim += 1;
        let number = self.last_reclaim;
        for (id, client) in &mut self.clients {
            let lends = client.role.as_ref().is_some_and(|role| role.lends && role.writes() && role.device == device);
            if lends && client.connected && client.wait.is_none() {
                client.asked.insert(number, now + self.policy.reclaim);
                let within_ms = self.policy.reclaim.as_millis() as u64;
                let ask = Answer::Reclaim { reclaim: number, bytes: missing, within_ms };
                self.effects.push(Effect::Answer(*id, ask));
            }
        }
    }

    fn release(&mut self, id: u64) {
        if let Some(held) = self.held.remove(&id) {
            self.refund(held.user, &held.domain, held.device, held.size);
            self.order(Order::Release { id }, Pending::Release);
        }
    }

    fn free(&mut self, id: ClientId, ids: &[u64]) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let role = writer(client)?;
        if role.mode == Mode::Update || !role.layout.entries.is_empty() {
            let problem = "free: the layout has entries, or is changed in place";
            return Err(error(Code::Invalid, problem, "free memory before the first put"));
        }
        let known = |id: &u64| role.layout.allocations.binary_search_by_key(id, |it| it.id).is_ok();
        if let Some(unknown) = ids.iter().find(|id| !known(id)) {
            let problem = format!("allocations: {unknown} is not one of this writer");
            return Err(error(Code::Invalid, problem, "nothing of this request was freed"));
        }
        let layout = Rc::make_mut(&mut role.layout);
        let gone: std::collections::BTreeSet<_> = ids.iter().copied().collect();
        layout.allocations.retain(|allocation| !gone.contains(&allocation.id));
        for id in gone {
            self.effects.push(Effect::Record(Record::Freed { id }));
            self.release(id);
        }
        Ok(Some(Answer::Done {}))
    }

    fn begin(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = writer(client)?;
        if role.mode != Mode::Update {
            return Err(error(Code::Invalid, "begin: only a writer in place begins", "just write"));
        }
        if !std::mem::replace(&mut role.began, true) {
            let (name, version) = (role.domain.clone(), role.version);
            if let Some(committed) = self.domains.get_mut(&name).and_then(|domain| domain.committed.as_mut()) {
                committed.dirty = true;
            }
            self.effects.push(Effect::Record(Record::Dirty { domain: name.clone() }));
            self.event(Some(&name), format!("process {process} changes version {version} in place"));
        }
        Ok(Some(Answer::Done {}))
    }

    fn commit(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = writer(client)?;
        if role.layout.allocations.is_empty() {
            return Err(error(Code::Invalid, "commit: nothing was allocated", "allocate and write first"));
        }
        self.last_version += 1;
        let version = self.last_version;
        let (layout, token, name, device) = (role.layout.clone(), role.token, role.domain.clone(), role.device);
        let update = role.mode == Mode::Update;
        (role.mode, role.version, role.began) = (Mode::Read, version, false);
        let hash = layout.hash();
        let time = unix_time();
        let users = layout.allocations.iter().map(|it| self.held.get(&it.id).map_or(0, |held| held.user)).collect();
        self.effects.push(Effect::Record(Record::Committed {
            domain: name.clone(),
            writer: Some(token),
            version,
            device,
            layout: layout.clone(),
            users,
            time,
        }));
        let Some(domain) = self.domains.get_mut(&name) else { return Ok(None) };
        let before = domain.committed.replace(Committed { layout: layout.clone(), hash, version, dirty: false, time });
        domain.writer = None;
        domain.readers.insert(id, version);
        if let Some(before) = before {
            if update {
                // Those who stayed see the new contents, whether they look or not.
                let stayed: Vec<_> =
                    domain.readers.iter().filter(|(_, of)| **of == before.version).map(|(it, _)| *it).collect();
                for reader in stayed {
                    domain.readers.insert(reader, version);
                    if let Some(role) = self.clients.get_mut(&reader).and_then(|client| client.role.as_mut()) {
                        (role.version, role.layout) = (version, layout.clone());
                    }
                }
                let readers: Vec<_> = domain.readers.keys().copied().filter(|reader| *reader != id).collect();
                self.effects.push(Effect::Record(Record::Removed { domain: name.clone(), version: before.version }));
                readers.into_iter().for_each(|reader| self.record_role(reader));
            } else if domain.readers_of(before.version) > 0 {
                domain.older.insert(before.version, before.layout);
            } else {
                self.drop_layout(&name, before.version, &before.layout);
            }
        }
        self.event(
            Some(&name),
            format!("process {process} committed version {version}, {} in {}", Bytes(layout.bytes()), count(&layout)),
        );
        self.effects.push(Effect::Answer(id, Answer::Committed { version, hash: hash.to_vec() }));
        self.wake_watchers(&name);
        self.admit(&name);
        Ok(None)
    }

    fn wake_watchers(&mut self, name: &DomainName) {
        let Some(domain) = self.domains.get_mut(name) else { return };
        let Some(committed) = domain.committed.as_ref().filter(|it| !it.dirty) else { return };
        let (version, hash) = (committed.version, committed.hash.to_vec());
        for id in std::mem::take(&mut domain.watchers) {
            let newer = match self.clients.get(&id).and_then(|client| client.wait.as_ref()) {
                Some((Wait::Version { newer_than, .. }, _)) => version > *newer_than,
                _ => continue,
            };
            if newer {
                self.unwait(id);
                self.effects.push(Effect::Answer(id, Answer::Version { version, hash: hash.clone() }));
            } else if let Some(domain) = self.domains.get_mut(name) {
                domain.watchers.push(id);
            }
        }
    }

    /// Releases a version that nobody reads.
    fn drop_version(&mut self, name: &DomainName, version: u64) {
        let Some(domain) = self.domains.get_mut(name) else { return };
        let layout = match domain.older.remove(&version) {
            Some(layout) => layout,
            None => match domain.committed.take_if(|committed| committed.version == version) {
                Some(committed) => committed.layout,
                None => return,
            },
        };
        self.drop_layout(name, version, &layout);
    }

    fn drop_layout(&mut self, name: &DomainName, version: u64, layout: &Layout) {
        self.effects.push(Effect::Record(Record::Removed { domain: name.clone(), version }));
        layout.allocations.iter().for_each(|allocation| self.release(allocation.id));
    }

    fn shares(&mut self, id: ClientId, ids: Vec<u64>) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = any_role(client)?;
        if ids.is_empty() || ids.len() > PAGE_MAX {
            let problem = format!("allocations: {} at once", ids.len());
            return Err(error(Code::Invalid, problem, format!("ask for 1 to {PAGE_MAX}")));
        }
        let known = |id: &u64| role.layout.allocations.binary_search_by_key(id, |it| it.id).is_ok();
        if let Some(unknown) = ids.iter().find(|id| !known(id)) {
            let problem = format!("allocations: {unknown} is not in this layout");
            return Err(error(Code::Invalid, problem, "read the layout again"));
        }
        if self.policy.trust_everyone {
            return Ok(Some(self.share_list(&ids)));
        }
        client.wait = Some((Wait::Keeper, None));
        self.order(Order::Trust { client: id, process, ids: ids.clone() }, Pending::Trust { client: id, ids });
        Ok(None)
    }

    fn share_list(&self, ids: &[u64]) -> Answer {
        let share = |id: &u64| {
            let held = self.held.get(id)?;
            Some(Share { allocation: *id, handle: held.handle, ticket: held.ticket.to_vec() })
        };
        Answer::Shares { shares: ids.iter().filter_map(share).collect() }
    }

    fn wait(
        &mut self,
        id: ClientId,
        newer_than: u64,
        domain: Option<DomainName>,
        wait_ms: u64,
        now: Instant,
    ) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let Some(name) = domain.or_else(|| client.role.as_ref().map(|role| role.domain.clone())) else {
            return Err(error(Code::Invalid, "domain: this connection has none", "say which"));
        };
        self.policy.check(&client.peer, &name, false)?;
        let committed = self.domains.get(&name).and_then(|domain| domain.committed.as_ref());
        if let Some(it) = committed.filter(|it| it.version > newer_than && !it.dirty) {
            return Ok(Some(Answer::Version { version: it.version, hash: it.hash.to_vec() }));
        }
        let reason = format!("nothing newer than version {newer_than} is committed in {name}");
        if wait_ms == 0 {
            return Err(error(Code::Timeout, reason, "wait for it"));
        }
        self.domains.entry(name.clone()).or_default().watchers.push(id);
        let deadline = now.checked_add(Duration::from_millis(wait_ms));
        client.wait = Some((Wait::Version { domain: name, newer_than }, deadline));
        Ok(Some(Answer::Waiting { reason }))
    }

    fn remove(&mut self, id: ClientId, name: &DomainName) -> Outcome {
        let Some(client) = self.clients.get(&id) else { return Ok(None) };
        let process = client.process;
        self.policy.check(&client.peer, name, true)?;
        let Some(domain) = self.domains.get(name) else {
            return Err(error(Code::Empty, format!("there is no domain {name}"), "`status` lists them"));
        };
        let Some(version) = domain.committed.as_ref().map(|committed| committed.version) else {
            return Err(error(Code::Empty, format!("nothing is committed in {name}"), "its writer can just close it"));
        };
        if domain.writer.is_some() || !domain.readers.is_empty() {
            let problem = format!("{name} is used: {}", self.obstacle(name, Mode::Discard));
            return Err(error(Code::Busy, problem, "end these processes first"));
        }
        self.drop_version(name, version);
        self.event(Some(name), format!("process {process} removed version {version}"));
        self.admit(name);
        self.forget_if_unused(name);
        Ok(Some(Answer::Done {}))
    }

    /// A connection ended: so does its role.
    pub(crate) fn disconnect(&mut self, id: ClientId, now: Instant) -> Vec<Effect> {
        let Some(client) = self.clients.remove(&id) else { return Vec::new() };
        match client.wait {
            Some((Wait::Role { domain, .. }, _)) => {
                self.leave_queue(id, &domain);
                self.admit(&domain);
            }
            Some((Wait::Version { domain, .. }, _)) => {
                if let Some(it) = self.domains.get_mut(&domain) {
                    it.watchers.retain(|watcher| *watcher != id);
                }
                self.forget_if_unused(&domain);
            }
            _ => {}
        }
        if let Some(role) = client.role {
            self.hungry.entry(role.device).or_default().retain(|waiting| *waiting != id);
            self.end_role(id, client.process, role);
        }
        self.feed_all(now);
        std::mem::take(&mut self.effects)
    }

    fn end_role(&mut self, id: ClientId, process: i32, role: Role) {
        let name = role.domain;
        self.effects.push(Effect::Record(Record::RoleEnded { token: role.token }));
        let Some(domain) = self.domains.get_mut(&name) else { return };
        match role.mode {
            Mode::Read => {
                domain.readers.remove(&id);
                let (older, left) = (domain.older.contains_key(&role.version), domain.readers_of(role.version));
                if older && left == 0 {
                    self.drop_version(&name, role.version);
                }
                self.event(Some(&name), format!("process {process} reads no more"));
            }
            Mode::Update => {
                domain.writer = None;
                let text = if role.began {
                    format!("process {process} ended in the middle of an update: version {} is dirty", role.version)
                } else {
                    format!("process {process} ended before its update began")
                };
                self.event(Some(&name), text);
            }
            _ => {
                domain.writer = None;
                let bytes = role.layout.bytes();
                role.layout.allocations.iter().for_each(|allocation| self.release(allocation.id));
                let text = format!("process {process} ended without a commit, and {} were dropped", Bytes(bytes));
                self.event(Some(&name), text);
            }
        }
        self.admit(&name);
        self.forget_if_unused(&name);
    }

    /// The time has come for something.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let over = |until: &Option<Instant>| until.is_some_and(|until| until <= now);
        let in_flight: Vec<ClientId> = self
            .pending
            .values()
            .filter_map(|pending| match pending {
                Pending::Create { client, .. } => Some(*client),
                _ => None,
            })
            .collect();
        let late: Vec<ClientId> = self
            .clients
            .iter()
            .filter(|(id, client)| {
                client.wait.as_ref().is_some_and(|(_, until)| over(until)) && !in_flight.contains(id)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            if !self.clients.get(&id).is_some_and(|client| client.connected) {
                continue;
            }
            if let Some(error) = self.give_up(id, now) {
                self.effects.push(Effect::Answer(id, Answer::Error(error)));
            }
        }
        let mut silent = Vec::new();
        for client in self.clients.values_mut() {
            let before = client.asked.len();
            client.asked.retain(|_, until| *until > now);
            if let (true, Some(role)) = (client.asked.len() < before, &client.role) {
                silent.push((role.domain.clone(), client.process));
            }
        }
        for (name, process) in silent {
            self.event(Some(&name), format!("process {process} was asked for memory and did not answer"));
        }
        let abandoned = |client: &Client| !client.connected && client.since <= now;
        let abandoned: Vec<_> = self.clients.iter().filter(|(_, it)| abandoned(it)).map(|(id, _)| *id).collect();
        for id in abandoned {
            let mut effects = std::mem::take(&mut self.effects);
            effects.extend(self.disconnect(id, now));
            self.effects = effects;
        }
        if self.retry.is_some_and(|retry| retry <= now) {
            let waiting = self.hungry.values().any(|queue| !queue.is_empty());
            self.retry = waiting.then(|| now + RETRY);
            self.feed_all(now);
        }
        std::mem::take(&mut self.effects)
    }

    /// Takes a client out of what it waits for; the error that it gets.
    fn give_up(&mut self, id: ClientId, now: Instant) -> Option<ServiceError> {
        let process = self.clients.get(&id)?.process;
        match self.unwait(id)? {
            Wait::Role { domain, mode, .. } => {
                let reason = self.obstacle(&domain, mode);
                self.leave_queue(id, &domain);
                self.admit(&domain);
                Some(error(Code::Timeout, reason, "wait longer, or end who uses it (`service top` shows who)"))
            }
            Wait::Version { domain, newer_than } => {
                if let Some(it) = self.domains.get_mut(&domain) {
                    it.watchers.retain(|watcher| *watcher != id);
                }
                self.forget_if_unused(&domain);
                let problem = format!("nothing newer than version {newer_than} was committed in {domain}");
                Some(error(Code::Timeout, problem, "wait longer"))
            }
            Wait::Memory { size, .. } => {
                let role = self.clients.get(&id)?.role.as_ref()?;
                let (name, device) = (role.domain.clone(), role.device);
                self.hungry.entry(device).or_default().retain(|waiting| *waiting != id);
                let problem = self.shortage(&name, device, size);
                self.event(Some(&name), format!("process {process} did not get memory in time: {problem}"));
                self.feed(device, now);
                Some(error(Code::OutOfMemory, problem, "free memory, or open the domain with mode discard"))
            }
            Wait::Keeper => None,
        }
    }

    /// When [`Books::tick`] has something to do next.
    pub(crate) fn next_tick(&self) -> Option<Instant> {
        let waits = self.clients.values().flat_map(|client| {
            let until = client.wait.as_ref().and_then(|(_, until)| *until);
            let abandoned = (!client.connected).then_some(client.since);
            until.into_iter().chain(abandoned).chain(client.asked.values().copied())
        });
        waits.chain(self.retry).min()
    }

    fn event(&mut self, domain: Option<&DomainName>, text: String) {
        tracing::info!(domain = domain.map(DomainName::as_str), "{text}");
        self.last_event += 1;
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(Event { number: self.last_event, time: unix_time(), domain: domain.cloned(), text });
    }
}

fn any_role(client: &mut Client) -> Result<&mut Role, ServiceError> {
    client.role.as_mut().ok_or_else(|| error(Code::Protocol, "this connection has no role", "open a domain first"))
}

fn writer(client: &mut Client) -> Result<&mut Role, ServiceError> {
    let role = any_role(client)?;
    if !role.writes() {
        let problem = format!("this connection reads {}", role.domain);
        return Err(error(Code::Invalid, problem, "open it to write, on another connection"));
    }
    Ok(role)
}

/// Entries behind a key that fit into one answer.
fn page_of(layout: &Layout, after: Option<String>) -> Vec<(String, Entry)> {
    use std::ops::Bound;
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut bytes = 0;
    let fits = |(key, entry): &(&String, &Entry)| {
        bytes += key.len() + entry.value.len() + 64;
        bytes <= crate::protocol::FRAME_MAX / 2
    };
    let range = layout.entries.range::<String, _>((from, Bound::Unbounded));
    range.take(PAGE_MAX).take_while(fits).map(|(key, entry)| (key.clone(), entry.clone())).collect()
}

fn count(layout: &Layout) -> String {
    match layout.allocations.len() {
        1 => "1 allocation".into(),
        number => format!("{number} allocations"),
    }
}

fn unix_time() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
