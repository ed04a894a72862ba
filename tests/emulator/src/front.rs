//! The front: passes the system calls of real, unmodified processes to the model.
//!
//! A seccomp filter with a listener (`listener`, `filter`) is installed on one thread and inherited
//! by everything that the thread starts. One server thread (`server`) answers, and another one
//! (`waker`) wakes it for all that is not a call. The server owns the model, so the model needs no
//! locks. It has its own descriptor table, so a fork elsewhere in the process never copies a
//! descriptor that is meant for a client. The front keeps for the model what the kernel keeps for a
//! real driver: files and their references (`files`), callers and their address spaces
//! (`client_process`), and their memory (`client_memory`).
//!
//! What a program can still notice is listed in docs/emulator.md.

mod client_memory;
mod client_process;
mod client_threads;
mod copier;
mod descendants;
mod dev_listing;
mod files;
mod filter;
mod listener;
mod module_list;
mod node;
mod server;
mod unmap_inherited;
mod waker;

pub use client_memory::ProcessMemory;
pub use client_process::{ProcessKey, range_is_free};
pub(crate) use filter::DRIVER_AREA;
use listener::NoForks;
pub(crate) use listener::{Answer, Listener, install};
pub use node::driver_path;

use crate::config::Config;
use crate::driver::Driver;
use crate::fault::Fault;
use crate::record::Record;
use crate::schedule::Summary;
use crate::state::State;
use crate::trap::Trap;
use nix::errno::Errno;
use nix::sys::signal::SigSet;
use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use nix::unistd::gettid;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Why there can be no emulated driver here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// No user notification.
    #[error(
        "the emulated driver needs seccomp user notification (Linux 5.14 or later), which this kernel refuses: {0}"
    )]
    Kernel(Errno),
    /// The filter was refused.
    #[error("the emulated driver needs to install a seccomp filter, which this environment refuses: {0}")]
    Filter(Errno),
    /// There is another listener.
    #[error(
        "another seccomp listener (an outer emulator or a container manager) is active here, and the kernel \
         allows only one"
    )]
    Occupied,
    /// A resource for the server thread is missing.
    #[error("the emulated driver's server could not be started: {0}")]
    Server(Errno),
}

/// How many emulators this process has.
pub(crate) static EMULATORS: AtomicUsize = AtomicUsize::new(0);

/// A request of the owner to the server thread.
pub(crate) enum Order {
    /// Listen to the filter of this thread, whose descriptor came with the wake-up.
    Listen(i32),
    /// This thread is the waker.
    Waker(i32),
    /// Report the state, after all earlier closes have been processed.
    State(Sender<State>),
    /// Inject a fault.
    Inject(Fault, Sender<()>),
    /// Run this on the model.
    Control(Box<dyn FnOnce(&mut Driver) + Send>),
    /// Write every call to this file from now on.
    RecordTo(PathBuf, Sender<io::Result<()>>),
    /// Keep every call in memory from now on.
    Record(Sender<()>),
    /// Return the calls kept so far.
    Records(Sender<Vec<Record>>),
    /// Return what the schedule has done so far.
    Schedule(Sender<Option<Summary>>),
    /// Return the traps so far.
    Traps(Sender<Vec<Trap>>),
}

/// An emulated host with its driver. It works as long as the value lives; afterwards the calls of
/// threads that are still attached return ENOSYS.
///
/// The handle belongs to the process that started it. A forked child is a client and must not use
/// it.
pub struct Emulator {
    orders: Option<Mutex<Sender<Order>>>,
    /// Wakes the server and sends descriptors to it.
    wake: OwnedFd,
    server: Option<JoinHandle<()>>,
    /// A thread has started the waker, or is about to.
    has_waker: AtomicBool,
    /// Calls are answered by a seeded schedule.
    scheduled: bool,
    pid: u32,
}

