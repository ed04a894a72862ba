//! `ascend-vmm emulate --replay`: plays a trace against the emulated driver and reports each
//! answer that differs. A trace from hardware becomes a report about how true the emulator is.
//!
//! The calls go to the emulator's model directly, in the order of the trace. Addresses are those of
//! the trace, since programs choose them. Handles, shares and sessions are the driver's choice:
//! what the trace got for one is translated to what the model gave. Memory contents are not in a
//! trace; copies are made of zeros.

mod host;
mod memory;
mod report;

use crate::impossible;
use crate::trace::decode::{self, Modules};
use crate::trace::field::{Field, FieldKind, fields};
use crate::trace::recognise::Recogniser;
use crate::trace::watch::{hex_number, was_interrupted};
use ascend_emulator::Config;
use ascend_emulator::caller::{Caller, Outcome};
use ascend_emulator::driver::{AddressSpaceChange, ChangeKind, Driver, FileId, Mmap};
use ascend_emulator::record::{self, Record, bytes, errno_name};
use ascend_ioctl::{Generation, svm};
use memory::CallMemory;
use nix::errno::Errno;
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use report::ReplayReport;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Where the argument of an ioctl lies. Programs have nothing so low.
const ARGUMENT: u64 = 0x1_0000;

/// How much longer than in the trace a call may wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// The size of what a file shows: enough for every segment. It is sparse.
const BACKING: u64 = 64 << 40;

/// A call of the trace and its line.
pub struct TracedCall {
    number: usize,
    record: Record,
    module: String,
}

impl TracedCall {
    /// Whether the call changes nothing that a later answer depends on.
    fn changes_nothing(&self) -> bool {
        let command = self.record.cmd.unwrap_or_default();
        let asks = ["MEM_GET_", "MEM_QUERY_", "QUERY_", "GET_"].iter().any(|prefix| command.starts_with(prefix));
        let others = ["MEMCPY", "MEMCPY2D", "MEMCPY_BATCH", "MEMSET8", "RESERVE_ADDR_INFO_QUERY"];
        (asks || others.contains(&command)) && unplayable(&self.record).is_none()
    }
}

/// Why a call cannot be played.
fn unplayable(record: &Record) -> Option<&'static str> {
    let copies = matches!(record.cmd, Some("MEMCPY" | "MEMCPY2D" | "MEMCPY_BATCH" | "ASYNC_MEMCPY"));
    if record.unfinished {
        Some("it had not returned when the trace ended")
    } else if was_interrupted(record) {
        Some("a signal interrupted it")
    } else if copies && record.errno.as_deref() == Some("EFAULT") {
        Some("a trace does not tell which memory of the program is accessible")
    } else {
        None
    }
}

/// A call whose answer differs although it changed nothing.
struct Doubt {
    index: usize,
    /// The last call that it overlapped with.
    last: usize,
    differences: Vec<String>,
}

