//! Reservations: addresses that nothing else in the process uses, into which physical memory can be
//! mapped.
//!
//! To the kernel a reservation is a run of 2 MiB chunks in a heap, made by one ALLOC and freed as a
//! whole by one FREE_PAGES. It chooses no addresses and guards badly against misuse: an address
//! that is used while its ALLOC or FREE_PAGES runs can crash it. So addresses come from our own
//! [`arena`], no address is known before its ALLOC returned, and FREE_PAGES begins when the last
//! mapping, view or copy is gone. The first mapping ties a reservation to its device until it is
//! freed.

pub(crate) mod arena;

use crate::bytes::Bytes;
use crate::driver::svm::{DYNAMIC_START, GIANT_PAGE, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX};
use crate::error::{Error, Failed, Invalid, Result};
use crate::session::SessionInner;
use crate::session::undo::{Left, Live, Undo, undo};
use crate::slots::lock;
use arena::Taken;
use std::fmt;
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
    /// The addresses from which reservations are made: 0x12C0_0000_0000 to 24 TiB. What the driver
    /// has below them is for video and read-only memory.
    pub const ADDRESSES: Range<u64> = NORMAL_START..DYNAMIC_START;

    /// The largest reservation: 128 GiB, the largest heap of the kernel's.
    pub const MAX_SIZE: u64 = RESERVE_HEAP_MAX;

    /// Anywhere, at a multiple of 2 MiB.
    pub fn new() -> ReserveOptions {
        ReserveOptions::default()
    }

    /// Exactly at this address, a multiple of 2 MiB.
    pub fn address(mut self, address: u64) -> Self {
        self.address = Some(address);
        self
    }

    /// The address, if it is fixed.
    pub(crate) fn fixed(&self) -> Option<u64> {
        self.address
    }

    /// At a multiple of this: a power of two from 2 MiB to 1 GiB. Memory in 1 GiB pages needs 1
    /// GiB.
    pub fn alignment(mut self, alignment: u64) -> Self {
        self.alignment = alignment;
        self
    }
}

/// Reserved addresses. A counted reference: they are freed when the last clone and everything
/// mapped there is dropped.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, ReserveOptions, Session};
///
/// let session = Session::open()?;
/// let reservation = session.reserve_with(1 << 30, &ReserveOptions::new().alignment(1 << 30))?;
/// assert_eq!(reservation.address() % (1 << 30), 0);
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = reservation.map(0, &memory)?;
/// assert_eq!(reservation.mappings(), [(mapping.address(), 2 << 20)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use = "addresses are freed when their reservation is dropped"]
pub struct Reservation {
    pub(crate) inner: Arc<Live<Reserved>>,
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({})", self.inner.describe())
    }
}

#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) start: u64,
    pub(crate) size: u64,
    /// The owner of the memory that is mapped here: see [`Reserved::NONE`]. Changed only under the
    /// lock of the session's mappings.
    owner: AtomicU32,
    pub(crate) session: Arc<Live<SessionInner>>,
}

const OPERATION: &str = "reserve addresses";

impl Reservation {
    #[inline]
    pub(crate) fn new(session: &Arc<Live<SessionInner>>, size: u64, options: &ReserveOptions) -> Result<Reservation> {
        session.check_process()?;
        if size == 0 || size % HUGE_PAGE != 0 || size > RESERVE_HEAP_MAX {
            return Err(bad_size(size));
        }
        if options.alignment != HUGE_PAGE {
            check_alignment(options.alignment)?;
        }
        let start = match options.address {
            None => take(session, size, options.alignment)?,
            Some(address) => take_at(session, address, size, options.alignment)?,
        };
        // No other code knows the address, so nothing can use it while ALLOC lays out its books.
        if let Err(refused) = session.svm.alloc(start, size) {
            lock(&session.arena).free(start);
            let arguments = format!("address {start:#x}, size {}", Bytes(size));
            return Err(refused.operation(OPERATION).arguments(arguments).into());
        }
        let owner = AtomicU32::new(Reserved::NONE);
        session.counts.reserved.fetch_add(size, Ordering::Relaxed);
        let reserved = Reserved { start, size, owner, session: session.clone() };
        Ok(Reservation { inner: Arc::new(Live::new(reserved)) })
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

    /// Frees the addresses. (Dropping it frees them when the last mapping is gone, and logs what
    /// goes wrong.)
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] if something is mapped there, or a clone is alive; [`Error::Refused`] if
    /// the kernel does not free them. The reservation comes back.
    #[doc(alias = "aclrtReleaseMemAddress")]
    #[doc(alias = "cuMemAddressFree")]
    #[inline]
    pub fn free(self) -> Result<(), Failed<Reservation>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: Reservation { inner } })
    }
}

impl Reserved {
    /// No memory was mapped here yet.
    const NONE: u32 = u32::MAX;
    /// Beside the device's id: the memory is imported.
    const IMPORTED: u32 = 1 << 31;
    /// Beside the device's id: the kernel has mapped some here.
    const MAPPED: u32 = 1 << 30;

    fn describe(&self) -> String {
        format!("{:#x}, {}", self.start, Bytes(self.size))
    }

