//! Changes that a process makes to its own address space. The driver watches them, and some end the
//! session.
//!
//! The driver sees the *ranges of the calls*: a munmap of exactly a segment ends the session, a
//! larger one goes unnoticed, and a change that splits a mapping ends the session too. SOMA and UVM
//! are exempt. A session without segments ends as well when a range is exactly one of the driver's
//! areas, whatever is mapped there. A call on a range where nothing is mapped goes unnoticed.

use super::session::{Process, Stage, View, Vma, host_pin_start};
use super::store::{for_each_piece, punch};
use super::{ProcessId, Svm, World, page_size};
use crate::caller::Caller;
use crate::driver::{AddressSpaceChange, Change, ChangeKind};
use crate::machine::Machine;
use crate::trap::Trap;
use ascend_ioctl::svm;
use nix::errno::Errno;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

/// Not in libc for every target.
const MADV_COLLAPSE: i32 = 25;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// How much of a mapping a change covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cover {
    Nothing,
    Part,
    Whole,
}

fn cover(vma: &Vma, range: &Range<u64>) -> Cover {
    if range.end <= vma.start || range.start >= vma.end() {
        Cover::Nothing
    } else if range.start <= vma.start && range.end >= vma.end() {
        Cover::Whole
    } else {
        Cover::Part
    }
}

/// The trap of a munmap that covers a dynamic range and more.
fn beyond_dynamic(vma: &Vma, range: &Range<u64>, tgid: i32) -> Trap {
    let detail = format!(
        "munmap of {:#x} bytes at {:#x}, which is more than the dynamic range at {:#x}: the driver keeps its record of \
         the mapping, and later uses it",
        range.end - range.start,
        range.start,
        vma.start
    );
    Trap { name: "munmap-beyond-dynamic-range", tgid, detail }
}

/// Whether a range is exactly one of the driver's areas of the SVM range
/// (`_devmm_mem_is_in_vma_range`).
pub fn is_area(range: &Range<u64>) -> bool {
    let start = svm::SVM_START;
    let size = range.end - range.start;
    let slot = size == 16 * GIB
        && range.start >= start
        && (range.start - start) % (32 * GIB) == 0
        && (range.start - start) / (32 * GIB) < u64::from(svm::PHYSICAL_DEVICES);
    slot || *range == (start..start + svm::SVM_SIZE)
        || *range == (start..start + 2 * TIB)
        || *range == (start + 2 * TIB..start + 2 * TIB + 256 * GIB)
        || *range == (start + 2 * TIB + 256 * GIB..svm::NORMAL_START)
        || *range == (svm::NORMAL_START..svm::DYNAMIC_START)
}

impl Process {
    /// The mappings of a process. The flag says whether splitting the mapping ends the session.
    fn vmas(&self, machine: &Machine, tgid: i32) -> impl Iterator<Item = (Slot, Vma, bool)> {
        let host_pin = machine.config.generation.delta().segments.len();
        let segments = self
            .segments
            .iter()
            .map(move |(&number, vma)| (Slot::Segment(number), *vma, number == 0 || number == host_pin));
        let dynamics =
            self.dynamics.iter().filter_map(|(&start, dynamic)| Some((Slot::Dynamic(start), dynamic.vma?, true)));
        segments.chain(dynamics).filter(move |(_, vma, _)| vma.tgid == tgid)
    }

    /// Whether the CPU sees memory in a mapping.
    fn shows(&self, vma: &Vma) -> bool {
        let before = self.windows.range(..vma.offset + vma.size).next_back();
        before.is_some_and(|(&start, &length)| start + length > vma.offset)
    }

    fn forget(&mut self, slot: Slot) {
        match slot {
            Slot::Segment(number) => drop(self.segments.remove(&number)),
            Slot::Dynamic(start) => {
                if let Some(dynamic) = self.dynamics.get_mut(&start) {
                    dynamic.vma = None;
                }
            }
        }
    }

    /// Reports a page that a CPU touched where nothing was mapped. With the real driver the access
    /// is a SIGSEGV, or in the SOMA segment a thread that spins in the kernel forever. Here the
    /// page is found afterwards in the file. Managed memory gets its pages by a touch.
    pub fn report_touches(&self, machine: &mut Machine) {
        if let Some(offset) = self.touched_offset() {
            machine.traps.push(self.touch(offset, self.tgid));
        }
    }

