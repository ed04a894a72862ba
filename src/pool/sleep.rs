//! Sleep and wake: a tag gives up its memory for a while and keeps its addresses.
//!
//! Falling asleep makes sure that nothing uses the memory and hides it from everyone else, copies
//! what is in use to where it is kept, unmaps all handles of the tag and releases them. So no write
//! comes after its copy, whatever the driver does at the same time. Waking takes handles of the
//! same sizes, maps them where the old ones were, copies back, and only then shows them. Each is
//! all or nothing: after an error, or a panic of the caller's progress callback, the tag is as it
//! was before, and what was kept is kept until a waking has succeeded.
//!
//! Contents that are kept in a file survive this process. The file is written under a temporary
//! name, brought to the disk and renamed before anything is unmapped, in place of nothing, and it
//! says itself which addresses its parts are of ([`BackupFile`]).

use super::file::{Progress, load, store};
use super::heap::{Heap, Room, State, Taken};
use super::page_cache::PageCache;
use super::segment::{Segment, Unmapped};
use super::{Pool, Tag};
use crate::bytes::Bytes;
use crate::copy::Slice;
use crate::error::{Error, FileFailed, Invalid, OutOfMemory, Result};
use crate::fork::ForkGuard;
use crate::kind::Page;
use crate::physical::PhysicalMemory;
use crate::reserve::ReserveOptions;
use crate::session::Session;
use crate::signals::uninterrupted;
use crate::trace::{self, quiet};
use nix::libc;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What becomes of the contents of a tag that falls asleep.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// They are lost: for what can be computed again.
    Nothing,
    /// In ordinary memory of this process.
    Host,
    /// In host memory of the driver's, which is pinned: faster to copy, and not swapped out.
    Pinned,
    /// In a file of this name, which must not exist. It is removed when the tag is awake again, or
    /// when the pool and all its blocks were dropped. It stays if this process ends before that.
    File(PathBuf),
}

/// A tag that is asleep.
pub(super) struct Asleep {
    /// Address and size of its handles.
    handles: Vec<(u64, u64)>,
    backup: Backup,
}

impl Asleep {
    pub(super) fn size(&self) -> u64 {
        self.handles.iter().map(|(_, size)| size).sum()
    }
}

/// Contents that are kept: of these addresses, one after the other.
struct Backup {
    used: Vec<Range<u64>>,
    store: Store,
}

enum Store {
    Nothing,
    /// In pieces that are not larger than this.
    Host(Vec<Vec<u8>>),
    Pinned(Box<Segment>),
    File(KeptFile),
}

/// Bytes that are copied at once to and from the host's memory.
const CHUNK: u64 = 16 << 20;

const SLEEP: &str = "put a tag to sleep";
const WAKE: &str = "wake a tag";

