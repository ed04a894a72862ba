//! The C library's functions, for the Python package `ascend_vmm.acl`.
//!
//! Those that take and return numbers are called from here ([`acl_call`]), with their own types.
//! The others the package calls by ctypes: their addresses are handed over, not found by name,
//! because the module is loaded with symbols of its own. If the process has another library with
//! these names, its functions are called instead: two of them would need two sessions.

use ascendcl::border::{Address, Out};
use ascendcl::exports::*;
use ascendcl::handles::Handle;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyInt, PyTuple};
use std::ptr::with_exposed_provenance_mut;

/// Names and addresses of the functions.
macro_rules! addresses {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as *const () as usize)),*] };
}

/// The C functions that the package calls by ctypes, by name.
#[pyfunction]
pub(crate) fn acl_functions(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let functions = PyDict::new(py);
    #[rustfmt::skip]
    let addresses = addresses![
        aclAppLog, aclGetCannAttributeList, aclGetRecentErrMsg, aclInit, aclrtDeviceGetUuid,
        aclrtGetDeviceUtilizationRate, aclrtGetLastError, aclrtGetMemUceInfo, aclrtGetPrimaryCtxState,
        aclrtGetSocName, aclrtIpcMemClose, aclrtIpcMemGetExportKey, aclrtIpcMemImportByKey, aclrtIpcMemSetImportPid,
        aclrtLaunchCallback, aclrtMallocHostWithCfg, aclrtMallocPhysical, aclrtMallocWithCfg,
        aclrtMemGetAllocationGranularity, aclrtMemSetPidToShareableHandle, aclrtPeekAtLastError,
        aclrtPointerGetAttributes, aclsysGetCANNVersion, aclsysGetVersionStr,
    ];
    for (name, address) in addresses {
        functions.set_item(name, address)?;
    }
    Ok(functions)
}

/// The largest number of arguments.
const MOST: usize = 8;

/// An argument of a C function, from 64 bits: a number, or the address of an answer.
trait Argument {
    fn of(bits: u64) -> Self;
}

macro_rules! argument {
    ($($kind:ty: $bits:ident => $of:expr;)*) => {
        $(impl Argument for $kind {
            fn of($bits: u64) -> $kind {
                $of
            }
        })*
    };
}

argument! {
    i32: bits => bits as i32;
    u32: bits => bits as u32;
    u64: bits => bits;
    usize: bits => bits as usize;
    Address: bits => Address(bits);
    Handle: bits => Handle(bits);
}

impl<T> Argument for Out<T> {
    fn of(bits: u64) -> Out<T> {
        Out::to(with_exposed_provenance_mut(bits as usize))
    }
}

/// A C function, called with its own types.
trait Call: Send + Sync {
    /// # Safety
    ///
    /// An argument that is the address of an answer must have room for 8 bytes.
    unsafe fn call(&self, bits: &[u64; MOST]) -> i32;
}

/// Functions by how many arguments they have.
macro_rules! functions {
    ($(($($argument:ident $place:literal),*): $($name:ident),*;)*) => {
        $(impl<$($argument: Argument),*> Call for unsafe extern "C" fn($($argument),*) -> i32 {
            unsafe fn call(&self, _bits: &[u64; MOST]) -> i32 {
                // SAFETY: the caller vouches for the answers' room. Other addresses are not
                // followed by the library: it looks them up.
                unsafe { self($($argument::of(_bits[$place])),*) }
            }
        })*

        /// A function by its name: at an address of another library, or our own.
        fn function(name: &str, at: Option<usize>) -> Option<Box<dyn Call>> {
            $({
                fn boxed<$($argument: Argument + 'static),*>(
                    own: unsafe extern "C" fn($($argument),*) -> i32,
                    at: Option<usize>,
                ) -> Option<Box<dyn Call>> {
                    let Some(at) = at else { return Some(Box::new(own)) };
                    let at = std::ptr::with_exposed_provenance::<()>(at);
                    // SAFETY: the package found the address under the name of this function, whose
                    // prototype is the vendor's.
                    let other = unsafe {
                        std::mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> i32>(at)
                    };
                    Some(Box::new(other))
                }
                match name {
                    $(stringify!($name) => return boxed($name, at),)*
                    _ => {}
                }
            })*
            None
        }
    };
}

