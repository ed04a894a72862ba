//! Client processes for tests that need several: a fork that runs a closure.
//!
//! A fork copies only the calling thread, and locks that other threads hold at that moment stay
//! locked in the child. In a process of [`crate::isolated()`] the other threads are the test
//! harness, which waits, and the emulator's server. The only locks of the server that a child could
//! need are the allocator's, which the C library unlocks in the child. The child must not use the
//! [`crate::Emulator`], which belongs to the parent.

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};
use std::fs::File;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A forked client.
#[derive(Debug)]
pub struct Client {
    pid: Pid,
    waited: bool,
}

/// Forks a client that runs `body` and exits. It uses the same driver as the caller. If the body
/// panics, the exit status is 101.
///
/// # Panics
/// If fork fails.
pub fn fork(body: impl FnOnce()) -> Client {
    // SAFETY: see the module's documentation for why the child may run ordinary code.
    match unsafe { nix::unistd::fork() } {
        Ok(ForkResult::Parent { child }) => Client { pid: child, waited: false },
        Ok(ForkResult::Child) => {
            let status = if catch_unwind(AssertUnwindSafe(body)).is_ok() { 0 } else { 101 };
            // _exit, because destructors and buffers belong to the parent.
            // SAFETY: ends the process in any state.
            unsafe { libc::_exit(status) }
        }
        Err(error) => panic!("fork: {error}"),
    }
}

impl Client {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Kills it and waits until it is gone.
    ///
    /// # Panics
    /// If it had already failed.
    pub fn kill(mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        match self.wait_once() {
            WaitStatus::Signaled(_, Signal::SIGKILL, _) | WaitStatus::Exited(_, 0) => {}
            status => panic!("the client ended before it was killed: {status:?}"),
        }
    }

    /// Waits until it is gone.
    pub fn wait(mut self) -> WaitStatus {
        self.wait_once()
    }

    /// Waits until it is gone.
    ///
    /// # Panics
    /// If it failed; its own message is on standard error.
    pub fn join(mut self) {
        let status = self.wait_once();
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "the client failed: {status:?}");
    }

    fn wait_once(&mut self) -> WaitStatus {
        self.waited = true;
        loop {
            match waitpid(self.pid, None) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => panic!("waitpid: {error}"),
                Ok(status) => return status,
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A test that fails leaves no processes behind.
        if !self.waited {
            let _ = kill(self.pid, Signal::SIGKILL);
            self.wait_once();
        }
    }
}

/// A pipe of numbers between processes: create it before a fork, then each side uses one end.
#[derive(Debug)]
pub struct Line {
    reader: File,
    writer: File,
}

impl Line {
    /// A new line.
    ///
    /// # Panics
    /// If pipe fails.
    pub fn new() -> Self {
        match nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC) {
            Ok((reader, writer)) => Line { reader: reader.into(), writer: writer.into() },
            Err(error) => panic!("pipe: {error}"),
        }
    }

    /// Sends a number.
    ///
    /// # Panics
    /// If the other end is closed.
    pub fn send(&self, number: u64) {
        if let Err(error) = (&self.writer).write_all(&number.to_le_bytes()) {
            panic!("the other process is gone: {error}");
        }
    }

    /// Waits for a number.
    ///
    /// # Panics
    /// If the other end is closed.
    pub fn receive(&self) -> u64 {
        let mut bytes = [0; 8];
        if let Err(error) = (&self.reader).read_exact(&mut bytes) {
            panic!("the other process is gone: {error}");
        }
        u64::from_le_bytes(bytes)
    }
}

impl Default for Line {
    fn default() -> Self {
        Line::new()
    }
}
