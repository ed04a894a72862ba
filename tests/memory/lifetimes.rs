//! How long memory lives: each line of `docs/driver.md`, with real processes, on each driver
//! generation.

use crate::support::processes::{Channel, Peer, start};
use crate::support::{MIB, MIB2, assert_nothing_left, commands, device, holders, open, plain, read, wait_until, write};
use ascend_emulator::{Emulator, fork, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, Export, Ticket};
use ascend_vmm::{Error, PhysicalMemory, Session};
use std::any::Any;

const SIZE: u64 = 4 * MIB;

/// Bytes in use, on all devices and the host.
fn used(emulator: &Emulator) -> u64 {
    emulator.state().memory.used.values().sum()
}

/// A process that imports on device 1, and then follows commands.
fn importer() -> Peer {
    start(|channel| serve(channel, channel.import(&device(1))))
}

/// Commands for a process that has memory.
const READ: u64 = 1;
const WRITE: u64 = 2;
const END: u64 = 3;

fn serve(channel: &Channel, memory: PhysicalMemory) {
    channel.signal();
    loop {
        match channel.receive() {
            READ => channel.send(read(&memory, 1)[0].into()),
            WRITE => {
                write(&memory, &[channel.receive() as u8]);
                channel.signal();
            }
            _ => return,
        }
    }
}

/// The first byte of the memory that a process has.
fn byte_of(peer: &Peer) -> u8 {
    peer.send(READ);
    peer.receive() as u8
}

/// Lets a process write the first byte of its memory.
fn write_byte(peer: &Peer, value: u8) {
    peer.send(WRITE);
    peer.send(value.into());
    peer.wait();
}

/// Lets a process exit in the ordinary way.
fn end(peer: Peer) {
    peer.send(END);
    peer.join();
}

/// A process that exports memory of device 0 that begins with 7 to these, and then follows
/// commands.
fn exporter(trusted: &[&Peer]) -> (Peer, Ticket) {
    let other = start(|channel| {
        let memory = device(0).create(SIZE).unwrap();
        write(&memory, &[7]);
        let export = memory.export().unwrap();
        for _ in 0..channel.receive() {
            export.trust(&[channel.receive_tgid()]).unwrap();
        }
        channel.send_ticket(&export.ticket().unwrap());
        drop(export);
        serve(channel, memory);
    });
    other.send(trusted.len() as u64);
    for importer in trusted {
        other.send(importer.pid() as u64);
        importer.receive_tgid();
    }
    let ticket = other.receive_ticket();
    other.wait();
    (other, ticket)
}

/// Sends a ticket to an importer, and waits until it has imported.
fn pass(importer: &Peer, ticket: &Ticket) {
    importer.send_ticket(ticket);
    importer.wait();
}

/// Memory of device 0 that begins with 7, exported to a process by this one.
fn exported_to(importer: &Peer) -> (PhysicalMemory, Export) {
    let memory = device(0).create(SIZE).unwrap();
    write(&memory, &[7]);
    let export = memory.export().unwrap();
    export.trust(&[importer.receive_tgid()]).unwrap();
    (memory, export)
}

#[test]
fn memory_without_importers_is_freed_when_the_exporter_releases_it() {
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
        pass(&other, &export.ticket().unwrap());
        drop(export);
        memory.free().unwrap();
        assert_eq!((holders(emulator), used(emulator)), (1, SIZE));
        assert_eq!(byte_of(&other), 7);
        write_byte(&other, 8);
        assert_eq!(byte_of(&other), 8);
        end(other);
        assert_eq!(used(emulator), 0, "the last importer ended after the exporter");
    });
}

