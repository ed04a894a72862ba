//! Callbacks: functions that a stream passes to a thread of the program.
//!
//! A thread subscribes to streams by its pthread id and processes their reports. A stream that
//! launches a callback puts it into the queue of that thread. For a blocking callback the stream
//! waits for a point, which is passed when the callback has returned, or when no stream is
//! subscribed any more.

use crate::fault::{Fault, Outcome, code, invalid};
use crate::handles::Handle;
use crate::point::{Passing, Point};
use crate::stream::{self, HostCall, HostFunction, Task};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The callbacks that a thread has to process.
pub(crate) struct Reports {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Each with the point that the stream waits for, if it does.
    calls: VecDeque<(HostCall, Option<Passing>)>,
    /// How many streams are subscribed.
    streams: u32,
}

/// By pthread id.
static THREADS: Mutex<BTreeMap<u64, Arc<Reports>>> = Mutex::new(BTreeMap::new());

impl Reports {
    /// Puts a call into the queue. If a stream blocks for it, returns the point to wait for.
    pub(crate) fn push(&self, call: HostCall, blocks: Option<i32>) -> Option<Arc<Point>> {
        let mut state = self.state.lock();
        let (point, passing) = match blocks.filter(|_| state.streams > 0) {
            Some(stream) => {
                let (point, passing) = Point::new(stream);
                (Some(point), Some(passing))
            }
            None => (None, None),
        };
        state.calls.push_back((call, passing));
        drop(state);
        self.changed.notify_all();
        point
    }

    /// A stream unsubscribes. After the last one, no stream waits for a call.
    pub(crate) fn leave(&self) {
        let mut state = self.state.lock();
        state.streams = state.streams.saturating_sub(1);
        if state.streams == 0 {
            state.calls.iter_mut().for_each(|(_, passing)| *passing = None);
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// `aclrtSubscribeReport`.
pub fn subscribe(thread: u64, stream: Handle) -> Outcome {
    let stream = stream::by_handle(stream)?;
    let mut subscribed = stream.reports.lock();
    if stream.has_ended() {
        return Err(stream::unknown());
    }
    if subscribed.is_some() {
        let text = "a thread has already subscribed to the stream. Unsubscribe it first.";
        return Err(Fault::new(code::RT_STREAM_SUBSCRIBE, text));
    }
    let new = || Arc::new(Reports { state: Mutex::default(), changed: Condvar::new() });
    let reports = THREADS.lock().entry(thread).or_insert_with(new).clone();
    reports.state.lock().streams += 1;
    *subscribed = Some(reports);
    Ok(())
}

/// `aclrtUnSubscribeReport`.
pub fn unsubscribe(thread: u64, stream: Handle) -> Outcome {
    let stream = stream::by_handle(stream)?;
    let mut subscribed = stream.reports.lock();
    let of_thread = THREADS.lock().get(&thread).cloned();
    let same = match (&*subscribed, &of_thread) {
        (Some(reports), Some(own)) => Arc::ptr_eq(reports, own),
        _ => false,
    };
    if !same {
        let text = "this thread has not subscribed to the stream. Pass the thread that did.";
        return Err(Fault::new(code::RT_STREAM_SUBSCRIBE, text));
    }
    if let Some(reports) = subscribed.take() {
        reports.leave();
    }
    Ok(())
}

/// `aclrtLaunchCallback`.
pub fn launch(function: Option<HostFunction>, argument: *mut libc::c_void, block: i32, stream: Handle) -> Outcome {
    let function = function.ok_or_else(|| invalid("fn is NULL. Pass a function."))?;
    if !(0..2).contains(&block) {
        return Err(invalid(format!("blockType is {block}. It is 0 or 1.")));
    }
    let stream = stream::by_handle(stream)?;
    let reports = stream.reports.lock().clone().ok_or_else(|| {
        let text = "no thread processes reports of the stream. Call aclrtSubscribeReport first.";
        Fault::new(code::RT_STREAM_NO_CALLBACK, text)
    })?;
    stream.push(Task::Report { reports, call: HostCall { function, argument }, blocks: block == 1 })
}

/// `aclrtProcessReport`: runs the callbacks for this thread, or waits for one.
pub fn process(timeout: i32) -> Outcome {
    if timeout == 0 || timeout < -1 {
        return Err(invalid(format!("{timeout} ms is not a valid timeout. Pass -1 for none, or a positive number.")));
    }
    // SAFETY: a question for a number.
    let thread = unsafe { libc::pthread_self() } as u64;
    let not_subscribed = || {
        let text = "this thread has subscribed to no stream. Call aclrtSubscribeReport with its pthread id.";
        Fault::new(code::RT_THREAD_SUBSCRIBE, text)
    };
    let reports = THREADS.lock().get(&thread).cloned().ok_or_else(not_subscribed)?;
    let end = (timeout > 0).then(|| Instant::now() + Duration::from_millis(timeout as u64));
    let mut state = reports.state.lock();
    let mut called = false;
    loop {
        while let Some((call, passing)) = state.calls.pop_front() {
            drop(state);
            match &passing {
                Some(passing) => stream::while_held_up(passing.stream(), || call.run()),
                None => call.run(),
            }
            drop(passing);
            called = true;
            state = reports.state.lock();
        }
        if called {
            return Ok(());
        }
        if state.streams == 0 {
            return Err(not_subscribed());
        }
        match end {
            None => reports.changed.wait(&mut state),
            Some(end) if Instant::now() >= end => {
                return Err(Fault::new(code::RT_REPORT_TIMEOUT, "no callback came in time."));
            }
            Some(end) => _ = reports.changed.wait_until(&mut state, end),
        }
    }
}

/// Forgets all threads. One that is waiting finds that its streams are gone.
pub(crate) fn end() {
    THREADS.lock().clear();
}
