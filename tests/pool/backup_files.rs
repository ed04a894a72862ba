//! Files of sleeping tags: how they get their names, reach the disk and are removed.

use crate::support::{Directory, MIB, device, plain, refused_here, without};
use ascend_emulator::{isolated, on_each_generation};
use ascend_vmm::pool::{BackupFile, Block, Keep, PageCache, Pool, Tag};
use nix::libc;
use std::fs::{self, File};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const WEIGHTS: Tag = Tag(1);

fn pool_with_block() -> (Pool, Block) {
    let pool = Pool::new(&PageCache::new(&device(0)));
    let block = pool.allocate(20 * MIB, 1, WEIGHTS).unwrap();
    block.write(20 * MIB - 4, b"kept").unwrap();
    (pool, block)
}

#[track_caller]
fn check(block: &Block) {
    let mut back = [0; 4];
    block.read(20 * MIB - 4, &mut back).unwrap();
    assert_eq!(&back, b"kept");
}

fn names(directory: &Directory) -> Vec<String> {
    let entries = fs::read_dir(directory.path()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Calls of fsync: name and size of the file, and whether the file had its final name by then.
static SYNCED: Mutex<Vec<(PathBuf, u64, bool)>> = Mutex::new(Vec::new());

/// Replaces fsync(3) in this program. The standard library calls it.
#[unsafe(no_mangle)]
extern "C" fn fsync(descriptor: libc::c_int) -> libc::c_int {
    let name = fs::read_link(format!("/proc/self/fd/{descriptor}")).unwrap();
    // SAFETY: the caller's descriptor is open, and is not closed here.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let named = name.parent().is_some_and(|parent| parent.join("kept").exists()) || name.join("kept").exists();
    SYNCED.lock().unwrap().push((name, file.metadata().unwrap().len(), named));
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_fsync, descriptor) as libc::c_int }
}

#[test]
fn a_file_is_synced_before_it_gets_its_name_and_its_directory_after_that() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let (pool, _block) = pool_with_block();
        pool.sleep(WEIGHTS, Keep::File(directory.join("kept")), |_| ()).unwrap();
        let size = directory.join("kept").metadata().unwrap().len();
        assert!(size > 20 * MIB);
        let synced = SYNCED.lock().unwrap();
        let [(file, synced_size, named), (parent, _, parent_named)] = &synced[..] else { panic!("{synced:?}") };
        let partial = directory.join(&format!("kept.partial-{}-0", std::process::id()));
        assert_eq!((file, *synced_size, *named), (&partial, size, false));
        assert_eq!((parent.as_path(), *parent_named), (directory.path(), true));
    });
}

#[test]
fn no_file_is_replaced_or_removed_where_links_or_renames_are_refused() {
    isolated(plain(), |_| {
        let (pool, block) = pool_with_block();
        let cases: [(&[libc::c_long], _, _); 4] = [
            (&[], 0, true),
            (&[libc::SYS_linkat], libc::EPERM, true),
            (&[libc::SYS_renameat2], libc::EINVAL, true),
            (&[libc::SYS_linkat, libc::SYS_renameat2], libc::EPERM, false),
        ];
        for (refused, errno, possible) in cases {
            let directory = Directory::new();
            let path = directory.join("kept");
            let sleep = |meanwhile: &dyn Fn()| {
                let mut once = Some(meanwhile);
                let progress = |_| once.take().into_iter().for_each(|meanwhile| meanwhile());
                pool.sleep(WEIGHTS, Keep::File(path.clone()), progress)
            };
            without(refused, errno, || {
                // Someone creates a file of that name while the contents are written.
                let words = if possible { "the file exists" } else { "neither hard links nor a rename" };
                let error = sleep(&|| fs::write(&path, b"another's work").unwrap()).unwrap_err();
                assert!(error.to_string().contains(words), "{error}");
                check(&block);
                assert_eq!(names(&directory), ["kept"]);
                assert_eq!(fs::read(&path).unwrap(), b"another's work");
                fs::remove_file(&path).unwrap();
                // No one does.
                let slept = sleep(&|| ());
                assert_eq!(slept.is_ok(), possible, "{slept:?}");
                assert_eq!(names(&directory).len(), usize::from(possible));
                assert!(!possible || BackupFile::open(&path).unwrap().tag == WEIGHTS);
                pool.wake(&[WEIGHTS], |_| ()).unwrap();
                check(&block);
                assert_eq!(names(&directory).len(), 0);
            });
        }
    });
}

#[test]
fn the_file_of_a_tag_is_removed_with_its_pool_and_blocks_unless_it_was_replaced() {
    on_each_generation(plain(), |_, _| {
        let directory = Directory::new();
        let path = directory.join("kept");
        let asleep = || {
            let (pool, block) = pool_with_block();
            pool.sleep(WEIGHTS, Keep::File(path.clone()), |_| ()).unwrap();
            (pool, block)
        };
        let is_there = |path: &Path| path.symlink_metadata().is_ok();
        let (pool, block) = asleep();
        drop(pool);
        assert!(is_there(&path), "the block is still asleep");
        drop(block);
        assert!(!is_there(&path));
        let (pool, block) = asleep();
        drop(block);
        assert!(is_there(&path));
        drop(pool);
        assert!(!is_there(&path));
        // An open file and a file that replaced it stay.
        let (pool, block) = asleep();
        let file = BackupFile::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"another's work").unwrap();
        drop((pool, block));
        assert_eq!(fs::read(&path).unwrap(), b"another's work");
        assert!(file.file.metadata().unwrap().len() > 20 * MIB);
    });
}

#[test]
fn a_file_that_cannot_be_synced_keeps_the_tag_awake() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let (pool, block) = pool_with_block();
        without(&[libc::SYS_fsync], libc::EIO, || {
            let error = pool.sleep(WEIGHTS, Keep::File(directory.join("kept")), |_| ()).unwrap_err();
            assert!(error.to_string().contains("EIO"), "{error}");
        });
        assert!(names(&directory).is_empty());
        check(&block);
        assert_eq!(pool.sleep(WEIGHTS, Keep::File(directory.join("kept")), |_| ()).unwrap(), 20 * MIB);
        refused_here(&block.read(0, &mut [0]).unwrap_err(), "asleep");
    });
}
