//! Copies files into the memory of an NPU, and back.
//!
//! The driver copies from any memory of the process and pins its pages itself. So a file is mapped,
//! and the device reads the page cache of Linux: nothing is copied on the host, and the disk reads
//! one chunk while the device copies the one before. No CPU touches the mapped bytes: if another
//! process truncates the file, a CPU would get SIGBUS, but the driver returns EFAULT. Host memory,
//! which a CPU copies, and files that cannot be mapped go through buffers and read(2).
//!
//! Storing always goes through buffers and write(2): the driver does not mark pages that a device
//! wrote as dirty (`devmm_unpin_user_pages`), so Linux could drop what a device wrote into a mapped
//! file.

use crate::bytes::Bytes;
use crate::copy::{Pending, Slice};
use crate::error::{Errno, Error, Failed, FileFailed, Result};
use crate::signals::uninterrupted;
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bytes that are copied at once.
const CHUNK: u64 = 8 << 20;
/// Chunks that the device works on while another is read or written.
const AHEAD: usize = 2;

/// The progress of a copy, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes copied so far.
    pub done: u64,
    /// Bytes to copy in all.
    pub total: u64,
}

const LOAD: &str = "load a file into device memory";
const STORE: &str = "store device memory in a file";

/// Fills mapped memory from a file, from `offset` on, and reports the progress after each chunk.
/// Several threads may read the same file: its position is neither used nor changed.
///
/// # Errors
///
/// [`Error::File`] if the file cannot be read or is too short, also if it is truncated meanwhile;
/// those of [`Slice::write_async`]. Some of the memory may have been written then.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{self, PageCache, Pool, Tag};
/// use ascend_vmm::{LogicalId, Session};
/// use std::fs::File;
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let pool = Pool::new(&PageCache::new(&device));
/// let file = File::open("/proc/self/exe")?;
/// let block = pool.allocate(4096, 1, Tag(0))?;
/// pool::load(&file, 0, &block.slice(0, 4096)?, |progress| assert_eq!(progress.done, 4096))?;
/// let mut magic = [0; 4];
/// block.read(0, &mut magic)?;
/// assert_eq!(&magic, b"\x7fELF");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(file: &File, offset: u64, to: &Slice<'_>, progress: impl FnMut(Progress)) -> Result<()> {
    match map(file, offset, to) {
        Some(mapped) => load_mapped(file, &mapped, offset, to, progress),
        None => load_read(file, offset, to, progress),
    }
}

/// Maps the part of a file that is loaded, if the device can read it there. A file that is too
/// short is read instead, which finds out where it ends.
fn map(file: &File, offset: u64, to: &Slice<'_>) -> Option<MmapRaw> {
    let end = offset.checked_add(to.size())?;
    if to.size() == 0 || !to.is_copied_by_device() || length(file)? < end {
        return None;
    }
    let mapped = MmapOptions::new().offset(offset).len(to.size() as usize).map_raw_read_only(file).ok()?;
    // Only a hint.
    let _ = mapped.advise(Advice::Sequential);
    Some(mapped)
}

/// The length of a regular file; `None` for other files.
fn length(file: &File) -> Option<u64> {
    let metadata = uninterrupted(|| file.metadata()).ok()?;
    metadata.is_file().then_some(metadata.len())
}

fn load_mapped(
    file: &File,
    mapped: &MmapRaw,
    offset: u64,
    to: &Slice<'_>,
    mut progress: impl FnMut(Progress),
) -> Result<()> {
    let total = to.size();
    let mut running: VecDeque<(Pending<()>, u64)> = VecDeque::with_capacity(AHEAD);
    // A file that is truncated within a page reads as zeros up to the end of the page, so a copy
    // that succeeded may have copied bytes that are not in the file.
    let check_length = |done: u64| match length(file) {
        Some(end) if end < offset + done => Err(cut_off(file, Some(end), total, offset)),
        _ => Ok(()),
    };
    let mut next = chunks(total);
    loop {
        while running.len() < AHEAD {
            let Some(chunk) = next.next() else { break };
            let part = to.part(chunk.start, chunk.end - chunk.start)?;
            // SAFETY: the bytes are in the mapping, which outlives `running`: dropping a `Pending`
            // waits for it. The driver pins them, and the device only reads them.
            let begun = unsafe { part.write_async_from(mapped.as_ptr().add(chunk.start as usize)) };
            let pending = begun.or_else(|error| check_length(chunk.end).and(Err(error)))?;
            running.push_back((pending, chunk.end));
        }
        let Some((pending, done)) = running.pop_front() else { return Ok(()) };
        pending.wait().or_else(|failed| check_length(done).and(Err(failed.error)))?;
        check_length(done)?;
        progress(Progress { done, total });
    }
}

