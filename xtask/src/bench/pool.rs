//! The cost of blocks, segments and sleep.

use super::client::{Client, Failure, OwnFigures, SIZE, Work, discard, open};
use super::figure::{Quantity, Target};
use super::{GROWTH, Run, Setup, count, steps_of};
use ascend_vmm::pool::{Keep, PageCache, Pool, PoolOptions, Segment, SegmentOptions, Tag};

const TAG: Tag = Tag(0);
/// Bytes that sleep.
const ASLEEP: u64 = 64 << 30;
/// Instructions of a block that is cut from a run, and of a block of its own.
const CUT: Option<f64> = Some(500.0);
const OWN: Option<f64> = Some(1500.0);
/// Sizes of blocks of both kinds.
const SIZES: [(u64, &str, Option<f64>); 2] = [(4 << 10, "4 KiB", CUT), (64 << 10, "64 KiB", OWN)];

/// The measured process.
pub(super) fn work(client: &Client) -> Result<OwnFigures, Failure> {
    let cache = PageCache::new(&open()?);
    match client.work {
        Work::PoolSegment => {
            let mut segment = Segment::with(&cache, 1 << 30, SegmentOptions::default().handles(&[SIZE]))?;
            client.repeat(
                None,
                |_| Ok(()),
                || {
                    segment.ensure(0..SIZE)?;
                    segment.shrink(0..SIZE).map(discard)
                },
            )
        }
        Work::PoolSleep => {
            let pool = Pool::new(&cache);
            let _block = pool.allocate(ASLEEP, 1, TAG)?;
            client.repeat(
                None,
                |_| Ok(()),
                || {
                    pool.sleep(TAG, Keep::Nothing, |_| ())?;
                    pool.wake(&[TAG], |_| ())
                },
            )
        }
        _ => {
            // Few commands on the way to many blocks.
            let pool = Pool::with(&cache, PoolOptions::default().step(if client.live > 1 { 1 << 30 } else { SIZE }));
            // Counts only the pool's own memory.
            let (_, bytes) = client.live(|_| {
                discard(pool.allocate(client.size, 1, TAG)?.into_address());
                Ok(())
            })?;
            client.repeat(bytes, |_| Ok(()), || pool.allocate(client.size, 1, TAG).map(discard))
        }
    }
}

/// How many measurements there are.
pub(super) fn steps(most: u64) -> u64 {
    4 + u64::from(most >= 1_000) + if most >= 1_000_000 { 2 } else { 0 }
}

/// The figures. `most` objects are alive at most.
pub(super) fn figures(bench: &mut Run, most: u64, pairs: u64) {
    let block = Setup::of(Work::PoolBlock);
    let _ = one(bench, "a page out of the cache and back", Setup::of(Work::PoolSegment), pairs, None, 2.0);
    let _ = one(bench, "a block of 2 MiB", block, pairs, OWN, 0.0);
    for (size, name, must) in SIZES {
        let name = format!("a block of {name}");
        let live = if most >= 1_000 { 1_000 } else { 1 };
        let few = one(bench, &name, Setup { live, size, ..block }, pairs, must, 0.0);
        if most >= 1_000_000 {
            let many = one(bench, &name, Setup { live: most, size, ..block }, pairs, must, 0.0);
            let ratio = many.and_then(|many| few.map(|few| many / few));
            let name = format!("{name}: a million live against a thousand");
            bench.add(name, Some(most), Quantity::Times, ratio, Target::must(GROWTH));
        }
    }
    if most >= 1_000 {
        let name = "64 GiB asleep and awake, without copies";
        bench.progress.set_message(name);
        let figures = bench.measure(&Setup::of(Work::PoolSleep), 1, 0);
        bench.add(name, None, Quantity::Ioctls, count(&figures, |counts| counts.ioctls), Target::must(256.0));
    }
}

/// Instructions and system calls of allocating and freeing, with their limits; returns the
/// instructions.
fn one(bench: &mut Run, name: &str, setup: Setup, pairs: u64, must: Option<f64>, calls: f64) -> Result<f64, String> {
    bench.progress.set_message(name.to_owned());
    let figures = bench.measure(&setup, pairs, 0);
    let instructions = steps_of(&figures, |steps| steps.instructions);
    let target = Target { must, ..Target::default() };
    bench.add(name, Some(setup.live), Quantity::Instructions, instructions.clone(), target);
    let made = count(&figures, |counts| counts.calls);
    bench.add(name, Some(setup.live), Quantity::Calls, made, Target::must(calls));
    let bytes = figures.ok().and_then(|figures| figures.own.bytes_per_object);
    if let Some(bytes) = bytes.filter(|_| setup.live >= 1_000_000) {
        // A hundredth of what is mapped.
        let limit = Target::must(setup.size as f64 / 100.0);
        bench.add(format!("bookkeeping of {name}"), Some(setup.live), Quantity::Bytes, Ok(bytes), limit);
    }
    instructions
}
