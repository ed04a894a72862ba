//! Module `TSDRV`: the task scheduler of each device, with its ids and queues.
//!
//! A file is one process's context on one device, and ends with everything that the process has
//! there. From the driver's `trsdrv/trs/trs_core` (in 8.5.0 `trs/trs_core`) and, for tasks,
//! `ts_agent`. Queues are never mapped, so every task is sent by SQCQ_SEND: the driver does so
//! where a mapping fails. What the device makes of a task is in [`task`].

mod queue;
mod task;

use crate::caller::{Caller, Outcome};
use crate::config::Attachment;
use crate::driver::FileId;
use crate::esched::Notice;
use crate::machine::Machine;
use crate::svm::Svm;
use ascend_ioctl::command::number;
use ascend_ioctl::tsdrv::{self as ioctl, CloseType, HardwareInfo, ResourceId, SsidQuery};
use ascend_ioctl::uda::MAX_PHYSICAL;
use nix::errno::Errno;
use queue::{LogicalQueue, Queue};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Processes of a device (`TRS_PROC_CTX_MAX_NUM`).
const CONTEXTS: usize = 64;
/// How often a waiting call looks again, for what another process does.
const GLANCE: Duration = Duration::from_millis(2);

/// Flags of RES_ID_ALLOC: the id is chosen by the caller.
const SPECIFIED: u32 = 1 << 1;
/// Properties of RES_ID_CFG.
const BIND: i32 = 0;
const UNBIND: i32 = 1;
const RECORD: i32 = 2;
const RESET: i32 = 4;
/// Kinds of a close.
const CLOSE_TYPES: u32 = 2;
/// Registers of 4 bytes, so many in each slice of 64 KiB.
const NOTIFY_SLICE: u32 = 512;
const EVENT_SLICE: u32 = 4096;
/// The average room of a notify's register.
const NOTIFY_ROOM: u32 = 128;

/// How many ids there are of a kind. The device tells, so these are made up, within what the fields
/// of tasks and reports hold: 11 bits for a queue, 13 for a notify, 16 for an event.
fn capacity(kind: i32) -> u32 {
    match kind {
        ioctl::ID_STREAM | ioctl::ID_MODEL | ioctl::QUEUE_SUBMISSION | ioctl::QUEUE_COMPLETION => 2048,
        ioctl::ID_EVENT => 65536,
        ioctl::ID_NOTIFY => 8192,
        ioctl::ID_CMO => 64,
        ioctl::QUEUE_LOGICAL => 1024,
        queue::CALLBACK_SUBMISSION | queue::CALLBACK_COMPLETION => 128,
        _ => 0,
    }
}

/// The scheduler of a device.
#[derive(Debug, Default)]
struct Scheduler {
    /// Owners by kind and id.
    ids: BTreeMap<(i32, u32), i32>,
    /// The logical CQ of a stream.
    bound: BTreeMap<u32, u32>,
    /// Submission queues, each with a completion queue of the same number.
    queues: BTreeMap<u32, Queue>,
    logical: BTreeMap<u32, LogicalQueue>,
    /// Threads of queues for host functions.
    callbacks: BTreeMap<u32, u32>,
    /// Events that happened, and notifies that nobody took.
    events: BTreeSet<u32>,
    notifies: BTreeSet<u32>,
}

/// What a process has on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Context {
    tgid: i32,
    device: u32,
}

/// What clients have of the task schedulers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TasksState {
    /// Ids of streams, events, notifies, models and cache operations.
    pub ids: usize,
    /// Queues of tasks, and of reports that clients read.
    pub queues: usize,
    /// Tasks that were sent and not carried out.
    pub waiting: usize,
}

/// State of the module.
#[derive(Debug, Default)]
pub(crate) struct Tsdrv {
    contexts: BTreeMap<FileId, Context>,
    schedulers: BTreeMap<u32, Scheduler>,
    /// Messages that the last call sent to processes of the host.
    pub notices: Vec<Notice>,
}

