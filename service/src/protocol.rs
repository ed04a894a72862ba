//! What clients and the service say to each other.
//!
//! A frame is its length as four bytes, least significant first, and then a MessagePack map with
//! one key: the name of the message. Its fields are a map with names. At most [`FRAME_MAX`] bytes;
//! a longer frame ends the connection before anything of it is read.
//!
//! A client sends a request and reads answers until one is not [`Answer::Waiting`]. Between two
//! requests the service may send [`Answer::Reclaim`], and nothing else.

use crate::entries::Entries;
use crate::layout::{Allocation, PageSize};
use crate::name::DomainName;
use serde::{Deserialize, Serialize};

/// The version of this protocol. A service refuses others by name.
pub const VERSION: u32 = 1;
/// Most bytes of a frame.
pub const FRAME_MAX: usize = 8 << 20;
/// Entries and allocations in one answer are at most so many.
pub const PAGE_MAX: usize = 4096;

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The first message of every connection.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The process as the driver's trust lists know it (`aclrtDeviceGetBareTgid`).
        process: i32,
        /// A name for people: the program, the rank.
        #[serde(default)]
        program: String,
    },
    /// Takes a role in a domain. The connection keeps it until it ends.
    Open {
        /// The domain.
        domain: DomainName,
        /// What for.
        mode: Mode,
        /// The NPU on which the client will map the memory, by its physical id.
        device: u32,
        /// The name of that NPU that is the same in every container, such as `c1:00.0/4`; empty
        /// if the client does not know it.
        #[serde(default)]
        identity: String,
        /// How long to wait for it.
        wait_ms: u64,
        /// A reader that stays while a writer changes the memory in place.
        #[serde(default)]
        allow_update: bool,
        /// A writer that gives memory back when it is asked to.
        #[serde(default)]
        lends: bool,
        /// 16 random bytes for [`Request::Resume`]; without them the service chooses. A client
        /// whose connection breaks before the answer comes can find out whether it got the role.
        #[serde(default, with = "serde_bytes")]
        token: Vec<u8>,
    },
    /// Ends the role; the connection stays. A connection that just ends does the same, but a client
    /// that wants to be sure, whichever front serves it, waits for the answer to this.
    Close {},
    /// Takes back the role of a connection that ended because the service was replaced.
    Resume {
        /// From [`Answer::Opened`] or [`Request::Open`].
        #[serde(with = "serde_bytes")]
        token: Vec<u8>,
    },
    /// New memory for a writer.
    Allocate {
        /// Bytes, a multiple of the page size.
        size: u64,
        /// Size of its pages.
        #[serde(default)]
        page: PageSize,
        /// A word of the writer's.
        #[serde(default)]
        tag: String,
        /// How long to wait while there is not enough memory.
        wait_ms: u64,
        /// The number that it had in a snapshot. It gets that number if it is free and greater
        /// than those that the writer has, and another one otherwise.
        #[serde(default)]
        id: Option<u64>,
    },
    /// Gives memory of an uncommitted layout back.
    Free {
        /// Which.
        allocations: Vec<u64>,
    },
    /// Names bytes of the memory. Several such requests may precede a commit.
    Put {
        /// Key and place.
        entries: Entries,
    },
    /// Before the first write of a writer in place: from now on the domain is dirty.
    Begin {},
    /// Publishes what was allocated and put. The writer becomes a reader of it.
    Commit {},
    /// Allocations of the role's layout, in their order.
    Allocations {
        /// How many to leave out.
        from: u64,
    },
    /// Entries of the version that is read or updated, in the order of their keys.
    Entries {
        /// Only keys behind this one.
        after: Option<String>,
    },
    /// Lets this process import memory of its role's layout.
    Shares {
        /// Which; at most [`PAGE_MAX`]. None: the first [`PAGE_MAX`] of the layout.
        allocations: Vec<u64>,
    },
    /// A reader is about to unmap the memory and give its import back, and keeps its role. It is
    /// answered when the owner of the memory has answered: memory that everybody has put to sleep
    /// is held by the owner alone.
    Sleep {},
    /// A reader that slept is about to import again; waits for a writer in place.
    Wake {
        /// How long.
        wait_ms: u64,
    },
    /// Waits until a newer version than this is committed.
    Wait {
        /// 0: any version.
        newer_than: u64,
        /// The domain; may be left out by a connection that has a role.
        domain: Option<DomainName>,
        /// How long.
        wait_ms: u64,
    },
    /// The answer to [`Answer::Reclaim`], after what is given back was freed.
    Gave {
        /// From [`Answer::Reclaim`].
        reclaim: u64,
    },
    /// Removes what a domain has committed. Refused while anybody reads or writes it.
    Remove {
        /// The domain.
        domain: DomainName,
    },
    /// Whether the service and the owner of the memory live.
    Ping {},
    /// What the service holds, and for whom.
    Status {},
    /// What happened.
    Events {
        /// Only events with a greater number.
        after: u64,
    },
    /// Hands everything over to this process, which is a newer service.
    Replace {
        /// The newest version of the service's own state that it can read.
        #[serde(default)]
        state: u32,
        /// The version of the keeper's packets that it speaks.
        #[serde(default)]
        link: u32,
    },
}

