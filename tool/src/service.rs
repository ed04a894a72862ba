//! `ascend-vmm service`: what a memory service holds, and for whom.

mod files;
mod web;

use crate::print_json;
use crate::terminal::{self, Table, counted, wrap};
use ascend_vmm::Bytes;
use ascend_vmm_service::protocol::{Event, Status};
use ascend_vmm_service::{Client, DomainName, Error, SnapshotError};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Options of `service`.
#[derive(clap::Args)]
#[command(after_help = "All but save, load, ticket and verify need no NPU, and no rights but those of the socket.\n\n\
                        Examples:\n  ascend-vmm service --socket /run/ascend-vmm.sock top\n  \
                        ascend-vmm service --socket /run/ascend-vmm.sock events --follow\n  \
                        ascend-vmm service --socket /run/ascend-vmm.sock remove llama-70b/tp0/weights")]
pub struct Service {
    /// The socket of the service.
    #[arg(long, value_name = "PATH", env = "ASCEND_VMM_SERVICE")]
    socket: PathBuf,
    #[command(subcommand)]
    command: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Who holds what: NPUs, domains, processes.
    ///
    /// Example: ascend-vmm service --socket /run/ascend-vmm.sock top --watch 2
    Top {
        /// Print JSON (docs/service.md). With --watch, one document per line.
        #[arg(long)]
        json: bool,
        /// Look again after so many seconds, until interrupted.
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
        watch: Option<u64>,
    },
    /// What happened.
    ///
    /// Example: ascend-vmm service --socket /run/ascend-vmm.sock events --follow
    Events {
        /// Print each event as a line of JSON.
        #[arg(long)]
        json: bool,
        /// Wait for more, until interrupted.
        #[arg(long)]
        follow: bool,
    },
    /// Remove what a domain has committed. Refused while a process uses it.
    ///
    /// Example: ascend-vmm service --socket /run/ascend-vmm.sock remove llama-70b/tp0/weights
    Remove {
        /// The domain.
        domain: DomainName,
    },
    /// Save what a domain has committed to files.
    ///
    /// Needs the NPU. A save that was interrupted goes on where it stopped. Engines go on
    /// meanwhile.
    ///
    /// Example: ascend-vmm service save llama-70b/tp0/weights /ssd1/llama /ssd2/llama
    Save(files::Save),
    /// Load what was saved into new memory, and commit it.
    ///
    /// Needs the NPU. Every byte is checked before the commit; until then the domain serves what it
    /// served.
    ///
    /// Examples: ascend-vmm service load llama-70b/tp0/weights /ssd1/llama /ssd2/llama,
    /// ascend-vmm service load llama-70b/tp0/weights --ticket /shared/llama-tp0.ticket
    Load(files::Load),
    /// Write a ticket with which other servers of the super pod read what a domain has committed.
    ///
    /// Needs the NPU. `service load --ticket` takes it on the other server. The ticket protects
    /// nothing: between servers the driver asks no list of processes.
    ///
    /// Example: ascend-vmm service ticket llama-70b/tp0/weights /shared/llama-tp0.ticket
    Ticket(files::MakeTicket),
    /// Compare what is served with safetensors files, by name and bytes.
    ///
    /// Needs the NPU. Exit status 1 if a tensor differs or is missing on either side.
    ///
    /// Example: ascend-vmm service verify llama-70b/tp0/weights --safetensors llama-70b
    Verify(files::Verify),
    /// Wait until a domain has something committed: exit status 0, or 1 when the time is over.
    ///
    /// Example: ascend-vmm service wait llama-70b/tp0/weights --seconds 600
    Wait {
        /// The domain.
        domain: DomainName,
        /// Only a version that is newer than this one.
        #[arg(long, value_name = "VERSION", default_value_t = 0)]
        newer_than: u64,
        /// How long; 0 looks once.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Serve a status page, and metrics for Prometheus, over HTTP.
    ///
    /// The page is at /, the metrics are at /metrics and the status as JSON at /status.json. A
    /// process of its own: the service does not notice what comes over HTTP.
    ///
    /// Example: ascend-vmm service web --listen 127.0.0.1:9464
    Web(web::Web),
}

impl Service {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let client = Client::new(&self.socket);
        let done = |()| ExitCode::SUCCESS;
        let ended = match self.command {
            Action::Top { json, watch } => {
                top(&client, json, watch.map(Duration::from_secs)).map(done).map_err(SnapshotError::from)
            }
            Action::Events { json, follow } => events(&client, json, follow).map(done).map_err(SnapshotError::from),
            Action::Remove { domain } => client.remove(&domain).map(done).map_err(SnapshotError::from),
            Action::Save(save) => save.run(&client),
            Action::Load(load) => load.run(&client),
            Action::Ticket(ticket) => ticket.run(&client),
            Action::Verify(verify) => verify.run(&client),
            Action::Wait { domain, newer_than, seconds } => {
                let waited = client.wait(&domain, newer_than, Duration::from_secs(seconds));
                waited.map(|version| crate::outln!("{version}")).map(done).map_err(SnapshotError::from)
            }
            Action::Web(web) => Ok(web.run(&client)),
        };
        match ended {
            Ok(status) => status,
            Err(SnapshotError::Client(error @ Error::Unreachable { .. })) => crate::impossible(error),
            Err(error) => {
                crate::errln!("error: {error}");
                ExitCode::FAILURE
            }
        }
    }
}

