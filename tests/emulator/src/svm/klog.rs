//! The kernel-log page: when a command is refused, the driver writes a sentence into a page of the calling process, if it finds a magic word there.
//!
//! There is no wrap-around: a sentence that does not fit is cut, and both positions become 0. The reader consumes by setting the read position to the
//! write position. The sentences are ours; the driver's say the same in other words, one to six of them per call.

use crate::caller::Caller;
use ascend_ioctl::klog::{CAPACITY, MAGIC, PAGE_SIZE, SVM_ERRORS, TEXT};
use ascend_ioctl::svm::Arg;
use nix::errno::Errno;
use std::fmt::Write;

/// Offsets of the page's head, which is all that is read.
const TOTAL: usize = 24;
const RECORD_SIZE: usize = 40;
const READ: usize = 44;
const WRITE: usize = 48;
const HEAD: usize = 52;

/// Writes why a command was refused, if the caller wants to know.
pub fn record(caller: &Caller, name: &str, request: u32, arg: &Arg, errno: Errno, why: &str) {
    let mut head = [0; HEAD];
    if caller.memory.read(SVM_ERRORS, &mut head).is_err() || head[..MAGIC.len()] != MAGIC {
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
    let mut text = format!("{name} is refused: {why}. (");
    // Writing to a string cannot fail.
    let _ = write!(text, "request={request:#x}; device={}; ", arg.head.device);
    for (name, value) in ["first", "second"].iter().zip(arg.data) {
        let _ = write!(text, "{name}={value:#x}; ");
    }
    let _ = writeln!(text, "errno={})", errno as i32);
    let room = CAPACITY - write as usize;
    let at = SVM_ERRORS + (TEXT + write as usize) as u64;
    let mut bytes = text.into_bytes();
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
        let _ = caller.memory.write(SVM_ERRORS + READ as u64, &positions);
    }
}
