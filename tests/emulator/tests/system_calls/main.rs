//! The emulated driver as programs see it: through real system calls of real processes.

mod attach;
mod attribute;
mod client;
mod devices;
mod faults;
mod files;
mod inherited_mappings;
mod schedule;
mod side_by_side;
mod sleep;
mod stress;
mod traps;

use std::process::Command;

/// Runs this test program again for one test alone. `test` is the test's path.
fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]);
    command
}
