//! The process's one file of the module DEVMNG: who we are to the driver, and what it knows of a device.
//!
//! The driver keys what it knows of a process by the process id, not by the file: when *any* DEVMNG file of a process is closed it forgets
//! the process's registration, withdraws its peer access and tells every device that the process died. So there is exactly one, shared by
//! discovery, sessions and device processes. A [`Devmng`] is a counted claim on it: the file is opened at the first question and closed
//! when the last claim is dropped. A session takes its claim first and drops it last, whether it asks anything or not, so that nobody
//! else's question closes the file under it.

use crate::davinci::DavinciFile;
use crate::discovery::{self, LogicalId};
use crate::error::{Error, Refused, Result};
use crate::session::{ForkGuard, PerProcess};
use ascend_ioctl::{Command, davinci, devmng};
use nix::errno::Errno;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zerocopy::{FromBytes, Immutable, IntoBytes};

#[derive(Default)]
struct Shared {
    claims: usize,
    file: Option<Arc<DavinciFile>>,
}

/// A claim on the process's DEVMNG file.
#[derive(Debug)]
pub(crate) struct Devmng {
    process: ForkGuard,
    path: PathBuf,
}

/// How the driver calls this process; START must carry it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sign {
    /// This process's id in the initial pid namespace.
    pub(crate) tgid: u32,
    /// 48 zeros in every known generation; the registration behind it is what counts.
    pub(crate) text: Vec<u8>,
}

impl Devmng {
    /// Takes a claim; opens nothing. `path` is the driver's device, used if this claim is the first to ask something.
    pub(crate) fn hold(path: &Path) -> Devmng {
        lock().claims += 1;
        Devmng { process: ForkGuard::new(), path: path.to_owned() }
    }

    /// This process's id in the initial pid namespace, which trust lists and the device use. Needs no device.
    pub(crate) fn bare_tgid(&self) -> Result<i32> {
        let mut tgid = 0i32;
        let mut arg = devmng::ContainerArg {
            call: devmng::ContainerCall {
                command: devmng::BARE_TGID,
                output: (&raw mut tgid) as u64,
                ..Default::default()
            },
            ..Default::default()
        };
        let answer = self.command(&devmng::CONTAINER_CMD, &mut arg);
        self.done("ask for this process's id", &devmng::CONTAINER_CMD, None, answer)?;
        // SAFETY: `tgid` is a live local; the driver wrote it through the address in the argument, so it is read as memory that others write.
        Ok(unsafe { (&raw const tgid).read_volatile() })
    }

    /// Registers this process and returns how the driver calls it. Idempotent, and lost when a thread other than the main one opens DEVMNG
    /// (kernels from 5.17 on): to be asked for anew right before it is needed.
    pub(crate) fn sign(&self) -> Result<Sign> {
        let mut sign = devmng::ProcessSign::default();
        let answer = self.command(&devmng::GET_PROCESS_SIGN, &mut sign);
        self.done("register this process with the driver", &devmng::GET_PROCESS_SIGN, None, answer)?;
        let text = CStr::from_bytes_until_nul(&sign.sign).map_or(&sign.sign[..], CStr::to_bytes);
        Ok(Sign { tgid: sign.tgid.unsigned_abs(), text: text.to_vec() })
    }

    /// The pid, on the device, of the process that is bound to ours; `None` if there is none.
    pub(crate) fn device_process(&self, device: LogicalId) -> Result<Option<i32>> {
        // The driver looks the host's pid up in the caller's pid namespace, so it is getpid()'s here and not the bare one.
        let mut query =
            devmng::QueryPid { device: device.0, host_pid: std::process::id() as i32, ..Default::default() };
        match self.command(&devmng::QUERY_DEV_PID, &mut query)? {
            Answer::Done => Ok(Some(query.pid)),
            // 62 says that nobody is bound; an unknown host process is EINVAL. Both mean none.
            Answer::Positive(_) | Answer::Refused(Errno::EINVAL | Errno::ESRCH) => Ok(None),
            refused => {
                self.done("ask for the device process", &devmng::QUERY_DEV_PID, Some(device), Ok(refused))?;
                Ok(None)
            }
        }
    }

