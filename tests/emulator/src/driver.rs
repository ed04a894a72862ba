//! The whole driver: files, and which module answers for each.

use crate::caller::{Caller, Outcome};
use crate::config::Config;
use crate::fault::Fault;
use crate::machine::Machine;
use crate::state::{FileState, State};
use crate::svm::Svm;
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::fs::File;

/// An open file description of one of the driver's character devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

/// The arguments of mmap(2) on one of the driver's files.
#[derive(Debug, Clone, Copy)]
pub struct Mmap {
    /// Wanted address.
    pub hint: u64,
    /// Whether the wanted range was free, so that the kernel will honour the hint.
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
    /// Which system call.
    pub kind: ChangeKind,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
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
    /// mremap.
    Remap {
        /// The new length.
        length: u64,
        /// Whether a new place is demanded (MREMAP_FIXED).
        fixed: bool,
    },
}

/// The emulated driver on its emulated host.
pub struct Driver {
    /// Hardware and firmware.
    pub machine: Machine,
    /// The memory module.
    pub svm: Svm,
    files: BTreeMap<FileId, FileState>,
    opened: u64,
}

impl Driver {
    /// A freshly loaded driver.
    pub fn new(config: Config) -> Self {
        Driver { machine: Machine::new(config), svm: Svm::default(), files: BTreeMap::new(), opened: 0 }
    }

    /// open(2) of `path`; `None` if it is no path of the driver's. `backing` is the memfd that the client will hold: its pages are what mappings show.
    pub fn open(&mut self, caller: &Caller, path: &str, _flags: i32, _backing: File) -> Option<Result<FileId, Errno>> {
        if !self.exists(path) {
            return None;
        }
        self.opened += 1;
        let id = FileId(self.opened);
        self.files.insert(id, FileState { path: path.to_owned(), tgid: caller.tgid, module: None });
        Some(Ok(id))
    }

    /// ioctl(2).
    pub fn ioctl(&mut self, _caller: &Caller, _file: FileId, _request: u32, _arg: u64) -> Outcome {
        Errno::ENOTTY.into()
    }

    /// mmap(2).
    pub fn mmap(&mut self, _caller: &Caller, _file: FileId, mmap: &Mmap) -> Result<(), Errno> {
        if mmap.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// munmap, mprotect, madvise or mremap somewhere in the driver's address ranges.
    pub fn address_space_change(&mut self, _caller: &Caller, _change: &AddressSpaceChange) -> Result<(), Errno> {
        Ok(())
    }

    /// The address space of a process is gone: it exited, was killed or did exec. Comes before the close of the files that went with it; files that
    /// others hold stay open.
    pub fn exit(&mut self, _tgid: i32, _start_time: u64) {}

    /// Whether the node exists (stat and access; nothing is opened).
    pub fn exists(&self, path: &str) -> bool {
        let device = path.strip_prefix("/dev/davinci").and_then(|number| number.parse().ok());
        path == "/dev/davinci_manager" || device.is_some_and(|device: u32| device < self.machine.config.devices)
    }

    /// The name of the module that answers a file's ioctls; empty if there is none yet.
    pub fn module(&self, file: FileId) -> &str {
        self.files.get(&file).and_then(|file| file.module.as_deref()).unwrap_or("")
    }

    /// Something breaks. Failing commands are the front's business and do not come here.
    pub fn inject(&mut self, _fault: &Fault) {}

    /// Who holds what.
    pub fn state(&self) -> State {
        State { files: self.files.values().cloned().collect() }
    }

    /// The last reference to a file (descriptors and mappings) is gone. `alive` tells whether the opener's address space still exists.
    pub fn close(&mut self, file: FileId, _alive: bool) {
        self.files.remove(&file);
    }
}
