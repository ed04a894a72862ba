/* Initialisation, devices, contexts, errors: what belongs to the process and to its threads. */
#include <pthread.h>

#include "check.h"

/* Of the profiler, whose own header declares them. */
extern uint64_t MsprofGetHashId(const char *, size_t);
extern uint64_t MsprofSysCycleTime(void);
extern int32_t MsprofRegisterCallback(uint32_t, void *);
extern int32_t MsprofReportApi(uint32_t, const void *);
extern int32_t MsprofReportAdditionalInfo(uint32_t, const void *, uint32_t);
extern int32_t MsprofReportCompactInfo(uint32_t, const void *, uint32_t);

static aclrtContext primary;

static void *other_thread(void *unused)
{
    (void)unused;
    int32_t device = -1;
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_RT_CONTEXT_NULL);
    aclrtContext context = (aclrtContext)1;
    IS(aclrtGetCurrentContext(&context), ACL_ERROR_RT_CONTEXT_NULL);
    /* promise: aclrtGetCurrentContext: none is NULL */
    CHECK(context == NULL);
    OK(aclrtSetDevice(0));
    OK(aclrtGetCurrentContext(&context));
    CHECK(context == primary);
    OK(aclrtResetDevice(0));
    return NULL;
}

int main(void)
{
    aclrtRunMode mode = ACL_DEVICE;
    OK(aclrtGetRunMode(&mode));
    /* promise: aclrtGetDeviceCount, aclrtGetSocName, aclrtGetRunMode: before aclInit */
    CHECK(mode == ACL_HOST);
    uint32_t count = 0;
    OK(aclrtGetDeviceCount(&count));
    CHECK(count == 2);
    CHECK(strcmp(aclrtGetSocName(), "Ascend910B3") == 0);
    /* promise: aclGetRecentErrMsg: once, with the function's name */
    CHECK(aclGetRecentErrMsg() == NULL);

    int32_t device = -1;
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_RT_CONTEXT_NULL);
    /* A call that succeeds leaves the latest failure as it is. */
    OK(aclrtGetRunMode(&mode));
    /* promise: aclrtPeekAtLastError, aclrtGetLastError: kept over success, then forgotten */
    IS(aclrtGetLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), 0);
    const char *said = aclGetRecentErrMsg();
    CHECK(said != NULL && strstr(said, "aclrtGetDevice") != NULL && strstr(said, "aclrtSetDevice") != NULL);
    CHECK(aclGetRecentErrMsg() == NULL);
    /* A framework reads it for its log, asks for the device, and reads it for its exception. */
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK(aclGetRecentErrMsg() != NULL);
    OK(aclrtGetRunMode(&mode));
    said = aclGetRecentErrMsg();
    /* promise: aclGetRecentErrMsg: again after another call, once */
    CHECK(said != NULL && strstr(said, "aclrtGetDevice") != NULL);
    OK(aclrtGetRunMode(&mode));
    CHECK(aclGetRecentErrMsg() == NULL);

    OK(aclInit(NULL));
    IS(aclInit(NULL), ACL_ERROR_REPEAT_INITIALIZE);
    uint64_t left = 99;
    OK(aclFinalizeReference(&left));
    /* promise: aclFinalizeReference: counts down */
    CHECK(left == 1);

    IS(aclrtSetDevice(2), ACL_ERROR_RT_INVALID_DEVICEID);
    IS(aclrtSetDevice(-1), ACL_ERROR_RT_INVALID_DEVICEID);
    IS(aclrtResetDevice(0), ACL_ERROR_RT_CONTEXT_RELEASE_ERROR);
    OK(aclrtSetDevice(0));
    OK(aclrtGetDevice(&device));
    CHECK(device == 0);
    OK(aclrtGetCurrentContext(&primary));
    CHECK(primary != NULL);
    uint32_t flags = 9;
    int32_t active = 0;
    OK(aclrtGetPrimaryCtxState(0, &flags, &active));
    /* promise: aclrtGetPrimaryCtxState: active */
    CHECK(active == 1);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);

    aclrtContext other = NULL;
    /* promise: aclrtCreateContext: current in its thread */
    OK(aclrtCreateContext(&other, 1));
    CHECK(other != primary);
    OK(aclrtGetDevice(&device));
    CHECK(device == 1);
    OK(aclrtSetCurrentContext(primary));
    OK(aclrtGetDevice(&device));
    CHECK(device == 0);
    /* promise: aclrtDestroyContext: of a device's own */
    IS(aclrtDestroyContext(primary), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclrtDestroyContext(other));
    IS(aclrtDestroyContext(other), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtSetCurrentContext(other), ACL_ERROR_RT_PARAM_INVALID);

    /* Setting a device takes the place of a context that was set, and counts. */
    OK(aclrtCreateContext(&other, 1));
    OK(aclrtSetDevice(0));
    aclrtContext current = NULL;
    OK(aclrtGetCurrentContext(&current));
    CHECK(current == primary);
    OK(aclrtDestroyContext(other));
    OK(aclrtResetDevice(0));
    OK(aclrtGetDevice(&device));
    OK(aclrtGetCurrentContext(&current));
    /* promise: aclrtSetDevice, aclrtResetDevice: counted */
    CHECK(device == 0 && current == primary);
    /* A context that is destroyed while it is current leaves none. */
    OK(aclrtCreateContext(&other, 1));
    OK(aclrtDestroyContext(other));
    IS(aclrtGetCurrentContext(&current), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK(current == NULL);
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclrtSetCurrentContext(primary));

    int32_t can = -1;
    OK(aclrtDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 1);
    IS(aclrtDeviceCanAccessPeer(&can, 0, 0), ACL_ERROR_INVALID_PARAM);
    OK(aclrtDeviceEnablePeerAccess(1, 0));
    OK(aclrtDeviceEnablePeerAccess(1, 0));
    int32_t status = -1;
    OK(aclrtDevicePeerAccessStatus(0, 1, &status));
    /* promise: aclrtDeviceEnablePeerAccess: twice */
    /* promise: aclrtDevicePeerAccessStatus: twice */
    /* promise: aclrtDeviceDisablePeerAccess: twice */
    CHECK(status == 1);
    OK(aclrtDeviceDisablePeerAccess(1));

    int32_t id = -1;
    OK(aclrtGetLogicDevIdByUserDevId(1, &id));
    CHECK(id == 1);
    OK(aclrtGetPhyDevIdByLogicDevId(1, &id));
    /* promise: aclrtGetPhyDevIdByLogicDevId, aclrtGetLogicDevIdByPhyDevId: there and back */
    OK(aclrtGetLogicDevIdByPhyDevId(id, &id));
    CHECK(id == 1);
    OK(aclrtGetUserDevIdByLogicDevId(1, &id));
    CHECK(id == 1);
    char pci[32];
    OK(aclrtDeviceGetPCIBusId(1, pci, sizeof(pci)));
    /* promise: aclrtDeviceGetPCIBusId, aclrtDeviceGetByPCIBusId: there and back */
    OK(aclrtDeviceGetByPCIBusId(pci, &id));
    CHECK(id == 1);
    aclrtUuid first, second;
    OK(aclrtDeviceGetUuid(0, &first));
    OK(aclrtDeviceGetUuid(1, &second));
    /* promise: aclrtDeviceGetUuid: differ */
    CHECK(memcmp(&first, &second, sizeof(first)) != 0);
    int64_t value = 0;
    OK(aclGetDeviceCapability(0, ACL_DEVICE_INFO_AI_CORE_NUM, &value));
    CHECK(value > 0);
    OK(aclrtGetDeviceInfo(0, ACL_DEV_ATTR_VECTOR_CORE_NUM, &value));
    aclrtDeviceStatus well = ACL_RT_DEVICE_STATUS_END;
    OK(aclrtQueryDeviceStatus(0, &well));
    /* promise: aclrtQueryDeviceStatus, aclrtGetDeviceUtilizationRate: a healthy device */
    CHECK(well == ACL_RT_DEVICE_STATUS_NORMAL);
    aclrtUtilizationInfo utilization;
    OK(aclrtGetDeviceUtilizationRate(0, &utilization));

    size_t available = 0, total = 0;
    OK(aclrtGetMemInfo(ACL_HBM_MEM, &available, &total));
    CHECK(total > 0 && available <= total);
    /* promise: aclrtGetMemInfo: a kind that the card does not have */
    OK(aclrtGetMemInfo(ACL_DDR_MEM, &available, &total));
    IS(aclrtGetMemInfo((aclrtMemAttr)18, &available, &total), ACL_ERROR_RT_INVALID_MEMORY_TYPE);

    aclCANNPackageVersion version;
    OK(aclsysGetCANNVersion(ACL_PKG_NAME_CANN, &version));
    CHECK(strcmp(version.version, "8.5.0") == 0 && strcmp(version.majorVersion, "8") == 0);
    OK(aclsysGetCANNVersion(ACL_PKG_NAME_DRIVER, &version));
    CHECK(version.version[0] != 0);
    /* Programs read it whatever the answer is. */
    memset(&version, 'x', sizeof(version));
    IS(aclsysGetCANNVersion((aclCANNPackageName)99, &version), ACL_ERROR_INVALID_PARAM);
    /* promise: aclsysGetCANNVersion: filled on every answer */
    CHECK(version.version[0] == 0 && version.majorVersion[0] == 0);

    int32_t newer = -1;
    OK(aclGetCannAttribute(ACL_CANN_ATTR_INF_NAN, &newer));
    /* promise: aclGetCannAttribute: newer chips */
    CHECK(newer == 1);

    /* Options: 0 until they are set, for the process and for a context. */
    int64_t option = -1;
    OK(aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &option));
    /* promise: aclrtGetSysParamOpt: 0 before it is set */
    CHECK(option == 0);
    IS(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &option), ACL_ERROR_RT_SYSPARAMOPT_NOT_SET);
    OK(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1));
    OK(aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &option));
    /* promise: aclrtCtxSetSysParamOpt: for the process too */
    CHECK(option == 1);
    OK(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, 2));
    OK(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &option));
    /* promise: aclrtSetSysParamOpt: not for the context */
    CHECK(option == 1);
    /* Of another library: frameworks set it before their first tensor. */
    extern int HcclSetConfig(int, int64_t);
    CHECK(HcclSetConfig(0, 0) == 0);
    /* The first of a group gets its root, so that each process of the group is refused the next. */
    extern int HcclGetRootInfo(void *);
    extern int HcclCommInitRootInfo(uint32_t, const void *, uint32_t, void **);
    CHECK(HcclGetRootInfo(NULL) == 0);
    IS(HcclCommInitRootInfo(1, NULL, 0, NULL), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    said = aclGetRecentErrMsg();
    CHECK(said != NULL && strstr(said, "HcclCommInitRootInfo") != NULL && strstr(said, "HCCL") != NULL);

    /* What only a profiler or a compiler would use. */
    /* promise: aclGetCompileoptSize: an empty value */
    CHECK(aclGetCompileoptSize(ACL_PRECISION_MODE) == 1);
    CHECK(MsprofGetHashId("name", 4) == MsprofGetHashId("names", 4));
    CHECK(MsprofGetHashId("name", 4) != MsprofGetHashId("game", 4));
    const uint64_t cycles = MsprofSysCycleTime();
    CHECK(MsprofSysCycleTime() >= cycles);
    /* promise: MsprofGetHashId: succeed */
    /* promise: MsprofSysCycleTime: succeed */
    /* promise: MsprofRegisterCallback: succeed */
    /* promise: MsprofReportApi: succeed */
    CHECK(MsprofRegisterCallback(1, NULL) == 0 && MsprofReportApi(0, NULL) == 0);
    /* promise: MsprofReportAdditionalInfo, MsprofReportCompactInfo: succeed */
    CHECK(MsprofReportAdditionalInfo(0, "x", 1) == 0 && MsprofReportCompactInfo(0, "x", 1) == 0);
    /* promise: aclAppLog: more arguments than are read */
    aclAppLog(ACL_INFO, "main", "state.c", 1, "a line of the program's, %d", 7);

    IS(aclrtDeviceCanAccessPeer(&can, 0, 0), ACL_ERROR_INVALID_PARAM);
    CHECK(aclCreateTensorDesc(ACL_FLOAT, 0, NULL, ACL_FORMAT_ND) == NULL);
    said = aclGetRecentErrMsg();
    CHECK(said != NULL && strstr(said, "aclCreateTensorDesc") != NULL && strstr(said, "not supported") != NULL);
    IS(aclopSetAttrBool(NULL, "a", 1), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    CHECK(aclGetTensorDescNumDims(NULL) == 0);
    /* A function that does not exist leaves the latest failure as it is. */
    IS(aclrtGetLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_INVALID_PARAM);

    OK(aclrtResetDevice(0));
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclFinalize());
    IS(aclFinalize(), ACL_ERROR_REPEAT_FINALIZE);
    IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    return 0;
}
