//! The Rust client: roles in domains, for a process that has a session of this library.
//!
//! A process that runs the vendor's stack cannot use this: it speaks the protocol and imports with
//! the vendor's functions.
//!
//! **There is no read-only mapping on this driver**: whoever maps served memory can write to it.
//! *Reader* is a promise of the program, not a protection.

mod fabric;
mod line;
mod reader;
mod space;
mod writer;

use crate::front::random;
use crate::layout::PageSize;
use crate::name::DomainName;
use crate::protocol::{Answer, Code, Event, Mode, Request, ServiceError, Status, Waiting};
use ascend_vmm::discovery::Npu;
use ascend_vmm::share::BareTgid;
use ascend_vmm::{Device, discovery};
pub use fabric::{FabricReader, FabricTicket};
use line::{ANSWER, Line, anew, done, milliseconds, strange};
pub use line::{Role, ServedLayout};
pub use reader::Reader;
use reader::reader;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, io};
pub use writer::Writer;
use writer::writer;

/// An error of the client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The service refused.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The library or the driver refused.
    #[error(transparent)]
    Memory(#[from] ascend_vmm::Error),
    /// The service cannot be reached.
    #[error("the memory service at {path} cannot be reached: {error}")]
    Unreachable {
        /// Its socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// What is served now is not what was mapped before.
    #[error("version {now} of {domain} has another layout than version {before}, which was put to sleep: {difference}")]
    Stale {
        /// The domain.
        domain: DomainName,
        /// The version that was asleep.
        before: u64,
        /// The version that is served.
        now: u64,
        /// The first thing that differs.
        difference: String,
    },
    /// There is no such key.
    #[error("{domain} has no {key:?}")]
    NoKey {
        /// The domain.
        domain: DomainName,
        /// The key.
        key: String,
    },
    /// The object was made in another process, before a fork.
    #[error("the role in {0} belongs to the process that opened it, and not to its child; open it again here")]
    Forked(String),
    /// The program gave up while it waited.
    #[error("the program gave up waiting for the memory service at {0}; open the domain again")]
    Interrupted(PathBuf),
    /// The memory is not mapped.
    #[error("{0} is asleep; wake it first")]
    Asleep(DomainName),
}

impl Error {
    /// What kind of error of the service it is, if it is one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Service(error) => Some(error.code),
            _ => None,
        }
    }
}

/// The result of the client's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a domain is opened.
#[derive(Debug, Clone)]
#[must_use]
pub struct OpenOptions {
    wait: Duration,
    allow_update: bool,
    lends: bool,
    page: PageSize,
    program: String,
    progress: Progress,
    give_up: GiveUp,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        let program =
            std::env::current_exe().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        OpenOptions {
            wait: Duration::from_secs(60),
            allow_update: false,
            lends: false,
            page: PageSize::Huge,
            program: program.unwrap_or_default(),
            progress: Progress::default(),
            give_up: GiveUp::default(),
        }
    }
}

impl OpenOptions {
    /// Waits up to a minute for the role.
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// How long to wait for the role, and later for memory.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// A reader that stays mapped while a writer changes the memory in place.
    pub fn allow_update(mut self, allow: bool) -> Self {
        self.allow_update = allow;
        self
    }

    /// A writer that can give memory back when others wait for it: see [`Writer::reclaim`].
    pub fn lends(mut self, lends: bool) -> Self {
        self.lends = lends;
        self
    }

    /// Size of the pages of new memory.
    pub fn page(mut self, page: PageSize) -> Self {
        self.page = page;
        self
    }

    /// Called with what a request waits for, and again whenever that changes: who writes, how much
    /// memory is free, how many are served before. A panic in it reaches the caller after the
    /// request was answered, so that nothing is half done.
    pub fn progress(mut self, progress: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.progress = Progress(Some(Arc::new(progress)));
        self
    }

    /// Asked every 50 ms while the service is waited for. True ends the wait, the connection and
    /// with it the role: for a program that a user may interrupt.
    pub fn give_up(mut self, give_up: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.give_up = GiveUp(Some(Arc::new(give_up)));
        self
    }

    /// The message that opens a domain with these options: see [`Role::open`].
    pub fn request(&self, domain: &DomainName, mode: Mode, device: u32, identity: String) -> Request {
        Request::Open {
            domain: domain.clone(),
            mode,
            device,
            identity,
            wait_ms: milliseconds(self.wait),
            allow_update: self.allow_update,
            lends: self.lends,
            token: random().to_vec(),
        }
    }

    /// What this program is called in lists: its rank, for instance.
    pub fn program(mut self, program: impl Into<String>) -> Self {
        self.program = program.into();
        self
    }
}

type ProgressFn = dyn Fn(&Waiting) + Send + Sync;

/// A function that is told what a request waits for.
#[derive(Clone, Default)]
struct Progress(Option<Arc<ProgressFn>>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress" } else { "None" })
    }
}

/// A function that is asked whether to give up.
#[derive(Clone, Default)]
struct GiveUp(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl fmt::Debug for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "GiveUp" } else { "None" })
    }
}

/// What one gets who writes or reads.
#[derive(Debug)]
pub enum Opened {
    /// Nothing was committed, and nobody wrote.
    Writer(Writer),
    /// Something is committed.
    Reader(Reader),
}

