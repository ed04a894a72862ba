//! All threads of all clients, and whether each of them waits.
//!
//! A seeded schedule chooses only while no client runs. Linux has no call that tells so; this is
//! read from `/proc`. A thread that sleeps in both of two looks and did not run in between
//! (`schedstat` counts its turns on a CPU) has slept all the time. So if that is true of every
//! thread, there was a moment at which all of them slept, and nobody was left who could wake one.
//!
//! New threads and processes are found by their ids: `/proc/loadavg` has the last one that was
//! given out.

use super::EMULATORS;
use libc::c_long;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A thread of a client.
struct Watched {
    tgid: i32,
    /// The process that started its process.
    parent: i32,
    /// Threads in the order of their creation.
    order: u64,
    /// Its number in the schedule, from its first call on.
    number: Option<u32>,
    /// Its `syscall` and `schedstat`, unless there are too many threads to keep them open.
    files: Option<[File; 2]>,
    /// Nanoseconds on a CPU, at the last choice.
    ran_before: u64,
}

/// What a thread does at a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// It runs, or waits for a CPU.
    Runs,
    /// It waits for something that Linux ends soon: a disk, a page.
    SoonBack,
    /// It sleeps in a system call that waits for somebody else, perhaps with a time limit.
    Waits { timed: bool },
    /// A signal stopped it.
    Stopped,
    /// It has ended.
    Ended,
}

/// What all threads together do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Some thread runs.
    Busy,
    /// All wait; whether one of them with a time limit.
    Quiet { timed: bool },
}

/// The threads of all clients.
pub struct ClientThreads {
    own: i32,
    /// The number of filters of a thread that is not attached.
    filters: u32,
    threads: BTreeMap<i32, Watched>,
    loadavg: Option<File>,
    /// The last id that was given out before the last look.
    last_id: Option<i32>,
    /// Ids that were given out and had no thread yet.
    unborn: Vec<i32>,
    found: u64,
    numbers: u32,
    /// The first process that made a call, except this one.
    first: Option<i32>,
}

/// More new ids than this are not looked up one by one.
const MOST_NEW_IDS: i32 = 2000;

/// Files are kept open for so many threads: a process may open 1024 in most places.
const MOST_WITH_FILES: usize = 100;

/// A thread that used a CPU for this long without a call computes.
const COMPUTES: Duration = Duration::from_millis(100);

/// A thread that waits for this long in a call that is not known to wait waits all the same.
const UNKNOWN_WAIT: Duration = Duration::from_millis(300);

