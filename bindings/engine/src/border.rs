//! The C interface: `include/ascend_vmm_service.h`.
//!
//! Domains are numbers that are looked up, so that a stale one is an error and not a crash. Nothing
//! unwinds into C.

use crate::domain::{Client, Domain};
use crate::error::{Error, Kind, Result};
use crate::pool::Pool;
use ascend_vmm_service::{DomainName, Error as ServiceFault, Mode, OpenOptions};
use libc::{c_char, c_void, size_t, ssize_t};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// `ascend_vmm_info`.
#[repr(C)]
pub struct Info {
    writes: i32,
    awake: i32,
    device: i32,
    allocations: u32,
    version: u64,
    address: *mut c_void,
    bytes: u64,
    keys: u64,
}

/// `ascend_vmm_entry`.
#[repr(C)]
pub struct FoundEntry {
    key: *const c_char,
    address: *mut c_void,
    size: u64,
    value: *const c_void,
    value_size: size_t,
}

/// A domain as C has it.
struct Open {
    domain: Domain,
    wait: Duration,
    /// The key that was found last, with a zero.
    found: CString,
}

static OPEN: Mutex<BTreeMap<u64, Arc<Mutex<Open>>>> = Mutex::new(BTreeMap::new());
/// The process that opened the first domain: in a child of fork a lock may be held for ever.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Why this thread's latest call failed.
    static SAID: RefCell<CString> = RefCell::new(CString::default());
}

fn say(text: &str) {
    let bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    SAID.set(CString::new(bytes).unwrap_or_default());
}

/// Runs a call. Its error is its code, and what [`ascend_vmm_error`] returns.
fn call(work: impl FnOnce() -> Result<()>) -> i32 {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let owner = OWNER.load(Ordering::SeqCst);
        if owner != 0 && owner != std::process::id() {
            return Err(ServiceFault::Forked("the domains".into()).into());
        }
        work()
    }));
    match done {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            say(&error.to_string());
            error.kind() as i32
        }
        Err(_) => {
            say("a bug of the library: it panicked; what the call was about is not known to be whole");
            Kind::Other as i32
        }
    }
}

fn invalid<T>(problem: &str, remedy: &'static str) -> Result<T> {
    Err(Error::Invalid { problem: problem.into(), remedy })
}

/// # Safety
///
/// NULL, or a text that ends with a zero and lives during the call.
unsafe fn text<'a>(address: *const c_char, name: &str) -> Result<&'a str> {
    if address.is_null() {
        return invalid(&format!("{name} is NULL"), "pass a text");
    }
    // SAFETY: the caller vouches for it.
    match unsafe { CStr::from_ptr(address) }.to_str() {
        Ok(text) => Ok(text),
        Err(_) => invalid(&format!("{name} is not UTF-8"), "pass a text in UTF-8"),
    }
}

/// # Safety
///
/// NULL, or room for an answer.
unsafe fn answer<T>(room: *mut T, value: T, name: &str) -> Result<()> {
    if room.is_null() {
        return invalid(&format!("{name} is NULL"), "pass the address of a variable");
    }
    // SAFETY: the caller vouches for it.
    unsafe { room.write(value) };
    Ok(())
}

fn all() -> MutexGuard<'static, BTreeMap<u64, Arc<Mutex<Open>>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(domain: u64, work: impl FnOnce(&mut Open) -> Result<T>) -> Result<T> {
    let Some(open) = all().get(&domain).cloned() else {
        return invalid(&format!("{domain} is no open domain"), "pass what ascend_vmm_open wrote");
    };
    let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut open)
}

/// Opens a domain: see the header.
///
/// # Safety
///
/// Texts end with a zero; `domain` is NULL or room for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_vmm_open(
    socket: *const c_char,
    name: *const c_char,
    mode: i32,
    capacity: u64,
    timeout_ms: u64,
    domain: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller vouches for it.
        let (socket, name) = unsafe { (text(socket, "socket")?, text(name, "name")?) };
        // SAFETY: as above; before anything is opened.
        unsafe { answer(domain, 0, "domain")? };
        let modes = [Mode::Read, Mode::Write, Mode::WriteOrRead, Mode::Discard, Mode::Update];
        let Some(&mode) = usize::try_from(mode).ok().and_then(|mode| modes.get(mode)) else {
            return invalid(&format!("{mode} is no mode"), "pass one of enum ascend_vmm_mode");
        };
        let name = name.parse::<DomainName>().map_err(|error| Error::Invalid {
            problem: error.to_string(),
            remedy: "pass a name such as llama-70b/tp0/weights",
        })?;
        let wait = Duration::from_millis(timeout_ms);
        let open = Client::new(socket).open(&name, mode, capacity, &OpenOptions::new().wait(wait))?;
        OWNER.store(std::process::id(), Ordering::SeqCst);
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        all().insert(number, Arc::new(Mutex::new(Open { domain: open, wait, found: CString::default() })));
        // SAFETY: as above.
        unsafe { answer(domain, number, "domain") }
    })
}

