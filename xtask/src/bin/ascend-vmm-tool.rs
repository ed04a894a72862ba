//! `ascend-vmm-tool`: the commands for a host, as one static file (`cargo xtask dist`).

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};

/// Memory of Huawei Ascend NPUs without the vendor's libraries: list, try, test and measure.
#[derive(Parser)]
#[command(name = "ascend-vmm-tool", version)]
struct Tool {
    #[command(subcommand)]
    command: xtask::Host,
}

fn main() -> ExitCode {
    // The examples are written for a clone. This program has another name.
    let mut command = Tool::command();
    let names: Vec<String> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(name, |command| {
            let help = command.get_after_help().map(|help| help.to_string().replace("cargo xtask", "ascend-vmm-tool"));
            match help {
                Some(help) => command.after_help(help),
                None => command,
            }
        });
    }
    match Tool::from_arg_matches(&command.get_matches()) {
        Ok(tool) => tool.command.run(),
        Err(error) => error.exit(),
    }
}
