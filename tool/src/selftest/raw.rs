//! `selftest --raw`: the rules of the kernel driver, checked with system calls alone
//! (docs/emulator.md).
//!
//! The library is not used, not even to find the devices. The suite runs in processes of its own.

use super::report::{Case, Outcome, Report};
use ascend_conformance::Options;
use std::collections::HashMap;

/// Checks every rule; `print` is called with each result. Returns whether there is a device.
pub fn run(report: &mut Report, exhaustion: bool, mut print: impl FnMut(&Case)) -> bool {
    let options = Options { exhaustion, patience: exhaustion, ..Options::default() };
    let mut add = |case: Case| {
        print(&case);
        report.add(case);
    };
    // Rules prepare themselves in the same functions: what fails there, such as opening a device,
    // is the failure of the first, and keeps the others from being checked.
    let mut first_to_fail: HashMap<String, &'static str> = HashMap::new();
    let result = ascend_conformance::run(&options, &mut |checked| {
        let rule = checked.rule;
        let outcome = match &checked.outcome {
            ascend_conformance::Outcome::Passed => Outcome::Passed(None),
            ascend_conformance::Outcome::Skipped(reason) => Outcome::Skipped(reason.clone()),
            ascend_conformance::Outcome::Failed(text) => match first_to_fail.get(text) {
                Some(first) => Outcome::Skipped(format!("it ended where `{}` failed", first.replace('_', " "))),
                None => {
                    first_to_fail.insert(text.clone(), rule.name);
                    Outcome::Failed(format!("{text}\ndecided by {}; {}", rule.decided_by, rule.evidence))
                }
            },
        };
        add(Case::new("rules", &rule.name.replace('_', " "), outcome, checked.time));
    });
    match result {
        Ok(summary) => {
            if summary.host.is_none() {
                let reason = "there is no driver, or it has no device for this process; `probe` says why";
                add(Case::new(
                    "host",
                    "there is a device to check",
                    Outcome::Failed(reason.into()),
                    Default::default(),
                ));
            }
            report.driver = summary.generation.map(|generation| generation.to_string());
            summary.host.is_some()
        }
        Err(reason) => {
            add(Case::new("host", "the driver can be examined", Outcome::Failed(reason), Default::default()));
            true
        }
    }
}
