//! `cargo xtask probe`: lists the NPUs and what they offer, and says what is wrong if there are
//! none.
//!
//! Only queries without side effects are made: there is no memory session and no device process.
//! What can only be queried from an open device needs `--open`.

use crate::terminal::{self, Table, bytes, paint};
use ascend_vmm::discovery::{self, Environment, Finding, Machine, MemoryDriver, Npu, Options, Severity, Split, Survey};
use ascend_vmm::{Kind, Page, Session};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Options of `probe`.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0 there is a device, 3 there is none, 2 wrong arguments.\n\n\
                        Example:\n  cargo xtask probe\n  cargo xtask probe --json | jq '.devices[].identity'")]
pub struct Probe {
    /// Print JSON instead of tables (docs/hosts.md).
    #[arg(long)]
    json: bool,
    /// Also open each device, which may start a process on it, and query what only an open device
    /// reports.
    #[arg(long)]
    open: bool,
    /// Longest wait for devices that are still starting, in seconds. The kernel may wait for up to
    /// 160.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
}

/// Exit status: no device.
const NO_DEVICE: u8 = 3;

impl Probe {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let options = Options { timeout: Duration::from_secs(self.timeout), ..Options::default() };
        let survey = discovery::survey(&options);
        let document = Document::new(&survey, self.open);
        if self.json {
            crate::print_json(&document);
        } else {
            document.print();
        }
        if survey.devices.is_empty() { ExitCode::from(NO_DEVICE) } else { ExitCode::SUCCESS }
    }
}

/// The output: docs/schema/probe.json.
#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    tool: &'static str,
    container: Option<bool>,
    driver: Driver,
    granularity: Vec<Granularity>,
    devices: Vec<Device>,
    findings: Vec<Found>,
}

#[derive(Debug, Serialize)]
struct Driver {
    package: Option<String>,
    internal: Option<String>,
    version_file: Option<String>,
    generation: Option<String>,
    memory: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Granularity {
    place: &'static str,
    page: &'static str,
    minimum: u64,
    recommended: u64,
}

#[derive(Debug, Serialize)]
struct Device {
    logical: u32,
    physical: u32,
    user: Option<u32>,
    identity: String,
    chip: Option<String>,
    soc: Option<String>,
    ai_cores: Option<u32>,
    pci: Option<String>,
    hbm: Option<Memory>,
    state: String,
    health: Option<String>,
    super_pod: Option<Pod>,
    virtual_instance: Option<Instance>,
    split: Option<&'static str>,
    machine: Option<&'static str>,
    features: Features,
}

#[derive(Debug, Serialize)]
struct Memory {
    total: u64,
    free: u64,
}

#[derive(Debug, Serialize)]
struct Pod {
    sdid: u32,
    server: u32,
    super_pod: u32,
    chassis: u32,
}

#[derive(Debug, Serialize)]
struct Instance {
    card: u32,
    number: u32,
}

#[derive(Debug, Serialize)]
struct Features {
    vmm: Feature,
    sharing: Feature,
    fabric: Feature,
    peer: Feature,
    host_access: Feature,
}

#[derive(Debug, Serialize)]
struct Feature {
    offered: Option<bool>,
    reason: Option<String>,
}

impl Feature {
    fn yes() -> Feature {
        Feature { offered: Some(true), reason: None }
    }

    fn no(reason: impl Into<String>) -> Feature {
        Feature { offered: Some(false), reason: Some(reason.into()) }
    }

    fn unknown(reason: impl Into<String>) -> Feature {
        Feature { offered: None, reason: Some(reason.into()) }
    }

    fn word(&self) -> &'static str {
        match self.offered {
            Some(true) => "yes",
            Some(false) => "no",
            None => "?",
        }
    }
}

#[derive(Debug, Serialize)]
struct Found {
    code: &'static str,
    severity: &'static str,
    device: Option<u32>,
    sentence: String,
    remedy: &'static str,
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
        }
    }
}

