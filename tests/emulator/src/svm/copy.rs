//! Copies and fills: MEMCPY, MEMCPY2D, MEMCPY_BATCH, ASYNC_MEMCPY with its refresh, MEMSET8.
//!
//! An address belongs to the host (pageable memory, or a host mapping) or to a device. The driver
//! copies between host and device and between devices. For copies from host to host and fills of
//! host memory it returns success and leaves the work to the caller. It checks ranges by a walk
//! over whole mappings, which misses the end of a range that begins inside a mapping: the mapped
//! part is then written before the copy fails.

use super::behaviour::Behaviour;
use super::heap::{self, Elsewhere};
use super::pause::{Holds, Until};
use super::session::Process;
use super::store::BlockId;
use super::{Call, SvmResult, agent, put, refuse};
use crate::caller::BadAddress;
use crate::machine::HOST;
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg};
use nix::errno::Errno;
use std::collections::BTreeMap;

/// Task ids wrap around here.
const TASK_IDS: i32 = 65535;

/// An asynchronous copy that was not refreshed.
#[derive(Debug)]
pub struct Task {
    source: u64,
    destination: u64,
    size: u64,
    /// What the refresh releases of both sides.
    released: u64,
    failed: bool,
    /// The part that was not copied yet.
    rest: Option<Rest>,
}

/// The bytes of an asynchronous copy that are moved later.
#[derive(Debug, Clone, Copy)]
struct Rest {
    plan: Plan,
    moved: u64,
    until: Until,
}

/// The asynchronous copies of a session.
#[derive(Debug, Default)]
pub struct Tasks {
    next: i32,
    tasks: BTreeMap<i32, Task>,
}

impl Tasks {
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether a copy of a device still runs.
    pub(super) fn is_running(&self, holds: &Holds, device: u32) -> bool {
        let mut rests = self.tasks.values().filter_map(|task| task.rest);
        rests.any(|rest| rest.plan.device == device && holds.wait(rest.until).is_err())
    }

    fn take_id(&mut self) -> i32 {
        loop {
            let id = self.next;
            self.next = (id + 1) % TASK_IDS;
            if !self.tasks.contains_key(&id) {
                return id;
            }
        }
    }
}

/// Which command makes the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Sync,
    Async,
    /// With the device of the earlier elements.
    Batch(Option<u32>),
}

/// What is at an address.
#[derive(Debug, Clone, Copy)]
pub struct Location {
    /// `None` is the host.
    pub device: Option<u32>,
    imported: bool,
    /// Memory of another process, opened by name.
    named: bool,
    /// The driver does not copy it.
    pub read_only: bool,
    /// The module manages the address, but there are no pages.
    pub absent: bool,
    /// Device memory that the host accesses through a BAR.
    bar: bool,
    /// Host memory that a device imported. There is no DMA device for it
    /// (`devmm_get_dma_copy_devid` takes the exporting side's id).
    of_host: bool,
}

/// Pageable memory of the caller.
const PAGEABLE: Location = Location {
    device: None,
    imported: false,
    named: false,
    read_only: false,
    absent: false,
    bar: false,
    of_host: false,
};

/// A copy that passed the checks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub direction: u32,
    /// The device whose DMA engine copies.
    device: u32,
}

