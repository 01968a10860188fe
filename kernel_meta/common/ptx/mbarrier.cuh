// Shared-memory barriers: mbarrier objects (arrive, transaction bytes, parity waits) and named barriers.
#pragma once
#include <cstdint>

namespace ptx {

using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

template <int kCount>
__device__ __forceinline__ void mbarrier_arrive_many(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "n"(kCount) : "memory");
}

// One arrival that also announces `bytes` of asynchronous copies still to land.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Returns once the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(shared_address(&barrier)), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same where `arrives`, on which a warp's threads agree.
__device__ __forceinline__ void named_barrier_arrive_if(bool arrives, int id, int threads) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.b32 arrives, %0, 0;\n"
      "@arrives bar.arrive %1, %2;\n"
      "}" ::"r"(static_cast<int>(arrives)), "r"(id), "r"(threads) : "memory");
}

// Whether `condition` holds for any of the threads, all of which wait for it.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool condition) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred given, found;\n"
      "setp.ne.b32 given, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned found, %2, %3, given;\n"
      "selp.b32 %0, 1, 0, found;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(condition)), "r"(id), "r"(threads)
      : "memory");
  return any;
}

// Eight bytes at once, seen by whoever polls for them.
__device__ __forceinline__ void store_shared_v2(uint32_t shared, uint2 value) {
  asm volatile("st.volatile.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(value.x), "r"(value.y) : "memory");
}

__device__ __forceinline__ uint2 load_shared_v2(uint32_t shared) {
  uint2 value;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(shared) : "memory");
  return value;
}

// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
