//! `cargo xtask bench`: what the library adds to the kernel's work, compared with the limits.
//!
//! Each figure is measured in a process of its own on the emulated driver. Instructions and system
//! calls are counted exactly ([`counter`]) and do not depend on the load of the machine. Times do,
//! and are only compared within one run.

pub mod client;
mod counter;
mod emulator;
mod figure;
mod plot;
mod pool;
mod service;

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator};
use ascend_vmm_tool::terminal::{self, Table, counted, steps};
use client::{NOT_TRACED, OwnFigures, Work};
use counter::{Count, CountError, Mode, Traced};
use figure::{Figure, Quantity, Target, Verdict};
use indicatif::ProgressBar;
use nix::errno::Errno;
use nix::sys::wait::WaitStatus;
use plot::{Chart, Point};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Options of `bench`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask bench --json > bench.json")]
pub struct Bench {
    /// Print JSON instead of a table (docs/hosts.md).
    #[arg(long)]
    json: bool,
    /// Skip the figures with more than 1000 live objects, which take most of the time.
    #[arg(long)]
    quick: bool,
    /// Draw the figures as SVG files into this directory.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
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
    c_library: Option<String>,
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
        let Run { figures, points, .. } = match self.measure() {
            Ok(run) => run,
            Err(reason) => return ascend_vmm_tool::impossible(reason),
        };
        if let Some(directory) = &self.plot {
            if let Err(error) = plot::draw(directory, &points) {
                return ascend_vmm_tool::impossible(format!("{}: {error}", directory.display()));
            }
        }
        let count = |verdict| figures.iter().filter(|figure| figure.verdict == verdict).count();
        let (missed, unmeasured) = (count(Verdict::Missed), count(Verdict::NotMeasured));
        let document = Document {
            version: 1,
            arch: std::env::consts::ARCH,
            generation: Config::default().generation.to_string(),
            c_library: c_library(),
            optimised: !cfg!(debug_assertions),
            figures,
            missed,
        };
        if self.json {
            ascend_vmm_tool::print_json(&document);
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
            return ascend_vmm_tool::impossible(
                "this is a debug build, whose figures mean nothing; use a release build",
            );
        };
        let mut command = Command::new(cargo);
        // Not --quiet: the build takes a minute.
        command.args(["run", "--release", "--package", "xtask", "--", "bench"]);
        command.args(self.json.then_some("--json")).args(self.quick.then_some("--quick"));
        if let Some(directory) = self.plot.as_deref().and_then(|directory| std::path::absolute(directory).ok()) {
            command.arg("--plot").arg(directory);
        }
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        match command.status() {
            Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
            Err(error) => ascend_vmm_tool::impossible(format!("the release build cannot be started: {error}")),
        }
    }

    fn measure(&self) -> Result<Run, String> {
        // A million handles of 2 MiB need more memory than any card has.
        let config = Config { hbm: 1 << 42, device_process: DeviceProcess::Automatic, ..Config::default() };
        let emulator = Emulator::start(config.clone()).map_err(|error| error.to_string())?;
        let mut bench = Run { figures: Vec::new(), points: Vec::new(), progress: steps("starting", self.steps()) };
        emulator.run(|| self.operations(&mut bench));
        drop(emulator);
        let config = Config { device_process: DeviceProcess::Required, ..config };
        let emulator = Emulator::start(config).map_err(|error| error.to_string())?;
        emulator.run(|| {
            let calls = bench.calls_only(&Setup::of(Work::BringUp));
            bench.add("bring-up with a device process", None, Quantity::Calls, calls, Target::must(36.0));
        });
        drop(emulator);
        bench.progress.set_message("the emulated driver");
        let latency =
            ascend_emulator::latency::measure(if self.debug { 100 } else { 20_000 }).map_err(|error| error.to_string());
        let latency = latency.map(|latency| latency.median.as_nanos() as f64 / 1000.0);
        bench.progress.inc(1);
        bench.add("emulated ioctl (median)", None, Quantity::Microseconds, latency, Target::default());
        bench.figures.extend(emulator::figures(if self.debug { 100 } else { 50_000 }, self.most()));
        bench.progress.inc(1);
        bench.progress.set_message("the memory service");
        bench.figures.extend(service::figures(if self.debug { 10 } else { 10_000 }));
        bench.progress.inc(1);
        bench.progress.finish_and_clear();
        Ok(bench)
    }

    /// The most objects that are alive while something is measured.
    fn most(&self) -> u64 {
        match (self.debug, self.quick) {
            (true, _) => 1,
            (_, true) => 1_000,
            _ => 1_000_000,
        }
    }

    /// The operations that are measured.
    fn wanted(&self) -> impl Iterator<Item = &'static Operation> {
        let (most, debug) = (self.most(), self.debug);
        // Many elements take too long in a debug build.
        let wanted = move |operation: &&Operation| {
            operation.setup.live <= most && !(debug && (operation.per > 1.0 || operation.setup.is_special()))
        };
        OPERATIONS.iter().filter(wanted)
    }

    /// The number of measurements: operations, calls alone, C functions and their Rust calls, worst
    /// cases, times, the emulated driver itself and the memory service.
    fn steps(&self) -> u64 {
        let worst = if self.most() >= 1_000_000 { 4 } else { 0 };
        self.wanted().count() as u64 + 3 + 2 * C_FUNCTIONS.len() as u64 + worst + 6 + 3 + pool::steps(self.most())
    }

    fn operations(&self, bench: &mut Run) {
        let most = self.most();
        let (pairs, timed) = if self.debug { (2, 10) } else { (64, 2_000) };
        let mut first = BTreeMap::new();
        for operation in self.wanted() {
            bench.progress.set_message(operation.name);
            let setup = &operation.setup;
            // What is counted per element repeats itself.
            let pairs = if operation.per > 1.0 { 2 } else { pairs };
            let figures = bench.measure(setup, pairs, 0);
            let per = operation.per;
            let instructions = steps_of(&figures, |steps| steps.instructions / per);
            if let Ok(measured) = instructions {
                bench.point(Chart::Live, operation.name, setup.live, measured, !setup.is_special());
                let by_size = matches!(setup.work, Work::MapUnmap | Work::MappingAt | Work::CreateRelease);
                let plain = setup.live == 1 && !setup.explicit && !setup.sparse;
                bench.point(Chart::Size, operation.short(), setup.size >> 20, measured, by_size && plain);
            }
            if let Ok(c_library) = steps_of(&figures, |steps| steps.c_library / per) {
                let stacked = setup.live == 1 && !setup.is_special() && operation.per == 1.0;
                let own = instructions.clone().unwrap_or(c_library) - c_library;
                bench.point(Chart::Parts, operation.name, 0, own, stacked);
                bench.point(Chart::Parts, operation.name, 1, c_library, stacked);
            }
            let target = Target { must: operation.most, vendor: operation.vendor };
            bench.add(operation.name, Some(setup.live), Quantity::Instructions, instructions.clone(), target);
            if setup.live == 1 && !setup.is_special() {
                first.insert(operation.short(), instructions);
            } else if let Some(Ok(first)) = first.get(operation.short()).filter(|_| !setup.explicit) {
                let growth = instructions.map(|instructions| instructions / first);
                let name = format!("{}, against one of 2 MiB", operation.name);
                let limit = if setup.work == Work::ImportTicket { IMPORT_GROWTH } else { GROWTH };
                bench.add(name, Some(setup.live), Quantity::Times, growth, Target::must(limit));
            }
            if setup.live == 1 && operation.calls > 0.0 {
                let calls = count(&figures, |counts| counts.calls);
                bench.add(operation.name, None, Quantity::Calls, calls, Target::must(operation.calls));
                bench.add(
                    operation.name,
                    None,
                    Quantity::Ioctls,
                    count(&figures, |counts| counts.ioctls),
                    Target::must(operation.calls),
                );
            }
            let bytes = figures.as_ref().ok().and_then(|figures| figures.own.bytes_per_object);
            if let Some(bytes) = bytes.filter(|_| setup.live >= 5_000) {
                let (limit, density) = if setup.sparse { (500.0, "one per GiB") } else { (150.0, "dense") };
                bench.point(Chart::Bytes, operation.object, u64::from(setup.sparse), bytes, true);
                let name = format!("{}, {density}", operation.object);
                bench.add(name, Some(setup.live), Quantity::Bytes, Ok(bytes), Target::must(limit));
            }
        }
        for (name, work, vendor) in [
            ("create, reserve, map, unmap, free, release", Work::Cycle, 8.0),
            ("bring-up of the first device", Work::BringUp, 21.0),
        ] {
            let limit = if work == Work::Cycle { 6.0 } else { 13.0 };
            bench.progress.set_message(name);
            let calls = bench.calls_only(&Setup::of(work));
            bench.add(name, None, Quantity::Calls, calls, Target::must(limit).vendor(vendor));
        }
        for (name, c, own, calls) in C_FUNCTIONS {
            bench.progress.set_message(name);
            let measure = |work| steps_of(&bench.measure(&Setup::of(work), pairs, 0), |steps| steps.instructions);
            let more = measure(c).and_then(|c| Ok((c - measure(own)?) / calls));
            bench.add(name, None, Quantity::Instructions, more, Target::must(C_MORE));
        }
        pool::figures(bench, most, pairs);
        if most >= 1_000_000 {
            self.worst(bench);
        }
        self.times(bench, timed);
    }

    /// The worst single operation on the way to many objects.
    fn worst(&self, bench: &mut Run) {
        for (name, work, live) in [
            ("create", Work::GrowCreate, 1_000_000),
            ("reserve", Work::GrowReserve, 1_000_000),
            ("map", Work::GrowMap, 1_000_000),
            ("import", Work::GrowImport, 100_000),
        ] {
            bench.progress.set_message(format!("{name}, {live} times"));
            let counts = grow(&Setup { live, ..Setup::of(work) }).map_err(|error| error.to_string());
            bench.progress.inc(1);
            let ratio = counts.map(|mut counts| {
                counts.sort_unstable();
                let (median, worst) = (counts[counts.len() / 2] as f64, counts[counts.len() - 1] as f64);
                bench.point(Chart::Worst, name, 0, median, true);
                bench.point(Chart::Worst, name, 1, worst, true);
                worst / median
            });
            let name = format!("{name}: worst against median");
            bench.add(name, Some(live), Quantity::Times, ratio, Target::must(100.0));
        }
    }

    /// CPU time against that of the bare ioctls: the two in turn, and the median of several ratios.
    fn times(&self, bench: &mut Run, timed: u64) {
        let rounds = if self.debug { 1 } else { 3 };
        let mut compare = |name: String, library: &Setup, raw: Work| {
            bench.progress.set_message(format!("time of {name}"));
            let mut ratios = Vec::new();
            let mut own = Vec::new();
            for _ in 0..rounds {
                let time = |setup: &Setup| untraced(setup, timed).map_err(|error| error.to_string());
                match (time(library), time(&Setup::of(raw))) {
                    (Ok(library), Ok(raw)) => {
                        ratios.push(library / raw);
                        own.push(library / 1000.0);
                    }
                    (Err(reason), _) | (_, Err(reason)) => {
                        bench.add(name, None, Quantity::Times, Err(reason), Target::default());
                        return;
                    }
                }
            }
            bench.progress.inc(1);
            bench.add(name.clone(), None, Quantity::Microseconds, Ok(median(own)), Target::default());
            bench.add(
                format!("{name}, against bare ioctls"),
                None,
                Quantity::Times,
                Ok(median(ratios)),
                Target::default(),
            );
        };
        compare("create + release".into(), &Setup::of(Work::CreateRelease), Work::RawCreateRelease);
        compare("reserve + free".into(), &Setup::of(Work::ReserveFree), Work::RawReserveFree);
        compare("map + unmap".into(), &Setup::of(Work::MapUnmap), Work::RawMapUnmap);
        for threads in [2, 4, 8] {
            let setup = Setup { threads, ..Setup::of(Work::CreateRelease) };
            compare(format!("create + release, {threads} threads"), &setup, Work::RawCreateRelease);
        }
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// What the measured process does, and its parameters.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// What is repeated.
    pub work: Work,
    /// Live objects during the measurement.
    pub live: u64,
    /// Size of each.
    pub size: u64,
    /// One in each GiB, or one beside the other.
    pub sparse: bool,
    /// Ended by calls, or dropped.
    pub explicit: bool,
    /// Threads that do it.
    pub threads: u64,
}

