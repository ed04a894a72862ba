//! `probe --open`: each device is opened, and what it offers is tried.
//!
//! A trial uses 2 MiB of a device, and one page of 1 GiB if one is free. Sharing is tried with a
//! second process, which is this program again. Everything is freed afterwards.
//!
//! The devices are opened, and then tried, at the same time. What does not end in time is unknown.

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
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

const PAGE: u64 = 2 << 20;
const GIANT: u64 = 1 << 30;

/// What was tried on a host.
pub(super) struct Trials {
    /// Whether the host has pages of 1 GiB.
    pub(super) host_giant_pages: Feature,
    devices: Vec<(LogicalId, Tried)>,
    failures: Vec<Found>,
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
    /// A device on which nothing could be tried.
    fn nothing(answer: Feature) -> Tried {
        Tried {
            capabilities: None,
            info: None,
            memory: answer.clone(),
            giant_pages: answer.clone(),
            host_access: answer.clone(),
            sharing: answer.clone(),
            between_devices: answer.clone(),
            peer: answer,
        }
    }
}

impl Trials {
    /// What was tried on a device.
    pub(super) fn of(&self, device: LogicalId) -> Option<&Tried> {
        self.devices.iter().find(|(id, _)| *id == device).map(|(_, tried)| tried)
    }

    /// What failed as a whole.
    pub(super) fn into_findings(self) -> Vec<Found> {
        self.failures
    }

    /// A device that could not be opened, or the session: nothing was tried on it.
    fn failed(&mut self, device: Option<LogicalId>, error: &str) {
        const REMEDY: &str =
            "The sentence above says which step failed. `selftest --device-process` tries each step alone.";
        let (code, sentence) = match device {
            Some(device) => ("device-not-opened", format!("device {device} could not be opened: {error}")),
            None => ("session-not-opened", format!("no memory session: {error}")),
        };
        self.failures.push(Found::tried(code, device.map(|device| device.0), sentence, REMEDY));
    }

    /// Something did not end in time.
    fn unfinished(&mut self, device: Option<LogicalId>, what: &str) {
        const REMEDY: &str = "Allow more time (--timeout); if that does not help, look at the device's health and \
            the kernel log.";
        let what = match device {
            Some(device) => format!("device {device} {what}"),
            None => what.to_owned(),
        };
        self.failures.push(Found::tried("not-tried-in-time", device.map(|device| device.0), what, REMEDY));
    }
}

/// Does each piece of work in a thread of its own, until this time, and returns the results in the
/// same order. Work that has not ended then has none; nobody waits for its thread.
fn at_once<T: Send + 'static, W: FnOnce() -> T + Send + 'static>(
    work: impl IntoIterator<Item = W>,
    until: Instant,
    progress: impl Fn(usize),
) -> Vec<Option<T>> {
    let (sender, results) = mpsc::channel();
    let mut done = Vec::new();
    for (index, work) in work.into_iter().enumerate() {
        done.push(None);
        let sender = sender.clone();
        // Without a thread its sender is dropped, and the work has no result.
        let _ = thread::Builder::new().spawn(move || {
            let result = work();
            let _ = sender.send((index, result));
        });
    }
    drop(sender);
    for number in 1..=done.len() {
        match results.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((index, result)) => done[index] = Some(result),
            Err(_) => break,
        }
        progress(number);
    }
    done
}

