//! The process that has the memory.

use super::{Failure, PATIENCE, check, write};
use crate::terminal::{Align, Table, bytes};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::share::{BareTgid, Export};
use ascend_vmm::{Mapping, Session};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The process that has the memory.
#[derive(clap::Args)]
pub struct Exporter {
    /// How much.
    #[arg(long)]
    size: u64,
    /// How many devices take part.
    #[arg(long)]
    devices: u32,
}

/// A directory for the socket, which goes with the process.
struct Place(std::path::PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What took how long.
struct Times(Vec<(String, Duration, Option<u64>)>);

impl Times {
    /// Notes the time of a step.
    fn step<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let start = Instant::now();
        let result = step()?;
        self.0.push((name.to_owned(), start.elapsed(), None));
        Ok(result)
    }

    /// Notes the time of a copy.
    fn copy(&mut self, name: &str, time: Duration, size: u64) {
        self.0.push((name.to_owned(), time, Some(size)));
    }

    fn print(&self) {
        let mut table = Table::new(&["step", "time", "rate"]);
        table.align(1, Align::Right);
        table.align(2, Align::Right);
        for (name, time, size) in &self.0 {
            let rate = size.map(|size| format!("{}/s", bytes((size as f64 / time.as_secs_f64()) as u64)));
            table.row([name.clone(), format!("{:.3} ms", time.as_secs_f64() * 1000.0), rate.unwrap_or_default()]);
        }
        table.print();
    }
}

fn say(text: impl std::fmt::Display) {
    crate::outln!("  exporter {}: {text}", std::process::id());
}

impl Exporter {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        match self.share() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: exporter: {error}");
                ExitCode::FAILURE
            }
        }
    }

    fn share(&self) -> Result<(), Failure> {
        let mut times = Times(Vec::new());
        crate::outln!("\n1. Memory of an NPU");
        let session = times.step("open a session", || Ok(Session::open()?))?;
        let device = times.step("open device 0", || Ok(session.device(LogicalId(0))?))?;
        let process =
            if device.device_process().is_some() { ", for which a process was started on the device" } else { "" };
        say(format_args!("driver generation {}, device 0{process}", session.generation()));
        let memory = times.step("create physical memory", || Ok(device.create(self.size)?))?;
        let reservation = times.step("reserve addresses", || Ok(session.reserve(self.size)?))?;
        let mapping = times.step("map", || Ok(reservation.map(0, &memory)?))?;
        say(format_args!("{} of physical memory, mapped at {:#x}", bytes(self.size), mapping.address()));
        times.copy("exporter writes", write("exporter", &mapping, 0)?, self.size);
        say("wrote a pattern into it");
        let export = times.step("export", || Ok(memory.export()?))?;
        say(format_args!("exported it: handle {:#x}; nobody is trusted yet", export.handle().to_u64()));

        let importers = 1.max(self.devices - 1);
        for number in 1..=importers {
            // With one device, both processes use that.
            let device = if self.devices == 1 { 0 } else { number };
            self.with_importer(number, device, &session, &export, &mapping, &mut times)?;
        }
        crate::outln!("\nWhat took how long");
        times.print();
        crate::outln!();
        drop((mapping, reservation, export, memory, device));
        Ok(session.close()?)
    }

    /// Shares with one more process.
    fn with_importer(
        &self,
        number: u32,
        device: u32,
        session: &Session,
        export: &Export,
        mapping: &Mapping,
        times: &mut Times,
    ) -> Result<(), Failure> {
        crate::outln!("\n{}. Another process, on device {device}", number + 1);
        let place = Place(std::env::temp_dir().join(format!("ascend-vmm-demo-{}-{number}", std::process::id())));
        std::fs::create_dir(&place.0)?;
        let path = place.0.join("socket");
        let listener = UnixListener::bind(&path)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["demo-importer", "--device", &device.to_string(), "--changes", &(number - 1).to_string()])
            .arg(&path)
            .spawn()?;
        let mut line = Line::new(accept(&listener, &mut child)?)?;

        let said: i32 = line.receive()?.parse()?;
        let importer = BareTgid::from_raw(said)?;
        // A number that came over the socket is only as good as the socket: compare it with what the kernel saw.
        if BareTgid::of_child(session, &child)? != importer {
            return Err(format!("the other process says that it is {said}, but it is process {}", child.id()).into());
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

/// Waits for the child to connect, or to end.
fn accept(listener: &UnixListener, child: &mut std::process::Child) -> Result<UnixStream, Failure> {
    listener.set_nonblocking(true)?;
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error.into()),
            Err(_) => {}
        }
        if let Some(status) = child.try_wait()? {
            return Err(format!("the importer ended with {status}").into());
        }
        if start.elapsed() > PATIENCE {
            return Err("the importer does not come".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lines of text between the two.
pub(super) struct Line {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Line {
    pub(super) fn new(socket: UnixStream) -> Result<Line, Failure> {
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Line { writer: socket.try_clone()?, reader: BufReader::new(socket) })
    }

    pub(super) fn send(&mut self, text: &str) -> Result<(), Failure> {
        Ok(writeln!(self.writer, "{text}")?)
    }

    pub(super) fn receive(&mut self) -> Result<String, Failure> {
        let mut text = String::new();
        if self.reader.read_line(&mut text)? == 0 {
            return Err("the other process is gone".into());
        }
        Ok(text.trim_end().to_owned())
    }
}