impl Setup {
    /// The usual one: with one live object of 2 MiB.
    pub const fn of(work: Work) -> Setup {
        Setup { work, live: 1, size: 2 << 20, sparse: false, explicit: false, threads: 1 }
    }

    const fn live(self, live: u64) -> Setup {
        Setup { live, ..self }
    }

    const fn size(self, size: u64) -> Setup {
        Setup { size, ..self }
    }

    const fn sparse(self) -> Setup {
        Setup { sparse: true, ..self }
    }

    const fn explicit(self) -> Setup {
        Setup { explicit: true, ..self }
    }

    fn is_special(&self) -> bool {
        self.size != 2 << 20 || self.sparse || self.explicit
    }

    fn command(&self) -> Result<Command, CountError> {
        let name = clap::ValueEnum::to_possible_value(&self.work).map(|value| value.get_name().to_owned());
        let mut command = Command::new(std::env::current_exe().map_err(CountError::Spawn)?);
        command.args(["bench-client", &name.unwrap_or_default()]);
        command.args(["--live", &self.live.to_string()]).args(["--size", &self.size.to_string()]);
        command.args(["--threads", &self.threads.to_string()]);
        command.args(self.sparse.then_some("--sparse")).args(self.explicit.then_some("--explicit"));
        command.stdout(Stdio::piped());
        Ok(command)
    }
}