/// Tries everything on every device that may work, on all of them at once, until this time.
pub(super) fn run(survey: &Survey, until: Instant) -> Trials {
    let bar = terminal::waiting("opening a session");
    let trials = try_devices(survey, until, &|text| {
        if let Some(bar) = &bar {
            bar.set_message(text);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    trials
}

fn try_devices(survey: &Survey, until: Instant, show: &dyn Fn(String)) -> Trials {
    let mut trials = Trials {
        host_giant_pages: Feature::unknown("no memory session could be opened"),
        devices: Vec::new(),
        failures: Vec::new(),
    };
    let ids: Vec<LogicalId> = survey.devices.iter().filter(|npu| may_work(npu)).map(|npu| npu.logical).collect();
    if survey.memory_driver != Some(MemoryDriver::V2) || survey.generation.is_none() || ids.is_empty() {
        return trials;
    }
    let say =
        |what: &str, done: usize| show(format!("{what} {} ({done} done)", terminal::counted(ids.len(), "device")));
    let open = || Session::open().map(|session| (host_giant_pages(&session), session));
    let session = match at_once([open], until, |_| {}).remove(0) {
        Some(Ok((giant_pages, session))) => {
            trials.host_giant_pages = giant_pages;
            session
        }
        Some(Err(error)) => {
            let nothing = |id: &LogicalId| (*id, Tried::nothing(Feature::no("no memory session could be opened")));
            trials.devices = ids.iter().map(nothing).collect();
            trials.failed(None, &crate::said(error));
            return trials;
        }
        None => {
            let nothing = |id: &LogicalId| (*id, Tried::nothing(Feature::unknown("there was no time to try it")));
            trials.devices = ids.iter().map(nothing).collect();
            trials.unfinished(None, "no memory session was opened in time");
            return trials;
        }
    };
    // A device that takes too long must leave time to try the others.
    let half = Instant::now() + until.saturating_duration_since(Instant::now()) / 2;
    say("opening", 0);
    let work = ids.iter().map(|&id| {
        let session = session.clone();
        move || session.device(id)
    });
    let results = at_once(work, half, |done| say("opening", done));
    let mut opened = Vec::new();
    for (&id, result) in ids.iter().zip(results) {
        let nothing = match result {
            Some(Ok(device)) => {
                opened.push(device);
                continue;
            }
            Some(Err(error)) => {
                trials.failed(Some(id), &crate::said(error));
                Feature::no("the device could not be opened")
            }
            None => {
                trials.unfinished(Some(id), "was not open after half of the time");
                Feature::unknown("the device was not open in time")
            }
        };
        trials.devices.push((id, Tried::nothing(nothing)));
    }
    say("trying", 0);
    let tried: Vec<LogicalId> = opened.iter().map(Device::id).collect();
    let work = tried.iter().enumerate().map(|(index, id)| {
        let mut others = opened.clone();
        let split = survey.device(*id).and_then(|npu| npu.sharing_obstacle()).is_some();
        move || {
            let device = others.remove(index);
            Tried::on(&device, &others, split)
        }
    });
    let results = at_once(work, until, |done| say("trying", done));
    // The last thread that uses a device closes it.
    drop(opened);
    for (&id, result) in tried.iter().zip(results) {
        let result = result.unwrap_or_else(|| {
            trials.unfinished(Some(id), "was not tried to the end in time");
            Tried::nothing(Feature::unknown("it was not tried to the end in time"))
        });
        trials.devices.push((id, result));
    }
    // Otherwise the end of this process closes it.
    if trials.failures.iter().all(|failure| failure.code != "not-tried-in-time") {
        if let Some(Err(failed)) = at_once([|| session.close()], until, |_| {}).remove(0) {
            trials.failed(None, &crate::said(failed.error));
        }
    }
    trials
}

/// True if nothing is known that keeps a device from working.
pub(super) fn may_work(npu: &discovery::Npu) -> bool {
    matches!(npu.state, DeviceState::Working | DeviceState::Unknown)
}

/// The text of an error in one line.
fn line(error: impl std::fmt::Display) -> String {
    crate::said(error).replace('\n', " ")
}

/// A capability that was tried.
fn feature(tried: Result<Option<String>, Failure>) -> Feature {
    match tried {
        Ok(reason) => Feature { reason, ..Feature::yes() },
        Err(Failure::Failed(error) | Failure::Skipped(error)) => Feature::no(line(error)),
    }
}

impl Tried {
    fn on(device: &Device, others: &[Device], split: bool) -> Tried {
        let capabilities = device.capabilities();
        let info = device.memory_info(MemoryKind::Hbm).ok();
        let mapping = match mapped(device) {
            Ok(mapping) => mapping,
            Err(Failure::Failed(error) | Failure::Skipped(error)) => {
                let nothing = Tried::nothing(Feature::no(line(error)));
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

fn peers(mapping: &Mapping, device: &Device, others: &[Device]) -> Feature {
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
