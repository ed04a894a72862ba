//! The page cache, segments, and how pools grow and shrink.

use crate::free;
use crate::support::processes::start;
use crate::support::{self, GIB, MIB, MIB2, assert_nothing_left, count, device, inject, plain, refused_here};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::pool::{CacheOptions, Keep, PageCache, Pool, PoolOptions, Segment, SegmentOptions, Tag};
use ascend_vmm::{Error, Kind, MemoryKind, Page, ReserveOptions, Session};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn cache() -> PageCache {
    PageCache::new(&device(0))
}

/// The commands that `work` sends.
fn recorded(emulator: &Emulator, work: impl FnOnce()) -> Vec<&'static str> {
    emulator.record();
    let before = emulator.records().len();
    work();
    emulator.records()[before..].iter().filter_map(|record| record.cmd).filter(|name| !name.is_empty()).collect()
}

#[test]
fn a_cached_page_is_reused_with_its_contents_and_without_a_command() {
    on_each_generation(plain(), |_, emulator| {
        let cache = cache();
        let memory = cache.take(MIB2).unwrap();
        support::write(&memory, b"old");
        cache.put(memory);
        let mut again = None;
        assert!(recorded(emulator, || again = Some(cache.take(MIB2).unwrap())).is_empty());
        assert_eq!(support::read(&again.unwrap(), 3), b"old");
        let statistics = cache.statistics();
        assert_eq!((statistics.created, statistics.hits, statistics.cached), (1, 1, 0));
    });
}

#[test]
fn memory_with_other_references_or_of_another_kind_is_not_cached() {
    on_each_generation(plain(), |_, emulator| {
        let cache = cache();
        let memory = cache.take(MIB2).unwrap();
        let clone = memory.clone();
        cache.put(memory);
        cache.put(device(1).create(MIB2).unwrap());
        cache.put(Session::current().unwrap().host().unwrap().create(MIB2).unwrap());
        let p2p = Kind { memory: MemoryKind::P2pHbm, ..Kind::default() };
        cache.put(device(0).create_with(MIB2, p2p).unwrap());
        // A refused release may have begun.
        let begun = device(0).create(MIB2).unwrap();
        inject(emulator, "MEM_RELEASE#1=EBUSY");
        cache.put(begun.free().unwrap_err().object);
        assert_eq!(cache.statistics().cached, 0);
        cache.put(clone);
        assert_eq!(cache.statistics().cached, MIB2);
    });
}

#[test]
fn exported_memory_is_cached_only_if_allowed_and_is_not_exported_again() {
    on_each_generation(plain(), |_, emulator| {
        let careful = cache();
        let memory = careful.take(MIB2).unwrap();
        drop(memory.export().unwrap());
        careful.put(memory);
        assert_eq!(careful.statistics().cached, 0, "another process may see it");
        let sharing = PageCache::with(&device(0), CacheOptions::default().reuse_exported(true));
        let memory = sharing.take(MIB2).unwrap();
        let handle = memory.export().unwrap().handle();
        sharing.put(memory);
        let again = recorded(emulator, || {
            let memory = sharing.take(MIB2).unwrap();
            assert_eq!(memory.export().unwrap().handle(), handle);
            sharing.put(memory);
        });
        assert!(again.is_empty(), "{again:?}");
    });
}

#[test]
fn a_cache_keeps_no_more_than_its_limit_and_trims_the_largest_first() {
    on_each_generation(plain(), |_, _| {
        let cache = PageCache::with(&device(0), CacheOptions::default().limit(4 * MIB2));
        let before = free();
        let sizes = [MIB2, 2 * MIB2, 2 * MIB2];
        let memories = sizes.map(|size| cache.take(size).unwrap());
        memories.into_iter().for_each(|memory| cache.put(memory));
        assert_eq!(cache.statistics().cached, 3 * MIB2);
        // The limit itself may be reached.
        cache.put(cache.take(MIB2).unwrap());
        cache.put(device(0).create(MIB2).unwrap());
        assert_eq!(cache.statistics().cached, 4 * MIB2);
        assert_eq!(cache.trim(MIB2).unwrap(), 2 * MIB2 + MIB2);
        assert_eq!(cache.statistics().handles, 1);
        assert_eq!(cache.trim(0).unwrap(), MIB2);
        assert_eq!(cache.trim(0).unwrap(), 0);
        assert_eq!(free(), before);
        refused_here(&cache.take(0).unwrap_err(), "not a size of memory");
    });
}

#[test]
fn the_cache_is_emptied_before_an_allocation_fails() {
    let config = Config { hbm: 64 << 20, ..plain() };
    on_each_generation(config, |_, _| {
        let cache = cache();
        let all = free() / MIB2;
        let small: Vec<_> = (0..all).map(|_| cache.take(MIB2).unwrap()).collect();
        assert!(cache.take(MIB2).unwrap_err().is_out_of_memory());
        small.into_iter().for_each(|memory| cache.put(memory));
        // Only other sizes are cached.
        let large = cache.take(all * MIB2).unwrap();
        assert_eq!(cache.statistics().cached, 0);
        drop(large);
    });
}

