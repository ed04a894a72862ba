// Calls the two functions of the library of kernels, as the vendor's memory samples do.
#include <cstdint>

#include "acl/acl.h"

void WriteDo(uint32_t blocks, void *stream, int *address, int value);
void ReadDo(uint32_t blocks, void *stream, int *address);

int main()
{
    void *memory = nullptr;
    aclrtStream stream = nullptr;
    if (aclInit(nullptr) != ACL_SUCCESS || aclrtSetDevice(0) != ACL_SUCCESS ||
        aclrtCreateStream(&stream) != ACL_SUCCESS ||
        aclrtMalloc(&memory, sizeof(int), ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS) {
        return 1;
    }
    WriteDo(1, stream, static_cast<int *>(memory), 7);
    ReadDo(1, stream, static_cast<int *>(memory));
    bool ended = aclrtFree(memory) == ACL_SUCCESS && aclrtDestroyStreamForce(stream) == ACL_SUCCESS &&
                 aclrtResetDeviceForce(0) == ACL_SUCCESS && aclFinalize() == ACL_SUCCESS;
    return ended ? 0 : 1;
}
