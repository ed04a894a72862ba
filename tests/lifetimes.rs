//! Who keeps memory alive: each line of `docs/lifetimes.md`, with real processes, on each driver generation.

mod sharing;

use ascend_emulator::{Emulator, fork, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, Export, Ticket};
use ascend_vmm::{Error, PhysicalMemory, Session};
use sharing::{MIB, Other, Talk, device, plain, read, start, write};
use std::any::Any;

const SIZE: u64 = 4 * MIB;

/// Bytes in use, on all devices and the host.
fn used(emulator: &Emulator) -> u64 {
    emulator.state().memory.used.values().sum()
}

/// Who holds the only share, by number: the exporter and the importers.
#[track_caller]
fn holders(emulator: &Emulator) -> u32 {
    let shares = emulator.state().memory.shares;
    assert_eq!(shares.len(), 1, "{shares:#?}");
    shares[0].holders
}

/// A process that imports on device 1 what it gets a ticket for, and then does as it is told until it is told to end.
fn importer() -> Other {
    start(|talk| {
        let device = device(1);
        talk.say_who(&device.session());
        let ticket = talk.hear_ticket();
        serve(talk, share::import(&device, &ticket).unwrap());
    })
}

/// What a process does with the memory that it has.
const READ: u64 = 1;
const WRITE: u64 = 2;
const END: u64 = 3;

fn serve(talk: &Talk, memory: PhysicalMemory) {
    talk.say(0);
    loop {
        match talk.hear() {
            READ => talk.say(read(&memory, 1)[0].into()),
            WRITE => {
                write(&memory, &[talk.hear() as u8]);
                talk.say(0);
            }
            _ => return,
        }
    }
}

trait Does {
    fn reads(&self) -> u8;
    fn writes(&self, value: u8);
    fn ends(self);
}

impl Does for Other {
    fn reads(&self) -> u8 {
        self.talk.say(READ);
        self.talk.hear() as u8
    }

    fn writes(&self, value: u8) {
        self.talk.say(WRITE);
        self.talk.say(value.into());
        self.talk.hear();
    }

    fn ends(self) {
        self.talk.say(END);
        self.join();
    }
}

/// A process that exports memory of device 0 that begins with 7, trusts whom it is told of, and keeps it.
fn exporter(trusted: &[&Other]) -> (Other, Ticket) {
    let other = start(|talk| {
        let memory = device(0).create(SIZE).unwrap();
        write(&memory, &[7]);
        let export = memory.export().unwrap();
        for _ in 0..talk.hear() {
            export.trust(&[talk.hear_who()]).unwrap();
        }
        talk.say_ticket(&export.ticket().unwrap());
        drop(export);
        serve(talk, memory);
    });
    other.talk.say(trusted.len() as u64);
    for importer in trusted {
        other.talk.say(importer.pid() as u64);
        importer.talk.hear_who();
    }
    let ticket = other.talk.hear_ticket();
    other.talk.hear();
    (other, ticket)
}

/// Gives a ticket to an importer, and waits until it has the memory.
fn give(importer: &Other, ticket: &Ticket) {
    importer.talk.say_ticket(ticket);
    importer.talk.hear();
}

/// Memory of device 0 that begins with 7, exported here to a process.
fn exported_to(importer: &Other) -> (PhysicalMemory, Export) {
    let memory = device(0).create(SIZE).unwrap();
    write(&memory, &[7]);
    let export = memory.export().unwrap();
    export.trust(&[importer.talk.hear_who()]).unwrap();
    (memory, export)
}

#[test]
fn memory_that_nobody_imported_goes_when_the_exporter_releases_it() {
    on_each_generation(plain(), |_, emulator| {
        let other = importer();
        let (memory, export) = exported_to(&other);
        assert_eq!((holders(emulator), used(emulator)), (1, SIZE));
        drop(memory);
        assert_eq!(used(emulator), SIZE, "an export is a reference to the memory");
        drop(export);
        let state = emulator.state().memory;
        assert!(state.shares.is_empty() && state.used.is_empty(), "{state:#?}");
        other.kill();
    });
}

