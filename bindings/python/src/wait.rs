//! Waits that Ctrl-C ends.
//!
//! Python runs a signal's handler on the main thread, between two of its instructions. The library
//! waits through signals, so what may last is done on a thread of its own, and this one asks from
//! time to time whether a handler has raised.

use pyo3::prelude::*;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How long a signal may wait.
const ASKING: Duration = Duration::from_millis(50);

/// Runs `work` without the interpreter's lock. If a signal's handler raises meanwhile, `cancel` is
/// called, which must make `work` return soon, and the exception is returned.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
    cancel: impl Fn() + Sync,
) -> PyResult<T> {
    py.detach(|| {
        std::thread::scope(|scope| {
            let (done, over) = channel();
            let worker = scope.spawn(move || {
                let result = work();
                let _ = done.send(());
                result
            });
            let mut raised = None;
            while let (Err(RecvTimeoutError::Timeout), None) = (over.recv_timeout(ASKING), &raised) {
                if let Err(error) = Python::attach(|py| py.check_signals()) {
                    cancel();
                    raised = Some(error);
                }
            }
            let result = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            raised.map_or(Ok(result), Err)
        })
    })
}
