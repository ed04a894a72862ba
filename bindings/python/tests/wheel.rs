//! Builds the wheel and runs the Python tests with it, where Python, maturin and pytest are.
//!
//! They are looked for in the virtual environment `target/python`, which `.ci/run` makes, then in
//! the Python that the shell finds.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the tests import, and what builds the wheel.
const NEEDED: &str = "import sys, maturin, numpy, pytest; sys.exit(sys.version_info < (3, 9))";

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The directory of cargo's output that this test was built in.
fn target() -> PathBuf {
    let own = std::env::current_exe().expect("a test has a program");
    let target = own.ancestors().find(|directory| directory.join("CACHEDIR.TAG").exists());
    target.expect("cargo marks its directory").to_owned()
}

/// A Python that has everything.
fn python() -> Option<PathBuf> {
    let ours = target().join("python/bin/python");
    let has_all = |python: &PathBuf| {
        let tried = Command::new(python).args(["-c", NEEDED]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    [ours, "python3".into()].into_iter().find(has_all)
}

#[track_caller]
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{text}\n{errors}", output.status);
    output
}

#[test]
fn the_wheel_is_built_and_the_python_tests_pass_with_it() {
    let Some(python) = python() else {
        eprintln!(
            "SKIPPED: there is no Python 3.9 or later with maturin, numpy and pytest here (.ci/run installs them), \
             so nothing of bindings/python was tested"
        );
        return;
    };
    let place = target().join("python-wheel");
    // What an earlier run left is not this one's.
    let _ = std::fs::remove_dir_all(&place);
    let (wheels, site) = (place.join("wheels"), place.join("site"));
    let mut build = Command::new(&python);
    build.args(["-m", "maturin", "build", "--locked", "--out"]).arg(&wheels).current_dir(package());
    run(build.env("CARGO_TARGET_DIR", target()));
    let built: Vec<_> =
        std::fs::read_dir(&wheels).expect("wheels").map(|entry| entry.expect("a wheel").path()).collect();
    assert_eq!(built.len(), 1, "{built:?}");
    let name = built[0].file_name().expect("a name").to_string_lossy().into_owned();
    assert!(name.contains("-cp39-abi3-"), "{name} is not a wheel for every Python from 3.9 on");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]).arg(&site).arg(&built[0]);
    run(&mut install);
    let mut tests = Command::new(&python);
    tests.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider", "tests"]).current_dir(package());
    let output = run(tests.env("PYTHONPATH", &site).env("PYTHONDONTWRITEBYTECODE", "1"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(" passed"), "no test has run: {text}");
}
