// Which rows of the problem a consumer thread holds: rows g and g + 8 of its warp's 16 (g = lane / 4).
#pragma once
#include "config.h"
#include "params.h"

namespace fmha {

constexpr int kRowsPerThread = 2;

struct Rows {
  int token[kRowsPerThread];  // of the sequence
  int head[kRowsPerThread];   // counted from the tile's head
  bool valid[kRowsPerThread];

  // `first_token`: of the warpgroup's 64 rows.
  __device__ __forceinline__ Rows(int first_token, int q_len, const Params& params) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4 + 8 * r;
      head[r] = 0;
      token[r] = first_token + row;
      valid[r] = token[r] < q_len;
      if constexpr (kSplit) {
        head[r] = row / params.tile_tokens;
        token[r] = first_token + row - head[r] * params.tile_tokens;
        valid[r] = token[r] < q_len && head[r] < params.tile_heads;
      }
    }
  }
};

}  // namespace fmha