impl Process {
    /// What is at an address (`devmm_get_memory_attributes`).
    pub fn place(&self, address: u64) -> SvmResult<Location> {
        if !self.is_svm(address) {
            return Ok(PAGEABLE);
        }
        let Some(heap) = self.heap(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let Some(mapping) = heap.mapping(address) else {
            if heap.is_reserve() {
                return refuse(Errno::EADDRNOTAVAIL, "nothing is mapped at the address");
            }
            let read_only = heap.sub_kind != svm::SUB_DEVICE_READ_ONLY
                && heap.reservation(address).is_some_and(|found| found.read_only);
            let place = Location { read_only, ..PAGEABLE };
            return Ok(match heap.pages(address) {
                Some(run) => Location { device: (!run.is_host()).then_some(run.physical), named: run.named, ..place },
                None => Location { absent: true, ..place },
            });
        };
        let device = (mapping.side == svm::SIDE_DEVICE).then_some(mapping.physical);
        Ok(Location { device, imported: mapping.imported, bar: mapping.bar, of_host: mapping.of_host, ..PAGEABLE })
    }

    /// Whether a range lies in its heap. True for addresses that the module does not manage.
    fn in_heap(&self, address: u64, size: u64) -> bool {
        !self.is_svm(address) || self.heap(address).is_some_and(|heap| heap.holds(address, size))
    }

    /// Whether a range covers memory of several devices, or both own and imported memory
    /// (`devmm_va_is_multi_dev_map`).
    fn is_mixed(&self, address: u64, size: u64) -> bool {
        let Some(heap) = self.heap(address).filter(|heap| self.is_svm(address) && heap.is_reserve()) else {
            return false;
        };
        let mut first = None;
        let mut at = address;
        while at < address + size {
            let Some(mapping) = heap.mapping(at) else { return false };
            let kind = (mapping.physical, mapping.imported);
            if *first.get_or_insert(kind) != kind {
                return true;
            }
            at = mapping.end();
        }
        false
    }

    /// Whether a range covers imports whose exporters are different devices, or a device and the
    /// host. The driver does not check that: it takes the first one's DMA engine for all
    /// (`devmm_get_dma_copy_devid`).
    fn has_two_exporters(&self, address: u64, size: u64) -> bool {
        let Some(heap) = self.heap(address).filter(|heap| self.is_svm(address) && heap.is_reserve()) else {
            return false;
        };
        let mut first = None;
        let mut at = address;
        while at < address + size {
            let Some(mapping) = heap.mapping(at).filter(|mapping| mapping.imported) else { return false };
            let exporter = self.nodes.get(&(mapping.physical, mapping.id)).map(|node| node.physical);
            if *first.get_or_insert(exporter) != exporter {
                return true;
            }
            at = mapping.end();
        }
        false
    }

    /// The memory at an address: the block, the offset in it, and how many of `size` bytes lie in
    /// the same mapping.
    pub fn resolve(&self, address: u64, size: u64) -> Option<(BlockId, u64, u64)> {
        let heap = self.heap(address)?;
        if let Some(run) = heap.pages(address) {
            return Some((run.block, run.offset + (address - run.start), size.min(run.end() - address)));
        }
        let mapping = heap.mapping(address)?;
        Some((mapping.block, address - mapping.start, size.min(mapping.end() - address)))
    }

    /// The device memory of a range: blocks, with the offset and the size of the part. `None` if
    /// there is a hole or host memory.
    pub fn pieces(&self, address: u64, size: u64) -> Option<Vec<(BlockId, u64, u64)>> {
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < size {
            self.place(address + done).ok().filter(|place| place.device.is_some() && !place.named)?;
            let (block, offset, run) = self.resolve(address + done, size - done)?;
            pieces.push((block, offset, run));
            done += run;
        }
        Some(pieces)
    }

    /// Pins or unpins the mappings of a range: a pinned one cannot be unmapped.
    pub fn hold_mappings(&mut self, address: u64, size: u64, hold: bool) {
        let Some(heap) = self.heap_mut(address) else { return };
        for start in heap.walk(address, size).unwrap_or_default() {
            if let Some(mapping) = heap.mappings.get_mut(&start) {
                mapping.readers = if hold { mapping.readers + 1 } else { mapping.readers.saturating_sub(1) };
            }
        }
    }

    /// Raises or lowers the counters of what an asynchronous copy uses.
    fn hold(&mut self, address: u64, size: u64, hold: bool) {
        if !self.is_svm(address) {
            return;
        }
        let Some(heap) = self.heap_mut(address) else { return };
        let step = |count: u64| if hold { count + 1 } else { count.saturating_sub(1) };
        // The mappings may be gone, with their heap or their device.
        for start in heap.walk(address, size).unwrap_or_default() {
            if let Some(mapping) = heap.mappings.get_mut(&start) {
                mapping.readers = step(u64::from(mapping.readers)) as u32;
            }
        }
        if let Some(reservation) = heap.reservation_mut(address) {
            reservation.counter = step(reservation.counter);
        }
    }
}

impl Call<'_, '_> {
    /// MEMCPY.
    pub(super) fn memcpy(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::Memcpy = arg.para();
        self.process.refer(para.destination, Some(para.size))?;
        self.process.refer(para.source, Some(para.size))?;
        if para.device_local != 0 {
            if para.direction != svm::COPY_DEVICE_TO_HOST {
                return refuse(Errno::EOPNOTSUPP, "device-local addresses can only be read");
            }
            // A source that the module does not manage is then an address of the device itself.
            if !self.process.is_svm(para.source) {
                return match self.logical < svm::DEVICE_IDS {
                    true => refuse(Errno::EOPNOTSUPP, "the device cannot copy from its own addresses"),
                    false => refuse(Errno::EINVAL, "there are no device ids this large"),
                };
            }
        }
        let plan = self.plan(para.destination, para.source, para.size, para.direction, Mode::Sync)?;
        self.carry(plan, para.destination, para.source, para.size)?;
        para.direction = plan.direction;
        put(arg, &para);
        Ok(())
    }