#[test]
fn memory_stays_with_the_importer_when_the_exporter_releases_it() {
    on_each_generation(plain(), |_, emulator| {
        let other = importer();
        let (memory, export) = exported_to(&other);
        give(&other, &export.ticket().unwrap());
        drop(export);
        memory.free().unwrap();
        assert_eq!((holders(emulator), used(emulator)), (1, SIZE));
        assert_eq!(other.reads(), 7);
        other.writes(8);
        assert_eq!(other.reads(), 8);
        other.ends();
        assert_eq!(used(emulator), 0, "the last importer is gone, after the exporter");
    });
}

#[test]
fn memory_stays_with_the_importer_when_the_exporter_exits_or_is_killed() {
    on_each_generation(plain(), |_, emulator| {
        let ends: [fn(Other); 2] = [Other::ends, Other::kill];
        for end in ends {
            let other = importer();
            let (exporter, ticket) = exporter(&[&other]);
            give(&other, &ticket);
            end(exporter);
            assert_eq!((holders(emulator), used(emulator)), (1, SIZE));
            assert_eq!(other.reads(), 7);
            other.writes(8);
            assert_eq!(other.reads(), 8);
            other.kill();
            let state = emulator.state();
            assert!(state.is_empty(), "{state:#?}");
        }
    });
}

#[test]
fn memory_goes_when_the_last_importer_releases_it_after_the_exporter_is_gone() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let device = device(1);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            let memory = share::import(&device, &ticket).unwrap();
            talk.pause();
            memory.free().unwrap();
            talk.pause();
            // There is no such share any more, and the error says why that is no wonder.
            let error = share::import(&device, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EFAULT));
            let gone = format!("exported by process {}, which is not running any more", ticket.exporter);
            assert!(error.to_string().contains(&gone), "{error}");
            assert!(error.to_string().contains("its last holder is gone"), "{error}");
        });
        let (exporter, ticket) = exporter(&[&other]);
        other.talk.say_ticket(&ticket);
        other.talk.hear();
        exporter.kill();
        assert_eq!(used(emulator), SIZE);
        other.talk.say(0);
        other.talk.hear();
        let state = emulator.state().memory;
        assert!(state.shares.is_empty() && state.used.is_empty(), "{state:#?}");
        other.talk.say(0);
        other.join();
    });
}

#[test]
fn memory_stays_with_the_exporter_when_importers_release_it_exit_or_are_killed() {
    on_each_generation(plain(), |_, emulator| {
        let others = [importer(), importer()];
        let memory = device(0).create(SIZE).unwrap();
        let export = memory.export().unwrap();
        for other in &others {
            export.trust(&[other.talk.hear_who()]).unwrap();
            give(other, &export.ticket().unwrap());
        }
        assert_eq!(holders(emulator), 3);
        for (other, value) in others.iter().zip([7, 8]) {
            other.writes(value);
            assert_eq!(other.reads(), value);
        }
        let listed = |emulator: &Emulator| emulator.state().memory.shares[0].trusted.len();
        assert_eq!(listed(emulator), 2);
        let [killed, ended] = others;
        killed.kill();
        assert_eq!((holders(emulator), listed(emulator)), (2, 1), "who held it at its end is taken off the list");
        ended.ends();
        assert_eq!((holders(emulator), listed(emulator)), (1, 1), "who released it before is not");
        assert_eq!(read(&memory, 1), [8]);
    });
}

#[test]
fn an_importer_that_released_may_import_again() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let device = device(1);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            for _ in 0..3 {
                assert_eq!(read(&share::import(&device, &ticket).unwrap(), 1), [7]);
            }
            talk.pause();
        });
        let (_memory, export) = exported_to(&other);
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        assert_eq!(holders(emulator), 1);
        other.talk.say(0);
        other.join();
    });
}

