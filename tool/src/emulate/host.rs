//! The description of an emulated host: presets, `--host FILE`, and one option for each condition.
//!
//! A key in a file has the name of the option, without the dashes. Options win over the file, and
//! the file wins over the preset.

use ascend_emulator::Config;
use ascend_emulator::config::{Attachment, Daemon, DeviceProcess, Door, Namespace, Phase, Place};
use ascend_ioctl::Generation;
use ascend_vmm::Bytes;
use clap::ValueEnum;
use nix::libc;
use serde::{Deserialize, Deserializer};
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// The conditions of a host. What is not given is as on a healthy host with two NPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[command(next_help_heading = "The emulated host")]
pub(super) struct Host {
    /// Generation of the driver.
    #[arg(long, value_name = "GENERATION", help = crate::generation_help(""))]
    #[serde(default, deserialize_with = "from_text")]
    driver: Option<Generation>,
    /// Number of NPUs, 0 to 64.
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
    /// Name of the chip, such as Ascend910B3.
    #[arg(long, value_name = "NAME")]
    chip: Option<String>,
    /// Memory of each NPU, in bytes or with a unit: 512M, 64G.
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "size")]
    hbm: Option<Bytes>,
    /// Memory of the host that the driver may use.
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "size")]
    host_memory: Option<Bytes>,
    /// NUMA nodes of the host.
    #[arg(long, value_name = "N")]
    numa_nodes: Option<u32>,
    /// How the NPUs are attached to the host.
    #[arg(long, value_enum)]
    attach: Option<Attach>,
    /// Whether the NPUs have pages of 1 GiB.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    giant_pages: Option<bool>,
    /// Whether the host has pages of 1 GiB.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    host_giant_pages: Option<bool>,
    /// Whether the NPUs report that memory may be shared by name over PCI Express.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    share_over_external_bus: Option<bool>,
    /// The host's number in its super pod, or none.
    #[arg(long, value_name = "N")]
    server: Option<Server>,
    /// The driver's nodes cannot be opened, for this reason.
    #[arg(long, value_enum, value_name = "REASON")]
    nodes_are: Option<Closed>,
    /// /dev/hisi_hdc cannot be opened, for this reason.
    #[arg(long, value_enum, value_name = "REASON")]
    hdc_is: Option<Closed>,
    /// The program may not open these /dev/davinciN: a list such as 0,2 or 0-3.
    #[arg(long, value_name = "NPUS")]
    forbidden: Option<Ids>,
    /// The program runs in a container that has these NPUs: a list, or none.
    #[arg(long, value_name = "NPUS", conflicts_with = "in_privileged_container")]
    in_container: Option<Ids>,
    /// The program runs in a container with all privileges.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    in_privileged_container: Option<bool>,
    /// Another container holds these NPUs.
    #[arg(long, value_name = "NPUS")]
    occupied: Option<Ids>,
    /// These NPUs were found and are not up; the driver waits for them.
    #[arg(long, value_name = "NPUS")]
    detected: Option<Ids>,
    /// These NPUs are listed, and their firmware still starts.
    #[arg(long, value_name = "NPUS")]
    starting: Option<Ids>,
    /// These NPUs were removed.
    #[arg(long, value_name = "NPUS")]
    removed: Option<Ids>,
    /// These NPUs are being reset.
    #[arg(long, value_name = "NPUS")]
    resetting: Option<Ids>,
    /// Detected NPUs come up after this time, such as 2s or 500ms.
    #[arg(long, value_name = "TIME")]
    up_after: Option<Time>,
    /// How long the driver waits for detected NPUs. The real one waits for 150 s.
    #[arg(long, value_name = "TIME")]
    waits_for: Option<Time>,
    /// Each copy and fill takes this time, such as 5ms. Other commands are answered meanwhile.
    #[arg(long, value_name = "TIME")]
    copy_time: Option<Time>,
    /// Virtual instances besides the whole NPUs: 100 + 16 times the card + its number.
    #[arg(long, value_name = "NPUS")]
    virtual_instances: Option<Ids>,
    /// The NPUs are split.
    #[arg(long, value_enum, value_name = "FOR")]
    split_for: Option<SplitFor>,
    /// The host is a virtual machine.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    virtual_machine: Option<bool>,
    /// This module of the driver is not loaded: uda, URD, DEVMNG or SVM. Can be given several
    /// times.
    #[arg(long, value_name = "MODULE")]
    #[serde(default)]
    without_module: Vec<String>,
    /// The host has the next memory driver (Ascend950), which has no commands here.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    next_memory_driver: Option<bool>,
    /// The memory driver is of no known generation.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    unknown_generation: Option<bool>,
    /// Whether a program must start a process on a device through /dev/hisi_hdc before it can use
    /// the memory of the device.
    #[arg(long, value_enum)]
    device_process: Option<Start>,
    /// Device processes that a device can have. START beyond that is refused.
    #[arg(long, value_name = "N")]
    device_process_limit: Option<usize>,
    /// What the daemon on the devices does: works, absent, silent, garbage, hangs-up, vendor-order,
    /// late:TIME, version:N or refuses:CODE.
    #[arg(long, value_name = "BEHAVIOUR")]
    #[serde(default, deserialize_with = "from_text")]
    daemon: Option<DaemonText>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Attach {
    /// PCI Express.
    Pcie,
    /// HCCS.
    Hccs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Start {
    Required,
    Automatic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Closed {
    /// There is no such node (ENOENT).
    Missing,
    /// The file's mode forbids it (EACCES).
    Forbidden,
    /// A device cgroup or a security module forbids it (EPERM).
    Denied,
    /// It leads to no driver (ENXIO).
    Stale,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SplitFor {
    VirtualMachines,
    Containers,
}

/// A common host. NPUs, memory and attachment are what the vendor's public pages say; PCI
/// addresses, core counts, NUMA nodes, and everything else are made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Like {
    /// Eight Ascend910B with 64 GiB, on PCI Express.
    #[value(name = "atlas-800-a2")]
    Atlas800A2,
    /// Sixteen Ascend910B with 64 GiB, on PCI Express; memory is not shared by name between cards.
    #[value(name = "atlas-200t-a2-box16")]
    Atlas200TA2Box16,
    /// Sixteen dies of Ascend910_93 with 64 GiB, on HCCS, in a super pod; 1 GiB pages of the host.
    #[value(name = "atlas-800-a3")]
    Atlas800A3,
    /// Eight Ascend950, whose memory driver is the next one.
    #[value(name = "ascend-950")]
    Ascend950,
    /// A container that was given one of eight Ascend910B.
    #[value(name = "container-on-atlas-800-a2")]
    Container,
}

impl Like {
    pub(super) fn config(self) -> Config {
        let gib = 1 << 30;
        let a2 = Config {
            devices: 8,
            hbm: 64 * gib,
            host_memory: 64 * gib,
            numa_nodes: 8,
            super_pod: false,
            server: 0,
            ..Config::default()
        };
        match self {
            Like::Atlas800A2 => a2,
            Like::Atlas200TA2Box16 => Config { devices: 16, chip: "Ascend910B2C".into(), ..a2 },
            Like::Atlas800A3 => Config {
                devices: 16,
                chip: "Ascend910_9392".into(),
                attachment: Attachment::Hccs,
                host_giant_pages: true,
                share_over_external_bus: true,
                super_pod: true,
                ..a2
            },
            Like::Ascend950 => Config { chip: "Ascend950PR".into(), svm_v3: true, ..a2 },
            Like::Container => Config { places: vec![Place::container(&[5])], ..a2 },
        }
    }
}

/// Most memory of a device, or of the host.
const MOST_MEMORY: u64 = 64 << 40;

/// The text of a small regular file. Another kind of file could have no end.
fn read_small(path: &Path) -> io::Result<String> {
    const MOST: u64 = 1 << 20;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    if file.take(MOST + 1).read_to_string(&mut text)? as u64 > MOST {
        return Err(io::Error::other("it is longer than 1 MiB"));
    }
    Ok(text)
}

impl Host {
    /// Reads a description: JSON if it is named so or begins with a brace, TOML otherwise.
    pub(super) fn read(path: &Path) -> Result<Host, String> {
        let name = path.display();
        let text = read_small(path).map_err(|error| format!("{name} cannot be read: {error}"))?;
        if path.extension().is_some_and(|extension| extension == "json") || text.trim_start().starts_with('{') {
            serde_json::from_str(&text).map_err(|error| {
                // Not every message has the key, but its line has.
                let line = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
                format!("{name}: {error}\n  {}", line.trim()).trim_end().to_owned()
            })
        } else {
            toml::from_str(&text).map_err(|error| format!("{name}: {}", error.to_string().trim_end()))
        }
    }

    /// The host that these descriptions make of another together; later ones win.
    pub(super) fn config(base: Config, descriptions: &[&Host]) -> Result<Config, String> {
        let mut config = base;
        for description in descriptions {
            description.apply(&mut config)?;
        }
        check(&config)?;
        Ok(config)
    }

    fn apply(&self, config: &mut Config) -> Result<(), String> {
        fn set<T>(to: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *to = value;
            }
        }
        set(&mut config.generation, self.driver);
        set(&mut config.devices, self.devices);
        set(&mut config.chip, self.chip.clone());
        set(&mut config.hbm, self.hbm.map(|size| size.0));
        set(&mut config.host_memory, self.host_memory.map(|size| size.0));
        set(&mut config.numa_nodes, self.numa_nodes);
        set(
            &mut config.attachment,
            self.attach.map(|attach| match attach {
                Attach::Pcie => Attachment::Pcie,
                Attach::Hccs => Attachment::Hccs,
            }),
        );
        set(&mut config.giant_pages, self.giant_pages);
        set(&mut config.host_giant_pages, self.host_giant_pages);
        set(&mut config.share_over_external_bus, self.share_over_external_bus);
        if let Some(Server(server)) = self.server {
            (config.super_pod, config.server) = (server.is_some(), server.unwrap_or(0));
        }
        set(&mut config.door, self.nodes_are.map(Closed::door));
        set(&mut config.hdc_door, self.hdc_is.map(Closed::door));
        if let Some(nodes) = &self.in_container {
            config.places = vec![Place::container(&nodes.0)];
        }
        match self.in_privileged_container {
            Some(true) => config.places = vec![Place { namespace: Namespace::Privileged, ..Place::host() }],
            Some(false) => config.places = vec![Place::host()],
            None => {}
        }
        if let (Some(nodes), Some(place)) = (&self.forbidden, config.places.first_mut()) {
            place.closed.clone_from(&nodes.0);
        }
        set(&mut config.occupied, self.occupied.clone().map(|ids| ids.0));
        for (ids, phase) in [
            (&self.detected, Phase::Detected),
            (&self.starting, Phase::Registered),
            (&self.removed, Phase::Removed),
            (&self.resetting, Phase::Resetting),
        ] {
            for id in ids.iter().flat_map(|ids| &ids.0) {
                if config.phases.iter().any(|(other, _)| other == id) {
                    return Err(format!("NPU {id} is in two states"));
                }
                config.phases.push((*id, phase));
            }
        }
        if let Some(time) = self.up_after {
            config.boot = Some(time.0);
        }
        set(&mut config.setup_patience, self.waits_for.map(|time| time.0));
        set(&mut config.copy_time, self.copy_time.map(|time| time.0));
        set(&mut config.virtual_instances, self.virtual_instances.clone().map(|ids| ids.0));
        set(
            &mut config.split_mode,
            self.split_for.map(|split| match split {
                SplitFor::VirtualMachines => 1,
                SplitFor::Containers => 2,
            }),
        );
        set(&mut config.virtual_machine, self.virtual_machine);
        config.missing_modules.extend(self.without_module.iter().cloned());
        set(&mut config.svm_v3, self.next_memory_driver);
        set(&mut config.unknown_generation, self.unknown_generation);
        set(
            &mut config.device_process,
            self.device_process.map(|start| match start {
                Start::Required => DeviceProcess::Required,
                Start::Automatic => DeviceProcess::Automatic,
            }),
        );
        set(&mut config.device_process_limit, self.device_process_limit);
        set(&mut config.daemon, self.daemon.clone().map(|daemon| daemon.0));
        Ok(())
    }
}

/// Refuses a host that the emulator does not have.
fn check(config: &Config) -> Result<(), String> {
    if config.devices > 64 {
        return Err(format!("devices is {}; a host has at most 64", config.devices));
    }
    for (name, size) in [("hbm", config.hbm), ("host-memory", config.host_memory)] {
        if size > MOST_MEMORY {
            return Err(format!("{name} is more than 64 TiB"));
        }
    }
    if !(1..=1024).contains(&config.numa_nodes) {
        return Err(format!("numa-nodes is {}; a host has 1 to 1024", config.numa_nodes));
    }
    if config.server > 1023 {
        return Err(format!("server is {}; a super pod has servers 0 to 1023", config.server));
    }
    if config.chip.is_empty() || config.chip.len() > 31 || !config.chip.is_ascii() {
        return Err("the name of a chip has 1 to 31 ASCII characters".into());
    }
    for module in &config.missing_modules {
        const MODULES: [&str; 6] = ["uda", "URD", "DEVMNG", "SVM", "TSDRV", "ESCHED"];
        if !MODULES.contains(&module.as_str()) {
            return Err(format!("without-module: there is no module `{module}`, but {}", MODULES.join(", ")));
        }
    }
    for id in &config.virtual_instances {
        let on_card = id.checked_sub(100).map(|id| id / 16).filter(|card| *card < config.devices);
        if on_card.is_none() {
            return Err(format!(
                "virtual-instances: {id} is on no card; instance n of card c is 100 + 16 c + n, and there are {}",
                crate::terminal::counted(config.devices as usize, "card")
            ));
        }
    }
    let known = |id: &u32| *id < config.devices || config.virtual_instances.contains(id);
    let place = config.places.first();
    for (name, ids) in [
        ("in-container", place.and_then(|place| place.nodes.clone()).unwrap_or_default()),
        ("forbidden", place.map(|place| place.closed.clone()).unwrap_or_default()),
        ("occupied", config.occupied.clone()),
        ("detected, starting, removed or resetting", config.phases.iter().map(|(id, _)| *id).collect()),
    ] {
        if let Some(id) = ids.iter().find(|id| !known(id)) {
            return Err(format!("{name}: there is no NPU {id}"));
        }
    }
    Ok(())
}

impl Closed {
    fn door(self) -> Door {
        match self {
            Closed::Missing => Door::Missing,
            Closed::Forbidden => Door::Forbidden,
            Closed::Denied => Door::Denied,
            Closed::Stale => Door::Stale,
        }
    }
}

/// Ids of NPUs: in an option `0,2`, `0-3` or `none`, in a file also a list of numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ids(Vec<u32>);

impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Ids, String> {
        let number =
            |text: &str| text.trim().parse::<u32>().map_err(|_| format!("`{text}` is not the number of an NPU"));
        let mut ids = Vec::new();
        if matches!(text.trim(), "" | "none") {
            return Ok(Ids(ids));
        }
        for part in text.split(',') {
            match part.split_once('-') {
                None => ids.push(number(part)?),
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    // More NPUs than there can be would only take time.
                    if first > last || last > 2048 {
                        return Err(format!("`{part}` is not a range of NPUs"));
                    }
                    ids.extend(first..=last);
                }
            }
        }
        Ok(Ids(ids))
    }
}

