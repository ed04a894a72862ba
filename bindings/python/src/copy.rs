//! Copies, the same for everything that is mapped: mappings, reservations, blocks of a pool.

use crate::buffer::Buffer;
use crate::error::{Fault, Outcome};
use crate::mapping::Mapping;
use crate::pool::Block;
use crate::reservation::Reservation;
use crate::size::Size;
use ascend_vmm::copy::{self, Rows, Slice};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Mapped memory.
pub(crate) trait Mapped {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// A part of it.
    fn slice(&self, offset: u64, size: u64) -> ascend_vmm::Result<Slice<'_>>;
}

macro_rules! mapped {
    ($($class:ty),*) => {
        $(impl Mapped for $class {
            fn size(&self) -> u64 {
                <$class>::size(self)
            }

            fn slice(&self, offset: u64, size: u64) -> ascend_vmm::Result<Slice<'_>> {
                <$class>::slice(self, offset, size)
            }
        })*
    };
}
mapped!(ascend_vmm::Mapping, ascend_vmm::Reservation, ascend_vmm::pool::Block);

/// Mapped memory of any class.
pub(crate) struct AnyMapped(pub(crate) Arc<dyn Mapped + Send + Sync>);

impl<'py> FromPyObject<'_, 'py> for AnyMapped {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(mapping) = object.cast::<Mapping>() {
            return Ok(AnyMapped(mapping.get().node.get()?));
        }
        if let Ok(reservation) = object.cast::<Reservation>() {
            return Ok(AnyMapped(reservation.get().node.get()?));
        }
        if let Ok(block) = object.cast::<Block>() {
            return Ok(AnyMapped(block.get().node.get()?));
        }
        Err(PyTypeError::new_err("expected mapped memory: a Mapping, a Reservation or a Block"))
    }
}

/// The given size, or everything from the offset on.
pub(crate) fn rest(memory: &(impl Mapped + ?Sized), offset: Size, size: Option<Size>) -> u64 {
    size.map_or_else(|| memory.size().saturating_sub(offset.0), |size| size.0)
}

/// A size as the length of a Python object.
pub(crate) fn length(size: u64) -> Outcome<usize> {
    match isize::try_from(size) {
        Ok(size) => Ok(size as usize),
        Err(_) => Err(Fault::Argument {
            operation: "read memory",
            problem: format!("{size} bytes are too many for one object"),
            rule: "Read a part of the memory.",
        }),
    }
}

/// Copies buffers into mapped memory, with one system call for many copies where that is possible:
/// `(memory, offset, buffer)` each.
///
/// >>> with Session() as session:
/// ...     mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
/// ...     write_batch([(mapping, 0, b"key"), (mapping, "1MiB", b"value")])
/// ...     mapping.read(5, offset="1MiB")
/// b'value'
#[pyfunction]
pub(crate) fn write_batch(py: Python<'_>, copies: Vec<(AnyMapped, Size, Bound<'_, PyAny>)>) -> Outcome<()> {
    let buffers = copies.iter().map(|(_, _, data)| Buffer::readable(data)).collect::<PyResult<Vec<_>>>()?;
    let places: Vec<_> = copies.iter().map(|(memory, offset, _)| (memory.0.clone(), offset.0)).collect();
    let copied = py.detach(|| {
        let parts = places
            .iter()
            .zip(&buffers)
            .map(|((memory, offset), buffer)| Ok((memory.slice(*offset, buffer.len() as u64)?, buffer.bytes())));
        copy::write_batch(&parts.collect::<ascend_vmm::Result<Vec<_>>>()?)
    });
    Ok(copied?)
}

