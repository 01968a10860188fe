// Which tile comes next. One warp per block runs this; the others receive tiles through Storage::tiles.
//
// Order: sequence by sequence. Split: the parts of a tile side by side. Otherwise, inside a sequence, groups of heads whose keys and values share the L2 cache; inside a group
// the longest rows of a causal mask first, heads innermost. Tile i < gridDim.x belongs to block i; later ones go to
// whoever draws the next ticket.
#pragma once
#include "params.h"
#include "tickets.cuh"
#include "tile.cuh"

namespace fmha {

class TileScheduler {
 public:
  static constexpr int kWindow = 32;  // sequences looked at together, one a lane

  __device__ explicit TileScheduler(const Params& params)
      : params_(params), counter_(params.tile_counter, params.launch_tag), index_(blockIdx.x) {}

  // The tile at the current index; `work` is 0 behind the last one. All lanes of the warp take part and get it.
  __device__ __forceinline__ Tile current() {
    const int lane = threadIdx.x & 31;
    while (index_ >= window_begin_ + window_tiles_) {
      window_begin_ += window_tiles_;
      first_sequence_ += kWindow;
      window_tiles_ = 0;
      if (first_sequence_ >= params_.batch_size) return Tile{};
      load_window(lane);
    }
    return decode(index_ - window_begin_);
  }

  // Moves to the next index. Late on purpose: what is reserved early is a static schedule.
  __device__ __forceinline__ void advance() {
    int ticket = 0;
    if (everything_is_assigned()) {
      index_ = window_begin_ + window_tiles_;
      return;
    }
    if ((threadIdx.x & 31) == 0) ticket = counter_.draw();
    ticket_ = __shfl_sync(~0u, ticket, 0);
    index_ = gridDim.x + ticket_;
  }

  // Call once, after current() has returned a tile without work.
  __device__ __forceinline__ void finish() const {
    const int tiles = window_begin_;
    if ((threadIdx.x & 31) == 0 && ticket_ >= 0 && ticket_ == tiles - 1) counter_.release();
  }

 private:
  // One block per tile: nobody draws. Every block must come to the same answer, hence one window only.
  __device__ __forceinline__ bool everything_is_assigned() const {
    return params_.batch_size <= kWindow && window_begin_ + window_tiles_ <= static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ void load_window(int lane) {
    const int sequence = first_sequence_ + lane;
    q_blocks_ = q_start_ = q_len_ = kv_start_ = kv_len_ = 0;
    splits_ = 1;
    if (sequence < params_.batch_size) {
      q_start_ = min(max(params_.cum_seq_lens_q[sequence], 0), params_.total_q);
      q_len_ = max(0, min(params_.cum_seq_lens_q[sequence + 1], params_.total_q) - q_start_);
      kv_start_ = min(max(params_.cum_seq_lens_kv[sequence], 0), params_.total_kv);
      kv_len_ = max(0, min(params_.cum_seq_lens_kv[sequence + 1], params_.total_kv) - kv_start_);
      q_blocks_ = ceil_div(q_len_, tile_tokens(params_));
      splits_ = splits(q_blocks_, kv_len_);
    }
    tiles_through_lane_ = q_blocks_ * head_units() * splits_;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
      const int below = __shfl_up_sync(~0u, tiles_through_lane_, distance);
      if (lane >= distance) tiles_through_lane_ += below;
    }
    window_tiles_ = __shfl_sync(~0u, tiles_through_lane_, 31);
  }

  __device__ __forceinline__ Tile decode(int offset) const {
    const int lane = __ffs(__ballot_sync(~0u, tiles_through_lane_ > offset)) - 1;
    const int q_blocks = __shfl_sync(~0u, q_blocks_, lane);
    const int splits = __shfl_sync(~0u, splits_, lane);
    offset -= __shfl_sync(~0u, tiles_through_lane_, lane) - q_blocks * head_units() * splits;
    Tile tile{};
    tile.work = 1;
    tile.q_start = __shfl_sync(~0u, q_start_, lane);
    tile.q_len = __shfl_sync(~0u, q_len_, lane);
    tile.kv_start = __shfl_sync(~0u, kv_start_, lane);
    tile.kv_len = __shfl_sync(~0u, kv_len_, lane);

    if constexpr (kSplit) {
      const int unit = offset / splits;
      tile.work = 1 + offset - unit * splits;
      tile.q_block = unit / head_units();
      const int head_unit = unit - tile.q_block * head_units();
      tile.head = head_unit * params_.tile_heads;
      const int sequence = first_sequence_ + lane;
      tile.slot = -1;
      if (splits > 1) {
        tile.slot = ((sequence * params_.max_q_blocks + tile.q_block) * head_units() + head_unit) * params_.max_splits;
      }
      return tile;
    }

    // Head groups of `size` or size - 1 heads, the larger ones first.
    const int groups = ceil_div(params_.num_heads_q, heads_per_group(tile.kv_len));
    int size = ceil_div(params_.num_heads_q, groups);
    const int large_groups = params_.num_heads_q - (size - 1) * groups;
    int first_head = 0;
    if (offset >= large_groups * size * q_blocks) {
      offset -= large_groups * size * q_blocks;
      first_head = large_groups * size;
      --size;
    }
    const int group = offset / (size * q_blocks);
    offset -= group * size * q_blocks;
    const int row_rank = offset / size;
    tile.head = first_head + group * size + offset - row_rank * size;
    tile.q_block = kMask == MaskType::dense ? row_rank : q_blocks - 1 - row_rank;
    return tile;
  }

  __device__ __forceinline__ int head_units() const {
    if constexpr (kSplit) return params_.num_heads_q / params_.tile_heads;
    return params_.num_heads_q;
  }

  __device__ __forceinline__ int splits(int q_blocks, int kv_len) const {
    if constexpr (!kSplit) return 1;
    const int parts = ceil_div(ceil_div(kv_len, kTileKV), params_.blocks_per_split);
    const bool has_slots = q_blocks <= params_.max_q_blocks && parts <= params_.max_splits;
    return has_slots ? max(1, parts) : 1;
  }

  // A group's keys and values fill at most half of the L2 cache. A dense mask has no long and short rows to balance,
  // so there the smallest group that shares keys is best.
  __device__ __forceinline__ int heads_per_group(int kv_len) const {
    if constexpr (kMask == MaskType::dense) return params_.heads_per_kv_head;
    constexpr int kBudgetBytes = 32 << 20;
    constexpr int kBytesPerKey = 2 * (kHeadDimQK + kHeadDimV);
    const int shared_keys = kMask == MaskType::sliding ? min(kv_len, params_.window_left + 16 * kTileQ) : kv_len;
    const int kv_heads = kBudgetBytes / (kBytesPerKey * max(1, shared_keys));
    return max(1, min(params_.num_heads_q, kv_heads * params_.heads_per_kv_head));
  }

  const Params& params_;
  const TicketCounter counter_;
  int index_;
  int ticket_ = -1;
  // The window: sequences first_sequence_ ... + 31, their tiles [window_begin_, window_begin_ + window_tiles_).
  int first_sequence_ = -kWindow;
  int window_begin_ = 0;
  int window_tiles_ = 0;
  // Of this lane's sequence.
  int q_blocks_ = 0, q_start_ = 0, q_len_ = 0, kv_start_ = 0, kv_len_ = 0, splits_ = 1, tiles_through_lane_ = 0;
};

}  // namespace fmha
