//! The page in which the kernel explains its errors.
//!
//! The memory driver writes its error messages into a page of the *calling process* at a fixed
//! address, if that page starts with a magic word. We map the page, empty it before each command
//! and read it after a command that failed. Commands of other threads share the page, so a message
//! may rarely be lost or come from another thread. Messages are hints for people; the library never
//! decides by them.
//!
//! The vendor's library uses the same page. If a page with the magic word is already there, it is
//! not ours. Then its positions are never moved, and the kernel reads it for us, because its owner
//! may unmap it at any time. Older messages cannot be told from those of the failed command, so
//! only the last ones are taken.

use crate::error::printable;
use crate::fork::ForkGuard;
use crate::trace;
use ascend_ioctl::klog::{CAPACITY, MAGIC, PAGE_SIZE, Page, SVM_ERRORS};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::io::IoSliceMut;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};
use zerocopy::{FromZeros, IntoBytes};

/// The most messages that one failing command writes.
const MESSAGES: usize = 6;

/// The log page of this process.
#[derive(Debug)]
pub(crate) enum LogPage {
    Ours(OwnPage),
    /// Another library's.
    Foreign,
    /// There is no page, and so no messages.
    None,
}

/// The page that we mapped.
#[derive(Debug)]
pub(crate) struct OwnPage {
    page: NonNull<Page>,
    /// The process that mapped it. A page in a child belongs to the child's own session.
    guard: ForkGuard,
}

// SAFETY: the page is accessed only through atomics and volatile reads, and stays mapped as long as
// this value lives.
unsafe impl Send for OwnPage {}
// SAFETY: as above; nothing is borrowed from the page.
unsafe impl Sync for OwnPage {}

impl LogPage {
    /// Maps the page (one system call) or finds another library's. [`LogPage::None`] if something
    /// else is at the address.
    pub(crate) fn map() -> LogPage {
        let address_and_length = (NonZeroUsize::new(SVM_ERRORS as usize), NonZeroUsize::new(PAGE_SIZE));
        let (Some(address), Some(length)) = address_and_length else { return LogPage::None };
        // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
        let mapped = unsafe {
            mmap_anonymous(Some(address), length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        };
        let page: NonNull<Page> = match mapped {
            Ok(page) => page.cast(),
            Err(errno) => {
                trace::debug(errno, "no page for the kernel's error messages");
                return LogPage::None;
            }
        };
        if page.addr() == address {
            // SAFETY: a fresh mapping of our own, page-aligned and large enough.
            unsafe { page.write(Page::empty(SVM_ERRORS)) };
            return LogPage::Ours(OwnPage { page, guard: ForkGuard::new() });
        }
        // SAFETY: this is the mapping that was just made, and no other code knows of it.
        if let Err(errno) = unsafe { munmap(page.cast(), PAGE_SIZE) } {
            trace::warn(errno, "a page for the kernel's messages could not be unmapped");
        }
        match foreign() {
            Some(page) if page.magic == MAGIC => LogPage::Foreign,
            _ => {
                trace::debug("no magic word", "something else is at the address of the kernel's error messages");
                LogPage::None
            }
        }
    }

    /// Makes the kernel start at the beginning of our page. Successful commands leave messages too.
    pub(crate) fn empty(&self) {
        if let LogPage::Ours(page) = self {
            page.empty();
        }
    }

    /// The messages about the command that just failed.
    pub(crate) fn take(&self) -> String {
        match self {
            LogPage::Ours(page) => page.take(),
            LogPage::Foreign => foreign().map_or_else(String::new, |page| last_messages(&page)),
            LogPage::None => String::new(),
        }
    }
}

/// The present contents of another library's page. Read by the kernel, because it may be unmapped.
fn foreign() -> Option<Page> {
    let mut page = Page::new_zeroed();
    let from = [RemoteIoVec { base: SVM_ERRORS as usize, len: PAGE_SIZE }];
    let read = process_vm_readv(Pid::this(), &mut [IoSliceMut::new(page.as_mut_bytes())], &from);
    (read == Ok(PAGE_SIZE)).then_some(page)
}

/// The last messages of a page whose owner consumes them by its own rules.
fn last_messages(page: &Page) -> String {
    let end = usize::try_from(page.write).unwrap_or(0).min(CAPACITY);
    let start = usize::try_from(page.read).unwrap_or(0).min(end);
    let text = text(&page.text[start..end]);
    let lines: Vec<&str> = text.lines().collect();
    let mut last = lines[lines.len().saturating_sub(MESSAGES)..].join("\n");
    if !last.is_empty() {
        last.push('\n');
    }
    last
}

fn text(bytes: &[u8]) -> String {
    let bytes: Vec<u8> = bytes.iter().copied().filter(|&byte| byte != 0).collect();
    printable(&String::from_utf8_lossy(&bytes))
}

impl OwnPage {
    fn read(&self) -> &AtomicI32 {
        // SAFETY: the field is aligned, mapped while self lives, and only accessed as an atomic.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.page.as_ptr()).read) }
    }

