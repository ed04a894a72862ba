/* Opens a memory session without any library, prints its segments, and closes it. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(call) do { if ((call) < 0) { perror(#call); return 1; } } while (0)

int main(void)
{
    struct { char name[256]; int device; } module = { "SVM", 0 };
    struct { uint32_t head[4]; uint32_t count, pad[3]; uint64_t segments, rest[38]; } arg;
    struct { uint64_t start, size; } segments[16];
    int fd;

    CHECK(fd = open("/dev/davinci_manager", O_RDWR | O_CLOEXEC));
    CHECK(ioctl(fd, 0x5a00, &module));
    memset(&arg, 0, sizeof arg);
    CHECK(ioctl(fd, 0x41584d65, &arg));
    arg.count = 16;
    arg.segments = (uintptr_t)segments;
    CHECK(ioctl(fd, 0xc1584d68, &arg));
    uint32_t count = arg.count;
    for (uint32_t i = 0; i < count; i++) {
        void *wanted = (void *)(uintptr_t)segments[i].start;
        void *got = mmap(wanted, segments[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (got != wanted) { perror("mmap"); return 1; }
        printf("segment %#llx + %#llx\n", (unsigned long long)segments[i].start, (unsigned long long)segments[i].size);
    }
    memset(&arg, 0, sizeof arg);
    CHECK(ioctl(fd, 0xc1584d24, &arg));
    for (uint32_t i = 0; i < count; i++)
        CHECK(munmap((void *)(uintptr_t)segments[i].start, segments[i].size));
    CHECK(ioctl(fd, 0x5a01, &module));
    CHECK(close(fd));
    return 0;
}
