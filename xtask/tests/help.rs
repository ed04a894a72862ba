//! What a user gets who asks for help, or asks wrongly.

use std::process::{Command, Output};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
const TOOL: &str = env!("CARGO_BIN_EXE_ascend-vmm-tool");

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

fn help(program: &str, path: &[&str]) -> String {
    let arguments: Vec<&str> = path.iter().copied().chain(["--help"]).collect();
    let output = run(program, &arguments);
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a help text lists.
fn commands(help: &str) -> Vec<String> {
    let list = help.split_once("Commands:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap());
    let names =
        list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_command_has_help_with_an_example_that_names_the_program() {
    for (program, name) in [(XTASK, "cargo xtask"), (TOOL, "ascend-vmm-tool")] {
        let mut paths: Vec<Vec<String>> = commands(&help(program, &[])).into_iter().map(|name| vec![name]).collect();
        assert!(paths.len() >= 5, "{paths:?}");
        while let Some(path) = paths.pop() {
            let words: Vec<&str> = path.iter().map(String::as_str).collect();
            let text = help(program, &words);
            let inner = commands(&text);
            if inner.is_empty() {
                let (_, example) =
                    text.split_once("Example").unwrap_or_else(|| panic!("{words:?} has no example: {text}"));
                assert!(example.contains(name), "{words:?}: {text}");
            }
            for name in inner {
                paths.push(path.iter().cloned().chain([name]).collect());
            }
        }
    }
}

#[test]
fn the_tool_for_hosts_never_speaks_of_cargo() {
    for name in commands(&help(TOOL, &[])) {
        let text = help(TOOL, &[&name]);
        assert!(!text.contains("cargo xtask"), "{text}");
    }
}

#[test]
fn what_is_no_command_gets_a_sentence_and_exit_2() {
    for program in [XTASK, TOOL] {
        for arguments in [&["prob"][..], &[], &["--nothing"]] {
            let output = run(program, arguments);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}");
            assert!(!output.stderr.is_empty(), "{arguments:?}");
        }
    }
}
