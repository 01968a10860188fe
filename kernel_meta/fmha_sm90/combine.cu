// Combines the parts of divided tiles: out = bmm2_scale * sum of 2^(m_p - m) sums_p / sum of 2^(m_p - m) l_p.
//
// gridDim.x slots at a time, kSlices blocks for each. Of a tile, the warps of all of its parts' blocks share the rows
// that exist, and the columns of a row where rows are fewer; the lanes that a warp's columns leave share the parts. The
// order of every sum is fixed by the numbers of parts and rows, so results repeat bit for bit.
#include "common/ptx/grid.cuh"
#include "parts.h"
#include "row_result.cuh"

namespace fmha {

// ABI "fmha_sm90_combine/1", packed by cubin_runtime/families/fmha_sm90.py.
struct CombineParams {
  DividedKeys divided;
  void* out;
  float* lse;  // or null
  const float* attention_sinks;
  const float* bmm2_scale_pointer;
  int64_t out_stride_token;  // elements
  int64_t out_stride_head;
  int64_t lse_stride_token;
  int64_t lse_stride_head;
  float bmm2_scale;
  int32_t head_dim_v;
  int32_t out_is_fp16;
  int32_t tile_rows;
  int32_t tile_tokens;  // per 64 rows, as in Params
  int32_t tile_heads;
};

constexpr int kWarps = 8;
constexpr int kSlices = 4;
constexpr int kInFlight = 4;  // parts that a lane loads at a time
constexpr int kLaneColumns = 4;
constexpr int kMostLanesLog2 = 5;   // that read a part together
constexpr int kLeastLanesLog2 = 2;  // 64 bytes of it
constexpr int kPacked = 64;         // rows of one consumer warpgroup

// What a lane has added up of its columns of a row.
struct Sum {
  float top = -kInfinity, l = 0.f;
  float4 x = {};

  static __device__ __forceinline__ float weight(float top, float new_top) {
    return top == -kInfinity ? 0.f : ptx::exp2_approx(top - new_top);
  }

  __device__ __forceinline__ void rescale_to(float new_top) {
    const float w = weight(top, new_top);
    l *= w;
    x = {x.x * w, x.y * w, x.z * w, x.w * w};
    top = new_top;
  }

  // What has a reference no higher than `top`. Sums of a part of which the row saw no key are 0 times its values, which
  // may be NaN.
  __device__ __forceinline__ void add(float its_top, float its_l, float4 y) {
    if (its_l == 0.f) return;
    const float w = weight(its_top, top);
    l = fmaf(w, its_l, l);
    x = {fmaf(w, y.x, x.x), fmaf(w, y.y, x.y), fmaf(w, y.z, x.z), fmaf(w, y.w, x.w)};
  }
};

// Parts first, first + step, ... of one row of the tile.
__device__ __forceinline__ Sum add_parts(const CombineParams& params, const Part& tile, int row, int group, int first,
                                         int step) {
  Sum sum;
  for (int begin = first; begin < tile.parts; begin += kInFlight * step) {
    float2 statistics[kInFlight];
    float4 x[kInFlight];
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) {
      const int part = begin + n * step;
      statistics[n] = {-kInfinity, 0.f};
      x[n] = {};
      if (part >= tile.parts) continue;
      const int at = (tile.first_slot + part) * params.tile_rows + row;
      statistics[n] = params.divided.statistics[at];
      x[n] = reinterpret_cast<const float4*>(params.divided.sums + at * params.head_dim_v)[group];
    }
    float top = sum.top;
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) top = fmaxf(top, statistics[n].x);
    sum.rescale_to(top);
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) sum.add(statistics[n].x, statistics[n].y, x[n]);
  }
  return sum;
}

// Adds what the other lanes have of these columns, in the first `lanes`.
__device__ __forceinline__ void add_lanes(Sum& sum, int lanes) {
  for (int distance = lanes; distance < 32; distance *= 2) {
    const float top = __shfl_xor_sync(~0u, sum.top, distance), l = __shfl_xor_sync(~0u, sum.l, distance);
    const float4 x = {__shfl_xor_sync(~0u, sum.x.x, distance), __shfl_xor_sync(~0u, sum.x.y, distance),
                      __shfl_xor_sync(~0u, sum.x.z, distance), __shfl_xor_sync(~0u, sum.x.w, distance)};
    sum.rescale_to(fmaxf(sum.top, top));
    sum.add(top, l, x);
  }
}

