/* Hosts on which something is missing or unusual: `hosts WAY`. */
#include "check.h"

int main(int count, char **arguments)
{
    const char *way = count > 1 ? arguments[1] : "";
    uint32_t devices = 99;
    void *memory = NULL;
    size_t available = 0, total = 0;
    if (strcmp(way, "no-driver") == 0 || strcmp(way, "hidden") == 0) {
        /* promise: aclrtGetDeviceCount: no device */
        IS(aclrtGetDeviceCount(&devices), ACL_ERROR_RT_NO_DEVICE);
        CHECK(strlen(aclGetRecentErrMsg()) > 40);
        CHECK(aclrtGetSocName() == NULL);
        IS(aclrtSetDevice(0), ACL_ERROR_RT_NO_DEVICE);
        IS(aclrtGetDevice((int32_t *)&devices), ACL_ERROR_RT_CONTEXT_NULL);
        OK(aclInit(NULL));
        aclCANNPackageVersion version;
        OK(aclsysGetCANNVersion(ACL_PKG_NAME_DRIVER, &version));
        OK(aclFinalize());
        return 0;
    }
    if (strcmp(way, "no-process") == 0) {
        /* The devices are there, and none can be set up. */
        OK(aclrtGetDeviceCount(&devices));
        CHECK(devices == 2);
        /* promise: aclrtSetDevice: cannot be set up */
        IS(aclrtSetDevice(0), ACL_ERROR_RT_DEV_SETUP_ERROR);
        const char *said = aclGetRecentErrMsg();
        CHECK(said != NULL && strstr(said, "aclrtSetDevice") != NULL);
        aclrtContext context = NULL;
        IS(aclrtCreateContext(&context, 1), ACL_ERROR_RT_DEV_SETUP_ERROR);
        IS(aclrtMalloc(&memory, 16, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_CONTEXT_NULL);
        aclrtPhysicalMemProp prop = on_device(0);
        aclrtDrvMemHandle handle = NULL;
        CHECK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0) != ACL_SUCCESS && handle == NULL);
        return 0;
    }
    if (strcmp(way, "named") == 0) {
        /* promise: aclrtGetSocName: overridden */
        CHECK(strcmp(aclrtGetSocName(), "Ascend910_9392") == 0);
        return 0;
    }
    OK(aclrtSetDevice(0));
    if (strcmp(way, "giant") == 0) {
        /* Pages of 1 GiB, for policies and for kinds of physical memory. */
        OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE1G, &available, &total));
        CHECK(available >= (size_t)2 << 30);
        const size_t before = available;
        /* promise: aclrtMalloc: pages of 1 GiB */
        OK(aclrtMalloc(&memory, 5 * MIB, ACL_MEM_MALLOC_HUGE1G_ONLY));
        CHECK((size_t)memory % ((size_t)1 << 30) == 0);
        OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE1G, &available, &total));
        CHECK(before - available == (size_t)1 << 30);
        aclrtPtrAttributes attributes;
        OK(aclrtPointerGetAttributes((char *)memory + 5 * MIB, &attributes));
        CHECK(attributes.pageSize == (uint32_t)1 << 30);
        OK(aclrtMemset(memory, 5 * MIB, 3, 5 * MIB));
        OK(aclrtFree(memory));
        OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE1G, &available, &total));
        CHECK(before == available);
        aclrtPhysicalMemProp prop = on_device(0);
        prop.memAttr = ACL_HBM_MEM_HUGE1G;
        aclrtDrvMemHandle handle = NULL;
        OK(aclrtMallocPhysical(&handle, 100 * MIB, &prop, 0));
        OK(aclrtReserveMemAddress(&memory, (size_t)1 << 30, 0, NULL, 1));
        OK(aclrtMapMem(memory, 100 * MIB, 0, handle, 0));
        OK(aclrtUnmapMem(memory));
        OK(aclrtMapMem(memory, (size_t)1 << 30, 0, handle, 0));
        OK(aclrtUnmapMem(memory));
        OK(aclrtReleaseMemAddress(memory));
        OK(aclrtFreePhysical(handle));
        return 0;
    }
    if (strcmp(way, "host-giant") == 0) {
        /* Pages of 1 GiB of the host, imported on a device: the host counts them as what they are. */
        const size_t gib = (size_t)1 << 30;
        aclrtPhysicalMemProp prop;
        memset(&prop, 0, sizeof(prop));
        prop.memAttr = ACL_MEM_P2P_HUGE1G;
        prop.location.type = ACL_MEM_LOCATION_TYPE_HOST;
        aclrtDrvMemHandle handle = NULL, imported = NULL;
        uint64_t shareable = 0;
        OK(aclrtMallocPhysical(&handle, 2 * gib, &prop, 0));
        OK(aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, 1, &shareable));
        OK(aclrtMemImportFromShareableHandle(shareable, 0, &imported));
        OK(aclrtMemGetAllocationPropertiesFromHandle(imported, &prop));
        size_t granularity = 0, size = 0;
        OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity));
        CHECK(granularity == gib);
        OK(aclrtReserveMemAddress(&memory, 3 * gib, 0, NULL, 1));
        CHECK(aclrtMapMem((char *)memory + 2 * MIB, 2 * gib, 0, imported, 0) != ACL_SUCCESS);
        CHECK(aclrtMapMem(memory, 4 * MIB, 0, imported, 0) != ACL_SUCCESS);
        OK(aclrtMapMem((char *)memory + gib, 2 * gib, 0, imported, 0));
        void *start = NULL;
        OK(aclrtMemGetAddressRange((char *)memory + 2 * gib, &start, &size));
        CHECK(start == (char *)memory + gib && size == 2 * gib);
        aclrtPtrAttributes attributes;
        OK(aclrtPointerGetAttributes((char *)memory + gib, &attributes));
        CHECK(attributes.pageSize == gib);
        OK(aclrtUnmapMem((char *)memory + gib));
        OK(aclrtReleaseMemAddress(memory));
        OK(aclrtFreePhysical(imported));
        OK(aclrtFreePhysical(handle));
        return 0;
    }
    if (strcmp(way, "no-giant") == 0) {
        CHECK(aclrtMalloc(&memory, 5 * MIB, ACL_MEM_MALLOC_HUGE1G_ONLY) != ACL_SUCCESS);
        aclrtPhysicalMemProp prop = on_device(0);
        prop.memAttr = ACL_HBM_MEM_HUGE1G;
        aclrtDrvMemHandle handle = NULL;
        CHECK(aclrtMallocPhysical(&handle, 100 * MIB, &prop, 0) != ACL_SUCCESS && handle == NULL);
        return 0;
    }
    if (strcmp(way, "no-pod") == 0) {
        /* A fabric handle is refused, and the plain one can still be had. */
        aclrtPhysicalMemProp prop = on_device(0);
        aclrtDrvMemHandle handle = NULL;
        aclrtMemFabricHandle fabric;
        uint64_t shareable = 0;
        OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
        /* promise: aclrtMemExportToShareableHandleV2: in no super pod */
        IS(aclrtMemExportToShareableHandleV2(handle, 1, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, &fabric),
           ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
        OK(aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, 1, &shareable));
        OK(aclrtFreePhysical(handle));
        return 0;
    }
    if (strcmp(way, "ddr") == 0) {
        /* A card without HBM: asked for it, it answers for its DDR. */
        OK(aclrtGetMemInfo(ACL_DDR_MEM, &available, &total));
        CHECK(total == (size_t)8 << 30 && available <= total);
        size_t same = 0, same_total = 0;
        OK(aclrtGetMemInfo(ACL_HBM_MEM, &same, &same_total));
        /* promise: aclrtGetMemInfo: a card without HBM */
        CHECK(same == available && same_total == total);
        OK(aclrtGetMemInfo(ACL_DDR_MEM_HUGE, &same, &same_total));
        CHECK(same == available && same_total == total);
        OK(aclrtGetMemInfo(ACL_HBM_MEM_HUGE, &same, &same_total));
        CHECK(same == 0 && same_total == 0);
        return 0;
    }
    if (strcmp(way, "nodes") == 0) {
        /* Host memory of a NUMA node, which needs a context. */
        aclrtPhysicalMemProp prop;
        memset(&prop, 0, sizeof(prop));
        prop.memAttr = ACL_MEM_HUGE;
        prop.location.type = ACL_MEM_LOCATION_TYPE_HOST_NUMA;
        for (unsigned node = 0; node < 2; node++) {
            aclrtDrvMemHandle handle = NULL;
            prop.location.id = node;
            OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
            aclrtPhysicalMemProp found;
            OK(aclrtMemGetAllocationPropertiesFromHandle(handle, &found));
            /* promise: aclrtMemGetAllocationPropertiesFromHandle: what was asked for */
            CHECK(found.location.id == node && found.location.type == ACL_MEM_LOCATION_TYPE_HOST_NUMA);
            OK(aclrtFreePhysical(handle));
        }
        return 0;
    }
    fprintf(stderr, "no such way\n");
    return 2;
}
