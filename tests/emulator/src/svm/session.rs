//! The life of a session: ALLOC_PROC_STRUCT, mmap of the segments, INIT_PROCESS, SETUP_DEVICE,
//! CLOSE_DEVICE, and how it ends.
//!
//! The host side of a session lives as long as the *address space* of its process; it also ends
//! when the process unmaps a segment. The device side lives as long as the *file*: it ends with the
//! last reference to it. If the file is closed while the address space still exists (possible if
//! the segments were never mapped), the session blocks the next one of the process. See
//! `common/svm_module_ops.c`, `svm_proc_mng.c` and `svm_mmu_notifier.c` in the driver's
//! `src/sdk_driver/svm/v2`.

use super::agent::{self, Agent};
use super::behaviour::Behaviour;
use super::convert::Converted;
use super::copy::Tasks;
use super::handle::{HandleKind, HandleTable};
use super::heap::Heap;
use super::pause::Paused;
use super::register::Remote;
use super::share::Node;
use super::store::{BlockId, WindowId, punch};
use super::{Call, ProcessId, Stop, Svm, SvmResult, World, page_size, put, refuse};
use crate::caller::Caller;
use crate::config::{Attachment, Phase};
use crate::driver::{FileId, Mmap};
use crate::machine::{HOST, Machine};
use crate::pod::ForeignShare;
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg, HOST_AGENT_ID, Segment};
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The state of a process object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// ALLOC_PROC_STRUCT was done, segments may be mapped.
    Made,
    /// All segments are mapped.
    Mapped,
    /// INIT_PROCESS was done.
    Session,
    /// The address space is gone, or the process unmapped a segment.
    Unmapped,
}

/// A mapping of the module's file in a process.
#[derive(Debug, Clone, Copy)]
pub struct Vma {
    pub start: u64,
    pub size: u64,
    /// The process whose address space it is in.
    pub tgid: i32,
    pub prot: i32,
    /// MAP_PRIVATE: pages cannot be mapped into it.
    pub private: bool,
    /// File offset of the first byte.
    pub offset: u64,
}

impl Vma {
    pub fn end(&self) -> u64 {
        self.start + self.size
    }

    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end()).contains(&address)
    }
}

/// An address range beyond the static segments.
#[derive(Debug, Clone, Copy)]
pub struct Dynamic {
    pub size: u64,
    /// `None` for a heap that was enabled without a mapping.
    pub vma: Option<Vma>,
}

/// A range of the client's file that shows a block of memory.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub block: BlockId,
    pub window: WindowId,
    /// Offset in the client's file.
    pub offset: u64,
}

