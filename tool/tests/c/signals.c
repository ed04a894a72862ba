/* Signals, stops and interrupted calls: what a program sees must not depend on a tracer.
   Prints one line for each observation. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t seen[65];
static volatile sig_atomic_t value;

static void handler(int number, siginfo_t *info, void *context) {
    (void)context;
    seen[number]++;
    if (info->si_code == SI_QUEUE) value = info->si_value.sival_int;
}

static void handle(int number, int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    sigaction(number, &action, NULL);
}

static void *reader(void *pipe) {
    char byte;
    long result = read(*(int *)pipe, &byte, 1);
    printf("a thread's read returned %ld\n", result);
    return NULL;
}

/* exec by a thread that is not the first. */
static void *become(void *arguments) {
    execv(*(char **)arguments, arguments);
    return NULL;
}

int main(int count, char **arguments) {
    if (count > 1) {
        printf("exec kept %s, pid is the same: %d\n", arguments[1], atoi(arguments[2]) == getpid());
        return 17;
    }
    setvbuf(stdout, NULL, _IONBF, 0);
    /* Ordinary and real-time signals, with their values. */
    for (int number = 1; number <= SIGRTMAX; number++) {
        if (number == SIGKILL || number == SIGSTOP || number == SIGCHLD || (number > 31 && number < SIGRTMIN)) continue;
        handle(number, SA_RESTART);
        union sigval payload = {.sival_int = number + 1000};
        sigqueue(getpid(), number, payload);
        if (seen[number] != 1 || value != number + 1000) printf("signal %d came %d times with %d\n", number, seen[number], value);
    }
    printf("all signals came once\n");
    /* A call that is interrupted: EINTR without SA_RESTART, repeated with it. */
    pid_t child;
    int pipes[2];
    if (pipe(pipes) != 0) return 1;
    for (int restart = 0; restart < 2; restart++) {
        handle(SIGUSR1, restart ? SA_RESTART : 0);
        child = fork();
        if (child == 0) {
            usleep(100000);
            kill(getppid(), SIGUSR1);
            usleep(100000);
            if (restart && write(pipes[1], "x", 1) != 1) _exit(1);
            _exit(0);
        }
        char byte;
        long result = read(pipes[0], &byte, 1);
        printf("restart %d: read returned %ld, %s\n", restart, result, result < 0 ? strerror(errno) : "no error");
        waitpid(child, NULL, 0);
    }
    /* A stopped child stays stopped until it is continued, and its parent gets a signal. */
    child = fork();
    if (child == 0) {
        for (;;) pause();
    }
    int status;
    kill(child, SIGSTOP);
    waitpid(child, &status, WUNTRACED);
    printf("child stopped: %d by %d\n", WIFSTOPPED(status), WSTOPSIG(status));
    usleep(50000);
    printf("still stopped: %d\n", waitpid(child, &status, WNOHANG) == 0);
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    int file = open(path, O_RDONLY);
    if (read(file, line, sizeof line - 1) > 0) {
        char state = strrchr(line, ')')[2];
        printf("stopped or traced: %d\n", state == 'T' || state == 't');
    }
    close(file);
    kill(child, SIGCONT);
    waitpid(child, &status, WCONTINUED);
    printf("child continued: %d\n", WIFCONTINUED(status));
    kill(child, SIGTERM);
    signal(SIGTERM, SIG_DFL);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    printf("child killed: %d\n", WIFSIGNALED(status));
    /* A thread that is blocked while another one calls exec. */
    pthread_t thread;
    pthread_create(&thread, NULL, reader, &pipes[0]);
    usleep(20000);
    char own[16];
    snprintf(own, sizeof own, "%d", getpid());
    child = fork();
    if (child == 0) {
        snprintf(own, sizeof own, "%d", getpid());
        char *next[] = {arguments[0], "its arguments", own, NULL};
        pthread_create(&thread, NULL, become, next);
        pthread_join(thread, NULL);
        _exit(1);
    }
    waitpid(child, &status, 0);
    printf("the child's status is %d\n", WEXITSTATUS(status));
    char *next[] = {arguments[0], "its arguments", own, NULL};
    execv(arguments[0], next);
    return 1;
}
