//! `cargo xtask emulate`: runs any program with an emulated driver and ends the way it ended.
//!
//! The program and the processes that it starts see `/dev/davinci_manager` and the other nodes as
//! on a host with NPUs. Nothing is installed and no privilege is needed. The driver ends with the
//! program: processes that are left get ENOSYS from their opens and ioctls.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};

use crate::impossible;
use ascend_emulator::config::{Attachment, DeviceProcess};
use ascend_emulator::fault::Fault;
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::unistd::Pid;

/// Options of `emulate`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask emulate -- cargo xtask probe\n  \
                  cargo xtask emulate --driver 9.0.0 --devices 4 --fault MEM_MAP#3=ENOMEM -- ./my-program")]
pub struct Emulate {
    /// Generation of the emulated driver: 8.5.0, 9.0.0 or 26.1.
    #[arg(long, value_name = "GENERATION", default_value_t = Generation::NEWEST)]
    driver: Generation,
    /// Number of NPUs.
    #[arg(long, default_value_t = Config::default().devices, value_parser = clap::value_parser!(u32).range(0..=64))]
    devices: u32,
    /// Memory of each NPU, in bytes or with a unit: 512M, 64G.
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    hbm: u64,
    /// How the NPUs are attached to the host.
    #[arg(long, value_enum, default_value_t = Attach::Pcie)]
    attach: Attach,
    /// Whether a program must start a process on a device through /dev/hisi_hdc before it can use
    /// the memory of the device.
    #[arg(long, value_enum, default_value_t = Start::Required)]
    device_process: Start,
    /// Record every call of the driver in this file, as JSON lines.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Inject a fault: MEM_MAP#3=ENOMEM, MEM_CREATE=ENOMEM, device1=dead, device0=silent:2s or
    /// copies=link-error. Can be given several times.
    #[arg(long = "fault", value_name = "SPEC")]
    faults: Vec<Fault>,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required = true, value_name = "CMD ARG")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Attach {
    Pcie,
    Hccs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Start {
    Required,
    Automatic,
}

/// A size in bytes or with a unit.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[number.len()..] {
        "" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        unit => return Err(format!("`{unit}` is not one of the units K, M, G and T")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{number}` is not a number"))?;
    number.checked_mul(unit).ok_or_else(|| "the size does not fit into 64 bits".to_owned())
}

/// Runs the command and returns its exit status.
pub fn run(options: Emulate) -> ExitCode {
    let config = Config {
        generation: options.driver,
        devices: options.devices,
        hbm: options.hbm,
        attachment: match options.attach {
            Attach::Pcie => Attachment::Pcie,
            Attach::Hccs => Attachment::Hccs,
        },
        device_process: match options.device_process {
            Start::Required => DeviceProcess::Required,
            Start::Automatic => DeviceProcess::Automatic,
        },
        ..Config::default()
    };
    for fault in &options.faults {
        if let Err(reason) = fault.check(&config) {
            return impossible(reason);
        }
    }
    let Some((program, arguments)) = options.command.split_first() else { return impossible("no program given") };
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
        Err(error) => return impossible(format!("cannot run {}: {error}", program.to_string_lossy())),
    };
    let status = wait(&mut child, &signals);
    let traps = emulator.traps();
    drop(emulator);
    match status {
        // Each trap was reported when it happened. After one, the exit status of the program means
        // nothing.
        _ if !traps.is_empty() => {
            eprintln!("error: the program would have crashed a real host ({}, see above)", traps[0].name);
            ExitCode::FAILURE
        }
        Ok(status) => end_like(status),
        Err(error) => {
            eprintln!("error: waiting for the program failed: {error}");
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
    let number = status.signal().unwrap_or(0);
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
