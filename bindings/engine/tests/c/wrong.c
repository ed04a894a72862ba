/* Calls that do not fit: each gets its code and a sentence, and nothing crashes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "ascend_vmm_service.h"

#define IS(call, expected)                                                                  \
    do {                                                                                    \
        int code_ = (call);                                                                 \
        if (code_ != (expected)) {                                                          \
            fprintf(stderr, "%s:%d: %s is %d, not %d: %s\n", __FILE__, __LINE__, #call,     \
                    code_, (int)(expected), ascend_vmm_error());                            \
            exit(1);                                                                        \
        }                                                                                   \
        if ((expected) != 0 && strlen(ascend_vmm_error()) < 10) {                           \
            fprintf(stderr, "%s:%d: nothing is said\n", __FILE__, __LINE__);                \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

int main(int count, char **arguments)
{
    (void)count;
    const char *socket = arguments[1], *name = arguments[2];
    ascend_vmm_domain domain = 7;
    ascend_vmm_info info;
    ascend_vmm_entry entry;
    void *address, *none;
    IS(ascend_vmm_open(socket, name, ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_NO_DEVICE);
    IS(aclInit(NULL), 0);
    IS(aclrtSetDevice(0), 0);
    IS(ascend_vmm_open(NULL, name, ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, NULL, ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, name, ASCEND_VMM_READ, 0, 0, NULL), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, name, 5, 0, 0, &domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, "../x", ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, "\xff", ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open("/no/such", name, ASCEND_VMM_READ, 0, 0, &domain), ASCEND_VMM_UNREACHABLE);
    IS(ascend_vmm_open(socket, name, ASCEND_VMM_READ, 0, 1, &domain), ASCEND_VMM_TIMEOUT);
    IS(domain, 0);
    IS(ascend_vmm_commit(0), ASCEND_VMM_INVALID);
    IS(ascend_vmm_sleep(99), ASCEND_VMM_INVALID);
    IS(ascend_vmm_open(socket, name, ASCEND_VMM_WRITE, 4 << 20, 60000, &domain), 0);
    IS(ascend_vmm_get_info(domain, NULL), ASCEND_VMM_INVALID);
    IS(ascend_vmm_put(domain, "k", 1, NULL, 0, NULL), ASCEND_VMM_INVALID);
    IS(ascend_vmm_put(domain, NULL, 1, NULL, 0, &address), ASCEND_VMM_INVALID);
    IS(ascend_vmm_put(domain, "k", UINT64_MAX, NULL, 0, &address), ASCEND_VMM_INVALID);
    IS(ascend_vmm_put(domain, "k", 8, "v", 1, &address), 0);
    IS(ascend_vmm_sleep(domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_commit(domain), 0);
    IS(ascend_vmm_commit(domain), ASCEND_VMM_INVALID);
    IS(ascend_vmm_put(domain, "l", 8, NULL, 0, &none), ASCEND_VMM_INVALID);
    IS(ascend_vmm_find(domain, "l", &entry), ASCEND_VMM_NO_KEY);
    IS(ascend_vmm_find(domain, "k", NULL), ASCEND_VMM_INVALID);
    IS(ascend_vmm_find(domain, "k", &entry), 0);
    IS(entry.address != address || entry.size != 8 || memcmp(entry.value, "v", entry.value_size) != 0, 0);
    IS(ascend_vmm_next(domain, "k", &entry), ASCEND_VMM_NO_KEY);
    IS(ascend_vmm_sleep(domain), 0);
    IS(ascend_vmm_find(domain, "k", &entry), ASCEND_VMM_ASLEEP);
    IS(ascend_vmm_get_info(domain, &info), 0);
    IS(info.awake, 0);
    ascend_vmm_domain closed = domain;
    IS(ascend_vmm_close(domain), 0);
    IS(ascend_vmm_close(closed), ASCEND_VMM_INVALID);
    /* Numbers are not used again. */
    IS(ascend_vmm_open(socket, name, ASCEND_VMM_READ, 0, 60000, &domain), 0);
    IS(ascend_vmm_wake(closed, 0), ASCEND_VMM_INVALID);
    IS(domain == closed, 0);
    return 0;
}
