//! `ascend-vmm emulate --seed` and `--seeds`: runs that a number decides.

use crate::support::{refusal, run_program, stderr};
use std::process::{Command, Output};

fn emulate(arguments: &[&str]) -> Output {
    run_program(&[&["emulate"], arguments].concat())
}

/// The last line about a seeded run.
fn summary(output: &Output) -> String {
    let text = stderr(output);
    text.lines().rev().find(|line| line.starts_with("seed ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Two processes add one to a number in a file, each with a call of the driver in between. The
/// script fails if one addition is lost. The file has no name from mktemp, which makes a call more
/// in some of its runs, so that the seed is another order.
const LOST_ADDITION: &str = r#"
    f="${TMPDIR:-/tmp}/ascend-vmm-sum.$$"; echo 0 > "$f"
    add() { read n < "$f"; test -e /dev/davinci0; echo $((n + 1)) > "$f"; }
    add & add & wait
    read n < "$f"; rm "$f"
    test "$n" = 2 || { echo "the sum is $n"; exit 3; }
"#;

#[test]
fn the_first_seed_that_fails_is_shrunk_to_one_command_line_that_fails_each_time() {
    let output = emulate(&["--seeds", "0..40", "--jobs", "2", "--", "sh", "-c", LOST_ADDITION]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("the sum is 1") && text.contains("shrunk in"), "{text}");
    let start = text.find("this repeats it:\n  ").unwrap_or_else(|| panic!("{text}"));
    let line = &text[start + "this repeats it:\n  ".len()..];
    assert!(line.contains("--events none") && line.contains("--choices "), "{line}");
    for _ in 0..10 {
        let again = Command::new("sh").args(["-c", line]).output().unwrap();
        assert_eq!(again.status.code(), Some(3), "{line}\n{}", stderr(&again));
    }
}

#[test]
fn a_seed_gives_the_same_trace_each_time() {
    let run = |seed: &str| {
        let output = emulate(&["--seed", seed, "--", env!("CARGO_BIN_EXE_ascend-vmm"), "demo", "--size", "2M"]);
        assert!(output.status.success(), "{}", stderr(&output));
        summary(&output)
    };
    let (first, other) = (run("5"), run("6"));
    assert_eq!(first, run("5"));
    assert_ne!(first.split(", trace ").last(), other.split(", trace ").last());
}

#[test]
fn what_is_left_in_the_driver_is_told_and_fails_the_run() {
    // It outlives the program, with a file of the driver open.
    let script = "sleep 60 3<>/dev/davinci_manager & exit 0";
    let output = emulate(&["--seed", "0", "--", "sh", "-c", script]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("still runs"), "{text}");
    assert!(text.contains("after the run: /dev/davinci_manager is open, opened by process "), "{text}");
    let clean = emulate(&["--seed", "0", "--", "true"]);
    assert!(clean.status.success() && !stderr(&clean).contains("after the run"), "{}", stderr(&clean));
}

#[test]
fn ranges_and_events_that_are_none_are_refused() {
    for (arguments, reason) in [
        (&["--seeds", "5..5"][..], "not a range"),
        (&["--seeds", "x"], "not a range"),
        (&["--seed", "1", "--events", "quake"], "not one of kill"),
        (&["--seed", "1", "--seeds", "0..2"], "cannot be used with"),
        (&["--choices", "5"], "--seed"),
    ] {
        let text = refusal(&[&["emulate"], arguments, &["--", "true"]].concat());
        assert!(text.contains(reason), "{arguments:?}: {text}");
    }
}
