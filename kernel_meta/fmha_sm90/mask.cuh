// Visible keys of a thread's two rows, and their application to the logits.
#pragma once
#include "rows.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace fmha {

struct Mask {
  int begin[kRowsPerThread], end[kRowsPerThread];  // keys of the sequence

  __device__ __forceinline__ Mask(const Tile& tile, const Rows& rows, int window_left) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      begin[r] = key_begin(tile, rows.token[r], window_left);
      end[r] = key_end(tile, rows.token[r]);
    }
  }

  // Selects, and does not add: keys behind the sequence may be NaN.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount], int block) const {
    const int first_column = block * kTileKV + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int from = begin[r] - first_column, to = end[r] - first_column;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool visible = 8 * j + e < to;
          if constexpr (kMask == MaskType::sliding) visible = visible && 8 * j + e >= from;
          if (!visible) s[4 * j + 2 * r + e] = -kInfinity;
        }
      }
    }
  }
};

}  // namespace fmha
