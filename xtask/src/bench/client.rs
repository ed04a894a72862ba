//! The process that `bench` measures: it makes objects, then repeats one operation between marks.
//!
//! The order is always the same, so the parent does not need to know the operation:
//!
//! 1. a mark, then a few repetitions to warm up;
//! 2. an empty section and a full one, which the parent single-steps;
//! 3. an empty section and a full one, whose system calls the parent counts;
//! 4. a run that is not traced, and whose CPU time is measured.
//!
//! Each section starts and ends with a mark; see `section`. The process prints what it measured
//! itself as JSON ([`OwnFigures`]).

use super::counter::{mark, trace_me};
use ascend_conformance::session as raw;
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{read_batch, write_batch};
use ascend_vmm::pool::{PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Device, PhysicalMemory, Reservation, ReserveOptions, Session};
use ascendcl::calls;
use nix::errno::Errno;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, Ref, RefCell};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

/// What is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// One system call that does nothing, to check the counting.
    Calibration,
    /// Physical memory is created and released.
    CreateRelease,
    /// Addresses are reserved and freed, 2 to 16 MiB in turn.
    ReserveFree,
    /// Addresses are reserved and freed, of random sizes up to 1 GiB.
    ReserveRandom,
    /// Memory is mapped and unmapped.
    MapUnmap,
    /// The mapping at an address is looked up.
    MappingAt,
    /// The mappings of a reservation are listed; counted per mapping.
    Mappings,
    /// A part of a reservation is taken, as for a copy.
    Slice,
    /// 4 KiB are copied to a device.
    Write,
    /// 4 KiB are copied from a device.
    Read,
    /// Many times 4 KiB are copied to a device at once; counted per copy.
    WriteBatch,
    /// Many times 4 KiB are copied from a device at once; counted per copy.
    ReadBatch,
    /// Memory is created, mapped at new addresses, unmapped and released.
    Cycle,
    /// The session and its first device are opened.
    BringUp,
    /// Memory is exported.
    Export,
    /// A process is put on the trust list.
    Trust,
    /// Memory is imported by its 64-bit handle, and released.
    ImportHandle,
    /// Memory is imported by its ticket, which is checked first, and released.
    ImportTicket,
    /// Memory is imported that this process has already imported.
    ImportAgain,
    /// Memory is created until there are `live` objects; each creation is counted alone.
    GrowCreate,
    /// The same for reservations.
    GrowReserve,
    /// The same for mappings.
    GrowMap,
    /// The same for imports.
    GrowImport,
    /// Memory is created and released by the C functions.
    CCreateRelease,
    /// The same, by the Rust calls that these make.
    OwnCreateRelease,
    /// Addresses are reserved and freed by the C functions.
    CReserveFree,
    /// The same, by the Rust calls that these make.
    OwnReserveFree,
    /// Memory is mapped and unmapped by the C functions.
    CMapUnmap,
    /// The same, by the Rust calls that these make.
    OwnMapUnmap,
    /// A block of 4 KiB is allocated and freed by the C functions.
    CMallocFree,
    /// The same, by the Rust calls that these make.
    OwnMallocFree,
    /// 4 KiB are copied to a device by the C function.
    CWrite,
    /// The same, by the Rust call that it makes.
    OwnWrite,
    /// A block of a pool is allocated and freed.
    PoolBlock,
    /// A page of a segment is mapped from the cache and unmapped into it.
    PoolSegment,
    /// A tag of 64 GiB sleeps and wakes.
    PoolSleep,
    /// Not measured: the process that exports what the measured one imports.
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
    pub(super) work: Work,
    /// Live objects of the kind during the measurement.
    #[arg(long, default_value_t = 1)]
    pub(super) live: u64,
    /// Size of each object in bytes.
    #[arg(long, default_value_t = SIZE)]
    pub(super) size: u64,
    /// One live object in each GiB of addresses, instead of one beside the other.
    #[arg(long)]
    sparse: bool,
    /// Ends objects by explicit calls, instead of dropping them.
    #[arg(long)]
    explicit: bool,
    /// Threads of the timed run.
    #[arg(long, default_value_t = 1)]
    threads: u64,
    /// Repetitions in a section.
    #[arg(long, default_value_t = 32)]
    pairs: u64,
    /// Repetitions in the timed run.
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
    /// CPU time of one repetition, if there was a timed run.
    pub nanoseconds: Option<f64>,
}

pub(super) type Failure = Box<dyn std::error::Error>;

