// A consumer warpgroup: 64 query rows of every tile.
//
// The loop runs over tiles without a seam. While the softmax of block n runs, the tensor cores work on Q K of this
// block and P V of the one before; at a tile's end the partner of P V is the first Q K of the next tile, and the
// finished tile is written after that block's softmax. Until then it is `pending`.
//
// The two warpgroups take turns in issuing products (named barriers), so that one's softmax runs under the other's.
#pragma once
#include "common/ptx/grid.cuh"
#include "epilogue.cuh"
#include "mask.cuh"

namespace fmha {

constexpr int kTurnBarrier = 1;         // + warpgroup: it may issue its products
constexpr int kWarpgroupBarrier = 3;    // + warpgroup: its 128 threads
constexpr int kConsumerThreads = 128 * kConsumers;

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Params& params, int warpgroup, float bmm1_scale, float bmm2_scale)
      : params_(params),
        warpgroup_(warpgroup),
        warp_((threadIdx.x >> 5) & 3),
        lane_(threadIdx.x & 31),
        // Masked logits are -inf, which a factor of 0 would turn into NaN.
        softmax_(fmaxf(fabsf(bmm1_scale) * kLog2E, __FLT_MIN__)),
        negative_scale_(bmm1_scale < 0.f),
        bmm2_scale_(bmm2_scale) {}

  __device__ __forceinline__ void run() {
    Storage& s = storage();
    if (warpgroup_ == kConsumers - 1) ptx::named_barrier_arrive(kTurnBarrier, kConsumerThreads);
    for (Ring<kTileSlots> slot;; slot.advance()) {
      ptx::mbarrier_wait(s.tile_full[slot.stage], slot.parity);
      const Tile tile = read_tile(s.tiles[slot.stage]);
      arrive(s.tile_empty[slot.stage]);
      if (!tile.valid) break;
      process(tile);
    }
    if (pending_) flush();
    if constexpr (kQInRegisters) dismiss_store_warp();
    if (warpgroup_ == 0) ptx::named_barrier_sync(kTurnBarrier, kConsumerThreads);
  }

 private:
  // What steers control flow goes through a shuffle: the compiler then knows that the warp does not diverge and
  // keeps stage indices and descriptors in uniform registers.
  static __device__ __forceinline__ Tile read_tile(const Tile& shared) {
    const int4 extent = reinterpret_cast<const int4*>(&shared)[0];
    const int4 position = reinterpret_cast<const int4*>(&shared)[1];
    Tile tile{};
    tile.q_block = __shfl_sync(~0u, extent.x, 0);
    tile.q_len = __shfl_sync(~0u, extent.y, 0);
    tile.kv_len = __shfl_sync(~0u, extent.z, 0);
    tile.valid = __shfl_sync(~0u, extent.w, 0);
    tile.head = position.x;
    tile.q_start = position.y;
    return tile;
  }

  __device__ __forceinline__ void process(const Tile& tile) {
    const BlockRange shared_blocks = block_range(tile, tile.q_block * kTileQ, kTileQ, params_.window_left);
    const int first_row = tile.q_block * kTileQ + warpgroup_ * kWarpgroupRows;
    const BlockRange blocks = block_range(tile, first_row, kWarpgroupRows, params_.window_left);

    // Blocks that only the other warpgroup's rows see: later ones are skipped; earlier ones (of a sliding window) are
    // at most one, and are computed, masked.
    const int last = shared_blocks.begin;
    if (pending_ && blocks.end < shared_blocks.end) flush();
    for (int block = shared_blocks.end - 1; block >= max(blocks.end, last); --block) skip_block();
    if (blocks.end == 0) {
      if (pending_) flush();
      if (first_row < tile.q_len) write_empty_rows(tile, first_row);
      return;
    }

    wait_for_query();
    // The store warp takes whole tiles only: the rows behind a sequence's end are the next sequence's.
    const bool staged = kQInRegisters && pending_ && shuffled(mine().row) + kWarpgroupRows <= shuffled(mine().q_len);
    if (kQInRegisters && !staged) release_query();

    const Mask mask(tile, first_row + row_in_warpgroup(), params_.window_left);
    int block = blocks.end - 1;
    if (pending_) {
      first_step<true>(mask, block, last, staged);
    } else {
      first_step<false>(mask, block, last, staged);
    }
    remember(tile, first_row);
    clear(o_);
    for (--block; block >= max(blocks.full_end, last); --block) step<true>(mask, block, last, tile.kv_len);
    if constexpr (kMask == MaskType::sliding) {
      for (; block >= max(blocks.full_begin, last); --block) step<false>(mask, block, last, tile.kv_len);
      for (; block >= last; --block) step<true>(mask, block, last, tile.kv_len);
    } else {
      for (; block >= last; --block) step<false>(mask, block, last, tile.kv_len);
    }
    pending_valid_rows_ = tile.kv_len - last * kTileKV;
    pending_ = true;
  }

  // The first block of a tile, beside the last P V of the pending tile.
  template <bool kPending>
  __device__ __forceinline__ void first_step(const Mask& mask, int block, int last, bool staged) {
    const Softmax finished = softmax_;
    take_turn();
    issue_logits();
    if constexpr (kPending) issue_output(pending_valid_rows_);
    pass_turn();
    ptx::wgmma_wait<kPending ? 1 : 0>();
    logits_arrived(block == last);
    mask.apply(s_, block);
    softmax_.first(s_);
    ptx::hold_registers(s_);
    if constexpr (kPending) output_arrived();
    probabilities_to_operand();
    if constexpr (kPending) finish_tile(finished, staged);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(const Mask& mask, int block, int last, int kv_len) {
    take_turn();
    issue_logits();
    issue_output(kv_len - (block + 1) * kTileKV);
    pass_turn();
    ptx::wgmma_wait<1>();
    logits_arrived(block == last);
    if constexpr (kMasked) mask.apply(s_, block);
    const bool moved = softmax_.next(s_);
    ptx::hold_registers(s_);
    output_arrived();
    probabilities_to_operand();
    if (moved) rescale_output();
  }

  // The pending tile without a next block to hide behind. Its rows go out directly: the Q buffer may already hold
  // the next Q.
  __device__ __forceinline__ void flush() {
    issue_output(pending_valid_rows_);
    ptx::wgmma_wait<0>();
    output_arrived();
    finish_tile(softmax_, false);
    pending_ = false;
  }

  // ---- products

  __device__ __forceinline__ void take_turn() {
    ptx::mbarrier_wait(storage().k_full[k_ring_.stage], k_ring_.parity);
    ptx::named_barrier_sync(kTurnBarrier + warpgroup_, kConsumerThreads);
  }

  __device__ __forceinline__ void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier + (kConsumers - 1 - warpgroup_), kConsumerThreads);
  }

  // s = Q K^T
  __device__ __forceinline__ void issue_logits() {
    using Product = ptx::Wgmma<kDType, kTileKV>;
    const uint64_t k = ptx::matrix_descriptor(ptx::shared_address(storage().k[k_ring_.stage]), 0);
    ptx::hold_registers(s_);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDimQK / 16; ++i) {
      const uint64_t b = ptx::advance_descriptor(k, (i / 4) * (kTileKV * kRowBytes) + (i % 4) * 32);
      if constexpr (kQInRegisters) {
        if (i == 0) {
          Product::template rs<ptx::Major::K, false>(s_, q_[0], q_[1], q_[2], q_[3], b);
        } else {
          Product::template rs<ptx::Major::K, true>(s_, q_[4 * i], q_[4 * i + 1], q_[4 * i + 2], q_[4 * i + 3], b);
        }
      } else {
        const uint64_t q = ptx::matrix_descriptor(ptx::shared_address(storage().q[warpgroup_]), 0);
        const uint64_t a = ptx::advance_descriptor(q, (i / 4) * (kWarpgroupRows * kRowBytes) + (i % 4) * 32);
        if (i == 0) {
          Product::template ss<false>(s_, a, b);
        } else {
          Product::template ss<true>(s_, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // o += P V of the block before. Only `valid_rows` rows of V belong to the sequence.
  __device__ __forceinline__ void issue_output(int valid_rows) {
    Storage& s = storage();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    if (valid_rows < kTileKV) clear_foreign_values(valid_rows);
    const uint64_t v = ptx::matrix_descriptor(ptx::shared_address(s.v[v_ring_.stage]), kTileKV * kRowBytes);
    ptx::hold_registers(o_);
    ptx::hold_registers(p_);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileKV / 16; ++i) {
      ptx::Wgmma<kDType, kHeadDimV>::template rs<ptx::Major::MN, true>(
          o_, p_[4 * i], p_[4 * i + 1], p_[4 * i + 2], p_[4 * i + 3],
          ptx::advance_descriptor(v, i * 16 * kRowBytes));
    }
    ptx::wgmma_commit();
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
    arrive(storage().v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  __device__ __forceinline__ void skip_block() {
    Storage& s = storage();
    take_turn();
    pass_turn();
    arrive(s.k_empty[k_ring_.stage]);
    k_ring_.advance();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    arrive(s.v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  // The accumulator layout of two neighbouring 8-column groups is the A operand layout of 16 columns.
  __device__ __forceinline__ void probabilities_to_operand() {
#pragma unroll
    for (int i = 0; i < kTileKV / 4; ++i) p_[i] = pack(s_[2 * i], s_[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o_[i] *= softmax_.correction[(i / 2) % 2];
  }

  // ---- query

  __device__ __forceinline__ void wait_for_query() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_full[warpgroup_], q_parity_);
    q_parity_ ^= 1;
    if constexpr (kQInRegisters) {
      load_query_registers();
    } else if (negative_scale_) {
      negate_query_in_place();
    }
  }

  __device__ __forceinline__ void load_query_registers() {
    const int row = warp_ * 16 + (lane_ & 15);
    const uint32_t row_address = ptx::shared_address(storage().q[warpgroup_]) + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kHeadDimQK / 16; ++i) {
      const uint32_t unit = (i % 4) * 2 + (lane_ >> 4);
      uint32_t fragment[4];
      ptx::ldmatrix_x4(fragment,
                       row_address + (i / 4) * (kWarpgroupRows * kRowBytes) + ((unit ^ (row & 7)) << 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) q_[4 * i + j] = fragment[j];
    }
    if (negative_scale_) {
#pragma unroll
      for (int i = 0; i < kHeadDimQK / 4; ++i) q_[i] ^= kSignBits;
    }
  }

  // The softmax wants a positive scale.
  __device__ __forceinline__ void negate_query_in_place() {
    uint32_t* words = reinterpret_cast<uint32_t*>(storage().q[warpgroup_]);
    for (int i = threadIdx.x & 127; i < kQBytes / 4; i += 128) words[i] ^= kSignBits;
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
  }

  __device__ __forceinline__ void release_query() { arrive(storage().q_empty[warpgroup_]); }

  // ---- finished tiles

  __device__ __forceinline__ void remember(const Tile& tile, int first_row) {
    __syncwarp();
    if (lane_ == 0) mine() = {first_row, tile.q_start, tile.q_len, tile.head, tile.kv_len};
    __syncwarp();
  }

  __device__ __forceinline__ void finish_tile(const Softmax& softmax, bool staged) {
    const PendingTile tile = mine();
    const int row = tile.row + row_in_warpgroup();
    const float* sink = params_.attention_sinks == nullptr ? nullptr : params_.attention_sinks + tile.head;
    float factor[kRowsPerThread], lse[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const RowResult result = finish_row(softmax.m[r], quad_sum(softmax.l[r]), softmax.scale, sink);
      factor[r] = result.factor * bmm2_scale_;
      lse[r] = result.lse;
    }
    store_lse(params_, tile, row, lse);
    if (staged) {
      stage_rows(storage().q[warpgroup_], o_, factor);
      if ((threadIdx.x & 127) == 0) storage().store[warpgroup_] = {tile.q_start + tile.row, tile.head};
      ptx::fence_proxy_async();
      arrive(storage().store_full[warpgroup_]);
    } else {
      store_rows(params_, tile, row, o_, factor);
    }
  }

  __device__ __forceinline__ void write_empty_rows(const Tile& tile, int first_row) {
    const float zero[kRowsPerThread] = {0.f, 0.f}, lse[kRowsPerThread] = {-kInfinity, -kInfinity};
    remember(tile, first_row);
    clear(o_);
    store_lse(params_, mine(), first_row + row_in_warpgroup(), lse);
    store_rows(params_, mine(), first_row + row_in_warpgroup(), o_, zero);
  }

  __device__ __forceinline__ void dismiss_store_warp() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_empty[warpgroup_], q_parity_ ^ 1);  // it has taken the last staged tile
    if ((threadIdx.x & 127) == 0) s.store[warpgroup_].head = -1;
    arrive(s.store_full[warpgroup_]);
  }

  // ---- small things

  // One arrival per warp, behind everything that its lanes did.
  __device__ __forceinline__ void arrive(ptx::Mbarrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ PendingTile& mine() const { return storage().pending[warpgroup_ * 4 + warp_]; }
  __device__ __forceinline__ static int shuffled(int value) { return __shfl_sync(~0u, value, 0); }
  __device__ __forceinline__ int row_in_warpgroup() const { return warp_ * 16 + lane_ / 4; }

  static __device__ __forceinline__ void clear(Output& o) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.f;
  }

  static constexpr uint32_t kSignBits = 0x80008000;

  const Params& params_;
  const int warpgroup_, warp_, lane_;
  Softmax softmax_;
  const bool negative_scale_;
  const float bmm2_scale_;

  Logits s_;
  Output o_;
  uint32_t p_[kTileKV / 4];
  uint32_t q_[kQInRegisters ? kHeadDimQK / 4 : 1];

  Ring<kStagesK> k_ring_;
  Ring<kStagesV> v_ring_;
  uint32_t q_parity_ = 0;
  bool pending_ = false;
  int pending_valid_rows_ = 0;
};

}  // namespace fmha
