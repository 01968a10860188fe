// A number for each head and channel over all tokens: the scale of value, or the mean of key.
//
// A block has some tokens of one head. Its results, one for each channel, are partial; the last block of a head to
// end joins those of all, always in the same order.
#include "common/ptx/grid.cuh"
#include "sage_quantize/columns.cuh"

namespace sage {

constexpr int kThreads = 256;
constexpr int kPartialsInFlight = 4;

// Infinity of 16 bits, sign aside. Magnitudes below it are finite.
template <class Element>
constexpr uint32_t kInfinity16 = 0x7f80;
template <>
constexpr uint32_t kInfinity16<__half> = 0x7c00;

// The largest finite magnitudes of a thread's channels.
template <class Element>
class Largest {
 public:
  __device__ __forceinline__ void add(const uint4& row) {
    const uint32_t pairs[] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) largest_[i] = __vmaxs2(largest_[i], (pairs[i] & 0x7fff7fff) + kShift);
  }

  __device__ __forceinline__ void get(float (&values)[kVector]) const {
    const uint4 pairs{largest_[0] - kShift, largest_[1] - kShift, largest_[2] - kShift, largest_[3] - kShift};
    unpack<Element>(pairs, values);
  }

  static __device__ __forceinline__ float join(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float result(float largest, int) { return scale_of(largest, kE4m3Max); }

 private:
  // Moves infinity and NaN to where 16-bit integers are negative, so that they never are the largest.
  static constexpr uint32_t kShift = (0x8000 - kInfinity16<Element>) * 0x10001;

  uint32_t largest_[kVector / 2] = {kShift, kShift, kShift, kShift};
};

// The sums of the finite values of a thread's channels.
template <class Element>
class Sum {
 public:
  __device__ __forceinline__ void add(const uint4& row) {
    float values[kVector];
    unpack<Element>(row, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums_[i] += zero_unless_finite(values[i]);
  }

  __device__ __forceinline__ void get(float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = sums_[i];
  }

  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
  static __device__ __forceinline__ float result(float sum, int tokens) { return sum / max(tokens, 1); }

 private:
  float sums_[kVector] = {};
};

// Where a thread stands in its block: 8 channels of the head, and which of the rows that the block has at a time.
struct Place {
  int lane;
  int slot;
  int slots;

  __device__ __forceinline__ explicit Place(int head_dim)
      : lane(threadIdx.x % (head_dim / kVector)),
        slot(threadIdx.x / (head_dim / kVector)),
        slots(kThreads / (head_dim / kVector)) {}
};

using Shared = float[kThreads * kVector];  // [slots, head_dim]

// Thread n gets channel n, joined over all slots.
template <class Join>
__device__ __forceinline__ float join_slots(const float (&values)[kVector], const Place& place, int head_dim,
                                            Shared& shared, Join join) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[threadIdx.x * kVector + i] = values[i];
  __syncthreads();
  float value = 0.0f;  // neutral for sums, and for maxima of magnitudes
  if (threadIdx.x < head_dim) {
    for (int slot = 0; slot < place.slots; ++slot) value = join(value, shared[slot * head_dim + threadIdx.x]);
  }
  return value;
}

// Whether all other blocks that share a counter have ended before, and what they wrote is visible. The counter is 0
// again after the last one.
__device__ __forceinline__ bool is_last(unsigned* counter, unsigned blocks) {
  __shared__ bool result;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(blocks - 1)
                 : "memory");
    result = before == blocks - 1;
  }
  __syncthreads();
  return result;
}

template <class Element, template <class> class Statistic>
__device__ __forceinline__ void reduce(const StatisticsParams& params, Shared& shared) {
  const int head_dim = params.format.head_dim, head = blockIdx.x, chunk = blockIdx.y, chunks = gridDim.y;
  const Place place(head_dim);
  const int row_vectors = params.heads * head_dim / kVector;
  const auto* input = static_cast<const uint4*>(params.input) + head * head_dim / kVector + place.lane;
  const int real = edge(params.edges, params.sequences, params.tokens);
  const int begin = chunk * params.chunk_tokens, end = min(begin + params.chunk_tokens, real);

  Statistic<Element> statistic;
  for (int first = begin + place.slot; first < end; first += kRows * place.slots) {
    uint4 rows[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = first + i * place.slots;
      if (token < end) rows[i] = __ldcg(input + static_cast<long long>(token) * row_vectors);
    }
#pragma unroll
    for (const uint4& row : rows) statistic.add(row);
  }
  float values[kVector];
  statistic.get(values);
  const auto join = [](float a, float b) { return Statistic<Element>::join(a, b); };
  const float partial = join_slots(values, place, head_dim, shared, join);

  ptx::grid_dependency_wait();  // the input was there before, see params.h; scratch may still be in use
  float* partials = params.partials + static_cast<long long>(head) * chunks * head_dim;
  if (threadIdx.x < head_dim) __stcg(partials + chunk * head_dim + threadIdx.x, partial);
  if (!is_last(params.counters + head, chunks)) return;

#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = 0.0f;
  for (int first = place.slot; first < chunks; first += kPartialsInFlight * place.slots) {
    float found[kPartialsInFlight][kVector];
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
      const int other = min(first + n * place.slots, chunks - 1);
      load8(partials + other * head_dim + place.lane * kVector, found[n]);
    }
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
      if (first + n * place.slots >= chunks) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = join(values[i], found[n][i]);
    }
  }
  const float total = join_slots(values, place, head_dim, shared, join);
  if (threadIdx.x < head_dim) params.results[head * head_dim + threadIdx.x] = Statistic<Element>::result(total, real);
}

template <template <class> class Statistic>
__device__ __forceinline__ void reduce(const StatisticsParams& params, Shared& shared) {
  if (params.format.is_fp16) {
    reduce<__half, Statistic>(params, shared);
  } else {
    reduce<__nv_bfloat16, Statistic>(params, shared);
  }
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 4)
    KERNEL_NAME(const __grid_constant__ sage::StatisticsParams params) {
  __shared__ sage::Shared shared;
  ptx::grid_launch_dependents();
  if (params.is_mean) {
    sage::reduce<sage::Sum>(params, shared);
  } else {
    sage::reduce<sage::Largest>(params, shared);
  }
}
