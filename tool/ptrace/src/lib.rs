//! The parts of ptrace(2), seccomp(2) and kcmp(2) that a tracer of system calls needs.
//!
//! `nix` has safe functions for most of ptrace, but its signals end at 31: a thread that is stopped
//! by a real-time signal is taken from the kernel's queue and lost, and the signal cannot be passed
//! on. It also has no PTRACE_LISTEN, without which a stopped process does not stay stopped. The
//! unsafe code of `ascend-vmm trace` is all here. Each call passes integers, or a buffer of its
//! own.

pub mod filter;

use ascend_emulator::seccomp::ARCHITECTURE;
use libc::{c_int, c_uint, c_void};
use nix::errno::Errno;
use std::ptr;

/// The events that stop a thread: new threads and children, and exec.
const OPTIONS: c_int = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACEEXEC
    | libc::PTRACE_O_TRACESECCOMP;

/// The signal number of a stop at a system call: SIGTRAP, marked by PTRACE_O_TRACESYSGOOD.
const SYSCALL_STOP: c_int = libc::SIGTRAP | 0x80;

/// What waiting for a thread reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// It exited with this status. For the first thread of a process: all threads are gone.
    Exited(i32),
    /// It was killed by this signal.
    Killed(i32),
    /// It is about to enter a system call or has left one: see [`call`].
    AtCall,
    /// It stopped for an event.
    Event(Event),
    /// It is about to receive this signal.
    Signal(i32),
    /// The whole process is stopped by this signal; the thread waits for SIGCONT.
    GroupStop(i32),
}

/// An event of a traced thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It made another thread or process; [`message`] is the new id.
    Clone,
    /// It called exec; [`message`] is the id that it had before.
    Exec,
    /// The filter caught a system call.
    Filtered,
    /// It is new, was interrupted, or was continued by SIGCONT.
    Trap,
    /// Another.
    Other,
}

/// How far a stopped thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// To the next event.
    Continue,
    /// To the next event, or to the beginning or the end of a system call.
    ToCall,
}

/// Where in a system call a thread is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Before it. The number is one of the native architecture.
    Entry {
        /// Its number.
        number: i64,
        /// Its arguments.
        arguments: [u64; 6],
    },
    /// After it.
    Exit(i64),
    /// It is a call of another architecture, such as that of a 32-bit program.
    Foreign,
}

/// A ptrace request whose address and data are plain numbers.
fn request(request: c_uint, tid: i32, address: usize, data: usize) -> Result<i64, Errno> {
    // SAFETY: the requests that this module makes take `address` and `data` as numbers; those with
    // a buffer are made elsewhere.
    let result = unsafe {
        libc::ptrace(
            request as _,
            tid,
            ptr::without_provenance_mut::<c_void>(address),
            ptr::without_provenance_mut::<c_void>(data),
        )
    };
    Errno::result(result as i64)
}

/// Traces a thread, and all threads and processes that it makes. `until_death` says that they are
/// killed if the tracer dies.
///
/// # Errors
/// EPERM: not allowed, or another tracer has it. ESRCH: there is no such thread.
pub fn seize(tid: i32, until_death: bool) -> Result<(), Errno> {
    let options = OPTIONS | if until_death { libc::PTRACE_O_EXITKILL } else { 0 };
    request(libc::PTRACE_SEIZE as c_uint, tid, 0, options as usize).map(drop)
}

/// Stops a thread soon: it reports [`Event::Trap`], or another stop that came first.
///
/// # Errors
/// ESRCH: the thread is gone.
pub fn interrupt(tid: i32) -> Result<(), Errno> {
    request(libc::PTRACE_INTERRUPT as c_uint, tid, 0, 0).map(drop)
}

/// Leaves a thread stopped as its process is, until SIGCONT or [`interrupt`].
///
/// # Errors
/// ESRCH: the thread is gone.
pub fn listen(tid: i32) -> Result<(), Errno> {
    request(libc::PTRACE_LISTEN as c_uint, tid, 0, 0).map(drop)
}

/// Lets a stopped thread continue, with this signal or with 0 for none.
///
/// # Errors
/// ESRCH: the thread was killed meanwhile.
pub fn resume(tid: i32, how: How, signal: i32) -> Result<(), Errno> {
    let kind = match how {
        How::Continue => libc::PTRACE_CONT,
        How::ToCall => libc::PTRACE_SYSCALL,
    };
    request(kind as c_uint, tid, 0, signal as usize).map(drop)
}

/// Stops tracing a stopped thread and lets it continue, with this signal or with 0 for none.
///
/// # Errors
/// ESRCH: the thread was killed meanwhile.
pub fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_DETACH as c_uint, tid, 0, signal as usize).map(drop)
}

/// The id that an [`Event`] carries.
///
/// # Errors
/// ESRCH: the thread was killed meanwhile.
pub fn message(tid: i32) -> Result<i32, Errno> {
    let mut message: libc::c_ulong = 0;
    // SAFETY: the kernel writes one long to the address.
    let result = unsafe {
        libc::ptrace(libc::PTRACE_GETEVENTMSG as _, tid, ptr::null_mut::<c_void>(), (&raw mut message).cast::<c_void>())
    };
    Errno::result(result).map(|_| message as i32)
}

/// PTRACE_GET_SYSCALL_INFO, which not every C library has.
const GET_SYSCALL_INFO: c_uint = 0x420e;

