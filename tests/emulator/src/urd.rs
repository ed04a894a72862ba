//! Module `URD`: feature queries.
//!
//! One ioctl takes a key that names a feature, an input and an output buffer. Lengths are checked
//! before the key, so only a call with legal lengths reveals an unknown key (EOPNOTSUPP). For a
//! known key the driver then determines the caller's environment and translates device 0 for that,
//! with all consequences for a container that has no table yet ([`crate::uda`]). Positive answers
//! are refusals: 46 for the caller's role, 65534 for its environment, or a number of the handler.
//! From the driver's `pbl/dev_urd/`; the devices' values are made up.

use crate::caller::{Caller, Outcome};
use crate::config::Phase;
use crate::machine::Machine;
use ascend_ioctl::Generation;
use ascend_ioctl::uda::{FIRST_VIRTUAL, MAX_PHYSICAL};
use ascend_ioctl::urd::{
    BOOT_STATUS, CALL, CHIP_INFO, CallArg, ChipInfo, DeviceInfoIn, DeviceInfoOut, HBM_MEM_INFO, HEALTH, INIT_STATUS,
    Key, MAIN_BASIC, MASTER_ID, MEMORY_INFO, MemoryInfoIn, NOT_PERMITTED, NOT_SUPPORTED_HERE, P2P, P2P_CAN_ACCESS,
    P2P_CAPABILITY, P2P_DISABLE, P2P_ENABLE, P2P_STATUS, P2pAttr, P2pAttr85, PCIE_INFO, PHYSICAL_INFO, PROBED,
    PcieInfo, PhysicalInfo, SPLIT_MODE, SPOD_INFO, SpodInfo, TS_HEARTBEAT, TsHeartbeatIn, UdisIn, UdisOut,
};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Longest input and output.
const MAX_LENGTH: u32 = 4096;
/// Longest filter.
const MAX_FILTER: u32 = 128;
/// Longest published value.
const MAX_PUBLISHED: u32 = 208;
/// Bytes that the firmware publishes about its memory.
const HBM_INFO: usize = 192;
/// Keys that exist but are always refused here: the chip type and the list of probed devices (not
/// in containers), splitting of devices (hosts only), and publishing values (root only).
const CHIP_TYPE: (u32, u32) = (MAIN_BASIC, 36);
const PROBE_LIST: (u32, u32) = (MAIN_BASIC, 39);
const CUT: (u32, u32) = (MAIN_BASIC, 16);
const PUBLISH: (u32, u32) = (MAIN_BASIC, 57);
const PUBLISH_85: (u32, u32) = (0x60064, 0);
/// The next fault of a device, and all that it has. Their output may be longer than [`MAX_LENGTH`].
pub(crate) const NEXT_FAULT: Key = Key { main: MAIN_BASIC, sub: 0, filter: "" };
pub(crate) const FAULTS: Key = Key { main: MAIN_BASIC, sub: 28, filter: "" };
/// How the devices are connected.
const CONNECTION: Key = Key { main: MAIN_BASIC, sub: 49, filter: "" };
/// Bytes of a fault, and of the list of 128.
const FAULT: usize = 344;
const FAULT_LIST: usize = 8 + 128 * FAULT;
/// Longest wait for a fault, in milliseconds; -1 is for ever.
const FAULT_WAIT: i32 = 30_000;
/// Positive answers of the health feature, and of those about faults.
const NO_DEVICE: i64 = 1;
const NOT_READY: i64 = 7;
const BAD_LENGTH: i64 = 8;

/// Requests for access between devices.
///
/// Counted per process. The hardware opens access when both directions were requested, by any
/// processes. Requests end with the process's DEVMNG file.
#[derive(Debug, Default)]
pub(crate) struct PeerAccess {
    /// Requests by (device, peer), physical ids, and process.
    requests: BTreeMap<(u32, u32), BTreeMap<i32, u32>>,
}

impl PeerAccess {
    /// Whether both directions were requested.
    pub fn both(&self, one: u32, other: u32) -> bool {
        self.requests.contains_key(&(one, other)) && self.requests.contains_key(&(other, one))
    }

    /// Withdraws the requests of a process.
    pub fn forget(&mut self, tgid: i32) {
        self.requests.retain(|_, by| {
            by.remove(&tgid);
            !by.is_empty()
        });
    }

