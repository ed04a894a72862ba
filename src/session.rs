//! This process's one session with the memory driver.
//!
//! The driver ties all memory to a *session*: a file of the memory module that INIT_PROCESS bound to the calling process. A process has
//! at most one, so a [`Session`] is a reference to it that can be cloned and used from any thread; the vendor's library wants the same
//! one, which is why the two cannot live in one process. Everything made through a session keeps it alive, and when the last user is gone
//! it is closed in the order that the driver wants: mappings, reservations, memory, devices, address segments, CLOSE, close(2). After
//! that a new one can be opened.
//!
//! A child of fork(2) has no session, whatever it inherited: using the parent's there is an error that says so, and dropping it does
//! nothing. The child may open its own.

mod bringup;
pub(crate) mod call;
mod fork;
mod klog;
mod segments;
mod table;

use crate::device::{Device, DeviceInner};
use crate::devmng::Devmng;
use crate::discovery::{LogicalId, PeerAccess};
use crate::error::{Errno, Error, Failed, Result};
use crate::mapping::MappingTable;
use crate::physical::Block;
use crate::process;
use crate::reserve::arena::{Arena, Window};
use crate::reserve::{Reservation, ReserveOptions};
use crate::share::Sharing;
use crate::{Host, PhysicalMemory};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{
    FreePages, HEAP_DISABLE, HEAP_ENABLE, HEAP_HUGE, HOST_ID, InitProcess, MemRelease, MemUnmap, SUB_RESERVE,
    UpdateHeap,
};
pub(crate) use bringup::probe;
use call::{FREE_PAGES, RELEASE, Request, Svm, UNMAP, UPDATE_HEAP};
pub(crate) use fork::{ForkGuard, PerProcess};
use segments::Segments;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
pub(crate) use table::WeakTable;

/// A reference to this process's session.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::Session;
///
/// let session = Session::open()?;
/// println!("driver generation {}", session.generation());
/// // A process has one: anyone else in it takes the same.
/// let same = Session::current()?;
/// drop(same);
/// session.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Session {
    pub(crate) inner: Arc<Inner>,
}

/// How a session is opened.
#[derive(Debug, Clone)]
#[must_use = "nothing is opened before `open`"]
pub struct SessionBuilder {
    davinci_manager: PathBuf,
    segments: bool,
    allow_unknown_generation: bool,
    process: process::Settings,
}

impl Default for SessionBuilder {
    fn default() -> Self {
        SessionBuilder {
            davinci_manager: PathBuf::from(ascend_ioctl::davinci::PATH),
            segments: true,
            allow_unknown_generation: false,
            process: process::Settings::default(),
        }
    }
}

impl SessionBuilder {
    /// Path of the driver's multiplexer, `/dev/davinci_manager` unless told otherwise.
    pub fn davinci_manager(mut self, path: impl Into<PathBuf>) -> Self {
        self.davinci_manager = path.into();
        self
    }

    /// Whether the driver's address segments (8 to 14 TiB of address space, no memory) are mapped, which they are by default.
    ///
    /// Leave them out under address sanitizers, or where address space is limited. Device memory works without them, but: the CPU can
    /// see no memory of the driver's (no host memory, no [`Mapping::host_view`](crate::Mapping::host_view)); once closed, a session can be opened again in this process
    /// only if 8 TiB of addresses from 16 TiB on can be had for a moment; and a library that unmaps one of the driver's address ranges ends the session unnoticed.
    pub fn segments(mut self, mapped: bool) -> Self {
        self.segments = mapped;
        self
    }

    /// Go on with the newest known tables when the driver is of an unknown generation. The kernel checks no sizes: a wrong guess can
    /// corrupt memory.
    pub fn allow_unknown_generation(mut self, allow: bool) -> Self {
        self.allow_unknown_generation = allow;
        self
    }

    /// When and how device processes are started, and how long that may take.
    pub fn device_process(mut self, settings: process::Settings) -> Self {
        self.process = settings;
        self
    }

    /// Opens the session; an error if this process has one already.
    pub fn open(self) -> Result<Session> {
        match open(&self)? {
            Opened::New(session) => Ok(session),
            Opened::Existing(_) => Err(Error::SessionOpen),
        }
    }
}

/// Which session this process has.
#[derive(Default)]
enum Current {
    #[default]
    None,
    /// Being opened by a thread, or closed by the one that dropped the last reference.
    Changing,
    Open(Weak<Inner>),
}