    /// A copy by a task of a stream.
    pub(super) fn stream_copy(&mut self, destination: u64, source: u64, size: u64) -> SvmResult {
        let plan = self.plan(destination, source, size, svm::COPY_DETECT, Mode::Sync)?;
        self.carry(plan, destination, source, size)
    }

    /// The checks of a copy before the transfer (`devmm_memcpy_proc`).
    pub(super) fn plan(
        &mut self,
        destination: u64,
        source: u64,
        size: u64,
        direction: u32,
        mode: Mode,
    ) -> SvmResult<Plan> {
        for address in [source, destination] {
            // Pools are not modelled, so there is never memory in their segment.
            if matches!(heap::segment_of(self.machine, address), Some(Elsewhere::Soma)) {
                return refuse(Errno::EINVAL, "the address has no memory");
            }
        }
        let from = self.process.place(source)?;
        let to = self.process.place(destination)?;
        if size == 0 || from.absent {
            return refuse(Errno::EINVAL, "there is nothing to copy");
        }
        if from.read_only || to.read_only {
            return refuse(Errno::EINVAL, "read-only memory is not copied");
        }
        if !self.process.in_heap(source, size) || !self.process.in_heap(destination, size) {
            return refuse(Errno::EINVAL, "the range leaves its heap");
        }
        if self.process.is_mixed(source, size) || self.process.is_mixed(destination, size) {
            return refuse(Errno::EINVAL, "the range covers memory of several owners");
        }
        if to.absent {
            self.add_written_pages(destination, size)?;
        }
        let (real, device) = match (from.device, to.device) {
            (None, None) => (svm::COPY_HOST_TO_HOST, HOST),
            (None, Some(device)) => (svm::COPY_HOST_TO_DEVICE, device),
            (Some(device), None) => (svm::COPY_DEVICE_TO_HOST, device),
            (Some(device), Some(_)) => (svm::COPY_DEVICE_TO_DEVICE, device),
        };
        if direction < svm::COPY_DETECT && direction != real {
            return refuse(Errno::EINVAL, "the addresses have another direction");
        }
        let one_way = matches!(real, svm::COPY_HOST_TO_DEVICE | svm::COPY_DEVICE_TO_HOST);
        if mode != Mode::Sync && !one_way {
            return refuse(Errno::EINVAL, "only copies between host and device can be done this way");
        }
        if mode == Mode::Async && !self.process.agents.get(&device).is_some_and(|agent| agent.allows_async) {
            return refuse(Errno::ENONET, "the device is closing");
        }
        if let Mode::Batch(before) = mode {
            let of_others = |place: Location| place.device.is_some() && (place.imported || place.named);
            if of_others(to) || of_others(from) {
                return refuse(Errno::EOPNOTSUPP, "imported memory cannot be copied in a batch");
            }
            if before.is_some_and(|before| before != device) {
                return refuse(Errno::EINVAL, "a batch is for one device");
            }
        }
        if one_way && (from.of_host || to.of_host) {
            // The driver looks for a DMA device, takes a reference and finds none
            // (`devmm_pa_node_list_dma_map`).
            self.world.leaked += 1;
            return refuse(Errno::EINVAL, "there is no DMA device for host memory that a device imported");
        }
        if real == svm::COPY_DEVICE_TO_DEVICE && (from.of_host || to.of_host) {
            return refuse(Errno::EOPNOTSUPP, "host memory that a device imported is not copied between devices");
        }
        if one_way && (from.bar || to.bar) {
            return refuse(Errno::EOPNOTSUPP, "device memory that the host imported is not copied by the device");
        }
        if real == svm::COPY_DEVICE_TO_DEVICE && from.device == to.device && (from.imported || to.imported) {
            return refuse(Errno::EOPNOTSUPP, "imported memory is not copied within one device");
        }
        if real != svm::COPY_HOST_TO_HOST {
            for address in [source, destination] {
                if self.process.has_two_exporters(address, size) {
                    self.wrong_engine(address, size);
                }
            }
        }
        if real != svm::COPY_HOST_TO_HOST && mode != Mode::Async {
            self.transfer(device)?;
            if let Some(other) = to.device.filter(|other| *other != device) {
                self.transfer(other)?;
            }
        }
        Ok(Plan { direction: real, device })
    }

