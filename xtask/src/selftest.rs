//! `cargo xtask selftest`: the acceptance test for a host with NPUs.
//!
//! Three suites, each of which touches only memory that it allocated itself, and little of that: every public operation of the library (`library.rs`),
//! the kernel driver's rules without the library (`--raw`), and the experiment that shows what a device process needs (`--device-process`).

mod device_process;
mod library;
mod raw;
pub mod report;
pub mod sharing;

use ascend_vmm::discovery::{self, Options, Survey};
use report::{Case, Outcome, Report};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of `selftest`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 nothing failed, 1 something failed, 3 there is no device, 2 wrong arguments.\n\n\
                        Examples:\n  cargo xtask selftest --device 0 --junit selftest.xml\n  \
                        cargo xtask emulate --driver 9.0.0 -- cargo xtask selftest"
)]
pub struct Selftest {
    /// Only this device, by its logical id; without it, every one that works.
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// Print JSON instead of lines (docs/json.md).
    #[arg(long, conflicts_with = "junit")]
    json: bool,
    /// Also write a JUnit report to this file.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Find out step by step whether a device needs a process on it, and how it starts.
    #[arg(long)]
    device_process: bool,
    /// Ask the kernel driver's rules one by one, by system calls alone (docs/conformance.md).
    #[arg(long, conflicts_with_all = ["device", "device_process"])]
    raw: bool,
    /// With --raw, also rules that use up a whole resource for a moment or make very many calls: not on a host that others use.
    #[arg(long, requires = "raw")]
    exhaustion: bool,
}

/// No device.
const NO_DEVICE: u8 = 3;

impl Selftest {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        let suite = if self.device_process { "device-process" } else { "library" };
        if let Some(file) = &self.junit {
            // Found out now and not after minutes of testing.
            if let Err(error) = std::fs::write(file, "") {
                return crate::impossible(format!("{} cannot be written: {error}", file.display()));
            }
        }
        if self.raw {
            let mut report = Report::new("raw");
            let device = raw::run(&mut report, self.exhaustion, |case| {
                if !self.json {
                    crate::outln!("{}", crate::terminal::paint(&case.line()));
                }
            });
            return self.finish(&report, !device);
        }
        let survey = discovery::survey(&Options::default());
        let mut run = Run { report: Report::new(suite), json: self.json, survey: &survey };
        run.report.driver = survey.generation.map(|generation| generation.to_string());
        let devices = match self.devices(&survey) {
            Ok(devices) => devices,
            Err(reason) => return crate::impossible(reason),
        };
        if devices.is_empty() {
            for finding in &survey.findings {
                run.add(
                    "host",
                    "the driver shows a device that works",
                    Outcome::Failed(format!("{finding}. {}", finding.remedy())),
                );
            }
            if survey.findings.is_empty() {
                run.add("host", "the driver shows a device that works", Outcome::Failed("it shows none".into()));
            }
        } else {
            match suite {
                "device-process" => device_process::run(&mut run, &devices),
                _ => library::run(&mut run, &devices),
            }
        }
        self.finish(&run.report, devices.is_empty())
    }

    /// The devices to test, by logical id.
    fn devices(&self, survey: &Survey) -> Result<Vec<u32>, String> {
        let working: Vec<u32> = survey.devices.iter().filter(|npu| npu.is_usable()).map(|npu| npu.logical.0).collect();
        match self.device {
            Some(device) if working.contains(&device) => Ok(vec![device]),
            Some(device) if !survey.devices.is_empty() => {
                let working: Vec<String> = working.iter().map(u32::to_string).collect();
                Err(format!("there is no device {device} that works; the devices that do are: {}", working.join(", ")))
            }
            _ => Ok(working),
        }
    }

    fn finish(&self, report: &Report, no_device: bool) -> ExitCode {
        if let Some(file) = &self.junit {
            if let Err(error) = std::fs::write(file, report.junit()) {
                return crate::impossible(format!("{} cannot be written: {error}", file.display()));
            }
        }
        if self.json {
            crate::print_json(report);
        } else {
            crate::outln!("{}", report.conclusion());
        }
        match report.summary.failed {
            _ if no_device => ExitCode::from(NO_DEVICE),
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}

/// A run of checks: tells each as it is done, and keeps it for the report.
struct Run<'a> {
    report: Report,
    json: bool,
    survey: &'a Survey,
}

/// Why a check did not pass.
enum Failure {
    /// It is not as it should be.
    Failed(String),
    /// It cannot be tried here.
    Skipped(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Failed(error.to_string())
    }
}

/// What a check gives: a remark, if there is one.
type Checked = Result<Option<String>, Failure>;

/// Fails a check with a sentence unless something is true.
fn ensure(true_: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    if true_ { Ok(()) } else { Err(Failure::Failed(otherwise())) }
}

impl Run<'_> {
    fn add(&mut self, group: &str, name: &str, outcome: Outcome) {
        self.add_timed(group, name, outcome, Duration::ZERO);
    }

    fn add_timed(&mut self, group: &str, name: &str, outcome: Outcome, took: Duration) {
        let case = Case::new(group, name, outcome, took);
        if !self.json {
            crate::outln!("{}", crate::terminal::paint(&case.line()));
        }
        self.report.add(case);
    }

    /// Does a check; whether it passed.
    fn check(&mut self, group: &str, name: &str, check: impl FnOnce() -> Checked) -> bool {
        let start = Instant::now();
        let outcome = match check() {
            Ok(remark) => Outcome::Passed(remark),
            Err(Failure::Failed(error)) => Outcome::Failed(error),
            Err(Failure::Skipped(reason)) => Outcome::Skipped(reason),
        };
        let passed = matches!(outcome, Outcome::Passed(_));
        self.add_timed(group, name, outcome, start.elapsed());
        passed
    }
}
