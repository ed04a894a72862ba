//! Module `DEVMNG`: identity of devices and of processes.
//!
//! GET_PROCESS_SIGN registers the calling process. The device checks the registration before it
//! binds a device process to it. The entry is removed when *any* DEVMNG file of the process is
//! released, and every device then treats the process as dead. On kernels from 5.17 on (the
//! emulated one is newer) it is also removed when another thread than the process's first one opens
//! the module: the driver compares the opener's start time with the leader's and takes the
//! difference for a recycled pid. Each handler has errnos of its own
//! (`drv_devmng_host/ascend910/devdrv_manager*.c`).

use crate::caller::{Caller, Outcome};
use crate::config::{Attachment, Phase};
use crate::machine::Machine;
use ascend_ioctl::command::number;
use ascend_ioctl::devmng::{
    BARE_PID, BARE_TGID, CONTAINER_CMD, ContainerArg, DEVICE_STATUS, DevInfo, DevInfo85, GET_CONSOLE_LOG_LEVEL,
    GET_CONTAINER_FLAG, GET_DEVICE_HEALTH_STATUS, GET_DEVINFO, GET_HOST_PHY_MACH_FLAG, GET_PCIE_ID_INFO, GET_PCIINFO,
    GET_PLATINFO, GET_PROCESS_SIGN, Health, MACHINE_CONTAINER, MACHINE_PHYSICAL, MACHINE_VIRTUAL, MachineFlag,
    NO_PROCESS, PciInfo, PcieIdInfo, ProcessSign, QUERY_DEV_PID, QueryPid,
};
use ascend_ioctl::uda::MAX_PHYSICAL;
use nix::errno::Errno;
use std::collections::BTreeMap;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Limit of registered processes per container, and for the host.
const MAX_SIGNS: usize = 1024;
/// `mainboard_id` of cards on PCI Express. Made up.
const MAINBOARD_PCIE: u32 = 0x2C;
/// `mainboard_id` of cards on HCCS. Made up, but the driver takes 0x10 to 0x1F for boards whose
/// devices reach each other through a switch.
const MAINBOARD_HCCS: u32 = 0x10;
/// The level of the kernel log at which the driver's modules start.
const LOG_LEVEL: i32 = 3;

/// A registered process.
#[derive(Debug)]
struct Registration {
    /// Start time of the process's leader.
    start_time: u64,
    /// The place where it runs.
    place: usize,
}

/// The module's own state.
#[derive(Debug, Default)]
pub(crate) struct Devmng {
    registered: BTreeMap<i32, Registration>,
}

impl Devmng {
    /// A process bound a file to the module.
    pub fn open(&mut self, caller: &Caller) {
        let recycled = |entry: &Registration| caller.tid != caller.tgid || entry.start_time != caller.start_time;
        if self.registered.get(&caller.tgid).is_some_and(recycled) {
            self.registered.remove(&caller.tgid);
        }
    }

    /// A file of the process was released.
    pub fn release(&mut self, machine: &mut Machine, tgid: i32) {
        self.registered.remove(&tgid);
        machine.orphan(tgid);
        machine.peers.forget(tgid);
    }

    /// Whether the process is registered.
    pub fn knows(&self, tgid: i32) -> bool {
        self.registered.contains_key(&tgid)
    }

