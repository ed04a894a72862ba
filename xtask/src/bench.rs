//! `cargo xtask bench`: what the library adds to the kernel's work, compared with the targets.
//!
//! Each figure is measured in a process of its own on the emulated driver. Instructions and system
//! calls are counted exactly ([`counter`]) and do not depend on the load of the machine. Times do,
//! and are only compared within one run.

pub mod client;
pub mod counter;
mod emulator;
pub mod figure;

use crate::terminal::{Align, Table, counted};
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator};
use client::{NOT_TRACED, OwnFigures, Work};
use counter::{CountError, Mode, Traced};
use figure::{Figure, Target, Unit, Verdict};
use indicatif::ProgressBar;
use nix::errno::Errno;
use nix::sys::wait::WaitStatus;
use serde::Serialize;
use std::io::Read;
use std::process::{Command, ExitCode, Stdio};

/// Options of `bench`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask bench --json > bench.json")]
pub struct Bench {
    /// Print JSON instead of a table (docs/hosts.md).
    #[arg(long)]
    json: bool,
    /// Skip the figures with 100 000 live objects, which take most of the time.
    #[arg(long)]
    quick: bool,
    /// Measure a debug build, whose figures mean nothing. For tests of the command.
    #[arg(long, hide = true)]
    debug: bool,
}

/// The output: docs/schema/bench.json.
#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    arch: &'static str,
    generation: String,
    optimised: bool,
    figures: Vec<Figure>,
    missed: usize,
}

impl Bench {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        if cfg!(debug_assertions) && !self.debug {
            return self.run_optimised();
        }
        let figures = match self.measure() {
            Ok(figures) => figures,
            Err(reason) => return crate::impossible(reason),
        };
        let count = |verdict| figures.iter().filter(|figure| figure.verdict == verdict).count();
        let (missed, unmeasured) = (count(Verdict::Missed), count(Verdict::NotMeasured));
        let document = Document {
            version: 1,
            arch: std::env::consts::ARCH,
            generation: Config::default().generation.to_string(),
            optimised: !cfg!(debug_assertions),
            figures,
            missed,
        };
        if self.json {
            crate::print_json(&document);
        } else {
            print(&document);
        }
        match (missed, unmeasured) {
            (0, 0) => ExitCode::SUCCESS,
            (0, _) => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }

    /// Runs the same command in a release build.
    fn run_optimised(&self) -> ExitCode {
        let Some(cargo) = std::env::var_os("CARGO") else {
            return crate::impossible("this is a debug build, whose figures mean nothing; use a release build");
        };
        let mut command = Command::new(cargo);
        command.args(["run", "--quiet", "--release", "--package", "xtask", "--", "bench"]);
        command.args(self.json.then_some("--json")).args(self.quick.then_some("--quick"));
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        match command.status() {
            Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
            Err(error) => crate::impossible(format!("the release build cannot be started: {error}")),
        }
    }

    fn measure(&self) -> Result<Vec<Figure>, String> {
        // 100 000 live handles of 2 MiB need more memory than any card has.
        let config = Config { hbm: 1 << 40, device_process: DeviceProcess::Automatic, ..Config::default() };
        let emulator = Emulator::start(config.clone()).map_err(|error| error.to_string())?;
        let mut bench = Run { figures: Vec::new(), progress: ProgressBar::new(19) };
        emulator.run(|| self.operations(&mut bench));
        drop(emulator);
        let config = Config { device_process: DeviceProcess::Required, ..config };
        let emulator = Emulator::start(config).map_err(|error| error.to_string())?;
        emulator.run(|| {
            let figures = bench.measure(Work::BringUp, 1, 1, 0);
            bench.calls("bring-up with a device process", &figures, Target::must(29.0));
        });
        drop(emulator);
        let latency =
            ascend_emulator::latency::measure(if self.debug { 100 } else { 20_000 }).map_err(|error| error.to_string());
        let latency = latency.map(|latency| latency.median.as_nanos() as f64 / 1000.0);
        bench.add("emulated ioctl (median)", None, Unit::Microseconds, latency, Target::must(15.0));
        bench.figures.extend(emulator::figures(if self.debug { 100 } else { 50_000 }));
        bench.progress.finish_and_clear();
        Ok(bench.figures)
    }

