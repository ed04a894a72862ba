//! One error type that explains.
//!
//! The driver answers with a bare errno, and the vendor's library folds most of them into one code.
//! An [`Error`] says what was tried, on what and with which arguments, what the kernel answered (by
//! name, and in its own sentences if it left any in the log page), what that most likely means,
//! what to do, and which codes the vendor's library would have returned.
//!
//! Arguments that cannot be right are refused before the kernel is called ([`Error::Invalid`]), so
//! an [`Error::Refused`] always comes from a system call. A call that consumes an object returns it
//! in [`Failed`], so an error loses nothing.
//!
//! The sentences are in `src/error/`: about refused commands, hosts, device processes and tickets.
//! A cause is a clause without a full stop, a remedy is one or more whole sentences.
//!
//! ```
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::{Error, LogicalId, Session};
//!
//! let device = Session::open()?.device(LogicalId(0))?;
//! let memory = match device.create(1 << 50) {
//!     Err(error) if error.is_out_of_memory() => device.create(2 << 20)?,
//!     other => other?,
//! };
//! let error = device.create(5).unwrap_err();
//! assert!(matches!(error, Error::Invalid(_)));
//! println!("{error}"); // what is wrong with 5, and which sizes are right
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod errno;
mod finding;
mod printable;
mod process_failure;
mod refusal;
mod ticket_error;
mod words;

pub use errno::Errno;
pub use finding::{Finding, Health, Severity};
#[doc(hidden)]
pub use printable::printable;
pub(crate) use printable::printable_path;
pub use process_failure::{ProcessFailure, Step};
pub use ticket_error::TicketError;
pub use words::Reader;

use crate::bytes::Bytes;
use crate::id::LogicalId;
use crate::kind::Page;
use ascend_ioctl::Generation;
use ascend_ioctl::svm::Op;
use std::fmt;
use std::path::{Path, PathBuf};

/// Result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Result of a command, before its caller says what it was for.
pub(crate) type KernelResult<T> = Result<T, Box<Refused>>;

/// What went wrong.
///
/// `{:?}` prints the same text as `{}`, because that is what a `main` that returns an error prints,
/// and what `unwrap` panics with.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device node could not be opened.
    #[error(transparent)]
    Open(#[from] OpenFailed),
    /// The kernel refused a command.
    #[error(transparent)]
    Refused(#[from] Box<Refused>),
    /// There is not enough memory of the wanted kind.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The arguments cannot be right; the kernel was not called.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// Other code in this process has the session.
    #[error(transparent)]
    SessionTaken(SessionTaken),
    /// A session of this library is already open in this process.
    #[error(
        "this process already has an open session; the driver allows one per process. \
         Clone that session, or take it with Session::current()."
    )]
    SessionOpen,
    /// The object belongs to the parent of this process.
    #[error(
        "this session was opened by the parent of process {process}, and the driver does not serve \
         it in a child of fork. Open a session in the child, or use the parent's only in the parent."
    )]
    OtherProcess {
        /// The process that called.
        process: u32,
    },
    /// Other objects still use it.
    #[error("cannot {operation}: {users} [{}]", VendorCode::of(Errno::EBUSY))]
    InUse {
        /// What was tried.
        operation: &'static str,
        /// Who still uses it, and what to do.
        users: String,
    },
    /// The bytes are not a valid ticket.
    #[error("cannot read the ticket: {0}. {remedy}", remedy = .0.remedy())]
    Ticket(#[from] TicketError),
    /// Memory could not be passed between two processes.
    #[error(transparent)]
    Exchange(Exchange),
    /// A file could not be read or written.
    #[error(transparent)]
    File(FileFailed),
    /// This library does not know the driver.
    #[error("{}", unknown_generation(detected))]
    UnknownGeneration {
        /// What was seen.
        detected: String,
    },
    /// This process has no NPU; the finding says why.
    #[error("no NPU: {0}. {remedy}", remedy = .0.remedy())]
    NoDevices(Finding),
    /// The process on the device could not be started or ended.
    #[error("no device process on device {device}: {failure}. {}", failure.remedy())]
    DeviceProcess {
        /// The device.
        device: LogicalId,
        /// Why.
        failure: ProcessFailure,
    },
    /// The process on the device is gone, and its memory with it.
    #[error(
        "the device process of this process on device {device} has died ({operation} got {errno:?}); \
         its memory is lost. Drop what lives on that device, then open the device again."
    )]
    DeviceProcessDied {
        /// The device.
        device: LogicalId,
        /// What was tried.
        operation: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A consuming call failed; holds the error and the object. `map_err(Error::from)` keeps the error
/// alone, and `?` does in a function that returns [`Error`].
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failed<T> {
    /// Why.
    pub error: Error,
    /// What was passed in.
    pub object: T,
}

impl<T> From<Failed<T>> for Error {
    fn from(failed: Failed<T>) -> Error {
        failed.error
    }
}

/// A device node could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct OpenFailed {
    /// The node.
    pub path: PathBuf,
    /// Why.
    pub errno: Errno,
}

