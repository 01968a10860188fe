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
// Where p has 8 bits, sums of a block's p tell by how much (kMovesBySums). Then only the offset is kept, not m.
//
// Sage: s comes as an exponent in base 2 (sage.cuh), made with its scales and, where the row has one, the reference of
// before the block. So `scale` is 1, and a reference that moves shifts s.
#pragma once
#include "config.h"
#include "row_result.cuh"
#include "rows.cuh"

namespace fmha {

// Base-2 units. p of the reference is 2^kTop, and p ends at 2^(kTop + kSlack): fp16 at 2^16, e4m3 at 448. Below
// 2^-6 e4m3 loses bits. kTop is a whole number: p of a row's only key is not rounded.
constexpr float kTop = kE4m3P ? 2.f : 0.f;
constexpr float kSlack = kE4m3P ? 6.75f : kAssumesReference ? 14.f : 8.f;
constexpr float kSafeSum = kE4m3P ? 400.f : 8192.f;  // less than 2^(kTop + kSlack), where it is looked at

// Rows of a block whose p, as floats, are finite move by what the sums say, and their p with them; only rows that
// overflow are made again (remake.cuh). The largest of a row's four sums becomes kMovedSum, a power of two: where one
// key outweighs all others, its p is not rounded.
constexpr bool kMovesBySums = kE4m3P;
constexpr float kMovedSum = 16.f;
constexpr float kFiniteSum = 0x1p100f;  // has a normal reciprocal
constexpr float kNoReference = 0x1p100f;  // as an offset, which any key outgrows

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
  float slack;  // kSlack in units of s; kMovesBySums: base 2
  float m[kRowsPerThread];
  float l[kRowsPerThread];           // this thread's part of the row sum
  float offset[kRowsPerThread];      // kTop - scale * m, 0 where no key was visible yet
  float correction[kRowsPerThread];  // what O has to be multiplied by after a moved reference
  float row_scale[kRowsPerThread];   // Sage: base 2

  // The slack stays finite: a row without a reference yet, m = -inf, must outgrow it with its first visible key.
  __device__ __forceinline__ explicit Softmax(float scale_log2)
      : scale(scale_log2), slack(kMovesBySums ? kSlack : fminf(kSlack / scale_log2, __FLT_MAX__)) {}

  // Sage: the next exponents are the first of another row's.
  __device__ __forceinline__ void begin_row(int r, float scale_log2) {
    row_scale[r] = scale_log2;
    offset[r] = 0.f;
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
    if constexpr (kSage) shift(s, offset);
    add(exponentiate(s));
  }

  // Later blocks. Returns whether O must be rescaled (the same for the whole warp). kExact: a row outgrows its
  // reference with anything above it.
  template <bool kExact = false, int kCount>
  __device__ __forceinline__ bool next(float (&s)[kCount]) {
    const float before[kRowsPerThread] = {exponent_offset(0), exponent_offset(1)};
    const float x0 = row_max(s, 0), x1 = row_max(s, 1);
    const bool moved = outgrown_by<kExact>(x0, x1);
    if (moved) follow<kExact>(x0, x1);
    if (kSage && moved) shift(s, {offset[0] - before[0], offset[1] - before[1]});
    add(exponentiate(s));
    return moved;
  }

  // Whether a row of the warp outgrows its reference with these maxima, of which each thread has its part.
  template <bool kExact = false>
  __device__ __forceinline__ bool outgrown_by(float x0, float x1) const {
    return __any_sync(~0u, outgrows<kExact>(0, x0) || outgrows<kExact>(1, x1));
  }

