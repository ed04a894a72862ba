//! Roles: who gets one, who waits for one, and how one ends.

use super::{
    Books, ClientId, ClientState, Domain, Effect, Order, Outcome, Pending, RoleState, Wait, any_role, error,
    keeper_gone, waiting,
};
use crate::entries::Puts;
use crate::journal::{Record, RoleRecord, Token};
use crate::name::DomainName;
use crate::protocol::{Answer, Code, Mode, ServiceError};
use ascend_vmm::Bytes;
use std::time::{Duration, Instant};

impl Books {
    pub(super) fn open(&mut self, id: ClientId, wait: Wait, wait_ms: u64, now: Instant) -> Outcome {
        let Wait::Role { domain: name, mode, device, allow_update, lends, token } = wait else { return Ok(None) };
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
        if self.orphaned && mode != Mode::Read {
            match self.domains.get(&name).is_some_and(|domain| domain.committed.is_some()) {
                true if mode == Mode::WriteOrRead => mode = Mode::Read,
                _ => return Err(keeper_gone()),
            }
        }
        let domain = self.domains.entry(name.clone()).or_default();
        if let Some(other) = domain.bound_to().filter(|&of| of != device) {
            return Err(other_device(&name, other, device));
        }
        domain.queue.push_back(id);
        let deadline = now.checked_add(Duration::from_millis(wait_ms));
        client.wait = Some((Wait::Role { domain: name.clone(), mode, device, allow_update, lends, token }, deadline));
        self.admit(&name);
        let Some(client) = self.clients.get(&id).filter(|client| client.wait.is_some()) else { return Ok(None) };
        let reason = self.obstacle(&name, mode);
        if wait_ms == 0 {
            return Err(self.give_up(id, now).unwrap_or_else(|| error(Code::Timeout, reason, "wait for it")));
        }
        let text = format!("process {} ({}) waits, mode {}: {reason}", client.process, client.program, mode.name());
        self.event(Some(&name), text);
        Ok(Some(waiting(reason)))
    }

    /// The token of a role that a client wants: its own, or one that is chosen here.
    pub(super) fn new_token(&self, wanted: &[u8]) -> Result<Token, ServiceError> {
        if wanted.is_empty() {
            return Ok((self.random)());
        }
        let Ok(token) = Token::try_from(wanted) else {
            let problem = format!("token: {} bytes", wanted.len());
            return Err(error(Code::Invalid, problem, "use 16 random ones, or none"));
        };
        let taken = |client: &ClientState| {
            let waits = matches!(&client.wait, Some((Wait::Role { token: other, .. }, _)) if *other == token);
            waits || client.role.as_ref().is_some_and(|role| role.token == token)
        };
        match self.clients.values().any(taken) {
            true => Err(error(Code::Invalid, "token: another role has it", "use new random bytes for each role")),
            false => Ok(token),
        }
    }

    /// Refuses an NPU that the service does not have, or has under another identity.
    pub(super) fn check_device(&self, device: u32, identity: &str) -> Result<(), ServiceError> {
        let Some(npu) = self.npus.iter().find(|npu| npu.physical == device) else {
            let known: Vec<_> = self.npus.iter().map(|npu| npu.physical.to_string()).collect();
            let remedy = format!("this service has the NPUs with the physical ids {}", known.join(", "));
            return Err(error(Code::OtherDevice, format!("device: there is no NPU {device} here"), remedy));
        };
        if !identity.is_empty() && !same_npu(identity, &npu.identity) {
            let shown: String = identity.chars().take(64).filter(|c| !c.is_control()).collect();
            let problem = format!("identity: NPU {device} is {} here, and {shown} there", npu.identity);
            return Err(error(Code::OtherDevice, problem, "use a service on the host that has this NPU"));
        }
        Ok(())
    }

    /// Why a role in a domain is not given now.
    pub(super) fn obstacle(&self, name: &DomainName, mode: Mode) -> String {
        let Some(domain) = self.domains.get(name) else { return format!("{name} is empty") };
        let readers = domain.readers.len();
        match (mode, domain.writer.and_then(|id| self.clients.get(&id))) {
            (_, Some(writer)) => format!("process {} ({}) writes {name}", writer.process, writer.program),
            (Mode::Read | Mode::WriteOrRead, None) if domain.committed.is_none() => {
                format!("nothing is committed in {name}")
            }
            (Mode::Read | Mode::WriteOrRead, None) => format!("a writer waits for {name}"),
            (Mode::Update, None) => {
                let awake = domain.readers.keys().filter(|reader| !self.tolerates_updates(**reader)).count();
                format!("{awake} of {readers} processes that read {name} are awake and do not allow updates")
            }
            (_, None) => format!("{readers} processes read {name}"),
        }
    }

    /// True for a reader that may stay while the memory is changed in place.
    fn tolerates_updates(&self, reader: ClientId) -> bool {
        let role = self.clients.get(&reader).and_then(|client| client.role.as_ref());
        role.is_some_and(|role| role.allow_update || role.asleep)
    }

