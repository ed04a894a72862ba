//! What a replay found: answers that differ, facts of the machine that differ, and what could not
//! be played.

use crate::terminal::counted;
use ascend_emulator::Config;
use ascend_emulator::config::Attachment;
use ascend_vmm::Bytes;
use std::collections::BTreeMap;

/// Lines that are named for one reason.
const NAMED: usize = 8;

/// The findings of a replay.
#[derive(Default)]
pub struct ReplayReport {
    /// Calls that were played.
    pub played: usize,
    differences: Vec<String>,
    /// By what is described, what the trace has and what the model has.
    machine: BTreeMap<(String, String, String), Vec<usize>>,
    skipped: BTreeMap<&'static str, Vec<usize>>,
}

impl ReplayReport {
    /// A call returned something else.
    pub fn behaviour(&mut self, line: usize, call: String, recorded: &str, emulated: &str) {
        self.differences.push(format!("line {line}: {call} returned {recorded}; emulated: {emulated}"));
    }

    /// A field of an answer is another one.
    pub fn field(&mut self, line: usize, call: String, field: &str, recorded: &str, emulated: &str) {
        self.differences.push(format!("line {line}: {call} answered {field} {recorded}; emulated: {emulated}"));
    }

    /// A fact of the host or the device is another one.
    pub fn machine(&mut self, line: usize, what: String, recorded: String, emulated: String) {
        let lines = self.machine.entry((what, recorded, emulated)).or_default();
        // A call may be played twice.
        if lines.last() != Some(&line) {
            lines.push(line);
        }
    }

    /// A call could not be played.
    pub fn skip(&mut self, line: usize, why: &'static str) {
        self.skipped.entry(why).or_default().push(line);
    }

    /// How many differences of the driver were found.
    pub fn found(&self) -> usize {
        self.differences.len()
    }

    /// Takes back the differences from `first` on.
    pub fn take_from(&mut self, first: usize) -> Vec<String> {
        self.differences.split_off(first)
    }

    /// Adds differences that were taken back.
    pub fn put_back(&mut self, differences: Vec<String>) {
        self.differences.extend(differences);
    }

    /// Whether nothing differs.
    pub fn is_clean(&self) -> bool {
        self.differences.is_empty() && self.machine.is_empty()
    }

    /// Prints all of it.
    pub fn print(&self, config: &Config, given: bool) {
        let attachment = match config.attachment {
            Attachment::Pcie => "PCI Express",
            Attachment::Hccs => "HCCS",
        };
        outln!(
            "{} replayed on the emulated driver, generation {}{}.",
            counted(self.played, "call"),
            config.generation,
            if given { " as given" } else { " as in the trace" },
        );
        outln!(
            "The emulated host has {} on {attachment}, each with {} of memory.",
            counted(config.devices as usize, "device"),
            Bytes(config.hbm).rounded()
        );
        if !self.differences.is_empty() {
            outln!("\n{} (later ones may follow from earlier ones):", counted(self.differences.len(), "difference"));
            for difference in &self.differences {
                outln!("  {difference}");
            }
        }
        if !self.machine.is_empty() {
            outln!("\n{} of the machine, not of the driver:", counted(self.machine.len(), "difference"));
            for ((what, recorded, emulated), lines) in &self.machine {
                outln!("  {what} is {recorded}; emulated: {emulated} ({})", list(lines));
            }
        }
        if !self.skipped.is_empty() {
            outln!("\nNot replayed:");
            for (why, lines) in &self.skipped {
                outln!("  {}: {why} ({})", counted(lines.len(), "call"), list(lines));
            }
        }
        if self.is_clean() {
            outln!("No answer differs.");
        }
    }
}

/// The lines of a finding.
fn list(lines: &[usize]) -> String {
    let named: Vec<String> = lines.iter().take(NAMED).map(ToString::to_string).collect();
    let word = if lines.len() == 1 { "line" } else { "lines" };
    let more = if lines.len() > NAMED { format!(" and {} more", lines.len() - NAMED) } else { String::new() };
    format!("{word} {}{more}", named.join(", "))
}
