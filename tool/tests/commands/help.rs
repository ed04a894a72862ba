//! Help texts, the version, and what a user sees after a typing error.

use crate::support::help::{self, commands, help};
use crate::support::{PROGRAM, stderr};
use std::process::Command;

#[test]
fn every_command_has_help_with_an_example_that_names_the_program() {
    help::assert_every_command_has_an_example(&["ascend-vmm"]);
}

#[test]
fn the_version_is_printed() {
    help::assert_version("ascend-vmm");
}

#[test]
fn an_unknown_command_is_refused_with_exit_2() {
    help::assert_unknown_commands_are_refused();
}

#[test]
fn help_never_mentions_cargo() {
    for name in commands(&help(&[])) {
        let text = help(&[&name]);
        assert!(!text.contains("cargo"), "{text}");
    }
}

#[test]
fn errors_never_mention_cargo() {
    for arguments in [&["bench"][..], &["emulate"], &["dist"], &["demo", "--size", "1"]] {
        // As on a host: without the variable that cargo sets for what it runs.
        let output = Command::new(PROGRAM).args(arguments).env_remove("CARGO").output().unwrap();
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(!error.contains("cargo"), "{arguments:?}: {error}");
    }
}
