//! What `probe` prints for people.

use super::document::{Device, Document, Found, answers};
use crate::terminal::{Table, devices, wrap};
use ascend_vmm::Bytes;

/// The text in lines of at most `width` columns: what is wrong, a short table, and the details.
pub(super) fn lines(document: &Document, width: usize) -> Vec<String> {
    let mut parts = vec![header(document, width)];
    parts.extend(grouped(&document.findings).iter().map(|(found, others)| {
        let mut lines = finding(found, width);
        if !others.is_empty() {
            lines.extend(wrap(&format!("The same is true of {}.", devices(others)), width, "  ", "  "));
        }
        lines
    }));
    if document.devices.is_empty() && document.findings.is_empty() {
        parts.push(vec!["no device".to_owned()]);
    }
    if !document.devices.is_empty() {
        parts.push(short_table(document).lines(width));
        parts.push(capabilities(document, width));
        parts.push(document.devices.iter().flat_map(|device| details(device, width)).collect());
    }
    parts.push(in_use(document, width));
    apart(parts)
}

/// What of it changes while somebody watches, in few lines: a finding is its sentence.
pub(super) fn watched(document: &Document, width: usize) -> Vec<String> {
    let mut parts = vec![header(document, width)];
    let sentence = |(found, others): &(&Found, Vec<u32>)| {
        let others =
            if others.is_empty() { String::new() } else { format!("; the same is true of {}", devices(others)) };
        wrap(&format!("{}{others}", found.sentence), width, &format!("{}: ", found.severity), "  ")
    };
    parts.push(grouped(&document.findings).iter().flat_map(sentence).collect());
    if document.devices.is_empty() {
        parts.push(vec!["no device".to_owned()]);
    } else {
        parts.push(short_table(document).lines(width));
    }
    parts.push(in_use(document, width));
    apart(parts)
}

/// Parts with an empty line between them.
fn apart(parts: Vec<Vec<String>>) -> Vec<String> {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(&[String::new()][..])
}

/// Who has devices and memory.
fn in_use(document: &Document, width: usize) -> Vec<String> {
    if document.holders.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["in use, as far as the driver tells:".to_owned()];
    let held = document.holders.iter().flat_map(|holder| holder.lines());
    lines.extend(held.flat_map(|line| wrap(&line, width, "  ", "    ")));
    lines
}

/// Where we are, and with which driver.
fn header(document: &Document, width: usize) -> Vec<String> {
    let driver = &document.driver;
    let mut lines = Vec::new();
    let mut parts = Vec::new();
    if let Some(memory) = driver.memory {
        let generation = driver.generation.as_deref().unwrap_or("unknown");
        parts.push(format!("generation {generation}, memory interface {memory}"));
    }
    if let Some(package) = &driver.package {
        let internal = driver.internal.as_deref().map(|text| format!(" ({text})")).unwrap_or_default();
        parts.push(format!("package {package}{internal}"));
    }
    if !parts.is_empty() {
        lines.extend(wrap(&parts.join("; "), width, "driver: ", "  "));
    }
    match document.container {
        Some(true) => {
            lines.extend(wrap("in a container, which has its own device numbers", width, "place:  ", "  "));
        }
        Some(false) => lines.push("place:  on the host".to_owned()),
        None => {}
    }
    lines
}

fn memory(device: &Device) -> String {
    match &device.hbm {
        Some(hbm) => {
            let (free, total) = (Bytes(hbm.free).rounded(), Bytes(hbm.total).rounded());
            match (free.split_once(' '), total.split_once(' ')) {
                (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} of {total}"),
                _ => format!("{free} of {total}"),
            }
        }
        None => "-".to_owned(),
    }
}

fn chip(device: &Device) -> String {
    // Some devices tell only the short name.
    let chip = || device.chip.as_deref().map(|chip| format!("Ascend{}", chip.trim_start_matches("Ascend")));
    device.soc.clone().or_else(chip).unwrap_or_else(|| "-".to_owned())
}

fn short_table(document: &Document) -> Table {
    let mut table = Table::new(&["device", "chip", "memory free", "state", "usable for"]);
    for device in &document.devices {
        table.row([device.logical.to_string(), chip(device), memory(device), device.state.clone(), device.uses()]);
    }
    table
}

