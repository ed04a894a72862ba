//! The compiled half of the Python package `ascend_vmm`: the library's nouns as classes, errors as
//! exceptions, the emulated driver, the tool's commands, and the engines' side of the memory
//! service.
//!
//! One file for each noun. Every call that may reach the kernel is made without the interpreter's
//! lock, and holds a reference of its own to what it uses (`node.rs`). Buffers of other objects are
//! held while they are used (`buffer.rs`). A panic becomes a Python exception, by PyO3.

mod acl;
mod buffer;
mod copy;
mod device;
mod discovery;
mod emulator;
mod error;
mod file;
mod host_view;
mod mapping;
mod memory;
mod node;
mod pending;
mod pool;
mod reservation;
mod service;
mod session;
mod share;
mod size;
mod tool;
mod wait;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use std::sync::OnceLock;

/// Refuses every interpreter of the process but the first that imports the package: classes and
/// objects of one cannot be used in another. Older interpreters hand a module that one has loaded
/// to the next without asking it, so the package calls this.
#[pyfunction]
fn check_interpreter(_py: Python<'_>) -> PyResult<()> {
    static FIRST: OnceLock<i64> = OnceLock::new();
    // SAFETY: with the interpreter's lock there is a current interpreter, and it has a number.
    let number = unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) };
    if *FIRST.get_or_init(|| number) == number {
        return Ok(());
    }
    Err(PyImportError::new_err("ascend_vmm can be used in one interpreter of a process, and another has it"))
}

/// The compiled module.
#[pymodule]
fn _ascend_vmm(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    buffer::check(py)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<session::Session>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<device::Host>()?;
    module.add_class::<memory::PhysicalMemory>()?;
    module.add_class::<reservation::Reservation>()?;
    module.add_class::<mapping::Mapping>()?;
    module.add("HostView", host_view::class(py)?)?;
    module.add_class::<pending::PendingCopy>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<pool::Block>()?;
    module.add_class::<share::Export>()?;
    module.add_class::<share::Ticket>()?;
    module.add_class::<emulator::Emulator>()?;
    module.add_class::<service::ServiceOpening>()?;
    module.add_class::<service::ServedDomain>()?;
    module.add_function(wrap_pyfunction!(service::service_wait, module)?)?;
    module.add_function(wrap_pyfunction!(service::pool_enter, module)?)?;
    module.add_function(wrap_pyfunction!(service::pool_leave, module)?)?;
    module.add_function(wrap_pyfunction!(acl::acl_functions, module)?)?;
    module.add_function(wrap_pyfunction!(acl::acl_call, module)?)?;
    module.add_function(wrap_pyfunction!(check_interpreter, module)?)?;
    module.add_function(wrap_pyfunction!(discovery::probe, module)?)?;
    module.add_function(wrap_pyfunction!(discovery::devices, module)?)?;
    module.add_function(wrap_pyfunction!(copy::write_batch, module)?)?;
    module.add_function(wrap_pyfunction!(copy::read_batch, module)?)?;
    module.add_function(wrap_pyfunction!(share::send, module)?)?;
    module.add_function(wrap_pyfunction!(share::receive, module)?)?;
    module.add_function(wrap_pyfunction!(tool::tool, module)?)?;
    Ok(())
}
