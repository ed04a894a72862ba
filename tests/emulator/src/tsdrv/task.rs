//! Tasks, and what the device makes of them.
//!
//! The layouts, and the checks that the host makes when a task is sent, are those of the driver's
//! `ts_agent` (`task_struct.h`, `ts_agent_update_sqe.c`). What the scheduler of the device does is
//! inferred: copies, events, notifies, placeholders and calls of host functions are carried out in
//! the order of their queue; everything else, kernels of AI cores and AI CPUs first of all, ends
//! with an error.

use super::Call;
use super::queue::{FAILED, MATCHED, Report};
use crate::esched::{HOST_FUNCTION, Notice};
use ascend_ioctl::tsdrv::{ID_EVENT, ID_NOTIFY, TASK_SIZE};
use nix::errno::Errno;
use std::time::{SystemTime, UNIX_EPOCH};

/// Kinds of tasks.
const FFTS: u8 = 0;
const AI_CPU: u8 = 1;
const PLACEHOLDER: u8 = 3;
const EVENT_RECORD: u8 = 4;
const EVENT_WAIT: u8 = 5;
const NOTIFY_RECORD: u8 = 6;
const NOTIFY_WAIT: u8 = 7;
const WRITE_VALUE: u8 = 8;
const SDMA: u8 = 11;
const PCIE_DMA: u8 = 17;
/// Kinds from here on do not exist.
const KINDS: u8 = 21;
/// What the driver makes of a task that fails its checks. The device then reports the failure.
const INVALID: u8 = 63;

/// WRITE_VALUE that resets an event.
const EVENT_RESET: u32 = 1;
/// No time limit, which only these may have.
const NO_LIMIT: u8 = 0xFF;
const MAY_LAST: [u8; 4] = [NOTIFY_WAIT, EVENT_WAIT, AI_CPU, FFTS];
/// An AI_CPU task that is a message to a process of the host (`TOPIC_TYPE_HOST_CTRL_CPU`).
const TO_HOST: u16 = 4;
/// Where such a task has its message, which is 40 bytes long at most.
const MESSAGE: std::ops::Range<usize> = 16..56;
/// Bits of an SDMA task's word 4: addresses are those of the process.
const VIRTUAL: u32 = 0b110 << 8;
/// A PCIE_DMA task whose addresses were converted before, or that updates another task.
const CONVERTED_OR_UPDATE: u32 = 0b111;

/// `TS_ERROR_TASK_TYPE_NOT_SUPPORT`.
const NOT_SUPPORTED: u32 = 0x97;
/// `TS_ERROR_TASK_EXCEPTION`.
const EXCEPTION: u32 = 0x103;
/// The kind of an error is in 6 bits. Which of them the device sets is not public, so it is the
/// lowest.
const ERROR: u8 = 1;

/// How a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// It did not: it waits for an event or a notify.
    Waits,
    Well,
    /// With this code.
    Failed(u32),
}

/// A task of 64 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task(pub [u8; TASK_SIZE]);

impl Task {
    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    fn word(&self, at: usize) -> u32 {
        u32::from(self.half(at)) | u32::from(self.half(at + 2)) << 16
    }

    fn long(&self, at: usize) -> u64 {
        u64::from(self.word(at)) | u64::from(self.word(at + 4)) << 32
    }

    pub fn kind(&self) -> u8 {
        self.0[0] & 0x3F
    }

    /// The message of a task to a process of the host (`topic_sched_sqe`). A length that is too
    /// short for what the flags promise makes none.
    fn notice(&self, device: u32) -> Option<Notice> {
        let (about, flags) = (self.word(56), self.half(10));
        let mut left = (about >> 24 & 0x3F) as usize;
        let mut message = self.0[MESSAGE].to_vec();
        message.resize(left.max(message.len()), 0);
        // The process, thread and device may be told behind the message, in this order from its
        // end.
        let mut last = |is_there: bool, length: usize| {
            let start = left.checked_sub(if is_there { length } else { 0 })?;
            let value = message[start..left].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
            left = start;
            Some(is_there.then_some(value))
        };
        let pid = last(flags & 0x8000 != 0, 4)?;
        let thread = last(about >> 31 != 0, 2)?;
        let other = last(about >> 30 & 1 != 0, 2)?;
        let event = about >> 12 & 0x3F;
        // A host function has its thread inside of the message.
        let thread = if event == HOST_FUNCTION { Some(self.half(MESSAGE.start + 2).into()) } else { thread };
        message.truncate(left);
        Some(Notice {
            device: other.unwrap_or(device),
            pid: pid.unwrap_or(self.word(60) & 0x7FFF_FFFF) as i32,
            from: -1,
            group: about >> 18 & 0x3F,
            thread,
            event,
            sub_event: about & 0xFFF,
            message,
        })
    }