#[test]
fn a_segment_grows_and_shrinks_anywhere_and_growing_again_costs_one_ioctl_a_page() {
    on_each_generation(plain(), |_, emulator| {
        let options = SegmentOptions::default().handles(&[MIB2]);
        let mut segment = Segment::with(&cache(), GIB, options).unwrap();
        segment.ensure(5 * MIB2 - 1..5 * MIB2 + 1).unwrap();
        assert_eq!(segment.pieces().collect::<Vec<_>>(), [(4 * MIB2, MIB2), (5 * MIB2, MIB2)]);
        segment.ensure(0..8 * MIB2).unwrap();
        assert_eq!(segment.mapped(), 8 * MIB2);
        segment.slice(0, 8 * MIB2).unwrap().fill(7).unwrap();
        // Only whole handles inside of the range are unmapped.
        assert_eq!(segment.shrink(MIB2 + 1..4 * MIB2 - 1).unwrap(), MIB2);
        refused_here(&segment.slice(0, 4 * MIB2).unwrap_err(), "not all of");
        let grown = recorded(emulator, || segment.ensure(0..8 * MIB2).unwrap());
        assert_eq!(grown, ["MEM_MAP"]);
        assert_eq!(recorded(emulator, || assert_eq!(segment.shrink(0..GIB).unwrap(), 8 * MIB2)), ["MEM_UNMAP"; 8]);
        segment.ensure(0..0).unwrap();
        assert_eq!(segment.mapped(), 0);
    });
}

#[test]
fn a_segment_takes_the_largest_handles_that_fit() {
    on_each_generation(plain(), |_, emulator| {
        let mut segment = Segment::new(&cache(), 4 * GIB).unwrap();
        let grown = recorded(emulator, || segment.ensure(0..GIB + 42 * (MIB2 / 2)).unwrap());
        let sizes: Vec<u64> = segment.pieces().map(|(_, size)| size).collect();
        assert_eq!(sizes, [GIB, 10 * MIB2, 10 * MIB2, MIB2]);
        assert_eq!(grown.len(), 8);
    });
}

#[test]
fn a_segment_of_1_gib_pages_is_aligned_to_them_and_grows_by_them() {
    isolated(plain(), |_| {
        let _shifts_the_rest = Session::current().unwrap().reserve(MIB2).unwrap();
        let giant = Kind { page: Page::Giant, ..Kind::default() };
        let cache = PageCache::with(&device(0), CacheOptions::default().kind(giant));
        let mut segment = Segment::new(&cache, 2 * GIB - 1).unwrap();
        assert_eq!((segment.address() % GIB, segment.size()), (0, 2 * GIB));
        segment.ensure(GIB + 5..GIB + 6).unwrap();
        assert_eq!(segment.pieces().collect::<Vec<_>>(), [(GIB, GIB)]);
        let pool = Pool::new(&cache);
        let block = pool.allocate(5, 1, Tag(0)).unwrap();
        assert_eq!(pool.statistics().mapped, GIB);
        block.write(0, b"small").unwrap();
    });
}

#[test]
fn one_page_is_mapped_at_several_addresses_and_several_segments_share_a_cache() {
    on_each_generation(plain(), |_, _| {
        let cache = cache();
        let (mut one, mut other) = (Segment::new(&cache, GIB).unwrap(), Segment::new(&cache, GIB).unwrap());
        one.ensure(0..MIB2).unwrap();
        let page = one.memory_at(MIB2 - 1).unwrap();
        assert!(one.memory_at(MIB2).is_none());
        one.map(7 * MIB2, &page).unwrap();
        other.map(0, &page).unwrap();
        drop(page);
        one.slice(0, 4).unwrap().write(b"same").unwrap();
        let mut text = [0; 4];
        other.slice(0, 4).unwrap().read(&mut text).unwrap();
        assert_eq!(&text, b"same");
        // The page is cached when its last mapping is gone.
        assert_eq!(one.shrink(0..GIB).unwrap(), 2 * MIB2);
        assert_eq!(cache.statistics().cached, 0);
        drop(other);
        assert_eq!(cache.statistics().cached, MIB2);
    });
}

#[test]
fn a_segment_larger_than_a_heap_is_contiguous_or_an_error() {
    on_each_generation(plain(), |_, _| {
        let session = Session::current().unwrap();
        let _in_the_way = session.reserve(MIB2).unwrap();
        let max = ReserveOptions::MAX_SIZE;
        let mut large = Segment::with(&cache(), 2 * max + MIB2, SegmentOptions::default().handles(&[MIB2])).unwrap();
        large.ensure(max - MIB2..max + MIB2).unwrap();
        large.ensure(2 * max..2 * max + MIB2).unwrap();
        large.slice(2 * max, 5).unwrap().write(b"there").unwrap();
        refused_here(&large.slice(max - 2, 4).unwrap_err(), "more than one reservation");
        assert_eq!(large.shrink(0..2 * max + MIB2).unwrap(), 3 * MIB2);
        let error = Segment::new(&cache(), 42 * max).unwrap_err();
        refused_here(&error, "free in one piece");
        refused_here(&Segment::new(&cache(), u64::MAX).unwrap_err(), "too much");
        refused_here(&Segment::new(&cache(), 0).unwrap_err(), "0 bytes");
        refused_here(&Segment::new(&cache(), 1 << 62).unwrap_err(), "free in one piece");
    });
}