/// No thread is waited for longer, however busy the machine is.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl ClientThreads {
    /// The clients of this process, and of its descendants. Called by the server's thread.
    pub fn new() -> Self {
        let own = std::process::id() as i32;
        let tid = nix::unistd::gettid().as_raw();
        let mut threads = ClientThreads {
            own,
            filters: Status::read(tid).map_or(0, |status| status.filters),
            threads: BTreeMap::new(),
            loadavg: File::open("/proc/loadavg").ok(),
            last_id: None,
            unborn: Vec::new(),
            found: 0,
            numbers: 0,
            first: None,
        };
        // Clients come later than this.
        threads.last_id = threads.newest_id();
        threads
    }

    /// The number of a thread in the schedule, if it has one.
    pub fn number(&self, tid: i32) -> Option<u32> {
        self.threads.get(&tid).and_then(|thread| thread.number)
    }

    /// Gives numbers to threads that wait in a call for the first time. The order is that of their
    /// parents, then of their creation, whatever order their calls came in.
    pub fn number_all(&mut self, waiting: &[i32]) {
        let first = |threads: &BTreeMap<i32, Watched>, tgid: i32| {
            threads.values().filter(|it| it.tgid == tgid).filter_map(|it| it.number).min()
        };
        let mut new: Vec<(u32, u64, i32)> = Vec::new();
        for tid in waiting {
            let Some(thread) = self.threads.get(tid).filter(|thread| thread.number.is_none()) else { continue };
            let kin = first(&self.threads, thread.tgid).or_else(|| first(&self.threads, thread.parent));
            new.push((kin.unwrap_or(u32::MAX), thread.order, *tid));
        }
        new.sort_unstable();
        for (_, _, tid) in new {
            if let Some(thread) = self.threads.get_mut(&tid) {
                thread.number = Some(self.numbers);
                self.numbers += 1;
                if thread.tgid != self.own {
                    self.first.get_or_insert(thread.tgid);
                }
            }
        }
    }

    /// Adds a thread that was attached or made a call, if it is not known.
    pub fn add(&mut self, tid: i32) {
        if self.threads.contains_key(&tid) {
            return;
        }
        // Those that were started before it come first, whoever calls first.
        self.discover();
        if !self.threads.contains_key(&tid) {
            if let Some(status) = Status::read(tid) {
                self.watch(tid, &status);
            }
        }
    }

    fn watch(&mut self, tid: i32, status: &Status) {
        let (tgid, parent, order) = (status.tgid, status.parent, self.found);
        let mut thread = Watched { tgid, parent, order, number: None, files: None, ran_before: 0 };
        let (Ok(syscall), Ok(schedstat)) = (thread.open(tid, "syscall"), thread.open(tid, "schedstat")) else {
            return;
        };
        if self.threads.len() < MOST_WITH_FILES {
            thread.files = Some([syscall, schedstat]);
        }
        self.found += 1;
        self.threads.insert(tid, thread);
    }

    /// The last id that was given out.
    fn newest_id(&self) -> Option<i32> {
        let mut text = [0; 128];
        let length = self.loadavg.as_ref()?.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..length]).ok()?.split_ascii_whitespace().nth(4)?.parse().ok()
    }

    /// Looks for new threads.
    fn discover(&mut self) {
        let last = self.newest_id();
        let new: Vec<i32> = match (self.last_id, last) {
            (Some(before), Some(last)) if last == before && self.unborn.is_empty() => return,
            (Some(before), Some(last)) if last >= before && last - before <= MOST_NEW_IDS => {
                std::mem::take(&mut self.unborn).into_iter().chain(before + 1..=last).collect()
            }
            _ => every_id(),
        };
        self.last_id = last;
        for tid in new {
            if self.threads.contains_key(&tid) {
                continue;
            }
            let Some(status) = Status::read(tid) else {
                self.unborn.push(tid);
                continue;
            };
            let known = |tgid: i32| self.threads.values().any(|thread| thread.tgid == tgid);
            // Beside another emulator, threads and children of this process are known from their
            // first calls on: they may be clients of the other one.
            let alone = EMULATORS.load(Ordering::Relaxed) <= 1;
            let related = |tgid: i32| if tgid == self.own { alone } else { known(tgid) };
            if status.filters > self.filters && (related(status.tgid) || related(status.parent)) {
                self.watch(tid, &status);
            }
        }
    }

    /// Whether all threads wait that are not in `waiting`, which wait for the schedule.
    pub fn look(&mut self, waiting: &[i32]) -> Look {
        let mut sleepers: Vec<(i32, u64)> = Vec::new();
        let mut some_timed = false;
        self.discover();
        let tids: Vec<i32> = self.threads.keys().copied().filter(|tid| !waiting.contains(tid)).collect();
        for tid in tids {
            let Some(thread) = self.threads.get(&tid) else { continue };
            let (turns, _) = thread.runs(tid);
            match thread.doing(tid) {
                Doing::Ended => drop(self.threads.remove(&tid)),
                Doing::Waits { timed } => {
                    some_timed |= timed;
                    sleepers.push((tid, turns));
                }
                Doing::Stopped => sleepers.push((tid, turns)),
                Doing::Runs | Doing::SoonBack => return Look::Busy,
            }
        }
        if !sleepers.is_empty() {
            let count = self.threads.len();
            self.discover();
            if self.threads.len() != count {
                return Look::Busy;
            }
            for (tid, turns) in sleepers {
                let Some(thread) = self.threads.get(&tid) else { continue };
                let asleep = matches!(thread.doing(tid), Doing::Waits { .. } | Doing::Stopped);
                if !asleep || thread.runs(tid).0 != turns {
                    return Look::Busy;
                }
            }
        }
        // While all clients wait, none of them is about to have a child.
        self.unborn.clear();
        Look::Quiet { timed: some_timed }
    }

    /// Whether those that are busy since a time have been so for too long to be waited for.
    pub fn is_guess_due(&self, waiting: &[i32], since: Instant) -> bool {
        let time = since.elapsed();
        if time < COMPUTES {
            return false;
        }
        time >= LONGEST_WAIT
            || self.threads.iter().filter(|(tid, _)| !waiting.contains(tid)).all(|(tid, thread)| {
                match thread.doing(*tid) {
                    Doing::Runs => thread.runs(*tid).1.saturating_sub(thread.ran_before) >= COMPUTES.as_nanos() as u64,
                    Doing::SoonBack => time >= UNKNOWN_WAIT,
                    Doing::Waits { .. } | Doing::Stopped | Doing::Ended => true,
                }
            })
    }

    /// Remembers how long each thread has run.
    pub fn chosen(&mut self, tid: i32) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.ran_before = thread.runs(tid).1;
        }
    }

    /// The ids of living client processes, except this one, with those that no call came from yet.
    pub fn living(&mut self) -> Vec<i32> {
        self.discover();
        let ids = self.threads.iter().filter(|(tid, thread)| thread.doing(**tid) != Doing::Ended);
        let mut ids: Vec<i32> = ids.map(|(_, thread)| thread.tgid).filter(|tgid| *tgid != self.own).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Whether threads of this process are clients.
    pub fn has_own(&self) -> bool {
        self.threads.values().any(|thread| thread.tgid == self.own)
    }

    /// Client processes in the order of their numbers, except this one and the first other one.
    pub fn processes(&self) -> Vec<i32> {
        let mut numbers: BTreeMap<i32, u32> = BTreeMap::new();
        for thread in self.threads.values() {
            if let Some(number) = thread.number {
                let first = numbers.entry(thread.tgid).or_insert(number);
                *first = number.min(*first);
            }
        }
        let mut processes: Vec<(u32, i32)> = numbers.into_iter().map(|(tgid, number)| (number, tgid)).collect();
        processes.sort_unstable();
        let processes = processes.into_iter().map(|(_, tgid)| tgid);
        processes.filter(|tgid| *tgid != self.own && Some(*tgid) != self.first).collect()
    }

    /// What each thread does, as sentences.
    pub fn describe(&self, waiting: &[i32]) -> Vec<String> {
        let thread = |(tid, thread): (&i32, &Watched)| {
            let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", thread.tgid)).unwrap_or_default();
            let name = name.trim();
            let doing = match thread.doing(*tid) {
                _ if waiting.contains(tid) => "waits for the driver".to_owned(),
                Doing::Runs => "runs".into(),
                Doing::SoonBack => "waits for Linux".into(),
                Doing::Waits { .. } => format!("waits in {}", thread.call(*tid).map_or("a call", name_of)),
                Doing::Stopped => "is stopped".into(),
                Doing::Ended => return None,
            };
            Some(format!("process {} ({name}), thread {tid}: {doing}", thread.tgid))
        };
        self.threads.iter().filter_map(thread).collect()
    }
}

