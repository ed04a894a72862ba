//! Sharing with other processes: `Ticket`, `Export`, `send` and `receive`.

use crate::device::AnyPlace;
use crate::error::{Fault, Outcome};
use crate::file::duplicate;
use crate::memory::PhysicalMemory;
use crate::node::{Ends, Node, closable};
use crate::wait::{interruptible, limit};
use ascend_vmm::Bytes;
use ascend_vmm::share::{self, BareTgid, FabricHandle, HandleKind, Place, ShareableHandle};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple, PyType};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// What another process needs to import memory. Not a secret: the trust list decides which process
/// can use it. It can be pickled, compared, and written as text.
///
/// >>> with Session() as session:
/// ...     ticket = session.device(0).create("2MiB").export().ticket()
/// ...     Ticket(str(ticket)) == ticket
/// True
#[pyclass(frozen, eq, module = "ascend_vmm")]
#[derive(PartialEq)]
pub(crate) struct Ticket(pub(crate) share::Ticket);

#[pymethods]
impl Ticket {
    /// From its text or its bytes.
    #[new]
    fn new(text: &Bound<'_, PyAny>) -> Outcome<Ticket> {
        if let Ok(text) = text.cast::<PyString>() {
            let ticket: share::Ticket = text.to_cow()?.parse().map_err(ascend_vmm::Error::from)?;
            return Ok(Ticket(ticket));
        }
        let bytes = text.cast::<PyBytes>().map_err(|_| PyTypeError::new_err("a ticket is a text or bytes"))?;
        Ok(Ticket(share::Ticket::from_bytes(bytes.as_bytes()).map_err(ascend_vmm::Error::from)?))
    }

    /// Bytes of memory.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size
    }

    /// Size of its pages.
    #[getter]
    fn page(&self) -> u64 {
        self.0.page.size()
    }

    /// Which memory: "HBM", "DDR", "P2P HBM" or "P2P DDR".
    #[getter]
    fn memory_kind(&self) -> String {
        self.0.memory.to_string()
    }

    /// Physical id of the exporting device; None for host memory.
    #[getter]
    fn device(&self) -> Option<u32> {
        self.0.device.map(|device| device.physical)
    }

    /// Driver generation of the exporter.
    #[getter]
    fn generation(&self) -> String {
        self.0.generation.name().to_owned()
    }

    /// The exporter's process id in the initial pid namespace.
    #[getter]
    fn exporter(&self) -> i32 {
        self.0.exporter
    }

    /// The vendor's 64-bit form.
    #[getter]
    fn handle(&self) -> u64 {
        self.0.handle.to_u64()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<Ticket for {} of process {}>", Bytes(self.0.size), self.0.exporter)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        Ok((py.get_type::<Ticket>(), PyTuple::new(py, [PyBytes::new(py, &self.0.to_bytes())])?))
    }
}

impl Ends for share::Export {
    const CLASS: &'static str = "Export";
    const CLOSING: &'static str = "close an export";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        Ok(())
    }
}

/// Memory that other processes can import, once they are trusted. Closing it takes nothing back: an
/// export ends with its memory.
///
/// >>> import os
/// >>> with Session() as session:
/// ...     export = session.device(0).create("2MiB").export()
/// ...     export.trust(os.getppid())
/// ...     export.trusts_anyone, export.ticket().size
/// (False, 2097152)
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Export {
    pub(crate) node: Arc<Node<share::Export>>,
}

closable! { Export {
    /// Drops this object's reference to the memory.
    fn close;

    /// What an importer needs.
    fn ticket(&self, py: Python<'_>) -> Outcome<Ticket> {
        let export = self.node.get()?;
        Ok(Ticket(py.detach(|| export.ticket())?))
    }

    /// The vendor's 64-bit form.
    #[getter]
    fn handle(&self) -> Outcome<u64> {
        Ok(self.node.get()?.handle().to_u64())
    }

    /// The vendor's 128-byte form.
    fn fabric_handle<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyBytes>> {
        let export = self.node.get()?;
        let handle = py.detach(|| export.fabric_handle(HandleKind::Fabric))?;
        Ok(PyBytes::new(py, &handle.to_bytes()))
    }

    /// Lets processes import the memory: numbers, or objects that have one as `pid`. A process must
    /// have started. None can be taken off the list again.
    #[pyo3(signature = (*process))]
    fn trust(&self, py: Python<'_>, process: Vec<Bound<'_, PyAny>>) -> Outcome<()> {
        let (export, pids) = (self.node.get()?, processes(&process)?);
        Ok(py.detach(|| export.trust(&pids.trusted(&export.memory().session())?))?)
    }

    /// Lets processes import the memory, by the `Session.bare_tgid` that they sent.
    #[pyo3(signature = (*tgid))]
    fn trust_tgid(&self, py: Python<'_>, tgid: Vec<i32>) -> Outcome<()> {
        let export = self.node.get()?;
        let trusted = tgid.into_iter().map(BareTgid::from_raw).collect::<Result<Vec<_>, _>>()?;
        Ok(py.detach(|| export.trust(&trusted))?)
    }

    /// Turns the trust list off: **any process on this host can then import the memory**. It cannot
    /// be turned on again.
    fn trust_anyone(&self, py: Python<'_>) -> Outcome<()> {
        let export = self.node.get()?;
        Ok(py.detach(|| export.trust_anyone())?)
    }

    /// Whether the trust list is off.
    #[getter]
    fn trusts_anyone(&self, py: Python<'_>) -> Outcome<bool> {
        let export = self.node.get()?;
        Ok(py.detach(|| export.trusts_anyone())?)
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(export) => format!("<Export {:#x}, {}>", export.handle().to_u64(), Bytes(export.memory().size())),
            None => "<Export, closed>".to_owned(),
        }
    }
} }

