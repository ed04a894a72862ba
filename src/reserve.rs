//! Reservations: addresses that nothing else in the process uses, into which physical memory can be mapped.
//!
//! To the kernel a reservation is a run of 2 MiB chunks in a heap, made by one ALLOC and freed as a whole by one FREE_PAGES. It chooses
//! no addresses and guards badly against misuse: an address that is used while its ALLOC or FREE_PAGES runs can crash it. So addresses
//! come from our own [`arena`], nobody learns one before ALLOC returned, and FREE_PAGES begins when the last mapping, view or copy is
//! gone. The first mapping ties a reservation to its device until it is freed.

pub(crate) mod arena;

use crate::error::{Errno, Error, Failed, Invalid, Result, bytes};
use crate::session::call::{ALLOC, FREE_PAGES};
use crate::session::{Inner, Orphan, lock};
use arena::Taken;
use ascend_ioctl::svm::{Alloc, DYNAMIC_START, FreePages, GIANT_PAGE, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where a reservation may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct ReserveOptions {
    address: Option<u64>,
    alignment: u64,
}

impl Default for ReserveOptions {
    fn default() -> Self {
        ReserveOptions { address: None, alignment: HUGE_PAGE }
    }
}

impl ReserveOptions {
    /// The addresses from which reservations are made: 0x12C0_0000_0000 to 24 TiB. What the driver has below them is for video and
    /// read-only memory.
    pub const ADDRESSES: Range<u64> = NORMAL_START..DYNAMIC_START;

    /// Anywhere, at a multiple of 2 MiB.
    pub fn new() -> ReserveOptions {
        ReserveOptions::default()
    }

    /// Exactly at this address, a multiple of 2 MiB.
    pub fn address(mut self, address: u64) -> Self {
        self.address = Some(address);
        self
    }

    /// At a multiple of this: a power of two from 2 MiB to 1 GiB. Memory in 1 GiB pages needs 1 GiB.
    pub fn alignment(mut self, alignment: u64) -> Self {
        self.alignment = alignment;
        self
    }
}

/// Reserved addresses. Freed when this and everything mapped there is dropped.
#[derive(Debug)]
#[must_use = "addresses are freed when their reservation is dropped"]
pub struct Reservation {
    pub(crate) inner: Arc<Reserved>,
}

#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) start: u64,
    pub(crate) size: u64,
    /// Whose memory is mapped here: see [`Reserved::NOBODY`]. Changed only under the lock of the session's mappings.
    owner: AtomicU32,
    /// Whether the kernel still has it.
    live: bool,
    pub(crate) session: Arc<Inner>,
}

const OPERATION: &str = "reserve addresses";

impl Reservation {
    #[inline]
    pub(crate) fn new(session: &Arc<Inner>, size: u64, options: &ReserveOptions) -> Result<Reservation> {
        session.svm.check_process()?;
        if size == 0 || size % HUGE_PAGE != 0 || size > RESERVE_HEAP_MAX {
            return Err(bad_size(size));
        }
        let start = match options.address {
            None if options.alignment == HUGE_PAGE => take(session, size, HUGE_PAGE)?,
            None => {
                check_alignment(options.alignment)?;
                take(session, size, options.alignment)?
            }
            Some(address) => take_at(session, address, size, options.alignment)?,
        };
        // Nobody but us knows the address, so nothing can use it while ALLOC lays out its books.
        if let Err(errno) = session.svm.call(ALLOC, 0, size, &Alloc { address: start, size }) {
            let error = refused(session, start, size, errno);
            lock(&session.arena).free(start);
            return Err(error);
        }
        let owner = AtomicU32::new(Reserved::NOBODY);
        Ok(Reservation { inner: Arc::new(Reserved { start, size, owner, live: true, session: session.clone() }) })
    }

    /// First address.
    #[inline]
    pub fn address(&self) -> u64 {
        self.inner.start
    }

    /// Size in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.inner.size
    }

    /// Frees the addresses, and tells what went wrong. Nothing may be mapped there any more; otherwise the reservation is handed back.
    /// (Dropping it frees the addresses when the last mapping is gone, and logs what goes wrong.)
    #[doc(alias = "aclrtReleaseMemAddress")]
    #[doc(alias = "cuMemAddressFree")]
    #[inline]
    pub fn free(self) -> Result<(), Failed<Reservation>> {
        if let Err(error) = self.inner.session.svm.check_process() {
            return Err(Failed { error, object: self });
        }
        match Arc::try_unwrap(self.inner) {
            Ok(mut reserved) => match reserved.give_back() {
                Ok(()) => Ok(()),
                Err(errno) => {
                    let svm = &reserved.session.svm;
                    let refused = svm.refused("free reserved addresses", FREE_PAGES, errno).object(format!(
                        "{:#x}, {}",
                        reserved.start,
                        bytes(reserved.size)
                    ));
                    Err(Failed { error: refused.into(), object: Reservation { inner: Arc::new(reserved) } })
                }
            },
            Err(inner) => {
                let users = format!(
                    "{} mapping(s) or copies in {:#x}..{:#x} are alive; unmap them first",
                    Arc::strong_count(&inner) - 1,
                    inner.start,
                    inner.start + inner.size
                );
                let error = Error::InUse { operation: "free reserved addresses", users };
                Err(Failed { error, object: Reservation { inner } })
            }
        }
    }
}

impl Reserved {
    /// No memory was mapped here yet.
    const NOBODY: u32 = u32::MAX;
    /// Beside the device's id: the memory is imported.
    const IMPORTED: u32 = 1 << 31;