#[test]
fn a_segment_that_grows_and_shrinks_at_random_agrees_with_a_model() {
    on_each_generation(plain(), |_, _| {
        // Far apart: in several rows of the range map, with many empty rows between them.
        let places = [0, 1, 63, 64, 65, 127, 4095, 4096, 20_000, 65_534].map(|chunk| chunk * MIB2);
        let size = 128 * GIB;
        let mut segment = Segment::with(&cache(), size, SegmentOptions::default().handles(&[MIB2])).unwrap();
        let mut model = std::collections::BTreeSet::new();
        let mut random = support::random::Random(7);
        for step in 0..300 {
            let (one, other) = (places[random.below(10) as usize], places[random.below(10) as usize]);
            let (start, end) = (one.min(other), one.max(other) + MIB2);
            if random.below(3) == 0 {
                let removed: Vec<u64> = model.range(start..end).copied().collect();
                assert_eq!(segment.shrink(start..end).unwrap(), removed.len() as u64 * MIB2, "step {step}");
                model.retain(|offset| !removed.contains(offset));
            } else {
                segment.ensure(one + random.below(MIB2)..one + MIB2).unwrap();
                model.insert(one);
            }
            let pieces: Vec<u64> = segment.pieces().map(|(offset, _)| offset).collect();
            assert_eq!(pieces, model.iter().copied().collect::<Vec<_>>(), "step {step}");
            assert_eq!(segment.memory_at(other + 5).is_some(), model.contains(&other), "step {step}");
            assert_eq!(segment.mapped(), model.len() as u64 * MIB2);
        }
    });
}

#[test]
fn impossible_ranges_and_handles_are_refused_before_any_command() {
    isolated(plain(), |emulator| {
        let mut segment = Segment::new(&cache(), GIB).unwrap();
        let calls = recorded(emulator, || {
            #[expect(clippy::reversed_empty_ranges)]
            for range in [0..GIB + 1, GIB..u64::MAX, u64::MAX..u64::MAX, 5..4] {
                refused_here(&segment.ensure(range.clone()).unwrap_err(), "not inside of");
                refused_here(&segment.shrink(range).unwrap_err(), "not inside of");
            }
            refused_here(&segment.slice(GIB, 1).unwrap_err(), "not inside of");
            refused_here(&segment.slice(u64::MAX, u64::MAX).unwrap_err(), "not inside of");
            for handles in [&[][..], &[0], &[1], &[MIB2, 3 * MIB2 / 2], &[2 * MIB2, 3 * MIB2]] {
                let error = Segment::with(&cache(), GIB, SegmentOptions::default().handles(handles)).unwrap_err();
                refused_here(&error, "its handles");
            }
        });
        assert!(calls.is_empty(), "{calls:?}");
    });
}

#[test]
fn the_hook_runs_before_anything_is_unmapped_and_its_panic_prevents_that() {
    on_each_generation(plain(), |_, _| {
        let cache = cache();
        let called = Arc::new(AtomicU64::new(0));
        let hook = {
            let called = called.clone();
            move |ranges: &[std::ops::Range<u64>]| {
                assert!(!ranges.is_empty());
                // All of it is still mapped.
                for range in ranges {
                    let session = Session::current().unwrap();
                    session.slice_at(range.start, range.end - range.start).unwrap().fill(1).unwrap();
                }
                if called.fetch_add(1, Ordering::Relaxed) == 1 {
                    panic!("the second call");
                }
            }
        };
        let mut segment = Segment::with(&cache, GIB, SegmentOptions::default().before_unmap(hook)).unwrap();
        segment.ensure(0..64 << 20).unwrap();
        segment.shrink(60 << 20..GIB).unwrap();
        let mapped = segment.mapped();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| segment.shrink(0..GIB))).unwrap_err();
        assert_eq!(segment.mapped(), mapped);
        segment.slice(0, mapped).unwrap().fill(2).unwrap();
        drop(segment);
        assert_eq!(called.load(Ordering::Relaxed), 3);
        assert_eq!(cache.statistics().cached, 64 << 20);
    });
}

#[test]
fn blocks_of_all_sizes_are_written_read_and_freed() {
    on_each_generation(plain(), |_, emulator| {
        let pool = Pool::new(&cache());
        let sizes = [1, 63, 64, 65, 512, 4096, 5000, 32 << 10, 40_000, MIB2, 3 * MIB2 + 1, 70 << 20, GIB];
        let mut blocks = Vec::new();
        for (number, &size) in sizes.iter().enumerate() {
            for tag in [Tag(0), Tag(u32::MAX)] {
                let block = pool.allocate(size, 64 << (number % 16), tag).unwrap();
                assert_eq!((block.address() % (64 << (number % 16)), block.tag()), (0, tag));
                assert!(block.size() >= size);
                assert_eq!(pool.find(block.address()), Some((block.size(), tag)));
                block.write(size - 1, &[number as u8]).unwrap();
                blocks.push((block, number as u8, size));
            }
        }
        for (block, number, size) in &blocks {
            let mut last = [0];
            block.read(size - 1, &mut last).unwrap();
            assert_eq!(last, [*number]);
        }
        let statistics = pool.statistics();
        assert_eq!((statistics.blocks, statistics.peak), (26, statistics.in_use));
        // The same again takes no command.
        drop(blocks);
        let again = recorded(emulator, || {
            let blocks: Vec<_> = sizes.iter().map(|&size| pool.allocate(size, 64, Tag(0)).unwrap()).collect();
            drop(blocks);
        });
        assert!(again.is_empty(), "{again:?}");
        let before = free();
        assert_eq!(pool.trim().unwrap(), statistics.mapped);
        assert_eq!(free(), before + statistics.mapped);
        let empty = pool.statistics();
        assert_eq!((empty.mapped, empty.reserved, empty.in_use, empty.cached), (0, 0, 0, 0));
    });
}

