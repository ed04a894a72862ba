//! Physical memory: pages of a device or of the host that have no address until they are mapped.
//!
//! In the kernel it is a *handle*: a small number that means something only together with its side
//! (host or device), its device, its number of pages and the module it is accounted to. All of
//! these must be repeated whenever the handle is used. A handle is released once, and not while it
//! is mapped. Ownership ensures this: every mapping keeps its memory alive, and the last owner
//! releases it.

use crate::bytes::Bytes;
use crate::device::{Device, DeviceInner, Host};
use crate::driver::svm::{HOST_ID, Handle, Imported};
use crate::error::{Errno, Error, Failed, Invalid, OutOfMemory, Refused, Result};
use crate::id::LogicalId;
use crate::kind::{Kind, MemoryKind, Page};
use crate::session::undo::{Left, Live, Undo, undo};
use crate::session::{Session, SessionInner};
use crate::share::{ImportKey, Ticket};
use crate::trace;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, Ordering};

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Location {
    /// On a device.
    Device(LogicalId),
    /// On the host.
    Host,
}

/// Physical memory. A counted reference: clones and mappings share it, and the last one releases
/// it.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(4 << 20)?;
/// let same = memory.clone();
/// assert!(same.is_same(&memory));
/// drop(same);
/// memory.free()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PhysicalMemory {
    pub(crate) block: Arc<Live<PhysicalBlock>>,
}

impl fmt::Debug for PhysicalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PhysicalMemory({})", self.block.describe())
    }
}

/// A handle and who it belongs to.
#[derive(Debug)]
pub(crate) struct PhysicalBlock {
    /// The device, or the host: for imports the importing one.
    pub(crate) device: Arc<Live<DeviceInner>>,
    pub(crate) size: u64,
    pub(crate) handle: Handle,
    /// Its kind, as far as the driver and tickets tell: see [`PhysicalBlock::kind`].
    giant: AtomicBool,
    memory: AtomicU8,
    /// A release was refused. The kernel may have begun it, and would crash if such memory were
    /// exported and then released.
    pub(crate) half_released: bool,
    origin: MemoryOrigin,
    /// The share that it was exported as or imported from, or [`NOT_SHARED`].
    share: AtomicI32,
}

/// Where memory comes from. Exporting devices are numbered as in this process.
#[derive(Debug)]
enum MemoryOrigin {
    /// This process created it.
    Created,
    /// Imported from a process of this server: [`Ticket::exporter_number`] of the first ticket, or
    /// 0 if no ticket named the process.
    Server { exporter: u8, process: AtomicU32 },
    /// Imported from a device of another server, which has this super-pod id.
    OtherServer { exporter: u8, sdid: u32 },
}

/// [`PhysicalBlock::share`] of memory that is neither exported nor imported.
const NOT_SHARED: i32 = -1;

const OPERATION: &str = "create physical memory";
const IMPORT: &str = "import memory";

impl Device {
    /// Creates memory of the usual kind on the device: HBM in 2 MiB pages. `size` is a multiple of
    /// 2 MiB. The contents are undefined.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an impossible size; [`Error::OutOfMemory`] with the free memory for
    /// each size of pages; [`Error::Refused`] with the kernel's answer.
    #[doc(alias = "aclrtMallocPhysical")]
    #[doc(alias = "cuMemCreate")]
    pub fn create(&self, size: u64) -> Result<PhysicalMemory> {
        self.create_with(size, Kind::default())
    }

    /// Creates memory of a kind on the device.
    ///
    /// # Errors
    ///
    /// Those of [`Device::create`], and [`Error::Invalid`] for 1 GiB pages where the device has
    /// none.
    pub fn create_with(&self, size: u64, kind: Kind) -> Result<PhysicalMemory> {
        PhysicalMemory::create(&self.inner, size, kind, None)
    }
}

impl Host {
    /// Creates memory on the host, in 2 MiB pages. `size` is a multiple of 2 MiB.
    ///
    /// # Errors
    ///
    /// Those of [`Device::create`].
    pub fn create(&self, size: u64) -> Result<PhysicalMemory> {
        self.create_with(size, Kind { page: Page::Huge, memory: MemoryKind::Ddr })
    }

