/* With ASCEND_RT_VISIBLE_DEVICES=1,0 the program's device 0 is the driver's device 1. */
#include "check.h"

int main(void)
{
    uint32_t count = 0;
    OK(aclrtGetDeviceCount(&count));
    CHECK(count == 2);
    int32_t id = -1;
    OK(aclrtGetLogicDevIdByUserDevId(0, &id));
    /* promise: aclrtGetLogicDevIdByUserDevId: the order of the environment */
    /* promise: aclrtGetUserDevIdByLogicDevId: the order of the environment */
    CHECK(id == 1);
    OK(aclrtGetUserDevIdByLogicDevId(0, &id));
    CHECK(id == 1);
    /* promise: aclrtSetDevice: by the program's number */
    OK(aclrtSetDevice(0));
    int32_t device = -1;
    OK(aclrtGetDevice(&device));
    CHECK(device == 0);
    void *memory = NULL;
    OK(aclrtMalloc(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes(memory, &attributes));
    CHECK(attributes.location.id == 0);

    /* Physical memory is asked for by the program's number, access granted by the driver's. */
    aclrtPhysicalMemProp prop = on_device(0);
    aclrtDrvMemHandle handle = NULL;
    void *area = NULL;
    OK(aclrtMallocPhysical(&handle, 2 * MIB, &prop, 0));
    OK(aclrtReserveMemAddress(&area, 2 * MIB, 0, NULL, 1));
    OK(aclrtMapMem(area, 2 * MIB, 0, handle, 0));
    aclrtMemLocation owner = {1, ACL_MEM_LOCATION_TYPE_DEVICE};
    uint64_t flags = 0;
    OK(aclrtMemGetAccess(area, &owner, &flags));
    /* promise: aclrtMemGetAccess: by the driver's number */
    CHECK(flags == ACL_RT_MEM_ACCESS_FLAGS_READWRITE);
    aclrtMemLocation other = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    OK(aclrtMemGetAccess(area, &other, &flags));
    CHECK(flags == ACL_RT_MEM_ACCESS_FLAGS_NONE);
    OK(aclFinalize());
    return 0;
}
