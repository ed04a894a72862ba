//! Queues: SQCQ_ALLOC, _FREE, _CONFIG, _QUERY, _SEND and _RECV.
//!
//! A queue of tasks is a ring. The driver copies tasks to its tail and rings the device's bell; the
//! device moves the head. From `trs_hw_sqcq.c`, `trs_logic_cq.c`, `trs_cb_sqcq.c` and
//! `trsbase/chan/chan_rxtx.c`.

use super::task::{Done, Task};
use super::{Call, Scheduler};
use crate::caller::Outcome;
use crate::esched::{HOST_FUNCTION, Notice};
use ascend_ioctl::tsdrv::{
    self as ioctl, QueueAlloc, QueueConfig, QueueFree, QueueMap, QueueQuery, ReportReceive, TASK_SIZE, TaskSend,
};
use nix::errno::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::mem::offset_of;
use std::time::Duration;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Id kinds of queues for host functions.
pub(super) const CALLBACK_SUBMISSION: i32 = 10;
pub(super) const CALLBACK_COMPLETION: i32 = 11;
/// Longest extension of SQCQ_ALLOC.
const EXTENSION: u32 = 256;
/// Deepest logical CQ.
const LOGICAL_DEPTH: u32 = 64 * 1024;
/// Threads that call host functions, the group that they are in, and what a thread is told when its
/// queue is freed.
const CALLBACK_THREADS: u32 = 1024;
const CALLBACK_GROUP: u32 = 11;
const CALLBACK_FREED: u32 = 0xFEE;

/// Where the device has the registers of queues, for tasks that write there. Made up.
const REGISTERS: u64 = 0xE200_0000_0000;
const REGISTERS_SIZE: u64 = 4096;

/// What a client reads from a logical CQ (`trs_logic_cqe`).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Report {
    pub stream: u16,
    pub task: u16,
    pub error_code: u32,
    pub error_type: u8,
    pub kind: u8,
    pub queue: u16,
    pub head: u16,
    /// [`MATCHED`] and [`FAILED`].
    pub flags: u16,
    pub time: u64,
    pub reserved: u64,
}

/// The report is for whoever asks for its task.
pub(super) const MATCHED: u16 = 1;
/// The task failed.
pub(super) const FAILED: u16 = 1 << 2;

/// A queue of tasks, with the completion queue of the same number.
#[derive(Debug)]
pub(super) struct Queue {
    pub tgid: i32,
    depth: u32,
    /// By place. A place that was never filled has zeros.
    tasks: BTreeMap<u32, [u8; TASK_SIZE]>,
    pub head: u32,
    /// The driver's tail, and the one that it told the device.
    tail: u32,
    bell: u32,
    /// The device runs it.
    pub enabled: bool,
    /// The driver takes tasks.
    open: bool,
    /// There was a report since the last question.
    pub reported: bool,
}

impl Queue {
    fn new(tgid: i32, depth: u32) -> Queue {
        Queue {
            tgid,
            depth,
            tasks: BTreeMap::new(),
            head: 0,
            tail: 0,
            bell: 0,
            enabled: true,
            open: true,
            reported: false,
        }
    }

    /// Tasks that were not carried out.
    pub fn waiting(&self) -> usize {
        ((self.depth + self.bell - self.head) % self.depth) as usize
    }

    fn is_full(&self) -> bool {
        (self.tail + 1) % self.depth == self.head
    }

    fn push(&mut self, task: [u8; TASK_SIZE]) {
        self.tasks.insert(self.tail, task);
        self.tail = (self.tail + 1) % self.depth;
    }

    /// The task that the device takes next.
    pub fn next(&self) -> Option<Task> {
        let task = self.tasks.get(&self.head).copied().unwrap_or([0; TASK_SIZE]);
        (self.enabled && self.waiting() > 0).then_some(Task(task))
    }

    /// The device goes on to the next task.
    pub fn advance(&mut self) {
        self.head = (self.head + 1) % self.depth;
    }
}

/// A queue of reports.
#[derive(Debug)]
pub(super) struct LogicalQueue {
    depth: u32,
    size: u32,
    reports: VecDeque<Report>,
}

