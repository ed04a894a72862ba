//! Physical memory: pages of a device's or the host's, that have no address until they are mapped.
//!
//! To the kernel it is a *handle*: a small number that means something only together with its side (host or device), its device, its
//! number of pages and the module it is accounted to, all of which must be repeated whenever it is used. A handle is released once, and
//! not while it is mapped; here that follows from ownership: every mapping keeps its memory alive, and the last owner releases it.

use crate::device::{Device, DeviceInner, Host, MemoryInfo};
use crate::discovery::LogicalId;
use crate::error::{Errno, Error, Failed, Invalid, OutOfMemory, Result, bytes};
use crate::session::Orphan;
use crate::session::call::{CREATE, RELEASE};
use crate::share::ImportKey;
use ascend_ioctl::svm::{
    GIANT_PAGE, HUGE_PAGE, MEMORY_DDR, MEMORY_HBM, MEMORY_P2P_DDR, MEMORY_P2P_HBM, MemCreate, MemImport, MemRelease,
    PAGE_GIANT, PAGE_HUGE, PAGE_NORMAL, SIDE_DEVICE, SIDE_HOST, SIDE_HOST_NUMA,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Size of the pages that memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Page {
    /// 2 MiB.
    #[default]
    Huge,
    /// 1 GiB, where the device has them: [`Capabilities::giant_pages`](crate::Capabilities::giant_pages).
    Giant,
}

impl Page {
    /// In bytes.
    pub const fn size(self) -> u64 {
        match self {
            Page::Huge => HUGE_PAGE,
            Page::Giant => GIANT_PAGE,
        }
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Page::Huge => PAGE_HUGE,
            Page::Giant => PAGE_GIANT,
        }
    }
}

/// Which memory of a device, or of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's high-bandwidth memory.
    #[default]
    Hbm,
    /// DDR.
    Ddr,
    /// High-bandwidth memory that peers can reach.
    P2pHbm,
    /// DDR that peers can reach.
    P2pDdr,
}

impl MemoryKind {
    pub(crate) const fn code(self) -> u32 {
        match self {
            MemoryKind::Hbm => MEMORY_HBM,
            MemoryKind::Ddr => MEMORY_DDR,
            MemoryKind::P2pHbm => MEMORY_P2P_HBM,
            MemoryKind::P2pDdr => MEMORY_P2P_DDR,
        }
    }

    /// The kind behind the driver's number; HBM if the driver did not tell, or tells something newer.
    const fn from_code(code: u32) -> MemoryKind {
        match code {
            MEMORY_DDR => MemoryKind::Ddr,
            MEMORY_P2P_HBM => MemoryKind::P2pHbm,
            MEMORY_P2P_DDR => MemoryKind::P2pDdr,
            _ => MemoryKind::Hbm,
        }
    }

    /// QUERY_MEM_USEDINFO counts differently.
    const fn query(self) -> u32 {
        match self {
            MemoryKind::Ddr => 1,
            MemoryKind::Hbm => 2,
            MemoryKind::P2pDdr => 3,
            MemoryKind::P2pHbm => 4,
        }
    }

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Hbm => "HBM",
            MemoryKind::Ddr => "DDR",
            MemoryKind::P2pHbm => "P2P HBM",
            MemoryKind::P2pDdr => "P2P DDR",
        }
    }
}

/// What kind of memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Kind {
    /// Size of its pages.
    pub page: Page,
    /// Which memory.
    pub memory: MemoryKind,
}

impl Kind {
    /// The sizes that can be asked for.
    #[doc(alias = "aclrtMemGetAllocationGranularity")]
    #[doc(alias = "cuMemGetAllocationGranularity")]
    pub const fn granularity(self) -> Granularity {
        Granularity { minimum: self.page.size(), recommended: self.page.size() }
    }
}

/// Sizes of physical memory are multiples of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Granularity {
    /// Of this at least.
    pub minimum: u64,
    /// Better of this.
    pub recommended: u64,
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Location {
    /// On a device.
    Device(LogicalId),
    /// On the host.
    Host,
}

/// Physical memory. A counted reference: clones and mappings share it, and the last one releases it.
#[derive(Debug, Clone)]
pub struct PhysicalMemory {
    pub(crate) block: Arc<Block>,
}

