//! The memory service, for processes that run the vendor's stack: `ascend_vmm.service`.
//!
//! Nothing here opens the driver. Calls that wait end when a signal's handler raises, and when they
//! are cancelled from another thread.

use crate::error::Outcome;
use crate::size::Size;
use crate::wait::{handler_raised, interruptible_call, limit};
use ascend_vmm_engine::{Client, Domain, DomainName, Error, Mode, OpenOptions, Opening, Pool};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

fn domain_name(text: &str) -> PyResult<DomainName> {
    text.parse().map_err(|error| PyValueError::new_err(format!("{error}")))
}

fn mode(text: &str) -> PyResult<Mode> {
    let modes = [Mode::Read, Mode::Write, Mode::WriteOrRead, Mode::Discard, Mode::Update];
    modes.into_iter().find(|mode| mode.name() == text).ok_or_else(|| {
        let names = modes.map(Mode::name).join(", ");
        PyValueError::new_err(format!("{text:?} is no mode; they are {names}"))
    })
}

/// Says what is waited for in Python's log.
fn say(reason: &str) {
    Python::try_attach(|py| {
        let logged = py
            .import("ascend_vmm.service")
            .and_then(|module| module.getattr("_logger")?.call_method1("info", (reason,)));
        if let Err(error) = logged {
            error.write_unraisable(py, None);
        }
    });
}

fn options(timeout: f64, cancelled: &Arc<AtomicBool>) -> Outcome<OpenOptions> {
    let cancelled = Arc::clone(cancelled);
    let options = OpenOptions::new().wait(limit(timeout)?).progress(|waiting| say(&waiting.reason));
    Ok(options.give_up(move || cancelled.load(Ordering::SeqCst) || handler_raised()))
}

/// A domain that is about to be opened: `wait` may run in any thread.
#[pyclass(module = "ascend_vmm._ascend_vmm", frozen)]
pub(crate) struct ServiceOpening {
    opening: Opening,
    role: Mutex<Option<ascend_vmm_engine::Role>>,
    cancelled: Arc<AtomicBool>,
}

#[pymethods]
impl ServiceOpening {
    #[new]
    #[pyo3(signature = (socket, domain, mode, timeout, allow_update, program))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        domain: &str,
        mode: &str,
        timeout: f64,
        allow_update: bool,
        program: Option<String>,
    ) -> Outcome<ServiceOpening> {
        let (domain, mode) = (domain_name(domain)?, self::mode(mode)?);
        let cancelled = Arc::new(AtomicBool::new(false));
        let mut options = options(timeout, &cancelled)?.allow_update(allow_update);
        if let Some(program) = program {
            options = options.program(program);
        }
        let opening = py.detach(|| Client::new(socket).opening(&domain, mode, &options))?;
        Ok(ServiceOpening { opening, role: Mutex::new(None), cancelled })
    }

    fn wait(&self, py: Python<'_>) -> Outcome<()> {
        let role = interruptible_call(py, || self.opening.wait())?;
        *self.role.lock().unwrap_or_else(PoisonError::into_inner) = Some(role);
        Ok(())
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    fn map(&self, py: Python<'_>, capacity: Size) -> Outcome<ServedDomain> {
        let role = self.role.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(role) = role else {
            return Err(PyValueError::new_err("wait for the role first").into());
        };
        let domain = interruptible_call(py, || self.opening.map(role, capacity.0))?;
        Ok(ServedDomain { domain: Mutex::new(Some(domain)) })
    }
}

/// Key, address, size and value.
type FoundEntry<'py> = (String, u64, u64, Bound<'py, PyBytes>);

/// A domain that is open.
#[pyclass(module = "ascend_vmm._ascend_vmm", frozen)]
pub(crate) struct ServedDomain {
    /// `None` when it is closed.
    domain: Mutex<Option<Domain>>,
}

impl ServedDomain {
    fn lock(&self) -> MutexGuard<'_, Option<Domain>> {
        self.domain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the domain.
    fn look<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Domain) -> T + Send) -> Outcome<T> {
        py.detach(|| self.lock().as_ref().map(look)).ok_or_else(closed)
    }

    /// Calls a function of the domain, until a signal's handler raises.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Domain) -> ascend_vmm_engine::Result<T> + Send,
    ) -> Outcome<T> {
        interruptible_call(py, || self.lock().as_mut().map(work).transpose())?.ok_or_else(closed)
    }
}

