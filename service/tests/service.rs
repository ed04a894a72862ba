//! The service as it is used: a keeper, its fronts and engines as real processes on the emulated
//! driver, killed at every step.

mod support;

use ascend_emulator::{Client as Engine, Config, fork, isolated, on_each_generation};
use ascend_vmm::{LogicalId, Session};
use ascend_vmm_service::protocol::Code;
use ascend_vmm_service::{Error, Mode, OpenOptions, Opened, Reader};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use support::{KEYS, MIB, Service, check_weights, contents, device, name, options, write_weights};

#[test]
fn weights_outlive_the_engine_that_wrote_them() {
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        let client = service.client();
        let domain = name("llama/tp0/weights");
        let (mut told, tell) = UnixStream::pair().unwrap();
        let first = fork(|| {
            let _reader = write_weights(&client, &device(), &domain, KEYS);
            (&tell).write_all(b"x").unwrap();
            std::thread::sleep(Duration::from_secs(600));
        });
        told.read_exact(&mut [0]).unwrap();
        first.kill();
        let readers: Vec<Engine> = (0..3)
            .map(|_| fork(|| check_weights(&client.read(&device(), &domain, &options()).unwrap(), KEYS)))
            .collect();
        readers.into_iter().for_each(Engine::join);
        let status = service.status();
        assert_eq!((status.domains.len(), status.domains[0].state.as_str()), (1, "committed"));
        service.end(emulator);
    });
}

#[test]
fn a_writer_that_is_killed_leaves_nothing_and_the_version_before_it_is_served() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let domain = name("w");
        fork(|| drop(write_weights(&client, &device(), &domain, KEYS))).join();
        let before = emulator.state().memory.used.clone();
        for step in 0..4 {
            let (mut told, tell) = UnixStream::pair().unwrap();
            let writer = fork(|| {
                let device = device();
                let mut writer = client.write(&device, &domain, Mode::Write, 16 * MIB, &options()).unwrap();
                if step > 0 {
                    writer.allocate(4 * MIB, "").unwrap();
                }
                if step > 1 {
                    writer.put("embed", MIB, b"").unwrap().fill(9).unwrap();
                }
                (&tell).write_all(b"x").unwrap();
                std::thread::sleep(Duration::from_secs(if step == 3 { 0 } else { 600 }));
                // Killed at some point of its commit.
                if step == 3 {
                    let _ = writer.commit();
                    std::thread::sleep(Duration::from_secs(600));
                }
            });
            told.read_exact(&mut [0]).unwrap();
            writer.kill();
            let whole = fork(|| {
                let reader = client.read(&device(), &domain, &options()).unwrap();
                match reader.entries().len() {
                    4 => check_weights(&reader, KEYS),
                    // The last one may have committed before it was killed.
                    1 if step == 3 => {}
                    other => panic!("{other} keys"),
                }
            });
            whole.join();
            if step < 3 {
                assert_eq!(emulator.state().memory.used, before, "step {step}");
            }
        }
        service.end(emulator);
    });
}

#[test]
fn a_front_that_is_killed_at_any_moment_loses_nothing() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let stop = service.directory.join("stop");
        let engines: Vec<Engine> = (0..3)
            .map(|number| {
                let (client, stop) = (&client, &stop);
                fork(move || {
                    let device = device();
                    let domain = name(&format!("model/tp{number}"));
                    let mut rounds = 0;
                    while !stop.exists() {
                        let written = retry(|| {
                            let mut writer = client.write(&device, &domain, Mode::Write, 8 * MIB, &options())?;
                            writer.put("w", MIB, b"v")?.write(&contents("w", MIB))?;
                            writer.commit()
                        });
                        drop(written);
                        let mut reader = retry(|| client.read(&device, &domain, &options()));
                        let address = reader.address();
                        retry(|| reader.sleep());
                        retry(|| reader.wake());
                        assert_eq!(reader.address(), address);
                        let mut bytes = vec![0; MIB as usize];
                        reader.get("w").unwrap().read(&mut bytes).unwrap();
                        assert!(bytes == contents("w", MIB));
                        rounds += 1;
                    }
                    assert!(rounds > 0);
                })
            })
            .collect();
        for _ in 0..25 {
            service.kill_front();
        }
        let replaced = service.replace_front();
        std::fs::write(&stop, []).unwrap();
        engines.into_iter().for_each(Engine::join);
        let mut domains = service.status().domains;
        domains.retain(|domain| domain.state == "committed" && domain.bytes == 8 * MIB);
        assert_eq!(domains.len(), 3);
        drop(replaced);
        service.end(emulator);
    });
}

