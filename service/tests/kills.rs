//! `kill -9` of fronts, keepers and engines, at random and at each step.
//!
//! The storm kills some hundreds; `ASCEND_VMM_KILLS=10000 cargo test --release -p
//! ascend-vmm-service --test kills storm -- --nocapture` kills as many as one likes, and prints
//! what happened.

mod support;

use ascend_emulator::{Client as Engine, Config, Line, fork, isolated, isolated_leaky};
use ascend_vmm::Device;
use ascend_vmm_service::protocol::Code;
use ascend_vmm_service::{Client, DomainName, Error, Mode, OpenOptions, Opened, Reader, Writer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid, getppid};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use support::{KEYS, MIB, Service, check_weights, device, name, options, write_weights};

/// Numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A tensor that its value describes: the value is the byte with which it is filled.
const TENSOR: u64 = 64 << 10;

fn fill(writer: &mut Writer, byte: u8) -> Result<(), Error> {
    for key in ["one", "other"] {
        writer.put(key, TENSOR, &[byte])?.fill(byte)?;
    }
    Ok(())
}

/// What is read is whole: it is what its writer said that it is.
fn check(reader: &Reader) {
    let mut bytes = vec![0; TENSOR as usize];
    let values: Vec<u8> = reader.entries().values().map(|entry| entry.value[0]).collect();
    assert!(values.len() == 2 && values[0] == values[1], "{values:?}");
    for key in ["one", "other"] {
        reader.get(key).unwrap().read(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == values[0]), "{key} of version {}", reader.version());
    }
}

/// One thing that an engine does.
fn step(client: &Client, device: &Device, dice: &mut Dice) -> Result<(), Error> {
    let short = OpenOptions::new().wait(Duration::from_millis(dice.below(40)));
    let byte = dice.below(250) as u8;
    let domain = name(["storm/a", "storm/b"][dice.below(2) as usize]);
    match dice.below(8) {
        0 | 1 => {
            let mut writer = client.write(device, &domain, Mode::Write, 2 * MIB, &short)?;
            fill(&mut writer, byte)?;
            check(&writer.commit()?);
        }
        2 => {
            let mut writer = client.write(device, &domain, Mode::Update, 0, &short)?;
            fill(&mut writer, byte)?;
            check(&writer.commit()?);
        }
        3 => {
            let mut writer = client.write(device, &name("discards/a"), Mode::Discard, 2 * MIB, &short)?;
            fill(&mut writer, byte)?;
            check(&writer.commit()?);
        }
        4 => {
            let mut lender = client.write(device, &name("kv"), Mode::Write, 8 * MIB, &short.lends(true))?;
            lender.allocate(2 * MIB, "page")?;
            lender.reclaim()?;
            lender.free_last()?;
        }
        5 => match client.write_or_read(device, &domain, 2 * MIB, &short)? {
            Opened::Reader(reader) => check(&reader),
            Opened::Writer(mut writer) => {
                fill(&mut writer, byte)?;
                check(&writer.commit()?);
            }
        },
        _ => {
            let mut reader = client.read(device, &domain, &short)?;
            check(&reader);
            let address = reader.address();
            reader.sleep()?;
            reader.wake()?;
            assert_eq!(reader.address(), address);
            check(&reader);
        }
    }
    Ok(())
}

/// An engine that works until it is killed, told to stop, or the test is no more.
fn engine(client: &Client, stop: &Path, seed: u64) -> Engine {
    let test = getpid();
    fork(|| {
        let device = device();
        let mut dice = Dice(seed);
        while !stop.exists() && getppid() == test {
            match step(client, &device, &mut dice) {
                Ok(()) | Err(Error::Service(_) | Error::Unreachable { .. } | Error::Stale { .. }) => {}
                // The keeper was killed, and the memory went with it.
                Err(Error::Memory(error)) => assert!(!error.to_string().is_empty()),
                Err(error) => panic!("{error}"),
            }
        }
    })
}

