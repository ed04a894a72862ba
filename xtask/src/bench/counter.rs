//! Counts exactly what a process does between two marks: user-space instructions and system calls.
//!
//! The process asks to be traced and stops itself with SIGSTOP at each mark ([`mark`]). Its parent
//! lets it continue to the next mark in one of three modes: at full speed, from system call to
//! system call, or instruction by instruction. A step over a system call is one instruction,
//! however long the kernel works. This needs neither valgrind nor a hardware counter and gives the
//! same number each time. It costs some microseconds per instruction.

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::io;
use std::ops::Range;
use std::process::{Child, Command};

/// In the traced process: asks the parent to trace this thread. The other threads of the process
/// are neither stopped nor counted.
pub fn trace_me() -> Result<(), Errno> {
    ptrace::traceme()
}

/// In the traced process: a mark.
pub fn mark() -> Result<(), Errno> {
    raise(Signal::SIGSTOP)
}

/// How the parent lets the process continue to the next mark, and so what it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Counts nothing.
    Run,
    /// Counts system calls.
    Calls,
    /// Counts instructions.
    Steps,
}

/// What the process did between two marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Instructions or system calls, depending on the mode.
    pub number: u64,
    /// The ioctls among the system calls.
    pub ioctls: u64,
    /// The instructions in the C library.
    pub c_library: u64,
}

/// The address of the next instruction of a stopped process.
fn instruction(pid: Pid) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    let address = ptrace::getregs(pid).map(|registers| registers.rip);
    #[cfg(target_arch = "aarch64")]
    let address = ptrace::getregset::<ptrace::regset::NT_PRSTATUS>(pid).map(|registers| registers.pc);
    address.ok()
}

/// Whether single steps get past atomic operations. On aarch64 without LSE these are loops of
/// `ldxr` and `stxr`, and each stop between the two clears the exclusive monitor.
pub fn steps_end() -> bool {
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("lse");
    #[cfg(not(target_arch = "aarch64"))]
    true
}

/// The addresses of the C library's code in a process. Empty for a static program.
fn c_library(pid: Pid) -> Range<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let code = maps.lines().find(|line| line.contains("r-xp") && line.contains("/libc.so"));
    let range = code.and_then(|line| line.split_whitespace().next()?.split_once('-'));
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap_or(0);
    range.map_or(0..0, |(start, end)| number(start)..number(end))
}

/// Whether a process that is stopped at a system call is stopped at an ioctl.
fn is_ioctl(pid: Pid) -> bool {
    #[cfg(target_arch = "x86_64")]
    let number = ptrace::getregs(pid).map(|registers| registers.orig_rax);
    #[cfg(target_arch = "aarch64")]
    let number = ptrace::getregset::<ptrace::regset::NT_PRSTATUS>(pid).map(|registers| registers.regs[8]);
    number.is_ok_and(|number| number == nix::libc::SYS_ioctl as u64)
}

/// Why there is no count.
#[derive(Debug, thiserror::Error)]
pub enum CountError {
    /// The process could not be started.
    #[error("the measured process cannot be started: {0}")]
    Spawn(io::Error),
    /// Tracing is not allowed.
    #[error("this environment does not allow ptrace ({0}); in a container, add --cap-add SYS_PTRACE")]
    Trace(Errno),
    /// Single steps would never end.
    #[error(
        "this CPU has no atomic instructions (LSE): programs use exclusive loads and stores instead, and a \
         single step between the two makes the store fail each time"
    )]
    NoAtomics,
    /// The process ended before its next mark.
    #[error("the measured process ended too early: {0:?}")]
    Ended(WaitStatus),
}

/// A process that is stopped at a mark. ptrace ties it to the *thread* that started it, so only
/// that thread may use this.
#[derive(Debug)]
pub struct Traced {
    child: Child,
    pid: Pid,
    c_library: Range<u64>,
    ended: bool,
}

impl Traced {
    /// Starts a program that calls [`trace_me`], and waits for its first mark.
    pub fn spawn(command: &mut Command) -> Result<Self, CountError> {
        let child = command.spawn().map_err(CountError::Spawn)?;
        // A process id fits: the kernel's limit is 2^22.
        let pid = Pid::from_raw(child.id() as i32);
        let mut traced = Traced { child, pid, c_library: 0..0, ended: false };
        traced.wait(&mut |_| None)?;
        traced.c_library = c_library(pid);
        ptrace::setoptions(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD | ptrace::Options::PTRACE_O_EXITKILL)
            .map_err(CountError::Trace)?;
        Ok(traced)
    }

    /// The started program, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Lets the process continue to the next mark and counts on the way.
    pub fn advance(&mut self, mode: Mode) -> Result<Count, CountError> {
        if mode == Mode::Steps && !steps_end() {
            return Err(CountError::NoAtomics);
        }
        let mut count = Count::default();
        let (pid, c_library) = (self.pid, self.c_library.clone());
        let go = move |signal: Option<Signal>| match mode {
            Mode::Run => ptrace::cont(pid, signal),
            Mode::Calls => ptrace::syscall(pid, signal),
            Mode::Steps => ptrace::step(pid, signal),
        };
        go(None).map_err(CountError::Trace)?;
        self.wait(&mut |status| {
            match status {
                WaitStatus::PtraceSyscall(_) => {
                    count.number += 1;
                    count.ioctls += u64::from(is_ioctl(pid));
                }
                WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                    count.number += 1;
                    count.c_library += u64::from(instruction(pid).is_some_and(|at| c_library.contains(&at)));
                }
                _ => {}
            }
            Some(go(match status {
                WaitStatus::Stopped(_, signal) if *signal != Signal::SIGTRAP => Some(*signal),
                _ => None,
            }))
        })?;
        // Each system call stops twice, before and after. The one of the mark stops only before.
        if mode == Mode::Calls {
            count = Count { number: count.number / 2, ioctls: count.ioctls / 2, c_library: 0 };
        }
        Ok(count)
    }

    /// Lets the process run to its end. Another mark before that is an error.
    pub fn finish(mut self) -> Result<(), CountError> {
        match self.advance(Mode::Run) {
            Err(CountError::Ended(WaitStatus::Exited(_, 0))) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(CountError::Ended(WaitStatus::Stopped(self.pid, Signal::SIGSTOP))),
        }
    }

    /// Waits for the next mark. At other stops, `at_stop` lets the process continue.
    fn wait(&mut self, at_stop: &mut dyn FnMut(&WaitStatus) -> Option<Result<(), Errno>>) -> Result<(), CountError> {
        loop {
            let status = match waitpid(self.pid, None) {
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(CountError::Trace(error)),
                Ok(status) => status,
            };
            match status {
                WaitStatus::Stopped(_, Signal::SIGSTOP) => return Ok(()),
                WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                    self.ended = true;
                    return Err(CountError::Ended(status));
                }
                _ => {}
            }
            match at_stop(&status) {
                Some(Ok(())) => {}
                Some(Err(error)) => return Err(CountError::Trace(error)),
                None => return Err(CountError::Ended(status)),
            }
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = waitpid(self.pid, None);
        }
    }
}
