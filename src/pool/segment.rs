//! Addresses that memory is put behind as it is needed.
//!
//! A segment reserves its addresses once and for all. [`Segment::ensure`] maps what is missing in a
//! range, [`Segment::shrink`] unmaps what is not needed; both change all they should or nothing.
//! Memory comes from a [`PageCache`] and goes back to it.
//!
//! The driver maps and unmaps whole handles, one ioctl each. So a range is filled with the largest
//! handles that fit into what is missing (2 MiB, 20 MiB and 1 GiB unless told otherwise), and only
//! whole handles are unmapped: to give memory back in small steps, allow small handles only.

use super::page_cache::{Loan, PageCache, Source};
use crate::bytes::Bytes;
use crate::copy::{Slice, slice_of};
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result};
use crate::mapping::Mapping;
use crate::mapping::mapping_table::cover;
use crate::physical::PhysicalMemory;
use crate::range_map::RangeMap;
use crate::reserve::{Reservation, ReserveOptions};
use crate::trace;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What is called with the addresses that are about to be unmapped.
pub type BeforeUnmap = Arc<dyn Fn(&[Range<u64>]) + Send + Sync>;

/// How a segment is made.
#[derive(Clone)]
#[must_use]
pub struct SegmentOptions {
    reserve: ReserveOptions,
    handles: Vec<u64>,
    before_unmap: Option<BeforeUnmap>,
}

impl Default for SegmentOptions {
    fn default() -> Self {
        SegmentOptions {
            reserve: ReserveOptions::new(),
            handles: vec![HUGE_PAGE, 10 * HUGE_PAGE, GIANT_PAGE],
            before_unmap: None,
        }
    }
}

impl fmt::Debug for SegmentOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentOptions")
            .field("reserve", &self.reserve)
            .field("handles", &self.handles)
            .field("before_unmap", &self.before_unmap.is_some())
            .finish()
    }
}

impl SegmentOptions {
    /// Anywhere, with handles of 2 MiB, 20 MiB and 1 GiB.
    pub fn new() -> SegmentOptions {
        SegmentOptions::default()
    }

    /// Where the addresses are.
    pub fn reserve(mut self, options: ReserveOptions) -> Self {
        self.reserve = options;
        self
    }

    /// The sizes of handles that memory is taken in, in any order: the smallest is a multiple of
    /// the page size and the step in which the segment grows and shrinks, the others are multiples
    /// of it. Of a cache of 1 GiB pages, sizes that are not whole GiB are left out.
    pub fn handles(mut self, sizes: &[u64]) -> Self {
        self.handles = sizes.to_vec();
        self
    }

    /// Called before anything is unmapped, with the addresses: the place to wait for work on the
    /// NPU that may still use them, for which unmapping does not wait. If it panics, nothing is
    /// unmapped.
    pub fn before_unmap(mut self, hook: impl Fn(&[Range<u64>]) + Send + Sync + 'static) -> Self {
        self.before_unmap = Some(Arc::new(hook));
        self
    }
}

/// Reserved addresses with memory behind any part of them.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{PageCache, Segment};
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let cache = PageCache::new(&device);
/// let mut segment = Segment::new(&cache, 1 << 30)?;
/// segment.ensure(0..100 << 20)?;
/// segment.slice(0, 5)?.write(b"hello")?;
/// segment.shrink(2 << 20..1 << 30)?; // into the cache
/// segment.ensure(0..100 << 20)?; // out of it
/// assert_eq!(segment.mapped(), 100 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Segment {
    cache: PageCache,
    options: SegmentOptions,
    /// One after the other, without a gap: one reservation is at most 128 GiB.
    parts: Vec<Reservation>,
    /// What is mapped, by its offset.
    pieces: RangeMap<Mapping, HUGE_PAGE>,
    address: u64,
    size: u64,
    mapped: u64,
    /// Whether lookups by address do not find what is mapped.
    hidden: bool,
    /// What a call has unmapped so far, with its offsets. Empty between calls, with its room.
    unmapped: Unmapped,
}

/// Memory that was unmapped, with its offsets.
pub(super) type Unmapped = Vec<(u64, PhysicalMemory)>;

