//! Errors of the library as exceptions.
//!
//! The classes are written in Python (`ascend_vmm/_errors.py`): several have two bases, which a
//! compiled module cannot define for every supported interpreter. Here an error finds its class and
//! its fields.

use ascend_vmm::error::Reader;
use ascend_vmm::{Error, Failed};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};
use pyo3::{IntoPyObjectExt, intern};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a call failed.
pub(crate) enum Fault {
    /// The library's error.
    Library(Error),
    /// An object of this class is closed.
    Closed(&'static str),
    /// An argument that never reaches the library.
    Argument {
        /// What was tried, as a verb phrase.
        operation: &'static str,
        /// What is wrong.
        problem: String,
        /// What would be right.
        rule: &'static str,
    },
    /// A file that could not be opened.
    File {
        /// What was tried, as a verb phrase.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel answered.
        errno: i32,
    },
    /// What the memory service or the vendor's library said.
    Service(ascend_vmm_engine::Error),
    /// A Python exception.
    Python(PyErr),
    /// The failure of a copy, shared by everyone who waits for it.
    Shared(Arc<Fault>),
}

pub(crate) type Outcome<T> = Result<T, Fault>;

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Library(error)
    }
}

impl From<ascend_vmm_engine::Error> for Fault {
    fn from(error: ascend_vmm_engine::Error) -> Fault {
        Fault::Service(error)
    }
}

impl<T> From<Failed<T>> for Fault {
    fn from(failed: Failed<T>) -> Fault {
        Fault::Library(failed.error)
    }
}

impl From<PyErr> for Fault {
    fn from(error: PyErr) -> Fault {
        Fault::Python(error)
    }
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> PyErr {
        match fault {
            Fault::Python(error) => error,
            fault => Python::attach(|py| raised(py, &fault).unwrap_or_else(|error| error)),
        }
    }
}

/// The Python module with the exceptions.
fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    MODULE.get_or_try_init(py, || Ok(py.import("ascend_vmm._errors")?.unbind())).map(|module| module.bind(py))
}

/// The exception for a fault.
fn raised(py: Python<'_>, fault: &Fault) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let (class, message) = match fault {
        Fault::Library(error) => (library(error, &fields)?, Reader::Python.words(&error.to_string())),
        Fault::Closed(class) => {
            fields.set_item("cause", format!("the {class} is closed"))?;
            fields.set_item("remedy", "Make a new one, or use it before it is closed.")?;
            ("Closed", format!("the {class} is closed"))
        }
        Fault::Argument { operation, problem, rule } => {
            fields.set_item("operation", operation)?;
            fields.set_item("cause", problem)?;
            fields.set_item("remedy", rule)?;
            ("Invalid", format!("cannot {operation}: {problem}. {rule}"))
        }
        Fault::File { operation, path, errno } => {
            let errno = ascend_vmm::error::Errno::from_raw(*errno);
            fields.set_item("operation", operation)?;
            fields.set_item("filename", text(path))?;
            fields.set_item("errno", errno.raw())?;
            fields.set_item("errno_name", format!("{errno:?}"))?;
            ("FileFailed", format!("cannot {operation} ({}): {errno}", path.display()))
        }
        Fault::Service(error) => {
            let (problem, remedy) = error.problem_and_remedy();
            let of = py.import("ascend_vmm.service._errors")?.getattr("of")?;
            return Ok(PyErr::from_value(of.call1((error.kind().name(), error.to_string(), problem, remedy))?));
        }
        Fault::Python(error) => return Ok(error.clone_ref(py)),
        Fault::Shared(fault) => return raised(py, fault),
    };
    let exception = classes(py)?.getattr(class)?.call1((message,))?;
    for (name, value) in fields {
        exception.setattr(name.cast()?, value)?;
    }
    Ok(PyErr::from_value(exception))
}

