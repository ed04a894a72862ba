//! Limits of any length, and signals while the library waits.

mod support;

use ascend_emulator::config::Daemon;
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::device_process::{DeviceProcess, ProcessFailure, Settings, Step};
use ascend_vmm::discovery::{self, Options};
use ascend_vmm::pool::{Keep, PageCache, Pool, Tag};
use ascend_vmm::share::{Broker, BrokerOptions};
use ascend_vmm::{Error, LogicalId, Session, share};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::processes::start;
use support::{
    Directory, MIB2, PATIENCE, assert_nothing_left, contents, device, mapped_on, patient, plain, refused_here,
    survey_options, wait_until, with_daemon,
};

/// All limits the same.
fn limits(limit: Duration) -> Settings {
    Settings {
        patience: limit,
        connect: limit,
        handshake: limit,
        preparation: limit,
        start: limit,
        close: limit,
        ..Settings::default()
    }
}

#[test]
fn limits_that_no_clock_can_hold_are_no_limits() {
    isolated(Config::default(), |emulator| {
        for limit in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(u64::MAX / 2)] {
            let survey = discovery::survey(&Options { timeout: limit, ..survey_options() });
            assert_eq!(survey.devices.len(), 2, "{:?}", survey.findings);
            let session = Session::builder().device_process(limits(limit)).open().unwrap();
            let memory = session.device(LogicalId(0)).unwrap().create(MIB2).unwrap();
            let (here, there) = UnixStream::pair().unwrap();
            let child = fork(|| {
                let device = Session::open().unwrap().device(LogicalId(0)).unwrap();
                share::receive(&there, &device, limit).unwrap();
            });
            share::send(&here, &memory, limit).unwrap();
            child.join();
            drop(memory);
            session.close().unwrap();
            assert_nothing_left(emulator);
        }
    });
}

#[test]
fn limits_of_no_time_are_errors_that_say_so() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        let settings = limits(Duration::ZERO);
        let failure = DeviceProcess::start(LogicalId(0), Path::new("/dev/davinci_manager"), &settings).unwrap_err();
        assert!(matches!(failure, ProcessFailure::TimedOut { .. }), "{failure:?}");
        let session = Session::open().unwrap();
        let (_here, there) = UnixStream::pair().unwrap();
        let host = session.host().unwrap();
        let error = share::receive(&there, &host, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("did not come in time"), "{error}");
        drop((host, session));
        assert_nothing_left(emulator);
    });
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Signals to the thread that made this, one at each interval, as long as it lives. Not by a timer
/// of the process: those would come to its first thread.
struct Storm {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Storm {
    fn begin(interval: Duration, flags: SaFlags) -> Storm {
        SIGNALS.store(0, Ordering::Relaxed);
        let action = SigAction::new(SigHandler::Handler(count), flags, SigSet::empty());
        // SAFETY: the handler only adds to an atomic.
        unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
        // SAFETY: it has no conditions.
        let (target, over) = (unsafe { libc::pthread_self() }, Arc::new(AtomicBool::new(false)));
        let stop = over.clone();
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(interval);
                // SAFETY: the thread waits for this one before it ends.
                assert_eq!(unsafe { libc::pthread_kill(target, libc::SIGALRM) }, 0);
            }
        });
        Storm { over, thread: Some(thread) }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn a_storm_of_signals_makes_nothing_fail() {
    on_each_generation(Config::default(), |_, emulator| {
        // Without SA_RESTART a call that the emulated driver has not received yet is EINTR, which a
        // real driver's is not.
        let flags = SaFlags::SA_RESTART;
        for interval in [1, 20, 100].map(Duration::from_millis) {
            let _storm = Storm::begin(interval, flags);
            // At least one signal, however quick the machine is.
            while SIGNALS.load(Ordering::Relaxed) == 0 {
                let session = Session::builder().device_process(patient()).open().unwrap();
                let device = session.device(LogicalId(0)).unwrap();
                let mapping = mapped_on(&device, MIB2);
                mapping.write(0, b"storm").unwrap();
                assert_eq!(contents(&mapping, 0, 5), b"storm");
                drop((mapping, device));
                session.close().unwrap();
            }
            assert_nothing_left(emulator);
        }
    });
}

#[test]
fn a_daemon_that_is_silent_is_not_waited_for_longer_because_of_signals() {
    isolated(with_daemon(Daemon::Silent), |_| {
        for flags in [SaFlags::SA_RESTART, SaFlags::empty()] {
            let _storm = Storm::begin(Duration::from_millis(20), flags);
            let settings = Settings { handshake: Duration::from_millis(1500), ..patient() };
            let begun = Instant::now();
            let started = DeviceProcess::start(LogicalId(0), Path::new("/dev/davinci_manager"), &settings);
            assert!(matches!(started, Err(ProcessFailure::TimedOut { .. })), "{started:?}");
            assert!(begun.elapsed() >= Duration::from_millis(1500));
            assert!(begun.elapsed() < PATIENCE, "it hangs");
            assert!(SIGNALS.load(Ordering::Relaxed) > 0, "signals are let through while it waits");
        }
    });
}

