/* Memory pools with stream order, copies that are described in device memory, host memory that is
 * allocated and registered. */
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

static atomic_int go;

static void hold(void *unused)
{
    (void)unused;
    while (!atomic_load(&go)) {
        usleep(1000);
    }
}

static uint64_t attribute(aclrtMemPool pool, aclrtMemPoolAttr name)
{
    uint64_t value = 0;
    OK(aclrtMemPoolGetAttr(pool, name, &value));
    return value;
}

static void pools(aclrtStream stream)
{
    aclrtMemPoolProps props;
    memset(&props, 0, sizeof(props));
    props.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    props.maxSize = 64 * MIB;
    aclrtMemPool pool = NULL;
    /* promise: aclrtMemPoolCreate: on a device */
    OK(aclrtMemPoolCreate(&pool, &props));
    void *block = NULL, *other = NULL;
    OK(aclrtMemPoolMallocAsync(&block, 4 * MIB, pool, stream));
    unsigned char *host;
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    fill_pattern(host, 4 * MIB, 3);
    OK(aclrtMemcpyAsync(block, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtSynchronizeStream(stream));
    memset(host, 0, 4 * MIB);
    OK(aclrtMemcpyAsync(host, 4 * MIB, block, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(has_pattern(host, 4 * MIB, 3));
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_USED_MEM_CURRENT) >= 4 * MIB);
    /* Freeing waits for its turn: until then the memory is not given out again. */
    OK(aclrtLaunchHostFunc(stream, hold, NULL));
    /* promise: aclrtMemPoolFreeAsync: in stream order */
    OK(aclrtMemPoolFreeAsync(block, stream));
    aclrtStream second;
    OK(aclrtCreateStream(&second));
    OK(aclrtMemPoolMallocAsync(&other, 4 * MIB, pool, second));
    CHECK(other != block);
    IS(aclrtMemPoolDestroy(pool), ACL_ERROR_RT_PARAM_INVALID);
    atomic_store(&go, 1);
    /* There is room for this only after the first is free: the stream is waited for. */
    void *large = NULL;
    OK(aclrtMemPoolMallocAsync(&large, 58 * MIB, pool, stream));
    /* promise: aclrtMemPoolMallocAsync: within the pool's limit */
    IS(aclrtMemPoolMallocAsync(&block, 58 * MIB, pool, stream), ACL_ERROR_RT_MEMORY_ALLOCATION);
    /* The size of a block is not shared with another. */
    OK(aclrtMemset(large, 58 * MIB, 1, 58 * MIB));
    OK(aclrtMemset(other, 4 * MIB, 2, 4 * MIB));
    OK(aclrtMemPoolFreeAsync(large, stream));
    IS(aclrtMemPoolFreeAsync((char *)other + 512, second), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtMemPoolFreeAsync(other, second));
    OK(aclrtSynchronizeDevice());
    IS(aclrtMemPoolFreeAsync(other, second), ACL_ERROR_RT_PARAM_INVALID);
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_USED_MEM_CURRENT) == 0);
    /* promise: aclrtMemPoolGetAttr: peaks */
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_USED_MEM_HIGH) >= 62 * MIB);
    uint64_t zero = 0;
    OK(aclrtMemPoolSetAttr(pool, ACL_RT_MEM_POOL_ATTR_USED_MEM_HIGH, &zero));
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_USED_MEM_HIGH) == 0);
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_RESERVED_MEM_CURRENT) >= 58 * MIB);
    /* promise: aclrtMemPoolTrimTo: releases what is unused */
    OK(aclrtMemPoolTrimTo(pool, 0));
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_RESERVED_MEM_CURRENT) == 0);
    /* With a threshold it is released when blocks are freed. */
    /* promise: aclrtMemPoolSetAttr: the threshold */
    OK(aclrtMemPoolSetAttr(pool, ACL_RT_MEM_POOL_ATTR_RELEASE_THRESHOLD, &zero));
    OK(aclrtMemPoolMallocAsync(&block, 8 * MIB, pool, stream));
    OK(aclrtMemPoolFreeAsync(block, stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(attribute(pool, ACL_RT_MEM_POOL_ATTR_RESERVED_MEM_CURRENT) == 0);
    int32_t on = 0;
    OK(aclrtMemPoolSetAttr(pool, ACL_RT_MEM_POOL_REUSE_ALLOW_OPPORTUNISTIC, &on));
    on = 7;
    OK(aclrtMemPoolGetAttr(pool, ACL_RT_MEM_POOL_REUSE_ALLOW_OPPORTUNISTIC, &on));
    CHECK(on == 0);
    /* aclrtFree frees a block of a pool too. */
    OK(aclrtMemPoolMallocAsync(&block, 100, pool, stream));
    OK(aclrtFree(block));
    IS(aclrtFree(block), ACL_ERROR_RT_PARAM_INVALID);
    /* promise: aclrtMemPoolDestroy: without blocks */
    OK(aclrtMemPoolDestroy(pool));
    IS(aclrtMemPoolDestroy(pool), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtDestroyStream(second));
    OK(aclrtFreeHost(host));
}

static void described_copies(aclrtStream stream)
{
    char *from, *to, *table;
    OK(aclrtMalloc((void **)&from, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc((void **)&to, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc((void **)&table, 4096, ACL_MEM_MALLOC_HUGE_FIRST));
    unsigned char *host;
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    fill_pattern(host, 4 * MIB, 9);
    OK(aclrtMemcpy(from, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemset(to, 4 * MIB, 0, 4 * MIB));
    /* The addresses stand in device memory, and are read when the stream gets there. */
    char *addresses[2] = {NULL, NULL};
    OK(aclrtMemcpy(table, 4096, addresses, sizeof(addresses), ACL_MEMCPY_HOST_TO_DEVICE));
    atomic_store(&go, 0);
    OK(aclrtLaunchHostFunc(stream, hold, NULL));
    /* promise: aclrtMemcpyAsyncWithOffset: addresses of the time of the copy */
    OK(aclrtMemcpyAsyncWithOffset((void **)table, 4 * MIB, MIB, (const void **)(table + 8), 2 * MIB, MIB / 2,
                                  ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, stream));
    addresses[0] = to;
    addresses[1] = from;
    OK(aclrtMemcpy(table, 4096, addresses, sizeof(addresses), ACL_MEMCPY_HOST_TO_DEVICE));
    atomic_store(&go, 1);
    OK(aclrtSynchronizeStream(stream));
    unsigned char *back;
    OK(aclrtMallocHost((void **)&back, 4 * MIB));
    OK(aclrtMemcpy(back, 4 * MIB, to, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(memcmp(back + MIB, host + MIB / 2, 2 * MIB) == 0 && back[MIB - 1] == 0 && back[3 * MIB] == 0);
    /* Addresses that are nothing fail the stream, not the process. */
    memset(addresses, 0x55, sizeof(addresses));
    OK(aclrtMemcpy(table, 4096, addresses, sizeof(addresses), ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemcpyAsyncWithOffset((void **)table, 4 * MIB, 0, (const void **)(table + 8), 1, 0,
                                  ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, stream));
    IS(aclrtSynchronizeStream(stream), ACL_ERROR_RT_PARAM_INVALID);

    size_t size = 0;
    /* promise: aclrtGetMemcpyDescSize: room for a description */
    OK(aclrtGetMemcpyDescSize(ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, &size));
    CHECK(size > 0 && size <= 4096);
    /* promise: aclrtSetMemcpyDesc: source before destination */
    OK(aclrtSetMemcpyDesc(table, ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, from, to, 4 * MIB, NULL));
    /* promise: aclrtMemcpyAsyncWithDesc: as described */
    OK(aclrtMemcpyAsyncWithDesc(table, ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, stream));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpy(back, 4 * MIB, to, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(memcmp(back, host, 4 * MIB) == 0);
    OK(aclrtMemset(table, 4096, 0, 4096));
    OK(aclrtMemcpyAsyncWithDesc(table, ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, stream));
    IS(aclrtSynchronizeStream(stream), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtFree(from));
    OK(aclrtFree(to));
    OK(aclrtFree(table));
    OK(aclrtFreeHost(host));
    OK(aclrtFreeHost(back));
}

/* Host memory of the library is registered as the vendor's manual asks for on old kernels. */
static void registered(aclrtStream stream)
{
    char *host;
    void *device = NULL, *block;
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    /* promise: aclrtHostRegister: memory of aclrtMallocHost */
    OK(aclrtHostRegister(host, 4 * MIB, ACL_HOST_REGISTER_MAPPED, &device));
    CHECK(device != NULL);
    IS(aclrtHostRegisterV2(host + MIB, MIB, ACL_HOST_REG_MAPPED), ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    OK(aclrtHostGetDevicePointer(host, &device, 0));
    OK(aclrtHostUnregister(host));
    IS(aclrtHostUnregister(host), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
    OK(aclrtHostRegisterV2(host, 4 * MIB, ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED));
    /* It is the same memory: copies on a stream are done in the background and keep it. */
    OK(aclrtMalloc(&block, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    fill_pattern(host, 4 * MIB, 1);
    OK(aclrtMemcpyAsync(block, 4 * MIB, host, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    /* What is freed is no longer registered. */
    OK(aclrtFreeHost(host));
    IS(aclrtHostUnregister(host), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMallocHost((void **)&host, 4 * MIB));
    OK(aclrtMemcpy(host, 4 * MIB, block, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(host, 4 * MIB, 1));
    OK(aclrtFree(block));
    OK(aclrtFreeHost(host));
}

int main(void)
{
    OK(aclrtSetDevice(0));
    int32_t id = -1;
    OK(aclrtGetPhyDevIdByUserDevId(1, &id));
    /* promise: aclrtGetPhyDevIdByUserDevId, aclrtGetUserDevIdByPhyDevId: there and back */
    OK(aclrtGetUserDevIdByPhyDevId(id, &id));
    CHECK(id == 1);
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    pools(stream);
    described_copies(stream);
    registered(stream);
    OK(aclrtDestroyStream(stream));
    OK(aclrtResetDevice(0));
    OK(aclFinalize());
    return 0;
}
