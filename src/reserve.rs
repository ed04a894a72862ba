//! Reservations: addresses that nothing else in the process uses, to map physical memory at.
//!
//! In the kernel a reservation is a run of 2 MiB chunks in a heap, made by one ALLOC and freed as a
//! whole by one FREE_PAGES. The kernel chooses no addresses, and can crash if an address is used
//! while its ALLOC or FREE_PAGES runs. So addresses come from our own [`arena`], nobody knows an
//! address before its ALLOC returned, and FREE_PAGES begins after the last mapping, view or copy is
//! gone. The first mapping ties a reservation to its device until the reservation is freed.

pub(crate) mod arena;

use crate::bytes::Bytes;
use crate::driver::svm::{DYNAMIC_START, GIANT_PAGE, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX};
use crate::error::{Error, Failed, Invalid, Result};
use crate::session::SessionInner;
use crate::session::undo::{Left, Live, Undo, undo};
use crate::slots::lock;
use arena::Unavailable;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Where a reservation may be: anywhere at a multiple of 2 MiB, by default.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{ReserveOptions, Session};
///
/// let session = Session::open()?;
/// let address = ReserveOptions::ADDRESSES.start + (3 << 30);
/// let there = session.reserve_with(2 << 20, &ReserveOptions::default().address(address))?;
/// assert_eq!(there.address(), address);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct ReserveOptions {
    pub(crate) address: Option<u64>,
    alignment: Option<u64>,
}

impl ReserveOptions {
    /// The addresses that reservations are made from: 0x12C0_0000_0000 to 24 TiB. The driver uses
    /// lower ones for video and read-only memory.
    pub const ADDRESSES: Range<u64> = NORMAL_START..DYNAMIC_START;

    /// The largest reservation: 128 GiB, the size of the kernel's largest heap.
    pub const MAX_SIZE: u64 = RESERVE_HEAP_MAX;

    /// Exactly at this address, a multiple of 2 MiB.
    pub fn address(mut self, address: u64) -> Self {
        self.address = Some(address);
        self
    }

    /// At a multiple of this, a power of two from 2 MiB to 1 GiB. Memory in 1 GiB pages needs 1
    /// GiB.
    pub fn alignment(mut self, alignment: u64) -> Self {
        self.alignment = Some(alignment);
        self
    }
}

/// Reserved addresses. A counted reference: the addresses are freed when the last clone is dropped
/// and nothing is mapped there any more.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, ReserveOptions, Session};
///
/// let session = Session::open()?;
/// let reservation = session.reserve_with(1 << 30, &ReserveOptions::default().alignment(1 << 30))?;
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
    owner: Mutex<Option<Owner>>,
    pub(crate) session: Arc<Live<SessionInner>>,
}

const OPERATION: &str = "reserve addresses";

impl Reservation {
    pub(crate) fn new(session: &Arc<Live<SessionInner>>, size: u64, options: &ReserveOptions) -> Result<Reservation> {
        session.check_process()?;
        if size == 0 || size % HUGE_PAGE != 0 || size > RESERVE_HEAP_MAX {
            let rule = "Sizes are multiples of 2 MiB, and not 0. One reservation lies inside one heap of the kernel, \
                        which is at most 128 GiB: reserve several.";
            return Err(Invalid::because(OPERATION, format!("a reservation cannot have {}", Bytes(size)), rule));
        }
        let alignment = options.alignment.unwrap_or(HUGE_PAGE);
        if !alignment.is_power_of_two() || !(HUGE_PAGE..=GIANT_PAGE).contains(&alignment) {
            return Err(Invalid::because(
                OPERATION,
                format!("the alignment {alignment:#x} is not valid"),
                "It must be a power of two from 2 MiB to 1 GiB.",
            ));
        }
        let start = match options.address {
            None => take(session, size, alignment)?,
            Some(address) => take_at(session, address, size, alignment)?,
        };
        // No other code knows the address yet, so nothing can use it while ALLOC runs.
        if let Err(refused) = session.svm.alloc(start, size) {
            lock(&session.arena).free(start);
            let arguments = format!("address {start:#x}, size {}", Bytes(size));
            return Err(refused.operation(OPERATION).arguments(arguments).into());
        }
        session.reserved.fetch_add(size, Ordering::Relaxed);
        let reserved = Reserved { start, size, owner: Mutex::default(), session: session.clone() };
        Ok(Reservation { inner: Arc::new(Live::new(reserved)) })
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.inner.start
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.inner.size
    }

