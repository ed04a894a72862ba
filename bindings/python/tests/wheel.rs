//! Builds the wheel and runs the Python tests with it, where Python, maturin and pytest are.
//!
//! They are looked for in the virtual environment `target/python`, which `.ci/run` makes, then in
//! the Python that the shell finds.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the tests import, and what builds the wheel.
const NEEDED: &str = "import sys, maturin, numpy, pytest; sys.exit(sys.version_info < (3, 9))";

/// Prints what a wheel says of itself.
const METADATA: &str = "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
    print(wheel.read(next(name for name in wheel.namelist() if name.endswith('/METADATA'))).decode())";

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

/// The files of Python tests, in order.
fn test_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(package().join("tests")).expect("tests");
    let paths = entries.map(|entry| entry.expect("a file").path());
    let is_test = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("test_"));
    let mut files: Vec<_> = paths.filter(is_test).collect();
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    files
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
    let about = run(Command::new(&python).args(["-c", METADATA]).arg(&built[0]));
    let about = String::from_utf8_lossy(&about.stdout).into_owned();
    for line in ["License-File: LICENSE-MIT", "License-File: LICENSE-APACHE", "Project-URL: Repository, https://"] {
        assert!(about.contains(line), "no {line} in\n{about}");
    }
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]).arg(&site).arg(&built[0]);
    run(&mut install);
    // In two processes: most tests wait for the emulated driver most of the time.
    let files = test_files();
    std::thread::scope(|scope| {
        for half in 0..2 {
            let mut tests = Command::new(&python);
            tests.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
            tests.args(files.iter().skip(half).step_by(2)).current_dir(package());
            tests.env("PYTHONPATH", &site).env("PYTHONDONTWRITEBYTECODE", "1");
            // Cargo's path has a libascendcl.so, which `ascend_vmm.acl` would use.
            tests.env_remove("LD_LIBRARY_PATH").env("LIBASCENDCL", target().join("debug/deps/libascendcl.so"));
            scope.spawn(move || {
                let output = run(&mut tests);
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(text.contains(" passed"), "no test has run: {text}");
            });
        }
    });
}

#[test]
fn the_source_distribution_builds_with_the_lock_file_in_it() {
    let Some(python) = python() else {
        eprintln!("SKIPPED: there is no Python with maturin here (.ci/run installs it), so no sdist was made");
        return;
    };
    let place = target().join("python-sdist");
    let _ = std::fs::remove_dir_all(&place);
    // It ends with what `--locked` would ask of the unpacked archive.
    let output = run(Command::new(package().join("../../.ci/sdist")).arg(&place).arg(python));
    let archive = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let listed = run(Command::new("tar").args(["-tzf", &archive]));
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for file in ["Cargo.lock", "LICENSE-MIT", "LICENSE-APACHE", "PKG-INFO", "bindings/python/Cargo.toml"] {
        assert!(listed.lines().any(|line| line.ends_with(&format!("/{file}"))), "no {file} in\n{listed}");
    }
}
