//! `ascend-vmm-tool`: the commands for a host, as one static file (`cargo xtask dist`).

use std::process::ExitCode;

use clap::Parser;

/// Memory of Huawei Ascend NPUs, without the vendor's libraries: look, try, test, measure.
#[derive(Parser)]
#[command(name = "ascend-vmm-tool", version)]
struct Tool {
    #[command(subcommand)]
    command: xtask::Host,
}

fn main() -> ExitCode {
    Tool::parse().command.run()
}
