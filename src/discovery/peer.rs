//! Access of one device to another's memory over the link between them.
//!
//! A process asks for each direction; the driver counts per process and lets two devices through when both directions were asked for, by
//! whomever. It forgets a process's requests when a DEVMNG file of the process is closed (`devdrv_flush_p2p`, called from DEVMNG's release),
//! and only then: so a [`PeerAccess`] keeps that file open, and the requests of a killed process do not stay behind.

use super::urd::Urd;
use super::{LogicalId, Options, PhysicalId, physical};
use crate::devmng::{Answer, Devmng};
use crate::error::{Error, Refused, Result};
use ascend_ioctl::{Generation, urd};
use nix::errno::Errno;
use std::path::{Path, PathBuf};

/// Kind of access, from 9.0.0 on: memory.
const MEMORY: u32 = 1;

/// Whether `device` can reach the memory of `peer`. The devices must have been listed by this process before.
///
/// False for the second die of a card, for virtual functions, and where the machine's wiring does not allow it.
#[doc(alias = "aclrtDeviceCanAccessPeer")]
#[doc(alias = "cuDeviceCanAccessPeer")]
pub fn can_access(device: LogicalId, peer: LogicalId) -> Result<bool> {
    can_access_with(&Options::default(), device, peer)
}

/// As [`can_access`], with options.
pub fn can_access_with(options: &Options, device: LogicalId, peer: LogicalId) -> Result<bool> {
    let manager = &options.manager;
    let urd = Urd::open(manager)?;
    let generation = urd
        .generation()
        .map_err(|detected| Error::UnknownGeneration(Box::new(crate::error::UnknownDriver { detected })))?;
    let asked = Request { device, peer: physical(manager, peer)?, generation };
    Ok(asked.send(&urd, urd::P2P_CAN_ACCESS)? != 0)
}

/// Both directions between two devices, asked for by this process. Withdrawn when dropped.
#[derive(Debug)]
pub(crate) struct PeerAccess {
    requests: [Request; 2],
    manager: PathBuf,
    /// Kept open, so that the driver forgets the requests with this process and not before.
    devmng: Devmng,
}

impl PeerAccess {
    /// Asks for both directions.
    pub(crate) fn enable(
        manager: &Path,
        generation: Generation,
        first: LogicalId,
        second: LogicalId,
    ) -> Result<PeerAccess> {
        let devmng = Devmng::hold(manager);
        // Opens the file: without one the driver would never withdraw the requests of a killed process.
        devmng.bare_tgid()?;
        let urd = Urd::open(manager)?;
        let there = Request { device: first, peer: physical(manager, second)?, generation };
        let back = Request { device: second, peer: physical(manager, first)?, generation };
        there.send(&urd, urd::P2P_ENABLE)?;
        if let Err(error) = back.send(&urd, urd::P2P_ENABLE) {
            there.withdraw(&urd);
            return Err(error);
        }
        Ok(PeerAccess { requests: [there, back], manager: manager.to_owned(), devmng })
    }
}

impl Drop for PeerAccess {
    fn drop(&mut self) {
        if self.devmng.is_inherited() {
            // The parent's requests.
            return;
        }
        match Urd::open(&self.manager) {
            Ok(urd) => self.requests.iter().for_each(|request| request.withdraw(&urd)),
            Err(error) => tracing::warn!(%error, "peer access could not be withdrawn; it ends with the process"),
        }
    }
}

/// One direction.
#[derive(Debug, Clone, Copy)]
struct Request {
    device: LogicalId,
    peer: PhysicalId,
    generation: Generation,
}

impl Request {
    /// Sends an operation and returns the status word. The struct's size must be exactly the generation's.
    fn send(&self, urd: &Urd, operation: u32) -> Result<i32> {
        let status = if self.generation.delta().p2p_size == size_of::<urd::P2pAttr85>() {
            let arg = urd::P2pAttr85 { operation, device: self.device.0, peer: self.peer.0, ..Default::default() };
            urd.ask::<_, urd::P2pAttr85>(self.device, &urd::P2P, &arg).map(|answer| answer.status)
        } else {
            let arg = urd::P2pAttr {
                operation,
                device: self.device.0,
                peer: self.peer.0,
                kind: MEMORY,
                ..Default::default()
            };
            urd.ask::<_, urd::P2pAttr>(self.device, &urd::P2P, &arg).map(|answer| answer.status)
        };
        status.map_err(|answer| {
            let (errno, note) = match answer {
                Answer::Refused(errno) => (errno, String::new()),
                Answer::Positive(urd::NOT_PERMITTED) => (Errno::EPERM, ", answer 46: this user may not".to_owned()),
                Answer::Positive(urd::NOT_SUPPORTED_HERE) => {
                    (Errno::EOPNOTSUPP, ", answer 65534: not in this environment".to_owned())
                }
                Answer::Positive(number) => (Errno::EIO, format!(", answer {number}")),
                Answer::Done => (Errno::EIO, String::new()),
            };
            Refused::named("use the link between two devices", "P2P", errno)
                .object(format!("device {}, peer with physical id {}", self.device, self.peer))
                .arguments(format!("operation {operation}{note}"))
                .into()
        })
    }

    fn withdraw(&self, urd: &Urd) {
        if let Err(error) = self.send(urd, urd::P2P_DISABLE) {
            tracing::warn!(%error, "peer access could not be withdrawn; it ends with the process");
        }
    }
}