#[test]
fn a_block_is_freed_once_by_its_handle_or_by_its_address() {
    on_each_generation(plain(), |_, _| {
        let pool = Pool::new(&cache());
        for size in [100, MIB2] {
            let block = pool.allocate(size, 1, Tag(3)).unwrap();
            let address = block.address();
            refused_here(&pool.free(address).unwrap_err(), "belongs to a handle");
            refused_here(&pool.free(address + 64).unwrap_err(), "no block of this pool begins");
            assert_eq!(block.into_address(), address);
            pool.free(address).unwrap();
            refused_here(&pool.free(address).unwrap_err(), "no block of this pool begins");
            assert_eq!(pool.find(address), None);
        }
        for address in [0, 1, u64::MAX, ReserveOptions::ADDRESSES.start, ReserveOptions::ADDRESSES.end] {
            if pool.find(address).is_none() {
                refused_here(&pool.free(address).unwrap_err(), "no block of this pool begins");
            }
        }
        for (size, alignment) in [(0, 1), (1, 0), (1, 3), (1, 2 << 30), (u64::MAX, 1), (128 * GIB + 1, 1)] {
            let words = if alignment == 1 { "a block cannot have" } else { "is not possible" };
            refused_here(&pool.allocate(size, alignment, Tag(0)).unwrap_err(), words);
        }
    });
}

#[test]
fn a_reset_frees_all_blocks_of_a_tag_and_invalidates_their_handles() {
    on_each_generation(plain(), |_, _| {
        let pool = Pool::new(&cache());
        let kept = pool.allocate(100, 1, Tag(2)).unwrap();
        // The whole tag is in one segment, so the same blocks get the same addresses.
        drop(pool.allocate(8 * MIB, 1, Tag(1)).unwrap());
        let stale = [5, 100_000, MIB2].map(|size| pool.allocate(size, 1, Tag(1)).unwrap());
        let disowned = pool.allocate(7, 1, Tag(1)).unwrap().into_address();
        pool.reset(Tag(1)).unwrap();
        assert_eq!(pool.statistics_of(Tag(1)).blocks, 0);
        let new = [5, 100_000, MIB2].map(|size| pool.allocate(size, 1, Tag(1)).unwrap());
        new[2].write(0, b"new").unwrap();
        refused_here(&stale[2].write(0, b"old").unwrap_err(), "freed by a reset");
        let [_, _, last] = stale;
        let address = last.into_address();
        assert_eq!(address, new[2].address());
        refused_here(&pool.free(address).unwrap_err(), "belongs to a handle");
        pool.free(disowned).unwrap_err();
        assert_eq!(pool.statistics_of(Tag(1)).blocks, 3, "stale handles free nothing");
        kept.write(0, b"kept").unwrap();
    });
}

#[test]
fn free_memory_moves_to_another_tag_before_an_allocation_fails() {
    let config = Config { hbm: 64 << 20, ..plain() };
    on_each_generation(config, |_, _| {
        let pool = Pool::new(&cache());
        let all = free();
        let block = pool.allocate(all, 1, Tag(1)).unwrap();
        let error = pool.allocate(1, 1, Tag(2)).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        drop(block);
        let other = pool.allocate(all - MIB2, 1, Tag(2)).unwrap();
        let small = pool.allocate(1, 1, Tag(1)).unwrap();
        assert!(pool.allocate(1, 1, Tag(3)).unwrap_err().is_out_of_memory());
        drop((other, small));
        assert_eq!(pool.trim().unwrap(), all);
    });
}

#[test]
fn a_pool_maps_in_steps_if_there_is_enough_memory() {
    let config = Config { hbm: 64 << 20, ..plain() };
    on_each_generation(config, |_, _| {
        let pool = Pool::with(&cache(), PoolOptions::default().step(20 << 20));
        let all = free();
        let mut blocks = vec![pool.allocate(MIB2, 1, Tag(0)).unwrap()];
        assert_eq!(pool.statistics().mapped, 20 << 20);
        while let Ok(block) = pool.allocate(MIB2, 1, Tag(0)) {
            blocks.push(block);
        }
        assert_eq!(pool.statistics().in_use, all);
    });
}

#[test]
fn the_hook_of_a_pool_may_use_the_pool_and_its_panic_loses_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let slot: Arc<std::sync::Mutex<Option<Pool>>> = Arc::default();
        let inside = slot.clone();
        let hook = move |_: &[std::ops::Range<u64>]| {
            let pool = inside.lock().unwrap().clone();
            let Some(pool) = pool else { panic!("there is no pool") };
            drop(pool.allocate(MIB2, 1, Tag(0)).unwrap());
            pool.statistics();
        };
        let pool = Pool::with(&cache(), PoolOptions::default().before_unmap(hook));
        drop(pool.allocate(8 * MIB2, 1, Tag(0)).unwrap());
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.trim())).unwrap_err();
        assert_eq!(pool.statistics().mapped, 8 * MIB2);
        let again = recorded(emulator, || drop(pool.allocate(8 * MIB2, 1, Tag(0)).unwrap()));
        assert!(again.is_empty(), "{again:?}");
        *slot.lock().unwrap() = Some(pool.clone());
        assert_eq!(pool.trim().unwrap(), 8 * MIB2);
        *slot.lock().unwrap() = None;
    });
}

