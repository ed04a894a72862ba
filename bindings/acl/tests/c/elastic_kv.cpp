/* A cache that grows and shrinks in reserved addresses, with one page of zeros behind what has no
 * memory of its own: the header for elastic KV caches. */
#include <vector>

#include "check.h"
#include "kvcached/gpu_vmm.hpp"

namespace vmm = kvcached::gpu_vmm;

static const size_t PAGE = 2 * MIB;
static const size_t SLOTS = 64;

int main()
{
    OK(vmm::initialize_runtime());
    OK(vmm::initialize_runtime());
    OK(vmm::set_device(0));
    int supported = 0;
    OK(vmm::get_vmm_support(&supported, vmm::current_device()));
    CHECK(supported == 1);
    size_t before = 0, now = 0, total = 0, granularity = 0;
    OK(vmm::mem_get_info(&before, &total));
    vmm::allocation_prop_t prop = vmm::make_pinned_device_allocation_prop(0);
    OK(vmm::get_allocation_granularity(&granularity, &prop));
    CHECK(granularity == PAGE);
    void *base = nullptr;
    OK(vmm::address_reserve(&base, SLOTS * PAGE, PAGE));
    char *at = static_cast<char *>(base);

    /* The page of zeros behind every slot costs one page. */
    vmm::allocation_handle_t zeros = nullptr;
    OK(vmm::mem_create(&zeros, PAGE, &prop));
    for (size_t slot = 0; slot < SLOTS; slot++) {
        OK(vmm::mem_map(at + slot * PAGE, PAGE, 0, zeros));
    }
    OK(aclrtMemset(at, PAGE, 0, PAGE));
    OK(vmm::mem_get_info(&now, &total));
    CHECK(before - now == PAGE);
    std::vector<unsigned char> host(PAGE, 1);
    OK(aclrtMemcpy(host.data(), PAGE, at + 17 * PAGE, PAGE, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(host == std::vector<unsigned char>(PAGE, 0));

    /* Slots get memory and lose it, several rounds. */
    vmm::access_desc_t access = vmm::make_device_rw_access_desc(0);
    for (unsigned round = 0; round < 3; round++) {
        std::vector<vmm::allocation_handle_t> pages(SLOTS, nullptr);
        for (size_t slot = round; slot < SLOTS; slot += 3) {
            OK(vmm::mem_create(&pages[slot], PAGE, &prop));
            OK(vmm::mem_unmap(at + slot * PAGE, PAGE));
            OK(vmm::mem_map(at + slot * PAGE, PAGE, 0, pages[slot]));
            OK(vmm::set_access(at + slot * PAGE, PAGE, &access, 1));
            fill_pattern(host.data(), PAGE, slot);
            OK(aclrtMemcpy(at + slot * PAGE, PAGE, host.data(), PAGE, ACL_MEMCPY_HOST_TO_DEVICE));
        }
        for (size_t slot = 0; slot < SLOTS; slot++) {
            OK(aclrtMemcpy(host.data(), PAGE, at + slot * PAGE, PAGE, ACL_MEMCPY_DEVICE_TO_HOST));
            CHECK(pages[slot] != nullptr ? has_pattern(host.data(), PAGE, slot) : host[0] == 0 && host[PAGE - 1] == 0);
        }
        for (size_t slot = round; slot < SLOTS; slot += 3) {
            OK(vmm::mem_unmap(at + slot * PAGE, PAGE));
            OK(vmm::mem_release(pages[slot]));
            OK(vmm::mem_map(at + slot * PAGE, PAGE, 0, zeros));
        }
        OK(vmm::mem_get_info(&now, &total));
        CHECK(before - now == PAGE);
    }

    /* A range is unmapped whole, or not at all where it does not fit. */
    CHECK(!vmm::is_success(vmm::mem_unmap(at, PAGE / 2)));
    CHECK(!vmm::is_success(vmm::mem_unmap(at + PAGE / 2, PAGE)));
    OK(vmm::mem_release(zeros));
    OK(vmm::mem_unmap(at, SLOTS * PAGE));
    CHECK(!vmm::is_success(vmm::mem_unmap(at, PAGE)));
    OK(vmm::address_free(base, SLOTS * PAGE));
    OK(vmm::device_synchronize());
    OK(vmm::mem_get_info(&now, &total));
    CHECK(now == before);
    OK(aclFinalize());
    return 0;
}
