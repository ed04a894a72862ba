//! This process's one session with the memory driver.
//!
//! The driver ties all memory to a *session*: a file of the memory module that INIT_PROCESS bound
//! to the calling process. A process has at most one. A [`Session`] is a reference to it that can
//! be cloned and used from any thread. The vendor's library needs the same one, so the two cannot
//! live in one process. Everything made through a session keeps it alive. When the last user is
//! gone, the session is closed in the order that the driver requires: mappings, reservations,
//! memory, devices, address segments, CLOSE, close(2). Then a new one can be opened.
//!
//! A child of fork(2) does not have its parent's session. Using it there is an error that says so,
//! and dropping it does nothing. The child may open its own.

mod bringup;
mod seat;
pub(crate) mod undo;

use crate::bytes::Bytes;
use crate::device::{Device, DeviceInner, Host};
use crate::device_process;
use crate::discovery::PeerAccess;
use crate::driver::devmng::Devmng;
use crate::driver::segments::{self, Segments};
use crate::driver::svm::{HeapKind, HostPages, Svm};
use crate::error::{Error, Failed, Invalid, KernelResult, Result};
use crate::fork::ForkGuard;
use crate::id::LogicalId;
use crate::mapping::Mapping;
use crate::mapping::mapping_table::MappingTable;
use crate::physical::PhysicalMemory;
use crate::reserve::arena::{Arena, Unavailable, Window};
use crate::reserve::{Reservation, ReserveOptions};
use crate::share::Sharing;
use crate::slots::{Slots, lock};
use crate::trace::{self, quiet};
use ascend_ioctl::Generation;
use seat::Seat;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use undo::{Left, Live, Undo, in_use};

/// A reference to this process's session.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::Session;
///
/// let session = Session::open()?;
/// println!("driver generation {}", session.generation());
/// // A process has one session: other code in it gets the same.
/// let same = Session::current()?;
/// drop(same);
/// session.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Session {
    pub(crate) inner: Arc<Live<SessionInner>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Options for opening a session.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::Session;
///
/// // Without the driver's 8 TiB of addresses, as address sanitizers need it.
/// let session = Session::builder().segments(false).open()?;
/// assert!(!session.has_segments());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is opened before `open`"]
pub struct SessionBuilder {
    segments: bool,
    allow_unknown_generation: bool,
    process: device_process::Settings,
}

impl Default for SessionBuilder {
    fn default() -> Self {
        SessionBuilder { segments: true, allow_unknown_generation: false, process: device_process::Settings::default() }
    }
}

impl SessionBuilder {
    /// Whether the driver's address segments (8 to 14 TiB of address space, no memory) are mapped,
    /// which they are by default.
    ///
    /// Leave them out under address sanitizers, or where address space is limited. Device memory
    /// works without them, but:
    ///
    /// * the CPU cannot see any of the driver's memory: no host memory, no
    ///   [`Mapping::host_view`](crate::Mapping::host_view);
    /// * after the session was closed, another one can be opened in this process only if the 8 TiB
    ///   of addresses from 16 TiB on were free at that moment;
    /// * a library that unmaps one of the driver's address ranges ends the session unnoticed.
    pub fn segments(mut self, mapped: bool) -> Self {
        self.segments = mapped;
        self
    }

    /// Treats a driver of an unknown generation like the newest known one. The kernel checks no
    /// sizes: a wrong guess can corrupt memory.
    pub fn allow_unknown_generation(mut self, allow: bool) -> Self {
        self.allow_unknown_generation = allow;
        self
    }

    /// When and how device processes are started, and how long that may take.
    pub fn device_process(mut self, settings: device_process::Settings) -> Self {
        self.process = settings;
        self
    }

    /// Opens the session.
    ///
    /// # Errors
    ///
    /// Those of [`Session::open`].
    pub fn open(self) -> Result<Session> {
        // Events are held back while the session is opened: a subscriber may ask for the session.
        let _quiet = quiet();
        match Seat::take() {
            Ok(seat) => Session::new(&self, seat),
            Err(_) => Err(Error::SessionOpen),
        }
    }
}

/// Driver resources held by this process, in bytes unless noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SessionStatistics {
    /// Physical memory on devices and on the host: own and imported, mapped or not.
    pub physical: u64,
    /// Reserved addresses.
    pub reserved: u64,
    /// Addresses with memory behind them. Memory that is mapped twice counts twice.
    pub mapped: u64,
    /// Number of mappings.
    pub mappings: u64,
    /// Number of dropped objects that the kernel would not undo. They are tried again when a device
    /// or the session is closed.
    pub left: u64,
}

