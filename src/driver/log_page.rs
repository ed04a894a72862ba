//! The page in which the kernel explains its errors.
//!
//! The memory driver writes its error sentences into a page of the *calling process* at a fixed
//! address, if that page carries a magic word. We map the page, empty it before each command and
//! read it after one that failed. Commands that run in other threads share the page, so a sentence
//! may rarely be lost or be another thread's; it is a hint for people, never something to decide
//! by.
//!
//! The vendor's library uses the same page. If one with the magic word is already there, we leave
//! it alone and only read what was added.

use crate::fork::ForkGuard;
use crate::trace;
use ascend_ioctl::klog::{CAPACITY, MAGIC, PAGE_SIZE, Page, SVM_ERRORS};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

/// The log page of this process.
#[derive(Debug)]
pub(crate) struct LogPage {
    page: NonNull<Page>,
    /// Whether we mapped it; otherwise it is another library's.
    ours: bool,
    /// Where the kernel will write next in another library's page, as far as known.
    seen: AtomicI32,
    /// The process that made it: in its children the page is another session's, if they have one.
    guard: ForkGuard,
}

// SAFETY: the page is only touched through atomics and volatile reads, and stays mapped as long as
// this value lives.
unsafe impl Send for LogPage {}
// SAFETY: as above; nothing is borrowed from the page.
unsafe impl Sync for LogPage {}

impl LogPage {
    /// Maps the page (one system call), or finds another library's; `None` if the address is taken
    /// by something else.
    pub(crate) fn map() -> Option<LogPage> {
        let (address, length) = (NonZeroUsize::new(SVM_ERRORS as usize)?, NonZeroUsize::new(PAGE_SIZE)?);
        // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
        let mapped = unsafe {
            mmap_anonymous(Some(address), length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        };
        let page: NonNull<Page> = match mapped {
            Ok(page) => page.cast(),
            Err(errno) => {
                trace::debug(errno, "no page for the kernel's error sentences");
                return None;
            }
        };
        if page.addr() == address {
            // SAFETY: a fresh mapping of our own, page-aligned and large enough.
            unsafe { page.write(Page::empty(SVM_ERRORS)) };
            return Some(LogPage { page, ours: true, seen: AtomicI32::new(0), guard: ForkGuard::new() });
        }
        // SAFETY: this is the mapping that was just made, and no other code knows of it.
        if let Err(errno) = unsafe { munmap(page.cast(), PAGE_SIZE) } {
            trace::warn(errno, "a page for the kernel's sentences could not be unmapped");
        }
        // Something is mapped there. It may not be readable, so do not touch it before the kernel
        // has read it for us.
        let mut magic = [0; MAGIC.len()];
        let memory = std::fs::File::open("/proc/self/mem").ok()?;
        memory.read_exact_at(&mut magic, SVM_ERRORS).ok()?;
        if magic != MAGIC {
            trace::debug("no magic word", "the address of the kernel's error sentences is used by something else");
            return None;
        }
        let page = NonNull::new(std::ptr::with_exposed_provenance_mut::<Page>(address.get()))?;
        let log = LogPage { page, ours: false, seen: AtomicI32::new(0), guard: ForkGuard::new() };
        log.empty();
        Some(log)
    }

    fn read(&self) -> &AtomicI32 {
        // SAFETY: the field is aligned and mapped while self lives, and only ever touched as an
        // atomic.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.page.as_ptr()).read) }
    }

    fn write(&self) -> &AtomicI32 {
        // SAFETY: the field is aligned and mapped while self lives, and only ever touched as an
        // atomic.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.page.as_ptr()).write) }
    }

    /// Makes the kernel start at the beginning of the page: commands that succeed leave sentences
    /// too.
    #[inline]
    pub(crate) fn empty(&self) {
        let written = self.write().load(Ordering::Relaxed);
        if written == 0 {
            return;
        }
        if self.ours {
            // read >= write is how a reader says that it has consumed everything.
            self.read().store(written, Ordering::Relaxed);
        } else {
            // Then the kernel will start at the beginning, otherwise where it stands.
            let consumed = self.read().load(Ordering::Relaxed) >= written;
            self.seen.store(if consumed { 0 } else { written }, Ordering::Relaxed);
        }
    }

    /// The sentences that were left since the page was last emptied, and empties it.
    #[cold]
    pub(crate) fn take(&self) -> String {
        let written = self.write().load(Ordering::Acquire);
        let from = if self.ours { self.read().load(Ordering::Relaxed) } else { self.seen.load(Ordering::Relaxed) };
        // The positions are the kernel's, but the page is ordinary memory that any code of the
        // process may have written to.
        let end = usize::try_from(written).unwrap_or(0).min(CAPACITY);
        let start = if from >= written { end } else { usize::try_from(from).unwrap_or(0).min(end) };
        let mut text = Vec::with_capacity(end - start);
        for index in start..end {
            // SAFETY: inside the page's text; volatile because the kernel may be writing.
            text.push(unsafe { (&raw const (*self.page.as_ptr()).text[index]).read_volatile() });
        }
        if self.ours {
            self.read().store(written, Ordering::Relaxed);
        } else {
            self.seen.store(written, Ordering::Relaxed);
        }
        text.retain(|&byte| byte != 0);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for LogPage {
    fn drop(&mut self) {
        if !self.ours || self.guard.in_child() {
            return;
        }
        // SAFETY: we mapped it, and nothing is borrowed from it.
        if let Err(errno) = unsafe { munmap(self.page.cast(), PAGE_SIZE) } {
            trace::warn(errno, "the page for the kernel's sentences could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays the kernel: appends a sentence by its rules.
    fn kernel_writes(log: &LogPage, sentence: &str) {
        if log.read().load(Ordering::Relaxed) >= log.write().load(Ordering::Relaxed) {
            log.read().store(0, Ordering::Relaxed);
            log.write().store(0, Ordering::Relaxed);
        }
        let at = log.write().load(Ordering::Relaxed) as usize;
        for (index, byte) in sentence.bytes().enumerate() {
            // SAFETY: inside the text of the page.
            unsafe { (&raw mut (*log.page.as_ptr()).text[at + index]).write_volatile(byte) };
        }
        log.write().store((at + sentence.len()) as i32, Ordering::Relaxed);
    }

    #[test]
    fn sentences_are_consumed_and_old_ones_are_not_repeated() {
        let log = LogPage::map().unwrap();
        assert!(log.ours);
        assert_eq!(log.take(), "");
        kernel_writes(&log, "left by a success\n");
        log.empty();
        kernel_writes(&log, "inner\n");
        kernel_writes(&log, "outer\n");
        assert_eq!(log.take(), "inner\nouter\n");
        assert_eq!(log.take(), "");

        // Another user of the page only reads what is added, and never moves the positions.
        let guest = LogPage::map().unwrap();
        assert!(!guest.ours);
        guest.empty();
        kernel_writes(&log, "for both\n");
        assert_eq!(guest.take(), "for both\n");
        assert_eq!(guest.take(), "");
        assert_eq!(log.take(), "for both\n");
        drop(guest);

        // Garbage in the positions is survived.
        log.read().store(-5, Ordering::Relaxed);
        log.write().store(1 << 30, Ordering::Relaxed);
        assert!(log.take().len() <= CAPACITY);
    }
}