    /// True while a writer may change what is committed.
    fn is_updated(&self, domain: &Domain) -> bool {
        let role = domain.writer.and_then(|id| self.clients.get(&id)).and_then(|client| client.role.as_ref());
        role.is_some_and(|role| role.mode == Mode::Update)
    }

    /// Gives roles to those who wait for a domain, as far as that is possible now.
    pub(super) fn admit(&mut self, name: &DomainName) {
        self.wake_sleepers(name);
        let Some(domain) = self.domains.get(name) else { return };
        let mut writer_waits = false;
        for id in domain.queue.clone() {
            let Some(domain) = self.domains.get(name) else { return };
            let Some(client) = self.clients.get(&id) else { continue };
            let Some((Wait::Role { mode, device, .. }, _)) = client.wait else { continue };
            let committed = domain.committed.as_ref();
            let dirty = committed.is_some_and(|committed| committed.dirty);
            let free = domain.writer.is_none();
            let granted = match mode {
                // It waited for a domain that was empty, and a writer chose another NPU.
                _ if domain.bound_to().is_some_and(|of| of != device) => {
                    Some(Err(other_device(name, domain.bound_to().unwrap_or_default(), device)))
                }
                Mode::Read | Mode::WriteOrRead if committed.is_some() && !dirty => {
                    (!writer_waits && !self.is_updated(domain)).then_some(Ok(Mode::Read))
                }
                Mode::Read if dirty && free => Some(Err(dirty_memory(name))),
                Mode::Read => None,
                Mode::WriteOrRead | Mode::Write => free.then_some(Ok(Mode::Write)),
                Mode::Update if committed.is_none() && free => Some(Err(error(
                    Code::Empty,
                    format!("nothing is committed in {name}"),
                    "only what is committed can be updated: open it to write",
                ))),
                Mode::Update => {
                    let tolerated = domain.readers.keys().all(|reader| self.tolerates_updates(*reader));
                    (free && tolerated).then_some(Ok(Mode::Update))
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

    pub(super) fn leave_queue(&mut self, id: ClientId, name: &DomainName) {
        if let Some(domain) = self.domains.get_mut(name) {
            domain.queue.retain(|&waiting| waiting != id);
            domain.waking.retain(|&waiting| waiting != id);
        }
    }

    pub(super) fn unwait(&mut self, id: ClientId) -> Option<Wait> {
        self.clients.get_mut(&id)?.wait.take().map(|(wait, _)| wait)
    }

    pub(super) fn forget_if_unused(&mut self, name: &DomainName) {
        if self.domains.get(name).is_some_and(Domain::is_unused) {
            self.domains.remove(name);
        }
    }

    pub(super) fn give_role(&mut self, id: ClientId, name: &DomainName, mode: Mode) {
        let Some(Wait::Role { device, allow_update, lends, token, .. }) = self.unwait(id) else { return };
        if mode == Mode::Discard {
            let version = self.domains.get(name).and_then(|it| it.committed.as_ref()).map(|it| it.version);
            if let Some(version) = version {
                self.drop_version(name, version);
                self.event(Some(name), format!("version {version} was discarded by its next writer"));
            }
        }
        let Some(domain) = self.domains.get_mut(name) else { return };
        domain.device = Some(device);
        let committed = domain.committed.as_ref().filter(|_| matches!(mode, Mode::Read | Mode::Update));
        let version = committed.map_or(0, |committed| committed.version);
        let layout = committed.map(|committed| committed.layout.clone()).unwrap_or_default();
        if mode == Mode::Read {
            domain.readers.insert(id, version);
        } else {
            domain.writer = Some(id);
        }
        let role = RoleState {
            token,
            domain: name.clone(),
            device,
            mode,
            version,
            layout,
            puts: Puts::default(),
            allow_update,
            lends,
            began: false,
            asleep: false,
        };
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

    pub(super) fn record_role(&mut self, id: ClientId) {
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
            asleep: role.asleep,
            process: client.process,
            user: client.peer.user,
            pid: client.peer.pid,
            start: client.peer.start,
        })));
    }

    pub(super) fn answer_opened(&mut self, id: ClientId) {
        let Some(role) = self.clients.get(&id).and_then(|client| client.role.as_ref()) else { return };
        let version = self.domains.get(&role.domain).and_then(|domain| domain.version(role.version));
        let hash = version.map_or([0; 16], |version| version.hash);
        let answer = Answer::Opened {
            writes: role.writes(),
            version: role.version,
            hash: hash.to_vec(),
            allocations: role.layout.allocations.len() as u64,
            entries: role.layout.keys.len() as u64,
            bytes: role.layout.bytes(),
            token: role.token.to_vec(),
        };
        self.effects.push(Effect::Answer(id, answer));
    }

    /// A sign of life of the keeper.
    pub(super) fn ping(&mut self, id: ClientId) -> Outcome {
        if self.orphaned {
            return Err(keeper_gone());
        }
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        client.wait = Some((Wait::Keeper, None));
        self.order(Order::Ping, Pending::Ping { client: id });
        Ok(None)
    }

    /// A reader has given its import back.
    pub(super) fn sleep(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = any_role(client)?;
        if role.writes() {
            return Err(error(Code::Invalid, "sleep: this connection writes", "commit first"));
        }
        if self.orphaned {
            return Err(keeper_gone());
        }
        if !std::mem::replace(&mut role.asleep, true) {
            let name = role.domain.clone();
            self.record_role(id);
            self.event(Some(&name), format!("process {process} sleeps"));
            self.admit(&name);
        }
        Ok(Some(Answer::Done {}))
    }

    /// A reader that sleeps wants to import again.
    pub(super) fn wake(&mut self, id: ClientId, wait_ms: u64, now: Instant) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = any_role(client)?;
        if role.writes() {
            return Err(error(Code::Invalid, "wake: this connection writes", "only readers sleep"));
        }
        if !role.asleep {
            self.answer_opened(id);
            return Ok(None);
        }
        let name = role.domain.clone();
        let deadline = now.checked_add(Duration::from_millis(wait_ms));
        client.wait = Some((Wait::Wake { domain: name.clone() }, deadline));
        if let Some(domain) = self.domains.get_mut(&name) {
            domain.waking.push(id);
        }
        self.wake_sleepers(&name);
        if self.clients.get(&id).is_none_or(|client| client.wait.is_none()) {
            return Ok(None);
        }
        let reason = self.obstacle(&name, Mode::Read);
        if wait_ms == 0 {
            return Err(self.give_up(id, now).unwrap_or_else(|| error(Code::Timeout, reason, "wait for it")));
        }
        self.event(Some(&name), format!("process {process} waits with its waking: {reason}"));
        Ok(Some(waiting(reason)))
    }

