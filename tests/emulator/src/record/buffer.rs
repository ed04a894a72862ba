//! The buffers that arguments point to, as far as they are part of the call: lists of processes,
//! addresses and sizes, queries and their answers, messages to the daemon that starts device
//! processes, tasks, messages of events.
//!
//! Memory that a program copies to or from a device is never read. Of queries whose key is not
//! known, and of packets to other services than that daemon's, only the lengths are kept.

use crate::caller::Memory;
use crate::record::hex;
use ascend_ioctl::{Generation, hdc, svm, tsdrv, urd};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashSet;

/// A buffer that an argument points to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Buffer {
    /// The field that points to it.
    pub field: String,
    /// Its address.
    pub addr: String,
    /// Its length.
    pub len: u64,
    /// What it held before the call, if the driver reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_hex: Option<String>,
    /// What it held after the call, if the driver filled it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_hex: Option<String>,
}

/// Longest buffer whose contents are kept: the largest packet.
const LONGEST: u64 = hdc::MAX_PACKET as u64;

/// Most device processes and the like that one list can have; longer ones are not read.
const LONGEST_LIST: u64 = 65536;

/// Length of a converted address.
const DMA_ADDRESS: u64 = 40;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The driver reads it.
    Input,
    /// The driver fills it.
    Output,
    /// Only its length is kept.
    Opaque,
}

struct Pointer {
    field: Cow<'static, str>,
    address: u64,
    length: u64,
    used: Use,
}

/// The sessions of `/dev/hisi_hdc` with the daemon that starts device processes.
#[derive(Debug, Default)]
pub struct Sessions {
    with_daemon: HashSet<i32>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}

fn half(bytes: &[u8], at: usize) -> u64 {
    let half = bytes.get(at..at + 4).and_then(|half| half.try_into().ok());
    half.map_or(0, |half| u32::from_le_bytes(half).into())
}

impl Sessions {
    /// The buffers of an ioctl that is about to be made, with what the driver reads from them.
    pub fn before(&self, module: &str, command: Option<&str>, argument: &[u8], memory: &dyn Memory) -> Vec<Buffer> {
        let pointers = self.pointers(module, command, argument, None, memory);
        let buffer = |pointer: Pointer| Buffer {
            field: pointer.field.into_owned(),
            addr: format!("{:#x}", pointer.address),
            len: pointer.length,
            in_hex: (pointer.used == Use::Input).then(|| read(memory, pointer.address, pointer.length)).flatten(),
            out_hex: None,
        };
        pointers.into_iter().filter(|pointer| pointer.address != 0 && pointer.length != 0).map(buffer).collect()
    }

    /// Adds what the driver wrote to the buffers of an ioctl that succeeded.
    pub fn after(
        &mut self,
        module: &str,
        command: Option<&str>,
        before: &[u8],
        after: &[u8],
        memory: &dyn Memory,
        buffers: &mut [Buffer],
    ) {
        for pointer in self.pointers(module, command, before, Some(after), memory) {
            let known = buffers.iter_mut().find(|buffer| buffer.field == pointer.field);
            if let Some(buffer) = known.filter(|_| pointer.used == Use::Output) {
                buffer.out_hex = read(memory, pointer.address, pointer.length.min(buffer.len));
            }
        }
        if module == "hdc" {
            match command {
                Some("CONNECT") if half(before, 24) as i32 == hdc::SERVICE_TSD => {
                    self.with_daemon.insert(half(after, 28) as i32);
                }
                Some("CONNECT") => drop(self.with_daemon.remove(&(half(after, 28) as i32))),
                Some("CLOSE") => drop(self.with_daemon.remove(&(half(before, 24) as i32))),
                _ => {}
            }
        }
    }

