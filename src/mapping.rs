//! Mappings: physical memory at addresses of a reservation.
//!
//! MEM_MAP puts the beginning of a handle at a 2 MiB multiple inside a reservation; MEM_UNMAP undoes one whole mapping. The kernel does
//! not check that a mapping ends where its reservation does, and a MEM_MAP that hits an occupied chunk leaves the free chunks before it
//! unusable; so both are checked here first, in a [`table`] of all mappings, which also answers what is mapped at an address. A mapping
//! keeps its memory and its reservation, and so its device and the session, alive: drop them in any order.

mod access;
mod host_view;
mod table;

pub use host_view::HostView;
pub(crate) use host_view::{copy_in, copy_out, fill};
pub(crate) use table::MappingTable;

use crate::device::DeviceInner;
use crate::error::{Errno, Error, Failed, Invalid, Result, bytes};
use crate::physical::{Block, Page, PhysicalMemory};
use crate::reserve::{Owner, Reservation, Reserved};
use crate::session::Orphan;
use crate::session::call::{MAP, UNMAP};
use ascend_ioctl::svm::{GIANT_PAGE, HOST_ID, HUGE_PAGE, MemMap, MemUnmap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Memory at an address. Unmapped when dropped.
#[derive(Debug)]
#[must_use = "memory is unmapped when its mapping is dropped"]
pub struct Mapping {
    pub(crate) inner: Arc<Mapped>,
}

#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) address: u64,
    pub(crate) block: Arc<Block>,
    reserved: Arc<Reserved>,
    /// The peers that were granted access. They stay open as long as the mapping: a peer that is closed forgets what it was granted.
    granted: Mutex<Vec<Arc<DeviceInner>>>,
    /// Copies that are running without borrowing the mapping. Raised only under the lock of the table.
    users: AtomicU32,
    /// Whether the CPU was granted access.
    seen: AtomicBool,
    /// Whether the kernel has it: not before MEM_MAP returned, not after MEM_UNMAP began.
    live: AtomicBool,
}

/// A mapping that is in use by a copy: it cannot be unmapped.
#[derive(Debug)]
pub(crate) struct Hold(Arc<Mapped>);

impl Hold {
    /// Call under the lock of the table, with a live mapping, or with one that is borrowed.
    fn new(mapped: Arc<Mapped>) -> Hold {
        mapped.users.fetch_add(1, Ordering::Relaxed);
        Hold(mapped)
    }

    pub(crate) fn mapped(&self) -> &Mapped {
        &self.0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

const OPERATION: &str = "map physical memory";

impl Reservation {
    /// Maps all of `memory` at `offset`, a multiple of its page size from the reservation's start.
    ///
    /// The same memory can be mapped at several places, and a reservation can hold many mappings, of memory of one device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], before the kernel is asked, for a place that is not inside the reservation, not aligned or taken, and for memory of another device than
    /// what the reservation held first, or of another session; [`Error::Refused`] with what the kernel says. Nothing has changed then.
    #[doc(alias = "aclrtMapMem")]
    #[doc(alias = "cuMemMap")]
    #[inline]
    pub fn map(&self, offset: u64, memory: &PhysicalMemory) -> Result<Mapping> {
        let reserved = &self.inner;
        let block = &memory.block;
        let session = &reserved.session;
        session.svm.check_process()?;
        let size = block.size;
        if offset % HUGE_PAGE != 0 || offset > reserved.size || size > reserved.size - offset {
            return Err(outside(reserved, offset, size));
        }
        let address = reserved.start + offset;
        if block.page == Page::Giant && address % GIANT_PAGE != 0 {
            return Err(not_giant(address));
        }
        if !Arc::ptr_eq(&block.device.session, session) {
            return Err(other_session());
        }
        if block.is_host() && !session.has_segments() {
            return Err(no_segments());
        }
        let mapped = Arc::new(Mapped {
            address,
            block: block.clone(),
            reserved: reserved.clone(),
            granted: Mutex::default(),
            users: AtomicU32::new(0),
            seen: AtomicBool::new(false),
            live: AtomicBool::new(false),
        });
        let mut table = session.mappings.lock();
        if table.is_occupied(address, size) {
            return Err(occupied(address, size));
        }
        let first = match reserved.claim(block.device.id, block.imported) {
            Ok(first) => first,
            Err(owner) => return Err(other_owner(reserved, block, &owner)),
        };
        table.insert(address, size, Arc::downgrade(&mapped), Arc::downgrade(block));
        drop(table);

        let map = MemMap {
            address,
            size,
            id: block.id,
            side: block.side(),
            page: u32::from(block.page_code),
            module: block.module,
            pages: block.pages(),
        };
        if let Err(errno) = session.svm.call(MAP, block.device.id, size, &map) {
            let arguments = format!("address {address:#x}, {}", block.describe());
            let error = block.device.failed(OPERATION, MAP, errno, arguments);
            let mut table = session.mappings.lock();
            table.remove(address, size);
            // The kernel takes its mark back when the mapping that set it fails; another may have come in between.
            if first && !table.is_occupied(reserved.start, reserved.size) {
                reserved.unclaim();
            }
            return Err(error);
        }
        mapped.live.store(true, Ordering::Release);
        Ok(Mapping { inner: mapped })
    }

    /// Address and size of everything that is mapped in this reservation, in order.
    pub fn mappings(&self) -> Vec<(u64, u64)> {
        let reserved = &self.inner;
        if reserved.session.svm.guard.in_child() {
            // Nothing is mapped here, and the table's lock may be held for ever.
            return Vec::new();
        }
        reserved.session.mappings.ranges(reserved.start, reserved.start + reserved.size)
    }
}

impl Mapping {
    /// First address, for the device and, where it has access, the CPU.
    #[inline]
    pub fn address(&self) -> u64 {
        self.inner.address
    }

    /// Offset in its reservation.
    pub fn offset(&self) -> u64 {
        self.inner.address - self.inner.reserved.start
    }

    /// Size in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.inner.block.size
    }

    /// The memory that is mapped.
    pub fn memory(&self) -> PhysicalMemory {
        self.inner.memory()
    }

    /// Unmaps, and tells what went wrong; the mapping is then handed back. (Dropping it unmaps too, and logs what goes wrong.)
    ///
    /// Unmapping does not wait for the device: the caller makes sure that no kernel on it uses the addresses any more.
    #[doc(alias = "aclrtUnmapMem")]
    #[doc(alias = "cuMemUnmap")]
    #[inline]
    pub fn unmap(self) -> Result<(), Failed<Mapping>> {
        if let Err(error) = self.inner.session().svm.check_process().and_then(|()| self.inner.retire()) {
            return Err(Failed { error, object: self });
        }
        if let Err(errno) = self.inner.unmap() {
            self.inner.live.store(true, Ordering::Release);
            let arguments = format!("address {:#x}, size {}", self.inner.address, bytes(self.inner.block.size));
            let error = self.inner.block.device.failed("unmap memory", UNMAP, errno, arguments);
            return Err(Failed { error, object: self });
        }
        Ok(())
    }
}

impl Mapped {
    pub(crate) fn memory(&self) -> PhysicalMemory {
        PhysicalMemory { block: self.block.clone() }
    }

