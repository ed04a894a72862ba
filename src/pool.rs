//! Elastic memory for allocators, inference engines and caches.
//!
//! * A [`PageCache`] keeps physical memory for reuse.
//! * A [`Segment`] is a range of addresses, with memory behind any part of it, on demand.
//! * A [`Pool`] hands out blocks from a few bytes to many GiB. Each block has a [`Tag`]. The blocks
//!   of a tag have memory of their own, so a tag can sleep: it releases its memory, keeps its
//!   addresses, and can be woken again.
//!
//! Each builds on the one before it, and can be used without the ones after it.
//!
//! ```
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

mod backup_file;
mod blocks;
mod file;
mod heap;
mod page_cache;
mod segment;
mod sleep;
mod small_blocks;

pub use backup_file::{BackupFile, BackupPart};
pub use file::{Progress, load, store};
pub use page_cache::{CacheOptions, CacheStatistics, PageCache};
pub use segment::{Segment, SegmentOptions};
pub use sleep::Keep;

use crate::bytes::Bytes;
use crate::copy::Slice;
use crate::error::{Error, Invalid, Result};
use crate::slots::lock;
use blocks::{BlockRequest, UsedBlock};
use heap::{Heap, PoolContext, impossible, no_block};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The purpose of blocks: a number of the caller's choice. Blocks of different tags have different
/// pages, so one tag can sleep while another is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Tag(pub u32);

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tag {}", self.0)
    }
}

/// How a pool grows: by default in handles of 2 MiB, 20 MiB and 1 GiB, and by no more than requests
/// need.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{PageCache, Pool, PoolOptions, Tag};
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let options = PoolOptions::default().handles(&[2 << 20]).step(64 << 20);
/// let pool = Pool::with(&PageCache::new(&device), options);
/// let block = pool.allocate(100, 1, Tag(0))?;
/// assert_eq!(pool.statistics().mapped, 64 << 20);
/// # drop(block);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct PoolOptions {
    segments: SegmentOptions,
    step: u64,
}

impl PoolOptions {
    /// The sizes of handles: see [`SegmentOptions::handles`].
    pub fn handles(mut self, sizes: &[u64]) -> Self {
        self.segments = self.segments.handles(sizes);
        self
    }

    /// Maps at least this many bytes at once, if the device has them: fewer system calls, more
    /// mapped memory that is not used. The default is one handle.
    pub fn step(mut self, bytes: u64) -> Self {
        self.step = bytes;
        self
    }

    /// Called with the addresses before anything is unmapped: see
    /// [`SegmentOptions::before_unmap`]. The hook may use the pool.
    pub fn before_unmap(mut self, hook: impl Fn(&[Range<u64>]) + Send + Sync + 'static) -> Self {
        self.segments = self.segments.before_unmap(hook);
        self
    }
}

/// Memory of a pool, or of one of its tags, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// In blocks, with rounding.
    pub in_use: u64,
    /// The largest [`Statistics::in_use`] so far.
    pub peak: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Mapped memory, in blocks or free.
    pub mapped: u64,
    /// Reserved addresses, with memory or without.
    pub reserved: u64,
    /// The largest free block, or one at most a sixteenth smaller.
    pub largest_free: u64,
    /// In the cache; 0 for a tag.
    pub cached: u64,
    /// Memory of sleeping tags, which waking maps again.
    pub asleep: u64,
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes| Bytes(bytes).rounded();
        write!(f, "in use {}, peak {}, blocks {}, ", size(self.in_use), size(self.peak), self.blocks)?;
        write!(f, "mapped {}, reserved {}, ", size(self.mapped), size(self.reserved))?;
        write!(f, "largest free {}, cached {}, ", size(self.largest_free), size(self.cached))?;
        write!(f, "asleep {}", size(self.asleep))
    }
}

/// Hands out blocks of device memory, from a few bytes to 128 GiB, to any number of threads. A
/// counted reference; blocks keep their memory alive without it.
///
/// Memory of freed blocks stays mapped, and new blocks use it without a system call.
/// [`Pool::trim`] gives it back. If the device runs out of memory, the pool gives its free memory
/// back before it returns an error.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{PageCache, Pool, PoolOptions, Tag};
/// use ascend_vmm::{LogicalId, Session};
///
/// let cache = PageCache::new(&Session::open()?.device(LogicalId(0))?);
/// // Grows by 64 MiB at least.
/// let pool = Pool::with(&cache, PoolOptions::default().step(64 << 20));
/// let block = pool.allocate(1 << 20, 512, Tag(0))?;
/// assert_eq!(pool.statistics().mapped, 64 << 20);
/// drop(block);
/// assert_eq!(pool.trim()?, 64 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    context: Arc<PoolContext>,
    heaps: Arc<Mutex<BTreeMap<Tag, Arc<Heap>>>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({:?})", self.context.cache)
    }
}

