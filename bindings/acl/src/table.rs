//! Every function of the C interface: its class and its prototype.
//!
//! This is the one list. The header is written from it ([`crate::header`]), the page
//! `docs/cann.md` has a row for each, and tests compare it with what the library exports and with
//! the facts that it was made from.

mod constants;
mod structs;

pub use constants::{ENUMS, ERRORS, Enumeration, MACROS};
pub use structs::{Field, HANDLES, OPAQUE, STRUCTS, Struct};

/// What stands behind a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The driver: memory, devices, sharing.
    Memory,
    /// Objects and settings in user space.
    Thin,
    /// Nothing: the name exists and answers that it is not supported.
    Absent,
}

/// A function of the C interface.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// What stands behind it.
    pub class: Class,
    /// Its C prototype, without the semicolon.
    pub prototype: &'static str,
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        let before = self.prototype.split('(').next().unwrap_or_default();
        before.rsplit([' ', '*']).next().unwrap_or_default()
    }

    /// What it returns, as a C type.
    pub fn returns(&self) -> &'static str {
        let before = self.prototype.split('(').next().unwrap_or_default();
        before.strip_suffix(self.name()).unwrap_or_default().trim_end()
    }

    /// Its parameters: C type and name; `...` has no name.
    pub fn parameters(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let list = self.prototype.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or_default();
        list.split(", ").filter(|parameter| !parameter.is_empty()).map(|parameter| {
            let end = parameter.rfind([' ', '*']).map_or(parameter.len(), |at| at + 1);
            (parameter[..end].trim_end(), &parameter[end..])
        })
    }
}

const fn memory(prototype: &'static str) -> Function {
    Function { class: Class::Memory, prototype }
}

const fn thin(prototype: &'static str) -> Function {
    Function { class: Class::Thin, prototype }
}

const fn absent(prototype: &'static str) -> Function {
    Function { class: Class::Absent, prototype }
}

