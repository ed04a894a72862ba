//! The memory of clients, in another process or in the server's own.

use super::copier::Copier;
use crate::caller::{BadAddress, Memory};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZero;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

/// The memory of a thread's process.
pub struct ProcessMemory(pub i32);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress> {
        let mut done = 0;
        while done < buffer.len() {
            match self.read_some(address + done as u64, &mut buffer[done..]) {
                Ok(count) if count > 0 => done += count,
                _ => return Err(BadAddress),
            }
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        if !is_slow(bytes.as_ptr() as u64, address, bytes.len()) {
            return self.write_plainly(address, bytes);
        }
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = RefCell::default();
        }
        BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(STEP + PAGE, 0);
            // The same place in a page as the target has.
            let start = (address as usize).wrapping_sub(buffer.as_ptr() as usize) % PAGE;
            for (index, step) in bytes.chunks(STEP).enumerate() {
                let room = &mut buffer[start..start + step.len()];
                copy_in_small_steps(room, step);
                self.write_plainly(address + (index * STEP) as u64, room)?;
            }
            Ok(())
        })
    }
}

impl ProcessMemory {
    fn read_some(&self, address: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        let remote = RemoteIoVec { base: address as usize, len: buffer.len() };
        process_vm_readv(Pid::from_raw(self.0), &mut [IoSliceMut::new(buffer)], &[remote])
    }

    fn write_plainly(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let remote = RemoteIoVec { base: (address + done as u64) as usize, len: rest.len() };
            match process_vm_writev(Pid::from_raw(self.0), &[IoSlice::new(rest)], &[remote]) {
                Ok(count) if count > 0 => done += count,
                _ => return Err(BadAddress),
            }
        }
        Ok(())
    }

    /// Reads a path of the caller. Reads no page beyond its end, since the string may end just
    /// before an unmapped page.
    pub fn path(&self, address: u64) -> Option<Vec<u8>> {
        const STEP: u64 = 256;
        let mut path = Vec::new();
        while path.len() < libc::PATH_MAX as usize {
            let at = address + path.len() as u64;
            let mut buffer = [0u8; STEP as usize];
            let room = (STEP - at % STEP) as usize;
            let count = self.read_some(at, &mut buffer[..room]).ok()?;
            if count == 0 {
                return None;
            }
            match buffer[..count].iter().position(|byte| *byte == 0) {
                Some(end) => {
                    path.extend_from_slice(&buffer[..end]);
                    return Some(path);
                }
                None => path.extend_from_slice(&buffer[..count]),
            }
        }
        None
    }
}

/// Bytes that are copied by way of a buffer at a time, so few that they stay in the cache.
const STEP: usize = 128 << 10;
const PAGE: usize = 4096;

/// Whether the kernel is slow to copy from one address to another: see [`odd_targets_are_slow`].
fn is_slow(from: u64, to: u64, length: usize) -> bool {
    length > PAGE && from.wrapping_sub(to) % 32 != 0 && odd_targets_are_slow()
}

/// Whether this processor is one on which the kernel's `rep movsb` takes five times as long if only
/// the target lies at an odd multiple of 16 bytes, as large blocks of malloc do. Tried once.
fn odd_targets_are_slow() -> bool {
    static SLOW: OnceLock<bool> = OnceLock::new();
    *SLOW.get_or_init(|| {
        const LENGTH: usize = 16 * PAGE;
        let Ok(file) = memfd_create(c"ascend-try", MFdFlags::MFD_CLOEXEC).map(File::from) else { return false };
        let mut room = vec![1u8; LENGTH + 2 * PAGE];
        if nix::sys::uio::pwrite(&file, &room[..LENGTH], 0) != Ok(LENGTH) {
            return false;
        }
        let aligned = room.as_ptr().align_offset(PAGE);
        let mut best = |start: usize| {
            let times = (0..8).map(|_| {
                let begin = Instant::now();
                let _ = nix::sys::uio::pread(&file, &mut room[start..start + LENGTH], 0);
                begin.elapsed()
            });
            times.min().unwrap_or_default()
        };
        best(aligned + 16) > 2 * best(aligned)
    })
}

/// Copies without `rep movsb`, which memcpy uses for long ranges.
fn copy_in_small_steps(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_mut(1024).zip(from.chunks(1024)) {
        to.copy_from_slice(from);
    }
}

/// The memory of the server's own process, in which a client thread runs. The kernel copies an
/// argument between it and a file, whose pages the server maps; another process copies much. Both
/// take less time than process_vm_readv, and fail in the same way where memory cannot be accessed.
pub struct OwnMemory {
    file: File,
    pages: NonNull<u8>,
    copier: RefCell<Option<Copier>>,
    /// There can be no copier here.
    alone: Cell<bool>,
}

/// Size of the file.
const ROOM: usize = STEP + PAGE;

/// From how many bytes on the other process is faster than the file.
const MUCH: usize = 64 << 10;

impl OwnMemory {
    /// A new file and its mapping.
    pub fn new() -> Result<Self, Errno> {
        let file = File::from(memfd_create(c"ascend-arguments", MFdFlags::MFD_CLOEXEC)?);
        nix::unistd::ftruncate(&file, ROOM as i64)?;
        let room = NonZero::new(ROOM).ok_or(Errno::EINVAL)?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let pages = unsafe { mmap(None, room, prot, MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE, &file, 0)? };
        Ok(OwnMemory { file, pages: pages.cast(), copier: RefCell::default(), alone: Cell::new(false) })
    }

