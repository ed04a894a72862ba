//! Access of one device to another's memory over the link between them.
//!
//! A process requests each direction; the driver counts per process and lets two devices through
//! when both directions were requested, by any process. It forgets a process's requests when a
//! DEVMNG file of the process is closed (`devdrv_flush_p2p`, called from DEVMNG's release), and
//! only then: so a [`PeerAccess`] keeps that file open, and the requests of a killed process do not
//! stay behind.

use super::physical;
use crate::driver::Answer;
use crate::driver::devmng::Devmng;
use crate::driver::recognise;
use crate::driver::urd::{P2p, Urd};
use crate::error::{Errno, Refused, Result, SystemCall};
use crate::id::{LogicalId, PhysicalId};
use crate::trace;
use ascend_ioctl::Generation;

/// True if `device` can reach the memory of `peer`. This process must have listed the devices
/// before.
///
/// False for the second die of a card, for virtual functions, and where the machine's wiring does
/// not allow it.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::discovery;
///
/// if let [first, second, ..] = &discovery::list()?[..] {
///     println!("{}", discovery::can_access(first.logical, second.logical)?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Open`](crate::Error::Open) without a driver or permission,
/// [`Error::Refused`](crate::Error::Refused) if there is no such device,
/// [`Error::UnknownGeneration`](crate::Error::UnknownGeneration) if the driver fits no table.
#[doc(alias = "aclrtDeviceCanAccessPeer")]
#[doc(alias = "cudaDeviceCanAccessPeer")]
#[doc(alias = "cuDeviceCanAccessPeer")]
pub fn can_access(device: LogicalId, peer: LogicalId) -> Result<bool> {
    let urd = Urd::open()?;
    // The keys are the last resort: these questions leave error lines in the kernel's log.
    let generation = match recognise::memory_driver() {
        Ok(generation) => generation,
        Err(_) => recognise::by_keys(&urd).map_err(recognise::unknown)?,
    };
    let request = PeerRequest { device, peer: physical(peer)?, generation };
    Ok(request.send(&urd, P2p::CanAccess)? != 0)
}

/// Both directions between two devices, requested by this process. Withdrawn when dropped.
#[derive(Debug)]
pub(crate) struct PeerAccess {
    requests: [PeerRequest; 2],
    /// Kept open, so that the driver forgets the requests with this process and not before.
    devmng: Devmng,
}

impl PeerAccess {
    /// Requests both directions.
    pub(crate) fn enable(generation: Generation, first: LogicalId, second: LogicalId) -> Result<PeerAccess> {
        let devmng = Devmng::claim();
        // Opens the file: without one the driver would never withdraw the requests of a killed
        // process.
        devmng.bare_tgid()?;
        let urd = Urd::open()?;
        let there = PeerRequest { device: first, peer: physical(second)?, generation };
        let back = PeerRequest { device: second, peer: physical(first)?, generation };
        there.send(&urd, P2p::Enable)?;
        if let Err(error) = back.send(&urd, P2p::Enable) {
            there.withdraw(&urd);
            return Err(error);
        }
        Ok(PeerAccess { requests: [there, back], devmng })
    }
}

impl Drop for PeerAccess {
    fn drop(&mut self) {
        if self.devmng.is_inherited() {
            // The parent's requests.
            return;
        }
        match Urd::open() {
            Ok(urd) => self.requests.iter().for_each(|request| request.withdraw(&urd)),
            Err(error) => trace::warn(error, NOT_WITHDRAWN),
        }
    }
}

/// One direction.
#[derive(Debug, Clone, Copy)]
struct PeerRequest {
    device: LogicalId,
    peer: PhysicalId,
    generation: Generation,
}

impl PeerRequest {
    /// Sends an operation and returns the status word.
    fn send(&self, urd: &Urd, operation: P2p) -> Result<i32> {
        urd.p2p(operation, self.device, self.peer, self.generation).map_err(|answer| {
            let (errno, note) = match answer {
                Answer::Refused(errno) => (errno, String::new()),
                Answer::Positive(P2p::NOT_PERMITTED) => (Errno::EPERM, ", answer 46: this user may not".to_owned()),
                Answer::Positive(P2p::NOT_SUPPORTED_HERE) => {
                    (Errno::EOPNOTSUPP, ", answer 65534: not in this environment".to_owned())
                }
                Answer::Positive(number) => (Errno::EIO, format!(", answer {number}")),
                Answer::Done => (Errno::EIO, String::new()),
            };
            Refused::new(SystemCall::Other("P2P"), errno)
                .operation("use the link between two devices")
                .object(format!("device {}, peer with physical id {}", self.device, self.peer))
                .arguments(format!("{operation:?}{note}"))
                .into()
        })
    }

    fn withdraw(&self, urd: &Urd) {
        if let Err(error) = self.send(urd, P2p::Disable) {
            trace::warn(error, NOT_WITHDRAWN);
        }
    }
}

const NOT_WITHDRAWN: &str = "peer access could not be withdrawn; it ends with the process";