    fn write(&self) -> &AtomicI32 {
        // SAFETY: the field is aligned, mapped while self lives, and only accessed as an atomic.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.page.as_ptr()).write) }
    }

    fn empty(&self) {
        let written = self.write().load(Ordering::Relaxed);
        if written != 0 {
            // read >= write tells the kernel that the reader has consumed everything.
            self.read().store(written, Ordering::Relaxed);
        }
    }

    /// Takes the messages that were written since the page was last emptied.
    fn take(&self) -> String {
        let written = self.write().load(Ordering::Acquire);
        let from = self.read().load(Ordering::Relaxed);
        // The kernel sets the positions, but any code of the process may have overwritten them.
        let end = usize::try_from(written).unwrap_or(0).min(CAPACITY);
        let start = if from >= written { end } else { usize::try_from(from).unwrap_or(0).min(end) };
        let mut bytes = Vec::with_capacity(end - start);
        for index in start..end {
            // SAFETY: inside the page's text; volatile because the kernel may be writing.
            bytes.push(unsafe { (&raw const (*self.page.as_ptr()).text[index]).read_volatile() });
        }
        self.read().store(written, Ordering::Relaxed);
        text(&bytes)
    }
}

impl Drop for OwnPage {
    fn drop(&mut self) {
        if self.guard.in_child() {
            return;
        }
        // SAFETY: we mapped it, and nothing is borrowed from it.
        if let Err(errno) = unsafe { munmap(self.page.cast(), PAGE_SIZE) } {
            trace::warn(errno, "the page for the kernel's messages could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acts as the kernel: appends a message by its rules.
    fn kernel_writes(page: &OwnPage, message: &str) {
        if page.read().load(Ordering::Relaxed) >= page.write().load(Ordering::Relaxed) {
            page.read().store(0, Ordering::Relaxed);
            page.write().store(0, Ordering::Relaxed);
        }
        let at = page.write().load(Ordering::Relaxed) as usize;
        for (index, byte) in message.bytes().enumerate() {
            // SAFETY: inside the text of the page.
            unsafe { (&raw mut (*page.page.as_ptr()).text[at + index]).write_volatile(byte) };
        }
        page.write().store((at + message.len()) as i32, Ordering::Relaxed);
    }

    #[test]
    fn messages_are_consumed_and_old_ones_are_not_repeated() {
        let LogPage::Ours(page) = LogPage::map() else { panic!("the address is free") };
        assert_eq!(page.take(), "");
        kernel_writes(&page, "left by a success\n");
        page.empty();
        kernel_writes(&page, "inner\n");
        kernel_writes(&page, "outer\n");
        assert_eq!(page.take(), "inner\nouter\n");
        assert_eq!(page.take(), "");

        // Another user of the page reads the last messages and never moves the positions.
        let guest = LogPage::map();
        assert!(matches!(guest, LogPage::Foreign));
        kernel_writes(&page, "for both\n");
        guest.empty();
        assert_eq!(guest.take(), "for both\n");
        assert_eq!(page.read().load(Ordering::Relaxed), 0);
        assert_eq!(page.take(), "for both\n");
        for message in 0..9 {
            kernel_writes(&page, &format!("{message}\n"));
        }
        assert_eq!(guest.take(), "3\n4\n5\n6\n7\n8\n");

        // Garbage in the positions does no harm.
        page.read().store(-5, Ordering::Relaxed);
        page.write().store(1 << 30, Ordering::Relaxed);
        assert!(guest.take().len() <= CAPACITY);
        assert!(page.take().len() <= CAPACITY);

        // Neither does a page that its owner has unmapped.
        drop(page);
        assert_eq!(guest.take(), "");
    }
}
