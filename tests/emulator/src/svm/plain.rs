//! Plain memory: pages behind an allocation in a heap that is not a reserve heap.
//!
//! ALLOC takes addresses only. ADVISE with POPULATE puts pages of a device behind them, ADVISE in a
//! pinned-host heap puts host pages there, and PREFETCH populates what has no pages yet. A copy or
//! a fill that reaches an address without pages and without a lock gets host pages. FREE_PAGES
//! frees the pages with the addresses. The driver keeps flags for each chunk; the model keeps runs
//! of pages, and the flags of advice for the whole allocation.

use super::behaviour::Behaviour;
use super::heap::Heap;
use super::session::{Process, View};
use super::store::{BlockId, for_each_piece};
use super::{Call, SvmResult, World, page_size, refuse};
use crate::machine::HOST;
use ascend_ioctl::svm::{self, Advice, HUGE_PAGE};
use nix::errno::Errno;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// A run of pages behind an allocation.
#[derive(Debug, Clone)]
pub struct Pages {
    pub start: u64,
    pub size: u64,
    /// The logical device, or 65.
    pub logical: u32,
    /// The physical device, or 65.
    pub physical: u32,
    pub block: BlockId,
    /// Offset of the first page in the block.
    pub offset: u64,
    /// Where the CPU sees it.
    pub view: Option<View>,
    /// Memory of another process, opened by name.
    pub named: bool,
}

impl Pages {
    pub fn end(&self) -> u64 {
        self.start + self.size
    }

    pub fn is_host(&self) -> bool {
        self.physical == HOST
    }
}

impl Heap {
    /// The run of pages that an address lies in.
    pub fn pages(&self, address: u64) -> Option<&Pages> {
        let (_, found) = self.plain.range(..=address).next_back()?;
        (address < found.end()).then_some(found)
    }

    /// Whether memory is locked to a device, with or without pages.
    pub fn is_locked(&self, address: u64) -> bool {
        self.opened(address).is_some() || self.reservation(address).is_some_and(|found| found.owner.is_some())
    }

    /// The starts of the runs that overlap a range.
    fn runs(&self, range: &Range<u64>) -> Vec<u64> {
        let first = self.pages(range.start).map(|run| run.start);
        let later = self.plain.range(range.clone()).map(|(&start, _)| start);
        first.into_iter().chain(later.filter(|start| Some(*start) != first)).collect()
    }

    /// The parts of a range that have no pages.
    fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for start in self.runs(&range) {
            if start > at {
                gaps.push(at..start);
            }
            at = self.plain.get(&start).map_or(at, Pages::end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }
}

impl Process {
    /// Frees a run of pages. Pages of a device are freed with its process, at the latest.
    fn free_run(&mut self, world: &mut World, run: Pages) {
        let owned = match (run.named, self.agents.get_mut(&run.physical)) {
            (true, _) => false,
            (false, Some(agent)) => agent.plain.remove(&run.block),
            (false, None) => run.is_host(),
        };
        if owned {
            world.store.free(run.block);
        }
        self.hide_run(world, &run);
    }

    /// Hides what the CPU sees of a run of pages.
    fn hide_run(&mut self, world: &mut World, run: &Pages) {
        for view in run.view.into_iter().chain(self.take_parts(run.start..run.end())) {
            self.hide(world, view);
        }
    }

    /// Frees the pages of an allocation, or of a heap that is disabled.
    pub fn free_pages_of(&mut self, world: &mut World, heap: u64, range: Range<u64>) {
        let Some(found) = self.heaps.get_mut(&heap) else { return };
        let runs: Vec<Pages> = found.runs(&range).iter().filter_map(|start| found.plain.remove(start)).collect();
        for run in runs {
            self.free_run(world, run);
        }
    }

    /// Ends the host side of the pages of a heap: its addresses are gone. The device still has its
    /// pages.
    pub fn end_pages(&mut self, world: &mut World, heap: &mut Heap) {
        for (_, run) in std::mem::take(&mut heap.plain) {
            if run.is_host() {
                self.free_run(world, run);
            } else {
                self.hide_run(world, &run);
            }
        }
    }

