// A consumer warpgroup: 64 query rows of every tile.
//
// The loop runs over tiles without a seam. While the softmax of block n runs, the tensor cores work on Q K of this
// block and P V of the one before; at a tile's end the partner of P V is the first Q K of the next tile, and the
// finished tile is written after that block's softmax. Until then it is `pending`. Of tiles of 64 rows a block has
// about one, and finishes it at once.
//
// Two warpgroups take turns in issuing products (named barriers), so that one's softmax runs under the other's. Where
// both products are of 8-bit elements, they are too short for that.
#pragma once
#include <utility>

#include "common/ptx/grid.cuh"
#include "compress.cuh"
#include "epilogue.cuh"
#include "long_sum.cuh"
#include "mask.cuh"
#include "pair.cuh"
#include "remake.cuh"
#include "sage.cuh"
#include "skip.cuh"

namespace fmha {

constexpr bool kTakesTurns = kRowGroups == 2 && !kE4m3P;
constexpr bool kFetchesScalesEarly = kSage && !kE4m3P;  // under every Q K^T
constexpr int kTurnBarrier = 1;         // + warpgroup: it may issue its products
constexpr int kWarpgroupBarrier = 3;    // + warpgroup: its 128 threads
constexpr int kVoteBarrier = 5;         // + warpgroup: its warps have said whether a block counts
constexpr int kConsumerThreads = 128 * kConsumers;
static_assert(!kSkipsSoftmax || kTakesTurns, "turns keep a warp from voting twice before another has voted once");

constexpr ptx::Major kMajorV = kTransposesValues ? ptx::Major::K : ptx::Major::MN;

// Where Q K^T accumulates: in the logits themselves, if they are floats.
template <class Products>
struct LogitProducts {
  Products integers;