/// Plays a trace and prints the report. `describe` changes the host of the trace as the
/// user wants it.
pub fn run(path: &Path, describe: impl FnOnce(Config) -> Result<Config, String>) -> ExitCode {
    let lines = match read(path) {
        Ok(lines) => lines,
        Err(reason) => return impossible(format!("cannot replay {}: {reason}", path.display())),
    };
    if lines.is_empty() {
        return impossible(format!("cannot replay {}: it has no calls", path.display()));
    }
    let told = host::from_trace(generation(&lines), &lines);
    let generation = told.generation;
    let config = match describe(told) {
        Ok(config) => config,
        Err(reason) => return impossible(reason),
    };
    let given = config.generation != generation;
    let mut order = Order::new(&lines);
    let player = loop {
        let mut player = Player::new(config.clone(), &lines);
        match player.play_all(&lines, &order) {
            Some(index) => order.move_on(&lines, index),
            None => break player,
        }
    };
    player.report.print(&player.driver.machine.config, given);
    if player.report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The order in which the calls are played. A trace has them in the order in which they returned.
/// Of calls of several threads that overlapped, it does not tell which one the driver carried out
/// first, so a call whose answer differs is tried in each place among the others.
struct Order {
    /// Indices of lines.
    calls: Vec<usize>,
    /// How many places were tried of the calls that were moved.
    tried: HashMap<usize, usize>,
    moves: usize,
}

impl Order {
    /// The trace is played again from its beginning for each move.
    const MOST_MOVES: usize = 100;

    fn new(lines: &[TracedCall]) -> Self {
        Order { calls: (0..lines.len()).collect(), tried: HashMap::new(), moves: 0 }
    }

    fn can_move(&self, lines: &[TracedCall], index: usize) -> bool {
        let tried = self.tried.get(&index).copied().unwrap_or(0);
        let (earlier, later) = concurrent(lines, index);
        let places = earlier.len() + later.len();
        places > 0 && tried <= places && self.moves < Order::MOST_MOVES
    }

    /// Moves a call before the next earlier or behind the next later one that it overlapped with,
    /// and at last to where it was.
    fn move_on(&mut self, lines: &[TracedCall], index: usize) {
        let tried = self.tried.entry(index).or_default();
        let (earlier, later) = concurrent(lines, index);
        self.calls.retain(|call| *call != index);
        let position = |wanted: &dyn Fn(usize) -> bool| self.calls.iter().position(|call| wanted(*call));
        let place = if let Some(before) = earlier.get(*tried) {
            position(&|call| call == *before)
        } else if let Some(after) = later.get(*tried - earlier.len()) {
            position(&|call| call == *after).map(|place| place + 1)
        } else {
            position(&|call| call > index)
        };
        self.calls.insert(place.unwrap_or(self.calls.len()), index);
        *tried += 1;
        self.moves += 1;
    }
}

/// The calls that other threads made at the same time as one: those that returned earlier and those
/// that returned later, the nearest first.
fn concurrent(lines: &[TracedCall], index: usize) -> (Vec<usize>, Vec<usize>) {
    const NEAR: usize = 100;
    let span = |record: &Record| record.at.map(|at| (at, at.saturating_add(record.us)));
    let own = &lines[index].record;
    let Some((start, end)) = span(own) else { return Default::default() };
    let overlaps = |other: &usize| {
        let record = &lines[*other].record;
        let same_time = span(record).is_some_and(|(from, to)| from <= end && start <= to);
        same_time && record.tid != own.tid && record.call != "found"
    };
    let earlier = (index.saturating_sub(NEAR)..index).rev().filter(overlaps);
    let later = (index + 1..(index + NEAR).min(lines.len())).filter(overlaps);
    (earlier.collect(), later.collect())
}

/// The calls of a file, each with its line.
fn numbered(path: &Path) -> Result<Vec<(usize, Record)>, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut records = Vec::new();
    for (index, text) in BufReader::new(file).lines().enumerate() {
        let text = text.map_err(|error| error.to_string())?;
        if text.trim().is_empty() {
            continue;
        }
        let record: Record = serde_json::from_str(&text).map_err(|error| format!("line {}: {error}", index + 1))?;
        if record.call.is_empty() {
            return Err(format!("line {}: it is not a call", index + 1));
        }
        records.push((index + 1, record));
    }
    Ok(records)
}

/// The calls of a file.
pub fn records(path: &Path) -> Result<Vec<Record>, String> {
    Ok(numbered(path)?.into_iter().map(|(_, record)| record).collect())
}

fn read(path: &Path) -> Result<Vec<TracedCall>, String> {
    let mut modules = Modules::default();
    let line = |(number, record)| {
        let module = modules.of(&record);
        TracedCall { number, record, module }
    };
    Ok(numbered(path)?.into_iter().map(line).collect())
}

/// The generation that the answers of a trace tell.
fn generation(lines: &[TracedCall]) -> Generation {
    let mut recogniser = Recogniser::new(None);
    for line in lines.iter().filter(|line| line.record.call == "ioctl") {
        recogniser.observe(&line.module, decode::request(&line.record), &line.record);
    }
    recogniser.best()
}

/// Names that the driver chose: kind, where it is valid, what the trace has.
type Chosen = (FieldKind, u64, Vec<u8>);

/// A mapping that the trace made.
struct Range {
    process: i32,
    start: u64,
    end: u64,
}

