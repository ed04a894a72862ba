/*
 * An engine that finds its weights in the service, or writes them there:
 *
 *     engine SOCKET DOMAIN
 *
 * cc -I$ASCEND_HOME_PATH/include engine.c -L$ASCEND_HOME_PATH/lib64 -lascend_vmm_service -lascendcl
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "ascend_vmm_service.h"

#define MIB (1u << 20)

static void check(int code, const char *what)
{
    if (code != 0) {
        fprintf(stderr, "%s: %s\n", what, ascend_vmm_error());
        exit(code);
    }
}

static void check_acl(aclError code, const char *what)
{
    if (code != ACL_SUCCESS) {
        const char *said = aclGetRecentErrMsg();
        fprintf(stderr, "%s: %d %s\n", what, code, said != NULL ? said : "");
        exit(1);
    }
}

static void write_weights(ascend_vmm_domain domain)
{
    char *weights = malloc(MIB);
    for (int layer = 0; layer < 4; layer++) {
        char key[32];
        void *address = NULL;
        snprintf(key, sizeof(key), "layer.%d", layer);
        /* Weights would come from a file here. */
        memset(weights, layer + 1, MIB);
        check(ascend_vmm_put(domain, key, MIB, "u8 1048576", 10, &address), key);
        check_acl(aclrtMemcpy(address, MIB, weights, MIB, ACL_MEMCPY_HOST_TO_DEVICE), key);
    }
    free(weights);
    check(ascend_vmm_commit(domain), "commit");
}

static void print_weights(ascend_vmm_domain domain)
{
    char key[1025] = "";
    ascend_vmm_entry entry;
    while (ascend_vmm_next(domain, key, &entry) == ASCEND_VMM_OK) {
        char first = 0;
        check_acl(aclrtMemcpy(&first, 1, entry.address, 1, ACL_MEMCPY_DEVICE_TO_HOST), entry.key);
        printf("%s: %llu bytes, %.*s, the first is %d\n", entry.key, (unsigned long long)entry.size,
               (int)entry.value_size, (const char *)entry.value, first);
        snprintf(key, sizeof(key), "%s", entry.key);
    }
}

int main(int count, char **arguments)
{
    if (count != 3) {
        fprintf(stderr, "usage: engine SOCKET DOMAIN\n");
        return 2;
    }
    check_acl(aclInit(NULL), "aclInit");
    check_acl(aclrtSetDevice(0), "aclrtSetDevice");
    ascend_vmm_domain domain = 0;
    check(ascend_vmm_open(arguments[1], arguments[2], ASCEND_VMM_WRITE_OR_READ, 64 * MIB, 60000, &domain), "open");
    ascend_vmm_info info;
    check(ascend_vmm_get_info(domain, &info), "info");
    if (info.writes) {
        write_weights(domain);
        check(ascend_vmm_get_info(domain, &info), "info");
        printf("wrote version %llu of %s\n", (unsigned long long)info.version, arguments[2]);
    } else {
        printf("found version %llu of %s: %llu tensors\n", (unsigned long long)info.version, arguments[2],
               (unsigned long long)info.keys);
    }
    print_weights(domain);
    void *before = info.address;
    check(ascend_vmm_sleep(domain), "sleep");
    check(ascend_vmm_wake(domain, 60000), "wake");
    check(ascend_vmm_get_info(domain, &info), "info");
    printf("slept, and woke at %s\n", info.address == before ? "the same addresses" : "OTHER ADDRESSES");
    print_weights(domain);
    check(ascend_vmm_close(domain), "close");
    check_acl(aclrtResetDevice(0), "aclrtResetDevice");
    check_acl(aclFinalize(), "aclFinalize");
    return 0;
}
