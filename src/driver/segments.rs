//! The address segments: ranges of this process's address space that are mapped before the session
//! is initialised.
//!
//! The CPU sees memory only through them, and only a session that has them can be closed and opened
//! again in the same process. The kernel keeps them out of children and core dumps. Every call
//! covers exactly one whole segment: unmapping a part, or several at once, destroys or hides the
//! session. The SOMA and UVM segments are made inaccessible right away, because a CPU access to
//! SOMA hangs the thread in the kernel forever.

use super::davinci::module;
use super::uninterrupted;
use crate::error::{Errno, KernelResult, Refused, SystemCall};
use crate::trace::{self, Call, traced};
use ascend_ioctl::svm::{HOST_PIN_SIZE, SVM_SIZE, SVM_START, Segment};
use nix::sys::mman::{MapFlags, MsFlags, ProtFlags, mmap, mmap_anonymous, mprotect, msync, munmap};
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// Mapped segments, in the driver's order.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    mapped: Vec<(NonNull<c_void>, Segment)>,
}

// SAFETY: the addresses are never dereferenced through this value.
unsafe impl Send for Segments {}
// SAFETY: as above.
unsafe impl Sync for Segments {}

impl Segments {
    /// Maps all segments in the kernel's order, and makes those that the CPU must not touch
    /// inaccessible.
    pub(super) fn map(fd: &OwnedFd, wanted: &[Segment]) -> KernelResult<Segments> {
        let mut segments = Segments { mapped: Vec::with_capacity(wanted.len()) };
        for segment in wanted {
            match segments.map_one(fd, segment) {
                Ok(()) => {}
                // The driver works without it. Only pinned host memory needs it, which we do not
                // use.
                Err(refused) if is_host_pin(segment) => {
                    trace::warn(refused, "the host-pin segment could not be mapped");
                    break;
                }
                Err(refused) => {
                    segments.unmap();
                    return Err(refused);
                }
            }
        }
        Ok(segments)
    }

    fn map_one(&mut self, fd: &OwnedFd, segment: &Segment) -> KernelResult<()> {
        let failed = |call, errno| {
            let range = format!("{:#x}..{:#x}", segment.start, segment.start.saturating_add(segment.size));
            let beyond = too_few_address_bits().map(|bits| {
                format!(", where addresses of this process have {bits} bits (CONFIG_ARM64_VA_BITS_{bits})")
            });
            let object = range + &beyond.unwrap_or_default();
            Refused::new(call, errno).operation("map the driver's address segments").object(object)
        };
        let Some((start, size)) = nonzero(segment.start, segment.size) else {
            return Err(failed(SystemCall::Mmap, Errno::EINVAL));
        };
        // The driver refuses MAP_FIXED, and a MAP_PRIVATE mapping would not be usable.
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let mapped = traced(call("mmap", segment), || {
            // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
            uninterrupted(|| unsafe { mmap(Some(start), size, prot, MapFlags::MAP_SHARED, fd, 0) })
        });
        let address = mapped.map_err(|errno| failed(SystemCall::Mmap, errno))?;
        if address.addr() != start {
            // The driver checks this too, but a mapping at another address would be in the way of
            // other code. SAFETY: this mapping was just made, and no other code knows of it.
            let _ = unsafe { munmap(address, segment.size as usize) };
            return Err(failed(SystemCall::Mmap, Errno::EINVAL));
        }
        // Views of memory make their pointers from addresses.
        let _ = address.as_ptr().expose_provenance();
        self.mapped.push((address, *segment));
        if segment.start != SVM_START && !is_host_pin(segment) {
            let protected = traced(call("mprotect", segment), || {
                // SAFETY: our own mapping, in which nothing lives; the whole segment, so it is not
                // split.
                uninterrupted(|| unsafe { mprotect(address, segment.size as usize, ProtFlags::PROT_NONE) })
            });
            protected.map_err(|errno| failed(SystemCall::Mprotect, errno))?;
        }
        Ok(())
    }

    /// True if the CPU can see memory.
    pub(crate) fn has_svm(&self) -> bool {
        self.mapped.iter().any(|(_, segment)| segment.start == SVM_START)
    }

    /// Unmaps each segment with its own call and its exact range.
    pub(crate) fn unmap(&mut self) {
        for (address, segment) in self.mapped.drain(..) {
            let unmapped = traced(call("munmap", &segment), || {
                // SAFETY: we mapped exactly this range. Views into it borrow mappings, and those
                // are gone before the session ends.
                uninterrupted(|| unsafe { munmap(address, segment.size as usize) })
            });
            if let Err(errno) = unmapped {
                trace::error(format_args!("{:#x}: {errno}", segment.start), "an address segment could not be unmapped");
            }
        }
    }

