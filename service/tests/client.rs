//! The Rust client where programs are not simple: forks, signals, panics, two clients at once.

mod support;

use ascend_emulator::{Config, Line, fork, isolated};
use ascend_vmm::{LogicalId, Session};
use ascend_vmm_service::protocol::Code;
use ascend_vmm_service::{Client, Error, Mode, OpenOptions};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{KEYS, MIB, Service, check_weights, device, name, options, write_weights};

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_child_has_no_part_in_the_roles_of_its_parent() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let mut reader = write_weights(&client, &device, &name("w"), KEYS);
        let child = fork(|| {
            let refused = reader.sleep().unwrap_err();
            assert!(matches!(refused, Error::Forked(_)), "{refused}");
            assert!(matches!(reader.wait_for_newer(Duration::ZERO), Err(Error::Forked(_))));
            // Its own connection works.
            assert_eq!(client.status().unwrap().domains[0].readers, 1);
        });
        child.join();
        assert_eq!(service.status().domains[0].readers, 1, "the child's end changed nothing");
        reader.sleep().unwrap();
        reader.wake().unwrap();
        check_weights(&reader, KEYS);
        drop((reader, device));
        service.end(emulator);
    });
}

#[test]
fn a_role_ends_with_its_process_though_a_child_has_a_copy_of_the_socket() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let ready = Line::new();
        let engine = fork(|| {
            let _reader = write_weights(&client, &device(), &name("w"), KEYS);
            // SAFETY: the child calls nothing but pause and exit.
            match unsafe { nix::libc::fork() } {
                0 => loop {
                    // SAFETY: it takes nothing.
                    unsafe { nix::libc::pause() };
                },
                child => ready.send(child as u64),
            }
            std::thread::sleep(Duration::from_secs(600));
        });
        let child = ready.receive() as i32;
        assert_eq!(service.status().domains[0].readers, 1);
        engine.kill();
        until("the role of a killed process ends", || service.status().domains[0].readers == 0);
        kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
        service.end(emulator);
    });
}

#[test]
fn a_reader_that_says_nothing_keeps_its_role_in_the_next_front_and_loses_it_with_its_process() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("resume-seconds = 0");
        let client = service.client();
        let ready = Line::new();
        let engine = fork(|| {
            let _reader = write_weights(&client, &device(), &name("w"), KEYS);
            ready.send(1);
            std::thread::sleep(Duration::from_secs(600));
        });
        ready.receive();
        service.kill_front();
        // It maps the memory: nobody may change it in place.
        assert_eq!(service.status().domains[0].readers, 1);
        let short = OpenOptions::new().wait(Duration::from_millis(50));
        let device = device();
        let refused = client.write(&device, &name("w"), Mode::Update, 0, &short).unwrap_err();
        assert_eq!(refused.code(), Some(Code::Timeout), "{refused}");
        engine.kill();
        drop(client.write(&device, &name("w"), Mode::Update, 0, &options()).unwrap());
        drop(device);
        service.end(emulator);
    });
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_signal_every_millisecond_in_an_engine_and_in_the_front_changes_nothing() {
    // Room for a version that is committed, and for the next one.
    isolated(Config { hbm: 192 * MIB, ..Config::default() }, |emulator| {
        let service = Service::start_with_signals();
        let client = service.client();
        let device = device();
        // Without SA_RESTART: every blocking call is interrupted.
        let action = SigAction::new(SigHandler::Handler(count), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler adds to a number.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        let stop = AtomicBool::new(false);
        /// Ends the signals, also if this test fails.
        struct EndSignals<'a>(&'a AtomicBool);
        impl Drop for EndSignals<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        // SAFETY: it takes nothing.
        let own = unsafe { nix::libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    // SAFETY: the thread lives until this one has ended.
                    unsafe { nix::libc::pthread_kill(own, nix::libc::SIGUSR1) };
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let _end = EndSignals(&stop);
            // Until there were some.
            while SIGNALS.load(Ordering::SeqCst) < 400 {
                let mut reader = write_weights(&client, &device, &name("w"), KEYS);
                reader.sleep().unwrap();
                reader.wake().unwrap();
                check_weights(&reader, KEYS);
                // Something that waits.
                let waited = reader.wait_for_newer(Duration::from_millis(20)).unwrap_err();
                assert_eq!(waited.code(), Some(Code::Timeout), "{waited}");
            }
        });
        drop(device);
        service.end(emulator);
    });
}