    /// Ties the reservation to the owner of the memory that is about to be mapped. The kernel does
    /// the same for the device, refuses any other until the reservation is freed, and refuses
    /// copies over own and imported memory. Call under the lock of the mappings.
    #[inline]
    pub(crate) fn claim(&self, device: u32, imported: bool) -> Result<(), Owner> {
        let wanted = device | if imported { Reserved::IMPORTED } else { 0 };
        match self.owner.load(Ordering::Relaxed) {
            Reserved::NONE => self.owner.store(wanted, Ordering::Relaxed),
            owner if owner & !Reserved::MAPPED == wanted => {}
            owner => {
                let device = owner & !(Reserved::IMPORTED | Reserved::MAPPED);
                return Err(Owner { device, imported: owner & Reserved::IMPORTED != 0 });
            }
        }
        Ok(())
    }

    /// A mapping was made: the claim lasts until the reservation is freed.
    #[inline]
    pub(crate) fn confirm(&self) {
        if self.owner.load(Ordering::Relaxed) & Reserved::MAPPED == 0 {
            self.owner.fetch_or(Reserved::MAPPED, Ordering::Relaxed);
        }
    }

    /// Undoes the claims of mappings that were refused, if none was ever made. Call under the lock
    /// of the mappings, when none is being made either.
    pub(crate) fn unclaim(&self) {
        if self.owner.load(Ordering::Relaxed) & Reserved::MAPPED == 0 {
            self.owner.store(Reserved::NONE, Ordering::Relaxed);
        }
    }
}

impl Undo for Reserved {
    const OPERATION: &'static str = "free reserved addresses";

    #[inline]
    fn session(&self) -> &SessionInner {
        &self.session
    }

    #[inline]
    fn undo(&mut self) -> Result<()> {
        let freed = self.session.free(self.start, self.size);
        freed.map_err(|refused| refused.operation(Self::OPERATION).object(self.describe()).into())
    }

    fn abandon(&mut self, error: Error) {
        self.session.keep(Left::Reservation { address: self.start, size: self.size }, error);
    }

    fn users(&self, others: usize) -> String {
        format!("{others} mapping(s) or copies in {} are alive. Unmap them first.", self.describe())
    }
}

/// Whose memory a reservation holds.
pub(crate) struct Owner {
    pub(crate) device: u32,
    pub(crate) imported: bool,
}

/// Addresses from the arena, with a new heap if it needs one.
fn take(session: &SessionInner, size: u64, alignment: u64) -> Result<u64> {
    let taken = lock(&session.arena).take(size, alignment);
    match taken {
        Some(start) => Ok(start),
        None => take_from_new_heap(session, size, alignment),
    }
}

fn take_from_new_heap(session: &SessionInner, size: u64, alignment: u64) -> Result<u64> {
    // A new heap is at least as large as what is asked for and starts at a whole GiB.
    let taken = session.take_with_heap(|arena| match arena.take(size, alignment) {
        Some(start) => Ok(start),
        None => Err(arena.next_window(size).map_or(Taken::Border, Taken::NeedsHeap)),
    })?;
    taken.map_err(|_| exhausted(size))
}

/// The same at a fixed address.
fn take_at(session: &SessionInner, address: u64, size: u64, alignment: u64) -> Result<u64> {
    let end = address.checked_add(size);
    let Range { start: low, end: high } = ReserveOptions::ADDRESSES;
    if address % HUGE_PAGE != 0 || address % alignment != 0 {
        return Err(Invalid::because(
            OPERATION,
            format!("the fixed address {address:#x} is not aligned"),
            "It must be a multiple of 2 MiB and of the alignment.",
        ));
    }
    if address < low || end.is_none_or(|end| end > high) {
        return Err(Invalid::because(
            OPERATION,
            format!("{address:#x} with {} lies outside of the driver's addresses", Bytes(size)),
            "Fixed addresses lie between 0x12c000000000 and 0x180000000000 (24 TiB).",
        ));
    }
    let taken = session.take_with_heap(|arena| arena.take_at(address, size).map(|()| address))?;
    taken.map_err(|taken| match taken {
        Taken::Border | Taken::NeedsHeap(_) => Invalid::because(
            OPERATION,
            format!("{address:#x} with {} lies across the border of a heap", Bytes(size)),
            "A reservation must lie inside one heap of the kernel, and heaps that are in use do not \
             move: choose another address, or reserve the largest ranges first.",
        ),
        Taken::Reserved => Invalid::because(
            OPERATION,
            format!("part of {address:#x} with {} is already reserved", Bytes(size)),
            "Free it first, or choose another address.",
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
        "It must be a power of two from 2 MiB to 1 GiB.",
    ))
}

fn bad_size(size: u64) -> Error {
    if size > RESERVE_HEAP_MAX {
        let rule = "One reservation lies inside one heap of the kernel, which is at most 128 GiB: reserve several.";
        return Invalid::because(OPERATION, format!("{} are too much", Bytes(size)), rule);
    }
    let problem = format!("{} is not a size of reservations", Bytes(size));
    Invalid::because(OPERATION, problem, "Sizes are multiples of 2 MiB, and not 0.")
}

fn exhausted(size: u64) -> Error {
    Invalid::because(
        OPERATION,
        format!("no {} of the driver's 5.25 TiB of addresses are free in one piece", Bytes(size)),
        "Free reservations, or ask for a smaller one.",
    )
}
