#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace oneloop {
namespace {

constexpr size_t kLarge = size_t{4} << 20;

}  // namespace

void FreeFloats::operator()(float* p) const {
#if defined(__linux__)
    if (mapped) {
        munmap(p, bytes);
        return;
    }
#endif
    std::free(p);
}

Floats allocate_floats(size_t count) {
    const size_t bytes = (count * sizeof(float) + 63) / 64 * 64 + 64;
#if defined(__linux__)
    if (bytes >= kLarge) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        madvise(p, bytes, MADV_HUGEPAGE);  // a wish: where it is refused, small pages do
        return Floats(static_cast<float*>(p), FreeFloats{bytes, true});
    }
#endif
    void* p = std::aligned_alloc(64, bytes);
    if (!p) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    return Floats(static_cast<float*>(p), FreeFloats{bytes, false});
}

float* scratch_floats(Slot slot, size_t count) {
    struct Scratch {
        Floats floats;
        size_t count = 0;
    };
    thread_local Scratch slots[4];
    Scratch& scratch = slots[static_cast<int>(slot)];
    if (scratch.count < count) {
        scratch.floats.reset();
        scratch.floats = allocate_floats(count);
        scratch.count = count;
    }
    return scratch.floats.get();
}

}  // namespace oneloop
