/* What programs do by mistake or out of spite, one way for each run. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static size_t free_memory(void)
{
    size_t available = 0, total = 0;
    OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE, &available, &total));
    return available;
}

/* --- Functions on a stream that call the library --------------------------------------------- */

static aclrtStream first, second;
static aclrtEvent event;
static void *block, *host;
static atomic_int called;

static void call_back(void *unused)
{
    (void)unused;
    /* The thread is the stream's own, and has no device of its own at first. */
    int32_t device = -1;
    if (atomic_load(&called) == 0) {
        IS(aclrtGetDevice(&device), ACL_ERROR_RT_CONTEXT_NULL);
    }
    OK(aclrtSetDevice(0));
    void *memory = NULL;
    OK(aclrtMalloc(&memory, 5000, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(memory, 5000, 1, 5000));
    OK(aclrtFree(memory));
    OK(aclrtMemcpyAsync(block, MIB, host, MIB, ACL_MEMCPY_HOST_TO_DEVICE, first));
    OK(aclrtRecordEvent(event, second));
    OK(aclrtSynchronizeEvent(event));
    /* Waiting for itself would be for ever. */
    IS(aclrtSynchronizeStream(first), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtSynchronizeDevice(), ACL_ERROR_RT_PARAM_INVALID);
    atomic_fetch_add(&called, 1);
}

static void destroy_own_stream(void *stream)
{
    OK(aclrtDestroyStream(*(aclrtStream *)stream));
    IS(aclrtDestroyStream(*(aclrtStream *)stream), ACL_ERROR_RT_PARAM_INVALID);
    atomic_fetch_add(&called, 1);
}

static void end_the_library(void *unused)
{
    (void)unused;
    OK(aclFinalize());
    atomic_fetch_add(&called, 1);
}

static void wait_until_called(int times)
{
    while (atomic_load(&called) < times) {
        usleep(1000);
    }
}

static void callbacks(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&first));
    OK(aclrtCreateStream(&second));
    OK(aclrtCreateEvent(&event));
    OK(aclrtMalloc(&block, MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost(&host, MIB));
    for (int i = 0; i < 10; i++) {
        OK(aclrtLaunchHostFunc(first, call_back, NULL));
    }
    OK(aclrtSynchronizeStream(first));
    OK(aclrtSynchronizeStream(first));
    CHECK(atomic_load(&called) == 10);
    /* What stands behind it is dropped, and blocks nobody. */
    OK(aclrtLaunchHostFunc(second, destroy_own_stream, &second));
    for (int i = 0; i < 10; i++) {
        aclrtMemcpyAsync(block, MIB, host, MIB, ACL_MEMCPY_HOST_TO_DEVICE, second);
    }
    wait_until_called(11);
    IS(aclrtSynchronizeStream(second), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtLaunchHostFunc(first, end_the_library, NULL));
    wait_until_called(12);
    IS(aclrtSynchronizeStream(first), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtFree(block));
    OK(aclrtFreeHost(host));
}

static atomic_int serving;
static aclrtStream reported;

static void destroy_reported(void *unused)
{
    (void)unused;
    OK(aclrtDestroyStreamForce(reported));
    atomic_fetch_add(&called, 1);
}

static void *serve(void *unused)
{
    while (atomic_load(&serving)) {
        aclrtProcessReport(20);
    }
    return unused;
}

/* A callback destroys the stream that waits for it. */
static void callback_destroys(void)
{
    OK(aclrtSetDevice(0));
    pthread_t server;
    atomic_store(&serving, 1);
    CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
    for (int i = 0; i < 5; i++) {
        OK(aclrtCreateStream(&reported));
        OK(aclrtSubscribeReport((uint64_t)server, reported));
        OK(aclrtLaunchCallback(destroy_reported, NULL, ACL_CALLBACK_BLOCK, reported));
        wait_until_called(i + 1);
        IS(aclrtUnSubscribeReport((uint64_t)server, reported), ACL_ERROR_RT_PARAM_INVALID);
    }
    atomic_store(&serving, 0);
    CHECK(pthread_join(server, NULL) == 0);
    OK(aclrtResetDevice(0));
}

static void late_calls(void)
{
    aclrtSynchronizeDeviceWithTimeout(1000);
    aclrtFree(block);
    aclFinalize();
}

static void leave(void *unused)
{
    (void)unused;
    exit(0);
}

