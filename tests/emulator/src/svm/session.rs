//! A session's life: ALLOC_PROC_STRUCT, the segments' mmap, INIT_PROCESS, SETUP_DEVICE and CLOSE_DEVICE, and the two ends.
//!
//! The host's side of a session hangs on the *address space* of its process: it ends when that goes, or when the process unmaps a segment by itself. The
//! device's side hangs on the *file*: it ends when the last reference to that goes. A session whose file is closed while its address space lives (one
//! that never mapped the segments) stays in the way of the next one. See `common/svm_module_ops.c`, `svm_proc_mng.c` and `svm_mmu_notifier.c` in
//! the driver's `src/sdk_driver/svm/v2`.

use super::agent::{self, Agent};
use super::behaviour::Behaviour;
use super::copy::Tasks;
use super::handle::{HandleKind, HandleTable};
use super::heap::Heap;
use super::share::Node;
use super::store::{BlockId, WindowId};
use super::{Answer, Call, ProcessId, Stop, Svm, World, page_size, put, refuse};
use crate::caller::Caller;
use crate::config::{Attachment, Phase};
use crate::driver::{FileId, Mmap};
use crate::machine::{HOST, Machine};
use ascend_ioctl::svm::{self, Arg, HOST_AGENT_ID, Segment};
use nix::errno::Errno;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Where a process object is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// ALLOC_PROC_STRUCT was done, segments may be mapped.
    Made,
    /// All segments are mapped.
    Mapped,
    /// INIT_PROCESS was done.
    Session,
    /// The address space is gone, or the process unmapped what it must not.
    Unmapped,
}

/// A mapping of the module's file in a process.
#[derive(Debug, Clone, Copy)]
pub struct Vma {
    pub start: u64,
    pub size: u64,
    /// The process that made it: it is that one's address space.
    pub tgid: i32,
    pub prot: i32,
    /// MAP_PRIVATE: nothing can be put into it.
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
    /// `None` for a heap that was enabled where nothing is mapped.
    pub vma: Option<Vma>,
}

/// A range of the client's file that shows memory.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub block: BlockId,
    pub window: WindowId,
    /// In the client's file.
    pub offset: u64,
}

/// A process object.
pub struct Process {
    pub stage: Stage,
    /// Who did INIT_PROCESS; before that, who did ALLOC_PROC_STRUCT.
    pub tgid: i32,
    pub start_time: u64,
    pub backing: Arc<File>,
    /// Static segments that were mapped so far.
    pub next_segment: usize,
    /// Those that are still mapped, by their number.
    pub segments: BTreeMap<usize, Vma>,
    pub dynamics: BTreeMap<u64, Dynamic>,
    /// Whether host memory can be mapped: all segments but the host-pin one were there at INIT_PROCESS.
    pub enabled: bool,
    /// The host-pin segment was there at INIT_PROCESS.
    pub host_pin: bool,
    /// INIT_PROCESS answered EEXIST once.
    pub refused: bool,
    /// The driver took something that it did itself for the process unmapping its segments.
    pub doomed: bool,
    /// The file is closed.
    pub released: bool,
    pub translated: HashMap<u32, u32>,
    pub heaps: BTreeMap<u64, Heap>,
    /// What was taken of the host-pin segment.
    pub pinned: BTreeMap<u64, u64>,
    pub host: HandleTable,
    pub agents: BTreeMap<u32, Agent>,
    /// Handles that are shared, by the device (65 for the host) and id that this process knows them by.
    pub nodes: BTreeMap<(u32, i32), Node>,
    pub tasks: Tasks,
    /// Ranges of the file that show memory, by their offset, with their length.
    pub windows: BTreeMap<u64, u64>,
    /// Views that outlive their mapping (see [`Call::set_access`]).
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
            tasks: Tasks::default(),
            windows: BTreeMap::new(),
            orphans: Vec::new(),
        }
    }

    /// Whether the caller may use the session.
    pub fn belongs_to(&self, caller: &Caller) -> bool {
        self.stage == Stage::Session && self.tgid == caller.tgid
    }

    /// The mapping that host pages would be put into.
    pub fn vma(&self, address: u64) -> Option<&Vma> {
        if address >= svm::DYNAMIC_START {
            let (_, dynamic) = self.dynamics.range(..=address).next_back()?;
            return dynamic.vma.as_ref().filter(|vma| vma.contains(address));
        }
        // The record of static mappings is only kept in a session that has all of them.
        let vma = self.segments.get(&0).filter(|_| self.enabled)?;
        vma.contains(address).then_some(vma)
    }

    /// Whether an address is the module's business in this process.
    pub fn is_svm(&self, address: u64) -> bool {
        if address >= svm::DYNAMIC_START {
            let below = self.dynamics.range(..=address).next_back();
            return below.is_some_and(|(&start, dynamic)| address < start + dynamic.size);
        }
        address >= svm::SVM_START
    }

    /// Shows a block at an address of the client. `None` if there is no mapping to show it in.
    pub fn show(&mut self, world: &mut World, block: BlockId, address: u64, size: u64) -> Option<Result<View, Errno>> {
        let vma = *self.vma(address)?;
        if vma.private {
            return Some(Err(Errno::ENOMEM));
        }
        let offset = vma.offset + (address - vma.start);
        // Two dynamic mappings both begin at the beginning of the client's file.
        if self.windows.range(..offset + size).next_back().is_some_and(|(&start, &length)| start + length > offset) {
            return Some(Err(Errno::ELOOP));
        }
        Some(world.store.show(block, self.backing.clone(), offset, size).map(|window| {
            self.windows.insert(offset, size);
            View { block, window, offset }
        }))
    }

    /// Ends a view.
    pub fn hide(&mut self, world: &mut World, view: View) {
        self.windows.remove(&view.offset);
        world.store.hide(view.block, view.window);
    }

    /// The address space is gone, or as good as: mappings end, and host memory that is not shared is freed.
    pub fn end_host_side(&mut self, world: &mut World) {
        // Memory that goes needs no carrying out of its windows: it goes first.
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
        self.stage = Stage::Unmapped;
    }

    /// The file is gone: agents end with all their memory, and shares lose this holder.
    pub fn end_device_side(&mut self, machine: &mut Machine, world: &mut World) {
        for physical in self.agents.keys().copied().collect::<Vec<_>>() {
            self.end_agent(machine, world, physical);
        }
        for (key, node) in std::mem::take(&mut self.nodes) {
            world.shares.put(&mut world.store, node, key.0, self.tgid, true);
        }
        self.tasks = Tasks::default();
    }

    /// A device process ends with the memory that only it held.
    pub fn end_agent(&mut self, machine: &mut Machine, world: &mut World, physical: u32) {
        if let Some(mut agent) = self.agents.remove(&physical) {
            agent::part(machine, self.tgid, physical);
            for handle in agent.handles.drain() {
                if handle.kind == HandleKind::Normal {
                    world.store.free(handle.block);
                }
            }
        }
    }
}