impl Emulator {
    /// Boots an emulated host. No thread uses it yet: see [`Emulator::attach`], [`Emulator::run`]
    /// and [`Emulator::spawn`].
    ///
    /// Call it from a thread that is not attached to an emulator, since the server inherits the
    /// thread's filters.
    pub fn start(config: Config) -> Result<Self, Unavailable> {
        listener::probe()?;
        let (wake, woken) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(Unavailable::Server)?;
        let scheduled = config.schedule.is_some();
        let (orders, receiver) = channel();
        let (ready, started) = channel();
        // The server needs only the number: it fetches the descriptor into its own table.
        let number = woken.as_raw_fd();
        let server = std::thread::Builder::new()
            .name("ascend-emulator".into())
            .spawn(move || server::main(config, number, receiver, ready))
            .map_err(|error| Unavailable::Server(Errno::from_raw(error.raw_os_error().unwrap_or(libc::EAGAIN))))?;
        match started.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(Unavailable::Server(error)),
            Err(_) => return Err(Unavailable::Server(Errno::ECHILD)),
        }
        drop(woken);
        EMULATORS.fetch_add(1, Ordering::Relaxed);
        Ok(Emulator {
            orders: Some(Mutex::new(orders)),
            wake,
            server: Some(server),
            // Under a schedule the server looks by itself.
            has_waker: AtomicBool::new(scheduled),
            scheduled,
            pid: std::process::id(),
        })
    }

    /// Attaches the calling thread, and all threads and processes that it starts from now on, to
    /// the emulated driver. This cannot be undone.
    pub fn attach(&self) -> Result<(), Unavailable> {
        self.assert_own();
        // Until it has passed on the listener, this thread must make no call that is caught: if
        // the server has ended, it would wait for itself.
        let no_forks = NoForks::new();
        let listener = listener::install(self.scheduled)?;
        self.order(Order::Listen(gettid().as_raw()), Some(listener));
        drop(no_forks);
        // The first filter is in most cases the only one.
        if !self.has_waker.swap(true, Ordering::Relaxed) {
            if let Some(waker) = waker::start() {
                self.order(Order::Waker(waker.tid), None);
                waker.release();
            }
        }
        Ok(())
    }

    /// Runs `body` on a new thread that is attached to the emulated driver. A panic of the body
    /// continues in the caller.
    ///
    /// # Panics
    /// If seccomp does not allow it, or if a client triggered a trap.
    pub fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        let result = std::thread::scope(|scope| {
            let name = std::thread::current().name().unwrap_or("attached").to_owned();
            let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, || {
                if let Err(unavailable) = self.attach() {
                    panic!("{unavailable}");
                }
                body()
            });
            match thread {
                Ok(thread) => thread.join(),
                Err(error) => panic!("cannot start a thread for the body: {error}"),
            }
        });
        self.assert_no_traps();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Starts a program that is attached to the emulated driver. It starts with no signal blocked,
    /// whatever the caller has blocked.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        // SAFETY: between fork and exec this calls only pthread_sigmask, which is allowed there.
        unsafe { command.pre_exec(|| SigSet::empty().thread_set_mask().map_err(io::Error::from)) };
        if self.scheduled {
            // The same addresses in each run. Where that is forbidden, they differ.
            let personality = || {
                const ADDR_NO_RANDOMIZE: libc::c_ulong = 0x0004_0000;
                // SAFETY: sets a flag of this process.
                unsafe { libc::personality(ADDR_NO_RANDOMIZE) };
                Ok(())
            };
            // SAFETY: between fork and exec this makes one system call.
            unsafe { command.pre_exec(personality) };
        }
        std::thread::scope(|scope| {
            let spawned = scope.spawn(|| {
                self.attach().map_err(io::Error::other)?;
                command.spawn()
            });
            spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// What clients hold, after all files that were closed before this call have been released.
    pub fn state(&self) -> State {
        self.ask(Order::State)
    }

    /// Makes the driver or a device misbehave from now on.
    pub fn inject(&self, fault: Fault) {
        self.ask(|done| Order::Inject(fault, done));
    }

    /// Runs `action` on the model, for example to place processes into containers, kill devices or
    /// their processes, or change the daemon. Earlier closes are processed first.
    pub fn control<T: Send + 'static>(&self, action: impl FnOnce(&mut Driver) -> T + Send + 'static) -> T {
        self.ask(|reply: Sender<T>| {
            Order::Control(Box::new(move |driver| {
                let _ = reply.send(action(driver));
            }))
        })
    }

    /// Writes every call from now on to a file, as JSON lines.
    pub fn record_to(&self, path: impl Into<PathBuf>) -> io::Result<()> {
        let path = path.into();
        self.ask(|reply| Order::RecordTo(path, reply))
    }

    /// Keeps every call from now on in memory, for [`Emulator::records`].
    pub fn record(&self) {
        self.ask(Order::Record);
    }

    /// The calls since [`Emulator::record`].
    pub fn records(&self) -> Vec<Record> {
        self.ask(Order::Records)
    }

    /// What the seeded schedule has done so far; `None` without one.
    pub fn schedule(&self) -> Option<Summary> {
        self.ask(Order::Schedule)
    }

    /// The traps that clients triggered. Each such client was killed.
    pub fn traps(&self) -> Vec<Trap> {
        self.ask(Order::Traps)
    }

    /// Checks that no client triggered a trap.
    ///
    /// # Panics
    /// With a report, if one did.
    pub fn assert_no_traps(&self) {
        let traps = self.traps();
        if !traps.is_empty() {
            let report: Vec<String> = traps.iter().map(ToString::to_string).collect();
            panic!("{}", report.join("\n"));
        }
    }

    fn ask<T>(&self, order: impl FnOnce(Sender<T>) -> Order) -> T {
        let (reply, answer): (Sender<T>, Receiver<T>) = channel();
        self.order(order(reply), None);
        match answer.recv() {
            Ok(answer) => answer,
            Err(_) => panic!("the emulator's server thread ended; its message is above"),
        }
    }

    fn assert_own(&self) {
        assert_eq!(self.pid, std::process::id(), "an emulator can be used only by the process that started it");
    }

    fn order(&self, order: Order, descriptor: Option<OwnedFd>) {
        self.assert_own();
        let orders = self.orders.as_ref().expect("orders end with the emulator");
        // The lock keeps orders, wake-ups and descriptors in the same order.
        let orders = orders.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let raw = descriptor.as_ref().map(AsRawFd::as_raw_fd);
        let rights = raw.as_slice();
        let control = if rights.is_empty() { vec![] } else { vec![ControlMessage::ScmRights(rights)] };
        let sent = orders.send(order).is_ok()
            && sendmsg::<()>(self.wake.as_raw_fd(), &[IoSlice::new(&[0])], &control, MsgFlags::MSG_NOSIGNAL, None)
                .is_ok();
        drop(descriptor);
        assert!(sent, "the emulator's server thread ended; its message is above");
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.orders = None;
        // End of file wakes the server, which then sees that there will be no more orders.
        let _ = nix::sys::socket::shutdown(self.wake.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        EMULATORS.fetch_sub(1, Ordering::Relaxed);
    }
}
