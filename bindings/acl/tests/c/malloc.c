/* aclrtMalloc and its family, host memory, registration, copies and fills. */
#include "check.h"

static size_t free_memory(void)
{
    size_t available = 0, total = 0;
    OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE, &available, &total));
    return available;
}

/* Copies within one block, over each other in both directions, in one piece and in several. */
static void overlapping_copies(void)
{
    const size_t size = 16 * MIB, length = 9 * MIB + 11;
    const size_t distances[] = {7, 4 * MIB, 5 * MIB + 3};
    unsigned char *block = NULL;
    OK(aclrtMalloc((void **)&block, size, ACL_MEM_MALLOC_HUGE_FIRST));
    unsigned char *expected = (unsigned char *)malloc(size), *seen = (unsigned char *)malloc(size);
    for (int i = 0; i < 6; i++) {
        const size_t from = i < 3 ? 0 : distances[i - 3], to = i < 3 ? distances[i] : 0;
        fill_pattern(expected, size, (unsigned)i);
        OK(aclrtMemcpy(block, size, expected, size, ACL_MEMCPY_HOST_TO_DEVICE));
        OK(aclrtMemcpy(block + to, length, block + from, length, ACL_MEMCPY_DEVICE_TO_DEVICE));
        memmove(expected + to, expected + from, length);
        OK(aclrtMemcpy(seen, size, block, size, ACL_MEMCPY_DEVICE_TO_HOST));
        CHECK(memcmp(seen, expected, size) == 0);
    }
    free(seen);
    free(expected);
    OK(aclrtFree(block));
}

