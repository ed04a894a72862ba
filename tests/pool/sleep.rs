//! Tags that sleep and wake, and files that are loaded and stored.

use crate::support::processes::start;
use crate::support::{
    self, Directory, GIB, MIB, MIB2, assert_nothing_left, count, device, inject, plain, refused_here,
};
use crate::{free, pool};
use ascend_emulator::{Config, Emulator, fork, isolated, on_each_generation};
use ascend_vmm::pool::{self, BackupFile, Block, Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::{Error, Session};
use nix::libc;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

const WEIGHTS: Tag = Tag(1);
const CACHE: Tag = Tag(2);

/// Blocks of many sizes, each with its own contents.
fn blocks(pool: &Pool, tag: Tag) -> Vec<Block> {
    let sizes = [64, 100, 5000, 40_000, MIB2, 3 * MIB2 + 4096, 20 * MIB];
    let blocks: Vec<Block> = sizes.iter().map(|&size| pool.allocate(size, 1, tag).unwrap()).collect();
    blocks.iter().enumerate().for_each(|(number, block)| write(block, number));
    blocks
}

fn write(block: &Block, number: usize) {
    for at in [0, block.size() / 2, block.size() - 8] {
        block.write(at, &(number as u64 ^ block.address() ^ at).to_le_bytes()).unwrap();
    }
}

#[track_caller]
fn check(block: &Block, number: usize) {
    for at in [0, block.size() / 2, block.size() - 8] {
        let mut back = [0; 8];
        block.read(at, &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), number as u64 ^ block.address() ^ at, "{block:?} at {at:#x}");
    }
}

fn all_kinds(directory: &Directory) -> [Keep; 3] {
    [Keep::Host, Keep::Pinned, Keep::File(directory.join("kept"))]
}

#[test]
fn a_tag_that_sleeps_has_no_memory_and_wakes_at_the_same_addresses_with_its_contents() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let pool = pool();
        let before = free();
        let (weights, other) = (blocks(&pool, WEIGHTS), blocks(&pool, CACHE));
        let freed = pool.allocate(10 * MIB, 1, WEIGHTS).unwrap();
        drop(freed);
        for keep in all_kinds(&directory) {
            let mapped = pool.statistics_of(WEIGHTS).mapped;
            let awake = free();
            let (mut last, mut calls) = (0, 0);
            let released = pool.sleep(WEIGHTS, keep.clone(), |progress| {
                assert!(progress.done > last && progress.done <= progress.total, "{progress:?}");
                (last, calls) = (progress.done, calls + 1);
            });
            assert_eq!(released.unwrap(), mapped, "{keep:?}");
            assert_eq!(free(), awake + mapped, "{keep:?}");
            assert!(calls > 1, "{keep:?}");
            let statistics = pool.statistics_of(WEIGHTS);
            assert_eq!((statistics.mapped, statistics.asleep), (0, mapped));
            // The other tag can be used, this one cannot.
            other.iter().enumerate().for_each(|(number, block)| check(block, number));
            refused_here(&weights[3].write(0, b"x").unwrap_err(), "tag 1 is asleep");
            refused_here(&pool.allocate(1, 1, WEIGHTS).unwrap_err(), "tag 1 is asleep");
            refused_here(&pool.reset(WEIGHTS).unwrap_err(), "tag 1 is asleep");
            assert_eq!(pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).unwrap(), 0, "it sleeps already");
            drop(pool.allocate(1, 1, Tag(3)).unwrap());
            pool.trim().unwrap();

            let mut last = 0;
            pool.wake(&[CACHE, WEIGHTS, WEIGHTS, Tag(99)], |progress| {
                assert!(progress.done > last && progress.done <= progress.total, "{progress:?}");
                last = progress.done;
            })
            .unwrap();
            weights.iter().enumerate().for_each(|(number, block)| check(block, number));
            assert_eq!(free(), awake);
            assert!(!directory.join("kept").exists(), "removed when it is awake");
        }
        drop((weights, other));
        pool.trim().unwrap();
        assert_eq!(free(), before);
    });
}

#[test]
fn contents_that_are_not_kept_are_lost_and_a_block_can_be_freed_asleep() {
    on_each_generation(plain(), |_, _| {
        let pool = pool();
        let block = pool.allocate(4 * MIB, 1, CACHE).unwrap();
        let other = pool.allocate(4 * MIB, 1, CACHE).unwrap();
        let address = other.address();
        pool.sleep(CACHE, Keep::Nothing, |_| panic!("there is nothing to report")).unwrap();
        drop(other);
        pool.wake(&[CACHE], |_| ()).unwrap();
        block.write(0, b"new").unwrap();
        assert_eq!(pool.allocate(4 * MIB, 1, CACHE).unwrap().address(), address);
        // A tag that was never used sleeps and wakes too.
        assert_eq!(pool.sleep(Tag(50), Keep::Host, |_| ()).unwrap(), 0);
        refused_here(&pool.allocate(1, 1, Tag(50)).unwrap_err(), "tag 50 is asleep");
        pool.wake(&[Tag(50)], |_| ()).unwrap();
        drop(pool.allocate(1, 1, Tag(50)).unwrap());
    });
}

