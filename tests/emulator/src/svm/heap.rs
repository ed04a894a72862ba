//! Addresses: heaps, and the reservations in them.
//!
//! A heap is a range of whole GiBs. Its kind decides its chunk size: 2 MiB, or the host's page. A
//! reservation is a run of chunks. It has one counter: 1 when idle, raised by mappings and
//! asynchronous copies. It also has an *owner mark*: the device (or host) that was mapped into it
//! first, until the reservation is freed. The driver keeps a word per chunk; clients can only
//! observe it per reservation, except for the populate bits that a refused map leaves set.

use super::mapping::Mapping;
use super::named::Opened;
use super::plain::Pages;
use super::ranges::Ranges;
use super::session::{Dynamic, Process, host_pin_start};
use super::{Call, SvmResult, World, page_size, refuse};
use crate::machine::{HOST, Machine};
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg, HEAP_UNIT};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::ops::Range;

/// Chunks of a heap for which the kernel finds no memory. It keeps a word of 4 bytes and more for
/// each: 128 TiB in huge chunks were seen to be granted, 32 TiB in chunks of 4 KiB were not. What
/// is in between depends on the host's memory.
const WORDS: u64 = (32 << 40) / 4096;

/// A run of chunks that ALLOC reserved.
#[derive(Debug, Clone)]
pub struct Reservation {
    pub start: u64,
    pub size: u64,
    pub counter: u64,
    /// The owner mark: the logical device that was mapped here first, or 65. Outside of reserve
    /// heaps, the device that the memory is locked to.
    pub owner: Option<u32>,
    /// ADVISE made it read-only.
    pub read_only: bool,
    /// ADVISE or PREFETCH put pages behind it.
    pub populated: bool,
}

/// An enabled heap.
#[derive(Debug)]
pub struct Heap {
    pub start: u64,
    pub size: u64,
    pub kind: u32,
    pub sub_kind: u32,
    /// Granularity of reservations.
    pub chunk: u64,
    pub reservations: BTreeMap<u64, Reservation>,
    pub mappings: BTreeMap<u64, Mapping>,
    /// Chunks whose populate bit was left set by a map that failed with EADDRINUSE at a later
    /// chunk.
    pub stale: Ranges,
    /// Pages of heaps that are not reserve heaps.
    pub plain: BTreeMap<u64, Pages>,
    /// Allocations behind which memory of another process was opened by name.
    pub opened: BTreeMap<u64, Opened>,
}

impl Heap {
    pub fn end(&self) -> u64 {
        self.start + self.size
    }

    pub fn is_reserve(&self) -> bool {
        self.sub_kind == svm::SUB_RESERVE
    }

    /// The page kind that a handle must have to be mapped here.
    pub fn page(&self) -> u32 {
        if self.kind == svm::HEAP_HUGE { svm::PAGE_HUGE } else { svm::PAGE_NORMAL }
    }

    /// The reservation that an address lies in.
    pub fn reservation(&self, address: u64) -> Option<&Reservation> {
        let (_, found) = self.reservations.range(..=address).next_back()?;
        (address < found.start + found.size).then_some(found)
    }

    pub fn reservation_mut(&mut self, address: u64) -> Option<&mut Reservation> {
        let (_, found) = self.reservations.range_mut(..=address).next_back()?;
        (address < found.start + found.size).then_some(found)
    }

    /// The mapping that an address lies in.
    pub fn mapping(&self, address: u64) -> Option<&Mapping> {
        let (_, found) = self.mappings.range(..=address).next_back()?;
        (address < found.end()).then_some(found)
    }

    pub fn mapping_mut(&mut self, address: u64) -> Option<&mut Mapping> {
        let (_, found) = self.mappings.range_mut(..=address).next_back()?;
        (address < found.end()).then_some(found)
    }

    /// Whether every chunk of a range is reserved.
    pub fn is_reserved(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        while at < range.end {
            match self.reservation(at) {
                Some(found) => at = found.start + found.size,
                None => return false,
            }
        }
        true
    }

    /// The chunks that a range touches.
    pub fn chunks(&self, address: u64, size: u64) -> Range<u64> {
        let first = self.start + (address - self.start) / self.chunk * self.chunk;
        first..address.saturating_add(size).next_multiple_of(self.chunk)
    }

    /// The driver's check that a range lies in the heap (`devmm_check_va_add_size_by_heap`).
    pub fn holds(&self, address: u64, size: u64) -> bool {
        if size > self.size {
            return false;
        }
        let chunks = self.chunks(address, size);
        !chunks.is_empty() && chunks.end <= self.end()
    }

