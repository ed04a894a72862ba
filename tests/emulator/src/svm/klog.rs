//! The kernel-log pages: when a command is refused, the driver writes a sentence into a page of the calling process, if it finds a magic word there. A
//! second page has the notes that are no errors.
//!
//! There is no wrap-around: a sentence that does not fit is cut, and both positions become 0. The reader consumes by setting the read position to the
//! write position. The sentences are ours; the driver's say the same in other words, one to six of them per call.

use crate::caller::Caller;
use ascend_ioctl::klog::{CAPACITY, MAGIC, PAGE_SIZE, SVM_ERRORS, SVM_RUN_INFO, TEXT};
use ascend_ioctl::svm::{Arg, Op, SvmCommand};
use nix::errno::Errno;
use std::fmt::Write;
use zerocopy::IntoBytes;

/// Offsets of the page's head, which is all that is read.
const TOTAL: usize = 24;
const RECORD_SIZE: usize = 40;
const READ: usize = 44;
const WRITE: usize = 48;
const HEAD: usize = 52;

/// Which of the two pages a sentence goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// Errors.
    Errors,
    /// What the driver did, and what it does not support.
    RunInfo,
}

/// The page that a refusal is explained in: what a machine cannot do is no error to these commands.
pub fn page_of(op: Option<Op>, errno: Errno) -> Page {
    let notes = matches!(op, Some(Op::MemImport | Op::MemSetAccess | Op::Memcpy | Op::Memcpy2d | Op::AsyncMemcpy));
    if notes && errno == Errno::EOPNOTSUPP { Page::RunInfo } else { Page::Errors }
}

/// Writes why a command was refused, with its parameters, if the caller wants to know.
pub fn refusal(caller: &Caller, known: Option<&SvmCommand>, request: u32, arg: &Arg, errno: Errno, why: &str) {
    append(caller, page_of(known.map(|known| known.op), errno), || {
        let name = known.map_or("ioctl", |known| known.op.name());
        let mut text = format!("{name} is refused: {why}. (request={request:#x}; devid={}; ", arg.head.device);
        let fields = known.and_then(|known| known.command.layout()).map_or(&[][..], |layout| layout.fields);
        let bytes = arg.data.as_bytes();
        for field in fields.iter().filter(|field| field.size <= 8) {
            let value = bytes.get(field.offset..field.offset + field.size).unwrap_or_default();
            let value = value.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            // Writing to a string cannot fail.
            let _ = write!(text, "{}={value:#x}; ", field.c_name);
        }
        let _ = writeln!(text, "errno={})", errno as i32);
        text
    });
}

/// Writes what was done: some commands leave a note of their success.
pub fn note(caller: &Caller, op: Op, arg: &Arg) {
    if matches!(op, Op::SetupDevice | Op::CloseDevice | Op::MemSetAttr) {
        append(caller, Page::RunInfo, || format!("{} is done. (device={})\n", op.name(), arg.head.device));
    }
}

fn append(caller: &Caller, page: Page, text: impl FnOnce() -> String) {
    let page = match page {
        Page::Errors => SVM_ERRORS,
        Page::RunInfo => SVM_RUN_INFO,
    };
    let mut head = [0; HEAD];
    if caller.memory.read(page, &mut head).is_err() || head[..MAGIC.len()] != MAGIC {
        return;
    }
    let number = |at: usize| i32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (mut read, mut write) = (number(READ), number(WRITE));
    let capacity = CAPACITY as i32;
    if number(TOTAL) != PAGE_SIZE as i32 || !(0..=capacity).contains(&write) || number(RECORD_SIZE) > capacity {
        return;
    }
    if read >= write {
        (read, write) = (0, 0);
    }
    let mut bytes = text().into_bytes();
    let room = CAPACITY - write as usize;
    let at = page + (TEXT + write as usize) as u64;
    let written = bytes.len() as i32;
    bytes.push(0);
    if bytes.len() > room {
        bytes.truncate(room);
        if let Some(last) = bytes.last_mut() {
            *last = 0;
        }
        (read, write) = (0, 0);
    } else {
        write += written;
    }
    let positions = [read.to_le_bytes(), write.to_le_bytes()].concat();
    // A read-only page gets nothing, and nobody is told.
    if caller.memory.write(at, &bytes).is_ok() {
        let _ = caller.memory.write(page + READ as u64, &positions);
    }
}
