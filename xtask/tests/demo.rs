//! `cargo xtask demo` on the emulated driver.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};
use support::{XTASK, refusal, stderr, stdout, xtask};

fn demo(arguments: &[&str]) -> Output {
    xtask(&[&["demo"], arguments].concat())
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
        "What took how long",
        "nothing of them any more",
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
fn wrong_arguments_are_refused_with_exit_2() {
    for (arguments, reason) in [
        (&["--size", "3M"][..], "2 MiB"),
        (&["--size", "0"], "2 MiB"),
        (&["--size", "1X"], "units"),
        (&["--devices", "0"], "1..=16"),
        (&["--devices", "many"], "invalid digit"),
    ] {
        let error = refusal(&[&["demo"], arguments].concat());
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}

#[test]
fn a_reader_that_closes_the_pipe_early_causes_no_panic() {
    let mut child = Command::new(XTASK)
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
