//! Events: names for points in the order of streams.
//!
//! Recording an event puts a point on a stream, and the event names that point from then on. A wait
//! for an event waits for the point that it names at that moment, even if the event is recorded
//! again, reset or destroyed later.

use crate::border::Out;
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Handles, kind};
use crate::point::Point;
use crate::stream::{self, Task};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An event.
pub(crate) struct Event {
    id: u32,
    /// Made by `aclrtCreateEventExWithFlag`: one that was never recorded counts as complete, and it
    /// cannot be reset.
    newer: bool,
    /// The point of its latest record; `None` if there is none, or it was reset since.
    latest: Mutex<Option<Arc<Point>>>,
}

static EVENTS: Handles<Arc<Event>, { kind::EVENT }> = Handles::new();

impl Event {
    fn latest(&self) -> Option<Arc<Point>> {
        self.latest.lock().clone()
    }

    /// When its point was passed.
    fn time(&self) -> Outcome<u64> {
        let never = || refused("the event was never recorded. Call aclrtRecordEvent first.");
        self.latest().ok_or_else(never)?.time().ok_or_else(|| {
            let text = "the event is not reached yet. Wait for it first.";
            Fault::new(code::RT_EVENT_TIMESTAMP, text)
        })
    }
}

fn find(event: Handle) -> Outcome<Arc<Event>> {
    if event.is_null() {
        return Err(invalid("event is NULL. Pass one that aclrtCreateEvent made."));
    }
    EVENTS.get(event).ok_or_else(unknown)
}

fn unknown() -> Box<Fault> {
    refused("this is not an event, or it is destroyed.")
}

fn new(event: Out<Handle>, newer: bool) -> Outcome {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let event = event.check("event")?;
    let id = LAST.fetch_add(1, Ordering::Relaxed);
    event.write(EVENTS.insert(Arc::new(Event { id, newer, latest: Mutex::new(None) }))?);
    Ok(())
}

/// The known flags of events.
const FLAGS: u32 = 1 | 2 | 8 | 16 | 32 | 64;
/// An event for other processes, which only a device can record.
const FLAG_IPC: u32 = 64;

fn check_flags(flags: u32) -> Outcome {
    if flags == 0 || flags & !FLAGS != 0 {
        return Err(refused(format!("flags {flags:#x} are not flags of events. Use ACL_EVENT_SYNC (1) or others.")));
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

/// `aclrtDestroyEvent`: waits for it continue.
pub fn destroy(event: Handle) -> Outcome {
    find(event)?;
    EVENTS.remove(event).ok_or_else(unknown)?;
    Ok(())
}

/// `aclrtRecordEvent`.
pub fn record(event: Handle, stream: Handle) -> Outcome {
    let event = find(event)?;
    let stream = stream::by_handle(stream)?;
    // Under the lock: of two threads that record, the later one on a stream is the latest.
    let mut latest = event.latest.lock();
    *latest = Some(stream.record()?);
    Ok(())
}

/// `aclrtResetEvent`: only for the older kind. Resets the latest record before the call, in the
/// order of the stream. A record that is not reached by then stays.
pub fn reset(event: Handle, stream: Handle) -> Outcome {
    let event = find(event)?;
    if event.newer {
        return Err(refused("events of aclrtCreateEventExWithFlag are not reset: record them again."));
    }
    let stream = stream::by_handle(stream)?;
    let Some(point) = event.latest() else { return Ok(()) };
    stream.push(Task::Work(Box::new(move || {
        let is_point = |latest: &mut Arc<Point>| Arc::ptr_eq(latest, &point) && point.is_passed();
        event.latest.lock().take_if(is_point);
        Ok(())
    })))
}

/// `aclrtStreamWaitEvent`: an event that was never recorded is not waited for.
pub fn wait_on_stream(stream: Handle, event: Handle) -> Outcome {
    let event = find(event)?;
    let stream = stream::by_handle(stream)?;
    event.latest().map_or(Ok(()), |point| stream.push(Task::Wait(point)))
}

/// `aclrtStreamWaitEventWithTimeout`: in milliseconds, -1 for none. The stream fails after that.
pub fn wait_on_stream_within(stream: Handle, event: Handle, timeout: i32) -> Outcome {
    let Some(timeout) = stream::milliseconds(timeout)? else { return wait_on_stream(stream, event) };
    let event = find(event)?;
    let stream = stream::by_handle(stream)?;
    let Some(point) = event.latest() else { return Ok(()) };
    let mut end = None;
    stream.push(Task::Until(Box::new(move || {
        if point.is_passed() {
            return Ok(true);
        }
        let now = Instant::now();
        if now >= *end.get_or_insert(now + timeout) {
            return Err(Fault::new(code::RT_EVENT_TIMEOUT, "the stream waited for the event too long."));
        }
        Ok(false)
    })))
}

/// `aclrtQueryEvent`: 0 is complete, 1 is not.
pub fn query_older(event: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let event = find(event)?;
    let complete = event.latest().map_or(event.newer, |point| point.is_passed());
    status.write((!complete).into());
    Ok(())
}

/// `aclrtSynchronizeEvent`.
pub fn synchronize(event: Handle) -> Outcome {
    wait(event, None).map(drop)
}

/// `aclrtSynchronizeEventWithTimeout`.
pub fn synchronize_within(event: Handle, timeout: i32) -> Outcome {
    if wait(event, stream::milliseconds(timeout)?)? {
        return Ok(());
    }
    Err(Fault::new(code::RT_EVENT_TIMEOUT, "the event was not reached in time."))
}

/// Waits until an event is reached; `false` after the timeout.
fn wait(event: Handle, timeout: Option<Duration>) -> Outcome<bool> {
    let Some(point) = find(event)?.latest() else { return Ok(true) };
    if !point.is_passed() {
        stream::check_not_in_function_of(point.stream)?;
    }
    Ok(point.wait(timeout))
}

/// `aclrtQueryEventStatus`: 1 is complete.
pub fn query(event: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let event = find(event)?;
    status.write(event.latest().map_or(event.newer, |point| point.is_passed()).into());
    Ok(())
}

/// `aclrtQueryEventWaitStatus`: 0 is complete.
pub fn query_wait(event: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let passed = find(event)?.latest().is_none_or(|point| point.is_passed());
    status.write((!passed).into());
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