    /// Lets the other process copy; `None` if there is none.
    ///
    /// # Safety
    /// One of the ranges is valid memory of the server, and the other one is the client's.
    unsafe fn carry(&self, from: u64, to: u64, length: usize) -> Option<Result<(), BadAddress>> {
        let mut copier = self.copier.borrow_mut();
        if copier.is_none() && !self.alone.get() {
            *copier = Copier::start().ok();
            self.alone.set(copier.is_none());
        }
        // SAFETY: the caller promises it.
        let copied = unsafe { copier.as_ref()?.copy(from, to, length) };
        if !matches!(copied, Some(Ok(()))) {
            *copier = None;
        }
        copied
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it.
        let _ = unsafe { munmap(self.pages.cast(), ROOM) };
    }
}

impl Memory for OwnMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress> {
        if buffer.len() >= MUCH {
            // SAFETY: the target is the buffer.
            let carried = unsafe { self.carry(address, buffer.as_mut_ptr() as u64, buffer.len()) };
            if let Some(result) = carried {
                return result;
            }
        }
        for (index, step) in buffer.chunks_mut(STEP).enumerate() {
            self.copy_in(address + (index * STEP) as u64, step.len())?;
            // SAFETY: the mapping is ROOM bytes long, and only this thread uses it.
            unsafe { self.pages.as_ptr().copy_to_nonoverlapping(step.as_mut_ptr(), step.len()) };
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        if bytes.len() >= MUCH {
            // SAFETY: the source is the buffer.
            let carried = unsafe { self.carry(bytes.as_ptr() as u64, address, bytes.len()) };
            if let Some(result) = carried {
                return result;
            }
        }
        let start = if bytes.len() > PAGE { address as usize % PAGE } else { 0 };
        for (index, step) in bytes.chunks(STEP).enumerate() {
            // SAFETY: the mapping is ROOM bytes long, and only this thread uses it.
            let room = unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr().add(start), step.len()) };
            copy_in_small_steps(room, step);
            self.copy_out(address + (index * STEP) as u64, step.len(), start)?;
        }
        Ok(())
    }
}

impl OwnMemory {
    /// Copies memory of the client to the start of the file.
    fn copy_in(&self, address: u64, length: usize) -> Result<(), BadAddress> {
        // SAFETY: the kernel checks the addresses, which need not be valid, and only reads there.
        let count = unsafe { libc::pwrite(self.file.as_raw_fd(), address as *const c_void, length, 0) };
        if count == length as isize { Ok(()) } else { Err(BadAddress) }
    }

    /// Copies from the file to memory of the client.
    fn copy_out(&self, address: u64, length: usize, offset: usize) -> Result<(), BadAddress> {
        // SAFETY: the kernel checks the addresses, which need not be valid. The client passed them
        // for the driver to write to, as it would to a real one.
        let count = unsafe { libc::pread(self.file.as_raw_fd(), address as *mut c_void, length, offset as i64) };
        if count == length as isize { Ok(()) } else { Err(BadAddress) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> OwnMemory {
        OwnMemory::new().unwrap()
    }

    /// The same where no process can be started.
    fn alone() -> OwnMemory {
        let own = own();
        own.alone.set(true);
        own
    }

    /// Two pages, of which the second one cannot be accessed.
    fn end_of_memory() -> u64 {
        let length = NonZero::new(2 * PAGE).unwrap();
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new anonymous mapping; the first page is never unmapped.
        unsafe {
            let start = nix::sys::mman::mmap_anonymous(None, length, prot, MapFlags::MAP_PRIVATE).unwrap();
            munmap(start.byte_add(PAGE), PAGE).unwrap();
            start.as_ptr() as u64 + PAGE as u64
        }
    }

    #[test]
    fn bytes_of_every_length_and_at_every_address_are_carried() {
        let (own, alone, other) = (own(), alone(), ProcessMemory(std::process::id() as i32));
        let source: Vec<u8> =
            (0..(3 << 20) + 100).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for memory in [&own as &dyn Memory, &alone, &other] {
            for length in [1, 344, PAGE, MUCH - 1, MUCH, STEP + 1, 1 << 20, (1 << 20) + 1, 3 << 20] {
                for start in [0, 1, 16, 31] {
                    let bytes = &source[start..start + length];
                    let mut target = vec![0; length + 64];
                    memory.read(bytes.as_ptr() as u64, &mut target[start..start + length]).unwrap();
                    assert!(target[start..start + length] == *bytes, "read of {length} bytes from {start}");
                    target.fill(0);
                    memory.write(target[start..].as_mut_ptr() as u64, bytes).unwrap();
                    assert!(target[start..start + length] == *bytes, "write of {length} bytes to {start}");
                    assert!(target[start + length..].iter().all(|byte| *byte == 0), "write of {length} bytes went on");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_accessed_is_a_fault_and_the_next_copy_is_whole() {
        let end = end_of_memory();
        let bytes = vec![7u8; 1 << 20];
        let mut room = vec![0u8; 1 << 20];
        for (own, length) in [own(), alone()].iter().flat_map(|own| [2, 344, MUCH, 1 << 20].map(|length| (own, length)))
        {
            assert_eq!(own.read(end - 1, &mut room[..length]), Err(BadAddress), "{length}");
            assert_eq!(own.write(end - 1, &bytes[..length]), Err(BadAddress), "{length}");
            assert_eq!(own.read(0, &mut room[..length]), Err(BadAddress), "{length}");
            own.read(bytes.as_ptr() as u64, &mut room[..length]).unwrap();
            assert!(room[..length] == bytes[..length]);
            room.fill(0);
        }
    }
}