impl fmt::Display for OpenFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cause, remedy) = refusal::open(self.errno);
        write!(f, "cannot open {}: {}: {cause}. {remedy}", printable_path(&self.path), self.errno)
    }
}

/// A system call that can be refused, by what its errnos mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SystemCall {
    /// A command of the memory module.
    Svm(Op),
    /// OPEN of the multiplexer.
    Bind,
    /// mmap(2) of an address segment.
    Mmap,
    /// mprotect(2) of an address segment.
    Mprotect,
    /// A command of another module, whose errnos have no meaning of their own.
    Other(&'static str),
}

impl SystemCall {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            SystemCall::Svm(op) => op.name(),
            SystemCall::Bind => "OPEN",
            SystemCall::Mmap => "mmap",
            SystemCall::Mprotect => "mprotect",
            SystemCall::Other(name) => name,
        }
    }
}

/// The kernel refused a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct Refused {
    /// What was tried, as a verb phrase.
    pub operation: &'static str,
    /// The driver's command.
    pub command: &'static str,
    /// On what.
    pub object: String,
    /// With which arguments.
    pub arguments: String,
    /// What the kernel answered.
    pub errno: Errno,
    /// The kernel's own sentences, if it left any; one per line, the outermost last.
    pub kernel_log: String,
    /// Most likely meaning.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

impl Refused {
    /// A refusal, with what the errno means for the call. The caller adds what the call was for:
    /// [`Refused::operation`].
    pub(crate) fn new(call: SystemCall, errno: Errno) -> Box<Refused> {
        let (cause, remedy) = refusal::command(call, errno);
        Box::new(Refused {
            operation: "",
            command: call.name(),
            object: String::new(),
            arguments: String::new(),
            errno,
            kernel_log: String::new(),
            cause,
            remedy,
        })
    }

    /// Says what was tried.
    pub(crate) fn operation(mut self: Box<Self>, operation: &'static str) -> Box<Self> {
        self.operation = operation;
        self
    }

    /// Says on what it was tried.
    pub(crate) fn object(mut self: Box<Self>, object: impl Into<String>) -> Box<Self> {
        self.object = object.into();
        self
    }

    /// Says with which arguments.
    pub(crate) fn arguments(mut self: Box<Self>, arguments: impl Into<String>) -> Box<Self> {
        self.arguments = arguments.into();
        self
    }

    /// Adds the kernel's own sentences.
    pub(crate) fn kernel_log(mut self: Box<Self>, sentences: String) -> Box<Self> {
        self.kernel_log = sentences;
        self
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.operation)?;
        if !self.object.is_empty() {
            write!(f, " ({})", self.object)?;
        }
        write!(f, ": {}", self.command)?;
        if !self.arguments.is_empty() {
            write!(f, " {{{}}}", self.arguments)?;
        }
        let Refused { errno, cause, remedy, kernel_log, .. } = self;
        write!(f, " was refused with {errno}: {cause}. {remedy}{} [{}]", quoted(kernel_log), VendorCode::of(*errno))
    }
}

