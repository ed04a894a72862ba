//! Limits of any length, and signals while the library waits.

use crate::support::processes::start;
use crate::support::{
    Directory, MIB2, PATIENCE, assert_nothing_left, contents, device, limits, mapped_on_host, patient, plain,
    refused_here, survey_options, wait_until, with_daemon,
};
use ascend_emulator::config::Daemon;
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::copy::write_batch;
use ascend_vmm::device_process::{DeviceProcess, ProcessFailure, Step};
use ascend_vmm::discovery;
use ascend_vmm::pool::{self, Keep, PageCache, Pool, Tag};
use ascend_vmm::share::{Broker, BrokerOptions};
use ascend_vmm::{Error, LogicalId, Session, share};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[test]
fn limits_too_long_for_the_clock_are_no_limits() {
    isolated(Config::default(), |emulator| {
        for limit in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(u64::MAX / 2)] {
            let survey = discovery::survey(&survey_options().timeout(limit));
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
fn limits_of_zero_are_errors_that_say_so() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        let settings = limits(Duration::ZERO);
        let failure = DeviceProcess::start(LogicalId(0), &settings).unwrap_err();
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

/// Sends a signal to the thread that made this at each interval, until dropped. A timer of the
/// process would send them to its first thread.
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

/// Handlers of both kinds, and how often signals come.
fn storms() -> impl Iterator<Item = (SaFlags, Duration)> + Clone {
    let flags = [SaFlags::SA_RESTART, SaFlags::empty()];
    flags.into_iter().flat_map(|flags| [1, 20, 100].map(|interval| (flags, Duration::from_millis(interval))))
}

/// Runs `work` in every storm until at least one signal came, however fast the machine is.
fn in_every_storm(mut work: impl FnMut()) {
    for (flags, interval) in storms() {
        let _storm = Storm::begin(interval, flags);
        while SIGNALS.load(Ordering::Relaxed) == 0 {
            work();
        }
    }
}

#[test]
fn a_storm_of_signals_disturbs_no_survey_no_open_and_no_start_of_a_device_process() {
    on_each_generation(Config::default(), |_, emulator| {
        in_every_storm(|| {
            assert_eq!(discovery::survey(&survey_options()).devices.len(), 2);
            let session = Session::builder().device_process(patient()).open().unwrap();
            let device = session.device(LogicalId(0)).unwrap();
            assert!(device.device_process().unwrap().is_connected());
            device.close().unwrap();
            session.close().unwrap();
            assert_nothing_left(emulator);
        });
    });
}

#[test]
fn a_storm_of_signals_disturbs_no_mapping_and_no_copy() {
    on_each_generation(plain(), |_, _| {
        let (session, device, peer) = (Session::current().unwrap(), device(0), device(1));
        let (reservation, host) = (session.reserve(2 * MIB2).unwrap(), mapped_on_host(MIB2));
        in_every_storm(|| {
            let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
            mapping.grant(&peer).unwrap();
            mapping.write(0, b"storm").unwrap();
            mapping.write_async(5, vec![b'!'; 5]).unwrap().wait().unwrap();
            host.slice(0, 10).unwrap().copy_from(&mapping.slice(0, 10).unwrap()).unwrap();
            assert_eq!(contents(&host, 0, 10), b"storm!!!!!");
            write_batch(&[(mapping.slice(0, 1).unwrap(), b"S")]).unwrap();
            assert_eq!(contents(&mapping, 0, 5), b"Storm");
            mapping.unmap().unwrap();
        });
    });
}

#[test]
fn signals_do_not_prolong_the_wait_for_a_silent_daemon() {
    isolated(with_daemon(Daemon::Silent), |_| {
        for flags in [SaFlags::SA_RESTART, SaFlags::empty()] {
            let _storm = Storm::begin(Duration::from_millis(20), flags);
            let settings = patient().limit(Step::Handshake, Duration::from_millis(1500));
            let begun = Instant::now();
            let started = DeviceProcess::start(LogicalId(0), &settings);
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
        let settings = limits(Duration::MAX).give_up(give_up);
        let session = Session::builder().device_process(settings).open().unwrap();
        let error = session.device(LogicalId(0)).unwrap_err();
        let given_up = ProcessFailure::GivenUp { step: Step::Handshake };
        assert!(matches!(&error, Error::DeviceProcess { failure, .. } if *failure == given_up), "{error}");
        assert_eq!(ASKED.load(Ordering::Relaxed), 2);
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_give_up_callback_may_panic_and_cannot_open_a_device() {
    isolated(with_daemon(Daemon::Silent), |emulator| {
        let settings = limits(Duration::MAX).give_up(|| panic!("of the caller"));
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
        let settings = limits(Duration::MAX).give_up(give_up);
        let session = Session::builder().device_process(settings).open().unwrap();
        let error = session.device(LogicalId(0)).unwrap_err();
        assert!(matches!(error, Error::DeviceProcess { .. }), "{error}");
        session.close().unwrap();
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_storm_of_signals_disturbs_no_broker_and_no_exchange() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let path = directory.join("broker");
        let (here, there) = UnixStream::pair().unwrap();
        let client = start(|channel| {
            channel.wait();
            in_every_storm(|| {
                channel.send(1);
                let socket = UnixStream::connect(&path).unwrap();
                assert_eq!(share::request(&socket, "pages", &device(0), PATIENCE).unwrap().len(), 2);
                share::receive(&there, &device(1), PATIENCE).unwrap();
            });
            channel.send(0);
        });
        let (session, device) = (Session::current().unwrap(), device(0));
        let pages: Vec<_> = (0..2).map(|_| device.create(MIB2).unwrap()).collect();
        let served = pages.clone();
        let options = BrokerOptions::default().timeout(PATIENCE);
        let listener = UnixListener::bind(&path).unwrap();
        let broker = Broker::start(&session, listener, options, move |_| Ok(served.clone())).unwrap();
        client.signal();
        // This side has storms of its own.
        let mut storms = storms().cycle();
        while client.receive() != 0 {
            let (flags, interval) = storms.next().unwrap();
            let _storm = Storm::begin(interval, flags);
            share::send(&here, &pages[0], PATIENCE).unwrap();
        }
        client.join();
        drop((broker, pages, device, session));
        wait_until("the broker's threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_storm_of_signals_disturbs_no_sleep_no_waking_and_no_file() {
    isolated(plain(), |_| {
        let directory = Directory::new();
        let device = device(0);
        let pool = Pool::new(&PageCache::new(&device));
        let block = pool.allocate(3 * MIB2, 1, Tag(0)).unwrap();
        block.write(MIB2, b"storm").unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(directory.join("file")).unwrap();
        let host = mapped_on_host(3 * MIB2);
        in_every_storm(|| {
            for keep in [Keep::Host, Keep::Pinned, Keep::File(directory.join("kept"))] {
                pool.sleep(Tag(0), keep, |_| ()).unwrap();
                pool.wake(&[Tag(0)], |_| ()).unwrap();
            }
            pool::store(&block.slice(0, 3 * MIB2).unwrap(), &file, 0, |_| ()).unwrap();
            pool::load(&file, 0, &host.slice(0, 3 * MIB2).unwrap(), |_| ()).unwrap();
            assert_eq!(contents(&host, MIB2, 5), b"storm");
            pool::load(&file, 0, &block.slice(0, 3 * MIB2).unwrap(), |_| ()).unwrap();
            let mut word = [0; 5];
            block.read(MIB2, &mut word).unwrap();
            assert_eq!(&word, b"storm");
        });
    });
}
