//! Device memory by address: `aclrtMalloc` and its family.
//!
//! A block of more than 1 MiB has its own physical memory and addresses, which are released with
//! it. Smaller blocks come from a [`Pool`] for each device, so that they do not take a page of 2
//! MiB each; empty pages are released from time to time, and before a call fails for lack of
//! memory.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::{addresses, context, copy, devices, host, ipc, memory_pool, process, stream};
use ascend_vmm::pool::{PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::{Error, Kind, LogicalId, Mapping, MemoryKind, Page, ReserveOptions};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// The blocks with memory of their own, by their address.
static LARGE: Mutex<BTreeMap<u64, Large>> = Mutex::new(BTreeMap::new());

struct Large {
    size: u64,
    device: LogicalId,
    /// The page size that it was asked in.
    page: u64,
    /// Dropping it unmaps and releases the memory.
    mapping: Mapping,
}

/// The pools of smaller blocks, one for each device.
static SMALL: RwLock<Vec<Small>> = RwLock::new(Vec::new());

struct Small {
    device: LogicalId,
    pool: Pool,
    /// Blocks freed since empty pages were last released.
    freed: AtomicU32,
}

/// Blocks above this size have memory of their own.
const SMALL_SIZE: u64 = 1 << 20;
/// Empty pages are released after this many frees of smaller blocks, and before a call fails.
const FREED: u32 = 512;
/// All smaller blocks of a device are of one kind.
const TAG: Tag = Tag(0);
/// Alignment of blocks, as in the vendor's library, which documents 64.
const ALIGNMENT: u64 = 512;
/// Sizes are rounded up to this.
const ROUNDING: u64 = 32;
/// Added to most kinds of blocks.
const PADDING: u64 = 32;

/// A limit above the number of kinds of attributes.
const MOST_ATTRIBUTES: usize = 64;

/// An attribute of an allocation: `aclrtMallocAttribute`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Attribute {
    pub(crate) kind: i32,
    /// A union, of which all members begin here.
    pub(crate) value: u32,
    rest: u32,
}

/// Attributes of an allocation: `aclrtMallocConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Config {
    attributes: In<Attribute>,
    count: usize,
}

/// The attributes of an allocation; none if there is no configuration.
pub(crate) fn attributes(config: In<Config>) -> Outcome<Vec<Attribute>> {
    if config.is_null() {
        return Ok(Vec::new());
    }
    let Config { attributes, count } = config.read("cfg")?;
    if count > MOST_ATTRIBUTES {
        return Err(invalid(format!("cfg.numAttrs is {count}, which is more than there are kinds of attributes.")));
    }
    (0..count).map(|index| attributes.read_at(index, "cfg.attrs")).collect()
}

/// `aclrtMalloc`.
pub fn allocate(address: Out<Address>, size: usize, policy: i32) -> Outcome {
    let padding = if is_giant(policy) { 0 } else { PADDING };
    allocate_padded(address, size, policy, padding)
}

/// `aclrtMallocAlign32`: without padding.
pub fn allocate_unpadded(address: Out<Address>, size: usize, policy: i32) -> Outcome {
    allocate_padded(address, size, policy, 0)
}

/// `aclrtMallocWithCfg`.
pub fn allocate_with(address: Out<Address>, size: usize, policy: i32, config: In<Config>) -> Outcome {
    address.check("devPtr")?;
    if size == 0 {
        return Err(no_size());
    }
    const DEVICE_ID: i32 = 2;
    for attribute in attributes(config)? {
        if attribute.kind == DEVICE_ID && attribute.value != context::current()?.user {
            return Err(refused(format!("device {} is not the current device.", attribute.value)));
        }
    }
    allocate(address, size, policy)
}

fn no_size() -> Box<Fault> {
    invalid("the size is 0. Ask for at least one byte.")
}