/// The kernel's `ptrace_syscall_info`, whose union is eight words at most.
#[repr(C)]
#[derive(Default)]
struct Info {
    op: u8,
    padding: [u8; 3],
    architecture: u32,
    instruction_pointer: u64,
    stack_pointer: u64,
    data: [u64; 8],
}

/// Where in a system call a stopped thread is; `None` if it is not at one.
///
/// # Errors
/// ESRCH: the thread was killed meanwhile. EIO: the kernel is older than Linux 5.3.
pub fn call(tid: i32) -> Result<Option<Call>, Errno> {
    const ENTRY: u8 = 1;
    const EXIT: u8 = 2;
    const SECCOMP: u8 = 3;
    let mut info = Info::default();
    // SAFETY: the kernel writes at most as many bytes as are passed, which is the struct's size.
    let result = unsafe {
        libc::ptrace(
            GET_SYSCALL_INFO as _,
            tid,
            ptr::without_provenance_mut::<c_void>(size_of::<Info>()),
            (&raw mut info).cast::<c_void>(),
        )
    };
    Errno::result(result)?;
    let [first, a, b, c, d, e, f, _] = info.data;
    Ok(match info.op {
        ENTRY | EXIT | SECCOMP if info.architecture != ARCHITECTURE => Some(Call::Foreign),
        ENTRY | SECCOMP => Some(Call::Entry { number: first as i64, arguments: [a, b, c, d, e, f] }),
        EXIT => Some(Call::Exit(first as i64)),
        _ => None,
    })
}

/// What a traced thread or a child of this process reports, without waiting; `None` if nothing.
///
/// # Errors
/// ECHILD: nothing is traced any more.
pub fn poll() -> Result<Option<(i32, Report)>, Errno> {
    let mut status = 0;
    // SAFETY: the kernel writes one integer to the address.
    let tid = Errno::result(unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::WNOHANG) })?;
    Ok((tid != 0).then(|| (tid, report(status))))
}

fn report(status: c_int) -> Report {
    if libc::WIFEXITED(status) {
        return Report::Exited(libc::WEXITSTATUS(status));
    }
    if libc::WIFSIGNALED(status) {
        return Report::Killed(libc::WTERMSIG(status));
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        0 if signal == SYSCALL_STOP => Report::AtCall,
        0 => Report::Signal(signal),
        libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => Report::GroupStop(signal),
        libc::PTRACE_EVENT_STOP => Report::Event(Event::Trap),
        libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => Report::Event(Event::Clone),
        libc::PTRACE_EVENT_EXEC => Report::Event(Event::Exec),
        libc::PTRACE_EVENT_SECCOMP => Report::Event(Event::Filtered),
        _ => Report::Event(Event::Other),
    }
}

/// Makes sure that reports raise SIGCHLD: a parent may have set it to be ignored.
///
/// # Errors
/// None that the kernel documents.
pub fn accept_reports() -> Result<(), Errno> {
    // SAFETY: sets the default action, which is no function of the program.
    let former = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    if former == libc::SIG_ERR { Err(Errno::last()) } else { Ok(()) }
}

/// Whether two descriptors of two processes are the same open file; `None` if the kernel does not
/// tell.
pub fn same_file(one: (i32, i32), other: (i32, i32)) -> Option<bool> {
    const KCMP_FILE: c_int = 0;
    // SAFETY: takes five integers.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, KCMP_FILE, one.1, other.1) };
    Errno::result(result).ok().map(|order| order == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_status_is_distinguished() {
        assert_eq!(report(7 << 8), Report::Exited(7));
        assert_eq!(report(9), Report::Killed(9));
        let stopped = |signal: c_int, event: c_int| report(event << 16 | signal << 8 | 0x7f);
        assert_eq!(stopped(libc::SIGTRAP | 0x80, 0), Report::AtCall);
        assert_eq!(stopped(libc::SIGTRAP, 0), Report::Signal(libc::SIGTRAP));
        // Real-time signals too.
        assert_eq!(stopped(40, 0), Report::Signal(40));
        assert_eq!(stopped(64, 0), Report::Signal(64));
        assert_eq!(stopped(libc::SIGSTOP, libc::PTRACE_EVENT_STOP), Report::GroupStop(libc::SIGSTOP));
        assert_eq!(stopped(libc::SIGTRAP, libc::PTRACE_EVENT_STOP), Report::Event(Event::Trap));
        assert_eq!(stopped(libc::SIGTRAP, libc::PTRACE_EVENT_VFORK), Report::Event(Event::Clone));
        assert_eq!(stopped(libc::SIGTRAP, libc::PTRACE_EVENT_SECCOMP), Report::Event(Event::Filtered));
    }

    #[test]
    fn the_same_file_is_recognised_under_two_descriptors() {
        use std::os::fd::AsRawFd;
        let one = std::fs::File::open("/dev/null").unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        let again = one.try_clone().unwrap();
        let own = std::process::id() as i32;
        let same = |a: &std::fs::File, b: &std::fs::File| same_file((own, a.as_raw_fd()), (own, b.as_raw_fd()));
        // Kernels can be built without kcmp.
        if same(&one, &one).is_some() {
            assert_eq!(same(&one, &again), Some(true));
            assert_eq!(same(&one, &other), Some(false));
        }
    }
}
