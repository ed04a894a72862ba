//! The hardware and firmware of the emulated host: devices, their numbering, their memory, and the
//! processes that run on them.
//!
//! A device has a *physical* id (udevid): 0 to 63 for whole cards, 100 and up for virtual
//! instances. Clients use *logical* ids, indices into the table of the mount namespace that they
//! run in; the tables are in `uda`. A device process is what the firmware runs on behalf of one
//! host process; memory needs it (see `tsd` for how it is started).

use crate::caller::Caller;
use crate::chip::Chip;
use crate::config::{Attachment, Config, Daemon, DeviceProcess, Namespace, Phase, Place};
use crate::trap::Trap;
use crate::uda::Tables;
use crate::urd::PeerAccess;
use ascend_ioctl::uda::FIRST_VIRTUAL;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The id of the host wherever a device id is expected.
pub const HOST: u32 = 65;

/// A device process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Companion {
    /// Its pid on the device.
    pub pid: i32,
    /// The device believes that the host process is gone.
    pub orphaned: bool,
}

/// An NPU.
#[derive(Debug)]
pub struct Device {
    /// Its state.
    pub phase: Phase,
    /// It stopped answering permanently.
    pub dead: bool,
    /// It does not answer messages until then.
    pub silent_until: Option<Instant>,
    /// 0 normal, 1 minor, 2 major, 3 fatal.
    pub alarm: u32,
    /// Bytes of HBM in use, as counted by the memory module.
    pub used: u64,
    /// How often it was restored after it had died or been removed.
    pub(crate) revivals: u32,
    /// Device processes by host tgid.
    companions: BTreeMap<i32, Companion>,
    last_pid: i32,
}

impl Device {
    fn new(phase: Phase) -> Self {
        Device {
            phase,
            dead: false,
            silent_until: None,
            alarm: 0,
            used: 0,
            revivals: 0,
            companions: BTreeMap::new(),
            // The firmware's own processes have smaller pids.
            last_pid: 1000,
        }
    }

    /// Whether the device answers messages: it is up and not dead.
    pub fn answers(&self) -> bool {
        !self.dead && matches!(self.phase, Phase::Ready | Phase::Resetting)
    }

    /// Whether the driver has an instance of it. A removed card keeps its instance.
    pub fn known(&self) -> bool {
        self.phase != Phase::Detected
    }
}

/// Hardware and firmware, shared by all modules of the driver.
pub struct Machine {
    /// Configuration of the host.
    pub config: Config,
    /// Traps that clients triggered. The front collects them after each call and kills the client.
    pub traps: Vec<Trap>,
    /// Copies between host and devices fail on the link.
    pub link_broken: bool,
    /// Calls of URD and of the memory module that were refused in a way that the driver reports as
    /// an error in the kernel's log. Of the memory module these are unknown numbers alone.
    pub logged_refusals: u32,
    /// Behaviour of the daemon, as configured or as set by a test since.
    pub daemon: Daemon,
    /// Processes and devices for which SETUP_DEVICE was refused because no device process runs, and
    /// never granted since.
    pub refused_setups: BTreeSet<(i32, u32)>,
    /// What identifies the living process with an id, as in [`Caller::identity`]; `None` if there
    /// is none.
    pub identity: fn(i32) -> Option<u64>,
    pub(crate) devices: BTreeMap<u32, Device>,
    pub(crate) tables: Tables,
    pub(crate) peers: PeerAccess,
    placed: BTreeMap<i32, usize>,
    booted: Instant,
}

impl Machine {
    /// The health of a device, if the driver can read it.
    pub fn health(&self, physical: u32) -> Option<u32> {
        let device = self.device(physical).filter(|_| !self.config.strange_firmware)?;
        matches!(device.phase, Phase::Ready | Phase::Resetting).then_some(device.alarm)
    }

    /// A freshly booted host.
    pub fn new(config: Config) -> Self {
        let phase = |id: u32| config.phases.iter().find(|(of, _)| *of == id).map_or(Phase::Ready, |(_, phase)| *phase);
        let ids = (0..config.devices).chain(config.virtual_instances.iter().copied());
        let devices = ids.map(|id| (id, Device::new(phase(id)))).collect();
        Machine {
            traps: Vec::new(),
            link_broken: false,
            logged_refusals: 0,
            daemon: config.daemon.clone(),
            refused_setups: BTreeSet::new(),
            identity: |_| Some(0),
            devices,
            tables: Tables::default(),
            peers: PeerAccess::default(),
            placed: BTreeMap::new(),
            booted: Instant::now(),
            config,
        }
    }