/// Copies mapped memory into buffers: `(memory, offset, buffer)` each. The buffers must not
/// overlap.
///
/// >>> with Session() as session:
/// ...     mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
/// ...     write_batch([(mapping, 0, b"key"), (mapping, "1MiB", b"value")])
/// ...     key, value = bytearray(3), bytearray(5)
/// ...     read_batch([(mapping, 0, key), (mapping, "1MiB", value)])
/// ...     bytes(key), bytes(value)
/// (b'key', b'value')
#[pyfunction]
pub(crate) fn read_batch(py: Python<'_>, copies: Vec<(AnyMapped, Size, Bound<'_, PyAny>)>) -> Outcome<()> {
    let mut buffers = copies.iter().map(|(_, _, data)| Buffer::writable(data)).collect::<PyResult<Vec<_>>>()?;
    check_apart(&buffers)?;
    let places: Vec<_> = copies.iter().map(|(memory, offset, _)| (memory.0.clone(), offset.0)).collect();
    let copied = py.detach(|| {
        let parts = places
            .iter()
            .zip(&mut buffers)
            .map(|((memory, offset), buffer)| Ok((memory.slice(*offset, buffer.len() as u64)?, buffer.bytes_mut())));
        copy::read_batch(&mut parts.collect::<ascend_vmm::Result<Vec<_>>>()?)
    });
    Ok(copied?)
}

/// Refuses buffers that overlap: their contents would depend on the order of the copies.
fn check_apart(buffers: &[Buffer]) -> Outcome<()> {
    let mut places: Vec<_> = buffers.iter().map(|buffer| (buffer.pointer().addr(), buffer.len())).collect();
    places.retain(|(_, length)| *length > 0);
    places.sort_unstable();
    if places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0) {
        return Ok(());
    }
    Err(Fault::Argument {
        operation: "copy memory into buffers",
        problem: "two of the buffers overlap".to_owned(),
        rule: "Give each copy a buffer of its own.",
    })
}

/// The layout of rows in mapped memory and in a buffer.
pub(crate) fn rows(width: Size, height: u64, pitch: Size, buffer_pitch: Option<Size>) -> Rows {
    Rows { width: width.0, height, pitch: pitch.0, buffer_pitch: buffer_pitch.unwrap_or(width).0 }
}

/// Bytes from the first to the last byte of the rows in mapped memory.
pub(crate) fn extent(rows: &Rows) -> Outcome<u64> {
    let before = rows.height.checked_sub(1).map_or(Some(0), |rows_before| rows_before.checked_mul(rows.pitch));
    before.and_then(|before| before.checked_add(if rows.height == 0 { 0 } else { rows.width })).ok_or(Fault::Argument {
        operation: "copy rows",
        problem: "the rows end beyond the last 64-bit address".to_owned(),
        rule: "Use a height and a pitch with which the rows fit into the memory.",
    })
}