/// The end of a message that quotes the kernel's sentences.
fn quoted(kernel_log: &str) -> String {
    if kernel_log.is_empty() {
        return String::new();
    }
    format!(" The kernel said: \"{}\".", kernel_log.trim_end().replace('\n', " / "))
}

/// There is not enough memory of the wanted kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Where: `device 0, HBM`, or `host`.
    pub place: String,
    /// The size that was asked for, in bytes.
    pub asked: u64,
    /// The pages that were asked for.
    pub page: Page,
    /// Free bytes in 2 MiB pages, where the driver reports them.
    pub free_huge: Option<u64>,
    /// Free bytes in 1 GiB pages, where the driver reports them.
    pub free_giant: Option<u64>,
    /// The kernel's own sentences.
    pub kernel_log: String,
}

impl OutOfMemory {
    /// The largest pages in which the asked size would fit now, by what the driver reports as free.
    pub fn page_that_fits(&self) -> Option<Page> {
        if self.free_giant.is_some_and(|free| free >= self.asked && self.asked % Page::Giant.size() == 0) {
            Some(Page::Giant)
        } else if self.free_huge.is_some_and(|free| free >= self.asked) {
            Some(Page::Huge)
        } else {
            None
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, page) = (Bytes(self.asked), Bytes(self.page.size()));
        write!(f, "out of memory on {}: {asked} were asked for in pages of {page}", self.place)?;
        if let Some(free) = self.free_huge {
            write!(f, "; free in 2 MiB pages: {}", Bytes(free))?;
        }
        if let Some(free) = self.free_giant {
            write!(f, "; free in 1 GiB pages: {}", Bytes(free))?;
        }
        match self.page_that_fits() {
            Some(page) if page != self.page => write!(f, ". It would fit in pages of {}.", Bytes(page.size()))?,
            Some(_) => f.write_str(
                ". By these figures it should fit: the memory may be fragmented, just taken by \
                 another process, or limited by a cgroup.",
            )?,
            None if self.free_huge.is_some() || self.free_giant.is_some() => {
                f.write_str(". Free memory, ask for less, or use another device.")?;
            }
            None => f.write_str(". Free memory or ask for less.")?,
        }
        write!(f, "{} [{}]", quoted(&self.kernel_log), VendorCode::of(Errno::ENOMEM))
    }
}

/// Arguments that cannot be right.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}: {problem}. {rule} [{}]", VendorCode::INVALID_VALUE)]
#[non_exhaustive]
pub struct Invalid {
    /// What was tried, as a verb phrase.
    pub operation: &'static str,
    /// What is wrong with the arguments.
    pub problem: String,
    /// The rule, or what would be right: whole sentences.
    pub rule: &'static str,
}

impl Invalid {
    pub(crate) fn because(operation: &'static str, problem: impl Into<String>, rule: &'static str) -> Error {
        Error::Invalid(Invalid { operation, problem: problem.into(), rule })
    }

    /// Refuses a range that is not inside of memory or addresses of a size.
    pub(crate) fn check_inside(operation: &'static str, offset: u64, size: u64, whole: u64) -> Result<()> {
        if offset <= whole && size <= whole - offset {
            return Ok(());
        }
        let problem = format!("{} at offset {offset:#x} are not inside of {}", Bytes(size), Bytes(whole));
        Err(Invalid::because(operation, problem, "Use an offset and a size inside of it."))
    }
}

/// Memory could not be passed between two processes: one of them died, was late, or is not the
/// process that it claims to be.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}: {problem}. {remedy}")]
#[non_exhaustive]
pub struct Exchange {
    /// What was tried, as a verb phrase.
    pub operation: &'static str,
    /// What went wrong.
    pub problem: String,
    /// What to do.
    pub remedy: &'static str,
}

/// A file could not be read or written, or has the wrong contents.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct FileFailed {
    /// What was tried, as a verb phrase.
    pub operation: &'static str,
    /// The file.
    pub path: PathBuf,
    /// What Linux answered; `None` if the contents are wrong.
    pub errno: Option<Errno>,
    /// What is wrong; empty if the errno says it.
    pub problem: String,
    /// What to do.
    pub remedy: &'static str,
}