    /// All requests: process, device, peer, count.
    pub fn requests(&self) -> impl Iterator<Item = (i32, u32, u32, u32)> + '_ {
        self.requests
            .iter()
            .flat_map(|((device, peer), by)| by.iter().map(|(tgid, count)| (*tgid, *device, *peer, *count)))
    }

    fn enable(&mut self, tgid: i32, device: u32, peer: u32) {
        *self.requests.entry((device, peer)).or_default().entry(tgid).or_default() += 1;
    }

    fn disable(&mut self, tgid: i32, device: u32, peer: u32) -> Result<(), Errno> {
        let by = self.requests.get_mut(&(device, peer)).ok_or(Errno::ESRCH)?;
        let count = by.get_mut(&tgid).ok_or(Errno::ESRCH)?;
        *count -= 1;
        if *count == 0 {
            by.remove(&tgid);
        }
        if by.is_empty() {
            self.requests.remove(&(device, peer));
        }
        Ok(())
    }
}

/// The result of a handler: the output, or a refusal as errno or positive number.
type QueryResult = Result<Vec<u8>, Refusal>;

enum Refusal {
    Errno(Errno),
    Number(i64),
    /// It waits until then, unless a signal interrupts it.
    Wait(Instant),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Refusal::Errno(errno)
    }
}

/// The arguments of a handler.
struct Query<'a> {
    machine: &'a mut Machine,
    caller: &'a Caller<'a>,
    /// The device in the call itself, which few handlers use.
    device: u32,
    input: Vec<u8>,
    output_length: usize,
}

/// ioctl(2) on a file that is bound to the module.
pub(crate) fn ioctl(machine: &mut Machine, caller: &Caller, request: u32, arg: u64) -> Outcome {
    if arg == 0 {
        return Errno::EINVAL.into();
    }
    let mut call = CallArg::new_zeroed();
    if caller.memory.read(arg, call.as_mut_bytes()).is_err() {
        return Outcome::Done(Ok(size_of::<CallArg>() as i64));
    }
    let short = (call.key.main << 8).wrapping_add(call.key.sub);
    if request != CALL.request() && request & 0xFFFF != short {
        return Errno::ENODEV.into();
    }
    let (filter, input) = match buffers(caller, &call) {
        Ok(buffers) => buffers,
        Err(errno) => return errno.into(),
    };
    let Some(handler) = handler(machine.config.rest_of_driver(), call.key.main, call.key.sub, &filter) else {
        return Errno::EOPNOTSUPP.into();
    };
    if let Some(wake) = machine.must_wait(caller) {
        return Outcome::Sleep(wake);
    }
    if let Some(refusal) = access(machine, caller, (call.key.main, call.key.sub)) {
        return Outcome::Done(Ok(refusal.into()));
    }
    let output_length = call.buffers.output_length as usize;
    let answer = handler(&mut Query { machine, caller, device: call.device, input, output_length });
    match answer {
        Err(Refusal::Errno(errno)) => {
            // The driver logs every refusal except EOPNOTSUPP.
            machine.logged_refusals += u32::from(errno != Errno::EOPNOTSUPP);
            errno.into()
        }
        Err(Refusal::Number(number)) => Outcome::Done(Ok(number)),
        Err(Refusal::Wait(until)) => Outcome::Wait(until),
        Ok(mut output) => {
            output.resize(output_length, 0);
            // A null output is allowed with any length.
            if call.buffers.output != 0 && caller.memory.write(call.buffers.output, &output).is_err() {
                return Errno::EFAULT.into();
            }
            Outcome::Done(Ok(0))
        }
    }
}

/// The filter and the input, with the checks that come before the key.
fn buffers(caller: &Caller, call: &CallArg) -> Result<(Vec<u8>, Vec<u8>), Errno> {
    let (key, buffers) = (&call.key, &call.buffers);
    if key.filter_length > MAX_FILTER || (key.filter_length == 0 && key.filter != 0) {
        return Err(Errno::EINVAL);
    }
    let mut filter = vec![0; if key.filter == 0 { 0 } else { key.filter_length as usize }];
    caller.memory.read(key.filter, &mut filter).or(if filter.is_empty() { Ok(()) } else { Err(Errno::EFAULT) })?;
    if let Some(end) = filter.iter().position(|byte| *byte == 0) {
        filter.truncate(end);
    }
    if buffers.input_length > MAX_LENGTH || (buffers.input == 0) != (buffers.input_length == 0) {
        return Err(Errno::EINVAL);
    }
    let mut input = vec![0; buffers.input_length as usize];
    if !input.is_empty() {
        caller.memory.read(buffers.input, &mut input).map_err(|_| Errno::EFAULT)?;
    }
    let is_long = (key.main, key.sub) == (FAULTS.main, FAULTS.sub);
    if buffers.output_length > MAX_LENGTH && !is_long { Err(Errno::EINVAL) } else { Ok((filter, input)) }
}

