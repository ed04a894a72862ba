//! Recording of calls, one JSON object per line.
//!
//! A record has what the caller passed and what the model returned. Pointers change from run to
//! run. Bytes are in hexadecimal without trailing zeros, since argument structs are mostly empty.
//!
//! `ascend-vmm trace` writes the same format about any driver, and `emulate --replay` reads it.
//! The buffers that an argument points to are part of it where they are arguments themselves
//! ([`buffer`]); the memory that is copied never is.

pub mod buffer;

pub use buffer::Buffer;

use ascend_ioctl::{Command, Generation, command, davinci, devmng, esched, hdc, svm, tsdrv, uda, urd};
use nix::errno::Errno;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A name that this crate knows.
pub type Name = &'static str;

/// A call of a client and its result.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// One of [`CALLS`].
    #[serde(deserialize_with = "known_call")]
    pub call: Name,
    /// Microseconds from the start of a trace to the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
    /// The process; 0 if it is not known which process dropped the last reference to a file.
    #[serde(skip_serializing_if = "is_zero")]
    pub pid: i32,
    /// The thread.
    #[serde(skip_serializing_if = "is_zero")]
    pub tid: i32,
    /// The descriptor that an open returned, in a trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd: Option<i32>,
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
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "known_command")]
    pub cmd: Option<Name>,
    /// The ioctl's request value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The argument before the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_hex: Option<String>,
    /// The argument after the call, if it was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_hex: Option<String>,
    /// The buffers that the argument points to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub buffers: Vec<Buffer>,
    /// What an ioctl wrote into the caller's memory: its answer, wherever it lies.
    #[serde(skip)]
    pub answer: Vec<u8>,
    /// Address of a mapping, or of a change of one; of an ioctl's argument that cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// Its length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub len: Option<String>,
    /// Protection of a mapping, advice of a madvise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arg: Option<i64>,
    /// Offset of an mmap in its file, if it is not 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<String>,
    /// Whether anything was mapped where a mapping of the driver was wanted, or in a range as large
    /// as one that is changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped: Option<bool>,
    /// What the call returned; -1 with `errno`.
    pub ret: i64,
    /// The errno's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// What the kernel wrote about the refusal to the log page of the process, in a trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// The call had not returned when its thread was killed or the trace ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unfinished: bool,
    /// Microseconds from the arrival of the call to its answer, sleep included.
    pub us: u64,
}

/// A change of mappings of at least this length may concern the driver's segments.
pub const DRIVER_AREA: u64 = crate::front::DRIVER_AREA;

/// What a record can be. `found` is a file that was open before a trace began. `end` is the end of
/// the address space in which a process used the driver: exit, kill or exec.
pub const CALLS: [&str; 12] =
    ["open", "ioctl", "mmap", "munmap", "mprotect", "madvise", "mremap", "mbind", "mlock", "close", "found", "end"];

fn is_zero(number: &i32) -> bool {
    *number == 0
}

fn known_call<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static str, D::Error> {
    let name = String::deserialize(deserializer)?;
    let known = CALLS.into_iter().find(|call| *call == name);
    known.ok_or_else(|| serde::de::Error::custom(format!("`{name}` is not a call of a trace")))
}

/// A command that this version does not know keeps its request value, and loses its name.
fn known_command<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'static str>, D::Error> {
    let name = Option::<String>::deserialize(deserializer)?;
    Ok(name.and_then(|name| Generation::ALL.into_iter().flat_map(names).find(|known| *known == name)))
}

/// The command of a request in a module (as named by [`crate::driver::Driver::module`]).
pub fn command(generation: Generation, module: &str, request: u32) -> Option<&'static Command> {
    let number = command::number(request);
    let commands = match module {
        _ if command::magic(request) == davinci::MAGIC && module != "hdc" => davinci::COMMANDS,
        "SVM" => return generation.svm_by_number(number).map(|svm| &svm.command),
        "uda" => uda::COMMANDS,
        "URD" => urd::COMMANDS,
        "DEVMNG" => devmng::COMMANDS,
        "hdc" => hdc::COMMANDS,
        "TSDRV" => tsdrv::COMMANDS,
        "ESCHED" => esched::COMMANDS,
        _ => return None,
    };
    commands.iter().find(|command| command.number == number)
}

/// The names of all commands of a generation.
pub(crate) fn names(generation: Generation) -> impl Iterator<Item = &'static str> {
    let svm = generation.svm_commands().map(|svm| svm.command.name);
    let others = [davinci::COMMANDS, uda::COMMANDS, urd::COMMANDS, devmng::COMMANDS, hdc::COMMANDS];
    let others = others.into_iter().chain([tsdrv::COMMANDS, esched::COMMANDS]).flatten();
    others.map(|command| command.name).chain(svm)
}

/// Size of a command's argument: the module's common argument, or the command's own struct.
/// Nothing is known about the arguments of unknown commands of the other modules.
pub fn argument_size(module: &str, command: Option<&Command>, request: u32) -> usize {
    match module {
        _ if command::magic(request) == davinci::MAGIC && module != "hdc" => size_of::<davinci::OpenArg>(),
        "SVM" => size_of::<svm::Arg>(),
        "hdc" => size_of::<hdc::Arg>(),
        // It looks at no part of the request.
        "URD" => size_of::<urd::CallArg>(),
        // The largest struct that all generations copy.
        "DEVMNG" => command.map_or(0, |it| it.layout().map_or(size_of::<u32>(), |layout| layout.size.min(312))),
        "DP_PROC_MNG" => crate::dp_proc_mng::ARGUMENT_SIZE,
        _ => command.and_then(Command::layout).map_or(0, |layout| layout.size),
    }
}

/// The name of an errno, or its number: `/dev/hisi_hdc` has codes of its own.
pub fn errno_name(number: i32) -> String {
    match Errno::from_raw(number) {
        Errno::UnknownErrno => number.to_string(),
        errno => format!("{errno:?}"),
    }
}

/// Bytes as text.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let digits = bytes[..end].iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// The bytes of a text that [`hex`] made, as many as were cut off with `length`; `None` if it is
/// not one.
pub fn bytes(text: &str, length: usize) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    let mut bytes = text.as_bytes().chunks(2).map(pair).collect::<Option<Vec<u8>>>()?;
    if bytes.len() < length {
        bytes.resize(length, 0);
    }
    Some(bytes)
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

    /// Adds to the file that the address space of a process is gone, which is not a call.
    pub fn end(&mut self, pid: i32) {
        let kept = self.kept.take();
        self.add(Record { call: "end", pid, ..Record::default() });
        self.kept = kept;
    }

    /// Flushes the file.
    pub fn flush(&mut self) {
        if let Some(file) = &mut self.file {
            let _ = file.flush();
        }
    }
}