/// A process object.
pub struct Process {
    pub stage: Stage,
    /// The process that called INIT_PROCESS; before that, the one that called ALLOC_PROC_STRUCT.
    pub tgid: i32,
    pub start_time: u64,
    pub backing: Arc<File>,
    /// Number of static segments that were mapped so far.
    pub next_segment: usize,
    /// Segments that are still mapped, by number.
    pub segments: BTreeMap<usize, Vma>,
    pub dynamics: BTreeMap<u64, Dynamic>,
    /// Whether host memory can be mapped: all segments except host-pin were mapped at INIT_PROCESS.
    pub enabled: bool,
    /// The host-pin segment was mapped at INIT_PROCESS.
    pub host_pin: bool,
    /// INIT_PROCESS has returned EEXIST.
    pub refused: bool,
    /// The driver's own unmapping looked to it like a munmap by the process, which ends the
    /// session.
    pub doomed: bool,
    /// The file is closed.
    pub released: bool,
    pub translated: HashMap<u32, u32>,
    pub heaps: BTreeMap<u64, Heap>,
    /// Allocations in the host-pin segment, by address, with their size.
    pub pinned: BTreeMap<u64, u64>,
    pub host: HandleTable,
    pub agents: BTreeMap<u32, Agent>,
    /// Shared handles, by this process's device (65 for the host) and handle id.
    pub nodes: BTreeMap<(u32, i32), Node>,
    /// Imports from other servers, by this process's device and handle id.
    pub foreign: BTreeMap<(u32, i32), (ForeignShare, BlockId)>,
    pub tasks: Tasks,
    /// Commands that have begun and not ended, by thread.
    pub(super) paused: BTreeMap<i32, Paused>,
    /// Threads whose commands wait for the lock alone.
    pub(super) writers: BTreeSet<i32>,
    /// Ranges of the file that show memory, by offset, with their length.
    pub windows: BTreeMap<u64, u64>,
    /// Prepared copies by their handles.
    pub converted: BTreeMap<u64, Converted>,
    /// Memory that is registered for transfers, by physical device and address, with its size.
    pub registered: BTreeMap<(u32, u64), u64>,
    /// Host memory that is mapped for a device, and device memory for the CPU, by physical device
    /// and address.
    pub remote: BTreeMap<(u32, u64), Remote>,
    /// Host memory that is mapped for a device through the link, by physical device and address,
    /// with its size.
    pub through_link: BTreeMap<(u32, u64), u64>,
    /// What the CPU sees of device memory by MEM_REMOTE_MAP, by address.
    pub parts: BTreeMap<u64, View>,
    /// Views that outlive their mapping (see [`Call::mem_unmap`]).
    pub orphans: Vec<View>,
}

impl Process {
    fn new(caller: &Caller, backing: Arc<File>) -> Self {
        Process {
            stage: Stage::Made,
            tgid: caller.tgid,
            start_time: caller.start_time,
            backing,
            next_segment: 0,
            segments: BTreeMap::new(),
            dynamics: BTreeMap::new(),
            enabled: false,
            host_pin: false,
            refused: false,
            doomed: false,
            released: false,
            translated: HashMap::new(),
            heaps: BTreeMap::new(),
            pinned: BTreeMap::new(),
            host: HandleTable::default(),
            agents: BTreeMap::new(),
            nodes: BTreeMap::new(),
            foreign: BTreeMap::new(),
            tasks: Tasks::default(),
            paused: BTreeMap::new(),
            writers: BTreeSet::new(),
            windows: BTreeMap::new(),
            converted: BTreeMap::new(),
            registered: BTreeMap::new(),
            remote: BTreeMap::new(),
            through_link: BTreeMap::new(),
            parts: BTreeMap::new(),
            orphans: Vec::new(),
        }
    }

    /// Whether the caller may use the session.
    pub fn belongs_to(&self, caller: &Caller) -> bool {
        self.stage == Stage::Session && self.tgid == caller.tgid
    }

    /// The mapping that host pages are mapped into.
    pub fn vma(&self, address: u64) -> Option<&Vma> {
        if address >= svm::DYNAMIC_START {
            let (_, dynamic) = self.dynamics.range(..=address).next_back()?;
            return dynamic.vma.as_ref().filter(|vma| vma.contains(address));
        }
        // The driver keeps its record of static mappings only if all of them were made.
        let vma = self.segments.get(&0).filter(|_| self.enabled)?;
        vma.contains(address).then_some(vma)
    }

    /// Whether the module manages an address of this process.
    pub fn is_svm(&self, address: u64) -> bool {
        if address >= svm::DYNAMIC_START {
            let below = self.dynamics.range(..=address).next_back();
            return below.is_some_and(|(&start, dynamic)| address < start + dynamic.size);
        }
        address >= svm::SVM_START
    }

    /// Whether an address lies in the host-pin segment of this process.
    pub fn is_host_pin(&self, address: u64) -> bool {
        let starts = [svm::HOST_PIN_START_PCIE, svm::HOST_PIN_START_HCCS];
        self.host_pin && self.segments.values().any(|vma| starts.contains(&vma.start) && vma.contains(address))
    }

