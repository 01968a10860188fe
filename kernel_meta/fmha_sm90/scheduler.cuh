// Which tile comes next. One warp per block runs this; the others receive tiles through Storage::tiles.
//
// Order: sequence by sequence; if there are at most 32, the one with the most keys first. Inside a sequence, groups of
// heads whose keys and values share the L2 cache; inside a group the longest rows of a causal mask first, heads
// innermost. Split: tile by tile, its parts side by side.
//
// Tile i < gridDim.x belongs to block i; later ones go to whoever draws the next ticket. If a block has two tiles at
// most, of one sequence whose heads are one group, nobody draws: the second ones are dealt backwards, so that the
// longest goes with the shortest. Pairs are for few heads, and take these for one group.
#pragma once
#include "common/ptx/math.cuh"
#include "common/tickets.cuh"
#include "division.cuh"
#include "params.h"
#include "tile.cuh"

namespace fmha {

class TileScheduler {
 public:
  static constexpr int kWindow = 32;  // sequences looked at together, one a lane

  // Reads nothing but `params`: this runs before the kernel may look at memory.
  __device__ explicit TileScheduler(const Params& params)
      : params_(params),
        counter_(params.tile_counter, params.launch_tag),
        head_tiles_(params.num_heads_q / params.tile_heads),
        kv_heads_(params.num_heads_q / params.heads_per_kv_head),
        tokens_(tile_tokens(params)),
        heads_(head_tiles_),
        index_(blockIdx.x) {}

  // The tile at the current index; `work` is 0 behind the last one. All lanes of the warp take part and get it.
  __device__ __forceinline__ Tile current() {
    const int lane = threadIdx.x & 31;
    while (index_ >= window_begin_ + window_tiles_) {
      window_begin_ += window_tiles_;
      window_first_slot_ += window_slots_;
      first_sequence_ += kWindow;
      window_tiles_ = window_slots_ = 0;
      if (first_sequence_ >= params_.batch_size) return Tile{};
      load_window(lane);
    }
    return decode(index_ - window_begin_);
  }

  // Moves to the next index. Late on purpose: what is reserved early is a static schedule.
  __device__ __forceinline__ void advance() {
    int ticket = 0;
    if (everything_is_assigned()) {
      index_ = index_ < blocks() ? 2 * blocks() - 1 - index_ : window_begin_ + window_tiles_;
      return;
    }
    if ((threadIdx.x & 31) == 0) ticket = ticket_ < 0 ? counter_.draw_first() : counter_.draw_next();
    ticket_ = __shfl_sync(~0u, ticket, 0);
    index_ = blocks() + ticket_;
  }

  // Call once, after current() has returned a tile without work.
  __device__ __forceinline__ void finish() const {
    const int tiles = window_begin_;
    const bool leader = (threadIdx.x & 31) == 0;
    if (leader && ticket_ >= 0 && ticket_ == tiles - 1) counter_.release();
    const bool divides = kSplit && params_.least_blocks_per_part != 0;
    if (divides && leader && blockIdx.x == 0) *params_.divided.count = window_first_slot_;
  }

 private:
  static __device__ __forceinline__ int blocks() { return gridDim.x; }

  // Every block must come to the same answer, hence one window only.
  __device__ __forceinline__ bool everything_is_assigned() const {
    const int rounds = is_one_group() ? 2 : 1;
    return params_.batch_size <= kWindow && window_begin_ + window_tiles_ <= rounds * blocks();
  }

  __device__ __forceinline__ bool is_one_group() const {
    if (kSplit || params_.batch_size != 1) return false;
    if (kPairs) return true;
    return head_groups(__shfl_sync(~0u, sequence_.q_len, 0), __shfl_sync(~0u, sequence_.kv_len, 0)) == 1;
  }

  // Then their order does not matter, and the shortest way to a tile is best.
  __device__ __forceinline__ bool all_at_once() const {
    return kSplit && params_.batch_size <= kWindow && window_tiles_ <= blocks();
  }

