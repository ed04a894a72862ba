//! The fields of arguments, and what each means: a size, an address, a process id, a handle.
//!
//! The layouts are those of `ascend-ioctl`. What a number means is not in the driver's headers, so
//! it is said here: text prints it, `--anonymise` replaces it, and `--replay` compares it by it.

use ascend_emulator::record;
use ascend_ioctl::layout::{self, Layout};
use ascend_ioctl::{Generation, command, svm, urd};

/// What a field means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FieldKind {
    /// A number that is the same wherever the same program runs.
    Plain,
    /// Bytes.
    Size,
    /// An address of the driver's segments, or of the program's own memory.
    Address,
    /// The address of a buffer that belongs to the argument.
    Pointer,
    /// A process on the host.
    Pid,
    /// A process on a device.
    DevicePid,
    /// A handle of physical memory.
    Handle,
    /// A share of a handle.
    Share,
    /// A name of shared memory.
    Name,
    /// An asynchronous copy.
    Task,
    /// Addresses that were converted for an engine.
    Converted,
    /// A session of `/dev/hisi_hdc`, and its reuse counter.
    Session,
    /// It depends on the time.
    Time,
    /// What the host or the device is or has: it differs between machines.
    Machine,
    /// Nothing uses it.
    Reserved,
}

/// A field of an argument.
#[derive(Debug, Clone)]
pub struct Field {
    /// Its name, with that of the struct that it is in for inner structs.
    pub name: String,
    /// Offset in the argument.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// What it means.
    pub kind: FieldKind,
}

impl Field {
    /// Its bytes in an argument, as far as the argument has them.
    pub fn bytes<'a>(&self, argument: &'a [u8]) -> &'a [u8] {
        let end = (self.offset + self.size).min(argument.len());
        argument.get(self.offset..end).unwrap_or_default()
    }

    /// Its value, if it is a number.
    pub fn number(&self, argument: &[u8]) -> Option<u64> {
        (self.size <= 8).then(|| self.bytes(argument).iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

/// The fields of a command's argument; empty if they are not known.
pub fn fields(generation: Generation, module: &str, request: u32) -> Vec<Field> {
    let known = record::command(generation, module, request);
    let Some(command) = known.or_else(|| (module == "URD").then_some(&urd::CALL.command)) else {
        return head(module, request);
    };
    let name = match command.argument {
        Some("DevInfo") if generation.delta().devinfo_size != 320 => "DevInfo85",
        Some(name) => name,
        None if module == "SVM" => return head(module, request),
        // The commands of DEVMNG without a struct take one number.
        None if module == "DEVMNG" => {
            let kind = if command.name == "GET_CONSOLE_LOG_LEVEL" { FieldKind::Machine } else { FieldKind::Plain };
            return vec![Field { name: "value".into(), offset: 0, size: 4, kind }];
        }
        None => return Vec::new(),
    };
    let mut fields = head(module, request);
    if let Some(layout) = of(module, name) {
        let start = if module == "SVM" && command.magic == svm::MAGIC { svm::DATA } else { 0 };
        flatten(layout, "", start, &mut fields);
    }
    fields
}

/// The head that all arguments of the memory module have.
fn head(module: &str, request: u32) -> Vec<Field> {
    let mut fields = Vec::new();
    if module == "SVM" && command::magic(request) == svm::MAGIC {
        if let Some(layout) = of(module, "Head") {
            flatten(layout, "head.", 0, &mut fields);
        }
    }
    fields
}

/// A struct by its name. Two modules have structs of the same name.
fn of(module: &str, name: &str) -> Option<&'static Layout> {
    let own: &[Layout] = match module {
        "SVM" => svm::LAYOUTS,
        "hdc" => ascend_ioctl::hdc::LAYOUTS,
        "uda" => ascend_ioctl::uda::LAYOUTS,
        "URD" => ascend_ioctl::urd::LAYOUTS,
        "DEVMNG" => ascend_ioctl::devmng::LAYOUTS,
        "TSDRV" => ascend_ioctl::tsdrv::LAYOUTS,
        "ESCHED" => ascend_ioctl::esched::LAYOUTS,
        _ => &[],
    };
    own.iter().find(|layout| layout.name == name).or_else(|| layout::layouts().find(|layout| layout.name == name))
}

/// The struct that a field is, if it is one.
fn inner(layout: &str, field: &str) -> Option<&'static Layout> {
    let (module, name) = match (layout, field) {
        ("CallArg", "key") => ("URD", "CallKey"),
        ("CallArg", "buffers") => ("URD", "CallBuffers"),
        ("ContainerArg", "call") => ("DEVMNG", "ContainerCall"),
        ("MemSetAttr" | "MemGetAttr", "value") => ("SVM", "ShareAttr"),
        ("MemGetInfo", "info") => ("SVM", "ShareInfo"),
        ("MemHandleAttr", "value") => ("SVM", "HandleAttr"),
        ("Wait", "input") => ("ESCHED", "WaitInput"),
        ("Wait", "event") => ("ESCHED", "GotEvent"),
        ("Submit", "event") => ("ESCHED", "EventInfo"),
        _ => return None,
    };
    of(module, name)
}

