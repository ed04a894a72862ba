//! Sharing memory with a second process, which the test starts.
//!
//! The second process, the peer, is this program again. It receives commands over a Unix socket,
//! one per line, and answers each with a line: `ok`, or the error.

use super::library::{mapped, pattern, same};
use super::{Failure, Run, ensure};
use crate::second_process::{self, TIMEOUT};
use crate::session_options::SessionOptions;
use ascend_vmm::LogicalId;
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Device, PhysicalMemory};
use nix::sys::signal::Signal;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

const SIZE: u64 = 4 << 20;

/// Options of the second process of `selftest`.
#[derive(clap::Args)]
pub struct SelftestPeer {
    /// The socket of the test.
    socket: PathBuf,
    /// The device on which it imports.
    #[arg(long)]
    device: u32,
    #[command(flatten)]
    session: SessionOptions,
}

/// The checks of sharing.
pub(super) fn check(run: &mut Run<'_>, device: &Device) {
    let group = format!("device {}", device.id());
    let session = run.session;
    if let Some(obstacle) = run.survey.device(device.id()).and_then(|npu| npu.sharing_obstacle()) {
        run.check(&group, "memory is shared with another process", || Err(Failure::Skipped(obstacle.to_owned())));
        return;
    }
    run.check(&group, "exporting the same memory again gives the same handle", || {
        let memory = device.create(SIZE)?;
        let (one, other) = (memory.export()?, memory.export()?);
        ensure(one.handle() == other.handle(), || format!("{:?} and {:?}", one.handle(), other.handle()))?;
        Ok(None)
    });
    run.check(&group, "a process cannot import its own export on the same device", || {
        let export = device.create(SIZE)?.export()?;
        export.trust(&[BareTgid::of_this_process(&device.session())?])?;
        match share::import(device, &export.ticket()?) {
            Err(_) => Ok(None),
            Ok(_) => Err(Failure::Failed("it was imported".into())),
        }
    });
    run.check(&group, "a damaged ticket is refused before any system call", || {
        let ticket = device.create(SIZE)?.export()?.ticket()?.to_string();
        let damaged = format!("{}{}", &ticket[..ticket.len() - 1], if ticket.ends_with('0') { '1' } else { '0' });
        ensure(damaged.parse::<Ticket>().is_err(), || format!("{damaged} was accepted"))?;
        Ok(None)
    });
    run.check(&group, "a process that is not trusted cannot import", || {
        let export = device.create(SIZE)?.export()?;
        let mut peer = Peer::start(device.id(), session)?;
        match peer.request(&format!("import {}", export.ticket()?)) {
            Err(Failure::Failed(error)) if error.contains("EACCES") => peer.end().map(|()| None),
            Err(other) => Err(other),
            Ok(_) => Err(Failure::Failed("it was imported".into())),
        }
    });
    run.check(&group, "a trusted process imports, reads, and changes the memory", || {
        let mapping = mapped(device, SIZE)?;
        mapping.write(0, &pattern(SIZE as usize, 1))?;
        let export = mapping.memory().export()?;
        let mut peer = Peer::start(device.id(), session)?;
        export.trust(&[BareTgid::of_process(&device.session(), peer.child.id())?])?;
        let ticket = export.ticket()?;
        peer.request(&format!("import {ticket}"))?;
        peer.request("expect 1")?;
        peer.request("write 2")?;
        let mut back = vec![0; SIZE as usize];
        mapping.read(0, &mut back)?;
        same(&back, &pattern(SIZE as usize, 2))?;
        peer.request(&format!("again {ticket}"))?;
        peer.end()?;
        Ok(None)
    });
    run.check(&group, "memory is sent over a socket, and the importer keeps it when the exporter releases it", || {
        let mapping = mapped(device, SIZE)?;
        mapping.write(0, &pattern(SIZE as usize, 3))?;
        let mut peer = Peer::start(device.id(), session)?;
        peer.send("receive")?;
        share::send(&peer.writer, &mapping.memory(), TIMEOUT)?;
        peer.answer()?;
        mapping.unmap()?;
        peer.request("expect 3")?;
        peer.end()?;
        Ok(None)
    });
    run.check(&group, "the exporter still has its memory after an importer is killed", || {
        let mapping = mapped(device, SIZE)?;
        let export = mapping.memory().export()?;
        let mut peer = Peer::start(device.id(), session)?;
        export.trust(&[BareTgid::of_process(&device.session(), peer.child.id())?])?;
        peer.request(&format!("import {}", export.ticket()?))?;
        peer.request("write 4")?;
        peer.child.kill()?;
        peer.child.wait()?;
        let mut back = vec![0; SIZE as usize];
        mapping.read(0, &mut back)?;
        same(&back, &pattern(SIZE as usize, 4))?;
        Ok(None)
    });
}