    /// All registered processes.
    pub fn registered(&self) -> impl Iterator<Item = i32> + '_ {
        self.registered.keys().copied()
    }

    /// ioctl(2) on a bound file. The magic is ignored.
    pub fn ioctl(&mut self, machine: &mut Machine, caller: &Caller, request: u32, arg: u64) -> Outcome {
        let number = number(request);
        // A null pointer is EINVAL for every handler but one, which reports a failed copy.
        let null = arg == 0 && number != GET_PCIINFO.number;
        if number >= machine.config.rest_of_driver().delta().devmng_numbers || null {
            return Errno::EINVAL.into();
        }
        let harmless =
            [GET_PLATINFO.number, CONTAINER_CMD.number, GET_CONTAINER_FLAG.number, GET_CONSOLE_LOG_LEVEL.number];
        if !harmless.contains(&number) {
            if let Some(wake) = machine.must_wait(caller) {
                return Outcome::Sleep(wake);
            }
        }
        // These two compare the whole request, so size or direction bits make them unknown.
        let exact = |command: ascend_ioctl::Command| request == command.request();
        let result = match number {
            n if n == GET_PCIINFO.number => pci_info(machine, caller, arg),
            n if n == GET_PLATINFO.number => put(caller, arg, &1u32, Errno::ENODEV),
            n if n == DEVICE_STATUS.number => device_status(machine, caller, arg),
            n if n == GET_DEVINFO.number && exact(GET_DEVINFO.command) => device_info(machine, caller, arg),
            n if n == GET_PCIE_ID_INFO.number && exact(GET_PCIE_ID_INFO.command) => pcie_ids(machine, caller, arg),
            n if n == CONTAINER_CMD.number => bare_id(caller, arg),
            n if n == GET_HOST_PHY_MACH_FLAG.number => machine_flag(machine, caller, arg),
            n if n == GET_CONTAINER_FLAG.number => {
                put(caller, arg, &u32::from(!machine.is_admin(caller)), Errno::ENODEV)
            }
            n if n == GET_CONSOLE_LOG_LEVEL.number => put(caller, arg, &LOG_LEVEL, Errno::ENODEV),
            n if n == GET_PROCESS_SIGN.number => self.sign(machine, caller, arg),
            n if n == GET_DEVICE_HEALTH_STATUS.number => health(machine, caller, arg),
            n if n == QUERY_DEV_PID.number => query_pid(machine, caller, arg),
            _ => Err(Errno::EINVAL),
        };
        result.into()
    }

    fn sign(&mut self, machine: &Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
        let place = machine.place_of(caller.tgid);
        if !machine.is_admin(caller) && !machine.has_table(caller) {
            return Err(Errno::EINVAL);
        }
        if !self.registered.contains_key(&caller.tgid) {
            if self.registered.values().filter(|entry| entry.place == place).count() >= MAX_SIGNS {
                return Err(Errno::EINVAL);
            }
            self.registered.insert(caller.tgid, Registration { start_time: caller.start_time, place });
        }
        let mut sign = ProcessSign { tgid: caller.tgid, ..Default::default() };
        // Meant to be random text, but 48 zeros in every generation.
        sign.sign[..48].fill(b'0');
        put(caller, arg, &sign, Errno::ENODEV)
    }
}

fn get<T: FromBytes + FromZeros + IntoBytes>(caller: &Caller, arg: u64, fault: Errno) -> Result<T, Errno> {
    let mut value = T::new_zeroed();
    caller.memory.read(arg, value.as_mut_bytes()).map_err(|_| fault)?;
    Ok(value)
}

fn put<T: IntoBytes + Immutable>(caller: &Caller, arg: u64, value: &T, fault: Errno) -> Result<i64, Errno> {
    caller.memory.write(arg, value.as_bytes()).map(|()| 0).map_err(|_| fault)
}

/// The physical id of a device that is up; EBUSY if it was removed.
fn present(machine: &mut Machine, caller: &Caller, logical: u32, not_ready: Errno) -> Result<u32, Errno> {
    let physical = machine.physical(caller, logical)?;
    match machine.device(physical).map(|device| device.phase) {
        Some(Phase::Ready | Phase::Resetting) => Ok(physical),
        Some(Phase::Removed) => Err(Errno::EBUSY),
        _ => Err(not_ready),
    }
}

/// As [`present`], for handlers that also refuse a device with an announced reset.
fn undisturbed(machine: &mut Machine, caller: &Caller, logical: u32) -> Result<u32, Errno> {
    let physical = present(machine, caller, logical, Errno::ENODEV)?;
    match machine.device(physical).map(|device| device.phase) {
        Some(Phase::Resetting) => Err(Errno::EBUSY),
        _ => Ok(physical),
    }
}

fn pci_info(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut info: PciInfo = get(caller, arg, Errno::EFAULT)?;
    let physical = present(machine, caller, info.device, Errno::EFAULT)?;
    (info.bus, info.slot, info.function) = Machine::pci(physical);
    put(caller, arg, &info, Errno::EFAULT)
}

fn pcie_ids(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut info: PcieIdInfo = get(caller, arg, Errno::ENODEV)?;
    let physical = undisturbed(machine, caller, info.logical)?;
    let (bus, slot, function) = Machine::pci(physical);
    [info.vendor, info.subvendor, info.device, info.subdevice] = machine.pci_ids();
    [info.bus, info.slot, info.function] = [bus, slot, function].map(u32::from);
    put(caller, arg, &info, Errno::ENODEV)
}

