//! The page cache, segments and pools on the emulated driver.

mod backup_files;
mod copies;
mod faults;
mod growth;
mod sleep;
#[path = "../support/mod.rs"]
mod support;

use ascend_vmm::MemoryKind;
use ascend_vmm::pool::{PageCache, Pool};
use support::device;

fn pool() -> Pool {
    Pool::new(&PageCache::new(&device(0)))
}

/// Free memory of the device, in 2 MiB pages.
fn free() -> u64 {
    device(0).memory_info(MemoryKind::Hbm).unwrap().huge_free
}
