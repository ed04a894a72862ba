//! The server thread: owns the model and answers one system call after another.
//!
//! Before it handles a call or an order, the server processes everything that the kernel reported
//! earlier: ended processes and closed files. The kernel queues these reports before close, munmap
//! or waitpid returns. So after one of these has returned, the driver no longer has that process or
//! file, as with a real driver.

mod ioctl_calls;
mod mapping_calls;
mod node_calls;
mod orders;
mod reports;
mod scheduled;
mod touches;

use super::client_memory::{OwnMemory, ProcessMemory};
use super::client_process::{self, ClientProcess, Inode, ProcessKey, Processes};
use super::descendants::Descendants;
use super::files::Files;
use super::listener::{Answer, Listener, Notification};
use super::waker::Waker;
use super::{Order, node};
use crate::caller::{Caller, Memory};
use crate::config::Config;
use crate::driver::{ChangeKind, Driver};
use crate::fault::CommandFaults;
use crate::record::{self, Record, Recorder};
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Op};
use libc::c_int;
use mapping_calls::is_populating;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use scheduled::Scheduled;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};
use touches::WATCH;

/// The token of reports about files. Tokens of processes are their ids.
const FILES: u64 = 0;

/// The token of the wake-up for an order.
const ORDER: u64 = u64::MAX;

/// The token of the timer.
const TIME: u64 = u64::MAX - 1;

/// The body of the server thread. `wake` is a descriptor in the table of the process, not of this
/// thread.
pub fn main(config: Config, wake: RawFd, orders: Receiver<Order>, ready: Sender<Result<(), Errno>>) {
    // Signals are for the program, not for its driver.
    let _ = nix::sys::signal::SigSet::all().thread_block();
    let server = own_table(wake).and_then(|wake| Server::new(config, wake, orders));
    match server {
        Ok(mut server) => {
            if ready.send(Ok(())).is_ok() {
                server.serve();
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    }
}

/// Gives this thread its own descriptor table with the standard streams and `wake`.
///
/// With a shared table, a fork of another thread would copy descriptors that are meant for a
/// client, and keep its files open.
fn own_table(wake: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the kernel leaves the range out of the copy, so no descriptor of another thread is
    // closed.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_UNSHARE) })?;
    // SAFETY: takes two integers.
    let process = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    // SAFETY: the call returned a new descriptor that this value owns.
    let process = unsafe { OwnedFd::from_raw_fd(process as RawFd) };
    // SAFETY: takes three integers. The table is that of the main thread, which the thread that
    // opened `wake` shares.
    let wake = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), wake, 0) })?;
    // SAFETY: the call returned a new descriptor that this value owns.
    Ok(unsafe { OwnedFd::from_raw_fd(wake as RawFd) })
}

/// A call that sleeps in the driver.
struct Parked {
    listener: Rc<Listener>,
    notification: Notification,
    arrived: Instant,
    wake: Instant,
    file: Inode,
    /// A signal ends the sleep.
    interruptible: bool,
}

/// How the server replies to a call.
enum Reply {
    Now(Answer),
    Later(Instant, Inode, bool),
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Reply::Now(answer)
    }
}

impl From<Errno> for Reply {
    fn from(errno: Errno) -> Self {
        Reply::Now(Answer::Error(errno))
    }
}

/// The data of a caller that do not change during a call.
#[derive(Clone, Copy)]
struct Who {
    key: ProcessKey,
    identity: u64,
    tid: i32,
    mount_namespace: u64,
    uid: u32,
    arrived: Instant,
}

impl Who {
    fn new(process: &mut ClientProcess, tid: i32, arrived: Instant) -> Self {
        process.calls(tid);
        let ClientProcess { key, identity, mount_namespace, uid, .. } = *process;
        Who { key, identity, tid, mount_namespace, uid, arrived }
    }

    fn caller<'a>(&self, memory: &'a dyn Memory) -> Caller<'a> {
        Caller {
            tid: self.tid,
            tgid: self.key.tgid,
            start_time: self.key.start_time,
            identity: self.identity,
            mount_namespace: self.mount_namespace,
            uid: self.uid,
            memory,
            arrived: self.arrived,
        }
    }

    fn record(&self, call: &'static str) -> Record {
        Record { call, pid: self.key.tgid, tid: self.tid, ..Record::default() }
    }
}

/// The flag of mlockall that is not allowed alone.
const MCL_ONFAULT: u64 = 4;

/// Whether a stat with this path and these flags is about a descriptor.
fn is_of_descriptor(tid: i32, path: u64, flags: u64) -> bool {
    flags as c_int & libc::AT_EMPTY_PATH != 0 && node::is_empty_path(tid, path)
}

