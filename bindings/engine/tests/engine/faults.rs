//! What goes wrong, and what an engine hears about it.

use crate::stack::{Stack, StandIn, stand_in};
use crate::story::{LONG, SHORT, check, open, write};
use crate::support::{MIB, Service, name, options};
use ascend_emulator::{Config, fork, isolated};
use ascend_vmm_engine::{Client, Error, Kind, Mode, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

fn kind<T>(result: Result<T, Error>) -> (Kind, String) {
    let error = result.err().expect("it is refused");
    let (problem, remedy) = error.problem_and_remedy();
    assert!(!problem.is_empty() && !remedy.is_empty(), "{error}: says nothing of what to do");
    (error.kind(), error.to_string())
}

#[test]
fn each_refusal_names_its_cause() {
    let policy = "[[allow]]\nusers = [4242]\nwrite = true\n[[allow]]\ndomains = [\"w\", \"big\", \"q\"]\nwrite = true\n\
                  [[quota]]\ndomain = \"q\"\nbytes = \"4 MiB\"\n";
    isolated(Config { hbm: 256 * MIB, ..Config::default() }, |emulator| {
        let service = Service::start(policy);
        let client = Client::new(service.path());
        let open_as = |domain: &str, mode, capacity, wait| {
            client.open(&name(domain), mode, capacity, &OpenOptions::new().wait(wait))
        };
        fork(|| {
            let stack = Stack::load();
            let (no_device, text) = kind(open(&service, Mode::Read));
            assert_eq!(no_device, Kind::NoDevice);
            assert!(text.contains("aclrtSetDevice"), "{text}");
            stack.set_device(0);
            assert_eq!(kind(open_as("w", Mode::Read, 0, SHORT)).0, Kind::Timeout);
            assert_eq!(kind(open_as("other", Mode::Write, MIB, LONG)).0, Kind::Forbidden);
            let mut quota = open_as("q", Mode::Write, 64 * MIB, LONG).unwrap();
            assert_eq!(kind(quota.allocate(6 * MIB, "", LONG)).0, Kind::Quota);
            assert_eq!(quota.allocate(4 * MIB, "", LONG).unwrap(), 0);
            let (capacity, text) = kind(quota.put("k", 65 * MIB, b"", LONG));
            assert_eq!(capacity, Kind::Invalid);
            assert!(text.contains("capacity"), "{text}");
            drop(quota);
            let mut big = open_as("big", Mode::Write, 1 << 30, LONG).unwrap();
            let (memory, text) = kind(big.allocate(512 * MIB, "", SHORT));
            assert!(matches!(memory, Kind::OutOfMemory | Kind::Timeout), "{text}");
            // It is whole all the same.
            big.allocate(2 * MIB, "", LONG).unwrap();
            drop(big);
            let weights = write(&stack, &service);
            // Somebody reads it.
            assert_eq!(kind(open_as("w", Mode::Update, 0, SHORT)).0, Kind::Timeout);
            // On the other NPU it is refused: by the service, and by this client for what is open.
            stack.set_device(1);
            assert_eq!(kind(open(&service, Mode::Read)).0, Kind::OtherDevice);
            let mut weights = weights;
            let (other, text) = kind(weights.sleep());
            assert_eq!(other, Kind::OtherDevice);
            assert!(text.contains("device 0") && text.contains("device 1"), "{text}");
            stack.set_device(0);
            check(&stack, &weights);
            let gone = Client::new("/no/such/socket").open(&name("w"), Mode::Read, 0, &options());
            assert_eq!(kind(gone).0, Kind::Unreachable);
        })
        .join();
        service.end(emulator);
    });
}

#[test]
fn a_child_has_no_part_in_the_domains_of_its_parent() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        fork(|| {
            let stack = Stack::with_device(0);
            let mut weights = write(&stack, &service);
            fork(|| {
                assert_eq!(kind(weights.sleep()).0, Kind::Forked);
                assert_eq!(kind(weights.wake(SHORT)).0, Kind::Forked);
                assert_eq!(kind(weights.close()).0, Kind::Forked);
                // The child of a process with the vendor's stack has no device.
                assert_eq!(kind(open(&service, Mode::Read)).0, Kind::NoDevice);
                drop(weights);
            })
            .join();
        })
        .join();
        service.end(emulator);
    });
}

