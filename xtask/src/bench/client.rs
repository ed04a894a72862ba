//! The process that `bench` measures: it makes objects, then repeats one operation between marks.
//!
//! The order is always the same, so the parent does not need to know the operation:
//!
//! 1. a mark, then a few repetitions to warm up;
//! 2. an empty section and a full one, which the parent single-steps;
//! 3. an empty section and a full one, whose system calls the parent counts;
//! 4. a run that is timed and not traced.
//!
//! Each section starts and ends with a mark; see `section`. The process prints what it measured
//! itself as JSON ([`OwnFigures`]).

use super::counter::{mark, trace_me};
use ascend_conformance::session as raw;
use ascend_vmm::LogicalId;
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Device, PhysicalMemory, Session};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// What is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// One system call that does nothing, to check the counting.
    Calibration,
    /// Physical memory is created and released.
    CreateRelease,
    /// Addresses are reserved and freed.
    ReserveFree,
    /// Memory is mapped and unmapped.
    MapUnmap,
    /// Memory is created, mapped at new addresses, unmapped and released.
    Cycle,
    /// The session and its first device are opened.
    BringUp,
    /// Memory is exported.
    Export,
    /// A process is put on the trust list.
    Trust,
    /// Memory is imported by its 64-bit handle.
    ImportHandle,
    /// Memory is imported by its ticket, which is checked first.
    ImportTicket,
    /// Not measured: the process that exports what the other imports.
    ImportPeer,
    /// Memory is created and released by ioctls without the library.
    RawCreateRelease,
    /// Addresses are reserved and freed by ioctls without the library.
    RawReserveFree,
    /// Memory is mapped and unmapped by ioctls without the library.
    RawMapUnmap,
}

/// Options of the measured process.
#[derive(clap::Args)]
pub struct Client {
    /// What is repeated.
    work: Work,
    /// How many objects of the kind exist meanwhile.
    #[arg(long, default_value_t = 1)]
    live: u64,
    /// How often it is repeated in a section.
    #[arg(long, default_value_t = 32)]
    pairs: u64,
    /// How often it is repeated in the timed run.
    #[arg(long, default_value_t = 0)]
    timed: u64,
    /// Only the timed run, without a tracer.
    #[arg(long)]
    untraced: bool,
}

/// What the process measures itself.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct OwnFigures {
    /// Growth of its memory per live object, in bytes.
    pub bytes_per_object: Option<f64>,
    /// Time of one repetition, if there was a timed run.
    pub nanoseconds: Option<f64>,
}

type Failure = Box<dyn std::error::Error>;

/// Exit status: tracing is not allowed.
pub const NOT_TRACED: u8 = 4;

/// Size of every object: the smallest possible.
const SIZE: u64 = 2 << 20;

/// Mappings per reservation: as many as fit into one heap.
const PER_RESERVATION: u64 = 32_768;

