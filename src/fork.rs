//! Noticing fork(2) without a system call.
//!
//! The driver ties a session to the process that initialised it: a child that inherits the file
//! gets EINVAL for everything, and the address segments are not in the child at all. Calling
//! getpid(2) before each operation would double the number of system calls, so a handler of
//! pthread_atfork(3) counts forks in the child instead. (A child made by a bare clone(2) is not
//! counted; the kernel refuses it all the same, only with a less helpful errno.)
//!
//! Nothing here waits for another thread: a child may have been forked while any thread of its
//! parent was at any point.

use nix::libc;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// How many forks lie between the process that loaded this library and this one, or a multiple.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A point in the line of forks: valid only in the process that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForkGuard(u32);

impl ForkGuard {
    /// The guard of this process.
    pub(crate) fn new() -> ForkGuard {
        // Not a `Once`: a child of fork would wait for ever for a thread of its parent that was
        // inside. Two threads that register twice only make each fork count twice.
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        if !REGISTERED.load(Ordering::Acquire) {
            // SAFETY: the handler only adds to an atomic, which a child of a threaded process may.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if failed != 0 {
                crate::trace::warn("no memory for the handler", "forks go unnoticed: do not use a session in children");
            }
            REGISTERED.store(true, Ordering::Release);
        }
        ForkGuard(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is another process than the one that made the guard.
    #[inline]
    pub(crate) fn in_child(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.0
    }
}

/// A value that every process has for itself: a child of fork(2) starts with a new one, because in
/// the one that it inherited a lock may be held by a thread that does not exist in the child.
pub(crate) struct PerProcess<T: 'static> {
    /// Never freed: other threads may be using it.
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

    /// This process's value. `make` makes it from the parent's, whose locks it must only try.
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
