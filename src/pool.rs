//! Elastic memory: what allocators, inference engines and caches make of the driver's nouns.
//!
//! * A [`PageCache`] keeps physical memory for reuse.
//! * A [`Segment`] is addresses that memory is put behind, any part of them, on demand.
//! * A [`Pool`] hands out blocks from a few bytes to many GiB. Each has a [`Tag`]; the blocks of
//!   one tag have memory of their own, so a tag as a whole can be put to sleep, which releases its
//!   memory and keeps its addresses, and woken again.
//!
//! Each is built on those before it and can be used without those after it.
//!
//! ```standalone_crate
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::pool::{PageCache, Pool, Tag};
//! use ascend_vmm::{LogicalId, Session};
//!
//! const WEIGHTS: Tag = Tag(1);
//!
//! let device = Session::open()?.device(LogicalId(0))?;
//! let pool = Pool::new(&PageCache::new(&device));
//! let block = pool.allocate(100_000, 512, WEIGHTS)?;
//! block.write(0, b"hello")?;
//! println!("{:#x}: {:?}", block.address(), pool.statistics());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod file;
mod heap;
mod page_cache;
mod segment;
mod sleep;
mod small_blocks;

pub use file::{Progress, load, store};
pub use page_cache::{CacheOptions, CacheStatistics, PageCache};
pub use segment::{BeforeUnmap, Segment, SegmentOptions};
pub use sleep::{BackupFile, BackupPart, Keep};

use crate::bytes::Bytes;
use crate::copy::Slice;
use crate::driver::svm::{GIANT_PAGE, HUGE_PAGE};
use crate::error::{Error, Invalid, Result};
use blocks::{Claim, Request};
use heap::{Heap, Shared, State, impossible, no_block};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// What blocks are for. Blocks of different tags have different pages, so one tag can sleep while
/// another is in use. A number of the caller's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Tag(pub u32);

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tag {}", self.0)
    }
}

/// How a pool grows.
#[derive(Clone)]
#[must_use]
pub struct PoolOptions {
    handles: Vec<u64>,
    step: u64,
    before_unmap: Option<BeforeUnmap>,
}

impl Default for PoolOptions {
    fn default() -> Self {
        PoolOptions { handles: vec![HUGE_PAGE, 10 * HUGE_PAGE, GIANT_PAGE], step: HUGE_PAGE, before_unmap: None }
    }
}

impl fmt::Debug for PoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PoolOptions { handles, step, before_unmap } = self;
        let hook = before_unmap.is_some();
        write!(f, "PoolOptions {{ handles: {handles:?}, step: {step}, before_unmap: {hook} }}")
    }
}

impl PoolOptions {
    /// Handles of 2 MiB, 20 MiB and 1 GiB; no more memory than is asked for.
    pub fn new() -> PoolOptions {
        PoolOptions::default()
    }

    /// The sizes of handles, as in [`SegmentOptions::handles`].
    pub fn handles(mut self, sizes: &[u64]) -> Self {
        self.handles = sizes.to_vec();
        self
    }

    /// Maps at least so many bytes at once, if there are so many: fewer system calls, more memory
    /// that is mapped and not used. One handle by default.
    pub fn step(mut self, bytes: u64) -> Self {
        self.step = bytes;
        self
    }

    /// Called before anything is unmapped, with the addresses: the place to wait for work on the
    /// NPU that may still use them, for which unmapping does not wait. It may use the pool. If it
    /// panics, nothing is unmapped.
    pub fn before_unmap(mut self, hook: impl Fn(&[Range<u64>]) + Send + Sync + 'static) -> Self {
        self.before_unmap = Some(Arc::new(hook));
        self
    }

    /// The smallest handle.
    fn granule(&self, cache: &PageCache) -> u64 {
        let page = cache.kind().page.size();
        self.handles.iter().copied().filter(|size| *size != 0 && size % page == 0).min().unwrap_or(page)
    }
}

/// How much memory a pool, or one tag of it, has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// In blocks, as rounded.
    pub in_use: u64,
    /// The largest [`Statistics::in_use`] that there was.
    pub peak: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Mapped: in blocks or free.
    pub mapped: u64,
    /// Addresses, with memory or without.
    pub reserved: u64,
    /// A free block that is at most a sixteenth smaller than the largest.
    pub largest_free: u64,
    /// In the cache; 0 for one tag.
    pub cached: u64,
    /// Of tags that are asleep: mapped when they wake.
    pub asleep: u64,
}