/// The process's place for a session, and how many threads wait for it to change. Waking takes a system call, so nobody is woken who does
/// not wait.
#[derive(Default)]
struct Seat {
    current: Mutex<(Current, usize)>,
    changed: Condvar,
}

impl Seat {
    /// This process's. A child of fork has none of its parent's sessions.
    fn of_this_process() -> &'static Seat {
        static SEAT: PerProcess<Seat> = PerProcess::new();
        SEAT.get(|_| Seat::default())
    }

    fn set(&self, now: Current) {
        let mut current = lock(&self.current);
        current.0 = now;
        if current.1 > 0 {
            self.changed.notify_all();
        }
    }
}

enum Opened {
    New(Session),
    Existing(Session),
}

fn open(builder: &SessionBuilder) -> Result<Opened> {
    let seat = Seat::of_this_process();
    let mut current = lock(&seat.current);
    loop {
        match &current.0 {
            Current::Open(session) => {
                if let Some(inner) = session.upgrade() {
                    return Ok(Opened::Existing(Session { inner }));
                }
                // The last reference is gone, and the thread that dropped it is closing the session.
            }
            Current::Changing => {}
            Current::None => break,
        }
        current.1 += 1;
        current = seat.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        current.1 -= 1;
    }
    current.0 = Current::Changing;
    drop(current);

    let opened = Inner::open(builder, ForkGuard::new());
    seat.set(match &opened {
        Ok(inner) => Current::Open(Arc::downgrade(inner)),
        Err(_) => Current::None,
    });
    Ok(Opened::New(Session { inner: opened? }))
}

/// What an object that was dropped could not give back. Plain numbers, so that nothing is kept alive by it; tried again when a device or
/// the session is closed, in this order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Orphan {
    /// A mapping that the kernel would not undo, and its size.
    Mapping(MemUnmap, u64),
    /// A reservation that the kernel would not free.
    Reservation(FreePages),
    /// Memory that the kernel would not release.
    Memory(u32, MemRelease),
}

/// The session itself.
pub(crate) struct Inner {
    pub(crate) arena: Mutex<Arena>,
    pub(crate) mappings: MappingTable,
    pub(crate) devices: WeakTable<u32, DeviceInner>,
    /// Pairs of devices that reach each other's memory.
    pub(crate) peers: Mutex<BTreeMap<(u32, u32), PeerAccess>>,
    pub(crate) sharing: Sharing,
    orphans: Mutex<Vec<Orphan>>,
    generation: Generation,
    pages: InitProcess,
    segments: Segments,
    /// Whether it was shut down already.
    ended: bool,
    davinci_manager: PathBuf,
    /// How device processes are started.
    pub(crate) process: process::Settings,
    // Fields are dropped in this order: the file, the claim on the DEVMNG file that must be closed after it, and the process's place for
    // a session.
    pub(crate) svm: Svm,
    pub(crate) devmng: Devmng,
    _place: Place,
}

/// Short: everything that is made through a session leads here, and its tables are long.
impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// This process's place for a session, taken by one until everything of it is closed.
#[derive(Debug)]
struct Place(ForkGuard);

impl Drop for Place {
    fn drop(&mut self) {
        if !self.0.in_child() {
            Seat::of_this_process().set(Current::None);
        }
    }
}

impl Session {
    /// Opens this process's session.
    ///
    /// # Errors
    ///
    /// [`Error::SessionOpen`] if this process has one already: clone that, or use [`Session::current`]. [`Error::SessionTaken`] if somebody else has it, most
    /// likely the vendor's library. [`Error::Open`] without a driver or permission; [`Error::UnknownGeneration`] for a driver that fits no table.
    pub fn open() -> Result<Session> {
        SessionBuilder::default().open()
    }

    /// How to open a session that is not like the default.
    pub fn builder() -> SessionBuilder {
        SessionBuilder::default()
    }

    /// This process's session, opened now if there is none.
    pub fn current() -> Result<Session> {
        match open(&SessionBuilder::default())? {
            Opened::New(session) | Opened::Existing(session) => Ok(session),
        }
    }

    /// The device with this id in the process's own numbering, set up for this process: one SETUP_DEVICE the first time, then shared.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device or it does not take this process; [`Error::DeviceProcess`] if it needs a process on it and none could be started.
    #[doc(alias = "aclrtSetDevice")]
    pub fn device(&self, id: LogicalId) -> Result<Device> {
        Device::open(&self.inner, id)
    }

