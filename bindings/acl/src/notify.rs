//! Notifies: flags that one stream sets and another waits for and clears.
//!
//! They live in this process. The keys under which the vendor's library shares them with other
//! processes name hardware, so the functions for those do not exist here.

use crate::border::{In, Out};
use crate::context;
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::handles::{Handle, Handles, kind};
use crate::stream::{self, Task};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A notify.
pub(crate) struct Notify {
    id: u32,
    flag: Mutex<Flag>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    Clear,
    Set,
    /// Nobody waits for it any more.
    Destroyed,
}

static NOTIFIES: Handles<Arc<Notify>, { kind::NOTIFY }> = Handles::new();

/// The most notifies in one call.
const MOST: usize = 1 << 20;

impl Notify {
    fn change(&self, flag: Flag) {
        let mut current = self.flag.lock();
        if *current != Flag::Destroyed {
            *current = flag;
        }
    }

    /// Clears it if it is set; whether there is nothing to wait for.
    fn take(&self) -> bool {
        let mut flag = self.flag.lock();
        let before = *flag;
        if before == Flag::Set {
            *flag = Flag::Clear;
        }
        before != Flag::Clear
    }
}

fn find(notify: Handle) -> Outcome<Arc<Notify>> {
    if notify.is_null() {
        return Err(invalid("notify is NULL. Pass one that aclrtCreateNotify made."));
    }
    NOTIFIES.get(notify).ok_or_else(|| refused("this is not a notify, or it is destroyed."))
}

/// `aclrtCreateNotify`.
pub fn create(notify: Out<Handle>, flags: u64) -> Outcome {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let notify = notify.check("notify")?;
    if flags > 1 {
        return Err(refused(format!("flag is {flags}. It is ACL_NOTIFY_DEFAULT (0) or 1.")));
    }
    context::current()?;
    let id = LAST.fetch_add(1, Ordering::Relaxed);
    notify.write(NOTIFIES.insert(Arc::new(Notify { id, flag: Mutex::new(Flag::Clear) }))?);
    Ok(())
}

/// `aclrtDestroyNotify`: streams that wait for it go on.
pub fn destroy(notify: Handle) -> Outcome {
    find(notify)?.change(Flag::Destroyed);
    NOTIFIES.remove(notify);
    Ok(())
}

/// `aclrtGetNotifyId`.
pub fn id(notify: Handle, id: Out<u32>) -> Outcome {
    let id = id.check("notifyId")?;
    id.write(find(notify)?.id);
    Ok(())
}

/// `aclrtRecordNotify`: sets it, in the order of the stream.
pub fn record(notify: Handle, stream: Handle) -> Outcome {
    let notify = find(notify)?;
    stream::find(stream)?.push(Task::Work(Box::new(move || {
        notify.change(Flag::Set);
        Ok(())
    })))
}

/// `aclrtWaitAndResetNotify`: the timeout is in seconds, 0 for none.
pub fn wait(notify: Handle, stream: Handle, timeout: u32) -> Outcome {
    let notify = find(notify)?;
    let timeout = (timeout > 0).then(|| Duration::from_secs(timeout.into()));
    let mut end = None;
    stream::find(stream)?.push(Task::Until(Box::new(move || {
        if notify.take() {
            return Ok(true);
        }
        let Some(timeout) = timeout else { return Ok(false) };
        let now = Instant::now();
        if now >= *end.get_or_insert(now + timeout) {
            return Err(Fault::new(code::RT_WAIT_TIMEOUT, "the notify was not recorded in time."));
        }
        Ok(false)
    })))
}

/// `aclrtNotifyBatchReset`.
pub fn reset(notifies: In<Handle>, count: usize) -> Outcome {
    if notifies.is_null() || count == 0 || count > MOST {
        return Err(invalid(format!("notifies is NULL, or {count} is not a number of notifies.")));
    }
    let all: Outcome<Vec<_>> = (0..count).map(|index| find(notifies.read_at(index, "notifies")?)).collect();
    all?.iter().for_each(|notify| notify.change(Flag::Clear));
    Ok(())
}

/// Ends all notifies.
pub(crate) fn end() {
    for notify in NOTIFIES.collect(|handle, _| Some(handle)) {
        if let Some(notify) = NOTIFIES.remove(notify) {
            notify.change(Flag::Destroyed);
        }
    }
}
