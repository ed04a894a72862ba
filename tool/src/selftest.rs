//! `ascend-vmm selftest`: the acceptance test for a host with NPUs.
//!
//! There are four suites: every public operation of the library (`library.rs`), the rules of the
//! kernel driver without the library (`--raw`), random calls of the driver (`--random`), and the
//! steps that start a process on a device (`--device-process`). Each uses only memory that it
//! allocated itself, and little of it.

mod device_process;
mod library;
mod random;
mod raw;
pub mod report;
pub mod sharing;

use crate::session_options::SessionOptions;
use crate::terminal::{self, devices, paint};
use ascend_conformance::random::{Hazard, Program};
use ascend_vmm::discovery::{self, Options, Survey};
use report::{Case, Outcome, Report};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of `selftest`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 nothing failed, 1 something failed, 3 there is no device, 2 wrong arguments.\n\n\
                        Examples:\n  ascend-vmm selftest --device 0 --junit selftest.xml\n  \
                        ascend-vmm emulate --driver 9.0.0 -- ascend-vmm selftest\n  \
                        ascend-vmm trace --quiet --json calls.jsonl -- ascend-vmm selftest --random 7 --calls 5000\n  \
                        ascend-vmm emulate --replay calls.jsonl"
)]
pub struct Selftest {
    /// Test only the device with this logical id. The default is every usable device.
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// Print JSON instead of lines (docs/hosts.md).
    #[arg(long)]
    json: bool,
    /// Also write a JUnit report to this file.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Run another suite: find out step by step whether a device needs a process on it and whether
    /// one can be started. It sets the policy of each step itself.
    #[arg(long, conflicts_with = "device_process_policy")]
    device_process: bool,
    /// Run another suite: check the rules of the kernel driver one by one, with system calls alone
    /// (docs/emulator.md).
    #[arg(long, conflicts_with_all = ["device", "device_process", "device_process_policy"])]
    raw: bool,
    /// With --raw, also check rules that exhaust a resource for a moment or make very many calls.
    /// Not for a host that others use.
    #[arg(long, requires = "raw")]
    exhaustion: bool,
    /// Run another suite: random calls of the driver that this number decides, valid and slightly
    /// invalid ones, by two processes. Their answers are not judged here: record them with `trace`,
    /// and compare them with `emulate --replay`.
    #[arg(long, value_name = "SEED", conflicts_with_all = ["raw", "device", "device_process", "device_process_policy"])]
    random: Option<u64>,
    /// How many calls --random makes.
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "random")]
    calls: u32,
    /// With --random, also send what can crash a kernel or cost it something until the driver is
    /// loaded anew: spanning-map, access-none, half-freed-export, two-exporters, host-import-copy,
    /// async-border, other-server (docs/emulator.md). Can be given several times.
    #[arg(long = "hazard", value_name = "NAME", requires = "random")]
    hazards: Vec<Hazard>,
    #[command(flatten)]
    session: SessionOptions,
}

/// Exit status: no device.
const NO_DEVICE: u8 = 3;

impl Selftest {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let suite = if self.device_process { "device-process" } else { "library" };
        if let Some(file) = &self.junit {
            // Better to fail now than after minutes of testing.
            if let Err(error) = std::fs::write(file, "") {
                return crate::impossible(format!("{} cannot be written: {error}", file.display()));
            }
        }
        if self.raw {
            let mut report = Report::new("raw");
            let device = raw::run(&mut report, self.exhaustion, |case| {
                if !self.json {
                    print(case);
                }
            });
            return self.finish(&report, !device);
        }
        if let Some(seed) = self.random {
            let mut report = Report::new("random");
            let program = Program { seed, calls: self.calls, hazards: self.hazards.clone() };
            let device = random::run(&mut report, &program, |case| {
                if !self.json {
                    print(case);
                }
            });
            return self.finish(&report, !device);
        }
        let survey = discovery::survey(&Options::default());
        let mut run = Run { report: Report::new(suite), json: self.json, survey: &survey, session: self.session };
        run.report.driver = survey.generation.map(|generation| generation.to_string());
        let devices = match self.devices(&survey) {
            Ok(devices) => devices,
            Err(reason) => return crate::impossible(reason),
        };
        if devices.is_empty() {
            let check = "the driver has a usable device";
            for finding in &survey.findings {
                run.add("host", check, Outcome::Failed(format!("{finding}. {}", finding.remedy())));
            }
            if survey.findings.is_empty() {
                run.add("host", check, Outcome::Failed("it has none".into()));
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
        let usable: Vec<u32> = survey.devices.iter().filter(|npu| npu.is_usable()).map(|npu| npu.logical.0).collect();
        match self.device {
            Some(device) if usable.contains(&device) => Ok(vec![device]),
            Some(device) if !survey.devices.is_empty() => Err(match &usable[..] {
                [] => format!("there is no usable device {device}, nor any other; `probe` says why"),
                usable => format!("there is no usable device {device}; usable: {}", devices(usable)),
            }),
            _ => Ok(usable),
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

/// Prints a check. On a terminal its lines are broken between words; elsewhere they are left whole,
/// for programs that search them.
fn print(case: &Case) {
    for line in case.line().lines() {
        if !std::io::stdout().is_terminal() {
            crate::outln!("{line}");
            continue;
        }
        let text = line.trim_start();
        let indent = &line[..line.len() - text.len()];
        // Behind the outcome stand two spaces or more, which are part of the layout.
        let (first, text) = match text.split_once("  ") {
            Some((outcome, text)) if indent.is_empty() => (format!("{outcome:<6}"), text),
            _ => (indent.to_owned(), text),
        };
        for line in terminal::wrap(text, terminal::width(), &first, "        ") {
            crate::outln!("{}", paint(&line));
        }
    }
}

/// A run of checks: prints each result as it comes, and collects the report.
struct Run<'a> {
    report: Report,
    json: bool,
    survey: &'a Survey,
    session: SessionOptions,
}

/// Why a check did not pass.
pub(crate) enum Failure {
    /// The check failed: the error.
    Failed(String),
    /// It cannot run here: the reason.
    Skipped(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Failed(crate::said(error))
    }
}

/// The result of a check: a remark, if there is one.
type Checked = Result<Option<String>, Failure>;

/// Fails a check with a sentence if a condition does not hold.
fn ensure(condition: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::Failed(otherwise())) }
}

impl Run<'_> {
    fn add(&mut self, group: &str, name: &str, outcome: Outcome) {
        self.add_timed(group, name, outcome, Duration::ZERO);
    }

    fn add_timed(&mut self, group: &str, name: &str, outcome: Outcome, took: Duration) {
        let case = Case::new(group, name, outcome, took);
        if !self.json {
            print(&case);
        }
        self.report.add(case);
    }

    /// Runs a check. Returns whether it passed.
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
