/* A function of the program's that does not return to the library: it throws, or ends its thread. */
#include <pthread.h>
#include <sys/resource.h>

#include "check.h"

static void throw_it(void *)
{
    throw 1;
}

static void end_thread(void *)
{
    pthread_exit(NULL);
}

int main(int count, char **arguments)
{
    CHECK(count == 3);
    const struct rlimit no_core = {0, 0};
    CHECK(setrlimit(RLIMIT_CORE, &no_core) == 0);
    void (*const function)(void *) = strcmp(arguments[1], "throw") == 0 ? throw_it : end_thread;
    aclrtStream stream = NULL;
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&stream));
    if (strcmp(arguments[2], "stream") == 0) {
        OK(aclrtLaunchHostFunc(stream, function, NULL));
        OK(aclrtSynchronizeStream(stream));
    } else {
        OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
        OK(aclrtLaunchCallback(function, NULL, ACL_CALLBACK_BLOCK, stream));
        OK(aclrtProcessReport(-1));
    }
    return 0;
}