functions! {
    ():
        aclFinalize, aclrtSynchronizeDevice;
    (A 0):
        aclFinalizeReference, aclrtCreateEvent, aclrtCreateStream, aclrtDestroyContext, aclrtDestroyEvent,
        aclrtDestroyStream, aclrtDestroyStreamForce, aclrtDeviceDisablePeerAccess, aclrtDeviceGetBareTgid,
        aclrtFree, aclrtFreeHost, aclrtFreePhysical, aclrtGetCurrentContext, aclrtGetDevice,
        aclrtGetDeviceCount, aclrtGetRunMode, aclrtHostUnregister, aclrtProcessReport,
        aclrtReleaseMemAddress, aclrtResetDevice, aclrtResetDeviceForce, aclrtSetCurrentContext,
        aclrtSetDevice, aclrtSetDeviceSatMode, aclrtSetOpExecuteTimeOut, aclrtSetOpWaitTimeout,
        aclrtSynchronizeDeviceWithTimeout, aclrtSynchronizeEvent, aclrtSynchronizeStream, aclrtUnmapMem;
    (A 0, B 1):
        aclGetCannAttribute, aclrtCreateContext, aclrtCreateEventExWithFlag, aclrtCreateEventWithFlag,
        aclrtDeviceEnablePeerAccess, aclrtEventGetTimestamp, aclrtGetLogicDevIdByPhyDevId,
        aclrtGetLogicDevIdByUserDevId, aclrtGetPhyDevIdByLogicDevId, aclrtGetUserDevIdByLogicDevId,
        aclrtMallocHost, aclrtQueryDeviceStatus, aclrtQueryEventStatus, aclrtQueryEventWaitStatus,
        aclrtRecordEvent, aclrtResetEvent, aclrtSetStreamFailureMode, aclrtSetStreamOverflowSwitch,
        aclrtStreamGetId, aclrtStreamQuery, aclrtStreamWaitEvent, aclrtSubscribeReport,
        aclrtSynchronizeEventWithTimeout, aclrtSynchronizeStreamWithTimeout, aclrtUnSubscribeReport;
    (A 0, B 1, C 2):
        aclGetDeviceCapability, aclrtCreateStreamWithConfig, aclrtDeviceCanAccessPeer,
        aclrtDevicePeerAccessStatus, aclrtEventElapsedTime, aclrtGetDeviceInfo, aclrtGetMemInfo,
        aclrtGetVersion, aclrtHostGetDevicePointer, aclrtHostRegisterV2, aclrtMalloc, aclrtMallocAlign32,
        aclrtMallocCached, aclrtMemImportFromShareableHandle;
    (A 0, B 1, C 2, D 3):
        aclrtHostRegister, aclrtMemExportToShareableHandle, aclrtMemset, aclrtValueWait, aclrtValueWrite;
    (A 0, B 1, C 2, D 3, E 4):
        aclrtMapMem, aclrtMemcpy, aclrtMemsetAsync, aclrtReserveMemAddress;
    (A 0, B 1, C 2, D 3, E 4, F 5):
        aclrtMemcpyAsync, aclrtMemcpyAsyncWithCondition;
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6):
        aclrtMemcpy2d;
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7):
        aclrtMemcpy2dAsync;
}

/// The kind of an argument or result: see `ascend_vmm/acl/_table.py`.
#[derive(Clone, Copy)]
enum Kind {
    /// 64 bits, modulo 2^64.
    Wide,
    Signed,
    Unsigned,
    Answer(Answer),
}

