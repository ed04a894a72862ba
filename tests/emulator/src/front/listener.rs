//! The seccomp listener: the kernel delivers filtered system calls to it and receives their answers
//! from it.

use super::{Unavailable, filter};
use libc::{seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Once;

/// Makes the kernel run the waiting side on the CPU of the waking side (Linux 6.6), which is ten
/// times faster than waking an idle CPU.
const SYNC_WAKE_UP: u64 = 1;

/// The kernel's own code for a call that a signal interrupted.
const ERESTARTSYS: i32 = 512;

/// A system call that waits for its answer.
#[derive(Clone, Copy)]
pub struct Notification {
    /// Id of the call, valid while it waits.
    pub id: u64,
    /// The caller's thread id in this pid namespace.
    pub tid: i32,
    /// System call number.
    pub number: i64,
    /// Arguments.
    pub arguments: [u64; 6],
}

/// The answer to a system call.
pub enum Answer {
    /// Let the kernel carry it out as if there were no filter.
    Continue,
    /// It returns this value.
    Value(i64),
    /// It returns this error.
    Error(Errno),
    /// A signal interrupts it. The kernel repeats the call or returns EINTR, as the signal's action
    /// says. Only for a thread that has a signal to handle: without one the program would see the
    /// kernel's internal number.
    Restart,
    /// It returns a new descriptor of this file.
    Descriptor {
        /// The file.
        file: OwnedFd,
        /// Whether the descriptor is closed by exec.
        cloexec: bool,
    },
}

/// The supervisor's end of one filter.
pub struct Listener {
    descriptor: OwnedFd,
}

/// Checks whether the front can work here, on a thread that ends at once, since a filter cannot be
/// removed.
pub fn probe() -> Result<(), Unavailable> {
    let mut sizes = libc::seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
    // SAFETY: the kernel writes the three sizes into the struct and nothing else.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
    if result != 0 {
        return Err(Unavailable::Kernel(Errno::last()));
    }
    if usize::from(sizes.seccomp_notif) > size_of::<NotificationBuffer>() {
        return Err(Unavailable::Kernel(Errno::E2BIG));
    }
    let tried = std::thread::spawn(|| {
        let listener = install(false)?;
        // A kernel that can send a descriptor with the answer (Linux 5.14) looks for a call with
        // this id and finds none.
        match Listener::over(listener).hand_over(0, None, false) {
            Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(Unavailable::Kernel(error)),
            Ok(()) => Err(Unavailable::Kernel(Errno::EPROTO)),
        }
    });
    tried.join().unwrap_or(Err(Unavailable::Server(Errno::ECHILD)))
}

/// No thread of this process forks as long as the value lives. A child with a copy of the listener
/// would keep it open when the server has ended, and threads under its filter would hang.
/// A child by the bare system call is not held back; programs that are started close their copy.
pub struct NoForks(());

/// What a fork waits for, and the signals that its thread had blocked before: a handler that forks
/// would wait for its own thread.
struct Gate(UnsafeCell<(libc::pthread_mutex_t, MaybeUninit<libc::sigset_t>)>);

// SAFETY: a mutex of the C library is made for several threads, and it guards the signals.
unsafe impl Sync for Gate {}

static GATE: Gate = Gate(UnsafeCell::new((libc::PTHREAD_MUTEX_INITIALIZER, MaybeUninit::uninit())));

impl NoForks {
    /// Waits for forks that have begun.
    pub fn new() -> Self {
        static HANDLERS: Once = Once::new();
        HANDLERS.call_once(|| {
            // SAFETY: the handlers do what is allowed there. If there is no memory for them, forks
            // are not held back.
            unsafe { libc::pthread_atfork(Some(shut), Some(open), Some(open)) };
        });
        // SAFETY: takes nothing.
        unsafe { shut() };
        NoForks(())
    }
}

impl Drop for NoForks {
    fn drop(&mut self) {
        // SAFETY: this value has shut it.
        unsafe { open() };
    }
}

/// Before a fork.
unsafe extern "C" fn shut() {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let (mutex, signals) = gate();
    // SAFETY: the sets are this function's own, and the mutex is a static. No thread locks it
    // twice: it forks or has a `NoForks`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        libc::pthread_mutex_lock(mutex);
        signals.write(before);
    }
}