type Handler = fn(&mut Query) -> QueryResult;

/// The handler of a key in a generation. The real driver has more keys.
fn handler(generation: Generation, main: u32, sub: u32, filter: &[u8]) -> Option<Handler> {
    let newer = generation >= Generation::V9_0_0;
    let publish = if newer { PUBLISH } else { PUBLISH_85 };
    let refused: Handler = |_| Err(Errno::EINVAL.into());
    let features: [(Key, bool, Handler); 17] = [
        (HEALTH, true, health),
        (NEXT_FAULT, true, next_fault),
        (FAULTS, true, faults),
        (CONNECTION, true, connection),
        (PCIE_INFO, true, pcie_info),
        (SPLIT_MODE, true, split_mode),
        (INIT_STATUS, true, init_status),
        (CHIP_INFO, true, chip_info),
        (BOOT_STATUS, true, boot_status),
        (MASTER_ID, true, master_id),
        (PROBED, true, probed),
        (P2P, true, p2p),
        (PHYSICAL_INFO, newer, physical_info),
        (MEMORY_INFO, generation.delta().urd_keys.contains(&MEMORY_INFO), memory_info),
        (TS_HEARTBEAT, true, heartbeat),
        (SPOD_INFO, true, super_pod),
        (generation.delta().udis_get, true, published),
    ];
    let named = |key: &Key| key.main == main && key.sub == sub && key.filter.as_bytes() == filter;
    let found = features.into_iter().find(|(key, there, _)| *there && named(key)).map(|(_, _, handler)| handler);
    let others = [CHIP_TYPE, PROBE_LIST, CUT, publish];
    found.or((filter.is_empty() && others.contains(&(main, sub))).then_some(refused))
}

/// A positive answer if the caller may not use the feature.
fn access(machine: &mut Machine, caller: &Caller, key: (u32, u32)) -> Option<i32> {
    let container = !machine.is_admin(caller);
    // The driver looks up device 0 of a container to know whether the caller has a virtual
    // instance.
    let cut = container && machine.physical(caller, 0).is_ok_and(|physical| physical >= FIRST_VIRTUAL);
    let root_only = key == PUBLISH || key == PUBLISH_85 || key == CUT;
    if root_only && caller.uid != 0 {
        return Some(NOT_PERMITTED);
    }
    let not_here = (container && (key == CHIP_TYPE || key == PROBE_LIST || root_only))
        || (cut && [P2P, NEXT_FAULT, FAULTS].iter().any(|of| key == (of.main, of.sub)))
        || (key == CUT && machine.config.virtual_machine);
    not_here.then_some(NOT_SUPPORTED_HERE)
}

impl Query<'_> {
    /// The input, which must be exactly one value.
    fn input<T: FromBytes>(&self) -> Result<T, Errno> {
        T::read_from_bytes(&self.input).map_err(|_| Errno::EINVAL)
    }

    /// The device, if the input is exactly its logical id.
    fn target(&mut self) -> Result<u32, Errno> {
        let logical = self.input::<u32>()?;
        self.machine.physical(self.caller, logical)
    }

    fn phase(&self, physical: u32) -> Option<Phase> {
        self.machine.device(physical).map(|device| device.phase)
    }

    /// As much of the value as fits the output, if the output has an allowed length.
    fn output<T: IntoBytes + Immutable>(&self, lengths: impl Fn(usize) -> bool, value: &T) -> QueryResult {
        if !lengths(self.output_length) {
            return Err(Errno::EINVAL.into());
        }
        Ok(value.as_bytes().to_vec())
    }

    /// An output of exactly four bytes.
    fn word(&self, value: u32) -> QueryResult {
        self.output(|length| length == 4, &value)
    }
}

fn health(call: &mut Query) -> QueryResult {
    if call.input.len() != 4 || call.output_length != 4 {
        return Err(Refusal::Number(BAD_LENGTH));
    }
    let physical = call.target().map_err(|_| Refusal::Number(NO_DEVICE))?;
    match call.machine.health(physical) {
        Some(health) => call.word(health),
        None => Err(Refusal::Number(NOT_READY)),
    }
}

