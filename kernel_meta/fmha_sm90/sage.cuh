// Sage: s = bmm1_scale * q_scale * k_scale * dot(q, k), out = bmm2_scale * v_scale * sum p v, where tokens of Q and K
// share their scales in blocks, and tokens of V by channel. Block sizes are parameters: every key gets a scale of its
// own in shared memory, whatever their size. Q's is a factor of the row (softmax.cuh).
#pragma once
#include "common/ptx/async_copy.cuh"
#include "epilogue.cuh"
#include "rows.cuh"
#include "storage.cuh"

namespace fmha {

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
  for (int key = threadIdx.x & 31; key < kTileKV; key += 32) {
    const int token = block * kTileKV + key;
    const bool exists = token < tile.kv_len;
    ptx::copy_word_or_zero(&s.k_scales[stage][scale_place(key)], scales + (exists ? token >> sage.block_k_log2 : 0),
                           exists);
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

// Products of a warpgroup become logits that lack their row's factor. `scales`: of the block's keys.
template <class Products>
__device__ __forceinline__ void scale_by_keys(Logits& s, const Products& products, const float (&scales)[kTileKV]) {
  const float4* mine = reinterpret_cast<const float4*>(scales) + (threadIdx.x & 3);
#pragma unroll
  for (int keys = 0; keys < kTileKV / 16; ++keys) {
    const float4 scale = mine[4 * keys];
    const float of_column[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[8 * keys + i] = static_cast<float>(products[8 * keys + i]) * of_column[i / 4 * 2 + i % 2];
    }
  }
}

__device__ __forceinline__ void scale_by_channels(Output& o, const Params& params, int kv_head) {
  const float* scales = params.sage.scales_v + kv_head * kHeadDimV + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= scales[i / 4 * 8 + i % 2];
}

}  // namespace fmha
