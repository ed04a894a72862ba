//! `cargo xtask demo`: the main job in under a minute. Two processes share memory of an NPU.
//!
//! One process makes memory and exports it; the other says who it is, is put on the trust list, gets a ticket, imports, maps, reads and changes the memory; the
//! first sees the change. Only a line of text goes between them. Both are this program, started again; with `--devices` there are more of the second kind.

mod exporter;
mod importer;

pub use exporter::Exporter;
pub use importer::Importer;

use ascend_emulator::{Config, Emulator};
use ascend_vmm::Mapping;
use ascend_vmm::discovery::{self, Options};
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Options of `demo`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask demo\n  cargo xtask demo --emulate --size 256M --devices 2")]
pub struct Demo {
    /// Use the emulated driver even if this host has NPUs.
    #[arg(long)]
    emulate: bool,
    /// How much memory is shared, a multiple of 2 MiB: in bytes or with a unit.
    #[arg(long, default_value = "64M", value_parser = size)]
    size: u64,
    /// How many NPUs take part: the memory is on the first; with more, a process on each of the others shares it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    devices: u32,
}

fn size(text: &str) -> Result<u64, String> {
    const PAGE: u64 = 2 << 20;
    match crate::emulate::size(text)? {
        size if size == 0 || size % PAGE != 0 => Err("physical memory comes in multiples of 2 MiB".into()),
        size if size > 16 << 30 => Err("for a demonstration, 16 GiB are enough".into()),
        size => Ok(size),
    }
}

impl Demo {
    /// Runs the command; the exit status is its answer.
    pub fn run(self) -> ExitCode {
        let found = if self.emulate { None } else { Some(discovery::survey(&Options::default())) };
        let working = found.as_ref().map_or(0, |survey| survey.devices.iter().filter(|npu| npu.is_usable()).count());
        let devices = self.devices.to_string();
        let size = self.size.to_string();
        let arguments = ["demo-exporter", "--size", &size, "--devices", &devices];
        let program = match std::env::current_exe() {
            Ok(program) => program,
            Err(error) => return crate::impossible(format!("this program cannot find itself: {error}")),
        };
        let mut exporter = Command::new(program);
        exporter.args(arguments).stdin(Stdio::null());
        if working > 0 {
            if working < self.devices as usize {
                return crate::impossible(format!("this host has {working} NPUs that work; see cargo xtask probe"));
            }
            crate::outln!("This host has {working} NPUs that work: the demonstration uses them.");
            return end(exporter.status());
        }
        let reason = match found.as_ref().and_then(|survey| survey.findings.first()) {
            Some(finding) => format!("No NPU can be used here ({finding})"),
            None if self.emulate => "As asked for".to_owned(),
            None => "No NPU can be used here".to_owned(),
        };
        crate::outln!("{reason}: this runs on an EMULATED driver, whose NPU memory is this machine's.");
        let config = Config { devices: self.devices, hbm: (4 * self.size).max(8 << 30), ..Config::default() };
        let emulator = match Emulator::start(config) {
            Ok(emulator) => emulator,
            Err(unavailable) => return crate::impossible(unavailable),
        };
        let status = emulator.spawn(&mut exporter).and_then(|mut child| child.wait());
        if !emulator.traps().is_empty() {
            eprintln!("error: a real host would have crashed: {}", emulator.traps()[0]);
            return ExitCode::FAILURE;
        }
        let left = emulator.state();
        if left.is_empty() {
            crate::outln!("The driver has nothing of them any more: no file, no memory, no device process.");
        } else {
            eprintln!("error: something is left in the driver: {left:?}");
            return ExitCode::FAILURE;
        }
        end(status)
    }
}

fn end(status: std::io::Result<std::process::ExitStatus>) -> ExitCode {
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("error: the demonstration ended with {status}");
            ExitCode::FAILURE
        }
        Err(error) => crate::impossible(error),
    }
}