#[test]
fn what_the_child_drops_stays_in_the_parent() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        fork(|| {
            let stack = Stack::with_device(0);
            let mut weights = write(&stack, &service);
            // SAFETY: the child ends at once, and runs what the object runs at its end.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: the copy in the parent is another one.
                    drop(unsafe { std::ptr::read(&weights) });
                    // SAFETY: it takes a number.
                    unsafe { libc::_exit(0) };
                }
                child => {
                    // SAFETY: NULL is allowed.
                    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
                }
            }
            check(&stack, &weights);
            assert_eq!(service.status().domains[0].readers, 1);
            weights.sleep().unwrap();
            weights.wake(LONG).unwrap();
            check(&stack, &weights);
        })
        .join();
        service.end(emulator);
    });
}

/// Writes with the stand-in, which has one memory for all.
fn with_stand_in(library: &Path, body: impl FnOnce(&StandIn, &Service)) {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        emulator.record();
        let engine = fork(|| {
            let stack = StandIn::load(library);
            stack.set_device(0);
            let mut weights = open(&service, Mode::Write).unwrap();
            for tag in ["a", "b", "c"] {
                weights.allocate(2 * MIB, tag, LONG).unwrap();
            }
            let address = weights.address();
            weights.place("all", address, 6 * MIB, b"").unwrap();
            assert_eq!(kind(weights.place("beyond", address + 1, 6 * MIB, b"")).0, Kind::Invalid);
            weights.commit().unwrap();
            drop(weights);
            assert_eq!(stack.held(), [0, 0, 0]);
            body(&stack, &service);
        });
        let pid = engine.pid();
        engine.join();
        // Whatever happened, this process has not touched the driver by itself.
        let calls: Vec<_> = emulator.records().into_iter().filter(|record| record.pid == pid).collect();
        assert!(calls.is_empty(), "{calls:?}");
        service.end(emulator);
    });
}

#[test]
fn a_mapping_call_that_fails_while_waking_leaves_nothing_mapped_and_the_next_wake_works() {
    with_stand_in(&stand_in(&[]), |stack, service| {
        let mut weights = open(service, Mode::Read).unwrap();
        let address = weights.address();
        for (function, after) in [
            ("aclrtMapMem", 0),
            ("aclrtMapMem", 2),
            ("aclrtMemImportFromShareableHandle", 0),
            ("aclrtMemImportFromShareableHandle", 2),
        ] {
            weights.sleep().unwrap();
            assert_eq!(stack.held(), [0, 0, 1]);
            stack.fail(function, after);
            let (refused, text) = kind(weights.wake(LONG));
            assert_eq!(refused, Kind::Refused);
            assert!(text.contains(function) && text.contains("507899") && text.contains("told to fail"), "{text}");
            assert!(!weights.is_awake());
            assert_eq!(stack.held(), [0, 0, 1], "{function} {after}");
            // For the service it is asleep too: an update does not wait for it.
            let status = service.status();
            assert_eq!(status.domains[0].state, "committed");
            weights.wake(LONG).unwrap();
            assert_eq!((weights.address(), stack.held()), (address, [3, 3, 1]));
        }
        // While falling asleep: what can be unmapped is, and it can be woken.
        for (function, after) in [("aclrtUnmapMem", 1), ("aclrtFreePhysical", 1)] {
            stack.fail(function, after);
            assert_eq!(kind(weights.sleep()).0, Kind::Refused);
            assert!(!weights.is_awake());
            weights.wake(LONG).unwrap();
            assert_eq!((weights.address(), stack.held()), (address, [3, 3, 1]), "{function}");
        }
        drop(weights);
        assert_eq!(stack.held(), [0, 0, 0]);
    });
}

#[test]
fn a_call_that_fails_while_opening_leaves_nothing() {
    with_stand_in(&stand_in(&[]), |stack, service| {
        for (function, after) in [
            ("aclrtReserveMemAddress", 0),
            ("aclrtMemImportFromShareableHandle", 1),
            ("aclrtMapMem", 0),
            ("aclrtMapMem", 2),
        ] {
            stack.fail(function, after);
            assert_eq!(kind(open(service, Mode::Read)).0, Kind::Refused);
            assert_eq!(stack.held(), [0, 0, 0], "{function} {after}");
        }
        // A writer whose new memory cannot be mapped is left with closing.
        let mut writer = open(service, Mode::Write).unwrap();
        writer.put("k", MIB, b"", LONG).unwrap();
        stack.fail("aclrtMapMem", 0);
        assert_eq!(kind(writer.allocate(2 * MIB, "", LONG)).0, Kind::Invalid);
        let mut writer = {
            drop(writer);
            Client::new(service.path()).open(&name("w"), Mode::Write, 64 * MIB, &options()).unwrap()
        };
        assert_eq!(kind(writer.allocate(2 * MIB, "", LONG)).0, Kind::Refused);
        assert_eq!(kind(writer.commit()).0, Kind::Invalid);
        writer.close().unwrap();
        drop(writer);
        assert_eq!(stack.held(), [0, 0, 0]);
    });
}

