//! `cargo xtask toolkit`: the tree that it writes is one that programs for CANN are built against,
//! by hand and by CMake, and run with.

use crate::support::{refusal, run_emulated, run_program, stderr, stdout};
use ascend_emulator::Config;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Writes a tree, with libraries that are built fast: those of a release take a minute more.
fn write_to(tree: &Path) -> Output {
    run_program(&["toolkit", "--profile", "dev", tree.to_str().unwrap()])
}

/// The tree, which the command writes once for all tests.
fn tree() -> &'static Path {
    static TREE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    TREE.get_or_init(|| {
        let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).join("toolkit");
        let output = write_to(&tree);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stdout(&output).trim_end(), tree.to_str().unwrap());
        tree
    })
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// A shell command in the environment of the tree and nothing else of this one.
fn in_environment(command: &str) -> Command {
    let mut shell = Command::new("bash");
    shell.args(["-euc", &format!("source \"$0/bin/setenv.bash\"; {command}")]).arg(tree());
    for variable in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH", "SOC_VERSION", "ASCENDC_CMAKE_DIR"] {
        shell.env_remove(variable);
    }
    shell
}

#[track_caller]
fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/acl/tests/c")
}

#[test]
fn a_program_is_built_with_the_tree_and_runs_with_its_environment() {
    let program = tree().join("state");
    let build =
        "cc -D_GNU_SOURCE -pthread -I$ASCEND_HOME_PATH/include \"$1\" -L$ASCEND_HOME_PATH/lib64 -lascendcl -o \"$2\"";
    succeeded(in_environment(build).arg(programs().join("state.c")).arg(&program).output().unwrap());
    succeeded(run_emulated(Config::default(), &[], in_environment("exec \"$1\"").arg(&program)));
}

#[test]
fn a_tree_is_written_over_another_and_not_over_a_file() {
    // Not the one that other tests use meanwhile.
    let again = Path::new(env!("CARGO_TARGET_TMPDIR")).join("toolkit-again");
    let library = again.join("lib64/libascendcl.so");
    for _ in 0..2 {
        succeeded(write_to(&again));
        assert_eq!(std::fs::read(&library).unwrap(), std::fs::read(tree().join("lib64/libascendcl.so")).unwrap());
        assert_eq!(std::fs::read_link(again.join("lib64/libhccl.so")).unwrap(), Path::new("libascendcl.so"));
    }
    let error = refusal(&["toolkit", "--profile", "dev", library.to_str().unwrap()]);
    assert!(error.contains("cannot be written"), "{error}");
}

#[test]
fn a_cmake_project_finds_header_libraries_and_the_compiler_of_kernels() {
    if !has("cmake") || !has("c++") {
        eprintln!("SKIPPED: there is no cmake or no C++ compiler here, so no CMake project was built with the toolkit");
        return;
    }
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("toolkit-cmake");
    let _ = std::fs::remove_dir_all(&build);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cmake");
    let command = "cmake -S \"$1\" -B \"$2\" -DPROGRAMS=\"$3\" && cmake --build \"$2\"";
    succeeded(in_environment(command).args([&source, &build, &programs()]).output().unwrap());
    let run = |name: &str| {
        succeeded(run_emulated(Config::default(), &[], in_environment("exec \"$1\"").arg(build.join(name))))
    };
    assert_eq!(run("sleep_mode"), "");
    assert_eq!(run("packaged"), "");
    assert_eq!(run("kernels"), "Source data: 7\nDestination data: 7\n");
    // Without the environment it says what is missing.
    let other = build.join("without");
    let mut cmake = Command::new("cmake");
    cmake.arg("-S").arg(&source).arg("-B").arg(&other).env_remove("ASCEND_HOME_PATH");
    let error = stderr(&cmake.output().unwrap());
    assert!(error.contains("ASCEND_HOME_PATH is not set"), "{error}");
}
