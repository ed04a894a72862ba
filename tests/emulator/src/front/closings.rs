//! Calls that close descriptors: close, close_range, dup2, dup3 and exec.
//!
//! The server remembers which file a descriptor is until somebody closes that number, in whatever
//! process, since processes can share a table. It lets such a call continue, the kernel carries it
//! out a little later, and nobody reports that. But a thread makes one call at a time: when it
//! makes another one, this one is over.

use nix::errno::Errno;
use std::fs;
use std::ops::RangeInclusive;

/// The numbers whose closing the filter reports. Programs that close every number there could be
/// would wait for a million answers otherwise.
pub const REPORTED: i32 = 64;

/// The calls.
pub const CALLS: &[i64] = &[
    libc::SYS_close,
    libc::SYS_close_range,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_execve,
    libc::SYS_execveat,
];

/// Calls that may not be over.
#[derive(Default)]
pub struct Closings(Vec<(i32, RangeInclusive<i32>)>);

impl Closings {
    /// A thread closes descriptors.
    pub fn begin(&mut self, tid: i32, numbers: RangeInclusive<i32>) {
        // Threads that ended with a call are not seen again.
        if self.0.len() == MOST {
            self.0.retain(|(tid, _)| !is_over(*tid));
        }
        self.0.push((tid, numbers));
    }

    /// A thread makes another call.
    pub fn end(&mut self, tid: i32) {
        if !self.0.is_empty() {
            self.0.retain(|(other, _)| *other != tid);
        }
    }

    /// Whether a descriptor may be about to be closed.
    pub fn may_close(&mut self, descriptor: i32) -> bool {
        self.0.retain(|(tid, numbers)| !numbers.contains(&descriptor) || !is_over(*tid));
        self.0.iter().any(|(_, numbers)| numbers.contains(&descriptor))
    }
}

/// How many calls are kept before those that are over are looked for.
const MOST: usize = 256;

/// Whether a thread is in another call by now, or has ended.
fn is_over(tid: i32) -> bool {
    match fs::read_to_string(format!("/proc/{tid}/syscall")) {
        // A thread that runs may be in any call.
        Ok(text) if text.starts_with("running") => false,
        Ok(text) => {
            let number = text.split(' ').next().and_then(|number| number.trim().parse().ok());
            number.is_some_and(|number: i64| !CALLS.contains(&number))
        }
        Err(error) => matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENOENT | Errno::ESRCH)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    #[test]
    fn a_call_is_over_when_its_thread_makes_another_one() {
        let (send, receive) = channel();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                send.send(nix::unistd::gettid().as_raw()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let tid = receive.recv().unwrap();
            // Until the thread has left its send.
            while is_over(tid) {
                std::thread::yield_now();
            }
            let mut closings = Closings::default();
            closings.begin(tid, 3..=5);
            assert!(closings.may_close(3) && closings.may_close(5) && !closings.may_close(6));
            closings.end(tid);
            assert!(!closings.may_close(3));
            over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_call_is_over_when_its_thread_waits_elsewhere_or_has_ended() {
        let (send, receive) = channel();
        let (end, wait) = channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = wait.recv();
        });
        let tid = receive.recv().unwrap();
        let mut closings = Closings::default();
        closings.begin(tid, 3..=3);
        while closings.may_close(3) {
            std::thread::yield_now();
        }
        closings.begin(tid, 3..=3);
        drop(end);
        thread.join().unwrap();
        while closings.may_close(3) {
            std::thread::yield_now();
        }
    }
}
