//! The whole suite on the emulated driver: every generation, both attachments, as the program that also runs on a real host.

use ascend_emulator::config::Attachment;
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use std::io::Read;
use std::process::{Command, Stdio};

/// Runs the suite's program on an emulated host and gives its output and exit status.
fn run(config: Config, arguments: &[&str]) -> (String, Option<i32>) {
    let emulator = Emulator::start(config).expect("the emulated driver starts");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ascend-conformance"));
    let mut child = emulator.spawn(command.args(arguments).stdout(Stdio::piped())).expect("the suite starts");
    let mut output = String::new();
    child.stdout.take().expect("its output is ours").read_to_string(&mut output).expect("its output is text");
    let status = child.wait().expect("the suite ends");
    assert!(emulator.state().is_empty(), "the suite left something behind: {:?}", emulator.state());
    (output, status.code())
}

fn every_rule_is_kept(config: Config) {
    let (output, code) = run(config, &["--exhaustion"]);
    let failed: Vec<&str> = output.lines().filter(|line| line.starts_with("FAIL")).collect();
    assert!(failed.is_empty(), "{} rules are not kept:\n{}", failed.len(), failed.join("\n"));
    assert_eq!(code, Some(0), "{output}");
    let passed = output.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed >= 150, "only {passed} rules could be asked");
}

#[test]
fn the_8_5_0_driver_keeps_every_rule() {
    every_rule_is_kept(Config { generation: Generation::V8_5_0, ..Config::default() });
}

#[test]
fn the_9_0_0_driver_keeps_every_rule() {
    every_rule_is_kept(Config { generation: Generation::V9_0_0, ..Config::default() });
}

#[test]
fn the_26_1_driver_keeps_every_rule() {
    every_rule_is_kept(Config { generation: Generation::V26_1, ..Config::default() });
}

#[test]
fn a_host_on_hccs_keeps_every_rule() {
    every_rule_is_kept(Config { attachment: Attachment::Hccs, ..Config::default() });
}

#[test]
fn a_host_with_one_device_skips_what_needs_two() {
    let (output, code) = run(Config { devices: 1, ..Config::default() }, &["copies_between_devices", "mapped_host"]);
    assert!(output.contains("skip copies_between_devices_are_done: needs two devices"), "{output}");
    assert!(output.contains("ok   mapped_host_memory_is_the_cpus"), "{output}");
    assert_eq!(code, Some(0), "{output}");
}

#[test]
fn a_host_without_devices_is_told_apart_from_one_that_breaks_rules() {
    let (output, code) = run(Config { devices: 0, ..Config::default() }, &[]);
    assert_eq!(code, Some(3), "{output}");
}
