//! Traps: what a client can do to crash, wedge or corrupt the real kernel.
//!
//! The real driver does not refuse these, so no errno would be true. The model reports the trap instead; the front kills the client and the test or
//! run under the emulator fails with the report.

use std::fmt;

/// A client did what would have crashed, wedged or corrupted the real kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The trap's name: a few words in the manner of `cpu-touches-soma`.
    pub name: &'static str,
    /// The process that did it.
    pub tgid: i32,
    /// What it did, with its arguments, and what would have happened.
    pub detail: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "kernel trap `{}` sprung by process {}: {}", self.name, self.tgid, self.detail)
    }
}