/// All functions, by class and name.
pub const FUNCTIONS: &[Function] = &[
    memory("aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value)"),
    memory("aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId)"),
    memory("aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId)"),
    memory("aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags)"),
    memory("aclError aclrtDeviceGetBareTgid(int32_t *pid)"),
    memory("aclError aclrtDeviceGetByPCIBusId(const char *pciBusId, int32_t *deviceId)"),
    memory("aclError aclrtDeviceGetPCIBusId(int32_t deviceId, char *pciBusId, int32_t len)"),
    memory("aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid)"),
    memory("aclError aclrtDevicePeerAccessStatus(int32_t deviceId, int32_t peerDeviceId, int32_t *status)"),
    memory("aclError aclrtFree(void *devPtr)"),
    memory("aclError aclrtFreeHost(void *hostPtr)"),
    memory("aclError aclrtFreeHostWithDevSync(void *hostPtr)"),
    memory("aclError aclrtFreePhysical(aclrtDrvMemHandle handle)"),
    memory("aclError aclrtFreeWithDevSync(void *devPtr)"),
    memory("aclError aclrtGetDeviceCount(uint32_t *count)"),
    memory("aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value)"),
    memory("aclError aclrtGetLogicDevIdByPhyDevId(const int32_t phyDevId, int32_t *const logicDevId)"),
    memory("aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId)"),
    memory("aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total)"),
    memory(
        "aclError aclrtGetMemUsageInfo(int32_t deviceId, aclrtMemUsageInfo *memUsageInfo, size_t \
        inputNum, size_t *outputNum)",
    ),
    memory("aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logicDevId, int32_t *const phyDevId)"),
    memory("const char *aclrtGetSocName()"),
    memory("aclError aclrtGetUserDevIdByLogicDevId(const int32_t logicDevId, int32_t *const userDevid)"),
    memory("aclError aclrtHostGetDevicePointer(void *pHost, void **pDevice, uint32_t flag)"),
    memory("aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr)"),
    memory("aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag)"),
    memory("aclError aclrtHostUnregister(void *ptr)"),
    memory("aclError aclrtIpcMemClose(const char *key)"),
    memory("aclError aclrtIpcMemGetExportKey(void *devPtr, size_t size, char *key, size_t len, uint64_t flags)"),
    memory("aclError aclrtIpcMemImportByKey(void **devPtr, const char *key, uint64_t flags)"),
    memory("aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pid, size_t num)"),
    memory("aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)"),
    memory("aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy)"),
    memory("aclError aclrtMallocCached(void **devPtr, size_t size, aclrtMemMallocPolicy policy)"),
    memory("aclError aclrtMallocHost(void **hostPtr, size_t size)"),
    memory("aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg)"),
    memory(
        "aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp \
        *prop, uint64_t flags)",
    ),
    memory(
        "aclError aclrtMallocWithCfg(void **devPtr, size_t size, aclrtMemMallocPolicy policy, \
        aclrtMallocConfig *cfg)",
    ),
    memory(
        "aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, \
        uint64_t flags)",
    ),
    memory(
        "aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType \
        handleType, uint64_t flags, uint64_t *shareableHandle)",
    ),
    memory(
        "aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle handle, uint64_t flags, \
        aclrtMemSharedHandleType shareType, void *shareableHandle)",
    ),
    memory("aclError aclrtMemGetAccess(void *virPtr, aclrtMemLocation *location, uint64_t *flag)"),
    memory("aclError aclrtMemGetAddressRange(void *ptr, void **pbase, size_t *psize)"),
    memory(
        "aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, \
        aclrtMemGranularityOptions option, size_t *granularity)",
    ),
    memory(
        "aclError aclrtMemGetAllocationPropertiesFromHandle(aclrtDrvMemHandle handle, \
        aclrtPhysicalMemProp *prop)",
    ),
    memory(
        "aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId, \
        aclrtDrvMemHandle *handle)",
    ),
    memory(
        "aclError aclrtMemImportFromShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType \
        shareType, uint64_t flags, aclrtDrvMemHandle *handle)",
    ),
    memory(
        "aclError aclrtMemMapNoAccess(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle \
        handle, uint64_t flags)",
    ),
    memory("aclError aclrtMemP2PMap(void *devPtr, size_t size, int32_t dstDevId, uint64_t flags)"),
    memory("aclError aclrtMemRetainAllocationHandle(void *virPtr, aclrtDrvMemHandle *handle)"),
    memory("aclError aclrtMemSetAccess(void *virPtr, size_t size, aclrtMemAccessDesc *desc, size_t count)"),
    memory("aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum)"),
    memory(
        "aclError aclrtMemSetPidToShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType \
        shareType, int32_t *pid, size_t pidNum)",
    ),
    memory("aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind)"),
    memory(
        "aclError aclrtMemcpy2d(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, \
        size_t height, aclrtMemcpyKind kind)",
    ),
    memory(
        "aclError aclrtMemcpy2dAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t \
        width, size_t height, aclrtMemcpyKind kind, aclrtStream stream)",
    ),
    memory(
        "aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, \
        aclrtMemcpyKind kind, aclrtStream stream)",
    ),
    memory(
        "aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t destMax, const void *src, size_t \
        count, aclrtMemcpyKind kind, aclrtStream stream)",
    ),
    memory(
        "aclError aclrtMemcpyBatch(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t \
        numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex)",
    ),
    memory(
        "aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, \
        size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t \
        *failIndex, aclrtStream stream)",
    ),
    memory(
        "aclError aclrtMemcpyBatchAsyncV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, \
        size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, aclrtStream \
        stream)",
    ),
    memory(
        "aclError aclrtMemcpyBatchV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t \
        numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs)",
    ),
    memory("aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)"),
    memory(
        "aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, \
        aclrtStream stream)",
    ),
    memory("aclError aclrtMemsetD32(void *ptr, size_t memSize, uint32_t value, size_t N)"),
    memory("aclError aclrtMemsetD32Async(void *ptr, size_t memSize, uint32_t value, size_t N, aclrtStream stream)"),
    memory("aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes)"),
    memory("aclError aclrtQueryDeviceStatus(int32_t deviceId, aclrtDeviceStatus *deviceStatus)"),
    memory("aclError aclrtReleaseMemAddress(void *virPtr)"),
    memory(
        "aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, \
        uint64_t flags)",
    ),
    memory(
        "aclError aclrtReserveMemAddressNoUCMemory(void **virPtr, size_t size, size_t alignment, void \
        *expectPtr, uint64_t flags)",
    ),
    memory("aclError aclrtUnmapMem(void *virPtr)"),
    memory("aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream)"),
    memory("aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream)"),
    thin("uint64_t MsprofGetHashId(const char *hashInfo, size_t length)"),
    thin("int32_t MsprofRegisterCallback(uint32_t moduleId, ProfCommandHandle handle)"),
    thin("int32_t MsprofReportAdditionalInfo(uint32_t nonPersistantFlag, const void *data, uint32_t length)"),
    thin("int32_t MsprofReportApi(uint32_t nonPersistantFlag, const struct MsprofApi *api)"),
    thin("int32_t MsprofReportCompactInfo(uint32_t nonPersistantFlag, const void *data, uint32_t length)"),
    thin("uint64_t MsprofSysCycleTime()"),
    thin(
        "void aclAppLog(aclLogLevel logLevel, const char *func, const char *file, uint32_t line, const \
        char *fmt, ...)",
    ),
    thin("aclError aclFinalize()"),
    thin("aclError aclFinalizeReference(uint64_t *refCount)"),
    thin("aclError aclGetCannAttribute(aclCannAttr cannAttr, int32_t *value)"),
    thin("aclError aclGetCannAttributeList(const aclCannAttr **cannAttrList, size_t *num)"),
    thin("aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length)"),
    thin("size_t aclGetCompileoptSize(aclCompileOpt opt)"),
    thin("const char *aclGetRecentErrMsg()"),
    thin("aclError aclInit(const char *configPath)"),
    thin("aclError aclSetCompileopt(aclCompileOpt opt, const char *value)"),
    thin("aclError aclmdlFinalizeDump()"),
    thin("aclError aclmdlInitDump()"),
    thin("aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI)"),
    thin("aclError aclmdlSetDump(const char *dumpCfgPath)"),
    thin("aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId)"),
    thin("aclError aclrtCreateEvent(aclrtEvent *event)"),
    thin("aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag)"),
    thin("aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)"),
    thin("aclError aclrtCreateStream(aclrtStream *stream)"),
    thin("aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag)"),
    thin("aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *stream)"),
    thin("aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value)"),
    thin("aclError aclrtDestroyContext(aclrtContext context)"),
    thin("aclError aclrtDestroyEvent(aclrtEvent event)"),
    thin("aclError aclrtDestroyStream(aclrtStream stream)"),
    thin("aclError aclrtDestroyStreamForce(aclrtStream stream)"),
    thin("aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent)"),
    thin("aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp)"),
    thin("aclError aclrtGetCurrentContext(aclrtContext *context)"),
    thin("aclError aclrtGetDevice(int32_t *deviceId)"),
    thin("aclError aclrtGetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t *value)"),
    thin("aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode *mode)"),
    thin("aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo *utilizationInfo)"),
    thin("aclError aclrtGetEventId(aclrtEvent event, uint32_t *eventId)"),
    thin("aclError aclrtGetLastError(aclrtLastErrLevel level)"),
    thin(
        "aclError aclrtGetMemUceInfo(int32_t deviceId, aclrtMemUceInfo *memUceInfoArray, size_t arraySize, \
        size_t *retSize)",
    ),
    thin("aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active)"),
    thin("aclError aclrtGetRunMode(aclrtRunMode *runMode)"),
    thin("aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag)"),
    thin("aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value)"),
    thin("aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion)"),
    thin(
        "aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType, \
        aclrtStream stream)",
    ),
    thin("aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args)"),
    thin("aclError aclrtPeekAtLastError(aclrtLastErrLevel level)"),
    thin("aclError aclrtProcessReport(int32_t timeout)"),
    thin("aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)"),
    thin("aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)"),
    thin("aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)"),
    thin("aclError aclrtResetDevice(int32_t deviceId)"),
    thin("aclError aclrtResetDeviceForce(int32_t deviceId)"),
    thin("aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream)"),
    thin("aclError aclrtSetCurrentContext(aclrtContext context)"),
    thin("aclError aclrtSetDevice(int32_t deviceId)"),
    thin("aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode)"),
    thin("aclError aclrtSetExceptionInfoCallback(aclrtExceptionInfoCallback callback)"),
    thin("aclError aclrtSetOpExecuteTimeOut(uint32_t timeout)"),
    thin("aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actualTimeout)"),
    thin("aclError aclrtSetOpWaitTimeout(uint32_t timeout)"),
    thin(
        "aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr stmAttrType, \
        aclrtStreamAttrValue *value)",
    ),
    thin("aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode)"),
    thin("aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag)"),
    thin("aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value)"),
    thin("aclError aclrtStreamGetFlags(aclrtStream stream, uint32_t *flags)"),
    thin("aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId)"),
    thin("aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t *priority)"),
    thin("aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)"),
    thin("aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)"),
    thin("aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream)"),
    thin("aclError aclrtSynchronizeDevice()"),
    thin("aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)"),
    thin("aclError aclrtSynchronizeEvent(aclrtEvent event)"),
    thin("aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout)"),
    thin("aclError aclrtSynchronizeStream(aclrtStream stream)"),
    thin("aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)"),
    thin("aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream)"),
    thin("aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version)"),
    thin("aclError aclsysGetVersionStr(char *pkgName, char *versionStr)"),
    absent("aclDataBuffer *aclCreateDataBuffer(void *data, size_t size)"),
    absent("aclGraphDumpOption *aclCreateGraphDumpOpt()"),
    absent(
        "aclTensorDesc *aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t *dims, \
        aclFormat format)",
    ),
    absent("aclError aclDestroyDataBuffer(const aclDataBuffer *dataBuffer)"),
    absent("aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption *graphDumpOpt)"),
    absent("void aclDestroyTensorDesc(const aclTensorDesc *desc)"),
    absent(
        "aclError aclGenGraphAndDumpForOp(const char *opType, int numInputs, const aclTensorDesc *const \
        *inputDesc, const aclDataBuffer *const *inputs, int numOutputs, const aclTensorDesc *const \
        *outputDesc, aclDataBuffer *const *outputs, const aclopAttr *attr, aclopEngineType engineType, \
        const char *graphDumpPath, const aclGraphDumpOption *graphDumpOpt)",
    ),
    absent("aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *dimSize)"),
    absent("aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc)"),
    absent("size_t aclGetTensorDescNumDims(const aclTensorDesc *desc)"),
    absent("aclDataType aclGetTensorDescType(const aclTensorDesc *desc)"),
    absent("void aclSetTensorDescName(aclTensorDesc *desc, const char *name)"),
    absent("aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format)"),
    absent("aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType memType)"),
    absent("aclError aclSetTensorShape(aclTensorDesc *desc, int numDims, const int64_t *dims)"),
    absent("aclError aclmdlRIAddCondTask(aclmdlRICondTaskParams params, aclrtStream stream, uint32_t flags)"),
    absent("aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)"),
    absent("aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI)"),
    absent("aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream)"),
    absent("aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)"),
    absent("aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)"),
    absent("aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream)"),
    absent("aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)"),
    absent("aclError aclmdlRICaptureToModelRIBegin(aclrtStream stream, aclmdlRI modelRI, aclmdlRICaptureMode mode)"),
    absent(
        "aclError aclmdlRICondHandleCreate(aclmdlRI modelRI, uint32_t defaultLaunchValue, \
        aclmdlRICondHandleFlag flag, aclmdlRICondHandle *handle)",
    ),
    absent("aclError aclmdlRICondHandleGetCondPtr(aclmdlRICondHandle handle, uint64_t **ptr)"),
    absent("aclError aclmdlRIDebugJsonPrint(aclmdlRI modelRI, const char *path, uint32_t flags)"),
    absent("aclError aclmdlRIDebugPrint(aclmdlRI modelRI)"),
    absent("aclError aclmdlRIDestroy(aclmdlRI modelRI)"),
    absent("aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream)"),
    absent("aclError aclmdlRIGetId(aclmdlRI modelRI, uint32_t *modelRIId)"),
    absent(
        "aclError aclopCompileAndExecute(const char *opType, int numInputs, const aclTensorDesc *const \
        *inputDesc, const aclDataBuffer *const *inputs, int numOutputs, const aclTensorDesc *const \
        *outputDesc, aclDataBuffer *const *outputs, const aclopAttr *attr, aclopEngineType engineType, \
        aclopCompileType compileFlag, const char *opPath, aclrtStream stream)",
    ),
    absent(
        "aclError aclopCompileAndExecuteV2(const char *opType, int numInputs, aclTensorDesc **inputDesc, \
        aclDataBuffer **inputs, int numOutputs, aclTensorDesc **outputDesc, aclDataBuffer **outputs, \
        aclopAttr *attr, aclopEngineType engineType, aclopCompileType compileFlag, const char *opPath, \
        aclrtStream stream)",
    ),
    absent("aclopAttr *aclopCreateAttr()"),
    absent("void aclopDestroyAttr(const aclopAttr *attr)"),
    absent("aclError aclopSetAttrBool(aclopAttr *attr, const char *attrName, uint8_t attrValue)"),
    absent("aclError aclopSetAttrDataType(aclopAttr *attr, const char *attrName, aclDataType attrValue)"),
    absent("aclError aclopSetAttrFloat(aclopAttr *attr, const char *attrName, float attrValue)"),
    absent("aclError aclopSetAttrInt(aclopAttr *attr, const char *attrName, int64_t attrValue)"),
    absent(
        "aclError aclopSetAttrListBool(aclopAttr *attr, const char *attrName, int numValues, const \
        uint8_t *values)",
    ),
    absent(
        "aclError aclopSetAttrListFloat(aclopAttr *attr, const char *attrName, int numValues, const \
        float *values)",
    ),
    absent(
        "aclError aclopSetAttrListInt(aclopAttr *attr, const char *attrName, int numValues, const \
        int64_t *values)",
    ),
    absent(
        "aclError aclopSetAttrListListInt(aclopAttr *attr, const char *attrName, int numLists, const int \
        *numValues, const int64_t *const *values)",
    ),
    absent("aclError aclopSetAttrString(aclopAttr *attr, const char *attrName, const char *attrValue)"),
    absent(
        "aclprofConfig *aclprofCreateConfig(uint32_t *deviceIdList, uint32_t deviceNums, \
        aclprofAicoreMetrics aicoreMetrics, const aclprofAicoreEvents *aicoreEvents, uint64_t \
        dataTypeConfig)",
    ),
    absent("aclprofStepInfo *aclprofCreateStepInfo()"),
    absent("aclError aclprofDestroyConfig(const aclprofConfig *profilerConfig)"),
    absent("void aclprofDestroyStepInfo(aclprofStepInfo *stepinfo)"),
    absent("aclError aclprofFinalize()"),
    absent("aclError aclprofGetStepTimestamp(aclprofStepInfo *stepInfo, aclprofStepTag tag, aclrtStream stream)"),
    absent("aclError aclprofInit(const char *profilerResultPath, size_t length)"),
    absent("aclError aclprofStart(const aclprofConfig *profilerConfig)"),
    absent("aclError aclprofStop(const aclprofConfig *profilerConfig)"),
    absent("aclrtAllocatorDesc aclrtAllocatorCreateDesc()"),
    absent("aclError aclrtAllocatorDestroyDesc(aclrtAllocatorDesc allocatorDesc)"),
    absent(
        "aclError aclrtAllocatorGetByStream(aclrtStream stream, aclrtAllocatorDesc *allocatorDesc, \
        aclrtAllocator *allocator, aclrtAllocatorAllocFunc *allocFunc, aclrtAllocatorFreeFunc *freeFunc, \
        aclrtAllocatorAllocAdviseFunc *allocAdviseFunc, aclrtAllocatorGetAddrFromBlockFunc \
        *getAddrFromBlockFunc)",
    ),
    absent("aclError aclrtAllocatorRegister(aclrtStream stream, aclrtAllocatorDesc allocatorDesc)"),
    absent(
        "aclError aclrtAllocatorSetAllocAdviseFuncToDesc(aclrtAllocatorDesc allocatorDesc, \
        aclrtAllocatorAllocAdviseFunc func)",
    ),
    absent(
        "aclError aclrtAllocatorSetAllocFuncToDesc(aclrtAllocatorDesc allocatorDesc, \
        aclrtAllocatorAllocFunc func)",
    ),
    absent("aclError aclrtAllocatorSetFreeFuncToDesc(aclrtAllocatorDesc allocatorDesc, aclrtAllocatorFreeFunc func)"),
    absent(
        "aclError aclrtAllocatorSetGetAddrFromBlockFuncToDesc(aclrtAllocatorDesc allocatorDesc, \
        aclrtAllocatorGetAddrFromBlockFunc func)",
    ),
    absent("aclError aclrtAllocatorSetObjToDesc(aclrtAllocatorDesc allocatorDesc, aclrtAllocator allocator)"),
    absent("aclError aclrtAllocatorUnregister(aclrtStream stream)"),
    absent(
        "aclError aclrtBinaryGetFunction(const aclrtBinHandle binHandle, const char *kernelName, \
        aclrtFuncHandle *funcHandle)",
    ),
    absent(
        "aclError aclrtBinaryLoadFromData(const void *data, size_t length, const aclrtBinaryLoadOptions \
        *options, aclrtBinHandle *binHandle)",
    ),
    absent(
        "aclError aclrtBinaryLoadFromFile(const char *binPath, aclrtBinaryLoadOptions *options, \
        aclrtBinHandle *binHandle)",
    ),
    absent("aclError aclrtBinaryUnLoad(aclrtBinHandle binHandle)"),
    absent("aclError aclrtCmoAsync(void *src, size_t size, aclrtCmoType cmoType, aclrtStream stream)"),
    absent("aclError aclrtDeviceTaskAbort(int32_t deviceId, uint32_t timeout)"),
    absent("aclError aclrtGetErrorVerbose(int32_t deviceId, aclrtErrorInfo *errorInfo)"),
    absent("aclError aclrtGetFunctionAddr(aclrtFuncHandle funcHandle, void **aicAddr, void **aivAddr)"),
    absent("aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value)"),
    absent("aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value)"),
    absent("aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle)"),
    absent("aclError aclrtIpcMemSetAttr(const char *key, aclrtIpcMemAttrType type, uint64_t attr)"),
    absent("aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event)"),
    absent(
        "aclError aclrtKernelArgsAppend(aclrtArgsHandle argsHandle, void *param, size_t paramSize, \
        aclrtParamHandle *paramHandle)",
    ),
    absent("aclError aclrtKernelArgsFinalize(aclrtArgsHandle argsHandle)"),
    absent("aclError aclrtKernelArgsInit(aclrtFuncHandle funcHandle, aclrtArgsHandle *argsHandle)"),
    absent(
        "aclError aclrtLaunchKernelWithConfig(aclrtFuncHandle funcHandle, uint32_t numBlocks, \
        aclrtStream stream, aclrtLaunchKernelCfg *cfg, aclrtArgsHandle argsHandle, void *reserve)",
    ),
    absent("aclError aclrtMemAllocManaged(void **ptr, uint64_t size, uint32_t flag)"),
    absent("aclError aclrtMemUceRepair(int32_t deviceId, aclrtMemUceInfo *memUceInfoArray, size_t arraySize)"),
    absent("aclError aclrtRepairError(int32_t deviceId, const aclrtErrorInfo *errorInfo)"),
    absent("aclError aclrtResetDeviceResLimit(int32_t deviceId)"),
    absent("aclError aclrtResetStreamResLimit(aclrtStream stream)"),
    absent("aclError aclrtSetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t value)"),
    absent("aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value)"),
    absent("aclError aclrtUnuseStreamResInCurrentThread(aclrtStream stream)"),
    absent("aclError aclrtUseStreamResInCurrentThread(aclrtStream stream)"),
];

