//! The kernel-log pages. When a command is refused, the driver writes a message into a page of the
//! calling process, if the page begins with the magic word. A second page gets notes that are not
//! errors.
//!
//! There is no wrap-around: a message that does not fit is cut, and both positions become 0. The
//! reader consumes by setting the read position to the write position. The messages are the
//! emulator's own; the driver writes one to six per call, in other words.

use crate::caller::Caller;
use ascend_ioctl::klog::{CAPACITY, MAGIC, PAGE_SIZE, SVM_ERRORS, SVM_RUN_INFO, TEXT};
use ascend_ioctl::svm::{Arg, Op, SvmCommand};
use nix::errno::Errno;
use std::fmt::Write;
use zerocopy::IntoBytes;

/// Offsets in the page's head.
const TOTAL: usize = 24;
const RECORD_SIZE: usize = 40;
const READ: usize = 44;
const WRITE: usize = 48;
const HEAD: usize = 52;

/// The page that a message goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// Errors.
    Errors,
    /// What the driver did, and what it does not support.
    RunInfo,
}

/// The page for the message of a refusal. For these commands a missing feature of the machine is
/// not an error.
pub fn page_of(op: Option<Op>, errno: Errno) -> Page {
    let notes = matches!(op, Some(Op::MemImport | Op::MemSetAccess | Op::Memcpy | Op::Memcpy2d | Op::AsyncMemcpy));
    if notes && errno == Errno::EOPNOTSUPP { Page::RunInfo } else { Page::Errors }
}

/// Writes why a command was refused, with its parameters, if the caller has the page.
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

/// Writes a note about a command that succeeded, if it is one of those that do so.
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
    let room = number(RECORD_SIZE).wrapping_sub(write) as u32 as usize;
    if number(TOTAL) != PAGE_SIZE as i32 || write as u32 as usize > CAPACITY || room > CAPACITY {
        return;
    }
    // A page whose messages were all read is used from its start, whatever room it claims to have.
    let room = if read >= write {
        (read, write) = (0, 0);
        CAPACITY
    } else {
        room
    };
    let mut bytes = text().into_bytes();
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
    // A read-only page is left alone, and the command does not fail for it.
    if caller.memory.write(at, &bytes).is_ok() {
        let _ = caller.memory.write(page + READ as u64, &positions);
    }
}
