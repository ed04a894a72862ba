//! The memory of one tag: blocks in segments that grow.
//!
//! [`Blocks`] knows what is in use among what is mapped, and changes under a lock that is never
//! held over a system call. A thread that maps or unmaps takes the segments out of their place;
//! others that need them wait, and the rest goes on allocating from what is mapped. Nothing of the
//! user's runs while they are out, except when a tag falls asleep or wakes: then others do not wait
//! but get an error.

use super::blocks::{Blocks, Claim, Hole, Misuse, Request, Usage};
use super::page_cache::PageCache;
use super::segment::{BeforeUnmap, Segment, SegmentOptions, joined};
use super::sleep::Asleep;
use super::{PoolOptions, Statistics, Tag};
use crate::bytes::Bytes;
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result};
use crate::fork::ForkGuard;
use crate::reserve::ReserveOptions;
use crate::slots::lock;
use crate::trace::{self, quiet};
use std::collections::BTreeMap;
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
        let guard = cache.place().session.guard;
        let owners = RwLock::default();
        Shared { cache, options, guard, owners, in_use: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    #[inline]
    pub(super) fn check_process(&self) -> Result<()> {
        if self.in_child() { self.cache.place().session.check_process() } else { Ok(()) }
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
    pub(super) generation: u64,
    /// Blocks of which slices or copies are alive, by their address.
    pins: BTreeMap<u64, Pinned>,
    mapped: u64,
    reserved: u64,
}

/// A block that is pinned.
#[derive(Default)]
struct Pinned {
    pins: u32,
    /// It was freed meanwhile, and becomes free with its last pin.
    freed: bool,
}

/// Keeps a block from being used for something else. Slices of blocks have one, and pass it on to
/// the copies that they begin.
pub(super) struct Pin {
    heap: Weak<Heap>,
    address: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a child of fork the lock may be held for ever, and the block is the parent's.
        if let Some(heap) = self.heap.upgrade().filter(|heap| !heap.shared.in_child()) {
            heap.unpin(self.address);
        }
    }
}

/// What a tag is doing.
pub(super) enum State {
    Awake,
    /// A thread puts it to sleep or wakes it.
    Changing,
    Asleep(Asleep),
}

impl Books {
    /// Notes that a block was freed, if it is pinned.
    fn free_pinned(&mut self, claim: Claim) -> bool {
        let Some(pinned) = self.pins.get_mut(&claim.address) else { return false };
        pinned.freed = true;
        self.blocks.disown(claim);
        true
    }

    /// Whether a block was freed, and is only pinned.
    fn is_freed(&self, address: u64) -> bool {
        self.pins.get(&address).is_some_and(|pinned| pinned.freed)
    }
}

/// A segment with its addresses.
pub(super) struct Room {
    pub(super) segment: Segment,
}

impl Room {
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

/// A request that needs memory.
struct Need<'a> {
    request: Request,
    options: &'a PoolOptions,
}

impl Need<'_> {
    /// Where memory is mapped in the segments that there are; `None` if they have not enough
    /// addresses in one piece.
    fn plan(&self, rooms: &[Room], blocks: &Blocks) -> Option<Growth> {
        let granule = rooms.first()?.segment.step();
        // In a small hole that is large enough, unless the alignment is in the way; or in any
        // other, together with what is free beside it.
        let small = blocks.hole(self.request.taken().next_multiple_of(granule));
        let small = small.and_then(|hole| self.fit(rooms, &hole));
        small.or_else(|| blocks.holes().find_map(|hole| self.fit(rooms, &hole)))
    }

    /// What is mapped in a hole for the request, if that fits.
    fn fit(&self, rooms: &[Room], hole: &Hole) -> Option<Growth> {
        let (needed, alignment) = (self.request.taken(), self.request.alignment());
        let number = rooms.iter().position(|room| room.contains(hole.range.start))?;
        let (granule, address) = (rooms[number].segment.step(), rooms[number].address());
        let (start, end) = (hole.range.start - address, hole.range.end - address);
        // Memory that is free before the hole and after it is used with it.
        let first = (hole.range.start - hole.before).next_multiple_of(alignment) - address;
        if first + needed > end + hole.after {
            return None;
        }
        let enough = start.max(first / granule * granule)..(first + needed).next_multiple_of(granule).min(end);
        (!enough.is_empty()).then(|| self.growth(number, granule, enough, end))
    }

    /// What is enough, and as much after it as is mapped at once.
    fn growth(&self, room: usize, granule: u64, enough: Range<u64>, end: u64) -> Growth {
        let step = enough.start.saturating_add(self.options.step).min(end);
        let wanted = enough.start..enough.end.max(step).next_multiple_of(granule).min(end);
        Growth { room, enough, wanted }
    }
}

