//! Sharing memory with a second process, which the test starts by itself.
//!
//! The peer is this program again. It does what it is told over a Unix socket, one word per line, and answers each with a line: `ok`, or the error.

use super::library::{mapped, pattern, same};
use super::{Failure, Run, ensure};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Device, PhysicalMemory, Session};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

const SIZE: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// The second process of `selftest`.
#[derive(clap::Args)]
pub struct SelftestPeer {
    /// The socket that leads to the test.
    socket: PathBuf,
    /// The device on which it imports.
    #[arg(long)]
    device: u32,
}

/// The checks of sharing.
pub(super) fn check(run: &mut Run<'_>, device: &Device) {
    let group = format!("device {}", device.id());
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
    run.check(&group, "importing what one exported oneself on the same device is refused", || {
        let export = device.create(SIZE)?.export()?;
        export.trust(&[BareTgid::of_this_process(&device.session())?])?;
        match share::import(device, &export.ticket()?) {
            Err(_) => Ok(None),
            Ok(_) => Err(Failure::Failed("it was imported".into())),
        }
    });
    run.check(&group, "a damaged ticket is refused before the kernel is asked", || {
        let ticket = device.create(SIZE)?.export()?.ticket()?.to_string();
        let damaged = format!("{}{}", &ticket[..ticket.len() - 1], if ticket.ends_with('0') { '1' } else { '0' });
        ensure(damaged.parse::<Ticket>().is_err(), || format!("{damaged} was believed"))?;
        Ok(None)
    });
    run.check(&group, "another process that is not trusted cannot import", || {
        let export = device.create(SIZE)?.export()?;
        let mut peer = Peer::start(device)?;
        match peer.ask(&format!("import {}", export.ticket()?)) {
            Err(Failure::Failed(error)) if error.contains("EACCES") => peer.end().map(|()| None),
            Err(other) => Err(other),
            Ok(_) => Err(Failure::Failed("it did".into())),
        }
    });
    run.check(&group, "a trusted process imports, reads, and changes the memory", || {
        let mapping = mapped(device, SIZE)?;
        mapping.write(0, &pattern(SIZE as usize, 1))?;
        let export = mapping.memory().export()?;
        let mut peer = Peer::start(device)?;
        export.trust(&[BareTgid::of_child(&device.session(), &peer.child)?])?;
        let ticket = export.ticket()?;
        peer.ask(&format!("import {ticket}"))?;
        peer.ask("expect 1")?;
        peer.ask("write 2")?;
        let mut back = vec![0; SIZE as usize];
        mapping.read(0, &mut back)?;
        same(&back, &pattern(SIZE as usize, 2))?;
        peer.ask(&format!("again {ticket}"))?;
        peer.end()?;
        Ok(None)
    });
    run.check(&group, "memory goes over a socket, and stays when its exporter lets go of it", || {
        let mapping = mapped(device, SIZE)?;
        mapping.write(0, &pattern(SIZE as usize, 3))?;
        let mut peer = Peer::start(device)?;
        peer.tell("receive")?;
        share::send(&peer.writer, &mapping.memory(), PATIENCE)?;
        peer.answer()?;
        mapping.unmap()?;
        peer.ask("expect 3")?;
        peer.end()?;
        Ok(None)
    });
    run.check(&group, "memory that an importer held when it was killed is still the exporter's", || {
        let mapping = mapped(device, SIZE)?;
        let export = mapping.memory().export()?;
        let mut peer = Peer::start(device)?;
        export.trust(&[BareTgid::of_child(&device.session(), &peer.child)?])?;
        peer.ask(&format!("import {}", export.ticket()?))?;
        peer.ask("write 4")?;
        peer.child.kill()?;
        peer.child.wait()?;
        let mut back = vec![0; SIZE as usize];
        mapping.read(0, &mut back)?;
        same(&back, &pattern(SIZE as usize, 4))?;
        Ok(None)
    });
}

