//! The module SVM: memory. One method per command, under the command's name.
//!
//! All commands share one argument struct. The kernel ignores the size in the request, copies *its
//! own* size in and out, and rewrites the head. So every call builds a new argument in a zeroed
//! buffer that is larger than any known kernel's. A command is executed even if its answer cannot
//! be written back, so the buffer is always our own writable memory.
//!
//! The methods take and return plain values. A refusal is a [`Refused`] with the kernel's own
//! messages; the caller adds what it was doing.

use super::davinci::{DavinciFile, module};
use super::log_page::LogPage;
use super::segments::Segments;
use crate::error::{Errno, KernelResult, Refused, Result, SystemCall};
use crate::kind::{Kind, MemoryKind};
use crate::trace::{Call, traced};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Arg, Para, Request, request};
pub(crate) use ascend_ioctl::svm::{
    BATCH, DYNAMIC_START, GIANT_PAGE, HEAP_UNIT, HOST_AGENT_ID, HOST_ID, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX,
    SVM_START, Segment, TRUST_LIST,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The module that our memory is accounted to in the vendor's tools: user programs.
const MODULE: u32 = 33;

/// Room for this many segments. The newest known driver has 4.
const SEGMENTS: usize = 64;

/// Size of the buffer. Known kernels copy 344 bytes; a newer one may copy more.
const ROOM: usize = 512;

/// The buffer of one command.
#[repr(C, align(16))]
#[derive(FromBytes)]
struct Buffer {
    arg: Arg,
    room: [u64; (ROOM - svm::ARG_SIZE) / 8],
    #[cfg(debug_assertions)]
    canary: [u64; 2],
}

#[cfg(debug_assertions)]
const CANARY: [u64; 2] = [0x5EED_CA9A_5EED_CA9A; 2];

/// A command with its request value in the present driver.
#[derive(Debug, Clone, Copy)]
struct Numbered<A> {
    request: Request<A>,
    word: u32,
}

/// A command that has the same number in every generation; others do not compile.
#[allow(clippy::panic, reason = "called in const blocks only, where a panic is a compile error")]
const fn stable<A>(request: Request<A>) -> Numbered<A> {
    match request.stable() {
        Some(word) => Numbered { request, word },
        None => panic!("the command's number depends on the generation"),
    }
}

/// A file of the memory module, and the page in which the kernel explains its answers.
#[derive(Debug)]
pub(crate) struct Svm {
    // Dropped before the log page, so that the last command can be explained too.
    file: DavinciFile,
    log: LogPage,
}

/// The kernel's name for physical memory: an id that means something only together with the other
/// fields, which must be repeated with every command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Handle {
    /// Logical id or [`HOST_ID`]. For imports, the importing device.
    pub(crate) device: u32,
    pub(crate) id: i32,
    /// As the owner counts: a device counts a 1 GiB page as 512 pages of 2 MiB, the host as one.
    pages: u32,
    /// Module ids have 8 bits in the driver's own flags.
    module: u16,
    /// The page code to repeat when mapping.
    page: u8,
}

impl Handle {
    /// The side to repeat. NUMA memory is host memory.
    fn side(self) -> u32 {
        if self.device == HOST_ID { svm::SIDE_HOST } else { svm::SIDE_DEVICE }
    }
}

/// What a heap is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeapKind {
    /// For reservations, which handles are mapped into.
    Reserve,
    /// For allocations that the driver itself populates, in 2 MiB pages or in small ones.
    Managed { huge: bool },
}

/// Length of a memory's name with its NUL.
pub(crate) const NAME: usize = 65;

/// Most processes that one IPC_MEM_SET_PID lists.
pub(crate) const NAME_LIST: usize = 31;

/// The answer of IPC_MEM_QUERY.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameInfo {
    /// In bytes.
    pub(crate) size: u64,
    /// In 2 MiB pages.
    pub(crate) huge: bool,
    /// Physical id of its device.
    pub(crate) physical: u32,
}

/// The kind of an import, as its handle says.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ImportKind {
    /// With the super-pod id of the importing device.
    Plain { sdid: u32 },
    /// With the super-pod id and the physical id of the exporting device, which may be on another
    /// server.
    Fabric { sdid: u32, physical: u32 },
}

