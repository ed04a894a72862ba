//! Help texts, the version, and the command lines that are written elsewhere in this repository.

use crate::support::help::{self, commands, help};
use crate::support::{run_program, stderr};
use std::path::Path;

#[test]
fn every_command_has_help_with_an_example() {
    help::assert_every_command_has_an_example(&["cargo xtask", "ascend-vmm"]);
}

#[test]
fn the_version_is_printed() {
    help::assert_version("cargo xtask");
}

#[test]
fn an_unknown_command_is_refused_with_exit_2() {
    help::assert_unknown_commands_are_refused();
}

#[test]
fn the_commands_of_the_tool_are_here_too() {
    let names = commands(&help(&[]));
    for name in ["probe", "demo", "selftest", "emulate", "trace"] {
        assert!(names.iter().any(|it| it == name), "{name} is not among {names:?}");
    }
}

#[test]
fn every_command_line_in_the_release_workflow_is_accepted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.github/workflows/release.yml");
    let workflow = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> =
        workflow.lines().filter_map(|line| line.trim().strip_prefix("- run: cargo xtask ")).collect();
    assert_eq!(lines.len(), 2, "one for each architecture: {lines:?}");
    for line in lines {
        // `--help` at its end checks the arguments and builds nothing.
        let output = run_program(&line.split(' ').chain(["--help"]).collect::<Vec<_>>());
        assert!(output.status.success(), "{line}: {}", stderr(&output));
    }
}