    fn wrong_engine(&mut self, address: u64, size: u64) {
        let detail = format!(
            "one copy of {size:#x} bytes at {address:#x} covers imports of different exporters: the DMA engine of the \
             first one would have used addresses of another device"
        );
        self.machine.traps.push(Trap { name: "copy-of-two-exporters", tgid: self.caller.tgid, detail });
    }

    /// Copies the bytes in pieces, as the driver does. Pieces before a failing one stay copied.
    pub(super) fn carry(&mut self, plan: Plan, destination: u64, source: u64, size: u64) -> SvmResult {
        if plan.direction == svm::COPY_HOST_TO_HOST {
            return Ok(());
        }
        let piece = part_of(size);
        self.pace.begin(size, &[(destination, size), (source, size)]);
        let mut done = 0;
        while done < size {
            let (from, to) = (source + done, destination + done);
            let mut length = size - done;
            let source = self.reach(from, &mut length)?;
            let destination = self.reach(to, &mut length)?;
            if !self.pace.step(&mut length)? {
                done += length;
                continue;
            }
            let (store, memory) = (&self.world.store, self.caller.memory);
            match (source, destination) {
                (Some((block, offset)), Some((other, start))) => {
                    store.read_with(block, offset, length, |at, bytes| -> SvmResult {
                        store.write_with(other, start + at, bytes.len() as u64, |part, room| -> SvmResult {
                            let bytes = &bytes[part as usize..][..room.len()];
                            // SAFETY: both are as long as the room. They may overlap, if the block
                            // is mapped twice.
                            unsafe { bytes.as_ptr().copy_to(room.as_mut_ptr(), room.len()) };
                            Ok(())
                        })
                    })?;
                }
                (Some((block, offset)), None) => match memory.without_bytes(to, length) {
                    Some(checked) => checked.or_else(unpinned)?,
                    None => store
                        .read_with(block, offset, length, |at, bytes| memory.write(to + at, bytes).or_else(unpinned))?,
                },
                (None, Some((block, offset))) => {
                    // The driver pins a whole piece before it copies a byte of it. Only its end is
                    // checked here: before a hole in the middle, bytes are copied.
                    let ends = (1..=length.div_ceil(piece)).map(|count| length.min(count * piece));
                    let good = ends.take_while(|end| memory.read(from + end - 1, &mut [0]).is_ok()).last().unwrap_or(0);
                    match memory.without_bytes(from, good) {
                        Some(checked) => checked.or_else(unpinned)?,
                        None => store.write_with(block, offset, good, |at, bytes| {
                            memory.read(from + at, bytes).or_else(unpinned)
                        })?,
                    }
                    if good < length {
                        unpinned(BadAddress)?;
                    }
                }
                (None, None) => {}
            }
            done += length;
        }
        Ok(())
    }

    /// The block and offset of an address; `None` for the caller's own memory. Limits `length` to
    /// what lies in one mapping.
    fn reach(&self, address: u64, length: &mut u64) -> SvmResult<Option<(BlockId, u64)>> {
        if !self.process.is_svm(address) {
            // The pages of a device mapping cannot be pinned, and addresses do not wrap.
            let wraps = address.checked_add(*length).is_none();
            return match heap::segment_of(self.machine, address) {
                None if wraps => refuse(Errno::EFAULT, "the caller's memory cannot be accessed"),
                Some(_) => refuse(Errno::EFAULT, "the caller's memory cannot be accessed"),
                None => Ok(None),
            };
        }
        let Some((block, offset, run)) = self.process.resolve(address, *length) else {
            return refuse(Errno::EFAULT, "the copy reached an address where nothing is mapped");
        };
        *length = run;
        Ok(Some((block, offset)))
    }

