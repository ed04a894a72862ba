//! Physical memory that is kept for reuse.
//!
//! Creating and releasing memory takes two ioctls, and the device has to find and clear pages. A
//! cache keeps memory that is unmapped only for a while, by size, so that growing after shrinking
//! takes one ioctl in each direction. Cached memory still belongs to this process, and no other
//! process can use it: a limit bounds it, and [`PageCache::trim`] releases it.

use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::error::{Error, Result};
use crate::kind::{Kind, MemoryKind, Page};
use crate::physical::{PhysicalMemory, free_bytes};
use crate::session::Session;
use crate::session::undo::Live;
use crate::share::Place;
use crate::slots::lock;
use crate::trace;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Which memory a cache holds, and how much of it: by default 2 MiB pages of HBM on a device, or of
/// DDR on the host, without a limit.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{CacheOptions, PageCache};
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let cache = PageCache::with(&device, CacheOptions::default().limit(2 << 20));
/// let (one, two) = (cache.take(2 << 20)?, cache.take(2 << 20)?);
/// cache.put(one);
/// cache.put(two); // released: the cache is full
/// assert_eq!(cache.statistics().cached, 2 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct CacheOptions {
    kind: Option<Kind>,
    limit: Option<u64>,
    reuse_exported: bool,
}

impl CacheOptions {
    /// The kind of memory.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Keeps at most this many bytes, and releases the rest. Without a limit, memory is kept until
    /// [`PageCache::trim`].
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Whether to keep and reuse memory that was exported. It keeps its export, so it is not
    /// exported a second time. The default is not to keep it.
    ///
    /// A process that imported the memory can still read and write it, whatever it is used for
    /// next: the driver cannot revoke an import. Allow this only if all memory of the cache is
    /// shared with the same processes.
    pub fn reuse_exported(mut self, reuse: bool) -> Self {
        self.reuse_exported = reuse;
        self
    }
}

/// The contents of a cache, and what it has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStatistics {
    /// Cached bytes.
    pub cached: u64,
    /// Number of cached handles.
    pub handles: u64,
    /// How often cached memory was reused.
    pub hits: u64,
    /// How often memory was created.
    pub created: u64,
    /// How often memory was released: beyond the limit, trimmed, not fit for reuse, or because a
    /// tag of a pool fell asleep.
    pub released: u64,
}

impl fmt::Display for CacheStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheStatistics { cached, handles, hits, created, released } = *self;
        let cached = Bytes(cached).rounded();
        write!(f, "cached {cached}, handles {handles}, hits {hits}, created {created}, released {released}")
    }
}

/// Keeps memory of one device, or of the host, for reuse. A counted reference that any number of
/// segments and threads can share.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::PageCache;
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let cache = PageCache::new(&device);
/// let memory = cache.take(2 << 20)?; // created
/// cache.put(memory);
/// let memory = cache.take(2 << 20)?; // the same memory again
/// assert_eq!(cache.statistics().hits, 1);
/// # drop(memory);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PageCache {
    inner: Arc<CacheInner>,
}

struct CacheInner {
    place: Arc<Live<DeviceInner>>,
    kind: Kind,
    options: CacheOptions,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    by_size: BTreeMap<u64, Vec<PhysicalMemory>>,
    statistics: CacheStatistics,
}

impl Kept {
    fn push(&mut self, memory: PhysicalMemory) {
        self.statistics.cached += memory.size();
        self.statistics.handles += 1;
        self.by_size.entry(memory.size()).or_default().push(memory);
    }

    fn pop(&mut self, size: u64) -> Option<PhysicalMemory> {
        let memories = self.by_size.get_mut(&size)?;
        let memory = memories.pop()?;
        if memories.is_empty() {
            self.by_size.remove(&size);
        }
        self.statistics.cached -= size;
        self.statistics.handles -= 1;
        Some(memory)
    }

    /// Removes the largest handles until at most `keep` bytes are left.
    fn pop_beyond(&mut self, keep: u64) -> Vec<PhysicalMemory> {
        let mut popped = Vec::new();
        while self.statistics.cached > keep {
            let Some((&largest, _)) = self.by_size.last_key_value() else { break };
            popped.extend(self.pop(largest));
        }
        popped
    }
}

/// Memory for a growth that may still fail.
#[derive(Default)]
pub(super) struct Loan {
    pub(super) memories: Vec<(PhysicalMemory, LoanSource)>,
    /// Sizes of cached handles that were released to make room.
    released: Vec<u64>,
}

/// Where the memory of a loan came from.
pub(super) enum LoanSource {
    Cache,
    New,
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageCache({}, {:?})", self.inner.place.name(), self.inner.options)
    }
}