#[test]
fn eight_threads_share_a_pool() {
    on_each_generation(Config { hbm: 2 * GIB, ..plain() }, |_, emulator| {
        let pool = Pool::new(&cache());
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut blocks = Vec::new();
                    for round in 0..300u64 {
                        let number = round * 8 + thread;
                        let size = 1 << (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59).min(23);
                        let block = pool.allocate(size, 1, Tag((number % 3) as u32)).unwrap();
                        if size <= 4096 {
                            block.write(0, &number.to_le_bytes()[..size.min(8) as usize]).unwrap();
                        }
                        blocks.push((block, number, size));
                        if round % 3 != 0 {
                            let (block, number, size) = blocks.swap_remove((number % blocks.len() as u64) as usize);
                            if size <= 4096 {
                                let mut back = vec![0; size.min(8) as usize];
                                block.read(0, &mut back).unwrap();
                                assert_eq!(back, number.to_le_bytes()[..back.len()]);
                            }
                        }
                        if round % 100 == 99 {
                            pool.trim().unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(pool.statistics().blocks, 0);
        pool.trim().unwrap();
        assert_eq!(pool.statistics().mapped, 0);
        assert!(count(emulator, "MEM_MAP") == count(emulator, "MEM_UNMAP"));
        drop(pool);
        assert_nothing_left(emulator);
    });
}

#[test]
fn blocks_that_are_reset_while_they_are_allocated_are_counted_once() {
    isolated(plain(), |_| {
        let pool = Pool::new(&cache());
        let kept = pool.allocate(64, 1, Tag(0)).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    // Each maps memory, and lets other threads run before it returns.
                    for _ in 0..200 {
                        drop(pool.allocate(MIB2, 1, Tag(1)).unwrap());
                        pool.trim().unwrap();
                    }
                    over.store(true, Ordering::Relaxed);
                });
            }
            while !over.load(Ordering::Relaxed) {
                pool.reset(Tag(1)).unwrap();
            }
        });
        pool.reset(Tag(1)).unwrap();
        let now = pool.statistics();
        assert_eq!((now.blocks, now.in_use), (1, kept.size()));
        assert!(now.peak <= GIB, "{now:?}");
    });
}

#[test]
fn a_cache_of_the_host_serves_host_memory() {
    on_each_generation(plain(), |_, _| {
        let host = Session::current().unwrap().host().unwrap();
        let cache = PageCache::new(&host);
        let pool = Pool::new(&cache);
        let block = pool.allocate(100, 1, Tag(0)).unwrap();
        block.write(0, b"on the host").unwrap();
        let mut back = [0; 11];
        block.read(0, &mut back).unwrap();
        assert_eq!(&back, b"on the host");
        assert_eq!(cache.kind().memory, MemoryKind::Ddr);
    });
}

#[test]
fn a_child_of_fork_is_refused_and_drops_without_a_command() {
    on_each_generation(plain(), |_, emulator| {
        let pool = Pool::new(&cache());
        let block = pool.allocate(100, 1, Tag(0)).unwrap();
        let large = pool.allocate(MIB2, 1, Tag(0)).unwrap();
        let mut segment = Segment::new(pool.cache(), GIB).unwrap();
        segment.ensure(MIB2..2 * MIB2).unwrap();
        emulator.record();
        let objects = std::cell::Cell::new(Some((pool, block, large, segment)));
        let child = ascend_emulator::fork(|| {
            let (pool, block, large, mut segment) = objects.take().unwrap();
            support::refused_in_child(&pool.allocate(1, 1, Tag(0)).unwrap_err());
            support::refused_in_child(&pool.free(large.address()).unwrap_err());
            support::refused_in_child(&pool.trim().unwrap_err());
            support::refused_in_child(&pool.reset(Tag(0)).unwrap_err());
            support::refused_in_child(&block.write(0, b"x").unwrap_err());
            // Memory that is missing, no memory, and memory that the parent has.
            for range in [0..MIB2, 0..0, MIB2..2 * MIB2] {
                support::refused_in_child(&segment.ensure(range).unwrap_err());
            }
            support::refused_in_child(&segment.shrink(0..MIB2).unwrap_err());
            support::refused_in_child(&pool.cache().take(MIB2).unwrap_err());
            support::refused_in_child(&pool.cache().trim(0).unwrap_err());
            assert_eq!(pool.statistics(), Default::default());
            assert_eq!(pool.find(large.address()), None);
            large.into_address();
        });
        let pid = child.pid();
        child.join();
        let records = emulator.records();
        let calls = records.iter().filter(|record| record.pid == pid).map(|record| record.cmd.unwrap_or(record.call));
        // In a child, CLOSE is refused or does nothing.
        let calls: Vec<_> = calls.filter(|&call| call != "CLOSE").collect();
        assert!(calls.is_empty(), "{calls:?}");
    });
}

