//! Sharing under load: many importers, much data, and processes that are killed wherever they happen to be.

mod sharing;

use ascend_emulator::fault::{DeviceFault, Fault};
use ascend_emulator::{Emulator, on_each_generation};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, ShareableHandle, Ticket};
use ascend_vmm::{PhysicalMemory, Session};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use sharing::{MIB, Other, Talk, device, plain, read, start, write};
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A counter that forked processes share.
fn shared_counter() -> &'static AtomicU64 {
    let length = NonZero::new(4096).unwrap();
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, zeroed, never given back, and large enough for the counter.
    unsafe { mmap_anonymous(None, length, prot, MapFlags::MAP_SHARED).unwrap().cast().as_ref() }
}

/// Everybody of a test, by number.
fn of(session: &Session, others: &[Other]) -> Vec<BareTgid> {
    others.iter().map(|other| BareTgid::of_process(session, other.pid() as u32).unwrap()).collect()
}

#[test]
fn sixty_four_processes_import_at_once() {
    on_each_generation(plain(), |_, emulator| {
        const IMPORTERS: u32 = 64;
        let others: Vec<Other> = (0..IMPORTERS)
            .map(|number| {
                start(move |talk| {
                    let device = device(number % 2);
                    talk.say(0);
                    let memory = share::import(&device, &talk.hear_ticket()).unwrap();
                    let reservation = device.session().reserve(memory.size()).unwrap();
                    let mapping = reservation.map(0, &memory).unwrap();
                    // All write, each its own byte, and each sees what was there before.
                    let mut byte = [0];
                    mapping.read(number.into(), &mut byte).unwrap();
                    assert_eq!(byte, [number as u8]);
                    mapping.write(number.into(), &[!number as u8]).unwrap();
                    talk.pause();
                })
            })
            .collect();
        let memory = device(0).create(2 * MIB).unwrap();
        write(&memory, &(0..IMPORTERS as u8).collect::<Vec<u8>>());
        let export = memory.export().unwrap();
        export.trust(&of(&memory.session(), &others)).unwrap();
        let ticket = export.ticket().unwrap();
        // All are ready before the first may begin.
        let all_are_so_far = || assert!(others.iter().all(|other| other.talk.hear() == 0));
        all_are_so_far();
        others.iter().for_each(|other| other.talk.say_ticket(&ticket));
        all_are_so_far();
        assert_eq!(emulator.state().memory.shares[0].holders, IMPORTERS + 1);
        assert_eq!(emulator.state().memory.used[&0], 2 * MIB, "all have the same memory");
        others.iter().for_each(|other| other.talk.say(0));
        others.into_iter().for_each(Other::join);
        let expected: Vec<u8> = (0..IMPORTERS as u8).map(|number| !number).collect();
        assert_eq!(read(&memory, IMPORTERS as usize), expected);
    });
}

#[test]
fn a_gibibyte_goes_over_byte_for_byte() {
    const SIZE: u64 = 1 << 30;
    const STEP: usize = 2 << 20;
    on_each_generation(plain(), |_, _| {
        // Every step is another part of the same noise.
        let steps = SIZE as usize / STEP;
        let mut random = Random(0x2545_F491_4F6C_DD1D);
        let noise: Vec<u8> = (0..(STEP + 8 * steps) / 8).flat_map(|_| random.next().to_le_bytes()).collect();
        let part = |step: usize| &noise[8 * step..8 * step + STEP];
        // Each in its turn writes a step that the other reads.
        let work = |talk: &Talk, memory: &PhysicalMemory, turn: usize| {
            let reservation = memory.session().reserve(SIZE).unwrap();
            let mapping = reservation.map(0, memory).unwrap();
            let mut seen = vec![0; STEP];
            for step in 0..steps {
                let at = (step * STEP) as u64;
                if step % 2 == turn {
                    mapping.write(at, part(step)).unwrap();
                    talk.say(step as u64);
                } else {
                    assert_eq!(talk.hear(), step as u64);
                    mapping.read(at, &mut seen).unwrap();
                    assert!(seen == part(step), "step {step} is not what was written");
                }
            }
        };
        let other = start(|talk| {
            let device = device(1);
            talk.say_who(&device.session());
            work(talk, &share::import(&device, &talk.hear_ticket()).unwrap(), 1);
        });
        let who = other.talk.hear_who();
        let memory = device(0).create(SIZE).unwrap();
        let export = memory.export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        work(&other.talk, &memory, 0);
        other.join();
    });
}

/// What stays in the memory that all importers see, whoever dies.
const TEXT: &[u8] = b"what the living and the dead have read";

/// Imports, looks, maps, writes to its own place, and lets go, until it is killed.
fn restless_importer(talk: &Talk, ticket: &Ticket, number: u64, imports: &AtomicU64) {
    let device = device(number as u32 % 2);
    talk.pause();
    loop {
        let memory = share::import(&device, ticket).unwrap();
        let reservation = device.session().reserve(memory.size()).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        let mut seen = [0; TEXT.len()];
        mapping.read(0, &mut seen).unwrap();
        assert_eq!(seen, TEXT);
        mapping.write(MIB + number, &[number as u8]).unwrap();
        imports.fetch_add(1, Relaxed);
    }
}

/// Exports memory, gives a ticket for the first, and goes on exporting until it is killed.
fn restless_exporter(talk: &Talk, trusted: BareTgid) {
    let device = device(0);
    let mut first = true;
    loop {
        let memory = device.create(2 * MIB).unwrap();
        write(&memory, TEXT);
        let export = memory.export().unwrap();
        export.trust(&[trusted]).unwrap();
        if first {
            talk.say_ticket(&export.ticket().unwrap());
            // It stays as long as its exporter.
            std::mem::forget(export);
            first = false;
        }
    }
}

