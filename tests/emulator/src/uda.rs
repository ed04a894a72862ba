//! Module `uda`: which devices a mount namespace has, and under which numbers.
//!
//! The driver keeps one table per mount namespace. SETUP builds it, or implicitly the first call
//! that translates an id; the namespace cannot change it afterwards. On the host and in privileged
//! containers it lists every card, and later cards are appended. In an ordinary container it lists
//! the devices whose nodes the container opened *before*. A SETUP for more devices than that is
//! EBUSY and drops them all; the implicit SETUP is for 100. A host process that cannot open every
//! node gets a table of its own. From the driver's `pbl/uda/uda_access.c` and `uda_fops.c`.

use crate::caller::{Caller, Outcome};
use crate::config::{Namespace, Phase};
use crate::machine::Machine;
use ascend_ioctl::command::number;
use ascend_ioctl::uda::{
    DEVID_TO_UDEVID, DeviceList, FIRST_VIRTUAL, GET_DEV_LIST, GET_USER_INFO, HARDWARE_DAVINCI, LUDEVID_TO_RUDEVID,
    LogicalDevice, MAX_PHYSICAL, RUDEVID_TO_LUDEVID, SETUP_DEV_TABLE, SetupTable, Translation, UDEVID_TO_DEVID,
    UserInfo,
};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// Logical ids are below this.
const MAX_LOGICAL: u32 = 100;
/// Limit of ordinary containers with a table.
const MAX_CONTAINERS: usize = 128;
/// How long the table of an ended process lives after a SETUP has noticed the end.
const RECYCLE: Duration = Duration::from_secs(1);

/// A mount namespace: the host's, a place's, or one outside of the emulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MountNamespace {
    Host,
    Place(usize),
    Outside,
}

/// The process that a table belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Root {
    /// The namespace's first process.
    First,
    /// A host process that may not open every node.
    Restricted(i32),
}

#[derive(Debug)]
struct Table {
    namespace: MountNamespace,
    root: Root,
    admin: bool,
    /// Physical ids by logical id.
    devices: Vec<u32>,
    /// The root process is gone.
    abandoned: bool,
    destroyed_at: Option<Instant>,
}

/// All namespaces' tables, and which of them each device belongs to.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// In order of creation, which matters.
    list: Vec<Table>,
    /// By physical id.
    owners: BTreeMap<u32, MountNamespace>,
    /// The wait for all devices is over, for all callers.
    waited: bool,
}

impl Tables {
    /// Adds a new card to the tables that list every card.
    pub fn added(&mut self, physical: u32) {
        for table in self.list.iter_mut().filter(|table| table.admin && table.root == Root::First) {
            if physical < FIRST_VIRTUAL && !table.devices.contains(&physical) {
                table.devices.push(physical);
            }
        }
    }

    /// A process ended. Its table stays until a SETUP notices.
    pub fn exit(&mut self, tgid: i32) {
        for table in self.list.iter_mut().filter(|table| table.root == Root::Restricted(tgid)) {
            table.abandoned = true;
        }
    }

    /// The table that a process's calls use. A process's own table comes first. The host's is only
    /// found if it was created before all tables of single processes.
    fn find(&self, namespace: MountNamespace, tgid: i32) -> Option<&Table> {
        let mut here = self.list.iter().filter(|table| table.namespace == namespace);
        if let Some(own) = here.clone().find(|table| table.root == Root::Restricted(tgid)) {
            return Some(own);
        }
        let first = here.next()?;
        (namespace != MountNamespace::Host || first.root == Root::First).then_some(first)
    }

    fn recycle(&mut self, now: Instant) {
        self.list.retain(|table| table.destroyed_at.is_none_or(|at| now < at));
    }
}

impl Machine {
    fn namespace(&self, caller: &Caller) -> MountNamespace {
        match self.namespace_of(caller.tgid) {
            Namespace::Host => MountNamespace::Host,
            _ => MountNamespace::Place(self.place_of(caller.tgid)),
        }
    }

