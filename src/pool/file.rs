//! Files into memory of an NPU, and back.
//!
//! The driver copies to and from ordinary memory of the process, so a file goes through buffers:
//! one is read or written while the device works on another. They are filled by read(2), not by
//! mapping the file: a page of a mapped file that another process cuts off ends this process with
//! SIGBUS as soon as it is touched, also inside of a copy, and no check before it can prevent that.
//! read(2) returns less instead, which becomes an error that says so; it costs one copy in the
//! host's memory, which the overlap hides.

use crate::copy::{Pending, Slice};
use crate::error::{Error, Failed, FileFailed, Result, bytes};
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

/// How far something is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Progress {
    /// So many are done.
    pub done: u64,
    /// Of so many.
    pub total: u64,
}

const LOAD: &str = "load a file into memory of a device";
const STORE: &str = "store memory of a device in a file";

/// Loads a part of a file into mapped memory of the same size, and reports the progress after each
/// chunk. The file may be read by several threads at once: its position is neither used nor
/// changed.
///
/// # Errors
///
/// [`Error::File`] if the file cannot be read, or ends before the part does, also if it is cut off
/// meanwhile; those of [`Slice::write_async`]. Some of the memory may have been written then.
///
/// ```standalone_crate
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
pub fn load(file: &File, offset: u64, to: &Slice<'_>, mut progress: impl FnMut(Progress)) -> Result<()> {
    let total = to.size();
    let mut running: VecDeque<(Pending, u64)> = VecDeque::with_capacity(AHEAD);
    for chunk in chunks(total) {
        let size = chunk.end - chunk.start;
        let mut buffer = match running.len() {
            AHEAD => wait_first(&mut running, total, &mut progress)?,
            _ => buffer(size).map_err(|error| failed(LOAD, file, &error))?,
        };
        buffer.resize(size as usize, 0);
        read_exactly(file, &mut buffer, offset.saturating_add(chunk.start))?;
        let begun = to.part(chunk.start, size)?.write_async(buffer);
        running.push_back((begun.map_err(|failed| failed.error)?, chunk.end));
    }
    while !running.is_empty() {
        wait_first(&mut running, total, &mut progress)?;
    }
    Ok(())
}

/// Stores mapped memory in a file, from `offset` on, and reports the progress after each chunk.
/// When it returns, Linux has the data; `File::sync_all` brings it to the disk.
///
/// # Errors
///
/// [`Error::File`] if the file cannot be written; those of [`Slice::read_async`]. Some of the file
/// may have been written then.
pub fn store(from: &Slice<'_>, file: &File, offset: u64, mut progress: impl FnMut(Progress)) -> Result<()> {
    let total = from.size();
    let mut running: VecDeque<(Pending, u64)> = VecDeque::with_capacity(AHEAD);
    let mut spare = Vec::new();
    let mut left = chunks(total);
    loop {
        // The device reads ahead while a chunk is written.
        while running.len() < AHEAD {
            let Some(chunk) = left.next() else { break };
            let size = chunk.end - chunk.start;
            let mut buffer = match std::mem::take(&mut spare) {
                new if Vec::capacity(&new) == 0 => buffer(size).map_err(|error| failed(STORE, file, &error))?,
                used => used,
            };
            buffer.resize(size as usize, 0);
            let begun = from.part(chunk.start, size)?.read_async(buffer);
            running.push_back((begun.map_err(|failed| failed.error)?, chunk.start));
        }
        let Some((pending, start)) = running.pop_front() else { return Ok(()) };
        let buffer = pending.wait().map_err(|failed: Failed<_>| failed.error)?;
        let at = offset.saturating_add(start);
        file.write_all_at(&buffer, at).map_err(|error| failed(STORE, file, &error))?;
        progress(Progress { done: start + buffer.len() as u64, total });
        spare = buffer;
    }
}

/// Waits for the oldest copy, and returns its buffer.
fn wait_first(
    running: &mut VecDeque<(Pending, u64)>,
    total: u64,
    progress: &mut impl FnMut(Progress),
) -> Result<Vec<u8>> {
    let Some((pending, done)) = running.pop_front() else { return Ok(Vec::new()) };
    let buffer = pending.wait().map_err(|failed: Failed<_>| failed.error)?;
    progress(Progress { done, total });
    Ok(buffer)
}

fn chunks(total: u64) -> impl Iterator<Item = Range<u64>> {
    (0..total.div_ceil(CHUNK)).map(move |number| number * CHUNK..((number + 1) * CHUNK).min(total))
}

/// Room for a chunk, if there is memory for it.
fn buffer(size: u64) -> io::Result<Vec<u8>> {
    let mut buffer = Vec::new();
    let reserved = buffer.try_reserve_exact(size as usize);
    reserved.map_err(|_| io::Error::from_raw_os_error(crate::error::Errno::ENOMEM.raw()))?;
    Ok(buffer)
}

fn read_exactly(file: &File, buffer: &mut [u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset.saturating_add(done as u64)) {
            Ok(0) => {
                let end = offset.saturating_add(done as u64);
                let wanted = bytes(buffer.len() as u64);
                return Err(FileFailed::because(
                    LOAD,
                    &path(file),
                    format!("it ends at byte {end}, and {wanted} from byte {offset} on are wanted"),
                    "It is shorter than it should be, or was cut off while it was read.",
                ));
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(LOAD, file, &error)),
        }
    }
    Ok(())
}

#[cold]
fn failed(operation: &'static str, file: &File, error: &io::Error) -> Error {
    FileFailed::call(operation, &path(file), error)
}

/// The name of an open file, for errors.
fn path(file: &File) -> PathBuf {
    let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    std::fs::read_link(&link).unwrap_or(link)
}
