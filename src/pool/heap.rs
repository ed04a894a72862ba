//! The memory of one tag: blocks in segments that grow.
//!
//! [`Blocks`] knows what is in use among what is mapped, and changes under a lock that is never
//! held over a system call. A thread that maps or unmaps takes the segments out of their place;
//! others that need them wait, and the rest goes on allocating from what is mapped. Nothing of the
//! user's runs while they are out, except when a tag falls asleep or wakes: then others do not wait
//! but get an error.

use super::blocks::{Blocks, Claim, Misuse, Request, Usage};
use super::page_cache::PageCache;
use super::segment::{BeforeUnmap, Segment, SegmentOptions, joined};
use super::sleep::Asleep;
use super::{PoolOptions, Statistics, Tag};
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result, bytes};
use crate::fork::ForkGuard;
use crate::reserve::ReserveOptions;
use crate::slots::lock;
use crate::trace::{self, quiet};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};

/// What all tags of a pool share.
pub(super) struct Shared {
    pub(super) cache: PageCache,
    pub(super) options: PoolOptions,
    /// The session's, within reach.
    guard: ForkGuard,
    /// Whose addresses are whose: end and tag of each segment, by its start.
    pub(super) owners: RwLock<BTreeMap<u64, (u64, Weak<Heap>)>>,
    in_use: AtomicU64,
    peak: AtomicU64,
}

