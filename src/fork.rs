//! Detects fork(2) without a system call.
//!
//! The driver ties a session to the process that initialised it. A child that inherits the file
//! gets EINVAL for everything, and the address segments are not mapped in the child at all. Calling
//! getpid(2) before each operation would double the number of system calls, so a handler of
//! pthread_atfork(3) counts forks in the child instead. A child of a bare clone(2) is not counted.
//! The kernel refuses it too, only with a less helpful errno.
//!
//! Nothing here waits for another thread, because a fork can catch the parent's threads at any
//! point.

use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::fstat;
use nix::unistd::pipe2;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// The number of forks between the process that loaded this library and this one, or a multiple.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts forks from now on.
extern "C" fn register() {
    // Not a `Once`: a child of fork would wait forever for a thread of its parent that was inside.
    // If two threads register, each fork counts twice, which does no harm.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.load(Ordering::Acquire) {
        // SAFETY: the handler only adds to an atomic, which a child of a threaded process may.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            crate::trace::warn("no memory for the handler", "forks go unnoticed: do not use a session in children");
        }
        REGISTERED.store(true, Ordering::Release);
    }
}

/// Registers the handler when the library is loaded. A fork that is already waiting for malloc's
/// locks does not run handlers that are registered then, so its child would go unnoticed.
// SAFETY: the loader calls what is in this section once, before any other code of this library; the
// function takes no arguments and uses nothing that is not there yet.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = register;

/// Identifies the process that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForkGuard(u32);

impl ForkGuard {
    /// The guard of this process.
    pub(crate) fn new() -> ForkGuard {
        register();
        ForkGuard(FORKS.load(Ordering::Relaxed))
    }

    /// True in any other process than the one that made the guard.
    pub(crate) fn in_child(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.0
    }

    /// An error in another process than the one that made the guard.
    pub(crate) fn check(self) -> Result<()> {
        if self.in_child() { Err(Error::OtherProcess { process: std::process::id() }) } else { Ok(()) }
    }
}

/// A value of each process. A child of fork(2) starts with a new one, because a thread that does
/// not exist in the child may hold a lock in the inherited one.
pub(crate) struct PerProcess<T: 'static> {
    /// Never freed, because other threads may be using it.
    latest: AtomicPtr<Owned<T>>,
}

struct Owned<T> {
    process: ForkGuard,
    value: T,
}

impl<T: Sync> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess { latest: AtomicPtr::new(null_mut()) }
    }

    /// This process's value. `make` makes it from the parent's. It may only try the locks there.
    pub(crate) fn get(&'static self, make: impl Fn(Option<&'static T>) -> T) -> &'static T {
        let process = ForkGuard::new();
        let mut latest = self.latest.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or made below and never freed.
            let before = unsafe { latest.as_ref() };
            match before {
                Some(owned) if owned.process == process => return &owned.value,
                _ => {}
            }
            let value = make(before.map(|owned| &owned.value));
            let new = Box::into_raw(Box::new(Owned { process, value }));
            match self.latest.compare_exchange(latest, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: just made, and from now on never freed.
                Ok(_) => return unsafe { &(*new).value },
                Err(now) => {
                    // SAFETY: just made, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(new) });
                    latest = now;
                }
            }
        }
    }
}

/// Detects whether another process has copies of this process's descriptors: a child of fork(2), or
/// a child before its exec.
///
/// Such a process also has a copy of a pipe's writing end. When all copies are closed, the pipe
/// hangs up. A fork right after the check goes unnoticed, which cannot be prevented.
#[derive(Debug)]
pub(crate) struct Copies {
    writer: OwnedFd,
    /// Device and inode of `writer`.
    pipe: (u64, u64),
    /// The reading ends: that of `writer` last, before it those of older pipes still open
    /// elsewhere.
    readers: Vec<OwnedFd>,
}

impl Copies {
    /// Watches from now on. `None` if no pipe can be made.
    pub(crate) fn watch() -> Option<Copies> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).ok()?;
        let pipe = identity(&writer)?;
        Some(Copies { writer, pipe, readers: vec![reader] })
    }

    /// Closes the copies that this process inherited. Fork copies descriptors before memory, so the
    /// numbers here may be unused or mean another file. Then nothing is closed.
    pub(crate) fn close_inherited(self) {
        if identity(&self.writer) == Some(self.pipe) {
            drop(self.writer);
        } else {
            std::mem::forget(self.writer);
        }
        std::mem::forget(self.readers);
    }

    /// True if there may be copies that were made since [`Copies::watch`].
    pub(crate) fn exist(&mut self) -> bool {
        // Replaces the pipe for future copies, and closes our own writing end of the old one.
        let Some(Copies { writer, pipe, readers }) = Copies::watch() else { return true };
        (self.writer, self.pipe) = (writer, pipe);
        self.readers.retain(|reader| {
            let mut polled = [PollFd::new(reader.as_fd(), PollFlags::empty())];
            // No event is requested: only the hang-up is reported.
            poll(&mut polled, PollTimeout::ZERO) != Ok(1)
        });
        let copied = !self.readers.is_empty();
        self.readers.extend(readers);
        copied
    }
}

/// The device and inode of an open file.
#[allow(clippy::useless_conversion, reason = "the widths differ among architectures")]
fn identity(fd: &OwnedFd) -> Option<(u64, u64)> {
    loop {
        match fstat(fd) {
            // The kernel never interrupts it, but supervisors of system calls do.
            Err(Errno::EINTR) => {}
            stat => return stat.ok().map(|stat| (stat.st_dev.into(), stat.st_ino.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd};

    #[test]
    fn a_descriptor_that_is_another_file_is_not_closed() {
        let mut copies = Copies::watch().unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        drop(std::mem::replace(&mut copies.writer, other.into()));
        let number = copies.writer.as_raw_fd();
        copies.close_inherited();
        // SAFETY: it was left open, and nobody else owns it.
        let other = unsafe { OwnedFd::from_raw_fd(number) };
        assert!(identity(&other).is_some());
        let copies = Copies::watch().unwrap();
        let reader = copies.readers[0].try_clone().unwrap();
        copies.close_inherited();
        let mut polled = [PollFd::new(reader.as_fd(), PollFlags::empty())];
        assert_eq!(poll(&mut polled, PollTimeout::ZERO), Ok(1), "its own pipe is closed");
    }

    #[test]
    fn copies_are_noticed_until_the_last_one_is_gone() {
        let mut copies = Copies::watch().unwrap();
        assert!(!copies.exist() && !copies.exist());
        // As fork would.
        let first = copies.writer.try_clone().unwrap();
        assert!(copies.exist());
        let second = copies.writer.try_clone().unwrap();
        assert!(copies.exist());
        drop(first);
        assert!(copies.exist());
        drop(second);
        assert!(!copies.exist());
        assert_eq!(copies.readers.len(), 1);
    }
}
