//! Stops the threads of a program at its system calls, and lets them continue unaware of it.
//!
//! With a filter of its own a program stops only at calls that may be the driver's. A process that
//! ran before has no such filter, and under `emulate` the emulator's own filter comes first: these
//! stop at every call. Everything else is passed on unchanged: signals, stops by SIGSTOP and the
//! like, exec, the deaths of threads and processes.

use super::watch::Watch;
use ascend_ptrace::{Call, Event, How, Report};
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;

/// How the traced program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this status.
    Exited(i32),
    /// It was killed by this signal.
    Killed(i32),
    /// It still runs: the trace was ended before.
    Detached,
}

/// Threads that are traced.
pub struct Tracer {
    /// Whether each thread waits for the end of a call.
    threads: HashMap<i32, bool>,
    /// New threads that stopped before their creator reported them.
    early: HashSet<i32>,
    /// Threads that their creator reported and that have not stopped yet.
    expected: HashSet<i32>,
    /// The program's filter stops it at the calls that matter.
    filtered: bool,
    /// The filter has caught an open of the program's first process.
    caught: bool,
    root: i32,
    /// A program that the tracer started, and not one that ran before.
    started: bool,
    leaving: bool,
    ending: Option<Ending>,
}

/// The signals that the tracer waits for.
pub fn signals() -> SigSet {
    SigSet::from_iter([Signal::SIGCHLD, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP])
}

impl Tracer {
    /// Traces a process that has stopped itself before its exec: see [`super::Child`].
    pub fn of_child(pid: i32, watch: &mut Watch) -> Result<Self, Errno> {
        ascend_ptrace::seize(pid, true)?;
        watch.adopt(pid, &[pid]);
        kill(Pid::from_raw(pid), Signal::SIGCONT)?;
        Ok(Tracer::new(pid, true, HashMap::from([(pid, false)])))
    }

    /// Traces a process that runs, with all its threads.
    pub fn of_running(pid: i32, watch: &mut Watch) -> Result<Self, Errno> {
        let mut tracer = Tracer::new(pid, false, HashMap::new());
        // Threads that are made meanwhile are found by the next look, or are traced already.
        loop {
            let mut found = false;
            for tid in threads(pid).map_err(|_| Errno::ESRCH)? {
                if tracer.threads.contains_key(&tid) {
                    continue;
                }
                match ascend_ptrace::seize(tid, false) {
                    Ok(()) => {
                        let _ = ascend_ptrace::interrupt(tid);
                        tracer.threads.insert(tid, false);
                        found = true;
                    }
                    Err(Errno::ESRCH) if tid != pid => {}
                    Err(Errno::EPERM) if is_ours(tid) => {}
                    Err(error) => {
                        tracer.abandon();
                        return Err(error);
                    }
                }
            }
            if !found {
                break;
            }
        }
        let threads: Vec<i32> = tracer.threads.keys().copied().collect();
        watch.adopt(pid, &threads);
        Ok(tracer)
    }

    fn new(root: i32, started: bool, threads: HashMap<i32, bool>) -> Self {
        Tracer {
            threads,
            early: HashSet::new(),
            expected: HashSet::new(),
            filtered: started,
            caught: false,
            root,
            started,
            leaving: false,
            ending: None,
        }
    }

    /// Whether the program stops only at the calls that matter.
    pub fn is_filtered(&self) -> bool {
        self.filtered
    }

    /// Ignores the program's filter.
    pub fn stop_at_every_call(&mut self) {
        self.filtered = false;
    }

    /// How the program ended; `None` while it runs.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// Handles everything that has been reported. Returns whether anything is traced still.
    pub fn step(&mut self, watch: &mut Watch) -> bool {
        let mut reports = Vec::new();
        let alive = loop {
            match ascend_ptrace::poll() {
                Ok(Some((tid, report))) => {
                    let call = match report {
                        Report::AtCall | Report::Event(Event::Filtered) => ascend_ptrace::call(tid).ok().flatten(),
                        _ => None,
                    };
                    reports.push((tid, report, call));
                }
                Ok(None) => break true,
                Err(Errno::EINTR) => {}
                Err(_) => break false,
            }
        };
        // The kernel reports in the order of threads, not of time. What a call did, a later call of
        // another thread may use: all that has ended comes first.
        reports.sort_by_key(|(_, report, call)| match (report, call) {
            (_, Some(Call::Exit(_))) => 0,
            (Report::Exited(_) | Report::Killed(_), _) => 1,
            (_, Some(_)) => 3,
            _ => 2,
        });
        for (tid, report, call) in reports {
            self.handle(tid, report, call, watch);
        }
        alive && !(self.threads.is_empty() && self.expected.is_empty() && self.early.is_empty())
    }

