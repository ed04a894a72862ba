//! The books of the service: who has which role in which domain, and which memory is whose.
//!
//! This module does nothing itself. It is told what happened ([`Books::request`],
//! [`Books::disconnect`], [`Books::kept`], [`Books::tick`]) and returns [`Effect`]s, which the
//! front carries out in their order. So it can be tested without sockets, processes and time.
//!
//! The connection is the lock: a role lasts as long as the connection that has it. A domain is
//! *empty* until a writer commits, and then *committed*; while a writer changes it in place it is
//! *dirty*, and stays so if that writer dies.

mod memory;
mod recover;
mod roles;
mod status;
#[cfg(test)]
mod tests;
mod versions;

use crate::entries::{Entries, Keys, Puts};
use crate::journal::{Record, STATE, Token};
use crate::keeper::packet::LINK;
use crate::layout::{Allocation, PageSize};
use crate::name::DomainName;
use crate::policy::{Peer, Policy};
use crate::protocol::{Answer, Code, Event, Mode, PAGE_MAX, Request, ServiceError, VERSION, Waiting};
use ascend_vmm::share::Ticket;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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
    Release { ids: Vec<u64> },
    /// Let a process import.
    Trust { client: ClientId, process: i32, ids: Vec<u64> },
    /// How much memory is free.
    Memory { device: u32 },
    /// An answer, as a sign of life.
    Ping,
}

/// What the keeper answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It is done.
    Done,
    /// The memory is there: the vendor's handle and the ticket.
    Created { handle: u64, ticket: Ticket },
    /// There is memory with this number already.
    Taken,
    /// Bytes of a device.
    Memory { free: u64, total: u64 },
    /// There is not enough memory. Bytes of the device, if they are known.
    OutOfMemory { free: Option<u64>, total: Option<u64>, text: String },
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

/// The layout of a version or a role.
#[derive(Debug, Clone, Default)]
struct Served {
    /// In the order in which they were made, which is the order of their numbers.
    allocations: Rc<Vec<Allocation>>,
    /// The vendor's handles of the allocations. The rest of their tickets is the same for all
    /// memory of an NPU, apart from what the allocation says.
    handles: Rc<Vec<u64>>,
    /// What is committed; a writer of a new layout has none.
    keys: Rc<Keys>,
}

impl Served {
    /// Bytes of all allocations.
    fn bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.size).sum()
    }
}

/// A version of a domain.
#[derive(Debug)]
struct Committed {
    layout: Served,
    /// Who pays for the memory.
    user: u32,
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
    older: BTreeMap<u64, Committed>,
    writer: Option<ClientId>,
    readers: BTreeMap<ClientId, u64>,
    /// Clients whose open waits, oldest first.
    queue: VecDeque<ClientId>,
    /// Readers that wait with their waking for a writer in place.
    waking: Vec<ClientId>,
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

    /// The NPU that it is bound to: that of its memory.
    fn bound_to(&self) -> Option<u32> {
        let has_memory = self.committed.is_some() || !self.older.is_empty() || self.writer.is_some();
        self.device.filter(|_| has_memory)
    }

    /// A version that is served or still read.
    fn version(&self, version: u64) -> Option<&Committed> {
        self.committed.as_ref().filter(|it| it.version == version).or_else(|| self.older.get(&version))
    }

    /// The number of those who read a version.
    fn readers_of(&self, version: u64) -> usize {
        self.readers.values().filter(|&&of| of == version).count()
    }
}

/// What a client has in a domain.
#[derive(Debug)]
struct RoleState {
    token: Token,
    domain: DomainName,
    device: u32,
    mode: Mode,
    /// The version that is read or updated; 0 for a new layout.
    version: u64,
    layout: Served,
    /// What a writer has put since.
    puts: Puts,
    allow_update: bool,
    lends: bool,
    /// A writer that may have written to committed memory.
    began: bool,
    /// A reader that has given its import back.
    asleep: bool,
}

impl RoleState {
    fn writes(&self) -> bool {
        self.mode != Mode::Read
    }

    fn name(&self) -> &'static str {
        match self.mode {
            Mode::Read if self.asleep => "asleep",
            Mode::Read => "reader",
            Mode::Update => "updater",
            _ => "writer",
        }
    }
}

/// What a client waits for.
#[derive(Debug)]
enum Wait {
    Role {
        domain: DomainName,
        mode: Mode,
        device: u32,
        allow_update: bool,
        lends: bool,
        token: Token,
    },
    /// `told` is what the client was told last.
    Memory {
        size: u64,
        page: PageSize,
        tag: String,
        id: Option<u64>,
        told: Option<Waiting>,
    },
    Wake {
        domain: DomainName,
    },
    Version {
        domain: DomainName,
        newer_than: u64,
    },
    Keeper,
}

#[derive(Debug)]
struct ClientState {
    peer: Peer,
    process: i32,
    program: String,
    /// False for the role of a connection that ended with an earlier front.
    connected: bool,
    /// Such a role ends with its process, and not with the time.
    watched: bool,
    role: Option<RoleState>,
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
    Ping { client: ClientId },
    Release,
}

