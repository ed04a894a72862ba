//! What the service holds, and for whom.

use super::{Books, ClientState, Domain, Effect, Order, Pending, Wait, unix_time};
use crate::name::DomainName;
use crate::protocol::{ClientStatus, DeviceStatus, DomainStatus, Mode, Status};
use std::time::Instant;

impl Books {
    /// Asks the keeper how much memory is free.
    pub(crate) fn look_at_memory(&mut self) -> Vec<Effect> {
        for npu in self.npus.clone() {
            self.order(Order::Memory { device: npu.logical }, Pending::Memory { device: npu.physical });
        }
        std::mem::take(&mut self.effects)
    }

    pub(super) fn status(&self, now: Instant) -> Status {
        let devices = self.npus.iter().map(|npu| {
            let memory = self.memory.get(&npu.physical).cloned().unwrap_or_default();
            DeviceStatus {
                logical: npu.logical,
                physical: npu.physical,
                identity: npu.identity.clone(),
                total: memory.total,
                free: memory.free,
                held: memory.held,
                problem: memory.problem,
            }
        });
        let mut domains: Vec<_> = self.domains.iter().map(|(name, domain)| self.domain_status(name, domain)).collect();
        domains.sort_by(|one, other| one.name.cmp(&other.name));
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs();
        let mut clients: Vec<_> = self
            .clients
            .values()
            .filter(|client| client.process != 0)
            .map(|client| {
                let (role, domain, bytes) = match (&client.role, &client.wait) {
                    (_, Some((Wait::Role { domain, .. }, _))) => ("waiting", Some(domain.clone()), 0),
                    (Some(role), _) => (role.name(), Some(role.domain.clone()), role.layout.bytes()),
                    (None, Some((Wait::Version { domain, .. }, _))) => ("waiting", Some(domain.clone()), 0),
                    (None, _) => ("none", None, 0),
                };
                ClientStatus {
                    pid: client.peer.pid,
                    process: client.process,
                    user: client.peer.user,
                    program: client.program.clone(),
                    domain,
                    role: role.into(),
                    bytes,
                    age: if client.connected { seconds(client.since) } else { 0 },
                    container: client.peer.container.clone(),
                    waits: self.waits(client),
                }
            })
            .collect();
        clients.sort_by_key(|client| (client.process, client.domain.clone()));
        Status {
            keeper: if self.orphaned { 0 } else { self.keeper },
            front: self.front,
            devices: devices.collect(),
            domains,
            clients,
        }
    }

    /// What a client waits for, as a sentence.
    fn waits(&self, client: &ClientState) -> String {
        match client.wait.as_ref().map(|(wait, _)| wait) {
            Some(Wait::Role { domain, mode, .. }) => self.obstacle(domain, *mode),
            Some(Wait::Wake { domain }) => self.obstacle(domain, Mode::Read),
            Some(Wait::Version { domain, newer_than }) => {
                format!("nothing newer than version {newer_than} is committed in {domain}")
            }
            Some(Wait::Memory { size, .. }) => {
                client.role.as_ref().map(|role| self.shortage(&role.domain, role.device, *size)).unwrap_or_default()
            }
            Some(Wait::Keeper) | None => String::new(),
        }
    }

    fn domain_status(&self, name: &DomainName, domain: &Domain) -> DomainStatus {
        let committed = domain.committed.as_ref();
        let draft = domain.writer.and_then(|id| self.clients.get(&id)).and_then(|client| client.role.as_ref());
        let draft = draft.filter(|role| role.mode != Mode::Update);
        let state = match (committed, domain.writer) {
            (Some(committed), _) if committed.dirty => "dirty",
            (_, Some(_)) => "writing",
            (Some(_), None) => "committed",
            (None, None) => "empty",
        };
        DomainStatus {
            name: name.clone(),
            device: domain.device.unwrap_or(0),
            state: state.into(),
            version: committed.map_or(0, |it| it.version),
            bytes: committed.map_or(0, |it| it.layout.bytes()),
            allocations: committed.map_or(0, |it| it.layout.allocations.len() as u64),
            uncommitted: draft.map_or(0, |role| role.layout.bytes()),
            superseded: domain.older.values().map(|it| it.layout.bytes()).sum(),
            readers: domain.readers.len() as u64,
            waiting: (domain.queue.len() + domain.waking.len() + domain.watchers.len()) as u64,
            age: committed.map_or(0, |it| unix_time().saturating_sub(it.time)),
        }
    }
}
