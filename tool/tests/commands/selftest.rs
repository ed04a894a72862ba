//! `ascend-vmm selftest` on the emulated driver: what passes, what fails, and the reports.

use crate::support::{PROGRAM, refusal, run_emulated, run_program, stderr, stdout};
use ascend_emulator::config::{Daemon, DeviceProcess, Door, Place};
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use serde_json::Value;
use std::collections::HashSet;
use std::process::{Command, Output, Stdio};

/// Runs `selftest` on an emulated host.
fn selftest(config: Config, faults: &[&str], arguments: &[&str]) -> Output {
    run_emulated(config, faults, Command::new(PROGRAM).arg("selftest").args(arguments))
}

/// The document of `selftest --json`, checked against its schema, and the exit status.
fn document(config: Config, faults: &[&str], arguments: &[&str]) -> (Value, i32) {
    let arguments: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
    let output = selftest(config, faults, &arguments);
    (crate::support::document(&output, "selftest"), output.status.code().unwrap())
}

/// The names of the checks with this outcome.
fn named<'a>(document: &'a Value, outcome: &str) -> Vec<&'a str> {
    let cases = document["cases"].as_array().unwrap().iter();
    cases.filter(|case| case["outcome"] == outcome).map(|case| case["name"].as_str().unwrap()).collect()
}

#[test]
fn every_operation_passes_in_every_generation() {
    for generation in Generation::ALL {
        let (document, status) = document(Config { generation, ..Config::default() }, &[], &[]);
        assert_eq!(named(&document, "failed"), [""; 0], "{generation}: {document:#}");
        assert_eq!(status, 0);
        assert_eq!(document["driver"], generation.to_string());
        assert!(document["summary"]["passed"].as_u64().unwrap() > 40, "{document:#}");
    }
}

#[test]
fn the_checks_of_a_device_that_does_not_open_are_skipped_and_the_cause_is_said_once() {
    let (closed, status) = document(Config { daemon: Daemon::Absent, ..Config::default() }, &[], &[]);
    assert_eq!(status, 1, "{closed:#}");
    let cases = closed["cases"].as_array().unwrap();
    for device in ["device 0", "device 1"] {
        let of_device = cases.iter().filter(|case| case["group"] == device);
        let of_device: Vec<_> = of_device.map(|case| (case["name"].as_str(), case["outcome"].as_str())).collect();
        let expected = [("the device opens", "failed"), ("all other checks of it", "skipped")];
        assert_eq!(of_device, expected.map(|(name, outcome)| (Some(name), Some(outcome))), "{closed:#}");
    }
    assert_eq!(named(&closed, "failed"), ["the device opens"; 2], "{closed:#}");
    let (document, _) = document(Config::default(), &["INIT_PROCESS=EIO"], &[]);
    assert_eq!(named(&document, "failed"), ["a session opens"], "{document:#}");
    assert!(named(&document, "skipped").contains(&"all other checks"), "{document:#}");
}

#[test]
fn rules_that_cannot_be_prepared_are_skipped_and_the_cause_is_said_once() {
    let (document, status) = document(Config { daemon: Daemon::Absent, ..Config::default() }, &[], &["--raw"]);
    assert_eq!(status, 1);
    let failed = named(&document, "failed");
    assert!((1..10).contains(&failed.len()), "{failed:#?}");
    let reason = format!("it ended where `{}` failed", failed[0]);
    let cases = document["cases"].as_array().unwrap();
    let skipped = cases.iter().filter(|case| case["outcome"] == "skipped" && case["detail"] == reason).count();
    assert!(skipped > 300, "{skipped} of {}", cases.len());
}

/// The commands of `selftest --random` on an emulated host: who makes them, with which argument.
fn random_calls(config: &Config, arguments: &[&str]) -> Vec<(bool, &'static str, Option<String>)> {
    let emulator = Emulator::start(config.clone()).unwrap();
    emulator.record();
    let mut command = Command::new(PROGRAM);
    command.args(["selftest", "--random"]).args(arguments).stdout(Stdio::piped());
    let output = emulator.spawn(&mut command).unwrap().wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stdout(&output));
    emulator.assert_no_traps();
    let state = emulator.state();
    assert!(state.is_empty(), "{state:#?}");
    let (stuck, leaked) = emulator.control(|driver| (driver.svm.stuck(), driver.svm.leaked()));
    assert_eq!((stuck, leaked), (0, 0), "what only loading the driver anew gives back");
    let records = emulator.records();
    let last = records.iter().filter(|record| record.cmd == Some("INIT_PROCESS")).map(|record| record.pid).max();
    let made = records.into_iter().filter_map(|it| Some((Some(it.pid) == last, it.cmd?, it.in_hex)));
    made.collect()
}

