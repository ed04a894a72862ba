//! `Session`: this process's one session.

use crate::device::{Device, Host};
use crate::error::{Fault, Outcome, data, fields};
use crate::memory::PhysicalMemory;
use crate::node::{Ends, Node, closable, lock};
use crate::reservation::Reservation;
use crate::size::Size;
use crate::wait::{handler_raised, interruptible_call};
use ascend_vmm::device_process::{Policy, Settings};
use ascend_vmm::share::BareTgid;
use ascend_vmm::{LogicalId, ReserveOptions};
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::sync::{Arc, Mutex, Weak};

impl Ends for ascend_vmm::Session {
    const CLASS: &'static str = "Session";
    const CLOSING: &'static str = "close the session";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        self.close().map_err(|failed| (failed.error.into(), failed.object))
    }
}

/// This process's session with the memory driver. A process has at most one.
///
/// Closing it closes everything that was made through it.
///
/// >>> with Session() as session:
/// ...     print(session.generation)
/// 26.1
///
/// `segments=False` does not map the driver's 8 to 14 TiB of addresses: the CPU then sees no
/// memory. `device_process` says when a process is started on a device: "auto", "never" or
/// "always".
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Session {
    node: Arc<Node<ascend_vmm::Session>>,
}

/// The session of the Python objects, and the process that it belongs to.
static CURRENT: Mutex<(u32, Weak<Node<ascend_vmm::Session>>)> = Mutex::new((0, Weak::new()));

impl Session {
    fn new(session: ascend_vmm::Session) -> Session {
        let node = Node::new(session, []);
        *lock(&CURRENT) = (std::process::id(), Arc::downgrade(&node));
        Session { node }
    }

    /// The session behind an object that belongs to it.
    pub(crate) fn of(session: ascend_vmm::Session) -> Session {
        Session::open_now().unwrap_or_else(|| Session::new(session))
    }

    /// The session that is already open in this process.
    fn open_now() -> Option<Session> {
        let (process, node) = &*lock(&CURRENT);
        let node = node.upgrade().filter(|node| *process == std::process::id() && node.try_get().is_some());
        node.map(|node| Session { node })
    }
}

closable! { Session {
    /// Closes everything that was made through the session, then the session. Nothing happens if it
    /// is closed.
    fn close;

    #[new]
    #[pyo3(signature = (*, segments=true, allow_unknown_generation=false, device_process="auto"))]
    fn open(py: Python<'_>, segments: bool, allow_unknown_generation: bool, device_process: &str) -> Outcome<Session> {
        let policy = match device_process {
            "auto" => Policy::Auto,
            "never" => Policy::Never,
            "always" => Policy::Always,
            other => {
                return Err(Fault::Argument {
                    operation: "open a session",
                    problem: format!("device_process cannot be {other:?}"),
                    rule: "It is \"auto\", \"never\" or \"always\".",
                });
            }
        };
        let builder = ascend_vmm::Session::builder()
            .segments(segments)
            .allow_unknown_generation(allow_unknown_generation)
            .device_process(Settings::default().policy(policy).give_up(handler_raised));
        Ok(Session::new(py.detach(|| builder.open())?))
    }

    /// This process's session, opened now if there is none.
    #[classmethod]
    fn current(_class: &Bound<'_, PyType>, py: Python<'_>) -> Outcome<Session> {
        match Session::open_now() {
            Some(session) => Ok(session),
            None => {
                let settings = Settings::default().give_up(handler_raised);
                let session = py.detach(|| {
                    match ascend_vmm::Session::builder().device_process(settings).open() {
                        // Opened by the C library, or by another thread.
                        Err(ascend_vmm::Error::SessionOpen) => ascend_vmm::Session::current(),
                        session => session,
                    }
                })?;
                Ok(Session::open_now().unwrap_or_else(|| Session::new(session)))
            }
        }
    }

    /// The device with this number, set up for this process.
    ///
    /// >>> with Session() as session:
    /// ...     session.device(0)
    /// <Device 0>
    #[pyo3(signature = (id=0))]
    fn device(&self, py: Python<'_>, id: u32) -> Outcome<Device> {
        let session = self.node.get()?;
        let device = interruptible_call(py, || session.device(LogicalId(id)))?;
        Ok(Device { node: Node::new(device, [self.node.clone()]) })
    }

    /// The host, as a place for memory.
    fn host(&self) -> Outcome<Host> {
        let host = self.node.get()?.host()?;
        Ok(Host { node: Node::new(host, [self.node.clone()]) })
    }

    /// Reserves addresses: a multiple of 2 MiB, at most 128 GiB. They cost no memory.
    ///
    /// >>> with Session() as session, session.reserve("1GiB", alignment="1GiB") as reservation:
    /// ...     reservation.address % (1 << 30)
    /// 0
    #[pyo3(signature = (size, *, address=None, alignment=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        size: Size,
        address: Option<Size>,
        alignment: Option<Size>,
    ) -> Outcome<Reservation> {
        let session = self.node.get()?;
        let mut options = ReserveOptions::default();
        if let Some(Size(address)) = address {
            options = options.address(address);
        }
        if let Some(Size(alignment)) = alignment {
            options = options.alignment(alignment);
        }
        let reservation = py.detach(|| session.reserve_with(size.0, &options))?;
        Ok(Reservation { node: Node::new(reservation, [self.node.clone()]) })
    }

    /// The memory that is mapped at an address, or None.
    fn memory_at(&self, address: Size) -> Outcome<Option<PhysicalMemory>> {
        let memory = self.node.get()?.memory_at(address.0);
        Ok(memory.map(|memory| PhysicalMemory { node: Node::new(memory, [self.node.clone()]) }))
    }

    /// The start and size of the mapping that contains an address, or None.
    fn mapping_at(&self, address: Size) -> Outcome<Option<(u64, u64)>> {
        Ok(self.node.get()?.mapping_at(address.0))
    }

    /// The driver's generation, such as "26.1".
    #[getter]
    fn generation(&self) -> Outcome<String> {
        Ok(self.node.get()?.generation().name().to_owned())
    }

    /// Page size of the host, as the driver sees it.
    #[getter]
    fn host_page_size(&self) -> Outcome<u64> {
        Ok(self.node.get()?.host_page_size())
    }

    /// Whether the address segments are mapped, which CPU access needs.
    #[getter]
    fn has_segments(&self) -> Outcome<bool> {
        Ok(self.node.get()?.has_segments())
    }

    /// This process's number in trust lists: send it to an exporter in another pid namespace.
    #[getter]
    fn bare_tgid(&self, py: Python<'_>) -> Outcome<i32> {
        let session = self.node.get()?;
        Ok(py.detach(|| BareTgid::of_this_process(&session))?.as_raw())
    }

    /// Driver resources held by this process, in bytes unless noted.
    #[getter]
    fn statistics<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        let now = self.node.get()?.statistics();
        let fields = fields! { py;
            physical: now.physical,
            reserved: now.reserved,
            mapped: now.mapped,
            mappings: now.mappings,
            left: now.left,
        };
        Ok(data(py, "SessionStatistics", &fields)?)
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(session) => format!("<Session, driver {}>", session.generation()),
            None => "<Session, closed>".to_owned(),
        }
    }
} }