    /// MEMCPY2D: row by row.
    pub(super) fn memcpy_2d(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::Memcpy2d = arg.para();
        self.process.refer(para.destination, None)?;
        self.process.refer(para.source, None)?;
        if para.width > para.destination_pitch || para.width > para.source_pitch {
            return refuse(Errno::EINVAL, "the width is larger than a pitch");
        }
        if para.width == 0 || para.height == 0 {
            return refuse(Errno::EINVAL, "there is nothing to copy");
        }
        if para.direction == svm::COPY_HOST_TO_HOST || para.direction > svm::COPY_DETECT {
            return refuse(Errno::EOPNOTSUPP, "the direction must be explicit");
        }
        let wraps = para.source.checked_add(para.source_pitch).is_none()
            || para.destination.checked_add(para.destination_pitch).is_none();
        if para.height != 1 && wraps {
            return refuse(Errno::EINVAL, "the pitch leaves the address space");
        }
        if para.direction >= svm::COPY_DEVICE_TO_DEVICE {
            return refuse(Errno::EOPNOTSUPP, "only copies between host and device have rows");
        }
        let (mut source, mut destination) = (para.source, para.destination);
        for _ in 0..para.height {
            for address in [source, destination] {
                if !(svm::SVM_START..svm::SVM_START + svm::SVM_SIZE).contains(&address) {
                    continue;
                }
                let heap = self.process.heap(address);
                if heap.is_none_or(|heap| heap.is_reserve() && heap.walk(address, para.width).is_none()) {
                    return refuse(Errno::EINVAL, "part of a row is not mapped");
                }
            }
            let plan = self.plan(destination, source, para.width, para.direction, Mode::Sync)?;
            self.carry(plan, destination, source, para.width)?;
            source = source.wrapping_add(para.source_pitch);
            destination = destination.wrapping_add(para.destination_pitch);
        }
        Ok(())
    }

    /// MEMCPY_BATCH: elements before a failing one stay copied.
    pub(super) fn memcpy_batch(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemcpyBatch = arg.para();
        if para.destinations == 0 || para.sources == 0 || para.sizes == 0 || para.count == 0 {
            return refuse(Errno::EINVAL, "there is nothing to copy");
        }
        if para.count > svm::BATCH {
            return refuse(Errno::EOPNOTSUPP, "there are too many copies");
        }
        let destinations = self.read_words(para.destinations, para.count)?;
        let sources = self.read_words(para.sources, para.count)?;
        let sizes = self.read_words(para.sizes, para.count)?;
        let mut first: Option<Plan> = None;
        for ((destination, source), size) in destinations.into_iter().zip(sources).zip(sizes) {
            self.process.refer(destination, Some(size))?;
            self.process.refer(source, Some(size))?;
            let direction = first.map_or(svm::COPY_DETECT, |plan| plan.direction);
            let mode = Mode::Batch(first.map(|plan| plan.device));
            let plan = self.plan(destination, source, size, direction, mode)?;
            self.carry(plan, destination, source, size)?;
            first.get_or_insert(plan);
        }
        Ok(())
    }

    /// Reads an array of the caller.
    pub(super) fn read_words(&self, address: u64, count: u32) -> SvmResult<Vec<u64>> {
        let mut bytes = vec![0; count as usize * 8];
        if self.caller.memory.read(address, &mut bytes).is_err() {
            return refuse(Errno::EINVAL, "an array cannot be read");
        }
        let words =
            bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
        Ok(words.collect())
    }

    /// ASYNC_MEMCPY. The bytes are copied at once, unless it pauses; then the refresh waits and
    /// copies the rest. The mappings are held until the refresh.
    pub(super) fn async_memcpy(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::AsyncMemcpy = arg.para();
        let (destination, source, size) = (para.destination, para.source, para.size);
        self.process.refer(destination, Some(size))?;
        self.process.refer(source, Some(size))?;
        let plan = self.plan(destination, source, size, svm::COPY_DETECT, Mode::Async)?;
        if self.process.tasks.len() >= svm::ASYNC_TASKS {
            return refuse(Errno::ENOSPC, "too many copies were not refreshed");
        }
        self.message(plan.device)?;
        // The refresh reports a broken link.
        let failed = agent::link_broken(self.machine);
        let mut rest = None;
        if !failed {
            let carried = self.carry(plan, destination, source, size);
            rest = self.pace.continues_later().map(|(moved, until)| Rest { plan, moved, until });
            if rest.is_none() {
                carried?;
            }
        }
        let id = self.process.tasks.take_id();
        let first_part = Behaviour::of(self.machine.config.generation).refresh_releases_first_part;
        let released = if first_part { part_of(size) } else { size };
        self.process.tasks.tasks.insert(id, Task { source, destination, size, released, failed, rest });
        self.process.hold(source, size, true);
        self.process.hold(destination, size, true);
        para.task = id;
        put(arg, &para);
        Ok(())
    }

