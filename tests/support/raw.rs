//! The driver by bare system calls, as another program or another library in the process uses it.

use ascend_ioctl::davinci::{self, OpenArg};
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A file that is bound to a module of the driver, until it is dropped.
pub struct ModuleFile(OwnedFd);

impl ModuleFile {
    pub fn open(module: &str) -> ModuleFile {
        let file = open(davinci::PATH, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
        let file = ModuleFile(file);
        assert_eq!(file.ioctl(davinci::OPEN.request(), &mut OpenArg::new(module)), 0);
        file
    }

    /// One command; `arg` must be the struct that belongs to it.
    pub fn ioctl<T>(&self, request: u32, arg: &mut T) -> i32 {
        // SAFETY: each caller passes the struct of the command, which lives through the call.
        unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, std::ptr::from_mut(arg)) }
    }
}

impl AsRawFd for ModuleFile {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for ModuleFile {
    fn drop(&mut self) {
        let closed = self.ioctl(davinci::CLOSE.request(), &mut OpenArg::default());
        // Not while a failed test unwinds: a second panic would hide the first.
        assert!(closed == 0 || std::thread::panicking(), "CLOSE returned {closed}");
    }
}