/// Findings that are about several devices in the same words: the first, and the other devices.
fn grouped(findings: &[Found]) -> Vec<(&Found, Vec<u32>)> {
    let words = |found: &Found| match found.device {
        Some(device) => found.sentence.replace(&format!("device {device}"), "device"),
        None => found.sentence.clone(),
    };
    let mut groups: Vec<(&Found, Vec<u32>)> = Vec::new();
    for found in findings {
        let same = |(first, _): &&mut (&Found, Vec<u32>)| first.code == found.code && words(first) == words(found);
        match (found.device, groups.iter_mut().find(same)) {
            (Some(device), Some((_, others))) => others.push(device),
            _ => groups.push((found, Vec::new())),
        }
    }
    groups
}

fn finding(found: &Found, width: usize) -> Vec<String> {
    let mut lines = wrap(&found.sentence, width, &format!("{}: ", found.severity), "  ");
    lines.extend(wrap(found.remedy, width, "  ", "  "));
    if let Some(vendor) = found.vendor {
        lines.extend(wrap(&format!("[{vendor}]"), width, "  ", "   "));
    }
    lines
}

/// Each answer about capabilities once, with its devices.
fn capabilities(document: &Document, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut add = |word: &str, what: String, reason: Option<&str>| {
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        lines.extend(wrap(&format!("{what}{reason}"), width, &format!("{word:<5}"), "     "));
    };
    for answer in answers(&document.devices) {
        let of = if answer.devices.len() == document.devices.len() {
            String::new()
        } else {
            format!(" of {}", devices(&answer.devices))
        };
        add(answer.word, format!("{}{of}", answer.names.join(", ")), answer.reason.as_deref());
    }
    let host = &document.host.giant_pages;
    add(host.word(), "1 GiB pages of the host".to_owned(), host.reason.as_deref());
    lines
}

/// The numbers and names of a device.
fn details(device: &Device, width: usize) -> Vec<String> {
    let mut parts = vec![format!("/dev/davinci{}", device.physical)];
    parts.push(match device.user {
        Some(user) if user == device.logical => format!("user id {user}"),
        Some(user) => format!("user id {user} by ASCEND_RT_VISIBLE_DEVICES"),
        None => "hidden by ASCEND_RT_VISIBLE_DEVICES".to_owned(),
    });
    parts.extend(device.pci.as_ref().map(|pci| format!("PCI {pci}")));
    parts.extend(device.health.as_ref().map(|health| format!("health {health}")));
    parts.extend(device.ai_cores.map(|cores| format!("{cores} AI cores")));
    parts.push(format!("identity {}", device.identity));
    if let Some(pod) = &device.super_pod {
        parts.push(format!("super pod {}, server {}, chassis {}", pod.super_pod, pod.server, pod.chassis));
    }
    for (name, pages) in [("2 MiB", device.huge_pages), ("1 GiB", device.giant_pages)] {
        parts.extend(pages.map(|pages| {
            format!("{} of {} free in {name} pages", Bytes(pages.free).rounded(), Bytes(pages.total).rounded())
        }));
    }
    wrap(&parts.join(", "), width, &format!("device {}: ", device.logical), "  ")
}

/// One line with all columns for each device.
pub(super) fn wide(document: &Document) -> Vec<String> {
    let mut titles = vec!["device", "physical", "user", "identity", "chip", "PCI", "memory free", "state", "health"];
    let names = document.devices.first().map(|device| device.features.named().map(|(name, _)| name));
    titles.extend(names.into_iter().flatten());
    let mut table = Table::new(&titles);
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    for device in &document.devices {
        let mut cells = vec![
            device.logical.to_string(),
            device.physical.to_string(),
            device.user.map_or_else(|| "hidden".to_owned(), |user| user.to_string()),
            device.identity.clone(),
            chip(device),
            or_dash(&device.pci),
            memory(device),
            device.state.clone(),
            or_dash(&device.health),
        ];
        cells.extend(device.features.named().map(|(_, feature)| feature.word().to_owned()));
        table.row(cells);
    }
    let mut lines = header(document, usize::MAX);
    lines.extend(document.findings.iter().flat_map(|found| finding(found, usize::MAX)));
    if !document.devices.is_empty() {
        lines.extend(table.lines(usize::MAX));
    }
    lines
}
