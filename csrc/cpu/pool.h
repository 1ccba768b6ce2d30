// The thread pool that all kernels share. The caller works too; results never depend on the number of threads,
// because work is split over outputs and never over a sum.
#pragma once

#include <cstdint>

namespace octavo {

using RangeTask = void (*)(void* context, int64_t begin, int64_t end);

// Calls `task` on ranges that together cover 0..count, on the caller and on whichever workers come along, and returns
// when all are done. Ranges are at least `grain` long (but for the last) and shrink towards the end. A second caller
// while one is at work, or a call from inside a task, runs alone on its own thread.
void run_parallel(int64_t count, int64_t grain, RangeTask task, void* context);

}  // namespace octavo
