//! `/dev/davinci_manager`: the multiplexer that binds a file to a module and releases files.
//!
//! OPEN binds a file to a module for its whole life; CLOSE announces an orderly close(2). The
//! driver takes a bound file that is closed without CLOSE for a dying process and releases every
//! file of the process, in the order in which the modules were loaded. Calls on a file that is
//! still open return EBADFD from then on. From the driver's
//! `drv_davinci_intf_host/davinci_intf_init.c`.

use crate::caller::Caller;
use crate::config::Config;
use ascend_ioctl::davinci::{NAME_LENGTH, OpenArg, StatusArg, module};
use nix::errno::Errno;
use serde::Serialize;
use std::fs::File;
use std::mem::offset_of;
use zerocopy::{FromZeros, IntoBytes};

/// A module behind the multiplexer, in the order of loading: `asdrv_pbl`, `asdrv_dms`, `asdrv_svm`,
/// `asdrv_esched`, `asdrv_trs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Module {
    /// Device numbering.
    Uda,
    /// Feature queries.
    Urd,
    /// Resources. Can be bound; every command is EINVAL.
    Resmng,
    /// Resource map. Can be bound; every command is EINVAL.
    Rmo,
    /// Memory statistics of the device's processes.
    DpProcMng,
    /// Identity of devices and processes.
    Devmng,
    /// Memory.
    Svm,
    /// The next memory driver. Can be bound; every command is EINVAL.
    SvmV3,
    /// Events.
    Esched,
    /// Task schedulers.
    Tsdrv,
    /// Mappings of queues. Can be bound; every command is EINVAL.
    TsdrvMmap,
}

impl Module {
    const ALL: [Module; 11] = [
        Module::Uda,
        Module::Urd,
        Module::Resmng,
        Module::Rmo,
        Module::DpProcMng,
        Module::Devmng,
        Module::Svm,
        Module::SvmV3,
        Module::Esched,
        Module::Tsdrv,
        Module::TsdrvMmap,
    ];

    /// The name that OPEN takes.
    pub fn name(self) -> &'static str {
        match self {
            Module::Uda => module::UDA,
            Module::Urd => module::URD,
            Module::Resmng => "RESMNG",
            Module::Rmo => "rmo",
            Module::DpProcMng => "DP_PROC_MNG",
            Module::Devmng => module::DEVMNG,
            Module::Svm => module::SVM,
            Module::SvmV3 => module::SVM_V3,
            Module::Esched => module::ESCHED,
            Module::Tsdrv => module::TSDRV,
            Module::TsdrvMmap => module::TSDRV_MMAP,
        }
    }

    /// The module with this name, if this host has it.
    fn registered(config: &Config, name: &str) -> Option<Module> {
        let module = Module::ALL.into_iter().find(|module| module.name() == name)?;
        let there = match module {
            Module::Svm => !config.svm_v3,
            Module::SvmV3 => config.svm_v3,
            _ => true,
        };
        (there && !config.missing_modules.iter().any(|missing| missing == name)).then_some(module)
    }
}

/// What close(2) of the file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Announcement {
    /// Not bound: nothing to release.
    Unbound,
    /// Bound: close(2) counts as the end of the process.
    Bound,
    /// CLOSE was called: only this file is released.
    Close,
}

/// A file of `/dev/davinci_manager`.
#[derive(Debug)]
pub(crate) struct ManagerFile {
    /// The process that opened it.
    pub tgid: i32,
    /// Start time of that process; with the tgid it identifies the process.
    pub start_time: u64,
    /// The module, once bound.
    pub module: Option<Module>,
    /// What the client's mappings of the file show. Binding moves it to the module.
    pub backing: Option<File>,
    /// It was released with the other files of its process.
    pub torn: bool,
    announcement: Announcement,
}

impl ManagerFile {
    /// A freshly opened file.
    pub fn new(caller: &Caller, backing: File) -> Self {
        ManagerFile {
            tgid: caller.tgid,
            start_time: caller.start_time,
            module: None,
            backing: Some(backing),
            torn: false,
            announcement: Announcement::Unbound,
        }
    }

    /// OPEN: returns the module that the file is to be bound to, and the device. The caller opens
    /// the module and then calls [`ManagerFile::bind`].
    pub fn open(&self, config: &Config, caller: &Caller, arg: u64) -> Result<(Module, u32), Errno> {
        let mut open = OpenArg::new_zeroed();
        if arg == 0 {
            return Err(Errno::EINVAL);
        }
        caller.memory.read(arg, open.as_mut_bytes()).map_err(|_| Errno::EFAULT)?;
        let name = name(&open.module_name);
        if name.is_empty() {
            return Err(Errno::EINVAL);
        }
        if self.announcement != Announcement::Unbound {
            return Err(Errno::ENOSYS);
        }
        let module = std::str::from_utf8(name).ok().and_then(|name| Module::registered(config, name));
        Ok((module.ok_or(Errno::EINVAL)?, open.device_id as u32))
    }

    /// The module took the file.
    pub fn bind(&mut self, module: Module) {
        self.announcement = Announcement::Bound;
        self.module = Some(module);
    }

    /// CLOSE. Ignored unless the opener calls it. A file that is not bound can never be bound
    /// afterwards.
    pub fn close(&mut self, caller: &Caller) {
        if caller.tgid == self.tgid {
            self.announcement = Announcement::Close;
        }
    }

    /// Whether the driver takes close(2) of this file for the end of the process.
    pub fn ends_process(&self) -> bool {
        !self.torn && self.announcement == Announcement::Bound
    }
}

/// GET_MODULE_STATUS: whether no file is bound to the name. It does not say whether the module
/// exists.
pub(crate) fn status(caller: &Caller, arg: u64, used: impl Fn(&str) -> bool) -> Result<i64, Errno> {
    let mut status = StatusArg::new_zeroed();
    if arg == 0 {
        return Err(Errno::EINVAL);
    }
    caller.memory.read(arg, status.as_mut_bytes()).map_err(|_| Errno::EFAULT)?;
    // Unlike OPEN, it refuses a name that fills the whole field.
    if status.module_name[0] == 0 || !status.module_name.contains(&0) {
        return Err(Errno::EINVAL);
    }
    let in_use = std::str::from_utf8(name(&status.module_name)).is_ok_and(used);
    let unused = u32::from(!in_use);
    let place = arg.wrapping_add(offset_of!(StatusArg, status) as u64);
    caller.memory.write(place, &unused.to_ne_bytes()).map_err(|_| Errno::EFAULT)?;
    Ok(0)
}

/// The text before the NUL. The last byte always counts as a NUL.
fn name(bytes: &[u8; NAME_LENGTH]) -> &[u8] {
    let text = &bytes[..NAME_LENGTH - 1];
    &text[..text.iter().position(|byte| *byte == 0).unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::{Rig, TestProcess};

    const A: TestProcess = TestProcess(100);

    #[test]
    fn a_missing_module_cannot_be_bound() {
        let config = Config { missing_modules: vec!["DEVMNG".into()], ..Config::default() };
        assert_eq!(Rig::new(config).module(A, "DEVMNG"), Err(Errno::EINVAL));
        let mut next = Rig::new(Config { svm_v3: true, ..Config::default() });
        assert_eq!(next.module(A, "SVM"), Err(Errno::EINVAL));
        assert!(next.module(A, "svm").is_ok());
        assert_eq!(Rig::new(Config::default()).module(A, "svm"), Err(Errno::EINVAL));
    }
}
