//! Physical memory of the host and of every device, and the windows through which CPUs access it.
//!
//! A *block* is the physical memory of a handle. Each device, and the host, has one sparse memfd; a
//! block is a range of it that is never reused, so untouched memory costs nothing and freed bytes
//! cannot appear in another block. Allocated sizes are accounted, not touched pages.
//!
//! A *window* is a range of a client's segment that shows a block: a host mapping, or the BAR view
//! of device memory. The segment must be one mapping, so the client maps a memfd of its own there,
//! and its pages cannot be those of the store. Bytes are copied between the two instead. With one
//! window on a block, the window has the current bytes. With more, the store has them, and what any
//! CPU wrote is copied to all windows: before the driver accesses the block, when a window comes or
//! goes, and in between by [`Store::settle`], a part at a time. This is weaker than hardware: two
//! CPUs that access one page through two windows see each other's stores late, and two stores to
//! one byte may be seen in either order.
//!
//! A *read-only* window never has the current bytes. Nobody can take the right to write away from
//! another process, so what a CPU wrote there is found when windows are compared.

mod chunks;

use super::ranges::Ranges;
use chunks::{CHUNK, Chunks};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{Whence, lseek64};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// A block of physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u64);

/// A window on a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowId(u64);

/// Bytes are copied in pieces of this size.
const PIECE: usize = 256 << 10;

/// How much is compared between two looks at the clock.
const SETTLED_AT_ONCE: u64 = 256 << 10;

/// The number of the first pool with memory of another server.
const FIRST_FOREIGN: u64 = 1 << 31;

/// Page size of a memfd.
const GRAIN: u64 = 4096;

/// The physical memory of a device, or of the host.
struct Pool {
    file: Arc<File>,
    next: u64,
    used: u64,
    size: u64,
    /// Memory of another server: it is freed there.
    foreign: bool,
}

struct Window {
    id: WindowId,
    file: Arc<File>,
    offset: u64,
    /// What it shows of the block.
    start: u64,
    length: u64,
    read_only: bool,
    /// A CPU wrote to it although it is read-only.
    violated: Cell<bool>,
}

struct Block {
    pool: u32,
    offset: u64,
    length: u64,
    windows: Vec<Window>,
    /// Where the file that has the current bytes is known to have no holes.
    solid: RefCell<Ranges>,
}

/// All physical memory.
#[derive(Default)]
pub struct Store {
    pools: HashMap<u32, Pool>,
    blocks: HashMap<BlockId, Block>,
    last: u64,
    /// Blocks whose windows must be compared: see [`Block::is_aliased`].
    aliased: BTreeSet<BlockId>,
    /// Where the next [`Store::settle`] begins.
    cursor: Option<(BlockId, u64)>,
    chunks: Chunks,
    /// Room for bytes on their way. New room would cost more than the copy: the kernel clears it.
    room: RefCell<Vec<u8>>,
}

impl Store {
    /// Sets how much memory a device (or the host, 65) has.
    pub fn add_pool(&mut self, pool: u32, size: u64) -> Result<(), Errno> {
        if let Some(pool) = self.pools.get_mut(&pool) {
            pool.size = size;
            return Ok(());
        }
        let file = Arc::new(File::from(memfd_create("ascend-physical", MFdFlags::MFD_CLOEXEC)?));
        file.set_len(i64::MAX as u64 & !(GRAIN - 1)).map_err(errno)?;
        self.pools.insert(pool, Pool { file, next: 0, used: 0, size, foreign: false });
        Ok(())
    }

    /// Bytes in use.
    pub fn used(&self, pool: u32) -> u64 {
        self.pools.get(&pool).map_or(0, |pool| pool.used)
    }

    /// Bytes in use, of every pool.
    pub fn used_by_pool(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.pools.iter().map(|(&id, pool)| (id, pool.used))
    }

    /// New zeroed memory, or ENOMEM.
    pub fn create(&mut self, pool: u32, length: u64) -> Result<BlockId, Errno> {
        let memory = self.pools.get_mut(&pool).ok_or(Errno::ENOMEM)?;
        let used = memory.used.checked_add(length).filter(|used| *used <= memory.size).ok_or(Errno::ENOMEM)?;
        // Between two blocks is a hole, where the kernel's search for the end of data stops. A
        // block lies in as few chunks as it can.
        let alignment = length.clamp(1, CHUNK).next_power_of_two();
        let offset = memory.next.checked_next_multiple_of(alignment).ok_or(Errno::ENOMEM)?;
        let end = offset.checked_add(length).and_then(|end| end.checked_add(GRAIN));
        let end = end.filter(|end| *end < i64::MAX as u64).ok_or(Errno::ENOMEM)?;
        let block = Block { pool, offset, length, windows: Vec::new(), solid: RefCell::default() };
        memory.used = used;
        memory.next = end;
        self.last += 1;
        self.blocks.insert(BlockId(self.last), block);
        Ok(BlockId(self.last))
    }