    /// Creates memory of a kind on the host. 1 GiB pages exist on few hosts, and only as
    /// [`MemoryKind::P2pDdr`].
    ///
    /// # Errors
    ///
    /// Those of [`Device::create_with`].
    pub fn create_with(&self, size: u64, kind: Kind) -> Result<PhysicalMemory> {
        PhysicalMemory::create(&self.inner, size, kind, None)
    }

    /// Creates memory on one NUMA node of the host.
    ///
    /// # Errors
    ///
    /// Those of [`Device::create_with`]; [`Error::Refused`] for a node that the host does not have.
    pub fn create_on_node(&self, size: u64, kind: Kind, node: u32) -> Result<PhysicalMemory> {
        if node == u32::MAX {
            return Err(Invalid::because(
                OPERATION,
                format!("{node} is not a NUMA node"),
                "The driver takes it for any node: use Host::create_with for that.",
            ));
        }
        PhysicalMemory::create(&self.inner, size, kind, Some(node))
    }
}

impl PhysicalMemory {
    pub(crate) fn create(
        device: &Arc<Live<DeviceInner>>,
        size: u64,
        kind: Kind,
        node: Option<u32>,
    ) -> Result<PhysicalMemory> {
        device.session.check_process()?;
        // The kernel itself counts pages in 32 bits.
        if size == 0 || size % kind.page.size() != 0 || size / kind.page.size() > u64::from(u32::MAX) {
            return Err(bad_size(size, kind.page));
        }
        if kind.page == Page::Giant && !device.has_giant_pages() {
            let problem = format!("{} has no 1 GiB pages", device.name());
            return Err(Invalid::because(OPERATION, problem, "Use pages of 2 MiB."));
        }
        match device.session.svm.mem_create(device.id, size, kind, node) {
            Ok(handle) => {
                let kind = (kind.page == Page::Giant, kind.memory.code());
                let block = PhysicalBlock::new(device, handle, size, kind, MemoryOrigin::Created, NOT_SHARED);
                Ok(PhysicalMemory { block: Arc::new(Live::new(block)) })
            }
            Err(refused) => Err(not_created(device, size, kind, node, refused)),
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.block.size
    }

    /// Size of its pages.
    pub fn page(&self) -> Page {
        self.block.page()
    }

    /// The kind of memory. For imported memory the driver reports it from 9.0.0 on. With an older
    /// driver it comes from the ticket, and without a ticket HBM is assumed.
    pub fn memory_kind(&self) -> MemoryKind {
        self.block.kind().memory
    }

    /// Where it is. Imported memory is where it was imported.
    pub fn location(&self) -> Location {
        if self.block.device.is_host() { Location::Host } else { Location::Device(LogicalId(self.block.device.id)) }
    }

    /// Whether it was imported from another process.
    pub fn is_imported(&self) -> bool {
        self.block.is_imported()
    }

    /// Whether this is the same memory as `other`, not only memory with the same contents.
    pub fn is_same(&self, other: &PhysicalMemory) -> bool {
        Arc::ptr_eq(&self.block, &other.block)
    }

    /// The session that the memory belongs to.
    pub fn session(&self) -> Session {
        Session { inner: self.block.device.session.clone() }
    }

    /// Releases the memory. Dropping the last reference releases it too, and logs errors.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] unless this is the last reference and the memory is not mapped;
    /// [`Error::Refused`] if the kernel refuses. The error returns the memory.
    #[doc(alias = "aclrtFreePhysical")]
    #[doc(alias = "cuMemRelease")]
    pub fn free(self) -> Result<(), Failed<PhysicalMemory>> {
        undo(self.block).map_err(|(error, block)| Failed { error, object: PhysicalMemory { block } })
    }
}

impl PhysicalBlock {
    /// Counts new memory of the session.
    fn new(
        device: &Arc<Live<DeviceInner>>,
        handle: Handle,
        size: u64,
        (giant, memory): (bool, u32),
        origin: MemoryOrigin,
        share: i32,
    ) -> PhysicalBlock {
        device.session.physical.fetch_add(size, Ordering::Relaxed);
        // A larger number is an unknown kind.
        let (giant, memory) = (AtomicBool::new(giant), AtomicU8::new(memory.min(u8::MAX.into()) as u8));
        let (device, share) = (device.clone(), AtomicI32::new(share));
        PhysicalBlock { device, size, handle, giant, memory, half_released: false, origin, share }
    }