  // Then every lane has the sequence: there is nothing to exchange on the way to the first tile. In kernels for longer
  // work that way does not count.
  __device__ __forceinline__ bool only_one_sequence() const { return kLeavesRows && params_.batch_size == 1; }

  __device__ __forceinline__ void load_window(int lane) {
    if (only_one_sequence()) {
      sequence_ = load_sequence(params_, 0);
      divide_sequence();
      window_tiles_ = tiles_of_sequence();
      if constexpr (kSplit) window_slots_ = slots_of_sequence();
      return;
    }
    sequence_ = load_sequence(params_, first_sequence_ + lane);
    // With more sequences than this, sorting costs more than an even end gains.
    if (params_.batch_size <= kWindow) sort_by_keys(sequence_, params_.batch_size);
    divide_sequence();
    const int tiles = tiles_of_sequence();
    tiles_through_lane_ = sum_through_lane(tiles);
    window_tiles_ = __shfl_sync(~0u, tiles_through_lane_, 31);
    if constexpr (kSplit) {
      slots_through_lane_ = sum_through_lane(slots_of_sequence());
      window_slots_ = __shfl_sync(~0u, slots_through_lane_, 31);
    }
  }

  __device__ __forceinline__ void divide_sequence() {
    q_blocks_ = tokens_.divide_up(sequence_.q_len);
    if (kSplit && first_sequence_ == 0) {
      most_blocks_ = blocks_per_part(params_, sequence_, head_tiles_, tokens_);
    }
    division_ = kSplit ? Division(key_blocks(sequence_), most_blocks_) : Division();
  }

  __device__ __forceinline__ int tiles_of_sequence() const { return q_blocks_ * head_tiles_ * division_.parts; }
  __device__ __forceinline__ int slots_of_sequence() const { return division_.parts > 1 ? tiles_of_sequence() : 0; }

  __device__ __forceinline__ Tile decode(int offset) const {
    Sequence sequence = sequence_;
    Division division = division_;
    int q_blocks = q_blocks_, first_slot = window_first_slot_;
    if (!only_one_sequence()) {
      const int lane = __ffs(__ballot_sync(~0u, tiles_through_lane_ > offset)) - 1;
      q_blocks = __shfl_sync(~0u, q_blocks_, lane);
      division.parts = __shfl_sync(~0u, division_.parts, lane);
      offset -= __shfl_sync(~0u, tiles_through_lane_, lane) - q_blocks * head_tiles_ * division.parts;
      sequence = of_lane(sequence_, lane);
      if constexpr (kSplit) {
        division.blocks_per_part = __shfl_sync(~0u, division_.blocks_per_part, lane);
        first_slot += __shfl_sync(~0u, slots_through_lane_ - slots_of_sequence(), lane);
      }
    }
    Tile tile{};
    tile.work = 1;
    tile.q_start = sequence.q_start;
    tile.q_len = sequence.q_len;
    tile.kv_start = sequence.kv_start;
    tile.kv_len = sequence.kv_len;
    if constexpr (kSage) tile.sequence = sequence.number;
    if constexpr (kSplit) {
      // Parts are no more than twice the grid, so this is small where there are several.
      const int of_sequence = division.parts == 1 ? offset : ptx::divide_small(offset, division.parts);
      tile.part = offset - of_sequence * division.parts;
      tile.parts = division.parts;
      tile.blocks_per_part = division.blocks_per_part;
      tile.first_slot = first_slot + of_sequence * division.parts;
      offset = of_sequence;
    }
    choose_rows(tile, offset, q_blocks);
    return tile;
  }

  __device__ __forceinline__ void choose_rows(Tile& tile, int offset, int q_blocks) const {
    const int groups = all_at_once() ? 1 : head_groups(tile.q_len, tile.kv_len);
    const Place place = groups == 1 ? in_one_group(offset) : in_groups(offset, q_blocks, groups);
    tile.head = place.head_tile * params_.tile_heads;
    tile.q_block = kMask == MaskType::dense ? place.row_rank : q_blocks - 1 - place.row_rank;
    if (kFillsTiles && groups > 1 && groups == kv_heads_) fill(tile, q_blocks);
  }

