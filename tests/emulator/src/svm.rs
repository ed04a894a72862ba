//! The memory driver, SVM v2 ("devmm").
//!
//! A file that is bound to this module gets one *process object* (ALLOC_PROC_STRUCT), which becomes
//! a *session* when its owner calls INIT_PROCESS; a process has at most one session. A session has
//! heaps (address ranges with a kind), reservations in heaps, handles of physical memory, mappings
//! of handles into reservations, and shares. Host memory belongs to the session. Device memory
//! belongs to an agent, a process on the device; its checks are inferred from code that the driver
//! shares with it.
//!
//! [`Svm::ioctl`] is the driver's dispatcher (`devmm_svm_ioctl`): what it checks, in which order,
//! and what it copies. The handlers are in the modules below, one per noun.

mod address_space;
mod advise;
mod agent;
mod behaviour;
mod convert;
mod copy;
mod handle;
mod heap;
mod klog;
mod mapping;
mod memory_state;
mod named;
mod pause;
mod plain;
mod race;
mod ranges;
mod register;
mod session;
mod share;
mod store;
#[cfg(test)]
mod tests;

pub use memory_state::{HandleState, HeapState, MappingState, SessionState, ShareState, SvmState};

use crate::caller::{Caller, Outcome};
use crate::driver::FileId;
use crate::machine::{HOST, Machine};
use crate::trap::Trap;
use ascend_ioctl::Generation;
use ascend_ioctl::command;
use ascend_ioctl::svm::{self, Arg, Op, SvmCommand};
use behaviour::Behaviour;
pub use behaviour::is_modelled;
use handle::HandleKind;
use named::Names;
use nix::errno::Errno;
use pause::{Holds, Pace};
use session::Process;
use share::Shares;
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::Store;
use zerocopy::{FromZeros, IntoBytes};

/// How often bytes are copied between windows on the same memory while the driver is not called.
const SETTLING: Duration = Duration::from_millis(1);

/// How long this may take each time: a call that arrives meanwhile waits so long.
const SETTLING_TIME: Duration = Duration::from_micros(200);

/// Why a command that is not modelled is refused.
const NOT_MODELLED: &str = "the emulated driver does not have this feature";

/// Why a command did not complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// Refused, with the reason for the kernel-log page.
    Refused(Errno, &'static str),
    /// Refused with a positive number, which ioctl(2) returns.
    Number(i64),
    /// It sleeps in the kernel until then. Nothing has changed yet.
    Sleep(Instant),
}

type SvmResult<T = ()> = Result<T, Stop>;

/// The answer when a check fails.
fn refuse<T>(errno: Errno, why: &'static str) -> SvmResult<T> {
    Err(Stop::Refused(errno, why))
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Stop::Refused(errno, "the memory could not be accessed")
    }
}

/// Identity of a process object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct ProcessId(u64);

/// A file that is bound to the module.
struct Bound {
    /// What the client's mappings of the file show.
    backing: Arc<File>,
    /// ALLOC_PROC_STRUCT was called.
    called: bool,
    process: Option<ProcessId>,
}

/// What all sessions share.
#[derive(Default)]
struct World {
    store: Store,
    shares: Shares,
    names: Names,
    holds: Holds,
    /// References to the host's device object that copies of host memory imported on a device took
    /// and did not give back.
    leaked: u32,
    /// Found where they could not be reported yet.
    traps: Vec<Trap>,
}

/// State of the SVM module: every process's session and every share.
#[derive(Default)]
pub struct Svm {
    files: HashMap<FileId, Bound>,
    processes: HashMap<ProcessId, Process>,
    /// Sessions by process, for EEXIST and the address-space hooks.
    sessions: HashMap<i32, ProcessId>,
    world: World,
    last_process: u64,
    /// Number of process objects that the kernel can never release: their files were closed after
    /// INIT_PROCESS had returned EEXIST.
    stuck: u32,
    /// When bytes are next copied between windows.
    settled: Option<Instant>,
    /// The commands by number.
    commands: Vec<Option<&'static SvmCommand>>,
}

/// A command of a session while it runs.
struct Call<'a, 'm> {
    machine: &'a mut Machine,
    caller: &'a Caller<'m>,
    world: &'a mut World,
    process: &'a mut Process,
    /// `head.devid` as the caller passed it.
    logical: u32,
    /// The physical id, for commands that convert it.
    physical: u32,
    pace: Pace,
}

impl Svm {
    /// Binds a file to the module. `backing` is the memfd that the client's mappings show: bytes at
    /// offset `va - segment start` are what its CPU sees.
    pub fn open(&mut self, file: FileId, _caller: &Caller, backing: File) {
        self.files.insert(file, Bound { backing: Arc::new(backing), called: false, process: None });
    }

