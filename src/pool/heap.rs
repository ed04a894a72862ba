//! The memory of one tag: blocks in segments that grow.
//!
//! [`Blocks`] knows which parts of the mapped memory are in use. It changes under a lock that is
//! never held over a system call. A thread that maps or unmaps takes the segments; other threads
//! that need them wait, and the rest go on allocating from mapped memory. No user code runs while
//! the segments are taken, except when a tag falls asleep or wakes: then other threads do not wait
//! but get an error.

use super::blocks::{BlockRequest, Blocks, Hole, UsedBlock};
use super::page_cache::PageCache;
use super::segment::{Segment, Unmapped};
use super::sleep::Asleep;
use super::{PoolOptions, Statistics, Tag};
use crate::bytes::Bytes;
use crate::copy::Slice;
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result};
use crate::range_map::RangeMap;
use crate::reserve::ReserveOptions;
use crate::slots::lock;
use crate::trace::{self, quiet};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// What the heaps of a pool share.
pub(super) struct PoolContext {
    pub(super) cache: PageCache,
    pub(super) options: PoolOptions,
    /// The heap of each segment's addresses.
    owners: Mutex<RangeMap<Weak<Heap>, HUGE_PAGE>>,
    in_use: AtomicU64,
    peak: AtomicU64,
}

impl PoolContext {
    pub(super) fn new(cache: PageCache, options: PoolOptions) -> PoolContext {
        let (in_use, peak) = (AtomicU64::new(0), AtomicU64::new(0));
        PoolContext { cache, options, owners: Mutex::default(), in_use, peak }
    }

    /// The most that all tags together had in use at once.
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// The heap that an address belongs to.
    pub(super) fn owner(&self, address: u64) -> Option<Arc<Heap>> {
        lock(&self.owners).at(address)?.value.upgrade()
    }

    /// Counts an allocation. Called under the heap's lock, before a reset can free the block.
    fn count(&self, size: u64) {
        let in_use = self.in_use.fetch_add(size, Ordering::Relaxed) + size;
        if in_use > self.peak() {
            self.peak.fetch_max(in_use, Ordering::Relaxed);
        }
    }

    fn uncount(&self, size: u64) {
        self.in_use.fetch_sub(size, Ordering::Relaxed);
    }
}

/// The memory of one tag.
pub(super) struct Heap {
    pub(super) tag: Tag,
    pub(super) pool: Arc<PoolContext>,
    books: Mutex<Books>,
    /// Signalled when a thread returns the segments.
    returned: Condvar,
}

pub(super) struct Books {
    pub(super) blocks: Blocks,
    pub(super) state: TagState,
    /// `None` while a thread has taken them.
    segments: Option<Vec<Segment>>,
    /// Blocks with slices or running copies, by address.
    pins: BTreeMap<u64, Pins>,
    mapped: u64,
    reserved: u64,
}

/// The pins of a block.
#[derive(Default)]
struct Pins {
    count: u32,
    /// The block, if it was freed: it becomes free with its last pin.
    freed: Option<UsedBlock>,
}

/// Keeps a block from being reused. Slices of blocks have one, and pass it on to their copies.
pub(super) struct Pin {
    heap: Weak<Heap>,
    address: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a child of fork the lock may be held by a thread that does not exist there.
        if let Some(heap) = self.heap.upgrade().filter(|heap| !heap.pool.cache.in_child()) {
            heap.unpin(self.address);
        }
    }
}

pub(super) enum TagState {
    Awake,
    /// A thread puts it to sleep or wakes it.
    Changing,
    Asleep(Asleep),
}

/// The segments while a thread has them. Dropping it returns them.
pub(super) struct TakenSegments<'a> {
    heap: &'a Heap,
    pub(super) segments: Vec<Segment>,
}

