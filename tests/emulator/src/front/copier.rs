//! A process that copies memory of the server's process.
//!
//! A client in the server's process may pass an address at which nothing is mapped. The kernel
//! copies from and to such addresses safely, but it takes more than twice as long as a processor in
//! user mode, because it copies page by page. So much memory is copied by a process of its own,
//! which shares the address space but has signal handlers of its own: a fault ends that process
//! alone.
//!
//! It has no thread-local memory of its own either, but the server's. So it does nothing but
//! system calls that do not fail, and memcpy.

use crate::caller::BadAddress;
use libc::{c_int, c_void};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use nix::unistd::pipe2;
use std::mem::MaybeUninit;
use std::num::NonZero;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// What is copied.
#[repr(C)]
struct Job {
    from: *const c_void,
    to: *mut c_void,
    length: usize,
}

/// Replies: it runs, or the job is done; the memory cannot be accessed.
const DONE: u8 = 1;
const FAULT: u8 = 2;

/// Size of its stack.
const STACK: usize = 64 << 10;

/// Its descriptors.
const JOBS: RawFd = 0;
const REPLIES: RawFd = 1;

/// The server's side of the process.
pub struct Copier {
    /// `None` only while this value is dropped.
    jobs: Option<OwnedFd>,
    replies: OwnedFd,
    pid: libc::pid_t,
    stack: NonNull<c_void>,
}

impl Copier {
    /// Starts the process. Returns when it has none of the server's descriptors any more, which
    /// would keep files of clients open.
    pub fn start() -> Result<Self, Errno> {
        let (job_reader, jobs) = pipe()?;
        let (replies, reply_writer) = pipe()?;
        let length = NonZero::new(STACK).ok_or(Errno::EINVAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let stack = unsafe {
            mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)?
        };
        let ends = [job_reader.as_raw_fd(), reply_writer.as_raw_fd()];
        // No tracer of the program follows it, and its end sends no signal.
        let flags = libc::CLONE_VM | libc::CLONE_UNTRACED;
        // SAFETY: the function runs on a stack of its own and uses nothing of this thread but
        // `ends`, which it has read before it replies. The stack lives until the process has ended.
        let pid =
            unsafe { libc::clone(main, stack.byte_add(STACK).as_ptr(), flags, (&raw const ends).cast_mut().cast()) };
        if pid < 0 {
            let error = Errno::last();
            // SAFETY: the mapping is new, and nobody uses it.
            let _ = unsafe { munmap(stack, STACK) };
            return Err(error);
        }
        // Without the other ends, the end of the process is seen.
        drop((job_reader, reply_writer));
        let copier = Copier { jobs: Some(jobs), replies, pid, stack };
        match copier.reply() {
            Some(DONE) => Ok(copier),
            _ => Err(Errno::ECHILD),
        }
    }

    /// Copies. `None` if the process has ended, which it does after a fault.
    ///
    /// # Safety
    /// The ranges need not be valid, but where the target is, it may be overwritten.
    pub unsafe fn copy(&self, from: u64, to: u64, length: usize) -> Option<Result<(), BadAddress>> {
        let job = Job { from: from as *const c_void, to: to as *mut c_void, length };
        // SAFETY: the job is as long as its type. A pipe takes so few bytes at once.
        let sent = unsafe { libc::write(self.jobs.as_ref()?.as_raw_fd(), (&raw const job).cast(), size_of::<Job>()) };
        if sent != size_of::<Job>() as isize {
            return None;
        }
        match self.reply()? {
            DONE => Some(Ok(())),
            _ => Some(Err(BadAddress)),
        }
    }

    fn reply(&self) -> Option<u8> {
        let mut reply = [0];
        (nix::unistd::read(&self.replies, &mut reply) == Ok(1)).then_some(reply[0])
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // It ends when there will be no more jobs.
        self.jobs = None;
        // SAFETY: takes integers and no pointer. It fails if the program has waited for all kinds
        // of children: the process has ended then.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WCLONE) };
        // SAFETY: the process whose stack it was has ended.
        let _ = unsafe { munmap(self.stack, STACK) };
    }
}

/// A pipe whose ends do not have the numbers that the process uses.
fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let higher = |end: OwnedFd| {
        let number = fcntl(&end, FcntlArg::F_DUPFD_CLOEXEC(REPLIES + 1))?;
        // SAFETY: the call returned a new descriptor that this value owns.
        Ok::<_, Errno>(unsafe { OwnedFd::from_raw_fd(number) })
    };
    Ok((higher(reader)?, higher(writer)?))
}