    /// Memory of another server: a range of that server's file.
    pub fn adopt(&mut self, file: Arc<File>, offset: u64, length: u64) -> BlockId {
        self.last += 1;
        let id = BlockId(self.last);
        // Physical devices have small numbers, and each adopted block a pool of its own.
        let pool = (FIRST_FOREIGN + self.last % u64::from(u32::MAX >> 1)) as u32;
        self.pools.insert(pool, Pool { file, next: 0, used: length, size: length, foreign: true });
        self.blocks.insert(id, Block { pool, offset, length, windows: Vec::new(), solid: RefCell::default() });
        id
    }

    /// Where a block lies: its file, the offset there, and its length.
    pub fn lies_in(&self, block: BlockId) -> Option<(Arc<File>, u64, u64)> {
        let (block, pool) = self.find(block).ok()?;
        Some((pool.file.clone(), block.offset, block.length))
    }

    /// Bytes of a block, if there is such a block.
    pub fn length(&self, block: BlockId) -> Option<u64> {
        self.blocks.get(&block).map(|block| block.length)
    }

    /// Frees everything from `length` on.
    pub fn shrink(&mut self, block: BlockId, length: u64) {
        let Some(block) = self.blocks.get_mut(&block).filter(|block| block.length > length) else { return };
        let Some(pool) = self.pools.get_mut(&block.pool) else { return };
        punch(&pool.file, block.offset + length, block.length - length);
        pool.used -= block.length - length;
        block.length = length;
    }

    /// Frees the whole block. Windows on it become holes.
    pub fn free(&mut self, block: BlockId) {
        let Some(gone) = self.blocks.remove(&block) else { return };
        self.aliased.remove(&block);
        for window in gone.windows {
            self.chunks.forget(&window.file, window.offset, window.length);
            punch(&window.file, window.offset, window.length);
        }
        let Some(pool) = self.pools.get_mut(&gone.pool) else { return };
        if pool.foreign {
            self.chunks.forget(&pool.file, gone.offset, gone.length);
            self.pools.remove(&gone.pool);
        } else {
            punch(&pool.file, gone.offset, gone.length);
            pool.used -= gone.length;
        }
    }

    /// Shows a block from `start` on in a client's file.
    pub fn show(
        &mut self,
        id: BlockId,
        start: u64,
        file: Arc<File>,
        offset: u64,
        length: u64,
    ) -> Result<WindowId, Errno> {
        self.last += 1;
        let window = WindowId(self.last);
        let block = self.blocks.get_mut(&id).ok_or(Errno::EINVAL)?;
        let pool = self.pools.get(&block.pool).ok_or(Errno::EINVAL)?;
        match block.sole() {
            // From now on the store has the current bytes.
            Some(only) => carry_range(&only.file, only.offset, &pool.file, block.offset + only.start, only.length)?,
            None => block.settle(pool)?,
        }
        block.solid.take();
        punch(&file, offset, length);
        carry_data(&pool.file, block.offset + start, &file, offset, length)?;
        let violated = Cell::new(false);
        block.windows.push(Window { id: window, file, offset, start, length, read_only: false, violated });
        if block.is_aliased() {
            self.aliased.insert(id);
        }
        Ok(window)
    }

    /// Makes a window read-only that was shown just now.
    pub fn protect(&mut self, id: BlockId, window: WindowId) {
        let Some(block) = self.blocks.get_mut(&id) else { return };
        if let Some(window) = block.windows.iter_mut().find(|it| it.id == window) {
            window.read_only = true;
            block.solid.take();
            self.aliased.insert(id);
        }
    }

    /// Whether a CPU was found to have written to a read-only window since the last call.
    pub fn take_violation(&self, id: BlockId, window: WindowId) -> bool {
        let mut windows = self.blocks.get(&id).into_iter().flat_map(|block| &block.windows);
        windows.any(|it| it.id == window && it.violated.take())
    }

