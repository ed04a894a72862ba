//! The whole driver: its files, and the module that serves each.
//!
//! There are four kinds of nodes: `/dev/davinci_manager` (the multiplexer of all modules),
//! `/dev/davinciN` (can only be opened), `/dev/hisi_hdc` (packets to daemons on the device) and
//! `/dev/devmm_svm`, which cannot be opened.

use crate::caller::{Caller, Outcome};
use crate::config::{Config, Door};
use crate::davinci::{self, ManagerFile, Module};
use crate::devmng::Devmng;
use crate::esched::Esched;
use crate::fault::{DeviceFault, Fault};
use crate::hdc::Hdc;
use crate::machine::Machine;
use crate::state::{DeviceProcessState, FileState, State};
use crate::svm::Svm;
use crate::tsdrv::Tsdrv;
use crate::{dp_proc_mng, uda, urd};
use ascend_ioctl::command::{magic, number};
use ascend_ioctl::{davinci as ioctl, hdc};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::time::{Duration, Instant};

/// An open file description of one of the driver's character devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

/// The arguments of mmap(2) on one of the driver's files.
#[derive(Debug, Clone, Copy)]
pub struct Mmap {
    /// Requested address.
    pub hint: u64,
    /// Whether the requested range was free, so that the kernel will use the hint.
    pub free: bool,
    /// Length in bytes.
    pub length: u64,
    /// PROT_* bits.
    pub prot: i32,
    /// MAP_* bits.
    pub flags: i32,
    /// File offset.
    pub offset: u64,
}

/// A change that a process makes to its own address space.
#[derive(Debug, Clone, Copy)]
pub struct AddressSpaceChange {
    /// The system call.
    pub kind: ChangeKind,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether anything is mapped in the range. Linux does not notify drivers about a change of an
    /// empty range.
    pub mapped: bool,
}

/// Who carries out an [`AddressSpaceChange`] that is not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The kernel, on the mappings of the emulated files.
    ByKernel,
    /// Nobody: it does nothing to the mappings of the real driver, and would do something to those
    /// of the emulated files.
    Nothing,
}

/// The system call behind an [`AddressSpaceChange`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// munmap, or mmap with MAP_FIXED over it.
    Unmap,
    /// mprotect to these PROT_* bits.
    Protect(i32),
    /// madvise with this advice.
    Advise(i32),
    /// mbind with this mode.
    Bind(i32),
    /// mlock or mlock2.
    Lock,
    /// mremap.
    Remap {
        /// The new length.
        length: u64,
        /// Whether a new address is given (MREMAP_FIXED).
        fixed: bool,
    },
}

/// The memory driver's own node, which cannot be opened.
const DEVMM_SVM: &str = "/dev/devmm_svm";

#[derive(Debug)]
enum Kind {
    Manager(ManagerFile),
    Node,
    Hdc,
}

#[derive(Debug)]
struct OpenFile {
    path: String,
    tgid: i32,
    kind: Kind,
}

/// The emulated driver on its emulated host.
pub struct Driver {
    /// Hardware and firmware.
    pub machine: Machine,
    /// The memory module.
    pub svm: Svm,
    devmng: Devmng,
    hdc: Hdc,
    tsdrv: Tsdrv,
    esched: Esched,
    files: BTreeMap<FileId, OpenFile>,
    opened: u64,
}

impl Driver {
    /// A freshly loaded driver.
    pub fn new(config: Config) -> Self {
        Driver {
            machine: Machine::new(config),
            svm: Svm::default(),
            devmng: Devmng::default(),
            hdc: Hdc::default(),
            tsdrv: Tsdrv::default(),
            esched: Esched::default(),
            files: BTreeMap::new(),
            opened: 0,
        }
    }

    /// open(2) of `path`; `None` if the path is not one of the driver. `backing` is the memfd that
    /// the client will hold; mappings show its pages.
    pub fn open(&mut self, caller: &Caller, path: &str, _flags: i32, backing: File) -> Option<Result<FileId, Errno>> {
        self.machine.advance(Instant::now());
        self.machine.inherit_place(caller.tgid);
        let kind = match path {
            ioctl::PATH => match self.machine.config.door.errno() {
                Some(errno) => Err(errno),
                None => Ok(Kind::Manager(ManagerFile::new(caller, backing))),
            },
            hdc::PATH => self.machine.config.hdc_door.errno().map_or(Ok(Kind::Hdc), Err),
            DEVMM_SVM => Err(self.machine.config.door.errno().unwrap_or(Errno::EACCES)),
            _ => self.open_node(caller, node(path)?),
        };
        Some(kind.map(|kind| {
            self.opened += 1;
            let id = FileId(self.opened);
            self.files.insert(id, OpenFile { path: path.to_owned(), tgid: caller.tgid, kind });
            id
        }))
    }