    /// Shows a block, from `start` on, at an address of the client. `None` if the client has no
    /// mapping there.
    pub fn show(
        &mut self,
        world: &mut World,
        block: BlockId,
        start: u64,
        address: u64,
        size: u64,
    ) -> Option<Result<View, Errno>> {
        let vma = *self.vma(address)?;
        if vma.private {
            return Some(Err(Errno::ENOMEM));
        }
        let offset = vma.offset + (address - vma.start);
        // Dynamic mappings may overlap in the client's file.
        if self.windows.range(..offset + size).next_back().is_some_and(|(&start, &length)| start + length > offset) {
            return Some(Err(Errno::ELOOP));
        }
        Some(world.store.show(block, start, self.backing.clone(), offset, size).map(|window| {
            self.windows.insert(offset, size);
            View { block, window, offset }
        }))
    }

    /// Whether the CPU still sees memory in a range that was mapped there before.
    pub fn has_orphan(&self, address: u64, size: u64) -> bool {
        let Some(vma) = self.vma(address) else { return false };
        let start = vma.offset + (address - vma.start);
        let length = |view: &View| self.windows.get(&view.offset).copied().unwrap_or(0);
        self.orphans.iter().any(|view| view.offset < start + size && start < view.offset + length(view))
    }

    /// Ends a view.
    pub fn hide(&mut self, world: &mut World, view: View) {
        world.store.settle_block(view.block);
        self.find_violation(world, &view);
        let length = self.windows.remove(&view.offset);
        if !world.store.hide(view.block, view.window) {
            // The memory is gone, and the CPU may have written to its place since.
            punch(&self.backing, view.offset, length.unwrap_or(0));
        }
    }

    /// Ends the host side: mappings end, and host memory that is not shared is freed.
    pub fn end_host_side(&mut self, world: &mut World) {
        // Free memory before its windows are hidden, so that no bytes are copied out of them.
        for handle in self.host.drain().filter(|handle| handle.kind == HandleKind::Normal) {
            world.store.free(handle.block);
        }
        for (_, heap) in std::mem::take(&mut self.heaps) {
            self.end_heap(world, heap);
        }
        for view in std::mem::take(&mut self.orphans) {
            self.hide(world, view);
        }
        self.dynamics.clear();
        self.pinned.clear();
        self.paused.clear();
        self.writers.clear();
        self.stage = Stage::Unmapped;
    }

    /// Ends the device side: agents end with all their memory, and shares lose this holder.
    pub fn end_device_side(&mut self, machine: &mut Machine, world: &mut World) {
        for physical in self.agents.keys().copied().collect::<Vec<_>>() {
            self.end_agent(machine, world, physical);
        }
        for (key, node) in std::mem::take(&mut self.nodes) {
            world.shares.put(&mut world.store, node, key.0, self.tgid, true);
        }
        world.names.forget(self.tgid, None);
        self.tasks = Tasks::default();
    }

    /// Ends a device process and frees the memory that only it held.
    pub fn end_agent(&mut self, machine: &mut Machine, world: &mut World, physical: u32) {
        if let Some(mut agent) = self.agents.remove(&physical) {
            agent::part(machine, self.tgid, physical);
            let (gone, kept) = std::mem::take(&mut self.foreign).into_iter().partition(|((of, _), _)| *of == physical);
            self.foreign = kept;
            let gone: BTreeMap<_, (ForeignShare, BlockId)> = gone;
            for (_, block) in gone.into_values() {
                world.store.free(block);
            }
            for handle in agent.handles.drain() {
                if handle.kind == HandleKind::Normal {
                    world.store.free(handle.block);
                }
            }
            for block in agent.plain {
                world.store.free(block);
            }
        }
    }
}

