// A unit of work, and which keys its rows see.
#pragma once
#include "config.h"
#include "params.h"

namespace fmha {

// Rows of one sequence in heads that share a kv head.
struct alignas(16) Tile {
  int q_block;  // tokens q_block * tile_tokens() ... of the sequence
  int q_len;
  int kv_len;
  int work;      // 0: there is no more
  int head;      // the first
  int q_start;   // the sequence's first row in the query tensor
  int kv_start;  // ... in the key tensor
  // Split: the tile's share of the keys. One part, without a slot, where they are not divided.
  int part;
  int parts;
  int blocks_per_part;
  int first_slot;  // of the tile's parts
  int sequence;    // Sage: its number in the batch
};

// What a warp goes by: fields of a tile, which its first lane reads, the one that gives the slot back. They go through
// a shuffle: the compiler then knows that the warp does not diverge, and keeps what follows in uniform registers.
template <int Tile::*... kFields>
__device__ __forceinline__ Tile read_tile(const Tile& shared, int lane) {
  Tile tile{};
  if (lane == 0) tile = shared;
  ((tile.*kFields = __shfl_sync(~0u, tile.*kFields, 0)), ...);
  return tile;
}

// Where its blocks lie; the other fields are the first lane's alone.
__device__ __forceinline__ Tile read_blocks(const Tile& shared, int lane) {
  if constexpr (kSplit) {
    return read_tile<&Tile::q_block, &Tile::q_len, &Tile::kv_len, &Tile::work, &Tile::part,
                     &Tile::blocks_per_part>(shared, lane);
  } else {
    return read_tile<&Tile::q_block, &Tile::q_len, &Tile::kv_len, &Tile::work>(shared, lane);
  }
}

// Of a tile, in all its row groups.
__device__ __forceinline__ int tile_tokens(const Params& params) { return kRowGroups * params.tile_tokens; }

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// First key that no longer is visible to `row` of its sequence. Bottom-right aligned.
__device__ __forceinline__ int key_end(const Tile& tile, int row) {
  if constexpr (kMask == MaskType::dense) return tile.kv_len;
  return max(0, min(tile.kv_len, row + 1 + tile.kv_len - tile.q_len));
}

// First key that `row` sees.
__device__ __forceinline__ int key_begin(const Tile& tile, int row, int window_left) {
  if constexpr (kMask != MaskType::sliding) return 0;
  return max(0, row + tile.kv_len - tile.q_len - window_left);
}

// Key blocks [begin, end) hold every key of the tile's part that rows [first, first + count) see; [full_begin,
// full_end) of them are seen whole by all of these rows.
struct BlockRange {
  int begin, end, full_begin, full_end;

  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

__device__ __forceinline__ BlockRange block_range(const Tile& tile, int first, int count, const Params& params) {
  BlockRange range{0, 0, 0, 0};
  if (first >= tile.q_len) return range;
  const int last = min(first + count, tile.q_len) - 1;
  range.end = ceil_div(key_end(tile, last), kTileKV);
  range.begin = min(key_begin(tile, first, params.window_left) / kTileKV, range.end);
  range.full_end = key_end(tile, first) / kTileKV;
  range.full_begin = ceil_div(key_begin(tile, last, params.window_left), kTileKV);
  if constexpr (kSplit) {
    range.begin = min(tile.part * tile.blocks_per_part, range.end);
    range.end = min(range.begin + tile.blocks_per_part, range.end);
  }
  return range;
}

// Pairs: of a tile's blocks, those of one consumer. The first one has the later half, and one more of an odd number.
__device__ __forceinline__ BlockRange share_of(BlockRange blocks, int consumer) {
  if constexpr (!kPairs) return blocks;
  const int middle = blocks.begin + (blocks.end - blocks.begin) / 2;
  (consumer == 0 ? blocks.begin : blocks.end) = middle;
  return blocks;
}

// Blocks [begin, end) whose logits are pruned (compress.cuh), the same for both consumers: those of the tiles of 128
// keys that all of the tile's rows see whole. Rows behind the sequence's end have no say: with them, a window that
// hides nothing would differ from none.
struct PrunedBlocks {
  int begin, end;

  __device__ __forceinline__ bool empty() const { return begin >= end; }
  __device__ __forceinline__ bool contains(int block) const { return begin <= block && block < end; }
};

__device__ __forceinline__ PrunedBlocks pruned_blocks(const Tile& tile, const Params& params) {
  if constexpr (!kCompressesKeys) return {0, 0};
  constexpr int kKeys = 128;
  static_assert(!kCompressesKeys || (kTileQ == 128 && kKeys % kTileKV == 0), "a tile is pruned as a whole");
  const int row = tile.q_block * kTileQ;
  const int last_row = min(row + kTileQ, tile.q_len) - 1;
  const int begin = ceil_div(key_begin(tile, last_row, params.window_left), kKeys);
  const int end = max(begin, key_end(tile, row) / kKeys);
  return {begin * (kKeys / kTileKV), end * (kKeys / kTileKV)};
}

}  // namespace fmha
