// Pairs: two consumers have the same query rows, and each half of their keys: twice as many steps are under way at a
// time. What they have is put together at a tile's end, in shared memory. Where there is one block of keys or none, the
// first consumer is alone.
#pragma once
#include "epilogue.cuh"
#include "softmax.cuh"
#include "storage.cuh"

namespace fmha {

static_assert(!kPairs || (!kPreparesValues && !kSkipsSoftmax && !kFp16Softmax), "pairs are of plain 16-bit kernels");

constexpr int kPairBarrier = 7;  // of both consumers

__device__ __forceinline__ void wait_for_both() { ptx::named_barrier_sync(kPairBarrier, 128 * kShares); }

// How much the sums of a row count beside others with the maximum `top`.
__device__ __forceinline__ float weight_of(const Softmax& softmax, float m, float top) {
  return m == top ? 1.f : ptx::exp2_approx(softmax.scale * (m - top));  // both may be -inf
}

// Each consumer finishes half of the columns, for all keys: they become the first ones of `o`.
__device__ __forceinline__ void keep_half(int consumer, const Rows& rows, Output& o, Softmax& softmax) {
  constexpr int kHalf = kHeadDimV / 4;  // values of a thread
  Storage& s = storage();
  const int thread = threadIdx.x & 127;
  auto column = [&](int owner, int i) { return owner == 0 ? o[i] : o[kHalf + i]; };

  wait_for_both();  // they have read what they were sent of the tile before
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if ((thread & 3) == 0) s.sent_statistics[consumer][rows.row[r]] = make_float2(softmax.m[r], softmax.l[r]);
  }
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const int other = 1 - consumer;
    s.sent_sums[consumer][i / 4][thread] =
        make_float4(column(other, i), column(other, i + 1), column(other, i + 2), column(other, i + 3));
  }
  wait_for_both();

  float ours[kRowsPerThread], theirs[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const auto [m, l] = s.sent_statistics[1 - consumer][rows.row[r]];
    const float top = fmaxf(softmax.m[r], m);
    ours[r] = weight_of(softmax, softmax.m[r], top);
    theirs[r] = weight_of(softmax, m, top);
    softmax.m[r] = top;
    softmax.l[r] = __fmul_rn(ours[r], softmax.l[r]) + __fmul_rn(theirs[r], l);  // the same in both
  }
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const float4 x = s.sent_sums[1 - consumer][i / 4][thread];
    o[i] = fmaf(theirs[0], x.x, ours[0] * column(consumer, i));
    o[i + 1] = fmaf(theirs[0], x.y, ours[0] * column(consumer, i + 1));
    o[i + 2] = fmaf(theirs[1], x.z, ours[1] * column(consumer, i + 2));
    o[i + 3] = fmaf(theirs[1], x.w, ours[1] * column(consumer, i + 3));
  }
}

}  // namespace fmha
