//! Points in the order of a stream: passed once, and passed from then on.
//!
//! The waiter has the point, and the stream has its [`Passing`]. Dropping that passes the point:
//! its turn came, its stream was destroyed, or it was never put on the stream. So every wait ends.
//! A point can only be waited for after it was put on its stream, so streams that wait for each
//! other's points never deadlock.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A point in the order of a stream.
pub(crate) struct Point {
    /// The number of the stream.
    pub(crate) stream: i32,
    /// When it was passed, in nanoseconds of the system's steady clock.
    time: Mutex<Option<u64>>,
    passed: Condvar,
}

/// The end that passes a point when it is dropped.
pub(crate) struct Passing(Arc<Point>);

impl Point {
    /// A point of a stream, and the object that passes it.
    pub(crate) fn new(stream: i32) -> (Arc<Point>, Passing) {
        let point = Arc::new(Point { stream, time: Mutex::new(None), passed: Condvar::new() });
        (point.clone(), Passing(point))
    }

    /// When it was passed; `None` if it was not yet.
    pub(crate) fn time(&self) -> Option<u64> {
        *self.time.lock()
    }

    pub(crate) fn is_passed(&self) -> bool {
        self.time().is_some()
    }

    /// Waits until it is passed; `false` after the timeout.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut time = self.time.lock();
        while time.is_none() {
            match end {
                None => self.passed.wait(&mut time),
                Some(end) if Instant::now() >= end => return false,
                Some(end) => _ = self.passed.wait_until(&mut time, end),
            }
        }
        true
    }
}

impl Passing {
    /// The number of the point's stream.
    pub(crate) fn stream(&self) -> i32 {
        self.0.stream
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        *self.0.time.lock() = Some(now());
        self.0.passed.notify_all();
    }
}

/// Nanoseconds of the system's steady clock.
pub(crate) fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written to a local variable. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
