// Sage: s = bmm1_scale * q_scale * k_scale * dot(q, k), out = bmm2_scale * v_scale * sum p v, where tokens of Q and K
// share their scales in blocks, and tokens of V by channel. Block sizes are parameters. Where 16 keys share a scale, a
// group of 16 has one in shared memory, otherwise every key has one of its own, whatever the blocks' size.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "epilogue.cuh"
#include "remake.cuh"
#include "rows.cuh"
#include "storage.cuh"

namespace fmha {

// A group of 16 keys begins where a block of scales does: key blocks begin at whole groups of the sequence.
constexpr int kGroupLog2 = 4;
constexpr int kGroup = 1 << kGroupLog2;

__device__ __forceinline__ bool one_scale_per_group(const Params& params) {
  return params.sage.block_k_log2 == kGroupLog2;
}

// Of 16 keys, thread c of a quad holds the columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. Their scales are neighbours.
__device__ __forceinline__ constexpr int scale_place(int key) {
  return key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
}

// One warp, into an empty stage. Nobody sees keys behind the sequence's end: their scales are not read. The lanes keep
// together, since one that lags behind by two phases of any barrier would wait for ever.
__device__ __forceinline__ void load_key_scales(const Params& params, const Tile& tile, int kv_head, int block,
                                                int stage) {
  __syncwarp();
  Storage& s = storage();
  const SageScales& sage = params.sage;
  const float* scales = sage.scales_k + static_cast<int64_t>(kv_head) * sage.columns_k +
                        (tile.kv_start >> sage.block_k_log2) + tile.sequence;
  const bool grouped = one_scale_per_group(params);
  const int keys_log2 = grouped ? kGroupLog2 : 0;
  for (int i = threadIdx.x & 31; i < kTileKV >> keys_log2; i += 32) {
    const int token = block * kTileKV + (i << keys_log2);
    const bool exists = token < tile.kv_len;
    ptx::copy_word_or_zero(&s.k_scales[stage][grouped ? i : scale_place(i)],
                           scales + (exists ? token >> sage.block_k_log2 : 0), exists);
  }
  ptx::mbarrier_arrive_behind_copies(s.k_full[stage]);
}

// Of a thread's rows, on their way from global memory.
struct QueryScales {
  float row[kRowsPerThread];
};

__device__ __forceinline__ QueryScales load_query_scales(const Params& params, const Tile& tile, const Rows& rows) {
  const SageScales& sage = params.sage;
  const int first_column = (tile.q_start >> sage.block_q_log2) + tile.sequence;
  QueryScales scales;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float* of_head = sage.scales_q + static_cast<int64_t>(tile.head + rows.head[r]) * sage.columns_q;
    scales.row[r] = rows.valid[r] ? of_head[first_column + (rows.token[r] >> sage.block_q_log2)] : 1.f;
  }
  return scales;
}

// Products of a warpgroup become exponents (softmax.cuh). `scales`: of the block's keys, or of groups of them.
template <bool kGrouped, bool kAllHaveReferences, class Products>
__device__ __forceinline__ void make_exponents(Logits& s, const Products& products, const float (&scales)[kTileKV],
                                               const float (&group_scales)[kTileKV / kGroup],
                                               const Softmax& softmax) {
  const float4* mine = reinterpret_cast<const float4*>(scales) + (threadIdx.x & 3);
#pragma unroll
  for (int group = 0; group < kTileKV / kGroup; ++group) {
    const float shared = group_scales[group];
    const float4 own = kGrouped ? make_float4(shared, shared, shared, shared) : mine[4 * group];
    const float of_column[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 2 % 2;
      s[8 * group + i] = fmaf(static_cast<float>(products[8 * group + i]),
                              softmax.row_scale[r] * of_column[i / 4 * 2 + i % 2],
                              kAllHaveReferences ? softmax.offset[r] : softmax.exponent_offset(r));
    }
  }
}

// Logits of a warp that are made again, base 2.
template <bool kGrouped>
class ScaledLogits {
 public:
  __device__ __forceinline__ ScaledLogits(const WarpLogits& products, const float (&scales)[kTileKV],
                                          const float (&row_scale)[kRowsPerThread])
      : products_(products), scales_(scales), row_scale_(row_scale) {}

  __device__ __forceinline__ void of_group(int group, float (&s)[4]) const {
    std::conditional_t<kQueryType == DType::int8, int32_t, float> products[4];
    products_.of_group(group, products);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = group * kGroupKeys + 2 * (threadIdx.x & 3) + i % 2;
      const float scale = scales_[kGrouped ? key / kGroup : scale_place(key)];
      s[i] = static_cast<float>(products[i]) * (row_scale_[i / 2] * scale);
    }
  }

 private:
  const WarpLogits products_;
  const float (&scales_)[kTileKV];
  const float (&row_scale_)[kRowsPerThread];
};

// One warp, for itself. Their latency would show at the end of a short tile.
__device__ __forceinline__ void fetch_channel_scales(const Params& params, int head, float* fetched) {
  const float* scales = params.sage.scales_v + head / params.heads_per_kv_head * kHeadDimV;
#pragma unroll
  for (int channel = 0; channel < kHeadDimV; channel += 32) {
    const int mine = channel + (threadIdx.x & 31);
    ptx::copy_word_or_zero(fetched + mine, scales + mine, true);
  }
}

__device__ __forceinline__ void scale_by_channels(Output& o, const float* fetched) {
  ptx::wait_for_copies();
  __syncwarp();
  if constexpr (kTransposesValues) {
    // The even ones of four neighbouring columns come from the first of two column groups, odd ones from the other.
    const float4* mine = reinterpret_cast<const float4*>(fetched) + (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 8) {
      const float4 scale = mine[i / 2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        o[i + j] *= j % 2 == 0 ? scale.x : scale.z;
        o[i + 4 + j] *= j % 2 == 0 ? scale.y : scale.w;
      }
    }
    return;
  }
  const float2* mine = reinterpret_cast<const float2*>(fetched) + (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; i += 4) {
    const float2 scale = mine[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) o[i + j] *= j % 2 == 0 ? scale.x : scale.y;
  }
}

}  // namespace fmha
