// O of a product of 8-bit elements.
//
// Its accumulator aligns what it adds to about 13 bits of the sum so far, and cuts the rest: sums of one sign shrink,
// in proportion to the number of products (NOTES.md). So O leaves the accumulator every few blocks, for float32.
#pragma once
#include "config.h"
#include "rows.cuh"

namespace fmha {

constexpr int kBlocksInAccumulator = 4;

class LongSum {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : sum_) sum = 0.f;
#pragma unroll
    for (float& scale : scale_) scale = 1.f;
    blocks_ = 0;
  }

  // Whether the accumulator holds blocks to add the next one to.
  __device__ __forceinline__ bool accumulates() const { return blocks_ != 0; }

  // The reference of some rows moved: what has left the accumulator is corrected when it is next touched.
  __device__ __forceinline__ void rescale(const float (&correction)[kRowsPerThread]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) scale_[r] *= correction[r];
  }

  // The accumulator received another block.
  __device__ __forceinline__ void block_added(const float (&o)[kHeadDimV / 2]) {
    if (++blocks_ < kBlocksInAccumulator) return;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) sum_[i] = fmaf(sum_[i], scale_[i / 2 % 2], o[i]);
#pragma unroll
    for (float& scale : scale_) scale = 1.f;
    blocks_ = 0;
  }

  // `o`, to which a block was added since the last call, becomes the whole sum.
  __device__ __forceinline__ void finish(float (&o)[kHeadDimV / 2]) const {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = fmaf(sum_[i], scale_[i / 2 % 2], o[i]);
  }

 private:
  float sum_[kHeadDimV / 2];
  float scale_[kRowsPerThread];  // of the sum, to the current reference
  int blocks_;                   // in the accumulator
};

}  // namespace fmha
