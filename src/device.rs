//! A device that was set up for this process, and the host, as places for memory.
//!
//! SETUP_DEVICE ties the process to its counterpart on the device. If there is no counterpart yet,
//! one is started (see [`crate::device_process`]). The driver keeps the pair until CLOSE_DEVICE,
//! which waits until the counterpart is gone. Closing a device under its mappings would lose their
//! addresses for the rest of the session. So memory, and through it every mapping, keeps its device
//! open, and the last reference closes it.

use crate::device_process::{self, DeviceProcess};
use crate::discovery::PeerAccess;
pub use crate::driver::svm::{Capabilities, MemoryInfo};
use crate::driver::svm::{HOST_AGENT_ID, HOST_ID, Svm};
use crate::error::{Errno, Error, Failed, Invalid, KernelResult, Refused, Result};
use crate::id::LogicalId;
use crate::kind::MemoryKind;
use crate::session::undo::{Left, Live, Undo, undo};
use crate::session::{Session, SessionInner};
use crate::slots::{Lookup, lock};
use crate::trace::{self, quiet};
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

/// A device that is set up for this process.
///
/// A counted reference, shared by clones and by memory on the device. The last one closes the
/// device.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, MemoryKind, Session};
///
/// let session = Session::open()?;
/// let device = session.device(LogicalId(0))?;
/// let free = device.memory_info(MemoryKind::Hbm)?.huge_free;
/// println!("{free} bytes of {device:?} are free in 2 MiB pages");
/// device.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<Live<DeviceInner>>,
}

/// The host as a place for memory.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{Location, Session};
///
/// let session = Session::open()?;
/// let memory = session.host()?.create(2 << 20)?;
/// assert_eq!(memory.location(), Location::Host);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Host {
    pub(crate) inner: Arc<Live<DeviceInner>>,
}

/// A device, or the host, which needs no SETUP_DEVICE.
pub(crate) struct DeviceInner {
    pub(crate) id: u32,
    open: OpenDevice,
    pub(crate) session: Arc<Live<SessionInner>>,
}

/// The kernel's side of an open device.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    pub(crate) id: u32,
    capabilities: Capabilities,
    /// The device process, if we started it. It is ended after CLOSE_DEVICE.
    process: Option<DeviceProcess>,
    /// PREPARE_CLOSE_DEVICE was done: the kernel begins no more asynchronous copies.
    prepared: bool,
}

impl OpenDevice {
    fn host() -> OpenDevice {
        OpenDevice { id: HOST_ID, capabilities: Capabilities::default(), process: None, prepared: false }
    }

    /// PREPARE_CLOSE_DEVICE, CLOSE_DEVICE, and the end of the device process.
    pub(crate) fn close(&mut self, svm: &Svm) -> KernelResult<()> {
        svm.prepare_close_device(self.id)?;
        self.prepared = true;
        svm.close_device(self.id)?;
        // The device is closed even if its process cannot be ended; the drop reports that.
        drop(self.process.take());
        Ok(())
    }
}

impl fmt::Debug for DeviceInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.inner.id).finish()
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Host")
    }
}

impl Device {
    pub(crate) fn open(session: &Arc<Live<SessionInner>>, id: LogicalId) -> Result<Device> {
        session.check_process()?;
        let LogicalId(number) = id;
        if number == HOST_ID || number == HOST_AGENT_ID {
            return Err(Invalid::because(
                "open a device",
                format!("{number} is not a device"),
                "64 and 65 stand for the host; use Session::host for its memory.",
            ));
        }
        if device_process::in_give_up_callback() {
            return Err(Invalid::because(
                "open a device",
                "this thread is opening one, and was asked whether to give that up",
                "Settings::give_up only says whether to go on waiting: open devices elsewhere.",
            ));
        }
        let slot = match session.devices.find(number) {
            Lookup::Object(inner) => {
                inner.drain();
                return Ok(Device { inner });
            }
            Lookup::Vacant(slot) => slot,
        };
        let open = match session.take_left_device(number) {
            // It could not be closed when it was dropped, and still cannot. It can be used again,
            // unless the kernel has begun to close it.
            Some(device) if !device.prepared => device,
            Some(device) => return Err(half_closed(session, device)),
            None => set_up(session, id)?,
        };
        let inner = DeviceInner { id: number, open, session: session.clone() };
        let inner = Arc::new(Live::new(inner));
        slot.fill(&inner);
        Ok(Device { inner })
    }

