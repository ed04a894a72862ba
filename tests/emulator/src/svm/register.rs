//! Addresses for engines of the device: TRANSLATE, REGISTER_DMA; and MEM_REMOTE_MAP, which maps
//! host memory for a device, and device memory for the CPU.
//!
//! No engine is emulated, so a registration has no effect but its own rules: what can be
//! registered, once, and until when. The addresses that the device answers are made up.

use super::behaviour::Behaviour;
use super::heap::Heap;
use super::mapping::Mapping;
use super::session::{Process, View};
use super::store::BlockId;
use super::{Call, SvmResult, World, page_size, put, refuse};
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg};
use nix::errno::Errno;
use std::ops::Range;

/// Kinds of MEM_REMOTE_MAP: ordinary host memory, pinned host memory, device memory for the host,
/// host memory that the device accesses through the link; and two that are not emulated, memory of
/// another process on the device and the host's I/O memory.
///
/// A device has either the first or the fourth kind of ordinary memory, as its firmware says
/// (`feature_pcie_th`). The vendor's runtime asks for the fourth on Ascend910B, 910_93 and 950
/// (`RT_FEATURE_MEM_HOST_REGISTER_PCIE_THROUGH` in its tables of chips), so the emulated ones have
/// that.
const HOST_MEMORY: u32 = 0;
const PINNED_MEMORY: u32 = 1;
const DEVICE_MEMORY: u32 = 2;
const MEMORY_THROUGH_LINK: u32 = 3;
const FOREIGN_MEMORY: u32 = 4;
const IO_MEMORY: u32 = 6;
/// The process on the device that a mapping is for; the driver maps host memory for this one only.
const FIRST_PROCESS: u32 = 0;
/// Most bytes of one registration.
const MAX_RANGE: u64 = 8 << 40;

/// Host memory that is mapped for a device, or device memory for the CPU.
#[derive(Debug, Clone, Copy)]
pub struct Remote {
    size: u64,
    /// What was left when the mapping was unmapped: the driver stops at the end of the reservation
    /// in which it begins.
    left: bool,
}

impl Process {
    /// Ends the registrations of a device that is closed. Counters stay raised. What the module
    /// manages stays marked as mapped, and the CPU still sees device memory: no command can change
    /// that any more.
    pub fn end_registrations(&mut self, physical: u32) {
        self.registered.retain(|(device, _), _| *device != physical);
        self.through_link.retain(|(device, _), _| *device != physical);
        let remote = std::mem::take(&mut self.remote);
        let kept = |device: u32, start: u64| device != physical || self.is_svm(start);
        self.remote = remote.into_iter().filter(|((device, start), _)| kept(*device, *start)).collect();
    }

    /// Ends what is known of remote mappings in a heap that goes away. The driver forgets what the
    /// CPU sees of a reserve heap, and it stays visible.
    pub fn end_remote(&mut self, world: &mut World, heap: &Heap) {
        let range = heap.start..heap.end();
        self.remote.retain(|(_, start), _| !range.contains(start));
        self.through_link.retain(|(_, start), _| !range.contains(start));
        let views = self.take_parts(range);
        match heap.is_reserve() {
            true => self.orphans.extend(views),
            false => views.into_iter().for_each(|view| self.hide(world, view)),
        }
    }

    /// Takes the parts of device memory in a range that the CPU sees by MEM_REMOTE_MAP.
    pub fn take_parts(&mut self, range: Range<u64>) -> Vec<View> {
        let starts: Vec<u64> = self.parts.range(range).map(|(&start, _)| start).collect();
        starts.iter().filter_map(|start| self.parts.remove(start)).collect()
    }

    /// Whether a part of a range is mapped for a device or, of device memory, for the CPU. Memory
    /// that the module manages is mapped once, other memory once for each device.
    fn is_remote(&self, physical: u32, start: u64, size: u64) -> bool {
        let managed = self.is_svm(start);
        let ranges = self.remote.iter().filter(|((device, _), _)| managed || *device == physical);
        overlaps(ranges.map(|((_, start), remote)| (*start, remote.size)), start, size)
    }

    /// Whether the CPU sees a part of a mapping by MEM_REMOTE_MAP.
    pub fn is_seen_remotely(&self, mapping: &Mapping) -> bool {
        let below = self.remote.iter().filter(|((_, start), _)| *start < mapping.end());
        below.into_iter().any(|((_, start), remote)| start + remote.size > mapping.start)
    }
}