/// A call on a context.
struct Call<'a, 'm> {
    machine: &'a mut Machine,
    svm: &'a mut Svm,
    caller: &'a Caller<'m>,
    device: u32,
    scheduler: &'a mut Scheduler,
    notices: &'a mut Vec<Notice>,
}

impl Tsdrv {
    /// OPEN of the module.
    pub fn open(&mut self, machine: &Machine, caller: &Caller, file: FileId, device: u32) -> Result<i64, Errno> {
        reachable(machine, caller, device)?;
        let of_device = || self.contexts.values().filter(|context| context.device == device);
        if of_device().any(|context| context.tgid == caller.tgid) {
            return Err(Errno::EEXIST);
        }
        if of_device().count() >= CONTEXTS {
            return Err(Errno::EMFILE);
        }
        self.contexts.insert(file, Context { tgid: caller.tgid, device });
        Ok(0)
    }

    /// OPEN of `TSDRV_MMAP`, which wants a context.
    pub fn open_mmap(&self, machine: &Machine, caller: &Caller, device: u32) -> Result<i64, Errno> {
        reachable(machine, caller, device)?;
        let wanted = Context { tgid: caller.tgid, device };
        self.contexts.values().find(|context| **context == wanted).map(|_| 0).ok_or(Errno::ESRCH)
    }

    /// The last reference to a file is gone.
    pub fn release(&mut self, file: FileId) {
        let Some(context) = self.contexts.remove(&file) else { return };
        if let Some(scheduler) = self.schedulers.get_mut(&context.device) {
            scheduler.forget(context.tgid);
        }
    }

    /// What clients have.
    pub fn state(&self) -> TasksState {
        let all = self.schedulers.values();
        let sum = |count: fn(&Scheduler) -> usize| all.clone().map(count).sum();
        TasksState {
            ids: sum(|it| it.ids.keys().filter(|(kind, _)| *kind < ioctl::QUEUE_SUBMISSION).count()),
            queues: sum(|it| it.queues.len() + it.logical.len()),
            waiting: sum(|it| it.queues.values().map(Queue::waiting).sum()),
        }
    }

    /// ioctl(2) on a file that is bound to the module.
    pub fn ioctl(
        &mut self,
        machine: &mut Machine,
        svm: &mut Svm,
        caller: &Caller,
        file: FileId,
        request: u32,
        arg: u64,
    ) -> Outcome {
        let number = number(request);
        // 14 has no handler.
        if number >= ioctl::NUMBERS || number == 14 {
            return Errno::EOPNOTSUPP.into();
        }
        if arg == 0 {
            return Errno::EINVAL.into();
        }
        let Some(&Context { tgid, device }) = self.contexts.get(&file) else { return Errno::EINVAL.into() };
        // Ids belong to the context, so to the process that opened the file.
        let owner = Caller { tgid, ..*caller };
        if machine.device(device).is_none_or(|device| !device.answers()) {
            return Errno::ENODEV.into();
        }
        let scheduler = self.schedulers.entry(device).or_default();
        let mut call = Call { machine, svm, caller: &owner, device, scheduler, notices: &mut self.notices };
        match number {
            0..=10 => call.on_ids(number, arg).into(),
            11 => call.write(arg + offset_of!(SsidQuery, ssid) as u64, &tgid).into(),
            12 => call.hardware(arg).into(),
            15 => call.alloc(arg).into(),
            16 => call.free(arg).into(),
            17 => call.config(arg).into(),
            18 => call.query(arg).into(),
            19 => call.send(arg),
            20 => call.receive(arg),
            // The link of Ascend950; without it the driver does nothing.
            25 => Ok(0).into(),
            26 => call.close_type(arg).into(),
            _ => Errno::EOPNOTSUPP.into(),
        }
    }
}

/// Whether the caller may open a device. The scheduler exists once the device is up.
fn reachable(machine: &Machine, caller: &Caller, device: u32) -> Result<(), Errno> {
    let up = device < MAX_PHYSICAL && machine.device(device).is_some_and(|it| it.answers());
    if up && machine.may_use(caller, device) { Ok(()) } else { Err(Errno::EINVAL) }
}

