//! Which processes hold devices and memory, as far as the driver's files in `/proc` tell.
//!
//! * `/proc/svm/task/PID/summary` has a line for each device and kind of memory that a process with
//!   a memory session has allocated. The vendor's library keeps these numbers; a process without it
//!   has no such lines. Everybody may read it; in a container it shows the container's own.
//! * `/proc/uda/namespace_node` has the devices of each container and of the host, with the first
//!   process of each. Only root may read it.
//!
//! Neither exists without the driver, and nothing is guessed from other files.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A process that holds something.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    /// Its id on the host.
    pub(super) pid: u32,
    /// The name of its program, if `/proc` shows it.
    pub(super) name: Option<String>,
    /// The first twelve digits of its container's id, if it is in one.
    pub(super) container: Option<String>,
    /// The `/dev/davinciN` that its container holds, if it is the first process of one.
    pub(super) nodes: Vec<u32>,
    /// Memory on devices, by the process's own numbers of them.
    pub(super) memory: Vec<HeldMemory>,
    /// The socket of the memory service whose owner of memory it is; empty if its command line does
    /// not tell.
    pub(super) service: Option<String>,
}

/// Memory that a process holds on a device.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct HeldMemory {
    /// The device's number in the process's namespace.
    pub(super) device: u32,
    pub(super) bytes: u64,
}

/// All holders, by process id.
pub(super) fn read(root: &Path) -> Vec<Holder> {
    let mut found: BTreeMap<u32, (Vec<u32>, BTreeMap<u32, u64>)> = BTreeMap::new();
    for entry in fs::read_dir(root.join("proc/svm/task")).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let text = fs::read_to_string(entry.path().join("summary")).unwrap_or_default();
        found.entry(pid).or_default().1 = allocated(&text);
    }
    let table = fs::read_to_string(root.join("proc/uda/namespace_node")).unwrap_or_default();
    for (pid, nodes) in containers(&table) {
        found.entry(pid).or_default().0 = nodes;
    }
    let holder = |(pid, (nodes, memory)): (u32, (Vec<u32>, BTreeMap<u32, u64>))| {
        let file = |name: &str| fs::read_to_string(root.join(format!("proc/{pid}/{name}"))).ok();
        Holder {
            pid,
            name: file("comm").map(|name| name.trim().to_owned()),
            container: file("cgroup").as_deref().and_then(container),
            nodes,
            memory: memory.into_iter().map(|(device, bytes)| HeldMemory { device, bytes }).collect(),
            service: file("cmdline").as_deref().and_then(service),
        }
    };
    found.into_iter().map(holder).collect()
}

/// The socket of a memory service, from the command line of the process that owns its memory.
fn service(command: &str) -> Option<String> {
    let mut words = command.split('\0');
    let program = words.next()?;
    if program.rsplit('/').next() != Some("ascend-vmm") || words.next() != Some("serve") {
        return None;
    }
    let words: Vec<&str> = words.collect();
    let named = words.iter().position(|word| *word == "--socket").and_then(|at| words.get(at + 1).copied());
    let joined = words.iter().find_map(|word| word.strip_prefix("--socket="));
    Some(named.or(joined).unwrap_or_default().escape_debug().to_string())
}

/// Bytes by device. A line begins with `devN`; the last four of its columns are the bytes that are
/// allocated now, the most there were, and two counts.
fn allocated(summary: &str) -> BTreeMap<u32, u64> {
    let mut sums = BTreeMap::new();
    for line in summary.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let device = words.first().and_then(|word| word.strip_prefix("dev")?.parse::<u32>().ok());
        let bytes = words.len().checked_sub(4).and_then(|at| words[at].parse::<u64>().ok());
        if let (Some(device), Some(bytes @ 1..)) = (device, bytes) {
            let sum: &mut u64 = sums.entry(device).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    sums
}

/// The first process of each container and its nodes. The host's own table is that of process 1,
/// and holds nothing.
fn containers(table: &str) -> Vec<(u32, Vec<u32>)> {
    let mut found: Vec<(u32, Vec<u32>)> = Vec::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(at) = words.iter().position(|word| *word == "root_tgid") {
            if let Some(pid) = words.get(at + 1).and_then(|word| word.parse().ok()) {
                found.push((pid, Vec::new()));
            }
        } else if let [_, node] = words[..] {
            if let (Some((_, nodes)), Ok(node)) = (found.last_mut(), node.parse()) {
                nodes.push(node);
            }
        }
    }
    found.retain(|(pid, nodes)| *pid != 1 && !nodes.is_empty());
    found
}