/// Room for so many is kept.
const ROOM: usize = 64;

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Segment { address, size, mapped, .. } = self;
        write!(f, "Segment({address:#x}, {}, {} mapped)", Bytes(*size), Bytes(*mapped))
    }
}

const NEW: &str = "make a segment";
const ENSURE: &str = "map memory in a segment";
const SHRINK: &str = "unmap memory of a segment";

impl Segment {
    /// Reserves `size` bytes of addresses, rounded up to whole pages.
    ///
    /// # Errors
    ///
    /// Those of [`Session::reserve`](crate::Session::reserve). More than 128 GiB are several
    /// reservations: [`Error::Invalid`] if so many addresses are not free in one piece.
    pub fn new(cache: &PageCache, size: u64) -> Result<Segment> {
        Segment::with(cache, size, SegmentOptions::new())
    }

    /// Makes a segment with options.
    ///
    /// # Errors
    ///
    /// Those of [`Segment::new`]; [`Error::Invalid`] for sizes of handles that cannot be.
    pub fn with(cache: &PageCache, size: u64, mut options: SegmentOptions) -> Result<Segment> {
        let page = cache.kind().page.size();
        options.handles.retain(|&size| page == HUGE_PAGE || size % page == 0);
        options.handles.sort_unstable();
        options.handles.dedup();
        let step = options.handles.first().copied().unwrap_or(0);
        if step == 0 || step % page != 0 || options.handles.iter().any(|&size| size % step != 0) {
            return Err(Invalid::because(
                NEW,
                format!("its handles cannot be of {:?} bytes", options.handles),
                "The smallest is a multiple of the page size, and the others are multiples of the smallest.",
            ));
        }
        if page == GIANT_PAGE {
            options.reserve = options.reserve.alignment(GIANT_PAGE);
        }
        let Some(size) = size.checked_next_multiple_of(step) else {
            return Err(Invalid::because(NEW, format!("{} are too much", Bytes(size)), "Ask for less."));
        };
        let parts = reserve(cache, size, &options.reserve)?;
        let address = parts[0].address();
        let (pieces, unmapped) = (RangeMap::default(), Vec::new());
        Ok(Segment { cache: cache.clone(), options, parts, pieces, address, size, mapped: 0, hidden: false, unmapped })
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size of its addresses in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that have memory behind them.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// What is mapped: offset and size of each handle, in order.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64)> {
        self.pieces.iter().map(|piece| (piece.start, piece.size))
    }

    /// The memory behind an offset, to export it or to map it at a second place.
    pub fn memory_at(&self, offset: u64) -> Option<PhysicalMemory> {
        Some(self.pieces.at(offset)?.value.memory())
    }

