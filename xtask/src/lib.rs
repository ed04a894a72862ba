//! The commands that people run: `cargo xtask NAME` in a clone, `ascend-vmm-tool NAME` on a host that has nothing but that file.
//!
//! [`Host`] has those that make sense in both places; the ones that need the source tree (`abi`, `dist`) are only in `cargo xtask`. Exit statuses are the same
//! everywhere: 0 yes, 1 no (something failed, differs, or missed its target), 2 wrong arguments or impossible here, 3 no device.

#![forbid(unsafe_code)]

/// A line on the standard output. Where nobody reads it any more (`… | head`) the program ends, instead of panicking as `println!` does.
#[macro_export]
macro_rules! outln {
    () => { $crate::outln!("") };
    ($($text:tt)*) => { $crate::print_line(format_args!($($text)*)) };
}

pub mod bench;
pub mod demo;
pub mod emulate;
pub mod probe;
pub mod selftest;
pub mod terminal;

use std::process::ExitCode;

/// What can be done on any host.
#[derive(clap::Subcommand)]
pub enum Host {
    /// List the NPUs, what they offer, and what is wrong.
    Probe(probe::Probe),
    /// See two processes share memory of an NPU, or of an emulated one.
    Demo(demo::Demo),
    /// Test every operation on this host's NPUs.
    Selftest(selftest::Selftest),
    /// Run a program on a host with an emulated driver.
    Emulate(emulate::Emulate),
    /// Measure what the library adds to the kernel's work, beside its targets.
    Bench(bench::Bench),
    /// The first process of `demo`.
    #[command(hide = true)]
    DemoExporter(demo::Exporter),
    /// The other processes of `demo`.
    #[command(hide = true)]
    DemoImporter(demo::Importer),
    /// The second process of `selftest`.
    #[command(hide = true)]
    SelftestPeer(selftest::sharing::SelftestPeer),
    /// The process that `bench` measures.
    #[command(hide = true)]
    BenchClient(bench::client::Client),
}

impl Host {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        match self {
            Host::Probe(command) => command.run(),
            Host::Demo(command) => command.run(),
            Host::DemoExporter(command) => command.run(),
            Host::DemoImporter(command) => command.run(),
            Host::Selftest(command) => command.run(),
            Host::Emulate(command) => emulate::run(command),
            Host::Bench(bench) => bench.run(),
            Host::SelftestPeer(peer) => peer.run(),
            Host::BenchClient(client) => client.run(),
        }
    }
}

/// Says why a command could not do its work: one sentence, and exit status 2.
pub fn impossible(reason: impl std::fmt::Display) -> ExitCode {
    eprintln!("error: {reason}");
    ExitCode::from(2)
}

/// Prints a document for programs.
pub fn print_json(document: &impl serde::Serialize) {
    match serde_json::to_string_pretty(document) {
        Ok(text) => crate::outln!("{text}"),
        // Nothing that we print has keys that are no texts, which is what could fail.
        Err(error) => eprintln!("error: {error}"),
    }
}

/// A line on the standard output: see [`outln`].
pub fn print_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    if writeln!(std::io::stdout(), "{text}").is_err() {
        std::process::exit(1);
    }
}