    fn operations(&self, bench: &mut Run) {
        let lives: &[u64] = match (self.debug, self.quick) {
            (true, _) => &[1],
            (_, true) => &[1, 1_000],
            _ => &[1, 1_000, 100_000],
        };
        let (pairs, timed) = if self.debug { (2, 10) } else { (64, 2_000) };
        for operation in &OPERATIONS {
            for &live in lives {
                let figures = bench.measure(operation.work, live, pairs, if live == 1 { timed } else { 0 });
                let target = if live == 1 { operation.with_one } else { operation.with_many };
                bench.add(operation.name, Some(live), Unit::Instructions, count(&figures, |f| f.instructions), target);
                if live == 1 {
                    bench.calls(operation.name, &figures, Target::must(2.0));
                    let raw = bench.measure(operation.raw, live, 1, timed);
                    bench.times(operation.name, &figures, &raw);
                }
                if live == 100_000 {
                    let bytes = figures.and_then(|figures| {
                        figures.own.bytes_per_object.ok_or_else(|| "the process did not report it".to_owned())
                    });
                    bench.add(operation.object, Some(live), Unit::Bytes, bytes, Target::must(150.0));
                }
            }
        }
        let figures = bench.measure(Work::Cycle, 1, pairs, 0);
        bench.calls("create, reserve, map, unmap, free, release", &figures, Target::must(6.0).vendor(11.0));
        let figures = bench.measure(Work::BringUp, 1, 1, 0);
        bench.calls("bring-up of the first device", &figures, Target::must(13.0).vendor(21.0));
        for (name, work) in [
            ("export", Work::Export),
            ("trust", Work::Trust),
            ("import of a handle", Work::ImportHandle),
            ("import of a ticket", Work::ImportTicket),
        ] {
            let figures = bench.measure(work, 1, pairs, 0);
            bench.add(name, None, Unit::Instructions, count(&figures, |f| f.instructions), Target::must(600.0));
            bench.add(name, None, Unit::Ioctls, count(&figures, |f| f.ioctls), Target::must(1.0));
            bench.calls(name, &figures, Target::default());
        }
    }
}

/// A pair of operations with its targets.
struct Operation {
    name: &'static str,
    object: &'static str,
    work: Work,
    raw: Work,
    with_one: Target,
    with_many: Target,
}

/// The figures of the vendor's library are instructions of a pair of calls, counted without a
/// kernel.
const OPERATIONS: [Operation; 3] = [
    Operation {
        name: "create + release",
        object: "live handle",
        work: Work::CreateRelease,
        raw: Work::RawCreateRelease,
        with_one: Target { must: Some(600.0), aim: Some(400.0), vendor: Some(2082.0) },
        with_many: Target { must: Some(600.0), aim: Some(400.0), vendor: None },
    },
    Operation {
        name: "reserve + free",
        object: "live reservation",
        work: Work::ReserveFree,
        raw: Work::RawReserveFree,
        with_one: Target { must: Some(1000.0), aim: Some(700.0), vendor: Some(3495.0) },
        with_many: Target { must: Some(1500.0), aim: Some(900.0), vendor: Some(51_429.0) },
    },
    Operation {
        name: "map + unmap",
        object: "live mapping",
        work: Work::MapUnmap,
        raw: Work::RawMapUnmap,
        with_one: Target { must: Some(900.0), aim: Some(700.0), vendor: Some(3188.0) },
        with_many: Target { must: Some(1300.0), aim: Some(1000.0), vendor: Some(4551.0) },
    },
];

/// The result of a measurement, or why there is none.
type Measured = Result<Figures, String>;

fn count(figures: &Measured, what: impl Fn(&Counts) -> f64) -> Result<f64, String> {
    match figures {
        Ok(Figures { counts: Ok(counts), .. }) => Ok(what(counts)),
        Ok(Figures { counts: Err(errno), .. }) => Err(CountError::Trace(*errno).to_string()),
        Err(reason) => Err(reason.clone()),
    }
}

/// The figures so far.
struct Run {
    figures: Vec<Figure>,
    progress: ProgressBar,
}

impl Run {
    fn measure(&self, work: Work, live: u64, pairs: u64, timed: u64) -> Measured {
        let measured = measure(work, live, pairs, timed).map_err(|error| error.to_string());
        self.progress.inc(1);
        measured
    }

    fn add(
        &mut self,
        name: &'static str,
        live: Option<u64>,
        unit: Unit,
        measured: Result<f64, String>,
        target: Target,
    ) {
        self.figures.push(Figure::new(name, live, unit, measured, target));
    }

    fn calls(&mut self, name: &'static str, figures: &Measured, target: Target) {
        self.add(name, None, Unit::Calls, count(figures, |figures| figures.calls), target);
    }

