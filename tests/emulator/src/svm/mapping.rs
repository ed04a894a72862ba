//! Mappings: MEM_MAP, MEM_UNMAP, access rights and queries.
//!
//! A mapping places the start of a handle at an address inside a reservation. Host memory is then
//! visible to the CPU; device memory is visible to its device, to peers after PREFETCH, and to the
//! CPU through the device's BAR after MEM_SET_ACCESS for the host. A mapping can only be unmapped
//! as a whole.

use super::address_space::is_area;
use super::behaviour::Behaviour;
use super::handle::HandleKind;
use super::heap::owner_of;
use super::session::{Process, View};
use super::{Call, SvmResult, World, page_size, put, refuse, to_physical};
use crate::config::Attachment;
use crate::machine::HOST;
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg, GIANT_PAGE};
use nix::errno::Errno;
use std::collections::BTreeMap;

/// A mapping record (the driver's "vmma").
#[derive(Debug, Clone)]
pub struct Mapping {
    pub start: u64,
    pub size: u64,
    /// Size of its pages.
    pub page: u64,
    pub side: u32,
    pub logical: u32,
    pub physical: u32,
    pub id: i32,
    pub module: u32,
    pub imported: bool,
    /// Device memory imported on the host.
    pub bar: bool,
    /// Host memory imported on a device.
    pub of_host: bool,
    pub block: super::store::BlockId,
    /// The access of the owner itself.
    pub access: u32,
    /// Access granted to others, by logical id.
    pub granted: BTreeMap<u32, u32>,
    /// Where the CPU sees it.
    pub view: Option<View>,
    /// Asynchronous copies that were not refreshed yet, and remote mappings.
    pub readers: u32,
}

impl Mapping {
    pub fn end(&self) -> u64 {
        self.start + self.size
    }
}

impl Process {
    /// Whether a range is exactly a dynamic range that is mapped with mmap(2).
    pub fn is_whole_dynamic(&self, range: &std::ops::Range<u64>) -> bool {
        let size = range.end - range.start;
        self.dynamics.get(&range.start).is_some_and(|it| it.vma.is_some() && it.size == size)
    }

    /// Ends a mapping: hides it from the CPU and updates its handle.
    pub fn end_mapping(&mut self, world: &mut World, mapping: Mapping) {
        if let Some(view) = mapping.view {
            self.hide(world, view);
        }
        let table = match mapping.side {
            svm::SIDE_HOST => Some(&mut self.host),
            _ => self.agents.get_mut(&mapping.physical).map(|agent| &mut agent.handles),
        };
        if let Some(handle) = table.and_then(|table| table.get_mut(mapping.id)) {
            handle.mapped = handle.mapped.saturating_sub(1);
        }
    }
}

