//! The caller of a system call, and its memory.

use nix::errno::Errno;
use std::time::Instant;

/// A range of the caller's memory could not be read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadAddress;

/// A caller's address space, as `copy_from_user` and `copy_to_user` see it.
pub trait Memory {
    /// Reads all of `buffer` from `address`, or faults.
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress>;
    /// Writes all of `bytes` to `address`, or faults (possibly after a part was written).
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress>;
    /// Checks a range of which only the addresses are known: copies move nothing then. `None` if
    /// its bytes are known, too.
    fn without_bytes(&self, _address: u64, _length: u64) -> Option<Result<(), BadAddress>> {
        None
    }
}

/// The task that makes a system call. Ids are those of the emulator's pid namespace, which stands
/// for the initial one.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// Thread id.
    pub tid: i32,
    /// Process id.
    pub tgid: i32,
    /// Start time of the process's leader, in nanoseconds since boot (with the resolution of
    /// `/proc/PID/stat`).
    pub start_time: u64,
    /// Differs between two processes that have the same id one after the other; 0 on kernels that
    /// do not tell.
    pub identity: u64,
    /// Inode of the mount namespace, by which the driver distinguishes containers.
    pub mount_namespace: u64,
    /// Effective user id.
    pub uid: u32,
    /// The caller's memory.
    pub memory: &'a dyn Memory,
    /// When the call arrived. A call that sleeps is repeated with the same value.
    pub arrived: Instant,
}

/// The outcome of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It returns now. A positive value is the system call's own return value.
    Done(Result<i64, Errno>),
    /// It sleeps in the kernel; the same call is repeated at this time. If the caller dies before
    /// that, the call is dropped, so a sleeping call must not have changed the model. The file
    /// stays open as long as a call on it sleeps.
    Sleep(Instant),
    /// As [`Outcome::Sleep`], but a signal interrupts it: the call then fails with ERESTARTSYS, so
    /// the kernel repeats it from its beginning or returns EINTR, as the signal's action says.
    Wait(Instant),
}

impl From<Result<i64, Errno>> for Outcome {
    fn from(result: Result<i64, Errno>) -> Self {
        Outcome::Done(result)
    }
}

impl From<Errno> for Outcome {
    fn from(errno: Errno) -> Self {
        Outcome::Done(Err(errno))
    }
}
