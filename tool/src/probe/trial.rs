//! `probe --open`: each device is opened, and what it offers is tried.
//!
//! A trial uses 2 MiB of a device, and one page of 1 GiB if one is free. Sharing is tried with a
//! second process, which is this program again. Everything is freed afterwards.

use super::document::{Feature, Found};
use crate::selftest::Failure;
use crate::selftest::sharing::Peer;
use crate::session_options::SessionOptions;
use crate::terminal;
use ascend_vmm::Bytes;
use ascend_vmm::discovery::{self, DeviceState, MemoryDriver, Survey};
use ascend_vmm::share::BareTgid;
use ascend_vmm::{
    Capabilities, Device, Kind, LogicalId, Mapping, MemoryInfo, MemoryKind, Page, ReserveOptions, Session,
};

const PAGE: u64 = 2 << 20;
const GIANT: u64 = 1 << 30;

/// What was tried on a host.
pub(super) struct Trials {
    /// Whether the host has pages of 1 GiB.
    pub(super) host_giant_pages: Feature,
    devices: Vec<(LogicalId, Tried)>,
    /// What failed as a whole.
    failures: Vec<(Option<LogicalId>, String)>,
}

/// What was tried on a device.
pub(super) struct Tried {
    pub(super) capabilities: Option<Capabilities>,
    pub(super) info: Option<MemoryInfo>,
    pub(super) memory: Feature,
    pub(super) giant_pages: Feature,
    pub(super) host_access: Feature,
    pub(super) sharing: Feature,
    pub(super) between_devices: Feature,
    pub(super) peer: Feature,
}

impl Tried {
    /// A device on which nothing can be tried.
    fn nothing(reason: &str) -> Tried {
        let no = || Feature::no(reason);
        Tried {
            capabilities: None,
            info: None,
            memory: no(),
            giant_pages: no(),
            host_access: no(),
            sharing: no(),
            between_devices: no(),
            peer: no(),
        }
    }
}

impl Trials {
    /// What was tried on a device.
    pub(super) fn of(&self, device: LogicalId) -> Option<&Tried> {
        self.devices.iter().find(|(id, _)| *id == device).map(|(_, tried)| tried)
    }

    /// What failed as a whole.
    pub(super) fn findings(&self) -> Vec<Found> {
        let remedy = "The sentence above says which step failed. `selftest --device-process` tries each step alone.";
        let found = |(device, sentence): &(Option<LogicalId>, String)| match device {
            Some(device) => Found::tried(
                "device-not-opened",
                Some(device.0),
                format!("device {device} could not be opened: {sentence}"),
                remedy,
            ),
            None => Found::tried("session-not-opened", None, format!("no memory session: {sentence}"), remedy),
        };
        self.failures.iter().map(found).collect()
    }
}

/// Tries everything on every device that may work.
pub(super) fn run(survey: &Survey) -> Trials {
    let mut trials = Trials {
        host_giant_pages: Feature::unknown("no memory session could be opened"),
        devices: Vec::new(),
        failures: Vec::new(),
    };
    let worth_trying = |npu: &&discovery::Npu| matches!(npu.state, DeviceState::Working | DeviceState::Unknown);
    let ids: Vec<LogicalId> = survey.devices.iter().filter(worth_trying).map(|npu| npu.logical).collect();
    if survey.memory_driver != Some(MemoryDriver::V2) || survey.generation.is_none() || ids.is_empty() {
        return trials;
    }
    // Each device is opened, and then tried.
    let bar = terminal::steps("opening a session", 2 * ids.len() as u64);
    let session = match Session::open() {
        Ok(session) => session,
        Err(error) => {
            let reason = "no memory session could be opened";
            trials.devices = ids.iter().map(|id| (*id, Tried::nothing(reason))).collect();
            trials.failures.push((None, error.to_string()));
            return trials;
        }
    };
    trials.host_giant_pages = host_giant_pages(&session);
    let mut opened = Vec::new();
    for id in ids {
        bar.set_message(format!("opening device {id}"));
        bar.inc(1);
        match session.device(id) {
            Ok(device) => opened.push(device),
            Err(error) => {
                trials.devices.push((id, Tried::nothing("the device could not be opened")));
                trials.failures.push((Some(id), error.to_string()));
            }
        }
    }
    for device in &opened {
        bar.set_message(format!("trying device {}", device.id()));
        bar.inc(1);
        let others: Vec<&Device> = opened.iter().filter(|other| other.id() != device.id()).collect();
        let splits = survey.device(device.id()).and_then(|npu| npu.sharing_obstacle()).is_some();
        trials.devices.push((device.id(), Tried::on(device, &others, splits)));
    }
    drop(opened);
    bar.finish_and_clear();
    if let Err(failed) = session.close() {
        trials.failures.push((None, failed.error.to_string()));
    }
    trials
}

/// The text of an error in one line.
fn line(error: impl std::fmt::Display) -> String {
    error.to_string().replace('\n', " ")
}

/// A capability that was tried.
fn feature(tried: Result<Option<String>, Failure>) -> Feature {
    match tried {
        Ok(reason) => Feature { reason, ..Feature::yes() },
        Err(Failure::Failed(error) | Failure::Skipped(error)) => Feature::no(line(error)),
    }
}

