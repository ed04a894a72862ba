//! Mappings: physical memory at addresses of a reservation.
//!
//! MEM_MAP maps the beginning of a handle at a 2 MiB multiple inside a reservation, and MEM_UNMAP
//! undoes one whole mapping. The kernel does not check that a mapping ends inside its reservation,
//! and a MEM_MAP that hits an occupied chunk leaves the free chunks before it unusable. So both are
//! checked here first, in a table of all mappings, which also answers what is mapped at an address.
//! A mapping keeps its memory and its reservation alive, and so its device and the session: drop
//! them in any order.

mod access;
mod host_view;
pub(crate) mod mapping_table;
mod shared_memory;

pub use host_view::HostView;
pub(crate) use shared_memory::{copy_in, copy_out, fill};

use crate::bytes::Bytes;
use crate::driver::svm::{GIANT_PAGE, HOST_ID, HUGE_PAGE};
use crate::error::{Error, Failed, Invalid, Result};
use crate::kind::Page;
use crate::physical::{PhysicalBlock, PhysicalMemory};
use crate::reserve::{Owner, Reservation, Reserved};
use crate::session::SessionInner;
use crate::session::undo::{Left, Live, Undo, undo};
use crate::slots::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Memory at an address. Unmapped when dropped.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let reservation = session.reserve(2 << 20)?;
/// let mapping = reservation.map(0, &memory)?;
/// mapping.fill(0, 4096, 7)?;
/// let mut first = [0];
/// mapping.read(0, &mut first)?;
/// assert_eq!(first, [7]);
/// mapping.unmap()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "memory is unmapped when its mapping is dropped"]
pub struct Mapping {
    pub(crate) inner: Arc<Live<Mapped>>,
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({})", self.inner.describe())
    }
}

/// A mapping that the kernel has. Slices and running copies hold it too: it cannot be unmapped
/// under them.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) address: u64,
    pub(crate) block: Arc<Live<PhysicalBlock>>,
    reserved: Arc<Live<Reserved>>,
    access: Mutex<access::Granted>,
}

const OPERATION: &str = "map physical memory";

impl Reservation {
    /// Maps all of `memory` at `offset`, a multiple of its page size from the reservation's start.
    ///
    /// The same memory can be mapped at several places, and a reservation can hold many mappings,
    /// of memory of one device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], before the kernel is called, for a place that is not inside the
    /// reservation, not aligned or taken, and for memory of another device than what the
    /// reservation held first, or of another session; [`Error::Refused`] with what the kernel says.
    /// Nothing has changed then.
    #[doc(alias = "aclrtMapMem")]
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, offset: u64, memory: &PhysicalMemory) -> Result<Mapping> {
        let mapping = self.map_hidden(offset, memory)?;
        mapping.show();
        Ok(mapping)
    }

    /// Maps memory that lookups by address do not find before [`Mapping::show`].
    pub(crate) fn map_hidden(&self, offset: u64, memory: &PhysicalMemory) -> Result<Mapping> {
        let (reserved, block) = (&self.inner, &memory.block);
        let session = &reserved.session;
        session.check_process()?;
        let address = self.check_place(offset, block)?;
        // Entered before MEM_MAP, so that no two threads map the same addresses.
        let mut table = lock(&session.mappings);
        if !table.begin(address, block) {
            return Err(Invalid::because(
                OPERATION,
                format!("{address:#x} with {} overlaps what is mapped there", Bytes(block.size)),
                "Unmap that first, or map at another offset.",
            ));
        }
        if let Err(owner) = reserved.claim(block.device.id, block.is_imported()) {
            table.remove(address);
            return Err(other_owner(reserved, block, &owner));
        }
        drop(table);
        if let Err(refused) = session.svm.mem_map(block.handle, address, block.size) {
            let mut table = lock(&session.mappings);
            table.remove(address);
            // The kernel takes its mark back when the mapping that set it fails. Another mapping
            // that is being made does the same, or keeps it.
            if !table.is_occupied(reserved.start, reserved.size) {
                reserved.unclaim();
            }
            drop(table);
            let arguments = format!("address {address:#x}, {}", block.describe());
            return Err(block.device.failed(refused, OPERATION, arguments));
        }
        reserved.confirm();
        let inner = Mapped { address, block: block.clone(), reserved: reserved.clone(), access: Mutex::default() };
        Ok(Mapping { inner: Arc::new(Live::new(inner)) })
    }

    /// The address at an offset, if memory can be mapped there.
    fn check_place(&self, offset: u64, block: &PhysicalBlock) -> Result<u64> {
        let (reserved, session) = (&self.inner, &self.inner.session);
        if offset % HUGE_PAGE != 0 {
            let problem = format!("the offset {offset:#x} is not aligned");
            return Err(Invalid::because(OPERATION, problem, "Offsets are multiples of 2 MiB."));
        }
        Invalid::check_inside(OPERATION, offset, block.size, reserved.size)?;
        let address = reserved.start + offset;
        if block.page() == Page::Giant && address % GIANT_PAGE != 0 {
            return Err(Invalid::because(
                OPERATION,
                format!("{address:#x} is not a multiple of 1 GiB"),
                "Memory in 1 GiB pages is mapped at multiples of 1 GiB: reserve with that alignment, and use such \
                 offsets.",
            ));
        }
        session.check_same(&block.device.session, OPERATION)?;
        if block.device.is_host() && !session.cpu_access {
            return Err(Invalid::because(
                OPERATION,
                "this session was opened without address segments",
                "Host memory can be mapped only in a session that has them.",
            ));
        }
        Ok(address)
    }

    /// Address and size of everything that is mapped in this reservation, in order.
    pub fn mappings(&self) -> Vec<(u64, u64)> {
        let reserved = &self.inner;
        if reserved.session.in_child() {
            // Nothing is mapped in a child, and a thread of the parent may have held the table's
            // lock.
            return Vec::new();
        }
        lock(&reserved.session.mappings).ranges(reserved.start..reserved.start + reserved.size)
    }
}

