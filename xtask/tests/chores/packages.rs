//! The published crates as their users get them: packaged, unpacked, and used by a crate outside of
//! this repository, without a network.

use crate::support::{run_emulated, stderr, stdout};
use ascend_emulator::Config;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What is published, in the order of their dependencies.
const PUBLISHED: [&str; 8] = [
    "ascend-ioctl",
    "ascend-emulator-macros",
    "ascend-emulator",
    "ascend-conformance",
    "ascend-ptrace",
    "ascend-vmm",
    "ascend-vmm-service",
    "ascend-vmm-tool",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The directory that this test was built in. What it has of the dependencies is not built again.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().to_owned()
}

/// Cargo without a network.
fn cargo(directory: &Path, arguments: &[&str]) -> Output {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(arguments).arg("--offline").current_dir(directory).env("CARGO_TARGET_DIR", target());
    // Not those of the cargo that runs this test.
    cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    cargo.output().unwrap()
}

#[track_caller]
fn successful(output: Output) -> Output {
    assert!(output.status.success(), "{}\n{}\n{}", output.status, stdout(&output), stderr(&output));
    output
}

/// Whether this cargo can package crates that depend on each other and are in no registry.
fn packages_a_workspace() -> bool {
    let output = Command::new(env!("CARGO")).arg("--version").output().unwrap();
    let version = stdout(&output);
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    minor.is_some_and(|minor| minor >= 90)
}

/// The code blocks of a page that begin with this line.
fn block(page: &str, first: &str) -> String {
    let (_, rest) = page.split_once(&format!("{first}\n")).unwrap_or_else(|| panic!("no block {first}"));
    rest.split_once("```").unwrap().0.to_owned()
}

/// An empty directory of this name.
fn emptied(directory: PathBuf) -> PathBuf {
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    directory
}

#[test]
fn nothing_else_can_be_published_by_mistake() {
    let output = successful(cargo(&root(), &["metadata", "--no-deps", "--format-version", "1"]));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let open = packages.iter().filter(|package| package["publish"].is_null());
    let names: BTreeSet<&str> = open.map(|package| package["name"].as_str().unwrap()).collect();
    assert_eq!(names, BTreeSet::from(PUBLISHED));
    for package in packages {
        for field in ["repository", "homepage"] {
            assert_eq!(package[field], env!("CARGO_PKG_REPOSITORY"), "{field} of {}", package["name"]);
        }
    }
}

#[test]
fn a_release_names_its_own_repository_in_every_manifest_and_page() {
    let copy = emptied(target().join("tmp/named"));
    let files = [".ci/name-repository", "Cargo.toml", "bindings/python/README.md", "bindings/python/pyproject.toml"];
    for file in files {
        fs::create_dir_all(copy.join(file).parent().unwrap()).unwrap();
        fs::copy(root().join(file), copy.join(file)).unwrap();
    }
    let git = |arguments: &[&str]| Command::new("git").args(arguments).current_dir(&copy).output();
    let Ok(made) = git(&["init", "--quiet"]) else {
        eprintln!("SKIPPED: there is no git here");
        return;
    };
    successful(made);
    successful(git(&["add", "."]).unwrap());
    let name = || Command::new(copy.join(".ci/name-repository")).arg("https://git.example.com/npu").output().unwrap();
    successful(name());
    let named = |file: &str| fs::read_to_string(copy.join(file)).unwrap();
    assert!(named("Cargo.toml").contains("repository = \"https://git.example.com/npu\""));
    let page = named("bindings/python/README.md");
    assert!(page.contains("(https://git.example.com/npu/blob/main/docs/"), "{page}");
    assert!(stdout(&successful(name())).contains("named already"));
}

#[test]
fn an_outside_crate_builds_tests_and_runs_with_the_packaged_crates() {
    if !packages_a_workspace() {
        eprintln!("SKIPPED: cargo packages crates that depend on each other since 1.90, and this one is older");
        return;
    }
    let names = PUBLISHED.iter().flat_map(|name| ["-p", name]);
    let arguments: Vec<&str> = ["package", "--allow-dirty", "--no-verify"].into_iter().chain(names).collect();
    let packaged = cargo(&root(), &arguments);
    if stderr(&packaged).contains("attempting to make an HTTP request") {
        eprintln!(
            "SKIPPED: cargo's cache does not have all crates that packaging needs, and this test uses no network"
        );
        return;
    }
    let packaged = successful(packaged);
    assert!(!stderr(&packaged).contains("warning: manifest has no"), "{}", stderr(&packaged));

    // Times of unpacking, not of the archive: cargo builds again what is newer than its output.
    let outside = emptied(target().join("tmp/outside"));
    let unpacked = emptied(outside.join("packages"));
    let version = env!("CARGO_PKG_VERSION");
    for name in PUBLISHED {
        let archive = target().join(format!("package/{name}-{version}.crate"));
        let tar = Command::new("tar").arg("-xzmf").arg(&archive).current_dir(&unpacked).output().unwrap();
        successful(tar);
        let directory = unpacked.join(format!("{name}-{version}"));
        for file in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "Cargo.toml", "src/lib.rs"] {
            assert!(!fs::read(directory.join(file)).unwrap().is_empty(), "{name} has no {file}");
        }
        for file in ["tests", "bindings", "xtask", ".ci", ".github"] {
            assert!(!directory.join(file).exists(), "{name} has {file}, which does not work there");
        }
    }

    // As docs/emulator.md says, and with the first program of the README.
    let page = fs::read_to_string(root().join("docs/emulator.md")).unwrap();
    let test = block(&page, "```rust,ignore\n// tests/npu.rs");
    let readme = fs::read_to_string(root().join("tests/emulator/README.md")).unwrap();
    assert!(readme.contains(&test), "the README of the emulator shows another test:\n{test}");
    assert!(test.lines().count() <= 15, "{test}");
    let dependencies = block(&page, "```toml\n[dependencies]");
    fs::create_dir_all(outside.join("src")).unwrap();
    fs::create_dir_all(outside.join("tests")).unwrap();
    let patches = PUBLISHED.map(|name| format!("{name} = {{ path = \"packages/{name}-{version}\" }}\n"));
    let manifest = format!(
        "[package]\nname = \"outside\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n{dependencies}\n\
         [workspace]\nmembers = [\"packages/*\"]\n\n[patch.crates-io]\n{}\n\
         [profile.dev]\ndebug = \"line-tables-only\"\n",
        patches.concat()
    );
    fs::write(outside.join("Cargo.toml"), manifest).unwrap();
    fs::write(outside.join("tests/npu.rs"), test).unwrap();
    fs::copy(root().join("examples/hello.rs"), outside.join("src/main.rs")).unwrap();
    // The versions that the cache has.
    fs::copy(root().join("Cargo.lock"), outside.join("Cargo.lock")).unwrap();

    let tested = successful(cargo(&outside, &["test", "--package", "outside"]));
    assert!(stdout(&tested).contains("test a_page_of_device_0_is_used ... ok"), "{}", stdout(&tested));
    let program = target().join("debug/outside");
    let ran = successful(run_emulated(Config::default(), &[], &mut Command::new(program)));
    assert!(stdout(&ran).contains("hello, NPU at 0x"), "{}", stdout(&ran));

    // What else is in the packages: unit tests and examples compile there too.
    successful(cargo(&outside, &["check", "--workspace", "--all-targets"]));
}
