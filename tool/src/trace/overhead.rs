//! What tracing costs, measured where the program was traced: the same calls with and without a
//! tracer.
//!
//! The measured call is an open of a node that does not exist. The tracer handles it as any call on
//! the driver, and it costs the kernel little and the driver nothing.

use super::recognise::Recogniser;
use super::tracer::{self, Tracer};
use super::watch::Watch;
use crate::terminal;
use nix::unistd::getppid;
use std::fs::File;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Calls of each kind that are measured.
const CALLS: usize = 1001;

/// The name of a node that the driver never has.
const NODE: &str = "/dev/davinci-trace-measures-this";

/// The process that is measured.
#[derive(clap::Args)]
pub struct Measured {
    /// Where the result is written.
    #[arg(last = true, required = true)]
    result: Vec<std::ffi::OsString>,
}

impl Measured {
    /// Makes the calls, and writes how many nanoseconds one of each kind takes.
    pub fn run(self) -> ExitCode {
        let [result, traced] = &self.result[..] else { return crate::impossible("two arguments are needed") };
        if traced == "traced" {
            if let Err(error) = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP) {
                return crate::impossible(error);
            }
            if ascend_ptrace::filter::install().is_ok() {
                drop(File::open("/dev/null"));
            }
        }
        let time = |call: &dyn Fn()| {
            // The median, since other programs run too.
            let mut times: Vec<u128> = (0..CALLS)
                .map(|_| {
                    let began = Instant::now();
                    call();
                    began.elapsed().as_nanos()
                })
                .collect();
            times.sort_unstable();
            times[times.len() / 2]
        };
        let on_driver = time(&|| drop(File::open(NODE)));
        let other = time(&|| {
            getppid();
        });
        match std::fs::write(result, format!("{on_driver} {other}")) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => crate::impossible(error),
        }
    }
}

/// Nanoseconds of a call on the driver, and of another.
type CallTimes = (f64, f64);

/// The sentence about what tracing costs, and what it cost a run with this many calls.
pub fn report(filtered: bool, calls: usize, took: Duration) -> String {
    match measure(filtered) {
        Ok(((plain, other), (traced, traced_other))) => {
            let micro = |nanos: f64| nanos.max(0.0) / 1000.0;
            let added = (traced - plain).max(0.0);
            let text = format!(
                "Tracing adds {:.1} µs to a call on the driver (an open of a missing node takes {:.1} µs, traced \
                 {:.1} µs: {:.1} times) and {:.1} µs to any other call. In this run: {calls} calls on the driver, \
                 about {:.1} ms of {:.1} ms.",
                micro(added),
                micro(plain),
                micro(traced),
                traced / plain.max(1.0),
                micro(traced_other - other),
                added * calls as f64 / 1e6,
                took.as_secs_f64() * 1e3,
            );
            terminal::wrap(&text, terminal::width(), "", "").join("\n") + "\n"
        }
        Err(reason) => format!("What tracing costs could not be measured: {reason}\n"),
    }
}

fn measure(filtered: bool) -> Result<(CallTimes, CallTimes), String> {
    let file = std::env::temp_dir().join(format!("ascend-trace-{}", std::process::id()));
    let result = measure_to(&file, filtered);
    let _ = std::fs::remove_file(&file);
    result
}

fn measure_to(file: &std::path::Path, filtered: bool) -> Result<(CallTimes, CallTimes), String> {
    let mut own = crate::second_process::this_program().map_err(|error| error.to_string())?;
    let status = own.args(["trace-measured", "--"]).arg(file).arg("plain").status();
    if !status.map_err(|error| error.to_string())?.success() {
        return Err("the measured process failed".into());
    }
    let plain = read(file)?;
    let pid = super::start("trace-measured", &[file.into(), "traced".into()])?;
    let mut watch = Watch::new(Recogniser::new(None));
    let mut tracer = Tracer::of_child(pid, &mut watch).map_err(|error| error.to_string())?;
    if !filtered {
        tracer.stop_at_every_call();
    }
    let signals = tracer::signals();
    while tracer.step(&mut watch) {
        watch.take_records();
        tracer.wait(&signals).map_err(|error| error.to_string())?;
    }
    Ok((plain, read(file)?))
}

fn read(file: &std::path::Path) -> Result<CallTimes, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    let numbers = text.split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    numbers.ok_or_else(|| "the measured process wrote no numbers".into())
}
