//! The state of the memory module for tests: what each session holds, and whether anything is left.

use super::Svm;
use super::handle::{Handle, HandleKind};
use super::session::Stage;
use crate::machine::HOST;
use serde::Serialize;
use std::collections::BTreeMap;

/// Everything that the memory module holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SvmState {
    /// Process objects, by process.
    pub sessions: Vec<SessionState>,
    /// Shares.
    pub shares: Vec<ShareState>,
    /// Number of names of memory.
    pub names: usize,
    /// Bytes in use, by physical device (65 is the host).
    pub used: BTreeMap<u32, u64>,
}

impl SvmState {
    /// Whether the module holds nothing.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.shares.is_empty() && self.names == 0 && self.used.is_empty()
    }
}

/// A process object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SessionState {
    /// Its process.
    pub tgid: i32,
    /// Whether INIT_PROCESS was called and the address space still exists.
    pub is_session: bool,
    /// Physical ids of the devices that are set up.
    pub devices: Vec<u32>,
    /// Heaps.
    pub heaps: Vec<HeapState>,
    /// Handles.
    pub handles: Vec<HandleState>,
    /// Asynchronous copies that were not refreshed.
    pub tasks: usize,
    /// Handles that are exported or imported.
    pub shared: usize,
}

/// A heap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeapState {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// Reservations, by their first address, with their size and counter.
    pub reservations: BTreeMap<u64, (u64, u64)>,
    /// Mappings, by their first address.
    pub mappings: BTreeMap<u64, MappingState>,
}

/// A mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MappingState {
    /// Bytes.
    pub size: u64,
    /// Physical device, or 65.
    pub device: u32,
    /// Handle.
    pub id: i32,
    /// Whether the CPU sees it.
    pub seen: bool,
}

/// A handle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HandleState {
    /// Physical device, or 65.
    pub device: u32,
    /// Id.
    pub id: i32,
    /// Bytes that are not released.
    pub size: u64,
    /// Number of mappings.
    pub mapped: u32,
    /// Whether it is an import.
    pub imported: bool,
    /// Whether it was exported.
    pub exported: bool,
}

/// A share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShareState {
    /// Physical device, or 65.
    pub device: u32,
    /// Id.
    pub id: i32,
    /// The process that exported it.
    pub exporter: i32,
    /// Number of holders: the exporter and imports.
    pub holders: u32,
    /// Listed processes.
    pub trusted: Vec<i32>,
    /// Whether only listed processes may import.
    pub needs_trust: bool,
}

impl Svm {
    /// The module's state.
    pub fn state(&self) -> SvmState {
        let mut sessions: Vec<SessionState> = self
            .processes
            .values()
            // A released session that only waits for the end of its address space holds nothing.
            .filter(|process| !process.released || process.host.iter().next().is_some() || !process.heaps.is_empty())
            .map(|process| {
                let handle = |device: u32| {
                    move |(id, handle): (i32, &Handle)| HandleState {
                        device,
                        id,
                        size: handle.left * handle.page_size,
                        mapped: handle.mapped,
                        imported: handle.kind == HandleKind::Imported,
                        exported: handle.kind == HandleKind::Exported,
                    }
                };
                let mut handles: Vec<HandleState> = process.host.iter().map(handle(HOST)).collect();
                handles.extend(
                    process.agents.iter().flat_map(|(&device, agent)| agent.handles.iter().map(handle(device))),
                );
                handles.sort_by_key(|handle| (handle.device, handle.id));
                let heaps = process.heaps.values().map(|heap| HeapState {
                    start: heap.start,
                    size: heap.size,
                    reservations: heap.reservations.values().map(|it| (it.start, (it.size, it.counter))).collect(),
                    mappings: heap
                        .mappings
                        .values()
                        .map(|it| {
                            let seen = it.view.is_some();
                            (it.start, MappingState { size: it.size, device: it.physical, id: it.id, seen })
                        })
                        .collect(),
                });
                SessionState {
                    tgid: process.tgid,
                    is_session: process.stage == Stage::Session,
                    devices: process.agents.keys().copied().collect(),
                    heaps: heaps.collect(),
                    handles,
                    tasks: process.tasks.len(),
                    shared: process.nodes.len(),
                }
            })
            .collect();
        sessions.sort_by_key(|session| session.tgid);
        let shares = self.world.shares.iter().map(|(&(device, id), share)| {
            let mut trusted: Vec<i32> = share.trusted.keys().copied().collect();
            trusted.sort_unstable();
            ShareState {
                device,
                id,
                exporter: share.exporter,
                holders: share.holders,
                trusted,
                needs_trust: share.needs_trust,
            }
        });
        let used = self.world.store.used_by_pool().filter(|(_, used)| *used != 0).collect();
        SvmState { sessions, shares: shares.collect(), names: self.world.names.len(), used }
    }

    /// Number of process objects that the kernel can never release: their files were closed after
    /// INIT_PROCESS had returned EEXIST.
    pub fn stuck(&self) -> u32 {
        self.stuck
    }

    /// Number of references that are never given back: unloading the real module then takes some 21
    /// minutes.
    pub fn leaked(&self) -> u32 {
        self.world.leaked
    }
}
