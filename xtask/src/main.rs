//! `cargo xtask`: the commands of the project.

use std::process::ExitCode;

use clap::Parser;

/// Commands of the ascend-vmm project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Xtask {
    #[command(flatten)]
    Host(xtask::Host),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Host(command) => command.run(),
    }
}