fn device_info(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    // The id has the same offset in both layouts.
    let head: [u32; 2] = get(caller, arg, Errno::EINVAL)?;
    let mut bytes = vec![0; machine.config.rest_of_driver().delta().devinfo_size];
    caller.memory.read(arg, &mut bytes).map_err(|_| Errno::EINVAL)?;
    let logical = head[1];
    if logical >= MAX_PHYSICAL {
        return Err(Errno::ENODEV);
    }
    let physical = undisturbed(machine, caller, logical)?;
    let (chip, die) = machine.chip(physical);
    let kind = machine.kind();
    let hccs = machine.config.attachment == Attachment::Hccs;
    let mainboard = if hccs { MAINBOARD_HCCS } else { MAINBOARD_PCIE };
    // Addresses are unified where devices of other servers can be reached.
    let unified = u32::from(hccs || machine.config.super_pod);
    let mut soc = [0; 32];
    // The last byte stays a NUL.
    for (to, from) in soc[..31].iter_mut().zip(machine.config.chip.bytes()) {
        *to = from;
    }
    // Frequencies and the bitmaps of cores are left 0. Both layouts have the same fields.
    macro_rules! fill {
        ($layout:ident) => {{
            let mut info = $layout { device: logical, hardware_version: kind.hardware_version(), ..Default::default() };
            (info.chip_id, info.die_id, info.mainboard_id, info.soc_version) = (chip, die, mainboard, soc);
            (info.addr_mode, info.connect_type) = (unified, u32::from(hccs));
            (info.ai_core_num, info.vector_core_num) = (kind.ai_cores, 2 * kind.ai_cores);
            (info.ai_cpu_core_num, info.ts_num) = (kind.ai_cpus, 1);
            put(caller, arg, &info, Errno::EFAULT)
        }};
    }
    if bytes.len() == size_of::<DevInfo85>() { fill!(DevInfo85) } else { fill!(DevInfo) }
}

fn device_status(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let logical: u32 = get(caller, arg, Errno::EFAULT)?;
    if logical >= MAX_PHYSICAL {
        return Err(Errno::EINVAL);
    }
    let physical = machine.physical(caller, logical).map_err(|_| Errno::EFAULT)?;
    let status: u32 = machine.state_of(physical);
    put(caller, arg, &status, Errno::EFAULT)
}

fn machine_flag(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut flag: MachineFlag = get(caller, arg, Errno::EINVAL)?;
    machine.physical(caller, flag.device).map_err(|_| Errno::EFAULT)?;
    flag.flag = match (machine.config.virtual_machine, machine.is_admin(caller)) {
        (true, _) => MACHINE_VIRTUAL,
        (false, true) => MACHINE_PHYSICAL,
        (false, false) => MACHINE_CONTAINER,
    };
    put(caller, arg, &flag, Errno::EFAULT)
}

fn health(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut health: Health = get(caller, arg, Errno::EFAULT)?;
    let physical = machine.physical(caller, health.device).map_err(|_| Errno::EFAULT)?;
    health.health = machine.health(physical).ok_or(Errno::EFAULT)?;
    put(caller, arg, &health, Errno::EFAULT)
}

fn bare_id(caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let arg: ContainerArg = get(caller, arg, Errno::ENODEV)?;
    let id = match arg.call.command {
        BARE_PID => caller.tid,
        BARE_TGID => caller.tgid,
        _ => return Err(Errno::EINVAL),
    };
    if arg.call.output == 0 {
        return Err(Errno::EINVAL);
    }
    put(caller, arg.call.output, &id, Errno::ENOMEM)
}

fn query_pid(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut query: QueryPid = get(caller, arg, Errno::EINVAL)?;
    let physical = undisturbed(machine, caller, query.device)?;
    query.host_pid = global_tgid(caller, query.host_pid).ok_or(Errno::EINVAL)?;
    let bound = machine.device_process(query.host_pid, physical).filter(|_| query.cp_type == 0);
    let Some(pid) = bound else { return Ok(NO_PROCESS.into()) };
    query.pid = pid;
    put(caller, arg, &query, Errno::EINVAL)
}

/// The global id of the process that has the id `pid` in the caller's pid namespace.
fn global_tgid(caller: &Caller, pid: i32) -> Option<i32> {
    let is_own = pid == caller.tgid || pid == caller.tid || own_names(caller.tgid).contains(&pid);
    if is_own {
        return Some(caller.tgid);
    }
    // Outside of pid namespaces ids are global.
    (own_names(caller.tgid).len() <= 1 && std::path::Path::new(&format!("/proc/{pid}")).exists()).then_some(pid)
}

