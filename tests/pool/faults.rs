//! Every command of growing, shrinking, sleeping and waking is refused once, and memory runs out at
//! every step: nothing is lost or leaked, and the same call works afterwards.

use crate::support::random::Random;
use crate::support::{Directory, MIB, MIB2, count, device, inject, plain, refused_here};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::error::Errno;
use ascend_vmm::pool::{Block, Keep, PageCache, Pool, PoolOptions, Segment, SegmentOptions, Tag};
use ascend_vmm::{Device, LogicalId, MemoryKind, Result, Session};

/// The commands of an action, each with its number among commands of the same name.
fn positions(emulator: &Emulator, action: impl FnOnce()) -> Vec<(&'static str, usize)> {
    emulator.record();
    let before = emulator.records().len();
    action();
    let mut names: Vec<&'static str> = Vec::new();
    let records = emulator.records();
    let named = records[before..].iter().filter_map(|record| record.cmd).filter(|name| !name.is_empty());
    named
        .map(|name| {
            names.push(name);
            (name, names.iter().filter(|&&other| other == name).count())
        })
        .collect()
}

/// The errnos that the kernel may return.
fn errnos(name: &str) -> &'static [&'static str] {
    match name {
        "MEM_CREATE" => &["ENOMEM", "EBUSY"],
        "MEM_UNMAP" | "MEM_RELEASE" | "FREE_PAGES" => &["EBUSY"],
        "MEMCPY" | "ASYNC_MEMCPY" | "MEMSET8" => &["EFAULT"],
        // The kernel then keeps the memory busy: another test covers that.
        "MEMCPY_RESULT_REFRESH" => &[],
        _ => &["EINVAL"],
    }
}

/// Refuses each command of an action in turn. `state` must be the same before and after a failed
/// action. `undo` prepares for the next one.
fn refuse_each<S: PartialEq + std::fmt::Debug>(
    emulator: &Emulator,
    state: impl Fn() -> S,
    action: impl Fn() -> Result<()>,
    undo: impl Fn(),
) {
    let all = positions(emulator, || action().unwrap());
    undo();
    assert!(!all.is_empty());
    for (name, nth) in all {
        for errno in errnos(name) {
            let before = state();
            inject(emulator, &format!("{name}#{nth}={errno}"));
            match action() {
                Ok(()) => undo(),
                Err(error) => {
                    let reported = error.errno().map(|errno| format!("{errno:?}"));
                    assert_eq!(reported.as_deref(), Some(*errno), "{name}#{nth}: {error}");
                    assert_eq!(state(), before, "{name}#{nth}={errno}: {error}");
                }
            }
            action().unwrap_or_else(|error| panic!("after {name}#{nth}={errno}: {error}"));
            undo();
        }
    }
}

/// The sum of free, cached and mapped memory. If it shrinks, memory is lost.
fn accounted(device: &Device, cache: &PageCache, mapped: u64) -> u64 {
    device.memory_info(MemoryKind::Hbm).unwrap().huge_free + cache.statistics().cached + mapped
}

#[test]
fn a_segment_is_unchanged_when_any_command_of_growing_or_shrinking_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let options = SegmentOptions::default().handles(&[MIB2, 2 * MIB2]);
        let segment = std::cell::RefCell::new(Segment::with(&cache, 64 * MIB, options).unwrap());
        segment.borrow_mut().ensure(4 * MIB2..6 * MIB2).unwrap();
        segment.borrow().slice(4 * MIB2, 4).unwrap().write(b"here").unwrap();
        let total = accounted(&device, &cache, 2 * MIB2);
        let state = || {
            let segment = segment.borrow();
            let mut text = [0; 4];
            segment.slice(4 * MIB2, 4).unwrap().read(&mut text).unwrap();
            assert_eq!(&text, b"here");
            assert_eq!(accounted(&device, &cache, segment.mapped()), total);
            segment.pieces().collect::<Vec<_>>()
        };
        let grow = || segment.borrow_mut().ensure(MIB2..11 * MIB2);
        let shrink = || {
            segment.borrow_mut().shrink(0..4 * MIB2)?;
            segment.borrow_mut().shrink(6 * MIB2..32 * MIB2).map(drop)
        };
        let clean = || {
            shrink().unwrap();
            cache.trim(0).unwrap();
        };
        refuse_each(emulator, state, grow, clean);
        let one = || segment.borrow_mut().shrink(6 * MIB2..32 * MIB2).map(drop);
        grow().unwrap();
        refuse_each(emulator, state, one, || grow().unwrap());
    });
}