impl Tried {
    fn on(device: &Device, others: &[&Device], split: bool) -> Tried {
        let capabilities = device.capabilities();
        let info = device.memory_info(MemoryKind::Hbm).ok();
        let mapping = match mapped(device) {
            Ok(mapping) => mapping,
            Err(Failure::Failed(error) | Failure::Skipped(error)) => {
                let nothing = Tried::nothing(&line(error));
                return Tried { capabilities: Some(capabilities), info, ..nothing };
            }
        };
        // What cannot be shared was not tried, and says so by itself.
        let shared = |with: &Device| if split { Ok(None) } else { share(&mapping, with) };
        let by_name = (!capabilities.share_over_external_bus).then(|| {
            "by handles; by name the driver refuses it between cards on PCI Express \
             (share_over_external_bus is off, the vendor's code is 507899)"
                .to_owned()
        });
        Tried {
            memory: Feature::yes(),
            giant_pages: giant_pages(device, capabilities, info),
            host_access: host_access(&mapping, capabilities),
            sharing: feature(shared(device)),
            between_devices: match others.first() {
                Some(other) => feature(shared(other).map(|_| by_name)),
                None => Feature::unknown("no other device could be opened"),
            },
            peer: peers(&mapping, device, others),
            capabilities: Some(capabilities),
            info,
        }
    }
}

/// New memory, mapped, written and read back.
fn mapped(device: &Device) -> Result<Mapping, Failure> {
    let memory = device.create(PAGE)?;
    let mapping = device.session().reserve(PAGE)?.map(0, &memory)?;
    let wrote = *b"ascend-vmm probe";
    mapping.write(PAGE - 16, &wrote)?;
    let mut read = [0; 16];
    mapping.read(PAGE - 16, &mut read)?;
    if read == wrote { Ok(mapping) } else { Err(not_read_back()) }
}

/// Memory that does not keep what was written.
fn not_read_back() -> Failure {
    Failure::Failed("what was written was not read back".into())
}

fn giant_pages(device: &Device, capabilities: Capabilities, info: Option<MemoryInfo>) -> Feature {
    if !capabilities.giant_pages {
        return Feature::no("the device reports that it has none");
    }
    match info {
        Some(info) if info.giant_free < GIANT => {
            Feature::no(format!("none is free ({} in all)", Bytes(info.giant_total).rounded()))
        }
        _ => feature(giant_page(device)),
    }
}

fn giant_page(device: &Device) -> Result<Option<String>, Failure> {
    let memory = device.create_with(GIANT, Kind { page: Page::Giant, ..Kind::default() })?;
    let options = ReserveOptions::default().alignment(GIANT);
    let mapping = device.session().reserve_with(GIANT, &options)?.map(0, &memory)?;
    mapping.write(GIANT - 1, b"x")?;
    Ok(None)
}

fn host_giant_pages(session: &Session) -> Feature {
    if !session.has_host_giant_pages() {
        return Feature::no("the host's driver reports that it has none");
    }
    let kind = Kind { page: Page::Giant, memory: MemoryKind::P2pDdr };
    feature(session.host().and_then(|host| host.create_with(GIANT, kind)).map(|_| None).map_err(Failure::from))
}

fn host_access(mapping: &Mapping, capabilities: Capabilities) -> Feature {
    match capabilities {
        Capabilities { cpu_access_huge: true, .. } => {}
        Capabilities { cpu_access: true, .. } => {
            return Feature::no("the device offers it only for small pages, which this library does not use");
        }
        _ => return Feature::no("the device reports that its memory is not in its PCI window"),
    }
    let tried = || -> Result<Option<String>, Failure> {
        let view = mapping.host_view()?;
        view.store_u64(0, 42)?;
        let mut read = [0; 8];
        mapping.read(0, &mut read)?;
        if u64::from_le_bytes(read) == 42 { Ok(None) } else { Err(not_read_back()) }
    };
    feature(tried())
}

/// Shares the memory with a second process that imports it on `with`.
fn share(mapping: &Mapping, with: &Device) -> Result<Option<String>, Failure> {
    let export = mapping.memory().export()?;
    let mut peer = Peer::start(with.id(), SessionOptions::default())?;
    export.trust(&[BareTgid::of_process(&with.session(), peer.child().id())?])?;
    peer.request(&format!("import {}", export.ticket()?))?;
    peer.request("write 1")?;
    peer.end()?;
    Ok(None)
}

fn peers(mapping: &Mapping, device: &Device, others: &[&Device]) -> Feature {
    let (mut granted, mut refused) = (Vec::new(), None);
    for other in others {
        let reached = discovery::can_access(other.id(), device.id()).and_then(|linked| {
            if linked { mapping.grant(other).and_then(|()| mapping.is_granted(other)) } else { Ok(false) }
        });
        match reached {
            Ok(true) => granted.push(other.id().0),
            Ok(false) => {}
            Err(error) => refused = Some(line(error)),
        }
    }
    let reason = refused.unwrap_or_else(|| "no other open device can reach it".to_owned());
    match granted.len() {
        0 => Feature::no(reason),
        all if all == others.len() => Feature::yes(),
        _ => Feature { reason: Some(format!("only from {}", terminal::devices(&granted))), ..Feature::yes() },
    }
}