/// The second process, seen from the test.
pub(crate) struct Peer {
    child: Child,
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Peer {
    /// Starts it; it uses this device.
    pub(crate) fn start(device: LogicalId, session: SessionOptions) -> Result<Peer, Failure> {
        let (child, socket) =
            second_process::start(&["selftest-peer", &format!("--device={device}"), &session.argument()])?;
        Ok(Peer { child, writer: socket.try_clone()?, reader: BufReader::new(socket) })
    }

    /// The process.
    pub(crate) fn child(&self) -> &Child {
        &self.child
    }

    fn send(&mut self, command: &str) -> Result<(), Failure> {
        Ok(writeln!(self.writer, "{command}")?)
    }

    fn answer(&mut self) -> Result<(), Failure> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        match line.trim_end() {
            "ok" => Ok(()),
            "" => Err(Failure::Failed("the second process has ended".into())),
            error => Err(Failure::Failed(format!("in the second process: {error}"))),
        }
    }

    /// Sends a command and waits for its answer.
    pub(crate) fn request(&mut self, command: &str) -> Result<(), Failure> {
        self.send(command)?;
        self.answer()
    }

    /// Asks it to end, and checks that it does.
    pub(crate) fn end(mut self) -> Result<(), Failure> {
        self.request("end")?;
        let status = self.child.wait()?;
        ensure(status.success(), || format!("the second process ended with {status}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // After a failure the process may still run.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl SelftestPeer {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        match self.serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => crate::impossible(error),
        }
    }

    fn serve(&self) -> Result<(), Box<dyn std::error::Error>> {
        // It may be opening a device when the process that started it gives up and ends.
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        let socket = UnixStream::connect(&self.socket)?;
        let session = self.session.open()?;
        let device = session.device(LogicalId(self.device))?;
        let mut memory = None;
        let mut writer = socket.try_clone()?;
        let mut line = Vec::new();
        loop {
            // Byte by byte: what follows a line may be for `share::receive`.
            line.clear();
            read_line(&socket, &mut line)?;
            let command = String::from_utf8_lossy(&line).into_owned();
            if command == "end" || command.is_empty() {
                drop((memory, device));
                session.close()?;
                writeln!(writer, "ok")?;
                return Ok(());
            }
            let answer = match serve(&device, &socket, &mut memory, &command) {
                Ok(()) => "ok".to_owned(),
                Err(Failure::Failed(error) | Failure::Skipped(error)) => error.replace('\n', " / "),
            };
            writeln!(writer, "{answer}")?;
        }
    }
}

/// Reads up to the end of a line, and not beyond.
fn read_line(mut socket: &UnixStream, line: &mut Vec<u8>) -> std::io::Result<()> {
    use std::io::Read;
    let mut byte = [0];
    while socket.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    Ok(())
}

/// Executes a command of the test.
fn serve(
    device: &Device,
    socket: &UnixStream,
    memory: &mut Option<PhysicalMemory>,
    command: &str,
) -> Result<(), Failure> {
    let (verb, argument) = command.split_once(' ').unwrap_or((command, ""));
    let held = || memory.clone().ok_or_else(|| Failure::Failed("nothing was imported".into()));
    let map = |memory: &PhysicalMemory| device.session().reserve(memory.size())?.map(0, memory);
    match verb {
        "import" => *memory = Some(share::import(device, &argument.parse::<Ticket>()?)?),
        "again" => {
            let again = share::import(device, &argument.parse::<Ticket>()?)?;
            ensure(again.is_same(&held()?), || "a second import is other memory".into())?;
        }
        "receive" => *memory = Some(share::receive(socket, device, TIMEOUT)?),
        "expect" => {
            let mapping = map(&held()?)?;
            let mut bytes = vec![0; mapping.size() as usize];
            mapping.read(0, &mut bytes)?;
            same(&bytes, &pattern(bytes.len(), argument.parse()?))?;
        }
        "write" => {
            let mapping = map(&held()?)?;
            mapping.write(0, &pattern(mapping.size() as usize, argument.parse()?))?;
        }
        other => return Err(Failure::Failed(format!("unknown command `{other}`"))),
    }
    Ok(())
}
