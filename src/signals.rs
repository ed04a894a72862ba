//! Blocking signals during waits that they would disturb.
//!
//! Any signal with a handler interrupts a wait of `/dev/hisi_hdc`. With SA_RESTART the kernel
//! repeats the ioctl with its full time, so a steady stream of signals makes a wait endless.
//! Signals without a handler end the process or are ignored, and are left alone.

use crate::trace;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use std::fs::File;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::thread::JoinHandle;

/// While this lives, these signals are blocked on this thread.
#[must_use]
#[derive(Debug)]
pub(crate) struct Blocked {
    before: SigSet,
    /// The mask belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks the signals that the process has handlers for: a read of /proc, and one system call.
    pub(crate) fn handled() -> Blocked {
        Blocked::these(&handled().unwrap_or_else(SigSet::all))
    }

    /// Blocks every signal, for threads of the library.
    fn all() -> Blocked {
        Blocked::these(&SigSet::all())
    }

    fn these(signals: &SigSet) -> Blocked {
        // It fails only for a wrong `how`.
        let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK).unwrap_or_else(|_| SigSet::empty());
        Blocked { before, _thread: PhantomData }
    }

    /// Lets the handlers of pending signals run.
    pub(crate) fn deliver_pending(&self) {
        if let Ok(blocked) = self.before.thread_swap_mask(SigmaskHow::SIG_SETMASK) {
            let _ = blocked.thread_set_mask();
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}

/// The signals that the process has handlers for; `None` if /proc does not say.
fn handled() -> Option<SigSet> {
    // One read: the line is in the first page, unless the process is in hundreds of groups.
    let mut status = [0; 4096];
    let length = File::open("/proc/self/status").ok()?.read(&mut status).ok()?;
    caught(std::str::from_utf8(&status[..length]).ok()?)
}

/// The signals with handlers in a /proc/*/status; `None` if the line is missing or cut off.
fn caught(status: &str) -> Option<SigSet> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim();
    let mask = u64::from_str_radix(mask, 16).ok().filter(|_| mask.len() == 16)?;
    let mut signals = SigSet::empty();
    Signal::iterator().filter(|&signal| mask >> (signal as i32 - 1) & 1 != 0).for_each(|signal| signals.add(signal));
    // Real-time signals have no name. A handler of one is so rare that all are blocked then.
    Some(if mask >> 31 != 0 { SigSet::all() } else { signals })
}

/// Repeats a call on files until no signal interrupts it, which network file systems and
/// supervisors allow. The standard library repeats opens, reads and writes itself.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
}

/// Starts a thread that takes no signals: they are for the program's threads.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A new thread inherits this mask.
    let _blocked = Blocked::all();
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if let Err(error) = &started {
        trace::warn(error, "a thread could not be started");
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_off_is_not_taken_for_the_mask() {
        assert!(handled().is_some());
        let signals = caught("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000200\n").unwrap();
        assert!(signals.contains(Signal::SIGUSR1) && !signals.contains(Signal::SIGSEGV));
        // Real-time signals have no names: with a handler for one, all are blocked.
        let signals = caught("SigCgt:\t0000000100000000\n").unwrap();
        assert!(signals.contains(Signal::SIGSEGV));
        assert!(caught("SigCgt:\t00000000000002").is_none());
        assert!(caught("SigIgn:\t0000000000001000\nSigCg").is_none());
    }

    #[test]
    fn only_what_was_interrupted_is_repeated() {
        let answers = [io::ErrorKind::Interrupted, io::ErrorKind::Interrupted, io::ErrorKind::NotFound];
        let mut left = answers.into_iter();
        let answer: io::Result<()> = uninterrupted(|| Err(left.next().unwrap().into()));
        assert_eq!((answer.unwrap_err().kind(), left.next()), (io::ErrorKind::NotFound, None));
    }

    #[test]
    fn the_mask_is_restored_and_our_threads_take_no_signals() {
        let before = SigSet::thread_get_mask().unwrap();
        let blocked = Blocked::all();
        assert!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1));
        blocked.deliver_pending();
        assert!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1));
        drop(blocked);
        assert_eq!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1), before.contains(Signal::SIGUSR1));
        let mask = spawn("test", || SigSet::thread_get_mask().unwrap()).unwrap().join().unwrap();
        assert!(mask.contains(Signal::SIGUSR1) && mask.contains(Signal::SIGTERM));
    }
}
