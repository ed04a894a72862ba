//! `ascend-vmm service save`, `load`, `ticket` and `verify`: files, and other servers.

use crate::terminal::{self, counted};
use ascend_vmm::{Bytes, Device, LogicalId, Session, discovery};
use ascend_vmm_service::protocol::{Code, ServiceError};
use ascend_vmm_service::{Client, DomainName, Error, FabricTicket, Mode, OpenOptions, SavedSnapshot, SnapshotError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Options of `save`.
#[derive(clap::Args)]
pub(super) struct Save {
    /// The domain.
    domain: DomainName,
    /// Empty directories, or those of a save that was interrupted; several are written in parallel.
    #[arg(required = true, value_name = "DIRECTORY")]
    directories: Vec<PathBuf>,
    /// How long to wait until something is committed, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

/// Options of `load`.
#[derive(clap::Args)]
pub(super) struct Load {
    /// The domain; it may have another name than the one that was saved.
    domain: DomainName,
    /// All directories that it was saved to, in any order.
    #[arg(required_unless_present = "ticket", value_name = "DIRECTORY")]
    directories: Vec<PathBuf>,
    /// Copy it from another server of the super pod, by what `service ticket` wrote there.
    #[arg(long, value_name = "FILE", conflicts_with = "directories")]
    ticket: Option<PathBuf>,
    /// The NPU, by its logical id. Without it, the one that the domain is on, or else the first.
    #[arg(long, value_name = "ID")]
    device: Option<u32>,
    /// Give up first what the domain serves: for memory that does not fit twice.
    #[arg(long)]
    discard: bool,
    /// How long to wait for the domain and for memory, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

/// Options of `ticket`.
#[derive(clap::Args)]
pub(super) struct MakeTicket {
    /// The domain.
    domain: DomainName,
    /// The file to write.
    file: PathBuf,
    /// How long to wait until something is committed, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

/// Options of `verify`.
#[derive(clap::Args)]
pub(super) struct Verify {
    /// The domain.
    domain: DomainName,
    /// A directory with files in the safetensors format.
    #[arg(long, value_name = "DIRECTORY")]
    safetensors: PathBuf,
    /// How long to wait until something is committed, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

fn options(wait: u64) -> OpenOptions {
    OpenOptions::new().wait(Duration::from_secs(wait))
}

/// The NPU that a domain is on; the first one if it is on none.
fn device_of(client: &Client, domain: &DomainName) -> Result<Device, Error> {
    let status = client.status()?;
    let physical = status.domains.iter().find(|it| it.name == *domain).map(|it| it.device);
    let npus = discovery::list()?;
    let found = match physical {
        Some(physical) => npus.iter().find(|npu| npu.physical.0 == physical),
        None => npus.first(),
    };
    let Some(npu) = found else {
        let problem = format!("{domain} is on NPU {}, which this process does not see", physical.unwrap_or(0));
        let remedy = "run the command where that NPU is visible".into();
        return Err(ServiceError { code: Code::OtherDevice, problem, remedy }.into());
    };
    Ok(Session::open()?.device(npu.logical)?)
}

/// The domain must be there: waiting for a name that is spelled wrong helps nobody.
fn known(client: &Client, domain: &DomainName) -> Result<(), Error> {
    if client.status()?.domains.iter().any(|it| it.name == *domain) {
        return Ok(());
    }
    let problem = format!("there is no domain {domain}");
    Err(ServiceError { code: Code::Empty, problem, remedy: "`service top` lists them".into() }.into())
}

impl Save {
    pub(super) fn run(self, client: &Client) -> Result<ExitCode, SnapshotError> {
        known(client, &self.domain)?;
        let device = device_of(client, &self.domain)?;
        let mut reader = client.read(&device, &self.domain, &options(self.wait))?;
        let bar = terminal::transfer("saved", reader.bytes());
        let saved = ascend_vmm_service::save(&mut reader, &self.directories, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let saved = saved?;
        let resumed = match saved.resumed {
            0 => String::new(),
            number => format!(", {number} of them before"),
        };
        crate::outln!(
            "saved version {} of {}: {}, {}, {}{resumed}",
            saved.version,
            saved.domain,
            Bytes(saved.bytes),
            counted(saved.keys, "key"),
            counted(saved.shards, "shard"),
        );
        if let Some(newer) =
            client.status()?.domains.iter().find(|it| it.name == self.domain && it.version > saved.version)
        {
            crate::outln!("version {} was committed meanwhile, and is not saved", newer.version);
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Load {
    pub(super) fn run(self, client: &Client) -> Result<ExitCode, SnapshotError> {
        // What is wrong with the files is said before an NPU is opened.
        let source = match &self.ticket {
            Some(file) => Source::Ticket(FabricTicket::from_bytes(&std::fs::read(file).map_err(on_file(file))?)?),
            None => Source::Files(SavedSnapshot::open(&self.directories)?),
        };
        let device = match self.device {
            Some(id) => Session::open().and_then(|session| session.device(LogicalId(id))).map_err(Error::from)?,
            None => device_of(client, &self.domain)?,
        };
        let mode = if self.discard { Mode::Discard } else { Mode::Write };
        let options = options(self.wait);
        let (domain, version, bytes) = match &source {
            Source::Ticket(ticket) => (ticket.domain().clone(), ticket.version(), ticket.layout().bytes()),
            Source::Files(snapshot) => {
                let contents = snapshot.contents();
                (contents.domain, contents.version, contents.bytes)
            }
        };
        let bar = terminal::transfer("loaded", bytes);
        let progress = |bytes| bar.inc(bytes);
        let loaded = match &source {
            Source::Ticket(ticket) => {
                let loaded = ticket.load(client, &device, &self.domain, mode, &options, &progress);
                loaded.map_err(SnapshotError::from)
            }
            Source::Files(snapshot) => snapshot.load(client, &device, &self.domain, mode, &options, &progress),
        };
        bar.finish_and_clear();
        let reader = loaded?;
        crate::outln!(
            "committed version {} of {}: {}, {}, from version {version} of {domain}",
            reader.version(),
            self.domain,
            Bytes(bytes),
            counted(reader.entries().len(), "key"),
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// Where `load` loads from.
enum Source {
    Files(SavedSnapshot),
    Ticket(FabricTicket),
}

fn on_file(path: &Path) -> impl Fn(std::io::Error) -> SnapshotError {
    |error| SnapshotError::File { path: path.to_owned(), error }
}

impl MakeTicket {
    pub(super) fn run(self, client: &Client) -> Result<ExitCode, SnapshotError> {
        known(client, &self.domain)?;
        let device = device_of(client, &self.domain)?;
        let mut reader = client.read(&device, &self.domain, &options(self.wait))?;
        let ticket = reader.fabric_ticket()?;
        std::fs::write(&self.file, ticket.to_bytes()).map_err(on_file(&self.file))?;
        crate::outln!(
            "{} is a ticket for version {} of {}: {}, {}",
            self.file.display(),
            ticket.version(),
            self.domain,
            Bytes(ticket.layout().bytes()),
            counted(ticket.layout().entries.len(), "key"),
        );
        Ok(ExitCode::SUCCESS)
    }
}

impl Verify {
    pub(super) fn run(self, client: &Client) -> Result<ExitCode, SnapshotError> {
        known(client, &self.domain)?;
        let device = device_of(client, &self.domain)?;
        let reader = client.read(&device, &self.domain, &options(self.wait))?;
        let bytes = reader.entries().values().map(|entry| entry.size).sum();
        let bar = terminal::transfer("compared", bytes);
        let compared = ascend_vmm_service::compare(&reader, &self.safetensors, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let compared = compared?;
        for (name, difference) in &compared.differences {
            crate::outln!("{} {difference}", name.escape_debug());
        }
        crate::outln!(
            "version {} of {}: {} equal ({}), {} not",
            reader.version(),
            self.domain,
            counted(compared.equal, "tensor"),
            Bytes(compared.bytes),
            compared.differences.len(),
        );
        Ok(if compared.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
