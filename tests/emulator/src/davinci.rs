//! `/dev/davinci_manager`: the multiplexer that binds a file to a module and releases files.
//!
//! OPEN binds a file to a module for good; CLOSE only announces that close(2) will be an orderly one. A bound file that is closed without it is taken for
//! the first sign of a dying process: every file of the process goes with it, in the order in which the modules were loaded, and whoever still holds
//! one gets EBADFD from then on. From the driver's `drv_davinci_intf_host/davinci_intf_init.c`.

use crate::caller::Caller;
use crate::config::Config;
use ascend_ioctl::davinci::{NAME_LENGTH, OpenArg, StatusArg, module};
use nix::errno::Errno;
use serde::Serialize;
use std::fs::File;
use std::mem::offset_of;
use zerocopy::{FromZeros, IntoBytes};

/// A module behind the multiplexer, in the order of loading: `asdrv_pbl`, `asdrv_dms`, `asdrv_svm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Module {
    /// Device numbering.
    Uda,
    /// Feature queries.
    Urd,
    /// Resources. Bound, and answers EINVAL to everything.
    Resmng,
    /// Resource map. Bound, and answers EINVAL to everything.
    Rmo,
    /// Memory statistics. Bound, and answers EINVAL to everything.
    DpProcMng,
    /// Identity of devices and processes.
    Devmng,
    /// Memory.
    Svm,
    /// The next memory driver. Bound, and answers EINVAL to everything.
    SvmV3,
}

impl Module {
    const ALL: [Module; 8] = [
        Module::Uda,
        Module::Urd,
        Module::Resmng,
        Module::Rmo,
        Module::DpProcMng,
        Module::Devmng,
        Module::Svm,
        Module::SvmV3,
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

/// What the file's release will mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Announcement {
    /// Never bound: nothing to release.
    Unbound,
    /// Bound: closing it is the process's end.
    Bound,
    /// CLOSE was called: only this file goes.
    Close,
}

/// A file of `/dev/davinci_manager`.
#[derive(Debug)]
pub(crate) struct ManagerFile {
    /// Who opened it.
    pub tgid: i32,
    /// The start of that process: with the tgid, what tells processes apart.
    pub start_time: u64,
    /// The module, once bound.
    pub module: Option<Module>,
    /// What the client's mappings of the file show; the module's, once bound.
    pub backing: Option<File>,
    /// It was released together with the others of its process.
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

    /// OPEN: which module the file is to be bound to. The caller binds it.
    pub fn open(&mut self, config: &Config, caller: &Caller, arg: u64) -> Result<Module, Errno> {
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
        let module = module.ok_or(Errno::EINVAL)?;
        self.announcement = Announcement::Bound;
        self.module = Some(module);
        Ok(module)
    }

    /// CLOSE: by any process but the opener it does nothing. On a file that is not bound it spoils it for OPEN.
    pub fn close(&mut self, caller: &Caller) {
        if caller.tgid == self.tgid {
            self.announcement = Announcement::Close;
        }
    }