const ALLOCATE: &str = "allocate memory from a pool";
const FREE: &str = "free memory of a pool";
const RESET: &str = "reset a tag of a pool";

impl Heap {
    pub(super) fn new(tag: Tag, shared: &Arc<Shared>) -> Heap {
        let books = Books {
            blocks: Blocks::default(),
            state: State::Awake,
            segments: Some(Vec::new()),
            generation: 0,
            pins: BTreeMap::new(),
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

    /// The same of a tag that is awake; `None` if it is not. Does not wait for a sleep, which calls
    /// the user's code with the segments out of their place.
    fn take_awake(&self) -> Option<Taken<'_>> {
        let is_awake = |books: &Books| matches!(books.state, State::Awake);
        let books = Some(self.lock()).filter(|books| is_awake(books))?;
        let (taken, books) = self.take(books);
        let awake = is_awake(&books);
        // The segments go back under the lock.
        drop(books);
        awake.then_some(taken)
    }

    /// A block for a request, and the generation that it belongs to.
    #[inline]
    pub(super) fn allocate(self: &Arc<Self>, request: Request) -> Result<(Claim, u64)> {
        let mut books = self.lock();
        if let State::Awake = books.state {
            if let Some(claim) = books.blocks.allocate(request) {
                self.shared.count(claim.size);
                return Ok((claim, books.generation));
            }
        }
        self.allocate_new(books, request)
    }

    fn allocate_new<'a>(
        self: &'a Arc<Self>,
        mut books: MutexGuard<'a, Books>,
        request: Request,
    ) -> Result<(Claim, u64)> {
        let _quiet = quiet();
        loop {
            if !matches!(books.state, State::Awake) {
                return Err(self.asleep(&books.state, ALLOCATE));
            }
            if let Some(claim) = books.blocks.allocate(request) {
                self.shared.count(claim.size);
                return Ok((claim, books.generation));
            }
            if books.segments.is_none() {
                // Another thread maps or unmaps; there may be room after that.
                books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (mut taken, locked) = self.take(books);
            drop(locked);
            let grown = self.grow(&mut taken, request);
            // Before other threads see what was mapped, which would leave this one with nothing.
            books = self.lock();
            let claim = match &grown {
                Ok(range) => {
                    let run = books.blocks.add_memory(range);
                    run.and_then(|run| books.blocks.allocate_in(run, request))
                }
                Err(_) => books.blocks.search(request),
            };
            if let Some(claim) = claim {
                self.shared.count(claim.size);
            }
            let generation = books.generation;
            drop(books);
            drop(taken);
            match (claim, grown) {
                (Some(claim), _) => return Ok((claim, generation)),
                (None, Err(error)) => return Err(self.explain(error, request)),
                (None, Ok(_)) => books = self.lock(),
            }
        }
    }

    /// Maps memory for a request, in new addresses if there is no place for it. Returns where.
    /// After an error everything is as it was.
    fn grow(self: &Arc<Self>, taken: &mut Taken<'_>, request: Request) -> Result<Range<u64>> {
        let need = Need { request, options: &self.shared.options };
        let planned = need.plan(&taken.rooms, &self.lock().blocks);
        let (growth, new) = match planned {
            Some(growth) => (growth, None),
            None => {
                let room = self.add_room(taken, request)?;
                let (address, size, granule) = (room.address(), room.segment.size(), room.segment.step());
                let enough = 0..request.taken().next_multiple_of(granule);
                (need.growth(taken.rooms.len() - 1, granule, enough, size), Some(address))
            }
        };
        let room = &mut taken.rooms[growth.room];
        let grown = match room.segment.ensure(growth.wanted.clone()) {
            Err(error) if error.is_out_of_memory() && growth.wanted != growth.enough => {
                room.segment.ensure(growth.enough.clone()).map(|()| growth.enough)
            }
            ensured => ensured.map(|()| growth.wanted),
        };
        match grown {
            Ok(range) => Ok(room.address() + range.start..room.address() + range.end),
            Err(error) => {
                self.remove_rooms(taken, |room| Some(room.address()) == new);
                Err(error)
            }
        }
    }

    /// An error of a growth, in the words of its caller.
    fn explain(&self, error: Error, request: Request) -> Error {
        let Error::OutOfMemory(mut details) = error else { return error };
        details.asked = request.size;
        details.place.push_str(&format!(", for a block of {}", self.tag));
        Error::OutOfMemory(details)
    }

    /// Reserves more addresses: each time as many as there are already, so that there are few
    /// segments, and no more, so that a tag costs what it holds.
    fn add_room<'a>(self: &Arc<Self>, taken: &'a mut Taken<'_>, request: Request) -> Result<&'a Room> {
        let shared = &self.shared;
        let granule = shared.options.granule(&shared.cache);
        let needed = request.taken().next_multiple_of(granule);
        let largest = ReserveOptions::MAX_SIZE / granule * granule;
        if needed > largest {
            return Err(Invalid::because(
                ALLOCATE,
                format!("{} in handles of {} are more than one reservation", Bytes(needed), Bytes(granule)),
                "Allow smaller handles, or ask for less.",
            ));
        }
        let alignment = request.alignment().max(HUGE_PAGE);
        let reserved: u64 = taken.rooms.iter().map(|room| room.segment.size()).sum();
        let roomy = reserved.max(shared.options.step.min(GIANT_PAGE)).next_multiple_of(granule);
        let roomy = roomy.min(largest).max(needed);
        let make = |size: u64| {
            // Whole GiB begin at one, whatever is asked for next.
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
        taken.rooms.push(Room { segment });
        Ok(&taken.rooms[taken.rooms.len() - 1])
    }

    /// Frees the block of a handle. The block may have gone by a reset.
    #[inline]
    pub(super) fn free(&self, claim: Claim, generation: u64) {
        let mut books = self.lock();
        if books.generation == generation {
            if !books.pins.is_empty() && books.free_pinned(claim) {
                return;
            }
            books.blocks.free(claim);
            drop(books);
            self.shared.uncount(claim.size);
        }
    }

    /// Leaves the block of a handle without it.
    #[inline]
    pub(super) fn disown(&self, claim: Claim, generation: u64) {
        let mut books = self.lock();
        if books.generation == generation {
            books.blocks.disown(claim);
        }
    }

    /// Frees the block that begins at an address.
    pub(super) fn free_at(&self, address: u64) -> Result<()> {
        let mut books = self.lock();
        if books.is_freed(address) {
            return Err(no_block(address));
        }
        let claimed = books.blocks.claim_at(address);
        let claim = claimed.map_err(|misuse| match misuse {
            Misuse::NoBlock => no_block(address),
            Misuse::Owned => Invalid::because(
                FREE,
                format!("the block at {address:#x} belongs to a handle"),
                "Drop that, or take the address out of it by Block::into_address.",
            ),
        })?;
        if !books.free_pinned(claim) {
            books.blocks.free(claim);
            drop(books);
            self.shared.uncount(claim.size);
        }
        Ok(())
    }

    /// Pins a block. The caller has the lock.
    pub(super) fn pin(self: &Arc<Self>, books: &mut Books, address: u64) -> Pin {
        books.pins.entry(address).or_default().pins += 1;
        Pin { heap: Arc::downgrade(self), address }
    }

    fn unpin(&self, address: u64) {
        let mut books = self.lock();
        let Some(pinned) = books.pins.get_mut(&address) else { return };
        pinned.pins -= 1;
        if pinned.pins > 0 {
            return;
        }
        let freed = pinned.freed;
        books.pins.remove(&address);
        if freed {
            // It belongs to no handle any more.
            let size = books.blocks.free_at(address).unwrap_or(0);
            drop(books);
            self.shared.uncount(size);
        }
    }

    /// The size of the block that begins at an address.
    pub(super) fn size(&self, address: u64) -> Option<u64> {
        let books = self.lock();
        if books.is_freed(address) { None } else { books.blocks.size(address) }
    }

    /// Frees all blocks.
    pub(super) fn reset(&self) -> Result<()> {
        let books = self.lock();
        if !matches!(books.state, State::Awake) {
            return Err(self.asleep(&books.state, RESET));
        }
        let (mut taken, mut books) = self.take(books);
        // It may have fallen asleep while this waited: what is asleep is not mapped, but not free.
        if !matches!(books.state, State::Awake) {
            return Err(self.asleep(&books.state, RESET));
        }
        // What a slice or a copy uses must not become part of another block. New ones need the
        // lock.
        let unused = taken.rooms.iter_mut().try_for_each(|room| room.segment.hide(RESET));
        taken.rooms.iter_mut().for_each(|room| room.segment.show());
        unused?;
        if !books.pins.is_empty() {
            let users = format!("copies of {} block(s) may still run, for ever.", books.pins.len());
            return Err(Error::InUse { operation: RESET, users });
        }
        let mapped: Vec<Range<u64>> = taken.rooms.iter().flat_map(Room::mapped).collect();
        let Usage { in_use, .. } = books.blocks.usage();
        books.blocks.reset(&mapped);
        books.generation += 1;
        drop(books);
        drop(taken);
        self.shared.uncount(in_use);
        Ok(())
    }

    /// Unmaps handles that are not in use, into the cache. Returns address and size of each. What
    /// cannot be unmapped stays, and is an error only if nothing else could be.
    pub(super) fn unmap_free(&self) -> Result<Vec<(u64, u64)>> {
        let books = self.lock();
        if !matches!(books.state, State::Awake) {
            return Ok(Vec::new());
        }
        let (taken, mut books) = self.take(books);
        let ranges = victims(&taken.rooms, &mut books.blocks);
        let victims = Victims { heap: self, ranges, generation: books.generation };
        drop(books);
        // The segments are in their place while the hook runs, which may use the pool.
        drop(taken);
        if victims.ranges.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(hook) = &self.shared.options.before_unmap {
            hook(&victims.ranges);
            self.shared.check_process()?;
        }
        victims.unmap()
    }

    /// Maps handles again that were unmapped for nothing, as far as their memory and their
    /// addresses can be had.
    pub(super) fn map_again(&self, handles: &[(u64, u64)]) {
        let Some(mut taken) = self.take_awake() else { return };
        let _quiet = quiet();
        for &(address, size) in handles {
            let Some(room) = taken.rooms.iter_mut().find(|room| room.contains(address)) else { continue };
            let range = address..address + size;
            // Another thread may have used the addresses meanwhile.
            if !self.lock().blocks.is_hole(&range) {
                continue;
            }
            match room.segment.map_new(address - room.address(), size) {
                Ok(()) => drop(self.lock().blocks.add_memory(&range)),
                Err(error) => return trace::warn(error, "free memory of a pool could not be mapped again"),
            }
        }
    }

    /// Drops the segments that have no memory.
    pub(super) fn remove_empty_rooms(&self) {
        if self.shared.in_child() {
            return;
        }
        // Asleep, they have none, and keep their addresses.
        if let Some(mut taken) = self.take_awake() {
            self.remove_rooms(&mut taken, |_| true);
        }
    }

    /// Drops those of some segments that have no memory.
    fn remove_rooms(&self, taken: &mut Taken<'_>, which: impl Fn(&Room) -> bool) {
        let goes = |room: &Room| which(room) && room.segment.mapped() == 0;
        for room in taken.rooms.iter().filter(|room| goes(room)) {
            self.lock().blocks.remove_area(room.address());
            self.shared.owners.write().unwrap_or_else(PoisonError::into_inner).remove(&room.address());
        }
        taken.rooms.retain(|room| !goes(room));
    }

    pub(super) fn statistics(&self) -> Statistics {
        let books = self.lock();
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
    generation: u64,
}

impl Victims<'_> {
    fn unmap(mut self) -> Result<Vec<(u64, u64)>> {
        let _quiet = quiet();
        let (mut taken, books) = self.heap.take(self.heap.lock());
        if !matches!(books.state, State::Awake) || books.generation != self.generation {
            // It fell asleep meanwhile, and what was free is unmapped too; or it was reset.
            return Ok(Vec::new());
        }
        drop(books);
        let (mut unmapped, mut error) = (Vec::new(), None);
        for range in std::mem::take(&mut self.ranges) {
            let Some(room) =
                taken.rooms.iter_mut().find(|room| room.address() <= range.start && range.end <= room.end())
            else {
                continue;
            };
            let offsets = range.start - room.address()..range.end - room.address();
            match room.segment.unmap(offsets.clone()) {
                Ok(memories) => {
                    self.heap.lock().blocks.remove_memory(&range);
                    let address = room.address();
                    for (offset, memory) in memories.into_iter().rev() {
                        unmapped.push((address + offset, memory.size()));
                        self.heap.shared.cache.put(memory);
                    }
                }
                Err((refused, lost)) => {
                    // Mostly nothing: the kernel did not map it again either.
                    for (offset, memory) in lost {
                        let start = room.address() + offset;
                        self.heap.lock().blocks.remove_memory(&(start..start + memory.size()));
                        self.heap.shared.cache.put(memory);
                    }
                    let inside = |part: Range<u64>| part.start.max(range.start)..part.end.min(range.end);
                    self.ranges.extend(room.mapped().into_iter().map(inside).filter(|part| part.start < part.end));
                    error = Some(refused);
                }
            }
        }
        match error {
            Some(error) if unmapped.is_empty() => Err(error),
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
            books.blocks.add_memory(range);
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
        blocks.set_aside(&range);
        victims.push(range);
    }
    victims
}

pub(super) fn no_block(address: u64) -> Error {
    Invalid::because(
        FREE,
        format!("no block of this pool begins at {address:#x}"),
        "It was freed already, or is an address inside of a block.",
    )
}

pub(super) fn impossible(size: u64, alignment: u64) -> Error {
    if alignment.is_power_of_two() && alignment <= GIANT_PAGE {
        let problem = format!("{} is not a size of blocks", Bytes(size));
        return Invalid::because(ALLOCATE, problem, "Blocks have 1 byte to 128 GiB (ReserveOptions::MAX_SIZE).");
    }
    let problem = format!("the alignment {alignment:#x} is not possible");
    Invalid::because(ALLOCATE, problem, "It must be a power of two of at most 1 GiB.")
}
