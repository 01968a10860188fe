// Skip-softmax in a consumer: the steps that choose whether their key block counts. What a choice goes by, and whom it
// is told, is in skip.cuh. In kernels without it every block counts, and nothing of this is used.
#pragma once
#include "mask.cuh"
#include "products.cuh"
#include "skip.cuh"

namespace fmha {

static_assert(!kSkipsSoftmax || kTakesTurns, "turns keep a warp from voting twice before another has voted once");

class ConsumerChoices : protected ConsumerProducts {
 protected:
  using ConsumerProducts::ConsumerProducts;

  // A tile of which this consumer's rows see `blocks`. A sliding tile's extra block, down to `last`, which only the
  // other consumer's rows see, is always left out and not counted.
  __device__ __forceinline__ void begin_choices(const Rows& rows, int kv_len, const BlockRange& blocks, int last) {
    maxima_.begin(rows, params_.skip.factor, kv_len, softmax_.scale);
    if (!keeps_tally()) return;
    SkipTally& tally = storage().skipped[warpgroup_];
    tally.all += blocks.end - blocks.begin;
    tally.left_out -= blocks.begin - last;
  }

  // Its first block, which always counts, has made the softmax's references.
  __device__ __forceinline__ void start_maxima() { maxima_.start(softmax_); }

  // Its later blocks, from `block` down to `end`.
  template <Block kNow>
  __device__ __forceinline__ void step_or_skip_each(const Mask& mask, int& block, int end, int last, int values_end) {
    if constexpr (kExpectsToCount) {
      count_and_skip<kNow>(mask, block, end, last, values_end);
    } else {
      for (; block >= end; --block) {
        if (has_weights()) {
          step_or_skip<kNow, true>(mask, block, last, values_end);
        } else {
          step_or_skip<kNow, false>(mask, block, last, values_end);
        }
      }
    }
  }

  // Where the block before was chosen alike, the loader expects the choice, and need not be told.
  template <bool kExpected = false>
  __device__ __forceinline__ void choose(bool counts) {
    ++choices_made_;
    weighing_ = weighing_ << 1 | counts;
    if (!kExpected && keeps_tally()) publish(warpgroup_, choices_made_, weighing_);
  }

  // Whether p_ holds a block's probabilities, whose product is yet to come.
  __device__ __forceinline__ bool has_weights() const { return !kSkipsSoftmax || weighing_ & 1; }

  // When there are no more tiles.
  __device__ __forceinline__ void report_tally() const {
    if (!keeps_tally() || params_.skip.counts == nullptr) return;
    const SkipTally& tally = storage().skipped[warpgroup_];
    atomicAdd(&params_.skip.counts[0], static_cast<unsigned long long>(tally.left_out));
    atomicAdd(&params_.skip.counts[1], static_cast<unsigned long long>(tally.all));
  }

 private:
  // A loop for blocks that count, and one for those that do not: what both do behind a block, each does in its own
  // place, among the exponentials.
  template <Block kNow>
  __device__ __forceinline__ void count_and_skip(const Mask& mask, int& block, int end, int last, int values_end) {
    while (block >= end) {
      if (has_weights()) {
        while (step_or_skip<kNow, true>(mask, block, last, values_end)) {
          if (--block < end) return;
        }
        leave_out<true>();
      } else {
        while (!step_or_skip<kNow, false>(mask, block, last, values_end)) {
          leave_out<false>();
          if (--block < end) return;
        }
      }
      --block;
    }
  }

  // A step that finds out whether the block counts, and ends there if it does not; where kExpectsToCount, the caller
  // then leaves it out. Two bodies instead of a branch around P V, which would keep the compiler from overlapping
  // products.
  template <Block kNow, bool kHasWeights>
  __device__ __forceinline__ bool step_or_skip(const Mask& mask, int block, int last, int values_end) {
    take_turn();
    issue_logits();
    if constexpr (kHasWeights) issue_output<kNow>(values_end - (block + 1) * kTileKV);
    pass_turn();
    ptx::wgmma_wait<kHasWeights ? 1 : 0>();
    logits_arrived(block == last);
    if constexpr (kNow == Block::masked) mask.apply(s_, block);
    const BlockMaxima block_maxima(s_);
    bool moved = false;
    if constexpr (kExpectsToCount) {
      if (!admits_expected<kHasWeights>(block_maxima, moved)) return false;
    } else {
      if (!vote(warpgroup_, maxima_.counts(block_maxima), choices_made_ + 1)) {
        leave_out<kHasWeights>();
        return false;
      }
      choose(true);
      if (maxima_.raised_by(block_maxima)) {
        moved = softmax_.outgrown_by(block_maxima.row[0], block_maxima.row[1]);
        if (moved) softmax_.follow(block_maxima.row[0], block_maxima.row[1]);
        maxima_.raise(block_maxima);
      }
    }
    softmax_.add(softmax_.exponentiate(s_));
    if constexpr (kExpectsToCount) maxima_.raise_own(block_maxima);
    ptx::hold_registers(s_);
    values_done<kHasWeights>();
    probabilities_to_operand(s_);
    if (moved) rescale_output();
    return true;
  }

  // Whether the block counts. References have followed it then; where one has moved, O has yet to.
  template <bool kHasWeights>
  __device__ __forceinline__ bool admits_expected(const BlockMaxima& block, bool& moved) {
    // Behind a block that was left out, all threads of a row have its running maximum.
    const bool counts =
        __any_sync(~0u, kHasWeights ? maxima_.surely_counts(block, softmax_) : maxima_.counts(block));
    moved = softmax_.outgrown_by(block.row[0], block.row[1]);
    say_whether_it_counts(warpgroup_, counts);
    if (__builtin_expect(!counts || moved, false)) {
      if (!counts && !counts_exactly<kHasWeights>(block) &&
          !counts_for_others(warpgroup_, warp_, choices_made_ + 1)) {
        if constexpr (kHasWeights) wait_for_output();  // here: ptxas serialises products that leave the loop
        return false;
      }
      if (moved) {
        softmax_.follow(block.row[0], block.row[1]);
        maxima_.set_limits(softmax_);
      }
    }
    choose<kHasWeights>(true);
    return true;
  }

  // For the warp, where it is not certain.
  template <bool kHasWeights>
  __device__ __forceinline__ bool counts_exactly(const BlockMaxima& block) {
    if constexpr (!kHasWeights) return false;
    maxima_.exchange();
    const bool counts = __any_sync(~0u, maxima_.counts(block));
    say_whether_it_counts(warpgroup_, counts);
    return counts;
  }

  template <bool kHasWeights>
  __device__ __forceinline__ void leave_out() {
    choose(false);
    if (keeps_tally()) ++storage().skipped[warpgroup_].left_out;
    values_done<kHasWeights>();
  }

  // With the product of the block before, or with its V, which this consumer has no use for.
  template <bool kHasWeights>
  __device__ __forceinline__ void values_done() {
    if constexpr (kHasWeights) {
      output_arrived();
    } else {
      pass_values();
    }
  }

  // One thread, in shared memory: registers are scarce.
  __device__ __forceinline__ bool keeps_tally() const { return (threadIdx.x & 127) == 0; }

  RunningMaxima maxima_;
  uint32_t choices_made_ = 0, weighing_ = 1;  // as in Choices
};

}  // namespace fmha