impl Pool {
    /// Puts a tag to sleep: its memory is released, its addresses stay, and so do its blocks, which
    /// cannot be used until [`Pool::wake`]. Returns how many bytes were released.
    ///
    /// The hook for unmapping is called first, before anything is copied. From then on the memory
    /// can only be used by this call, also by its addresses ([`Session::slice_at`]). `progress` is
    /// called from time to time.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if another thread puts it to sleep or wakes it; [`Error::InUse`] if
    /// slices or copies of its blocks are alive after the hook, before anything is copied;
    /// [`Error::File`] if the file cannot be written, for example because the disk is full; those
    /// of copies and of unmapping. The tag is awake then, and nothing is lost. If the kernel
    /// refuses first to unmap and then, twice, to map again what was unmapped, the tag is asleep
    /// with what should be kept, and the error says so.
    ///
    /// ```standalone_crate
    /// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
    /// # emulator.attach()?;
    /// use ascend_vmm::pool::{Keep, PageCache, Pool, Tag};
    /// use ascend_vmm::{LogicalId, Session};
    ///
    /// const WEIGHTS: Tag = Tag(1);
    /// let device = Session::open()?.device(LogicalId(0))?;
    /// let pool = Pool::new(&PageCache::new(&device));
    /// let block = pool.allocate(10 << 20, 1, WEIGHTS)?;
    /// block.write(0, b"kept")?;
    /// let address = block.address();
    ///
    /// assert_eq!(pool.sleep(WEIGHTS, Keep::Host, |_| ())?, 10 << 20);
    /// assert!(block.write(0, b"no").is_err());
    /// pool.wake(&[WEIGHTS], |_| ())?;
    ///
    /// let mut back = [0; 4];
    /// block.read(0, &mut back)?;
    /// assert_eq!((&back, block.address()), (b"kept", address));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sleep(&self, tag: Tag, keep: Keep, mut progress: impl FnMut(Progress)) -> Result<u64> {
        self.inner.shared.check_process()?;
        let heap = self.heap(tag);
        let Some((mut falling, used)) = Falling::begin(&heap)? else { return Ok(0) };
        let mapped = falling.mapped();
        if let Some(hook) = &self.inner.shared.options.before_unmap {
            if !mapped.is_empty() {
                hook(&mapped);
            }
        }
        // From here on nothing else can use the memory until it is unmapped: no write can come
        // after its copy.
        falling.hide()?;
        let backup = Backup::make(tag, &self.inner.shared.cache, falling.rooms(), used, keep, &mut progress)?;
        // A callback may have forked, and its child returned.
        self.inner.shared.check_process()?;
        let _quiet = quiet();
        match falling.unmap() {
            Ok(()) => Ok(falling.end(backup)),
            Err(error) => Err(falling.undo(backup, error)),
        }
    }

    /// Wakes tags, all of them or none. Tags that are awake stay so.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] with how much is missing, after all that is free in tags that are
    /// awake was given back; [`Error::File`] if a file cannot be read any more; [`Error::Invalid`]
    /// if another thread puts one of them to sleep or wakes it; those of mapping and copies. All
    /// that were asleep are asleep then, and what was kept is still kept.
    pub fn wake(&self, tags: &[Tag], mut progress: impl FnMut(Progress)) -> Result<()> {
        self.inner.shared.check_process()?;
        match self.try_wake(tags, &mut progress) {
            // Memory is what is missing, also if something else cannot be unmapped.
            Err(error) if error.is_out_of_memory() && self.unmap_free().unwrap_or(0) > 0 => {
                self.try_wake(tags, &mut progress)
            }
            woken => woken,
        }
    }

    fn try_wake(&self, tags: &[Tag], progress: &mut impl FnMut(Progress)) -> Result<()> {
        let mut tags = tags.to_vec();
        tags.sort_unstable();
        tags.dedup();
        let heaps: Vec<_> = tags.iter().filter_map(|&tag| self.known(tag)).collect();
        let mut waking = Vec::new();
        for heap in &heaps {
            waking.extend(Waking::begin(heap)?);
        }
        let cache = &self.inner.shared.cache;
        let total = waking.iter().map(|one| one.asleep.size()).sum();
        let cached = cache.statistics().cached;
        let mapped = {
            let _quiet = quiet();
            waking.iter_mut().try_for_each(Waking::map)
        };
        let had = waking.iter().map(|one| one.mapped).sum();
        let copied = mapped.and_then(|()| {
            let whole = waking.iter().map(|one| one.asleep.backup.size()).sum();
            let mut done = 0;
            waking.iter().try_for_each(|one| {
                let copied = one
                    .asleep
                    .backup
                    .restore(one.rooms(), |part| progress(Progress { done: done + part, total: whole }));
                done += one.asleep.backup.size();
                copied
            })
        });
        self.inner.shared.check_process()?;
        match copied {
            Ok(()) => {
                waking.into_iter().for_each(Waking::end);
                Ok(())
            }
            Err(error) => {
                drop(waking);
                // As much as before: what this took from the device it gives back.
                cache.trim(cached)?;
                Err(missing(error, &tags, had, total))
            }
        }
    }
}

