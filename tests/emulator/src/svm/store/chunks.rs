//! Parts of the memfds that the server has mapped, so that the kernel copies between them and a
//! client's memory in one step.
//!
//! Only a few parts are kept, the last used ones: a mapping counts against the limits of the
//! process, which clients share with the server in tests, and mlockall would fill it with pages.

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::Arc;

/// Size and alignment of a part.
pub const CHUNK: u64 = 4 << 20;

/// How many parts stay mapped.
const KEPT: usize = 256;

struct Chunk {
    file: Arc<File>,
    start: u64,
    bytes: NonNull<u8>,
}

// SAFETY: the mapping belongs to the value, whichever thread has it.
unsafe impl Send for Chunk {}

impl Chunk {
    fn new(file: &Arc<File>, start: u64) -> Option<Self> {
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let length = NonZero::new(CHUNK as usize)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let bytes = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, file, start as i64) }.ok()?;
        let chunk = Chunk { file: file.clone(), start, bytes: bytes.cast() };
        // SAFETY: changes a flag of the new mapping. A forked client has no use for it.
        unsafe { madvise(bytes, CHUNK as usize, MmapAdvise::MADV_DONTFORK) }.ok()?;
        Some(chunk)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and nothing refers to it.
        let _ = unsafe { munmap(self.bytes.cast(), CHUNK as usize) };
    }
}

/// The mapped parts, the last used one first.
#[derive(Default)]
pub struct Chunks(RefCell<VecDeque<Chunk>>);

impl Chunks {
    /// The byte at an offset of a file, and how many bytes from there on are mapped; at most
    /// `length`. It is valid until [`KEPT`] other parts have been used, or the part is forgotten.
    pub fn at(&self, file: &Arc<File>, offset: u64, length: u64) -> Option<(NonNull<u8>, usize)> {
        let mut kept = self.0.borrow_mut();
        let (start, inside) = (offset / CHUNK * CHUNK, offset % CHUNK);
        let found = kept.iter().position(|chunk| chunk.start == start && Arc::ptr_eq(&chunk.file, file));
        let chunk = match found {
            Some(index) => kept.remove(index)?,
            None => Chunk::new(file, start)?,
        };
        // SAFETY: the offset lies in the mapping.
        let at = unsafe { chunk.bytes.add(inside as usize) };
        kept.push_front(chunk);
        kept.truncate(KEPT);
        Some((at, length.min(CHUNK - inside) as usize))
    }

    /// Unmaps the parts of a range of a file.
    pub fn forget(&mut self, file: &Arc<File>, offset: u64, length: u64) {
        let apart = |chunk: &Chunk| chunk.start >= offset + length || chunk.start + CHUNK <= offset;
        self.0.borrow_mut().retain(|chunk| !Arc::ptr_eq(&chunk.file, file) || apart(chunk));
    }
}
