//! The state of the process: its session, its open devices, and the count of initialisations.
//!
//! Nothing here requires `aclInit`: the vendor's library serves most calls without it, and programs
//! rely on that. The session is opened by the first call that needs it and closed by
//! `aclFinalize` if no memory is left, or with the process.

use crate::border::{Out, Text};
use crate::fault::{Fault, Outcome, code};
use crate::{addresses, context, devices, event, ipc, malloc, memory_pool, notify, physical, report, stream};
use ascend_vmm::{Device, Error, LogicalId, Session};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI64, Ordering};

/// `off`: the session has no address segments. Tools that put their own memory at the driver's
/// fixed addresses need that.
pub const SEGMENTS: &str = "ASCEND_ACL_SEGMENTS";

static SESSION: RwLock<Option<Session>> = RwLock::new(None);

/// The open devices.
static DEVICES: RwLock<BTreeMap<LogicalId, Device>> = RwLock::new(BTreeMap::new());

/// Whether `aclInit` was called, how often, and whether `aclFinalize` ended it.
static INITIALISED: Mutex<Initialised> = Mutex::new(Initialised { count: 0, ended: false });

struct Initialised {
    count: u64,
    ended: bool,
}

/// The device of threads that have set none, by the program's number; negative if there is none.
static DEFAULT_DEVICE: AtomicI64 = AtomicI64::new(-1);

/// This process's session.
pub(crate) fn session() -> Outcome<Session> {
    if let Some(session) = open_session() {
        return Ok(session);
    }
    let mut session = SESSION.write();
    match &*session {
        Some(session) => Ok(session.clone()),
        None => Ok(session.insert(open()?).clone()),
    }
}

fn open() -> Outcome<Session> {
    if std::env::var(SEGMENTS).as_deref() != Ok("off") {
        return Session::current().map_err(|error| {
            let taken = matches!(&error, Error::Refused(refused) if refused.command == "mmap");
            let mut fault = Box::<Fault>::from(error);
            if taken {
                fault.text += &format!(" To open it without address segments, set {SEGMENTS}=off.");
            }
            fault
        });
    }
    match Session::builder().segments(false).open() {
        // Opened by other code of this process through the Rust library.
        Err(Error::SessionOpen) => Ok(Session::current()?),
        opened => Ok(opened?),
    }
}

/// The session, if there is one.
pub(crate) fn open_session() -> Option<Session> {
    SESSION.read().clone()
}

/// A device of this process, set up when it is first needed.
pub(crate) fn device(id: LogicalId) -> Outcome<Device> {
    let open = DEVICES.read().get(&id).cloned();
    if let Some(device) = open {
        return Ok(device);
    }
    // Not under the lock: starting the process on the device can take seconds.
    let device = session()?.device(id)?;
    DEVICES.write().insert(id, device.clone());
    Ok(device)
}

/// Closes a device and all that is on it.
pub(crate) fn close_device(id: LogicalId) {
    ipc::end(id);
    memory_pool::end(Some(id));
    malloc::end(Some(id));
    physical::end(id);
    devices::forget_peers(Some(id));
    let device = DEVICES.write().remove(&id);
    drop(device);
}

/// The device of threads that have set none.
pub(crate) fn default_device() -> Option<i64> {
    let device = DEFAULT_DEVICE.load(Ordering::Relaxed);
    (device >= 0).then_some(device)
}

/// `aclInit`.
pub fn init(path: Text) -> Outcome {
    let mut initialised = INITIALISED.lock();
    if initialised.count > 0 {
        initialised.count += 1;
        return Err(Fault::new(
            code::REPEAT_INITIALIZE,
            format!("aclInit was called before; the count is {} now.", initialised.count),
        ));
    }
    if let Some(path) = path.to_text().filter(|path| !path.is_empty()) {
        if let Some(device) = configured(&path)? {
            DEFAULT_DEVICE.store(device, Ordering::Relaxed);
        }
    }
    *initialised = Initialised { count: 1, ended: false };
    Ok(())
}

/// The default device that a configuration file names. Other settings are for parts of the vendor's
/// stack that do not exist here.
fn configured(path: &str) -> Outcome<Option<i64>> {
    let text = read_some(path).map_err(|error| {
        Fault::new(code::INVALID_FILE, format!("the configuration {path} cannot be read: {error}."))
    })?;
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let malformed = || {
        let text = format!(
            "the configuration {path} is malformed. It looks like {{\"defaultDevice\": {{\"default_device\": \"0\"}}}}."
        );
        Fault::new(code::PARSE_FILE, text)
    };
    if !text.starts_with('{') || !text.ends_with('}') {
        return Err(malformed());
    }
    let Some((_, rest)) = text.split_once("\"default_device\"") else { return Ok(None) };
    let value = rest.trim_start().strip_prefix(':').ok_or_else(malformed)?.trim_start().trim_start_matches('"');
    let end = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    value[..end].parse().map(Some).map_err(|_| malformed())
}

/// The beginning of a file, enough for any configuration, without waiting for a writer: the path
/// may name anything.
fn read_some(path: &str) -> io::Result<String> {
    const MOST: u64 = 1 << 20;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let mut text = String::new();
    file.take(MOST).read_to_string(&mut text)?;
    Ok(text)
}

/// `aclFinalize`: ends everything but memory, however often `aclInit` was called.
pub fn finalize() -> Outcome {
    let mut initialised = INITIALISED.lock();
    if initialised.ended {
        return Err(Fault::new(code::REPEAT_FINALIZE, "aclFinalize was called before. Call it once."));
    }
    *initialised = Initialised { count: 0, ended: true };
    drop(initialised);
    end();
    Ok(())
}

/// `aclFinalizeReference`: the last one is `aclFinalize`.
pub fn finalize_reference(left: Out<u64>) -> Outcome {
    let mut initialised = INITIALISED.lock();
    if initialised.count == 0 {
        left.write(0);
        return Err(Fault::new(code::REPEAT_FINALIZE, "the library is not initialised. Call aclInit first."));
    }
    initialised.count -= 1;
    left.write(initialised.count);
    if initialised.count > 0 {
        return Ok(());
    }
    initialised.ended = true;
    drop(initialised);
    end();
    Ok(())
}

/// Ends streams, events and contexts. Memory stays until it is freed: programs free some of theirs
/// while they exit, after this. When none is left the session is closed, if it can be opened again.
fn end() {
    DEFAULT_DEVICE.store(-1, Ordering::Relaxed);
    stream::end_all(None);
    report::end();
    event::end();
    notify::end();
    context::end();
    malloc::trim();
    if ipc::is_used() || memory_pool::is_used() || malloc::is_used() || addresses::is_used() || physical::is_used() {
        return;
    }
    memory_pool::end(None);
    malloc::end(None);
    devices::forget_peers(None);
    let devices = std::mem::take(&mut *DEVICES.write());
    drop(devices);
    // The kernel may not notice the end of a session without segments, and would refuse the next.
    let session = SESSION.write().take_if(|session| session.has_segments());
    drop(session);
}
