//! What went wrong: the service's sentence, or that of the vendor's library.

use ascend_vmm_service::protocol::Code;
use ascend_vmm_service::{DomainName, Error as ServiceFault};

/// The result of calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The service refused, or cannot be reached.
    #[error(transparent)]
    Service(#[from] ServiceFault),
    /// There is no vendor library.
    #[error(
        "libascendcl.so cannot be loaded: {0}; run this in a process with CANN, or put its directory into \
         LD_LIBRARY_PATH"
    )]
    NoLibrary(String),
    /// The vendor's library lacks a function.
    #[error("{library} has no {function}, which importing memory needs; use a CANN that has it")]
    NoFunction {
        /// The library.
        library: String,
        /// The function.
        function: &'static str,
    },
    /// The calling thread has no device.
    #[error(
        "no device is set in this thread ({function}: {code}); set it first, by aclrtSetDevice or torch.npu.set_device"
    )]
    NoDevice {
        /// What was called.
        function: &'static str,
        /// What it returned.
        code: i32,
    },
    /// The calling thread has another device than the memory.
    #[error("{domain} is mapped on device {device}, and this thread has device {current}; set device {device} first")]
    OtherDevice {
        /// The domain.
        domain: DomainName,
        /// Its device.
        device: i32,
        /// The thread's.
        current: i32,
    },
    /// A function of the vendor's library failed.
    #[error("{function} returned {code} for {object}{}; {}", in_brackets(.said), remedy_of(*.code))]
    Refused {
        /// The function.
        function: &'static str,
        /// What for.
        object: String,
        /// The vendor's code.
        code: i32,
        /// What `aclGetRecentErrMsg` says.
        said: String,
    },
    /// What is served is not what was mapped before.
    #[error(
        "version {now} of {domain} has another layout than version {before}, which was put to sleep: {difference}; \
         open it again, and bind what it has"
    )]
    Stale {
        /// The domain.
        domain: DomainName,
        /// The version that was asleep.
        before: u64,
        /// The version that is served.
        now: u64,
        /// The first thing that differs.
        difference: String,
    },
    /// The call does not fit.
    #[error("{problem}; {remedy}")]
    Invalid {
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
}

fn in_brackets(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

fn remedy_of(code: i32) -> &'static str {
    match code {
        107_002 => "set a device in this thread first, by aclrtSetDevice or torch.npu.set_device",
        207_001 => "free device memory",
        _ => "does the service own this NPU, and was this process alive when it asked for the memory?",
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal;)*) => {
        /// What kind of error it is. The numbers are those of the C header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(i32)]
        #[non_exhaustive]
        pub enum Kind { $($(#[$doc])* $variant = $number,)* }

        impl Kind {
            /// The name in Python, and in the service's messages.
            pub fn name(self) -> &'static str {
                match self { $(Kind::$variant => $name,)* }
            }
        }
    };
}

kinds! {
    /// An argument or a call that does not fit.
    Invalid = 1, "invalid";
    /// There is no service at the socket.
    Unreachable = 2, "unreachable";
    /// The other side is no service of this version.
    Protocol = 3, "protocol";
    /// The configuration does not allow it.
    Forbidden = 4, "forbidden";
    /// A quota would be exceeded.
    Quota = 5, "quota";
    /// The time is over.
    Timeout = 6, "timeout";
    /// There is not enough memory.
    OutOfMemory = 7, "out-of-memory";
    /// Nothing is committed.
    Empty = 8, "empty";
    /// A writer died while it changed the memory in place.
    Dirty = 9, "dirty";
    /// Others use it.
    Busy = 10, "busy";
    /// The memory is on another NPU, or the thread has another one.
    OtherDevice = 11, "other-device";
    /// The service was started anew, and does not know the role.
    Unknown = 12, "unknown";
    /// The owner of the memory is gone.
    KeeperGone = 13, "keeper-gone";
    /// The driver refused something of the service.
    Driver = 14, "driver";
    /// The driver's list of processes is full.
    ListFull = 15, "list-full";
    /// What is served is not what was mapped before.
    Stale = 16, "stale";
    /// There is no such key.
    NoKey = 17, "no-key";
    /// The memory is not mapped.
    Asleep = 18, "asleep";
    /// It belongs to the parent of this process.
    Forked = 19, "forked";
    /// The program gave up.
    Interrupted = 20, "interrupted";
    /// libascendcl.so is not there, or lacks a function.
    Library = 21, "library";
    /// The thread has no device.
    NoDevice = 22, "no-device";
    /// A function of libascendcl.so failed.
    Refused = 23, "refused";
    /// Anything else.
    Other = 24, "other";
}

impl Error {
    /// What kind of error it is.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Service(fault) => kind_of(fault),
            Error::NoLibrary(_) | Error::NoFunction { .. } => Kind::Library,
            Error::NoDevice { .. } | Error::Refused { code: 107_002, .. } => Kind::NoDevice,
            Error::OtherDevice { .. } => Kind::OtherDevice,
            Error::Refused { .. } => Kind::Refused,
            Error::Stale { .. } => Kind::Stale,
            Error::Invalid { .. } => Kind::Invalid,
        }
    }

    /// What is wrong, and what to do, where that is said apart.
    pub fn problem_and_remedy(&self) -> (String, String) {
        match self {
            Error::Service(ServiceFault::Service(error)) => (error.problem.clone(), error.remedy.clone()),
            other => {
                let text = other.to_string();
                match text.rsplit_once("; ") {
                    Some((problem, remedy)) => (problem.to_owned(), remedy.to_owned()),
                    None => (text, remedy_for(self.kind()).to_owned()),
                }
            }
        }
    }
}

/// For errors whose sentence does not say it.
fn remedy_for(kind: Kind) -> &'static str {
    match kind {
        Kind::Unreachable => "start it (ascend-vmm serve), or pass the socket of one that runs",
        Kind::NoKey => "use a key that its writer has put",
        _ => "look at what the service says (ascend-vmm service events)",
    }
}

fn kind_of(fault: &ServiceFault) -> Kind {
    match fault {
        ServiceFault::Service(error) => match error.code {
            Code::Protocol => Kind::Protocol,
            Code::Invalid => Kind::Invalid,
            Code::Forbidden => Kind::Forbidden,
            Code::Quota => Kind::Quota,
            Code::Timeout => Kind::Timeout,
            Code::OutOfMemory => Kind::OutOfMemory,
            Code::Empty => Kind::Empty,
            Code::Dirty => Kind::Dirty,
            Code::Busy => Kind::Busy,
            Code::OtherDevice => Kind::OtherDevice,
            Code::Unknown => Kind::Unknown,
            Code::KeeperGone => Kind::KeeperGone,
            Code::Driver => Kind::Driver,
            Code::ListFull => Kind::ListFull,
            _ => Kind::Other,
        },
        ServiceFault::Unreachable { .. } => Kind::Unreachable,
        ServiceFault::Stale { .. } => Kind::Stale,
        ServiceFault::NoKey { .. } => Kind::NoKey,
        ServiceFault::Forked(_) => Kind::Forked,
        ServiceFault::Interrupted(_) => Kind::Interrupted,
        ServiceFault::Asleep(_) => Kind::Asleep,
        _ => Kind::Other,
    }
}