/// Names that programs link from libraries beside this one. Each answers that it is not supported.
pub const LINKED: &[&str] = &[
    "HcclAllGather",
    "HcclAllGatherV",
    "HcclAllReduce",
    "HcclAlltoAll",
    "HcclAlltoAllV",
    "HcclBatchSendRecv",
    "HcclBroadcast",
    "HcclCommActivateCommMemory",
    "HcclCommDeactivateCommMemory",
    "HcclCommDeregister",
    "HcclCommDestroy",
    "HcclCommExchangeMem",
    "HcclCommInitAll",
    "HcclCommInitClusterInfoConfig",
    "HcclCommInitRootInfo",
    "HcclCommInitRootInfoConfig",
    "HcclCommRegister",
    "HcclCommResume",
    "HcclCommSetMemoryRange",
    "HcclCommUnsetMemoryRange",
    "HcclCommWorkingDevNicSet",
    "HcclCreateSubCommConfig",
    "HcclGetCommAsyncError",
    "HcclGetCommConfigCapability",
    "HcclGetCommName",
    "HcclGetRootInfo",
    "HcclRecv",
    "HcclReduce",
    "HcclReduceScatter",
    "HcclReduceScatterV",
    "HcclScatter",
    "HcclSend",
    "HcclSetConfig",
    "rtDevBinaryRegister",
    "rtFunctionRegister",
    "rtGetC2cCtrlAddr",
    "rtKernelLaunch",
];
