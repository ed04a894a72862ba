//! Code that several test files share: running a command, with or without an emulated driver, and
//! reading its output.

// Each test file is a crate of its own and uses only a part of this.
#![allow(dead_code)]

pub mod c;
pub mod calls;
pub mod help;
pub mod schema;

use ascend_emulator::{Config, Emulator};
use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// The program of the crate that is tested: `ascend-vmm`, or the one behind `cargo xtask`.
pub const PROGRAM: &str = match (option_env!("CARGO_BIN_EXE_ascend-vmm"), option_env!("CARGO_BIN_EXE_xtask")) {
    (Some(program), _) | (_, Some(program)) => program,
    _ => panic!("this crate has no program"),
};

/// Runs the program with these arguments.
pub fn run_program(arguments: &[&str]) -> Output {
    run(PROGRAM, arguments)
}

/// Runs a program with these arguments.
pub fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    output.unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"))
}

/// Runs a command on an emulated host with these faults. It must neither crash the emulated kernel
/// nor leave anything in the driver.
pub fn run_emulated(config: Config, faults: &[&str], command: &mut Command) -> Output {
    let emulator = Emulator::start(config).unwrap();
    for fault in faults {
        emulator.inject(fault.parse().unwrap());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = emulator.spawn(command).unwrap().wait_with_output().unwrap();
    emulator.assert_no_traps();
    assert!(emulator.state().is_empty(), "{command:?} left something in the driver: {:#?}", emulator.state());
    output
}

/// What a command printed.
pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The errors that a command printed.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The JSON document that a command printed, checked against the schema of this name.
#[track_caller]
pub fn document(output: &Output, schema: &str) -> Value {
    let document: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", stdout(output), stderr(output)));
    schema::assert_fits(schema, &document);
    document
}

/// Runs the program with arguments that it must refuse: exit status 2, and only an error is
/// printed. Returns that error.
#[track_caller]
pub fn refusal(arguments: &[&str]) -> String {
    let output = run_program(arguments);
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", stdout(&output));
    assert!(!error.is_empty(), "{arguments:?}");
    error
}
