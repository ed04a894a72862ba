//! Physical memory that is kept for reuse.
//!
//! Creating memory and releasing it are two ioctls, and the device has to find or clean pages for
//! them. Memory that is only unmapped for a while is put here instead, by size, and taken out again
//! as it is: growing after shrinking then costs one ioctl in each direction. What lies here is
//! still this process's memory, so no other process can have it: a limit says how much may be kept,
//! and [`PageCache::trim`] releases it.

use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::error::{Error, Invalid, Result};
use crate::kind::{Kind, MemoryKind, Page};
use crate::physical::{PhysicalMemory, free_bytes};
use crate::session::Session;
use crate::session::undo::Live;
use crate::share::Place;
use crate::slots::lock;
use crate::trace;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Which memory a cache holds, and how much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct CacheOptions {
    kind: Kind,
    limit: u64,
    fallback: bool,
    reuse_exported: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions { kind: Kind::default(), limit: u64::MAX, fallback: false, reuse_exported: false }
    }
}

impl CacheOptions {
    /// HBM in 2 MiB pages, without a limit.
    pub fn new() -> CacheOptions {
        CacheOptions::default()
    }

    /// The kind of memory.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// At most so many bytes are kept; what comes back beyond that is released. Without a limit all
    /// is kept until [`PageCache::trim`].
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Whether memory of 2 MiB pages is taken where 1 GiB pages were asked for and there are none.
    /// It is not by default.
    pub fn fall_back_to_huge_pages(mut self, fall_back: bool) -> Self {
        self.fallback = fall_back;
        self
    }

    /// Whether memory that was exported is kept and used again, with its export, so that it is not
    /// exported a second time.
    ///
    /// It is not by default: a process that imported it once can still read and write it, whatever
    /// it is used for next, because the driver cannot take an import back. Allow it where all
    /// memory of the cache is shared with the same processes.
    pub fn reuse_exported(mut self, reuse: bool) -> Self {
        self.reuse_exported = reuse;
        self
    }
}

/// What a cache did and has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStatistics {
    /// Bytes that are kept.
    pub cached: u64,
    /// Handles that are kept.
    pub handles: u64,
    /// How often memory was taken that was kept.
    pub hits: u64,
    /// How often memory had to be created.
    pub created: u64,
    /// How often memory was released: beyond the limit, trimmed, not fit for reuse, or of a tag of
    /// a pool that fell asleep.
    pub released: u64,
}

/// Memory of one device, or of the host, that is kept for reuse. A counted reference that any
/// number of segments and threads can share.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::PageCache;
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let cache = PageCache::new(&device);
/// let memory = cache.take(2 << 20)?; // created
/// cache.put(memory);
/// let memory = cache.take(2 << 20)?; // the same again
/// assert_eq!(cache.statistics().hits, 1);
/// # drop(memory);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PageCache {
    inner: Arc<Inner>,
}

/// Where memory came from that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// It was kept.
    Cache,
    /// It was created.
    New,
}

/// What a growth made the cache release.
#[derive(Debug, Default)]
pub(super) struct Loan {
    /// Sizes of handles.
    released: Vec<u64>,
}

struct Inner {
    place: Arc<Live<DeviceInner>>,
    options: CacheOptions,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// In order of sizes. Some are empty.
    shelves: Vec<Shelf>,
    statistics: CacheStatistics,
}

/// Memory of one size.
struct Shelf {
    size: u64,
    memories: Vec<PhysicalMemory>,
}

/// So many sizes have a shelf also while there is nothing of them.
const SHELVES: usize = 16;

impl Kept {
    /// Where the shelf of a size is, or should be.
    #[inline]
    fn find(&self, size: u64) -> std::result::Result<usize, usize> {
        self.shelves.binary_search_by_key(&size, |shelf| shelf.size)
    }

    #[inline]
    fn push(&mut self, size: u64, memory: PhysicalMemory) {
        let at = self.find(size).unwrap_or_else(|at| {
            self.shelves.insert(at, Shelf { size, memories: Vec::new() });
            at
        });
        self.shelves[at].memories.push(memory);
        self.statistics.cached += size;
        self.statistics.handles += 1;
    }

