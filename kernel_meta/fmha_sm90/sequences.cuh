// A warp looks at up to 32 sequences, one a lane.
#pragma once
#include "config.h"
#include "params.h"

namespace fmha {

struct Sequence {
  int q_start, q_len;    // rows of the query tensor
  int kv_start, kv_len;  // rows of the key tensor
  int number;            // Sage: in the batch
};

// No sequence, or none inside the tensors: lengths 0.
__device__ __forceinline__ Sequence load_sequence(const Params& params, int sequence) {
  if (sequence >= params.batch_size) return {};
  Sequence loaded;
  loaded.q_start = min(max(params.cum_seq_lens_q[sequence], 0), params.total_q);
  loaded.q_len = max(0, min(params.cum_seq_lens_q[sequence + 1], params.total_q) - loaded.q_start);
  loaded.kv_start = min(max(params.cum_seq_lens_kv[sequence], 0), params.total_kv);
  loaded.kv_len = max(0, min(params.cum_seq_lens_kv[sequence + 1], params.total_kv) - loaded.kv_start);
  if constexpr (kSage) loaded.number = sequence;
  return loaded;
}

__device__ __forceinline__ Sequence of_lane(const Sequence& sequence, int lane) {
  const int number = kSage ? __shfl_sync(~0u, sequence.number, lane) : 0;
  return {__shfl_sync(~0u, sequence.q_start, lane), __shfl_sync(~0u, sequence.q_len, lane),
          __shfl_sync(~0u, sequence.kv_start, lane), __shfl_sync(~0u, sequence.kv_len, lane), number};
}

// Orders the first `count` lanes' sequences by their number of keys, most first, equal ones as they were.
__device__ __forceinline__ void sort_by_keys(Sequence& sequence, int count) {
  const int lane = threadIdx.x & 31;
  const int keys = lane < count ? sequence.kv_len : -1;
  const int next = __shfl_down_sync(~0u, keys, 1);
  if (__all_sync(~0u, lane == 31 || keys >= next)) return;
  int rank = 0;
#pragma unroll 4
  for (int other = 0; other < count; ++other) {
    const int others = __shfl_sync(~0u, keys, other);
    rank += others > keys || (others == keys && other < lane);
  }
  int source = lane;
#pragma unroll 4
  for (int other = 0; other < count; ++other) {
    if (__shfl_sync(~0u, rank, other) == lane) source = other;
  }
  sequence = of_lane(sequence, source);
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ int sum_through_lane(int value) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const int below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

}  // namespace fmha