#[test]
fn memory_can_be_imported_after_its_exporter_as_long_as_somebody_holds_it() {
    on_each_generation(plain(), |_, emulator| {
        let ends: [fn(Other); 2] = [Other::ends, Other::kill];
        for end in ends {
            let (first, second, stranger) = (importer(), importer(), start(stranger));
            let (exporter, ticket) = exporter(&[&first, &second]);
            give(&first, &ticket);
            end(exporter);
            give(&second, &ticket);
            assert_eq!(second.reads(), 7);
            second.writes(8);
            assert_eq!(first.reads(), 8);
            first.kill();
            assert_eq!((holders(emulator), second.reads()), (1, 8));
            stranger.talk.hear_who();
            give(&stranger, &ticket);
            stranger.join();
            second.ends();
            let state = emulator.state();
            assert!(state.is_empty(), "{state:#?}");
        }
    });
}

/// Trusted by nobody, and nobody is left who could.
fn stranger(talk: &Talk) {
    let device = device(1);
    talk.say_who(&device.session());
    let error = share::import(&device, &talk.hear_ticket()).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
    talk.say(0);
}

#[test]
fn an_exporter_that_closes_its_device_has_released_what_was_on_it() {
    on_each_generation(plain(), |_, emulator| {
        let other = importer();
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let (memory, export) = exported_to(&other);
        let host = session.host().unwrap().create(2 * MIB).unwrap();
        host.export().unwrap();
        give(&other, &export.ticket().unwrap());
        let failed = device.close().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "not while memory of it is in use here: {}", failed.error);
        drop((memory, export));
        failed.object.close().unwrap();
        let state = emulator.state().memory;
        assert_eq!(state.used.values().sum::<u64>(), SIZE + 2 * MIB, "{state:#?}");
        assert_eq!(state.shares.iter().map(|share| share.holders).collect::<Vec<_>>(), [1, 1], "host memory stays");
        assert_eq!(other.reads(), 7);
        other.ends();
        drop(host);
    });
}

#[test]
fn an_importer_that_closes_its_device_may_open_it_and_import_again() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let session = Session::open().unwrap();
            talk.say_who(&session);
            let ticket = talk.hear_ticket();
            for _ in 0..2 {
                let device = session.device(LogicalId(1)).unwrap();
                let memory = share::import(&device, &ticket).unwrap();
                assert_eq!(read(&memory, 1), [7]);
                let failed = device.close().unwrap_err();
                assert!(matches!(failed.error, Error::InUse { .. }), "{}", failed.error);
                drop(memory);
                failed.object.close().unwrap();
                talk.pause();
            }
        });
        let (_memory, export) = exported_to(&other);
        other.talk.say_ticket(&export.ticket().unwrap());
        for _ in 0..2 {
            other.talk.hear();
            let share = &emulator.state().memory.shares[0];
            assert_eq!((share.holders, &share.trusted[..]), (1, &[other.pid()][..]), "the trust is kept");
            other.talk.say(0);
        }
        other.join();
    });
}

#[test]
fn memory_that_is_mapped_is_released_after_it_is_unmapped() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let memory = session.device(LogicalId(0)).unwrap().create(SIZE).unwrap();
        let reservation = session.reserve(SIZE).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        emulator.record();
        let failed = memory.free().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "{}", failed.error);
        drop(failed);
        assert!(emulator.records().is_empty(), "the kernel would only refuse");
        mapping.write(0, &[7]).unwrap();
        drop(mapping);
        let calls: Vec<_> = emulator.records().iter().filter_map(|record| record.cmd).collect();
        assert_eq!(calls, ["MEMCPY", "MEM_UNMAP", "MEM_RELEASE", "PREPARE_CLOSE_DEVICE", "CLOSE_DEVICE"]);
    });
}