    /// The host, as a place for memory.
    pub fn host(&self) -> Result<Host> {
        self.inner.svm.check_process()?;
        Ok(Host::new(DeviceInner::host(&self.inner)))
    }

    /// Reserves `size` bytes of addresses, a multiple of 2 MiB and at most 128 GiB. They cost no memory of the device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a size that cannot be, with the limit; [`Error::Refused`] with what the kernel says.
    #[doc(alias = "aclrtReserveMemAddress")]
    #[doc(alias = "cuMemAddressReserve")]
    #[inline]
    pub fn reserve(&self, size: u64) -> Result<Reservation> {
        Reservation::new(&self.inner, size, &ReserveOptions::default())
    }

    /// Reserves addresses with an alignment, or at a place.
    pub fn reserve_with(&self, size: u64, options: &ReserveOptions) -> Result<Reservation> {
        Reservation::new(&self.inner, size, options)
    }

    /// The memory that is mapped at an address, anywhere inside the mapping.
    #[doc(alias = "aclrtMemRetainAllocationHandle")]
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn memory_at(&self, address: u64) -> Option<PhysicalMemory> {
        self.inner.find(address).map(|(_, block)| PhysicalMemory { block })
    }

    /// The start and size of the mapping that contains an address.
    #[doc(alias = "aclrtMemGetAddressRange")]
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn mapping_at(&self, address: u64) -> Option<(u64, u64)> {
        self.inner.find(address).map(|(start, block)| (start, block.size))
    }

    /// The driver's generation, as found out when the session was opened.
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// Page size of the host, as the driver sees it.
    pub fn host_page_size(&self) -> u64 {
        u64::from(self.inner.pages.host_page_size)
    }

    /// Whether the host offers memory in 1 GiB pages.
    pub fn has_host_giant_pages(&self) -> bool {
        self.inner.pages.host_giant_page != 0
    }

    /// Whether the address segments are mapped: see [`SessionBuilder::segments`].
    pub fn has_segments(&self) -> bool {
        self.inner.segments.has_svm()
    }

    /// Path of the driver's multiplexer.
    pub fn davinci_manager(&self) -> &Path {
        &self.inner.davinci_manager
    }

    /// Closes the session, and tells what went wrong. It must be the last reference, with nothing left that was made through it;
    /// otherwise the session is handed back. It is not when it was closed, but something in it could not be undone. (Dropping the last reference closes it too, and logs what goes wrong.)
    pub fn close(self) -> Result<(), Failed<Option<Session>>> {
        if let Err(error) = self.inner.svm.check_process() {
            return Err(Failed { error, object: Some(self) });
        }
        match Arc::try_unwrap(self.inner) {
            Ok(mut inner) => {
                let result = inner.shut_down();
                drop(inner);
                // The session is gone, and with it what could not be undone in order: that is now the kernel's to clean up.
                result.map_err(|error| Failed { error, object: None })
            }
            Err(inner) => {
                let users = format!(
                    "{} other reference(s) are alive: clones of the session, devices, memory, reservations or mappings; drop them first",
                    Arc::strong_count(&inner) - 1
                );
                let error = Error::InUse { operation: "close the session", users };
                Err(Failed { error, object: Some(Session { inner }) })
            }
        }
    }
}

impl Inner {
    fn open(builder: &SessionBuilder, guard: ForkGuard) -> Result<Arc<Inner>> {
        let devmng = Devmng::hold(&builder.davinci_manager);
        let (prepared, pages) = bringup::bring_up(builder, guard)?;
        Ok(Arc::new(Inner {
            arena: Mutex::new(Arena::new()),
            mappings: MappingTable::default(),
            devices: WeakTable::default(),
            peers: Mutex::default(),
            sharing: Sharing::default(),
            orphans: Mutex::new(Vec::new()),
            generation: prepared.generation,
            pages,
            segments: prepared.segments,
            ended: false,
            davinci_manager: builder.davinci_manager.clone(),
            process: builder.process.clone(),
            svm: prepared.svm,
            devmng,
            _place: Place(guard),
        }))
    }

    /// The start and the memory of the mapping that contains an address. Nothing is mapped in a child of fork, where the table's lock may
    /// be held for ever.
    fn find(&self, address: u64) -> Option<(u64, Arc<Block>)> {
        if self.svm.guard.in_child() { None } else { self.mappings.find(address) }
    }

