//! The module uda: which devices this process has, and under which numbers.
//!
//! SETUP makes the table of the caller's mount namespace. In a container it takes the devices whose nodes were opened before, so the nodes
//! come first and SETUP right behind them: another container can take an opened device until then, and every other question asked before
//! SETUP loses the devices. On the host the driver tries to open each node *for writing* in the caller's name; a process that can open none
//! would make an empty table that hides all devices from everybody else too, so we look first and do not ask in that case. (A process that
//! can open some of them gets a table of those, from us as from anybody who uses them, and hides the others' only if it is the very first.)
//!
//! The first SETUP after the driver was loaded waits in the kernel for all devices, for up to 160 s, and cannot be interrupted. It runs on
//! a thread of its own that owns the file: the caller gives up when its time is over, the thread closes the file in the orderly way when the
//! kernel lets it go, and a later call waits for the same SETUP instead of starting another. (A child process in its place would need a fork
//! of a threaded program, and for restricted users would set up its own table and not ours.)

use crate::davinci::DavinciFile;
use crate::devmng::Answer;
use crate::discovery::{LogicalId, PhysicalId};
use crate::error::{Refused, Result};
use crate::session::PerProcess;
use ascend_ioctl::{davinci, uda};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A file of the module.
#[derive(Debug)]
pub(crate) struct Table {
    file: Arc<DavinciFile>,
    /// Who we are to the driver.
    pub(crate) user: uda::UserInfo,
}

/// The nodes `/dev/davinciN` that exist, and what opening each gave.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// Files of those that could be opened; they stay open until SETUP is done.
    files: Vec<OwnedFd>,
    /// Number in the name and errno of those that could not.
    pub(crate) closed: Vec<(u32, Errno)>,
}

impl Nodes {
    /// Tries every number. On the host for writing, as the driver will; in a container opening is what takes the device.
    pub(crate) fn open(directory: &Path, user: &uda::UserInfo) -> Nodes {
        let flags = if user.admin != 0 { OFlag::O_WRONLY } else { OFlag::O_RDONLY };
        let mut nodes = Nodes { files: Vec::new(), closed: Vec::new() };
        for number in 0..user.max_physical.min(uda::MAX_PHYSICAL * 2) {
            match open(&directory.join(format!("davinci{number}")), flags | OFlag::O_CLOEXEC, Mode::empty()) {
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

impl Table {
    pub(crate) fn open(manager: &Path) -> Result<Table> {
        let file = DavinciFile::open(manager, davinci::module::UDA)?;
        let mut user = uda::UserInfo::default();
        match Answer::of(file.command(&uda::GET_USER_INFO, &mut user)) {
            Answer::Done => Ok(Table { file: Arc::new(file), user }),
            Answer::Refused(errno) => Err(Refused::new("ask who we are", &uda::GET_USER_INFO, errno).into()),
            Answer::Positive(_) => Err(Refused::new("ask who we are", &uda::GET_USER_INFO, Errno::EFAULT).into()),
        }
    }

    /// Makes the table from the opened nodes, until `deadline`.
    pub(crate) fn set_up(&self, nodes: Nodes, deadline: Instant) -> Setup {
        let pending = {
            let mut running = PENDING.get(|_| Mutex::default()).lock().unwrap_or_else(PoisonError::into_inner);
            match running.take().filter(|pending| pending.is_running()) {
                Some(pending) => running.insert(pending).clone(),
                None => {
                    let pending = Arc::new(Pending { answer: Mutex::new(None), answered: Condvar::new() });
                    let (file, admin, most) = (self.file.clone(), self.user.admin != 0, self.user.max_devices);
                    let here = pending.clone();
                    let thread = std::thread::Builder::new().name("ascend-vmm setup".into()).spawn(move || {
                        let count = if admin { most } else { nodes.opened() as u32 };
                        let answer = setup(&file, count);
                        drop((nodes, file));
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

    /// The devices of the table. Only after SETUP.
    pub(crate) fn devices(&self) -> std::result::Result<Vec<uda::LogicalDevice>, Answer> {
        let end = if self.user.admin != 0 { self.user.max_physical } else { self.user.max_devices };
        let mut devices = vec![uda::LogicalDevice::default(); end as usize];
        let mut arg = uda::DeviceList { start: 0, end, array: devices.as_mut_ptr() as u64 };
        match Answer::of(self.file.command(&uda::GET_DEV_LIST, &mut arg)) {
            Answer::Done => {
                devices.retain(|device| device.valid() && device.hardware() == uda::HARDWARE_DAVINCI);
                Ok(devices)
            }
            refused => Err(refused),
        }
    }

    /// The physical id of a device. Only after SETUP.
    pub(crate) fn physical(&self, logical: LogicalId) -> Result<PhysicalId> {
        let mut arg = uda::Translation { from: logical.0, to: 0 };
        match Answer::of(self.file.command(&uda::DEVID_TO_UDEVID, &mut arg)) {
            Answer::Done => Ok(PhysicalId(arg.to)),
            refused => Err(refused
                .refused("find a device's physical id", &uda::DEVID_TO_UDEVID)
                .object(format!("device {logical}"))
                .into()),
        }
    }
}

fn setup(file: &DavinciFile, devices: u32) -> Answer {
    Answer::of(file.command(&uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices }))
}

impl Pending {
    fn is_running(&self) -> bool {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn finish(&self, answer: Answer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.answered.notify_all();
    }

    fn wait(&self, deadline: Instant) -> Option<Answer> {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if answer.is_some() {
                return *answer;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return None;
            }
            answer = self.answered.wait_timeout(answer, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
