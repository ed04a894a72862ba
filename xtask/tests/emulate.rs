//! `cargo xtask emulate`: exit statuses, signals, faults, and C programs on the emulated driver.

mod support;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use support::{XTASK, refusal, run, stderr, stdout, xtask};

fn emulate(arguments: &[&str]) -> Output {
    xtask(&[&["emulate"], arguments].concat())
}

#[test]
fn the_programs_exit_status_is_passed_on() {
    for code in [0, 1, 42, 255] {
        let output = emulate(&["--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
}

#[test]
fn the_programs_signal_is_passed_on() {
    // SIGINT is not among them: a shell makes its background programs ignore it.
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("USR1", 10)] {
        let output = emulate(&["--", "sh", "-c", &format!("ulimit -c 0; kill -{name} $$")]);
        assert_eq!(output.status.signal(), Some(number), "{name}: {:?} {}", output.status, stderr(&output));
    }
}

#[test]
fn a_sigterm_sent_to_the_runner_reaches_the_program() {
    let script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done";
    let mut command = Command::new(XTASK);
    command.args(["emulate", "--", "sh", "-c", script]).stdout(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let mut ready = [0; 6];
    runner.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    kill(Pid::from_raw(runner.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(runner.wait().unwrap().code(), Some(7));
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for (arguments, reason) in [
        (&["--driver", "7.0", "--", "true"][..], "unknown driver generation; known are 8.5.0, 9.0.0 and 26.1"),
        (&["--turbo", "--", "true"], "unexpected argument '--turbo'"),
        (&["--devices", "many", "--", "true"], "invalid value 'many'"),
        (&["--devices", "65", "--", "true"], "65 is not in 0..=64"),
        (&["--hbm", "12parsecs", "--", "true"], "`parsecs` is not one of the units"),
        (&["--attach", "usb", "--", "true"], "invalid value 'usb'"),
        (&["--device-process", "maybe", "--", "true"], "invalid value 'maybe'"),
        (&["--fault", "MEM_MAP", "--", "true"], "`MEM_MAP` is not a fault"),
        (&["--fault", "MEM_MELT=ENOMEM", "--", "true"], "has no command MEM_MELT"),
        (&["--fault", "device9=dead", "--", "true"], "there is no device 9"),
        (&["--record", "/nonexistent/file", "--", "true"], "cannot record to /nonexistent/file"),
        (&["--", "no-such-program-anywhere"], "cannot run no-such-program-anywhere"),
        (&[], "required arguments were not provided"),
    ] {
        let error = refusal(&[&["emulate"], arguments].concat());
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}

#[test]
fn an_emulator_inside_an_emulator_is_refused_with_the_reason() {
    let output = emulate(&["--", XTASK, "emulate", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("another seccomp listener"), "{}", stderr(&output));
}

#[test]
fn the_number_of_devices_can_be_chosen() {
    let script = "test -c /dev/davinci2 && ! test -e /dev/davinci3";
    let output = emulate(&["--devices", "3", "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn calls_are_recorded_as_json_lines() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulate-record.jsonl");
    let output = emulate(&["--record", file.to_str().unwrap(), "--", "sh", "-c", "exec 3<>/dev/davinci_manager"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(&file).unwrap();
    let calls: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(calls[0]["call"], "open");
    assert_eq!(calls[0]["path"], "/dev/davinci_manager");
    assert_eq!(calls.last().unwrap()["call"], "close");
}

/// Compiles a C program of this directory and returns its path.
fn compile(name: &str) -> String {
    let source = format!("{}/tests/c/{name}.c", env!("CARGO_MANIFEST_DIR"));
    // Tests run in parallel, and one must not overwrite a program that another executes.
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    let program = format!("{}/{name}-{test}", env!("CARGO_TARGET_TMPDIR"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = run(&compiler, &["-Wall", "-Werror", "-o", &program, &source]);
    assert!(output.status.success(), "{}", stderr(&output));
    program
}

#[test]
fn a_c_program_brings_up_a_session() {
    let program = compile("open_session");
    let output = emulate(&["--attach", "hccs", "--", &program]);
    assert!(output.status.success(), "{}", stderr(&output));
    let segments = "segment 0x100000000000 + 0x80000000000\n\
                    segment 0xc0000000000 + 0x20000000000\n\
                    segment 0x90000000000 + 0x30000000000\n\
                    segment 0x80000000000 + 0x10000000000\n";
    assert_eq!(stdout(&output), segments);
    // The program uses the request values of 9.0.0 and 26.1.
    let output = emulate(&["--driver", "8.5.0", "--", &program]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Invalid argument"), "{}", stderr(&output));
}

#[test]
fn two_processes_of_a_c_program_share_memory() {
    let program = compile("share_memory");
    let output = emulate(&["--device-process", "automatic", "--", &program]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), "child read: written by the parent\n");
}

#[test]
fn a_c_program_allocates_and_shares_as_the_vendors_library_does() {
    let program = compile("vendor_memory");
    for driver in ["26.1", "9.0.0", "8.5.0"] {
        let mut arguments = vec!["--driver", driver, "--device-process", "automatic", "--", &program];
        arguments.extend((driver == "8.5.0").then_some("8.5.0"));
        let output = emulate(&arguments);
        assert!(output.status.success(), "{driver}: {}", stderr(&output));
        assert_eq!(stdout(&output), "child read: plain memory of the parent\nall freed\n", "{driver}");
    }
}

#[test]
fn an_injected_fault_reaches_the_program() {
    let program = compile("share_memory");
    let output = emulate(&["--device-process", "automatic", "--fault", "MEM_CREATE=ENOMEM", "--", &program]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Cannot allocate memory"), "{}", stderr(&output));
}

#[test]
fn a_program_that_would_crash_the_kernel_fails_with_the_name_of_the_trap() {
    let program = compile("share_memory");
    let output = emulate(&["--device-process", "automatic", "--", &program, "once", "twice"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("kernel trap `access-after-access-none`"), "{}", stderr(&output));
    assert_eq!(stdout(&output), "access was set\n");
}
