//! Saving what is served to files and loading it again, with every way in which that can be
//! disturbed: kills, full disks, damaged files.

mod support;

use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm_service::{
    Client, Difference, DomainName, Mode, PageSize, Reader, SavedSnapshot, Snapshot, SnapshotError, compare, save,
};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::{KEYS, MIB, Service, check_weights, contents, device, name, options, write_weights};

/// The size of a shard.
const SHARD: u64 = 64 * MIB;

fn domain() -> DomainName {
    name("llama/tp0/weights")
}

fn open(client: &Client) -> Reader {
    client.read(&device(), &domain(), &options()).unwrap()
}

fn saved(client: &Client, directories: &[PathBuf]) -> Result<Snapshot, SnapshotError> {
    save(&mut open(client), directories, &|_| ())
}

/// Loads a snapshot into the domain, and returns its reader.
fn loaded(client: &Client, directories: &[PathBuf]) -> Result<Reader, SnapshotError> {
    let snapshot = SavedSnapshot::open(directories)?;
    snapshot.load(client, &device(), &domain(), Mode::Write, &options(), &|_| ())
}

fn load_error(client: &Client, directories: &[PathBuf]) -> String {
    loaded(client, directories).unwrap_err().to_string()
}

/// The files of a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs a step in a process of its own, so that this one never has a session.
fn elsewhere(step: impl FnOnce()) {
    fork(step).join();
}

/// Weights of three shards, the last of which is small, in two allocations.
fn write_shards(client: &Client) -> Reader {
    let mut writer = client.write(&device(), &domain(), Mode::Write, 2 * SHARD + 2 * MIB, &options()).unwrap();
    writer.allocate(SHARD + 2 * MIB, "part 0").unwrap();
    writer.allocate(SHARD, "part 1").unwrap();
    for at in 0..5 {
        writer.slice(at * SHARD / 2, 4096).unwrap().write(&contents(&at.to_string(), 4096)).unwrap();
    }
    writer.commit().unwrap()
}

fn check_shards(reader: &Reader) {
    for at in 0..5 {
        let mut bytes = [0; 4096];
        reader.slice(at * SHARD / 2, 4096).unwrap().read(&mut bytes).unwrap();
        assert!(bytes[..] == contents(&at.to_string(), 4096), "the bytes at {at}");
    }
    let sizes: Vec<_> = reader.allocations().map(|it| (it.size, it.tag.as_str())).collect();
    assert_eq!(sizes, [(SHARD + 2 * MIB, "part 0"), (SHARD, "part 1")]);
}

#[test]
fn what_was_saved_is_served_again_by_another_service() {
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        let (client, here) = (service.client(), service.directory.clone());
        // The directory of the first service goes with it.
        let kept = here.with_extension("kept");
        let directories = [kept.join("one"), kept.join("two")];
        let numbers = |reader: &Reader| reader.allocations().map(|allocation| allocation.id).collect::<Vec<u64>>();
        elsewhere(|| {
            let reader = write_weights(&client, &device(), &domain(), KEYS);
            fs::create_dir(&kept).unwrap();
            fs::write(kept.join("numbers"), format!("{:?}", numbers(&reader))).unwrap();
            drop(reader);
            let written = saved(&client, &directories).unwrap();
            assert_eq!((written.version, written.keys, written.resumed), (1, KEYS.len(), 0));
        });
        service.end(emulator);
        let service = Service::start("");
        let client = service.client();
        elsewhere(|| {
            let mut backwards = directories.clone();
            backwards.reverse();
            let reader = loaded(&client, &backwards).unwrap();
            check_weights(&reader, KEYS);
            let before = fs::read_to_string(kept.join("numbers")).unwrap();
            assert_eq!(format!("{:?}", numbers(&reader)), before);
        });
        elsewhere(|| {
            // Beside itself it has other numbers.
            let reader = loaded(&client, &directories).unwrap();
            check_weights(&reader, KEYS);
            let before = fs::read_to_string(kept.join("numbers")).unwrap();
            assert!(numbers(&reader).iter().all(|number| !before.contains(&number.to_string())));
        });
        elsewhere(|| check_weights(&open(&client), KEYS));
        fs::remove_dir_all(kept).unwrap();
        service.end(emulator);
    });
}

