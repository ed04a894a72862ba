//! `ascend-vmm emulate`: runs any program with an emulated driver and ends the way it ended.
//!
//! The program and the processes that it starts see `/dev/davinci_manager` and the other nodes as
//! on a host with NPUs. Nothing is installed and no privilege is needed. The driver ends with the
//! program: processes that are left get ENOSYS from their opens and ioctls.

mod host;
mod seeds;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};

use crate::impossible;
use crate::terminal;
use ascend_emulator::fault::{self, Fault};
use ascend_emulator::pod::Pod;
use ascend_emulator::schedule::Schedule;
use ascend_emulator::{Config, Emulator};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::unistd::Pid;

/// Options of `emulate`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: that of the program; 2 wrong arguments, 126 it cannot be run, 127 it is not there.\n\n\
                  Examples:\n  ascend-vmm emulate -- ascend-vmm probe\n  \
                  ascend-vmm emulate --driver 9.0.0 --devices 4 --fault MEM_MAP#3=ENOMEM -- ./my-program\n  \
                  ascend-vmm emulate --like atlas-800-a2 --in-container 2,3 --occupied 3 -- ./my-program"
)]
pub struct Emulate {
    /// Begin with a common host (docs/emulator.md says what of it is known and what is made up).
    #[arg(long, value_enum, value_name = "NAME")]
    like: Option<host::Like>,
    /// Read the description of the host from a file, TOML or JSON. Its keys are the options below,
    /// which win over it.
    #[arg(long, value_name = "FILE")]
    host: Option<PathBuf>,
    /// Join the super pod of this directory under the number of --server. Servers of one pod import
    /// each other's device memory by fabric handles.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["replay", "seeds"])]
    pod: Option<PathBuf>,
    /// Record every call of the driver in this file, as JSON lines.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[arg(
        long = "fault",
        value_name = "SPEC",
        help = format!("Inject a fault, such as {}. Can be given several times", fault::EXAMPLES)
    )]
    faults: Vec<Fault>,
    /// Answer the calls of all processes one at a time, in an order that this number decides, and
    /// check at the end that nothing is left in the driver.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run the program once for each seed from A on and below B, until one fails. Its run is then
    /// made as small as possible.
    #[arg(long, value_name = "A..B", conflicts_with_all = ["seed", "record"])]
    seeds: Option<seeds::Range>,
    /// How many runs of --seeds there are at once.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "seeds")]
    jobs: usize,
    /// What the seed lets happen between calls: kill, stop, signal, fault, late, reset, memory, all
    /// or none, separated by commas. A correct program does not notice the default.
    #[arg(long, value_name = "LIST", default_value = "stop,signal,late")]
    events: seeds::Events,
    /// Leave these events out, counted from 0.
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "seed")]
    skip_events: Vec<u32>,
    /// After so many calls the processes take turns.
    #[arg(long, value_name = "N", requires = "seed")]
    choices: Option<u64>,
    /// Play a recorded trace against the emulated driver, and report each answer that differs. The
    /// host is by default that of the trace.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["record", "faults", "like", "command"])]
    replay: Option<PathBuf>,
    #[command(flatten)]
    description: host::Host,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required_unless_present = "replay", value_name = "CMD ARG")]
    command: Vec<OsString>,
}

/// The host that the options describe, beginning with `base`.
fn configured(base: Config, file: Option<&Path>, options: &host::Host) -> Result<Config, String> {
    let file = file.map(host::Host::read).transpose()?;
    let descriptions: Vec<&host::Host> = file.iter().chain([options]).collect();
    host::Host::config(base, &descriptions)
}

