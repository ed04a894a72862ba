//! `ascend-vmm trace`: every call of a program on the driver's nodes, without changing it.
//!
//! The program and all processes that it starts are traced with ptrace(2), which needs no root for
//! one's own programs. Calls are printed for people, and written as JSON lines in the format of
//! `emulate --record`. Memory contents are never read.

mod anonymise;
pub mod decode;
pub mod field;
mod files;
mod filter;
mod objects;
mod overhead;
mod page;
pub mod recognise;
mod served;
mod summary;
mod tracer;
pub mod watch;

use crate::{impossible, second_process};
use anonymise::Anonymiser;
use ascend_emulator::record::Record;
use ascend_ioctl::Generation;
use ascend_vmm::error::printable;
use decode::Modules;
use filter::Filter;
use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
pub use overhead::Measured;
use page::Page;
use recognise::Recogniser;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;
use summary::Summary;
use tracer::{Ending, Tracer};
use watch::Watch;

/// Options of `trace`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ascend-vmm trace -- ./my-program\n  \
                  ascend-vmm trace --quiet --json calls.jsonl -- python3 train.py\n  \
                  ascend-vmm trace --pid 4711\n  \
                  ascend-vmm emulate -- ascend-vmm trace -- ./my-program")]
pub struct Trace {
    /// Trace a process that runs already, with all its threads, until Ctrl-C.
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..), conflicts_with = "command")]
    pid: Option<i32>,
    /// Write the calls as text to this file, and not to the standard error.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write no text.
    #[arg(short, long, conflicts_with = "output")]
    quiet: bool,
    /// Write only these calls as text: modules (SVM), calls (open, MEM_*) and outcomes (ok, failed,
    /// ENOMEM), separated by commas; `!` before the first excludes them. Given several times, a
    /// call must fit each.
    #[arg(short = 'e', long = "filter", value_name = "WORDS", conflicts_with = "quiet")]
    filters: Vec<Filter>,
    /// Write the calls to this file as JSON lines, in the format of `emulate --record`.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write one page about the trace to this file: memory over time, what was alive when, the
    /// slowest and the failed calls.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Read the calls from a file that `--json` or `emulate --record` wrote, and trace nothing.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pid", "command"])]
    read: Option<PathBuf>,
    /// Print count, failures and times of each command at the end, and what tracing costs.
    #[arg(long)]
    summary: bool,
    /// Print what may stop a program: modules that are not there, and refused commands that the
    /// library does not use or the emulator does not answer.
    #[arg(long)]
    unsupported: bool,
    /// Replace addresses of the program's memory and ids of processes, each by the same stand-in
    /// everywhere.
    #[arg(long)]
    anonymise: bool,
    /// Generation of the driver. Without it, the calls tell.
    #[arg(long, value_name = "GENERATION", help = crate::generation_help(" Without it, the calls tell."))]
    driver: Option<Generation>,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required_unless_present_any = ["pid", "read"], value_name = "CMD ARG")]
    command: Vec<OsString>,
}

/// The process that becomes the traced program.
#[derive(clap::Args)]
pub struct Child {
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl Child {
    /// Waits to be traced, installs the filter, and becomes the program.
    pub fn run(self) -> ExitCode {
        let Some((program, arguments)) = self.command.split_first() else { return impossible("no program given") };
        if let Err(error) = raise(Signal::SIGSTOP) {
            return impossible(error);
        }
        // Without a filter the program stops at every call, which only costs time.
        if ascend_ptrace::filter::install().is_ok() {
            // A call that the filter catches: see `Tracer::exec`.
            drop(File::open("/dev/null"));
        }
        let error = Command::new(program).args(arguments).exec();
        crate::errln!("error: cannot run {}: {error}", program.to_string_lossy());
        ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
    }
}

/// Where the calls go.
struct Output {
    text: Option<Box<dyn Write>>,
    filters: Vec<Filter>,
    /// The last calls, if they looked for nodes: the first, the last, how many, and their time.
    scan: Option<(Record, Record, usize, u64)>,
    json: Option<BufWriter<File>>,
    html: Option<File>,
    summary: Summary,
    page: Option<Page>,
    anonymiser: Option<Anonymiser>,
    modules: Modules,
    /// Calls that wait for the name of an earlier one.
    waiting: VecDeque<Record>,
}

/// Most calls that wait for a name.
const PATIENCE: usize = 1000;

impl Output {
    fn open(options: &Trace) -> Result<Self, String> {
        let create = |path: &PathBuf| {
            File::create(path).map_err(|error| format!("{} cannot be written: {error}", path.display()))
        };
        let text: Option<Box<dyn Write>> = match &options.output {
            Some(path) => Some(Box::new(BufWriter::new(create(path)?))),
            None if options.quiet => None,
            None => Some(Box::new(io::stderr())),
        };
        let json = options.json.as_ref().map(create).transpose()?.map(BufWriter::new);
        let html = options.html.as_ref().map(create).transpose()?;
        let anonymiser = options.anonymise.then(Anonymiser::default);
        Ok(Output {
            text,
            filters: options.filters.clone(),
            scan: None,
            json,
            anonymiser,
            page: html.is_some().then(Page::new),
            html,
            summary: Summary::new(),
            modules: Modules::default(),
            waiting: VecDeque::new(),
        })
    }

