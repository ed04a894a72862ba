//! The waker, which wakes the server while it waits for the next call.
//!
//! To wait in poll for calls and for everything else takes a microsecond more for each call than
//! to wait for calls alone. So the server does the latter, and this thread waits for the rest:
//! reports, orders, time. It is under the filter of the clients, so its own system call wakes the
//! server.

use super::listener::{Answer, Listener};
use nix::errno::Errno;
use nix::sys::signal::SigSet;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A waker that waits until the server knows its thread.
pub struct IdleWaker {
    /// Its thread.
    pub tid: i32,
    go: Sender<()>,
}

impl IdleWaker {
    /// Lets it begin, once the server knows its thread.
    pub fn release(self) {
        drop(self.go);
    }
}

/// Starts a waker on a thread that inherits the filter of the calling one. `None` if the system has
/// no thread for it; the server then waits in poll.
pub fn start() -> Option<IdleWaker> {
    let (send, started) = channel();
    let (go, wait) = channel();
    std::thread::Builder::new().name("ascend-waker".into()).spawn(move || main(&send, &wait)).ok()?;
    Some(IdleWaker { tid: started.recv().ok()?, go })
}

fn main(started: &Sender<i32>, go: &Receiver<()>) {
    let _ = SigSet::all().thread_block();
    // A table of its own, and empty: see `server::own_table`.
    // SAFETY: the kernel leaves the range out of the copy, so no descriptor of another thread is
    // closed.
    let unshared = unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
    if unshared != 0 || started.send(nix::unistd::gettid().as_raw()).is_err() {
        return;
    }
    let _ = go.recv();
    let Ok(reports) = wake_server() else { return };
    // SAFETY: the server installed this descriptor for the waker.
    let reports = unsafe { OwnedFd::from_raw_fd(reports) };
    let mut polled = libc::pollfd { fd: reports.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: one entry, which lives longer than the call.
        unsafe { libc::poll(&raw mut polled, 1, -1) };
        if wake_server().is_err() {
            return;
        }
    }
}

/// A call that the filter catches. The server answers it when it has handled what woke it.
fn wake_server() -> Result<i32, Errno> {
    // SAFETY: takes integers.
    Errno::result(unsafe { libc::ioctl(-1, 0, 0) })
}

/// The server's side of the waker.
#[derive(Default)]
pub struct Waker {
    /// Its thread, once that is known.
    tid: Option<i32>,
    /// Where its calls arrive.
    listener: Option<Rc<Listener>>,
    /// Its call that waits for an answer.
    waiting: Option<u64>,
}

impl Waker {
    /// Announces the thread.
    pub fn expect(&mut self, tid: i32) {
        self.tid = Some(tid);
    }

    /// Takes a call, if it is the waker's. The answer to the first one is a descriptor of
    /// `reports`.
    pub fn takes(&mut self, listener: &Rc<Listener>, tid: i32, id: u64, reports: &OwnedFd) -> bool {
        if self.tid != Some(tid) {
            return false;
        }
        if self.listener.is_some() {
            self.waiting = Some(id);
            return true;
        }
        match reports.try_clone() {
            Ok(file) => {
                listener.answer(id, Answer::Descriptor { file, cloexec: true });
                self.listener = Some(listener.clone());
            }
            Err(_) => listener.answer(id, Answer::Error(Errno::ENFILE)),
        }
        true
    }

    /// Whether it can wake a server that waits for calls of this listener alone.
    pub fn wakes(&self, listener: &Rc<Listener>) -> bool {
        self.listener.as_ref().is_some_and(|own| Rc::ptr_eq(own, listener))
    }

    /// Lets it wake the server again.
    pub fn rearm(&mut self) {
        if let (Some(listener), Some(id)) = (&self.listener, self.waiting.take()) {
            listener.answer(id, Answer::Value(0));
        }
    }

    /// Ends its thread. It wakes the server because the orders have ended; calls of clients are no
    /// longer answered by the driver.
    pub fn stop(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        let end = |id| listener.answer(id, Answer::Error(Errno::ENOSYS));
        if let Some(id) = self.waiting.take() {
            return end(id);
        }
        while let Ok(received) = listener.receive() {
            let Some(call) = received else { continue };
            end(call.id);
            if self.tid == Some(call.tid) {
                return;
            }
        }
    }
}