    /// An offset of the file that has bytes, but no memory of the driver.
    pub fn touched_offset(&self) -> Option<u64> {
        let mut found = None;
        // The kernel may allocate more than one page at a time, so only data far from every window
        // counts.
        let managed = self.touched_chunks();
        let is_managed =
            |offset: u64| self.addresses(offset).any(|at| managed.iter().any(|part: &Range<u64>| part.contains(&at)));
        let near = |offset: u64| {
            let low = offset / svm::HUGE_PAGE * svm::HUGE_PAGE;
            let before = self.windows.range(..low + svm::HUGE_PAGE).next_back();
            before.is_some_and(|(&start, &length)| start + length > low)
        };
        let _ = for_each_piece(&self.backing, 0..i64::MAX as u64, true, |offset, length| {
            let mut at = offset;
            while at < offset + length as u64 {
                if !near(at) && !is_managed(at) {
                    found = Some(at);
                    return Err(Errno::ECANCELED);
                }
                at = (at / svm::HUGE_PAGE + 1) * svm::HUGE_PAGE;
            }
            Ok(())
        });
        found
    }

    /// The addresses in segments at which an offset of the file can be seen.
    pub fn addresses(&self, offset: u64) -> impl Iterator<Item = u64> + '_ {
        let visible = self.segments.values().filter(|vma| vma.prot != libc::PROT_NONE);
        let there = visible.filter(move |vma| (vma.offset..vma.offset + vma.size).contains(&offset));
        there.map(move |vma| vma.start + (offset - vma.offset))
    }

    /// The trap of a process that touched an offset of the file.
    pub fn touch(&self, offset: u64, tgid: i32) -> Trap {
        let candidates: Vec<String> = self.addresses(offset).map(|address| format!("{address:#x}")).collect();
        let soma = self
            .segments
            .values()
            .any(|vma| vma.start == svm::SOMA_START && vma.prot != libc::PROT_NONE && offset < vma.offset + vma.size);
        let hang = if soma {
            "; if it was the one in the SOMA segment, the thread would hang in the kernel forever"
        } else {
            ""
        };
        let whose = if tgid == self.tgid { "" } else { ", which is its parent's" };
        let detail = format!(
            "the CPU touched an address of the driver where no memory is mapped{whose} \
             (offset {offset:#x} of the file; mapped there: {}): SIGSEGV{hang}",
            if candidates.is_empty() { "nothing any more".to_owned() } else { candidates.join(", ") }
        );
        Trap { name: "touch-of-unmapped-address", tgid, detail }
    }

    /// Keeps a trap if the CPU was found to have written through a read-only view.
    pub(super) fn find_violation(&self, world: &mut World, view: &View) {
        if world.store.take_violation(view.block, view.window) {
            let address = self.addresses(view.offset).next().unwrap_or(0);
            let detail =
                format!("the CPU wrote to device memory that it may only read, mapped at {address:#x}: SIGSEGV");
            world.traps.push(Trap { name: "write-to-read-only-window", tgid: self.tgid, detail });
        }
    }
}

impl Svm {
    /// Whether any process has segments of the driver mapped.
    pub fn has_segments(&self) -> bool {
        self.processes.values().any(|process| !process.segments.is_empty())
    }

    /// The processes that have a session and segments.
    pub fn with_segments(&self) -> Vec<i32> {
        let process = |(tgid, id)| self.processes.get(id).map(|process| (tgid, process));
        let sessions = self.sessions.iter().filter_map(process);
        sessions.filter(|(_, process)| !process.segments.is_empty()).map(|(tgid, _)| *tgid).collect()
    }

    /// A page that was touched in the segments of a process where there is no memory: its offset
    /// and an address.
    pub fn touched(&self, tgid: i32) -> Option<(u64, u64)> {
        let process = self.process_of(tgid)?;
        let offset = process.touched_offset()?;
        Some((offset, process.addresses(offset).next()?))
    }