/// [`closable`] for a class with mapped memory behind its `node`: adds address, size
/// and copies.
macro_rules! mapped_memory {
    ($class:ident { $(#[$close:meta])* fn close; $($own:tt)* }) => {
        $crate::node::closable! { $class {
            $(#[$close])*
            fn close;

            $($own)*

            /// First address.
            #[getter]
            fn address(&self) -> Outcome<u64> {
                Ok(self.node.get()?.address())
            }

            /// Size in bytes.
            #[getter]
            fn size(&self) -> Outcome<u64> {
                Ok(self.node.get()?.size())
            }

            /// Copies the bytes of any object with a buffer (bytes, memoryview, a numpy array …)
            /// into the memory, without a further copy and without the interpreter's lock.
            #[pyo3(signature = (data, offset=Size(0)), text_signature = "(self, data, offset=0)")]
            fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: Size) -> Outcome<()> {
                let (memory, buffer) = (self.node.get()?, Buffer::readable(data)?);
                Ok(py.detach(|| memory.slice(offset.0, buffer.len() as u64)?.write(buffer.bytes()))?)
            }

            /// Copies memory into new bytes: all of it from the offset on, if no size is given.
            #[pyo3(signature = (size=None, offset=Size(0)), text_signature = "(self, size=None, offset=0)")]
            fn read<'py>(&self, py: Python<'py>, size: Option<Size>, offset: Size) -> Outcome<Bound<'py, PyBytes>> {
                let memory = self.node.get()?;
                let size = rest(&*memory, offset, size);
                // Checked before the bytes are allocated.
                memory.slice(offset.0, size)?;
                new_bytes(py, length(size)?, |to| Ok(memory.slice(offset.0, size)?.read(to)?))
            }

            /// Copies memory into any object with a writable buffer (bytearray, a numpy array …):
            /// as many bytes as it has.
            #[pyo3(signature = (buffer, offset=Size(0)), text_signature = "(self, buffer, offset=0)")]
            fn read_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: Size) -> Outcome<()> {
                let (memory, mut buffer) = (self.node.get()?, Buffer::writable(buffer)?);
                Ok(py.detach(|| memory.slice(offset.0, buffer.len() as u64)?.read(buffer.bytes_mut()))?)
            }

            /// Sets bytes to a value: all from the offset on, if no size is given.
            #[pyo3(
                signature = (value=0, offset=Size(0), size=None),
                text_signature = "(self, value=0, offset=0, size=None)"
            )]
            fn fill(&self, py: Python<'_>, value: u8, offset: Size, size: Option<Size>) -> Outcome<()> {
                let memory = self.node.get()?;
                let size = rest(&*memory, offset, size);
                Ok(py.detach(|| memory.slice(offset.0, size)?.fill(value))?)
            }

            /// Copies other mapped memory into this: on a device, between two, or with the host's.
            /// Without a size, copies as much as fits into both.
            #[pyo3(
                signature = (source, *, offset=Size(0), source_offset=Size(0), size=None),
                text_signature = "(self, source, *, offset=0, source_offset=0, size=None)"
            )]
            fn copy_from(
                &self,
                py: Python<'_>,
                source: AnyMapped,
                offset: Size,
                source_offset: Size,
                size: Option<Size>,
            ) -> Outcome<()> {
                let memory = self.node.get()?;
                let size = rest(&*memory, offset, size).min(rest(&*source.0, source_offset, size));
                Ok(py.detach(|| memory.slice(offset.0, size)?.copy_from(&source.0.slice(source_offset.0, size)?))?)
            }

            /// Begins to copy the bytes of a buffer into the memory.
            #[pyo3(signature = (data, offset=Size(0)), text_signature = "(self, data, offset=0)")]
            fn write_async(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: Size) -> Outcome<PendingCopy> {
                let (memory, buffer) = (self.node.get()?, Buffer::readable(data)?);
                let pending = py.detach(|| {
                    let slice = memory.slice(offset.0, buffer.len() as u64)?;
                    // SAFETY: the copy keeps the buffer until it is over, or leaks it.
                    unsafe { slice.write_async_from(buffer.pointer()) }
                })?;
                Ok(PendingCopy::new(pending, Some(buffer), self.node.clone()))
            }

            /// Begins to copy memory into a writable buffer: as many bytes as it has.
            #[pyo3(signature = (buffer, offset=Size(0)), text_signature = "(self, buffer, offset=0)")]
            fn read_into_async(
                &self,
                py: Python<'_>,
                buffer: &Bound<'_, PyAny>,
                offset: Size,
            ) -> Outcome<PendingCopy> {
                let (memory, buffer) = (self.node.get()?, Buffer::writable(buffer)?);
                let pending = py.detach(|| {
                    let slice = memory.slice(offset.0, buffer.len() as u64)?;
                    // SAFETY: as for `write_async`.
                    unsafe { slice.read_async_into(buffer.pointer()) }
                })?;
                Ok(PendingCopy::new(pending, Some(buffer), self.node.clone()))
            }

            /// Begins to copy other mapped memory into this: see `copy_from`.
            #[pyo3(
                signature = (source, *, offset=Size(0), source_offset=Size(0), size=None),
                text_signature = "(self, source, *, offset=0, source_offset=0, size=None)"
            )]
            fn copy_from_async(
                &self,
                py: Python<'_>,
                source: AnyMapped,
                offset: Size,
                source_offset: Size,
                size: Option<Size>,
            ) -> Outcome<PendingCopy> {
                let memory = self.node.get()?;
                let size = rest(&*memory, offset, size).min(rest(&*source.0, source_offset, size));
                let pending = py.detach(|| {
                    memory.slice(offset.0, size)?.copy_from_async(&source.0.slice(source_offset.0, size)?)
                })?;
                Ok(PendingCopy::new(pending, None, self.node.clone()))
            }

            /// Loads a file into the memory, by chunks: all that the file has from `file_offset`
            /// on, if no size is given. `file` is a path or an open file, whose position is not
            /// used. `progress` is called with the bytes done and their total.
            #[pyo3(
                signature = (file, *, offset=Size(0), file_offset=Size(0), size=None, progress=None),
                text_signature = "(self, file, *, offset=0, file_offset=0, size=None, progress=None)"
            )]
            fn load(
                &self,
                py: Python<'_>,
                file: &Bound<'_, PyAny>,
                offset: Size,
                file_offset: Size,
                size: Option<Size>,
                progress: Option<Py<PyAny>>,
            ) -> Outcome<()> {
                let (memory, file) = (self.node.get()?, open(file, &Purpose::Load)?);
                let size = match size {
                    Some(Size(size)) => size,
                    None => file.metadata().map_err(PyErr::from)?.len().saturating_sub(file_offset.0),
                };
                with_progress(py, progress, |progress| {
                    pool::load(&file, file_offset.0, &memory.slice(offset.0, size)?, progress)
                })
            }

            /// Stores the memory in a file, by chunks: all from the offset on, if no size is given.
            /// `file` is a path or a file that is open for writing. A path is truncated, unless
            /// there is a `file_offset`.
            #[pyo3(
                signature = (file, *, offset=Size(0), file_offset=Size(0), size=None, progress=None),
                text_signature = "(self, file, *, offset=0, file_offset=0, size=None, progress=None)"
            )]
            fn store(
                &self,
                py: Python<'_>,
                file: &Bound<'_, PyAny>,
                offset: Size,
                file_offset: Size,
                size: Option<Size>,
                progress: Option<Py<PyAny>>,
            ) -> Outcome<()> {
                let memory = self.node.get()?;
                let size = rest(&*memory, offset, size);
                // Checked before the file is opened.
                memory.slice(offset.0, size)?;
                let file = open(file, &Purpose::Store { anew: file_offset.0 == 0 })?;
                with_progress(py, progress, |progress| {
                    pool::store(&memory.slice(offset.0, size)?, &file, file_offset.0, progress)
                })
            }

            /// Copies rows of a buffer into the memory: `height` rows of `width` bytes, `pitch`
            /// bytes apart in the memory and `buffer_pitch` (by default `width`) in the buffer.
            #[pyo3(
                signature = (data, *, width, height, pitch, buffer_pitch=None, offset=Size(0)),
                text_signature = "(self, data, *, width, height, pitch, buffer_pitch=None, offset=0)"
            )]
            #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
            fn write_rows(
                &self,
                py: Python<'_>,
                data: &Bound<'_, PyAny>,
                width: Size,
                height: u64,
                pitch: Size,
                buffer_pitch: Option<Size>,
                offset: Size,
            ) -> Outcome<()> {
                let (memory, buffer) = (self.node.get()?, Buffer::readable(data)?);
                let rows = rows(width, height, pitch, buffer_pitch);
                let size = extent(&rows)?;
                Ok(py.detach(|| memory.slice(offset.0, size)?.write_rows(&rows, buffer.bytes()))?)
            }

            /// Copies rows of the memory into a writable buffer: see `write_rows`.
            #[pyo3(
                signature = (buffer, *, width, height, pitch, buffer_pitch=None, offset=Size(0)),
                text_signature = "(self, buffer, *, width, height, pitch, buffer_pitch=None, offset=0)"
            )]
            #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
            fn read_rows_into(
                &self,
                py: Python<'_>,
                buffer: &Bound<'_, PyAny>,
                width: Size,
                height: u64,
                pitch: Size,
                buffer_pitch: Option<Size>,
                offset: Size,
            ) -> Outcome<()> {
                let (memory, mut buffer) = (self.node.get()?, Buffer::writable(buffer)?);
                let rows = rows(width, height, pitch, buffer_pitch);
                let size = extent(&rows)?;
                Ok(py.detach(|| memory.slice(offset.0, size)?.read_rows(&rows, buffer.bytes_mut()))?)
            }
        } }
    };
}
pub(crate) use mapped_memory;