/// Blocks of device memory from a few bytes to 128 GiB, for any number of threads. A counted
/// reference; blocks keep their memory alive without it.
///
/// Memory stays mapped when its blocks are freed, and is used for the next ones without a system
/// call; [`Pool::trim`] gives it back. If the device has no more memory, that is done before an
/// error is returned.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    /// In order of tags.
    heaps: RwLock<Vec<Arc<Heap>>>,
    /// Some of them by the last digits of their tag, each the first with these: those are found
    /// without a lock.
    near: [OnceLock<Arc<Heap>>; NEAR],
}

const NEAR: usize = 16;

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({:?})", self.inner.shared.cache)
    }
}

impl Pool {
    /// A pool whose memory comes from a cache.
    pub fn new(cache: &PageCache) -> Pool {
        Pool::with(cache, PoolOptions::new())
    }

    /// A pool with options.
    pub fn with(cache: &PageCache, options: PoolOptions) -> Pool {
        let shared = Arc::new(Shared::new(cache.clone(), options));
        Pool { inner: Arc::new(Inner { shared, heaps: RwLock::default(), near: Default::default() }) }
    }

    /// Takes a block of `size` bytes, at a multiple of `alignment`: a power of two of at most 1
    /// GiB. Blocks begin at multiples of 64 bytes at least.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for sizes and alignments that cannot be, and for a tag that is asleep;
    /// [`Error::OutOfMemory`] if the device has not enough memory with all that is free here given
    /// back, with what was asked for and what is free; [`Error::Refused`] with what the kernel
    /// says. Free memory, the cache and the addresses are then as they were before.
    #[doc(alias = "aclrtMalloc")]
    #[inline]
    pub fn allocate(&self, size: u64, alignment: u64, tag: Tag) -> Result<Block> {
        self.inner.shared.check_process()?;
        let Some(request) = Request::new(size, alignment) else { return Err(impossible(size, alignment)) };
        let heap = self.heap(tag);
        let (claim, generation) = match heap.allocate(request) {
            Ok(taken) => taken,
            Err(error) => self.allocate_again(&heap, request, error)?,
        };
        let Claim { address, size, number } = claim;
        Ok(Block { heap, address, size, number, generation })
    }

    /// Tries once more with what is free in all tags. If that does not help it is mapped again.
    fn allocate_again(&self, heap: &Arc<Heap>, request: Request, error: Error) -> Result<(Claim, u64)> {
        if !self.may_fit(&error) {
            return Err(error);
        }
        // What cannot be unmapped because something uses it stays: memory is what is missing.
        let unmapped = self.all().into_iter().map(|heap| (heap.unmap_free().unwrap_or_default(), heap));
        let unmapped: Vec<_> = unmapped.filter(|(handles, _)| !handles.is_empty()).collect();
        self.inner.shared.check_process()?;
        if unmapped.is_empty() {
            return Err(error);
        }
        let allocated = heap.allocate(request);
        for (handles, heap) in &unmapped {
            match allocated {
                Ok(_) => heap.remove_empty_rooms(),
                Err(_) => heap.map_again(handles),
            }
        }
        allocated
    }

    /// Whether a request could be served with all that is free: on the device, here and in the
    /// cache.
    fn may_fit(&self, error: &Error) -> bool {
        let Error::OutOfMemory(details) = error else { return error.is_out_of_memory() };
        let (Some(huge), giant) = (details.free_huge, details.free_giant.unwrap_or(0)) else { return true };
        let Statistics { mapped, in_use, cached, .. } = self.statistics();
        let here = cached + mapped.saturating_sub(in_use);
        details.asked <= huge.saturating_add(giant).saturating_add(here)
    }

    /// The tag's heap, made when it is first used.
    #[inline]
    fn heap(&self, tag: Tag) -> Arc<Heap> {
        match self.known(tag) {
            Some(heap) => heap,
            None => self.new_heap(tag),
        }
    }

