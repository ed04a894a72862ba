/* A program as people check it with valgrind or AddressSanitizer, in a process without address
   segments: `checked [leak|overrun]`. */
#include "check.h"

static void use_everything(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    aclrtStream stream = NULL;
    aclrtEvent event = NULL;
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateEvent(&event));
    void *block = NULL, *small = NULL, *pinned = NULL;
    OK(aclrtMalloc(&block, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc(&small, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocHost(&pinned, 4 * MIB));
    fill_pattern(pinned, 4 * MIB, 5);
    OK(aclrtMemcpyAsync(block, 4 * MIB, pinned, 4 * MIB, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtRecordEvent(event, stream));
    OK(aclrtSynchronizeEvent(event));
    memset(pinned, 0, 4 * MIB);
    OK(aclrtMemcpyAsync(pinned, 4 * MIB, block, 4 * MIB, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    OK(aclrtSynchronizeStream(stream));
    CHECK(has_pattern(pinned, 4 * MIB, 5));
    OK(aclrtMemcpy(small, 100, block, 100, ACL_MEMCPY_DEVICE_TO_DEVICE));
    unsigned char *host = (unsigned char *)malloc(100);
    OK(aclrtMemcpy(host, 100, small, 100, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(has_pattern(host, 100, 5));
    free(host);

    aclrtPhysicalMemProp prop = on_device(0);
    aclrtDrvMemHandle handle = NULL, of_host = NULL;
    void *area = NULL, *other = NULL;
    OK(aclrtMallocPhysical(&handle, 4 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&area, 4 * MIB, 0, NULL, 1));
    OK(aclrtMapMem(area, 4 * MIB, 0, handle, 0));
    OK(aclrtMemcpy(area, 4 * MIB, block, 4 * MIB, ACL_MEMCPY_DEVICE_TO_DEVICE));

    /* What the CPU would have to see is refused, with the reason. */
    prop.memAttr = ACL_MEM_HUGE;
    prop.location.type = ACL_MEM_LOCATION_TYPE_HOST;
    OK(aclrtMallocPhysical(&of_host, 2 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&other, 2 * MIB, 0, NULL, 1));
    IS(aclrtMapMem(other, 2 * MIB, 0, of_host, 0), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    CHECK(strstr(aclGetRecentErrMsg(), "without address segments") != NULL);

    OK(aclrtReleaseMemAddress(other));
    OK(aclrtFreePhysical(of_host));
    OK(aclrtUnmapMem(area));
    OK(aclrtReleaseMemAddress(area));
    OK(aclrtFreePhysical(handle));
    OK(aclrtFreeHost(pinned));
    OK(aclrtFree(small));
    OK(aclrtFree(block));
    OK(aclrtDestroyEvent(event));
    OK(aclrtDestroyStream(stream));
    OK(aclrtResetDevice(0));
    OK(aclFinalize());
}

int main(int count, char **arguments)
{
    /* Again: such a session cannot be opened twice, so it stays open. */
    for (int round = 0; round < 2; round++) {
        use_everything();
    }
    const char *mistake = count > 1 ? arguments[1] : "";
    /* Volatile, or the compiler would remove the mistakes. */
    volatile char *volatile memory = NULL;
    if (strcmp(mistake, "leak") == 0) {
        for (int i = 0; i < 100; i++) {
            memory = (volatile char *)malloc(64);
            memory[0] = 1;
        }
    }
    if (strcmp(mistake, "overrun") == 0) {
        memory = (volatile char *)malloc(64);
        memory[64] = 1;
        free((void *)memory);
    }
    memory = NULL;
    return 0;
}
