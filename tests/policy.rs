//! When a device is opened: who starts the process on it, and what happens when that process dies.

use ascend_emulator::config::{Daemon, DeviceProcess, Place};
use ascend_emulator::{Config, Emulator, Line, fork, isolated, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::process::{Failure, Order, Policy, Settings};
use ascend_vmm::{Error, Session};
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn session(policy: Policy) -> Session {
    let settings = Settings {
        policy,
        order: Order::Short,
        patience: Duration::ZERO,
        handshake: Duration::from_millis(400),
        start: Duration::from_millis(400),
        close: Duration::from_millis(400),
        ..Settings::default()
    };
    Session::builder().device_process(settings).open().unwrap()
}

fn running(emulator: &Emulator) -> usize {
    emulator.state().device_processes.len()
}

/// A host whose SETUP_DEVICE makes the device process by itself, as old firmware did.
fn automatic() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

fn with(daemon: Daemon) -> Config {
    Config { daemon, ..Config::default() }
}

#[test]
fn auto_starts_a_device_process_where_one_is_needed() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = session(Policy::Auto);
        assert_eq!(running(emulator), 0);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(running(emulator), 1);
        let pid = device.device_process().unwrap().pid().unwrap();
        assert!(pid.is_some());
        device.create(2 * MIB).unwrap();
        device.close().unwrap();
        assert_eq!(running(emulator), 0);
    });
}

#[test]
fn auto_starts_nothing_where_the_device_needs_nothing() {
    isolated(automatic(), |emulator| {
        emulator.record();
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_none());
        assert!(emulator.records().iter().all(|record| record.path.as_deref() != Some("/dev/hisi_hdc")));
        device.create(2 * MIB).unwrap();
    });
}

#[test]
fn a_device_that_needs_a_process_costs_at_most_sixteen_more_calls() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        emulator.record();
        let device = session.device(LogicalId(0)).unwrap();
        let calls: Vec<_> =
            emulator.records().iter().map(|record| record.cmd.unwrap_or(record.call).to_owned()).collect();
        let expected = [
            "SETUP_DEVICE",
            "open",
            "OPEN",
            "QUERY_DEV_PID",
            "GET_PROCESS_SIGN",
            "open",
            "CONNECT",
            "SET_SESSION_OWNER",
            "SEND",
            "RECV_PEEK",
            "RECV",
            "GET_PROCESS_SIGN",
            "SEND",
            "RECV_PEEK",
            "RECV",
            "SETUP_DEVICE",
        ];
        assert_eq!(calls, expected);
        // One of them is the SETUP_DEVICE that is needed anyway; QUERY_DEV_PID needs a getpid, which the driver does not see: 16 more.
        let (needed_anyway, getpid) = (1, 1);
        assert_eq!(calls.len() - needed_anyway + getpid, 16);
        drop(device);
    });
}

#[test]
fn never_leaves_it_to_the_caller() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Never);
        let error = session.device(LogicalId(0)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EFAULT), "{error}");
        assert_eq!(running(emulator), 0);
        // The caller provides it, and then it works.
        let manager = session.davinci_manager().to_owned();
        let process = ascend_vmm::process::DeviceProcess::start(LogicalId(0), &manager, &Settings::default()).unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_none());
        device.create(2 * MIB).unwrap();
        device.close().unwrap();
        process.close().unwrap();
    });
}

#[test]
fn always_starts_one_before_it_asks() {
    isolated(automatic(), |emulator| {
        let session = session(Policy::Always);
        emulator.record();
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_some());
        let setups = emulator.records().iter().filter(|record| record.cmd == Some("SETUP_DEVICE")).count();
        assert_eq!(setups, 1);
    });
}

#[test]
fn two_devices_are_opened_with_a_process_each() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        let first = session.device(LogicalId(0)).unwrap();
        let second = session.device(LogicalId(1)).unwrap();
        assert_eq!(running(emulator), 2);
        drop(first);
        assert_eq!(running(emulator), 1);
        second.create(2 * MIB).unwrap();
    });
}

#[test]
fn opening_a_device_twice_starts_one_process() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        let first = session.device(LogicalId(0)).unwrap();
        let second = session.device(LogicalId(0)).unwrap();
        assert_eq!(running(emulator), 1);
        drop(first);
        assert_eq!(running(emulator), 1);
        drop(second);
        assert_eq!(running(emulator), 0);
    });
}

#[test]
fn threads_that_open_one_device_at_once_start_one_process() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        let devices: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| session.device(LogicalId(0)).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(running(emulator), 1);
        drop(devices);
        assert_eq!(running(emulator), 0);
    });
}

#[test]
fn processes_on_one_device_have_a_device_process_each() {
    isolated(Config::default(), |emulator| {
        let (opened, finish) = (Line::new(), Line::new());
        let other = fork(|| {
            let session = session(Policy::Auto);
            let device = session.device(LogicalId(0)).unwrap();
            opened.send(1);
            finish.receive();
            device.create(2 * MIB).unwrap();
        });
        opened.receive();
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(running(emulator), 2);
        finish.send(1);
        other.join();
        assert_eq!(running(emulator), 1);
        device.create(2 * MIB).unwrap();
    });
}

