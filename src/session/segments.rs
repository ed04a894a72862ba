//! The address segments: ranges of this process's address space that the driver wants mapped before the session is initialised.
//!
//! The CPU sees memory only through them, and only a session that has them can be closed and opened again in the same process. The
//! kernel itself keeps them out of children and core dumps. They are touched as wholes only: unmapping a part, or more than one at once,
//! destroys or hides the session. The SOMA and UVM segments are made inaccessible right away, since a CPU access to SOMA would hang the
//! thread in the kernel for ever.

use crate::davinci::{DavinciFile, traced};
use crate::error::{Errno, Error, Refused, Result};
use ascend_ioctl::svm::{HOST_PIN_SIZE, SVM_SIZE, SVM_START, Segment};
use nix::sys::mman::{MapFlags, MsFlags, ProtFlags, mmap, mmap_anonymous, mprotect, msync, munmap};
use std::ffi::c_void;
use std::num::NonZeroUsize;
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
    /// Maps all segments in the order that the kernel demands; those in which the CPU has no business become inaccessible.
    pub(crate) fn map(file: &DavinciFile, wanted: &[Segment]) -> Result<Segments> {
        let mut segments = Segments { mapped: Vec::with_capacity(wanted.len()) };
        for segment in wanted {
            match segments.map_one(file, segment) {
                Ok(()) => {}
                // The driver works without this one; only pinned host memory, which we do not use, is lost.
                Err((_, errno)) if is_host_pin(segment) => {
                    tracing::warn!(start = segment.start, ?errno, "the host-pin segment could not be mapped");
                    break;
                }
                Err((command, errno)) => {
                    segments.unmap();
                    return Err(failed(command, segment, errno));
                }
            }
        }
        Ok(segments)
    }

    fn map_one(&mut self, file: &DavinciFile, segment: &Segment) -> std::result::Result<(), (&'static str, Errno)> {
        let (Some(start), Some(size)) =
            (NonZeroUsize::new(segment.start as usize), NonZeroUsize::new(segment.size as usize))
        else {
            return Err(("mmap", Errno::EINVAL));
        };
        // MAP_FIXED is refused by the driver; MAP_PRIVATE would not be usable.
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let mapped = traced("SVM", "mmap", || {
            // SAFETY: without MAP_FIXED the kernel only hands out addresses that nobody uses.
            unsafe { mmap(Some(start), size, prot, MapFlags::MAP_SHARED, file.fd(), 0) }
        });
        let address = mapped.map_err(|errno| ("mmap", errno))?;
        if address.addr() != start {
            // The driver checks this itself; be sure all the same, since a wrong address would be somebody else's.
            // SAFETY: this mapping was just made and nobody knows of it.
            let _ = unsafe { munmap(address, segment.size as usize) };
            return Err(("mmap", Errno::EINVAL));
        }
        // Views of memory make their pointers from addresses.
        let _ = address.as_ptr().expose_provenance();
        self.mapped.push((address, *segment));
        if segment.start != SVM_START && !is_host_pin(segment) {
            traced("SVM", "mprotect", || {
                // SAFETY: our own mapping, in which nothing lives; the whole segment, so it is not split.
                unsafe { mprotect(address, segment.size as usize, ProtFlags::PROT_NONE) }
            })
            .map_err(|errno| ("mprotect", errno))?;
        }
        Ok(())
    }

    /// Whether the CPU can see memory.
    pub(crate) fn has_svm(&self) -> bool {
        self.mapped.iter().any(|(_, segment)| segment.start == SVM_START)
    }

    /// Unmaps each segment by its own call with its exact range.
    pub(crate) fn unmap(&mut self) {
        for (address, segment) in self.mapped.drain(..) {
            let unmapped = traced("SVM", "munmap", || {
                // SAFETY: we mapped exactly this range. Views into it borrow mappings, and those are gone before the session ends.
                unsafe { munmap(address, segment.size as usize) }
            });
            if let Err(errno) = unmapped {
                tracing::error!(start = segment.start, ?errno, "an address segment could not be unmapped");
            }
        }
    }

    /// Forgets the segments that somebody else has unmapped: what ended the session in our way may have done that too.
    pub(crate) fn check(&mut self) {
        self.mapped.retain(|(address, segment)| {
            // SAFETY: asks the kernel only; nothing is written back, as the mapping is not of a file with contents.
            let there = unsafe { msync(*address, 4096, MsFlags::MS_ASYNC) } != Err(Errno::ENOMEM);
            if !there {
                tracing::warn!(start = segment.start, "an address segment was unmapped by another library");
            }
            there
        });
    }

    /// Forgets the segments in a child of fork, where they are not mapped and their addresses may be somebody else's.
    pub(crate) fn forget(&mut self) {
        self.mapped.clear();
    }
}

/// Ends a session that has no segments mapped. The kernel gives it up only when exactly the SVM range is unmapped, whatever was there,
/// so map something inaccessible there and unmap it. Where the addresses are taken the session lasts as long as the process.
pub(crate) fn end_without() {
    let (Some(start), Some(size)) = (NonZeroUsize::new(SVM_START as usize), NonZeroUsize::new(SVM_SIZE as usize))
    else {
        return;
    };
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: without MAP_FIXED the kernel only hands out addresses that nobody uses.
    let mapped = unsafe { mmap_anonymous(Some(start), size, ProtFlags::PROT_NONE, flags) };
    let Ok(address) = mapped else {
        tracing::warn!("no session can be opened in this process any more: this one had no address segments");
        return;
    };
    if address.addr() != start {
        tracing::warn!("no session can be opened in this process any more: its addresses are used by something else");
    }
    // SAFETY: this is the mapping that was just made, and nobody knows of it.
    if let Err(errno) = unsafe { munmap(address, size.get()) } {
        tracing::error!(?errno, "addresses could not be unmapped");
    }
}

fn is_host_pin(segment: &Segment) -> bool {
    segment.size == HOST_PIN_SIZE && segment.start != SVM_START
}

#[cold]
fn failed(command: &'static str, segment: &Segment, errno: Errno) -> Error {
    Refused::named("map the driver's address segments", command, errno)
        .object(format!("{:#x}..{:#x}", segment.start, segment.start.saturating_add(segment.size)))
        .into()
}