    /// MEMCPY_RESULT_REFRESH. Possible once per task.
    pub(super) fn refresh(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::AsyncMemcpy = arg.para();
        let Some(rest) = self.process.tasks.tasks.get(&para.task).map(|task| task.rest) else {
            return refuse(Errno::EINVAL, "there is no such copy");
        };
        rest.map_or(Ok(()), |rest| self.world.holds.wait(rest.until))?;
        let Some(mut task) = self.process.tasks.tasks.remove(&para.task) else {
            return refuse(Errno::EINVAL, "there is no such copy");
        };
        if let Some(Rest { plan, moved, .. }) = rest {
            // The driver pinned the caller's pages at the submission; here they may be gone.
            task.failed |= self.carry(plan, task.destination + moved, task.source + moved, task.size - moved).is_err();
        }
        self.process.hold(task.source, task.released, false);
        self.process.hold(task.destination, task.released, false);
        para.state = if task.failed { svm::ASYNC_FAILED } else { svm::ASYNC_DONE };
        put(arg, &para);
        Ok(())
    }

    /// MEMSET8.
    pub(super) fn memset(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::Memset = arg.para();
        if !self.process.refer(para.destination, Some(para.size))? {
            return refuse(Errno::EINVAL, "the module does not manage the address");
        }
        let place = self.process.place(para.destination)?;
        let heap_size = self.process.heap(para.destination).map_or(0, |heap| heap.size);
        if para.size > heap_size {
            return refuse(Errno::EINVAL, "the range is larger than its heap");
        }
        let locked = || self.process.heap(para.destination).is_some_and(|heap| heap.is_locked(para.destination));
        if place.read_only || (place.absent && locked()) {
            return refuse(Errno::EINVAL, "the memory is read-only or has no pages");
        }
        let Some(device) = place.device else {
            if place.absent {
                self.add_written_pages(para.destination, para.size)?;
            }
            para.host_mapped = 1;
            put(arg, &para);
            return Ok(());
        };
        let heap = self.process.heap(para.destination);
        if para.size == 0
            || !heap.is_some_and(|heap| {
                heap.holds(para.destination, para.size)
                    && heap.is_reserved(para.destination..para.destination + para.size)
            })
        {
            return refuse(Errno::EINVAL, "the range is empty or not reserved");
        }
        if place.of_host {
            return refuse(Errno::EINVAL, "there is no DMA device for host memory that a device imported");
        }
        if place.imported {
            return self.fill_share(&para);
        }
        self.message(device)?;
        self.pace.begin(para.size, &[(para.destination, para.size)]);
        let mut done = 0;
        while done < para.size {
            let address = para.destination + done;
            let place = self.process.place(address).ok();
            let Some((block, offset, mut run)) = self.process.resolve(address, para.size - done) else {
                return refuse(Errno::EFAULT, "the fill reached an address where nothing is mapped");
            };
            if place.is_none_or(|place| place.device != Some(device)) {
                return refuse(Errno::EFAULT, "the fill reached memory of another device");
            }
            if self.pace.step(&mut run)? {
                self.world.store.fill(block, offset, run, para.value as u8)?;
            }
            done += run;
        }
        Ok(())
    }

    /// MEMSET8 of imported memory: the device fills the share of the *first* mapping, all of the
    /// size, mapped or not (`devmm_share_mem_memset`). Other mappings are not touched.
    fn fill_share(&mut self, para: &svm::Memset) -> SvmResult {
        let found = self.process.heap(para.destination).and_then(|heap| heap.mapping(para.destination));
        let Some(mapping) = found else { return refuse(Errno::EADDRNOTAVAIL, "nothing is mapped at the address") };
        let (block, offset, importer) = (mapping.block, para.destination - mapping.start, mapping.physical);
        self.message(importer)?;
        let room = self.world.store.length(block).unwrap_or(0).saturating_sub(offset);
        self.world.store.fill(block, offset, para.size.min(room), para.value as u8)?;
        if para.size > room { refuse(Errno::EINVAL, "the share ends before the range does") } else { Ok(()) }
    }
}

/// The part size that the driver uses for a copy of this size
/// (`devmm_memcpy_get_per_page_num`); the last part is smaller.
fn part_of(size: u64) -> u64 {
    const UP_TO: [(u64, u64); 3] = [(768 << 10, 256 << 10), (1280 << 10, 512 << 10), (3 << 20, 1 << 20)];
    let part = UP_TO.iter().find(|(limit, _)| size <= *limit).map_or(2 << 20, |(_, part)| *part);
    part.min(size)
}

/// The caller's memory cannot be pinned for a transfer.
fn unpinned<T>(_: BadAddress) -> SvmResult<T> {
    refuse(Errno::EFAULT, "the caller's memory cannot be accessed")
}