/// The segments that a process maps, in order.
pub fn segments(machine: &Machine) -> Vec<Segment> {
    let delta = machine.config.generation.delta();
    let mut segments = delta.segments.to_vec();
    // The host-pin segment is added when the first device comes up.
    if delta.host_pin && has_device(machine) {
        segments.push(Segment { start: host_pin_start(machine), size: svm::HOST_PIN_SIZE });
    }
    segments
}

/// Whether any device has come up.
fn has_device(machine: &Machine) -> bool {
    machine.physical_ids().any(|id| machine.device(id).is_some_and(|device| device.known()))
}

/// Start of the host-pin segment.
pub fn host_pin_start(machine: &Machine) -> u64 {
    match machine.config.attachment {
        Attachment::Pcie => svm::HOST_PIN_START_PCIE,
        Attachment::Hccs => svm::HOST_PIN_START_HCCS,
    }
}

/// GET_MMAP_INFO. Needs no process object.
pub fn mmap_info(machine: &Machine, caller: &Caller, arg: &mut Arg) -> SvmResult {
    let mut para: svm::MmapInfo = arg.para();
    let segments = segments(machine);
    if (para.segments as usize) < segments.len() || para.array == 0 {
        return refuse(Errno::EINVAL, "there are more segments than the array has room for");
    }
    if caller.memory.write(para.array, segments.as_slice().as_bytes()).is_err() {
        return refuse(Errno::EINVAL, "the array of segments cannot be written");
    }
    para.segments = segments.len() as u32;
    put(arg, &para);
    Ok(())
}

impl Svm {
    /// ALLOC_PROC_STRUCT.
    pub(super) fn alloc_process(&mut self, _machine: &Machine, caller: &Caller, file: FileId) -> SvmResult {
        let Some(bound) = self.files.get_mut(&file) else {
            return refuse(Errno::EINVAL, "the file is not bound to the memory module");
        };
        if bound.called {
            return refuse(Errno::EALREADY, "this file has its process object already");
        }
        bound.called = true;
        self.last_process += 1;
        let id = ProcessId(self.last_process);
        bound.process = Some(id);
        self.processes.insert(id, Process::new(caller, bound.backing.clone()));
        Ok(())
    }

