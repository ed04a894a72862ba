/* Notifies, streams that are aborted, stopped or configured, and waits with a timeout. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

static atomic_int order, began, go;
static int first, second;

static void write_first(void *unused)
{
    (void)unused;
    usleep(20000);
    first = atomic_fetch_add(&order, 1);
}

static void write_second(void *unused)
{
    (void)unused;
    second = atomic_fetch_add(&order, 1);
}

static void hold(void *unused)
{
    (void)unused;
    atomic_store(&began, 1);
    while (!atomic_load(&go)) {
        usleep(1000);
    }
}

static void count(void *number)
{
    atomic_fetch_add((atomic_int *)number, 1);
}

static void notifies(void)
{
    aclrtStream one, other;
    OK(aclrtCreateStream(&one));
    OK(aclrtCreateStream(&other));
    aclrtNotify notify = NULL, next = NULL;
    /* promise: aclrtCreateNotify: of a process */
    OK(aclrtCreateNotify(&notify, ACL_NOTIFY_DEFAULT));
    OK(aclrtCreateNotify(&next, ACL_NOTIFY_DEFAULT));
    uint32_t id = 0, next_id = 0;
    OK(aclrtGetNotifyId(notify, &id));
    OK(aclrtGetNotifyId(next, &next_id));
    /* promise: aclrtGetNotifyId: differ */
    CHECK(id != next_id);
    for (int round = 0; round < 20; round++) {
        atomic_store(&order, 0);
        OK(aclrtWaitAndResetNotify(notify, other, 0));
        OK(aclrtLaunchHostFunc(other, write_second, NULL));
        OK(aclrtLaunchHostFunc(one, write_first, NULL));
        OK(aclrtRecordNotify(notify, one));
        OK(aclrtSynchronizeStream(other));
        /* promise: aclrtRecordNotify, aclrtWaitAndResetNotify: in the order of both streams */
        CHECK(first == 0 && second == 1);
    }
    /* A record that is taken back is waited for again. */
    OK(aclrtRecordNotify(notify, one));
    OK(aclrtSynchronizeStream(one));
    OK(aclrtNotifyBatchReset(&notify, 1));
    OK(aclrtWaitAndResetNotify(notify, other, 1));
    /* promise: aclrtNotifyBatchReset: clears */
    IS(aclrtSynchronizeStream(other), ACL_ERROR_RT_WAIT_TIMEOUT);
    /* Nobody waits for what is destroyed. */
    OK(aclrtWaitAndResetNotify(next, other, 0));
    /* promise: aclrtDestroyNotify: ends waits */
    OK(aclrtDestroyNotify(next));
    OK(aclrtSynchronizeStream(other));
    IS(aclrtDestroyNotify(next), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtRecordNotify(next, one), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtDestroyNotify(notify));
    OK(aclrtDestroyStream(one));
    OK(aclrtDestroyStream(other));
}

