//! Contexts: which device a thread works on.
//!
//! Each device has a primary context, the same for all threads, that exists from the first
//! `aclrtSetDevice` to the last `aclrtResetDevice`; programs can make others. A thread has one
//! current context or none. Contexts hold no memory: that belongs to the process and goes with the
//! last context of its device.

use crate::border::Out;
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::handles::{Handle, Handles, kind};
use crate::{devices, process, stream};
use ascend_vmm::LogicalId;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    /// The device, by the driver's number.
    pub(crate) device: LogicalId,
    /// The device, by the program's number.
    pub(crate) user: u32,
    primary: bool,
    /// The stream of calls that name none, made when it is first needed.
    pub(crate) default_stream: Mutex<Handle>,
    /// The options that were set for it.
    pub(crate) parameters: Mutex<BTreeMap<i32, i64>>,
}

static CONTEXTS: Handles<Arc<Context>, { kind::CONTEXT }> = Handles::new();

/// The primary contexts, by the driver's number of their device: how often each was set.
static PRIMARIES: Mutex<BTreeMap<u32, Primary>> = Mutex::new(BTreeMap::new());

struct Primary {
    count: u64,
    context: Handle,
}

/// How many contexts have ended. What a thread remembers of its context is valid until the next.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// What a thread remembers of its context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Current {
    pub(crate) handle: Handle,
    /// The device, by the driver's number.
    pub(crate) device: LogicalId,
    /// The device, by the program's number.
    pub(crate) user: u32,
    /// [`ENDED`] when this was looked up.
    ended: u64,
}

thread_local! {
    static CURRENT: Cell<Current> = const {
        Cell::new(Current { handle: Handle::NULL, device: LogicalId(0), user: 0, ended: u64::MAX })
    };
}

/// Makes a context current; `None` if there is no such context.
fn set_current(handle: Handle) -> Option<Current> {
    if handle.is_null() {
        // Takes no lock: a process that has no context may still fork.
        return None;
    }
    let ended = ENDED.load(Ordering::Acquire);
    let (device, user) = CONTEXTS.with(handle, |context| (context.device, context.user))?;
    let now = Current { handle, device, user, ended };
    // A thread that is ending cannot remember it any more.
    let _ = CURRENT.try_with(|current| current.set(now));
    Some(now)
}

fn remove(context: Handle) -> Option<Arc<Context>> {
    let removed = CONTEXTS.remove(context);
    ENDED.fetch_add(1, Ordering::AcqRel);
    removed
}

/// The calling thread's context.
pub(crate) fn current() -> Outcome<Current> {
    match CURRENT.try_with(Cell::get) {
        Ok(current) if current.ended == ENDED.load(Ordering::Acquire) => Ok(current),
        remembered => look_up(remembered.map_or(Handle::NULL, |current| current.handle)),
    }
}

/// The context that a thread remembers, if it still exists, or that of the default device.
fn look_up(handle: Handle) -> Outcome<Current> {
    if let Some(current) = set_current(handle) {
        return Ok(current);
    }
    let Some(user) = process::default_device() else { return Err(none()) };
    set_current(primary(user, 0)?).ok_or_else(none)
}

/// The object of the calling thread's context.
pub(crate) fn current_object() -> Outcome<Arc<Context>> {
    CONTEXTS.get(current()?.handle).ok_or_else(none)
}

fn none() -> Box<Fault> {
    Fault::new(code::RT_CONTEXT_NULL, "this thread has no device. Call aclrtSetDevice in it first.")
}

/// The primary context of a device, whose count goes up by `times`.
fn primary(user: i64, times: u64) -> Outcome<Handle> {
    let npu = devices::by_user(user)?;
    let device = npu.logical;
    if let Some(primary) = PRIMARIES.lock().get_mut(&device.0) {
        primary.count += times;
        return Ok(primary.context);
    }
    process::device(device).map_err(|fault| match fault.code {
        // These two codes say more than a failed set-up.
        code::RT_NO_DEVICE | code::RT_NOT_SUPPORTED => fault,
        _ => fault.with_code(code::RT_DEVICE_SETUP),
    })?;
    let mut primaries = PRIMARIES.lock();
    if let Some(primary) = primaries.get_mut(&device.0) {
        primary.count += times;
        return Ok(primary.context);
    }
    let context = new(device, npu.user.map_or(0, |user| user.0), true)?;
    primaries.insert(device.0, Primary { count: times, context });
    Ok(context)
}

