// Partial results of a tile whose keys are divided among blocks, and their combination by the last block to finish.
//
// Which block that is varies; the order in which it adds does not, so results repeat bit for bit.
#pragma once
#include "epilogue.cuh"
#include "tickets.cuh"

namespace fmha {

// A part, in the accumulators' own layout: [value][thread], the output first, then m and l of the thread's rows.
constexpr int kPartialValues = kHeadDimV / 2 + 2 * kRowsPerThread;
constexpr int kPartialFloats = kPartialValues * 128;

__device__ __forceinline__ float* partial(const Params& params, int slot) {
  return params.partials + static_cast<int64_t>(slot) * kPartialFloats + (threadIdx.x & 127);
}

__device__ __forceinline__ void store_partial(const Params& params, const PendingTile& tile, const Rows& rows,
                                              const Output& o, const Softmax& softmax) {
  float* part = partial(params, tile.slot + tile.part);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (!rows.valid[r]) continue;
    const float sum = softmax.l[r];
    part[(kHeadDimV / 2 + r) * 128] = softmax.m[r];
    part[(kHeadDimV / 2 + kRowsPerThread + r) * 128] = sum;
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j) {
      part[(4 * j + 2 * r) * 128] = o[4 * j + 2 * r];
      part[(4 * j + 2 * r + 1) * 128] = o[4 * j + 2 * r + 1];
    }
  }
}

// Whether this warpgroup finished the last part. `barrier` is a named barrier of its 128 threads.
__device__ __forceinline__ bool arrive_last(const Params& params, const PendingTile& tile, int& shared, int barrier) {
  __threadfence();
  ptx::named_barrier_sync(barrier, 128);
  if ((threadIdx.x & 127) == 0) {
    const TicketCounter arrivals(params.arrivals + tile.slot, params.launch_tag);
    shared = arrivals.draw();
    if (shared == tile.parts - 1) arrivals.release();
    __threadfence();
  }
  ptx::named_barrier_sync(barrier, 128);
  const bool last = shared == tile.parts - 1;
  ptx::named_barrier_sync(barrier, 128);  // `shared` is written again for the next tile
  return last;
}

// All parts of the tile into o, m and l. Latency is all that counts here: the loads of several parts are in flight
// together, and a part without keys, whose values are zeros, gets weight 0 instead of a branch.
__device__ __forceinline__ void combine(const Params& params, const PendingTile& tile, const Rows& rows, Output& o,
                                        Softmax& softmax) {
  const float* first = partial(params, tile.slot);
  softmax.clear();
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.f;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (!rows.valid[r]) continue;
    const float* m = first + (kHeadDimV / 2 + r) * 128;
    const float* l = first + (kHeadDimV / 2 + kRowsPerThread + r) * 128;
#pragma unroll 8
    for (int part = 0; part < tile.parts; ++part) softmax.m[r] = fmaxf(softmax.m[r], __ldcg(m + part * kPartialFloats));
#pragma unroll 4
    for (int part = 0; part < tile.parts; ++part) {
      const float reference = __ldcg(m + part * kPartialFloats);
      const float weight =
          reference == -kInfinity ? 0.f : ptx::exp2_approx((reference - softmax.m[r]) * softmax.scale);
      softmax.l[r] = fmaf(weight, __ldcg(l + part * kPartialFloats), softmax.l[r]);
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
#pragma unroll
        for (int i = 4 * j + 2 * r; i < 4 * j + 2 * r + 2; ++i) {
          o[i] = fmaf(weight, __ldcg(first + part * kPartialFloats + i * 128), o[i]);
        }
      }
    }
  }
}

}  // namespace fmha
