//! The file that keeps the contents of a sleeping tag.
//!
//! The file starts with a header and a table of the addresses that its parts were at; the data
//! follows at a multiple of 4 KiB. It is written under a temporary name, synced to the disk and
//! renamed before anything is unmapped, and it never replaces another file. So it survives this
//! process, and another can read it ([`BackupFile`]).

use super::Tag;
use super::file::{Progress, store};
use super::heap::TakenSegments;
use crate::error::{Error, FileFailed, Invalid, Result};
use crate::fork::ForkGuard;
use crate::signals::uninterrupted;
use crate::trace;
use nix::libc;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A part of a [`BackupFile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupPart {
    /// Where it was mapped.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Where it is in the file.
    pub offset: u64,
}

/// The contents of a tag in a file, from this process or one that has ended: see
/// [`Keep::File`](super::Keep::File). [`load`](super::load) reads its parts.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{BackupFile, Keep, PageCache, Pool, Tag};
/// use ascend_vmm::{LogicalId, Session};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let pool = Pool::new(&PageCache::new(&device));
/// let block = pool.allocate(2 << 20, 1, Tag(7))?;
/// let path = std::env::temp_dir().join(format!("ascend-vmm-doc-{}", std::process::id()));
/// pool.sleep(Tag(7), Keep::File(path.clone()), |_| ())?;
///
/// let file = BackupFile::open(&path)?;
/// assert_eq!(file.tag, Tag(7));
/// assert_eq!((file.parts[0].address, file.parts[0].size), (block.address(), 2 << 20));
/// # pool.wake(&[Tag(7)], |_| ())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct BackupFile {
    /// The tag whose contents these are.
    pub tag: Tag,
    /// Its parts, in order of addresses. Adjacent blocks are in one part.
    pub parts: Vec<BackupPart>,
    /// The file, for [`load`](super::load).
    pub file: File,
}

impl BackupFile {
    /// Opens a file and checks that it is complete.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it cannot be read, is not a backup, or is cut off.
    pub fn open(path: impl AsRef<Path>) -> Result<BackupFile> {
        let path = path.as_ref();
        let wrong = |problem: &str| FileFailed::because(OPEN, path, problem, "It cannot be used.");
        let failed = |error: io::Error| FileFailed::call(OPEN, path, &error);
        // O_NONBLOCK: a pipe would wait for a writer.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let metadata = uninterrupted(|| file.metadata()).map_err(failed)?;
        let length = metadata.len();
        if !metadata.is_file() || length < size_of::<Header>() as u64 {
            return Err(wrong("it is not a backup of this library"));
        }
        let mut reader = BufReader::new(&file);
        let mut header = Header::new_zeroed();
        reader.read_exact(header.as_mut_bytes()).map_err(failed)?;
        if header.magic != MAGIC {
            return Err(wrong("it is not a backup of this library"));
        }
        let mut offset = data_start(header.count.get());
        if offset > length {
            return Err(wrong("it is cut off"));
        }
        // Not allocated at once: a sparse file can claim any number of parts.
        let mut parts = Vec::new();
        for _ in 0..header.count.get() {
            let mut row = PartRow::new_zeroed();
            reader.read_exact(row.as_mut_bytes()).map_err(failed)?;
            let (address, size) = (row.address.get(), row.size.get());
            parts.push(BackupPart { address, size, offset });
            let end = offset.checked_add(size).filter(|_| size > 0);
            offset = end.ok_or_else(|| wrong("its sizes are not possible"))?;
        }
        if offset > length {
            return Err(wrong("it is cut off"));
        }
        Ok(BackupFile { tag: Tag(header.tag.get()), parts, file })
    }
}

const OPEN: &str = "open the backup of a tag";
const WRITE: &str = "put a tag to sleep";
const MAGIC: [u8; 8] = *b"AVMSLEEP";

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    magic: [u8; 8],
    tag: U32,
    count: U32,
}

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct PartRow {
    address: U64,
    size: U64,
}

/// Where the data begins, after the header and the rows.
fn data_start(rows: u32) -> u64 {
    (size_of::<Header>() as u64 + u64::from(rows) * size_of::<PartRow>() as u64).next_multiple_of(4096)
}

/// The file of a tag of this process. It stays open, so it can be read even if its name is removed.
/// Dropping it removes the file.
pub(super) struct KeptFile {
    /// A temporary name, until the file is complete.
    path: PathBuf,
    pub(super) file: File,
    /// Where the data begins.
    pub(super) data_start: u64,
    /// In a child of fork the file is the parent's.
    process: ForkGuard,
}

/// How many temporary names are tried.
const PARTIALS: u32 = 1000;

impl KeptFile {
    /// Writes the contents of used ranges into a new file.
    pub(super) fn write(
        path: &Path,
        tag: Tag,
        used: &[Range<u64>],
        taken: &TakenSegments<'_>,
        progress: &mut impl FnMut(Progress),
    ) -> Result<KeptFile> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => exists(path),
            _ => FileFailed::call(WRITE, path, &error),
        };
        let Some(name) = path.file_name() else {
            return Err(FileFailed::because(WRITE, path, "it is not the name of a file", "Give it a name."));
        };
        if uninterrupted(|| path.symlink_metadata()).is_ok() {
            return Err(exists(path));
        }
        let count = u32::try_from(used.len()).map_err(|_| {
            Invalid::because(WRITE, format!("{} parts are too many for a file", used.len()), "Keep it in host memory.")
        })?;
        // The program may change its directory before the tag wakes.
        let place = std::path::absolute(path).map_err(failed)?;
        let mut kept = KeptFile::create(&place, name, data_start(count)).map_err(failed)?;
        let mut head = Header { magic: MAGIC, tag: tag.0.into(), count: count.into() }.as_bytes().to_vec();
        for range in used {
            let row = PartRow { address: range.start.into(), size: (range.end - range.start).into() };
            head.extend_from_slice(row.as_bytes());
        }
        head.resize(kept.data_start as usize, 0);
        kept.file.write_all_at(&head, 0).map_err(failed)?;
        let total = used.iter().map(|range| range.end - range.start).sum();
        let mut done = 0;
        for range in used {
            let report = |part: Progress| progress(Progress { done: done + part.done, total });
            let stored = store(&taken.slice(range)?, &kept.file, kept.data_start + done, report);
            stored.map_err(|error| with_path(error, path))?;
            done += range.end - range.start;
        }
        // The callback may have forked, and its child returned: only the parent names the file.
        kept.process.check()?;
        kept.file.sync_all().map_err(failed)?;
        let impossible = [libc::EPERM, libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP];
        kept.rename(&place).map_err(|error| match error.raw_os_error() {
            Some(errno) if impossible.contains(&errno) => cannot_name(path, &error),
            _ => failed(error),
        })?;
        // The name is on the disk when its directory is.
        let directory = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
        Ok(kept)
    }

    /// Creates the file under a temporary name. Never opens an existing file: that may belong to
    /// another thread or to an ended process with the same id, or link to anything.
    fn create(path: &Path, name: &OsStr, data_start: u64) -> io::Result<KeptFile> {
        // Weights may be secret: only the owner reads them.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let mut number = 0;
        loop {
            let mut partial = name.to_owned();
            partial.push(format!(".partial-{}-{number}", std::process::id()));
            let path = path.with_file_name(partial);
            match options.open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < PARTIALS => number += 1,
                opened => return Ok(KeptFile { path, file: opened?, data_start, process: ForkGuard::new() }),
            }
        }
    }

    /// Gives the file its name, which must not exist. Neither call replaces a file.
    fn rename(&mut self, path: &Path) -> io::Result<()> {
        match rename_new(&self.path, path) {
            Ok(()) => path.clone_into(&mut self.path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            // Some file systems have no such rename. Most of those have links.
            Err(_) => {
                fs::hard_link(&self.path, path)?;
                let partial = std::mem::replace(&mut self.path, path.to_owned());
                if let Err(error) = fs::remove_file(&partial) {
                    trace::warn(format!("{}: {error}", partial.display()), "a temporary name could not be removed");
                }
            }
        }
        Ok(())
    }
}

impl Drop for KeptFile {
    /// Removes the file, if its name still belongs to it.
    fn drop(&mut self) {
        if self.process.in_child() {
            return;
        }
        let same = |one: &fs::Metadata, other: &fs::Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
        let (own, named) = (uninterrupted(|| self.file.metadata()), uninterrupted(|| self.path.symlink_metadata()));
        let (Ok(own), Ok(named)) = (own, named) else { return };
        if same(&own, &named) {
            if let Err(error) = fs::remove_file(&self.path) {
                trace::warn(format!("{}: {error}", self.path.display()), "the file of a tag could not be removed");
            }
        }
    }
}

/// rename(2) that fails if the new name exists. Called by its number: not every C library has it.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let name = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from);
    let (from, to) = (name(from)?, name(to)?);
    let (here, flags) = (libc::AT_FDCWD, libc::RENAME_NOREPLACE);
    // SAFETY: two strings that end with 0, and numbers.
    match unsafe { libc::syscall(libc::SYS_renameat2, here, from.as_ptr(), here, to.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn exists(path: &Path) -> Error {
    FileFailed::because(
        WRITE,
        path,
        "the file exists, and may be the backup of an earlier process",
        "Load it (BackupFile), remove it, or choose another name.",
    )
}

fn cannot_name(path: &Path, error: &io::Error) -> Error {
    FileFailed::because(
        WRITE,
        path,
        format!("its file system has neither hard links nor a rename that replaces nothing ({error})"),
        "Nothing was lost. Use another file system, or keep the contents in host memory.",
    )
}

/// Replaces the temporary name in an error by the name that the caller knows.
fn with_path(error: Error, path: &Path) -> Error {
    match error {
        Error::File(mut failed) => {
            path.clone_into(&mut failed.path);
            Error::File(failed)
        }
        other => other,
    }
}