/// An operation with its limits.
struct Operation {
    name: &'static str,
    object: &'static str,
    setup: Setup,
    /// How many elements one repetition handles.
    per: f64,
    /// System calls of one repetition, all of them ioctls; 0 for what is not counted.
    calls: f64,
    /// Instructions that it must not exceed.
    most: Option<f64>,
    /// Instructions of the vendor's library, for the same number of live objects.
    vendor: Option<f64>,
}

impl Operation {
    const fn new(name: &'static str, object: &'static str, setup: Setup) -> Operation {
        Operation { name, object, setup, per: 1.0, calls: 0.0, most: None, vendor: None }
    }

    const fn per(self, per: u64) -> Operation {
        Operation { per: per as f64, ..self }
    }

    const fn calls(self, calls: f64) -> Operation {
        Operation { calls, ..self }
    }

    const fn most(self, most: f64) -> Operation {
        Operation { most: Some(most), ..self }
    }

    const fn vendor(self, vendor: f64) -> Operation {
        Operation { vendor: Some(vendor), ..self }
    }

    /// The name without its size.
    fn short(&self) -> &'static str {
        self.name.split([',', '(']).next().and_then(|name| name.split(" of ").next()).unwrap_or(self.name)
    }
}

const GIB: u64 = 1 << 30;
const CREATE: Setup = Setup::of(Work::CreateRelease);
const RESERVE: Setup = Setup::of(Work::ReserveFree);
const RANDOM: Setup = Setup::of(Work::ReserveRandom);
const MAP: Setup = Setup::of(Work::MapUnmap);
const LOOKUP: Setup = Setup::of(Work::MappingAt);
const HANDLE: Setup = Setup::of(Work::ImportHandle);
const TICKET: Setup = Setup::of(Work::ImportTicket);

