//! `--html`: a trace as one page that needs nothing else: memory over time, what was alive when,
//! the slowest and the failed calls.
//!
//! The page draws on canvases from columns of numbers, so that a hundred thousand calls are a few
//! megabytes and are there at once.

use super::decode;
use super::objects::{Object, ObjectKind};
use super::summary::Row;
use ascend_emulator::record::Record;
use ascend_ioctl::Generation;
use serde::Serialize;
use std::collections::HashMap;

/// The page, with a place for the data.
const TEMPLATE: &str = include_str!("page.html");
const PLACE: &str = "/*DATA*/";

/// Calls in the table of the slowest.
const SLOWEST: usize = 30;
/// Calls in the table of those that failed.
const FAILED: usize = 300;
/// Bytes of text lines that a page may have besides those of the tables.
const TEXT: usize = 4 << 20;
/// The latest time on the page, in microseconds. JavaScript's numbers are exact up to here, and no
/// trace takes 285 years: a later time is damage to the file.
const LATEST: u64 = 1 << 53;

/// Numbers texts in the order of their first use.
#[derive(Default)]
struct Words {
    known: HashMap<String, usize>,
    list: Vec<String>,
}

impl Words {
    fn number(&mut self, word: &str) -> usize {
        if let Some(number) = self.known.get(word) {
            return *number;
        }
        self.known.insert(word.to_owned(), self.list.len());
        self.list.push(word.to_owned());
        self.list.len() - 1
    }
}

/// The calls of a trace for the page.
pub struct Page {
    names: Words,
    threads: Words,
    errnos: Words,
    at: Vec<u64>,
    us: Vec<u64>,
    name: Vec<usize>,
    thread: Vec<usize>,
    errno: Vec<usize>,
    pids: Vec<i32>,
    lines: HashMap<usize, String>,
    text: usize,
    /// The slowest calls so far, the fastest of them first.
    slowest: Vec<(u64, usize)>,
    failed: Vec<usize>,
    failures: usize,
    last: u64,
}

#[derive(Serialize)]
struct Data<'a> {
    title: &'a str,
    driver: &'a str,
    names: &'a [String],
    threads: &'a [String],
    errnos: &'a [String],
    /// Differences, since they are short.
    at: Vec<i64>,
    us: &'a [u64],
    name: &'a [usize],
    thread: &'a [usize],
    errno: &'a [usize],
    pids: &'a [i32],
    lines: &'a HashMap<usize, String>,
    slowest: Vec<usize>,
    failed: &'a [usize],
    failures: usize,
    commands: &'a [Row],
    objects: Vec<Drawn<'a>>,
}

/// An object on the page.
#[derive(Serialize)]
struct Drawn<'a> {
    kind: ObjectKind,
    name: &'a str,
    pid: i32,
    device: Option<u32>,
    size: u64,
    resident: u64,
    born: u64,
    died: Option<u64>,
    left: bool,
    line: u64,
}

impl<'a> Drawn<'a> {
    fn of(object: &'a Object) -> Self {
        let Object { kind, pid, device, size, resident, born, died, left, line, ref name, .. } = *object;
        let (born, died) = (born.min(LATEST), died.map(|time| time.min(LATEST)));
        Drawn { kind, name, pid, device, size, resident, born, died, left, line }
    }
}

impl Page {
    /// No calls yet.
    pub fn new() -> Self {
        let mut errnos = Words::default();
        errnos.number("");
        Page {
            names: Words::default(),
            threads: Words::default(),
            errnos,
            at: Vec::new(),
            us: Vec::new(),
            name: Vec::new(),
            thread: Vec::new(),
            errno: Vec::new(),
            pids: Vec::new(),
            lines: HashMap::new(),
            text: 0,
            slowest: Vec::new(),
            failed: Vec::new(),
            failures: 0,
            last: 0,
        }
    }