    /// An ioctl on a bound file.
    pub fn ioctl(&mut self, machine: &mut Machine, caller: &Caller, file: FileId, request: u32, arg: u64) -> Outcome {
        let mut argument = Arg::new_zeroed();
        self.free_of_ended_agents(machine);
        let answer = self.dispatch(machine, caller, file, request, arg, &mut argument);
        self.update_used(machine);
        match answer {
            Ok(()) => {
                if let Some(known) = self.command(machine, command::number(request)) {
                    klog::note(caller, known.op, &argument);
                }
                Ok(0).into()
            }
            Err(Stop::Sleep(until)) => Outcome::Sleep(until),
            Err(Stop::Number(number)) => Ok(number).into(),
            Err(Stop::Refused(errno, why)) => {
                let known = self.command(machine, command::number(request));
                klog::refusal(caller, known, request, &argument, errno, why);
                errno.into()
            }
        }
    }

    /// Frees memory that was held only by a device process that has ended. The host's records stay
    /// until the device is closed.
    fn free_of_ended_agents(&mut self, machine: &Machine) {
        self.free_unheld();
        for process in self.processes.values_mut() {
            let tgid = process.tgid;
            for (&physical, agent) in &mut process.agents {
                if !(agent.handles.is_empty() && agent.plain.is_empty())
                    && machine.device_process(tgid, physical) != Some(agent.pid)
                {
                    for block in std::mem::take(&mut agent.plain) {
                        self.world.store.free(block);
                    }
                    for handle in agent.handles.drain().filter(|handle| handle.kind == HandleKind::Normal) {
                        self.world.store.free(handle.block);
                    }
                }
            }
        }
    }

    /// Frees memory of ended shares that no other server of the pod holds any more. Every command
    /// does so.
    pub fn free_unheld(&mut self) {
        self.world.shares.free_unheld(&mut self.world.store);
    }

    /// Updates the devices' own count of used memory, which URD reports.
    fn update_used(&self, machine: &mut Machine) {
        for (physical, used) in self.world.store.used_by_pool() {
            if let Some(device) = machine.device_mut(physical) {
                device.used = used;
            }
        }
    }

