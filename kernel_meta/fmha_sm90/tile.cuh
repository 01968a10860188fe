// A unit of work, and which keys its rows see.
#pragma once
#include "config.h"
#include "params.h"

namespace fmha {

// kTileQ query rows of one head of one sequence. Two 16-byte words, so that a warp reads it with two loads.
struct alignas(16) Tile {
  int q_block;  // rows q_block * kTileQ ... of the sequence
  int q_len;
  int kv_len;
  int valid;  // 0: there is no more work
  int head;
  int q_start;   // the sequence's first row in the query tensor
  int kv_start;  // ... in the key tensor
  int unused;
};

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// First key that no longer is visible to `row` of its sequence. Bottom-right aligned.
__device__ __forceinline__ int key_end(const Tile& tile, int row, int /*window_left*/) {
  if constexpr (kMask == MaskType::dense) return tile.kv_len;
  return max(0, min(tile.kv_len, row + 1 + tile.kv_len - tile.q_len));
}

// First key that `row` sees.
__device__ __forceinline__ int key_begin(const Tile& tile, int row, int window_left) {
  if constexpr (kMask != MaskType::sliding) return 0;
  return max(0, row + tile.kv_len - tile.q_len - window_left);
}

// Key blocks [begin, end) hold every key that rows [first, first + count) see; [full_begin, full_end) of them are
// seen whole by all of these rows.
struct BlockRange {
  int begin, end, full_begin, full_end;
};

__device__ __forceinline__ BlockRange block_range(const Tile& tile, int first, int count, int window_left) {
  BlockRange range{0, 0, 0, 0};
  if (first >= tile.q_len) return range;
  const int last = min(first + count, tile.q_len) - 1;
  range.end = ceil_div(key_end(tile, last, window_left), kTileKV);
  range.begin = min(key_begin(tile, first, window_left) / kTileKV, range.end);
  range.full_end = key_end(tile, first, window_left) / kTileKV;
  range.full_begin = ceil_div(key_begin(tile, last, window_left), kTileKV);
  return range;
}

}  // namespace fmha