/// Until the front that was killed is replaced, a client may hear that its role is gone: that is an
/// error, and not wrong memory.
fn retry<T>(mut step: impl FnMut() -> Result<T, Error>) -> T {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        match step() {
            Ok(done) => return done,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

#[test]
fn a_reader_goes_on_while_the_front_is_replaced_by_another() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let domain = name("w");
        let mut reader = write_weights(&client, &device, &domain, KEYS);
        let mut fronts = vec![service.replace_front(), service.replace_front()];
        reader.sleep().unwrap();
        fronts.push(service.replace_front());
        reader.wake().unwrap();
        check_weights(&reader, KEYS);
        assert_eq!(service.status().domains[0].readers, 1);
        // The last one was not started by the keeper, which starts its own when that is killed.
        service.kill_front();
        reader.sleep().unwrap();
        reader.wake().unwrap();
        check_weights(&reader, KEYS);
        drop(reader);
        drop(device);
        for mut front in fronts {
            front.wait().unwrap();
        }
        service.end(emulator);
    });
}

#[test]
fn a_layout_that_changed_while_a_reader_slept_is_not_mapped() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let domain = name("w");
        let mut reader = write_weights(&client, &device, &domain, KEYS);
        reader.sleep().unwrap();
        // The version that it read stays for it.
        drop(write_weights(&client, &device, &domain, &["other"]));
        reader.wake().unwrap();
        check_weights(&reader, KEYS);
        assert!(reader.wait_for_newer(Duration::ZERO).unwrap() > reader.version());
        drop(reader);
        // A change in place gives its keys other values.
        let mut reader = client.read(&device, &domain, &options()).unwrap();
        reader.sleep().unwrap();
        let mut writer = client.write(&device, &domain, Mode::Update, 0, &options()).unwrap();
        writer.put("other", MIB, b"another type").unwrap();
        drop(writer.commit().unwrap());
        // As often as it is asked.
        for _ in 0..2 {
            let refused = reader.wake().unwrap_err();
            assert!(matches!(refused, Error::Stale { .. }), "{refused}");
            assert!(matches!(reader.get("other"), Err(Error::Asleep(_))));
        }
        drop(reader);
        drop(device);
        service.end(emulator);
    });
}

#[test]
fn an_update_in_place_waits_for_readers_and_changes_what_they_map_next() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let domain = name("w");
        let reader = write_weights(&client, &device, &domain, KEYS);
        let short = OpenOptions::new().wait(Duration::from_millis(1));
        let refused = client.write(&device, &domain, Mode::Update, 0, &short).unwrap_err();
        assert_eq!(refused.code(), Some(Code::Timeout), "{refused}");
        drop(reader);
        let mut writer = client.write(&device, &domain, Mode::Update, 0, &options()).unwrap();
        assert_eq!(service.status().domains[0].state, "dirty");
        writer.put("norm", 4096, b"norm").unwrap().fill(5).unwrap();
        assert!(matches!(writer.put("new", 1, b""), Err(Error::NoKey { .. })));
        drop(writer.commit().unwrap());
        let reader = client.read(&device, &domain, &options()).unwrap();
        let mut bytes = vec![0; 4097];
        reader.get("norm").unwrap().part(0, 4097).unwrap().read(&mut bytes).unwrap();
        assert!(bytes[..4096].iter().all(|byte| *byte == 5) && bytes[4096] == contents("norm", 4097)[4096]);
        check_weights_but_norm(&reader);
        drop(reader);
        // One that dies leaves it dirty.
        fork(|| drop(client.write(&self::device(), &domain, Mode::Update, 0, &options()).unwrap())).join();
        let dirty = client.read(&device, &domain, &options()).unwrap_err();
        assert_eq!(dirty.code(), Some(Code::Dirty), "{dirty}");
        drop(device);
        service.end(emulator);
    });
}

fn check_weights_but_norm(reader: &Reader) {
    for key in KEYS.iter().filter(|key| **key != "norm") {
        let slice = reader.get(key).unwrap();
        let mut bytes = vec![0; slice.size() as usize];
        slice.read(&mut bytes).unwrap();
        assert!(bytes == contents(key, slice.size()), "the bytes of {key}");
    }
}

