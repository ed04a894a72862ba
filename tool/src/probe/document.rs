//! What `probe` found: docs/schema/probe.json.

use super::holders::Holder;
use super::trial::{Trials, may_work};
use ascend_vmm::Bytes;
use ascend_vmm::discovery::{self, Environment, Finding, Machine, MemoryDriver, Npu, Severity, Split, Survey};
use ascend_vmm::{Kind, Page};
use serde::Serialize;

/// The output.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    version: u32,
    tool: &'static str,
    pub(super) container: Option<bool>,
    pub(super) driver: Driver,
    granularity: Vec<Granularity>,
    pub(super) host: HostFeatures,
    pub(super) devices: Vec<Device>,
    pub(super) holders: Vec<Holder>,
    pub(super) findings: Vec<Found>,
}

#[derive(Debug, Serialize)]
pub(super) struct Driver {
    pub(super) package: Option<String>,
    pub(super) internal: Option<String>,
    pub(super) version_file: Option<String>,
    pub(super) generation: Option<String>,
    pub(super) memory: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Granularity {
    place: &'static str,
    page: &'static str,
    minimum: u64,
    recommended: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct HostFeatures {
    pub(super) giant_pages: Feature,
}

#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) logical: u32,
    pub(super) physical: u32,
    pub(super) user: Option<u32>,
    pub(super) identity: String,
    pub(super) chip: Option<String>,
    pub(super) soc: Option<String>,
    pub(super) ai_cores: Option<u32>,
    pub(super) pci: Option<String>,
    pub(super) hbm: Option<Memory>,
    pub(super) huge_pages: Option<Memory>,
    pub(super) giant_pages: Option<Memory>,
    pub(super) state: String,
    pub(super) health: Option<String>,
    pub(super) super_pod: Option<Pod>,
    virtual_instance: Option<Instance>,
    split: Option<&'static str>,
    machine: Option<&'static str>,
    share_over_external_bus: Option<bool>,
    pub(super) features: Features,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Memory {
    pub(super) total: u64,
    pub(super) free: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Pod {
    pub(super) sdid: u32,
    pub(super) server: u32,
    pub(super) super_pod: u32,
    pub(super) chassis: u32,
}

#[derive(Debug, Serialize)]
struct Instance {
    card: u32,
    number: u32,
}

#[derive(Debug, Serialize)]
pub(super) struct Features {
    vmm: Feature,
    sharing: Feature,
    fabric: Feature,
    peer: Feature,
    host_access: Feature,
    giant_pages: Feature,
    between_devices: Feature,
}

impl Features {
    /// Each with its name for people.
    pub(super) fn named(&self) -> [(&'static str, &Feature); 7] {
        [
            ("memory", &self.vmm),
            ("1 GiB pages", &self.giant_pages),
            ("CPU access", &self.host_access),
            ("sharing", &self.sharing),
            ("sharing between devices", &self.between_devices),
            ("peers", &self.peer),
            ("sharing between servers", &self.fabric),
        ]
    }
}

/// A capability: yes if everything that it needs was seen to work, no, or unknown.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Feature {
    pub(super) offered: Option<bool>,
    pub(super) reason: Option<String>,
    /// There is nothing here that it could be used for, which is no fault.
    #[serde(skip)]
    pub(super) pointless: bool,
}

impl Feature {
    pub(super) fn yes() -> Feature {
        Feature { offered: Some(true), reason: None, pointless: false }
    }

    pub(super) fn no(reason: impl Into<String>) -> Feature {
        Feature { offered: Some(false), reason: Some(reason.into()), pointless: false }
    }

    pub(super) fn unknown(reason: impl Into<String>) -> Feature {
        Feature { offered: None, reason: Some(reason.into()), pointless: false }
    }

    /// No, because there is nothing to use it with.
    pub(super) fn pointless(reason: impl Into<String>) -> Feature {
        Feature { pointless: true, ..Feature::no(reason) }
    }

    pub(super) fn word(&self) -> &'static str {
        match self.offered {
            _ if self.pointless => "-",
            Some(true) => "yes",
            Some(false) => "no",
            None => "?",
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) code: &'static str,
    pub(super) severity: &'static str,
    pub(super) device: Option<u32>,
    pub(super) sentence: String,
    pub(super) remedy: &'static str,
    pub(super) vendor: Option<&'static str>,
}

impl Found {
    fn new(finding: &Finding) -> Found {
        Found {
            code: finding.code(),
            severity: match finding.severity() {
                Severity::Note => "note",
                Severity::Warning => "warning",
                Severity::Fatal => "fatal",
            },
            device: finding.device().map(|device| device.0),
            sentence: finding.to_string(),
            remedy: finding.remedy(),
            vendor: finding.vendor_codes(),
        }
    }

    /// Something that was tried and did not work.
    pub(super) fn tried(code: &'static str, device: Option<u32>, sentence: String, remedy: &'static str) -> Found {
        Found { code, severity: "warning", device, sentence, remedy, vendor: Some("aclrtSetDevice: 507033 or 507899") }
    }
}

impl Document {
    pub(super) fn new(survey: &Survey, trials: Option<Trials>, holders: Vec<Holder>) -> Document {
        let versions = &survey.versions;
        let tried = trials.as_ref();
        let devices: Vec<Device> = survey.devices.iter().map(|npu| Device::new(npu, survey, tried)).collect();
        let all_work = !devices.is_empty() && devices.iter().all(|device| device.features.vmm.offered == Some(true));
        // Where every device works, it is no fault that none could be given a process.
        let stale = |finding: &&Finding| all_work && matches!(finding, Finding::NoDaemonNode(..));
        let mut findings: Vec<Found> =
            survey.findings.iter().filter(|finding| !stale(finding)).map(Found::new).collect();
        let host_giant_pages = match tried.map(|trials| trials.host_giant_pages.clone()) {
            Some(tried) => tried,
            None => match driver_obstacle(survey) {
                Some(obstacle) => Feature::no(obstacle),
                None => untried(),
            },
        };
        // The worst come first, and what was tried is a warning.
        let notes = findings.iter().position(|found| found.severity == "note").unwrap_or(findings.len());
        findings.splice(notes..notes, trials.map(Trials::into_findings).unwrap_or_default());
        Document {
            version: 1,
            tool: env!("CARGO_PKG_VERSION"),
            container: survey.environment.map(|environment| environment == Environment::Container),
            driver: Driver {
                package: versions.package.clone(),
                internal: versions.internal.clone(),
                version_file: versions.file.as_ref().map(|file| file.display().to_string()),
                generation: survey.generation.map(|generation| generation.to_string()),
                memory: match survey.memory_driver {
                    Some(MemoryDriver::V2) => Some("v2"),
                    Some(MemoryDriver::V3) => Some("v3"),
                    Some(MemoryDriver::Missing) | None => None,
                },
            },
            granularity: granularity(survey),
            host: HostFeatures { giant_pages: host_giant_pages },
            devices,
            holders,
            findings,
        }
    }

    /// Whether nothing is wrong, as far as was looked.
    pub(super) fn is_healthy(&self) -> bool {
        self.findings.iter().all(|found| found.severity == "note")
            && self.devices.iter().all(|device| device.features.vmm.offered != Some(false))
    }
}

/// Page sizes of the driver, if it is one that we know.
fn granularity(survey: &Survey) -> Vec<Granularity> {
    if survey.memory_driver != Some(MemoryDriver::V2) {
        return Vec::new();
    }
    let mut rows = Vec::new();
    for place in ["device", "host"] {
        for (name, page) in [("2 MiB", Page::Huge), ("1 GiB", Page::Giant)] {
            let size = Kind { page, ..Kind::default() }.granularity();
            rows.push(Granularity { place, page: name, minimum: size, recommended: size });
        }
    }
    rows
}

impl Device {
    fn new(npu: &Npu, survey: &Survey, trials: Option<&Trials>) -> Device {
        let tried = trials.and_then(|trials| trials.of(npu.logical));
        Device {
            logical: npu.logical.0,
            physical: npu.physical.0,
            user: npu.user.map(|user| user.0),
            identity: npu.identity.to_string(),
            chip: npu.chip.clone(),
            soc: npu.soc.clone(),
            ai_cores: npu.ai_cores,
            pci: npu.pci.map(|pci| pci.to_string()),
            hbm: npu.hbm.map(|hbm| Memory { total: hbm.total, free: hbm.free }),
            huge_pages: tried
                .and_then(|tried| tried.info)
                .map(|info| Memory { total: info.huge_total, free: info.huge_free }),
            giant_pages: tried
                .and_then(|tried| tried.info)
                .map(|info| Memory { total: info.giant_total, free: info.giant_free }),
            state: npu.state.to_string(),
            health: npu.health.map(|health| health.to_string()),
            super_pod: npu.super_pod.map(|pod| Pod {
                sdid: pod.sdid,
                server: pod.server,
                super_pod: pod.super_pod,
                chassis: pod.chassis,
            }),
            virtual_instance: npu.instance.map(|instance| Instance { card: instance.card.0, number: instance.number }),
            split: npu.split.map(|split| match split {
                Split::Whole => "whole",
                Split::VirtualMachines => "virtual machines",
                Split::Containers => "containers",
                Split::Other(_) => "other",
            }),
            machine: npu.machine.map(|machine| match machine {
                Machine::Physical => "physical",
                Machine::Virtual => "virtual",
                Machine::Container => "container",
            }),
            share_over_external_bus: tried
                .and_then(|tried| tried.capabilities)
                .map(|capabilities| capabilities.share_over_external_bus),
            features: Features::new(npu, survey, trials),
        }
    }
}

const NOT_TRIED: &str = "not tried; `probe --open` does";

/// What was not tried.
fn untried() -> Feature {
    Feature::unknown(NOT_TRIED)
}

impl Features {
    fn new(npu: &Npu, survey: &Survey, trials: Option<&Trials>) -> Features {
        let tried = trials.and_then(|trials| trials.of(npu.logical));
        let vmm = match (device_obstacle(npu, survey), tried) {
            (Some(obstacle), _) => Feature::no(obstacle),
            (None, Some(tried)) => tried.memory.clone(),
            (None, None) => untried(),
        };
        let unusable = vmm.offered == Some(false);
        // A capability needs memory, and whatever `obstacle` is about.
        let needs_memory = |obstacle: Option<Feature>, tried: Option<Feature>| match obstacle {
            _ if unusable => Feature::no("its memory cannot be used"),
            Some(obstacle) => obstacle,
            None => tried.unwrap_or_else(untried),
        };
        let split = || npu.sharing_obstacle().map(Feature::no);
        let others: Vec<&Npu> =
            survey.devices.iter().filter(|other| other.logical != npu.logical && may_work(other)).collect();
        let alone = || others.is_empty().then(|| Feature::pointless("there is no other device to use it with"));
        let unanswered = silence(survey).map(Feature::unknown);
        let fabric = match npu.super_pod {
            None if unanswered.is_some() => unanswered.clone(),
            None => Some(Feature::no("the device is in no super pod (the vendor's code is 207000)")),
            Some(_) => Some(Feature::unknown("only an import on another server of the super pod shows it")),
        };
        Features {
            sharing: needs_memory(split(), tried.map(|tried| tried.sharing.clone())),
            fabric: needs_memory(split().or(fabric), None),
            peer: needs_memory(
                alone().or_else(|| unanswered.clone()).or_else(|| no_link(npu, &others)),
                tried.map(|tried| tried.peer.clone()),
            ),
            host_access: needs_memory(None, tried.map(|tried| tried.host_access.clone())),
            giant_pages: needs_memory(None, tried.map(|tried| tried.giant_pages.clone())),
            between_devices: needs_memory(split().or_else(alone), tried.map(|tried| tried.between_devices.clone())),
            vmm,
        }
    }
}

/// Why memory of no device can be used with this driver.
fn driver_obstacle(survey: &Survey) -> Option<String> {
    let small = |finding: &Finding| matches!(finding, Finding::SmallAddressSpace { .. });
    if let Some(finding) = survey.findings.iter().find(|finding| small(finding)) {
        return Some(finding.to_string());
    }
    match survey.memory_driver {
        Some(MemoryDriver::V2) if survey.generation.is_none() => Some("the driver's generation is unknown".into()),
        Some(MemoryDriver::V2) => None,
        Some(MemoryDriver::V3) => Some("the memory interface is v3 (Ascend950), which is not served here".into()),
        Some(MemoryDriver::Missing) => Some("the driver's memory module is not loaded".into()),
        None => Some("the driver's memory module could not be queried".into()),
    }
}

/// Why the driver did not answer questions about the devices themselves.
fn silence(survey: &Survey) -> Option<String> {
    let silent = |finding: &&Finding| match finding {
        Finding::ModuleMissing(module) | Finding::ModuleUnloading(module) | Finding::ModuleRefused(module, _) => {
            *module == "URD"
        }
        Finding::Unanswered { .. } | Finding::NoThread { .. } => true,
        _ => false,
    };
    survey.findings.iter().find(silent).map(Finding::to_string)
}

/// Why memory of this device cannot be used, as far as queries tell. A device of which nothing is
/// known can be tried.
fn device_obstacle(npu: &Npu, survey: &Survey) -> Option<String> {
    let state = match npu.state {
        discovery::DeviceState::Working | discovery::DeviceState::Unknown => None,
        state => Some(format!("the device is in the state {state}")),
    };
    driver_obstacle(survey).or(state)
}

/// Why no other device can reach this one's memory, if the driver says so.
fn no_link(npu: &Npu, others: &[&Npu]) -> Option<Feature> {
    let mut reason = None;
    for other in others {
        match discovery::can_access(other.logical, npu.logical) {
            Ok(true) => return None,
            Ok(false) => {}
            Err(error) => reason = Some(crate::said(error)),
        }
    }
    Some(match reason {
        None => Feature::no("the topology does not let another device reach it"),
        Some(error) => Feature::unknown(format!("the driver did not say whether there is a link: {error}")),
    })
}

impl Device {
    /// What it can be used for, in a few words.
    pub(super) fn uses(&self) -> String {
        let named = self.features.named();
        let yes: Vec<&str> =
            named.iter().filter(|(_, feature)| feature.offered == Some(true)).map(|(name, _)| *name).collect();
        // The rest is below the table.
        const SHORT: [(&str, &str); 4] =
            [("memory", "memory"), ("CPU access", "CPU"), ("sharing", "sharing"), ("peers", "peers")];
        let short = |name: &str| SHORT.iter().find(|(long, _)| *long == name).map(|(_, short)| *short);
        let yes: Vec<&str> = yes.into_iter().filter_map(short).collect();
        match self.features.vmm.offered {
            Some(false) => "nothing".to_owned(),
            None if self.features.vmm.reason.as_deref() == Some(NOT_TRIED) => "not tried (--open)".to_owned(),
            None => "not known".to_owned(),
            _ => yes.join(", "),
        }
    }
}

/// One answer about some capabilities of some devices.
pub(super) struct FeatureGroup {
    pub(super) word: &'static str,
    pub(super) reason: Option<String>,
    pub(super) names: Vec<&'static str>,
    pub(super) devices: Vec<u32>,
}

/// Each answer once: first what works, then what does not, then what is not known.
pub(super) fn answers(devices: &[Device]) -> Vec<FeatureGroup> {
    let mut found: Vec<FeatureGroup> = Vec::new();
    let names = devices.first().map(|device| device.features.named().map(|(name, _)| name)).unwrap_or_default();
    for (index, name) in names.into_iter().enumerate() {
        let mut of_name: Vec<FeatureGroup> = Vec::new();
        for device in devices {
            let feature = device.features.named()[index].1;
            let (word, reason) = (feature.word(), feature.reason.clone());
            match of_name.iter_mut().find(|answer| answer.word == word && answer.reason == reason) {
                Some(answer) => answer.devices.push(device.logical),
                None => of_name.push(FeatureGroup { word, reason, names: vec![name], devices: vec![device.logical] }),
            }
        }
        for answer in of_name {
            let same = |known: &&mut FeatureGroup| {
                (known.word, &known.reason, &known.devices) == (answer.word, &answer.reason, &answer.devices)
            };
            match found.iter_mut().find(same) {
                Some(known) => known.names.push(name),
                None => found.push(answer),
            }
        }
    }
    found.sort_by_key(|answer| ["yes", "no", "?", "-"].iter().position(|word| *word == answer.word));
    found
}

impl Holder {
    /// A line for each kind of thing that it holds.
    pub(super) fn lines(&self) -> Vec<String> {
        let name = self.name.as_deref().map(|name| format!(" ({name})")).unwrap_or_default();
        let mut lines = Vec::new();
        if !self.nodes.is_empty() {
            let nodes: Vec<String> = self.nodes.iter().map(|node| format!("/dev/davinci{node}")).collect();
            let container = self.container.as_deref().map(|id| format!(" {id}")).unwrap_or_default();
            lines.push(format!("container{container}, first process {}{name}: holds {}", self.pid, nodes.join(", ")));
        }
        let memory: Vec<String> = self
            .memory
            .iter()
            .map(|held| format!("{} on its device {}", Bytes(held.bytes).rounded(), held.device))
            .collect();
        // A session of a process that does not keep the numbers has none.
        if !memory.is_empty() || self.nodes.is_empty() {
            let container = self.container.as_deref().map(|id| format!(" in container {id}")).unwrap_or_default();
            let memory = if memory.is_empty() { "a memory session".to_owned() } else { memory.join(", ") };
            let service = match self.service.as_deref() {
                None => String::new(),
                Some("") => ", and is a memory service".to_owned(),
                Some(socket) => format!(", and is the memory service at {socket}"),
            };
            lines.push(format!("process {}{name}{container}: has {memory}{service}", self.pid));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_device_has_memory_for_a_process_with_too_few_addresses() {
        let mut survey = discovery::survey(&discovery::Options::default());
        survey.memory_driver = Some(MemoryDriver::V2);
        survey.generation = Some(ascend_ioctl::Generation::V26_1);
        survey.findings.clear();
        assert_eq!(driver_obstacle(&survey), None);
        survey.findings.push(Finding::SmallAddressSpace { bits: 39 });
        let obstacle = driver_obstacle(&survey).unwrap();
        assert!(obstacle.contains("CONFIG_ARM64_VA_BITS_39"), "{obstacle}");
    }
}