#[test]
fn random_calls_leave_a_host_of_any_generation_as_it_was() {
    for generation in Generation::ALL {
        let config = Config { generation, ..Config::default() };
        let calls = random_calls(&config, &["11", "--calls", "400"]);
        for command in ["MEM_CREATE", "MEM_MAP", "MEM_UNMAP", "MEM_EXPORT", "MEM_IMPORT", "MEMCPY", "FREE_PAGES"] {
            assert!(calls.iter().any(|(_, name, _)| *name == command), "{generation}: no {command}");
        }
        let (first, second): (Vec<_>, Vec<_>) = calls.iter().partition(|(second, ..)| !second);
        assert!(first.len() > 150 && second.len() > 150, "{generation}: {} and {}", first.len(), second.len());
    }
}

#[test]
fn the_same_number_makes_the_same_calls() {
    // Copies name memory of the process, which lies elsewhere each time.
    let calls = |seed: &str| -> Vec<_> {
        let calls = random_calls(&Config::default(), &[seed, "--calls", "300"]).into_iter();
        calls.filter(|(_, name, _)| matches!(*name, "MEM_CREATE" | "ALLOC" | "MEM_MAP" | "MEM_IMPORT")).collect()
    };
    let first = calls("5");
    assert!(first.len() > 50, "{}", first.len());
    assert_eq!(first, calls("5"));
    assert_ne!(first, calls("6"));
}

