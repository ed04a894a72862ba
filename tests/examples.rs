//! The examples run, unmodified, on the emulated driver of each generation.

use ascend_emulator::config::Door;
use ascend_emulator::{Config, Emulator};
use ascend_vmm::Generation;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The path of an example's program. Plain `cargo test` has built it; `cargo test --test examples`
/// has not, so it is built now.
fn example(name: &str) -> PathBuf {
    // From target/debug/deps/examples-… to target/debug/examples/NAME.
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let path = profile.join("examples").join(name);
    if !path.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--example", name]).arg("--target-dir").arg(profile.parent().unwrap());
        cargo.args(profile.ends_with("release").then_some("--release"));
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    }
    path
}

/// Runs a program on an emulated host and returns what it printed.
fn run(emulator: &Emulator, name: &str) -> Output {
    let mut command = Command::new(example(name));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    emulator.spawn(&mut command).unwrap().wait_with_output().unwrap()
}

/// Runs an example on each generation; its output must contain these texts, in this order, and it
/// must leave nothing behind in the driver.
fn prints(name: &str, texts: &[&str]) {
    for generation in Generation::ALL {
        let emulator = Emulator::start(Config { generation, ..Config::default() }).unwrap();
        let output = run(&emulator, name);
        let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{name} on {generation}: {}\n{printed}\n{errors}", output.status);
        let mut rest = &*printed;
        for text in texts {
            let at =
                rest.find(text).unwrap_or_else(|| panic!("{name} on {generation} did not print {text:?}: {printed}"));
            rest = &rest[at + text.len()..];
        }
        emulator.assert_no_traps();
        assert!(emulator.state().is_empty(), "{name} on {generation} left {:#?}", emulator.state());
    }
}

#[test]
fn the_first_program_of_the_readme_runs() {
    let program = include_str!("../examples/hello.rs").split_once("\n\n").unwrap().1;
    assert!(include_str!("../README.md").contains(program), "examples/hello.rs and the README are not the same");
    prints("hello", &["hello, NPU at 0x"]);
}

#[test]
fn the_first_program_says_what_is_wrong_on_a_host_without_a_driver() {
    let emulator = Emulator::start(Config { door: Door::Missing, ..Config::default() }).unwrap();
    let output = run(&emulator, "hello");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    for words in [
        "/dev/davinci_manager",
        "ENOENT (No such file or directory)",
        "the driver is not loaded, or the container was started without it. Load the driver",
    ] {
        assert!(error.contains(words), "{words:?} is not in {error}");
    }
}

#[test]
fn list_names_the_devices() {
    prints("list", &["device 0 (/dev/davinci0", "device 1 (/dev/davinci1"]);
}

#[test]
fn a_segment_grows_and_shrinks_at_one_address() {
    prints("expandable_segment", &["256 MiB", " 64 MiB", "512 MiB", "still here", "hits: ", "out of memory"]);
}

#[test]
fn memory_sleeps_and_wakes_at_the_same_address() {
    prints("sleep_mode", &["awake:", "are unmapped", "bytes kept", "asleep:", "awake again", "same weights"]);
}

#[test]
fn a_broker_serves_a_kv_cache() {
    let texts = [
        "2 pages, beginning with \"document\"",
        "2 pages, beginning with \"system-prompt\"",
        "no prefix nothing is cached",
        "a client ended with exit status: 0",
    ];
    prints("kv_cache_broker", &texts);
}

#[test]
fn a_safetensors_file_is_loaded_tensor_by_tensor() {
    prints("load_safetensors", &["a: 16 bytes at 0x", "b: 16 bytes at 0x", "2 tensors, 1024 bytes"]);
}

#[test]
fn two_processes_share_memory() {
    prints("share", &["has the memory", "reads \"HELLO FROM THE IMPORTER\""]);
}
