//! Injected faults, as a client sees them.

use crate::client::Session;
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, fork, isolated};
use ascend_ioctl::svm;
use nix::errno::Errno;
use std::time::{Duration, Instant};

fn config() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// Runs a client that ends with its session open and checks that everything that it held is freed.
fn client(emulator: &Emulator, body: impl FnOnce(&Session, u64)) {
    let client = fork(|| {
        let session = Session::start(Config::default().generation).unwrap();
        let heap = session.heap().unwrap();
        body(&session, heap);
    });
    client.join();
    assert!(emulator.state().is_empty());
}

#[test]
fn the_third_map_fails_and_leaves_no_mapping() {
    isolated(config(), |emulator| {
        emulator.inject("MEM_MAP#3=ENOMEM".parse().unwrap());
        client(emulator, |session, heap| {
            let id = session.create(1).unwrap();
            for nth in 1..=4 {
                let mapped = session.map(heap, id, 1);
                if nth == 3 {
                    assert_eq!(mapped, Err(Errno::ENOMEM));
                    assert_eq!(session.unmap(heap), Err(Errno::EINVAL), "nothing was mapped");
                    session.free(heap).unwrap();
                } else {
                    mapped.unwrap();
                    session.unmap(heap).unwrap();
                }
            }
        });
    });
}

#[test]
fn a_broken_link_fails_copies_and_nothing_else() {
    isolated(config(), |emulator| {
        emulator.inject("copies=link-error".parse().unwrap());
        client(emulator, |session, heap| {
            let id = session.create(1).unwrap();
            session.map(heap, id, 1).unwrap();
            let text = [0u8; 64];
            let copied = session.copy(heap, text.as_ptr() as u64, text.len(), svm::COPY_HOST_TO_DEVICE);
            assert_eq!(copied, Err(Errno::EIO));
            session.unmap(heap).unwrap();
            session.release(id, 1).unwrap();
        });
    });
}

#[test]
fn a_silent_device_delays_only_its_own_callers() {
    isolated(config(), |emulator| {
        client(emulator, |session, _| session.create(1).map(drop).unwrap());
        // Others would wait longer than a test may take.
        emulator.inject("device0=silent:1000s".parse().unwrap());
        drop(crate::client::open_module("uda").unwrap());
        let silence = Duration::from_millis(300);
        let start = Instant::now();
        emulator.inject(format!("device0=silent:{}ms", silence.as_millis()).parse().unwrap());
        client(emulator, |session, _| session.create(1).map(drop).unwrap());
        assert!(start.elapsed() >= silence, "{:?}", start.elapsed());
    });
}

#[test]
fn a_dead_device_gives_no_memory() {
    isolated(config(), |emulator| {
        let (dead, told) = (ascend_emulator::Line::new(), ascend_emulator::Line::new());
        let client = fork(|| {
            let session = Session::start(Config::default().generation).unwrap();
            session.create(1).unwrap();
            told.send(0);
            dead.receive();
            assert!(session.create(1).is_err());
        });
        told.receive();
        emulator.inject("device0=dead".parse().unwrap());
        dead.send(0);
        client.join();
        assert!(emulator.state().is_empty(), "{:?}", emulator.state());
    });
}
