//! Addresses with memory behind any part of them.
//!
//! A segment reserves its addresses once. [`Segment::ensure`] maps what is missing in a range,
//! [`Segment::shrink`] unmaps a range; each does all of its work or none. Memory comes from a
//! [`PageCache`] and goes back to it.
//!
//! The driver maps and unmaps whole handles, one ioctl each. So a range is filled with the largest
//! handles that fit into its gaps (by default 2 MiB, 20 MiB and 1 GiB), and only whole handles are
//! unmapped: to give memory back in small steps, allow small handles only.

use super::page_cache::PageCache;
use crate::bytes::Bytes;
use crate::copy::{Slice, slice_of};
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result};
use crate::mapping::Mapping;
use crate::physical::PhysicalMemory;
use crate::range_map::RangeMap;
use crate::reserve::{Reservation, ReserveOptions};
use crate::trace;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Called with the addresses that are about to be unmapped.
pub(super) type BeforeUnmap = Arc<dyn Fn(&[Range<u64>]) + Send + Sync>;

/// Where a segment is, and how it grows.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{PageCache, Segment, SegmentOptions};
/// use ascend_vmm::{LogicalId, ReserveOptions, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let options = SegmentOptions::default()
///     .reserve(ReserveOptions::default().alignment(1 << 30))
///     .handles(&[2 << 20])
///     .before_unmap(|addresses| println!("wait for work on {addresses:x?}"));
/// let segment = Segment::with(&PageCache::new(&device), 4 << 20, options)?;
/// assert_eq!(segment.address() % (1 << 30), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct SegmentOptions {
    reserve: ReserveOptions,
    handles: Vec<u64>,
    pub(super) before_unmap: Option<BeforeUnmap>,
}

/// Any addresses, handles of 2 MiB, 20 MiB and 1 GiB, no hook.
impl Default for SegmentOptions {
    fn default() -> Self {
        SegmentOptions {
            reserve: ReserveOptions::default(),
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
    /// Where the addresses are.
    pub fn reserve(mut self, options: ReserveOptions) -> Self {
        self.reserve = options;
        self
    }

    /// The sizes of handles, in any order. The smallest is a multiple of the page size, and the
    /// segment grows and shrinks in steps of it; the others are multiples of the smallest. With 1
    /// GiB pages, sizes that are not whole GiB are ignored.
    pub fn handles(mut self, sizes: &[u64]) -> Self {
        self.handles = sizes.to_vec();
        self
    }

    /// Called with the addresses before anything is unmapped. Unmapping does not wait for the NPU,
    /// so wait here for work that may still use them. If the hook panics, nothing is unmapped.
    pub fn before_unmap(mut self, hook: impl Fn(&[Range<u64>]) + Send + Sync + 'static) -> Self {
        self.before_unmap = Some(Arc::new(hook));
        self
    }

    /// Checks and sorts the sizes of handles, for a cache with pages of this size.
    pub(super) fn for_pages(mut self, page: u64) -> Result<Self> {
        self.handles.retain(|&size| page == HUGE_PAGE || size % page == 0);
        self.handles.sort_unstable();
        self.handles.dedup();
        let step = self.handles.first().copied().unwrap_or(0);
        if step == 0 || step % page != 0 || self.handles.iter().any(|&size| size % step != 0) {
            return Err(Invalid::because(
                NEW,
                format!("its handles cannot have {:?} bytes", self.handles),
                "The smallest is a multiple of the page size, and the others are multiples of the smallest.",
            ));
        }
        if page == GIANT_PAGE {
            self.reserve = self.reserve.alignment(GIANT_PAGE);
        }
        Ok(self)
    }

    /// The smallest handle, after [`SegmentOptions::for_pages`].
    pub(super) fn step(&self) -> u64 {
        self.handles[0]
    }
}

/// Reserved addresses with memory behind any part of them.
///
/// ```
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
    /// Without gaps between them. One reservation is at most 128 GiB.
    parts: Vec<Reservation>,
    /// Mapped handles by their offset.
    pieces: RangeMap<Mapping, HUGE_PAGE>,
    address: u64,
    size: u64,
    mapped: u64,
    /// Whether the mappings are hidden from lookups by address.
    hidden: bool,
}

/// Unmapped memory with its offsets.
pub(super) type Unmapped = Vec<(u64, PhysicalMemory)>;

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
    /// Those of [`Session::reserve`](crate::Session::reserve). More than 128 GiB take several
    /// reservations side by side: [`Error::Invalid`] if there is no room for them.
    pub fn new(cache: &PageCache, size: u64) -> Result<Segment> {
        Segment::with(cache, size, SegmentOptions::default())
    }

