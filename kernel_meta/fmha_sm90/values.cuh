// Values of 8 bits on their way from global memory to the product, which takes them as fp16, or transposed.
//
// Why not always a product of 8-bit values, which is twice as fast: it cuts the probabilities to 3 bits, and its
// accumulator loses the low bits of long sums (long_sum.cuh). fp16 holds e4m3 exactly, and takes V as it lies in
// memory.
#pragma once
#include "common/ptx/math.cuh"
#include "params.h"
#include "storage.cuh"
#include "tile.cuh"
#include "transpose.cuh"

namespace fmha {

// A thread converts 8 columns of every fourth row: 16 bytes of the result are the swizzle's unit.
constexpr int kConvertedColumns = 8;
constexpr int kConverterThreadsPerRow = kLandingColumns / kConvertedColumns;
constexpr int kConverterRows = 32 * kValueWarps / kConverterThreadsPerRow;

// Loads in flight before the first store, past which the compiler moves none.
constexpr int kConversionBatch = kProducerRegisters >= 40 && kTileKV % (8 * kConverterRows) == 0 ? 8 : 4;
static_assert(kTileKV % (kConversionBatch * kConverterRows) == 0);

__device__ __forceinline__ uint4 to_fp16(uint2 values) {
  const uint2 low = ptx::e4m3x4_to_fp16x4(values.x), high = ptx::e4m3x4_to_fp16x4(values.y);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// This warp's share of one block. Rows behind the sequence become 0: their probabilities are 0, but 0 * NaN is NaN.
template <bool kWhole>
__device__ __forceinline__ void convert_block(int landing_stage, int stage, int valid_rows, int warp) {
  Storage& s = storage();
  const uint32_t thread = warp * 32 + (threadIdx.x & 31);
  const uint32_t unit = thread % kConverterThreadsPerRow, first_row = thread / kConverterThreadsPerRow;
  constexpr uint32_t kUnits = kChunk / kConvertedColumns;  // of a row of a chunk
#pragma unroll
  for (int columns = 0; columns < kHeadDimV / kLandingColumns; ++columns) {
    const auto& landed = s.landing[landing_stage][columns];
    auto& v = s.v[stage][columns * (kLandingColumns / kChunk) + unit / kUnits];
#pragma unroll
    for (int batch = 0; batch < kTileKV; batch += kConversionBatch * kConverterRows) {
      uint2 values[kConversionBatch];
#pragma unroll
      for (int i = 0; i < kConversionBatch; ++i) {
        const uint32_t row = first_row + batch + i * kConverterRows;
        values[i] = *reinterpret_cast<const uint2*>(&landed[row][unit * kConvertedColumns]);
        if (!kWhole && static_cast<int>(row) >= valid_rows) values[i] = make_uint2(0, 0);
      }
#pragma unroll
      for (int i = 0; i < kConversionBatch; ++i) {
        const uint32_t place = (unit ^ (first_row + i * kConverterRows)) % kUnits;
        *reinterpret_cast<uint4*>(&v[first_row + batch + i * kConverterRows][place * kConvertedColumns]) =
            to_fp16(values[i]);
      }
    }
  }
}

template <bool kWhole>
__device__ __forceinline__ void prepare_block(int landing_stage, int stage, int valid_rows, int warp) {
  if constexpr (kTransposesValues) {
    transpose_block<kWhole>(landing_stage, stage, valid_rows, warp);
  } else {
    convert_block<kWhole>(landing_stage, stage, valid_rows, warp);
  }
}

// One of kValueWarps warps.
__device__ __forceinline__ void prepare_values(const Params& params, int warp) {
  Storage& s = storage();
  const bool leader = (threadIdx.x & 31) == 0;
  Ring<kStagesLanding> landing_ring;
  Ring<kStagesV> v_ring;
  Ring<kTileSlots> slot;

  for (;; slot.advance()) {
    ptx::mbarrier_wait(s.tile_full[slot.stage], slot.parity);
    const Tile tile = read_blocks(s.tiles[slot.stage], threadIdx.x & 31);
    if (leader) ptx::mbarrier_arrive(s.tile_empty[slot.stage]);
    if (tile.work == 0) return;

    const int tokens = tile_tokens(params);
    const BlockRange blocks = block_range(tile, tile.q_block * tokens, tokens, params);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      ptx::mbarrier_wait(s.landing_full[landing_ring.stage], landing_ring.parity);
      ptx::mbarrier_wait(s.v_empty[v_ring.stage], v_ring.parity ^ 1);
      const int valid_rows = tile.kv_len - block * kTileKV;
      // The lane that gives the stage back reads for all.
      if (kSkipsSoftmax && !__shfl_sync(~0u, leader ? s.landed[landing_ring.stage] : false, 0)) {
        // Nobody has a use for the block.
      } else if (valid_rows >= kTileKV) {
        prepare_block<true>(landing_ring.stage, v_ring.stage, valid_rows, warp);
      } else {
        prepare_block<false>(landing_ring.stage, v_ring.stage, valid_rows, warp);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (leader) {
        ptx::mbarrier_arrive(s.v_full[v_ring.stage]);
        ptx::mbarrier_arrive(s.landing_empty[landing_ring.stage]);
      }
      landing_ring.advance();
      v_ring.advance();
    }
  }
}

}  // namespace fmha
