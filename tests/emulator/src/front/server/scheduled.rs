//! The server's loop under a seeded schedule: see [`crate::schedule`].
//!
//! Calls are taken in as they come and answered one at a time, when no client runs.

use super::{Answer, Parked, Reply, Server};
use crate::caller::Memory;
use crate::fault::Strike;
use crate::front::client_memory::ProcessMemory;
use crate::front::client_process::Inode;
use crate::front::client_threads::{self, ClientThreads, Look};
use crate::front::listener::{Listener, Notification};
use crate::schedule::{Draw, Event, Schedule, Scheduler, Summary, mix};
use libc::c_int;
use nix::errno::Errno;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A call that waits for its turn.
struct WaitingCall {
    listener: Rc<Listener>,
    notification: Notification,
    arrived: Instant,
    /// Its file, if it slept in the driver.
    slept: Option<Inode>,
    /// Its answer, if it was carried out.
    answer: Option<Answer>,
    /// When its sleep ends, if it is one.
    until: Option<Instant>,
    /// It is not chosen before this step.
    from: u64,
}

/// What a schedule needs beyond the rest of the server.
pub(super) struct Scheduled {
    scheduler: Scheduler,
    threads: ClientThreads,
    waiting: Vec<WaitingCall>,
    /// Stopped processes, and after which choice they go on.
    stopped: Vec<(i32, u64)>,
    /// Devices that died, and after which choice they come back.
    dead: Vec<(u32, u64)>,
    /// Until which choice no memory can be created.
    no_memory_until: u64,
    /// How many bytes of each client's random numbers were given out.
    randoms: u64,
    /// Since when nothing was answered and nothing arrived.
    since: Instant,
}

/// A sleep that is longer is chosen only if nothing else can be.
const SHORT_SLEEP: Duration = Duration::from_millis(50);

/// The commands that a seed lets fail, and how: answers that the driver has.
const FAILURES: [(&str, Errno); 7] = [
    ("MEM_CREATE", Errno::ENOMEM),
    ("MEM_MAP", Errno::ENOMEM),
    ("MEM_EXPORT", Errno::ENOMEM),
    ("MEM_IMPORT", Errno::ENOMEM),
    ("ALLOC", Errno::ENOMEM),
    ("MEMCPY", Errno::EIO),
    ("SETUP_DEVICE", Errno::EFAULT),
];

impl Scheduled {
    pub fn new(schedule: Schedule) -> Self {
        Scheduled {
            scheduler: Scheduler::new(schedule),
            threads: ClientThreads::new(),
            waiting: Vec::new(),
            stopped: Vec::new(),
            dead: Vec::new(),
            no_memory_until: 0,
            randoms: 0,
            since: Instant::now(),
        }
    }

    /// A thread of this process was attached.
    pub fn attached(&mut self, tid: i32) {
        self.threads.add(tid);
    }

    /// What was done so far.
    pub fn summary(&mut self) -> Summary {
        Summary { living: self.threads.living(), ..self.scheduler.summary.clone() }
    }

    fn tids(&self, parked: &[Parked]) -> Vec<i32> {
        let waiting = self.waiting.iter().map(|call| call.notification.tid);
        waiting.chain(parked.iter().map(|parked| parked.notification.tid)).collect()
    }
}