/// A tag that falls asleep. Dropped before its end, it is awake as before.
struct Falling<'a> {
    heap: &'a Heap,
    taken: Option<Taken<'a>>,
    /// Memory that was unmapped: the segment, and where.
    unmapped: Vec<(usize, Unmapped)>,
}

impl<'a> Falling<'a> {
    /// Keeps others from using the tag; also what is in use. `None` if it is asleep.
    fn begin(heap: &'a Heap) -> Result<Option<(Falling<'a>, Vec<Range<u64>>)>> {
        let mut books = heap.lock();
        match books.state {
            State::Awake => books.state = State::Changing,
            State::Asleep(_) => return Ok(None),
            State::Changing => return Err(heap.asleep(&books.state, SLEEP)),
        }
        let (taken, books) = heap.take(books);
        let used = books.blocks.used_ranges();
        drop(books);
        Ok(Some((Falling { heap, taken: Some(taken), unmapped: Vec::new() }, used)))
    }

    fn rooms(&self) -> &[Room] {
        self.taken.as_ref().map_or(&[], |taken| &taken.rooms)
    }

    fn rooms_mut(&mut self) -> &mut [Room] {
        self.taken.as_mut().map_or(&mut [], |taken| &mut taken.rooms)
    }

    fn mapped(&self) -> Vec<Range<u64>> {
        self.rooms().iter().flat_map(|room| room.mapped()).collect()
    }

    /// Keeps its memory from being used by its addresses.
    fn hide(&mut self) -> Result<()> {
        self.rooms_mut().iter_mut().try_for_each(|room| room.segment.hide(SLEEP))
    }