/// A handle and what must be repeated with it.
#[derive(Debug)]
pub(crate) struct Block {
    /// The device, or the host: for imports the importing one.
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) size: u64,
    /// As the kernel counts; see [`Block::pages`].
    pages: u32,
    pub(crate) id: i32,
    pub(crate) module: u32,
    pub(crate) page: Page,
    pub(crate) memory: MemoryKind,
    /// The page code to repeat when mapping.
    pub(crate) page_code: u8,
    pub(crate) imported: bool,
    /// Whether the kernel still has it.
    live: bool,
    /// Whether a release was refused: the kernel may have begun it, and would crash at the release of such memory once it was exported.
    pub(crate) half_released: bool,
    /// The exporting device of an import, in this process's numbering.
    exporter: u8,
    /// Super-pod id of the exporter of an import from another server, 0 on this one.
    exporter_sdid: u32,
    /// The share that it was exported as, or imported from; negative if neither.
    share: AtomicI32,
}

/// [`Block::share`] of memory that is not shared.
const NOT_SHARED: i32 = -1;

/// Whom the vendor's tools account our memory to: the number for user programs.
pub(crate) const MODULE: u32 = 33;

const OPERATION: &str = "create physical memory";

impl Device {
    /// Creates memory on the device, of its usual kind: HBM in 2 MiB pages. `size` is a multiple of 2 MiB. What it contains is not known.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a size that cannot be; [`Error::OutOfMemory`] with what is free, in which pages; [`Error::Refused`] with what the kernel says.
    #[doc(alias = "aclrtMallocPhysical")]
    #[doc(alias = "cuMemCreate")]
    #[inline]
    pub fn create(&self, size: u64) -> Result<PhysicalMemory> {
        self.create_with(size, Kind::default())
    }

    /// Creates memory of a kind on the device.
    #[inline]
    pub fn create_with(&self, size: u64, kind: Kind) -> Result<PhysicalMemory> {
        PhysicalMemory::create(&self.inner, size, kind, SIDE_DEVICE, 0)
    }

    /// How much memory of a kind the device has, and how much is free.
    #[doc(alias = "aclrtGetMemInfo")]
    #[doc(alias = "cuMemGetInfo")]
    pub fn memory_info(&self, memory: MemoryKind) -> Result<MemoryInfo> {
        self.inner.memory_info(memory.query())
    }
}

impl Host {
    /// Creates memory on the host, in 2 MiB pages. `size` is a multiple of 2 MiB.
    pub fn create(&self, size: u64) -> Result<PhysicalMemory> {
        self.create_with(size, Kind { page: Page::Huge, memory: MemoryKind::Ddr })
    }

    /// Creates memory of a kind on the host. 1 GiB pages exist on few hosts, and only as [`MemoryKind::P2pDdr`].
    pub fn create_with(&self, size: u64, kind: Kind) -> Result<PhysicalMemory> {
        PhysicalMemory::create(&self.inner, size, kind, SIDE_HOST, 0)
    }

    /// Creates memory on one NUMA node of the host.
    pub fn create_on_node(&self, size: u64, kind: Kind, node: u32) -> Result<PhysicalMemory> {
        PhysicalMemory::create(&self.inner, size, kind, SIDE_HOST_NUMA, node)
    }
}

impl PhysicalMemory {
    #[inline]
    fn create(device: &Arc<DeviceInner>, size: u64, kind: Kind, side: u32, node: u32) -> Result<PhysicalMemory> {
        let svm = &device.session.svm;
        svm.check_process()?;
        if size == 0 || size % kind.page.size() != 0 {
            return Err(bad_size(size, kind.page));
        }
        if kind.page == Page::Giant && !device.has_giant_pages() {
            return Err(no_giant_pages(device));
        }
        let wanted = MemCreate {
            numa_node: node,
            size,
            side,
            module: MODULE,
            page: kind.page.code(),
            memory: kind.memory.code(),
            ..Default::default()
        };
        match svm.call(CREATE, device.id, size, &wanted) {
            Ok(created) => Ok(PhysicalMemory {
                block: Arc::new(Block {
                    device: device.clone(),
                    size,
                    // The kernel itself sends page counts as 32 bits.
                    pages: created.pages as u32,
                    id: created.id,
                    module: MODULE,
                    page: kind.page,
                    memory: kind.memory,
                    // To the device a 1 GiB page is a block of 2 MiB pages; host memory keeps its kind.
                    page_code: if side == SIDE_DEVICE { PAGE_HUGE as u8 } else { kind.page.code() as u8 },
                    imported: false,
                    live: true,
                    half_released: false,
                    exporter: 0,
                    exporter_sdid: 0,
                    share: AtomicI32::new(NOT_SHARED),
                }),
            }),
            Err(errno) => Err(not_created(device, size, kind, side, node, errno)),
        }
    }