impl fmt::Display for SessionStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionStatistics { physical, reserved, mapped, mappings, left } = *self;
        let [physical, reserved, mapped] = [physical, reserved, mapped].map(|bytes| Bytes(bytes).rounded());
        write!(f, "memory {physical}, addresses {reserved}, mapped {mapped}, mappings {mappings}, left {left}")
    }
}

/// The session itself.
pub(crate) struct SessionInner {
    /// Bytes of physical memory and of reserved addresses, for the statistics.
    pub(crate) physical: AtomicU64,
    pub(crate) reserved: AtomicU64,
    pub(crate) arena: Mutex<Arena>,
    /// Held while a heap is enabled or disabled, so that no two threads do that with the same heap.
    growing: Mutex<()>,
    pub(crate) mappings: Mutex<MappingTable>,
    pub(crate) devices: Slots<u32, Live<DeviceInner>>,
    /// Pairs of devices that have access to each other's memory.
    pub(crate) peers: Mutex<BTreeMap<(u32, u32), PeerAccess>>,
    pub(crate) sharing: Sharing,
    pub(crate) generation: Generation,
    pub(crate) pages: HostPages,
    segments: Segments,
    /// The CPU can see memory: the segments are mapped, and the options asked for them.
    pub(crate) cpu_access: bool,
    pub(crate) process: device_process::Settings,
    /// The process that opened the session.
    pub(crate) guard: ForkGuard,
    // Fields are dropped in this order: the file; what could not be undone, which the kernel frees
    // with the file; the claim on the DEVMNG file, which must be closed after it; the process's
    // seat.
    pub(crate) svm: Svm,
    left: Mutex<Vec<Left>>,
    pub(crate) devmng: Devmng,
    seat: Seat,
}