impl TakenSegments<'_> {
    /// The segment around an address.
    pub(super) fn at(&mut self, address: u64) -> Option<&mut Segment> {
        self.segments.iter_mut().find(|segment| segment.contains(address))
    }

    /// A part of the memory, hidden or not.
    pub(super) fn slice(&self, range: &Range<u64>) -> Result<Slice<'_>> {
        match self.segments.iter().find(|segment| segment.contains(range.start)) {
            Some(segment) => segment.slice(range.start - segment.address(), range.end - range.start),
            None => Err(no_block(range.start)),
        }
    }

    pub(super) fn mapped_ranges(&self) -> Vec<Range<u64>> {
        self.segments.iter().flat_map(Segment::mapped_ranges).collect()
    }

    /// Hides all memory from lookups by address. Fails while a slice or a copy uses any of it.
    pub(super) fn hide(&mut self, operation: &'static str) -> Result<()> {
        self.segments.iter_mut().try_for_each(|segment| segment.hide(operation))
    }

    pub(super) fn show(&mut self) {
        self.segments.iter_mut().for_each(Segment::show);
    }
}

impl Drop for TakenSegments<'_> {
    fn drop(&mut self) {
        if self.heap.pool.cache.in_child() {
            // A callback forked, and its child returned: the lock may be held by another thread.
            return;
        }
        let segments = std::mem::take(&mut self.segments);
        let mut books = self.heap.lock();
        books.mapped = segments.iter().map(Segment::mapped).sum();
        books.reserved = segments.iter().map(Segment::size).sum();
        books.segments = Some(segments);
        drop(books);
        self.heap.returned.notify_all();
    }
}

/// Where memory is mapped for a request.
struct Growth {
    /// The number of the segment.
    segment: usize,
    /// The offsets that the request needs.
    needed: Range<u64>,
    /// The offsets that are mapped if there is memory for them.
    wanted: Range<u64>,
}

impl Growth {
    /// Maps at least `step` bytes, up to the end of the hole.
    fn new(segments: &[Segment], segment: usize, needed: Range<u64>, hole_end: u64, step: u64) -> Growth {
        let end = needed.end.max(needed.start.saturating_add(step).min(hole_end));
        let end = end.next_multiple_of(segments[segment].step()).min(hole_end);
        Growth { segment, wanted: needed.start..end, needed }
    }

    /// Plans a growth in the existing segments; `None` if they have no room.
    fn plan(segments: &[Segment], blocks: &Blocks, request: BlockRequest, step: u64) -> Option<Growth> {
        let granule = segments.first()?.step();
        // A small hole that is large enough, unless the alignment prevents it; or any hole that is
        // large enough together with the free memory beside it.
        let small = blocks.hole(request.run_size().next_multiple_of(granule));
        let small = small.and_then(|hole| Growth::in_hole(segments, &hole, request, step));
        small.or_else(|| blocks.holes().find_map(|hole| Growth::in_hole(segments, &hole, request, step)))
    }

    fn in_hole(segments: &[Segment], hole: &Hole, request: BlockRequest, step: u64) -> Option<Growth> {
        let (size, alignment) = (request.run_size(), request.run_alignment());
        let number = segments.iter().position(|segment| segment.contains(hole.range.start))?;
        let (granule, address) = (segments[number].step(), segments[number].address());
        let (start, end) = (hole.range.start - address, hole.range.end - address);
        let first = (hole.range.start - hole.before).next_multiple_of(alignment) - address;
        if first + size > end + hole.after {
            return None;
        }
        let needed = start.max(first / granule * granule)..(first + size).next_multiple_of(granule).min(end);
        (!needed.is_empty()).then(|| Growth::new(segments, number, needed, end, step))
    }
}

const ALLOCATE: &str = "allocate memory from a pool";
const FREE: &str = "free memory of a pool";
const RESET: &str = "reset a tag of a pool";