/// The segments that a process maps, in order.
pub fn segments(machine: &Machine) -> Vec<Segment> {
    let delta = machine.config.generation.delta();
    let mut segments = delta.segments.to_vec();
    // The host-pin range joins when the first device comes up.
    if delta.host_pin && has_device(machine) {
        segments.push(Segment { start: host_pin_start(machine), size: svm::HOST_PIN_SIZE });
    }
    segments
}

/// Whether any device has come up.
fn has_device(machine: &Machine) -> bool {
    machine.physical_ids().any(|id| machine.device(id).is_some_and(|device| device.known()))
}

/// Where the host-pin segment is.
pub fn host_pin_start(machine: &Machine) -> u64 {
    match machine.config.attachment {
        Attachment::Pcie => svm::HOST_PIN_START_PCIE,
        Attachment::Hccs => svm::HOST_PIN_START_HCCS,
    }
}

/// GET_MMAP_INFO: needs no state at all.
pub fn mmap_info(machine: &Machine, caller: &Caller, arg: &mut Arg) -> Answer {
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
    pub(super) fn alloc_process(&mut self, _machine: &Machine, caller: &Caller, file: FileId) -> Answer {
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

    /// mmap of a bound file. On success the front lets the kernel do it at the hint.
    pub fn mmap(&mut self, machine: &mut Machine, caller: &Caller, file: FileId, mmap: &Mmap) -> Result<(), Errno> {
        if mmap.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            return Err(Errno::EINVAL);
        }
        let private = mmap.flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        if private && mmap.flags & libc::MAP_NORESERVE == 0 {
            // Overcommit accounting refuses it before the driver is asked.
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
            return process.mmap_dynamic(machine, caller, mmap, vma);
        };
        if !mmap.free || mmap.hint != segment.start || length != segment.size {
            return Err(Errno::EINVAL);
        }
        if process.stage != Stage::Made {
            // A session that began without its first segment is spoilt by this: the driver recorded the mapping before it refused it, and when
            // the kernel takes it away again, that looks like the process unmapping it.
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
    ) -> Answer {
        let Some((id, process)) = id.and_then(|id| Some((id, self.processes.get_mut(&id)?))) else {
            return refuse(Errno::EINVAL, "there is no process object on this file");
        };
        if !has_device(machine) {
            return refuse(Errno::ENODEV, "no device has come up yet");
        }
        if !matches!(process.stage, Stage::Made | Stage::Mapped) {
            return refuse(Errno::ESRCH, "the process object is initialised already, or unmapped");
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
        para.host_giant_page = 0;
        if Behaviour::of(machine.config.generation).reports_uvm_page {
            para.uvm_page_size = svm::HUGE_PAGE as u32;
        }
        put(arg, &para);
        Ok(())
    }

    /// The host's side of a session ends.
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

    /// The last reference to the file is gone. `alive` tells whether the process that it belongs to still has its address space.
    pub fn release(&mut self, machine: &mut Machine, file: FileId, alive: bool) {
        let Some(id) = self.files.remove(&file).and_then(|bound| bound.process) else { return };
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.report_touches(machine);
        if process.stage == Stage::Session {
            // No mapping of the file is left. If the process did not unmap them, its address space is gone.
            if !alive || !process.segments.is_empty() {
                self.sessions.remove(&process.tgid);
                process.end_host_side(&mut self.world);
            }
        } else if process.stage != Stage::Unmapped {
            self.stuck += u32::from(process.refused);
            process.stage = Stage::Unmapped;
        }
        process.end_device_side(machine, &mut self.world);
        process.released = true;
        if process.stage == Stage::Unmapped {
            self.processes.remove(&id);
        }
        self.tell_used(machine);
    }

    /// The address space of a process is gone: it exited, was killed or did exec.
    pub fn exit(&mut self, machine: &mut Machine, tgid: i32, start_time: u64) {
        if let Some(&id) = self.sessions.get(&tgid) {
            if let Some(process) = self.processes.get(&id).filter(|process| process.start_time == start_time) {
                process.report_touches(machine);
                self.kill(id);
            }
        }
        for process in self.processes.values_mut() {
            process.segments.retain(|_, vma| vma.tgid != tgid);
        }
    }
}

impl Process {
    /// mmap when all static segments have been mapped once: a range of the caller's choice from 24 TiB on.
    fn mmap_dynamic(&mut self, machine: &mut Machine, caller: &Caller, mmap: &Mmap, vma: Vma) -> Result<(), Errno> {
        if !mmap.free || mmap.hint == 0 {
            // The kernel chooses a place, far above 24 TiB. Where is not known here, so the range is not recorded; a heap there is one without mapping.
            return Ok(());
        }
        if vma.start < svm::DYNAMIC_START {
            return Err(Errno::EINVAL);
        }
        let below = self.dynamics.range(..vma.end()).next_back();
        if below.is_some_and(|(&start, dynamic)| start + dynamic.size > vma.start) {
            return Err(Errno::EINVAL);
        }
        if self.stage == Stage::Session && self.tgid != caller.tgid {
            let detail = format!(
                "mmap of {:#x} bytes at {:#x} on the memory file of process {}: the owner's host mappings there would go into this process",
                vma.size, vma.start, self.tgid
            );
            machine.traps.push(crate::trap::Trap { name: "dynamic-mmap-by-stranger", tgid: caller.tgid, detail });
        }
        self.dynamics.insert(vma.start, Dynamic { size: vma.size, vma: Some(vma) });
        Ok(())
    }
}

impl Call<'_, '_> {
    /// SETUP_DEVICE: makes the device's process known to the session.
    pub(super) fn setup_device(&mut self, arg: &mut Arg) -> Answer {
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
                Err(Stop::Refused(..)) => return refuse(Errno::EFAULT, "the device did not answer the setup message"),
            }
            let Some(pid) = self.machine.companion(self.process.tgid, physical) else {
                return refuse(Errno::EFAULT, "no process runs on the device for the caller");
            };
            let agent = Agent { pid, allows_async: true, handles: HandleTable::default() };
            self.process.agents.insert(physical, agent);
        }
        let mut para: svm::SetupDevice = arg.para();
        // The capabilities are made up, after those of the stand-in device that the real driver was run with.
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
        para.giant_page = 1;
        para.support_remote_mmap = 1;
        para.support_shmem_map_exbus = 0;
        if self.machine.config.generation.delta().host_pin {
            para.host_uva = 0;
        }
        put(arg, &para);
        Ok(())
    }

    /// PREPARE_CLOSE_DEVICE: no asynchronous copies from here on. Ours are done when they are submitted, so none can be pending.
    pub(super) fn prepare_close_device(&mut self) -> Answer {
        if let Some(agent) = self.process.agents.get_mut(&self.physical) {
            agent.allows_async = false;
        }
        Ok(())
    }

    /// CLOSE_DEVICE: mapping records, shares and handles of the device go. The reservations' counters are not given back.
    pub(super) fn close_device(&mut self) -> Answer {
        let physical = self.physical;
        if physical == HOST || physical == HOST_AGENT_ID {
            return Ok(());
        }
        if self.process.agents.contains_key(&physical) {
            // The host asks until the device says that the process is gone. A device that will never answer is given up.
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
            for view in gone.iter().filter_map(|mapping| mapping.view) {
                self.process.hide(self.world, view);
            }
        }
        let nodes = self.process.nodes.range((physical, i32::MIN)..=(physical, i32::MAX));
        for key in nodes.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(node) = self.process.nodes.remove(&key) {
                self.world.shares.put(&mut self.world.store, node, physical, self.process.tgid, false);
            }
        }
        self.process.end_agent(self.machine, self.world, physical);
        Ok(())
    }
}