    /// The time with the library, and its ratio to that of the ioctls alone.
    fn times(&mut self, name: &'static str, library: &Measured, raw: &Measured) {
        let time = |figures: &Measured| {
            let figures = figures.as_ref().map_err(Clone::clone)?;
            figures.own.nanoseconds.ok_or_else(|| "the process did not report it".to_owned())
        };
        let (library, raw) = (time(library), time(raw));
        let ratio = library.clone().and_then(|library| raw.map(|raw| library / raw));
        let library = library.map(|nanoseconds| nanoseconds / 1000.0);
        self.add(name, None, Unit::Microseconds, library, Target::default());
        self.add("… as a multiple of the bare ioctls", None, Unit::Times, ratio, Target::default());
    }
}

/// What one operation costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// What was counted; an errno if tracing is not allowed.
    pub counts: Result<Counts, Errno>,
    /// What the process measured itself.
    pub own: OwnFigures,
}

/// The counts of one operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counts {
    /// Instructions in user space.
    pub instructions: f64,
    /// System calls.
    pub calls: f64,
    /// The ioctls among them.
    pub ioctls: f64,
}

/// Measures one operation in a process of its own, on the driver of the calling thread. If tracing
/// is not allowed, only its time is measured.
pub fn measure(work: Work, live: u64, pairs: u64, timed: u64) -> Result<Figures, CountError> {
    let name = clap::ValueEnum::to_possible_value(&work).map(|value| value.get_name().to_owned()).unwrap_or_default();
    let program = std::env::current_exe().map_err(CountError::Spawn)?;
    let mut command = Command::new(program);
    command.args(["bench-client", &name]).args(["--live", &live.to_string()]);
    command.args(["--pairs", &pairs.to_string()]).args(["--timed", &timed.to_string()]).stdout(Stdio::piped());
    match trace(&mut command, pairs) {
        Ok((counts, own)) => Ok(Figures { counts: Ok(counts), own }),
        Err(CountError::Ended(WaitStatus::Exited(_, code))) if code == i32::from(NOT_TRACED) => {
            let output = command.arg("--untraced").output().map_err(CountError::Spawn)?;
            Ok(Figures { counts: Err(Errno::EPERM), own: own_figures(&output.stdout)? })
        }
        Err(error) => Err(error),
    }
}

/// Runs the process and counts in its sections.
fn trace(command: &mut Command, pairs: u64) -> Result<(Counts, OwnFigures), CountError> {
    let mut traced = Traced::spawn(command)?;
    let mut per_operation = |mode| -> Result<[f64; 2], CountError> {
        let mut section = || {
            traced.advance(Mode::Run)?;
            traced.advance(mode)
        };
        let (empty, full) = (section()?, section()?);
        let part = |full: u64, empty: u64| full.saturating_sub(empty) as f64 / pairs as f64;
        Ok([part(full.number, empty.number), part(full.ioctls, empty.ioctls)])
    };
    let [instructions, _] = per_operation(Mode::Steps)?;
    let [calls, ioctls] = per_operation(Mode::Calls)?;
    let mut output = traced.child().stdout.take();
    traced.finish()?;
    let mut text = Vec::new();
    if let Some(output) = &mut output {
        output.read_to_end(&mut text).map_err(CountError::Spawn)?;
    }
    Ok((Counts { instructions, calls, ioctls }, own_figures(&text)?))
}

/// What the process measured itself.
fn own_figures(output: &[u8]) -> Result<OwnFigures, CountError> {
    serde_json::from_slice(output).map_err(|error| CountError::Spawn(error.into()))
}

fn print(document: &Document) {
    crate::outln!(
        "{} on the emulated driver {}; instructions and system calls are exact, times depend on this machine",
        document.arch,
        document.generation
    );
    let number = |number: Option<f64>| {
        number.map(|number| if number.fract() == 0.0 { format!("{number}") } else { format!("{number:.1}") })
    };
    let mut rows = Table::new(&["operation", "live", "measured", "", "must", "aim", "vendor", ""]);
    for column in [1, 2, 4, 5, 6] {
        rows.align(column, Align::Right);
    }
    for figure in &document.figures {
        rows.row([
            figure.name.to_owned(),
            figure.live.map(|live| live.to_string()).unwrap_or_default(),
            number(figure.measured).unwrap_or_else(|| "-".to_owned()),
            figure.unit.to_string(),
            number(figure.target.must).unwrap_or_default(),
            number(figure.target.aim).unwrap_or_default(),
            number(figure.target.vendor).unwrap_or_default(),
            figure.verdict.to_string(),
        ]);
    }
    rows.print();
    for figure in &document.figures {
        if let Some(reason) = &figure.reason {
            crate::outln!("not measured: {}: {reason}", figure.name);
        }
    }
    match document.missed {
        0 => {}
        missed => crate::outln!("{} above the limit", counted(missed, "figure")),
    }
}
