//! Which system calls concern the driver, and what they say: each becomes a [`Record`].
//!
//! A call is examined twice, before and after. The tracer reads from the program's memory the
//! argument, the buffers that belong to it ([`ascend_emulator::record::buffer`]) and, after a
//! refusal, the page in which the driver explains it.

use super::decode::guess;
use super::files::{DescriptorTable, FileId, Files, Installation, Shared, Space};
use super::recognise::Recogniser;
use ascend_emulator::caller::Memory;
use ascend_emulator::front::{ProcessMemory, driver_path, range_is_free};
use ascend_emulator::record::buffer::Sessions;
use ascend_emulator::record::{self, Buffer, DRIVER_AREA, Record, hex};
use ascend_emulator::seccomp::{FOREIGN_MAGICS, HUGE, WATCHED_END, WATCHED_START};
use ascend_ioctl::klog;
use ascend_ioctl::{command, hdc};
use ascend_vmm::error::printable;
use nix::libc;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::rc::Rc;
use std::time::Instant;

/// A call whose end is awaited.
struct Pending {
    record: Record,
    began: Instant,
    what: What,
}

enum What {
    Open {
        cloexec: bool,
    },
    Ioctl(Box<Ioctl>),
    Mmap {
        file: FileId,
        length: u64,
    },
    Change {
        start: u64,
        length: u64,
        arguments: [u64; 6],
    },
    /// Not recorded: changes of the descriptor table.
    Close {
        descriptor: i32,
        installed: Installation,
    },
    CloseRange {
        first: u32,
        last: u32,
        flags: u32,
    },
    Dup {
        from: i32,
        file: Option<FileId>,
        cloexec: bool,
    },
    SetCloexec {
        descriptor: i32,
        cloexec: bool,
    },
    Unshare,
}

struct Ioctl {
    file: FileId,
    argument: u64,
    before: Option<Vec<u8>>,
    log: Option<LogHead>,
}

/// The positions of the page in which the driver explains refusals.
#[derive(Clone, Copy)]
struct LogHead {
    read: i32,
    write: i32,
}

struct Thread {
    process: i32,
    table: Shared<DescriptorTable>,
    space: Shared<Space>,
    pending: Option<Pending>,
    /// Flags of the clone that it is in.
    clone_flags: u64,
}

#[derive(Default)]
struct Process {
    /// It has used the driver.
    client: bool,
    /// It has used the driver in its present address space.
    used: bool,
}

/// What the trace knows about the traced threads.
pub struct Watch {
    began: Instant,
    files: Files,
    threads: HashMap<i32, Thread>,
    processes: HashMap<i32, Process>,
    sessions: Sessions,
    /// Which generation the driver is of.
    pub recogniser: Recogniser,
    records: Vec<Record>,
}

/// Bits of clone(2) that matter here.
const CLONE_VM: u64 = libc::CLONE_VM as u64;
const CLONE_FILES: u64 = libc::CLONE_FILES as u64;
const CLONE_THREAD: u64 = libc::CLONE_THREAD as u64;

const CLOSE_RANGE_CLOEXEC: u32 = 4;

/// How a descriptor of the emulated driver looks in `/proc`.
const EMULATED: &str = "/memfd:davinci (deleted)";

impl Watch {
    /// Nothing is traced yet.
    pub fn new(recogniser: Recogniser) -> Self {
        Watch {
            began: Instant::now(),
            files: Files::default(),
            threads: HashMap::new(),
            processes: HashMap::new(),
            sessions: Sessions::default(),
            recogniser,
            records: Vec::new(),
        }
    }