/// Whether one of `ranges` overlaps a range.
fn overlaps(ranges: impl Iterator<Item = (u64, u64)>, start: u64, size: u64) -> bool {
    let end = start.saturating_add(size);
    ranges.into_iter().any(|(other, length)| start < other.saturating_add(length) && other < end)
}

/// Device memory that the CPU shall see, in one block.
struct Part {
    start: u64,
    size: u64,
    block: BlockId,
    /// Offset in the block.
    offset: u64,
    /// The CPU sees the allocation anyway.
    seen: bool,
    /// MEM_SET_ACCESS made it visible to the CPU.
    granted: bool,
}

/// The parts of a range that consists of pages of a device, all of the same size. In a reserve heap
/// a part ends with its mapping or its reservation.
fn parts(heap: &Heap, device: u32, page: u64, address: u64, size: u64) -> Option<Vec<Part>> {
    let end = address + size;
    if !heap.is_reserve() {
        let run = heap.pages(address).filter(|run| run.end() >= end)?;
        let (offset, seen) = (run.offset + (address - run.start), run.view.is_some());
        return Some(vec![Part { start: address, size, block: run.block, offset, seen, granted: false }]);
    }
    let mut parts = Vec::new();
    let mut at = address;
    while at < end {
        let mapping = heap.mapping(at).filter(|found| found.side == svm::SIDE_DEVICE && found.physical == device)?;
        let reserved = heap.reservation(at)?;
        let until = mapping.end().min(reserved.start + reserved.size).min(end);
        parts.push(Part {
            start: at,
            size: until - at,
            block: Some(mapping.block).filter(|_| mapping.page == page)?,
            offset: at - mapping.start,
            seen: false,
            granted: mapping.view.is_some(),
        });
        at = until;
    }
    Some(parts)
}

