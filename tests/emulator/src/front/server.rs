//! The server thread: owns the model and answers one system call after another.
//!
//! Before it handles a call or an order, the server processes everything that the kernel reported
//! earlier: ended processes and closed files. The kernel queues these reports before close, munmap
//! or waitpid returns. So after one of these has returned, the driver no longer has that process or
//! file, as with a real driver.

use super::bell::Bell;
use super::client_memory::{OwnMemory, ProcessMemory};
use super::client_process::{self, Inode, Process, ProcessKey, Processes, THREAD};
use super::files::{Blank, Files};
use super::filter::DRIVER_AREA;
use super::heirs::{self, Heirs};
use super::listener::{Answer, Listener, Notification};
use super::{Order, dev_listing, module_list, node};
use crate::caller::{Caller, Memory, Outcome};
use crate::config::Config;
use crate::driver::{AddressSpaceChange, Change, ChangeKind, Driver, FileId, Mmap};
use crate::fault::{Answers, CommandFaults, Fault, Strike};
use crate::record::{self, Record, Recorder, hex};
use crate::svm::page_size;
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Op};
use libc::c_int;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::collections::{HashSet, VecDeque};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

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
    fn new(process: &mut Process, tid: i32, arrived: Instant) -> Self {
        process.calls(tid);
        let Process { key, identity, mount_namespace, uid, .. } = *process;
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

/// How often touches are looked for.
const WATCH: Duration = Duration::from_millis(20);

/// The flag of mlockall that is not allowed alone.
const MCL_ONFAULT: u64 = 4;

/// Whether advice allocates pages.
fn is_populating(advice: i32) -> bool {
    const MADV_COLLAPSE: i32 = 25;
    matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE | MADV_COLLAPSE)
}

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
    bell: Bell,
    timer: TimerFd,
    /// When the timer expires.
    armed: Option<Instant>,
    /// The timer has expired, or what calls sleep for may have come.
    due: bool,
    /// Children that inherited mappings of the driver.
    heirs: Heirs,
    /// When touches are looked for next.
    watch: Instant,
    /// Mappings of this process that still need MADV_DONTFORK: see [`Server::spare_forks`].
    uncopied: Vec<(u64, u64)>,
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
            bell: Bell::default(),
            timer,
            armed: None,
            due: false,
            heirs: Heirs::default(),
            watch: Instant::now(),
            uncopied: Vec::new(),
        })
    }

    fn serve(&mut self) {
        loop {
            let received = match self.listeners.as_slice() {
                [only] if self.bell.hangs_at(only) => {
                    let only = only.clone();
                    self.bell.rearm();
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
                self.bell.dismiss();
                return;
            }
            if std::mem::take(&mut self.due) {
                self.resume();
                self.watch();
                // Keep memory that CPUs see at two addresses equal.
                self.driver.svm.settle_windows();
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

    /// Looks for CPUs that touch what they may not.
    fn watch(&mut self) {
        if !self.driver.svm.has_segments() {
            return;
        }
        let now = Instant::now();
        if now < self.watch {
            return;
        }
        self.watch = now + WATCH;
        self.driver.svm.report_floods(&mut self.driver.machine);
        for client in self.driver.svm.with_segments() {
            // The server's own process gives its children no mappings.
            if client != self.own_tgid {
                self.charge_heirs(client);
            }
        }
        self.kill_trapped_clients();
    }

    /// Finds touches of children in the mappings that they inherited from a client.
    fn charge_heirs(&mut self, client: i32) {
        let heirs = self.heirs.refresh(client);
        if heirs.is_empty() {
            return;
        }
        while let Some((offset, address)) = self.driver.svm.touched(client) {
            let own = heirs::has_page(client, address);
            let touching = heirs.iter().copied().find(|pid| heirs::has_page(*pid, address) == Some(true));
            let child = match (own, touching) {
                // Of a page that both have, the client is responsible.
                (Some(true), _) => None,
                (_, Some(child)) => {
                    client_process::kill_child(child);
                    Some(child)
                }
                // The child has ended since the last look.
                (Some(false), None) => heirs.last().copied(),
                (None, None) => None,
            };
            let Some(child) = child else { return };
            self.driver.svm.charge(&mut self.driver.machine, client, child, offset);
        }
    }

    /// Carries out the next order; false if there will be no more.
    fn obey(&mut self) -> bool {
        let mut byte = [0u8];
        let mut space = nix::cmsg_space!([RawFd; 1]);
        let mut parts = [IoSliceMut::new(&mut byte)];
        let mut descriptor = None;
        match recvmsg::<()>(
            self.wake.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Ok(message) => {
                for control in message.cmsgs().into_iter().flatten() {
                    if let ControlMessageOwned::ScmRights(received) = control {
                        // SAFETY: the kernel installed this descriptor, the only one of the
                        // message, for this receiver.
                        descriptor = received.first().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) });
                    }
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => return true,
            Err(_) => return false,
        }
        // Each order is followed by one wake-up.
        let order = match self.orders.try_recv() {
            Ok(order) => order,
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => return false,
        };
        // If the requester is gone, a reply that cannot be sent does not matter.
        match order {
            Order::Listen => self.listeners.extend(descriptor.map(|descriptor| Rc::new(Listener::new(descriptor)))),
            Order::Bell(tid) => self.bell.expect(tid),
            Order::State(reply) => {
                self.settle();
                let _ = reply.send(self.driver.state());
            }
            Order::Inject(fault, done) => {
                match fault {
                    Fault::Command { name, nth, errno } => self.faults.add(name, nth, Strike::Fails(errno)),
                    Fault::Answer { name, nth, alteration } => {
                        self.faults.add(name, nth, Strike::Answers(alteration));
                    }
                    fault => self.driver.inject(&fault),
                }
                let _ = done.send(());
            }
            Order::Control(action) => {
                self.settle();
                action(&mut self.driver);
                // What they sleep for may have come with it; the others are put aside again.
                let now = Instant::now();
                self.parked.iter_mut().for_each(|parked| parked.wake = now);
                self.due = true;
            }
            Order::RecordTo(path, reply) => drop(reply.send(self.recorder.write_to(&path))),
            Order::Record(done) => {
                self.recorder.keep();
                let _ = done.send(());
            }
            Order::Records(reply) => {
                self.settle();
                let _ = reply.send(self.recorder.kept());
            }
            Order::Traps(reply) => {
                self.settle();
                let _ = reply.send(self.traps.clone());
            }
        }
        true
    }

    /// Keeps the driver's mappings out of forked children and core dumps, as the real driver does.
    /// This is not possible for another process. For clients in this process it is done as soon as
    /// the kernel has made the mapping, which is before the next call is answered.
    fn spare_forks(&mut self) {
        self.uncopied.retain(|(start, length)| {
            let advise = |advice| {
                // SAFETY: changes a flag of a mapping of the driver, and no memory.
                let result = unsafe { libc::madvise(*start as *mut libc::c_void, *length as usize, advice) };
                Errno::result(result)
            };
            // ENOMEM: the mapping does not exist yet.
            advise(libc::MADV_DONTDUMP).and_then(|_| advise(libc::MADV_DONTFORK)) == Err(Errno::ENOMEM)
        });
    }

    /// Processes everything that the kernel has reported so far.
    fn settle(&mut self) {
        self.processes.release();
        self.read_reports();
        self.settle_known();
    }

    /// Processes the reports of closed files and ended processes.
    fn read_reports(&mut self) {
        if !self.uncopied.is_empty() {
            self.spare_forks();
        }
        let mut events = [EpollEvent::empty(); 32];
        let mut ended = Vec::new();
        loop {
            let count = self.reports.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
            for event in &events[..count] {
                match event.data() {
                    FILES => self.files.read_events(),
                    ORDER => self.ordered = true,
                    TIME => {
                        let _ = self.timer.wait();
                        (self.armed, self.due) = (None, true);
                    }
                    thread if thread & THREAD != 0 => self.processes.forget_thread(thread as i32),
                    tgid => ended.push(tgid as i32),
                }
            }
            for tgid in ended.drain(..) {
                self.end_address_space(tgid);
                self.processes.forget(tgid);
            }
            if count < events.len() {
                break;
            }
        }
    }

    /// Processes what needs no report, or is known from earlier ones.
    fn settle_known(&mut self) {
        let execed: Vec<i32> = self
            .processes
            .execing()
            .filter(|process| !process.has_address_space())
            .map(|process| process.key.tgid)
            .collect();
        for tgid in execed {
            self.end_address_space(tgid);
        }
        // A sleeping call keeps its file open even if the program closed it, unless the caller was
        // killed.
        self.parked.retain(|parked| parked.listener.waits(parked.notification.id));
        if !self.files.has_suspects() {
            return;
        }
        let busy: HashSet<Inode> = self.parked.iter().map(|parked| parked.file).collect();
        for file in self.files.take_closed(&busy) {
            let mut alive = false;
            for (index, user) in file.users.iter().enumerate() {
                let process = self.processes.get_mut(user.tgid).filter(|process| process.key == *user);
                let Some(process) = process else { continue };
                if process.has_address_space() {
                    alive |= index == 0;
                } else {
                    self.end_address_space(user.tgid);
                }
            }
            if self.recorder.is_on() {
                self.recorder.add(Record { call: "close", file: Some(file.id.0), ..Record::default() });
            }
            self.driver.close(file.id, alive);
            self.kill_trapped_clients();
        }
    }

    /// Reports to the model, once, that the address space in which a process used the driver is
    /// gone.
    fn end_address_space(&mut self, tgid: i32) {
        let Some(process) = self.processes.get_mut(tgid) else { return };
        if process.end_address_space() {
            let key = process.key;
            self.recorder.end(key.tgid);
            self.driver.exit(key.tgid, key.start_time);
            self.kill_trapped_clients();
        }
    }

    /// Kills the clients that triggered traps.
    fn kill_trapped_clients(&mut self) {
        for trap in std::mem::take(&mut self.driver.machine.traps) {
            eprintln!("ascend-emulator: {trap}");
            if trap.tgid as u32 == std::process::id() {
                // The client is this process: results after this point would be meaningless.
                self.recorder.flush();
                std::process::abort();
            }
            if let Some(process) = self.processes.get_mut(trap.tgid) {
                client_process::kill(process);
            }
            self.traps.push(trap);
        }
    }

    /// Receives the next call of a listener. Returns false if there was none, but perhaps a ring of
    /// the bell.
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
        if self.bell.takes(listener, notification.tid, notification.id, &self.reports.0) {
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
                    if !self.bell.takes(listener, next.tid, next.id, &self.reports.0) {
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

    /// Reports to the model that an ALLOC and another call of the same process on the same file
    /// wait at the same time.
    fn overlap(&mut self, alloc: &Notification, other: &Notification) {
        let (now, [descriptor, request, argument, ..]) = (Instant::now(), other.arguments);
        if other.number != libc::SYS_ioctl || request as u8 == alloc.arguments[1] as u8 {
            return;
        }
        let one = self.file(alloc.tid, alloc.arguments[0] as c_int, now);
        let other = self.file(other.tid, descriptor as c_int, now);
        let (Some((who, inode)), Some((other, other_inode))) = (one, other) else { return };
        if inode != other_inode || who.key != other.key {
            return;
        }
        if let Some(file) = self.files.get_mut(inode).map(|file| file.id) {
            let memory = ProcessMemory(alloc.tid);
            self.driver.overlap(&who.caller(&memory), file, alloc.arguments[2], request as u32, argument);
        }
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

    fn open(
        &mut self,
        listener: &Listener,
        call: &Notification,
        at: c_int,
        path: u64,
        flags: c_int,
        arrived: Instant,
    ) -> Reply {
        let Some(path) = node::path_to_open(call.tid, at, path) else { return Answer::Continue.into() };
        if path == node::MODULE_LIST {
            return self.open_module_list(flags);
        }
        // The path was read by thread id: check that the thread was still the caller.
        if !listener.waits(call.id) {
            return Errno::ESRCH.into();
        }
        let Ok(who) = self.who(call.tid, arrived) else { return Errno::ESRCH.into() };
        let mut record = who.record("open");
        let result = self.open_file(&who, &path, flags);
        if self.recorder.is_on() {
            record.file = result.as_ref().ok().map(|(id, _)| *id);
            record.path = Some(path);
            record.flags = Some(format!("{flags:#x}"));
            self.finish(record, result.as_ref().map(|_| 0).map_err(|errno| *errno), arrived);
        }
        match result {
            Ok((_, file)) => Answer::Descriptor { file, cloexec: flags & libc::O_CLOEXEC != 0 }.into(),
            Err(errno) => errno.into(),
        }
    }

    fn open_file(&mut self, who: &Who, path: &str, flags: c_int) -> Result<(u64, OwnedFd), Errno> {
        if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL
            && self.driver.exists(who.key.tgid, path)
        {
            return Err(Errno::EEXIST);
        }
        let memory = ProcessMemory(who.tid);
        let blank = Blank::new()?;
        // A driver path that the model does not have must not be opened on the real host.
        let id = self.driver.open(&who.caller(&memory), path, flags, blank.backing()?).unwrap_or(Err(Errno::ENOENT))?;
        match self.files.publish(blank, id, path, flags, who.key) {
            Ok(file) => Ok((id.0, file)),
            Err(errno) => {
                self.driver.close(id, true);
                Err(errno)
            }
        }
    }

    fn exists(&mut self, tid: i32, path: &str) -> bool {
        self.who(tid, Instant::now()).is_ok_and(|who| self.driver.exists(who.key.tgid, path))
    }

    fn stat(&mut self, call: &Notification, at: c_int, path: u64, buffer: u64, describe: fn(&str) -> Vec<u8>) -> Reply {
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if !self.exists(call.tid, &path) {
            return Errno::ENOENT.into();
        }
        match ProcessMemory(call.tid).write(buffer, &describe(&path)) {
            Ok(()) => Answer::Value(0).into(),
            Err(_) => Errno::EFAULT.into(),
        }
    }

    fn access(&mut self, call: &Notification, at: c_int, path: u64) -> Reply {
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if self.exists(call.tid, &path) { Answer::Value(0).into() } else { Errno::ENOENT.into() }
    }

    /// stat of a descriptor.
    fn fstat(&mut self, call: &Notification, descriptor: c_int, buffer: u64, describe: fn(&str) -> Vec<u8>) -> Reply {
        let Some(path) = self.node_of(call.tid, descriptor) else { return Answer::Continue.into() };
        match ProcessMemory(call.tid).write(buffer, &describe(&path)) {
            Ok(()) => Answer::Value(0).into(),
            Err(_) => Errno::EFAULT.into(),
        }
    }

    /// The node that a descriptor of a task was opened at, if it is the driver's.
    fn node_of(&mut self, tid: i32, descriptor: c_int) -> Option<String> {
        let (inode, _) = self.driver_file(tid, descriptor)?;
        self.files.get_mut(inode).map(|file| file.path.clone())
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

    /// A node is not a symbolic link. realpath(3) asks this of every component. The links in
    /// `/proc/PID/fd` name the nodes.
    fn read_link(&mut self, call: &Notification, at: c_int, path: u64, buffer: u64, length: u64) -> Reply {
        let named = node::named_descriptor(call.tid, at, path);
        if let Some(target) = named.and_then(|(task, descriptor)| self.node_of(task, descriptor)) {
            let shown = &target.as_bytes()[..target.len().min(length as usize)];
            return match ProcessMemory(call.tid).write(buffer, shown) {
                _ if length == 0 => Errno::EINVAL.into(),
                Ok(()) => Answer::Value(shown.len() as i64).into(),
                Err(_) => Errno::EFAULT.into(),
            };
        }
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if self.exists(call.tid, &path) { Errno::EINVAL.into() } else { Errno::ENOENT.into() }
    }

    /// getdents64(2): of `/dev`, with the driver's nodes.
    fn list_directory(&mut self, call: &Notification, descriptor: c_int, buffer: u64, room: u64) -> Reply {
        if !dev_listing::is_dev(call.tid, descriptor) {
            return Answer::Continue.into();
        }
        let Ok(who) = self.who(call.tid, Instant::now()) else { return Errno::ESRCH.into() };
        let tgid = who.key.tgid;
        let list = dev_listing::entries(call.tid, tgid, descriptor, room, &self.driver.nodes(tgid));
        match list.map(|list| ProcessMemory(call.tid).write(buffer, &list).map(|()| list.len())) {
            None => Answer::Continue.into(),
            Some(Ok(length)) => Answer::Value(length as i64).into(),
            Some(Err(_)) => Errno::EFAULT.into(),
        }
    }

    /// open(2) of `/proc/modules` by a process under emulation.
    fn open_module_list(&self, flags: c_int) -> Reply {
        let only_reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
        match module_list::file(&self.driver.machine.config) {
            Ok(file) if only_reads => Answer::Descriptor { file, cloexec: flags & libc::O_CLOEXEC != 0 }.into(),
            _ => Answer::Continue.into(),
        }
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

    fn ioctl(&mut self, call: &Notification, arrived: Instant, slept: Option<Inode>) -> Reply {
        let [descriptor, request, argument, ..] = call.arguments;
        // A call that slept keeps its file; its descriptor may have been closed or reused.
        let found = match slept {
            Some(inode) => self.who(call.tid, arrived).ok().map(|who| (who, inode)),
            None => self.file(call.tid, descriptor as c_int, arrived),
        };
        let Some((who, inode)) = found else { return Answer::Continue.into() };
        let Some(file) = self.files.get_mut(inode).map(|file| file.id) else { return Answer::Continue.into() };
        let own = self.own_memory.clone().filter(|_| who.key.tgid == self.own_tgid);
        let other = ProcessMemory(call.tid);
        let memory: &dyn Memory = own.as_deref().map_or(&other, |own| own);
        let request = request as u32;
        let observed = self.recorder.is_on() || !self.faults.is_empty();
        let mut record = observed.then(|| self.describe(&who, file, request));
        // A call that slept was counted when it arrived.
        let name = record.as_ref().and_then(|(record, _)| record.cmd).filter(|_| slept.is_none());
        let struck = match slept {
            None => name.and_then(|name| self.faults.strike(name)),
            Some(_) => self.faults.wake(call.tid).map(Strike::Answers),
        };
        let read = |length: usize| {
            let mut bytes = vec![0; length];
            memory.read(argument, &mut bytes).is_ok().then_some(bytes)
        };
        let before = record.as_ref().and_then(|(_, length)| read(*length));
        if let (Some((record, _)), Some(before)) = (&mut record, before.as_deref().filter(|_| self.recorder.is_on())) {
            record.buffers = self.sessions.before(self.driver.module(file), record.cmd, before, memory);
        }
        let (outcome, answer) = match &struck {
            Some(Strike::Fails(errno)) => ((*errno).into(), Vec::new()),
            None if !observed => (self.driver.ioctl(&who.caller(memory), file, request, argument), Vec::new()),
            struck => {
                let alteration = struck.as_ref().and_then(Strike::alteration);
                let answers = Answers::new(memory, alteration);
                (self.driver.ioctl(&who.caller(&answers), file, request, argument), answers.into_bytes())
            }
        };
        let result = match outcome {
            Outcome::Sleep(wake) | Outcome::Wait(wake) => {
                if let Some(Strike::Answers(alteration)) = struck {
                    self.faults.sleep(call.tid, alteration);
                }
                return Reply::Later(wake, inode, matches!(outcome, Outcome::Wait(_)));
            }
            Outcome::Done(result) => result,
        };
        if let Some((mut record, length)) = record.take().filter(|_| self.recorder.is_on()) {
            let after = read(length);
            if let (Ok(0..), Some(before)) = (result, &before) {
                let after = after.as_deref().unwrap_or(before);
                self.sessions.after(self.driver.module(file), record.cmd, before, after, memory, &mut record.buffers);
            }
            let after = after.filter(|after| before.as_ref() != Some(after));
            record.in_hex = before.as_deref().map(hex);
            record.addr = before.is_none().then(|| format!("{argument:#x}"));
            record.out_hex = after.as_deref().map(hex);
            record.answer = answer;
            self.finish(record, result, arrived);
        }
        match result {
            Ok(value) => Answer::Value(value).into(),
            Err(errno) => errno.into(),
        }
    }

    /// The record of an ioctl, and the size of its argument.
    fn describe(&self, who: &Who, file: FileId, request: u32) -> (Record, usize) {
        let module = self.driver.module(file);
        let command = record::command(self.driver.machine.config.generation, module, request);
        let mut record = who.record("ioctl");
        record.file = Some(file.0);
        record.value = Some(format!("{request:#x}"));
        record.cmd = command.map(|command| command.name);
        (record, record::argument_size(module, command, request))
    }

    fn mmap(&mut self, call: &Notification, arrived: Instant) -> Reply {
        let [_, _, _, flags, descriptor, _] = call.arguments;
        let flags = flags as c_int;
        if flags & libc::MAP_ANONYMOUS == 0 {
            if let Some((who, inode)) = self.file(call.tid, descriptor as c_int, arrived) {
                return self.mmap_file(call, &who, inode);
            }
        }
        if flags & libc::MAP_FIXED != 0 {
            return self.change(call, "mmap", ChangeKind::Unmap, arrived);
        }
        Answer::Continue.into()
    }

    fn mmap_file(&mut self, call: &Notification, who: &Who, inode: Inode) -> Reply {
        let [address, length, prot, flags, _, offset] = call.arguments;
        let (prot, flags, page) = (prot as c_int, flags as c_int, page_size());
        let Some(file) = self.files.get_mut(inode) else { return Answer::Continue.into() };
        if length == 0 || offset % page != 0 {
            // The kernel refuses this before it calls the driver.
            return Answer::Continue.into();
        }
        // The kernel first asks the driver for an address, then checks the access mode, then calls
        // the driver's mmap.
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
        let refused = !fixed && !file.may_map(prot, flags);
        if !refused && flags & (libc::MAP_POPULATE | libc::MAP_LOCKED) != 0 {
            // Linux ignores both for the real driver. Here they would allocate all pages.
            return Errno::ENOMEM.into();
        }
        let id = file.id;
        let hint = address.next_multiple_of(page);
        let length = length.next_multiple_of(page);
        let free = hint != 0 && client_process::range_is_free(call.tid, hint, length);
        let memory = ProcessMemory(call.tid);
        let mmap = Mmap { hint, free, length, prot, flags, offset };
        let result = if refused { Err(Errno::EACCES) } else { self.driver.mmap(&who.caller(&memory), id, &mmap) };
        if self.recorder.is_on() {
            let mut record = who.record("mmap");
            record.file = Some(id.0);
            record.flags = Some(format!("{flags:#x}"));
            record.addr = Some(format!("{hint:#x}"));
            record.len = Some(format!("{length:#x}"));
            record.arg = Some(prot.into());
            record.mapped = (hint != 0).then_some(!free);
            record.offset = (offset != 0).then(|| format!("{offset:#x}"));
            self.finish(record, result.map(|()| hint as i64), who.arrived);
        }
        match result {
            Ok(()) => {
                if who.key.tgid as u32 == std::process::id() {
                    self.uncopied.push((hint, length));
                } else {
                    client_process::dump_no_shared_memory(who.key.tgid);
                }
                Answer::Continue.into()
            }
            Err(errno) => errno.into(),
        }
    }

    fn change(&mut self, call: &Notification, name: &'static str, kind: ChangeKind, arrived: Instant) -> Reply {
        let [start, length, argument, ..] = call.arguments;
        // Only a process that used the driver has mappings of the driver.
        if !self.processes.is_client(call.tid) {
            return self.change_by_heir(call, kind);
        }
        let Ok(who) = self.who(call.tid, arrived) else { return Answer::Continue.into() };
        let memory = ProcessMemory(call.tid);
        // It matters only for the areas of the driver, and reading all mappings takes a while.
        let mapped = length < DRIVER_AREA || !client_process::range_is_free(call.tid, start, length);
        let change = AddressSpaceChange { kind, start, length, mapped };
        let result = self.driver.address_space_change(&who.caller(&memory), &change);
        if self.recorder.is_on() {
            let mut record = who.record(name);
            record.addr = Some(format!("{start:#x}"));
            record.len = Some(format!("{length:#x}"));
            record.arg = (kind != ChangeKind::Unmap).then_some(argument as i64);
            record.mapped = (length >= DRIVER_AREA).then_some(mapped);
            let value = if name == "mmap" { start as i64 } else { 0 };
            self.finish(record, result.map(|_| value), arrived);
        }
        match result {
            Ok(Change::ByKernel) => Answer::Continue.into(),
            Ok(Change::Nothing) => Answer::Value(0).into(),
            Err(errno) => errno.into(),
        }
    }

    /// A change by a process that may have inherited mappings of the driver. With the real driver
    /// there is nothing, so pages cannot be locked or populated.
    fn change_by_heir(&mut self, call: &Notification, kind: ChangeKind) -> Reply {
        let populates = match kind {
            ChangeKind::Lock => true,
            ChangeKind::Advise(advice) => is_populating(advice),
            _ => false,
        };
        let [start, length, ..] = call.arguments;
        let inherited = |inode: Inode| self.files.get_mut(inode).is_some();
        if populates && client_process::maps_file(call.tid, start, length, inherited) {
            return Errno::ENOMEM.into();
        }
        Answer::Continue.into()
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
