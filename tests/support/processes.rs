//! Other processes, a channel to each, and memory that goes from one to the other.

use super::{Directory, own_tgid};
use ascend_emulator::{Client, fork};
use ascend_vmm::PhysicalMemory;
use ascend_vmm::share::{self, BareTgid, Export, Place, Ticket};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::cell::Cell;
use std::io::{Read, Write};
use std::ops::Deref;
use std::os::unix::net::{UnixListener, UnixStream};

/// One end of a channel between two processes. Reading fails when the other process ends.
pub struct Channel(UnixStream);

impl Channel {
    /// Both ends. Each process must drop the other's.
    pub fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        (Channel(one), Channel(other))
    }

    #[track_caller]
    pub fn send(&self, number: u64) {
        self.send_bytes(&number.to_le_bytes());
    }

    #[track_caller]
    pub fn receive(&self) -> u64 {
        u64::from_le_bytes(self.receive_bytes())
    }

    #[track_caller]
    pub fn send_bytes(&self, bytes: &[u8]) {
        (&self.0).write_all(bytes).expect("the other process runs");
    }

    #[track_caller]
    pub fn receive_bytes<const LENGTH: usize>(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        (&self.0).read_exact(&mut bytes).expect("the other process runs");
        bytes
    }

    /// Lets the other process return from [`Channel::wait`].
    #[track_caller]
    pub fn signal(&self) {
        self.send(0);
    }

    /// Waits for the other process's [`Channel::signal`].
    #[track_caller]
    pub fn wait(&self) {
        assert_eq!(self.receive(), 0, "a number that is no signal");
    }

    /// Signals that this point is reached, and waits for leave to continue.
    #[track_caller]
    pub fn pause(&self) {
        self.signal();
        self.wait();
    }

    /// Waits until the other process pauses, and lets it continue.
    #[track_caller]
    pub fn proceed(&self) {
        self.wait();
        self.signal();
    }

    #[track_caller]
    pub fn send_ticket(&self, ticket: &Ticket) {
        self.send_bytes(&ticket.to_bytes());
    }

    #[track_caller]
    pub fn receive_ticket(&self) -> Ticket {
        Ticket::from_bytes(&self.receive_bytes::<{ Ticket::LENGTH }>()).unwrap()
    }

    /// Sends the number by which a trust list knows this process.
    #[track_caller]
    pub fn send_tgid(&self) {
        self.send(own_tgid().as_raw() as u64);
    }

    #[track_caller]
    pub fn receive_tgid(&self) -> BareTgid {
        BareTgid::from_raw(self.receive() as i32).unwrap()
    }

    /// Exports memory to the other process, which calls [`Channel::import`].
    #[track_caller]
    #[must_use = "the export must live until the other process has imported"]
    pub fn export(&self, memory: &PhysicalMemory) -> Export {
        let importer = self.receive_tgid();
        let export = memory.export().unwrap();
        export.trust(&[importer]).unwrap();
        self.send_ticket(&export.ticket().unwrap());
        export
    }

    /// Imports what the other process exports by [`Channel::export`].
    #[track_caller]
    pub fn import<'a>(&self, place: impl Into<Place<'a>>) -> PhysicalMemory {
        self.send_tgid();
        let (place, ticket): (Place<'_>, Ticket) = (place.into(), self.receive_ticket());
        share::import(place, &ticket).unwrap()
    }

    /// Makes the channel this process's standard input, which survives an exec.
    pub fn become_input(&self) {
        nix::unistd::dup2_stdin(&self.0).unwrap();
    }
}

/// Another process, and the channel to it.
pub struct Peer {
    client: Client,
    channel: Channel,
}

/// Starts another process on the same host.
pub fn start(body: impl FnOnce(&Channel)) -> Peer {
    let ends = Cell::new(Some(Channel::pair()));
    let client = fork(|| {
        let (_, channel) = ends.take().unwrap();
        body(&channel);
    });
    let (channel, _) = ends.take().unwrap();
    Peer { client, channel }
}

/// Starts another process that connects to a Unix socket on which this one listens. Returns this
/// side's end; `body` gets the other.
pub fn start_connected(body: impl FnOnce(&Channel, UnixStream)) -> (Peer, UnixStream) {
    let directory = Directory::new();
    let path = directory.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let peer = start(|channel| body(channel, UnixStream::connect(&path).unwrap()));
    let (socket, _) = listener.accept().unwrap();
    (peer, socket)
}

impl Deref for Peer {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

impl Peer {
    pub fn pid(&self) -> i32 {
        self.client.pid()
    }

    pub fn kill(self) {
        self.client.kill();
    }

    /// Waits until it ends, and fails if it failed.
    pub fn join(self) {
        self.client.join();
    }

    /// Waits until it ends; its children may still hold the other end of the channel.
    pub fn join_and_keep_channel(self) -> Channel {
        self.client.join();
        self.channel
    }
}

/// Runs `body` as process 1 of a new pid namespace; a reason if this host does not allow that.
pub fn in_pid_namespace(body: impl FnOnce()) -> Result<(), String> {
    let alone = unshare(CloneFlags::CLONE_NEWPID);
    // Without privileges this needs a user namespace that grants them.
    let done = alone.or_else(|_| unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWPID));
    done.map_err(|errno| format!("unshare: {errno}"))?;
    fork(body).join();
    Ok(())
}

/// A process that [`fork_with_pid`] started.
pub struct Numbered(Pid);

impl Numbered {
    /// Waits until it ends, and fails if it failed.
    pub fn join(self) {
        assert_eq!(waitpid(self.0, None), Ok(WaitStatus::Exited(self.0, 0)));
    }
}

/// Forks a process that gets this pid; a reason if this host does not allow that, or if another
/// process took the pid first.
pub fn fork_with_pid(pid: i32, body: impl FnOnce()) -> Result<Numbered, String> {
    let numbers = [pid];
    let mut arguments = libc::clone_args {
        flags: 0,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: numbers.as_ptr() as u64,
        set_tid_size: 1,
        cgroup: 0,
    };
    // SAFETY: without flags clone3 is a fork; the arguments and the array that they point to live
    // through the call.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    match Errno::result(child) {
        Ok(0) => {
            let succeeded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
            // SAFETY: ends the process, whatever its state.
            unsafe { libc::_exit(if succeeded { 0 } else { 101 }) }
        }
        Ok(child) => {
            assert_eq!(child as i32, pid);
            Ok(Numbered(Pid::from_raw(pid)))
        }
        Err(errno @ (Errno::EPERM | Errno::EEXIST | Errno::ENOSYS)) => Err(format!("clone3: {errno}")),
        Err(errno) => panic!("clone3: {errno}"),
    }
}