#[test]
fn a_process_that_is_killed_while_it_holds_mappings_leaves_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let (device, session) = (device(0), Session::current().unwrap());
            let host = session.host().unwrap();
            let kept: Vec<_> = [device.create(SIZE), host.create(SIZE)]
                .into_iter()
                .map(|memory| {
                    let reservation = session.reserve(2 * SIZE).unwrap();
                    let mapping = reservation.map(SIZE, &memory.unwrap()).unwrap();
                    mapping.memory().export().unwrap();
                    mapping
                })
                .collect();
            kept[0].write(0, &[7]).unwrap();
            talk.pause();
        });
        other.talk.hear();
        assert_eq!(used(emulator), 2 * SIZE);
        other.kill();
        let state = emulator.state();
        assert!(state.is_empty(), "{state:#?}");
    });
}

#[test]
fn a_forked_child_that_keeps_its_parents_file_keeps_the_parents_memory_until_it_execs_or_ends() {
    on_each_generation(plain(), |_, emulator| {
        for exec in [true, false] {
            let other = start(|talk| {
                let memory = device(0).create(SIZE).unwrap();
                let export = memory.export().unwrap();
                let child = fork(|| {
                    talk.pause();
                    if exec {
                        let program = c"/bin/sh";
                        let arguments = [program, c"-c", c"read line"];
                        // What it inherited is closed on exec; its end of the line is its standard input.
                        talk.become_input();
                        nix::unistd::execv(program, &arguments).unwrap();
                    }
                });
                // The child outlives this process: nobody waits for it.
                std::mem::forget(child);
                std::mem::forget((memory, export));
            });
            other.talk.hear();
            let talk = other.join_and_keep_line();
            let state = emulator.state().memory;
            assert_eq!(state.used.values().sum::<u64>(), SIZE, "its parent is gone, and it did nothing: {state:#?}");
            talk.say(0);
            // Until the child's exec, or its end.
            let late = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !emulator.state().is_empty() {
                assert!(std::time::Instant::now() < late, "{:#?}", emulator.state());
                std::thread::yield_now();
            }
        }
    });
}

/// All orders of some things.
fn orders(things: usize) -> Vec<Vec<usize>> {
    let mut orders = vec![vec![]];
    for thing in 0..things {
        orders = orders
            .into_iter()
            .flat_map(|order: Vec<usize>| {
                (0..=order.len()).map(move |place| {
                    let mut order = order.clone();
                    order.insert(place, thing);
                    order
                })
            })
            .collect();
    }
    orders
}

#[test]
fn objects_may_be_dropped_in_any_order() {
    on_each_generation(plain(), |_, emulator| {
        let all = orders(6);
        assert_eq!(all.len(), 720);
        for order in all.iter().step_by(5) {
            let session = Session::open().unwrap();
            let device = session.device(LogicalId(0)).unwrap();
            let memory = device.create(2 * MIB).unwrap();
            let reservation = session.reserve(2 * MIB).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            let export = memory.export().unwrap();
            let mut objects: Vec<Option<Box<dyn Any>>> = vec![
                Some(Box::new(session)),
                Some(Box::new(device)),
                Some(Box::new(memory)),
                Some(Box::new(reservation)),
                Some(Box::new(mapping)),
                Some(Box::new(export)),
            ];
            for object in &order[..5] {
                objects[*object] = None;
                let lives = |some: &[usize]| some.iter().any(|&object| objects[object].is_some());
                let state = emulator.state().memory;
                let [session] = &state.sessions[..] else { panic!("any of them keeps the session: {order:?}") };
                let reserved: usize = session.heaps.iter().map(|heap| heap.reservations.len()).sum();
                let mapped: usize = session.heaps.iter().map(|heap| heap.mappings.len()).sum();
                let [device, memory, reservation, mapping, export] = [1, 2, 3, 4, 5];
                let seen = (!session.devices.is_empty(), !state.used.is_empty(), reserved != 0, mapped != 0);
                let expected = (
                    lives(&[device, memory, mapping, export]),
                    lives(&[memory, mapping, export]),
                    lives(&[reservation, mapping]),
                    lives(&[mapping]),
                );
                assert_eq!(seen, expected, "{order:?}, after {object}: {state:#?}");
            }
            objects.clear();
            let state = emulator.state();
            assert!(state.is_empty(), "{order:?}: {state:#?}");
        }
    });
}