    /// Makes a segment with options.
    ///
    /// # Errors
    ///
    /// Those of [`Segment::new`]; [`Error::Invalid`] for impossible sizes of handles.
    pub fn with(cache: &PageCache, size: u64, options: SegmentOptions) -> Result<Segment> {
        let options = options.for_pages(cache.kind().page.size())?;
        let Some(size) = size.checked_next_multiple_of(options.step()) else {
            return Err(Invalid::because(NEW, format!("{} are too much", Bytes(size)), "Ask for less."));
        };
        let parts = reserve(cache, size, &options.reserve)?;
        let address = parts[0].address();
        let pieces = RangeMap::default();
        Ok(Segment { cache: cache.clone(), options, parts, pieces, address, size, mapped: 0, hidden: false })
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of addresses.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Mapped bytes.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Offset and size of each mapped handle, in order.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64)> {
        self.pieces.iter().map(|piece| (piece.start, piece.size))
    }

    /// The memory behind an offset, to export it or to map it at a second place.
    pub fn memory_at(&self, offset: u64) -> Option<PhysicalMemory> {
        Some(self.pieces.at(offset)?.value.memory())
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.size
    }

    /// Address and size of each mapped handle.
    pub(super) fn handles(&self) -> impl Iterator<Item = (u64, u64)> {
        self.pieces().map(|(offset, size)| (self.address + offset, size))
    }

    /// Addresses with memory.
    pub(super) fn mapped_ranges(&self) -> Vec<Range<u64>> {
        self.addresses(self.pieces().map(|(offset, size)| offset..offset + size))
    }

    /// The smallest handle.
    pub(super) fn step(&self) -> u64 {
        self.options.step()
    }