#[test]
fn sixty_four_gib_sleep_and_wake_with_256_ioctls_besides_the_copies() {
    isolated(Config { hbm: 80 << 30, ..plain() }, |emulator| {
        let pool = Pool::new(&PageCache::new(&device(0)));
        let block = pool.allocate(64 * GIB, 1, WEIGHTS).unwrap();
        block.write(63 * GIB, b"end").unwrap();
        emulator.record();
        let before = emulator.records().len();
        pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        let calls = emulator.records()[before..].iter().filter(|record| record.cmd.is_some()).count();
        assert_eq!(calls, 256);
        block.write(63 * GIB, b"new").unwrap();
    });
}

#[test]
fn waking_is_all_or_nothing_and_reports_what_is_missing() {
    on_each_generation(Config { hbm: 256 * MIB, ..plain() }, |_, _| {
        let pool = pool();
        let all = free();
        let size = all / 4 / MIB2 * MIB2;
        let weights = pool.allocate(size, 1, WEIGHTS).unwrap();
        let cache = pool.allocate(size, 1, CACHE).unwrap();
        write(&weights, 1);
        write(&cache, 2);
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        pool.sleep(CACHE, Keep::Pinned, |_| ()).unwrap();
        let in_the_way = device(0).create(free() - size - MIB2).unwrap();
        let left = free();
        let error = pool.wake(&[WEIGHTS, CACHE], |_| ()).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let Error::OutOfMemory(missing) = &error else { panic!("{error}") };
        assert!(missing.asked > 0 && missing.asked <= size, "{error}");
        assert!(error.to_string().contains("waking tag 1, tag 2 with"), "{error}");
        assert_eq!(free(), left, "nothing is kept of an attempt");
        // One of them fits.
        pool.wake(&[CACHE], |_| ()).unwrap();
        check(&cache, 2);
        drop(in_the_way);
        pool.wake(&[WEIGHTS, CACHE], |_| ()).unwrap();
        check(&weights, 1);
    });
}

#[test]
fn free_memory_of_other_tags_is_used_to_wake_a_tag() {
    on_each_generation(Config { hbm: 256 * MIB, ..plain() }, |_, _| {
        let pool = pool();
        let size = free() / 2 / MIB2 * MIB2;
        let weights = pool.allocate(size, 1, WEIGHTS).unwrap();
        write(&weights, 1);
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        drop(pool.allocate(free(), 1, CACHE).unwrap());
        assert_eq!(free(), 0);
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        check(&weights, 1);
    });
}

#[test]
fn a_slice_keeps_its_tag_awake_and_a_refused_sleep_loses_nothing() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let pool = pool();
        let all = blocks(&pool, WEIGHTS);
        for keep in all_kinds(&directory) {
            let slice = all[5].slice(4096, 4096).unwrap();
            let error = pool.sleep(WEIGHTS, keep, |_| ()).unwrap_err();
            assert!(matches!(error, Error::InUse { .. }), "{error}");
            drop(slice);
            all.iter().enumerate().for_each(|(number, block)| check(block, number));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        all.iter().enumerate().for_each(|(number, block)| check(block, number));
    });
}

#[test]
fn a_live_slice_is_noticed_before_anything_is_copied() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let pool = pool();
        let block = pool.allocate(64 * MIB, 1, WEIGHTS).unwrap();
        emulator.record();
        for keep in all_kinds(&directory).into_iter().chain([Keep::Nothing]) {
            block.write(0, b"old").unwrap();
            let before = emulator.records().len();
            let mut slice = Some(block.slice(0, 3).unwrap());
            // A write that returns while the contents are copied, and a slice that is gone when the
            // memory is unmapped.
            let write = |_| {
                if let Some(slice) = slice.take() {
                    slice.write(b"new").unwrap();
                }
            };
            let error = pool.sleep(WEIGHTS, keep, write).unwrap_err();
            refused_here(&error, "1 slice(s) or copies");
            slice.take().unwrap().write(b"new").unwrap();
            let mut back = [0; 3];
            block.read(0, &mut back).unwrap();
            assert_eq!(&back, b"new");
            let made = emulator.records()[before..].iter().filter(|record| record.cmd.is_some()).count();
            assert_eq!(made, 2, "one write and one read");
        }
    });
}

#[test]
fn a_slice_of_any_part_keeps_the_whole_tag_awake_and_usable() {
    isolated(plain(), |_| {
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().handles(&[MIB2]));
        let blocks: Vec<_> = (0..8).map(|_| pool.allocate(MIB2, 1, WEIGHTS).unwrap()).collect();
        let session = Session::current().unwrap();
        for block in &blocks {
            let slice = block.slice(0, 8).unwrap();
            refused_here(&pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap_err(), "alive");
            // All blocks are found by their addresses again, also before and after this one.
            for block in &blocks {
                session.slice_at(block.address(), MIB2).unwrap().fill(7).unwrap();
            }
            drop(slice);
            // So does anything else that keeps a mapping alive.
            let mapping = session.mapping(block.address()).unwrap();
            refused_here(&pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap_err(), "alive");
            drop(mapping);
        }
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        blocks.iter().for_each(|block| assert!(session.mapping(block.address()).is_some()));
    });
}

