//! `cargo xtask bench`: what the library adds to the kernel's work, beside the targets.
//!
//! Each figure is measured in a process of its own that sees the emulated driver. Instructions and system calls are counted exactly
//! ([`counter`]) and do not depend on the machine's load; times do, and are only compared within one run.

pub mod client;
pub mod counter;

use client::{Told, Work};
use counter::{CountError, Gait, Traced};
use std::io::Read;
use std::process::{Command, ExitCode, Stdio};

/// Measure what the library adds to the kernel's work, beside its targets.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask bench --json > bench.json")]
pub struct Bench {
    /// Print JSON instead of a table (docs/json.md).
    #[arg(long)]
    json: bool,
}

impl Bench {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        match measure(Work::Calibration, 1, 32, 1000) {
            Ok(figures) => {
                println!("{figures:?}");
                ExitCode::SUCCESS
            }
            Err(error) => crate::impossible(error),
        }
    }
}

/// What one operation costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// Instructions in user space.
    pub instructions: f64,
    /// System calls.
    pub calls: f64,
    /// What the process told.
    pub told: Told,
}

/// Measures one operation in a process of its own, which sees what the calling thread sees.
pub fn measure(work: Work, live: u64, pairs: u64, timed: u64) -> Result<Figures, CountError> {
    let name = clap::ValueEnum::to_possible_value(&work).map(|value| value.get_name().to_owned()).unwrap_or_default();
    let program = std::env::current_exe().map_err(CountError::Spawn)?;
    let mut command = Command::new(program);
    command.args(["bench-client", &name]).args(["--live", &live.to_string()]);
    command.args(["--pairs", &pairs.to_string()]).args(["--timed", &timed.to_string()]).stdout(Stdio::piped());
    let mut traced = Traced::spawn(&mut command)?;
    traced.advance(Gait::Run)?;
    let mut per_operation = |gait| -> Result<f64, CountError> {
        let empty = traced.advance(gait)?;
        let full = traced.advance(gait)?;
        Ok(full.saturating_sub(empty) as f64 / pairs as f64)
    };
    let instructions = per_operation(Gait::Steps)?;
    let calls = per_operation(Gait::Calls)?;
    let mut output = traced.child().stdout.take();
    traced.finish()?;
    let mut line = String::new();
    if let Some(output) = &mut output {
        output.read_to_string(&mut line).map_err(CountError::Spawn)?;
    }
    Ok(Figures { instructions, calls, told: serde_json::from_str(&line).unwrap_or_default() })
}
