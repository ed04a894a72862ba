//! `cargo xtask`: the commands of the project.

mod dist;

use std::process::ExitCode;

use clap::Parser;

/// Commands of the ascend-vmm project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Xtask {
    #[command(flatten)]
    Host(xtask::Host),
    /// Build the tool as one static file for each architecture.
    Dist(dist::Dist),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Host(command) => command.run(),
        Xtask::Dist(options) => dist::run(options),
    }
}
