// The header for C++: objects close, errors are thrown.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "acl/acl.h"
#include "ascend_vmm_service.hpp"

static void expect(bool condition, const char *what)
{
    if (!condition) {
        std::cerr << what << "\n";
        std::exit(1);
    }
}

int main(int, char **arguments)
{
    const std::string socket = arguments[1], name = arguments[2];
    expect(aclInit(nullptr) == 0 && aclrtSetDevice(0) == 0, "a device");
    {
        ascend_vmm::Domain dropped(socket, name, ASCEND_VMM_WRITE, 4 << 20);
        dropped.put("k", 5);
    }
    try {
        ascend_vmm::Domain none(socket, name, ASCEND_VMM_READ, 0, std::chrono::milliseconds(1));
        expect(false, "what was not committed is served");
    } catch (const ascend_vmm::Error &error) {
        expect(error.code == ASCEND_VMM_TIMEOUT && std::strlen(error.what()) > 10, error.what());
    }
    ascend_vmm::Domain writer(socket, name, ASCEND_VMM_WRITE_OR_READ, 4 << 20);
    char text[6] = "hello";
    void *address = writer.put("k", 5, "text");
    expect(aclrtMemcpy(address, 5, text, 5, ACL_MEMCPY_HOST_TO_DEVICE) == 0, "a copy");
    writer.commit();
    ascend_vmm::Domain reader = std::move(writer);
    reader.sleep();
    reader.wake();
    int keys = 0;
    reader.each([&](const ascend_vmm_entry &entry) {
        keys++;
        char back[6] = "";
        expect(aclrtMemcpy(back, 5, entry.address, 5, ACL_MEMCPY_DEVICE_TO_HOST) == 0, "a copy back");
        expect(std::strcmp(back, text) == 0 && std::string(entry.key) == "k", "the same");
    });
    expect(keys == 1 && reader.find("k").address == address && reader.info().awake == 1, "one key");
    reader.close();
    return 0;
}