/// The container in a cgroup's path: the last word of 64 hexadecimal digits.
fn container(cgroup: &str) -> Option<String> {
    let mut words = cgroup.split(|c: char| !c.is_ascii_alphanumeric());
    let is_id = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = words.rfind(is_id)?;
    Some(id[..12].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_summed_by_device() {
        let summary = "Svm page cnt stats:\nhostpid=7; devid=0\n\
                       Devid   Mem_type                Module_name     Module_id       Current   Peak   A  F\n\
                       NA      HOST                    RUNTIME         7               4096      8192   1  0\n\
                       dev0    HBM_HUGE                RUNTIME         7               2097152   4194304   2  1\n\
                       dev0    HBM_HUGE                HCCL            3               2097152   2097152   1  0\n\
                       dev3    HBM_NORMAL              RUNTIME         7               0         4096      1  1\n\
                       dev\ndevice 1 2 3 4\ndev18446744073709551616 x 1 2 3 4\n";
        assert_eq!(allocated(summary), BTreeMap::from([(0, 4 << 20)]));
    }

    #[test]
    fn the_owner_of_a_services_memory_is_known_by_its_command_line() {
        let of = |words: &[&str]| service(&words.iter().map(|word| format!("{word}\0")).collect::<String>());
        assert_eq!(of(&["/usr/bin/ascend-vmm", "serve", "--socket", "/run/a.sock"]).as_deref(), Some("/run/a.sock"));
        assert_eq!(of(&["ascend-vmm", "serve", "--device", "1", "--socket=/b"]).as_deref(), Some("/b"));
        assert_eq!(of(&["ascend-vmm", "serve"]).as_deref(), Some(""));
        assert_eq!(of(&["ascend-vmm", "serve", "--socket", "\x1b[2J"]).as_deref(), Some("\\u{1b}[2J"));
        for words in [&["ascend-vmm", "serve-front"][..], &["ascend-vmm"], &["python", "serve"], &[]] {
            assert_eq!(of(words), None, "{words:?}");
        }
        let root = std::env::temp_dir().join(format!("ascend-vmm-holders-{}", std::process::id()));
        for directory in ["proc/svm/task/42", "proc/42"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("proc/svm/task/42/summary"), "").unwrap();
        fs::write(root.join("proc/42/cmdline"), "ascend-vmm\0serve\0--socket\0/run/a.sock\0").unwrap();
        let found = read(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found[0].lines(), ["process 42: has a memory session, and is the memory service at /run/a.sock"]);
    }

    #[test]
    fn containers_are_found_and_the_host_is_none() {
        let table = "ns_id 0 identify 0 root_tgid 1 dev_num 2 namespace 0(#), udev list:\nlogic_devid udevid\n       \
                     0        0\n       1        1\n\n\nns_id 1 identify 9 root_tgid 4711 dev_num 1 namespace 0, udev \
                     list:\nlogic_devid udevid\n       0        5\n\n";
        assert_eq!(containers(table), [(4711, vec![5])]);
        assert_eq!(containers("0 1\nroot_tgid\nroot_tgid x\n"), []);
    }

    #[test]
    fn the_container_is_found_in_every_kind_of_cgroup() {
        let id = "0123456789abcdef".repeat(4);
        for path in [
            format!("0::/system.slice/docker-{id}.scope"),
            format!("12:devices:/docker/{id}\n"),
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope"),
        ] {
            assert_eq!(container(&path).as_deref(), Some("0123456789ab"), "{path}");
        }
        assert_eq!(container("0::/user.slice/user-0.slice/session-1.scope"), None);
    }
}
