//! Calls that sleep in the driver: they do not block other calls, keep their file open, and end
//! with their caller.
//!
//! The call is SETUP_DEV_TABLE on a host where a card has been detected but has not booted yet.

use crate::client::{ioctl, open_manager, open_module};
use ascend_emulator::config::Phase;
use ascend_emulator::{Config, Emulator, Line, fork, isolated};
use ascend_ioctl::uda;
use nix::errno::Errno;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

/// Longer than a test may take.
const NEVER: Duration = Duration::from_secs(1000);

/// A host whose second card boots after this time.
fn booting(time: Duration) -> Config {
    Config { phases: vec![(1, Phase::Detected)], boot: Some(time), setup_patience: NEVER, ..Config::default() }
}

/// The second card has booted now.
fn boot(emulator: &Emulator) {
    emulator.control(|driver| driver.machine.config.boot = Some(Duration::ZERO));
}

fn setup(file: &OwnedFd) -> Result<i32, Errno> {
    ioctl(file, &uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices: 100 })
}

/// Waits until a thread is inside ioctl(2).
fn wait_for_ioctl(task: &str) {
    let path = format!("/proc/{task}/syscall");
    while !std::fs::read_to_string(&path).unwrap().starts_with(&format!("{} ", libc::SYS_ioctl)) {
        std::thread::yield_now();
    }
}

#[test]
fn a_sleeping_call_returns_when_its_time_has_come() {
    let time = Duration::from_millis(50);
    isolated(booting(time), |emulator| {
        let file = open_module("uda").unwrap();
        setup(&file).unwrap();
        // The card has booted, and nothing is waited for.
        emulator.control(|driver| driver.machine.config.boot = Some(NEVER));
        setup(&file).unwrap();
    });
}

#[test]
fn others_are_served_while_a_call_sleeps() {
    isolated(booting(NEVER), |emulator| {
        let file = open_module("uda").unwrap();
        let go = Line::new();
        let sleeper = fork(|| {
            go.send(0);
            setup(&file).unwrap();
        });
        go.receive();
        wait_for_ioctl(&sleeper.pid().to_string());
        for _ in 0..10 {
            drop(open_manager());
        }
        assert_eq!(emulator.state().files.len(), 1);
        wait_for_ioctl(&sleeper.pid().to_string());
        boot(emulator);
        sleeper.join();
    });
}

#[test]
fn a_file_stays_open_as_long_as_a_call_on_it_sleeps() {
    isolated(booting(NEVER), |emulator| {
        let descriptor = open_module("uda").unwrap().into_raw_fd();
        let (tell, told) = std::sync::mpsc::channel();
        let sleeper = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            // SAFETY: the descriptor is open, and this value does not close it.
            setup(&ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(descriptor) }))
        });
        let task = format!("self/task/{}", told.recv().unwrap());
        wait_for_ioctl(&task);
        // An order is handled after earlier calls, so the call sleeps now.
        assert_eq!(emulator.state().files.len(), 1);
        nix::unistd::close(descriptor).unwrap();
        assert_eq!(emulator.state().files.len(), 1);
        wait_for_ioctl(&task);
        boot(emulator);
        sleeper.join().unwrap().unwrap();
        assert_eq!(emulator.state().files.len(), 0);
    });
}

#[test]
fn a_client_killed_in_its_sleep_leaves_nothing() {
    isolated(booting(NEVER), |emulator| {
        for _ in 0..50 {
            let go = Line::new();
            let sleeper = fork(|| {
                let file = open_module("uda").unwrap();
                go.send(0);
                let _ = setup(&file);
            });
            go.receive();
            wait_for_ioctl(&sleeper.pid().to_string());
            sleeper.kill();
            assert!(emulator.state().is_empty());
        }
    });
}