#[test]
fn no_address_reaches_the_memory_of_a_tag_while_its_contents_are_copied() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let pool = pool();
        let block = pool.allocate(40 * MIB, 1, WEIGHTS).unwrap();
        let session = Session::current().unwrap();
        let (first, last) = (block.address(), block.address() + 40 * MIB - 3);
        let refused = || {
            for address in [first, last] {
                refused_here(&session.slice_at(address, 3).unwrap_err(), "is mapped");
                assert!(session.mapping(address).is_none());
            }
        };
        for keep in all_kinds(&directory) {
            block.write(0, b"old").unwrap();
            block.write(40 * MIB - 3, b"old").unwrap();
            pool.sleep(WEIGHTS, keep, |_| refused()).unwrap();
            refused();
            pool.wake(&[WEIGHTS], |_| refused()).unwrap();
            for address in [first, last] {
                let mut back = [0; 3];
                session.slice_at(address, 3).unwrap().read(&mut back).unwrap();
                assert_eq!(&back, b"old");
            }
        }
    });
}

#[test]
fn what_the_hook_writes_before_a_tag_falls_asleep_is_kept() {
    isolated(plain(), |_| {
        // The hook waits for copies: their slices may live until it returns.
        let slot = Arc::new(Mutex::new(None::<ascend_vmm::copy::Slice<'static>>));
        let inside = slot.clone();
        let hook = move |_: &[std::ops::Range<u64>]| {
            if let Some(slice) = inside.lock().unwrap().take() {
                slice.write(b"new").unwrap();
            }
        };
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().before_unmap(hook));
        let block = pool.allocate(4 * MIB, 1, WEIGHTS).unwrap();
        block.write(0, b"old").unwrap();
        *slot.lock().unwrap() = Some(Session::current().unwrap().slice_at(block.address(), 3).unwrap());
        pool.sleep(WEIGHTS, Keep::Host, |_| ()).unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        let mut back = [0; 3];
        block.read(0, &mut back).unwrap();
        assert_eq!(&back, b"new");
    });
}

/// One thread writes whole blocks while another puts the tag to sleep. After waking, the block has
/// the last write that returned Ok, from end to end.
fn writes_survive_sleeping(rounds: u64, size: u64) {
    let pool = pool();
    let block = pool.allocate(size, 1, WEIGHTS).unwrap();
    let (go, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    // The last write that returned Ok, and the round in which one was refused.
    let (last, refused) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; size as usize];
            for number in 1.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                buffer.fill(number as u8);
                match block.write(0, &buffer) {
                    Ok(()) => last.store(number, Ordering::SeqCst),
                    Err(error) => {
                        refused_here(&error, "asleep");
                        let round = go.load(Ordering::SeqCst);
                        refused.store(round, Ordering::SeqCst);
                        while go.load(Ordering::SeqCst) == round && !stop.load(Ordering::SeqCst) {
                            std::thread::yield_now();
                        }
                    }
                }
            }
        });
        let mut slept = 0;
        let mut back = vec![0; size as usize];
        while slept < rounds {
            match pool.sleep(WEIGHTS, Keep::Host, |_| ()) {
                Ok(_) => slept += 1,
                Err(error) => {
                    refused_here(&error, "alive");
                    // A write may have been refused while this was tried.
                    go.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
            }
            support::wait_until("a write is refused", || refused.load(Ordering::SeqCst) == go.load(Ordering::SeqCst));
            let number = last.load(Ordering::SeqCst);
            pool.wake(&[WEIGHTS], |_| ()).unwrap();
            block.read(0, &mut back).unwrap();
            let lost = back.iter().position(|&byte| byte != number as u8);
            assert_eq!(lost, None, "write {number} returned Ok, and at {lost:?} there is another");
            go.fetch_add(1, Ordering::SeqCst);
        }
        stop.store(true, Ordering::SeqCst);
    });
}

#[test]
fn no_write_that_returned_is_lost_or_torn_by_falling_asleep() {
    isolated(plain(), |_| writes_survive_sleeping(100, 4 * MIB));
}

#[test]
fn no_write_that_returned_is_lost_or_torn_when_copies_run_in_parallel() {
    let config = Config { copy_time: Duration::from_millis(1), ..plain() };
    isolated(config, |_| writes_survive_sleeping(50, 4 * MIB));
}

#[test]
fn a_cache_counts_what_it_releases_when_a_tag_falls_asleep() {
    isolated(plain(), |_| {
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().handles(&[MIB2]));
        let _block = pool.allocate(3 * MIB2, 1, WEIGHTS).unwrap();
        for round in 1..=3 {
            pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).unwrap();
            let statistics = pool.cache().statistics();
            assert_eq!((statistics.created, statistics.released), (3 * round, 3 * round));
            pool.wake(&[WEIGHTS], |_| ()).unwrap();
        }
    });
}

