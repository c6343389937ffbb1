// The threads that share one kernel call. The calling thread is one of them.
//
// Tasks are handed out one by one, so a thread that the system suspends delays only its current task. Helpers spin for a few tens
// of microseconds after a call, because the next layer's call comes that soon; then they sleep. Independent of kernels.
#pragma once

#include <cstdint>

namespace oneloop {

constexpr int kMaxThreads = 256;

// Threads of one call, the calling one included, from 1 to kMaxThreads. Helpers start with the first call that needs
// them and end at exit; in a forked child they are started again.
void set_num_threads(int n);
int num_threads();

// Runs task(context, i) once for every i in [0, count), on any threads in any order, and returns when all are done.
// A call during another one runs on its own thread only. Tasks must not throw.
void run_tasks(int64_t count, void (*task)(void* context, int64_t i), void* context);

template <typename Task>
void parallel_for(int64_t count, Task task) {
    run_tasks(count, [](void* context, int64_t i) { (*static_cast<Task*>(context))(i); }, &task);
}

}  // namespace oneloop