    /// mmap of a bound file. On success the front lets the kernel map it at the hint.
    pub fn mmap(&mut self, machine: &mut Machine, caller: &Caller, file: FileId, mmap: &Mmap) -> Result<(), Errno> {
        if mmap.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            return Err(Errno::EINVAL);
        }
        let private = mmap.flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        if private && mmap.flags & libc::MAP_NORESERVE == 0 {
            // Refused by the kernel's overcommit accounting before the driver is called.
            return Err(Errno::ENOMEM);
        }
        let id = self.files.get(&file).and_then(|bound| bound.process).ok_or(Errno::EINVAL)?;
        let process = self.processes.get_mut(&id).ok_or(Errno::EINVAL)?;
        let length = mmap.length.checked_next_multiple_of(page_size()).ok_or(Errno::ENOMEM)?;
        mmap.hint.checked_add(length).ok_or(Errno::ENOMEM)?;
        let vma =
            Vma { start: mmap.hint, size: length, tgid: caller.tgid, prot: mmap.prot, private, offset: mmap.offset };
        let segments = segments(machine);
        let Some(segment) = segments.get(process.next_segment) else {
            let answer = process.mmap_dynamic(machine, caller, mmap, vma);
            if process.doomed {
                self.kill(id);
            }
            return answer;
        };
        if !mmap.free || mmap.hint != segment.start || length != segment.size {
            return Err(Errno::EINVAL);
        }
        if process.stage != Stage::Made {
            // The driver records the mapping before it refuses it. When the kernel then removes it,
            // that looks like a munmap by the process, which ends a session that was initialised
            // without its first segment.
            if process.next_segment == 0 && process.stage == Stage::Session {
                self.kill(id);
            }
            return Err(Errno::ESRCH);
        }
        process.segments.insert(process.next_segment, vma);
        process.next_segment += 1;
        if process.next_segment == segments.len() {
            process.stage = Stage::Mapped;
        }
        Ok(())
    }

    /// INIT_PROCESS.
    pub(super) fn init_process(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        id: Option<ProcessId>,
        arg: &mut Arg,
    ) -> SvmResult {
        let Some((id, process)) = id.and_then(|id| Some((id, self.processes.get_mut(&id)?))) else {
            return refuse(Errno::EINVAL, "there is no process object on this file");
        };
        if !has_device(machine) {
            return refuse(Errno::ENODEV, "no device has come up yet");
        }
        if !matches!(process.stage, Stage::Made | Stage::Mapped) {
            return refuse(Errno::ESRCH, "the process object is initialised or unmapped already");
        }
        // The driver asks for the number of the caller's container, which only a container with a
        // device table has. INIT_PROCESS can be repeated on the same file.
        if !machine.is_admin(caller) && !machine.has_table(caller) {
            return refuse(Errno::EEXIST, "the container has no device table yet");
        }
        if self.sessions.contains_key(&caller.tgid) {
            process.refused = true;
            return refuse(Errno::EEXIST, "the process has a session on another file");
        }
        let delta = machine.config.generation.delta();
        let present = |number: usize| process.segments.get(&number).is_some_and(|vma| vma.tgid == caller.tgid);
        process.enabled = (0..delta.segments.len()).all(present);
        process.host_pin = delta.host_pin && present(delta.segments.len());
        process.stage = Stage::Session;
        process.tgid = caller.tgid;
        process.start_time = caller.start_time;
        process.refused = false;
        self.sessions.insert(caller.tgid, id);
        let mut para: svm::InitProcess = arg.para();
        para.svm_page_size = page_size().max(4096) as u32;
        para.host_page_size = page_size() as u32;
        para.huge_page_size = svm::HUGE_PAGE as u32;
        para.host_giant_page = machine.config.host_giant_pages.into();
        if Behaviour::of(machine.config.generation).reports_uvm_page {
            para.uvm_page_size = svm::HUGE_PAGE as u32;
        }
        put(arg, &para);
        Ok(())
    }

    /// Ends the host side of a session.
    pub(super) fn kill(&mut self, id: ProcessId) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        if process.stage != Stage::Session {
            return;
        }
        self.sessions.remove(&process.tgid);
        process.end_host_side(&mut self.world);
        if process.released {
            self.processes.remove(&id);
        }
    }

    /// The last reference to the file is gone. `alive` says whether the owning process still has
    /// its address space.
    pub fn release(&mut self, machine: &mut Machine, file: FileId, alive: bool) {
        let Some(id) = self.files.remove(&file).and_then(|bound| bound.process) else { return };
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.report_touches(machine);
        if process.stage == Stage::Session {
            // No mapping of the file is left. Unless the process unmapped the segments itself, its
            // address space is gone.
            if !alive || !process.segments.is_empty() {
                self.sessions.remove(&process.tgid);
                process.end_host_side(&mut self.world);
            }
        } else if process.stage != Stage::Unmapped {
            self.stuck += u32::from(process.refused);
            process.stage = Stage::Unmapped;
        }
        process.end_device_side(machine, &mut self.world);
        machine.traps.append(&mut self.world.traps);
        process.released = true;
        if process.stage == Stage::Unmapped {
            self.processes.remove(&id);
        }
        self.update_used(machine);
    }

    /// The address space of a process is gone: it exited, was killed or called exec.
    pub fn exit(&mut self, machine: &mut Machine, tgid: i32, start_time: u64) {
        if let Some(&id) = self.sessions.get(&tgid) {
            if let Some(process) = self.processes.get(&id).filter(|process| process.start_time == start_time) {
                process.report_touches(machine);
                self.kill(id);
                machine.traps.append(&mut self.world.traps);
            }
        }
        for process in self.processes.values_mut() {
            process.segments.retain(|_, vma| vma.tgid != tgid);
        }
    }
}

