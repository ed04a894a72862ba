//! A device that was set up for this process, and the host, as places for memory.
//!
//! SETUP_DEVICE ties the process to its counterpart on the device; if there is none yet, one is started (see [`crate::process`]). The
//! driver then knows the pair until CLOSE_DEVICE, which waits until the counterpart is gone. Closing with mappings alive would lose
//! their addresses for the rest of the session, so memory, and through it every mapping, keeps its device open, and the last one to go
//! closes it.

use crate::discovery::{LogicalId, PeerAccess};
use crate::error::{Errno, Error, Failed, Invalid, Result};
use crate::process::{self, DeviceProcess};
use crate::session::call::{CLOSE_DEVICE, PREPARE_CLOSE_DEVICE, QUERY_MEM_USED_INFO, Request, SETUP_DEVICE};
use crate::session::{Inner, lock};
use ascend_ioctl::svm::{FreePages, HOST_AGENT_ID, HOST_ID, MemUsedInfo, SetupDevice};
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

/// A device that is set up for this process.
///
/// A counted reference: clones, and memory on the device, share it. The last one closes the device.
#[derive(Debug, Clone)]
pub struct Device {
    pub(crate) inner: Arc<DeviceInner>,
}

/// The host as a place for memory.
#[derive(Debug, Clone)]
pub struct Host {
    pub(crate) inner: Arc<DeviceInner>,
}

/// What a device can do, as it said when it was set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Device memory can be made visible to the CPU, through the device's PCI window.
    pub cpu_access: bool,
    /// The same for memory in 2 MiB pages.
    pub cpu_access_huge: bool,
    /// Device memory can be mapped at host addresses.
    pub device_memory_on_host: bool,
    /// Memory in 1 GiB pages.
    pub giant_pages: bool,
    /// Addresses outside of the driver's fixed range can be mapped.
    pub remote_map: bool,
    /// Memory can be shared over the external bus.
    pub share_over_external_bus: bool,
    /// The device can use the host's addresses (from driver 9.0.0 on).
    pub host_addresses: bool,
}

/// How much memory of a kind a device has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// In 2 MiB pages: all.
    pub huge_total: u64,
    /// In 2 MiB pages: free.
    pub huge_free: u64,
    /// In 1 GiB pages: all.
    pub giant_total: u64,
    /// In 1 GiB pages: free.
    pub giant_free: u64,
    /// In small pages: all.
    pub normal_total: u64,
    /// In small pages: free.
    pub normal_free: u64,
}

/// A device, or the host, which needs no setting up.
pub(crate) struct DeviceInner {
    pub(crate) id: u32,
    setup: SetupDevice,
    /// The device process that we started, if we did: ended after CLOSE_DEVICE.
    process: Option<DeviceProcess>,
    pub(crate) session: Arc<Inner>,
}

