// Skip-softmax (arXiv 2512.12087): which key blocks a consumer leaves out.
//
// The granule is a consumer's 64 rows by one key block. After Q K, a block whose maximum lies so far below the running
// maximum in every row that exp(difference) < factor / kv_len costs no exponentials and no P V, and its terms enter
// neither sum. Rows that see no key of the block agree, as do rows behind the sequence's end; a row that has not seen
// a key yet does not, if it sees one here.
//
// V of a block that no consumer has a use for is not loaded: the loader waits for their choices. Only while blocks
// count does it load ahead of them, or V would always come late.
//
// Most blocks count, and the decision delays their exponentials. So where kExpectsToCount, it is no more than two votes
// of the warp side by side: whether the block counts for certain, judged by a bound on the running maxima, and whether
// a reference moves. Running maxima are then those of a thread's own columns, until a block may be left out; and a
// consumer that goes on counting tells the loader nothing.
#pragma once
#include "common/ptx/math.cuh"
#include "mask.cuh"
#include "storage.cuh"

namespace fmha {

constexpr int kVoteBarrier = 5;  // + warpgroup: its warps have said whether a block counts
constexpr bool kKeepsLimits = kExpectsToCount && !kConsumersAreTight;  // or makes them in every block

// This thread's part of a row's maximum in a block; NaN where a logit is.
struct BlockMaxima {
  float row[kRowsPerThread];

  // The rows side by side: the chains of one are too few to hide an instruction's latency.
  __device__ __forceinline__ explicit BlockMaxima(const Logits& s) {
    float even[kRowsPerThread] = {s[0], s[2]}, odd[kRowsPerThread] = {s[1], s[3]};
#pragma unroll
    for (int j = 1; j < kTileKV / 8; ++j) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        even[r] = ptx::max_or_nan(even[r], s[4 * j + 2 * r]);
        odd[r] = ptx::max_or_nan(odd[r], s[4 * j + 2 * r + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row[r] = ptx::max_or_nan(even[r], odd[r]);
  }
};

// The running maxima of a thread's rows, in units of s, and what is negligible beside them. The softmax's references
// may lie below them by the slack, and no further: a row that outgrows its reference has a new running maximum.
class RunningMaxima {
 public:
  // A tile of a sequence with kv_len keys; `scale` is the softmax's.
  __device__ __forceinline__ void begin(const Rows& rows, float factor, int kv_len, float scale) {
    const float threshold_log2 = ptx::log2_approx(factor) - ptx::log2_approx(static_cast<float>(kv_len));
    // Finite, so that a row without a running maximum has nothing below it; rounded down, so that equality is not less.
    const float margin = fminf(fmaxf(threshold_log2 / scale, -__FLT_MAX__), __FLT_MAX__);
    margin_ = __fadd_rd(margin, -__FLT_MIN__);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_[r] = rows.valid[r] ? -kInfinity : kInfinity;
  }

  // Whether the block counts beside one of this thread's. Without branches, which would keep the rows apart.
  __device__ __forceinline__ bool counts(const BlockMaxima& block) const {
    bool counts = false;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      counts |= (row_[r] < kInfinity) & !(block.row[r] <= __fadd_rd(row_[r], margin_));
    }
    return counts;
  }

  // Whether it does for certain, though this thread's may lie below those of the row.
  __device__ __forceinline__ bool surely_counts(const BlockMaxima& block, const Softmax& softmax) const {
    bool counts = false;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      counts |= block.row[r] > (kKeepsLimits ? limit_[r] : limit(softmax, r));
    }
    return counts;
  }

