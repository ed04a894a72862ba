/* What the rows of rows.txt use. The test writes a program of this, a function for each section of
 * rows, and main. */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "acl/acl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define HUGE_SIZE ((size_t)-1)
#define FORGED(kind) ((void *)(0x5A00000000000000ull | ((unsigned long long)(kind) << 52) | 12345))
/* Where the driver has its memory, and nothing is. */
#define NOWHERE ((void *)0x17FF00000000ull)

static int wrong;

static void expect(int line, const char *row, long code, long expected)
{
    if (code != expected) {
        const char *said = aclGetRecentErrMsg();
        fprintf(stderr, "rows.txt:%d: %s is %ld: %s\n", line, row, code, said != NULL ? said : "(nothing was said)");
        wrong = 1;
    }
    /* Every failure has a sentence, which names the function. */
    if (expected != 0 && code == expected) {
        const char *said = aclGetRecentErrMsg();
        size_t name = strcspn(row, "(");
        if (strncmp(row, "aclrtPeek", 9) != 0 && strncmp(row, "aclrtGetLast", 12) != 0 &&
            (said == NULL || strncmp(said, row, name) != 0)) {
            fprintf(stderr, "rows.txt:%d: %s failed with the sentence `%s`\n", line, row, said != NULL ? said : "");
            wrong = 1;
        }
    }
}

/* Outputs. */
static void *p;
static aclrtDrvMemHandle handle;
static aclrtStream stream_out;
static aclrtEvent event_out;
static aclrtContext context_out;
static int32_t number;
static uint32_t number32;
static uint64_t number64;
static int64_t signed64;
static size_t size, total;
static float milliseconds;
static char text[128];
static char key[65];
static aclrtUuid uuid;
static aclrtPtrAttributes attributes;
static aclrtPhysicalMemProp prop_out;
static aclCANNPackageVersion version;
static aclrtMemFabricHandle fabric;
static aclrtMemUsageInfo usage[2];
static aclrtUtilizationInfo utilization;
static aclrtMemUceInfo errors[2];
static aclrtRunMode mode;
static aclrtStreamStatus stream_status;
static aclrtEventRecordedStatus recorded;
static aclrtEventWaitStatus waited;
static aclrtDeviceStatus device_status;
static aclrtFloatOverflowMode saturation;
static aclmdlRICaptureStatus capture;
static aclmdlRI model;
static const aclCannAttr *attribute_list;

/* Inputs, made by `prepare`. */
static void *small, *large, *pinned, *freed, *freed_pinned;
static void *area, *mapped, *released;
static aclrtDrvMemHandle memory, unmapped_memory, freed_memory;
static aclrtStream stream, dead_stream, foreign_stream;
static aclrtEvent event, old_event, dead_event;
static aclrtContext context, dead_context;
static char exported[65], closed[65];
static uint64_t shareable;
static int32_t pids[2];
static unsigned char plain[8192];
static aclrtMallocAttribute attribute;
static aclrtMallocConfig config = {&attribute, 1}, no_attributes = {NULL, 1}, many_attributes = {&attribute, 1000};
static aclrtMallocAttribute one_address;
static aclrtMallocConfig one_address_config = {&one_address, 1};
static aclrtMemAccessDesc access_desc;
static aclrtMemLocation location;
static aclrtMemcpyBatchAttr batch, bad_batch;
static void *dsts[2], *srcs[2];
static size_t maxs[2], sizes[2], zero_sizes[2], indexes[2];
static aclrtStreamAttrValue attribute_value;

static void nothing(void *unused)
{
    (void)unused;
}

/* Properties with one thing changed. */
static aclrtPhysicalMemProp *prop(int handle_type, int allocation, int attr, int place, unsigned id, uint64_t reserve)
{
    static aclrtPhysicalMemProp made;
    memset(&made, 0, sizeof(made));
    made.handleType = (aclrtMemHandleType)handle_type;
    made.allocationType = (aclrtMemAllocationType)allocation;
    made.memAttr = (aclrtMemAttr)attr;
    made.location.type = (aclrtMemLocationType)place;
    made.location.id = id;
    made.reserve = reserve;
    return &made;
}

