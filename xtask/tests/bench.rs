//! The counter of `bench`, and its command line.

use std::process::{Command, Output};

fn xtask(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).args(arguments).output().unwrap()
}

mod counter {
    use std::process::{Command, Stdio};
    use xtask::bench::counter::{CountError, Gait, Traced};

    /// A process that repeats one system call, stopped at its first mark.
    fn client(pairs: u64) -> Result<Traced, CountError> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        Traced::spawn(
            command.args(["bench-client", "calibration", "--pairs", &pairs.to_string()]).stdout(Stdio::null()),
        )
    }

    /// The counts of the four sections after the warm-up.
    fn count(pairs: u64, gait: Gait) -> [u64; 4] {
        let mut traced = client(pairs).unwrap();
        traced.advance(Gait::Run).unwrap();
        let counts = [(); 4].map(|()| traced.advance(gait).unwrap());
        traced.finish().unwrap();
        counts
    }

    #[test]
    fn system_calls_are_counted_exactly() {
        let [empty, full, again_empty, again_full] = count(25, Gait::Calls);
        assert_eq!(full - empty, 25);
        assert_eq!(again_full - again_empty, 25);
    }

    #[test]
    fn instructions_are_the_same_each_time_and_grow_with_the_work() {
        let [empty, ten, again_empty, again_ten] = count(10, Gait::Steps);
        assert_eq!((empty, ten), (again_empty, again_ten));
        let [also_empty, twenty, ..] = count(20, Gait::Steps);
        assert_eq!(twenty - also_empty, 2 * (ten - empty));
        assert!(ten - empty >= 10, "a system call is at least one instruction");
    }

    #[test]
    fn a_process_that_ends_before_its_mark_is_an_error() {
        let ended = Traced::spawn(&mut Command::new("true"));
        assert!(matches!(ended, Err(CountError::Ended(_))), "{ended:?}");
    }
}

#[test]
fn wrong_arguments_get_a_sentence_and_exit_2() {
    let output = xtask(&["bench", "--jsno"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--jsno"));
}