/// A memory service.
///
/// Holds no connection by itself: each role has one of its own.
#[derive(Debug, Clone)]
pub struct Client {
    path: PathBuf,
    /// The NPUs of this process, once they were looked for: that takes a thousand system calls.
    npus: Arc<OnceLock<Vec<Npu>>>,
}

impl Client {
    /// The service at a socket.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into(), npus: Arc::default() }
    }

    /// Reads what a domain has committed; waits for it.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`], [`Code::Dirty`], [`Code::OtherDevice`] and others of the service.
    pub fn read(&self, device: &Device, domain: &DomainName, options: &OpenOptions) -> Result<Reader> {
        reader(self.open(device, domain, Mode::Read, options)?, device, options)
    }

    /// Writes a new layout in new memory of at most `capacity` bytes. With [`Mode::Discard`] what
    /// is committed is given up first; with [`Mode::Update`] it is changed in place.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`] and others of the service.
    pub fn write(
        &self,
        device: &Device,
        domain: &DomainName,
        mode: Mode,
        capacity: u64,
        options: &OpenOptions,
    ) -> Result<Writer> {
        let mode = if mode == Mode::Read { Mode::Write } else { mode };
        writer(self.open(device, domain, mode, options)?, device, capacity, options)
    }

    /// Writes if nothing is committed and nobody writes; otherwise waits, and reads.
    ///
    /// # Errors
    ///
    /// Those of [`Client::read`] and [`Client::write`].
    pub fn write_or_read(
        &self,
        device: &Device,
        domain: &DomainName,
        capacity: u64,
        options: &OpenOptions,
    ) -> Result<Opened> {
        let role = self.open(device, domain, Mode::WriteOrRead, options)?;
        if role.writes {
            writer(role, device, capacity, options).map(Opened::Writer)
        } else {
            reader(role, device, options).map(Opened::Reader)
        }
    }

    /// What the service holds, and for whom. Needs no driver.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn status(&self) -> Result<Status> {
        match anew(|| self.line()?.ask(&Request::Status {}, ANSWER))? {
            Answer::Status(status) => Ok(status),
            other => Err(strange(&other)),
        }
    }

    /// Events with a greater number than `after`, the oldest first. Needs no driver.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn events(&self, after: u64) -> Result<Vec<Event>> {
        match anew(|| self.line()?.ask(&Request::Events { after }, ANSWER))? {
            Answer::Events { events } => Ok(events),
            other => Err(strange(&other)),
        }
    }

    /// Waits until a domain has a version that is newer than this one, 0 for any. Needs no driver.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`]; the service cannot be reached.
    pub fn wait(&self, domain: &DomainName, newer_than: u64, wait: Duration) -> Result<u64> {
        self.wait_with(domain, newer_than, &OpenOptions::default().wait(wait))
    }

    /// The same with other options: how long to wait, whom to tell, when to give up.
    ///
    /// # Errors
    ///
    /// Those of [`Client::wait`]; [`Error::Interrupted`].
    pub fn wait_with(&self, domain: &DomainName, newer_than: u64, options: &OpenOptions) -> Result<u64> {
        let begun = Instant::now();
        let answer = anew(|| {
            let left = options.wait.saturating_sub(begun.elapsed());
            let request = Request::Wait { newer_than, domain: Some(domain.clone()), wait_ms: milliseconds(left) };
            Line::connect(&self.path, std::process::id() as i32, options)?.ask(&request, left)
        });
        match answer? {
            Answer::Version { version, .. } => Ok(version),
            other => Err(strange(&other)),
        }
    }

    /// Removes what a domain has committed.
    ///
    /// # Errors
    ///
    /// [`Code::Busy`] while somebody uses it.
    pub fn remove(&self, domain: &DomainName) -> Result<()> {
        done(self.line()?.ask(&Request::Remove { domain: domain.clone() }, ANSWER)?)
    }

    fn open(&self, device: &Device, domain: &DomainName, mode: Mode, options: &OpenOptions) -> Result<Role> {
        let find = |npus: &[Npu]| npus.iter().find(|npu| npu.logical == device.id()).cloned();
        let npu = match self.npus.get().and_then(|npus| find(npus)) {
            Some(npu) => npu,
            None => {
                let npus = discovery::list()?;
                let npu = find(&npus).ok_or_else(|| not_listed(device))?;
                let _ = self.npus.set(npus);
                npu
            }
        };
        let request = options.request(domain, mode, npu.physical.0, npu.identity.to_string());
        let process = BareTgid::of_this_process(&device.session())?.as_raw();
        Role::open(&self.path, process, &request, options)
    }

    /// A connection without a role. The number of the process counts for imports only.
    fn line(&self) -> Result<Line> {
        Line::connect(&self.path, std::process::id() as i32, &OpenOptions::default())
    }
}

/// A device of this process that the driver does not list now.
fn not_listed(device: &Device) -> Error {
    let problem = format!("the driver does not list device {} of this process", device.id());
    ServiceError { code: Code::OtherDevice, problem, remedy: "look at it with `ascend-vmm probe`".into() }.into()
}
