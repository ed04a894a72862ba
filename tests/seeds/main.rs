//! What programs of several processes and threads promise under seeded schedules of the emulated
//! driver: see `support/scenarios.rs`.

#[path = "../support/scenarios.rs"]
mod scenarios;
#[path = "../support/mod.rs"]
mod support;

use ascend_emulator::Config;
use ascend_emulator::oracle::Contents;
use ascend_vmm::pool::{Block, Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::share::{self, Broker, BrokerOptions};
use ascend_vmm::{Device, Error, LogicalId, MemoryKind, Session};
use scenarios::{holds, scenario};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;
use support::processes::{Peer, start};
use support::{Directory, MIB2, PATIENCE, contents, device, mapped};

/// Bytes that a scenario writes and reads at once.
const SIZE: usize = 4096;

/// A host whose devices start their processes when asked by the client, as real ones do.
fn host() -> Config {
    Config::default()
}

/// Repeats what the pool refuses while a tag falls asleep, wakes or has slices.
fn eventually<T>(mut act: impl FnMut() -> Result<T, Error>) -> T {
    let mut last = None;
    for _ in 0..20_000 {
        match act() {
            Ok(done) => return done,
            Err(error @ (Error::Invalid(_) | Error::InUse { .. })) => last = Some(error),
            Err(error) if error.is_out_of_memory() => last = Some(error),
            Err(error) => panic!("{error}"),
        }
        std::thread::yield_now();
    }
    holds(Err(format!("this does not end: {last:?}")))
}

#[track_caller]
fn check(block: &Block, expected: Contents) {
    let mut bytes = vec![0; SIZE];
    eventually(|| block.read(0, &mut bytes));
    holds(expected.check(0, &bytes));
}

/// Two processes write to one memory in turns; the exporter drops its own while it is in use.
#[test]
fn sharing() {
    scenario("sharing", &host(), 1, || {
        let other = start(|channel| {
            let device = device(1);
            let memory = channel.import(&device);
            let mapping = mapped(&memory);
            holds(Contents::of(1, 1).check(0, &contents(&mapping, 0, SIZE)));
            mapping.write(0, &Contents::of(2, 2).bytes(0, SIZE)).unwrap();
            channel.signal();
            channel.wait();
            holds(Contents::of(2, 2).check(0, &contents(&mapping, 0, SIZE)));
        });
        let memory = device(0).create(MIB2).unwrap();
        let mapping = mapped(&memory);
        mapping.write(0, &Contents::of(1, 1).bytes(0, SIZE)).unwrap();
        let export = other.export(&memory);
        other.wait();
        holds(Contents::of(2, 2).check(0, &contents(&mapping, 0, SIZE)));
        other.signal();
        drop((mapping, export, memory));
        other.join();
    });
}

/// Two processes ask a broker for memory at once.
#[test]
fn broker() {
    scenario("broker", &host(), 1, || {
        let directory = Directory::new();
        let path = directory.join("broker");
        let clients: Vec<Peer> = (0..2)
            .map(|_| {
                start(|channel| {
                    channel.wait();
                    let socket = UnixStream::connect(&path).unwrap();
                    let memories = share::request(&socket, "pages", &device(0), PATIENCE).unwrap();
                    for (number, memory) in (0..).zip(&memories) {
                        holds(Contents::of(1, number).check(0, &support::read(memory, SIZE)));
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
        // Time passes also for a client that is stopped or not chosen.
        let options = BrokerOptions::default().timeout(PATIENCE);
        let broker = Broker::start(&session, listener, options, move |_| Ok(pages.to_vec())).unwrap();
        clients.iter().for_each(|client| client.signal());
        clients.into_iter().for_each(Peer::join);
        drop(broker);
    });
}

/// A thread writes by address while another puts the tag to sleep: what was written stays.
#[test]
fn sleep_beside_writes() {
    scenario("sleep_beside_writes", &host(), 1, || {
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
    scenario("reset_beside_copies", &host(), 1, || {
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
    scenario("trim_beside_reset", &host(), 1, || {
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
    scenario("two_pools_on_a_small_device", &small, 1, || {
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
    scenario("sessions_come_and_go", &host(), 1, || {
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

/// Uses memory in every way of one process, as far as nothing fails.
fn use_memory(session: &Session, device: &Device, round: u16) -> Result<(), Error> {
    let expected = Contents::of(1, round);
    let memory = device.create(2 * MIB2)?;
    let reservation = session.reserve(4 * MIB2)?;
    let mapping = reservation.map(0, &memory)?;
    let again = reservation.map(2 * MIB2, &memory)?;
    mapping.write(0, &expected.bytes(0, SIZE))?;
    let export = memory.export()?;
    let mut bytes = vec![0; SIZE];
    again.read(0, &mut bytes)?;
    holds(expected.check(0, &bytes));
    drop(export);
    let pool = Pool::new(&PageCache::new(device));
    let blocks: Vec<Block> = (1..4).map(|tag| pool.allocate(MIB2, 1, Tag(tag))).collect::<Result<_, _>>()?;
    for (number, block) in (round..).zip(&blocks) {
        block.write(0, &Contents::of(2, number).bytes(0, SIZE))?;
    }
    let slept = pool.sleep(Tag(2), Keep::Host, |_| ());
    pool.wake(&[Tag(2)], |_| ())?;
    slept?;
    for (number, block) in (round..).zip(&blocks) {
        block.read(0, &mut bytes)?;
        holds(Contents::of(2, number).check(0, &bytes));
    }
    Ok(())
}

/// What the library could not make, or not give back the first time, costs nothing afterwards.
#[test]
fn failures_lose_nothing() {
    scenario("failures_lose_nothing", &host(), 1, || {
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let free = device.memory_info(MemoryKind::Hbm).unwrap().huge_free;
        for round in 0..4 {
            match use_memory(&session, &device, round) {
                // What a device that is gone keeps cannot be told.
                Err(error) if error.is_device_lost() => panic!("{error}"),
                Err(error) => eprintln!("round {round}: {error}"),
                Ok(()) => {}
            }
        }
        // One that was lost while memory was dropped says so only now.
        drop(eventually(|| device.create(MIB2)));
        let left = session.statistics();
        if (left.physical, left.reserved, left.mapped, left.mappings, left.left) != (0, 0, 0, 0, 0) {
            holds(Err(format!("the library still holds {left:?}")))
        }
        let after = device.memory_info(MemoryKind::Hbm).unwrap().huge_free;
        if after != free {
            holds(Err(format!("{free} bytes were free before, {after} after")))
        }
    });
}
