//! Starting and ending the process on the device, with every daemon that the emulated device can
//! have.

use crate::support::processes::start as start_process;
use crate::support::raw::ModuleFile;
use crate::support::{
    PATIENCE, assert_nothing_left, commands, count, end_device_process, inject, own_pid, patient, refused_in_child,
    survey_options, wait_until, with_daemon,
};
use ascend_emulator::config::{Daemon, Door, Place};
use ascend_emulator::{Config, Emulator, fork, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::davinci;
use ascend_vmm::LogicalId;
use ascend_vmm::device_process::{self, DeviceProcess, Order, ProcessFailure, Settings, Step};
use ascend_vmm::discovery;
use ascend_vmm::error::Errno;
use std::time::{Duration, Instant};

/// How long to wait for an answer that never comes.
const SHORT: Duration = Duration::from_millis(400);

fn start_on(device: u32, settings: &Settings) -> Result<DeviceProcess, ProcessFailure> {
    DeviceProcess::start(LogicalId(device), settings)
}

fn start() -> Result<DeviceProcess, ProcessFailure> {
    start_on(0, &patient())
}

fn pid_on(device: u32) -> Option<i32> {
    device_process::device_pid(LogicalId(device)).unwrap()
}

#[test]
fn a_device_process_runs_until_it_is_closed() {
    on_each_generation(Config::default(), |_, emulator| {
        let process = start().unwrap();
        assert_eq!(process.device(), LogicalId(0));
        let state = emulator.state();
        assert_eq!(state.device_processes.len(), 1);
        assert_eq!(state.device_processes[0].tgid, own_pid());
        assert_eq!(process.pid().unwrap(), Some(state.device_processes[0].pid));
        assert!(process.is_connected());
        assert_eq!(state.registrations, [own_pid()]);
        process.close().unwrap();
        assert_nothing_left(emulator);
        assert_eq!(pid_on(0), None);
    });
}

#[test]
fn dropping_a_device_process_ends_it_as_closing_does() {
    isolated(Config::default(), |emulator| {
        emulator.record();
        drop(start().unwrap());
        assert_nothing_left(emulator);
        let commands = commands(emulator);
        assert_eq!(&commands[commands.len() - 5..], ["SEND", "RECV_PEEK", "RECV", "CLOSE", "CLOSE"]);
    });
}

#[test]
fn a_device_process_can_be_started_again() {
    isolated(Config::default(), |_| {
        let first = start().unwrap();
        let pid = first.pid().unwrap();
        first.close().unwrap();
        let second = start().unwrap();
        assert_ne!(second.pid().unwrap(), pid);
    });
}

#[test]
fn in_a_container_the_device_table_is_made_first() {
    let places = vec![Place::container(&[1])];
    on_each_generation(Config { places, ..Config::default() }, |_, emulator| {
        let process = start().unwrap();
        let state = emulator.state();
        assert_eq!(state.device_processes.len(), 1);
        assert_eq!(state.device_processes[0].device, 1, "logical 0 of this container");
        process.close().unwrap();
    });
}

#[test]
fn in_a_container_without_devices_the_error_gives_the_reason() {
    let places = vec![Place::container(&[])];
    isolated(Config { places, ..Config::default() }, |_| {
        let failure = start().unwrap_err();
        assert!(matches!(failure, ProcessFailure::Register { .. }), "{failure:?}");
        assert!(failure.remedy().contains("/dev/davinciN"));
    });
}

#[test]
fn an_absent_daemon_is_reported_as_absent() {
    isolated(with_daemon(Daemon::Absent), |emulator| {
        let failure = start().unwrap_err();
        assert_eq!(failure, ProcessFailure::Transport { step: Step::Connect, command: "CONNECT", code: 20 });
        assert!(failure.to_string().contains("does not run on the device"), "{failure}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_daemon_that_starts_late_is_waited_for() {
    isolated(with_daemon(Daemon::Absent), |emulator| {
        std::thread::scope(|scope| {
            let starting = scope.spawn(|| {
                let settings = patient().limit(Step::Connect, PATIENCE);
                start_on(0, &settings).unwrap().close()
            });
            emulator.record();
            wait_until("a refused CONNECT", || commands(emulator).contains(&"CONNECT"));
            emulator.control(|driver| driver.machine.daemon = Daemon::Works);
            starting.join().unwrap().unwrap();
        });
    });
}

#[test]
fn a_daemon_that_answers_late_is_waited_for() {
    isolated(with_daemon(Daemon::Late(Duration::from_millis(300))), |_| {
        let begun = Instant::now();
        start().unwrap().close().unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(900), "three answers: {:?}", begun.elapsed());
    });
}

#[test]
fn a_daemon_that_never_answers_is_waited_for_as_long_as_allowed() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        let begun = Instant::now();
        let failure = start_on(0, &patient().limit(Step::Handshake, SHORT)).unwrap_err();
        assert_eq!(failure, ProcessFailure::TimedOut { step: Step::Handshake });
        assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_daemon_that_never_stops_sending_is_not_listened_to_for_longer_than_allowed() {
    isolated(with_daemon(Daemon::Floods), |emulator| {
        let begun = Instant::now();
        let failure = start_on(0, &patient().limit(Step::Handshake, SHORT)).unwrap_err();
        assert_eq!(failure, ProcessFailure::TimedOut { step: Step::Handshake });
        assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
        assert_nothing_left(emulator);
    });
}

#[test]
fn unasked_packets_are_read_up_to_a_limit() {
    isolated(Config::default(), |emulator| {
        let process = start_on(0, &patient().limit(Step::Close, SHORT)).unwrap();
        emulator.control(|driver| driver.machine.daemon = Daemon::Floods);
        emulator.record();
        for look in [(|process| process.pid().is_ok()) as fn(&DeviceProcess) -> bool, DeviceProcess::is_connected] {
            let before = count(emulator, "RECV");
            assert!(look(&process));
            let read = count(emulator, "RECV") - before;
            assert!((7..=70).contains(&read), "{read} packets");
        }
        assert_eq!(process.close().unwrap_err(), ProcessFailure::TimedOut { step: Step::Close });
        assert_nothing_left(emulator);
    });
}

#[test]
fn an_answer_about_another_device_is_not_taken_for_this_ones() {
    on_each_generation(with_daemon(Daemon::Confused), |_, emulator| {
        for order in [Order::Short, Order::Vendor] {
            for device in [0, 1] {
                start_on(device, &patient().order(order)).unwrap().close().unwrap();
            }
        }
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_daemon_that_does_not_answer_the_preparation_starts_the_process_anyway() {
    isolated(Config::default(), |emulator| {
        // The capability query, and the package configuration.
        for kind in [40, 69] {
            emulator.control(move |driver| driver.machine.daemon = Daemon::Ignores(kind));
            let settings = patient().order(Order::Vendor).limit(Step::Prepare, SHORT);
            start_on(0, &settings).unwrap().close().unwrap();
            assert_nothing_left(emulator);
        }
        // But an answer must be valid.
        emulator.control(|driver| driver.machine.daemon = Daemon::Works);
        inject(emulator, "RECV#2[0]=ffffffff");
        let failure = start_on(0, &patient().order(Order::Vendor)).unwrap_err();
        assert!(matches!(failure, ProcessFailure::Garbage { step: Step::Prepare, .. }), "{failure:?}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn an_answer_that_is_no_message_is_an_error() {
    isolated(with_daemon(Daemon::Garbage), |emulator| {
        let failure = start().unwrap_err();
        assert!(matches!(failure, ProcessFailure::Garbage { step: Step::Handshake, .. }), "{failure:?}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_daemon_of_another_version_gets_no_start_message() {
    isolated(with_daemon(Daemon::OtherVersion(1231)), |emulator| {
        emulator.record();
        let failure = start().unwrap_err();
        assert_eq!(failure, ProcessFailure::Version { theirs: 1231, ours: 1230 });
        assert!(failure.to_string().contains("1231") && failure.to_string().contains("1230"), "{failure}");
        assert_eq!(count(emulator, "SEND"), 1);
        assert_nothing_left(emulator);
    });
}

#[test]
fn each_refusal_says_what_it_means_and_what_to_do() {
    isolated(Config::default(), |emulator| {
        let codes = ["E30003", "E30004", "E30006", "E30007", "E39001", "E39002", "E39003", "E39004", "E12345", ""];
        let mut texts = Vec::new();
        for error in codes {
            let error = error.to_owned();
            let daemon = Daemon::Refuses { code: 1, error: error.clone() };
            emulator.control(move |driver| driver.machine.daemon = daemon);
            let failure = start().unwrap_err();
            let ProcessFailure::Refused { code: 1, error_code, .. } = &failure else { panic!("{failure:?}") };
            assert_eq!(*error_code, error);
            assert!(failure.to_string().contains(&error), "{failure}");
            texts.push(failure.remedy());
            assert_nothing_left(emulator);
        }
        assert_eq!(texts[8], texts[9], "unknown codes have the general remedy");
        assert!(texts[0].contains("End other programs"));
    });
}

#[test]
fn the_daemons_text_is_printed_without_control_characters() {
    let daemon = Daemon::Refuses { code: 1, error: "E\x1b[31m\x07".into() };
    isolated(with_daemon(daemon), |emulator| {
        let failure = start().unwrap_err();
        assert!(failure.to_string().contains(r"(code 1, E\u{1b}[31m\u{7})"), "{failure}");
        assert!(!failure.to_string().contains(char::is_control), "{failure:?}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_refusal_is_tried_again_in_the_vendors_order_but_a_full_device_is_not() {
    isolated(with_daemon(Daemon::Refuses { code: 1, error: String::new() }), |emulator| {
        emulator.record();
        start().unwrap_err();
        assert_eq!(count(emulator, "CONNECT"), 2);
        start_on(0, &patient().order(Order::Short)).unwrap_err();
        assert_eq!(count(emulator, "CONNECT"), 3);
        emulator.control(|driver| driver.machine.daemon = Daemon::Refuses { code: 1, error: "E30003".into() });
        start().unwrap_err();
        assert_eq!(count(emulator, "CONNECT"), 4);
    });
}

#[test]
fn a_daemon_that_needs_the_vendors_order_gets_it() {
    isolated(with_daemon(Daemon::VendorOrder), |_| {
        let short = start_on(0, &patient().order(Order::Short));
        assert!(matches!(short, Err(ProcessFailure::Refused { .. })), "{short:?}");
        start_on(0, &patient().order(Order::Vendor)).unwrap().close().unwrap();
        start().unwrap().close().unwrap();
    });
}

#[test]
fn the_vendors_order_works_with_an_ordinary_daemon() {
    on_each_generation(Config::default(), |_, _| {
        start_on(0, &patient().order(Order::Vendor)).unwrap().close().unwrap();
    });
}

#[test]
fn a_daemon_that_closes_the_session_is_distinguished_from_a_silent_one() {
    isolated(with_daemon(Daemon::HangsUp), |emulator| {
        let failure = start_on(0, &patient().order(Order::Short)).unwrap_err();
        assert_eq!(failure, ProcessFailure::Closed { step: Step::Start });
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_node_that_cannot_be_opened_has_a_remedy() {
    isolated(Config { hdc_door: Door::Missing, ..Config::default() }, |emulator| {
        let failure = start().unwrap_err();
        assert_eq!(failure, ProcessFailure::Node { path: "/dev/hisi_hdc".into(), errno: Errno::ENOENT });
        assert!(failure.remedy().contains("container"));
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_missing_driver_is_an_error_and_not_a_panic() {
    isolated(Config { door: Door::Missing, ..Config::default() }, |emulator| {
        let nowhere = start();
        assert!(matches!(nowhere, Err(ProcessFailure::Register { .. })), "{nowhere:?}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    isolated(Config::default(), |emulator| {
        let failure = start_on(9, &patient()).unwrap_err();
        assert!(matches!(failure, ProcessFailure::Transport { step: Step::Connect, .. }), "{failure:?}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn two_devices_have_a_process_each() {
    isolated(Config::default(), |emulator| {
        let first = start_on(0, &patient()).unwrap();
        let second = start_on(1, &patient()).unwrap();
        assert_eq!(emulator.state().device_processes.len(), 2);
        first.close().unwrap();
        assert_eq!(pid_on(0), None);
        assert!(second.pid().unwrap().is_some() && second.is_connected());
    });
}

#[test]
fn two_host_processes_have_one_each_on_one_device() {
    isolated(Config::default(), |emulator| {
        let mine = start().unwrap();
        let other = start_process(|channel| {
            let theirs = start().unwrap();
            channel.pause();
            theirs.close().unwrap();
        });
        other.wait();
        let state = emulator.state();
        let mut owners: Vec<_> = state.device_processes.iter().map(|process| process.tgid).collect();
        owners.sort_unstable();
        let mut expected = [own_pid(), other.pid()];
        expected.sort_unstable();
        assert_eq!(owners, expected);
        other.signal();
        other.join();
        assert!(mine.pid().unwrap().is_some());
    });
}

#[test]
fn killing_the_host_process_ends_the_device_process() {
    isolated(Config::default(), |emulator| {
        let victim = start_process(|channel| {
            let _process = start().unwrap();
            channel.pause();
        });
        victim.wait();
        assert_eq!(emulator.state().device_processes.len(), 1);
        victim.kill();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_full_device_refuses_until_another_process_ends() {
    isolated(Config { device_process_limit: 1, ..Config::default() }, |_| {
        let other = start_process(|channel| {
            let _process = start().unwrap();
            channel.pause();
        });
        other.wait();
        let failure = start().unwrap_err();
        assert!(
            matches!(&failure, ProcessFailure::Refused { error_code, .. } if error_code == "E30003"),
            "{failure:?}"
        );
        other.signal();
        other.join();
        start().unwrap().close().unwrap();
    });
}

#[test]
fn a_device_process_that_dies_is_noticed_and_can_be_replaced() {
    isolated(Config::default(), |emulator| {
        let process = start_on(0, &patient().limit(Step::Close, SHORT)).unwrap();
        end_device_process(emulator, 0);
        assert_eq!(process.pid().unwrap(), None);
        // Whatever the daemon answers for a process that is gone, closing does not hang.
        let begun = Instant::now();
        let _ = process.close();
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        start().unwrap().close().unwrap();
    });
}

#[test]
fn a_device_process_can_be_started_from_any_thread() {
    isolated(Config::default(), |_| {
        // Like kernels from 5.17 on, the emulated driver deletes the registration of a process when
        // a thread other than the main one opens DEVMNG. This body runs beside the main thread
        // already; two more threads must not disturb each other.
        let first = std::thread::spawn(|| start_on(0, &patient()).unwrap()).join().unwrap();
        let second = std::thread::spawn(|| start_on(1, &patient()).unwrap()).join().unwrap();
        assert!(first.pid().unwrap().is_some() && second.pid().unwrap().is_some());
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(second.pid().unwrap().is_some());
    });
}

#[test]
fn a_registration_that_another_library_deletes_is_renewed_before_the_start() {
    isolated(with_daemon(Daemon::Absent), |emulator| {
        let settings = patient().order(Order::Short).limit(Step::Connect, PATIENCE);
        emulator.record();
        std::thread::scope(|scope| {
            let starting = scope.spawn(|| start_on(0, &settings));
            wait_until("a refused CONNECT", || commands(emulator).contains(&"CONNECT"));
            // This process is registered and waits for the daemon. This thread is not the main one,
            // so on kernels from 5.17 on opening DEVMNG deletes the registration.
            assert_eq!(emulator.state().registrations, [own_pid()]);
            let foreign = ModuleFile::open(davinci::module::DEVMNG);
            assert!(emulator.state().registrations.is_empty());
            emulator.control(|driver| driver.machine.daemon = Daemon::Works);
            let process = starting.join().unwrap().unwrap();
            assert!(process.pid().unwrap().is_some());
            drop(process);
            drop(foreign);
        });
        // Our file stayed open beside the other one. The next use of it is the last.
        assert_eq!(device_process::device_pid(LogicalId(0)).unwrap(), None);
    });
}

#[test]
fn one_file_serves_all_queries_and_stays_open_as_long_as_it_is_needed() {
    isolated(Config::default(), |emulator| {
        let modules = |emulator: &Emulator| {
            let state = emulator.state();
            state.files.iter().filter(|file| file.module.as_deref() == Some("DEVMNG")).count()
        };
        let process = start().unwrap();
        // Other queries open and close no file of their own: closing one would tell the device that
        // this process died.
        assert!(pid_on(0).is_some());
        drop(start_on(1, &patient()).unwrap());
        assert_eq!(modules(emulator), 1);
        assert!(!emulator.state().device_processes[0].orphaned);
        drop(process);
        assert_eq!(modules(emulator), 0);
    });
}

#[test]
fn discovery_does_not_end_a_running_device_process() {
    isolated(Config::default(), |emulator| {
        let process = start().unwrap();
        discovery::survey(&survey_options());
        assert!(process.pid().unwrap().is_some());
        assert!(!emulator.state().device_processes[0].orphaned);
    });
}

#[test]
fn a_forked_child_cannot_end_its_parents_device_process() {
    isolated(Config::default(), |emulator| {
        let process = start().unwrap();
        let mut process = Some(process);
        fork(|| drop(process.take())).join();
        let process = process.unwrap();
        assert!(process.is_connected());
        assert!(process.pid().unwrap().is_some());
        assert!(!emulator.state().device_processes[0].orphaned);
        process.close().unwrap();
    });
}

#[test]
fn a_forked_child_asks_the_driver_nothing_about_its_parents_device_process() {
    isolated(Config::default(), |emulator| {
        let process = start().unwrap();
        emulator.record();
        let child = fork(|| {
            assert!(!process.is_connected());
            refused_in_child(&process.pid().unwrap_err());
        });
        let pid = child.pid();
        child.join();
        let calls: Vec<_> = emulator.records().into_iter().filter(|record| record.pid == pid).collect();
        assert!(calls.is_empty(), "{calls:#?}");
        assert!(process.is_connected());
    });
}

#[test]
fn a_forked_child_starts_its_own_device_process() {
    isolated(Config::default(), |emulator| {
        let process = start().unwrap();
        fork(|| start().unwrap().close().unwrap()).join();
        assert!(process.pid().unwrap().is_some());
        assert_eq!(emulator.state().device_processes.len(), 1);
    });
}

#[test]
fn refused_sends_and_lost_answers_are_errors_that_name_the_step() {
    isolated_leaky(Config::default(), |emulator| {
        inject(emulator, "SET_SESSION_OWNER#1=EPERM");
        let failure = start().unwrap_err();
        let expected = ProcessFailure::Transport { step: Step::Connect, command: "SET_SESSION_OWNER", code: 1 };
        assert_eq!(failure, expected);
        inject(emulator, "RECV#1=EINVAL");
        let settings = patient().order(Order::Short);
        assert_eq!(start_on(0, &settings).unwrap_err(), ProcessFailure::Closed { step: Step::Handshake });
        // An interrupted wait continues.
        inject(emulator, "RECV_PEEK#1=EINTR");
        start().unwrap().close().unwrap();
        inject(emulator, "CONNECT#1=EINTR");
        start().unwrap().close().unwrap();
    });
}