static aclrtMemAccessDesc *access_of(int flags, int place, unsigned id)
{
    memset(&access_desc, 0, sizeof(access_desc));
    access_desc.flags = (aclrtMemAccessFlags)flags;
    access_desc.location.type = (aclrtMemLocationType)place;
    access_desc.location.id = id;
    return &access_desc;
}

static aclrtMemLocation *location_of(int place, unsigned id)
{
    location.type = (aclrtMemLocationType)place;
    location.id = id;
    return &location;
}

static void must(int line, long code)
{
    if (code != 0) {
        const char *said = aclGetRecentErrMsg();
        fprintf(stderr, "prelude.c:%d: %ld: %s\n", line, code, said != NULL ? said : "");
        exit(1);
    }
}
#define MUST(call) must(__LINE__, call)

/* A process with objects of every kind, alive and dead. */
static void prepare(void)
{
    MUST(aclrtSetDevice(0));
    MUST(aclrtCreateContext(&dead_context, 1));
    MUST(aclrtCreateStream(&dead_stream));
    MUST(aclrtDestroyContext(dead_context));
    MUST(aclrtSetDevice(1));
    MUST(aclrtCreateStream(&foreign_stream));
    MUST(aclrtSetDevice(0));
    MUST(aclrtGetCurrentContext(&context));
    MUST(aclrtCreateStream(&stream));
    MUST(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
    MUST(aclrtCreateEvent(&old_event));
    MUST(aclrtCreateEvent(&dead_event));
    MUST(aclrtDestroyEvent(dead_event));
    MUST(aclrtMalloc(&small, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    MUST(aclrtMalloc(&large, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    MUST(aclrtMalloc(&freed, 4 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    MUST(aclrtFree(freed));
    MUST(aclrtMallocHost(&pinned, MIB));
    MUST(aclrtMallocHost(&freed_pinned, MIB));
    MUST(aclrtFreeHost(freed_pinned));
    aclrtPhysicalMemProp *usual = prop(0, 0, ACL_HBM_MEM_HUGE, ACL_MEM_LOCATION_TYPE_DEVICE, 0, 0);
    MUST(aclrtMallocPhysical(&memory, 4 * MIB, usual, 0));
    MUST(aclrtMallocPhysical(&unmapped_memory, 2 * MIB, usual, 0));
    MUST(aclrtMallocPhysical(&freed_memory, 2 * MIB, usual, 0));
    MUST(aclrtFreePhysical(freed_memory));
    MUST(aclrtReserveMemAddress(&area, 64 * MIB, 0, NULL, 1));
    MUST(aclrtReserveMemAddress(&released, 64 * MIB, 0, NULL, 1));
    MUST(aclrtReleaseMemAddress(released));
    mapped = (char *)area + 8 * MIB;
    MUST(aclrtMapMem(mapped, 4 * MIB, 0, memory, 0));
    MUST(aclrtIpcMemGetExportKey(large, 4 * MIB, exported, sizeof(exported), 1));
    MUST(aclrtIpcMemGetExportKey(large, 4 * MIB, closed, sizeof(closed), 0));
    MUST(aclrtIpcMemClose(closed));
    aclrtDrvMemHandle shared;
    MUST(aclrtMallocPhysical(&shared, 2 * MIB, usual, 0));
    MUST(aclrtMemExportToShareableHandle(shared, ACL_MEM_HANDLE_TYPE_NONE, 1, &shareable));
    pids[0] = pids[1] = (int32_t)getppid();
    bad_batch.rsv[3] = 1;
    for (int i = 0; i < 2; i++) {
        dsts[i] = (char *)large + i * 4096;
        srcs[i] = (char *)pinned + i * 4096;
        maxs[i] = sizes[i] = 1000;
    }
    attribute.attr = ACL_RT_MEM_ATTR_DEVICE_ID;
    attribute.value.deviceId = 1;
    one_address.attr = ACL_RT_MEM_ATTR_VA_FLAG;
    one_address.value.vaFlag = 1;
    memset(&attribute_value, 0xff, sizeof(attribute_value));
    while (aclGetRecentErrMsg() != NULL) {
    }
}
