#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__) && !defined(ONELOOP_SANITIZE)
#define ONELOOP_MMAP
#include <sys/mman.h>
#endif

namespace oneloop {
namespace {

constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kArena = size_t{32} << 20;  // reserved at once for small weights; what is not written costs nothing

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64 + 64; }  // a kernel may fetch, and discard, a line past the end

}  // namespace

void FreeMemory::operator()(void* p) const {
    if (part_of) return;
#if defined(ONELOOP_MMAP)
    if (mapped) {
        munmap(p, bytes);
        return;
    }
#endif
    std::free(p);
}

Memory allocate(size_t wanted) {
    const size_t bytes = padded(wanted);
    Memory made;
#if defined(ONELOOP_MMAP)
    if (bytes >= kLarge) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        madvise(p, bytes, MADV_HUGEPAGE);  // a hint: where it is refused, small pages do
        made.bytes_ = {p, FreeMemory{bytes, true}};
        return made;
    }
#endif
    void* p = std::aligned_alloc(64, bytes);
    if (!p) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    made.bytes_ = {p, FreeMemory{bytes, false}};
    return made;
}

Memory allocate_weight(size_t wanted) {
#if !defined(ONELOOP_MMAP)
    return allocate(wanted);
#endif
    const size_t bytes = padded(wanted);
    if (bytes >= kLarge) return allocate(wanted);
    static std::mutex lock;
    static std::weak_ptr<Memory> open;  // held by its parts alone
    static size_t used = 0;
    std::lock_guard guard(lock);
    std::shared_ptr<Memory> arena = open.lock();
    if (!arena || used + bytes > kArena) {
        arena = std::make_shared<Memory>(allocate(kArena));
        open = arena, used = 0;
    }
    Memory made;
    made.bytes_ = {arena->as<char>() + used, FreeMemory{bytes, false, arena}};
    used += bytes;
    return made;
}

void* scratch(Slot slot, size_t bytes) {
    struct Scratch {
        Memory memory;
        size_t bytes = 0;
    };
    thread_local Scratch slots[static_cast<int>(Slot::kCount)];
    Scratch& mine = slots[static_cast<int>(slot)];
    if (mine.bytes < bytes) {
        mine.memory = Memory();
        mine.memory = allocate(bytes);
        mine.bytes = bytes;
    }
    return mine.memory.as<void>();
}

}  // namespace oneloop