    fn open_node(&mut self, caller: &Caller, physical: u32) -> Result<Kind, Errno> {
        if let Some(errno) = self.machine.config.door.errno() {
            return Err(errno);
        }
        self.machine.node_opens(caller, physical)?;
        self.machine.occupy(caller, physical)?;
        Ok(Kind::Node)
    }

    /// Whether the node exists where a process runs, for stat and access.
    pub fn exists(&self, tgid: i32, path: &str) -> bool {
        let config = &self.machine.config;
        match path {
            ioctl::PATH | DEVMM_SVM => config.door != Door::Missing,
            hdc::PATH => config.hdc_door != Door::Missing,
            _ => node(path).is_some_and(|id| config.door != Door::Missing && self.machine.node_exists(tgid, id)),
        }
    }

    /// The names of the nodes in `/dev` that a process sees.
    pub fn nodes(&self, tgid: i32) -> Vec<String> {
        let devices = self.machine.physical_ids().map(|id| format!("/dev/davinci{id}"));
        let paths = [ioctl::PATH, DEVMM_SVM, hdc::PATH].into_iter().map(str::to_owned).chain(devices);
        let there = paths.filter(|path| self.exists(tgid, path));
        there.filter_map(|path| path.strip_prefix("/dev/").map(str::to_owned)).collect()
    }

    /// ioctl(2).
    pub fn ioctl(&mut self, caller: &Caller, file: FileId, request: u32, arg: u64) -> Outcome {
        self.machine.advance(Instant::now());
        let Some(open) = self.files.get_mut(&file) else { return Errno::EBADF.into() };
        let manager = match &mut open.kind {
            Kind::Node => return Errno::ENOTTY.into(),
            Kind::Hdc => return self.hdc.ioctl(&mut self.machine, &self.devmng, caller, file, request, arg),
            Kind::Manager(manager) if manager.torn => return Errno::EBADFD.into(),
            Kind::Manager(manager) => manager,
        };
        if magic(request) == ioctl::MAGIC {
            return self.manager_ioctl(caller, file, number(request), arg).into();
        }
        let machine = &mut self.machine;
        match manager.module {
            None => Errno::ENODEV.into(),
            Some(Module::Uda) => uda::ioctl(machine, caller, request, arg),
            Some(Module::Urd) => urd::ioctl(machine, caller, request, arg),
            Some(Module::Devmng) => self.devmng.ioctl(machine, caller, request, arg),
            Some(Module::Svm) => self.svm.ioctl(machine, caller, file, request, arg),
            Some(Module::DpProcMng) => dp_proc_mng::ioctl(machine, caller, request, arg),
            Some(Module::Tsdrv) => {
                let outcome = self.tsdrv.ioctl(machine, &mut self.svm, caller, file, request, arg);
                self.tsdrv.notices.drain(..).for_each(|notice| self.esched.deliver(notice));
                outcome
            }
            Some(Module::Esched) => self.esched.ioctl(machine, caller, file, request, arg),
            Some(_) => Errno::EINVAL.into(),
        }
    }

    fn manager_ioctl(&mut self, caller: &Caller, file: FileId, number: u8, arg: u64) -> Result<i64, Errno> {
        if number == ioctl::GET_MODULE_STATUS.number {
            let bound =
                |name: &str| self.managers().any(|(_, it)| it.module.is_some_and(|module| module.name() == name));
            return davinci::status(caller, arg, bound);
        }
        let Some(Kind::Manager(manager)) = self.files.get_mut(&file).map(|open| &mut open.kind) else {
            return Err(Errno::EBADFD);
        };
        if number == ioctl::CLOSE.number {
            manager.close(caller);
            return Ok(0);
        }
        if number != ioctl::OPEN.number {
            return Err(Errno::EINVAL);
        }
        let (module, device) = manager.open(&self.machine.config, caller, arg)?;
        let machine = &self.machine;
        let answer = match module {
            Module::Tsdrv => self.tsdrv.open(machine, caller, file, device)?,
            Module::TsdrvMmap => self.tsdrv.open_mmap(machine, caller, device)?,
            Module::Esched => self.esched.open(machine, caller, file, device),
            _ => 0,
        };
        // A positive answer is a refusal, too.
        if answer != 0 {
            return Ok(answer);
        }
        manager.bind(module);
        match (module, manager.backing.take()) {
            (Module::Svm, Some(backing)) => self.svm.open(file, caller, backing),
            (Module::Devmng, _) => self.devmng.open(caller),
            _ => {}
        }
        Ok(0)
    }

