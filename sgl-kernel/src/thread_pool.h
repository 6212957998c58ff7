// A small persistent thread pool for batched calls of the Python module; not used by the worker
// process.
#pragma once

#include <functional>

namespace scout {

// Runs fn(0) .. fn(tasks - 1), each once, on up to `threads` threads including the caller's, and
// returns when all have finished. With threads <= 1, with one task, or while another call uses the
// pool, everything runs in the caller. fn must not throw. Threads start on first use and again
// after a fork.
void parallel_for(int tasks, int threads, const std::function<void(int)>& fn);

}  // namespace scout