impl Scheduler {
    /// Whether a process has an id.
    fn has(&self, tgid: i32, kind: i32, id: u32) -> bool {
        self.ids.get(&(kind, id)) == Some(&tgid)
    }

    /// How many ids of a kind are taken.
    fn taken(&self, kind: i32) -> u32 {
        self.ids.range((kind, 0)..=(kind, u32::MAX)).count() as u32
    }

    /// Takes the lowest free id of a kind.
    fn take(&mut self, tgid: i32, kind: i32) -> Result<u32, Errno> {
        let mut taken = self.ids.range((kind, 0)..=(kind, u32::MAX)).map(|((_, id), _)| *id);
        let free = (0..capacity(kind)).find(|id| taken.next() != Some(*id)).ok_or(Errno::ENOSPC)?;
        self.ids.insert((kind, free), tgid);
        Ok(free)
    }

    fn give_back(&mut self, kind: i32, id: u32) {
        self.ids.remove(&(kind, id));
        match kind {
            ioctl::ID_STREAM => drop(self.bound.remove(&id)),
            ioctl::ID_EVENT => drop(self.events.remove(&id)),
            ioctl::ID_NOTIFY => drop(self.notifies.remove(&id)),
            ioctl::QUEUE_SUBMISSION => drop(self.queues.remove(&id)),
            ioctl::QUEUE_LOGICAL => drop(self.logical.remove(&id)),
            queue::CALLBACK_COMPLETION => drop(self.callbacks.remove(&id)),
            _ => {}
        }
    }

    /// A process has gone.
    fn forget(&mut self, tgid: i32) {
        let ids: Vec<_> = self.ids.iter().filter(|(_, owner)| **owner == tgid).map(|(id, _)| *id).collect();
        for (kind, id) in ids {
            self.give_back(kind, id);
        }
    }
}

impl Call<'_, '_> {
    /// Copies an argument in.
    fn read<T: FromBytes + IntoBytes>(&self, address: u64) -> Result<T, Errno> {
        let mut value = T::new_zeroed();
        self.caller.memory.read(address, value.as_mut_bytes()).map_err(|_| Errno::EFAULT)?;
        Ok(value)
    }

    /// Copies an answer out.
    fn write<T: IntoBytes + Immutable>(&self, address: u64, value: &T) -> Result<i64, Errno> {
        self.caller.memory.write(address, value.as_bytes()).map_err(|_| Errno::EFAULT)?;
        Ok(0)
    }

    /// There is one scheduler on a device.
    fn only_scheduler(scheduler: u32) -> Result<(), Errno> {
        if scheduler == 0 { Ok(()) } else { Err(Errno::EINVAL) }
    }

    fn has(&self, kind: i32, id: u32) -> Result<(), Errno> {
        if self.scheduler.has(self.caller.tgid, kind, id) { Ok(()) } else { Err(Errno::EINVAL) }
    }

