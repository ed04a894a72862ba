//! The shared log page: the kernel's own error messages, in the calling process's memory.
//!
//! When a command fails, the driver also writes its message into a page of the calling process at a
//! fixed address, if that page begins with the [`MAGIC`] word and its [`Page::total`] is 4096. One
//! failing ioctl writes one to six messages, each ending in a newline, the outermost last. There is
//! no wrap-around: a message that does not fit is cut and both positions become 0. The reader
//! consumes by setting [`Page::read`] to [`Page::write`]; the kernel then starts again at the
//! beginning.

use crate::layout::{declare_constants, declare_layouts};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

declare_constants! {
    /// Where the memory module writes error messages.
    pub const SVM_ERRORS: u64 = 0xE00_0008_0000, "DEVMM_SHARE_LOG_START";
    /// Where the memory module writes notes about what it did.
    pub const SVM_RUN_INFO: u64 = 0xE00_000C_0000, "DEVMM_SHARE_LOG_RUNINFO_START";
    /// Size of a page, whatever the host's page size is.
    pub const PAGE_SIZE: usize = 4096, "SHARE_LOG_MAX_SIZE";
    /// Offset of the text.
    pub const TEXT: usize = 100, "SHARE_LOG_RECORD_OFFSET";
    /// Length of the magic word with its NUL.
    pub const MAGIC_LENGTH: usize = 24, "SHARE_LOG_MAGIC_LENGTH";
}

declare_layouts! {
    /// The driver's own view of the beginning of a [`Page`].
    pub struct Head = "share_log_info", 56 {
        /// [`MAGIC`].
        pub magic: [u8; 24] = "magic" @ 0,
        pub total: i32 = "total_size" @ 24,
        pub _pad0: [u8; 4],
        pub base: u64 = "record_base" @ 32,
        pub record_size: i32 = "record_size" @ 40,
        pub read: i32 = "read" @ 44,
        pub write: i32 = "write" @ 48,
        pub _pad1: [u8; 4],
    }
}

/// The word that a page must begin with.
pub const MAGIC_TEXT: &str = "drvshartlogab90cd78ef56";

/// [`MAGIC_TEXT`] with its NUL.
pub const MAGIC: [u8; MAGIC_LENGTH] = {
    let mut magic = [0; MAGIC_LENGTH];
    let mut at = 0;
    while at < MAGIC_TEXT.len() {
        magic[at] = MAGIC_TEXT.as_bytes()[at];
        at += 1;
    }
    magic
};

/// Bytes for text.
pub const CAPACITY: usize = PAGE_SIZE - TEXT;

/// The page, head and text.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Page {
    /// [`MAGIC`].
    pub magic: [u8; 24],
    /// [`PAGE_SIZE`].
    pub total: i32,
    /// Padding.
    pub _pad: [u8; 4],
    /// The page's own address; ignored by the kernel.
    pub base: u64,
    /// [`CAPACITY`].
    pub record_size: i32,
    /// How much of the text the reader has consumed.
    pub read: i32,
    /// How much of the text the kernel has written.
    pub write: i32,
    /// Unused.
    pub reserved: [u8; TEXT - 52],
    /// Messages.
    pub text: [u8; CAPACITY],
}

const _: () = {
    assert!(size_of::<Page>() == PAGE_SIZE);
    assert!(core::mem::offset_of!(Page, magic) == core::mem::offset_of!(Head, magic));
    assert!(core::mem::offset_of!(Page, total) == core::mem::offset_of!(Head, total));
    assert!(core::mem::offset_of!(Page, base) == core::mem::offset_of!(Head, base));
    assert!(core::mem::offset_of!(Page, record_size) == core::mem::offset_of!(Head, record_size));
    assert!(core::mem::offset_of!(Page, read) == core::mem::offset_of!(Head, read));
    assert!(core::mem::offset_of!(Page, write) == core::mem::offset_of!(Head, write));
    assert!(core::mem::offset_of!(Page, text) == TEXT);
};

impl Page {
    /// An empty page that the kernel will write to.
    pub const fn empty(address: u64) -> Page {
        Page {
            magic: MAGIC,
            total: PAGE_SIZE as i32,
            _pad: [0; 4],
            base: address,
            record_size: CAPACITY as i32,
            read: 0,
            write: 0,
            reserved: [0; TEXT - 52],
            text: [0; CAPACITY],
        }
    }
}