/// The answer of MEM_IMPORT.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Imported {
    pub(crate) handle: Handle,
    /// In bytes. Saturates if the count of pages is impossible.
    pub(crate) size: u64,
    /// Code of the page kind, possibly one that this library does not use.
    pub(crate) page: u32,
    /// Code of the memory kind. Reported from 9.0.0 on.
    pub(crate) memory: u32,
}

/// The host's pages, from the answer of INIT_PROCESS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostPages {
    pub(crate) page_size: u32,
    pub(crate) giant_pages: bool,
}

/// What a device can do, as reported when it was set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Capabilities {
    /// Device memory can be made visible to the CPU through the device's PCI window.
    pub cpu_access: bool,
    /// The same for device memory in 2 MiB pages.
    pub cpu_access_huge: bool,
    /// Device memory can be mapped at host addresses.
    pub device_memory_on_host: bool,
    /// Memory in 1 GiB pages.
    pub giant_pages: bool,
    /// Addresses outside the driver's fixed range can be mapped.
    pub remote_map: bool,
    /// Memory can be shared over the external bus.
    pub share_over_external_bus: bool,
    /// The device can use the host's addresses (from driver 9.0.0 on).
    pub host_addresses: bool,
}

/// How much memory of a kind a device has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Total, in 2 MiB pages.
    pub huge_total: u64,
    /// Free, in 2 MiB pages.
    pub huge_free: u64,
    /// Total, in 1 GiB pages.
    pub giant_total: u64,
    /// Free, in 1 GiB pages.
    pub giant_free: u64,
    /// Total, in small pages.
    pub normal_total: u64,
    /// Free, in small pages.
    pub normal_free: u64,
}

/// The direction of a copy, as MEMCPY detected it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// **Not done**, because both addresses are host memory.
    HostToHost,
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    /// A number that no known driver returns.
    Other(u32),
}

impl Direction {
    fn of(code: u32) -> Direction {
        match code {
            svm::COPY_HOST_TO_HOST => Direction::HostToHost,
            svm::COPY_HOST_TO_DEVICE => Direction::HostToDevice,
            svm::COPY_DEVICE_TO_HOST => Direction::DeviceToHost,
            svm::COPY_DEVICE_TO_DEVICE => Direction::DeviceToDevice,
            other => Direction::Other(other),
        }
    }
}

impl Svm {
    /// Opens a file. It has no session before INIT_PROCESS.
    pub(crate) fn open() -> Result<Svm> {
        Ok(Svm { file: DavinciFile::open(module::SVM)?, log: LogPage::None })
    }

    /// Maps the driver's address segments in the driver's order.
    pub(crate) fn map_segments(&self, segments: &[Segment]) -> KernelResult<Segments> {
        Segments::map(self.file.fd(), segments)
    }

    /// Maps the page in which the kernel explains its errors.
    pub(crate) fn map_log_page(&mut self) {
        self.log = LogPage::map();
    }

    /// ALLOC_PROC_STRUCT, by its number in a generation.
    pub(crate) fn alloc_proc_struct(&self, generation: Generation) -> KernelResult<()> {
        self.call_in(generation, request::ALLOC_PROC_STRUCT, &svm::NoArgument).map(drop)
    }

    /// GET_MMAP_INFO, by its number in a generation: the address segments. Works on any file.
    pub(crate) fn get_mmap_info(&self, generation: Generation) -> KernelResult<Vec<Segment>> {
        let mut segments = [Segment::default(); SEGMENTS];
        let array = (&raw mut segments).expose_provenance() as u64;
        let info = svm::MmapInfo { segments: SEGMENTS as u32, array, ..Default::default() };
        let count = self.call_in(generation, request::GET_MMAP_INFO, &info)?.segments as usize;
        // SAFETY: a live local; the driver wrote it through the address in the argument, so it is
        // read as memory that others write.
        let segments = unsafe { (&raw const segments).read_volatile() };
        // The driver refuses if there is too little room. A larger count is cut here, and the
        // caller then recognises no known generation.
        Ok(segments.into_iter().take(count).collect())
    }

    /// INIT_PROCESS: makes the file this process's session. EAGAIN if a signal came.
    pub(crate) fn init_process(&self) -> KernelResult<HostPages> {
        let init = self.call(const { stable(request::INIT_PROCESS) }, 0, 0, &svm::InitProcess::default())?;
        Ok(HostPages { page_size: init.host_page_size, giant_pages: init.host_giant_page != 0 })
    }

