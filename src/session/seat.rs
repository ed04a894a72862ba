//! The process's seat for a session: the driver allows one per process.

use super::Inner;
use super::undo::Live;
use crate::fork::{ForkGuard, PerProcess};
use crate::slots::lock;
use crate::trace::{Quiet, quiet};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// Which session this process has.
#[derive(Default)]
enum Current {
    #[default]
    None,
    /// Being opened by a thread, or closed by the one that dropped the last reference.
    Changing,
    Open(Weak<Live<Inner>>),
}

/// The seat, and how many threads wait for it to change. Waking takes a system call, so it is done
/// only when a thread waits.
#[derive(Default)]
struct Seat {
    current: Mutex<(Current, usize)>,
    changed: Condvar,
}

/// The seat, taken by a session from before it is opened until everything of it is closed. Dropping
/// it frees the seat.
#[derive(Debug)]
pub(super) struct Place {
    process: ForkGuard,
    /// Whether the session is being closed: then this thread reports nothing until the seat is
    /// free.
    closing: bool,
}

impl Seat {
    /// This process's. A child of fork has none of its parent's sessions.
    fn of_this_process() -> &'static Seat {
        static SEAT: PerProcess<Seat> = PerProcess::new();
        SEAT.get(|_| Seat::default())
    }

    fn set(&self, now: Current) {
        let mut current = lock(&self.current);
        current.0 = now;
        if current.1 > 0 {
            self.changed.notify_all();
        }
    }
}

/// Takes the seat; the session if one is open. One that is being opened or closed is waited for.
///
/// The session comes as a weak reference: another strong one, however short, would keep its owner
/// from closing it.
pub(super) fn take() -> Result<Place, Weak<Live<Inner>>> {
    let seat = Seat::of_this_process();
    let mut current = lock(&seat.current);
    loop {
        match &current.0 {
            Current::None => break,
            Current::Open(session) if session.strong_count() > 0 => return Err(session.clone()),
            // The thread that dropped the last reference is closing the session.
            Current::Open(_) | Current::Changing => {}
        }
        current.1 += 1;
        current = seat.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        current.1 -= 1;
    }
    current.0 = Current::Changing;
    Ok(Place { process: ForkGuard::new(), closing: false })
}

/// Says that the session on the seat is open.
pub(super) fn set_open(session: &Arc<Live<Inner>>) {
    Seat::of_this_process().set(Current::Open(Arc::downgrade(session)));
}

impl Place {
    /// The session is being closed. A subscriber that asks for the session would wait for this very
    /// thread, so nothing is reported before the seat is free.
    pub(super) fn close(&mut self) {
        if !std::mem::replace(&mut self.closing, true) {
            std::mem::forget(quiet());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _quiet = self.closing.then(Quiet::forgotten);
        if !self.process.in_child() {
            Seat::of_this_process().set(Current::None);
        }
    }
}