/// Short: memory and mappings lead here.
impl fmt::Debug for DeviceInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceInner").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Device {
    pub(crate) fn open(session: &Arc<Inner>, id: LogicalId) -> Result<Device> {
        session.svm.check_process()?;
        let LogicalId(number) = id;
        if number == HOST_ID || number == HOST_AGENT_ID {
            return Err(Invalid::because(
                "open a device",
                format!("{number} is not a device"),
                "64 and 65 stand for the host; use Session::host for its memory",
            ));
        }
        if let Some(inner) = session.devices.enter(number) {
            return Ok(Device { inner });
        }
        match set_up(session, id) {
            Ok((setup, process)) => {
                let inner = Arc::new(DeviceInner { id: number, setup, process, session: session.clone() });
                session.devices.fill(number, &inner);
                Ok(Device { inner })
            }
            Err(error) => {
                session.devices.vacate(&number);
                Err(error)
            }
        }
    }

    /// The device's number in this process's namespace.
    pub fn id(&self) -> LogicalId {
        LogicalId(self.inner.id)
    }

    /// What the device can do.
    pub fn capabilities(&self) -> Capabilities {
        let setup = &self.inner.setup;
        Capabilities {
            cpu_access: setup.bar_memory != 0,
            cpu_access_huge: setup.bar_huge_memory != 0,
            device_memory_on_host: setup.device_memory_on_host != 0,
            giant_pages: setup.giant_page != 0,
            remote_map: setup.support_remote_mmap != 0,
            share_over_external_bus: setup.support_shmem_map_exbus != 0,
            host_addresses: setup.host_uva != 0,
        }
    }

    /// The session that the device belongs to.
    pub fn session(&self) -> crate::Session {
        crate::Session { inner: self.inner.session.clone() }
    }

    /// The process on the device that we started for this process, if that was needed.
    pub fn device_process(&self) -> Option<&DeviceProcess> {
        self.inner.process.as_ref()
    }

    /// Lets this device and `peer` reach each other's memory over the link between them: both directions, once, until one of them is
    /// closed. [`Mapping::grant`](crate::Mapping::grant) does it when needed.
    #[doc(alias = "aclrtDeviceEnablePeerAccess")]
    #[doc(alias = "cuCtxEnablePeerAccess")]
    pub fn enable_peer_access(&self, peer: &Device) -> Result<()> {
        let session = &self.inner.session;
        session.svm.check_process()?;
        if !Arc::ptr_eq(session, &peer.inner.session) {
            return Err(Invalid::because(
                "enable access between devices",
                "the devices are of different sessions",
                "use one session",
            ));
        }
        let (first, second) = (self.inner.id.min(peer.inner.id), self.inner.id.max(peer.inner.id));
        if first == second {
            return Ok(());
        }
        let mut peers = lock(&session.peers);
        if let Entry::Vacant(pair) = peers.entry((first, second)) {
            let (manager, generation) = session.driver();
            pair.insert(PeerAccess::enable(manager, generation, LogicalId(first), LogicalId(second))?);
        }
        Ok(())
    }

    /// Closes the device, and tells what went wrong. It must be the last reference, with no memory left on it; otherwise it is handed
    /// back. (Dropping the last reference closes it too, and logs what goes wrong.)
    #[doc(alias = "aclrtResetDevice")]
    pub fn close(self) -> Result<(), Failed<Device>> {
        if let Err(error) = self.inner.session.svm.check_process() {
            return Err(Failed { error, object: self });
        }
        match Arc::try_unwrap(self.inner) {
            Ok(mut inner) => match inner.shut_down() {
                Ok(()) => {
                    inner.ended();
                    Ok(())
                }
                Err(error) => {
                    let inner = Arc::new(inner);
                    inner.session.devices.fill(inner.id, &inner);
                    Err(Failed { error, object: Device { inner } })
                }
            },
            Err(inner) => {
                let users = format!(
                    "{} other reference(s) to device {} are alive: clones, memory on it, or mappings granted to it; drop them first",
                    Arc::strong_count(&inner) - 1,
                    inner.id
                );
                Err(Failed { error: Error::InUse { operation: "close the device", users }, object: Device { inner } })
            }
        }
    }
}

impl Host {
    pub(crate) fn new(inner: Arc<DeviceInner>) -> Host {
        Host { inner }
    }
}

impl DeviceInner {
    /// The host of a session.
    pub(crate) fn host(session: &Arc<Inner>) -> Arc<DeviceInner> {
        if let Some(host) = session.devices.enter(HOST_ID) {
            return host;
        }
        let setup = SetupDevice::default();
        let host = Arc::new(DeviceInner { id: HOST_ID, setup, process: None, session: session.clone() });
        session.devices.fill(HOST_ID, &host);
        host
    }

    /// Whether it is the host.
    pub(crate) fn is_host(&self) -> bool {
        self.id == HOST_ID
    }

    /// Whether it has 1 GiB pages.
    pub(crate) fn has_giant_pages(&self) -> bool {
        if self.is_host() { self.session.has_host_giant_pages() } else { self.setup.giant_page != 0 }
    }

    /// `device 3`, or `the host`.
    pub(crate) fn name(&self) -> String {
        if self.is_host() { "the host".to_owned() } else { format!("device {}", self.id) }
    }

