//! `demo` as a newcomer runs it.

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).arg("demo").args(arguments).output().unwrap()
}

#[test]
fn two_processes_share_memory_and_the_first_line_says_that_it_is_emulated() {
    let output = demo(&["--emulate"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
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
    assert!(!text.contains('\x1b'), "colours or bars went into a pipe: {text:?}");
}

#[test]
fn with_more_devices_more_processes_take_part() {
    let output = demo(&["--emulate", "--devices", "3", "--size", "4M"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.matches("sees the change, in every byte").count(), 2, "{text}");
}

#[test]
fn wrong_arguments_get_a_sentence_and_exit_2() {
    for (arguments, word) in [
        (&["--size", "3M"][..], "2 MiB"),
        (&["--size", "0"], "2 MiB"),
        (&["--size", "1X"], "units"),
        (&["--devices", "0"], "1..=16"),
        (&["--devices", "many"], "invalid digit"),
    ] {
        let output = demo(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(word) && output.stdout.is_empty(), "{arguments:?}: {said}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_causes_no_panic() {
    use std::io::{BufRead, BufReader, Read};
    let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["demo", "--emulate", "--size", "2M"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    child.wait().unwrap();
    assert!(line.contains("EMULATED") && !said.contains("panicked"), "{line}{said}");
}