impl Client {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        if self.work == Work::ImportPeer {
            return match self.import_peer() {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => crate::impossible(error),
            };
        }
        if !self.untraced && trace_me().is_err() {
            return ExitCode::from(NOT_TRACED);
        }
        match self.work() {
            Ok(own) => {
                crate::print_json(&own);
                ExitCode::SUCCESS
            }
            Err(error) => crate::impossible(error),
        }
    }

    fn work(&self) -> Result<OwnFigures, Failure> {
        match self.work {
            Work::Calibration => self.repeat(
                None,
                |_| Ok(()),
                || {
                    black_box(nix::unistd::getppid());
                    Ok::<_, Failure>(())
                },
            ),
            Work::CreateRelease => {
                let device = open()?;
                let (live, bytes) = self.live(|_| Ok(device.create(SIZE)?))?;
                let own = self.repeat(bytes, |_| Ok(()), || device.create(SIZE).map(discard));
                drop(live);
                own
            }
            Work::ReserveFree => {
                let session = open()?.session();
                let (live, bytes) = self.live(|_| Ok(session.reserve(SIZE)?))?;
                let mut size = 0;
                let own = self.repeat(
                    bytes,
                    |_| Ok(()),
                    || {
                        // Never the size of the previous one: the library reuses a range of the
                        // same size.
                        size = size % (8 * SIZE) + SIZE;
                        session.reserve(size).map(discard)
                    },
                );
                drop(live);
                own
            }
            Work::MapUnmap => {
                let device = open()?;
                let memory = device.create(SIZE)?;
                // A reservation is at most as large as a heap. One slot more than there are live
                // mappings is for the measured one.
                let mut reservations = Vec::new();
                for _ in 0..=self.live / PER_RESERVATION {
                    reservations.push(device.session().reserve(PER_RESERVATION * SIZE)?);
                }
                let slot =
                    |index: u64| (&reservations[(index / PER_RESERVATION) as usize], index % PER_RESERVATION * SIZE);
                let (live, bytes) = self.live(|index| {
                    let (reservation, offset) = slot(index);
                    Ok(reservation.map(offset, &memory)?)
                })?;
                let (reservation, offset) = slot(self.live);
                let own = self.repeat(bytes, |_| Ok(()), || reservation.map(offset, &memory).map(discard));
                drop(live);
                own
            }
            Work::Cycle => {
                let device = open()?;
                let session = device.session();
                self.repeat(
                    None,
                    |_| Ok(()),
                    || {
                        let memory = device.create(SIZE)?;
                        let reservation = session.reserve(SIZE)?;
                        reservation.map(0, &memory)?.unmap()?;
                        reservation.free()?;
                        memory.free()?;
                        Ok::<_, ascend_vmm::Error>(())
                    },
                )
            }
            Work::BringUp => {
                let opened = std::cell::Cell::new(None);
                let close = |_| {
                    drop(opened.take());
                    Ok(())
                };
                self.repeat(None, close, || open().map(|device| opened.set(Some(device))))
            }
            Work::Export => self.export(),
            Work::Trust => self.trust(),
            Work::ImportHandle | Work::ImportTicket => self.import(),
            Work::ImportPeer => Err("the peer is not measured".into()),
            Work::RawCreateRelease | Work::RawReserveFree | Work::RawMapUnmap => self.raw(),
        }
    }

    /// Each export needs new memory: a second export of the same memory returns the first.
    fn export(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let (new, exports) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        self.repeat(
            None,
            |times| {
                exports.borrow_mut().clear();
                *new.borrow_mut() = memories(&device, times)?;
                exports.borrow_mut().reserve(times as usize);
                Ok(())
            },
            || {
                let memory = new.borrow_mut().pop().ok_or("there is no more memory")?;
                exports.borrow_mut().push(memory.export()?);
                Ok::<_, Failure>(())
            },
        )
    }

    fn trust(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let importer = [BareTgid::of_this_process(&device.session())?];
        let exports = RefCell::new(Vec::new());
        let trusted = RefCell::new(Vec::new());
        self.repeat(
            None,
            |times| {
                trusted.borrow_mut().clear();
                let new = memories(&device, times)?.iter().map(PhysicalMemory::export).collect::<Result<_, _>>()?;
                *exports.borrow_mut() = new;
                trusted.borrow_mut().reserve(times as usize);
                Ok(())
            },
            || {
                let export: share::Export = exports.borrow_mut().pop().ok_or("there is no more memory")?;
                export.trust(&importer)?;
                trusted.borrow_mut().push(export);
                Ok::<_, Failure>(())
            },
        )
    }

    /// Memory can only be imported from another process.
    fn import(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let me = BareTgid::of_this_process(&device.session())?;
        let mut peer = Command::new(std::env::current_exe()?)
            .args(["bench-client", "import-peer", "--live", &(2 + 2 * self.pairs).to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(mut to), Some(from)) = (peer.stdin.take(), peer.stdout.take()) else { return Err("no pipes".into()) };
        writeln!(to, "{me}")?;
        let mut tickets = Vec::new();
        for line in BufReader::new(from).lines().take(2 + 2 * self.pairs as usize) {
            tickets.push(line?.parse::<Ticket>()?);
        }
        let tickets = RefCell::new(tickets);
        let imported = RefCell::new(Vec::with_capacity(2 + 2 * self.pairs as usize));
        let own = self.repeat(
            None,
            |_| Ok(()),
            || {
                let ticket = tickets.borrow_mut().pop().ok_or("there are no more tickets")?;
                imported.borrow_mut().push(match self.work {
                    Work::ImportHandle => share::import(&device, ticket.handle)?,
                    _ => share::import(&device, &ticket)?,
                });
                Ok::<_, Failure>(())
            },
        )?;
        drop(imported);
        drop(to);
        peer.wait()?;
        Ok(own)
    }

    /// Exports as many memories as are wanted to the process whose id is on the standard input, and
    /// keeps them until that process ends.
    fn import_peer(&self) -> Result<(), Failure> {
        let mut lines = std::io::stdin().lines();
        let importer = BareTgid::from_raw(lines.next().ok_or("no importer")??.trim().parse()?)?;
        let device = open()?;
        let memories = memories(&device, self.live)?;
        for memory in &memories {
            let export = memory.export()?;
            export.trust(&[importer])?;
            crate::outln!("{}", export.ticket()?);
        }
        lines.next();
        Ok(())
    }

    /// The same ioctls as those of the library, without the library: the lower bound.
    fn raw(&self) -> Result<OwnFigures, Failure> {
        let host = ascend_conformance::Host::find().map_err(|reason| format!("{reason:?}"))?.ok_or("no device")?;
        let session = raw::Session::start(&host).map_err(|failure| format!("{failure:?}"))?;
        let refused = Errno::from_raw;
        let heap = session.heap().map_err(|failure| format!("{failure:?}"))?;
        let address = raw::heap_address(heap);
        match self.work {
            Work::RawCreateRelease => self.repeat(
                None,
                |_| Ok(()),
                || {
                    let handle = session.device_huge(0, SIZE).map_err(refused)?;
                    session.release(&handle).map(drop).map_err(refused)
                },
            ),
            Work::RawReserveFree => self.repeat(
                None,
                |_| Ok(()),
                || {
                    session.alloc(address, SIZE).map_err(refused)?;
                    session.free(address).map_err(refused)
                },
            ),
            _ => {
                let handle = session.device_huge(0, SIZE).map_err(refused)?;
                session.alloc(address, SIZE).map_err(refused)?;
                self.repeat(
                    None,
                    |_| Ok(()),
                    || {
                        session.map(&handle, address, SIZE).map_err(refused)?;
                        session.unmap(address).map(drop).map_err(refused)
                    },
                )
            }
        }
    }

    /// Creates the objects that exist meanwhile. Returns them with their memory use in this
    /// process.
    fn live<T>(&self, mut make: impl FnMut(u64) -> Result<T, Failure>) -> Result<(Vec<T>, Option<f64>), Failure> {
        let mut live = Vec::with_capacity(self.live as usize);
        let before = own_memory()?;
        for index in 0..self.live {
            live.push(make(index)?);
        }
        let grown = own_memory()?.saturating_sub(before);
        // Whole pages are counted, so only many objects give a useful average.
        Ok((live, (self.live >= 10_000).then(|| grown as f64 / self.live as f64)))
    }

    /// The sections and the timed run. `ready` prepares for so many repetitions and is not counted.
    fn repeat<E: Into<Failure>>(
        &self,
        bytes_per_object: Option<f64>,
        mut ready: impl FnMut(u64) -> Result<(), Failure>,
        mut operation: impl FnMut() -> Result<(), E>,
    ) -> Result<OwnFigures, Failure> {
        let mark = || if self.untraced { Ok(()) } else { mark() };
        let pairs = self.pairs as usize;
        let (empty, full) = (vec![false; pairs], vec![true; pairs]);
        mark()?;
        // What happens only the first time is not the operation's cost.
        let warm = self.pairs.min(2);
        ready(warm)?;
        repeat(&vec![true; warm as usize], &mut operation)?;
        for _ in 0..2 {
            ready(self.pairs)?;
            for plan in [&empty, &full] {
                section(&mark, plan, &mut operation)?;
            }
        }
        ready(self.timed)?;
        let timed = vec![true; self.timed as usize];
        let start = Instant::now();
        repeat(&timed, &mut operation)?;
        let nanoseconds = (self.timed > 0).then(|| start.elapsed().as_nanos() as f64 / self.timed as f64);
        Ok(OwnFigures { bytes_per_object, nanoseconds })
    }
}