/// The limit of an operation with a million live objects, or with 64 GiB, as a multiple of its cost
/// with one object of 2 MiB.
const GROWTH: f64 = 1.5;

/// The same of imports, which are found in a B-tree.
const IMPORT_GROWTH: f64 = 2.25;

/// The measured operations. The figures of the vendor's library are instructions of a pair of calls
/// on x86_64, counted without a kernel. The limits are parts of them: docs/bench.md says which, and
/// why.
#[rustfmt::skip]
const OPERATIONS: &[Operation] = &[
    Operation::new("create + release", "live handle", CREATE).most(640.0).calls(2.0).vendor(1933.0),
    Operation::new("create + release", "live handle", CREATE.live(1_000)).most(640.0),
    Operation::new("create + release", "live handle", CREATE.live(1_000_000)).most(980.0).vendor(2948.0),
    Operation::new("create + free()", "live handle", CREATE.explicit()).most(640.0),
    Operation::new("create + release of 64 GiB", "live handle", CREATE.size(64 * GIB)).most(640.0),
    Operation::new("reserve + free, 2-16 MiB", "live reservation", RESERVE).most(1650.0).calls(2.0).vendor(3305.0),
    Operation::new("reserve + free, 2-16 MiB", "live reservation", RESERVE.live(1_000)).most(1650.0),
    Operation::new("reserve + free, 2-16 MiB", "live reservation", RESERVE.live(100_000)).most(1650.0)
        .vendor(50_457.0),
    Operation::new("reserve + free()", "live reservation", RESERVE.explicit()).most(1650.0),
    Operation::new("reserve + free, to 1 GiB", "live reservation", RANDOM).most(1650.0),
    Operation::new("reserve + free, to 1 GiB", "live reservation", RANDOM.live(5_000).sparse()).most(1650.0),
    Operation::new("map + unmap", "live mapping", MAP).most(1230.0).calls(2.0).vendor(2458.0),
    Operation::new("map + unmap", "live mapping", MAP.live(1_000)).most(1365.0),
    Operation::new("map + unmap", "live mapping", MAP.live(1_000_000)).most(1365.0).vendor(4108.0),
    Operation::new("map + unmap()", "live mapping", MAP.explicit()).most(1230.0),
    Operation::new("map + unmap, one per GiB", "live mapping", MAP.live(5_000).sparse()).most(1365.0),
    Operation::new("map + unmap of 1 GiB", "live mapping", MAP.size(GIB)).most(1230.0),
    Operation::new("map + unmap of 64 GiB", "live mapping", MAP.size(64 * GIB)).most(1230.0).vendor(2460.0),
    Operation::new("map + unmap of 128 GiB", "live mapping", MAP.size(128 * GIB)).most(1230.0),
    Operation::new("mapping_at", "lookup", LOOKUP),
    Operation::new("mapping_at of 64 GiB", "lookup", LOOKUP.size(64 * GIB)),
    Operation::new("mappings(), each of 1000", "lookup", Setup::of(Work::Mappings)).per(client::MANY),
    Operation::new("slice of a reservation", "lookup", Setup::of(Work::Slice)),
    Operation::new("write 4 KiB", "copy", Setup::of(Work::Write)).most(282.0).calls(1.0).vendor(565.0),
    Operation::new("read 4 KiB", "copy", Setup::of(Work::Read)).most(282.0).calls(1.0).vendor(565.0),
    Operation::new("write_batch, each of 1000", "copy", Setup::of(Work::WriteBatch)).per(client::MANY),
    Operation::new("read_batch, each of 1000", "copy", Setup::of(Work::ReadBatch)).per(client::MANY),
    Operation::new("export", "export", Setup::of(Work::Export)).calls(1.0).vendor(218.0),
    Operation::new("trust", "export", Setup::of(Work::Trust)).calls(1.0).vendor(168.0),
    Operation::new("import + release, by handle", "live import", HANDLE).most(1476.0).calls(2.0).vendor(1968.0),
    Operation::new("import + release, by ticket", "live import", TICKET).calls(2.0),
    Operation::new("import + release, by ticket", "live import", TICKET.live(1_000)),
    Operation::new("import + release, by ticket", "live import", TICKET.live(100_000)).most(3406.0).vendor(3406.0),
    Operation::new("import again", "live import", Setup::of(Work::ImportAgain)),
];