#[test]
fn a_panic_of_the_hook_or_the_progress_callback_leaves_the_tag_unchanged() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let mood = Arc::new(AtomicU64::new(0));
        let inside = mood.clone();
        let hook = move |_: &[std::ops::Range<u64>]| assert_eq!(inside.load(Ordering::Relaxed), 0, "in a bad mood");
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().before_unmap(hook));
        let all = blocks(&pool, WEIGHTS);
        for keep in all_kinds(&directory) {
            mood.store(1, Ordering::Relaxed);
            let sleep = || pool.sleep(WEIGHTS, keep.clone(), |_| ());
            catch_unwind(AssertUnwindSafe(sleep)).unwrap_err();
            mood.store(0, Ordering::Relaxed);
            let sleep = || pool.sleep(WEIGHTS, keep.clone(), |progress| assert!(progress.done < progress.total / 2));
            catch_unwind(AssertUnwindSafe(sleep)).unwrap_err();
            all.iter().enumerate().for_each(|(number, block)| check(block, number));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

            pool.sleep(WEIGHTS, keep.clone(), |_| ()).unwrap();
            let asleep = free();
            let wake = || pool.wake(&[WEIGHTS], |progress| assert!(progress.done < progress.total / 2));
            catch_unwind(AssertUnwindSafe(wake)).unwrap_err();
            assert_eq!(free() + pool.cache().statistics().cached, asleep);
            refused_here(&all[0].read(0, &mut [0]).unwrap_err(), "asleep");
            pool.wake(&[WEIGHTS], |_| ()).unwrap();
            all.iter().enumerate().for_each(|(number, block)| check(block, number));
        }
    });
}

#[test]
fn callbacks_may_use_the_pool() {
    on_each_generation(plain(), |_, _| {
        let pool = pool();
        let all = blocks(&pool, WEIGHTS);
        let busy = |pool: &Pool| {
            drop(pool.allocate(100, 1, CACHE).unwrap());
            refused_here(&pool.allocate(100, 1, WEIGHTS).unwrap_err(), "falling asleep or waking");
            refused_here(&pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).unwrap_err(), "falling asleep or waking");
            refused_here(&pool.wake(&[WEIGHTS], |_| ()).unwrap_err(), "falling asleep or waking");
            pool.trim().unwrap();
            pool.statistics();
        };
        pool.sleep(WEIGHTS, Keep::Host, |_| busy(&pool)).unwrap();
        pool.wake(&[WEIGHTS], |_| busy(&pool)).unwrap();
        all.iter().enumerate().for_each(|(number, block)| check(block, number));
    });
}

#[test]
fn a_full_disk_keeps_the_tag_awake_and_leaves_no_file() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let pool = pool();
        let all = blocks(&pool, WEIGHTS);
        // A limit on the size of files acts like a full disk: EFBIG instead of ENOSPC.
        // SAFETY: plain calls with valid arguments.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let limit = libc::rlimit { rlim_cur: 10 << 20, rlim_max: libc::RLIM_INFINITY };
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
        }
        let error = pool.sleep(WEIGHTS, Keep::File(directory.join("kept")), |_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("EFBIG") && text.contains("kept)") && text.contains("Nothing was lost"), "{text}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        all.iter().enumerate().for_each(|(number, block)| check(block, number));
        let nowhere = directory.join("no/such/directory");
        let error = pool.sleep(WEIGHTS, Keep::File(nowhere), |_| ()).unwrap_err();
        assert!(error.to_string().contains("ENOENT"), "{error}");
        let error = pool.sleep(WEIGHTS, Keep::File(PathBuf::from("/")), |_| ()).unwrap_err();
        assert!(error.to_string().contains("not the name of a file"), "{error}");
    });
}

#[test]
fn an_existing_file_is_never_overwritten_and_a_replaced_one_is_not_removed() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        write(&block, 1);
        fs::write(&path, b"precious").unwrap();
        let error = pool.sleep(WEIGHTS, Keep::File(path.clone()), |_| ()).unwrap_err();
        assert!(error.to_string().contains("the file exists"), "{error}");
        fs::remove_file(&path).unwrap();
        pool.sleep(WEIGHTS, Keep::File(path.clone()), |_| ()).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"precious").unwrap();
        // The contents are still there, because the file is open.
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        check(&block, 1);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    });
}

#[test]
fn a_file_is_written_under_an_unused_name_and_replaces_nothing() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let pool = pool();
        let (one, other) = (pool.allocate(MIB2, 1, Tag(1)).unwrap(), pool.allocate(MIB2, 1, Tag(2)).unwrap());
        write(&one, 1);
        write(&other, 2);
        // The first temporary name is a link to a file of someone else.
        let victim = directory.join("victim");
        fs::write(&victim, b"precious").unwrap();
        let partial = directory.join(&format!("kept.partial-{}-0", std::process::id()));
        std::os::unix::fs::symlink(&victim, &partial).unwrap();
        // Meanwhile another tag falls asleep under the same name, and finishes first.
        let mut second = None;
        let error = pool
            .sleep(Tag(1), Keep::File(path.clone()), |_| {
                second.get_or_insert_with(|| pool.sleep(Tag(2), Keep::File(path.clone()), |_| ()).unwrap());
            })
            .unwrap_err();
        assert!(error.to_string().contains("the file exists"), "{error}");
        assert_eq!(second, Some(MIB2));
        check(&one, 1);
        assert_eq!(BackupFile::open(&path).unwrap().tag, Tag(2));
        pool.wake(&[Tag(2)], |_| ()).unwrap();
        check(&other, 2);
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "the link and its file");
    });
}