int main(void)
{
    void *p = NULL;
    IS(aclrtMalloc(&p, 16, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_CONTEXT_NULL);
    IS(aclrtMallocHost(&p, 16), ACL_ERROR_RT_CONTEXT_NULL);
    OK(aclrtSetDevice(0));
    const size_t before = free_memory();

    /* Small blocks share pages. */
    enum { BLOCKS = 1000 };
    void *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        OK(aclrtMalloc(&blocks[i], 4, ACL_MEM_MALLOC_HUGE_FIRST));
        /* promise: aclrtMalloc: alignment */
        CHECK((size_t)blocks[i] % 512 == 0);
        int number = i * 77;
        OK(aclrtMemcpy(blocks[i], 4, &number, 4, ACL_MEMCPY_HOST_TO_DEVICE));
    }
    CHECK(before - free_memory() <= 2 * MIB);
    for (int i = 0; i < BLOCKS; i++) {
        int number = -1;
        OK(aclrtMemcpy(&number, 4, blocks[i], 4, ACL_MEMCPY_DEVICE_TO_HOST));
        CHECK(number == i * 77);
    }
    IS(aclrtFree((char *)blocks[0] + 32), ACL_ERROR_RT_PARAM_INVALID);
    for (int i = 0; i < BLOCKS; i++) {
        OK(aclrtFree(blocks[i]));
        /* promise: aclrtFree: twice */
        IS(aclrtFree(blocks[i]), ACL_ERROR_RT_PARAM_INVALID);
    }

    /* What is asked for without padding costs no more than that, and is free when it is freed. */
    const size_t idle = free_memory();
    OK(aclrtMallocAlign32(&p, 2 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    /* promise: aclrtMallocAlign32: no padding */
    CHECK(idle - free_memory() == 2 * MIB);
    OK(aclrtFree(p));
    /* With padding it does, but for pages of 1 GiB. */
    OK(aclrtMalloc(&p, 2 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(idle - free_memory() == 4 * MIB);
    OK(aclrtFree(p));
    OK(aclrtMalloc(&p, 1024 * MIB, ACL_MEM_MALLOC_HUGE1G_ONLY));
    CHECK(idle - free_memory() == 1024 * MIB);
    OK(aclrtFree(p));
    OK(aclrtMallocAlign32(&p, 302 * MIB, ACL_MEM_MALLOC_HUGE_ONLY));
    CHECK(idle - free_memory() == 302 * MIB);
    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes((char *)p + 301 * MIB, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_DEVICE);
    void *start = NULL;
    size_t size = 0;
    OK(aclrtMemGetAddressRange((char *)p + 301 * MIB, &start, &size));
    CHECK(start == p && size == 302 * MIB);
    aclrtDrvMemHandle handle = NULL;
    IS(aclrtMemRetainAllocationHandle(p, &handle), ACL_ERROR_RT_PARAM_INVALID);
    /* promise: aclrtMemP2PMap: a block for another device */
    OK(aclrtMemP2PMap(p, 302 * MIB, 1, 0));
    OK(aclrtFree(p));
    CHECK(free_memory() == idle);

    /* Pages as the vendor's library has them: small blocks in ordinary ones, others as asked. */
    static const struct { size_t size; aclrtMemMallocPolicy policy; uint32_t page; } pages[] = {
        {4096, ACL_MEM_MALLOC_HUGE_FIRST, 4096},     {MIB - 32, ACL_MEM_MALLOC_HUGE_FIRST, 4096},
        {MIB, ACL_MEM_MALLOC_HUGE_FIRST, 2 << 20},   {4096, ACL_MEM_MALLOC_HUGE_ONLY, 2 << 20},
        {4096, ACL_MEM_MALLOC_NORMAL_ONLY, 4096},    {4 * MIB, ACL_MEM_MALLOC_NORMAL_ONLY, 4096},
        {4096, ACL_MEM_MALLOC_HUGE_ONLY_P2P, 2 << 20},
    };
    for (size_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++) {
        OK(aclrtMalloc(&p, pages[i].size, pages[i].policy));
        OK(aclrtPointerGetAttributes((char *)p + 100, &attributes));
        /* promise: aclrtPointerGetAttributes: the page size */
        CHECK(attributes.pageSize == pages[i].page);
        OK(aclrtFree(p));
    }

    /* Out of memory is one code, and the library goes on. */
    IS(aclrtMallocAlign32(&p, (size_t)1 << 40, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_MEMORY_ALLOCATION);
    const char *said = aclGetRecentErrMsg();
    CHECK(said != NULL && strstr(said, "out of memory") != NULL);
    IS(aclrtMalloc(&p, (size_t)-1, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_INVALID_PARAM);
    /* promise: aclrtMallocCached: as aclrtMalloc */
    OK(aclrtMallocCached(&p, 100, ACL_MEM_MALLOC_NORMAL_ONLY));
    /* promise: aclrtFreeWithDevSync: waits */
    OK(aclrtFreeWithDevSync(p));
    aclrtMallocAttribute attribute;
    memset(&attribute, 0, sizeof(attribute));
    attribute.attr = ACL_RT_MEM_ATTR_DEVICE_ID;
    attribute.value.deviceId = 1;
    aclrtMallocConfig config = {&attribute, 1};
    IS(aclrtMallocWithCfg(&p, 100, ACL_MEM_MALLOC_HUGE_FIRST, &config), ACL_ERROR_RT_PARAM_INVALID);
    attribute.value.deviceId = 0;
    OK(aclrtMallocWithCfg(&p, 100, ACL_MEM_MALLOC_HUGE_FIRST, &config));
    OK(aclrtFree(p));

    /* Host memory, and fills of any memory. */
    unsigned char *host = NULL, *other = NULL;
    OK(aclrtMallocHost((void **)&host, 3 * MIB + 5));
    /* promise: aclrtMallocHost: pages */
    CHECK((size_t)host % 4096 == 0);
    OK(aclrtMallocHostWithCfg((void **)&other, 3 * MIB + 5, NULL));
    OK(aclrtPointerGetAttributes(host + 3 * MIB, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_HOST && attributes.location.id == 0);
    int local = 0;
    /* promise: aclrtMemset: host memory */
    OK(aclrtMemset(&local, sizeof(local), 0x11, sizeof(local)));
    CHECK(local == 0x11111111);
    OK(aclrtMemset(host, 3 * MIB, 7, 3 * MIB));
    CHECK(host[0] == 7 && host[3 * MIB - 1] == 7);
    OK(aclrtMalloc(&p, 3 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(p, 3 * MIB, 0x1ff, 3 * MIB));
    OK(aclrtMemcpy(host, 3 * MIB, p, 3 * MIB, ACL_MEMCPY_DEFAULT));
    CHECK(host[0] == 0xff && host[3 * MIB - 1] == 0xff);
    OK(aclrtMemsetD32(p, 3 * MIB, 0x01020304, 3 * MIB / 4));
    OK(aclrtMemcpy(host, 3 * MIB, p, 3 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(host[0] == 4 && host[3 * MIB - 1] == 1);
    fill_pattern(host, 3 * MIB, 3);
    /* promise: aclrtMemcpy: within the host */
    OK(aclrtMemcpy(other, 3 * MIB, host, 3 * MIB, ACL_MEMCPY_HOST_TO_HOST));
    CHECK(has_pattern(other, 3 * MIB, 3));
    /* The kind is checked and not used. */
    /* promise: aclrtMemcpy: a kind that goes another way */
    OK(aclrtMemcpy(p, 3 * MIB, host, 3 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    memset(other, 0, 3 * MIB);
    OK(aclrtMemcpy(other, 3 * MIB, p, 3 * MIB, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK(has_pattern(other, 3 * MIB, 3));

    overlapping_copies();

    /* Device to device: on one, to the other, and over each other. */
    void *q = NULL, *r = NULL;
    OK(aclrtMalloc(&q, 3 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemcpy(q, 3 * MIB, p, 3 * MIB, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtMemcpy(other, 3 * MIB, q, 3 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(other, 3 * MIB, 3));
    /* promise: aclrtMemcpy: between devices, and over each other */
    OK(aclrtMemcpy((char *)q + 1000, 2 * MIB, q, 2 * MIB, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtMemcpy(other, 2 * MIB, (char *)q + 1000, 2 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(other, 2 * MIB, 3));
    OK(aclrtSetDevice(1));
    OK(aclrtMalloc(&r, 3 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtDeviceEnablePeerAccess(0, 0));
    OK(aclrtMemcpy(r, 3 * MIB, p, 3 * MIB, ACL_MEMCPY_DEVICE_TO_DEVICE));
    memset(other, 0, 3 * MIB);
    OK(aclrtMemcpy(other, 3 * MIB, r, 3 * MIB, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(other, 3 * MIB, 3));
    OK(aclrtFree(r));
    OK(aclrtSetDevice(0));

    /* Rows. */
    memset(other, 0, 3 * MIB);
    OK(aclrtMemcpy2d(q, 256, host, 100, 100, 50, ACL_MEMCPY_HOST_TO_DEVICE));
    /* promise: aclrtMemcpy2d: rows */
    OK(aclrtMemcpy2d(other, 128, q, 256, 100, 50, ACL_MEMCPY_DEVICE_TO_HOST));
    for (int row = 0; row < 50; row++) {
        CHECK(memcmp(other + row * 128, host + row * 100, 100) == 0);
    }
    IS(aclrtMemcpy2d(q, 99, host, 100, 100, 50, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM);
    IS(aclrtMemcpy2d(q, 256, p, 100, 100, 50, ACL_MEMCPY_DEVICE_TO_DEVICE), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);

    /* Batches. */
    enum { COPIES = 100 };
    void *dsts[COPIES], *srcs[COPIES];
    size_t maxs[COPIES], sizes[COPIES], index = 0, failed = 5;
    aclrtMemcpyBatchAttr batch;
    memset(&batch, 0, sizeof(batch));
    for (int i = 0; i < COPIES; i++) {
        dsts[i] = (char *)p + i * 1000;
        srcs[i] = host + i * 2000;
        maxs[i] = sizes[i] = 900;
    }
    OK(aclrtMemcpyBatch(dsts, maxs, srcs, sizes, COPIES, &batch, &index, 1, &failed));
    CHECK(failed == (size_t)-1);
    memset(other, 0, 3 * MIB);
    for (int i = 0; i < COPIES; i++) {
        srcs[i] = (char *)p + i * 1000;
        dsts[i] = other + i * 2000;
    }
    OK(aclrtMemcpyBatchV2(dsts, maxs, srcs, sizes, COPIES, &batch, &index, 1));
    for (int i = 0; i < COPIES; i++) {
        CHECK(memcmp(other + i * 2000, host + i * 2000, 900) == 0);
    }
    sizes[7] = 901;
    IS(aclrtMemcpyBatch(dsts, maxs, srcs, sizes, COPIES, &batch, &index, 1, &failed), ACL_ERROR_INVALID_PARAM);
    /* promise: aclrtMemcpyBatch, aclrtMemcpyBatchV2: which failed */
    CHECK(failed == 7);

    /* Registered memory. */
    static unsigned char plain[8192];
    void *device = NULL;
    OK(aclrtHostRegister(plain, sizeof(plain), ACL_HOST_REGISTER_MAPPED, &device));
    IS(aclrtHostRegister(plain + 4096, 10, ACL_HOST_REGISTER_MAPPED, &device),
       /* promise: aclrtHostRegister: twice */
       ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    OK(aclrtPointerGetAttributes(plain + 5000, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_HOST);
    /* promise: aclrtHostGetDevicePointer: registered memory */
    OK(aclrtHostGetDevicePointer(plain, &device, 0));
    OK(aclrtHostUnregister(plain));
    IS(aclrtHostUnregister(plain), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
    OK(aclrtHostRegisterV2(plain, sizeof(plain), ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED));
    OK(aclrtHostUnregister(plain));

    /* promise: aclrtFreeHostWithDevSync: waits */
    OK(aclrtFreeHostWithDevSync(host));
    OK(aclrtFreeHost(other));
    IS(aclrtFreeHost(other), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtFreeHost(p), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtFree(p));
    OK(aclrtFree(q));
    /* The keys of a block, or of a part, end with it, and with nothing else. */
    char key[65];
    OK(aclrtMalloc(&p, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtIpcMemGetExportKey((char *)p + 2 * MIB, MIB, key, sizeof(key), 1));
    IS(aclrtFree((char *)p + 2 * MIB), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtIpcMemClose(key));
    OK(aclrtIpcMemGetExportKey((char *)p + 2 * MIB, MIB, key, sizeof(key), 1));
    OK(aclrtFree(p));
    IS(aclrtIpcMemClose(key), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    /* The last reset takes what was not freed. */
    OK(aclrtMalloc(&p, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc(&q, 100 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    /* promise: aclrtResetDeviceForce: ends at once, with the memory */
    OK(aclrtResetDeviceForce(0));
    IS(aclrtFree(p), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtFree(q), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtResetDeviceForce(1));
    return 0;
}