    /// Address and size.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.address, self.block.size)
    }

    /// Keeps a borrowed mapping from being unmapped after the borrow.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        Hold::new(self.clone())
    }

    pub(crate) fn session(&self) -> &Arc<crate::session::Inner> {
        &self.reserved.session
    }

    /// From here on no copy can begin; an error if one is running.
    #[inline]
    fn retire(&self) -> Result<()> {
        // Copies raise the number of users under the same lock.
        let _table = self.session().mappings.lock();
        if self.users.load(Ordering::Acquire) != 0 {
            return Err(in_use(self));
        }
        self.live.store(false, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn unmap(&self) -> std::result::Result<(), Errno> {
        let session = &self.reserved.session;
        // The id in the head is converted but not used; the host's always converts.
        session.svm.call(UNMAP, HOST_ID, self.block.size, &self.unmap_arg())?;
        session.mappings.lock().remove(self.address, self.block.size);
        Ok(())
    }

    fn unmap_arg(&self) -> MemUnmap {
        MemUnmap { address: self.address, ..Default::default() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !*self.live.get_mut() || self.reserved.session.svm.guard.in_child() {
            return;
        }
        if let Err(errno) = self.unmap() {
            // The table keeps the range: the kernel still has something there.
            let orphan = Orphan::Mapping(self.unmap_arg(), self.block.size);
            self.reserved.session.adopt(orphan, "unmap memory", UNMAP, errno);
        }
    }
}

#[cold]
fn outside(reserved: &Reserved, offset: u64, size: u64) -> Error {
    if offset % HUGE_PAGE != 0 {
        let problem = format!("the offset {offset:#x} is not aligned");
        return Invalid::because(OPERATION, problem, "offsets are multiples of 2 MiB");
    }
    Invalid::because(
        OPERATION,
        format!("{} at offset {offset:#x} do not fit in a reservation of {}", bytes(size), bytes(reserved.size)),
        "a mapping must lie inside its reservation",
    )
}

#[cold]
fn not_giant(address: u64) -> Error {
    Invalid::because(
        OPERATION,
        format!("{address:#x} is not a multiple of 1 GiB"),
        "memory in 1 GiB pages is mapped at multiples of 1 GiB: reserve with that alignment, and use such offsets",
    )
}

#[cold]
fn other_session() -> Error {
    Invalid::because(OPERATION, "the memory and the reservation are of different sessions", "use one session")
}

#[cold]
fn no_segments() -> Error {
    Invalid::because(
        OPERATION,
        "this session was opened without address segments",
        "host memory can be mapped only in a session that has them",
    )
}

#[cold]
fn occupied(address: u64, size: u64) -> Error {
    Invalid::because(
        OPERATION,
        format!("{address:#x} with {} overlaps what is mapped there", bytes(size)),
        "unmap that first, or map at another offset",
    )
}

#[cold]
fn other_owner(reserved: &Reserved, block: &Block, owner: &Owner) -> Error {
    let name = |device: u32, imported: bool| {
        let place = if device == HOST_ID { "the host".to_owned() } else { format!("device {device}") };
        format!("{} memory of {place}", if imported { "imported" } else { "own" })
    };
    Invalid::because(
        OPERATION,
        format!(
            "the reservation at {:#x} holds, or held, {} and this is {}",
            reserved.start,
            name(owner.device, owner.imported),
            name(block.device.id, block.imported)
        ),
        "a reservation holds memory of one device only, and either own or imported memory, until it is freed: use another reservation",
    )
}

#[cold]
fn in_use(mapped: &Mapped) -> Error {
    let users = format!(
        "{} copies from or to {:#x}..{:#x} are running; wait for them first",
        mapped.users.load(Ordering::Relaxed),
        mapped.address,
        mapped.address + mapped.block.size
    );
    Error::InUse { operation: "unmap memory", users }
}