    /// Writes the calls whose names are certain, or all at the end.
    fn add(&mut self, records: Vec<Record>, recogniser: &Recogniser, end: bool) {
        self.waiting.extend(records);
        while let Some(mut record) = self.waiting.pop_front() {
            let module = self.modules.of(&record);
            if record.call == "ioctl" {
                let request = decode::request(&record);
                let name = match recogniser.name(&module, request) {
                    Some(name) => name,
                    None if end || self.waiting.len() >= PATIENCE => {
                        ascend_emulator::record::command(recogniser.best(), &module, request).map(|it| it.name)
                    }
                    None => {
                        self.waiting.push_front(record);
                        return;
                    }
                };
                Watch::rename(&mut record, name);
            }
            if let Some(anonymiser) = &mut self.anonymiser {
                anonymiser.apply(&mut record, &module, recogniser.best());
            }
            self.write(&record, &module, recogniser.best());
        }
    }

    fn write(&mut self, record: &Record, module: &str, generation: Generation) {
        self.summary.add(record, module, generation);
        if let Some(page) = self.page.as_mut().filter(|_| record.call != "end") {
            page.add(record, module, generation);
        }
        if self.text.is_some() && self.filters.iter().all(|filter| filter.passes(record, module)) {
            self.print(record, module, generation);
        }
        if let Some(json) = &mut self.json {
            let written = serde_json::to_writer(&mut *json, record).map_err(io::Error::from);
            if let Err(error) = written.and_then(|()| json.write_all(b"\n")) {
                crate::errln!("error: the calls are no longer written: {error}");
                self.json = None;
            }
        }
    }

    /// Writes a call as text. Those of a search for nodes are one line.
    fn print(&mut self, record: &Record, module: &str, generation: Generation) {
        if decode::is_absent_node(record) {
            match &mut self.scan {
                Some((_, last, count, us)) => {
                    *last = record.clone();
                    *count += 1;
                    *us = us.saturating_add(record.us);
                }
                scan => *scan = Some((record.clone(), record.clone(), 1, record.us)),
            }
            return;
        }
        self.print_scan(generation);
        self.print_line(&decode::line(record, module, generation));
    }

    fn print_scan(&mut self, generation: Generation) {
        match self.scan.take() {
            Some((only, _, 1, _)) => self.print_line(&decode::line(&only, "", generation)),
            Some((first, last, count, us)) => self.print_line(&decode::absent_nodes(&first, &last, count, us)),
            None => {}
        }
    }

    fn print_line(&mut self, line: &str) {
        if self.text.as_mut().is_some_and(|text| writeln!(text, "{line}").is_err()) {
            self.text = None;
        }
    }

    /// Writes what the trace says as a whole.
    fn conclude(&mut self, options: &Trace, recogniser: &Recogniser, cost: Option<String>) {
        self.print_scan(recogniser.best());
        let driver = Summary::driver(recogniser, options.driver.is_some());
        let calls = crate::terminal::counted(self.summary.calls, "call");
        let mut parts = vec![format!("{calls} on the driver, {} failed; {driver}\n", self.summary.failed)];
        if options.summary {
            parts.push(self.summary.table());
        }
        parts.extend(cost);
        if options.unsupported {
            parts.push(self.summary.unsupported());
        }
        parts.push(self.summary.unreleased());
        parts.retain(|part| !part.is_empty());
        // Names and errors of a file that is read can have anything in them.
        let text = printable(&parts.join("\n"));
        match &mut self.text {
            Some(file) if options.output.is_some() => drop(write!(file, "{text}")),
            _ if options.quiet && !(options.summary || options.unsupported) => {}
            _ => crate::errln!("{}", text.trim_end()),
        }
    }

