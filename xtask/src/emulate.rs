//! `cargo xtask emulate`: runs any program on a host with an emulated driver and passes on how it ended.
//!
//! The program, and all that it starts, sees `/dev/davinci_manager` and its siblings as on a host with NPUs; nothing is installed and no
//! privilege is needed. When the program ends, so does the driver: processes that it left behind get ENOSYS from their opens and ioctls.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};

use ascend_emulator::config::{Attachment, DeviceProcess};
use ascend_emulator::fault::Fault;
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::unistd::Pid;

/// Options of `emulate`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  cargo xtask emulate -- cargo xtask probe\n  cargo xtask emulate --driver 9.0.0 --devices 4 --fault MEM_MAP#3=ENOMEM -- ./my-program"
)]
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
    /// Whether a program must start its device process through /dev/hisi_hdc before it can use memory.
    #[arg(long, value_enum, default_value_t = Start::Required)]
    device_process: Start,
    /// Write every call of the driver to this file, as JSON lines.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Let something fail: MEM_MAP#3=ENOMEM, MEM_CREATE=ENOMEM, device1=dead, device0=silent:2s, copies=link-error.
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
        unit => return Err(format!("`{unit}` is none of the units K, M, G and T")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{number}` is not a number"))?;
    number.checked_mul(unit).ok_or_else(|| "it does not fit into 64 bits".to_owned())
}

/// Exit status for what was wrong before the program could run, as clap uses it.
const USAGE: u8 = 2;

/// Runs the command.
pub fn run(options: Emulate) -> ExitCode {
    let refuse = |reason: String| {
        eprintln!("error: {reason}");
        ExitCode::from(USAGE)
    };
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
            return refuse(reason);
        }
    }
    let Some((program, arguments)) = options.command.split_first() else { return refuse("no program given".into()) };
    // The program decides what an interrupt means, and we end when it does.
    let signals =
        SigSet::from_iter([Signal::SIGCHLD, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP]);
    if let Err(error) = signals.thread_block() {
        return refuse(format!("signals cannot be blocked: {error}"));
    }
    // Orphans stay our descendants, so that we may read their memory under every ptrace policy.
    let _ = nix::sys::prctl::set_child_subreaper(true);
    let emulator = match Emulator::start(config) {
        Ok(emulator) => emulator,
        Err(unavailable) => return refuse(unavailable.to_string()),
    };
    if let Some(path) = &options.record {
        if let Err(error) = emulator.record_to(path) {
            return refuse(format!("cannot record to {}: {error}", path.display()));
        }
    }
    for fault in options.faults {
        emulator.inject(fault);
    }
    let mut child = match emulator.spawn(Command::new(program).args(arguments)) {
        Ok(child) => child,
        Err(error) => return refuse(format!("cannot run {}: {error}", program.to_string_lossy())),
    };
    let status = wait(&mut child, &signals);
    let traps = emulator.traps();
    drop(emulator);
    match status {
        // Each trap was reported when it sprang; the program's own status means nothing any more.
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

/// Waits for the program, and passes on what only we were told.
fn wait(child: &mut Child, signals: &SigSet) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match signals.wait()? {
            // A terminal sends these to the program too.
            Signal::SIGINT | Signal::SIGQUIT | Signal::SIGCHLD => {}
            signal => kill(Pid::from_raw(child.id() as i32), signal)?,
        }
    }
}

/// Ends this process the way the program ended.
fn end_like(status: ExitStatus) -> ExitCode {
    if let Some(code) = status.code() {
        return ExitCode::from(code as u8);
    }
    let number = status.signal().unwrap_or(0);
    if let Ok(signal) = Signal::try_from(number) {
        let mut own = SigSet::empty();
        own.add(signal);
        let _ = own.thread_unblock();
        // The runtime's own handler for some signals gives up on the first one and leaves the second to the kernel.
        let _ = raise(signal);
        let _ = raise(signal);
    }
    ExitCode::from(128u8.wrapping_add(number as u8))
}
