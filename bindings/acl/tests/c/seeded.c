/* Two threads with a stream each pass bytes on by events: a program for seeded schedules. With
 * ASCEND_SCENARIO=disturbed an error of the library ends it early; wrong bytes never do. */
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

#define SIZE ((size_t)8192)
#define ROUNDS 3

/* An error, which may be what the schedule wanted. */
#define TRY(call)                                                                 \
    do {                                                                          \
        aclError code_ = (call);                                                  \
        if (code_ != ACL_SUCCESS) {                                               \
            gave_up(#call, code_);                                                \
        }                                                                         \
    } while (0)

static void gave_up(const char *call, aclError code)
{
    const char *how = getenv("ASCEND_SCENARIO"), *said = aclGetRecentErrMsg();
    fprintf(stderr, "%s is %d\n  %s\n", call, code, said != NULL ? said : "(nothing was said)");
    exit(how != NULL && strcmp(how, "disturbed") == 0 ? 0 : 1);
}

static void *first_memory, *second_memory;
static unsigned char *input, *output;
static aclrtEvent filled, passed_on;
static pthread_barrier_t barrier;
static atomic_int functions;

static void count(void *unused)
{
    (void)unused;
    atomic_fetch_add(&functions, 1);
}

/* Passes on what the other stream has filled, and reads it back. */
static void *second_thread(void *unused)
{
    (void)unused;
    aclrtStream stream = NULL;
    TRY(aclrtSetDevice(0));
    TRY(aclrtCreateStream(&stream));
    for (unsigned round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&barrier); /* `filled` is recorded */
        TRY(aclrtStreamWaitEvent(stream, filled));
        TRY(aclrtMemcpyAsync(second_memory, SIZE, first_memory, SIZE, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
        TRY(aclrtRecordEvent(passed_on, stream));
        pthread_barrier_wait(&barrier); /* `passed_on` is recorded */
        TRY(aclrtMemcpyAsync(output, SIZE, second_memory, SIZE, ACL_MEMCPY_DEVICE_TO_HOST, stream));
        TRY(aclrtLaunchHostFunc(stream, count, NULL));
        TRY(aclrtSynchronizeStream(stream));
        pthread_barrier_wait(&barrier); /* the other stream has filled it without an error */
        CHECK(has_pattern(output, SIZE, round));
        CHECK(atomic_load(&functions) >= (int)round + 1);
    }
    TRY(aclrtDestroyStream(stream));
    return NULL;
}

int main(void)
{
    aclrtStream stream = NULL;
    pthread_t thread;
    TRY(aclInit(NULL));
    TRY(aclrtSetDevice(0));
    TRY(aclrtCreateStream(&stream));
    TRY(aclrtCreateEvent(&filled));
    TRY(aclrtCreateEvent(&passed_on));
    TRY(aclrtMalloc(&first_memory, SIZE, ACL_MEM_MALLOC_HUGE_FIRST));
    TRY(aclrtMalloc(&second_memory, SIZE, ACL_MEM_MALLOC_HUGE_FIRST));
    TRY(aclrtMallocHost((void **)&input, SIZE));
    TRY(aclrtMallocHost((void **)&output, SIZE));
    CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, second_thread, NULL) == 0);
    for (unsigned round = 0; round < ROUNDS; round++) {
        fill_pattern(input, SIZE, round);
        TRY(aclrtMemcpyAsync(first_memory, SIZE, input, SIZE, ACL_MEMCPY_HOST_TO_DEVICE, stream));
        TRY(aclrtRecordEvent(filled, stream));
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        /* What is done next must not be seen by the other stream's copy. */
        TRY(aclrtStreamWaitEvent(stream, passed_on));
        TRY(aclrtMemsetAsync(first_memory, SIZE, 0xff, SIZE, stream));
        TRY(aclrtLaunchHostFunc(stream, count, NULL));
        /* An event says that the work before it is over, only its own stream that it failed. */
        TRY(aclrtSynchronizeStream(stream));
        pthread_barrier_wait(&barrier);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(atomic_load(&functions) == 2 * ROUNDS);
    TRY(aclrtDestroyEvent(filled));
    TRY(aclrtDestroyEvent(passed_on));
    TRY(aclrtDestroyStream(stream));
    TRY(aclrtFree(first_memory));
    TRY(aclrtFree(second_memory));
    TRY(aclrtFreeHost(input));
    TRY(aclrtFreeHost(output));
    TRY(aclrtResetDevice(0));
    TRY(aclFinalize());
    return 0;
}