    /// Lets readers wake, unless what they read is being changed in place.
    fn wake_sleepers(&mut self, name: &DomainName) {
        let Some(domain) = self.domains.get(name) else { return };
        let updated = domain.committed.as_ref().filter(|_| self.is_updated(domain)).map(|it| it.version);
        let read = |id: &ClientId| domain.readers.get(id).copied();
        let ready = domain.waking.iter().copied().filter(|id| updated.is_none() || read(id) != updated);
        let dirty = |id: ClientId| read(&id).and_then(|version| domain.version(version)).is_some_and(|it| it.dirty);
        for (id, dirty) in ready.map(|id| (id, dirty(id))).collect::<Vec<_>>() {
            self.leave_queue(id, name);
            self.unwait(id);
            if dirty {
                self.effects.push(Effect::Answer(id, Answer::Error(dirty_memory(name))));
                continue;
            }
            let Some(client) = self.clients.get_mut(&id) else { continue };
            let process = client.process;
            if let Some(role) = &mut client.role {
                role.asleep = false;
            }
            self.record_role(id);
            self.event(Some(name), format!("process {process} wakes"));
            self.answer_opened(id);
        }
    }

    pub(super) fn resume(&mut self, id: ClientId, token: &[u8]) -> Outcome {
        let Some(client) = self.clients.get(&id) else { return Ok(None) };
        if client.role.is_some() {
            return Err(error(Code::Protocol, "resume: this connection has a role already", "use another connection"));
        }
        let same = |other: &ClientState| {
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

    /// Ends the role of a connection that stays.
    pub(super) fn close(&mut self, id: ClientId, now: Instant) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let (process, user) = (client.process, client.peer.user);
        if let Some(role) = client.role.take() {
            client.asked.clear();
            self.end_role(id, process, user, role);
            self.feed_all(now);
        }
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
            Some((Wait::Wake { domain }, _)) => self.leave_queue(id, &domain),
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
            self.end_role(id, client.process, client.peer.user, role);
        }
        self.feed_all(now);
        std::mem::take(&mut self.effects)
    }

    fn end_role(&mut self, id: ClientId, process: i32, user: u32, role: RoleState) {
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
                self.release(user, &name, role.device, &role.layout.allocations);
                let text = format!("process {process} ended without a commit, and {} were dropped", Bytes(bytes));
                self.event(Some(&name), text);
            }
        }
        self.admit(&name);
        self.forget_if_unused(&name);
    }
}

fn other_device(name: &DomainName, bound_to: u32, device: u32) -> ServiceError {
    let problem = format!("{name} is on NPU {bound_to} (physical id), and this process uses NPU {device}");
    error(Code::OtherDevice, problem, "use that NPU, or another domain for this one")
}

fn dirty_memory(name: &DomainName) -> ServiceError {
    let problem = format!("a writer of {name} ended while it changed the memory in place");
    error(Code::Dirty, problem, "its contents are not whole: write the domain again")
}

/// True if two names of NPUs do not differ in a part that both have.
fn same_npu(one: &str, other: &str) -> bool {
    let parts = |name: &str| {
        let (rest, sdid) = name.split_once('@').map_or((name, ""), |(rest, sdid)| (rest, sdid));
        let (pci, physical) = rest.split_once('/').unwrap_or((rest, ""));
        [if pci == "-" { "" } else { pci }, physical, sdid].map(str::to_owned)
    };
    parts(one).iter().zip(parts(other)).all(|(one, other)| one.is_empty() || other.is_empty() || *one == other)
}
