//! `cargo xtask probe` on every kind of host that the driver can be emulated on.

mod support;

use ascend_emulator::Config;
use ascend_emulator::config::{Door, Phase, Place};
use ascend_ioctl::Generation;
use serde_json::Value;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use support::{XTASK, refusal, run_emulated, stdout};

/// Runs `probe` on an emulated host.
fn probe(config: Config, arguments: &[&str]) -> Output {
    let mut command = Command::new(XTASK);
    command.arg("probe").args(arguments).env_remove("ASCEND_RT_VISIBLE_DEVICES");
    run_emulated(config, &[], &mut command)
}

/// The document of `probe --json`, checked against its schema, and the exit status.
fn document(config: Config) -> (Value, i32) {
    let output = probe(config, &["--json", "--timeout", "1"]);
    (support::document(&output, "probe"), output.status.code().unwrap())
}

/// The codes of the findings.
fn codes(document: &Value) -> Vec<&str> {
    document["findings"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

/// The document of a host on which the finding is reported, with so many devices.
#[track_caller]
fn finds(config: Config, code: &str, devices: usize) -> Value {
    let (document, status) = document(config);
    assert!(codes(&document).contains(&code), "{code} is not in {:?}\n{document:#}", codes(&document));
    assert_eq!(document["devices"].as_array().unwrap().len(), devices, "{document:#}");
    assert_eq!(status, if devices == 0 { 3 } else { 0 });
    document
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
            assert_eq!(device["features"]["vmm"]["offered"], true);
            assert_eq!(device["features"]["sharing"]["offered"], true);
        }
        assert_ne!(devices[0]["identity"], devices[1]["identity"]);
    }
}

#[test]
fn what_needs_an_open_device_is_queried_only_with_open() {
    let config = Config { devices: 1, ..Config::default() };
    let host_access = |arguments: &[&str]| -> Value {
        let document = support::document(&probe(config.clone(), arguments), "probe");
        document["devices"][0]["features"]["host_access"]["offered"].clone()
    };
    assert_eq!(host_access(&["--json"]), Value::Null);
    assert_eq!(host_access(&["--json", "--open"]), true);
}

#[test]
fn the_table_has_no_colour_codes_when_the_output_is_not_a_terminal() {
    let output = probe(Config::default(), &[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0));
    assert!(text.contains("Ascend910B3") && text.contains("working"), "{text}");
    assert!(text.contains("\ndevices 0, 1: host access: ?: "), "{text}");
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
    finds(Config { door: Door::Forbidden, ..Config::default() }, "no-permission", 0);
    finds(Config { door: Door::Denied, ..Config::default() }, "denied-by-cgroup", 0);
}

#[test]
fn nodes_that_this_user_may_not_open_are_recognised() {
    finds(Config { places: vec![Place::host_without(&[0, 1])], ..Config::default() }, "nodes-no-permission", 0);
    finds(Config { places: vec![Place::host_without(&[1])], ..Config::default() }, "some-nodes-no-permission", 1);
}

#[test]
fn a_stale_node_is_recognised() {
    finds(Config { door: Door::Stale, ..Config::default() }, "stale-node", 0);
}

#[test]
fn a_module_that_is_not_loaded_is_recognised() {
    finds(Config { missing_modules: vec!["uda".into()], ..Config::default() }, "module-missing", 0);
    finds(Config { missing_modules: vec!["SVM".into()], ..Config::default() }, "memory-driver-missing", 2);
}

#[test]
fn a_host_without_devices_is_recognised() {
    finds(Config { devices: 0, ..Config::default() }, "no-device", 0);
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
    finds(Config { places: vec![Place::container(&[])], ..Config::default() }, "no-device-passed", 0);
}

#[test]
fn a_device_of_another_container_is_recognised() {
    let config = Config { places: vec![Place::container(&[0, 1])], occupied: vec![1], ..Config::default() };
    finds(config, "occupied", 1);
    finds(Config { places: vec![Place::container(&[0])], occupied: vec![0], ..Config::default() }, "occupied", 0);
}

#[test]
fn a_virtual_instance_is_recognised_and_does_not_share() {
    let config = Config {
        virtual_instances: vec![100],
        split_mode: 2,
        places: vec![Place::container(&[100])],
        ..Config::default()
    };
    let document = finds(config, "virtual-instance", 1);
    let sharing = &document["devices"][0]["features"]["sharing"];
    assert_eq!(sharing["offered"], false);
    assert!(sharing["reason"].as_str().unwrap().contains("virtual instance"), "{sharing}");
}

#[test]
fn a_removed_device_is_recognised_although_it_is_listed() {
    let document = finds(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, "device-removed", 2);
    assert_eq!(document["devices"][1]["features"]["vmm"]["offered"], false);
    assert_eq!(document["devices"][0]["features"]["vmm"]["offered"], true);
    let text = stdout(&probe(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, &[]));
    assert!(text.contains("\ndevice 1: vmm: no: the device is in the state removed"), "{text}");
}

#[test]
fn devices_that_are_still_starting_are_not_waited_for_longer_than_allowed() {
    let config =
        Config { phases: vec![(1, Phase::Detected)], setup_patience: Duration::from_secs(100), ..Config::default() };
    let start = Instant::now();
    finds(config, "still-starting", 0);
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn the_next_memory_interface_is_recognised() {
    let document = finds(Config { svm_v3: true, ..Config::default() }, "memory-driver-v3", 2);
    assert_eq!(document["driver"]["memory"], "v3");
    assert_eq!(document["devices"][0]["features"]["vmm"]["offered"], false);
}

#[test]
fn a_missing_node_of_the_daemon_is_recognised() {
    finds(Config { hdc_door: Door::Missing, ..Config::default() }, "no-daemon-node", 2);
}

#[test]
fn hidden_devices_have_no_user_number() {
    let mut command = Command::new(XTASK);
    command.args(["probe", "--json"]).env("ASCEND_RT_VISIBLE_DEVICES", "1");
    let document = support::document(&run_emulated(Config::default(), &[], &mut command), "probe");
    assert_eq!(document["devices"][0]["user"], Value::Null);
    assert_eq!(document["devices"][1]["user"], 0);
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for arguments in [&["--jsno"][..], &["--timeout", "0"], &["--timeout", "soon"], &["extra"]] {
        refusal(&[&["probe"], arguments].concat());
    }
}

#[test]
fn an_unknown_generation_is_recognised() {
    let document = finds(Config { unknown_generation: true, ..Config::default() }, "unknown-generation", 2);
    assert_eq!(document["driver"]["generation"], Value::Null);
}
