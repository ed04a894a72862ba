//! `ascend-vmm demo`: two processes share memory of an NPU, in under a minute.
//!
//! The exporter creates memory and exports it. The importer reports its process id, is put on the
//! trust list, receives a ticket, and then imports, maps, reads and changes the memory. The
//! exporter sees the change. Only lines of text pass between them. Both are this program, started
//! again; with `--devices` there are more importers.

mod exporter;
mod importer;

pub use exporter::Exporter;
pub use importer::Importer;

use crate::session_options::SessionOptions;
use crate::terminal::{self, counted, devices, transfer};
use ascend_emulator::{Config, Emulator};
use ascend_vmm::Bytes;
use ascend_vmm::Mapping;
use ascend_vmm::discovery::{self, Options};
use std::error::Error;
use std::io::IsTerminal;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Options of `demo`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ascend-vmm demo\n  ascend-vmm demo --emulate --size 256M --devices 2")]
pub struct Demo {
    /// Use the emulated driver even if this host has NPUs.
    #[arg(long)]
    emulate: bool,
    /// How much memory is shared: a multiple of 2 MiB, in bytes or with a unit.
    #[arg(long, default_value = "64M", value_parser = size)]
    size: u64,
    /// How many NPUs are used. The memory is on the first; a process on each other one imports it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    devices: u32,
    #[command(flatten)]
    session: SessionOptions,
}

fn size(text: &str) -> Result<u64, String> {
    const PAGE: u64 = 2 << 20;
    match text.parse::<Bytes>().map_err(|error| error.to_string())?.0 {
        size if size == 0 || size % PAGE != 0 => Err("the size must be a multiple of 2 MiB".into()),
        size if size > 16 << 30 => Err("the size must be at most 16 GiB".into()),
        size => Ok(size),
    }
}

impl Demo {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let survey = (!self.emulate).then(|| discovery::survey(&Options::default()));
        let npus = survey.iter().flat_map(|survey| &survey.devices);
        let mut usable: Vec<u32> = npus.filter(|npu| npu.is_usable()).map(|npu| npu.logical.0).collect();
        let wanted = self.devices as usize;
        if !usable.is_empty() {
            let found = counted(usable.len(), "usable NPU");
            if usable.len() < wanted {
                return crate::impossible(format!(
                    "--devices asks for {}, but this host has {found}; `probe` says why",
                    counted(wanted, "NPU")
                ));
            }
            usable.truncate(wanted);
            crate::outln!("This host has {found}: the demo runs on {}.", devices(&usable));
            return match self.exporter(&usable) {
                Ok(mut exporter) => end(exporter.status()),
                Err(error) => crate::impossible(error),
            };
        }
        let reason = match survey.as_ref().and_then(|survey| survey.findings.first()) {
            Some(finding) => format!("No NPU can be used here ({finding})"),
            None if self.emulate => "--emulate was given".to_owned(),
            None => "No NPU can be used here".to_owned(),
        };
        let sentence = format!("{reason}: this runs on an EMULATED driver. Its NPU memory is memory of this machine.");
        if std::io::stdout().is_terminal() {
            terminal::wrap(&sentence, terminal::width(), "", "").iter().for_each(|line| crate::outln!("{line}"));
        } else {
            crate::outln!("{sentence}");
        }
        let config = Config { devices: self.devices, hbm: (4 * self.size).max(8 << 30), ..Config::default() };
        let emulator = match Emulator::start(config) {
            Ok(emulator) => emulator,
            Err(unavailable) => return crate::impossible(unavailable),
        };
        let all: Vec<u32> = (0..self.devices).collect();
        let exporter = self.exporter(&all);
        let status = exporter.and_then(|mut exporter| emulator.spawn(&mut exporter)).and_then(|mut child| child.wait());
        if let Some(trap) = emulator.traps().first() {
            crate::errln!("error: a real host would have crashed: {trap}");
            return ExitCode::FAILURE;
        }
        let left = emulator.state();
        if !left.is_empty() {
            crate::errln!("error: something is left in the driver: {left:?}");
            return ExitCode::FAILURE;
        }
        crate::outln!("Nothing is left in the driver: no file, no memory, no device process.");
        end(status)
    }

    /// The command that starts the exporter on the first of these devices.
    fn exporter(&self, devices: &[u32]) -> std::io::Result<Command> {
        let mut exporter = crate::second_process::this_program()?;
        exporter.arg("demo-exporter").arg(format!("--size={}", self.size)).arg(self.session.argument());
        exporter.args(devices.iter().map(u32::to_string)).stdin(Stdio::null());
        Ok(exporter)
    }
}

fn end(status: std::io::Result<std::process::ExitStatus>) -> ExitCode {
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            crate::errln!("error: the exporter ended with {status}");
            ExitCode::FAILURE
        }
        Err(error) => crate::impossible(error),
    }
}

type DemoError = Box<dyn Error>;

/// Bytes that are copied at once: small enough for the progress bar to move.
const CHUNK: u64 = 4 << 20;

/// Bytes of one pattern. Each starts with its number.
const PAGE: u64 = 4096;

/// What the memory holds at `offset`, a multiple of [`PAGE`], after this many changes. Every change
/// changes every byte.
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

/// Writes the contents after this many changes. Returns how long the copies took.
fn write(who: &str, mapping: &Mapping, changes: u32) -> Result<Duration, DemoError> {
    let bar = transfer(&format!("{who} writes"), mapping.size());
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

/// Reads the memory and compares it with the contents after this many changes. Returns how long the
/// copies took.
fn check(who: &str, mapping: &Mapping, changes: u32) -> Result<Duration, DemoError> {
    let bar = transfer(&format!("{who} reads"), mapping.size());
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
    fn impossible_sizes_are_refused() {
        assert_eq!(size("64M"), Ok(64 << 20));
        for text in ["0", "1", "3M", "17G", "x", ""] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
