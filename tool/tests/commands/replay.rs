//! `ascend-vmm emulate --replay`: a trace played on the driver that it was made on shows no
//! difference, and any other answer is found with its line.

use crate::support::c::compile;
use crate::support::{PROGRAM, refusal, run_program, stderr, stdout};
use ascend_ioctl::Generation;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A file of the running test alone.
fn file(name: &str) -> PathBuf {
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("replay-{test}-{name}"))
}

/// Traces a program on an emulated host. Returns the emulator's own record and the trace.
fn traced(emulate: &[&str], program: &[&str]) -> (PathBuf, PathBuf) {
    let (recorded, seen) = (file("recorded.jsonl"), file("seen.jsonl"));
    let mut command = Command::new(PROGRAM);
    command.arg("emulate").args(emulate).arg("--record").arg(&recorded).args(["--", PROGRAM, "trace", "--quiet"]);
    let output = command.arg("--json").arg(&seen).arg("--").args(program).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    (recorded, seen)
}

fn replay(trace: &Path, options: &[&str]) -> Output {
    run_program(&[&["emulate", "--replay", trace.to_str().unwrap()], options].concat())
}

#[track_caller]
fn assert_no_difference(trace: &Path, generation: &str, least: usize) {
    let output = replay(trace, &[]);
    let report = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{report}{}", stderr(&output));
    let calls: usize = report.split(' ').next().unwrap().parse().unwrap();
    assert!(calls >= least, "{report}");
    assert!(report.contains(&format!("generation {generation} as in the trace")), "{report}");
    assert!(report.contains("No answer differs."), "{report}");
    // On a busy machine a signal may come in the middle of a call.
    let (_, skipped) = report.split_once("Not replayed:").unwrap_or_default();
    let mut reasons = skipped.lines().filter(|line| line.starts_with("  "));
    assert!(reasons.all(|line| line.contains("a signal interrupted it")), "{report}");
}

#[test]
fn a_trace_of_every_operation_shows_no_difference_on_its_own_generation() {
    for generation in Generation::ALL.map(Generation::name) {
        let (recorded, seen) = traced(&["--driver", generation], &[PROGRAM, "selftest"]);
        for trace in [recorded, seen] {
            assert_no_difference(&trace, generation, 1000);
        }
    }
}

#[test]
fn of_thousands_of_odd_calls_only_those_differ_that_a_trace_cannot_tell() {
    let (recorded, seen) = traced(&[], &[PROGRAM, "selftest", "--raw"]);
    for trace in [recorded, seen] {
        let output = replay(&trace, &[]);
        let report = stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{report}");
        let calls: usize = report.split(' ').next().unwrap().parse().unwrap();
        assert!(calls > 15_000, "{report}");
        let differing: Vec<&str> = report.lines().filter(|line| line.starts_with("  line ")).collect();
        assert!(differing.len() < 20, "{report}");
        for line in differing {
            let known = [
                // A child that uses a session of its parent, an argument that cannot be written.
                "HDC SET_SESSION_OWNER",
                "HDC GET_SESSION_ATTR",
                "HDC CLOSE",
                "MEM_CREATE returned EINVAL",
                // A process that was listed before it started, a page that a CPU touched, a process
                // that was killed meanwhile.
                "MEM_IMPORT returned EACCES",
                "MEMCPY returned 0",
                "DBG_VA_STATUS answered mem_type 2; emulated: 1",
                "MEM_GET_INFO returned 0",
                // Ordinary memory of the process that is not there; what is converted is held.
                "CONVERT_ADDR returned EFAULT",
                "FREE_PAGES returned 0; emulated: EBUSY",
            ];
            assert!(known.iter().any(|known| line.contains(known)), "{line}");
        }
    }
}

#[test]
fn random_calls_are_answered_alike_when_they_are_replayed() {
    for (generation, attachment) in [("8.5.0", "hccs"), ("9.0.0", "pcie"), ("26.1", "pcie")] {
        let host = ["--driver", generation, "--attach", attachment];
        let (recorded, seen) = traced(&host, &[PROGRAM, "selftest", "--random", "3", "--calls", "400"]);
        for trace in [recorded, seen] {
            let output = replay(&trace, &[]);
            let report = stdout(&output);
            assert_eq!(output.status.code(), Some(0), "{generation}: {report}{}", stderr(&output));
            assert!(report.contains(&format!("generation {generation} as in the trace")), "{report}");
            let calls: usize = report.split(' ').next().unwrap().parse().unwrap();
            assert!(calls >= 400, "{report}");
        }
    }
}