/// The limit of what a C function adds to the Rust call that it makes.
const C_MORE: f64 = 350.0;

/// C functions, the Rust calls that they make, and the number of calls in a repetition.
const C_FUNCTIONS: [(&str, Work, Work, f64); 5] = [
    ("aclrtMallocPhysical, FreePhysical: more for each", Work::CCreateRelease, Work::OwnCreateRelease, 2.0),
    ("aclrtReserve-, ReleaseMemAddress: more for each", Work::CReserveFree, Work::OwnReserveFree, 2.0),
    ("aclrtMapMem, UnmapMem: more for each", Work::CMapUnmap, Work::OwnMapUnmap, 2.0),
    ("aclrtMalloc, Free: more for each", Work::CMallocFree, Work::OwnMallocFree, 2.0),
    ("aclrtMemcpy: more", Work::CWrite, Work::OwnWrite, 1.0),
];

/// The result of a measurement, or why there is none.
type Measured = Result<Figures, String>;

fn counts(figures: &Measured) -> Result<&Counts, String> {
    let figures = figures.as_ref().map_err(String::clone)?;
    figures.counts.as_ref().map_err(|errno| CountError::Trace(*errno).to_string())
}

/// System calls, or why they are not known.
fn count(figures: &Measured, what: impl Fn(&Counts) -> f64) -> Result<f64, String> {
    counts(figures).map(what)
}