fn allocate_padded(address: Out<Address>, size: usize, policy: i32, padding: u64) -> Outcome {
    let address = address.check("devPtr")?;
    if size == 0 {
        return Err(no_size());
    }
    let context = context::current()?;
    let padded = (size as u64).checked_next_multiple_of(ROUNDING).and_then(|size| size.checked_add(padding));
    let size = padded.ok_or_else(|| invalid(format!("{size} bytes cannot be rounded up.")))?;
    let page = if is_giant(policy) { Page::Giant } else { Page::Huge };
    let device = context.device;
    let allocated = match page {
        Page::Huge if size <= SMALL_SIZE && !HUGE_ONLY.contains(&policy) => allocate_small(device, size),
        _ if NORMAL_ONLY.contains(&policy) => allocate_large(device, size, page, NORMAL_PAGE),
        _ => allocate_large(device, size, page, page.size()),
    };
    address.write(Address(allocated?));
    Ok(())
}

/// Policies that want pages of 2 MiB for every size, and ordinary pages for every size. The last of
/// each is for memory that peers use, which is all memory here.
const HUGE_ONLY: [i32; 2] = [1, 4];
const NORMAL_ONLY: [i32; 2] = [2, 5];
/// The page size that programs are told of blocks which the vendor's library has in ordinary pages.
const NORMAL_PAGE: u64 = 4096;

/// The page size of the block around an address, as the vendor's library would have it.
pub(crate) fn page_of(address: u64) -> Option<u64> {
    let large = LARGE.lock();
    let around = large.range(..=address).next_back().filter(|(start, large)| address - *start < large.mapping.size());
    if let Some((_, large)) = around {
        return Some(large.page);
    }
    drop(large);
    // The pools have all memory that is neither in a large block nor in a reservation.
    (is_used() && addresses::reserved_at(address).is_none()).then_some(NORMAL_PAGE)
}

/// Policies that want pages of 1 GiB.
fn is_giant(policy: i32) -> bool {
    (6..=7).contains(&policy)
}

fn allocate_small(device: LogicalId, size: u64) -> Outcome<u64> {
    let known = SMALL.read();
    let block = match known.iter().find(|small| small.device == device) {
        Some(small) => small.pool.allocate(size, ALIGNMENT, TAG),
        None => {
            drop(known);
            new_pool(device)?.allocate(size, ALIGNMENT, TAG)
        }
    };
    Ok(block.map_err(no_memory)?.into_address())
}

/// The pool of a device, made when it is first needed.
fn new_pool(device: LogicalId) -> Outcome<Pool> {
    let target = process::device(device)?;
    let mut small = SMALL.write();
    if let Some(small) = small.iter().find(|small| small.device == device) {
        return Ok(small.pool.clone());
    }
    let pool = Pool::with(&PageCache::new(&target), PoolOptions::default().handles(&[Page::Huge.size()]));
    small.push(Small { device, pool: pool.clone(), freed: AtomicU32::new(0) });
    Ok(pool)
}

fn allocate_large(device: LogicalId, size: u64, page: Page, told: u64) -> Outcome<u64> {
    let (target, session) = (process::device(device)?, process::session()?);
    let whole = size
        .checked_next_multiple_of(page.size())
        .ok_or_else(|| Fault::new(code::RT_MEMORY, format!("{size} bytes are more than any device has.")))?;
    let create = || target.create_with(whole, Kind { page, memory: MemoryKind::Hbm });
    let memory = create().or_else(|error| if trim() { create() } else { Err(error) }).map_err(no_memory)?;
    let options = ReserveOptions::default().alignment(page.size());
    let reservation = session.reserve_with(whole, &options).map_err(no_memory)?;
    let mapping = reservation.map(0, &memory).map_err(no_memory)?;
    let start = mapping.address();
    LARGE.lock().insert(start, Large { size, device, page: told, mapping });
    Ok(start)
}

/// Reports every failure to allocate as a lack of memory: programs look for this code and free
/// some.
fn no_memory(error: Error) -> Box<Fault> {
    let fault = Box::<Fault>::from(error);
    if fault.code == code::RT_PARAM_INVALID { fault.with_code(code::RT_MEMORY) } else { fault }
}

/// Releases the empty pages of all pools. Returns whether there were any.
pub(crate) fn trim() -> bool {
    let pools: Vec<Pool> = SMALL.read().iter().map(|small| small.pool.clone()).collect();
    pools.iter().any(|pool| pool.trim().is_ok_and(|bytes| bytes > 0))
}