  // The softmax's references have moved.
  __device__ __forceinline__ void set_limits(const Softmax& softmax) {
    if constexpr (kKeepsLimits) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) limit_[r] = limit(softmax, r);
    }
  }

  // By a tile's first block.
  __device__ __forceinline__ void start(const Softmax& softmax) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_[r] = fmaxf(row_[r], softmax.m[r]);
    set_limits(softmax);
  }

  // Whether the block raises one of the warp's.
  __device__ __forceinline__ bool raised_by(const BlockMaxima& block) const {
    return __any_sync(~0u, (block.row[0] > row_[0]) | (block.row[1] > row_[1]));
  }

  // All lanes of the warp take part.
  __device__ __forceinline__ void raise(const BlockMaxima& block) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_[r] = fmaxf(row_[r], quad_max(block.row[r]));
  }

  // This thread's alone.
  __device__ __forceinline__ void raise_own(const BlockMaxima& block) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_[r] = fmaxf(row_[r], block.row[r]);
  }

  // Those of all threads of a row become the row's.
  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_[r] = quad_max(row_[r]);
  }

 private:
  // Above it a block counts, since no running maximum exceeds its reference by more than the slack. Nothing is above
  // NaN, which a reference may be.
  __device__ __forceinline__ float limit(const Softmax& softmax, int r) const {
    return ptx::max_or_nan(row_[r], softmax.m[r] + softmax.slack) + margin_;
  }

  float margin_;  // log2(threshold) / scale
  float row_[kRowsPerThread];  // infinite behind the sequence's end
  float limit_[kRowsPerThread];
};

// Whether a block counts for any of the warpgroup's threads. A warp that knows does not wait for the others: it leaves
// them the block's number.
__device__ __forceinline__ bool vote(int warpgroup, bool counts, uint32_t number) {
  volatile uint32_t& counting = storage().counting[warpgroup];
  if (__any_sync(~0u, counts)) {
    if ((threadIdx.x & 31) == 0) counting = number;
    ptx::named_barrier_arrive(kVoteBarrier + warpgroup, 128);
    return true;
  }
  ptx::named_barrier_sync(kVoteBarrier + warpgroup, 128);
  return __shfl_sync(~0u, counting == number, 0);
}

// The same in two: a warp that knows that the block counts just arrives, the others leave its number.
__device__ __forceinline__ void say_whether_it_counts(int warpgroup, bool counts) {
  ptx::named_barrier_arrive_if(counts, kVoteBarrier + warpgroup, 128);
}

__device__ __forceinline__ bool counts_for_others(int warpgroup, int warp, uint32_t number) {
  auto& dispensable = storage().dispensable[warpgroup];
  if ((threadIdx.x & 31) == 0) static_cast<volatile uint32_t&>(dispensable[warp]) = number;
  ptx::named_barrier_sync(kVoteBarrier + warpgroup, 128);
  const uint32_t words = ptx::shared_address(dispensable);
  const uint2 a = ptx::load_shared_v2(words), b = ptx::load_shared_v2(words + 8);
  return __shfl_sync(~0u, a.x != number || a.y != number || b.x != number || b.y != number, 0);
}

// A consumer's choice about its next block; one thread of it.
__device__ __forceinline__ void publish(int consumer, uint32_t made, uint32_t weighing) {
  ptx::store_shared_v2(ptx::shared_address(&storage().choices[consumer]), make_uint2(made, weighing));
}

// What the consumers say of a block. Blocks have numbers, counted over all tiles.
struct Demand {
  bool any;    // to whom it counts; a consumer that has not chosen yet is expected to choose as for the block before
  bool known;  // all have chosen

  __device__ __forceinline__ explicit Demand(uint32_t number) : any(false), known(true) {
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const uint2 choices = ptx::load_shared_v2(ptx::shared_address(&storage().choices[consumer]));
      const int age = static_cast<int>(choices.x - 1 - number);  // negative: not made yet
      any |= choices.y >> max(age, 0) & 1;
      known &= age >= 0;
    }
  }
};

// Whether V of a block has to be loaded.
__device__ __forceinline__ bool has_use(uint32_t number) {
  for (;;) {
    const Demand demand(number);
    if (demand.any || demand.known) return demand.any;
  }
}

}  // namespace fmha
