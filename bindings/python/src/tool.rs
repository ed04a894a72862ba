//! The tool's commands: `python -m ascend_vmm probe` and the others.

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs one of the tool's commands and returns its exit status. `program` is how this program is
/// started again, for commands that need a second process of it.
#[pyfunction]
pub(crate) fn tool(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| ascend_vmm_tool::run_tool("python -m ascend_vmm", program, arguments))
}
