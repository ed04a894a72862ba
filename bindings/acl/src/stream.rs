//! Streams: work done in order, in the background.
//!
//! A stream has its own thread, which starts with the first work that cannot be done at once and
//! blocks all signals. The fault of failed work stays with the stream, and the next call that waits
//! for the stream returns it. Destroying a stream drops the work that has not begun, which passes
//! the points there.

use crate::border::{self, In, Out};
use crate::context::{self, Context};
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::handles::{Handle, Handles, kind};
use crate::point::{Passing, Point};
use crate::report::Reports;
use ascend_vmm::LogicalId;
use parking_lot::{Condvar, Mutex};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A task of a stream.
pub(crate) enum Task {
    /// Work of the library.
    Work(Box<dyn FnOnce() -> Outcome + Send>),
    /// A function of the program.
    Call(HostCall),
    /// A function of the program, called by the thread that processes reports. The stream waits for
    /// it if it blocks.
    Report { reports: Arc<Reports>, call: HostCall, blocks: bool },
    /// Passes a point, by being dropped.
    Record(#[expect(dead_code, reason = "dropped, not read")] Passing),
    /// Waits until a point, mostly of another stream, is passed.
    Wait(Arc<Point>),
    /// Waits until a condition holds.
    Until(Box<dyn FnMut() -> Outcome<bool> + Send>),
}

/// A function of the program, written in C or C++.
pub(crate) type HostFunction = unsafe extern "C-unwind" fn(*mut libc::c_void);

/// A function of the program with its argument.
pub(crate) struct HostCall {
    pub(crate) function: HostFunction,
    pub(crate) argument: *mut libc::c_void,
}

// SAFETY: the program passes a function and an argument to be used by another thread.
unsafe impl Send for HostCall {}

impl HostCall {
    pub(crate) fn run(self) {
        let must_return = MustReturn;
        // SAFETY: the program passed this function for this argument.
        unsafe { (self.function)(self.argument) };
        std::mem::forget(must_return);
    }
}

/// Aborts the process if the stack is unwound through it.
struct MustReturn;

impl Drop for MustReturn {
    fn drop(&mut self) {
        border::log(
            "libascendcl: a function that was passed to aclrtLaunchHostFunc or aclrtLaunchCallback threw an exception \
             or called pthread_exit. It must return: catch exceptions inside it. The process is aborted.\n",
        );
        std::process::abort();
    }
}

/// A stream.
pub(crate) struct Stream {
    id: i32,
    context: Handle,
    device: LogicalId,
    priority: u32,
    flags: u32,
    overflow: AtomicU32,
    failure_mode: AtomicU64,
    /// The thread that processes its callbacks.
    pub(crate) reports: Mutex<Option<Arc<Reports>>>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Tasks so far, and how many of them are done or dropped.
    pushed: u64,
    done: u64,
    /// Whether the stream's thread was started.
    worker: bool,
    /// Whether it is doing work of the library.
    working: bool,
    /// Destroyed: no task begins any more.
    ended: bool,
    /// How often it was aborted or stopped: a wait that began before ends.
    stops: u64,
    /// A fault that was not returned yet.
    fault: Option<Box<Fault>>,
}

static STREAMS: Handles<Arc<Stream>, { kind::STREAM }> = Handles::new();

thread_local! {
    /// The number of the stream that waits for this thread: this is the stream's own thread, or it
    /// runs a function that the stream waits for.
    static HOLDS_UP: Cell<i32> = const { Cell::new(-1) };
}

/// How often a stream checks a condition that it waits for.
const LOOK: Duration = Duration::from_millis(1);
/// How often a stream that waits for another looks whether it was stopped.
const STOP: Duration = Duration::from_millis(50);

impl Stream {
    fn new(context: Handle, device: LogicalId, priority: u32, flags: u32) -> Arc<Stream> {
        static LAST: AtomicI32 = AtomicI32::new(0);
        Arc::new(Stream {
            id: LAST.fetch_add(1, Ordering::Relaxed),
            context,
            device,
            priority: priority.min(7),
            flags,
            overflow: AtomicU32::new(0),
            failure_mode: AtomicU64::new(0),
            reports: Mutex::new(None),
            queue: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.queue.lock().ended
    }

    /// Puts a point at the end of the stream.
    pub(crate) fn record(self: &Arc<Stream>) -> Outcome<Arc<Point>> {
        let (point, passing) = Point::new(self.id);
        self.push(Task::Record(passing))?;
        Ok(point)
    }

    /// Puts a task at the end of the stream. If this fails, the stream is unchanged.
    pub(crate) fn push(self: &Arc<Stream>, task: Task) -> Outcome {
        let mut queue = self.queue.lock();
        if queue.ended {
            return Err(unknown());
        }
        if queue.pushed == queue.done && task.is_over() {
            // Nothing is before it, and dropping it completes it.
            return Ok(());
        }
        if !queue.worker {
            self.start()?;
            queue.worker = true;
        }
        queue.tasks.push_back(task);
        queue.pushed += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Starts the stream's thread.
    fn start(self: &Arc<Stream>) -> Outcome {
        let stream = self.clone();
        let name = format!("acl stream {}", self.id);
        let started = without_signals(|| std::thread::Builder::new().name(name).spawn(move || stream.work()));
        started.map(drop).map_err(|error| {
            let text = format!(
                "no thread could be started for the stream: {error}. Allow more threads or memory (ulimit -u, \
                 ulimit -v, pids.max of the control group), or use fewer streams."
            );
            Fault::new(code::RT_RESOURCE, text)
        })
    }

    /// Runs the tasks in the queue until the stream is destroyed.
    fn work(&self) {
        let _ = HOLDS_UP.try_with(|stream| stream.set(self.id));
        let mut queue = self.queue.lock();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                queue.working = matches!(task, Task::Work(_));
                drop(queue);
                let fault = self.run(task);
                queue = self.queue.lock();
                queue.working = false;
                queue.done += 1;
                queue.fault = queue.fault.take().or(fault);
                self.changed.notify_all();
            } else if queue.ended {
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }

    /// Runs a task.
    fn run(&self, task: Task) -> Option<Box<Fault>> {
        let stops = self.stops();
        let result = catch_unwind(AssertUnwindSafe(|| match task {
            Task::Work(work) => work(),
            Task::Call(call) => {
                call.run();
                Ok(())
            }
            Task::Report { reports, call, blocks } => {
                if let Some(called) = reports.push(call, blocks.then_some(self.id)) {
                    called.wait(None);
                }
                Ok(())
            }
            Task::Record(_) => Ok(()),
            Task::Wait(point) => {
                while !point.wait(Some(STOP)) && self.stops() == stops {}
                Ok(())
            }
            Task::Until(mut holds) => {
                while !self.has_ended() && self.stops() == stops && !holds()? {
                    std::thread::sleep(LOOK);
                }
                Ok(())
            }
        }));
        match result {
            Ok(outcome) => outcome.err(),
            Err(_) => Some(Fault::new(code::INTERNAL, "an internal error in work on a stream.")),
        }
    }

    /// Waits until everything pushed so far is done, and returns the stream's fault; `false` after
    /// the timeout. If the stream is destroyed meanwhile, waits for running work only, as [`end`]
    /// does.
    ///
    /// [`end`]: Stream::end
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Outcome<bool> {
        check_not_in_function_of(self.id)?;
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut queue = self.queue.lock();
        let target = queue.pushed;
        while queue.done < target && (queue.working || !queue.ended) {
            match end {
                None => self.changed.wait(&mut queue),
                Some(end) if Instant::now() >= end => return Ok(false),
                Some(end) => _ = self.changed.wait_until(&mut queue, end),
            }
        }
        match queue.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(true),
        }
    }

    fn stops(&self) -> u64 {
        self.queue.lock().stops
    }

    /// Ends a running wait, and drops the tasks that have not begun if `all`. Waits for a running
    /// copy.
    fn stop(&self, all: bool) {
        let mut queue = self.queue.lock();
        queue.stops += 1;
        let dropped = if all { std::mem::take(&mut queue.tasks) } else { VecDeque::new() };
        queue.done += dropped.len() as u64;
        drop(queue);
        self.changed.notify_all();
        drop(dropped);
        if is_held_up_here(self.id) {
            return;
        }
        let mut queue = self.queue.lock();
        while queue.working {
            self.changed.wait(&mut queue);
        }
    }

    fn is_idle(&self) -> bool {
        let queue = self.queue.lock();
        queue.done == queue.pushed
    }

    /// Drops the tasks that have not begun, and waits for a running copy.
    fn end(&self) {
        let mut queue = self.queue.lock();
        queue.ended = true;
        let dropped = std::mem::take(&mut queue.tasks);
        queue.done += dropped.len() as u64;
        drop(queue);
        self.changed.notify_all();
        drop(dropped);
        if let Some(reports) = self.reports.lock().take() {
            reports.leave();
        }
        if is_held_up_here(self.id) {
            return;
        }
        let mut queue = self.queue.lock();
        while queue.working {
            self.changed.wait(&mut queue);
        }
    }
}

impl Task {
    /// Whether nothing is left to do.
    fn is_over(&self) -> bool {
        match self {
            Task::Record(_) => true,
            Task::Wait(point) => point.is_passed(),
            _ => false,
        }
    }
}

fn is_held_up_here(stream: i32) -> bool {
    HOLDS_UP.try_with(Cell::get) == Ok(stream)
}

/// Refuses to wait for a stream in a function that the stream waits for.
pub(crate) fn check_not_in_function_of(stream: i32) -> Outcome {
    if !is_held_up_here(stream) {
        return Ok(());
    }
    Err(refused("a function that runs on a stream cannot wait for the same stream: it would never end."))
}

/// Makes a call that a stream waits for.
pub(crate) fn while_held_up(stream: i32, call: impl FnOnce()) {
    let before = HOLDS_UP.try_with(|held_up| held_up.replace(stream));
    call();
    if let Ok(before) = before {
        let _ = HOLDS_UP.try_with(|held_up| held_up.set(before));
    }
}

/// Calls with all signals blocked: a thread inherits the mask of the one that starts it.
fn without_signals<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: a set is filled before it is used, and the mask is the thread's own.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let answer = call();
    // SAFETY: the mask from before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    answer
}

pub(crate) fn unknown() -> Box<Fault> {
    refused("this is not a stream, or it is destroyed.")
}

/// A stream of the calling thread's context; the default stream for NULL.
pub(crate) fn find(stream: Handle) -> Outcome<Arc<Stream>> {
    let current = context::current()?.handle;
    if stream.is_null() {
        return default_stream(current, &*context::current_object()?);
    }
    let found = STREAMS.get(stream).ok_or_else(unknown)?;
    if found.context != current {
        let text = "the stream is of another context than the current one. Set its context or device first.";
        return Err(Fault::new(code::RT_STREAM_CONTEXT, text));
    }
    Ok(found)
}

/// A stream of any context by its handle; the default stream for NULL.
pub(crate) fn by_handle(stream: Handle) -> Outcome<Arc<Stream>> {
    if stream.is_null() {
        let current = context::current()?.handle;
        return default_stream(current, &*context::current_object()?);
    }
    STREAMS.get(stream).ok_or_else(unknown)
}

fn default_stream(handle: Handle, context: &Context) -> Outcome<Arc<Stream>> {
    default_handle(handle, context).and_then(|stream| STREAMS.get(stream).ok_or_else(unknown))
}

fn default_handle(handle: Handle, context: &Context) -> Outcome<Handle> {
    let mut default = context.default_stream.lock();
    if STREAMS.with(*default, |_| ()).is_none() {
        *default = STREAMS.insert(Stream::new(handle, context.device, 0, 0))?;
    }
    Ok(*default)
}

/// `aclrtCreateStream`.
pub fn create(stream: Out<Handle>) -> Outcome {
    create_with(stream, 0, 0)
}

/// `aclrtCreateStreamWithConfig`.
pub fn create_with(stream: Out<Handle>, priority: u32, flags: u32) -> Outcome {
    let stream = stream.check("stream")?;
    let current = context::current()?;
    stream.write(STREAMS.insert(Stream::new(current.handle, current.device, priority, flags))?);
    Ok(())
}

/// `aclrtDestroyStream`: waits for the work on it.
pub fn destroy(stream: Handle) -> Outcome {
    check(stream)?;
    let found = STREAMS.get(stream).ok_or_else(unknown)?;
    let waited = if is_held_up_here(found.id) { Ok(true) } else { found.wait(None) };
    destroy_force(stream)?;
    waited.map(drop)
}

/// `aclrtDestroyStreamForce`: drops work that has not begun.
pub fn destroy_force(stream: Handle) -> Outcome {
    check(stream)?;
    STREAMS.remove(stream).ok_or_else(unknown)?.end();
    Ok(())
}

fn check(stream: Handle) -> Outcome {
    if stream.is_null() { Err(invalid("stream is NULL. Pass one that aclrtCreateStream made.")) } else { Ok(()) }
}

/// A timeout in milliseconds; `None` for no limit.
pub(crate) fn milliseconds(timeout: i32) -> Outcome<Option<Duration>> {
    match timeout {
        -1 => Ok(None),
        1.. => Ok(Some(Duration::from_millis(timeout as u64))),
        _ => Err(refused(format!("{timeout} ms is not a valid timeout. Pass -1 for none, or a positive number."))),
    }
}

/// `aclrtSynchronizeStream`.
pub fn synchronize(stream: Handle) -> Outcome {
    by_handle(stream)?.wait(None).map(drop)
}

/// `aclrtSynchronizeStreamWithTimeout`.
pub fn synchronize_within(stream: Handle, timeout: i32) -> Outcome {
    let timeout = milliseconds(timeout)?;
    if by_handle(stream)?.wait(timeout)? { Ok(()) } else { Err(late()) }
}

fn late() -> Box<Fault> {
    Fault::new(code::RT_STREAM_TIMEOUT, "the work on the stream was not done in time.")
}

/// `aclrtSynchronizeDevice`: all streams of the current device.
pub fn synchronize_device() -> Outcome {
    synchronize_all(None)
}

/// `aclrtSynchronizeDeviceWithTimeout`.
pub fn synchronize_device_within(timeout: i32) -> Outcome {
    synchronize_all(milliseconds(timeout)?)
}

fn synchronize_all(timeout: Option<Duration>) -> Outcome {
    let device = context::current()?.device;
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let streams = STREAMS.collect(|_, stream| (stream.device == device).then(|| stream.clone()));
    let mut first = Ok(());
    for stream in streams {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        match stream.wait(left) {
            Ok(true) => {}
            Ok(false) => return Err(late()),
            Err(fault) => first = first.and(Err(fault)),
        }
    }
    first
}

/// `aclrtStreamQuery`.
pub fn query(stream: Handle, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    status.write(i32::from(!by_handle(stream)?.is_idle()));
    Ok(())
}

/// `aclrtStreamGetId`.
pub fn id(stream: Handle, id: Out<i32>) -> Outcome {
    let id = id.check("streamId")?;
    id.write(by_handle(stream)?.id);
    Ok(())
}

/// `aclrtStreamGetPriority`.
pub fn priority(stream: Handle, priority: Out<u32>) -> Outcome {
    let priority = priority.check("priority")?;
    priority.write(by_handle(stream)?.priority);
    Ok(())
}

/// `aclrtStreamGetFlags`.
pub fn flags(stream: Handle, flags: Out<u32>) -> Outcome {
    let flags = flags.check("flags")?;
    flags.write(by_handle(stream)?.flags);
    Ok(())
}

/// `aclrtCtxGetCurrentDefaultStream`.
pub fn current_default(stream: Out<Handle>) -> Outcome {
    let stream = stream.check("stream")?;
    let handle = context::current()?.handle;
    stream.write(default_handle(handle, &*context::current_object()?)?);
    Ok(())
}

/// `aclrtSetStreamFailureMode`.
pub fn set_failure_mode(stream: Handle, mode: u64) -> Outcome {
    if mode > 1 {
        return Err(refused(format!("{mode} is not a failure mode. Use continue (0) or stop (1).")));
    }
    by_handle(stream)?.failure_mode.store(mode, Ordering::Relaxed);
    Ok(())
}

/// `aclrtSetStreamOverflowSwitch`.
pub fn set_overflow(stream: Handle, on: u32) -> Outcome {
    if on > 1 {
        return Err(invalid(format!("{on} is not a switch. Use off (0) or on (1).")));
    }
    by_handle(stream)?.overflow.store(on, Ordering::Relaxed);
    Ok(())
}

/// `aclrtGetStreamOverflowSwitch`.
pub fn overflow(stream: Handle, on: Out<u32>) -> Outcome {
    let on = on.check("flag")?;
    on.write(by_handle(stream)?.overflow.load(Ordering::Relaxed));
    Ok(())
}

/// `aclrtSetStreamAttribute`: the value is a union of numbers.
pub fn set_attribute(stream: Handle, attribute: i32, value: In<u64>) -> Outcome {
    let value = value.read("value")?;
    match attribute {
        1 => set_failure_mode(stream, value),
        2 => set_overflow(stream, value as u32),
        3..=5 => by_handle(stream).map(drop),
        other => Err(refused(format!("{other} is not an attribute of streams. They are 1 to 5."))),
    }
}

/// `aclrtGetStreamAttribute`.
pub fn attribute(stream: Handle, attribute: i32, value: Out<[u64; 2]>) -> Outcome {
    let value = value.check("value")?;
    let stream = by_handle(stream)?;
    let number = match attribute {
        1 => stream.failure_mode.load(Ordering::Relaxed),
        2 => stream.overflow.load(Ordering::Relaxed).into(),
        3 | 4 => 0,
        5 => stream.priority.into(),
        other => return Err(refused(format!("{other} is not an attribute of streams. They are 1 to 5."))),
    };
    value.write([number, 0]);
    Ok(())
}

/// `aclrtStreamAbort`: drops the work that has not begun. The stream can be used again.
pub fn abort(stream: Handle) -> Outcome {
    check(stream)?;
    STREAMS.get(stream).ok_or_else(unknown)?.stop(true);
    Ok(())
}

/// `aclrtStreamStop`: ends what the stream waits for, and goes on with the next work.
pub fn stop(stream: Handle) -> Outcome {
    check(stream)?;
    STREAMS.get(stream).ok_or_else(unknown)?.stop(false);
    Ok(())
}

/// How a stream is made: `aclrtStreamConfigHandle`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamConfig {
    work: usize,
    work_size: usize,
    flags: usize,
    priority: u32,
}

/// The configurations by their addresses: a forged or stale one is not found.
static CONFIGS: Mutex<BTreeMap<usize, Box<StreamConfig>>> = Mutex::new(BTreeMap::new());

fn with_config<R>(config: In<StreamConfig>, act: impl FnOnce(&mut StreamConfig) -> Outcome<R>) -> Outcome<R> {
    let mut configs = CONFIGS.lock();
    let found = configs.get_mut(&config.address());
    act(found.ok_or_else(|| invalid("this is not what aclrtCreateStreamConfigHandle returned."))?)
}

/// `aclrtCreateStreamConfigHandle`.
pub fn new_config() -> Outcome<*mut StreamConfig> {
    border::mark_used();
    let mut config = Box::<StreamConfig>::default();
    let address: *mut StreamConfig = &mut *config;
    CONFIGS.lock().insert(address.expose_provenance(), config);
    Ok(address)
}

/// `aclrtDestroyStreamConfigHandle`.
pub fn destroy_config(config: In<StreamConfig>) -> Outcome {
    with_config(config, |_| Ok(()))?;
    let removed = CONFIGS.lock().remove(&config.address());
    drop(removed);
    Ok(())
}

/// `aclrtSetStreamConfigOpt`.
pub fn set_config(config: In<StreamConfig>, attribute: i32, value: In<u8>, size: usize) -> Outcome {
    let expected = match attribute {
        0..=2 => size_of::<usize>(),
        3 => size_of::<u32>(),
        other => return Err(invalid(format!("{other} is not an attribute of a configuration. They are 0 to 3."))),
    };
    if size != expected {
        return Err(invalid(format!("the value has {size} bytes. This attribute has {expected}.")));
    }
    with_config(config, |config| {
        let number = || value.cast::<usize>().read("attrValue");
        match attribute {
            0 => config.work = number()?,
            1 => config.work_size = number()?,
            2 => config.flags = number()?,
            _ => config.priority = value.cast::<u32>().read("attrValue")?,
        }
        Ok(())
    })
}

/// `aclrtCreateStreamV2`: with a configuration, or without one.
pub fn create_configured(stream: Out<Handle>, config: In<StreamConfig>) -> Outcome {
    stream.check("stream")?;
    let config = if config.is_null() { StreamConfig::default() } else { with_config(config, |config| Ok(*config))? };
    create_with(stream, config.priority, config.flags as u32)
}

/// `aclrtDeviceGetStreamPriorityRange`.
pub fn priorities(least: Out<i32>, greatest: Out<i32>) -> Outcome {
    let (least, greatest) = (least.check("leastPriority")?, greatest.check("greatestPriority")?);
    context::current()?;
    least.write(7);
    greatest.write(0);
    Ok(())
}

/// `aclrtLaunchHostFunc`: the stream's thread calls it.
pub fn launch_host_function(stream: Handle, function: Option<HostFunction>, argument: *mut libc::c_void) -> Outcome {
    let function = function.ok_or_else(|| invalid("fn is NULL. Pass a function."))?;
    find(stream)?.push(Task::Call(HostCall { function, argument }))
}

/// Ends all streams, or those of one context.
pub(crate) fn end_all(context: Option<Handle>) {
    let of = |stream: &Arc<Stream>| context.is_none_or(|context| stream.context == context);
    let streams = STREAMS.collect(|handle, stream| of(stream).then_some(handle));
    let streams: Vec<Arc<Stream>> = streams.into_iter().filter_map(|handle| STREAMS.remove(handle)).collect();
    for stream in streams {
        stream.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn work_that_panics_fails_and_the_stream_goes_on() {
        let stream = Stream::new(Handle::NULL, LogicalId(0), 0, 0);
        stream.push(Task::Work(Box::new(|| panic!("a bug")))).unwrap();
        assert_eq!(stream.wait(None).unwrap_err().code, code::INTERNAL);
        let done = Arc::new(AtomicBool::new(false));
        let other = done.clone();
        let work = move || {
            other.store(true, Ordering::Release);
            Ok(())
        };
        stream.push(Task::Work(Box::new(work))).unwrap();
        assert_eq!(stream.wait(None), Ok(true));
        assert!(done.load(Ordering::Acquire));
        stream.end();
        assert!(stream.push(Task::Work(Box::new(|| Ok(())))).is_err());
    }

    #[test]
    fn destroying_a_stream_waits_for_work_that_runs_and_drops_the_rest() {
        let stream = Stream::new(Handle::NULL, LogicalId(0), 0, 0);
        let (begins, begun) = std::sync::mpsc::channel();
        let done = Arc::new(AtomicBool::new(false));
        let (same, finished) = (stream.clone(), done.clone());
        let work = move || {
            begins.send(()).unwrap();
            while !same.has_ended() {
                std::thread::yield_now();
            }
            // Long enough that an end which does not wait is noticed.
            std::thread::sleep(Duration::from_millis(50));
            finished.store(true, Ordering::Release);
            Ok(())
        };
        stream.push(Task::Work(Box::new(work))).unwrap();
        stream.push(Task::Work(Box::new(|| panic!("dropped work runs")))).unwrap();
        let point = stream.record().unwrap();
        begun.recv().unwrap();
        assert!(!point.is_passed());
        stream.end();
        assert!(done.load(Ordering::Acquire));
        assert!(point.is_passed());
        assert_eq!(stream.wait(None), Ok(true), "and the dropped work has not failed");
        assert!(stream.record().is_err());
    }
}