#[test]
fn a_file_is_removed_even_if_the_program_changed_its_directory() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        write(&block, 1);
        std::env::set_current_dir(directory.path()).unwrap();
        pool.sleep(WEIGHTS, Keep::File(PathBuf::from("kept")), |_| ()).unwrap();
        assert!(directory.join("kept").exists());
        std::env::set_current_dir("/").unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        check(&block, 1);
        assert!(!directory.join("kept").exists());
    });
}

#[test]
fn a_file_that_is_truncated_while_a_tag_sleeps_is_an_error_and_stays() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let pool = pool();
        let all = blocks(&pool, WEIGHTS);
        pool.sleep(WEIGHTS, Keep::File(path.clone()), |_| ()).unwrap();
        let whole = fs::read(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(10 * MIB).unwrap();
        let asleep = free();
        let error = pool.wake(&[WEIGHTS], |_| ()).unwrap_err();
        assert!(error.to_string().contains("it ends at byte"), "{error}");
        assert_eq!(free(), asleep);
        let error = BackupFile::open(&path).unwrap_err();
        assert!(error.to_string().contains("cut off"), "{error}");
        fs::write(&path, whole).unwrap();
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        all.iter().enumerate().for_each(|(number, block)| check(block, number));
    });
}

#[test]
fn a_process_killed_asleep_leaves_its_file_and_one_killed_falling_asleep_leaves_none() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let peer = start(|channel| {
            let pool = pool();
            let block = pool.allocate(40 * MIB, 1, WEIGHTS).unwrap();
            block.fill(0, 40 * MIB, 7).unwrap();
            channel.send(block.address());
            pool.sleep(WEIGHTS, Keep::File(path.clone()), |progress| {
                if progress.done < progress.total / 2 {
                    channel.pause();
                }
            })
            .unwrap();
            channel.pause();
        });
        let address = peer.receive();
        peer.wait();
        assert!(!path.exists(), "not under its name before it is complete");
        peer.signal();
        while !path.exists() {
            if peer.receive() == 0 && !path.exists() {
                peer.signal();
            }
        }
        peer.kill();
        let file = BackupFile::open(&path).unwrap();
        let part = file.parts[0];
        assert_eq!((file.tag, part.address, part.size), (WEIGHTS, address, 40 * MIB));
        // The next process loads it at any address.
        let pool = pool();
        let block = pool.allocate(part.size, 1, CACHE).unwrap();
        pool::load(&file.file, part.offset, &block.slice(0, part.size).unwrap(), |_| ()).unwrap();
        let mut last = [0];
        block.read(part.size - 1, &mut last).unwrap();
        assert_eq!(last, [7]);
        drop((block, pool));
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_process_killed_at_any_time_leaves_nothing_in_the_driver() {
    isolated(plain(), |emulator| {
        for rounds in 0..12 {
            let peer = start(|channel| {
                let pool = pool();
                let all = blocks(&pool, WEIGHTS);
                channel.signal();
                loop {
                    pool.sleep(WEIGHTS, if rounds % 2 == 0 { Keep::Host } else { Keep::Pinned }, |_| ()).unwrap();
                    pool.wake(&[WEIGHTS], |_| ()).unwrap();
                    all.iter().enumerate().for_each(|(number, block)| check(block, number));
                }
            });
            peer.wait();
            std::thread::sleep(std::time::Duration::from_millis(7 * rounds));
            peer.kill();
        }
        support::wait_until("the driver forgets them", || emulator.state().memory.is_empty());
    });
}

#[test]
fn two_hundred_blocks_sleep_and_wake_for_many_rounds_at_the_same_addresses_without_growth() {
    on_each_generation(plain(), |_, _| {
        let pool = pool();
        let tags = [Tag(0), Tag(1), Tag(2), Tag(3)];
        // Small, because the contents of one tag are copied in every round.
        let sizes = [100, 5000, 40_000, 70_000, 300_000];
        let all: Vec<Block> =
            (0..200).map(|number| pool.allocate(sizes[number % 5], 1, tags[number % 4]).unwrap()).collect();
        all.iter().enumerate().for_each(|(number, block)| write(block, number));
        let (statistics, awake) = (pool.statistics(), free());
        let session = Session::current().unwrap().statistics();
        for round in 0..25 {
            for tag in tags {
                let keep = match (tag, round % 2) {
                    (Tag(0), 0) => Keep::Host,
                    (Tag(0), _) => Keep::Pinned,
                    _ => Keep::Nothing,
                };
                pool.sleep(tag, keep, |_| ()).unwrap();
            }
            assert_eq!(pool.statistics().mapped, 0);
            pool.wake(&tags, |_| ()).unwrap();
            assert_eq!((pool.statistics(), free()), (statistics, awake), "round {round}");
        }
        assert_eq!(Session::current().unwrap().statistics(), session);
        all.iter().enumerate().step_by(4).for_each(|(number, block)| check(block, number));
    });
}