#[derive(Clone, Copy)]
enum Answer {
    Signed,
    Unsigned,
    Wide,
    SignedWide,
    Float,
}

fn kind(text: &str) -> Option<Kind> {
    Some(match text {
        "" => Kind::Wide,
        "i" => Kind::Signed,
        "u" => Kind::Unsigned,
        ">i" => Kind::Answer(Answer::Signed),
        ">u" => Kind::Answer(Answer::Unsigned),
        ">p" => Kind::Answer(Answer::Wide),
        ">q" => Kind::Answer(Answer::SignedWide),
        ">f" => Kind::Answer(Answer::Float),
        _ => return None,
    })
}

/// The bits of a Python int, or of what has `__index__`, modulo 2^64.
fn wide(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    if !object.is_instance_of::<PyInt>() {
        // SAFETY: the object is alive; the answer is a new reference to an int, or null.
        let number = unsafe { Bound::from_owned_ptr_or_err(object.py(), ffi::PyNumber_Index(object.as_ptr())) };
        return wide(&number?);
    }
    // SAFETY: an int, which is alive. The function fails for others only.
    Ok(unsafe { ffi::PyLong_AsUnsignedLongLongMask(object.as_ptr()) })
}

/// A Python function for a C function whose arguments and answers are numbers, of these kinds; None
/// for other functions. It returns the answers, then the code. The interpreter's lock is not held
/// during the call. `address` is that of the function in another library of this process.
#[pyfunction]
#[pyo3(signature = (name, kinds, address=None))]
pub(crate) fn acl_call<'py>(
    py: Python<'py>,
    name: &str,
    kinds: Vec<String>,
    address: Option<usize>,
) -> PyResult<Option<Bound<'py, PyCFunction>>> {
    let Some(kinds) = kinds.iter().map(|text| kind(text)).collect::<Option<Vec<_>>>() else { return Ok(None) };
    let function = function(name, address).filter(|_| kinds.len() <= MOST);
    let function = function.ok_or_else(|| PyValueError::new_err(format!("{name} is not a function of numbers")))?;
    let call = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<Py<PyAny>> {
        let py = arguments.py();
        let (mut bits, mut answers) = ([0; MOST], [0_u64; MOST]);
        let answers_at = (&raw mut answers).expose_provenance();
        let mut given = arguments.iter_borrowed();
        for (place, kind) in kinds.iter().enumerate() {
            let mut next = || given.next().ok_or_else(|| PyTypeError::new_err("an argument is missing"));
            bits[place] = match kind {
                Kind::Wide => wide(&*next()?)?,
                Kind::Signed => next()?.extract::<i32>()? as u32 as u64,
                Kind::Unsigned => next()?.extract::<u32>()?.into(),
                Kind::Answer(_) => (answers_at + place * size_of::<u64>()) as u64,
            };
        }
        // SAFETY: each answer has 8 bytes of its own.
        let code = py.detach(|| unsafe { function.call(&bits) });
        let code = code.into_pyobject(py)?.into_any();
        let mut returned = Vec::new();
        for (kind, answer) in kinds.iter().zip(answers) {
            let Kind::Answer(kind) = kind else { continue };
            returned.push(match kind {
                // Both architectures are little-endian.
                Answer::Signed => (answer as i32).into_pyobject(py)?.into_any(),
                Answer::Unsigned => (answer as u32).into_pyobject(py)?.into_any(),
                Answer::Wide => answer.into_pyobject(py)?.into_any(),
                Answer::SignedWide => (answer as i64).into_pyobject(py)?.into_any(),
                Answer::Float => f32::from_bits(answer as u32).into_pyobject(py)?.into_any(),
            });
        }
        if returned.is_empty() {
            return Ok(code.unbind());
        }
        returned.push(code);
        Ok(PyTuple::new(py, returned)?.into_any().unbind())
    };
    Ok(Some(PyCFunction::new_closure(py, None, None, call)?))
}