    /// SETUP_DEVICE: ties this process to its counterpart on the device.
    pub(crate) fn setup_device(&self, device: u32) -> KernelResult<Capabilities> {
        // An address that is not page-aligned means: no statistics.
        let wanted = svm::SetupDevice { stats_address: 1, ..Default::default() };
        let setup = self.call(const { stable(request::SETUP_DEVICE) }, device, 0, &wanted)?;
        Ok(Capabilities {
            cpu_access: setup.bar_memory != 0,
            cpu_access_huge: setup.bar_huge_memory != 0,
            device_memory_on_host: setup.device_memory_on_host != 0,
            giant_pages: setup.giant_page != 0,
            remote_map: setup.support_remote_mmap != 0,
            share_over_external_bus: setup.support_shmem_map_exbus != 0,
            host_addresses: setup.host_uva != 0,
        })
    }

    /// PREPARE_CLOSE_DEVICE: refused while asynchronous copies run.
    pub(crate) fn prepare_close_device(&self, device: u32) -> KernelResult<()> {
        self.call(const { stable(request::PREPARE_CLOSE_DEVICE) }, device, 0, &svm::NoArgument).map(drop)
    }

    /// CLOSE_DEVICE: waits until the counterpart is gone, and releases the device's memory.
    pub(crate) fn close_device(&self, device: u32) -> KernelResult<()> {
        self.call(const { stable(request::CLOSE_DEVICE) }, device, 0, &svm::NoArgument).map(drop)
    }

    /// UPDATE_HEAP: enables or disables a heap. `index` counts GiB from the start of the SVM
    /// segment.
    pub(crate) fn update_heap(&self, enable: bool, kind: HeapKind, index: u32, size: u64) -> KernelResult<()> {
        let operation = if enable { svm::HEAP_ENABLE } else { svm::HEAP_DISABLE };
        let (kind, sub_kind) = match kind {
            HeapKind::Reserve => (svm::HEAP_HUGE, svm::SUB_RESERVE),
            HeapKind::Managed { huge: true } => (svm::HEAP_HUGE, svm::SUB_SVM),
            HeapKind::Managed { huge: false } => (svm::HEAP_CHUNK, svm::SUB_SVM),
        };
        let heap = svm::UpdateHeap { operation, kind, sub_kind, index, size };
        self.call(const { stable(request::UPDATE_HEAP) }, 0, size, &heap).map(drop)
    }

    /// ALLOC: makes a reservation inside a heap.
    pub(crate) fn alloc(&self, address: u64, size: u64) -> KernelResult<()> {
        self.call(const { stable(request::ALLOC) }, 0, size, &svm::Alloc { address, size }).map(drop)
    }

    /// FREE_PAGES: frees the reservation that starts at an address; `size` is for the trace.
    pub(crate) fn free_pages(&self, address: u64, size: u64) -> KernelResult<()> {
        self.call(const { stable(request::FREE_PAGES) }, 0, size, &svm::FreePages { address }).map(drop)
    }

    /// MEM_CREATE: physical memory on a device or on the host, there perhaps on one NUMA node.
    pub(crate) fn mem_create(
        &self,
        device: u32,
        size: u64,
        kind: Kind,
        numa_node: Option<u32>,
    ) -> KernelResult<Handle> {
        let side = match numa_node {
            Some(_) => svm::SIDE_HOST_NUMA,
            None if device == HOST_ID => svm::SIDE_HOST,
            None => svm::SIDE_DEVICE,
        };
        let wanted = svm::MemCreate {
            numa_node: numa_node.unwrap_or(0),
            size,
            side,
            module: MODULE,
            page: kind.page.code(),
            memory: kind.memory.code(),
            ..Default::default()
        };
        let created = self.call(const { stable(request::MEM_CREATE) }, device, size, &wanted)?;
        // A device takes a 1 GiB page for a block of 2 MiB pages. Host memory keeps its kind.
        let page = if side == svm::SIDE_DEVICE { svm::PAGE_HUGE } else { kind.page.code() };
        // The kernel itself passes page counts as 32 bits.
        Ok(Handle { device, id: created.id, pages: created.pages as u32, module: MODULE as u16, page: page as u8 })
    }