/// Exit status: tracing is not allowed.
pub const NOT_TRACED: u8 = 4;

/// The smallest size of an object.
pub(super) const SIZE: u64 = 2 << 20;

const GIB: u64 = 1 << 30;

/// The largest reservation.
const RESERVATION: u64 = 128 * GIB;

/// Copies of a batch, and mappings of a list.
pub const MANY: u64 = 1000;

/// Size of a copy.
const COPY: u64 = 4096;

impl Client {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        if self.work == Work::ImportPeer {
            return match self.import_peer() {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => ascend_vmm_tool::impossible(error),
            };
        }
        if !self.untraced && trace_me().is_err() {
            return ExitCode::from(NOT_TRACED);
        }
        match self.work() {
            Ok(own) => {
                ascend_vmm_tool::print_json(&own);
                ExitCode::SUCCESS
            }
            Err(error) => ascend_vmm_tool::impossible(error),
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
                if self.threads > 1 {
                    return self.threads(&device);
                }
                let (live, bytes) = self.live(|_| Ok(device.create(SIZE)?))?;
                let own = if self.explicit {
                    self.repeat(bytes, |_| Ok(()), || device.create(self.size)?.free().map_err(error))
                } else {
                    self.repeat(bytes, |_| Ok(()), || device.create(self.size).map(discard))
                };
                drop(live);
                own
            }
            Work::ReserveFree | Work::ReserveRandom => {
                let session = open()?.session();
                let live_size = if self.sparse { GIB } else { SIZE };
                let (live, bytes) = self.live(|_| Ok(session.reserve(live_size)?))?;
                let mut sizes = self.sizes();
                let own = if self.explicit {
                    self.repeat(bytes, |_| Ok(()), || session.reserve(sizes())?.free().map_err(error))
                } else {
                    self.repeat(bytes, |_| Ok(()), || session.reserve(sizes()).map(discard))
                };
                drop(live);
                own
            }
            Work::MapUnmap => {
                let device = open()?;
                let memory = device.create(self.size)?;
                let places = self.places(&device)?;
                let (live, bytes) = self.live(|index| {
                    let (reservation, offset) = places.get(index);
                    Ok(reservation.map(offset, &memory)?)
                })?;
                let (reservation, offset) = places.get(self.live);
                let own = if self.explicit {
                    self.repeat(bytes, |_| Ok(()), || reservation.map(offset, &memory)?.unmap().map_err(error))
                } else {
                    self.repeat(bytes, |_| Ok(()), || reservation.map(offset, &memory).map(discard))
                };
                drop(live);
                own
            }
            Work::MappingAt | Work::Slice => {
                let device = open()?;
                let session = device.session();
                let memory = device.create(self.size)?;
                let places = self.places(&device)?;
                let (live, _) = self.live(|index| {
                    let (reservation, offset) = places.get(index);
                    Ok(reservation.map(offset, &memory)?)
                })?;
                let (reservation, offset) = places.get(self.live - 1);
                // Far from where the mapping starts.
                let last = offset + self.size - COPY;
                let own = if self.work == Work::Slice {
                    self.repeat(None, |_| Ok(()), || reservation.slice(last, COPY).map(discard))
                } else {
                    let address = reservation.address() + last;
                    self.repeat(
                        None,
                        |_| Ok(()),
                        || black_box(session.mapping_at(address)).map(discard).ok_or("nothing is mapped"),
                    )
                };
                drop(live);
                own
            }
            Work::Mappings => {
                let device = open()?;
                let memory = device.create(SIZE)?;
                let reservation = device.session().reserve(RESERVATION)?;
                let stride = RESERVATION / MANY / SIZE * SIZE;
                let list: Result<Vec<_>, _> = (0..MANY).map(|index| reservation.map(index * stride, &memory)).collect();
                let own = self.repeat(
                    None,
                    |_| Ok(()),
                    || {
                        let found = reservation.mappings().len() as u64;
                        if found == MANY { Ok(()) } else { Err("not all mappings are listed") }
                    },
                );
                drop(list?);
                own
            }
            Work::Write | Work::Read | Work::WriteBatch | Work::ReadBatch => self.copies(),
            Work::GrowCreate => {
                let device = open()?;
                self.grow(|_| Ok(device.create(SIZE)?))
            }
            Work::GrowReserve => {
                let session = open()?.session();
                self.grow(|_| Ok(session.reserve(SIZE)?))
            }
            Work::GrowMap => {
                let device = open()?;
                let memory = device.create(SIZE)?;
                let places = self.places(&device)?;
                self.grow(|index| {
                    let (reservation, offset) = places.get(index);
                    Ok(reservation.map(offset, &memory)?)
                })
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
            Work::ImportHandle | Work::ImportTicket | Work::ImportAgain | Work::GrowImport => self.import(),
            Work::CCreateRelease
            | Work::OwnCreateRelease
            | Work::CReserveFree
            | Work::OwnReserveFree
            | Work::CMapUnmap
            | Work::OwnMapUnmap
            | Work::CMallocFree
            | Work::OwnMallocFree
            | Work::CWrite
            | Work::OwnWrite => self.c_functions(),
            Work::PoolBlock | Work::PoolSegment | Work::PoolSleep => super::pool::work(self),
            Work::ImportPeer => Err("the peer is not measured".into()),
            Work::RawCreateRelease | Work::RawReserveFree | Work::RawMapUnmap => self.raw(),
        }
    }

    /// The size of the next reservation. Never that of the previous one: the library reuses a range
    /// of the same size.
    fn sizes(&self) -> impl FnMut() -> u64 + use<> {
        let random = self.work == Work::ReserveRandom;
        let (mut size, mut state) = (0, 1_u64);
        move || {
            if random {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                return ((state >> 33) % (GIB / SIZE) + 1) * SIZE;
            }
            size = size % (8 * SIZE) + SIZE;
            size
        }
    }

    /// Places for one mapping more than there are live ones.
    fn places(&self, device: &Device) -> Result<Places, Failure> {
        let stride = if self.sparse { self.size.max(GIB) } else { self.size };
        let each = RESERVATION / stride;
        let session = device.session();
        let mut reservations = Vec::new();
        for _ in 0..=self.live / each {
            reservations.push(session.reserve(each * stride)?);
        }
        Ok(Places { reservations, each, stride })
    }

    fn copies(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let size = (MANY * COPY).next_multiple_of(SIZE);
        let memory = device.create(size)?;
        let reservation = device.session().reserve(size)?;
        let mapping = reservation.map(0, &memory)?;
        let mut buffers = vec![[1_u8; COPY as usize]; MANY as usize];
        let slice = |index: usize| mapping.slice(index as u64 * COPY, COPY);
        match self.work {
            Work::Write => self.repeat(None, |_| Ok(()), || mapping.write(0, &buffers[0])),
            Work::Read => self.repeat(None, |_| Ok(()), || mapping.read(0, &mut buffers[0])),
            Work::WriteBatch => {
                let copies = buffers.iter().enumerate().map(|(index, buffer)| Ok((slice(index)?, &buffer[..])));
                let copies: Vec<_> = copies.collect::<ascend_vmm::Result<_>>()?;
                self.repeat(None, |_| Ok(()), || write_batch(&copies))
            }
            _ => {
                let copies = buffers.iter_mut().enumerate().map(|(index, buffer)| Ok((slice(index)?, &mut buffer[..])));
                let mut copies: Vec<_> = copies.collect::<ascend_vmm::Result<_>>()?;
                self.repeat(None, |_| Ok(()), || read_batch(&mut copies))
            }
        }
    }

    /// The C functions, and the calls that they make.
    fn c_functions(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let session = device.session();
        let size = SIZE as usize;
        let code = |code: i32| -> Failure { format!("the C function returned {code}").into() };
        calls::set_device(0).map_err(code)?;
        let buffer = [7; 4096];
        match self.work {
            Work::CCreateRelease => self.repeat(
                None,
                |_| Ok(()),
                || calls::malloc_physical(size, 0).and_then(calls::free_physical).map_err(code),
            ),
            Work::OwnCreateRelease => self.repeat(None, |_| Ok(()), || device.create(SIZE)?.free().map_err(error)),
            Work::CReserveFree => {
                self.repeat(None, |_| Ok(()), || calls::reserve(size).and_then(calls::release).map_err(code))
            }
            Work::OwnReserveFree => {
                let options = ReserveOptions::default().alignment(SIZE);
                self.repeat(None, |_| Ok(()), || session.reserve_with(SIZE, &options)?.free().map_err(error))
            }
            Work::CMapUnmap => {
                let (area, memory) =
                    (calls::reserve(size).map_err(code)?, calls::malloc_physical(size, 0).map_err(code)?);
                self.repeat(
                    None,
                    |_| Ok(()),
                    || calls::map(area, size, memory).and_then(|()| calls::unmap(area)).map_err(code),
                )
            }
            Work::OwnMapUnmap => {
                let (area, memory) = (session.reserve(SIZE)?, device.create(SIZE)?);
                self.repeat(None, |_| Ok(()), || area.map(0, &memory)?.unmap().map_err(error))
            }
            Work::CMallocFree => {
                let _other = calls::malloc(4096).map_err(code)?;
                self.repeat(None, |_| Ok(()), || calls::malloc(4096).and_then(calls::free).map_err(code))
            }
            Work::OwnMallocFree => {
                let pool = Pool::with(&PageCache::new(&device), PoolOptions::default().handles(&[SIZE]));
                let _other = pool.allocate(4096, 512, Tag(0))?;
                self.repeat(None, |_| Ok(()), || pool.free(pool.allocate(4096, 512, Tag(0))?.into_address()))
            }
            Work::CWrite => {
                let block = calls::malloc(2 * size).map_err(code)?;
                self.repeat(None, |_| Ok(()), || calls::write(block, &buffer).map_err(code))
            }
            _ => {
                let mapping = session.reserve(SIZE)?.map(0, &device.create(SIZE)?)?;
                self.repeat(None, |_| Ok(()), || session.slice_at(mapping.address(), 4096)?.write(&buffer))
            }
        }
    }

    /// Each export needs new memory: a second export of the same memory returns the first.
    fn export(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let (new, next) = (RefCell::new(Vec::new()), Cell::new(0));
        self.repeat(
            None,
            |times| {
                *new.borrow_mut() = memories(&device, times)?;
                next.set(0);
                Ok(())
            },
            || {
                let memories: Ref<'_, Vec<PhysicalMemory>> = new.borrow();
                memories[next.replace(next.get() + 1)].export().map(discard)
            },
        )
    }

    fn trust(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let importer = [BareTgid::of_this_process(&device.session())?];
        let (exports, next) = (RefCell::new(Vec::new()), Cell::new(0));
        self.repeat(
            None,
            |times| {
                let new = memories(&device, times)?.iter().map(PhysicalMemory::export).collect::<Result<_, _>>()?;
                *exports.borrow_mut() = new;
                next.set(0);
                Ok(())
            },
            || {
                let exports: Ref<'_, Vec<share::Export>> = exports.borrow();
                exports[next.replace(next.get() + 1)].trust(&importer)
            },
        )
    }

    /// Memory can only be imported from another process.
    fn import(&self) -> Result<OwnFigures, Failure> {
        let device = open()?;
        let me = BareTgid::of_this_process(&device.session())?;
        let mut peer = Command::new(std::env::current_exe()?)
            .args(["bench-client", "import-peer", "--live", &(self.live + 1).to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(mut to), Some(from)) = (peer.stdin.take(), peer.stdout.take()) else { return Err("no pipes".into()) };
        writeln!(to, "{me}")?;
        let mut tickets = Vec::new();
        for line in BufReader::new(from).lines().take(self.live as usize + 1) {
            tickets.push(line?.parse::<Ticket>()?);
        }
        if self.work == Work::GrowImport {
            let own = self.grow(|index| Ok(share::import(&device, &tickets[index as usize])?))?;
            drop(to);
            peer.wait()?;
            return Ok(own);
        }
        let (live, bytes) = self.live(|index| Ok(share::import(&device, &tickets[index as usize])?))?;
        let new = tickets[self.live as usize];
        let own = match self.work {
            Work::ImportHandle => self.repeat(bytes, |_| Ok(()), || share::import(&device, new.handle).map(discard)),
            Work::ImportAgain => self.repeat(bytes, |_| Ok(()), || share::import(&device, &tickets[0]).map(discard)),
            _ => self.repeat(bytes, |_| Ok(()), || share::import(&device, &new).map(discard)),
        }?;
        drop(live);
        drop(to);
        peer.wait()?;
        Ok(own)
    }

    /// Exports `live` memories to the process whose id is on the standard input, and keeps them
    /// until that process ends.
    fn import_peer(&self) -> Result<(), Failure> {
        let mut lines = std::io::stdin().lines();
        let importer = BareTgid::from_raw(lines.next().ok_or("no importer")??.trim().parse()?)?;
        let device = open()?;
        let memories = memories(&device, self.live)?;
        for memory in &memories {
            let export = memory.export()?;
            export.trust(&[importer])?;
            ascend_vmm_tool::outln!("{}", export.ticket()?);
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
    pub(super) fn live<T>(
        &self,
        mut make: impl FnMut(u64) -> Result<T, Failure>,
    ) -> Result<(Vec<T>, Option<f64>), Failure> {
        let mut live = Vec::with_capacity(self.live as usize);
        let before = own_memory()?;
        for index in 0..self.live {
            live.push(make(index)?);
        }
        let grown = own_memory()?.saturating_sub(before);
        // Whole pages are counted, so only many objects give a useful average.
        Ok((live, (self.live >= 1000).then(|| grown as f64 / self.live as f64)))
    }

    /// Makes objects until there are `live`. Around the numbers at which tables grow, powers of two
    /// and seven eighths of them, each object is a section of its own.
    fn grow<T>(&self, mut make: impl FnMut(u64) -> Result<T, Failure>) -> Result<OwnFigures, Failure> {
        let mark = || if self.untraced { Ok(()) } else { mark() };
        let mut live = Vec::with_capacity(self.live as usize);
        mark()?;
        let mut operation = || {
            let object = make(live.len() as u64)?;
            live.push(object);
            Ok::<_, Failure>(())
        };
        repeat(&[true; 2], &mut operation)?;
        section(&mark, &[false], &mut operation)?;
        for number in 2..self.live {
            let near = |edge: u64| number.abs_diff(edge) <= 1;
            let power = number.next_power_of_two();
            if near(power) || near(power / 2) || near(power / 8 * 7) {
                section(&mark, &[true], &mut operation)?;
            } else {
                repeat(&[true], &mut operation)?;
            }
        }
        Ok(OwnFigures::default())
    }

    /// The timed run in several threads, which share the device.
    fn threads(&self, device: &Device) -> Result<OwnFigures, Failure> {
        let each = self.timed / self.threads;
        let before = cpu_time()?;
        std::thread::scope(|scope| -> Result<(), Failure> {
            let work = || (0..each).try_for_each(|_| device.create(SIZE).map(discard));
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(work)).collect();
            for thread in threads {
                thread.join().map_err(|_| "a thread panicked")??;
            }
            Ok(())
        })?;
        let nanoseconds = (cpu_time()? - before) / (each * self.threads) as f64;
        Ok(OwnFigures { nanoseconds: Some(nanoseconds), ..OwnFigures::default() })
    }

    /// The sections and the timed run. `ready` prepares the given number of repetitions and is not
    /// counted.
    pub(super) fn repeat<E: Into<Failure>>(
        &self,
        bytes_per_object: Option<f64>,
        mut ready: impl FnMut(u64) -> Result<(), Failure>,
        mut operation: impl FnMut() -> Result<(), E>,
    ) -> Result<OwnFigures, Failure> {
        let mark = || if self.untraced { Ok(()) } else { mark() };
        let pairs = self.pairs as usize;
        let (empty, full) = (vec![false; pairs], vec![true; pairs]);
        mark()?;
        // One-time costs are not the operation's.
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
        let before = cpu_time()?;
        repeat(&timed, &mut operation)?;
        let spent = cpu_time()? - before;
        let nanoseconds = (self.timed > 0).then(|| spent / self.timed as f64);
        Ok(OwnFigures { bytes_per_object, nanoseconds })
    }
}

/// Reserved places for mappings.
struct Places {
    reservations: Vec<Reservation>,
    each: u64,
    stride: u64,
}

impl Places {
    fn get(&self, index: u64) -> (&Reservation, u64) {
        (&self.reservations[(index / self.each) as usize], index % self.each * self.stride)
    }
}

/// The error of an explicit call, without the object.
fn error<T>(failed: ascend_vmm::Failed<T>) -> ascend_vmm::Error {
    failed.error
}

/// CPU time that this process has used, in nanoseconds.
fn cpu_time() -> Result<f64, Failure> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let nanoseconds = |time: TimeVal| time.num_microseconds() as f64 * 1000.0;
    Ok(nanoseconds(usage.user_time()) + nanoseconds(usage.system_time()))
}

/// A session and its first device.
pub(super) fn open() -> Result<Device, Failure> {
    Ok(Session::open()?.device(LogicalId(0))?)
}

/// New memories.
fn memories(device: &Device, number: u64) -> ascend_vmm::Result<Vec<PhysicalMemory>> {
    (0..number).map(|_| device.create(SIZE)).collect()
}

/// Drops an object without letting the compiler see that it is unused.
pub(super) fn discard<T>(object: T) {
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
