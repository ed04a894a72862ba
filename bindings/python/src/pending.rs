//! `PendingCopy`: a copy in the background, which can be awaited.
//!
//! Threads that wait take the locks in here without the interpreter's lock. None of them waits for
//! the interpreter's lock while it holds one: the thread that has it may be waiting for these.

use crate::buffer::Buffer;
use crate::error::{Fault, Outcome};
use crate::node::{Close, leave, lock};
use crate::wait::{CHECKING, check_signals};
use ascend_vmm::copy::Pending;
use ascend_vmm::{Error, Failed};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{PyTraverseError, PyVisit};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// The library's copy, and what it uses.
struct Running {
    /// `None` once it is over.
    pending: Mutex<Option<Pending<()>>>,
    /// `None` if it uses no buffer of Python's, and once it is over.
    buffer: Mutex<Option<Buffer>>,
    end: Arc<End>,
    /// What was copied to, which is closed after the copy.
    _memory: Arc<dyn Close>,
    /// The process that began it. In a child of fork the locks may never be released.
    process: u32,
}

/// How a copy ended, and who is waiting for that.
#[derive(Default)]
struct End {
    state: Mutex<EndState>,
    arrived: Condvar,
}

#[derive(Default)]
struct EndState {
    /// Whether the library has reported the end.
    reported: bool,
    /// The failure, and whether it was raised.
    failure: Option<Arc<Fault>>,
    raised: bool,
    callbacks: Vec<Py<PyAny>>,
}

impl Wake for End {
    fn wake(self: Arc<Self>) {
        let callbacks = {
            let mut state = lock(&self.state);
            state.reported = true;
            std::mem::take(&mut state.callbacks)
        };
        self.arrived.notify_all();
        if !callbacks.is_empty() {
            Python::try_attach(|py| callbacks.into_iter().for_each(|callback| call(callback.bind(py))));
        }
    }
}

/// Calls it. No caller could catch an exception: the interpreter reports it.
fn call(callback: &Bound<'_, PyAny>) {
    if let Err(error) = callback.call0() {
        error.write_unraisable(callback.py(), Some(callback));
    }
}

impl Running {
    /// Fails in a child of the process that began it.
    fn check_process(&self) -> Outcome<()> {
        let process = std::process::id();
        if process == self.process { Ok(()) } else { Err(Error::OtherProcess { process }.into()) }
    }

    /// Returns whether the copy is over, and then releases the buffer.
    fn poll(&self) -> bool {
        let mut pending = lock(&self.pending);
        if let Some(running) = &mut *pending {
            let waker = Waker::from(self.end.clone());
            let Poll::Ready(ended) = Pin::new(running).poll(&mut Context::from_waker(&waker)) else { return false };
            *pending = None;
            if let Err(failed) = ended {
                if failed.object.is_none() {
                    // The device may still use the buffer: leak it.
                    std::mem::forget(lock(&self.buffer).take());
                }
                lock(&self.end.state).failure = Some(Arc::new(failed.into()));
            }
        }
        drop(pending);
        self.release();
        true
    }

    /// Releases the buffer, in one turn of the interpreter's lock: a thread that finds it taken
    /// returns to Python after it was released.
    fn release(&self) {
        if lock(&self.buffer).is_some() {
            Python::try_attach(|_| {
                let buffer = lock(&self.buffer).take();
                drop(buffer);
            });
        }
    }

    /// Waits, without the interpreter's lock, until it is over or `check` fails.
    fn finish(&self, check: fn() -> PyResult<()>) -> PyResult<()> {
        while !self.poll() {
            let state = lock(&self.end.state);
            let waited = self.end.arrived.wait_timeout_while(state, CHECKING, |state| !state.reported);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            check()?;
        }
        Ok(())
    }