impl Mapping {
    /// First address, for the device and, where it has access, the CPU.
    pub fn address(&self) -> u64 {
        self.inner.address
    }

    /// Offset in its reservation.
    pub fn offset(&self) -> u64 {
        self.inner.address - self.inner.reserved.start
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.inner.block.size
    }

    /// The memory that is mapped.
    pub fn memory(&self) -> PhysicalMemory {
        PhysicalMemory { block: self.inner.block.clone() }
    }

    /// Hides it from lookups by address: only its owner can use it then.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] while a slice or a copy uses it.
    pub(crate) fn hide(&mut self, operation: &'static str) -> Result<()> {
        let session = self.inner.session().clone();
        let hidden = lock(&session.mappings).hide(&mut self.inner);
        if hidden {
            return Ok(());
        }
        let others = Arc::strong_count(&self.inner).saturating_sub(1);
        Err(Error::InUse { operation, users: self.inner.users(others.max(1)) })
    }

    /// Lets lookups find it again.
    pub(crate) fn show(&self) {
        Mapped::restore(&self.inner);
    }

    /// Unmaps. (Dropping it unmaps too, and logs what goes wrong.)
    ///
    /// Unmapping does not wait for the device: make sure that no kernel on it uses the addresses
    /// any more.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] while a slice or a copy uses it; [`Error::Refused`] if the kernel does not
    /// unmap it. The mapping comes back.
    #[doc(alias = "aclrtUnmapMem")]
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(self) -> Result<(), Failed<Mapping>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: Mapping { inner } })
    }

    /// Unmaps, and returns the memory with its contents, which can be mapped again.
    ///
    /// ```
    /// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
    /// # emulator.attach()?;
    /// use ascend_vmm::{Error, LogicalId, Session};
    ///
    /// let session = Session::open()?;
    /// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
    /// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
    /// drop(memory);
    /// mapping.write(0, b"kept")?;
    /// let memory = mapping.into_memory().map_err(Error::from)?;
    /// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
    /// let mut text = [0; 4];
    /// mapping.read(0, &mut text)?;
    /// assert_eq!(&text, b"kept");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::unmap`].
    pub fn into_memory(self) -> Result<PhysicalMemory, Failed<Mapping>> {
        let memory = self.memory();
        self.unmap().map(|()| memory)
    }
}

impl Mapped {
    pub(crate) fn size(&self) -> u64 {
        self.block.size
    }

    /// The first address after it.
    pub(crate) fn after(&self) -> u64 {
        self.address + self.size()
    }

    pub(crate) fn session(&self) -> &Arc<Live<SessionInner>> {
        &self.reserved.session
    }

    /// True if both are in one reservation.
    pub(crate) fn is_beside(&self, other: &Mapped) -> bool {
        Arc::ptr_eq(&self.reserved, &other.reserved)
    }

    fn describe(&self) -> String {
        format!("{:#x}, {}", self.address, Bytes(self.size()))
    }
}

impl Undo for Mapped {
    const OPERATION: &'static str = "unmap memory";

    fn session(&self) -> &SessionInner {
        &self.reserved.session
    }

    fn undo(&mut self) -> Result<()> {
        match self.reserved.session.unmap(self.address, self.size()) {
            Ok(()) => Ok(()),
            Err(refused) => Err(self.block.device.failed(refused, Self::OPERATION, self.describe())),
        }
    }

    fn abandon(&mut self, error: Error) {
        // The table keeps the range: the kernel still has something there.
        self.session().keep(Left::Mapping { address: self.address, size: self.size() }, error);
    }

    fn users(&self, others: usize) -> String {
        format!("{others} slice(s) or copies of {} are alive. Wait for them first.", self.describe())
    }

    fn restore(mapped: &Arc<Live<Mapped>>) {
        lock(&mapped.session().mappings).show(mapped);
    }
}

fn other_owner(reserved: &Reserved, block: &PhysicalBlock, owner: &Owner) -> Error {
    let name = |device: u32, imported: bool| {
        let place = if device == HOST_ID { "the host".to_owned() } else { format!("device {device}") };
        format!("{} memory of {place}", if imported { "imported" } else { "own" })
    };
    Invalid::because(
        OPERATION,
        format!(
            "the reservation at {:#x} holds, or held, {} and this is {}",
            reserved.start,
            name(owner.device.into(), owner.imported),
            name(block.device.id, block.is_imported())
        ),
        "A reservation holds memory of one device only, and either own or imported memory, until it \
         is freed: use another reservation.",
    )
}