/// Fills in the fields of a library error and returns the name of its class.
fn library(error: &Error, fields: &Bound<'_, PyDict>) -> PyResult<&'static str> {
    let py = fields.py();
    if let Some(errno) = error.errno() {
        fields.set_item(intern!(py, "errno"), errno.raw())?;
        fields.set_item("errno_name", format!("{errno:?}"))?;
    }
    if let Some(code) = error.vendor_code() {
        let code = classes(py)?.getattr("VendorCode")?.call1((code.driver, code.driver_name, code.acl))?;
        fields.set_item("vendor_code", code)?;
    }
    if let Some(log) = error.kernel_log().filter(|log| !log.is_empty()) {
        fields.set_item("kernel_log", log)?;
    }
    fields.set_item("is_device_lost", error.is_device_lost())?;
    fields.set_item("is_not_trusted", error.is_not_trusted())?;
    let explain = |operation: &str, cause: &str, remedy: &str| -> PyResult<()> {
        for (name, value) in [("operation", operation), ("cause", cause), ("remedy", remedy)] {
            if !value.is_empty() {
                fields.set_item(name, Reader::Python.words(value))?;
            }
        }
        Ok(())
    };
    Ok(match error {
        Error::Open(failed) => {
            explain("open the driver", "", "")?;
            fields.set_item("filename", text(&failed.path))?;
            "OpenFailed"
        }
        Error::Refused(refused) => {
            explain(refused.operation, refused.cause, refused.remedy)?;
            fields.set_item("command", refused.command)?;
            fields.set_item("object", &refused.object)?;
            fields.set_item("arguments", &refused.arguments)?;
            "Refused"
        }
        Error::OutOfMemory(out) => {
            explain("create physical memory", "the memory is used up", "")?;
            fields.set_item("place", &out.place)?;
            fields.set_item("asked", out.asked)?;
            fields.set_item("page", out.page.size())?;
            fields.set_item("free_huge", out.free_huge)?;
            fields.set_item("free_giant", out.free_giant)?;
            fields.set_item("page_that_fits", out.page_that_fits().map(|page| page.size()))?;
            "OutOfMemory"
        }
        Error::Invalid(invalid) => {
            explain(invalid.operation, &invalid.problem, invalid.rule)?;
            "Invalid"
        }
        Error::SessionTaken(taken) => {
            explain("open a session", "other code in this process has the session", "")?;
            fields.set_item("vendor_library", &taken.vendor_library)?;
            fields.set_item("other_copy", &taken.other_copy)?;
            "SessionTaken"
        }
        Error::SessionOpen => {
            explain("open a session", "this process has one", "Use Session.current().")?;
            "SessionOpen"
        }
        Error::OtherProcess { process } => {
            explain("", "the parent of this process opened the session", "Open a session in the child.")?;
            fields.set_item("process", process)?;
            "OtherProcess"
        }
        Error::InUse { operation, users } => {
            explain(operation, users, "")?;
            "InUse"
        }
        Error::Ticket(ticket) => {
            explain("read the ticket", &ticket.to_string(), ticket.remedy())?;
            "TicketError"
        }
        Error::Exchange(exchange) => {
            explain(exchange.operation, &exchange.problem, exchange.remedy)?;
            "ExchangeFailed"
        }
        Error::File(failed) => {
            explain(failed.operation, &failed.problem, failed.remedy)?;
            fields.set_item("filename", text(&failed.path))?;
            "FileFailed"
        }
        Error::UnknownGeneration { detected } => {
            explain("open a session", detected, "")?;
            "UnknownGeneration"
        }
        Error::NoDevices(finding) => {
            explain("list the NPUs", &finding.to_string(), finding.remedy())?;
            fields.set_item("finding", finding.code())?;
            "NoDevices"
        }
        Error::DeviceProcess { device, failure } => {
            explain("start a process on the device", &failure.to_string(), failure.remedy())?;
            fields.set_item("device", device.0)?;
            "DeviceProcessFailed"
        }
        Error::DeviceProcessDied { device, operation, .. } => {
            explain(operation, "the process on the device has died", "Close the device and open it again.")?;
            fields.set_item("device", device.0)?;
            "DeviceProcessDied"
        }
        _ => "Error",
    })
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// An instance of a data class of `ascend_vmm/_discovery.py`.
pub(crate) fn data<'py>(py: Python<'py>, class: &str, fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || Ok::<_, PyErr>(py.import("ascend_vmm._discovery")?.unbind()))?;
    module.bind(py).getattr(class)?.call((), Some(fields))
}

/// Fields of a data class: `fields! { py; name: value, … }`.
macro_rules! fields {
    ($py:expr; $($name:ident: $value:expr),* $(,)?) => {{
        let fields = pyo3::types::PyDict::new($py);
        $(fields.set_item(stringify!($name), $value)?;)*
        fields
    }};
}
pub(crate) use fields;

/// The value as a Python object, or `None`.
pub(crate) fn optional<'py, T: IntoPyObject<'py>>(py: Python<'py>, value: Option<T>) -> PyResult<Bound<'py, PyAny>> {
    value.into_bound_py_any(py)
}