    /// Whether `/dev/davinciN` exists where a process runs. The node of a virtual instance has this
    /// name only in a container that was given it.
    pub(crate) fn node_exists(&self, tgid: i32, physical: u32) -> bool {
        let known = self.device(physical).is_some_and(|device| device.known());
        let place = self.surroundings(tgid);
        let passed = place.and_then(|place| place.nodes.as_ref()).is_none_or(|nodes| nodes.contains(&physical));
        known && passed && (physical < FIRST_VIRTUAL || self.namespace_of(tgid) == Namespace::Container)
    }

    /// Checks that the node exists where the caller runs, and its file mode.
    pub(crate) fn node_opens(&self, caller: &Caller, physical: u32) -> Result<(), Errno> {
        if !self.node_exists(caller.tgid, physical) {
            return Err(Errno::ENOENT);
        }
        let closed = self.surroundings(caller.tgid).is_some_and(|place| place.closed.contains(&physical));
        if closed { Err(Errno::EACCES) } else { Ok(()) }
    }

    /// open(2) of `/dev/davinciN`. An ordinary container occupies the device by it.
    pub(crate) fn occupy(&mut self, caller: &Caller, physical: u32) -> Result<(), Errno> {
        if !self.device(physical).is_some_and(|device| device.known()) {
            return Err(Errno::ENODEV);
        }
        if self.is_admin(caller) {
            return Ok(());
        }
        let namespace = self.namespace(caller);
        let owner = self.owner(physical);
        let occupied = owner.is_some_and(|owner| {
            // Only an owner that called SETUP keeps others out.
            owner != namespace && (owner == MountNamespace::Outside || self.tables.find(owner, caller.tgid).is_some())
        });
        if occupied {
            return Err(Errno::EBUSY);
        }
        self.tables.owners.insert(physical, namespace);
        Ok(())
    }

    fn owner(&self, physical: u32) -> Option<MountNamespace> {
        let outside = self.config.occupied.contains(&physical).then_some(MountNamespace::Outside);
        self.tables.owners.get(&physical).copied().or(outside)
    }

    /// Until when a call that needs the caller's table sleeps. The first such call after the driver
    /// was loaded waits for all cards.
    pub(crate) fn must_wait(&mut self, caller: &Caller) -> Option<Instant> {
        let namespace = self.namespace(caller);
        if self.tables.waited || self.tables.find(namespace, caller.tgid).is_some() {
            return None;
        }
        let now = Instant::now();
        let deadline = caller.arrived + self.config.setup_patience;
        let booting = self.devices.values().any(|device| device.phase == Phase::Detected);
        if (booting || self.devices.is_empty()) && now < deadline {
            return Some(self.boot_time().map_or(deadline, |boot| boot.clamp(now, deadline)));
        }
        self.tables.waited = true;
        None
    }

    pub(crate) fn setup(&mut self, caller: &Caller, wanted: u32) -> Result<(), Errno> {
        self.tables.waited = true;
        let namespace = self.namespace(caller);
        let on_host = namespace == MountNamespace::Host;
        let cards: Vec<u32> =
            self.devices.iter().filter(|(id, it)| **id < FIRST_VIRTUAL && it.known()).map(|(id, _)| *id).collect();
        let opened: Vec<u32> =
            cards.iter().copied().filter(|id| !on_host || self.node_opens(caller, *id).is_ok()).collect();
        let root = if opened == cards { Root::First } else { Root::Restricted(caller.tgid) };

        let now = Instant::now();
        for table in self.tables.list.iter_mut().filter(|table| table.abandoned) {
            table.destroyed_at.get_or_insert(now + RECYCLE);
        }
        if self.tables.list.iter().any(|table| table.namespace == namespace && table.root == root) {
            return Ok(());
        }

        let admin = self.is_admin(caller);
        if !admin && self.tables.list.iter().filter(|table| !table.admin).count() >= MAX_CONTAINERS {
            return Err(Errno::ENOMEM);
        }
        let devices: Vec<u32> = if admin {
            opened
        } else {
            let known = self.devices.iter().filter(|(_, device)| device.known()).map(|(id, _)| *id);
            known.filter(|id| self.owner(*id) == Some(namespace)).collect()
        };
        if !admin && wanted as usize > devices.len() {
            self.tables.owners.retain(|_, owner| *owner != namespace);
            return Err(Errno::EBUSY);
        }
        let empty = devices.is_empty();
        self.tables.list.push(Table { namespace, root, admin, devices, abandoned: false, destroyed_at: None });
        // The empty table stays, so the next SETUP returns 0.
        if admin && empty { Err(Errno::ENODEV) } else { Ok(()) }
    }

