//! The border to C: every call comes in here, and no panic goes out.
//!
//! A call from a child of fork(2) is refused before it touches anything: a lock there may never be
//! released. A failure leaves its code and its text with the thread, for `aclrtGetLastError` and
//! `aclGetRecentErrMsg`, and a line in the log if `ASCEND_ACL_LOG` is set.

use crate::fault::{Fault, Outcome, code};
use crate::hal;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The environment variable for a log on the standard error: `errors` logs each call that fails,
/// `calls` logs each call.
pub const LOG: &str = "ASCEND_ACL_LOG";

/// Whether there may be something that a child of fork must not touch.
static USED: AtomicBool = AtomicBool::new(false);

/// Whether this is a child of a process that used the library.
static INHERITED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The code of the latest call that failed.
    static LAST: Cell<i32> = const { Cell::new(0) };
    /// Its message, until that is read.
    static MESSAGE: RefCell<String> = const { RefCell::new(String::new()) };
    /// The message that was read last. It stays until the next one is read.
    static READ: RefCell<CString> = RefCell::default();
    /// Whether that can be read again.
    static AGAIN: Cell<Again> = const { Cell::new(Again::No) };
}

/// Whether a message can be read a second time: frameworks read it for their log, call other
/// functions, and read it for their exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    No,
    /// After the next call.
    AfterCall,
    Now,
}

extern "C" fn in_child() {
    INHERITED.store(USED.load(Ordering::Relaxed), Ordering::Relaxed);
}

extern "C" fn register() {
    // SAFETY: the handler only stores to an atomic, which a child of a threaded process may.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Registers the handler when the library is loaded. A fork that has begun does not run handlers
/// registered while it waits for malloc's locks, so its child would not notice that it is one.
// SAFETY: the loader calls what is in this section once, before any other code of this library; the
// function takes no arguments and uses nothing that is not there yet.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = register;

/// A call that uses what a child of fork must not touch.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    mark_used();
    ask(name, body)
}

/// A call under a name of the driver's own library: it returns that library's codes, and leaves its
/// message but not its code with the thread.
pub(crate) fn call_driver(name: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    let last = LAST.try_with(Cell::get);
    let code = call(name, body);
    if let Ok(last) = last {
        let _ = LAST.try_with(|now| now.set(last));
    }
    hal::error(code)
}

/// From now on there may be something that a child of fork must not touch.
pub(crate) fn mark_used() {
    if !USED.load(Ordering::Relaxed) {
        USED.store(true, Ordering::Release);
    }
}

/// A query: it takes no lock and makes no object, so the process may fork after it.
pub(crate) fn ask(name: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    if INHERITED.load(Ordering::Acquire) {
        return failed(name, &Fault::new(code::RT_CONTEXT_NULL, IN_CHILD));
    }
    call_anywhere(name, body)
}

/// A call that also works in a child of fork: it uses only data of its thread.
pub(crate) fn call_anywhere(name: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => succeeded(name),
        Ok(Err(fault)) => failed(name, &fault),
        Err(_) => failed(name, &Fault::new(code::INTERNAL, PANICKED)),
    }
}

/// A query that does not return a code; `otherwise` if it fails.
pub(crate) fn ask_or<T>(name: &'static str, otherwise: T, body: impl FnOnce() -> Outcome<T>) -> T {
    let mut answer = otherwise;
    ask(name, || {
        answer = body()?;
        Ok(())
    });
    answer
}

/// A call of a function that exists by name only. It leaves its message but not its code with the
/// thread: frameworks call some of these to find out whether they exist, and would report the code
/// with their next failure.
pub(crate) fn absent(name: &'static str) {
    let text = match name.starts_with("Hccl") {
        true => {
            "this function is not supported: communication between devices needs the vendor's HCCL, and this library \
             serves memory only. Use a back end of the host, such as gloo, on copies in host memory."
        }
        false => {
            "this function is not supported: it needs the vendor's kernels or another of its libraries. This library \
             serves memory only."
        }
    };
    let last = LAST.try_with(Cell::get);
    failed(name, &Fault::new(code::RT_NOT_SUPPORTED, text));
    if let Ok(last) = last {
        let _ = LAST.try_with(|now| now.set(last));
    }
}