    /// Reports a touch of a child of a process, and removes the page.
    pub fn charge(&self, machine: &mut Machine, tgid: i32, child: i32, offset: u64) {
        if let Some(process) = self.process_of(tgid) {
            machine.traps.push(process.touch(offset, child));
            let page = page_size();
            punch(&process.backing, offset / page * page, page);
        }
    }

    /// Reports the processes that touched far more than there is memory, before the machine has
    /// none left.
    pub fn report_floods(&self, machine: &mut Machine) {
        /// More than the pages that the kernel may add around windows.
        const SLACK: u64 = 1 << 30;
        for process in self.processes.values().filter(|process| !process.segments.is_empty()) {
            let shown: u64 = process.windows.values().sum();
            let bytes = process.backing.metadata().map_or(0, |metadata| metadata.blocks() * 512);
            if bytes > shown.saturating_add(SLACK) {
                process.report_touches(machine);
            }
        }
    }

    fn process_of(&self, tgid: i32) -> Option<&Process> {
        self.sessions.get(&tgid).and_then(|id| self.processes.get(id))
    }
}

/// Names a mapping of a process.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Segment(usize),
    Dynamic(u64),
}

impl Svm {
    /// The caller is about to change its address space between 7 and 24 TiB, or at a recorded
    /// dynamic mapping. An error is the answer of the system call; with `Ok` the kernel carries the
    /// call out.
    pub fn address_space_change(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        change: &AddressSpaceChange,
    ) -> Result<Change, Errno> {
        let page = page_size();
        let range = change.start..change.start.saturating_add(change.length.saturating_add(page - 1) / page * page);
        let concerned: Vec<ProcessId> = self
            .processes
            .iter()
            .filter(|(_, process)| {
                let session = process.stage == Stage::Session && process.tgid == caller.tgid;
                session || process.vmas(machine, caller.tgid).next().is_some()
            })
            .map(|(id, _)| *id)
            .collect();
        let mut answer = Ok(Change::ByKernel);
        if !change.mapped {
            return answer;
        }
        for id in concerned {
            answer = match (answer, self.change_one(machine, caller, id, &change.kind, &range)) {
                (Err(errno), _) | (_, Err(errno)) => Err(errno),
                (Ok(Change::Nothing), _) | (_, Ok(Change::Nothing)) => Ok(Change::Nothing),
                _ => Ok(Change::ByKernel),
            };
        }
        machine.traps.append(&mut self.world.traps);
        answer
    }