    /// `size` bytes from `offset` on, all of which must be mapped. They cannot be unmapped while it
    /// lives.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside or is not mapped, and for what crosses from one of
    /// the 128 GiB reservations of a large segment into the next.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        if offset > self.size || size > self.size - offset {
            return Err(outside("take a part of a segment", &(offset..offset.saturating_add(size)), self.size));
        }
        // Of the segment's own mappings, which may be hidden from lookups by address.
        let at = |address: u64| Some(self.pieces.at(address - self.address)?.value.inner.clone());
        let start = self.address + offset;
        slice_of(&self.cache.session().inner, start, size, |end| {
            let (found, whole) = cover(start, end, at);
            whole.then_some(found)
        })
    }

    /// Hides all that is mapped, or will be, from lookups by address, so that nothing but
    /// [`Segment::slice`] can use it.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] while a slice or a copy uses any of it. Nothing is hidden then.
    pub(super) fn hide(&mut self, operation: &'static str) -> Result<()> {
        self.hidden = true;
        let hidden = self.pieces.values_mut().try_for_each(|mapping| mapping.hide(operation));
        hidden.inspect_err(|_| self.show())
    }

    /// Lets lookups by address find all that is mapped.
    pub(super) fn show(&mut self) {
        self.hidden = false;
        self.pieces.values_mut().for_each(|mapping| mapping.show());
    }

    /// Puts memory behind all of a range of offsets that has none, from the cache, rounded out to
    /// the smallest handle. Where there is memory it stays as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside; [`Error::OutOfMemory`] with all that was missing
    /// and what is free; those of [`PageCache::take`] and [`Reservation::map`]. Nothing has changed
    /// then: what was created is released, what was cached is cached. (A mapping that the kernel
    /// refuses to take back after such an error stays, and the next call uses it.)
    pub fn ensure(&mut self, range: Range<u64>) -> Result<()> {
        self.check(ENSURE, &range)?;
        self.cache.place().session.check_process()?;
        let step = self.step();
        let (start, end) = match range.is_empty() {
            true => return Ok(()),
            false => (range.start / step * step, range.end.next_multiple_of(step).min(self.size)),
        };
        let mut at = start;
        let mut done: Vec<(u64, Source)> = Vec::new();
        let mut loan = Loan::default();
        while let Some((offset, size)) = self.missing(at, end) {
            match self.map_missing(offset, size, &mut loan) {
                Ok(source) => {
                    at = offset + size;
                    if at == end {
                        break;
                    }
                    done.push((offset, source));
                }
                Err(error) => {
                    // Newest first, as the cache hands out what came last.
                    for (offset, source) in done.into_iter().rev() {
                        match self.unmap_piece(offset) {
                            Ok(memory) => self.cache.give_back(memory, source),
                            Err(error) => trace::warn(error, "memory stays mapped that could not be unmapped again"),
                        }
                    }
                    self.cache.refill(loan);
                    return Err(self.cache.explain(error, self.missing_bytes(start, end)));
                }
            }
        }
        Ok(())
    }

    /// Maps memory of the caller's at an offset: the same memory may be mapped at several places.
    ///
    /// # Errors
    ///
    /// Those of [`Reservation::map`].
    pub fn map(&mut self, offset: u64, memory: &PhysicalMemory) -> Result<()> {
        if offset > self.size || memory.size() > self.size - offset {
            return Err(outside(ENSURE, &(offset..offset.saturating_add(memory.size())), self.size));
        }
        let mapping = self.map_piece(offset, memory)?;
        self.insert(offset, mapping);
        Ok(())
    }

    /// Unmaps all handles that lie inside of a range of offsets, and returns how many bytes that
    /// were. Their memory goes to the cache.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside; [`Error::InUse`] while a slice or a copy uses a
    /// part; [`Error::Refused`] if the kernel does not unmap one. All is mapped then as it was
    /// before, with its contents. (If the kernel does not map again either what it has unmapped
    /// just now, also at a second try, that is logged, and its memory goes to the cache.)
    pub fn shrink(&mut self, range: Range<u64>) -> Result<u64> {
        self.check(SHRINK, &range)?;
        self.cache.place().session.check_process()?;
        if self.options.before_unmap.is_some() {
            self.announce(&self.inside(&range));
        }
        let before = self.mapped;
        let unmapped = self.unmap_inside(range);
        while let Some((_, memory)) = self.unmapped.pop() {
            self.cache.put(memory);
        }
        if self.unmapped.capacity() > ROOM {
            self.unmapped = Vec::new();
        }
        unmapped.map(|()| before - self.mapped)
    }

    /// The offsets of the handles that lie inside of a range.
    pub(super) fn inside(&self, range: &Range<u64>) -> Vec<u64> {
        let inside = self.pieces.starting_in(range.clone()).filter(|piece| piece.end() <= range.end);
        inside.map(|piece| piece.start).collect()
    }

    /// The part of a range that whole handles cover, in a range that is mapped from end to end.
    pub(super) fn span(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let offsets = self.inside(range);
        let (first, last) = (offsets.first()?, offsets.last()?);
        Some(*first..self.pieces.get(*last)?.end())
    }

    /// The step in which it grows.
    pub(super) fn step(&self) -> u64 {
        self.options.handles[0]
    }

    /// Unmaps without a call of the hook, and returns the memory with its offsets. After an error
    /// all is mapped as before, except for what comes with the error.
    pub(super) fn unmap(&mut self, range: Range<u64>) -> Result<Unmapped, (Error, Unmapped)> {
        let unmapped = self.unmap_inside(range);
        let memories = std::mem::take(&mut self.unmapped);
        match unmapped {
            Ok(()) => Ok(memories),
            Err(error) => Err((error, memories)),
        }
    }

    /// The same, with the memory in [`Segment::unmapped`].
    fn unmap_inside(&mut self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let Some(piece) = self.pieces.first_from(at) else { break };
            let offset = piece.start;
            at = piece.end();
            if at > range.end {
                break;
            }
            match self.unmap_piece(offset) {
                Ok(memory) => self.unmapped.push((offset, memory)),
                Err(error) => {
                    let unmapped = std::mem::take(&mut self.unmapped);
                    self.unmapped = self.restore(unmapped);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Maps memory again where it was unmapped. Returns what the kernel refuses twice.
    pub(super) fn restore(&mut self, memories: Unmapped) -> Unmapped {
        let mut lost = Vec::new();
        for (offset, memory) in memories.into_iter().rev() {
            match self.map_piece(offset, &memory).or_else(|_| self.map_piece(offset, &memory)) {
                Ok(mapping) => self.insert(offset, mapping),
                Err(error) => {
                    trace::error(error, "memory could not be mapped again where it was");
                    lost.push((offset, memory));
                }
            }
        }
        lost
    }

    /// Maps new memory of a size at an offset, if it is not there yet.
    pub(super) fn map_new(&mut self, offset: u64, size: u64) -> Result<()> {
        if self.pieces.get(offset).is_some_and(|piece| piece.size == size) {
            return Ok(());
        }
        let mut loan = Loan::default();
        match self.map_missing(offset, size, &mut loan) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.cache.refill(loan);
                Err(error)
            }
        }
    }

    /// Maps new memory of a size at an offset where there is none.
    fn map_missing(&mut self, offset: u64, size: u64, loan: &mut Loan) -> Result<Source> {
        let (memory, source) = self.cache.take_for(size, loan)?;
        match self.map_piece(offset, &memory) {
            Ok(mapping) => {
                self.insert(offset, mapping);
                Ok(source)
            }
            Err(error) => {
                self.cache.give_back(memory, source);
                Err(error)
            }
        }
    }

    /// Bytes from `at` to `end` that have no memory.
    fn missing_bytes(&self, mut at: u64, end: u64) -> u64 {
        let mut bytes = 0;
        while let Some((offset, size)) = self.missing(at, end) {
            bytes += size;
            at = offset + size;
        }
        bytes
    }

    /// Unmaps one handle again, into the cache, if there is one.
    pub(super) fn unmap_again(&mut self, offset: u64) -> Result<()> {
        if self.pieces.get(offset).is_some() {
            let memory = self.unmap_piece(offset)?;
            self.cache.put(memory);
        }
        Ok(())
    }

    /// Maps memory at a place that is known to be inside.
    #[inline]
    fn map_piece(&self, offset: u64, memory: &PhysicalMemory) -> Result<Mapping> {
        let part = (offset / ReserveOptions::MAX_SIZE) as usize;
        let mapping = self.parts[part].map_hidden(offset % ReserveOptions::MAX_SIZE, memory)?;
        if !self.hidden {
            mapping.show();
        }
        Ok(mapping)
    }

    fn insert(&mut self, offset: u64, mapping: Mapping) {
        self.mapped += mapping.size();
        // The session's table has no overlap either.
        let _ = self.pieces.insert(offset, mapping.size(), mapping);
    }

    /// Unmaps one piece. If that is refused it stays.
    fn unmap_piece(&mut self, offset: u64) -> Result<PhysicalMemory> {
        let Some(mapping) = self.pieces.remove(offset) else {
            return Err(outside(SHRINK, &(offset..offset), self.size));
        };
        let memory = mapping.memory();
        match mapping.unmap() {
            Ok(()) => {
                self.mapped -= memory.size();
                Ok(memory)
            }
            Err(failed) => {
                let _ = self.pieces.insert(offset, failed.object.size(), failed.object);
                Err(failed.error)
            }
        }
    }

    /// Where the first handle is missing from an offset on, and its size; `None` if none is before
    /// `end`.
    #[inline]
    fn missing(&self, mut at: u64, end: u64) -> Option<(u64, u64)> {
        while let Some(piece) = self.pieces.at(at).filter(|piece| piece.start < end) {
            at = piece.end();
        }
        if at >= end {
            return None;
        }
        // A hole, up to the next mapping, the end, or the border of a reservation.
        let border = (at / ReserveOptions::MAX_SIZE + 1) * ReserveOptions::MAX_SIZE;
        let next = self.pieces.first_from(at).map_or(end, |piece| piece.start.min(end));
        let hole = next.min(border) - at;
        let size = self.options.handles.iter().rev().copied().find(|&size| size <= hole);
        // Memory of the caller's, which may have any size, can leave a smaller hole.
        Some((at, size.unwrap_or(hole)))
    }

    #[inline]
    fn check(&self, operation: &'static str, range: &Range<u64>) -> Result<()> {
        if range.start <= range.end && range.end <= self.size {
            return Ok(());
        }
        Err(outside(operation, range, self.size))
    }

    /// Calls the hook before these pieces are unmapped.
    fn announce(&self, offsets: &[u64]) {
        let Some(hook) = &self.options.before_unmap else { return };
        let pieces = offsets.iter().filter_map(|&offset| Some((offset, self.pieces.get(offset)?.size)));
        let ranges = joined(pieces.map(|(offset, size)| self.address + offset..self.address + offset + size));
        if !ranges.is_empty() {
            hook(&ranges);
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.cache.place().session.in_child() {
            return;
        }
        let offsets: Vec<u64> = self.pieces().map(|(offset, _)| offset).collect();
        // A destructor cannot refuse: a hook that panics has had its chance to wait.
        if catch_unwind(AssertUnwindSafe(|| self.announce(&offsets))).is_err() {
            trace::error(
                format!("{self:?}"),
                "the hook panicked when a segment was dropped; it is unmapped all the same",
            );
        }
        for offset in offsets.into_iter().rev() {
            match self.unmap_piece(offset) {
                Ok(memory) => self.cache.put(memory),
                Err(error) => trace::error(error, "a part of a dropped segment stays mapped"),
            }
        }
    }
}

/// Ranges in order, those that touch made into one.
pub(super) fn joined(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Contiguous reservations.
fn reserve(cache: &PageCache, size: u64, options: &ReserveOptions) -> Result<Vec<Reservation>> {
    const MAX: u64 = ReserveOptions::MAX_SIZE;
    let session = cache.session();
    if size <= MAX {
        return Ok(vec![session.reserve_with(size, options)?]);
    }
    let all = ReserveOptions::ADDRESSES;
    let at = |start: u64| -> Result<Vec<Reservation>> {
        let mut parts = Vec::new();
        let mut done = 0;
        while done < size {
            let part = MAX.min(size - done);
            parts.push(session.reserve_with(part, &options.address(start + done))?);
            done += part;
        }
        Ok(parts)
    };
    if let Some(start) = options.fixed() {
        return at(start);
    }
    if size > all.end - all.start {
        return Err(contiguous(size));
    }
    // Heaps of 128 GiB are enabled from the low end on: the first that is free is soon found.
    let mut start = all.start;
    while size <= all.end - start {
        match at(start) {
            Ok(parts) => return Ok(parts),
            Err(Error::Invalid(_)) => start += GIANT_PAGE,
            Err(error) => return Err(error),
        }
    }
    Err(contiguous(size))
}

fn contiguous(size: u64) -> Error {
    Invalid::because(
        NEW,
        format!("no {} of the driver's 5.25 TiB of addresses are free in one piece", Bytes(size)),
        "One reservation is at most 128 GiB (ReserveOptions::MAX_SIZE), and several make a segment only side by side: \
         make it early, or use several segments.",
    )
}

fn outside(operation: &'static str, range: &Range<u64>, size: u64) -> Error {
    let problem = format!("the offsets {:#x} to {:#x} are not inside of {}", range.start, range.end, Bytes(size));
    Invalid::because(operation, problem, "A range begins before it ends, and lies inside of its segment.")
}
