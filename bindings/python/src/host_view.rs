//! `HostView`: memory as the CPU sees it, as a buffer and by single accesses.

use crate::buffer::{Lends, lending_class};
use crate::error::{Fault, Outcome};
use crate::node::{Ends, Node, closable, lock};
use ascend_vmm::Bytes;
use ascend_vmm::{Error, Mapping};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::sync::{Arc, Mutex};

/// An open view: keeps the mapping, and counts the buffers in use.
pub(crate) struct View {
    mapping: Arc<Mapping>,
    address: usize,
    size: usize,
    lent: Mutex<usize>,
}

impl Ends for View {
    const CLASS: &'static str = "HostView";
    const CLOSING: &'static str = "close a view of memory";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        let lent = *lock(&self.lent);
        if lent == 0 {
            return Ok(());
        }
        let users = format!(
            "{lent} buffer(s) of {} at {:#x} are in use: memoryviews, numpy arrays. Release or delete them first.",
            Bytes(self.size as u64),
            self.address
        );
        Err((Error::InUse { operation: Self::CLOSING, users }.into(), Some(self)))
    }
}

/// Memory as the CPU sees it. It has the buffer protocol, so `memoryview(view)` and
/// `numpy.frombuffer(view, dtype=…)` read and write the memory itself, without a copy. While such
/// a buffer is in use, the memory cannot be unmapped.
///
/// >>> with Session() as session:
/// ...     mapping = session.reserve("2MiB").map(session.host().create("2MiB"))
/// ...     with mapping.host_view() as view, memoryview(view) as buffer:
/// ...         buffer[:5] = b"hello"
/// ...     mapping.read(5)
/// b'hello'
///
/// A device or another process may write to the memory at any time. The `load_` and `store_`
/// methods read and write a whole value at once. A child of fork has no access to the memory: there
/// buffers of its parent's views must not be touched.
#[pyclass(frozen, weakref, subclass, module = "ascend_vmm", name = "HostView")]
pub(crate) struct HostView {
    node: Arc<Node<View>>,
}

impl Lends for HostView {
    fn lend(&self) -> PyResult<(*mut u8, usize)> {
        let view = self.node.get()?;
        // Fails in a child of this process.
        view.mapping.host_view().map_err(Fault::from)?;
        *lock(&view.lent) += 1;
        Ok((view.address as *mut u8, view.size))
    }

    fn take_back(&self) {
        if let Some(view) = self.node.try_get() {
            *lock(&view.lent) -= 1;
        }
    }
}

/// The class of views, which has the buffer protocol.
pub(crate) fn class(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = CLASS.get_or_try_init(py, || {
        let class = lending_class::<HostView>(py, c"ascend_vmm.HostView")?;
        class.bind(py).setattr("__doc__", py.get_type::<HostView>().getattr("__doc__")?)?;
        Ok::<_, PyErr>(class)
    })?;
    Ok(class.bind(py))
}

/// The argument of `HostView.__new__`, which only [`of`] can make.
#[pyclass(frozen)]
struct Made(Arc<Node<View>>);

/// A view of a mapping.
pub(crate) fn of<'py>(py: Python<'py>, mapping: &Arc<Node<Mapping>>) -> Outcome<Bound<'py, PyAny>> {
    let object = mapping.get()?;
    let (address, size) = py.detach(|| {
        let view = object.host_view()?;
        Ok::<_, Error>((view.as_ptr().expose_provenance(), view.size()))
    })?;
    let node = Node::new(View { mapping: object, address, size, lent: Mutex::default() }, [mapping.clone()]);
    Ok(class(py)?.call1((Bound::new(py, Made(node))?,))?)
}

closable! { HostView {
    /// Closes the view. Refused while one of its buffers is in use.
    fn close;

    #[new]
    #[pyo3(signature = (*arguments), text_signature = None)]
    fn new(arguments: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<HostView> {
        let made = arguments.get_item(0).ok().filter(|_| arguments.len() == 1);
        match made.as_ref().and_then(|made| made.cast::<Made>().ok()) {
            Some(made) => Ok(HostView { node: made.get().0.clone() }),
            None => Err(PyTypeError::new_err("views are made by Mapping.host_view()")),
        }
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> Outcome<usize> {
        Ok(self.node.get()?.size)
    }

    /// First address.
    #[getter]
    fn address(&self) -> Outcome<usize> {
        Ok(self.node.get()?.address)
    }

    /// Reads one byte.
    fn load_u8(&self, offset: usize) -> Outcome<u8> {
        Ok(self.node.get()?.mapping.host_view()?.load_u8(offset)?)
    }

    /// Writes one byte.
    fn store_u8(&self, offset: usize, value: u8) -> Outcome<()> {
        Ok(self.node.get()?.mapping.host_view()?.store_u8(offset, value)?)
    }

    /// Reads 4 bytes at once, at a multiple of 4, before all later accesses.
    fn load_u32(&self, offset: usize) -> Outcome<u32> {
        Ok(self.node.get()?.mapping.host_view()?.load_u32(offset)?)
    }

    /// Writes 4 bytes at once, at a multiple of 4, after all earlier accesses.
    fn store_u32(&self, offset: usize, value: u32) -> Outcome<()> {
        Ok(self.node.get()?.mapping.host_view()?.store_u32(offset, value)?)
    }

    /// Reads 8 bytes at once, at a multiple of 8, before all later accesses.
    fn load_u64(&self, offset: usize) -> Outcome<u64> {
        Ok(self.node.get()?.mapping.host_view()?.load_u64(offset)?)
    }

    /// Writes 8 bytes at once, at a multiple of 8, after all earlier accesses.
    fn store_u64(&self, offset: usize, value: u64) -> Outcome<()> {
        Ok(self.node.get()?.mapping.host_view()?.store_u64(offset, value)?)
    }

    fn __len__(&self) -> Outcome<usize> {
        self.size()
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(view) => format!("<HostView {} at {:#x}>", Bytes(view.size as u64), view.address),
            None => "<HostView, closed>".to_owned(),
        }
    }
} }
