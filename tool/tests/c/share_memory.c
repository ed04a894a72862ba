/*
 * Two processes share memory without any library: the parent allocates memory of device 0, fills it
 * and exports it; the child imports and reads it.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call) do { if ((call) < 0) { perror(#call); return 1; } } while (0)
#define HUGE_PAGE (2ull << 20)
#define ADDRESS 0x12c000000000ull

/* The argument of every command: a head with the device, then 4-byte words. */
union arg { struct { uint32_t logical, device, vf, pad, word[82]; }; struct { uint64_t head[2], quad[41]; }; };

static int session(int *fd)
{
    struct { char name[256]; int device; } module = { "SVM", 0 };
    struct { uint64_t start, size; } segments[16];
    union arg arg = { 0 };

    CHECK(*fd = open("/dev/davinci_manager", O_RDWR | O_CLOEXEC));
    CHECK(ioctl(*fd, 0x5a00, &module));
    CHECK(ioctl(*fd, 0x41584d65, &arg)); /* ALLOC_PROC_STRUCT */
    arg.word[0] = 16;
    arg.quad[2] = (uintptr_t)segments;
    CHECK(ioctl(*fd, 0xc1584d68, &arg)); /* GET_MMAP_INFO */
    for (uint32_t i = 0; i < arg.word[0]; i++) {
        void *wanted = (void *)(uintptr_t)segments[i].start;
        if (mmap(wanted, segments[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0) != wanted) {
            perror("mmap");
            return 1;
        }
    }
    arg = (union arg){ 0 };
    CHECK(ioctl(*fd, 0xc1584d24, &arg)); /* INIT_PROCESS */
    arg = (union arg){ 0 };
    arg.quad[6] = 1;
    CHECK(ioctl(*fd, 0xc1584d1a, &arg)); /* SETUP_DEVICE */
    arg = (union arg){ .word = { 0, 0xefef0002, 5, 2816 } };
    arg.quad[2] = 1 << 30;
    CHECK(ioctl(*fd, 0x41584d25, &arg)); /* UPDATE_HEAP */
    arg = (union arg){ .quad = { ADDRESS, HUGE_PAGE } };
    CHECK(ioctl(*fd, 0x41584d03, &arg)); /* ALLOC */
    return 0;
}

static int map(int fd, uint32_t id)
{
    union arg arg = { 0 };
    arg.quad[0] = ADDRESS;
    arg.quad[1] = HUGE_PAGE;
    arg.word[4] = id;
    arg.word[5] = 1; /* device side */
    arg.word[6] = 1; /* huge pages */
    arg.quad[4] = 1;
    CHECK(ioctl(fd, 0x41584d34, &arg)); /* MEM_MAP */
    return 0;
}

static int copy(int fd, uint64_t to, uint64_t from, uint64_t size, uint32_t direction)
{
    union arg arg = { 0 };
    arg.quad[0] = to;
    arg.quad[1] = from;
    arg.quad[2] = size;
    arg.word[7] = direction;
    CHECK(ioctl(fd, 0xc1584d05, &arg)); /* MEMCPY */
    return 0;
}

static int import_and_read(int from_parent)
{
    char text[64] = "";
    uint32_t share;
    int fd;
    union arg arg = { 0 };

    if (session(&fd))
        return 1;
    if (read(from_parent, &share, sizeof share) != sizeof share)
        return 1;
    arg.word[0] = share;
    CHECK(ioctl(fd, 0xc1584d37, &arg)); /* MEM_IMPORT */
    if (map(fd, arg.word[5]) || copy(fd, (uintptr_t)text, ADDRESS, sizeof text, 2))
        return 1;
    printf("child read: %s\n", text);
    return 0;
}

int main(int argc, char **argv)
{
    static const char text[64] = "written by the parent";
    int fd, line[2], status;
    (void)argv;
    union arg arg = { 0 };
    uint32_t id, share;
    pid_t child;

    CHECK(pipe(line));
    CHECK(child = fork());
    if (child == 0) {
        close(line[1]); /* otherwise the end of the parent would not end the read */
        return import_and_read(line[0]);
    }
    if (session(&fd))
        return 1;
    arg.quad[1] = HUGE_PAGE;
    arg.word[6] = 1; /* device side */
    arg.word[8] = 1; /* huge pages */
    CHECK(ioctl(fd, 0xc1584d32, &arg)); /* MEM_CREATE */
    id = arg.word[0];
    if (map(fd, id) || copy(fd, ADDRESS, (uintptr_t)text, sizeof text, 1))
        return 1;
    for (int i = 1; i < argc; i++) {
        /* Each argument sets access 0 for the host. The second time crashes the kernel. */
        arg = (union arg){ 0 };
        arg.quad[0] = ADDRESS;
        arg.quad[1] = HUGE_PAGE;
        arg.word[4] = 65;
        CHECK(ioctl(fd, 0x41584d01, &arg)); /* MEM_SET_ACCESS */
        puts("access was set");
        fflush(stdout);
    }
    arg = (union arg){ 0 };
    arg.word[0] = 1;
    arg.word[1] = id;
    CHECK(ioctl(fd, 0xc1584d36, &arg)); /* MEM_EXPORT */
    share = arg.word[2];
    arg = (union arg){ 0 };
    arg.word[0] = share;
    arg.word[1] = 1;
    arg.quad[1] = (uintptr_t)&child;
    CHECK(ioctl(fd, 0x41584d38, &arg)); /* MEM_SET_PID */
    CHECK(write(line[1], &share, sizeof share));
    CHECK(waitpid(child, &status, 0));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
