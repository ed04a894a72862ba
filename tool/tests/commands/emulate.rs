//! `ascend-vmm emulate`: exit statuses, signals, faults, and C programs on the emulated driver.

use crate::support::c::compile;
use crate::support::{PROGRAM, refusal, run_program, stderr, stdout};
use ascend_ioctl::{Generation, UnknownGeneration};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn emulate(arguments: &[&str]) -> Output {
    run_program(&[&["emulate"], arguments].concat())
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
    let mut command = Command::new(PROGRAM);
    command.args(["emulate", "--", "sh", "-c", script]).stdout(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let mut ready = [0; 6];
    runner.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    kill(Pid::from_raw(runner.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(runner.wait().unwrap().code(), Some(7));
}

/// What the program wrote until all of its processes had ended; panics if that takes too long.
#[track_caller]
fn last_words(output: impl Read + AsFd) -> String {
    let mut output = output;
    let mut words = Vec::new();
    let mut part = [0; 64];
    loop {
        let mut polled = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::from(60_000u16)), Ok(1), "the program hangs");
        match output.read(&mut part).unwrap() {
            0 => return String::from_utf8(words).unwrap(),
            count => words.extend(&part[..count]),
        }
    }
}

#[test]
fn a_program_whose_emulator_is_killed_finds_no_driver_and_continues() {
    let script = "test -e /dev/davinci0 && echo there; read line; test -e /dev/davinci0 || echo gone";
    let mut command = Command::new(PROGRAM);
    command.args(["emulate", "--", "sh", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let (mut input, mut output) = (runner.stdin.take().unwrap(), runner.stdout.take().unwrap());
    let mut there = [0; 6];
    output.read_exact(&mut there).unwrap();
    runner.kill().unwrap();
    runner.wait().unwrap();
    input.write_all(b"\n").unwrap();
    assert_eq!(last_words(output), "gone\n");
}

#[test]
fn an_emulator_that_is_killed_while_it_starts_a_program_leaves_nobody_waiting() {
    for microseconds in (0..20_000).step_by(500) {
        let mut command = Command::new(PROGRAM);
        command.args(["emulate", "--", "sh", "-c", "test -e /dev/davinci0"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut runner = command.spawn().unwrap();
        let output = runner.stdout.take().unwrap();
        std::thread::sleep(Duration::from_micros(microseconds));
        runner.kill().unwrap();
        runner.wait().unwrap();
        assert_eq!(last_words(output), "");
    }
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    let unknown = UnknownGeneration.to_string();
    for (arguments, reason) in [
        (&["--driver", "7.0", "--", "true"][..], unknown.as_str()),
        (&["--turbo", "--", "true"], "unexpected argument '--turbo'"),
        (&["--devices", "many", "--", "true"], "invalid value 'many'"),
        (&["--devices", "65", "--", "true"], "devices is 65; a host has at most 64"),
        (&["--devices", "4294967296", "--", "true"], "4294967296 is not in 0..=4294967295"),
        (&["--hbm", "65T", "--", "true"], "hbm is more than 64 TiB"),
        (&["--hbm", "16777216T", "--", "true"], "does not fit into 64 bits"),
        (&["--numa-nodes", "0", "--", "true"], "a host has 1 to 1024"),
        (&["--removed", "2", "--", "true"], "there is no NPU 2"),
        (&["--removed", "1", "--starting", "1", "--", "true"], "NPU 1 is in two states"),
        (&["--occupied", "x", "--", "true"], "`x` is not the number of an NPU"),
        (&["--virtual-instances", "7", "--", "true"], "7 is on no card"),
        (&["--without-module", "svm3", "--", "true"], "there is no module `svm3`"),
        (&["--daemon", "asleep", "--", "true"], "`asleep` is not one of"),
        (&["--like", "atlas-9000", "--", "true"], "invalid value 'atlas-9000'"),
        (&["--chip", "", "--", "true"], "1 to 31 ASCII characters"),
        (&["--host", "/nonexistent/host.toml", "--", "true"], "/nonexistent/host.toml cannot be read"),
        (&["--hbm", "12parsecs", "--", "true"], "`parsecs` is not one of the units"),
        (&["--attach", "usb", "--", "true"], "invalid value 'usb'"),
        (&["--device-process", "maybe", "--", "true"], "invalid value 'maybe'"),
        (&["--fault", "MEM_MAP", "--", "true"], "`MEM_MAP` is not a fault"),
        (&["--fault", "MEM_MELT=ENOMEM", "--", "true"], "has no command MEM_MELT"),
        (&["--fault", "device9=dead", "--", "true"], "there is no device 9"),
        (&["--record", "/nonexistent/file", "--", "true"], "cannot record to /nonexistent/file"),
        (&[], "required arguments were not provided"),
    ] {
        let error = refusal(&[&["emulate"], arguments].concat());
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}

#[test]
fn a_program_that_cannot_be_run_ends_as_in_a_shell() {
    for (program, code) in [("no-such-program-anywhere", 127), ("/nonexistent/program", 127), ("/", 126)] {
        let output = emulate(&["--", program]);
        assert_eq!(output.status.code(), Some(code), "{program}: {}", stderr(&output));
        assert!(stderr(&output).contains(&format!("cannot run {program}")), "{}", stderr(&output));
    }
}

#[test]
fn reading_a_node_ends_at_once_as_on_the_real_driver() {
    for node in ["/dev/davinci0", "/dev/davinci_manager"] {
        let output = emulate(&["--", "cat", node]);
        assert_eq!(output.status.code(), Some(1), "{node}");
        assert!(stderr(&output).contains("Invalid argument"), "{node}: {}", stderr(&output));
        assert_eq!(output.stdout, b"", "{node}");
    }
}

#[test]
fn a_program_that_lists_dev_finds_the_nodes_that_are_there() {
    let names = |options: &[&str], script: &str| -> Vec<String> {
        let output = emulate(&[options, &["--", "sh", "-c", script]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).split_whitespace().map(str::to_owned).collect()
    };
    let found = names(&["--devices", "3"], "echo /dev/davinci* /dev/hisi_hdc* /dev/devmm*");
    assert_eq!(
        found,
        ["/dev/davinci0", "/dev/davinci1", "/dev/davinci2", "/dev/davinci_manager", "/dev/hisi_hdc", "/dev/devmm_svm"]
    );
    let found =
        names(&["--devices", "3", "--in-container", "1", "--hdc-is", "missing"], "cd /dev; echo davinci* hisi*");
    assert_eq!(found, ["davinci1", "davinci_manager", "hisi*"]);
    // Each entry once, the host's own ones too, and as devices.
    let found = names(&["--devices", "64"], "find /dev -maxdepth 1 -type c | sort");
    assert!(found.contains(&"/dev/null".to_owned()), "{found:?}");
    assert_eq!(found.iter().filter(|name| name.starts_with("/dev/davinci")).count(), 65, "{found:?}");
    // Others do not have them, in no place.
    assert_eq!(names(&[], "cd /; echo proc/davinci*"), ["proc/davinci*"]);
}

#[test]
fn a_program_that_starts_no_device_process_learns_what_it_needs() {
    let Some(program) = compile("share_memory", &[]) else { return };
    let output = emulate(&["--", &program]);
    assert_eq!(output.status.code(), Some(1));
    // Of its two processes the second may still be running when the first ends.
    let note = "note: SETUP_DEVICE was refused with EFAULT in ";
    assert!(stderr(&output).contains(note), "{}", stderr(&output));
    // The library tries first without one, and starts one then: nothing to say, whatever fails.
    let output = emulate(&["--", "sh", "-c", &format!("{PROGRAM} probe --open; exit 1")]);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(1), ""));
}

/// Writes a description of a host and returns its path.
fn description(name: &str, text: &str) -> String {
    let path = format!("{}/{name}", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_host_is_described_by_a_file_and_options_win_over_it() {
    let toml = description("host.toml", "devices = 3\nhbm = \"32G\"\nin-container = [2]\ndriver = \"9.0.0\"\n");
    let json =
        description("host.json", r#"{"devices": 3, "hbm": 34359738368, "in-container": "2", "driver": "9.0.0"}"#);
    for file in [toml, json] {
        let output = emulate(&["--host", &file, "--", PROGRAM, "probe", "--json"]);
        let document = crate::support::document(&output, "probe");
        assert_eq!(document["driver"]["generation"], "9.0.0", "{document:#}");
        assert_eq!(document["devices"][0]["physical"], 2);
        assert_eq!(document["devices"][0]["hbm"]["total"], 32u64 << 30);
        let output = emulate(&["--host", &file, "--hbm", "16G", "--", PROGRAM, "probe", "--json"]);
        assert_eq!(crate::support::document(&output, "probe")["devices"][0]["hbm"]["total"], 16u64 << 30);
    }
}

#[test]
fn a_mistake_in_a_file_is_named_with_its_key_and_line() {
    for (name, text, parts) in [
        ("typo.toml", "devices = 2\n\ndevcies = 3\n", &["line 3", "devcies"][..]),
        ("typo.json", "{\n\"devices\": 2,\n\"devcies\": 3}", &["line 3", "devcies"]),
        ("huge.toml", "devices = 99999999999999999999999\n", &["line 1", "devices"]),
        ("huge.json", "{\"hbm\": 99999999999999999999999}", &["line 1", "hbm"]),
        ("negative.toml", "hbm = -1\n", &["line 1", "hbm"]),
        ("size.toml", "devices = 1\nhbm = \"1Q\"\n", &["line 2", "hbm", "`Q` is not one of the units"]),
        ("list.json", "{\n\"occupied\": [0, \"x\"]}", &["line 2", "occupied"]),
        ("broken.toml", "devices = \n", &["line 1", "devices"]),
        ("broken.json", "{\"devices\": 1", &["line 1"]),
        ("many.toml", "devices = 65\n", &["devices is 65"]),
        ("binary.toml", "\u{0}\u{1}", &["line 1"]),
        // What is named JSON is read as JSON, whatever it begins with.
        ("words.json", "devices = 2", &["expected value at line 1 column 1"]),
        ("empty.json", "", &["EOF while parsing"]),
        ("list-of-hosts.json", "[{\"devices\": 2}]", &["line 1 column"]),
        ("long.toml", &"#".repeat((1 << 20) + 1), &["long.toml cannot be read: it is longer than 1 MiB"]),
    ] {
        let file = description(name, text);
        let error = refusal(&["emulate", "--host", &file, "--", "true"]);
        for part in parts {
            assert!(error.contains(part), "{name}: {part}: {error}");
        }
    }
}

#[test]
fn only_a_regular_file_describes_a_host() {
    let pipe = format!("{}/pipe.toml", env!("CARGO_TARGET_TMPDIR"));
    let _ = std::fs::remove_file(&pipe);
    nix::unistd::mkfifo(pipe.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for file in ["/dev/zero", "/dev/full", pipe.as_str()] {
        let error = refusal(&["emulate", "--host", file, "--", "true"]);
        assert!(error.contains("cannot be read: it is no regular file"), "{error}");
    }
    assert!(refusal(&["emulate", "--host", "/", "--", "true"]).contains("/ cannot be read: it is no regular file"));
    std::fs::remove_file(pipe).unwrap();
}

#[test]
fn every_condition_of_a_host_has_an_option() {
    for (options, code) in [
        (&["--nodes-are", "forbidden"][..], "no-permission"),
        (&["--nodes-are", "denied"], "denied-by-cgroup"),
        (&["--nodes-are", "stale"], "stale-node"),
        (&["--hdc-is", "forbidden"], "no-daemon-node"),
        (&["--forbidden", "0-1"], "nodes-no-permission"),
        (&["--in-container", "none"], "no-device-passed"),
        (&["--in-container", "0,1", "--occupied", "1"], "occupied"),
        (&["--detected", "1", "--waits-for", "100s"], "still-starting"),
        (&["--starting", "1"], "device-starting"),
        (&["--removed", "1"], "device-removed"),
        (&["--resetting", "1"], "device-resetting"),
        (&["--virtual-instances", "103", "--in-container", "103"], "virtual-instance"),
        (&["--split-for", "containers"], "split-device"),
        (&["--virtual-machine"], "virtual-machine"),
        (&["--without-module", "URD"], "module-missing"),
        (&["--next-memory-driver"], "memory-driver-v3"),
        (&["--unknown-generation"], "unknown-generation"),
        (&["--devices", "0"], "no-device"),
    ] {
        let output = emulate(&[options, &["--", PROGRAM, "probe", "--json", "--timeout", "1"]].concat());
        let document = crate::support::document(&output, "probe");
        let codes: Vec<&str> =
            document["findings"].as_array().unwrap().iter().map(|f| f["code"].as_str().unwrap()).collect();
        assert!(codes.contains(&code), "{options:?}: {codes:?}");
    }
    // These are no faults.
    for options in [
        &["--in-privileged-container"][..],
        &["--attach", "hccs", "--host-giant-pages"],
        &["--numa-nodes", "8", "--giant-pages", "false"],
        &["--detected", "1", "--up-after", "200ms"],
        &["--server", "none", "--share-over-external-bus"],
        &["--daemon", "late:100ms"],
    ] {
        let output = emulate(&[options, &["--", PROGRAM, "probe", "--open", "--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{options:?}: {}", stdout(&output));
    }
}

#[test]
fn every_preset_is_a_host_that_probe_describes() {
    for (name, devices, code) in [
        ("atlas-800-a2", 8, 0),
        ("atlas-200t-a2-box16", 16, 0),
        ("atlas-800-a3", 16, 0),
        ("ascend-950", 8, 1),
        ("container-on-atlas-800-a2", 1, 0),
    ] {
        let output = emulate(&["--like", name, "--", PROGRAM, "probe", "--json"]);
        let document = crate::support::document(&output, "probe");
        assert_eq!(document["devices"].as_array().unwrap().len(), devices, "{name}");
        assert_eq!(output.status.code(), Some(code), "{name}: {document:#}");
        // The page says of each what is known and what is made up.
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/emulator.md")).unwrap();
        assert!(page.contains(&format!("| `{name}` |")), "{name}");
    }
}

#[test]
fn an_emulator_inside_an_emulator_is_refused_with_the_reason() {
    let output = emulate(&["--", PROGRAM, "emulate", "--", "true"]);
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

#[test]
fn with_a_copy_time_every_copy_takes_it() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulate-copy-time.jsonl");
    let record = file.to_str().unwrap();
    let output = emulate(&["--copy-time", "50ms", "--record", record, "--", PROGRAM, "demo"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(&file).unwrap();
    let calls: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let copies: Vec<u64> =
        calls.iter().filter(|call| call["cmd"] == "MEMCPY").filter_map(|call| call["us"].as_u64()).collect();
    assert!(!copies.is_empty() && copies.iter().all(|&time| time >= 50_000), "{copies:?}");
}

#[test]
fn a_c_program_brings_up_a_session() {
    let Some(program) = compile("open_session", &[]) else { return };
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
    let Some(program) = compile("share_memory", &[]) else { return };
    let output = emulate(&["--device-process", "automatic", "--", &program]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), "child read: written by the parent\n");
}

#[test]
fn a_c_program_allocates_and_shares_as_the_vendors_library_does() {
    let Some(program) = compile("vendor_memory", &[]) else { return };
    for driver in Generation::ALL.map(Generation::name) {
        let mut arguments = vec!["--driver", driver, "--device-process", "automatic", "--", &program];
        // The program knows the numbers of the oldest generation by its name.
        arguments.extend((driver == Generation::ALL[0].name()).then_some(driver));
        let output = emulate(&arguments);
        assert!(output.status.success(), "{driver}: {}", stderr(&output));
        assert_eq!(stdout(&output), "child read: plain memory of the parent\nall freed\n", "{driver}");
    }
}

#[test]
fn reading_a_node_ends_at_once() {
    for node in ["/dev/davinci0", "/dev/davinci_manager", "/dev/hisi_hdc"] {
        let output = emulate(&["--", "cat", node]);
        assert_eq!(output.status.code(), Some(1), "{node}");
        assert!(stderr(&output).contains("Invalid argument"), "{node}: {}", stderr(&output));
    }
}

/// What a program does to the segments that it mapped, or to its file.
#[track_caller]
fn with_segments(step: &str) -> Output {
    emulate(&["--", &compile("segments", &[]).expect("a C compiler"), step])
}

#[test]
fn an_open_file_looks_like_the_device() {
    let output = with_segments("file");
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn locking_or_populating_the_segments_costs_nothing() {
    let output = with_segments("lock");
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_child_cannot_lock_or_populate_the_segments_that_it_inherited() {
    let output = with_segments("lock-in-child");
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_core_dump_leaves_the_segments_out() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("core-dump");
    std::fs::create_dir_all(&directory).unwrap();
    let Some(program) = compile("segments", &[]) else { return };
    let output =
        Command::new(PROGRAM).args(["emulate", "--", &program, "dump"]).current_dir(&directory).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_touch_of_a_forked_child_is_charged_to_the_child() {
    let output = with_segments("touch-in-child");
    let child = stdout(&output).lines().next().unwrap().strip_prefix("child ").unwrap().to_owned();
    assert!(stdout(&output).contains("the parent lives\ndone\n"), "{}{}", stdout(&output), stderr(&output));
    let trap = format!("kernel trap `touch-of-unmapped-address` triggered by process {child}:");
    assert!(stderr(&output).contains(&trap), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_program_that_touches_a_whole_segment_is_stopped_before_the_machine_has_no_memory() {
    let output = with_segments("flood");
    assert!(!stdout(&output).contains("done"), "{}", stdout(&output));
    assert!(stderr(&output).contains("touch-of-unmapped-address"), "{}", stderr(&output));
}

/// Runs the program, and another one after exec, under a tool that traces it; a reason if the tool
/// is absent.
fn traced(tool: &[&str]) -> Result<(), String> {
    if Command::new(tool[0]).arg("--version").output().is_err() {
        return Err(format!("skipped: {} is not installed", tool[0]));
    }
    let [segments, memory] = ["segments", "vendor_memory"].map(|name| compile(name, &[]).expect("a C compiler"));
    let programs: [&[&str]; 3] = [&[&segments, "file"], &[&segments, "file", "again"], &[&memory]];
    for program in programs {
        let arguments = [&["--device-process", "automatic", "--"], tool, program].concat();
        let output = emulate(&arguments);
        assert!(output.status.success(), "{arguments:?}: {}{}", stdout(&output), stderr(&output));
        let last = if program.len() == 1 { "all freed" } else { "done" };
        assert!(stdout(&output).contains(last), "{arguments:?}: {}{}", stdout(&output), stderr(&output));
    }
    Ok(())
}

#[test]
fn a_program_under_strace_has_the_driver() {
    if let Err(reason) = traced(&["strace", "-f", "-o", "/dev/null"]) {
        eprintln!("{reason}");
    }
}

#[test]
fn a_program_under_gdb_has_the_driver() {
    // It stops, is stepped, and runs to its end.
    let tool = ["gdb", "-batch", "-ex", "tbreak main", "-ex", "run", "-ex", "stepi 100", "-ex", "continue", "--args"];
    if let Err(reason) = traced(&tool) {
        eprintln!("{reason}");
    }
}

#[test]
fn an_injected_fault_reaches_the_program() {
    let Some(program) = compile("share_memory", &[]) else { return };
    let output = emulate(&["--device-process", "automatic", "--fault", "MEM_CREATE=ENOMEM", "--", &program]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Cannot allocate memory"), "{}", stderr(&output));
}

#[test]
fn a_program_that_would_crash_the_kernel_fails_with_the_name_of_the_trap() {
    let Some(program) = compile("share_memory", &[]) else { return };
    let output = emulate(&["--device-process", "automatic", "--", &program, "once", "twice"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("kernel trap `access-after-access-none`"), "{}", stderr(&output));
    assert_eq!(stdout(&output), "access was set\n");
}