#[test]
fn memory_is_waited_for_lent_and_given_back() {
    isolated(Config { hbm: 64 * MIB, ..Config::default() }, |emulator| {
        let service = Service::start("reclaim-seconds = 60");
        let client = service.client();
        let device = device();
        let lender = options().lends(true);
        let mut cache = client.write(&device, &name("kv"), Mode::Write, 64 * MIB, &lender).unwrap();
        for _ in 0..6 {
            cache.allocate(8 * MIB, "page").unwrap();
        }
        let refused = {
            let short = OpenOptions::new().wait(Duration::from_millis(1));
            let mut other = client.write(&device, &name("w"), Mode::Write, 64 * MIB, &short).unwrap();
            other.allocate(32 * MIB, "").unwrap_err()
        };
        assert_eq!(refused.code(), Some(Code::OutOfMemory), "{refused}");
        assert!(refused.to_string().contains("32 MiB were asked for"), "{refused}");
        while cache.reclaim().unwrap().is_some() {
            cache.free_last().unwrap();
        }
        let waiting = fork(|| {
            let device = self::device();
            let mut writer = client.write(&device, &name("w"), Mode::Write, 64 * MIB, &options()).unwrap();
            writer.allocate(32 * MIB, "").unwrap();
        });
        let mut freed = 0;
        let deadline = Instant::now() + Duration::from_secs(120);
        while freed < 24 * MIB {
            if cache.reclaim().unwrap().is_some() || freed > 0 {
                freed += cache.free_last().unwrap();
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(2));
        }
        waiting.join();
        drop(cache);
        drop(device);
        service.end(emulator);
    });
}

#[test]
fn layouts_of_many_allocations_take_each_others_place_while_the_journal_is_written_anew() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let domain = name("w");
        for round in 0..3u8 {
            let mut writer = client.write(&device, &domain, Mode::Write, 2 << 30, &options()).unwrap();
            for number in 0..600 {
                writer.allocate(2 * MIB, "").unwrap();
                // Enough to make a journal of some megabytes.
                writer.put(&format!("tensor.{number}"), 2 * MIB, &[round; 4096]).unwrap();
            }
            let reader = writer.commit().unwrap();
            assert_eq!((reader.entries().len(), reader.allocations().count()), (600, 600));
        }
        // All of it is there for a front that has only the journal.
        service.kill_front();
        let reader = client.read(&device, &domain, &options()).unwrap();
        assert!(reader.entries().values().all(|entry| entry.value == [2; 4096]));
        assert_eq!(service.status().domains[0].bytes, 1200 * MIB);
        assert_eq!(emulator.state().memory.used[&0], 1200 * MIB);
        drop((reader, device));
        service.end(emulator);
    });
}

#[test]
fn a_reader_on_another_npu_and_a_user_without_rights_are_refused() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("[[allow]]\ndomains = [\"free/*\"]\nwrite = true\n[[allow]]\ndomains = [\"w\"]");
        let client = service.client();
        let session = Session::open().unwrap();
        let (one, other) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        drop(write_weights(&client, &one, &name("free/w"), KEYS));
        let refused = client.read(&other, &name("free/w"), &options()).unwrap_err();
        assert_eq!(refused.code(), Some(Code::OtherDevice), "{refused}");
        let refused = client.write(&one, &name("w"), Mode::Write, MIB, &options()).unwrap_err();
        assert_eq!(refused.code(), Some(Code::Forbidden), "{refused}");
        let refused = client.read(&one, &name("other"), &options()).unwrap_err();
        assert_eq!(refused.code(), Some(Code::Forbidden), "{refused}");
        drop((one, other, session));
        service.end(emulator);
    });
}

#[test]
fn who_writes_or_reads_writes_first_and_the_others_read_the_same() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let engines: Vec<Engine> = (0..4)
            .map(|_| {
                fork(|| {
                    let device = device();
                    match client.write_or_read(&device, &name("w"), 8 * MIB, &options()).unwrap() {
                        Opened::Writer(mut writer) => {
                            writer.put("w", MIB, b"w").unwrap().write(&contents("w", MIB)).unwrap();
                            writer.commit().unwrap();
                        }
                        Opened::Reader(reader) => check(&reader),
                    }
                })
            })
            .collect();
        engines.into_iter().for_each(Engine::join);
        assert_eq!(service.status().domains[0].bytes, 8 * MIB);
        service.end(emulator);
    });
}

fn check(reader: &Reader) {
    let mut bytes = vec![0; MIB as usize];
    reader.get("w").unwrap().read(&mut bytes).unwrap();
    assert!(bytes == contents("w", MIB));
}
