//! Starting and ending the process on the device, with every daemon that the emulated device can play.

use ascend_emulator::config::{Daemon, Door, Place};
use ascend_emulator::{Config, Emulator, Line, fork, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::davinci;
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::process::{self, DeviceProcess, Failure, Order, Settings, Step};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const MANAGER: &str = "/dev/davinci_manager";

/// Short waits, so that a daemon that never answers does not hold the test up.
fn impatient() -> Settings {
    Settings {
        patience: Duration::ZERO,
        handshake: Duration::from_millis(400),
        preparation: Duration::from_millis(200),
        start: Duration::from_millis(400),
        close: Duration::from_millis(400),
        ..Settings::default()
    }
}

fn start_on(device: u32, settings: &Settings) -> Result<DeviceProcess, Failure> {
    DeviceProcess::start(LogicalId(device), Path::new(MANAGER), settings)
}

fn start() -> Result<DeviceProcess, Failure> {
    start_on(0, &impatient())
}

fn with(daemon: Daemon) -> Config {
    Config { daemon, ..Config::default() }
}

fn pid_on(device: u32) -> Option<i32> {
    process::device_pid(LogicalId(device), Path::new(MANAGER)).unwrap()
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

/// Names of the commands that were sent, in order.
fn commands(emulator: &Emulator) -> Vec<&'static str> {
    emulator.records().iter().filter_map(|record| record.cmd).collect()
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
        assert!(process.connected());
        assert_eq!(state.registrations, [own_pid()]);
        process.close().unwrap();
        assert!(emulator.state().is_empty());
        assert_eq!(pid_on(0), None);
    });
}

#[test]
fn dropping_ends_it_as_closing_does() {
    isolated(Config::default(), |emulator| {
        emulator.record();
        drop(start().unwrap());
        assert!(emulator.state().is_empty());
        let commands = commands(emulator);
        assert_eq!(&commands[commands.len() - 5..], ["SEND", "RECV_PEEK", "RECV", "CLOSE", "CLOSE"]);
    });
}

#[test]
fn it_can_be_started_again() {
    isolated(Config::default(), |_| {
        let first = start().unwrap();
        let pid = first.pid().unwrap();
        first.close().unwrap();
        let second = start().unwrap();
        assert_ne!(second.pid().unwrap(), pid);
    });
}

#[test]
fn starting_takes_thirteen_calls_and_no_more() {
    // The session adds a question whether one runs, and SETUP_DEVICE once more: fifteen, and one getpid.
    isolated(Config::default(), |emulator| {
        emulator.record();
        let process = start().unwrap();
        let calls: Vec<_> =
            emulator.records().iter().map(|record| record.cmd.unwrap_or(record.call)).map(str::to_owned).collect();
        let expected = [
            "open",
            "OPEN",
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
        ];
        assert_eq!(calls, expected);
        drop(process);
    });
}

