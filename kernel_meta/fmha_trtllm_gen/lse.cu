// Log-sum-exp from the softmax statistics that the attention kernel leaves in the workspace, base 2:
// lse[token, head] = log2(e) * max + log2(sum).
#include "common/ptx/grid.cuh"

// As packed by cubin_runtime/families/fmha_trtllm_gen.py.
struct Params {
  const float2* stats;          // [total_q, num_heads] (max, sum); max in natural-log units, the sink in the sum
  float* lse;                   // [total_q, num_heads], any strides
  const int* cum_seq_lens_q;    // [batch_size + 1]
  long long stride_tokens;      // elements
  long long stride_heads;
  int batch_size;
  int num_heads;
  int total_q;
};

constexpr int kThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

// One thread per token and head.
extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(const __grid_constant__ Params params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  // Rows behind the last sequence are padding: nobody has written their statistics.
  const int tokens = min(params.cum_seq_lens_q[params.batch_size], params.total_q);
  const long long i = (long long)blockIdx.x * kThreads + threadIdx.x;
  const long long token = i / params.num_heads;
  const int head = i % params.num_heads;
  if (token >= tokens) return;
  const float2 stats = params.stats[i];
  params.lse[token * params.stride_tokens + head * params.stride_heads] = kLog2E * stats.x + log2f(stats.y);
}
