//! `ascend-vmm probe` on every kind of host that the driver can be emulated on.

use crate::support::{PROGRAM, refusal, run_emulated, stderr, stdout};
use ascend_emulator::Config;
use ascend_emulator::config::{Daemon, DeviceProcess, Door, Phase, Place};
use ascend_ioctl::Generation;
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs `probe` on an emulated host.
fn probe(config: Config, arguments: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("probe").args(arguments).env_remove("ASCEND_RT_VISIBLE_DEVICES");
    run_emulated(config, &[], &mut command)
}

/// The document of `probe --json`, checked against its schema, and the exit status.
fn document(config: Config) -> (Value, i32) {
    let output = probe(config, &["--json", "--timeout", "1"]);
    (crate::support::document(&output, "probe"), output.status.code().unwrap())
}

/// The codes of the findings.
fn codes(document: &Value) -> Vec<&str> {
    document["findings"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

/// The document of a host on which the finding is reported, with this many devices and this exit
/// status.
#[track_caller]
fn finds(config: Config, code: &str, devices: usize, status: i32) -> Value {
    let (document, exit) = document(config);
    assert!(codes(&document).contains(&code), "{code} is not in {:?}\n{document:#}", codes(&document));
    assert_eq!(document["devices"].as_array().unwrap().len(), devices, "{document:#}");
    assert_eq!(exit, status, "{document:#}");
    document
}

/// The severity of a finding.
fn severity<'a>(document: &'a Value, code: &str) -> &'a str {
    let findings = document["findings"].as_array().unwrap();
    findings.iter().find(|finding| finding["code"] == code).unwrap()["severity"].as_str().unwrap()
}

/// A capability of a device.
fn offered<'a>(document: &'a Value, device: usize, feature: &str) -> &'a Value {
    &document["devices"][device]["features"][feature]["offered"]
}

/// `probe --open --json`, and its exit status.
fn opened(config: Config) -> (Value, i32) {
    let output = probe(config, &["--open", "--json"]);
    (crate::support::document(&output, "probe"), output.status.code().unwrap())
}

#[test]
fn a_healthy_host_is_described_in_every_generation() {
    for generation in Generation::ALL {
        let (document, status) = document(Config { generation, ..Config::default() });
        assert_eq!(status, 0);
        assert_eq!(codes(&document), [""; 0], "{document:#}");
        assert_eq!(document["driver"]["generation"], generation.to_string());
        assert_eq!(document["driver"]["memory"], "v2");
        assert_eq!(document["container"], false);
        let devices = document["devices"].as_array().unwrap();
        assert_eq!(devices.len(), 2);
        for (index, device) in devices.iter().enumerate() {
            assert_eq!(device["logical"], index);
            assert_eq!(device["state"], "working");
            assert_eq!(device["hbm"]["total"], 64u64 << 30);
            // Nothing was tried, so nothing is promised.
            for (name, feature) in device["features"].as_object().unwrap() {
                assert_eq!(feature["offered"], Value::Null, "{name}: {feature}");
                assert!(feature["reason"].is_string(), "{name}: {feature}");
            }
        }
        assert_ne!(devices[0]["identity"], devices[1]["identity"]);
    }
}

#[test]
fn an_open_device_is_tried_in_every_generation() {
    for generation in Generation::ALL {
        let (document, status) = opened(Config { generation, ..Config::default() });
        assert_eq!(status, 0, "{document:#}");
        for feature in ["vmm", "sharing", "between_devices", "peer", "host_access", "giant_pages"] {
            assert_eq!(offered(&document, 1, feature), true, "{feature}: {document:#}");
        }
        assert_eq!(offered(&document, 1, "fabric"), &Value::Null);
        assert_eq!(document["devices"][0]["giant_pages"]["total"], 64u64 << 30);
        assert_eq!(document["devices"][0]["share_over_external_bus"], false);
        assert_eq!(document["host"]["giant_pages"]["offered"], false);
    }
}

