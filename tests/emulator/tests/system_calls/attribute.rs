//! `#[ascend_emulator::test]`: tests and helpers on emulated hosts.

use ascend_emulator::{Config, Emulator, isolated};
use std::fs::File;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fails in a process where it ran before.
fn assert_first() {
    static IS_USED: AtomicBool = AtomicBool::new(false);
    assert!(!IS_USED.swap(true, Ordering::Relaxed), "two bodies in one process");
}

/// Checks what a call that fails says. In the process of another body there is nothing to check.
#[track_caller]
fn fails(body: fn(), text: &str) {
    let ended = catch_unwind(body);
    if std::env::var_os("ASCEND_EMULATOR_ISOLATED").is_some() {
        return;
    }
    let said = *ended.unwrap_err().downcast::<String>().unwrap();
    assert!(said.contains(text), "{said}");
}

#[ascend_emulator::test]
fn without_arguments_it_is_the_usual_host() {
    assert_first();
    assert!(File::open("/dev/davinci1").is_ok());
    assert!(File::open("/dev/davinci2").is_err());
}

#[ascend_emulator::test(devices = 3, generation = "all", seed = 0..2)]
fn every_generation_is_run_with_every_seed(emulator: &Emulator) {
    assert_first();
    assert!(File::open("/dev/davinci2").is_ok());
    assert!(emulator.schedule().unwrap().seed < 2);
}

#[ascend_emulator::test(config = Config { numa_nodes: 3, ..Config::default() }, generation = ["8.5.0", "9.0.0"])]
fn a_test_may_end_with_an_error(emulator: &Emulator) -> Result<(), std::io::Error> {
    let (nodes, name) = emulator.control(|driver| {
        let config = &driver.machine.config;
        (config.numa_nodes, config.generation.name())
    });
    assert_eq!(nodes, 3);
    assert!(["8.5.0", "9.0.0"].contains(&name), "{name}");
    File::open("/dev/davinci0").map(drop)
}

#[ascend_emulator::test(devices = 1, faults = ["device0=dead", "copies=link-error"])]
fn faults_are_there_from_the_beginning(emulator: &Emulator) {
    assert!(emulator.control(|driver| driver.machine.device(0).unwrap().dead));
}

#[ascend_emulator::test(generation = "9.0.0", seed = 5)]
fn panics(_: &Emulator, reason: &str) {
    panic!("{reason}");
}

#[test]
fn a_failure_names_the_driver_and_the_seed() {
    fails(|| panics("so"), "on driver V9_0_0, seed 5: failed in its own process: so");
    fails(|| panics("other words"), "other words");
}

/// A helper: it has a parameter of its own.
#[ascend_emulator::test(generation = ["9.0.0", "26.1"])]
fn opens(_: &Emulator, device: u32, exists: bool) {
    assert_first();
    assert_eq!(File::open(format!("/dev/davinci{device}")).is_ok(), exists, "device {device}");
}

#[test]
fn a_helper_is_called_in_loops_and_several_times_in_one_test() {
    for device in 0..2 {
        opens(device, true);
    }
    opens(7, false);
    fails(|| opens(5, true), "device 5");
}

#[ascend_emulator::test(generation = "7.0")]
#[should_panic(expected = "`7.0` is not one of 8.5.0, 9.0.0, 26.1, all")]
fn an_unknown_generation_is_refused() {}

#[ascend_emulator::test(faults = "device9=dead")]
#[should_panic(expected = "there is no device 9 among 2")]
fn a_fault_that_is_not_possible_is_refused() {}

#[ascend_emulator::test]
#[should_panic(expected = "runs in a process of its own already")]
fn a_body_in_a_body_is_refused() {
    isolated(Config::default(), |_| {});
}

#[ascend_emulator::test]
#[should_panic(expected = "the test returned an error")]
fn an_error_fails_the_test() -> Result<(), String> {
    Err("no".into())
}

#[ascend_emulator::test]
#[should_panic(expected = "the test left this behind in the driver")]
fn what_is_left_in_the_driver_fails_the_test() {
    std::mem::forget(File::open("/dev/davinci0"));
}
