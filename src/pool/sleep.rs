//! Sleep and wake: a tag gives up its memory for a while and keeps its addresses.
//!
//! A tag that falls asleep checks that nothing uses its memory and hides it from everyone else,
//! copies what is in use to a backup, and unmaps and releases all its handles. So no write can come
//! after its copy. A tag that wakes maps handles of the same sizes at the same addresses, copies
//! the contents back, and only then shows the memory. Both do everything or nothing: after an
//! error, or a panic of the caller's progress callback, the tag is as it was before. The backup is
//! kept until the tag is awake.

use super::backup_file::KeptFile;
use super::file::{Progress, load, zeroed};
use super::heap::{Heap, TagState, TakenSegments};
use super::page_cache::PageCache;
use super::segment::{Segment, Unmapped};
use super::{Pool, Tag};
use crate::bytes::Bytes;
use crate::error::{Error, OutOfMemory, Result};
use crate::kind::Page;
use crate::reserve::ReserveOptions;
use crate::trace::{self, Quiet, quiet};
use std::ops::Range;
use std::path::PathBuf;

/// Where the contents of a tag are kept while it sleeps.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// Nowhere: for contents that can be computed again.
    Nothing,
    /// In ordinary memory of this process.
    Host,
    /// In host memory of the driver. It is pinned: faster to copy, and never swapped out.
    Pinned,
    /// In a file of this name, which must not exist. It is removed when the tag is awake again, or
    /// when the pool and all its blocks are dropped. If the process ends before that, it stays, and
    /// [`BackupFile`](super::BackupFile) reads it.
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

/// The contents of used ranges, one after the other.
struct Backup {
    used: Vec<Range<u64>>,
    store: Store,
}

enum Store {
    Nothing,
    /// In chunks.
    Host(Vec<Vec<u8>>),
    Pinned(Box<Segment>),
    File(KeptFile),
}

/// Bytes that are copied at once to and from host memory.
const CHUNK: u64 = 16 << 20;

const SLEEP: &str = "put a tag to sleep";
const WAKE: &str = "wake a tag";

impl Pool {
    /// Puts a tag to sleep: releases its memory, and keeps its addresses and its blocks, which
    /// cannot be used until [`Pool::wake`]. Returns the number of released bytes.
    ///
    /// The hook for unmapping is called first. After that only this call can use the memory, also
    /// by address ([`Session::slice_at`](crate::Session::slice_at)). `progress` is called after
    /// each chunk of a copy.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] while another thread puts the tag to sleep or wakes it; [`Error::InUse`]
    /// if slices or copies of its blocks are still alive after the hook, before anything is copied;
    /// [`Error::File`] if the file cannot be written, for example because the disk is full; those
    /// of copying and unmapping. Then the tag is awake, and nothing is lost. If the kernel refuses
    /// to unmap and then refuses, twice, to map again, the tag is asleep with its backup, and the
    /// error says so.
    ///
    /// ```
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
        self.context.cache.check_process()?;
        let heap = self.heap(tag);
        let is_asleep = |state: &TagState| matches!(state, TagState::Asleep(_));
        let Some(mut change) = Transition::begin(&heap, SLEEP, is_asleep)? else { return Ok(0) };
        let used = heap.lock().blocks.used_ranges();
        let mapped = change.taken.mapped_ranges();
        if let Some(hook) = &self.context.options.segments.before_unmap {
            if !mapped.is_empty() {
                hook(&mapped);
            }
        }
        change.taken.hide(SLEEP)?;
        let backup = Backup::make(tag, &self.context.cache, &change.taken, used, keep, &mut progress)?;
        // A callback may have forked, and its child returned.
        self.context.cache.check_process()?;
        change.sleep(backup)
    }

    /// Wakes tags, all of them or none. Tags that are awake stay awake.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] with what is missing, after the free memory of all other tags was
    /// given back; [`Error::File`] if a file cannot be read any more; [`Error::Invalid`] while
    /// another thread puts one of the tags to sleep or wakes it; those of mapping and copying. Then
    /// the tags are asleep as before, with their backups.
    pub fn wake(&self, tags: &[Tag], mut progress: impl FnMut(Progress)) -> Result<()> {
        self.context.cache.check_process()?;
        match self.try_wake(tags, &mut progress) {
            // Report the missing memory, even if something else cannot be unmapped.
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
        let heaps: Vec<_> = tags.iter().filter_map(|&tag| self.existing_heap(tag)).collect();
        let mut waking = Vec::new();
        for heap in &heaps {
            waking.extend(Transition::begin(heap, WAKE, |state| matches!(state, TagState::Awake))?);
        }
        let cache = &self.context.cache;
        let cached = cache.statistics().cached;
        let total = waking.iter().filter_map(Transition::asleep).map(Asleep::size).sum();
        let mut mapped = 0;
        let woken = {
            let _quiet = quiet();
            waking.iter_mut().try_for_each(|change| change.map_handles(&mut mapped))
        };
        let woken = woken.and_then(|()| restore(&waking, progress));
        self.context.cache.check_process()?;
        match woken {
            Ok(()) => waking.into_iter().for_each(Transition::wake),
            Err(error) => {
                drop(waking);
                // What the attempt took from the device goes back to it.
                cache.trim(cached)?;
                return Err(missing(error, &tags, mapped, total));
            }
        }
        Ok(())
    }
}

