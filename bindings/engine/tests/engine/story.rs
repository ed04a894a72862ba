//! What an engine does on an ordinary day, and on a bad one.

use crate::stack::{Stack, built};
use crate::support::{KEYS, MIB, Service, check_weights, contents, device, name, options};
use ascend_emulator::{Config, Emulator, Line, fork, isolated, on_each_generation};
use ascend_vmm_engine::{Client, Domain, Error, Kind, Mode, OpenOptions};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long these tests wait for something that happens soon, on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);
pub const SHORT: Duration = Duration::from_millis(50);

pub fn open(service: &Service, mode: Mode) -> Result<Domain, Error> {
    Client::new(service.path()).open(&name("w"), mode, 64 * MIB, &options())
}

/// Writes the weights of the service's own tests, one of them over the border of two allocations.
pub fn write(stack: &Stack, service: &Service) -> Domain {
    let mut domain = open(service, Mode::Write).unwrap();
    domain.allocate(2 * MIB, "first", LONG).unwrap();
    for key in KEYS {
        let size = MIB + 4096;
        let address = domain.put(key, size, key.as_bytes(), LONG).unwrap();
        stack.write(address, &contents(key, size));
    }
    domain.commit().unwrap();
    domain
}

pub fn check(stack: &Stack, domain: &Domain) {
    assert_eq!(domain.entries().len(), KEYS.len());
    for (key, entry) in domain.entries() {
        let bytes = stack.read(domain.address_of(entry).unwrap(), entry.size);
        assert!(bytes == Some(contents(key, entry.size)), "the bytes of {key}");
        assert_eq!(entry.value, key.as_bytes());
    }
}

/// Nothing of the engines is in the driver any more.
fn used(emulator: &Emulator) -> u64 {
    emulator.state().memory.used.values().sum()
}

#[test]
fn weights_outlive_the_engine_and_are_the_same_at_the_same_addresses_after_sleep() {
    assert!(built().join("libascendcl.so").exists());
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        let ready = Line::new();
        let writer = fork(|| {
            let stack = Stack::with_device(0);
            let _weights = write(&stack, &service);
            ready.send(1);
            std::thread::sleep(Duration::from_secs(600));
        });
        ready.receive();
        writer.kill();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                fork(|| {
                    let stack = Stack::with_device(0);
                    let mut weights = open(&service, Mode::WriteOrRead).unwrap();
                    assert!(!weights.writes() && weights.is_awake());
                    check(&stack, &weights);
                    let address = weights.address();
                    for _ in 0..2 {
                        weights.sleep().unwrap();
                        weights.sleep().unwrap();
                        assert!(!weights.is_awake() && stack.read(address, 1).is_none());
                        weights.wake(LONG).unwrap();
                        assert_eq!(weights.address(), address);
                        check(&stack, &weights);
                    }
                    weights.close().unwrap();
                    assert!(stack.read(address, 1).is_none());
                    assert_eq!(weights.wake(LONG).unwrap_err().kind(), Kind::Invalid);
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join());
        // The two clients understand each other.
        fork(|| check_weights(&service.client().read(&device(), &name("w"), &options()).unwrap(), KEYS)).join();
        service.end(emulator);
    });
}

#[test]
fn a_restart_costs_two_driver_calls_for_each_handle_however_many_tensors_there_are() {
    const GIB: u64 = 1 << 30;
    for tensors in [10, 1000] {
        isolated(Config { hbm: 32 * GIB, ..Config::default() }, |emulator| {
            let service = Service::start("");
            let (ready, go) = (Line::new(), Line::new());
            let writer = fork(|| {
                let _stack = Stack::with_device(0);
                let client = Client::new(service.path());
                let mut weights = client.open(&name("w"), Mode::Write, 16 * GIB, &options()).unwrap();
                for number in 0..tensors {
                    weights.put(&format!("layers.{number}"), 15 * GIB / tensors, b"bf16", LONG).unwrap();
                }
                weights.commit().unwrap();
                ready.send(weights.allocations() as u64);
            });
            let handles = ready.receive();
            writer.join();
            assert!(handles >= 10, "{handles}");
            let engine = fork(|| {
                let _stack = Stack::with_device(0);
                ready.send(1);
                go.receive();
                let weights = open(&service, Mode::Read).unwrap();
                assert_eq!(weights.entries().len() as u64, tensors);
                ready.send(2);
                go.receive();
            });
            ready.receive();
            emulator.record();
            go.send(1);
            ready.receive();
            let records = emulator.records();
            // The keeper is called when the engine has its role. Before that, the vendor's library
            // looks for its devices.
            let keeper = service.keeper.id() as i32;
            let answered = records.iter().position(|it| it.pid == keeper && it.cmd == Some("MEM_SET_PID")).unwrap();
            let mut names = BTreeMap::new();
            for record in records[answered..].iter().filter(|record| record.pid == engine.pid()) {
                *names.entry(record.cmd.unwrap_or(record.call)).or_insert(0u64) += 1;
            }
            let calls: u64 = names.values().sum();
            eprintln!("{tensors} tensors, {handles} handles: {calls} driver calls: {names:?}");
            assert!(calls <= 2 * handles + 12, "{tensors} tensors: {calls} calls for {handles} handles: {names:?}");
            go.send(1);
            engine.join();
            service.end(emulator);
        });
    }
}