/// The next fault: no emulated device has one, so that the wait ends with its time. The input is
/// who asks, the time in milliseconds, and from 26.1 on the device (-1 for all) and a filter.
fn next_fault(call: &mut Query) -> QueryResult {
    let newest = call.machine.config.rest_of_driver() >= Generation::V26_1;
    let length = if newest { 64 } else { 8 };
    if call.input.len() != length || call.output_length != FAULT {
        return Err(Refusal::Number(BAD_LENGTH));
    }
    let word = |at: usize| i32::from_ne_bytes(call.input[at..at + 4].try_into().unwrap_or_default());
    let (source, time) = (word(0), word(4));
    if !(0..=1).contains(&source) {
        return Err(Refusal::Number(BAD_LENGTH));
    }
    if newest && word(8) != -1 {
        call.machine.physical(call.caller, word(8) as u32)?;
    }
    match u64::try_from(time) {
        Err(_) if time == -1 => Err(Refusal::Wait(Instant::now() + Duration::from_secs(3600))),
        Ok(milliseconds) if time <= FAULT_WAIT => {
            let end = call.caller.arrived + Duration::from_millis(milliseconds);
            if Instant::now() < end { Err(Refusal::Wait(end)) } else { Err(Errno::ETIMEDOUT.into()) }
        }
        _ => Err(Refusal::Number(BAD_LENGTH)),
    }
}

/// All faults of a device: none.
fn faults(call: &mut Query) -> QueryResult {
    if call.input.len() != 4 || call.output_length != FAULT_LIST {
        return Err(Refusal::Number(BAD_LENGTH));
    }
    call.target().map_err(|_| Refusal::Number(NO_DEVICE))?;
    Ok(Vec::new())
}

/// It tells two ways of connection alone, and this is the one that is not that of Ascend 950.
fn connection(call: &mut Query) -> QueryResult {
    if call.machine.physical_ids().next().is_none() {
        return Err(Errno::EAGAIN.into());
    }
    call.output(|length| length == 8, &0u64)
}

fn pcie_info(call: &mut Query) -> QueryResult {
    let size = size_of::<PcieInfo>();
    if call.input.len() != 4 || call.output_length < size {
        return Err(Errno::EINVAL.into());
    }
    let physical = call.target()?;
    let [vendor, subvendor, device, subdevice] = call.machine.pci_ids();
    let (bus, slot, function) = Machine::pci(physical);
    let [bus, slot, function] = [bus, slot, function].map(u32::from);
    call.output(|length| length >= size, &PcieInfo { vendor, subvendor, device, subdevice, bus, slot, function })
}

fn split_mode(call: &mut Query) -> QueryResult {
    let physical = call.target()?;
    // A virtual instance exists because its card was split for containers.
    call.word(if physical >= FIRST_VIRTUAL { 2 } else { call.machine.config.split_mode })
}

fn init_status(call: &mut Query) -> QueryResult {
    let physical = call.target()?;
    call.word(call.machine.state_of(physical))
}

fn chip_info(call: &mut Query) -> QueryResult {
    let physical = call.target()?;
    if call.phase(physical) == Some(Phase::Registered) {
        return Err(Errno::ENODEV.into());
    }
    let mut info = ChipInfo { device: physical, ..Default::default() };
    let text = &mut info.text;
    let name = call.machine.config.chip.trim_start_matches("Ascend");
    for (field, value) in [(&mut text.kind, "Ascend"), (&mut text.name, name), (&mut text.version, "V11")] {
        let end = field.len() - 1;
        for (to, from) in field[..end].iter_mut().zip(value.bytes()) {
            *to = from;
        }
    }
    call.output(|length| length == size_of::<ChipInfo>(), &info)
}

fn boot_status(call: &mut Query) -> QueryResult {
    let physical = call.input::<u32>()?;
    if physical >= MAX_PHYSICAL || call.output_length < 4 {
        return Err(Errno::EINVAL.into());
    }
    if !call.machine.is_admin(call.caller) && call.machine.logical(call.caller, physical).is_none() {
        return Err(Errno::EFAULT.into());
    }
    // From "not initialised" to "finished". Only this feature reports a card before the driver has
    // it.
    let status: u32 = match call.phase(physical).ok_or(Errno::ENXIO)? {
        Phase::Detected => 2,
        Phase::Removed => 0,
        _ => 3,
    };
    call.output(|_| true, &status)
}

/// Every emulated device runs an operating system of its own.
fn master_id(call: &mut Query) -> QueryResult {
    let physical = call.input::<u32>()?;
    if call.output_length != 4 || call.machine.device(physical).is_none_or(|device| !device.known()) {
        return Err(Errno::EINVAL.into());
    }
    call.word(physical)
}

