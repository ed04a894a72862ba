//! Memory as the CPU sees it.
//!
//! The NPU, and other processes that share the memory, may write at any time, so no reference to
//! its bytes is ever handed out: only copies in and out, single values, and atomics. Copies are
//! made of relaxed atomic accesses, a word at a time, so that two threads that use one view at once
//! race, but do not break the language's rules. Device memory is behind the device's PCI window:
//! write-combined, slow to read, and no place for atomic read-modify-write against the device.

use super::Mapping;
use crate::error::{Error, Invalid, Result};
use crate::fork::ForkGuard;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, compiler_fence};

/// A mapping's memory as the CPU sees it. While it is borrowed the mapping cannot be unmapped.
#[derive(Debug, Clone, Copy)]
pub struct HostView<'a> {
    start: NonNull<u8>,
    size: usize,
    guard: ForkGuard,
    mapping: PhantomData<&'a Mapping>,
}

// SAFETY: all access is atomic, and the memory stays mapped while the mapping is borrowed.
unsafe impl Send for HostView<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostView<'_> {}

impl<'a> HostView<'a> {
    /// Of a mapping that the CPU has access to.
    pub(super) fn new(mapping: &'a Mapping) -> HostView<'a> {
        let (address, size) = (mapping.address(), mapping.size());
        // The address is inside the SVM segment, which is mapped and far from 0. The mapping of the
        // segment exposed its provenance.
        let start =
            NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).unwrap_or(NonNull::dangling());
        let guard = mapping.inner.session().svm.guard;
        HostView { start, size: size as usize, guard, mapping: PhantomData }
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first byte. Valid as long as the mapping, in this process and not in its children;
    /// everything else is the caller's to know.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        // SAFETY: `at` checked the range.
        unsafe { copy_out(from, to) };
        Ok(())
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `at` checked the range.
        unsafe { copy_in(to, from) };
        Ok(())
    }

    /// Sets bytes.
    pub fn fill(&self, offset: usize, length: usize, value: u8) -> Result<()> {
        let to = self.at(offset, length)?;
        // SAFETY: `at` checked the range.
        unsafe { fill(to, length, value) };
        Ok(())
    }

    /// A 32-bit word as an atomic; the offset is a multiple of 4.
    pub fn atomic_u32(&self, offset: usize) -> Result<&'a AtomicU32> {
        let at = self.aligned(offset, 4)?;
        // SAFETY: in range, aligned, mapped for 'a, and only ever touched by atomics in this
        // process.
        Ok(unsafe { AtomicU32::from_ptr(at.cast()) })
    }

    /// A 64-bit word as an atomic; the offset is a multiple of 8.
    pub fn atomic_u64(&self, offset: usize) -> Result<&'a AtomicU64> {
        let at = self.aligned(offset, 8)?;
        // SAFETY: in range, aligned, mapped for 'a, and only ever touched by atomics in this
        // process.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// One volatile read of a byte: really one access of the memory, now.
    pub fn read_volatile(&self, offset: usize) -> Result<u8> {
        let at = self.at(offset, 1)?;
        // Not a volatile access of the language's, which must not race with other threads; the
        // fences keep the compiler from merging it with another.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: in range.
        let value = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        Ok(value)
    }

    /// One volatile write of a byte: really one access of the memory, now.
    pub fn write_volatile(&self, offset: usize, value: u8) -> Result<()> {
        let at = self.at(offset, 1)?;
        compiler_fence(Ordering::SeqCst);
        // SAFETY: in range.
        unsafe { AtomicU8::from_ptr(at) }.store(value, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        Ok(())
    }

    fn at(&self, offset: usize, length: usize) -> Result<*mut u8> {
        if self.guard.in_child() {
            return Err(Error::OtherProcess { process: std::process::id() });
        }
        if offset > self.size || length > self.size - offset {
            return Err(self.outside(offset, length));
        }
        // SAFETY: inside the mapping.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }

    fn aligned(&self, offset: usize, size: usize) -> Result<*mut u8> {
        if offset % size != 0 {
            return Err(Invalid::because(
                "touch memory by the CPU",
                format!("the offset {offset:#x} is not a multiple of {size}"),
                "Atomics must be aligned to their size.",
            ));
        }
        self.at(offset, size)
    }

    #[cold]
    fn outside(&self, offset: usize, length: usize) -> Error {
        Invalid::because(
            "touch memory by the CPU",
            format!("{length} bytes at offset {offset:#x} are outside of the mapping's {:#x} bytes", self.size),
            "Stay inside the mapping.",
        )
    }
}

const WORD: usize = size_of::<u64>();

/// Copies `to.len()` bytes out of shared memory.
///
/// # Safety
///
/// The bytes from `from` on must be mapped.
pub(crate) unsafe fn copy_out(from: *mut u8, to: &mut [u8]) {
    let (head, body) = split(from, to.len());
    let (first, rest) = to.split_at_mut(head);
    let mut at = from;
    let byte = |at: &mut *mut u8, to: &mut u8| {
        // SAFETY: the caller vouches for the range, of which this is one byte.
        *to = unsafe { AtomicU8::from_ptr(*at) }.load(Ordering::Relaxed);
        *at = at.wrapping_add(1);
    };
    first.iter_mut().for_each(|to| byte(&mut at, to));
    let (words, last) = rest.split_at_mut(body);
    for to in words.chunks_exact_mut(WORD) {
        // SAFETY: aligned by `split`; the caller vouches for the range.
        let word = unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Relaxed);
        to.copy_from_slice(&word.to_ne_bytes());
        at = at.wrapping_add(WORD);
    }
    last.iter_mut().for_each(|to| byte(&mut at, to));
}

