//! Recording of calls, one JSON object per line.
//!
//! A record has what the caller passed and what the model returned. Pointers change from run to
//! run. Bytes are in hexadecimal without trailing zeros, since argument structs are mostly empty.

use ascend_ioctl::{Command, Generation, command, davinci, devmng, hdc, svm, uda, urd};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A call of a client and its result.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Record {
    /// `open`, `ioctl`, `mmap`, `munmap`, `mprotect`, `madvise`, `mremap`, `mbind` or `close`.
    pub call: &'static str,
    /// The process; 0 for a close, since the process that dropped the last reference is not known.
    #[serde(skip_serializing_if = "is_zero")]
    pub pid: i32,
    /// The thread.
    #[serde(skip_serializing_if = "is_zero")]
    pub tid: i32,
    /// The file, numbered in the order of opening.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<u64>,
    /// Path of an open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Flags of an open or mmap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<String>,
    /// The ioctl's name, if the module that the file is bound to has one with this number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<&'static str>,
    /// The ioctl's request value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The argument before the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_hex: Option<String>,
    /// The argument after the call, if it was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_hex: Option<String>,
    /// What an ioctl wrote into the caller's memory: its answer, wherever it lies.
    #[serde(skip)]
    pub answer: Vec<u8>,
    /// Address of a mapping, or of a change of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// Its length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub len: Option<String>,
    /// Protection of a mapping, advice of a madvise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arg: Option<i64>,
    /// What the call returned; -1 with `errno`.
    pub ret: i64,
    /// The errno's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// Microseconds from the arrival of the call to its answer, sleep included.
    pub us: u64,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// The command of a request in a module (as named by [`crate::driver::Driver::module`]).
pub(crate) fn command(generation: Generation, module: &str, request: u32) -> Option<&'static Command> {
    let number = command::number(request);
    let commands = match module {
        _ if command::magic(request) == davinci::MAGIC && module != "hdc" => davinci::COMMANDS,
        "SVM" => return generation.svm_by_number(number).map(|svm| &svm.command),
        "uda" => uda::COMMANDS,
        "URD" => urd::COMMANDS,
        "DEVMNG" => devmng::COMMANDS,
        "hdc" => hdc::COMMANDS,
        _ => return None,
    };
    commands.iter().find(|command| command.number == number)
}

/// The names of all commands of a generation.
pub(crate) fn names(generation: Generation) -> impl Iterator<Item = &'static str> {
    let svm = generation.svm_commands().map(|svm| svm.command.name);
    let others =
        [davinci::COMMANDS, uda::COMMANDS, urd::COMMANDS, devmng::COMMANDS, hdc::COMMANDS].into_iter().flatten();
    others.map(|command| command.name).chain(svm)
}

/// Size of a command's argument: the module's common argument, or the command's own struct.
pub(crate) fn argument_size(module: &str, command: &Command) -> usize {
    match module {
        _ if command.magic == davinci::MAGIC => size_of::<davinci::OpenArg>(),
        "SVM" => size_of::<svm::Arg>(),
        "hdc" => size_of::<hdc::Arg>(),
        _ => command.layout().map_or(0, |layout| layout.size),
    }
}

/// Bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes[..end].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes and keeps records.
#[derive(Default)]
pub(crate) struct Recorder {
    file: Option<BufWriter<File>>,
    kept: Option<Vec<Record>>,
}

impl Recorder {
    /// Writes records to a new file from now on.
    pub fn write_to(&mut self, path: &Path) -> io::Result<()> {
        self.file = Some(BufWriter::new(File::create(path)?));
        Ok(())
    }

    /// Keeps records from now on.
    pub fn keep(&mut self) {
        self.kept.get_or_insert_default();
    }

    /// The kept records.
    pub fn kept(&self) -> Vec<Record> {
        self.kept.clone().unwrap_or_default()
    }

    /// Whether records are written or kept.
    pub fn is_on(&self) -> bool {
        self.file.is_some() || self.kept.is_some()
    }

    /// Adds a record.
    pub fn add(&mut self, record: Record) {
        if let Some(file) = &mut self.file {
            let written = serde_json::to_writer(&mut *file, &record)
                .map_err(io::Error::from)
                .and_then(|()| file.write_all(b"\n"));
            if let Err(error) = written {
                eprintln!("ascend-emulator: recording stopped: {error}");
                self.file = None;
            }
        }
        if let Some(kept) = &mut self.kept {
            kept.push(record);
        }
    }

    /// Flushes the file.
    pub fn flush(&mut self) {
        if let Some(file) = &mut self.file {
            let _ = file.flush();
        }
    }
}