#[test]
fn an_anonymised_trace_names_nothing_of_its_host_and_can_be_replayed() {
    let (plain, seen) = (file("plain.jsonl"), file("anonymous.jsonl"));
    let mut command = Command::new(PROGRAM);
    command.args(["emulate", "--record"]).arg(&plain).args([
        "--",
        PROGRAM,
        "trace",
        "--quiet",
        "--anonymise",
        "--json",
    ]);
    let output = command.arg(&seen).args(["--", PROGRAM, "selftest"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(&seen).unwrap();
    let mut secrets = std::collections::BTreeSet::new();
    for record in crate::support::calls::read(&plain) {
        secrets.extend([format!("\"pid\":{},", record.pid), format!("\"tid\":{},", record.tid)]);
        for buffer in &record.buffers {
            let address = u64::from_str_radix(&buffer.addr[2..], 16).unwrap();
            secrets.insert(buffer.addr.clone());
            secrets.insert(ascend_emulator::record::hex(&address.to_le_bytes()));
        }
    }
    assert!(secrets.len() > 50);
    let found: Vec<&String> = secrets.iter().filter(|secret| text.contains(*secret)).collect();
    assert!(found.is_empty(), "{found:?}");
    // The driver's answers name the process as the trace does.
    let signs: Vec<_> =
        crate::support::calls::read(&seen).into_iter().filter(|it| it.cmd == Some("GET_PROCESS_SIGN")).collect();
    assert!(!signs.is_empty());
    for sign in signs {
        let expected = ascend_emulator::record::hex(&[&sign.pid.to_le_bytes()[..], b"0"].concat());
        assert!(sign.out_hex.as_deref().is_some_and(|hex| hex.starts_with(&expected)), "{sign:?}");
    }
    assert_no_difference(&seen, Generation::NEWEST.name(), 1000);
}

#[test]
fn the_host_is_taken_from_the_trace() {
    let host = ["--attach", "hccs", "--devices", "5", "--hbm", "32G", "--device-process", "automatic"];
    let (_, seen) = traced(&host, &[PROGRAM, "probe", "--open"]);
    assert_no_difference(&seen, Generation::NEWEST.name(), 50);
    assert!(stdout(&replay(&seen, &[])).contains("5 devices on HCCS, each with 32 GiB"));
}

#[test]
fn a_trace_of_a_c_program_in_two_processes_shows_no_difference() {
    let Some(program) = compile("vendor_memory", &[]) else { return };
    let (_, seen) = traced(&["--device-process", "automatic"], &[&program]);
    assert_no_difference(&seen, Generation::NEWEST.name(), 30);
}

/// A trace of which one line is changed.
fn changed(trace: &Path, command: &str, from: &str, to: &str) -> (PathBuf, usize) {
    let text = std::fs::read_to_string(trace).unwrap();
    let wanted = format!("\"cmd\":\"{command}\"");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let is_wanted = |line: &String| line.contains(&wanted) && line.contains(from);
    let index = lines.iter().position(is_wanted).unwrap_or_else(|| panic!("no {command} with {from}"));
    lines[index] = lines[index].replace(from, to);
    let path = file("changed.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    (path, index + 1)
}

#[test]
fn an_answer_that_differs_is_found_with_its_line() {
    let (_, seen) = traced(&[], &[PROGRAM, "selftest"]);
    // An errno, a field of an answer, a fact of the machine, a list.
    for (command, from, to, found) in [
        ("MEM_MAP", "\"ret\":0", "\"ret\":-1,\"errno\":\"EBUSY\"", "MEM_MAP returned EBUSY; emulated: 0"),
        (
            "MEM_CREATE",
            "\"ret\":-1,\"errno\":\"ENOMEM\"",
            "\"ret\":-1,\"errno\":\"EFAULT\"",
            "MEM_CREATE returned EFAULT",
        ),
        ("QUERY_DEV_PID", "\"ret\":62", "\"ret\":61", "QUERY_DEV_PID returned 61; emulated: 62"),
    ] {
        let (trace, line) = changed(&seen, command, from, to);
        let output = replay(&trace, &[]);
        let report = stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{report}");
        assert!(report.contains(&format!("line {line}: {found}")), "{command}: {report}");
    }
    let (trace, line) = changed(&seen, "INIT_PROCESS", "00100000", "00000100");
    let report = stdout(&replay(&trace, &[]));
    assert!(report.contains("of the machine, not of the driver"), "{report}");
    assert!(report.contains("INIT_PROCESS.svm_page_size is 0x10000; emulated: 4096"), "{report}");
    assert!(report.contains(&format!("(line {line})")), "{report}");
    // The same trace on another generation is another matter.
    let output = replay(&seen, &["--driver", "8.5.0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("generation 8.5.0 as given"), "{}", stdout(&output));
}

#[test]
fn of_two_calls_at_once_either_may_have_been_first() {
    let (_, seen) = traced(&[], &[PROGRAM, "selftest"]);
    let text = std::fs::read_to_string(&seen).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let index = lines.iter().position(|line| line.contains("\"MEM_MAP\"") && line.contains("\"ret\":0")).unwrap();
    let mut lost: serde_json::Value = serde_json::from_str(&lines[index]).unwrap();
    let time = lost["us"].as_u64().unwrap();
    // The call that lost is written before the one that won.
    lost["errno"] = "EADDRINUSE".into();
    lost["ret"] = (-1).into();
    lost["tid"] = (lost["tid"].as_i64().unwrap() + 1).into();
    for (us, code) in [(time, 0), (0, 1)] {
        let at = lost["at"].as_u64().unwrap();
        lost["us"] = us.into();
        lost["at"] = (at - u64::from(us == 0)).into();
        lines.insert(index, lost.to_string());
        let path = file("lost.jsonl");
        std::fs::write(&path, lines.join("\n")).unwrap();
        let output = replay(&path, &[]);
        assert_eq!(output.status.code(), Some(code), "{}", stdout(&output));
        lines.remove(index);
    }
}

#[test]
fn what_cannot_be_replayed_is_listed() {
    let (_, seen) = traced(&["--device-process", "automatic"], &[PROGRAM, "probe", "--open"]);
    let text = std::fs::read_to_string(&seen).unwrap();
    // The trace begins after the first open.
    let path = file("late.jsonl");
    std::fs::write(&path, text.lines().skip(1).collect::<Vec<_>>().join("\n")).unwrap();
    let output = replay(&path, &[]);
    assert!(stdout(&output).contains("Not replayed:\n"), "{}", stdout(&output));
    assert!(stdout(&output).contains("its file was open before the trace began"), "{}", stdout(&output));
}

#[test]
fn a_file_that_is_no_trace_is_refused() {
    let garbage = file("garbage.jsonl");
    let garbage = garbage.to_str().unwrap();
    for (text, reason) in [
        ("not json", "line 1: expected"),
        ("{\"call\":\"open\"}\n\n{\"call\":\"dance\"}", "line 3: `dance` is not a call of a trace"),
        ("[]", "line 1"),
    ] {
        std::fs::write(garbage, text).unwrap();
        let error = refusal(&["emulate", "--replay", garbage]);
        assert!(error.contains(reason), "{text}: {error}");
    }
    assert!(refusal(&["emulate", "--replay", "/nonexistent"]).contains("cannot replay /nonexistent"));
    assert!(refusal(&["emulate", "--replay", garbage, "--", "true"]).contains("cannot be used with"));
    // Nothing was compared, so nothing is the same.
    std::fs::write(garbage, "\n").unwrap();
    assert!(refusal(&["emulate", "--replay", garbage]).contains("garbage.jsonl: it has no calls"));
}

#[test]
fn nothing_in_a_trace_makes_the_replay_panic() {
    let (_, seen) = traced(&["--device-process", "automatic"], &[PROGRAM, "probe", "--open"]);
    let text = std::fs::read_to_string(&seen).unwrap();
    let path = file("mangled.jsonl");
    for (from, to) in [
        ("\"len\":", "\"len\":18446744073709551615,\"us\":"),
        ("\"in_hex\":\"", "\"in_hex\":\"ffffffffffffffffffffffffffffffffffffffffffffffff"),
        ("\"in_hex\":\"", "\"in_hex\":\"xyz"),
        ("\"addr\":\"0x", "\"addr\":\"0xffffffff"),
        ("\"pid\":", "\"pid\":-"),
        ("\"file\":1", "\"file\":18446744073709551615"),
    ] {
        let mangled: Vec<String> = text
            .lines()
            .map(|line| line.replacen(from, to, 1))
            .filter(|line| serde_json::from_str::<ascend_emulator::record::Record>(line).is_ok())
            .collect();
        std::fs::write(&path, mangled.join("\n")).unwrap();
        let output = replay(&path, &[]);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{to}: {:?} {}", output.status, stderr(&output));
    }
}
