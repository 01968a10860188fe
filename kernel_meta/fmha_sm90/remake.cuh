// Logits made again by one warp, of its own 16 rows: where p of a row overflowed, a logit lies more than about 70 above
// its reference, and what the logits were is lost. Rare, so it may take its time, but no register from the main loop.
#pragma once
#include "common/ptx/matrix.cuh"
#include "softmax.cuh"
#include "storage.cuh"

namespace fmha {

constexpr int kGroupKeys = 8;  // of one instruction

// Beside scales no register is left for addresses that the compiler makes ahead of the main loop, nor for one that is
// written under a condition only, and looks as if its last value were needed.
constexpr bool kHoldsRemake = kSage;

class WarpLogits {
 public:
  // The warpgroup's Q, and the block's K.
  __device__ __forceinline__ WarpLogits(const void* q, const void* k) {
    uint32_t thread[] = {threadIdx.x};
    if constexpr (kHoldsRemake) ptx::hold_registers(thread);
    const uint32_t lane = thread[0] & 31, query = ((thread[0] >> 5) & 3) * 16 + lane % 16, key = lane % 8;
    q_ = ptx::shared_address(q) + query * kSpanQK + (((lane / 16) ^ pattern(query)) << 4);
    k_ = ptx::shared_address(k) + key * kSpanQK + (((lane / 8) ^ pattern(key)) << 4);
  }

  // Of the group's keys: the thread's part of a wgmma's 8 columns. Integers are products that lack their scales.
  template <class Number>
  __device__ __forceinline__ void of_group(int group, Number (&s)[4]) const {
#pragma unroll
    for (Number& x : s) x = 0;
#pragma unroll 1
    for (int unit = 0; unit < kRowBytesQK / 16; unit += 4) {
      const uint32_t chunk = unit / kUnits, bytes = unit % kUnits * 16;
      uint32_t key[4], query[4];
      ptx::ldmatrix_x4(key, (k_ ^ bytes) + (chunk * kTileKV + group * kGroupKeys) * kSpanQK);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::ldmatrix_x4(query, (q_ ^ (bytes + i * kStepBytes)) + chunk * kWarpgroupRows * kSpanQK);
        ptx::mma(s, query, key[2 * i], key[2 * i + 1]);
      }
    }
  }

 private:
  // The swizzle permutes a span's 16-byte units by the number of the 128-byte line that they lie in.
  static constexpr uint32_t kUnits = kSpanQK / 16;
  static __device__ __forceinline__ uint32_t pattern(uint32_t row) { return row * kSpanQK / 128 % kUnits; }

  uint32_t q_, k_;  // the lane's first unit
};

// Rows whose sums overflow get their exact maximum as reference, and p and sums anew. The others stay as they are.
template <int kWords, class GroupedLogits>
__device__ __forceinline__ void move_overflown(Softmax& softmax, uint32_t (&p)[kWords], Sums& sums,
                                               const GroupedLogits& logits) {
  bool anew[kRowsPerThread];
  float maximum[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    anew[r] = quad_max(sums.row[r]) > kFiniteSum;
    maximum[r] = -kInfinity;
    if (anew[r]) sums.row[r] = 0.f;
  }
#pragma unroll 1
  for (int group = 0; group < kTileKV / kGroupKeys; ++group) {
    float s[4];
    logits.of_group(group, s);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) maximum[r] = fmaxf(maximum[r], fmaxf(s[2 * r], s[2 * r + 1]));
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    maximum[r] = quad_max(maximum[r]);
    if (anew[r]) softmax.move_to_maximum(r, maximum[r]);
  }
  // p turns by two words at a time, one of either row: a loop cannot index registers.
#pragma unroll 1
  for (int group = 0; group < kTileKV / kGroupKeys; group += 2) {
    float s[8];
    logits.of_group(group, reinterpret_cast<float (&)[4]>(s[0]));
    logits.of_group(group + 1, reinterpret_cast<float (&)[4]>(s[4]));
    uint32_t word[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      float four[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four[e] = ptx::exp2_approx(fmaf(s[4 * (e / 2) + 2 * r + e % 2], softmax.scale, softmax.offset[r]));
        if (anew[r]) sums.row[r] += four[e];
      }
      if constexpr (kHoldsRemake) {
        uint32_t made[] = {ptx::pack_e4m3x4(four[0], four[1], four[2], four[3])};
        ptx::hold_registers(made);
        word[r] = anew[r] ? made[0] : p[r];
      } else {
        word[r] = anew[r] ? ptx::pack_e4m3x4(four[0], four[1], four[2], four[3]) : p[r];
      }
    }
#pragma unroll
    for (int i = 2; i < kWords; ++i) p[i - 2] = p[i];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) p[kWords - 2 + r] = word[r];
  }
}

}  // namespace fmha
