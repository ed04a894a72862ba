/*
 * A libascendcl.so of host memory that fails when it is told to, and is as strict as the kernel:
 * memory that the process holds is not imported again, and handles may be 0.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HANDLES 64
#define MAPS 64

static uint64_t imported[HANDLES];
static struct { uintptr_t address; size_t size; uintptr_t handle; } maps[MAPS];
static struct { uintptr_t address; size_t size; } reservations[MAPS];
static int device = -1;
static char fails[64];
static int fails_after;

void stand_in_set_device(int number) { device = number; }

/* The call with this name fails after so many that succeed. */
void stand_in_fail(const char *function, int after)
{
    strncpy(fails, function, sizeof(fails) - 1);
    fails_after = after;
}

int stand_in_mapped(void)
{
    int count = 0;
    for (int i = 0; i < MAPS; i++) {
        count += maps[i].address != 0;
    }
    return count;
}

int stand_in_imported(void)
{
    int count = 0;
    for (int i = 0; i < HANDLES; i++) {
        count += imported[i] != 0;
    }
    return count;
}

int stand_in_reserved(void)
{
    int count = 0;
    for (int i = 0; i < MAPS; i++) {
        count += reservations[i].address != 0;
    }
    return count;
}

static int failing(const char *function)
{
    if (strcmp(fails, function) != 0) {
        return 0;
    }
    if (fails_after-- > 0) {
        return 0;
    }
    fails[0] = 0;
    return 1;
}

#define FAIL_IF_TOLD                  \
    do {                              \
        if (failing(__func__)) {      \
            return 507899;            \
        }                             \
        if (device < 0) {             \
            return 107002;            \
        }                             \
    } while (0)

const char *aclGetRecentErrMsg(void) { return "the stand-in was told to fail"; }

int aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = getpid();
    return 0;
}

int aclrtGetDevice(int32_t *answer)
{
    *answer = device;
    return device < 0 ? 107002 : 0;
}

int aclrtGetPhyDevIdByUserDevId(int32_t user, int32_t *physical)
{
    *physical = user;
    return 0;
}

#ifndef WITHOUT_IMPORT
int aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t on, uintptr_t *handle)
{
    FAIL_IF_TOLD;
    int free_one = -1;
    for (int i = 0; i < HANDLES; i++) {
        if (imported[i] == shareable + 1) {
            return 507899; /* EFAULT */
        }
        if (imported[i] == 0 && free_one < 0) {
            free_one = i;
        }
    }
    if (free_one < 0 || on != device) {
        return 107000;
    }
    imported[free_one] = shareable + 1;
    *handle = (uintptr_t)free_one;
    return 0;
}
#endif

int aclrtFreePhysical(uintptr_t handle)
{
    FAIL_IF_TOLD;
    if (handle >= HANDLES || imported[handle] == 0) {
        return 107000;
    }
    imported[handle] = 0;
    return 0;
}

int aclrtReserveMemAddress(uintptr_t *address, size_t size, size_t alignment, uintptr_t wanted, uint64_t flags)
{
    FAIL_IF_TOLD;
    (void)flags;
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || alignment != 0 || wanted != 0) {
        return 207001;
    }
    for (int i = 0; i < MAPS; i++) {
        if (reservations[i].address == 0) {
            reservations[i].address = *address = (uintptr_t)at;
            reservations[i].size = size;
            return 0;
        }
    }
    return 207001;
}

int aclrtReleaseMemAddress(uintptr_t address)
{
    FAIL_IF_TOLD;
    for (int i = 0; i < MAPS; i++) {
        uintptr_t end = address;
        if (reservations[i].address != address) {
            continue;
        }
        end += reservations[i].size;
        for (int j = 0; j < MAPS; j++) {
            if (maps[j].address >= address && maps[j].address < end) {
                return 507899;
            }
        }
        munmap((void *)address, reservations[i].size);
        reservations[i].address = 0;
        return 0;
    }
    return 107000;
}

int aclrtMapMem(uintptr_t address, size_t size, size_t offset, uintptr_t handle, uint64_t flags)
{
    FAIL_IF_TOLD;
    if (handle >= HANDLES || imported[handle] == 0 || offset != 0 || flags != 0) {
        return 107000;
    }
    for (int i = 0; i < MAPS; i++) {
        if (maps[i].address == address) {
            return 507899;
        }
    }
    for (int i = 0; i < MAPS; i++) {
        if (maps[i].address == 0) {
            maps[i].address = address;
            maps[i].size = size;
            maps[i].handle = handle;
            return mprotect((void *)address, size, PROT_READ | PROT_WRITE) == 0 ? 0 : 507899;
        }
    }
    return 207001;
}

int aclrtUnmapMem(uintptr_t address)
{
    FAIL_IF_TOLD;
    for (int i = 0; i < MAPS; i++) {
        if (maps[i].address == address) {
            mprotect((void *)address, maps[i].size, PROT_NONE);
            maps[i].address = 0;
            return 0;
        }
    }
    return 107000;
}

int aclrtSynchronizeDevice(void)
{
    FAIL_IF_TOLD;
    return 0;
}