impl FileFailed {
    /// A system call on the file failed.
    pub(crate) fn call(operation: &'static str, path: &Path, error: &std::io::Error) -> Error {
        let errno = error.raw_os_error().map(Errno::from_raw);
        let problem = if errno.is_some() { String::new() } else { error.to_string() };
        let remedy = match errno {
            Some(Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG) => {
                "Nothing was lost. Make room, raise the limit, or use another file system."
            }
            Some(Errno::ENOENT) => "Check the path.",
            Some(Errno::EEXIST) => "Choose another path, or remove the file if it is not needed any more.",
            Some(Errno::EACCES | Errno::EPERM) => "Check the permissions of the file and of its directory.",
            _ => "Check the file and its file system.",
        };
        Error::File(FileFailed { operation, path: path.to_owned(), errno, problem, remedy })
    }

    /// The file has the wrong contents.
    pub(crate) fn because(
        operation: &'static str,
        path: &Path,
        problem: impl Into<String>,
        remedy: &'static str,
    ) -> Error {
        Error::File(FileFailed { operation, path: path.to_owned(), errno: None, problem: problem.into(), remedy })
    }
}

impl fmt::Display for FileFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} ({}): ", self.operation, printable_path(&self.path))?;
        match self.errno {
            Some(errno) if self.problem.is_empty() => write!(f, "{errno}")?,
            Some(errno) => write!(f, "{}: {errno}", self.problem)?,
            None => f.write_str(&self.problem)?,
        }
        write!(f, ". {}", self.remedy)
    }
}

/// Other code in this process has the session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct SessionTaken {
    /// Path of the vendor's library, if it is loaded in this process.
    pub vendor_library: Option<String>,
    /// Path of another file of this process that has a copy of this library: `libascendcl.so` or
    /// the Python module.
    pub other_copy: Option<String>,
    /// Whether other code in this process has files of the driver open.
    pub driver_in_use: bool,
}

impl fmt::Display for SessionTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const BROKER: &str = "This library and the vendor's cannot both drive the memory of one process. Run what \
            uses this library in a process of its own, and share memory with that: export it there, trust this \
            process, and send it a ticket, or the 64-bit handle that the vendor's library imports \
            (docs/hosts.md, \"Beside the vendor's library\").";
        f.write_str("the driver allows one memory session per process, and this process already has one (EEXIST). ")?;
        const COPY: &str = "It has a copy of this library with a session of its own. Use the functions of that file \
            for everything in this process (ascend_vmm.acl does), or load only one of the two.";
        match (&self.vendor_library, &self.other_copy) {
            (Some(library), _) => write!(f, "{library} is loaded here and most likely holds it. {BROKER}")?,
            (None, Some(copy)) => write!(f, "{copy} is loaded here and most likely holds it. {COPY}")?,
            (None, None) if self.driver_in_use => {
                write!(f, "Other code in this process has the driver open and most likely holds it. {BROKER}")?;
            }
            (None, None) => f.write_str(
                "No other code in this process has the driver open: it is an earlier session that was opened \
                 without address segments, and ends only with the process.",
            )?,
        }
        write!(f, " [{}]", VendorCode::of(Errno::EEXIST))
    }
}

/// The sentence about a driver whose answers fit no known generation.
fn unknown_generation(detected: &str) -> String {
    let known: Vec<String> = Generation::ALL.iter().map(Generation::to_string).collect();
    format!(
        "unknown driver generation: {detected}. Known are {}. Nothing was done with it. A newer version of this \
         library may know it; SessionBuilder::allow_unknown_generation goes on with the newest known tables if its \
         first commands have known numbers, at your own risk.",
        known.join(", ")
    )
}

