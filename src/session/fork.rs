//! Noticing fork(2) without a system call.
//!
//! The driver ties a session to the process that initialised it: a child that inherits the file gets EINVAL for everything, and the
//! address segments are not in the child at all. Asking getpid(2) before each operation would double the number of system calls, so a
//! handler of pthread_atfork(3) counts forks in the child instead. (A child made by a bare clone(2) is not counted; the kernel refuses
//! it all the same, only with a less helpful errno.)

use nix::libc;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// How many forks lie between the process that loaded this library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A point in the line of forks: valid in the process that took it only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForkGuard(u32);

impl ForkGuard {
    /// The guard of this process.
    pub(crate) fn new() -> ForkGuard {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: the handler only adds to an atomic, which is allowed in a child of a threaded process.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if failed != 0 {
                tracing::warn!(
                    "forks cannot be noticed (no memory for the handler); do not use the session in children"
                );
            }
        });
        ForkGuard(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is another process than the one that made the guard.
    #[inline]
    pub(crate) fn in_child(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.0
    }
}

/// A value that every process has for itself: a child of fork(2) starts with a new one, because in the one that it inherited a lock may be
/// held by a thread that does not exist in the child.
pub(crate) struct PerProcess<T: 'static> {
    /// Never freed: others may be using it.
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

    /// This process's value. `make` makes it, and is told what the parent's was, whose locks must be tried only.
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
                    // SAFETY: just made, and nobody else has seen it.
                    drop(unsafe { Box::from_raw(new) });
                    latest = now;
                }
            }
        }
    }
}
