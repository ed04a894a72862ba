//! The kernel driver: its files, commands and answers.
//!
//! This floor knows the kernel and nothing of what the library builds on it. Each file of the
//! driver has a module here, and each command that we issue has a method with the command's own
//! name. The methods take and return plain values, so no code above this floor sees an ABI struct
//! of the memory module. All commands go through one ioctl(2), and every system call is reported in
//! one format (`trace.rs`).
//!
//! | module | file |
//! |---|---|
//! | [`davinci`] | `/dev/davinci_manager`, bound to one of the driver's modules |
//! | [`uda`] | its module `uda`: the devices of this process and their numbers |
//! | [`urd`] | its module `URD`: queries named by keys |
//! | [`devmng`] | its module `DEVMNG`: identity of processes and devices |
//! | [`svm`], [`segments`], [`log_page`] | its module `SVM`: memory |
//! | [`hdc`] | `/dev/hisi_hdc`: packets to daemons on a device |
//! | [`recognise`] | which generation the driver is |

pub(crate) mod davinci;
pub(crate) mod devmng;
pub(crate) mod hdc;
pub(crate) mod log_page;
pub(crate) mod recognise;
pub(crate) mod segments;
pub(crate) mod svm;
pub(crate) mod uda;
pub(crate) mod urd;

use crate::error::{Errno, Refused, SystemCall};
use nix::libc;
use std::os::fd::{AsRawFd, OwnedFd};

/// The one place where this library calls ioctl(2).
///
/// # Safety
///
/// `arg` must point to memory that the driver behind `fd` may read and write as `request` demands.
unsafe fn ioctl(fd: &OwnedFd, request: u32, arg: *mut libc::c_void) -> Result<i32, Errno> {
    // SAFETY: the caller vouches for the argument; the descriptor is open while it is borrowed.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), arg) } {
        // Not through nix, which knows only Linux's errnos: some modules have codes of their own.
        -1 => Err(Errno::from_raw(nix::errno::Errno::last_raw())),
        answer => Ok(answer),
    }
}

/// ioctl(2), repeated after EINTR. No command of `/dev/davinci_manager` that this library sends is
/// known to answer EINTR (inferred: the driver's source was searched for it, not read whole). It
/// comes from a supervisor of this process that had not taken the call yet, as some containers have
/// one (seccomp_unotify(2)). With SA_RESTART the kernel repeats such a call by itself.
///
/// # Safety
///
/// As for [`ioctl`].
unsafe fn ioctl_uninterrupted(fd: &OwnedFd, request: u32, arg: *mut libc::c_void) -> Result<i32, Errno> {
    loop {
        // SAFETY: the caller vouches for the argument.
        match unsafe { ioctl(fd, request, arg) } {
            Err(Errno::EINTR) => {}
            answer => return answer,
        }
    }
}

/// Repeats a system call that a signal interrupted before it did anything: open, mmap and the like.
/// Not for ioctls of `/dev/hisi_hdc`, which would wait their full time again.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> nix::Result<T>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(nix::Error::EINTR) => {}
            answer => return answer.map_err(Errno::of),
        }
    }
}

/// A module's answer. uda, URD and DEVMNG also return positive numbers of their own, which are
/// refusals too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Done.
    Done,
    /// An errno.
    Refused(Errno),
    /// A positive return value: a vendor error number, or bytes that could not be copied.
    Positive(i32),
}

impl Answer {
    fn of(returned: Result<i32, Errno>) -> Answer {
        match returned {
            Ok(0) => Answer::Done,
            Ok(number) => Answer::Positive(number),
            Err(errno) => Answer::Refused(errno),
        }
    }

    /// The value that came with the answer, if the command was done.
    fn with<T>(self, value: T) -> Result<T, Answer> {
        if self == Answer::Done { Ok(value) } else { Err(self) }
    }

    /// The error for an answer other than [`Answer::Done`]. The arguments name a module's own
    /// number.
    pub(crate) fn refused(self, command: &'static str) -> Box<Refused> {
        let call = SystemCall::Other(command);
        match self {
            Answer::Refused(errno) => Refused::new(call, errno),
            Answer::Done => Refused::new(call, Errno::EIO),
            Answer::Positive(number) => {
                Refused::new(call, Errno::EIO).arguments(format!("the driver's own code {number}"))
            }
        }
    }
}
