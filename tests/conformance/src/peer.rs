//! Further processes of a rule, forked before the rule opens anything and controlled over a socket.
//!
//! A forked child inherits every descriptor of its parent, and the driver releases nothing while
//! one of them is open; so a [`Peer`] is started first.

use crate::rule::{Failure, Verdict};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One end of the socket between a rule and its peer.
#[derive(Debug)]
pub struct Link(UnixStream);

impl Link {
    /// Sends a number.
    pub fn send(&mut self, value: u64) -> Verdict {
        self.0
            .write_all(&value.to_le_bytes())
            .map_err(|error| Failure::broken(format!("the other process is gone: {error}")))
    }

    /// Waits for a number.
    pub fn receive(&mut self) -> Result<u64, Failure> {
        let mut bytes = [0; 8];
        match self.0.read_exact(&mut bytes) {
            Ok(()) => Ok(u64::from_le_bytes(bytes)),
            Err(error) => Err(Failure::broken(format!("the other process is gone: {error}"))),
        }
    }
}

/// Another process of the rule.
#[derive(Debug)]
pub struct Peer {
    /// Its id in this process's pid namespace.
    pub pid: i32,
    /// The socket to it.
    pub link: Link,
    ended: bool,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// exit(2) with this status.
    Exit(i32),
    /// Killed by this signal.
    Signal(i32),
}

/// fork(2) of this process.
pub fn fork() -> i32 {
    // SAFETY: the child runs rule code only and ends with _exit; rules fork from processes with one
    // thread.
    unsafe { libc::fork() }
}

/// Ends this process at once, without running destructors: the kernel closes its files.
pub fn leave(status: i32) -> ! {
    // SAFETY: _exit never returns and touches nothing.
    unsafe { libc::_exit(status) }
}

/// Waits for a child.
pub fn wait(pid: i32) -> End {
    let mut status = 0;
    loop {
        // SAFETY: the status is a local that outlives the call.
        let result = unsafe { libc::waitpid(pid, &mut status, 0) };
        if result == pid {
            break;
        }
        if result < 0 && crate::manager::errno() != libc::EINTR {
            return End::Exit(-1);
        }
    }
    if libc::WIFSIGNALED(status) { End::Signal(libc::WTERMSIG(status)) } else { End::Exit(libc::WEXITSTATUS(status)) }
}

/// Runs `body` in a forked child, which exits with 0 when it returns; returns how the child ended.
pub fn in_child(body: impl FnOnce()) -> End {
    match fork() {
        0 => {
            body();
            leave(0)
        }
        pid if pid > 0 => wait(pid),
        _ => End::Exit(-1),
    }
}

/// Runs a check in a forked child and returns its verdict.
pub fn check_in_child(body: impl FnOnce() -> Verdict) -> Verdict {
    Peer::start(|_| body())?.finish()
}

impl Peer {
    /// Forks a process that runs `body`.
    pub fn start(body: impl FnOnce(&mut Link) -> Verdict) -> Result<Peer, Failure> {
        let (ours, theirs) = UnixStream::pair().map_err(Failure::broken)?;
        match fork() {
            0 => {
                drop(ours);
                let mut link = Link(theirs);
                let verdict = catch_unwind(AssertUnwindSafe(|| body(&mut link)))
                    .unwrap_or_else(|_| Err(Failure::broken("the other process panicked")));
                leave(report(&mut link, verdict))
            }
            pid if pid > 0 => Ok(Peer { pid, link: Link(ours), ended: false }),
            _ => Err(Failure::broken("fork failed")),
        }
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(&mut self) {
        // SAFETY: the process is a child of ours that was not waited for, so the id is its own.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        wait(self.pid);
        self.ended = true;
    }

    /// Waits for the process to end and returns its verdict.
    pub fn finish(mut self) -> Verdict {
        let mut text = String::new();
        let _ = self.link.0.read_to_string(&mut text);
        let end = wait(self.pid);
        self.ended = true;
        match (end, text.split_once('\n')) {
            (End::Exit(0), _) => Ok(()),
            (End::Exit(1), Some((_, text))) => Err(Failure::Broken(format!("in the other process: {text}"))),
            (End::Exit(2), Some((_, text))) => Err(Failure::Skipped(text.to_string())),
            (end, _) => Err(Failure::broken(format!("the other process ended with {end:?}"))),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
        }
    }
}

/// Sends a verdict and returns the exit status for it.
fn report(link: &mut Link, verdict: Verdict) -> i32 {
    let (status, text) = match verdict {
        Ok(()) => (0, String::new()),
        Err(Failure::Broken(text)) => (1, text),
        Err(Failure::Skipped(text)) => (2, text),
    };
    let _ = link.0.write_all(format!("\n{text}").as_bytes());
    status
}
