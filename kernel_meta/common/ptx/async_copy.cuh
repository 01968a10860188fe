// Copies of single words from global to shared memory that threads or an mbarrier wait for.
#pragma once
#include <cstdint>

#include "mbarrier.cuh"

namespace ptx {

// Zero where `source` shall not be read.
__device__ __forceinline__ void copy_word_or_zero(float* destination, const float* source, bool read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)), "l"(source),
               "r"(read ? 4 : 0)
               : "memory");
}

// Of this thread.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One of the arrivals that the barrier counts, once all earlier copies of this thread have landed.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

}  // namespace ptx