    /// The device's number in this process.
    pub fn id(&self) -> LogicalId {
        LogicalId(self.inner.id)
    }

    /// What the device can do.
    pub fn capabilities(&self) -> Capabilities {
        self.inner.open.capabilities
    }

    /// The session that the device belongs to.
    pub fn session(&self) -> Session {
        Session { inner: self.inner.session.clone() }
    }

    /// The device process that this library started, if one was needed.
    pub fn device_process(&self) -> Option<&DeviceProcess> {
        self.inner.open.process.as_ref()
    }

    /// How much memory of a kind the device has, and how much is free.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the device does not answer.
    #[doc(alias = "aclrtGetMemInfo")]
    #[doc(alias = "cudaMemGetInfo")]
    #[doc(alias = "cuMemGetInfo")]
    pub fn memory_info(&self, memory: MemoryKind) -> Result<MemoryInfo> {
        self.inner.memory_info(memory)
    }

    /// Lets this device and `peer` reach each other's memory over the link between them, in both
    /// directions, until one of them is closed. [`Mapping::grant`](crate::Mapping::grant) does this
    /// when needed.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for devices of different sessions; [`Error::Refused`] if there is no link
    /// between the two, or this user may not use it.
    #[doc(alias = "aclrtDeviceEnablePeerAccess")]
    #[doc(alias = "cudaDeviceEnablePeerAccess")]
    #[doc(alias = "cuCtxEnablePeerAccess")]
    pub fn enable_peer_access(&self, peer: &Device) -> Result<()> {
        self.inner.enable_peer_access(peer)
    }

    /// Closes the device. Dropping the last reference closes it too, and logs errors.
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] unless this is the last reference and no memory is left on the device;
    /// [`Error::Refused`] if the kernel refuses. The error returns the device.
    #[doc(alias = "aclrtResetDevice")]
    pub fn close(self) -> Result<(), Failed<Device>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: Device { inner } })
    }
}

impl DeviceInner {
    /// The host of a session.
    pub(crate) fn host(session: &Arc<Live<SessionInner>>) -> Arc<Live<DeviceInner>> {
        match session.devices.find(HOST_ID) {
            Lookup::Object(host) => host,
            Lookup::Vacant(slot) => {
                let (open, session) = (OpenDevice::host(), session.clone());
                let host = Arc::new(Live::new(DeviceInner { id: HOST_ID, open, session }));
                slot.fill(&host);
                host
            }
        }
    }

    /// True for the host.
    pub(crate) fn is_host(&self) -> bool {
        self.id == HOST_ID
    }

    /// True if it has 1 GiB pages.
    pub(crate) fn has_giant_pages(&self) -> bool {
        if self.is_host() { self.session.pages.giant_pages } else { self.open.capabilities.giant_pages }
    }

    /// `device 3`, or `the host`.
    pub(crate) fn name(&self) -> String {
        if self.is_host() { "the host".to_owned() } else { format!("device {}", self.id) }
    }

    pub(crate) fn memory_info(&self, memory: MemoryKind) -> Result<MemoryInfo> {
        self.session.check_process()?;
        self.drain();
        self.session
            .svm
            .query_mem_usedinfo(self.id, memory)
            .map_err(|refused| self.failed(refused, "query the free memory", String::new()))
    }

    fn drain(&self) {
        if let Some(process) = &self.open.process {
            process.drain();
        }
    }