struct Player {
    driver: Driver,
    report: ReplayReport,
    files: HashMap<u64, Open>,
    /// Process ids as the driver knows them: other ones if the trace was made in a container.
    tgids: HashMap<i32, i32>,
    ended: HashSet<i32>,
    chosen: HashMap<Chosen, Vec<u8>>,
    mapped: Vec<Range>,
    /// The last call changed nothing in the model.
    changed_nothing: bool,
}

struct Open {
    id: FileId,
    opener: i32,
    flags: i32,
}

/// What a call of the trace and of the model returned.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Returned {
    Value(i64),
    Error(String),
}

impl Returned {
    fn of(result: Result<i64, Errno>) -> Returned {
        match result {
            Ok(value) if (-4095..0).contains(&value) => Returned::Error(errno_name(-value as i32)),
            Ok(value) => Returned::Value(value),
            Err(errno) => Returned::Error(errno_name(errno as i32)),
        }
    }

    fn recorded(record: &Record) -> Returned {
        match &record.errno {
            Some(errno) => Returned::Error(errno.clone()),
            None => Returned::Value(record.ret),
        }
    }
}

impl std::fmt::Display for Returned {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Returned::Value(value) if *value > 0xffff => write!(f, "{value:#x}"),
            Returned::Value(value) => write!(f, "{value}"),
            Returned::Error(errno) => f.write_str(errno),
        }
    }
}

impl Player {
    fn new(config: Config, lines: &[TracedCall]) -> Self {
        Player {
            driver: Driver::new(config),
            report: ReplayReport::default(),
            files: HashMap::new(),
            tgids: host::tgids(lines),
            ended: HashSet::new(),
            chosen: HashMap::new(),
            mapped: Vec::new(),
            changed_nothing: false,
        }
    }

    /// Plays all calls. Stops at one that changed the model, whose answer differs, and that can be
    /// tried elsewhere.
    fn play_all(&mut self, lines: &[TracedCall], order: &Order) -> Option<usize> {
        let mut begins: HashMap<usize, Vec<usize>> = HashMap::new();
        for index in (0..lines.len()).filter(|index| lines[*index].changes_nothing()) {
            if let Some(first) = concurrent(lines, index).0.last() {
                begins.entry(*first).or_default().push(index);
            }
        }
        // Calls that change nothing are tried from the first call that they overlapped with, and
        // those that changed nothing, but whose answers differ, until the last one.
        let (mut early, mut settled, mut late) = (Vec::new(), HashSet::new(), Vec::<Doubt>::new());
        for &index in &order.calls {
            early.extend(begins.remove(&index).into_iter().flatten());
            early.retain(|call| {
                let fits = *call != index && self.repeat(&lines[*call]);
                if fits {
                    settled.insert(*call);
                }
                !fits && *call != index
            });
            let before = self.report.found();
            if settled.remove(&index) {
                self.report.played += 1;
            } else {
                self.play(&lines[index]);
            }
            let differences = self.report.take_from(before);
            if !differences.is_empty() {
                match concurrent(lines, index).1.last() {
                    Some(last) if self.changed_nothing => late.push(Doubt { index, last: *last, differences }),
                    _ if !self.changed_nothing && order.can_move(lines, index) => return Some(index),
                    _ => self.report.put_back(differences),
                }
            }
            late.retain_mut(|doubt| {
                let settled = doubt.index != index && self.repeat(&lines[doubt.index]);
                if !settled && doubt.last == index {
                    self.report.put_back(std::mem::take(&mut doubt.differences));
                }
                !settled && doubt.last != index
            });
        }
        late.into_iter().for_each(|doubt| self.report.put_back(doubt.differences));
        None
    }

    /// Plays an ioctl that changes nothing; true if its answer is that of the trace.
    fn repeat(&mut self, line: &TracedCall) -> bool {
        if !line.record.file.is_some_and(|file| self.files.contains_key(&file)) {
            return false;
        }
        let (before, played) = (self.report.found(), self.report.played);
        self.ioctl(line);
        self.report.played = played;
        self.report.take_from(before).is_empty()
    }

    fn tgid(&self, pid: i32) -> i32 {
        self.tgids.get(&pid).copied().unwrap_or(pid)
    }

