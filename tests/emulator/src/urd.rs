//! Module `URD`: feature queries.

use std::collections::BTreeMap;

/// Who asked for access between which devices.
///
/// Counted per process; the hardware is opened when both directions were asked for, by whomever.
#[derive(Debug, Default)]
pub(crate) struct PeerAccess {
    /// Requests by (device, peer), physical ids, and process.
    requests: BTreeMap<(u32, u32), BTreeMap<i32, u32>>,
}

impl PeerAccess {
    /// Whether both directions were asked for.
    pub fn both(&self, one: u32, other: u32) -> bool {
        self.requests.contains_key(&(one, other)) && self.requests.contains_key(&(other, one))
    }

    /// A process is gone.
    pub fn forget(&mut self, tgid: i32) {
        self.requests.retain(|_, by| {
            by.remove(&tgid);
            !by.is_empty()
        });
    }
}