impl Pool {
    /// A pool that takes its memory from a cache.
    pub fn new(cache: &PageCache) -> Pool {
        Pool::with(cache, PoolOptions::default())
    }

    /// A pool with options.
    pub fn with(cache: &PageCache, options: PoolOptions) -> Pool {
        Pool { context: Arc::new(PoolContext::new(cache.clone(), options)), heaps: Arc::default() }
    }

    /// Allocates `size` bytes at a multiple of `alignment`: a power of two of at most 1 GiB. The
    /// address is at least a multiple of 64.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an impossible size or alignment, and for a tag that is asleep;
    /// [`Error::OutOfMemory`] with what was asked for and what is free, if giving back all free
    /// memory of the pool does not help; [`Error::Refused`] if the kernel refuses a command. Then
    /// free memory, cache and addresses are as before.
    #[doc(alias = "aclrtMalloc")]
    #[doc(alias = "cuMemAlloc")]
    #[doc(alias = "cudaMalloc")]
    pub fn allocate(&self, size: u64, alignment: u64, tag: Tag) -> Result<Block> {
        self.context.cache.check_process()?;
        let Some(request) = BlockRequest::new(size, alignment) else { return Err(impossible(size, alignment)) };
        let heap = self.heap(tag);
        let allocated = heap.allocate(request).or_else(|error| self.allocate_from_free(&heap, request, error));
        Ok(Block { block: allocated?, heap, owned: true })
    }

    /// Slow path: gives back the free memory of all tags and tries again. Maps it again if that
    /// does not help.
    fn allocate_from_free(&self, heap: &Arc<Heap>, request: BlockRequest, error: Error) -> Result<UsedBlock> {
        if !self.may_fit(&error) {
            return Err(error);
        }
        // Report the missing memory, even if some of it is in use and cannot be unmapped.
        let unmapped = self.all_heaps().into_iter().map(|heap| (heap.unmap_free().unwrap_or_default(), heap));
        let unmapped: Vec<_> = unmapped.filter(|(handles, _)| !handles.is_empty()).collect();
        self.context.cache.check_process()?;
        if unmapped.is_empty() {
            return Err(error);
        }
        let allocated = heap.allocate(request);
        for (handles, heap) in &unmapped {
            match allocated {
                Ok(_) => heap.remove_empty_segments(),
                Err(_) => heap.map_again(handles),
            }
        }
        allocated
    }

    /// Whether all free memory together (on the device, in the pool and in the cache) could be
    /// enough.
    fn may_fit(&self, error: &Error) -> bool {
        let Error::OutOfMemory(details) = error else { return error.is_out_of_memory() };
        let (Some(huge), giant) = (details.free_huge, details.free_giant.unwrap_or(0)) else { return true };
        let Statistics { mapped, in_use, cached, .. } = self.statistics();
        let here = cached + mapped.saturating_sub(in_use);
        details.asked <= huge.saturating_add(giant).saturating_add(here)
    }

    /// The heap of a tag, made on first use.
    fn heap(&self, tag: Tag) -> Arc<Heap> {
        lock(&self.heaps).entry(tag).or_insert_with(|| Arc::new(Heap::new(tag, &self.context))).clone()
    }

    fn existing_heap(&self, tag: Tag) -> Option<Arc<Heap>> {
        lock(&self.heaps).get(&tag).cloned()
    }

    /// The heaps of all tags, in order.
    fn all_heaps(&self) -> Vec<Arc<Heap>> {
        lock(&self.heaps).values().cloned().collect()
    }

    /// Frees the block that begins at an address returned by [`Block::into_address`].
    ///
    /// Work that runs on the NPU may still use the block: its memory stays mapped, but can become
    /// part of another block at once. Only copies that a slice of the [`Block`] began delay that:
    /// the memory becomes free when they end.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if no block begins there, or if it belongs to a [`Block`].
    #[doc(alias = "aclrtFree")]
    #[doc(alias = "cuMemFree")]
    #[doc(alias = "cudaFree")]
    pub fn free(&self, address: u64) -> Result<()> {
        self.context.cache.check_process()?;
        match self.context.owner(address) {
            Some(heap) => heap.free_at(address),
            None => Err(no_block(address)),
        }
    }

    /// The size and the tag of the block that begins at an address.
    pub fn find(&self, address: u64) -> Option<(u64, Tag)> {
        if self.context.cache.in_child() {
            return None;
        }
        let heap = self.context.owner(address)?;
        let block = heap.lock().find(address)?;
        Some((block.size, heap.tag))
    }