#[test]
fn a_hook_that_resets_its_tag_or_puts_it_to_sleep_loses_no_block_and_no_memory() {
    on_each_generation(plain(), |_, _| {
        let slot: Arc<std::sync::Mutex<Option<(Pool, bool)>>> = Arc::default();
        let inside = slot.clone();
        let hook = move |_: &[std::ops::Range<u64>]| {
            let wish = inside.lock().unwrap().take();
            match wish {
                Some((pool, true)) => pool.reset(Tag(0)).unwrap(),
                // The memory that is about to be unmapped lies between two blocks that stay.
                Some((pool, false)) => assert!(pool.sleep(Tag(0), Keep::Host, |_| ()).unwrap() > 0),
                None => {}
            }
        };
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]).before_unmap(hook));
        let mut blocks: Vec<_> = (0..6).map(|_| pool.allocate(MIB2, 1, Tag(0)).unwrap()).collect();
        blocks.iter().zip(0u8..).for_each(|(block, number)| block.fill(0, MIB2, number).unwrap());
        blocks.drain(2..4);
        *slot.lock().unwrap() = Some((pool.clone(), false));
        pool.trim().unwrap();
        pool.wake(&[Tag(0)], |_| ()).unwrap();
        for (block, number) in blocks.iter().zip([0, 1, 4, 5]) {
            let mut last = [9];
            block.read(MIB2 - 1, &mut last).unwrap();
            assert_eq!(last, [number]);
        }
        *slot.lock().unwrap() = Some((pool.clone(), true));
        pool.trim().unwrap();
        drop(blocks);
        // All mapped memory is free, once.
        let mapped = pool.statistics().mapped;
        let all: Vec<_> = (0..mapped / MIB2).map(|_| pool.allocate(MIB2, 1, Tag(0)).unwrap()).collect();
        let addresses: std::collections::BTreeSet<u64> = all.iter().map(|block| block.address()).collect();
        assert_eq!((addresses.len(), pool.statistics().mapped), (all.len(), mapped));
        all.iter().for_each(|block| block.fill(0, MIB2, 1).unwrap());
        drop(all);
        pool.trim().unwrap();
        assert_eq!(pool.statistics().mapped, 0);
    });
}

#[test]
fn a_step_of_any_size_maps_no_more_than_the_device_has() {
    on_each_generation(Config { hbm: 64 << 20, ..plain() }, |_, _| {
        for step in [0, 1, MIB2 + 1, u64::MAX] {
            let pool = Pool::with(&cache(), PoolOptions::default().step(step));
            drop(pool.allocate(100, 1, Tag(0)).unwrap());
            assert!(pool.statistics().mapped >= MIB2);
        }
    });
}

#[test]
fn addresses_are_reused_and_the_peak_counts_what_was_in_use_at_once() {
    on_each_generation(plain(), |_, _| {
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]));
        drop(pool.allocate(3 * MIB2, 1, Tag(0)).unwrap());
        let mut blocks: Vec<_> = (0..3).map(|_| pool.allocate(MIB2, 1, Tag(0)).unwrap()).collect();
        let (reserved, middle) = (pool.statistics().reserved, blocks.remove(1).address());
        assert_eq!(pool.trim().unwrap(), MIB2);
        assert_eq!(pool.allocate(MIB2, 1, Tag(0)).unwrap().address(), middle);
        assert_eq!(pool.statistics().reserved, reserved);
        drop(blocks);
        for _ in 0..5 {
            pool.free(pool.allocate(2 * MIB2, 1, Tag(0)).unwrap().into_address()).unwrap();
        }
        assert_eq!((pool.statistics().in_use, pool.statistics().peak), (0, 3 * MIB2));
    });
}

#[test]
fn handles_do_not_cross_the_border_of_two_reservations_of_a_segment() {
    isolated(plain(), |_| {
        // 128 GiB is not a multiple of 20 MiB.
        let mut segment = Segment::new(&cache(), 200 * GIB).unwrap();
        let border = 128 * GIB;
        segment.ensure(border - 24 * MIB..border + 24 * MIB).unwrap();
        assert!(segment.pieces().any(|(offset, size)| offset + size == border));
        segment.slice(border - 4, 4).unwrap().write(b"last").unwrap();
        segment.slice(border, 5).unwrap().write(b"first").unwrap();
    });
}

/// What a failed growth must not change: free, cached, mapped and reserved memory.
fn footprint(pool: &Pool) -> (u64, u64, u64, u64, u64) {
    let (cache, statistics) = (pool.cache().statistics(), pool.statistics());
    (free(), cache.cached, cache.handles, statistics.mapped, statistics.reserved)
}