#[test]
fn progress_has_the_numbers_and_a_panic_in_it_leaves_a_writer_that_works() {
    isolated(Config { hbm: 64 * MIB, ..Config::default() }, |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&heard);
        let panics = options().progress(move |waiting| {
            told.lock().unwrap().push(waiting.clone());
            panic!("the progress bar is broken");
        });
        let mut cache = client.write(&device, &name("kv"), Mode::Write, 64 * MIB, &options()).unwrap();
        cache.allocate(40 * MIB, "").unwrap();
        let mut writer = client.write(&device, &name("w"), Mode::Write, 64 * MIB, &panics).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                until("somebody waits", || !heard.lock().map(|heard| heard.is_empty()).unwrap_or(false));
                cache.free_last().unwrap();
            });
            let panicked = catch_unwind(AssertUnwindSafe(|| writer.allocate(32 * MIB, "").map(drop)));
            assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the progress bar is broken"));
        });
        let heard = match heard.lock() {
            Ok(heard) => heard.clone(),
            Err(poisoned) => poisoned.into_inner().clone(),
        };
        assert_eq!((heard[0].wanted, heard[0].before), (32 * MIB, 0));
        assert!(heard[0].free < 32 * MIB && heard[0].reason.contains("32 MiB were asked for"), "{heard:?}");
        // The memory is there, mapped and counted.
        writer.slice(0, 32 * MIB).unwrap().fill(3).unwrap();
        writer.put("w", 32 * MIB, b"").unwrap();
        let reader = writer.commit().unwrap();
        assert_eq!(reader.bytes(), 32 * MIB);
        drop((reader, cache, device));
        service.end(emulator);
    });
}

#[test]
fn two_clients_in_one_process_share_what_they_import_and_not_their_roles() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let device = device();
        drop(write_weights(&service.client(), &device, &name("w"), KEYS));
        let (one, other) = (Client::new(service.path()), Client::new(service.path()));
        let mut first = one.read(&device, &name("w"), &options()).unwrap();
        let second = other.read(&device, &name("w"), &options()).unwrap();
        assert_eq!(service.status().domains[0].readers, 2);
        assert_ne!(first.address(), second.address());
        first.sleep().unwrap();
        check_weights(&second, KEYS);
        first.wake().unwrap();
        drop(second);
        check_weights(&first, KEYS);
        // In two threads at once.
        std::thread::scope(|scope| {
            for number in 0..4 {
                let (client, device) = (if number % 2 == 0 { &one } else { &other }, &device);
                scope.spawn(move || {
                    let mut reader = client.read(device, &name("w"), &options()).unwrap();
                    reader.sleep().unwrap();
                    reader.wake().unwrap();
                    check_weights(&reader, KEYS);
                });
            }
        });
        drop((first, device));
        service.end(emulator);
    });
}

#[test]
fn a_reader_hears_of_the_next_version_and_maps_it() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let mut reader = write_weights(&client, &device, &name("w"), KEYS);
        let writer = fork(|| drop(write_weights(&client, &self::device(), &name("w"), &["norm"])));
        let version = reader.wait_for_newer(Duration::from_secs(120)).unwrap();
        writer.join();
        let next = client.read(&device, &name("w"), &options()).unwrap();
        assert_eq!(next.version(), version);
        check_weights(&next, &["norm"]);
        check_weights(&reader, KEYS);
        drop((reader, next, device));
        service.end(emulator);
    });
}

#[test]
fn who_waits_for_a_role_or_a_version_waits_on_when_the_front_is_killed() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let reader = fork(|| check_weights(&client.read(&device(), &name("w"), &options()).unwrap(), KEYS));
        let watcher = fork(|| assert!(client.wait(&name("w"), 0, Duration::from_secs(120)).unwrap() > 0));
        for _ in 0..3 {
            until("both wait", || service.status().domains.iter().any(|domain| domain.waiting == 2));
            let front = service.status().front;
            service.kill_front();
            until("another front serves", || service.status().front != front);
        }
        fork(|| drop(write_weights(&client, &device(), &name("w"), KEYS))).join();
        reader.join();
        watcher.join();
        service.end(emulator);
    });
}

#[test]
fn readers_that_sleep_let_weights_be_changed_in_place_and_see_them_at_the_same_addresses() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let device = device();
        let mut reader = write_weights(&client, &device, &name("w"), KEYS);
        let address = reader.address();
        reader.sleep().unwrap();
        let (began, go) = (Line::new(), Line::new());
        let writer = fork(|| {
            let device = self::device();
            let mut writer = client.write(&device, &name("w"), Mode::Update, 0, &options()).unwrap();
            writer.put("norm", 4096, b"norm").unwrap().fill(9).unwrap();
            began.send(1);
            go.receive();
            writer.commit().unwrap();
        });
        began.receive();
        let told = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waking = scope.spawn(|| reader.wake());
            until("the reader waits", || service.status().domains[0].waiting == 1);
            go.send(1);
            waking.join().unwrap().unwrap();
            told.store(true, Ordering::SeqCst);
        });
        writer.join();
        assert_eq!(reader.address(), address);
        let mut bytes = [0; 4096];
        reader.get("norm").unwrap().part(0, 4096).unwrap().read(&mut bytes).unwrap();
        assert_eq!(bytes, [9; 4096]);
        drop((reader, device));
        service.end(emulator);
    });
}

