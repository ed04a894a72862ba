//! Sharing under load: many importers, much data, and processes that are killed at any moment.

use crate::support::processes::{Channel, Peer, start};
use crate::support::random::Random;
use crate::support::{
    GIB, MIB, MIB2, contents, device, holders, inject, mapped, own_pid, own_tgid, plain, read, wait_until, write,
};
use ascend_emulator::{Emulator, isolated, on_each_generation};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, ShareableHandle, Ticket};
use ascend_vmm::{PhysicalMemory, Session};
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A counter that forked processes share.
fn shared_counter() -> &'static AtomicU64 {
    let length = NonZero::new(4096).unwrap();
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, zeroed, never unmapped, and large enough for the counter.
    unsafe { mmap_anonymous(None, length, prot, MapFlags::MAP_SHARED).unwrap().cast().as_ref() }
}

/// The processes in the numbering of trust lists.
fn tgids(session: &Session, others: &[Peer]) -> Vec<BareTgid> {
    others.iter().map(|other| BareTgid::of_process(session, other.pid() as u32).unwrap()).collect()
}

#[test]
fn sixty_four_processes_import_at_once() {
    on_each_generation(plain(), |_, emulator| {
        const IMPORTERS: u32 = 64;
        let others: Vec<Peer> = (0..IMPORTERS)
            .map(|number| {
                start(move |channel| {
                    let device = device(number % 2);
                    channel.signal();
                    let memory = share::import(&device, &channel.receive_ticket()).unwrap();
                    let mapping = mapped(&memory);
                    // Each reads its own byte and writes another.
                    let mut byte = [0];
                    mapping.read(number.into(), &mut byte).unwrap();
                    assert_eq!(byte, [number as u8]);
                    mapping.write(number.into(), &[!number as u8]).unwrap();
                    channel.pause();
                })
            })
            .collect();
        let memory = device(0).create(MIB2).unwrap();
        write(&memory, &(0..IMPORTERS as u8).collect::<Vec<u8>>());
        let export = memory.export().unwrap();
        export.trust(&tgids(&memory.session(), &others)).unwrap();
        let ticket = export.ticket().unwrap();
        // All are ready before the first imports.
        others.iter().for_each(|other| other.wait());
        others.iter().for_each(|other| other.send_ticket(&ticket));
        others.iter().for_each(|other| other.wait());
        assert_eq!(holders(emulator), IMPORTERS + 1);
        assert_eq!(emulator.state().memory.used[&0], MIB2, "there is one memory for all");
        others.iter().for_each(|other| other.signal());
        others.into_iter().for_each(Peer::join);
        let expected: Vec<u8> = (0..IMPORTERS as u8).map(|number| !number).collect();
        assert_eq!(read(&memory, IMPORTERS as usize), expected);
    });
}

#[test]
fn a_gibibyte_is_shared_byte_for_byte() {
    const STEP: usize = MIB2 as usize;
    // One generation: the data take the same way in all of them.
    isolated(plain(), |_| {
        // Every step is another part of the same random bytes.
        let steps = GIB as usize / STEP;
        let noise = Random(0).bytes(STEP + 8 * steps);
        let part = |step: usize| &noise[8 * step..8 * step + STEP];
        // The processes take turns: one writes a step that the other reads.
        let work = |channel: &Channel, memory: &PhysicalMemory, turn: usize| {
            let mapping = mapped(memory);
            let mut seen = vec![0; STEP];
            for step in 0..steps {
                let at = (step * STEP) as u64;
                if step % 2 == turn {
                    mapping.write(at, part(step)).unwrap();
                    channel.send(step as u64);
                } else {
                    assert_eq!(channel.receive(), step as u64);
                    mapping.read(at, &mut seen).unwrap();
                    assert!(seen == part(step), "step {step} is not what was written");
                }
            }
        };
        let other = start(|channel| {
            work(channel, &channel.import(&device(1)), 1);
        });
        let memory = device(0).create(GIB).unwrap();
        let _export = other.export(&memory);
        work(&other, &memory, 0);
        other.join();
    });
}

/// The contents of the memory that all importers read.
const TEXT: &[u8] = b"what every importer must read";

/// Imports, maps, reads, writes to its own place, unmaps and releases, until it is killed.
fn restless_importer(channel: &Channel, ticket: &Ticket, number: u64, imports: &AtomicU64) {
    let device = device(number as u32 % 2);
    channel.pause();
    loop {
        let memory = share::import(&device, ticket).unwrap();
        let mapping = mapped(&memory);
        assert_eq!(contents(&mapping, 0, TEXT.len()), TEXT);
        mapping.write(MIB + number, &[number as u8]).unwrap();
        imports.fetch_add(1, Relaxed);
    }
}