    /// A part of the segment, all of which must be mapped. It cannot be unmapped while the slice is
    /// alive.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the part is outside of the segment or not mapped, or if it crosses the
    /// border between two of the 128 GiB reservations of a large segment.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Invalid::check_inside("take a part of a segment", offset, size, self.size)?;
        // Its own mappings: lookups by address do not find hidden ones.
        let find = |address: u64| Some(self.pieces.at(address - self.address)?.value.inner.clone());
        slice_of(&self.cache.session().inner, self.address + offset, size, find)
    }

    /// Hides present and future mappings from lookups by address: only [`Segment::slice`] reaches
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] while a slice or a copy uses any of them. Then nothing is hidden.
    pub(super) fn hide(&mut self, operation: &'static str) -> Result<()> {
        self.hidden = true;
        let hidden = self.pieces.values_mut().try_for_each(|mapping| mapping.hide(operation));
        hidden.inspect_err(|_| self.show())
    }

    /// Lets lookups by address find the mappings again.
    pub(super) fn show(&mut self) {
        self.hidden = false;
        self.pieces.values_mut().for_each(|mapping| mapping.show());
    }

    /// Maps memory from the cache wherever a range of offsets has none. The range is rounded out to
    /// multiples of the smallest handle. Memory that is already there stays.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the segment; [`Error::OutOfMemory`] with what was
    /// missing and what is free; those of [`PageCache::take`] and [`Reservation::map`]. Then
    /// nothing has changed: created memory is released, and cached memory is cached again. (If the
    /// kernel refuses to undo a mapping, it stays, and the next call uses it.)
    pub fn ensure(&mut self, range: Range<u64>) -> Result<()> {
        self.check(ENSURE, &range)?;
        self.cache.check_process()?;
        if range.is_empty() {
            return Ok(());
        }
        let step = self.step();
        let (start, end) = (range.start / step * step, range.end.next_multiple_of(step).min(self.size));
        let gap = self.first_gap(start, end);
        let gaps = std::iter::successors(gap, |&(offset, size)| self.first_gap(offset + size, end));
        let gaps: Vec<(u64, u64)> = gaps.collect();
        let missing = gaps.iter().map(|(_, size)| size).sum();
        self.map_new(&gaps).map_err(|error| self.cache.explain(error, missing))
    }

    /// Maps the caller's memory at an offset. Memory may be mapped at several places.
    ///
    /// # Errors
    ///
    /// Those of [`Reservation::map`].
    pub fn map(&mut self, offset: u64, memory: &PhysicalMemory) -> Result<()> {
        Invalid::check_inside(ENSURE, offset, memory.size(), self.size)?;
        let part = (offset / ReserveOptions::MAX_SIZE) as usize;
        let mapping = self.parts[part].map_hidden(offset % ReserveOptions::MAX_SIZE, memory)?;
        if !self.hidden {
            mapping.show();
        }
        self.mapped += memory.size();
        // It cannot overlap: the session's table would have refused it.
        let _ = self.pieces.insert(offset, memory.size(), mapping);
        Ok(())
    }

    /// Unmaps all handles that lie inside of a range of offsets, and moves their memory to the
    /// cache. Returns the number of unmapped bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the segment; [`Error::InUse`] while a slice or a
    /// copy uses a part of it; [`Error::Refused`] if the kernel refuses to unmap a handle. Then
    /// everything is mapped as before, with its contents. (If the kernel also refuses, twice, to
    /// map a handle again, that is logged, and its memory moves to the cache.)
    pub fn shrink(&mut self, range: Range<u64>) -> Result<u64> {
        self.check(SHRINK, &range)?;
        self.cache.check_process()?;
        self.announce(&range);
        let before = self.mapped;
        let mut unmapped = Vec::new();
        let result = self.unmap(range, &mut unmapped);
        unmapped.into_iter().rev().for_each(|(_, memory)| self.cache.put(memory));
        result.map(|()| before - self.mapped)
    }

    /// The offsets of the handles that lie inside of a range.
    fn handles_inside(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let pieces = self.pieces.starting_in(range.clone());
        pieces.map(|piece| piece.start..piece.end()).filter(|piece| piece.end <= range.end).collect()
    }

    /// The addresses of the whole handles inside of a range of addresses. All of the range must be
    /// mapped.
    pub(super) fn whole_handles(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let handles = self.handles_inside(&(range.start - self.address..range.end - self.address));
        self.addresses(handles.into_iter()).pop()
    }

    /// Unmaps the handles inside of a range without calling the hook, and appends their memory to
    /// `unmapped`. After an error everything is mapped as before, except for what is there.
    pub(super) fn unmap(&mut self, range: Range<u64>, unmapped: &mut Unmapped) -> Result<()> {
        let mut done = Vec::new();
        for handle in self.handles_inside(&range) {
            match self.unmap_piece(handle.start) {
                Ok(memory) => done.push((handle.start, memory)),
                Err(error) => {
                    unmapped.extend(self.restore(done));
                    return Err(error);
                }
            }
        }
        unmapped.extend(done);
        Ok(())
    }

    /// Maps memory again where it was. Returns the memory that the kernel refused twice.
    pub(super) fn restore(&mut self, memories: Unmapped) -> Unmapped {
        let mut lost = Vec::new();
        for (offset, memory) in memories.into_iter().rev() {
            if let Err(error) = self.map(offset, &memory).or_else(|_| self.map(offset, &memory)) {
                trace::error(error, "memory could not be mapped again where it was");
                lost.push((offset, memory));
            }
        }
        lost
    }

    /// Maps memory from the cache at places that have none, given by offset and size: all or
    /// nothing.
    fn map_new(&mut self, places: &[(u64, u64)]) -> Result<()> {
        let loan = self.cache.lend(places.iter().map(|&(_, size)| size))?;
        let mut mapped = 0;
        let result = places.iter().zip(&loan.memories).try_for_each(|(&(offset, _), (memory, _))| {
            self.map(offset, memory)?;
            mapped += 1;
            Ok(())
        });
        if result.is_err() {
            for &(offset, _) in places[..mapped].iter().rev() {
                if let Err(error) = self.unmap_piece(offset) {
                    trace::warn(error, "a mapping could not be undone and stays");
                }
            }
            self.cache.give_back(loan);
        }
        result
    }

    /// Maps a handle from the cache at an offset, unless it is still mapped there.
    pub(super) fn map_handle(&mut self, offset: u64, size: u64) -> Result<()> {
        match self.pieces.get(offset) {
            Some(piece) if piece.size == size => Ok(()),
            _ => self.map_new(&[(offset, size)]),
        }
    }

    /// Unmaps everything into the cache, and logs what the kernel refuses.
    pub(super) fn unmap_all(&mut self) {
        for handle in self.handles_inside(&(0..self.size)).into_iter().rev() {
            match self.unmap_piece(handle.start) {
                Ok(memory) => self.cache.put(memory),
                Err(error) => trace::error(error, "a part of a segment stays mapped"),
            }
        }
    }

    /// Unmaps one handle, which stays if the kernel refuses.
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

    /// The place and the size of the first handle that is missing between two offsets.
    fn first_gap(&self, mut at: u64, end: u64) -> Option<(u64, u64)> {
        while let Some(piece) = self.pieces.at(at).filter(|piece| piece.start < end) {
            at = piece.end();
        }
        if at >= end {
            return None;
        }
        // The gap ends at the next mapping, the end, or the border of a reservation.
        let border = (at / ReserveOptions::MAX_SIZE + 1) * ReserveOptions::MAX_SIZE;
        let next = self.pieces.first_from(at).map_or(end, |piece| piece.start.min(end));
        let gap = next.min(border) - at;
        let size = self.options.handles.iter().rev().copied().find(|&size| size <= gap);
        // The caller's own memory, which may have any size, can leave a smaller gap.
        Some((at, size.unwrap_or(gap)))
    }

    fn check(&self, operation: &'static str, range: &Range<u64>) -> Result<()> {
        if range.start <= range.end && range.end <= self.size {
            return Ok(());
        }
        Err(outside(operation, range, self.size))
    }

    /// Calls the hook before the handles inside of a range are unmapped.
    fn announce(&self, range: &Range<u64>) {
        let Some(hook) = &self.options.before_unmap else { return };
        let ranges = self.addresses(self.handles_inside(range).into_iter());
        if !ranges.is_empty() {
            hook(&ranges);
        }
    }

    /// The addresses of ranges of offsets that are in order. Ranges that touch are joined.
    fn addresses(&self, offsets: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
        let mut joined: Vec<Range<u64>> = Vec::new();
        for Range { start, end } in offsets {
            let (start, end) = (self.address + start, self.address + end);
            match joined.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => joined.push(start..end),
            }
        }
        joined
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.cache.in_child() {
            return;
        }
        // A destructor cannot refuse: a hook that panics has had its chance to wait.
        if catch_unwind(AssertUnwindSafe(|| self.announce(&(0..self.size)))).is_err() {
            trace::error(format!("{self:?}"), "the hook panicked when a segment was dropped; it is unmapped anyway");
        }
        self.unmap_all();
    }
}