  // Of two or three tiles that read the same keys, the last one may have rows for one consumer only. It would run ahead
  // of the others, until these find that the keys have left the L2 cache. So it gets rows of the tile before, too: its
  // sequence begins later. These are then made twice, where values are finite to the same bits.
  __device__ __forceinline__ void fill(Tile& tile, int q_blocks) const {
    if (tile.q_block == 0 || tile.q_block != q_blocks - 1 || q_blocks > 3) return;
    const int rest = tile.q_len - tile.q_block * tile_tokens(params_);
    if (rest > params_.tile_tokens || cached_heads(tile.kv_len) >= kv_heads_) return;
    tile.q_start += rest;
    tile.q_len -= rest;
    --tile.q_block;
  }

  // Of a tile among those of its sequence.
  struct Place {
    int row_rank;  // in the order of work
    int head_tile;
  };

  __device__ __forceinline__ Place in_one_group(int offset) const {
    const int row_rank = heads_.divide(offset);
    return {row_rank, offset - row_rank * head_tiles_};
  }

  // Groups of `size` or size - 1 head tiles, the larger ones first.
  __device__ __forceinline__ Place in_groups(int offset, int q_blocks, int groups) const {
    int size = ptx::divide_small(head_tiles_ - 1, groups) + 1;
    const int large_groups = head_tiles_ - (size - 1) * groups;
    int first = 0;
    if (offset >= large_groups * size * q_blocks) {
      offset -= large_groups * size * q_blocks;
      first = large_groups * size;
      --size;
    }
    const int group = offset / (size * q_blocks);
    offset -= group * size * q_blocks;
    const int row_rank = offset / size;
    return {row_rank, first + group * size + offset - row_rank * size};
  }

  // How many groups the heads of a sequence form, so that keys and values of each are cached. Where not all are, and
  // rows are about equally long, there is nothing to balance: the smallest groups that share keys are best then.
  __device__ __forceinline__ int head_groups(int q_len, int kv_len) const {
    if constexpr (kMask == MaskType::dense) return kv_heads_;
    const int kv_heads = cached_heads(kv_len);
    if (kv_heads >= kv_heads_) return 1;
    const bool rows_are_alike = kMask == MaskType::causal && q_len < kv_len / 4;
    return rows_are_alike ? kv_heads_ : ptx::divide_small(kv_heads_ - 1, kv_heads) + 1;
  }

  // Of how many kv heads keys and values fill at most half of the L2 cache.
  __device__ __forceinline__ int cached_heads(int kv_len) const {
    constexpr float kBudgetBytes = 32 << 20;
    constexpr int kBytesPerKey = kRowBytesQK + kHeadDimV * ptx::kElementBytes<kValueType>;
    const float bytes = static_cast<float>(max(1, shared_keys(kv_len))) * kBytesPerKey;  // of a kv head
    return max(1, static_cast<int>(kBudgetBytes * ptx::reciprocal_approx(bytes)));
  }

  // Of keys, those that the rows of one head which are worked on at a time may see.
  __device__ __forceinline__ int shared_keys(int kv_len) const {
    return kMask == MaskType::sliding ? min(kv_len, params_.window_left + 16 * kTileQ) : kv_len;
  }

  const Params& params_;
  const common::TicketCounter counter_;
  const int head_tiles_, kv_heads_;
  const ptx::Divisor tokens_, heads_;  // by tokens and by heads of a tile
  float most_blocks_ = 0.f;  // of a part
  int index_;
  int ticket_ = -1;
  // The window: sequences first_sequence_ ... + 31, their tiles [window_begin_, window_begin_ + window_tiles_) and the
  // slots of those that are divided.
  int first_sequence_ = -kWindow;
  int window_begin_ = 0, window_tiles_ = 0;
  int window_first_slot_ = 0, window_slots_ = 0;
  // Of this lane's sequence.
  Sequence sequence_{};
  Division division_{};
  int q_blocks_ = 0, tiles_through_lane_ = 0, slots_through_lane_ = 0;
};

}  // namespace fmha
