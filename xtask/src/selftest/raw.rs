//! `selftest --raw`: the kernel driver's rules, asked by system calls alone (docs/conformance.md).
//!
//! Neither the library nor its view of the host is used: the suite looks at the driver itself, in processes of its own.

use super::report::{Case, Outcome, Report};
use ascend_conformance::Options;

/// Asks every rule; `tell` hears of each as it is done. Gives whether there is a device.
pub fn run(report: &mut Report, exhaustion: bool, mut tell: impl FnMut(&Case)) -> bool {
    let options = Options { exhaustion, patience: exhaustion, ..Options::default() };
    let mut add = |case: Case| {
        tell(&case);
        report.add(case);
    };
    let result = ascend_conformance::run(&options, &mut |asked| {
        let rule = asked.rule;
        let outcome = match &asked.outcome {
            ascend_conformance::Outcome::Passed => Outcome::Passed(None),
            ascend_conformance::Outcome::Skipped(reason) => Outcome::Skipped(reason.clone()),
            ascend_conformance::Outcome::Failed(text) => {
                Outcome::Failed(format!("{text}\ndecided by {}; {}", rule.decided_by, rule.evidence))
            }
        };
        add(Case::new("rules", &rule.name.replace('_', " "), outcome, asked.time));
    });
    match result {
        Ok(summary) => {
            if summary.host.is_none() {
                let reason = "there is no driver, or no device that it gives to this process; `probe` says why";
                add(Case::new("host", "there is a device to ask", Outcome::Failed(reason.into()), Default::default()));
            }
            report.driver = summary.generation.map(|generation| generation.to_string());
            summary.host.is_some()
        }
        Err(reason) => {
            add(Case::new("host", "the driver can be looked at", Outcome::Failed(reason), Default::default()));
            true
        }
    }
}