    #[inline]
    fn known(&self, tag: Tag) -> Option<Arc<Heap>> {
        match self.near(tag).get() {
            Some(heap) if heap.tag == tag => Some(heap.clone()),
            _ => self.far(tag),
        }
    }

    #[inline]
    fn near(&self, tag: Tag) -> &OnceLock<Arc<Heap>> {
        &self.inner.near[tag.0 as usize % NEAR]
    }

    fn far(&self, tag: Tag) -> Option<Arc<Heap>> {
        let heaps = self.inner.heaps.read().unwrap_or_else(PoisonError::into_inner);
        let at = heaps.binary_search_by_key(&tag, |heap| heap.tag).ok()?;
        heaps.get(at).cloned()
    }

    fn new_heap(&self, tag: Tag) -> Arc<Heap> {
        let mut heaps = self.inner.heaps.write().unwrap_or_else(PoisonError::into_inner);
        match heaps.binary_search_by_key(&tag, |heap| heap.tag) {
            Ok(at) => heaps[at].clone(),
            Err(at) => {
                let heap = Arc::new(Heap::new(tag, &self.inner.shared));
                heaps.insert(at, heap.clone());
                let _ = self.near(tag).set(heap.clone());
                heap
            }
        }
    }

    /// All tags that were used, in order.
    fn all(&self) -> Vec<Arc<Heap>> {
        self.inner.heaps.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The heap to which an address belongs.
    fn owner(&self, address: u64) -> Option<Arc<Heap>> {
        let owners = self.inner.shared.owners.read().unwrap_or_else(PoisonError::into_inner);
        let (_, (end, heap)) = owners.range(..=address).next_back()?;
        if address < *end { heap.upgrade() } else { None }
    }

    /// Frees the block that begins at an address, which [`Block::into_address`] returned.
    ///
    /// Work that is running on the NPU may still use it: the memory stays mapped, but may become
    /// part of another block at once. Only copies that a slice of the [`Block`] has begun are
    /// waited for: it becomes free when they are over.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if no block begins there, or if it belongs to a [`Block`].
    #[doc(alias = "aclrtFree")]
    pub fn free(&self, address: u64) -> Result<()> {
        self.inner.shared.check_process()?;
        match self.owner(address) {
            Some(heap) => heap.free_at(address),
            None => Err(no_block(address)),
        }
    }

    /// The size and the tag of the block that begins at an address.
    pub fn find(&self, address: u64) -> Option<(u64, Tag)> {
        if self.inner.shared.in_child() {
            return None;
        }
        let heap = self.owner(address)?;
        let size = heap.size(address)?;
        Some((size, heap.tag))
    }

    /// Frees all blocks of a tag at once. Handles of them are worth nothing from then on. The
    /// memory stays mapped.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the tag is asleep; [`Error::InUse`] while slices or copies of its
    /// blocks are alive. Nothing has changed then.
    pub fn reset(&self, tag: Tag) -> Result<()> {
        self.inner.shared.check_process()?;
        self.heap(tag).reset()
    }

    /// Unmaps all handles in which no block is, releases their memory and what is cached, and
    /// returns how many bytes were released. Addresses with no memory left are returned too.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] or [`Error::InUse`] if nothing could be unmapped.
    pub fn trim(&self) -> Result<u64> {
        self.inner.shared.check_process()?;
        self.unmap_free()?;
        self.inner.shared.cache.trim(0)
    }

    /// Unmaps what is free, of all tags that are awake.
    fn unmap_free(&self) -> Result<u64> {
        let (mut unmapped, mut refused) = (0, None);
        for heap in self.all() {
            match heap.unmap_free() {
                Ok(handles) => {
                    unmapped += handles.iter().map(|(_, size)| size).sum::<u64>();
                    heap.remove_empty_rooms();
                }
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if unmapped == 0 => Err(error),
            _ => Ok(unmapped),
        }
    }

    /// How much memory there is, of all tags and in the cache. All zero in a child of fork.
    pub fn statistics(&self) -> Statistics {
        let shared = &self.inner.shared;
        if shared.in_child() {
            return Statistics::default();
        }
        let cached = shared.cache.statistics().cached;
        let mut total = Statistics { peak: shared.peak(), cached, ..Statistics::default() };
        for heap in self.all() {
            let one = heap.statistics();
            total.in_use += one.in_use;
            total.blocks += one.blocks;
            total.mapped += one.mapped;
            total.reserved += one.reserved;
            total.asleep += one.asleep;
            total.largest_free = total.largest_free.max(one.largest_free);
        }
        total
    }

    /// How much memory a tag has. All zero if it was never used.
    pub fn statistics_of(&self, tag: Tag) -> Statistics {
        if self.inner.shared.in_child() {
            return Statistics::default();
        }
        self.known(tag).map(|heap| heap.statistics()).unwrap_or_default()
    }

    /// Where its memory comes from.
    pub fn cache(&self) -> &PageCache {
        &self.inner.shared.cache
    }
}

/// A block of a pool's memory. Freed when dropped.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{PageCache, Pool, Tag};
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let pool = Pool::new(&PageCache::new(&device));
/// let block = pool.allocate(5, 1, Tag(0))?;
/// assert_eq!(block.size(), 64);
/// // For code that keeps addresses only.
/// let address = block.into_address();
/// pool.free(address)?;
/// assert!(pool.free(address).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a block is freed when it is dropped"]
pub struct Block {
    heap: Arc<Heap>,
    address: u64,
    size: u64,
    /// Of the claim; [`DISOWNED`] if the block is freed by its address.
    number: u32,
    generation: u64,
}

const DISOWNED: u32 = u32::MAX;

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:#x}, {}, {})", self.address, Bytes(self.size), self.heap.tag)
    }
}

