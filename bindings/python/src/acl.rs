//! The C library's functions, for the Python package `ascend_vmm.acl`, which calls them by ctypes.
//!
//! Their addresses are handed over, not found by name: the module is loaded with symbols of its
//! own, and the vendor's library may be in the same process.

use ascendcl::exports::*;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Names and addresses of the functions.
macro_rules! addresses {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as *const () as usize)),*] };
}

/// The C functions that the package uses, by name.
#[pyfunction]
pub(crate) fn acl_functions(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let functions = PyDict::new(py);
    #[rustfmt::skip]
    let addresses = addresses![
        aclAppLog, aclFinalize, aclFinalizeReference, aclGetCannAttribute, aclGetCannAttributeList,
        aclGetDeviceCapability, aclGetRecentErrMsg, aclInit, aclrtCreateContext, aclrtCreateEvent,
        aclrtCreateEventExWithFlag, aclrtCreateEventWithFlag, aclrtCreateStream, aclrtCreateStreamWithConfig,
        aclrtDestroyContext, aclrtDestroyEvent, aclrtDestroyStream, aclrtDestroyStreamForce,
        aclrtDeviceCanAccessPeer, aclrtDeviceDisablePeerAccess, aclrtDeviceEnablePeerAccess,
        aclrtDeviceGetBareTgid, aclrtDeviceGetUuid, aclrtDevicePeerAccessStatus, aclrtEventElapsedTime,
        aclrtEventGetTimestamp, aclrtFree, aclrtFreeHost, aclrtFreePhysical, aclrtGetCurrentContext,
        aclrtGetDevice, aclrtGetDeviceCount, aclrtGetDeviceInfo, aclrtGetDeviceUtilizationRate, aclrtGetLastError,
        aclrtGetLogicDevIdByPhyDevId, aclrtGetLogicDevIdByUserDevId, aclrtGetMemInfo, aclrtGetMemUceInfo,
        aclrtGetPhyDevIdByLogicDevId, aclrtGetPrimaryCtxState, aclrtGetRunMode, aclrtGetSocName,
        aclrtGetUserDevIdByLogicDevId, aclrtGetVersion, aclrtHostGetDevicePointer, aclrtHostRegister,
        aclrtHostRegisterV2, aclrtHostUnregister, aclrtIpcMemClose, aclrtIpcMemGetExportKey,
        aclrtIpcMemImportByKey, aclrtIpcMemSetImportPid, aclrtLaunchCallback, aclrtMalloc, aclrtMallocAlign32,
        aclrtMallocCached, aclrtMallocHost, aclrtMallocHostWithCfg, aclrtMallocPhysical, aclrtMallocWithCfg,
        aclrtMapMem, aclrtMemExportToShareableHandle, aclrtMemGetAllocationGranularity,
        aclrtMemImportFromShareableHandle, aclrtMemSetPidToShareableHandle, aclrtMemcpy, aclrtMemcpy2d,
        aclrtMemcpy2dAsync, aclrtMemcpyAsync, aclrtMemcpyAsyncWithCondition, aclrtMemset, aclrtMemsetAsync,
        aclrtPeekAtLastError, aclrtPointerGetAttributes, aclrtProcessReport, aclrtQueryDeviceStatus,
        aclrtQueryEventStatus, aclrtQueryEventWaitStatus, aclrtRecordEvent, aclrtReleaseMemAddress,
        aclrtReserveMemAddress, aclrtResetDevice, aclrtResetDeviceForce, aclrtResetEvent, aclrtSetCurrentContext,
        aclrtSetDevice, aclrtSetDeviceSatMode, aclrtSetOpExecuteTimeOut, aclrtSetOpWaitTimeout,
        aclrtSetStreamFailureMode, aclrtSetStreamOverflowSwitch, aclrtStreamGetId, aclrtStreamQuery,
        aclrtStreamWaitEvent, aclrtSubscribeReport, aclrtSynchronizeDevice, aclrtSynchronizeDeviceWithTimeout,
        aclrtSynchronizeEvent, aclrtSynchronizeEventWithTimeout, aclrtSynchronizeStream,
        aclrtSynchronizeStreamWithTimeout, aclrtUnSubscribeReport, aclrtUnmapMem, aclrtValueWait, aclrtValueWrite,
        aclsysGetCANNVersion, aclsysGetVersionStr,
    ];
    for (name, address) in addresses {
        functions.set_item(name, address)?;
    }
    Ok(functions)
}