    /// The event or notify.
    fn event(&self) -> u32 {
        match self.kind() {
            NOTIFY_RECORD | NOTIFY_WAIT => self.word(8) & 0x1FFF,
            _ => self.half(8).into(),
        }
    }

    /// The report of the task's end, if it makes one.
    pub fn report(&self, done: Done) -> Option<Report> {
        let wanted = self.0[1] & 0x40 != 0;
        let (error_type, error_code, failed) = match done {
            Done::Failed(code) => (ERROR, code, FAILED),
            _ => (0, 0, 0),
        };
        // The driver drops reports of copies through PCI Express that did not fail.
        if failed == 0 && (!wanted || self.kind() == PCIE_DMA) {
            return None;
        }
        let stream = self.half(4);
        let matched = if stream & 0x8000 != 0 { MATCHED } else { 0 };
        // Records and placeholders tell the time.
        let timed = failed == 0 && [EVENT_RECORD, PLACEHOLDER].contains(&self.kind());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(Report {
            stream: stream & 0x7FFF,
            task: self.half(6),
            error_code,
            error_type,
            kind: self.kind(),
            flags: matched | failed,
            time: if timed { now.as_nanos() as u64 / 10 } else { 0 },
            ..Default::default()
        })
    }
}

impl Call<'_, '_> {
    /// The host's checks of a task. Only a wrong time limit is refused.
    pub(super) fn checked(&self, mut task: Task) -> Result<Task, Errno> {
        let kind = task.kind();
        if kind < KINDS && task.0[14] == NO_LIMIT && !MAY_LAST.contains(&kind) {
            return Err(Errno::EINVAL);
        }
        let is_valid = match kind {
            KINDS.. => false,
            EVENT_RECORD => self.has(ID_EVENT, task.event()).is_ok(),
            NOTIFY_RECORD => self.has(ID_NOTIFY, task.event()).is_ok(),
            WRITE_VALUE if task.word(28) == EVENT_RESET => self.has(ID_EVENT, task.word(24)).is_ok(),
            SDMA => task.0[15] & 1 != 0 || task.word(16) & VIRTUAL == VIRTUAL,
            _ => true,
        };
        if !is_valid {
            task.0[0] = task.0[0] & !0x3F | INVALID;
        }
        Ok(task)
    }

    /// The device's part.
    pub(super) fn carry_out(&mut self, task: &Task) -> Done {
        match task.kind() {
            PLACEHOLDER => Done::Well,
            // The scheduler goes on at once, also if nobody takes the message.
            AI_CPU if task.half(10) >> 8 & 0xF == TO_HOST => {
                self.notices.extend(task.notice(self.device));
                Done::Well
            }
            EVENT_RECORD => {
                self.scheduler.events.insert(task.event());
                Done::Well
            }
            // A wait leaves the event, a reset takes it back.
            EVENT_WAIT if self.scheduler.events.contains(&task.event()) => Done::Well,
            NOTIFY_RECORD => {
                self.scheduler.notifies.insert(task.event());
                Done::Well
            }
            NOTIFY_WAIT if self.scheduler.notifies.remove(&task.event()) => Done::Well,
            EVENT_WAIT | NOTIFY_WAIT => Done::Waits,
            WRITE_VALUE if task.word(28) == EVENT_RESET => {
                self.scheduler.events.remove(&task.word(24));
                Done::Well
            }
            // The pointer mode has its task elsewhere, and other operations than a copy are
            // arithmetic.
            SDMA if task.0[15] & 1 == 0 && task.word(16) & 0xFF == 0 => {
                self.copy(task.long(40), task.long(32), task.word(28).into())
            }
            PCIE_DMA if task.word(28) & CONVERTED_OR_UPDATE == 0 => {
                self.copy(task.long(40), task.long(32), task.long(48))
            }
            _ => Done::Failed(NOT_SUPPORTED),
        }
    }

    fn copy(&mut self, destination: u64, source: u64, size: u64) -> Done {
        match self.svm.stream_copy(self.machine, self.caller, self.device, destination, source, size) {
            Ok(()) => Done::Well,
            Err(_) => Done::Failed(EXCEPTION),
        }
    }
}