__device__ __forceinline__ uint2 pack(const CombineParams& params, float4 x) {
  if (params.out_is_fp16) return {ptx::pack_fp16x2(x.x, x.y), ptx::pack_fp16x2(x.z, x.w)};
  return {ptx::pack_bf16x2(x.x, x.y), ptx::pack_bf16x2(x.z, x.w)};
}

__device__ __forceinline__ void store(const CombineParams& params, const Part& tile, int token, int head, int group,
                                      const Sum& sum, float bmm2_scale) {
  const float* sinks = params.attention_sinks;
  const RowResult result = finish_row(sum.top, sum.l, sinks == nullptr ? nullptr : sinks + head);
  const float factor = result.factor * bmm2_scale;
  const int64_t row = tile.first_row + token;
  uint2* out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + row * params.out_stride_token +
                                        head * params.out_stride_head);
  out[group] = pack(params, {sum.x.x * factor, sum.x.y * factor, sum.x.z * factor, sum.x.w * factor});
  if (params.lse != nullptr && group == 0) {
    params.lse[row * params.lse_stride_token + head * params.lse_stride_head] = result.lse;
  }
}

// 1 << lanes_log2 groups of columns from `first_group` on, of one of the rows that exist: token by token, heads
// innermost.
__device__ __forceinline__ void combine(const CombineParams& params, const Part& tile, int row, int first_group,
                                        int lanes_log2, float bmm2_scale) {
  const int lane = threadIdx.x & 31, lanes = 1 << lanes_log2;
  const int group = first_group + (lane & (lanes - 1));
  const int token = ptx::divide_small(row, params.tile_heads), head = row - token * params.tile_heads;
  const int of_second = token >= params.tile_tokens;  // warpgroup
  const int packed = (kPacked - params.tile_tokens) * of_second + head * params.tile_tokens + token;

  Sum sum = add_parts(params, tile, packed, group, lane >> lanes_log2, 32 >> lanes_log2);
  add_lanes(sum, lanes);
  if (lane < lanes) store(params, tile, token, tile.head + head, group, sum, bmm2_scale);
}

// The share of one warp among `warps`.
__device__ __forceinline__ void combine(const CombineParams& params, const Part& tile, int warp, int warps,
                                        float bmm2_scale) {
  const int rows = min(tile.tokens, params.tile_rows / kPacked * params.tile_tokens) * params.tile_heads;
  const int groups = params.head_dim_v / kLaneColumns;  // of columns
  int lanes_log2 = kMostLanesLog2;
  while (lanes_log2 > kLeastLanesLog2 && rows * (groups >> lanes_log2) * 2 <= warps) --lanes_log2;
  const int slices = groups >> lanes_log2;
  for (int share = warp; share < rows * slices; share += warps) {
    const int row = ptx::divide_small(share, slices);
    combine(params, tile, row, (share - row * slices) << lanes_log2, lanes_log2, bmm2_scale);
  }
}

}  // namespace fmha

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(32 * fmha::kWarps, 4)
    KERNEL_NAME(const __grid_constant__ fmha::CombineParams params) {
  using namespace fmha;
  ptx::grid_launch_dependents();
  // The attention kernel lets this one start before it has itself waited for what comes before it: until then, no
  // memory may be read, lengths and scales included.
  ptx::grid_dependency_wait();
  const float bmm2_scale = params.bmm2_scale_pointer ? *params.bmm2_scale_pointer : params.bmm2_scale;
  const int count = *params.divided.count;
  for (int slot = blockIdx.x;; slot += gridDim.x) {
    // Behind the last part there is memory, too. One condition of both, so that neither load waits for the other: where
    // there is a part, its tile has some.
    const Part tile = params.divided.parts[slot];
    if ((slot >= count) | (tile.parts == 0)) return;
    const int slice = tile.part * kSlices + blockIdx.y;
    combine(params, tile, slice * kWarps + (threadIdx.x >> 5), tile.parts * kSlices * kWarps, bmm2_scale);
  }
}
