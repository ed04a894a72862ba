//! The process's one file of the module DEVMNG: the identity of this process, and facts about
//! devices.
//!
//! The driver identifies a process by its id, not by the file. When *any* DEVMNG file of a process
//! is closed, the driver forgets the process's registration, withdraws its peer access and tells
//! every device that the process died. So there is exactly one file, shared by discovery, sessions
//! and device processes. A [`Devmng`] is a counted claim on it: the first query opens the file, and
//! dropping the last claim closes it. A session takes its claim first and drops it last, even if it
//! queries nothing, so that nobody else closes the file during the session.
//!
//! The vendor's library in the same process would lose its device processes and its peer access in
//! the same way. So the file stays open while other code in the process has files of the driver,
//! and discovery does not open it beside them: an open by any thread but the main one deletes the
//! registration (kernels from 5.17 on).
//!
//! The file also stays open while another process has a copy of it from a fork. The driver would
//! see the close only when that process closes its copy, and then it could end our next session.
//! The last claim of that session tries again.

use super::Answer;
use super::davinci::{self, DavinciFile, module};
use super::urd::text;
use crate::error::{Errno, Error, Result};
use crate::fork::{Copies, ForkGuard, PerProcess};
use crate::id::LogicalId;
use crate::slots::lock;
use crate::trace::{Quiet, quiet};
use ascend_ioctl::{Typed, devmng};
use std::ffi::CStr;
use std::sync::{Arc, Mutex};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// The file and its claims.
#[derive(Default)]
struct SharedFile {
    claims: usize,
    file: Option<Arc<DavinciFile>>,
    /// Who else has the file. `None` without a file, or if it cannot be determined.
    copies: Option<Copies>,
}

/// A claim on the process's DEVMNG file.
#[derive(Debug)]
pub(crate) struct Devmng {
    process: ForkGuard,
}

/// The driver's name for this process. START must carry it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sign {
    /// This process's id in the initial pid namespace.
    pub(crate) tgid: u32,
    /// 48 zeros in every known generation. Only the registration behind it matters.
    pub(crate) text: Vec<u8>,
}

/// The parts of GET_DEVINFO's answer that are used.
#[derive(Debug, Default)]
pub(crate) struct DevInfo {
    pub(crate) soc: Option<String>,
    pub(crate) ai_cores: Option<u32>,
}

/// The kind of machine, as GET_HOST_PHY_MACH_FLAG reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// A physical machine.
    Physical,
    /// A virtual machine.
    Virtual,
    /// A container.
    Container,
}

impl Devmng {
    /// Takes a claim; opens nothing.
    pub(crate) fn claim() -> Devmng {
        lock(shared()).claims += 1;
        Devmng { process: ForkGuard::new() }
    }

    /// As [`Devmng::claim`], but `None` if a query would open a file beside those of other code in
    /// this process.
    pub(crate) fn claim_harmlessly() -> Option<Devmng> {
        let mut shared = lock(shared());
        if shared.file.is_none() && davinci::others_have_files() {
            return None;
        }
        shared.claims += 1;
        Some(Devmng { process: ForkGuard::new() })
    }

    /// CONTAINER_CMD: this process's id in the initial pid namespace, which trust lists and the
    /// device use. Needs no device.
    pub(crate) fn bare_tgid(&self) -> Result<i32> {
        let mut tgid = 0i32;
        let mut arg = devmng::ContainerArg {
            call: devmng::ContainerCall {
                command: devmng::BARE_TGID,
                output: (&raw mut tgid).expose_provenance() as u64,
                ..Default::default()
            },
            ..Default::default()
        };
        self.required("look up this process's id", &devmng::CONTAINER_CMD, &mut arg)?;
        // SAFETY: `tgid` is a live local; the driver wrote it through the address in the argument,
        // so it is read as memory that others write.
        Ok(unsafe { (&raw const tgid).read_volatile() })
    }

    /// GET_PROCESS_SIGN: registers this process and returns the driver's name for it. Idempotent.
    /// The registration is lost when a thread other than the main one opens DEVMNG (kernels from
    /// 5.17 on), so call this right before it is needed.
    pub(crate) fn get_process_sign(&self) -> Result<Sign> {
        let mut sign = devmng::ProcessSign::default();
        self.required("register this process with the driver", &devmng::GET_PROCESS_SIGN, &mut sign)?;
        let text = CStr::from_bytes_until_nul(&sign.sign).map_or(&sign.sign[..], CStr::to_bytes);
        Ok(Sign { tgid: sign.tgid.unsigned_abs(), text: text.to_vec() })
    }

    /// QUERY_DEV_PID: the pid, on the device, of the process that is bound to ours, if there is
    /// one.
    pub(crate) fn query_dev_pid(&self, device: LogicalId) -> Result<Option<i32>> {
        // The driver looks up the host's pid in the caller's pid namespace, so this is getpid(),
        // not the bare tgid.
        let mut query =
            devmng::QueryPid { device: device.0, host_pid: std::process::id() as i32, ..Default::default() };
        match self.command(&devmng::QUERY_DEV_PID, &mut query)? {
            Answer::Done => Ok(Some(query.pid)),
            // 62: no process is bound. EINVAL: the host process is unknown. Both mean none.
            Answer::Positive(_) | Answer::Refused(Errno::EINVAL | Errno::ESRCH) => Ok(None),
            answer => Err(answer
                .refused(devmng::QUERY_DEV_PID.name)
                .operation("look up the device process")
                .object(format!("device {device}"))
                .into()),
        }
    }