/// Logs a line of the program.
pub(crate) fn log_of_program(level: i32, function: Text, file: Text, line: u32, format: Text) {
    if logged() == Logged::Nothing {
        return;
    }
    let text = |text: Text| text.to_text().unwrap_or_default();
    let (function, file, format) = (text(function), text(file), text(format));
    log(&format!("level {level}: {function} ({file}:{line}): {format}\n"));
}

const IN_CHILD: &str = "this process was forked from one that used the library, and the driver does not serve what it \
     inherited. Start processes by exec or spawn, or fork before the first call.";
const PANICKED: &str = "an internal error: the call may have been done in part. Please report it, with the panic \
     message on the standard error.";

fn succeeded(name: &'static str) -> i32 {
    let _ = AGAIN.try_with(|again| {
        if again.get() == Again::AfterCall {
            again.set(Again::Now);
        }
    });
    if logged() == Logged::Calls {
        log(&format!("{name}: 0\n"));
    }
    0
}

/// Stores a failure for the thread. A thread that is ending cannot store it any more.
fn failed(name: &'static str, fault: &Fault) -> i32 {
    if logged() != Logged::Nothing {
        log(&format!("{name}: {}: {}\n", fault.code, fault.text));
    }
    let _ = LAST.try_with(|last| last.set(fault.code));
    let _ = MESSAGE.try_with(|message| {
        // Cannot be borrowed here, but a message is not worth a panic.
        if let Ok(mut message) = message.try_borrow_mut() {
            *message = format!("{name}: {}", fault.text);
        }
    });
    fault.code
}

/// Writes a line to the standard error, without the lock of `std::io::stderr`, which may never be
/// released in a child of fork.
pub(crate) fn log(line: &str) {
    // SAFETY: the bytes are borrowed. A line that cannot be written is lost.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// What is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Logged {
    Nothing,
    Errors,
    Calls,
}

/// Reads the environment once. Without a lock, which may never be released in a child of fork.
fn logged() -> Logged {
    static KNOWN: AtomicU8 = AtomicU8::new(u8::MAX);
    const ALL: [Logged; 3] = [Logged::Nothing, Logged::Errors, Logged::Calls];
    if let Some(logged) = ALL.get(usize::from(KNOWN.load(Ordering::Relaxed))) {
        return *logged;
    }
    let logged = match std::env::var(LOG).as_deref() {
        Ok("calls") => Logged::Calls,
        Ok("errors" | "1") => Logged::Errors,
        _ => Logged::Nothing,
    };
    KNOWN.store(logged as u8, Ordering::Relaxed);
    logged
}

/// The code of this thread's latest call that failed, as `aclrtPeekAtLastError` returns it.
pub fn peek_at_last_error(level: i32) -> i32 {
    if level == 0 { LAST.try_with(Cell::get).unwrap_or(0) } else { code::INVALID_PARAM }
}

/// Returns and clears the code, as `aclrtGetLastError` does.
pub fn get_last_error(level: i32) -> i32 {
    if level == 0 { LAST.try_with(|last| last.replace(0)).unwrap_or(0) } else { code::INVALID_PARAM }
}

/// Returns and clears the message of this thread's latest call that failed; NULL if there is none.
/// It can be read a second time after another call. The text is valid until the thread's next call
/// of this.
pub fn recent_error_message() -> *const c_char {
    let message = MESSAGE.try_with(|message| message.take()).unwrap_or_default();
    let again = AGAIN.try_with(|again| again.replace(Again::No)).unwrap_or(Again::No);
    if message.is_empty() {
        return match again {
            Again::Now => READ.try_with(|read| read.borrow().as_ptr()).unwrap_or(std::ptr::null()),
            _ => std::ptr::null(),
        };
    }
    let _ = AGAIN.try_with(|again| again.set(Again::AfterCall));
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    READ.try_with(|read| {
        read.replace(text);
        read.borrow().as_ptr()
    })
    .unwrap_or(std::ptr::null())
}