    fn managers(&self) -> impl Iterator<Item = (FileId, &ManagerFile)> {
        self.files.iter().filter_map(|(id, open)| match &open.kind {
            Kind::Manager(manager) if !manager.torn => Some((*id, manager)),
            _ => None,
        })
    }

    /// Two ioctls of one process on one file wait at the same time: an ALLOC of the memory module
    /// and another one. `alloc` and `other` are the addresses of their arguments.
    pub fn overlap(&mut self, caller: &Caller, file: FileId, alloc: u64, request: u32, other: u64) {
        self.svm.overlap(&mut self.machine, caller, file, alloc, request, other);
    }

    /// mmap(2).
    pub fn mmap(&mut self, caller: &Caller, file: FileId, mmap: &Mmap) -> Result<(), Errno> {
        let Some(open) = self.files.get(&file) else { return Err(Errno::EBADF) };
        let manager = match &open.kind {
            Kind::Manager(manager) => manager,
            // The mapping is empty until memory for transfers without copies is allocated, which is
            // not modelled.
            Kind::Hdc => return Ok(()),
            Kind::Node => return Err(Errno::ENODEV),
        };
        // The driver chooses the address itself and refuses fixed ones.
        if mmap.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            return Err(Errno::EINVAL);
        }
        match manager.module {
            _ if manager.torn => Err(Errno::EBADFD),
            None => Err(Errno::EBADFD),
            Some(Module::Svm) => self.svm.mmap(&mut self.machine, caller, file, mmap),
            // Empty: no queue is ever mapped into it.
            Some(Module::TsdrvMmap) => Ok(()),
            Some(_) => Err(Errno::EINVAL),
        }
    }

    /// munmap, mprotect, madvise or mremap somewhere in the driver's address ranges.
    pub fn address_space_change(&mut self, caller: &Caller, change: &AddressSpaceChange) -> Result<Change, Errno> {
        self.svm.address_space_change(&mut self.machine, caller, change)
    }

    /// The address space of a process is gone: it exited, was killed or called exec. Called before
    /// the files that it held are closed; files that other processes hold stay open.
    pub fn exit(&mut self, tgid: i32, start_time: u64) {
        self.svm.exit(&mut self.machine, tgid, start_time);
        self.machine.exit(tgid);
    }

    /// The name of the module that serves a file's ioctls; empty if the file is not bound.
    pub fn module(&self, file: FileId) -> &str {
        match self.files.get(&file).map(|open| &open.kind) {
            Some(Kind::Manager(manager)) => manager.module.map_or("", Module::name),
            Some(Kind::Hdc) => "hdc",
            _ => "",
        }
    }

    /// Injects a fault. The front handles failing commands itself.
    pub fn inject(&mut self, fault: &Fault) {
        match fault {
            Fault::Command { .. } | Fault::Answer { .. } => {}
            Fault::Device { device, fault: DeviceFault::Dead } => self.machine.kill_device(*device),
            Fault::Device { device, fault: DeviceFault::Silent(time) } => self.machine.silence_device(*device, *time),
            Fault::Copies => self.machine.link_broken = true,
        }
    }

    /// What clients hold.
    pub fn state(&mut self) -> State {
        self.pass_time(Duration::ZERO);
        let module = |kind: &Kind| match kind {
            Kind::Manager(manager) => manager.module.map(|module| module.name().to_owned()),
            _ => None,
        };
        let files = self.files.values();
        let companions = self.machine.companions();
        State {
            files: files
                .map(|open| FileState { path: open.path.clone(), tgid: open.tgid, module: module(&open.kind) })
                .collect(),
            device_processes: companions
                .map(|(device, tgid, it)| DeviceProcessState { device, tgid, pid: it.pid, orphaned: it.orphaned })
                .collect(),
            registrations: self.devmng.registered().collect(),
            sessions: self.hdc.sessions().collect(),
            peer_requests: self.machine.peers.requests().collect(),
            memory: self.svm.state(),
            tasks: self.tsdrv.state(),
            event_groups: self.esched.groups(),
        }
    }

    /// Lets time pass for the connections of `/dev/hisi_hdc`. The driver closes one that nobody
    /// claimed after a minute: that is what a process leaves that is killed while it connects.
    pub fn pass_time(&mut self, time: Duration) {
        self.hdc.expire(&mut self.machine, Instant::now() + time);
    }

    /// The last reference to a file (descriptors and mappings) is gone. `alive` says whether the
    /// opener's address space still exists.
    pub fn close(&mut self, file: FileId, alive: bool) {
        let Some(open) = self.files.remove(&file) else { return };
        let manager = match open.kind {
            Kind::Manager(manager) => manager,
            Kind::Hdc => return self.hdc.release(&mut self.machine, file),
            Kind::Node => return,
        };
        if manager.torn {
            return;
        }
        let mut released = vec![(manager.module, file)];
        if manager.ends_process() {
            for (id, open) in &mut self.files {
                if let Kind::Manager(other) = &mut open.kind {
                    if !other.torn && (other.tgid, other.start_time) == (manager.tgid, manager.start_time) {
                        other.torn = true;
                        released.push((other.module, *id));
                    }
                }
            }
            // In the order in which the modules were loaded.
            released.sort();
        }
        for (module, id) in released {
            match module {
                Some(Module::Devmng) => self.devmng.release(&mut self.machine, manager.tgid),
                Some(Module::Svm) => self.svm.release(&mut self.machine, id, alive),
                Some(Module::Tsdrv) => self.tsdrv.release(id),
                Some(Module::Esched) => self.esched.release(id),
                _ => {}
            }
        }
    }
}