    /// Adds a call.
    pub fn add(&mut self, record: &Record, module: &str, generation: Generation) {
        let index = self.at.len();
        // A record of the emulator has no times: its calls are drawn one after the other.
        let at = record.at.unwrap_or(self.last).min(LATEST);
        self.last = at.saturating_add(record.us);
        self.at.push(at);
        self.us.push(record.us.min(LATEST));
        self.name.push(self.names.number(&decode::name(record, module)));
        let tid = if record.tid == 0 { record.pid } else { record.tid };
        let thread = match record.pid == tid {
            true => format!("process {}", record.pid),
            false => format!("process {}, thread {tid}", record.pid),
        };
        self.thread.push(self.threads.number(&thread));
        if !self.pids.contains(&record.pid) {
            self.pids.push(record.pid);
        }
        let failed = decode::has_failed(record) || record.unfinished;
        let errno = match &record.errno {
            Some(errno) if failed => errno,
            _ if record.unfinished => "not finished",
            _ => "",
        };
        self.errno.push(self.errnos.number(errno));
        self.failures += usize::from(failed);
        let slow = self.slowest.len() < SLOWEST || self.slowest.first().is_some_and(|(us, _)| record.us > *us);
        let listed = failed && self.failed.len() < FAILED;
        if slow {
            let place = self.slowest.partition_point(|(us, _)| *us < record.us);
            self.slowest.insert(place, (record.us, index));
            if self.slowest.len() > SLOWEST {
                self.slowest.remove(0);
            }
        }
        if listed {
            self.failed.push(index);
        }
        if slow || listed || self.text < TEXT {
            let line = decode::line(record, module, generation);
            self.text += line.len();
            self.lines.insert(index, line.trim_start().to_owned());
        }
    }

    /// The finished page.
    pub fn render(
        &self,
        title: &str,
        driver: &str,
        commands: &[Row],
        objects: &[Object],
    ) -> Result<String, serde_json::Error> {
        let mut previous = 0;
        let differences = self.at.iter().map(|at| {
            let difference = *at as i64 - previous;
            previous = *at as i64;
            difference
        });
        let data = Data {
            title,
            driver,
            names: &self.names.list,
            threads: &self.threads.list,
            errnos: &self.errnos.list,
            at: differences.collect(),
            us: &self.us,
            name: &self.name,
            thread: &self.thread,
            errno: &self.errno,
            pids: &self.pids,
            lines: &self.lines,
            slowest: self.slowest.iter().rev().map(|(_, index)| *index).collect(),
            failed: &self.failed,
            failures: self.failures,
            commands,
            objects: objects.iter().map(Drawn::of).collect(),
        };
        // Nothing in the data may end the script that holds it.
        let json = serde_json::to_string(&data)?.replace("</", "<\\/").replace("<!--", "<\\u0021--");
        let (head, tail) = TEMPLATE.split_once(PLACE).unwrap_or((TEMPLATE, ""));
        Ok([head, &json, tail].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_needs_nothing_from_elsewhere_and_no_text_ends_its_script() {
        let mut page = Page::new();
        let path = Some("</script><script>alert(1)</script><!--".to_owned());
        page.add(&Record { call: "open", path, ..Record::default() }, "", Generation::NEWEST);
        let html = page.render("</title>&<b>", "", &[], &[]).unwrap();
        assert_eq!(html.matches("</script>").count(), 2);
        for outside in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!html.contains(outside), "{outside}");
        }
        assert!(!html.contains(PLACE));
    }

    #[test]
    fn the_slowest_calls_are_kept() {
        let mut page = Page::new();
        for us in (0..1000).map(|index| index * 7919 % 1000) {
            page.add(&Record { call: "ioctl", us, ..Record::default() }, "", Generation::NEWEST);
        }
        let slowest: Vec<u64> = page.slowest.iter().rev().map(|(us, _)| *us).collect();
        assert_eq!(slowest, (970..1000).rev().collect::<Vec<u64>>());
    }
}
