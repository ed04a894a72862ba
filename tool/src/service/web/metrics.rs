//! The status as Prometheus reads it.

use ascend_vmm_service::protocol::{DeviceStatus, DomainStatus, Event, Status};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A number of a domain.
type OfDomain = fn(&DomainStatus) -> u64;

/// All metrics; without a status only that there is none.
pub(super) fn text(seen: Option<(&Status, Option<&Event>)>) -> String {
    let mut text = String::new();
    let one = |value: u64| vec![(String::new(), value)];
    metric(&mut text, "service_up", "gauge", "1 if the service answers.", one(seen.is_some().into()));
    let Some((status, last)) = seen else { return text };
    let alive = u64::from(status.keeper != 0);
    metric(&mut text, "keeper_up", "gauge", "1 if the process that owns the memory lives.", one(alive));
    let events = last.map_or(0, |event| event.number);
    metric(&mut text, "events_total", "counter", "Events since the keeper was started.", one(events));
    let of_devices = |value: fn(&DeviceStatus) -> u64| {
        let label = |it: &DeviceStatus| format!("device=\"{}\",identity=\"{}\"", it.physical, escape(&it.identity));
        status.devices.iter().map(|it| (label(it), value(it))).collect::<Vec<_>>()
    };
    let up = of_devices(|it| it.problem.is_empty().into());
    metric(&mut text, "device_up", "gauge", "1 if the NPU answers.", up);
    metric(&mut text, "device_bytes", "gauge", "Memory of the NPU.", of_devices(|it| it.total));
    metric(&mut text, "device_free_bytes", "gauge", "Free memory of the NPU.", of_devices(|it| it.free));
    metric(&mut text, "device_held_bytes", "gauge", "Memory that the service holds.", of_devices(|it| it.held));
    let label = |it: &DomainStatus| format!("domain=\"{}\",device=\"{}\"", escape(it.name.as_str()), it.device);
    let parts: [(&str, OfDomain); 3] =
        [("committed", |it| it.bytes), ("uncommitted", |it| it.uncommitted), ("superseded", |it| it.superseded)];
    let bytes = status
        .domains
        .iter()
        .flat_map(|it| parts.iter().map(move |(part, value)| (format!("{},part=\"{part}\"", label(it)), value(it))));
    metric(&mut text, "domain_bytes", "gauge", "Memory of the domain.", bytes.collect());
    let of_domains =
        |value: fn(&DomainStatus) -> u64| status.domains.iter().map(|it| (label(it), value(it))).collect::<Vec<_>>();
    let metrics: [(&str, &str, OfDomain); 6] = [
        ("domain_version", "Committed version, 0 if there is none.", |it| it.version),
        ("domain_dirty", "1 while what is committed is changed in place.", |it| (it.state == "dirty").into()),
        ("domain_allocations", "Allocations of the committed layout.", |it| it.allocations),
        ("domain_readers", "Processes that read it.", |it| it.readers),
        ("domain_waiting", "Processes that wait for it.", |it| it.waiting),
        ("domain_age_seconds", "Seconds since the last commit.", |it| it.age),
    ];
    for (name, help, value) in metrics {
        metric(&mut text, name, "gauge", help, of_domains(value));
    }
    let mut roles = BTreeMap::new();
    for client in &status.clients {
        *roles.entry(client.role.as_str()).or_insert(0u64) += 1;
    }
    let roles = roles.into_iter().map(|(role, count)| (format!("role=\"{}\"", escape(role)), count));
    metric(&mut text, "clients", "gauge", "Connections by role.", roles.collect());
    text
}

fn metric(text: &mut String, name: &str, kind: &str, help: &str, values: Vec<(String, u64)>) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP ascend_vmm_{name} {help}\n# TYPE ascend_vmm_{name} {kind}");
    for (labels, value) in values {
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "ascend_vmm_{name}{labels} {value}");
    }
}

/// A label's value as the format wants it.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_end_a_label_is_escaped() {
        assert_eq!(escape("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
