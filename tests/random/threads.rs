//! Several threads that call at random, on a driver that works and on one that refuses: the results
//! are not predicted, but nothing may break.

use crate::support::random::{Random, Seed, seeds, steps};
use crate::support::{MIB2, assert_nothing_left, device, open, plain, refused_in_child};
use ascend_emulator::{Config, Emulator, fork, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::{Error, Location, PhysicalMemory, Reservation, Session};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What several threads use at once.
#[derive(Default)]
struct Common {
    /// Reservations into which every thread maps, and memory that every thread maps.
    addresses: Mutex<Vec<Arc<Reservation>>>,
    memories: Mutex<Vec<PhysicalMemory>>,
    done: AtomicU64,
}

/// One round of one thread. Others do the same, so there is no model; but a thread's own memory
/// must contain what the thread wrote.
fn round(random: &mut Random, common: &Common, devices: u64) -> Result<(), Error> {
    // The first thread opens the session, the last one closes it.
    let session = Session::current()?;
    let device = session.device(LogicalId(random.below(devices) as u32))?;
    let size = (random.below(3) + 1) * MIB2;
    let own = if random.one_in(4) { session.host()?.create(size) } else { device.create(size) }?;
    let reservation = Arc::new(session.reserve(2 * size)?);
    let mapping = reservation.map(random.below(size / MIB2 + 1) * MIB2, &own)?;
    let range = random.range(size);
    let bytes = random.bytes((range.end - range.start) as usize);
    let running = mapping.write_async(range.start, bytes.clone()).map_err(|failed| failed.error)?;
    match random.below(6) {
        0 => common.addresses.lock().unwrap().push(reservation.clone()),
        1 => {
            let memory = device.create(MIB2)?;
            common.memories.lock().unwrap().push(memory);
        }
        2 => {
            let popped = common.addresses.lock().unwrap().pop();
            drop(popped);
        }
        3 => {
            let popped = common.memories.lock().unwrap().pop();
            drop(popped);
        }
        _ => {}
    }
    if let Some(others) = one_of(&common.addresses, random) {
        use_others(&session, &others, one_of(&common.memories, random), random)?;
    }
    if random.one_in(4) && own.location() != Location::Host {
        mapping.grant(&session.device(LogicalId(random.below(devices) as u32))?)?;
    }
    assert!(running.wait().map_err(|failed| failed.error)? == bytes);
    let mut back = vec![0; bytes.len()];
    mapping.read(range.start, &mut back)?;
    assert!(back == bytes, "private memory was written by another");
    if random.one_in(2) {
        let offset = mapping.offset();
        drop(mapping);
        // At the same address again, unless another thread has mapped there meanwhile.
        if let Ok(mapping) = reservation.map(offset, &own) {
            mapping.read(range.start, &mut back)?;
            assert!(back == bytes, "private memory was written by another");
        }
    }
    if random.one_in(4) {
        drop(session);
        drop(device);
    }
    Ok(())
}

fn one_of<T: Clone>(list: &Mutex<Vec<T>>, random: &mut Random) -> Option<T> {
    let list = list.lock().unwrap();
    (!list.is_empty()).then(|| list[random.index(list.len())].clone())
}

/// Uses what others use at the same time: anything may be refused, but a copy to a mapping that was
/// made works.
fn use_others(
    session: &Session,
    others: &Reservation,
    memory: Option<PhysicalMemory>,
    random: &mut Random,
) -> Result<(), Error> {
    let offset = random.below(others.size() / MIB2) * MIB2;
    if let Some(Ok(mapping)) = memory.map(|memory| others.map(offset, &memory)) {
        if random.one_in(2) {
            mapping.fill(0, 4096, 1)?;
        }
        match mapping.unmap() {
            Ok(()) => {}
            // Another thread copies.
            Err(failed) if matches!(failed.error, Error::InUse { .. }) => {}
            Err(failed) => return Err(failed.error),
        }
    }
    if let Ok(slice) = others.slice(random.below(others.size() - 64), 64) {
        slice.read(&mut [0; 64])?;
    }
    let address = others.address() + random.below(others.size());
    session.memory_at(address);
    session.mapping_at(address);
    others.mappings();
    Ok(())
}

fn threads(emulator: &Emulator, devices: u64, count: u64) {
    for seed in seeds(count) {
        let _printed = Seed(seed);
        let common = Common::default();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let common = &common;
                scope.spawn(move || {
                    let mut random = Random(seed << 8 | thread);
                    for _ in 0..steps(40) {
                        round(&mut random, common, devices).unwrap();
                        common.done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(common.done.load(Ordering::Relaxed), 4 * steps(40));
        drop(common);
        assert_nothing_left(emulator);
        emulator.assert_no_traps();
    }
}

#[test]
fn threads_that_call_at_random_on_one_device_break_nothing() {
    on_each_generation(Config { devices: 1, ..plain() }, |_, emulator| threads(emulator, 1, 2));
}

#[test]
fn threads_that_call_at_random_on_three_devices_break_nothing() {
    on_each_generation(Config { devices: 3, ..plain() }, |_, emulator| threads(emulator, 3, 2));
}

/// Commands that fail now and then, and how.
const FAULTS: &[&str] = &[
    "MEM_UNMAP#{}=EBUSY",
    "FREE_PAGES#{}=EBUSY",
    "MEM_RELEASE#{}=EBUSY",
    "MEM_MAP#{}=ENOMEM",
    "MEM_CREATE#{}=ENOMEM",
    "ALLOC#{}=EBUSY",
    "UPDATE_HEAP#{}=ENOMEM",
    "MEMCPY#{}=EFAULT",
    "ASYNC_MEMCPY#{}=ENOMEM",
    "MEMCPY_RESULT_REFRESH#{}=ETIMEDOUT",
    "SETUP_DEVICE#{}=EBUSY",
    "CLOSE_DEVICE#{}=EBUSY",
    "PREPARE_CLOSE_DEVICE#{}=EBUSY",
    "INIT_PROCESS#{}=EAGAIN",
    "INIT_PROCESS#{}=ENOMEM",
    "ALLOC_PROC_STRUCT#{}=ENOMEM",
    "PREFETCH#{}=EBUSY",
    "MEM_SET_ACCESS#{}=ENOMEM",
    "OPEN#{}=EBUSY",
    "device1=silent:{}ms",
];

#[test]
fn threads_that_call_at_random_survive_a_driver_that_refuses_at_random() {
    on_each_generation(plain(), |_, emulator| {
        for seed in seeds(3) {
            let _printed = Seed(seed);
            let common = Common::default();
            let over = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let (common, over) = (&common, &over);
                    scope.spawn(move || {
                        let _over = Over(over);
                        let mut random = Random(seed << 8 | thread);
                        for _ in 0..steps(30) {
                            if let Err(error) = round(&mut random, common, 2) {
                                assert!(!error.to_string().is_empty());
                            }
                            common.done.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                let mut random = Random(seed << 8 | 0xFF);
                let mut done = 0;
                while over.load(Ordering::Acquire) < 3 {
                    // One fault for each few rounds.
                    if common.done.load(Ordering::Relaxed) >= done {
                        done = common.done.load(Ordering::Relaxed) + 2;
                        let fault = FAULTS[random.index(FAULTS.len())];
                        let nth = (random.below(3) + 1).to_string();
                        emulator.inject(fault.replace("{}", &nth).parse().unwrap());
                    }
                    std::thread::yield_now();
                }
            });
            drop(common);
            assert_nothing_left(emulator);
            // The remaining faults must occur before the next seed.
            while program().is_err() {}
        }
    });
}

/// Counts a thread's end, however it ends.
struct Over<'a>(&'a AtomicU64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Some of everything, several times in a row.
fn program() -> Result<(), Error> {
    for _ in 0..4 {
        let common = Common::default();
        round(&mut Random(0), &common, 2)?;
    }
    Ok(())
}

#[test]
fn children_forked_while_threads_call_end_without_disturbing_their_parent() {
    on_each_generation(plain(), |_, _| {
        let (session, device, peer) = (Session::current().unwrap(), device(0), device(1));
        let memory = device.create(MIB2).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.grant(&peer).unwrap();
        let mut all = Some((session, device, peer, memory, reservation, mapping));
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let over = &over;
                scope.spawn(move || {
                    let (mut random, common) = (Random(thread), Common::default());
                    while over.load(Ordering::Acquire) == 0 {
                        round(&mut random, &common, 2).unwrap();
                    }
                });
            }
            let _over = Over(&over);
            for _ in 0..20 {
                // The child's copies, dropped although other threads may hold any lock at the fork.
                let child = fork(|| {
                    let all = all.take().unwrap();
                    let (session, _, _, _, reservation, mapping) = &all;
                    refused_in_child(&session.reserve(MIB2).unwrap_err());
                    refused_in_child(&mapping.read(0, &mut [0]).unwrap_err());
                    refused_in_child(&session.device(LogicalId(1)).unwrap_err());
                    refused_in_child(&session.host().unwrap_err());
                    let address = reservation.address();
                    assert!(session.memory_at(address).is_none() && session.mapping_at(address).is_none());
                    assert!(reservation.mappings().is_empty());
                    drop(all);
                    // Its own session does not wait for threads that only the parent has.
                    let own = Session::open().unwrap();
                    own.device(LogicalId(1)).unwrap().create(MIB2).unwrap();
                });
                child.join();
            }
        });
        all.unwrap().5.unmap().unwrap();
    });
}

#[test]
fn a_lookup_by_address_does_not_keep_what_another_thread_drops() {
    isolated(plain(), |_| {
        let (session, device) = open(0);
        let memory = device.create(MIB2).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let address = reservation.address();
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while over.load(Ordering::Relaxed) == 0 {
                    session.memory_at(address);
                    session.mapping_at(address);
                }
            });
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..500 {
                    drop(reservation.map(0, &memory).unwrap());
                }
            }));
            over.store(1, Ordering::Relaxed);
            result.unwrap();
        });
        reservation.free().unwrap();
    });
}
