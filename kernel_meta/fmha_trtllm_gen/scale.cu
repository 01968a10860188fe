// A softmax scale that the caller keeps on the device, in the units that the attention kernel reads it in.
#include "common/ptx/grid.cuh"

// As packed by cubin_runtime/families/fmha_trtllm_gen.py.
struct Params {
  const float* scale;
  float* scale_log2;
};

constexpr int kThreads = 32;
constexpr float kLog2E = 1.4426950408889634f;

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(const __grid_constant__ Params params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (threadIdx.x == 0) *params.scale_log2 = kLog2E * *params.scale;
}
