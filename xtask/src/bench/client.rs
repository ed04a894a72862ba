//! The process that is measured: it makes objects, then repeats one operation between marks.
//!
//! The order is always the same, so that the parent need not know the operation: a section to warm up, an empty section and a full
//! one that are stepped through, an empty and a full one whose system calls are counted, then, no longer traced, a timed run. What the process knows by itself goes to its standard output as one
//! line of JSON ([`Told`]).

use super::counter::{mark, trace_me};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

/// What is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// One system call that does nothing: shows that the counting is right.
    Calibration,
}

/// The process that is measured.
#[derive(clap::Args)]
pub struct Client {
    /// What is repeated.
    work: Work,
    /// How many objects of the kind live meanwhile.
    #[arg(long, default_value_t = 1)]
    live: u64,
    /// How often it is repeated.
    #[arg(long, default_value_t = 32)]
    pairs: u64,
    /// How often it is repeated for the time.
    #[arg(long, default_value_t = 0)]
    timed: u64,
}

/// What the process tells of itself.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Told {
    /// Growth of its own memory for each live object, in bytes.
    pub bytes_per_object: Option<f64>,
    /// Time of one repetition, if there was a timed run.
    pub nanoseconds: Option<f64>,
}

/// An error of the measured process; the library's are as they are.
type Failure = Box<dyn std::error::Error>;

/// Exit status that says that tracing is not allowed.
pub const NOT_TRACED: u8 = 4;

impl Client {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        if trace_me().is_err() {
            return ExitCode::from(NOT_TRACED);
        }
        match self.work() {
            Ok(told) => match serde_json::to_string(&told) {
                Ok(line) => {
                    println!("{line}");
                    ExitCode::SUCCESS
                }
                Err(error) => crate::impossible(error),
            },
            Err(error) => crate::impossible(error),
        }
    }

    fn work(&self) -> Result<Told, Failure> {
        match self.work {
            Work::Calibration => self.repeat(None, || {
                black_box(nix::unistd::getppid());
                Ok(())
            }),
        }
    }

    /// The marked sections and the timed run.
    fn repeat(
        &self,
        bytes_per_object: Option<f64>,
        mut operation: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Told, Failure> {
        mark()?;
        // The first section is not counted: what happens only the first time is not the operation's cost.
        for times in [2, 0, self.pairs, 0, self.pairs] {
            repeat(times, &mut operation)?;
            mark()?;
        }
        let start = Instant::now();
        repeat(self.timed, &mut operation)?;
        let nanoseconds = (self.timed > 0).then(|| start.elapsed().as_nanos() as f64 / self.timed as f64);
        Ok(Told { bytes_per_object, nanoseconds })
    }
}

#[inline(never)]
fn repeat(times: u64, operation: &mut impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
    for _ in 0..times {
        operation()?;
    }
    Ok(())
}

/// The process's own memory in bytes: anonymous pages that are resident. Pages of the driver's files are not in it.
pub fn own_memory() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kibibytes = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .ok_or("/proc/self/status has no RssAnon")?;
    Ok(kibibytes.trim().parse::<u64>()? * 1024)
}
