//! `Device` and `Host`: places for memory.

use crate::error::{Fault, Outcome, data, fields};
use crate::memory::PhysicalMemory;
use crate::node::{Close, Ends, Node, closable};
use crate::session::Session;
use crate::share::Source;
use crate::size::{Size, kind, memory_kind};
use ascend_vmm::Error;
use ascend_vmm::share::Place;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::Arc;

impl Ends for ascend_vmm::Device {
    const CLASS: &'static str = "Device";
    const CLOSING: &'static str = "close the device";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        match self.close() {
            // What was made from this object is closed. Others have the device too, and the last of
            // them closes it.
            Ok(()) | Err(ascend_vmm::Failed { error: Error::InUse { .. }, .. }) => Ok(()),
            Err(failed) => Err((failed.error.into(), Some(failed.object))),
        }
    }
}

impl Ends for ascend_vmm::Host {
    const CLASS: &'static str = "Host";
    const CLOSING: &'static str = "close the host";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        Ok(())
    }
}

/// An NPU that is set up for this process. Closing it closes the memory that was made from it; the
/// driver's device is closed with the last object that uses it.
///
/// >>> with Session() as session, session.device(0) as device:
/// ...     device.create("64MiB")
/// <PhysicalMemory 64 MiB, HBM of device 0>
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Device {
    pub(crate) node: Arc<Node<ascend_vmm::Device>>,
}

/// The host, as a place for memory that the CPU and NPUs share.
///
/// >>> with Session() as session, session.host() as host:
/// ...     host.create("2MiB").location
/// 'host'
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Host {
    pub(crate) node: Arc<Node<ascend_vmm::Host>>,
}

closable! { Device {
    /// Closes the memory that was made from it, and the device if nothing else uses it.
    fn close;

    /// Its number in this process's namespace.
    #[getter]
    fn id(&self) -> Outcome<u32> {
        Ok(self.node.get()?.id().0)
    }

    /// The session that it belongs to.
    #[getter]
    fn session(&self) -> Outcome<Session> {
        Ok(Session::of(self.node.get()?.session()))
    }

    /// What it can do.
    #[getter]
    fn capabilities<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        let can = self.node.get()?.capabilities();
        let fields = fields! { py;
            cpu_access: can.cpu_access,
            cpu_access_huge: can.cpu_access_huge,
            device_memory_on_host: can.device_memory_on_host,
            giant_pages: can.giant_pages,
            remote_map: can.remote_map,
            share_over_external_bus: can.share_over_external_bus,
            host_addresses: can.host_addresses,
        };
        Ok(data(py, "Capabilities", &fields)?)
    }

    /// How much memory of a kind it has, and how much is free.
    ///
    /// >>> with Session() as session:
    /// ...     session.device(0).memory_info().huge_total > 0
    /// True
    #[pyo3(signature = (memory=None))]
    fn memory_info<'py>(&self, py: Python<'py>, memory: Option<&str>) -> Outcome<Bound<'py, PyAny>> {
        let (device, kind) = (self.node.get()?, memory_kind(memory)?);
        let info = py.detach(|| device.memory_info(kind))?;
        let fields = fields! { py;
            huge_total: info.huge_total,
            huge_free: info.huge_free,
            giant_total: info.giant_total,
            giant_free: info.giant_free,
            normal_total: info.normal_total,
            normal_free: info.normal_free,
        };
        Ok(data(py, "MemoryInfo", &fields)?)
    }

    /// Allocates physical memory, which has no address yet. `page` is "2MiB" or "1GiB", `memory` is
    /// "HBM", "DDR", "P2P HBM" or "P2P DDR".
    #[pyo3(signature = (size, *, page=None, memory=None))]
    fn create(&self, py: Python<'_>, size: Size, page: Option<Size>, memory: Option<&str>) -> Outcome<PhysicalMemory> {
        let (device, kind) = (self.node.get()?, kind(page, memory)?);
        let memory = py.detach(|| device.create_with(size.0, kind))?;
        Ok(PhysicalMemory { node: Node::new(memory, [self.node.clone()]) })
    }

    /// Imports memory that another process exported: from a `Ticket`, its text or bytes, or one of
    /// the vendor's handles (an int, or 128 bytes).
    fn import_memory(&self, py: Python<'_>, source: Source) -> Outcome<PhysicalMemory> {
        let device = self.node.get()?;
        let memory = py.detach(|| source.import(&*device))?;
        Ok(PhysicalMemory { node: Node::new(memory, [self.node.clone()]) })
    }

    /// Lets this device and another reach each other's memory. `Mapping.grant` does it when needed.
    fn enable_peer_access(&self, py: Python<'_>, peer: &Device) -> Outcome<()> {
        let (device, peer) = (self.node.get()?, peer.node.get()?);
        Ok(py.detach(|| device.enable_peer_access(&peer))?)
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(device) => format!("<Device {}>", device.id()),
            None => "<Device, closed>".to_owned(),
        }
    }
} }

closable! { Host {
    /// Closes the memory that was made from it.
    fn close;

    /// Allocates memory of the host that devices can use. `node` chooses a NUMA node.
    #[pyo3(signature = (size, *, page=None, memory=None, node=None))]
    fn create(
        &self,
        py: Python<'_>,
        size: Size,
        page: Option<Size>,
        memory: Option<&str>,
        node: Option<u32>,
    ) -> Outcome<PhysicalMemory> {
        let (host, kind) = (self.node.get()?, kind(page, memory)?);
        let created = py.detach(|| match node {
            Some(node) => host.create_on_node(size.0, kind, node),
            None => host.create_with(size.0, kind),
        })?;
        Ok(PhysicalMemory { node: Node::new(created, [self.node.clone()]) })
    }

    /// Imports memory that another process exported, for the CPU: see `Device.import_memory`.
    fn import_memory(&self, py: Python<'_>, source: Source) -> Outcome<PhysicalMemory> {
        let host = self.node.get()?;
        let memory = py.detach(|| source.import(&*host))?;
        Ok(PhysicalMemory { node: Node::new(memory, [self.node.clone()]) })
    }

    fn __repr__(&self) -> String {
        if self.node.try_get().is_some() { "<Host>".to_owned() } else { "<Host, closed>".to_owned() }
    }
} }

/// A `Device` or a `Host`.
pub(crate) enum AnyPlace {
    Device(Arc<Node<ascend_vmm::Device>>),
    Host(Arc<Node<ascend_vmm::Host>>),
}

impl<'py> FromPyObject<'_, 'py> for AnyPlace {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(device) = object.cast::<Device>() {
            return Ok(AnyPlace::Device(device.get().node.clone()));
        }
        match object.cast::<Host>() {
            Ok(host) => Ok(AnyPlace::Host(host.get().node.clone())),
            Err(_) => Err(PyTypeError::new_err("a place for memory is a Device or a Host")),
        }
    }
}

impl AnyPlace {
    /// Calls `act` with the library's object.
    pub(crate) fn with<T>(&self, act: impl FnOnce(Place<'_>) -> T) -> Outcome<T> {
        Ok(match self {
            AnyPlace::Device(device) => act(Place::from(&*device.get()?)),
            AnyPlace::Host(host) => act(Place::from(&*host.get()?)),
        })
    }

    /// The parent of what is made there.
    pub(crate) fn node(&self) -> Arc<dyn Close> {
        match self {
            AnyPlace::Device(device) => device.clone(),
            AnyPlace::Host(host) => host.clone(),
        }
    }
}