/// Reserves addresses: several reservations without gaps if one is not enough.
fn reserve(cache: &PageCache, size: u64, options: &ReserveOptions) -> Result<Vec<Reservation>> {
    const MAX: u64 = ReserveOptions::MAX_SIZE;
    let session = cache.session();
    if size <= MAX {
        return Ok(vec![session.reserve_with(size, options)?]);
    }
    let reserve_at = |start: u64| -> Result<Vec<Reservation>> {
        let offsets = (0..size).step_by(MAX as usize);
        let part = |offset| session.reserve_with(MAX.min(size - offset), &options.address(start + offset));
        offsets.map(part).collect()
    };
    if let Some(start) = options.address {
        return reserve_at(start);
    }
    // The session reserves from the low end, so everything above some address is free.
    let all = ReserveOptions::ADDRESSES;
    let last = all.end.saturating_sub(size);
    for start in (all.start..=last).step_by(GIANT_PAGE as usize) {
        match reserve_at(start) {
            Err(Error::Invalid(_)) => {}
            reserved => return reserved,
        }
    }
    Err(Invalid::because(
        NEW,
        format!("no {} of the driver's 5.25 TiB of addresses are free in one piece", Bytes(size)),
        "One reservation is at most 128 GiB (ReserveOptions::MAX_SIZE), and a larger segment needs several side by \
         side: make it early, or use several segments.",
    ))
}

fn outside(operation: &'static str, range: &Range<u64>, size: u64) -> Error {
    let problem = format!("the offsets {:#x} to {:#x} are not inside of {}", range.start, range.end, Bytes(size));
    Invalid::because(operation, problem, "Use a range that begins before it ends and lies inside of the segment.")
}