/// A tag that falls asleep or wakes. Dropping it before the end undoes the change.
struct Transition<'a> {
    heap: &'a Heap,
    taken: TakenSegments<'a>,
    /// The state that follows: the old one, until the change has succeeded.
    next: TagState,
    /// Set while it is dropped. The last field: events come after the segments are returned.
    quiet: Option<Quiet>,
}

impl<'a> Transition<'a> {
    /// Keeps other threads from using the tag; `None` if it is in the state already.
    fn begin(heap: &'a Heap, operation: &'static str, is_done: fn(&TagState) -> bool) -> Result<Option<Self>> {
        let mut books = heap.lock();
        if is_done(&books.state) {
            return Ok(None);
        }
        if matches!(books.state, TagState::Changing) {
            return Err(heap.not_awake(&books.state, operation));
        }
        let next = std::mem::replace(&mut books.state, TagState::Changing);
        let taken = heap.take(books).0;
        Ok(Some(Transition { heap, taken, next, quiet: None }))
    }

    fn asleep(&self) -> Option<&Asleep> {
        match &self.next {
            TagState::Asleep(asleep) => Some(asleep),
            _ => None,
        }
    }

    /// Unmaps and releases the memory. Returns the number of released bytes.
    fn sleep(mut self, backup: Backup) -> Result<u64> {
        let _quiet = quiet();
        let (pool, tag) = (self.heap.pool.clone(), self.heap.tag);
        let handles = self.taken.segments.iter().flat_map(Segment::handles).collect();
        let (mut unmapped, mut refused) = (Vec::new(), None);
        for segment in &mut self.taken.segments {
            let mut memories = Unmapped::new();
            refused = segment.unmap(0..segment.size(), &mut memories).err();
            unmapped.push(memories);
            if refused.is_some() {
                break;
            }
        }
        if refused.is_some() {
            for (segment, memories) in self.taken.segments.iter_mut().zip(&mut unmapped) {
                *memories = segment.restore(std::mem::take(memories));
            }
        }
        let memories: Vec<_> = unmapped.into_iter().flatten().map(|(_, memory)| memory).collect();
        match refused {
            Some(error) if memories.is_empty() => return Err(error),
            // Some memory could not be mapped again. The backup has its contents.
            _ => self.next = TagState::Asleep(Asleep { handles, backup }),
        }
        drop(self);
        match refused {
            None => Ok(memories.into_iter().map(|memory| pool.cache.release(memory)).sum()),
            Some(error) => {
                memories.into_iter().for_each(|memory| pool.cache.put(memory));
                trace::error(format!("{tag}"), "a tag that should have stayed awake is asleep: it can be woken");
                Err(still_asleep(error, tag))
            }
        }
    }

    /// Maps handles of the same sizes at the same addresses, and counts their bytes.
    fn map_handles(&mut self, mapped: &mut u64) -> Result<()> {
        let TagState::Asleep(asleep) = &self.next else { return Ok(()) };
        for &(address, size) in &asleep.handles {
            let Some(segment) = self.taken.at(address) else { continue };
            segment.map_handle(address - segment.address(), size)?;
            *mapped += size;
        }
        Ok(())
    }

    /// The tag is awake, and its backup is dropped.
    fn wake(mut self) {
        let asleep = std::mem::replace(&mut self.next, TagState::Awake);
        drop(self);
        drop(asleep);
    }
}

impl Drop for Transition<'_> {
    fn drop(&mut self) {
        if self.heap.pool.cache.in_child() {
            return;
        }
        self.quiet = Some(quiet());
        match self.next {
            TagState::Awake => self.taken.show(),
            // What the kernel refuses to unmap stays for the next waking.
            _ => self.taken.segments.iter_mut().for_each(Segment::unmap_all),
        }
        self.heap.lock().state = std::mem::replace(&mut self.next, TagState::Awake);
    }
}

