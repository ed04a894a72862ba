//! Addresses for engines of the device: TRANSLATE, REGISTER_DMA; and MEM_REMOTE_MAP, which maps
//! host memory for a device, and plain device memory for the CPU.
//!
//! No engine is emulated, so a registration has no effect but its own rules: what can be
//! registered, once, and until when. The addresses that the device answers are made up.

use super::session::{Process, View};
use super::{Answer, Call, World, page_size, put, refuse};
use ascend_ioctl::svm::{self, Arg};
use nix::errno::Errno;
use std::ops::Range;

/// Kinds of MEM_REMOTE_MAP: ordinary host memory, pinned host memory, device memory for the host,
/// and how many kinds there are.
const HOST_MEMORY: u32 = 0;
const PINNED_MEMORY: u32 = 1;
const DEVICE_MEMORY: u32 = 2;
const KINDS: u32 = 7;
/// The process on the device that a mapping is for; the driver maps host memory for this one only.
const FIRST_PROCESS: u32 = 0;
/// Most bytes of one registration.
const MAX_RANGE: u64 = 8 << 40;

/// Host memory that is mapped for a device, or device memory for the CPU.
#[derive(Debug, Clone, Copy)]
pub struct Remote {
    size: u64,
    /// What the CPU sees of device memory.
    view: Option<View>,
}

impl Process {
    /// Ends the registrations of a device that is closed. Counters stay raised.
    pub fn end_registrations(&mut self, world: &mut World, physical: u32) {
        self.registered.retain(|(device, _), _| *device != physical);
        let ended = self.remote.iter_mut().filter(|((device, _), _)| *device == physical);
        let views: Vec<View> = ended.filter_map(|(_, remote)| remote.view.take()).collect();
        self.remote.retain(|(device, _), _| *device != physical);
        for view in views {
            self.hide(world, view);
        }
    }

    /// Takes the parts of device memory in a range that the CPU sees.
    pub fn take_parts(&mut self, range: Range<u64>) -> Vec<View> {
        let parts = self.remote.iter_mut().filter(|((_, start), _)| range.contains(start));
        parts.filter_map(|(_, remote)| remote.view.take()).collect()
    }
}

/// Whether one of `ranges` overlaps a range.
fn overlaps(ranges: impl Iterator<Item = (u64, u64)>, start: u64, size: u64) -> bool {
    let end = start.saturating_add(size);
    ranges.into_iter().any(|(other, length)| start < other.saturating_add(length) && other < end)
}

impl Call<'_, '_> {
    /// TRANSLATE: the address of device memory for a task of the device. The device is asked when
    /// the memory is freed whether a task still uses it; here none does.
    pub(super) fn translate(&mut self, arg: &mut Arg) -> Answer {
        let mut para: svm::Translate = arg.para();
        self.process.refer(para.address, Some(1))?;
        let place = self.process.place(para.address)?;
        let Some(device) = place.device.filter(|_| !place.absent && !place.read_only) else {
            return refuse(Errno::EINVAL, "only device memory that can be written is translated");
        };
        self.message(device)?;
        let Some((_, offset, _)) = self.process.resolve(para.address, 1) else {
            return refuse(Errno::EINVAL, "there is no memory at the address");
        };
        para.translated = offset;
        put(arg, &para);
        Ok(())
    }

