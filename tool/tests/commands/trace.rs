//! `ascend-vmm trace`: what it shows is what the driver saw, and the program does not notice.

use crate::support::c::compile;
use crate::support::calls::{assert_same, read};
use crate::support::{PROGRAM, refusal, run, run_program, stderr, stdout};
use ascend_emulator::record::Record;
use ascend_ioctl::Generation;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A file of the running test alone.
fn file(name: &str) -> PathBuf {
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("trace-{test}-{name}"))
}

/// Runs a program under `trace` under `emulate`. Returns its output, what the emulator recorded,
/// and what the trace saw.
fn traced(emulate: &[&str], trace: &[&str], program: &[&str]) -> (Output, Vec<Record>, Vec<Record>) {
    let (recorded, seen) = (file("recorded.jsonl"), file("seen.jsonl"));
    let mut command = Command::new(PROGRAM);
    command.arg("emulate").args(emulate).arg("--record").arg(&recorded).args(["--", PROGRAM, "trace"]);
    command.args(trace).arg("--json").arg(&seen).arg("--").args(program);
    let output = command.output().unwrap();
    (output, read(&recorded), read(&seen))
}

#[test]
fn the_trace_of_a_rust_program_is_what_the_emulator_recorded() {
    // Threads, a second process, every operation of the library.
    for driver in Generation::ALL.map(Generation::name) {
        let (output, recorded, seen) = traced(&["--driver", driver], &["--quiet"], &[PROGRAM, "selftest"]);
        assert!(output.status.success(), "{driver}: {}{}", stdout(&output), stderr(&output));
        assert!(recorded.len() > 1000, "{}", recorded.len());
        assert_same(&recorded, &seen);
    }
}

#[test]
fn the_trace_of_a_static_c_program_is_what_the_emulator_recorded() {
    let Some(program) = compile("vendor_memory", &["-static"]) else { return };
    for driver in Generation::ALL.map(Generation::name) {
        let mut command = vec![program.as_str()];
        // The program knows the numbers of the oldest generation by its name.
        command.extend((driver == Generation::ALL[0].name()).then_some(driver));
        let (output, recorded, seen) =
            traced(&["--driver", driver, "--device-process", "automatic"], &["--quiet"], &command);
        assert!(output.status.success(), "{driver}: {}", stderr(&output));
        assert!(seen.iter().any(|it| it.cmd == Some("IPC_MEM_CREATE")));
        assert_same(&recorded, &seen);
    }
}

#[test]
fn the_trace_of_a_python_program_is_what_the_emulator_recorded() {
    let script = "
import fcntl, os, threading
def bind():
    fd = os.open('/dev/davinci_manager', os.O_RDWR | os.O_CLOEXEC)
    again = os.dup(fd)
    os.close(fd)
    fcntl.ioctl(again, 0x5a00, bytearray(b'uda'.ljust(260, b'\\0')))
    fcntl.ioctl(again, 0x80145500, bytearray(20))
    return again
threads = [threading.Thread(target=bind) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
kept = bind()
child = os.fork()
if child == 0:
    fcntl.ioctl(kept, 0x80145500, bytearray(20))
    os._exit(0)
os.waitpid(child, 0)
os.close(kept)
os.spawnlp(os.P_WAIT, 'sh', 'sh', '-c', 'exec 5<>/dev/davinci0; exec 6<&5 5<&-')
try:
    os.open('/dev/davinci99', os.O_RDONLY)
except FileNotFoundError:
    pass
";
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no Python here");
        return;
    }
    let (output, recorded, seen) = traced(&[], &["--quiet"], &["python3", "-c", script]);
    assert!(output.status.success(), "{}", stderr(&output));
    // Ten files of nine threads and a shell, 19 commands, one failed open.
    assert_eq!(seen.iter().filter(|it| it.call == "open").count(), 11);
    assert_eq!(seen.iter().filter(|it| it.cmd == Some("GET_USER_INFO")).count(), 10);
    assert_same(&recorded, &seen);
}

