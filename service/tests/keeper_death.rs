//! What the death of the process that owns the memory costs, and what it does not.

mod support;

use ascend_emulator::{Config, Line, fork, isolated, on_each_generation};
use ascend_vmm_service::protocol::Code;
use ascend_vmm_service::{Error, Mode, OpenOptions};
use std::time::Duration;
use support::{KEYS, MIB, Service, check_weights, device, name, options, write_weights};

#[test]
fn who_is_awake_keeps_its_memory_and_nobody_falls_asleep() {
    on_each_generation(Config::default(), |_, emulator| {
        let mut service = Service::start("");
        let device = device();
        let mut reader = write_weights(&service.client(), &device, &name("w"), KEYS);
        service.kill_keeper();
        let refused = reader.sleep().unwrap_err();
        assert_eq!(refused.code(), Some(Code::KeeperGone), "{refused}");
        check_weights(&reader, KEYS);
        let refused = service.client().write(&device, &name("v"), Mode::Write, MIB, &options()).unwrap_err();
        assert_eq!(refused.code(), Some(Code::KeeperGone), "{refused}");
        drop(reader);
        drop(device);
        service.end_of_driver(emulator);
    });
}

#[test]
fn a_keeper_that_does_not_answer_lets_nobody_fall_asleep() {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let device = device();
        let mut reader = write_weights(&service.client(), &device, &name("w"), KEYS);
        let keeper = nix::unistd::Pid::from_raw(service.keeper.id() as i32);
        nix::sys::signal::kill(keeper, nix::sys::signal::Signal::SIGSTOP).unwrap();
        let stopped = || std::fs::read_to_string(format!("/proc/{keeper}/stat")).unwrap().contains(") T ");
        while !stopped() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (sleeps, slept) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let result = reader.sleep();
                sleeps.send(()).unwrap();
                result
            });
            // It waits for the keeper's answer, and nothing is unmapped before it.
            assert!(slept.recv_timeout(Duration::from_millis(200)).is_err());
            nix::sys::signal::kill(keeper, nix::sys::signal::Signal::SIGKILL).unwrap();
            let refused = sleeper.join().unwrap().unwrap_err();
            assert_eq!(refused.code(), Some(Code::KeeperGone), "{refused}");
        });
        check_weights(&reader, KEYS);
        drop((reader, device));
        service.end_of_driver(emulator);
    });
}

/// Whether a process that was on the list before, and one that was not, can import after the death.
fn joining(policy: &str, stranger: bool) {
    isolated(Config::default(), |emulator| {
        let mut service = Service::start(policy);
        let client = service.client();
        let holder = device();
        let reader = write_weights(&client, &holder, &name("w"), KEYS);
        let (ready, go) = (Line::new(), Line::new());
        let known = fork(|| {
            let device = device();
            drop(client.read(&device, &name("w"), &options()).unwrap());
            ready.send(1);
            go.receive();
            check_weights(&client.read(&device, &name("w"), &options()).unwrap(), KEYS);
        });
        ready.receive();
        service.kill_keeper();
        go.send(1);
        known.join();
        let new = fork(|| match client.read(&device(), &name("w"), &options()) {
            Ok(reader) => {
                assert!(stranger, "only the keeper could have allowed it");
                check_weights(&reader, KEYS);
            }
            Err(error) => assert!(!stranger && matches!(error, Error::Memory(_)), "{error}"),
        });
        new.join();
        check_weights(&reader, KEYS);
        drop((reader, holder));
        // The front ends with the last who could hold the memory.
        let gone = client.read(&device(), &name("w"), &OpenOptions::new().wait(Duration::ZERO)).unwrap_err();
        assert!(matches!(gone, Error::Unreachable { .. }), "{gone}");
        service.end_of_driver(emulator);
    });
}

#[test]
fn who_is_on_the_drivers_list_can_join_while_somebody_maps_the_memory_and_nobody_else_can() {
    joining("", false);
}

#[test]
fn with_trust_in_everyone_new_engines_join_while_somebody_maps_the_memory() {
    joining("trust = \"everyone\"", true);
}

#[test]
fn what_everybody_has_put_to_sleep_is_lost() {
    isolated(Config::default(), |emulator| {
        let mut service = Service::start("");
        let device = device();
        let mut reader = write_weights(&service.client(), &device, &name("w"), KEYS);
        reader.sleep().unwrap();
        service.kill_keeper();
        while emulator.state().memory.used.values().sum::<u64>() > 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let lost = reader.wake().unwrap_err();
        assert!(matches!(lost, Error::Memory(_)), "{lost}");
        assert!(matches!(reader.get("norm"), Err(Error::Asleep(_))));
        drop((reader, device));
        service.end_of_driver(emulator);
    });
}

#[test]
fn a_service_that_is_started_anew_takes_the_path_of_one_without_a_keeper() {
    isolated(Config::default(), |emulator| {
        let mut service = Service::start("");
        let device = device();
        let old = write_weights(&service.client(), &device, &name("w"), KEYS);
        service.kill_keeper();
        let again = service.start_again();
        assert_eq!(again.status().domains.len(), 0);
        let new = write_weights(&again.client(), &device, &name("w"), &["norm"]);
        check_weights(&old, KEYS);
        check_weights(&new, &["norm"]);
        drop((old, new, device));
        again.end(emulator);
    });
}