/// The memory module's ALLOC, which has the same number in every generation.
const ALLOC: Option<u32> = svm::stable(Op::Alloc);

/// Whether a call may be an ALLOC. The driver ignores the size bits.
fn is_alloc(call: &Notification) -> bool {
    let same = |alloc: u32| alloc as u16 == call.arguments[1] as u16;
    call.number == libc::SYS_ioctl && ALLOC.is_some_and(same)
}

struct Server {
    driver: Driver,
    wake: OwnedFd,
    orders: Receiver<Order>,
    listeners: Vec<Rc<Listener>>,
    /// Reports about files and processes.
    reports: Rc<Epoll>,
    files: Files,
    processes: Processes,
    parked: Vec<Parked>,
    faults: CommandFaults,
    recorder: Recorder,
    /// Sessions of `/dev/hisi_hdc` whose packets are recorded.
    sessions: record::buffer::Sessions,
    traps: Vec<Trap>,
    /// The memory of clients in this process; `None` if there are no files for it.
    own_memory: Option<Rc<OwnMemory>>,
    own_tgid: i32,
    /// An order waits.
    ordered: bool,
    waker: Waker,
    timer: TimerFd,
    /// When the timer expires.
    armed: Option<Instant>,
    /// The timer has expired, or what calls sleep for may have come.
    due: bool,
    /// Children that inherited mappings of the driver.
    descendants: Descendants,
    /// When touches are looked for next.
    watch: Instant,
    /// Mappings of this process that still need MADV_DONTFORK: see [`Server::spare_forks`].
    uncopied: Vec<(u64, u64)>,
    /// A seeded schedule, while an order is carried out.
    schedule: Option<Scheduled>,
}