/// Short, because every object's output contains its session, and the tables are long.
impl fmt::Debug for SessionInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("generation", &self.generation.name()).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens this process's session.
    ///
    /// # Errors
    ///
    /// [`Error::SessionOpen`] if this process has one already: clone that, or use
    /// [`Session::current`]. [`Error::SessionTaken`] if other code has it, most likely the
    /// vendor's library. [`Error::Open`] without a driver or permission;
    /// [`Error::UnknownGeneration`] for a driver that fits no table.
    pub fn open() -> Result<Session> {
        SessionBuilder::default().open()
    }

    /// Options for opening a session.
    pub fn builder() -> SessionBuilder {
        SessionBuilder::default()
    }

    /// This process's session. Opens one if there is none.
    ///
    /// # Errors
    ///
    /// Those of [`Session::open`], except [`Error::SessionOpen`].
    pub fn current() -> Result<Session> {
        let _quiet = quiet();
        loop {
            match Seat::take() {
                Ok(seat) => return Session::new(&SessionBuilder::default(), seat),
                Err(session) => {
                    if let Some(inner) = session.upgrade() {
                        return Ok(Session { inner });
                    }
                }
            }
        }
    }

    /// The device with this id in the process's own numbering. The first call sets it up
    /// (SETUP_DEVICE); later calls share it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device or it refuses this process;
    /// [`Error::DeviceProcess`] if it needs a device process and none could be started.
    #[doc(alias = "aclrtSetDevice")]
    #[doc(alias = "cudaSetDevice")]
    pub fn device(&self, id: LogicalId) -> Result<Device> {
        Device::open(&self.inner, id)
    }

    /// The host, as a place for memory.
    ///
    /// # Errors
    ///
    /// [`Error::OtherProcess`] in a child of the process that opened the session.
    #[doc(alias = "pinned")]
    #[doc(alias = "aclrtMallocHost")]
    #[doc(alias = "cudaMallocHost")]
    #[doc(alias = "cuMemHostAlloc")]
    pub fn host(&self) -> Result<Host> {
        self.inner.check_process()?;
        Ok(Host { inner: DeviceInner::host(&self.inner) })
    }

    /// Reserves `size` bytes of addresses, a multiple of 2 MiB and at most 128 GiB. They use no
    /// device memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an impossible size, with the limit; [`Error::Refused`] with the
    /// kernel's answer.
    #[doc(alias = "aclrtReserveMemAddress")]
    #[doc(alias = "cuMemAddressReserve")]
    pub fn reserve(&self, size: u64) -> Result<Reservation> {
        Reservation::new(&self.inner, size, &ReserveOptions::default())
    }

    /// Reserves addresses with an alignment, or at a fixed address.
    ///
    /// # Errors
    ///
    /// Those of [`Session::reserve`]; [`Error::Invalid`] if the fixed address is taken or not
    /// aligned.
    pub fn reserve_with(&self, size: u64, options: &ReserveOptions) -> Result<Reservation> {
        Reservation::new(&self.inner, size, options)
    }

    /// The memory whose mapping contains an address.
    #[doc(alias = "aclrtMemRetainAllocationHandle")]
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn memory_at(&self, address: u64) -> Option<PhysicalMemory> {
        self.inner.mappings()?.memory_at(address).map(|block| PhysicalMemory { block })
    }

    /// The start and size of the mapping that contains an address.
    #[doc(alias = "aclrtMemGetAddressRange")]
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn mapping_at(&self, address: u64) -> Option<(u64, u64)> {
        self.inner.mappings()?.range_at(address)
    }

    /// The driver resources that this process holds, as counted by this library. All zero in a
    /// child of fork.
    pub fn statistics(&self) -> SessionStatistics {
        let Some(table) = self.inner.mappings() else { return SessionStatistics::default() };
        let (mappings, mapped) = table.total();
        drop(table);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        SessionStatistics {
            physical: load(&self.inner.physical),
            reserved: load(&self.inner.reserved),
            mapped,
            mappings,
            left: lock(&self.inner.left).len() as u64,
        }
    }

    /// The mapping that contains an address. This is a reference: while it lives the memory stays
    /// mapped, and the owner's [`Mapping::unmap`] is refused.
    pub fn mapping(&self, address: u64) -> Option<Mapping> {
        self.inner.mappings()?.find(address).map(|inner| Mapping { inner })
    }

    /// The driver's generation, detected when the session was opened.
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// Page size of the host, as the driver sees it.
    pub fn host_page_size(&self) -> u64 {
        u64::from(self.inner.pages.page_size)
    }

    /// Whether the host offers memory in 1 GiB pages.
    pub fn has_host_giant_pages(&self) -> bool {
        self.inner.pages.giant_pages
    }

    /// Whether the CPU can see memory: see [`SessionBuilder::segments`].
    pub fn has_segments(&self) -> bool {
        self.inner.cpu_access
    }

    /// Closes the session. Dropping the last reference closes it too, and logs errors.
    ///
    /// # Errors
    ///
    /// [`Failed`] with the session if this is not the last reference, or if an object that was made
    /// through it is alive. Without the session if it was closed but something in it could not be
    /// undone. The kernel frees that when the process ends.
    pub fn close(self) -> Result<(), Failed<Option<Session>>> {
        if let Err(error) = self.inner.check_process() {
            return Err(Failed { error, object: Some(self) });
        }
        match Arc::try_unwrap(self.inner) {
            // The session is closed even if something could not be undone. The kernel cleans that
            // up.
            Ok(inner) => inner.end().map_err(|error| Failed { error, object: None }),
            Err(inner) => Err(Failed { error: in_use(&inner), object: Some(Session { inner }) }),
        }
    }

    fn new(builder: &SessionBuilder, seat: Seat) -> Result<Session> {
        let devmng = Devmng::claim();
        let (prepared, pages) = bringup::bring_up(builder)?;
        // Segments of an earlier attempt stay mapped, but are not used unless asked for.
        let cpu_access = builder.segments && prepared.segments.has_svm();
        let inner = Arc::new(Live::new(SessionInner {
            physical: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            arena: Mutex::new(Arena::default()),
            growing: Mutex::default(),
            mappings: Mutex::default(),
            devices: Slots::default(),
            peers: Mutex::default(),
            sharing: Sharing::default(),
            left: Mutex::new(Vec::new()),
            generation: prepared.generation,
            pages,
            segments: prepared.segments,
            cpu_access,
            process: builder.process.clone(),
            guard: ForkGuard::new(),
            svm: prepared.svm,
            devmng,
            seat,
        }));
        Seat::set_open(&inner);
        Ok(Session { inner })
    }
}

impl SessionInner {
    /// True in a child of the process that opened the session.
    pub(crate) fn in_child(&self) -> bool {
        self.guard.in_child()
    }