    /// Memory that was just imported, with the details of its ticket.
    pub(crate) fn imported(
        device: &Arc<Live<DeviceInner>>,
        answer: &Imported,
        key: ImportKey,
        ticket: Option<&Ticket>,
    ) -> PhysicalBlock {
        let exporter = key.exporter as u8;
        // Tickets are for this server only.
        let process = AtomicU32::new(ticket.map_or(0, Ticket::exporter_number));
        let origin = match key.sdid {
            0 => MemoryOrigin::Server { exporter, process },
            sdid => MemoryOrigin::OtherServer { exporter, sdid },
        };
        let kind = (Page::from_code(answer.page) == Some(Page::Giant), answer.memory);
        let block = PhysicalBlock::new(device, answer.handle, answer.size, kind, origin, key.share as i32);
        if let Some(ticket) = ticket {
            block.take_over(ticket);
        }
        block
    }

    /// Refuses an import that cannot be mapped, and one that differs from its ticket.
    pub(crate) fn check_import(answer: &Imported, ticket: Option<&Ticket>) -> Result<()> {
        if Page::from_code(answer.page).is_none() {
            return Err(Invalid::because(
                IMPORT,
                "it is in the host's small pages",
                "This library maps pages of 2 MiB and 1 GiB: create the memory in such pages.",
            ));
        }
        if answer.size == 0 {
            return Err(Invalid::because(IMPORT, "the driver reports no pages", "Ask the exporter for a new ticket."));
        }
        match ticket {
            Some(ticket) if ticket.size != answer.size => Err(other_size(ticket.size, answer.size)),
            _ => Ok(()),
        }
    }

    /// The kind of memory, as far as it is known. HBM is assumed if the driver reports none or an
    /// unknown one.
    pub(crate) fn kind(&self) -> Kind {
        let memory = MemoryKind::from_code(self.memory.load(Ordering::Relaxed).into()).unwrap_or_default();
        Kind { page: self.page(), memory }
    }

    /// The size of its pages.
    pub(crate) fn page(&self) -> Page {
        if self.giant.load(Ordering::Relaxed) { Page::Giant } else { Page::Huge }
    }

    /// Compares an import with another ticket for it.
    pub(crate) fn agree(&self, ticket: &Ticket) -> Result<()> {
        if ticket.size != self.size {
            return Err(other_size(ticket.size, self.size));
        }
        // A share has one exporter. If two tickets name different ones, one of them lies.
        if let MemoryOrigin::Server { process, .. } = &self.origin {
            let exporter = ticket.exporter_number();
            let first = process.compare_exchange(0, exporter, Ordering::Relaxed, Ordering::Relaxed);
            if first.is_err_and(|known| known != exporter) {
                return Err(Invalid::because(
                    IMPORT,
                    format!(
                        "the ticket names process {} as the exporter, and an earlier ticket named another",
                        ticket.exporter
                    ),
                    "One of the tickets names a share of another process: accept tickets only from processes that \
                     you trust.",
                ));
            }
        }
        self.take_over(ticket);
        Ok(())
    }

    /// Takes from a ticket what the driver does not report: that a device's 2 MiB pages are parts
    /// of 1 GiB pages, which can only be mapped at whole GiB, and before 9.0.0 the kind of memory.
    fn take_over(&self, ticket: &Ticket) {
        if ticket.page == Page::Giant && self.size % Page::Giant.size() == 0 && !self.device.is_host() {
            self.giant.store(true, Ordering::Relaxed);
        }
        if !self.device.session.generation.delta().import_tells_memory {
            self.memory.store(ticket.memory.code() as u8, Ordering::Relaxed);
        }
    }

    /// The share that the memory was exported as.
    pub(crate) fn share(&self) -> Option<u32> {
        u32::try_from(self.share.load(Ordering::Acquire)).ok()
    }

    /// Remembers the share that the memory was exported as.
    pub(crate) fn set_share(&self, share: u32) {
        self.share.store(share as i32, Ordering::Release);
    }

    /// True if another process created it.
    pub(crate) fn is_imported(&self) -> bool {
        !matches!(self.origin, MemoryOrigin::Created)
    }

    /// True for host memory that was imported on a device. The driver has no DMA device to copy it.
    pub(crate) fn is_host_memory_on_a_device(&self) -> bool {
        match self.origin {
            MemoryOrigin::Created => false,
            MemoryOrigin::Server { exporter, .. } | MemoryOrigin::OtherServer { exporter, .. } => {
                !self.device.is_host() && u32::from(exporter) == HOST_ID
            }
        }
    }

