//! The C interface: the example, and what it answers to bad arguments.

use crate::stack::tree;
use crate::support::Service;
use ascend_emulator::{Config, on_each_generation};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a program against the tree; `None` without a compiler for it, which is said.
fn compile(compiler: &str, source: &str) -> Option<PathBuf> {
    if Command::new(compiler).arg("--version").output().is_err() {
        assert!(compiler == "c++", "there is no C compiler");
        eprintln!("SKIPPED: there is no C++ compiler here, so {source} was not built");
        return None;
    }
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = tree().join(source.replace('/', "-"));
    let libraries = tree().join("lib64");
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-pedantic"]).arg("-I").arg(tree().join("include"));
    command.arg(if compiler == "c++" { "-std=c++17" } else { "-std=c11" });
    command.arg("-I").arg(package.join("include")).arg("-o").arg(&program).arg(package.join(source));
    command.arg("-L").arg(&libraries).args(["-lascend_vmm_service", "-lascendcl"]);
    command.arg(format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display()));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// Runs a program and returns what it printed.
fn run(program: &Path, service: &Service) -> String {
    let output = Command::new(program).arg(service.path()).arg("llama/tp0/weights").output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    text.into_owned()
}

#[test]
fn the_example_writes_and_finds_its_weights() {
    let program = compile("cc", "examples/engine.c").unwrap();
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        let first = run(&program, &service);
        assert!(
            first.starts_with("wrote version 1 of llama/tp0/weights\nlayer.0: 1048576 bytes, u8 1048576, "),
            "{first}"
        );
        let second = run(&program, &service);
        assert!(second.starts_with("found version 1 of llama/tp0/weights: 4 tensors\n"), "{second}");
        for text in [&first, &second] {
            assert!(text.contains("slept, and woke at the same addresses"), "{text}");
            assert_eq!(text.matches("layer.3: 1048576 bytes, u8 1048576, the first is 4").count(), 2, "{text}");
        }
        service.end(emulator);
    });
}

#[test]
fn c_programs_that_are_wrong_hear_what_is_wrong() {
    let program = compile("cc", "tests/c/wrong.c").unwrap();
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        run(&program, &service);
        service.end(emulator);
    });
}

#[test]
fn the_header_for_cpp_closes_and_throws() {
    let Some(program) = compile("c++", "tests/c/raii.cpp") else { return };
    on_each_generation(Config::default(), |_, emulator| {
        let service = Service::start("");
        run(&program, &service);
        service.end(emulator);
    });
}