  __device__ __forceinline__ Products& of(Logits&) { return integers; }
  __device__ __forceinline__ Products& anew(Logits&) {
    ptx::drop_registers(integers);
    return integers;
  }
};

template <>
struct LogitProducts<Logits> {
  __device__ __forceinline__ Logits& of(Logits& s) { return s; }
  __device__ __forceinline__ Logits& anew(Logits& s) { return s; }
};

// How the logits of a block are treated: each is visible or not to a row, all are visible, or two of four count.
enum class Block { masked, whole, pruned, none };

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Params& params, int warpgroup, float bmm1_scale, float bmm2_scale)
      : params_(params),
        warpgroup_(warpgroup),
        warp_((threadIdx.x >> 5) & 3),
        lane_(threadIdx.x & 31),
        // Masked logits are -inf, which a factor of 0 would turn into NaN.
        softmax_(kSage ? 1.f : fmaxf(fabsf(bmm1_scale) * kLog2E, __FLT_MIN__)),
        negative_scale_(!kSage && bmm1_scale < 0.f),
        bmm1_scale_(bmm1_scale),
        bmm2_scale_(bmm2_scale) {
    if constexpr (kPairs) k_ring_.stage = v_ring_.stage = warpgroup;
  }

  __device__ __forceinline__ void run() {
    Storage& s = storage();
    if (kTakesTurns && warpgroup_ == 1) pass_turn();
    for (Ring<kTileSlots> slot;; slot.advance()) {
      ptx::mbarrier_wait(s.tile_full[slot.stage], slot.parity);
      const Tile& shared = s.tiles[slot.stage];
      const Tile tile = read_blocks(shared, lane_);  // the rest stays in the slot: registers are scarce
      if (tile.work == 0) break;
      process(tile, shared);
      arrive(s.tile_empty[slot.stage]);
    }
    flush_pending();
    if constexpr (kSkipsSoftmax) report_tally();
    if constexpr (kStagesOutput) dismiss_store_warp();
    if (kTakesTurns && warpgroup_ == 0) wait_for_turn();
  }

 private:
  __device__ __forceinline__ void process(const Tile& tile, const Tile& shared) {
    const int tokens = tile_tokens(params_);
    const int first_token = tile.q_block * tokens + row_group() * params_.tile_tokens;
    const BlockRange tile_blocks = block_range(tile, tile.q_block * tokens, tokens, params_);
    const BlockRange shared_blocks = share_of(tile_blocks, warpgroup_);
    const BlockRange blocks = share_of(block_range(tile, first_token, params_.tile_tokens, params_), warpgroup_);

    // Blocks that only the other warpgroup's rows see: later ones are skipped; earlier ones (of a sliding window) are
    // at most one, and are computed, masked.
    const int last = shared_blocks.begin;
    if (blocks.end < shared_blocks.end) flush_pending();
    for (int block = shared_blocks.end - 1; block >= max(blocks.end, last); --block) skip_block();
    if (blocks.empty()) {
      flush_pending();
      if (kPairs && !tile_blocks.empty()) skip_query();
      if (first_token < tile.q_len) finish_without_keys(shared, first_token);
      return;
    }

    if constexpr (kSage) {
      query_scales_ = load_query_scales(params_, shared, Rows(first_token, tile.q_len, params_));
    }
    wait_for_query();
    // The store warp takes whole tiles only: the rows behind a sequence's end are the next sequence's.
    const bool staged =
        kStagesOutput && pending_ && shuffled(mine().token) + params_.tile_tokens <= shuffled(mine().q_len);
    if (kQInRegisters && !staged) release_query();

    const Rows rows(first_token, tile.q_len, params_);
    const Mask visible(tile, rows, params_.window_left);
    const Mask& mask = kept(visible);
    if constexpr (kCompressesKeys) {
      run_pruned(tile, shared, mask, blocks.end, last, first_token);
      return;
    }
    if constexpr (kSkipsSoftmax) {
      maxima_.begin(rows, params_.skip.factor, tile.kv_len, softmax_.scale);
      tally_tile(blocks, last);
    }
    int block = blocks.end - 1;
    if constexpr (!kSeamless) first_valid_rows_ = tile.kv_len - block * kTileKV;
    if (kSeamless && pending_ && has_weights()) {
      first_step<Block::masked, Block::whole>(mask, block, last, staged);
    } else {
      first_step<Block::masked, Block::none>(mask, block, last, staged);
    }
    remember(shared, first_token);
    start_output();
    // A row may see no key of the first block, and has a reference behind the second.
    const bool waits = kAssumesReference && !(kMovesBySums && key_end(tile, first_token) > (blocks.end - 1) * kTileKV);
    const int full_end = waits ? min(blocks.full_end, blocks.end - 2) : blocks.full_end;
    const int full_begin = kMask == MaskType::sliding ? max(blocks.full_begin, last) : last;
    for (--block; block >= max(full_end, last); --block) later_step<Block::masked>(mask, block, last, tile.kv_len);
    if constexpr (kMovesBySums) {
      if (kSage && one_scale_per_group(params_)) {
        for (; block >= full_begin; --block) step_by_sums<true>(block, last, tile.kv_len);
      } else {
        for (; block >= full_begin; --block) step_by_sums<false>(block, last, tile.kv_len);
      }
    } else if constexpr (kAssumesReference) {
      for (bool within = true; within && block >= full_begin; --block) {
        within = step_within_reference<Block::whole>(block, last, tile.kv_len);
      }
    }
    if constexpr (!kMovesBySums) {
      for (; block >= full_begin; --block) later_step<Block::whole>(mask, block, last, tile.kv_len);
    }
    if constexpr (kMask == MaskType::sliding) {
      for (; block >= last; --block) later_step<Block::masked>(mask, block, last, tile.kv_len);
    }
    pending_valid_rows_ = tile.kv_len - last * kTileKV;
    pending_ = true;
    if constexpr (!kSeamless) flush();
  }

  // The same for rows with spcompress: all blocks that are not pruned are masked.
  __device__ __forceinline__ void run_pruned(const Tile& tile, const Tile& shared, const Mask& mask, int end, int last,
                                             int first_token) {
    const PrunedBlocks pruned = pruned_blocks(tile, params_);
    int block = end - 1;
    const bool begins_pruned = pruned.contains(block);
    if (begins_pruned) {
      first_step<Block::pruned>(mask, block, last);
    } else {
      first_step<Block::masked>(mask, block, last);
    }
    remember(shared, first_token);
    clear(o_);
    --block;
    if (!begins_pruned) {
      for (; block >= max(pruned.end, last); --block) step<Block::masked>(mask, block, last, tile.kv_len);
      // Its predecessor may be the tile's first, of which a row may see no key.
      if (pruned.contains(block)) step<Block::pruned, Block::masked>(mask, block--, last, tile.kv_len);
    }
    if constexpr (kAssumesReference) {
      for (bool within = true; within && block >= pruned.begin; --block) {
        within = step_within_reference<Block::pruned>(block, last, tile.kv_len);
      }
    }
    for (; block >= pruned.begin; --block) step<Block::pruned>(mask, block, last, tile.kv_len);
    if constexpr (kMask == MaskType::sliding) {
      if (block >= last && !pruned.empty()) step<Block::masked, Block::pruned>(mask, block--, last, tile.kv_len);
      for (; block >= last; --block) step<Block::masked>(mask, block, last, tile.kv_len);
    }
    pending_pruned_ = pruned.contains(last);
    pending_ = true;
  }

  template <Block kNow>
  __device__ __forceinline__ void first_step(const Mask& mask, int block, int last) {
    if (!pending_) {
      first_step<kNow, Block::none>(mask, block, last, false);
    } else if (pending_pruned_) {
      first_step<kNow, Block::pruned>(mask, block, last, false);
    } else {
      first_step<kNow, Block::masked>(mask, block, last, false);
    }
  }

  // The first block of a tile, beside the last P V of the pending tile.
  template <Block kNow, Block kBefore>
  __device__ __forceinline__ void first_step(const Mask& mask, int block, int last, bool staged) {
    constexpr bool kPending = kBefore != Block::none;
    Softmax finished = softmax_;
    const bool finishes_without_product = kSkipsSoftmax && !kPending && pending_;
    if constexpr (kSkipsSoftmax) choose(true);
    take_turn();
    issue_logits();
    if constexpr (kPending) issue_output<kBefore>(pending_valid_rows_);
    pass_turn();
    if constexpr (kFetchesScalesEarly) fetch_group_scales();
    if constexpr (!kSeamless) clear_first_values();
    ptx::wgmma_wait<kPending ? 1 : 0>();
    if constexpr (kSage) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) softmax_.begin_row(r, bmm1_scale_ * kLog2E * query_scales_.row[r]);
    }
    complete_logits();
    logits_arrived(block == last);
    if constexpr (kNow == Block::masked) mask.apply(s_, block);
    if constexpr (kSkipsSoftmax) maxima_.raise(BlockMaxima(s_));
    decltype(auto) logits = that_count<kNow>();
    softmax_.first(numbers(logits));
    ptx::hold_registers(numbers(logits));
    if constexpr (kPending) output_arrived();
    if (finishes_without_product) pass_values();
    probabilities_to_operand(logits);
    if (kPending || finishes_without_product) finish_tile(finished, staged);
  }

  template <Block kNow>
  __device__ __forceinline__ void later_step(const Mask& mask, int block, int last, int kv_len) {
    if constexpr (!kSkipsSoftmax) {
      step<kNow>(mask, block, last, kv_len);
    } else if (has_weights()) {
      step_or_skip<kNow, true>(mask, block, last, kv_len);
    } else {
      step_or_skip<kNow, false>(mask, block, last, kv_len);
    }
  }

  template <Block kNow, Block kBefore = kNow>
  __device__ __forceinline__ void step(const Mask& mask, int block, int last, int kv_len) {
    take_turn();
    issue_logits();
    issue_output<kBefore>(kv_len - (block + 1) * kTileKV);
    pass_turn();
    if constexpr (kFetchesScalesEarly) fetch_group_scales();
    // P is out of registers then.
    constexpr bool kWaits = kScalesAreTight && kNow == Block::masked;
    if constexpr (kWaits) output_arrived();
    ptx::wgmma_wait<1>();
    complete_logits();
    logits_arrived(block == last);
    if constexpr (kNow == Block::masked) mask.apply(s_, block);
    decltype(auto) logits = that_count<kNow>();
    if constexpr (kSage && kE4m3P) softmax_.forget_corrections();
    // Where p has few bits, and the maximum is not looked for later, the reference starts as the exact one.
    constexpr bool kExact = kE4m3P && kNow == Block::masked;
    const bool moved = kExact ? softmax_.next_exact(numbers(logits)) : softmax_.next(numbers(logits));
    ptx::hold_registers(numbers(logits));
    if constexpr (!kWaits) output_arrived();
    probabilities_to_operand(logits);
    output_added();
    if (moved) rescale_output();
  }

  // A block that all rows see whole, behind one that was treated alike. Returns false where a row outgrew its
  // reference: then the logits are made again, from K that is still there, and the rest had better look first.
  template <Block kNow>
  __device__ __forceinline__ bool step_within_reference(int block, int last, int kv_len) {
    take_turn();
    issue_logits();
    issue_output<kNow>(kv_len - (block + 1) * kTileKV);
    pass_turn();
    if constexpr (kSage) fetch_group_scales();
    ptx::wgmma_wait<1>();
    if constexpr (kNow == Block::pruned) complete_logits();
    decltype(auto) logits = that_count<kNow>();
    const Sums sums = [&] {
      auto exponentiate = [&] { return softmax_.exponentiate(numbers(logits)); };
      if constexpr (kNow == Block::pruned) return exponentiate();
      return completed_logits(exponentiate);
    }();
    const bool within = !any_of_warpgroup(!Softmax::within_reference(sums));
    ptx::hold_registers(numbers(logits));
    output_arrived();
    bool moved = false;
    if (within) {
      softmax_.add(sums);
    } else {
      issue_logits();
      ptx::wgmma_wait<0>();
      complete_logits();
      if constexpr (kNow == Block::pruned) logits = keep_two_of_four(s_, one_);
      moved = softmax_.next(numbers(logits));
    }
    logits_arrived(block == last);
    probabilities_to_operand(logits);
    output_added();
    if (moved) rescale_output();
    return within;
  }

  // The same where rows move by their sums. A warp sees to its own 16, and waits for no other one. Sage: a loop for
  // each kind of scales, so that those of groups are read while Q K^T is under way.
  template <bool kGrouped>
  __device__ __forceinline__ void step_by_sums(int block, int last, int kv_len) {
    take_turn();
    issue_logits();
    issue_output<Block::whole>(kv_len - (block + 1) * kTileKV);
    if constexpr (kSage && kGrouped) fetch_group_scales();
    ptx::wgmma_wait<1>();
    ptx::hold_registers(products_.of(s_));
    if constexpr (kSage) {
      make_exponents<kGrouped, true>(s_, products_.of(s_), key_scales(), group_scales_, softmax_);
    }
    Sums sums = softmax_.exponentiate(s_);
    if constexpr (kSage) softmax_.forget_corrections();
    const bool moves = __any_sync(~0u, !Softmax::within_reference(sums));
    if (moves) softmax_.move_by_sums(s_, sums);
    ptx::hold_registers(s_);
    output_arrived();
    probabilities_to_operand(s_);
    if (moves && __any_sync(~0u, Softmax::overflows(sums))) {
      move_overflown(softmax_, p_, sums, logits_anew<kGrouped>());
    }
    softmax_.add(sums);
    logits_arrived(block == last);
    output_added();
    if (moves) rescale_output();
  }

  template <bool kGrouped>
  __device__ __forceinline__ auto logits_anew() const {
    const WarpLogits logits(storage().q[q_stage()][row_group()], storage().k[k_ring_.stage]);
    if constexpr (kSage) {
      return ScaledLogits<kGrouped>(logits, key_scales(), softmax_.row_scale);
    } else {
      return logits;
    }
  }

  // A step that leaves the block out where it may (skip.cuh). Two bodies instead of a branch around P V, which
  // would keep the compiler from overlapping products.
  template <Block kNow, bool kHasWeights>
  __device__ __forceinline__ void step_or_skip(const Mask& mask, int block, int last, int kv_len) {
    take_turn();
    issue_logits();
    if constexpr (kHasWeights) issue_output<kNow>(kv_len - (block + 1) * kTileKV);
    pass_turn();
    ptx::wgmma_wait<kHasWeights ? 1 : 0>();
    logits_arrived(block == last);
    if constexpr (kNow == Block::masked) mask.apply(s_, block);
    const BlockMaxima block_maxima(s_);
    if (!vote(maxima_.counts(block_maxima))) {
      choose(false);
      tally_left_out();
      values_done<kHasWeights>();
      return;
    }
    choose(true);
    bool moved = false;
    if (maxima_.raised_by(block_maxima)) {
      moved = softmax_.follow(block_maxima.row[0], block_maxima.row[1]);
      maxima_.raise(block_maxima);
    }
    softmax_.add(softmax_.exponentiate(s_));
    ptx::hold_registers(s_);
    values_done<kHasWeights>();
    probabilities_to_operand(s_);
    if (moved) rescale_output();
  }

  // Whether the block counts for any of the warpgroup's threads. A warp that knows does not wait for the others: it
  // leaves them the block's number.
  __device__ __forceinline__ bool vote(bool counts) const {
    volatile uint32_t& counting = storage().counting[warpgroup_];
    const uint32_t number = choices_made_ + 1;
    if (__any_sync(~0u, counts)) {
      if (lane_ == 0) counting = number;
      ptx::named_barrier_arrive(kVoteBarrier + warpgroup_, 128);
      return true;
    }
    ptx::named_barrier_sync(kVoteBarrier + warpgroup_, 128);
    return shuffled(counting == number);
  }

  template <bool kHasWeights>
  __device__ __forceinline__ void values_done() {
    if constexpr (kHasWeights) {
      output_arrived();
    } else {
      pass_values();
    }
  }

  __device__ __forceinline__ bool any_of_warpgroup(bool condition) const {
    return shuffled(ptx::named_barrier_any(kWarpgroupBarrier + warpgroup_, 128, condition));
  }

  __device__ __forceinline__ void flush_pending() {
    if (kSeamless && pending_) flush();
  }

  // The pending tile without a next block to hide behind. Its rows go out directly: the Q buffer may already hold
  // the next Q.
  __device__ __forceinline__ void flush() {
    if (kCompressesKeys && pending_pruned_) {
      last_output<Block::pruned>();
    } else if (has_weights()) {
      last_output<Block::whole>();
    } else {
      pass_values();
    }
    finish_tile<!kSeamless>(softmax_, false);
    pending_ = false;
  }

  template <Block kBlock>
  __device__ __forceinline__ void last_output() {
    issue_output<kBlock>(pending_valid_rows_);
    if constexpr (kSeamless) {
      ptx::wgmma_wait<0>();
      output_arrived();
    }
  }

  // ---- products

  __device__ __forceinline__ void take_turn() {
    ptx::mbarrier_wait(storage().k_full[k_ring_.stage], k_ring_.parity);
    if constexpr (kTakesTurns) wait_for_turn();
  }

  __device__ __forceinline__ void wait_for_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + warpgroup_, kConsumerThreads);
  }

  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTakesTurns) ptx::named_barrier_arrive(kTurnBarrier + (1 - warpgroup_), kConsumerThreads);
  }

  // s = Q K^T
  __device__ __forceinline__ void issue_logits() {
    using Product = ptx::Wgmma<kQueryType, kTileKV>;
    constexpr int kStepsPerChunk = kSpanQK / kStepBytes;
    const uint64_t k = ptx::matrix_descriptor<kSpanQK>(ptx::shared_address(storage().k[k_ring_.stage]), 0);
    auto& s = products_.anew(s_);
    ptx::hold_registers(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRowBytesQK / kStepBytes; ++i) {
      const int chunk = i / kStepsPerChunk, step = i % kStepsPerChunk * kStepBytes;
      const uint64_t b = ptx::advance_descriptor(k, chunk * (kTileKV * kSpanQK) + step);
      if constexpr (kQInRegisters) {
        if (i == 0) {
          Product::template rs<ptx::Major::K, false>(s, q_[0], q_[1], q_[2], q_[3], b);
        } else {
          Product::template rs<ptx::Major::K, true>(s, q_[4 * i], q_[4 * i + 1], q_[4 * i + 2], q_[4 * i + 3], b);
        }
      } else {
        const uint64_t q = ptx::matrix_descriptor<kSpanQK>(ptx::shared_address(storage().q[q_stage()][row_group()]), 0);
        const uint64_t a = ptx::advance_descriptor(q, chunk * (kWarpgroupRows * kSpanQK) + step);
        if (i == 0) {
          Product::template ss<false>(s, a, b);
        } else {
          Product::template ss<true>(s, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // o += P V of the block before. Only `valid_rows` rows of V belong to the sequence.
  template <Block kBlock>
  __device__ __forceinline__ void issue_output(int valid_rows) {
    Storage& s = storage();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    if (kSeamless && has_foreign_values(valid_rows)) clear_foreign_values(valid_rows);
    const uint32_t values = ptx::shared_address(s.v[v_ring_.stage]);
    const uint64_t v = kTransposesValues ? ptx::matrix_descriptor<kStepBytes>(values, 0)
                                         : ptx::matrix_descriptor<kRowBytes>(values, kTileKV * kRowBytes);
    ptx::hold_registers(o_);
    ptx::hold_registers(p_);
    if constexpr (kCompressesKeys) ptx::hold_registers(metadata_);
    ptx::wgmma_fence();
    if constexpr (kBlock == Block::pruned) {
      issue_sparse_products(v, std::make_integer_sequence<int, kTileKV / 32>());
    } else {
      issue_products(v);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_products(uint64_t v) {
#pragma unroll
    for (int i = 0; i < kTileKV / kStepKeys; ++i) {
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kProductN) {
        using Columns = float[kProductN / 2];
        using Product = ptx::Wgmma<kProductType, kProductN>;
        Columns& o = reinterpret_cast<Columns&>(o_[column / 2]);
        const uint32_t* p = p_ + 4 * i;
        if constexpr (kTransposesValues) {
          const uint64_t b = ptx::advance_descriptor(v, i * kHeadDimV * kStepBytes);
          Product::template rs<kMajorV>(o, p[0], p[1], p[2], p[3], b, i != 0 || long_sum_.accumulates());
        } else {
          const uint64_t b = ptx::advance_descriptor(v, i * 16 * kRowBytes + column / kChunk * (kTileKV * kRowBytes));
          Product::template rs<kMajorV, true>(o, p[0], p[1], p[2], p[3], b);
        }
      }
    }
  }

  template <int... kSteps>
  __device__ __forceinline__ void issue_sparse_products(uint64_t v, std::integer_sequence<int, kSteps...>) {
    static_assert(kProductN == kHeadDimV);
    (ptx::SparseWgmma<kHeadDimV>::template rs<kSteps % 2>(o_, p_[4 * kSteps], p_[4 * kSteps + 1], p_[4 * kSteps + 2],
                                                          p_[4 * kSteps + 3],
                                                          ptx::advance_descriptor(v, kSteps * 32 * kRowBytes),
                                                          metadata_[kSteps / 2]),
     ...);
  }

  // Of the blocks of a tile, only the first one.
  static __device__ __forceinline__ bool has_foreign_values(int valid_rows) {
    return !kPreparesValues && valid_rows < kTileKV;
  }

  // Where tiles have 64 rows, while there are logits to wait for.
  __device__ __forceinline__ void clear_first_values() {
    if (!has_foreign_values(first_valid_rows_)) return;
    ptx::mbarrier_wait(storage().v_full[v_ring_.stage], v_ring_.parity);
    clear_foreign_values(first_valid_rows_);
  }

  // Rows of V behind the sequence meet probabilities of 0, but 0 * NaN is NaN: they must not reach the product.
  __device__ __forceinline__ void clear_foreign_values(int valid_rows) {
    constexpr int kVectorsPerRow = kHeadDimV / 8;
    Storage& s = storage();
    for (int i = threadIdx.x & 127; i < (kTileKV - valid_rows) * kVectorsPerRow; i += 128) {
      const int row = valid_rows + i / kVectorsPerRow, vector = i % kVectorsPerRow;
      reinterpret_cast<uint4*>(s.v[v_ring_.stage][vector / 8][row])[vector % 8] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
  }

  // Sage, while Q K^T is under way; for masked blocks behind it, where registers are scarce.
  __device__ __forceinline__ void fetch_group_scales() {
#pragma unroll
    for (int i = 0; i < kTileKV / kGroup; ++i) group_scales_[i] = storage().k_scales[k_ring_.stage][i];
  }

  // Behind the wait for Q K^T, and before its stage is given back.
  __device__ __forceinline__ void complete_logits() { completed_logits([] {}); }

  // What `use` does with them is scheduled together with what makes them.
  template <class Use>
  __device__ __forceinline__ auto completed_logits(Use use) {
    ptx::hold_registers(products_.of(s_));
    if constexpr (kSage) {
      if (one_scale_per_group(params_)) {
        if constexpr (!kFetchesScalesEarly) fetch_group_scales();
        make_exponents<true, false>(s_, products_.of(s_), key_scales(), group_scales_, softmax_);
        return use();
      }
      make_exponents<false, false>(s_, products_.of(s_), key_scales(), group_scales_, softmax_);
    }
    return use();
  }

  __device__ __forceinline__ const float (&key_scales() const)[kTileKV] { return storage().k_scales[k_ring_.stage]; }

  __device__ __forceinline__ void logits_arrived(bool last_of_tile) {
    ptx::hold_registers(s_);
    arrive(storage().k_empty[k_ring_.stage]);
    k_ring_.advance();
    if (!kQInRegisters && last_of_tile) release_query();
  }

  __device__ __forceinline__ void output_arrived() {
    ptx::wgmma_wait<0>();
    ptx::hold_registers(o_);
    ptx::hold_registers(p_);
    if constexpr (kCompressesKeys) ptx::hold_registers(metadata_);
    arrive(storage().v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  __device__ __forceinline__ void skip_block() {
    take_turn();
    pass_turn();
    arrive(storage().k_empty[k_ring_.stage]);
    k_ring_.advance();
    if constexpr (kSkipsSoftmax) choose(false);
    pass_values();
  }

  // V of a block that is left out.
  __device__ __forceinline__ void pass_values() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    arrive(s.v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  // Logits that softmax turns into probabilities: those of the block, or what pruning leaves of them.
  template <Block kNow>
  __device__ __forceinline__ decltype(auto) that_count() {
    if constexpr (kNow == Block::pruned) {
      return keep_two_of_four(s_, one_);
    } else {
      return (s_);
    }
  }

  static __device__ __forceinline__ Logits& numbers(Logits& s) { return s; }
  static __device__ __forceinline__ auto& numbers(Kept& kept) { return kept.s; }

  // The accumulator layout of two neighbouring 8-column groups is the A operand layout of 16 columns of 16 bits; with
  // the keys in the order of transpose.cuh, that of four groups is the layout of 32 columns of 8 bits.
  template <int kCount>
  __device__ __forceinline__ void probabilities_to_operand(const float (&p)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount * ptx::kElementBytes<kProductType> / 4; ++i) {
      if constexpr (kE4m3P) {
        const float* four = p + 8 * (i / 2) + 2 * (i % 2);
        p_[i] = ptx::pack_e4m3x4(four[0], four[1], four[4], four[5]);
      } else {
        p_[i] = pack<kProductType>(p[2 * i], p[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void probabilities_to_operand(Kept& kept) {
    probabilities_to_operand(kept.s);
    ptx::hold_registers(kept.places);
    ptx::hold_registers(kept.of_other_pair);
#pragma unroll
    for (int i = 0; i < kPlaceWords; ++i) metadata_[i] = metadata(kept.places[i], kept.of_other_pair[i]);
  }

  // Behind `output_added`: what has left the accumulator is corrected later.
  __device__ __forceinline__ void rescale_output() {
    if constexpr (kE4m3P) {
      long_sum_.rescale(softmax_.correction);
      if (!long_sum_.accumulates()) return;
    }
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o_[i] *= softmax_.correction[(i / 2) % 2];
  }

  __device__ __forceinline__ void start_output() {
    if constexpr (kE4m3P) {
      long_sum_.clear();
    } else {
      clear(o_);
    }
  }

  __device__ __forceinline__ void output_added() {
    if constexpr (kE4m3P) long_sum_.block_added(o_);
  }

  // ---- query

  __device__ __forceinline__ void wait_for_query() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_full[next_q_.stage()][row_group()], next_q_.parity());
    next_q_.advance();
    if constexpr (kStagesQ > 1) next_q_.position = shuffled(next_q_.position);
    if constexpr (kQInRegisters) {
      load_query_registers();
    } else if (negative_scale_) {
      negate_query_in_place();
    }
  }

  __device__ __forceinline__ void load_query_registers() {
    const int row = warp_ * 16 + (lane_ & 15);
    const uint32_t row_address = ptx::shared_address(storage().q[q_stage()][row_group()]) + row * kSpanQK;
    // The swizzle permutes a span's 16-byte units by the number of the 128-byte line that they lie in.
    constexpr int kUnits = kSpanQK / 16;
    const uint32_t pattern = row * kSpanQK / 128 % kUnits;
#pragma unroll
    for (int i = 0; i < kRowBytesQK / kStepBytes; ++i) {
      const uint32_t unit = 2 * i % kUnits + (lane_ >> 4);
      uint32_t fragment[4];
      ptx::ldmatrix_x4(fragment,
                       row_address + 2 * i / kUnits * (kWarpgroupRows * kSpanQK) + ((unit ^ pattern) << 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) q_[4 * i + j] = fragment[j];
    }
    if (negative_scale_) {
#pragma unroll
      for (uint32_t& word : q_) word ^= kSignBits;
    }
  }

  // The softmax wants a positive scale.
  __device__ __forceinline__ void negate_query_in_place() {
    uint32_t* words = reinterpret_cast<uint32_t*>(storage().q[q_stage()][row_group()]);
    constexpr int kSharing = 128 * kShares;  // threads
    for (int i = threadIdx.x & (kSharing - 1); i < kQBytes / 4; i += kSharing) words[i] ^= kSignBits;
    ptx::fence_proxy_async();
    if constexpr (kPairs) {
      wait_for_both();
    } else {
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    }
  }

  // Of the tile's Q.
  __device__ __forceinline__ uint32_t q_stage() const { return kStagesQ - 1 - next_q_.stage(); }

  __device__ __forceinline__ void release_query() { arrive(storage().q_empty[q_stage()][row_group()]); }

  // Pairs: the other consumer has keys for it.
  __device__ __forceinline__ void skip_query() {
    ptx::mbarrier_wait(storage().q_full[0][0], next_q_.parity());
    next_q_.advance();
    if (!kQInRegisters && negative_scale_) negate_query_in_place();
    release_query();
  }

  // ---- finished tiles

  __device__ __forceinline__ void remember(const Tile& shared, int first_token) {
    __syncwarp();
    if constexpr (kSage) fetch_channel_scales(params_, shared.head, channel_scales());
    if (lane_ == 0) {
      PendingTile& pending = mine();
      pending.token = first_token;
      pending.q_start = shared.q_start;
      pending.q_len = shared.q_len;
      pending.head = shared.head;
      if constexpr (kSplit) pending.slot = shared.parts > 1 ? shared.first_slot + shared.part : -1;
    }
    __syncwarp();
  }

  // kAwaitsOutput: the last product is under way, beside all of this that does not need O.
  template <bool kAwaitsOutput = false>
  __device__ __forceinline__ void finish_tile(Softmax& softmax, bool staged) {
    const PendingTile tile = mine();
    const Rows rows(tile.token, tile.q_len, params_);
    if constexpr (kE4m3P) long_sum_.finish(o_);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) softmax.l[r] = quad_sum(softmax.l[r]);
    if constexpr (kSplit) {
      if (tile.slot >= 0) {
        if constexpr (kAwaitsOutput) output_arrived();
        store_part(params_, tile.slot * kTileQ + warpgroup_ * kWarpgroupRows, rows, o_, softmax);
        return;
      }
    }
    if constexpr (kPairs) {
      if constexpr (kAwaitsOutput) output_arrived();
      keep_half(warpgroup_, rows, o_, softmax);
    }
    float factor[kRowsPerThread], lse[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float* sinks = params_.attention_sinks;
      const float* sink = sinks == nullptr || !rows.valid[r] ? nullptr : sinks + tile.head + rows.head[r];
      const RowResult result = finish_row(softmax.base(r), softmax.l[r], sink);
      factor[r] = result.factor * bmm2_scale_;
      lse[r] = result.lse;
    }
    if (!kPairs || warpgroup_ == 0) store_lse(params_, tile, rows, lse);
    if constexpr (kAwaitsOutput && !kPairs) output_arrived();
    if (staged) {
      stage_rows(storage().q[0][warpgroup_], o_, factor);
      if ((threadIdx.x & 127) == 0) storage().store[warpgroup_] = {tile.q_start + tile.token, tile.head};
      ptx::fence_proxy_async();
      arrive(storage().store_full[warpgroup_]);
    } else {
      if constexpr (kSage) scale_by_channels(o_, channel_scales());
      store_rows(params_, tile, rows, o_, factor);
    }
  }

  __device__ __forceinline__ void finish_without_keys(const Tile& shared, int first_token) {
    remember(shared, first_token);
    start_output();
    clear(o_);
    softmax_.clear();
    finish_tile(softmax_, false);
  }

  __device__ __forceinline__ void dismiss_store_warp() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_empty[0][warpgroup_], next_q_.parity() ^ 1);  // it has taken the last staged tile
    if ((threadIdx.x & 127) == 0) s.store[warpgroup_].head = -1;
    arrive(s.store_full[warpgroup_]);
  }

  // ---- skip-softmax: choices, and statistics in shared memory, since registers are scarce

  __device__ __forceinline__ void choose(bool counts) {
    ++choices_made_;
    weighing_ = weighing_ << 1 | counts;
    if (keeps_tally()) publish(warpgroup_, choices_made_, weighing_);
  }

  // Whether p_ holds a block's probabilities, whose product is yet to come.
  __device__ __forceinline__ bool has_weights() const { return !kSkipsSoftmax || weighing_ & 1; }

  __device__ __forceinline__ bool keeps_tally() const { return (threadIdx.x & 127) == 0; }

  // A sliding tile's extra block, which only the other consumer's rows see, is always left out and not counted.
  __device__ __forceinline__ void tally_tile(const BlockRange& blocks, int last) const {
    if (!keeps_tally()) return;
    SkipTally& tally = storage().skipped[warpgroup_];
    tally.all += blocks.end - blocks.begin;
    tally.left_out -= blocks.begin - last;
  }

  __device__ __forceinline__ void tally_left_out() const {
    if (keeps_tally()) ++storage().skipped[warpgroup_].left_out;
  }

  __device__ __forceinline__ void report_tally() const {
    if (!keeps_tally() || params_.skip.counts == nullptr) return;
    const SkipTally& tally = storage().skipped[warpgroup_];
    atomicAdd(&params_.skip.counts[0], static_cast<unsigned long long>(tally.left_out));
    atomicAdd(&params_.skip.counts[1], static_cast<unsigned long long>(tally.all));
  }

  // ---- small things

  // For the tile; this thread's own, in shared memory where registers are too scarce.
  __device__ __forceinline__ const Mask& kept(const Mask& mask) const {
    if constexpr (!kScalesAreTight) return mask;
    return storage().masks[threadIdx.x] = mask;
  }

  // One arrival per warp, behind everything that its lanes did.
  __device__ __forceinline__ void arrive(ptx::Mbarrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(barrier);
  }

  // Of the tile's rows.
  __device__ __forceinline__ int row_group() const { return kPairs ? 0 : warpgroup_; }

  __device__ __forceinline__ PendingTile& mine() const { return storage().pending[warpgroup_ * 4 + warp_]; }
  __device__ __forceinline__ float* channel_scales() const { return storage().v_scales[warpgroup_ * 4 + warp_]; }
  __device__ __forceinline__ static int shuffled(int value) { return __shfl_sync(~0u, value, 0); }

  static __device__ __forceinline__ void clear(Output& o) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.f;
  }

  static constexpr uint32_t kSignBits = ptx::kElementBytes<kQueryType> == 1 ? 0x80808080 : 0x80008000;

  const Params& params_;
  const int warpgroup_, warp_, lane_;
  Softmax softmax_;
  RunningMaxima maxima_;
  uint32_t choices_made_ = 0, weighing_ = 1;  // as in Choices
  const bool negative_scale_;
  const float bmm1_scale_;
  const float bmm2_scale_;
  QueryScales query_scales_;
  float group_scales_[kTileKV / kGroup];  // where keys share them

  Logits s_;
  LogitProducts<ptx::Wgmma<kQueryType, kTileKV>::Accumulators> products_;
  Output o_;
  LongSum long_sum_;
  static constexpr int kPWords = kTileKV * ptx::kElementBytes<kProductType> / 8;
  uint32_t p_[kPWords];
  uint32_t q_[kQInRegisters ? kRowBytesQK / 8 : 1];

  Ring<kStagesK, kShares> k_ring_;
  Ring<kStagesV, kShares> v_ring_;
  SmallRing<kStagesQ> next_q_{0};
  bool pending_ = false;
  int pending_valid_rows_ = 0;
  int first_valid_rows_ = 0;  // of the tile's first block, where tiles have 64 rows

  // A pruned block has half as many probabilities in p_, and says where they belong.
  uint32_t metadata_[kCompressesKeys ? kPlaceWords : 1];
  bool pending_pruned_ = false;  // the pending tile's last block
  const uint32_t one_ = unknown_one();
};

}  // namespace fmha