#[test]
fn greeting_starts_nothing() {
    isolated(Config::default(), |emulator| {
        let greeting = process::greet(LogicalId(0), Path::new(MANAGER), &impatient()).unwrap();
        assert_eq!(greeting.version, 1230);
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn in_a_container_the_devices_are_set_up_first() {
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
fn in_a_container_without_devices_the_reason_is_given() {
    let places = vec![Place::container(&[])];
    isolated(Config { places, ..Config::default() }, |_| {
        let failure = start().unwrap_err();
        assert!(matches!(failure, Failure::Register { .. }), "{failure:?}");
        assert!(failure.remedy().contains("/dev/davinciN"));
    });
}

#[test]
fn no_daemon_is_told_as_such() {
    isolated(with(Daemon::Absent), |emulator| {
        let failure = start().unwrap_err();
        assert_eq!(failure, Failure::Transport { step: Step::Connect, command: "CONNECT", code: 20 });
        assert!(failure.to_string().contains("does not run on the device"), "{failure}");
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_daemon_that_comes_up_late_is_waited_for() {
    isolated(with(Daemon::Absent), |emulator| {
        std::thread::scope(|scope| {
            let starting = scope.spawn(|| {
                let settings = Settings { patience: Duration::from_secs(20), ..impatient() };
                start_on(0, &settings).unwrap().close()
            });
            // Not before the first CONNECT was refused.
            emulator.record();
            while !commands(emulator).contains(&"CONNECT") {
                std::thread::yield_now();
            }
            emulator.control(|driver| driver.machine.daemon = Daemon::Works);
            starting.join().unwrap().unwrap();
        });
    });
}

#[test]
fn a_daemon_that_answers_late_is_waited_for() {
    isolated(with(Daemon::Late(Duration::from_millis(300))), |_| {
        let begun = Instant::now();
        let settings = Settings {
            handshake: Duration::from_secs(10),
            start: Duration::from_secs(10),
            close: Duration::from_secs(10),
            ..impatient()
        };
        start_on(0, &settings).unwrap().close().unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(900), "three answers: {:?}", begun.elapsed());
    });
}

#[test]
fn a_daemon_that_never_answers_costs_the_time_that_was_allowed() {
    isolated(with(Daemon::Silent), |emulator| {
        let begun = Instant::now();
        let failure = start().unwrap_err();
        assert_eq!(failure, Failure::TimedOut { step: Step::Handshake });
        assert!(begun.elapsed() >= Duration::from_millis(400) && begun.elapsed() < Duration::from_secs(5));
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn an_answer_that_is_no_message_is_refused() {
    isolated(with(Daemon::Garbage), |emulator| {
        let failure = start().unwrap_err();
        assert!(matches!(failure, Failure::Garbage { step: Step::Handshake, .. }), "{failure:?}");
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_daemon_of_another_version_is_not_asked_to_start_anything() {
    isolated(with(Daemon::OtherVersion(1231)), |emulator| {
        emulator.record();
        let failure = start().unwrap_err();
        assert_eq!(failure, Failure::Version { theirs: 1231 });
        assert!(failure.to_string().contains("1231") && failure.to_string().contains("1230"), "{failure}");
        assert_eq!(commands(emulator).iter().filter(|&&name| name == "SEND").count(), 1);
        assert!(emulator.state().is_empty());
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
            let Failure::Refused { code: 1, error_code, .. } = &failure else { panic!("{failure:?}") };
            assert_eq!(*error_code, error);
            assert!(failure.to_string().contains(&error), "{failure}");
            texts.push(failure.remedy());
            assert!(emulator.state().is_empty());
        }
        assert_eq!(texts[8], texts[9], "codes that nobody knows have the general remedy");
        assert!(texts[0].contains("end other programs"));
    });
}

#[test]
fn a_refusal_is_tried_again_in_the_vendors_order_but_a_full_device_is_not() {
    isolated(with(Daemon::Refuses { code: 1, error: String::new() }), |emulator| {
        let connects = |emulator: &Emulator| commands(emulator).iter().filter(|&&name| name == "CONNECT").count();
        emulator.record();
        start().unwrap_err();
        assert_eq!(connects(emulator), 2);
        start_on(0, &Settings { order: Order::Short, ..impatient() }).unwrap_err();
        assert_eq!(connects(emulator), 3);
        emulator.control(|driver| driver.machine.daemon = Daemon::Refuses { code: 1, error: "E30003".into() });
        start().unwrap_err();
        assert_eq!(connects(emulator), 4);
    });
}

#[test]
fn a_daemon_that_wants_the_vendors_order_gets_it() {
    isolated(with(Daemon::VendorOrder), |_| {
        let short = start_on(0, &Settings { order: Order::Short, ..impatient() });
        assert!(matches!(short, Err(Failure::Refused { .. })), "{short:?}");
        start_on(0, &Settings { order: Order::Vendor, ..impatient() }).unwrap().close().unwrap();
        start().unwrap().close().unwrap();
    });
}

#[test]
fn the_vendors_order_works_with_an_ordinary_daemon() {
    on_each_generation(Config::default(), |_, _| {
        start_on(0, &Settings { order: Order::Vendor, ..impatient() }).unwrap().close().unwrap();
    });
}

#[test]
fn a_daemon_that_hangs_up_is_told_from_one_that_is_silent() {
    isolated(with(Daemon::HangsUp), |emulator| {
        let settings = Settings { order: Order::Short, start: Duration::from_secs(20), ..impatient() };
        let failure = start_on(0, &settings).unwrap_err();
        assert_eq!(failure, Failure::Closed { step: Step::Start });
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_node_that_cannot_be_opened_has_a_remedy() {
    isolated(Config { hdc_door: Door::Missing, ..Config::default() }, |emulator| {
        let failure = start().unwrap_err();
        assert_eq!(failure, Failure::Node { path: "/dev/hisi_hdc".into(), errno: Errno::ENOENT });
        assert!(failure.remedy().contains("container"));
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_path_that_is_not_there_is_an_error_and_not_a_panic() {
    isolated(Config::default(), |emulator| {
        let settings = Settings { path: "/nonexistent/hdc".into(), ..impatient() };
        assert!(matches!(start_on(0, &settings), Err(Failure::Node { errno: Errno::ENOENT, .. })));
        let nowhere = DeviceProcess::start(LogicalId(0), Path::new("/nonexistent/manager"), &impatient());
        assert!(matches!(nowhere, Err(Failure::Register { .. })), "{nowhere:?}");
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    isolated(Config::default(), |emulator| {
        let failure = start_on(9, &impatient()).unwrap_err();
        assert!(matches!(failure, Failure::Transport { step: Step::Connect, .. }), "{failure:?}");
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn two_devices_have_a_process_each() {
    isolated(Config::default(), |emulator| {
        let first = start_on(0, &impatient()).unwrap();
        let second = start_on(1, &impatient()).unwrap();
        assert_eq!(emulator.state().device_processes.len(), 2);
        first.close().unwrap();
        assert_eq!(pid_on(0), None);
        assert!(second.pid().unwrap().is_some() && second.connected());
    });
}

#[test]
fn two_host_processes_have_one_each_on_one_device() {
    isolated(Config::default(), |emulator| {
        let mine = start().unwrap();
        let (started, finish) = (Line::new(), Line::new());
        let other = fork(|| {
            let theirs = start().unwrap();
            started.send(1);
            finish.receive();
            theirs.close().unwrap();
        });
        started.receive();
        let state = emulator.state();
        let mut owners: Vec<_> = state.device_processes.iter().map(|process| process.tgid).collect();
        owners.sort_unstable();
        let mut expected = [own_pid(), other.pid()];
        expected.sort_unstable();
        assert_eq!(owners, expected);
        finish.send(1);
        other.join();
        assert!(mine.pid().unwrap().is_some());
    });
}

#[test]
fn killing_the_host_process_ends_the_device_process() {
    isolated(Config::default(), |emulator| {
        let started = Line::new();
        let victim = fork(|| {
            let process = start().unwrap();
            started.send(1);
            std::thread::sleep(Duration::from_secs(100));
            drop(process);
        });
        started.receive();
        assert_eq!(emulator.state().device_processes.len(), 1);
        victim.kill();
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_device_that_is_full_says_so_until_somebody_leaves() {
    isolated(Config { device_process_limit: 1, ..Config::default() }, |_| {
        let (started, finish) = (Line::new(), Line::new());
        let other = fork(|| {
            let process = start().unwrap();
            started.send(1);
            finish.receive();
            drop(process);
        });
        started.receive();
        let failure = start().unwrap_err();
        assert!(matches!(&failure, Failure::Refused { error_code, .. } if error_code == "E30003"), "{failure:?}");
        finish.send(1);
        other.join();
        start().unwrap().close().unwrap();
    });
}

#[test]
fn a_device_process_that_dies_is_noticed_and_can_be_replaced() {
    isolated(Config::default(), |emulator| {
        let process = start().unwrap();
        let tgid = own_pid();
        assert!(emulator.control(move |driver| driver.machine.end_device_process(tgid, 0)));
        assert_eq!(process.pid().unwrap(), None);
        // However the daemon answers for a process that is gone, closing is not held up for longer than allowed.
        let begun = Instant::now();
        let _ = process.close();
        assert!(begun.elapsed() < Duration::from_secs(5));
        start().unwrap().close().unwrap();
    });
}

#[test]
fn it_works_when_the_library_is_first_used_from_another_thread() {
    isolated(Config::default(), |_| {
        // The emulated driver forgets a registration when a thread that is not the main one opens DEVMNG, as kernels from 5.17 on do.
        // This body itself runs beside the main thread; go one further and use three.
        let first = std::thread::spawn(|| start_on(0, &impatient()).unwrap()).join().unwrap();
        let second = std::thread::spawn(|| start_on(1, &impatient()).unwrap()).join().unwrap();
        assert!(first.pid().unwrap().is_some() && second.pid().unwrap().is_some());
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(second.pid().unwrap().is_some());
    });
}

#[test]
fn a_registration_that_another_library_destroys_meanwhile_is_renewed_before_the_start() {
    isolated(with(Daemon::Late(Duration::from_millis(500))), |emulator| {
        let settings = Settings {
            order: Order::Short,
            handshake: Duration::from_secs(10),
            start: Duration::from_secs(10),
            close: Duration::from_secs(10),
            ..impatient()
        };
        emulator.record();
        std::thread::scope(|scope| {
            let starting = scope.spawn(|| start_on(0, &settings));
            while !commands(emulator).contains(&"SEND") {
                std::thread::yield_now();
            }
            // We were registered and wait for the daemon's greeting. This thread is not the main one, so on kernels from 5.17 on
            // opening DEVMNG deletes the registration.
            assert_eq!(emulator.state().registrations, [own_pid()]);
            let foreign = open(MANAGER, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
            let mut arg = davinci::OpenArg::new(davinci::module::DEVMNG);
            // SAFETY: the argument is the struct that OPEN reads.
            let bound =
                unsafe { libc::ioctl(foreign.as_raw_fd(), davinci::OPEN.request() as _, std::ptr::from_mut(&mut arg)) };
            assert_eq!(bound, 0);
            assert!(emulator.state().registrations.is_empty());

            let process = starting.join().unwrap().unwrap();
            assert!(process.pid().unwrap().is_some());
            drop(process);
            // SAFETY: CLOSE does not read its argument.
            let closed = unsafe {
                libc::ioctl(foreign.as_raw_fd(), davinci::CLOSE.request() as _, std::ptr::from_mut(&mut arg))
            };
            assert_eq!(closed, 0);
        });
    });
}

#[test]
fn one_file_serves_all_and_stays_open_as_long_as_anybody_needs_it() {
    isolated(Config::default(), |emulator| {
        let modules = |emulator: &Emulator| {
            let state = emulator.state();
            state.files.iter().filter(|file| file.module.as_deref() == Some("DEVMNG")).count()
        };
        let process = start().unwrap();
        // Questions of others open and close no file of their own: closing any would tell the device that we died.
        assert!(pid_on(0).is_some());
        process::greet(LogicalId(1), Path::new(MANAGER), &impatient()).unwrap();
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
        ascend_vmm::discovery::survey(&Default::default());
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
        assert!(process.connected());
        assert!(process.pid().unwrap().is_some());
        assert!(!emulator.state().device_processes[0].orphaned);
        process.close().unwrap();
    });
}

#[test]
fn a_child_starts_its_own_after_a_fork() {
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
        emulator.inject("SET_SESSION_OWNER#1=EPERM".parse().unwrap());
        let failure = start().unwrap_err();
        let expected = Failure::Transport { step: Step::Connect, command: "SET_SESSION_OWNER", code: 1 };
        assert_eq!(failure, expected);
        emulator.inject("RECV#1=EINVAL".parse().unwrap());
        let settings = Settings { order: Order::Short, ..impatient() };
        assert_eq!(start_on(0, &settings).unwrap_err(), Failure::Closed { step: Step::Handshake });
        // An interrupted wait goes on.
        emulator.inject("RECV_PEEK#1=EINTR".parse().unwrap());
        start().unwrap().close().unwrap();
        emulator.inject("CONNECT#1=EINTR".parse().unwrap());
        start().unwrap().close().unwrap();
    });
}