#[test]
fn killing_a_process_ends_what_it_had_on_the_device() {
    isolated(Config::default(), |emulator| {
        let opened = Line::new();
        let victim = fork(|| {
            let session = session(Policy::Auto);
            let device = session.device(LogicalId(0)).unwrap();
            let memory = device.create(64 * MIB).unwrap();
            opened.send(1);
            std::thread::sleep(Duration::from_secs(100));
            drop(memory);
        });
        opened.receive();
        victim.kill();
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_refused_start_explains_itself_and_leaves_the_session_usable() {
    isolated(with(Daemon::Refuses { code: 1, error: "E30003".into() }), |emulator| {
        let session = session(Policy::Auto);
        let error = session.device(LogicalId(0)).unwrap_err();
        let Error::DeviceProcess { device: 0, failure } = &error else { panic!("{error:?}") };
        assert!(matches!(&**failure, Failure::Refused { error_code, .. } if error_code == "E30003"));
        let text = error.to_string();
        assert!(text.contains("E30003") && text.contains("device 0") && text.contains("end other programs"), "{text}");

        emulator.control(|driver| driver.machine.daemon = Daemon::Works);
        session.device(LogicalId(0)).unwrap().create(2 * MIB).unwrap();
    });
}

#[test]
fn each_broken_daemon_gives_an_error_and_nothing_is_left_behind() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        for daemon in [
            Daemon::Absent,
            Daemon::Silent,
            Daemon::Garbage,
            Daemon::OtherVersion(7),
            Daemon::VendorOrder,
            Daemon::HangsUp,
        ] {
            let name = format!("{daemon:?}");
            emulator.control(move |driver| driver.machine.daemon = daemon);
            let error = session.device(LogicalId(0)).unwrap_err();
            assert!(matches!(error, Error::DeviceProcess { .. }), "{name}: {error:?}");
            assert_eq!(running(emulator), 0, "{name}");
            assert_eq!(emulator.state().sessions, [], "{name}");
        }
    });
}

#[test]
fn a_device_process_that_dies_is_named_and_the_device_can_be_opened_again() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        let memory = device.create(2 * MIB).unwrap();
        drop(memory);
        let tgid = std::process::id() as i32;
        assert!(emulator.control(move |driver| driver.machine.end_device_process(tgid, 0)));

        let error = device.create(2 * MIB).unwrap_err();
        assert!(matches!(error, Error::DeviceProcessDied { device: 0, .. }), "{error:?}");
        assert!(error.to_string().contains("device process"), "{error}");

        drop(device);
        let device = session.device(LogicalId(0)).unwrap();
        device.create(2 * MIB).unwrap();
    });
}

#[test]
fn what_lived_on_a_device_whose_process_died_can_be_dropped_and_everything_opened_again() {
    on_each_generation(Config::default(), |_, emulator| {
        let kill = |emulator: &Emulator| {
            let tgid = std::process::id() as i32;
            assert!(emulator.control(move |driver| driver.machine.end_device_process(tgid, 0)));
        };
        let session = session(Policy::Auto);
        let use_it = || {
            let device = session.device(LogicalId(0)).unwrap();
            let memory = device.create(4 * MIB).unwrap();
            let reservation = session.reserve(4 * MIB).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            (device, memory, reservation, mapping)
        };
        let all = use_it();
        kill(emulator);
        let error = all.0.create(2 * MIB).unwrap_err();
        assert!(matches!(error, Error::DeviceProcessDied { device: 0, .. }), "{error:?}");
        drop(all);
        // The device in the same session.
        let all = use_it();
        kill(emulator);
        drop(all);
        drop(use_it());
        // The kernel takes no mapping back that a dead process held: closing says so, and the session is gone all the same.
        let failed = session.close().unwrap_err();
        assert!(failed.object.is_none() && failed.to_string().contains("would not give back"), "{failed}");
        // A new session.
        let session = self::session(Policy::Auto);
        session.device(LogicalId(0)).unwrap().create(2 * MIB).unwrap();
    });
}

#[test]
fn a_container_opens_its_device_without_having_listed_it() {
    let places = vec![Place::container(&[1])];
    on_each_generation(Config { places, ..Config::default() }, |_, emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(emulator.state().device_processes[0].device, 1);
        device.create(2 * MIB).unwrap();
    });
}

#[test]
fn discovery_beside_a_session_does_not_end_its_device_process() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        let survey = ascend_vmm::discovery::survey(&Default::default());
        assert_eq!(survey.devices.len(), 2);
        assert!(!emulator.state().device_processes[0].orphaned);
        device.create(2 * MIB).unwrap();
    });
}

#[test]
fn discovery_beside_a_session_that_started_nothing_does_not_tell_the_device_that_we_died() {
    isolated(automatic(), |emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        // The session never opened DEVMNG; discovery does, and must leave it open while the session lives.
        ascend_vmm::discovery::survey(&Default::default());
        assert!(emulator.state().device_processes.iter().all(|process| !process.orphaned));
        device.create(2 * MIB).unwrap();
        drop(device);
        session.close().unwrap();
        assert!(emulator.state().files.is_empty());
    });
}

#[test]
fn memory_free_in_the_listing_follows_what_is_allocated() {
    on_each_generation(Config::default(), |_, _| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(1)).unwrap();
        let free = || {
            let survey = ascend_vmm::discovery::survey(&Default::default());
            survey.device(LogicalId(1)).unwrap().hbm.unwrap().free
        };
        let before = free();
        let memory = device.create(512 * MIB).unwrap();
        assert_eq!(before - free(), 512 * MIB);
        drop(memory);
        assert_eq!(free(), before);
    });
}
