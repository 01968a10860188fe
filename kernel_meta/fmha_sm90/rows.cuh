// Which rows of the problem a consumer thread holds: rows g and g + 8 of its warp's 16 (g = lane / 4).
#pragma once
#include "common/ptx/math.cuh"
#include "config.h"
#include "params.h"

namespace fmha {

constexpr int kRowsPerThread = 2;

struct Rows {
  int row[kRowsPerThread];    // of the warpgroup's 64
  int token[kRowsPerThread];  // of the sequence
  int head[kRowsPerThread];   // counted from the tile's head
  bool valid[kRowsPerThread];

  // `first_token`: of the warpgroup's.
  __device__ __forceinline__ Rows(int first_token, int q_len, const Params& params) {
    const float heads_per_row = ptx::reciprocal_approx(static_cast<float>(params.tile_tokens));
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      row[r] = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4 + 8 * r;
      // row / tile_tokens: the half keeps the product farther from whole numbers than it can be wrong.
      head[r] = static_cast<int>((static_cast<float>(row[r]) + .5f) * heads_per_row);
      token[r] = first_token + row[r] - head[r] * params.tile_tokens;
      valid[r] = token[r] < q_len;
      if constexpr (kLeavesRows) valid[r] = valid[r] && head[r] < params.tile_heads;
    }
  }
};

}  // namespace fmha
