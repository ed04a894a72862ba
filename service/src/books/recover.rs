//! The books of a front that takes over: from the journal and what the keeper holds.

use super::{Books, ClientId, ClientState, Committed, Effect, RoleState, Served};
use crate::entries::Puts;
use crate::journal::{Record, RoleRecord, Token};
use crate::layout::Allocation;
use crate::link::HeldMemory;
use crate::name::DomainName;
use crate::policy::Peer;
use crate::protocol::{Mode, PAGE_MAX};
use ascend_vmm::share::Ticket;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Instant;

/// What the records say, taken together.
#[derive(Default)]
struct Replay {
    roles: BTreeMap<Token, RoleRecord>,
    /// What writers allocated and did not free, by number. Who ended or committed has none.
    drafts: BTreeMap<u64, (Token, Allocation)>,
    versions: BTreeMap<(DomainName, u64), Version>,
    listed: HashMap<u64, BTreeSet<i32>>,
}

impl Replay {
    /// A version was changed in place: its memory, its readers and its list are those of the next.
    fn updated(&mut self, domain: &DomainName, before: u64, version: u64) {
        self.versions.remove(&(domain.clone(), before));
        let readers = self.roles.values_mut().filter(|role| role.domain == *domain && role.version == before);
        readers.for_each(|role| role.version = version);
        if let Some(listed) = self.listed.remove(&before) {
            self.listed.insert(version, listed);
        }
    }
}

struct Version {
    device: u32,
    /// Its handles are known to the keeper.
    layout: Served,
    hash: [u8; 16],
    /// Who pays for the memory.
    user: u32,
    dirty: bool,
    time: u64,
}

impl Books {
    /// Takes over from a front that is gone. Its clients have some time to come back; memory that
    /// no layout has is released.
    pub(crate) fn recover(
        &mut self,
        records: Vec<Record>,
        held: Vec<HeldMemory>,
        tickets: Vec<Ticket>,
        now: Instant,
    ) -> Vec<Effect> {
        let of_device = |ticket: Ticket| ticket.device.map(|device| (device.physical, ticket));
        self.tickets.extend(tickets.into_iter().filter_map(of_device));
        let mut replay = Replay::default();
        for record in records {
            self.replay(&mut replay, record);
        }
        let mut memories: BTreeMap<u64, u64> = held.into_iter().map(|memory| (memory.id, memory.handle)).collect();
        self.last_id = memories.last_key_value().map_or(0, |(id, _)| *id).max(self.last_id);
        for ((name, version), mut it) in replay.versions {
            if let Some(listed) = replay.listed.remove(&version) {
                self.listed.insert(version, listed);
            }
            let Some(handles) = handles(&mut memories, &it.layout.allocations) else {
                self.event(Some(&name), format!("version {version} is lost: the keeper does not have its memory"));
                continue;
            };
            self.charge(it.user, &name, it.device, it.layout.bytes());
            let domain = self.domains.entry(name.clone()).or_default();
            domain.device = Some(it.device);
            it.layout.handles = Rc::new(handles);
            let Version { layout, hash, user, dirty, time, .. } = it;
            let newer = Committed { layout, user, hash, version, dirty, time };
            if let Some(older) = domain.committed.replace(newer) {
                domain.older.insert(older.version, older);
            }
        }
        let mut drafts: BTreeMap<Token, Vec<Allocation>> = BTreeMap::new();
        for (token, allocation) in replay.drafts.into_values() {
            drafts.entry(token).or_default().push(allocation);
        }
        for (number, (token, record)) in replay.roles.into_iter().enumerate() {
            let mut draft = match record.mode {
                Mode::Read | Mode::Update => Vec::new(),
                _ => drafts.remove(&token).unwrap_or_default(),
            };
            draft.retain(|allocation| memories.contains_key(&allocation.id));
            let handles = handles(&mut memories, &draft).unwrap_or_default();
            let bytes = draft.iter().map(|allocation| allocation.size).sum();
            self.charge(record.user, &record.domain, record.device, bytes);
            // Numbers of connections of this front begin at 0.
            self.absent(ClientId(u64::MAX - number as u64), record, draft, handles, now);
        }
        let unknown: Vec<u64> = memories.into_keys().collect();
        for ids in unknown.chunks(PAGE_MAX) {
            self.order(super::Order::Release { ids: ids.to_vec() }, super::Pending::Release);
        }
        let names: Vec<DomainName> = self.domains.keys().cloned().collect();
        for name in names {
            let Some(domain) = self.domains.get(&name) else { continue };
            let unread: Vec<u64> = domain.older.keys().copied().filter(|&it| domain.readers_of(it) == 0).collect();
            unread.into_iter().for_each(|version| self.drop_version(&name, version));
            self.forget_if_unused(&name);
        }
        self.event(None, "the front took over from one that is gone".into());
        std::mem::take(&mut self.effects)
    }

