//! Opening a device: when the session starts a process on it, and what happens when that process
//! dies.

use crate::support::processes::start;
use crate::support::{
    MIB, MIB2, PATIENCE, assert_nothing_left, count, device, end_device_process, inject, patient, plain,
    survey_options, with_daemon,
};
use ascend_emulator::config::{Daemon, Place};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_ioctl::hdc;
use ascend_vmm::LogicalId;
use ascend_vmm::device_process::{DeviceProcess, Order, Policy, ProcessFailure, Settings, Step};
use ascend_vmm::discovery;
use ascend_vmm::error::Errno;
use ascend_vmm::{Error, MemoryKind, Session};
use std::time::Duration;

fn session_with(settings: Settings) -> Session {
    Session::builder().device_process(settings).open().unwrap()
}

/// A session that sends only the messages that an ordinary daemon needs.
fn session(policy: Policy) -> Session {
    session_with(patient().policy(policy).order(Order::Short))
}

fn running(emulator: &Emulator) -> usize {
    emulator.state().device_processes.len()
}

#[test]
fn policy_auto_starts_a_device_process_where_one_is_needed() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = session(Policy::Auto);
        assert_eq!(running(emulator), 0);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(running(emulator), 1);
        let pid = device.device_process().unwrap().pid().unwrap();
        assert!(pid.is_some());
        device.create(MIB2).unwrap();
        device.close().unwrap();
        assert_eq!(running(emulator), 0);
    });
}

#[test]
fn policy_auto_starts_nothing_where_the_device_needs_nothing() {
    isolated(plain(), |emulator| {
        emulator.record();
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_none());
        assert!(emulator.records().iter().all(|record| record.path.as_deref() != Some(hdc::PATH)));
        device.create(MIB2).unwrap();
    });
}

#[test]
fn policy_never_leaves_the_start_to_the_caller() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Never);
        let error = session.device(LogicalId(0)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EFAULT), "{error}");
        assert_eq!(running(emulator), 0);
        // It works when the caller starts the process.
        let process = DeviceProcess::start(LogicalId(0), &patient()).unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_none());
        device.create(MIB2).unwrap();
        device.close().unwrap();
        process.close().unwrap();
    });
}

#[test]
fn policy_always_starts_a_device_process_before_setup() {
    isolated(plain(), |emulator| {
        let session = session(Policy::Always);
        emulator.record();
        let device = session.device(LogicalId(0)).unwrap();
        assert!(device.device_process().is_some());
        assert_eq!(count(emulator, "SETUP_DEVICE"), 1);
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
        second.create(MIB2).unwrap();
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
        let other = start(|channel| {
            let _session = session(Policy::Auto);
            let device = device(0);
            channel.pause();
            device.create(MIB2).unwrap();
        });
        other.wait();
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(running(emulator), 2);
        other.signal();
        other.join();
        assert_eq!(running(emulator), 1);
        device.create(MIB2).unwrap();
    });
}

#[test]
fn killing_a_process_ends_its_device_process() {
    isolated(Config::default(), |emulator| {
        let victim = start(|channel| {
            let _session = session(Policy::Auto);
            let _memory = device(0).create(64 * MIB).unwrap();
            channel.pause();
        });
        victim.wait();
        victim.kill();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_refused_start_is_explained_and_leaves_the_session_usable() {
    isolated(with_daemon(Daemon::Refuses { code: 1, error: "E30003".into() }), |emulator| {
        let session = session(Policy::Auto);
        let error = session.device(LogicalId(0)).unwrap_err();
        let Error::DeviceProcess { device: LogicalId(0), failure } = &error else { panic!("{error:?}") };
        assert!(matches!(failure, ProcessFailure::Refused { error_code, .. } if error_code == "E30003"));
        let text = error.to_string();
        assert!(text.contains("E30003") && text.contains("device 0") && text.contains("End other programs"), "{text}");

        emulator.control(|driver| driver.machine.daemon = Daemon::Works);
        session.device(LogicalId(0)).unwrap().create(MIB2).unwrap();
    });
}

#[test]
fn each_broken_daemon_is_an_error_and_leaves_nothing_behind() {
    isolated(Config::default(), |emulator| {
        for daemon in [
            Daemon::Absent,
            Daemon::Silent,
            Daemon::Garbage,
            Daemon::OtherVersion(7),
            Daemon::VendorOrder,
            Daemon::HangsUp,
        ] {
            let name = format!("{daemon:?}");
            // Only a silent daemon uses up its limit.
            let handshake = if daemon == Daemon::Silent { Duration::from_millis(400) } else { PATIENCE };
            emulator.control(move |driver| driver.machine.daemon = daemon);
            let session = session_with(patient().order(Order::Short).limit(Step::Handshake, handshake));
            let error = session.device(LogicalId(0)).unwrap_err();
            assert!(matches!(error, Error::DeviceProcess { .. }), "{name}: {error:?}");
            assert_eq!(running(emulator), 0, "{name}");
            assert_eq!(emulator.state().sessions, [], "{name}");
        }
    });
}

#[test]
fn a_device_process_that_dies_is_reported_and_the_device_can_be_opened_again() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        device.create(MIB2).unwrap();
        end_device_process(emulator, 0);
        let error = device.create(MIB2).unwrap_err();
        assert!(matches!(error, Error::DeviceProcessDied { device: LogicalId(0), .. }), "{error:?}");
        assert!(error.to_string().contains("device process"), "{error}");

        drop(device);
        let device = session.device(LogicalId(0)).unwrap();
        device.create(MIB2).unwrap();
    });
}