#[test]
fn a_save_that_is_killed_goes_on_and_is_never_taken_for_whole() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, here) = (service.client(), &service.directory);
        let directories = [here.join("one"), here.join("two")];
        elsewhere(|| drop(write_shards(&client)));
        // True when the last shard, which is small, is whole.
        let last_is_whole = || {
            let paths = directories.iter().map(|directory| directory.join("shard-00000002"));
            paths.filter_map(|path| fs::read(path).ok()).any(|bytes| bytes.first() == Some(&b'a'))
        };
        for parts in [1, 17, 0] {
            let (mut told, tell) = UnixStream::pair().unwrap();
            let killed = fork(|| {
                let count = std::sync::atomic::AtomicUsize::new(0);
                let _ = save(&mut open(&client), &directories, &|bytes| {
                    if count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1 >= parts {
                        // At the last kill one shard is whole, and the others are not.
                        while parts == 0 && bytes == 4 * MIB && !last_is_whole() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        if parts > 0 || bytes == 4 * MIB {
                            let _ = (&tell).write_all(b"x");
                            std::thread::sleep(Duration::from_secs(600));
                        }
                    }
                });
                (&tell).write_all(b"x").unwrap();
                std::thread::sleep(Duration::from_secs(600));
            });
            told.read_exact(&mut [0]).unwrap();
            killed.kill();
            elsewhere(|| {
                let error = load_error(&client, &directories);
                assert!(error.contains("unfinished save"), "{error}");
            });
        }
        let mut shards = 0;
        elsewhere(|| assert!(saved(&client, &directories).unwrap().resumed > 0));
        for directory in &directories {
            let names = names(directory);
            assert!(names.contains(&"manifest".into()) && !names.contains(&"plan".into()), "{names:?}");
            shards += names.len() - 1;
        }
        assert_eq!(shards, 3, "each shard is in one directory");
        elsewhere(|| check_shards(&loaded(&client, &directories).unwrap()));
        // A save that is finished is left as it is.
        elsewhere(|| {
            let error = saved(&client, &directories).unwrap_err().to_string();
            assert!(error.contains("version 1 of llama/tp0/weights"), "{error}");
        });
        service.end(emulator);
    });
}

#[test]
fn a_load_that_is_killed_commits_nothing() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, directories) = (service.client(), [service.directory.join("one")]);
        elsewhere(|| drop(write_shards(&client)));
        elsewhere(|| drop(saved(&client, &directories).unwrap()));
        let (mut told, tell) = UnixStream::pair().unwrap();
        for part in [1, 20, 33] {
            let killed = fork(|| {
                let count = std::sync::atomic::AtomicUsize::new(0);
                let snapshot = SavedSnapshot::open(&directories).unwrap();
                let _ = snapshot.load(&client, &device(), &domain(), Mode::Write, &options(), &|_| {
                    if count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1 >= part {
                        let _ = (&tell).write_all(b"x");
                        std::thread::sleep(Duration::from_secs(600));
                    }
                });
            });
            told.read_exact(&mut [0]).unwrap();
            killed.kill();
            assert_eq!(service.settled().domains[0].version, 1);
        }
        elsewhere(|| check_shards(&open(&client)));
        elsewhere(|| check_shards(&loaded(&client, &directories).unwrap()));
        assert_eq!(service.status().domains[0].version, 2);
        service.end(emulator);
    });
}

#[test]
fn a_load_goes_on_when_the_front_is_killed_in_the_middle() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, directories) = (service.client(), [service.directory.join("one")]);
        elsewhere(|| drop(write_shards(&client)));
        elsewhere(|| drop(saved(&client, &directories).unwrap()));
        elsewhere(|| {
            let count = std::sync::atomic::AtomicUsize::new(0);
            let snapshot = SavedSnapshot::open(&directories).unwrap();
            let loaded = snapshot.load(&client, &device(), &domain(), Mode::Write, &options(), &|_| {
                if count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 3 {
                    service.kill_front();
                }
            });
            check_shards(&loaded.unwrap());
        });
        assert_eq!(service.status().domains[0].version, 2);
        assert_eq!(service.client().events(0).unwrap().iter().filter(|it| it.text.contains("took over")).count(), 1);
        service.end(emulator);
    });
}