fn top(client: &Client, json: bool, watch: Option<Duration>) -> Result<(), Error> {
    loop {
        let status = client.status()?;
        match (json, watch) {
            (true, None) => print_json(&status),
            (true, Some(_)) => crate::outln!("{}", serde_json::to_string(&status).unwrap_or_default()),
            (false, _) => {
                if watch.is_some() && terminal::size().is_some() {
                    // The top left corner of an empty screen.
                    crate::outln!("\x1b[2J\x1b[H");
                }
                for line in lines(&status, terminal::width()) {
                    crate::outln!("{line}");
                }
            }
        }
        match watch {
            Some(pause) => std::thread::sleep(pause),
            None => return Ok(()),
        }
    }
}

fn events(client: &Client, json: bool, follow: bool) -> Result<(), Error> {
    let mut last = 0;
    loop {
        let events = client.events(last)?;
        for event in &events {
            last = event.number;
            match json {
                true => crate::outln!("{}", serde_json::to_string(event).unwrap_or_default()),
                false => crate::outln!("{}", event_line(event)),
            }
        }
        match (events.is_empty(), follow) {
            (true, false) => return Ok(()),
            (true, true) => std::thread::sleep(Duration::from_millis(500)),
            (false, _) => {}
        }
    }
}

fn event_line(event: &Event) -> String {
    let (hours, minutes, seconds) = (event.time / 3600 % 24, event.time / 60 % 60, event.time % 60);
    let domain = event.domain.as_ref().map(|domain| format!("{domain}: ")).unwrap_or_default();
    format!("{hours:02}:{minutes:02}:{seconds:02}Z {domain}{}", event.text)
}

