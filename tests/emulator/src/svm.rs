//! The memory driver, SVM v2 ("devmm").

use crate::caller::{Caller, Outcome};
use crate::driver::{AddressSpaceChange, FileId, Mmap};
use crate::machine::Machine;
use nix::errno::Errno;
use std::fs::File;

/// State of the SVM module: every process's session and every share.
#[derive(Default)]
pub struct Svm {}

impl Svm {
    /// A file was bound to the module. `backing` is the file that the client's mappings of it show: what is written there at
    /// `va - segment start` is what its CPU sees.
    pub fn open(&mut self, _file: FileId, _caller: &Caller, _backing: File) {}

    /// An ioctl on a bound file.
    pub fn ioctl(
        &mut self,
        _machine: &mut Machine,
        _caller: &Caller,
        _file: FileId,
        _request: u32,
        _arg: u64,
    ) -> Outcome {
        Errno::EINVAL.into()
    }

    /// mmap of a bound file. On success the front lets the kernel do it at the hint.
    pub fn mmap(&mut self, _machine: &mut Machine, _caller: &Caller, _file: FileId, _mmap: &Mmap) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }

    /// The caller is about to change its address space between 7 and 24 TiB (or somewhere that a dynamic mapping was recorded).
    pub fn address_space_change(
        &mut self,
        _machine: &mut Machine,
        _caller: &Caller,
        _change: &AddressSpaceChange,
    ) -> Result<(), Errno> {
        Ok(())
    }

    /// The last reference to the file is gone. `alive` tells whether the process that it belongs to still has its address space.
    pub fn release(&mut self, _machine: &mut Machine, _file: FileId, _alive: bool) {}
}