    fn pop(&mut self, size: u64) -> Option<PhysicalMemory> {
        let at = self.find(size).ok()?;
        let memories = &mut self.shelves[at].memories;
        let memory = memories.pop()?;
        if memories.is_empty() && self.shelves.len() > SHELVES {
            self.shelves.remove(at);
        }
        self.statistics.cached -= size;
        self.statistics.handles -= 1;
        Some(memory)
    }

    /// Takes the largest handles out until at most `keep` bytes are left.
    fn pop_beyond(&mut self, keep: u64) -> Vec<PhysicalMemory> {
        let mut popped = Vec::new();
        while self.statistics.cached > keep {
            let Some(shelf) = self.shelves.iter().rfind(|shelf| !shelf.memories.is_empty()) else { break };
            popped.extend(self.pop(shelf.size));
        }
        popped
    }
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageCache({}, {:?})", self.inner.place.name(), self.inner.options)
    }
}

const OPERATION: &str = "take memory from a cache";

impl PageCache {
    /// A cache of a device's memory: HBM in 2 MiB pages, without a limit; or of the host's.
    pub fn new<'a>(place: impl Into<Place<'a>>) -> PageCache {
        let place = place.into();
        let memory = if place.inner().is_host() { MemoryKind::Ddr } else { MemoryKind::Hbm };
        PageCache::with(place, CacheOptions::new().kind(Kind { page: Page::Huge, memory }))
    }

    /// A cache with options.
    pub fn with<'a>(place: impl Into<Place<'a>>, options: CacheOptions) -> PageCache {
        let place = place.into().inner().clone();
        PageCache { inner: Arc::new(Inner { place, options, kept: Mutex::default() }) }
    }

    /// Memory of a size: kept memory if there is some, new memory otherwise. What it contains is
    /// not known; kept memory has what was there before.
    ///
    /// If the device has no more memory, all that is kept is released and it is tried once more.
    ///
    /// # Errors
    ///
    /// Those of [`Device::create_with`](crate::Device::create_with). As much is kept then as
    /// before.
    pub fn take(&self, size: u64) -> Result<PhysicalMemory> {
        let mut loan = Loan::default();
        match self.take_for(size, &mut loan) {
            Ok((memory, _)) => Ok(memory),
            Err(error) => {
                self.refill(loan);
                Err(error)
            }
        }
    }

    /// The same for a growth of several handles: also says where the memory came from. If the
    /// growth fails, its caller gives that back, then calls [`PageCache::refill`].
    pub(super) fn take_for(&self, size: u64, loan: &mut Loan) -> Result<(PhysicalMemory, Source)> {
        let inner = &*self.inner;
        inner.place.session.check_process()?;
        {
            let mut kept = lock(&inner.kept);
            if let Some(memory) = kept.pop(size) {
                kept.statistics.hits += 1;
                return Ok((memory, Source::Cache));
            }
        }
        let memory = match inner.create(size) {
            Err(error) if error.is_out_of_memory() => {
                let popped = lock(&inner.kept).pop_beyond(0);
                let released: Vec<u64> = popped.into_iter().map(|memory| self.release_one(memory)).collect();
                if released.iter().all(|&size| size == 0) {
                    return Err(error);
                }
                loan.released.extend(released.into_iter().filter(|&size| size > 0));
                inner.create(size)?
            }
            created => created?,
        };
        lock(&inner.kept).statistics.created += 1;
        Ok((memory, Source::New))
    }

    /// Creates again what was released for a growth that failed, as far as it can be had.
    pub(super) fn refill(&self, loan: Loan) {
        for size in loan.released.into_iter().rev() {
            match self.inner.create(size) {
                Ok(memory) => {
                    lock(&self.inner.kept).statistics.created += 1;
                    self.put(memory);
                }
                Err(error) => return trace::warn(error, "cached memory was released for nothing"),
            }
        }
    }

    /// Gives back memory that was taken for a growth that failed.
    pub(super) fn give_back(&self, memory: PhysicalMemory, source: Source) {
        match source {
            Source::Cache => self.put(memory),
            Source::New => {
                self.release_one(memory);
            }
        }
    }

    /// An error of a growth that was undone: says how much was asked for in all, and what is free.
    pub(super) fn explain(&self, error: Error, asked: u64) -> Error {
        let Error::OutOfMemory(mut details) = error else { return error };
        details.asked = asked;
        (details.free_huge, details.free_giant) = free_bytes(self.place(), self.kind());
        Error::OutOfMemory(details)
    }

    /// Keeps memory for reuse, up to the limit. Memory that is not of this cache's kind and place,
    /// that others hold too, or that other processes may see (see [`CacheOptions::reuse_exported`])
    /// is not kept: this reference of it is dropped.
    pub fn put(&self, mut memory: PhysicalMemory) {
        let inner = &*self.inner;
        if inner.place.session.in_child() {
            return;
        }
        let size = memory.size();
        if inner.is_fit(&mut memory) {
            let mut kept = lock(&inner.kept);
            if kept.statistics.cached.checked_add(size).is_some_and(|cached| cached <= inner.options.limit) {
                kept.push(size, memory);
                return;
            }
        }
        lock(&inner.kept).statistics.released += 1;
        // Not under the lock: the last reference releases it.
        drop(memory);
    }

    /// Releases memory until at most `keep` bytes are kept, the largest handles first. Returns how
    /// many bytes were released.
    ///
    /// # Errors
    ///
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a child of fork. Memory that the
    /// kernel does not release is logged, not counted, and tried again when the device is closed.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let inner = &*self.inner;
        inner.place.session.check_process()?;
        let popped = lock(&inner.kept).pop_beyond(keep);
        Ok(self.release(popped))
    }

    /// Releases memory that was taken from it, without keeping it. Returns how many bytes that
    /// were.
    pub(super) fn release(&self, memories: Vec<PhysicalMemory>) -> u64 {
        memories.into_iter().map(|memory| self.release_one(memory)).sum()
    }

    fn release_one(&self, memory: PhysicalMemory) -> u64 {
        let size = memory.size();
        lock(&self.inner.kept).statistics.released += 1;
        match memory.free() {
            Ok(()) => size,
            Err(failed) => {
                trace::warn(&failed, "memory was not released");
                0
            }
        }
    }

    /// What it did and has. All zero in a child of fork.
    pub fn statistics(&self) -> CacheStatistics {
        if self.inner.place.session.in_child() {
            return CacheStatistics::default();
        }
        lock(&self.inner.kept).statistics
    }

    /// The kind of memory that is taken from it.
    pub fn kind(&self) -> Kind {
        self.inner.options.kind
    }

    /// The session that its memory belongs to.
    pub fn session(&self) -> Session {
        Session { inner: self.inner.place.session.clone() }
    }

    pub(super) fn place(&self) -> &DeviceInner {
        &self.inner.place
    }
}