    /// Writes the page.
    fn render(&mut self, options: &Trace, recogniser: &Recogniser) -> io::Result<()> {
        let (Some(page), Some(file)) = (&self.page, &mut self.html) else { return Ok(()) };
        let title = match (&options.read, options.pid) {
            (Some(file), _) => file.display().to_string(),
            (None, Some(pid)) => format!("process {pid}"),
            (None, None) => {
                let words: Vec<_> = options.command.iter().map(|word| word.to_string_lossy()).collect();
                words.join(" ")
            }
        };
        let driver = Summary::driver(recogniser, options.driver.is_some());
        let objects = &self.summary.objects.all;
        file.write_all(page.render(&title, &driver, &self.summary.rows(), objects)?.as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Some(text) = &mut self.text {
            text.flush()?;
        }
        self.json.as_mut().map_or(Ok(()), BufWriter::flush)
    }
}

impl Trace {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        // Read first, so that an output can have the same name.
        let read = self.read.as_ref().map(|file| {
            crate::replay::records(file).map_err(|reason| format!("cannot read {}: {reason}", file.display()))
        });
        let read = match read.transpose() {
            Ok(read) => read,
            Err(reason) => return impossible(reason),
        };
        let mut output = match Output::open(&self) {
            Ok(output) => output,
            Err(reason) => return impossible(reason),
        };
        if let Some(records) = read {
            return self.reread(records, output);
        }
        let mut watch = Watch::new(Recogniser::new(self.driver));
        let tracer = match self.pid {
            Some(pid) => Tracer::of_running(pid, &mut watch).map_err(|error| refusal(pid, error)),
            None => start("trace-child", &self.command).and_then(|pid| {
                Tracer::of_child(pid, &mut watch).map_err(|error| {
                    let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
                    refusal(pid, error)
                })
            }),
        };
        let mut tracer = match tracer {
            Ok(tracer) => tracer,
            Err(reason) => return impossible(reason),
        };
        let signals = tracer::signals();
        if let Err(error) = signals.thread_block().and_then(|()| ascend_ptrace::accept_reports()) {
            return impossible(format!("signals cannot be blocked: {error}"));
        }
        if let Some(pid) = self.pid {
            crate::errln!("tracing process {pid}; Ctrl-C ends the trace; the process continues");
        }
        let began = Instant::now();
        while tracer.step(&mut watch) {
            output.add(watch.take_records(), &watch.recogniser, false);
            if let Err(error) = tracer.wait(&signals) {
                return impossible(format!("waiting for the program failed: {error}"));
            }
        }
        let took = began.elapsed();
        watch.finish();
        output.add(watch.take_records(), &watch.recogniser, true);
        let cost = self.summary.then(|| overhead::report(tracer.is_filtered(), output.summary.calls, took));
        output.conclude(&self, &watch.recogniser, cost);
        if let Err(error) = output.render(&self, &watch.recogniser) {
            crate::errln!("error: the page could not be written: {error}");
            return ExitCode::FAILURE;
        }
        if let Err(error) = output.flush() {
            crate::errln!("error: the trace is not complete: {error}");
            return ExitCode::FAILURE;
        }
        match tracer.ending() {
            Some(Ending::Killed(signal)) => crate::emulate::end_by(signal),
            Some(Ending::Exited(status)) if self.pid.is_none() => ExitCode::from(status as u8),
            _ => ExitCode::SUCCESS,
        }
    }
}

impl Trace {
    /// Shows calls that were recorded before.
    fn reread(&self, records: Vec<Record>, mut output: Output) -> ExitCode {
        let mut recogniser = Recogniser::new(self.driver);
        let mut modules = Modules::default();
        for record in &records {
            let module = modules.of(record);
            if record.call == "ioctl" {
                recogniser.observe(&module, decode::request(record), record);
            }
        }
        output.add(records, &recogniser, true);
        output.conclude(self, &recogniser, None);
        match output.render(self, &recogniser).and_then(|()| output.flush()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => impossible(format!("cannot write: {error}")),
        }
    }
}

/// A name that was read from another process: the text before the first NUL, in one line.
fn name(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    printable(&String::from_utf8_lossy(text)).replace('\n', "\\n")
}

/// Starts the process that becomes the program, and waits until it has stopped itself.
fn start(name: &str, command: &[OsString]) -> Result<i32, String> {
    let own = second_process::this_program();
    let mut own = own.map_err(|error| format!("this program cannot be found: {error}"))?;
    // Signals are blocked afterwards, so the program starts with those that were blocked before.
    let child = own.args([name, "--"]).args(command).spawn();
    let child = child.map_err(|error| format!("the program cannot be started: {error}"))?;
    let pid = Pid::from_raw(child.id() as i32);
    loop {
        match waitpid(pid, Some(WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Stopped(..)) => return Ok(pid.as_raw()),
            Err(Errno::EINTR) => {}
            other => return Err(format!("the program could not be started: {other:?}")),
        }
    }
}

/// Why a process cannot be traced.
fn refusal(pid: i32, error: Errno) -> String {
    let why = match error {
        Errno::ESRCH => "there is no such process".to_owned(),
        Errno::EPERM => "this environment or the process does not allow it, or another program traces it. In a \
                         container, add --cap-add SYS_PTRACE; for a process of your own, \
                         /proc/sys/kernel/yama/ptrace_scope must be 0"
            .to_owned(),
        error => error.to_string(),
    };
    format!("process {pid} cannot be traced: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_another_process_is_one_line_without_control_characters() {
        assert_eq!(name(b"SVM\0rest"), "SVM");
        assert_eq!(name("\x1b[31m\u{9b}\u{202e}a\nb\r".as_bytes()), r"\u{1b}[31m\u{9b}\u{202e}a\nb\r");
        assert_eq!(name(b"\xff"), "\u{fffd}");
    }
}
