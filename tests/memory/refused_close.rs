//! What is left when the kernel refuses to undo something.

use crate::support::{MIB2, assert_nothing_left, count, device, inject, open, own_pid, plain, read, write};
use ascend_emulator::{Config, isolated, isolated_leaky, on_each_generation};
use ascend_vmm::{Error, LogicalId, Session};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_device_whose_close_was_refused_in_drop_can_be_opened_again() {
    on_each_generation(Config::default(), |_, emulator| {
        for fault in ["CLOSE_DEVICE#1=EBUSY", "PREPARE_CLOSE_DEVICE#1=EBUSY"] {
            let (session, device) = open(0);
            let processes = emulator.state().device_processes.len();
            inject(emulator, fault);
            drop(device);
            assert_eq!(emulator.state().device_processes.len(), processes, "it must not end under an open device");
            for _ in 0..3 {
                let device = session.device(LogicalId(0)).unwrap();
                device.create(MIB2).unwrap().free().unwrap();
                device.close().unwrap();
            }
            session.close().unwrap();
            assert_nothing_left(emulator);
        }
    });
}

#[test]
fn a_device_whose_close_stays_refused_is_usable_or_says_that_it_is_not() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        // Refused in drop, and at the next open too: the device was never prepared for closing.
        inject(emulator, "PREPARE_CLOSE_DEVICE#1=EBUSY");
        inject(emulator, "PREPARE_CLOSE_DEVICE#2=EBUSY");
        drop(device);
        let device = session.device(LogicalId(0)).unwrap();
        device.create(MIB2).unwrap();
        // Now it is prepared, so the kernel begins no asynchronous copy on it any more.
        inject(emulator, "CLOSE_DEVICE#1=EBUSY");
        inject(emulator, "CLOSE_DEVICE#2=EBUSY");
        drop(device);
        let error = session.device(LogicalId(0)).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }) && error.to_string().contains("asynchronous copies"), "{error}");
        // The next try closes it.
        session.device(LogicalId(0)).unwrap().close().unwrap();
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_device_that_comes_back_from_a_refused_close_says_what_it_lost() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        let peer = crate::support::device(1);
        device.enable_peer_access(&peer).unwrap();
        emulator.record();
        inject(emulator, "CLOSE_DEVICE#1=EBUSY");
        let failed = device.close().unwrap_err();
        assert!(failed.to_string().contains("asynchronous copies are refused until it is closed"), "{failed}");
        assert_eq!(count(emulator, "URD"), 0, "peer access is withdrawn after the close, not before");
        let device = failed.object;
        device.create(MIB2).unwrap();
        device.close().unwrap();
        drop(peer);
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn mappings_that_are_refused_at_once_leave_no_claim_on_their_reservation() {
    isolated(plain(), |emulator| {
        let session = Session::open().unwrap();
        let (mine, other) = (device(0).create(MIB2).unwrap(), device(1).create(MIB2).unwrap());
        for _ in 0..100 {
            let reservation = session.reserve(2 * MIB2).unwrap();
            inject(emulator, "MEM_MAP#1=ENOMEM");
            inject(emulator, "MEM_MAP#2=ENOMEM");
            let barrier = Barrier::new(2);
            std::thread::scope(|scope| {
                for half in 0..2 {
                    let (reservation, barrier, mine) = (&reservation, &barrier, &mine);
                    scope.spawn(move || {
                        barrier.wait();
                        reservation.map(half * MIB2, mine).unwrap_err();
                    });
                }
            });
            assert_eq!(reservation.mappings(), []);
            reservation.map(0, &other).unwrap().unmap().unwrap();
        }
    });
}

#[test]
fn a_close_by_the_only_owner_is_not_refused_because_another_thread_looked() {
    isolated(plain(), |_| {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Finds the session open, or closes its own at once.
                    drop(Session::open());
                }
            });
            let mut closed = 0;
            while closed < 200 {
                if let Ok(session) = Session::open() {
                    session.close().unwrap();
                    closed += 1;
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn what_comes_back_from_a_refused_call_is_found_where_it_was() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        let mapping = mapping.unmap().unwrap_err().object;
        assert_eq!(session.mapping_at(mapping.address()), Some((mapping.address(), MIB2)));
        reservation.slice(0, 8).unwrap().write(b"unharmed").unwrap();
        mapping.unmap().unwrap();
        // The reservation has held memory of the device, so it stays that device's, also after a
        // mapping that was refused.
        inject(emulator, "MEM_MAP#1=ENOMEM");
        reservation.map(0, &device.create(MIB2).unwrap()).unwrap_err();
        let other = crate::support::device(1).create(MIB2).unwrap();
        crate::support::refused_here(&reservation.map(0, &other).unwrap_err(), "memory of one device only");
        drop((reservation, other));
        inject(emulator, "PREPARE_CLOSE_DEVICE#1=EBUSY");
        let device = device.close().unwrap_err().object;
        emulator.record();
        drop(session.device(LogicalId(0)).unwrap());
        assert_eq!(count(emulator, "SETUP_DEVICE"), 0, "it is the same device");
        device.close().unwrap();
    });
}

