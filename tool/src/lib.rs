//! The commands of `ascend-vmm`, for the programs that contain them: `ascend-vmm` itself,
//! `cargo xtask` and the Python package.
//!
//! Exit statuses are the same everywhere: 0 success; 1 something failed or differs; 2 wrong
//! arguments, or not possible here; 3 no device.

#![forbid(unsafe_code)]

/// Prints a line on the standard output. If the reader has closed the pipe (`… | head`), the
/// program ends as if by SIGPIPE instead of panicking as `println!` does.
#[macro_export]
macro_rules! outln {
    () => { $crate::outln!("") };
    ($($text:tt)*) => { $crate::print_line(format_args!($($text)*)) };
}

/// Prints a line on the standard error. Unlike `eprintln!`, it does not panic if nobody reads it.
#[macro_export]
macro_rules! errln {
    ($($text:tt)*) => { $crate::print_error_line(format_args!($($text)*)) };
}

pub mod demo;
pub mod emulate;
#[cfg(feature = "installation")]
mod installation;
pub mod probe;
mod replay;
mod second_process;
pub mod selftest;
#[cfg(feature = "service")]
pub mod serve;
#[cfg(feature = "service")]
pub mod service;
mod session_options;
pub mod terminal;
pub mod trace;

use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::process::ExitCode;

/// The commands.
#[derive(clap::Subcommand)]
pub enum Command {
    /// List the NPUs, what they offer, and what is wrong.
    Probe(probe::Probe),
    /// Let two processes share memory of an NPU, real or emulated.
    Demo(demo::Demo),
    /// Test every operation on the NPUs of this host.
    Selftest(selftest::Selftest),
    /// Run a program with an emulated driver.
    Emulate(Box<emulate::Emulate>),
    /// Show every call of a program on the driver.
    Trace(trace::Trace),
    /// Own memory of the NPUs for processes that come and go.
    #[cfg(feature = "service")]
    Serve(serve::Serve),
    /// Show what a memory service holds, and for whom.
    #[cfg(feature = "service")]
    Service(service::Service),
    /// Print a script that completes command lines of `ascend-vmm` in a shell.
    #[cfg(feature = "installation")]
    Completions(installation::Completions),
    /// Print the manual page of `ascend-vmm` or of one of its commands.
    #[cfg(feature = "installation")]
    Man(installation::Man),
    /// The process of `serve` that talks to clients.
    #[cfg(feature = "service")]
    #[command(hide = true)]
    ServeFront(serve::Front),
    /// The process that becomes the program of `trace`.
    #[command(hide = true)]
    TraceChild(trace::Child),
    /// The process that `trace` measures itself with.
    #[command(hide = true)]
    TraceMeasured(trace::Measured),
    /// The first process of `demo`.
    #[command(hide = true)]
    DemoExporter(demo::Exporter),
    /// The other processes of `demo`.
    #[command(hide = true)]
    DemoImporter(demo::Importer),
    /// The second process of `selftest`.
    #[command(hide = true)]
    SelftestPeer(selftest::sharing::SelftestPeer),
}

impl Command {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        match self {
            Command::Probe(command) => command.run(),
            Command::Demo(command) => command.run(),
            Command::DemoExporter(command) => command.run(),
            Command::DemoImporter(command) => command.run(),
            Command::Selftest(command) => command.run(),
            Command::Emulate(command) => emulate::run(*command),
            Command::Trace(trace) => trace.run(),
            #[cfg(feature = "service")]
            Command::Serve(serve) => serve.run(),
            #[cfg(feature = "service")]
            Command::ServeFront(front) => front.run(),
            #[cfg(feature = "service")]
            Command::Service(service) => service.run(),
            #[cfg(feature = "installation")]
            Command::Completions(completions) => completions.run(),
            #[cfg(feature = "installation")]
            Command::Man(man) => man.run(),
            Command::TraceChild(child) => child.run(),
            Command::TraceMeasured(measured) => measured.run(),
            Command::SelftestPeer(peer) => peer.run(),
        }
    }
}

/// Memory of Huawei Ascend NPUs without the vendor's libraries: list, try, test, trace and emulate.
#[derive(Parser)]
#[command(version)]
struct Tool {
    #[command(subcommand)]
    command: Command,
}

/// Runs a command line of the tool and returns its exit status. `name` is what the user calls this
/// program, and `program` starts it; nothing if it is the running executable.
pub fn run_tool(name: &'static str, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    if !program.is_empty() {
        // A second call in the same process names the same program.
        let _ = second_process::PROGRAM.set(program);
    }
    let command = Tool::command().name(name).bin_name(name);
    let parsed = command.try_get_matches_from([OsString::from(name)].into_iter().chain(arguments));
    let status = match parsed.and_then(|matches| Tool::from_arg_matches(&matches)) {
        Ok(tool) => tool.command.run(),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(error.exit_code() as u8)
        }
    };
    // The standard library does not say which number it is.
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == status).unwrap_or(u8::MAX)
}

/// The help of an option that takes a generation.
fn generation_help(more: &str) -> String {
    let names = ascend_ioctl::Generation::ALL.map(|generation| generation.to_string());
    format!("Generation of the driver, one of {}.{more}", names.join(", "))
}

/// The text of an error, without the names of functions of the library.
fn said(error: impl std::fmt::Display) -> String {
    ascend_vmm::error::Reader::Tool.words(&error.to_string())
}

/// Reports why a command could not run: one sentence, and exit status 2.
pub fn impossible(reason: impl std::fmt::Display) -> ExitCode {
    errln!("error: {}", said(reason));
    ExitCode::from(2)
}

/// Prints a document as JSON.
pub fn print_json(document: &impl serde::Serialize) {
    match serde_json::to_string_pretty(document) {
        Ok(text) => crate::outln!("{text}"),
        // Only a map whose keys are not strings could fail, and no document has one.
        Err(error) => errln!("error: {error}"),
    }
}

/// Prints a line on the standard output: see [`outln`].
pub fn print_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(OUTPUT_CLOSED);
        }
        errln!("error: the standard output cannot be written: {error}");
        std::process::exit(2);
    }
}

/// The exit status when the reader of the output has gone: what a shell shows for SIGPIPE, which
/// Rust programs ignore.
const OUTPUT_CLOSED: i32 = 128 + 13;

/// Prints a line on the standard error: see [`errln`].
pub fn print_error_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // There is no better place for this error.
    let _ = writeln!(std::io::stderr(), "{text}");
}