    /// Size in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.block.size
    }

    /// Size of its pages.
    pub fn page(&self) -> Page {
        self.block.page
    }

    /// Which memory it is. For imported memory the driver tells from 9.0.0 on; before, a ticket does, and without one HBM is assumed.
    pub fn memory_kind(&self) -> MemoryKind {
        self.block.memory
    }

    /// Where it is; imported memory is where it was imported.
    pub fn location(&self) -> Location {
        if self.block.is_host() { Location::Host } else { Location::Device(LogicalId(self.block.device.id)) }
    }

    /// Whether it was imported from another process.
    pub fn is_imported(&self) -> bool {
        self.block.imported
    }

    /// Whether this is the same memory as `other`, not only memory with the same contents.
    pub fn is_same(&self, other: &PhysicalMemory) -> bool {
        Arc::ptr_eq(&self.block, &other.block)
    }

    /// Releases the memory, and tells what went wrong. It must be the last reference, and not mapped; otherwise it is handed back.
    /// (Dropping the last reference releases it too, and logs what goes wrong.)
    #[doc(alias = "aclrtFreePhysical")]
    #[doc(alias = "cuMemRelease")]
    #[inline]
    pub fn free(self) -> Result<(), Failed<PhysicalMemory>> {
        if let Err(error) = self.block.device.session.svm.check_process() {
            return Err(Failed { error, object: self });
        }
        match Arc::try_unwrap(self.block) {
            Ok(mut block) => match block.release() {
                Ok(()) => Ok(()),
                Err(errno) => {
                    let error = block.device.failed("release physical memory", RELEASE, errno, block.describe());
                    let block = Arc::new(block);
                    if let Some(key) = block.import_key() {
                        // The old reference is gone: whoever imports the same would wait for this one's end.
                        block.device.session.sharing.imports.fill(key, &block);
                    }
                    Err(Failed { error, object: PhysicalMemory { block } })
                }
            },
            Err(block) => {
                let users = format!(
                    "{} other reference(s) to {} are alive: clones, mappings or copies; drop them first",
                    Arc::strong_count(&block) - 1,
                    block.describe()
                );
                let error = Error::InUse { operation: "release physical memory", users };
                Err(Failed { error, object: PhysicalMemory { block } })
            }
        }
    }
}

impl Block {
    /// Memory that was just imported, and its page and memory kinds as the exporter says. If it is of a kind that cannot be mapped here it is given back.
    ///
    /// The driver does not tell that a device's 2 MiB pages are parts of 1 GiB ones, which can be mapped at whole GiBs only, and before 9.0.0 not which
    /// memory it is.
    #[inline]
    pub(crate) fn imported(
        device: &Arc<DeviceInner>,
        answer: &MemImport,
        key: ImportKey,
        told: Option<(u32, u32)>,
    ) -> Result<Arc<Block>> {
        // A device counts 1 GiB pages in 2 MiB ones; the host does not.
        let unit = if answer.page == PAGE_GIANT && device.is_host() { GIANT_PAGE } else { HUGE_PAGE };
        let size = answer.pages.saturating_mul(unit);
        let (mut page, mut memory) = (answer.page, answer.memory);
        if let Some((page_told, memory_told)) = told {
            if page_told == PAGE_GIANT && size % GIANT_PAGE == 0 && !device.is_host() {
                page = PAGE_GIANT;
            }
            if !device.session.driver().1.delta().import_tells_memory {
                memory = memory_told;
            }
        }
        let block = Arc::new(Block {
            device: device.clone(),
            size,
            pages: answer.pages as u32,
            id: answer.id,
            module: answer.module,
            page: if page == PAGE_GIANT { Page::Giant } else { Page::Huge },
            memory: MemoryKind::from_code(memory),
            page_code: answer.page as u8,
            imported: true,
            live: true,
            half_released: false,
            exporter: key.exporter as u8,
            exporter_sdid: key.sdid,
            share: AtomicI32::new(key.share as i32),
        });
        if answer.page == PAGE_NORMAL { Err(normal_pages()) } else { Ok(block) }
    }

    /// The share that the memory was exported as.
    pub(crate) fn share(&self) -> Option<u32> {
        u32::try_from(self.share.load(Ordering::Acquire)).ok()
    }