    fn caller<'a>(&self, record: &Record, memory: &'a CallMemory) -> Caller<'a> {
        let tgid = self.tgid(record.pid);
        let tid = if record.tid == record.pid { tgid } else { record.tid };
        Caller { tid, tgid, start_time: 1, identity: 0, mount_namespace: 1, uid: 0, memory, arrived: Instant::now() }
    }

    fn play(&mut self, line: &TracedCall) {
        let record = &line.record;
        self.changed_nothing = false;
        if let Some(reason) = unplayable(record) {
            return self.report.skip(line.number, reason);
        }
        match record.call {
            "open" => self.open(line),
            "ioctl" => self.ioctl(line),
            "mmap" if record.file.is_some() => self.mmap(line),
            "close" => self.close(line),
            "end" => self.end(record.pid),
            "found" => self.report.skip(line.number, "the file was open before the trace began"),
            _ => self.change(line),
        }
        for trap in std::mem::take(&mut self.driver.machine.traps) {
            let what = format!("the emulated kernel would have crashed: {trap}");
            self.report.behaviour(line.number, name(line), "an answer", &what);
        }
        self.driver.svm.settle_windows(&mut self.driver.machine);
    }

    /// Compares what a call returned; true if both succeeded or both failed.
    fn compare(&mut self, line: &TracedCall, emulated: &Returned) -> bool {
        let recorded = Returned::recorded(&line.record);
        self.report.played += 1;
        if recorded != *emulated {
            self.report.behaviour(line.number, name(line), &recorded.to_string(), &emulated.to_string());
        }
        matches!((recorded, emulated), (Returned::Value(_), Returned::Value(_)))
    }

    fn open(&mut self, line: &TracedCall) {
        let record = &line.record;
        let path = record.path.as_deref().unwrap_or_default();
        let flags = record.flags.as_deref().and_then(hex_number).unwrap_or(0) as i32;
        let memory = CallMemory::default();
        let caller = self.caller(record, &memory);
        let backing = memfd_create("replay", MFdFlags::MFD_CLOEXEC).map(File::from);
        let Ok(backing) = backing.map_err(std::io::Error::from).and_then(|file| file.set_len(BACKING).map(|()| file))
        else {
            return self.report.skip(line.number, "there is no memory for its file");
        };
        let exclusive = flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL;
        let result = if exclusive && self.driver.exists(caller.tgid, path) {
            Err(Errno::EEXIST)
        } else {
            self.driver.open(&caller, path, flags, backing).unwrap_or(Err(Errno::ENOENT))
        };
        self.ended.remove(&record.pid);
        let same = self.compare(line, &Returned::of(result.map(|_| 0)));
        if let (Ok(id), Some(file)) = (result, record.file) {
            self.files.insert(file, Open { id, opener: record.pid, flags });
        } else if let (Ok(id), false) = (result, same) {
            // The trace has no file of it.
            self.driver.close(id, true);
        }
    }

    fn file(&mut self, line: &TracedCall) -> Option<FileId> {
        let found = line.record.file.and_then(|file| self.files.get(&file)).map(|open| open.id);
        if found.is_none() {
            self.report.skip(line.number, "its file was open before the trace began, or could not be opened");
        }
        found
    }

    fn close(&mut self, line: &TracedCall) {
        let Some(file) = self.file(line) else { return };
        let opener = line.record.file.and_then(|file| self.files.remove(&file)).map(|open| open.opener);
        let alive = opener.is_some_and(|opener| !self.ended.contains(&opener));
        self.report.played += 1;
        self.driver.close(file, alive);
    }

    fn end(&mut self, pid: i32) {
        let tgid = self.tgid(pid);
        self.ended.insert(pid);
        self.mapped.retain(|range| range.process != pid);
        self.driver.exit(tgid, 1);
    }

    fn ioctl(&mut self, line: &TracedCall) {
        let Some(file) = self.file(line) else { return };
        let (record, module) = (&line.record, line.module.as_str());
        self.ended.remove(&record.pid);
        let request = decode::request(record);
        let generation = self.driver.machine.config.generation;
        let fields = fields(generation, module, request);
        let readable = record.in_hex.is_some();
        let (recorded_in, recorded_out) = decode::argument(record, module, generation);
        let place = Place::of(record, &fields, &recorded_in, &recorded_out);
        let mut given = recorded_in.clone();
        for field in &fields {
            self.translate(field, &place, &mut given);
        }
        let memory = CallMemory::default();
        if readable {
            memory.put(ARGUMENT, given.clone());
        }
        for buffer in &record.buffers {
            let (Some(address), Ok(length)) = (hex_number(&buffer.addr), usize::try_from(buffer.len)) else { continue };
            let unreadable = record.errno.as_deref() == Some("EFAULT") && buffer.in_hex.is_none();
            match &buffer.in_hex {
                _ if unreadable => memory.hole(address, buffer.len),
                _ if length > 1 << 24 => {}
                Some(text) => {
                    let recorded = bytes(text, length).unwrap_or_default();
                    let key = (FieldKind::Converted, place.scope(FieldKind::Converted).unwrap_or(0), recorded);
                    memory.put(address, self.chosen.get(&key).cloned().unwrap_or(key.2));
                }
                None => memory.put(address, vec![0; length]),
            }
        }
        let unreadable = record.addr.as_deref().and_then(hex_number).unwrap_or(0);
        let address = if readable { ARGUMENT } else { unreadable };
        if !readable {
            memory.hole(address, given.len() as u64);
        }
        let Some(result) = self.call(record, file, request, address, &memory) else {
            let recorded = Returned::recorded(record).to_string();
            return self.report.behaviour(line.number, name(line), &recorded, "it does not return");
        };
        let answer = Returned::of(result);
        self.changed_nothing = matches!(answer, Returned::Error(_)) || line.changes_nothing();
        if !self.compare(line, &answer) {
            return;
        }
        let emulated = memory.take(ARGUMENT).unwrap_or_else(|| given.clone());
        for field in &fields {
            self.compare_field(line, field, &place, &recorded_out, &emulated);
        }
        for buffer in record.buffers.iter().filter(|buffer| buffer.out_hex.is_some()) {
            let filled = hex_number(&buffer.addr).and_then(|address| memory.take(address)).unwrap_or_default();
            self.compare_buffer(line, buffer, &filled);
        }
    }

    /// Makes an ioctl, and repeats it while it sleeps; `None` if it sleeps for too long.
    fn call(
        &mut self,
        record: &Record,
        file: FileId,
        request: u32,
        address: u64,
        memory: &CallMemory,
    ) -> Option<Result<i64, Errno>> {
        let caller = self.caller(record, memory);
        let limit = Duration::from_micros(record.us).saturating_add(PATIENCE);
        loop {
            match self.driver.ioctl(&caller, file, request, address) {
                Outcome::Done(result) => return Some(result),
                Outcome::Sleep(wake) | Outcome::Wait(wake) => {
                    if caller.arrived.elapsed() > limit {
                        return None;
                    }
                    let time = wake.saturating_duration_since(Instant::now());
                    std::thread::sleep(time.min(limit).max(Duration::from_micros(50)));
                }
            }
        }
    }

    /// Replaces a name that the driver of the trace chose by the one that the model gave.
    fn translate(&self, field: &Field, place: &Place, argument: &mut [u8]) {
        let Some(scope) = place.scope(field.kind) else { return };
        let recorded = field.bytes(argument).to_vec();
        if let Some(chosen) = self.chosen.get(&(field.kind, scope, recorded)) {
            if let Some(bytes) = argument.get_mut(field.offset..field.offset + chosen.len()) {
                bytes.copy_from_slice(chosen);
            }
        }
    }

    fn compare_field(&mut self, line: &TracedCall, field: &Field, place: &Place, recorded: &[u8], emulated: &[u8]) {
        let (trace, model) = (field.bytes(recorded), field.bytes(emulated));
        if let Some(scope) = place.scope(field.kind) {
            let key = (field.kind, scope, trace.to_vec());
            if is_chosen(line.record.cmd.unwrap_or_default(), field) {
                self.chosen.insert(key, model.to_vec());
                return;
            }
            if self.chosen.get(&key).is_some_and(|chosen| chosen == model) {
                return;
            }
        }
        if trace == model {
            return;
        }
        let same = match field.kind {
            FieldKind::Pointer | FieldKind::Reserved | FieldKind::Time => true,
            // The id on the device is made up; that there is one is not.
            FieldKind::DevicePid => {
                field.number(recorded).map(|it| it == 0) == field.number(emulated).map(|it| it == 0)
            }
            _ => false,
        };
        if same {
            return;
        }
        let text = |argument: &[u8]| match field.number(argument) {
            Some(number) if number > 0xffff => format!("{number:#x}"),
            Some(number) => number.to_string(),
            None => format!("0x{}", record::hex(field.bytes(argument))),
        };
        let (trace, model) = (text(recorded), text(emulated));
        match field.kind {
            FieldKind::Machine => {
                self.report.machine(line.number, format!("{}.{}", name(line), field.name), trace, model)
            }
            _ => self.report.field(line.number, name(line), &field.name, &trace, &model),
        }
    }

    fn compare_buffer(&mut self, line: &TracedCall, buffer: &record::Buffer, filled: &[u8]) {
        let recorded = buffer.out_hex.as_deref().and_then(|text| bytes(text, 0)).unwrap_or_default();
        let emulated = bytes(&record::hex(filled), 0).unwrap_or_default();
        let command = line.record.cmd.unwrap_or_default();
        if line.module == "hdc" {
            for (what, tag) in [("kind", 2), ("code", 25)] {
                let (trace, model) = (message_number(&recorded, tag), message_number(&emulated, tag));
                if trace != model {
                    let field = format!("the message's {what}");
                    self.report.field(line.number, name(line), &field, &trace.to_string(), &model.to_string());
                }
            }
            return;
        }
        // UDIS_GET's output starts with the time of the last update.
        let timed = name(line).ends_with("UDIS_GET") && buffer.field == "output";
        let skipped = if timed { 8 } else { 0 };
        let (trace, model) = (recorded.get(skipped..), emulated.get(skipped..));
        if trace.unwrap_or_default() == model.unwrap_or_default()
            || command == "CONTAINER_CMD" && line.record.pid != line.record.tid
        {
            return;
        }
        let (trace, model) = (format!("0x{}", record::hex(&recorded)), format!("0x{}", record::hex(&emulated)));
        match command {
            "GET_DEV_LIST" | "URD" => {
                self.report.machine(line.number, format!("{}, {}", name(line), buffer.field), trace, model);
            }
            _ => self.report.field(line.number, name(line), &buffer.field, &trace, &model),
        }
    }

    fn mmap(&mut self, line: &TracedCall) {
        let Some(file) = self.file(line) else { return };
        let record = &line.record;
        let number = |text: &Option<String>| text.as_deref().and_then(hex_number).unwrap_or(0);
        let (hint, length) = (number(&record.addr), number(&record.len));
        let (prot, flags, offset) =
            (record.arg.unwrap_or(0) as i32, number(&record.flags) as i32, number(&record.offset));
        if length == 0 || offset % 4096 != 0 {
            return self.report.skip(line.number, "Linux refuses it before it asks the driver");
        }
        let access = record.file.and_then(|file| self.files.get(&file)).map_or(0, |open| open.flags & libc::O_ACCMODE);
        let writes = flags & libc::MAP_SHARED != 0 && prot & libc::PROT_WRITE != 0;
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
        if !fixed && (access == libc::O_WRONLY || writes && access != libc::O_RDWR) {
            self.compare(line, &Returned::Error("EACCES".into()));
            return;
        }
        let free = match (record.mapped, &record.errno) {
            (Some(mapped), _) => !mapped,
            (None, None) => hint != 0 && record.ret as u64 == hint,
            (None, Some(_)) => hint != 0,
        };
        let memory = CallMemory::default();
        let caller = self.caller(record, &memory);
        let mmap = Mmap { hint, free, length, prot, flags, offset };
        let result = self.driver.mmap(&caller, file, &mmap);
        // Where Linux puts it is not the driver's answer.
        let address = if record.errno.is_none() { record.ret } else { hint as i64 };
        if self.compare(line, &Returned::of(result.map(|()| address))) {
            let start = address as u64;
            self.mapped.push(Range { process: record.pid, start, end: start.saturating_add(length) });
        }
    }

    fn change(&mut self, line: &TracedCall) {
        let record = &line.record;
        let number = |text: &Option<String>| text.as_deref().and_then(hex_number).unwrap_or(0);
        let (start, length) = (number(&record.addr), number(&record.len));
        let argument = record.arg.unwrap_or(0);
        let kind = match record.call {
            "munmap" | "mmap" => ChangeKind::Unmap,
            "mprotect" => ChangeKind::Protect(argument as i32),
            "madvise" => ChangeKind::Advise(argument as i32),
            "mbind" => ChangeKind::Bind(argument as i32),
            "mlock" => ChangeKind::Lock,
            _ => ChangeKind::Remap { length: argument as u64, fixed: false },
        };
        let end = start.saturating_add(length);
        let of_driver = |it: &Range| it.process == record.pid && it.start < end && start < it.end;
        let mapped = record.mapped.unwrap_or_else(|| self.mapped.iter().any(of_driver));
        let memory = CallMemory::default();
        let caller = self.caller(record, &memory);
        let result = self.driver.address_space_change(&caller, &AddressSpaceChange { kind, start, length, mapped });
        if record.errno.is_some() && result.is_ok() {
            return self.report.skip(line.number, "Linux may have refused it without the driver");
        }
        let returned = if record.errno.is_none() { record.ret } else { 0 };
        let same = self.compare(line, &Returned::of(result.map(|_| returned)));
        if same && kind == ChangeKind::Unmap {
            self.mapped.retain(|it| !(it.process == record.pid && start <= it.start && it.end <= end));
        }
    }
}