fn new(device: LogicalId, user: u32, primary: bool) -> Outcome<Handle> {
    let (default_stream, parameters) = (Mutex::new(Handle::NULL), Mutex::default());
    CONTEXTS.insert(Arc::new(Context { device, user, primary, default_stream, parameters }))
}

/// `aclrtSetDevice`.
pub fn set_device(device: i32) -> Outcome {
    set_current(primary(device.into(), 1)?).ok_or_else(none)?;
    Ok(())
}

/// `aclrtGetDevice`.
pub fn get_device(device: Out<i32>) -> Outcome {
    let device = device.check("deviceId")?;
    // Reports the default device without setting it up.
    let remembered = CURRENT.try_with(|current| current.get().handle).unwrap_or(Handle::NULL);
    match set_current(remembered) {
        Some(current) => device.write(current.user as i32),
        None => device.write(process::default_device().ok_or_else(none)? as i32),
    }
    Ok(())
}

/// `aclrtResetDevice`: the last call ends the primary context.
pub fn reset_device(device: i32) -> Outcome {
    reset(device, false)
}

/// `aclrtResetDeviceForce`: ends the primary context at once.
pub fn reset_device_force(device: i32) -> Outcome {
    reset(device, true)
}

fn reset(user: i32, force: bool) -> Outcome {
    let device = devices::by_user(user.into())?.logical;
    let mut primaries = PRIMARIES.lock();
    let primary = primaries.get_mut(&device.0).ok_or_else(|| {
        let text = format!("device {user} is not set, or was reset as often as set. Call aclrtSetDevice first.");
        Fault::new(code::RT_CONTEXT_RELEASE, text)
    })?;
    primary.count = primary.count.saturating_sub(1);
    if primary.count > 0 && !force {
        return Ok(());
    }
    let context = primary.context;
    primaries.remove(&device.0);
    drop(primaries);
    remove(context);
    stream::end_all(Some(context));
    close_if_unused(device);
    Ok(())
}

/// Closes a device that has no context any more, with the memory on it.
fn close_if_unused(device: LogicalId) {
    if CONTEXTS.collect(|_, context| (context.device == device).then_some(())).is_empty() {
        process::close_device(device);
    }
}

/// `aclrtCreateContext`: a new one, current in this thread.
pub fn create(context: Out<Handle>, device: i32) -> Outcome {
    let context = context.check("context")?;
    let npu = devices::by_user(device.into())?;
    process::device(npu.logical).map_err(|fault| fault.with_code(code::RT_DEVICE_SETUP))?;
    let handle = new(npu.logical, device as u32, false)?;
    set_current(handle).ok_or_else(none)?;
    context.write(handle);
    Ok(())
}

/// `aclrtDestroyContext`.
pub fn destroy(context: Handle) -> Outcome {
    if context.is_null() {
        return Err(invalid("context is NULL. Pass one that aclrtCreateContext made."));
    }
    let explicit = CONTEXTS.with(context, |context| !context.primary).unwrap_or(false);
    let removed = if explicit { remove(context) } else { None };
    let removed = removed.ok_or_else(|| {
        let text = "this is not a context that aclrtCreateContext made, or it is destroyed. aclrtResetDevice ends a \
                    device's own context.";
        Fault::new(code::RT_CONTEXT_NULL, text)
    })?;
    stream::end_all(Some(context));
    if !PRIMARIES.lock().contains_key(&removed.device.0) {
        close_if_unused(removed.device);
    }
    Ok(())
}

/// `aclrtSetCurrentContext`.
pub fn set(context: Handle) -> Outcome {
    if context.is_null() {
        return Err(invalid("context is NULL. Pass one that aclrtCreateContext or aclrtGetCurrentContext returned."));
    }
    set_current(context).ok_or_else(|| refused("this is not a context, or it is destroyed."))?;
    Ok(())
}

/// `aclrtGetCurrentContext`: writes NULL if there is none, because programs test a variable that
/// they did not initialise.
pub fn get(context: Out<Handle>) -> Outcome {
    let context = context.check("context")?;
    context.write(Handle::NULL);
    context.write(current()?.handle);
    Ok(())
}

/// `aclrtGetPrimaryCtxState`.
pub fn primary_state(device: i32, flags: Out<u32>, active: Out<i32>) -> Outcome {
    let npu = devices::by_user(device.into())?;
    flags.write(0);
    active.write(PRIMARIES.lock().contains_key(&npu.logical.0).into());
    Ok(())
}

/// Ends all contexts.
pub(crate) fn end() {
    PRIMARIES.lock().clear();
    for handle in CONTEXTS.collect(|handle, _| Some(handle)) {
        remove(handle);
    }
}