/// What a role may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Read the committed layout; waits for one.
    Read,
    /// Write a new layout in new memory. What is committed is served until the commit.
    Write,
    /// Write if nothing is committed and nobody writes; otherwise wait, and read.
    WriteOrRead,
    /// Give up what is committed, then write. Waits until nobody reads it.
    Discard,
    /// Change the committed layout in place. Waits until nobody reads it but those who allow it.
    Update,
}

impl Mode {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Read => "read",
            Mode::Write => "write",
            Mode::WriteOrRead => "write-or-read",
            Mode::Discard => "discard",
            Mode::Update => "update",
        }
    }
}

/// What the service answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// To [`Request::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// A number of this life of the service: memory of another one is gone.
        instance: u64,
    },
    /// To [`Request::Open`], [`Request::Resume`] and [`Request::Wake`].
    Opened {
        /// True for a writer.
        writes: bool,
        /// The version that is read or updated; 0 for a writer of a new layout.
        version: u64,
        /// Its hash; of a new layout zeroes.
        #[serde(with = "serde_bytes")]
        hash: Vec<u8>,
        /// How many allocations there are.
        allocations: u64,
        /// How many entries there are.
        entries: u64,
        /// Bytes of all allocations.
        bytes: u64,
        /// For [`Request::Resume`].
        #[serde(with = "serde_bytes")]
        token: Vec<u8>,
    },
    /// The request is not forgotten: another answer follows. Sent again when something changes.
    Waiting(Waiting),
    /// To [`Request::Allocate`].
    Allocated {
        /// The new allocation.
        allocation: Allocation,
    },
    /// To requests that ask for nothing.
    Done {},
    /// To [`Request::Commit`].
    Committed {
        /// The new version.
        version: u64,
        /// Its hash.
        #[serde(with = "serde_bytes")]
        hash: Vec<u8>,
    },
    /// To [`Request::Allocations`].
    Allocations {
        /// At most [`PAGE_MAX`]; none if there are no more.
        allocations: Vec<Allocation>,
    },
    /// To [`Request::Entries`].
    Entries {
        /// Some; none if there are no more.
        entries: Entries,
    },
    /// To [`Request::Shares`].
    Shares {
        /// One for each, in the order of the request.
        shares: Vec<Share>,
    },
    /// To [`Request::Wait`].
    Version {
        /// The committed version.
        version: u64,
        /// Its hash.
        #[serde(with = "serde_bytes")]
        hash: Vec<u8>,
    },
    /// Somebody waits for memory: please free some, then answer [`Request::Gave`].
    Reclaim {
        /// Its number.
        reclaim: u64,
        /// How much is missing.
        bytes: u64,
        /// When the service stops waiting for it.
        within_ms: u64,
    },
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Events`].
    Events {
        /// Oldest first.
        events: Vec<Event>,
    },
    /// To [`Request::Replace`]; the descriptors come with it.
    Replaced {},
    /// The request failed, and changed nothing.
    Error(ServiceError),
}

/// What a request waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// As a sentence.
    pub reason: String,
    /// How many are served before.
    #[serde(default)]
    pub before: u64,
    /// Bytes that were asked for; 0 if it is not memory.
    #[serde(default)]
    pub wanted: u64,
    /// Bytes that are free on the NPU.
    #[serde(default)]
    pub free: u64,
}

/// How a process imports an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The allocation.
    pub allocation: u64,
    /// What `aclrtMemImportFromShareableHandle` takes.
    pub handle: u64,
    /// What `ascend_vmm::share::import` takes, as bytes.
    #[serde(with = "serde_bytes")]
    pub ticket: Vec<u8>,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{problem}; {remedy}")]
pub struct ServiceError {
    /// For programs.
    pub code: Code,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

/// What kind of error it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Code {
    /// The message is not one of this protocol, or comes at the wrong time.
    Protocol,
    /// A field breaks a rule.
    Invalid,
    /// The configuration does not allow it.
    Forbidden,
    /// A quota would be exceeded.
    Quota,
    /// The time is over.
    Timeout,
    /// There is not enough memory.
    OutOfMemory,
    /// Nothing is committed.
    Empty,
    /// A writer died while it changed the memory in place.
    Dirty,
    /// Others use it.
    Busy,
    /// The memory is on another NPU.
    OtherDevice,
    /// The role is not known to this service: it was started anew.
    Unknown,
    /// The owner of the memory is gone.
    KeeperGone,
    /// The driver refused something.
    Driver,
    /// The driver's list of processes that may import the memory is used up.
    ListFull,
    /// One that this version does not know.
    #[serde(other)]
    Other,
}

/// What the service holds, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Status {
    /// Process of the keeper.
    pub keeper: i32,
    /// Process of the front.
    pub front: i32,
    /// By logical id.
    pub devices: Vec<DeviceStatus>,
    /// By name.
    pub domains: Vec<DomainStatus>,
    /// Every connection that has said hello.
    pub clients: Vec<ClientStatus>,
}

/// Memory of an NPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct DeviceStatus {
    /// Logical id of the service's process.
    pub logical: u32,
    /// Physical id.
    pub physical: u32,
    /// The name that is the same in every container.
    pub identity: String,
    /// Bytes.
    pub total: u64,
    /// Bytes, when it was looked last.
    pub free: u64,
    /// Bytes that this service holds.
    pub held: u64,
    /// Why it does not answer, as a sentence; empty if it does.
    #[serde(default)]
    pub problem: String,
}

/// A domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// Its name.
    pub name: DomainName,
    /// Physical id of its NPU.
    pub device: u32,
    /// `empty`, `writing`, `committed` or `dirty`.
    pub state: String,
    /// The committed version; 0 if there is none.
    pub version: u64,
    /// Bytes of the committed layout.
    pub bytes: u64,
    /// Allocations of the committed layout.
    pub allocations: u64,
    /// Bytes that its writer has allocated and not committed.
    pub uncommitted: u64,
    /// Bytes of older versions that are still read.
    pub superseded: u64,
    /// How many read it.
    pub readers: u64,
    /// How many wait for it.
    pub waiting: u64,
    /// Seconds since the last commit.
    pub age: u64,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its process in the service's pid namespace; 0 if that cannot be known.
    pub pid: i32,
    /// Its process for the driver.
    pub process: i32,
    /// Its user.
    pub user: u32,
    /// What it calls itself.
    pub program: String,
    /// The domain in which it has or wants a role.
    pub domain: Option<DomainName>,
    /// `reader`, `writer`, `updater`, `waiting` or `none`.
    pub role: String,
    /// Bytes of its layout.
    pub bytes: u64,
    /// Seconds since it connected.
    pub age: u64,
    /// The first characters of its container's id, if it has one.
    pub container: String,
    /// What it waits for, as a sentence; empty if it does not wait.
    #[serde(default)]
    pub waits: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts up.
    pub number: u64,
    /// Seconds since 1970.
    pub time: u64,
    /// The domain, if it is about one.
    pub domain: Option<DomainName>,
    /// A sentence with the reason.
    pub text: String,
}

/// Writes a message with its length.
///
/// # Errors
///
/// [`Code::Invalid`] if it is longer than [`FRAME_MAX`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, ServiceError> {
    let mut frame = vec![0; 4];
    let written = rmp_serde::encode::write_named(&mut frame, message);
    let length = frame.len() - 4;
    if written.is_err() || length > FRAME_MAX {
        return Err(ServiceError {
            code: Code::Invalid,
            problem: format!("the message has {length} bytes, and {FRAME_MAX} are allowed"),
            remedy: "send less at once".into(),
        });
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// The next whole frame of what has arrived: its length with the four bytes before it, and its
/// message. `None` if more has to arrive.
///
/// # Errors
///
/// A length that is not allowed, or bytes that are no message.
pub fn decode<'a, T: Deserialize<'a>>(arrived: &'a [u8]) -> Result<Option<(usize, T)>, ServiceError> {
    let Some((length, rest)) = arrived.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > FRAME_MAX {
        return Err(ServiceError {
            code: Code::Protocol,
            problem: format!("a frame of {length} bytes, and {FRAME_MAX} are allowed"),
            remedy: "a frame begins with its length in four bytes, least significant first".into(),
        });
    }
    let Some(message) = rest.get(..length) else { return Ok(None) };
    let mut reader = rmp_serde::Deserializer::from_read_ref(message);
    match T::deserialize(&mut reader) {
        Ok(message) => Ok(Some((4 + length, message))),
        Err(error) => Err(ServiceError {
            code: Code::Protocol,
            problem: format!("the message is not understood: {error}"),
            remedy: "docs/service.md has the messages of this version".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Entry;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let open = Request::Open {
            domain: "llama/tp0".parse().unwrap(),
            mode: Mode::WriteOrRead,
            device: 3,
            identity: "c1:00.0/3".into(),
            wait_ms: u64::MAX,
            allow_update: true,
            lends: false,
            token: vec![2; 16],
        };
        let put = Request::Put {
            entries: [("k".into(), Entry { allocation: 1, offset: 2, size: 3, value: vec![0, 255] })]
                .into_iter()
                .collect(),
        };
        for request in [open, put, Request::Commit {}, Request::Resume { token: vec![1; 16] }] {
            let frame = encode(&request).unwrap();
            assert_eq!(decode(&frame), Ok(Some((frame.len(), request))));
        }
    }

    #[test]
    fn the_frames_in_the_documentation_are_what_is_sent() {
        // Read now: the page is not in the package.
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/service.md");
        let documentation = std::fs::read_to_string(page).unwrap();
        let block = documentation.split("```text\n").find(|block| block.starts_with("hello ")).unwrap();
        let mut frames: Vec<(String, Vec<u8>)> = Vec::new();
        for line in block.split("```").next().unwrap().lines() {
            let (name, bytes) = line.split_at(6);
            if !name.trim().is_empty() {
                frames.push((name.trim().to_owned(), Vec::new()));
            }
            let bytes = bytes.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
            frames.last_mut().unwrap().1.extend(bytes);
        }
        let hello = Request::Hello { version: 1, process: 4711, program: "engine".into() };
        let expected = [
            ("hello".to_owned(), encode(&hello).unwrap()),
            ("wake".to_owned(), encode(&Request::Wake { wait_ms: 1000 }).unwrap()),
            ("done".to_owned(), encode(&Answer::Done {}).unwrap()),
        ];
        assert_eq!(frames, expected);
    }

    #[test]
    fn fields_that_may_be_left_out_have_a_default() {
        #[derive(Serialize)]
        #[serde(rename_all = "snake_case")]
        enum Short {
            Hello { version: u32, process: i32 },
        }
        let frame = encode(&Short::Hello { version: 1, process: 2 }).unwrap();
        let hello = Request::Hello { version: 1, process: 2, program: String::new() };
        assert_eq!(decode(&frame), Ok(Some((frame.len(), hello))));
    }

    #[test]
    fn nothing_that_arrives_makes_it_panic_or_take_more_memory_than_arrived() {
        assert_eq!(decode::<Request>(&[]), Ok(None));
        assert_eq!(decode::<Request>(&[1, 0, 0]), Ok(None));
        assert_eq!(decode::<Request>(&[255, 0, 0, 0, 1]), Ok(None));
        assert_eq!(decode::<Request>(&[255; 8]).unwrap_err().code, Code::Protocol);
        // A map, an array and bytes that claim four gigabytes.
        for claim in [0xDF, 0xDD, 0xC6] {
            let body = [0x81, 0xA3, b'p', b'u', b't', claim, 255, 255, 255, 255];
            let mut frame = (body.len() as u32).to_le_bytes().to_vec();
            frame.extend(body);
            assert_eq!(decode::<Request>(&frame).unwrap_err().code, Code::Protocol);
        }
        let good = encode(&Request::Wait { newer_than: 7, domain: None, wait_ms: 1 }).unwrap();
        for at in 4..good.len() {
            for byte in 0..=255 {
                let mut bad = good.clone();
                bad[at] = byte;
                let _ = decode::<Request>(&bad);
            }
        }
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_overflow_of_the_stack() {
        let mut frame = (100_000u32).to_le_bytes().to_vec();
        frame.extend([0x91; 100_000]);
        assert_eq!(decode::<Request>(&frame).unwrap_err().code, Code::Protocol);
    }
}