    /// Parts of managed memory without pages that the CPU touched since the last command. With the
    /// real driver the access is a page fault that gives the chunk host pages
    /// (`devmm_svm_vm_fault_host`); here the file has data there.
    pub fn touched_chunks(&self) -> Vec<Range<u64>> {
        let mut touched = Vec::new();
        if !self.enabled {
            return touched;
        }
        for heap in self.heaps.values().filter(|heap| heap.sub_kind == svm::SUB_SVM && !heap.is_reserve()) {
            for found in heap.reservations.values().filter(|found| found.owner.is_none()) {
                for gap in heap.gaps(found.start..found.start + found.size) {
                    let Some(vma) = self.vma(gap.start).filter(|vma| !vma.private) else { continue };
                    let file = |address: u64| vma.offset + (address - vma.start);
                    let _ = for_each_piece(&self.backing, file(gap.start)..file(gap.end), true, |offset, length| {
                        let chunks = heap.chunks(vma.start + (offset - vma.offset), length as u64);
                        match touched.last_mut() {
                            Some(last) if chunks.start <= last.end => last.end = last.end.max(chunks.end),
                            _ => touched.push(chunks),
                        }
                        Ok(())
                    });
                }
            }
        }
        touched
    }
}

impl Call<'_, '_> {
    /// ADVISE outside of reserve heaps, after the checks of the range.
    pub(super) fn advise_plain(&mut self, para: &svm::Advise) -> SvmResult {
        let advice = Advice::from_bits_retain(para.advice);
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        if heap.kind == svm::HEAP_PINNED_HOST {
            return self.advise_host(para, advice);
        }
        let chunks = heap.chunks(para.address, para.size);
        let (sub_kind, kind) = (heap.sub_kind, heap.kind);
        if self.physical == svm::HOST_AGENT_ID && (sub_kind != svm::SUB_DEVICE || kind != svm::HEAP_CHUNK) {
            return refuse(Errno::EOPNOTSUPP, "the host agent has no such memory");
        }
        if sub_kind == svm::SUB_READ_ONLY && !advice.contains(Advice::READ_ONLY) {
            return refuse(Errno::EINVAL, "memory of this heap is read-only");
        }
        if !heap.is_reserved(chunks.clone()) {
            return refuse(Errno::EINVAL, "part of the range is not allocated");
        }
        let persistent = advice.contains(Advice::PERSISTENT);
        let populated = heap.pages(chunks.start);
        if sub_kind != svm::SUB_SVM && !persistent && populated.is_some_and(|run| run.physical == self.physical) {
            return refuse(Errno::EINVAL, "the memory is populated already");
        }
        let populate = advice.contains(Advice::POPULATE);
        let lock = advice.contains(Advice::LOCK_DEVICE);
        if populate && sub_kind == svm::SUB_SVM {
            if !self.process.enabled {
                return refuse(Errno::EINVAL, "managed memory needs the segments to be mapped");
            }
            // Memory without a lock counts as that of logical device 0.
            let locked = heap.reservation(chunks.start).and_then(|found| found.owner);
            let logical = self.logical;
            let home = locked.unwrap_or(if lock { logical } else { 0 });
            if super::to_physical(self.machine, self.caller, Some(self.process), home)? != self.physical {
                return refuse(Errno::EOPNOTSUPP, "the memory belongs to a device with another operating system");
            }
        }
        if persistent {
            return self.message(self.physical);
        }
        let logical = self.logical;
        let heap = self.process.heap_mut(para.address);
        if let Some(reservation) = heap.and_then(|heap| heap.reservation_mut(para.address)) {
            // Advice changes nothing for memory that has its pages.
            if !reservation.populated {
                reservation.read_only |= advice.contains(Advice::READ_ONLY);
                if lock {
                    reservation.owner = Some(logical);
                }
            }
        }
        if populate { self.populate(chunks) } else { Ok(()) }
    }

