// Online softmax of one warpgroup's 64 x kTileKV logits, in wgmma's accumulator layout.
//
// A thread holds two rows (rows.cuh), two neighbouring columns at a time: s[4 j + 0, 1] are columns 8 j + 2 (lane % 4)
// and the next of row g, s[4 j + 2, 3] those of row g + 8.
//
// Numerics. With scale in base 2 (bmm scale * log2 e) and reference m of a row, p = 2^(scale * (s - m)). The result
// does not depend on m, which need not be the exact maximum: it only has to keep p in range. So m moves only when a
// row outgrows it by more than kSlack (then p reaches 2^kSlack at most), and the common step has no shuffles, no
// rescaling of O and no multiplications by a correction. Whether a row's m moves depends on that row alone: rows of
// another sequence in the same tile cannot change a bit of this one's result.
//
// Sage: every row has a scale of its own, of either sign. Maxima and references are those of scale * s, and the scale
// of a reference is 1.
#pragma once
#include "config.h"
#include "row_result.cuh"
#include "rows.cuh"

namespace fmha {

constexpr float kSlack = kAssumesReference ? 14.f : 8.f;  // base-2 units; fp16 ends at 2^16
constexpr float kSafeSum = 8192.f;                        // 2^(kSlack - 1) where it is looked at

using Logits = float[kTileKV / 2];

// The four threads of a quad hold one row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Of a block, this thread's part.
struct Sums {
  float row[kRowsPerThread];
};

struct Softmax {
  float scale;  // base 2, positive
  float slack;  // kSlack in units of s
  float m[kRowsPerThread];
  float l[kRowsPerThread];           // this thread's part of the row sum
  float offset[kRowsPerThread];      // -scale * m, 0 where no key was visible yet
  float correction[kRowsPerThread];  // what O has to be multiplied by after a moved reference
  float row_scale[kRowsPerThread];   // Sage: base 2, not zero

  // The slack stays finite: a row without a reference yet, m = -inf, must outgrow it with its first visible key.
  __device__ __forceinline__ explicit Softmax(float scale_log2)
      : scale(scale_log2), slack(fminf(kSlack / scale_log2, __FLT_MAX__)) {}

  // Sage, for the rows of a tile. Hidden logits are infinite, which a scale of 0 would turn into NaN.
  __device__ __forceinline__ void set_row_scale(int r, float scale_log2) {
    row_scale[r] = fabsf(scale_log2) < __FLT_MIN__ ? copysignf(__FLT_MIN__, scale_log2) : scale_log2;
  }

  // What stands for a key that row r does not see: times its scale it is -inf.
  __device__ __forceinline__ float hidden_logit(int r) const {
    return kSage ? copysignf(kInfinity, -row_scale[r]) : -kInfinity;
  }

  // A tile without keys.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      m[r] = -kInfinity;
      l[r] = 0.f;
    }
  }

  // First block of a tile: the reference is its exact maximum.
  template <int kCount>
  __device__ __forceinline__ void first(float (&s)[kCount]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      set_reference(r, quad_max(row_max(s, r)));
      l[r] = 0.f;
    }
    add(exponentiate(s));
  }

  // Later blocks. Returns whether O must be rescaled (the same for the whole warp).
  template <int kCount>
  __device__ __forceinline__ bool next(float (&s)[kCount]) {
    const float x0 = row_max(s, 0), x1 = row_max(s, 1);
    const bool moved = __any_sync(~0u, x0 > m[0] + slack || x1 > m[1] + slack);
    if (moved) move_references(x0, x1);
    add(exponentiate(s));
    return moved;
  }

  // The same for who knows this thread's maxima already.
  __device__ __forceinline__ bool next(Logits& s, float x0, float x1) {
    const bool moved = __any_sync(~0u, x0 > m[0] + slack || x1 > m[1] + slack);
    if (moved) move_references(x0, x1);
    add(exponentiate(s));
    return moved;
  }

  // s becomes p. By itself, the step of a later block that does not look for the maximum, which costs as much as the
  // exponentials: the sums bound this thread's p. Where they are within reference for all threads, `add` them; if not,
  // s is lost and must be made again for `next`.
  template <int kCount>
  __device__ __forceinline__ Sums exponentiate(float (&s)[kCount]) const {
    float even[kRowsPerThread] = {0.f, 0.f}, odd[kRowsPerThread] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      if constexpr (kFp16Softmax) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const uint32_t x = ptx::pack_fp16x2(fmaf(s[4 * j + e], scale, offset[e / 2]),
                                              fmaf(s[4 * j + e + 1], scale, offset[e / 2]));
          const float2 p = ptx::unpack_fp16x2(ptx::exp2_approx_fp16x2(x));
          s[4 * j + e] = p.x;
          s[4 * j + e + 1] = p.y;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[4 * j + e] = ptx::exp2_approx(fmaf(s[4 * j + e], kSage ? row_scale[e / 2] : scale, offset[e / 2]));
        }
      }
      even[0] += s[4 * j];
      odd[0] += s[4 * j + 1];
      even[1] += s[4 * j + 2];
      odd[1] += s[4 * j + 3];
    }
    return {{even[0] + odd[0], even[1] + odd[1]}};
  }

  // Half of what the slack allows, so that rounding hides no row that `next` would move.
  static __device__ __forceinline__ bool within_reference(const Sums& sums) {
    return fmaxf(sums.row[0], sums.row[1]) <= kSafeSum;
  }

  __device__ __forceinline__ void add(const Sums& sums) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) l[r] += sums.row[r];
  }

 private:
  // Of this thread's part of row r, as references are counted.
  template <int kCount>
  __device__ __forceinline__ float row_max(const float (&s)[kCount], int r) const {
    const float factor = kSage ? row_scale[r] : 1.f;
    float even = factor * s[2 * r], odd = factor * s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < kCount / 4; ++j) {
      even = fmaxf(even, factor * s[4 * j + 2 * r]);
      odd = fmaxf(odd, factor * s[4 * j + 2 * r + 1]);
    }
    return fmaxf(even, odd);
  }

  __device__ __forceinline__ void set_reference(int r, float x) {
    m[r] = x;
    offset[r] = x == -kInfinity ? 0.f : -scale * x;
  }

  __device__ __forceinline__ void move_references(float x0, float x1) {
    move_reference(0, quad_max(x0));
    move_reference(1, quad_max(x1));
  }

  __device__ __forceinline__ void move_reference(int r, float x) {
    const bool outgrown = x > m[r] + slack;
    const float before = m[r];
    set_reference(r, outgrown ? x : before);
    correction[r] = outgrown ? ptx::exp2_approx(fmaf(before, scale, offset[r])) : 1.f;
    l[r] *= correction[r];
  }
};

}  // namespace fmha
