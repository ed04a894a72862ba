/* Streams, events, callbacks, host functions, and what is done in their order. */
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

static atomic_int order;
static atomic_int gate;

static void wait_for_gate(void *unused)
{
    (void)unused;
    while (!atomic_load(&gate)) {
        usleep(1000);
    }
}

static void note(void *place)
{
    *(int *)place = atomic_fetch_add(&order, 1) + 1;
}

static atomic_int serving;
static pthread_t server;

static void *serve(void *unused)
{
    (void)unused;
    while (atomic_load(&serving)) {
        aclError code = aclrtProcessReport(50);
        CHECK(code == 0 || code == ACL_ERROR_RT_REPORT_TIMEOUT || code == ACL_ERROR_RT_THREAD_SUBSCRIBE);
    }
    return NULL;
}

/* How many streams have a thread. Others come and go: the one that set up the device may still end. */
static int stream_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    int count = 0;
    struct dirent *task;
    while ((task = readdir(tasks)) != NULL) {
        char path[300], name[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file != NULL) {
            count += fgets(name, sizeof(name), file) != NULL && strncmp(name, "acl stream ", 11) == 0;
            fclose(file);
        }
    }
    closedir(tasks);
    return count;
}

/* A stream has a thread from the first work that cannot be done at once. */
static void threads_of_streams(void *memory)
{
    enum { STREAMS = 32 };
    aclrtStream streams[STREAMS];
    aclrtEvent event = NULL;
    OK(aclrtCreateEvent(&event));
    for (int i = 0; i < STREAMS; i++) {
        OK(aclrtCreateStreamWithConfig(&streams[i], 0, 3));
        OK(aclrtRecordEvent(event, streams[i]));
        OK(aclrtSynchronizeStream(streams[i]));
    }
    CHECK(stream_threads() == 0);
    for (int i = 0; i < 5; i++) {
        OK(aclrtMemsetAsync(memory, 8, 1, 8, streams[0]));
        OK(aclrtMemsetAsync(memory, 8, 1, 8, streams[1]));
    }
    /* A thread has its name before it does any work. */
    OK(aclrtSynchronizeStream(streams[0]));
    OK(aclrtSynchronizeStream(streams[1]));
    CHECK(stream_threads() == 2);
    for (int i = 0; i < STREAMS; i++) {
        OK(aclrtDestroyStream(streams[i]));
    }
    OK(aclrtDestroyEvent(event));
}

/* Copies from device to device run in the order of their stream, beside the program: on one device,
 * over each other, and to another device on a stream of the source. */