    /// Refuses to go on in such a child.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.guard.check()
    }

    /// Refuses an object of another session: a child of fork may have its parent's.
    pub(crate) fn check_same(&self, other: &SessionInner, operation: &'static str) -> Result<()> {
        if std::ptr::eq(self, other) {
            return Ok(());
        }
        Err(Invalid::because(operation, "the objects are of different sessions", "Use one session."))
    }

    /// The table of mappings. `None` in a child of fork: nothing is mapped there, and the table's
    /// lock may be held by a thread that does not exist in the child.
    fn mappings(&self) -> Option<MutexGuard<'_, MappingTable>> {
        (!self.in_child()).then(|| lock(&self.mappings))
    }

    /// Takes addresses with `take`, after enabling the heap that it asks for.
    pub(crate) fn take_with_heap(
        &self,
        take: impl Fn(&mut Arena) -> Result<u64, Unavailable>,
    ) -> Result<Result<u64, Unavailable>> {
        let _quiet = quiet();
        let _growing = lock(&self.growing);
        // Another thread may have enabled it in the meantime.
        let taken = take(&mut lock(&self.arena));
        let Err(Unavailable::NeedsHeap(window)) = taken else { return Ok(taken) };
        self.svm.update_heap(true, HeapKind::Reserve, window.index(), window.size).map_err(|refused| {
            let arguments = format!("index {}, size {}", window.index(), Bytes(window.size));
            refused.operation("enable a heap for reservations").arguments(arguments)
        })?;
        let mut arena = lock(&self.arena);
        arena.add_heap(window);
        Ok(take(&mut arena))
    }

    /// Takes addresses for a heap that holds no reservations, and enables it. `None` if the
    /// addresses are used up.
    pub(crate) fn open_heap(&self, kind: HeapKind, size: u64) -> KernelResult<Option<Window>> {
        let _quiet = quiet();
        let _growing = lock(&self.growing);
        let Some(window) = lock(&self.arena).take_window(size) else { return Ok(None) };
        if let Err(refused) = self.svm.update_heap(true, kind, window.index(), window.size) {
            lock(&self.arena).free_window(window);
            return Err(refused);
        }
        Ok(Some(window))
    }

    /// Disables a heap of [`SessionInner::open_heap`] and frees its addresses.
    pub(crate) fn close_heap(&self, kind: HeapKind, window: Window) -> KernelResult<()> {
        let _quiet = quiet();
        let _growing = lock(&self.growing);
        self.svm.update_heap(false, kind, window.index(), window.size)?;
        lock(&self.arena).free_window(window);
        Ok(())
    }

    /// Disables all heaps if nothing is reserved in them. Heaps are cheap for the kernel, so this
    /// is done only when the last device or the session is closed.
    pub(crate) fn disable_idle_heaps(&self) {
        let _quiet = quiet();
        let _growing = lock(&self.growing);
        let windows = {
            let mut arena = lock(&self.arena);
            if arena.is_idle() { arena.take_heaps() } else { Vec::new() }
        };
        for window in windows {
            if let Err(refused) = self.svm.update_heap(false, HeapKind::Reserve, window.index(), window.size) {
                trace::warn(refused.operation("disable a heap"), "a heap stays until the session is closed");
                // It is still enabled, so keep using it.
                lock(&self.arena).add_heap(window);
            }
        }
    }
}

impl Undo for SessionInner {
    const OPERATION: &'static str = "close the session";

    fn session(&self) -> &SessionInner {
        self
    }

    /// The session ends even after an error: dropping the fields closes its files.
    fn undo(&mut self) -> Result<()> {
        self.seat.close();
        self.retry();
        self.disable_idle_heaps();
        if !self.segments.has_svm() {
            segments::end_without();
        }
        self.segments.unmap();
        let left = lock(&self.left);
        if left.is_empty() {
            return Ok(());
        }
        let users = format!("the kernel would not undo {left:?}. It now cleans up by itself.");
        Err(Error::InUse { operation: "undo everything in the session", users })
    }

    fn abandon(&mut self, error: Error) {
        trace::warn(error, "the session was closed, but not everything could be undone");
    }

    fn users(&self, others: usize) -> String {
        format!(
            "{others} other reference(s) are alive: clones of the session, devices, memory, \
             reservations or mappings. Drop them first."
        )
    }

    fn forget(&mut self) {
        // Dropping the file sends CLOSE, which does nothing here, and closes this process's copy.
        self.segments.forget();
    }
}