    /// GET_DEVINFO: the chip's name and number of AI cores.
    pub(crate) fn get_devinfo(&self, device: LogicalId) -> Result<DevInfo, Answer> {
        let mut room = devmng::DevInfoRoom::new_zeroed();
        room.info.device = device.0;
        self.answer(&devmng::GET_DEVINFO, &mut room).with(())?;
        // Two fields before the name grew in 26.1, so the place of the name tells the layout.
        let of = |soc: &[u8; 32], cores: u32| {
            let soc = text(soc).filter(|name| name.starts_with("Ascend"))?;
            Some(DevInfo { soc: Some(soc), ai_cores: (cores != 0).then_some(cores) })
        };
        let older = devmng::DevInfo85::read_from_prefix(room.as_bytes()).ok();
        Ok(of(&room.info.soc_version, room.info.ai_core_num)
            .or_else(|| older.and_then(|(info, _)| of(&info.soc_version, info.ai_core_num)))
            .unwrap_or_default())
    }

    /// GET_PCIINFO: bus, device and function.
    pub(crate) fn get_pciinfo(&self, device: LogicalId) -> Result<(u8, u8, u8), Answer> {
        let mut info = devmng::PciInfo { device: device.0, ..Default::default() };
        let answer = self.answer(&devmng::GET_PCIINFO, &mut info);
        answer.with((info.bus, info.slot, info.function))
    }

    /// GET_DEVICE_HEALTH_STATUS: 0 normal, 1 minor, 2 major, 3 fatal.
    pub(crate) fn get_device_health_status(&self, device: LogicalId) -> Option<u32> {
        let mut arg = devmng::Health { device: device.0, health: 0 };
        (self.answer(&devmng::GET_DEVICE_HEALTH_STATUS, &mut arg) == Answer::Done).then_some(arg.health)
    }

    /// GET_HOST_PHY_MACH_FLAG: the kind of machine.
    pub(crate) fn get_host_phy_mach_flag(&self, device: LogicalId) -> Option<Machine> {
        let mut arg = devmng::MachineFlag { device: device.0, flag: 0 };
        match (self.answer(&devmng::GET_HOST_PHY_MACH_FLAG, &mut arg), arg.flag) {
            (Answer::Done, devmng::MACHINE_PHYSICAL) => Some(Machine::Physical),
            (Answer::Done, devmng::MACHINE_VIRTUAL) => Some(Machine::Virtual),
            (Answer::Done, devmng::MACHINE_CONTAINER) => Some(Machine::Container),
            _ => None,
        }
    }

    /// True if a parent of this process took the claim.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process.in_child()
    }

    /// Sends a command whose refusal is an error.
    fn required<A: FromBytes + IntoBytes + Immutable>(
        &self,
        operation: &'static str,
        command: &Typed<A>,
        arg: &mut A,
    ) -> Result<()> {
        match self.command(command, arg)? {
            Answer::Done => Ok(()),
            answer => Err(answer.refused(command.name).operation(operation).object("DEVMNG").into()),
        }
    }

    /// Sends a command that may be refused, also because there is no file.
    fn answer<A: FromBytes + IntoBytes + Immutable>(&self, command: &Typed<A>, arg: &mut A) -> Answer {
        let no_file = |error: Error| Answer::Refused(error.errno().unwrap_or(Errno::EIO));
        self.command(command, arg).unwrap_or_else(no_file)
    }

    /// Sends one command. The error is about the file; the answer is the module's.
    fn command<A: FromBytes + IntoBytes + Immutable>(&self, command: &Typed<A>, arg: &mut A) -> Result<Answer> {
        Ok(self.file()?.command(command, arg))
    }

    fn file(&self) -> Result<Arc<DavinciFile>> {
        self.process.check()?;
        let _quiet: Quiet = quiet();
        let mut shared = lock(shared());
        if let Some(file) = &shared.file {
            return Ok(file.clone());
        }
        // Watched before the file is open, so that no copy of it goes unnoticed.
        let copies = Copies::watch();
        let file = Arc::new(DavinciFile::open(module::DEVMNG)?);
        shared.copies = copies;
        shared.file = Some(file.clone());
        Ok(file)
    }
}

impl Clone for Devmng {
    fn clone(&self) -> Self {
        Devmng::claim()
    }
}

impl Drop for Devmng {
    fn drop(&mut self) {
        // A claim from before a fork counts in the parent only.
        if self.is_inherited() {
            return;
        }
        let _quiet: Quiet = quiet();
        let mut shared = lock(shared());
        shared.claims -= 1;
        if shared.claims > 0 || shared.file.is_none() || davinci::others_have_files() {
            return;
        }
        if shared.copies.as_mut().is_some_and(|copies| !copies.exist()) {
            // Closed under the lock, so that no second file is opened at the same time.
            shared.file = None;
            shared.copies = None;
        }
    }
}

/// This process's file and claims. A child of fork(2) starts with none.
fn shared() -> &'static Mutex<SharedFile> {
    static SHARED: PerProcess<Mutex<SharedFile>> = PerProcess::new();
    SHARED.get(|inherited| {
        // Closes our copy of the parent's file. The parent keeps its own.
        if let Some(Ok(mut inherited)) = inherited.map(Mutex::try_lock) {
            inherited.file = None;
            if let Some(copies) = inherited.copies.take() {
                copies.close_inherited();
            }
        }
        Mutex::default()
    })
}
