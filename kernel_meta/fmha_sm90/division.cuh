// How the split scheduler divides the keys of sequences into parts, from the lengths on the device.
#pragma once
#include "common/ptx/math.cuh"
#include "row_result.cuh"
#include "sequences.cuh"
#include "tile.cuh"

namespace fmha {

// A whole number n over d, rounded up. Never too low, since keys would be lost then, or slots be missing: a guess that
// is a little above, and one less where that is enough. Exact for quotients up to 2^20.
__device__ __forceinline__ float divide_up(float n, float d) {
  constexpr float kAbove = 1.f + 0x1p-21f;
  const float guess = ceilf(n * kAbove * ptx::reciprocal_approx(d));
  return fmaf(guess - 1.f, d, -n) >= 0.f ? guess - 1.f : guess;
}

__device__ __forceinline__ int key_blocks(const Sequence& sequence) { return ceil_div(sequence.kv_len, kTileKV); }

// Equal parts of at most `most` blocks.
struct Division {
  int parts = 1;
  int blocks_per_part = 0;

  Division() = default;
  __device__ __forceinline__ Division(int blocks, float most) : blocks_per_part(blocks) {
    const float n = __int2float_ru(blocks);
    if (n <= most) return;
    const float longest = divide_up(n, divide_up(n, most));
    blocks_per_part = static_cast<int>(longest);
    parts = static_cast<int>(divide_up(n, longest));
  }
};

// The longest part, such that all blocks of the grid end at about the same time. All lanes of the warp take part.
// `sequence` is the lane's of the first 32, in any order; where there is only one, every lane has it.
//
// Whatever the lengths are, parts are no more than twice the grid: three of as many tiles as have thirds; else, where a
// part is at least 1 / room of all key blocks, the tiles that are longer are fewer than `room`, and rounding up gives
// each at most one part more than its share of `room` parts.
__device__ __forceinline__ float blocks_per_part(const Params& params, const Sequence& sequence, int head_tiles,
                                                 const ptx::Divisor& tokens) {
  if (params.least_blocks_per_part == 0) return kInfinity;
  float tiles = 0.f, blocks = 0.f;
  int longest = 0;
  auto count = [&](const Sequence& s) {
    const float its_tiles = static_cast<float>(tokens.divide_up(s.q_len) * head_tiles);
    tiles += its_tiles;
    blocks = __fmaf_ru(its_tiles, __int2float_ru(key_blocks(s)), blocks);
    longest = max(longest, key_blocks(s));
  };
  count(sequence);
  if (params.batch_size > 1) {
#pragma unroll 1
    for (int n = 32 + (threadIdx.x & 31); n < params.batch_size; n += 32) count(load_sequence(params, n));
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) {
      tiles += __shfl_xor_sync(~0u, tiles, distance);
      blocks = __fadd_ru(blocks, __shfl_xor_sync(~0u, blocks, distance));
    }
  }
  const float least = static_cast<float>(params.least_blocks_per_part);
  const float grid = static_cast<float>(gridDim.x);
  // A part for every block. Parts are whole, so each tile may get one more than its share, which must fit, too.
  if (2.f * tiles <= grid) return fmaxf(least, divide_up(blocks, grid - tiles));
  // Halves of equal tiles would follow each other in a block; of thirds each has two at most.
  if (3.f * tiles <= 2.f * grid) {
    const float most = static_cast<float>(params.batch_size > 1 ? __reduce_max_sync(~0u, longest) : longest);
    if (blocks >= 0.9f * tiles * most) return fmaxf(least, divide_up(most, 3.f));
  }
  // Only tiles that would end late are divided.
  return fmaxf(least, divide_up(blocks, tiles <= grid ? grid * (2.f / 3.f) : grid));
}

}  // namespace fmha