    /// The commands on ids.
    fn on_ids(&mut self, number: u8, address: u64) -> Result<i64, Errno> {
        let mut para: ResourceId = self.read(address)?;
        let is_query = (4..=9).contains(&number);
        let kinds = if is_query { ioctl::KINDS } else { ioctl::QUEUE_SUBMISSION };
        if !(0..kinds).contains(&para.kind) {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        let (kind, tgid) = (para.kind, self.caller.tgid);
        match number {
            0 => {
                para.id = self.new_id(&para)?;
                para.value = [0; 2];
                self.write(address + offset_of!(ResourceId, id) as u64, &para.id)?;
                return self.write(address + offset_of!(ResourceId, value) as u64, &para.value);
            }
            1 => {
                self.has(kind, para.id)?;
                self.scheduler.give_back(kind, para.id);
            }
            2 | 3 => {
                if kind != ioctl::ID_STREAM {
                    return Err(Errno::EOPNOTSUPP);
                }
                self.has(kind, para.id)?;
            }
            4 | 5 => para.para = capacity(kind),
            6 => para.para = self.scheduler.ids.iter().filter(|(id, it)| id.0 == kind && **it == tgid).count() as u32,
            7 => para.para = capacity(kind) - self.scheduler.taken(kind),
            8 | 9 => para.para = register(kind, para.id, number == 9)?,
            _ => self.configure_id(&para)?,
        }
        if is_query {
            self.write(address + offset_of!(ResourceId, para) as u64, &para.para)?;
        }
        Ok(0)
    }

    fn new_id(&mut self, para: &ResourceId) -> Result<u32, Errno> {
        let (kind, tgid) = (para.kind, self.caller.tgid);
        if para.flag & SPECIFIED == 0 {
            return self.scheduler.take(tgid, kind);
        }
        if para.para >= capacity(kind) || self.scheduler.ids.contains_key(&(kind, para.para)) {
            return Err(Errno::EINVAL);
        }
        self.scheduler.ids.insert((kind, para.para), tgid);
        Ok(para.para)
    }

    /// RES_ID_CFG.
    fn configure_id(&mut self, para: &ResourceId) -> Result<(), Errno> {
        let id = para.id;
        match para.kind {
            ioctl::ID_STREAM => {
                self.has(para.kind, id)?;
                match para.property {
                    BIND => {
                        self.has(ioctl::QUEUE_LOGICAL, para.para)?;
                        self.scheduler.bound.insert(id, para.para);
                    }
                    UNBIND => drop(self.scheduler.bound.remove(&id)),
                    _ => return Err(Errno::EOPNOTSUPP),
                }
            }
            ioctl::ID_EVENT | ioctl::ID_NOTIFY => {
                let tgid = self.caller.tgid;
                let Scheduler { ids, events, notifies, .. } = &mut *self.scheduler;
                let set = if para.kind == ioctl::ID_EVENT { events } else { notifies };
                // All ids of the process.
                if para.property == RESET && id == u32::MAX {
                    set.retain(|id| ids.get(&(para.kind, *id)) != Some(&tgid));
                    return Ok(());
                }
                if ids.get(&(para.kind, id)) != Some(&tgid) {
                    return Err(Errno::EINVAL);
                }
                match para.property {
                    RECORD => drop(set.insert(id)),
                    RESET => drop(set.remove(&id)),
                    _ => return Err(Errno::EOPNOTSUPP),
                }
                self.run();
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        Ok(())
    }

    /// HW_INFO_QUERY. The reserved fields are not written.
    fn hardware(&self, address: u64) -> Result<i64, Errno> {
        let hccs = self.machine.config.attachment == Attachment::Hccs;
        let connection = if hccs { ioctl::CONNECTION_HCCS } else { ioctl::CONNECTION_PCIE };
        let info = HardwareInfo { kind: ioctl::HARDWARE_STARS, schedulers: 1, connection, ..Default::default() };
        let written = &info.as_bytes()[..offset_of!(HardwareInfo, reserved)];
        self.caller.memory.write(address, written).map_err(|_| Errno::EFAULT)?;
        Ok(0)
    }

    fn close_type(&self, address: u64) -> Result<i64, Errno> {
        let para: CloseType = self.read(address)?;
        if para.kind >= CLOSE_TYPES {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        Ok(0)
    }

    /// When a waiting call looks again.
    fn glance(&self, until: Option<Instant>) -> Outcome {
        let next = Instant::now() + GLANCE;
        Outcome::Wait(until.map_or(next, |until| until.min(next)))
    }
}

/// Where the register of an id is, or how large the registers of its kind are.
fn register(kind: i32, id: u32, size: bool) -> Result<u32, Errno> {
    if !(kind == ioctl::ID_NOTIFY || kind == ioctl::ID_EVENT) || (!size && id >= capacity(kind)) {
        return Err(Errno::EINVAL);
    }
    match (kind, size) {
        (ioctl::ID_NOTIFY, true) => Ok(capacity(kind) * NOTIFY_ROOM),
        (_, true) => Err(Errno::ENODEV),
        (ioctl::ID_NOTIFY, false) => Ok(id % NOTIFY_SLICE * 4 + id / NOTIFY_SLICE * 0x1_0000),
        (_, false) => Ok(id % EVENT_SLICE * 4 + id / EVENT_SLICE * 0x1_0000),
    }
}
