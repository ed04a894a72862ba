//! `Reservation`: addresses without memory.

use crate::buffer::{Buffer, new_bytes};
use crate::copy::{AnyMapped, extent, length, mapped_memory, rest, rows};
use crate::error::{Fault, Outcome};
use crate::file::{Purpose, open, with_progress};
use crate::mapping::Mapping;
use crate::memory::PhysicalMemory;
use crate::node::{Ends, Node};
use crate::pending::PendingCopy;
use crate::size::Size;
use ascend_vmm::Bytes;
use ascend_vmm::pool;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;

impl Ends for ascend_vmm::Reservation {
    const CLASS: &'static str = "Reservation";
    const CLOSING: &'static str = "free reserved addresses";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        self.free().map_err(|failed| (failed.error.into(), Some(failed.object)))
    }
}

/// Reserved addresses. Closing it unmaps what is mapped there and frees them.
///
/// Its copies may go over several mappings that lie side by side.
///
/// >>> with Session() as session, session.reserve("4MiB") as reservation:
/// ...     device = session.device(0)
/// ...     first = reservation.map(device.create("2MiB"))
/// ...     second = reservation.map(device.create("2MiB"), offset="2MiB")
/// ...     reservation.write(b"over the border", offset=(2 << 20) - 8)
/// ...     bytes(second.read(7))
/// b' border'
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Reservation {
    pub(crate) node: Arc<Node<ascend_vmm::Reservation>>,
}

mapped_memory! { Reservation {
    /// Unmaps what is mapped here, and frees the addresses.
    fn close;

    /// Maps all of `memory` at an offset, a multiple of its page size.
    #[pyo3(signature = (memory, offset=Size(0)), text_signature = "(self, memory, offset=0)")]
    fn map(&self, py: Python<'_>, memory: &PhysicalMemory, offset: Size) -> Outcome<Mapping> {
        let (reservation, physical) = (self.node.get()?, memory.node.get()?);
        let mapping = py.detach(|| reservation.map(offset.0, &physical))?;
        let node = Node::new(mapping, [self.node.clone(), memory.node.clone()]);
        Ok(Mapping { node, memory: Arc::downgrade(&memory.node) })
    }

    /// Address and size of everything that is mapped here, in order.
    fn mappings(&self) -> Outcome<Vec<(u64, u64)>> {
        Ok(self.node.get()?.mappings())
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(reserved) => format!("<Reservation {} at {:#x}>", Bytes(reserved.size()), reserved.address()),
            None => "<Reservation, closed>".to_owned(),
        }
    }
} }