  // Moves the references that they outgrow. O must be rescaled.
  template <bool kExact = false>
  __device__ __forceinline__ void follow(float x0, float x1) {
    move_reference<kExact>(0, quad_max(x0));
    move_reference<kExact>(1, quad_max(x1));
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
          s[4 * j + e] = ptx::exp2_approx(kSage ? s[4 * j + e] : fmaf(s[4 * j + e], scale, offset[e / 2]));
        }
      }
      even[0] += s[4 * j];
      odd[0] += s[4 * j + 1];
      even[1] += s[4 * j + 2];
      odd[1] += s[4 * j + 3];
    }
    return {{even[0] + odd[0], even[1] + odd[1]}};
  }

  // Less than what the slack allows, so that rounding hides no row that `next` would move.
  static __device__ __forceinline__ bool within_reference(const Sums& sums) {
    return fmaxf(sums.row[0], sums.row[1]) <= kSafeSum;
  }

  // NaN does not: it stays what it is.
  static __device__ __forceinline__ bool overflows(const Sums& sums) {
    return sums.row[0] > kFiniteSum || sums.row[1] > kFiniteSum;
  }

  // Moves the rows of a block that outgrew their references without overflow.
  template <int kCount>
  __device__ __forceinline__ void move_by_sums(float (&p)[kCount], Sums& sums) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float largest = quad_max(sums.row[r]);
      const bool outgrown = largest > kSafeSum && largest <= kFiniteSum;
      correction[r] = outgrown ? kMovedSum * ptx::reciprocal_approx(largest) : 1.f;
      offset[r] += outgrown ? ptx::log2_approx(correction[r]) : 0.f;
      l[r] *= correction[r];
      sums.row[r] *= correction[r];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] *= correction[i / 2 % 2];
  }

  // Where nothing moves, nobody reads the corrections, but the last ones would stay in their registers.
  __device__ __forceinline__ void forget_corrections() {
#pragma unroll
    for (float& factor : correction) factor = 1.f;
  }

  // Row r, to the maximum of a block.
  __device__ __forceinline__ void move_to_maximum(int r, float x) {
    const float before = offset[r];
    set_reference(r, x);
    correction[r] = ptx::exp2_approx(offset[r] - before);
    l[r] *= correction[r];
  }

  // Sage: what exponents of a row are made with where not all rows have a reference. One without has none.
  __device__ __forceinline__ float exponent_offset(int r) const {
    return kMovesBySums && offset[r] == kNoReference ? 0.f : offset[r];
  }

  // A row's reference less kTop, base 2.
  __device__ __forceinline__ float base(int r) const { return kMovesBySums ? -offset[r] : scale * m[r] - kTop; }

  __device__ __forceinline__ void add(const Sums& sums) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) l[r] += sums.row[r];
  }

 private:
  // Of this thread's part of row r, as references are counted.
  template <int kCount>
  __device__ __forceinline__ float row_max(const float (&s)[kCount], int r) const {
    float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < kCount / 4; ++j) {
      even = fmaxf(even, s[4 * j + 2 * r]);
      odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
    }
    return kSage ? fmaxf(even, odd) - exponent_offset(r) : fmaxf(even, odd);
  }

  // By nothing where a row's reference stays: its exponents keep every bit.
  template <int kCount>
  static __device__ __forceinline__ void shift(float (&s)[kCount], const float (&by)[kRowsPerThread]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] += by[i / 2 % 2];
  }

  template <bool kExact>
  __device__ __forceinline__ bool outgrows(int r, float x) const {
    const float most = kExact ? 0.f : slack;
    if constexpr (kMovesBySums) return fmaf(x, scale, offset[r]) > kTop + most;
    return x > m[r] + most;
  }

  __device__ __forceinline__ void set_reference(int r, float x) {
    if constexpr (kMovesBySums) {
      offset[r] = x == -kInfinity ? kNoReference : kTop - scale * x;
      return;
    }
    m[r] = x;
    offset[r] = x == -kInfinity ? 0.f : kTop == 0.f ? -scale * x : kTop - scale * x;
  }

  template <bool kExact>
  __device__ __forceinline__ void move_reference(int r, float x) {
    const bool outgrown = outgrows<kExact>(r, x);
    if constexpr (kMovesBySums) {
      const float before = offset[r];
      if (outgrown) set_reference(r, x);
      correction[r] = ptx::exp2_approx(offset[r] - before);
      l[r] *= correction[r];
      return;
    }
    const float before = m[r];
    set_reference(r, outgrown ? x : before);
    correction[r] = outgrown ? ptx::exp2_approx(fmaf(before, scale, offset[r] - kTop)) : 1.f;
    l[r] *= correction[r];
  }
};

}  // namespace fmha
