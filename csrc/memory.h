// Aligned memory for the kernels: per-thread scratch, and weights in the largest available pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oneloop {

struct FreeMemory {
    size_t bytes = 0;
    bool mapped = false;
    std::shared_ptr<void> part_of = nullptr;  // the allocation, freed with its last part
    void operator()(void* p) const;
};

class Memory {
public:
    Memory() = default;
    explicit operator bool() const { return static_cast<bool>(bytes_); }
    template <typename T>
    T* as() const {
        return static_cast<T*>(bytes_.get());
    }

private:
    friend Memory allocate(size_t bytes);
    friend Memory allocate_weight(size_t bytes);
    std::unique_ptr<void, FreeMemory> bytes_;
};

// Zeros, 64-byte aligned. Large blocks request huge pages: streaming weights through 4 KiB pages costs a fifth of the
// bandwidth, since the hardware prefetcher stops at a page's end. Throws std::bad_alloc.
Memory allocate(size_t bytes);

// Memory that lives as long as a model: small blocks are adjacent, so that they too fill huge pages.
Memory allocate_weight(size_t bytes);

// At least this many bytes, 64-byte aligned, contents undefined, valid until this thread's next call with the same `slot`.
enum class Slot { kRows, kAttention, kStates, kPanel, kLoraRows, kLoraShrunk, kLoraSums, kCount };
void* scratch(Slot slot, size_t bytes);

template <typename T>
T* scratch(Slot slot, int64_t count) {
    return static_cast<T*>(scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace oneloop