    /// The physical id (udevid) of a logical id in the caller's namespace; EINVAL if there is none.
    /// Does not handle 64 and 65.
    ///
    /// As in the driver, this builds the table if there is none yet, with all consequences for an
    /// ordinary container.
    pub fn physical(&mut self, caller: &Caller, logical: u32) -> Result<u32, Errno> {
        let physical = if logical < MAX_LOGICAL {
            let namespace = self.namespace(caller);
            if self.tables.find(namespace, caller.tgid).is_none() {
                let _ = self.setup(caller, MAX_LOGICAL);
            }
            let table = self.tables.find(namespace, caller.tgid);
            table.and_then(|table| table.devices.get(logical as usize)).copied().ok_or(Errno::EINVAL)?
        } else if self.is_admin(caller) {
            logical
        } else {
            return Err(Errno::EINVAL);
        };
        self.device(physical).filter(|device| device.known()).map(|_| physical).ok_or(Errno::EINVAL)
    }

    /// The logical id of a device in the caller's namespace.
    pub fn logical(&self, caller: &Caller, physical: u32) -> Option<u32> {
        let table = self.tables.find(self.namespace(caller), caller.tgid)?;
        table.devices.iter().position(|id| *id == physical).map(|index| index as u32)
    }

    /// Whether the caller may use a device by its physical id.
    pub(crate) fn may_use(&self, caller: &Caller, physical: u32) -> bool {
        self.is_admin(caller) || self.logical(caller, physical).is_some()
    }

    /// Whether the caller's namespace has a table.
    pub(crate) fn has_table(&self, caller: &Caller) -> bool {
        self.tables.find(self.namespace(caller), caller.tgid).is_some()
    }

    /// Number of devices in the caller's namespace.
    pub(crate) fn table_length(&self, caller: &Caller) -> usize {
        self.tables.find(self.namespace(caller), caller.tgid).map_or(0, |table| table.devices.len())
    }

    /// A container ends: its table is removed and its devices are free.
    pub fn end_container(&mut self, place: usize) {
        let namespace = MountNamespace::Place(place);
        self.tables.list.retain(|table| table.namespace != namespace);
        self.tables.owners.retain(|_, owner| *owner != namespace);
    }
}

/// ioctl(2) on a file that is bound to the module. A copy that fails returns the number of bytes
/// not copied as a positive value.
pub(crate) fn ioctl(machine: &mut Machine, caller: &Caller, request: u32, arg: u64) -> Outcome {
    machine.tables.recycle(Instant::now());
    let number = number(request);
    let waits = [SETUP_DEV_TABLE.number, GET_DEV_LIST.number, DEVID_TO_UDEVID.number];
    if waits.contains(&number) {
        if let Some(wake) = machine.must_wait(caller) {
            return Outcome::Sleep(wake);
        }
    }
    let translate = |machine: &mut Machine, from: fn(&mut Machine, &Caller, u32) -> Result<u32, Errno>| {
        let mut translation = Translation::new_zeroed();
        if caller.memory.read(arg, translation.as_mut_bytes()).is_err() {
            return Ok(size_of::<Translation>() as i64);
        }
        let to = from(machine, caller, translation.from)?;
        let place = arg.wrapping_add(offset_of!(Translation, to) as u64);
        caller.memory.write(place, &to.to_ne_bytes()).map(|()| 0).map_err(|_| Errno::EFAULT)
    };
    let result = match number {
        n if n == GET_USER_INFO.number => user_info(machine, caller, arg),
        n if n == SETUP_DEV_TABLE.number => setup_table(machine, caller, arg),
        n if n == GET_DEV_LIST.number => device_list(machine, caller, arg),
        n if n == UDEVID_TO_DEVID.number => translate(machine, virtual_to_logical),
        n if n == DEVID_TO_UDEVID.number => translate(machine, Machine::physical),
        n if n == LUDEVID_TO_RUDEVID.number || n == RUDEVID_TO_LUDEVID.number => translate(machine, same),
        _ => Err(Errno::EINVAL),
    };
    result.into()
}