impl Shared {
    pub(super) fn new(cache: PageCache, options: PoolOptions) -> Shared {
        let guard = cache.place().session.svm.guard;
        let owners = RwLock::default();
        Shared { cache, options, guard, owners, in_use: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    #[inline]
    pub(super) fn check_process(&self) -> Result<()> {
        if self.in_child() { self.cache.place().session.svm.check_process() } else { Ok(()) }
    }

    #[inline]
    pub(super) fn in_child(&self) -> bool {
        self.guard.in_child()
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Called before other threads can free what was taken, by a reset of its tag.
    #[inline]
    fn count(&self, taken: u64) {
        let in_use = self.in_use.fetch_add(taken, Ordering::Relaxed) + taken;
        if in_use > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(in_use, Ordering::Relaxed);
        }
    }

    #[inline]
    fn uncount(&self, freed: u64) {
        self.in_use.fetch_sub(freed, Ordering::Relaxed);
    }
}

/// One tag.
pub(super) struct Heap {
    pub(super) tag: Tag,
    pub(super) shared: Arc<Shared>,
    books: Mutex<Books>,
    /// The segments are in their place again.
    changed: Condvar,
}

pub(super) struct Books {
    pub(super) blocks: Blocks,
    pub(super) state: State,
    /// `None` while a thread has them.
    segments: Option<Vec<Room>>,
    /// Counts resets: blocks of before are no longer anyone's.
    pub(super) generation: u32,
    mapped: u64,
    reserved: u64,
}

/// What a tag is doing.
pub(super) enum State {
    Awake,
    /// A thread puts it to sleep or wakes it.
    Changing,
    Asleep(Asleep),
}

/// A segment, and where it has no memory.
pub(super) struct Room {
    pub(super) segment: Segment,
    /// Offset and size of the holes, and the same by size.
    holes: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Room {
    fn new(segment: Segment) -> Room {
        let size = segment.size();
        Room { segment, holes: BTreeMap::from([(0, size)]), by_size: BTreeSet::from([(size, 0)]) }
    }

    /// The offset of the smallest hole of at least `size`.
    fn hole(&self, size: u64) -> Option<(u64, u64)> {
        self.by_size.range((size, 0)..).next().map(|&(size, offset)| (offset, size))
    }

    /// A part of a hole got memory.
    fn fill(&mut self, range: &Range<u64>) {
        let Some((&start, &size)) = self.holes.range(..=range.start).next_back() else { return };
        let end = start + size;
        self.holes.remove(&start);
        self.by_size.remove(&(size, start));
        for hole in [start..range.start, range.end..end] {
            if hole.start < hole.end {
                self.holes.insert(hole.start, hole.end - hole.start);
                self.by_size.insert((hole.end - hole.start, hole.start));
            }
        }
    }

    /// A range has no memory any more.
    fn empty(&mut self, range: &Range<u64>) {
        let mut hole = range.clone();
        if let Some((&start, &size)) = self.holes.range(..range.start).next_back() {
            if start + size == range.start {
                self.holes.remove(&start);
                self.by_size.remove(&(size, start));
                hole.start = start;
            }
        }
        if let Some(size) = self.holes.remove(&range.end) {
            self.by_size.remove(&(size, range.end));
            hole.end = range.end + size;
        }
        self.holes.insert(hole.start, hole.end - hole.start);
        self.by_size.insert((hole.end - hole.start, hole.start));
    }

    fn address(&self) -> u64 {
        self.segment.address()
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        (self.address()..self.end()).contains(&address)
    }

    fn end(&self) -> u64 {
        self.segment.address() + self.segment.size()
    }

    /// Addresses that have memory.
    pub(super) fn mapped(&self) -> Vec<Range<u64>> {
        let start = self.address();
        joined(self.segment.pieces().map(|(offset, size)| start + offset..start + offset + size))
    }
}

/// The segments while a thread has them. They go back when it is dropped.
pub(super) struct Taken<'a> {
    heap: &'a Heap,
    pub(super) rooms: Vec<Room>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.heap.shared.in_child() {
            // A callback forked, and its child returned: the lock may be held for ever.
            return;
        }
        let rooms = std::mem::take(&mut self.rooms);
        let mut books = lock(&self.heap.books);
        books.mapped = rooms.iter().map(|room| room.segment.mapped()).sum();
        books.reserved = rooms.iter().map(|room| room.segment.size()).sum();
        books.segments = Some(rooms);
        drop(books);
        self.heap.changed.notify_all();
    }
}

/// Memory that is to be mapped for a request.
struct Growth {
    /// Which segment.
    room: usize,
    /// Offsets that are enough for the request.
    enough: Range<u64>,
    /// Offsets that are mapped if there is memory for them.
    wanted: Range<u64>,
}

const ALLOCATE: &str = "allocate memory from a pool";
const FREE: &str = "free memory of a pool";
const RESET: &str = "reset a tag of a pool";

impl Heap {
    pub(super) fn new(tag: Tag, shared: &Arc<Shared>) -> Heap {
        let books = Books {
            blocks: Blocks::new(),
            state: State::Awake,
            segments: Some(Vec::new()),
            generation: 0,
            mapped: 0,
            reserved: 0,
        };
        Heap { tag, shared: shared.clone(), books: Mutex::new(books), changed: Condvar::new() }
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    /// Takes the segments out of their place, when they are in it.
    pub(super) fn take<'a>(&'a self, mut books: MutexGuard<'a, Books>) -> (Taken<'a>, MutexGuard<'a, Books>) {
        loop {
            if let Some(rooms) = books.segments.take() {
                return (Taken { heap: self, rooms }, books);
            }
            books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A block for a request, and the generation that it belongs to.
    #[inline]
    pub(super) fn allocate(self: &Arc<Self>, request: Request) -> Result<(Claim, u32)> {
        let mut books = self.lock();
        if let State::Awake = books.state {
            if let Some(claim) = books.blocks.allocate(request) {
                self.shared.count(request.size);
                return Ok((claim, books.generation));
            }
        }
        self.allocate_new(books, request)
    }

    #[cold]
    fn allocate_new<'a>(
        self: &'a Arc<Self>,
        mut books: MutexGuard<'a, Books>,
        request: Request,
    ) -> Result<(Claim, u32)> {
        let _quiet = quiet();
        loop {
            if !matches!(books.state, State::Awake) {
                return Err(self.asleep(&books.state, ALLOCATE));
            }
            if let Some(claim) = books.blocks.allocate(request) {
                self.shared.count(request.size);
                return Ok((claim, books.generation));
            }
            if books.segments.is_none() {
                // Another thread maps or unmaps; there may be room after that.
                books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (mut taken, locked) = self.take(books);
            let growth = plan(&taken.rooms, &locked.blocks, request, &self.shared.options);
            drop(locked);
            let growth = match growth {
                Some(growth) => growth,
                None => {
                    self.add_room(&mut taken, request)?;
                    drop(taken);
                    books = self.lock();
                    continue;
                }
            };
            let room = &mut taken.rooms[growth.room];
            let grown = match room.segment.ensure(growth.wanted.clone()) {
                Err(error) if error.is_out_of_memory() && growth.wanted != growth.enough => {
                    room.segment.ensure(growth.enough.clone()).map(|()| growth.enough)
                }
                ensured => ensured.map(|()| growth.wanted),
            };
            let range = grown?;
            room.fill(&range);
            let start = room.address();
            books = self.lock();
            books.blocks.add_memory(start + range.start, range.end - range.start);
            // Before other threads see it, which would leave this one with nothing.
            let claim = books.blocks.allocate(request);
            let generation = books.generation;
            if claim.is_some() {
                self.shared.count(request.size);
            }
            drop(books);
            drop(taken);
            if let Some(claim) = claim {
                return Ok((claim, generation));
            }
            books = self.lock();
        }
    }

    /// Reserves more addresses: each time as many as there are already, so that there are few
    /// segments.
    fn add_room(self: &Arc<Self>, taken: &mut Taken<'_>, request: Request) -> Result<()> {
        let shared = &self.shared;
        let granule = shared.options.granule(&shared.cache);
        let needed = request.taken().next_multiple_of(granule);
        let largest = ReserveOptions::MAX_SIZE / granule * granule;
        if needed > largest {
            return Err(Invalid::because(
                ALLOCATE,
                format!("{} in handles of {} are more than one reservation", bytes(needed), bytes(granule)),
                "Allow smaller handles, or ask for less.",
            ));
        }
        let alignment = request.alignment().max(HUGE_PAGE);
        let reserved: u64 = taken.rooms.iter().map(|room| room.segment.size()).sum();
        let roomy = reserved.max(GIANT_PAGE).next_multiple_of(granule).min(largest).max(needed);
        let make = |size: u64| {
            // Whole GiB, so that there is a place for handles of 1 GiB.
            let alignment = if size % GIANT_PAGE == 0 { GIANT_PAGE } else { alignment };
            let mut options = SegmentOptions::new()
                .reserve(ReserveOptions::new().alignment(alignment))
                .handles(&shared.options.handles);
            if let Some(hook) = &shared.options.before_unmap {
                let hook: BeforeUnmap = hook.clone();
                options = options.before_unmap(move |ranges| hook(ranges));
            }
            Segment::with(&shared.cache, size, options)
        };
        let segment = match make(roomy) {
            Err(Error::Invalid(_)) if roomy > needed => make(needed)?,
            made => made?,
        };
        let (start, end) = (segment.address(), segment.address() + segment.size());
        self.lock().blocks.add_area(start, end - start);
        let owner = Arc::downgrade(self);
        shared.owners.write().unwrap_or_else(PoisonError::into_inner).insert(start, (end, owner));
        taken.rooms.push(Room::new(segment));
        Ok(())
    }

    /// Frees the block of a handle. The block may have gone by a reset.
    #[inline]
    pub(super) fn free(&self, claim: Claim, size: u64, generation: u32) {
        let mut books = self.lock();
        if books.generation == generation {
            books.blocks.free(claim, size);
            drop(books);
            self.shared.uncount(size);
        }
    }

    /// Leaves the block of a handle without it.
    #[inline]
    pub(super) fn disown(&self, claim: Claim, generation: u32) {
        let mut books = self.lock();
        if books.generation == generation {
            books.blocks.disown(claim);
        }
    }

    /// Frees the block that begins at an address.
    pub(super) fn free_at(&self, address: u64) -> Result<()> {
        let freed = self.lock().blocks.free_at(address);
        let freed = freed.map_err(|misuse| match misuse {
            Misuse::NoBlock => no_block(address),
            Misuse::Owned => Invalid::because(
                FREE,
                format!("the block at {address:#x} belongs to a handle"),
                "Drop that, or take the address out of it by Block::into_address.",
            ),
        })?;
        self.shared.uncount(freed);
        Ok(())
    }

    /// Frees all blocks.
    pub(super) fn reset(&self) -> Result<()> {
        let books = self.lock();
        if !matches!(books.state, State::Awake) {
            return Err(self.asleep(&books.state, RESET));
        }
        let (taken, mut books) = self.take(books);
        // It may have fallen asleep while this waited: what is asleep is not mapped, but not free.
        if !matches!(books.state, State::Awake) {
            return Err(self.asleep(&books.state, RESET));
        }
        let mapped: Vec<Range<u64>> = taken.rooms.iter().flat_map(Room::mapped).collect();
        let Usage { in_use, .. } = books.blocks.usage();
        books.blocks.reset(&mapped);
        books.generation = books.generation.wrapping_add(1);
        drop(books);
        drop(taken);
        self.shared.uncount(in_use);
        Ok(())
    }

    /// Unmaps handles that are not in use, into the cache. Returns how many bytes that were. What
    /// cannot be unmapped stays, and is an error only if nothing else could be.
    pub(super) fn unmap_free(&self) -> Result<u64> {
        let books = self.lock();
        if !matches!(books.state, State::Awake) {
            return Ok(0);
        }
        let (taken, mut books) = self.take(books);
        let ranges = victims(&taken.rooms, &mut books.blocks);
        let victims = Victims { heap: self, ranges, generation: books.generation };
        drop(books);
        // The segments are in their place while the hook runs, which may use the pool.
        drop(taken);
        if victims.ranges.is_empty() {
            return Ok(0);
        }
        if let Some(hook) = &self.shared.options.before_unmap {
            hook(&victims.ranges);
            self.shared.check_process()?;
        }
        victims.unmap()
    }

    /// Drops the segments that have no memory.
    fn remove_empty_rooms(&self, taken: &mut Taken<'_>) {
        let is_empty = |room: &Room| room.segment.mapped() == 0;
        for room in taken.rooms.iter().filter(|room| is_empty(room)) {
            self.lock().blocks.remove_area(room.address());
            self.shared.owners.write().unwrap_or_else(PoisonError::into_inner).remove(&room.address());
        }
        taken.rooms.retain(|room| !is_empty(room));
    }

    pub(super) fn statistics(&self) -> Statistics {
        let mut books = self.lock();
        let Usage { in_use, peak, blocks } = books.blocks.usage();
        Statistics {
            in_use,
            peak,
            blocks,
            mapped: books.mapped,
            reserved: books.reserved,
            largest_free: books.blocks.largest_free(),
            cached: 0,
            asleep: match &books.state {
                State::Asleep(asleep) => asleep.size(),
                _ => 0,
            },
        }
    }

    #[cold]
    pub(super) fn asleep(&self, state: &State, operation: &'static str) -> Error {
        let state = match state {
            State::Changing => "is falling asleep or waking",
            _ => "is asleep",
        };
        Invalid::because(operation, format!("{} {state}", self.tag), "Wake it first (Pool::wake).")
    }
}

/// Free memory that was taken out of the books to be unmapped. What is not unmapped goes back when
/// this is dropped, also by a panic of the hook.
struct Victims<'a> {
    heap: &'a Heap,
    ranges: Vec<Range<u64>>,
    /// A reset makes all that is mapped free, these ranges among it: then they are not victims any
    /// more.
    generation: u32,
}

impl Victims<'_> {
    fn unmap(mut self) -> Result<u64> {
        let _quiet = quiet();
        let (mut taken, books) = self.heap.take(self.heap.lock());
        if !matches!(books.state, State::Awake) || books.generation != self.generation {
            // It fell asleep meanwhile, and what was free is unmapped too; or it was reset.
            return Ok(0);
        }
        drop(books);
        let (mut unmapped, mut error) = (0, None);
        for range in std::mem::take(&mut self.ranges) {
            let Some(room) =
                taken.rooms.iter_mut().find(|room| room.address() <= range.start && range.end <= room.end())
            else {
                continue;
            };
            let offsets = range.start - room.address()..range.end - room.address();
            match room.segment.unmap(offsets.clone()) {
                Ok(memories) => {
                    room.empty(&offsets);
                    unmapped += offsets.end - offsets.start;
                    memories.into_iter().rev().for_each(|(_, memory)| self.heap.shared.cache.put(memory));
                }
                Err((refused, lost)) => {
                    // Mostly nothing: the kernel did not map it again either.
                    for (offset, memory) in lost {
                        room.empty(&(offset..offset + memory.size()));
                        self.heap.shared.cache.put(memory);
                    }
                    let inside = |part: Range<u64>| part.start.max(range.start)..part.end.min(range.end);
                    self.ranges.extend(room.mapped().into_iter().map(inside).filter(|part| part.start < part.end));
                    error = Some(refused);
                }
            }
        }
        self.heap.remove_empty_rooms(&mut taken);
        match error {
            Some(error) if unmapped == 0 => Err(error),
            Some(error) => {
                trace::warn(error, "some memory of a pool could not be unmapped");
                Ok(unmapped)
            }
            None => Ok(unmapped),
        }
    }
}

impl Drop for Victims<'_> {
    fn drop(&mut self) {
        if self.ranges.is_empty() || self.heap.shared.in_child() {
            return;
        }
        let mut books = self.heap.lock();
        if books.generation != self.generation {
            return;
        }
        for range in &self.ranges {
            books.blocks.add_memory(range.start, range.end - range.start);
        }
    }
}

