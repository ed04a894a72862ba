//! `PhysicalMemory`: memory without an address.

use crate::error::{Fault, Outcome};
use crate::node::{Ends, Node, closable};
use crate::session::Session;
use crate::share::{Export, Ticket, processes};
use ascend_vmm::Bytes;
use ascend_vmm::Location;
use pyo3::prelude::*;
use std::sync::Arc;

impl Ends for ascend_vmm::PhysicalMemory {
    const CLASS: &'static str = "PhysicalMemory";
    const CLOSING: &'static str = "free physical memory";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        self.free().map_err(|failed| (failed.error.into(), Some(failed.object)))
    }
}

/// Physical memory, which a `Reservation` maps to addresses. Closing it unmaps it and frees it.
///
/// >>> with Session() as session, session.device(0).create("64MiB") as memory:
/// ...     memory.size, memory.page, memory.memory_kind, memory.location
/// (67108864, 2097152, 'HBM', 0)
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct PhysicalMemory {
    pub(crate) node: Arc<Node<ascend_vmm::PhysicalMemory>>,
}

closable! { PhysicalMemory {
    /// Unmaps it and frees it. Processes that imported it keep it.
    fn close;

    /// Size in bytes.
    #[getter]
    fn size(&self) -> Outcome<u64> {
        Ok(self.node.get()?.size())
    }

    /// Size of its pages in bytes.
    #[getter]
    fn page(&self) -> Outcome<u64> {
        Ok(self.node.get()?.page().size())
    }

    /// Which memory: "HBM", "DDR", "P2P HBM" or "P2P DDR".
    #[getter]
    fn memory_kind(&self) -> Outcome<String> {
        Ok(self.node.get()?.memory_kind().to_string())
    }

    /// Where it is: the number of a device, or "host".
    #[getter]
    fn location(&self, py: Python<'_>) -> Outcome<Py<PyAny>> {
        Ok(match self.node.get()?.location() {
            Location::Device(id) => id.0.into_pyobject(py).map_err(PyErr::from)?.into_any().unbind(),
            Location::Host => "host".into_pyobject(py).map_err(PyErr::from)?.into_any().unbind(),
        })
    }

    /// Whether another process created it.
    #[getter]
    fn is_imported(&self) -> Outcome<bool> {
        Ok(self.node.get()?.is_imported())
    }

    /// The session that it belongs to.
    #[getter]
    fn session(&self) -> Outcome<Session> {
        Ok(Session::of(self.node.get()?.session()))
    }

    /// Whether both objects are the same memory.
    fn is_same(&self, other: &PhysicalMemory) -> Outcome<bool> {
        Ok(self.node.get()?.is_same(&*other.node.get()?))
    }

    /// Makes the memory importable by processes that are trusted: see `Export`.
    fn export(&self, py: Python<'_>) -> Outcome<Export> {
        let memory = self.node.get()?;
        let export = py.detach(|| memory.export())?;
        Ok(Export { node: Node::new(export, [self.node.clone()]) })
    }

    /// Exports the memory, trusts these processes and returns the ticket with which they import it.
    ///
    /// A process is a number, or anything that has one as `pid`: a `multiprocessing.Process`, a
    /// `subprocess.Popen`. It must have started.
    #[pyo3(signature = (*process))]
    fn share(&self, py: Python<'_>, process: Vec<Bound<'_, PyAny>>) -> Outcome<Ticket> {
        let memory = self.node.get()?;
        let pids = processes(&process)?;
        let ticket = py.detach(|| {
            let export = memory.export()?;
            export.trust(&pids.trusted(&memory.session())?)?;
            export.ticket()
        })?;
        Ok(Ticket(ticket))
    }

    fn __repr__(&self) -> String {
        let Some(memory) = self.node.try_get() else { return "<PhysicalMemory, closed>".to_owned() };
        let place = match memory.location() {
            Location::Device(id) => format!("{} of device {id}", memory.memory_kind()),
            Location::Host => "of the host".to_owned(),
        };
        let imported = if memory.is_imported() { ", imported" } else { "" };
        format!("<PhysicalMemory {}, {place}{imported}>", Bytes(memory.size()))
    }
} }