    /// Path and generation of the driver.
    pub(crate) fn driver(&self) -> (&Path, Generation) {
        (&self.davinci_manager, self.generation)
    }

    /// Whether the CPU can see memory.
    pub(crate) fn has_segments(&self) -> bool {
        self.segments.has_svm()
    }

    /// Whether the host has 1 GiB pages.
    pub(crate) fn has_host_giant_pages(&self) -> bool {
        self.pages.host_giant_page != 0
    }

    /// Enables a heap in which reservations can be made. The caller holds the arena, so that no two threads enable the same.
    pub(crate) fn enable_heap(&self, window: Window) -> Result<()> {
        self.svm.call(UPDATE_HEAP, 0, window.size(), &heap(HEAP_ENABLE, window)).map(drop).map_err(|errno| {
            self.svm
                .refused("enable a heap for reservations", UPDATE_HEAP, errno)
                .arguments(format!("index {}, size {}", window.index(), crate::error::bytes(window.size())))
                .into()
        })
    }

    /// Gives all heaps back if nothing is reserved in them. They cost the kernel little, so this is done only when all else ends.
    pub(crate) fn disable_idle_heaps(&self) {
        let mut arena = lock(&self.arena);
        if !arena.is_idle() {
            return;
        }
        for window in arena.take_heaps() {
            if let Err(errno) = self.svm.call(UPDATE_HEAP, 0, window.size(), &heap(HEAP_DISABLE, window)) {
                let error = self.svm.refused("disable a heap", UPDATE_HEAP, errno);
                tracing::warn!(%error, index = window.index(), "a heap stays until the session is closed");
                // It is still enabled: keep it usable.
                arena.add_heap(window);
            }
        }
    }

    /// Remembers what a dropped object could not give back.
    #[cold]
    pub(crate) fn adopt(&self, orphan: Orphan, operation: &'static str, request: Request, errno: Errno) {
        let error = self.svm.refused(operation, request, errno);
        tracing::error!(%error, ?orphan, "not undone now; it is tried again when the device or the session is closed");
        lock(&self.orphans).push(orphan);
    }

    /// Tries again to give back what could not be given back before.
    pub(crate) fn retry_orphans(&self) {
        let mut orphans = lock(&self.orphans);
        if orphans.is_empty() {
            return;
        }
        let svm = &self.svm;
        for pass in 0..3 {
            orphans.retain(|orphan| match (pass, orphan) {
                (0, &Orphan::Mapping(ref unmap, size)) => match svm.call(UNMAP, HOST_ID, 0, unmap) {
                    Ok(_) => {
                        self.mappings.lock().remove(unmap.address, size);
                        false
                    }
                    Err(_) => true,
                },
                (1, Orphan::Reservation(free)) => match svm.call(FREE_PAGES, 0, 0, free) {
                    Ok(_) => {
                        lock(&self.arena).free(free.address);
                        false
                    }
                    Err(_) => true,
                },
                (2, Orphan::Memory(device, release)) => svm.call(RELEASE, *device, 0, release).is_err(),
                _ => true,
            });
        }
    }

    /// Forgets the memory that a device would not release: the device was closed, which released it.
    pub(crate) fn forget_memory_of(&self, device: u32) {
        lock(&self.orphans).retain(|orphan| !matches!(orphan, Orphan::Memory(of, _) if *of == device));
    }

    fn shut_down(&mut self) -> Result<()> {
        self.retry_orphans();
        let lost = std::mem::take(&mut *lock(&self.orphans));
        self.disable_idle_heaps();
        if !std::mem::replace(&mut self.ended, true) {
            if !self.segments.has_svm() {
                segments::end_without();
            }
            self.segments.unmap();
        }
        if lost.is_empty() {
            Ok(())
        } else {
            let users = format!("the kernel would not give back {lost:?}");
            Err(Error::InUse { operation: "undo all of the session", users })
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.svm.guard.in_child() {
            // All of it is the parent's. The file says CLOSE, which is a no-op here, and closes this process's copy.
            self.segments.forget();
            return;
        }
        if let Err(error) = self.shut_down() {
            tracing::warn!(%error, "the session was closed, but not all could be undone");
        }
    }
}

fn heap(operation: u32, window: Window) -> UpdateHeap {
    UpdateHeap { operation, kind: HEAP_HUGE, sub_kind: SUB_RESERVE, index: window.index(), size: window.size() }
}

/// Locks a mutex. A thread that panicked while holding it left nothing half done: no user code runs under our locks.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