/// What a domain is: see the header.
///
/// # Safety
///
/// `info` is NULL or room for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_vmm_get_info(domain: u64, info: *mut Info) -> i32 {
    call(|| {
        with(domain, |Open { domain, .. }| {
            let found = Info {
                writes: domain.writes().into(),
                awake: domain.is_awake().into(),
                device: domain.device(),
                allocations: domain.allocations() as u32,
                version: domain.version(),
                address: with_exposed_provenance_mut(domain.address() as usize),
                bytes: domain.bytes(),
                keys: domain.entries().len() as u64,
            };
            // SAFETY: the caller vouches for it.
            unsafe { answer(info, found, "info") }
        })
    })
}

/// Names bytes of a writer: see the header.
///
/// # Safety
///
/// `key` ends with a zero, `value` has `value_size` bytes, `address` is NULL or room for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_vmm_put(
    domain: u64,
    key: *const c_char,
    size: u64,
    value: *const c_void,
    value_size: size_t,
    address: *mut *mut c_void,
) -> i32 {
    call(|| {
        // SAFETY: the caller vouches for it.
        let key = unsafe { text(key, "key")? };
        // SAFETY: as above.
        unsafe { answer(address, null_mut(), "address")? };
        let value: &[u8] = match value.is_null() || value_size == 0 {
            true => &[],
            // SAFETY: as above.
            false => unsafe { std::slice::from_raw_parts(value.cast(), value_size) },
        };
        let at = with(domain, |open| open.domain.put(key, size, value, open.wait))?;
        // SAFETY: as above.
        unsafe { answer(address, with_exposed_provenance_mut(at as usize), "address") }
    })
}

/// Publishes: see the header.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_commit(domain: u64) -> i32 {
    call(|| with(domain, |open| open.domain.commit()))
}

/// The bytes of a key: see the header.
///
/// # Safety
///
/// `key` ends with a zero; `entry` is NULL or room for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_vmm_find(domain: u64, key: *const c_char, entry: *mut FoundEntry) -> i32 {
    call(|| {
        // SAFETY: the caller vouches for it.
        let key = unsafe { text(key, "key")? };
        with(domain, |open| {
            let Some((key, _)) = open.domain.entries().get_key_value(key) else {
                let domain = open.domain.name().clone();
                return Err(ServiceFault::NoKey { domain, key: key.into() }.into());
            };
            let key = key.clone();
            // SAFETY: as above.
            unsafe { found(open, key, entry) }
        })
    })
}

/// The first key behind another one: see the header.
///
/// # Safety
///
/// `after` is NULL or ends with a zero; `entry` is NULL or room for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_vmm_next(domain: u64, after: *const c_char, entry: *mut FoundEntry) -> i32 {
    call(|| {
        let after = match after.is_null() {
            true => String::new(),
            // SAFETY: the caller vouches for it.
            false => unsafe { text(after, "after")?.to_owned() },
        };
        with(domain, |open| {
            let Some(key) = open.domain.entries().keys().find(|key| **key > after).cloned() else {
                let domain = open.domain.name().clone();
                return Err(ServiceFault::NoKey { domain, key: format!("(behind {after})") }.into());
            };
            // SAFETY: as above.
            unsafe { found(open, key, entry) }
        })
    })
}

/// # Safety
///
/// `entry` is NULL or room for an answer.
unsafe fn found(open: &mut Open, key: String, entry: *mut FoundEntry) -> Result<()> {
    if !open.domain.is_awake() {
        return Err(ServiceFault::Asleep(open.domain.name().clone()).into());
    }
    let Some(known) = open.domain.entries().get(&key) else { return Ok(()) };
    let address = open.domain.address_of(known).unwrap_or(0);
    let (size, value, value_size) = (known.size, known.value.as_ptr().cast(), known.value.len());
    open.found = CString::new(key.into_bytes()).unwrap_or_default();
    let address = with_exposed_provenance_mut(address as usize);
    let value = if value_size == 0 { null() } else { value };
    // SAFETY: the caller vouches for it.
    unsafe { answer(entry, FoundEntry { key: open.found.as_ptr(), address, size, value, value_size }, "entry") }
}

/// Unmaps and keeps the addresses: see the header.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_sleep(domain: u64) -> i32 {
    call(|| with(domain, |open| open.domain.sleep()))
}

/// Maps at the same addresses: see the header.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_wake(domain: u64, timeout_ms: u64) -> i32 {
    call(|| with(domain, |open| open.domain.wake(Duration::from_millis(timeout_ms))))
}

/// Unmaps and ends the role: see the header.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_close(domain: u64) -> i32 {
    call(|| {
        with(domain, |open| open.domain.close())?;
        // Not while the lock is held: the role says goodbye when it is dropped.
        let closed = all().remove(&domain);
        drop(closed);
        Ok(())
    })
}

/// Why this thread's latest call failed: see the header.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_error() -> *const c_char {
    SAID.with_borrow(|said| said.as_ptr())
}

/// The `malloc` of a pluggable allocator: a piece of the [`Pool`] in use, or NULL.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_pool_malloc(size: ssize_t, device: i32, _stream: *mut c_void) -> *mut c_void {
    with_exposed_provenance_mut(Pool::allocate(size.max(0) as u64, device) as usize)
}

/// The `free` of a pluggable allocator. The memory belongs to the domain, and stays.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_vmm_pool_free(_address: *mut c_void, _size: size_t, _device: i32, _stream: *mut c_void) {}
