//! The whole suite on the emulated driver: every generation and both attachments, with the same
//! program that runs on a real host.

use ascend_emulator::config::{Attachment, DeviceProcess, Door, Place};
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs the suite's program on an emulated host; returns its output and exit status.
fn run(config: Config, arguments: &[&str]) -> (String, Option<i32>) {
    let emulator = Emulator::start(config).expect("the emulated driver starts");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ascend-conformance"));
    // Some rules make tens of thousands of calls, and the machine may be busy.
    command.args(["--timeout", "600"]).args(arguments);
    let mut child = emulator.spawn(command.stdout(Stdio::piped())).expect("the suite starts");
    let mut output = String::new();
    child.stdout.take().expect("its output is piped").read_to_string(&mut output).expect("its output is text");
    let status = child.wait().expect("the suite ends");
    assert!(emulator.state().is_empty(), "the suite left something behind: {:?}", emulator.state());
    let stuck = emulator.control(|driver| driver.svm.stuck());
    assert_eq!(stuck, 0, "closed after EEXIST, which costs a real kernel 145 MB each");
    let leaked = emulator.control(|driver| driver.svm.leaked());
    let by_request = arguments.contains(&"--exhaustion");
    assert!(by_request || leaked == 0, "{leaked} references are never given back, and nobody asked for that");
    (output, status.code())
}

fn every_rule_is_kept(config: Config) {
    let (output, code) = run(config, &["--exhaustion"]);
    let failed: Vec<&str> = output.lines().filter(|line| line.starts_with("FAIL")).collect();
    assert!(failed.is_empty(), "{} rules failed:\n{}", failed.len(), failed.join("\n"));
    assert_eq!(code, Some(0), "{output}");
    let passed = output.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed >= 580, "only {passed} rules were checked");
}

