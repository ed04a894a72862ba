//! `cargo xtask bench`: its counter and its command line.

#[path = "../../tool/tests/support/mod.rs"]
mod support;

// The other half of it is for the process that is counted.
#[allow(dead_code)]
#[path = "../src/bench/counter.rs"]
mod counter;

use counter::steps_end;
use support::{document, refusal, run_program};

mod counts {
    use super::counter::{CountError, Mode, Traced, steps_end};
    use super::support::PROGRAM;
    use std::process::{Command, Stdio};

    /// A process that repeats one system call, stopped at its first mark.
    fn client(pairs: u64) -> Result<Traced, CountError> {
        let mut command = Command::new(PROGRAM);
        command.args(["bench-client", "calibration", "--pairs", &pairs.to_string()]).stdout(Stdio::null());
        Traced::spawn(&mut command)
    }

    /// The counts of an empty and a full section, twice.
    fn count(pairs: u64, mode: Mode) -> [u64; 4] {
        let mut traced = client(pairs).unwrap();
        let counts = std::array::from_fn(|_| {
            traced.advance(Mode::Run).unwrap();
            traced.advance(mode).unwrap().number
        });
        traced.finish().unwrap();
        counts
    }

    #[test]
    fn system_calls_are_counted_exactly() {
        let [empty, full, again_empty, again_full] = count(25, Mode::Calls);
        assert_eq!(full - empty, 25);
        assert_eq!(again_full - again_empty, 25);
    }

    #[test]
    fn instructions_are_the_same_each_time_and_grow_with_the_work() {
        if !steps_end() {
            let refused = client(1).unwrap().advance(Mode::Steps);
            assert!(matches!(refused, Err(CountError::NoAtomics)), "{refused:?}");
            return;
        }
        let [empty, ten, again_empty, again_ten] = count(10, Mode::Steps);
        assert_eq!((empty, ten), (again_empty, again_ten));
        let [also_empty, twenty, ..] = count(20, Mode::Steps);
        assert_eq!(twenty - also_empty, 2 * (ten - empty));
        assert!(ten - empty >= 10, "a system call is at least one instruction");
    }

    #[test]
    fn an_unexpected_mark_is_an_error() {
        assert!(client(1).unwrap().finish().is_err());
    }

    #[test]
    fn a_process_that_ends_before_its_mark_is_an_error() {
        let ended = Traced::spawn(&mut Command::new("true"));
        assert!(matches!(ended, Err(CountError::Ended(_))), "{ended:?}");
    }
}

#[test]
fn without_tracing_the_time_is_still_measured() {
    let output = run_program(&["bench-client", "calibration", "--untraced", "--timed", "1000"]);
    assert!(output.status.success());
    let own: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(own["nanoseconds"].as_f64().unwrap() > 0.0, "{own}");
}

#[test]
fn wrong_arguments_are_refused_with_exit_2() {
    assert!(refusal(&["bench", "--jsno"]).contains("--jsno"));
}

#[test]
fn the_figures_fit_their_schema_and_each_operation_is_one_system_call() {
    // A debug build misses its limits of instructions, which must be reported as such; the numbers
    // of system calls are those of a release build.
    let output = run_program(&["bench", "--debug", "--json"]);
    let document = document(&output, "bench");
    let figures = document["figures"].as_array().unwrap();
    // Of instructions there are none on a CPU without the atomics that single steps need.
    let measured = |figure: &serde_json::Value| figure["verdict"] != "not measured";
    let expected = |figure: &serde_json::Value| figure["unit"] != "instructions" || steps_end();
    assert!(figures.iter().all(|figure| measured(figure) == expected(figure)), "{document:#}");
    let missed = figures.iter().filter(|figure| figure["verdict"] == "missed").count();
    assert_eq!(document["missed"], missed);
    assert_eq!(
        output.status.code(),
        Some(if missed > 0 {
            1
        } else if steps_end() {
            0
        } else {
            2
        })
    );
    for (name, calls) in [
        ("create + release", 2.0),
        ("reserve + free, 2-16 MiB", 2.0),
        ("map + unmap", 2.0),
        ("export", 1.0),
        ("trust", 1.0),
        ("import + release, by ticket", 2.0),
        ("create, reserve, map, unmap, free, release", 6.0),
        ("bring-up of the first device", 13.0),
    ] {
        let of = |unit: &str| figures.iter().find(|figure| figure["name"] == name && figure["unit"] == unit);
        assert_eq!(of("system calls").unwrap()["measured"], calls, "{name}");
        if let Some(ioctls) = of("ioctls") {
            assert_eq!(ioctls["measured"], calls, "{name}");
        }
    }
}