/// A number in a super pod, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Server(Option<u32>);

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Server, String> {
        match text {
            "none" => Ok(Server(None)),
            _ => {
                text.parse().map(|number| Server(Some(number))).map_err(|_| format!("`{text}` is not a number or none"))
            }
        }
    }
}

/// A time with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Time(Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        let (number, milliseconds) = match text.strip_suffix("ms") {
            Some(number) => (number, 1),
            None => (text.strip_suffix('s').unwrap_or(text), 1000),
        };
        let number: u32 = number.parse().map_err(|_| format!("`{text}` is not a time such as 2s or 500ms"))?;
        Ok(Time(Duration::from_millis(u64::from(number) * milliseconds)))
    }
}

/// A behaviour of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DaemonText(Daemon);

impl FromStr for DaemonText {
    type Err = String;

    fn from_str(text: &str) -> Result<DaemonText, String> {
        let (word, argument) = text.split_once(':').map_or((text, None), |(word, argument)| (word, Some(argument)));
        Ok(DaemonText(match (word, argument) {
            ("works", None) => Daemon::Works,
            ("absent", None) => Daemon::Absent,
            ("silent", None) => Daemon::Silent,
            ("garbage", None) => Daemon::Garbage,
            ("hangs-up", None) => Daemon::HangsUp,
            ("vendor-order", None) => Daemon::VendorOrder,
            ("late", Some(time)) => Daemon::Late(time.parse::<Time>()?.0),
            ("version", Some(version)) => {
                Daemon::OtherVersion(version.parse().map_err(|_| format!("`{version}` is not a version number"))?)
            }
            ("refuses", Some(error)) => Daemon::Refuses { code: 1, error: error.to_owned() },
            _ => {
                return Err(format!(
                    "`{text}` is not one of works, absent, silent, garbage, hangs-up, vendor-order, late:TIME, \
                     version:N and refuses:CODE"
                ));
            }
        }))
    }
}

