//! Versions: committed, changed in place, waited for and removed.

use super::{
    Books, ClientId, Committed, Effect, Outcome, Served, Wait, error, keeper_gone, unix_time, unreadable, waiting,
    writer,
};
use crate::journal::Record;
use crate::layout::hash_of;
use crate::name::DomainName;
use crate::protocol::{Answer, Code, Mode};
use ascend_vmm::Bytes;
use std::rc::Rc;
use std::time::{Duration, Instant};

impl Books {
    pub(super) fn begin(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = writer(client)?;
        if self.orphaned {
            return Err(keeper_gone());
        }
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

    pub(super) fn commit(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let (process, writer_user) = (client.process, client.peer.user);
        let role = writer(client)?;
        if self.orphaned {
            return Err(keeper_gone());
        }
        let layout = &mut role.layout;
        if layout.allocations.is_empty() {
            return Err(error(Code::Invalid, "commit: nothing was allocated", "allocate and write first"));
        }
        if let (Some(allocations), Some(handles)) =
            (Rc::get_mut(&mut layout.allocations), Rc::get_mut(&mut layout.handles))
        {
            allocations.shrink_to_fit();
            handles.shrink_to_fit();
        }
        let keys = role.puts.commit(&layout.keys).map_err(unreadable)?;
        let keys = keys.map_err(|bad| error(Code::Invalid, bad.to_string(), "nothing was committed"))?;
        let mut hasher = hash_of(&layout.allocations);
        keys.each_part(|part| hasher.write(part)).map_err(unreadable)?;
        let hash = hasher.finish_128().to_le_bytes();
        layout.keys = Rc::new(keys);
        self.last_version += 1;
        let version = self.last_version;
        let (layout, token, name, device) = (role.layout.clone(), role.token, role.domain.clone(), role.device);
        let update = role.mode == Mode::Update;
        (role.mode, role.version, role.began) = (Mode::Read, version, false);
        let time = unix_time();
        let Some(domain) = self.domains.get_mut(&name) else { return Ok(None) };
        // Whoever changes memory in place does not pay for it.
        let user = domain.committed.as_ref().filter(|_| update).map_or(writer_user, |before| before.user);
        self.effects.push(Effect::Record(Record::Committed {
            domain: name.clone(),
            writer: Some(token),
            version,
            device,
            user,
            time,
            hash,
            allocations: layout.allocations.clone(),
            keys: layout.keys.clone(),
        }));
        let newer = Committed { layout: layout.clone(), user, hash, version, dirty: false, time };
        let before = domain.committed.replace(newer);
        domain.writer = None;
        domain.readers.insert(id, version);
        if let Some(before) = before {
            if update {
                // Those who stayed see the new contents, whether they look or not. The record of
                // the commit says that too: a front may be killed between two records.
                let stayed: Vec<_> =
                    domain.readers.iter().filter(|(_, of)| **of == before.version).map(|(it, _)| *it).collect();
                for reader in stayed {
                    domain.readers.insert(reader, version);
                    if let Some(role) = self.clients.get_mut(&reader).and_then(|client| client.role.as_mut()) {
                        (role.version, role.layout) = (version, layout.clone());
                    }
                }
                // It is the same memory, and its list goes on.
                if let Some(listed) = self.listed.remove(&before.version) {
                    self.listed.insert(version, listed);
                }
            } else if domain.readers_of(before.version) > 0 {
                domain.older.insert(before.version, before);
            } else {
                self.drop_committed(&name, device, &before);
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

    pub(super) fn wake_watchers(&mut self, name: &DomainName) {
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
    pub(super) fn drop_version(&mut self, name: &DomainName, version: u64) {
        let Some(domain) = self.domains.get_mut(name) else { return };
        let device = domain.device.unwrap_or_default();
        let served = || domain.committed.take_if(|committed| committed.version == version);
        if let Some(committed) = domain.older.remove(&version).or_else(served) {
            self.drop_committed(name, device, &committed);
        }
    }

    fn drop_committed(&mut self, name: &DomainName, device: u32, committed: &Committed) {
        let version = committed.version;
        self.effects.push(Effect::Record(Record::Removed { domain: name.clone(), version }));
        self.listed.remove(&version);
        let text = format!("version {version} was dropped: nobody reads it any more, and it is not served");
        self.event(Some(name), text);
        self.release(committed.user, name, device, &committed.layout.allocations);
    }

    pub(super) fn wait(
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
        let process = client.process;
        client.wait = Some((Wait::Version { domain: name.clone(), newer_than }, deadline));
        self.event(Some(&name), format!("process {process} waits for a version after {newer_than}"));
        Ok(Some(waiting(reason)))
    }

    pub(super) fn remove(&mut self, id: ClientId, name: &DomainName) -> Outcome {
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
}

pub(super) fn count(layout: &Served) -> String {
    match layout.allocations.len() {
        1 => "1 allocation".into(),
        number => format!("{number} allocations"),
    }
}