impl Process {
    /// mmap after all static segments have been mapped once: a range of the caller's choice from 24
    /// TiB on.
    fn mmap_dynamic(&mut self, machine: &mut Machine, caller: &Caller, mmap: &Mmap, vma: Vma) -> Result<(), Errno> {
        if !mmap.free || mmap.hint == 0 {
            // The kernel chooses an address far above 24 TiB. The model does not learn it, so the
            // range is not recorded; a heap there counts as one without a mapping.
            return Ok(());
        }
        if vma.start < svm::DYNAMIC_START {
            return Err(Errno::EINVAL);
        }
        let below = self.dynamics.range(..vma.end()).next_back();
        if let Some((&start, dynamic)) = below.filter(|(start, dynamic)| **start + dynamic.size > vma.start) {
            // When the kernel undoes the mmap, that looks to the driver like a munmap of the range
            // under the heap.
            let same = start == vma.start && dynamic.size == vma.size;
            self.doomed |= same && self.heap(start).is_some();
            return Err(Errno::EINVAL);
        }
        if self.stage == Stage::Session && self.tgid != caller.tgid {
            let detail = format!(
                "mmap of {:#x} bytes at {:#x} on the memory file of process {}: the owner's host mappings there \
                 would be made in this process",
                vma.size, vma.start, self.tgid
            );
            machine.traps.push(Trap { name: "dynamic-mmap-by-stranger", tgid: caller.tgid, detail });
        }
        self.dynamics.insert(vma.start, Dynamic { size: vma.size, vma: Some(vma) });
        Ok(())
    }
}

impl Call<'_, '_> {
    /// Reports a SETUP_DEVICE that never returns: it tells the device about every heap, and counts
    /// them in a number that is too small for one beyond 80 TiB.
    fn find_endless_setup(&mut self) {
        let most = Behaviour::of(self.machine.config.generation).setup_heaps;
        let index = |address: u64| (address - svm::SVM_START) / svm::HEAP_UNIT;
        if let Some(heap) = self.process.heaps.values().find(|heap| index(heap.end() - 1) >= most) {
            let detail = format!(
                "SETUP_DEVICE while a heap of {:#x} bytes is enabled at {:#x}: the kernel counts heaps in 16 bits, \
                 and never gets to the last",
                heap.size, heap.start
            );
            self.machine.traps.push(Trap { name: "setup-beyond-80-tib", tgid: self.caller.tgid, detail });
        }
    }

    /// SETUP_DEVICE: connects the session to its process on the device.
    pub(super) fn setup_device(&mut self, arg: &mut Arg) -> SvmResult {
        let physical = self.physical;
        if physical == HOST || physical == HOST_AGENT_ID {
            return refuse(Errno::EFAULT, "the host is not set up");
        }
        if !self.process.agents.contains_key(&physical) {
            if self.machine.device(physical).is_some_and(|device| device.phase == Phase::Resetting) {
                return refuse(Errno::EBUSY, "the device is about to be reset");
            }
            match agent::link(self.machine, physical, self.caller.arrived) {
                Ok(()) => {}
                Err(Stop::Sleep(until)) => return Err(Stop::Sleep(until)),
                Err(Stop::Number(_)) => {}
                Err(Stop::Refused(..)) => return refuse(Errno::EFAULT, "the device did not answer the setup message"),
            }
            let Some(pid) = self.machine.companion(self.process.tgid, physical) else {
                self.machine.refused_setups.insert((self.process.tgid, physical));
                return refuse(Errno::EFAULT, "no process runs on the device for the caller");
            };
            self.machine.refused_setups.remove(&(self.process.tgid, physical));
            self.find_endless_setup();
            let agent = Agent { pid, allows_async: true, handles: HandleTable::default(), plain: BTreeSet::new() };
            self.process.agents.insert(physical, agent);
        }
        let mut para: svm::SetupDevice = arg.para();
        // The capabilities are made up, like those of the stub device that the real driver was run
        // with.
        para.dvpp_size = 4 << 30;
        para.bar_memory = 1;
        para.support_dev_read_only = 1;
        para.device_memory_on_host = 1;
        para.bar_huge_memory = 1;
        para.host_support_pin_user_pages_interface = 1;
        para.support_host_rw_dev_ro = 1;
        para.support_host_pin_pre_register = 0;
        para.support_host_mem_pool = 0;
        para.double_pgtable_offset = 0;
        para.giant_page = u32::from(self.machine.config.giant_pages);
        para.support_remote_mmap = 1;
        para.support_shmem_map_exbus = u32::from(self.machine.config.share_over_external_bus);
        if self.machine.config.generation.delta().host_pin {
            para.host_uva = 0;
        }
        put(arg, &para);
        Ok(())
    }