#[test]
fn storm() {
    let kills: u64 = std::env::var("ASCEND_VMM_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(200);
    let seed: u64 = std::env::var("ASCEND_VMM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5EED);
    let begun = Instant::now();
    for round in 0..kills.div_ceil(ROUND) {
        let number = ROUND.min(kills - round * ROUND);
        blow(number, seed + round * 1001);
        println!("{} kills after {:?}", round * ROUND + number, begun.elapsed());
    }
}

/// Kills in the life of one emulated machine.
const ROUND: u64 = 200;

fn blow(kills: u64, seed: u64) {
    isolated(Config { hbm: 1 << 30, ..Config::default() }, |emulator| {
        let mut service = Service::start("resume-seconds = 1\nreclaim-seconds = 1");
        let client = service.client();
        let stop = service.directory.join("stop");
        let mut dice = Dice(seed);
        let mut engines: Vec<Engine> = (0..3).map(|number| engine(&client, &stop, seed + 77 * number + 1)).collect();
        for number in 0..kills {
            std::thread::sleep(Duration::from_micros(dice.below(30_000)));
            // Every fiftieth is a keeper, which takes everything with it.
            let target = if number % 50 == 49 { "keeper" } else { ["front", "engine"][dice.below(2) as usize] };
            match target {
                "front" => {
                    let before = service.status();
                    kill(Pid::from_raw(before.front), Signal::SIGKILL).unwrap();
                    let after = service.status();
                    assert_eq!(after.keeper, before.keeper);
                    let versions: BTreeMap<DomainName, u64> =
                        after.domains.into_iter().map(|domain| (domain.name, domain.version)).collect();
                    for domain in before.domains.iter().filter(|domain| domain.name.as_str().starts_with("storm/")) {
                        let now = versions.get(&domain.name).copied().unwrap_or(0);
                        assert!(now >= domain.version, "{domain:?} became version {now}");
                    }
                }
                "engine" => {
                    let place = dice.below(engines.len() as u64) as usize;
                    engines.swap_remove(place).kill();
                    engines.push(engine(&client, &stop, dice.0 | 1));
                }
                _ => {
                    service.kill_keeper();
                    service = service.replaced();
                }
            }
        }
        std::fs::write(&stop, []).unwrap();
        engines.into_iter().for_each(Engine::join);
        // What roles of killed engines hold is given back.
        let deadline = Instant::now() + Duration::from_secs(60);
        let (status, used) = loop {
            let status = service.status();
            let used: u64 = emulator.state().memory.used.values().sum();
            let held: u64 = status.devices.iter().map(|device| device.held).sum();
            let idle = status.domains.iter().all(|it| it.readers + it.uncommitted + it.superseded == 0);
            if idle && held == used {
                break (status, used);
            }
            assert!(Instant::now() < deadline, "{used} bytes are used: {status:#?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(status.domains.iter().map(|domain| domain.bytes).sum::<u64>(), used);
        let device = device();
        for domain in status.domains.iter().filter(|domain| domain.state == "committed") {
            check(&client.read(&device, &domain.name, &options()).unwrap());
        }
        drop(device);
        service.end(emulator);
    });
}

/// Kills one process while another is in the middle of a call of the driver.
fn kill_in(command: &'static str, victim: &'static str) {
    isolated_leaky(Config::default(), |emulator| {
        let mut service = Service::start("resume-seconds = 1");
        let client = service.client();
        fork(|| drop(write_weights(&client, &device(), &name("w"), KEYS))).join();
        let committed: u64 = emulator.state().memory.used.values().sum();
        let (ready, go) = (Line::new(), Line::new());
        let writer = fork(|| {
            let device = device();
            ready.send(1);
            go.receive();
            let wrote = || -> Result<Writer, Error> {
                let mut writer = client.write(&device, &name("w"), Mode::Write, 8 * MIB, &options())?;
                writer.put("norm", MIB, b"")?.fill(7)?;
                Ok(writer)
            };
            let wrote = wrote();
            // It may hear that the keeper is gone before it is killed itself.
            assert!(wrote.is_ok() || victim == "keeper", "{:?}", wrote.err());
            std::thread::sleep(Duration::from_secs(600));
        });
        ready.receive();
        let hold = emulator.hold(command);
        go.send(1);
        hold.wait();
        match victim {
            "front" => {
                let front = children_of(service.keeper.id());
                assert_eq!(front.len(), 1);
                kill(Pid::from_raw(front[0]), Signal::SIGKILL).unwrap();
                hold.release();
                writer.kill();
            }
            "engine" => {
                kill(Pid::from_raw(writer.pid()), Signal::SIGKILL).unwrap();
                hold.release();
                writer.kill();
            }
            _ => {
                service.keeper.kill().unwrap();
                hold.release();
                service.keeper.wait().unwrap();
                writer.kill();
                service = service.replaced();
            }
        }
        // What was committed is there, unless its owner was killed; nothing else is.
        let expected = if victim == "keeper" { 0 } else { committed };
        let deadline = Instant::now() + Duration::from_secs(60);
        let used = || emulator.state().memory.used.values().sum::<u64>();
        while used() != expected {
            assert!(Instant::now() < deadline, "{command}, {victim}: {} bytes, not {expected}", used());
            std::thread::sleep(Duration::from_millis(5));
        }
        let checker = fork(|| match client.read(&device(), &name("w"), &OpenOptions::new().wait(Duration::ZERO)) {
            Ok(reader) => check_weights(&reader, KEYS),
            Err(error) => assert!(victim == "keeper" && error.code() == Some(Code::Timeout), "{error}"),
        });
        checker.join();
        drop(service);
    });
}

fn children_of(process: u32) -> Vec<i32> {
    let parent = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent(pid) == Some(process)).collect()
}

#[test]
fn each_process_may_be_killed_in_the_middle_of_each_call_of_the_keeper() {
    for command in ["MEM_CREATE", "MEM_EXPORT", "MEM_SET_PID"] {
        for victim in ["front", "engine", "keeper"] {
            kill_in(command, victim);
        }
    }
}

#[test]
fn each_process_may_be_killed_in_the_middle_of_each_call_of_an_engine() {
    for command in ["MEM_IMPORT", "MEM_MAP"] {
        for victim in ["front", "engine", "keeper"] {
            kill_in(command, victim);
        }
    }
}
