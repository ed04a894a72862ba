//! The results of a test run: for people, for programs (docs/hosts.md) and for CI servers (JUnit).

use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// The outcome of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "outcome", content = "detail")]
pub enum Outcome {
    /// It passed; with a remark, if there is one.
    Passed(Option<String>),
    /// It failed: the full error.
    Failed(String),
    /// It did not run: the reason.
    Skipped(String),
}

/// One check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Case {
    /// The part of the suite: `host`, `device 0`, `rules`.
    pub group: String,
    /// What is checked, as a sentence.
    pub name: String,
    /// Its outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How long it took.
    pub seconds: f64,
}

impl Case {
    /// A check that took so long.
    pub fn new(group: &str, name: &str, outcome: Outcome, took: Duration) -> Case {
        Case { group: group.to_owned(), name: name.to_owned(), outcome, seconds: took.as_secs_f64() }
    }

    /// The line for people. A failure has more lines.
    pub fn line(&self) -> String {
        let name = format!("{}: {}", self.group, self.name);
        match &self.outcome {
            Outcome::Passed(None) => format!("ok    {name}"),
            Outcome::Passed(Some(remark)) => format!("ok    {name} ({remark})"),
            Outcome::Failed(error) => format!("FAIL  {name}\n        {}", error.replace('\n', "\n        ")),
            Outcome::Skipped(reason) => format!("skip  {name}: {reason}"),
        }
    }
}

/// Numbers of checks by outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CaseCounts {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
    /// Skipped.
    pub skipped: usize,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Version of this document's schema.
    pub version: u32,
    /// The suite: `library`, `raw` or `device-process`.
    pub suite: String,
    /// The driver generation, if it is known.
    pub driver: Option<String>,
    /// The checks in the order in which they ran.
    pub cases: Vec<Case>,
    /// Numbers of checks by outcome.
    pub summary: CaseCounts,
}

impl Report {
    /// An empty report.
    pub fn new(suite: &str) -> Report {
        Report { version: 1, suite: suite.to_owned(), driver: None, cases: Vec::new(), summary: CaseCounts::default() }
    }

    /// Adds a check.
    pub fn add(&mut self, case: Case) {
        match case.outcome {
            Outcome::Passed(_) => self.summary.passed += 1,
            Outcome::Failed(_) => self.summary.failed += 1,
            Outcome::Skipped(_) => self.summary.skipped += 1,
        }
        self.cases.push(case);
    }

    /// The last line for people.
    pub fn conclusion(&self) -> String {
        let CaseCounts { passed, failed, skipped } = self.summary;
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    /// The report as JUnit XML.
    pub fn junit(&self) -> String {
        let CaseCounts { failed, skipped, .. } = self.summary;
        let (tests, time) = (self.cases.len(), self.cases.iter().map(|case| case.seconds).sum::<f64>());
        let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        // Writing to a string cannot fail.
        let _ = writeln!(
            xml,
            "<testsuite name=\"ascend-vmm {}\" tests=\"{tests}\" failures=\"{failed}\" errors=\"0\" \
             skipped=\"{skipped}\" time=\"{time:.3}\">",
            escape(&self.suite)
        );
        for case in &self.cases {
            let (group, name, seconds) = (escape(&case.group), escape(&case.name), case.seconds);
            let _ = write!(xml, "  <testcase classname=\"{group}\" name=\"{name}\" time=\"{seconds:.3}\"");
            let _ = match &case.outcome {
                Outcome::Passed(None) => writeln!(xml, "/>"),
                Outcome::Passed(Some(remark)) => {
                    writeln!(xml, "><system-out>{}</system-out></testcase>", escape(remark))
                }
                Outcome::Failed(error) => {
                    let first = error.lines().next().unwrap_or_default();
                    writeln!(xml, "><failure message=\"{}\">{}</failure></testcase>", escape(first), escape(error))
                }
                Outcome::Skipped(reason) => writeln!(xml, "><skipped message=\"{}\"/></testcase>", escape(reason)),
            };
        }
        xml.push_str("</testsuite>\n");
        xml
    }
}

/// Escapes text for XML, inside and outside of attributes. Control characters, which XML 1.0 does
/// not allow, become spaces.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("library");
        let second = Duration::from_secs(1);
        report.add(Case::new("device 0", "memory can be created", Outcome::Passed(Some("2 MiB".into())), second));
        report.add(Case::new(
            "device 0",
            "it can be shared",
            Outcome::Failed("EACCES: <no>\n\"why\" & how".into()),
            second,
        ));
        report.add(Case::new("device 1", "peers see it", Outcome::Skipped("one device".into()), second));
        report
    }

    #[test]
    fn a_report_counts_its_cases() {
        assert_eq!(report().conclusion(), "1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn junit_has_every_case_and_escapes_the_errors() {
        let xml = report().junit();
        assert_eq!(xml.matches("<testcase ").count(), 3);
        assert!(xml.contains("tests=\"3\" failures=\"1\" errors=\"0\" skipped=\"1\" time=\"3.000\""), "{xml}");
        assert!(xml.contains("EACCES: &lt;no&gt;&#10;&quot;why&quot; &amp; how"), "{xml}");
        assert!(xml.contains("<skipped message=\"one device\"/>"), "{xml}");
    }

    #[test]
    fn every_outcome_has_the_same_fields_in_json() {
        let json = serde_json::to_value(report()).unwrap();
        for (index, outcome) in ["passed", "failed", "skipped"].into_iter().enumerate() {
            let case = &json["cases"][index];
            assert_eq!(case["outcome"], outcome);
            assert!(case.get("detail").is_some(), "{case}");
        }
    }
}
