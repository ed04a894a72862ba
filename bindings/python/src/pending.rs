//! `PendingCopy`: a copy that runs while the program goes on, and can be awaited.

use crate::buffer::Buffer;
use crate::error::{Fault, Outcome};
use crate::node::{Close, Ends, Node, lock};
use crate::wait::{ASKING, check_signals};
use ascend_vmm::copy::Pending;
use ascend_vmm::{Error, Failed};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// A copy and its end.
pub(crate) struct Running {
    state: Mutex<State>,
    over: Arc<Over>,
    /// The process that began it. In a child of fork the locks may be held for ever.
    process: u32,
}

enum State {
    /// The copy, and the buffer that it uses.
    Running(Held),
    /// It was done.
    Done,
    /// It failed. The error, until it is raised.
    Failed(Option<Fault>),
}

/// The library's copy, and the buffer of Python's that it uses, if any.
struct Held {
    pending: Option<Pending<()>>,
    buffer: Option<Buffer>,
}

/// What is told when the copy is over.
#[derive(Default)]
struct Over {
    callbacks: Mutex<(bool, Vec<Py<PyAny>>)>,
    arrived: Condvar,
}

impl Held {
    /// What the library said of the copy. The buffer is given back, unless the device may still use
    /// it: then it stays for ever.
    fn end(&mut self, ended: Result<(), Failed<Option<()>>>) -> Outcome<()> {
        self.pending = None;
        let buffer = self.buffer.take();
        if let Err(Failed { object: None, .. }) = ended {
            std::mem::forget(buffer);
        }
        Ok(ended?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            // The error has no one to go to; the library's own drop would only log it.
            let _ = self.end(pending.wait());
        }
    }
}

impl Wake for Over {
    fn wake(self: Arc<Self>) {
        let callbacks = {
            let mut state = lock(&self.callbacks);
            state.0 = true;
            std::mem::take(&mut state.1)
        };
        self.arrived.notify_all();
        if !callbacks.is_empty() {
            Python::try_attach(|py| callbacks.into_iter().for_each(|callback| call(callback.bind(py))));
        }
    }
}

/// Calls it. An exception has no caller to go to: the interpreter reports it.
fn call(callback: &Bound<'_, PyAny>) {
    if let Err(error) = callback.call0() {
        error.write_unraisable(callback.py(), Some(callback));
    }
}

impl Running {
    pub(crate) fn new(pending: Pending<()>, buffer: Option<Buffer>) -> Running {
        let state = Mutex::new(State::Running(Held { pending: Some(pending), buffer }));
        Running { state, over: Arc::default(), process: std::process::id() }
    }

    /// Refuses a child of the process that began it.
    fn check_process(&self) -> Outcome<()> {
        let process = std::process::id();
        if process == self.process { Ok(()) } else { Err(Error::OtherProcess { process }.into()) }
    }

    /// Whether the copy is over.
    fn poll(&self) -> bool {
        let mut state = lock(&self.state);
        let State::Running(held) = &mut *state else { return true };
        let Some(pending) = &mut held.pending else { return true };
        let waker = Waker::from(self.over.clone());
        let Poll::Ready(ended) = Pin::new(pending).poll(&mut Context::from_waker(&waker)) else { return false };
        let ended = held.end(ended);
        *state = ended.map_or_else(|fault| State::Failed(Some(fault)), |()| State::Done);
        true
    }

    /// Waits, without the interpreter's lock, until it is over or a signal's handler raises.
    fn wait(&self) -> Outcome<()> {
        self.check_process()?;
        while !self.poll() {
            let state = lock(&self.over.callbacks);
            if !state.0 {
                let waited = self.over.arrived.wait_timeout(state, ASKING).unwrap_or_else(PoisonError::into_inner);
                drop(waited);
            }
            check_signals()?;
        }
        let State::Failed(fault) = &mut *lock(&self.state) else { return Ok(()) };
        Err(fault.take().unwrap_or_else(|| Fault::Argument {
            operation: "wait for a copy",
            problem: "it failed, and that was raised before".to_owned(),
            rule: "Wait once.",
        }))
    }
}

impl Ends for Running {
    const CLASS: &'static str = "PendingCopy";
    const CLOSING: &'static str = "wait for a copy";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        if let Err(fault) = self.check_process() {
            return Err((fault, Some(self)));
        }
        if matches!(&*lock(&self.state), State::Done | State::Failed(None)) {
            return Ok(());
        }
        let waited = self.wait();
        let interrupted = matches!(*lock(&self.state), State::Running(_));
        waited.map_err(|fault| (fault, interrupted.then_some(self)))
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
    node: Arc<Node<Running>>,
}

impl PendingCopy {
    pub(crate) fn new(running: Running, memory: Arc<dyn Close>) -> PendingCopy {
        PendingCopy { node: Node::new(running, [memory]) }
    }
}

#[pymethods]
impl PendingCopy {
    /// Waits until the copy is done, and raises what went wrong.
    fn wait(&self, py: Python<'_>) -> Outcome<()> {
        let running = self.node.get()?;
        py.detach(|| running.wait())
    }

    /// Whether it is over. The first call starts a thread that waits for it.
    #[getter]
    fn done(&self, py: Python<'_>) -> Outcome<bool> {
        let Some(running) = self.node.try_get() else { return Ok(true) };
        running.check_process()?;
        Ok(py.detach(|| running.poll()))
    }

    /// Calls `callback` when the copy is over, from any thread. An exception that it raises is
    /// reported as one that no caller can catch.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> Outcome<()> {
        let running = self.node.get()?;
        running.check_process()?;
        lock(&running.over.callbacks).1.push(callback);
        if py.detach(|| running.poll()) {
            // Nothing wakes us any more, or has already.
            running.over.clone().wake();
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

    /// Waits until the copy is over.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        self.node.close(py)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        crate::leave(self.close(py))
    }

    fn __repr__(&self) -> &'static str {
        match self.node.try_get() {
            Some(running) if running.check_process().is_err() => "<PendingCopy of the parent process>",
            Some(running) if matches!(&*lock(&running.state), State::Running(_)) => "<PendingCopy, running>",
            _ => "<PendingCopy, over>",
        }
    }
}
