//! A file of `/dev/davinci_manager`, and the few system calls that rules make on it.
//!
//! Dropping a [`Manager`] issues the CLOSE command first, as an orderly client must;
//! [`Manager::abandon`] does not.

use crate::rule::{Answer, Failure, Judge, note_command};
use ascend_ioctl::{Command, davinci};
use std::ffi::CString;
use std::os::fd::RawFd;

/// The errno of the last system call of this thread.
pub fn errno() -> i32 {
    nix::errno::Errno::last_raw()
}

/// A system call's result as an answer.
pub fn answer(result: i64) -> Answer<i64> {
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// open(2) of a path.
pub fn open(path: &str, flags: i32) -> Answer<RawFd> {
    note_command("open");
    let path = CString::new(path).map_err(|_| libc::EINVAL)?;
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    answer(i64::from(unsafe { libc::open(path.as_ptr(), flags) })).map(|fd| fd as RawFd)
}

/// ioctl(2) with an address as argument; positive results are returned.
pub fn ioctl(fd: RawFd, request: u32, argument: u64) -> Answer<i32> {
    // SAFETY: the kernel checks the address; rules pass addresses of their own buffers, which are
    // as large as the driver's structs, or unmapped addresses.
    answer(i64::from(unsafe { libc::ioctl(fd, request as _, argument) })).map(|value| value as i32)
}

/// mmap(2) with a hint.
pub fn mmap(hint: u64, length: u64, prot: i32, flags: i32, fd: RawFd) -> Answer<u64> {
    note_command("mmap");
    // SAFETY: a new mapping that replaces nothing: rules that pass MAP_FIXED do so on ranges that
    // they mapped themselves.
    let address = unsafe { libc::mmap(hint as *mut libc::c_void, length as usize, prot, flags, fd, 0) };
    if address == libc::MAP_FAILED { Err(errno()) } else { Ok(address as u64) }
}

/// munmap(2).
pub fn munmap(address: u64, length: u64) -> Answer<()> {
    note_command("munmap");
    // SAFETY: only ranges that the rule mapped itself, and to which nothing refers afterwards.
    answer(i64::from(unsafe { libc::munmap(address as *mut libc::c_void, length as usize) })).map(drop)
}

/// mprotect(2).
pub fn mprotect(address: u64, length: u64, prot: i32) -> Answer<()> {
    note_command("mprotect");
    // SAFETY: only ranges that the rule mapped itself.
    answer(i64::from(unsafe { libc::mprotect(address as *mut libc::c_void, length as usize, prot) })).map(drop)
}

/// madvise(2).
pub fn madvise(address: u64, length: u64, advice: i32) -> Answer<()> {
    note_command("madvise");
    // SAFETY: only ranges that the rule mapped itself.
    answer(i64::from(unsafe { libc::madvise(address as *mut libc::c_void, length as usize, advice) })).map(drop)
}

/// Anonymous memory at `hint` (0 for anywhere).
pub fn anonymous(hint: u64, length: u64, prot: i32) -> Answer<u64> {
    mmap(hint, length, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
}

/// An address that is never mapped.
pub const NOWHERE: u64 = 0x10;

/// A file of `/dev/davinci_manager`.
#[derive(Debug)]
pub struct Manager {
    fd: RawFd,
}

impl Manager {
    /// Opens the device.
    pub fn open() -> Result<Manager, Failure> {
        Manager::open_with(libc::O_RDWR | libc::O_CLOEXEC)
    }

    /// Opens the device with these flags.
    pub fn open_with(flags: i32) -> Result<Manager, Failure> {
        Ok(Manager { fd: open(davinci::PATH, flags).granted()? })
    }

    /// Opens the device and binds the file to a module.
    pub fn bound(module: &str) -> Result<Manager, Failure> {
        let file = Manager::open()?;
        file.bind(module).granted()?;
        Ok(file)
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// OPEN.
    pub fn bind(&self, module: &str) -> Answer<i32> {
        let mut arg = davinci::OpenArg::new(module);
        self.command(&davinci::OPEN, &mut arg)
    }

    /// OPEN of a module for one device, by its physical id.
    pub fn bind_to(&self, module: &str, physical: u32) -> Answer<i32> {
        let mut arg = davinci::OpenArg { device_id: physical as i32, ..davinci::OpenArg::new(module) };
        self.command(&davinci::OPEN, &mut arg)
    }

    /// CLOSE.
    pub fn announce_close(&self) -> Answer<i32> {
        self.command_at(&davinci::CLOSE, 0)
    }

    /// A command with a local struct as argument.
    pub fn command<T>(&self, command: &Command, argument: &mut T) -> Answer<i32> {
        self.command_at(command, std::ptr::from_mut(argument) as u64)
    }

    /// A command with any address as argument.
    pub fn command_at(&self, command: &Command, argument: u64) -> Answer<i32> {
        note_command(command.name);
        ioctl(self.fd, command.request(), argument)
    }

    /// A request value with any address as argument.
    pub fn request(&self, request: u32, argument: u64) -> Answer<i32> {
        note_command("the ioctl");
        ioctl(self.fd, request, argument)
    }

    /// dup(2): another descriptor of the same file.
    pub fn duplicate(&self) -> Answer<Manager> {
        note_command("dup");
        // SAFETY: dup has no preconditions.
        answer(i64::from(unsafe { libc::dup(self.fd) })).map(|fd| Manager { fd: fd as RawFd })
    }

    /// close(2) alone, as a dying process does.
    pub fn abandon(self) {
        close(self.fd);
        std::mem::forget(self);
    }

    /// Leaves the file open until the process ends.
    pub fn leak(self) -> RawFd {
        let fd = self.fd;
        std::mem::forget(self);
        fd
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.announce_close();
        close(self.fd);
    }
}

/// close(2).
pub fn close(fd: RawFd) {
    // SAFETY: rules close only descriptors that they opened, once.
    unsafe { libc::close(fd) };
}

/// The host's page size.
pub fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}