impl Heap {
    pub(super) fn new(tag: Tag, pool: &Arc<PoolContext>) -> Heap {
        let books = Books {
            blocks: Blocks::default(),
            state: TagState::Awake,
            segments: Some(Vec::new()),
            pins: BTreeMap::new(),
            mapped: 0,
            reserved: 0,
        };
        Heap { tag, pool: pool.clone(), books: Mutex::new(books), returned: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    pub(super) fn check_awake(&self, books: &Books, operation: &'static str) -> Result<()> {
        if matches!(books.state, TagState::Awake) { Ok(()) } else { Err(self.not_awake(&books.state, operation)) }
    }

    pub(super) fn not_awake(&self, state: &TagState, operation: &'static str) -> Error {
        let state = if matches!(state, TagState::Asleep(_)) { "is asleep" } else { "is falling asleep or waking" };
        Invalid::because(operation, format!("{} {state}", self.tag), "Wake it first (Pool::wake).")
    }

    fn wait<'a>(&self, books: MutexGuard<'a, Books>) -> MutexGuard<'a, Books> {
        self.returned.wait(books).unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the segments, after waiting for a thread that has them.
    pub(super) fn take<'a>(&'a self, mut books: MutexGuard<'a, Books>) -> (TakenSegments<'a>, MutexGuard<'a, Books>) {
        loop {
            if let Some(segments) = books.segments.take() {
                return (TakenSegments { heap: self, segments }, books);
            }
            books = self.wait(books);
        }
    }

    /// Takes the segments of a tag that is awake; `None` if it is not. Does not wait for a tag that
    /// falls asleep or wakes: the user's code runs meanwhile.
    fn take_awake(&self) -> Option<(TakenSegments<'_>, MutexGuard<'_, Books>)> {
        let books = self.lock();
        if !matches!(books.state, TagState::Awake) {
            return None;
        }
        let (taken, books) = self.take(books);
        if !matches!(books.state, TagState::Awake) {
            // Returning the segments takes the lock.
            drop(books);
            return None;
        }
        Some((taken, books))
    }

    /// Allocates a block.
    pub(super) fn allocate(self: &Arc<Self>, request: BlockRequest) -> Result<UsedBlock> {
        loop {
            let mut books = self.lock();
            self.check_awake(&books, ALLOCATE)?;
            if let Some(block) = books.blocks.allocate(request) {
                self.pool.count(block.size);
                return Ok(block);
            }
            if let Some(block) = self.allocate_new(books, request)? {
                return Ok(block);
            }
        }
    }