fn flatten(layout: &'static Layout, prefix: &str, start: usize, fields: &mut Vec<Field>) {
    for field in layout.fields {
        match inner(layout.name, field.name) {
            Some(inner) => flatten(inner, &format!("{prefix}{}.", field.name), start + field.offset, fields),
            None => fields.push(Field {
                name: format!("{prefix}{}", field.name),
                offset: start + field.offset,
                size: field.size,
                kind: kind(layout.name, field.name),
            }),
        }
    }
}

/// What a field of a struct means. Fields of eight bytes are all named here, and a test says so.
fn kind(layout: &str, field: &str) -> FieldKind {
    use FieldKind::*;
    match (layout, field) {
        (_, "rsv" | "reserved" | "reserve" | "_reserved" | "_reserve_comm") => Reserved,
        ("Head", _) => Plain,
        // What only one kind of struct has.
        ("DevInfo" | "DevInfo85", "cpu_system_count" | "monotonic_raw_time_ns") => Time,
        ("Attach", "time") => Time,
        ("EventInfo", "timestamp" | "time_of_day") => Time,
        ("GotEvent", "published_by_user" | "published_by_kernel" | "published" | "woken" | "subscribed") => Time,
        ("QueueAlloc", "extension") | ("TaskSend", "tasks") | ("ReportReceive", "reports") => Pointer,
        ("QueueAlloc", "map") | ("QueryInfo", "input" | "output") => Pointer,
        ("WaitInput" | "GotEvent" | "EventInfo", "message") => Pointer,
        ("DevInfo" | "DevInfo85" | "PciInfo" | "PcieIdInfo" | "MachineFlag" | "Health", "device") => Plain,
        ("DevInfo" | "DevInfo85" | "PciInfo" | "PcieIdInfo" | "MachineFlag" | "Health", _) => Machine,
        ("InitProcess", _) => Machine,
        ("SetupDevice", "stats_address") => Pointer,
        ("SetupDevice", _) => Machine,
        ("MemUsedInfo", "memory") => Plain,
        // How long the daemon's messages are, and how many have come, is its own business.
        ("RecvPeek", "count") => Time,
        ("RecvPeek", "length") | ("Recv", "received") => Machine,
        ("MemUsedInfo", _) => Machine,
        ("MapCapability", "mem_map_capability") => Machine,
        ("ProcessSign", "tgid") => Pid,
        ("QueryPid", "pid") | ("MmapInfo", "aicpupid") | ("DevBindSibling", "aicpupid") => DevicePid,
        ("QueryPid", "host_pid") | ("MmapInfo" | "DevBindSibling", "hostpid") => Pid,
        ("IpcSetPid", "pids") | ("DestroyAddress", "host_pid") => Pid,
        ("Connect", "peer_pid") => Plain,
        (_, "pid" | "parent_pid") => Pid,
        ("IpcOpen" | "IpcCreate" | "IpcDestroy" | "IpcQuery" | "IpcSetPid" | "IpcSetAttr" | "IpcGetAttr", "name") => {
            Name
        }
        ("MemCreate" | "MemRelease" | "MemMap" | "MemExport" | "MemImport" | "MemHandleAttr", "id") => Handle,
        ("MemImport", "sdid" | "exporter_physical") => Machine,
        (_, "share") => Share,
        ("AsyncMemcpy", "task") => Task,
        ("AsyncMemcpy", "start_time") | ("Close", "task_start_time") => Time,
        (_, "session" | "alloc_index" | "unique" | "remote_session") => Session,
        ("MmapInfo" | "DeviceList", "array") | ("MemSetPid", "pids") => Pointer,
        ("MemcpyBatch", "destinations" | "sources" | "sizes") | ("CheckMemInfo", "addresses") => Pointer,
        ("CallKey", "filter") | ("CallBuffers" | "ContainerCall", "input" | "output") => Pointer,
        ("Send", "source" | "pool_buffer" | "pool_address") => Pointer,
        ("Recv", "destination" | "pool_buffer" | "buffer_list") => Pointer,
        ("Connect", "user_va") => Pointer,
        ("UvmRangeAttributes", "attributes" | "data" | "data_sizes") => Pointer,
        ("UvmPrefetchBatch", "vas" | "sizes" | "locations" | "loc_ids") => Pointer,
        ("ConvertCopy" | "ConvertAddress" | "DestroyAddress", "dma_addr") => Converted,
        ("DestroyAddressBatch", "dma_addr") => Pointer,
        ("ConvertAddress", "convert_id" | "pa_batch") | ("IpcSetAttr" | "IpcGetAttr", "attr") => Plain,
        ("MemRepair", "repair_addrs") => Address,
        ("Translate", "translated") | ("RemoteMap", "dst_va") => Machine,
        (_, "address" | "destination" | "source" | "src_va" | "dst_va") => Address,
        ("ReserveAddressInfo", "start" | "end") => Address,
        (_, "size" | "len" | "length" | "width" | "height" | "fixed_size") => Size,
        (_, "destination_pitch" | "source_pitch" | "spitch" | "dpitch") => Size,
        (_, "reserved_size" | "used_size" | "free_size" | "buffer_lengths") => Size,
        ("MemCreate" | "MemRelease" | "MemMap" | "MemImport", "pages" | "flags") => Plain,
        ("AsyncMemcpy", "state") | ("Memset", "value") => Plain,
        ("SomaPoolCreate", "dev_id") => Plain,
        (_, "pool_id") => Plain,
        ("UvmRangeAttributes", "attribute_num") | ("UvmPrefetchBatch", "count" | "num_loc" | "flags") => Plain,
        ("UvmPrefetch", "location") | ("P2pAttr" | "P2pAttr85", "capability") => Plain,
        _ => Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_eight_bytes_has_a_meaning_that_was_chosen() {
        // An address that is taken for a plain number would be compared by a replay, and kept by
        // --anonymise.
        let plain = [
            "MemCreate.flags",
            "MemCreate.pages",
            "MemRelease.pages",
            "MemMap.pages",
            "MemImport.pages",
            "AsyncMemcpy.state",
            "Memset.value",
            "ConvertAddress.convert_id",
            "ConvertAddress.pa_batch",
            "IpcSetAttr.attr",
            "IpcGetAttr.attr",
            "SomaPoolCreate.dev_id",
            "SomaPoolCreate.pool_id",
            "SomaPoolDestroy.pool_id",
            "SomaPoolMalloc.pool_id",
            "SomaPoolFree.pool_id",
            "SomaPoolTrim.pool_id",
            "UvmRangeAttributes.attribute_num",
            "UvmPrefetchBatch.count",
            "UvmPrefetchBatch.num_loc",
            "UvmPrefetchBatch.flags",
            "UvmPrefetch.location",
        ];
        let mut seen = 0;
        for generation in Generation::ALL {
            for command in layout::commands(generation) {
                let module = match command.magic {
                    svm::MAGIC if command.size != 0 => "SVM",
                    b'M' => "DEVMNG",
                    b'H' => "hdc",
                    b'U' => "uda",
                    b'V' => "URD",
                    _ => continue,
                };
                let Some(layout) = command.argument.and_then(|name| of(module, name)) else { continue };
                for field in layout.fields.iter().filter(|field| field.size == 8) {
                    let name = format!("{}.{}", layout.name, field.name);
                    let is_inner = inner(layout.name, field.name).is_some();
                    let is_plain = kind(layout.name, field.name) == FieldKind::Plain;
                    assert!(is_inner || is_plain == plain.contains(&name.as_str()), "{name}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn arguments_are_taken_apart() {
        let create = Generation::V26_1.svm(svm::Op::MemCreate).unwrap().command.request();
        let names: Vec<String> = fields(Generation::V26_1, "SVM", create).into_iter().map(|field| field.name).collect();
        assert_eq!(&names[..5], ["head.logical", "head.device", "head.vf", "id", "numa_node"]);
        let query = fields(Generation::V26_1, "URD", ascend_ioctl::urd::CALL.request());
        let field = |name: &str| query.iter().find(|field| field.name == name).unwrap();
        assert_eq!(field("key.main").offset, 8);
        assert_eq!((field("buffers.output").offset, field("buffers.output").kind), (48, FieldKind::Pointer));
    }
}
