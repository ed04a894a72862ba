/*
 * The memory service for engines that run the vendor's stack on Ascend NPUs.
 *
 * Link libascend_vmm_service.so. It opens no driver: it imports and maps by the functions of the
 * libascendcl.so that the process has, or that the loader finds. Set a device in the calling thread
 * first (aclrtSetDevice).
 *
 * Every function returns 0, or one of enum ascend_vmm_code; ascend_vmm_error then says why. A
 * domain may be used by several threads, one call at a time. A child of fork cannot use the domains
 * of its parent. Nothing waits longer than its timeout, plus 30 s if the service hangs.
 *
 * THERE IS NO READ-ONLY MAPPING ON THIS DRIVER: whoever maps served memory can write to it. "Reader"
 * is a promise of the program, not a protection.
 */
#ifndef ASCEND_VMM_SERVICE_H
#define ASCEND_VMM_SERVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a domain is opened for. */
enum ascend_vmm_mode {
    ASCEND_VMM_READ = 0,          /* what is committed; waits for it */
    ASCEND_VMM_WRITE = 1,         /* new memory; what is committed is served until the commit */
    ASCEND_VMM_WRITE_OR_READ = 2, /* writes if nothing is committed and nobody writes, else reads */
    ASCEND_VMM_DISCARD = 3,       /* gives up what is committed, then writes */
    ASCEND_VMM_UPDATE = 4         /* changes what is committed in place */
};

enum ascend_vmm_code {
    ASCEND_VMM_OK = 0,
    ASCEND_VMM_INVALID = 1,
    ASCEND_VMM_UNREACHABLE = 2,   /* no service at the socket */
    ASCEND_VMM_PROTOCOL = 3,
    ASCEND_VMM_FORBIDDEN = 4,
    ASCEND_VMM_QUOTA = 5,
    ASCEND_VMM_TIMEOUT = 6,
    ASCEND_VMM_OUT_OF_MEMORY = 7,
    ASCEND_VMM_EMPTY = 8,
    ASCEND_VMM_DIRTY = 9,         /* a writer died while it changed the memory in place */
    ASCEND_VMM_BUSY = 10,
    ASCEND_VMM_OTHER_DEVICE = 11, /* the memory is on another NPU, or the thread has another one */
    ASCEND_VMM_UNKNOWN = 12,      /* the service was started anew */
    ASCEND_VMM_KEEPER_GONE = 13,  /* the owner of the memory is gone: nobody may fall asleep */
    ASCEND_VMM_DRIVER = 14,
    ASCEND_VMM_LIST_FULL = 15,
    ASCEND_VMM_STALE = 16,        /* another layout is served than the one that was put to sleep */
    ASCEND_VMM_NO_KEY = 17,
    ASCEND_VMM_ASLEEP = 18,
    ASCEND_VMM_FORKED = 19,
    ASCEND_VMM_INTERRUPTED = 20,
    ASCEND_VMM_LIBRARY = 21,      /* no libascendcl.so, or one that lacks a function */
    ASCEND_VMM_NO_DEVICE = 22,
    ASCEND_VMM_REFUSED = 23,      /* a function of libascendcl.so failed */
    ASCEND_VMM_OTHER = 24
};

/* An open domain. 0 is none. */
typedef uint64_t ascend_vmm_domain;

typedef struct ascend_vmm_info {
    int32_t writes;       /* 1 for a writer that has not committed */
    int32_t awake;        /* 1 while its memory is mapped */
    int32_t device;       /* as the program numbers it */
    uint32_t allocations;
    uint64_t version;     /* 0 for a writer of new memory */
    void *address;        /* the first one; stays while it sleeps */
    uint64_t bytes;
    uint64_t keys;
} ascend_vmm_info;

typedef struct ascend_vmm_entry {
    const char *key;      /* good until the next find or next of the domain */
    void *address;        /* good until the domain is closed; memory is there while it is awake */
    uint64_t size;
    const void *value;    /* what its writer said about it; good until its key is put again, or close */
    size_t value_size;
} ascend_vmm_entry;

/*
 * Opens a domain such as "llama-70b/tp0/weights" and maps its memory on the thread's device. A
 * writer of new memory may have `capacity` bytes. Waits up to `timeout_ms` for the role, and later
 * for memory.
 */
int ascend_vmm_open(const char *socket, const char *name, int mode, uint64_t capacity, uint64_t timeout_ms,
                    ascend_vmm_domain *domain);

int ascend_vmm_get_info(ascend_vmm_domain domain, ascend_vmm_info *info);

/* Names `size` bytes, with a value for readers of up to 64 KiB, and says where they are: write there. */
int ascend_vmm_put(ascend_vmm_domain domain, const char *key, uint64_t size, const void *value, size_t value_size,
                   void **address);

/* Waits for the device and publishes what was put. The domain is read from then on. */
int ascend_vmm_commit(ascend_vmm_domain domain);

int ascend_vmm_find(ascend_vmm_domain domain, const char *key, ascend_vmm_entry *entry);

/* The first key behind `after`, NULL for the first of all; ASCEND_VMM_NO_KEY behind the last. */
int ascend_vmm_next(ascend_vmm_domain domain, const char *after, ascend_vmm_entry *entry);

/* Waits for the device, unmaps the memory, and keeps its addresses and the role. */
int ascend_vmm_sleep(ascend_vmm_domain domain);

/*
 * Maps the memory at the same addresses. If a call fails, nothing is mapped and the domain is
 * asleep: memory that is not there ends a kernel, and never gives it wrong bytes.
 */
int ascend_vmm_wake(ascend_vmm_domain domain, uint64_t timeout_ms);

/* Waits for the device, unmaps, and ends the role. A writer that did not commit leaves nothing. */
int ascend_vmm_close(ascend_vmm_domain domain);

/* Why this thread's latest call failed, with what to do. Good until the next one that fails. */
const char *ascend_vmm_error(void);

#ifdef __cplusplus
}
#endif
#endif