#[test]
fn a_mapping_that_cannot_be_undone_stays_and_the_next_call_uses_it() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let options = SegmentOptions::default().handles(&[MIB2]);
        let mut segment = Segment::with(&cache, 64 * MIB, options).unwrap();
        let total = accounted(&device, &cache, 0);
        // The third mapping is refused, and the second cannot be undone.
        inject(emulator, "MEM_MAP#3=ENOMEM");
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        let error = segment.ensure(0..4 * MIB2).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENOMEM), "{error}");
        assert_eq!(segment.pieces().collect::<Vec<_>>(), [(MIB2, MIB2)]);
        assert_eq!((segment.mapped(), accounted(&device, &cache, MIB2)), (MIB2, total));
        segment.slice(MIB2, 4).unwrap().write(b"here").unwrap();
        emulator.record();
        segment.ensure(0..4 * MIB2).unwrap();
        assert_eq!(count(emulator, "MEM_MAP"), 3);
        assert_eq!(segment.mapped(), 4 * MIB2);
        let mut text = [0; 4];
        segment.slice(MIB2, 4).unwrap().read(&mut text).unwrap();
        assert_eq!(&text, b"here");
        // A refused shrink unmaps nothing.
        inject(emulator, "MEM_UNMAP#2=EBUSY");
        segment.shrink(0..4 * MIB2).unwrap_err();
        assert_eq!(segment.mapped(), 4 * MIB2);
        assert_eq!(segment.shrink(0..4 * MIB2).unwrap(), 4 * MIB2);
        assert_eq!(accounted(&device, &cache, 0), total);
    });
}

#[test]
fn a_handle_that_a_dropped_segment_cannot_unmap_is_unmapped_later() {
    isolated(plain(), |emulator| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let mut segment = Segment::new(&cache, 64 * MIB).unwrap();
        segment.ensure(0..MIB2).unwrap();
        for nth in 1..=2 {
            inject(emulator, &format!("MEM_UNMAP#{nth}=EBUSY"));
        }
        drop(segment);
        assert!(device.session().statistics().left > 0);
        device.session().device(LogicalId(1)).unwrap().close().unwrap();
        assert_eq!(device.session().statistics().left, 0);
    });
}

fn write(block: &Block, number: u64) {
    block.write(0, &number.to_le_bytes()).unwrap();
    block.write(block.size() - 8, &number.to_le_bytes()).unwrap();
}

#[track_caller]
fn check(block: &Block, number: u64) {
    for at in [0, block.size() - 8] {
        let mut back = [0; 8];
        block.read(at, &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), number, "{block:?}");
    }
}

#[test]
fn a_pool_is_unchanged_when_any_command_of_growing_or_trimming_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2, 2 * MIB2]));
        let kept = pool.allocate(MIB2 / 2, 1, Tag(0)).unwrap();
        write(&kept, 7);
        let total = accounted(&device, &cache, pool.statistics().mapped);
        let blocks = std::cell::RefCell::new(Vec::new());
        let state = || {
            check(&kept, 7);
            let statistics = pool.statistics();
            assert_eq!(accounted(&device, &cache, statistics.mapped), total);
            (statistics.mapped, statistics.in_use, statistics.blocks)
        };
        let grow = || {
            for (size, tag) in [(5 * MIB2, Tag(0)), (100, Tag(1)), (3 * MIB2, Tag(1))] {
                match pool.allocate(size, 1, tag) {
                    Ok(block) => blocks.borrow_mut().push(block),
                    Err(error) => {
                        blocks.borrow_mut().clear();
                        pool.trim().unwrap();
                        return Err(error);
                    }
                }
            }
            Ok(())
        };
        let clean = || {
            blocks.borrow_mut().clear();
            pool.trim().unwrap();
        };
        refuse_each(emulator, state, grow, clean);
        // Trim goes as far as it can, and a later one does the rest.
        let trims = {
            grow().unwrap();
            blocks.borrow_mut().clear();
            positions(emulator, || assert!(pool.trim().unwrap() > 0))
        };
        for (name, nth) in trims {
            grow().unwrap();
            blocks.borrow_mut().clear();
            inject(emulator, &format!("{name}#{nth}={}", errnos(name)[0]));
            let _ = pool.trim();
            check(&kept, 7);
            grow().unwrap();
            blocks.borrow_mut().clear();
            pool.trim().unwrap();
            assert_eq!(pool.statistics().mapped, MIB2);
        }
    });
}

