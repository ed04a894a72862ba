//! What a front must know after it was killed: a log in a memory file that the keeper holds.
//!
//! Records are appended before the client hears of them. A record is its length, a checksum and a
//! MessagePack body; a front that dies in the middle of one leaves a torn end, which the next front
//! ignores. When most of the log is history it is written anew, and the keeper gets the new file.

use crate::layout::{Allocation, Layout};
use crate::name::DomainName;
use crate::protocol::Mode;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

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
    /// A writer gave memory back.
    Freed { id: u64 },
    /// A layout is served. If a writer committed it just now, that reads it from then on.
    Committed {
        domain: DomainName,
        writer: Option<Token>,
        version: u64,
        device: u32,
        layout: Rc<Layout>,
        /// Who pays for the allocations.
        users: Vec<u32>,
        time: u64,
    },
    /// What is served is being changed in place.
    Dirty { domain: DomainName },
    /// A version is gone.
    Removed { domain: DomainName, version: u64 },
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
    pub(crate) process: i32,
    pub(crate) user: u32,
}

/// The file, and how much of it is written.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    end: u64,
}

const HEAD: usize = 12;

impl Journal {
    /// An empty one.
    pub(crate) fn create() -> io::Result<Journal> {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = nix::sys::memfd::memfd_create("ascend-vmm-journal", flags)?;
        Ok(Journal { file: file.into(), end: 0 })
    }

    /// One that another front wrote: all whole records, and the journal behind them.
    pub(crate) fn read(file: File) -> io::Result<(Journal, Vec<Record>)> {
        let mut bytes = vec![0; file.metadata()?.len() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (mut records, mut end) = (Vec::new(), 0);
        while let Some((length, record)) = next(&bytes[end..]) {
            records.push(record);
            end += length;
        }
        Ok((Journal { file, end: end as u64 }, records))
    }

    /// Appends a record.
    pub(crate) fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut bytes = vec![0; HEAD];
        rmp_serde::encode::write(&mut bytes, record).map_err(io::Error::other)?;
        let length = (bytes.len() - HEAD) as u32;
        let checksum = checksum(&bytes[HEAD..]);
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..HEAD].copy_from_slice(&checksum);
        self.file.write_all_at(&bytes, self.end)?;
        self.end += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.end
    }
}

fn checksum(body: &[u8]) -> [u8; 8] {
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(body)[..8]);
    first
}

/// The first record of some bytes, with its length; `None` if it is not whole.
fn next(bytes: &[u8]) -> Option<(usize, Record)> {
    let length = u32::from_le_bytes(*bytes.first_chunk()?) as usize;
    let body = bytes.get(HEAD..HEAD.checked_add(length)?)?;
    if length == 0 || checksum(body) != bytes[4..HEAD] {
        return None;
    }
    Some((HEAD + length, rmp_serde::from_slice(body).ok()?))
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
    fn a_torn_end_is_ignored_wherever_it_is_torn() {
        let mut journal = Journal::create().unwrap();
        let mut ends = vec![0];
        for record in &records() {
            journal.append(record).unwrap();
            ends.push(journal.length());
        }
        let mut bytes = vec![0; journal.length() as usize];
        journal.file().read_exact_at(&mut bytes, 0).unwrap();
        for cut in 0..bytes.len() {
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