/* The thread of a stream ends the process. */
static void exit_in_callback(void)
{
    OK(aclrtSetDevice(0));
    OK(aclrtMalloc(&block, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtCreateStream(&first));
    atexit(late_calls);
    OK(aclrtLaunchHostFunc(first, leave, NULL));
    aclrtSynchronizeStream(first);
    pause();
}

/* --- Threads ---------------------------------------------------------------------------------- */

static void *passing_thread(void *number)
{
    OK(aclrtSetDevice(0));
    void *memory = NULL;
    aclrtStream stream = NULL;
    aclrtEvent done = NULL;
    OK(aclrtMalloc(&memory, 1000, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateEvent(&done));
    OK(aclrtMemsetAsync(memory, 1000, (int)(size_t)number, 1000, stream));
    OK(aclrtRecordEvent(done, stream));
    OK(aclrtSynchronizeEvent(done));
    unsigned char byte = 0;
    OK(aclrtMemcpy(&byte, 1, (char *)memory + 999, 1, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(byte == (unsigned char)(size_t)number);
    IS(aclrtFree(number), number == NULL ? ACL_ERROR_INVALID_PARAM : ACL_ERROR_RT_PARAM_INVALID);
    CHECK(aclGetRecentErrMsg() != NULL);
    OK(aclrtDestroyEvent(done));
    OK(aclrtDestroyStream(stream));
    OK(aclrtFree(memory));
    OK(aclrtResetDevice(0));
    return NULL;
}

/* A thousand threads, some tens at a time: the last reset closes the device. */
static void threads(void)
{
    enum { AT_ONCE = 40, ROUNDS = 25 };
    OK(aclrtSetDevice(0));
    const size_t before = free_memory();
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t all[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            CHECK(pthread_create(&all[i], NULL, passing_thread, (void *)(size_t)(round * AT_ONCE + i)) == 0);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            CHECK(pthread_join(all[i], NULL) == 0);
        }
    }
    CHECK(before - free_memory() <= 2 * MIB);
    OK(aclrtResetDevice(0));
    IS(aclrtResetDevice(0), ACL_ERROR_RT_CONTEXT_RELEASE_ERROR);
}

enum { ROUNDS = 60, RACERS = 4 };
static pthread_barrier_t barrier;
static void *shared_block, *shared_host, *area;
static aclrtDrvMemHandle handle;
static aclrtStream stream;
static aclrtEvent shared_event;
static atomic_int freed, host_freed, destroyed, unmapped, physical_freed, released, event_destroyed;

static void *racer(void *unused)
{
    OK(aclrtSetDevice(0));
    for (int i = 0; i < ROUNDS; i++) {
        pthread_barrier_wait(&barrier);
        /* Each object is ended by exactly one of the threads. */
        atomic_fetch_add(&freed, aclrtFree(shared_block) == 0);
        atomic_fetch_add(&unmapped, aclrtUnmapMem(area) == 0);
        atomic_fetch_add(&physical_freed, aclrtFreePhysical(handle) == 0);
        atomic_fetch_add(&released, aclrtReleaseMemAddress(area) == 0);
        aclrtMapMem(area, 2 * MIB, 0, handle, 0);
        atomic_fetch_add(&host_freed, aclrtFreeHost(shared_host) == 0);
        /* It may return that a fill met freed memory. */
        atomic_fetch_add(&destroyed, aclrtDestroyStream(stream) != ACL_ERROR_RT_PARAM_INVALID);
        atomic_fetch_add(&event_destroyed, aclrtDestroyEvent(shared_event) == 0);
        pthread_barrier_wait(&barrier);
    }
    return unused;
}

static void races(void)
{
    OK(aclrtSetDevice(0));
    const size_t before = free_memory();
    CHECK(pthread_barrier_init(&barrier, NULL, RACERS + 1) == 0);
    pthread_t all[RACERS];
    for (int i = 0; i < RACERS; i++) {
        CHECK(pthread_create(&all[i], NULL, racer, NULL) == 0);
    }
    aclrtPhysicalMemProp prop = on_device(0);
    int ended = 0;
    for (int i = 0; i < ROUNDS; i++) {
        OK(aclrtMalloc(&shared_block, i % 2 ? 100 : 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtMallocHost(&shared_host, 4096));
        OK(aclrtReserveMemAddress(&area, 2 * MIB, 0, NULL, 0));
        OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
        OK(aclrtMapMem(area, 2 * MIB, 0, handle, 0));
        OK(aclrtCreateStream(&stream));
        OK(aclrtCreateEvent(&shared_event));
        OK(aclrtMemsetAsync(shared_block, 100, 1, 100, stream));
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        /* A map that came between unmap and release is the only thing that may be left. */
        ended += aclrtUnmapMem(area) == 0;
        atomic_fetch_add(&released, aclrtReleaseMemAddress(area) == 0);
    }
    for (int i = 0; i < RACERS; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    CHECK(freed == ROUNDS && host_freed == ROUNDS);
    CHECK(destroyed == ROUNDS);
    CHECK(event_destroyed == ROUNDS);
    CHECK(physical_freed == ROUNDS && released == ROUNDS);
    CHECK(unmapped + ended >= ROUNDS);
    CHECK(before - free_memory() <= 2 * MIB);
    OK(aclrtResetDeviceForce(0));
}

/* --- Several threads at the same addresses ------------------------------------------------------ */

enum { PAGES = 4, MAPPERS = 3, TRIES = 100 };
static atomic_int mappers, released;

static void *mapper(void *number)
{
    unsigned state = (unsigned)(size_t)number + 1;
    aclrtPhysicalMemProp prop = on_device(0);
    aclrtDrvMemHandle own = NULL, found = NULL;
    OK(aclrtSetDevice(0));
    OK(aclrtMallocPhysical(&own, 2 * MIB, &prop, 0));
    for (int i = 0; i < TRIES; i++) {
        state = state * 1664525u + 1013904223u;
        char *page = (char *)area + (state >> 16) % PAGES * 2 * MIB;
        aclError code = aclrtMapMem(page, 2 * MIB, 0, own, 0);
        if (code != 0) {
            /* Another thread is there, or the addresses are being released. */
            CHECK(code == ACL_ERROR_RT_DRV_INTERNAL_ERROR);
            continue;
        }
        /* What is mapped stays reserved, and is this thread's alone. */
        OK(aclrtMemset(page, 100, (int)i, 100));
        OK(aclrtMemRetainAllocationHandle(page, &found));
        CHECK(found == own);
        OK(aclrtFreePhysical(found));
        IS(aclrtMapMem(page, 2 * MIB, 0, own, 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        OK(aclrtUnmapMem(page));
    }
    /* On one CPU each of these may always have a mapping when the other one releases: it gets its chance. */
    while (atomic_load(&released) == 0) {
        usleep(100);
    }
    OK(aclrtFreePhysical(own));
    atomic_fetch_sub(&mappers, 1);
    return NULL;
}

/* Threads map at the same pages while another releases and reserves them again. */
static void same_pages(void)
{
    OK(aclrtSetDevice(0));
    const size_t before = free_memory();
    OK(aclrtReserveMemAddress(&area, PAGES * 2 * MIB, 0, NULL, 0));
    pthread_t all[MAPPERS];
    atomic_store(&mappers, MAPPERS);
    atomic_store(&released, 0);
    for (size_t i = 0; i < MAPPERS; i++) {
        CHECK(pthread_create(&all[i], NULL, mapper, (void *)i) == 0);
    }
    while (atomic_load(&mappers) > 0) {
        aclError code = aclrtReleaseMemAddress(area);
        if (code == 0) {
            void *same = NULL;
            atomic_fetch_add(&released, 1);
            /* An unmap that was just ending may have had them a moment longer. */
            while (aclrtReserveMemAddress(&same, PAGES * 2 * MIB, 0, area, 0) != 0) {
                usleep(100);
            }
            CHECK(same == area);
        } else {
            CHECK(code == ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        }
    }
    for (int i = 0; i < MAPPERS; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    OK(aclrtReleaseMemAddress(area));
    CHECK(free_memory() == before);
    OK(aclrtResetDevice(0));
}

/* --- Handles of objects that are gone --------------------------------------------------------- */

static void stale_handles(void)
{
    enum { MANY = 300 };
    OK(aclrtSetDevice(0));
    static aclrtStream streams[MANY];
    static aclrtEvent events[MANY];
    static aclrtContext contexts[MANY];
    static aclrtDrvMemHandle handles[MANY];
    static void *blocks[MANY];
    aclrtPhysicalMemProp prop = on_device(0);
    for (int i = 0; i < MANY; i++) {
        OK(aclrtCreateContext(&contexts[i], 0));
        OK(aclrtDestroyContext(contexts[i]));
        OK(aclrtSetDevice(0));
        OK(aclrtCreateStream(&streams[i]));
        OK(aclrtDestroyStream(streams[i]));
        OK(aclrtCreateEvent(&events[i]));
        OK(aclrtDestroyEvent(events[i]));
        OK(aclrtMallocPhysical(&handles[i], 2 * MIB, &prop, 0));
        OK(aclrtFreePhysical(handles[i]));
    }
    /* New objects are where the old ones were, and none of the old handles finds them. */
    aclrtContext new_context = NULL;
    aclrtStream new_stream = NULL;
    aclrtEvent new_event = NULL;
    aclrtDrvMemHandle new_handle = NULL;
    OK(aclrtCreateContext(&new_context, 0));
    OK(aclrtCreateStream(&new_stream));
    OK(aclrtCreateEvent(&new_event));
    OK(aclrtMallocPhysical(&new_handle, 2 * MIB, &prop, 0));
    for (int i = 0; i < MANY; i++) {
        CHECK(contexts[i] != new_context && streams[i] != new_stream);
        CHECK(events[i] != new_event && handles[i] != new_handle);
        IS(aclrtSetCurrentContext(contexts[i]), ACL_ERROR_RT_PARAM_INVALID);
        IS(aclrtDestroyContext(contexts[i]), ACL_ERROR_RT_CONTEXT_NULL);
        IS(aclrtSynchronizeStream(streams[i]), ACL_ERROR_RT_PARAM_INVALID);
        IS(aclrtDestroyStreamForce(streams[i]), ACL_ERROR_RT_PARAM_INVALID);
        IS(aclrtDestroyEvent(events[i]), ACL_ERROR_RT_PARAM_INVALID);
        IS(aclrtFreePhysical(handles[i]), ACL_ERROR_RT_PARAM_INVALID);
    }
    OK(aclrtSynchronizeStream(new_stream));
    OK(aclrtDestroyEvent(new_event));
    OK(aclrtFreePhysical(new_handle));
    OK(aclrtDestroyContext(new_context));
    /* Addresses do come back: then they are the new block's. */
    OK(aclrtSetDevice(0));
    for (int i = 0; i < MANY; i++) {
        OK(aclrtMalloc(&blocks[i], 700, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtFree(blocks[i]));
        IS(aclrtFree(blocks[i]), ACL_ERROR_RT_PARAM_INVALID);
    }
    OK(aclrtResetDeviceForce(0));
}

/* --- Fork and signals ------------------------------------------------------------------------- */

/* Children of a process whose streams are working: refused, whatever the threads held. */
static void fork_busy(void)
{
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&first));
    OK(aclrtMalloc(&block, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost(&host, 4 * MIB));
    fill_pattern(host, 4 * MIB, 5);
    for (int i = 0; i < 30; i++) {
        for (int j = 0; j < 5; j++) {
            OK(aclrtMemcpyAsync(block, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, first));
        }
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            void *memory = NULL;
            IS(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_CONTEXT_NULL);
            IS(aclrtMemcpy(host, 10, block, 10, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_RT_CONTEXT_NULL);
            IS(aclrtSynchronizeStream(first), ACL_ERROR_RT_CONTEXT_NULL);
            IS(aclrtDestroyStreamForce(first), ACL_ERROR_RT_CONTEXT_NULL);
            IS(aclFinalize(), ACL_ERROR_RT_CONTEXT_NULL);
            CHECK(strstr(aclGetRecentErrMsg(), "fork") != NULL);
            exit(0);
        }
        int status = 1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    OK(aclrtSynchronizeStream(first));
    memset(host, 0, 4 * MIB);
    OK(aclrtMemcpy(host, 4 * MIB, block, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(host, 4 * MIB, 5));
    OK(aclFinalize());
}

static atomic_int alarms;
static pthread_t main_thread;

static void on_alarm(int number)
{
    (void)number;
    /* The threads of streams take no signals. */
    if (!pthread_equal(pthread_self(), main_thread)) {
        _exit(3);
    }
    atomic_fetch_add(&alarms, 1);
}

/* A timer that interrupts everything. */
static void signals(void)
{
    main_thread = pthread_self();
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_alarm;
    /* The emulated driver has a moment before it takes a command in which a signal ends it with EINTR
     * unless the kernel repeats it. The real one has none. */
    action.sa_flags = SA_RESTART;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&first));
    OK(aclrtMallocHost(&host, MIB));
    struct itimerval timer = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    aclrtPhysicalMemProp prop = on_device(0);
    for (int i = 0; i < 200 || atomic_load(&alarms) < 20; i++) {
        OK(aclrtMalloc(&block, i % 2 ? 100 : 2 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtMemcpyAsync(block, 100, host, 100, ACL_MEMCPY_HOST_TO_DEVICE, first));
        OK(aclrtSynchronizeStreamWithTimeout(first, 60000));
        OK(aclrtMemcpy(host, 100, block, 100, ACL_MEMCPY_DEVICE_TO_HOST));
        OK(aclrtFree(block));
        OK(aclrtReserveMemAddress(&area, 4 * MIB, 0, NULL, 0));
        OK(aclrtMallocPhysical(&handle, 4 * MIB, &prop, 0));
        OK(aclrtMapMem(area, 4 * MIB, 0, handle, 0));
        OK(aclrtUnmapMem(area));
        OK(aclrtFreePhysical(handle));
        OK(aclrtReleaseMemAddress(area));
    }
    memset(&timer, 0, sizeof(timer));
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    OK(aclFinalize());
}

/* --- Anything ---------------------------------------------------------------------------------- */

/* Addresses and handles that some thread was given, alive or not. */
enum kind { BLOCK, AREA, MEMORY, STREAM, EVENT, CONTEXT, KINDS };
enum { KNOWN = 6, CALLS = 3000, CALLERS = 3 };
static _Atomic(void *) known[KINDS][KNOWN];
static unsigned char buffers[CALLERS][1 << 16];
static unsigned seed = 1;

static unsigned next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Mostly what was asked for. */
static void *any(unsigned *state, enum kind kind)
{
    kind = next(state) % 8 == 0 ? (enum kind)(next(state) % KINDS) : kind;
    char *found = (char *)atomic_load(&known[kind][next(state) % KNOWN]);
    switch (next(state) % 24) {
    case 0:
        return NULL;
    case 1:
        return found + 1;
    case 2:
        return found + 2 * MIB;
    case 3:
        return found + ((size_t)1 << 24);
    case 4:
        return (void *)(0x5A00000000000000ull | (unsigned long long)next(state) << 24);
    case 5:
        return (void *)(0x12C000000000ull + (unsigned long long)next(state) * 4096);
    default:
        return found;
    }
}

/* Host memory that is written or read must be the program's own, so this is in the driver's range. */
static void *any_of_the_driver(unsigned *state)
{
    size_t found = (size_t)any(state, next(state) % 2 ? BLOCK : AREA);
    return (void *)(found >= 0x12C000000000 && found < 0x180000000000 ? found : 0x12C000000000);
}

static void keep(void *value, unsigned *state, enum kind kind)
{
    atomic_store(&known[kind][next(state) % KNOWN], value);
}

static void nothing(void *unused)
{
    (void)unused;
}

static size_t any_size(unsigned *state)
{
    static const size_t sizes[] = {0, 1, 100, 4096, 65536, 2 << 20, 3 << 20, 4 << 20, (size_t)1 << 40, (size_t)-1};
    return next(state) % 2 ? 2 * MIB : sizes[next(state) % (sizeof(sizes) / sizeof(sizes[0]))];
}

static void *anything(void *number)
{
    unsigned state = (unsigned)(size_t)number * 7919 + seed;
    unsigned char *buffer = buffers[(size_t)number];
    aclrtSetDevice(0);
    for (int i = 0; i < CALLS; i++) {
        void *made = NULL;
        uint64_t shareable = 0;
        size_t size = any_size(&state), small_size = next(&state) % sizeof(buffers[0]);
        aclrtPhysicalMemProp asked = on_device(next(&state) % 3);
        aclrtMemAccessDesc access;
        memset(&access, 0, sizeof(access));
        access.flags = ACL_RT_MEM_ACCESS_FLAGS_READWRITE;
        access.location.type = (aclrtMemLocationType)(next(&state) % 2);
        access.location.id = next(&state) % 2;
        aclrtPtrAttributes attributes;
        char key[65];
        switch (next(&state) % 26) {
        case 0: if (aclrtMalloc(&made, size, ACL_MEM_MALLOC_HUGE_FIRST) == 0) keep(made, &state, BLOCK); break;
        case 1: aclrtFree(any(&state, BLOCK)); break;
        case 2: if (aclrtMallocPhysical(&made, size, &asked, 0) == 0) keep(made, &state, MEMORY); break;
        case 3: aclrtFreePhysical(any(&state, MEMORY)); break;
        case 4: if (aclrtReserveMemAddress(&made, size, 0, NULL, 1) == 0) keep(made, &state, AREA); break;
        case 5: aclrtReleaseMemAddress(any(&state, AREA)); break;
        case 6: aclrtMapMem(any(&state, AREA), size, 0, any(&state, MEMORY), 0); break;
        case 7: aclrtUnmapMem(any(&state, AREA)); break;
        case 8: aclrtMemSetAccess(any(&state, AREA), size, &access, 1); break;
        case 9: if (aclrtMemRetainAllocationHandle(any(&state, AREA), &made) == 0) keep(made, &state, MEMORY); break;
        case 10: if (aclrtCreateStream(&made) == 0) keep(made, &state, STREAM); break;
        case 11: aclrtDestroyStream(any(&state, STREAM)); break;
        case 12: aclrtDestroyStreamForce(any(&state, STREAM)); break;
        case 13: if (aclrtCreateEvent(&made) == 0) keep(made, &state, EVENT); break;
        case 14: aclrtDestroyEvent(any(&state, EVENT)); break;
        case 15: aclrtRecordEvent(any(&state, EVENT), any(&state, STREAM)); break;
        case 16: aclrtStreamWaitEvent(any(&state, STREAM), any(&state, EVENT)); break;
        case 17:
            aclrtMemsetAsync(any_of_the_driver(&state), size, 3, next(&state) % 2 ? 100 : size, any(&state, STREAM));
            break;
        case 18: aclrtLaunchHostFunc(any(&state, STREAM), nothing, NULL); break;
        case 19: aclrtSynchronizeStreamWithTimeout(any(&state, STREAM), 100); break;
        case 20: aclrtPointerGetAttributes(any(&state, AREA), &attributes); break;
        case 21: aclrtMemExportToShareableHandle(any(&state, MEMORY), ACL_MEM_HANDLE_TYPE_NONE, 1, &shareable); break;
        case 22:
            if (aclrtIpcMemGetExportKey(any(&state, BLOCK), size, key, sizeof(key), 1) == 0) {
                aclrtIpcMemClose(key);
            }
            break;
        case 23:
            aclrtMemcpy(any_of_the_driver(&state), size, buffer, small_size, ACL_MEMCPY_HOST_TO_DEVICE);
            break;
        case 24:
            aclrtMemcpy(buffer, small_size, any_of_the_driver(&state), small_size, ACL_MEMCPY_DEVICE_TO_HOST);
            break;
        default:
            switch (next(&state) % 8) {
            case 0: aclrtResetDevice((int32_t)(next(&state) % 2)); break;
            case 1: if (next(&state) % 20 == 0) aclrtResetDeviceForce(0); break;
            case 2: if (aclrtCreateContext(&made, (int32_t)(next(&state) % 2)) == 0) keep(made, &state, CONTEXT); break;
            case 3: aclrtDestroyContext(any(&state, CONTEXT)); break;
            case 4: aclrtSetCurrentContext(any(&state, CONTEXT)); break;
            default: aclrtSetDevice((int32_t)(next(&state) % 2)); break;
            }
        }
    }
    return NULL;
}

/* Calls in any order with anything, in several threads: none crashes, hangs, or loses memory. */
static void random_calls(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    const size_t before = free_memory();
    pthread_t all[CALLERS];
    for (size_t i = 0; i < CALLERS; i++) {
        CHECK(pthread_create(&all[i], NULL, anything, (void *)i) == 0);
    }
    for (size_t i = 0; i < CALLERS; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    OK(aclFinalize());
    aclrtResetDeviceForce(0);
    aclrtResetDeviceForce(1);
    OK(aclrtSetDevice(0));
    OK(aclrtSetDevice(1));
    OK(aclrtResetDeviceForce(0));
    OK(aclrtResetDeviceForce(1));
    OK(aclrtSetDevice(0));
    CHECK(free_memory() == before);
}

/* --- Any call may be the first ----------------------------------------------------------------- */

static void reserve_and_release(void)
{
    void *addresses = NULL;
    OK(aclrtReserveMemAddress(&addresses, 2 * MIB, 0, NULL, 1));
    OK(aclrtReleaseMemAddress(addresses));
}

static void reserve_cached_and_release(void)
{
    void *addresses = NULL;
    OK(aclrtReserveMemAddressNoUCMemory(&addresses, 2 * MIB, 0, NULL, 1));
    OK(aclrtReleaseMemAddress(addresses));
}

static void malloc_and_free_physical(void)
{
    aclrtPhysicalMemProp prop = on_device(1);
    aclrtDrvMemHandle memory = NULL;
    OK(aclrtMallocPhysical(&memory, 2 * MIB, &prop, 0));
    OK(aclrtFreePhysical(memory));
}

static void map_nothing(void)
{
    IS(aclrtMapMem((void *)(2 * MIB), 2 * MIB, 0, (aclrtDrvMemHandle)(2 * MIB), 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtUnmapMem((void *)(2 * MIB)), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtReleaseMemAddress((void *)(2 * MIB)), ACL_ERROR_RT_PARAM_INVALID);
}

static void copy_without_a_device(void)
{
    char from[16] = "from", to[16] = "to";
    IS(aclrtMemcpy(to, sizeof(to), from, sizeof(from), ACL_MEMCPY_HOST_TO_HOST), ACL_ERROR_RT_CONTEXT_NULL);
    void *on_device = (void *)((size_t)0x12c0 << 32);
    IS(aclrtMemcpy(on_device, sizeof(from), from, sizeof(from), ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtMemset(on_device, 16, 0, 16), ACL_ERROR_RT_CONTEXT_NULL);
}

static void malloc_without_a_device(void)
{
    void *memory = NULL;
    IS(aclrtMalloc(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtFree((void *)(2 * MIB)), ACL_ERROR_RT_PARAM_INVALID);
}

static void ask_about_addresses(void)
{
    aclrtPtrAttributes attributes;
    void *start = NULL;
    size_t size = 0;
    /* The driver's, but far from the lowest ones, which other threads may have reserved meanwhile. */
    void *nobodys = (void *)((size_t)0x17c0 << 32);
    IS(aclrtPointerGetAttributes(nobodys, &attributes), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtMemGetAddressRange(nobodys, &start, &size), ACL_ERROR_RT_PARAM_INVALID);
}

static void set_and_reset_device(void)
{
    OK(aclrtSetDevice(1));
    OK(aclrtResetDevice(1));
}

static void finalize_only(void)
{
    OK(aclFinalize());
}

static void first_calls(void)
{
    static void (*const calls[])(void) = {
        reserve_and_release,     reserve_cached_and_release, malloc_and_free_physical, map_nothing,
        copy_without_a_device,   malloc_without_a_device,    ask_about_addresses,      set_and_reset_device,
        finalize_only,
    };
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            /* For ever is longer than this. */
            alarm(300);
            calls[i]();
            if (calls[i] != finalize_only) {
                /* And the first after all was closed. */
                OK(aclFinalize());
                calls[i]();
            }
            exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0) {
            fprintf(stderr, "first call %zu: status %#x\n", i, (unsigned)status);
            exit(1);
        }
    }
}

/* --- The session is closed under threads that use it ------------------------------------------- */

enum { CLOSINGS = 100 };
static atomic_int closing;

static void *user_of_the_session(void *unused)
{
    while (atomic_load(&closing)) {
        reserve_and_release();
        malloc_and_free_physical();
        ask_about_addresses();
    }
    return unused;
}

static void closings(void)
{
    pthread_t all[3];
    atomic_store(&closing, 1);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&all[i], NULL, user_of_the_session, NULL) == 0);
    }
    for (int i = 0; i < CLOSINGS; i++) {
        OK(aclInit(NULL));
        reserve_and_release();
        OK(aclFinalize());
    }
    atomic_store(&closing, 0);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } ways[] = {
        {"callbacks", callbacks},         {"callback-destroys", callback_destroys},
        {"exit-in-callback", exit_in_callback}, {"threads", threads},
        {"races", races},                 {"stale-handles", stale_handles},
        {"fork-busy", fork_busy},         {"signals", signals},
        {"random", random_calls},         {"same-pages", same_pages},
        {"first-calls", first_calls},     {"closings", closings},
    };
    if (count > 2) {
        seed = (unsigned)atoi(arguments[2]);
    }
    for (size_t i = 0; count > 1 && i < sizeof(ways) / sizeof(ways[0]); i++) {
        if (strcmp(arguments[1], ways[i].name) == 0) {
            ways[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no such way\n");
    return 2;
}
