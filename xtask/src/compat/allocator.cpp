// An allocator for the framework, with the shape of an inference engine's sleep mode: each block is
// a reservation with physical memory behind it, which sleep takes away and wake brings back.
#include <sys/types.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "acl/acl.h"

namespace {
struct Block {
    size_t size;
    int device;
    aclrtDrvMemHandle handle;
    void *backup;
};

std::map<void *, Block> blocks;

void checked(aclError code, const char *what)
{
    if (code != ACL_SUCCESS) {
        const char *said = aclGetRecentErrMsg();
        std::fprintf(stderr, "%s: %d: %s\n", what, code, said != nullptr ? said : "");
        std::abort();
    }
}

void map(void *address, Block &block)
{
    aclrtPhysicalMemProp prop = {};
    prop.memAttr = ACL_HBM_MEM_HUGE;
    prop.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = block.device;
    checked(aclrtMallocPhysical(&block.handle, block.size, &prop, 0), "allocate");
    checked(aclrtMapMem(address, block.size, 0, block.handle, 0), "map");
}

void unmap(void *address, Block &block)
{
    checked(aclrtUnmapMem(address), "unmap");
    checked(aclrtFreePhysical(block.handle), "free");
    block.handle = nullptr;
}
}  // namespace

extern "C" {
void *my_malloc(ssize_t size, int device, aclrtStream)
{
    if (size == 0) {
        return nullptr;
    }
    Block block = {static_cast<size_t>(size), device, nullptr, nullptr};
    void *address = nullptr;
    checked(aclrtReserveMemAddress(&address, block.size, 0, nullptr, 0), "reserve");
    map(address, block);
    blocks[address] = block;
    return address;
}

void my_free(void *address, size_t, int, aclrtStream)
{
    if (address == nullptr) {
        return;
    }
    Block &block = blocks.at(address);
    if (block.handle != nullptr) {
        unmap(address, block);
    }
    checked(aclrtReleaseMemAddress(address), "release");
    blocks.erase(address);
}

void my_sleep()
{
    for (auto &[address, block] : blocks) {
        checked(aclrtMallocHost(&block.backup, block.size), "allocate a backup");
        checked(aclrtMemcpy(block.backup, block.size, address, block.size, ACL_MEMCPY_DEVICE_TO_HOST), "save");
        unmap(address, block);
    }
}

void my_wake()
{
    for (auto &[address, block] : blocks) {
        map(address, block);
        checked(aclrtMemcpy(address, block.size, block.backup, block.size, ACL_MEMCPY_HOST_TO_DEVICE), "restore");
        checked(aclrtFreeHost(block.backup), "free the backup");
        block.backup = nullptr;
    }
}

size_t my_blocks()
{
    return blocks.size();
}
}
