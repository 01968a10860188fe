// A consumer warpgroup: 64 query rows of every tile.
//
// The loop runs over tiles without a seam. A step issues Q K^T of its key block and P V of the block before; its
// softmax starts when the logits are there, and runs beside P V. A tile's last P V is issued when the next tile is
// there, and its rows are written beside that one's first Q K^T. Until then it is `pending`. Where tiles have 64 rows,
// a thread block has one or two, and finishes each at once.
//
// What is read from shared memory is given back behind an instruction that uses it. An arrival does not wait for loads
// in flight, and these may be queued behind other warps' accesses for longer than it takes to overwrite what they read.
// scripts/sass_check.py finds loads of matrices in flight at an arrival.
//
// Two warpgroups take turns in issuing products (named barriers), so that one's softmax runs beside the other's
// products. Where both products are of 8-bit elements, they are too short for that.
#pragma once
#include "choices.cuh"
#include "mask.cuh"
#include "products.cuh"
#include "remake.cuh"

namespace fmha {

class Consumer : ConsumerChoices {
 public:
  __device__ __forceinline__ Consumer(const Params& params, int warpgroup, float bmm1_scale, float bmm2_scale)
      : ConsumerChoices(params, warpgroup, bmm1_scale), bmm1_scale_(bmm1_scale), bmm2_scale_(bmm2_scale) {}

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
    // Pairs: there is one block at most, which is the first consumer's.
    const bool alone = kPairs && tile_blocks.end - tile_blocks.begin <= 1;
    if (alone && warpgroup_ != 0) {
      if (!tile_blocks.empty()) skip_query();
      return;
    }
    if (blocks.empty()) {
      flush_pending();
      if (first_token < tile.q_len) finish_without_keys(shared, first_token);
      return;
    }

    if constexpr (kPairs) {
      if (alone && tile.kv_len - last * kTileKV <= kFewKeys) {
        process_few_keys<kFewKeys>(tile, shared, last, first_token);
        return;
      }
    }
    if constexpr (kSage) {
      query_scales_ = load_query_scales(params_, shared, Rows(first_token, tile.q_len, params_));
    }
    const Rows rows(first_token, tile.q_len, params_);
    const Mask visible(tile, rows, params_.window_left);
    const Mask& mask = kept(visible);
    if constexpr (kCompressesKeys) {
      run_pruned(tile, shared, mask, blocks.end, last, first_token);
      return;
    }
    if constexpr (kSkipsSoftmax) begin_choices(rows, tile.kv_len, blocks, last);
    const int values_end = end_of_values(tile, shared);
    int block = blocks.end - 1;
    if constexpr (!kSeamless) first_valid_rows_ = values_end - block * kTileKV;
    if (kSeamless && pending_ && has_weights()) {
      first_step<Block::masked, Block::whole>(mask, block, last);
    } else {
      first_step<Block::masked, Block::none>(mask, block, last);
    }
    remember(shared, first_token);
    start_output();
    // A row may see no key of the tile's first block. Then it has no reference before its second.
    const bool waits = kAssumesReference && !(kMovesBySums && key_end(tile, first_token) > (blocks.end - 1) * kTileKV);
    const int full_end = waits ? min(blocks.full_end, blocks.end - 2) : blocks.full_end;
    const int full_begin = kMask == MaskType::sliding ? max(blocks.full_begin, last) : last;
    --block;
    later_steps<Block::masked>(mask, block, max(full_end, last), last, values_end);
    if constexpr (kMovesBySums) {
      // one_scale_per_group in other words: else ptxas keeps its answer from the loop before, in local memory.
      if (kSage && params_.sage.block_k_log2 >= kGroupLog2) {
        for (; block >= full_begin; --block) step_by_sums<true>(block, last, values_end);
      } else {
        for (; block >= full_begin; --block) step_by_sums<false>(block, last, values_end);
      }
    } else if constexpr (kAssumesReference) {
      for (bool within = true; within && block >= full_begin; --block) {
        within = step_within_reference<Block::whole>(block, last, values_end);
      }
    }
    if constexpr (!kMovesBySums) {
      later_steps<Block::whole>(mask, block, full_begin, last, values_end);
    }
    if constexpr (kMask == MaskType::sliding) {
      later_steps<Block::masked>(mask, block, last, last, values_end);
    }
    pending_valid_rows_ = values_end - last * kTileKV;
    pending_ = true;
    if constexpr (!kSeamless) flush(!alone);
  }