    /// The driver's walk over the mappings of a range (`devmm_vmmas_occupy_inc`). It advances by
    /// whole mappings, so it does not check the end of a range that begins inside a mapping.
    /// Returns the starts of the mappings that it found, or `None` at a hole.
    pub fn walk(&self, address: u64, size: u64) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        let mut done = 0;
        while done < size {
            let mapping = self.mapping(address + done)?;
            found.push(mapping.start);
            done += mapping.size;
        }
        Some(found)
    }
}

impl Process {
    /// The heap that an address lies in.
    pub fn heap(&self, address: u64) -> Option<&Heap> {
        let (_, heap) = self.heaps.range(..=address).next_back()?;
        (address < heap.end()).then_some(heap)
    }

    pub fn heap_mut(&mut self, address: u64) -> Option<&mut Heap> {
        let (_, heap) = self.heaps.range_mut(..=address).next_back()?;
        (address < heap.end()).then_some(heap)
    }

    /// The driver's step before a command that uses an address (`devmm_set_page_ref_before_ioctl`):
    /// it raises the counter of the reservation, and with a known size it pins the mappings of the
    /// range. The model runs one command at a time, so only the checks remain. Returns false if the
    /// module does not manage the address.
    pub fn refer(&self, address: u64, size: Option<u64>) -> SvmResult<bool> {
        if self.is_host_pin(address) {
            let below = self.pinned.range(..=address).next_back();
            return match below.is_some_and(|(&start, &size)| address < start + size) {
                true => Ok(true),
                false => refuse(Errno::EINVAL, "nothing was allocated at the address"),
            };
        }
        if !self.is_svm(address) {
            return Ok(false);
        }
        let Some(heap) = self.heap(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        if heap.reservation(address).is_none() {
            return refuse(Errno::EINVAL, "the address lies in no reservation");
        }
        if let Some(size) = size.filter(|_| heap.is_reserve()) {
            if heap.walk(address, size).is_none() {
                return refuse(Errno::EINVAL, "part of the range is not mapped");
            }
        }
        Ok(true)
    }

    /// The same step for ADVISE and PREFETCH: unless device memory is mapped at the address, the
    /// reservation must be idle.
    pub fn refer_idle(&self, address: u64, size: u64) -> SvmResult {
        self.refer(address, None)?;
        let Some((heap, reservation)) = self.heap(address).and_then(|heap| Some((heap, heap.reservation(address)?)))
        else {
            return Ok(());
        };
        let mapped = heap.mapping(address).is_some_and(|mapping| mapping.side == svm::SIDE_DEVICE);
        // Managed and read-only memory must be idle in any case.
        let populated = matches!(heap.sub_kind, svm::SUB_DEVICE | svm::SUB_DVPP)
            && heap.pages(address).is_some_and(|run| !run.is_host());
        if mapped || populated {
            return self.refer(address, Some(size)).map(drop);
        }
        if reservation.counter != 1 {
            return refuse(Errno::EBUSY, "the reservation is in use");
        }
        Ok(())
    }

    /// Ends all mappings and pages of a heap that goes away.
    pub fn end_heap(&mut self, world: &mut World, mut heap: Heap) {
        self.end_remote(world, &heap);
        self.end_pages(world, &mut heap);
        for mapping in heap.mappings.into_values() {
            self.end_mapping(world, mapping);
        }
    }
}

impl Call<'_, '_> {
    /// UPDATE_HEAP.
    pub(super) fn update_heap(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::UpdateHeap = arg.para();
        let enable = para.operation == svm::HEAP_ENABLE;
        if enable && para.sub_kind == svm::SUB_HOST && !self.process.enabled {
            return refuse(Errno::EINVAL, "host heaps need the segments to be mapped");
        }
        let of_agent = para.kind == svm::HEAP_CHUNK && para.sub_kind == svm::SUB_DEVICE;
        if self.logical == svm::HOST_AGENT_ID && !of_agent {
            return refuse(Errno::EINVAL, "the host agent has no such heap");
        }
        if para.size == 0 || para.size % HEAP_UNIT != 0 {
            return refuse(Errno::EINVAL, "the size is not a multiple of 1 GiB");
        }
        let units = para.size / HEAP_UNIT;
        let index = u64::from(para.index);
        if index >= u64::from(svm::HEAPS) || index + units > u64::from(svm::HEAPS) {
            return refuse(Errno::EINVAL, "the heap lies beyond the address space");
        }
        let is_static = para.index < svm::STATIC_HEAPS;
        if is_static && index + units > u64::from(svm::STATIC_HEAPS) {
            return refuse(Errno::EINVAL, "the heap leaves the static range");
        }
        if is_static && para.size > svm::HEAP_PAGES * page_size() {
            return refuse(Errno::EINVAL, "the heap has too many pages");
        }
        let start = svm::SVM_START + index * HEAP_UNIT;
        if para.operation == svm::HEAP_DISABLE {
            return self.disable_heap(start, para.size);
        }
        if !(svm::HEAP_PINNED_HOST..=svm::HEAP_CHUNK).contains(&para.kind) {
            return refuse(Errno::EINVAL, "no such kind of heap");
        }
        if para.sub_kind >= self.machine.config.generation.delta().sub_kinds || !enable {
            return refuse(Errno::EINVAL, "no such sub kind of heap, or no such operation");
        }
        let end = start + para.size;
        if self.process.heaps.range(..end).next_back().is_some_and(|(_, heap)| heap.end() > start) {
            return refuse(Errno::EINVAL, "the range overlaps another heap");
        }
        self.check_heap_size(&para, is_static)?;
        if !is_static {
            self.claim_dynamic(start, para.size)?;
        }
        let chunk = if para.kind == svm::HEAP_CHUNK { page_size() } else { svm::HUGE_PAGE };
        if para.size / chunk >= WORDS {
            return refuse(Errno::ENOMEM, "the kernel has no room for a word for each chunk");
        }
        let heap = Heap {
            start,
            size: para.size,
            kind: para.kind,
            sub_kind: para.sub_kind,
            chunk,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            stale: Ranges::default(),
            plain: BTreeMap::new(),
            opened: BTreeMap::new(),
        };
        self.process.heaps.insert(start, heap);
        Ok(())
    }

