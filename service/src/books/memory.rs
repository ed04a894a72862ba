//! Memory: who gets it, who waits for it, who pays for it, and who gives it back.

use super::{Books, ClientId, Effect, Held, Kept, Order, Outcome, Pending, RETRY, Wait, any_role, error, writer};
use crate::journal::Record;
use crate::layout::{ALLOCATIONS_MAX, Allocation, PageSize, TAG_MAX};
use crate::name::DomainName;
use crate::protocol::{Answer, Code, Mode, PAGE_MAX, Share};
use ascend_vmm::Bytes;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Most bytes of an allocation: more than any machine has, and far from where sums overflow.
const ALLOCATION_MAX: u64 = 1 << 46;

impl Books {
    pub(super) fn allocate(
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
    pub(super) fn create(&mut self, id: ClientId) -> Outcome {
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

    pub(super) fn order(&mut self, order: Order, pending: Pending) {
        self.last_order += 1;
        self.pending.insert(self.last_order, pending);
        self.effects.push(Effect::Keep(self.last_order, order));
    }

    pub(super) fn charge(&mut self, user: u32, domain: &DomainName, device: u32, size: u64) {
        for (quota, used) in self.policy.quotas.iter().zip(&mut self.used) {
            if quota.counts(user, domain) {
                *used += size;
            }
        }
        self.memory.entry(device).or_default().held += size;
    }

    pub(super) fn refund(&mut self, user: u32, domain: &DomainName, device: u32, size: u64) {
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

    pub(super) fn trusted(&mut self, client: ClientId, ids: &[u64], kept: Kept) {
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
    pub(super) fn created(
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
    pub(super) fn shortage(&self, name: &DomainName, device: u32, asked: u64) -> String {
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
    pub(super) fn feed(&mut self, device: u32, _now: Instant) {
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

    pub(super) fn feed_all(&mut self, now: Instant) {
        let devices: Vec<u32> = self.hungry.iter().filter(|(_, queue)| !queue.is_empty()).map(|(it, _)| *it).collect();
        for device in devices {
            self.feed(device, now);
        }
    }

    /// Asks those who lend to give memory back.
    pub(super) fn reclaim(&mut self, device: u32, bytes: u64, now: Instant) {
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

    pub(super) fn release(&mut self, id: u64) {
        if let Some(held) = self.held.remove(&id) {
            self.refund(held.user, &held.domain, held.device, held.size);
            self.order(Order::Release { id }, Pending::Release);
        }
    }

    pub(super) fn free(&mut self, id: ClientId, ids: &[u64]) -> Outcome {
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

    pub(super) fn shares(&mut self, id: ClientId, ids: Vec<u64>) -> Outcome {
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

    pub(super) fn share_list(&self, ids: &[u64]) -> Answer {
        let share = |id: &u64| {
            let held = self.held.get(id)?;
            Some(Share { allocation: *id, handle: held.handle, ticket: held.ticket.to_vec() })
        };
        Answer::Shares { shares: ids.iter().filter_map(share).collect() }
    }
}
