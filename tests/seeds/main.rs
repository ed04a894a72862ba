//! Programs of several processes and threads under seeded schedules of the emulated driver.
//!
//! Each scenario is a program: this test binary, run again for one test with [`CLIENT`] set. This
//! runs more seeds than a test run has time for:
//!
//! ```sh
//! export ASCEND_SCENARIO=1
//! ascend-vmm emulate --seeds 0..10000 --jobs 2 -- target/debug/deps/seeds-… sharing --exact
//! ```

#[path = "../support/mod.rs"]
mod support;

use ascend_emulator::oracle::{self, Contents};
use ascend_emulator::schedule::{Event, Schedule};
use ascend_emulator::{Config, Emulator};
use ascend_vmm::pool::{Block, Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::share::{self, Broker, BrokerOptions};
use ascend_vmm::{Error, LogicalId, Session};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};
use support::processes::{Peer, start};
use support::{Directory, MIB2, PATIENCE, contents, device, mapped};

/// Set in the program of a scenario.
const CLIENT: &str = "ASCEND_SCENARIO";

/// Seeds of each scenario without and with processes that are killed, and random ones.
const FIXED: u64 = 24;
const WITH_KILLS: u64 = 6;
const RANDOM: u64 = 2;

/// Bytes that a scenario writes and reads at once.
const SIZE: usize = 4096;

/// Runs a scenario with its seeds, or is its program.
fn scenario(name: &str, config: Config, program: fn()) {
    if std::env::var_os(CLIENT).is_some() {
        return program();
    }
    let run = |schedule: Schedule| {
        let (seed, kills) = (schedule.seed, schedule.events.contains(&Event::Kill));
        let emulator = Emulator::start(Config { schedule: Some(schedule), ..config.clone() }).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]).env(CLIENT, "1");
        let output = Stdio::piped();
        let child = emulator.spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output)).unwrap();
        let output = child.wait_with_output().unwrap();
        while emulator.schedule().is_some_and(|summary| !summary.living.is_empty()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let summary = emulator.schedule().unwrap();
        // Of a process that lost another one, only what it left in the driver matters.
        assert!(
            output.status.success() || kills,
            "{name}: {summary}\n{}\n{}",
            summary.events.join("\n"),
            String::from_utf8_lossy(&output.stderr)
        );
        let found = oracle::findings(&emulator);
        assert!(found.is_empty(), "{name} ({seed}): {summary}\n{}\n{}", summary.events.join("\n"), found.join("\n"));
    };
    for seed in 0..FIXED {
        run(Schedule::seed(seed).with(&Event::HARMLESS));
    }
    for seed in 0..WITH_KILLS {
        run(Schedule::seed(seed).with(&[Event::Kill, Event::Stop, Event::Late]));
    }
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    for seed in (u64::from(time.subsec_nanos())..).take(RANDOM as usize) {
        println!("{name}: random seed {seed}");
        run(Schedule::seed(seed).with(&Event::HARMLESS));
    }
}

/// A host whose devices start their processes when asked by the client, as real ones do.
fn host() -> Config {
    Config::default()
}

/// Repeats what the pool refuses while a tag falls asleep, wakes or has slices.
fn eventually<T>(mut act: impl FnMut() -> Result<T, Error>) -> T {
    loop {
        match act() {
            Ok(done) => return done,
            Err(Error::Invalid(_) | Error::InUse { .. }) => std::thread::yield_now(),
            Err(error) if error.is_out_of_memory() => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

#[track_caller]
fn check(block: &Block, expected: Contents) {
    let mut bytes = vec![0; SIZE];
    eventually(|| block.read(0, &mut bytes));
    expected.check(0, &bytes).unwrap();
}

/// Two processes write to one memory in turns; the exporter drops its own while it is in use.
#[test]
fn sharing() {
    scenario("sharing", host(), || {
        let other = start(|channel| {
            let device = device(1);
            let memory = channel.import(&device);
            let mapping = mapped(&memory);
            Contents::of(1, 1).check(0, &contents(&mapping, 0, SIZE)).unwrap();
            mapping.write(0, &Contents::of(2, 2).bytes(0, SIZE)).unwrap();
            channel.signal();
            channel.wait();
            Contents::of(2, 2).check(0, &contents(&mapping, 0, SIZE)).unwrap();
        });
        let memory = device(0).create(MIB2).unwrap();
        let mapping = mapped(&memory);
        mapping.write(0, &Contents::of(1, 1).bytes(0, SIZE)).unwrap();
        let export = other.export(&memory);
        other.wait();
        Contents::of(2, 2).check(0, &contents(&mapping, 0, SIZE)).unwrap();
        other.signal();
        drop((mapping, export, memory));
        other.join();
    });
}

/// Two processes ask a broker for memory at once.
#[test]
fn broker() {
    scenario("broker", host(), || {
        let directory = Directory::new();
        let path = directory.join("broker");
        let clients: Vec<Peer> = (0..2)
            .map(|_| {
                start(|channel| {
                    channel.wait();
                    let socket = UnixStream::connect(&path).unwrap();
                    let memories = share::request(&socket, "pages", &device(0), PATIENCE).unwrap();
                    for (number, memory) in (0..).zip(&memories) {
                        Contents::of(1, number).check(0, &support::read(memory, SIZE)).unwrap();
                    }
                    assert_eq!(memories.len(), 2);
                })
            })
            .collect();
        let pages: Vec<_> = (0..2).map(|_| device(0).create(MIB2).unwrap()).collect();
        for (number, page) in (0..).zip(&pages) {
            support::write(page, &Contents::of(1, number).bytes(0, SIZE));
        }
        let listener = UnixListener::bind(&path).unwrap();
        let session = Session::current().unwrap();
        let broker = Broker::start(&session, listener, BrokerOptions::default(), move |_| Ok(pages.to_vec())).unwrap();
        clients.iter().for_each(|client| client.signal());
        clients.into_iter().for_each(Peer::join);
        drop(broker);
    });
}

/// A thread writes by address while another puts the tag to sleep: what was written stays.
#[test]
fn sleep_beside_writes() {
    scenario("sleep_beside_writes", host(), || {
        let session = Session::open().unwrap();
        let pool = Pool::new(&PageCache::new(&session.device(LogicalId(0)).unwrap()));
        let block = pool.allocate(SIZE as u64, 1, Tag(1)).unwrap();
        let (written, address) = (Mutex::new(0), block.address());
        block.write(0, &Contents::of(1, 0).bytes(0, SIZE)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..12 {
                    let slice = session.slice_at(address, SIZE as u64);
                    if slice.is_ok_and(|slice| slice.write(&Contents::of(1, round).bytes(0, SIZE)).is_ok()) {
                        *written.lock().unwrap() = round;
                    }
                }
            });
            for _ in 0..3 {
                std::thread::yield_now();
                let _ = pool.sleep(Tag(1), Keep::Host, |_| ());
                eventually(|| pool.wake(&[Tag(1)], |_| ()));
            }
        });
        check(&block, Contents::of(1, written.into_inner().unwrap()));
    });
}