/// Lets a random time pass, of at most a millisecond.
fn dawdle(random: &mut Random) {
    let end = Instant::now() + Duration::from_nanos(random.below(1_000_000));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn only_ours(emulator: &Emulator, round: u64) {
    let state = emulator.state();
    let (me, memory) = (std::process::id() as i32, &state.memory);
    let ours = memory.sessions.iter().all(|session| session.tgid == me)
        && memory.shares.len() == 1
        && memory.shares[0].holders == 1
        && memory.used.values().sum::<u64>() == 2 * MIB
        && state.files.iter().all(|file| file.tgid == me);
    assert!(ours, "round {round}: the dead left something: {state:#?}");
}

#[test]
fn two_thousand_killed_exporters_and_importers_harm_no_survivor_and_leave_nothing() {
    // In each of the three generations.
    const ROUNDS: u64 = 96;
    const IMPORTERS: u64 = 4;
    const EXPORTERS: u64 = 3;
    const { assert!(3 * ROUNDS * (IMPORTERS + EXPORTERS) >= 2_000) };
    on_each_generation(plain(), |_, emulator| {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let imports = shared_counter();
        let mut inherited = 0;
        let here = device(1);
        let session = here.session();
        let me = BareTgid::of_this_process(&session).unwrap();
        let memory = here.create(2 * MIB).unwrap();
        write(&memory, TEXT);
        let export = memory.export().unwrap();
        let ticket = export.ticket().unwrap();
        for round in 0..ROUNDS {
            let mut doomed: Vec<Other> =
                (0..IMPORTERS).map(|number| start(|talk| restless_importer(talk, &ticket, number, imports))).collect();
            export.trust(&of(&session, &doomed)).unwrap();
            let exporters: Vec<Other> = (0..EXPORTERS).map(|_| start(|talk| restless_exporter(talk, me))).collect();
            doomed.iter().for_each(Other::proceed);
            // What some of the exporters gave outlives them.
            let mut legacy = Vec::new();
            for (number, exporter) in exporters.into_iter().enumerate() {
                if (number as u64 + round) % 3 != 0 {
                    legacy.push(share::import(&here, &exporter.talk.hear_ticket()).unwrap());
                }
                let place = random.below(doomed.len() as u64 + 1);
                doomed.insert(place as usize, exporter);
            }
            for other in doomed {
                dawdle(&mut random);
                other.kill();
            }
            for memory in legacy {
                assert_eq!(read(&memory, TEXT.len()), TEXT, "round {round}");
                memory.free().unwrap();
                inherited += 1;
            }
            assert_eq!(read(&memory, TEXT.len()), TEXT, "round {round}");
            only_ours(emulator, round);
        }
        assert_eq!(inherited, ROUNDS * 2);
        assert!(imports.load(Relaxed) > ROUNDS, "importers hardly ever came so far as to import");
    });
}

#[test]
fn an_importer_that_is_killed_while_the_kernel_imports_leaves_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let device = device(1);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            // What the first import of a session asks besides is asked now.
            let nothing = ShareableHandle::from_u64(12345).unwrap();
            assert_eq!(share::import(&device, nothing).unwrap_err().errno(), Some(Errno::EFAULT));
            talk.pause();
            let _ = share::import(&device, &ticket);
            talk.say(0);
        });
        let who = other.talk.hear_who();
        let memory = device(0).create(2 * MIB).unwrap();
        let export = memory.export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        // The device does not answer the message that the import sends it, so the call waits in the kernel.
        let silence = DeviceFault::Silent(Duration::from_secs(600));
        emulator.inject(Fault::Device { device: 1, fault: silence });
        other.talk.say(0);
        wait_until_asleep_in_ioctl(other.pid());
        other.kill();
        let state = emulator.state().memory;
        assert_eq!((state.shares[0].holders, state.sessions.len()), (1, 1), "{state:#?}");
        assert_eq!(read(&memory, 1), [0]);
    });
}

/// Waits until a process waits in an ioctl, as /proc tells.
fn wait_until_asleep_in_ioctl(pid: i32) {
    let number = if cfg!(target_arch = "x86_64") { "16 " } else { "29 " };
    let late = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap().starts_with(number) {
        assert!(Instant::now() < late, "it does not wait in an ioctl");
        std::thread::yield_now();
    }
}

#[test]
fn an_importer_that_is_killed_while_it_has_the_memory_mapped_leaves_it_to_the_exporter() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let session = Session::current().unwrap();
            talk.say_who(&session);
            let ticket = talk.hear_ticket();
            let memories = [
                share::import(&device(0), &ticket).unwrap(),
                share::import(&session.host().unwrap(), &ticket).unwrap(),
            ];
            let mappings = memories.map(|memory| {
                let reservation = session.reserve(memory.size()).unwrap();
                reservation.map(0, &memory).unwrap()
            });
            mappings[1].host_view().unwrap().write(0, b"last words").unwrap();
            talk.pause();
        });
        let who = other.talk.hear_who();
        let memory = device(0).create(2 * MIB).unwrap();
        let export = memory.export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        assert_eq!(emulator.state().memory.shares[0].holders, 3);
        other.kill();
        let state = emulator.state().memory;
        assert_eq!((state.shares[0].holders, state.sessions.len()), (1, 1), "{state:#?}");
        assert_eq!(read(&memory, 10), b"last words");
    });
}
