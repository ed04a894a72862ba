//! Traps: actions of a client that crash, hang or corrupt the real kernel.
//!
//! The real driver does not refuse them, so the model cannot return an errno. It reports a trap
//! instead; the front kills the client, and the test or run under the emulator fails with the
//! report.

use std::fmt;

/// An action that would have crashed, hung or corrupted the real kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The trap's name, such as `access-after-access-none`.
    pub name: &'static str,
    /// The process that did it.
    pub tgid: i32,
    /// What it did, with its arguments, and what would have happened.
    pub detail: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "kernel trap `{}` triggered by process {}: {}", self.name, self.tgid, self.detail)
    }
}