fn closed() -> crate::error::Fault {
    crate::error::Fault::Closed("Domain")
}

#[pymethods]
impl ServedDomain {
    /// What it is by now.
    fn facts<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        let facts = PyDict::new(py);
        let (flags, numbers) = self.look(py, |it| {
            let numbers =
                [it.version(), it.device() as u64, it.address(), it.bytes(), it.capacity(), it.allocations() as u64];
            ([it.writes(), it.is_awake()], numbers)
        })?;
        for (name, flag) in ["writes", "awake"].iter().zip(flags) {
            facts.set_item(name, flag)?;
        }
        for (name, number) in ["version", "device", "address", "bytes", "capacity", "allocations"].iter().zip(numbers) {
            facts.set_item(name, number)?;
        }
        Ok(facts)
    }

    /// (key, address, size, value) of each entry, sorted by key.
    fn entries<'py>(&self, py: Python<'py>) -> Outcome<Vec<FoundEntry<'py>>> {
        let all = self.look(py, |it| {
            let entry = |(key, entry): (&String, &ascend_vmm_engine::Entry)| {
                (key.clone(), it.address_of(entry).unwrap_or(0), entry.size, entry.value.clone())
            };
            it.entries().iter().map(entry).collect::<Vec<_>>()
        })?;
        let bytes = |(key, address, size, value): (_, _, _, Vec<u8>)| (key, address, size, PyBytes::new(py, &value));
        Ok(all.into_iter().map(bytes).collect())
    }

    fn allocate(&self, py: Python<'_>, size: Size, tag: &str, timeout: f64) -> Outcome<u64> {
        let wait = limit(timeout)?;
        self.call(py, |it| it.allocate(size.0, tag, wait))
    }

    fn put(&self, py: Python<'_>, key: &str, size: Size, value: &[u8], timeout: f64) -> Outcome<u64> {
        let wait = limit(timeout)?;
        self.call(py, |it| it.put(key, size.0, value, wait))
    }

    fn place(&self, py: Python<'_>, key: &str, address: u64, size: Size, value: &[u8]) -> Outcome<()> {
        self.call(py, |it| it.place(key, address, size.0, value))
    }

    fn trim(&self, py: Python<'_>, used: u64) -> Outcome<u64> {
        self.call(py, |it| it.trim(used))
    }

    fn commit(&self, py: Python<'_>) -> Outcome<()> {
        self.call(py, Domain::commit)
    }

    fn sleep(&self, py: Python<'_>) -> Outcome<()> {
        self.call(py, Domain::sleep)
    }

    fn wake(&self, py: Python<'_>, timeout: f64) -> Outcome<()> {
        let wait = limit(timeout)?;
        self.call(py, |it| it.wake(wait))
    }

    fn close(&self, py: Python<'_>) -> Outcome<()> {
        interruptible_call(py, || {
            let mut domain = self.lock();
            domain.as_mut().map_or(Ok(()), Domain::close)?;
            // Says goodbye to the service.
            drop(domain.take());
            Ok::<_, Error>(())
        })
    }
}

/// Waits until a domain has a version that is newer than this one.
#[pyfunction]
pub(crate) fn service_wait(
    py: Python<'_>,
    socket: PathBuf,
    domain: &str,
    newer_than: u64,
    timeout: f64,
) -> Outcome<u64> {
    let domain = domain_name(domain)?;
    let options = options(timeout, &Arc::default())?;
    interruptible_call(py, || Client::new(socket).wait(&domain, newer_than, &options))
}

/// From now on the allocator's functions of this module hand out this memory.
#[pyfunction]
pub(crate) fn pool_enter(address: u64, size: Size, device: i32) -> Outcome<()> {
    Ok(Pool::new(address, size.0, device).enter()?)
}

/// Ends that: how many bytes were handed out, and what was refused.
#[pyfunction]
pub(crate) fn pool_leave() -> Option<(u64, Option<String>)> {
    Pool::leave().map(|pool| (pool.used, pool.refused))
}