/// Runs the command and returns its exit status.
pub fn run(options: Emulate) -> ExitCode {
    let describe = |base: Config| configured(base, options.host.as_deref(), &options.description);
    if let Some(trace) = &options.replay {
        return crate::replay::run(trace, describe);
    }
    let config = match describe(options.like.map(host::Like::config).unwrap_or_default()) {
        Ok(config) => config,
        Err(reason) => return impossible(reason),
    };
    for fault in &options.faults {
        if let Err(reason) = fault.check(&config) {
            return impossible(reason);
        }
    }
    let Some((program, arguments)) = options.command.split_first() else { return impossible("no program given") };
    if let Some(range) = options.seeds {
        return seeds::explore(range, options.jobs, &options.events);
    }
    let mut config = config;
    if let Some(directory) = &options.pod {
        if !config.super_pod {
            return impossible("a host of a pod has a number in it: give one with --server");
        }
        match Pod::join(directory, config.server) {
            Ok(pod) => config.pod = Some(pod),
            Err(error) => return impossible(format!("cannot join the pod in {}: {error}", directory.display())),
        }
    }
    config.schedule = options.seed.map(|seed| Schedule {
        skipped: options.skip_events.clone(),
        choices: options.choices,
        ..Schedule::seed(seed).with(&options.events.0)
    });
    // The program decides how to react to these signals. This process ends when the program does.
    let signals =
        SigSet::from_iter([Signal::SIGCHLD, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP]);
    if let Err(error) = signals.thread_block() {
        return impossible(format!("signals cannot be blocked: {error}"));
    }
    // Orphans stay our descendants, so that every ptrace policy lets us read their memory.
    let _ = nix::sys::prctl::set_child_subreaper(true);
    let emulator = match Emulator::start(config) {
        Ok(emulator) => emulator,
        Err(unavailable) => return impossible(unavailable),
    };
    if let Some(path) = &options.record {
        if let Err(error) = emulator.record_to(path) {
            return impossible(format!("cannot record to {}: {error}", path.display()));
        }
    }
    for fault in options.faults {
        emulator.inject(fault);
    }
    let mut child = match emulator.spawn(Command::new(program).args(arguments)) {
        Ok(child) => child,
        Err(error) => {
            crate::errln!("error: cannot run {}: {error}", program.to_string_lossy());
            // As a shell does.
            return ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 });
        }
    };
    let status = wait(&mut child, &signals);
    let found = options.seed.map(|_| seeds::conclude(&emulator));
    let traps = emulator.traps();
    let refused = emulator.control(|driver| driver.machine.refused_setups.len());
    if refused > 0 && !status.as_ref().is_ok_and(ExitStatus::success) {
        let note = format!(
            "note: SETUP_DEVICE was refused with EFAULT in {}, because no process ran on the device for it. A program \
             starts one through /dev/hisi_hdc; with --device-process automatic the emulated driver does it.",
            if refused == 1 { "one process".to_owned() } else { format!("{refused} processes") }
        );
        for line in terminal::wrap(&note, terminal::width(), "", "  ") {
            crate::errln!("{line}");
        }
    }
    drop(emulator);
    match status {
        // Each trap was reported when it happened. After one, the exit status of the program means
        // nothing.
        _ if !traps.is_empty() => {
            crate::errln!("error: the program would have crashed a real host ({}, see above)", traps[0].name);
            ExitCode::FAILURE
        }
        Ok(status) if status.success() && found.is_some_and(|found| found > 0) => ExitCode::FAILURE,
        Ok(status) => end_like(status),
        Err(error) => {
            crate::errln!("error: waiting for the program failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Waits for the program, and forwards signals that only this process got.
fn wait(child: &mut Child, signals: &SigSet) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match signals.wait()? {
            // A terminal sends the first two to the program as well.
            Signal::SIGINT | Signal::SIGQUIT | Signal::SIGCHLD => {}
            signal => kill(Pid::from_raw(child.id() as i32), signal)?,
        }
    }
}

/// Ends this process the way the program ended: with its exit status or its signal.
fn end_like(status: ExitStatus) -> ExitCode {
    if let Some(code) = status.code() {
        return ExitCode::from(code as u8);
    }
    end_by(status.signal().unwrap_or(0))
}

/// Ends this process by a signal.
pub(crate) fn end_by(number: i32) -> ExitCode {
    if let Ok(signal) = Signal::try_from(number) {
        let mut own = SigSet::empty();
        own.add(signal);
        let _ = own.thread_unblock();
        // For some signals Rust's runtime has a handler. It uninstalls itself at the first signal,
        // and the second one ends the process.
        let _ = raise(signal);
        let _ = raise(signal);
    }
    ExitCode::from(128u8.wrapping_add(number as u8))
}