/// Exports memory, sends a ticket for the first, and continues to export until it is killed.
fn restless_exporter(channel: &Channel, trusted: BareTgid) {
    let device = device(0);
    let mut first = true;
    loop {
        let memory = device.create(MIB2).unwrap();
        write(&memory, TEXT);
        let export = memory.export().unwrap();
        export.trust(&[trusted]).unwrap();
        if first {
            channel.send_ticket(&export.ticket().unwrap());
            // It lives as long as this process.
            std::mem::forget(export);
            first = false;
        }
    }
}

/// Waits for a random time of at most a millisecond, so that every kill comes at another moment.
fn wait_a_moment(random: &mut Random) {
    let end = Instant::now() + Duration::from_nanos(random.below(1_000_000));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn only_ours(emulator: &Emulator, round: u64) {
    let state = emulator.state();
    let (own, memory) = (own_pid(), &state.memory);
    let ours = memory.sessions.iter().all(|session| session.tgid == own)
        && memory.shares.len() == 1
        && memory.shares[0].holders == 1
        && memory.used.values().sum::<u64>() == MIB2
        && state.files.iter().all(|file| file.tgid == own);
    assert!(ours, "round {round}: a killed process left something behind: {state:#?}");
}

#[test]
fn two_thousand_killed_exporters_and_importers_harm_no_survivor_and_leave_nothing_behind() {
    // In each of the three generations. Most of the test's time goes into starting 2 000 processes,
    // each of which opens a session: fewer would come to fewer moments of a kill.
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
        let own = own_tgid();
        let memory = here.create(MIB2).unwrap();
        write(&memory, TEXT);
        let export = memory.export().unwrap();
        let ticket = export.ticket().unwrap();
        for round in 0..ROUNDS {
            let mut doomed: Vec<Peer> = (0..IMPORTERS)
                .map(|number| start(|channel| restless_importer(channel, &ticket, number, imports)))
                .collect();
            export.trust(&tgids(&session, &doomed)).unwrap();
            let exporters: Vec<Peer> =
                (0..EXPORTERS).map(|_| start(|channel| restless_exporter(channel, own))).collect();
            let before = imports.load(Relaxed);
            doomed.iter().for_each(|other| other.proceed());
            // Memory that was imported from some of the exporters outlives them.
            let mut legacy = Vec::new();
            for (number, exporter) in exporters.into_iter().enumerate() {
                if (number as u64 + round) % 3 != 0 {
                    legacy.push(share::import(&here, &exporter.receive_ticket()).unwrap());
                }
                let place = random.below(doomed.len() as u64 + 1);
                doomed.insert(place as usize, exporter);
            }
            // In every second round the kills come after an import; in the others, perhaps before.
            if round % 2 == 0 {
                wait_until("an import", || imports.load(Relaxed) > before);
            }
            for other in doomed {
                wait_a_moment(&mut random);
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
    });
}

#[test]
fn an_importer_that_is_killed_while_the_kernel_imports_leaves_nothing_behind() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let device = device(1);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            // The first import of a session makes more calls; this one makes them now.
            let nothing = ShareableHandle::from_u64(12345).unwrap();
            assert_eq!(share::import(&device, nothing).unwrap_err().errno(), Some(Errno::EFAULT));
            channel.pause();
            let _ = share::import(&device, &ticket);
            channel.signal();
        });
        let memory = device(0).create(MIB2).unwrap();
        let _export = other.export(&memory);
        other.wait();
        // The device does not answer the message that the import sends it, so the call waits in the
        // kernel.
        inject(emulator, "device1=silent:600s");
        other.signal();
        wait_until_asleep_in_ioctl(other.pid());
        other.kill();
        let state = emulator.state().memory;
        assert_eq!((state.shares[0].holders, state.sessions.len()), (1, 1), "{state:#?}");
        assert_eq!(read(&memory, 1), [0]);
    });
}

/// Waits until /proc shows that a process sleeps in an ioctl.
fn wait_until_asleep_in_ioctl(pid: i32) {
    let number = format!("{} ", libc::SYS_ioctl);
    let current = || std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
    wait_until("a sleep in an ioctl", || current().starts_with(&number));
}

#[test]
fn an_importer_that_is_killed_with_the_memory_mapped_leaves_it_to_the_exporter() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let session = Session::current().unwrap();
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            let memories = [
                share::import(&device(0), &ticket).unwrap(),
                share::import(&session.host().unwrap(), &ticket).unwrap(),
            ];
            let mappings = memories.map(|memory| mapped(&memory));
            mappings[1].host_view().unwrap().write(0, b"last words").unwrap();
            channel.pause();
        });
        let memory = device(0).create(MIB2).unwrap();
        let _export = other.export(&memory);
        other.wait();
        assert_eq!(holders(emulator), 3);
        other.kill();
        let state = emulator.state().memory;
        assert_eq!((state.shares[0].holders, state.sessions.len()), (1, 1), "{state:#?}");
        assert_eq!(read(&memory, 10), b"last words");
    });
}
