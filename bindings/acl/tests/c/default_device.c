/* A configuration file names a device for threads that have set none. */
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "check.h"

static void *thread_without_device(void *unused)
{
    int32_t device = -1;
    OK(aclrtGetDevice(&device));
    CHECK(device == 1);
    void *memory = NULL, *host = NULL;
    OK(aclrtMallocHost(&host, 100));
    OK(aclrtMalloc(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes(memory, &attributes));
    CHECK(attributes.location.id == 1);
    OK(aclrtFree(memory));
    return unused;
}

int main(void)
{
    char path[] = "/tmp/acl-default-XXXXXX";
    int fd = mkstemp(path);
    /* promise: aclInit, aclrtGetDevice: a default device */
    const char *text = "{\"dump\": {}, \"defaultDevice\": {\"default_device\": \"1\"}}\n";
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    OK(aclInit(path));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, thread_without_device, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    OK(aclFinalize());
    fd = open(path, O_WRONLY | O_TRUNC);
    CHECK(fd >= 0 && write(fd, "[1, 2]", 6) == 6);
    close(fd);
    /* promise: aclInit: a file that is no configuration */
    IS(aclInit(path), ACL_ERROR_PARSE_FILE);
    unlink(path);
    return 0;
}