#[test]
fn threads_allocate_while_another_puts_tags_to_sleep_and_wakes_them() {
    isolated(Config { hbm: 2 * GIB, ..plain() }, |_| {
        let pool = pool();
        std::thread::scope(|scope| {
            for thread in 0..6u32 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut taken = 0;
                    while taken < 200 {
                        match pool.allocate(1 << (4 + taken % 18), 1, Tag(thread % 3)) {
                            Ok(block) => {
                                taken += 1;
                                let number = u64::from(thread) << 32 | taken;
                                if block.write(0, &number.to_le_bytes()).is_ok() {
                                    let mut back = [0; 8];
                                    if block.read(0, &mut back).is_ok() {
                                        assert_eq!(u64::from_le_bytes(back), number);
                                    }
                                }
                            }
                            Err(error) => refused_here(&error, "asleep"),
                        }
                        std::thread::yield_now();
                    }
                });
            }
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..60u32 {
                    match pool.sleep(Tag(round % 3), Keep::Host, |_| ()) {
                        Ok(_) | Err(Error::InUse { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    pool.wake(&[Tag(0), Tag(1), Tag(2)], |_| ()).unwrap();
                    pool.trim().unwrap();
                }
            });
        });
        pool.trim().unwrap();
        assert_eq!((pool.statistics().blocks, pool.statistics().mapped), (0, 0));
    });
}

#[test]
fn a_child_of_fork_neither_sleeps_nor_wakes_nor_removes_its_parents_file() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        write(&block, 1);
        pool.sleep(WEIGHTS, Keep::File(path.clone()), |_| ()).unwrap();
        let mut all = Some((pool, block));
        fork(|| {
            let (pool, block) = all.take().unwrap();
            support::refused_in_child(&pool.wake(&[WEIGHTS], |_| ()).unwrap_err());
            support::refused_in_child(&pool.sleep(CACHE, Keep::Host, |_| ()).unwrap_err());
            drop((pool, block));
        })
        .join();
        let (pool, block) = all.unwrap();
        assert!(path.exists());
        pool.wake(&[WEIGHTS], |_| ()).unwrap();
        check(&block, 1);
    });
}

#[test]
fn a_child_forked_by_a_callback_gets_an_error_and_the_parent_continues() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let parent = std::process::id();
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        write(&block, 1);
        let forked = |result: ascend_vmm::Result<()>| {
            if std::process::id() != parent {
                let refused = matches!(result, Err(Error::OtherProcess { .. }));
                // SAFETY: ends the child, which has no destructors to run.
                unsafe { libc::_exit(i32::from(!refused)) }
            }
            result.unwrap();
        };
        let fork_once = || {
            // SAFETY: the child returns errors and ends.
            let child = unsafe { nix::unistd::fork() }.unwrap();
            if let nix::unistd::ForkResult::Parent { child } = child {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
            }
        };
        for keep in all_kinds(&directory) {
            forked(pool.sleep(WEIGHTS, keep.clone(), |_| fork_once()).map(drop));
            assert_eq!(path.exists(), matches!(keep, Keep::File(_)));
            if let Ok(file) = path.metadata() {
                assert_eq!(file.mode() & 0o777, 0o600, "weights may be secret");
            }
            forked(pool.wake(&[WEIGHTS], |_| fork_once()));
            check(&block, 1);
        }
    });
}

#[test]
fn a_tag_that_is_reset_while_it_falls_asleep_loses_no_memory() {
    isolated(plain(), |emulator| {
        // The system chooses which waiting thread comes first.
        for _ in 0..20 {
            let pool = pool();
            drop(pool.allocate(MIB2, 1, WEIGHTS).unwrap());
            let ((go, stopped), (at_rest, rests)) = (channel(), channel());
            std::thread::scope(|scope| {
                let grow = Worker::new(scope, || drop(pool.allocate(GIB, 1, WEIGHTS)));
                let resets: Vec<_> = (0..8).map(|_| Worker::new(scope, || drop(pool.reset(WEIGHTS)))).collect();
                let sleep = Worker::new(scope, || assert!(pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).is_ok()));
                // The driver stands still until it is released.
                scope.spawn(|| {
                    emulator.control(move |_| {
                        at_rest.send(()).unwrap();
                        stopped.recv().unwrap();
                    });
                });
                rests.recv().unwrap();
                // One thread has the segments and waits for the driver; the others wait for it.
                grow.work_until(libc::SYS_ioctl);
                resets.iter().for_each(|reset| reset.work_until(libc::SYS_futex));
                sleep.work_until(libc::SYS_futex);
                go.send(()).unwrap();
            });
            pool.wake(&[WEIGHTS], |_| ()).unwrap();
            // All memory is free, and the pool knows it.
            pool.trim().unwrap();
            assert_eq!((pool.statistics().blocks, pool.statistics().mapped), (0, 0));
        }
    });
}

