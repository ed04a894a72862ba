//! What a front must know after it was killed: a log in a memory file that the keeper holds.
//!
//! Records are appended before the client hears of them. A record is its length, a checksum and a
//! MessagePack body; a front that dies in the middle of one leaves a torn end, which the next front
//! ignores. When most of the log is history it is written anew, and the keeper gets the new file.

use crate::entries::Keys;
use crate::layout::Allocation;
use crate::name::DomainName;
use crate::protocol::{Event, Mode};
use serde::{Deserialize, Serialize, Serializer};
use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use twox_hash::XxHash3_64;

/// A role's name for the client that has it: 16 random bytes.
pub(crate) type Token = [u8; 16];

/// One step of the service's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// The number of this life of the service, and where its counters are at least.
    Instance { number: u64, last_version: u64, last_id: u64 },
    /// A client has a role.
    Role(RoleRecord),
    /// A role is over.
    RoleEnded { token: Token },
    /// A writer got memory.
    Allocated { token: Token, allocation: Allocation, user: u32 },
    /// All memory that a writer has. Its entries are not written down.
    Drafted {
        token: Token,
        #[serde(serialize_with = "without_names")]
        allocations: Rc<Vec<Allocation>>,
    },
    /// A writer gave memory back.
    Freed { id: u64 },
    /// A layout is served. If a writer committed it just now, that reads it from then on.
    Committed {
        domain: DomainName,
        writer: Option<Token>,
        version: u64,
        device: u32,
        /// Who pays for the memory.
        user: u32,
        time: u64,
        hash: [u8; 16],
        #[serde(serialize_with = "without_names")]
        allocations: Rc<Vec<Allocation>>,
        /// Their length; their bytes follow the record.
        keys: Rc<Keys>,
    },
    /// What is served is being changed in place.
    Dirty { domain: DomainName },
    /// A version is gone.
    Removed { domain: DomainName, version: u64 },
    /// Processes that were put on the driver's lists for a version.
    Listed { version: u64, processes: Vec<i32> },
    /// What happened, for people.
    Event(Event),
}

/// Who has which role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoleRecord {
    pub(crate) token: Token,
    pub(crate) domain: DomainName,
    pub(crate) device: u32,
    pub(crate) mode: Mode,
    /// The version that is read or updated; 0 for a new layout.
    pub(crate) version: u64,
    pub(crate) allow_update: bool,
    pub(crate) lends: bool,
    /// A writer in place that may have written.
    pub(crate) began: bool,
    /// A reader that has given its import back.
    #[serde(default)]
    pub(crate) asleep: bool,
    pub(crate) process: i32,
    pub(crate) user: u32,
    /// The process in the service's pid namespace, 0 if it has no number there.
    #[serde(default)]
    pub(crate) pid: i32,
    /// When that process started, in the kernel's clock ticks.
    #[serde(default)]
    pub(crate) start: u64,
}

/// Written as arrays: the names of the fields would be more than the fields.
fn without_names<S: Serializer>(allocations: &Rc<Vec<Allocation>>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(allocations.iter().map(|it| (it.id, it.size, it.page, &it.tag)))
}

/// The file, and how much of it is written.
#[derive(Debug)]
pub(crate) struct Journal {
    file: Rc<File>,
    end: u64,
}

const HEAD: usize = 12;

/// The version of the records. A front reads its own version, and those before it that were
/// released: none yet. A record that cannot be understood by older fronts needs a new one. New
/// fields with a default do not.
pub(crate) const STATE: u32 = 4;
/// How a journal begins, before its version.
const MAGIC: [u8; 4] = *b"AVMJ";
/// Bytes of the magic and the version.
const START: usize = 8;

impl Journal {
    /// An empty one.
    pub(crate) fn create() -> io::Result<Journal> {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = nix::sys::memfd::memfd_create("ascend-vmm-journal", flags)?;
        let file = File::from(file);
        file.write_all_at(&[MAGIC, STATE.to_le_bytes()].concat(), 0)?;
        Ok(Journal { file: Rc::new(file), end: START as u64 })
    }

    /// One that another front wrote: all whole records, and the journal behind them.
    ///
    /// # Errors
    ///
    /// `InvalidData` for a journal of another version.
    pub(crate) fn read(file: File) -> io::Result<(Journal, Vec<Record>)> {
        let bad = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
        let mut bytes = vec![0; file.metadata()?.len() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let version = match bytes.first_chunk::<START>() {
            Some(start) if start[..4] == MAGIC => u32::from_le_bytes([start[4], start[5], start[6], start[7]]),
            _ => return Err(bad("the state of the service does not begin as such a state does".into())),
        };
        if version != STATE {
            return Err(bad(format!("the state of the service has version {version}, and this program reads {STATE}")));
        }
        let mut journal = Journal { file: Rc::new(file), end: START as u64 };
        let mut records = Vec::new();
        while let Some(body) = next(&bytes[journal.end as usize..]) {
            let record = rmp_serde::from_slice(body);
            let mut record =
                record.map_err(|error| bad(format!("the state of the service is not understood: {error}")))?;
            if let Record::Committed { keys, .. } = &mut record {
                let begins = body.len().checked_sub(keys.length());
                let read = begins.and_then(|begins| Keys::from_bytes(&body[begins..]));
                *keys = Rc::new(read.ok_or_else(|| bad("keys in the state of the service are not whole".into()))?);
            }
            journal.end += (HEAD + body.len()) as u64;
            journal.holds(&record);
            records.push(record);
        }
        Ok((journal, records))
    }

    /// Appends a record.
    pub(crate) fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut bytes = vec![0; HEAD];
        rmp_serde::encode::write_named(&mut bytes, record).map_err(io::Error::other)?;
        let mut checksum = XxHash3_64::new();
        checksum.write(&bytes[HEAD..]);
        let mut end = self.end + bytes.len() as u64;
        if let Record::Committed { keys, .. } = record {
            let mut written = Ok(());
            keys.each_part(|part| {
                checksum.write(part);
                written = std::mem::replace(&mut written, Ok(())).and_then(|()| self.file.write_all_at(part, end));
                end += part.len() as u64;
            })?;
            written?;
        }
        let length = (end - self.end) as u32 - HEAD as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..HEAD].copy_from_slice(&checksum.finish().to_le_bytes());
        self.file.write_all_at(&bytes, self.end)?;
        self.end = end;
        self.holds(record);
        Ok(())
    }

    /// The keys of the last record are read from the file from now on.
    fn holds(&self, record: &Record) {
        if let Record::Committed { keys, .. } = record {
            keys.moved_to(&self.file, self.end - keys.length() as u64);
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.end
    }
}