    fn check_heap_size(&mut self, para: &svm::UpdateHeap, is_static: bool) -> SvmResult {
        let gib = para.size / HEAP_UNIT;
        let good = match para.sub_kind {
            svm::SUB_SVM => gib <= 128,
            svm::SUB_RESERVE => gib <= if is_static { 128 } else { 128 << 10 },
            svm::SUB_DVPP => gib == 4 || gib == 16,
            svm::SUB_READ_ONLY => gib == 4,
            svm::SUB_DEVICE_READ_ONLY => gib == 8,
            svm::SUB_HOST => para.size <= self.machine.config.host_memory.next_multiple_of(HEAP_UNIT),
            svm::SUB_DEVICE => {
                let logical = self.logical;
                if logical == svm::HOST_AGENT_ID {
                    let memory = self.machine.config.host_memory;
                    let fits = para.size <= memory;
                    return if fits { Ok(()) } else { refuse(Errno::EINVAL, "the host has less memory") };
                }
                let physical = super::to_physical(self.machine, self.caller, Some(self.process), logical)?;
                if !self.process.agents.contains_key(&physical) {
                    return refuse(Errno::ESRCH, "the device is not set up");
                }
                para.size <= self.machine.config.hbm.next_multiple_of(HEAP_UNIT)
            }
            _ => false,
        };
        if good { Ok(()) } else { refuse(Errno::EINVAL, "a heap of this sub kind cannot have this size") }
    }

    /// A heap beyond the static range must cover a recorded mapping exactly, or none at all.
    fn claim_dynamic(&mut self, start: u64, size: u64) -> SvmResult {
        let below = self.process.dynamics.range(..start + size).next_back();
        match below.filter(|(found, dynamic)| **found + dynamic.size > start) {
            None => {
                self.process.dynamics.insert(start, Dynamic { size, vma: None });
                Ok(())
            }
            Some((&found, dynamic)) if found == start && dynamic.size == size => Ok(()),
            Some(_) => refuse(Errno::EINVAL, "the heap is not exactly the mapped range"),
        }
    }

    /// Disabling checks only address and size: a wrong kind disables the heap too.
    fn disable_heap(&mut self, start: u64, size: u64) -> SvmResult {
        if self.process.heaps.get(&start).is_none_or(|heap| heap.size != size) {
            return refuse(Errno::EINVAL, "there is no such heap");
        }
        let filled = self.process.heap(start).and_then(|heap| heap.mapping(start));
        let whole = filled.is_some_and(|it| it.side == svm::SIDE_HOST && it.size == size);
        if whole && self.process.is_whole_dynamic(&(start..start + size)) {
            self.whole_dynamic("UPDATE_HEAP (disable)", start);
        }
        self.process.free_pages_of(self.world, start, start..start + size);
        if let Some(heap) = self.process.heaps.remove(&start) {
            self.process.end_heap(self.world, heap);
        }
        if self.process.dynamics.get(&start).is_some_and(|dynamic| dynamic.vma.is_none()) {
            self.process.dynamics.remove(&start);
        }
        Ok(())
    }