#[test]
fn a_caller_can_give_up_while_a_device_is_silent() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let give_up = || ASKED.fetch_add(1, Ordering::Relaxed) == 1;
        let settings = Settings { give_up, ..limits(Duration::MAX) };
        let session = Session::builder().device_process(settings).open().unwrap();
        let error = session.device(LogicalId(0)).unwrap_err();
        let given_up = ProcessFailure::GivenUp { step: Step::Handshake };
        assert!(matches!(&error, Error::DeviceProcess { failure, .. } if **failure == given_up), "{error}");
        assert_eq!(ASKED.load(Ordering::Relaxed), 2);
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_caller_that_panics_when_asked_to_give_up_leaves_nothing_and_one_that_opens_a_device_gets_an_error() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        let settings = Settings { give_up: || panic!("of the caller"), ..limits(Duration::MAX) };
        let session = Session::builder().device_process(settings).open().unwrap();
        let mask = || SigSet::thread_get_mask().unwrap();
        let before = mask();
        for _ in 0..2 {
            let opened = catch_unwind(AssertUnwindSafe(|| session.device(LogicalId(0))));
            assert_eq!(*opened.unwrap_err().downcast_ref::<&str>().unwrap(), "of the caller");
            assert_eq!(mask(), before, "signals are as they were");
        }
        session.close().unwrap();
        assert_nothing_left(emulator);
        let give_up = || {
            let session = Session::current().unwrap();
            for device in [0, 1] {
                refused_here(&session.device(LogicalId(device)).unwrap_err(), "this thread is opening one");
            }
            drop(session.reserve(MIB2).unwrap());
            session.host().unwrap().create(MIB2).unwrap();
            true
        };
        let settings = Settings { give_up, ..limits(Duration::MAX) };
        let session = Session::builder().device_process(settings).open().unwrap();
        let error = session.device(LogicalId(0)).unwrap_err();
        assert!(matches!(error, Error::DeviceProcess { .. }), "{error}");
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_storm_of_signals_disturbs_no_sleep_no_waking_and_no_broker() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let path = directory.join("broker");
        let client = start(|channel| {
            channel.wait();
            let _storm = Storm::begin(Duration::from_millis(1), SaFlags::SA_RESTART);
            while channel.receive() != 0 {
                let socket = UnixStream::connect(&path).unwrap();
                assert_eq!(share::request(&socket, "pages", &device(0), PATIENCE).unwrap().len(), 2);
                channel.signal();
            }
        });
        let (session, device) = (Session::current().unwrap(), device(0));
        let pages: Vec<_> = (0..2).map(|_| device.create(MIB2).unwrap()).collect();
        let options = BrokerOptions::new().timeout(PATIENCE);
        let listener = UnixListener::bind(&path).unwrap();
        let broker = Broker::start(&session, listener, options, move |_| Ok(pages.clone())).unwrap();
        client.signal();
        let pool = Pool::new(&PageCache::new(&device));
        let block = pool.allocate(3 * MIB2, 1, Tag(0)).unwrap();
        block.write(MIB2, b"storm").unwrap();
        for interval in [1, 20, 100].map(Duration::from_millis) {
            let _storm = Storm::begin(interval, SaFlags::SA_RESTART);
            while SIGNALS.load(Ordering::Relaxed) == 0 {
                for keep in [Keep::Host, Keep::Pinned, Keep::File(directory.join("kept"))] {
                    pool.sleep(Tag(0), keep, |_| ()).unwrap();
                    pool.wake(&[Tag(0)], |_| ()).unwrap();
                }
                let mut word = [0; 5];
                block.read(MIB2, &mut word).unwrap();
                assert_eq!(&word, b"storm");
                client.send(1);
                client.wait();
            }
        }
        client.signal();
        client.join();
        drop((broker, block, pool, device, session));
        wait_until("the broker's threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn waits_for_other_processes_go_on_after_a_signal() {
    isolated(plain(), |_| {
        let memory = device(0).create(MIB2).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let child = fork(|| {
            let _storm = Storm::begin(Duration::from_millis(1), SaFlags::SA_RESTART);
            let device = device(0);
            share::receive(&there, &device, PATIENCE).unwrap();
        });
        let _storm = Storm::begin(Duration::from_millis(1), SaFlags::SA_RESTART);
        share::send(&here, &memory, PATIENCE).unwrap();
        child.join();
    });
}
