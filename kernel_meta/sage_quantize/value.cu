// Value with one scale for each head and channel over all tokens: a pass for the largest magnitudes, and one that
// quantises.
#include "common/ptx/grid.cuh"
#include "sage_quantize/statistics.cuh"

namespace sage {

constexpr int kRows = 8;  // that a thread loads at a time

template <class Element>
__device__ __forceinline__ void quantize_value(const ValueParams& params, Shared& shared) {
  const int row_vectors = params.heads * params.format.head_dim / kVector;
  const int real = edge(params.edges, params.sequences, params.tokens);
  Queue queue(params.items, shared);
  Item item;
  while (queue.draw(item)) {
    const Place place(params.items, item.group);
    const long long first = static_cast<long long>(item.chunk) * kRows * place.slots + place.slot;
    uint4 rows[kRows] = {};
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const long long token = first + row * place.slots;
      if (token >= real) continue;
      const auto* address = static_cast<const uint4*>(params.input) + token * row_vectors + place.vector;
      rows[row] = item.is_first_pass ? __ldcg(address) : __ldcs(address);
    }
    float values[kVector] = {};
    if (item.is_first_pass) {
#pragma unroll
      for (const uint4& row : rows) {
        float loaded[kVector];
        unpack<Element>(row, loaded);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = fmaxf(values[i], fabsf(zero_unless_finite(loaded[i])));
      }
      const auto larger = [](float a, float b) { return fmaxf(a, b); };
      const auto write_scales = [&](const float(&amax)[kVector]) {
        float scales[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) scales[i] = scale_of(amax[i], kE4m3Max);
        store8(params.scales + place.vector * kVector, scales);
      };
      end_first_pass(params.items, item, place, shared, values, larger, write_scales);
    } else {
      wait_for_statistics(params.items, item.group);
      load8(params.scales + place.vector * kVector, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = 1.0f / values[i];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const long long token = first + row * place.slots;
        if (token >= params.tokens) continue;
        float scaled[kVector];  // rows of padding are zero
        unpack<Element>(rows[row], scaled);
#pragma unroll
        for (int i = 0; i < kVector; ++i) scaled[i] = __fmul_rn(scaled[i], values[i]);
        __stcs(static_cast<uint2*>(params.output) + token * row_vectors + place.vector, pack(scaled, true));
      }
    }
  }
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 3)
    KERNEL_NAME(const __grid_constant__ sage::ValueParams params) {
  __shared__ sage::Shared shared;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (params.format.is_fp16) {
    sage::quantize_value<__half>(params, shared);
  } else {
    sage::quantize_value<__nv_bfloat16>(params, shared);
  }
}
