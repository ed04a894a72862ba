//! Commands that take time.
//!
//! The real driver runs the commands of different processes side by side, and those of one process
//! too, except for the few that take the session's lock alone. The model carries out one command at
//! a time. A command that *pauses* keeps what the driver's would hold at that point (the lock, the
//! counters of its reservations, its mappings), and others are answered until it continues.
//!
//! Copies and fills pause for [`crate::Config::copy_time`], and any command where a test holds it
//! ([`crate::Emulator::hold`]). A copy that continues runs again from its beginning and skips the
//! bytes that it has moved.

use super::session::Process;
use super::{Call, Stop, SvmResult};
use ascend_ioctl::svm::{Arg, Op};
use std::collections::BTreeSet;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// How often a command that waits for the lock looks again.
const AGAIN: Duration = Duration::from_millis(1);

/// A release wakes all sleeping calls, so nothing is missed until then.
const LONG: Duration = Duration::from_secs(3600);

/// The session's lock during a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    None,
    Shared,
    Exclusive,
}

fn lock(op: Op) -> Lock {
    match op {
        Op::UpdateHeap | Op::CloseDevice | Op::PrepareCloseDevice | Op::MemRepair => Lock::Exclusive,
        Op::InitProcess | Op::QueryMemUsedInfo => Lock::None,
        _ => Lock::Shared,
    }
}

/// Whether a command moves bytes before it is answered.
fn moves_bytes(op: Op) -> bool {
    matches!(op, Op::Memcpy | Op::Memcpy2d | Op::MemcpyBatch | Op::Memset8 | Op::SubmitConvertCopy)
}

/// What ends a pause.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    Time(Instant),
    /// A test releases this hold.
    Released(u64),
    /// The command itself checks whether it can continue.
    Retry,
}

/// A range that a paused command uses.
#[derive(Debug)]
struct Held {
    address: u64,
    mappings: Vec<u64>,
}

/// A command that has begun and not ended.
#[derive(Debug)]
pub(super) struct Paused {
    /// Its argument: the driver copies it in once.
    pub arg: Arg,
    lock: Lock,
    moved: u64,
    held: Vec<Held>,
    until: Until,
}

/// Where a command pauses.
#[derive(Debug, Clone, Copy)]
struct Point {
    /// After this many bytes; `None` for half of them.
    after: Option<u64>,
    until: Until,
}

/// How far a command may go.
#[derive(Debug)]
pub(super) struct Pace {
    op: Op,
    /// Bytes that earlier runs of the command moved.
    moved: u64,
    /// Bytes that this run has reached.
    reached: u64,
    point: Option<Point>,
    /// Set when it has come to the point.
    paused: Option<Until>,
    /// The ranges that it uses now.
    ranges: Vec<(u64, u64)>,
}

impl Pace {
    /// The command begins to move bytes of these ranges.
    pub fn begin(&mut self, size: u64, ranges: &[(u64, u64)]) {
        self.ranges = ranges.to_vec();
        if let Some(point) = &mut self.point {
            point.after.get_or_insert(self.reached + size / 2);
        }
    }

    /// Cuts `length` to what can be moved now. False if these bytes were moved by an earlier run.
    pub fn step(&mut self, length: &mut u64) -> SvmResult<bool> {
        if self.reached < self.moved {
            *length = (*length).min(self.moved - self.reached);
            self.reached += *length;
            return Ok(false);
        }
        if let Some(Point { after: Some(after), until }) = self.point {
            if after <= self.reached {
                return self.pause(until);
            }
            *length = (*length).min(after - self.reached);
        }
        self.reached += *length;
        Ok(true)
    }

    fn pause<T>(&mut self, until: Until) -> SvmResult<T> {
        self.point = None;
        self.paused = Some(until);
        Err(Stop::Sleep(until.wake()))
    }

    /// Progress of a copy that continues after its command was answered.
    pub fn continues_later(&mut self) -> Option<(u64, Until)> {
        self.paused.map(|until| (self.reached, until))
    }
}

impl Until {
    /// When to look again.
    fn wake(self) -> Instant {
        match self {
            Until::Time(time) => time,
            Until::Released(_) => Instant::now() + LONG,
            Until::Retry => Instant::now(),
        }
    }
}

/// A test's wish that a command pauses.
struct Wish {
    id: u64,
    command: String,
    after: u64,
    /// Told when a command has paused.
    paused: Sender<()>,
}

/// The holds of tests.
#[derive(Default)]
pub struct Holds {
    last: u64,
    wishes: Vec<Wish>,
    /// Those with a paused command.
    taken: BTreeSet<u64>,
}

impl Holds {
    /// The next command with this name pauses after this many bytes. Returns the hold's id.
    pub(crate) fn add(&mut self, command: String, after: u64, paused: Sender<()>) -> u64 {
        self.last += 1;
        self.wishes.push(Wish { id: self.last, command, after, paused });
        self.last
    }

    /// Lets its command continue, or stops waiting for one.
    pub(crate) fn release(&mut self, id: u64) {
        self.wishes.retain(|wish| wish.id != id);
        self.taken.remove(&id);
    }