#[test]
fn memory_that_a_closed_device_released_is_not_released_again_under_the_same_number() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        let memory = device.create(MIB2).unwrap();
        for number in 1..=3 {
            inject(emulator, &format!("MEM_RELEASE#{number}=EBUSY"));
        }
        inject(emulator, "CLOSE_DEVICE#1=EBUSY");
        drop((memory, device));
        assert_eq!(session.statistics().left, 2);
        // The device is closed and opened again: its first handle has the number of the old one.
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!((session.statistics().left, session.statistics().physical), (0, 0));
        let memory = device.create(MIB2).unwrap();
        let mapping = crate::support::mapped(&memory);
        drop(memory);
        session.device(LogicalId(1)).unwrap().close().unwrap();
        mapping.write(0, b"still there").unwrap();
    });
}

#[test]
fn what_was_refused_is_undone_in_order_at_the_next_close() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let (memory, reservation) = (device.create(MIB2).unwrap(), session.reserve(MIB2).unwrap());
        let mapping = reservation.map(0, &memory).unwrap();
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        // Still mapped, so the kernel refuses the other two by itself.
        drop((mapping, memory, reservation));
        let left = session.statistics();
        assert_eq!((left.left, left.reserved, left.physical), (3, MIB2, MIB2));
        // One close undoes all of it, each object as soon as nothing depends on it.
        session.device(LogicalId(1)).unwrap().close().unwrap();
        let left = session.statistics();
        assert_eq!((left.left, left.mappings, left.reserved, left.physical), (0, 0, 0, 0));
    });
}

#[test]
fn memory_that_died_with_its_device_is_never_released_again_under_the_same_number() {
    isolated_leaky(plain(), |emulator| {
        emulator.record();
        for (whole_device, faults) in [
            (false, &[][..]),
            (true, &[]),
            (true, &["CLOSE_DEVICE#1=EBUSY"]),
            (true, &["CLOSE_DEVICE#1=EBUSY", "CLOSE_DEVICE#2=EBUSY"]),
            (false, &["PREPARE_CLOSE_DEVICE#1=EBUSY", "PREPARE_CLOSE_DEVICE#2=EBUSY"]),
        ] {
            let case = format!("{whole_device}, {faults:?}");
            let (session, other) = open(0);
            let device = session.device(LogicalId(1)).unwrap();
            // A release that the device did not answer in time.
            inject(emulator, "MEM_RELEASE#1=ETIMEDOUT");
            drop(device.create(MIB2).unwrap());
            assert_eq!(session.statistics().left, 1, "{case}");
            let process = own_pid();
            emulator.control(move |driver| match whole_device {
                true => driver.machine.kill_device(1),
                false => assert!(driver.machine.end_device_process(process, 1)),
            });
            for fault in faults {
                inject(emulator, fault);
            }
            let _ = device.close().map_err(|failed| drop(failed.object));
            emulator.control(|driver| driver.machine.restore_device(1));
            let device = session.device(LogicalId(1)).unwrap();
            // The handles of a device are numbered from 0 again.
            let memory = device.create(MIB2).unwrap();
            write(&memory, b"mine");
            let before = count(emulator, "MEM_RELEASE");
            other.close().unwrap();
            assert_eq!(count(emulator, "MEM_RELEASE"), before, "{case}");
            assert_eq!(read(&memory, 4), b"mine", "{case}");
            memory.free().unwrap();
            device.close().unwrap();
            session.close().unwrap();
        }
    });
}

#[test]
fn peer_access_goes_with_a_device_that_is_closed() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        emulator.record();
        for _ in 0..2 {
            let peer = session.device(LogicalId(1)).unwrap();
            let calls = || {
                let before = emulator.records().len();
                device.enable_peer_access(&peer).unwrap();
                emulator.records().len() - before
            };
            assert!(calls() > 0, "the kernel is asked again");
            assert_eq!(calls(), 0, "once is enough");
            peer.close().unwrap();
        }
    });
}
