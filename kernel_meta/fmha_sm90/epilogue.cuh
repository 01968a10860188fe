// From a warpgroup's accumulators to rows of out and lse.
#pragma once
#include "common/ptx/matrix.cuh"
#include "params.h"
#include "row_result.cuh"
#include "softmax.cuh"
#include "storage.cuh"

namespace fmha {

using Output = float[kHeadDimV / 2];

template <DType kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (kType == DType::bf16) return ptx::pack_bf16x2(low, high);
  return ptx::pack_fp16x2(low, high);
}

// Thread c of a quad passes word c of four rows of four; afterwards it holds row c. Turns a thread's 4-byte pieces of
// four column groups into 16 contiguous bytes of one.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const uint32_t a = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2);
  const uint32_t b = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  (upper ? w[0] : w[2]) = a;
  (upper ? w[1] : w[3]) = b;
  const uint32_t c = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t d = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = c;
  (odd ? w[2] : w[3]) = d;
}

// A row in the column order of transpose.cuh.
__device__ __forceinline__ void store_row_of_transposed(uint16_t* out, const Output& o, int r, float factor) {
  out += 4 * (threadIdx.x & 3);
#pragma unroll
  for (int group = 0; group < kHeadDimV / 16; ++group) {
    const float* even = &o[8 * group + 2 * r];
    const float* odd = even + 4;
    *reinterpret_cast<uint2*>(out + 16 * group) = make_uint2(pack<kOutType>(even[0] * factor, odd[0] * factor),
                                                             pack<kOutType>(even[1] * factor, odd[1] * factor));
  }
}

// A thread's rows, each written only if it belongs to the sequence: the first kColumns of `o`, as those from
// `first_column` on. All lanes of the warp take part.
template <int kColumns = kHeadDimV>
__device__ __forceinline__ void store_rows(const Params& params, const PendingTile& tile, const Rows& rows,
                                           const Output& o, const float (&factor)[kRowsPerThread],
                                           int first_column = 0) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    // Tiles of 64 rows may have few.
    if (kRowGroups == 1 && !__any_sync(~0u, rows.valid[r])) continue;
    uint16_t* out = static_cast<uint16_t*>(params.out) + (tile.q_start + rows.token[r]) * params.out_stride_token +
                    (tile.head + rows.head[r]) * params.out_stride_head;
    if constexpr (kTransposesValues) {
      if (rows.valid[r]) store_row_of_transposed(out, o, r, factor[r]);
      continue;
    }
    out += first_column + 8 * (threadIdx.x & 3);
#pragma unroll
    for (int group = 0; group < kColumns / 32; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * group + j) + 2 * r;
        words[j] = pack<kOutType>(o[i] * factor[r], o[i + 1] * factor[r]);
      }
      quad_transpose(words);
      if (!rows.valid[r]) continue;
      *reinterpret_cast<uint4*>(out + 32 * group) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Of the warp's 16 rows, 16 columns a part, into its consumer's Q buffer, in the layout that out_map's box expects.
constexpr int kStagingParts = kHeadDimV / 16;

__device__ __forceinline__ void stage_part(void* buffer, int part, const Output& o,
                                           const float (&factor)[kRowsPerThread], bool stores) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int row = warp * 16 + (lane & 15);
  const int unit = 2 * part + (lane >> 4);  // of 8 columns: one matrix of the four that a warp stores together
  const uint32_t swizzled = ((unit & 7) ^ (row & 7)) << 4;
  const float* columns = &o[8 * part];
  const uint32_t chunk = ptx::shared_address(buffer) + (unit >> 3) * (kWarpgroupRows * kRowBytes);
  ptx::stmatrix_x4_if(stores, chunk + row * kRowBytes + swizzled,
                      pack<kOutType>(columns[0] * factor[0], columns[1] * factor[0]),
                      pack<kOutType>(columns[2] * factor[1], columns[3] * factor[1]),
                      pack<kOutType>(columns[4] * factor[0], columns[5] * factor[0]),
                      pack<kOutType>(columns[6] * factor[1], columns[7] * factor[1]));
}

__device__ __forceinline__ void store_lse(const Params& params, const PendingTile& tile, const Rows& rows,
                                          const float (&lse)[kRowsPerThread]) {
  if (params.lse == nullptr || (threadIdx.x & 3) != 0) return;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (!rows.valid[r]) continue;
    params.lse[(tile.q_start + rows.token[r]) * params.lse_stride_token +
               (tile.head + rows.head[r]) * params.lse_stride_head] = lse[r];
  }
}

// Split: a part's rows for combine.cu. `first_row`: of the warpgroup's, counted over all slots.
__device__ __forceinline__ void store_part(const Params& params, int first_row, const Rows& rows, const Output& o,
                                           const Softmax& softmax) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (!rows.valid[r]) continue;
    const int64_t row = first_row + rows.row[r];
    const int quad_lane = threadIdx.x & 3;
    float2* sums = reinterpret_cast<float2*>(params.divided.sums + row * kHeadDimV) + quad_lane;
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j) sums[4 * j] = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
    if (quad_lane == 0) params.divided.statistics[row] = make_float2(softmax.scale * softmax.m[r], softmax.l[r]);
  }
}

}  // namespace fmha
