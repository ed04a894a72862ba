//! C programs under seeded schedules: see `tests/support/scenarios.rs` of the repository.

#[path = "../../../../tests/support/scenarios.rs"]
mod scenarios;

use crate::support::{Linked, compile};
use ascend_emulator::Config;
use std::process::Command;

/// Two threads with a stream each pass bytes on by events.
#[test]
fn streams_that_wait_for_each_other() {
    let program = compile("seeded.c", Linked::Dynamically).unwrap();
    scenarios::explore("seeded.c", &Config::default(), 2, || Command::new(&program));
}
