// Loaded before a build of PyTorch with CUDA, from 2.10 on. In such a build the CUDA half and the
// NPU back end register settings of the allocator under the same names, and the second registration
// ends the process ("Duplicated key"), whatever the driver is. This function takes the place of the
// one that returns the registered names: each caller finds those of the framework itself, but not
// those of a back end that registered before. No file of PyTorch is changed. It was seen to help
// 2.14.0, and not 2.10.0 and 2.12.0.
#include <dlfcn.h>

#include <string>
#include <unordered_set>

using Names = std::unordered_set<std::string>;

#define NAME "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
extern Names &registered_names() __asm__(NAME);

Names &registered_names()
{
    static auto of_framework = reinterpret_cast<Names &(*)()>(dlsym(dlopen("libc10.so", RTLD_NOLOAD | RTLD_NOW), NAME));
    static const Names own = of_framework();
    Names &names = of_framework();
    for (auto name = names.begin(); name != names.end();) {
        name = own.count(*name) == 0 ? names.erase(name) : ++name;
    }
    return names;
}
