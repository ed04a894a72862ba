//! `ascend-vmm completions` and `ascend-vmm man`: what an installed program has beside it.

use crate::{Tool, impossible};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::process::ExitCode;

/// What the program is installed as.
const NAME: &str = "ascend-vmm";

/// Options of `completions`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ascend-vmm completions bash > ~/.local/share/bash-completion/completions/ascend-vmm\n  \
                        ascend-vmm completions fish > ~/.config/fish/completions/ascend-vmm.fish"
)]
pub struct Completions {
    /// The shell that reads them.
    shell: Shell,
}

/// Options of `man`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ascend-vmm man > ~/.local/share/man/man1/ascend-vmm.1\n  \
                        ascend-vmm man trace | man -l -")]
pub struct Man {
    /// The command that the page is about. The default is the page of the whole program.
    command: Option<String>,
}

/// The program as its users see it: without the commands that are hidden.
fn program() -> Command {
    let tool = Tool::command();
    let shown = tool.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let about = tool.get_about().cloned().unwrap_or_default();
    Command::new(NAME).version(env!("CARGO_PKG_VERSION")).about(about).subcommands(shown)
}

impl Completions {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut program(), NAME, &mut script);
        print(&script)
    }
}

impl Man {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        // Its page of help is this one.
        let mut program = program().disable_help_subcommand(true);
        program.build();
        let command = match &self.command {
            None => program,
            Some(name) => match program.find_subcommand(name) {
                Some(command) => command.clone(),
                None => return impossible(format!("there is no command `{name}`")),
            },
        };
        let mut page = Vec::new();
        let man = clap_mangen::Man::new(command).source(format!("{NAME} {}", env!("CARGO_PKG_VERSION")));
        match man.render(&mut page) {
            Ok(()) => print(&page),
            Err(error) => impossible(error),
        }
    }
}

fn print(text: &[u8]) -> ExitCode {
    crate::outln!("{}", String::from_utf8_lossy(text).trim_end());
    ExitCode::SUCCESS
}
