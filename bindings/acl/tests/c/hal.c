/* The names of the driver's own library: memory, addresses, access and sharing without a context,
 * and the same objects by the names of the other library; names of the runtime's inner layer. It
 * starts itself as `hal importer`. */
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ascend_hal.h"
#include "check.h"

#define SIZE (4 * MIB)

#define DRV(call, expected)                                                                       \
    do {                                                                                          \
        drvError_t code_ = (call);                                                                \
        if (code_ != (expected)) {                                                                \
            const char *said = aclGetRecentErrMsg();                                              \
            fprintf(stderr, "%s:%d: %s is %d, not %d\n  %s\n", __FILE__, __LINE__, #call,         \
                    (int)code_, (int)(expected), said != NULL ? said : "(nothing was said)");     \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
#define GOOD(call) DRV(call, DRV_ERROR_NONE)

/* Programs that load these names by themselves declare them. */
int32_t rtDeviceGetBareTgid(uint32_t *process);
int32_t rtDisableP2P(uint32_t device, uint32_t peer);
int32_t rtEnableP2P(uint32_t device, uint32_t peer, uint32_t flag);
int32_t rtGetDeviceInfo(uint32_t device, int32_t module, int32_t info, int64_t *value);
int32_t rtGetLogicDevIdByUserDevId(int32_t user, int32_t *logical);
int32_t rtIpcCloseMemory(const void *memory);
int32_t rtIpcDestroyMemoryName(const char *name);
int32_t rtIpcOpenMemory(void **memory, const char *name);
int32_t rtIpcSetMemoryName(const void *memory, uint64_t size, char *name, uint32_t length);
int32_t rtMemcpyAsyncWithoutCheckKind(void *to, uint64_t room, const void *from, uint64_t size, uint32_t kind,
                                      void *stream);
int32_t rtSetIpcMemorySuperPodPid(const char *name, uint32_t sdid, int32_t *processes, int32_t count);

struct shared {
    int32_t process;
    char key[65];
    uint64_t plain;
    struct MemShareHandle fabric;
};

static struct drv_mem_prop pages_of(unsigned device)
{
    struct drv_mem_prop prop;
    memset(&prop, 0, sizeof(prop));
    prop.side = MEM_DEV_SIDE;
    prop.devid = device;
    prop.pg_type = MEM_HUGE_PAGE_TYPE;
    prop.mem_type = MEM_HBM_TYPE;
    return prop;
}

static void give(int fd, const struct shared *shared)
{
    CHECK(write(fd, shared, sizeof(*shared)) == (ssize_t)sizeof(*shared));
}

static struct shared take(int fd)
{
    struct shared shared;
    CHECK(read(fd, &shared, sizeof(shared)) == (ssize_t)sizeof(shared));
    return shared;
}

/* Maps a handle at new addresses. */
static void *mapped(drv_mem_handle_t *handle)
{
    void *place = NULL;
    GOOD(halMemAddressReserve(&place, SIZE, 0, NULL, 0));
    GOOD(halMemMap(place, SIZE, 0, handle, 0));
    return place;
}

static void end(void *place, drv_mem_handle_t *handle)
{
    GOOD(halMemUnmap(place));
    GOOD(halMemAddressFree(place));
    GOOD(halMemRelease(handle));
}

static int importer(void)
{
    struct shared shared;
    memset(&shared, 0, sizeof(shared));
    shared.process = drvDeviceGetBareTgid();
    /* promise: drvDeviceGetBareTgid: of this process */
    CHECK(shared.process == (int32_t)getpid());
    give(1, &shared);
    shared = take(0);
    drv_mem_handle_t *handle = NULL;
    /* promise: halMemImportFromShareableHandle: an unknown device, by its number */
    DRV(halMemImportFromShareableHandle(shared.plain, 63, &handle), DRV_ERROR_INVALID_DEVICE);
    GOOD(halMemImportFromShareableHandle(shared.plain, 1, &handle));
    void *place = mapped(handle);
    unsigned char *bytes = (unsigned char *)malloc(SIZE);
    GOOD(drvMemcpy((DVdeviceptr)(uintptr_t)bytes, SIZE, (DVdeviceptr)(uintptr_t)place, SIZE));
    CHECK(has_pattern(bytes, SIZE, 1));
    end(place, handle);
    /* promise: halMemImportFromShareableHandleV2: by the long form */
    GOOD(halMemImportFromShareableHandleV2(MEM_HANDLE_TYPE_FABRIC, &shared.fabric, 0, &handle));
    place = mapped(handle);
    memset(bytes, 0, SIZE);
    GOOD(drvMemcpy((DVdeviceptr)(uintptr_t)bytes, SIZE, (DVdeviceptr)(uintptr_t)place, SIZE));
    CHECK(has_pattern(bytes, SIZE, 2));
    end(place, handle);
    OK(aclrtSetDevice(0));
    void *memory = NULL;
    /* promise: rtIpcOpenMemory: by a key of the exporter */
    OK(rtIpcOpenMemory(&memory, shared.key));
    memset(bytes, 0, SIZE);
    OK(aclrtMemcpy(bytes, SIZE, memory, SIZE, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(bytes, SIZE, 3));
    /* promise: rtIpcCloseMemory: by the address, once */
    OK(rtIpcCloseMemory(memory));
    IS(rtIpcCloseMemory(memory), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    free(bytes);
    give(1, &shared);
    return 0;
}

static void devices(void)
{
    uint32_t number = 0, ids[4] = {9, 9, 9, 9}, id = 9;
    /* promise: drvGetDevNum, drvGetDevIDs: the driver's numbers, as many as there is room for */
    GOOD(drvGetDevNum(&number));
    CHECK(number == 2);
    GOOD(drvGetDevIDs(ids, 1));
    CHECK(ids[0] == 0 && ids[1] == 9);
    GOOD(drvGetDevIDs(ids, 4));
    CHECK(ids[1] == 1 && ids[2] == 9);
    DRV(drvGetDevNum(NULL), DRV_ERROR_INVALID_VALUE);
    /* promise: drvDeviceGetPhyIdByIndex, drvDeviceGetIndexByPhyId: there and back */
    GOOD(drvDeviceGetPhyIdByIndex(1, &id));
    GOOD(drvDeviceGetIndexByPhyId(id, &ids[0]));
    CHECK(ids[0] == 1);
    DRV(drvDeviceGetPhyIdByIndex(2, &id), DRV_ERROR_INVALID_DEVICE);
    DRV(drvDeviceGetIndexByPhyId(77, &id), DRV_ERROR_INVALID_DEVICE);
}

static void memory(void)
{
    struct drv_mem_prop prop = pages_of(0);
    size_t granularity = 0;
    /* promise: halMemGetAllocationGranularity: a page */
    GOOD(halMemGetAllocationGranularity(&prop, MEM_ALLOC_GRANULARITY_MINIMUM, &granularity));
    CHECK(granularity == 2 * MIB);
    drv_mem_handle_t *handle = NULL, *same = NULL;
    /* promise: halMemCreate: whole pages, known kinds */
    DRV(halMemCreate(&handle, SIZE + 1, &prop, 0), DRV_ERROR_INVALID_VALUE);
    prop.pg_type = MEM_NORMAL_PAGE_TYPE;
    DRV(halMemCreate(&handle, SIZE, &prop, 0), DRV_ERROR_INVALID_VALUE);
    prop = pages_of(5);
    DRV(halMemCreate(&handle, SIZE, &prop, 0), DRV_ERROR_INVALID_DEVICE);
    CHECK(handle == NULL);
    prop = pages_of(0);
    DRV(halMemCreate(&handle, (size_t)1 << 45, &prop, 0), DRV_ERROR_OUT_OF_MEMORY);
    GOOD(halMemCreate(&handle, SIZE, &prop, 0));
    void *place = NULL;
    /* promise: halMemAddressReserve: addresses of other servers are not supported */
    DRV(halMemAddressReserve(&place, SIZE, 0, (void *)0x280000000000, MEM_RSV_TYPE_REMOTE_MAP), DRV_ERROR_NOT_SUPPORT);
    CHECK(place == NULL);
    /* promise: halMemMap: all of the memory, once */
    place = mapped(handle);
    DRV(halMemMap(place, SIZE, 0, handle, 0), DRV_ERROR_IOCRL_FAIL);
    /* promise: halMemRetainAllocationHandle: for any address of a mapping */
    GOOD(halMemRetainAllocationHandle(&same, (char *)place + 3 * MIB));
    CHECK(same == handle);
    DVdeviceptr base = 0;
    size_t size = 0;
    /* promise: halMemGetAddressRange: the mapping around an address */
    GOOD(halMemGetAddressRange((DVdeviceptr)(uintptr_t)place + 77, &base, &size));
    CHECK(base == (DVdeviceptr)(uintptr_t)place && size == SIZE);
    /* promise: drvMemcpy, drvMemsetD8: without a context, within the room */
    unsigned char *bytes = (unsigned char *)malloc(SIZE);
    GOOD(drvMemsetD8((DVdeviceptr)(uintptr_t)place, SIZE, 0x5A, SIZE));
    GOOD(drvMemcpy((DVdeviceptr)(uintptr_t)bytes, SIZE, (DVdeviceptr)(uintptr_t)place, SIZE));
    CHECK(bytes[0] == 0x5A && bytes[SIZE - 1] == 0x5A);
    DRV(drvMemcpy((DVdeviceptr)(uintptr_t)bytes, 10, (DVdeviceptr)(uintptr_t)place, 11), DRV_ERROR_INVALID_VALUE);
    DRV(drvMemsetD8(0, 10, 0, 10), DRV_ERROR_INVALID_VALUE);
    /* promise: halMemSetAccess, halMemGetAccess: for another device and the host */
    struct drv_mem_access_desc who[2];
    memset(who, 0, sizeof(who));
    who[0].type = who[1].type = MEM_ACCESS_TYPE_READWRITE;
    who[0].location.id = 1;
    who[0].location.side = MEM_DEV_SIDE;
    who[1].location.side = MEM_HOST_SIDE;
    uint64_t flags = 9;
    GOOD(halMemGetAccess(place, &who[0].location, &flags));
    CHECK(flags == 0);
    GOOD(halMemSetAccess(place, SIZE, who, 2));
    GOOD(halMemGetAccess(place, &who[0].location, &flags));
    CHECK(flags == MEM_ACCESS_TYPE_READWRITE);
    CHECK(((volatile unsigned char *)place)[MIB] == 0x5A);
    DRV(halMemSetAccess(place, SIZE, who, 0), DRV_ERROR_INVALID_VALUE);
    /* Failures do not change what the other library says of the thread. */
    IS(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), 0);
    /* promise: halMemRelease: as often as it was created and retained */
    GOOD(halMemRelease(handle));
    end(place, handle);
    DRV(halMemRelease(handle), DRV_ERROR_INVALID_VALUE);
    /* promise: halMemUnmap, halMemAddressFree: once */
    DRV(halMemUnmap(place), DRV_ERROR_IOCRL_FAIL);
    DRV(halMemAddressFree(place), DRV_ERROR_INVALID_VALUE);
    /* Host memory. */
    prop.side = MEM_HOST_SIDE;
    prop.mem_type = MEM_DDR_TYPE;
    GOOD(halMemCreate(&handle, SIZE, &prop, 0));
    place = mapped(handle);
    memset(place, 7, SIZE);
    end(place, handle);
    free(bytes);
}

/* One handle by both libraries. */
static void books(void)
{
    OK(aclrtSetDevice(1));
    struct drv_mem_prop prop = pages_of(1);
    aclrtPhysicalMemProp seen;
    drv_mem_handle_t *handle = NULL;
    GOOD(halMemCreate(&handle, SIZE, &prop, 0));
    OK(aclrtMemGetAllocationPropertiesFromHandle(handle, &seen));
    CHECK(seen.memAttr == ACL_HBM_MEM_HUGE && seen.location.id == 1);
    void *place = NULL;
    OK(aclrtReserveMemAddress(&place, SIZE, 0, NULL, 0));
    GOOD(halMemMap(place, SIZE, 0, handle, 0));
    OK(aclrtMemset(place, SIZE, 3, SIZE));
    OK(aclrtUnmapMem(place));
    OK(aclrtReleaseMemAddress(place));
    OK(aclrtFreePhysical(handle));
    DRV(halMemRelease(handle), DRV_ERROR_INVALID_VALUE);
    OK(aclrtResetDevice(1));
}

/* The runtime's inner layer, in one process. */
static void inner(void)
{
    OK(aclrtSetDevice(0));
    uint32_t process = 0, peer = 0;
    int32_t logical = 9;
    /* promise: rtDeviceGetBareTgid: of this process */
    OK(rtDeviceGetBareTgid(&process));
    CHECK(process == (uint32_t)getpid());
    /* promise: rtGetLogicDevIdByUserDevId: all devices are visible */
    OK(rtGetLogicDevIdByUserDevId(1, &logical));
    CHECK(logical == 1);
    GOOD(drvDeviceGetPhyIdByIndex(1, &peer));
    /* promise: rtEnableP2P, rtDisableP2P: the peer by its number on the host */
    OK(rtEnableP2P(0, peer, 0));
    IS(rtEnableP2P(0, 77, 0), ACL_ERROR_RT_PARAM_INVALID);
    OK(rtDisableP2P(0, peer));
    void *memory = NULL, *host = NULL;
    aclrtStream stream = NULL;
    OK(aclrtCreateStream(&stream));
    OK(aclrtMalloc(&memory, SIZE, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost(&host, SIZE));
    fill_pattern(host, SIZE, 5);
    /* promise: rtMemcpyAsyncWithoutCheckKind: in both directions, whatever kind is named */
    OK(rtMemcpyAsyncWithoutCheckKind(memory, SIZE, host, SIZE, 2, stream));
    OK(aclrtSynchronizeStream(stream));
    memset(host, 0, SIZE);
    OK(rtMemcpyAsyncWithoutCheckKind(host, SIZE, memory, SIZE, 1, stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(has_pattern(host, SIZE, 5));
    OK(aclrtFreeHost(host));
    OK(aclrtFree(memory));
    OK(aclrtDestroyStream(stream));
}

static void sharing(const char *self)
{
    int to[2], from[2], status = 0;
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, to[0], 0) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, from[1], 1) == 0);
    char *const arguments[] = {(char *)self, (char *)"importer", NULL};
    extern char **environ;
    pid_t child = 0;
    CHECK(posix_spawn(&child, self, &actions, NULL, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);

    struct drv_mem_prop prop = pages_of(0);
    drv_mem_handle_t *listed = NULL, *open = NULL;
    unsigned char *bytes = (unsigned char *)malloc(SIZE);
    GOOD(halMemCreate(&listed, SIZE, &prop, 0));
    GOOD(halMemCreate(&open, SIZE, &prop, 0));
    void *places[2] = {mapped(listed), mapped(open)};
    for (unsigned i = 0; i < 2; i++) {
        fill_pattern(bytes, SIZE, i + 1);
        GOOD(drvMemcpy((DVdeviceptr)(uintptr_t)places[i], SIZE, (DVdeviceptr)(uintptr_t)bytes, SIZE));
    }
    struct shared shared = take(from[0]);
    int process = shared.process;
    /* promise: halMemExportToShareableHandle: once, for processes that are listed */
    GOOD(halMemExportToShareableHandle(listed, MEM_HANDLE_TYPE_NONE, 0, &shared.plain));
    DRV(halMemExportToShareableHandle(listed, MEM_HANDLE_TYPE_NONE, 0, &shared.plain), DRV_ERROR_IOCRL_FAIL);
    /* promise: halMemSetPidToShareableHandle: an unknown handle */
    DRV(halMemSetPidToShareableHandle(99999, &process, 1), DRV_ERROR_INVALID_HANDLE);
    GOOD(halMemSetPidToShareableHandle(shared.plain, &process, 1));
    /* promise: halMemExportToShareableHandleV2: for other servers too */
    GOOD(halMemExportToShareableHandleV2(open, MEM_HANDLE_TYPE_FABRIC, 0, &shared.fabric));
    uint32_t server = 99;
    uint64_t local = 0;
    /* promise: halMemTransShareableHandle: the short form, and the exporter's server */
    GOOD(halMemTransShareableHandle(MEM_HANDLE_TYPE_FABRIC, &shared.fabric, &server, &local));
    CHECK(server == 3 && local != 0);
    DRV(halMemTransShareableHandle(MEM_HANDLE_TYPE_POSIX, &shared.fabric, &server, &local), DRV_ERROR_INVALID_VALUE);
    struct ShareHandleAttr attribute;
    memset(&attribute, 0, sizeof(attribute));
    /* promise: halMemShareHandleSetAttribute: any process may import */
    DRV(halMemShareHandleSetAttribute(local, SHR_HANDLE_ATTR_TYPE_MAX, attribute), DRV_ERROR_INVALID_VALUE);
    DRV(halMemShareHandleSetAttribute(local, SHR_HANDLE_ATTR_NO_WLIST_IN_SERVER, attribute), DRV_ERROR_NOT_SUPPORT);
    attribute.enableFlag = 1;
    GOOD(halMemShareHandleSetAttribute(local, SHR_HANDLE_ATTR_NO_WLIST_IN_SERVER, attribute));
    void *named = NULL;
    int64_t sdid = 0, other = 0;
    OK(aclrtSetDevice(0));
    OK(aclrtMalloc(&named, SIZE, ACL_MEM_MALLOC_HUGE_FIRST));
    fill_pattern(bytes, SIZE, 3);
    OK(aclrtMemcpy(named, SIZE, bytes, SIZE, ACL_MEMCPY_HOST_TO_DEVICE));
    /* promise: rtIpcSetMemoryName: a key */
    OK(rtIpcSetMemoryName(named, SIZE, shared.key, sizeof(shared.key)));
    /* promise: rtGetDeviceInfo: the place in the super pod */
    OK(rtGetDeviceInfo(0, 0, 26, &sdid));
    OK(rtGetDeviceInfo(0, 0, 27, &other));
    CHECK(other == 3 && sdid >> 22 == 3);
    IS(rtGetDeviceInfo(0, 4, 3, &other), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    IS(rtGetDeviceInfo(2, 0, 26, &other), ACL_ERROR_RT_INVALID_DEVICEID);
    /* promise: rtSetIpcMemorySuperPodPid: processes of this server */
    OK(rtSetIpcMemorySuperPodPid(shared.key, (uint32_t)sdid, &process, 1));
    IS(rtSetIpcMemorySuperPodPid(shared.key, (uint32_t)sdid ^ 1u << 22, &process, 1),
       ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    IS(rtSetIpcMemorySuperPodPid(shared.key, (uint32_t)sdid, &process, -1), ACL_ERROR_RT_PARAM_INVALID);
    give(to[1], &shared);
    take(from[0]);
    /* promise: rtIpcDestroyMemoryName: once */
    OK(rtIpcDestroyMemoryName(shared.key));
    IS(rtIpcDestroyMemoryName(shared.key), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    OK(aclrtFree(named));
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    end(places[0], listed);
    end(places[1], open);
    free(bytes);
    close(to[1]);
    close(from[0]);
}

int main(int count, char **arguments)
{
    if (count > 1) {
        return importer();
    }
    devices();
    memory();
    books();
    inner();
    sharing(arguments[0]);
    return 0;
}
