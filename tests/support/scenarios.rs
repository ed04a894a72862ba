//! Scenarios: programs of several processes and threads under seeded schedules of the emulated
//! driver.
//!
//! Most are the test binary itself, run again for one test with [`CLIENT`] set. This runs more
//! seeds than a test run has time for:
//!
//! ```sh
//! export ASCEND_SCENARIO=1
//! ascend-vmm emulate --seeds 0..10000 --jobs 2 -- target/debug/deps/seeds-… sharing --exact
//! export ASCEND_SCENARIO=disturbed
//! ascend-vmm emulate --seeds 0..10000 --events all -- target/debug/deps/seeds-… sharing --exact
//! ```
//!
//! Events that a correct program does not notice must not make a program fail. After others
//! (processes are killed, commands fail, devices are reset) a program may give up: it panics. It
//! must still end, leave nothing in the driver, and find no promise broken: no panic inside of our
//! crates, and none that [`holds`] makes.

// Not every test binary uses all of it.
#![allow(dead_code)]

use ascend_emulator::oracle;
use ascend_emulator::schedule::{Event, Schedule};
use ascend_emulator::{Config, Emulator};
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

/// Set in the program of a scenario: to `disturbed` if it may give up.
pub const CLIENT: &str = "ASCEND_SCENARIO";

/// The program's first process, for the processes that it starts by exec.
pub const ROOT: &str = "ASCEND_SCENARIO_ROOT";

/// What the panic of a broken promise begins with.
const BROKEN: &str = "broken promise: ";

/// The events of a scenario's runs, and how many seeds have them in a quick scenario.
const RUNS: [(u64, &[Event]); 4] = [
    (24, &Event::HARMLESS),
    (6, &[Event::Kill, Event::Stop, Event::Late]),
    (6, &[Event::Fault, Event::Memory, Event::Late]),
    (4, &[Event::Reset, Event::Stop]),
];

/// What takes longer after the end of a program hangs.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// Runs a scenario with its seeds, or is its program.
pub fn scenario(name: &str, config: &Config, slowness: u64, program: fn()) {
    if is_client() {
        be_client(program);
    }
    explore(name, config, slowness, || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]);
        command
    });
}

/// Runs a program with some fixed seeds, divided by `slowness`, and two random ones.
pub fn explore(name: &str, config: &Config, slowness: u64, program: impl Fn() -> Command) {
    for (count, events) in RUNS {
        (0..count.div_ceil(slowness)).for_each(|seed| run(name, config, Schedule::seed(seed).with(events), program()));
    }
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let random = u64::from(time.subsec_nanos());
    println!("{name}: random seeds {random} (harmless events) and {} (all events)", random + 1);
    run(name, config, Schedule::seed(random).with(&Event::HARMLESS), program());
    run(name, config, Schedule::seed(random + 1).with(&Event::ALL), program());
}

/// Runs a program once.
#[track_caller]
pub fn run(name: &str, config: &Config, schedule: Schedule, mut program: Command) {
    let disturbed = schedule.events.iter().any(|event| !Event::HARMLESS.contains(event));
    let mut output = nameless_file();
    program.env(CLIENT, if disturbed { "disturbed" } else { "1" });
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output.try_clone().unwrap());
    let emulator = Emulator::start(Config { schedule: Some(schedule.clone()), ..config.clone() }).unwrap();
    let status = emulator.spawn(&mut program).unwrap().wait().unwrap();
    let mut found = oracle::conclude(&emulator, AFTERWARDS);
    if !status.success() {
        found.insert(0, format!("the program ended with {status}"));
    }
    if found.is_empty() {
        return;
    }
    let summary = emulator.schedule().unwrap();
    let mut said = String::new();
    output.rewind().unwrap();
    output.read_to_string(&mut said).unwrap();
    let events: Vec<&str> = schedule.events.iter().map(|event| event.name()).collect();
    panic!(
        "{name} (--seed {} --events {}): {summary}\n{}\n{}\n{said}",
        schedule.seed,
        events.join(","),
        summary.events.join("\n"),
        found.join("\n"),
    );
}

/// A file without a name, for a program's output: a pipe would end with the last process only.
fn nameless_file() -> File {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("ascend-vmm-scenario-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

/// Whether this process is of a scenario's program.
pub fn is_client() -> bool {
    std::env::var_os(CLIENT).is_some()
}

/// Whether it may give up.
pub fn is_disturbed() -> bool {
    std::env::var_os(CLIENT).is_some_and(|value| value == "disturbed")
}

/// Runs the program of a scenario, and ends the process.
fn be_client(program: fn()) -> ! {
    report_broken_promises();
    let ended = std::panic::catch_unwind(program);
    std::process::exit(if ended.is_ok() || is_disturbed() { 0 } else { 101 });
}

/// In a process of a scenario's program: its first process is aborted if a panic of this one, or of
/// a child, breaks a promise.
pub fn report_broken_promises() {
    if !is_client() {
        return;
    }
    let root = std::env::var(ROOT).unwrap_or_else(|_| std::process::id().to_string());
    std::panic::set_hook(Box::new(move |panic| {
        eprintln!("{panic}");
        let inside = panic.location().is_some_and(|place| {
            let crates = ["src/", "service/src/", "bindings/acl/src/", "ioctl/src/"];
            crates.iter().any(|source| place.file().starts_with(source))
        });
        let payload = panic.payload();
        let said = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
        if !is_disturbed() || inside || said.is_some_and(|said| said.starts_with(BROKEN)) {
            let _ = Command::new("kill").args(["-ABRT", &root]).status();
        }
    }));
}

/// Something that is true whatever happened.
#[track_caller]
pub fn holds<T, E: Display>(what: Result<T, E>) -> T {
    what.unwrap_or_else(|sentence| panic!("{BROKEN}{sentence}"))
}