    fn replay(&mut self, replay: &mut Replay, record: Record) {
        match record {
            Record::Instance { number, last_version, last_id } => {
                self.instance = number;
                self.last_version = self.last_version.max(last_version);
                self.last_id = self.last_id.max(last_id);
            }
            Record::Role(role) => {
                replay.roles.insert(role.token, role);
            }
            Record::RoleEnded { token } => {
                replay.roles.remove(&token);
            }
            Record::Allocated { token, allocation, .. } => {
                self.last_id = self.last_id.max(allocation.id);
                replay.drafts.insert(allocation.id, (token, allocation));
            }
            Record::Drafted { token, allocations } => {
                let allocations = allocations.iter().cloned();
                replay.drafts.extend(allocations.map(|allocation| (allocation.id, (token, allocation))));
            }
            Record::Freed { id } => drop(replay.drafts.remove(&id)),
            Record::Committed { domain, writer, version, device, user, time, hash, allocations, keys } => {
                self.last_version = self.last_version.max(version);
                self.last_id = allocations.last().map_or(0, |last| last.id).max(self.last_id);
                let writes = writer.and_then(|writer| replay.roles.get_mut(&writer));
                let written = writes.map(|role| (std::mem::replace(&mut role.mode, Mode::Read), role.version));
                if let Some((Mode::Update, before)) = written {
                    replay.updated(&domain, before, version);
                }
                if let Some(role) = writer.and_then(|writer| replay.roles.get_mut(&writer)) {
                    (role.version, role.began) = (version, false);
                }
                let layout = Served { allocations, keys, ..Served::default() };
                replay.versions.insert((domain, version), Version { device, layout, hash, user, dirty: false, time });
            }
            Record::Dirty { domain } => {
                let of = |name: &DomainName| *name == domain;
                if let Some((_, newest)) = replay.versions.iter_mut().rev().find(|((name, _), _)| of(name)) {
                    newest.dirty = true;
                }
                let updates = |role: &&mut RoleRecord| of(&role.domain) && role.mode == Mode::Update;
                if let Some(role) = replay.roles.values_mut().find(updates) {
                    role.began = true;
                }
            }
            Record::Removed { domain, version } => {
                replay.versions.remove(&(domain, version));
            }
            Record::Listed { version, processes } => replay.listed.entry(version).or_default().extend(processes),
            // Those of the moment in which a front took over are there twice.
            Record::Event(event) if event.number > self.last_event => {
                self.last_event = event.number;
                self.remember(event);
            }
            Record::Event(_) => {}
        }
    }

    /// A role whose client is not connected yet.
    fn absent(&mut self, id: ClientId, record: RoleRecord, draft: Vec<Allocation>, handles: Vec<u64>, now: Instant) {
        let domain = self.domains.entry(record.domain.clone()).or_default();
        domain.device = Some(record.device);
        let memory = match record.mode {
            Mode::Read | Mode::Update => domain.version(record.version).map(|it| it.layout.clone()),
            _ => Some(Served { allocations: Rc::new(draft), handles: Rc::new(handles), ..Served::default() }),
        };
        let Some(layout) = memory else { return };
        if record.mode == Mode::Read {
            domain.readers.insert(id, record.version);
        } else {
            domain.writer = Some(id);
        }
        let role = RoleState {
            token: record.token,
            domain: record.domain,
            device: record.device,
            mode: record.mode,
            version: record.version,
            layout,
            puts: Puts::default(),
            allow_update: record.allow_update,
            lends: record.lends,
            began: record.began,
            asleep: record.asleep,
        };
        let peer = Peer { user: record.user, pid: record.pid, start: record.start, ..Peer::default() };
        let client = ClientState {
            peer,
            process: record.process,
            program: String::new(),
            connected: false,
            watched: false,
            role: Some(role),
            wait: None,
            asked: BTreeMap::new(),
            // Until then it may come back.
            since: now + self.policy.resume,
        };
        self.clients.insert(id, client);
    }

    /// Roles whose clients have not come back, with their processes: number and start time.
    pub(crate) fn absentees(&self) -> Vec<(ClientId, i32, u64)> {
        let absent = self.clients.iter().filter(|(_, client)| !client.connected);
        absent.map(|(id, client)| (*id, client.peer.pid, client.peer.start)).collect()
    }

    /// A role whose client has not come back lasts as long as its process: that may map the memory
    /// without asking anything for hours.
    pub(crate) fn watch(&mut self, id: ClientId) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.watched = true;
        }
    }

    /// The shortest journal that says the same.
    pub(crate) fn snapshot(&mut self) -> Vec<Record> {
        let (number, last_version, last_id) = (self.instance, self.last_version, self.last_id);
        let mut records = vec![Record::Instance { number, last_version, last_id }];
        records.extend(self.events.iter().cloned().map(Record::Event));
        for (name, domain) in &self.domains {
            let device = domain.device.unwrap_or_default();
            for it in domain.older.values().chain(&domain.committed) {
                let Committed { layout, user, hash, version, dirty, time } = it;
                let (allocations, keys) = (layout.allocations.clone(), layout.keys.clone());
                let (domain, writer, user, version, time, hash) = (name.clone(), None, *user, *version, *time, *hash);
                let record = Record::Committed { domain, writer, version, device, user, time, hash, allocations, keys };
                records.push(record);
                if *dirty {
                    records.push(Record::Dirty { domain: name.clone() });
                }
            }
        }
        for (version, listed) in &self.listed {
            records.push(Record::Listed { version: *version, processes: listed.iter().copied().collect() });
        }
        let before = std::mem::take(&mut self.effects);
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        clients.into_iter().for_each(|id| self.record_role(id));
        for effect in std::mem::replace(&mut self.effects, before) {
            if let Effect::Record(record) = effect {
                records.push(record);
            }
        }
        for client in self.clients.values() {
            let Some(role) = client.role.as_ref().filter(|it| !matches!(it.mode, Mode::Read | Mode::Update)) else {
                continue;
            };
            records.push(Record::Drafted { token: role.token, allocations: role.layout.allocations.clone() });
        }
        records
    }
}

/// The handles of allocations, taken from what the keeper has; `None` if it does not have them all.
fn handles(memories: &mut BTreeMap<u64, u64>, allocations: &[Allocation]) -> Option<Vec<u64>> {
    allocations
        .iter()
        .all(|allocation| memories.contains_key(&allocation.id))
        .then(|| allocations.iter().filter_map(|allocation| memories.remove(&allocation.id)).collect())
}