    fn unmap(&mut self) -> Result<()> {
        for number in 0..self.rooms().len() {
            let segment = &mut self.rooms_mut()[number].segment;
            let (memories, error) = match segment.unmap(0..segment.size()) {
                Ok(memories) => (memories, None),
                Err((error, lost)) => (lost, Some(error)),
            };
            self.unmapped.push((number, memories));
            if let Some(error) = error {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The tag is asleep. Its memory is released; returns how much.
    fn end(mut self, backup: Backup) -> u64 {
        let memories = self.fall_asleep(backup);
        self.heap.shared.cache.release(memories)
    }

    /// The tag is awake, with all its memory: then the backup is not needed. If the kernel refuses
    /// that too, the tag is asleep, and the backup has what is lost.
    fn undo(mut self, backup: Backup, error: Error) -> Error {
        for (number, memories) in std::mem::take(&mut self.unmapped) {
            let lost = self.rooms_mut()[number].segment.restore(memories);
            if !lost.is_empty() {
                self.unmapped.push((number, lost));
            }
        }
        if self.unmapped.is_empty() {
            return error;
        }
        let tag = self.heap.tag;
        let memories = self.fall_asleep(backup);
        memories.into_iter().for_each(|memory| self.heap.shared.cache.put(memory));
        trace::error(format!("{tag}"), "a tag that should have stayed awake is asleep: it can be woken");
        still_asleep(error, tag)
    }

    /// Marks the tag as asleep, with the handles that are unmapped and those that are still mapped.
    /// Returns the memory of the former.
    fn fall_asleep(&mut self, backup: Backup) -> Vec<PhysicalMemory> {
        let mut handles: Vec<(u64, u64)> = Vec::new();
        for room in self.rooms() {
            handles.extend(room.segment.pieces().map(|(offset, size)| (room.segment.address() + offset, size)));
        }
        let mut unmapped = Vec::new();
        for (number, memories) in std::mem::take(&mut self.unmapped) {
            let start = self.rooms()[number].segment.address();
            handles.extend(memories.iter().map(|(offset, memory)| (start + offset, memory.size())));
            unmapped.extend(memories.into_iter().map(|(_, memory)| memory));
        }
        self.heap.lock().state = State::Asleep(Asleep { handles, backup });
        drop(self.taken.take());
        unmapped
    }
}

impl Drop for Falling<'_> {
    fn drop(&mut self) {
        let Some(mut taken) = self.taken.take().filter(|_| !self.heap.shared.in_child()) else { return };
        taken.rooms.iter_mut().for_each(|room| room.segment.show());
        self.heap.lock().state = State::Awake;
    }
}

/// A tag that wakes. Dropped before its end, it is asleep as before.
struct Waking<'a> {
    heap: &'a Heap,
    taken: Option<Taken<'a>>,
    asleep: Asleep,
    mapped: u64,
}

impl<'a> Waking<'a> {
    /// `None` if it is awake.
    fn begin(heap: &'a Heap) -> Result<Option<Waking<'a>>> {
        let mut books = heap.lock();
        match std::mem::replace(&mut books.state, State::Changing) {
            State::Awake => {
                books.state = State::Awake;
                Ok(None)
            }
            State::Asleep(asleep) => {
                let (taken, books) = heap.take(books);
                drop(books);
                Ok(Some(Waking { heap, taken: Some(taken), asleep, mapped: 0 }))
            }
            State::Changing => Err(heap.asleep(&books.state, WAKE)),
        }
    }

    fn rooms(&self) -> &[Room] {
        self.taken.as_ref().map_or(&[], |taken| &taken.rooms)
    }

    fn rooms_mut(&mut self) -> &mut [Room] {
        self.taken.as_mut().map_or(&mut [], |taken| &mut taken.rooms)
    }

    /// Maps handles of the same sizes at the same addresses.
    fn map(&mut self) -> Result<()> {
        for (address, size) in self.asleep.handles.clone() {
            let room = self.rooms_mut().iter_mut().find(|room| room.contains(address));
            let Some(room) = room else { continue };
            let offset = address - room.segment.address();
            room.segment.map_new(offset, size)?;
            self.mapped += size;
        }
        Ok(())
    }

    /// The tag is awake.
    fn end(mut self) {
        self.rooms_mut().iter_mut().for_each(|room| room.segment.show());
        self.heap.lock().state = State::Awake;
        drop(self.taken.take());
    }
}

impl Drop for Waking<'_> {
    fn drop(&mut self) {
        let Some(mut taken) = self.taken.take().filter(|_| !self.heap.shared.in_child()) else { return };
        let _quiet = quiet();
        for (address, _) in self.asleep.handles.iter().rev() {
            let Some(room) = taken.rooms.iter_mut().find(|room| room.contains(*address)) else { continue };
            let offset = address - room.segment.address();
            if let Err(error) = room.segment.unmap_again(offset) {
                // The next waking uses it.
                trace::warn(error, "memory of a tag that could not wake stays mapped");
            }
        }
        let empty = Backup { used: Vec::new(), store: Store::Nothing };
        let asleep = Asleep {
            handles: std::mem::take(&mut self.asleep.handles),
            backup: std::mem::replace(&mut self.asleep.backup, empty),
        };
        self.heap.lock().state = State::Asleep(asleep);
    }
}

/// Says that the tag is asleep, although it was refused.
fn still_asleep(error: Error, tag: Tag) -> Error {
    match error {
        Error::Refused(mut refused) => {
            refused.object.push_str(&format!(", and what was unmapped could not be mapped again, so {tag} is asleep"));
            Error::Refused(refused)
        }
        other => other,
    }
}

/// Says how much is missing.
fn missing(error: Error, tags: &[Tag], had: u64, total: u64) -> Error {
    let Error::OutOfMemory(mut error) = error else { return error };
    let tags: Vec<String> = tags.iter().map(Tag::to_string).collect();
    let OutOfMemory { place, asked, .. } = &mut error;
    place.push_str(&format!(", waking {} with {}, of which {} are there", tags.join(", "), Bytes(total), Bytes(had)));
    *asked = total - had;
    Error::OutOfMemory(error)
}

impl Backup {
    fn size(&self) -> u64 {
        match self.store {
            Store::Nothing => 0,
            _ => self.used.iter().map(|range| range.end - range.start).sum(),
        }
    }

