//! A call as a line of text: what was passed, what came back, how long it took.

use super::field::{Field, FieldKind, fields};
use super::watch::{hex_number, was_interrupted};
use ascend_emulator::record::buffer::KEYS;
use ascend_emulator::record::{self, Record, bytes};
use ascend_ioctl::{Generation, command, davinci, hdc, svm};
use ascend_vmm::Bytes;
use ascend_vmm::error::printable;
use nix::libc;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// The module of each file, as the records tell it.
#[derive(Debug, Default)]
pub struct Modules {
    files: HashMap<u64, String>,
    /// Files whose binding the records do not tell: they were open before.
    unknown: HashSet<u64>,
}

impl Modules {
    /// The module that an ioctl's file is bound to; empty for other calls and for files that are
    /// not bound. Must see every record, in order.
    pub fn of(&mut self, record: &Record) -> String {
        let Some(file) = record.file else { return String::new() };
        let path = record.path.as_deref();
        match record.call {
            "open" | "found" => {
                if record.call == "found" {
                    self.unknown.insert(file);
                }
                let module = if path == Some(hdc::PATH) { "hdc" } else { "" };
                self.files.insert(file, module.to_owned());
                module.to_owned()
            }
            "ioctl" => {
                let module = self.files.entry(file).or_default();
                let request = request(record);
                if module.is_empty() && self.unknown.contains(&file) {
                    guess(request).clone_into(module);
                }
                let now = module.clone();
                let binds = command::magic(request) == davinci::MAGIC && command::number(request) == 0;
                if binds && now != "hdc" && record.errno.is_none() && !record.unfinished {
                    let name = record.in_hex.as_deref().and_then(|text| bytes(text, 0)).unwrap_or_default();
                    *module = super::name(&name);
                }
                now
            }
            _ => self.files.get(&file).cloned().unwrap_or_default(),
        }
    }
}

/// The module that has requests like this one, for a file whose OPEN was not seen.
pub fn guess(request: u32) -> &'static str {
    let has_size = request >> 16 & 0x3fff != 0;
    match command::magic(request) {
        b'M' if has_size => "SVM",
        b'M' => "DEVMNG",
        b'U' => "uda",
        b'V' => "URD",
        b'H' => "hdc",
        _ => "",
    }
}

/// The request value of an ioctl.
pub fn request(record: &Record) -> u32 {
    record.value.as_deref().and_then(hex_number).unwrap_or(0) as u32
}

/// The argument of an ioctl before and after it.
pub fn argument(record: &Record, module: &str, generation: Generation) -> (Vec<u8>, Vec<u8>) {
    let request = request(record);
    let length = record::argument_size(module, record::command(generation, module, request), request);
    let before = record.in_hex.as_deref().and_then(|text| bytes(text, length)).unwrap_or_else(|| vec![0; length]);
    let after = record.out_hex.as_deref().and_then(|text| bytes(text, length)).unwrap_or_else(|| before.clone());
    (before, after)
}

/// True for an open(2) of a device's node that is not there: a program that looks for devices tries
/// every number, and no such answer is a fault.
pub fn is_absent_node(record: &Record) -> bool {
    let number = record.path.as_deref().and_then(|path| path.strip_prefix("/dev/davinci"));
    record.call == "open"
        && matches!(record.errno.as_deref(), Some("ENOENT" | "ENXIO" | "ENODEV"))
        && number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// True for a call that failed, unless that is no fault: a search for nodes, or a signal.
pub fn has_failed(record: &Record) -> bool {
    record.errno.is_some() && !was_interrupted(record) && !is_absent_node(record)
}

/// What a call is called: the command, its number, or the system call.
pub fn name(record: &Record, module: &str) -> String {
    match (record.call, record.cmd) {
        ("ioctl", Some("URD")) => {
            let key = record.in_hex.as_deref().and_then(|text| bytes(text, 64)).map(|argument| {
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| argument[at + byte]));
                (word(8), word(12))
            });
            let known = key.and_then(|key| KEYS.iter().find(|(_, it)| (it.main, it.sub) == key));
            match (known, key) {
                (Some((name, _)), _) => format!("URD {name}"),
                (None, Some((main, sub))) => format!("URD {main:#x}/{sub}"),
                _ => "URD".into(),
            }
        }
        ("ioctl", Some(name)) if module == "hdc" => format!("HDC {name}"),
        ("ioctl", Some(name)) => name.to_owned(),
        ("ioctl", None) => {
            let request = request(record);
            let module = if module.is_empty() { "unbound file" } else { module };
            format!("{module} #{} ({request:#x})", command::number(request))
        }
        ("open", _) if is_absent_node(record) => "open, no such device".into(),
        (call, _) => call.to_owned(),
    }
}

