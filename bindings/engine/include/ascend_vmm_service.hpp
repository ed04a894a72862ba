/* The memory service for engines in C++17: see ascend_vmm_service.h. */
#ifndef ASCEND_VMM_SERVICE_HPP
#define ASCEND_VMM_SERVICE_HPP

#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "ascend_vmm_service.h"

namespace ascend_vmm {

/* What the service or the vendor's library said. */
class Error : public std::runtime_error {
public:
    explicit Error(int number) : std::runtime_error(ascend_vmm_error()), code(static_cast<ascend_vmm_code>(number)) {}

    const ascend_vmm_code code;
};

inline void check(int code)
{
    if (code != ASCEND_VMM_OK) {
        throw Error(code);
    }
}

/* An open domain, closed at the end of its life. */
class Domain {
public:
    Domain(const std::string &socket, const std::string &name, ascend_vmm_mode mode, uint64_t capacity = 0,
           std::chrono::milliseconds timeout = std::chrono::minutes(1))
    {
        check(ascend_vmm_open(socket.c_str(), name.c_str(), mode, capacity, timeout.count(), &domain_));
    }

    Domain(Domain &&other) noexcept : domain_(std::exchange(other.domain_, 0)) {}

    Domain &operator=(Domain &&other) noexcept
    {
        std::swap(domain_, other.domain_);
        return *this;
    }

    ~Domain()
    {
        if (domain_ != 0) {
            ascend_vmm_close(domain_);
        }
    }

    ascend_vmm_info info() const
    {
        ascend_vmm_info info;
        check(ascend_vmm_get_info(domain_, &info));
        return info;
    }

    void *put(const std::string &key, uint64_t size, std::string_view value = {})
    {
        void *address = nullptr;
        check(ascend_vmm_put(domain_, key.c_str(), size, value.data(), value.size(), &address));
        return address;
    }

    void commit() { check(ascend_vmm_commit(domain_)); }

    ascend_vmm_entry find(const std::string &key) const
    {
        ascend_vmm_entry entry;
        check(ascend_vmm_find(domain_, key.c_str(), &entry));
        return entry;
    }

    /* Calls `look` with each entry, in the order of the keys. */
    template <typename Look> void each(Look look) const
    {
        ascend_vmm_entry entry;
        int code = ascend_vmm_next(domain_, nullptr, &entry);
        while (code == ASCEND_VMM_OK) {
            const std::string key = entry.key;
            look(entry);
            code = ascend_vmm_next(domain_, key.c_str(), &entry);
        }
        if (code != ASCEND_VMM_NO_KEY) {
            throw Error(code);
        }
    }

    void sleep() { check(ascend_vmm_sleep(domain_)); }

    void wake(std::chrono::milliseconds timeout = std::chrono::minutes(1))
    {
        check(ascend_vmm_wake(domain_, timeout.count()));
    }

    void close()
    {
        check(ascend_vmm_close(domain_));
        domain_ = 0;
    }

private:
    ascend_vmm_domain domain_ = 0;
};

}  // namespace ascend_vmm
#endif