    /// Copies what is in use to where it is kept.
    fn make(
        tag: Tag,
        cache: &PageCache,
        rooms: &[Room],
        used: Vec<Range<u64>>,
        keep: Keep,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Backup> {
        let session = cache.session();
        let mut backup = Backup { used, store: Store::Host(Vec::new()) };
        let total = backup.size();
        let store = match keep {
            Keep::Nothing => Store::Nothing,
            Keep::Host => {
                let mut pieces: Vec<Vec<u8>> = Vec::new();
                for (offset, device) in backup.chunks() {
                    let size = device.end - device.start;
                    let mut piece = Vec::new();
                    piece.try_reserve_exact(size as usize).map_err(|_| no_host_memory(total, "process"))?;
                    piece.resize(size as usize, 0);
                    slice(rooms, &device)?.read(&mut piece)?;
                    pieces.push(piece);
                    progress(Progress { done: offset + size, total });
                }
                Store::Host(pieces)
            }
            Keep::Pinned => {
                let host = PageCache::new(&session.host()?);
                let mut segment = Segment::new(&host, total.max(1))?;
                segment.ensure(0..total)?;
                for (offset, device) in backup.chunks() {
                    let size = device.end - device.start;
                    segment.slice(offset, size)?.copy_from(&slice(rooms, &device)?)?;
                    progress(Progress { done: offset + size, total });
                }
                Store::Pinned(Box::new(segment))
            }
            Keep::File(path) => Store::File(KeptFile::write(&path, tag, &backup.used, rooms, &session, progress)?),
        };
        backup.store = store;
        Ok(backup)
    }

    /// Copies back. Calls with the bytes that are done.
    fn restore(&self, rooms: &[Room], mut progress: impl FnMut(u64)) -> Result<()> {
        match &self.store {
            Store::Nothing => {}
            Store::Host(pieces) => {
                for ((offset, device), piece) in self.chunks().zip(pieces) {
                    slice(rooms, &device)?.write(piece)?;
                    progress(offset + device.end - device.start);
                }
            }
            Store::Pinned(segment) => {
                for (offset, device) in self.chunks() {
                    let size = device.end - device.start;
                    slice(rooms, &device)?.copy_from(&segment.slice(offset, size)?)?;
                    progress(offset + size);
                }
            }
            Store::File(kept) => {
                let mut done = 0;
                for (range, part) in self.used.iter().zip(&kept.parts) {
                    let to = slice(rooms, range)?;
                    load(&kept.file, part.offset, &to, |part| progress(done + part.done))?;
                    done += range.end - range.start;
                }
            }
        }
        Ok(())
    }

    /// What is in use in pieces: the place of each in the backup, and its addresses. No piece
    /// crosses from one reservation of the backup into the next.
    fn chunks(&self) -> impl Iterator<Item = (u64, Range<u64>)> {
        let mut left = self.used.iter().cloned();
        let (mut now, mut offset) = (0..0, 0);
        std::iter::from_fn(move || {
            if now.is_empty() {
                now = left.next()?;
            }
            let border = ReserveOptions::MAX_SIZE - offset % ReserveOptions::MAX_SIZE;
            let size = (now.end - now.start).min(CHUNK).min(border);
            let piece = (offset, now.start..now.start + size);
            now.start += size;
            offset += size;
            Some(piece)
        })
    }
}

/// Memory of a tag whose segments hide it from everyone else.
fn slice<'a>(rooms: &'a [Room], range: &Range<u64>) -> Result<Slice<'a>> {
    match rooms.iter().find(|room| room.contains(range.start)) {
        Some(room) => room.segment.slice(range.start - room.segment.address(), range.end - range.start),
        None => Err(Invalid::because(
            "copy the contents of a tag",
            format!("{:#x} is not in its segments", range.start),
            "This should not happen.",
        )),
    }
}

fn no_host_memory(total: u64, place: &str) -> Error {
    let error = OutOfMemory {
        place: format!("the host, in this {place}, for what is kept of a tag"),
        asked: total,
        page: Page::Huge,
        free_huge: None,
        free_giant: None,
        kernel_log: String::new(),
    };
    error.into()
}

