//! A file of `/dev/davinci_manager`, bound to one of the driver's modules.
//!
//! The device multiplexes all modules: a file is bound to a module by name, and every later ioctl
//! goes there. If a bound file is closed without the CLOSE command, the kernel assumes that the
//! process is dying and releases *every* davinci file of the process, ours and other libraries'. So
//! a [`DavinciFile`] always sends CLOSE before close(2), also when it is dropped. Files are opened
//! `O_CLOEXEC` and never passed to another process, because a child that holds one keeps this
//! process's device memory alive.
//!
//! The driver distinguishes processes, not libraries: whatever one library does to a module affects
//! the others in the process. [`others_have_files`] tells whether there are any.

use super::{Answer, ioctl_uninterrupted, uninterrupted};
use crate::error::{Errno, OpenFailed, Refused, Result, SystemCall};
use crate::fork::PerProcess;
use crate::signals;
use crate::slots::lock;
use crate::trace::{self, Call, traced};
use ascend_ioctl::{Typed, davinci};
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The driver's multiplexer.
pub(crate) const MANAGER: &str = davinci::PATH;

pub(crate) use davinci::module;

/// An open file that is bound to a module.
#[derive(Debug)]
pub(crate) struct DavinciFile {
    descriptor: Descriptor,
    module: &'static str,
}

/// A descriptor, and its entry in the list of our own. Fields are dropped in order, so the entry is
/// removed after close(2).
#[derive(Debug)]
struct Descriptor {
    fd: OwnedFd,
    _listed: ListEntry,
}

/// An entry in the list of our own descriptors.
#[derive(Debug)]
struct ListEntry(RawFd);

impl Descriptor {
    /// Opens the file under the list's lock, so that no thread mistakes it for another library's.
    fn open() -> Result<Descriptor, Errno> {
        let mut own = lock(own_descriptors());
        let fd = uninterrupted(|| open(MANAGER, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()))?;
        own.push(fd.as_raw_fd());
        Ok(Descriptor { _listed: ListEntry(fd.as_raw_fd()), fd })
    }
}

impl Drop for ListEntry {
    fn drop(&mut self) {
        let mut own = lock(own_descriptors());
        if let Some(at) = own.iter().position(|fd| *fd == self.0) {
            own.swap_remove(at);
        }
    }
}

/// The descriptors of this library's files. A number that is closed and reused before its entry is
/// removed has two entries.
fn own_descriptors() -> &'static Mutex<Vec<RawFd>> {
    static OWN: PerProcess<Mutex<Vec<RawFd>>> = PerProcess::new();
    // A child of fork inherits its parent's descriptors.
    OWN.get(|inherited| Mutex::new(inherited.and_then(|own| Some(own.try_lock().ok()?.clone())).unwrap_or_default()))
}

/// True if other code in this process, such as the vendor's library, has files of the driver open,
/// and also if that cannot be determined.
pub(crate) fn others_have_files() -> bool {
    let own = lock(own_descriptors());
    // The links are read but not followed: stat(2) may wait for a file server.
    let listed = || fs::read_dir("/proc/thread-self/fd")?.collect::<io::Result<Vec<_>>>();
    let Ok(descriptors) = signals::uninterrupted(listed) else { return true };
    descriptors.iter().any(|descriptor| {
        let number = descriptor.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok());
        let is_own = number.is_some_and(|number| own.contains(&number));
        let target = || signals::uninterrupted(|| fs::read_link(descriptor.path()));
        !is_own && target().is_ok_and(|target| is_manager(&target))
    })
}

/// True if an open file has the driver's name, in any directory.
fn is_manager(target: &Path) -> bool {
    let Some(name) = target.file_name().map(OsStr::as_bytes) else { return false };
    // The kernel marks a node that was removed.
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    Path::new(MANAGER).file_name().is_some_and(|manager| name == manager.as_bytes())
}

impl DavinciFile {
    /// Opens the device and binds the file to `module`: two system calls.
    pub(crate) fn open(module: &'static str) -> Result<DavinciFile> {
        let opened = traced(Call::plain(module, "open"), Descriptor::open);
        let descriptor = opened.map_err(|errno| OpenFailed { path: MANAGER.into(), errno })?;
        let mut arg = davinci::OpenArg::new(module);
        let bound = traced(Call::plain(module, davinci::OPEN.name), || {
            // SAFETY: the argument is the 260-byte struct that OPEN reads, and lives through the
            // call.
            unsafe { ioctl_uninterrupted(&descriptor.fd, davinci::OPEN.request(), (&raw mut arg).cast()) }
        });
        match bound {
            Ok(_) => Ok(DavinciFile { descriptor, module }),
            // The file is not bound, so it needs no CLOSE before close(2).
            Err(errno) => Err(Refused::new(SystemCall::Bind, errno)
                .operation("bind a file to a module")
                .object(format!("module {module} of {MANAGER}"))
                .into()),
        }
    }

    /// Sends one command of a module other than the memory module.
    pub(super) fn command<A: FromBytes + IntoBytes + Immutable>(&self, command: &Typed<A>, arg: &mut A) -> Answer {
        Answer::of(traced(Call::plain(self.module, command.name), || {
            // SAFETY: `arg` is exclusively borrowed for the call, any bytes are valid for it, and
            // its type is the command's whole argument.
            unsafe { self.raw(command.request(), (arg as *mut A).cast()) }
        }))
    }

    /// The bare ioctl(2) on this file.
    ///
    /// # Safety
    ///
    /// `arg` must point to memory that the module may read and write as its command demands.
    pub(super) unsafe fn raw(&self, request: u32, arg: *mut libc::c_void) -> Result<i32, Errno> {
        // SAFETY: the caller vouches for the argument.
        unsafe { ioctl_uninterrupted(&self.descriptor.fd, request, arg) }
    }

    /// The descriptor, for mmap(2).
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.descriptor.fd
    }
}

impl Drop for DavinciFile {
    fn drop(&mut self) {
        // In a child of fork(2) the kernel answers 0 and does nothing; the parent's file is
        // unaffected.
        let answer = self.command(&davinci::CLOSE, &mut davinci::OpenArg::default());
        if answer != Answer::Done {
            trace::error(
                format_args!("module {}: {answer:?}", self.module),
                "CLOSE was refused: close(2) may now release every file that this process has of the driver",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_driver_are_recognised_by_name_in_any_directory() {
        for target in ["/dev/davinci_manager", "/host/dev/davinci_manager", "/dev/davinci_manager (deleted)"] {
            assert!(is_manager(Path::new(target)), "{target}");
        }
        for target in ["/dev/davinci0", "socket:[17]", "/dev/davinci_manager/x", "pipe:[davinci_manager]", "/"] {
            assert!(!is_manager(Path::new(target)), "{target}");
        }
    }
}