fn user_info(machine: &Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let info = UserInfo {
        admin: machine.is_admin(caller).into(),
        local: 0,
        max_devices: MAX_LOGICAL,
        max_physical: MAX_PHYSICAL,
        support_physical: 1,
    };
    Ok(caller.memory.write(arg, info.as_bytes()).map_or(size_of::<UserInfo>() as i64, |()| 0))
}

fn setup_table(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut setup = SetupTable::new_zeroed();
    if caller.memory.read(arg, setup.as_mut_bytes()).is_err() {
        return Ok(size_of::<SetupTable>() as i64);
    }
    machine.setup(caller, setup.devices).map(|()| 0)
}

fn device_list(machine: &mut Machine, caller: &Caller, arg: u64) -> Result<i64, Errno> {
    let mut list = DeviceList::new_zeroed();
    if caller.memory.read(arg, list.as_mut_bytes()).is_err() {
        return Ok(size_of::<DeviceList>() as i64);
    }
    if list.start > MAX_PHYSICAL || list.end > MAX_PHYSICAL || list.start >= list.end {
        return Err(Errno::EINVAL);
    }
    for logical in list.start..list.end {
        let Ok(physical) = machine.physical(caller, logical) else { continue };
        let sub = if physical < FIRST_VIRTUAL { 0 } else { (physical - FIRST_VIRTUAL) % 16 };
        let device = LogicalDevice {
            valid_and_type: 1 | HARDWARE_DAVINCI << 1,
            sub_device: sub as u8,
            card: Machine::card(physical) as u16,
            logical: logical as u16,
            physical: physical as u16,
        };
        let place = list.array.wrapping_add(u64::from(logical) * size_of::<LogicalDevice>() as u64);
        if caller.memory.write(place, device.as_bytes()).is_err() {
            return Ok(size_of::<LogicalDevice>() as i64);
        }
    }
    Ok(0)
}

fn virtual_to_logical(machine: &mut Machine, _: &Caller, physical: u32) -> Result<u32, Errno> {
    let known = machine.device(physical).is_some_and(|device| device.known());
    if physical >= FIRST_VIRTUAL && known { Ok(physical) } else { Err(Errno::EINVAL) }
}

