/*
 * What the vendor's library does with the driver, by bare system calls: it looks at the node and at
 * the list of modules, asks which device is a device's master, allocates device memory by ALLOC and
 * ADVISE, pins host memory, prepares copies, does them and destroys them one by one and at once,
 * registers host memory for a device, looks at device memory with the CPU, in part and as a whole,
 * the same at memory of a handle, uses managed memory on both sides, and shares the device memory
 * with a child by name.
 * An argument says that the driver is 8.5.0, whose numbers of two commands differ.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call) do { if ((call) < 0) { perror(#call); return 1; } } while (0)
#define MUST(what) do { if (!(what)) { fprintf(stderr, "not true: %s\n", #what); return 1; } } while (0)
#define HUGE_PAGE (2ull << 20)
#define GIB (1ull << 30)
#define SVM_START 0x100000000000ull
#define DEVICE_HEAP 3000u
#define MANAGED_HEAP 3100u
#define HOST_HEAP 3200u
#define RESERVE_HEAP 3300u
#define ADDRESS(heap) (SVM_START + (heap) * GIB)
#define NAME_SIZE 65

/* The argument of every command: a head with the device, then the command's own members. */
union arg {
    struct { uint32_t logical, device, vf, pad, word[82]; };
    struct { uint64_t head[2], quad[41]; };
    struct { char before[16], bytes[328]; };
};

static unsigned long alloc_process = 0x41584d65, mmap_info = 0xc1584d68;

static int file_of(const char *name, int *fd)
{
    struct { char name[256]; int device; } module = { "", 0 };
    char path[PATH_MAX];

    /* The library opens what realpath(3) answers. */
    MUST(realpath("/dev/davinci_manager", path));
    CHECK(*fd = open(path, O_RDWR | O_SYNC | O_CLOEXEC));
    strcpy(module.name, name);
    CHECK(ioctl(*fd, 0x5a00, &module));
    return 0;
}

static int look_around(void)
{
    char line[1024], link[16];
    FILE *modules = fopen("/proc/modules", "r");
    int fd, found = 0, level = -1;

    MUST(modules);
    while (fgets(line, sizeof line, modules))
        found |= strstr(line, "asdrv_pbl") != NULL;
    fclose(modules);
    MUST(found);
    MUST(readlink("/dev/davinci_manager", link, sizeof link) < 0 && errno == EINVAL);
    if (file_of("DEVMNG", &fd))
        return 1;
    CHECK(ioctl(fd, 0x4d9a, &level)); /* GET_CONSOLE_LOG_LEVEL */
    MUST(level >= 0 && level <= 7);
    CHECK(ioctl(fd, 0x5a01, 0));
    close(fd);
    return 0;
}

/* The master of a device, which is itself unless several devices share one operating system. */
static int master(uint32_t device)
{
    struct {
        uint32_t device, pad, main, sub;
        uint64_t filter, filter_length, input, input_length, output, output_length;
    } call = { .main = 0x45, .sub = 0x25, .input_length = 4, .output_length = 4 };
    uint32_t master = ~device, absent = 99;
    int fd;

    if (file_of("URD", &fd))
        return 1;
    call.input = (uintptr_t)&device;
    call.output = (uintptr_t)&master;
    CHECK(ioctl(fd, 0x5601, &call));
    MUST(master == device);
    call.input = (uintptr_t)&absent;
    MUST(ioctl(fd, 0x5601, &call) < 0 && errno == EINVAL);
    CHECK(ioctl(fd, 0x5a01, 0));
    close(fd);
    return 0;
}

static int heap(int fd, uint32_t kind, uint32_t sub_kind, uint32_t index)
{
    union arg arg = { .word = { 0, kind, sub_kind, index } };
    arg.quad[2] = GIB;
    CHECK(ioctl(fd, 0x41584d25, &arg)); /* UPDATE_HEAP */
    return 0;
}

