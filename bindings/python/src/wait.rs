//! Waits that Ctrl-C ends.
//!
//! Python runs signal handlers on the main thread, between two of its instructions. The library
//! waits through signals, so long calls run on a thread of their own, and this thread checks from
//! time to time whether a handler has raised.

use crate::error::{Fault, Outcome};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How often signals are checked.
pub(crate) const CHECKING: Duration = Duration::from_millis(50);

/// A time limit in seconds.
pub(crate) fn limit(seconds: f64) -> Outcome<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("a timeout is a number of seconds, and not negative").into());
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Runs pending signal handlers, on the main thread, and returns what they raise. Does nothing when
/// the interpreter is ending.
pub(crate) fn check_signals() -> PyResult<()> {
    Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(()))
}

/// Waits for a message, or until a signal's handler raises; `None` if no message can come.
fn next<T>(messages: &Receiver<T>) -> PyResult<Option<T>> {
    loop {
        match messages.recv_timeout(CHECKING) {
            Ok(message) => return Ok(Some(message)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => check_signals()?,
        }
    }
}

/// The error of a call whose thread cannot be started. Python's own threads raise the same class.
fn no_thread(error: std::io::Error) -> PyErr {
    let remedy = "Raise the limit of threads or of memory (ulimit, cgroup), or end threads, and call again.";
    PyRuntimeError::new_err(format!("the thread for this call cannot be started: {error}. {remedy}"))
}

/// Runs `work` without the interpreter's lock. If a signal's handler raises meanwhile, that is
/// returned at once, and the work continues with its result unused: only for work without effects.
pub(crate) fn abandonable<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (done, over) = channel();
    let worker = std::thread::Builder::new().name("ascend_vmm".to_owned());
    worker.spawn(move || drop(done.send(work()))).map_err(no_thread)?;
    let result = py.detach(move || next(&over))?;
    result.ok_or_else(|| PyRuntimeError::new_err("a thread of ascend_vmm panicked"))
}

/// Runs `work` without the interpreter's lock. If a signal's handler raises meanwhile, `cancel` is
/// called, which must make `work` return soon, and the exception is returned. If the thread cannot
/// be started, `work` does not run.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
    cancel: impl Fn() + Sync,
) -> PyResult<T> {
    py.detach(|| {
        std::thread::scope(|scope| {
            let (done, over) = channel();
            let worker = std::thread::Builder::new().name("ascend_vmm".to_owned());
            let worker = worker.spawn_scoped(scope, move || {
                let result = work();
                let _ = done.send(());
                result
            });
            let worker = worker.map_err(no_thread)?;
            let waited = next(&over);
            if waited.is_err() {
                cancel();
            }
            let result = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            waited.map(|_| result)
        })
    })
}

thread_local! {
    /// `Some` while this thread waits in a call that asks [`handler_raised`]: what a handler has
    /// raised meanwhile.
    static WAITING: RefCell<Option<PyResult<()>>> = const { RefCell::new(None) };
}

/// Runs a call without the interpreter's lock, which asks [`handler_raised`] while it waits. Runs
/// on this thread: the driver knows which thread registers a process, and the vendor's library
/// which one has a device.
pub(crate) fn interruptible_call<T: Send, E: Into<Fault> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Outcome<T> {
    if WAITING.with_borrow(Option::is_some) {
        // It would deadlock.
        let text = "a signal's handler cannot call this while its thread waits in such a call";
        return Err(PyRuntimeError::new_err(text).into());
    }
    WAITING.set(Some(Ok(())));
    let result = py.detach(work);
    match WAITING.take() {
        Some(Err(raised)) => Err(raised.into()),
        _ => result.map_err(Into::into),
    }
}

/// Whether a signal's handler has raised.
pub(crate) fn handler_raised() -> bool {
    if WAITING.with_borrow(Option::is_none) {
        return false;
    }
    let checked = check_signals();
    let raised = checked.is_err();
    WAITING.set(Some(checked));
    raised
}
