/* Physical memory, reservations, mappings, access, granularity, handles and ranges. */
#include <unistd.h>

#include "check.h"

static size_t free_memory(void)
{
    size_t available = 0, total = 0;
    OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE, &available, &total));
    return available;
}

/* The same memory at several places, which stays while it is mapped at one of them. */
static void several_places(void)
{
    const size_t before = free_memory();
    aclrtPhysicalMemProp prop = on_device(0);
    aclrtDrvMemHandle handle = NULL, found = NULL;
    void *base = NULL, *other = NULL;
    OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&base, 8 * MIB, 0, NULL, 0));
    OK(aclrtReserveMemAddress(&other, 2 * MIB, 0, NULL, 0));
    char *second = (char *)base + 2 * MIB, *third = (char *)base + 4 * MIB;
    void *places[] = {base, third, other};
    for (int i = 0; i < 3; i++) {
        OK(aclrtMapMem(places[i], 2 * MIB, 0, handle, 0));
    }
    for (int i = 0; i < 3; i++) {
        IS(aclrtMapMem(places[i], 2 * MIB, 0, handle, 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
        OK(aclrtMemRetainAllocationHandle(places[i], &found));
        CHECK(found == handle);
        OK(aclrtFreePhysical(found));
    }
    IS(aclrtMapMem(second + 4096, 2 * MIB, 0, handle, 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtUnmapMem(third + 4096), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtUnmapMem(second), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtReleaseMemAddress(base), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtReleaseMemAddress(other), ACL_ERROR_RT_DRV_INTERNAL_ERROR);

    /* Freed, but not gone. */
    OK(aclrtFreePhysical(handle));
    IS(aclrtFreePhysical(handle), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtMapMem(second, 2 * MIB, 0, handle, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK(free_memory() == before - 2 * MIB);
    unsigned char written[100], seen[100];
    fill_pattern(written, sizeof(written), 3);
    OK(aclrtMemcpy(other, 2 * MIB, written, sizeof(written), ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemcpy(seen, sizeof(seen), third, sizeof(seen), ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(memcmp(written, seen, sizeof(seen)) == 0);
    OK(aclrtUnmapMem(base));
    IS(aclrtUnmapMem(base), ACL_ERROR_RT_DRV_INTERNAL_ERROR);

    /* The same handle again, from a place where the memory is. */
    OK(aclrtMemRetainAllocationHandle(other, &found));
    CHECK(found == handle);
    OK(aclrtMapMem(second, 2 * MIB, 0, handle, 0));
    OK(aclrtFreePhysical(handle));
    OK(aclrtUnmapMem(third));
    OK(aclrtUnmapMem(other));
    CHECK(free_memory() == before - 2 * MIB);
    OK(aclrtUnmapMem(second));
    CHECK(free_memory() == before);
    IS(aclrtMemRetainAllocationHandle(other, &found), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtFreePhysical(handle), ACL_ERROR_RT_PARAM_INVALID);

    /* A device that is closed takes its memory along, freed or not, wherever it is mapped. */
    aclrtDrvMemHandle kept = NULL;
    OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
    OK(aclrtMallocPhysical(&kept, 2 * MIB, &prop, 0));
    OK(aclrtMapMem(base, 2 * MIB, 0, handle, 0));
    OK(aclrtMapMem(other, 2 * MIB, 0, handle, 0));
    OK(aclrtMapMem(third, 2 * MIB, 0, kept, 0));
    OK(aclrtFreePhysical(handle));
    OK(aclrtResetDevice(0));
    OK(aclrtSetDevice(0));
    CHECK(free_memory() == before);
    IS(aclrtUnmapMem(other), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtFreePhysical(kept), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtReleaseMemAddress(base));
    OK(aclrtReleaseMemAddress(other));
}

/* Copies on a stream and fills over several handles, own and imported, leave each free to be unmapped. */
static void over_several_handles(void)
{
    enum { HANDLES = 3 };
    const size_t size = 2 * MIB, all = HANDLES * size;
    aclrtStream stream = NULL;
    void *host = NULL, *back = NULL;
    OK(aclrtCreateStream(&stream));
    OK(aclrtMallocHost(&host, all));
    OK(aclrtMallocHost(&back, all));
    for (int imported = 0; imported < 2; imported++) {
        aclrtDrvMemHandle handles[HANDLES], owned[HANDLES];
        void *base = NULL;
        OK(aclrtReserveMemAddress(&base, all, 0, NULL, 0));
        for (int i = 0; i < HANDLES; i++) {
            aclrtPhysicalMemProp prop = on_device(imported);
            OK(aclrtMallocPhysical(&owned[i], size, &prop, 0));
            handles[i] = owned[i];
            if (imported) {
                uint64_t shareable = 0;
                OK(aclrtMemExportToShareableHandle(owned[i], ACL_MEM_HANDLE_TYPE_NONE, 1, &shareable));
                OK(aclrtMemImportFromShareableHandle(shareable, 0, &handles[i]));
            }
            OK(aclrtMapMem((char *)base + i * size, size, 0, handles[i], 0));
        }
        fill_pattern(host, all, 5);
        OK(aclrtMemcpyAsync(base, all, host, all, ACL_MEMCPY_HOST_TO_DEVICE, stream));
        OK(aclrtMemcpyAsync(back, all, base, all, ACL_MEMCPY_DEVICE_TO_HOST, stream));
        OK(aclrtSynchronizeStream(stream));
        CHECK(memcmp(host, back, all) == 0);
        OK(aclrtMemset(base, all, 0x5a, all));
        OK(aclrtMemcpy(back, all, base, all, ACL_MEMCPY_DEVICE_TO_HOST));
        memset(host, 0x5a, all);
        CHECK(memcmp(host, back, all) == 0);
        for (int i = 0; i < HANDLES; i++) {
            OK(aclrtUnmapMem((char *)base + i * size));
            OK(aclrtFreePhysical(handles[i]));
            if (imported) {
                OK(aclrtFreePhysical(owned[i]));
            }
        }
        OK(aclrtReleaseMemAddress(base));
    }
    OK(aclrtFreeHost(host));
    OK(aclrtFreeHost(back));
    OK(aclrtDestroyStream(stream));
}

int main(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    several_places();
    over_several_handles();
    const size_t before = free_memory();
    aclrtPhysicalMemProp prop = on_device(0);
    size_t granularity = 0;
    OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity));
    CHECK(granularity == 2 * MIB);
    OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED, &granularity));
    CHECK(granularity == 2 * MIB);
    prop.memAttr = ACL_HBM_MEM_HUGE1G;
    OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity));
    /* promise: aclrtMemGetAllocationGranularity: pages */
    CHECK(granularity == 1024 * MIB);
    prop = on_device(0);

    /* A framework asks for 512 bytes to see whether there are reservations at all. */
    void *probe = NULL;
    /* promise: aclrtReserveMemAddress: a probe of 512 bytes */
    OK(aclrtReserveMemAddress(&probe, 512, 0, NULL, 1));
    OK(aclrtReleaseMemAddress(probe));

    /* One reservation for all of a card's memory, piece by piece. */
    void *base = NULL;
    const size_t piece = 6 * MIB;
    /* promise: aclrtReserveMemAddress: more than the card has */
    OK(aclrtReserveMemAddress(&base, (size_t)72 << 30, 0, NULL, 1));
    aclrtDrvMemHandle handles[4];
    for (int i = 0; i < 4; i++) {
        OK(aclrtMallocPhysical(&handles[i], piece, &prop, 0));
    }
    CHECK(free_memory() == before - 4 * piece);
    for (int i = 0; i < 4; i++) {
        OK(aclrtMapMem((char *)base + i * piece, piece, 0, handles[i], 0));
    }
    IS(aclrtMapMem(base, piece, 0, handles[0], 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);

    /* A copy over all of them. */
    unsigned char *host = (unsigned char *)malloc(4 * piece);
    unsigned char *back = (unsigned char *)calloc(1, 4 * piece);
    fill_pattern(host, 4 * piece, 7);
    /* promise: aclrtMemcpy: over many mappings */
    OK(aclrtMemcpy(base, (size_t)-1, host, 4 * piece, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemcpy(back, 4 * piece, base, 4 * piece, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(back, 4 * piece, 7));

    /* The owner has access already; other devices and the host get it. */
    aclrtMemAccessDesc access;
    memset(&access, 0, sizeof(access));
    access.flags = ACL_RT_MEM_ACCESS_FLAGS_READWRITE;
    access.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    OK(aclrtMemSetAccess(base, piece, &access, 1));
    access.location.id = 1;
    uint64_t flags = 9;
    OK(aclrtMemGetAccess(base, &access.location, &flags));
    CHECK(flags == 0);
    OK(aclrtMemSetAccess(base, 2 * piece, &access, 1));
    OK(aclrtMemSetAccess(base, piece, &access, 1));
    OK(aclrtMemGetAccess(base, &access.location, &flags));
    CHECK(flags == 3);
    IS(aclrtMemSetAccess(base, piece / 2, &access, 1), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    /* The CPU, at the same addresses. */
    memset(&access.location, 0, sizeof(access.location));
    access.location.type = ACL_MEM_LOCATION_TYPE_HOST;
    OK(aclrtMemGetAccess((char *)base + 2 * piece, &access.location, &flags));
    CHECK(flags == 0);
    OK(aclrtMemSetAccess((char *)base + 2 * piece, piece, &access, 1));
    OK(aclrtMemGetAccess((char *)base + 2 * piece, &access.location, &flags));
    CHECK(flags == 3);
    CHECK(memcmp((char *)base + 2 * piece, host + 2 * piece, piece) == 0);
    access.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = 1;
    access.flags = ACL_RT_MEM_ACCESS_FLAGS_READ;
    IS(aclrtMemSetAccess(base, piece, &access, 1), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);

    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes((char *)base + piece + 5, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_DEVICE && attributes.location.id == 0);
    /* promise: aclrtPointerGetAttributes: device and host */
    CHECK(attributes.pageSize == 2 * MIB);
    OK(aclrtPointerGetAttributes(host, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_UNREGISTERED);
    CHECK(attributes.pageSize == (uint32_t)sysconf(_SC_PAGESIZE));
    IS(aclrtPointerGetAttributes((char *)base + 4 * piece, &attributes), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    void *start = NULL;
    size_t size = 0;
    OK(aclrtMemGetAddressRange((char *)base + piece + 5, &start, &size));
    CHECK(start == (char *)base + piece && size == piece);

    /* A mapping knows its handle, and keeps the memory after the handle is freed. */
    aclrtDrvMemHandle again = NULL;
    OK(aclrtMemRetainAllocationHandle((char *)base + piece, &again));
    /* promise: aclrtMemRetainAllocationHandle: the same handle, counted */
    CHECK(again == handles[1]);
    aclrtPhysicalMemProp found;
    OK(aclrtMemGetAllocationPropertiesFromHandle(again, &found));
    CHECK(memcmp(&found.location, &prop.location, sizeof(prop.location)) == 0);
    OK(aclrtFreePhysical(again));
    OK(aclrtFreePhysical(again));
    /* promise: aclrtFreePhysical: once too often */
    IS(aclrtFreePhysical(again), ACL_ERROR_RT_PARAM_INVALID);
    OK(aclrtMemcpy(back, piece, (char *)base + piece, piece, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(memcmp(back, host + piece, piece) == 0);
    OK(aclrtUnmapMem((char *)base + piece));
    /* promise: aclrtFreePhysical: while mapped */
    CHECK(free_memory() == before - 3 * piece);
    IS(aclrtUnmapMem((char *)base + piece), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    IS(aclrtFreePhysical(again), ACL_ERROR_RT_PARAM_INVALID);
    IS(aclrtMemcpy(back, 2 * piece, base, 2 * piece, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_RT_DRV_INTERNAL_ERROR);

    IS(aclrtReleaseMemAddress(base), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    for (int i = 0; i < 4; i++) {
        if (i != 1) {
            OK(aclrtUnmapMem((char *)base + i * piece));
            OK(aclrtFreePhysical(handles[i]));
        }
    }
    OK(aclrtReleaseMemAddress(base));
    IS(aclrtReleaseMemAddress(base), ACL_ERROR_RT_PARAM_INVALID);
    CHECK(free_memory() == before);

    /* Sizes that are no multiple of a page: only of addresses and mappings. */
    aclrtDrvMemHandle odd = NULL;
    IS(aclrtMallocPhysical(&odd, 3 * MIB + 77, &prop, 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    /* promise: aclrtMallocPhysical: a multiple of the granularity */
    OK(aclrtMallocPhysical(&odd, 4 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&base, 3 * MIB + 77, 0, NULL, 0));
    OK(aclrtMapMem(base, 3 * MIB + 77, 0, odd, 0));
    OK(aclrtUnmapMem(base));
    OK(aclrtFreePhysical(odd));
    /* At the same address again. */
    void *wanted = base;
    OK(aclrtReleaseMemAddress(base));
    OK(aclrtReserveMemAddress(&base, 4 * MIB, 0, wanted, 0));
    /* promise: aclrtReserveMemAddress: at an address */
    CHECK(base == wanted);
    OK(aclrtReleaseMemAddress(base));

    /* Memory of the host, which the CPU sees at the same address. */
    memset(&prop, 0, sizeof(prop));
    prop.memAttr = ACL_MEM_HUGE;
    prop.location.type = ACL_MEM_LOCATION_TYPE_HOST;
    OK(aclrtMallocPhysical(&odd, 2 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&base, 2 * MIB, 0, NULL, 0));
    OK(aclrtMapMem(base, 2 * MIB, 0, odd, 0));
    OK(aclrtPointerGetAttributes(base, &attributes));
    CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_HOST);
    OK(aclrtMemcpy(base, 2 * MIB, host, 2 * MIB, ACL_MEMCPY_HOST_TO_HOST));
    /* promise: aclrtMallocPhysical: the host's */
    CHECK(memcmp(base, host, 2 * MIB) == 0);
    OK(aclrtUnmapMem(base));
    OK(aclrtReleaseMemAddress(base));
    OK(aclrtFreePhysical(odd));

    /* What is left goes with the library. */
    prop = on_device(1);
    OK(aclrtMallocPhysical(&odd, 2 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&base, 4 * MIB, 0, NULL, 0));
    OK(aclrtMapMem((char *)base + 2 * MIB, 2 * MIB, 0, odd, 0));
    free(host);
    free(back);
    OK(aclFinalize());
    return 0;
}