    /// What the device says of its memory; `kind` as QUERY_MEM_USEDINFO counts.
    pub(crate) fn memory_info(&self, kind: u32) -> Result<MemoryInfo> {
        let svm = &self.session.svm;
        svm.check_process()?;
        let query = MemUsedInfo { memory: kind, ..Default::default() };
        match svm.call(QUERY_MEM_USED_INFO, self.id, 0, &query) {
            Ok(info) => Ok(MemoryInfo {
                huge_total: info.huge_total_size,
                huge_free: info.huge_free_size,
                giant_total: info.giant_total_size,
                giant_free: info.giant_free_size,
                normal_total: info.normal_total_size,
                normal_free: info.normal_free_size,
            }),
            Err(errno) => Err(self.failed("ask how much memory is free", QUERY_MEM_USED_INFO, errno, String::new())),
        }
    }

    /// The error of a command on this device that just failed.
    #[cold]
    pub(crate) fn failed(&self, operation: &'static str, request: Request, errno: Errno, arguments: String) -> Error {
        let refused = self.session.svm.refused(operation, request, errno);
        if errno == Errno::ESRCH && !self.is_host() {
            // The device was set up, so its counterpart existed: now the device does not find it any more.
            tracing::warn!(error = %refused, device = self.id, "the device process is gone");
            return Error::DeviceProcessDied { device: self.id, operation, errno };
        }
        refused.object(self.name()).arguments(arguments).into()
    }

    fn shut_down(&mut self) -> Result<()> {
        if self.is_host() {
            return Ok(());
        }
        let session = &self.session;
        session.retry_orphans();
        lock(&session.peers).retain(|&(first, second), _| first != self.id && second != self.id);
        // The last one that is open: nobody can use a heap any more.
        if session.devices.all(|&other| other == self.id || other == HOST_ID) {
            session.disable_idle_heaps();
        }
        // The kernel copies an argument in that these commands do not look at.
        for (request, operation) in
            [(PREPARE_CLOSE_DEVICE, "prepare the end of a device"), (CLOSE_DEVICE, "close a device")]
        {
            if let Err(errno) = session.svm.call(request, self.id, 0, &FreePages::default()) {
                let refused = session.svm.refused(operation, request, errno).object(self.name());
                return Err(refused.into());
            }
        }
        // Its handles are gone, and the next ones may get the same ids.
        session.forget_memory_of(self.id);
        // The device is closed, whatever its process answers; drop says so if it does not.
        drop(self.process.take());
        Ok(())
    }

    /// Ends a device that was shut down already.
    fn ended(mut self) {
        self.session.devices.vacate(&self.id);
        // The place is free; nothing is left for drop to do but to let go of the session.
        self.id = ENDED;
    }
}

/// Id of a device that was closed explicitly.
const ENDED: u32 = u32::MAX;

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if self.id == ENDED || self.session.svm.guard.in_child() {
            return;
        }
        if let Err(error) = self.shut_down() {
            tracing::error!(%error, device = self.id, "the device was not closed; it is when the session is");
        }
        self.session.devices.vacate(&self.id);
    }
}

/// SETUP_DEVICE, with a device process if it needs one.
fn set_up(session: &Arc<Inner>, id: LogicalId) -> Result<(SetupDevice, Option<DeviceProcess>)> {
    let mut setup = SetupDevice::default();
    let process = process::bring_up(id, &session.devmng, &session.process, || {
        // An address that is not page-aligned says that no statistics are wanted.
        let wanted = SetupDevice { stats_address: 1, ..Default::default() };
        let answer = session.svm.call(SETUP_DEVICE, id.0, 0, &wanted);
        setup = answer.map_err(|errno| refused(session, id, errno))?;
        Ok(())
    })?;
    Ok((setup, process))
}

#[cold]
fn refused(session: &Inner, id: LogicalId, errno: Errno) -> Error {
    session.svm.refused("set up a device", SETUP_DEVICE, errno).object(format!("device {id}")).into()
}
