/* A program that is not linked with the library loads it by its path, unloads it, and loads it
 * again: `loaded PATH`. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

typedef int (*set_device)(int32_t);
typedef int (*create_stream)(void **);
typedef int (*allocate)(void **, size_t, int);
typedef int (*fill_later)(void *, size_t, int32_t, size_t, void *);
typedef int (*wait_for)(void *);
typedef int (*end)(void *);

static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

#define FIND(type, library, name) ((type)(uintptr_t)find(library, name))

int main(int count, char **arguments)
{
    CHECK(count > 1);
    void *stream = NULL, *memory = NULL;
    for (int round = 0; round < 3; round++) {
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        CHECK(library != NULL);
        CHECK(FIND(set_device, library, "aclrtSetDevice")(0) == 0);
        if (stream == NULL) {
            CHECK(FIND(create_stream, library, "aclrtCreateStream")(&stream) == 0);
            CHECK(FIND(allocate, library, "aclrtMalloc")(&memory, 1 << 22, 0) == 0);
        }
        /* The stream's thread works on while the library is unloaded. */
        for (int i = 0; i < 20; i++) {
            CHECK(FIND(fill_later, library, "aclrtMemsetAsync")(memory, 1 << 22, i, 1 << 22, stream) == 0);
        }
        CHECK(dlclose(library) == 0);
    }
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    CHECK(FIND(wait_for, library, "aclrtSynchronizeStream")(stream) == 0);
    CHECK(FIND(end, library, "aclrtFree")(memory) == 0);
    CHECK(dlclose(library) == 0);
    return 0;
}