    /// MEM_RELEASE: refused while the memory is mapped. `size` is for the trace.
    pub(crate) fn mem_release(&self, handle: Handle, size: u64) -> KernelResult<()> {
        let release =
            svm::MemRelease { id: handle.id, side: handle.side(), pages: handle.pages.into(), ..Default::default() };
        self.call(const { stable(request::MEM_RELEASE) }, handle.device, size, &release).map(drop)
    }

    /// MEM_MAP: the beginning of a handle at an address inside one reservation.
    pub(crate) fn mem_map(&self, handle: Handle, address: u64, size: u64) -> KernelResult<()> {
        let map = svm::MemMap {
            address,
            size,
            id: handle.id,
            side: handle.side(),
            page: handle.page.into(),
            module: handle.module.into(),
            pages: handle.pages.into(),
        };
        self.call(const { stable(request::MEM_MAP) }, handle.device, size, &map).map(drop)
    }

    /// MEM_UNMAP: the whole mapping that starts at an address. `size` is for the trace.
    pub(crate) fn mem_unmap(&self, address: u64, size: u64) -> KernelResult<()> {
        let unmap = svm::MemUnmap { address, ..Default::default() };
        // The kernel converts the id in the head but does not use it; the host's id always
        // converts.
        self.call(const { stable(request::MEM_UNMAP) }, HOST_ID, size, &unmap).map(drop)
    }

    /// MEM_SET_ACCESS: access of a device or of the CPU to one whole mapping. Never with type 0,
    /// which leads the kernel into a panic.
    pub(crate) fn mem_set_access(&self, address: u64, size: u64, to: u32) -> KernelResult<()> {
        let access = svm::MemAccess { address, size, device: to, access: svm::ACCESS_READ_WRITE };
        self.call(const { stable(request::MEM_SET_ACCESS) }, HOST_ID, size, &access).map(drop)
    }

    /// MEM_GET_ACCESS: whether a device has access to a mapping.
    pub(crate) fn mem_get_access(&self, address: u64, size: u64, of: u32) -> KernelResult<bool> {
        let query = svm::MemAccess { address, size, device: of, access: svm::ACCESS_NONE };
        let answer = self.call(const { stable(request::MEM_GET_ACCESS) }, HOST_ID, size, &query)?;
        Ok(answer.access != svm::ACCESS_NONE)
    }

    /// PREFETCH: makes a peer build its table of a mapping's pages.
    pub(crate) fn prefetch(&self, device: u32, address: u64, size: u64) -> KernelResult<()> {
        let advise = svm::Advise { address, size, ..Default::default() };
        self.call(const { stable(request::PREFETCH) }, device, size, &advise).map(drop)
    }

    /// QUERY_MEM_USEDINFO: how much memory of a kind a device has.
    pub(crate) fn query_mem_usedinfo(&self, device: u32, memory: MemoryKind) -> KernelResult<MemoryInfo> {
        let query = svm::MemUsedInfo { memory: memory.query(), ..Default::default() };
        let info = self.call(const { stable(request::QUERY_MEM_USEDINFO) }, device, 0, &query)?;
        Ok(MemoryInfo {
            huge_total: info.huge_total_size,
            huge_free: info.huge_free_size,
            giant_total: info.giant_total_size,
            giant_free: info.giant_free_size,
            normal_total: info.normal_total_size,
            normal_free: info.normal_free_size,
        })
    }

    /// MEM_EXPORT: makes a handle importable, once. Returns the number of the share.
    pub(crate) fn mem_export(&self, handle: Handle, size: u64) -> KernelResult<u32> {
        let wanted = svm::MemExport { side: handle.side() as i32, id: handle.id, ..Default::default() };
        let exported = self.call(const { stable(request::MEM_EXPORT) }, handle.device, size, &wanted)?;
        Ok(exported.share as u32)
    }