#[test]
fn a_front_is_killed_and_replaced_while_engines_are_awake_and_asleep() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let (ready, go) = (Line::new(), Line::new());
        let engine = fork(|| {
            let stack = Stack::with_device(0);
            let mut awake = write(&stack, &service);
            let mut asleep = open(&service, Mode::Read).unwrap();
            asleep.sleep().unwrap();
            for _ in 0..2 {
                ready.send(1);
                go.receive();
                check(&stack, &awake);
                asleep.wake(LONG).unwrap();
                check(&stack, &asleep);
                awake.sleep().unwrap();
                std::mem::swap(&mut awake, &mut asleep);
            }
        });
        ready.receive();
        service.kill_front();
        go.send(1);
        ready.receive();
        let mut newer = service.replace_front();
        go.send(1);
        engine.join();
        service.end(emulator);
        newer.wait().unwrap();
    });
}

#[test]
fn a_writer_that_is_killed_leaves_nothing() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let before = used(emulator);
        let ready = Line::new();
        let writer = fork(|| {
            let _stack = Stack::with_device(0);
            let mut weights = open(&service, Mode::Write).unwrap();
            weights.put("k", 8 * MIB, b"", LONG).unwrap();
            ready.send(1);
            std::thread::sleep(Duration::from_secs(600));
        });
        ready.receive();
        assert!(used(emulator) >= before + 8 * MIB);
        writer.kill();
        assert_eq!(service.settled().domains.len(), 0);
        assert_eq!(used(emulator), before);
        service.end(emulator);
    });
}

#[test]
fn an_update_in_place_waits_for_readers_that_are_awake_and_a_changed_layout_is_named() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        fork(|| {
            let stack = Stack::with_device(0);
            drop(write(&stack, &service));
            let mut reader = open(&service, Mode::Read).unwrap();
            let client = Client::new(service.path());
            let update = |wait| client.open(&name("w"), Mode::Update, 0, &OpenOptions::new().wait(wait));
            assert_eq!(update(SHORT).err().map(|error| error.kind()), Some(Kind::Timeout));
            reader.sleep().unwrap();
            let mut writer = update(LONG).unwrap();
            let address = writer.put("embed", MIB, b"embed", LONG).unwrap();
            stack.write(address, &[7; 512]);
            assert!(writer.put("new", 1, b"", LONG).is_err_and(|error| error.kind() == Kind::NoKey));
            // It is not finished: nobody maps it.
            assert_eq!(reader.wake(SHORT).unwrap_err().kind(), Kind::Timeout);
            assert!(!reader.is_awake());
            writer.commit().unwrap();
            writer.close().unwrap();
            drop(writer);
            reader.wake(LONG).unwrap();
            let embed = reader.address_of(&reader.entries()["embed"]).unwrap();
            assert_eq!(stack.read(embed, 512), Some(vec![7; 512]));
            // Another type of the same bytes.
            reader.sleep().unwrap();
            let mut writer = update(LONG).unwrap();
            writer.put("embed", MIB, b"another type", LONG).unwrap();
            writer.commit().unwrap();
            drop(writer);
            for _ in 0..2 {
                let stale = reader.wake(LONG).unwrap_err();
                assert_eq!(stale.kind(), Kind::Stale);
                assert!(stale.to_string().contains("embed has another"), "{stale}");
                assert!(!reader.is_awake() && stack.read(embed, 1).is_none());
            }
        })
        .join();
        service.end(emulator);
    });
}

#[test]
fn nobody_falls_asleep_when_the_keeper_is_gone_and_who_is_awake_goes_on() {
    isolated(Config::default(), |emulator| {
        let mut service = Service::start("");
        let (ready, go) = (Line::new(), Line::new());
        let engine = fork(|| {
            let stack = Stack::with_device(0);
            let mut weights = write(&stack, &service);
            ready.send(1);
            go.receive();
            let refused = weights.sleep().unwrap_err();
            assert!(matches!(refused.kind(), Kind::KeeperGone | Kind::Unreachable), "{refused}");
            assert!(weights.is_awake());
            check(&stack, &weights);
        });
        ready.receive();
        service.kill_keeper();
        go.send(1);
        engine.join();
        service.end_of_driver(emulator);
    });
}