    /// The command with a number, if this generation has it.
    fn command(&mut self, machine: &Machine, number: u8) -> Option<&'static SvmCommand> {
        if self.commands.is_empty() {
            let generation: Generation = machine.config.generation;
            self.commands = (0..=u8::MAX).map(|number| generation.svm_by_number(number)).collect();
        }
        self.commands.get(usize::from(number)).copied().flatten()
    }

    fn dispatch(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        file: FileId,
        request: u32,
        address: u64,
        arg: &mut Arg,
    ) -> SvmResult {
        let number = command::number(request);
        let delta = machine.config.generation.delta();
        let behaviour = Behaviour::of(machine.config.generation);
        let Some(bound) = self.files.get(&file) else {
            return refuse(Errno::EINVAL, "the file is not bound to the memory module");
        };
        let process = bound.process;
        if address == 0 {
            return refuse(Errno::EINVAL, "the argument is a null pointer");
        }
        if command::magic(request) != svm::MAGIC || number >= delta.svm_numbers {
            machine.logged_refusals += 1;
            return refuse(Errno::EINVAL, "no such command");
        }
        if command::writes(request) && caller.memory.read(address, arg.as_mut_bytes()).is_err() {
            return refuse(Errno::EINVAL, "the argument cannot be read");
        }
        // The driver copies the argument in once, however long the command takes.
        let paused = process.and_then(|id| self.processes.get(&id)).and_then(|it| it.paused.get(&caller.tid));
        if let Some(paused) = paused {
            *arg = paused.arg;
        }
        let known = self.command(machine, number);
        let telling =
            matches!(known, Some(known) if matches!(known.op, Op::AllocProcStruct | Op::GetMmapInfo | Op::MemMapCap));
        if machine.config.unknown_generation && telling {
            return refuse(Errno::EINVAL, "no such command");
        }
        match known.map(|known| known.op) {
            Some(Op::AllocProcStruct) => self.alloc_process(machine, caller, file)?,
            Some(Op::GetMmapInfo) => session::mmap_info(machine, caller, arg)?,
            _ => {
                if number < delta.svm_private_numbers {
                    let is_init = Some(request) == svm::stable(Op::InitProcess);
                    let process = process.and_then(|id| self.processes.get(&id));
                    if process.is_none_or(|process| !is_init && !process.belongs_to(caller)) {
                        return refuse(Errno::EINVAL, "the calling process has no session on this file");
                    }
                }
                let Some(known) = known.filter(|known| behaviour.handles(known.op)) else {
                    return refuse(Errno::EOPNOTSUPP, "this driver has no handler for the command");
                };
                let answer = self.handle(machine, caller, process, known, arg);
                if let Some(id) = process.filter(|id| self.processes.get(id).is_some_and(|process| process.doomed)) {
                    self.kill(id);
                }
                answer?;
            }
        }
        // The command stays done even if the answer cannot be copied out.
        if command::reads(request) && caller.memory.write(address, arg.as_bytes()).is_err() {
            return refuse(Errno::EINVAL, "the answer cannot be written; the command was carried out");
        }
        Ok(())
    }

    /// Converts the device id and runs the handler.
    fn handle(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        id: Option<ProcessId>,
        known: &SvmCommand,
        arg: &mut Arg,
    ) -> SvmResult {
        let passed = *arg;
        let logical = arg.head.device;
        let mut physical = logical;
        if behaviour::converts_device_id(known.op) {
            let process = id.and_then(|id| self.processes.get_mut(&id));
            physical = to_physical(machine, caller, process, logical)?;
            arg.head.logical = logical;
            arg.head.device = physical;
        }
        if known.op == Op::InitProcess {
            return self.init_process(machine, caller, id, arg);
        }
        // In 9.0.0 its number is above those that need a session.
        if known.op == Op::MemMapCap {
            return advise::map_capability(arg);
        }
        let Some(process) = id.and_then(|id| self.processes.get_mut(&id)) else {
            return refuse(Errno::EINVAL, "the calling process has no session on this file");
        };
        let world = &mut self.world;
        let paused = process.enter(&world.holds, known.op, caller.tid)?;
        let pace = Call::pace(&world.holds, machine.config.copy_time, known.op, paused.as_ref());
        let mut call = Call { machine, caller, world, process, logical, physical, pace };
        let answer = call.pause_before().and_then(|()| call.carry_out(known.op, arg)).and_then(|()| call.pause_after());
        call.keep_paused(passed, matches!(answer, Err(Stop::Sleep(_))));
        machine.traps.append(&mut world.traps);
        answer
    }

    /// A copy that a device makes for a stream of the caller.
    pub(crate) fn stream_copy(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        device: u32,
        destination: u64,
        source: u64,
        size: u64,
    ) -> Result<(), Errno> {
        let id = self.sessions.get(&caller.tgid).copied();
        let process = id.and_then(|id| self.processes.get_mut(&id)).ok_or(Errno::ESRCH)?;
        let world = &mut self.world;
        let pace = Call::pace(&world.holds, Duration::ZERO, Op::Memcpy, None);
        let mut call = Call { machine, caller, world, process, logical: device, physical: device, pace };
        let answer = call.stream_copy(destination, source, size);
        machine.traps.append(&mut world.traps);
        match answer {
            Ok(()) => Ok(()),
            Err(Stop::Refused(errno, _)) => Err(errno),
            Err(_) => Err(Errno::EIO),
        }
    }

    /// The holds of tests.
    pub(crate) fn holds(&mut self) -> &mut Holds {
        &mut self.world.holds
    }

    /// Copies bytes between windows on the same memory, a part at a time. Call it every millisecond
    /// while [`Svm::is_aliased`]; more frequent calls do nothing.
    pub fn settle_windows(&mut self, machine: &mut Machine) {
        if !self.is_aliased() {
            return;
        }
        let now = Instant::now();
        if self.settled.is_none_or(|next| now >= next) {
            self.world.store.settle(now + SETTLING_TIME);
            for process in self.processes.values() {
                for view in process.parts.values().chain(&process.orphans) {
                    process.find_violation(&mut self.world, view);
                }
            }
            machine.traps.append(&mut self.world.traps);
            // Most of the time is for calls, also when the machine is slow.
            self.settled = Some(Instant::now() + SETTLING.max(4 * now.elapsed()));
        }
    }

    /// Whether CPUs see some memory at more than one address.
    pub fn is_aliased(&self) -> bool {
        self.world.store.is_aliased()
    }

    /// Bytes in use on a device, or on the host (65).
    pub fn used(&self, physical: u32) -> u64 {
        self.world.store.used(physical)
    }
}