fn probed(call: &mut Query) -> QueryResult {
    let cards = call.machine.physical_ids().filter(|id| *id < FIRST_VIRTUAL).count();
    let container = !call.machine.is_admin(call.caller);
    let number = if container { call.machine.table_length(call.caller) } else { cards };
    call.output(|length| length >= 4, &(number as u32))
}

fn physical_info(call: &mut Query) -> QueryResult {
    let physical = call.input::<u32>()?;
    call.machine.device(physical).ok_or(Errno::EINVAL)?;
    let (chip, die) = call.machine.chip(physical);
    let size = size_of::<PhysicalInfo>();
    call.output(|length| length >= size, &PhysicalInfo { chip, die, ..Default::default() })
}

/// The host passes this on to the firmware. Whether that of an Ascend910B answers is not known;
/// here it does not.
fn memory_info(call: &mut Query) -> QueryResult {
    let input: MemoryInfoIn = call.input()?;
    if call.output_length < 48 {
        return Err(Errno::EINVAL.into());
    }
    call.machine.physical(call.caller, input.device)?;
    Err(Errno::EOPNOTSUPP.into())
}

fn heartbeat(call: &mut Query) -> QueryResult {
    let input: TsHeartbeatIn = call.input()?;
    let physical = call.machine.physical(call.caller, input.device)?;
    call.word(call.machine.state_of(physical))
}

fn super_pod(call: &mut Query) -> QueryResult {
    let input: DeviceInfoIn = call.input()?;
    let size = size_of::<SpodInfo>() as u32;
    if input.buffer == 0 || input.buffer_size < size || call.output_length != size_of::<DeviceInfoOut>() {
        return Err(Errno::EINVAL.into());
    }
    let physical = call.machine.physical(call.caller, input.device)?;
    if physical >= FIRST_VIRTUAL || !call.machine.config.super_pod {
        return Err(Errno::EOPNOTSUPP.into());
    }
    let sdid = call.machine.sdid(physical);
    let info = SpodInfo { sdid, super_pod_id: 1, server_id: call.machine.config.server, ..Default::default() };
    if call.caller.memory.write(input.buffer, info.as_bytes()).is_err() {
        return Err(Refusal::Number(size.into()));
    }
    call.output(|_| true, &DeviceInfoOut { size })
}

fn published(call: &mut Query) -> QueryResult {
    let physical = call.machine.physical(call.caller, call.device)?;
    let input: UdisIn = call.input()?;
    if call.output_length != size_of::<UdisOut>() || input.data == 0 || !(1..=MAX_PUBLISHED).contains(&input.length) {
        return Err(Errno::EINVAL.into());
    }
    if call.phase(physical) == Some(Phase::Registered) {
        return Err(Errno::ENODEV.into());
    }
    if input.module != 0 || input.name != *HBM_MEM_INFO || physical >= FIRST_VIRTUAL {
        return Err(Errno::EOPNOTSUPP.into());
    }
    if (input.length as usize) < HBM_INFO {
        return Err(Errno::EINVAL.into());
    }
    let total = call.machine.config.hbm;
    let free = total.saturating_sub(call.machine.device(physical).map_or(0, |device| device.used));
    // Three blocks of eight words, in KiB: memory of the device's system, of services, and in
    // total.
    let mut words = [0u64; HBM_INFO / 8];
    for block in [8, 16] {
        (words[block], words[block + 1]) = (total >> 10, free >> 10);
    }
    if call.caller.memory.write(input.data, words.as_bytes()).is_err() {
        return Err(Refusal::Number(HBM_INFO as i64));
    }
    call.output(|_| true, &UdisOut { last_update: 1, access: u32::MAX, length: HBM_INFO as u32 })
}

