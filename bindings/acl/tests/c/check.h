/* What the programs share: a check that says where it failed, and what the library said. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "acl/acl_rt.h"

#define MIB ((size_t)1 << 20)

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            const char *said = aclGetRecentErrMsg();                                      \
            fprintf(stderr, "%s:%d: %s\n  %s\n", __FILE__, __LINE__, #condition,          \
                    said != NULL ? said : "(nothing was said)");                          \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#define OK(call) IS(call, ACL_SUCCESS)

#define IS(call, expected)                                                                \
    do {                                                                                  \
        aclError code_ = (call);                                                          \
        if (code_ != (expected)) {                                                        \
            const char *said = aclGetRecentErrMsg();                                      \
            fprintf(stderr, "%s:%d: %s is %d, not %d\n  %s\n", __FILE__, __LINE__, #call, \
                    code_, (int)(expected), said != NULL ? said : "(nothing was said)");  \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static inline void fill_pattern(void *memory, size_t size, unsigned seed)
{
    unsigned char *bytes = (unsigned char *)memory;
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)(i * 31 + i / 251 + seed);
    }
}

static inline int has_pattern(const void *memory, size_t size, unsigned seed)
{
    const unsigned char *bytes = (const unsigned char *)memory;
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != (unsigned char)(i * 31 + i / 251 + seed)) {
            return 0;
        }
    }
    return 1;
}

/* Properties of physical memory on a device, in 2 MiB pages of HBM. */
static inline aclrtPhysicalMemProp on_device(unsigned device)
{
    aclrtPhysicalMemProp prop;
    memset(&prop, 0, sizeof(prop));
    prop.handleType = ACL_MEM_HANDLE_TYPE_NONE;
    prop.allocationType = ACL_MEM_ALLOCATION_TYPE_PINNED;
    prop.memAttr = ACL_HBM_MEM_HUGE;
    prop.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

#endif