/// Where a C function writes an answer: a pointer that may be NULL.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// A place of the caller.
    pub fn to(place: *mut T) -> Out<T> {
        Out(place)
    }

    /// Whether it is NULL.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses NULL.
    ///
    /// # Errors
    ///
    /// 100000 for NULL.
    pub fn check(self, name: &str) -> Outcome<Out<T>> {
        if self.0.is_null() { Err(null(name)) } else { Ok(self) }
    }

    /// Writes the answer, if there is a place for it.
    pub fn write(self, answer: T) {
        if !self.0.is_null() {
            // SAFETY: not NULL, and the caller of a C function passes what its prototype says: a
            // place for one `T`, of whatever alignment.
            unsafe { self.0.write_unaligned(answer) };
        }
    }

    /// The same place for another type.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes one of several answers.
    pub fn write_at(self, index: usize, answer: T) {
        if !self.0.is_null() {
            // SAFETY: as above, for a place for as many as the caller said.
            unsafe { self.0.wrapping_add(index).write_unaligned(answer) };
        }
    }
}

/// What a C function reads: a pointer that may be NULL, to one value or more.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// A value of the caller.
    pub(crate) fn of(value: *const T) -> In<T> {
        In(value)
    }

    /// The same place with another type.
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// Whether it is NULL.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address, to look it up.
    pub(crate) fn address(self) -> usize {
        self.0.addr()
    }

    /// The value.
    ///
    /// # Errors
    ///
    /// 100000 for NULL.
    pub fn read(self, name: &str) -> Outcome<T> {
        self.read_at(0, name)
    }

    /// One of several values.
    ///
    /// # Errors
    ///
    /// 100000 for NULL.
    pub fn read_at(self, index: usize, name: &str) -> Outcome<T> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: not NULL, and the caller of a C function passes what its prototype says: as many
        // values as it says, of whatever alignment.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }
}

/// A C string, or NULL.
pub type Text = In<c_char>;

impl Text {
    /// The bytes before the terminating zero, at most `limit`; `None` for NULL. A text without a
    /// zero within the limit is cut there.
    pub fn bytes(self, limit: usize) -> Option<Vec<u8>> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the caller of a C function passes a string that ends with a zero, or one that is
        // as long as the limit: no byte behind the first zero is read.
        let length = unsafe { libc::strnlen(self.0, limit) };
        // SAFETY: strnlen saw this many bytes.
        Some(unsafe { std::slice::from_raw_parts(self.0.cast(), length) }.to_vec())
    }

    /// The string, however long; `None` for NULL.
    pub fn to_text(self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the caller of a C function passes a string that ends with a zero.
        Some(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// An address that is looked up, never dereferenced.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(pub u64);

impl Address {
    /// Refuses NULL.
    ///
    /// # Errors
    ///
    /// 100000 for NULL.
    pub fn check(self, name: &str) -> Outcome<u64> {
        if self.0 == 0 { Err(null(name)) } else { Ok(self.0) }
    }
}

fn null(name: &str) -> Box<Fault> {
    Fault::new(code::INVALID_PARAM, format!("{name} is NULL. Pass a pointer."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> String {
        let text = recent_error_message();
        assert!(!text.is_null());
        // SAFETY: a string of this thread's, until it asks for the next.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_ends_at_the_border_with_a_code_and_a_sentence() {
        assert_eq!(call("aclrtMalloc", || panic!("a bug")), code::INTERNAL);
        assert_eq!(peek_at_last_error(0), code::INTERNAL);
        assert_eq!(said(), format!("aclrtMalloc: {PANICKED}"));
        assert_eq!(ask_or("aclrtGetSocName", 7, || panic!("a bug")), 7);
        assert_eq!(get_last_error(0), code::INTERNAL);
        assert_eq!(call("aclrtMalloc", || Ok(())), 0, "and the next call is served");
    }

    #[test]
    fn a_lock_that_a_panic_left_is_taken_again() {
        static LOCK: parking_lot::Mutex<u32> = parking_lot::Mutex::new(1);
        let panics = || {
            let _locked = LOCK.lock();
            panic!("a bug");
        };
        assert_eq!(call("aclrtMalloc", panics), code::INTERNAL);
        assert_eq!(*LOCK.lock(), 1);
    }
}