    /// What an argument points to. Once there is an answer, it says how long the filled part is.
    fn pointers(
        &self,
        module: &str,
        command: Option<&str>,
        before: &[u8],
        after: Option<&[u8]>,
        memory: &dyn Memory,
    ) -> Vec<Pointer> {
        let (input, output, opaque) = (Use::Input, Use::Output, Use::Opaque);
        let at = |field: &'static str, offset: usize, length: u64, used| Pointer {
            field: field.into(),
            address: word(before, offset),
            length,
            used,
        };
        match (module, command.unwrap_or_default()) {
            ("SVM", "GET_MMAP_INFO") => vec![at("array", 32, 16 * half(after.unwrap_or(before), 16), output)],
            ("SVM", "MEM_SET_PID") => vec![at("pids", 24, 4 * half(before, 20).min(LONGEST_LIST), input)],
            ("SVM", "MEMCPY_BATCH") => {
                let length = 8 * half(before, 40).min(LONGEST_LIST);
                vec![
                    at("destinations", 16, length, input),
                    at("sources", 24, length, input),
                    at("sizes", 32, length, input),
                ]
            }
            ("SVM", "CHECK_MEMINFO") => {
                vec![at("addresses", 16, 8 * half(before, 24).min(LONGEST_LIST), input)]
            }
            ("SVM", "DESTROY_ADDR_BATCH") => {
                let count = half(before, 24).min(svm::BATCH.into());
                let mut pointers = vec![at("dma_addr", 16, 8 * count, input)];
                let mut list = vec![0; 8 * count as usize];
                if memory.read(word(before, 16), &mut list).is_ok() {
                    let elements = (0..count as usize).map(|index| Pointer {
                        field: format!("dma_addr[{index}]").into(),
                        address: word(&list, 8 * index),
                        length: DMA_ADDRESS,
                        used: input,
                    });
                    pointers.extend(elements);
                }
                pointers
            }
            ("uda", "GET_DEV_LIST") => vec![at("array", 8, 8 * half(before, 4).min(LONGEST_LIST), output)],
            ("DEVMNG", "CONTAINER_CMD") => vec![at("output", 16, 4, output)],
            ("URD", name) if name != "OPEN" && name != "CLOSE" && name != "GET_MODULE_STATUS" => query(before, memory),
            ("hdc", "SEND") => {
                let used = if self.with_daemon.contains(&(half(before, 24) as i32)) { input } else { opaque };
                vec![at("source", 32, half(before, 40), used)]
            }
            ("hdc", "RECV") => {
                let used = if self.with_daemon.contains(&(half(before, 24) as i32)) { output } else { opaque };
                let length = after.map_or_else(|| half(before, 40), |after| half(after, 56));
                vec![at("destination", 32, length, used)]
            }
            ("TSDRV", "SQCQ_ALLOC") => vec![at("map", 72, size_of::<tsdrv::QueueMap>() as u64, input)],
            ("TSDRV", "SQCQ_SEND") => {
                vec![at("tasks", 16, tsdrv::TASK_SIZE as u64 * half(before, 24).min(LONGEST_LIST), input)]
            }
            ("ESCHED", "SUBMIT") => vec![at("message", 48, half(before, 40), input)],
            ("ESCHED", "QUERY_INFO") => {
                // A refusal is positive, and fills nothing.
                vec![at("input", 16, half(before, 24), input), at("output", 32, half(before, 40), opaque)]
            }
            ("ESCHED", "WAIT") => vec![at("message", 24, half(before, 16), opaque)],
            _ => Vec::new(),
        }
    }
}

/// The buffers of a URD query, and those that its input points to.
fn query(argument: &[u8], memory: &dyn Memory) -> Vec<Pointer> {
    let (main, sub) = (half(argument, 8) as u32, half(argument, 12) as u32);
    let is = |key: urd::Key| (key.main, key.sub) == (main, sub);
    let known = is_known(main, sub);
    let or_opaque = |used| if known { used } else { Use::Opaque };
    let (input, length) = (word(argument, 32), half(argument, 40));
    let mut pointers = vec![
        Pointer { field: "filter".into(), address: word(argument, 16), length: half(argument, 24), used: Use::Input },
        Pointer { field: "input".into(), address: input, length, used: or_opaque(Use::Input) },
        Pointer {
            field: "output".into(),
            address: word(argument, 48),
            length: half(argument, 56),
            used: or_opaque(Use::Output),
        },
    ];
    let mut inner = vec![0; 32];
    if length >= 24 && memory.read(input, &mut inner[..length.min(32) as usize]).is_ok() {
        if is(urd::SPOD_INFO) {
            let (address, length) = (word(&inner, 8), half(&inner, 16).min(LONGEST_LIST));
            pointers.push(Pointer { field: "input.buffer".into(), address, length, used: Use::Output });
        } else if (is(urd::UDIS_GET) || is(urd::UDIS_GET_85)) && length >= 32 {
            let (address, length) = (word(&inner, 24), half(&inner, 20).min(LONGEST_LIST));
            pointers.push(Pointer { field: "input.data".into(), address, length, used: Use::Output });
        }
    }
    pointers
}

/// Whether a feature is one that this project knows.
fn is_known(main: u32, sub: u32) -> bool {
    let telling = Generation::ALL.iter().flat_map(|generation| generation.delta().urd_keys.iter().copied());
    KEYS.iter().map(|(_, key)| *key).chain(telling).any(|key| (key.main, key.sub) == (main, sub))
}

/// The features that this project knows, by name.
pub const KEYS: &[(&str, urd::Key)] = &[
    ("HEALTH", urd::HEALTH),
    ("PCIE_INFO", urd::PCIE_INFO),
    ("SPLIT_MODE", urd::SPLIT_MODE),
    ("INIT_STATUS", urd::INIT_STATUS),
    ("CHIP_INFO", urd::CHIP_INFO),
    ("BOOT_STATUS", urd::BOOT_STATUS),
    ("MASTER_ID", urd::MASTER_ID),
    ("PROBED", urd::PROBED),
    ("P2P", urd::P2P),
    ("PHYSICAL_INFO", urd::PHYSICAL_INFO),
    ("MEMORY_INFO", urd::MEMORY_INFO),
    ("TS_HEARTBEAT", urd::TS_HEARTBEAT),
    ("SPOD_INFO", urd::SPOD_INFO),
    ("UDIS_GET", urd::UDIS_GET),
    ("UDIS_GET", urd::UDIS_GET_85),
    ("NEXT_FAULT", crate::urd::NEXT_FAULT),
    ("FAULTS", crate::urd::FAULTS),
];

fn read(memory: &dyn Memory, address: u64, length: u64) -> Option<String> {
    if length > LONGEST {
        return None;
    }
    let mut bytes = vec![0; length as usize];
    memory.read(address, &mut bytes).ok().map(|()| hex(&bytes))
}
