/* Two processes: physical memory by both forms of handles, with and without a trust list, and
 * memory by a key. The first starts the second as `sharing WAY` and talks to it through pipes. */
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum way { LISTED, ANYONE, FABRIC, KEY_LISTED, KEY_ANYONE, KEY_SMALL, KEY_CLOSED, UNLISTED, WAYS };

struct message {
    int32_t process;
    uint64_t shareable;
    aclrtMemFabricHandle fabric;
    char key[65];
    int done;
};

static void give(int fd, const struct message *message)
{
    CHECK(write(fd, message, sizeof(*message)) == (ssize_t)sizeof(*message));
}

static struct message take(int fd)
{
    struct message message;
    CHECK(read(fd, &message, sizeof(message)) == (ssize_t)sizeof(message));
    return message;
}

static const size_t SIZE = 4 << 20;

/* Reads what the other process wrote, and answers below it. */
static void use(void *memory, size_t size)
{
    unsigned char *back = (unsigned char *)malloc(size);
    OK(aclrtMemcpy(back, size, memory, size, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(back, size, 1));
    fill_pattern(back, size, 2);
    OK(aclrtMemcpy(memory, size, back, size, ACL_MEMCPY_HOST_TO_DEVICE));
    /* To memory of its own, on the same device. */
    void *own = NULL;
    OK(aclrtMalloc(&own, size, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemcpy(own, size, memory, size, ACL_MEMCPY_DEVICE_TO_DEVICE));
    memset(back, 0, size);
    OK(aclrtMemcpy(back, size, own, size, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(back, size, 2));
    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes(memory, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_DEVICE);
    OK(aclrtFree(own));
    free(back);
}

static int importer(enum way way)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    struct message message;
    memset(&message, 0, sizeof(message));
    OK(aclrtDeviceGetBareTgid(&message.process));
    /* promise: aclrtDeviceGetBareTgid: of this process */
    CHECK(message.process == (int32_t)getpid());
    give(1, &message);
    message = take(0);
    if (way >= KEY_LISTED && way <= KEY_CLOSED) {
        void *memory = NULL, *same = NULL;
        if (way == KEY_SMALL) {
            /* A forged place of the block: where its page ends, and far beyond. */
            char forged[sizeof(message.key)];
            const unsigned long long places[] = {2 * MIB, 1ull << 63, ~0ull};
            for (int i = 0; i < 3; i++) {
                memcpy(forged, message.key, sizeof(forged));
                CHECK(forged[47] == 'x');
                snprintf(forged + 48, 17, "%016llx", places[i]);
                IS(aclrtIpcMemImportByKey(&memory, forged, 1), ACL_ERROR_RT_PARAM_INVALID);
                CHECK(memory == NULL);
                /* promise: aclrtMemExportToShareableHandle: twice */
                IS(aclrtIpcMemClose(forged), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
            }
        }
        OK(aclrtIpcMemImportByKey(&memory, message.key, 1));
        OK(aclrtIpcMemImportByKey(&same, message.key, 0));
        /* promise: aclrtIpcMemImportByKey: twice */
        CHECK(memory == same);
        /* promise: aclrtIpcMemClose: the exporter first */
        if (way == KEY_CLOSED) {
            /* The exporter closes first. */
            give(1, &message);
            take(0);
        }
        use(memory, way == KEY_SMALL ? 100 : SIZE);
        OK(aclrtIpcMemClose(message.key));
        OK(aclrtIpcMemClose(message.key));
        IS(aclrtIpcMemClose(message.key), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        /* The vendor's samples free what they have closed. */
        IS(aclrtFree(memory), ACL_ERROR_RT_PARAM_INVALID);
    } else if (way == UNLISTED) {
        aclrtDrvMemHandle handle = NULL;
        /* promise: aclrtMemImportFromShareableHandle: not listed */
        IS(aclrtMemImportFromShareableHandle(message.shareable, 0, &handle), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        CHECK(handle == NULL);
        IS(aclrtMemImportFromShareableHandle(message.shareable + 1000, 0, &handle), ACL_ERROR_RT_INVALID_HANDLE);
    } else {
        aclrtDrvMemHandle handle = NULL, again = NULL;
        if (way == FABRIC) {
            OK(aclrtMemImportFromShareableHandleV2(&message.fabric, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, 0, &handle));
        } else {
            OK(aclrtMemImportFromShareableHandle(message.shareable, 0, &handle));
            OK(aclrtMemImportFromShareableHandle(message.shareable, 0, &again));
            CHECK(handle == again);
            OK(aclrtFreePhysical(again));
        }
        void *memory = NULL;
        OK(aclrtReserveMemAddress(&memory, SIZE, 0, NULL, 0));
        OK(aclrtMapMem(memory, SIZE, 0, handle, 0));
        use(memory, SIZE);
        OK(aclrtUnmapMem(memory));
        OK(aclrtReleaseMemAddress(memory));
        OK(aclrtFreePhysical(handle));
    }
    message.done = 1;
    give(1, &message);
    OK(aclFinalize());
    return 0;
}

static void exporter(const char *program, enum way way)
{
    char number[16];
    snprintf(number, sizeof(number), "%d", (int)way);
    int to[2], from[2];
    CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from[1], 1);
    char *arguments[] = {(char *)program, number, NULL};
    extern char **environ;
    pid_t child;
    CHECK(posix_spawn(&child, program, &actions, NULL, arguments, environ) == 0);
    close(from[1]);
    close(to[0]);
    struct message message = take(from[0]);
    int32_t process = message.process;
    void *memory = NULL;
    size_t size = SIZE;
    aclrtDrvMemHandle handle = NULL;
    unsigned char *host = (unsigned char *)malloc(SIZE);
    if (way >= KEY_LISTED && way <= KEY_CLOSED) {
        void *before = NULL;
        size = way == KEY_SMALL ? 100 : SIZE;
        OK(aclrtMalloc(&before, size, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtMalloc(&memory, size, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtIpcMemGetExportKey(memory, size, message.key, sizeof(message.key), way == KEY_ANYONE));
        /* promise: aclrtIpcMemGetExportKey: a string of 64 */
        CHECK(strlen(message.key) == 64);
        if (way != KEY_ANYONE) {
            OK(aclrtIpcMemSetImportPid(message.key, &process, 1));
        } else {
            IS(aclrtIpcMemSetImportPid(message.key, &process, 1), ACL_ERROR_RT_NO_PERMISSION);
        }
    } else {
        aclrtPhysicalMemProp prop = on_device(0);
        OK(aclrtMallocPhysical(&handle, SIZE, &prop, 0));
        OK(aclrtReserveMemAddress(&memory, SIZE, 0, NULL, 1));
        OK(aclrtMapMem(memory, SIZE, 0, handle, 0));
        if (way == FABRIC) {
            OK(aclrtMemExportToShareableHandleV2(handle, 0, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, &message.fabric));
            /* promise: aclrtMemExportToShareableHandleV2: over the fabric */
            /* promise: aclrtMemSetPidToShareableHandleV2: over the fabric */
            /* promise: aclrtMemImportFromShareableHandleV2: over the fabric */
            OK(aclrtMemSetPidToShareableHandleV2(&message.fabric, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, &process, 1));
        } else {
            OK(aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, way == ANYONE, &message.shareable));
            IS(aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, 0, &message.shareable),
               ACL_ERROR_RT_DRV_INTERNAL_ERROR);
            if (way == LISTED) {
                /* promise: aclrtMemSetPidToShareableHandle: one that does not exist is no error */
                const int32_t listed[3] = {0x3fffff00, process, 0x3fffff01};
                OK(aclrtMemSetPidToShareableHandle(message.shareable, (int32_t *)listed, 3));
            } else if (way == ANYONE) {
                IS(aclrtMemSetPidToShareableHandle(message.shareable, &process, 1), ACL_ERROR_RT_NO_PERMISSION);
            }
            aclrtDrvMemHandle own = NULL;
            IS(aclrtMemImportFromShareableHandle(message.shareable, 0, &own), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        }
    }
    fill_pattern(host, size, 1);
    OK(aclrtMemcpy(memory, size, host, size, ACL_MEMCPY_HOST_TO_DEVICE));
    give(to[1], &message);
    if (way == KEY_CLOSED) {
        take(from[0]);
        OK(aclrtIpcMemClose(message.key));
        give(to[1], &message);
    }
    CHECK(take(from[0]).done == 1);
    if (way != UNLISTED) {
        OK(aclrtMemcpy(host, size, memory, size, ACL_MEMCPY_DEVICE_TO_HOST));
        CHECK(has_pattern(host, size, 2));
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    if (handle != NULL) {
        OK(aclrtUnmapMem(memory));
        OK(aclrtReleaseMemAddress(memory));
        OK(aclrtFreePhysical(handle));
    } else if (way == KEY_LISTED) {
        OK(aclrtIpcMemClose(message.key));
        OK(aclrtFree(memory));
    } else {
        OK(aclrtFree(memory));
        IS(aclrtIpcMemClose(message.key), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    }
    close(to[1]);
    close(from[0]);
    posix_spawn_file_actions_destroy(&actions);
    free(host);
}

int main(int count, char **arguments)
{
    if (count > 1) {
        return importer((enum way)atoi(arguments[1]));
    }
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    for (int way = 0; way < WAYS; way++) {
        exporter(arguments[0], (enum way)way);
    }
    OK(aclFinalize());
    return 0;
}
