//! A client that uses the driver by system calls alone, for tests of the front.

use ascend_ioctl::command::Command;
use ascend_ioctl::svm::{self, Op};
use ascend_ioctl::{Generation, davinci};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::sys::stat::Mode;
use std::ffi::c_void;
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

/// Path of the multiplexer.
pub const MANAGER: &str = "/dev/davinci_manager";

/// Opens the multiplexer.
pub fn open_manager() -> OwnedFd {
    open(MANAGER, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).unwrap()
}

/// Calls a command with an argument of its type.
pub fn ioctl<T>(file: &OwnedFd, command: &Command, argument: &mut T) -> Result<i32, Errno> {
    // SAFETY: the argument is the command's own and writable.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), command.request().into(), std::ptr::from_mut(argument)) })
}

/// Opens a file and binds it to a module.
pub fn open_module(name: &str) -> Result<OwnedFd, Errno> {
    let file = open_manager();
    ioctl(&file, &davinci::OPEN, &mut davinci::OpenArg::new(name))?;
    Ok(file)
}

/// A memory session, which lives as long as the file.
pub struct Session {
    /// Generation of the driver.
    pub generation: Generation,
    /// The file that is bound to SVM.
    pub file: OwnedFd,
}

impl Session {
    /// A file with a process object, and the segments to map.
    pub fn prepare(generation: Generation) -> Result<(Self, Vec<svm::Segment>), Errno> {
        let session = Session { generation, file: open_module("SVM")? };
        session.call(Op::AllocProcStruct, 0, &svm::InitProcess::default())?;
        let mut segments = vec![svm::Segment::default(); 16];
        let array = segments.as_mut_ptr() as u64;
        let info = svm::MmapInfo { segments: segments.len() as u32, array, ..Default::default() };
        let info = session.call(Op::GetMmapInfo, 0, &info)?;
        segments.truncate(info.segments as usize);
        Ok((session, segments))
    }

    /// Maps a segment.
    pub fn map_segment(
        &self,
        segment: &svm::Segment,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> Result<NonNull<c_void>, Errno> {
        let (hint, length) = (NonZero::new(segment.start as usize), NonZero::new(segment.size as usize));
        // SAFETY: a new mapping at a hint where nothing else is mapped.
        unsafe { mmap(hint, length.ok_or(Errno::EINVAL)?, prot, flags, &self.file, 0) }
    }

    /// Starts a session with its segments mapped and device 0 set up. The host must start device
    /// processes by itself.
    pub fn start(generation: Generation) -> Result<Self, Errno> {
        let (session, segments) = Session::prepare(generation)?;
        for segment in &segments {
            session.map_segment(segment, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED)?;
        }
        session.call(Op::InitProcess, 0, &svm::InitProcess::default())?;
        session.call(Op::SetupDevice, 0, &svm::SetupDevice { stats_address: 1, ..Default::default() })?;
        Ok(session)
    }

    /// Calls a command of the memory module.
    pub fn call<P: svm::Para>(&self, op: Op, device: u32, para: &P) -> Result<P, Errno> {
        let command = &self.generation.svm(op).ok_or(Errno::ENOSYS)?.command;
        let mut argument = svm::Arg::new(device, para);
        ioctl(&self.file, command, &mut argument)?;
        Ok(argument.para())
    }

    /// Enables a reserve heap of 1 GiB in which 2 MiB pages are mapped, and returns its first
    /// address.
    pub fn heap(&self) -> Result<u64, Errno> {
        let index = ((svm::NORMAL_START - svm::SVM_START) / svm::HEAP_UNIT) as u32;
        let heap = svm::UpdateHeap {
            operation: svm::HEAP_ENABLE,
            kind: svm::HEAP_HUGE,
            sub_kind: svm::SUB_RESERVE,
            index,
            size: svm::HEAP_UNIT,
        };
        self.call(Op::UpdateHeap, 0, &heap)?;
        Ok(svm::NORMAL_START)
    }

    /// Allocates `pages` huge pages of device 0 and returns the handle's id.
    pub fn create(&self, pages: u64) -> Result<i32, Errno> {
        let create = svm::MemCreate {
            size: pages * svm::HUGE_PAGE,
            side: svm::SIDE_DEVICE,
            page: svm::PAGE_HUGE,
            ..Default::default()
        };
        Ok(self.call(Op::MemCreate, 0, &create)?.id)
    }

    /// Reserves addresses and maps a handle there.
    pub fn map(&self, address: u64, id: i32, pages: u64) -> Result<(), Errno> {
        let size = pages * svm::HUGE_PAGE;
        self.call(Op::Alloc, 0, &svm::Alloc { address, size })?;
        let map = svm::MemMap {
            address,
            size,
            id,
            side: svm::SIDE_DEVICE,
            page: svm::PAGE_HUGE,
            pages,
            ..Default::default()
        };
        self.call(Op::MemMap, 0, &map).map(drop)
    }

    /// Undoes [`Session::map`].
    pub fn unmap(&self, address: u64) -> Result<(), Errno> {
        self.call(Op::MemUnmap, svm::HOST_ID, &svm::MemUnmap { address, ..Default::default() })?;
        self.free(address)
    }

    /// Frees a reservation.
    pub fn free(&self, address: u64) -> Result<(), Errno> {
        self.call(Op::FreePages, 0, &svm::FreePages { address }).map(drop)
    }

    /// Releases a handle.
    pub fn release(&self, id: i32, pages: u64) -> Result<(), Errno> {
        let release = svm::MemRelease { id, side: svm::SIDE_DEVICE, pages, ..Default::default() };
        self.call(Op::MemRelease, 0, &release).map(drop)
    }

    /// Copies synchronously.
    pub fn copy(&self, destination: u64, source: u64, size: usize, direction: u32) -> Result<(), Errno> {
        let copy = svm::Memcpy { destination, source, size: size as u64, direction, ..Default::default() };
        self.call(Op::Memcpy, 0, &copy).map(drop)
    }

    /// Exports a handle and returns the share's id.
    pub fn export(&self, id: i32) -> Result<i32, Errno> {
        let export = svm::MemExport { side: svm::SIDE_DEVICE as i32, id, share: 0 };
        Ok(self.call(Op::MemExport, 0, &export)?.share)
    }
}