/// `aclrtFree`: works without a context, and waits for no stream. It also frees memory of
/// `aclrtMallocHost`, as the vendor's library does.
pub fn free(address: Address) -> Outcome {
    let address = address.check("devPtr")?;
    if !copy::is_drivers(address) {
        return if host::free_own(address) { Ok(()) } else { Err(unknown(address)) };
    }
    ipc::forget(address);
    // Large blocks begin where pages do.
    if address % Page::Huge.size() == 0 && free_large(address) {
        return Ok(());
    }
    let small = SMALL.read();
    let Some(Small { pool, freed, .. }) = small.iter().find(|small| small.pool.free(address).is_ok()) else {
        return if memory_pool::free_now(address) { Ok(()) } else { Err(unknown(address)) };
    };
    // A program that frees all its blocks keeps few pages; one that frees and allocates all the
    // time does not pay for it each time.
    if freed.fetch_add(1, Ordering::Relaxed) >= FREED {
        freed.store(0, Ordering::Relaxed);
        let _ = pool.trim();
    }
    Ok(())
}

/// Frees a large block. Returns whether there is one.
fn free_large(address: u64) -> bool {
    let large = LARGE.lock().remove(&address);
    large.is_some()
}

/// The size of the block that begins at an address in one of the pools.
fn find_small(small: &[Small], address: u64) -> Option<u64> {
    small.iter().find_map(|small| small.pool.find(address).map(|(size, _)| size))
}

fn unknown(address: u64) -> Box<Fault> {
    refused(format!("{address:#x} is not what aclrtMalloc returned, or is freed already."))
}

/// `aclrtFreeWithDevSync`: waits for the device first.
pub fn free_after_work(address: Address) -> Outcome {
    address.check("devPtr")?;
    stream::synchronize_device()?;
    free(address)
}

/// The block that contains an address, or a small one that begins there: its start and size.
pub(crate) fn block_around(address: u64) -> Option<(u64, u64)> {
    if let Some((&start, large)) = LARGE.lock().range(..=address).next_back() {
        if address - start < large.mapping.size() {
            return Some((start, large.size));
        }
    }
    find_small(&SMALL.read(), address).map(|size| (address, size))
}

/// `aclrtMemP2PMap`: lets another device reach a block.
pub fn grant(address: Address, size: usize, device: i32, flags: u64) -> Outcome {
    let address = address.check("devPtr")?;
    if size == 0 || flags != 0 {
        return Err(invalid("the size is 0, or flags are not 0, which are reserved."));
    }
    let device = process::device(devices::by_user(device.into())?.logical)?;
    let (start, length) = block_around(address)
        .ok_or_else(|| refused(format!("{address:#x} is not in memory that aclrtMalloc returned.")))?;
    if size as u64 > start + length - address {
        return Err(refused(format!("{size} bytes at {address:#x} are more than the block has.")));
    }
    let (session, mut at) = (process::session()?, address);
    while at < address + size as u64 {
        let Some(mapping) = session.mapping(at) else { break };
        mapping.grant(&device).map_err(Fault::driver)?;
        at = mapping.address() + mapping.size();
    }
    Ok(())
}

/// Whether there is a block.
pub(crate) fn is_used() -> bool {
    let small = |small: &Small| small.pool.statistics().blocks > 0;
    !LARGE.lock().is_empty() || SMALL.read().iter().any(small)
}

/// Frees all blocks, or those of one device.
pub(crate) fn end(device: Option<LogicalId>) {
    let keep = |of: LogicalId| device.is_some_and(|device| device != of);
    let mut large = LARGE.lock();
    let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
        std::mem::take(&mut *large).into_iter().partition(|(_, large)| keep(large.device));
    *large = kept;
    drop(large);
    drop(ended);
    let mut small = SMALL.write();
    let (kept, ended): (Vec<_>, Vec<_>) = std::mem::take(&mut *small).into_iter().partition(|small| keep(small.device));
    *small = kept;
    drop(small);
    for small in &ended {
        let _ = small.pool.reset(TAG);
    }
    drop(ended);
}