/// The other process, as the test has it.
struct Peer {
    child: Child,
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Peer {
    fn start(device: &Device) -> Result<Peer, Failure> {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-selftest-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let connected = Peer::connect(device, &directory.join("socket"));
        std::fs::remove_dir_all(&directory)?;
        connected
    }

    fn connect(device: &Device, path: &std::path::Path) -> Result<Peer, Failure> {
        let listener = UnixListener::bind(path)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["selftest-peer", "--device", &device.id().to_string()])
            .arg(path)
            .spawn()?;
        listener.set_nonblocking(true)?;
        let start = Instant::now();
        let socket = loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if child.try_wait()?.is_some() || start.elapsed() > PATIENCE => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(Failure::Failed("the second process does not come".into()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Peer { child, writer: socket.try_clone()?, reader: BufReader::new(socket) })
    }

    fn tell(&mut self, words: &str) -> Result<(), Failure> {
        Ok(writeln!(self.writer, "{words}")?)
    }

    fn answer(&mut self) -> Result<(), Failure> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        match line.trim_end() {
            "ok" => Ok(()),
            "" => Err(Failure::Failed("the second process is gone".into())),
            error => Err(Failure::Failed(format!("in the second process: {error}"))),
        }
    }

    fn ask(&mut self, words: &str) -> Result<(), Failure> {
        self.tell(words)?;
        self.answer()
    }

    /// Lets it end, in good order.
    fn end(mut self) -> Result<(), Failure> {
        self.ask("end")?;
        let status = self.child.wait()?;
        ensure(status.success(), || format!("the second process ended with {status}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Whatever went wrong, nobody is left behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl SelftestPeer {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        match self.serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => crate::impossible(error),
        }
    }

    fn serve(&self) -> Result<(), Box<dyn std::error::Error>> {
        let socket = UnixStream::connect(&self.socket)?;
        let session = Session::open()?;
        let device = session.device(LogicalId(self.device))?;
        let mut memory = None;
        let mut writer = socket.try_clone()?;
        let mut line = Vec::new();
        loop {
            // Byte by byte: what comes after a line may be for another reader.
            line.clear();
            read_line(&socket, &mut line)?;
            let words = String::from_utf8_lossy(&line).into_owned();
            if words == "end" || words.is_empty() {
                drop((memory, device));
                session.close()?;
                writeln!(writer, "ok")?;
                return Ok(());
            }
            let answer = match serve(&device, &socket, &mut memory, &words) {
                Ok(()) => "ok".to_owned(),
                Err(Failure::Failed(error) | Failure::Skipped(error)) => error.replace('\n', " / "),
            };
            writeln!(writer, "{answer}")?;
        }
    }
}

/// Reads up to the end of a line, and not a byte more.
fn read_line(mut socket: &UnixStream, line: &mut Vec<u8>) -> std::io::Result<()> {
    use std::io::Read;
    let mut byte = [0];
    while socket.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    Ok(())
}

/// Does what the test wants.
fn serve(
    device: &Device,
    socket: &UnixStream,
    memory: &mut Option<PhysicalMemory>,
    words: &str,
) -> Result<(), Failure> {
    let (verb, argument) = words.split_once(' ').unwrap_or((words, ""));
    let held = || memory.clone().ok_or_else(|| Failure::Failed("nothing was imported".into()));
    let map = |memory: &PhysicalMemory| device.session().reserve(memory.size())?.map(0, memory);
    match verb {
        "import" => *memory = Some(share::import(device, &argument.parse::<Ticket>()?)?),
        "again" => {
            let again = share::import(device, &argument.parse::<Ticket>()?)?;
            ensure(again.is_same(&held()?), || "a second import is other memory".into())?;
        }
        "receive" => *memory = Some(share::receive(socket, device, PATIENCE)?),
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
        other => return Err(Failure::Failed(format!("`{other}` is nothing that this process can do"))),
    }
    Ok(())
}