    /// Sets up the devices of a container in which nobody did that yet; whether there is reason to try again. On the host there is none:
    /// the driver makes the table by itself there.
    pub(crate) fn prepare_devices(&self) -> bool {
        let mut container = 0u32;
        let answer = self.command(&devmng::GET_CONTAINER_FLAG, &mut container);
        if !matches!(answer, Ok(Answer::Done)) || container == 0 {
            return false;
        }
        let options = discovery::Options { manager: self.path.clone(), ..Default::default() };
        match discovery::prepare(&options) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the devices of this container could not be set up");
                false
            }
        }
    }

    /// One command. The outer error is about the file, the answer is the module's.
    pub(crate) fn command<T: FromBytes + IntoBytes + Immutable>(
        &self,
        command: &Command,
        arg: &mut T,
    ) -> Result<Answer> {
        Ok(Answer::of(self.file()?.command(command, arg)))
    }

    /// Turns an answer into the error that explains it.
    fn done(
        &self,
        operation: &'static str,
        command: &Command,
        device: Option<LogicalId>,
        answer: Result<Answer>,
    ) -> Result<()> {
        let object = || device.map_or_else(|| "DEVMNG".to_owned(), |device| format!("device {device}"));
        match answer? {
            Answer::Done => Ok(()),
            refused => Err(refused.refused(operation, command).object(object()).into()),
        }
    }

    /// Whether it was taken by a process that this one is a child of.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process.in_child()
    }

    fn file(&self) -> Result<Arc<DavinciFile>> {
        if self.is_inherited() {
            return Err(Error::OtherProcess { process: std::process::id() });
        }
        let mut shared = lock();
        if let Some(file) = &shared.file {
            return Ok(file.clone());
        }
        let file = Arc::new(DavinciFile::open(&self.path, davinci::module::DEVMNG)?);
        shared.file = Some(file.clone());
        Ok(file)
    }
}

impl Clone for Devmng {
    fn clone(&self) -> Self {
        Devmng::hold(&self.path)
    }
}

impl Drop for Devmng {
    fn drop(&mut self) {
        // A claim that was taken before a fork counts in the parent only.
        if self.is_inherited() {
            return;
        }
        let mut shared = lock();
        shared.claims -= 1;
        if shared.claims == 0 {
            shared.file = None;
        }
    }
}

/// What a module answered: these modules also return positive numbers of their own, which are refusals too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Done.
    Done,
    /// An errno.
    Refused(Errno),
    /// A positive return value: a vendor error number, or bytes that could not be copied.
    Positive(i32),
}

impl Answer {
    pub(crate) fn of(returned: std::result::Result<i32, Errno>) -> Answer {
        match returned {
            Ok(0) => Answer::Done,
            Ok(number) => Answer::Positive(number),
            Err(errno) => Answer::Refused(errno),
        }
    }

    /// The error behind an answer that is not [`Answer::Done`]. A module's own number is told in the arguments.
    pub(crate) fn refused(self, operation: &'static str, command: &Command) -> Refused {
        match self {
            Answer::Refused(errno) => Refused::new(operation, command, errno),
            Answer::Done => Refused::new(operation, command, Errno::EIO),
            Answer::Positive(number) => {
                Refused::new(operation, command, Errno::EIO).arguments(format!("the driver's own code {number}"))
            }
        }
    }
}

/// This process's file and claims. A child of fork(2) starts anew.
fn lock() -> MutexGuard<'static, Shared> {
    static SHARED: PerProcess<Mutex<Shared>> = PerProcess::new();
    let shared = SHARED.get(|inherited| {
        // The parent's file, if there is one: our reference to it goes, the parent keeps its own.
        drop(inherited.and_then(|inherited| inherited.try_lock().ok()?.file.take()));
        Mutex::default()
    });
    // Every change is made in one step, so a panic elsewhere cannot have left it half done.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
