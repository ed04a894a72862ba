//! A file of `/dev/davinci_manager`, bound to one of the driver's modules.
//!
//! The device multiplexes all modules: a file is bound to one by name, and every later ioctl goes
//! there. The kernel takes a bound file that is closed without the CLOSE command for a sign that
//! the process is dying and then releases *every* davinci file of the process, ours and other
//! libraries'. So a [`DavinciFile`] always sends CLOSE before close(2), also when it is dropped.
//! Files are opened `O_CLOEXEC` and never passed to another process: a child that holds one keeps
//! this process's device memory alive.

use super::{Answer, ioctl, uninterrupted};
use crate::error::{Errno, OpenFailed, Refused, Result, SystemCall};
use crate::trace::{self, Call, traced};
use ascend_ioctl::{Typed, davinci};
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::os::fd::OwnedFd;
use std::path::Path;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The driver's multiplexer.
pub(crate) const MANAGER: &str = davinci::PATH;

pub(crate) use davinci::module;

/// An open file that is bound to a module.
#[derive(Debug)]
pub(crate) struct DavinciFile {
    fd: OwnedFd,
    module: &'static str,
}

impl DavinciFile {
    /// Opens the device at `path` and binds the file to `module`: two system calls.
    pub(crate) fn open(path: &Path, module: &'static str) -> Result<DavinciFile> {
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let opened = traced(|| Call::plain(module, "open"), || uninterrupted(|| open(path, flags, Mode::empty())));
        let fd = opened.map_err(|errno| OpenFailed::new(path, errno))?;
        let mut arg = davinci::OpenArg::new(module);
        let bound = traced(
            || Call::plain(module, davinci::OPEN.name),
            || {
                // SAFETY: the argument is the 260-byte struct that OPEN reads, and lives through
                // the call.
                unsafe { ioctl(&fd, davinci::OPEN.request(), (&raw mut arg).cast()) }
            },
        );
        match bound {
            Ok(_) => Ok(DavinciFile { fd, module }),
            // The file was not bound, so close(2) alone is right: CLOSE is for bound files.
            Err(errno) => Err(Refused::new(SystemCall::Bind, errno)
                .operation("bind a file to a module")
                .object(format!("module {module} of {}", path.display()))
                .into()),
        }
    }

    /// One command of a module other than the memory module.
    pub(super) fn command<A: FromBytes + IntoBytes + Immutable>(&self, command: &Typed<A>, arg: &mut A) -> Answer {
        Answer::of(traced(
            || Call::plain(self.module, command.name),
            || {
                // SAFETY: `arg` is exclusively borrowed for the call, any bytes are valid for it,
                // and its type is the command's whole argument.
                unsafe { self.raw(command.request(), (arg as *mut A).cast()) }
            },
        ))
    }

    /// The bare ioctl(2) on this file.
    ///
    /// # Safety
    ///
    /// `arg` must point to memory that the module may read and write as its command demands.
    #[inline]
    pub(super) unsafe fn raw(&self, request: u32, arg: *mut libc::c_void) -> Result<i32, Errno> {
        // SAFETY: the caller vouches for the argument.
        unsafe { ioctl(&self.fd, request, arg) }
    }

    /// The descriptor, for mmap(2).
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for DavinciFile {
    fn drop(&mut self) {
        // In a child of fork(2) this is answered with 0 and does nothing, and the parent's file
        // stays as it is.
        let answer = self.command(&davinci::CLOSE, &mut davinci::OpenArg::default());
        if answer != Answer::Done {
            trace::error(
                format_args!("module {}: {answer:?}", self.module),
                "CLOSE was refused: close(2) may now release every file that this process has of the driver",
            );
        }
    }
}