static void stops(void)
{
    atomic_int done = 0;
    aclrtStream stream, other;
    aclrtEvent event;
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateStream(&other));
    OK(aclrtCreateEvent(&event));
    /* A stream that waits for another is aborted: what is behind the wait is not done. */
    OK(aclrtLaunchHostFunc(other, hold, NULL));
    OK(aclrtRecordEvent(event, other));
    aclrtEventStatus status = ACL_EVENT_STATUS_COMPLETE;
    OK(aclrtQueryEvent(event, &status));
    /* promise: aclrtQueryEvent: 1 before it is reached */
    CHECK(status == ACL_EVENT_STATUS_NOT_READY);
    OK(aclrtStreamWaitEvent(stream, event));
    OK(aclrtLaunchHostFunc(stream, count, &done));
    /* promise: aclrtStreamAbort: drops what has not begun */
    OK(aclrtStreamAbort(stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(atomic_load(&done) == 0);
    /* It can be used again. Stopping ends the wait only. */
    OK(aclrtStreamWaitEvent(stream, event));
    OK(aclrtLaunchHostFunc(stream, count, &done));
    for (int i = 0; i < 20000 && atomic_load(&done) == 0; i++) {
        OK(aclrtStreamStop(stream));
        usleep(1000);
    }
    /* promise: aclrtStreamStop: goes on with what is behind */
    CHECK(atomic_load(&done) == 1);
    /* promise: aclrtStreamWaitEventWithTimeout: fails the stream */
    OK(aclrtStreamWaitEventWithTimeout(stream, event, 20));
    IS(aclrtSynchronizeStream(stream), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    OK(aclrtStreamWaitEventWithTimeout(stream, event, -1));
    atomic_store(&go, 1);
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtQueryEvent(event, &status));
    CHECK(status == ACL_EVENT_STATUS_COMPLETE);
    OK(aclrtDestroyEvent(event));
    OK(aclrtDestroyStream(stream));
    OK(aclrtDestroyStream(other));
    IS(aclrtStreamAbort(stream), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtStreamStop(NULL), ACL_ERROR_INVALID_PARAM);
}

static void configurations(void)
{
    int32_t least = -1, greatest = -1;
    OK(aclrtDeviceGetStreamPriorityRange(&least, &greatest));
    /* promise: aclrtDeviceGetStreamPriorityRange: eight */
    CHECK(least == 7 && greatest == 0);
    /* promise: aclrtCreateStreamConfigHandle: not NULL */
    aclrtStreamConfigHandle *config = aclrtCreateStreamConfigHandle();
    CHECK(config != NULL);
    uint32_t priority = 5;
    size_t flags = ACL_STREAM_FAST_LAUNCH;
    OK(aclrtSetStreamConfigOpt(config, ACL_RT_STREAM_PRIORITY, &priority, sizeof(priority)));
    OK(aclrtSetStreamConfigOpt(config, ACL_RT_STREAM_FLAG, &flags, sizeof(flags)));
    /* promise: aclrtSetStreamConfigOpt: the size of a value */
    IS(aclrtSetStreamConfigOpt(config, ACL_RT_STREAM_FLAG, &flags, 4), ACL_ERROR_INVALID_PARAM);
    IS(aclrtSetStreamConfigOpt(config, (aclrtStreamConfigAttr)9, &flags, 8), ACL_ERROR_INVALID_PARAM);
    aclrtStream stream = NULL;
    OK(aclrtCreateStreamV2(&stream, config));
    uint32_t found = 0;
    OK(aclrtStreamGetPriority(stream, &found));
    /* promise: aclrtCreateStreamV2: as configured */
    CHECK(found == 5);
    OK(aclrtStreamGetFlags(stream, &found));
    CHECK(found == ACL_STREAM_FAST_LAUNCH);
    aclrtStreamAttrValue value;
    memset(&value, 0xFF, sizeof(value));
    OK(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE));
    OK(aclrtGetStreamAttribute(stream, ACL_STREAM_ATTR_FAILURE_MODE, &value));
    /* promise: aclrtGetStreamAttribute: as set */
    CHECK(value.failureMode == ACL_STOP_ON_FAILURE);
    OK(aclrtDestroyStream(stream));
    /* promise: aclrtDestroyStreamConfigHandle: once */
    OK(aclrtDestroyStreamConfigHandle(config));
    IS(aclrtDestroyStreamConfigHandle(config), ACL_ERROR_INVALID_PARAM);
    IS(aclrtCreateStreamV2(&stream, config), ACL_ERROR_INVALID_PARAM);
    OK(aclrtCreateStreamV2(&stream, NULL));
    OK(aclrtDestroyStream(stream));
}

static void questions(void)
{
    uint32_t cores = 0, all = 0;
    OK(aclrtGetResInCurrentThread(ACL_RT_DEV_RES_CUBE_CORE, &cores));
    OK(aclrtGetDeviceResLimit(0, ACL_RT_DEV_RES_CUBE_CORE, &all));
    /* promise: aclrtGetResInCurrentThread: all cores */
    CHECK(cores == all);
    static aclrtErrorInfo info;
    memset(&info, 0xFF, sizeof(info));
    OK(aclrtGetErrorVerbose(0, &info));
    /* promise: aclrtGetErrorVerbose: none */
    CHECK(info.tryRepair == 0 && info.hasDetail == 0 && info.errorType == 0);
    aclrtHostMemMapCapability capability = ACL_RT_HOST_MEM_MAP_SUPPORTED;
    OK(aclrtHostMemMapCapabilities(0, ACL_RT_HAC_TYPE_AIC, &capability));
    /* promise: aclrtHostMemMapCapabilities: no engine */
    CHECK(capability == ACL_RT_HOST_MEM_MAP_NOT_SUPPORTED);
    IS(aclrtHostMemMapCapabilities(0, (aclrtHacType)10, &capability), ACL_ERROR_RT_PARAM_INVALID);
}

int main(void)
{
    aclrtNotify notify = NULL;
    IS(aclrtCreateNotify(&notify, 0), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclrtSetDevice(0));
    notifies();
    stops();
    configurations();
    questions();
    /* What is left ends with aclFinalize. */
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateNotify(&notify, 0));
    OK(aclrtWaitAndResetNotify(notify, stream, 0));
    OK(aclFinalize());
    return 0;
}