/// Copies `from` into shared memory.
///
/// # Safety
///
/// The bytes from `to` on must be mapped.
pub(crate) unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    let (head, body) = split(to, from.len());
    let (first, rest) = from.split_at(head);
    let mut at = to;
    let byte = |at: &mut *mut u8, from: &u8| {
        // SAFETY: the caller vouches for the range, of which this is one byte.
        unsafe { AtomicU8::from_ptr(*at) }.store(*from, Ordering::Relaxed);
        *at = at.wrapping_add(1);
    };
    first.iter().for_each(|from| byte(&mut at, from));
    let (words, last) = rest.split_at(body);
    for from in words.chunks_exact(WORD) {
        let mut word = [0; WORD];
        word.copy_from_slice(from);
        // SAFETY: aligned by `split`; the caller vouches for the range.
        unsafe { AtomicU64::from_ptr(at.cast()) }.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        at = at.wrapping_add(WORD);
    }
    last.iter().for_each(|from| byte(&mut at, from));
}

/// Sets `length` bytes of shared memory.
///
/// # Safety
///
/// The bytes from `to` on must be mapped.
pub(crate) unsafe fn fill(to: *mut u8, length: usize, value: u8) {
    const PIECE: usize = 4096;
    let bytes = [value; PIECE];
    let mut done = 0;
    while done < length {
        let count = PIECE.min(length - done);
        // SAFETY: the caller vouches for the range, of which this is a part.
        unsafe { copy_in(to.wrapping_add(done), &bytes[..count]) };
        done += count;
    }
}

/// How many bytes lie before the first word, and how many in whole words.
fn split(address: *mut u8, length: usize) -> (usize, usize) {
    let head = address.align_offset(WORD).min(length);
    (head, (length - head) / WORD * WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_alignment_move_exactly_their_bytes() {
        for offset in 0..17 {
            for length in 0..40 {
                let mut shared: Vec<u8> = (0..64).collect();
                let start = shared.as_mut_ptr();
                let mut out = vec![0xEE; length];
                // SAFETY: 17 + 40 bytes are inside the vector, which no other thread touches.
                unsafe { copy_out(start.add(offset), &mut out) };
                assert!(out.iter().enumerate().all(|(index, &byte)| usize::from(byte) == offset + index));
                let fresh = vec![0xAA; length];
                // SAFETY: as above.
                unsafe { copy_in(start.add(offset), &fresh) };
                for (index, &byte) in shared.iter().enumerate() {
                    let inside = (offset..offset + length).contains(&index);
                    assert_eq!(byte, if inside { 0xAA } else { index as u8 });
                }
            }
        }
    }

    #[test]
    fn fills_set_exactly_their_bytes() {
        let mut shared = vec![1u8; 10_000];
        // SAFETY: inside the vector.
        unsafe { fill(shared.as_mut_ptr().add(3), 9_000, 7) };
        assert!(shared[..3].iter().chain(&shared[9_003..]).all(|&byte| byte == 1));
        assert!(shared[3..9_003].iter().all(|&byte| byte == 7));
    }
}