impl Error {
    /// The errno that the kernel answered, if it was called.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Open(failed) => Some(failed.errno),
            Error::Refused(refused) => Some(refused.errno),
            Error::OutOfMemory(_) => Some(Errno::ENOMEM),
            Error::SessionTaken(_) => Some(Errno::EEXIST),
            Error::DeviceProcessDied { errno, .. } => Some(*errno),
            Error::File(failed) => failed.errno,
            _ => None,
        }
    }

    /// True if there was not enough memory: freeing some, or asking for less, may help.
    ///
    /// A device that is out of memory is [`Error::OutOfMemory`]. Other commands report ENOMEM when
    /// the kernel itself has too little.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory(_) => true,
            Error::Refused(refused) => refused.errno == Errno::ENOMEM,
            Error::File(failed) => failed.errno == Some(Errno::ENOMEM),
            _ => false,
        }
    }

    /// True if the device, or the process on it, is gone: its memory is lost, and the device has to
    /// be opened again.
    pub fn is_device_lost(&self) -> bool {
        match self {
            Error::DeviceProcessDied { .. } => true,
            Error::Refused(refused) => matches!(refused.errno, Errno::ENODEV | Errno::ENXIO | Errno::ENOSYS),
            _ => false,
        }
    }

    /// True if the exporter of the memory does not trust this process. The import can be tried
    /// again once it does.
    pub fn is_not_trusted(&self) -> bool {
        matches!(self, Error::Refused(refused)
            if refused.errno == Errno::EACCES && refused.command == Op::MemImport.name())
    }

    /// The kernel's own sentences about the failure, if it left any.
    pub fn kernel_log(&self) -> Option<&str> {
        let log = match self {
            Error::Refused(refused) => &refused.kernel_log,
            Error::OutOfMemory(error) => &error.kernel_log,
            _ => return None,
        };
        (!log.is_empty()).then_some(log.as_str())
    }

    /// The codes that the vendor's libraries return for this, where they have any.
    pub fn vendor_code(&self) -> Option<VendorCode> {
        match self {
            Error::Invalid(_) => Some(VendorCode::INVALID_VALUE),
            Error::InUse { .. } => Some(VendorCode::of(Errno::EBUSY)),
            _ => self.errno().map(VendorCode::of),
        }
    }
}

/// What the vendor's libraries call an error: the driver library's code and the runtime's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct VendorCode {
    /// Value of `drvError_t`.
    pub driver: u32,
    /// Its name, without the prefix `DRV_ERROR_`.
    pub driver_name: &'static str,
    /// Value of `aclError`.
    pub acl: u32,
}

impl VendorCode {
    /// An argument that the driver library refuses itself.
    pub const INVALID_VALUE: VendorCode = VendorCode { driver: 3, driver_name: "INVALID_VALUE", acl: 107_000 };

    /// The codes for an errno of the driver. Most become 507899, "driver internal error".
    pub fn of(errno: Errno) -> VendorCode {
        let (driver, driver_name, acl) = match errno {
            Errno::ESRCH => (42, "PROCESS_EXIT", 507_899),
            Errno::EPERM => (46, "OPER_NOT_PERMITTED", 207_006),
            Errno::ENOENT | Errno::EEXIST => (38, "FILE_OPS", 507_899),
            Errno::ENXIO | Errno::ENODEV => (1, "NO_DEVICE", 207_004),
            Errno::E2BIG => (37, "OVER_LIMIT", 207_012),
            Errno::EAGAIN => (51, "TRY_AGAIN", 507_899),
            Errno::ENOMEM => (6, "OUT_OF_MEMORY", 207_001),
            Errno::EFAULT => (4, "INVALID_HANDLE", 107_017),
            Errno::EBUSY => (13, "BUSY", 507_899),
            Errno::EINVAL => (8, "PARA_ERROR", 507_899),
            Errno::ENOSPC => (14, "NO_RESOURCES", 207_005),
            Errno::EOPNOTSUPP => (0xfffe, "NOT_SUPPORT", 207_000),
            Errno::ETIMEDOUT => (16, "WAIT_TIMEOUT", 507_012),
            _ => (17, "IOCRL_FAIL", 507_899),
        };
        VendorCode { driver, driver_name, acl }
    }
}

