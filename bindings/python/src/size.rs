//! Sizes, offsets and addresses from Python: an int, or a text such as `"64MiB"`.

use crate::error::Fault;
use ascend_vmm::{Bytes, Kind, MemoryKind, Page};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

/// A number of bytes, or an address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Size {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            let parsed = text.to_cow()?.parse::<Bytes>();
            return parsed
                .map(|Bytes(size)| Size(size))
                .map_err(|error| bad(error.to_string(), "Write a size as 4096, \"64MiB\" or \"1GiB\"."));
        }
        // In Python True is 1, but never meant as a number of bytes.
        let number = if object.is_instance_of::<PyBool>() { Err(PyTypeError::new_err(())) } else { object.extract() };
        number.map(Size).map_err(|error: PyErr| {
            let py = object.py();
            if error.is_instance_of::<PyOverflowError>(py) {
                let problem = format!("{} is not between 0 and 2^64", shown(&object));
                return bad(problem, "Sizes, offsets and addresses are unsigned 64-bit numbers.");
            }
            if !error.is_instance_of::<PyTypeError>(py) {
                // Raised by its `__index__`.
                return error;
            }
            let class = object.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
            PyTypeError::new_err(format!("a size is an int or a text such as \"64MiB\", not {class}"))
        })
    }
}

/// A number, unless it is long.
fn shown(object: &Borrowed<'_, '_, PyAny>) -> String {
    let text = object.str().map_or_else(|_| "the number".to_owned(), |text| text.to_string());
    if text.len() > 40 { "the number".to_owned() } else { text }
}

fn bad(problem: String, rule: &'static str) -> PyErr {
    Fault::Argument { operation: "read a size", problem, rule }.into()
}

/// Size of pages and kind of memory from their names.
pub(crate) fn kind(page: Option<Size>, memory: Option<&str>) -> Result<Kind, Fault> {
    let page = match page {
        None => Page::Huge,
        Some(Size(size)) if size == Page::Huge.size() => Page::Huge,
        Some(Size(size)) if size == Page::Giant.size() => Page::Giant,
        Some(Size(size)) => {
            return Err(Fault::Argument {
                operation: "create physical memory",
                problem: format!("there are no pages of {size} bytes"),
                rule: "Pages are of \"2MiB\" or \"1GiB\".",
            });
        }
    };
    Ok(Kind { page, memory: memory_kind(memory)? })
}

/// A kind of memory by its name.
pub(crate) fn memory_kind(name: Option<&str>) -> Result<MemoryKind, Fault> {
    let Some(name) = name else { return Ok(MemoryKind::default()) };
    name.parse().map_err(|_| Fault::Argument {
        operation: "choose a kind of memory",
        problem: format!("there is no memory {name:?}"),
        rule: "It is \"HBM\", \"DDR\", \"P2P HBM\" or \"P2P DDR\".",
    })
}