/// A part of a file in which the contents of a tag are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupPart {
    /// The addresses that it was at.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Where it is in the file.
    pub offset: u64,
}

/// A file in which the contents of a tag were kept by a process that may have ended since: see
/// [`Keep::File`]. Its parts can be loaded by [`load`].
///
/// ```standalone_crate
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
/// assert_eq!(file.tag(), Tag(7));
/// assert_eq!((file.parts()[0].address, file.parts()[0].size), (block.address(), 2 << 20));
/// # pool.wake(&[Tag(7)], |_| ())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BackupFile {
    tag: Tag,
    parts: Vec<BackupPart>,
    file: File,
}

impl BackupFile {
    /// Opens a file and checks that it is complete.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it cannot be read, or is not such a file, or is cut off.
    pub fn open(path: impl AsRef<Path>) -> Result<BackupFile> {
        let path = path.as_ref();
        let wrong = |problem: &str| FileFailed::because(OPEN, path, problem, "It cannot be used.");
        let failed = |error: io::Error| FileFailed::call(OPEN, path, &error);
        // The name may be that of a pipe by now, which would wait for a writer.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let metadata = uninterrupted(|| file.metadata()).map_err(failed)?;
        let length = metadata.len();
        let mut header = Header::new_zeroed();
        if !metadata.is_file() || length < size_of::<Header>() as u64 {
            return Err(wrong("it is not a file of this library's"));
        }
        file.read_exact_at(header.as_mut_bytes(), 0).map_err(failed)?;
        if header.magic != MAGIC {
            return Err(wrong("it is not a file of this library's"));
        }
        let count = u64::from(header.count.get());
        let start = data_start(count);
        if start > length {
            return Err(wrong("it is cut off"));
        }
        let mut parts = Vec::new();
        let mut offset = start;
        let mut rows = [const { Row { address: U64::ZERO, size: U64::ZERO } }; 256];
        // Some at a time: a file that is nothing but a hole can say that it has any number.
        for first in (0..count).step_by(rows.len()) {
            let rows = &mut rows[..(count - first).min(256) as usize];
            let at = size_of::<Header>() as u64 + first * size_of::<Row>() as u64;
            file.read_exact_at(rows.as_mut_bytes(), at).map_err(failed)?;
            for row in rows {
                let (address, size) = (row.address.get(), row.size.get());
                parts.push(BackupPart { address, size, offset });
                let end = offset.checked_add(size).filter(|_| size > 0);
                offset = end.ok_or_else(|| wrong("its sizes are not possible"))?;
            }
        }
        if offset > length {
            return Err(wrong("it is cut off"));
        }
        Ok(BackupFile { tag: Tag(header.tag.get()), parts, file })
    }

    /// The tag whose contents these are.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// Its parts, in order of addresses. Blocks that were side by side are in one part.
    pub fn parts(&self) -> &[BackupPart] {
        &self.parts
    }

    /// The file, for [`load`].
    pub fn file(&self) -> &File {
        &self.file
    }
}

const OPEN: &str = "open a file of a tag that was asleep";
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
struct Row {
    address: U64,
    size: U64,
}

/// Where the data begins after so many rows.
fn data_start(count: u64) -> u64 {
    (size_of::<Header>() as u64 + count * size_of::<Row>() as u64).next_multiple_of(4096)
}

/// The file of a tag of this process. Open, so that it can be read whatever becomes of its name. It
/// is removed when it is dropped.
struct KeptFile {
    /// A temporary name, until it is complete.
    path: PathBuf,
    file: File,
    parts: Vec<BackupPart>,
    /// In a child of fork it is the parent's.
    process: ForkGuard,
}

/// How many temporary names are tried.
const PARTIALS: u32 = 1000;