/// The line for several calls that looked for nodes, from the first to the last.
pub fn absent_nodes(first: &Record, last: &Record, count: usize, us: u64) -> String {
    let path = |record: &Record| record.path.clone().unwrap_or_default();
    let [from, to] = [first, last].map(path);
    let errno = last.errno.as_deref().unwrap_or_default();
    printable(&format!("{}open({from:?} … {to:?}) = -1 {errno}, {count} times <{us} µs>", start(first)))
}

/// The line for a call. What it quotes comes from another process or from a file.
pub fn line(record: &Record, module: &str, generation: Generation) -> String {
    printable(&written(record, module, generation))
}

/// Who made a call, and when.
fn start(record: &Record) -> String {
    match record.at {
        Some(at) => format!("{:>7} {:>10.6} ", record.tid.max(record.pid), at as f64 / 1e6),
        None => format!("{:>7} ", record.tid.max(record.pid)),
    }
}

fn written(record: &Record, module: &str, generation: Generation) -> String {
    let mut line = start(record);
    let file = record.file.map(|file| format!("file {file}")).unwrap_or_default();
    // Writing to a string cannot fail.
    let _ = match record.call {
        "open" => write!(line, "open({:?}, {})", record.path.as_deref().unwrap_or("?"), flags(record)),
        "found" => write!(line, "found open: {}", record.path.as_deref().unwrap_or("?")),
        "close" => write!(line, "close({file})"),
        "end" => write!(line, "process {} ended", record.pid),
        "ioctl" => {
            let (before, after) = argument(record, module, generation);
            let fields = fields(generation, module, request(record));
            let place = if module.is_empty() { file.clone() } else { format!("{module} {file}") };
            let arguments = arguments(record, &fields, &before);
            let separator = if arguments.is_empty() { "" } else { ", " };
            let _ = write!(line, "{}({place}{separator}{arguments})", name(record, module));
            return end(line, record, &answers(record, &fields, &before, &after));
        }
        call => {
            let mut parts: Vec<String> = Vec::new();
            parts.extend((!file.is_empty()).then_some(file.clone()));
            parts.extend(record.addr.clone());
            parts.extend(record.len.as_deref().and_then(hex_number).map(|size| Bytes(size).rounded()));
            parts.extend(record.arg.map(|argument| format!("{argument:#x}")));
            parts.extend(record.flags.clone());
            parts.extend(record.offset.as_deref().map(|offset| format!("offset {offset}")));
            write!(line, "{call}({})", parts.join(", "))
        }
    };
    match record.call {
        "close" | "end" => line,
        "found" => line + &format!(" is {file} (fd {})", record.fd.unwrap_or(-1)),
        "open" if record.errno.is_none() && !record.unfinished => {
            let descriptor = record.fd.map(|fd| format!(" (fd {fd})")).unwrap_or_default();
            end(line, record, &format!("{file}{descriptor}"))
        }
        _ => end(line, record, ""),
    }
}

/// Adds what a call returned.
fn end(mut line: String, record: &Record, answer: &str) -> String {
    let _ = match &record.errno {
        _ if record.unfinished => write!(line, " = ? (it had not returned)"),
        Some(errno) if was_interrupted(record) => write!(line, " = ? {errno} (a signal interrupted it)"),
        Some(errno) => write!(line, " = -1 {errno}"),
        None if record.call == "open" => write!(line, " = {answer}"),
        None if matches!(record.call, "mmap" | "mremap") => write!(line, " = {:#x}", record.ret),
        None => write!(line, " = {}", record.ret),
    };
    if record.call == "ioctl" && !answer.is_empty() {
        let _ = write!(line, " {{{answer}}}");
    }
    let _ = write!(line, " <{} µs>", record.us);
    if let Some(log) = &record.log {
        for sentence in log.lines() {
            let _ = write!(line, "\n                   the kernel: {sentence}");
        }
    }
    line
}