impl Document {
    fn new(survey: &Survey, open: bool) -> Document {
        let versions = &survey.versions;
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
            devices: survey.devices.iter().map(|npu| Device::new(npu, survey, open)).collect(),
            findings: survey.findings.iter().map(Found::new).collect(),
        }
    }

    fn print(&self) {
        if let Some(memory) = self.driver.memory {
            let generation = self.driver.generation.as_deref().unwrap_or("unknown");
            crate::outln!("driver: generation {generation}, memory interface {memory}");
        }
        if let (Some(package), Some(file)) = (&self.driver.package, &self.driver.version_file) {
            let internal = self.driver.internal.as_deref().map(|text| format!(", {text}")).unwrap_or_default();
            crate::outln!("installed: {package}{internal} ({file})");
        }
        match self.container {
            Some(true) => crate::outln!("running in a container, which has its own device numbers"),
            Some(false) => crate::outln!("running on the host"),
            None => {}
        }
        if !self.devices.is_empty() {
            crate::outln!();
            self.print_devices();
            crate::outln!();
            let sizes: Vec<String> = self
                .granularity
                .iter()
                .map(|row| format!("{} {} in multiples of {}", row.place, row.page, bytes(row.minimum)))
                .collect();
            if !sizes.is_empty() {
                crate::outln!("page sizes: {}", sizes.join("; "));
            }
            self.print_reasons();
        }
        for finding in &self.findings {
            crate::outln!("\n{}", paint(&format!("{}: {}", finding.severity, finding.sentence)));
            crate::outln!("  {}", finding.remedy);
        }
        if self.devices.is_empty() && self.findings.is_empty() {
            crate::outln!("no device");
        }
    }

    fn print_devices(&self) {
        let mut table = Table::new(&[
            "device",
            "physical",
            "user",
            "identity",
            "chip",
            "PCI",
            "HBM free / total",
            "state",
            "health",
            "vmm",
            "sharing",
            "fabric",
            "peer",
            "host access",
        ]);
        let dash = || "-".to_owned();
        for device in &self.devices {
            let hbm = device.hbm.as_ref().map(|hbm| format!("{} / {}", bytes(hbm.free), bytes(hbm.total)));
            let features = &device.features;
            table.row([
                device.logical.to_string(),
                device.physical.to_string(),
                device.user.map_or_else(|| "hidden".to_owned(), |user| user.to_string()),
                device.identity.clone(),
                device.soc.clone().or_else(|| device.chip.clone()).unwrap_or_else(dash),
                device.pci.clone().unwrap_or_else(dash),
                hbm.unwrap_or_else(dash),
                device.state.clone(),
                device.health.clone().unwrap_or_else(dash),
                features.vmm.word().to_owned(),
                features.sharing.word().to_owned(),
                features.fabric.word().to_owned(),
                features.peer.word().to_owned(),
                features.host_access.word().to_owned(),
            ]);
        }
        table.print();
    }

    /// Why features are missing: each reason once, with its devices.
    fn print_reasons(&self) {
        let mut reasons: Vec<(String, Vec<u32>)> = Vec::new();
        for device in &self.devices {
            let features = &device.features;
            for (name, feature) in [
                ("vmm", &features.vmm),
                ("sharing", &features.sharing),
                ("fabric", &features.fabric),
                ("peer", &features.peer),
                ("host access", &features.host_access),
            ] {
                let Some(reason) = &feature.reason else { continue };
                let line = format!("{name}: {}: {reason}", feature.word());
                match reasons.iter_mut().find(|(known, _)| *known == line) {
                    Some((_, devices)) => devices.push(device.logical),
                    None => reasons.push((line, vec![device.logical])),
                }
            }
        }
        for (line, devices) in reasons {
            crate::outln!("{}: {line}", terminal::devices(&devices));
        }
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
            let sizes = Kind { page, ..Kind::default() }.granularity();
            rows.push(Granularity { place, page: name, minimum: sizes.minimum, recommended: sizes.recommended });
        }
    }
    rows
}

impl Device {
    fn new(npu: &Npu, survey: &Survey, open: bool) -> Device {
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
            features: Features::new(npu, survey, open),
        }
    }
}

impl Features {
    fn new(npu: &Npu, survey: &Survey, open: bool) -> Features {
        let vmm = vmm(npu, survey);
        let unusable = || Feature::no("its memory cannot be used");
        let usable = vmm.offered == Some(true);
        let sharing = match npu.sharing_obstacle() {
            Some(obstacle) => Feature::no(obstacle),
            None if usable => Feature::yes(),
            None => unusable(),
        };
        let fabric = match (npu.sharing_obstacle(), npu.super_pod) {
            (Some(obstacle), _) => Feature::no(obstacle),
            (None, None) => Feature::no("the device is in no super pod"),
            (None, Some(_)) if usable => Feature::unknown(
                "the device has a super-pod id, but only an attempt shows whether its firmware serves other servers",
            ),
            (None, Some(_)) => unusable(),
        };
        let (peer, host_access) =
            if usable { (peer(npu, survey), host_access(npu, open)) } else { (unusable(), unusable()) };
        Features { vmm, sharing, fabric, peer, host_access }
    }
}

fn vmm(npu: &Npu, survey: &Survey) -> Feature {
    match survey.memory_driver {
        Some(MemoryDriver::V2) if survey.generation.is_none() => Feature::no("the driver's generation is unknown"),
        Some(MemoryDriver::V2) if npu.is_usable() => Feature::yes(),
        Some(MemoryDriver::V2) => Feature::no(format!("the device is in the state {}", npu.state)),
        Some(MemoryDriver::V3) => Feature::no("the memory interface is v3, which this project does not support"),
        Some(MemoryDriver::Missing) | None => Feature::no("there is no memory driver"),
    }
}

fn peer(npu: &Npu, survey: &Survey) -> Feature {
    let others: Vec<&Npu> = survey.devices.iter().filter(|other| other.logical != npu.logical).collect();
    if others.is_empty() {
        return Feature::no("there is no other device");
    }
    let mut can = Vec::new();
    for other in &others {
        match discovery::can_access(other.logical, npu.logical) {
            Ok(true) => can.push(other.logical.0),
            Ok(false) => {}
            Err(error) => return Feature::unknown(error.to_string()),
        }
    }
    match can.len() {
        0 => Feature::no("the topology allows it to no other device"),
        some if some == others.len() => Feature::yes(),
        _ => Feature { offered: Some(true), reason: Some(format!("only {}", terminal::devices(&can))) },
    }
}

/// What only an open device reports. Opening may start a process on it, so this needs `--open`.
fn host_access(npu: &Npu, open: bool) -> Feature {
    if !open {
        return Feature::unknown("only an open device reports it: probe --open");
    }
    match Session::current().and_then(|session| session.device(npu.logical)) {
        Ok(device) if device.capabilities().cpu_access_huge => Feature::yes(),
        Ok(device) if device.capabilities().cpu_access => {
            Feature::no("the device offers it only for small pages, which this library does not use")
        }
        Ok(_) => Feature::no("the device reports that its memory is not in its PCI window"),
        Err(error) => Feature::unknown(format!("the device could not be opened: {error}")),
    }
}
