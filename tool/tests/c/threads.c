/* Threads that call the driver until SIGTERM. Prints "ready", and at the end whether every call
   succeeded. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static int failed;

static void end(int number) {
    (void)number;
    stop = 1;
}

static int bound(void) {
    char argument[260] = "uda";
    int file = open("/dev/davinci_manager", O_RDWR | O_CLOEXEC);
    if (file < 0 || ioctl(file, 0x5a00, argument) != 0) __atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
    return file;
}

static void query(int file) {
    unsigned info[5];
    if (ioctl(file, 0x80145500, info) != 0) __atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
}

static void *work(void *unused) {
    (void)unused;
    while (!stop) {
        int file = bound();
        query(file);
        char argument[260] = "uda";
        if (ioctl(file, 0x5a01, argument) != 0) __atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
        close(file);
        usleep(1000);
    }
    return NULL;
}

int main(void) {
    signal(SIGTERM, end);
    int held = bound();
    pthread_t threads[4];
    for (int index = 0; index < 4; index++) pthread_create(&threads[index], NULL, work, NULL);
    printf("ready\n");
    fflush(stdout);
    while (!stop) {
        query(held);
        usleep(1000);
    }
    for (int index = 0; index < 4; index++) pthread_join(threads[index], NULL);
    printf("%d failed\n", failed);
    return failed != 0;
}