    /// Frees the addresses. Dropping the reservation frees them when the last mapping is gone, and
    /// logs errors.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] if something is mapped there or a clone is alive; [`Error::Refused`] if the
    /// kernel refuses. The error returns the reservation.
    #[doc(alias = "aclrtReleaseMemAddress")]
    #[doc(alias = "cuMemAddressFree")]
    pub fn free(self) -> Result<(), Failed<Reservation>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: Reservation { inner } })
    }
}

impl Reserved {
    fn describe(&self) -> String {
        format!("{:#x}, {}", self.start, Bytes(self.size))
    }

    /// Ties the reservation to the owner of memory that is about to be mapped; returns the present
    /// owner if that is another. The kernel does the same for the device: it refuses any other
    /// until the reservation is freed. It also refuses copies that cover own and imported memory.
    /// Call under the lock of the mappings.
    pub(crate) fn claim(&self, device: u32, imported: bool) -> Result<(), Owner> {
        let mut owner = lock(&self.owner);
        // The ids of open devices are below 100, and the host's is 65.
        let owner = owner.get_or_insert(Owner { device: device as u8, imported, mapped: false });
        if (owner.device.into(), owner.imported) == (device, imported) { Ok(()) } else { Err(*owner) }
    }

    /// Makes the claim last until the reservation is freed, because a mapping was made.
    pub(crate) fn confirm(&self) {
        if let Some(owner) = lock(&self.owner).as_mut() {
            owner.mapped = true;
        }
    }

    /// Undoes the claims of mappings that were refused, unless a mapping was ever made. Call under
    /// the lock of the mappings, when none is being made.
    pub(crate) fn unclaim(&self) {
        lock(&self.owner).take_if(|owner| !owner.mapped);
    }
}

impl Undo for Reserved {
    const OPERATION: &'static str = "free reserved addresses";

    fn session(&self) -> &SessionInner {
        &self.session
    }

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
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner {
    /// A byte: every reservation has room for it.
    pub(crate) device: u8,
    pub(crate) imported: bool,
    /// The kernel has mapped memory here. Before that, a mapping is only being made.
    mapped: bool,
}

/// Takes addresses from the arena, with a new heap if needed.
fn take(session: &SessionInner, size: u64, alignment: u64) -> Result<u64> {
    if let Some(start) = lock(&session.arena).take(size, alignment) {
        return Ok(start);
    }
    // A new heap is at least as large as the request and starts at a whole GiB.
    let taken = session.take_with_heap(|arena| match arena.take(size, alignment) {
        Some(start) => Ok(start),
        None => Err(arena.next_window(size).map_or(Unavailable::Border, Unavailable::NeedsHeap)),
    })?;
    taken.map_err(|_| {
        let problem = format!("no {} of the driver's 5.25 TiB of addresses are free in one piece", Bytes(size));
        Invalid::because(OPERATION, problem, "Free reservations, or ask for a smaller one.")
    })
}

/// Takes addresses at a fixed place.
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
            format!("{address:#x} with {} is outside the driver's addresses", Bytes(size)),
            "Fixed addresses lie between 0x12c000000000 and 0x180000000000 (24 TiB).",
        ));
    }
    let taken = session.take_with_heap(|arena| arena.take_at(address, size).map(|()| address))?;
    taken.map_err(|taken| match taken {
        Unavailable::Border | Unavailable::NeedsHeap(_) => Invalid::because(
            OPERATION,
            format!("{address:#x} with {} crosses the border of a heap", Bytes(size)),
            "A reservation must lie inside one heap of the kernel, and heaps that are in use do not \
             move: choose another address, or reserve the largest ranges first.",
        ),
        Unavailable::Reserved => Invalid::because(
            OPERATION,
            format!("part of {address:#x} with {} is already reserved", Bytes(size)),
            "Free it first, or choose another address.",
        ),
    })
}
