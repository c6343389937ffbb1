#include "isa.h"

#include <atomic>
#include <stdexcept>

#if defined(ONELOOP_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(ONELOOP_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace oneloop {
namespace {

struct Isa {
    const char* name;
    const Kernels* floats;
    const QuantKernels* quants;
};

#if defined(ONELOOP_ARM)
struct ArmProducts {
    bool dot, mixed;
};
// Linux reports bit 20 of AT_HWCAP (asimddp) and bit 13 of AT_HWCAP2 (i8mm), macOS names; elsewhere neither is used.
ArmProducts arm_products() {
#if defined(__linux__)
    return {(getauxval(AT_HWCAP) >> 20 & 1) != 0, (getauxval(AT_HWCAP2) >> 13 & 1) != 0};
#elif defined(__APPLE__)
    const auto has = [](const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM")};
#else
    return {false, false};
#endif
}
#endif

std::vector<const Isa*> runnable() {
    std::vector<const Isa*> sets;
#if defined(ONELOOP_X86)
    static constexpr Isa avx512vnni{"avx512vnni", &kernels_avx512, &quants_avx512vnni},
        avx512{"avx512", &kernels_avx512, &quants_avx512};
    static constexpr Isa avxvnni{"avxvnni", &kernels_avx2, &quants_avxvnni}, avx2{"avx2", &kernels_avx2, &quants_avx2};
    // These also check that the operating system saves the wide registers.
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) sets.push_back(&avx512vnni);
    if (has_avx512) sets.push_back(&avx512);
    if (has_avx2 && __builtin_cpu_supports("avxvnni")) sets.push_back(&avxvnni);
    if (has_avx2) sets.push_back(&avx2);
#elif defined(ONELOOP_ARM)
    static constexpr Isa neoni8mm{"neoni8mm", &kernels_neon, &quants_neoni8mm}, neondot{"neondot", &kernels_neon, &quants_neondot},
        neon{"neon", &kernels_neon, &quants_neon};
    const ArmProducts has = arm_products();
    if (has.dot && has.mixed) sets.push_back(&neoni8mm);
    if (has.dot) sets.push_back(&neondot);
    sets.push_back(&neon);
#endif
    static constexpr Isa portable{"portable", &kernels_portable, &quants_portable};
    sets.push_back(&portable);
    return sets;
}

std::atomic<const Isa*>& chosen() {
    static std::atomic<const Isa*> set{runnable().front()};
    return set;
}

const Isa& current() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace

const Kernels& kernels() { return *current().floats; }
const QuantKernels& quant_kernels() { return *current().quants; }
const char* isa() { return current().name; }

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa* set : runnable()) names.emplace_back(set->name);
    return names;
}

void set_isa(const std::string& name) {
    for (const Isa* set : runnable()) {
        if (name == set->name) {
            chosen() = set;
            return;
        }
    }
    throw std::invalid_argument("this processor has no kernels called '" + name + "'");
}

}  // namespace oneloop