#[test]
fn a_device_that_cannot_be_opened_offers_nothing_and_says_why() {
    for (config, reason) in [
        (Config { hdc_door: Door::Missing, ..Config::default() }, "/dev/hisi_hdc"),
        (Config { daemon: Daemon::Absent, ..Config::default() }, "daemon"),
        (Config { device_process_limit: 0, ..Config::default() }, "E30003"),
    ] {
        let (document, status) = opened(config);
        assert_eq!(status, 1, "{document:#}");
        let found = document["findings"].as_array().unwrap();
        let found: Vec<&Value> = found.iter().filter(|finding| finding["code"] == "device-not-opened").collect();
        assert_eq!(found.len(), 2, "{document:#}");
        assert!(found[1]["sentence"].as_str().unwrap().contains(reason), "{reason}: {document:#}");
        assert!(found[1]["vendor"].as_str().unwrap().contains("507033"), "{document:#}");
        for (name, feature) in document["devices"][1]["features"].as_object().unwrap() {
            assert_eq!(feature["offered"], false, "{name}: {document:#}");
        }
    }
}

#[test]
fn one_device_that_cannot_be_opened_does_not_spoil_the_other() {
    let mut command = Command::new(PROGRAM);
    command.args(["probe", "--open", "--json"]);
    let output = run_emulated(Config { devices: 3, ..Config::default() }, &["device1=dead"], &mut command);
    let document = crate::support::document(&output, "probe");
    assert_eq!(output.status.code(), Some(1), "{document:#}");
    assert_eq!([0, 1, 2].map(|device| offered(&document, device, "vmm") == true), [true, false, true], "{document:#}");
    assert_eq!(offered(&document, 0, "peer"), true, "{document:#}");
}

