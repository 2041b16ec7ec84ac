// Cutting an attention call into spans and running them on several threads.
#pragma once

#include "kernels.hpp"
#include "pool.hpp"

namespace kvbits {

// At least `bytes` bytes that belong to the calling thread, kept from call to call.
uint8_t* scratch_of_thread(int64_t bytes);

// Compute job.output. Any number of threads may call this at once, each for a job of its own.
void attend(const Job& job, const Kernels& kernels, int threads);

}  // namespace kvbits