    /// Compares all windows on a block.
    pub fn settle_block(&self, id: BlockId) {
        if let Ok((block, pool)) = self.find(id) {
            if block.is_aliased() {
                let _ = block.settle(pool);
            }
        }
    }

    /// Ends a window; its place in the client's file becomes a hole. Returns false if there is no
    /// such window, or no block any more.
    pub fn hide(&mut self, id: BlockId, window: WindowId) -> bool {
        let Some(block) = self.blocks.get_mut(&id) else { return false };
        let Some(pool) = self.pools.get(&block.pool) else { return false };
        let Some(index) = block.windows.iter().position(|it| it.id == window) else { return false };
        if let Some(only) = block.sole() {
            let length = only.length.min(block.length.saturating_sub(only.start));
            // This fails only if the real host is out of memory. The bytes are lost then.
            let _ = carry_range(&only.file, only.offset, &pool.file, block.offset + only.start, length);
        } else {
            let _ = block.settle(pool);
        }
        block.solid.take();
        let window = block.windows.remove(index);
        if !block.is_aliased() {
            // A single window that can be written has the current bytes of what it shows from now
            // on, the store the rest.
            self.aliased.remove(&id);
        }
        self.chunks.forget(&window.file, window.offset, window.length);
        punch(&window.file, window.offset, window.length);
        true
    }

    /// Whether some block has windows that must be compared.
    pub fn is_aliased(&self) -> bool {
        !self.aliased.is_empty()
    }

    /// Copies what CPUs wrote to all windows on the same memory, from where the last call ended
    /// until `deadline`, and at most once for each block.
    pub fn settle(&mut self, deadline: Instant) {
        let (first, mut offset) = self.cursor.take().unwrap_or((BlockId(0), 0));
        let after = self.aliased.range(first..).chain(self.aliased.range(..first));
        for &id in after {
            let Ok((block, pool)) = self.find(id) else { continue };
            if id != first {
                offset = 0;
            }
            while offset < block.length {
                let length = SETTLED_AT_ONCE.min(block.length - offset);
                let _ = block.settle_range(pool, offset, length);
                offset += length;
                if Instant::now() >= deadline {
                    self.cursor = Some((id, offset));
                    return;
                }
            }
        }
    }

    /// Calls `each` with the bytes of a range, part after part. The first number is the offset in
    /// the range.
    pub fn read_with<E: From<Errno>>(
        &self,
        id: BlockId,
        offset: u64,
        length: u64,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.access(id, offset, length, Access::Read, |at, part| {
            // SAFETY: see `access`. A CPU may change the bytes at any time; nothing depends on
            // their values.
            each(at, unsafe { part.as_ref() })
        })
    }

    /// Calls `each` to write the bytes of a range, part after part.
    pub fn write_with<E: From<Errno>>(
        &self,
        id: BlockId,
        offset: u64,
        length: u64,
        mut each: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.access(id, offset, length, Access::Write, |at, mut part| {
            // SAFETY: see `access`. A CPU may access the bytes at any time; nothing depends on
            // their values.
            each(at, unsafe { part.as_mut() })
        })
    }