#[test]
fn memory_stays_with_the_importer_when_the_exporter_exits_or_is_killed() {
    on_each_generation(plain(), |_, emulator| {
        let ways: [fn(Peer); 2] = [end, Peer::kill];
        for end_or_kill in ways {
            let other = importer();
            let (exporter, ticket) = exporter(&[&other]);
            pass(&other, &ticket);
            end_or_kill(exporter);
            assert_eq!((holders(emulator), used(emulator)), (1, SIZE));
            assert_eq!(byte_of(&other), 7);
            write_byte(&other, 8);
            assert_eq!(byte_of(&other), 8);
            other.kill();
            assert_nothing_left(emulator);
        }
    });
}

#[test]
fn memory_is_freed_when_the_last_importer_releases_it_after_the_exporter_ended() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let device = device(1);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            let memory = share::import(&device, &ticket).unwrap();
            channel.pause();
            memory.free().unwrap();
            channel.pause();
            // The share does not exist any more, and the error says why.
            let error = share::import(&device, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EFAULT));
            let gone = format!("exported by process {}, which is not running any more", ticket.exporter);
            assert!(error.to_string().contains(&gone), "{error}");
            assert!(error.to_string().contains("its last holder is gone"), "{error}");
        });
        let (exporter, ticket) = exporter(&[&other]);
        other.send_ticket(&ticket);
        other.wait();
        exporter.kill();
        assert_eq!(used(emulator), SIZE);
        other.signal();
        other.wait();
        let state = emulator.state().memory;
        assert!(state.shares.is_empty() && state.used.is_empty(), "{state:#?}");
        other.signal();
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
            export.trust(&[other.receive_tgid()]).unwrap();
            pass(other, &export.ticket().unwrap());
        }
        assert_eq!(holders(emulator), 3);
        for (other, value) in others.iter().zip([7, 8]) {
            write_byte(other, value);
            assert_eq!(byte_of(other), value);
        }
        let listed = |emulator: &Emulator| emulator.state().memory.shares[0].trusted.len();
        assert_eq!(listed(emulator), 2);
        let [killed, ended] = others;
        killed.kill();
        assert_eq!(
            (holders(emulator), listed(emulator)),
            (2, 1),
            "a process that holds it at its end is removed from the list"
        );
        end(ended);
        assert_eq!((holders(emulator), listed(emulator)), (1, 1), "a process that released it before is not");
        assert_eq!(read(&memory, 1), [8]);
    });
}

#[test]
fn an_importer_that_released_the_memory_may_import_it_again() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let device = device(1);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            for _ in 0..3 {
                assert_eq!(read(&share::import(&device, &ticket).unwrap(), 1), [7]);
            }
            channel.pause();
        });
        let (_memory, export) = exported_to(&other);
        other.send_ticket(&export.ticket().unwrap());
        other.wait();
        assert_eq!(holders(emulator), 1);
        other.signal();
        other.join();
    });
}

#[test]
fn memory_can_be_imported_after_its_exporter_ended_as_long_as_a_process_holds_it() {
    on_each_generation(plain(), |_, emulator| {
        let ways: [fn(Peer); 2] = [end, Peer::kill];
        for end_or_kill in ways {
            let (first, second, stranger) = (importer(), importer(), start(stranger));
            let (exporter, ticket) = exporter(&[&first, &second]);
            pass(&first, &ticket);
            end_or_kill(exporter);
            pass(&second, &ticket);
            assert_eq!(byte_of(&second), 7);
            write_byte(&second, 8);
            assert_eq!(byte_of(&first), 8);
            first.kill();
            assert_eq!((holders(emulator), byte_of(&second)), (1, 8));
            stranger.receive_tgid();
            pass(&stranger, &ticket);
            stranger.join();
            end(second);
            assert_nothing_left(emulator);
        }
    });
}

/// A process that is not trusted, and whose exporter has ended.
fn stranger(channel: &Channel) {
    let device = device(1);
    channel.send_tgid();
    let error = share::import(&device, &channel.receive_ticket()).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
    channel.signal();
}