impl Server {
    /// The loop; returns when there will be no more orders.
    pub(super) fn serve_scheduled(&mut self, mut scheduled: Scheduled) {
        let mut pause = FIRST_PAUSE;
        loop {
            let arrived = self.take_in(&mut scheduled);
            self.settle();
            while std::mem::take(&mut self.ordered) {
                self.schedule = Some(scheduled);
                let goes_on = self.obey();
                scheduled = match self.schedule.take() {
                    Some(scheduled) if goes_on => scheduled,
                    _ => return self.recorder.flush(),
                };
                (scheduled.since, pause) = (Instant::now(), FIRST_PAUSE);
                self.settle();
            }
            if std::mem::take(&mut self.due) {
                self.watch();
                self.driver.svm.settle_windows(&mut self.driver.machine);
                self.kill_trapped_clients();
            }
            self.unpark(&mut scheduled);
            self.arm();
            if arrived {
                (scheduled.since, pause) = (Instant::now(), FIRST_PAUSE);
            }
            scheduled.waiting.retain(|call| call.listener.waits(call.notification.id));
            let tids = scheduled.tids(&self.parked);
            let look = scheduled.threads.look(&tids);
            if self.has_calls() {
                continue;
            }
            match look {
                Look::Busy if !scheduled.threads.is_guess_due(&tids, scheduled.since) => {
                    self.wait(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
                Look::Busy if !scheduled.waiting.is_empty() || !scheduled.stopped.is_empty() => {
                    scheduled.scheduler.summary.guesses += 1;
                }
                Look::Busy => {
                    self.wait(LONGEST_PAUSE);
                    if scheduled.since.elapsed() >= scheduled.scheduler.schedule.stuck_after * 3 {
                        self.end_stuck(&mut scheduled, "no thread makes a call");
                    }
                    continue;
                }
                Look::Quiet { timed } if !scheduled.waiting.is_empty() => {
                    scheduled.scheduler.summary.timed += u64::from(timed);
                }
                Look::Quiet { .. } => {}
            }
            scheduled.threads.number_all(&tids);
            if self.go_on(&mut scheduled) {
                (scheduled.since, pause) = (Instant::now(), FIRST_PAUSE);
            } else {
                self.wait(IDLE_PAUSE);
                let idle = self.parked.is_empty() && scheduled.waiting.is_empty();
                if idle && scheduled.since.elapsed() >= scheduled.scheduler.schedule.stuck_after {
                    self.end_stuck(&mut scheduled, "every thread waits");
                }
            }
            if scheduled.scheduler.summary.choices == MOST_CALLS {
                self.end_stuck(&mut scheduled, "the calls do not end");
            }
        }
    }

    /// Whether a call has arrived.
    fn has_calls(&self) -> bool {
        self.listeners.iter().any(|listener| {
            let mut polled = libc::pollfd { fd: listener.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, which lives longer than the call.
            unsafe { libc::poll(&raw mut polled, 1, 0) == 1 && polled.revents & libc::POLLIN != 0 }
        })
    }

    /// Waits for a call or a report.
    fn wait(&self, time: Duration) {
        let listeners = self.listeners.iter().map(|listener| listener.as_fd().as_raw_fd());
        let mut polled: Vec<libc::pollfd> = listeners
            .chain([self.reports.0.as_raw_fd()])
            .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
            .collect();
        let time = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        // SAFETY: the pointer and the length are those of the vector, and the time is this
        // function's own.
        unsafe {
            libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, &raw const time, std::ptr::null());
        }
    }

    /// Takes in all calls that have arrived. Returns whether there were any.
    fn take_in(&mut self, scheduled: &mut Scheduled) -> bool {
        let mut some = false;
        for index in (0..self.listeners.len()).rev() {
            let listener = self.listeners[index].clone();
            loop {
                let mut polled = libc::pollfd { fd: listener.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one entry, which lives longer than the call.
                let ready = unsafe { libc::poll(&raw mut polled, 1, 0) } == 1;
                if !ready {
                    break;
                }
                if polled.revents & libc::POLLIN == 0 {
                    // The last thread under this filter is gone.
                    self.listeners.remove(index);
                    break;
                }
                let Ok(received) = listener.receive() else { break };
                let Some(notification) = received else { continue };
                some = true;
                scheduled.threads.add(notification.tid);
                let arrived = Instant::now();
                let until = sleep(&notification).map(|time| arrived + time);
                scheduled.waiting.push(WaitingCall {
                    listener: listener.clone(),
                    notification,
                    arrived,
                    slept: None,
                    answer: None,
                    until,
                    from: 0,
                });
            }
        }
        some
    }

    /// Calls whose sleep in the driver is over wait for their turn again.
    fn unpark(&mut self, scheduled: &mut Scheduled) {
        let now = Instant::now();
        let (due, sleeping): (Vec<Parked>, Vec<Parked>) =
            std::mem::take(&mut self.parked).into_iter().partition(|parked| parked.wake <= now);
        self.parked = sleeping;
        for Parked { listener, notification, arrived, file, interruptible, .. } in due {
            if interruptible && super::client_process::has_signal(notification.tid) {
                listener.answer(notification.id, Answer::Restart);
                continue;
            }
            let slept = Some(file);
            let call = WaitingCall { listener, notification, arrived, slept, answer: None, until: None, from: 0 };
            scheduled.waiting.push(call);
        }
    }

    /// Answers one call, or makes something happen. Returns false if there is nothing to do.
    fn go_on(&mut self, scheduled: &mut Scheduled) -> bool {
        let step = scheduled.scheduler.summary.choices;
        let Scheduled { stopped, dead, .. } = scheduled;
        let before = stopped.len();
        stopped.retain(|(tgid, until)| {
            let stays = step < *until;
            if !stays {
                client_threads::send(*tgid, libc::SIGCONT);
            }
            stays
        });
        if stopped.len() < before {
            // The process runs.
            return true;
        }
        dead.retain(|(device, until)| {
            let stays = step < *until;
            if !stays {
                self.driver.machine.restore_device(*device);
            }
            stays
        });
        if scheduled.waiting.is_empty() {
            // What was to go on after some more calls goes on now: there are none.
            let stopped: Vec<_> = scheduled.stopped.drain(..).collect();
            stopped.iter().for_each(|(tgid, _)| client_threads::send(*tgid, libc::SIGCONT));
            return !stopped.is_empty();
        }
        let late = match scheduled.scheduler.event() {
            Some(Event::Late) => true,
            Some(event) => {
                self.happen(scheduled, event);
                // A process that got a signal may run.
                return true;
            }
            None => false,
        };
        let Some(index) = scheduled.choose() else { return false };
        let call = scheduled.waiting.swap_remove(index);
        self.answer_call(scheduled, call, late);
        true
    }

    fn answer_call(&mut self, scheduled: &mut Scheduled, mut call: WaitingCall, late: bool) {
        let tid = call.notification.tid;
        let number = scheduled.threads.number(tid).unwrap_or(u32::MAX);
        scheduled.threads.chosen(tid);
        if let Some(answer) = call.answer.take() {
            scheduled.scheduler.chose(number);
            return call.listener.answer(call.notification.id, answer);
        }
        if let Some(until) = call.until {
            // Time passes for nobody else meanwhile.
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        self.fail_if_wanted(scheduled, &call.notification);
        if super::is_alloc(&call.notification) {
            for other in scheduled.waiting.iter().map(|other| other.notification).collect::<Vec<_>>() {
                self.overlap(&call.notification, &other);
            }
        }
        let reply = match call.notification.number {
            libc::SYS_sched_yield | libc::SYS_nanosleep | libc::SYS_clock_nanosleep => Answer::Value(0).into(),
            libc::SYS_getrandom => scheduled.random_bytes(&call.notification),
            _ => self.dispatch(&call.listener, &call.notification, call.arrived, call.slept),
        };
        if !self.driver.machine.traps.is_empty() {
            self.kill_trapped_clients();
        }
        let [_, request, ..] = call.notification.arguments;
        scheduled.scheduler.chose(number);
        scheduled.scheduler.note(call.notification.number as u64);
        match reply {
            Reply::Later(wake, file, interruptible) => {
                let WaitingCall { listener, notification, arrived, .. } = call;
                self.parked.push(Parked { listener, notification, arrived, wake, file, interruptible });
            }
            Reply::Now(answer) => {
                scheduled.scheduler.note(match &answer {
                    Answer::Continue => 0,
                    Answer::Value(value) if call.notification.number == libc::SYS_ioctl => {
                        mix(request & 0xffff) ^ (*value as u64)
                    }
                    Answer::Value(_) => 1,
                    Answer::Error(errno) => mix(2 + *errno as u64) ^ mix(request & 0xffff),
                    Answer::Restart => 3,
                    Answer::Descriptor { .. } => 4,
                });
                let driver = !matches!(answer, Answer::Continue) && call.notification.number == libc::SYS_ioctl;
                if late && driver {
                    let calls = 1 + scheduled.scheduler.draw(Draw::Length, 8);
                    scheduled.scheduler.happened(Event::Late, &format!(" answer of client {number}"));
                    call.from = scheduled.scheduler.summary.choices + calls;
                    call.answer = Some(answer);
                    scheduled.waiting.push(call);
                } else {
                    call.listener.answer(call.notification.id, answer);
                }
            }
        }
    }

    /// The command of a call that is an ioctl of the driver.
    fn command(&mut self, call: &Notification) -> Option<&'static str> {
        if call.number != libc::SYS_ioctl {
            return None;
        }
        let (who, inode) = self.file(call.tid, call.arguments[0] as c_int, Instant::now())?;
        let file = self.files.get_mut(inode)?.id;
        self.describe(&who, file, call.arguments[1] as u32).0.cmd
    }

    /// Lets a creation of memory fail while there is none.
    fn fail_if_wanted(&mut self, scheduled: &Scheduled, call: &Notification) {
        if scheduled.scheduler.summary.choices < scheduled.no_memory_until {
            if let Some(name @ ("MEM_CREATE" | "ALLOC")) = self.command(call) {
                self.faults.add(name.into(), Some(1), Strike::Fails(Errno::ENOMEM));
            }
        }
    }

    /// Makes an event happen, if there is something that it can happen to.
    fn happen(&mut self, scheduled: &mut Scheduled, event: Event) {
        let processes = scheduled.threads.processes();
        let Scheduled { scheduler, .. } = scheduled;
        let of = |length: usize| scheduler.draw(Draw::Target, length as u64) as usize;
        let target = (!processes.is_empty()).then(|| processes[of(processes.len())]);
        let until = scheduler.summary.choices + 1 + scheduler.draw(Draw::Length, 24);
        let detail = match (event, target) {
            (Event::Kill, Some(tgid)) => {
                client_threads::send(tgid, libc::SIGKILL);
                format!(" of process {tgid}")
            }
            (Event::Stop, Some(tgid)) => {
                client_threads::send(tgid, libc::SIGSTOP);
                scheduled.stopped.push((tgid, until));
                format!(" of process {tgid}")
            }
            (Event::Signal, Some(tgid)) => {
                let signals = client_threads::harmless_signals(tgid);
                let signal = signals[scheduler.draw(Draw::Length, signals.len() as u64) as usize];
                client_threads::send(tgid, signal);
                format!(" {signal} to process {tgid}")
            }
            (Event::Reset, _) => {
                let devices: Vec<u32> = self.driver.machine.physical_ids().collect();
                if devices.is_empty() {
                    return;
                }
                let device = devices[of(devices.len())];
                self.driver.machine.kill_device(device);
                scheduled.dead.push((device, until));
                format!(" of device {device}")
            }
            (Event::Memory, _) => {
                scheduled.no_memory_until = until;
                " is used up".into()
            }
            (Event::Fault, _) => {
                let (name, errno) = FAILURES[of(FAILURES.len())];
                self.faults.add(name.into(), Some(1), Strike::Fails(errno));
                format!(": the next {name} is {errno:?}")
            }
            (Event::Late, _) | (_, None) => return,
        };
        scheduled.scheduler.happened(event, &detail);
    }

    /// Ends the clients, of which none gets further.
    fn end_stuck(&mut self, scheduled: &mut Scheduled, reason: &str) {
        let Scheduled { scheduler, threads, since, .. } = scheduled;
        let lines = threads.describe(&[]);
        if lines.is_empty() {
            return;
        }
        scheduler.summary.stuck = std::iter::once(reason.to_owned()).chain(lines).collect();
        for tgid in threads.living() {
            client_threads::send(tgid, libc::SIGKILL);
        }
        if threads.has_own() {
            // The client is this process, and nobody else would end it.
            eprintln!("ascend-emulator: {}", scheduler.summary.stuck.join("\n  "));
            self.recorder.flush();
            std::process::abort();
        }
        *since = Instant::now();
    }
}

impl Scheduled {
    /// The index of the call that goes next.
    fn choose(&mut self) -> Option<usize> {
        let step = self.scheduler.summary.choices;
        let ready = |call: &WaitingCall| {
            let short = |until: Instant| until.saturating_duration_since(call.arrived) <= SHORT_SLEEP;
            call.from <= step && call.until.is_none_or(short)
        };
        let number = |call: &WaitingCall| self.threads.number(call.notification.tid).unwrap_or(u32::MAX);
        let mut clients: Vec<(u32, usize)> = Vec::new();
        for (index, call) in self.waiting.iter().enumerate().filter(|(_, call)| ready(call)) {
            clients.push((number(call), index));
        }
        if clients.is_empty() {
            // A late answer comes sooner if nobody else calls, and a long sleep ends in its time.
            let late = self.waiting.iter().enumerate().filter(|(_, call)| call.answer.is_some());
            clients.extend(late.map(|(index, call)| (number(call), index)));
        }
        if clients.is_empty() {
            let now = Instant::now();
            let over = self.waiting.iter().enumerate().filter(|(_, call)| call.until.is_some_and(|until| until <= now));
            clients.extend(over.map(|(index, call)| (number(call), index)));
        }
        clients.sort_unstable();
        let numbers: Vec<u32> = clients.iter().map(|(number, _)| *number).collect();
        let waits = |index: usize| {
            let call = &self.waiting[index];
            call.until.is_some() || call.notification.number == libc::SYS_sched_yield
        };
        let idle: Vec<u32> = clients.iter().filter(|(_, index)| waits(*index)).map(|(number, _)| *number).collect();
        let picked = self.scheduler.pick(&numbers, |client| idle.contains(&client))?;
        Some(clients[picked].1)
    }

    /// getrandom(2), by the seed.
    fn random_bytes(&mut self, call: &Notification) -> Reply {
        let [buffer, length, ..] = call.arguments;
        let Ok(length) = usize::try_from(length.min(256)) else { return Answer::Continue.into() };
        let number = self.threads.number(call.tid).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            self.randoms += 1;
            let seed = self.scheduler.draw(Draw::Random, u64::MAX) ^ u64::from(number) << 32;
            bytes.extend(mix(seed.wrapping_add(self.randoms)).to_le_bytes());
        }
        match ProcessMemory(call.tid).write(buffer, &bytes[..length]) {
            Ok(()) => Answer::Value(length as i64).into(),
            Err(_) => Answer::Continue.into(),
        }
    }
}

/// How long a call sleeps, if that is all it does.
fn sleep(call: &Notification) -> Option<Duration> {
    let read = |address: u64| {
        let mut bytes = [0; 16];
        ProcessMemory(call.tid).read(address, &mut bytes).ok()?;
        let half = |at: usize| bytes[at..at + 8].try_into().map(i64::from_le_bytes).ok();
        let (seconds, nanoseconds) = (u64::try_from(half(0)?).ok()?, u32::try_from(half(8)?).ok()?);
        (nanoseconds < 1_000_000_000).then(|| Duration::new(seconds, nanoseconds))
    };
    match call.number {
        libc::SYS_nanosleep => read(call.arguments[0]),
        libc::SYS_clock_nanosleep => {
            let [clock, flags, time, ..] = call.arguments;
            let time = read(time)?;
            if flags as c_int & libc::TIMER_ABSTIME == 0 {
                return Some(time);
            }
            let clock = nix::time::ClockId::from_raw(clock as i32);
            let now = nix::time::clock_gettime(clock).ok()?;
            Some(time.saturating_sub(Duration::from(now)))
        }
        _ => None,
    }
}

/// The first pause after which busy threads are looked at again.
const FIRST_PAUSE: Duration = Duration::from_micros(20);

/// The longest one.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// A run of more calls has no end.
const MOST_CALLS: u64 = 2_000_000;

/// How long the server waits if nobody can go on.
const IDLE_PAUSE: Duration = Duration::from_millis(5);