impl Block {
    /// First address.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes: what was asked for, rounded up.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its tag.
    pub fn tag(&self) -> Tag {
        self.heap.tag
    }

    /// `size` bytes from `offset` on, for copies of all kinds. The memory cannot be unmapped while
    /// it or a copy that it began lives, so its tag can neither fall asleep nor be reset. If the
    /// block is freed while such a copy runs, its memory becomes free when the copy is over; never,
    /// if that cannot be known.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside of the block, for a block that is asleep, and for
    /// one that was freed by [`Pool::reset`].
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        self.part(offset, size, true)
    }

    /// The same. It must be pinned unless no copy of it outlives the block.
    fn part(&self, offset: u64, size: u64, pinned: bool) -> Result<Slice<'_>> {
        const OPERATION: &str = "take a part of a block";
        self.heap.shared.check_process()?;
        if offset > self.size || size > self.size - offset {
            return Err(Invalid::because(
                OPERATION,
                format!("{} at offset {offset:#x} are not inside of {}", Bytes(size), Bytes(self.size)),
                "Stay inside.",
            ));
        }
        let mut books = self.heap.lock();
        if books.generation != self.generation {
            return Err(Invalid::because(OPERATION, "it was freed by a reset of its tag", "Allocate a new one."));
        }
        if !matches!(books.state, State::Awake) {
            return Err(self.heap.asleep(&books.state, OPERATION));
        }
        // Under the lock: the tag neither falls asleep nor is reset before the slice is there.
        let mut slice = self.heap.shared.cache.session().slice_at(self.address + offset, size)?;
        if pinned {
            let pin = self.heap.pin(&mut books, self.address);
            // A pin that is dropped takes the lock.
            drop(books);
            slice.keep(Arc::new(pin));
        }
        Ok(slice)
    }

    /// Copies a buffer into the block, from `offset` on.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::write`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.part(offset, from.len() as u64, false)?.write(from)
    }

    /// Copies from the block, from `offset` on, into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::read`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.part(offset, to.len() as u64, false)?.read(to)
    }

    /// Sets `size` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::fill`].
    pub fn fill(&self, offset: u64, size: u64, value: u8) -> Result<()> {
        self.part(offset, size, false)?.fill(value)
    }

    /// The address, without the handle: the block lives until [`Pool::free`].
    pub fn into_address(mut self) -> u64 {
        if !self.heap.shared.in_child() {
            self.heap.disown(self.claim(), self.generation);
        }
        self.number = DISOWNED;
        self.address
    }

    #[inline]
    fn claim(&self) -> Claim {
        Claim { address: self.address, size: self.size, number: self.number }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        // In a child of fork the lock may be held for ever, and the block is the parent's.
        if self.number != DISOWNED && !self.heap.shared.in_child() {
            self.heap.free(self.claim(), self.generation);
        }
    }
}