    /// The calls that were completed since the last time, in the order of their completion.
    pub fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }

    /// Starts to watch the threads of a process that was running before, or was just started.
    pub fn adopt(&mut self, process: i32, threads: &[i32]) {
        let table: Shared<DescriptorTable> = Rc::default();
        let space: Shared<Space> = Rc::default();
        for tid in threads {
            self.add_thread(*tid, process, table.clone(), space.clone());
        }
        self.processes.entry(process).or_default();
        let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        for descriptor in open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
            self.find(process, descriptor);
        }
        drop((table, space));
    }

    fn add_thread(&mut self, tid: i32, process: i32, table: Shared<DescriptorTable>, space: Shared<Space>) {
        self.threads.insert(tid, Thread { process, table, space, pending: None, clone_flags: 0 });
    }

    /// The threads of a process.
    pub fn threads_of(&self, process: i32) -> Vec<i32> {
        self.threads.iter().filter(|(_, thread)| thread.process == process).map(|(tid, _)| *tid).collect()
    }

    /// The process of a thread.
    pub fn process_of(&self, tid: i32) -> Option<i32> {
        self.threads.get(&tid).map(|thread| thread.process)
    }

    /// A thread made another thread or process.
    pub fn cloned(&mut self, parent: i32, child: i32) {
        let Some(thread) = self.threads.get_mut(&parent) else { return };
        let (flags, process) = (thread.clone_flags, thread.process);
        let (table, space) = (thread.table.clone(), thread.space.clone());
        let process = if flags & CLONE_THREAD != 0 { process } else { child };
        let table = if flags & CLONE_FILES != 0 {
            table
        } else {
            let copy = self.files.copy(&table.borrow());
            self.leave_table(table);
            Rc::new(RefCell::new(copy))
        };
        let space = if flags & CLONE_VM != 0 {
            space
        } else {
            let copy = self.inherited(&space.borrow(), child);
            self.leave_space(space);
            Rc::new(RefCell::new(copy))
        };
        self.add_thread(child, process, table, space);
        self.processes.entry(process).or_default();
    }

    /// The mappings that a forked child has of its parent's. The real driver's are not inherited.
    fn inherited(&mut self, parent: &Space, child: i32) -> Space {
        let mut space = Space::default();
        if parent.0.is_empty() {
            return space;
        }
        let maps = fs::read_to_string(format!("/proc/{child}/maps")).unwrap_or_default();
        let mapped = |address: u64| {
            maps.lines().any(|line| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let number = |text: &str| u64::from_str_radix(text, 16).ok();
                range.and_then(|(low, high)| Some(number(low)? <= address && address < number(high)?)) == Some(true)
            })
        };
        for range in parent.0.iter().filter(|range| mapped(range.start)) {
            self.files.map(&mut space, range.start, range.end - range.start, range.file);
        }
        space
    }

    /// A process called exec: its other threads are gone, and `former` is what the caller's id was.
    pub fn exec(&mut self, process: i32, former: i32) {
        let caller = if self.threads.contains_key(&former) { former } else { process };
        for tid in self.threads_of(process).into_iter().filter(|tid| *tid != caller) {
            self.forget(tid);
        }
        let Some(thread) = self.threads.remove(&caller) else { return };
        self.end(process);
        let mut table = match Rc::try_unwrap(thread.table) {
            Ok(own) => own.into_inner(),
            // Exec makes a copy of a table that others share.
            Err(shared) => self.files.copy(&shared.borrow()),
        };
        self.files.exec(&mut table);
        self.leave_space(thread.space);
        self.add_thread(process, process, Rc::new(RefCell::new(table)), Rc::default());
        self.report_closed(process, process);
    }

    /// A thread is gone.
    pub fn gone(&mut self, tid: i32) {
        let process = self.process_of(tid);
        if process == Some(tid) {
            // The first thread of a process is reported last. One that was traced later than the
            // others may have left some behind.
            for other in self.threads_of(tid).into_iter().filter(|other| *other != tid) {
                self.forget(other);
            }
            self.end(tid);
        }
        self.forget(tid);
        if let Some(process) = process {
            self.report_closed(process, tid);
            if process == tid {
                self.processes.remove(&process);
            }
        }
    }

    /// The trace ends: calls that have not returned are recorded as such.
    pub fn finish(&mut self) {
        let mut threads: Vec<i32> = self.threads.keys().copied().collect();
        threads.sort_unstable();
        for tid in threads {
            self.give_up(tid);
        }
    }

    fn give_up(&mut self, tid: i32) {
        let Some(pending) = self.threads.get_mut(&tid).and_then(|thread| thread.pending.take()) else { return };
        if let What::Ioctl(ioctl) = &pending.what {
            self.files.release(ioctl.file);
        }
        if !pending.record.call.is_empty() {
            let us = pending.began.elapsed().as_micros() as u64;
            self.records.push(Record { ret: -1, unfinished: true, us, ..pending.record });
        }
    }

    fn forget(&mut self, tid: i32) {
        self.give_up(tid);
        if let Some(thread) = self.threads.remove(&tid) {
            self.leave_table(thread.table);
            self.leave_space(thread.space);
        }
    }

    fn leave_table(&mut self, table: Shared<DescriptorTable>) {
        self.files.leave_table(table);
    }

    fn leave_space(&mut self, space: Shared<Space>) {
        self.files.leave_space(space);
    }

    /// The address space in which a process used the driver is gone.
    fn end(&mut self, process: i32) {
        let used = self.processes.get_mut(&process).is_some_and(|process| std::mem::take(&mut process.used));
        if used {
            let record = Record { call: "end", pid: process, at: Some(self.now()), ..Record::default() };
            self.records.push(record);
        }
    }

    fn report_closed(&mut self, process: i32, tid: i32) {
        for file in self.files.take_closed() {
            let at = Some(self.now());
            self.records.push(Record { call: "close", pid: process, tid, file: Some(file), at, ..Record::default() });
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn uses_driver(&mut self, process: i32) {
        let process = self.processes.entry(process).or_default();
        (process.client, process.used) = (true, true);
    }

    /// The file of a descriptor that no seen call has opened: a file that was open before, or that
    /// another process sent.
    fn find(&mut self, tid: i32, descriptor: i32) -> Option<FileId> {
        let link = fs::read_link(format!("/proc/{tid}/fd/{descriptor}")).ok()?;
        let path = link.to_str().filter(|path| is_driver_link(path))?.to_owned();
        let process = self.process_of(tid)?;
        let table = self.threads.get(&tid)?.table.clone();
        let same = self.same_file(tid, descriptor);
        let file = match same {
            Some(file) => file,
            None => {
                let module = if path == hdc::PATH { "hdc" } else { "" };
                let file = self.files.open(module, false);
                let record = Record {
                    call: "found",
                    pid: process,
                    tid,
                    file: Some(file),
                    fd: Some(descriptor),
                    path: Some(path),
                    at: Some(self.now()),
                    ..Record::default()
                };
                self.records.push(record);
                file
            }
        };
        let cloexec = descriptor_is_cloexec(tid, descriptor);
        self.files.install(&mut table.borrow_mut(), descriptor, file, cloexec);
        self.leave_table(table);
        Some(file)
    }

    /// The file of a descriptor, if it is one that another watched process has too.
    fn same_file(&self, tid: i32, descriptor: i32) -> Option<FileId> {
        let known = self.threads.iter().flat_map(|(other, thread)| {
            thread.table.borrow().iter().map(|(number, file)| (*other, number, file)).collect::<Vec<_>>()
        });
        let mut same = known
            .filter(|(other, number, _)| ascend_ptrace::same_file((*other, *number), (tid, descriptor)) == Some(true));
        same.next().map(|(.., file)| file)
    }

    /// The file of a descriptor, if it is the driver's.
    fn file(&mut self, tid: i32, descriptor: i32) -> Option<FileId> {
        self.known(tid, descriptor).or_else(|| self.find(tid, descriptor))
    }

    fn known(&self, tid: i32, descriptor: i32) -> Option<FileId> {
        self.threads.get(&tid)?.table.borrow().get(descriptor)
    }

    /// A thread is about to make a system call. Returns whether its end must be seen too.
    pub fn enter(&mut self, tid: i32, number: i64, arguments: [u64; 6]) -> bool {
        let [a, b, c, ..] = arguments;
        let what = match number {
            libc::SYS_ioctl => return self.enter_ioctl(tid, a as i32, b as u32, c),
            libc::SYS_openat => return self.enter_open(tid, a as i32, b, c as i32),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => return self.enter_open(tid, libc::AT_FDCWD, a, b as i32),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_creat => {
                return self.enter_open(tid, libc::AT_FDCWD, a, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC);
            }
            libc::SYS_openat2 => {
                let mut flags = [0; 8];
                let read = ProcessMemory(tid).read(c, &mut flags).is_ok();
                return read && self.enter_open(tid, a as i32, b, u64::from_le_bytes(flags) as i32);
            }
            libc::SYS_mmap => return self.enter_mmap(tid, arguments),
            libc::SYS_munmap => return self.enter_change(tid, "munmap", None, arguments),
            libc::SYS_mprotect => return self.enter_change(tid, "mprotect", Some(c), arguments),
            libc::SYS_madvise => return self.enter_change(tid, "madvise", Some(c), arguments),
            libc::SYS_mbind => return self.enter_change(tid, "mbind", Some(c), arguments),
            libc::SYS_mlock | libc::SYS_mlock2 => return self.enter_change(tid, "mlock", Some(c), arguments),
            libc::SYS_mremap => return self.enter_change(tid, "mremap", Some(c), arguments),
            libc::SYS_close => match self.threads.get(&tid).and_then(|it| it.table.borrow().installation(a as i32)) {
                Some(installed) => What::Close { descriptor: a as i32, installed },
                None => return false,
            },
            libc::SYS_close_range => What::CloseRange { first: a as u32, last: b as u32, flags: c as u32 },
            libc::SYS_dup => self.dup(tid, a, false),
            libc::SYS_dup3 => self.dup(tid, a, c as i32 & libc::O_CLOEXEC != 0),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => self.dup(tid, a, false),
            libc::SYS_fcntl => match b as i32 {
                libc::F_DUPFD => self.dup(tid, a, false),
                libc::F_DUPFD_CLOEXEC => self.dup(tid, a, true),
                libc::F_SETFD if self.known(tid, a as i32).is_some() => {
                    What::SetCloexec { descriptor: a as i32, cloexec: c as i32 & libc::FD_CLOEXEC != 0 }
                }
                _ => return false,
            },
            libc::SYS_unshare if a & CLONE_FILES != 0 => What::Unshare,
            _ => {
                let flags = match number {
                    libc::SYS_clone => a,
                    libc::SYS_clone3 => {
                        let mut flags = [0; 8];
                        let _ = ProcessMemory(tid).read(a, &mut flags);
                        u64::from_le_bytes(flags)
                    }
                    #[cfg(target_arch = "x86_64")]
                    libc::SYS_vfork => CLONE_VM,
                    #[cfg(target_arch = "x86_64")]
                    libc::SYS_fork => 0,
                    _ => return false,
                };
                if let Some(thread) = self.threads.get_mut(&tid) {
                    thread.clone_flags = flags;
                }
                return false;
            }
        };
        // A table without files of the driver stays so.
        let concerns = match &what {
            What::Dup { file: None, .. } => number != libc::SYS_dup && number != libc::SYS_fcntl && self.has_files(tid),
            What::CloseRange { .. } | What::Unshare => self.has_files(tid),
            _ => true,
        };
        if concerns {
            self.pend(tid, Record::default(), what);
        }
        concerns
    }

    fn has_files(&self, tid: i32) -> bool {
        self.threads.get(&tid).is_some_and(|thread| thread.table.borrow().iter().next().is_some())
    }

    fn dup(&self, tid: i32, descriptor: u64, cloexec: bool) -> What {
        What::Dup { from: descriptor as i32, file: self.known(tid, descriptor as i32), cloexec }
    }

    fn pend(&mut self, tid: i32, mut record: Record, what: What) {
        let at = self.now();
        if let Some(thread) = self.threads.get_mut(&tid) {
            (record.pid, record.tid, record.at) = (thread.process, tid, Some(at));
            thread.pending = Some(Pending { record, began: Instant::now(), what });
        }
    }

    fn enter_open(&mut self, tid: i32, directory: i32, path: u64, flags: i32) -> bool {
        if flags & (libc::O_DIRECTORY | libc::O_PATH) != 0 {
            return false;
        }
        let Some(path) = driver_path(tid, directory, path) else { return false };
        if let Some(process) = self.process_of(tid) {
            self.uses_driver(process);
        }
        let flags_text = Some(format!("{flags:#x}"));
        let record = Record { call: "open", path: Some(path), flags: flags_text, ..Record::default() };
        self.pend(tid, record, What::Open { cloexec: flags & libc::O_CLOEXEC != 0 });
        true
    }

    fn enter_ioctl(&mut self, tid: i32, descriptor: i32, request: u32, argument: u64) -> bool {
        if FOREIGN_MAGICS.contains(&command::magic(request)) {
            return false;
        }
        let Some(file) = self.file(tid, descriptor) else { return false };
        let Some(process) = self.process_of(tid) else { return false };
        self.uses_driver(process);
        self.files.refer(file);
        let module = self.module(file, request);
        let command = self.recogniser.provisional(&module, request);
        let mut before = vec![0; record::argument_size(&module, command, request)];
        let memory = ProcessMemory(tid);
        let log = if module == "SVM" { log_head(&memory) } else { None };
        let before = memory.read(argument, &mut before).is_ok().then_some(before);
        let buffers = match &before {
            Some(before) => self.sessions.before(&module, command.map(|it| it.name), before, &memory),
            None => Vec::new(),
        };
        let record = Record {
            call: "ioctl",
            file: Some(file),
            value: Some(format!("{request:#x}")),
            cmd: command.map(|command| command.name),
            in_hex: before.as_deref().map(hex),
            addr: before.is_none().then(|| format!("{argument:#x}")),
            buffers,
            ..Record::default()
        };
        self.pend(tid, record, What::Ioctl(Box::new(Ioctl { file, argument, before, log })));
        true
    }

    /// The module that serves a request on a file. Of a file whose OPEN was not seen, the request
    /// tells.
    fn module(&mut self, file: FileId, request: u32) -> String {
        let Some(open) = self.files.get_mut(file) else { return String::new() };
        if open.module.is_empty() && !open.seen {
            guess(request).clone_into(&mut open.module);
        }
        open.module.clone()
    }

    fn enter_mmap(&mut self, tid: i32, arguments: [u64; 6]) -> bool {
        let [address, length, prot, flags, descriptor, offset] = arguments;
        let (flags, page) = (flags as i32, page_size());
        let anonymous = flags & libc::MAP_ANONYMOUS != 0;
        if !anonymous {
            if let Some(file) = self.file(tid, descriptor as i32) {
                if let Some(process) = self.process_of(tid) {
                    self.uses_driver(process);
                }
                let length = length.div_ceil(page).saturating_mul(page);
                let hint = address.div_ceil(page).saturating_mul(page);
                let record = Record {
                    call: "mmap",
                    file: Some(file),
                    flags: Some(format!("{flags:#x}")),
                    addr: Some(format!("{hint:#x}")),
                    mapped: (hint != 0).then(|| !range_is_free(tid, hint, length)),
                    len: Some(format!("{length:#x}")),
                    arg: Some(prot as i32 as i64),
                    offset: (offset != 0).then(|| format!("{offset:#x}")),
                    ..Record::default()
                };
                self.pend(tid, record, What::Mmap { file, length });
                return true;
            }
        }
        let large_file = !anonymous && (flags & libc::MAP_SHARED != 0 || length >> 32 != 0);
        if flags & libc::MAP_FIXED != 0 && (is_watched(address) || large_file) {
            return self.note_change(tid, "mmap", None, arguments);
        }
        false
    }

    fn enter_change(&mut self, tid: i32, name: &'static str, argument: Option<u64>, arguments: [u64; 6]) -> bool {
        let [start, length, ..] = arguments;
        (is_watched(start) || length >= HUGE) && self.note_change(tid, name, argument, arguments)
    }

    fn note_change(&mut self, tid: i32, name: &'static str, argument: Option<u64>, arguments: [u64; 6]) -> bool {
        let [start, length, ..] = arguments;
        let client = self.process_of(tid).and_then(|process| self.processes.get(&process));
        if !client.is_some_and(|process| process.client) {
            return false;
        }
        let record = Record {
            call: name,
            addr: Some(format!("{start:#x}")),
            len: Some(format!("{length:#x}")),
            arg: argument.map(|argument| argument as i64),
            mapped: (length >= DRIVER_AREA).then(|| !range_is_free(tid, start, length)),
            ..Record::default()
        };
        self.pend(tid, record, What::Change { start, length, arguments });
        true
    }

    /// A thread has returned from a system call whose beginning was seen.
    pub fn leave(&mut self, tid: i32, value: i64) {
        let Some(thread) = self.threads.get_mut(&tid) else { return };
        let Some(Pending { mut record, began, what }) = thread.pending.take() else { return };
        let (process, table, space) = (thread.process, thread.table.clone(), thread.space.clone());
        let done = !(-4095..0).contains(&value);
        record.ret = if done { value } else { -1 };
        record.errno = (!done).then(|| errno_name(-value));
        record.us = began.elapsed().as_micros() as u64;
        match what {
            What::Open { cloexec } => {
                if done {
                    let module = if record.path.as_deref() == Some(hdc::PATH) { "hdc" } else { "" };
                    let file = self.files.open(module, true);
                    self.files.install(&mut table.borrow_mut(), value as i32, file, cloexec);
                    (record.file, record.fd, record.ret) = (Some(file), Some(value as i32), 0);
                }
                self.records.push(record);
            }
            What::Ioctl(ioctl) => {
                let file = ioctl.file;
                self.leave_ioctl(tid, record, *ioctl, done);
                self.files.release(file);
            }
            What::Mmap { file, length } => {
                if done {
                    self.files.map(&mut space.borrow_mut(), value as u64, length, file);
                }
                self.records.push(record);
            }
            What::Change { start, length, arguments } => {
                if done {
                    self.change(record.call, start, length, arguments, value, &mut space.borrow_mut());
                }
                self.records.push(record);
            }
            // EINTR and EIO of close(2) come after the descriptor is gone. Another thread may have
            // been given the number since then.
            What::Close { descriptor, installed } if value != -i64::from(libc::EBADF) => {
                let mut table = table.borrow_mut();
                if table.installation(descriptor) == Some(installed) {
                    self.files.remove(&mut table, descriptor);
                }
            }
            What::CloseRange { first, last, flags } if done => {
                if flags & libc::CLOSE_RANGE_UNSHARE != 0 {
                    self.unshare(tid);
                }
                let table = self.threads.get(&tid).map(|thread| thread.table.clone()).unwrap_or_default();
                let inside = table.borrow().range(first, last);
                for descriptor in inside {
                    if flags & CLOSE_RANGE_CLOEXEC != 0 {
                        table.borrow_mut().set_cloexec(descriptor, true);
                    } else {
                        self.files.remove(&mut table.borrow_mut(), descriptor);
                    }
                }
                self.leave_table(table);
            }
            // dup2 to the same number changes nothing.
            What::Dup { from, file: Some(file), cloexec } if done && value != i64::from(from) => {
                self.files.install(&mut table.borrow_mut(), value as i32, file, cloexec);
            }
            What::Dup { file: None, .. } if done => self.files.remove(&mut table.borrow_mut(), value as i32),
            What::SetCloexec { descriptor, cloexec } if done => {
                table.borrow_mut().set_cloexec(descriptor, cloexec);
            }
            What::Unshare if done => self.unshare(tid),
            _ => {}
        }
        self.leave_table(table);
        self.leave_space(space);
        self.report_closed(process, tid);
    }

    fn unshare(&mut self, tid: i32) {
        let Some(thread) = self.threads.get(&tid) else { return };
        let shared = thread.table.clone();
        let copy = Rc::new(RefCell::new(self.files.copy(&shared.borrow())));
        let former = match self.threads.get_mut(&tid) {
            Some(thread) => std::mem::replace(&mut thread.table, copy),
            None => copy,
        };
        drop(shared);
        self.leave_table(former);
    }

    fn change(&mut self, call: &str, start: u64, length: u64, arguments: [u64; 6], value: i64, space: &mut Space) {
        match call {
            "munmap" | "mmap" => self.files.unmap(space, start, length),
            "mremap" => {
                let file = space.0.iter().find(|range| range.start <= start && start < range.end).map(|it| it.file);
                if let Some(file) = file {
                    self.files.refer(file);
                    self.files.unmap(space, start, length);
                    self.files.map(space, value as u64, arguments[2], file);
                    self.files.release(file);
                }
            }
            _ => {}
        }
    }

    fn leave_ioctl(&mut self, tid: i32, mut record: Record, ioctl: Ioctl, done: bool) {
        let memory = ProcessMemory(tid);
        let request = record.value.as_deref().and_then(hex_number).unwrap_or(0) as u32;
        let module = self.module(ioctl.file, request);
        if let Some(before) = &ioctl.before {
            let mut after = vec![0; before.len()];
            let after = memory.read(ioctl.argument, &mut after).is_ok().then_some(after);
            if done {
                let filled = after.as_deref().unwrap_or(before);
                self.sessions.after(&module, record.cmd, before, filled, &memory, &mut record.buffers);
                if record.cmd == Some("OPEN") && module != "hdc" {
                    if let Some(file) = self.files.get_mut(ioctl.file) {
                        (file.module, file.seen) = (super::name(before), true);
                    }
                }
            }
            record.out_hex = after.filter(|after| after != before).as_deref().map(hex);
        }
        if !done && module == "SVM" {
            record.log = ioctl.log.and_then(|log| added_sentences(&memory, log));
        }
        self.recogniser.observe(&module, request, &record);
        self.records.push(record);
    }

    /// The buffers of a record whose command turned out to be another one are not known.
    pub fn rename(record: &mut Record, name: Option<&'static str>) {
        if record.cmd != name {
            record.cmd = name;
            record.buffers = Vec::<Buffer>::new();
        }
    }
}

/// The number in a text such as `0x5a00`.
pub fn hex_number(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The name of an errno, those of the kernel alone included.
fn errno_name(number: i64) -> String {
    match number {
        512 => "ERESTARTSYS".into(),
        513 => "ERESTARTNOINTR".into(),
        514 => "ERESTARTNOHAND".into(),
        516 => "ERESTART_RESTARTBLOCK".into(),
        number => record::errno_name(number as i32),
    }
}

/// Whether a call was interrupted by a signal: the kernel repeats it, or returns EINTR.
pub fn was_interrupted(record: &Record) -> bool {
    record.errno.as_deref().is_some_and(|errno| errno.starts_with("ERESTART"))
}

fn is_watched(address: u64) -> bool {
    (WATCHED_START..WATCHED_END).contains(&address)
}

fn is_driver_link(path: &str) -> bool {
    path == EMULATED || ["/dev/davinci", hdc::PATH, "/dev/devmm_svm"].iter().any(|prefix| path.starts_with(prefix))
}

fn descriptor_is_cloexec(tid: i32, descriptor: i32) -> bool {
    let info = fs::read_to_string(format!("/proc/{tid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_CLOEXEC != 0)
}

/// The positions of the error page of a process, if it has one.
fn log_head(memory: &ProcessMemory) -> Option<LogHead> {
    let mut head = [0; 52];
    memory.read(klog::SVM_ERRORS, &mut head).ok()?;
    let number = |at: usize| i32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    (head[..klog::MAGIC.len()] == klog::MAGIC).then(|| LogHead { read: number(44), write: number(48) })
}

/// What the driver added to the error page since `before`. A page that was read to its end is used
/// from its start again.
fn added_sentences(memory: &ProcessMemory, before: LogHead) -> Option<String> {
    let now = log_head(memory)?;
    let start = if before.read >= before.write { 0 } else { before.write.max(0) as usize };
    let mut text = [0; klog::CAPACITY];
    memory.read(klog::SVM_ERRORS + klog::TEXT as u64, &mut text).ok()?;
    let end = match (now.write.max(0) as usize).min(klog::CAPACITY) {
        // A sentence that did not fit was cut, and both positions became 0.
        0 if before.write > 0 => {
            text.iter().skip(start).position(|byte| *byte == 0).map_or(text.len(), |at| start + at)
        }
        end => end,
    };
    let bytes: Vec<u8> = text.get(start..end)?.iter().copied().filter(|byte| *byte != 0).collect();
    (!bytes.is_empty()).then(|| printable(String::from_utf8_lossy(&bytes).trim_end()))
}

fn page_size() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().map_or(4096, |size| size as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::{getpid, gettid};

    #[test]
    fn a_number_that_is_given_away_before_the_end_of_its_close_is_seen_stays_open() {
        const PATH: &std::ffi::CStr = c"/dev/davinci_manager";
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (end, waits) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                sender.send(gettid().as_raw()).unwrap();
                let _ = waits.recv();
            });
            let (one, other) = (gettid().as_raw(), receiver.recv().unwrap());
            let mut watch = Watch::new(Recogniser::new(None));
            watch.adopt(getpid().as_raw(), &[one, other]);
            let open = [libc::AT_FDCWD as u64, PATH.as_ptr() as u64, libc::O_RDWR as u64, 0, 0, 0];
            let of = |descriptor: u64| [descriptor, 0, 0, 0, 0, 0];
            assert!(watch.enter(one, libc::SYS_openat, open));
            watch.leave(one, 1005);
            assert!(watch.enter(one, libc::SYS_dup, of(1005)));
            watch.leave(one, 1006);
            // The kernel closes 1005 and gives it to the other thread, whose end is seen first.
            assert!(watch.enter(one, libc::SYS_close, of(1005)));
            assert!(watch.enter(other, libc::SYS_openat, open));
            watch.leave(other, 1005);
            watch.leave(one, 0);
            let calls = |watch: &mut Watch| {
                let records = watch.take_records().into_iter();
                records.map(|record| (record.call, record.tid, record.file)).collect::<Vec<_>>()
            };
            assert_eq!(calls(&mut watch), [("open", one, Some(1)), ("open", other, Some(2))]);
            for (tid, descriptor, file) in [(other, 1005, 2), (one, 1006, 1)] {
                assert!(watch.enter(tid, libc::SYS_close, of(descriptor)));
                watch.leave(tid, 0);
                assert_eq!(calls(&mut watch), [("close", tid, Some(file))]);
            }
            drop(end);
        });
    }
}
