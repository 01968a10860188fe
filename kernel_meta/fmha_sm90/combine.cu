// Combines the parts of divided tiles: out = bmm2_scale * sum of 2^(m_p - m) sums_p / sum of 2^(m_p - m) l_p.
//
// kSlices blocks per slot. The blocks of a tile's parts share its rows evenly, so all have the same work; the order of
// every sum is fixed by the numbers of parts and rows, so results repeat bit for bit.
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
constexpr int kLaneColumns = 4;
constexpr int kWarpColumns = 32 * kLaneColumns;
constexpr int kMaxHeadDim = 256;
constexpr int kPacked = 64;  // rows of one consumer warpgroup

// What a warp has added up of a row.
struct Sum {
  float top = -kInfinity, l = 0.f;
  float4 columns[kMaxHeadDim / kWarpColumns] = {};

  __device__ __forceinline__ void rescale_to(float new_top) {
    const float weight = top == -kInfinity ? 0.f : ptx::exp2_approx(top - new_top);
    l *= weight;
    for (float4& c : columns) c = {c.x * weight, c.y * weight, c.z * weight, c.w * weight};
    top = new_top;
  }

  __device__ __forceinline__ void add(float weight, int i, float4 x) {
    float4& c = columns[i];
    c = {fmaf(weight, x.x, c.x), fmaf(weight, x.y, c.y), fmaf(weight, x.z, c.z), fmaf(weight, x.w, c.w)};
  }
};

struct Shared {
  float2 statistics[kWarps];
  float4 columns[kWarps][kMaxHeadDim / kLaneColumns];
};

// Parts first, first + step, ... of one row of the tile.
template <int kColumnGroups>
__device__ __forceinline__ Sum add_parts(const CombineParams& params, const Part& tile, int row, int first, int step) {
  constexpr int kInFlight = 4 / kColumnGroups;
  Sum sum;
  for (int begin = first; begin < tile.parts; begin += kInFlight * step) {
    float2 statistics[kInFlight];
    float4 x[kInFlight][kColumnGroups];
    float top = sum.top;
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) {
      const int part = begin + n * step;
      statistics[n] = {-kInfinity, 0.f};
      if (part >= tile.parts) continue;
      const int at = (tile.first_slot + part) * params.tile_rows + row;
      statistics[n] = params.divided.statistics[at];
      const float4* sums = reinterpret_cast<const float4*>(params.divided.sums + at * params.head_dim_v);
#pragma unroll
      for (int i = 0; i < kColumnGroups; ++i) x[n][i] = sums[(threadIdx.x & 31) + 32 * i];
    }
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) top = fmaxf(top, statistics[n].x);
    if (top == -kInfinity) continue;
    sum.rescale_to(top);
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) {
      if (statistics[n].x == -kInfinity) continue;
      const float weight = ptx::exp2_approx(statistics[n].x - top);
      sum.l = fmaf(weight, statistics[n].y, sum.l);
#pragma unroll
      for (int i = 0; i < kColumnGroups; ++i) sum.add(weight, i, x[n][i]);
    }
  }
  return sum;
}

__device__ __forceinline__ uint2 pack(const CombineParams& params, float4 x) {
  if (params.out_is_fp16) return {ptx::pack_fp16x2(x.x, x.y), ptx::pack_fp16x2(x.z, x.w)};
  return {ptx::pack_bf16x2(x.x, x.y), ptx::pack_bf16x2(x.z, x.w)};
}

template <int kColumnGroups>
__device__ __forceinline__ void store_row(const CombineParams& params, const Part& tile, int token, int head,
                                          const Sum& sum, float bmm2_scale) {
  const int lane = threadIdx.x & 31;
  const float* sinks = params.attention_sinks;
  const RowResult result = finish_row(sum.top, sum.l, sinks == nullptr ? nullptr : sinks + head);
  const float factor = result.factor * bmm2_scale;
  const int64_t row = tile.first_row + token;
  uint2* out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + row * params.out_stride_token +
                                        head * params.out_stride_head);
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) {
    const float4 x = sum.columns[i];
    out[lane + 32 * i] = pack(params, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
  }
  if (params.lse != nullptr && lane == 0) {
    params.lse[row * params.lse_stride_token + head * params.lse_stride_head] = result.lse;
  }
}

// Adds what the other warps of the row have to the first one's.
template <int kColumnGroups>
__device__ __forceinline__ void add_warps(Sum& sum, Shared& shared, int member, int warps) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  shared.statistics[warp] = {sum.top, sum.l};
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) shared.columns[warp][lane + 32 * i] = sum.columns[i];
  __syncthreads();
  if (member == 0) {
    for (int other = warp + 1; other < warp + warps; ++other) {
      const float2 statistics = shared.statistics[other];
      if (statistics.x == -kInfinity) continue;
      sum.rescale_to(fmaxf(sum.top, statistics.x));
      const float weight = ptx::exp2_approx(statistics.x - sum.top);
      sum.l = fmaf(weight, statistics.y, sum.l);
#pragma unroll
      for (int i = 0; i < kColumnGroups; ++i) sum.add(weight, i, shared.columns[other][lane + 32 * i]);
    }
  }
  __syncthreads();
}

template <int kColumnGroups>
__device__ __forceinline__ void combine(const CombineParams& params, const Part& tile, Shared& shared) {
  const float bmm2_scale = params.bmm2_scale_pointer ? *params.bmm2_scale_pointer : params.bmm2_scale;
  const int slice = tile.part * kSlices + blockIdx.y, slices = tile.parts * kSlices;
  const int first_row = params.tile_rows * slice / slices;
  const int rows = params.tile_rows * (slice + 1) / slices - first_row;

  // So many warps share a row that none is idle.
  int warps_per_row = kWarps;
  while (warps_per_row > 1 && warps_per_row * rows > kWarps) warps_per_row /= 2;
  const int warp = threadIdx.x >> 5;
  const int member = warp % warps_per_row;

  for (int done = 0; done < rows; done += kWarps / warps_per_row) {
    const int row = done + warp / warps_per_row;
    const int packed = (first_row + row) % kPacked;
    const int head = packed / params.tile_tokens;
    const int token = packed - head * params.tile_tokens + (first_row + row) / kPacked * params.tile_tokens;
    const bool valid = row < rows && head < params.tile_heads && token < tile.tokens;

    Sum sum;
    if (valid) sum = add_parts<kColumnGroups>(params, tile, first_row + row, member, warps_per_row);
    if (warps_per_row > 1) add_warps<kColumnGroups>(sum, shared, member, warps_per_row);
    if (valid && member == 0) store_row<kColumnGroups>(params, tile, token, tile.head + head, sum, bmm2_scale);
  }
}

}  // namespace fmha

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(32 * fmha::kWarps, 4)
    KERNEL_NAME(const __grid_constant__ fmha::CombineParams params) {
  __shared__ fmha::Shared shared;
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  // Both loads at once: behind the last part there is memory, too.
  const fmha::Part part = params.divided.parts[blockIdx.x];
  if (blockIdx.x >= *params.divided.count) return;
  if (params.head_dim_v > fmha::kWarpColumns) {
    fmha::combine<2>(params, part, shared);
  } else {
    fmha::combine<1>(params, part, shared);
  }
}