    /// Remembers the share that the memory was exported as.
    pub(crate) fn set_share(&self, share: u32) {
        self.share.store(share as i32, Ordering::Release);
    }

    /// Side to repeat with the handle; NUMA memory is host memory.
    #[inline]
    pub(crate) fn side(&self) -> u32 {
        if self.is_host() { SIDE_HOST } else { SIDE_DEVICE }
    }

    #[inline]
    pub(crate) fn is_host(&self) -> bool {
        self.device.is_host()
    }

    /// Number of pages to repeat with the handle.
    #[inline]
    pub(crate) fn pages(&self) -> u64 {
        u64::from(self.pages)
    }

    pub(crate) fn describe(&self) -> String {
        let imported = if self.imported { "imported " } else { "" };
        format!("{imported}handle {} of {}, {}", self.id, self.device.name(), bytes(self.size))
    }

    #[inline]
    fn release(&mut self) -> std::result::Result<(), Errno> {
        let released = self.device.session.svm.call(RELEASE, self.device.id, self.size, &self.release_arg());
        self.half_released = released.is_err();
        released?;
        self.live = false;
        self.vacate();
        Ok(())
    }

    /// Its place among the imports, if it is one.
    fn import_key(&self) -> Option<ImportKey> {
        let share = self.share().filter(|_| self.imported)?;
        Some(ImportKey { device: self.device.id, exporter: self.exporter.into(), share, sdid: self.exporter_sdid })
    }

    /// Lets the same be imported again.
    fn vacate(&self) {
        if let Some(key) = self.import_key() {
            self.device.session.sharing.imports.vacate(&key);
        }
    }

    fn release_arg(&self) -> MemRelease {
        MemRelease { id: self.id, side: self.side(), pages: self.pages(), ..Default::default() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let session = &self.device.session;
        if !self.live || session.svm.guard.in_child() {
            return;
        }
        let Err(errno) = self.release() else { return };
        // Whatever becomes of it, nobody here can use it any more.
        self.vacate();
        let session = &self.device.session;
        if errno == Errno::ESRCH && !self.is_host() {
            tracing::warn!(device = self.device.id, handle = self.id, "memory went with its device process");
            return;
        }
        let orphan = Orphan::Memory(self.device.id, self.release_arg());
        session.adopt(orphan, "release physical memory", RELEASE, errno);
    }
}

#[cold]
fn bad_size(size: u64, page: Page) -> Error {
    let rule = match page {
        Page::Huge => "sizes are multiples of 2 MiB, and not 0",
        Page::Giant => "sizes of memory in 1 GiB pages are multiples of 1 GiB, and not 0",
    };
    Invalid::because(OPERATION, format!("{} is not a size of memory", bytes(size)), rule)
}

#[cold]
fn normal_pages() -> Error {
    Invalid::because(
        "import memory",
        "it is in pages of the host's size",
        "this library maps memory in pages of 2 MiB and 1 GiB: create it in such pages",
    )
}

#[cold]
fn no_giant_pages(device: &DeviceInner) -> Error {
    Invalid::because(OPERATION, format!("{} has no 1 GiB pages", device.name()), "use pages of 2 MiB")
}

#[cold]
fn not_created(device: &DeviceInner, size: u64, kind: Kind, side: u32, node: u32, errno: Errno) -> Error {
    if errno == Errno::ENOMEM {
        let kernel_log = device.session.svm.sentences();
        let (place, info) = if device.is_host() {
            let place = if side == SIDE_HOST_NUMA { format!("the host, node {node}") } else { "the host".to_owned() };
            (place, None)
        } else {
            let info = device.memory_info(kind.memory.query()).ok();
            (format!("device {}, {}", device.id, kind.memory.name()), info)
        };
        return OutOfMemory {
            place,
            asked: size,
            page: kind.page.size(),
            free_huge: info.map(|info| info.huge_free).or_else(|| device.is_host().then(host_available).flatten()),
            free_giant: info.map(|info| info.giant_free),
            kernel_log,
        }
        .into();
    }
    let arguments = format!(
        "size {}, pages of {}, {}{}",
        bytes(size),
        bytes(kind.page.size()),
        kind.memory.name(),
        if side == SIDE_HOST_NUMA { format!(", NUMA node {node}") } else { String::new() }
    );
    device.failed(OPERATION, CREATE, errno, arguments)
}

/// What Linux believes can be allocated; how much of it is in 2 MiB pieces it does not say.
fn host_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}