/// Copies the contents of waking tags back.
fn restore(waking: &[Transition<'_>], progress: &mut impl FnMut(Progress)) -> Result<()> {
    let backups = || waking.iter().filter_map(|change| Some((&change.asleep()?.backup, &change.taken)));
    let total = backups().map(|(backup, _)| backup.size()).sum();
    let mut done = 0;
    for (backup, taken) in backups() {
        backup.restore(taken, |part| progress(Progress { done: done + part, total }))?;
        done += backup.size();
    }
    Ok(())
}

/// Says that the tag is asleep although its sleep failed.
fn still_asleep(error: Error, tag: Tag) -> Error {
    match error {
        Error::Refused(mut refused) => {
            refused.object.push_str(&format!(", and what was unmapped could not be mapped again, so {tag} is asleep"));
            Error::Refused(refused)
        }
        other => other,
    }
}

/// Says how much memory is missing to wake tags.
fn missing(error: Error, tags: &[Tag], mapped: u64, total: u64) -> Error {
    let Error::OutOfMemory(mut error) = error else { return error };
    let tags: Vec<String> = tags.iter().map(Tag::to_string).collect();
    let OutOfMemory { place, asked, .. } = &mut error;
    let (tags, total_text, mapped_text) = (tags.join(", "), Bytes(total), Bytes(mapped));
    place.push_str(&format!(", waking {tags} with {total_text}, of which {mapped_text} could be mapped"));
    *asked = total - mapped;
    Error::OutOfMemory(error)
}

impl Backup {
    fn size(&self) -> u64 {
        match self.store {
            Store::Nothing => 0,
            _ => self.used.iter().map(|range| range.end - range.start).sum(),
        }
    }

    /// Copies the contents of used ranges to a backup.
    fn make(
        tag: Tag,
        cache: &PageCache,
        taken: &TakenSegments<'_>,
        used: Vec<Range<u64>>,
        keep: Keep,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Backup> {
        let total = used.iter().map(|range| range.end - range.start).sum();
        let store = match keep {
            Keep::Nothing => Store::Nothing,
            Keep::Host => {
                let mut kept = Vec::new();
                for (offset, range) in chunks(&used) {
                    let mut chunk = buffer(range.end - range.start, total)?;
                    taken.slice(&range)?.read(&mut chunk)?;
                    progress(Progress { done: offset + chunk.len() as u64, total });
                    kept.push(chunk);
                }
                Store::Host(kept)
            }
            Keep::Pinned => {
                let host = PageCache::new(&cache.session().host()?);
                let mut segment = Segment::new(&host, total.max(1))?;
                segment.ensure(0..total)?;
                for (offset, range) in chunks(&used) {
                    let size = range.end - range.start;
                    segment.slice(offset, size)?.copy_from(&taken.slice(&range)?)?;
                    progress(Progress { done: offset + size, total });
                }
                Store::Pinned(Box::new(segment))
            }
            Keep::File(path) => Store::File(KeptFile::write(&path, tag, &used, taken, progress)?),
        };
        Ok(Backup { used, store })
    }

    /// Copies the contents back, and reports how many bytes are done.
    fn restore(&self, taken: &TakenSegments<'_>, mut progress: impl FnMut(u64)) -> Result<()> {
        match &self.store {
            Store::Nothing => {}
            Store::Host(kept) => {
                for ((offset, range), chunk) in chunks(&self.used).zip(kept) {
                    taken.slice(&range)?.write(chunk)?;
                    progress(offset + chunk.len() as u64);
                }
            }
            Store::Pinned(segment) => {
                for (offset, range) in chunks(&self.used) {
                    let size = range.end - range.start;
                    taken.slice(&range)?.copy_from(&segment.slice(offset, size)?)?;
                    progress(offset + size);
                }
            }
            Store::File(kept) => {
                let mut done = 0;
                for range in &self.used {
                    let to = taken.slice(range)?;
                    load(&kept.file, kept.data_start + done, &to, |part| progress(done + part.done))?;
                    done += range.end - range.start;
                }
            }
        }
        Ok(())
    }
}

/// Cuts used ranges into chunks: the offset of each in the backup, and its addresses. No chunk
/// crosses from one reservation of a pinned backup into the next.
fn chunks(used: &[Range<u64>]) -> impl Iterator<Item = (u64, Range<u64>)> {
    let mut left = used.iter().cloned();
    let (mut range, mut offset) = (0..0, 0);
    std::iter::from_fn(move || {
        if range.is_empty() {
            range = left.next()?;
        }
        let border = ReserveOptions::MAX_SIZE - offset % ReserveOptions::MAX_SIZE;
        let size = (range.end - range.start).min(CHUNK).min(border);
        let chunk = (offset, range.start..range.start + size);
        range.start += size;
        offset += size;
        Some(chunk)
    })
}

/// A buffer for a chunk of a backup of `total` bytes.
fn buffer(size: u64, total: u64) -> Result<Vec<u8>> {
    let buffer = zeroed(size);
    Ok(buffer.ok_or_else(|| OutOfMemory {
        place: "the host, in this process, for the contents of a tag".to_owned(),
        asked: total,
        page: Page::Huge,
        free_huge: None,
        free_giant: None,
        kernel_log: String::new(),
    })?)
}