/// Takes out of the books what is free in whole handles.
fn victims(rooms: &[Room], blocks: &mut Blocks) -> Vec<Range<u64>> {
    let mut victims = Vec::new();
    for free in blocks.free_ranges(HUGE_PAGE) {
        let Some(room) = rooms.iter().find(|room| room.address() <= free.start && free.end <= room.end()) else {
            continue;
        };
        // All of it is mapped, so the handles inside follow each other.
        let offsets = free.start - room.address()..free.end - room.address();
        let Some(range) = room.segment.span(&offsets) else { continue };
        let range = room.address() + range.start..room.address() + range.end;
        blocks.remove_memory(free.start, &range);
        victims.push(range);
    }
    victims
}

/// Where memory is mapped for a request; `None` if there are not enough addresses in one piece.
fn plan(rooms: &[Room], blocks: &Blocks, request: Request, options: &PoolOptions) -> Option<Growth> {
    let (needed, alignment) = (request.taken(), request.alignment());
    // A hole begins at a multiple of 2 MiB.
    let slack = alignment.saturating_sub(HUGE_PAGE);
    rooms.iter().enumerate().find_map(|(number, room)| {
        let granule = room.segment.step();
        let (hole, size) = room.hole(needed.next_multiple_of(granule) + slack)?;
        let address = room.address();
        // Memory that is free before the hole is used with it.
        let before = blocks.free_before(address + hole);
        let first = (address + hole - before).next_multiple_of(alignment) - address;
        let start = hole.max(first / granule * granule);
        let end = (first + needed).next_multiple_of(granule).min(hole + size).max(start + granule);
        let step = start.saturating_add(options.step).min(hole + size);
        let further = end.max(step).next_multiple_of(granule).min(hole + size);
        Some(Growth { room: number, enough: start..end, wanted: start..further })
    })
}

#[cold]
pub(super) fn no_block(address: u64) -> Error {
    Invalid::because(
        FREE,
        format!("no block of this pool begins at {address:#x}"),
        "It was freed already, or is an address inside of a block.",
    )
}

#[cold]
pub(super) fn impossible(size: u64, alignment: u64) -> Error {
    if alignment.is_power_of_two() && alignment <= GIANT_PAGE {
        let problem = format!("{} is not a size of blocks", bytes(size));
        return Invalid::because(ALLOCATE, problem, "Blocks have 1 byte to 128 GiB (ReserveOptions::MAX_SIZE).");
    }
    let problem = format!("the alignment {alignment:#x} is not possible");
    Invalid::because(ALLOCATE, problem, "It must be a power of two of at most 1 GiB.")
}