#[test]
fn objects_of_a_dead_device_process_can_be_dropped_and_made_again() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = session(Policy::Auto);
        let use_it = || {
            let device = session.device(LogicalId(0)).unwrap();
            let memory = device.create(4 * MIB).unwrap();
            let reservation = session.reserve(4 * MIB).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            (device, memory, reservation, mapping)
        };
        let all = use_it();
        end_device_process(emulator, 0);
        let error = all.0.create(MIB2).unwrap_err();
        assert!(matches!(error, Error::DeviceProcessDied { device: LogicalId(0), .. }), "{error:?}");
        drop(all);
        // The device again, in the same session.
        let all = use_it();
        end_device_process(emulator, 0);
        drop(all);
        drop(use_it());
        // The kernel does not unmap what a dead device process held: closing reports that, and the
        // session is closed anyway.
        let failed = session.close().unwrap_err();
        assert!(failed.object.is_none() && failed.to_string().contains("would not undo"), "{failed}");
        // A new session.
        let session = self::session(Policy::Auto);
        session.device(LogicalId(0)).unwrap().create(MIB2).unwrap();
    });
}

/// True if the daemon answers a handshake in this time. It gets a version that ends the dialogue
/// there.
fn answers_a_handshake(emulator: &Emulator, limit: Duration) -> bool {
    emulator.control(|driver| driver.machine.daemon = Daemon::OtherVersion(7));
    match DeviceProcess::start(LogicalId(0), &patient().limit(Step::Handshake, limit)) {
        Err(ProcessFailure::Version { theirs: 7, .. }) => true,
        Err(ProcessFailure::TimedOut { step: Step::Handshake }) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn packets_that_nobody_reads_do_not_hold_up_the_daemon_for_others() {
    // As many as the driver keeps for one session.
    isolated(with_daemon(Daemon::Chatty(7)), |emulator| {
        let device = session(Policy::Auto).device(LogicalId(0)).unwrap();
        assert!(!answers_a_handshake(emulator, Duration::from_millis(100)));
        device.memory_info(MemoryKind::Hbm).unwrap();
        assert!(answers_a_handshake(emulator, PATIENCE));
    });
}

#[test]
fn opening_a_device_that_is_open_reads_the_packets_of_its_daemon() {
    isolated(with_daemon(Daemon::Chatty(7)), |emulator| {
        let device = session(Policy::Auto).device(LogicalId(0)).unwrap();
        device.session().device(LogicalId(0)).unwrap();
        assert!(answers_a_handshake(emulator, PATIENCE));
    });
}

#[test]
fn a_program_that_is_executed_inherits_no_file_of_the_driver() {
    isolated(Config::default(), |_| {
        let _device = session(Policy::Auto).device(LogicalId(0)).unwrap();
        let mut seen = 0;
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let name = std::fs::read_link(entry.path()).unwrap_or_default();
            if !["davinci", "hisi_hdc"].iter().any(|part| name.to_string_lossy().contains(part)) {
                continue;
            }
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            // SAFETY: asks for the flags of a descriptor.
            assert_eq!(unsafe { nix::libc::fcntl(number, nix::libc::F_GETFD) }, nix::libc::FD_CLOEXEC, "{name:?}");
            seen += 1;
        }
        assert!(seen >= 3, "session, DEVMNG and daemon");
    });
}

#[test]
fn a_device_that_fails_beside_its_process_is_not_given_another_process() {
    on_each_generation(Config::default(), |_, emulator| {
        let process = DeviceProcess::start(LogicalId(0), &patient()).unwrap();
        emulator.record();
        inject(emulator, "SETUP_DEVICE#1=EFAULT");
        let session = session(Policy::Auto);
        let error = session.device(LogicalId(0)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EFAULT), "{error}");
        assert_eq!(count(emulator, "CONNECT"), 0);
        session.device(LogicalId(0)).unwrap();
        drop(process);
    });
}

#[test]
fn a_container_opens_its_device_without_having_listed_it() {
    let places = vec![Place::container(&[1])];
    on_each_generation(Config { places, ..Config::default() }, |_, emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(emulator.state().device_processes[0].device, 1);
        device.create(MIB2).unwrap();
    });
}

#[test]
fn discovery_beside_a_session_does_not_end_its_device_process() {
    isolated(Config::default(), |emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        assert_eq!(discovery::survey(&survey_options()).devices.len(), 2);
        assert!(!emulator.state().device_processes[0].orphaned);
        device.create(MIB2).unwrap();
    });
}

#[test]
fn discovery_beside_a_session_without_a_device_process_does_not_report_us_dead() {
    isolated(plain(), |emulator| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(0)).unwrap();
        // The session never opened DEVMNG; discovery does, and must leave it open as long as the
        // session exists.
        discovery::survey(&survey_options());
        assert!(emulator.state().device_processes.iter().all(|process| !process.orphaned));
        device.create(MIB2).unwrap();
        drop(device);
        session.close().unwrap();
        assert!(emulator.state().files.is_empty());
    });
}

#[test]
fn a_survey_reports_free_memory_without_what_is_allocated() {
    on_each_generation(Config::default(), |_, _| {
        let session = session(Policy::Auto);
        let device = session.device(LogicalId(1)).unwrap();
        let free = || {
            let survey = discovery::survey(&survey_options());
            survey.device(LogicalId(1)).unwrap().hbm.unwrap().free
        };
        let before = free();
        let memory = device.create(512 * MIB).unwrap();
        assert_eq!(before - free(), 512 * MIB);
        drop(memory);
        assert_eq!(free(), before);
    });
}
