//! `cargo xtask`: the commands of the project.

#![forbid(unsafe_code)]

mod abi;
mod dist;

use std::process::ExitCode;

use clap::Parser;

/// Commands of the ascend-vmm project.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
enum Xtask {
    #[command(flatten)]
    Host(xtask::Host),
    /// Build ascend-vmm-tool, one static file for each architecture.
    Dist(dist::Dist),
    /// Compare our layout tables with a driver source tree.
    #[command(subcommand)]
    Abi(abi::Abi),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Host(command) => command.run(),
        Xtask::Dist(options) => dist::run(options),
        Xtask::Abi(command) => abi::run(command),
    }
}