impl Call<'_, '_> {
    /// MEM_MAP.
    pub(super) fn mem_map(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemMap = arg.para();
        self.process.refer(para.address, None)?;
        self.check_map(&para)?;
        let logical = self.logical;
        let Some(heap) = self.process.heap_mut(para.address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let range = para.address..para.address + para.size;
        // Dynamic ranges have no owner mark.
        let mut marked = false;
        if para.address < svm::DYNAMIC_START {
            let owner = owner_of(para.side, logical);
            if let Some(reservation) = heap.reservation_mut(para.address) {
                match reservation.owner {
                    None => {
                        reservation.owner = Some(owner);
                        marked = true;
                    }
                    Some(marked) if marked != owner => {
                        return refuse(Errno::EINVAL, "the reservation belongs to another device or side");
                    }
                    Some(_) => {}
                }
            }
        }
        let mapped = match heap.mapping(range.start) {
            Some(_) => Some(range.start),
            None => heap.mappings.range(range.clone()).next().map(|(&start, _)| start),
        };
        let stale = heap.stale.first_in(range.clone());
        if let Some(taken) = [mapped, stale].into_iter().flatten().min() {
            // The driver's rollback does not clear the populate bits of the chunks before.
            heap.stale.insert(range.start..taken);
            self.unmark(para.address, marked);
            return refuse(Errno::EADDRINUSE, "part of the range is mapped already");
        }
        let mapping = self.map(&para).inspect_err(|_| self.unmark(para.address, marked))?;
        if let Some(heap) = self.process.heap_mut(para.address) {
            if let Some(reservation) = heap.reservation_mut(para.address) {
                reservation.counter += 1;
            }
            heap.mappings.insert(mapping.start, mapping);
        }
        Ok(())
    }

    fn unmark(&mut self, address: u64, marked: bool) {
        let heap = self.process.heap_mut(address).filter(|_| marked);
        if let Some(reservation) = heap.and_then(|heap| heap.reservation_mut(address)) {
            reservation.owner = None;
        }
    }

    /// The checks that do not need the handle (`devmm_ioctl_mem_map_para_check`).
    fn check_map(&mut self, para: &svm::MemMap) -> SvmResult {
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        if !heap.is_reserve() {
            return refuse(Errno::EINVAL, "the heap is not a reserve heap");
        }
        if para.size == 0 || para.address % heap.chunk != 0 || para.size % heap.chunk != 0 {
            return refuse(Errno::EINVAL, "the range does not consist of whole chunks");
        }
        if !heap.holds(para.address, para.size) {
            return refuse(Errno::EINVAL, "the range leaves the heap");
        }
        if para.side != svm::SIDE_HOST && para.side != svm::SIDE_DEVICE {
            return refuse(Errno::EINVAL, "no such side");
        }
        if para.page >= svm::PAGES {
            return refuse(Errno::EINVAL, "no such kind of page");
        }
        if para.side == svm::SIDE_HOST && self.physical != HOST {
            return refuse(Errno::EINVAL, "host memory is mapped on device 65");
        }
        let reserved = heap.reservation(para.address).map_or(0, |reservation| reservation.size);
        if para.size > reserved {
            return refuse(Errno::EINVAL, "the range is larger than the reservation");
        }
        if !heap.is_reserved(para.address..para.address + para.size) {
            return refuse(Errno::EINVAL, "part of the range is not reserved");
        }
        Ok(())
    }

    /// The checks of the handle (`devmm_mem_map`), on the host or in the agent, and the mapping
    /// itself.
    fn map(&mut self, para: &svm::MemMap) -> SvmResult<Mapping> {
        let host = para.side == svm::SIDE_HOST;
        let physical = self.physical;
        if !host {
            self.message(physical)?;
        }
        let heap = self.process.heap(para.address);
        let (heap_page, chunk) = heap.map_or((svm::PAGE_NORMAL, 0), |heap| (heap.page(), heap.chunk));
        let Some(handle) = self.table(physical).and_then(|table| table.get(para.id)).cloned() else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        let page = if para.page == svm::PAGE_GIANT { svm::PAGE_GIANT } else { heap_page };
        if !handle.bar && page != handle.page {
            return refuse(Errno::EINVAL, "the handle's pages are not the heap's");
        }
        if para.pages != handle.pages {
            return refuse(Errno::EINVAL, "the handle has another number of pages");
        }
        if para.module != handle.module {
            return refuse(Errno::EINVAL, "the handle belongs to another module");
        }
        if handle.giant && (para.address % GIANT_PAGE != 0 || para.size % GIANT_PAGE != 0) {
            return refuse(Errno::EINVAL, "giant pages need a range of whole GiBs");
        }
        if handle.half_freed {
            return refuse(Errno::EBADRQC, "the handle is partly released");
        }
        if handle.bar && para.size % handle.page_size != 0 {
            return refuse(Errno::EINVAL, "the size is not a multiple of the handle's page size");
        }
        if para.size > handle.left * handle.page_size {
            return refuse(Errno::ENOMEM, "the range is larger than the handle");
        }
        let mut view = None;
        if host {
            view = match self.process.show(self.world, handle.block, 0, para.address, para.size) {
                Some(Err(Errno::ELOOP)) => return self.cannot_show(para.address),
                None => return refuse(Errno::EADDRNOTAVAIL, "the process has not mapped the segment"),
                Some(Err(_)) => return refuse(Errno::ENOMEM, "the pages could not be mapped into the segment"),
                Some(Ok(view)) => Some(view),
            };
        }
        if let Some(handle) = self.table(physical).and_then(|table| table.get_mut(para.id)) {
            handle.mapped += 1;
        }
        Ok(Mapping {
            start: para.address,
            size: para.size,
            page: if page == svm::PAGE_GIANT { GIANT_PAGE } else { chunk },
            side: para.side,
            logical: self.logical,
            physical,
            id: para.id,
            module: para.module,
            imported: handle.kind == HandleKind::Imported,
            bar: handle.bar,
            of_host: handle.of_host,
            block: handle.block,
            access: svm::ACCESS_READ_WRITE,
            granted: BTreeMap::new(),
            view,
            readers: 0,
        })
    }

    /// A limit of the emulator: the client's file can show only one mapping at an offset. A failed
    /// test is better than wrong bytes.
    pub(super) fn cannot_show<T>(&mut self, address: u64) -> SvmResult<T> {
        let detail = format!(
            "{address:#x} and another address where the CPU sees memory lie at the same offset of the file. The \
             real driver supports this, the emulator does not: map dynamic ranges at different file offsets"
        );
        self.machine.traps.push(Trap { name: "emulator-limit-same-offset", tgid: self.caller.tgid, detail });
        refuse(Errno::ENOMEM, "the emulator cannot show two mappings at one offset of the file")
    }

    /// MEM_UNMAP.
    pub(super) fn mem_unmap(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemUnmap = arg.para();
        self.process.refer(para.address, None)?;
        let Some(mapping) = self.process.heap(para.address).and_then(|heap| heap.mapping(para.address)) else {
            return refuse(Errno::EINVAL, "nothing is mapped at the address");
        };
        if mapping.start != para.address {
            return refuse(Errno::EINVAL, "the address is not the start of the mapping");
        }
        if mapping.readers != 0 {
            return refuse(Errno::EBUSY, "an asynchronous copy or a remote mapping uses the mapping");
        }
        let (side, physical, size) = (mapping.side, mapping.physical, mapping.size);
        if side == svm::SIDE_DEVICE {
            self.message(physical)?;
        }
        let heap = self.process.heap_mut(para.address);
        let Some((heap, mut mapping)) = heap.and_then(|heap| {
            let mapping = heap.mappings.remove(&para.address)?;
            Some((heap, mapping))
        }) else {
            return refuse(Errno::EINVAL, "nothing is mapped at the address");
        };
        if let Some(reservation) = heap.reservation_mut(para.address) {
            reservation.counter = reservation.counter.saturating_sub(1);
        }
        let range = para.address..para.address + size;
        // Removing host pages from the segment looks like a munmap of their range.
        if side == svm::SIDE_HOST && is_area(&range) {
            self.process.doomed = true;
        }
        if side == svm::SIDE_HOST
            && self.process.is_whole_dynamic(&range)
            && Behaviour::of(self.machine.config.generation).whole_dynamic_unmap_hangs
        {
            self.whole_dynamic("MEM_UNMAP", para.address);
        }
        if side == svm::SIDE_DEVICE && mapping.granted.get(&HOST).is_none_or(|access| *access == svm::ACCESS_NONE) {
            // The driver finds no granted access to revoke, so the CPU continues to see the memory.
            self.process.orphans.extend(mapping.view.take());
        }
        para.size = size;
        para.side = side;
        para.device = mapping.logical;
        self.process.end_mapping(self.world, mapping);
        put(arg, &para);
        Ok(())
    }

    /// Reports the removal of host pages from a whole mapped dynamic range.
    pub(super) fn whole_dynamic(&mut self, command: &str, address: u64) {
        let detail = format!(
            "{command} of host memory that fills the mapped range at {address:#x}: the driver takes its own unmapping \
             for one by the process and waits for itself for ever"
        );
        self.machine.traps.push(Trap { name: "unmap-of-whole-dynamic-range", tgid: self.caller.tgid, detail });
    }

    /// The mapping that is exactly this range (`devmm_vmma_matched_get`).
    fn exact_mapping(&mut self, address: u64, size: u64) -> SvmResult<&mut Mapping> {
        let found = self.process.heap_mut(address).and_then(|heap| heap.mapping_mut(address));
        match found.filter(|mapping| mapping.start == address && mapping.size == size) {
            Some(mapping) => Ok(mapping),
            None => refuse(Errno::EINVAL, "the range is not exactly one mapping"),
        }
    }

    /// MEM_QUERY_OWNER.
    pub(super) fn query_owner(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemQueryOwner = arg.para();
        let mapping = self.exact_mapping(para.address, para.size)?;
        para.device = mapping.physical;
        para.local = u32::from(!mapping.imported);
        put(arg, &para);
        Ok(())
    }

    /// The physical id of the device that an access command names.
    fn access_target(&mut self, logical: u32) -> SvmResult<u32> {
        let found = to_physical(self.machine, self.caller, None, logical);
        match found.ok().filter(|_| logical < svm::ACCESS_IDS && logical != svm::HOST_AGENT_ID) {
            Some(physical) => Ok(physical),
            None => refuse(Errno::EINVAL, "the caller has no such device"),
        }
    }

    /// MEM_SET_ACCESS.
    pub(super) fn set_access(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemAccess = arg.para();
        let target = self.access_target(para.device)?;
        if !matches!(para.access, svm::ACCESS_NONE | svm::ACCESS_READ | svm::ACCESS_READ_WRITE) {
            return refuse(Errno::EINVAL, "no such access");
        }
        let mapping = self.exact_mapping(para.address, para.size)?;
        if target == mapping.physical {
            mapping.access = para.access;
            return Ok(());
        }
        if mapping.granted.get(&para.device).is_some_and(|access| *access != svm::ACCESS_NONE) {
            return refuse(Errno::EEXIST, "access was set already");
        }
        let (owner, block, seen) = (mapping.physical, mapping.block, mapping.view.is_some());
        let found = self.process.heap(para.address).and_then(|heap| heap.mapping(para.address));
        let remote = owner != HOST && found.is_some_and(|mapping| self.process.is_seen_remotely(mapping));
        let remote = remote || self.process.has_orphan(para.address, para.size);
        if owner == HOST {
            if self.machine.config.attachment != Attachment::Hccs {
                return refuse(Errno::EOPNOTSUPP, "the device cannot reach the host's memory");
            }
            self.message(target)?;
        } else if target == HOST && remote {
            self.seen_twice(para.address);
        } else if target == HOST {
            self.show_on_host(&para, block, seen)?;
        }
        self.exact_mapping(para.address, para.size)?.granted.insert(para.device, para.access);
        Ok(())
    }

    /// Makes device memory visible to the CPU at the same address, writable whatever access was
    /// requested.
    fn show_on_host(&mut self, para: &svm::MemAccess, block: super::store::BlockId, seen: bool) -> SvmResult {
        let page = page_size();
        if para.address % page != 0 || para.size % page != 0 {
            return refuse(Errno::EINVAL, "the range does not consist of whole host pages");
        }
        if seen {
            let detail = format!(
                "MEM_SET_ACCESS for the host at {:#x} after one with access 0: the pages are mapped already, although \
                 the record says that they are not",
                para.address
            );
            self.machine.traps.push(Trap { name: "access-after-access-none", tgid: self.caller.tgid, detail });
            return Ok(());
        }
        let view = match self.process.show(self.world, block, 0, para.address, para.size) {
            Some(Ok(view)) => view,
            Some(Err(Errno::ELOOP)) => return self.cannot_show(para.address),
            _ => return refuse(Errno::EINVAL, "the process has not mapped the segment"),
        };
        self.exact_mapping(para.address, para.size)?.view = Some(view);
        Ok(())
    }

    /// MEM_GET_ACCESS.
    pub(super) fn get_access(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemAccess = arg.para();
        let target = self.access_target(para.device)?;
        let Some(mapping) = self.process.heap(para.address).and_then(|heap| heap.mapping(para.address)) else {
            return refuse(Errno::EINVAL, "nothing is mapped at the address");
        };
        if para.address.checked_add(para.size).is_none_or(|end| end > mapping.end()) {
            return refuse(Errno::EINVAL, "the range leaves the mapping");
        }
        para.size = mapping.size;
        para.access = match target == mapping.physical {
            true => mapping.access,
            false => mapping.granted.get(&para.device).copied().unwrap_or(svm::ACCESS_NONE),
        };
        put(arg, &para);
        Ok(())
    }

    /// RESERVE_ADDR_INFO_QUERY: reports the mapping, not the reservation, that contains an address.
    pub(super) fn reserve_address_info(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::ReserveAddressInfo = arg.para();
        self.process.refer(para.address, None)?;
        let Some(mapping) = self.process.heap(para.address).and_then(|heap| heap.mapping(para.address)) else {
            return refuse(Errno::EINVAL, "nothing is mapped at the address");
        };
        para.start = mapping.start;
        para.end = mapping.end() - 1;
        para.module = mapping.module;
        para.device = mapping.logical;
        put(arg, &para);
        Ok(())
    }
}
