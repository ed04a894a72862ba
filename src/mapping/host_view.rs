//! Memory as the CPU sees it.
//!
//! The NPU, and other processes that share the memory, may write it at any time. So a view gives
//! out no references, only copies in and out and single numbers. None of these is a Rust access
//! (`shared_memory.rs` has the contract): threads may use one view at once, in any mix of sizes,
//! and get whole numbers, torn copies and no undefined behaviour.
//!
//! Device memory is behind the device's PCI window: it is write-combined and slow to read, and does
//! not support atomic read-modify-write, so there is none here.

use super::Mapping;
use super::shared_memory::{Access, copy_in, copy_out, fill};
use crate::error::{Invalid, Result};
use crate::fork::ForkGuard;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A mapping's memory as the CPU sees it. It borrows the mapping, which cannot be unmapped
/// meanwhile.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::Session;
///
/// let session = Session::open()?;
/// let memory = session.host()?.create(2 << 20)?;
/// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
/// let view = mapping.host_view()?;
/// view.write(8, b"hello")?;
/// view.store_u32(0, 5)?;
/// assert_eq!(view.load_u32(0)?, 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct HostView<'a> {
    start: NonNull<u8>,
    size: usize,
    guard: ForkGuard,
    mapping: PhantomData<&'a Mapping>,
}

// SAFETY: no access is a Rust access, and the memory stays mapped while the mapping is borrowed.
unsafe impl Send for HostView<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostView<'_> {}

const OPERATION: &str = "access memory by the CPU";

impl<'a> HostView<'a> {
    /// The view of a mapping that the CPU has access to.
    pub(super) fn new(mapping: &'a Mapping) -> HostView<'a> {
        let (address, size) = (mapping.address(), mapping.size());
        // The address is inside the SVM segment, which is mapped and far from 0. The mapping of the
        // segment exposed its provenance.
        let start =
            NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).unwrap_or(NonNull::dangling());
        let guard = mapping.inner.session().guard;
        HostView { start, size: size as usize, guard, mapping: PhantomData }
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first byte. Valid as long as the mapping, in this process and not in its children.
    ///
    /// Accesses through it are Rust accesses to memory that others may write: use volatile ones, or
    /// atomics of one size for each place, and none while another thread uses a view of the same
    /// bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes out.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping,
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a child of the process that made it.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        // SAFETY: `at` checked the range.
        unsafe { copy_out(from, to) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping,
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a child of the process that made it.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `at` checked the range.
        unsafe { copy_in(to, from) };
        Ok(())
    }

    /// Sets bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping,
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a child of the process that made it.
    pub fn fill(&self, offset: usize, length: usize, value: u8) -> Result<()> {
        let to = self.at(offset, length)?;
        // SAFETY: `at` checked the range.
        unsafe { fill(to, length, value) };
        Ok(())
    }

    /// Loads a byte, by one access. Later accesses are not done before it (acquire).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping.
    pub fn load_u8(&self, offset: usize) -> Result<u8> {
        self.load(offset)
    }

    /// Stores a byte, by one access. Earlier accesses are done before it (release).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping.
    pub fn store_u8(&self, offset: usize, value: u8) -> Result<()> {
        self.store(offset, value)
    }

    /// Loads 32 bits at a multiple of 4, as [`HostView::load_u8`] does: never a torn number.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping or not aligned.
    pub fn load_u32(&self, offset: usize) -> Result<u32> {
        self.load(offset)
    }

    /// Stores 32 bits at a multiple of 4, as [`HostView::store_u8`] does: never a torn number.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping or not aligned.
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<()> {
        self.store(offset, value)
    }

    /// Loads 64 bits at a multiple of 8, as [`HostView::load_u8`] does: never a torn number.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping or not aligned.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        self.load(offset)
    }

    /// Stores 64 bits at a multiple of 8, as [`HostView::store_u8`] does: never a torn number.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) outside of the mapping or not aligned.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.store(offset, value)
    }

    fn load<T: Access>(&self, offset: usize) -> Result<T> {
        let at = self.aligned(offset, size_of::<T>())?;
        // SAFETY: in range, aligned, and mapped while the mapping is borrowed.
        Ok(unsafe { T::load_acquire(at.cast()) })
    }

    fn store<T: Access>(&self, offset: usize, value: T) -> Result<()> {
        let at = self.aligned(offset, size_of::<T>())?;
        // SAFETY: in range, aligned, and mapped while the mapping is borrowed.
        unsafe { T::store_release(at.cast(), value) };
        Ok(())
    }

    fn at(&self, offset: usize, length: usize) -> Result<*mut u8> {
        self.guard.check()?;
        Invalid::check_inside(OPERATION, offset as u64, length as u64, self.size as u64)?;
        // SAFETY: inside the mapping.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }

    fn aligned(&self, offset: usize, size: usize) -> Result<*mut u8> {
        if offset % size != 0 {
            return Err(Invalid::because(
                OPERATION,
                format!("the offset {offset:#x} is not a multiple of {size}"),
                "Numbers must be aligned to their size.",
            ));
        }
        self.at(offset, size)
    }
}