    /// Ties the reservation to the owner of the memory that is about to be mapped. The kernel does the same for the device, refuses any
    /// other until the reservation is freed, and refuses copies over own and imported memory. Call under the lock of the mappings.
    ///
    /// Returns whether it was free before.
    #[inline]
    pub(crate) fn claim(&self, device: u32, imported: bool) -> Result<bool, Owner> {
        let wanted = device | if imported { Reserved::IMPORTED } else { 0 };
        match self.owner.load(Ordering::Relaxed) {
            Reserved::NOBODY => {
                self.owner.store(wanted, Ordering::Relaxed);
                Ok(true)
            }
            owner if owner == wanted => Ok(false),
            owner => Err(Owner { device: owner & !Reserved::IMPORTED, imported: owner & Reserved::IMPORTED != 0 }),
        }
    }

    /// Undoes a claim whose mapping was refused. Call under the lock of the mappings.
    pub(crate) fn unclaim(&self) {
        self.owner.store(Reserved::NOBODY, Ordering::Relaxed);
    }

    #[inline]
    fn give_back(&mut self) -> std::result::Result<(), Errno> {
        self.session.svm.call(FREE_PAGES, 0, self.size, &FreePages { address: self.start })?;
        self.live = false;
        lock(&self.session.arena).free(self.start);
        Ok(())
    }
}

/// Whose memory a reservation holds.
pub(crate) struct Owner {
    pub(crate) device: u32,
    pub(crate) imported: bool,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.live || self.session.svm.guard.in_child() {
            return;
        }
        if let Err(errno) = self.give_back() {
            let free = FreePages { address: self.start };
            self.session.adopt(Orphan::Reservation(free), "free reserved addresses", FREE_PAGES, errno);
        }
    }
}

/// Addresses from the arena, with a new heap if it needs one.
#[inline]
fn take(session: &Inner, size: u64, alignment: u64) -> Result<u64> {
    let mut arena = lock(&session.arena);
    if let Some(start) = arena.take(size, alignment) {
        return Ok(start);
    }
    let Some(window) = arena.next_window(size) else { return Err(exhausted(size)) };
    session.enable_heap(window)?;
    arena.add_heap(window);
    // A new heap is larger than what is asked for and starts at a whole GiB.
    arena.take(size, alignment).ok_or_else(|| exhausted(size))
}

/// The same at a fixed address.
#[cold]
fn take_at(session: &Inner, address: u64, size: u64, alignment: u64) -> Result<u64> {
    check_alignment(alignment)?;
    let end = address.checked_add(size);
    let Range { start: low, end: high } = ReserveOptions::ADDRESSES;
    if address % HUGE_PAGE != 0 || address % alignment != 0 {
        return Err(Invalid::because(
            OPERATION,
            format!("the fixed address {address:#x} is not aligned"),
            "it must be a multiple of 2 MiB and of the alignment",
        ));
    }
    if address < low || end.is_none_or(|end| end > high) {
        return Err(Invalid::because(
            OPERATION,
            format!("{address:#x} with {} lies outside of the driver's addresses", bytes(size)),
            "fixed addresses must lie between 0x12c000000000 and 0x180000000000 (24 TiB)",
        ));
    }
    let mut arena = lock(&session.arena);
    let taken = match arena.take_at(address, size) {
        Ok(()) => return Ok(address),
        Err(Taken::NeedsHeap(window)) => {
            session.enable_heap(window)?;
            arena.add_heap(window);
            match arena.take_at(address, size) {
                Ok(()) => return Ok(address),
                Err(taken) => taken,
            }
        }
        Err(taken) => taken,
    };
    Err(match taken {
        Taken::Border | Taken::NeedsHeap(_) => Invalid::because(
            OPERATION,
            format!("{address:#x} with {} lies across the border of a heap", bytes(size)),
            "a reservation must lie inside one heap of the kernel, and heaps that are in use do not move; \
             choose another address, or reserve the largest ranges first",
        ),
        Taken::Reserved => Invalid::because(
            OPERATION,
            format!("part of {address:#x} with {} is already reserved", bytes(size)),
            "free it first, or choose another address",
        ),
    })
}

fn check_alignment(alignment: u64) -> Result<()> {
    if alignment.is_power_of_two() && (HUGE_PAGE..=GIANT_PAGE).contains(&alignment) {
        return Ok(());
    }
    Err(Invalid::because(
        OPERATION,
        format!("the alignment {alignment:#x} is not possible"),
        "it must be a power of two from 2 MiB to 1 GiB",
    ))
}

#[cold]
fn bad_size(size: u64) -> Error {
    if size > RESERVE_HEAP_MAX {
        let rule = "one reservation lies inside one heap of the kernel, which is at most 128 GiB; reserve several";
        return Invalid::because(OPERATION, format!("{} are too much", bytes(size)), rule);
    }
    let problem = format!("{} is not a size of reservations", bytes(size));
    Invalid::because(OPERATION, problem, "sizes are multiples of 2 MiB, and not 0")
}

#[cold]
fn exhausted(size: u64) -> Error {
    Invalid::because(
        OPERATION,
        format!("no {} of the driver's 5.25 TiB of addresses are free in one piece", bytes(size)),
        "free reservations, or ask for a smaller one",
    )
}

#[cold]
fn refused(session: &Inner, start: u64, size: u64, errno: Errno) -> Error {
    let arguments = format!("address {start:#x}, size {}", bytes(size));
    session.svm.refused(OPERATION, ALLOC, errno).arguments(arguments).into()
}