    /// Slow path: maps memory for a block, or waits for a thread that maps or unmaps. Returns
    /// `None` if there may be room now.
    #[cold]
    fn allocate_new<'a>(
        self: &'a Arc<Self>,
        books: MutexGuard<'a, Books>,
        request: BlockRequest,
    ) -> Result<Option<UsedBlock>> {
        if books.segments.is_none() {
            drop(self.wait(books));
            return Ok(None);
        }
        let _quiet = quiet();
        let (mut taken, books) = self.take(books);
        drop(books);
        let grown = self.grow(&mut taken, request);
        // Before the segments are returned: other threads could use up the new memory.
        let mut books = self.lock();
        let block = match &grown {
            Ok(range) => {
                let run = books.blocks.add_memory(range);
                run.and_then(|run| books.blocks.allocate_in(run, request))
            }
            Err(_) => books.blocks.search(request),
        };
        if let Some(block) = block {
            self.pool.count(block.size);
            return Ok(Some(block));
        }
        drop(books);
        grown.map(|_| None).map_err(|error| self.explain(error, request))
    }

    /// Maps memory for a request, in new addresses if there is no room. Returns its addresses.
    /// After an error nothing has changed.
    fn grow(self: &Arc<Self>, taken: &mut TakenSegments<'_>, request: BlockRequest) -> Result<Range<u64>> {
        let step = self.pool.options.step;
        let planned = Growth::plan(&taken.segments, &self.lock().blocks, request, step);
        let (growth, new) = match planned {
            Some(growth) => (growth, None),
            None => {
                let segment = self.new_segment(taken, request)?;
                let (address, size) = (segment.address(), segment.size());
                let needed = 0..request.run_size().next_multiple_of(segment.step());
                taken.segments.push(segment);
                let number = taken.segments.len() - 1;
                (Growth::new(&taken.segments, number, needed, size, step), Some(address))
            }
        };
        let segment = &mut taken.segments[growth.segment];
        let grown = match segment.ensure(growth.wanted.clone()) {
            Err(error) if error.is_out_of_memory() && growth.wanted != growth.needed => {
                segment.ensure(growth.needed.clone()).map(|()| growth.needed)
            }
            ensured => ensured.map(|()| growth.wanted),
        };
        match grown {
            Ok(range) => Ok(segment.address() + range.start..segment.address() + range.end),
            Err(error) => {
                self.remove_empty(taken, |segment| Some(segment.address()) == new);
                Err(error)
            }
        }
    }

    /// Adds the caller's request to the error of a growth.
    fn explain(&self, error: Error, request: BlockRequest) -> Error {
        let Error::OutOfMemory(mut details) = error else { return error };
        details.asked = request.size;
        details.place.push_str(&format!(", for a block of {}", self.tag));
        Error::OutOfMemory(details)
    }

    /// Reserves as many addresses again as the tag has, or as the request needs: few segments, and
    /// no more addresses than about twice what the tag holds.
    fn new_segment(self: &Arc<Self>, taken: &TakenSegments<'_>, request: BlockRequest) -> Result<Segment> {
        let PoolContext { cache, options, owners, .. } = &*self.pool;
        let segments = options.segments.clone().for_pages(cache.kind().page.size())?;
        let granule = segments.step();
        let needed = request.run_size().next_multiple_of(granule);
        let largest = ReserveOptions::MAX_SIZE / granule * granule;
        if needed > largest {
            return Err(Invalid::because(
                ALLOCATE,
                format!("{} in handles of {} are more than one reservation", Bytes(needed), Bytes(granule)),
                "Allow smaller handles, or ask for less.",
            ));
        }
        let reserved: u64 = taken.segments.iter().map(Segment::size).sum();
        let roomy = reserved.max(options.step.min(GIANT_PAGE)).next_multiple_of(granule).min(largest).max(needed);
        let reserve = |size: u64| {
            // Segments of whole GiB are aligned to a GiB for later requests.
            let needed = if size % GIANT_PAGE == 0 { GIANT_PAGE } else { HUGE_PAGE };
            let alignment = request.run_alignment().max(needed);
            Segment::with(cache, size, segments.clone().reserve(ReserveOptions::default().alignment(alignment)))
        };
        let segment = match reserve(roomy) {
            Err(Error::Invalid(_)) if roomy > needed => reserve(needed)?,
            reserved => reserved?,
        };
        self.lock().blocks.add_area(segment.address(), segment.size());
        // Reservations do not overlap.
        let _ = lock(owners).insert(segment.address(), segment.size(), Arc::downgrade(self));
        Ok(segment)
    }

    /// Frees the block of a handle, unless a reset already has.
    pub(super) fn free(&self, block: UsedBlock) {
        let books = self.lock();
        if books.blocks.is_current(block) {
            self.free_block(books, block);
        }
    }

    /// Frees the block that begins at an address and has no handle.
    pub(super) fn free_at(&self, address: u64) -> Result<()> {
        let books = self.lock();
        let Some(block) = books.find(address) else { return Err(no_block(address)) };
        if !books.blocks.is_disowned(block) {
            return Err(Invalid::because(
                FREE,
                format!("the block at {address:#x} belongs to a handle"),
                "Drop the handle, or take the address out of it by Block::into_address.",
            ));
        }
        self.free_block(books, block);
        Ok(())
    }

    /// Frees a block now, or with its last pin.
    fn free_block(&self, mut books: MutexGuard<'_, Books>, block: UsedBlock) {
        if let Some(pins) = books.pins.get_mut(&block.address) {
            pins.freed = Some(block);
            return;
        }
        books.blocks.free(block);
        drop(books);
        self.pool.uncount(block.size);
    }

    /// Detaches a block from its handle.
    pub(super) fn disown(&self, block: UsedBlock) {
        let mut books = self.lock();
        if books.blocks.is_current(block) {
            books.blocks.disown(block);
        }
    }

    /// Pins a block. The caller has the lock.
    pub(super) fn pin(self: &Arc<Self>, books: &mut Books, address: u64) -> Pin {
        books.pins.entry(address).or_default().count += 1;
        Pin { heap: Arc::downgrade(self), address }
    }

    fn unpin(&self, address: u64) {
        let mut books = self.lock();
        let Some(pins) = books.pins.get_mut(&address) else { return };
        pins.count -= 1;
        if pins.count > 0 {
            return;
        }
        let freed = pins.freed;
        books.pins.remove(&address);
        if let Some(block) = freed {
            self.free_block(books, block);
        }
    }

    /// Frees all blocks.
    pub(super) fn reset(&self) -> Result<()> {
        let books = self.lock();
        self.check_awake(&books, RESET)?;
        let (mut taken, mut books) = self.take(books);
        // It may have fallen asleep meanwhile. Blocks that are asleep are not mapped, but not free.
        self.check_awake(&books, RESET)?;
        // Memory that a slice or a copy uses must not be reused. New slices need the lock.
        let unused = taken.hide(RESET);
        taken.show();
        unused?;
        if !books.pins.is_empty() {
            let users = format!("copies of {} block(s) may still run; whether they end is unknown.", books.pins.len());
            return Err(Error::InUse { operation: RESET, users });
        }
        let in_use = books.blocks.statistics().in_use;
        books.blocks.reset(&taken.mapped_ranges());
        drop(books);
        drop(taken);
        self.pool.uncount(in_use);
        Ok(())
    }

    /// Unmaps handles without blocks, into the cache. Returns the address and the size of each.
    /// Handles that cannot be unmapped stay; that is an error only if nothing was unmapped.
    pub(super) fn unmap_free(&self) -> Result<Vec<(u64, u64)>> {
        let Some((taken, mut books)) = self.take_awake() else { return Ok(Vec::new()) };
        let ranges = set_aside(&taken.segments, &mut books.blocks);
        let aside = SetAside { heap: self, ranges, generation: books.blocks.generation() };
        drop(books);
        // The hook runs without the segments taken: it may use the pool.
        drop(taken);
        if aside.ranges.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(hook) = &self.pool.options.segments.before_unmap {
            hook(&aside.ranges);
            self.pool.cache.check_process()?;
        }
        aside.unmap()
    }

    /// Maps handles again that were unmapped in vain, as far as their memory and addresses are
    /// still there.
    pub(super) fn map_again(&self, handles: &[(u64, u64)]) {
        let _quiet = quiet();
        let Some((mut taken, books)) = self.take_awake() else { return };
        drop(books);
        for &(address, size) in handles {
            let Some(segment) = taken.at(address) else { continue };
            let range = address..address + size;
            // Another thread may have used the addresses meanwhile.
            if !self.lock().blocks.is_hole(&range) {
                continue;
            }
            match segment.map_handle(address - segment.address(), size) {
                Ok(()) => self.lock().blocks.add_memory(&range),
                Err(error) => return trace::warn(error, "free memory of a pool could not be mapped again"),
            };
        }
    }

    /// Drops the segments that have no memory, if the tag is awake.
    pub(super) fn remove_empty_segments(&self) {
        if self.pool.cache.in_child() {
            return;
        }
        if let Some((mut taken, books)) = self.take_awake() {
            drop(books);
            self.remove_empty(&mut taken, |_| true);
        }
    }

    /// Drops those of some segments that have no memory.
    fn remove_empty(&self, taken: &mut TakenSegments<'_>, which: impl Fn(&Segment) -> bool) {
        taken.segments.retain(|segment| {
            let keep = segment.mapped() > 0 || !which(segment);
            if !keep {
                self.lock().blocks.remove_area(segment.address());
                lock(&self.pool.owners).remove(segment.address());
            }
            keep
        });
    }

    pub(super) fn statistics(&self) -> Statistics {
        let books = self.lock();
        let asleep = match &books.state {
            TagState::Asleep(asleep) => asleep.size(),
            _ => 0,
        };
        Statistics { mapped: books.mapped, reserved: books.reserved, asleep, ..books.blocks.statistics() }
    }
}

