//! Events for subscribers of `tracing`.
//!
//! Every open, ioctl, mmap, mprotect and munmap of the driver's modules is one event of level TRACE
//! with its module, command, device, size, duration and result. close(2) and the opens of
//! `/dev/davinciN` have none. All other events are sentences.
//!
//! A subscriber is user code: it may panic, and it may call the library. So a thread reports
//! nothing while it holds one of our locks or slots; [`quiet`] keeps its events until then. A
//! subscriber that panics loses its event and nothing else.

use crate::error::{Errno, printable};
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use tracing::Level;
use tracing::level_filters::LevelFilter;

/// A system call for an event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) module: &'static str,
    pub(crate) command: &'static str,
    /// Logical id; `None` if the call is about no device.
    pub(crate) device: Option<u32>,
    /// In bytes.
    pub(crate) size: u64,
    /// True if errors are the module's private codes, which are no errnos.
    pub(crate) private_codes: bool,
}

impl Call {
    /// A call that is about no device and no memory.
    pub(crate) const fn plain(module: &'static str, command: &'static str) -> Call {
        Call { module, command, device: None, size: 0, private_codes: false }
    }
}

/// Makes a system call and reports it. Costs one load without a subscriber.
pub(crate) fn traced<T>(call: Call, make: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    if LevelFilter::current() < Level::TRACE || !is_wanted() {
        return make();
    }
    let start = Instant::now();
    let result = make();
    let (duration, errno) = (start.elapsed(), result.as_ref().err().copied());
    report(Event::Call { call, duration, errno });
    result
}

/// True if system calls are reported. `enabled!` calls the subscriber, so a thread that holds a
/// lock keeps its events instead, and the subscriber filters them later.
fn is_wanted() -> bool {
    HELD.get() > 0 || catch_unwind(|| tracing::enabled!(Level::TRACE)).unwrap_or(false)
}

/// Reports something that a person should know and that no returned error says.
pub(crate) fn warn(detail: impl Display, message: &'static str) {
    report(Event::Note { level: Level::WARN, detail: printable(&detail.to_string()), message });
}

/// Reports what was lost or left behind.
pub(crate) fn error(detail: impl Display, message: &'static str) {
    report(Event::Note { level: Level::ERROR, detail: printable(&detail.to_string()), message });
}

/// Reports what helps to find the cause of something else.
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
    /// How many [`Quiet`] this thread has.
    static HELD: Cell<usize> = const { Cell::new(0) };
    /// The events that they keep.
    static KEPT: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// While this lives, the events of this thread are kept. Take it *before* a lock or a slot that is
/// held over a system call, so that it is dropped after it.
#[must_use]
#[derive(Debug)]
pub(crate) struct Quiet(PhantomData<*const ()>);

impl Quiet {
    /// The guard that this thread passed to `mem::forget`.
    pub(crate) fn forgotten() -> Quiet {
        Quiet(PhantomData)
    }
}

/// Keeps the events of this thread until the guard is dropped.
pub(crate) fn quiet() -> Quiet {
    HELD.set(HELD.get() + 1);
    Quiet(PhantomData)
}

impl Drop for Quiet {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
        if HELD.get() == 0 {
            // A thread that is ending has kept nothing.
            let kept = KEPT.try_with(RefCell::take).unwrap_or_default();
            kept.iter().for_each(emit);
        }
    }
}

fn report(event: Event) {
    if HELD.get() == 0 {
        emit(&event);
    } else {
        // A thread that is ending can keep nothing: the event is lost.
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(event));
    }
}

/// Passes an event to the subscriber. Its panic ends here: the panic hook has reported it, and the
/// caller's result must not be lost.
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