fn flags(record: &Record) -> String {
    let Some(flags) = record.flags.as_deref().and_then(hex_number) else { return "?".into() };
    let flags = flags as i32;
    let mut text = match flags & libc::O_ACCMODE {
        libc::O_WRONLY => "O_WRONLY".to_owned(),
        libc::O_RDWR => "O_RDWR".to_owned(),
        _ => "O_RDONLY".to_owned(),
    };
    let known = [
        (libc::O_CLOEXEC, "O_CLOEXEC"),
        (libc::O_NONBLOCK, "O_NONBLOCK"),
        (libc::O_SYNC, "O_SYNC"),
        (libc::O_CREAT, "O_CREAT"),
        (libc::O_EXCL, "O_EXCL"),
        (libc::O_TRUNC, "O_TRUNC"),
        (libc::O_APPEND, "O_APPEND"),
    ];
    let mut rest = flags & !libc::O_ACCMODE;
    for (flag, name) in known {
        if rest & flag == flag {
            rest &= !flag;
            text += &format!("|{name}");
        }
    }
    // The kernel sets O_LARGEFILE by itself.
    rest &= !0x8000;
    if rest != 0 {
        text += &format!("|{rest:#x}");
    }
    text
}

/// The fields that the caller filled.
fn arguments(record: &Record, fields: &[Field], before: &[u8]) -> String {
    if record.in_hex.is_none() && !fields.is_empty() {
        return "an argument that cannot be read".into();
    }
    let mut parts = Vec::new();
    for field in fields {
        let shown = match field.name.as_str() {
            "head.device" => Some(format!("device={}", device(field.number(before).unwrap_or(0)))),
            "head.logical" | "head.vf" => None,
            _ if field.bytes(before).iter().all(|byte| *byte == 0) => None,
            name => Some(format!("{name}={}", value(field, before, record))),
        };
        parts.extend(shown);
    }
    parts.join(", ")
}

/// The fields that came back changed, and the buffers that were filled.
fn answers(record: &Record, fields: &[Field], before: &[u8], after: &[u8]) -> String {
    let mut parts: Vec<String> = fields
        .iter()
        .filter(|field| !field.name.starts_with("head.") && field.bytes(before) != field.bytes(after))
        .map(|field| format!("{}={}", field.name, value(field, after, record)))
        .collect();
    for buffer in record.buffers.iter().filter(|buffer| buffer.out_hex.is_some()) {
        parts.push(format!("{}: {}", buffer.field, shortened(buffer.out_hex.as_deref().unwrap_or_default())));
    }
    parts.join(", ")
}

fn device(number: u64) -> String {
    if number == u64::from(svm::HOST_ID) { "host".into() } else { number.to_string() }
}

fn shortened(hex: &str) -> String {
    if hex.len() > 40 { format!("0x{}… ({} bytes)", &hex[..32], hex.len() / 2) } else { format!("0x{hex}") }
}

/// The value of a field as people read it.
fn value(field: &Field, argument: &[u8], record: &Record) -> String {
    let Some(number) = field.number(argument) else {
        let bytes = field.bytes(argument);
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let text = &bytes[..end];
        // The vendor's library leaves other bytes behind the name of a module.
        let rest_is_empty = field.name == "module_name" || bytes[end..].iter().all(|byte| *byte == 0);
        if !text.is_empty() && rest_is_empty && text.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
            return format!("{:?}", String::from_utf8_lossy(text));
        }
        return shortened(&record::hex(bytes));
    };
    if let Some(word) = word(&field.name, number, record.cmd.unwrap_or_default()) {
        return word.to_owned();
    }
    match field.kind {
        FieldKind::Size => Bytes(number).rounded(),
        FieldKind::Address | FieldKind::Pointer => format!("{number:#x}"),
        FieldKind::Machine if field.name.ends_with("_size") => Bytes(number).rounded(),
        _ if field.size == 4 && number >= 1 << 31 => {
            // Small negative numbers are errors and "any"; others are flags.
            let signed = number as u32 as i32;
            if signed > -4096 { signed.to_string() } else { format!("{number:#x}") }
        }
        _ if number > 0xffff => format!("{number:#x}"),
        _ => number.to_string(),
    }
}