#[test]
fn an_exporter_that_closes_its_device_has_released_its_memory_there() {
    on_each_generation(plain(), |_, emulator| {
        let other = importer();
        let (session, device) = open(0);
        let (memory, export) = exported_to(&other);
        let host = session.host().unwrap().create(MIB2).unwrap();
        host.export().unwrap();
        pass(&other, &export.ticket().unwrap());
        let failed = device.close().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "not while memory of it is in use here: {}", failed.error);
        drop((memory, export));
        failed.object.close().unwrap();
        let state = emulator.state().memory;
        assert_eq!(state.used.values().sum::<u64>(), SIZE + MIB2, "{state:#?}");
        assert_eq!(state.shares.iter().map(|share| share.holders).collect::<Vec<_>>(), [1, 1], "host memory stays");
        assert_eq!(byte_of(&other), 7);
        end(other);
        drop(host);
    });
}

#[test]
fn an_importer_that_closes_its_device_may_open_it_and_import_again() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let session = Session::open().unwrap();
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            for _ in 0..2 {
                let device = session.device(LogicalId(1)).unwrap();
                let memory = share::import(&device, &ticket).unwrap();
                assert_eq!(read(&memory, 1), [7]);
                let failed = device.close().unwrap_err();
                assert!(matches!(failed.error, Error::InUse { .. }), "{}", failed.error);
                drop(memory);
                failed.object.close().unwrap();
                channel.pause();
            }
        });
        let (_memory, export) = exported_to(&other);
        other.send_ticket(&export.ticket().unwrap());
        for _ in 0..2 {
            other.wait();
            let share = &emulator.state().memory.shares[0];
            assert_eq!((share.holders, &share.trusted[..]), (1, &[other.pid()][..]), "the trust is kept");
            other.signal();
        }
        other.join();
    });
}

#[test]
fn mapped_memory_is_released_after_it_is_unmapped() {
    on_each_generation(plain(), |_, emulator| {
        let memory = device(0).create(SIZE).unwrap();
        let reservation = memory.session().reserve(SIZE).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        emulator.record();
        let failed = memory.free().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "{}", failed.error);
        drop(failed);
        assert!(emulator.records().is_empty(), "without a call, which the kernel would refuse");
        mapping.write(0, &[7]).unwrap();
        drop(mapping);
        let expected = ["MEMCPY", "MEM_UNMAP", "MEM_RELEASE", "PREPARE_CLOSE_DEVICE", "CLOSE_DEVICE"];
        assert_eq!(commands(emulator), expected);
    });
}

#[test]
fn a_process_that_is_killed_while_it_holds_mappings_leaves_nothing_behind() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
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
            channel.pause();
        });
        other.wait();
        assert_eq!(used(emulator), 2 * SIZE);
        other.kill();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_forked_child_that_keeps_its_parents_file_keeps_the_parents_memory_until_it_execs_or_ends() {
    on_each_generation(plain(), |_, emulator| {
        for exec in [true, false] {
            let other = start(|channel| {
                let memory = device(0).create(SIZE).unwrap();
                let export = memory.export().unwrap();
                let child = fork(|| {
                    channel.pause();
                    if exec {
                        let program = c"/bin/sh";
                        let arguments = [program, c"-c", c"read line"];
                        // Exec closes what it inherited, except its standard input.
                        channel.become_input();
                        nix::unistd::execv(program, &arguments).unwrap();
                    }
                });
                // The child outlives this process, which does not wait for it.
                std::mem::forget(child);
                std::mem::forget((memory, export));
            });
            other.wait();
            let channel = other.join_and_keep_channel();
            let state = emulator.state().memory;
            assert_eq!(state.used.values().sum::<u64>(), SIZE, "the parent has ended, the child has not: {state:#?}");
            channel.signal();
            wait_until("the child's exec or end", || emulator.state().is_empty());
        }
    });
}

/// All orders of this many objects.
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
            let (session, device) = open(0);
            let memory = device.create(MIB2).unwrap();
            let reservation = session.reserve(MIB2).unwrap();
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
