//! `ascend-vmm selftest` on the emulated driver: what passes, what fails, and the reports.

use crate::support::{PROGRAM, refusal, run_emulated, run_program, stderr, stdout};
use ascend_emulator::Config;
use ascend_emulator::config::{Daemon, DeviceProcess, Door, Place};
use ascend_ioctl::Generation;
use serde_json::Value;
use std::collections::HashSet;
use std::process::{Command, Output};

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
