//! `cargo xtask`: the commands of the project.

mod emulate;

use std::process::ExitCode;

use clap::Parser;

/// Commands of the ascend-vmm project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Xtask {
    /// Run a program on a host with an emulated driver.
    Emulate(emulate::Emulate),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Emulate(command) => emulate::run(command),
    }
}