/// The first record of some bytes; `None` if it is not whole.
fn next(bytes: &[u8]) -> Option<&[u8]> {
    let length = u32::from_le_bytes(*bytes.first_chunk()?) as usize;
    let body = bytes.get(HEAD..HEAD.checked_add(length)?)?;
    (length > 0 && XxHash3_64::oneshot(body).to_le_bytes() == bytes[4..HEAD]).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let domain: DomainName = "a/b".parse().unwrap();
        vec![
            Record::Instance { number: 7, last_version: 1, last_id: 2 },
            Record::Dirty { domain: domain.clone() },
            Record::Freed { id: 3 },
            Record::Removed { domain, version: u64::MAX },
        ]
    }

    #[test]
    fn what_was_appended_is_read_again_and_goes_on() {
        let mut journal = Journal::create().unwrap();
        for record in &records() {
            journal.append(record).unwrap();
        }
        let (mut again, read) = Journal::read(journal.file().try_clone().unwrap()).unwrap();
        assert_eq!(read, records());
        again.append(&Record::Freed { id: 8 }).unwrap();
        let (_, read) = Journal::read(again.file().try_clone().unwrap()).unwrap();
        assert_eq!(read.len(), 5);
    }

    #[test]
    fn a_state_of_a_newer_version_is_refused_and_left_as_it_is() {
        let mut journal = Journal::create().unwrap();
        journal.append(&Record::Freed { id: 8 }).unwrap();
        journal.file().write_all_at(&(STATE + 1).to_le_bytes(), 4).unwrap();
        let refused = Journal::read(journal.file().try_clone().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("has version 5, and this program reads 4"), "{refused}");
        journal.file().write_all_at(b"else", 0).unwrap();
        assert!(Journal::read(journal.file().try_clone().unwrap()).is_err());
        let empty = nix::sys::memfd::memfd_create("empty", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        assert!(Journal::read(empty.into()).is_err());
    }

    #[test]
    fn a_record_of_a_later_front_may_have_more_fields_and_one_of_an_earlier_front_fewer() {
        #[derive(Serialize)]
        enum Later {
            Freed { id: u64, reason: String },
        }
        #[derive(Serialize)]
        struct RoleThen {
            token: Token,
            domain: &'static str,
            device: u32,
            mode: Mode,
            version: u64,
            allow_update: bool,
            lends: bool,
            began: bool,
            process: i32,
            user: u32,
        }
        let later = rmp_serde::to_vec_named(&Later::Freed { id: 8, reason: "why".into() }).unwrap();
        assert_eq!(rmp_serde::from_slice::<Record>(&later).unwrap(), Record::Freed { id: 8 });
        let then = RoleThen {
            token: [1; 16],
            domain: "a",
            device: 0,
            mode: Mode::Read,
            version: 1,
            allow_update: false,
            lends: false,
            began: false,
            process: 1,
            user: 0,
        };
        let role: RoleRecord = rmp_serde::from_slice(&rmp_serde::to_vec_named(&then).unwrap()).unwrap();
        assert!(!role.asleep);
    }

    #[test]
    fn a_torn_end_is_ignored_wherever_it_is_torn() {
        let mut journal = Journal::create().unwrap();
        let mut ends = vec![START as u64];
        for record in &records() {
            journal.append(record).unwrap();
            ends.push(journal.length());
        }
        let mut bytes = vec![0; journal.length() as usize];
        journal.file().read_exact_at(&mut bytes, 0).unwrap();
        for cut in START..bytes.len() {
            let torn = Journal::create().unwrap();
            torn.file().write_all_at(&bytes[..cut], 0).unwrap();
            // What follows may be anything.
            torn.file().write_all_at(&[0xAA; 40], cut as u64).unwrap();
            let (mut torn, read) = Journal::read(torn.file.try_clone().unwrap()).unwrap();
            let whole = ends.iter().filter(|&&end| end <= cut as u64).count() - 1;
            assert_eq!(read, records()[..whole], "cut at {cut}");
            torn.append(&Record::Freed { id: 9 }).unwrap();
            let (_, read) = Journal::read(torn.file.try_clone().unwrap()).unwrap();
            assert_eq!(read.last(), Some(&Record::Freed { id: 9 }));
        }
    }
}
