//! The process that imports the memory.

use super::exporter::LineSocket;
use super::{DemoError, check, write};
use crate::second_process;
use crate::session_options::SessionOptions;
use ascend_vmm::Bytes;
use ascend_vmm::LogicalId;
use ascend_vmm::share::{self, BareTgid, Ticket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of the process that imports the memory.
#[derive(clap::Args)]
pub struct Importer {
    /// The socket of the exporter.
    socket: PathBuf,
    /// The device on which the memory is imported.
    #[arg(long)]
    device: u32,
    /// How many importers changed the memory before this one.
    #[arg(long)]
    changes: u32,
    #[command(flatten)]
    session: SessionOptions,
}

fn say(text: impl std::fmt::Display) {
    crate::outln!("  importer {}: {text}", std::process::id());
}

impl Importer {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        match self.share() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                crate::errln!("error: importer: {}", crate::said(error));
                ExitCode::FAILURE
            }
        }
    }

    fn share(&self) -> Result<(), DemoError> {
        let socket = UnixStream::connect(&self.socket)?;
        socket.set_read_timeout(Some(second_process::TIMEOUT))?;
        let mut line = LineSocket::new(socket)?;
        let session = self.session.open()?;
        let device = session.device(LogicalId(self.device))?;
        let me = BareTgid::of_this_process(&session)?;
        let process = if device.device_process().is_some() { "; started a process on the device" } else { "" };
        say(format_args!("device {}{process}", device.id()));
        say(format_args!("reports that the driver knows it as process {me}"));
        line.send(&me.to_string())?;

        let ticket: Ticket = line.receive()?.parse()?;
        say(format_args!("received a ticket for {} of process {}", Bytes(ticket.size).rounded(), ticket.exporter));
        let start = Instant::now();
        let memory = share::import(&device, &ticket)?;
        send(&mut line, "import", start.elapsed())?;
        let reservation = session.reserve(memory.size())?;
        let start = Instant::now();
        let mapping = reservation.map(0, &memory)?;
        send(&mut line, "map the import", start.elapsed())?;
        say(format_args!("imported it, mapped at {:#x}", mapping.address()));
        send(&mut line, "importer reads", check("importer", &mapping, self.changes)?)?;
        say("read what was written: every byte is right");
        send(&mut line, "importer writes", write("importer", &mapping, self.changes + 1)?)?;
        say("changed every byte");
        drop((mapping, reservation, memory, device));
        session.close()?;
        line.send("done")
    }
}

/// Sends a time to the exporter.
fn send(line: &mut LineSocket, name: &str, time: Duration) -> Result<(), DemoError> {
    line.send(&format!("{name}={}", time.as_secs_f64() * 1e6))
}