/// Instructions, or why they are not known.
fn steps_of(figures: &Measured, what: impl Fn(&Steps) -> f64) -> Result<f64, String> {
    let steps = counts(figures)?.steps.as_ref();
    steps.map(what).ok_or_else(|| CountError::NoAtomics.to_string())
}

/// The figures so far, and the points of their charts.
struct Run {
    figures: Vec<Figure>,
    points: Vec<Point>,
    progress: ProgressBar,
}

impl Run {
    fn measure(&self, setup: &Setup, pairs: u64, timed: u64) -> Measured {
        let measured = measure(setup, pairs, timed).map_err(|error| error.to_string());
        self.progress.inc(1);
        measured
    }

    /// The system calls of an operation with too many instructions to step through.
    fn calls_only(&self, setup: &Setup) -> Result<f64, String> {
        let calls = count_calls(setup).map_err(|error| error.to_string());
        self.progress.inc(1);
        calls
    }

    fn add(
        &mut self,
        name: impl Into<String>,
        live: Option<u64>,
        unit: Quantity,
        measured: Result<f64, String>,
        target: Target,
    ) {
        self.figures.push(Figure::new(name, live, unit, measured, target));
    }

    fn point(&mut self, chart: Chart, series: &str, x: u64, y: f64, wanted: bool) {
        if wanted {
            self.points.push(Point { chart, series: series.to_owned(), x: x as f64, y });
        }
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
    /// None on a CPU where single steps do not end.
    pub steps: Option<Steps>,
    /// System calls.
    pub calls: f64,
    /// The ioctls among them.
    pub ioctls: f64,
}

/// What was counted by single steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steps {
    /// Instructions in user space.
    pub instructions: f64,
    /// Those among them that are the C library's.
    pub c_library: f64,
}

/// Measures one operation in a process of its own, on the driver of the calling thread. If tracing
/// is not allowed, only its time is measured.
pub fn measure(setup: &Setup, pairs: u64, timed: u64) -> Result<Figures, CountError> {
    let mut command = setup.command()?;
    command.args(["--pairs", &pairs.to_string()]).args(["--timed", &timed.to_string()]);
    match trace(&mut command, pairs) {
        Ok((counts, own)) => Ok(Figures { counts: Ok(counts), own }),
        Err(CountError::Ended(WaitStatus::Exited(_, code))) if code == i32::from(NOT_TRACED) => {
            let output = command.arg("--untraced").output().map_err(CountError::Spawn)?;
            Ok(Figures { counts: Err(Errno::EPERM), own: own_figures(&output.stdout)? })
        }
        Err(error) => Err(error),
    }
}

/// CPU time of one repetition in nanoseconds, without a tracer.
fn untraced(setup: &Setup, timed: u64) -> Result<f64, CountError> {
    let mut command = setup.command()?;
    let output = command.args(["--pairs", "2", "--untraced", "--timed", &timed.to_string()]).output();
    let own = own_figures(&output.map_err(CountError::Spawn)?.stdout)?;
    own.nanoseconds.ok_or(CountError::Spawn(std::io::ErrorKind::InvalidData.into()))
}

/// Runs the process and counts in its sections.
fn trace(command: &mut Command, pairs: u64) -> Result<(Counts, OwnFigures), CountError> {
    let mut traced = Traced::spawn(command)?;
    let part = |full: u64, empty: u64| full.saturating_sub(empty) as f64 / pairs as f64;
    let mode = if counter::steps_end() { Mode::Steps } else { Mode::Run };
    let (empty, full) = (section(&mut traced, mode)?, section(&mut traced, mode)?);
    let steps = (mode == Mode::Steps).then(|| Steps {
        instructions: part(full.number, empty.number),
        c_library: part(full.c_library, empty.c_library),
    });
    let (empty, full) = (section(&mut traced, Mode::Calls)?, section(&mut traced, Mode::Calls)?);
    let (calls, ioctls) = (part(full.number, empty.number), part(full.ioctls, empty.ioctls));
    let mut output = traced.child().stdout.take();
    traced.finish()?;
    let mut text = Vec::new();
    if let Some(output) = &mut output {
        output.read_to_end(&mut text).map_err(CountError::Spawn)?;
    }
    Ok((Counts { steps, calls, ioctls }, own_figures(&text)?))
}