#[test]
fn a_failed_growth_gives_everything_back_and_reports_what_was_asked_and_free() {
    on_each_generation(Config { hbm: 256 * MIB, ..plain() }, |_, _| {
        let peer = start(|channel| {
            channel.wait();
            channel.send(device(0).create(channel.receive()).is_ok().into());
        });
        let pool = Pool::new(&cache());
        let block = pool.allocate(10 * MIB, 1, Tag(1)).unwrap();
        // Memory is free in a tag, and cached in sizes that the growth uses and does not use.
        drop(pool.allocate(6 * MIB, 1, Tag(2)).unwrap());
        let cached = [MIB2, 3 * MIB2, 20 * MIB].map(|size| pool.cache().take(size).unwrap());
        cached.into_iter().for_each(|memory| pool.cache().put(memory));
        let before = footprint(&pool);
        for (size, alignment) in [(100 * GIB, 512), (128 * GIB, GIB), (256 * MIB, 1)] {
            for tag in [Tag(1), Tag(2), Tag(3)] {
                let error = pool.allocate(size, alignment, tag).unwrap_err();
                let Error::OutOfMemory(details) = &error else { panic!("{error}") };
                assert_eq!((details.asked, details.free_huge), (size, Some(before.0)), "{error}");
                assert!(error.to_string().contains(&format!("for a block of {tag}")), "{error}");
                assert_eq!(footprint(&pool), before, "{size} {tag}");
            }
        }
        let mut segment = Segment::new(pool.cache(), 100 * GIB).unwrap();
        segment.ensure(2 * MIB2..3 * MIB2).unwrap();
        segment.slice(2 * MIB2, 4).unwrap().write(b"here").unwrap();
        let before = footprint(&pool);
        let error = segment.ensure(0..100 * GIB).unwrap_err();
        let Error::OutOfMemory(details) = &error else { panic!("{error}") };
        assert_eq!((details.asked, details.free_huge), (100 * GIB - MIB2, Some(before.0)), "{error}");
        assert_eq!((footprint(&pool), segment.mapped()), (before, MIB2));
        assert!(pool.cache().take(100 * GIB).unwrap_err().is_out_of_memory());
        assert_eq!(footprint(&pool), before);
        // Another process can create all the free memory.
        peer.signal();
        peer.send(before.0);
        assert_eq!(peer.receive(), 1);
        drop(block);
    });
}

#[test]
fn memory_that_was_unmapped_in_vain_is_mapped_again() {
    on_each_generation(Config { hbm: 64 * MIB, ..plain() }, |_, _| {
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]));
        // Tag 1 has enough free memory, but some of it is in pages that are in use.
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate(MIB + 4096, 1, Tag(1)).unwrap()).collect();
        drop(pool.allocate(8 * MIB, 1, Tag(1)).unwrap());
        let hog = device(0).create(free()).unwrap();
        let before = footprint(&pool);
        let error = pool.allocate(10 * MIB, 1, Tag(2)).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(footprint(&pool), before);
        // It can be used as before, and moves to another tag where that helps.
        pool.allocate(8 * MIB, 1, Tag(1)).unwrap().fill(0, 8 * MIB, 1).unwrap();
        pool.allocate(8 * MIB, 1, Tag(2)).unwrap().fill(0, 8 * MIB, 2).unwrap();
        drop((blocks, hog));
        pool.trim().unwrap();
        assert_eq!((pool.statistics().mapped, pool.statistics().reserved), (0, 0));
    });
}

#[test]
fn a_large_alignment_takes_no_more_addresses_and_memory_than_the_block() {
    isolated(Config { hbm: 136 * GIB, ..plain() }, |_| {
        let pool = Pool::new(&cache());
        for size in [128 * GIB, 3 * GIB, GIB] {
            let block = pool.allocate(size, GIB, Tag(0)).unwrap();
            assert_eq!(block.address() % GIB, 0);
            let statistics = pool.statistics();
            assert_eq!((statistics.mapped, statistics.reserved), (size, size));
            drop(block);
            pool.trim().unwrap();
            assert_eq!(pool.statistics().reserved, 0);
        }
        // After a block that ends in the middle of a GiB.
        let first = pool.allocate(GIB - MIB, 1, Tag(0)).unwrap();
        let second = pool.allocate(GIB, GIB, Tag(0)).unwrap();
        assert_eq!((second.address() % GIB, pool.statistics().mapped), (0, 2 * GIB));
        drop((first, second));
    });
}

#[test]
fn an_aligned_block_does_not_go_into_an_unaligned_hole_of_its_size() {
    on_each_generation(plain(), |_, _| {
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]));
        // A segment of 64 MiB with a hole of 8 MiB, 2 MiB after a multiple of 8 MiB.
        drop(pool.allocate(64 * MIB, 64 * MIB, Tag(0)).unwrap());
        let mut blocks: Vec<_> = (0..32).map(|_| pool.allocate(MIB2, MIB2, Tag(0)).unwrap()).collect();
        blocks.sort_by_key(|block| block.address());
        let start = blocks[0].address();
        assert_eq!((start % (64 * MIB), pool.statistics().mapped), (0, 64 * MIB));
        drop(blocks.drain(5..9));
        pool.trim().unwrap();
        assert_eq!(pool.statistics().mapped, 56 * MIB);
        let aligned = pool.allocate(8 * MIB, 8 * MIB, Tag(0)).unwrap();
        aligned.fill(0, 8 * MIB, 1).unwrap();
        assert_eq!((aligned.address() % (8 * MIB), pool.statistics().mapped), (0, 64 * MIB));
        assert!(aligned.address() < start || aligned.address() >= start + 64 * MIB);
        // The hole is still there for a block that fits.
        let other = pool.allocate(8 * MIB, MIB2, Tag(0)).unwrap();
        assert_eq!(other.address(), start + 10 * MIB);
    });
}

