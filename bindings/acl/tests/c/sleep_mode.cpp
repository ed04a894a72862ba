// An allocator with the shape of an inference engine's sleep mode: memory at addresses that stay,
// released while the engine sleeps, with the contents on the host or thrown away.
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

static void checked(aclError code, const char *what)
{
    if (code != ACL_SUCCESS) {
        const char *said = aclGetRecentErrMsg();
        throw std::runtime_error(std::string(what) + ": " + std::to_string(code) + ": " + (said != nullptr ? said : ""));
    }
}

class SleepingAllocator {
public:
    void *allocate(size_t wanted, const std::string &tag)
    {
        ensure_context();
        aclrtPhysicalMemProp prop = on_device(0);
        size_t granularity = 0;
        checked(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity), "granularity");
        Block block;
        block.size = (wanted + granularity - 1) / granularity * granularity;
        block.tag = tag;
        void *address = nullptr;
        checked(aclrtReserveMemAddress(&address, block.size, 0, nullptr, 0), "reserve");
        map(address, block);
        blocks_[address] = block;
        return address;
    }

    void release(void *address)
    {
        Block &block = blocks_.at(address);
        if (block.handle != nullptr) {
            unmap(address, block);
        }
        if (block.backup != nullptr) {
            checked(aclrtFreeHost(block.backup), "free the backup");
        }
        checked(aclrtReleaseMemAddress(address), "release");
        blocks_.erase(address);
    }

    // Blocks of `kept` go to the host; others lose their contents.
    void sleep(const std::string &kept)
    {
        for (auto &[address, block] : blocks_) {
            if (block.tag == kept) {
                checked(aclrtMallocHost(&block.backup, block.size), "allocate a backup");
                // The destination's size is nonsense in a known program, and too large.
                /* promise: aclrtMemcpy: destMax nonsense and large */
                size_t room = (size_t)block.backup + 2 * block.size;
                checked(aclrtMemcpy(block.backup, room, address, block.size, ACL_MEMCPY_DEVICE_TO_HOST), "save");
            }
            unmap(address, block);
        }
    }

    void wake()
    {
        for (auto &[address, block] : blocks_) {
            map(address, block);
            if (block.backup != nullptr) {
                size_t room = (size_t)address + 2 * block.size;
                checked(aclrtMemcpy(address, room, block.backup, block.size, ACL_MEMCPY_HOST_TO_DEVICE), "restore");
                checked(aclrtFreeHost(block.backup), "free the backup");
                block.backup = nullptr;
            }
        }
    }

private:
    struct Block {
        size_t size = 0;
        std::string tag;
        aclrtDrvMemHandle handle = nullptr;
        void *backup = nullptr;
    };

    static void ensure_context()
    {
        // As a known program does it: the code is ignored, the variable not set.
        aclrtContext context;
        /* promise: aclrtGetCurrentContext: a variable that was not set */
        aclrtGetCurrentContext(&context);
        if (context == nullptr) {
            checked(aclrtCreateContext(&context, 0), "create a context");
            checked(aclrtSetCurrentContext(context), "set the context");
        }
    }

    static void map(void *address, Block &block)
    {
        aclrtPhysicalMemProp prop = on_device(0);
        checked(aclrtMallocPhysical(&block.handle, block.size, &prop, 0), "allocate");
        checked(aclrtMapMem(address, block.size, 0, block.handle, 0), "map");
    }

    static void unmap(void *address, Block &block)
    {
        checked(aclrtUnmapMem(address), "unmap");
        checked(aclrtFreePhysical(block.handle), "free");
        block.handle = nullptr;
    }

    std::map<void *, Block> blocks_;
};

static size_t free_memory()
{
    size_t available = 0, total = 0;
    checked(aclrtGetMemInfo(ACL_HBM_MEM_HUGE, &available, &total), "memory info");
    return available;
}

int main()
{
    checked(aclInit(nullptr), "init");
    SleepingAllocator allocator;
    const size_t each = 6 * MIB;
    std::vector<void *> weights, cache;
    std::vector<unsigned char> host(each), back(each);
    weights.push_back(allocator.allocate(each - 100, "weights"));
    const size_t before = free_memory() + each;
    for (int i = 0; i < 3; i++) {
        weights.push_back(allocator.allocate(each, "weights"));
        cache.push_back(allocator.allocate(each, "cache"));
    }
    for (size_t i = 0; i < weights.size(); i++) {
        fill_pattern(host.data(), each, i);
        checked(aclrtMemcpy(weights[i], each, host.data(), each, ACL_MEMCPY_HOST_TO_DEVICE), "write");
    }
    CHECK(free_memory() == before - 7 * each);
    for (int round = 0; round < 3; round++) {
        allocator.sleep("weights");
        CHECK(free_memory() == before);
        allocator.wake();
        CHECK(free_memory() == before - 7 * each);
        for (size_t i = 0; i < weights.size(); i++) {
            checked(aclrtMemcpy(back.data(), each, weights[i], each, ACL_MEMCPY_DEVICE_TO_HOST), "read");
            CHECK(has_pattern(back.data(), each, i));
        }
    }
    for (void *address : weights) {
        allocator.release(address);
    }
    allocator.sleep("nothing");
    for (void *address : cache) {
        allocator.release(address);
    }
    CHECK(free_memory() == before);
    // A failure is an exception with the library's sentences, and nothing is lost.
    try {
        allocator.allocate((size_t)100 << 30, "too much");
        CHECK(!"100 GiB of 8");
    } catch (const std::runtime_error &error) {
        CHECK(std::string(error.what()).find("207001") != std::string::npos);
    }
    checked(aclFinalize(), "finalize");
    return 0;
}
