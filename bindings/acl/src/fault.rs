//! Failures: the vendor's code for the program, and sentences for people.

use ascend_vmm::Error;
use ascend_vmm::error::{Errno, Reader};

/// Codes that functions return. The names are those of the header, without their prefix.
pub mod code {
    /// A NULL pointer, a size of 0, a reserved argument that is not 0.
    pub const INVALID_PARAM: i32 = 100_000;
    /// The library is initialised already.
    pub const REPEAT_INITIALIZE: i32 = 100_002;
    /// A file cannot be read, or a name is not known.
    pub const INVALID_FILE: i32 = 100_003;
    /// A file is not what it should be.
    pub const PARSE_FILE: i32 = 100_006;
    /// The library was finalised already.
    pub const REPEAT_FINALIZE: i32 = 100_037;
    /// A feature that does not exist.
    pub const FEATURE_UNSUPPORTED: i32 = 200_006;
    /// A panic inside the library.
    pub const INTERNAL: i32 = 500_000;
    /// There is no such operation.
    pub const FAILURE: i32 = 500_001;
    /// An argument that the runtime refuses.
    pub const RT_PARAM_INVALID: i32 = 107_000;
    /// Not a device of this process.
    pub const RT_INVALID_DEVICE: i32 = 107_001;
    /// The thread has no context.
    pub const RT_CONTEXT_NULL: i32 = 107_002;
    /// The stream is of another context.
    pub const RT_STREAM_CONTEXT: i32 = 107_003;
    /// An event has no time.
    pub const RT_EVENT_TIMESTAMP: i32 = 107_006;
    /// The stream is subscribed already, or not by this thread.
    pub const RT_STREAM_SUBSCRIBE: i32 = 107_011;
    /// The thread has subscribed to nothing.
    pub const RT_THREAD_SUBSCRIBE: i32 = 107_012;
    /// The stream has no thread for callbacks.
    pub const RT_STREAM_NO_CALLBACK: i32 = 107_015;
    /// Not a kind of memory.
    pub const RT_MEMORY_TYPE: i32 = 107_016;
    /// Not a handle of shared memory.
    pub const RT_INVALID_HANDLE: i32 = 107_017;
    /// A wait on a stream took too long.
    pub const RT_WAIT_TIMEOUT: i32 = 107_019;
    /// Not supported.
    pub const RT_NOT_SUPPORTED: i32 = 207_000;
    /// Out of memory.
    pub const RT_MEMORY: i32 = 207_001;
    /// There is no device.
    pub const RT_NO_DEVICE: i32 = 207_004;
    /// Something other than memory is used up.
    pub const RT_RESOURCE: i32 = 207_005;
    /// The device was not set.
    pub const RT_CONTEXT_RELEASE: i32 = 507_007;
    /// No callback came in time.
    pub const RT_REPORT_TIMEOUT: i32 = 507_012;
    /// The device cannot be set up.
    pub const RT_DEVICE_SETUP: i32 = 507_033;
    /// The stream did not end in time.
    pub const RT_STREAM_TIMEOUT: i32 = 507_046;
    /// The event did not come in time.
    pub const RT_EVENT_TIMEOUT: i32 = 507_047;
    /// The driver refused it.
    pub const RT_DRIVER: i32 = 507_899;
    /// The host memory is registered already.
    pub const HOST_REGISTERED: i32 = 507_910;
    /// The host memory is not registered.
    pub const HOST_NOT_REGISTERED: i32 = 507_911;
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What the function returns.
    pub code: i32,
    /// What `aclGetRecentErrMsg` says: cause and remedy.
    pub text: String,
}

/// The result of a function of this library.
pub type Outcome<T = ()> = Result<T, Box<Fault>>;

impl Fault {
    /// A failure. The text is whole sentences.
    pub fn new(code: i32, text: impl Into<String>) -> Box<Fault> {
        Box::new(Fault { code, text: text.into() })
    }

    /// An error of the driver, or an argument that the Rust library refuses before the driver
    /// would.
    pub fn driver(error: impl Into<Error>) -> Box<Fault> {
        let error = error.into();
        let code = match error {
            Error::Invalid(_) => code::RT_DRIVER,
            _ => code_of(&error),
        };
        Fault::new(code, Reader::C.words(&error.to_string()))
    }

    /// The same text with another code, unless memory is used up.
    pub fn with_code(mut self: Box<Self>, code: i32) -> Box<Fault> {
        if self.code != code::RT_MEMORY {
            self.code = code;
        }
        self
    }
}

/// A NULL pointer, a size of 0 or the like: what the vendor's outer layer refuses.
pub fn invalid(text: impl Into<String>) -> Box<Fault> {
    Fault::new(code::INVALID_PARAM, text)
}

/// What the vendor's runtime refuses.
pub fn refused(text: impl Into<String>) -> Box<Fault> {
    Fault::new(code::RT_PARAM_INVALID, text)
}

/// What the vendor's library can do, but not this one, or no hardware.
pub fn unsupported(text: impl Into<String>) -> Box<Fault> {
    Fault::new(code::RT_NOT_SUPPORTED, text)
}

impl From<Error> for Box<Fault> {
    fn from(error: Error) -> Box<Fault> {
        Fault::new(code_of(&error), Reader::C.words(&error.to_string()))
    }
}

impl<T> From<ascend_vmm::Failed<T>> for Box<Fault> {
    fn from(failed: ascend_vmm::Failed<T>) -> Box<Fault> {
        failed.error.into()
    }
}

/// The vendor's code for an error.
fn code_of(error: &Error) -> i32 {
    match error {
        Error::OutOfMemory(_) => code::RT_MEMORY,
        Error::NoDevices(_) => code::RT_NO_DEVICE,
        Error::Open(failed) if [Errno::ENOENT, Errno::ENODEV, Errno::ENXIO].contains(&failed.errno) => {
            code::RT_NO_DEVICE
        }
        Error::SessionTaken(_) | Error::SessionOpen => code::RT_DEVICE_SETUP,
        Error::UnknownGeneration { .. } => code::RT_NOT_SUPPORTED,
        Error::OtherProcess { .. } => code::RT_CONTEXT_NULL,
        Error::Ticket(_) | Error::Exchange(_) => code::RT_PARAM_INVALID,
        // The vendor's own codes for a device that lost its process mean hardware faults to
        // frameworks.
        Error::DeviceProcess { .. } | Error::DeviceProcessDied { .. } | Error::Open(_) => code::RT_DRIVER,
        _ => error.vendor_code().map_or(code::RT_DRIVER, |code| code.acl as i32),
    }
}
