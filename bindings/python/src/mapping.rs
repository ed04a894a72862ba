//! `Mapping`: memory at an address.

use crate::buffer::{Buffer, new_bytes};
use crate::copy::{AnyMapped, extent, length, mapped_memory, rest, rows};
use crate::device::Device;
use crate::error::{Fault, Outcome};
use crate::file::{Purpose, open, with_progress};
use crate::host_view;
use crate::memory::PhysicalMemory;
use crate::node::{Ends, Node};
use crate::pending::PendingCopy;
use crate::size::Size;
use ascend_vmm::Bytes;
use ascend_vmm::pool;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Arc, Weak};

impl Ends for ascend_vmm::Mapping {
    const CLASS: &'static str = "Mapping";
    const CLOSING: &'static str = "unmap memory";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        self.unmap().map_err(|failed| (failed.error.into(), Some(failed.object)))
    }
}

/// Memory at an address. Closing it unmaps it.
///
/// >>> with Session() as session:
/// ...     memory = session.device(0).create("64MiB")
/// ...     mapping = session.reserve("1GiB").map(memory)
/// ...     mapping.write(b"hello, NPU")
/// ...     mapping.read(10)
/// b'hello, NPU'
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Mapping {
    pub(crate) node: Arc<Node<ascend_vmm::Mapping>>,
    /// The object that was mapped, which the open mapping keeps.
    pub(crate) memory: Weak<Node<ascend_vmm::PhysicalMemory>>,
}

mapped_memory! { Mapping {
    /// Unmaps it. Refused while a buffer of one of its views is in use.
    fn close;

    /// Offset in its reservation.
    #[getter]
    fn offset(&self) -> Outcome<u64> {
        Ok(self.node.get()?.offset())
    }

    /// The memory that is mapped.
    #[getter]
    fn memory(&self) -> Outcome<PhysicalMemory> {
        self.memory.upgrade().map(|node| PhysicalMemory { node }).ok_or(Fault::Closed("Mapping"))
    }

    /// Lets another device read and write the memory.
    fn grant(&self, py: Python<'_>, peer: &Device) -> Outcome<()> {
        let (mapping, peer) = (self.node.get()?, peer.node.get()?);
        Ok(py.detach(|| mapping.grant(&peer))?)
    }

    /// Whether a device may read and write the memory.
    fn is_granted(&self, py: Python<'_>, device: &Device) -> Outcome<bool> {
        let (mapping, device) = (self.node.get()?, device.node.get()?);
        Ok(py.detach(|| mapping.is_granted(&device))?)
    }

    /// The memory as the CPU sees it, where it may: host memory, and memory of devices that have a
    /// window for it. See `HostView`.
    fn host_view<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        host_view::of(py, &self.node)
    }

    fn __len__(&self) -> Outcome<usize> {
        Ok(self.node.get()?.size() as usize)
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(mapping) => format!("<Mapping {} at {:#x}>", Bytes(mapping.size()), mapping.address()),
            None => "<Mapping, closed>".to_owned(),
        }
    }
} }
