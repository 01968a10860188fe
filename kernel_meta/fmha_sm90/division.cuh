// How the split scheduler divides the keys of sequences into parts, from the lengths on the device.
#pragma once
#include "sequences.cuh"
#include "tile.cuh"

namespace fmha {

// Equal parts of at most `most` blocks.
struct Division {
  int parts = 1;
  int blocks_per_part = 0;

  Division() = default;
  __device__ __forceinline__ Division(int blocks, int most) : blocks_per_part(blocks) {
    if (blocks <= most) return;
    blocks_per_part = ceil_div(blocks, ceil_div(blocks, most));
    parts = ceil_div(blocks, blocks_per_part);
  }
};

// The longest part, such that every block of the grid gets about one part. All lanes of the warp take part.
//
// At least 1 / gridDim.x of all key blocks, so the slots are enough: n tiles are longer than a part, hence n is below
// gridDim.x, and rounding up gives each at most one part more than its share of gridDim.x parts.
__device__ __forceinline__ int blocks_per_part(const Params& params, int head_tiles) {
  constexpr int kUndivided = 0x7fffffff;
  if (params.least_blocks_per_part == 0) return kUndivided;
  float tiles = 0.f, blocks = 0.f;
  for (int sequence = threadIdx.x & 31; sequence < params.batch_size; sequence += 32) {
    const Sequence s = load_sequence(params, sequence);
    const float its_tiles = static_cast<float>(ceil_div(s.q_len, tile_tokens(params)) * head_tiles);
    tiles += its_tiles;
    blocks = __fmaf_ru(its_tiles, static_cast<float>(ceil_div(s.kv_len, kTileKV)), blocks);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) {
    tiles += __shfl_xor_sync(~0u, tiles, distance);
    blocks = __fadd_ru(blocks, __shfl_xor_sync(~0u, blocks, distance));
  }
  // Few tiles: parts are whole, so each tile may get one more than its share, which must fit, too. Many tiles: two
  // halves of a tile would follow each other in one block, so only those far longer than the average are divided.
  const float grid = static_cast<float>(gridDim.x);
  const float room = 2.f * tiles <= grid ? grid - tiles : grid / 1.5f;
  return max(params.least_blocks_per_part, static_cast<int>(ceilf(__fdiv_ru(blocks, room))));
}

}  // namespace fmha