    /// ADVISE in a pinned-host heap: host pages for exactly one allocation.
    fn advise_host(&mut self, para: &svm::Advise, advice: Advice) -> SvmResult {
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        let chunks = heap.chunks(para.address, para.size);
        let reservation = heap.reservation(para.address).map(|found| found.start..found.start + found.size);
        if para.address % heap.chunk != 0 || reservation.as_ref().is_none_or(|found| found.start != para.address) {
            return refuse(Errno::EINVAL, "the address is not the start of an allocation");
        }
        if reservation != Some(chunks.clone()) {
            return refuse(Errno::EINVAL, "the size is not that of the allocation");
        }
        if heap.pages(chunks.start).is_some() {
            return refuse(Errno::EADDRINUSE, "the allocation has its pages already");
        }
        let page = if advice.contains(Advice::HUGE) { HUGE_PAGE } else { page_size() };
        self.add_host_pages(para.address..(para.address + para.size).next_multiple_of(page))
    }

    /// Host pages for managed memory that the CPU touched, with the bytes that it wrote.
    pub(super) fn add_touched_pages(&mut self) {
        for chunks in self.process.touched_chunks() {
            let Some(vma) = self.process.vma(chunks.start) else { continue };
            let offset = vma.offset + (chunks.start - vma.start);
            let mut bytes = vec![0; (chunks.end - chunks.start) as usize];
            // The CPU sees these bytes; without memory for them the real access would be a SIGSEGV.
            let read = self.process.backing.read_exact_at(&mut bytes, offset).is_ok();
            let address = chunks.start;
            if read && self.add_host_pages(chunks).is_ok() {
                let block = self.process.heap(address).and_then(|heap| heap.pages(address)).map(|run| run.block);
                let _ = block.map(|block| self.world.store.write(block, 0, &bytes));
            }
        }
    }

    /// Puts host pages behind a range and shows them to the CPU.
    fn add_host_pages(&mut self, range: Range<u64>) -> SvmResult {
        let size = range.end - range.start;
        let pool = self.world.store.add_pool(HOST, self.machine.config.host_memory);
        let Ok(block) = pool.and_then(|()| self.world.store.create(HOST, size)) else {
            return refuse(Errno::ENOMEM, "the host has no memory for the pages");
        };
        let view = match self.process.show(self.world, block, 0, range.start, size) {
            Some(Ok(view)) => view,
            shown => {
                self.world.store.free(block);
                let errno = if shown.is_none() { Errno::EADDRNOTAVAIL } else { Errno::ENOMEM };
                return refuse(errno, "the pages could not be mapped into the segment");
            }
        };
        let run = Pages {
            start: range.start,
            size,
            logical: HOST,
            physical: HOST,
            block,
            offset: 0,
            view: Some(view),
            named: false,
        };
        if let Some(heap) = self.process.heap_mut(range.start) {
            heap.plain.insert(run.start, run);
        }
        Ok(())
    }