/// Numbers that distinguish the names that the driver chose.
struct Place {
    pid: i32,
    /// The device that a handle is on.
    device: u64,
    /// The device that exported a share.
    exporter: u64,
}

impl Place {
    fn of(record: &Record, fields: &[Field], before: &[u8], after: &[u8]) -> Place {
        let number = |name: &str, bytes: &[u8]| {
            fields.iter().find(|field| field.name == name).and_then(|field| field.number(bytes))
        };
        let device = number("head.device", before).unwrap_or(0);
        // Handles of host memory are numbered for themselves.
        let bytes = if record.cmd == Some("MEM_IMPORT") { after } else { before };
        let on_host = number("side", bytes).is_some_and(|side| side != u64::from(svm::SIDE_DEVICE));
        Place {
            pid: record.pid,
            device: if on_host { u64::from(svm::HOST_ID) } else { device },
            exporter: number("exporter", before).unwrap_or(device),
        }
    }

    /// Where names of a kind are valid; `None` for what the driver does not choose.
    fn scope(&self, kind: FieldKind) -> Option<u64> {
        let process = (self.pid as u64) << 16;
        match kind {
            FieldKind::Handle => Some(process | self.device),
            FieldKind::Task | FieldKind::Converted => Some(process),
            FieldKind::Share => Some(self.exporter),
            FieldKind::Session | FieldKind::Name => Some(0),
            _ => None,
        }
    }
}