    /// MEM_IMPORT: memory that another process exported, on a device or on the host. `exporter` is
    /// the exporting device in this process's numbering, or [`HOST_ID`]; `size` is for the trace.
    pub(crate) fn mem_import(
        &self,
        device: u32,
        share: u32,
        exporter: u32,
        kind: ImportKind,
        size: u64,
    ) -> KernelResult<Imported> {
        let (code, sdid, physical) = match kind {
            ImportKind::Plain { sdid } => (svm::HANDLE_NONE, sdid, 0),
            ImportKind::Fabric { sdid, physical } => (svm::HANDLE_FABRIC, sdid, physical),
        };
        let wanted = svm::MemImport {
            share: share as i32,
            sdid,
            exporter,
            exporter_physical: physical,
            kind: code,
            ..Default::default()
        };
        let answer = self.call(const { stable(request::MEM_IMPORT) }, device, size, &wanted)?;
        // A device's 1 GiB page is a block of 2 MiB pages, whoever imports it.
        let (unit, page) = match exporter {
            // The host counts in pages, whoever imports them (`devmm_ioctl_mem_import_local_server`
            // passes on the exporter's count).
            HOST_ID if answer.page == svm::PAGE_GIANT => (GIANT_PAGE, answer.page),
            HOST_ID => (HUGE_PAGE, answer.page),
            _ => (HUGE_PAGE, answer.page.min(svm::PAGE_HUGE)),
        };
        Ok(Imported {
            handle: Handle {
                device,
                id: answer.id,
                pages: answer.pages as u32,
                module: answer.module as u16,
                page: page as u8,
            },
            size: answer.pages.saturating_mul(unit),
            page: answer.page,
            memory: answer.memory,
        })
    }

    /// MEM_SET_PID: adds processes to a share's trust list, at most [`TRUST_LIST`].
    pub(crate) fn mem_set_pid(&self, device: u32, share: u32, tgids: &[i32]) -> KernelResult<()> {
        let list = svm::MemSetPid {
            share: share as i32,
            count: tgids.len() as u32,
            // The kernel reads them during the call, while they are borrowed.
            pids: tgids.as_ptr().expose_provenance() as u64,
        };
        self.call(const { stable(request::MEM_SET_PID) }, device, 0, &list).map(drop)
    }

    /// MEM_SET_ATTR: turns a share's trust list off. The kernel never turns it on again, but
    /// answers that request differently to the exporter (EOPNOTSUPP) and to others.
    pub(crate) fn mem_set_attr(&self, device: u32, share: u32, trust_list: bool) -> KernelResult<()> {
        let value = svm::ShareAttr { no_trust_list: u32::from(!trust_list), ..Default::default() };
        let attribute = svm::MemSetAttr { share: share as i32, kind: 0, value };
        self.call(const { stable(request::MEM_SET_ATTR) }, device, 0, &attribute).map(drop)
    }

    /// MEM_GET_ATTR: whether a share has a trust list.
    pub(crate) fn mem_get_attr(&self, exporter: u32, share: u32) -> KernelResult<bool> {
        let query = svm::MemGetAttr { share: share as i32, exporter, ..Default::default() };
        let answer = self.call(const { stable(request::MEM_GET_ATTR) }, exporter, 0, &query)?;
        Ok(answer.value.no_trust_list == 0)
    }

    /// IPC_MEM_CREATE: names the device memory at an address.
    pub(crate) fn ipc_mem_create(&self, device: u32, address: u64, size: u64) -> KernelResult<[u8; NAME]> {
        let wanted = svm::IpcCreate { address, len: size, name_len: NAME as u32, ..Default::default() };
        Ok(self.call(const { stable(request::IPC_MEM_CREATE) }, device, size, &wanted)?.name)
    }

    /// IPC_MEM_DESTROY: ends a name. Processes that opened it lose the memory.
    pub(crate) fn ipc_mem_destroy(&self, name: [u8; NAME]) -> KernelResult<()> {
        self.call(const { stable(request::IPC_MEM_DESTROY) }, 0, 0, &svm::IpcDestroy { name }).map(drop)
    }

    /// IPC_MEM_QUERY: size, pages and device of a named memory. Any process may query.
    pub(crate) fn ipc_mem_query(&self, name: [u8; NAME]) -> KernelResult<NameInfo> {
        let query = svm::IpcQuery { name, ..Default::default() };
        let answer = self.call(const { stable(request::IPC_MEM_QUERY) }, 0, 0, &query)?;
        Ok(NameInfo { size: answer.len, huge: answer.is_huge != 0, physical: answer.phy_devid })
    }

