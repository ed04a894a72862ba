//! Events: points in the order of a stream.
//!
//! An event counts how often it was put on a stream and how often it was reached there. Waiting for
//! it means waiting for the latest time that it was put there before the wait.

use crate::border::Out;
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Handles, kind};
use crate::stream::{self, Task};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An event.
pub(crate) struct Event {
    id: u32,
    /// Made by `aclrtCreateEventExWithFlag`: one that was never recorded counts as complete, and it
    /// cannot be reset.
    newer: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How often it was put on a stream.
    recorded: u64,
    /// The latest of these that was reached.
    completed: u64,
    /// When, in nanoseconds of the system's steady clock.
    time: u64,
}

static EVENTS: Handles<Arc<Event>, { kind::EVENT }> = Handles::new();

impl Event {
    /// It was reached.
    pub(crate) fn complete(&self, time: u64) {
        let mut state = self.state.lock();
        if time > state.completed {
            state.completed = time;
            state.time = now();
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn is_complete(&self, time: u64) -> bool {
        self.state.lock().completed >= time
    }

    /// Waits until it was reached so often; `false` if the time is over.
    pub(crate) fn wait(&self, time: u64, timeout: Option<Duration>) -> bool {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.state.lock();
        while state.completed < time {
            match end {
                None => self.changed.wait(&mut state),
                Some(end) if Instant::now() >= end => return false,
                Some(end) => _ = self.changed.wait_until(&mut state, end),
            }
        }
        true
    }

    /// When it was reached.
    fn time(&self) -> Outcome<u64> {
        let state = self.state.lock();
        match () {
            () if state.recorded == 0 => Err(refused("the event was never recorded. Call aclrtRecordEvent first.")),
            () if state.completed < state.recorded => {
                let text = "the event was not reached yet. Wait for it first.";
                Err(Fault::new(code::RT_EVENT_TIMESTAMP, text))
            }
            () => Ok(state.time),
        }
    }
}

/// Nanoseconds of the system's steady clock.
pub(crate) fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written to a local variable. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn find(event: Handle) -> Outcome<Arc<Event>> {
    if event.is_null() {
        return Err(invalid("event is NULL. Pass one that aclrtCreateEvent made."));
    }
    EVENTS.get(event).ok_or_else(unknown)
}

#[cold]
fn unknown() -> Box<Fault> {
    refused("this is no event, or it is destroyed.")
}

fn new(event: Out<Handle>, newer: bool) -> Outcome {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let event = event.check("event")?;
    let id = LAST.fetch_add(1, Ordering::Relaxed);
    event.write(EVENTS.insert(Arc::new(Event { id, newer, state: Mutex::default(), changed: Condvar::new() }))?);
    Ok(())
}

/// Flags of events that exist.
const FLAGS: u32 = 1 | 2 | 8 | 16 | 32 | 64;
/// An event for other processes, which only hardware can record.
const FLAG_IPC: u32 = 64;

fn check_flags(flags: u32) -> Outcome {
    if flags == 0 || flags & !FLAGS != 0 {
        return Err(refused(format!("flags {flags:#x} are none of events. Use ACL_EVENT_SYNC (1) or others.")));
    }
    if flags & FLAG_IPC != 0 {
        return Err(unsupported("events for other processes need a device that records them."));
    }
    Ok(())
}

/// `aclrtCreateEvent`.
pub fn create(event: Out<Handle>) -> Outcome {
    new(event, false)
}

/// `aclrtCreateEventWithFlag`.
pub fn create_with(event: Out<Handle>, flags: u32) -> Outcome {
    event.check("event")?;
    check_flags(flags)?;
    new(event, false)
}

/// `aclrtCreateEventExWithFlag`.
pub fn create_newer_with(event: Out<Handle>, flags: u32) -> Outcome {
    event.check("event")?;
    check_flags(flags)?;
    new(event, true)
}

/// `aclrtDestroyEvent`: what waits for it goes on waiting.
pub fn destroy(event: Handle) -> Outcome {
    find(event)?;
    EVENTS.remove(event).ok_or_else(unknown)?;
    Ok(())
}

/// `aclrtRecordEvent`.
pub fn record(event: Handle, stream: Handle) -> Outcome {
    let event = find(event)?;
    let stream = stream::by_handle(stream)?;
    let time = {
        let mut state = event.state.lock();
        state.recorded += 1;
        state.recorded
    };
    let pushed = stream.push(Task::Record(event.clone(), time));
    if pushed.is_err() {
        // The stream was destroyed meanwhile.
        event.complete(time);
    }
    pushed
}

/// `aclrtResetEvent`: of the older kind, in the order of the stream.
pub fn reset(event: Handle, stream: Handle) -> Outcome {
    let event = find(event)?;
    if event.newer {
        return Err(refused("events of aclrtCreateEventExWithFlag are not reset: record them again."));
    }
    stream::by_handle(stream)?.push(Task::Work(Box::new(move || {
        let mut state = event.state.lock();
        if state.completed == state.recorded {
            *state = State::default();
        }
        Ok(())
    })))
}

/// `aclrtStreamWaitEvent`: an event that was never recorded is not waited for.
pub fn wait_on_stream(stream: Handle, event: Handle) -> Outcome {
    let event = find(event)?;
    let time = event.state.lock().recorded;
    stream::by_handle(stream)?.push(Task::Wait(event, time))
}

/// `aclrtSynchronizeEvent`.
pub fn synchronize(event: Handle) -> Outcome {
    let event = find(event)?;
    let time = event.state.lock().recorded;
    event.wait(time, None);
    Ok(())
}

/// `aclrtSynchronizeEventWithTimeout`.
pub fn synchronize_within(event: Handle, timeout: i32) -> Outcome {
    let timeout = stream::milliseconds(timeout)?;
    let event = find(event)?;
    let time = event.state.lock().recorded;
    if event.wait(time, timeout) {
        return Ok(());
    }
    Err(Fault::new(code::RT_EVENT_TIMEOUT, "the event was not reached in time."))
}

/// `aclrtQueryEventStatus`: 1 is complete.
pub fn query(event: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let event = find(event)?;
    let state = event.state.lock();
    status.write(i32::from(state.completed >= state.recorded && (state.recorded > 0 || event.newer)));
    Ok(())
}

/// `aclrtQueryEventWaitStatus`: 0 is complete.
pub fn query_wait(event: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let event = find(event)?;
    let state = event.state.lock();
    status.write(i32::from(state.completed < state.recorded));
    Ok(())
}

/// `aclrtEventElapsedTime`, in milliseconds.
pub fn elapsed(milliseconds: Out<f32>, start: Handle, end: Handle) -> Outcome {
    let milliseconds = milliseconds.check("ms")?;
    let (start, end) = (find(start)?.time()?, find(end)?.time()?);
    milliseconds.write((end as f64 - start as f64) as f32 / 1e6);
    Ok(())
}

/// `aclrtEventGetTimestamp`, in microseconds.
pub fn timestamp(event: Handle, microseconds: Out<u64>) -> Outcome {
    let microseconds = microseconds.check("timestamp")?;
    microseconds.write(find(event)?.time()? / 1000);
    Ok(())
}

/// `aclrtGetEventId`.
pub fn id(event: Handle, id: Out<u32>) -> Outcome {
    let id = id.check("eventId")?;
    id.write(find(event)?.id);
    Ok(())
}

/// Ends all events.
pub(crate) fn end() {
    for event in EVENTS.collect(|handle, _| Some(handle)) {
        EVENTS.remove(event);
    }
}