fn p2p(call: &mut Query) -> QueryResult {
    let size = call.machine.config.rest_of_driver().delta().p2p_size;
    let old = size == size_of::<P2pAttr85>();
    if call.input.len() != size || call.output_length < size {
        return Err(Errno::EINVAL.into());
    }
    let mut attr = if old {
        let attr: P2pAttr85 = call.input()?;
        P2pAttr { operation: attr.operation, device: attr.device, peer: attr.peer, kind: 1, ..Default::default() }
    } else {
        call.input::<P2pAttr>()?
    };
    let physical = call.machine.physical(call.caller, attr.device).map_err(|_| Errno::EFAULT)?;
    let up = |id: u32| call.machine.device(id).is_some_and(|device| device.answers());
    if !up(physical) {
        return Err(Errno::EINVAL.into());
    }
    let reachable = |peer: u32| up(peer) && peer < FIRST_VIRTUAL && physical < FIRST_VIRTUAL && peer != physical;
    let tgid = call.caller.tgid;
    match attr.operation {
        P2P_ENABLE | P2P_DISABLE if !matches!(attr.kind, 1 | 2) || !reachable(attr.peer) => {
            return Err(Errno::EINVAL.into());
        }
        // Notify registers are not modelled: requests for them succeed without effect.
        P2P_ENABLE | P2P_DISABLE if attr.kind == 2 => {}
        P2P_ENABLE => call.machine.peers.enable(tgid, physical, attr.peer),
        P2P_DISABLE => call.machine.peers.disable(tgid, physical, attr.peer)?,
        P2P_STATUS => attr.status = call.machine.peers.both(physical, attr.peer).into(),
        P2P_CAN_ACCESS => attr.status = reachable(attr.peer).into(),
        // The capability of the PCI function; made up.
        P2P_CAPABILITY => attr.capability = 0,
        _ => return Err(Errno::EINVAL.into()),
    }
    if old {
        let P2pAttr { operation, device, peer, status, capability, .. } = attr;
        call.output(|_| true, &P2pAttr85 { operation, device, peer, status, capability })
    } else {
        call.output(|_| true, &attr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Place};
    use crate::driver::FileId;
    use crate::rig::{OK, Rig, TestProcess, positive, refused};
    use ascend_ioctl::urd::{CallBuffers, CallKey, UDIS_GET};

    const A: TestProcess = TestProcess(100);

    struct Urd {
        rig: Rig,
        file: FileId,
    }

    fn urd(config: Config) -> Urd {
        let mut rig = Rig::new(config);
        let file = rig.module(A, "URD").unwrap();
        Urd { rig, file }
    }

    impl Urd {
        fn arg(&self, key: Key, input: &[u8], output: u64, output_length: u32) -> CallArg {
            let filter = if key.filter.is_empty() { 0 } else { self.rig.heap.put(key.filter.as_bytes()) };
            CallArg {
                key: CallKey {
                    main: key.main,
                    sub: key.sub,
                    filter,
                    filter_length: key.filter.len() as u32,
                    ..Default::default()
                },
                buffers: CallBuffers {
                    input: if input.is_empty() { 0 } else { self.rig.heap.put(input) },
                    input_length: input.len() as u32,
                    output,
                    output_length,
                    ..Default::default()
                },
                ..Default::default()
            }
        }

        fn send(&mut self, arg: CallArg) -> Outcome {
            self.rig.call(A, self.file, CALL.request(), arg).0
        }

        fn sized(&mut self, key: Key, input: &[u8], output_length: u32) -> (Outcome, u64) {
            let output = self.rig.heap.put(&vec![0xEE; output_length.max(1) as usize]);
            let arg = self.arg(key, input, if output_length == 0 { 0 } else { output }, output_length);
            (self.send(arg), output)
        }

        fn ask<I: IntoBytes + Immutable, O: FromBytes>(&mut self, key: Key, input: &I) -> Result<O, Outcome> {
            match self.sized(key, input.as_bytes(), size_of::<O>() as u32) {
                (OK, output) => Ok(self.rig.heap.get(output)),
                (outcome, _) => Err(outcome),
            }
        }
    }

    const UNKNOWN: Key = Key { main: 0x77, sub: 1, filter: "" };

    #[test]
    fn features_answer_about_a_device() {
        let mut urd = urd(Config::default());
        let one = 1u32;
        assert_eq!(urd.ask(SPLIT_MODE, &one), Ok(0u32));
        assert_eq!(urd.ask(INIT_STATUS, &one), Ok(1u32));
        assert_eq!(urd.ask(HEALTH, &one), Ok(0u32));
        assert_eq!(urd.ask(BOOT_STATUS, &one), Ok(3u32));
        assert_eq!(urd.sized(PROBED, &[], 4).0, OK);
        assert_eq!(urd.ask(TS_HEARTBEAT, &TsHeartbeatIn { device: 1, ..Default::default() }), Ok(1u32));
        let chip: ChipInfo = urd.ask(CHIP_INFO, &one).unwrap();
        assert_eq!((chip.device, &chip.text.kind[..7], &chip.text.name[..6]), (1, &b"Ascend\0"[..], &b"910B3\0"[..]));
        let pci: PcieInfo = urd.ask(PCIE_INFO, &one).unwrap();
        assert_eq!((pci.vendor, pci.bus), (0x19E5, 0x43));
        let [.., eighth]: [u32; 8] = urd.ask(PCIE_INFO, &one).unwrap();
        assert_eq!(eighth, 0, "the id is not filled in");
        let physical: PhysicalInfo = urd.ask(PHYSICAL_INFO, &one).unwrap();
        assert_eq!((physical.chip, physical.die), (1, 0));
    }

    #[test]
    fn wrong_lengths_and_absent_devices_are_refused() {
        let mut urd = urd(Config::default());
        let [here, absent] = [0u32, 2].map(u32::to_ne_bytes);
        let invalid = refused(Errno::EINVAL);
        assert_eq!(urd.sized(SPLIT_MODE, &[0; 8], 4).0, invalid);
        assert_eq!(urd.sized(SPLIT_MODE, &here, 8).0, invalid);
        assert_eq!(urd.sized(SPLIT_MODE, &absent, 4).0, invalid);
        assert_eq!((urd.sized(CHIP_INFO, &here, 108).0, urd.sized(CHIP_INFO, &here, 116).0), (invalid, invalid));
        assert_eq!((urd.sized(PHYSICAL_INFO, &here, 8).0, urd.sized(PHYSICAL_INFO, &here, 132).0), (invalid, invalid));
        assert_eq!(urd.sized(HEALTH, &absent, 4).0, positive(1));
        assert_eq!(urd.sized(HEALTH, &[], 0).0, positive(8));
        let unmapped = urd.arg(SPLIT_MODE, &here, 16, 4);
        assert_eq!(urd.send(unmapped), refused(Errno::EFAULT));
        let unwanted = urd.arg(SPLIT_MODE, &here, 0, 4);
        assert_eq!(urd.send(unwanted), OK);
    }

    #[test]
    fn only_some_features_refuse_a_booting_device() {
        let mut urd = urd(Config { phases: vec![(1, Phase::Registered)], ..Config::default() });
        let one = 1u32;
        assert_eq!(urd.ask(INIT_STATUS, &one), Ok(0u32));
        assert_eq!(urd.ask::<_, ChipInfo>(CHIP_INFO, &one).unwrap_err(), refused(Errno::ENODEV));
        assert_eq!(urd.ask::<_, u32>(HEALTH, &one).unwrap_err(), positive(7));
        assert_eq!(urd.ask(SPLIT_MODE, &one), Ok(0u32));
    }

    #[test]
    fn the_super_pod_id_is_made_of_its_parts() {
        let mut urd = urd(Config { server: 3, ..Config::default() });
        let buffer = urd.rig.heap.put(&[0; 48]);
        let input = DeviceInfoIn { device: 1, sub_command: 1, buffer, buffer_size: 48, ..Default::default() };
        assert_eq!(urd.ask(SPOD_INFO, &input), Ok(48u32));
        let info: SpodInfo = urd.rig.heap.get(buffer);
        assert_eq!((info.sdid, info.server_id), (1 | 1 << 18 | 3 << 22, 3));
        let unmapped = DeviceInfoIn { buffer: 16, ..input };
        assert_eq!(urd.ask::<_, u32>(SPOD_INFO, &unmapped), Err(positive(48)));
    }

    #[test]
    fn published_memory_follows_what_is_used() {
        let mut urd = urd(Config { hbm: 32 << 30, ..Config::default() });
        let data = urd.rig.heap.put(&[0; 208]);
        let input = UdisIn { module: 0, name: *HBM_MEM_INFO, length: 208, data };
        let out: UdisOut = urd.ask(UDIS_GET, &input).unwrap();
        assert_eq!(out.length, 192);
        assert_eq!(urd.rig.heap.get::<[u64; 2]>(data + 128), [32 << 20, 32 << 20]);
        urd.rig.driver.machine.device_mut(0).unwrap().used = 2 << 30;
        urd.ask::<_, UdisOut>(UDIS_GET, &input).unwrap();
        assert_eq!(urd.rig.heap.get::<[u64; 2]>(data + 128), [32 << 20, 30 << 20]);
        for length in [0, 100, 209, 4096] {
            let outcome = urd.ask::<_, UdisOut>(UDIS_GET, &UdisIn { length, ..input }).unwrap_err();
            assert_eq!(outcome, refused(Errno::EINVAL), "{length}");
        }
        let other = UdisIn { name: *b"aicore_util\0\0\0\0\0", ..input };
        assert_eq!(urd.ask::<_, UdisOut>(UDIS_GET, &other).unwrap_err(), refused(Errno::EOPNOTSUPP));
    }

    #[test]
    fn access_between_peers_is_open_when_both_directions_are_requested() {
        let mut urd = urd(Config::default());
        let mut attr = |operation, device, peer| {
            let input = P2pAttr { operation, device, peer, kind: 1, status: 7, ..Default::default() };
            urd.ask::<_, P2pAttr>(P2P, &input).map(|answer| answer.status)
        };
        assert_eq!(attr(P2P_CAN_ACCESS, 0, 1), Ok(1));
        assert_eq!(attr(P2P_CAN_ACCESS, 0, 0), Ok(0));
        assert_eq!(attr(P2P_ENABLE, 0, 1), Ok(7));
        assert_eq!(attr(P2P_ENABLE, 0, 1), Ok(7));
        assert_eq!(attr(P2P_STATUS, 0, 1), Ok(0));
        assert_eq!(attr(P2P_ENABLE, 1, 0), Ok(7));
        assert_eq!(attr(P2P_STATUS, 0, 1), Ok(1));
        assert_eq!(attr(P2P_DISABLE, 0, 1), Ok(7));
        assert_eq!(attr(P2P_STATUS, 1, 0), Ok(1), "counted per process");
        assert_eq!(attr(P2P_DISABLE, 0, 1), Ok(7));
        assert_eq!(attr(P2P_STATUS, 1, 0), Ok(0));
        assert_eq!(attr(P2P_DISABLE, 0, 1), Err(refused(Errno::ESRCH)));
        assert_eq!(attr(P2P_ENABLE, 0, 0), Err(refused(Errno::EINVAL)));
        assert_eq!(attr(P2P_ENABLE, 0, 9), Err(refused(Errno::EINVAL)));
        assert_eq!(attr(P2P_ENABLE, 9, 0), Err(refused(Errno::EFAULT)));
        assert_eq!(attr(5, 0, 1), Err(refused(Errno::EINVAL)));
        assert_eq!(urd.rig.driver.state().peer_requests.len(), 1);
        let manager = urd.rig.module(A, "DEVMNG").unwrap();
        urd.rig.close(A, manager);
        assert!(urd.rig.driver.state().peer_requests.is_empty(), "they go with the DEVMNG file");
    }

    #[test]
    fn a_known_key_before_setup_costs_a_container_its_devices() {
        let places = vec![Place::container(&[0])];
        for (key, outcome, after) in
            [(UNKNOWN, refused(Errno::EOPNOTSUPP), OK), (UDIS_GET, refused(Errno::EINVAL), refused(Errno::EBUSY))]
        {
            let mut urd = urd(Config { places: places.clone(), ..Config::default() });
            urd.rig.open(A, "/dev/davinci0").unwrap();
            assert_eq!(urd.sized(key, &[], 0).0, outcome);
            let numbering = urd.rig.module(A, "uda").unwrap();
            let setup = ascend_ioctl::uda::SetupTable { devices: 1 };
            let request = ascend_ioctl::uda::SETUP_DEV_TABLE.request();
            assert_eq!(urd.rig.call(A, numbering, request, setup).0, after, "{key:?}");
        }
    }

    #[test]
    fn some_features_are_refused_in_containers() {
        let mut urd = urd(Config { places: vec![Place::container(&[1])], ..Config::default() });
        urd.rig.open(A, "/dev/davinci1").unwrap();
        let numbering = urd.rig.module(A, "uda").unwrap();
        let setup = ascend_ioctl::uda::SetupTable { devices: 1 };
        assert_eq!(urd.rig.call(A, numbering, ascend_ioctl::uda::SETUP_DEV_TABLE.request(), setup).0, OK);
        let key = |sub| Key { main: MAIN_BASIC, sub, filter: "" };
        assert_eq!(urd.sized(key(36), &[], 0).0, positive(65534));
        assert_eq!(urd.sized(key(39), &[], 0).0, positive(65534));
        assert_eq!(urd.ask(BOOT_STATUS, &1u32), Ok(3u32));
        assert_eq!(urd.ask::<_, u32>(BOOT_STATUS, &0u32), Err(refused(Errno::EFAULT)));
        let (outcome, output) = urd.sized(PROBED, &[], 4);
        assert_eq!((outcome, urd.rig.heap.get::<u32>(output)), (OK, 1));
        assert_eq!(urd.ask::<_, PhysicalInfo>(PHYSICAL_INFO, &0u32).unwrap().chip, 0, "any physical id is allowed");
    }
}