/// A value that a file has as text.
fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(from: D) -> Result<Option<T>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(serde::de::Error::custom)
}

/// A value that a file has as text or as a number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a number, a text or a list of numbers")]
enum Written {
    Number(u64),
    Text(String),
    List(Vec<u32>),
}

/// A size: a number, or a text with a unit.
fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bytes>, D::Error> {
    match Written::deserialize(from)? {
        Written::Number(number) => Ok(Some(Bytes(number))),
        Written::Text(text) => text.parse().map(Some).map_err(serde::de::Error::custom),
        Written::List(_) => Err(serde::de::Error::custom("a list is not a size")),
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Ids, D::Error> {
        match Written::deserialize(from)? {
            Written::List(ids) => Ok(Ids(ids)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
            Written::Number(id) => u32::try_from(id).map(|id| Ids(vec![id])).map_err(serde::de::Error::custom),
        }
    }
}

impl<'de> Deserialize<'de> for Server {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Server, D::Error> {
        match Written::deserialize(from)? {
            Written::Number(number) => {
                u32::try_from(number).map(|number| Server(Some(number))).map_err(serde::de::Error::custom)
            }
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
            Written::List(_) => Err(serde::de::Error::custom("a list is not a number")),
        }
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Time, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_a_host_that_the_emulator_has() {
        for like in Like::value_variants() {
            Host::config(like.config(), &[]).unwrap();
        }
    }

    #[test]
    fn options_win_over_the_file_and_the_file_over_the_preset() {
        let file: Host = toml::from_str("devices = 4\nhbm = \"32G\"\nremoved = [1]\n").unwrap();
        let options = Host { devices: Some(3), ..Host::default() };
        let config = Host::config(Like::Atlas800A3.config(), &[&file, &options]).unwrap();
        assert_eq!((config.devices, config.hbm, config.phases), (3, 32 << 30, vec![(1, Phase::Removed)]));
        assert_eq!(config.chip, "Ascend910_9392");
    }

    #[test]
    fn toml_and_json_say_the_same() {
        let toml: Host = toml::from_str("occupied = \"0-2\"\nin-container = [0, 1]\nup-after = \"2s\"").unwrap();
        let json: Host =
            serde_json::from_str(r#"{"occupied": [0, 1, 2], "in-container": "0,1", "up-after": "2000ms"}"#).unwrap();
        assert_eq!(toml, json);
    }

    #[test]
    fn invalid_lists_times_and_behaviours_are_refused() {
        for text in ["x", "1,", "3-1", "0-4294967295", "-1", "1-2-3"] {
            assert!(text.parse::<Ids>().is_err(), "{text}");
        }
        for text in ["", "soon", "1h", "-1s", "99999999999s"] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
        for text in ["", "late", "late:", "works:1", "version:x", "asleep"] {
            assert!(text.parse::<DaemonText>().is_err(), "{text}");
        }
    }
}
