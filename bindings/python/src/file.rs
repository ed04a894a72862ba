//! Files, and callbacks during long calls.

use crate::error::{Fault, Outcome};
use ascend_vmm::pool::Progress;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::fs::{File, OpenOptions};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;

/// What a file is opened for.
pub(crate) enum Purpose {
    Load,
    Store { anew: bool },
}

/// A file by its path, or a duplicate of one that is open.
pub(crate) fn open(given: &Bound<'_, PyAny>, purpose: &Purpose) -> Outcome<File> {
    if let Ok(path) = given.extract::<PathBuf>() {
        let opened = match purpose {
            Purpose::Load => File::open(&path),
            Purpose::Store { anew } => OpenOptions::new().write(true).create(true).truncate(*anew).open(&path),
        };
        return opened.map_err(|error| Fault::File {
            operation: "open a file",
            path,
            errno: error.raw_os_error().unwrap_or(0),
        });
    }
    if let (Purpose::Store { .. }, true) = (purpose, given.hasattr("flush")?) {
        // What the program wrote before must be in the file first.
        given.call_method0("flush")?;
    }
    Ok(File::from(duplicate(given)?))
}

/// A duplicate of a file descriptor: of an object with `fileno()`, or of a number.
pub(crate) fn duplicate(given: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number: RawFd = match given.extract() {
        Ok(number) => number,
        Err(_) => given.call_method0("fileno")?.extract()?,
    };
    if number < 0 {
        return Err(PyValueError::new_err("the file or socket is closed"));
    }
    // SAFETY: used for one call, during which the caller holds the object and the interpreter's
    // lock. A number that is not open gives EBADF.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(descriptor.try_clone_to_owned()?)
}

/// Runs `work` without the interpreter's lock, with a callback for its progress. An exception of
/// the callback, or of a signal's handler, ends the work, as a panic does.
pub(crate) fn with_progress<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(Progress)) -> ascend_vmm::Result<T> + Send,
) -> Outcome<T> {
    interrupting(py, || {
        work(&mut |now| {
            call_back(|py| {
                py.check_signals()?;
                progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (now.done, now.total)).map(drop))
            });
        })
    })
}

thread_local! {
    /// Whether a call of [`interrupting`] is under way on this thread.
    static CATCHES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `work` without the interpreter's lock. An exception in [`call_back`] ends it.
pub(crate) fn interrupting<T: Send>(py: Python<'_>, work: impl FnOnce() -> ascend_vmm::Result<T> + Send) -> Outcome<T> {
    py.detach(|| catching(work))
}

/// [`interrupting`], for a thread that does not hold the interpreter's lock.
pub(crate) fn catching<T>(work: impl FnOnce() -> ascend_vmm::Result<T>) -> Outcome<T> {
    let before = CATCHES.replace(true);
    // The closure shares only the library's objects, which stay consistent if a callback panics:
    // the library documents that for each callback.
    let ended = catch_unwind(AssertUnwindSafe(work));
    CATCHES.set(before);
    match ended {
        Ok(ended) => Ok(ended?),
        Err(payload) => match payload.downcast::<PyErr>() {
            Ok(error) => Err(Fault::Python(*error)),
            Err(panic) => resume_unwind(panic),
        },
    }
}

/// Calls Python from a call of the library. An exception ends that call; while an object is being
/// dropped no call could return it, and the interpreter reports it. Does nothing when the
/// interpreter is ending.
pub(crate) fn call_back(function: impl FnOnce(Python<'_>) -> PyResult<()>) {
    // Objects that the function drops must not end the call.
    let catches = CATCHES.replace(false);
    let answer = Python::try_attach(|py| {
        let answer = function(py);
        if let (Err(error), false) = (&answer, catches) {
            error.clone_ref(py).write_unraisable(py, None);
        }
        answer
    });
    CATCHES.set(catches);
    if let (Some(Err(error)), true) = (answer, catches) {
        resume_unwind(Box::new(error));
    }
}