#[test]
fn what_a_writer_does_not_need_is_given_back() {
    with_stand_in(&stand_in(&[]), |stack, service| {
        let mut writer = open(service, Mode::Write).unwrap();
        for _ in 0..3 {
            writer.allocate(2 * MIB, "", LONG).unwrap();
        }
        let held = service.status().devices[0].held;
        // The second is used in part.
        assert_eq!(writer.trim(2 * MIB + 1).unwrap(), 2 * MIB);
        assert_eq!((writer.bytes(), stack.held()), (4 * MIB, [2, 2, 1]));
        assert_eq!(service.status().devices[0].held, held - 2 * MIB);
        let address = writer.address();
        writer.place("k", address, 4 * MIB, b"").unwrap();
        assert_eq!(writer.trim(2 * MIB + 1).unwrap(), 0);
        assert_eq!(kind(writer.trim(0)).0, Kind::Invalid);
        writer.commit().unwrap();
        assert_eq!(writer.entries().len(), 1);
        let reader = open(service, Mode::Read).unwrap();
        assert_eq!(reader.bytes(), 4 * MIB);
    });
}

#[test]
fn a_child_that_drops_a_domain_calls_nothing() {
    with_stand_in(&stand_in(&[]), |stack, service| {
        let weights = open(service, Mode::Read).unwrap();
        let held = stack.held();
        // SAFETY: the child ends at once, and runs what the object runs at its end.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: the copy in the parent is another one.
                drop(unsafe { std::ptr::read(&weights) });
                // SAFETY: it takes a number.
                unsafe { libc::_exit(i32::from(stack.held() != held)) };
            }
            child => {
                let mut status = -1;
                // SAFETY: room for the answer.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "the child has unmapped something");
            }
        }
    });
}

#[test]
fn two_readers_in_one_process_have_one_import() {
    with_stand_in(&stand_in(&[]), |stack, service| {
        let mut one = open(service, Mode::Read).unwrap();
        let mut two = open(service, Mode::Read).unwrap();
        assert_eq!(stack.held(), [6, 3, 2]);
        assert_ne!(one.address(), two.address());
        one.sleep().unwrap();
        assert_eq!(stack.held(), [3, 3, 2]);
        one.wake(LONG).unwrap();
        two.close().unwrap();
        assert_eq!(stack.held(), [3, 3, 1]);
        drop(one);
        assert_eq!(stack.held(), [0, 0, 0]);
    });
}

#[test]
fn a_library_that_lacks_a_function_or_is_not_there_is_named() {
    let lacking = stand_in(&["-DWITHOUT_IMPORT"]);
    fork(|| {
        let stack = StandIn::load(&lacking);
        stack.set_device(0);
        let (library, text) = kind(Client::new("/no/such/socket").open(&name("w"), Mode::Read, 0, &options()));
        assert_eq!(library, Kind::Library);
        assert!(text.contains("aclrtMemImportFromShareableHandle") && text.contains("WITHOUT_IMPORT"), "{text}");
    })
    .join();
    // A program without the loader's path, which was read when this one started.
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    command.args(["faults::opens_without_a_library", "--exact", "--nocapture"]);
    let output = command.env_remove("LD_LIBRARY_PATH").env("WITHOUT_A_LIBRARY", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Not a test: a process that has no libascendcl.so.
#[test]
fn opens_without_a_library() {
    if std::env::var_os("WITHOUT_A_LIBRARY").is_none() {
        return;
    }
    let (library, text) = kind(Client::new("/no/such/socket").open(&name("w"), Mode::Read, 0, &options()));
    assert_eq!(library, Kind::Library);
    assert!(text.contains("LD_LIBRARY_PATH"), "{text}");
}

#[test]
fn a_service_that_says_nothing_is_given_up() {
    let directory = std::env::temp_dir().join(format!("ascend-vmm-engine-silent-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("socket");
    let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let library = stand_in(&[]);
    fork(|| {
        let stack = StandIn::load(&library);
        stack.set_device(0);
        let started = Instant::now();
        let give_up = move || started.elapsed() > Duration::from_millis(200);
        let options = OpenOptions::new().wait(Duration::from_secs(3600)).give_up(give_up);
        assert_eq!(kind(Client::new(&path).open(&name("w"), Mode::Read, 0, &options)).0, Kind::Interrupted);
        assert!(started.elapsed() < Duration::from_secs(60));
    })
    .join();
    std::fs::remove_dir_all(&directory).unwrap();
}