impl Inner {
    fn create(&self, size: u64) -> Result<PhysicalMemory> {
        let CacheOptions { kind, fallback, .. } = self.options;
        if kind.page == Page::Huge || !fallback {
            return PhysicalMemory::create(&self.place, size, kind, None);
        }
        if size == 0 || size % Page::Giant.size() != 0 {
            return Err(Invalid::because(
                OPERATION,
                format!("{} is not a multiple of 1 GiB", Bytes(size)),
                "A cache of 1 GiB pages hands out whole ones, also where 2 MiB pages take their place.",
            ));
        }
        let huge = Kind { page: Page::Huge, ..kind };
        if !self.place.has_giant_pages() {
            return PhysicalMemory::create(&self.place, size, huge, None);
        }
        match PhysicalMemory::create(&self.place, size, kind, None) {
            Err(error) if error.is_out_of_memory() => {
                // The error of the pages that were asked for says more.
                PhysicalMemory::create(&self.place, size, huge, None).map_err(|_| error)
            }
            created => created,
        }
    }

    /// Whether memory may be handed out again: it is of this place and kind, and nothing else has
    /// it.
    #[inline]
    fn is_fit(&self, memory: &mut PhysicalMemory) -> bool {
        let block = &memory.block;
        let kind = block.kind();
        let pages = kind.page == self.options.kind.page || self.options.fallback && kind.page == Page::Huge;
        let own = !block.is_imported() && !block.half_released && Arc::ptr_eq(&block.device, &self.place);
        let unseen = block.share().is_none() || self.options.reuse_exported;
        own && pages && kind.memory == self.options.kind.memory && unseen && Arc::get_mut(&mut memory.block).is_some()
    }
}