/// A thread that waits to begin, and the open file that shows which system call it is in. (While
/// the driver stands still, no file can be opened.)
struct Worker {
    begin: Sender<()>,
    call: File,
}

impl Worker {
    fn new<'a>(scope: &'a Scope<'a, '_>, work: impl FnOnce() + Send + 'a) -> Worker {
        let ((begin, begun), (tell, told)) = (channel(), channel());
        scope.spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            begun.recv().unwrap();
            work();
        });
        let call = File::open(format!("/proc/self/task/{}/syscall", told.recv().unwrap())).unwrap();
        Worker { begin, call }
    }

    /// Lets the thread work until it waits in a system call.
    fn work_until(&self, call: i64) {
        self.begin.send(()).unwrap();
        let number = format!("{call} ");
        support::wait_until("the thread waits", || {
            let mut text = [0; 64];
            let length = self.call.read_at(&mut text, 0).unwrap();
            text[..length].starts_with(number.as_bytes())
        });
    }
}

#[test]
fn segments_that_were_unmapped_are_mapped_again_when_a_later_one_is_refused() {
    isolated(plain(), |emulator| {
        // Two handles fill a segment.
        let size = 600 * MIB;
        let pool = Pool::with(&PageCache::new(&device(0)), PoolOptions::default().handles(&[size]));
        let blocks: Vec<_> = (0..3).map(|_| pool.allocate(size, 1, WEIGHTS).unwrap()).collect();
        blocks.iter().enumerate().for_each(|(number, block)| write(block, number));
        inject(emulator, "MEM_UNMAP#3=EBUSY");
        assert!(pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).is_err());
        blocks.iter().enumerate().for_each(|(number, block)| check(block, number));
        assert_eq!(pool.sleep(WEIGHTS, Keep::Nothing, |_| ()).unwrap(), 3 * size);
    });
}

/// A file whose contents depend on their place.
fn file(directory: &Directory, size: u64) -> File {
    let mut bytes = vec![0; size as usize];
    for (number, place) in bytes.chunks_exact_mut(1000).enumerate() {
        place[..8].copy_from_slice(&(number as u64 * 0x9E37_79B9 + 1).to_le_bytes());
    }
    fs::write(directory.join("data"), bytes).unwrap();
    File::options().read(true).write(true).open(directory.join("data")).unwrap()
}

#[test]
fn any_part_of_a_file_is_loaded_and_stored_while_copies_run() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let file = file(&directory, 26 * MIB);
        let pool = pool();
        let block = pool.allocate(26 * MIB, 1, WEIGHTS).unwrap();
        emulator.record();
        let sizes = [0, 1, 1008, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 16 * MIB, 24 * MIB + 8];
        for (number, size) in sizes.into_iter().enumerate() {
            let (offset, at) = (number as u64 * 1000, number as u64 * 512);
            let mut reported = Vec::new();
            let slice = block.slice(at, size).unwrap();
            pool::load(&file, offset, &slice, |progress| reported.push(progress.done)).unwrap();
            assert_eq!(reported.last().copied().unwrap_or(0), size);
            assert!(reported.is_sorted());
            let out = File::options().read(true).write(true).create(true).truncate(true).open(directory.join("out"));
            let out = out.unwrap();
            pool::store(&slice, &out, 77, |progress| assert_eq!(progress.total, size)).unwrap();
            let (mut wanted, mut found) = (vec![0; size as usize], vec![0; size as usize]);
            file.read_exact_at(&mut wanted, offset).unwrap();
            out.read_exact_at(&mut found, 77).unwrap();
            assert!(wanted == found, "{size} from {offset}");
        }
        assert!(count(emulator, "ASYNC_MEMCPY") > 20);
        assert_eq!(count(emulator, "ASYNC_MEMCPY"), count(emulator, "MEMCPY_RESULT_REFRESH"));
    });
}

/// Bytes that this thread has read by read(2) and similar calls. The emulated driver reads in
/// another thread.
fn bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.strip_prefix("rchar: ").and_then(|rest| rest.lines().next()).unwrap().parse().unwrap()
}

