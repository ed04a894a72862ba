//! What the library reports through `tracing`, and when.
//!
//! Every open, ioctl, mmap, mprotect and munmap of the driver's modules is one event of level TRACE
//! with its module, command, device, size, duration and result (close(2) and the opens of
//! `/dev/davinciN` are not); everything else is a warning or an error in words. A
//! subscriber is the user's code: it may panic, and it may call back into the library. So nothing
//! is reported while this thread holds a lock or a slot of ours ([`quiet`] keeps it back until
//! then), and a panic of the subscriber costs its event and nothing else.

use crate::error::{Errno, printable};
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use tracing::Level;
use tracing::level_filters::LevelFilter;

/// A system call, as it is reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) module: &'static str,
    pub(crate) command: &'static str,
    /// Logical id; `None` where the call is about no device.
    pub(crate) device: Option<u32>,
    /// Bytes that the call is about.
    pub(crate) size: u64,
    /// Whether its errors are the module's private codes, which only look like errnos.
    pub(crate) private_codes: bool,
}

impl Call {
    /// A call that is about no device and no memory.
    pub(crate) const fn plain(module: &'static str, command: &'static str) -> Call {
        Call { module, command, device: None, size: 0, private_codes: false }
    }
}

/// Makes a system call and reports it. Costs one load without a subscriber.
#[inline]
pub(crate) fn traced<T>(call: impl FnOnce() -> Call, make: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    if is_wanted() { reported(call(), make) } else { make() }
}

/// Whether system calls are reported.
pub(crate) fn is_wanted() -> bool {
    LevelFilter::current() >= Level::TRACE && is_enabled()
}

/// Asks the subscriber whether it wants them, which is its code too: not while this thread holds a
/// lock. What is kept back then is handed to it if it wants it.
fn is_enabled() -> bool {
    STATE.get() >= HELD || catch_unwind(|| tracing::enabled!(Level::TRACE)).unwrap_or(false)
}

/// Makes a system call and reports it.
pub(crate) fn reported<T>(call: Call, make: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let start = Instant::now();
    let result = make();
    let (duration, errno) = (start.elapsed(), result.as_ref().err().copied());
    report(Event::Call { call, duration, errno });
    result
}

/// Reports something that a person should know and that is in no returned error.
pub(crate) fn warn(detail: impl Display, message: &'static str) {
    report(Event::Note { level: Level::WARN, detail: printable(&detail.to_string()), message });
}

/// As [`warn`], for what was lost or left behind.
pub(crate) fn error(detail: impl Display, message: &'static str) {
    report(Event::Note { level: Level::ERROR, detail: printable(&detail.to_string()), message });
}

/// As [`warn`], for those who look for the cause of something else.
pub(crate) fn debug(detail: impl Display, message: &'static str) {
    if LevelFilter::current() >= Level::DEBUG {
        report(Event::Note { level: Level::DEBUG, detail: printable(&detail.to_string()), message });
    }
}

enum Event {
    Call { call: Call, duration: Duration, errno: Option<Errno> },
    Note { level: Level, detail: String, message: &'static str },
}

thread_local! {
    /// [`HELD`] for each lock and slot of this thread under which nothing is reported, and
    /// [`KEPT_ANY`] if it has kept something back. One plain number, which costs a thread nothing.
    static STATE: Cell<usize> = const { Cell::new(0) };
    static KEPT: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

const KEPT_ANY: usize = 1;
const HELD: usize = 2;

/// While this lives, what this thread reports is kept back. Take it *before* a lock or a slot that
/// is held over a system call, so that it is dropped after it.
#[must_use]
#[derive(Debug)]
pub(crate) struct Quiet(PhantomData<*const ()>);

impl Quiet {
    /// The guard of this thread that was forgotten before, to be dropped.
    pub(crate) fn forgotten() -> Quiet {
        Quiet(PhantomData)
    }
}

/// Keeps back what this thread reports.
#[inline]
pub(crate) fn quiet() -> Quiet {
    STATE.set(STATE.get() + HELD);
    Quiet(PhantomData)
}

impl Drop for Quiet {
    #[inline]
    fn drop(&mut self) {
        let state = STATE.get() - HELD;
        STATE.set(state);
        if state == KEPT_ANY {
            report_kept();
        }
    }
}

fn report_kept() {
    STATE.set(0);
    let kept = KEPT.try_with(|kept| std::mem::take(&mut *kept.borrow_mut()));
    kept.unwrap_or_default().iter().for_each(emit);
}

fn report(event: Event) {
    if STATE.get() < HELD {
        return emit(&event);
    }
    // A thread that is ending has nothing left to keep it in; then it goes unreported.
    if KEPT.try_with(|kept| kept.borrow_mut().push(event)).is_ok() {
        STATE.set(STATE.get() | KEPT_ANY);
    }
}

/// Hands an event to the subscriber. Its panic ends here: the panic hook has reported it, and the
/// caller's result must not be lost by it.
fn emit(event: &Event) {
    let _ = catch_unwind(AssertUnwindSafe(|| match event {
        Event::Call { call, duration, errno } => {
            let Call { module, command, device, size, private_codes } = *call;
            let result = match errno {
                None => "ok".to_owned(),
                Some(code) if private_codes => format!("code {}", code.raw()),
                Some(errno) => format!("{errno:?}"),
            };
            tracing::trace!(module, command, device, size, ?duration, result);
        }
        Event::Note { level, detail, message } => match *level {
            Level::ERROR => tracing::error!(%detail, "{message}"),
            Level::WARN => tracing::warn!(%detail, "{message}"),
            _ => tracing::debug!(%detail, "{message}"),
        },
    }));
}