    /// REGISTER_DMA: pins host memory for transfers.
    pub(super) fn register_dma(&mut self, arg: &mut Arg) -> Answer {
        let para: svm::RegisterDma = arg.para();
        self.process.refer(para.address, Some(para.size))?;
        if para.address == 0 || para.size == 0 || para.size > MAX_RANGE {
            return refuse(Errno::EINVAL, "the range is empty or too long");
        }
        let end = para.address.saturating_add(para.size);
        if self.process.is_svm(para.address) {
            let heap = self.process.heap(para.address);
            if heap.is_none_or(|heap| !heap.holds(para.address, para.size)) {
                return refuse(Errno::EINVAL, "the range leaves its heap");
            }
            let place = self.process.place(para.address)?;
            if place.device.is_some() || place.absent {
                return refuse(Errno::EINVAL, "only host memory is registered");
            }
        } else {
            if self.process.is_svm(end) {
                return refuse(Errno::EINVAL, "the range reaches into the module's addresses");
            }
            self.pin(para.address, para.size)?;
        }
        let device = self.physical;
        let ranges = self.process.registered.range((device, 0)..=(device, u64::MAX));
        if overlaps(ranges.map(|((_, start), size)| (*start, *size)), para.address, para.size) {
            return refuse(Errno::EINVAL, "part of the range is registered already");
        }
        self.process.registered.insert((device, para.address), para.size);
        Ok(())
    }

    /// Whether the caller's memory can be pinned: every page exists and can be read.
    fn pin(&self, address: u64, size: u64) -> Answer {
        let page = page_size();
        let mut at = address;
        while at < address.saturating_add(size) {
            if self.caller.memory.read(at, &mut [0]).is_err() {
                return refuse(Errno::EFAULT, "the caller's memory cannot be pinned");
            }
            at = (at / page + 1) * page;
        }
        Ok(())
    }

    /// UNREGISTER_DMA.
    pub(super) fn unregister_dma(&mut self, arg: &mut Arg) -> Answer {
        let para: svm::UnregisterDma = arg.para();
        match self.process.registered.remove(&(self.physical, para.address)) {
            Some(_) => Ok(()),
            None => refuse(Errno::EFAULT, "no registration begins at the address"),
        }
    }

    /// MEM_REMOTE_MAP: maps host memory for a device.
    pub(super) fn remote_map(&mut self, arg: &mut Arg) -> Answer {
        let mut para: svm::RemoteMap = arg.para();
        self.process.refer(para.src_va, Some(para.size))?;
        if para.map_type >= KINDS {
            return refuse(Errno::EINVAL, "no such kind of mapping");
        }
        let physical = self.physical;
        if self.process.is_svm(para.src_va) {
            let place = self.process.place(para.src_va)?;
            if let Some(device) = place.device {
                return self.remote_map_device(arg, &mut para, device, place.read_only);
            }
            if place.absent {
                return refuse(Errno::EOPNOTSUPP, "memory without pages is not mapped for others");
            }
            if para.map_type != PINNED_MEMORY || para.size == 0 {
                return refuse(Errno::EINVAL, "the kind is not that of the memory, or the size is 0");
            }
        } else {
            if para.map_type != HOST_MEMORY {
                // The other kinds need abilities that the emulated device does not have.
                return match para.map_type {
                    PINNED_MEMORY | 2 => refuse(Errno::EINVAL, "the kind is not that of the memory"),
                    _ => refuse(Errno::EOPNOTSUPP, "the device has no such mappings"),
                };
            }
            if para.src_va == 0 || para.src_va % page_size() != 0 || para.size == 0 {
                return refuse(Errno::EINVAL, "the range is empty or does not begin at a page");
            }
        }
        if para.proc_type != FIRST_PROCESS {
            return refuse(Errno::EOPNOTSUPP, "host memory is not mapped for this process of the device");
        }
        if self.process.is_svm(para.src_va) && self.process.heap(para.src_va).is_some_and(|heap| heap.is_reserve()) {
            return refuse(Errno::EOPNOTSUPP, "host memory of a handle is not mapped for a device");
        }
        let ranges = self.process.remote.range((physical, 0)..=(physical, u64::MAX));
        if overlaps(ranges.map(|((_, start), remote)| (*start, remote.size)), para.src_va, para.size) {
            return refuse(Errno::EINVAL, "part of the range is mapped for the device already");
        }
        if !self.process.is_svm(para.src_va) {
            self.pin(para.src_va, para.size)?;
        }
        self.message(physical)?;
        self.process.remote.insert((physical, para.src_va), Remote { size: para.size, view: None });
        self.count(para.src_va, true);
        para.dst_va = para.src_va;
        put(arg, &para);
        Ok(())
    }

