//! `selftest --random`: calls that a number decides (docs/emulator.md).
//!
//! The program passes if its processes live to the end. Whether the answers are right is for
//! `emulate --replay` to say.

use super::report::{Case, Outcome, Report};
use crate::terminal::counted;
use ascend_conformance::random::Program;
use std::time::Instant;

/// Plays the program; `print` is called with the result. Returns whether there is a device.
pub fn run(report: &mut Report, program: &Program, mut print: impl FnMut(&Case)) -> bool {
    let start = Instant::now();
    let played = program.play();
    let has_device = !matches!(played, Ok(None));
    let outcome = match played {
        Ok(Some(played)) => {
            report.driver = Some(played.generation.to_string());
            Outcome::Passed(Some(played.sentence))
        }
        Ok(None) => {
            Outcome::Failed("there is no driver, or it has no device for this process; `probe` says why".into())
        }
        Err(reason) => Outcome::Failed(reason),
    };
    let name = format!("{} of seed {} are answered", counted(program.calls as usize, "call"), program.seed);
    let case = Case::new("random", &name, outcome, start.elapsed());
    print(&case);
    report.add(case);
    has_device
}