#[test]
fn what_can_crash_a_kernel_is_sent_only_if_it_is_asked_for_by_name() {
    let random = ["emulate", "--", PROGRAM, "selftest", "--random", "1", "--calls", "2000"];
    let output = run_program(&random);
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("half-freed-export"), "{}", stdout(&output));
    let output = run_program(&[&random[..], &["--hazard", "half-freed-export"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("release-of-half-freed-export"), "{}", stderr(&output));
    let error = refusal(&["selftest", "--random", "1", "--hazard", "none"]);
    assert!(error.contains("half-freed-export"), "{error}");
    assert!(refusal(&["selftest", "--calls", "5"]).contains("--random"));
}

#[test]
fn random_calls_need_a_device_and_a_session() {
    let none = Config { devices: 0, setup_patience: std::time::Duration::from_millis(10), ..Config::default() };
    let (without, status) = document(none, &[], &["--random", "1"]);
    assert_eq!((status, without["summary"]["failed"].as_u64()), (3, Some(1)), "{without:#}");
    let (document, status) = document(Config::default(), &["INIT_PROCESS=EIO"], &["--random", "1"]);
    assert_eq!(status, 1, "{document:#}");
    assert!(document.to_string().contains("EIO"), "{document:#}");
}

#[test]
fn the_device_process_suite_reports_what_each_firmware_does() {
    for (device_process, remark) in [
        (DeviceProcess::Required, "SETUP_DEVICE works once we have started a process"),
        (DeviceProcess::Automatic, "no device process was needed"),
    ] {
        let (document, status) =
            document(Config { device_process, devices: 1, ..Config::default() }, &[], &["--device-process"]);
        assert_eq!(status, 0, "{document:#}");
        assert!(document.to_string().contains(remark), "{document:#}");
    }
}

#[test]
fn the_policy_decides_whether_a_device_process_is_started() {
    let automatic = || Config { device_process: DeviceProcess::Automatic, devices: 1, ..Config::default() };
    for (policy, remark) in [
        ("auto", "without a device process of ours"),
        ("never", "without a device process of ours"),
        ("always", "with a device process of ours"),
    ] {
        let (document, status) = document(automatic(), &[], &["--device-process-policy", policy]);
        assert_eq!(named(&document, "failed"), [""; 0], "{policy}: {document:#}");
        assert_eq!(status, 0, "{policy}");
        let cases = document["cases"].as_array().unwrap();
        let opened = cases.iter().find(|case| case["name"] == "the device opens").unwrap();
        assert!(opened["detail"].as_str().unwrap().starts_with(remark), "{policy}: {opened}");
    }
}

#[test]
fn the_second_process_has_the_policy_of_the_first() {
    // The first process looks for the daemon's node in any case. The others open it to start a
    // process on the device.
    for (policy, others_start) in [("auto", false), ("always", true)] {
        let file = format!("{}/selftest-{policy}.jsonl", env!("CARGO_TARGET_TMPDIR"));
        let emulate = ["emulate", "--device-process", "automatic", "--record", &file, "--"];
        let selftest = [PROGRAM, "selftest", "--device", "0", "--device-process-policy", policy];
        let output = run_program(&[&emulate[..], &selftest].concat());
        assert!(output.status.success(), "{policy}: {}", stdout(&output));
        let calls = std::fs::read_to_string(&file).unwrap();
        let calls = calls.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let processes: HashSet<u64> =
            calls.filter(|call| call["path"] == "/dev/hisi_hdc").map(|call| call["pid"].as_u64().unwrap()).collect();
        assert_eq!(processes.len() > 1, others_start, "{policy}: {processes:?}");
    }
}

#[test]
fn a_device_that_needs_a_process_does_not_open_with_the_policy_never() {
    let config = Config { device_process: DeviceProcess::Required, devices: 1, ..Config::default() };
    let (document, status) = document(config, &[], &["--device-process-policy", "never"]);
    assert_eq!(status, 1);
    let failed = named(&document, "failed");
    assert!(failed.contains(&"the device opens"), "{failed:?}");
    assert!(document.to_string().contains("EFAULT"), "{document:#}");
}

#[test]
fn a_refusal_of_the_daemon_is_reported_with_its_code() {
    let daemon = Daemon::Refuses { code: 1, error: "E30003".into() };
    let (document, status) = document(Config { daemon, devices: 1, ..Config::default() }, &[], &["--device-process"]);
    assert_eq!(status, 1);
    assert!(document.to_string().contains("E30003"), "{document:#}");
}

#[test]
fn a_failing_operation_is_reported_with_the_full_error_and_the_others_still_run() {
    let (document, status) = document(Config { devices: 1, ..Config::default() }, &["MEMSET8=EIO"], &[]);
    assert_eq!(status, 1);
    let failed = named(&document, "failed");
    assert!(failed.contains(&"memory is filled"), "{failed:?}");
    let case = document["cases"].as_array().unwrap().iter().find(|case| case["outcome"] == "failed").unwrap();
    let detail = case["detail"].as_str().unwrap();
    assert!(detail.contains("MEMSET8") && detail.contains("EIO"), "{detail}");
    assert!(named(&document, "passed").contains(&"memory is copied to other memory of the device"));
}

#[test]
fn one_device_can_be_chosen_and_an_unknown_one_is_refused() {
    let (document, status) = document(Config::default(), &[], &["--device", "1"]);
    assert_eq!(status, 0);
    let groups: Vec<_> =
        document["cases"].as_array().unwrap().iter().map(|case| case["group"].as_str().unwrap()).collect();
    assert!(groups.contains(&"device 1") && !groups.contains(&"device 0"), "{groups:?}");
    let output = selftest(Config::default(), &[], &["--device", "7"]);
    assert_eq!(output.status.code(), Some(2));
    let error = stderr(&output);
    assert!(error.contains("no usable device 7; usable: devices 0, 1"), "{error}");
}

#[test]
fn a_host_without_a_usable_device_is_exit_3_with_the_reason() {
    for (config, word) in [
        (Config { door: Door::Missing, ..Config::default() }, ""),
        (Config { door: Door::Forbidden, ..Config::default() }, "file mode"),
        (Config { door: Door::Denied, ..Config::default() }, "cgroup"),
        (Config { devices: 0, ..Config::default() }, "no NPU"),
        (Config { places: vec![Place::container(&[0])], occupied: vec![0], ..Config::default() }, "another container"),
    ] {
        let (document, status) = document(config, &[], &[]);
        assert_eq!(status, 3, "{document:#}");
        assert!(document["summary"]["failed"].as_u64().unwrap() > 0);
        assert!(document.to_string().contains(word), "{word}: {document:#}");
    }
}

#[test]
fn a_container_with_some_of_the_devices_passes() {
    let config = Config { devices: 4, places: vec![Place::container(&[1, 3])], ..Config::default() };
    let (document, status) = document(config, &[], &[]);
    assert_eq!(named(&document, "failed"), [""; 0], "{document:#}");
    assert_eq!(status, 0);
}

#[test]
fn findings_about_the_host_are_printed_as_they_are_counted() {
    let config = Config { hdc_door: Door::Missing, device_process: DeviceProcess::Automatic, ..Config::default() };
    let text = stdout(&selftest(config, &[], &["--device", "0"]));
    let skipped = text.lines().filter(|line| line.starts_with("skip ")).count();
    assert!(text.contains("skip  host: nothing is wrong with the host: "), "{text}");
    assert!(text.trim_end().ends_with(&format!("{skipped} skipped")), "{text}");
}

#[test]
fn junit_reports_have_every_case() {
    let file = std::env::temp_dir().join(format!("ascend-vmm-junit-{}.xml", std::process::id()));
    let config = Config { devices: 1, ..Config::default() };
    let output = selftest(config, &["MEMSET8=EIO"], &["--junit", file.to_str().unwrap()]);
    let xml = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let lines = stdout(&output).lines().filter(|line| !line.starts_with(' ')).count();
    // Every line but the last is a check.
    assert_eq!(xml.matches("<testcase ").count(), lines - 1, "{xml}");
    assert!(xml.contains("<failure "), "{xml}");
}

#[test]
fn junit_and_json_are_written_in_one_run() {
    let file = std::env::temp_dir().join(format!("ascend-vmm-junit-json-{}.xml", std::process::id()));
    let config = Config { devices: 1, ..Config::default() };
    let output = selftest(config, &[], &["--json", "--junit", file.to_str().unwrap()]);
    let xml = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(output.status.code(), Some(0));
    let document = crate::support::document(&output, "selftest");
    assert_eq!(xml.matches("<testcase ").count(), document["cases"].as_array().unwrap().len());
}

#[test]
fn memory_in_1_gib_pages_is_tested_where_there_is_some_and_skipped_where_there_is_none() {
    let line = |giant_pages| {
        let output = selftest(Config { devices: 1, giant_pages, ..Config::default() }, &[], &[]);
        let text = stdout(&output);
        text.lines().find(|line| line.contains("memory in 1 GiB pages")).unwrap().to_owned()
    };
    assert_eq!(line(true), "ok    device 0: memory in 1 GiB pages is created and released");
    assert!(line(false).ends_with(": the device has no 1 GiB pages"), "{}", line(false));
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for arguments in [
        &["--device", "x"][..],
        &["--junit", "/nowhere/x"],
        &["--raw", "--device-process"],
        &["--raw", "--device-process-policy", "never"],
        &["--device-process", "--device-process-policy", "never"],
        &["--device-process-policy", "sometimes"],
    ] {
        refusal(&[&["selftest"], arguments].concat());
    }
}

#[test]
fn the_kernels_rules_are_checked_without_the_library() {
    let config = Config { generation: Generation::V9_0_0, ..Config::default() };
    let (document, status) = document(config, &[], &["--raw"]);
    assert_eq!(named(&document, "failed"), [""; 0], "{document:#}");
    assert_eq!((status, &document["driver"], &document["suite"]), (0, &"9.0.0".into(), &"raw".into()));
    assert!(named(&document, "passed").contains(&"releasing what is mapped is ebusy"));
    assert!(document["summary"]["passed"].as_u64().unwrap() > 500, "{}", document["summary"]);
}

#[test]
fn a_broken_rule_is_reported_with_its_source() {
    let (document, status) = document(Config::default(), &["MEMCPY2D=EIO"], &["--raw"]);
    assert_eq!(status, 1);
    let failed = named(&document, "failed");
    assert!(failed.contains(&"rows are copied both ways"), "{failed:?}");
    let text = document.to_string();
    let citation = "decided by devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c; proven by running the host driver";
    assert!(text.contains("got EIO") && text.contains(citation), "{failed:?}");
}

#[test]
fn rules_cannot_be_checked_on_a_host_without_a_driver() {
    let (document, status) = document(Config { door: Door::Missing, ..Config::default() }, &[], &["--raw"]);
    assert_eq!(status, 3);
    let cases = document["cases"].as_array().unwrap();
    assert_eq!((cases.len(), &cases[0]["outcome"]), (1, &"failed".into()));
    assert!(cases[0].to_string().contains("`probe` says why"), "{cases:?}");
}
