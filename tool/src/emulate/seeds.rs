//! `emulate --seed` and `--seeds`: runs that a number decides.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::impossible;
use crate::terminal::counted;
use ascend_emulator::schedule::Event;
use ascend_emulator::{Emulator, oracle};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Seeds from the first on and below the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range(u64, u64);

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let number = |text: &str| text.parse::<u64>().ok();
        let ends = text.split_once("..").and_then(|(first, end)| Some((number(first)?, number(end)?)));
        let ends = ends.filter(|(first, end)| first < end);
        ends.map(|(first, end)| Range(first, end)).ok_or_else(|| format!("`{text}` is not a range such as 0..1000"))
    }
}

/// What may happen between calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Events(pub Vec<Event>);

impl FromStr for Events {
    type Err = String;

    fn from_str(text: &str) -> Result<Events, String> {
        match text {
            "all" => Ok(Events(Event::ALL.to_vec())),
            "none" | "" => Ok(Events(Vec::new())),
            _ => text.split(',').map(str::parse).collect::<Result<_, _>>().map(Events),
        }
    }
}

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|event| event.name()).collect();
        f.write_str(if names.is_empty() { "none".to_owned() } else { names.join(",") }.as_str())
    }
}

/// How long processes may run on after the program has ended.
const AFTERWARDS: Duration = Duration::from_secs(3);

/// Says what a seeded run did, and what is wrong after it. Returns how much that is.
pub(super) fn conclude(emulator: &Emulator) -> usize {
    let found = oracle::conclude(emulator, AFTERWARDS);
    for sentence in &found {
        crate::errln!("after the run: {sentence}");
    }
    if let Some(summary) = emulator.schedule() {
        for event in &summary.events {
            crate::errln!("event {event}");
        }
        crate::errln!("{summary}");
    }
    found.len()
}

/// A run that can be repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    seed: u64,
    events: String,
    skipped: Vec<u32>,
    choices: Option<u64>,
}

/// How a run ended.
struct Outcome {
    status: ExitStatus,
    output: String,
    calls: u64,
    events: u32,
    guesses: u64,
}

impl Run {
    /// The options that repeat it.
    fn options(&self) -> Vec<String> {
        let mut options = vec!["--seed".to_owned(), self.seed.to_string(), "--events".into(), self.events.clone()];
        if !self.skipped.is_empty() {
            let skipped: Vec<String> = self.skipped.iter().map(u32::to_string).collect();
            options.extend(["--skip-events".into(), skipped.join(",")]);
        }
        if let Some(choices) = self.choices {
            options.extend(["--choices".into(), choices.to_string()]);
        }
        options
    }

    /// All arguments of this process, with this run instead of a range.
    fn arguments(&self) -> Vec<OsString> {
        let mut own = std::env::args_os().skip(1);
        let mut arguments = Vec::new();
        let mut has_run = false;
        while let Some(argument) = own.next() {
            let text = argument.to_string_lossy();
            let name = text.split('=').next().unwrap_or("");
            if text == "--" {
                arguments.extend(self.options().into_iter().map(OsString::from));
                has_run = true;
                arguments.push(argument);
                break;
            }
            if matches!(name, "--seeds" | "--jobs" | "--events") {
                if name == text {
                    own.next();
                }
                continue;
            }
            arguments.push(argument);
        }
        debug_assert!(has_run, "a program needs `--`");
        arguments.extend(own);
        arguments
    }

    fn run(&self) -> io::Result<Outcome> {
        let mut output = std::fs::File::from(memfd_create(c"output", MFdFlags::MFD_CLOEXEC)?);
        let mut child = Command::new(std::env::current_exe()?)
            .args(self.arguments())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()?;
        let status = child.wait()?;
        let mut bytes = Vec::new();
        output.rewind()?;
        output.read_to_end(&mut bytes)?;
        let output = String::from_utf8_lossy(&bytes).into_owned();
        let start = format!("seed {}: ", self.seed);
        let summary = output.lines().rev().find_map(|line| line.strip_prefix(start.as_str())).unwrap_or("");
        let before = |noun: &str| {
            let words: Vec<&str> = summary.split([' ', ',']).filter(|word| !word.is_empty()).collect();
            words.windows(2).find(|pair| pair[1] == noun).and_then(|pair| pair[0].parse::<u64>().ok()).unwrap_or(0)
        };
        let (calls, events, guesses) = (before("calls"), before("events") as u32, before("guesses"));
        Ok(Outcome { status, output, calls, events, guesses })
    }
}

