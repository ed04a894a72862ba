//! `ascend-vmm demo` on the emulated driver.

use crate::support::{PROGRAM, refusal, run_emulated, run_program, stderr, stdout};
use ascend_emulator::Config;
use ascend_emulator::config::{DeviceProcess, Phase};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};

/// Runs `demo` on a host that has NPUs.
fn demo_on(config: Config, arguments: &[&str]) -> Output {
    run_emulated(config, &[], Command::new(PROGRAM).args(["demo", "--size", "2M"]).args(arguments))
}

fn demo(arguments: &[&str]) -> Output {
    run_program(&[&["demo"], arguments].concat())
}

#[test]
fn two_processes_share_memory_and_the_first_line_says_that_it_is_emulated() {
    let output = demo(&["--emulate"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}\n{}", stderr(&output));
    assert!(text.lines().next().unwrap().contains("EMULATED"), "{text}");
    let mut rest = &*text;
    for step in [
        "64 MiB of physical memory, mapped at 0x",
        "trusts process",
        "imported it, mapped at 0x",
        "every byte is right",
        "changed every byte",
        "sees the change, in every byte",
        "How long each step took",
        "Nothing is left in the driver",
    ] {
        let at = rest.find(step).unwrap_or_else(|| panic!("{step:?} is missing or out of order: {text}"));
        rest = &rest[at + step.len()..];
    }
    assert!(!text.contains('\x1b'), "colours or progress bars were written to a pipe: {text:?}");
}

#[test]
fn with_more_devices_more_processes_take_part() {
    let output = demo(&["--emulate", "--devices", "3", "--size", "4M"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}\n{}", stderr(&output));
    assert_eq!(text.matches("sees the change, in every byte").count(), 2, "{text}");
}

#[test]
fn on_a_host_with_npus_the_usable_ones_are_used() {
    let phases = vec![(0, Phase::Removed)];
    let output = demo_on(Config { devices: 3, phases: phases.clone(), ..Config::default() }, &["--devices", "2"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}\n{}", stderr(&output));
    assert!(text.starts_with("This host has 2 usable NPUs: the demo runs on devices 1, 2."), "{text}");
    assert!(!text.contains("EMULATED"), "{text}");
    let output = demo_on(Config { devices: 2, phases, ..Config::default() }, &[]);
    let text = stdout(&output);
    assert!(text.starts_with("This host has 1 usable NPU: the demo runs on device 1."), "{text}");
}

#[test]
fn too_few_npus_are_refused_without_naming_another_program() {
    let config = Config { devices: 1, ..Config::default() };
    let output = run_emulated(config, &[], Command::new(PROGRAM).args(["demo", "--devices", "2"]));
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("asks for 2 NPUs, but this host has 1 usable NPU; `probe` says why"), "{error}");
    assert!(!error.contains("cargo"), "{error}");
}

#[test]
fn the_policy_decides_whether_a_device_process_is_started() {
    let config = || Config { device_process: DeviceProcess::Automatic, ..Config::default() };
    // The importer has the policy of the exporter.
    for (policy, started) in [("auto", 0), ("never", 0), ("always", 2)] {
        let output = demo_on(config(), &["--device-process-policy", policy]);
        let text = stdout(&output);
        assert!(output.status.success(), "{text}\n{}", stderr(&output));
        assert_eq!(text.matches("; started a process on the device").count(), started, "{policy}: {text}");
    }
    let output = demo_on(Config::default(), &["--device-process-policy", "never"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("EFAULT"), "{}", stderr(&output));
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for (arguments, reason) in [
        (&["--size", "3M"][..], "2 MiB"),
        (&["--size", "0"], "2 MiB"),
        (&["--size", "1X"], "units"),
        (&["--devices", "0"], "1..=16"),
        (&["--devices", "many"], "invalid digit"),
        (&["--device-process-policy", "sometimes"], "auto, never, always"),
    ] {
        let error = refusal(&[&["demo"], arguments].concat());
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}

#[test]
fn a_reader_that_closes_the_pipe_early_causes_no_panic() {
    let mut child = Command::new(PROGRAM)
        .args(["demo", "--emulate", "--size", "2M"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    child.wait().unwrap();
    assert!(line.contains("EMULATED") && !errors.contains("panicked"), "{line}{errors}");
}
