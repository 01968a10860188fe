// Skip-softmax (arXiv 2512.12087): which key blocks a consumer leaves out.
//
// The granule is a consumer's 64 rows by one key block. After Q K, a block whose maximum lies so far below the running
// maximum in every row that exp(difference) < factor / kv_len costs no exponentials and no P V, and its terms enter
// neither sum. Rows that see no key of the block agree, as do rows behind the sequence's end; a row that has not seen
// a key yet does not, if it sees one here.
//
// V of a block that no consumer has a use for is not loaded: the loader waits for their choices. Only while blocks
// count does it load ahead of them, or V would always come late.
#pragma once
#include "common/ptx/math.cuh"
#include "mask.cuh"
#include "storage.cuh"

namespace fmha {

// This thread's part of a row's maximum in a block; NaN where a logit is.
struct BlockMaxima {
  float row[kRowsPerThread];

  __device__ __forceinline__ explicit BlockMaxima(const Logits& s) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
      for (int j = 1; j < kTileKV / 8; ++j) {
        even = ptx::max_or_nan(even, s[4 * j + 2 * r]);
        odd = ptx::max_or_nan(odd, s[4 * j + 2 * r + 1]);
      }
      row[r] = ptx::max_or_nan(even, odd);
    }
  }
};

// The largest maxima, in units of s, that are negligible to a thread's rows. They go by the true running maximum: the
// softmax's reference may lie below it by the slack.
class Negligible {
 public:
  // A tile of a sequence with kv_len keys; `scale` is the softmax's.
  __device__ __forceinline__ void begin(const Rows& rows, float factor, int kv_len, float scale) {
    const float threshold_log2 = ptx::log2_approx(factor) - ptx::log2_approx(static_cast<float>(kv_len));
    // Finite, so that a row without a running maximum has nothing below it; rounded down, so that equality is not less.
    const float margin = fminf(fmaxf(threshold_log2 / scale, -__FLT_MAX__), __FLT_MAX__);
    margin_ = __fadd_rd(margin, -__FLT_MIN__);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) limit_[r] = rows.valid[r] ? -kInfinity : kInfinity;
  }

  // Whether the block may not be left out, as far as this thread knows.
  __device__ __forceinline__ bool exceeded_by(const BlockMaxima& maxima) const {
    bool exceeded = false;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      exceeded = exceeded || (limit_[r] < kInfinity && !(maxima.row[r] <= limit_[r]));
    }
    return exceeded;
  }

  // A block has been taken in. All lanes of the warp take part.
  __device__ __forceinline__ void raise(const BlockMaxima& maxima) {
    float candidate[kRowsPerThread];
    bool raised = false;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      candidate[r] = __fadd_rd(maxima.row[r], margin_);
      raised = raised || candidate[r] > limit_[r];
    }
    if (!__any_sync(~0u, raised)) return;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) limit_[r] = fmaxf(limit_[r], quad_max(candidate[r]));
  }

 private:
  float margin_;  // log2(threshold) / scale
  float limit_[kRowsPerThread];  // running maximum + margin
};

// A consumer's choice about its next block; one thread of it.
__device__ __forceinline__ void publish(int consumer, uint32_t made, uint32_t weighing) {
  ptx::store_shared_v2(ptx::shared_address(&storage().choices[consumer]), make_uint2(made, weighing));
}

// Whether V of a block has to be loaded. Blocks have numbers, counted over all tiles.
__device__ __forceinline__ bool has_use(uint32_t number) {
  for (;;) {
    bool known = true;
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const uint2 choices = ptx::load_shared_v2(ptx::shared_address(&storage().choices[consumer]));
      const int age = static_cast<int>(choices.x - 1 - number);  // negative: not made yet
      if (choices.y >> max(age, 0) & 1) return true;
      known = known && age >= 0;
    }
    if (known) return false;
  }
}

}  // namespace fmha