/// Whether the driver chooses the value of a field, so that it is a new name.
fn is_chosen(command: &str, field: &Field) -> bool {
    matches!(
        (command, field.kind),
        ("MEM_CREATE" | "MEM_IMPORT", FieldKind::Handle)
            | ("MEM_EXPORT", FieldKind::Share)
            | ("ASYNC_MEMCPY", FieldKind::Task)
            | ("CONVERT_ADDR", FieldKind::Converted)
            | ("CONNECT", FieldKind::Session)
            | ("IPC_MEM_CREATE", FieldKind::Name)
    )
}

fn name(line: &TracedCall) -> String {
    decode::name(&line.record, &line.module)
}

/// A number of a daemon's message: the value of a field of its protobuf, 0 if it is absent.
fn message_number(packet: &[u8], wanted: u64) -> u64 {
    let mut rest = packet.get(12..).unwrap_or_default();
    let varint = |rest: &mut &[u8]| {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, after) = rest.split_first()?;
            *rest = after;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    };
    let mut found = 0;
    while !rest.is_empty() {
        let Some(tag) = varint(&mut rest) else { break };
        match tag & 7 {
            0 => match varint(&mut rest) {
                Some(number) if tag >> 3 == wanted => found = number,
                Some(_) => {}
                None => break,
            },
            2 => match varint(&mut rest).and_then(|length| rest.get(usize::try_from(length).ok()?..)) {
                Some(after) => rest = after,
                None => break,
            },
            1 => rest = rest.get(8..).unwrap_or_default(),
            5 => rest = rest.get(4..).unwrap_or_default(),
            _ => break,
        }
    }
    found
}
