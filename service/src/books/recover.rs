//! The books of a front that takes over: from the journal and what the keeper holds.

use super::{Books, Client, ClientId, Committed, Effect, Held, Role};
use crate::journal::{Record, RoleRecord, Token};
use crate::layout::{Allocation, Layout};
use crate::link::HeldMemory;
use crate::name::DomainName;
use crate::policy::Peer;
use crate::protocol::Mode;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Instant;

/// What the records say, taken together.
#[derive(Default)]
struct Replay {
    roles: BTreeMap<Token, RoleRecord>,
    /// What writers allocated and did not commit.
    drafts: BTreeMap<Token, Vec<Allocation>>,
    versions: BTreeMap<(DomainName, u64), Version>,
    /// Who pays for an allocation.
    users: HashMap<u64, u32>,
    listed: HashMap<u64, BTreeSet<i32>>,
}

struct Version {
    device: u32,
    layout: Rc<Layout>,
    dirty: bool,
    time: u64,
}

impl Books {
    /// Takes over from a front that is gone. Its clients have some time to come back; memory that
    /// no layout has is released.
    pub(crate) fn recover(&mut self, records: Vec<Record>, held: Vec<HeldMemory>, now: Instant) -> Vec<Effect> {
        let mut replay = Replay::default();
        for record in records {
            self.replay(&mut replay, record);
        }
        let mut memories: HashMap<u64, HeldMemory> = held.into_iter().map(|memory| (memory.id, memory)).collect();
        self.last_id = memories.keys().copied().fold(self.last_id, u64::max);
        for ((name, version), it) in replay.versions {
            if let Some(listed) = replay.listed.remove(&version) {
                self.listed.insert(version, listed);
            }
            for allocation in &it.layout.allocations {
                let user = replay.users.get(&allocation.id).copied().unwrap_or_default();
                self.hold(memories.remove(&allocation.id), user, &name, it.device);
            }
            let domain = self.domains.entry(name.clone()).or_default();
            domain.device = Some(it.device);
            let hash = it.layout.hash();
            let newer = Committed { layout: it.layout, hash, version, dirty: it.dirty, time: it.time };
            if let Some(older) = domain.committed.replace(newer) {
                domain.older.insert(older.version, older);
            }
        }
        for (number, (token, record)) in replay.roles.into_iter().enumerate() {
            let draft = replay.drafts.remove(&token).unwrap_or_default();
            for allocation in &draft {
                self.hold(memories.remove(&allocation.id), record.user, &record.domain, record.device);
            }
            // Numbers of connections of this front begin at 0.
            self.absent(ClientId(u64::MAX - number as u64), record, draft, now);
        }
        for id in memories.into_keys() {
            self.order(super::Order::Release { id }, super::Pending::Release);
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
                replay.drafts.remove(&token);
            }
            Record::Allocated { token, allocation, user } => {
                self.last_id = self.last_id.max(allocation.id);
                replay.users.insert(allocation.id, user);
                replay.drafts.entry(token).or_default().push(allocation);
            }
            Record::Freed { id } => {
                replay.drafts.values_mut().for_each(|draft| draft.retain(|allocation| allocation.id != id));
            }
            Record::Committed { domain, writer, version, device, layout, users, time } => {
                self.last_version = self.last_version.max(version);
                for (allocation, user) in layout.allocations.iter().zip(users) {
                    self.last_id = self.last_id.max(allocation.id);
                    replay.users.insert(allocation.id, user);
                }
                if let Some(role) = writer.and_then(|writer| replay.roles.get_mut(&writer)) {
                    replay.drafts.remove(&role.token);
                    (role.mode, role.version, role.began) = (Mode::Read, version, false);
                }
                replay.versions.insert((domain, version), Version { device, layout, dirty: false, time });
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
        }
    }

    fn hold(&mut self, memory: Option<HeldMemory>, user: u32, domain: &DomainName, device: u32) {
        let Some(memory) = memory else { return };
        self.charge(user, domain, device, memory.size);
        let domain = domain.clone();
        let held = Held { handle: memory.handle, ticket: memory.ticket, device, size: memory.size, user, domain };
        self.held.insert(memory.id, held);
    }

    /// A role whose client is not connected yet.
    fn absent(&mut self, id: ClientId, record: RoleRecord, draft: Vec<Allocation>, now: Instant) {
        let domain = self.domains.entry(record.domain.clone()).or_default();
        domain.device = Some(record.device);
        let layout = match record.mode {
            Mode::Read | Mode::Update => domain.version(record.version).map(|it| it.layout.clone()),
            _ => Some(Rc::new(Layout { allocations: draft, entries: BTreeMap::new() })),
        };
        let Some(layout) = layout else { return };
        if record.mode == Mode::Read {
            domain.readers.insert(id, record.version);
        } else {
            domain.writer = Some(id);
        }
        let metadata = layout.metadata();
        let role = Role {
            token: record.token,
            domain: record.domain,
            device: record.device,
            mode: record.mode,
            version: record.version,
            layout,
            allow_update: record.allow_update,
            lends: record.lends,
            began: record.began,
            asleep: record.asleep,
            metadata,
        };
        let peer = Peer { user: record.user, pid: record.pid, start: record.start, ..Peer::default() };
        let client = Client {
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
        let users = |layout: &Layout| {
            layout.allocations.iter().map(|it| self.held.get(&it.id).map_or(0, |held| held.user)).collect()
        };
        for (name, domain) in &self.domains {
            let device = domain.device.unwrap_or_default();
            for Committed { layout, version, dirty, time, .. } in domain.older.values().chain(&domain.committed) {
                let (version, time) = (*version, *time);
                let (domain, users, layout) = (name.clone(), users(layout), layout.clone());
                records.push(Record::Committed { domain, writer: None, version, device, layout, users, time });
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
            for allocation in &role.layout.allocations {
                let (token, allocation) = (role.token, allocation.clone());
                records.push(Record::Allocated { token, allocation, user: client.peer.user });
            }
        }
        records
    }
}