#[derive(Debug, Clone, Default)]
struct DeviceMemory {
    total: u64,
    free: u64,
    held: u64,
    /// Why the NPU does not say how much is free.
    problem: String,
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
    clients: HashMap<ClientId, ClientState>,
    /// A ticket of each NPU's memory, by physical id.
    tickets: HashMap<u32, Ticket>,
    pending: HashMap<u64, Pending>,
    /// Processes that were put on the driver's lists, by version.
    listed: HashMap<u64, BTreeSet<i32>>,
    /// The keeper is gone, and with it all memory that nobody maps.
    orphaned: bool,
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
        let instance = u64::from_le_bytes(*random().first_chunk().unwrap_or(&[0; 8]));
        Books {
            policy,
            npus,
            memory: HashMap::new(),
            used,
            domains: HashMap::new(),
            clients: HashMap::new(),
            tickets: HashMap::new(),
            pending: HashMap::new(),
            listed: HashMap::new(),
            orphaned: false,
            hungry: HashMap::new(),
            events: VecDeque::new(),
            last_event: 0,
            // Far from the numbers of other lives, so that those of a snapshot are free.
            last_id: instance >> 24 << 16,
            last_version: 0,
            last_order: 0,
            last_reclaim: 0,
            instance,
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
            ClientState {
                peer,
                process: 0,
                program: String::new(),
                connected: true,
                watched: false,
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
            Request::Open { domain, mode, device, identity, wait_ms, allow_update, lends, token } => {
                self.check_device(device, &identity)?;
                let token = self.new_token(&token)?;
                self.open(id, Wait::Role { domain, mode, device, allow_update, lends, token }, wait_ms, now)
            }
            Request::Close {} => self.close(id, now),
            Request::Resume { token } => self.resume(id, &token),
            Request::Allocate { size, page, tag, wait_ms, id: number } => {
                self.allocate(id, Wait::Memory { size, page, tag, id: number, told: None }, wait_ms, now)
            }
            Request::Free { allocations } => self.free(id, &allocations),
            Request::Put { entries } => put(writer(client)?, entries),
            Request::Begin {} => self.begin(id),
            Request::Commit {} => self.commit(id),
            Request::Allocations { from } => {
                let layout = &any_role(client)?.layout;
                let from = usize::try_from(from).unwrap_or(usize::MAX).min(layout.allocations.len());
                let page = layout.allocations[from..].iter().take(PAGE_MAX).cloned().collect();
                Ok(Some(Answer::Allocations { allocations: page }))
            }
            Request::Entries { after } => {
                let layout = &any_role(client)?.layout;
                let entries = layout.keys.page(&layout.allocations, after.as_deref()).map_err(unreadable)?;
                Ok(Some(Answer::Entries { entries }))
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
            Request::Sleep {} => self.sleep(id),
            Request::Wake { wait_ms } => self.wake(id, wait_ms, now),
            Request::Ping {} => self.ping(id),
            Request::Status {} => Ok(Some(Answer::Status(self.status(now)))),
            Request::Events { after } => {
                let events = self.events.iter().filter(|event| event.number > after).take(PAGE_MAX).cloned().collect();
                Ok(Some(Answer::Events { events }))
            }
            Request::Replace { state, link } => {
                if self.orphaned {
                    return Err(keeper_gone());
                }
                if state < STATE {
                    let problem =
                        format!("the state of this service has version {STATE}, and the new front reads {state}");
                    return Err(error(Code::Invalid, problem, "use a newer program"));
                }
                if link != LINK {
                    let problem =
                        format!("the keeper speaks version {LINK} of its packets, and the new front version {link}");
                    let remedy = "start a new keeper: save what is committed first, or keep engines awake";
                    return Err(error(Code::Invalid, problem, remedy));
                }
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
        let abandoned = |client: &ClientState| !client.connected && !client.watched && client.since <= now;
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
            Wait::Wake { domain } => {
                self.leave_queue(id, &domain);
                let reason = self.obstacle(&domain, Mode::Read);
                Some(error(Code::Timeout, reason, "wait longer: it is asleep as before"))
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
            let abandoned = (!client.connected && !client.watched).then_some(client.since);
            until.into_iter().chain(abandoned).chain(client.asked.values().copied())
        });
        waits.chain(self.retry).min()
    }

    fn event(&mut self, domain: Option<&DomainName>, text: String) {
        tracing::info!(domain = domain.map(DomainName::as_str), "{text}");
        self.last_event += 1;
        let event = Event { number: self.last_event, time: unix_time(), domain: domain.cloned(), text };
        self.effects.push(Effect::Record(Record::Event(event.clone())));
        self.remember(event);
    }

    fn remember(&mut self, event: Event) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// The answer to a request that waits for something other than memory.
fn waiting(reason: String) -> Answer {
    Answer::Waiting(Waiting { reason, before: 0, wanted: 0, free: 0 })
}

/// The driver's owner of the memory is gone.
pub(crate) fn keeper_gone() -> ServiceError {
    let remedy = "keep what is mapped: nothing new can be allocated; start the service, and load anew";
    error(Code::KeeperGone, "the process that owns the memory is gone", remedy)
}

/// The service cannot read its own memory file.
fn unreadable(problem: std::io::Error) -> ServiceError {
    error(Code::Driver, format!("the keys cannot be read: {problem}"), "commit them again")
}

fn put(role: &mut RoleState, entries: Entries) -> Outcome {
    let put = role.puts.add(&role.layout.allocations, entries);
    put.map_err(|bad| error(Code::Invalid, bad.to_string(), "nothing of this request was put"))?;
    Ok(Some(Answer::Done {}))
}

fn any_role(client: &mut ClientState) -> Result<&mut RoleState, ServiceError> {
    client.role.as_mut().ok_or_else(|| error(Code::Protocol, "this connection has no role", "open a domain first"))
}

fn writer(client: &mut ClientState) -> Result<&mut RoleState, ServiceError> {
    let role = any_role(client)?;
    if !role.writes() {
        let problem = format!("this connection reads {}", role.domain);
        return Err(error(Code::Invalid, problem, "open it to write, on another connection"));
    }
    Ok(role)
}

fn unix_time() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