    fn handle(&mut self, tid: i32, report: Report, call: Option<Call>, watch: &mut Watch) {
        match report {
            Report::Exited(status) => self.gone(tid, Ending::Exited(status), watch),
            Report::Killed(signal) => self.gone(tid, Ending::Killed(signal), watch),
            Report::Signal(signal) => self.go(tid, signal),
            Report::GroupStop(_) if self.leaving => self.go(tid, 0),
            // It stays stopped, and reports a trap when SIGCONT comes.
            Report::GroupStop(_) => drop(ascend_ptrace::listen(tid)),
            Report::AtCall => {
                self.at_call(tid, call, watch);
                self.go(tid, 0);
            }
            Report::Event(Event::Filtered) => {
                if self.filtered {
                    let opens = matches!(call, Some(Call::Entry { number: libc::SYS_openat, .. }));
                    self.caught |= tid == self.root && opens;
                    self.at_call(tid, call, watch);
                }
                self.go(tid, 0);
            }
            Report::Event(Event::Clone) => {
                if let Ok(child) = ascend_ptrace::message(tid) {
                    self.threads.insert(child, false);
                    watch.cloned(tid, child);
                    if self.early.remove(&child) {
                        self.go(child, 0);
                    } else {
                        self.expected.insert(child);
                    }
                }
                self.go(tid, 0);
            }
            Report::Event(Event::Exec) => {
                self.exec(tid, watch);
                self.go(tid, 0);
            }
            Report::Event(Event::Trap) if !self.threads.contains_key(&tid) => {
                self.early.insert(tid);
            }
            Report::Event(_) => {
                self.expected.remove(&tid);
                self.go(tid, 0);
            }
        }
    }

    fn at_call(&mut self, tid: i32, call: Option<Call>, watch: &mut Watch) {
        let Some(awaits) = self.threads.get_mut(&tid) else { return };
        match call {
            Some(Call::Entry { number, arguments }) => *awaits = watch.enter(tid, number, arguments),
            Some(Call::Exit(value)) if *awaits => {
                *awaits = false;
                watch.leave(tid, value);
            }
            _ => {}
        }
    }

    fn exec(&mut self, tid: i32, watch: &mut Watch) {
        let former = ascend_ptrace::message(tid).unwrap_or(tid);
        for other in watch.threads_of(tid) {
            self.threads.remove(&other);
            self.expected.remove(&other);
        }
        self.threads.insert(tid, false);
        watch.exec(tid, former);
        if tid == self.root && self.started && !std::mem::replace(&mut self.caught, true) {
            // The child opened a file, which its filter catches, and no stop was seen: another
            // filter, the emulator's, comes first.
            self.filtered = false;
        }
    }

    fn gone(&mut self, tid: i32, ending: Ending, watch: &mut Watch) {
        self.threads.remove(&tid);
        self.early.remove(&tid);
        self.expected.remove(&tid);
        watch.gone(tid);
        if tid == self.root {
            self.ending = Some(ending);
        }
    }

    /// Lets a stopped thread continue, with a signal or 0.
    fn go(&mut self, tid: i32, signal: i32) {
        if self.leaving {
            let _ = ascend_ptrace::detach(tid, signal);
            self.threads.remove(&tid);
            self.expected.remove(&tid);
            return;
        }
        let awaits = self.threads.get(&tid).copied().unwrap_or(false);
        let how = if self.filtered && !awaits { How::Continue } else { How::ToCall };
        // It fails only if the thread was killed, which is reported next.
        let _ = ascend_ptrace::resume(tid, how, signal);
    }

    /// Waits until something is reported. A signal for the tracer itself is passed on to a program
    /// that it started, and ends the trace of one that it did not start.
    pub fn wait(&mut self, signals: &SigSet) -> io::Result<()> {
        match signals.wait()? {
            Signal::SIGCHLD => {}
            _ if !self.started && self.leaving => self.abandon(),
            _ if !self.started => self.leave(),
            // A terminal sends these to the program as well.
            Signal::SIGINT | Signal::SIGQUIT if self.ending.is_none() => {}
            signal if self.ending.is_none() => kill(Pid::from_raw(self.root), signal)?,
            // Only processes that outlive the program are left. Their filter needs a tracer.
            _ => self.abandon(),
        }
        Ok(())
    }

    /// Stops tracing as soon as each thread can be stopped.
    fn leave(&mut self) {
        self.leaving = true;
        self.ending.get_or_insert(Ending::Detached);
        for tid in self.threads.keys() {
            let _ = ascend_ptrace::interrupt(*tid);
        }
        for tid in std::mem::take(&mut self.early) {
            let _ = ascend_ptrace::detach(tid, 0);
        }
    }

    /// Stops waiting for threads that cannot be stopped. The kernel detaches them with the tracer.
    fn abandon(&mut self) {
        self.ending.get_or_insert(Ending::Detached);
        self.threads.clear();
        self.expected.clear();
        self.early.clear();
    }
}

fn threads(pid: i32) -> io::Result<Vec<i32>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()).collect())
}

/// Whether this process traces the thread already.
fn is_ours(tid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.and_then(|tracer| tracer.trim().parse().ok()) == Some(std::process::id())
}
