// Value with one scale for each head and channel. From the end: what `statistics` read last is still in the L2 cache.
#include "common/ptx/grid.cuh"
#include "sage_quantize/columns.cuh"

namespace sage {

constexpr int kThreads = 128;

template <class Element>
__device__ __forceinline__ void quantize_value(const ValueParams& params) {
  const unsigned thread = (gridDim.x - 1 - blockIdx.x) * kThreads + threadIdx.x;
  const unsigned row_vectors = params.heads * params.format.head_dim / kVector;
  const unsigned vector = thread % row_vectors;
  const int first = thread / row_vectors * kRows;
  const int real = edge(params.edges, params.sequences, params.tokens);
  const auto* input = static_cast<const uint4*>(params.input) + vector;
  auto* output = static_cast<uint2*>(params.output) + vector;

  uint4 rows[kRows] = {};  // those of padding stay zero
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const long long token = first + i;
    if (token < real) rows[i] = __ldcs(input + token * row_vectors);  // see params.h: before the wait
  }
  ptx::grid_dependency_wait();
  float factors[kVector];
  load8(params.scales + vector * kVector, factors);
#pragma unroll
  for (int i = 0; i < kVector; ++i) factors[i] = 1.0f / factors[i];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const long long token = first + i;
    float scaled[kVector];
    unpack<Element>(rows[i], scaled);
#pragma unroll
    for (int n = 0; n < kVector; ++n) scaled[n] = __fmul_rn(scaled[n], factors[n]);
    if (token < params.tokens) __stcs(output + token * row_vectors, pack</*kIsE4m3=*/true>(scaled));
  }
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 6)
    KERNEL_NAME(const __grid_constant__ sage::ValueParams params) {
  ptx::grid_launch_dependents();
  if (params.format.is_fp16) {
    sage::quantize_value<__half>(params);
  } else {
    sage::quantize_value<__nv_bfloat16>(params);
  }
}
