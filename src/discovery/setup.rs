//! Making this process's table of devices, in the order that does no harm.
//!
//! SETUP makes the table of the caller's mount namespace. In a container it takes the devices whose
//! nodes were opened before, so the nodes come first and SETUP right behind them: another container
//! can take an opened device until then, and every other question asked before SETUP loses the
//! devices. On the host the driver tries to open each node *for writing* in the caller's name; a
//! process that can open none would make an empty table that hides all devices from every other
//! process too, so we look first and do not ask in that case. (A process that can open some of them
//! gets a table of those, from us as from anybody who uses them, and hides the others' only if it
//! is the very first.)
//!
//! The first SETUP after the driver was loaded waits in the kernel for all devices, for up to 160
//! s, and cannot be interrupted. It runs on a thread of its own that owns the file: the caller
//! gives up when its time is over, the thread closes the file in the orderly way when the kernel
//! lets it go, and a later call waits for the same SETUP instead of starting another. (A child
//! process in its place would need a fork of a threaded program, and for restricted users would set
//! up its own table and not ours.)

use crate::deadline::Deadline;
use crate::driver::Answer;
use crate::driver::uda::{MAX_PHYSICAL, Uda};
use crate::error::Errno;
use crate::fork::PerProcess;
use crate::signals;
use crate::slots::lock;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The nodes `/dev/davinciN` that exist, and what opening each gave.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// Files of those that could be opened; they stay open until SETUP is done.
    files: Vec<OwnedFd>,
    /// Number in the name and errno of those that could not.
    pub(crate) closed: Vec<(u32, Errno)>,
}

impl Nodes {
    /// Tries every number. On the host for writing, as the driver will; in a container opening is
    /// what takes the device.
    pub(crate) fn open(uda: &Uda) -> Nodes {
        let flags = if uda.is_admin() { OFlag::O_WRONLY } else { OFlag::O_RDONLY };
        let mut nodes = Nodes { files: Vec::new(), closed: Vec::new() };
        for number in 0..uda.max_physical().min(MAX_PHYSICAL * 2) {
            let node = format!("/dev/davinci{number}");
            match open(node.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty()).map_err(Errno::of) {
                Ok(file) => nodes.files.push(file),
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                Err(errno) => nodes.closed.push((number, errno)),
            }
        }
        nodes
    }

    /// How many could be opened.
    pub(crate) fn opened(&self) -> usize {
        self.files.len()
    }
}

/// What came of SETUP in the time that was allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    /// The kernel answered.
    Answered(Answer),
    /// It still waits for devices.
    Waiting,
    /// No thread could be started to ask on.
    NoThread,
}

/// A SETUP that a thread waits for.
struct Pending {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

/// The one that this process waits for. One that the parent of a fork waits for has no thread here.
static PENDING: PerProcess<Mutex<Option<Arc<Pending>>>> = PerProcess::new();

/// Makes the table from the opened nodes, until `deadline`.
pub(crate) fn set_up(uda: &Arc<Uda>, nodes: Nodes, deadline: Deadline) -> Setup {
    let pending = {
        let mut running = lock(PENDING.get(|_| Mutex::default()));
        match running.take().filter(|pending| pending.is_running()) {
            Some(pending) => running.insert(pending).clone(),
            None => {
                let pending = Arc::new(Pending { answer: Mutex::new(None), answered: Condvar::new() });
                let (uda, here) = (uda.clone(), pending.clone());
                let thread = signals::spawn("ascend-vmm setup", move || {
                    let count = if uda.is_admin() { uda.max_devices() } else { nodes.opened() as u32 };
                    let answer = uda.setup_dev_table(count);
                    drop((nodes, uda));
                    here.finish(answer);
                });
                if thread.is_err() {
                    return Setup::NoThread;
                }
                running.insert(pending).clone()
            }
        }
    };
    pending.wait(deadline).map_or(Setup::Waiting, Setup::Answered)
}

impl Pending {
    fn is_running(&self) -> bool {
        lock(&self.answer).is_none()
    }

    fn finish(&self, answer: Answer) {
        *lock(&self.answer) = Some(answer);
        self.answered.notify_all();
    }

    fn wait(&self, deadline: Deadline) -> Option<Answer> {
        let mut answer = lock(&self.answer);
        loop {
            if answer.is_some() {
                return *answer;
            }
            if deadline.is_over() {
                return None;
            }
            answer = self.answered.wait_timeout(answer, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