    pub(crate) fn describe(&self) -> String {
        let imported = if self.is_imported() { "imported " } else { "" };
        format!("{imported}handle {} of {}, {}", self.handle.id, self.device.name(), Bytes(self.size))
    }

    /// Its key among the imports, if it is one.
    fn import_key(&self) -> Option<ImportKey> {
        let (exporter, sdid) = match self.origin {
            MemoryOrigin::Created => return None,
            MemoryOrigin::Server { exporter, .. } => (exporter, 0),
            MemoryOrigin::OtherServer { exporter, sdid } => (exporter, sdid),
        };
        Some(ImportKey { device: self.device.id, share: self.share()?, exporter: exporter.into(), sdid })
    }
}

impl Undo for PhysicalBlock {
    const OPERATION: &'static str = "release physical memory";

    fn session(&self) -> &SessionInner {
        &self.device.session
    }

    fn undo(&mut self) -> Result<()> {
        match self.device.session.release(self.handle, self.size, self.import_key()) {
            Ok(()) => Ok(()),
            Err(refused) => {
                self.half_released = true;
                Err(self.device.failed(refused, Self::OPERATION, self.describe()))
            }
        }
    }

    fn abandon(&mut self, error: Error) {
        let session = &self.device.session;
        // This process cannot use it any more, whether or not it is released later.
        if let Some(key) = self.import_key() {
            session.sharing.imports.vacate(&key);
        }
        if let Error::DeviceProcessDied { .. } = error {
            session.physical.fetch_sub(self.size, Ordering::Relaxed);
            return trace::warn(self.describe(), "memory went with its device process");
        }
        session.keep(Left::Memory { handle: self.handle, size: self.size }, error);
    }

    fn users(&self, others: usize) -> String {
        format!(
            "{others} other reference(s) to {} are alive: clones, mappings or copies. Drop them first.",
            self.describe()
        )
    }

    fn is_awaited(&self) -> bool {
        self.is_imported()
    }

    fn restore(block: &Arc<Live<PhysicalBlock>>) {
        if let Some(key) = block.import_key() {
            // A thread that imports the same memory would otherwise wait for the old reference.
            block.device.session.sharing.imports.fill(key, block);
        }
    }
}

fn bad_size(size: u64, page: Page) -> Error {
    let rule = match page {
        _ if size != 0 && size % page.size() == 0 => "The driver counts pages in 32 bits: ask for less.",
        Page::Huge => "Sizes are multiples of 2 MiB, and not 0.",
        Page::Giant => "Sizes of memory in 1 GiB pages are multiples of 1 GiB, and not 0.",
    };
    Invalid::because(OPERATION, format!("{} is not a size of memory", Bytes(size)), rule)
}

fn other_size(ticket: u64, driver: u64) -> Error {
    let problem = format!("the ticket says {ticket} bytes, the driver {driver}");
    Invalid::because(IMPORT, problem, "The ticket belongs to another export: get a new one.")
}

fn not_created(device: &DeviceInner, size: u64, kind: Kind, node: Option<u32>, refused: Box<Refused>) -> Error {
    if refused.errno == Errno::ENOMEM {
        let place = match node {
            _ if !device.is_host() => format!("device {}, {}", device.id, kind.memory),
            Some(node) => format!("the host, node {node}"),
            None => "the host".to_owned(),
        };
        let (free_huge, free_giant) = free_bytes(device, kind);
        return OutOfMemory {
            place,
            asked: size,
            page: kind.page,
            free_huge,
            free_giant,
            kernel_log: refused.kernel_log,
        }
        .into();
    }
    let page = Bytes(kind.page.size());
    let node = node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    let arguments = format!("size {}, pages of {page}, {}{node}", Bytes(size), kind.memory);
    device.failed(refused, OPERATION, arguments)
}

/// Free bytes in 2 MiB and in 1 GiB pages, if the driver reports them.
pub(crate) fn free_bytes(device: &DeviceInner, kind: Kind) -> (Option<u64>, Option<u64>) {
    if device.is_host() {
        return (host_available(), None);
    }
    let info = device.memory_info(kind.memory).ok();
    (info.map(|info| info.huge_free), info.map(|info| info.giant_free))
}

/// The memory that Linux estimates to be available. How much of it is in 2 MiB pages is unknown.
fn host_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}