#[test]
fn a_damaged_file_is_named_and_nothing_is_committed() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, directory) = (service.client(), service.directory.join("one"));
        let directories = [directory.clone()];
        elsewhere(|| drop(write_shards(&client)));
        elsewhere(|| drop(saved(&client, &directories).unwrap()));
        let shard = directory.join("shard-00000002");
        let whole = fs::read(&shard).unwrap();
        let manifest = fs::read(directory.join("manifest")).unwrap();
        let refused = |file: &str, what: &str| {
            elsewhere(|| {
                let error = load_error(&client, &directories);
                assert!(error.contains(file) && error.contains(what), "{error}");
            });
            assert_eq!(service.settled().domains[0].version, 1);
        };
        // A byte of the memory, of the first block, of the last page.
        for (at, what) in [
            (4096 + 7, "contents are not those"),
            (whole.len() - 1, "contents are not those"),
            (0, "its first block"),
            (40, "its first block"),
            (130, "its first block"),
        ] {
            let file = fs::OpenOptions::new().write(true).open(&shard).unwrap();
            file.write_all_at(&[whole[at] ^ 0x10], at as u64).unwrap();
            refused("shard-00000002", what);
            file.write_all_at(&[whole[at]], at as u64).unwrap();
        }
        for length in [0, 1, 4096, whole.len() - 1, whole.len() + 1] {
            fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(length as u64).unwrap();
            refused("shard-00000002", "not the size");
            fs::write(&shard, &whole).unwrap();
        }
        fs::remove_file(&shard).unwrap();
        refused("shard-00000002", "none of the directories");
        symlink(directory.join("shard-00000001"), &shard).unwrap();
        refused("shard-00000002", "symbolic link");
        fs::remove_file(&shard).unwrap();
        fs::write(&shard, &whole).unwrap();
        // A shard in the place of another one of the same size.
        let (first, second) = (directory.join("shard-00000000"), directory.join("shard-00000001"));
        fs::rename(&second, directory.join("away")).unwrap();
        fs::copy(&first, &second).unwrap();
        refused("shard-00000001", "its first block");
        fs::rename(directory.join("away"), &second).unwrap();
        for at in [0, 30, manifest.len() / 2, manifest.len() - 1] {
            let mut damaged = manifest.clone();
            damaged[at] ^= 1;
            fs::write(directory.join("manifest"), &damaged).unwrap();
            refused("manifest", "is damaged");
        }
        for length in [0, 20, manifest.len() - 1] {
            fs::write(directory.join("manifest"), &manifest[..length]).unwrap();
            refused("manifest", "is damaged");
        }
        fs::write(directory.join("manifest"), &manifest).unwrap();
        elsewhere(|| check_shards(&loaded(&client, &directories).unwrap()));
        service.end(emulator);
    });
}

#[test]
fn a_directory_that_is_used_or_not_empty_is_refused_and_left_as_it_is() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, here) = (service.client(), &service.directory);
        elsewhere(|| drop(write_weights(&client, &device(), &domain(), KEYS)));
        let refused = |directories: &[PathBuf], what: &str| {
            elsewhere(|| {
                let error = saved(&client, directories).unwrap_err().to_string();
                assert!(error.contains(what), "{error}");
            });
        };
        let mine = here.join("mine");
        fs::create_dir(&mine).unwrap();
        fs::write(mine.join("thesis.tex"), "mine").unwrap();
        refused(&[here.join("new"), mine.clone()], "thesis.tex is in the way");
        assert_eq!(names(&mine), ["thesis.tex"]);
        refused(&[mine.join("thesis.tex")], "thesis.tex");
        // A file with the name of a shard, but no plan.
        let like = here.join("like");
        fs::create_dir(&like).unwrap();
        fs::write(like.join("shard-00000000"), "mine").unwrap();
        refused(std::slice::from_ref(&like), "shard-00000000 is in the way");
        // Links in the place of files that would be written.
        let links = here.join("links");
        fs::create_dir(&links).unwrap();
        symlink(mine.join("thesis.tex"), links.join("plan")).unwrap();
        refused(&[links], "symbolic link");
        assert_eq!(fs::read_to_string(mine.join("thesis.tex")).unwrap(), "mine");
        let one = here.join("one");
        refused(&[one.clone(), here.join("one/../one")], "named twice");
        // Two at once.
        let (mut told, tell) = UnixStream::pair().unwrap();
        let first = fork(|| {
            let _ = save(&mut open(&client), std::slice::from_ref(&one), &|_| {
                let _ = (&tell).write_all(b"x");
                std::thread::sleep(Duration::from_secs(600));
            });
        });
        told.read_exact(&mut [0]).unwrap();
        refused(&[here.join("two"), one.clone()], "used by another save");
        first.kill();
        // What was begun belongs to another version now.
        elsewhere(|| drop(write_weights(&client, &device(), &domain(), KEYS)));
        refused(std::slice::from_ref(&one), "an unfinished save of version 1");
        service.end(emulator);
    });
}

#[test]
fn a_commit_in_the_middle_of_a_save_does_not_disturb_it() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, directories) = (service.client(), [service.directory.join("one")]);
        elsewhere(|| drop(write_weights(&client, &device(), &domain(), KEYS)));
        let (mut told, tell) = UnixStream::pair().unwrap();
        let (asked, mut ask) = UnixStream::pair().unwrap();
        let saving = fork(|| {
            let saved = save(&mut open(&client), &directories, &|_| {
                let _ = (&tell).write_all(b"x");
                let _ = (&asked).read_exact(&mut [0]);
            });
            assert_eq!(saved.unwrap().version, 1);
        });
        told.read_exact(&mut [0]).unwrap();
        elsewhere(|| drop(write_weights(&client, &device(), &domain(), &["other"])));
        ask.write_all(&[0; 1024]).unwrap();
        saving.join();
        elsewhere(|| check_weights(&loaded(&client, &directories).unwrap(), KEYS));
        service.end(emulator);
    });
}

