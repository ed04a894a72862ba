//! C and C++ programs against the header and the library, on the emulated driver in every
//! generation. Each leaves nothing in the driver.

use crate::support::{
    Linked, assert_nothing_left, compile, library, plain, programs, run, run_on_each_generation, run_ways,
};
use ascend_emulator::config::{Daemon, DeviceProcess, Door};
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

#[test]
fn process_threads_devices_and_errors() {
    run_on_each_generation("state.c");
}

#[test]
fn physical_memory_reservations_mappings_and_access() {
    run_on_each_generation("virtual_memory.c");
}

#[test]
fn the_names_of_the_drivers_library_are_on_the_same_books() {
    run_on_each_generation("hal.c");
}

#[test]
fn memory_by_address_host_memory_and_copies() {
    run_on_each_generation("malloc.c");
}

#[test]
fn streams_events_and_callbacks() {
    run_on_each_generation("streams.c");
}

#[test]
fn a_wait_for_an_event_is_for_its_latest_record_and_always_ends() {
    run_ways("events.c", &[&["waits"], &["resets"], &["waiters"]]);
}

#[test]
fn a_function_cannot_wait_for_its_own_stream_and_a_stream_not_for_a_callback_that_nobody_calls() {
    run_ways("events.c", &[&["functions"], &["unsubscribed"]]);
}

#[test]
fn notifies_stopped_and_configured_streams() {
    run_on_each_generation("notifies.c");
}

#[test]
fn pools_in_stream_order_described_copies_and_registered_host_memory() {
    run_on_each_generation("pools.c");
}

#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    run_ways("events.c", &[&["no-threads"]]);
}

#[test]
fn a_function_that_throws_or_ends_its_thread_aborts_the_process_with_a_sentence() {
    for linked in [Linked::Dynamically, Linked::Statically] {
        let Some(program) = compile("no_return.cpp", linked) else { return };
        for (how, caller) in [("throw", "stream"), ("throw", "report"), ("exit", "stream"), ("exit", "report")] {
            let emulator = Emulator::start(plain(Generation::NEWEST)).unwrap();
            let mut command = Command::new(&program);
            let child = emulator.spawn(command.args([how, caller]).stderr(Stdio::piped())).unwrap();
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{how}, {caller}: {said}");
            assert!(said.contains("It must return"), "{how}, {caller}: {said}");
            assert_nothing_left(&emulator);
        }
    }
}

#[test]
fn two_processes_share_memory_by_handles_and_keys() {
    run_on_each_generation("sharing.c");
}

#[test]
fn an_allocator_sleeps_and_wakes_at_the_same_addresses() {
    run_on_each_generation("sleep_mode.cpp");
}

#[test]
fn an_elastic_cache_maps_pages_and_one_page_of_zeros_elsewhere() {
    run_on_each_generation("elastic_kv.cpp");
}

#[test]
fn a_configuration_names_the_device_of_threads_that_have_none() {
    run_on_each_generation("default_device.c");
}

#[test]
fn the_programs_device_numbers_are_those_of_the_environment() {
    for (program, generation) in programs("visible.c") {
        let emulator = Emulator::start(plain(generation)).unwrap();
        run(&emulator, Command::new(&program).env("ASCEND_RT_VISIBLE_DEVICES", "1,0"));
        assert_nothing_left(&emulator);
    }
}

#[test]
fn a_host_on_which_something_is_missing_is_answered_with_the_vendors_code() {
    let hidden = ("ASCEND_RT_VISIBLE_DEVICES", "7");
    let named = ("ASCEND_ACL_SOC_NAME", "Ascend910_9392");
    for (program, generation) in programs("hosts.c") {
        let usual = || plain(generation);
        for (way, config, variable) in [
            ("no-driver", Config { door: Door::Missing, ..usual() }, None),
            ("hidden", usual(), Some(hidden)),
            ("no-process", Config { device_process: DeviceProcess::Required, daemon: Daemon::Absent, ..usual() }, None),
            ("named", usual(), Some(named)),
            ("giant", usual(), None),
            ("host-giant", Config { host_giant_pages: true, ..usual() }, None),
            ("no-giant", Config { giant_pages: false, ..usual() }, None),
            ("no-pod", Config { super_pod: false, ..usual() }, None),
            ("nodes", Config { numa_nodes: 2, ..usual() }, None),
            ("ddr", Config { ddr: true, ..usual() }, None),
        ] {
            let emulator = Emulator::start(config).unwrap();
            run(&emulator, Command::new(&program).arg(way).envs(variable));
            assert_nothing_left(&emulator);
        }
    }
}

#[test]
fn a_process_that_ends_in_any_way_leaves_nothing() {
    run_ways(
        "endings.c",
        &[&["exit"], &["atexit"], &["busy"], &["finalize-busy"], &["threads"], &["fork-before"], &["fork-after"]],
    );
    let program = compile("endings.c", Linked::Dynamically).unwrap();
    for generation in Generation::ALL {
        let emulator = Emulator::start(plain(generation)).unwrap();
        let mut killed = emulator.spawn(Command::new(&program).arg("kill")).unwrap();
        assert!(!killed.wait().unwrap().success());
        assert_nothing_left(&emulator);
    }
}

#[test]
fn mistakes_and_spite_are_answered_and_leave_nothing() {
    run_ways(
        "attacks.c",
        &[
            &["callbacks"],
            &["callback-destroys"],
            &["exit-in-callback"],
            &["threads"],
            &["races"],
            &["same-pages"],
            &["stale-handles"],
            &["fork-busy"],
            &["signals"],
            &["random"],
            &["first-calls"],
            &["closings"],
        ],
    );
}

#[test]
fn a_program_that_unloads_the_library_and_loads_it_again_finds_its_objects() {
    let program = compile("loaded.c", Linked::Not).unwrap();
    for generation in Generation::ALL {
        let emulator = Emulator::start(plain(generation)).unwrap();
        run(&emulator, Command::new(&program).arg(library()));
        assert_nothing_left(&emulator);
    }
}

#[test]
fn a_process_that_freed_all_and_finalized_has_nothing_in_the_driver() {
    let program = compile("endings.c", Linked::Dynamically).unwrap();
    let emulator = Emulator::start(plain(Generation::NEWEST)).unwrap();
    let mut command = Command::new(&program);
    command.arg("free-all").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = emulator.spawn(&mut command).unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "freed\n");
    assert!(emulator.state().is_empty(), "{:#?}", emulator.state());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn failures_are_logged_when_the_environment_asks_for_it() {
    let program = compile("state.c", Linked::Dynamically).unwrap();
    let emulator = Emulator::start(plain(Generation::NEWEST)).unwrap();
    let log = |wanted: &str| {
        let mut command = Command::new(&program);
        let child = emulator.spawn(command.env("ASCEND_ACL_LOG", wanted).stderr(Stdio::piped())).unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap()
    };
    let (errors, calls) = (log("errors"), log("calls"));
    assert!(errors.contains("aclrtSetDevice: 107001: there is no device 2"), "{errors}");
    assert!(!errors.contains(": 0\n"), "{errors}");
    assert!(calls.contains("aclrtSetDevice: 0\n") && calls.contains("aclrtSetDevice: 107001"), "{calls}");
    assert!(log("").is_empty());
}
