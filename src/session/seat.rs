//! The process's seat for its session: the driver allows one session per process.

use super::SessionInner;
use super::undo::Live;
use crate::fork::{ForkGuard, PerProcess};
use crate::slots::Slots;
use crate::trace::{Quiet, quiet};
use std::sync::{Arc, Weak};

/// This process's seat. A child of fork does not have its parent's session.
fn seat() -> &'static Slots<(), Live<SessionInner>> {
    static SEAT: PerProcess<Slots<(), Live<SessionInner>>> = PerProcess::new();
    SEAT.get(|_| Slots::default())
}

/// The seat while it is taken: from before the session is opened until all of it is closed.
/// Dropping this frees the seat.
#[derive(Debug)]
pub(super) struct Seat {
    process: ForkGuard,
    /// The session is being closed, and this thread reports nothing until the seat is free.
    closing: bool,
}

impl Seat {
    /// Takes the seat, or returns the session if one is open. Waits while another thread opens or
    /// closes it.
    pub(super) fn take() -> Result<Seat, Weak<Live<SessionInner>>> {
        seat().take(())?;
        Ok(Seat { process: ForkGuard::new(), closing: false })
    }

    /// Lets other threads find the session.
    pub(super) fn set_open(session: &Arc<Live<SessionInner>>) {
        seat().fill((), session);
    }

    /// Marks the session as being closed. A subscriber that asks for the session would wait for
    /// this very thread, so nothing is reported before the seat is free.
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