#[test]
fn a_disk_that_is_full_is_named_and_the_save_goes_on_later() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, directories) = (service.client(), [service.directory.join("one")]);
        elsewhere(|| drop(write_shards(&client)));
        elsewhere(|| {
            let limit = 40 * MIB;
            nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE, limit, limit).unwrap();
            // SAFETY: no handler is installed.
            unsafe { nix::sys::signal::signal(nix::sys::signal::SIGXFSZ, nix::sys::signal::SigHandler::SigIgn) }
                .unwrap();
            let error = saved(&client, &directories).unwrap_err().to_string();
            assert!(error.contains("/one/shard-0000000") && error.contains("large"), "{error}");
        });
        elsewhere(|| {
            let error = load_error(&client, &directories);
            assert!(error.contains("unfinished save"), "{error}");
        });
        elsewhere(|| drop(saved(&client, &directories).unwrap()));
        elsewhere(|| check_shards(&loaded(&client, &directories).unwrap()));
        service.end(emulator);
    });
}

#[test]
fn ten_thousand_keys_and_no_key_at_all_are_saved_alike() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, here) = (service.client(), &service.directory);
        for (place, keys) in [("none", 0), ("many", 10_000)] {
            let directories = [here.join(place)];
            elsewhere(|| {
                let mut writer = client.write(&device(), &domain(), Mode::Write, 16 * MIB, &options()).unwrap();
                writer.allocate(2 * MIB, "").unwrap();
                for key in 0..keys {
                    writer.put(&format!("layer.{key:05}"), 8, &[7; 100]).unwrap();
                }
                let reader = writer.commit().unwrap();
                assert_eq!(reader.entries().len(), keys);
            });
            elsewhere(|| assert_eq!(saved(&client, &directories).unwrap().keys, keys));
            elsewhere(|| {
                let layout = |reader: &Reader| {
                    let places: Vec<_> =
                        reader.entries().iter().map(|(key, it)| (key.clone(), it.offset, it.size)).collect();
                    let values: Vec<_> = reader.entries().values().map(|it| it.value.clone()).collect();
                    let memory: Vec<_> = reader.allocations().map(|it| (it.size, it.page == PageSize::Huge)).collect();
                    (places, values, memory)
                };
                let before = layout(&open(&client));
                assert!(before == layout(&loaded(&client, &directories).unwrap()));
            });
        }
        service.end(emulator);
    });
}

/// A safetensors file.
fn tensors(path: &Path, tensors: &[(&str, Vec<u8>)]) {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let (from, to) = (data.len(), data.len() + bytes.len());
        header.push(format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, bytes.len()));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{}}}", header.join(","));
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

#[test]
fn served_tensors_are_compared_with_files_by_name_and_bytes() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (client, here) = (service.client(), service.directory.join("model"));
        fs::create_dir(&here).unwrap();
        elsewhere(|| drop(write_weights(&client, &device(), &domain(), KEYS)));
        let size = MIB + 4096;
        let of = |keys: &[&'static str]| keys.iter().map(|key| (*key, contents(key, size))).collect::<Vec<_>>();
        tensors(&here.join("model-1.safetensors"), &of(&KEYS[..2]));
        tensors(&here.join("model-2.safetensors"), &of(&KEYS[2..]));
        fs::write(here.join("model.safetensors.index.json"), "{}").unwrap();
        elsewhere(|| {
            let compared = compare(&open(&client), &here, &|_| ()).unwrap();
            assert_eq!((compared.equal, compared.bytes), (4, 4 * size));
            assert!(compared.differences.is_empty());
        });
        let mut second = of(&KEYS[2..]);
        second[0].1[MIB as usize + 5] ^= 1;
        second[1].1.pop();
        second.push(("extra", vec![1]));
        tensors(&here.join("model-2.safetensors"), &second);
        tensors(&here.join("model-1.safetensors"), &of(&KEYS[..1]));
        elsewhere(|| {
            let compared = compare(&open(&client), &here, &|_| ()).unwrap();
            assert_eq!(compared.equal, 1);
            let file = here.join("model-2.safetensors");
            let expected = [
                ("extra", Difference::NotServed { file: file.clone() }),
                (KEYS[1], Difference::NoFile),
                (KEYS[2], Difference::Bytes { file: file.clone(), at: MIB + 5 }),
                (KEYS[3], Difference::Size { file, saved: size - 1, served: size }),
            ];
            assert_eq!(compared.differences, expected.map(|(name, it)| (name.to_owned(), it)).into());
        });
        tensors(&here.join("model-3.safetensors"), &of(&KEYS[..1]));
        elsewhere(|| {
            let error = compare(&open(&client), &here, &|_| ()).unwrap_err().to_string();
            assert!(error.contains("model-3") && error.contains("another file too"), "{error}");
        });
        service.end(emulator);
    });
}
