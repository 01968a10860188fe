// From the sums of a row to its output and log-sum-exp.
#pragma once
#include "common/ptx/math.cuh"

namespace fmha {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();

struct RowResult {
  float factor;  // what the accumulated row has to be multiplied by
  float lse;     // base 2
};

// `top` is the row's reference and `l` its whole sum, base 2. A row that saw no key has l = 0: out 0, lse -inf, sink
// or not. The sink, a logit without a value row, may exceed every other one by any amount, so it takes part in the
// maximum.
__device__ __forceinline__ RowResult finish_row(float top, float l, const float* sink) {
  if (l == 0.f) return {0.f, -kInfinity};
  float weight = 1.f, sum = l;
  if (sink != nullptr) {
    const float sink_log2 = *sink * kLog2E;
    const float reference = top;
    top = fmaxf(reference, sink_log2);
    weight = ptx::exp2_approx(reference - top);
    sum = l * weight + ptx::exp2_approx(sink_log2 - top);
  }
  return {weight / sum, top + ptx::log2_approx(sum)};
}

}  // namespace fmha
