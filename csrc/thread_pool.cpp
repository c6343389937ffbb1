#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace oneloop {
namespace {

constexpr auto kSpin = std::chrono::microseconds(40);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until done(), awake for kSpin, then asleep on `word` (woken by notify_all). `word` must be part of `done`.
template <typename Done>
void wait_until(std::atomic<uint32_t>& word, Done done) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 32; i++) {
            if (done(word.load(std::memory_order_acquire))) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    for (;;) {
        const uint32_t seen = word.load(std::memory_order_acquire);
        if (done(seen)) return;
        word.wait(seen, std::memory_order_acquire);
    }
}

// `state_` is (job number << 8 | helpers inside the job). A job is open while its number is odd. A helper enters by adding one to
// an open state. The caller closes the job and then waits only for helpers that entered; a helper that wakes late cannot enter.
// The job's fields change only while it is closed and empty.
class Pool {
public:
    void resize(int n) {
        std::lock_guard lock(calls_);
        if (n == num_threads_.load()) return;
        stop_helpers();
        num_threads_ = n;
    }

    int size() const { return num_threads_.load(std::memory_order_relaxed); }

    void run(int64_t count, void (*task)(void*, int64_t), void* context) {
        std::unique_lock lock(calls_, std::try_to_lock);
        if (count <= 1 || size() == 1 || !lock || ended_) {
            for (int64_t i = 0; i < count; i++) task(context, i);
            return;
        }
        start_helpers();
        task_ = task, context_ = context;
        for (int share = 0; share < size(); share++) {
            shares_[share].next.store(count * share / size(), std::memory_order_relaxed);
            shares_[share].end = count * (share + 1) / size();
        }
        state_.fetch_add(kJob, std::memory_order_release);
        state_.notify_all();
        work(0);
        state_.fetch_add(kJob, std::memory_order_acq_rel);
        wait_until(state_, [](uint32_t state) { return (state & kInside) == 0; });
    }

    void end() {
        std::lock_guard lock(calls_);
        ended_ = true;
        stop_helpers();
    }

    // A forked child has the forking thread only: forget the helpers, and a call that another thread was running.
    void after_fork() {
        for (auto& helper : helpers_) new (&helper) std::thread();
        helpers_.clear();
        new (&calls_) std::mutex();
        state_ = 0;
    }

private:
    static constexpr uint32_t kJob = 1u << 8, kInside = kJob - 1;
    static_assert(kMaxThreads - 1 <= kInside);

    void start_helpers() {
        while (static_cast<int>(helpers_.size()) < size() - 1) {
            try {
                helpers_.emplace_back([this, share = static_cast<int>(helpers_.size()) + 1] { help(share); });
            } catch (const std::system_error&) {
                num_threads_ = static_cast<int>(helpers_.size()) + 1;  // no more threads are available: use these
            }
        }
    }

    void stop_helpers() {
        stopping_ = true;
        state_.fetch_add(2 * kJob, std::memory_order_release);
        state_.notify_all();
        for (auto& helper : helpers_) helper.join();
        helpers_.clear();
        stopping_ = false;
    }

    void help(int share) {
        uint32_t last = 0;  // the last job of this helper; 0 is never an open job
        for (;;) {
            wait_until(state_, [&](uint32_t state) { return stopping_ || (is_open(state) && job(state) != last); });
            if (stopping_) return;
            uint32_t state = state_.load(std::memory_order_acquire);
            while (is_open(state) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
            }
            if (!is_open(state)) continue;
            last = job(state);
            work(share);
            const uint32_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
            if (!is_open(before)) state_.notify_all();
        }
    }

    // A thread runs its own share first: neighbouring tasks read neighbouring memory, which the hardware prefetches. Then it
    // takes tasks of other shares.
    void work(int own) {
        for (int turn = 0; turn < size(); turn++) {
            Share& share = shares_[(own + turn) % size()];
            for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) task_(context_, i);
        }
    }

    static bool is_open(uint32_t state) { return (state & kJob) != 0; }
    static uint32_t job(uint32_t state) { return state & ~kInside; }

    std::mutex calls_;
    std::vector<std::thread> helpers_;
    std::atomic<int> num_threads_{1};
    std::atomic<bool> stopping_{false};
    bool ended_ = false;
    void (*task_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> state_{0};
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    Share shares_[kMaxThreads];
};

// Never destroyed: a thread may still be inside a call while the process exits. Its helpers end there, though.
Pool& pool() {
    alignas(Pool) static unsigned char place[sizeof(Pool)];
    static Pool* const made = [] {
        Pool* p = new (place) Pool();
        static struct AtExit {
            Pool* p;
            ~AtExit() { p->end(); }
        } at_exit{p};
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { pool().after_fork(); });
#endif
        return p;
    }();
    return *made;
}

}  // namespace

void set_num_threads(int n) {
    if (n < 1 || n > kMaxThreads)
        throw std::invalid_argument("threads: " + std::to_string(n) + " is not between 1 and " + std::to_string(kMaxThreads));
    pool().resize(n);
}

int num_threads() { return pool().size(); }

void run_tasks(int64_t count, void (*task)(void*, int64_t), void* context) { pool().run(count, task, context); }

}  // namespace oneloop