impl Books {
    /// The block that begins at an address, unless it was freed and only its pins keep it.
    pub(super) fn find(&self, address: u64) -> Option<UsedBlock> {
        let freed = self.pins.get(&address).is_some_and(|pins| pins.freed.is_some());
        if freed { None } else { self.blocks.find(address) }
    }
}

/// Free memory that is about to be unmapped. What is not unmapped becomes free again when this is
/// dropped, also if the hook panics.
struct SetAside<'a> {
    heap: &'a Heap,
    ranges: Vec<Range<u64>>,
    /// A reset frees all that is mapped: then these ranges are not set aside any more.
    generation: u64,
}

impl SetAside<'_> {
    /// Unmaps the ranges, as [`Heap::unmap_free`] says.
    fn unmap(mut self) -> Result<Vec<(u64, u64)>> {
        let _quiet = quiet();
        let Some((mut taken, books)) = self.heap.take_awake() else {
            // It fell asleep meanwhile. Waking maps these ranges again, as free memory.
            return Ok(Vec::new());
        };
        if books.blocks.generation() != self.generation {
            return Ok(Vec::new());
        }
        drop(books);
        let (mut handles, mut error) = (Vec::new(), None);
        for range in std::mem::take(&mut self.ranges) {
            let Some(segment) = taken.at(range.start) else { continue };
            let address = segment.address();
            let mut unmapped = Unmapped::new();
            let result = segment.unmap(range.start - address..range.end - address, &mut unmapped);
            let places: Vec<_> = unmapped.iter().map(|(offset, memory)| (address + offset, memory.size())).collect();
            for (start, size) in &places {
                self.heap.lock().blocks.remove_memory(&(*start..start + size));
            }
            unmapped.into_iter().rev().for_each(|(_, memory)| self.heap.pool.cache.put(memory));
            match result {
                Ok(()) => handles.extend(places.into_iter().rev()),
                Err(refused) => {
                    let inside = |part: Range<u64>| part.start.max(range.start)..part.end.min(range.end);
                    let mapped = segment.mapped_ranges().into_iter().map(inside);
                    self.ranges.extend(mapped.filter(|part| !part.is_empty()));
                    error = Some(refused);
                }
            }
        }
        match error {
            Some(error) if handles.is_empty() => Err(error),
            Some(error) => {
                trace::warn(error, "some memory of a pool could not be unmapped");
                Ok(handles)
            }
            None => Ok(handles),
        }
    }
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        if self.ranges.is_empty() || self.heap.pool.cache.in_child() {
            return;
        }
        let mut books = self.heap.lock();
        if books.blocks.generation() == self.generation {
            for range in &self.ranges {
                books.blocks.add_memory(range);
            }
        }
    }
}

/// Sets free memory in whole handles aside.
fn set_aside(segments: &[Segment], blocks: &mut Blocks) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    for free in blocks.free_ranges(HUGE_PAGE) {
        let Some(segment) = segments.iter().find(|segment| segment.contains(free.start)) else { continue };
        let Some(range) = segment.whole_handles(&free) else { continue };
        blocks.set_aside(&range);
        ranges.push(range);
    }
    ranges
}

pub(super) fn no_block(address: u64) -> Error {
    Invalid::because(
        FREE,
        format!("no block of this pool begins at {address:#x}"),
        "It was freed already, or the address is inside of a block.",
    )
}

pub(super) fn impossible(size: u64, alignment: u64) -> Error {
    if alignment.is_power_of_two() && alignment <= GIANT_PAGE {
        let problem = format!("a block cannot have {}", Bytes(size));
        return Invalid::because(ALLOCATE, problem, "Ask for 1 byte to 128 GiB (ReserveOptions::MAX_SIZE).");
    }
    let problem = format!("the alignment {alignment:#x} is not possible");
    Invalid::because(ALLOCATE, problem, "Use a power of two of at most 1 GiB.")
}