    /// MEM_REMOTE_MAP of device memory: the CPU sees it at its own address, through a BAR.
    fn remote_map_device(&mut self, arg: &mut Arg, para: &mut svm::RemoteMap, device: u32, read_only: bool) -> Answer {
        let locked = self.process.heap(para.src_va).filter(|heap| !heap.is_reserve() && heap.is_locked(para.src_va));
        let Some(heap) = locked else {
            return refuse(Errno::EOPNOTSUPP, "only memory that is locked to a device is mapped for the host");
        };
        if para.map_type != DEVICE_MEMORY || para.size == 0 {
            return refuse(Errno::EINVAL, "the kind is not that of the memory, or the size is 0");
        }
        if para.proc_type != FIRST_PROCESS {
            return refuse(Errno::EOPNOTSUPP, "device memory is not mapped for this process of the device");
        }
        let size = para.size.checked_next_multiple_of(heap.chunk).filter(|size| heap.holds(para.src_va, *size));
        let Some(size) = size.filter(|_| self.process.enabled && para.src_va % heap.chunk == 0 && !read_only) else {
            return refuse(Errno::EINVAL, "the range is not one of whole writable pages, or there are no segments");
        };
        let ranges = self.process.remote.range((device, 0)..=(device, u64::MAX));
        if overlaps(ranges.map(|((_, start), remote)| (*start, remote.size)), para.src_va, size) {
            return refuse(Errno::EINVAL, "part of the range is mapped already");
        }
        let Some(run) = heap.pages(para.src_va).filter(|run| run.end() >= para.src_va + size) else {
            return refuse(Errno::EINVAL, "part of the range has no pages of the device");
        };
        let (block, inside, seen) = (run.block, run.offset + (para.src_va - run.start), run.view.is_some());
        let mut view = None;
        if !seen {
            view = match self.process.show(self.world, block, inside, para.src_va, size) {
                Some(Ok(view)) => Some(view),
                _ => return refuse(Errno::EINVAL, "the pages could not be mapped into the segment"),
            };
        }
        self.process.remote.insert((device, para.src_va), Remote { size, view });
        self.count(para.src_va, true);
        (para.dst_va, para.size) = (para.src_va, size);
        put(arg, para);
        Ok(())
    }

    /// MEM_REMOTE_UNMAP.
    pub(super) fn remote_unmap(&mut self, arg: &mut Arg) -> Answer {
        let mut para: svm::RemoteUnmap = arg.para();
        self.process.refer(para.src_va, None)?;
        if para.map_type >= KINDS {
            return refuse(Errno::EINVAL, "no such kind of mapping");
        }
        let managed = self.process.is_svm(para.src_va);
        let place = self.process.place(para.src_va)?;
        let device = place.device.unwrap_or(self.physical);
        let Some(remote) = self.process.remote.remove(&(device, para.src_va)) else {
            return match managed {
                true => refuse(Errno::EINVAL, "nothing is mapped for the device there"),
                false => refuse(Errno::ENOENT, "nothing is mapped for the device there"),
            };
        };
        if let Some(view) = remote.view {
            self.process.hide(self.world, view);
        }
        self.count(para.src_va, false);
        if !managed {
            para.dst_va = para.src_va;
            put(arg, &para);
        }
        Ok(())
    }

    /// Raises or lowers the counter of the allocation that is mapped for a device.
    fn count(&mut self, address: u64, raise: bool) {
        let heap = self.process.heap_mut(address);
        if let Some(found) = heap.and_then(|heap| heap.reservation_mut(address)) {
            found.counter = if raise { found.counter + 1 } else { found.counter.saturating_sub(1) };
        }
    }
}
