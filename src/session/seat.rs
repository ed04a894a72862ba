//! The process's seat for a session: the driver allows one per process.

use super::SessionInner;
use super::undo::Live;
use crate::fork::{ForkGuard, PerProcess};
use crate::slots::Slots;
use crate::trace::{Quiet, quiet};
use std::sync::{Arc, Weak};

/// This process's. A child of fork has none of its parent's sessions.
fn seat() -> &'static Slots<(), Live<SessionInner>> {
    static SEAT: PerProcess<Slots<(), Live<SessionInner>>> = PerProcess::new();
    SEAT.get(|_| Slots::default())
}

/// The seat, taken by a session from before it is opened until everything of it is closed. Dropping
/// it frees the seat.
#[derive(Debug)]
pub(super) struct Seat {
    process: ForkGuard,
    /// Whether the session is being closed: then this thread reports nothing until the seat is
    /// free.
    closing: bool,
}

impl Seat {
    /// Takes the seat; the session if one is open. One that is being opened or closed is waited
    /// for.
    pub(super) fn take() -> Result<Seat, Weak<Live<SessionInner>>> {
        seat().take(())?;
        Ok(Seat { process: ForkGuard::new(), closing: false })
    }

    /// The session on the seat is open.
    pub(super) fn set_open(session: &Arc<Live<SessionInner>>) {
        seat().fill((), session);
    }

    /// The session is being closed. A subscriber that asks for the session would wait for this very
    /// thread, so nothing is reported before the seat is free.
    pub(super) fn close(&mut self) {
        if !std::mem::replace(&mut self.closing, true) {
            std::mem::forget(quiet());
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let _quiet = self.closing.then(Quiet::forgotten);
        if !self.process.in_child() {
            seat().vacate(&());
        }
    }
}