    /// Frees all blocks of a tag at once. Their handles become invalid. The memory stays mapped.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the tag is asleep; [`Error::InUse`] while slices or copies of its
    /// blocks are alive. Then nothing has changed.
    pub fn reset(&self, tag: Tag) -> Result<()> {
        self.context.cache.check_process()?;
        self.heap(tag).reset()
    }

    /// Unmaps all handles without blocks, and releases their memory and the cache. Also returns
    /// addresses that have no memory left. Returns the number of released bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] or [`Error::InUse`] if nothing could be unmapped.
    pub fn trim(&self) -> Result<u64> {
        self.context.cache.check_process()?;
        self.unmap_free()?;
        self.context.cache.trim(0)
    }

    /// Unmaps the free memory of all tags that are awake. Returns the number of unmapped bytes.
    fn unmap_free(&self) -> Result<u64> {
        let (mut unmapped, mut refused) = (0, None);
        for heap in self.all_heaps() {
            match heap.unmap_free() {
                Ok(handles) => {
                    unmapped += handles.iter().map(|(_, size)| size).sum::<u64>();
                    heap.remove_empty_segments();
                }
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if unmapped == 0 => Err(error),
            _ => Ok(unmapped),
        }
    }

    /// Memory of all tags and of the cache. All zero in a child of fork.
    pub fn statistics(&self) -> Statistics {
        if self.context.cache.in_child() {
            return Statistics::default();
        }
        let cached = self.context.cache.statistics().cached;
        let mut total = Statistics { peak: self.context.peak(), cached, ..Statistics::default() };
        for heap in self.all_heaps() {
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

    /// Memory of one tag. All zero if the tag was never used.
    pub fn statistics_of(&self, tag: Tag) -> Statistics {
        if self.context.cache.in_child() {
            return Statistics::default();
        }
        self.existing_heap(tag).map(|heap| heap.statistics()).unwrap_or_default()
    }

    /// The cache that its memory comes from.
    pub fn cache(&self) -> &PageCache {
        &self.context.cache
    }
}

/// A block of a pool's memory. Dropping it frees it.
///
/// ```
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
    block: UsedBlock,
    /// False after [`Block::into_address`].
    owned: bool,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:#x}, {}, {})", self.block.address, Bytes(self.block.size), self.heap.tag)
    }
}

impl Block {
    /// First address.
    pub fn address(&self) -> u64 {
        self.block.address
    }

    /// Size in bytes: the requested size, rounded up.
    pub fn size(&self) -> u64 {
        self.block.size
    }

    /// Its tag.
    pub fn tag(&self) -> Tag {
        self.heap.tag
    }

    /// A part of the block, for all kinds of copies. While the slice or a copy that it began is
    /// alive, the memory cannot be unmapped, so the tag can neither fall asleep nor be reset. If
    /// the block is freed while such a copy runs, its memory becomes free when the copy ends, and
    /// never if the end cannot be known.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part outside of the block, for a block that is asleep, and for one
    /// that [`Pool::reset`] has freed.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        const OPERATION: &str = "take a part of a block";
        self.heap.pool.cache.check_process()?;
        let UsedBlock { address, size: whole, .. } = self.block;
        Invalid::check_inside(OPERATION, offset, size, whole)?;
        let mut books = self.heap.lock();
        if !books.blocks.is_current(self.block) {
            return Err(Invalid::because(OPERATION, "it was freed by a reset of its tag", "Allocate a new one."));
        }
        self.heap.check_awake(&books, OPERATION)?;
        // Under the lock: the tag cannot fall asleep or be reset before the slice exists.
        let mut slice = self.heap.pool.cache.session().slice_at(address + offset, size)?;
        let pin = self.heap.pin(&mut books, address);
        // Dropping a pin takes the lock.
        drop(books);
        slice.keep(Arc::new(pin));
        Ok(slice)
    }

    /// Copies a buffer into the block, from `offset` on.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::write`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?.write(from)
    }

    /// Copies a part of the block, from `offset` on, into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::read`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.slice(offset, to.len() as u64)?.read(to)
    }

    /// Sets `size` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// Those of [`Block::slice`] and of [`Slice::fill`].
    pub fn fill(&self, offset: u64, size: u64, value: u8) -> Result<()> {
        self.slice(offset, size)?.fill(value)
    }

    /// Gives up the handle and returns the address. The block lives until [`Pool::free`].
    pub fn into_address(mut self) -> u64 {
        if !self.heap.pool.cache.in_child() {
            self.heap.disown(self.block);
        }
        self.owned = false;
        self.block.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // In a child of fork the block is the parent's, and the lock may be held by a thread that
        // does not exist there.
        if self.owned && !self.heap.pool.cache.in_child() {
            self.heap.free(self.block);
        }
    }
}