static void between_devices(aclrtStream stream, unsigned char *back)
{
    const size_t size = 4 * MIB;
    void *first = NULL, *second = NULL, *far = NULL;
    unsigned char *host = NULL;
    OK(aclrtMalloc(&first, size, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc(&second, size, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost((void **)&host, size));
    OK(aclrtMemset(second, size, 0, size));
    int32_t can = 0;
    OK(aclrtDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 1);
    OK(aclrtSetDevice(1));
    OK(aclrtDeviceEnablePeerAccess(0, 0));
    OK(aclrtMalloc(&far, size, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(far, size, 0, size));
    OK(aclrtSetDevice(0));
    OK(aclrtDeviceEnablePeerAccess(1, 0));
    fill_pattern(host, size, 3);
    memset(back, 1, size);

    atomic_store(&gate, 0);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtMemcpyAsync(first, size, host, size, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtMemcpyAsync(second, size, first, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    /* promise: aclrtMemcpyAsync: from device to device */
    OK(aclrtMemcpyAsync(far, size, second, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    OK(aclrtMemcpyAsync((char *)second + 1000, MIB, second, MIB, ACL_MEMCPY_DEFAULT, stream));
    /* Nothing has happened yet. */
    unsigned char byte = 7;
    OK(aclrtMemcpy(&byte, 1, (char *)far + size - 1, 1, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(byte == 0);
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpy(back, size, far, size, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(back, size, 3));
    OK(aclrtMemcpy(back, MIB, (char *)second + 1000, MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(back, MIB, 3));

    /* To the same place, with nothing to do; and from memory that is gone when its turn comes. */
    OK(aclrtMemcpyAsync(first, size, first, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    atomic_store(&gate, 0);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtMemcpyAsync(first, size, second, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    OK(aclrtFree(second));
    atomic_store(&gate, 1);
    IS(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtFree(first));
    OK(aclrtFree(far));
    /* promise: aclrtFreeHost: before its copy is done */
    OK(aclrtFreeHost(host));
}

int main(void)
{
    aclrtStream stream = NULL, second = NULL;
    IS(aclrtCreateStream(&stream), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclInit(""));
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateStreamWithConfig(&second, 99, ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC));
    int32_t id = -1, other_id = -1;
    OK(aclrtStreamGetId(stream, &id));
    OK(aclrtStreamGetId(second, &other_id));
    /* promise: aclrtStreamGetId: differ */
    CHECK(id != other_id);
    uint32_t value = 0;
    OK(aclrtStreamGetPriority(second, &value));
    /* promise: aclrtCreateStreamWithConfig: priorities are clamped */
    /* promise: aclrtStreamGetPriority: priorities are clamped */
    /* promise: aclrtStreamGetFlags: priorities are clamped */
    CHECK(value == 7);
    OK(aclrtStreamGetFlags(second, &value));
    CHECK(value == 3);
    OK(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE));
    OK(aclrtSetStreamOverflowSwitch(stream, 1));
    OK(aclrtGetStreamOverflowSwitch(stream, &value));
    /* promise: aclrtSetStreamFailureMode: kept */
    /* promise: aclrtSetStreamOverflowSwitch: kept */
    /* promise: aclrtGetStreamOverflowSwitch: kept */
    CHECK(value == 1);

    /* A stream runs beside the program, in order. */
    void *device = NULL;
    unsigned char *host = NULL, *back = NULL;
    OK(aclrtMalloc(&device, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    threads_of_streams(device);
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    OK(aclrtMallocHost((void **)&back, 4 * MIB));
    fill_pattern(host, 4 * MIB, 1);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtMemcpyAsync(device, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtMemcpyAsync(back, 4 * MIB, device, 4 * MIB, ACL_MEMCPY_DEFAULT, stream));
    aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
    OK(aclrtStreamQuery(stream, &status));
    /* promise: aclrtStreamQuery: ready or not */
    CHECK(status == ACL_STREAM_STATUS_NOT_READY);
    /* promise: aclrtSynchronizeStreamWithTimeout: too late */
    IS(aclrtSynchronizeStreamWithTimeout(stream, 20), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    /* promise: aclrtMemcpyAsync: in order, beside the caller */
    CHECK(back[0] == 0 && back[4 * MIB - 1] == 0);
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeStream(stream));
    CHECK(has_pattern(back, 4 * MIB, 1));
    OK(aclrtStreamQuery(stream, &status));
    CHECK(status == ACL_STREAM_STATUS_COMPLETE);

    /* Host memory that is freed early stays until its copy is done. */
    atomic_store(&gate, 0);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    /* promise: aclrtMemsetAsync: in order */
    OK(aclrtMemsetAsync(host, 4 * MIB, 5, 4 * MIB, stream));
    OK(aclrtMemcpyAsync(device, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtFreeHost(host));
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeStreamWithTimeout(stream, -1));
    OK(aclrtMemcpy(back, 4 * MIB, device, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(back[0] == 5 && back[4 * MIB - 1] == 5);

    /* Memory that the library does not know is copied in the call. */
    static unsigned char plain[MIB];
    fill_pattern(plain, sizeof(plain), 9);
    OK(aclrtMemcpyAsync(device, MIB, plain, MIB, ACL_MEMCPY_HOST_TO_DEVICE, NULL));
    memset(plain, 0, sizeof(plain));
    /* promise: aclrtMemcpyAsync: host memory that is not known */
    OK(aclrtMemcpyAsync(plain, MIB, device, MIB, ACL_MEMCPY_DEVICE_TO_HOST, NULL));
    CHECK(has_pattern(plain, sizeof(plain), 9));
    IS(aclrtMemcpyAsync(plain, MIB, back, MIB, ACL_MEMCPY_DEFAULT, stream), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    IS(aclrtMemcpyAsync(plain, MIB, device, MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream), ACL_ERROR_RT_PARAM_INVALID);

    /* Events order streams. */
    aclrtEvent start = NULL, end = NULL, old = NULL;
    OK(aclrtCreateEventExWithFlag(&start, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
    OK(aclrtCreateEventExWithFlag(&end, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
    OK(aclrtCreateEvent(&old));
    aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    OK(aclrtQueryEventStatus(start, &recorded));
    /* promise: aclrtQueryEventStatus: never recorded */
    CHECK(recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    OK(aclrtQueryEventStatus(old, &recorded));
    CHECK(recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    /* promise: aclrtSynchronizeEvent: never recorded */
    OK(aclrtSynchronizeEvent(old));
    float elapsed = -1;
    IS(aclrtEventElapsedTime(&elapsed, start, end), ACL_ERROR_RT_PARAM_INVALID);
    int first = 0, then = 0;
    atomic_store(&gate, 0);
    OK(aclrtRecordEvent(start, stream));
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtLaunchHostFunc(stream, note, &first));
    OK(aclrtRecordEvent(end, stream));
    /* promise: aclrtStreamWaitEvent: orders streams */
    OK(aclrtStreamWaitEvent(second, end));
    /* promise: aclrtLaunchHostFunc: in order */
    OK(aclrtLaunchHostFunc(second, note, &then));
    /* promise: aclrtSynchronizeEventWithTimeout: too late */
    IS(aclrtSynchronizeEventWithTimeout(end, 10), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    OK(aclrtQueryEventStatus(end, &recorded));
    CHECK(recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeDevice());
    /* promise: aclrtSynchronizeDevice: all streams */
    CHECK(first == 1 && then == 2);
    OK(aclrtEventElapsedTime(&elapsed, start, end));
    /* promise: aclrtEventElapsedTime, aclrtEventGetTimestamp: milliseconds */
    CHECK(elapsed >= 10);
    uint64_t early = 0, late = 0;
    OK(aclrtEventGetTimestamp(start, &early));
    OK(aclrtEventGetTimestamp(end, &late));
    CHECK(late > early);
    OK(aclrtRecordEvent(old, NULL));
    OK(aclrtSynchronizeEvent(old));
    OK(aclrtResetEvent(old, NULL));
    OK(aclrtSynchronizeStream(NULL));
    OK(aclrtQueryEventStatus(old, &recorded));
    CHECK(recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    /* promise: aclrtCreateEvent, aclrtRecordEvent, aclrtResetEvent: the older kind only */
    IS(aclrtResetEvent(start, NULL), ACL_ERROR_RT_PARAM_INVALID);

    between_devices(stream, back);

    /* Numbers that one stream writes and another waits for. */
    OK(aclrtMemset(device, 4 * MIB, 0, 4 * MIB));
    /* promise: aclrtValueWrite, aclrtValueWait: between streams */
    OK(aclrtValueWait(device, 5, ACL_STREAM_WAIT_VALUE_GEQ, second));
    OK(aclrtMemsetAsync((char *)device + 64, 8, 1, 8, second));
    OK(aclrtStreamQuery(second, &status));
    CHECK(status == ACL_STREAM_STATUS_NOT_READY);
    OK(aclrtValueWrite(device, 6, 0, stream));
    OK(aclrtSynchronizeStream(second));

    /* Callbacks run in the thread that processes reports. */
    int called = 0;
    /* promise: aclrtLaunchCallback: without a thread for it */
    IS(aclrtLaunchCallback(note, &called, ACL_CALLBACK_BLOCK, stream), ACL_ERROR_RT_STREAM_NO_CB_REG);
    IS(aclrtProcessReport(10), ACL_ERROR_RT_THREAD_SUBSCRIBE);
    OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
    /* promise: aclrtProcessReport: nothing in time, no subscription */
    /* promise: aclrtSubscribeReport: nothing in time, no subscription */
    /* promise: aclrtUnSubscribeReport: nothing in time, no subscription */
    IS(aclrtProcessReport(10), ACL_ERROR_RT_REPORT_TIMEOUT);
    OK(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream));
    IS(aclrtProcessReport(10), ACL_ERROR_RT_THREAD_SUBSCRIBE);
    atomic_store(&serving, 1);
    CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
    OK(aclrtSubscribeReport((uint64_t)server, stream));
    OK(aclrtLaunchCallback(note, &called, ACL_CALLBACK_BLOCK, stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(called == 3);
    OK(aclrtUnSubscribeReport((uint64_t)server, stream));
    atomic_store(&serving, 0);
    CHECK(pthread_join(server, NULL) == 0);

    /* A failure on a stream is returned by the call that waits. */
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    void *gone = NULL;
    OK(aclrtMalloc(&gone, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    atomic_store(&gate, 0);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtMemcpyAsync(gone, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtFree(gone));
    atomic_store(&gate, 1);
    IS(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    CHECK(strstr(aclGetRecentErrMsg(), "not all of") != NULL);
    OK(aclrtSynchronizeStream(stream));

    /* A stream that is destroyed by force drops what it has not begun, and blocks nobody. */
    atomic_store(&gate, 0);
    OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
    OK(aclrtRecordEvent(end, stream));
    OK(aclrtDestroyStreamForce(stream));
    OK(aclrtSynchronizeEvent(end));
    IS(aclrtStreamQuery(stream, &status), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtDestroyStream(stream), ACL_ERROR_RT_PARAM_INVALID);
    atomic_store(&gate, 1);
    OK(aclrtDestroyStream(second));
    OK(aclrtDestroyEvent(start));
    OK(aclrtDestroyEvent(end));
    IS(aclrtDestroyEvent(end), ACL_ERROR_RT_PARAM_INVALID);

    /* Another context's stream. */
    OK(aclrtCreateStream(&stream));
    OK(aclrtSetDevice(1));
    /* promise: aclrtMemcpyAsync: another context's stream */
    IS(aclrtMemcpyAsync(device, MIB, back, MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream), ACL_ERROR_RT_STREAM_CONTEXT);
    OK(aclFinalize());
    return 0;
}
