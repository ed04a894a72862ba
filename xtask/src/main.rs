//! `cargo xtask`: the commands of the project.

#![forbid(unsafe_code)]

mod abi;
mod bench;
mod compat;
mod dist;
mod numbers;
mod toolkit;

use std::process::ExitCode;

use clap::Parser;

/// Commands of the ascend-vmm project.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
enum Xtask {
    #[command(flatten)]
    Tool(ascend_vmm_tool::Command),
    /// Measure what the library adds to the kernel's work, and compare it with its limits.
    Bench(bench::Bench),
    /// The process that `bench` measures.
    #[command(hide = true)]
    BenchClient(bench::client::Client),
    /// Build ascend-vmm, one static file for each architecture.
    Dist(dist::Dist),
    /// Write the header, the libraries and the environment for programs written for CANN.
    Toolkit(toolkit::Toolkit),
    /// Run unmodified programs of others on the C library and an emulated driver.
    #[command(subcommand)]
    Compat(compat::Compat),
    /// Measure coverage, mutants and seeds, and write the table of docs/numbers.md.
    Numbers(numbers::Numbers),
    /// Compare our layout tables with a driver source tree.
    #[command(subcommand)]
    Abi(abi::Abi),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Tool(command) => command.run(),
        Xtask::Bench(bench) => bench.run(),
        Xtask::BenchClient(client) => client.run(),
        Xtask::Dist(options) => dist::run(options),
        Xtask::Toolkit(options) => toolkit::run(options),
        Xtask::Compat(command) => compat::run(command),
        Xtask::Numbers(options) => numbers::run(&options),
        Xtask::Abi(command) => abi::run(command),
    }
}
