//! The host that a trace was made on, as far as its answers tell: the emulated one should be like
//! it.

use super::TracedCall;
use crate::trace::decode;
use crate::trace::field::fields;
use ascend_emulator::Config;
use ascend_emulator::config::{Attachment, DeviceProcess, Place};
use ascend_emulator::record::{Record, bytes};
use ascend_ioctl::{Generation, devmng, svm, urd};
use std::collections::{HashMap, HashSet};

/// A field of an ioctl's answer.
fn answered(line: &TracedCall, generation: Generation, name: &str) -> Option<u64> {
    // A positive value is a failure of the modules that a host is described by.
    if line.record.errno.is_some() || line.record.unfinished || line.record.ret != 0 {
        return None;
    }
    line.record.out_hex.as_ref()?;
    let (_, after) = decode::argument(&line.record, &line.module, generation);
    let fields = fields(generation, &line.module, decode::request(&line.record));
    fields.iter().find(|field| field.name == name)?.number(&after)
}

/// No buffer that describes a host is longer.
const LONGEST: u64 = 1 << 20;

fn filled(record: &Record, field: &str) -> Option<Vec<u8>> {
    let buffer = record.buffers.iter().find(|buffer| buffer.field == field)?;
    bytes(buffer.out_hex.as_deref()?, buffer.len.min(LONGEST) as usize)
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

/// The host of a trace, whose driver is of this generation.
pub fn from_trace(generation: Generation, lines: &[TracedCall]) -> Config {
    let mut config = Config { generation, ..Config::default() };
    let of = |command: &'static str| lines.iter().filter(move |line| line.record.cmd == Some(command));
    let devices = of("GET_DEV_LIST").find_map(|line| physical_ids(&filled(&line.record, "array")?));
    if let Some(ids) = &devices {
        config.devices = ids.iter().max().map_or(0, |id| id + 1).min(64);
    }
    let in_container = of("GET_USER_INFO").any(|line| answered(line, generation, "admin") == Some(0));
    if let (Some(ids), true) = (&devices, in_container) {
        config.places = vec![Place::container(ids)];
    }
    let list = of("GET_MMAP_INFO").filter_map(|line| filled(&line.record, "array"));
    let starts = list.flat_map(|array| array.chunks_exact(16).map(|it| it[..8].to_vec()).collect::<Vec<_>>());
    // The segment that tells the attachment is not there in every generation.
    let connected = of("GET_DEVINFO").any(|line| answered(line, generation, "connect_type") == Some(1));
    if connected || starts.into_iter().any(|start| start == svm::HOST_PIN_START_HCCS.to_le_bytes()) {
        config.attachment = Attachment::Hccs;
    }
    // The firmware publishes three blocks of 64 bytes; the last starts with KiB.
    let published = of("URD").filter_map(|line| filled(&line.record, "input.data"));
    let published = published.filter_map(|block| Some(u64::from(half(&block, 128)?) << 10));
    let totals = of("QUERY_MEM_USEDINFO").filter_map(|line| answered(line, generation, "huge_total_size"));
    let totals = totals.chain(published);
    config.hbm = totals.max().filter(|total| *total != 0).unwrap_or(config.hbm);
    let flags = of("GET_HOST_PHY_MACH_FLAG").filter_map(|line| answered(line, generation, "flag"));
    config.virtual_machine = flags.into_iter().any(|flag| flag == u64::from(devmng::MACHINE_VIRTUAL));
    let spods = of("URD").filter(|line| {
        let argument = line.record.in_hex.as_deref().and_then(|text| bytes(text, 64)).unwrap_or_default();
        half(&argument, 8) == Some(urd::SPOD_INFO.main)
    });
    if let Some(server) = spods.filter_map(|line| half(&filled(&line.record, "input.buffer")?, 12)).next() {
        config.server = server;
    }
    let flag = |command, field| of(command).find_map(|line| answered(line, generation, field)).map(|flag| flag != 0);
    config.giant_pages = flag("SETUP_DEVICE", "giant_page").unwrap_or(config.giant_pages);
    config.host_giant_pages = flag("INIT_PROCESS", "host_giant_page").unwrap_or(config.host_giant_pages);
    let by_name = flag("SETUP_DEVICE", "support_shmem_map_exbus");
    config.share_over_external_bus = by_name.unwrap_or(config.share_over_external_bus);
    if let Some(chip) = of("GET_DEVINFO").find_map(|line| chip(line, generation)) {
        config.chip = chip;
    }
    if starts_by_itself(lines) {
        config.device_process = DeviceProcess::Automatic;
    }
    config
}

/// The name of the chip in the answer of GET_DEVINFO.
fn chip(line: &TracedCall, generation: Generation) -> Option<String> {
    answered(line, generation, "device")?;
    let (_, after) = decode::argument(&line.record, &line.module, generation);
    let fields = fields(generation, &line.module, decode::request(&line.record));
    let name = fields.iter().find(|field| field.name == "soc_version")?.bytes(&after);
    let name = String::from_utf8_lossy(name.split(|byte| *byte == 0).next()?).into_owned();
    name.starts_with("Ascend").then_some(name)
}

/// The physical ids in the answer of GET_DEV_LIST.
fn physical_ids(array: &[u8]) -> Option<Vec<u32>> {
    let valid = array.chunks_exact(8).filter(|element| element[0] & 1 != 0);
    Some(valid.map(|element| u32::from(u16::from_le_bytes([element[6], element[7]]))).collect())
}

/// Whether a process could use a device without a message to the daemon before.
fn starts_by_itself(lines: &[TracedCall]) -> bool {
    let mut asked: HashSet<i32> = HashSet::new();
    for line in lines {
        match line.record.cmd {
            Some("SEND") if line.module == "hdc" => drop(asked.insert(line.record.pid)),
            Some("SETUP_DEVICE") if line.record.errno.is_none() => return !asked.contains(&line.record.pid),
            _ => {}
        }
    }
    false
}

/// The ids of processes as the driver knows them, where its answers tell.
pub fn tgids(lines: &[TracedCall]) -> HashMap<i32, i32> {
    let mut tgids = HashMap::new();
    for line in lines {
        let told = match line.record.cmd {
            Some("GET_PROCESS_SIGN") => answered(line, Generation::NEWEST, "tgid").map(|tgid| tgid as i32),
            Some("CONTAINER_CMD") => {
                let (before, _) = decode::argument(&line.record, &line.module, Generation::NEWEST);
                let command = half(&before, 4);
                let output = filled(&line.record, "output").and_then(|bytes| half(&bytes, 0));
                output.filter(|_| command == Some(devmng::BARE_TGID)).map(|tgid| tgid as i32)
            }
            _ => None,
        };
        if let Some(tgid) = told.filter(|tgid| *tgid > 0) {
            tgids.insert(line.record.pid, tgid);
        }
    }
    tgids
}