    /// IPC_MEM_OPEN: ties a name to an allocation of this process in a managed heap, once per
    /// process. PREFETCH puts the memory there. `size` is for the trace.
    pub(crate) fn ipc_mem_open(&self, device: u32, name: [u8; NAME], address: u64, size: u64) -> KernelResult<()> {
        let open = svm::IpcOpen { address, name, ..Default::default() };
        self.call(const { stable(request::IPC_MEM_OPEN) }, device, size, &open).map(drop)
    }

    /// IPC_MEM_CLOSE: unties a name from an allocation. The device keeps its table of
    /// the pages until the allocation is freed. `size` is for the trace.
    pub(crate) fn ipc_mem_close(&self, device: u32, address: u64, size: u64) -> KernelResult<()> {
        self.call(const { stable(request::IPC_MEM_CLOSE) }, device, size, &svm::IpcClose { address }).map(drop)
    }

    /// IPC_MEM_SET_PID: lists processes that may open a name, at most [`NAME_LIST`].
    pub(crate) fn ipc_mem_set_pid(&self, name: [u8; NAME], tgids: &[i32]) -> KernelResult<()> {
        let mut list = svm::IpcSetPid { name, num: tgids.len() as u32, ..Default::default() };
        for (place, tgid) in list.pids.iter_mut().zip(tgids) {
            *place = *tgid;
        }
        self.call(const { stable(request::IPC_MEM_SET_PID) }, 0, 0, &list).map(drop)
    }

    /// IPC_MEM_SET_ATTR: lets any process open a name.
    pub(crate) fn ipc_mem_set_attr(&self, name: [u8; NAME]) -> KernelResult<()> {
        const NO_TRUST_LIST: u32 = 1;
        let attribute = svm::IpcSetAttr { kind: NO_TRUST_LIST, attr: 1, name, ..Default::default() };
        self.call(const { stable(request::IPC_MEM_SET_ATTR) }, 0, 0, &attribute).map(drop)
    }

    /// MEMCPY. The kernel detects the direction.
    ///
    /// # Safety
    ///
    /// Addresses of the driver must be mapped during the call. Addresses of the process's own
    /// memory must be valid for `size` bytes, and for writes if they are the destination.
    pub(crate) unsafe fn memcpy(
        &self,
        device: u32,
        destination: u64,
        source: u64,
        size: u64,
    ) -> KernelResult<Direction> {
        let copy = svm::Memcpy { destination, source, size, direction: svm::COPY_DETECT, ..Default::default() };
        let answer = self.call(const { stable(request::MEMCPY) }, device, size, &copy)?;
        Ok(Direction::of(answer.direction))
    }

    /// MEMCPY2D: copies rows between host and device. Each side has an address and a pitch, and
    /// `rows` is their width and number.
    ///
    /// # Safety
    ///
    /// As for [`Svm::memcpy`], for every row.
    pub(crate) unsafe fn memcpy2d(
        &self,
        device: u32,
        (destination, destination_pitch): (u64, u64),
        (source, source_pitch): (u64, u64),
        (width, height): (u64, u64),
        direction: Direction,
    ) -> KernelResult<()> {
        let direction = match direction {
            Direction::HostToDevice => svm::COPY_HOST_TO_DEVICE,
            _ => svm::COPY_DEVICE_TO_HOST,
        };
        let pitches = svm::Memcpy2d { destination_pitch, source_pitch, direction, ..Default::default() };
        let copy = svm::Memcpy2d { destination, source, width, height, ..pitches };
        let size = width.saturating_mul(height);
        self.call(const { stable(request::MEMCPY2D) }, device, size, &copy).map(drop)
    }

    /// MEMCPY_BATCH: at most [`BATCH`] copies, all to the device or all from it. The slices have
    /// the same length.
    ///
    /// # Safety
    ///
    /// As for [`Svm::memcpy`], for every copy.
    pub(crate) unsafe fn memcpy_batch(
        &self,
        device: u32,
        destinations: &[u64],
        sources: &[u64],
        sizes: &[u64],
    ) -> KernelResult<()> {
        let count = destinations.len().min(sources.len()).min(sizes.len()) as u32;
        let address = |array: &[u64]| array.as_ptr().expose_provenance() as u64;
        let copy = svm::MemcpyBatch {
            destinations: address(destinations),
            sources: address(sources),
            sizes: address(sizes),
            count,
            ..Default::default()
        };
        let total = sizes.iter().fold(0, |total: u64, size| total.wrapping_add(*size));
        self.call(const { stable(request::MEMCPY_BATCH) }, device, total, &copy).map(drop)
    }