impl Watched {
    fn open(&self, tid: i32, name: &str) -> io::Result<File> {
        File::open(format!("/proc/{}/task/{tid}/{name}", self.tgid))
    }

    /// What one of its files says now.
    fn read<'a>(&self, tid: i32, name: &str, text: &'a mut [u8; 256]) -> io::Result<&'a str> {
        let length = match &self.files {
            Some([syscall, _]) if name == "syscall" => syscall.read_at(text, 0)?,
            Some([_, schedstat]) => schedstat.read_at(text, 0)?,
            None => self.open(tid, name)?.read_at(text, 0)?,
        };
        Ok(std::str::from_utf8(&text[..length]).unwrap_or(""))
    }

    /// How often it had a turn on a CPU, and for how long in nanoseconds.
    fn runs(&self, tid: i32) -> (u64, u64) {
        let mut text = [0; 256];
        let text = self.read(tid, "schedstat", &mut text).unwrap_or("");
        let mut numbers = text.split_ascii_whitespace().map(|number| number.parse().unwrap_or(0));
        let ran = numbers.next().unwrap_or(0);
        (numbers.nth(1).unwrap_or(0), ran)
    }

    /// The number of the system call in which it sleeps.
    fn call(&self, tid: i32) -> Option<c_long> {
        let mut text = [0; 256];
        self.read(tid, "syscall", &mut text).ok()?.split(' ').next()?.parse().ok()
    }

    fn doing(&self, tid: i32) -> Doing {
        let mut text = [0; 256];
        let Ok(text) = self.read(tid, "syscall", &mut text) else { return self.state(tid) };
        if text.starts_with("running") {
            return Doing::Runs;
        }
        let mut words = text.split_ascii_whitespace();
        let number = words.next().and_then(|word| word.parse::<c_long>().ok());
        let mut arguments = [0u64; 6];
        for (argument, word) in arguments.iter_mut().zip(words) {
            *argument = u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or(0);
        }
        match number {
            Some(number) if number >= 0 => match wait(number, &arguments) {
                Some(timed) => Doing::Waits { timed },
                // A signal can stop a thread in any call.
                None => self.state(tid),
            },
            _ => self.state(tid),
        }
    }

    /// What `stat` says of a thread that is not in a known wait.
    fn state(&self, tid: i32) -> Doing {
        let stat = fs::read_to_string(format!("/proc/{}/task/{tid}/stat", self.tgid)).unwrap_or_default();
        let state = stat.rfind(')').and_then(|end| stat[end + 1..].trim_start().chars().next());
        match state {
            None | Some('Z' | 'X' | 'x') => Doing::Ended,
            Some('T' | 't') => Doing::Stopped,
            Some('R') => Doing::Runs,
            Some(_) => Doing::SoonBack,
        }
    }
}

