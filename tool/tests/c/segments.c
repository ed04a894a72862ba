/*
 * What a program can do to the driver's segments without the driver, by name of the argument. The
 * segments are more than any machine's memory, so none of it may allocate their pages.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call) do { if ((call) < 0) { perror(#call); exit(1); } } while (0)
#define MUST(what) do { if (!(what)) { fprintf(stderr, "not true: %s\n", #what); exit(1); } } while (0)
#define SVM_START ((char *)0x100000000000)
#define SVM_SIZE 0x80000000000ul

static int fd;

static void session(void)
{
    struct { char name[256]; int device; } module = { "SVM", 0 };
    struct { uint32_t head[4]; uint32_t count, pad[3]; uint64_t segments, rest[38]; } arg = { { 0 } };
    struct { uint64_t start, size; } segments[16];

    CHECK(fd = open("/dev/davinci_manager", O_RDWR | O_SYNC | O_CLOEXEC));
    CHECK(ioctl(fd, 0x5a00, &module));
    CHECK(ioctl(fd, 0x41584d65, &arg));
    arg.count = 16;
    arg.segments = (uintptr_t)segments;
    CHECK(ioctl(fd, 0xc1584d68, &arg));
    for (uint32_t i = 0; i < arg.count; i++) {
        void *wanted = (void *)(uintptr_t)segments[i].start;
        MUST(mmap(wanted, segments[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == wanted);
    }
    memset(&arg, 0, sizeof arg);
    CHECK(ioctl(fd, 0xc1584d24, &arg));
}

static void lock(void)
{
    CHECK(mlockall(MCL_CURRENT | MCL_FUTURE));
    CHECK(mlock(SVM_START, SVM_SIZE));
    MUST(madvise(SVM_START, SVM_SIZE, 22) < 0 && errno == EINVAL); /* MADV_POPULATE_READ */
    MUST(madvise(SVM_START, SVM_SIZE, 23) < 0 && errno == EINVAL); /* MADV_POPULATE_WRITE */
    CHECK(madvise(SVM_START, SVM_SIZE, MADV_WILLNEED));
}

/* A child has the mappings, which a real driver's children have not. */
static void lock_in_child(void)
{
    int status;
    pid_t child = fork();

    CHECK(child);
    if (child == 0) {
        CHECK(mlockall(MCL_CURRENT));
        MUST(mlock(SVM_START, SVM_SIZE) < 0 && errno == ENOMEM);
        MUST(madvise(SVM_START, SVM_SIZE, 23) < 0 && errno == ENOMEM);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0));
    MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void touch_in_child(void)
{
    int status;
    pid_t child = fork();

    CHECK(child);
    if (child == 0) {
        printf("child %d\n", getpid());
        fflush(stdout);
        SVM_START[1ul << 40] = 1;
        pause();
    }
    CHECK(waitpid(child, &status, 0));
    MUST(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    puts("the parent lives");
}

/* The kernel would write all of the segments, page by page. */
static void dump(void)
{
    struct rlimit limit = { 1 << 20, 1 << 20 };
    int status;
    pid_t child = fork();

    CHECK(child);
    if (child == 0) {
        CHECK(setrlimit(RLIMIT_CORE, &limit));
        abort();
    }
    CHECK(waitpid(child, &status, 0));
    MUST(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void flood(void)
{
    for (size_t i = 0; i < SVM_SIZE; i += 4096)
        SVM_START[i] = 1;
}

static void file(void)
{
    struct stat node, open_file;
    char link[64], bytes[16];

    CHECK(stat("/dev/davinci_manager", &node));
    CHECK(fstat(fd, &open_file));
    MUST(S_ISCHR(open_file.st_mode) && open_file.st_rdev == node.st_rdev);
    MUST((fcntl(fd, F_GETFL) & (O_ACCMODE | O_SYNC)) == (O_RDWR | O_SYNC));
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    memset(bytes, 0, sizeof bytes);
    CHECK(readlink(link, bytes, sizeof bytes - 1));
    MUST(strncmp(bytes, "/dev/davinci_manager", sizeof bytes - 1) == 0);
    MUST(read(fd, bytes, 1) < 0 && errno == EINVAL);
    MUST(write(fd, bytes, 1) < 0 && errno == EINVAL);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } steps[] = {
        { "lock", lock }, { "lock-in-child", lock_in_child }, { "touch-in-child", touch_in_child },
        { "dump", dump }, { "flood", flood }, { "file", file },
    };

    /* Through another program: the driver must still be there. */
    if (argc > 2 && strcmp(argv[2], "again") == 0) {
        CHECK(execl(argv[0], argv[0], argv[1], NULL));
    }
    session();
    for (unsigned i = 0; argc > 1 && i < sizeof steps / sizeof *steps; i++)
        if (strcmp(steps[i].name, argv[1]) == 0)
            steps[i].run();
    puts("done");
    return 0;
}
