//! Python's buffer protocol, both ways: buffers of other objects, and memory of ours as one.
//!
//! The protocol is in the stable interface from Python 3.11 on, and one wheel serves 3.9 and later,
//! so PyO3 does not offer it here. Its functions are exported by every interpreter, and the struct
//! has not changed since 3.3: 3.9 and 3.10 will not change any more, and later ones promise not to.
//! [`check`] still compares it with the running interpreter.

use pyo3::PyClass;
use pyo3::exceptions::PyImportError;
use pyo3::ffi::{self, Py_ssize_t, PyObject};
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyBytes, PyTuple};
use std::ffi::{c_char, c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

/// Python's `Py_buffer`.
#[repr(C)]
pub(crate) struct PyBuffer {
    buf: *mut c_void,
    obj: ManuallyDrop<Option<Py<PyAny>>>,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
    fn PyBuffer_FillInfo(
        view: *mut PyBuffer,
        object: *mut PyObject,
        buf: *mut c_void,
        len: Py_ssize_t,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// One run of bytes.
const SIMPLE: c_int = 0;
/// The same, for writing.
const WRITABLE: c_int = 1;

/// The bytes of a Python object, held: while this lives, the object can neither free nor move them.
pub(crate) struct Buffer {
    // In a box: the interpreter may keep pointers into the struct.
    view: Box<PyBuffer>,
}

// SAFETY: the struct's pointers are used for its bytes, which stay where they are, and by Python's
// function that releases it, which is called with the interpreter's lock.
unsafe impl Send for Buffer {}
// SAFETY: as above. A shared reference reads the fields only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Bytes to be read.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        Buffer::of(object, SIMPLE)
    }

    /// Bytes to be written.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        Buffer::of(object, WRITABLE)
    }

    fn of(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Buffer> {
        let mut view = Box::new(MaybeUninit::<PyBuffer>::uninit());
        // SAFETY: the object is alive, the struct is Python's, and we have the interpreter's lock.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call succeeded, so it filled the struct in.
        Ok(Buffer { view: unsafe { view.assume_init() } })
    }

    /// Its length.
    pub(crate) fn len(&self) -> usize {
        self.view.len as usize
    }

    /// Its first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.view.buf.cast()
    }

    /// The object that keeps the bytes, for the interpreter's search for garbage.
    pub(crate) fn owner(&self) -> Option<&Py<PyAny>> {
        self.view.obj.as_ref()
    }

    /// The bytes.
    ///
    /// Other threads of the program may write to them while they are read without the interpreter's
    /// lock, as with every extension that gives it up. The library only hands their address to the
    /// kernel or copies them, so such a program gets the old or the new bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.view.len == 0 {
            return &[];
        }
        // SAFETY: the object keeps so many bytes there as long as the view is held.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len()) }
    }

    /// The bytes, of a buffer for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.view.len == 0 || self.view.readonly != 0 {
            return &mut [];
        }
        // SAFETY: as above, and the object allows to write to them.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Without an interpreter there is no object either.
        Python::try_attach(|_| {
            // SAFETY: filled in by Python, released once, with the interpreter's lock.
            unsafe { PyBuffer_Release(&mut *self.view) };
        });
    }
}

/// Refuses an interpreter with another struct.
pub(crate) fn check(py: Python<'_>) -> PyResult<()> {
    let object = PyBytes::new(py, b"buffer");
    let Buffer { view } = &Buffer::readable(&object)?;
    let alike = view.buf.cast_const().cast() == object.as_bytes().as_ptr()
        && view.obj.as_ref().is_some_and(|owner| owner.is(&object))
        && (view.len, view.itemsize, view.readonly, view.ndim) == (6, 1, 1, 1)
        && view.suboffsets.is_null();
    if alike { Ok(()) } else { Err(PyImportError::new_err("ascend_vmm does not know the buffers of this interpreter")) }
}

/// New Python bytes, which `fill` fills without the interpreter's lock.
pub(crate) fn new_bytes<'py, E>(
    py: Python<'py>,
    length: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E> + Send,
) -> Result<Bound<'py, PyBytes>, E>
where
    E: From<PyErr> + Send,
{
    let Ok(size) = Py_ssize_t::try_from(length) else {
        return Err(pyo3::exceptions::PyMemoryError::new_err("too many bytes for one object").into());
    };
    // SAFETY: with no source Python returns a new object, or sets an exception.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
    // SAFETY: a new reference or null.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?;
    // SAFETY: a bytes object. It has so many bytes, and one more, which is 0.
    let place = unsafe { std::slice::from_raw_parts_mut(ffi::PyBytes_AsString(object.as_ptr()).cast(), length) };
    py.detach(|| fill(zeroed(place)))?;
    object.cast_into::<PyBytes>().map_err(|error| PyErr::from(error).into())
}

/// The bytes, set to zero.
fn zeroed(place: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    place.fill(MaybeUninit::new(0));
    // SAFETY: all of them were just written.
    unsafe { &mut *(&raw mut *place as *mut [u8]) }
}

/// An object of ours that lends its memory.
pub(crate) trait Lends: PyClass<Frozen = True> + Sync + Sized {
    /// Its memory, which stays mapped while it is lent.
    fn lend(&self) -> PyResult<(*mut u8, usize)>;
    /// Ends a loan.
    fn take_back(&self);
}

/// Makes a subclass of `C` whose instances have the buffer protocol. (The class itself cannot have
/// it: see this module's text.)
pub(crate) fn lending_class<C: Lends>(py: Python<'_>, name: &'static std::ffi::CStr) -> PyResult<Py<PyAny>> {
    unsafe extern "C" fn get<C: Lends>(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int {
        // SAFETY: the interpreter calls this with its lock.
        let py = unsafe { Python::assume_attached() };
        // SAFETY: the object is alive during the call.
        let bound = unsafe { Bound::from_borrowed_ptr(py, object) };
        let lent = bound.cast::<C>().map_err(PyErr::from).and_then(|lender| Ok((lender.get().lend()?, lender)));
        match lent {
            Ok(((address, length), lender)) => {
                // SAFETY: fills Python's struct in, with a reference to the object.
                let filled = unsafe { PyBuffer_FillInfo(view, object, address.cast(), length as Py_ssize_t, 0, flags) };
                if filled != 0 {
                    lender.get().take_back();
                }
                filled
            }
            Err(error) => {
                error.restore(py);
                -1
            }
        }
    }

    unsafe extern "C" fn release<C: Lends>(object: *mut PyObject, _view: *mut PyBuffer) {
        // SAFETY: as above.
        let bound = unsafe { Bound::from_borrowed_ptr(Python::assume_attached(), object) };
        if let Ok(lender) = bound.cast::<C>() {
            lender.get().take_back();
        }
    }

    let mut slots = [
        ffi::PyType_Slot { slot: 1, pfunc: get::<C> as *mut c_void },
        ffi::PyType_Slot { slot: 2, pfunc: release::<C> as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        basicsize: 0,
        itemsize: 0,
        flags: ffi::Py_TPFLAGS_DEFAULT as _,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [py.get_type::<C>()])?;
    // SAFETY: a spec with the two slots of the buffer protocol (bf_getbuffer is 1, bf_releasebuffer
    // 2 in every interpreter that reads this version of the stable interface); Python copies it.
    // The base's size is inherited, since the spec's is 0.
    let made = unsafe { ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr()) };
    // SAFETY: a new reference or null.
    Ok(unsafe { Bound::from_owned_ptr_or_err(py, made) }?.unbind())
}