impl PageCache {
    /// A cache of 2 MiB pages of a device's HBM or the host's DDR, without a limit.
    pub fn new<'a>(place: impl Into<Place<'a>>) -> PageCache {
        PageCache::with(place, CacheOptions::default())
    }

    /// A cache with options.
    pub fn with<'a>(place: impl Into<Place<'a>>, options: CacheOptions) -> PageCache {
        let place = place.into().0.clone();
        let memory = if place.is_host() { MemoryKind::Ddr } else { MemoryKind::Hbm };
        let kind = options.kind.unwrap_or(Kind { page: Page::Huge, memory });
        PageCache { inner: Arc::new(CacheInner { place, kind, options, kept: Mutex::default() }) }
    }

    /// Returns cached memory of this size, or creates it. Cached memory has its old contents; the
    /// contents of new memory are undefined.
    ///
    /// If the device is out of memory, the cache is emptied and the creation is tried once more.
    ///
    /// # Errors
    ///
    /// Those of [`Device::create_with`](crate::Device::create_with). The cache then holds as much
    /// as before.
    pub fn take(&self, size: u64) -> Result<PhysicalMemory> {
        let mut released = Vec::new();
        let lent = self.lend_one(size, &mut released);
        let lent = lent.inspect_err(|_| self.give_back(Loan { memories: Vec::new(), released }));
        lent.map(|(memory, _)| memory)
    }

    /// As [`PageCache::take`], for a growth of several handles: all or none. If the growth fails
    /// later, its caller returns the loan by [`PageCache::give_back`].
    pub(super) fn lend(&self, sizes: impl Iterator<Item = u64>) -> Result<Loan> {
        let mut loan = Loan::default();
        for size in sizes {
            match self.lend_one(size, &mut loan.released) {
                Ok(lent) => loan.memories.push(lent),
                Err(error) => {
                    self.give_back(loan);
                    return Err(error);
                }
            }
        }
        Ok(loan)
    }

    fn lend_one(&self, size: u64, released: &mut Vec<u64>) -> Result<(PhysicalMemory, LoanSource)> {
        self.check_process()?;
        {
            let mut kept = lock(&self.inner.kept);
            if let Some(memory) = kept.pop(size) {
                kept.statistics.hits += 1;
                return Ok((memory, LoanSource::Cache));
            }
        }
        let created = match self.create(size) {
            Err(error) if error.is_out_of_memory() => {
                let popped = lock(&self.inner.kept).pop_beyond(0);
                let before = released.len();
                released.extend(popped.into_iter().map(|memory| self.release(memory)).filter(|&size| size > 0));
                if released.len() == before {
                    return Err(error);
                }
                self.create(size)
            }
            created => created,
        };
        Ok((created?, LoanSource::New))
    }

    /// Undoes a loan: releases what was created, caches what was cached, and creates again what was
    /// released, as far as possible.
    pub(super) fn give_back(&self, loan: Loan) {
        // Newest first: the cache hands out what came last.
        for (mut memory, source) in loan.memories.into_iter().rev() {
            if Arc::get_mut(&mut memory.block).is_none() {
                // It is still mapped: the kernel refused to unmap it.
                continue;
            }
            match source {
                LoanSource::Cache => self.put(memory),
                LoanSource::New => drop(self.release(memory)),
            }
        }
        for size in loan.released.into_iter().rev() {
            match self.create(size) {
                Ok(memory) => self.put(memory),
                Err(error) => return trace::warn(error, "cached memory was released in vain"),
            }
        }
    }

    /// Adds the size of a failed and undone growth, and what is free now, to its error.
    pub(super) fn explain(&self, error: Error, asked: u64) -> Error {
        let Error::OutOfMemory(mut details) = error else { return error };
        details.asked = asked;
        (details.free_huge, details.free_giant) = free_bytes(&self.inner.place, self.kind());
        Error::OutOfMemory(details)
    }

    /// Keeps memory for reuse, up to the limit. Drops this reference to memory that is of another
    /// kind or place, that has other references, or that other processes may see (see
    /// [`CacheOptions::reuse_exported`]).
    pub fn put(&self, mut memory: PhysicalMemory) {
        if self.in_child() {
            return;
        }
        let fit = self.is_fit(&mut memory);
        let mut kept = lock(&self.inner.kept);
        let cached = kept.statistics.cached.saturating_add(memory.size());
        if fit && self.inner.options.limit.is_none_or(|limit| cached <= limit) {
            kept.push(memory);
            return;
        }
        kept.statistics.released += 1;
        // Without the lock: dropping the last reference releases the memory.
        drop(kept);
        drop(memory);
    }

    /// Releases memory until at most `keep` bytes are cached, the largest handles first. Returns
    /// the number of released bytes.
    ///
    /// # Errors
    ///
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a child of fork. If the kernel
    /// refuses to release memory, that is logged, not counted, and tried again when the device is
    /// closed.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.check_process()?;
        let popped = lock(&self.inner.kept).pop_beyond(keep);
        Ok(popped.into_iter().map(|memory| self.release(memory)).sum())
    }

    /// Releases memory that was taken from the cache. Returns the number of released bytes.
    pub(super) fn release(&self, memory: PhysicalMemory) -> u64 {
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

    /// Current contents and counters. All zero in a child of fork.
    pub fn statistics(&self) -> CacheStatistics {
        if self.in_child() {
            return CacheStatistics::default();
        }
        lock(&self.inner.kept).statistics
    }

    /// The kind of its memory.
    pub fn kind(&self) -> Kind {
        self.inner.kind
    }

    /// The session that its memory belongs to.
    pub fn session(&self) -> Session {
        Session { inner: self.inner.place.session.clone() }
    }

    pub(super) fn check_process(&self) -> Result<()> {
        self.inner.place.session.check_process()
    }

    pub(super) fn in_child(&self) -> bool {
        self.inner.place.session.in_child()
    }

    fn create(&self, size: u64) -> Result<PhysicalMemory> {
        let memory = PhysicalMemory::create(&self.inner.place, size, self.kind(), None)?;
        lock(&self.inner.kept).statistics.created += 1;
        Ok(memory)
    }

    /// Whether memory can be handed out again: it has the cache's place and kind, and no other
    /// reference.
    fn is_fit(&self, memory: &mut PhysicalMemory) -> bool {
        let block = &memory.block;
        let own = !block.is_imported() && !block.half_released && Arc::ptr_eq(&block.device, &self.inner.place);
        let unseen = block.share().is_none() || self.inner.options.reuse_exported;
        own && block.kind() == self.kind() && unseen && Arc::get_mut(&mut memory.block).is_some()
    }
}