  // Pairs: the same where the tile's one block has few keys of the sequence. They have products of their own. It is a
  // template for the sake of kernels whose products are integers: they have no pairs, and could not compile it.
  template <int kKeys>
  __device__ __forceinline__ void process_few_keys(const Tile& tile, const Tile& shared, int block, int first_token) {
    wait_for_query();
    const Mask mask(tile, Rows(first_token, tile.q_len, params_), params_.window_left);
    first_valid_rows_ = end_of_values(tile, shared) - block * kTileKV;
    float s[kKeys / 2];
    take_turn();
    issue_logits<kKeys>(s);
    if constexpr (kQInRegisters) release_query();
    clear_first_values<kKeys>();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(s);
    keys_read(true);
    mask.apply(s, block);
    softmax_.first(s);
    probabilities_to_operand(s);
    remember(shared, first_token);
    start_output();
    issue_output<Block::masked, kKeys>(first_valid_rows_);
    finish_tile<true>();
  }

  // The rest of `process` with spcompress: all blocks that are not pruned are masked.
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
      first_step<kNow, Block::none>(mask, block, last);
    } else if (pending_pruned_) {
      first_step<kNow, Block::pruned>(mask, block, last);
    } else {
      first_step<kNow, Block::masked>(mask, block, last);
    }
  }

  // The first block of a tile. The pending tile's last P V runs while Q is on its way, and its rows are written beside
  // Q K^T.
  template <Block kNow, Block kBefore>
  __device__ __forceinline__ void first_step(const Mask& mask, int block, int last) {
    constexpr bool kPending = kBefore != Block::none;
    if constexpr (kPending) issue_output<kBefore>(pending_valid_rows_);
    if constexpr (kPending && kStagesOutput) {
      issue_first_logits_and_finish();
    } else {
      issue_first_logits();
      if constexpr (kPending) {
        output_arrived<1>();
        finish_tile();
      } else if (kSkipsSoftmax && pending_) {
        pass_values();
        finish_tile();
      }
    }
    ptx::wgmma_wait<0>();
    if constexpr (kSage) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) softmax_.begin_row(r, bmm1_scale_ * kLog2E * query_scales_.row[r]);
    }
    complete_logits();
    logits_arrived(block == last);
    if constexpr (kNow == Block::masked) mask.apply(s_, block);
    decltype(auto) logits = that_count<kNow>();
    softmax_.first(numbers(logits));
    if constexpr (kSkipsSoftmax) start_maxima();
    ptx::hold_registers(numbers(logits));
    probabilities_to_operand(logits);
  }

  __device__ __forceinline__ void issue_first_logits() {
    wait_for_query();
    if constexpr (kSkipsSoftmax) choose(true);
    take_turn();
    issue_logits();
    pass_turn();
    if constexpr (kQInRegisters) release_query();
    if constexpr (kFetchesScalesEarly) fetch_group_scales();
    if constexpr (!kSeamless) clear_first_values();
  }

  // The same behind the pending tile's last P V, which is under way. Tensor cores take the products of Q K^T one by
  // one, and a warp that issues them waits for each but the last few. In between it writes the pending tile to Q's
  // buffer, whose 16 rows of the warp are in its registers, and the store warp sends it from there. That one takes
  // whole tiles only: the rows behind a sequence's end are the next sequence's.
  __device__ __forceinline__ void issue_first_logits_and_finish() {
    const PendingTile tile = mine();
    const Rows rows(tile.token, tile.q_len, params_);
    float factor[kRowsPerThread];
    sum_rows();
    conclude_rows(tile, rows, factor);
    const bool staged = shuffled(tile.token) + params_.tile_tokens <= shuffled(tile.q_len);
    output_arrived();
    wait_for_query();
    if constexpr (kSkipsSoftmax) choose(true);
    take_turn();
    issue_logits<kTileKV>(products_.anew(s_), [&](int step) {
      constexpr int kSteps = kRowBytesQK / kStepBytes;
      static_assert(!kStagesOutput || (kSteps >= kStagingParts && kSpanQK == kRowBytes && kStagesQ == 1));
      const int part = step - (kSteps - kStagingParts);
      if (part >= 0) stage_part(storage().q[0][warpgroup_], part, o_, factor, staged);
    });
    pass_turn();
    if (staged) {
      send_staged(tile);
    } else {
      release_query();
      store_rows(params_, tile, rows, o_, factor);
    }
    ptx::hold_registers(o_);  // else ptxas puts more of later blocks' exponentials behind their wait for P V
  }

  // From `block` down to `end`.
  template <Block kNow>
  __device__ __forceinline__ void later_steps(const Mask& mask, int& block, int end, int last, int values_end) {
    if constexpr (kSkipsSoftmax) {
      step_or_skip_each<kNow>(mask, block, end, last, values_end);
    } else {
      for (; block >= end; --block) step<kNow>(mask, block, last, values_end);
    }
  }

  template <Block kNow, Block kBefore = kNow>
  __device__ __forceinline__ void step(const Mask& mask, int block, int last, int values_end) {
    take_turn();
    issue_logits();
    issue_output<kBefore>(values_end - (block + 1) * kTileKV);
    pass_turn();
    if constexpr (kFetchesScalesEarly) fetch_group_scales();
    // Then P's registers are free for the mask.
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
    const bool moved = softmax_.next<kExact>(numbers(logits));
    ptx::hold_registers(numbers(logits));
    if constexpr (!kWaits) output_arrived();
    probabilities_to_operand(logits);
    output_added();
    if (moved) rescale_output();
  }

  // A block that all rows see whole, behind one that was treated alike: it does not look for maxima. Returns false
  // where a row outgrew its reference: then the logits were made again, from K that was still there, and later blocks
  // had better look first.
  template <Block kNow>
  __device__ __forceinline__ bool step_within_reference(int block, int last, int values_end) {
    take_turn();
    issue_logits();
    issue_output<kNow>(values_end - (block + 1) * kTileKV);
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

  // The same where rows move by their sums. A warp sees to its own 16, and waits for no other one. kGrouped: Sage with
  // scales of groups, a loop of its own, so that they are read while Q K^T is under way.
  template <bool kGrouped>
  __device__ __forceinline__ void step_by_sums(int block, int last, int values_end) {
    take_turn();
    issue_logits();
    issue_output<Block::whole>(values_end - (block + 1) * kTileKV);
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

  __device__ __forceinline__ bool any_of_warpgroup(bool condition) const {
    return shuffled(ptx::named_barrier_any(kWarpgroupBarrier + warpgroup_, 128, condition));
  }

  __device__ __forceinline__ void flush_pending() {
    if (kSeamless && pending_) flush();
  }

  // The pending tile without a next block to hide behind. Its rows go out directly: the Q buffer may already hold
  // the next Q. `shared`: pairs, both consumers have keys of it.
  __device__ __forceinline__ void flush(bool shared = false) {
    if (kCompressesKeys && pending_pruned_) {
      last_output<Block::pruned>();
    } else if (has_weights()) {
      last_output<Block::whole>();
    } else {
      pass_values();
    }
    finish_last(shared);
    pending_ = false;
  }

  __device__ __forceinline__ void finish_last(bool shared) {
    if constexpr (kPairs) {
      if (shared) {
        finish_tile<true, true>();
        return;
      }
    }
    finish_tile<!kSeamless>();
  }

  template <Block kBlock>
  __device__ __forceinline__ void last_output() {
    issue_output<kBlock>(pending_valid_rows_);
    if constexpr (kSeamless) {
      ptx::wgmma_wait<0>();
      output_arrived();
    }
  }

  __device__ __forceinline__ void skip_block() {
    take_turn();
    pass_turn();
    arrive(storage().k_empty[k_ring_.stage]);
    k_ring_.advance();
    if constexpr (kSkipsSoftmax) choose(false);
    pass_values();
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

  // kAwaitsOutput: the last product is under way, beside all of this that does not need O. kShared: the tile's keys
  // are divided, and so are the columns of its rows.
  template <bool kAwaitsOutput = false, bool kShared = false>
  __device__ __forceinline__ void finish_tile() {
    static_assert(!kAwaitsOutput || !kE4m3P, "a long sum ends with O");
    const PendingTile tile = mine();
    const Rows rows(tile.token, tile.q_len, params_);
    if constexpr (kE4m3P) long_sum_.finish(o_);
    sum_rows();
    if constexpr (kSplit) {
      // One answer for all lanes: else the rings' stages are not known to be the same in all of them from here on, and
      // the main loop moves every descriptor to uniform registers.
      if (shuffled(tile.slot) >= 0) {
        if constexpr (kAwaitsOutput) output_arrived();
        store_part(params_, tile.slot * kTileQ + warpgroup_ * kWarpgroupRows, rows, o_, softmax_);
        return;
      }
    }
    if constexpr (kShared) {
      if constexpr (kAwaitsOutput) output_arrived();
      keep_half(warpgroup_, rows, o_, softmax_);
    }
    float factor[kRowsPerThread];
    conclude_rows(tile, rows, factor);
    if constexpr (kAwaitsOutput && !kShared) output_arrived();
    if constexpr (kSage) scale_by_channels(o_, channel_scales());
    if constexpr (kShared) {
      store_rows<kHeadDimV / kShares>(params_, tile, rows, o_, factor, warpgroup_ * (kHeadDimV / kShares));
    } else {
      store_rows(params_, tile, rows, o_, factor);
    }
  }

  // Over the threads of a row.
  __device__ __forceinline__ void sum_rows() {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) softmax_.l[r] = quad_sum(softmax_.l[r]);
  }

  // All that there is to do without O, which is yet to be multiplied by `factor`.
  __device__ __forceinline__ void conclude_rows(const PendingTile& tile, const Rows& rows,
                                                float (&factor)[kRowsPerThread]) const {
    float lse[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float* sinks = params_.attention_sinks;
      const float* sink = sinks == nullptr || !rows.valid[r] ? nullptr : sinks + tile.head + rows.head[r];
      const RowResult result = finish_row(softmax_.base(r), softmax_.l[r], sink);
      factor[r] = result.factor * bmm2_scale_;
      lse[r] = result.lse;
    }
    if (!kPairs || warpgroup_ == 0) store_lse(params_, tile, rows, lse);
  }

  __device__ __forceinline__ void send_staged(const PendingTile& tile) const {
    if ((threadIdx.x & 127) == 0) storage().store[warpgroup_] = {tile.q_start + tile.token, tile.head};
    ptx::fence_proxy_async();
    arrive(storage().store_full[warpgroup_]);
  }

  __device__ __forceinline__ void finish_without_keys(const Tile& shared, int first_token) {
    remember(shared, first_token);
    start_output();
    clear(o_);
    softmax_.clear();
    finish_tile();
  }

  __device__ __forceinline__ void dismiss_store_warp() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_empty[0][warpgroup_], next_q_.parity() ^ 1);  // it has taken the last staged tile
    if ((threadIdx.x & 127) == 0) s.store[warpgroup_].head = -1;
    arrive(s.store_full[warpgroup_]);
  }

  // ---- small things

  // For the tile; this thread's own, in shared memory where registers are too scarce.
  __device__ __forceinline__ const Mask& kept(const Mask& mask) const {
    if constexpr (!kScalesAreTight) return mask;
    return storage().masks[threadIdx.x] = mask;
  }

  __device__ __forceinline__ PendingTile& mine() const { return storage().pending[warpgroup_ * 4 + warp_]; }
  __device__ __forceinline__ float* channel_scales() const { return storage().v_scales[warpgroup_ * 4 + warp_]; }

  const float bmm1_scale_;
  const float bmm2_scale_;
  QueryScales query_scales_;
  bool pending_ = false;
  int pending_valid_rows_ = 0;
  bool pending_pruned_ = false;  // the pending tile's last block
};

}  // namespace fmha