impl Server {
    fn new(config: Config, wake: OwnedFd, orders: Receiver<Order>) -> Result<Self, Errno> {
        let files = Files::new();
        let reports = Rc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        if let Some(events) = files.events() {
            reports.add(events, EpollEvent::new(EpollFlags::EPOLLIN, FILES))?;
        }
        reports.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, ORDER))?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
        reports.add(timer.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, TIME))?;
        let schedule = config.schedule.clone().map(Scheduled::new);
        let mut driver = Driver::new(config);
        driver.machine.identity = client_process::identity;
        Ok(Server {
            driver,
            wake,
            orders,
            listeners: Vec::new(),
            processes: Processes::new(reports.clone()),
            reports,
            files,
            parked: Vec::new(),
            faults: CommandFaults::default(),
            recorder: Recorder::default(),
            sessions: record::buffer::Sessions::default(),
            traps: Vec::new(),
            own_memory: OwnMemory::new().ok().map(Rc::new),
            own_tgid: std::process::id() as i32,
            ordered: false,
            waker: Waker::default(),
            timer,
            armed: None,
            due: false,
            descendants: Descendants::default(),
            watch: Instant::now(),
            uncopied: Vec::new(),
            schedule,
        })
    }

    fn serve(&mut self) {
        if let Some(scheduled) = self.schedule.take() {
            return self.serve_scheduled(scheduled);
        }
        loop {
            let received = match self.listeners.as_slice() {
                [only] if self.waker.wakes(only) => {
                    let only = only.clone();
                    self.waker.rearm();
                    self.receive(&only)
                }
                _ => match self.poll() {
                    Some(received) => received,
                    None => return,
                },
            };
            if !received {
                self.settle();
            }
            // After the calls: an order that was sent while a client waited in a call comes after
            // it.
            if std::mem::take(&mut self.ordered) && !self.obey() {
                self.recorder.flush();
                self.waker.stop();
                return;
            }
            if std::mem::take(&mut self.due) {
                self.resume();
                self.watch();
                // Keep memory that CPUs see at two addresses equal.
                self.driver.svm.settle_windows(&mut self.driver.machine);
                self.kill_trapped_clients();
            }
            self.arm();
        }
    }

    /// Waits for calls of several listeners and for reports. Returns whether there were calls;
    /// `None` if it cannot wait.
    fn poll(&mut self) -> Option<bool> {
        let listeners = self.listeners.iter().map(|listener| listener.as_fd().as_raw_fd());
        let descriptors = listeners.chain([self.reports.0.as_raw_fd()]);
        let mut polled: Vec<libc::pollfd> =
            descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: the pointer and the length are those of the vector.
        let result = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) };
        if result < 0 && Errno::last() != Errno::EINTR {
            return None;
        }
        let mut received = false;
        for index in (0..self.listeners.len()).rev() {
            let events = polled[index].revents;
            if events & libc::POLLIN != 0 {
                received |= self.receive(&self.listeners[index].clone());
            } else if events != 0 {
                // The last thread under this filter is gone.
                self.listeners.remove(index);
            }
        }
        Some(received)
    }

    /// Sets the timer to what is due next.
    fn arm(&mut self) {
        let aliased = self.files.is_suspicious() || self.driver.svm.is_aliased();
        let soon = aliased.then_some(Duration::from_millis(1));
        // The close of a file that the server has open, too, is not reported.
        let release = self.processes.has_last_used().then_some(WATCH);
        let later = soon.or(release).filter(|_| soon.is_some() || self.armed.is_none());
        let later = later.map(|time| Instant::now() + time);
        let watch = self.driver.svm.has_segments().then_some(self.watch);
        let next = self.parked.iter().map(|parked| parked.wake).chain(watch).chain(later).min();
        let Some(next) = next.filter(|next| self.armed.is_none_or(|armed| *next < armed)) else { return };
        let time = next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let expiration = Expiration::OneShot(TimeSpec::from_duration(time));
        if self.timer.set(expiration, TimerSetTimeFlags::empty()).is_ok() {
            self.armed = Some(next);
        }
    }

    /// Receives the next call of a listener. Returns false if there was none, but perhaps one of
    /// the waker.
    fn receive(&mut self, listener: &Rc<Listener>) -> bool {
        let notification = match listener.receive() {
            Ok(Some(notification)) => notification,
            Ok(None) => return false,
            Err(error) => {
                eprintln!("ascend-emulator: the kernel's listener failed: {error}");
                self.listeners.retain(|other| !Rc::ptr_eq(other, listener));
                return false;
            }
        };
        if self.waker.takes(listener, notification.tid, notification.id, &self.reports.0) {
            return false;
        }
        let mut waiting = VecDeque::new();
        let mut next = Some(notification);
        while let Some(notification) = next {
            let ioctl = notification.number == libc::SYS_ioctl;
            self.processes.release_unless_used(notification.tid, ioctl.then_some(notification.arguments[0] as c_int));
            // Everything that was closed before this call has been reported by now.
            self.read_reports();
            self.settle_known();
            if is_alloc(&notification) {
                // ALLOC must not overlap with other calls: find those that wait with it.
                while let Some(next) = listener.receive_ready() {
                    if !self.waker.takes(listener, next.tid, next.id, &self.reports.0) {
                        waiting.push_back(next);
                    }
                }
                for other in &waiting {
                    self.overlap(&notification, other);
                }
            }
            self.present(listener.clone(), notification, Instant::now(), None);
            next = waiting.pop_front();
        }
        true
    }

    /// Repeats the calls whose sleep is over.
    fn resume(&mut self) {
        if self.parked.is_empty() {
            return;
        }
        let now = Instant::now();
        let (due, sleeping) = std::mem::take(&mut self.parked).into_iter().partition(|parked| parked.wake <= now);
        self.parked = sleeping;
        let due: Vec<Parked> = due;
        for parked in due {
            if parked.interruptible && client_process::has_signal(parked.notification.tid) {
                parked.listener.answer(parked.notification.id, Answer::Restart);
                continue;
            }
            self.present(parked.listener, parked.notification, parked.arrived, Some(parked.file));
        }
    }

    fn present(&mut self, listener: Rc<Listener>, notification: Notification, arrived: Instant, slept: Option<Inode>) {
        let reply = self.dispatch(&listener, &notification, arrived, slept);
        if !self.driver.machine.traps.is_empty() {
            // Kill before answering: a call that crashes the kernel does not return.
            self.kill_trapped_clients();
        }
        match reply {
            Reply::Now(answer) => listener.answer(notification.id, answer),
            Reply::Later(wake, file, interruptible) => {
                self.parked.push(Parked { listener, notification, arrived, wake, file, interruptible });
            }
        }
    }

    fn dispatch(&mut self, listener: &Listener, call: &Notification, arrived: Instant, slept: Option<Inode>) -> Reply {
        let [a, b, c, d, ..] = call.arguments;
        let at = a as c_int;
        match call.number {
            libc::SYS_ioctl => self.ioctl(call, arrived, slept),
            libc::SYS_openat => self.open(listener, call, at, b, c as c_int, arrived),
            libc::SYS_openat2 => {
                let mut flags = [0; 8];
                match ProcessMemory(call.tid).read(c, &mut flags) {
                    Ok(()) => self.open(listener, call, at, b, u64::from_le_bytes(flags) as c_int, arrived),
                    Err(_) => Answer::Continue.into(),
                }
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => self.open(listener, call, libc::AT_FDCWD, a, b as c_int, arrived),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_creat => {
                let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
                self.open(listener, call, libc::AT_FDCWD, a, flags, arrived)
            }
            libc::SYS_newfstatat if is_of_descriptor(call.tid, b, d) => self.fstat(call, at, c, node::stat),
            libc::SYS_newfstatat => self.stat(call, at, b, c, node::stat),
            libc::SYS_statx if is_of_descriptor(call.tid, b, c) => self.fstat(call, at, call.arguments[4], node::statx),
            libc::SYS_statx => self.stat(call, at, b, call.arguments[4], node::statx),
            libc::SYS_fstat => self.fstat(call, at, b, node::stat),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_stat | libc::SYS_lstat => self.stat(call, libc::AT_FDCWD, a, b, node::stat),
            libc::SYS_faccessat | libc::SYS_faccessat2 => self.access(call, at, b),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_access => self.access(call, libc::AT_FDCWD, a),
            libc::SYS_readlinkat => self.read_link(call, at, b, c, d),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_readlink => self.read_link(call, libc::AT_FDCWD, a, b, c),
            libc::SYS_getdents64 => self.list_directory(call, at, b, c),
            libc::SYS_mmap => self.mmap(call, arrived),
            libc::SYS_munmap => self.change(call, "munmap", ChangeKind::Unmap, arrived),
            libc::SYS_mprotect => self.change(call, "mprotect", ChangeKind::Protect(c as i32), arrived),
            libc::SYS_madvise => self.change(call, "madvise", ChangeKind::Advise(c as i32), arrived),
            libc::SYS_mbind => self.change(call, "mbind", ChangeKind::Bind(c as i32), arrived),
            libc::SYS_mlock | libc::SYS_mlock2 => self.change(call, "mlock", ChangeKind::Lock, arrived),
            // It would allocate every page of the segments, now or when they are mapped, which is
            // more than any machine has. Linux does not lock the mappings of the real driver.
            libc::SYS_mlockall if (1..8).contains(&a) && a != MCL_ONFAULT => Answer::Value(0).into(),
            // These would allocate every page, too.
            libc::SYS_process_madvise if is_populating(d as i32) => Errno::EINVAL.into(),
            libc::SYS_fallocate if self.driver_file(call.tid, at).is_some() => Errno::ENODEV.into(),
            libc::SYS_mremap => {
                let fixed = d as c_int & libc::MREMAP_FIXED != 0;
                self.change(call, "mremap", ChangeKind::Remap { length: c, fixed }, arrived)
            }
            libc::SYS_execve | libc::SYS_execveat => {
                self.processes.will_exec(call.tid);
                Answer::Continue.into()
            }
            _ => Answer::Continue.into(),
        }
    }

    /// Looks up the caller.
    fn who(&mut self, tid: i32, arrived: Instant) -> io::Result<Who> {
        self.processes.of(tid).map(|process| Who::new(process, tid, arrived))
    }

    /// The file of a descriptor of a task, if it is the driver's, and whether what is known of the
    /// task led to it: a thread whose descriptors could be read is alive.
    fn driver_file(&mut self, tid: i32, descriptor: c_int) -> Option<(Inode, bool)> {
        let known = self.processes.file_of_known(tid, descriptor);
        let inode = known.or_else(|| client_process::file_of(tid, descriptor))?;
        if self.files.get_mut(inode).is_none() {
            self.processes.uses_no_longer(tid, descriptor);
            return None;
        }
        Some((inode, known.is_some()))
    }

    /// The caller and its file, if the descriptor is a file of the driver.
    fn file(&mut self, tid: i32, descriptor: c_int, arrived: Instant) -> Option<(Who, Inode)> {
        let (inode, alive) = self.driver_file(tid, descriptor)?;
        let who = match self.processes.known(tid).filter(|_| alive) {
            Some(process) => Who::new(process, tid, arrived),
            None => self.who(tid, arrived).ok()?,
        };
        self.files.get_mut(inode)?.used_by(who.key);
        self.processes.uses(tid, descriptor);
        Some((who, inode))
    }

    fn finish(&mut self, mut record: Record, result: Result<i64, Errno>, arrived: Instant) {
        // `/dev/hisi_hdc` answers with codes of its own, which the program sees as an errno.
        let error = match result {
            Ok(value) => i32::try_from(-value).ok().filter(|code| (1..4096).contains(code)),
            Err(errno) => Some(errno as i32),
        };
        record.ret = if error.is_some() { -1 } else { result.unwrap_or(-1) };
        record.errno = error.map(record::errno_name);
        record.us = arrived.elapsed().as_micros() as u64;
        self.recorder.add(record);
    }
}