impl KeptFile {
    /// Creates it under a temporary name. Never opens what has such a name already: that may be
    /// another thread's, what is left of a process that had this one's number, or a link to a file
    /// of someone else's.
    fn create(path: &Path, name: &OsStr) -> io::Result<KeptFile> {
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
                opened => {
                    let process = ForkGuard::new();
                    return opened.map(|file| KeptFile { path, file, parts: Vec::new(), process });
                }
            }
        }
    }

    fn write(
        path: &Path,
        tag: Tag,
        used: &[Range<u64>],
        rooms: &[Room],
        session: &Session,
        progress: &mut impl FnMut(Progress),
    ) -> Result<KeptFile> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => exists(path),
            _ => FileFailed::call(SLEEP, path, &error),
        };
        let Some(name) = path.file_name() else {
            return Err(FileFailed::because(SLEEP, path, "it is not the name of a file", "Give it a name."));
        };
        if uninterrupted(|| path.symlink_metadata()).is_ok() {
            return Err(exists(path));
        }
        let count = u32::try_from(used.len()).map_err(|_| {
            Invalid::because(SLEEP, format!("{} parts are too many for a file", used.len()), "Keep it in host memory.")
        })?;
        // The program may change its directory before the tag wakes.
        let place = std::path::absolute(path).map_err(failed)?;
        let mut kept = KeptFile::create(&place, name).map_err(failed)?;
        let file = &kept.file;
        let header = Header { magic: MAGIC, tag: tag.0.into(), count: count.into() };
        file.write_all_at(header.as_bytes(), 0).map_err(failed)?;
        let total = used.iter().map(|range| range.end - range.start).sum();
        let (mut parts, mut done) = (Vec::with_capacity(used.len()), 0);
        let start = data_start(count.into());
        for (number, range) in used.iter().enumerate() {
            let (size, offset) = (range.end - range.start, start + done);
            let row = Row { address: range.start.into(), size: size.into() };
            let at = size_of::<Header>() + number * size_of::<Row>();
            file.write_all_at(row.as_bytes(), at as u64).map_err(failed)?;
            let from = slice(rooms, range)?;
            let stored = store(&from, file, offset, |part| progress(Progress { done: done + part.done, total }));
            stored.map_err(|error| named(error, path))?;
            parts.push(BackupPart { address: range.start, size, offset });
            done += size;
        }
        // The callback may have forked, and its child returned: the file is the parent's to name.
        session.inner.check_process()?;
        if done == 0 {
            file.set_len(start).map_err(failed)?;
        }
        file.sync_all().map_err(failed)?;
        kept.parts = parts;
        let impossible = [libc::EPERM, libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP];
        kept.rename(&place).map_err(|error| match error.raw_os_error() {
            Some(errno) if impossible.contains(&errno) => unnamed(path, &error),
            _ => failed(error),
        })?;
        // The name is on the disk when its directory is.
        let directory = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
        Ok(kept)
    }

    /// Gives it its own name, which must not exist by now: neither call takes the place of what has
    /// the name.
    fn rename(&mut self, path: &Path) -> io::Result<()> {
        match rename_new(&self.path, path) {
            Ok(()) => path.clone_into(&mut self.path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            // Not every file system can do that; most that cannot have links.
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
    /// Removes the file, if its name is still this file's.
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

/// rename(2) that fails if the new name exists. By its number: not every C library has it.
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
        SLEEP,
        path,
        "the file exists, and may be what an earlier process kept",
        "Load it (BackupFile), or remove it, or choose another name.",
    )
}

fn unnamed(path: &Path, error: &io::Error) -> Error {
    FileFailed::because(
        SLEEP,
        path,
        format!("its file system has neither hard links nor a rename that replaces nothing ({error})"),
        "Nothing was lost. Use another file system, or keep the contents in host memory.",
    )
}

/// An error of the file under its temporary name, told under the name that the caller knows.
fn named(error: Error, path: &Path) -> Error {
    match error {
        Error::File(mut failed) => {
            path.clone_into(&mut failed.path);
            Error::File(failed)
        }
        other => other,
    }
}