/// After it, in both processes.
unsafe extern "C" fn open() {
    let (mutex, signals) = gate();
    // SAFETY: the thread has locked the mutex, and so written the signals.
    unsafe {
        let before = signals.read();
        libc::pthread_mutex_unlock(mutex);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}

fn gate() -> (*mut libc::pthread_mutex_t, *mut MaybeUninit<libc::sigset_t>) {
    let gate = GATE.0.get();
    // SAFETY: the addresses of two members of a static.
    unsafe { (&raw mut (*gate).0, &raw mut (*gate).1) }
}

/// Installs the filter on the calling thread and everything that it will start. This cannot be
/// undone. `scheduled` is for a driver with a seeded schedule.
pub fn install(scheduled: bool) -> Result<OwnedFd, Unavailable> {
    let program = filter::program(scheduled);
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // Without WAIT_KILLABLE_RECV (Linux 5.19) a signal restarts a call that is being served, which
    // is then served twice.
    let result = program.install(flags | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV).or_else(|error| match error {
        Errno::EINVAL => program.install(flags),
        error => Err(error),
    });
    match result {
        // SAFETY: the call returned a new descriptor that this value owns.
        Ok(descriptor) => Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) }),
        Err(Errno::EBUSY) => Err(Unavailable::Occupied),
        Err(error) => Err(Unavailable::Filter(error)),
    }
}

/// Room for the longer notification of a newer kernel.
#[repr(C)]
struct NotificationBuffer {
    notification: seccomp_notif,
    future: [u64; 32],
}

impl Listener {
    /// Takes the descriptor that [`install`] returned.
    pub fn new(descriptor: OwnedFd) -> Self {
        let listener = Listener::over(descriptor);
        // SAFETY: the argument is a plain number. Older kernels return EINVAL, which only costs
        // speed.
        unsafe { libc::ioctl(listener.descriptor.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) };
        listener
    }

    fn over(descriptor: OwnedFd) -> Self {
        Listener { descriptor }
    }

    /// The next call; `None` if its caller died before it could be received.
    pub fn receive(&self) -> io::Result<Option<Notification>> {
        // SAFETY: all zeroes is a valid value of these integers, and the kernel demands it.
        let mut buffer: NotificationBuffer = unsafe { std::mem::zeroed() };
        // SAFETY: the buffer is at least as large as what this kernel writes (see `probe`).
        let result = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut buffer.notification)
        };
        match Errno::result(result) {
            Ok(_) => {
                let notification = &buffer.notification;
                Ok(Some(Notification {
                    id: notification.id,
                    tid: notification.pid as i32,
                    number: notification.data.nr.into(),
                    arguments: notification.data.args,
                }))
            }
            Err(Errno::ENOENT | Errno::EINTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The next call, if one waits already.
    pub fn receive_ready(&self) -> Option<Notification> {
        let mut polled = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count == 1);
        let readable = polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLIN));
        if ready && readable { self.receive().ok().flatten() } else { None }
    }

    /// Whether the caller still waits.
    pub fn waits(&self, id: u64) -> bool {
        // SAFETY: the kernel reads one number.
        unsafe { libc::ioctl(self.descriptor.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id) == 0 }
    }

    /// Answers a call. If the caller has died, the answer is dropped with its descriptor.
    pub fn answer(&self, id: u64, answer: Answer) {
        let (value, error, flags) = match answer {
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Value(value) => (value, 0, 0),
            Answer::Error(errno) => (0, -(errno as i32), 0),
            Answer::Restart => (0, -ERESTARTSYS, 0),
            Answer::Descriptor { file, cloexec } => match self.hand_over(id, Some(&file), cloexec) {
                Ok(()) | Err(Errno::ENOENT) => return,
                // For example, the caller's table is full: this is the answer of its open.
                Err(error) => (0, -(error as i32), 0),
            },
        };
        let response = seccomp_notif_resp { id, val: value, error, flags };
        // SAFETY: the kernel reads one response. It fails only if the caller died.
        unsafe { libc::ioctl(self.descriptor.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const response) };
    }

    /// Installs a descriptor (of the listener itself, if none is given) in the caller's table and
    /// makes its call return the number.
    fn hand_over(&self, id: u64, file: Option<&OwnedFd>, cloexec: bool) -> Result<(), Errno> {
        let request = seccomp_notif_addfd {
            id,
            flags: libc::SECCOMP_ADDFD_FLAG_SEND as u32,
            srcfd: file.unwrap_or(&self.descriptor).as_raw_fd() as u32,
            newfd: 0,
            newfd_flags: if cloexec { libc::O_CLOEXEC as u32 } else { 0 },
        };
        loop {
            // SAFETY: the kernel reads one request, whose descriptor is open in this thread's
            // table.
            let result = unsafe {
                libc::ioctl(self.descriptor.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ADDFD, &raw const request)
            };
            match Errno::result(result) {
                Err(Errno::EINTR) => continue,
                other => return other.map(drop),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