static int session(int *fd)
{
    struct { uint64_t start, size; } segments[16];
    union arg arg = { 0 };

    if (file_of("SVM", fd))
        return 1;
    CHECK(ioctl(*fd, alloc_process, &arg));
    arg.word[0] = 16;
    arg.quad[2] = (uintptr_t)segments;
    CHECK(ioctl(*fd, mmap_info, &arg));
    for (uint32_t i = 0; i < arg.word[0]; i++) {
        void *wanted = (void *)(uintptr_t)segments[i].start;
        MUST(mmap(wanted, segments[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0) == wanted);
    }
    arg = (union arg){ 0 };
    CHECK(ioctl(*fd, 0xc1584d24, &arg)); /* INIT_PROCESS */
    arg = (union arg){ 0 };
    arg.quad[6] = 1;
    CHECK(ioctl(*fd, 0xc1584d1a, &arg)); /* SETUP_DEVICE */
    return heap(*fd, 0xefef0002, 1, DEVICE_HEAP) || heap(*fd, 0xefef0002, 0, MANAGED_HEAP) ||
           heap(*fd, 0xefef0001, 2, HOST_HEAP);
}

static int command(int fd, unsigned long request, uint64_t first, uint64_t second, uint32_t third)
{
    union arg arg = { 0 };
    arg.quad[0] = first;
    arg.quad[1] = second;
    arg.word[4] = third;
    CHECK(ioctl(fd, request, &arg));
    return 0;
}

static int allocate(int fd, uint64_t address, uint64_t size, uint32_t advice)
{
    return command(fd, 0x41584d03, address, size, 0) ||     /* ALLOC */
           command(fd, 0x41584d0d, address, size, advice);  /* ADVISE */
}

/* With what the library calls "info": the device is named, and the source may be the device's. */
static int copy(int fd, uint64_t to, uint64_t from, uint64_t size, uint32_t direction)
{
    union arg arg = { 0 };
    arg.quad[0] = to;
    arg.quad[1] = from;
    arg.quad[2] = size;
    arg.word[6] = direction == 2;
    arg.word[7] = direction;
    CHECK(ioctl(fd, 0xc1584d05, &arg)); /* MEMCPY */
    MUST(arg.word[7] == direction);
    return 0;
}

/* A copy that is prepared once and done twice, with and without waiting. */
static int prepared_copy(int fd, uint64_t device)
{
    static char bytes[4096], back[4096];
    union arg arg = { 0 }, submit = { 0 };

    arg.quad[0] = (uintptr_t)bytes;
    arg.quad[1] = device;
    arg.quad[2] = arg.quad[3] = arg.quad[4] = sizeof bytes; /* both pitches, and the width */
    arg.quad[5] = 1;
    arg.word[14] = 1; /* to the device */
    CHECK(ioctl(fd, 0xc1584d0b, &arg)); /* CONVERT_ADDR */
    memcpy(submit.quad, arg.quad + 8, 40);
    for (int turn = 0; turn < 2; turn++) {
        memset(bytes, 'a' + turn, sizeof bytes);
        submit.word[10] = turn;
        CHECK(ioctl(fd, 0x41584d09, &submit)); /* SUBMIT_CONVERT_CPY */
        if (turn)
            CHECK(ioctl(fd, 0x41584d0a, &submit)); /* WAIT_CONVERT_CPY_RESULT */
        if (copy(fd, (uintptr_t)back, device, sizeof back, 2))
            return 1;
        MUST(memcmp(bytes, back, sizeof back) == 0);
    }
    submit = (union arg){ 0 };
    memcpy(submit.quad + 7, arg.quad + 8, 40);
    CHECK(ioctl(fd, 0x41584d0c, &submit)); /* DESTROY_ADDR */
    MUST(ioctl(fd, 0x41584d0c, &submit) < 0 && errno == EFAULT);
    return 0;
}

/* Copies that are prepared and destroyed together. */
static int prepared_copies(int fd, uint64_t device)
{
    static char bytes[2][4096];
    uint64_t prepared[2][5], addresses[2];
    union arg batch = { 0 };

    for (int i = 0; i < 2; i++) {
        union arg arg = { 0 };
        arg.quad[0] = (uintptr_t)bytes[i];
        arg.quad[1] = device + i * sizeof bytes[i];
        arg.quad[2] = arg.quad[3] = arg.quad[4] = sizeof bytes[i];
        arg.quad[5] = 1;
        arg.word[14] = 1;
        CHECK(ioctl(fd, 0xc1584d0b, &arg)); /* CONVERT_ADDR */
        memcpy(prepared[i], arg.quad + 8, sizeof prepared[i]);
        addresses[i] = (uintptr_t)prepared[i];
    }
    batch.quad[0] = (uintptr_t)addresses;
    batch.word[2] = 2;
    CHECK(ioctl(fd, 0x41584d10, &batch)); /* DESTROY_ADDR_BATCH */
    MUST(ioctl(fd, 0x41584d10, &batch) < 0 && errno == EFAULT);
    return 0;
}

/* Device memory that the CPU sees. `busy` is the start of the mapping of a handle, if there is one. */
static int window(int fd, uint64_t device, uint64_t size, uint64_t busy)
{
    volatile uint64_t *words = (uint64_t *)(uintptr_t)device;
    uint64_t word = 7;
    union arg arg = { 0 };

    arg.quad[0] = device;
    arg.quad[2] = size;
    arg.word[6] = 2; /* the device's memory, for the host */
    arg.word[8] = 0; /* with any other access 9.0.0 makes it read-only */
    CHECK(ioctl(fd, 0xc1584d2d, &arg)); /* MEM_REMOTE_MAP */
    MUST(arg.quad[1] == device && arg.quad[2] == size);
    MUST(ioctl(fd, 0xc1584d2d, &arg) < 0 && errno == EINVAL); /* once */
    if (busy) {
        union arg unmap = { 0 };
        unmap.quad[0] = busy;
        MUST(ioctl(fd, 0xc1584d35, &unmap) < 0 && errno == EBUSY); /* MEM_UNMAP */
    }
    if (copy(fd, device + 8, (uintptr_t)&word, sizeof word, 1))
        return 1;
    MUST(words[1] == 7);
    words[2] = 9;
    if (copy(fd, (uintptr_t)&word, device + 16, sizeof word, 2))
        return 1;
    MUST(word == 9);
    arg = (union arg){ 0 };
    arg.quad[0] = device;
    arg.word[2] = 2;
    CHECK(ioctl(fd, 0xc1584d2e, &arg)); /* MEM_REMOTE_UNMAP */
    return 0;
}

/* Memory of a handle, in part and as a whole. */
static int handle_window(int fd, uint64_t address)
{
    union arg create = { 0 }, arg = { 0 };

    if (heap(fd, 0xefef0002, 5, RESERVE_HEAP) || command(fd, 0x41584d03, address, 2 * HUGE_PAGE, 0)) /* ALLOC */
        return 1;
    create.quad[1] = 2 * HUGE_PAGE;
    create.word[6] = create.word[8] = 1; /* the device's, in huge pages */
    CHECK(ioctl(fd, 0xc1584d32, &create)); /* MEM_CREATE */
    arg.quad[0] = address;
    arg.quad[1] = 2 * HUGE_PAGE;
    arg.word[4] = create.word[0];
    arg.word[5] = arg.word[6] = 1;
    arg.quad[4] = create.quad[5];
    CHECK(ioctl(fd, 0x41584d34, &arg)); /* MEM_MAP */
    if (window(fd, address + HUGE_PAGE, HUGE_PAGE, address) || window(fd, address, 2 * HUGE_PAGE, address))
        return 1;
    arg = (union arg){ 0 };
    arg.quad[0] = address;
    CHECK(ioctl(fd, 0xc1584d35, &arg)); /* MEM_UNMAP */
    MUST(arg.quad[1] == 2 * HUGE_PAGE);
    arg = (union arg){ 0 };
    arg.word[0] = create.word[0];
    arg.word[1] = 1;
    arg.quad[1] = create.quad[5];
    CHECK(ioctl(fd, 0xc1584d33, &arg)); /* MEM_RELEASE */
    return command(fd, 0x41584d04, address, 0, 0); /* FREE_PAGES */
}

/* Ordinary host memory that a device sees, as the library's register of host memory does it. */
static int host_register(int fd)
{
    long page = sysconf(_SC_PAGESIZE);
    void *bytes = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    union arg arg = { 0 };

    MUST(bytes != MAP_FAILED);
    arg.quad[0] = (uintptr_t)bytes;
    arg.quad[2] = 2 * page;
    arg.word[8] = 3;
    MUST(ioctl(fd, 0xc1584d2d, &arg) < 0 && errno == EOPNOTSUPP); /* these chips have the other kind */
    arg.word[6] = 3; /* through the link */
    CHECK(ioctl(fd, 0xc1584d2d, &arg)); /* MEM_REMOTE_MAP */
    MUST(arg.quad[1] != 0);
    MUST(ioctl(fd, 0xc1584d2d, &arg) < 0 && errno == EINVAL); /* once */
    arg = (union arg){ 0 };
    arg.quad[0] = (uintptr_t)bytes;
    CHECK(ioctl(fd, 0xc1584d2e, &arg)); /* MEM_REMOTE_UNMAP */
    MUST(ioctl(fd, 0xc1584d2e, &arg) < 0 && errno == ENOENT);
    return munmap(bytes, 2 * page);
}

/* Managed memory: the CPU's page faults give it pages, PREFETCH moves them to the device. */
static int both_sides(int fd, uint64_t address)
{
    volatile uint64_t *words = (uint64_t *)(uintptr_t)address;
    uint64_t word = 0;

    if (command(fd, 0x41584d03, address, HUGE_PAGE, 0)) /* ALLOC */
        return 1;
    words[0] = 11;
    if (command(fd, 0x41584d0e, address, HUGE_PAGE, 0) || /* PREFETCH */
        copy(fd, (uintptr_t)&word, address, sizeof word, 2))
        return 1;
    MUST(word == 11);
    word = 12;
    if (copy(fd, address + 8, (uintptr_t)&word, sizeof word, 1))
        return 1;
    MUST(words[1] == 12);
    return command(fd, 0x41584d04, address, 0, 0); /* FREE_PAGES */
}

static int open_by_name(int from_parent)
{
    char name[NAME_SIZE], text[64] = "";
    uint64_t size;
    int fd;
    union arg arg = { 0 };

    if (session(&fd))
        return 1;
    MUST(read(from_parent, name, sizeof name) == sizeof name);
    memcpy(arg.bytes, name, sizeof name);
    CHECK(ioctl(fd, 0xc1584d1d, &arg)); /* IPC_MEM_QUERY */
    size = arg.quad[10];
    MUST(size == 2 * HUGE_PAGE && arg.word[17] == 1);
    if (command(fd, 0x41584d03, ADDRESS(MANAGED_HEAP), size, 0)) /* ALLOC */
        return 1;
    arg = (union arg){ 0 };
    arg.quad[0] = ADDRESS(MANAGED_HEAP);
    memcpy(arg.bytes + 8, name, sizeof name);
    CHECK(ioctl(fd, 0x41584d15, &arg)); /* IPC_MEM_OPEN */
    if (command(fd, 0x41584d0e, ADDRESS(MANAGED_HEAP), size, 0) || /* PREFETCH */
        copy(fd, (uintptr_t)text, ADDRESS(MANAGED_HEAP), sizeof text, 2))
        return 1;
    printf("child read: %s\n", text);
    return command(fd, 0x41584d16, ADDRESS(MANAGED_HEAP), 0, 0) || /* IPC_MEM_CLOSE */
           command(fd, 0x41584d04, ADDRESS(MANAGED_HEAP), 0, 0);   /* FREE_PAGES */
}

int main(int argc, char **argv)
{
    static const char text[64] = "plain memory of the parent";
    char name[NAME_SIZE], digits[9] = "";
    int fd, line[2], status;
    union arg arg = { 0 };
    pid_t child;
    (void)argv;

    if (argc > 1) {
        alloc_process = 0x41584d43;
        mmap_info = 0xc1584d46;
    }
    CHECK(pipe(line));
    CHECK(child = fork());
    if (child == 0) {
        close(line[1]);
        return open_by_name(line[0]);
    }
    if (look_around() || master(0) || master(1) || session(&fd))
        return 1;
    if (allocate(fd, ADDRESS(DEVICE_HEAP), 2 * HUGE_PAGE, 0x8c) || allocate(fd, ADDRESS(HOST_HEAP), HUGE_PAGE, 0x200))
        return 1;
    memcpy((void *)(uintptr_t)ADDRESS(HOST_HEAP), text, sizeof text);
    if (copy(fd, ADDRESS(DEVICE_HEAP), ADDRESS(HOST_HEAP), sizeof text, 1) ||
        command(fd, 0xc1584d11, ADDRESS(DEVICE_HEAP), 0, 0) ||         /* TRANSLATE */
        command(fd, 0x41584d3c, (uintptr_t)text, sizeof text, 0) ||    /* REGISTER_DMA */
        command(fd, 0x41584d3d, (uintptr_t)text, 0, 0) ||              /* UNREGISTER_DMA */
        prepared_copy(fd, ADDRESS(DEVICE_HEAP) + HUGE_PAGE) ||
        prepared_copies(fd, ADDRESS(DEVICE_HEAP) + HUGE_PAGE) ||
        host_register(fd) ||
        window(fd, ADDRESS(DEVICE_HEAP) + HUGE_PAGE, HUGE_PAGE, 0) ||
        window(fd, ADDRESS(DEVICE_HEAP), 2 * HUGE_PAGE, 0) ||
        handle_window(fd, ADDRESS(RESERVE_HEAP)) ||
        copy(fd, ADDRESS(DEVICE_HEAP), ADDRESS(HOST_HEAP), sizeof text, 1) ||
        both_sides(fd, ADDRESS(MANAGED_HEAP)))
        return 1;
    arg.quad[0] = ADDRESS(DEVICE_HEAP);
    arg.quad[1] = 2 * HUGE_PAGE;
    arg.word[21] = NAME_SIZE;
    CHECK(ioctl(fd, 0xc1584d1b, &arg)); /* IPC_MEM_CREATE */
    memcpy(name, arg.bytes + 16, sizeof name);
    arg = (union arg){ 0 };
    memcpy(arg.bytes, name, sizeof name);
    arg.word[17] = child;
    arg.word[49] = 1;
    CHECK(ioctl(fd, 0x41584d20, &arg)); /* IPC_MEM_SET_PID */
    /* The same with the server, whose id is the end of the name. */
    memcpy(digits, name + 28, 8);
    arg.word[50] = strtoul(digits, NULL, 16);
    CHECK(ioctl(fd, 0x41584d21, &arg)); /* IPC_MEM_SET_PID_POD */
    CHECK(write(line[1], name, sizeof name));
    CHECK(waitpid(child, &status, 0));
    MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    arg = (union arg){ 0 };
    memcpy(arg.bytes, name, sizeof name);
    CHECK(ioctl(fd, 0x41584d1c, &arg)); /* IPC_MEM_DESTROY */
    if (command(fd, 0x41584d04, ADDRESS(DEVICE_HEAP), 0, 0) || command(fd, 0x41584d04, ADDRESS(HOST_HEAP), 0, 0))
        return 1;
    puts("all freed");
    return 0;
}