    pub(crate) fn enable_peer_access(&self, peer: &Device) -> Result<()> {
        let session = &self.session;
        session.check_process()?;
        session.check_same(&peer.inner.session, "enable access between devices")?;
        let (first, second) = (self.id.min(peer.inner.id), self.id.max(peer.inner.id));
        if first == second {
            return Ok(());
        }
        let _quiet = quiet();
        let mut peers = lock(&session.peers);
        if let Entry::Vacant(pair) = peers.entry((first, second)) {
            pair.insert(PeerAccess::enable(session.generation, LogicalId(first), LogicalId(second))?);
        }
        Ok(())
    }

    /// The error for a command on this device that just failed.
    pub(crate) fn failed(&self, refused: Box<Refused>, operation: &'static str, arguments: String) -> Error {
        if refused.errno == Errno::ESRCH && !self.is_host() {
            // The device was set up, so its counterpart existed; now the device cannot find it.
            trace::warn(format_args!("device {}: {refused}", self.id), "the device process is gone");
            return Error::DeviceProcessDied { device: LogicalId(self.id), operation, errno: Errno::ESRCH };
        }
        refused.operation(operation).object(self.name()).arguments(arguments).into()
    }
}

impl Undo for DeviceInner {
    const OPERATION: &'static str = "close the device";

    fn session(&self) -> &SessionInner {
        &self.session
    }

    fn undo(&mut self) -> Result<()> {
        let session = &self.session;
        if self.is_host() {
            session.devices.vacate(&HOST_ID);
            return Ok(());
        }
        session.retry();
        // With the last open device, the heaps are no longer needed.
        if session.devices.all(|&other| other == self.id || other == HOST_ID) {
            session.disable_idle_heaps();
        }
        if let Err(refused) = self.open.close(&session.svm) {
            let state = if self.open.prepared { PREPARED } else { "" };
            return Err(refused.operation(Self::OPERATION).object(self.name()).arguments(state).into());
        }
        session.forget_memory_of(self.id);
        // Removed under the lock, dropped after it: dropping makes system calls.
        let of_this = |&(first, second): &(u32, u32)| first == self.id || second == self.id;
        let withdrawn: Vec<PeerAccess> = {
            let mut peers = lock(&session.peers);
            let pairs: Vec<(u32, u32)> = peers.keys().copied().filter(of_this).collect();
            pairs.iter().filter_map(|pair| peers.remove(pair)).collect()
        };
        drop(withdrawn);
        session.devices.vacate(&self.id);
        Ok(())
    }

    fn abandon(&mut self, error: Error) {
        // Its process must not end while the kernel still has the device.
        let open = std::mem::replace(&mut self.open, OpenDevice::host());
        self.session.keep(Left::Device(open), error);
        self.session.devices.vacate(&self.id);
    }

    fn users(&self, others: usize) -> String {
        format!(
            "{others} other reference(s) to {} are alive: clones, memory on it, or mappings granted \
             to it. Drop them first.",
            self.name()
        )
    }

    fn is_awaited(&self) -> bool {
        true
    }

    fn restore(device: &Arc<Live<DeviceInner>>) {
        device.session.devices.fill(device.id, device);
    }
}

/// The state of a device whose CLOSE_DEVICE was refused.
const PREPARED: &str = "closing has begun: asynchronous copies are refused until it is closed and opened again";

fn half_closed(session: &SessionInner, device: OpenDevice) -> Error {
    let number = device.id;
    let error = Error::InUse {
        operation: "open a device",
        users: format!("device {number} could not be closed before, and {PREPARED}. Try again, or open a new session."),
    };
    session.keep(Left::Device(device), Error::InUse { operation: DeviceInner::OPERATION, users: PREPARED.to_owned() });
    error
}

/// SETUP_DEVICE, with a device process if one is needed.
fn set_up(session: &SessionInner, id: LogicalId) -> Result<OpenDevice> {
    let mut capabilities = Capabilities::default();
    let process = device_process::bring_up(id, &session.devmng, &session.process, || {
        let answer = session.svm.setup_device(id.0);
        capabilities = answer.map_err(|refused| refused.operation("set up a device").object(format!("device {id}")))?;
        Ok(())
    })?;
    Ok(OpenDevice { id: id.0, capabilities, process, prepared: false })
}