/// Whether a system call waits for somebody else, and then whether with a time limit.
fn wait(number: c_long, arguments: &[u64; 6]) -> Option<bool> {
    let milliseconds = |index: usize| arguments[index] as i32 > 0;
    let pointer = |index: usize| arguments[index] != 0;
    Some(match number {
        // The other commands of a futex do not wait.
        libc::SYS_futex => pointer(3),
        libc::SYS_read | libc::SYS_readv | libc::SYS_recvmsg | libc::SYS_recvfrom => false,
        libc::SYS_write | libc::SYS_writev | libc::SYS_sendmsg | libc::SYS_sendto => false,
        libc::SYS_accept | libc::SYS_accept4 | libc::SYS_connect => false,
        libc::SYS_ppoll => pointer(2),
        libc::SYS_pselect6 => pointer(4),
        libc::SYS_epoll_pwait => milliseconds(3),
        libc::SYS_epoll_pwait2 => pointer(3),
        libc::SYS_wait4 | libc::SYS_waitid | libc::SYS_rt_sigsuspend => false,
        libc::SYS_rt_sigtimedwait => pointer(2),
        // What a stop interrupted goes on as the second one.
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_restart_syscall => true,
        libc::SYS_flock | libc::SYS_fcntl | libc::SYS_semop | libc::SYS_semtimedop => false,
        libc::SYS_msgrcv | libc::SYS_msgsnd => false,
        // As long as the child of a vfork uses the memory.
        libc::SYS_clone | libc::SYS_clone3 => false,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork | libc::SYS_pause => false,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => milliseconds(2),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => pointer(4),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => milliseconds(3),
        _ => return None,
    })
}

/// The name of a call that waits.
fn name_of(number: c_long) -> &'static str {
    match number {
        libc::SYS_futex => "a futex: a lock, a condition or the end of a thread",
        libc::SYS_read | libc::SYS_readv => "a read",
        libc::SYS_write | libc::SYS_writev => "a write",
        libc::SYS_recvmsg | libc::SYS_recvfrom => "a receive",
        libc::SYS_wait4 | libc::SYS_waitid => "a wait for a child",
        libc::SYS_accept | libc::SYS_accept4 => "an accept",
        _ => "a call that waits",
    }
}

/// The ids of all threads of all processes.
fn every_id() -> Vec<i32> {
    let numbers = |path: &str| -> Vec<i32> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let mut ids: Vec<i32> = numbers("/proc").iter().flat_map(|pid| numbers(&format!("/proc/{pid}/task"))).collect();
    ids.sort_unstable();
    ids
}

/// The lines of `/proc/ID/status` that matter here.
struct Status {
    tgid: i32,
    parent: i32,
    filters: u32,
}

impl Status {
    fn read(id: i32) -> Option<Status> {
        // Without room the whole file is read in many small parts.
        let mut text = String::with_capacity(4096);
        File::open(format!("/proc/{id}/status")).ok()?.read_to_string(&mut text).ok()?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<i32>().ok();
        Some(Status {
            tgid: field("Tgid:")?,
            parent: field("PPid:")?,
            filters: field("Seccomp_filters:").unwrap_or(0) as u32,
        })
    }
}

/// Sends a signal to a process.
pub fn send(tgid: i32, signal: i32) {
    if let Ok(pidfd) = super::client_process::open_pidfd(tgid) {
        use std::os::fd::AsRawFd;
        // SAFETY: takes integers and a null pointer; the descriptor is a process.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                pidfd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
    }
}

/// The signals that a process handles or ignores, of those that end no program that expects them.
pub fn harmless_signals(tgid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{tgid}/status")).unwrap_or_default();
    let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let mut signals = vec![libc::SIGURG, libc::SIGWINCH];
    let handled = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM, libc::SIGIO, libc::SIGCHLD];
    signals.extend(handled.into_iter().filter(|signal| caught & 1 << (signal - 1) != 0));
    signals
}