#[test]
fn a_device_that_does_not_answer_leaves_time_to_try_the_others() {
    let mut command = Command::new(PROGRAM);
    command.args(["probe", "--open", "--json", "--timeout", "40"]);
    let config = Config { devices: 3, daemon: Daemon::Late(Duration::from_secs(1)), ..Config::default() };
    let begun = Instant::now();
    let output = run_emulated(config, &["device1=silent:600s"], &mut command);
    let document = crate::support::document(&output, "probe");
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
    assert_eq!(codes(&document), ["not-tried-in-time"], "{document:#}");
    assert_eq!(document["findings"][0]["device"], 1);
    assert_eq!([0, 1, 2].map(|device| offered(&document, device, "vmm") == true), [true, false, true], "{document:#}");
    assert_eq!(offered(&document, 1, "vmm"), &Value::Null);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_time_limit_ends_waits_for_every_device() {
    let begun = Instant::now();
    let config = Config { devices: 8, daemon: Daemon::Silent, ..Config::default() };
    let output = probe(config, &["--open", "--timeout", "2"]);
    // One device alone would be waited for 30 s.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let text = stdout(&output);
    assert!(text.contains("working  not known") && text.contains("same is true of devices 1 to 7"), "{text}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_a_missing_module_would_answer_is_unknown_and_not_absent() {
    let config = Config { missing_modules: vec!["URD".into()], ..Config::default() };
    let document = finds(config.clone(), "module-missing", 2, 1);
    for feature in ["fabric", "peer", "between_devices"] {
        let feature = &document["devices"][0]["features"][feature];
        assert_eq!(feature["offered"], Value::Null, "{document:#}");
    }
    let (opened, _) = opened(config);
    for feature in ["fabric", "peer"] {
        let feature = &opened["devices"][0]["features"][feature];
        assert_eq!(feature["offered"], Value::Null, "{opened:#}");
        assert_eq!(feature["reason"], "the driver's module URD is not loaded");
    }
}

#[test]
fn where_everything_works_nothing_is_said_about_starting_processes() {
    let config = Config { device_process: DeviceProcess::Automatic, hdc_door: Door::Missing, ..Config::default() };
    let (document, status) = opened(config.clone());
    assert_eq!((codes(&document), status), (vec![], 0), "{document:#}");
    finds(config, "no-daemon-node", 2, 1);
}

#[test]
fn chips_have_the_same_name_whoever_tells_it() {
    for config in [
        Config { phases: vec![(1, Phase::Removed)], ..Config::default() },
        Config { missing_modules: vec!["DEVMNG".into()], ..Config::default() },
        Config { missing_modules: vec!["URD".into()], ..Config::default() },
    ] {
        let text = stdout(&probe(config, &[]));
        assert_eq!(text.matches("  Ascend910B3  ").count(), 2, "{text}");
    }
}

#[test]
fn what_is_wrong_stands_above_the_table() {
    for arguments in [&[][..], &["--wide"]] {
        let text = stdout(&probe(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, arguments));
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what}: {text}"));
        assert!(at("\nwarning: device 1") < at("memory free"), "{text}");
    }
}

#[test]
fn pages_of_1_gib_are_reported_as_they_are() {
    let (document, _) = opened(Config { giant_pages: false, host_giant_pages: true, ..Config::default() });
    assert_eq!(offered(&document, 0, "giant_pages"), false, "{document:#}");
    assert_eq!(document["devices"][0]["giant_pages"]["total"], 0);
    assert_eq!(document["host"]["giant_pages"]["offered"], true, "{document:#}");
    // All of the memory is less than one such page.
    let (document, status) = opened(Config { hbm: 512 << 20, ..Config::default() });
    assert_eq!(offered(&document, 0, "giant_pages"), false, "{document:#}");
    assert_eq!(status, 0, "{document:#}");
}

#[test]
fn the_table_has_no_colour_codes_when_the_output_is_not_a_terminal() {
    let output = probe(Config::default(), &[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0));
    assert!(text.contains("Ascend910B3") && text.contains("working"), "{text}");
    assert!(text.contains("\n?    memory, 1 GiB pages, CPU access, sharing"), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
}

#[test]
fn a_host_without_a_driver_is_recognised() {
    let config = Config { door: Door::Missing, ..Config::default() };
    let (document, status) = document(config);
    // Whether the module is loaded is read from /proc of the real host, if that is readable.
    assert!(["driver-not-loaded", "node-missing"].contains(&codes(&document)[0]), "{document:#}");
    assert_eq!(status, 3);
}

#[test]
fn missing_permission_and_a_denying_cgroup_are_two_findings() {
    finds(Config { door: Door::Forbidden, ..Config::default() }, "no-permission", 0, 3);
    finds(Config { door: Door::Denied, ..Config::default() }, "denied-by-cgroup", 0, 3);
}

#[test]
fn nodes_that_this_user_may_not_open_are_recognised() {
    finds(Config { places: vec![Place::host_without(&[0, 1])], ..Config::default() }, "nodes-no-permission", 0, 3);
    finds(Config { places: vec![Place::host_without(&[1])], ..Config::default() }, "some-nodes-no-permission", 1, 1);
}

#[test]
fn a_stale_node_is_recognised() {
    finds(Config { door: Door::Stale, ..Config::default() }, "stale-node", 0, 3);
}

#[test]
fn a_module_that_is_not_loaded_is_recognised() {
    finds(Config { missing_modules: vec!["uda".into()], ..Config::default() }, "module-missing", 0, 3);
    finds(Config { missing_modules: vec!["SVM".into()], ..Config::default() }, "memory-driver-missing", 2, 1);
    // Without it nothing is known of a device, and no process can be started on it.
    finds(Config { missing_modules: vec!["DEVMNG".into()], ..Config::default() }, "module-missing", 2, 1);
}

#[test]
fn a_host_without_devices_is_recognised() {
    finds(Config { devices: 0, ..Config::default() }, "no-device", 0, 3);
}

#[test]
fn a_container_sees_its_own_devices_under_its_own_numbers() {
    let (document, status) = document(Config { devices: 4, places: vec![Place::container(&[2])], ..Config::default() });
    assert_eq!(status, 0);
    assert_eq!(document["container"], true);
    let device = &document["devices"][0];
    assert_eq!((&device["logical"], &device["physical"]), (&Value::from(0), &Value::from(2)), "{document:#}");
}

#[test]
fn a_container_without_a_device_is_recognised() {
    finds(Config { places: vec![Place::container(&[])], ..Config::default() }, "no-device-passed", 0, 3);
}

#[test]
fn a_device_of_another_container_is_recognised() {
    let config = Config { places: vec![Place::container(&[0, 1])], occupied: vec![1], ..Config::default() };
    let some = finds(config, "occupied", 1, 1);
    assert_eq!(severity(&some, "occupied"), "warning");
    let config = Config { places: vec![Place::container(&[0])], occupied: vec![0], ..Config::default() };
    let none = finds(config, "occupied", 0, 3);
    assert_eq!(severity(&none, "occupied"), "fatal");
    assert!(none["findings"][0]["vendor"].as_str().unwrap().contains("-8020"), "{none:#}");
}

#[test]
fn a_virtual_instance_is_recognised_and_does_not_share() {
    let config = Config {
        virtual_instances: vec![100],
        split_mode: 2,
        places: vec![Place::container(&[100])],
        ..Config::default()
    };
    let document = finds(config, "virtual-instance", 1, 0);
    let sharing = &document["devices"][0]["features"]["sharing"];
    assert_eq!(sharing["offered"], false);
    assert!(sharing["reason"].as_str().unwrap().contains("virtual instance"), "{sharing}");
}

#[test]
fn a_removed_device_is_recognised_although_it_is_listed() {
    let document = finds(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, "device-removed", 2, 1);
    assert_eq!(document["devices"][1]["features"]["vmm"]["offered"], false);
    // The other one is alone now, which is no fault of its.
    let (document, status) = opened(Config { phases: vec![(1, Phase::Removed)], ..Config::default() });
    assert_eq!(status, 1);
    assert_eq!(offered(&document, 0, "vmm"), true);
    assert_eq!(document["devices"][0]["features"]["peer"]["reason"], "there is no other device to use it with");
    let text = stdout(&probe(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, &[]));
    assert!(text.contains("\nno   memory of device 1: the device is in the state removed"), "{text}");
    assert!(text.contains("\n-    sharing between devices, peers of device 0:"), "{text}");
}

#[test]
fn devices_that_are_still_starting_are_not_waited_for_longer_than_allowed() {
    let config =
        Config { phases: vec![(1, Phase::Detected)], setup_patience: Duration::from_secs(100), ..Config::default() };
    let start = Instant::now();
    finds(config, "still-starting", 0, 3);
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn the_next_memory_interface_is_recognised() {
    let document = finds(Config { svm_v3: true, ..Config::default() }, "memory-driver-v3", 2, 1);
    assert_eq!(document["driver"]["memory"], "v3");
    assert_eq!(document["devices"][0]["features"]["vmm"]["offered"], false);
}

#[test]
fn a_missing_node_of_the_daemon_is_recognised() {
    finds(Config { hdc_door: Door::Missing, ..Config::default() }, "no-daemon-node", 2, 1);
}

/// `probe --json` with this value of ASCEND_RT_VISIBLE_DEVICES, on a host with two devices.
fn visible(value: &[u8]) -> (Value, i32) {
    let mut command = Command::new(PROGRAM);
    command.args(["probe", "--json"]).env("ASCEND_RT_VISIBLE_DEVICES", OsStr::from_bytes(value));
    let output = run_emulated(Config::default(), &[], &mut command);
    (crate::support::document(&output, "probe"), output.status.code().unwrap())
}

#[test]
fn hidden_devices_have_no_user_number() {
    let (document, status) = visible(b"1");
    assert_eq!((&document["devices"][0]["user"], &document["devices"][1]["user"]), (&Value::Null, &Value::from(0)));
    assert_eq!((codes(&document), status), (vec![], 0));
}

#[test]
fn a_list_of_visible_devices_that_hides_more_than_it_says_is_named() {
    for (value, code, part) in [
        (&b""[..], "visible-devices-empty", "hides every device"),
        (b"  ", "visible-devices-empty", "hides every device"),
        (b"a", "visible-devices-unreadable", "shows no device"),
        (b"0,x,1", "visible-devices-unreadable", "before \"x\", which is no number"),
        (b"0,", "visible-devices-unreadable", "only the first entry"),
        (b"1,1", "visible-devices-unreadable", "in it already"),
        (b"-1", "visible-devices-unreadable", "no number"),
        (b"0,4294967296", "visible-devices-unreadable", "no number"),
        (b"\xff,0", "visible-devices-unreadable", "no number"),
        (b"0,7,8", "visible-devices-absent", "devices 7, 8, which are not here: the driver lists devices 0 to 1"),
    ] {
        let (document, status) = visible(value);
        assert_eq!(codes(&document), [code], "{value:?}");
        let sentence = document["findings"][0]["sentence"].as_str().unwrap();
        assert!(sentence.starts_with("ASCEND_RT_VISIBLE_DEVICES is ") && sentence.contains(part), "{sentence}");
        assert_eq!(status, 1, "{value:?}");
    }
    // However long it is.
    let (document, _) = visible(&b"9,".repeat(50_000));
    assert!(document["findings"][0]["sentence"].as_str().unwrap().len() < 300);
}

#[test]
fn nothing_is_wider_than_80_columns() {
    for (config, arguments) in [
        (Config { devices: 16, ..Config::default() }, &["--open"][..]),
        (Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, &[]),
        (Config { daemon: Daemon::Absent, ..Config::default() }, &["--open"]),
        (Config { chip: "Ascend910_9392_with_a_name".into(), ..Config::default() }, &["--open"]),
        (Config { door: Door::Forbidden, ..Config::default() }, &[]),
    ] {
        let text = stdout(&probe(config, arguments));
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn columns_are_respected_even_if_tiny() {
    for columns in ["0", "1", "20", "40", "120", "999999999", "wide", ""] {
        let mut command = Command::new(PROGRAM);
        command.arg("probe").env("COLUMNS", columns);
        let output = run_emulated(Config::default(), &[], &mut command);
        assert_eq!(output.status.code(), Some(0), "{columns}: {}", stderr(&output));
        assert!(stdout(&output).contains("Ascend910B3"));
    }
}

#[test]
fn the_wide_table_has_a_line_for_each_device() {
    let text = stdout(&probe(Config { devices: 3, ..Config::default() }, &["--wide"]));
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("Ascend910B3")).collect();
    assert_eq!(rows.len(), 3, "{text}");
}

#[test]
fn a_pipe_that_closes_ends_it_quietly() {
    for arguments in
        [&["probe"][..], &["probe", "--json"], &["probe", "--watch", "1"], &["probe", "--json", "--watch", "1"]]
    {
        let mut command = Command::new(PROGRAM);
        command.arg("emulate").arg("--").arg(PROGRAM).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut runner = command.spawn().unwrap();
        // Closed before anything is read.
        drop(runner.stdout.take());
        let output = runner.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{arguments:?}");
        assert_eq!(stderr(&output), "", "{arguments:?}");
    }
}

#[test]
fn watching_prints_one_document_after_the_other() {
    let mut command = Command::new(PROGRAM);
    command.args(["emulate", "--", PROGRAM, "probe", "--json", "--watch", "1"]).stdout(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let mut lines = BufReader::new(runner.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let document: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        crate::support::schema::assert_fits("probe", &document);
    }
    drop(lines);
    assert_eq!(runner.wait().unwrap().code(), Some(141));
}

#[test]
fn watching_shows_what_changes_and_what_is_wrong_in_few_lines() {
    let mut command = Command::new(PROGRAM);
    command.args(["emulate", "--devices", "8", "--removed", "3", "--", PROGRAM, "probe", "--watch", "1"]);
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/host");
    let mut runner = command.args(["--root", root]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(runner.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut shown: Vec<String> = lines.by_ref().take_while(|line| !line.contains("process 4711")).collect();
    drop(lines);
    runner.wait().unwrap();
    shown.retain(|line| !line.is_empty());
    let of = |what: &str| shown.iter().position(|line| line.contains(what)).unwrap_or(usize::MAX);
    assert!(of("warning: device 3 was removed") < of("memory free"), "{shown:#?}");
    assert!(of("memory free") < of("in use, as far"), "{shown:#?}");
    // With the title and the empty lines it fits 24 rows.
    assert!(shown.len() <= 16, "{shown:#?}");
}

#[test]
fn a_root_that_is_no_directory_is_an_error() {
    for root in ["/no/such/directory", "/dev/null"] {
        let error = refusal(&["probe", "--root", root]);
        assert!(error.starts_with(&format!("error: --root {root} cannot be read: ")), "{error}");
    }
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for arguments in [
        &["--jsno"][..],
        &["--timeout", "0"],
        &["--timeout", "soon"],
        &["extra"],
        &["--watch", "0"],
        &["--watch", "-1"],
        &["--watch", "18446744073709551616"],
        &["--watch", "5", "--open"],
        &["--json", "--wide"],
    ] {
        refusal(&[&["probe"], arguments].concat());
    }
}

#[test]
fn an_unknown_generation_is_recognised() {
    let document = finds(Config { unknown_generation: true, ..Config::default() }, "unknown-generation", 2, 1);
    assert_eq!(document["driver"]["generation"], Value::Null);
}