    /// Whether close(2) of this file ends the process for the driver.
    pub fn ends_process(&self) -> bool {
        !self.torn && self.announcement == Announcement::Bound
    }
}

/// GET_MODULE_STATUS: whether no file is bound to the name. It does not tell whether the module is there.
pub(crate) fn status(caller: &Caller, arg: u64, used: impl Fn(&str) -> bool) -> Result<i64, Errno> {
    let mut status = StatusArg::new_zeroed();
    if arg == 0 {
        return Err(Errno::EINVAL);
    }
    caller.memory.read(arg, status.as_mut_bytes()).map_err(|_| Errno::EFAULT)?;
    let in_use = std::str::from_utf8(name(&status.module_name)).is_ok_and(used);
    let unused = u32::from(!in_use);
    let place = arg.wrapping_add(offset_of!(StatusArg, status) as u64);
    caller.memory.write(place, &unused.to_ne_bytes()).map_err(|_| Errno::EFAULT)?;
    Ok(0)
}

/// The text before the NUL; the last byte counts as one.
fn name(bytes: &[u8; NAME_LENGTH]) -> &[u8] {
    let text = &bytes[..NAME_LENGTH - 1];
    &text[..text.iter().position(|byte| *byte == 0).unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::{OK, Process, Rig, refused};
    use ascend_ioctl::davinci::{CLOSE, GET_MODULE_STATUS, OPEN, PATH};

    const A: Process = Process(100);
    const B: Process = Process(200);
    const UDA: u32 = ascend_ioctl::uda::GET_USER_INFO.request();

    fn rig() -> (Rig, u64) {
        let rig = Rig::new(Config::default());
        let buffer = rig.heap.put(&[0; 64]);
        (rig, buffer)
    }

    #[test]
    fn a_file_answers_only_after_it_was_bound() {
        let (mut rig, buffer) = rig();
        let file = rig.open(A, PATH).unwrap();
        assert_eq!(rig.ioctl(A, file, UDA, buffer), refused(Errno::ENODEV));
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("NOPE")).0, refused(Errno::EINVAL));
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("UDA")).0, refused(Errno::EINVAL));
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("")).0, refused(Errno::EINVAL));
        assert_eq!(rig.ioctl(A, file, OPEN.request(), 0), refused(Errno::EINVAL));
        assert_eq!(rig.ioctl(A, file, OPEN.request(), 16), refused(Errno::EFAULT));
        assert_eq!(rig.ioctl(A, file, 0x5A03, 0), refused(Errno::EINVAL));
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("uda")).0, OK);
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("SVM")).0, refused(Errno::ENOSYS));
        assert_eq!(rig.ioctl(A, file, UDA, buffer), OK);
    }

    #[test]
    fn close_is_only_an_announcement_but_spoils_an_unbound_file() {
        let (mut rig, buffer) = rig();
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(rig.ioctl(A, file, CLOSE.request(), 0), OK);
        assert_eq!(rig.ioctl(A, file, UDA, buffer), OK);
        assert_eq!(rig.call(A, file, OPEN.request(), OpenArg::new("uda")).0, refused(Errno::ENOSYS));
        let unbound = rig.open(A, PATH).unwrap();
        assert_eq!(rig.ioctl(A, unbound, CLOSE.request(), 0), OK);
        assert_eq!(rig.call(A, unbound, OPEN.request(), OpenArg::new("uda")).0, refused(Errno::ENOSYS));
    }

    #[test]
    fn closing_without_close_tears_all_files_of_the_process() {
        let (mut rig, buffer) = rig();
        let [one, two] = [(); 2].map(|()| rig.module(A, "uda").unwrap());
        let other = rig.module(B, "uda").unwrap();
        rig.driver.close(one, true);
        assert_eq!(rig.ioctl(A, two, UDA, buffer), refused(Errno::EBADFD));
        assert_eq!(rig.ioctl(A, two, CLOSE.request(), 0), refused(Errno::EBADFD));
        assert_eq!(rig.ioctl(B, other, UDA, buffer), OK);
        let again = rig.module(A, "uda").unwrap();
        rig.driver.close(two, true);
        assert_eq!(rig.ioctl(A, again, UDA, buffer), OK);
    }

    #[test]
    fn orderly_and_unbound_closes_disturb_nobody() {
        let (mut rig, buffer) = rig();
        let kept = rig.module(A, "uda").unwrap();
        let unbound = rig.open(A, PATH).unwrap();
        rig.driver.close(unbound, true);
        let bound = rig.module(A, "uda").unwrap();
        rig.close(A, bound);
        assert_eq!(rig.ioctl(A, kept, UDA, buffer), OK);
    }

    #[test]
    fn a_childs_close_is_ignored() {
        let (mut rig, buffer) = rig();
        let [one, two] = [(); 2].map(|()| rig.module(A, "uda").unwrap());
        assert_eq!(rig.ioctl(B, one, CLOSE.request(), 0), OK);
        rig.driver.close(one, true);
        assert_eq!(rig.ioctl(A, two, UDA, buffer), refused(Errno::EBADFD));
    }

    #[test]
    fn status_tells_whether_a_name_is_bound_and_nothing_of_modules() {
        let (mut rig, _) = rig();
        let file = rig.open(A, PATH).unwrap();
        let mut status = |name: &str| {
            let arg = StatusArg { module_name: OpenArg::new(name).module_name, status: 7 };
            let (outcome, answer) = rig.call(A, file, GET_MODULE_STATUS.request(), arg);
            assert_eq!(outcome, OK);
            answer.status
        };
        assert_eq!((status("NOPE"), status("uda")), (1, 1));
        let bound = rig.module(B, "uda").unwrap();
        let arg = StatusArg { module_name: OpenArg::new("uda").module_name, status: 7 };
        assert_eq!(rig.call(A, file, GET_MODULE_STATUS.request(), arg).1.status, 0);
        rig.driver.close(bound, false);
        assert_eq!(rig.call(A, file, GET_MODULE_STATUS.request(), arg).1.status, 1);
    }

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