    /// A device by its physical id.
    pub fn device(&self, physical: u32) -> Option<&Device> {
        self.devices.get(&physical)
    }

    /// A device by its physical id.
    pub fn device_mut(&mut self, physical: u32) -> Option<&mut Device> {
        self.devices.get_mut(&physical)
    }

    /// The physical ids of all devices in any state.
    pub fn physical_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.devices.keys().copied()
    }

    /// When detected devices become ready, if ever.
    pub(crate) fn boot_time(&self) -> Option<Instant> {
        self.config.boot.map(|after| self.booted + after)
    }

    /// Advances time: devices that finished booting are added to the driver and to the tables that
    /// list every device.
    pub(crate) fn advance(&mut self, now: Instant) {
        if self.boot_time().is_none_or(|at| now < at) {
            return;
        }
        let up: Vec<u32> = self
            .devices
            .iter_mut()
            .filter(|(_, device)| device.phase == Phase::Detected)
            .map(|(id, device)| {
                device.phase = Phase::Ready;
                *id
            })
            .collect();
        for id in up {
            self.tables.added(id);
        }
    }

    /// Where a process runs: its index in [`Config::places`].
    pub fn place_of(&self, tgid: i32) -> usize {
        self.placed.get(&tgid).copied().unwrap_or(0)
    }

    /// The place where a process runs; `None` for a host that was configured without places.
    pub(crate) fn surroundings(&self, tgid: i32) -> Option<&Place> {
        self.config.places.get(self.place_of(tgid))
    }

    /// The kind of mount namespace that a process is in.
    pub(crate) fn namespace_of(&self, tgid: i32) -> Namespace {
        self.surroundings(tgid).map(|place| place.namespace).unwrap_or_default()
    }

    /// Puts a process, and those that it starts afterwards, into a place. Call it before the
    /// process opens a node of the driver.
    pub fn put(&mut self, tgid: i32, place: usize) {
        self.placed.insert(tgid, place);
    }

    /// Places a process that was not placed itself: it runs where its nearest placed ancestor does.
    pub(crate) fn inherit_place(&mut self, tgid: i32) {
        if self.placed.is_empty() || self.placed.contains_key(&tgid) {
            return;
        }
        let mut ancestor = parent(tgid);
        while let Some(of) = ancestor {
            if let Some(place) = self.placed.get(&of).copied() {
                self.placed.insert(tgid, place);
                return;
            }
            ancestor = parent(of);
        }
    }

    /// The address space of a process is gone.
    pub(crate) fn exit(&mut self, tgid: i32) {
        self.tables.exit(tgid);
    }

    /// Whether the driver treats the caller as an administrator: on the host or in a privileged
    /// container.
    pub(crate) fn is_admin(&self, caller: &Caller) -> bool {
        self.namespace_of(caller.tgid) != Namespace::Container
    }

    /// The card of a device; for a virtual instance the card that it is part of.
    pub fn card(physical: u32) -> u32 {
        if physical < FIRST_VIRTUAL { physical } else { (physical - FIRST_VIRTUAL) / 16 }
    }

    /// PCI address: bus, device, function. Made up; one bus per card.
    pub fn pci(physical: u32) -> (u8, u8, u8) {
        (0x41u8.wrapping_add(2 * Machine::card(physical) as u8), 0, 0)
    }

    /// The chip of this host's devices.
    pub(crate) fn kind(&self) -> Chip {
        Chip::named(&self.config.chip)
    }

    /// Chip and die of a device: the ids of devices count the dies of all chips.
    pub(crate) fn chip(&self, physical: u32) -> (u32, u32) {
        let (card, dies) = (Machine::card(physical), self.kind().dies);
        (card / dies % 16, card % dies)
    }

    /// Vendor, subsystem vendor, device and subsystem device of the PCI functions. The subsystem
    /// device is made up.
    pub(crate) fn pci_ids(&self) -> [u32; 4] {
        let device = match self.config.attachment {
            Attachment::Pcie => 0xD802,
            Attachment::Hccs => 0xD803,
        };
        [0x19E5, 0x19E5, device, 0x4000]
    }

    /// The id in the super pod; from the low bits: physical id, die, chip and server.
    pub fn sdid(&self, physical: u32) -> u32 {
        let (chip, die) = self.chip(physical);
        physical | die << 16 | chip << 18 | self.config.server << 22
    }

    /// The state word of a device: 0 initialising, 1 working, 2 exception, 4 communication lost.
    pub(crate) fn state_of(&self, physical: u32) -> u32 {
        match self.device(physical) {
            Some(device) if device.dead => 4,
            Some(device) => match device.phase {
                Phase::Ready | Phase::Resetting => 1,
                Phase::Detected | Phase::Registered => 0,
                Phase::Removed => 4,
            },
            None => 4,
        }
    }

    /// Whether both devices requested access to each other.
    pub fn peers(&self, one: u32, other: u32) -> bool {
        one == other || self.peers.both(one, other)
    }

    /// The pid of the device process that is bound to a host process, if one runs. One whose host
    /// process is believed gone does not count; what the firmware really does then is not known.
    pub fn device_process(&self, tgid: i32, physical: u32) -> Option<i32> {
        let device = self.devices.get(&physical).filter(|device| device.answers())?;
        device.companions.get(&tgid).filter(|companion| !companion.orphaned).map(|companion| companion.pid)
    }

    /// Whether a device process runs, even if its host process is believed gone.
    pub(crate) fn runs_device_process(&self, tgid: i32, physical: u32) -> bool {
        self.devices.get(&physical).is_some_and(|device| device.companions.contains_key(&tgid))
    }

    /// The device process for SETUP_DEVICE, started now if the host does that by itself.
    pub fn companion(&mut self, tgid: i32, physical: u32) -> Option<i32> {
        let running = self.device_process(tgid, physical);
        if running.is_none() && self.config.device_process == DeviceProcess::Automatic {
            return self.start_device_process(tgid, physical);
        }
        running
    }

    /// Starts a device process; `None` if the device does not answer or is full.
    pub(crate) fn start_device_process(&mut self, tgid: i32, physical: u32) -> Option<i32> {
        let limit = self.config.device_process_limit;
        let device = self.devices.get_mut(&physical).filter(|device| device.answers())?;
        if device.companions.len() >= limit {
            return None;
        }
        device.last_pid += 1;
        let pid = device.last_pid;
        device.companions.insert(tgid, Companion { pid, orphaned: false });
        Some(pid)
    }

    /// Ends a device process, with everything that it held on the device.
    pub fn end_device_process(&mut self, tgid: i32, physical: u32) -> bool {
        self.devices.get_mut(&physical).is_some_and(|device| device.companions.remove(&tgid).is_some())
    }

    /// Reports to every device that a host process is gone.
    pub(crate) fn orphan(&mut self, tgid: i32) {
        for device in self.devices.values_mut() {
            if let Some(companion) = device.companions.get_mut(&tgid) {
                companion.orphaned = true;
            }
        }
    }

    /// All device processes: physical id, host tgid, process.
    pub fn companions(&self) -> impl Iterator<Item = (u32, i32, Companion)> + '_ {
        self.devices.iter().flat_map(|(id, device)| device.companions.iter().map(|(tgid, it)| (*id, *tgid, *it)))
    }

    /// Kills a device: it answers nothing any more, and its processes are gone.
    pub fn kill_device(&mut self, physical: u32) {
        if let Some(device) = self.devices.get_mut(&physical) {
            device.dead = true;
            device.alarm = 3;
            device.companions.clear();
        }
    }

    /// Makes a device not answer messages for a while.
    pub fn silence_device(&mut self, physical: u32, time: Duration) {
        if let Some(device) = self.devices.get_mut(&physical) {
            device.silent_until = Some(Instant::now() + time);
        }
    }

    /// Removes a card. The driver continues to list it, and its node stays.
    pub fn remove_device(&mut self, physical: u32) {
        if let Some(device) = self.devices.get_mut(&physical) {
            device.phase = Phase::Removed;
            device.companions.clear();
        }
    }

    /// Restores a removed or dead card to use.
    pub fn restore_device(&mut self, physical: u32) {
        if let Some(device) = self.devices.get_mut(&physical) {
            let (used, last_pid, revivals) = (device.used, device.last_pid, device.revivals + 1);
            *device = Device { used, last_pid, revivals, ..Device::new(Phase::Ready) };
        }
    }

    /// Adds a whole card to the running host; returns its physical id.
    pub fn add_device(&mut self) -> u32 {
        let id = self.config.devices;
        self.config.devices += 1;
        self.devices.insert(id, Device::new(Phase::Ready));
        self.tables.added(id);
        id
    }
}

/// The parent of a process, while both live.
pub(crate) fn parent(tgid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{tgid}/stat")).ok()?;
    // The name in parentheses may contain any character, so fields are counted from its end.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok().filter(|parent| *parent > 0)
}