#[test]
fn a_tag_is_unchanged_when_any_command_of_sleeping_or_waking_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let device = device(0);
        let cache = PageCache::new(&device);
        let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2]));
        let (one, two) = (Tag(1), Tag(2));
        let blocks: Vec<Block> =
            [(100, one), (MIB2, one), (70_000, two)].map(|(size, tag)| pool.allocate(size, 1, tag).unwrap()).into();
        blocks.iter().enumerate().for_each(|(number, block)| write(block, number as u64));
        let total = accounted(&device, &cache, pool.statistics().mapped);
        let free = || device.memory_info(MemoryKind::Hbm).unwrap().huge_free;
        for keep in [Keep::Host, Keep::Pinned, Keep::File(directory.join("kept"))] {
            let wake = || pool.wake(&[one, two], |_| ());
            let awake = || {
                assert_eq!(accounted(&device, &cache, pool.statistics().mapped), total);
                blocks.iter().enumerate().for_each(|(number, block)| check(block, number as u64));
                assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
                pool.statistics()
            };
            let sleep = || pool.sleep(one, keep.clone(), |_| ()).map(drop);
            refuse_each(emulator, awake, sleep, || wake().unwrap());
            awake();
            let both = || {
                sleep().unwrap();
                pool.sleep(two, Keep::Host, |_| ()).unwrap();
            };
            both();
            // A refused release is tried again when the device is closed.
            refuse_each(emulator, || (pool.statistics(), free()), wake, both);
            wake().unwrap();
            awake();
        }
    });
}

#[test]
fn memory_runs_out_at_every_step_of_growing_and_waking_and_nothing_is_lost() {
    isolated(Config { hbm: 64 * MIB, ..plain() }, |_| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2]));
        let blocks: Vec<Block> = (0..4).map(|tag| pool.allocate(3 * MIB2, 1, Tag(tag)).unwrap()).collect();
        blocks.iter().enumerate().for_each(|(number, block)| write(block, number as u64));
        let tags = [Tag(0), Tag(1), Tag(2), Tag(3)];
        let free = || device.memory_info(MemoryKind::Hbm).unwrap().huge_free;
        for left in 0..12 {
            for tag in tags {
                pool.sleep(tag, Keep::Host, |_| ()).unwrap();
            }
            let hog = device.create(free() - left * MIB2).unwrap();
            let error = pool.wake(&tags, |_| ()).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert_eq!(free(), left * MIB2, "{error}");
            let error = pool.allocate((left + 1) * MIB2, 1, Tag(9)).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert_eq!(free() + cache.statistics().cached, left * MIB2);
            drop(hog);
            pool.wake(&tags, |_| ()).unwrap();
            blocks.iter().enumerate().for_each(|(number, block)| check(block, number as u64));
        }
    });
}

#[test]
fn a_copy_whose_end_is_unknown_keeps_its_tag_awake_with_its_contents() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let pool = Pool::new(&PageCache::new(&device(0)));
        let block = pool.allocate(MIB2, 1, Tag(1)).unwrap();
        write(&block, 1);
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=ETIMEDOUT");
        let file = || Keep::File(directory.join("kept"));
        let error = pool.sleep(Tag(1), file(), |_| ()).unwrap_err();
        assert!(error.to_string().contains("ETIMEDOUT"), "{error}");
        // From now on the kernel refuses to unmap it, until the session is closed.
        let error = pool.sleep(Tag(1), file(), |_| ()).unwrap_err();
        assert!(error.to_string().contains("EBUSY"), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        check(&block, 1);
    });
}

