//! Memory: who gets it, who waits for it, who pays for it, and who gives it back.

use super::{
    Books, ClientId, Effect, Kept, Order, Outcome, Pending, RETRY, RoleState, Wait, any_role, error, keeper_gone,
    writer,
};
use crate::journal::Record;
use crate::layout::{ALLOCATIONS_MAX, Allocation, TAG_MAX};
use crate::name::DomainName;
use crate::protocol::{Answer, Code, Mode, PAGE_MAX, ServiceError, Share, Waiting};
use ascend_vmm::Bytes;
use ascend_vmm::share::ShareableHandle;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Most bytes of an allocation: more than any machine has, and far from where sums overflow.
const ALLOCATION_MAX: u64 = 1 << 46;
/// Numbers of allocations that a writer asks for are below this: those that follow have room.
const NUMBER_END: u64 = 1 << 60;
/// Most processes on the list of a version. The driver has room for 65 535 in the life of a share;
/// its writer, and processes that ended in the middle of a request, are on it besides.
pub(super) const LIST_MAX: usize = 65_000;

impl Books {
    pub(super) fn allocate(&mut self, id: ClientId, wait: Wait, wait_ms: u64, now: Instant) -> Outcome {
        let Wait::Memory { size, page, ref tag, .. } = wait else { return Ok(None) };
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let role = writer(client)?;
        if self.orphaned {
            return Err(keeper_gone());
        }
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
        client.wait = Some((wait, (wait_ms > 0).then(|| now.checked_add(Duration::from_millis(wait_ms))).flatten()));
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
        self.announce_hunger(id);
        self.tell_the_hungry(device);
        Ok(None)
    }

    /// An event for a client that begins to wait for memory.
    fn announce_hunger(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let (Some((Wait::Memory { size, .. }, _)), Some(role)) = (&client.wait, &client.role) else { return };
        let (name, process) = (role.domain.clone(), client.process);
        let reason = self.shortage(&name, role.device, *size);
        self.event(Some(&name), format!("process {process} waits for memory: {reason}"));
    }

    /// Tells those who wait for memory of an NPU what changed for them.
    fn tell_the_hungry(&mut self, device: u32) {
        let free = self.memory.get(&device).map_or(0, |memory| memory.free);
        let queue: Vec<ClientId> = self.hungry.get(&device).into_iter().flatten().copied().collect();
        for (before, id) in queue.into_iter().enumerate() {
            let Some(client) = self.clients.get(&id) else { continue };
            let (Some((Wait::Memory { size, .. }, _)), Some(role)) = (&client.wait, &client.role) else { continue };
            let mut reason = self.shortage(&role.domain, device, *size);
            if before > 0 {
                reason += &format!("; {before} are served before");
            }
            let news = Waiting { reason, before: before as u64, wanted: *size, free };
            let Some(client) = self.clients.get_mut(&id) else { continue };
            let Some((Wait::Memory { told, .. }, _)) = &mut client.wait else { continue };
            if told.as_ref() != Some(&news) {
                *told = Some(news.clone());
                self.effects.push(Effect::Answer(id, Answer::Waiting(news)));
            }
        }
    }