    /// PREPARE_CLOSE_DEVICE: waits a second for asynchronous copies that run, and refuses new ones
    /// from then on.
    pub(super) fn prepare_close_device(&mut self) -> SvmResult {
        if self.process.tasks.is_running(&self.world.holds, self.physical) {
            let (now, given_up) = (Instant::now(), self.caller.arrived + Duration::from_secs(1));
            if now < given_up {
                return Err(Stop::Sleep(given_up.min(now + Duration::from_millis(10))));
            }
            return refuse(Errno::EBUSY, "asynchronous copies of the device run");
        }
        if let Some(agent) = self.process.agents.get_mut(&self.physical) {
            agent.allows_async = false;
        }
        Ok(())
    }

    /// CLOSE_DEVICE: removes mapping records, shares and handles of the device. Counters of
    /// reservations are not decremented.
    pub(super) fn close_device(&mut self) -> SvmResult {
        let physical = self.physical;
        if physical == HOST || physical == HOST_AGENT_ID {
            return Ok(());
        }
        if self.process.tasks.is_running(&self.world.holds, physical) {
            return refuse(Errno::EBUSY, "asynchronous copies of the device run");
        }
        if self.process.agents.contains_key(&physical) {
            // The host polls until the device reports the process gone. It gives up on a device
            // that does not answer.
            if let Err(Stop::Sleep(until)) = agent::link(self.machine, physical, self.caller.arrived) {
                return Err(Stop::Sleep(until));
            }
        }
        let heaps: Vec<u64> = self.process.heaps.keys().copied().collect();
        for start in heaps {
            let Some(heap) = self.process.heaps.get_mut(&start) else { continue };
            let gone: Vec<u64> = heap
                .mappings
                .values()
                .filter(|mapping| mapping.side == svm::SIDE_DEVICE && mapping.physical == physical)
                .map(|mapping| mapping.start)
                .collect();
            let gone: Vec<_> = gone.iter().filter_map(|start| heap.mappings.remove(start)).collect();
            let of_device = heap.plain.values_mut().filter(|run| run.physical == physical);
            let plain: Vec<_> = of_device.filter_map(|run| run.view.take()).collect();
            for view in gone.iter().filter_map(|mapping| mapping.view).chain(plain) {
                self.process.hide(self.world, view);
            }
        }
        let nodes = self.process.nodes.range((physical, i32::MIN)..=(physical, i32::MAX));
        for key in nodes.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(node) = self.process.nodes.remove(&key) {
                self.world.shares.put(&mut self.world.store, node, physical, self.process.tgid, false);
            }
        }
        self.process.end_registrations(physical);
        self.process.end_conversions(physical);
        self.world.names.forget(self.process.tgid, Some(physical));
        for heap in self.process.heaps.values_mut() {
            heap.opened.retain(|_, opened| opened.physical != physical);
        }
        self.process.end_agent(self.machine, self.world, physical);
        Ok(())
    }
}