/// Local and remote ids are the same on this host.
fn same(machine: &mut Machine, _: &Caller, physical: u32) -> Result<u32, Errno> {
    machine.device(physical).filter(|device| device.known()).map(|_| physical).ok_or(Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Place};
    use crate::driver::FileId;
    use crate::rig::{OK, Rig, TestProcess, refused};

    const A: TestProcess = TestProcess(100);
    const B: TestProcess = TestProcess(200);

    fn rig(config: Config) -> Rig {
        Rig::new(config)
    }

    fn list(rig: &mut Rig, process: TestProcess, file: FileId, end: u32) -> Vec<(u16, u16)> {
        let array = rig.heap.put(&vec![0; end as usize * 8]);
        let (outcome, _) = rig.call(process, file, GET_DEV_LIST.request(), DeviceList { start: 0, end, array });
        assert_eq!(outcome, OK);
        let devices = (0..u64::from(end)).map(|index| rig.heap.get::<LogicalDevice>(array + index * 8));
        devices.filter(|device| device.valid()).map(|device| (device.logical, device.physical)).collect()
    }

    fn setup(rig: &mut Rig, process: TestProcess, file: FileId, devices: u32) -> Outcome {
        rig.call(process, file, SETUP_DEV_TABLE.request(), SetupTable { devices }).0
    }

    fn physical(rig: &mut Rig, process: TestProcess, file: FileId, from: u32) -> Result<u32, Errno> {
        let (outcome, answer) = rig.call(process, file, DEVID_TO_UDEVID.request(), Translation { from, to: 77 });
        match outcome {
            Outcome::Done(Ok(0)) => Ok(answer.to),
            Outcome::Done(Err(errno)) => {
                assert_eq!(answer.to, 77, "nothing is written on failure");
                Err(errno)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_host_lists_every_card_even_without_setup() {
        let mut rig = rig(Config { virtual_instances: vec![103], ..Config::default() });
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(list(&mut rig, A, file, 100), [(0, 0), (1, 1)]);
        assert_eq!(list(&mut rig, A, file, 1124), [(0, 0), (1, 1), (103, 103)]);
        for devices in [100, 0, 5000] {
            assert_eq!(setup(&mut rig, A, file, devices), OK);
        }
        assert_eq!(physical(&mut rig, A, file, 1), Ok(1));
        assert_eq!(physical(&mut rig, A, file, 103), Ok(103));
        for absent in [2, 64, 99, 100, 1123, u32::MAX] {
            assert_eq!(physical(&mut rig, A, file, absent), Err(Errno::EINVAL));
        }
        let (outcome, info) = rig.call(A, file, GET_USER_INFO.request(), UserInfo::default());
        assert_eq!(outcome, OK);
        assert_eq!(info.as_bytes(), [1u32, 0, 100, 1124, 1].as_bytes());
    }

    #[test]
    fn a_container_numbers_what_it_opened_before_setup() {
        let mut rig = rig(Config { places: vec![Place::container(&[1])], ..Config::default() });
        assert_eq!(rig.open(A, "/dev/davinci0"), Err(Errno::ENOENT));
        rig.open(A, "/dev/davinci1").unwrap();
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(setup(&mut rig, A, file, 1), OK);
        assert_eq!(list(&mut rig, A, file, 1124), [(0, 1)]);
        assert_eq!((physical(&mut rig, A, file, 0), physical(&mut rig, A, file, 1)), (Ok(1), Err(Errno::EINVAL)));
        let second = rig.module(B, "uda").unwrap();
        assert_eq!(list(&mut rig, B, second, 100), [(0, 1)]);
    }

    #[test]
    fn a_container_that_queries_before_setup_loses_its_devices() {
        let mut rig = rig(Config { places: vec![Place::container(&[0])], ..Config::default() });
        rig.open(A, "/dev/davinci0").unwrap();
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(list(&mut rig, A, file, 100), []);
        assert_eq!(setup(&mut rig, A, file, 1), refused(Errno::EBUSY));
        rig.open(A, "/dev/davinci0").unwrap();
        assert_eq!(setup(&mut rig, A, file, 2), refused(Errno::EBUSY));
        assert_eq!(setup(&mut rig, A, file, 1), refused(Errno::EBUSY));
        rig.open(A, "/dev/davinci0").unwrap();
        assert_eq!(setup(&mut rig, A, file, 1), OK);
        assert_eq!(list(&mut rig, A, file, 100), [(0, 0)]);
    }

    #[test]
    fn a_containers_table_is_frozen_by_its_first_setup() {
        let mut rig = rig(Config { places: vec![Place::container(&[0])], ..Config::default() });
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(setup(&mut rig, A, file, 0), OK);
        rig.open(A, "/dev/davinci0").unwrap();
        assert_eq!(setup(&mut rig, A, file, 1), OK);
        assert_eq!(list(&mut rig, A, file, 100), []);
    }

    #[test]
    fn only_a_container_that_did_setup_keeps_others_out() {
        let both = || Place::container(&[0, 1]);
        let mut rig = rig(Config { places: vec![both(), both()], occupied: vec![1], ..Config::default() });
        rig.driver.machine.put(B.0, 1);
        let [a, b] = [A, B].map(|process| rig.module(process, "uda").unwrap());
        rig.open(A, "/dev/davinci0").unwrap();
        rig.open(B, "/dev/davinci0").unwrap();
        assert_eq!(setup(&mut rig, B, b, 1), OK);
        assert_eq!(setup(&mut rig, A, a, 1), refused(Errno::EBUSY));
        assert_eq!(rig.open(A, "/dev/davinci0"), Err(Errno::EBUSY));
        assert_eq!(rig.open(A, "/dev/davinci1"), Err(Errno::EBUSY), "a container outside has it");
        rig.driver.machine.end_container(1);
        assert!(rig.open(A, "/dev/davinci0").is_ok());
    }

    #[test]
    fn a_restricted_user_gets_a_table_of_its_own_and_can_blind_the_host() {
        let places = vec![Place::host(), Place::host_without(&[0])];
        let mut rig = rig(Config { places, ..Config::default() });
        rig.driver.machine.put(B.0, 1);
        let [a, b] = [A, B].map(|process| rig.module(process, "uda").unwrap());
        assert_eq!(setup(&mut rig, B, b, 100), OK);
        assert_eq!(list(&mut rig, B, b, 100), [(0, 1)]);
        // Its table was created first and hides the host's own.
        assert_eq!(setup(&mut rig, A, a, 100), OK);
        assert_eq!(list(&mut rig, A, a, 100), []);
        assert_eq!(physical(&mut rig, A, a, 0), Err(Errno::EINVAL));
    }

    #[test]
    fn a_restricted_user_who_did_no_setup_sees_the_hosts_table() {
        let places = vec![Place::host(), Place::host_without(&[0, 1])];
        let mut rig = rig(Config { places, ..Config::default() });
        rig.driver.machine.put(B.0, 1);
        let [a, b] = [A, B].map(|process| rig.module(process, "uda").unwrap());
        assert_eq!(setup(&mut rig, A, a, 100), OK);
        assert_eq!(list(&mut rig, B, b, 100), [(0, 0), (1, 1)]);
        assert_eq!(setup(&mut rig, B, b, 100), refused(Errno::ENODEV));
        assert_eq!(setup(&mut rig, B, b, 100), OK, "given only once");
        assert_eq!(list(&mut rig, B, b, 100), []);
        rig.exit(B, &[b]);
        assert_eq!(list(&mut rig, A, a, 100), [(0, 0), (1, 1)]);
    }

    #[test]
    fn the_first_setup_waits_for_detected_cards() {
        let boot = Duration::from_millis(20);
        let mut rig = rig(Config { phases: vec![(1, Phase::Detected)], boot: Some(boot), ..Config::default() });
        let file = rig.module(A, "uda").unwrap();
        let Outcome::Sleep(until) = setup(&mut rig, A, file, 100) else { panic!("it sleeps") };
        assert!(until <= Instant::now() + boot);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        assert_eq!(setup(&mut rig, A, file, 100), OK);
        assert_eq!(list(&mut rig, A, file, 100), [(0, 0), (1, 1)]);
    }

    #[test]
    fn the_wait_ends_and_later_cards_are_appended() {
        let phases = vec![(0, Phase::Detected), (1, Phase::Detected)];
        let mut rig = rig(Config { phases, setup_patience: Duration::ZERO, ..Config::default() });
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(setup(&mut rig, A, file, 100), refused(Errno::ENODEV));
        assert_eq!(setup(&mut rig, A, file, 100), OK);
        assert_eq!(list(&mut rig, A, file, 100), []);
        assert_eq!(rig.driver.machine.add_device(), 2);
        assert_eq!(list(&mut rig, A, file, 100), [(0, 2)]);
    }

    #[test]
    fn a_removed_card_is_still_listed_and_can_be_opened() {
        let mut rig = rig(Config { phases: vec![(1, Phase::Removed)], ..Config::default() });
        let file = rig.module(A, "uda").unwrap();
        assert_eq!(list(&mut rig, A, file, 100), [(0, 0), (1, 1)]);
        let node = rig.open(A, "/dev/davinci1").unwrap();
        assert_eq!(rig.ioctl(A, node, GET_USER_INFO.request(), 0), refused(Errno::ENOTTY));
    }
}