fn load_read(file: &File, offset: u64, to: &Slice<'_>, mut progress: impl FnMut(Progress)) -> Result<()> {
    let total = to.size();
    let mut buffer = buffer(LOAD, file, total.min(CHUNK))?;
    for chunk in chunks(total) {
        let size = chunk.end - chunk.start;
        buffer.truncate(size as usize);
        read_exactly(file, &mut buffer, offset.saturating_add(chunk.start))?;
        to.part(chunk.start, size)?.write(&buffer)?;
        progress(Progress { done: chunk.end, total });
    }
    Ok(())
}

/// Writes mapped memory into a file, from `offset` on, and reports the progress after each chunk.
/// [`File::sync_all`] brings the data to the disk afterwards.
///
/// # Errors
///
/// [`Error::File`] if the file cannot be written; those of [`Slice::read_async`]. Some of the file
/// may have been written then.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::pool::{self, PageCache, Pool, Tag};
/// use ascend_vmm::{LogicalId, Session};
/// use std::fs::{self, File};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// let pool = Pool::new(&PageCache::new(&device));
/// let block = pool.allocate(4096, 1, Tag(0))?;
/// block.write(0, b"weights")?;
/// let path = std::env::temp_dir().join(format!("ascend-vmm-store-{}", std::process::id()));
/// pool::store(&block.slice(0, 7)?, &File::create(&path)?, 0, |_| ())?;
/// assert_eq!(fs::read(&path)?, b"weights");
/// # fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn store(from: &Slice<'_>, file: &File, offset: u64, mut progress: impl FnMut(Progress)) -> Result<()> {
    let total = from.size();
    let mut running: VecDeque<(Pending, u64)> = VecDeque::with_capacity(AHEAD);
    let mut spare: Option<Vec<u8>> = None;
    let mut left = chunks(total);
    loop {
        // The device copies ahead while a chunk is written.
        while running.len() < AHEAD {
            let Some(chunk) = left.next() else { break };
            let size = chunk.end - chunk.start;
            let mut buffer = match spare.take() {
                Some(used) => used,
                None => buffer(STORE, file, size)?,
            };
            buffer.truncate(size as usize);
            let begun = from.part(chunk.start, size)?.read_async(buffer);
            running.push_back((begun.map_err(|failed| failed.error)?, chunk.start));
        }
        let Some((pending, start)) = running.pop_front() else { return Ok(()) };
        let buffer = pending.wait().map_err(|failed: Failed<_>| failed.error)?;
        let at = offset.saturating_add(start);
        file.write_all_at(&buffer, at).map_err(|error| failed(STORE, file, &error))?;
        progress(Progress { done: start + buffer.len() as u64, total });
        spare = Some(buffer);
    }
}

fn chunks(total: u64) -> impl Iterator<Item = Range<u64>> {
    (0..total.div_ceil(CHUNK)).map(move |number| number * CHUNK..((number + 1) * CHUNK).min(total))
}

/// A buffer of zeros; `None` if there is no memory for it.
pub(super) fn zeroed(size: u64) -> Option<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(size as usize).ok()?;
    buffer.resize(size as usize, 0);
    Some(buffer)
}

/// A buffer for a chunk of a file.
fn buffer(operation: &'static str, file: &File, size: u64) -> Result<Vec<u8>> {
    zeroed(size).ok_or_else(|| failed(operation, file, &Errno::ENOMEM.into()))
}

fn read_exactly(file: &File, buffer: &mut [u8], offset: u64) -> Result<()> {
    file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => cut_off(file, length(file), buffer.len() as u64, offset),
        _ => failed(LOAD, file, &error),
    })
}

fn cut_off(file: &File, end: Option<u64>, wanted: u64, offset: u64) -> Error {
    let end = end.map_or_else(|| "too early".to_owned(), |end| format!("at byte {end}"));
    FileFailed::because(
        LOAD,
        &path(file),
        format!("it ends {end}, but {} from byte {offset} on are needed", Bytes(wanted)),
        "It is too short, or it was truncated while it was read.",
    )
}

fn failed(operation: &'static str, file: &File, error: &io::Error) -> Error {
    FileFailed::call(operation, &path(file), error)
}

/// The name of an open file, for errors.
fn path(file: &File) -> PathBuf {
    let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    std::fs::read_link(&link).unwrap_or(link)
}