impl fmt::Display for VendorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the vendor's codes: drvError {} {}, aclError {}", self.driver, self.driver_name, self.acl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The errnos that the memory driver is known to answer.
    const ERRNOS: [Errno; 22] = [
        Errno::ESRCH,
        Errno::EPERM,
        Errno::ENOENT,
        Errno::EEXIST,
        Errno::ENXIO,
        Errno::ENODEV,
        Errno::E2BIG,
        Errno::EAGAIN,
        Errno::ENOMEM,
        Errno::EFAULT,
        Errno::EBUSY,
        Errno::EINVAL,
        Errno::ENOSPC,
        Errno::EOPNOTSUPP,
        Errno::ETIMEDOUT,
        Errno::EACCES,
        Errno::EADDRINUSE,
        Errno::EADDRNOTAVAIL,
        Errno::EBADRQC,
        Errno::ENONET,
        Errno::ENOSYS,
        Errno::EALREADY,
    ];

    #[test]
    fn every_errno_of_the_driver_has_a_cause_and_a_remedy_for_every_command() {
        let unexplained = refusal::command(SystemCall::Other("NO_SUCH_COMMAND"), Errno::EDQUOT);
        for errno in ERRNOS.into_iter().chain([Errno::EBADFD, Errno::EIO, Errno::EUSERS]) {
            for op in Op::ALL {
                let (cause, remedy) = refusal::command(SystemCall::Svm(*op), errno);
                assert_ne!((cause, remedy), unexplained, "{} {errno:?}", op.name());
                assert!(!cause.ends_with('.') && remedy.ends_with('.'), "{} {errno:?}: {cause} / {remedy}", op.name());
            }
        }
    }

    #[test]
    fn a_refusal_says_what_was_tried_on_what_and_what_the_kernel_said() {
        let error = Error::from(
            Refused::new(SystemCall::Svm(Op::MemMap), Errno::EADDRINUSE)
                .operation("map physical memory")
                .object("handle 7 of device 1")
                .arguments("address 0x12c000000000, size 2 MiB")
                .kernel_log("first\nsecond\n".to_owned()),
        );
        let text = error.to_string();
        for part in [
            "cannot map physical memory (handle 7 of device 1)",
            "MEM_MAP {address 0x12c000000000, size 2 MiB}",
            "EADDRINUSE",
            "\"first / second\"",
            "drvError 17 IOCRL_FAIL, aclError 507899",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert_eq!(error.errno(), Some(Errno::EADDRINUSE));
        assert_eq!(error.kernel_log(), Some("first\nsecond\n"));
    }

    #[test]
    fn out_of_memory_names_the_page_kind_that_would_fit() {
        let error = OutOfMemory {
            place: "device 0, HBM".to_owned(),
            asked: 2 << 30,
            page: Page::Giant,
            free_huge: Some(3 << 30),
            free_giant: Some(1 << 30),
            kernel_log: String::new(),
        };
        assert_eq!(error.page_that_fits(), Some(Page::Huge));
        let text = error.to_string();
        assert!(text.contains("2 GiB were asked for in pages of 1 GiB"), "{text}");
        assert!(text.contains("It would fit in pages of 2 MiB"), "{text}");
        assert!(text.contains("aclError 207001"), "{text}");
    }

    #[test]
    fn vendor_codes_are_those_of_the_vendors_tables() {
        assert_eq!(VendorCode::of(Errno::EACCES), VendorCode { driver: 17, driver_name: "IOCRL_FAIL", acl: 507_899 });
        assert_eq!(VendorCode::of(Errno::EOPNOTSUPP).driver, 0xfffe);
        assert_eq!(VendorCode::of(Errno::EFAULT).acl, 107_017);
        assert_eq!(VendorCode::of(Errno::ETIMEDOUT).acl, 507_012);
        assert_eq!(Invalid::because("x", "y", "z").vendor_code(), Some(VendorCode::INVALID_VALUE));
    }
}
