//! Keeping signals away from waits that they would spoil.
//!
//! Waits of `/dev/hisi_hdc` are interrupted by any signal that has a handler; with SA_RESTART the
//! kernel repeats the ioctl with its full time, so a steady stream of signals makes a wait endless.
//! Signals without a handler end the process or are ignored, and stay as they are.

use crate::trace;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use std::fs::File;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::thread::JoinHandle;

/// While this lives, this thread takes no signal that the process handles.
#[must_use]
#[derive(Debug)]
pub(crate) struct Blocked {
    before: SigSet,
    /// The mask is the thread's.
    _thread: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks the signals that the process has handlers for: a read of /proc and one system call.
    pub(crate) fn handled() -> Blocked {
        Blocked::these(&handled().unwrap_or_else(SigSet::all))
    }

    /// Blocks every signal, for threads of the library's own.
    fn all() -> Blocked {
        Blocked::these(&SigSet::all())
    }

    fn these(signals: &SigSet) -> Blocked {
        // It fails for a wrong `how` only.
        let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK).unwrap_or_else(|_| SigSet::empty());
        Blocked { before, _thread: PhantomData }
    }

    /// Lets what came meanwhile be handled.
    pub(crate) fn breathe(&self) {
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

/// The signals that the process has handlers for; `None` where /proc does not say.
fn handled() -> Option<SigSet> {
    // One read: the line is in the first page, unless the process is in hundreds of groups.
    let mut status = [0; 4096];
    let length = File::open("/proc/self/status").ok()?.read(&mut status).ok()?;
    caught(std::str::from_utf8(&status[..length]).ok()?)
}

/// The signals with handlers, as /proc/*/status says; `None` if the line is not there as a whole.
fn caught(status: &str) -> Option<SigSet> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim();
    let mask = u64::from_str_radix(mask, 16).ok().filter(|_| mask.len() == 16)?;
    let mut signals = SigSet::empty();
    Signal::iterator().filter(|&signal| mask >> (signal as i32 - 1) & 1 != 0).for_each(|signal| signals.add(signal));
    // Real-time signals have no name; a handler of one is rare enough to block all then.
    Some(if mask >> 31 != 0 { SigSet::all() } else { signals })
}

/// Repeats a look at files that a signal interrupted, which file systems of the network and
/// supervisors let happen. Opens, reads and writes are repeated by the standard library.
pub(crate) fn uninterrupted<T>(mut look: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match look() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
}

/// Starts a thread that takes no signals: they are for the threads of the program.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A thread inherits the mask of the one that starts it.
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
    fn the_mask_is_restored_and_threads_of_ours_take_no_signals() {
        let before = SigSet::thread_get_mask().unwrap();
        let blocked = Blocked::all();
        assert!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1));
        blocked.breathe();
        assert!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1));
        drop(blocked);
        assert_eq!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGUSR1), before.contains(Signal::SIGUSR1));
        let mask = spawn("test", || SigSet::thread_get_mask().unwrap()).unwrap().join().unwrap();
        assert!(mask.contains(Signal::SIGUSR1) && mask.contains(Signal::SIGTERM));
    }
}
