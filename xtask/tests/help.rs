//! Help texts, versions, and what a user sees after a typing error.

mod support;

use std::process::Command;
use support::{TOOL, XTASK, run, stderr, stdout};

/// Both programs, with the name under which the user calls each.
const PROGRAMS: [(&str, &str); 2] = [(XTASK, "cargo xtask"), (TOOL, "ascend-vmm-tool")];

fn help(program: &str, path: &[&str]) -> String {
    let arguments: Vec<&str> = path.iter().copied().chain(["--help"]).collect();
    let output = run(program, &arguments);
    assert!(output.status.success(), "{arguments:?}");
    stdout(&output)
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
    for (program, name) in PROGRAMS {
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
fn both_programs_print_their_version() {
    for (program, name) in PROGRAMS {
        let output = run(program, &["--version"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stdout(&output), format!("{name} {}\n", env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn an_unknown_command_is_refused_with_exit_2() {
    for (program, _) in PROGRAMS {
        for arguments in [&["prob"][..], &[], &["--nothing"]] {
            let output = run(program, arguments);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}");
            assert!(!stderr(&output).is_empty(), "{arguments:?}");
        }
    }
}

#[test]
fn the_tool_for_hosts_never_mentions_cargo_in_its_help() {
    for name in commands(&help(TOOL, &[])) {
        let text = help(TOOL, &[&name]);
        assert!(!text.contains("cargo"), "{text}");
    }
}

#[test]
fn the_tool_for_hosts_never_mentions_cargo_in_its_errors() {
    for arguments in [&["bench"][..], &["emulate"], &["dist"], &["demo", "--size", "1"]] {
        // As on a host: without the variable that cargo sets for what it runs.
        let output = Command::new(TOOL).args(arguments).env_remove("CARGO").output().unwrap();
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(!error.contains("cargo"), "{arguments:?}: {error}");
    }
}