/// A thread resets a tag and uses it anew, while another still copies.
#[test]
fn reset_beside_copies() {
    scenario("reset_beside_copies", host(), || {
        let session = Session::open().unwrap();
        let pool = Pool::new(&PageCache::new(&session.device(LogicalId(0)).unwrap()));
        let block = pool.allocate(SIZE as u64, 1, Tag(1)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..4 {
                    // After the reset the block is none, and says so.
                    let _ = block.write(0, &Contents::of(1, round).bytes(0, SIZE));
                }
            });
            std::thread::yield_now();
            eventually(|| pool.reset(Tag(1)));
            let next = pool.allocate(SIZE as u64, 1, Tag(1)).unwrap();
            next.write(0, &Contents::of(2, 1).bytes(0, SIZE)).unwrap();
            check(&next, Contents::of(2, 1));
            std::thread::yield_now();
            check(&next, Contents::of(2, 1));
        });
    });
}

/// A thread gives free memory back while another resets the tag and uses the memory again.
#[test]
fn trim_beside_reset() {
    scenario("trim_beside_reset", host(), || {
        let session = Session::open().unwrap();
        // A hook that takes a while, as one that tells other processes does.
        let options = PoolOptions::default().before_unmap(|_| assert!(std::fs::exists("/dev/davinci0").unwrap()));
        let pool = Pool::with(&PageCache::new(&session.device(LogicalId(0)).unwrap()), options);
        drop(pool.allocate(MIB2, 1, Tag(1)).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| pool.trim().map(drop).unwrap());
            std::thread::yield_now();
            eventually(|| pool.reset(Tag(1)));
            let block = pool.allocate(MIB2, 1, Tag(1)).unwrap();
            block.write(0, &Contents::of(2, 1).bytes(0, SIZE)).unwrap();
            check(&block, Contents::of(2, 1));
            std::thread::yield_now();
            check(&block, Contents::of(2, 1));
        });
    });
}

/// Two processes with more memory than the device has: each sleeps for the other.
#[test]
fn two_pools_on_a_small_device() {
    let small = Config { devices: 1, hbm: 3 * MIB2, ..host() };
    scenario("two_pools_on_a_small_device", small, || {
        let work = |owner: u16| {
            let session = Session::open().unwrap();
            let pool = Pool::new(&PageCache::new(&session.device(LogicalId(0)).unwrap()));
            let block = eventually(|| pool.allocate(2 * MIB2, 1, Tag(1)));
            for round in 0..2 {
                let expected = Contents::of(owner, round);
                block.write(0, &expected.bytes(0, SIZE)).unwrap();
                eventually(|| pool.sleep(Tag(1), Keep::Host, |_| ()));
                eventually(|| pool.wake(&[Tag(1)], |_| ()));
                check(&block, expected);
            }
        };
        let other = start(|_| work(2));
        work(1);
        other.join();
    });
}

/// Processes and threads open and close their sessions at once, with a device process each.
#[test]
fn sessions_come_and_go() {
    scenario("sessions_come_and_go", host(), || {
        let use_a_page = |number: u32| {
            let session = Session::current().unwrap();
            let memory = session.device(LogicalId(number)).unwrap().create(MIB2).unwrap();
            mapped(&memory).write(0, &Contents::of(1, 1).bytes(0, SIZE)).unwrap();
        };
        let other = start(|_| (0..2).for_each(use_a_page));
        std::thread::scope(|scope| {
            scope.spawn(|| use_a_page(0));
            use_a_page(1);
        });
        other.join();
    });
}