/// Runs the program for each seed, and shrinks the first one that fails.
pub(super) fn explore(range: Range, jobs: usize, events: &Events) -> ExitCode {
    let next = AtomicU64::new(range.0);
    let over = AtomicBool::new(false);
    let [runs, calls, guesses] = [(); 3].map(|()| AtomicU64::new(0));
    let failed: Mutex<Option<(Run, Outcome)>> = Mutex::new(None);
    let trouble: Mutex<Option<io::Error>> = Mutex::new(None);
    let lock = |error: std::sync::PoisonError<_>| error.into_inner();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= range.1 {
                        return;
                    }
                    let run = Run { seed, events: events.to_string(), skipped: Vec::new(), choices: None };
                    match run.run() {
                        Ok(outcome) => {
                            runs.fetch_add(1, Ordering::Relaxed);
                            calls.fetch_add(outcome.calls, Ordering::Relaxed);
                            guesses.fetch_add(outcome.guesses, Ordering::Relaxed);
                            if !outcome.status.success() {
                                over.store(true, Ordering::Relaxed);
                                let mut failed = failed.lock().unwrap_or_else(lock);
                                if failed.as_ref().is_none_or(|(other, _)| other.seed > seed) {
                                    *failed = Some((run, outcome));
                                }
                            }
                        }
                        Err(error) => {
                            over.store(true, Ordering::Relaxed);
                            *trouble.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = trouble.into_inner().unwrap_or(None) {
        return impossible(format!("a run cannot be started: {error}"));
    }
    crate::errln!(
        "{}, {}, {}",
        counted(runs.into_inner() as usize, "seed"),
        counted(calls.into_inner() as usize, "call"),
        match guesses.into_inner() {
            1 => "1 guess".to_owned(),
            other => format!("{other} guesses"),
        }
    );
    let Some((run, outcome)) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) else {
        return ExitCode::SUCCESS;
    };
    crate::errln!("seed {} fails ({}):\n{}", run.seed, outcome.status, outcome.output.trim_end());
    let (run, tries) = shrink(run, &outcome);
    crate::errln!("shrunk in {}; this repeats it:\n  {}", counted(tries, "run"), command_line(&run));
    if outcome.status.signal().is_some() { ExitCode::FAILURE } else { super::end_like(outcome.status) }
}

/// A smaller run that fails in the same way, and how many runs it took to find.
fn shrink(run: Run, outcome: &Outcome) -> (Run, usize) {
    let mut tries = 0;
    let mut fails = |run: &Run| {
        tries += 1;
        run.run().ok().filter(|again| again.status == outcome.status)
    };
    let mut smallest = run;
    let mut calls = outcome.calls;
    let without = Run { events: "none".into(), ..smallest.clone() };
    match fails(&without) {
        Some(again) => (smallest, calls) = (without, again.calls),
        None => {
            for event in (0..outcome.events).rev() {
                let mut fewer = smallest.clone();
                fewer.skipped.insert(0, event);
                if let Some(again) = fails(&fewer) {
                    (smallest, calls) = (fewer, again.calls);
                }
            }
        }
    }
    let mut below = 0;
    while below < calls {
        let middle = below + (calls - below) / 2;
        let shorter = Run { choices: Some(middle), ..smallest.clone() };
        if fails(&shorter).is_some() {
            (smallest, calls) = (shorter, middle);
        } else {
            below = middle + 1;
        }
    }
    (smallest, tries)
}

/// A command line for a shell.
fn command_line(run: &Run) -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    let words = std::iter::once(program).chain(run.arguments());
    let quoted = words.map(|word| {
        let word = word.to_string_lossy().into_owned();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) { word } else { format!("'{}'", word.replace('\'', r"'\''")) }
    });
    quoted.collect::<Vec<_>>().join(" ")
}
