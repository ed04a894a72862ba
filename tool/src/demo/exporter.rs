//! The process that owns the memory.

use super::{DemoError, check, write};
use crate::second_process;
use crate::session_options::SessionOptions;
use crate::terminal::Table;
use ascend_vmm::Bytes;
use ascend_vmm::LogicalId;
use ascend_vmm::share::{BareTgid, Export};
use ascend_vmm::{Mapping, Session};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of the process that owns the memory.
#[derive(clap::Args)]
pub struct Exporter {
    /// How much memory.
    #[arg(long)]
    size: u64,
    /// Logical ids of the devices: the first for the memory, one importer on each other.
    #[arg(required = true)]
    devices: Vec<u32>,
    #[command(flatten)]
    session: SessionOptions,
}

/// How long each step took; a copy with its size.
struct StepTimes(Vec<(String, Duration, Option<u64>)>);

impl StepTimes {
    /// Runs a step and records its time.
    fn step<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T, DemoError>) -> Result<T, DemoError> {
        let start = Instant::now();
        let result = step()?;
        self.0.push((name.to_owned(), start.elapsed(), None));
        Ok(result)
    }

    /// Records the time of a copy.
    fn copy(&mut self, name: &str, time: Duration, size: u64) {
        self.0.push((name.to_owned(), time, Some(size)));
    }

    fn print(&self) {
        let mut table = Table::new(&["step", "time", "rate"]);
        table.align_right(1);
        table.align_right(2);
        for (name, time, size) in &self.0 {
            let rate = size.map(|size| format!("{}/s", Bytes((size as f64 / time.as_secs_f64()) as u64).rounded()));
            table.row([name.clone(), format!("{:.3} ms", time.as_secs_f64() * 1000.0), rate.unwrap_or_default()]);
        }
        table.print();
    }
}

fn say(text: impl std::fmt::Display) {
    crate::outln!("  exporter {}: {text}", std::process::id());
}

impl Exporter {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        match self.share() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                crate::errln!("error: exporter: {}", crate::said(error));
                ExitCode::FAILURE
            }
        }
    }

    fn share(&self) -> Result<(), DemoError> {
        let (&first, others) = self.devices.split_first().ok_or("no device was given")?;
        let mut times = StepTimes(Vec::new());
        crate::outln!("\n1. Memory of an NPU");
        let session = times.step("open a session", || Ok(self.session.open()?))?;
        let device = times.step(&format!("open device {first}"), || Ok(session.device(LogicalId(first))?))?;
        let process = if device.device_process().is_some() { "; started a process on the device" } else { "" };
        say(format_args!("driver generation {}, device {first}{process}", session.generation()));
        let memory = times.step("create physical memory", || Ok(device.create(self.size)?))?;
        let reservation = times.step("reserve addresses", || Ok(session.reserve(self.size)?))?;
        let mapping = times.step("map", || Ok(reservation.map(0, &memory)?))?;
        say(format_args!("{} of physical memory, mapped at {:#x}", Bytes(self.size).rounded(), mapping.address()));
        times.copy("exporter writes", write("exporter", &mapping, 0)?, self.size);
        say("wrote a pattern into it");
        let export = times.step("export", || Ok(memory.export()?))?;
        say(format_args!("exported it: handle {:#x}; no process is trusted yet", export.handle().to_u64()));

        // With one device, both processes use it.
        let importers = if others.is_empty() { &[first] } else { others };
        for (&device, number) in importers.iter().zip(1..) {
            self.with_importer(number, device, &session, &export, &mapping, &mut times)?;
        }
        crate::outln!("\nHow long each step took");
        times.print();
        crate::outln!();
        drop((mapping, reservation, export, memory, device));
        Ok(session.close()?)
    }

    /// Shares the memory with one more process.
    fn with_importer(
        &self,
        number: u32,
        device: u32,
        session: &Session,
        export: &Export,
        mapping: &Mapping,
        times: &mut StepTimes,
    ) -> Result<(), DemoError> {
        crate::outln!("\n{}. Another process, on device {device}", number + 1);
        let (device, changes) = (device.to_string(), (number - 1).to_string());
        let policy = self.session.argument();
        let arguments = ["demo-importer", "--device", &device, "--changes", &changes, &policy];
        let (mut child, socket) = second_process::start(&arguments)?;
        let mut line = LineSocket::new(socket)?;

        let reported: i32 = line.receive()?.parse()?;
        let importer = BareTgid::from_raw(reported)?;
        // The number came over a socket, so it is compared with the process that was started.
        if BareTgid::of_process(session, child.id())? != importer {
            return Err(format!("the importer reports process id {reported}, but it is {}", child.id()).into());
        }
        times.step("trust", || Ok(export.trust(&[importer])?))?;
        say(format_args!("trusts process {importer}, and no other"));
        let ticket = export.ticket()?.to_string();
        say(format_args!("sends the ticket, {} characters: {}…", ticket.len(), &ticket[..ticket.len().min(24)]));
        line.send(&ticket)?;
        while let Some((name, time)) = line.receive()?.split_once('=') {
            let micros: f64 = time.parse()?;
            let time = Duration::from_secs_f64(micros / 1e6);
            match name.starts_with("importer ") {
                true => times.copy(name, time, self.size),
                false => times.0.push((name.to_owned(), time, None)),
            }
        }
        times.copy("exporter reads the change", check("exporter", mapping, number)?, self.size);
        say("sees the change, in every byte");
        let status = child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the importer ended with {status}").into()) }
    }
}

/// Lines of text between the two processes.
pub(super) struct LineSocket {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl LineSocket {
    pub(super) fn new(socket: UnixStream) -> Result<LineSocket, DemoError> {
        Ok(LineSocket { writer: socket.try_clone()?, reader: BufReader::new(socket) })
    }

    pub(super) fn send(&mut self, text: &str) -> Result<(), DemoError> {
        Ok(writeln!(self.writer, "{text}")?)
    }

    pub(super) fn receive(&mut self) -> Result<String, DemoError> {
        let mut text = String::new();
        if self.reader.read_line(&mut text)? == 0 {
            return Err("the other process has ended".into());
        }
        Ok(text.trim_end().to_owned())
    }
}
