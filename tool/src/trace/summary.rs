//! What a trace says as a whole: counts and times of each command, what is not served, what was not
//! released.

use super::decode;
use super::objects::Objects;
use super::recognise::Recogniser;
use super::served::{Served, served};
use crate::terminal::counted;
use ascend_emulator::record::{Record, bytes};
use ascend_ioctl::Generation;
use ascend_ioctl::davinci::NAME_LENGTH;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The calls of one command.
#[derive(Default)]
struct Commands {
    times: Vec<u64>,
    failed: usize,
}

/// Name, calls, failures, and least, median, most and total microseconds of a command.
pub type Row = (String, usize, usize, u64, u64, u64, u64);

/// Counts calls as they come.
pub struct Summary {
    commands: BTreeMap<String, Commands>,
    unserved: BTreeMap<String, (Served, usize, BTreeMap<String, usize>)>,
    /// Modules that could not be opened, with the refusals of each.
    missing: BTreeMap<String, BTreeMap<String, usize>>,
    /// What the program holds.
    pub objects: Objects,
    /// Calls on the driver.
    pub calls: usize,
    /// Calls that failed, without searches for nodes.
    pub failed: usize,
    unfinished: usize,
}

/// Most objects that are listed.
const LISTED: usize = 20;

impl Summary {
    /// No calls yet.
    pub fn new() -> Self {
        Summary {
            commands: BTreeMap::new(),
            unserved: BTreeMap::new(),
            missing: BTreeMap::new(),
            objects: Objects::default(),
            calls: 0,
            failed: 0,
            unfinished: 0,
        }
    }

    /// Adds a call.
    pub fn add(&mut self, record: &Record, module: &str, generation: Generation) {
        self.objects.observe(record, module, generation);
        if matches!(record.call, "end" | "found") {
            return;
        }
        self.calls += 1;
        self.failed += usize::from(decode::has_failed(record));
        let name = decode::name(record, module);
        if record.call == "ioctl" {
            let key = record.in_hex.as_deref().and_then(|text| bytes(text, 64)).map(|argument| {
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| argument[at + byte]));
                (word(8), word(12))
            });
            let who = served(module, record.cmd, key);
            if let (Some("OPEN"), Some(errno), true) = (record.cmd, &record.errno, module != "hdc") {
                let wanted = record.in_hex.as_deref().and_then(|text| bytes(text, NAME_LENGTH)).unwrap_or_default();
                let of_module = self.missing.entry(super::name(&wanted)).or_default();
                *of_module.entry(errno.clone()).or_default() += 1;
            } else if let Some(errno) = record.errno.as_ref().filter(|_| !(who.library && who.emulator)) {
                let (_, count, errors) = self.unserved.entry(name.clone()).or_insert((who, 0, BTreeMap::new()));
                *count += 1;
                *errors.entry(errno.clone()).or_default() += 1;
            }
        }
        if record.unfinished {
            self.unfinished += 1;
            return;
        }
        let command = self.commands.entry(name).or_default();
        command.failed += usize::from(decode::has_failed(record));
        command.times.push(record.us);
    }

    /// Each command with its calls, failures, and least, median, most and total time: the one that
    /// took longest first.
    pub fn rows(&self) -> Vec<Row> {
        let row = |(name, command): (&String, &Commands)| {
            let mut times = command.times.clone();
            times.sort_unstable();
            let [min, median, max] = [0, times.len() / 2, times.len() - 1].map(|at| times[at]);
            let total = times.iter().fold(0u64, |sum, time| sum.saturating_add(*time));
            (name.clone(), times.len(), command.failed, min, median, max, total)
        };
        let mut rows: Vec<Row> = self.commands.iter().map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.6));
        rows
    }

    /// The table of all commands.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<30}{:>8}{:>8}{:>8}{:>9}{:>8}{:>9}\n",
            "command", "calls", "failed", "min µs", "median", "max", "total ms"
        );
        for (name, calls, failed, min, median, max, total) in self.rows() {
            let total = total as f64 / 1000.0;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<30}{calls:>8}{failed:>8}{min:>8}{median:>9}{max:>8}{total:>9.1}");
        }
        if self.unfinished != 0 {
            let _ = writeln!(text, "{} had not returned when the trace ended.", counted(self.unfinished, "call"));
        }
        text
    }

    /// What may stop a program: modules that could not be opened, then refused commands that the
    /// library or the emulator does not serve. What was answered is not listed.
    pub fn unsupported(&self) -> String {
        if self.unserved.is_empty() && self.missing.is_empty() {
            return "Every module and every command of this trace was answered, or is one that the library uses.\n"
                .into();
        }
        let mut text = String::new();
        let counts = |errors: &BTreeMap<String, usize>| {
            errors.iter().map(|(errno, count)| format!("{errno} {count}")).collect::<Vec<_>>().join(", ")
        };
        for (module, errors) in &self.missing {
            let _ = writeln!(text, "module {module} could not be opened: {}", counts(errors));
        }
        if !self.unserved.is_empty() {
            let _ = writeln!(text, "{:<34}{:>8}  library emulator errors", "command", "refused");
        }
        let word = |yes| if yes { "yes" } else { "no" };
        for (name, (who, count, errors)) in &self.unserved {
            let (library, emulator) = (word(who.library), word(who.emulator));
            let line = format!("{name:<34}{count:>8}  {library:<8}{emulator:<9}{}", counts(errors));
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// What no call released; empty if everything was.
    pub fn unreleased(&self) -> String {
        let alive: Vec<_> = self.objects.unreleased().collect();
        if alive.is_empty() {
            return String::new();
        }
        let mut text = match alive.len() {
            1 => "1 object was not released:\n".to_owned(),
            count => format!("{count} objects were not released:\n"),
        };
        for object in alive.iter().take(LISTED) {
            let when = if object.left { "left to the driver" } else { "alive at the end of the trace" };
            let _ = writeln!(text, "  {object}: {when}");
        }
        if alive.len() > LISTED {
            let _ = writeln!(text, "  and {} more", alive.len() - LISTED);
        }
        text
    }

    /// Which driver it was.
    pub fn driver(recogniser: &Recogniser, given: bool) -> String {
        match recogniser.possible() {
            [generation] if given => format!("driver generation {generation}, as given"),
            [generation] => format!("driver generation {generation}, by its answers"),
            several => {
                let names: Vec<String> = several.iter().map(ToString::to_string).collect();
                let (last, rest) =
                    names.split_last().map_or((String::new(), vec![]), |(last, rest)| (last.clone(), rest.to_vec()));
                format!("driver generation {} or {last}: the calls do not tell", rest.join(", "))
            }
        }
    }
}