#[test]
fn a_service_of_one_npu_refuses_the_others() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("devices = [1]");
        let physical: Vec<u32> = service.status().devices.iter().map(|device| device.physical).collect();
        assert_eq!(physical, [1]);
        let session = Session::open().unwrap();
        let devices = [0, 1].map(|id| session.device(LogicalId(id)).unwrap());
        let refused = service.client().write(&devices[0], &name("w"), Mode::Write, MIB, &options()).unwrap_err();
        assert_eq!(refused.code(), Some(Code::OtherDevice), "{refused}");
        drop(write_weights(&service.client(), &devices[1], &name("w"), KEYS));
        drop((devices, session));
        service.end(emulator);
    });
}

#[test]
fn a_front_that_replaced_another_leaves_its_command_to_the_next_one() {
    isolated(Config::default(), |emulator| {
        let mut service = Service::start("clients = 100");
        // The new front has another configuration, and says how the next one is started.
        service.set_policy("clients = 1");
        let mut replaced = service.replace_front();
        let places = |service: &Service| {
            let device = device();
            let refused = match client_holding(service, &device) {
                Ok(()) => None,
                Err(error) => Some(error.to_string()),
            };
            drop(device);
            refused.is_some_and(|refused| refused.contains("all 1 places are taken"))
        };
        assert!(places(&service));
        kill(Pid::from_raw(replaced.id() as i32), Signal::SIGKILL).unwrap();
        replaced.wait().unwrap();
        until("the next front has the configuration of the last", || places(&service));
        service.end(emulator);
    });
}

/// The program that a process runs.
fn program_of(process: i32) -> PathBuf {
    std::fs::read_link(format!("/proc/{process}/exe")).unwrap()
}

#[test]
fn another_program_takes_over_and_the_first_one_is_back_when_its_file_is_gone() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let device = device();
        let reader = write_weights(&service.client(), &device, &name("w"), KEYS);
        // A newer program: another file with other contents.
        let newer = service.directory.join("newer");
        let own = std::env::current_exe().unwrap();
        std::fs::copy(&own, &newer).unwrap();
        std::fs::OpenOptions::new().append(true).open(&newer).unwrap().write_all(b"newer").unwrap();
        let mut front = service.replace_front_by(&newer);
        assert_eq!(program_of(service.status().front), newer);
        check_weights(&reader, KEYS);
        kill(Pid::from_raw(front.id() as i32), Signal::SIGKILL).unwrap();
        front.wait().unwrap();
        until("the keeper starts the newer program", || program_of(service.status().front) == newer);
        // The keeper must live, whatever happens to files.
        std::fs::remove_file(&newer).unwrap();
        service.kill_front();
        until("the keeper starts what it has", || program_of(service.status().front) == own);
        assert_eq!(service.status().keeper, service.keeper.id() as i32);
        check_weights(&service.client().read(&device, &name("w"), &options()).unwrap(), KEYS);
        drop((reader, device));
        service.end(emulator);
    });
}

/// Opens one domain while another is open.
fn client_holding(service: &Service, device: &ascend_vmm::Device) -> Result<(), Error> {
    let _first = service.client().write(device, &name("a"), Mode::Write, MIB, &options())?;
    drop(service.client().write(device, &name("b"), Mode::Write, MIB, &options())?);
    Ok(())
}

#[test]
fn a_program_that_gives_up_waits_no_longer_and_ends_its_role() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let gives_up = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&gives_up);
        let options = OpenOptions::new().wait(Duration::from_secs(3600)).give_up(move || asked.load(Ordering::SeqCst));
        let (client, device) = (service.client(), device());
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It waits: nothing is committed.
                until("a reader waits", || service.status().clients.iter().any(|client| !client.waits.is_empty()));
                gives_up.store(true, Ordering::SeqCst);
            });
            let ended = client.read(&device, &name("w"), &options).unwrap_err();
            assert!(matches!(ended, Error::Interrupted(_)), "{ended}");
        });
        assert!(started.elapsed() < Duration::from_secs(600));
        until("nobody waits", || service.status().clients.iter().all(|client| client.waits.is_empty()));
        drop(device);
        service.end(emulator);
    });
}