/// The physical id in `/dev/davinciN`.
fn node(path: &str) -> Option<u32> {
    let number = path.strip_prefix("/dev/davinci")?;
    if number.is_empty() || (number.len() > 1 && number.starts_with('0')) || !number.bytes().all(|c| c.is_ascii_digit())
    {
        return None;
    }
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Place;
    use crate::rig::{Random, Rig, TestProcess};
    use ascend_ioctl::Generation;

    /// A small number, a large number or an address.
    fn word(random: &mut Random, address: u64) -> u64 {
        match random.next() % 6 {
            0 => random.next(),
            1 => u64::MAX - random.next() % 4,
            2 => address + random.next() % 64,
            3 => 0,
            _ => random.next() % 200,
        }
    }

    #[test]
    fn no_argument_makes_the_model_panic() {
        for generation in Generation::ALL {
            let places = vec![Place::host(), Place::container(&[1])];
            let mut rig = Rig::new(Config { generation, places, virtual_instances: vec![100], ..Config::default() });
            rig.driver.machine.put(200, 1);
            let mut random = Random::new(0);
            let processes = [TestProcess(100), TestProcess(200)];
            let names = ["uda", "URD", "DEVMNG", "RESMNG"];
            let mut files: Vec<FileId> =
                processes.iter().flat_map(|it| names.map(|name| rig.module(*it, name).unwrap())).collect();
            files.extend(processes.map(|process| rig.open(process, hdc::PATH).unwrap()));
            files.extend(["TSDRV", "ESCHED"].map(|name| rig.module(processes[0], name).unwrap()));
            let arg = rig.heap.put(&[0; 512]);
            for _ in 0..4_000 {
                for offset in (0..512).step_by(4) {
                    let word = word(&mut random, arg);
                    if offset % 8 == 0 || word <= u64::from(u32::MAX) {
                        let _ = crate::caller::Memory::write(&rig.heap, arg + offset, &(word as u32).to_ne_bytes());
                    }
                }
                let file = files[random.next() as usize % files.len()];
                let magics = [0x5500, 0x5600, 0x4D00, 0x4800, 0x5A00, 0x5700, 0x5800];
                let mut request = magics[random.next() as usize % magics.len()] | (random.next() as u32 % 256);
                // CLOSE would end the file's use.
                request = if request == ioctl::CLOSE.request() { 0x5601 } else { request };
                let process = processes[random.next() as usize % 2];
                rig.ioctl(process, file, request, arg);
            }
            rig.driver.close(files[0], true);
            rig.driver.close(files[4], false);
        }
    }

    #[test]
    fn only_plain_numbers_name_a_device() {
        assert_eq!(node("/dev/davinci0"), Some(0));
        assert_eq!(node("/dev/davinci103"), Some(103));
        for path in
            ["/dev/davinci", "/dev/davinci_manager", "/dev/davinci01", "/dev/davinci+1", "/dev/davinci99999999999"]
        {
            assert_eq!(node(path), None, "{path}");
        }
    }
}
