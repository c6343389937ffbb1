// Aligned memory for the kernels: scratch that a thread keeps, and weights in pages as large as the system gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oneloop {

struct FreeFloats {
    size_t bytes = 0;
    bool mapped = false;
    void operator()(float* p) const;
};
using Floats = std::unique_ptr<float[], FreeFloats>;

// `count` zeros, 64-byte aligned. Large blocks ask for huge pages: streaming weights through 4 KiB pages costs a fifth
// of the bandwidth, since the hardware prefetcher stops at a page's end. Throws std::bad_alloc.
Floats allocate_floats(size_t count);

// At least `count` floats, 64-byte aligned, contents undefined, valid until this thread asks again with the same `slot`.
enum class Slot { kRows, kAttention, kStates, kPanel };
float* scratch_floats(Slot slot, size_t count);

}  // namespace oneloop