    /// ASYNC_MEMCPY: begins a copy between host and device. Returns the number of its task.
    ///
    /// # Safety
    ///
    /// As for [`Svm::memcpy`], until MEMCPY_RESULT_REFRESH has reported the end of the copy.
    pub(crate) unsafe fn async_memcpy(
        &self,
        device: u32,
        destination: u64,
        source: u64,
        size: u64,
    ) -> KernelResult<i32> {
        let copy = svm::AsyncMemcpy { destination, source, size, ..Default::default() };
        Ok(self.call(const { stable(request::ASYNC_MEMCPY) }, device, size, &copy)?.task)
    }

    /// MEMCPY_RESULT_REFRESH: waits for a task, once. Returns true if the copy was done. After an
    /// error the device may still be copying.
    pub(crate) fn memcpy_result_refresh(&self, device: u32, task: i32, size: u64) -> KernelResult<bool> {
        let refresh = svm::AsyncMemcpy { task, ..Default::default() };
        let answer = self.call(const { stable(request::MEMCPY_RESULT_REFRESH) }, device, size, &refresh)?;
        Ok(answer.state == svm::ASYNC_DONE)
    }

    /// MEMSET8: fills mapped device memory. Returns false if the kernel did not, because the memory
    /// is the host's.
    pub(crate) fn memset8(&self, device: u32, destination: u64, size: u64, value: u8) -> KernelResult<bool> {
        let fill = svm::Memset { destination, value: value.into(), size, ..Default::default() };
        let answer = self.call(const { stable(request::MEMSET8) }, device, size, &fill)?;
        Ok(answer.host_mapped == 0)
    }

    /// Sends a command whose number depends on the generation. EINVAL if the generation lacks it.
    fn call_in<A: Para>(&self, generation: Generation, request: Request<A>, argument: &A) -> KernelResult<A> {
        match request.number(generation) {
            Some(word) => self.call(Numbered { request, word }, 0, 0, argument),
            None => Err(Refused::new(SystemCall::Svm(request.op), Errno::EINVAL)),
        }
    }

    /// Sends one command and returns its answer. `size` is for the trace only.
    fn call<A: Para>(&self, command: Numbered<A>, device: u32, size: u64, argument: &A) -> KernelResult<A> {
        let mut buffer = Buffer::new_zeroed();
        buffer.arg.head.device = device;
        // A member is never longer than the union, so all of it is written.
        let _ = argument.write_to_prefix(buffer.arg.data.as_mut_bytes());
        #[cfg(debug_assertions)]
        {
            buffer.canary = CANARY;
        }
        self.log.empty();
        let op = command.request.op;
        let call = Call { device: Some(device), size, ..Call::plain(module::SVM, op.name()) };
        // SAFETY: the buffer is writable, lives through the call and is larger than the argument of
        // any known kernel. The methods above, and their callers where they pass addresses, vouch
        // for what the addresses in the buffer point to.
        let answer = traced(call, || unsafe { self.file.raw(command.word, (&raw mut buffer).cast()) });
        #[cfg(debug_assertions)]
        debug_assert_eq!(buffer.canary, CANARY, "the kernel wrote more than {ROOM} bytes for {}", op.name());
        match answer {
            Ok(_) => Ok(buffer.arg.para()),
            Err(errno) => Err(Refused::new(SystemCall::Svm(op), errno).kernel_log(self.log.take())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_has_room_for_more_than_any_known_argument() {
        assert!(std::mem::offset_of!(Buffer, room) + size_of::<[u64; (ROOM - svm::ARG_SIZE) / 8]>() == ROOM);
        const { assert!(ROOM > svm::ARG_SIZE) };
    }

    #[test]
    fn commands_that_moved_are_found_by_generation_only() {
        assert_eq!(request::ALLOC_PROC_STRUCT.stable(), None);
        assert_eq!(request::ALLOC_PROC_STRUCT.number(Generation::V8_5_0), Some(0x4158_4D43));
        assert_eq!(request::ALLOC_PROC_STRUCT.number(Generation::V26_1), Some(0x4158_4D65));
        assert_eq!(request::MEM_HANDLE_SET_ATTR.number(Generation::V9_0_0), None);
    }
}