#[test]
fn the_trace_of_a_killed_program_is_what_the_emulator_recorded() {
    for delay in ["0.01", "0.05", "0.1", "0.2", "0.4"] {
        let script = format!("{PROGRAM} selftest >/dev/null & sleep {delay}; kill -9 $!; wait $! 2>/dev/null; exit 9");
        let (output, recorded, seen) = traced(&[], &["--quiet"], &["sh", "-c", &script]);
        assert_eq!(output.status.code(), Some(9), "{}", stderr(&output));
        assert_same(&recorded, &seen);
    }
}

#[test]
fn the_programs_exit_status_and_signal_are_passed_on() {
    use std::os::unix::process::ExitStatusExt;
    for code in [0, 1, 42, 255] {
        let output = run_program(&["trace", "--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
    for (name, number) in [("KILL", 9), ("TERM", 15), ("USR1", 10)] {
        let output = run_program(&["trace", "--", "sh", "-c", &format!("ulimit -c 0; kill -{name} $$")]);
        assert_eq!(output.status.signal(), Some(number), "{name}: {}", stderr(&output));
    }
    let output = run_program(&["trace", "--", "no-such-program-anywhere"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(stderr(&output).contains("cannot run no-such-program-anywhere"), "{}", stderr(&output));
}

#[test]
fn signals_stops_and_execs_are_those_of_an_untraced_program() {
    let Some(program) = compile("signals", &[]) else { return };
    let plain = run(&program, &[]);
    assert_eq!(plain.status.code(), Some(17), "{}", stdout(&plain));
    // With a filter of its own, and at every call.
    for runner in
        [&["trace", "--quiet", "--", &program][..], &["emulate", "--", PROGRAM, "trace", "-q", "--", &program]]
    {
        let traced = run_program(runner);
        assert_eq!(stdout(&traced), stdout(&plain), "{runner:?}: {}", stderr(&traced));
        assert_eq!(traced.status.code(), Some(17));
    }
}

#[test]
fn a_running_process_can_be_traced_and_left_again() {
    let Some(program) = compile("threads", &[]) else { return };
    let (recorded, seen) = (file("recorded.jsonl"), file("seen.jsonl"));
    // The trace runs under the same emulator as the program, and is ended by a signal.
    let script = format!(
        "{program} > {0}.out & program=$!; while ! grep -q ready {0}.out; do sleep 0.01; done; \
         {PROGRAM} trace --quiet --json {0} --pid $program & trace=$!; \
         while ! test -s {0}; do sleep 0.01; done; sleep 0.3; kill -INT $trace; wait $trace; echo trace $?; \
         sleep 0.2; kill -TERM $program; wait $program; echo program $?; cat {0}.out",
        seen.display()
    );
    let _ = std::fs::remove_file(&seen);
    // A shell makes its background programs ignore SIGINT.
    let script = script.replace("kill -INT", "kill -HUP");
    let output =
        Command::new(PROGRAM).args(["emulate", "--record"]).arg(&recorded).args(["--", "sh", "-c", &script]).output();
    let output = output.unwrap();
    assert_eq!(stdout(&output), "trace 0\nprogram 0\nready\n0 failed\n", "{}", stderr(&output));
    let (recorded, seen) = (read(&recorded), read(&seen));
    let found: Vec<&Record> = seen.iter().filter(|it| it.call == "found").collect();
    assert!(!found.is_empty(), "the file of the first thread was open before");
    assert!(seen.iter().filter(|it| it.cmd == Some("GET_USER_INFO")).count() > 50, "{}", seen.len());
    let threads: std::collections::BTreeSet<i32> = seen.iter().map(|it| it.tid).collect();
    assert_eq!(threads.len(), 5, "{threads:?}");
    // The whole trace is a part of what the emulator saw, thread by thread.
    for tid in threads {
        let calls = |records: &[Record]| -> Vec<Option<String>> {
            let own = records.iter().filter(|it| it.tid == tid && it.call == "ioctl" && !it.unfinished);
            own.filter(|it| !it.errno.as_deref().is_some_and(|it| it.starts_with("ERESTART")))
                .map(|it| it.value.clone())
                .collect()
        };
        let (all, part) = (calls(&recorded), calls(&seen));
        assert!(all.windows(part.len()).any(|window| window == part), "thread {tid}");
    }
}

#[test]
fn a_hundred_thousand_calls_are_all_there_in_order() {
    let Some(program) = compile("opens", &[]) else { return };
    let seen = file("seen.jsonl");
    let output = run_program(&["trace", "-q", "--json", seen.to_str().unwrap(), "--", &program, "100000"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let calls = read(&seen);
    assert_eq!(calls.iter().filter(|it| it.call == "open" && it.errno.as_deref() == Some("ENOENT")).count(), 100_000);
    assert!(calls.windows(2).all(|pair| pair[0].at <= pair[1].at));
}

#[test]
fn a_summary_fits_a_terminal_and_says_what_tracing_costs() {
    let script = "exec 3<>/dev/davinci_manager; exec sleep 0";
    let output =
        run_program(&["emulate", "--", PROGRAM, "trace", "-q", "--summary", "--unsupported", "--", "sh", "-c", script]);
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    // The shell's open, and the close by the end of what it became.
    assert!(text.contains("2 calls on the driver"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("Tracing adds ") && words.contains(" times) and "), "{text}");
    assert!(text.contains("every command of this trace was answered"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn what_stops_a_program_is_listed_and_what_was_answered_is_not() {
    let trace = file("stops.jsonl");
    let ioctl = |cmd, value: &str, bytes: &[u8], errno: Option<&str>| Record {
        call: "ioctl",
        pid: 7,
        file: Some(1),
        cmd,
        value: Some(value.into()),
        in_hex: Some(ascend_emulator::record::hex(bytes)),
        ret: -i64::from(errno.is_some()),
        errno: errno.map(Into::into),
        ..Record::default()
    };
    let calls = [
        Record { call: "open", pid: 7, file: Some(1), path: Some("/dev/davinci_manager".into()), ..Record::default() },
        // The vendor's library leaves bytes of before behind the name.
        ioctl(Some("OPEN"), "0x5a00", b"TSDRV\0SVM\0", Some("EINVAL")),
        ioctl(Some("OPEN"), "0x5a00", b"DEVMNG\0M\0", None),
        ioctl(None, "0x4dee", b"", Some("EINVAL")),
        ioctl(None, "0x4def", b"", None),
    ];
    let lines: Vec<String> = calls.iter().map(|call| serde_json::to_string(call).unwrap()).collect();
    std::fs::write(&trace, lines.join("\n")).unwrap();
    let output = run_program(&["trace", "--unsupported", "--read", trace.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.iter().position(|line| *line == "module TSDRV could not be opened: EINVAL 1");
    let refused = lines.iter().position(|line| line.contains("DEVMNG #238 (0x4dee)") && line.ends_with("EINVAL 1"));
    assert!(first.is_some() && first < refused, "{text}");
    let table = &lines[first.unwrap()..];
    assert!(!table.iter().any(|line| line.contains("0x4def") || line.contains("DEVMNG could")), "{text}");
    assert!(text.contains("OPEN(file 1, module_name=\"DEVMNG\")"), "{text}");
}

#[test]
fn times_that_overflow_or_go_backwards_are_no_panic() {
    let (trace, page, again) = (file("times.jsonl"), file("times.html"), file("again.jsonl"));
    let (largest, half) = (u64::MAX, 1 << 63);
    let calls: Vec<Record> = [(57_157, 392), (half, 161), (1, 70), (largest, largest), (half - 1, largest), (0, 1)]
        .map(|(at, us)| Record {
            call: "open",
            at: Some(at),
            us,
            pid: 7,
            file: Some(at),
            path: Some("/dev/davinci_manager".into()),
            ..Record::default()
        })
        .into();
    let lines: Vec<String> = calls.iter().map(|call| serde_json::to_string(call).unwrap()).collect();
    std::fs::write(&trace, lines.join("\n")).unwrap();
    let [trace, page, json] = [&trace, &page, &again].map(|path| path.to_str().unwrap());
    let output = run_program(&["trace", "--summary", "--read", trace, "--html", page, "--json", json]);
    let text = stderr(&output);
    assert!(output.status.success() && text.contains("6 calls on the driver"), "{text}");
    assert_eq!(read(&again), calls, "what was read is written as it was");
    // The page has every call, at times that its script can count with.
    let html = std::fs::read_to_string(page).unwrap();
    let data = html.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let latest = 1i64 << 53;
    let times = data["at"].as_array().unwrap().iter().scan(0, |time, step| {
        *time += step.as_i64().unwrap();
        Some(*time)
    });
    assert_eq!(times.collect::<Vec<_>>(), [57_157, latest, 1, latest, latest, 0]);
    let objects = data["objects"].as_array().unwrap();
    assert_eq!(objects.len(), 6);
    for time in objects.iter().map(|object| &object["born"]).chain(data["us"].as_array().unwrap()) {
        assert!(time.as_i64().is_some_and(|time| time <= latest), "{time}");
    }
}

/// A file with these calls of process 7.
fn recording(name: &str, calls: impl IntoIterator<Item = Record>) -> PathBuf {
    let path = file(name);
    let lines = calls.into_iter().map(|call| serde_json::to_string(&Record { pid: 7, ..call }).unwrap());
    std::fs::write(&path, lines.collect::<Vec<_>>().join("\n")).unwrap();
    path
}

#[test]
fn a_search_for_nodes_is_one_line_and_no_failure() {
    let open = |path: String, errno: Option<&str>| Record {
        call: "open",
        path: Some(path),
        us: 2,
        ret: -i64::from(errno.is_some()),
        errno: errno.map(Into::into),
        ..Record::default()
    };
    let absent = (1..1123).map(|number| open(format!("/dev/davinci{number}"), Some("ENOENT")));
    let others = [
        open("/dev/davinci2000".into(), Some("EACCES")),
        open("/dev/davinci3000".into(), Some("ENOENT")),
        open("/dev/davinci_manager".into(), Some("ENOENT")),
    ];
    let here = open("/dev/davinci0".into(), None);
    let trace = recording("scan.jsonl", [here].into_iter().chain(absent).chain(others));
    let page = file("scan.html");
    let output =
        run_program(&["trace", "--summary", "--read", trace.to_str().unwrap(), "--html", page.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(text.contains("1126 calls on the driver, 2 failed; "), "{text}");
    let lines: Vec<&str> = text.lines().take_while(|line| !line.is_empty() && !line.contains("calls on")).collect();
    assert_eq!(lines.len(), 5, "{text}");
    let scan = r#"open("/dev/davinci1" … "/dev/davinci1122") = -1 ENOENT, 1122 times <2244 µs>"#;
    assert!(lines[1].ends_with(scan), "{text}");
    // One alone is written as what it is.
    assert!(lines[3].contains(r#"open("/dev/davinci3000", "#), "{text}");
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().collect();
    let [absent, open]: [Vec<&str>; 2] = ["open, no such device", "open  "].map(row);
    assert_eq!((&absent[4..6], &open[1..3]), (&["1123", "0"][..], &["3", "2"][..]), "{text}");
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains(r#""failures":2,"#), "the page has other failures");
}

#[test]
fn calls_are_filtered_by_module_call_and_outcome_and_the_file_has_all() {
    let trace = file("all.jsonl");
    let lines = |filters: &[&str]| {
        let filters = filters.iter().flat_map(|filter| ["-e", filter]);
        let arguments = ["trace", "--read", trace.to_str().unwrap()].into_iter().chain(filters);
        let text = stderr(&run_program(&arguments.collect::<Vec<_>>()));
        text.lines().take_while(|line| !line.contains("on the driver")).map(str::to_owned).collect::<Vec<_>>()
    };
    let output = run_program(&[
        "emulate",
        "--fault",
        "MEM_MAP#1=ENOMEM",
        "--",
        PROGRAM,
        "trace",
        "-e",
        "MEM_*",
        "-e",
        "failed",
        "--json",
        trace.to_str().unwrap(),
        "--",
        PROGRAM,
        "probe",
        "--open",
    ]);
    let text = stderr(&output);
    let shown = text.lines().take_while(|line| !line.contains("on the driver"));
    let shown: Vec<&str> = shown.filter(|line| !line.contains("the kernel:")).collect();
    assert!(shown.len() == 1 && shown[0].contains("MEM_MAP(") && shown[0].contains("ENOMEM"), "{text}");
    let all = lines(&[]).len();
    let [svm, others] = ["SVM", "!SVM"].map(|filter| lines(&[filter]).len());
    assert!(svm > 0 && others > 0 && svm + others == all, "{svm} {others} {all}");
    assert!(lines(&["CHIP_INFO"]).iter().all(|line| line.contains("URD CHIP_INFO(")));
    assert!(!lines(&["CHIP_INFO"]).is_empty());
}

#[test]
fn an_output_that_cannot_be_written_stops_it_before_the_program_starts() {
    let made = file("made");
    let _ = std::fs::remove_file(&made);
    for option in ["--html", "--json", "--output"] {
        let error = refusal(&["trace", option, "/nonexistent/file", "--", "touch", made.to_str().unwrap()]);
        assert_eq!(error, "error: /nonexistent/file cannot be written: No such file or directory (os error 2)\n");
        assert!(!made.exists(), "{option}");
    }
}

#[test]
fn nothing_in_a_file_reaches_the_terminal_as_a_control_character() {
    const BAD: &str = "\x1b]0;x\x07\u{9b}31m\u{202e}\r";
    let call = |cmd, value: &str| Record {
        call: "ioctl",
        file: Some(1),
        cmd,
        value: Some(value.into()),
        in_hex: Some(ascend_emulator::record::hex(format!("SVM{BAD}").as_bytes())),
        ret: -1,
        errno: Some(BAD.into()),
        log: Some(BAD.into()),
        ..Record::default()
    };
    let open = Record { call: "open", file: Some(1), path: Some(BAD.into()), ..Record::default() };
    let calls = [open, call(Some("OPEN"), "0x5a00"), call(None, "0x4dee"), call(None, BAD)];
    let trace = recording("control.jsonl", calls);
    let output = run_program(&["trace", "--summary", "--unsupported", "--read", trace.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(output.status.success() && text.contains("could not be opened: "), "{text}");
    let bad = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    assert!(!text.contains(bad), "{text:?}");
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    for (arguments, reason) in [
        (&["--driver", "7.0", "--", "true"][..], "unknown driver generation"),
        (&["--json", "/nonexistent/json", "--", "true"], "/nonexistent/json cannot be written: No such file"),
        (&["--html", "/nonexistent/html", "--", "true"], "/nonexistent/html cannot be written: No such file"),
        (&["-o", "/nonexistent/text", "--", "true"], "/nonexistent/text cannot be written: No such file"),
        (&["-e", "MEM_MPA", "--", "true"], "`MEM_MPA` is no module"),
        (&["-q", "-e", "SVM", "--", "true"], "cannot be used with"),
        (&["--pid", "0"], "0 is not in 1.."),
        (&["--pid", "2147483647"], "there is no such process"),
        (&["--pid", "1", "--", "true"], "cannot be used with"),
        (&[], "required arguments were not provided"),
    ] {
        let error = refusal(&[&["trace"], arguments].concat());
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}
