// Ragged attention prefill for compute capability 9.0a: out = softmax(bmm1_scale Q K^T + mask) V, 16- and 8-bit types.
//
// Persistent blocks of two or three warpgroups: a producer that feeds shared memory with the tensor copy engine, and
// one or two consumers of 64 query rows each, or two of the same 64. Read consumer.cuh for the main loop, scheduler.cuh
// for the order of work, softmax.cuh for the numerics.
#include "config.h"
#include "consumer.cuh"
#include "params.h"
#include "producer.cuh"
#include "storage.cuh"

// Read from the cubin by the build, which writes it into the kernel's table row.
extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = sizeof(fmha::Storage);

extern "C" __global__ void __launch_bounds__(fmha::kThreads, fmha::kBlocksPerSM)
    KERNEL_NAME(const __grid_constant__ fmha::Params params) {
  using namespace fmha;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);

  // What needs no memory of the previous kernel runs under its end. The next one may start as soon as all our blocks
  // have: it waits for our results itself, and finds no room while we fill the device.
  ptx::grid_launch_dependents();
  if (threadIdx.x == 0) {
    init_barriers(storage());
    ptx::prefetch_tensor_map(params.query_map);
    ptx::prefetch_tensor_map(params.key_map);
    ptx::prefetch_tensor_map(params.value_map);
    ptx::prefetch_tensor_map(params.out_map);
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    ptx::registers_shrink_to<kProducerRegisters>();
    run_producer(params);
  } else {
    ptx::registers_grow_to<kConsumerRegisters>();
    ptx::grid_dependency_wait();
    const float bmm1_scale = params.bmm1_scale_pointer ? *params.bmm1_scale_pointer : params.bmm1_scale;
    const float bmm2_scale = params.bmm2_scale_pointer ? *params.bmm2_scale_pointer : params.bmm2_scale;
    Consumer(params, warpgroup, bmm1_scale, bmm2_scale).run();
  }
}