#[test]
fn a_tag_reserves_addresses_for_what_it_holds_and_trim_returns_them() {
    isolated(plain(), |_| {
        let pool = Pool::new(&cache());
        let tags = 200;
        let mut blocks: Vec<_> = (0..tags).map(|tag| pool.allocate(1, 1, Tag(tag)).unwrap()).collect();
        assert_eq!(pool.statistics().reserved, u64::from(tags) * MIB2);
        for size in (0..100).map(|number| 1 + number * 37_000 % (5 * MIB)) {
            blocks.push(pool.allocate(size, 1, Tag(0)).unwrap());
            let statistics = pool.statistics_of(Tag(0));
            assert!(statistics.reserved <= 2 * statistics.mapped + 6 * MIB, "{statistics:?}");
        }
        let (one, rest) = (blocks.pop().unwrap(), blocks);
        drop(rest);
        pool.trim().unwrap();
        let statistics = pool.statistics();
        assert!(statistics.reserved > 0 && statistics == pool_of(&pool, Tag(0)), "{statistics:?}");
        drop(one);
        pool.trim().unwrap();
        assert_eq!((pool.statistics().mapped, pool.statistics().reserved), (0, 0));
    });
}

/// The statistics of a pool in which only one tag has memory.
fn pool_of(pool: &Pool, tag: Tag) -> ascend_vmm::pool::Statistics {
    let mut statistics = pool.statistics_of(tag);
    statistics.peak = pool.statistics().peak;
    statistics
}

#[test]
fn memory_does_not_run_out_while_a_free_block_fits() {
    on_each_generation(Config { hbm: 64 * MIB, ..plain() }, |_, _| {
        let everything = |left: u64| device(0).create(free() - left).unwrap();
        // The new page joins the free memory before it, and no second page is mapped.
        let pool = Pool::new(&cache());
        let first = pool.allocate(MIB2 - (256 << 10), 1, Tag(0)).unwrap();
        let hog = everything(MIB2);
        let second = pool.allocate(MIB2, MIB2, Tag(0)).unwrap();
        assert_eq!(pool.statistics().mapped, 2 * MIB2);
        // The rest fits small blocks, even where it is too small for a run of them.
        assert_eq!(free(), 0);
        let rest: Vec<_> = (0..3).map(|_| pool.allocate(64 << 10, 1, Tag(0)).unwrap()).collect();
        let most = pool.allocate(60 << 10, 1, Tag(0)).unwrap();
        let last = pool.allocate(100, 64, Tag(0)).unwrap();
        last.fill(0, last.size(), 1).unwrap();
        assert_eq!(pool.find(last.address()), Some((4096, Tag(0))));
        assert_eq!(pool.statistics().in_use, 2 * MIB2);
        assert!(pool.allocate(1, 1, Tag(0)).unwrap_err().is_out_of_memory());
        drop((last, most, rest, second, first, hog));
        assert_eq!((pool.statistics().in_use, pool.statistics().blocks), (0, 0));
        pool.trim().unwrap();
        // Free memory before a hole, the hole, and free memory after it.
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]));
        drop(pool.allocate(3 * MIB2, MIB2, Tag(0)).unwrap());
        let blocks: Vec<_> = (0..6).map(|_| pool.allocate(MIB, MIB, Tag(0)).unwrap()).collect();
        let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        blocks.sort_by_key(|block| block.as_ref().map(|block| block.address()));
        let start = blocks[0].as_ref().unwrap().address();
        (1..5).for_each(|number| drop(blocks[number].take()));
        assert_eq!(pool.trim().unwrap(), MIB2);
        let hog = everything(MIB2);
        let joined = pool.allocate(4 * MIB, 1, Tag(0)).unwrap();
        joined.fill(0, 4 * MIB, 1).unwrap();
        assert_eq!((joined.address(), free()), (start + MIB, 0));
        drop((joined, hog));
    });
}

#[test]
fn a_block_in_addresses_that_another_tag_had_is_found_and_freed() {
    on_each_generation(plain(), |_, _| {
        let pool = Pool::with(&cache(), PoolOptions::default().handles(&[MIB2]));
        // Several segments of one tag, side by side.
        let blocks: Vec<_> = (0..8).map(|_| pool.allocate(64 * MIB, 1, Tag(1)).unwrap()).collect();
        let old: Vec<u64> = blocks.iter().map(|block| block.address()).collect();
        drop(blocks);
        pool.trim().unwrap();
        assert!(old.iter().all(|&address| pool.find(address).is_none()));
        // A fixed address makes the session join the addresses that it keeps aside. The range
        // before it is then the smallest free range.
        let fixed = ReserveOptions::default().address(ReserveOptions::ADDRESSES.start + 32 * GIB);
        drop(Session::current().unwrap().reserve_with(MIB2, &fixed).unwrap());
        // One segment of another tag takes their place.
        drop(pool.allocate(512 * MIB, 1, Tag(2)).unwrap());
        let mut taken = 0;
        for _ in 0..8 {
            let address = pool.allocate(64 * MIB, 1, Tag(2)).unwrap().into_address();
            taken += usize::from(old.contains(&address));
            assert_eq!(pool.find(address), Some((64 * MIB, Tag(2))));
        }
        assert_eq!((taken, pool.statistics_of(Tag(2)).mapped), (8, 512 * MIB));
        old.iter().for_each(|&address| pool.free(address).unwrap());
        assert_eq!(pool.statistics().blocks, 0);
    });
}
