//! Valgrind and AddressSanitizer on programs that use the library. Both put memory of their own at
//! the driver's fixed addresses, so the programs run without address segments.

use crate::support::{Linked, assert_nothing_left, compile, has_compiler, plain, programs, run, tree};
use ascend_emulator::Emulator;
use ascend_ioctl::Generation;
use std::path::Path;
use std::process::{Command, Stdio};

/// What docs/cann.md advises, with an exit status of its own for what is found.
const MEMCHECK: [&str; 7] = [
    "-q",
    "--undef-value-errors=no",
    "--sim-hints=lax-ioctls",
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--errors-for-leak-kinds=definite",
    "--error-exitcode=99",
];

fn without_segments(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("ASCEND_ACL_SEGMENTS", "off");
    command
}

/// Runs a program in which a checker must find something; returns what it said.
#[track_caller]
fn run_wrong(command: &mut Command) -> String {
    let emulator = Emulator::start(plain(Generation::NEWEST)).unwrap();
    let child = emulator.spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{command:?} found nothing:\n{said}");
    assert_nothing_left(&emulator);
    said
}

/// Runs a program in which nothing must be found.
#[track_caller]
fn run_right(command: &mut Command) {
    let emulator = Emulator::start(plain(Generation::NEWEST)).unwrap();
    run(&emulator, command);
    assert_nothing_left(&emulator);
}

#[test]
fn a_program_works_without_address_segments_and_initialises_again() {
    for (program, generation) in programs("checked.c") {
        let emulator = Emulator::start(plain(generation)).unwrap();
        run(&emulator, &mut without_segments(program));
        assert_nothing_left(&emulator);
    }
}

#[test]
fn memcheck_finds_the_mistakes_of_a_program_and_none_of_the_library() {
    if !has_compiler("valgrind") {
        eprintln!("SKIPPED: there is no valgrind here");
        return;
    }
    let memcheck = |source: &str| {
        let mut command = without_segments("valgrind");
        command.args(MEMCHECK).arg(compile(source, Linked::Dynamically).unwrap());
        command
    };
    for source in ["checked.c", "streams.c"] {
        run_right(&mut memcheck(source));
    }
    let said = run_wrong(memcheck("checked.c").arg("leak"));
    assert!(said.contains("definitely lost"), "{said}");
    let said = run_wrong(memcheck("checked.c").arg("overrun"));
    assert!(said.contains("Invalid write"), "{said}");
}

#[test]
fn the_address_sanitizer_finds_the_mistakes_of_a_program_and_none_of_the_library() {
    if !has_sanitizer() {
        eprintln!("SKIPPED: the C compiler has no AddressSanitizer that runs here");
        return;
    }
    let sanitized = |source: &str| compile(source, Linked::WithSanitizer).unwrap();
    for source in ["checked.c", "malloc.c", "streams.c"] {
        run_right(&mut without_segments(sanitized(source)));
    }
    let checked = sanitized("checked.c");
    let said = run_wrong(without_segments(&checked).arg("leak"));
    assert!(said.contains("detected memory leaks"), "{said}");
    let said = run_wrong(without_segments(&checked).arg("overrun"));
    assert!(said.contains("heap-buffer-overflow"), "{said}");
    // Who does not know the setting is told.
    let said = run_wrong(&mut Command::new(&checked));
    assert!(said.contains("ASCEND_ACL_SEGMENTS=off"), "{said}");
}

/// Whether programs with AddressSanitizer can be built and, with its search for leaks, run here.
fn has_sanitizer() -> bool {
    let (source, program) = (tree().join("nothing.c"), tree().join("nothing"));
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut compiler = Command::new("cc");
    compiler.arg("-fsanitize=address").arg("-o").arg(&program).arg(&source).stderr(Stdio::null());
    compiler.status().unwrap().success()
        && Command::new(&program).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