/// The process: copies until there are no more jobs.
extern "C" fn main(ends: *mut c_void) -> c_int {
    // SAFETY: the server waits for the first reply, so the array lives. All else concerns this
    // process alone, whose descriptors and signal handlers are its own. Whatever a job says is
    // accessed: the server promises that the target may be overwritten, and a fault is caught.
    unsafe {
        let [jobs, replies] = ends.cast::<[RawFd; 2]>().read();
        libc::prctl(libc::PR_SET_NAME, c"ascend-copier".as_ptr());
        libc::dup3(jobs, JOBS, 0);
        libc::dup3(replies, REPLIES, 0);
        libc::syscall(libc::SYS_close_range, REPLIES + 1, u32::MAX, 0);
        let mut faults = MaybeUninit::zeroed();
        libc::sigemptyset(faults.as_mut_ptr());
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = fault as extern "C" fn(c_int) as usize;
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            libc::sigaddset(faults.as_mut_ptr(), signal);
        }
        libc::sigprocmask(libc::SIG_UNBLOCK, faults.as_ptr(), std::ptr::null_mut());
        answer(DONE);
        let mut job = MaybeUninit::<Job>::uninit();
        while libc::read(JOBS, job.as_mut_ptr().cast(), size_of::<Job>()) == size_of::<Job>() as isize {
            let Job { from, to, length } = job.assume_init_read();
            // Rust's own functions may check the pointers, and print.
            libc::memcpy(to, from, length);
            answer(DONE);
        }
        libc::_exit(0)
    }
}

/// The handler of its faults.
extern "C" fn fault(_signal: c_int) {
    answer(FAULT);
    // SAFETY: ends this process, and no other.
    unsafe { libc::_exit(1) }
}

fn answer(reply: u8) {
    // SAFETY: one byte of this function's own.
    unsafe { libc::write(REPLIES, (&raw const reply).cast(), 1) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    const LENGTH: usize = 1 << 20;

    fn copy(copier: &Copier, from: &[u8], to: &mut [u8]) -> Option<Result<(), BadAddress>> {
        assert_eq!(from.len(), to.len());
        // SAFETY: both are slices of this process.
        unsafe { copier.copy(from.as_ptr() as u64, to.as_mut_ptr() as u64, from.len()) }
    }

    #[test]
    fn it_has_no_descriptors_but_its_own_and_ends_with_its_value() {
        let copier = Copier::start().unwrap();
        let status = format!("/proc/{}", copier.pid);
        let mut numbers: Vec<_> = std::fs::read_dir(format!("{status}/fd")).unwrap().flatten().collect();
        numbers.sort_by_key(|entry| entry.file_name());
        assert_eq!(numbers.iter().map(|entry| entry.file_name()).collect::<Vec<_>>(), ["0", "1"]);
        drop(copier);
        assert!(!std::fs::exists(status).unwrap());
    }

    #[test]
    fn nobody_waits_for_one_that_was_killed() {
        let copier = Copier::start().unwrap();
        let (from, mut to) = (vec![7u8; LENGTH], vec![0u8; LENGTH]);
        assert_eq!(copy(&copier, &from, &mut to), Some(Ok(())));
        assert!(from == to);
        // SAFETY: sends a signal to a process that this test started.
        unsafe { libc::kill(copier.pid, libc::SIGKILL) };
        // A job that it took before is done.
        while copy(&copier, &from, &mut to).is_some() {}
    }

    #[test]
    fn memory_that_vanishes_during_the_copy_is_a_fault() {
        let length = NonZero::new(LENGTH).unwrap();
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping; only its protection changes, and only the copier accesses it.
        let target = unsafe { mmap_anonymous(None, length, prot, MapFlags::MAP_PRIVATE) }.unwrap();
        let address = target.as_ptr() as usize;
        let (from, ended) = (vec![7u8; LENGTH], AtomicBool::new(false));
        let (mut good, mut bad) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for protection in [libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE] {
                        // SAFETY: see above.
                        unsafe { libc::mprotect(address as *mut c_void, LENGTH, protection) };
                        std::thread::yield_now();
                    }
                }
            });
            let mut copier = Copier::start().unwrap();
            while good < 20 || bad < 20 {
                // SAFETY: see above.
                match unsafe { copier.copy(from.as_ptr() as u64, address as u64, LENGTH) } {
                    Some(Ok(())) => good += 1,
                    Some(Err(BadAddress)) => {
                        bad += 1;
                        copier = Copier::start().unwrap();
                    }
                    None => panic!("the copier ended without a word"),
                }
            }
            ended.store(true, Ordering::Relaxed);
        });
        // SAFETY: nothing uses the mapping any more.
        unsafe { munmap(target, LENGTH) }.unwrap();
    }
}
