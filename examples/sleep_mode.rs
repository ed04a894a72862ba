//! Sleep mode: an inference engine gives up its NPU memory for a while and gets it back at the same
//! addresses, so pointers and captured graphs stay valid.
//!
//! Weights are kept in host memory, or in a file (`Keep::File`); a KV cache is computed again.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example sleep_mode`

use ascend_vmm::pool::{Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::{LogicalId, MemoryKind, Session};

const WEIGHTS: Tag = Tag(1);
const KV_CACHE: Tag = Tag(2);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Session::open()?.device(LogicalId(0))?;
    let free = || device.memory_info(MemoryKind::Hbm).map(|info| info.huge_free >> 20);
    // Unmapping does not wait for work on the NPU: an engine waits for its streams here.
    let options = PoolOptions::default().before_unmap(|addresses| println!("before {addresses:x?} are unmapped"));
    let pool = Pool::with(&PageCache::new(&device), options);

    let weights: Vec<_> = (1..=8).map(|layer| pool.allocate(layer << 20, 512, WEIGHTS)).collect::<Result<_, _>>()?;
    for (layer, block) in weights.iter().enumerate() {
        block.fill(0, block.size(), layer as u8)?;
    }
    let cache = pool.allocate(100 << 20, 512, KV_CACHE)?;
    println!("awake: {} MiB free, cache at {:#x}", free()?, cache.address());

    pool.sleep(WEIGHTS, Keep::Host, |progress| println!("{} of {} bytes kept", progress.done, progress.total))?;
    pool.sleep(KV_CACHE, Keep::Nothing, |_| ())?;
    println!("asleep: {} MiB free", free()?);

    pool.wake(&[WEIGHTS, KV_CACHE], |_| ())?;
    for (layer, block) in weights.iter().enumerate() {
        let mut last = [0];
        block.read(block.size() - 1, &mut last)?;
        assert_eq!(last, [layer as u8]);
    }
    println!("awake again: {} MiB free, same addresses, same weights", free()?);
    Ok(())
}