    /// Sleeps until the pause is over.
    pub(super) fn wait(&self, until: Until) -> SvmResult {
        let over = match until {
            Until::Time(time) => Instant::now() >= time,
            Until::Released(id) => !self.taken.contains(&id),
            Until::Retry => true,
        };
        if over { Ok(()) } else { Err(Stop::Sleep(until.wake())) }
    }

    fn point(&self, op: Op) -> Option<Point> {
        let wish = self.wishes.iter().find(|wish| wish.command == op.name())?;
        Some(Point { after: Some(wish.after), until: Until::Released(wish.id) })
    }

    fn take(&mut self, until: Until) {
        let Until::Released(id) = until else { return };
        if let Some(at) = self.wishes.iter().position(|wish| wish.id == id) {
            let wish = self.wishes.remove(at);
            self.taken.insert(id);
            // The test may have stopped waiting.
            let _ = wish.paused.send(());
        }
    }
}

impl Process {
    /// Takes the lock. Returns the caller's command if it had paused, and sleeps if it must wait.
    pub(super) fn enter(&mut self, holds: &Holds, op: Op, tid: i32) -> SvmResult<Option<Paused>> {
        if let Some(paused) = self.paused.get(&tid) {
            holds.wait(paused.until)?;
            let paused = self.paused.remove(&tid);
            paused.iter().flat_map(|paused| &paused.held).for_each(|held| self.count_use(held, false));
            return Ok(paused);
        }
        let lock = lock(op);
        let is_free = match lock {
            Lock::None => true,
            // A reader that comes after a waiting writer waits, too.
            Lock::Shared => self.writers.is_empty() && !self.is_locked(|lock| lock == Lock::Exclusive),
            Lock::Exclusive => !self.is_locked(|lock| lock != Lock::None),
        };
        if lock == Lock::Exclusive {
            if is_free {
                self.writers.remove(&tid)
            } else {
                self.writers.insert(tid)
            };
        }
        if is_free { Ok(None) } else { Err(Stop::Sleep(Instant::now() + AGAIN)) }
    }

    fn is_locked(&self, how: impl Fn(Lock) -> bool) -> bool {
        self.paused.values().any(|paused| how(paused.lock))
    }

    fn count_use(&mut self, held: &Held, up: bool) {
        let Some(heap) = self.heap_mut(held.address) else { return };
        for start in &held.mappings {
            if let Some(mapping) = heap.mappings.get_mut(start) {
                mapping.readers = if up { mapping.readers + 1 } else { mapping.readers.saturating_sub(1) };
            }
        }
        if let Some(reservation) = heap.reservation_mut(held.address) {
            let counter = reservation.counter;
            reservation.counter = if up { counter + 1 } else { counter.saturating_sub(1) };
        }
    }
}

impl Call<'_, '_> {
    /// How far a command may go, if it is new or has paused before.
    pub(super) fn pace(holds: &Holds, copy_time: Duration, op: Op, paused: Option<&Paused>) -> Pace {
        let copies = moves_bytes(op) || op == Op::AsyncMemcpy;
        let timed = || Point { after: None, until: Until::Time(Instant::now() + copy_time) };
        let point = match paused {
            Some(_) => None,
            None => holds.point(op).or_else(|| (copies && !copy_time.is_zero()).then(timed)),
        };
        let moved = paused.map_or(0, |paused| paused.moved);
        Pace { op, moved, reached: 0, point, paused: None, ranges: Vec::new() }
    }

    /// Pauses a command that moves no bytes before it begins.
    pub(super) fn pause_before(&mut self) -> SvmResult {
        match self.pace.point {
            Some(point) if !moves_bytes(self.pace.op) && self.pace.op != Op::AsyncMemcpy => {
                self.pace.pause(point.until)
            }
            _ => Ok(()),
        }
    }

    /// Pauses a command whose bytes are all moved.
    pub(super) fn pause_after(&mut self) -> SvmResult {
        match self.pace.point {
            Some(point) if moves_bytes(self.pace.op) => {
                self.pace.reached = u64::MAX;
                self.pace.pause(point.until)
            }
            _ => Ok(()),
        }
    }

    /// Keeps a command that sleeps, with its lock and what it uses.
    pub(super) fn keep_paused(&mut self, arg: Arg, sleeps: bool) {
        if let Some(until) = self.pace.paused {
            self.world.holds.take(until);
        }
        if !sleeps {
            return;
        }
        // Only of one dimension the driver knows the size in time.
        let sized = self.pace.op != Op::Memcpy2d;
        let ranges = self.pace.ranges.iter().filter(|(address, _)| self.process.is_svm(*address));
        let held: Vec<Held> = ranges
            .map(|&(address, size)| {
                let heap = self.process.heap(address).filter(|_| sized);
                Held { address, mappings: heap.and_then(|heap| heap.walk(address, size)).unwrap_or_default() }
            })
            .collect();
        held.iter().for_each(|held| self.process.count_use(held, true));
        let until = self.pace.paused.unwrap_or(Until::Retry);
        let moved = self.pace.reached.max(self.pace.moved);
        let paused = Paused { arg, lock: lock(self.pace.op), moved, held, until };
        self.process.paused.insert(self.caller.tid, paused);
    }
}
