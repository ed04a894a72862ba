//! Making this process's table of devices, in the order that does no harm.
//!
//! SETUP makes the table of the caller's mount namespace. In a container it takes the devices whose
//! nodes were opened before, so the nodes are opened first and SETUP follows at once: until then
//! another container can take an opened device, and any other question loses the devices. On the
//! host the driver tries to open each node *for writing* as the caller. A process that can open
//! none would make an empty table, which hides all devices from every other process too. So we
//! look first, and do not ask in that case. (A process that can open some of them gets a table of
//! those, and hides the rest from others only if it is the very first.)
//!
//! The first SETUP after the driver was loaded waits in the kernel for all devices, for up to
//! 160 s, and cannot be interrupted. It runs on a thread of its own, which owns the file. The
//! caller gives up when its time is over, the thread sends CLOSE when the kernel lets it go, and a
//! later call waits for the same SETUP. (A child process instead would need a fork of a threaded
//! program, and for restricted users would set up its own table and not ours.)

use crate::deadline::Deadline;
use crate::driver::uda::{MAX_PHYSICAL, Uda};
use crate::driver::{Answer, uninterrupted};
use crate::error::{Errno, Finding};
use crate::fork::PerProcess;
use crate::signals;
use crate::slots::lock;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;
use std::{fs, io};

/// The nodes `/dev/davinciN` that exist.
#[derive(Debug)]
pub(super) struct Nodes {
    /// Those that could be opened. They stay open until SETUP is done.
    files: Vec<OwnedFd>,
    /// Number and errno of those that could not.
    pub(super) closed: Vec<(u32, Errno)>,
}

impl Nodes {
    /// Opens them: on the host for writing, as the driver will; in a container for reading, which
    /// takes the device.
    pub(super) fn open(uda: &Uda) -> Nodes {
        let flags = if uda.is_admin() { OFlag::O_WRONLY } else { OFlag::O_RDONLY };
        let mut nodes = Nodes { files: Vec::new(), closed: Vec::new() };
        for number in numbers(uda.max_physical().min(MAX_PHYSICAL * 2)) {
            let node = format!("/dev/davinci{number}");
            match uninterrupted(|| open(node.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())) {
                Ok(file) => nodes.files.push(file),
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                Err(errno) => nodes.closed.push((number, errno)),
            }
        }
        nodes
    }

    /// How many could be opened.
    pub(super) fn opened(&self) -> usize {
        self.files.len()
    }
}

/// Numbers below `count` of the nodes in `/dev`; all of them where it cannot be listed.
fn numbers(count: u32) -> Vec<u32> {
    let entries = fs::read_dir("/dev").and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let Ok(entries) = entries else { return (0..count).collect() };
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let number = name.strip_prefix("davinci")?.parse().ok()?;
        (number < count && name == format!("davinci{number}")).then_some(number)
    };
    let mut numbers: Vec<u32> = entries.into_iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// An answer for which a thread waits in the kernel. The thread goes on to its end, also when
/// nobody waits for it any more.
#[derive(Debug)]
pub(super) struct Asked<T> {
    answer: Mutex<Option<T>>,
    answered: Condvar,
}

impl<T: Clone + Send + 'static> Asked<T> {
    /// Asks on a new thread; `None` if none can be started.
    pub(super) fn start(name: &str, ask: impl FnOnce() -> T + Send + 'static) -> Option<Arc<Asked<T>>> {
        let asked = Arc::new(Asked { answer: Mutex::new(None), answered: Condvar::new() });
        let here = asked.clone();
        let run = move || {
            let answer = ask();
            *lock(&here.answer) = Some(answer);
            here.answered.notify_all();
        };
        signals::spawn(name, run).ok()?;
        Some(asked)
    }

    fn is_answered(&self) -> bool {
        lock(&self.answer).is_some()
    }

    /// The answer, if it comes until `deadline`.
    pub(super) fn wait(&self, deadline: Deadline) -> Option<T> {
        let mut answer = lock(&self.answer);
        while answer.is_none() && !deadline.is_over() {
            answer = self.answered.wait_timeout(answer, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        answer.clone()
    }
}

/// The SETUP of this process. One of the parent of a fork has no thread here.
static SETUP: PerProcess<Mutex<Option<Arc<Asked<Answer>>>>> = PerProcess::new();

/// Makes the table from the opened nodes. The finding says why the kernel gave no answer until
/// `deadline`.
pub(super) fn set_up(uda: &Arc<Uda>, nodes: Nodes, deadline: Deadline) -> Result<Answer, Finding> {
    let started = Instant::now();
    let asked = {
        let mut last = lock(SETUP.get(|_| Mutex::default()));
        if last.as_ref().is_none_or(|asked| asked.is_answered()) {
            let uda = uda.clone();
            *last = Asked::start("ascend-vmm setup", move || {
                let count = if uda.is_admin() { uda.max_devices() } else { nodes.opened() as u32 };
                let answer = uda.setup_dev_table(count);
                // Close the files before the caller goes on.
                drop((nodes, uda));
                answer
            });
        }
        last.clone()
    };
    let no_thread = || Finding::NoThread { listed: 0 };
    let waiting = || Finding::StillStarting { waited: started.elapsed() };
    asked.ok_or_else(no_thread)?.wait(deadline).ok_or_else(waiting)
}
