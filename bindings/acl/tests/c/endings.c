/* Processes and threads that end in every way, with objects of every kind alive. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void *block, *small, *host, *area;
static aclrtDrvMemHandle handle;
static aclrtStream stream;
static char key[65];

static void make_objects(void)
{
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&stream));
    OK(aclrtMalloc(&block, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc(&small, 10, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost(&host, MIB));
    OK(aclrtReserveMemAddress(&area, 4 * MIB, 0, NULL, 1));
    aclrtPhysicalMemProp prop = on_device(1);
    OK(aclrtMallocPhysical(&handle, 4 * MIB, &prop, 0));
    OK(aclrtMapMem(area, 4 * MIB, 0, handle, 0));
    OK(aclrtIpcMemGetExportKey(block, 4 * MIB, key, sizeof(key), 1));
    for (int i = 0; i < 50; i++) {
        OK(aclrtMemcpyAsync(block, MIB, host, MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    }
}

/* Called while the process exits: the library answers, whatever is left of it. */
static void late_calls(void)
{
    aclrtSynchronizeDeviceWithTimeout(60000);
    aclrtFree(block);
    aclrtDestroyStreamForce(stream);
    aclFinalize();
    CHECK(aclrtFree(block) == ACL_ERROR_RT_PARAM_INVALID);
    aclGetRecentErrMsg();
    /* Memory that is left can be freed still. */
    OK(aclrtUnmapMem(area));
    OK(aclrtFreePhysical(handle));
    OK(aclrtReleaseMemAddress(area));
}

__attribute__((destructor)) static void latest_calls(void)
{
    void *memory;
    aclrtMalloc(&memory, 16, ACL_MEM_MALLOC_HUGE_FIRST);
    aclrtGetLastError(ACL_RT_THREAD_LEVEL);
}

static pthread_key_t at_thread_end;
/* What is freed must not be given to another thread before it is freed again. */
static pthread_mutex_t allocating = PTHREAD_MUTEX_INITIALIZER;

static void when_thread_ends(void *memory)
{
    pthread_mutex_lock(&allocating);
    OK(aclrtFree(memory));
    IS(aclrtFree(memory), ACL_ERROR_RT_PARAM_INVALID);
    pthread_mutex_unlock(&allocating);
    aclGetRecentErrMsg();
}

static void *short_thread(void *unused)
{
    void *memory;
    OK(aclrtSetDevice(0));
    pthread_mutex_lock(&allocating);
    OK(aclrtMalloc(&memory, 3000, ACL_MEM_MALLOC_HUGE_FIRST));
    pthread_mutex_unlock(&allocating);
    CHECK(pthread_setspecific(at_thread_end, memory) == 0);
    aclrtStream own;
    OK(aclrtCreateStream(&own));
    OK(aclrtMemsetAsync(memory, 100, 1, 100, own));
    if (unused != NULL) {
        OK(aclrtDestroyStream(own));
    }
    return NULL;
}

static void *busy_thread(void *unused)
{
    OK(aclrtSetDevice(0));
    for (;;) {
        void *memory;
        if (aclrtMalloc(&memory, 5000, ACL_MEM_MALLOC_HUGE_FIRST) == 0) {
            aclrtMemset(memory, 5000, 1, 5000);
            aclrtFree(memory);
        }
    }
    return unused;
}

int main(int count, char **arguments)
{
    const char *way = count > 1 ? arguments[1] : "";
    if (strcmp(way, "exit") == 0) {
        make_objects();
        return 0;
    }
    if (strcmp(way, "atexit") == 0) {
        make_objects();
        atexit(late_calls);
        return 0;
    }
    if (strcmp(way, "free-all") == 0) {
        make_objects();
        OK(aclrtSynchronizeStream(stream));
        OK(aclrtFree(block));
        OK(aclrtFree(small));
        OK(aclrtFreeHost(host));
        OK(aclrtUnmapMem(area));
        OK(aclrtReleaseMemAddress(area));
        OK(aclrtFreePhysical(handle));
        OK(aclFinalize());
        /* The driver has nothing of this process any more, while it lives. */
        printf("freed\n");
        fflush(stdout);
        getchar();
        return 0;
    }
    if (strcmp(way, "kill") == 0) {
        make_objects();
        kill(getpid(), SIGKILL);
    }
    if (strcmp(way, "busy") == 0) {
        make_objects();
        pthread_t thread;
        for (int i = 0; i < 3; i++) {
            CHECK(pthread_create(&thread, NULL, busy_thread, NULL) == 0);
        }
        usleep(50000);
        exit(0);
    }
    if (strcmp(way, "finalize-busy") == 0) {
        make_objects();
        pthread_t thread;
        for (int i = 0; i < 3; i++) {
            CHECK(pthread_create(&thread, NULL, busy_thread, NULL) == 0);
        }
        for (int i = 0; i < 5; i++) {
            usleep(10000);
            OK(aclInit(NULL));
            OK(aclFinalize());
        }
        _exit(0);
    }
    if (strcmp(way, "threads") == 0) {
        OK(aclInit(NULL));
        CHECK(pthread_key_create(&at_thread_end, when_thread_ends) == 0);
        pthread_t threads[8];
        for (int i = 0; i < 8; i++) {
            CHECK(pthread_create(&threads[i], NULL, short_thread, i % 2 ? &threads : NULL) == 0);
        }
        for (int i = 0; i < 8; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        OK(aclFinalize());
        return 0;
    }
    if (strcmp(way, "fork-before") == 0) {
        /* Questions about devices do not tie the library to the process. */
        uint32_t devices = 0;
        OK(aclrtGetDeviceCount(&devices));
        CHECK(aclrtGetSocName() != NULL);
        pid_t child = fork();
        if (child == 0) {
            make_objects();
            OK(aclFinalize());
            _exit(0);
        }
        int status = 1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        make_objects();
        OK(aclFinalize());
        return 0;
    }
    if (strcmp(way, "fork-after") == 0) {
        make_objects();
        for (int i = 0; i < 20; i++) {
            pid_t child = fork();
            if (child == 0) {
                void *memory;
                IS(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_CONTEXT_NULL);
                CHECK(strstr(aclGetRecentErrMsg(), "fork") != NULL);
                /* Exits as a program does, with its handlers. */
                exit(0);
            }
            int status = 1;
            CHECK(waitpid(child, &status, 0) == child && status == 0);
        }
        unsigned char byte = 0;
        OK(aclrtMemcpy(&byte, 1, block, 1, ACL_MEMCPY_DEVICE_TO_HOST));
        OK(aclFinalize());
        return 0;
    }
    fprintf(stderr, "no such way to end: %s\n", way);
    return 2;
}