impl LogicalQueue {
    /// A report that does not fit is lost.
    pub fn push(&mut self, report: Report) {
        if self.reports.len() + 1 < self.depth as usize {
            self.reports.push_back(report);
        }
    }

    /// Which reports a question takes: where they begin and how many there are. One that is for a
    /// certain task ends the run if it is the wanted one, and is passed over before the run. A
    /// question of the old version gets all, whatever its room.
    fn wanted(&self, para: &ReportReceive) -> (usize, usize) {
        if para.reserved[0] != 1 {
            return (0, self.reports.len());
        }
        let (mut start, mut count) = (0, 0);
        for (at, report) in self.reports.iter().enumerate() {
            if count >= para.count as usize {
                break;
            }
            let for_one = report.flags & MATCHED != 0;
            let is_it = u32::from(report.stream) == para.stream && u32::from(report.task) == para.task;
            if for_one && !is_it {
                if count != 0 {
                    break;
                }
                continue;
            }
            if count == 0 {
                start = at;
            }
            count += 1;
            if for_one {
                break;
            }
        }
        (start, count)
    }
}

impl Call<'_, '_> {
    /// SQCQ_ALLOC.
    pub(super) fn alloc(&mut self, address: u64) -> Result<i64, Errno> {
        let mut para: QueueAlloc = self.read(address)?;
        let mut map: QueueMap = self.read(para.map_address())?;
        if para.kind >= ioctl::TYPES {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        let tgid = self.caller.tgid;
        match para.kind {
            ioctl::TYPE_NORMAL => {
                let unread = self.check_normal(&para)?;
                if unread != 0 {
                    return Ok(unread);
                }
                let id = self.scheduler.take(tgid, ioctl::QUEUE_SUBMISSION)?;
                self.scheduler.ids.insert((ioctl::QUEUE_COMPLETION, id), tgid);
                self.scheduler.queues.insert(id, Queue::new(tgid, para.task_depth));
                (para.submission, para.completion) = (id, id);
            }
            ioctl::TYPE_LOGICAL => {
                let (depth, size) = (para.report_depth, para.report_size);
                if !(1..=LOGICAL_DEPTH).contains(&depth) || !(1..=size_of::<Report>() as u32).contains(&size) {
                    return Err(Errno::EINVAL);
                }
                para.completion = self.scheduler.take(tgid, ioctl::QUEUE_LOGICAL)?;
                let queue = LogicalQueue { depth, size, reports: VecDeque::new() };
                self.scheduler.logical.insert(para.completion, queue);
            }
            ioctl::TYPE_CALLBACK => {
                let fits = (32..=1024).contains(&para.report_depth) && (32..=64).contains(&para.report_size);
                if !fits || para.task_size != TASK_SIZE as u32 || para.group >= CALLBACK_THREADS {
                    return Err(Errno::EINVAL);
                }
                para.submission = self.scheduler.take(tgid, CALLBACK_SUBMISSION)?;
                self.scheduler.ids.insert((CALLBACK_COMPLETION, para.submission), tgid);
                self.scheduler.callbacks.insert(para.submission, para.group);
                para.completion = para.submission;
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        (map.local, map.soft, map.mapped) = (0, 0, 0);
        self.write(address, &para)?;
        self.write(para.map_address(), &map)
    }

    /// The checks of a queue of tasks. An extension that cannot be read is answered with how many
    /// bytes are missing.
    fn check_normal(&self, para: &QueueAlloc) -> Result<i64, Errno> {
        let mut of_stream = true;
        if para.extension != 0 {
            if !(1..=EXTENSION).contains(&para.extension_length) {
                return Err(Errno::EINVAL);
            }
            let mut extension = [0; EXTENSION as usize];
            let extension = &mut extension[..para.extension_length as usize];
            if self.caller.memory.read(para.extension, extension).is_err() {
                return Ok(para.extension_length.into());
            }
            // The first word is the kind of channel; 0 is that of streams.
            of_stream = extension.iter().take(4).all(|byte| *byte == 0);
        }
        if of_stream && para.info[0] != u32::MAX {
            self.has(ioctl::ID_STREAM, para.info[0])?;
        }
        let reuse = para.flag & (ioctl::FLAG_REUSE_COMPLETION | ioctl::FLAG_REUSE_SUBMISSION) != 0;
        if reuse || para.task_size != TASK_SIZE as u32 {
            return Err(Errno::EINVAL);
        }
        // A ring of fewer than two has no room. The driver's own limit is 32 Ki.
        if (2..=32 * 1024).contains(&para.task_depth) { Ok(0) } else { Err(Errno::EINVAL) }
    }

    /// SQCQ_FREE.
    pub(super) fn free(&mut self, address: u64) -> Result<i64, Errno> {
        let para: QueueFree = self.read(address)?;
        if para.kind >= ioctl::TYPES {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        let kinds = match para.kind {
            ioctl::TYPE_NORMAL => {
                if para.flag & ioctl::FLAG_REUSE_COMPLETION != 0 {
                    return Err(Errno::EINVAL);
                }
                [(ioctl::QUEUE_SUBMISSION, para.submission), (ioctl::QUEUE_COMPLETION, para.completion)]
            }
            ioctl::TYPE_LOGICAL => [(ioctl::QUEUE_LOGICAL, para.completion); 2],
            ioctl::TYPE_CALLBACK => [(CALLBACK_SUBMISSION, para.submission), (CALLBACK_COMPLETION, para.completion)],
            _ => return Err(Errno::EOPNOTSUPP),
        };
        for (kind, id) in kinds {
            self.has(kind, id)?;
        }
        // Both must be of one pair.
        if kinds[0].1 != kinds[1].1 {
            return Err(Errno::EINVAL);
        }
        if para.kind == ioctl::TYPE_CALLBACK {
            self.notices.push(Notice {
                device: self.device,
                pid: self.caller.tgid,
                from: self.caller.tgid,
                group: CALLBACK_GROUP,
                thread: self.scheduler.callbacks.get(&para.completion).copied(),
                event: HOST_FUNCTION,
                sub_event: CALLBACK_FREED,
                message: Vec::new(),
            });
        }
        for (kind, id) in kinds {
            self.scheduler.give_back(kind, id);
        }
        Ok(0)
    }

    /// SQCQ_CONFIG.
    pub(super) fn config(&mut self, address: u64) -> Result<i64, Errno> {
        let para: QueueConfig = self.read(address)?;
        if para.kind != ioctl::TYPE_NORMAL && para.kind != ioctl::TYPE_LOGICAL {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        if para.kind == ioctl::TYPE_LOGICAL {
            if para.property != ioctl::PROPERTY_RESET {
                return Err(Errno::EOPNOTSUPP);
            }
            self.has(ioctl::QUEUE_LOGICAL, para.completion)?;
            if let Some(queue) = self.scheduler.logical.get_mut(&para.completion) {
                queue.reports.clear();
            }
            return Ok(0);
        }
        let opens = match para.property {
            ioctl::PROPERTY_PAUSE => Some(false),
            ioctl::PROPERTY_RESUME => Some(true),
            _ => None,
        };
        let tgid = self.caller.tgid;
        if let (Some(open), u32::MAX, u32::MAX) = (opens, para.submission, para.completion) {
            self.scheduler.queues.values_mut().filter(|queue| queue.tgid == tgid).for_each(|queue| queue.open = open);
            return Ok(0);
        }
        self.has(ioctl::QUEUE_SUBMISSION, para.submission)?;
        let Some(queue) = self.scheduler.queues.get_mut(&para.submission) else { return Err(Errno::EINVAL) };
        let value = para.value[0];
        match para.property {
            ioctl::PROPERTY_STATUS => queue.enabled = value != 0,
            ioctl::PROPERTY_ENABLE => queue.enabled = true,
            ioctl::PROPERTY_HEAD if value < queue.depth => queue.head = value,
            ioctl::PROPERTY_TAIL if value < queue.depth => (queue.tail, queue.bell) = (value, value),
            ioctl::PROPERTY_PAUSE | ioctl::PROPERTY_RESUME => queue.open = para.property == ioctl::PROPERTY_RESUME,
            ioctl::PROPERTY_RESET => (queue.head, queue.tail, queue.bell) = (0, 0, 0),
            _ => return Err(Errno::EINVAL),
        }
        self.run();
        Ok(0)
    }

    /// SQCQ_QUERY.
    pub(super) fn query(&mut self, address: u64) -> Result<i64, Errno> {
        // Alone among these commands it returns how many bytes it could not read.
        let Ok(para) = self.read::<QueueQuery>(address) else { return Ok(size_of::<QueueQuery>() as i64) };
        if para.kind != ioctl::TYPE_NORMAL {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        self.has(ioctl::QUEUE_SUBMISSION, para.submission)?;
        self.run();
        let Some(queue) = self.scheduler.queues.get_mut(&para.submission) else { return Err(Errno::EINVAL) };
        let value = match para.property {
            ioctl::PROPERTY_STATUS => u32::from(queue.enabled),
            ioctl::PROPERTY_HEAD => queue.head,
            ioctl::PROPERTY_TAIL => queue.tail,
            ioctl::PROPERTY_REPORTED => u32::from(std::mem::take(&mut queue.reported)),
            // The device process maps them.
            ioctl::PROPERTY_REGISTERS if !self.machine.runs_device_process(self.caller.tgid, self.device) => {
                return Err(Errno::EOPNOTSUPP);
            }
            ioctl::PROPERTY_REGISTERS => {
                let registers = REGISTERS + u64::from(para.submission) * REGISTERS_SIZE;
                let value = [(registers >> 32) as u32, registers as u32, REGISTERS_SIZE as u32];
                return self.write(address + offset_of!(QueueQuery, value) as u64, &value);
            }
            _ => return Err(Errno::EINVAL),
        };
        self.write(address + offset_of!(QueueQuery, value) as u64, &value)
    }

    /// SQCQ_SEND.
    pub(super) fn send(&mut self, address: u64) -> Outcome {
        let para = match self.sendable(address) {
            Ok(para) => para,
            Err(errno) => return errno.into(),
        };
        self.run();
        let Some(queue) = self.scheduler.queues.get(&para.submission) else { return Errno::EINVAL.into() };
        let first = queue.tail;
        let room = queue.depth - 1 - (queue.depth + queue.tail - queue.head) % queue.depth;
        // It waits before the first task that finds no room. What it has filled in by then is sent
        // later, so nothing is filled in here before there is room for all.
        if para.count > room {
            // A negative time has no end.
            let limit = u64::try_from(para.timeout).ok().map(Duration::from_millis);
            let may_run = queue.next().is_some() && para.count < queue.depth;
            if may_run && limit.is_none_or(|limit| self.caller.arrived.elapsed() < limit) {
                return self.glance(limit.map(|limit| self.caller.arrived + limit));
            }
            return Errno::ENOSPC.into();
        }
        for place in 0..u64::from(para.count) {
            let at = para.tasks.wrapping_add(place * TASK_SIZE as u64);
            let Ok(bytes) = self.read::<[u8; TASK_SIZE]>(at) else { return Errno::EINVAL.into() };
            let task = match self.checked(Task(bytes)) {
                Ok(task) => task,
                Err(errno) => return errno.into(),
            };
            if let Some(queue) = self.scheduler.queues.get_mut(&para.submission).filter(|queue| !queue.is_full()) {
                queue.push(task.0);
            }
        }
        if let Some(queue) = self.scheduler.queues.get_mut(&para.submission) {
            queue.bell = queue.tail;
        }
        self.run();
        self.write(address + offset_of!(TaskSend, position) as u64, &first).into()
    }

    /// The checks of SQCQ_SEND before the first task.
    fn sendable(&self, address: u64) -> Result<TaskSend, Errno> {
        let para: TaskSend = self.read(address)?;
        let handled = [ioctl::TYPE_NORMAL, ioctl::TYPE_CALLBACK, 5].contains(&para.kind);
        if !handled || para.count == 0 || para.tasks == 0 {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        // The hardware has no queue for host functions, and nobody has one of a debugger.
        if para.kind != ioctl::TYPE_NORMAL {
            return Err(Errno::EINVAL);
        }
        self.has(ioctl::QUEUE_SUBMISSION, para.submission)?;
        let queue = self.scheduler.queues.get(&para.submission).ok_or(Errno::EINVAL)?;
        match queue {
            queue if !queue.open => Err(Errno::ESHUTDOWN),
            queue if !queue.enabled => Err(Errno::EPERM),
            _ => Ok(para),
        }
    }

    /// SQCQ_RECV.
    pub(super) fn receive(&mut self, address: u64) -> Outcome {
        let checked = self.receivable(address);
        let para = match checked {
            Ok(para) => para,
            Err(errno) => return errno.into(),
        };
        self.run();
        let Some(queue) = self.scheduler.logical.get_mut(&para.completion) else { return Errno::EINVAL.into() };
        let (start, count) = queue.wanted(&para);
        if count == 0 {
            let received = address + offset_of!(ReportReceive, received) as u64;
            let until = (para.timeout > 0)
                .then(|| self.caller.arrived + Duration::from_millis(para.timeout.unsigned_abs().into()));
            return match (para.timeout, until) {
                (0, _) => self.write(received, &0u32).into(),
                (_, Some(until)) if until <= std::time::Instant::now() => Errno::ETIMEDOUT.into(),
                _ => self.glance(until),
            };
        }
        let size = queue.size as usize;
        let reports: Vec<u8> =
            queue.reports.range(start..start + count).flat_map(|report| report.as_bytes()[..size].to_vec()).collect();
        if self.caller.memory.write(para.reports, &reports).is_err() {
            return Errno::EFAULT.into();
        }
        queue.reports.drain(start..start + count);
        self.write(address + offset_of!(ReportReceive, received) as u64, &(count as u32)).into()
    }

    fn receivable(&self, address: u64) -> Result<ReportReceive, Errno> {
        let para: ReportReceive = self.read(address)?;
        let handled = [ioctl::TYPE_NORMAL, ioctl::TYPE_LOGICAL, 5].contains(&para.kind);
        if !handled || para.count == 0 || para.reports == 0 {
            return Err(Errno::EINVAL);
        }
        Self::only_scheduler(para.scheduler)?;
        match para.kind {
            ioctl::TYPE_LOGICAL => {}
            ioctl::TYPE_NORMAL => {
                return self.has(ioctl::QUEUE_COMPLETION, para.completion).and(Err(Errno::EOPNOTSUPP));
            }
            _ => return Err(Errno::EINVAL),
        }
        self.has(ioctl::QUEUE_LOGICAL, para.completion)?;
        if para.timeout < -1 { Err(Errno::EINVAL) } else { Ok(para) }
    }

    /// Lets the device work on the caller's queues until each is empty or waits.
    pub(super) fn run(&mut self) {
        let tgid = self.caller.tgid;
        let mut moved = true;
        while moved {
            moved = false;
            let ids: Vec<u32> =
                self.scheduler.queues.iter().filter(|(_, queue)| queue.tgid == tgid).map(|(id, _)| *id).collect();
            for id in ids {
                while let Some(task) = self.scheduler.queues.get(&id).and_then(Queue::next) {
                    let done = self.carry_out(&task);
                    if done == Done::Waits {
                        break;
                    }
                    moved = true;
                    self.scheduler.finish(id, &task, done);
                }
            }
        }
    }
}

impl Scheduler {
    /// A task ended: the head moves, or the queue stops at a task that failed. A report goes to the
    /// stream's logical CQ if the task wants one or failed.
    fn finish(&mut self, id: u32, task: &Task, done: Done) {
        let Some(queue) = self.queues.get_mut(&id) else { return };
        match done {
            Done::Failed(_) => queue.enabled = false,
            _ => queue.advance(),
        }
        let Some(mut report) = task.report(done) else { return };
        (report.queue, report.head) = (id as u16, queue.head as u16);
        let Some(logical) = self.bound.get(&u32::from(report.stream)).and_then(|id| self.logical.get_mut(id)) else {
            return;
        };
        logical.push(report);
        queue.reported = true;
    }
}
