#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace oneloop {
namespace {

std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> sets;
#if defined(ONELOOP_X86)
    // These also ask whether the operating system saves the wide registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        sets.push_back(&kernels_avx512);
    if (avx2) sets.push_back(&kernels_avx2);
#endif
    sets.push_back(&kernels_portable);
    return sets;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> set{runnable().front()};
    return set;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels* set : runnable()) names.emplace_back(set->name);
    return names;
}

void set_isa(const std::string& name) {
    for (const Kernels* set : runnable()) {
        if (name == set->name) {
            chosen() = set;
            return;
        }
    }
    throw std::invalid_argument("this processor has no kernels called '" + name + "'");
}

}  // namespace oneloop