    /// Calls `each` with the parts of a range: mapped, or copies of them in a buffer. A part is
    /// valid during the call: few others are used meanwhile, so it stays mapped.
    fn access<E: From<Errno>>(
        &self,
        id: BlockId,
        offset: u64,
        length: u64,
        access: Access,
        mut each: impl FnMut(u64, NonNull<[u8]>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < length {
            let at = offset + done;
            if let Some((bytes, count)) = self.mapped(id, at, length - done) {
                each(done, NonNull::slice_from_raw_parts(bytes, count))?;
                done += count as u64;
                continue;
            }
            let count = (length - done).min(PIECE as u64);
            let mut room = self.room.take();
            room.resize(PIECE, 0);
            let bytes = &mut room[..count as usize];
            let result = match access {
                Access::Read => self.read(id, at, bytes).map_err(E::from).and_then(|()| each(done, bytes.into())),
                Access::Write => {
                    let written = each(done, NonNull::from(&mut *bytes));
                    written.and_then(|()| self.write(id, at, bytes).map_err(E::from))
                }
            };
            self.room.replace(room);
            result?;
            done += count;
        }
        Ok(())
    }

    /// The file that has the current byte at an offset of a block, the offset in the file, and
    /// where in the block the next part begins, which another file has. `None` if several have it.
    fn place(&self, id: BlockId, at: u64) -> Option<(&Arc<File>, u64, u64)> {
        let (block, pool) = self.find(id).ok()?;
        let stored = |end: u64| Some((&pool.file, block.offset + at, end));
        match block.sole() {
            None if block.is_aliased() => None,
            Some(only) if at < only.start => stored(only.start),
            Some(only) if at < only.start + only.length => Some((&only.file, only.place(at), only.start + only.length)),
            _ => stored(block.length),
        }
    }

    /// The current bytes at an offset of a block, mapped. `None` if several files have them or each
    /// a part, and for holes: a read by mapping would fill them, and a write would take a page
    /// fault for each page. Nothing else depends on where holes are, so it does no harm that a
    /// program can make some in its own file.
    fn mapped(&self, id: BlockId, at: u64, length: u64) -> Option<(NonNull<u8>, usize)> {
        let (file, offset, end) = self.place(id, at)?;
        if at + length > end {
            return None;
        }
        let block = self.blocks.get(&id)?;
        if !block.solid.borrow().contains(&(at..at + length)) {
            let hole = lseek64(&**file, offset as i64, Whence::SeekHole).map_or(u64::MAX, |hole| hole as u64);
            let solid = at..end.min(at.saturating_add(hole.saturating_sub(offset)));
            if solid.end < at + length {
                return None;
            }
            block.solid.borrow_mut().insert(solid);
        }
        self.chunks.at(file, offset, length)
    }

    /// Reads from a block.
    pub fn read(&self, id: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        let (block, pool) = self.find(id)?;
        if let Some(only) = block.sole() {
            let part = only.part(offset, buffer.len());
            if part.len() < buffer.len() {
                pool.file.read_exact_at(buffer, block.offset + offset).map_err(errno)?;
            }
            let place = only.place(offset + part.start as u64);
            return only.file.read_exact_at(&mut buffer[part], place).map_err(errno);
        }
        if block.is_aliased() {
            block.settle_range(pool, offset, buffer.len() as u64)?;
        }
        pool.file.read_exact_at(buffer, block.offset + offset).map_err(errno)
    }

    /// Writes to a block.
    pub fn write(&self, id: BlockId, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let (block, pool) = self.find(id)?;
        if let Some(only) = block.sole() {
            if only.part(offset, bytes.len()).len() < bytes.len() {
                pool.file.write_all_at(bytes, block.offset + offset).map_err(errno)?;
            }
            return only.write(offset, bytes);
        }
        if block.is_aliased() {
            block.settle_range(pool, offset, bytes.len() as u64)?;
        }
        pool.file.write_all_at(bytes, block.offset + offset).map_err(errno)?;
        block.windows.iter().try_for_each(|window| window.write(offset, bytes))
    }

    /// Sets all bytes of a range.
    pub fn fill(&self, id: BlockId, offset: u64, length: u64, value: u8) -> Result<(), Errno> {
        if value == 0 {
            // Holes read as zeros.
            let (block, pool) = self.find(id)?;
            if block.is_aliased() {
                block.settle(pool)?;
            }
            block.solid.take();
            punch(&pool.file, block.offset + offset, length);
            for window in &block.windows {
                let part = window.part(offset, length as usize);
                punch(&window.file, window.place(offset + part.start as u64), part.len() as u64);
            }
            return Ok(());
        }
        let bytes = vec![value; length.min(PIECE as u64) as usize];
        let mut done = 0;
        while done < length {
            let piece = (length - done).min(PIECE as u64);
            self.write(id, offset + done, &bytes[..piece as usize])?;
            done += piece;
        }
        Ok(())
    }

    fn find(&self, id: BlockId) -> Result<(&Block, &Pool), Errno> {
        let block = self.blocks.get(&id).ok_or(Errno::EFAULT)?;
        Ok((block, self.pools.get(&block.pool).ok_or(Errno::EFAULT)?))
    }
}

impl Window {
    /// Which of `length` bytes from `offset` of the block this window shows.
    fn part(&self, offset: u64, length: usize) -> Range<usize> {
        let within = |at: u64| at.saturating_sub(offset).min(length as u64) as usize;
        within(self.start)..within(self.start + self.length)
    }

    /// Where a byte of the block is in the file, if this window shows it.
    fn place(&self, inside: u64) -> u64 {
        self.offset + inside.saturating_sub(self.start)
    }