    fn change_one(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        id: ProcessId,
        kind: &ChangeKind,
        range: &Range<u64>,
    ) -> Result<Change, Errno> {
        let Some(process) = self.processes.get_mut(&id) else { return Ok(Change::ByKernel) };
        let touched: Vec<(Slot, Vma, bool, Cover)> = process
            .vmas(machine, caller.tgid)
            .map(|(slot, vma, fragile)| (slot, vma, fragile, cover(&vma, range)))
            .filter(|(.., cover)| *cover != Cover::Nothing)
            .collect();
        let splits = touched.iter().any(|(_, _, fragile, cover)| *fragile && *cover == Cover::Part);
        let mut ends = false;
        let mut change = Change::ByKernel;
        match *kind {
            ChangeKind::Unmap => {
                process.report_touches(machine);
                ends = process.unmap_ends(machine, caller.tgid, range) || splits;
                for (slot, vma, _, cover) in &touched {
                    if let (Slot::Dynamic(_), Cover::Whole) = (slot, *cover) {
                        if *range != (vma.start..vma.end()) && process.stage == Stage::Session {
                            machine.traps.push(beyond_dynamic(vma, range, caller.tgid));
                        }
                    }
                    if *cover == Cover::Whole {
                        process.forget(*slot);
                    }
                }
                process.forget_dynamic(range);
            }
            ChangeKind::Protect(prot) => {
                ends = touched
                    .iter()
                    .any(|(_, vma, fragile, cover)| *fragile && *cover == Cover::Part && vma.prot != prot);
                // Linux tells the driver which pages change, and a range that is exactly a dynamic
                // one looks like its munmap. Where there are no pages, it tells nothing.
                ends |= touched.iter().any(|(slot, vma, ..)| {
                    matches!(slot, Slot::Dynamic(_))
                        && *range == (vma.start..vma.end())
                        && vma.prot != prot
                        && process.heap(vma.start).is_some()
                        && process.shows(vma)
                });
                // Pages that the driver maps afterwards are writable, whatever the protection.
                // Pages of a file are not, so the mapping stays as it is.
                let stays = |vma: &Vma, cover: Cover| cover == Cover::Whole && vma.prot & libc::PROT_READ != 0;
                let stay = !touched.is_empty() && touched.iter().all(|(_, vma, _, cover)| stays(vma, *cover));
                if prot == libc::PROT_READ && stay {
                    change = Change::Nothing;
                }
                for (slot, _, _, cover) in &touched {
                    if *cover == Cover::Whole {
                        process.protect(*slot, prot);
                    }
                }
            }
            ChangeKind::Advise(advice) => match advice {
                libc::MADV_DONTNEED if touched.is_empty() => ends = is_area(range),
                // The last three would allocate all pages of the emulated file.
                libc::MADV_DONTNEED
                | libc::MADV_DODUMP
                | libc::MADV_DOFORK
                | libc::MADV_FREE
                | libc::MADV_REMOVE
                | libc::MADV_COLD
                | libc::MADV_PAGEOUT
                | libc::MADV_POPULATE_READ
                | libc::MADV_POPULATE_WRITE
                | MADV_COLLAPSE
                    if !touched.is_empty() =>
                {
                    return Err(Errno::EINVAL);
                }
                libc::MADV_RANDOM | libc::MADV_SEQUENTIAL | libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE => {
                    ends = splits
                }
                _ => {}
            },
            ChangeKind::Bind(_) => ends = splits,
            // Linux skips mappings without pages of its own.
            ChangeKind::Lock if !touched.is_empty() => change = Change::Nothing,
            ChangeKind::Lock => {}
            ChangeKind::Remap { length, fixed } => {
                let old = range.end - range.start;
                // An old size of 0 asks for a second mapping of the same pages.
                let second = old == 0
                    && process
                        .vmas(machine, caller.tgid)
                        .any(|(_, vma, _)| (vma.start..vma.start + vma.size).contains(&range.start));
                if touched.is_empty() && !second {
                    return Ok(change);
                }
                if fixed {
                    return Err(Errno::EINVAL);
                }
                if second || length > old {
                    return Err(Errno::EFAULT);
                }
                if length < old {
                    ends = touched.iter().any(|(_, _, fragile, _)| *fragile);
                }
            }
        }
        if ends {
            self.kill(id);
        }
        Ok(change)
    }
}

impl Process {
    /// Whether a munmap of exactly this range ends the session (`_devmm_notifier_start`).
    fn unmap_ends(&self, machine: &Machine, tgid: i32, range: &Range<u64>) -> bool {
        if self.stage != Stage::Session || self.tgid != tgid {
            return false;
        }
        if let Some(dynamic) = self.dynamics.get(&range.start).filter(|it| range.start + it.size == range.end) {
            return dynamic.vma.is_some() && self.heap(range.start).is_some();
        }
        let host_pin = machine.config.generation.delta().segments.len();
        let start = host_pin_start(machine);
        is_area(range)
            || (*range == (start..start + svm::HOST_PIN_SIZE) && self.segments.contains_key(&host_pin) && self.host_pin)
    }

    /// Forgets a dynamic range that is unmapped as a whole and has no heap.
    fn forget_dynamic(&mut self, range: &Range<u64>) {
        let exact =
            self.dynamics.get(&range.start).is_some_and(|it| range.start + it.size == range.end && it.vma.is_none());
        if exact && self.heap(range.start).is_none() {
            self.dynamics.remove(&range.start);
        }
    }

    fn protect(&mut self, slot: Slot, prot: i32) {
        let vma = match slot {
            Slot::Segment(number) => self.segments.get_mut(&number),
            Slot::Dynamic(start) => self.dynamics.get_mut(&start).and_then(|dynamic| dynamic.vma.as_mut()),
        };
        if let Some(vma) = vma {
            vma.prot = prot;
        }
    }
}
