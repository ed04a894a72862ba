//! Copies of blocks that run while the block is freed or its tag is reset or put to sleep, on an
//! emulated driver that runs commands in parallel.

use crate::support::{MIB, MIB2, device, inject, plain, refused_here};
use crate::{free, pool};
use ascend_emulator::{Config, isolated, on_each_generation};
use ascend_vmm::pool::{Block, Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::{Error, Session};

const WEIGHTS: Tag = Tag(1);
const CACHE: Tag = Tag(2);

#[track_caller]
fn assert_has(block: &Block, bytes: &[u8]) {
    let mut back = vec![0; bytes.len()];
    block.read(0, &mut back).unwrap();
    assert!(back == bytes, "{block:?}");
}

#[test]
fn a_running_write_prevents_sleep_and_reset_and_is_complete() {
    on_each_generation(plain(), |_, emulator| {
        let pool = pool();
        let block = pool.allocate(4 * MIB, 1, WEIGHTS).unwrap();
        let bytes = vec![7; 4 * MIB as usize];
        for moved in [0, 2 * MIB, u64::MAX] {
            block.fill(0, 4 * MIB, 0).unwrap();
            let hold = emulator.hold_after("MEMCPY", moved);
            std::thread::scope(|scope| {
                let write = scope.spawn(|| block.write(0, &bytes).unwrap());
                hold.wait();
                let error = pool.sleep(WEIGHTS, Keep::Host, |_| panic!("nothing is copied")).unwrap_err();
                refused_here(&error, "1 slice(s) or copies");
                refused_here(&pool.reset(WEIGHTS).unwrap_err(), "1 slice(s) or copies");
                assert!(!write.is_finished());
                hold.release();
            });
            assert_has(&block, &bytes);
            pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
            pool.wake(&[WEIGHTS], |_| ()).unwrap();
            assert_has(&block, &bytes);
        }
    });
}

#[test]
fn a_tag_takes_no_write_while_it_falls_asleep_or_wakes() {
    on_each_generation(plain(), |_, emulator| {
        let pool = pool();
        let session = Session::current().unwrap();
        let block = pool.allocate(4 * MIB, 1, WEIGHTS).unwrap();
        let bytes = vec![7; 4 * MIB as usize];
        block.write(0, &bytes).unwrap();
        let refused = || {
            refused_here(&block.write(0, b"late").unwrap_err(), "falling asleep or waking");
            refused_here(&session.slice_at(block.address(), 4).unwrap_err(), "is mapped");
            refused_here(&pool.reset(WEIGHTS).unwrap_err(), "falling asleep or waking");
        };
        let sleep = || {
            pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        };
        let wake = || pool.wake(&[WEIGHTS], |_| ()).unwrap();
        // Refused while one of its commands has moved this many bytes.
        let refused_during = |change: &(dyn Fn() + Sync), command: &str, moved: u64| {
            let hold = emulator.hold_after(command, moved);
            std::thread::scope(|scope| {
                scope.spawn(change);
                hold.wait();
                refused();
                hold.release();
            });
        };
        for (command, moved) in [("MEMCPY", 2 * MIB), ("MEMCPY", u64::MAX), ("MEM_UNMAP", 0)] {
            refused_during(&sleep, command, moved);
            wake();
        }
        for (command, moved) in [("MEM_MAP", 0), ("MEMCPY", 2 * MIB), ("MEMCPY", u64::MAX)] {
            sleep();
            refused_during(&wake, command, moved);
        }
        assert_has(&block, &bytes);
    });
}

#[test]
fn a_tag_with_slices_or_copies_is_not_reset() {
    on_each_generation(plain(), |_, emulator| {
        let pool = pool();
        let block = pool.allocate(64 << 10, 1, WEIGHTS).unwrap();
        block.write(0, b"mine").unwrap();
        let slice = block.slice(0, 4).unwrap();
        refused_here(&pool.reset(WEIGHTS).unwrap_err(), "cannot reset a tag of a pool");
        slice.write(b"here").unwrap();
        assert_eq!(pool.find(block.address()), Some((64 << 10, WEIGHTS)));
        let hold = emulator.hold("ASYNC_MEMCPY");
        let pending = slice.write_async(b"more".to_vec()).unwrap();
        drop(slice);
        let reset = pool.reset(WEIGHTS);
        hold.release();
        refused_here(&reset.unwrap_err(), "1 slice(s) or copies");
        pending.wait().unwrap();
        assert_has(&block, b"more");
        pool.reset(WEIGHTS).unwrap();
        refused_here(&block.slice(0, 4).unwrap_err(), "freed by a reset");
        assert_eq!(pool.statistics().blocks, 0);
    });
}

#[test]
fn a_block_freed_during_a_copy_becomes_free_when_the_copy_ends() {
    on_each_generation(plain(), |_, emulator| {
        let pool = pool();
        // A small block, one of pages and one of whole handles, freed by handle or by address.
        for (size, by_address) in [100, 64 << 10, 2 * MIB2].into_iter().flat_map(|size| [(size, false), (size, true)]) {
            let block = pool.allocate(size, 1, WEIGHTS).unwrap();
            let address = block.address();
            let hold = emulator.hold("ASYNC_MEMCPY");
            let pending = block.slice(0, 8).unwrap().write_async(b"too late".to_vec()).unwrap();
            // Another copy, which ends at once.
            block.slice(0, 0).unwrap().write_async(Vec::new()).unwrap().wait().unwrap();
            let freed = match by_address {
                true => pool.free(block.into_address()),
                false => {
                    drop(block);
                    Ok(())
                }
            };
            let (found, again, statistics) = (pool.find(address), pool.free(address), pool.statistics());
            let other = pool.allocate(size, 1, WEIGHTS).unwrap();
            other.write(0, b"mine").unwrap();
            // An assertion that fails before this would wait for the copy without end.
            hold.release();
            pending.wait().unwrap();
            freed.unwrap();
            assert_eq!(found, None);
            refused_here(&again.unwrap_err(), "no block of this pool begins");
            assert_eq!((statistics.blocks, statistics.in_use > 0), (1, true));
            assert_ne!(other.address(), address);
            assert_has(&other, b"mine");
            drop(other);
            assert_eq!((pool.statistics().blocks, pool.statistics().in_use), (0, 0));
            refused_here(&pool.free(address).unwrap_err(), "no block of this pool begins");
        }
        assert!(pool.trim().unwrap() > 0);
        assert_eq!(pool.statistics().mapped, 0);
    });
}

#[test]
fn both_blocks_of_a_running_copy_are_kept_and_a_part_of_a_slice_keeps_its_block() {
    isolated(plain(), |emulator| {
        let session = Session::current().unwrap();
        let (pool, host) = (pool(), Pool::new(&PageCache::new(&session.host().unwrap())));
        let (to, from) = (pool.allocate(MIB, 1, WEIGHTS).unwrap(), host.allocate(MIB, 1, WEIGHTS).unwrap());
        from.write(0, b"kept").unwrap();
        let hold = emulator.hold("ASYNC_MEMCPY");
        let pending = {
            let (to, from) = (to.slice(0, MIB).unwrap(), from.slice(0, MIB).unwrap());
            to.part(0, 4).unwrap().copy_from_async(&from.part(0, 4).unwrap()).unwrap()
        };
        let (first, second) = (to.address(), from.address());
        drop((to, from));
        let others = (pool.allocate(MIB, 1, WEIGHTS).unwrap(), host.allocate(MIB, 1, WEIGHTS).unwrap());
        hold.release();
        pending.wait().unwrap();
        assert!(others.0.address() != first && others.1.address() != second, "{others:?}");
        drop(others);
        assert_eq!((pool.statistics().blocks, host.statistics().blocks), (0, 0));
    });
}

#[test]
fn a_block_of_a_copy_whose_end_is_unknown_is_never_reused() {
    on_each_generation(plain(), |_, emulator| {
        let pool = pool();
        let block = pool.allocate(64 << 10, 1, WEIGHTS).unwrap();
        let address = block.address();
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=ETIMEDOUT");
        let pending = block.slice(0, 4).unwrap().write_async(b"late".to_vec()).unwrap();
        assert!(pending.wait().unwrap_err().object.is_none());
        drop(block);
        refused_here(&pool.reset(WEIGHTS).unwrap_err(), "may still run");
        let others: Vec<Block> = (0..64).map(|_| pool.allocate(64 << 10, 1, WEIGHTS).unwrap()).collect();
        assert!(others.iter().all(|other| other.address() != address));
        // It blocks nothing else: the session closes, and the kernel unmaps the busy memory.
        let session = Session::current().unwrap();
        drop((others, pool));
        let failed = session.close().unwrap_err();
        assert!(failed.object.is_none() && failed.error.to_string().contains("cleans up by itself"), "{failed}");
    });
}

#[test]
fn a_pool_dropped_during_a_copy_leaves_nothing_when_the_copy_ends() {
    isolated(plain(), |emulator| {
        let before = free();
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        let hold = emulator.hold("ASYNC_MEMCPY");
        let pending = block.slice(0, 4).unwrap().write_async(b"last".to_vec()).unwrap();
        drop((block, pool));
        hold.release();
        pending.wait().unwrap();
        assert_eq!(free(), before);
    });
}

#[test]
fn out_of_memory_is_reported_even_if_something_else_cannot_be_unmapped() {
    on_each_generation(Config { hbm: 256 * MIB, ..plain() }, |_, _| {
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().handles(&[MIB2]));
        let _weights = pool.allocate(40 * MIB, 1, WEIGHTS).unwrap();
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        // Free memory of another tag that is still used by its address.
        let other = pool.allocate(4 * MIB, 1, CACHE).unwrap();
        let slice = Session::current().unwrap().slice_at(other.address(), 4 * MIB).unwrap();
        drop(other);
        let rest = device(0).create(free()).unwrap();
        for error in [pool.wake(&[WEIGHTS], |_| ()).unwrap_err(), pool.allocate(40 * MIB, 1, Tag(3)).unwrap_err()] {
            assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        }
        // Trim reports that use.
        assert!(matches!(pool.trim().unwrap_err(), Error::InUse { .. }));
        drop((slice, rest));
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
    });
}