    /// Asks the keeper for what a client waits for.
    pub(super) fn create(&mut self, id: ClientId) -> Outcome {
        let Some(client) = self.clients.get(&id) else { return Ok(None) };
        let (Some((Wait::Memory { size, page, tag, id: number, .. }, _)), Some(role)) = (&client.wait, &client.role)
        else {
            return Ok(None);
        };
        let last = role.layout.allocations.last().map_or(0, |last| last.id);
        let number = number.filter(|&number| number > last && number < NUMBER_END);
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
            self.unwait(id);
            let problem = format!("NPU {device} is not served any more");
            return Err(error(Code::OtherDevice, problem, "open the domain on another NPU"));
        };
        let number = number.unwrap_or(self.last_id + 1);
        self.last_id = self.last_id.max(number);
        let allocation = Allocation { id: number, size, page, tag: tag.clone() };
        self.charge(user, &domain, device, size);
        let everyone = self.policy.trust_everyone;
        let order = Order::Create { id: allocation.id, device: logical, size, page, everyone };
        self.order(order, Pending::Create { client: id, allocation, user, domain, device });
        Ok(None)
    }

    pub(super) fn order(&mut self, order: Order, pending: Pending) {
        if self.orphaned {
            return;
        }
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
                if !std::mem::take(&mut memory.problem).is_empty() {
                    self.event(None, format!("NPU {device} answers again: what was on it before a reset is lost"));
                }
                self.tell_the_hungry(device);
            }
            (Some(Pending::Memory { device }), Kept::Refused { text }) => {
                let memory = self.memory.entry(device).or_default();
                if std::mem::replace(&mut memory.problem, text.clone()).is_empty() {
                    self.event(None, format!("NPU {device} does not answer: {text}"));
                }
            }
            (Some(Pending::Ping { client }), _) if self.unwait(client).is_some() => {
                self.effects.push(Effect::Answer(client, Answer::Done {}));
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
            Kept::Done | Kept::Created { .. } | Kept::Memory { .. } | Kept::Taken => {
                let role = self.clients.get(&client).and_then(|client| client.role.as_ref());
                role.map_or(Answer::Shares { shares: Vec::new() }, |role| self.share_list(role, ids))
            }
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
                self.tickets.insert(device, ticket);
                let role = self.clients.get_mut(&id).filter(|_| waiting).and_then(|client| client.role.as_mut());
                match role {
                    Some(role) => {
                        let token = role.token;
                        push(Rc::make_mut(&mut role.layout.allocations), allocation.clone());
                        push(Rc::make_mut(&mut role.layout.handles), handle);
                        self.unwait(id);
                        let record = Record::Allocated { token, allocation: allocation.clone(), user };
                        self.effects.push(Effect::Record(record));
                        self.effects.push(Effect::Answer(id, Answer::Allocated { allocation }));
                    }
                    // Its writer is gone.
                    None => self.release(user, &domain, device, &[allocation]),
                }
                self.feed(device, now);
                return;
            }
            Kept::OutOfMemory { free, total, .. } => {
                let memory = self.memory.entry(device).or_default();
                memory.free = free.unwrap_or(memory.free);
                memory.total = total.unwrap_or(memory.total);
                self.never_fits(id, &domain, device, allocation.size)
            }
            Kept::Taken => {
                self.refund(user, &domain, device, allocation.size);
                let Some(client) = self.clients.get_mut(&id) else { return };
                let Some((Wait::Memory { id: number, .. }, _)) = &mut client.wait else { return };
                *number = None;
                if let Err(refused) = self.create(id) {
                    self.hungry.entry(device).or_default().retain(|&waiting| waiting != id);
                    self.effects.push(Effect::Answer(id, Answer::Error(refused)));
                }
                return;
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
                let wait = self.clients.get(&id).and_then(|client| client.wait.as_ref());
                let first_time = matches!(wait, Some((Wait::Memory { told: None, .. }, _)));
                self.tell_the_hungry(device);
                if first_time && !was_first {
                    self.announce_hunger(id);
                }
                if first_time {
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

    /// The error for memory that the NPU does not have beside what the writer keeps anyway: its own
    /// layout, and the committed one, which is served until the commit. Nobody can give that back.
    fn never_fits(&self, id: ClientId, name: &DomainName, device: u32, asked: u64) -> Option<ServiceError> {
        let total = self.memory.get(&device).map_or(0, |memory| memory.total);
        let drafted = self.clients.get(&id).and_then(|it| it.role.as_ref()).map_or(0, |role| role.layout.bytes());
        let committed = self.domains.get(name).and_then(|it| it.committed.as_ref()).map_or(0, |it| it.layout.bytes());
        if total == 0 || asked.saturating_add(drafted).saturating_add(committed) <= total {
            return None;
        }
        let problem = format!(
            "NPU {device} has {}, and there is no room for {} in addition to {} of this writer and {} that {name} has \
             committed",
            Bytes(total),
            Bytes(asked),
            Bytes(drafted),
            Bytes(committed)
        );
        let remedy = match committed {
            0 => "use less memory",
            _ => "what is committed stays until a commit: open the domain with mode discard or update",
        };
        Some(error(Code::OutOfMemory, problem, remedy))
    }

    /// A sentence with the numbers.
    pub(super) fn shortage(&self, name: &DomainName, device: u32, asked: u64) -> String {
        let memory = self.memory.get(&device).cloned().unwrap_or_default();
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
            let hungry = matches!(client.wait, Some((Wait::Memory { .. }, _)));
            if lends && client.connected && !hungry {
                client.asked.insert(number, now + self.policy.reclaim);
                let within_ms = self.policy.reclaim.as_millis() as u64;
                let ask = Answer::Reclaim { reclaim: number, bytes: missing, within_ms };
                self.effects.push(Effect::Answer(*id, ask));
            }
        }
    }

    pub(super) fn release(&mut self, user: u32, domain: &DomainName, device: u32, allocations: &[Allocation]) {
        for part in allocations.chunks(PAGE_MAX) {
            self.refund(user, domain, device, part.iter().map(|allocation| allocation.size).sum());
            let ids = part.iter().map(|allocation| allocation.id).collect();
            self.order(Order::Release { ids }, Pending::Release);
        }
    }

    pub(super) fn free(&mut self, id: ClientId, ids: &[u64]) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let user = client.peer.user;
        let role = writer(client)?;
        if role.mode == Mode::Update || !role.puts.is_empty() {
            let problem = "free: the layout has entries, or is changed in place";
            return Err(error(Code::Invalid, problem, "free memory before the first put"));
        }
        let known = |id: &u64| role.layout.allocations.binary_search_by_key(id, |it| it.id).is_ok();
        if let Some(unknown) = ids.iter().find(|id| !known(id)) {
            let problem = format!("allocations: {unknown} is not one of this writer");
            return Err(error(Code::Invalid, problem, "nothing of this request was freed"));
        }
        let gone: BTreeSet<u64> = ids.iter().copied().collect();
        let allocations = Rc::make_mut(&mut role.layout.allocations);
        let mut stay = allocations.iter().map(|allocation| !gone.contains(&allocation.id));
        Rc::make_mut(&mut role.layout.handles).retain(|_| stay.next().unwrap_or(true));
        let freed: Vec<_> = allocations.iter().filter(|allocation| gone.contains(&allocation.id)).cloned().collect();
        allocations.retain(|allocation| !gone.contains(&allocation.id));
        let (domain, device) = (role.domain.clone(), role.device);
        self.effects.extend(gone.into_iter().map(|id| Effect::Record(Record::Freed { id })));
        self.release(user, &domain, device, &freed);
        Ok(Some(Answer::Done {}))
    }

    pub(super) fn shares(&mut self, id: ClientId, ids: Vec<u64>) -> Outcome {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let process = client.process;
        let role = any_role(client)?;
        if role.asleep {
            return Err(error(Code::Invalid, "shares: this reader sleeps", "send wake first"));
        }
        if ids.len() > PAGE_MAX {
            let problem = format!("allocations: {} at once", ids.len());
            return Err(error(Code::Invalid, problem, format!("ask for at most {PAGE_MAX}")));
        }
        let ids = match ids.is_empty() {
            true => role.layout.allocations.iter().take(PAGE_MAX).map(|allocation| allocation.id).collect(),
            false => ids,
        };
        let known = |id: &u64| role.layout.allocations.binary_search_by_key(id, |it| it.id).is_ok();
        if let Some(unknown) = ids.iter().find(|id| !known(id)) {
            let problem = format!("allocations: {unknown} is not in this layout");
            return Err(error(Code::Invalid, problem, "read the layout again"));
        }
        // After the keeper's death, the driver lets those import who are on its list.
        if self.policy.trust_everyone || self.orphaned || ids.is_empty() {
            let role = self.clients.get(&id).and_then(|client| client.role.as_ref());
            return Ok(role.map(|role| self.share_list(role, &ids)));
        }
        let (name, version) = (role.domain.clone(), role.version);
        self.list(&name, version, process)?;
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        client.wait = Some((Wait::Keeper, None));
        self.order(Order::Trust { client: id, process, ids: ids.clone() }, Pending::Trust { client: id, ids });
        Ok(None)
    }

    /// Counts the processes on the driver's list of a version: the list has an end.
    fn list(&mut self, name: &DomainName, version: u64, process: i32) -> Result<(), ServiceError> {
        // What is not committed has its writer on the list, and nobody else.
        if version == 0 {
            return Ok(());
        }
        let listed = self.listed.entry(version).or_default();
        if listed.contains(&process) {
            return Ok(());
        }
        if listed.len() >= LIST_MAX {
            let problem = format!("{LIST_MAX} processes have imported version {version} of {name}: the list is full");
            let remedy = "write and commit it again: new memory has a new list";
            return Err(error(Code::ListFull, problem, remedy));
        }
        listed.insert(process);
        let count = listed.len();
        self.effects.push(Effect::Record(Record::Listed { version, processes: vec![process] }));
        if count == LIST_MAX / 4 * 3 {
            let text = format!("{count} of {LIST_MAX} processes have imported version {version}: commit it anew soon");
            self.event(Some(name), text);
        }
        Ok(())
    }

    /// The keeper is gone: nothing new can be allocated or committed. What somebody maps can still
    /// be read by those whom the driver lets import it.
    pub(crate) fn orphan(&mut self) -> Vec<Effect> {
        self.event(None, "the keeper is gone: what nobody maps is lost".into());
        self.pending.clear();
        self.hungry.clear();
        let waiting: Vec<ClientId> = self.clients.keys().copied().collect();
        self.orphaned = true;
        for id in waiting {
            let hopeless = match self.clients.get(&id).and_then(|client| client.wait.as_ref()) {
                Some((Wait::Keeper | Wait::Memory { .. }, _)) => true,
                Some((Wait::Role { mode, .. }, _)) => *mode != Mode::Read,
                _ => false,
            };
            if hopeless {
                if let Some((Wait::Role { domain, .. }, _)) = self.clients.get(&id).and_then(|it| it.wait.as_ref()) {
                    let domain = domain.clone();
                    self.leave_queue(id, &domain);
                    self.admit(&domain);
                }
                self.unwait(id);
                self.effects.push(Effect::Answer(id, Answer::Error(keeper_gone())));
            }
        }
        std::mem::take(&mut self.effects)
    }

    /// True while a client has a role, and may map memory.
    pub(crate) fn has_roles(&self) -> bool {
        self.clients.values().any(|client| client.role.is_some())
    }

    fn share_list(&self, role: &RoleState, ids: &[u64]) -> Answer {
        let share = |&id: &u64| {
            let place = role.layout.allocations.binary_search_by_key(&id, |it| it.id).ok()?;
            let (allocation, handle) = (&role.layout.allocations[place], *role.layout.handles.get(place)?);
            let mut ticket = *self.tickets.get(&role.device)?;
            (ticket.size, ticket.page) = (allocation.size, allocation.page.into());
            ticket.handle = ShareableHandle::from_u64(handle)?;
            Some(Share { allocation: id, handle, ticket: ticket.to_bytes().to_vec() })
        };
        Answer::Shares { shares: ids.iter().filter_map(share).collect() }
    }
}

/// Adds to a list that may become long, and leaves little room behind it.
fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == list.capacity() {
        list.reserve_exact(list.len() / 8 + 4);
    }
    list.push(item);
}