impl Call<'_, '_> {
    /// TRANSLATE: the address of device memory for a task of the device. The device is asked when
    /// the memory is freed whether a task still uses it; here none does.
    pub(super) fn translate(&mut self, arg: &mut Arg) -> SvmResult {
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
    pub(super) fn register_dma(&mut self, arg: &mut Arg) -> SvmResult {
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
    pub(super) fn pin(&self, address: u64, size: u64) -> SvmResult {
        let page = page_size();
        match self.caller.memory.without_bytes(address, size) {
            Some(Ok(())) => return Ok(()),
            Some(Err(_)) => return refuse(Errno::EFAULT, "the caller's memory cannot be pinned"),
            None => {}
        }
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
    pub(super) fn unregister_dma(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::UnregisterDma = arg.para();
        match self.process.registered.remove(&(self.physical, para.address)) {
            Some(_) => Ok(()),
            None => refuse(Errno::EFAULT, "no registration begins at the address"),
        }
    }

    /// How many kinds of MEM_REMOTE_MAP there are.
    fn remote_kinds(&self) -> u32 {
        Behaviour::of(self.machine.config.generation).remote_kinds
    }

    /// MEM_REMOTE_MAP: maps host memory for a device.
    pub(super) fn remote_map(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::RemoteMap = arg.para();
        self.process.refer(para.src_va, Some(para.size))?;
        if para.map_type >= self.remote_kinds() {
            return refuse(Errno::EINVAL, "no such kind of mapping");
        }
        if para.map_type == FOREIGN_MEMORY {
            return refuse(Errno::EOPNOTSUPP, "memory of other processes of the device is not mapped");
        }
        let physical = self.physical;
        if let Some(heap) = self.process.heap(para.src_va).filter(|_| self.process.is_svm(para.src_va)) {
            let pinned = heap.is_reserve() || heap.kind == svm::HEAP_PINNED_HOST;
            let place = self.process.place(para.src_va)?;
            if let Some(device) = place.device {
                return self.remote_map_device(arg, &mut para, device, place.read_only);
            }
            if place.absent || !pinned {
                return refuse(Errno::EOPNOTSUPP, "memory that is not locked is not mapped for others");
            }
            if para.map_type == MEMORY_THROUGH_LINK && para.size != 0 && para.proc_type == FIRST_PROCESS {
                return self.map_through_link(arg, &mut para);
            }
            if para.map_type != PINNED_MEMORY || para.size == 0 {
                return refuse(Errno::EINVAL, "the kind is not that of the memory, or the size is 0");
            }
        } else {
            if ![HOST_MEMORY, MEMORY_THROUGH_LINK, IO_MEMORY].contains(&para.map_type) {
                return refuse(Errno::EINVAL, "the kind is not that of the memory");
            }
            if para.src_va == 0 || para.src_va % page_size() != 0 || para.size == 0 {
                return refuse(Errno::EINVAL, "the range is empty or does not begin at a page");
            }
            if para.proc_type != FIRST_PROCESS {
                return refuse(Errno::EOPNOTSUPP, "host memory is not mapped for this process of the device");
            }
            return match para.map_type {
                MEMORY_THROUGH_LINK => self.map_through_link(arg, &mut para),
                IO_MEMORY => refuse(Errno::EOPNOTSUPP, "the host's I/O memory is not emulated"),
                _ => refuse(Errno::EOPNOTSUPP, "the device maps host memory through the link"),
            };
        }
        if para.proc_type != FIRST_PROCESS {
            return refuse(Errno::EOPNOTSUPP, "host memory is not mapped for this process of the device");
        }
        if self.process.is_svm(para.src_va) && self.process.heap(para.src_va).is_some_and(|heap| heap.is_reserve()) {
            return refuse(Errno::EOPNOTSUPP, "host memory of a handle is not mapped for a device");
        }
        if self.process.is_remote(physical, para.src_va, para.size) {
            return refuse(Errno::EINVAL, "part of the range is mapped for the device already");
        }
        self.message(physical)?;
        self.process.remote.insert((physical, para.src_va), Remote { size: para.size, left: false });
        self.count(para.src_va, true);
        para.dst_va = para.src_va;
        put(arg, &para);
        Ok(())
    }

    /// MEM_REMOTE_MAP of ordinary or pinned host memory through the link.
    fn map_through_link(&mut self, arg: &mut Arg, para: &mut svm::RemoteMap) -> SvmResult {
        let (physical, address) = (self.physical, para.src_va);
        let Some(size) = para.size.checked_next_multiple_of(page_size()) else {
            return refuse(Errno::EINVAL, "the range is too long");
        };
        let mapped = self.process.through_link.range((physical, 0)..=(physical, u64::MAX));
        if overlaps(mapped.map(|((_, start), size)| (*start, *size)), address, size) {
            return refuse(Errno::EINVAL, "part of the range is mapped for the device already");
        }
        if !self.process.is_svm(address) {
            self.pin(address, size)?;
        }
        self.message(physical)?;
        self.process.through_link.insert((physical, address), size);
        self.count(address, true);
        // The device chooses the address; here it is the host's.
        (para.dst_va, para.size) = (address, size);
        put(arg, para);
        Ok(())
    }

    /// MEM_REMOTE_MAP of device memory: the CPU sees it at its own address, through a BAR.
    fn remote_map_device(
        &mut self,
        arg: &mut Arg,
        para: &mut svm::RemoteMap,
        device: u32,
        read_only: bool,
    ) -> SvmResult {
        let address = para.src_va;
        let Some(heap) = self.process.heap(address).filter(|heap| heap.is_reserve() || heap.is_locked(address)) else {
            return refuse(Errno::EOPNOTSUPP, "only memory that is locked to a device is mapped for the host");
        };
        if para.map_type != DEVICE_MEMORY || para.size == 0 {
            return refuse(Errno::EINVAL, "the kind is not that of the memory, or the size is 0");
        }
        if para.proc_type != FIRST_PROCESS {
            return refuse(Errno::EOPNOTSUPP, "device memory is not mapped for this process of the device");
        }
        let page = heap.mapping(address).map_or(heap.chunk, |mapping| mapping.page);
        let size = para.size.checked_next_multiple_of(page).filter(|size| heap.holds(address, *size));
        let Some(size) = size.filter(|_| self.process.enabled && address % heap.chunk == 0 && !read_only) else {
            return refuse(Errno::EINVAL, "the range is not one of whole writable pages, or there are no segments");
        };
        if self.process.is_remote(device, address, size) {
            return refuse(Errno::EINVAL, "part of the range is mapped already");
        }
        if address % page != 0 {
            let detail = format!(
                "MEM_REMOTE_MAP at {address:#x}, inside a page of {page:#x} bytes: the CPU would see as many bytes \
                 from there on, and so what lies behind the page in the device's memory"
            );
            self.machine.traps.push(Trap { name: "remote-map-inside-page", tgid: self.caller.tgid, detail });
            return Ok(());
        }
        let Some(parts) = self.process.heap(address).and_then(|heap| parts(heap, device, page, address, size)) else {
            return refuse(Errno::EINVAL, "part of the range has no such pages of the device");
        };
        if parts.iter().any(|part| part.granted) || self.process.has_orphan(address, size) {
            self.seen_twice(address);
            return Ok(());
        }
        for part in parts.iter().filter(|part| !part.seen) {
            let view = match self.process.show(self.world, part.block, part.offset, part.start, part.size) {
                Some(Ok(view)) => view,
                shown => {
                    for view in self.process.take_parts(address..address + size) {
                        self.process.hide(self.world, view);
                    }
                    return match shown {
                        Some(Err(Errno::ELOOP)) => self.cannot_show(part.start),
                        _ => refuse(Errno::EINVAL, "the pages could not be mapped into the segment"),
                    };
                }
            };
            if para.access & Behaviour::of(self.machine.config.generation).read_only_access != 0 {
                self.world.store.protect(view.block, view.window);
            }
            self.process.parts.insert(part.start, view);
        }
        self.process.remote.insert((device, address), Remote { size, left: false });
        self.process.hold_mappings(address, para.size, true);
        self.count(address, true);
        (para.dst_va, para.size) = (address, size);
        put(arg, para);
        Ok(())
    }

    /// MEM_REMOTE_MAP or MEM_SET_ACCESS maps device memory for the host where the other one did, or
    /// where the driver forgot to unmap. The kernel panics: a page must not be mapped where one is.
    pub(super) fn seen_twice(&mut self, address: u64) {
        let detail = format!("device memory is mapped for the host at {address:#x}, where the host sees some already");
        self.machine.traps.push(Trap { name: "seen-twice", tgid: self.caller.tgid, detail });
    }

    /// MEM_REMOTE_UNMAP.
    pub(super) fn remote_unmap(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::RemoteUnmap = arg.para();
        let address = para.src_va;
        self.process.refer(address, None)?;
        if para.map_type >= self.remote_kinds() {
            return refuse(Errno::EINVAL, "no such kind of mapping");
        }
        if para.map_type == FOREIGN_MEMORY {
            return refuse(Errno::ENOENT, "no memory of another process of the device is mapped");
        }
        let place = self.process.place(address)?;
        let through = matches!(para.map_type, MEMORY_THROUGH_LINK | IO_MEMORY) && place.device.is_none();
        if !self.process.is_svm(address) || (through && !place.absent) {
            if self.process.through_link.remove(&(self.physical, address)).is_none() {
                return refuse(Errno::ENOENT, "nothing is mapped for the device there");
            }
            self.count(address, false);
            para.dst_va = address;
            put(arg, &para);
            return Ok(());
        }
        let Some(heap) = self.process.heap(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let pinned = heap.is_reserve() || heap.kind == svm::HEAP_PINNED_HOST;
        match place.device {
            Some(_) if heap.is_reserve() || heap.is_locked(address) => {}
            None if pinned && !place.absent && para.map_type <= DEVICE_MEMORY => {}
            None if pinned && !place.absent => return refuse(Errno::ENOENT, "the memory is not mapped in this way"),
            _ => return refuse(Errno::EOPNOTSUPP, "memory that is not locked is not mapped for others"),
        }
        let found = self.process.remote.iter().find(|((_, start), remote)| *start == address && !remote.left);
        let Some(((device, _), remote)) = found.map(|(key, remote)| (*key, *remote)) else {
            return refuse(Errno::EINVAL, "nothing is mapped for the device there");
        };
        let end = heap.reservation(address).map_or(u64::MAX, |found| found.start + found.size);
        let size = remote.size.min(end - address);
        if place.device.is_none() {
            self.message(device)?;
        }
        self.process.remote.remove(&(device, address));
        if size < remote.size {
            let rest = Remote { size: remote.size - size, left: true };
            self.process.remote.insert((device, address + size), rest);
        }
        for view in self.process.take_parts(address..address + size) {
            self.process.hide(self.world, view);
        }
        self.process.hold_mappings(address, size, false);
        self.count(address, false);
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
