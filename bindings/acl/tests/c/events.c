/* What a wait means, and that every wait ends: one way for each run. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"

static atomic_int gate, called;

static void wait_for_gate(void *unused)
{
    (void)unused;
    while (!atomic_load(&gate)) {
        usleep(100);
    }
}

static void count(void *unused)
{
    (void)unused;
    atomic_fetch_add(&called, 1);
}

static aclrtEvent new_event(int newer)
{
    aclrtEvent event = NULL;
    OK(newer ? aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC) : aclrtCreateEvent(&event));
    return event;
}

static aclrtStream new_stream(void)
{
    aclrtStream stream = NULL;
    OK(aclrtCreateStream(&stream));
    return stream;
}

/* --- A wait is for the latest record before it, whatever becomes of the event then -------------- */

enum after { RECORDED_ELSEWHERE, RECORDED_BEHIND, RESET, DESTROYED, AFTERS };

static void wait_keeps_its_record(int newer, enum after after)
{
    atomic_store(&gate, 0);
    atomic_store(&called, 0);
    aclrtStream first = new_stream(), idle = new_stream(), waiting = new_stream();
    aclrtEvent event = new_event(newer);
    OK(aclrtLaunchHostFunc(first, wait_for_gate, NULL));
    OK(aclrtRecordEvent(event, first));
    OK(aclrtStreamWaitEvent(waiting, event));
    OK(aclrtLaunchHostFunc(waiting, count, NULL));
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    switch (after) {
    case RECORDED_ELSEWHERE:
        OK(aclrtRecordEvent(event, idle));
        OK(aclrtSynchronizeEvent(event));
        OK(aclrtQueryEventStatus(event, &status));
        CHECK(status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
        break;
    case RECORDED_BEHIND:
        OK(aclrtRecordEvent(event, waiting));
        break;
    case RESET:
        OK(aclrtResetEvent(event, idle));
        OK(aclrtSynchronizeStream(idle));
        OK(aclrtQueryEventStatus(event, &status));
        CHECK(status == ACL_EVENT_RECORDED_STATUS_NOT_READY);
        break;
    default:
        OK(aclrtDestroyEvent(event));
    }
    IS(aclrtSynchronizeStreamWithTimeout(waiting, 20), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK(atomic_load(&called) == 0);
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeStream(waiting));
    CHECK(atomic_load(&called) == 1);
    OK(aclrtSynchronizeStream(first));
    if (after != DESTROYED) {
        OK(aclrtSynchronizeEvent(event));
        OK(aclrtQueryEventStatus(event, &status));
        CHECK(status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
        OK(aclrtDestroyEvent(event));
    }
    OK(aclrtDestroyStream(first));
    OK(aclrtDestroyStream(idle));
    OK(aclrtDestroyStream(waiting));
}

static void waits(void)
{
    for (int newer = 0; newer < 2; newer++) {
        for (int after = 0; after < AFTERS; after++) {
            if (!newer || after != RESET) {
                wait_keeps_its_record(newer, (enum after)after);
            }
        }
    }
}

/* A reset is of the latest record before it, in the order of its stream. */
static void resets(void)
{
    aclrtStream first = new_stream(), second = new_stream();
    aclrtEvent event = new_event(0);
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    atomic_store(&gate, 0);
    OK(aclrtRecordEvent(event, second));
    OK(aclrtLaunchHostFunc(first, wait_for_gate, NULL));
    OK(aclrtResetEvent(event, first));
    OK(aclrtQueryEventStatus(event, &status));
    CHECK(status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    /* The second record is not reset. */
    OK(aclrtRecordEvent(event, second));
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeStream(first));
    OK(aclrtQueryEventStatus(event, &status));
    CHECK(status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    OK(aclrtResetEvent(event, first));
    OK(aclrtSynchronizeStream(first));
    OK(aclrtQueryEventStatus(event, &status));
    CHECK(status == ACL_EVENT_RECORDED_STATUS_NOT_READY);
}

/* --- A thread that waits for an event returns, whatever happens at the same time ---------------- */

static aclrtEvent awaited;
static atomic_int waiting;

static void *waiter(void *unused)
{
    OK(aclrtSetDevice(0));
    atomic_store(&waiting, 1);
    OK(aclrtSynchronizeEvent(awaited));
    return unused;
}

static void waiters(void)
{
    aclrtStream idle = new_stream();
    for (int round = 0; round < 200; round++) {
        aclrtStream stream = new_stream();
        awaited = new_event(0);
        atomic_store(&gate, 0);
        atomic_store(&waiting, 0);
        OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
        OK(aclrtRecordEvent(awaited, stream));
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) {
            CHECK(pthread_create(&threads[i], NULL, waiter, NULL) == 0);
        }
        while (!atomic_load(&waiting)) {
            sched_yield();
        }
        if (round % 2 == 0) {
            OK(aclrtResetEvent(awaited, stream));
        }
        if (round % 4 < 3) {
            atomic_store(&gate, 1);
        }
        if (round % 8 == 1) {
            OK(aclrtRecordEvent(awaited, idle));
        }
        if (round % 4 > 1) {
            OK(aclrtDestroyStreamForce(stream));
        }
        for (int i = 0; i < 2; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        atomic_store(&gate, 1);
        if (round % 4 < 2) {
            OK(aclrtDestroyStream(stream));
        }
        OK(aclrtDestroyEvent(awaited));
    }
}

/* --- A function that the stream waits for cannot wait for the stream ---------------------------- */

static aclrtStream own;

static void wait_for_itself(void *unused)
{
    (void)unused;
    wait_for_gate(NULL);
    OK(aclrtSetDevice(0));
    IS(aclrtSynchronizeEvent(awaited), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtSynchronizeStream(own), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtSynchronizeDevice(), ACL_ERROR_RT_PARAM_INVALID);
    count(NULL);
}

static void destroy_itself(void *unused)
{
    (void)unused;
    OK(aclrtDestroyStream(own));
    count(NULL);
}

static void functions(void)
{
    const uint64_t self = (uint64_t)pthread_self();
    own = new_stream();
    awaited = new_event(1);
    OK(aclrtLaunchHostFunc(own, wait_for_itself, NULL));
    OK(aclrtRecordEvent(awaited, own));
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeEvent(awaited));
    CHECK(atomic_load(&called) == 1);
    OK(aclrtSubscribeReport(self, own));
    OK(aclrtLaunchCallback(wait_for_itself, NULL, ACL_CALLBACK_BLOCK, own));
    OK(aclrtRecordEvent(awaited, own));
    OK(aclrtProcessReport(-1));
    OK(aclrtSynchronizeEvent(awaited));
    CHECK(atomic_load(&called) == 2);
    OK(aclrtLaunchCallback(destroy_itself, NULL, ACL_CALLBACK_BLOCK, own));
    OK(aclrtProcessReport(-1));
    CHECK(atomic_load(&called) == 3);
    IS(aclrtSynchronizeStream(own), ACL_ERROR_RT_PARAM_INVALID);
}

/* --- A stream does not wait for a callback that nobody will call -------------------------------- */

static void unsubscribed(void)
{
    const uint64_t self = (uint64_t)pthread_self();
    aclrtStream stream = new_stream();
    for (int round = 0; round < 20; round++) {
        /* Unsubscribed before the callback's turn, and after it. */
        atomic_store(&gate, round % 2);
        OK(aclrtSubscribeReport(self, stream));
        OK(aclrtLaunchHostFunc(stream, wait_for_gate, NULL));
        OK(aclrtLaunchCallback(count, NULL, ACL_CALLBACK_BLOCK, stream));
        usleep(500 * (useconds_t)round);
        OK(aclrtUnSubscribeReport(self, stream));
        atomic_store(&gate, 1);
        OK(aclrtSynchronizeStreamWithTimeout(stream, 60000));
    }
    CHECK(atomic_load(&called) == 0);
}

/* --- Where no thread can be started, calls fail and the stream is as it was --------------------- */

static void no_threads(void)
{
    enum { STREAMS = 100 };
    void *memory = NULL;
    OK(aclrtMalloc(&memory, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(memory, 8, 1, 8));
    aclrtStream first = new_stream(), streams[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        streams[i] = new_stream();
    }
    aclrtEvent event = new_event(0);
    OK(aclrtLaunchHostFunc(first, wait_for_gate, NULL));
    OK(aclrtRecordEvent(event, first));
    /* Room for some objects, but not for a stack. */
    unsigned long pages = 0;
    FILE *size = fopen("/proc/self/statm", "r");
    CHECK(size != NULL && fscanf(size, "%lu", &pages) == 1);
    CHECK(fclose(size) == 0);
    struct rlimit usual, limit;
    CHECK(getrlimit(RLIMIT_AS, &usual) == 0);
    limit = usual;
    limit.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + MIB;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    /* Stacks of threads that ended may be used first. */
    int started = 0;
    aclError code = 0;
    while (started < STREAMS && (code = aclrtStreamWaitEvent(streams[started], event)) == 0) {
        started++;
    }
    CHECK(started < STREAMS);
    CHECK(code == ACL_ERROR_RT_RESOURCE_ALLOC_FAIL);
    CHECK(strstr(aclGetRecentErrMsg(), "no thread could be started") != NULL);
    aclrtStream stream = streams[started];
    IS(aclrtLaunchHostFunc(stream, count, NULL), ACL_ERROR_RT_RESOURCE_ALLOC_FAIL);
    IS(aclrtMemsetAsync(memory, 8, 2, 8, stream), ACL_ERROR_RT_RESOURCE_ALLOC_FAIL);
    IS(aclrtResetEvent(event, stream), ACL_ERROR_RT_RESOURCE_ALLOC_FAIL);
    /* What takes no time needs no thread. */
    aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
    OK(aclrtStreamQuery(stream, &status));
    CHECK(status == ACL_STREAM_STATUS_COMPLETE);
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtRecordEvent(event, stream));
    OK(aclrtSynchronizeEvent(event));
    OK(aclrtStreamWaitEvent(stream, event));
    CHECK(setrlimit(RLIMIT_AS, &usual) == 0);
    /* Nothing of what was refused comes later. */
    OK(aclrtLaunchHostFunc(stream, count, NULL));
    OK(aclrtSynchronizeStream(stream));
    CHECK(atomic_load(&called) == 1);
    unsigned char byte = 0;
    OK(aclrtMemcpy(&byte, 1, memory, 1, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(byte == 1);
    atomic_store(&gate, 1);
    OK(aclrtSynchronizeDevice());
}

int main(int count_of, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } ways[] = {
        {"waits", waits},         {"resets", resets},         {"waiters", waiters},
        {"functions", functions}, {"unsubscribed", unsubscribed}, {"no-threads", no_threads},
    };
    for (size_t i = 0; count_of > 1 && i < sizeof(ways) / sizeof(ways[0]); i++) {
        if (strcmp(arguments[1], ways[i].name) == 0) {
            OK(aclInit(NULL));
            OK(aclrtSetDevice(0));
            ways[i].run();
            OK(aclrtResetDeviceForce(0));
            OK(aclFinalize());
            return 0;
        }
    }
    fprintf(stderr, "no such way\n");
    return 2;
}
