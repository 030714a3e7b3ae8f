// Threads for copies and digests. They start when first needed, sleep in between, block all signals, and are joined
// when the process exits. A forked child starts its own: it neither uses nor joins its parent's.
#pragma once

#include <cstdint>
#include <functional>

namespace rlinf::comm {

constexpr int kMaxThreads = 256;

// Calls task(0) ... task(num_tasks - 1), each once, on the calling thread and at most num_threads - 1 others; returns
// when all are done. Tasks are handed out in ascending order and must not throw. Several threads may call at once; each
// call has its own bound.
void run_tasks(int64_t num_tasks, int num_threads, const std::function<void(int64_t)>& task);

// How many the calling process has started. For tests.
int num_pool_threads();

}  // namespace rlinf::comm