    /// Forgets the segments that other code has unmapped: what ended the session in our way may
    /// have done that too.
    pub(crate) fn check(&mut self) {
        self.mapped.retain(|(address, segment)| {
            // SAFETY: asks the kernel only; nothing is written back, as the mapping is not of a
            // file with contents.
            let there = unsafe { msync(*address, 4096, MsFlags::MS_ASYNC) } != Err(nix::Error::ENOMEM);
            if !there {
                trace::warn(format_args!("{:#x}", segment.start), "an address segment was unmapped by another library");
            }
            there
        });
    }

    /// Forgets the segments in a child of fork, where they are not mapped and their addresses may
    /// be used by other code.
    pub(crate) fn forget(&mut self) {
        self.mapped.clear();
    }
}

/// The number of bits in this process's addresses, if that is too few for the segments. Kernels for
/// aarch64 can be built like that.
pub(crate) fn too_few_address_bits() -> Option<u32> {
    too_few_bits(is_address)
}

/// As [`too_few_address_bits`], for a process whose addresses satisfy `is_address`.
fn too_few_bits(is_address: impl Fn(u64) -> bool) -> Option<u32> {
    // Tries the last page of each size of address space that kernels are built for. None of them is
    // in a segment: these end at 45 bits, and the next larger size has 47.
    let last = |bits: u32| (1 << bits) - LARGEST_PAGE;
    if is_address(last(46)) {
        return None;
    }
    [42, 39, 36].into_iter().find(|bits| is_address(last(*bits)))
}

/// The largest page that Linux has on aarch64.
const LARGEST_PAGE: u64 = 64 << 10;

/// True if this process can map memory at an address, or already has something mapped there.
fn is_address(address: u64) -> bool {
    let Some((start, size)) = nonzero(address, LARGEST_PAGE) else { return false };
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
    // SAFETY: these flags never replace a mapping; old kernels return another address instead.
    match unsafe { mmap_anonymous(Some(start), size, ProtFlags::PROT_NONE, flags) } {
        Ok(mapped) => {
            // SAFETY: this mapping was just made, and no other code knows of it.
            let _ = unsafe { munmap(mapped, size.get()) };
            true
        }
        Err(errno) => errno != nix::Error::ENOMEM,
    }
}

/// Ends a session that has no segments mapped. The kernel ends it only when exactly the SVM range
/// is unmapped, whatever was mapped there. So this maps inaccessible memory there and unmaps it. If
/// the addresses are taken, the session lasts as long as the process.
pub(crate) fn end_without() {
    let Some((start, size)) = nonzero(SVM_START, SVM_SIZE) else { return };
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
    let mapped = unsafe { mmap_anonymous(Some(start), size, ProtFlags::PROT_NONE, flags) };
    let address = match mapped {
        Ok(address) => address,
        Err(errno) => return trace::warn(errno, NO_SESSION_ANY_MORE),
    };
    if address.addr() != start {
        trace::warn("its addresses are in use", NO_SESSION_ANY_MORE);
    }
    // SAFETY: this is the mapping that was just made, and no other code knows of it.
    if let Err(errno) = unsafe { munmap(address, size.get()) } {
        trace::error(errno, "addresses could not be unmapped");
    }
}

const NO_SESSION_ANY_MORE: &str = "no further session can be opened in this process: this one had no address segments";

/// A range as mmap(2) takes it.
fn nonzero(start: u64, size: u64) -> Option<(NonZeroUsize, NonZeroUsize)> {
    NonZeroUsize::new(start as usize).zip(NonZeroUsize::new(size as usize))
}

fn call(command: &'static str, segment: &Segment) -> Call {
    Call { size: segment.size, ..Call::plain(module::SVM, command) }
}

fn is_host_pin(segment: &Segment) -> bool {
    segment.size == HOST_PIN_SIZE && segment.start != SVM_START
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_small_address_space_is_detected() {
        for bits in [36, 39, 42] {
            assert_eq!(too_few_bits(|address| address < 1 << bits), Some(bits));
        }
        for bits in [47, 48, 52] {
            assert_eq!(too_few_bits(|address| address < 1 << bits), None);
        }
        // A limit of the process says nothing about the kernel.
        assert_eq!(too_few_bits(|_| false), None);
    }

    #[test]
    fn a_mapped_address_is_usable_and_one_of_the_kernel_is_not() {
        let page = LARGEST_PAGE as usize;
        let here = (&raw const page).addr() as u64 & !(LARGEST_PAGE - 1);
        assert!(is_address(here));
        assert!(!is_address(u64::MAX << 47));
    }
}
