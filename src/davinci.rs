//! A file of `/dev/davinci_manager`, bound to one of the driver's modules.
//!
//! The device multiplexes all modules: a file is bound to one by name, and every later ioctl goes there. The kernel takes a bound file
//! that is closed without the CLOSE command for a sign that the process is dying and then releases *every* davinci file of the process,
//! ours and other libraries'. So a [`DavinciFile`] always says CLOSE before close(2), also when it is dropped. Files are opened
//! `O_CLOEXEC` and never handed to another process: a child that holds one keeps this process's device memory alive.

use crate::error::{Error, OpenFailed, Refused, Result};
use ascend_ioctl::{Command, davinci};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use zerocopy::{FromBytes, Immutable, IntoBytes};

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
        let fd = traced(module, "open", || open(path, flags, Mode::empty()))
            .map_err(|errno| OpenFailed::new(path, errno))?;
        let mut arg = davinci::OpenArg::new(module);
        let bound = traced(module, davinci::OPEN.name, || {
            // SAFETY: the argument is the 260-byte struct that OPEN reads, and lives through the call.
            unsafe { ioctl(&fd, davinci::OPEN.request(), (&raw mut arg).cast()) }
        });
        if let Err(errno) = bound {
            // The file was not bound, so close(2) alone is right: CLOSE is for bound files.
            return Err(Refused::new("bind a file to a module", &davinci::OPEN, errno)
                .object(format!("module {module} of {}", path.display()))
                .into());
        }
        Ok(DavinciFile { fd, module })
    }

    /// One command of the module. The kernel may write to `arg` as far as `T` reaches, so `T` must be the whole argument of the command;
    /// what it returns beside 0 is a value of the module's (some return positive numbers).
    ///
    /// Not for the memory module, whose commands go through the session.
    pub(crate) fn command<T: FromBytes + IntoBytes + Immutable>(
        &self,
        command: &Command,
        arg: &mut T,
    ) -> std::result::Result<i32, Errno> {
        // No module of the driver reads or writes more than the struct that belongs to the command.
        debug_assert!(command.layout().is_none_or(|layout| size_of::<T>() >= layout.size));
        // SAFETY: `arg` is exclusively borrowed for the call, any bytes are valid for it, and it is as large as the command's struct.
        traced(self.module, command.name, || unsafe { self.raw(command.request(), (arg as *mut T).cast()) })
    }

    /// The bare ioctl(2) on this file.
    ///
    /// # Safety
    ///
    /// `arg` must point to memory that the module may read and write as its command demands.
    #[inline]
    pub(crate) unsafe fn raw(&self, request: u32, arg: *mut libc::c_void) -> std::result::Result<i32, Errno> {
        // SAFETY: the caller vouches for the argument.
        unsafe { ioctl(&self.fd, request, arg) }
    }

    /// The descriptor, for mmap(2).
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for DavinciFile {
    fn drop(&mut self) {
        // In a child of fork(2) this is answered with 0 and does nothing, and the parent's file stays as it is.
        let mut arg = davinci::OpenArg::default();
        let closed = traced(self.module, davinci::CLOSE.name, || {
            // SAFETY: the kernel does not read the argument of CLOSE.
            unsafe { self.raw(davinci::CLOSE.request(), (&raw mut arg).cast()) }
        });
        if let Err(errno) = closed {
            tracing::error!(
                module = self.module,
                ?errno,
                "CLOSE was refused: close(2) may now release every file that this process has of the driver"
            );
        }
    }
}

/// The one place where this library calls ioctl(2).
///
/// # Safety
///
/// `arg` must point to memory that the driver behind `fd` may read and write as `request` demands.
#[inline]
pub(crate) unsafe fn ioctl(fd: &OwnedFd, request: u32, arg: *mut libc::c_void) -> std::result::Result<i32, Errno> {
    // The C library's ioctl takes a variable number of arguments, which costs more instructions than the rest of a command together.
    // SAFETY: the caller vouches for the argument; the descriptor is open while it is borrowed.
    let answer = unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), libc::c_ulong::from(request), arg) };
    Errno::result(answer as i32)
}

/// Runs one system call inside a span that says what it is, how long it took and what came of it. Without a subscriber it costs one load.
#[inline]
pub(crate) fn traced<T>(
    module: &'static str,
    command: &'static str,
    call: impl FnOnce() -> std::result::Result<T, Errno>,
) -> std::result::Result<T, Errno> {
    if !tracing::enabled!(tracing::Level::TRACE) {
        return call();
    }
    let span = tracing::trace_span!("system call", module, command);
    let _entered = span.enter();
    let start = Instant::now();
    let result = call();
    let duration = start.elapsed();
    match &result {
        Ok(_) => tracing::trace!(command, ?duration, result = "ok"),
        Err(errno) => tracing::trace!(command, ?duration, result = ?errno),
    }
    result
}

impl From<OpenFailed> for Error {
    fn from(failed: OpenFailed) -> Self {
        Error::Open(Box::new(failed))
    }
}