/// Checks the rules whose names contain `part`.
fn every_rule_of(config: Config, part: &str) {
    let (output, code) = run(config, &["--exhaustion", part]);
    let starts = |word: &str| output.lines().any(|line| line.starts_with(word));
    assert!(starts("ok ") && !starts("FAIL") && !starts("skip "), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn every_generation_keeps_every_rule() {
    std::thread::scope(|scope| {
        for generation in Generation::ALL {
            scope.spawn(move || every_rule_is_kept(Config { generation, ..Config::default() }));
        }
    });
}

#[test]
fn the_emulated_devices_map_host_memory_through_the_link() {
    for generation in Generation::ALL {
        every_rule_of(Config { generation, ..Config::default() }, "mapped_through_the_link");
    }
}

#[test]
fn a_host_on_hccs_keeps_every_rule() {
    every_rule_is_kept(Config { attachment: Attachment::Hccs, ..Config::default() });
}

#[test]
fn a_host_with_giant_pages_keeps_the_rules_about_them() {
    for generation in Generation::ALL {
        let rules =
            ["an_import_counts_pages_as_their_owner_does", "a_device_maps_giant_pages_of_the_host_in_gibibytes"];
        let (output, code) = run(Config { generation, host_giant_pages: true, ..Config::default() }, &rules);
        assert!(output.contains("2 passed, 0 failed, 0 skipped"), "{output}");
        assert_eq!(code, Some(0), "{output}");
    }
}

#[test]
fn the_table_of_asynchronous_copies_is_as_large_as_the_drivers() {
    let (output, code) = run(Config::default(), &["--patience", "the_table_holds_65535_tasks"]);
    assert!(output.contains("ok   the_table_holds_65535_tasks"), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn firmware_without_the_drivers_shared_memory_skips_the_rules_about_health() {
    let rules = ["an_absent_device_has_no_state", "health_answers_positive_numbers"];
    for generation in Generation::ALL {
        let (output, code) = run(Config { generation, ..Config::default() }, &rules);
        assert!(output.contains("2 passed, 0 failed, 0 skipped"), "{output}");
        assert_eq!(code, Some(0), "{output}");
        let (output, code) = run(Config { generation, strange_firmware: true, ..Config::default() }, &rules);
        assert!(output.contains("0 passed, 0 failed, 2 skipped"), "{output}");
        assert!(output.contains(": needs firmware that keeps the state of devices"), "{output}");
        assert_eq!(code, Some(0), "{output}");
    }
}

#[test]
fn a_host_with_one_device_skips_what_needs_two() {
    let (output, code) = run(Config { devices: 1, ..Config::default() }, &["copies_between_devices", "mapped_host"]);
    assert!(output.contains("skip copies_between_devices_are_done: needs two devices"), "{output}");
    assert!(output.contains("ok   mapped_host_memory_is_the_cpus"), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn a_host_without_the_packet_node_skips_what_needs_it() {
    let config = Config { hdc_door: Door::Missing, device_process: DeviceProcess::Automatic, ..Config::default() };
    let (output, code) = run(config, &["device_process", "hdcdrv", "mapped_host"]);
    assert!(output.contains("skip a_file_owns_one_session: needs /dev/hisi_hdc"), "{output}");
    assert!(output.contains("ok   mapped_host_memory_is_the_cpus"), "{output}");
    assert!(!output.contains("FAIL"), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn a_host_without_task_scheduler_or_events_skips_their_rules() {
    let config = Config { missing_modules: vec!["TSDRV".into(), "ESCHED".into()], ..Config::default() };
    let (output, code) = run(config, &["trs_fops", "esched"]);
    assert!(output.contains("skip an_absent_device_has_no_tasks: this host has no task scheduler"), "{output}");
    assert!(output.contains("skip a_group_is_made_once: this host has no events"), "{output}");
    assert!(!output.contains("FAIL") && !output.contains("\nok "), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn what_may_cost_memory_for_good_runs_on_request_only() {
    let name = "an_import_in_the_name_of_another_server_is_never_forgotten";
    let (output, _) = run(Config::default(), &[name]);
    assert!(output.contains(&format!("skip {name}: may cost memory")), "{output}");
    let (output, code) = run(Config::default(), &["--exhaustion", name]);
    assert!(output.contains(&format!("ok   {name}")), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn a_suite_without_options_leaves_a_host_as_it_was() {
    let (output, code) = run(Config::default(), &[]);
    assert!(output.contains("ok   a_copy_keeps_no_reference"), "{output}");
    assert!(output.contains("skip copies_of_host_memory_imported_on_a_device_are_einval"), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn the_first_and_the_second_server_of_a_pod_are_judged_alike() {
    for server in [0, 1, 2] {
        every_rule_of(Config { server, ..Config::default() }, "another_server");
    }
}

#[test]
fn a_host_without_devices_is_distinguished_from_one_that_breaks_rules() {
    let patience = Duration::from_millis(10);
    let (output, code) = run(Config { devices: 0, setup_patience: patience, ..Config::default() }, &[]);
    assert_eq!((output.as_str(), code), ("no Ascend driver or no device on this host\n", Some(3)));
    let (output, code) = run(Config { door: Door::Missing, ..Config::default() }, &[]);
    assert_eq!((output.as_str(), code), ("no Ascend driver or no device on this host\n", Some(3)));
}

#[test]
fn a_container_keeps_every_rule_under_its_own_numbers() {
    every_rule_is_kept(Config { devices: 3, places: vec![Place::container(&[2, 1])], ..Config::default() });
}

#[test]
fn firmware_that_starts_device_processes_by_itself_keeps_every_rule() {
    every_rule_is_kept(Config { device_process: DeviceProcess::Automatic, ..Config::default() });
}

#[test]
fn an_unknown_generation_is_named_as_such() {
    let (output, code) = run(Config { unknown_generation: true, ..Config::default() }, &[]);
    assert_eq!((output.as_str(), code), ("", Some(1)));
}

/// Runs some rules on a driver with a fault; returns the output.
fn run_broken(fault: &str, arguments: &[&str]) -> String {
    let emulator = Emulator::start(Config::default()).expect("the emulated driver starts");
    emulator.inject(fault.parse().expect("the fault is known"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ascend-conformance"));
    let child = emulator.spawn(command.args(arguments).stdout(Stdio::piped())).expect("the suite starts");
    let output = child.wait_with_output().expect("the suite ends");
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stdout).expect("its output is text")
}

#[test]
fn a_driver_that_answers_differently_is_reported() {
    let output = run_broken("MEM_UNMAP=EIO", &["unmapping_twice_is_einval", "freeing_twice_is_einval"]);
    assert!(output.contains("FAIL unmapping_twice_is_einval: expected success of MEM_UNMAP, got EIO"), "{output}");
    assert!(output.contains("ok   freeing_twice_is_einval"), "{output}");
    assert!(output.contains("1 passed, 1 failed, 0 skipped"), "{output}");
}

#[test]
fn a_driver_that_does_not_answer_is_reported() {
    let output =
        run_broken("device0=silent:600s", &["--timeout", "15", "device_memory_holds_bytes", "freeing_twice_is_einval"]);
    assert!(output.contains("FAIL device_memory_holds_bytes"), "{output}");
    assert!(output.contains("ok   freeing_twice_is_einval"), "{output}");
}