/// The ids of a process in its pid namespaces, outermost first.
fn own_names(tgid: i32) -> Vec<i32> {
    let status = std::fs::read_to_string(format!("/proc/{tgid}/status")).unwrap_or_default();
    let names = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    names.map(|names| names.split_whitespace().filter_map(|name| name.parse().ok()).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Place};
    use crate::driver::FileId;
    use crate::rig::{OK, Rig, TestProcess, positive, refused};
    use ascend_ioctl::Command;
    use ascend_ioctl::devmng::ContainerCall;

    const A: TestProcess = TestProcess(4242);

    fn module(config: Config) -> (Rig, FileId) {
        let mut rig = Rig::new(config);
        let file = rig.module(A, "DEVMNG").unwrap();
        (rig, file)
    }

    fn raw(rig: &mut Rig, file: FileId, command: Command, logical: u32) -> Outcome {
        let mut bytes = [0u8; 320];
        let offset = match command.number {
            n if n == GET_DEVINFO.number => 4,
            n if n == GET_PCIE_ID_INFO.number => 28,
            _ => 0,
        };
        bytes[offset..offset + 4].copy_from_slice(&logical.to_ne_bytes());
        let arg = rig.heap.put(&bytes);
        rig.ioctl(A, file, command.request(), arg)
    }

    const BY_ID: [Command; 6] = [
        GET_PCIINFO.command,
        GET_DEVINFO.command,
        GET_PCIE_ID_INFO.command,
        GET_HOST_PHY_MACH_FLAG.command,
        DEVICE_STATUS.command,
        GET_DEVICE_HEALTH_STATUS.command,
    ];

    fn answers(rig: &mut Rig, file: FileId, logical: u32) -> [Outcome; 6] {
        BY_ID.map(|command| raw(rig, file, command, logical))
    }

    #[test]
    fn each_handler_has_errnos_of_its_own() {
        use Errno::*;
        let (mut rig, file) = module(Config::default());
        assert_eq!(answers(&mut rig, file, 1), [OK; 6]);
        assert_eq!(answers(&mut rig, file, 2), [EINVAL, EINVAL, EINVAL, EFAULT, EFAULT, EFAULT].map(refused));
        assert_eq!(answers(&mut rig, file, 5000), [EINVAL, ENODEV, EINVAL, EFAULT, EINVAL, EFAULT].map(refused));
        let unmapped = BY_ID.map(|command| rig.ioctl(A, file, command.request(), 16));
        assert_eq!(unmapped, [EFAULT, EINVAL, ENODEV, EINVAL, EFAULT, EFAULT].map(refused));
        let null = BY_ID.map(|command| rig.ioctl(A, file, command.request(), 0));
        assert_eq!(null, [EFAULT, EINVAL, EINVAL, EINVAL, EINVAL, EINVAL].map(refused));
        assert_eq!(rig.ioctl(A, file, GET_PLATINFO.request(), 16), refused(ENODEV));
    }

    #[test]
    fn removed_resetting_and_booting_devices_have_different_errnos() {
        use Errno::*;
        let (mut rig, file) = module(Config::default());
        let mut with = |phase| {
            rig.driver.machine.device_mut(1).unwrap().phase = phase;
            answers(&mut rig, file, 1)
        };
        let [busy, fault, none] = [EBUSY, EFAULT, ENODEV].map(refused);
        assert_eq!(with(Phase::Removed), [busy, busy, busy, OK, OK, fault]);
        assert_eq!(with(Phase::Resetting), [OK, busy, busy, OK, OK, OK]);
        assert_eq!(with(Phase::Registered), [fault, none, none, OK, OK, fault]);
        assert_eq!(with(Phase::Ready), [OK; 6]);
    }

    #[test]
    fn bare_ids_need_no_device() {
        let (mut rig, file) = module(Config { devices: 0, ..Config::default() });
        let output = rig.heap.put(&[0; 4]);
        let ask = |rig: &mut Rig, command, output| {
            let call = ContainerCall { device: 77, command, input: 0, output };
            let arg = rig.heap.put(ContainerArg { call, ..Default::default() }.as_bytes());
            rig.ioctl_from(A, 4250, file, CONTAINER_CMD.request(), arg)
        };
        assert_eq!((ask(&mut rig, BARE_PID, output), rig.heap.get::<i32>(output)), (OK, 4250));
        assert_eq!((ask(&mut rig, BARE_TGID, output), rig.heap.get::<i32>(output)), (OK, 4242));
        for command in [0, 3, 99] {
            assert_eq!(ask(&mut rig, command, output), refused(Errno::EINVAL));
        }
        assert_eq!(ask(&mut rig, BARE_TGID, 0), refused(Errno::EINVAL));
        assert_eq!(ask(&mut rig, BARE_TGID, 16), refused(Errno::ENOMEM));
        assert_eq!(rig.ioctl(A, file, CONTAINER_CMD.request(), 16), refused(Errno::ENODEV));
    }

    fn sign(rig: &mut Rig, file: FileId) -> Outcome {
        let (outcome, sign) = rig.call(A, file, GET_PROCESS_SIGN.request(), ProcessSign::default());
        if outcome == OK {
            assert_eq!((sign.tgid, &sign.sign[..48], sign.sign[48]), (A.0, &[b'0'; 48][..], 0));
        }
        outcome
    }

    #[test]
    fn the_registration_goes_with_any_file_of_the_module() {
        let (mut rig, file) = module(Config::default());
        assert_eq!((sign(&mut rig, file), sign(&mut rig, file)), (OK, OK));
        assert_eq!(rig.driver.state().registrations, [A.0]);
        rig.driver.machine.start_device_process(A.0, 0).unwrap();
        let second = rig.module(A, "DEVMNG").unwrap();
        assert_eq!(rig.driver.state().registrations, [A.0]);
        rig.close(A, second);
        assert!(rig.driver.state().registrations.is_empty());
        assert!(rig.driver.state().device_processes[0].orphaned, "every device believes the process gone");
        assert_eq!(rig.driver.machine.device_process(A.0, 0), None);
    }

    #[test]
    fn opening_the_module_from_another_thread_deletes_the_registration() {
        let (mut rig, file) = module(Config::default());
        assert_eq!(sign(&mut rig, file), OK);
        let second = rig.open(A, ascend_ioctl::davinci::PATH).unwrap();
        let arg = rig.heap.put(ascend_ioctl::davinci::OpenArg::new("DEVMNG").as_bytes());
        assert_eq!(rig.ioctl_from(A, 4250, second, ascend_ioctl::davinci::OPEN.request(), arg), OK);
        assert!(rig.driver.state().registrations.is_empty());
        assert_eq!(sign(&mut rig, file), OK, "asking again repairs it");
        assert_eq!(rig.driver.state().registrations, [A.0]);
    }

    #[test]
    fn a_container_cannot_register_before_its_setup() {
        let mut rig = Rig::new(Config { places: vec![Place::container(&[0])], ..Config::default() });
        rig.open(A, "/dev/davinci0").unwrap();
        let file = rig.module(A, "DEVMNG").unwrap();
        assert_eq!(sign(&mut rig, file), refused(Errno::EINVAL));
        let numbering = rig.module(A, "uda").unwrap();
        let setup = ascend_ioctl::uda::SetupTable { devices: 1 };
        assert_eq!(rig.call(A, numbering, ascend_ioctl::uda::SETUP_DEV_TABLE.request(), setup).0, OK);
        assert_eq!(sign(&mut rig, file), OK);
    }

    #[test]
    fn the_device_process_of_a_host_process_can_be_queried() {
        let (mut rig, file) = module(Config::default());
        let query = QueryPid { device: 0, host_pid: A.0, ..Default::default() };
        let ask = |rig: &mut Rig, query| rig.call(A, file, QUERY_DEV_PID.request(), query);
        assert_eq!(ask(&mut rig, query).0, positive(62));
        let pid = rig.driver.machine.start_device_process(A.0, 0).unwrap();
        let (outcome, answer) = ask(&mut rig, query);
        assert_eq!((outcome, answer.pid), (OK, pid));
        assert_eq!(ask(&mut rig, QueryPid { cp_type: 1, ..query }).0, positive(62));
        assert_eq!(ask(&mut rig, QueryPid { device: 2, ..query }).0, refused(Errno::EINVAL));
        assert_eq!(ask(&mut rig, QueryPid { host_pid: -5, ..query }).0, refused(Errno::EINVAL));
    }
}