impl Call<'_, '_> {
    /// Runs the handler of a command.
    fn carry_out(&mut self, op: Op, arg: &mut Arg) -> SvmResult {
        self.add_touched_pages();
        match op {
            Op::SetupDevice => self.setup_device(arg),
            Op::PrepareCloseDevice => self.prepare_close_device(),
            Op::CloseDevice => self.close_device(),
            Op::UpdateHeap => self.update_heap(arg),
            Op::Alloc => self.alloc(arg),
            Op::FreePages => self.free_pages(arg),
            Op::MemCreate => self.mem_create(arg),
            Op::MemRelease => self.mem_release(arg),
            Op::MemHandleSetAttr => self.handle_set_attr(arg),
            Op::MemHandleGetAttr => self.handle_get_attr(arg),
            Op::MemMap => self.mem_map(arg),
            Op::MemUnmap => self.mem_unmap(arg),
            Op::MemQueryOwner => self.query_owner(arg),
            Op::MemSetAccess => self.set_access(arg),
            Op::MemGetAccess => self.get_access(arg),
            Op::ReserveAddrInfoQuery => self.reserve_address_info(arg),
            Op::MemExport => self.mem_export(arg),
            Op::MemImport => self.mem_import(arg),
            Op::MemSetPid => self.mem_set_pid(arg),
            Op::MemSetAttr => self.mem_set_attr(arg),
            Op::MemGetAttr => self.mem_get_attr(arg),
            Op::MemGetInfo => self.mem_get_info(arg),
            Op::Memcpy => self.memcpy(arg),
            Op::Memcpy2d => self.memcpy_2d(arg),
            Op::MemcpyBatch => self.memcpy_batch(arg),
            Op::AsyncMemcpy => self.async_memcpy(arg),
            Op::MemcpyResultRefresh => self.refresh(arg),
            Op::Memset8 => self.memset(arg),
            Op::Advise => self.advise(arg),
            Op::Prefetch => self.prefetch(arg),
            Op::QueryMemUsedInfo => self.query_used(arg),
            Op::CheckMemInfo => self.check_info(arg),
            Op::DbgVaStatus => self.address_status(arg),
            Op::ProcessStatusQuery => self.process_status(arg),
            Op::MapDevReserve => self.map_registers(arg),
            Op::ConvertAddr => self.convert_addr(arg),
            Op::DestroyAddr => self.destroy_addr(arg),
            Op::DestroyAddrBatch => self.destroy_addr_batch(arg),
            Op::SubmitConvertCopy => self.submit_converted(arg),
            Op::WaitConvertCopy => self.wait_converted(arg),
            Op::Translate => self.translate(arg),
            Op::RegisterDma => self.register_dma(arg),
            Op::UnregisterDma => self.unregister_dma(arg),
            Op::MemRemoteMap => self.remote_map(arg),
            Op::MemRemoteUnmap => self.remote_unmap(arg),
            Op::IpcMemCreate => self.ipc_create(arg),
            Op::IpcMemDestroy => self.ipc_destroy(arg),
            Op::IpcMemOpen => self.ipc_open(arg),
            Op::IpcMemClose => self.ipc_close(arg),
            Op::IpcMemQuery => self.ipc_query(arg),
            Op::IpcMemSetPid => self.ipc_set_pid(arg),
            Op::IpcMemSetPidPod => self.ipc_set_pid_pod(arg),
            Op::IpcMemSetAttr => self.ipc_set_attr(arg),
            Op::IpcMemGetAttr => self.ipc_get_attr(arg),
            // See `is_modelled`. This answer is made up.
            _ => refuse(Errno::EOPNOTSUPP, NOT_MODELLED),
        }
    }
}

/// The driver's id conversion (`devmm_convert_id_from_vir_to_phy`). A result is cached for the life
/// of the process object.
fn to_physical(machine: &mut Machine, caller: &Caller, process: Option<&mut Process>, logical: u32) -> SvmResult<u32> {
    if logical >= svm::DEVICE_IDS {
        return refuse(Errno::ENODEV, "there are no device ids this large");
    }
    if logical == HOST || logical == svm::HOST_AGENT_ID {
        return Ok(logical);
    }
    if let Some(&known) = process.as_ref().and_then(|process| process.translated.get(&logical)) {
        return Ok(known);
    }
    let Ok(physical) = machine.physical(caller, logical) else {
        return refuse(Errno::EINVAL, "the caller has no such device");
    };
    if let Some(process) = process {
        process.translated.insert(logical, physical);
    }
    Ok(physical)
}

/// Puts a struct into the argument's union.
fn put<P: svm::Para>(arg: &mut Arg, para: &P) {
    // A member is never longer than the union, so this writes all of it.
    let _ = para.write_to_prefix(arg.data.as_mut_bytes());
}

/// The host's page size.
pub(crate) fn page_size() -> u64 {
    // SAFETY: sysconf only reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}
