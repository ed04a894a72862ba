//! Functions that exist by name only: programs link them, and what they would do needs the vendor's
//! kernels or another of its libraries.
//!
//! They take whatever they are passed, which C allows on every architecture that has Ascend hosts,
//! and answer that they are not supported: a code, or nothing where a pointer or a count is
//! returned, since programs would use an error number as one.

use crate::border;
use crate::fault::code;
use libc::c_void;
use std::ptr::null_mut;

macro_rules! absent {
    ($($list:ident -> $returns:ty = $value:expr; [$($name:ident)*])*) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`, which is not supported.")]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the name is C's")]
            pub extern "C" fn $name() -> $returns {
                border::absent(stringify!($name));
                $value
            }
        )*

        /// The functions of this list.
        pub const $list: &[&str] = &[$(stringify!($name)),*];)*
    };
}

absent! {
    CODES -> i32 = code::RT_NOT_SUPPORTED;
    [
        aclDestroyDataBuffer aclDestroyGraphDumpOpt aclGenGraphAndDumpForOp aclGetTensorDescDimV2
        aclSetTensorFormat aclSetTensorPlaceMent aclSetTensorShape aclmdlRIAddCondTask
        aclmdlRICaptureBegin aclmdlRICaptureEnd aclmdlRICaptureTaskGrpBegin aclmdlRICaptureTaskGrpEnd
        aclmdlRICaptureTaskUpdateBegin aclmdlRICaptureTaskUpdateEnd aclmdlRICaptureThreadExchangeMode
        aclmdlRICaptureToModelRIBegin aclmdlRICondHandleCreate aclmdlRICondHandleGetCondPtr
        aclmdlRIDebugJsonPrint aclmdlRIDebugPrint aclmdlRIDestroy aclmdlRIExecuteAsync aclmdlRIGetId
        aclopCompileAndExecute aclopCompileAndExecuteV2 aclopSetAttrBool aclopSetAttrDataType
        aclopSetAttrFloat aclopSetAttrInt aclopSetAttrListBool aclopSetAttrListFloat aclopSetAttrListInt
        aclopSetAttrListListInt aclopSetAttrString aclprofDestroyConfig aclprofFinalize
        aclprofGetStepTimestamp aclprofInit aclprofStart aclprofStop aclrtAllocatorDestroyDesc
        aclrtAllocatorGetByStream aclrtAllocatorRegister aclrtAllocatorSetAllocAdviseFuncToDesc
        aclrtAllocatorSetAllocFuncToDesc aclrtAllocatorSetFreeFuncToDesc
        aclrtAllocatorSetGetAddrFromBlockFuncToDesc aclrtAllocatorSetObjToDesc aclrtAllocatorUnregister
        aclrtBinaryGetFunction aclrtBinaryLoadFromData aclrtBinaryLoadFromFile aclrtBinaryUnLoad
        aclrtCmoAsync aclrtDeviceTaskAbort aclrtGetErrorVerbose aclrtGetFunctionAddr
        aclrtGetResInCurrentThread aclrtGetStreamResLimit aclrtIpcGetEventHandle aclrtIpcMemSetAttr
        aclrtIpcOpenEventHandle aclrtKernelArgsAppend aclrtKernelArgsFinalize aclrtKernelArgsInit
        aclrtLaunchKernelWithConfig aclrtMemAllocManaged aclrtMemUceRepair aclrtRepairError
        aclrtResetDeviceResLimit aclrtResetStreamResLimit aclrtSetDeviceResLimit aclrtSetStreamResLimit
        aclrtUnuseStreamResInCurrentThread aclrtUseStreamResInCurrentThread
    ]

    POINTERS -> *mut c_void = null_mut();
    [
        aclCreateDataBuffer aclCreateGraphDumpOpt aclCreateTensorDesc aclopCreateAttr
        aclprofCreateConfig aclprofCreateStepInfo aclrtAllocatorCreateDesc
    ]

    COUNTS -> usize = 0;
    [
        aclGetTensorDescNumDims
    ]

    UNDEFINED -> i32 = -1;
    [
        aclGetTensorDescFormat aclGetTensorDescType
    ]

    NOTHING -> () = ();
    [
        aclDestroyTensorDesc aclSetTensorDescName aclopDestroyAttr aclprofDestroyStepInfo
    ]

    LINKED -> i32 = code::RT_NOT_SUPPORTED;
    [
        HcclAllGather HcclAllGatherV HcclAllReduce HcclAlltoAll HcclAlltoAllV HcclBatchSendRecv
        HcclBroadcast HcclCommActivateCommMemory HcclCommDeactivateCommMemory HcclCommDeregister
        HcclCommDestroy HcclCommExchangeMem HcclCommInitAll HcclCommInitClusterInfoConfig
        HcclCommInitRootInfo HcclCommInitRootInfoConfig HcclCommRegister HcclCommResume
        HcclCommSetMemoryRange HcclCommUnsetMemoryRange HcclCommWorkingDevNicSet HcclCreateSubCommConfig
        HcclGetCommAsyncError HcclGetCommConfigCapability HcclGetCommName HcclGetRootInfo HcclRecv
        HcclReduce HcclReduceScatter HcclReduceScatterV HcclScatter HcclSend HcclSetConfig
        rtGetC2cCtrlAddr rtKernelLaunch
    ]
}

/// Functions that framework libraries may call while they are loaded: they must succeed.
pub const LOADED: &[&str] = &["rtDevBinaryRegister", "rtFunctionRegister"];

/// `rtDevBinaryRegister`: kernels are taken and never run.
///
/// # Safety
///
/// `handle` is NULL or a place for a handle.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub unsafe extern "C" fn rtDevBinaryRegister(_binary: *const c_void, handle: border::Out<usize>) -> i32 {
    handle.write(1);
    0
}

/// `rtFunctionRegister`: kernels are taken and never run.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn rtFunctionRegister() -> i32 {
    0
}