    /// ALLOC: reserves the chunks that the range touches.
    pub(super) fn alloc(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::Alloc = arg.para();
        let address = para.address;
        if !self.process.is_svm(address) {
            return self.alloc_elsewhere(address, para.size);
        }
        let Some(heap) = self.process.heap_mut(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        if heap.reservation(address).is_some() {
            return refuse(Errno::EBUSY, "the chunk belongs to a reservation");
        }
        if !heap.holds(address, para.size) {
            return refuse(Errno::EADDRNOTAVAIL, "the range is empty or leaves the heap");
        }
        let chunks = heap.chunks(address, para.size);
        if heap.reservations.range(chunks.clone()).next().is_some() {
            return refuse(Errno::EINVAL, "a later chunk belongs to a reservation");
        }
        let size = chunks.end - chunks.start;
        let reservation =
            Reservation { start: chunks.start, size, counter: 1, owner: None, read_only: false, populated: false };
        heap.reservations.insert(chunks.start, reservation);
        Ok(())
    }

    /// ALLOC in the other segments.
    fn alloc_elsewhere(&mut self, address: u64, size: u64) -> SvmResult {
        match segment_of(self.machine, address) {
            // Allocations there belong to SOMA pools, which the model does not have.
            Some(Elsewhere::Soma) => Ok(()),
            Some(Elsewhere::HostPin) if self.process.host_pin => {
                self.process.pinned.insert(address, size);
                Ok(())
            }
            _ => refuse(Errno::EADDRNOTAVAIL, "the module does not manage the address"),
        }
    }

    /// FREE_PAGES: frees the reservation that starts at the address.
    pub(super) fn free_pages(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::FreePages = arg.para();
        let address = para.address;
        if !self.process.is_svm(address) {
            return match segment_of(self.machine, address) {
                // The message goes to a device; without one the driver finds no channel for it.
                Some(Elsewhere::Soma) if self.process.agents.is_empty() => refuse(Errno::EINVAL, "no device is set up"),
                Some(Elsewhere::Soma) => Ok(()),
                Some(Elsewhere::HostPin) if self.process.pinned.remove(&address).is_some() => Ok(()),
                Some(_) => refuse(Errno::EINVAL, "nothing was allocated at the address"),
                None => refuse(Errno::EADDRNOTAVAIL, "the module does not manage the address"),
            };
        }
        let Some(heap) = self.process.heap_mut(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let Some(reservation) = heap.reservation(address) else {
            return refuse(Errno::EINVAL, "the address lies in no reservation");
        };
        if reservation.counter != 1 {
            return refuse(Errno::EBUSY, "the reservation is in use");
        }
        if address % heap.chunk != 0 {
            return refuse(Errno::EADDRNOTAVAIL, "the address is not the start of a chunk");
        }
        if reservation.start != address {
            return refuse(Errno::EINVAL, "the address is not the start of the reservation");
        }
        let range = reservation.start..reservation.start + reservation.size;
        heap.reservations.remove(&address);
        heap.stale.remove(range.clone());
        heap.opened.remove(&address);
        if !heap.is_reserve() {
            let start = heap.start;
            self.world.names.pages_freed(self.process.tgid, range.clone());
            self.process.free_pages_of(self.world, start, range);
            return Ok(());
        }
        let spans = heap.mapping(range.start).is_some() || heap.mappings.range(range.clone()).next().is_some();
        if spans {
            let detail = format!(
                "FREE_PAGES of the reservation at {address:#x}, into which a mapping of the reservation before it \
                 reaches: the kernel would free pages that their handle still owns"
            );
            self.machine.traps.push(Trap { name: "free-under-spanning-map", tgid: self.caller.tgid, detail });
        }
        Ok(())
    }
}

/// A segment outside the SVM range.
pub enum Elsewhere {
    Soma,
    Uvm,
    HostPin,
}

/// The segment outside the SVM range that an address lies in, if the generation has it.
pub fn segment_of(machine: &Machine, address: u64) -> Option<Elsewhere> {
    let delta = machine.config.generation.delta();
    let has = |start: u64, size: u64| (start..start + size).contains(&address);
    let declared = |start: u64| delta.segments.iter().any(|segment| segment.start == start);
    if declared(svm::SOMA_START) && has(svm::SOMA_START, svm::SOMA_SIZE) {
        Some(Elsewhere::Soma)
    } else if declared(svm::UVM_START) && has(svm::UVM_START, svm::UVM_SIZE) {
        Some(Elsewhere::Uvm)
    } else if delta.host_pin && has(host_pin_start(machine), svm::HOST_PIN_SIZE) {
        Some(Elsewhere::HostPin)
    } else {
        None
    }
}

/// The owner mark that a map on this side sets: the logical device, or the host.
pub fn owner_of(side: u32, logical: u32) -> u32 {
    if side == svm::SIDE_HOST { HOST } else { logical }
}