    /// Writes what this window shows of the bytes at `offset` of the block.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let part = self.part(offset, bytes.len());
        let place = self.place(offset + part.start as u64);
        self.file.write_all_at(&bytes[part], place).map_err(errno)
    }
}

impl Block {
    /// The window that has the current bytes of what it shows.
    fn sole(&self) -> Option<&Window> {
        match self.windows.as_slice() {
            [only] if !only.read_only => Some(only),
            _ => None,
        }
    }

    /// Whether the store has the current bytes although there are windows.
    fn is_aliased(&self) -> bool {
        !self.windows.is_empty() && self.sole().is_none()
    }

    /// Copies what CPUs wrote in any window to the store and to all other windows.
    fn settle(&self, pool: &Pool) -> Result<(), Errno> {
        self.settle_range(pool, 0, self.length)
    }

    fn settle_range(&self, pool: &Pool, offset: u64, length: u64) -> Result<(), Errno> {
        thread_local! {
            static ROOM: RefCell<Vec<u8>> = RefCell::default();
        }
        ROOM.with_borrow_mut(|room| {
            room.resize(2 * PIECE, 0);
            let (seen, known) = room.split_at_mut(PIECE);
            self.settle_with(pool, offset, length, seen, known)
        })
    }

    fn settle_with(
        &self,
        pool: &Pool,
        offset: u64,
        length: u64,
        seen: &mut [u8],
        known: &mut [u8],
    ) -> Result<(), Errno> {
        for window in &self.windows {
            let part = window.part(offset, length as usize);
            let first = window.place(offset + part.start as u64);
            for_each_piece(&window.file, first..first + part.len() as u64, false, |at, length| {
                let inside = window.start + (at - window.offset);
                let (seen, known) = (&mut seen[..length], &mut known[..length]);
                window.file.read_exact_at(seen, at).map_err(errno)?;
                pool.file.read_exact_at(known, self.offset + inside).map_err(errno)?;
                if seen == known {
                    return Ok(());
                }
                if window.read_only {
                    window.violated.set(true);
                    return Ok(());
                }
                for (start, end) in differences(seen, known) {
                    let bytes = &seen[start..end];
                    let inside = inside + start as u64;
                    pool.file.write_all_at(bytes, self.offset + inside).map_err(errno)?;
                    let mut others = self.windows.iter().filter(|other| other.id != window.id);
                    others.try_for_each(|other| other.write(inside, bytes))?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// The runs of bytes in which two buffers differ.
fn differences(one: &[u8], other: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    // Most of a piece is equal: skip it in large steps.
    const STEP: usize = 64;
    for (index, (a, b)) in one.chunks(STEP).zip(other.chunks(STEP)).enumerate() {
        if a == b {
            continue;
        }
        for (at, _) in a.iter().zip(b).enumerate().filter(|(_, (a, b))| a != b) {
            let at = index * STEP + at;
            match runs.last_mut() {
                Some((_, end)) if *end == at => *end += 1,
                _ => runs.push((at, at + 1)),
            }
        }
    }
    runs
}

/// Copies data and holes.
fn carry_range(from: &File, from_offset: u64, to: &File, to_offset: u64, length: u64) -> Result<(), Errno> {
    punch(to, to_offset, length);
    carry_data(from, from_offset, to, to_offset, length)
}

/// Copies to a range that is a hole. Pages of zeros stay holes.
fn carry_data(from: &File, from_offset: u64, to: &File, to_offset: u64, length: u64) -> Result<(), Errno> {
    const PAGE: usize = GRAIN as usize;
    let mut buffer = Vec::new();
    for_each_piece(from, from_offset..from_offset + length, false, |at, length| {
        buffer.resize(length, 0);
        from.read_exact_at(&mut buffer, at).map_err(errno)?;
        let target = to_offset + (at - from_offset);
        let full = |page: &&[u8]| **page != [0; PAGE][..page.len()];
        if buffer.chunks(PAGE).all(|page| full(&page)) {
            return to.write_all_at(&buffer, target).map_err(errno);
        }
        let mut pages = buffer.chunks(PAGE).enumerate().filter(|(_, page)| full(page));
        pages.try_for_each(|(index, page)| to.write_all_at(page, target + (index * PAGE) as u64)).map_err(errno)
    })
}

/// What is done with the bytes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// Calls `each` for pieces that together have all data of a range. Without `exact` they may have
/// holes in them: to say where data end, the kernel looks at each page until there, perhaps far
/// beyond the range.
pub fn for_each_piece(
    file: &File,
    range: Range<u64>,
    exact: bool,
    mut each: impl FnMut(u64, usize) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut at = range.start;
    let mut hole = at;
    while at < range.end {
        if at >= hole {
            // ENXIO: no data after this offset.
            let Ok(data) = lseek64(file, at as i64, Whence::SeekData) else { return Ok(()) };
            at = data as u64;
            if at >= range.end {
                return Ok(());
            }
            hole = match exact {
                true => lseek64(file, data, Whence::SeekHole).map_or(range.end, |hole| hole as u64).max(at + 1),
                false => at + PIECE as u64,
            };
        }
        let length = (hole.min(range.end) - at).min(PIECE as u64);
        each(at, length as usize)?;
        at += length;
    }
    Ok(())
}

/// Punches a hole. A failure only wastes memory, or leaves bytes that the next owner of the address
/// overwrites first.
pub fn punch(file: &File, offset: u64, length: u64) {
    if length != 0 {
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let _ = fallocate(file, mode, offset as i64, length as i64);
    }
}

fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::Random;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    fn store() -> Store {
        let mut store = Store::default();
        store.add_pool(0, 8 * MIB).unwrap();
        store
    }

    fn client() -> Arc<File> {
        let file = File::from(memfd_create("client", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(1 << 40).unwrap();
        Arc::new(file)
    }

    fn byte(file: &File, offset: u64) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        byte[0]
    }

    #[test]
    fn memory_runs_out_and_comes_back() {
        let mut store = store();
        let block = store.create(0, 6 * MIB).unwrap();
        assert_eq!(store.create(0, 4 * MIB), Err(Errno::ENOMEM));
        store.shrink(block, 2 * MIB);
        let other = store.create(0, 6 * MIB).unwrap();
        store.free(block);
        store.free(other);
        assert_eq!(store.used(0), 0);
    }

    #[test]
    fn a_new_block_never_shows_old_bytes() {
        let mut store = store();
        let block = store.create(0, 8 * MIB).unwrap();
        store.write(block, 0, b"secret").unwrap();
        store.free(block);
        let block = store.create(0, 8 * MIB).unwrap();
        let mut bytes = [1; 6];
        store.read(block, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
    }

    #[test]
    fn one_window_is_the_memory_itself() {
        let mut store = store();
        let client = client();
        let block = store.create(0, 4 * MIB).unwrap();
        store.write(block, MIB, b"before").unwrap();
        store.write(block, 3 * MIB, b"beyond").unwrap();
        let window = store.show(block, 0, client.clone(), 64 * MIB, 2 * MIB).unwrap();
        assert_eq!(byte(&client, 65 * MIB), b'b');
        client.write_all_at(b"by CPU", 65 * MIB).unwrap();
        let mut bytes = [0; 6];
        store.read(block, MIB, &mut bytes).unwrap();
        assert_eq!(&bytes, b"by CPU");
        // A range that leaves the window comes from both.
        store.write(block, 2 * MIB - 3, b"border").unwrap();
        store.read(block, 2 * MIB - 3, &mut bytes).unwrap();
        assert_eq!(&bytes, b"border");
        store.hide(block, window);
        assert_eq!(byte(&client, 65 * MIB), 0);
        store.read(block, MIB, &mut bytes).unwrap();
        assert_eq!(&bytes, b"by CPU");
        store.read(block, 3 * MIB, &mut bytes).unwrap();
        assert_eq!(&bytes, b"beyond");
    }

    #[test]
    fn two_windows_on_one_block_agree_after_settling() {
        let mut store = store();
        let (one, two) = (client(), client());
        let block = store.create(0, 2 * MIB).unwrap();
        let first = store.show(block, 0, one.clone(), 0, 2 * MIB).unwrap();
        one.write_all_at(b"one", 100).unwrap();
        let second = store.show(block, 0, two.clone(), MIB, 2 * MIB).unwrap();
        assert_eq!(byte(&two, MIB + 100), b'o');
        two.write_all_at(b"two", MIB + 5000).unwrap();
        one.write_all_at(b"x", 200).unwrap();
        assert!(store.is_aliased());
        store.settle(Instant::now() + Duration::from_secs(60));
        assert_eq!(byte(&one, 5000), b't');
        assert_eq!(byte(&two, MIB + 200), b'x');
        // Bytes that the driver writes are seen by both, and its reads see what either wrote last.
        store.write(block, 7, b"d").unwrap();
        assert_eq!((byte(&one, 7), byte(&two, MIB + 7)), (b'd', b'd'));
        one.write_all_at(b"e", 7).unwrap();
        let mut bytes = [0];
        store.read(block, 7, &mut bytes).unwrap();
        assert_eq!(bytes, *b"e");
        store.hide(block, first);
        assert!(!store.is_aliased());
        two.write_all_at(b"z", MIB).unwrap();
        store.hide(block, second);
        store.read(block, 0, &mut bytes).unwrap();
        assert_eq!(bytes, *b"z");
    }

    #[test]
    fn a_byte_set_to_zero_by_a_cpu_is_carried_too() {
        let mut store = store();
        let (one, two) = (client(), client());
        let block = store.create(0, 2 * MIB).unwrap();
        store.write(block, 0, &[9; 8]).unwrap();
        store.show(block, 0, one.clone(), 0, 2 * MIB).unwrap();
        store.show(block, 0, two.clone(), 0, 2 * MIB).unwrap();
        one.write_all_at(&[0], 3).unwrap();
        store.settle(Instant::now() + Duration::from_secs(60));
        assert_eq!(byte(&two, 3), 0);
        assert_eq!(byte(&two, 4), 9);
    }

    #[test]
    fn whatever_is_shown_hidden_and_written_everyone_sees_the_same() {
        for seed in 1..=8 {
            let mut random = Random::new(seed);
            let mut store = store();
            let files: Vec<Arc<File>> = (0..3).map(|_| client()).collect();
            const SIZE: u64 = 64 << 10;
            let block = store.create(0, SIZE).unwrap();
            let mut truth = vec![0u8; SIZE as usize];
            // Windows by their id: file, place, start in the block, length.
            let mut windows: Vec<(WindowId, usize, u64, u64, u64)> = Vec::new();
            for step in 0..400 {
                let at = random.below(SIZE);
                let bytes = vec![random.below(256) as u8; 1 + random.below((SIZE - at).min(9000)) as usize];
                match random.below(8) {
                    0 if windows.len() < 4 => {
                        let (file, start) = (random.below(3) as usize, 4096 * random.below(SIZE / 4096));
                        let length = 4096 * (1 + random.below((SIZE - start) / 4096));
                        let place = SIZE * (1 + windows.iter().map(|it| it.2 / SIZE).max().unwrap_or(0));
                        let window = store.show(block, start, files[file].clone(), place, length).unwrap();
                        windows.push((window, file, place, start, length));
                    }
                    1 if !windows.is_empty() => {
                        let (window, file, place, _, length) =
                            windows.swap_remove(random.below(windows.len() as u64) as usize);
                        store.hide(block, window);
                        let mut left = vec![1; length as usize];
                        files[file].read_exact_at(&mut left, place).unwrap();
                        assert!(left.iter().all(|byte| *byte == 0), "seed {seed}, step {step}: bytes are left");
                    }
                    2 => {
                        store.fill(block, at, bytes.len() as u64, bytes[0]).unwrap();
                        truth[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                    }
                    3 => {
                        match random.below(2) {
                            0 => store.write(block, at, &bytes).unwrap(),
                            _ => written_by_parts(&store, block, at, &bytes),
                        }
                        truth[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                    }
                    4 => {
                        let mut seen = bytes.clone();
                        match random.below(2) {
                            0 => store.read(block, at, &mut seen).unwrap(),
                            _ => seen = read_by_parts(&store, block, at, bytes.len() as u64),
                        }
                        assert!(seen == truth[at as usize..at as usize + seen.len()], "seed {seed}, step {step}: read");
                    }
                    5 if windows.len() == 1 => {
                        // A program that makes a hole in its own file.
                        let (_, file, place, start, length) = windows[0];
                        let (from, until) = (4096 * random.below(length / 4096), length);
                        punch(&files[file], place + from, until - from);
                        truth[(start + from) as usize..(start + until) as usize].fill(0);
                    }
                    _ if !windows.is_empty() => {
                        // One CPU stores at a time, and the windows settle before the next one
                        // does.
                        let (_, file, place, start, length) = windows[random.below(windows.len() as u64) as usize];
                        let bytes = &bytes[..bytes.len().min(length.saturating_sub(at) as usize)];
                        files[file].write_all_at(bytes, place + at).unwrap();
                        let shown = &mut truth[start as usize..][..length as usize];
                        shown.iter_mut().skip(at as usize).zip(bytes).for_each(|(truth, byte)| *truth = *byte);
                        store.settle(Instant::now() + Duration::from_secs(60));
                    }
                    _ => {}
                }
                for (_, file, place, start, length) in &windows {
                    let mut seen = vec![0; *length as usize];
                    files[*file].read_exact_at(&mut seen, *place).unwrap();
                    assert!(seen == truth[*start as usize..][..seen.len()], "seed {seed}, step {step}: a window");
                }
            }
            store.free(block);
            assert!(!store.is_aliased());
        }
    }

    /// What the driver's own accesses use: mapped parts, and copies of the rest.
    fn written_by_parts(store: &Store, block: BlockId, at: u64, bytes: &[u8]) {
        let copied = |from: u64, part: &mut [u8]| {
            part.copy_from_slice(&bytes[from as usize..][..part.len()]);
            Ok::<_, Errno>(())
        };
        store.write_with(block, at, bytes.len() as u64, copied).unwrap();
    }

    fn read_by_parts(store: &Store, block: BlockId, at: u64, length: u64) -> Vec<u8> {
        let mut seen = Vec::new();
        let read = |_, part: &[u8]| {
            seen.extend_from_slice(part);
            Ok::<_, Errno>(())
        };
        store.read_with(block, at, length, read).unwrap();
        seen
    }

    #[test]
    fn the_end_of_a_blocks_data_is_looked_for_once_and_in_the_block_alone() {
        let mut store = Store::default();
        store.add_pool(0, 32 * MIB).unwrap();
        let blocks = [6 * MIB, 2 * MIB, 3 * GRAIN, 2 * MIB].map(|length| store.create(0, length).unwrap());
        for block in blocks {
            let length = store.length(block).unwrap();
            store.fill(block, 0, length, 7).unwrap();
        }
        for block in blocks {
            let length = store.length(block).unwrap();
            let (offset, file) = (store.blocks[&block].offset, &store.pools[&0].file);
            assert_eq!(lseek64(&**file, offset as i64, Whence::SeekHole), Ok((offset + length) as i64));
            assert!(store.mapped(block, GRAIN, GRAIN).is_some());
            assert!(store.blocks[&block].solid.borrow().contains(&(GRAIN..length)));
            assert_eq!(read_by_parts(&store, block, 0, length), vec![7; length as usize]);
            // No block is cut by the border of a chunk without need.
            assert!(offset / CHUNK == (offset + length - 1) / CHUNK || length > CHUNK);
        }
        // A hole ends it, and a window begins anew.
        store.fill(blocks[0], 2 * MIB, GRAIN, 0).unwrap();
        assert!(store.mapped(blocks[0], 0, 2 * MIB).is_some());
        assert!(store.mapped(blocks[0], 0, 2 * MIB + 1).is_none());
        let window = store.show(blocks[0], MIB, client(), 0, 2 * MIB).unwrap();
        assert!(store.mapped(blocks[0], 0, MIB).is_some());
        assert!(store.mapped(blocks[0], 0, MIB + 1).is_none(), "two files have it");
        assert!(store.mapped(blocks[0], MIB, MIB).is_some());
        assert!(store.mapped(blocks[0], 2 * MIB, GRAIN).is_none(), "a hole in the window");
        assert!(store.mapped(blocks[0], 3 * MIB, 3 * MIB).is_some());
        store.hide(blocks[0], window);
        assert!(store.mapped(blocks[0], 2 * MIB, GRAIN).is_none(), "a hole in the block");
        assert!(store.mapped(blocks[0], 5 * MIB, MIB).is_some());
        // Zeros that were written are data, but they are not carried between block and window.
        let (block, client) = (blocks[1], client());
        store.write(block, 0, &[0; 1 << 20]).unwrap();
        assert!(store.mapped(block, 0, MIB).is_some());
        let window = store.show(block, 0, client.clone(), 0, 2 * MIB).unwrap();
        assert!(store.mapped(block, 0, MIB).is_none());
        client.write_all_at(&[0; 1 << 20], 0).unwrap();
        assert!(store.mapped(block, 0, MIB).is_some());
        store.hide(block, window);
        assert!(store.mapped(block, 0, MIB).is_none());
    }
}