/// Process ids in this process's namespace.
pub(crate) struct Pids(Vec<u32>);

/// Reads process ids: numbers, or objects that have one as `pid`.
pub(crate) fn processes(given: &[Bound<'_, PyAny>]) -> Outcome<Pids> {
    let number = |process: &Bound<'_, PyAny>| -> PyResult<u32> {
        let pid = if process.hasattr("pid")? { process.getattr("pid")? } else { process.clone() };
        if pid.is_none() {
            return Err(PyValueError::new_err("the process has not started, so it has no number yet"));
        }
        pid.extract()
    };
    Ok(Pids(given.iter().map(number).collect::<PyResult<_>>()?))
}

impl Pids {
    /// Their ids in trust lists.
    pub(crate) fn trusted(&self, session: &ascend_vmm::Session) -> ascend_vmm::Result<Vec<BareTgid>> {
        self.0.iter().map(|pid| BareTgid::of_process(session, *pid)).collect()
    }
}

/// What can be imported.
pub(crate) enum Source {
    Ticket(share::Ticket),
    Handle(ShareableHandle),
    Fabric(FabricHandle),
}

impl<'py> FromPyObject<'_, 'py> for Source {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let wrong = |problem: String| {
            PyErr::from(Fault::Argument {
                operation: "import memory",
                problem,
                rule: "Give a Ticket, its text or bytes, or a vendor handle: an int or 128 bytes.",
            })
        };
        if let Ok(ticket) = object.cast::<Ticket>() {
            return Ok(Source::Ticket(ticket.get().0));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            if let Ok(bytes) = <&[u8; FabricHandle::LENGTH]>::try_from(bytes.as_bytes()) {
                let handle = FabricHandle::from_bytes(bytes);
                return handle.map(Source::Fabric).ok_or_else(|| wrong("the 128 bytes are not a handle".into()));
            }
        }
        if let Ok(number) = object.extract::<u64>() {
            let handle = ShareableHandle::from_u64(number);
            return handle.map(Source::Handle).ok_or_else(|| wrong(format!("{number:#x} is not a handle")));
        }
        Ok(Source::Ticket(Ticket::new(&object)?.0))
    }
}

impl Source {
    /// Imports it.
    pub(crate) fn import<'a>(&'a self, place: impl Into<Place<'a>>) -> ascend_vmm::Result<ascend_vmm::PhysicalMemory> {
        match self {
            Source::Ticket(ticket) => share::import(place, ticket),
            Source::Handle(handle) => share::import(place, *handle),
            Source::Fabric(handle) => share::import(place, handle),
        }
    }
}

/// A duplicate of a connected Unix socket: of a `socket.socket`, a `multiprocessing` connection,
/// anything with `fileno()`, or a descriptor.
fn socket(given: &Bound<'_, PyAny>) -> Outcome<UnixStream> {
    let socket = UnixStream::from(duplicate(given)?);
    if socket.local_addr().is_ok() {
        return Ok(socket);
    }
    Err(Fault::Argument {
        operation: "share memory over a socket",
        problem: "this is not a Unix socket".to_owned(),
        rule: "Use socket.AF_UNIX or socket.socketpair(): the kernel vouches for the process at the other end.",
    })
}

/// Gives memory to the process at the other end of a connected Unix socket, which calls `receive`.
/// Returns when it has imported the memory, which may then be closed here and lives on there.
///
/// >>> import multiprocessing, socket
/// >>> ours, theirs = socket.socketpair()
/// >>> def child():
/// ...     with Session() as session:
/// ...         memory = receive(theirs, session.device(0))
/// ...         assert session.reserve(memory.size).map(memory).read(5) == b"hello"
/// >>> process = multiprocessing.get_context("fork").Process(target=child)
/// >>> process.start()
/// >>> with Session() as session:
/// ...     memory = session.device(0).create("2MiB")
/// ...     session.reserve(memory.size).map(memory).write(b"hello")
/// ...     send(ours, memory)
/// >>> process.join()
/// >>> process.exitcode
/// 0
#[pyfunction]
#[pyo3(signature = (socket, memory, timeout=60.0))]
pub(crate) fn send(py: Python<'_>, socket: &Bound<'_, PyAny>, memory: &PhysicalMemory, timeout: f64) -> Outcome<()> {
    let (memory, timeout) = (memory.node.get()?, limit(timeout)?);
    exchange(py, socket, |socket| share::send(socket, &memory, timeout))
}

/// Imports on a device, or on the host, what the process at the other end gives by `send`, which
/// has an example.
#[pyfunction]
#[pyo3(signature = (socket, place, timeout=60.0))]
pub(crate) fn receive(
    py: Python<'_>,
    socket: &Bound<'_, PyAny>,
    place: AnyPlace,
    timeout: f64,
) -> Outcome<PhysicalMemory> {
    let timeout = limit(timeout)?;
    let memory = place.with(|place| exchange(py, socket, |socket| share::receive(socket, place, timeout)))??;
    Ok(PhysicalMemory { node: Node::new(memory, [place.node()]) })
}

/// One side of an exchange. A signal whose handler raises ends it, and shuts the socket down: the
/// other side could not know how far it got.
fn exchange<T: Send>(
    py: Python<'_>,
    given: &Bound<'_, PyAny>,
    side: impl FnOnce(&UnixStream) -> ascend_vmm::Result<T> + Send,
) -> Outcome<T> {
    let socket = socket(given)?;
    let cancel = || {
        let _ = socket.shutdown(std::net::Shutdown::Both);
    };
    Ok(interruptible(py, || side(&socket), cancel)??)
}