#[test]
fn memory_is_mapped_again_at_the_second_try_if_the_first_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().handles(&[MIB2]));
        let block = pool.allocate(3 * MIB2, 1, Tag(1)).unwrap();
        block.fill(0, 3 * MIB2, 7).unwrap();
        let is_whole = || {
            let mut back = vec![0; 3 * MIB2 as usize];
            block.read(0, &mut back).unwrap();
            assert!(back.iter().all(|&byte| byte == 7));
        };
        // The second is not unmapped, and the first is not mapped again at first.
        inject(emulator, "MEM_UNMAP#2=EBUSY");
        inject(emulator, "MEM_MAP#1=ENOMEM");
        let error = pool.sleep(Tag(1), Keep::Nothing, |_| ()).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EBUSY), "{error}");
        is_whole();
        assert_eq!(pool.sleep(Tag(1), Keep::Host, |_| ()).unwrap(), 3 * MIB2);
        pool.wake(&[Tag(1)], |_| ()).unwrap();
        is_whole();
    });
}

#[test]
fn a_tag_that_can_be_neither_unmapped_nor_mapped_again_sleeps_with_its_contents() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let device = device(0);
        let cache = PageCache::new(&device);
        let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2]));
        let blocks: Vec<Block> = (0..4).map(|_| pool.allocate(MIB2, MIB2, Tag(1)).unwrap()).collect();
        let total = accounted(&device, &cache, pool.statistics().mapped);
        let session = Session::current().unwrap();
        // With the number of mappings and files that each backup needs.
        let file = Keep::File(directory.join("kept"));
        for (keep, maps, files) in [(Keep::Host, 0, 0), (Keep::Pinned, 4, 0), (file, 0, 1)] {
            blocks.iter().enumerate().for_each(|(number, block)| write(block, number as u64));
            inject(emulator, "MEM_UNMAP#3=EBUSY");
            // More often than the library tries.
            (1..=20).for_each(|nth| inject(emulator, &format!("MEM_MAP#{}=ENOMEM", maps + nth)));
            let error = pool.sleep(Tag(1), keep.clone(), |_| ()).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("EBUSY") && text.contains("so tag 1 is asleep"), "{text}");
            assert_eq!(accounted(&device, &cache, pool.statistics().mapped), total, "{keep:?}");
            // None of it can be used.
            for block in &blocks {
                refused_here(&block.read(0, &mut [0]).unwrap_err(), "tag 1 is asleep");
                assert!(session.slice_at(block.address(), 1).is_err());
            }
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), files);
            // It wakes when the kernel maps memory again.
            let woken = (0..40).find(|_| pool.wake(&[Tag(1)], |_| ()).is_ok());
            assert!(woken.is_some_and(|refused| refused > 0), "{woken:?}");
            blocks.iter().enumerate().for_each(|(number, block)| check(block, number as u64));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
            assert_eq!(accounted(&device, &cache, pool.statistics().mapped), total, "{keep:?}");
        }
    });
}

#[test]
fn free_memory_that_can_be_neither_unmapped_nor_mapped_again_is_not_handed_out() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let cache = PageCache::new(&device);
        let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2]));
        let allocate = || -> Vec<Block> { (0..4).map(|_| pool.allocate(MIB2, MIB2, Tag(1)).unwrap()).collect() };
        // All blocks are in one segment.
        drop(pool.allocate(4 * MIB2, MIB2, Tag(1)).unwrap());
        let total = accounted(&device, &cache, pool.statistics().mapped);
        inject(emulator, "MEM_UNMAP#3=EBUSY");
        (1..=4).for_each(|nth| inject(emulator, &format!("MEM_MAP#{nth}=ENOMEM")));
        let error = pool.trim().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EBUSY), "{error}");
        assert_eq!(pool.statistics().mapped, 2 * MIB2);
        assert_eq!(accounted(&device, &cache, 2 * MIB2), total);
        let blocks = allocate();
        blocks.iter().enumerate().for_each(|(number, block)| write(block, number as u64));
        blocks.iter().enumerate().for_each(|(number, block)| check(block, number as u64));
        drop(blocks);
        pool.trim().unwrap();
        assert_eq!(accounted(&device, &cache, 0), total);
    });
}

