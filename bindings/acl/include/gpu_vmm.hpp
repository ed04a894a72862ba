// The device layer of elastic KV caches on the C library: what kvcached calls gpu_vmm, for Ascend.
//
// Physical memory is created in pieces of one size, addresses are reserved once for the largest
// cache, and pieces are mapped and unmapped in them while the cache grows and shrinks. One piece may
// be mapped at many places: a page of zeros behind everything that has no memory of its own, so that
// reading there is allowed. Its last mapping goes with its last mem_unmap; mem_release may come
// before that. docs/elastic-kv.md tells how to use this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "acl/acl.h"

namespace kvcached {
namespace gpu_vmm {

using status_t = aclError;
using allocation_handle_t = aclrtDrvMemHandle;
using allocation_prop_t = aclrtPhysicalMemProp;
using access_desc_t = aclrtMemAccessDesc;

inline const char *backend_name() { return "Ascend"; }

inline bool is_success(status_t status) { return status == ACL_SUCCESS; }

// What the library said about the latest failure in this thread.
inline const char *error_string(status_t)
{
    const char *said = aclGetRecentErrMsg();
    return said != nullptr ? said : "no message";
}

inline void check(status_t status, const char *call, const char *file, unsigned line)
{
    if (!is_success(status)) {
        std::cerr << file << ':' << line << ' ' << call << " failed (" << status << "): " << error_string(status)
                  << std::endl;
        std::abort();
    }
}

// Programs may have called aclInit before, or a framework in the same process.
inline status_t initialize_runtime()
{
    const status_t status = aclInit(nullptr);
    return status == ACL_ERROR_REPEAT_INITIALIZE ? ACL_SUCCESS : status;
}

inline status_t set_device(int device) { return aclrtSetDevice(device); }

inline int current_device()
{
    int32_t device = -1;
    check(aclrtGetDevice(&device), "aclrtGetDevice", __FILE__, __LINE__);
    return device;
}

inline status_t mem_get_info(size_t *free_bytes, size_t *total_bytes)
{
    return aclrtGetMemInfo(ACL_HBM_MEM, free_bytes, total_bytes);
}

inline status_t device_synchronize() { return aclrtSynchronizeDevice(); }

// Every device of the driver can map memory.
inline status_t get_vmm_support(int *supported, int)
{
    *supported = 1;
    return ACL_SUCCESS;
}

inline allocation_prop_t make_pinned_device_allocation_prop(int device)
{
    allocation_prop_t prop{};
    prop.handleType = ACL_MEM_HANDLE_TYPE_NONE;
    prop.allocationType = ACL_MEM_ALLOCATION_TYPE_PINNED;
    prop.memAttr = ACL_HBM_MEM_HUGE;
    prop.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = static_cast<uint32_t>(device);
    return prop;
}

inline access_desc_t make_device_rw_access_desc(int device)
{
    access_desc_t desc{};
    desc.flags = ACL_RT_MEM_ACCESS_FLAGS_READWRITE;
    desc.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    desc.location.id = static_cast<uint32_t>(device);
    return desc;
}

inline status_t get_allocation_granularity(size_t *granularity, const allocation_prop_t *prop)
{
    allocation_prop_t copy = *prop;
    return aclrtMemGetAllocationGranularity(&copy, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, granularity);
}

inline status_t mem_create(allocation_handle_t *handle, size_t size, const allocation_prop_t *prop)
{
    return aclrtMallocPhysical(handle, size, prop, 0);
}

inline status_t mem_release(allocation_handle_t handle) { return aclrtFreePhysical(handle); }

// The library aligns by itself: to the size rounded up to a power of two, at most to 1 GiB.
inline status_t address_reserve(void **ptr, size_t size, size_t alignment, void *preferred = nullptr)
{
    const status_t status = aclrtReserveMemAddress(ptr, size, 0, preferred, 1);
    if (is_success(status) && alignment != 0 && reinterpret_cast<uintptr_t>(*ptr) % alignment != 0) {
        aclrtReleaseMemAddress(*ptr);
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    return status;
}

inline status_t address_free(void *ptr, size_t) { return aclrtReleaseMemAddress(ptr); }

inline status_t mem_map(void *ptr, size_t size, size_t offset, allocation_handle_t handle)
{
    return aclrtMapMem(ptr, size, offset, handle, 0);
}

// Unmaps everything in a range, which begins and ends where mappings do.
inline status_t mem_unmap(void *ptr, size_t size)
{
    for (size_t at = 0; at < size;) {
        void *start = nullptr;
        size_t length = 0;
        char *next = static_cast<char *>(ptr) + at;
        status_t status = aclrtMemGetAddressRange(next, &start, &length);
        if (is_success(status) && (start != next || length > size - at)) {
            status = ACL_ERROR_RT_PARAM_INVALID;
        }
        if (is_success(status)) {
            status = aclrtUnmapMem(next);
        }
        if (!is_success(status)) {
            return status;
        }
        at += length;
    }
    return ACL_SUCCESS;
}

// The device that owns the memory has access without this.
inline status_t set_access(void *ptr, size_t size, const access_desc_t *desc, size_t count)
{
    return aclrtMemSetAccess(ptr, size, const_cast<access_desc_t *>(desc), count);
}

}  // namespace gpu_vmm
}  // namespace kvcached