#[test]
fn a_file_is_mapped_for_a_device_and_read_for_host_memory() {
    isolated(plain(), |_: &Emulator| {
        let directory = Directory::new();
        let file = file(&directory, 20 * MIB);
        let mut wanted = vec![0; 20 * MIB as usize - 5];
        file.read_exact_at(&mut wanted, 5).unwrap();
        let session = Session::open().unwrap();
        let host = session.host().unwrap().create(20 * MIB).unwrap();
        let device = device(0).create(20 * MIB).unwrap();
        for (memory, by_reading) in [(device, false), (host, true)] {
            let reservation = session.reserve(20 * MIB).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            let before = bytes_read();
            pool::load(&file, 5, &mapping.slice(0, 20 * MIB - 5).unwrap(), |_| ()).unwrap();
            assert_eq!(bytes_read() - before > MIB, by_reading);
            let mut found = vec![0; wanted.len()];
            mapping.read(0, &mut found).unwrap();
            assert!(found == wanted);
        }
        // A character device cannot be mapped, and has no size.
        let pool = pool();
        let block = pool.allocate(MIB2, 1, WEIGHTS).unwrap();
        block.fill(0, MIB2, 7).unwrap();
        pool::load(&File::open("/dev/zero").unwrap(), 0, &block.slice(0, MIB2).unwrap(), |_| ()).unwrap();
        let mut found = vec![1; MIB2 as usize];
        block.read(0, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
    });
}

#[test]
fn a_file_that_is_too_short_or_truncated_meanwhile_is_an_error_not_a_signal() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let file = file(&directory, 24 * MIB);
        let pool = pool();
        let block = pool.allocate(24 * MIB, 1, WEIGHTS).unwrap();
        let slice = block.slice(0, 24 * MIB).unwrap();
        for offset in [1, 24 * MIB, i64::MAX as u64 - 5] {
            let error = pool::load(&file, offset, &slice, |_| ()).unwrap_err();
            assert!(matches!(error, Error::File(_)), "{error}");
        }
        assert!(pool::load(&file, u64::MAX, &slice, |_| ()).is_err());
        // Truncated within a page, whose rest then reads as zeros, and by whole pages.
        for left in [24 * MIB - 100, 20 * MIB, 4097] {
            file.set_len(24 * MIB).unwrap();
            let error = pool::load(&file, 0, &slice, |_| file.set_len(left).unwrap()).unwrap_err();
            assert!(error.to_string().contains(&format!("it ends at byte {left}")), "{error}");
            assert!(error.to_string().contains("/data)"), "{error}");
        }
        let error = pool::load(&File::open(directory.path()).unwrap(), 0, &slice, |_| ()).unwrap_err();
        assert!(error.to_string().contains("EISDIR"), "{error}");
        let read_only = File::open(directory.join("data")).unwrap();
        let error = pool::store(&slice, &read_only, 0, |_| ()).unwrap_err();
        assert!(error.to_string().contains("EBADF"), "{error}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = pool::store(&slice, &full, 0, |_| ()).unwrap_err();
        assert!(error.to_string().contains("ENOSPC"), "{error}");
        // All copies have ended: the memory can be unmapped.
        drop(slice);
        drop(block);
        assert_eq!(pool.trim().unwrap(), 24 * MIB);
    });
}

#[test]
fn a_panic_of_the_progress_callback_leaves_no_copy_running() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let file = file(&directory, 20 * MIB);
        let pool = pool();
        let block = pool.allocate(20 * MIB, 1, WEIGHTS).unwrap();
        let slice = block.slice(0, 20 * MIB).unwrap();
        emulator.record();
        catch_unwind(AssertUnwindSafe(|| pool::load(&file, 0, &slice, |_| panic!("no more")))).unwrap_err();
        catch_unwind(AssertUnwindSafe(|| pool::store(&slice, &file, 0, |_| panic!("no more")))).unwrap_err();
        assert_eq!(count(emulator, "ASYNC_MEMCPY"), count(emulator, "MEMCPY_RESULT_REFRESH"));
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=EINVAL");
        assert!(pool::load(&file, 0, &slice, |_| ()).is_err());
    });
}

#[test]
fn a_file_that_is_not_a_backup_is_not_opened_as_one() {
    isolated(plain(), |_: &Emulator| {
        let directory = Directory::new();
        let path = directory.join("file");
        let header = |count: u32| [&b"AVMSLEEP"[..], &1u32.to_le_bytes(), &count.to_le_bytes()].concat();
        let row = |size: u64| [7u64.to_le_bytes(), size.to_le_bytes()].concat();
        for (bytes, words) in [
            (vec![], "not a backup of this library"),
            (vec![0; 10_000], "not a backup of this library"),
            (header(0), "cut off"),
            ([header(u32::MAX), vec![0; 10_000]].concat(), "cut off"),
            ([header(1), row(4096), vec![0; 5000]].concat(), "cut off"),
            ([header(2), row(u64::MAX), row(u64::MAX), vec![0; 5000]].concat(), "not possible"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = BackupFile::open(&path).unwrap_err();
            assert!(error.to_string().contains(words), "{words:?} is not in {error}");
        }
        // A sparse file that claims more rows than fit into memory.
        fs::write(&path, header(u32::MAX)).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let error = BackupFile::open(&path).unwrap_err();
        assert!(error.to_string().contains("not possible"), "{error}");
        // A pipe without a writer.
        nix::unistd::mkfifo(&directory.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = BackupFile::open(directory.join("pipe")).unwrap_err();
        assert!(error.to_string().contains("not a backup of this library"), "{error}");
        let error = BackupFile::open(directory.join("none")).unwrap_err();
        assert!(error.to_string().contains("ENOENT"), "{error}");
    });
}