/// The status as text.
fn lines(status: &Status, width: usize) -> Vec<String> {
    let mut lines = vec![format!(
        "keeper {}, front {}, {}, {}",
        status.keeper,
        status.front,
        counted(status.domains.len(), "domain"),
        counted(status.clients.len(), "client")
    )];
    let bytes = |bytes: u64| Bytes(bytes).rounded();
    let mut devices = Table::new(&["NPU", "identity", "held", "free", "total"]);
    devices.cut(1);
    (2..5).for_each(|column| devices.align_right(column));
    for it in &status.devices {
        devices.row([it.physical.to_string(), it.identity.clone(), bytes(it.held), bytes(it.free), bytes(it.total)]);
    }
    lines.push(String::new());
    lines.extend(devices.lines(width));
    for it in status.devices.iter().filter(|device| !device.problem.is_empty()) {
        lines.push(String::new());
        lines.extend(wrap(&format!("NPU {} does not answer: {}", it.physical, it.problem), width, "", "  "));
    }
    if !status.domains.is_empty() {
        let mut domains = Table::new(&["domain", "NPU", "state", "version", "held", "readers", "waiting", "age"]);
        domains.cut(0);
        [1, 3, 4, 5, 6, 7].into_iter().for_each(|column| domains.align_right(column));
        for it in &status.domains {
            domains.row([
                it.name.to_string(),
                it.device.to_string(),
                it.state.clone(),
                it.version.to_string(),
                bytes(it.bytes + it.uncommitted + it.superseded),
                it.readers.to_string(),
                it.waiting.to_string(),
                age(it.age),
            ]);
        }
        lines.push(String::new());
        lines.extend(domains.lines(width));
    }
    let clients: Vec<_> = status.clients.iter().filter(|client| client.domain.is_some()).collect();
    if !clients.is_empty() {
        let mut table = Table::new(&["process", "user", "container", "program", "role", "domain", "bytes", "age"]);
        [2, 3, 5].into_iter().for_each(|column| table.cut(column));
        [0, 1, 6, 7].into_iter().for_each(|column| table.align_right(column));
        for it in clients {
            table.row([
                it.process.to_string(),
                it.user.to_string(),
                if it.container.is_empty() { "-".into() } else { it.container.clone() },
                it.program.clone(),
                it.role.clone(),
                it.domain.as_ref().map(ToString::to_string).unwrap_or_default(),
                bytes(it.bytes),
                age(it.age),
            ]);
        }
        lines.push(String::new());
        lines.extend(table.lines(width));
    }
    for it in status.clients.iter().filter(|client| !client.waits.is_empty()) {
        let domain = it.domain.as_ref().map(|domain| format!(" in {domain}")).unwrap_or_default();
        lines.push(String::new());
        lines.extend(wrap(&format!("process {} waits{domain}: {}", it.process, it.waits), width, "", "  "));
    }
    lines
}

fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_vmm_service::protocol::{ClientStatus, DeviceStatus, DomainStatus};

    #[test]
    fn the_status_fits_eighty_columns() {
        let name: DomainName = "llama-3.1-70b-instruct/tp0/weights".repeat(2).parse().unwrap();
        let status = Status {
            keeper: 4_194_303,
            front: 4_194_304,
            devices: (0..8)
                .map(|id| DeviceStatus {
                    logical: id,
                    physical: id,
                    identity: format!("c{id}:00.0/{id}@00cc0000"),
                    total: 64 << 30,
                    free: 1 << 20,
                    held: 63 << 30,
                    problem: if id == 3 {
                        "cannot query the free memory (device 3): no such device ".repeat(4)
                    } else {
                        String::new()
                    },
                })
                .collect(),
            domains: vec![DomainStatus {
                name: name.clone(),
                device: 7,
                state: "committed".into(),
                version: 12,
                bytes: 47 << 30,
                allocations: 48,
                uncommitted: 0,
                superseded: 0,
                readers: 64,
                waiting: 3,
                age: 90_000,
            }],
            clients: vec![ClientStatus {
                pid: 1,
                process: 4_194_305,
                user: 65_534,
                program: "vllm engine core, rank 0 of 16, ".repeat(8),
                domain: Some(name),
                role: "reader".into(),
                bytes: 47 << 30,
                age: 100,
                container: "0123456789ab".into(),
                waits: "8 GiB were asked for, 1 GiB are free on NPU 7; the service holds 63 GiB there".into(),
            }],
        };
        for width in 80..=200 {
            for line in lines(&status, width) {
                assert!(line.chars().count() <= width, "{} of {width} columns: {line}", line.chars().count());
            }
        }
        let lines = lines(&status, 80);
        assert!(lines.iter().any(|line| line.contains("1 d")), "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("1 min")), "{lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.contains("does not answer: ")).count(), 1, "{lines:#?}");
    }
}