/// The expected contents of a pool.
struct Model {
    blocks: Vec<(Block, u64)>,
    asleep: [bool; 3],
}

#[test]
fn random_operations_agree_with_a_model() {
    on_each_generation(Config { hbm: 256 * MIB, ..plain() }, |_, emulator| {
        for seed in 0..4 {
            let directory = Directory::new();
            let mut random = Random(seed);
            let fault = ["MEM_CREATE", "MEM_MAP", "MEM_UNMAP", "MEMCPY"][seed as usize];
            let cache = PageCache::new(&device(0));
            let pool = Pool::with(&cache, PoolOptions::default().handles(&[MIB2, 10 * MIB2]));
            let mut model = Model { blocks: Vec::new(), asleep: [false; 3] };
            for step in 0..400u64 {
                let tag = random.below(3) as usize;
                // Occasional faults: whatever they hit, the model stays right. Each seed has one
                // command: nothing helps if a rollback is refused too.
                if random.below(6) == 0 {
                    inject(emulator, &format!("{fault}#{}={}", 1 + random.below(3), errnos(fault)[0]));
                }
                match random.below(10) {
                    0..5 => {
                        let magnitude = 4 + random.below(20);
                        let size = 1 + random.below(1 << magnitude);
                        match pool.allocate(size, 1 << random.below(22), Tag(tag as u32)) {
                            Ok(block) => {
                                assert!(!model.asleep[tag]);
                                let end = block.address() + block.size();
                                let free = |(other, _): &(Block, u64)| {
                                    end <= other.address() || other.address() + other.size() <= block.address()
                                };
                                assert!(model.blocks.iter().all(free), "seed {seed}, step {step}: {block:?} overlaps");
                                if block.write(0, &step.to_le_bytes()).is_ok() {
                                    model.blocks.push((block, step));
                                }
                            }
                            Err(error) => assert!(model.asleep[tag] || error.errno().is_some(), "{error}"),
                        }
                    }
                    5 | 6 if !model.blocks.is_empty() => {
                        let (block, _) = model.blocks.swap_remove(random.below(model.blocks.len() as u64) as usize);
                        match random.below(2) {
                            0 => drop(block),
                            _ => pool.free(block.into_address()).unwrap(),
                        }
                    }
                    7 => {
                        let keep = match random.below(3) {
                            0 => Keep::Host,
                            1 => Keep::Pinned,
                            _ => Keep::File(directory.join(&format!("{step}"))),
                        };
                        if pool.sleep(Tag(tag as u32), keep, |_| ()).is_ok() {
                            model.asleep[tag] = true;
                        }
                    }
                    8 => {
                        if pool.wake(&[Tag(tag as u32)], |_| ()).is_ok() {
                            model.asleep[tag] = false;
                        }
                    }
                    _ => drop(pool.trim()),
                }
                let statistics = pool.statistics();
                assert_eq!(statistics.blocks, model.blocks.len() as u64, "seed {seed}, step {step}");
                assert!(statistics.in_use <= statistics.mapped + statistics.asleep, "seed {seed}, step {step}");
            }
            // Unused faults must not hit what follows.
            use_up_faults();
            pool.wake(&[Tag(0), Tag(1), Tag(2)], |_| ()).unwrap();
            for (block, step) in &model.blocks {
                let mut back = [0; 8];
                block.read(0, &mut back).unwrap();
                assert_eq!(u64::from_le_bytes(back), *step, "seed {seed}: {block:?}");
            }
            model.blocks.clear();
            pool.trim().unwrap();
            assert_eq!(pool.statistics().mapped, 0);
        }
    });
}

/// Sends commands until none is refused any more.
fn use_up_faults() {
    let session = Session::current().unwrap();
    for _ in 0..4 {
        let Ok(memory) = device(0).create(MIB2) else { continue };
        let reservation = session.reserve(MIB2).unwrap();
        let Ok(mapping) = reservation.map(0, &memory) else { continue };
        let _ = mapping.write(0, b"x");
        let _ = mapping.unmap();
    }
}