/// The words for the numbers of some fields.
fn word(field: &str, number: u64, command: &str) -> Option<&'static str> {
    let number = u32::try_from(number).ok()?;
    let words: &[(u32, &str)] = match (command, field) {
        (_, "side") => &[(svm::SIDE_HOST, "host"), (svm::SIDE_DEVICE, "device"), (svm::SIDE_HOST_NUMA, "host-numa")],
        (_, "page") => &[(svm::PAGE_NORMAL, "normal"), (svm::PAGE_HUGE, "2M"), (svm::PAGE_GIANT, "1G")],
        ("MEM_CREATE" | "MEM_IMPORT", "memory") => &[
            (svm::MEMORY_HBM, "HBM"),
            (svm::MEMORY_DDR, "DDR"),
            (svm::MEMORY_P2P_HBM, "P2P-HBM"),
            (svm::MEMORY_P2P_DDR, "P2P-DDR"),
            (svm::MEMORY_TS_DDR, "TS-DDR"),
        ],
        ("UPDATE_HEAP", "operation") => &[(svm::HEAP_ENABLE, "enable"), (svm::HEAP_DISABLE, "disable")],
        ("UPDATE_HEAP", "kind") => {
            &[(svm::HEAP_PINNED_HOST, "pinned-host"), (svm::HEAP_HUGE, "2M"), (svm::HEAP_CHUNK, "chunk")]
        }
        ("UPDATE_HEAP", "sub_kind") => &[
            (svm::SUB_SVM, "managed"),
            (svm::SUB_DEVICE, "device"),
            (svm::SUB_HOST, "host"),
            (svm::SUB_DVPP, "dvpp"),
            (svm::SUB_READ_ONLY, "read-only"),
            (svm::SUB_RESERVE, "reserve"),
        ],
        ("MEMCPY" | "MEMCPY2D", "direction") => &[
            (svm::COPY_HOST_TO_HOST, "host-to-host"),
            (svm::COPY_HOST_TO_DEVICE, "host-to-device"),
            (svm::COPY_DEVICE_TO_HOST, "device-to-host"),
            (svm::COPY_DEVICE_TO_DEVICE, "device-to-device"),
            (svm::COPY_DETECT, "detect"),
        ],
        ("MEM_SET_ACCESS" | "MEM_GET_ACCESS", "access") => {
            &[(svm::ACCESS_NONE, "none"), (svm::ACCESS_READ, "read"), (svm::ACCESS_READ_WRITE, "read-write")]
        }
        _ => &[],
    };
    words.iter().find(|(it, _)| *it == number).map(|(_, word)| *word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn create(size: u64) -> svm::Arg {
        let para = svm::MemCreate { size, side: svm::SIDE_DEVICE, page: svm::PAGE_HUGE, ..Default::default() };
        svm::Arg::new(1, &para)
    }

    #[test]
    fn a_command_reads_as_a_call_with_its_answer() {
        let mut after = create(4 << 20);
        let mut para: svm::MemCreate = after.para();
        (para.id, para.pages) = (7, 2);
        after = svm::Arg::new(1, &para);
        let record = Record {
            call: "ioctl",
            at: Some(1_500_000),
            pid: 100,
            tid: 101,
            file: Some(3),
            cmd: Some("MEM_CREATE"),
            value: Some("0xc1584d32".into()),
            in_hex: Some(record::hex(create(4 << 20).as_bytes())),
            out_hex: Some(record::hex(after.as_bytes())),
            us: 12,
            ..Record::default()
        };
        let text = line(&record, "SVM", Generation::V26_1);
        assert_eq!(
            text,
            "    101   1.500000 MEM_CREATE(SVM file 3, device=1, size=4 MiB, side=device, page=2M) = 0 \
             {id=7, pages=2} <12 µs>"
        );
        let refused = Record {
            out_hex: None,
            ret: -1,
            errno: Some("ENOMEM".into()),
            log: Some("there is no memory\nnone \x1b[31m\u{202e}at all".into()),
            ..record
        };
        let text = line(&refused, "SVM", Generation::V26_1);
        assert!(text.contains("= -1 ENOMEM <12 µs>\n"), "{text}");
        assert!(text.ends_with(r"the kernel: none \u{1b}[31m\u{202e}at all"), "{text}");
    }

    #[test]
    fn nothing_that_a_file_can_hold_makes_the_decoder_panic() {
        for text in ["", "0", "zz", "ffff", &"ff".repeat(600)] {
            for call in record::CALLS {
                let record = Record {
                    call,
                    file: Some(u64::MAX),
                    value: Some("0xffffffff".into()),
                    in_hex: Some(text.into()),
                    out_hex: Some(text.into()),
                    addr: Some(text.into()),
                    len: Some(text.into()),
                    us: u64::MAX,
                    at: Some(u64::MAX),
                    ..Record::default()
                };
                for generation in Generation::ALL {
                    for module in ["SVM", "hdc", "uda", "URD", "DEVMNG", "", "other"] {
                        line(&record, module, generation);
                        for command in ascend_ioctl::layout::commands(generation) {
                            let value = Some(format!("{:#x}", command.request()));
                            line(&Record { cmd: Some(command.name), value, ..record.clone() }, module, generation);
                        }
                    }
                }
            }
        }
    }
}