/// A session and its first device.
fn open() -> Result<Device, Failure> {
    Ok(Session::open()?.device(LogicalId(0))?)
}

/// So many new memories.
fn memories(device: &Device, number: u64) -> ascend_vmm::Result<Vec<PhysicalMemory>> {
    (0..number).map(|_| device.create(SIZE)).collect()
}

/// Drops an object without letting the compiler see what becomes of it.
fn discard<T>(object: T) {
    drop(black_box(object));
}

/// A section: a mark, the operation once for each `true` in the plan, a mark.
///
/// The cost of the operation is the difference between a section that runs it and one of the same
/// length that skips it. Otherwise both must execute the same instructions, so there is one copy of
/// this function and of [`repeat`].
#[inline(never)]
fn section<E: Into<Failure>>(
    mark: &impl Fn() -> Result<(), Errno>,
    plan: &[bool],
    operation: &mut impl FnMut() -> Result<(), E>,
) -> Result<(), Failure> {
    mark()?;
    repeat(plan, operation)?;
    Ok(mark()?)
}

/// Runs the operation once for each `true` in the plan.
///
/// The plan is hidden from the optimiser: what it moves out of the loop is executed, and so
/// counted, whether the plan has any `true` or not.
#[inline(never)]
fn repeat<E: Into<Failure>>(plan: &[bool], operation: &mut impl FnMut() -> Result<(), E>) -> Result<(), Failure> {
    for wanted in plan {
        if black_box(*wanted) {
            operation().map_err(Into::into)?;
        }
    }
    Ok(())
}

/// The resident anonymous memory of this process in bytes. Mappings of the driver's files do not
/// count.
fn own_memory() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kibibytes = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .ok_or("/proc/self/status has no RssAnon")?;
    Ok(kibibytes.trim().parse::<u64>()? * 1024)
}