    /// Waits until it is over or a signal's handler raises. Raises the failure to everyone who
    /// waits; with `once`, only if it was not raised before.
    fn wait(&self, once: bool) -> Outcome<()> {
        self.check_process()?;
        self.finish(check_signals)?;
        let mut state = lock(&self.end.state);
        match state.failure.clone() {
            Some(failure) if !(once && state.raised) => {
                state.raised = true;
                Err(Fault::Shared(failure))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Running {
    /// Waits, while other threads run. A failure is lost.
    fn drop(&mut self) {
        let pending = self.pending.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let ended = pending.map(|pending| {
            // When the interpreter is ending there is no lock to release.
            let mut pending = Some(pending);
            let mut wait = || pending.take().map(Pending::wait);
            Python::try_attach(|py| py.detach(&mut wait)).unwrap_or_else(wait)
        });
        if let Some(Some(Err(Failed { object: None, .. }))) = ended {
            std::mem::forget(self.buffer.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl Close for Running {
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        py.detach(|| self.wait(true))
    }

    fn adopt(&self, _child: Weak<dyn Close>) {
        unreachable!("nothing is made from a copy")
    }
}

/// A copy that is running. Wait for it, or `await` it; closing or dropping it waits too. The buffer
/// is held until then: it cannot be resized, and must not be used.
///
/// >>> with Session() as session:
/// ...     mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
/// ...     copy = mapping.write_async(b"in the background")
/// ...     copy.wait()
/// ...     mapping.read(17)
/// b'in the background'
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct PendingCopy {
    running: Arc<Running>,
}

impl PendingCopy {
    pub(crate) fn new(pending: Pending<()>, buffer: Option<Buffer>, memory: Arc<dyn Close>) -> PendingCopy {
        let running = Arc::new(Running {
            pending: Mutex::new(Some(pending)),
            buffer: Mutex::new(buffer),
            end: Arc::default(),
            _memory: memory,
            process: std::process::id(),
        });
        let copy: Weak<Running> = Arc::downgrade(&running);
        running._memory.adopt(copy);
        PendingCopy { running }
    }
}

#[pymethods]
impl PendingCopy {
    /// Waits until the copy is done. Raises its failure.
    fn wait(&self, py: Python<'_>) -> Outcome<()> {
        py.detach(|| self.running.wait(false))
    }

    /// Whether it is over. The first call starts a thread that waits for it.
    #[getter]
    fn done(&self, py: Python<'_>) -> Outcome<bool> {
        self.running.check_process()?;
        Ok(py.detach(|| self.running.poll()))
    }

    /// Calls `callback` when the copy is over, from any thread. Its exceptions go to
    /// `sys.unraisablehook`.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> Outcome<()> {
        self.running.check_process()?;
        lock(&self.running.end.state).callbacks.push(callback);
        if py.detach(|| self.running.poll()) {
            // The waker was called already, or never will be.
            self.running.end.clone().wake();
        }
        Ok(())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static COMPLETED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = slf.py();
        let completed = COMPLETED
            .get_or_try_init(py, || Ok::<_, PyErr>(py.import("ascend_vmm._asyncio")?.getattr("completed")?.unbind()))?;
        completed.bind(py).call1((slf,))?.call_method0("__await__")
    }

    /// Waits until the copy is over. Raises its failure, if that was not raised before.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        self.running.close(py)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        leave(self.close(py))
    }

    /// A buffer may have its copy as an attribute.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.running.buffer.try_lock() {
            Ok(buffer) => visit.call(buffer.as_ref().and_then(Buffer::owner)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self, py: Python<'_>) {
        if self.running.check_process().is_ok() {
            let _ = py.detach(|| self.running.finish(|| Ok(())));
        }
    }

    fn __repr__(&self, py: Python<'_>) -> &'static str {
        if self.running.check_process().is_err() {
            "<PendingCopy of the parent process>"
        } else if py.detach(|| lock(&self.running.pending).is_some()) {
            "<PendingCopy, running>"
        } else {
            "<PendingCopy, over>"
        }
    }
}
