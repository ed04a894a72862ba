//! The C program of the README runs.

use crate::support::{Linked, compile_file, plain, run, tree};
use ascend_emulator::Emulator;
use ascend_ioctl::Generation;
use std::process::Command;

#[test]
fn the_c_program_of_the_readme_runs() {
    let readme = include_str!("../../../../README.md");
    let (_, rest) = readme.split_once("```c\n").expect("a program in C");
    let source = tree().join("readme.c");
    std::fs::write(&source, rest.split("```").next().expect("its end")).unwrap();
    let program = compile_file(&source, Linked::Dynamically).expect("a C compiler");
    let emulator = Emulator::start(plain(Generation::V26_1)).unwrap();
    let printed = run(&emulator, &mut Command::new(program));
    assert!(printed.contains("hello, NPU at 0x"), "{printed}");
    assert!(emulator.state().is_empty(), "{:#?}", emulator.state());
}