type Failure = Box<dyn Error>;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes that are copied at once, so that a bar can move.
const CHUNK: u64 = 4 << 20;

/// Bytes with one pattern, but for the page's number in front.
const PAGE: u64 = 4096;

/// What belongs at `offset`, a multiple of [`PAGE`], after so many changes. Every change changes every byte.
fn contents(offset: u64, length: u64, changes: u32) -> Vec<u8> {
    let changed = |byte: u8| byte.wrapping_add(changes as u8);
    let mut page: Vec<u8> = (0..PAGE).map(|position| changed((position ^ (position >> 8)) as u8)).collect();
    let mut bytes = Vec::with_capacity((length + PAGE) as usize);
    while (bytes.len() as u64) < length {
        let number = (offset + bytes.len() as u64) / PAGE;
        page[..8].copy_from_slice(&number.to_le_bytes().map(changed));
        bytes.extend_from_slice(&page);
    }
    bytes.truncate(length as usize);
    bytes
}

/// Writes what belongs there after so many changes, and tells how long the copies took.
fn write(who: &str, mapping: &Mapping, changes: u32) -> Result<Duration, Failure> {
    let bar = bar(who, "writes", mapping.size());
    let mut time = Duration::ZERO;
    for (offset, length) in chunks(mapping.size()) {
        let bytes = contents(offset, length, changes);
        let start = Instant::now();
        mapping.write(offset, &bytes)?;
        time += start.elapsed();
        bar.inc(length);
    }
    bar.finish_and_clear();
    Ok(time)
}

/// Reads, and compares with what belongs there after so many changes; tells how long the copies took.
fn check(who: &str, mapping: &Mapping, changes: u32) -> Result<Duration, Failure> {
    let bar = bar(who, "reads", mapping.size());
    let mut time = Duration::ZERO;
    for (offset, length) in chunks(mapping.size()) {
        let mut bytes = vec![0; length as usize];
        let start = Instant::now();
        mapping.read(offset, &mut bytes)?;
        time += start.elapsed();
        let wanted = contents(offset, length, changes);
        if bytes != wanted {
            let at = bytes.iter().zip(&wanted).position(|(got, wanted)| got != wanted).unwrap_or_default();
            let (got, wanted) = (bytes[at], wanted[at]);
            return Err(format!("byte {:#x} is {got:#04x} and should be {wanted:#04x}", offset + at as u64).into());
        }
        bar.inc(length);
    }
    bar.finish_and_clear();
    Ok(time)
}

fn chunks(size: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..size.div_ceil(CHUNK)).map(move |index| (index * CHUNK, CHUNK.min(size - index * CHUNK)))
}

/// A bar on the standard error, if that is a terminal.
fn bar(who: &str, what: &str, size: u64) -> ProgressBar {
    let bar = ProgressBar::new(size);
    if let Ok(style) = ProgressStyle::with_template("    {msg:20} {wide_bar} {bytes}/{total_bytes}") {
        bar.set_style(style);
    }
    bar.set_message(format!("{who} {what}"));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        for size in [2 << 20, 4 << 20, 6 << 20, 64 << 20] {
            let mut next = 0;
            for (offset, length) in chunks(size) {
                assert_eq!(offset, next);
                assert!(length > 0);
                next += length;
            }
            assert_eq!(next, size);
        }
    }

    #[test]
    fn every_change_changes_every_byte_and_every_page_is_different() {
        let (before, after) = (contents(CHUNK, 3 * PAGE, 0), contents(CHUNK, 3 * PAGE, 1));
        assert!(before.iter().zip(&after).all(|(before, after)| before != after));
        let mut pages: Vec<&[u8]> = before.chunks(PAGE as usize).collect();
        pages.dedup();
        assert_eq!(pages.len(), 3);
        assert_eq!(contents(0, 2 * CHUNK, 0)[CHUNK as usize..][..before.len()], before);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert_eq!(size("64M"), Ok(64 << 20));
        for text in ["0", "1", "3M", "17G", "x", ""] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
