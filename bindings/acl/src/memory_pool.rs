//! Memory pools with stream order: `aclrtMemPool…`.
//!
//! A block is there as soon as the call returns. Freeing one takes effect in the order of its
//! stream, so its memory becomes part of another block only after the work before. When a pool has
//! no memory left, the allocating stream is waited for, and the allocation tried again.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::handles::{Handle, Handles, kind};
use crate::physical::Location;
use crate::stream::{self, Task};
use crate::{devices, process};
use ascend_vmm::pool::{PageCache, Pool, Tag};
use ascend_vmm::{Error, LogicalId};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// What a program asks of a pool: `aclrtMemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PoolProperties {
    allocation_type: i32,
    handle_type: i32,
    location: Location,
    most: usize,
    reserved: [u8; 32],
}

/// A pool of the program.
pub(crate) struct MemoryPool {
    device: LogicalId,
    pool: Pool,
    /// The most bytes in blocks; 0 for no limit.
    most: u64,
    /// Unused memory above this is released when a block is freed; the program sets it.
    threshold: AtomicU64,
    /// How memory may be used again. All ways are safe here: these are only kept.
    reuse: [AtomicI32; 3],
    /// The most mapped bytes so far.
    mapped_peak: AtomicU64,
    used_peak: AtomicU64,
}

static POOLS: Handles<Arc<MemoryPool>, { kind::POOL }> = Handles::new();

const TAG: Tag = Tag(0);
const ALIGNMENT: u64 = 512;
const THRESHOLD: i32 = 4;

impl MemoryPool {
    /// Notes the peaks, after an allocation.
    fn note_peaks(&self) {
        let statistics = self.pool.statistics();
        self.mapped_peak.fetch_max(statistics.mapped, Ordering::Relaxed);
        self.used_peak.fetch_max(statistics.in_use, Ordering::Relaxed);
    }

    fn free(&self, address: u64) -> Outcome {
        self.pool.free(address)?;
        let statistics = self.pool.statistics();
        if statistics.mapped - statistics.in_use.min(statistics.mapped) > self.threshold.load(Ordering::Relaxed) {
            self.pool.trim()?;
        }
        Ok(())
    }
}

fn find(pool: Handle) -> Outcome<Arc<MemoryPool>> {
    if pool.is_null() {
        return Err(invalid("memPool is NULL. Pass one that aclrtMemPoolCreate made."));
    }
    POOLS.get(pool).ok_or_else(|| refused("this is not a memory pool, or it is destroyed."))
}

/// The pool with the block that begins at an address.
fn owner(address: u64) -> Option<Arc<MemoryPool>> {
    POOLS.collect(|_, pool| pool.pool.find(address).map(|_| pool.clone())).pop()
}

/// `aclrtMemPoolCreate`.
pub fn create(pool: Out<Handle>, properties: In<PoolProperties>) -> Outcome {
    let pool = pool.check("memPool")?;
    let properties = properties.read("poolProps")?;
    if properties.allocation_type != 0 || properties.handle_type != 0 || properties.reserved != [0; 32] {
        return Err(invalid("allocType is not pinned, handleType is not none, or reserved bytes are not 0."));
    }
    if properties.location.kind != Location::DEVICE {
        return Err(refused("a memory pool is on a device: location.type is 1."));
    }
    let device = devices::by_user(properties.location.id.into())?.logical;
    let new = MemoryPool {
        device,
        pool: Pool::new(&PageCache::new(&process::device(device)?)),
        most: properties.most as u64,
        threshold: AtomicU64::new(u64::MAX),
        reuse: [const { AtomicI32::new(1) }; 3],
        mapped_peak: AtomicU64::new(0),
        used_peak: AtomicU64::new(0),
    };
    pool.write(POOLS.insert(Arc::new(new))?);
    Ok(())
}

/// `aclrtMemPoolDestroy`: not while it has blocks.
pub fn destroy(pool: Handle) -> Outcome {
    let found = find(pool)?;
    let blocks = found.pool.statistics().blocks;
    if blocks > 0 {
        return Err(refused(format!(
            "{blocks} block(s) of the pool are not freed. Free them and wait for the stream."
        )));
    }
    POOLS.remove(pool);
    found.pool.trim()?;
    Ok(())
}