/// Counts in the next section of a process.
fn section(traced: &mut Traced, mode: Mode) -> Result<Count, CountError> {
    traced.advance(Mode::Run)?;
    traced.advance(mode)
}

/// Counts only the system calls of one repetition.
fn count_calls(setup: &Setup) -> Result<f64, CountError> {
    let mut command = setup.command()?;
    let mut traced = Traced::spawn(command.args(["--pairs", "1"]))?;
    for _ in 0..2 {
        section(&mut traced, Mode::Run)?;
    }
    let (empty, full) = (section(&mut traced, Mode::Calls)?, section(&mut traced, Mode::Calls)?);
    traced.finish()?;
    Ok(full.number.saturating_sub(empty.number) as f64)
}

/// Instructions of each single operation that the process has in a section of its own.
fn grow(setup: &Setup) -> Result<Vec<u64>, CountError> {
    let mut traced = Traced::spawn(&mut setup.command()?)?;
    let empty = section(&mut traced, Mode::Steps)?.number;
    let mut counts = Vec::new();
    loop {
        match section(&mut traced, Mode::Steps) {
            Ok(count) => counts.push(count.number.saturating_sub(empty)),
            Err(CountError::Ended(WaitStatus::Exited(_, 0))) if !counts.is_empty() => return Ok(counts),
            Err(error) => return Err(error),
        }
    }
}

/// What the process measured itself.
fn own_figures(output: &[u8]) -> Result<OwnFigures, CountError> {
    serde_json::from_slice(output).map_err(|error| CountError::Spawn(error.into()))
}

/// The C library's version, as its malloc is the largest single part of most figures, and the
/// features of the CPU by which it chooses among its variants of memset and memcpy.
fn c_library() -> Option<String> {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok().filter(|output| output.status.success());
    let version = String::from_utf8(output?.stdout).ok()?;
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let known = ["avx512vl", "avx2", "erms", "rtm"];
    let memset: Vec<&str> = flags.split_whitespace().filter(|flag| known.contains(flag)).collect();
    Some(format!(
        "{} (memset: {})",
        version.trim(),
        if memset.is_empty() { "plain".to_owned() } else { memset.join(" ") }
    ))
}

fn print(document: &Document) {
    let sentence = format!(
        "{} on the emulated driver {}, C library {}; instructions and system calls are exact, times depend on \
         this machine",
        document.arch,
        document.generation,
        document.c_library.as_deref().unwrap_or("unknown")
    );
    terminal::wrap(&sentence, terminal::width(), "", "").iter().for_each(|line| ascend_vmm_tool::outln!("{line}"));
    let number = |number: Option<f64>| {
        number.map(|number| if number.fract() == 0.0 { format!("{number}") } else { format!("{number:.1}") })
    };
    let mut rows = Table::new(&["operation", "live", "measured", "", "must", "vendor", ""]);
    for column in [1, 2, 4, 5] {
        rows.align_right(column);
    }
    for figure in &document.figures {
        rows.row([
            figure.name.clone(),
            figure.live.map(|live| live.to_string()).unwrap_or_default(),
            number(figure.measured).unwrap_or_else(|| "-".to_owned()),
            figure.unit.to_string(),
            number(figure.target.must).unwrap_or_default(),
            number(figure.target.vendor).unwrap_or_default(),
            figure.verdict.to_string(),
        ]);
    }
    rows.print();
    // Usually many figures share one reason.
    let reasons: BTreeSet<&str> = document.figures.iter().filter_map(|figure| figure.reason.as_deref()).collect();
    for reason in reasons {
        let without = document.figures.iter().filter(|figure| figure.reason.as_deref() == Some(reason)).count();
        let sentence = format!("{} not measured: {reason}", counted(without, "figure"));
        terminal::wrap(&sentence, terminal::width(), "", "").iter().for_each(|line| ascend_vmm_tool::outln!("{line}"));
    }
    match document.missed {
        0 => {}
        missed => ascend_vmm_tool::outln!("{} above the limit", counted(missed, "figure")),
    }
}