    /// Host pages for what a copy or a fill is about to write (`devmm_insert_host_page_range`).
    pub(super) fn add_written_pages(&mut self, address: u64, size: u64) -> SvmResult {
        if !self.process.enabled {
            return refuse(Errno::EINVAL, "host pages need the segments to be mapped");
        }
        let Some(heap) = self.process.heap(address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let chunks = heap.chunks(address, size);
        if !heap.holds(address, size) || !heap.is_reserved(chunks.clone()) {
            return refuse(Errno::EINVAL, "part of the range is not allocated");
        }
        if heap.is_locked(address) {
            return refuse(Errno::EINVAL, "the memory is locked to a device");
        }
        for gap in heap.gaps(chunks) {
            self.add_host_pages(gap)?;
        }
        Ok(())
    }

    /// Puts pages of the device behind a range. Pages of the host move there with their bytes
    /// (`devmm_advise_populate_process`).
    pub(super) fn populate(&mut self, chunks: Range<u64>) -> SvmResult {
        let (logical, physical) = (self.logical, self.physical);
        let Some(heap) = self.process.heap(chunks.start) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        let foreign = |run: &Pages| !run.is_host() && run.logical != logical;
        if heap.reservation(chunks.start).and_then(|found| found.owner).is_some_and(|owner| owner != logical) {
            return refuse(Errno::EINVAL, "the memory is locked to another device");
        }
        let runs = heap.runs(&chunks);
        if runs.iter().filter_map(|start| heap.plain.get(start)).any(foreign) {
            return refuse(Errno::EINVAL, "part of the range is on another device");
        }
        let gaps = heap.gaps(chunks.clone());
        for gap in gaps {
            self.message(physical)?;
            let block = self.device_block(gap.end - gap.start)?;
            self.add_device_pages(gap, block);
        }
        for start in runs {
            let host = self.process.heap(start).and_then(|heap| heap.plain.get(&start)).filter(|run| run.is_host());
            let Some(run) = host.cloned() else { continue };
            self.transfer(physical)?;
            let block = self.device_block(run.size)?;
            let mut bytes = vec![0; run.size as usize];
            self.world.store.read(run.block, run.offset, &mut bytes)?;
            self.world.store.write(block, 0, &bytes)?;
            let range = run.start..run.end();
            self.process.free_run(self.world, run);
            self.add_device_pages(range, block);
        }
        if let Some(reservation) = self.process.heap_mut(chunks.start).and_then(|it| it.reservation_mut(chunks.start)) {
            reservation.populated = true;
        }
        Ok(())
    }

    /// New memory of the device, which its process owns.
    fn device_block(&mut self, size: u64) -> SvmResult<BlockId> {
        let physical = self.physical;
        let pool = self.world.store.add_pool(physical, self.machine.config.hbm);
        let Ok(block) = pool.and_then(|()| self.world.store.create(physical, size)) else {
            return refuse(Errno::ENOMEM, "the device has no memory for the pages");
        };
        if let Some(agent) = self.process.agents.get_mut(&physical) {
            agent.plain.insert(block);
        }
        Ok(block)
    }

    fn add_device_pages(&mut self, range: Range<u64>, block: BlockId) {
        let (logical, physical) = (self.logical, self.physical);
        let (start, size) = (range.start, range.end - range.start);
        // The CPU may access managed memory also when it is on a device: the real pages move back
        // then. Here it sees them where they are.
        let managed = |heap: &Heap| heap.sub_kind == svm::SUB_SVM && !heap.is_locked(start);
        let is_visible = self.process.enabled && self.process.heap(start).is_some_and(managed);
        let view = if is_visible { self.process.show(self.world, block, 0, start, size) } else { None };
        let view = view.and_then(Result::ok);
        let run = Pages { start, size, logical, physical, block, offset: 0, view, named: false };
        if let Some(heap) = self.process.heap_mut(start) {
            heap.plain.insert(start, run);
        }
    }

    /// PREFETCH outside of reserve heaps, after the checks of the range.
    pub(super) fn prefetch_plain(&mut self, para: &svm::Advise) -> SvmResult {
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        let chunks = heap.chunks(para.address, para.size);
        if heap.kind == svm::HEAP_PINNED_HOST && heap.pages(chunks.start).is_some() {
            return refuse(Errno::EINVAL, "the memory is locked to the host");
        }
        if heap.reservation(chunks.start).is_some_and(|found| found.read_only) {
            return refuse(Errno::EINVAL, "the memory is read-only");
        }
        if !heap.is_reserved(chunks.clone()) {
            return refuse(Errno::EINVAL, "part of the range is not allocated");
        }
        if heap.opened(chunks.start).is_some() {
            return self.prefetch_named(para);
        }
        match heap.pages(chunks.start).filter(|run| !run.is_host()) {
            // The device gets access to the other device's pages.
            Some(run) if run.physical != self.physical => self.message(self.physical),
            Some(_) if heap.gaps(chunks.clone()).is_empty() => Ok(()),
            Some(_) => self.message(self.physical),
            None => self.populate(chunks),
        }
    }

    /// Whether this generation lets ADVISE name huge pages in a pinned-host heap.
    pub(super) fn allows_huge(&self, heap: &Heap) -> bool {
        let pinned = heap.kind == svm::HEAP_PINNED_HOST;
        heap.kind == svm::HEAP_HUGE || (pinned && Behaviour::of(self.machine.config.generation).huge_pinned_pages)
    }
}