/// `aclrtMemPoolMallocAsync`.
pub fn allocate(address: Out<Address>, size: usize, pool: Handle, stream: Handle) -> Outcome {
    let address = address.check("ptr")?;
    if size == 0 {
        return Err(invalid("the size is 0. Ask for at least one byte."));
    }
    let pool = find(pool)?;
    let stream = stream::find(stream)?;
    let size = size as u64;
    let try_now = || {
        if pool.most > 0 && pool.pool.statistics().in_use.saturating_add(size) > pool.most {
            let text = format!("{size} more bytes are more than the pool may have, {}.", pool.most);
            return Err(Fault::new(code::RT_MEMORY, text));
        }
        pool.pool.allocate(size, ALIGNMENT, TAG).map_err(|error| match error {
            Error::Invalid(_) => Box::<Fault>::from(error).with_code(code::RT_MEMORY),
            error => error.into(),
        })
    };
    let block = try_now().or_else(|fault| {
        if fault.code != code::RT_MEMORY {
            return Err(fault);
        }
        // What was freed on the stream is not free before the stream gets there.
        stream.wait(None)?;
        try_now()
    })?;
    address.write(Address(block.into_address()));
    pool.note_peaks();
    Ok(())
}

/// `aclrtMemPoolFreeAsync`: in the order of the stream.
pub fn free(address: Address, stream: Handle) -> Outcome {
    let address = address.check("ptr")?;
    let stream = stream::find(stream)?;
    let unknown =
        || refused(format!("{address:#x} is not what aclrtMemPoolMallocAsync returned, or is freed already."));
    let pool = owner(address).ok_or_else(unknown)?;
    stream.push(Task::Work(Box::new(move || pool.free(address))))
}

/// Frees a block of a pool now, for `aclrtFree`. Returns whether there is one.
pub(crate) fn free_now(address: u64) -> bool {
    owner(address).is_some_and(|pool| pool.free(address).is_ok())
}

/// `aclrtMemPoolTrimTo`: releases unused memory if the pool has more than this.
pub fn trim(pool: Handle, keep: usize) -> Outcome {
    let pool = find(pool)?;
    if pool.pool.statistics().mapped > keep as u64 {
        pool.pool.trim()?;
    }
    Ok(())
}

fn no_attribute(attribute: i32) -> Box<Fault> {
    refused(format!("{attribute} is not an attribute of pools that can be used so. They are 1 to 8; 5 to 8 are read."))
}

/// `aclrtMemPoolSetAttr`.
pub fn set_attribute(pool: Handle, attribute: i32, value: In<u8>) -> Outcome {
    let pool = find(pool)?;
    match attribute {
        1..=3 => {
            let on = value.cast::<i32>().read("value")?;
            pool.reuse[attribute as usize - 1].store((on != 0).into(), Ordering::Relaxed);
        }
        THRESHOLD => pool.threshold.store(value.cast::<u64>().read("value")?, Ordering::Relaxed),
        // A peak can only be set back.
        6 | 8 if value.cast::<u64>().read("value")? == 0 => {
            let statistics = pool.pool.statistics();
            let (peak, now) = match attribute {
                6 => (&pool.mapped_peak, statistics.mapped),
                _ => (&pool.used_peak, statistics.in_use),
            };
            peak.store(now, Ordering::Relaxed);
        }
        other => return Err(no_attribute(other)),
    }
    Ok(())
}

/// `aclrtMemPoolGetAttr`.
pub fn attribute(pool: Handle, attribute: i32, value: Out<u8>) -> Outcome {
    let value = value.check("value")?;
    let pool = find(pool)?;
    let statistics = pool.pool.statistics();
    let number = match attribute {
        1..=3 => {
            let on = pool.reuse[attribute as usize - 1].load(Ordering::Relaxed);
            value.cast::<i32>().write(on);
            return Ok(());
        }
        THRESHOLD => pool.threshold.load(Ordering::Relaxed),
        5 => statistics.mapped,
        6 => pool.mapped_peak.load(Ordering::Relaxed).max(statistics.mapped),
        7 => statistics.in_use,
        8 => pool.used_peak.load(Ordering::Relaxed).max(statistics.in_use),
        other => return Err(no_attribute(other)),
    };
    value.cast::<u64>().write(number);
    Ok(())
}

/// Whether there is a pool with blocks.
pub(crate) fn is_used() -> bool {
    POOLS.collect(|_, pool| (pool.pool.statistics().blocks > 0).then_some(())).pop().is_some()
}

/// Ends all pools, or those of one device, with their blocks.
pub(crate) fn end(device: Option<LogicalId>) {
    let of = |pool: &MemoryPool| device.is_none_or(|device| device == pool.device);
    for handle in POOLS.collect(|handle, pool| of(pool).then_some(handle)) {
        if let Some(pool) = POOLS.remove(handle) {
            let _ = pool.pool.reset(TAG);
            let _ = pool.pool.trim();
        }
    }
}
