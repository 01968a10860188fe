// A number for each head and channel over all tokens: the scale of value, or the mean of key.
//
// A block has some tokens of one head. Its results, one for each channel, are partial; the last block of a head to
// end joins those of all, always in the same order.
#include "common/ptx/grid.cuh"
#include "common/tickets.cuh"
#include "sage_quantize/columns.cuh"

namespace sage {

constexpr int kThreads = 128;
constexpr int kPartialsInFlight = 8;

// Infinity of 16 bits, sign aside. Magnitudes below it are finite.
template <class Element>
constexpr uint32_t kInfinity16 = 0x7f80;
template <>
constexpr uint32_t kInfinity16<__half> = 0x7c00;

// The largest finite magnitudes of a thread's channels.
template <class Element>
class Largest {
 public:
  __device__ __forceinline__ void add(const uint4 (&rows)[kRows]) {
#pragma unroll
    for (const uint4& row : rows) {
      const uint32_t pairs[] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) largest_[i] = __vmaxs2(largest_[i], (pairs[i] & 0x7fff7fff) + kShift);
    }
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
  __device__ __forceinline__ void add(const uint4 (&rows)[kRows]) {
    if (is_finite(rows)) return add(rows, [](float x) { return x; });
    add(rows, zero_unless_finite);
  }

  __device__ __forceinline__ void get(float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = sums_[i];
  }

  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
  static __device__ __forceinline__ float result(float sum, int tokens) { return sum / max(tokens, 1); }

 private:
  static __device__ __forceinline__ bool is_finite(const uint4 (&rows)[kRows]) {
    uint4 largest = rows[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) largest = larger_magnitudes<Element>(largest, rows[i]);
    return largest_bits<Element>(largest) < kInfinityBits;
  }

  template <class Filter>
  __device__ __forceinline__ void add(const uint4 (&rows)[kRows], Filter filter) {
#pragma unroll
    for (const uint4& row : rows) {
      float values[kVector];
      unpack<Element>(row, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums_[i] += filter(values[i]);
    }
  }

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

// [slots, head_dim]
__device__ __forceinline__ float* shared_values() {
  __shared__ float values[kThreads * kVector];
  return values;
}

// Joins what the slots have of each channel and stores it.
template <class Join, class Store>
__device__ __forceinline__ void join_slots(const float (&values)[kVector], const Place& place, int head_dim, Join join,
                                           Store store) {
  float* shared = shared_values();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[threadIdx.x * kVector + i] = values[i];
  __syncthreads();
  for (int channel = threadIdx.x; channel < head_dim; channel += kThreads) {
    float value = 0.0f;  // neutral for sums, and for maxima of magnitudes
    for (int slot = 0; slot < place.slots; ++slot) value = join(value, shared[slot * head_dim + channel]);
    store(channel, value);
  }
}

// What the tokens of a chunk give for a thread's channels.
template <class Element, class Statistic>
__device__ __forceinline__ Statistic over_chunk(const ChannelTensor& tensor, const Place& place, int head, int begin,
                                                int end) {
  const long long row_vectors = tensor.heads * tensor.head_dim / kVector;
  const auto* input = static_cast<const uint4*>(tensor.input) + head * tensor.head_dim / kVector + place.lane;
  Statistic statistic;
  for (int first = begin + place.slot; first < end; first += kRows * place.slots) {
    uint4 rows[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = first + i * place.slots;
      if (token < end) rows[i] = __ldcg(input + token * row_vectors);
    }
    statistic.add(rows);
  }
  return statistic;
}

// Joins the partial results of a head's chunks for a thread's channels, those of every slot's own chunks.
template <class Join>
__device__ __forceinline__ void join_chunks(const ChannelTensor& tensor, const Place& place, const float* partials,
                                            float (&values)[kVector], Join join) {
  for (int first = place.slot; first < tensor.chunks; first += kPartialsInFlight * place.slots) {
    float found[kPartialsInFlight][kVector];
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
      const int chunk = min(first + n * place.slots, tensor.chunks - 1);
      load8(partials + chunk * tensor.head_dim + place.lane * kVector, found[n]);
    }
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
      if (first + n * place.slots >= tensor.chunks) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = join(values[i], found[n][i]);
    }
  }
}

// The chunk's place among those of the head that have come here; what the earlier ones wrote before is visible then.
__device__ __forceinline__ int arrive(const common::TicketCounter& tickets) {
  __shared__ int ticket;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    ticket = tickets.draw_first();
    __threadfence();
  }
  __syncthreads();
  return ticket;
}

// Chunk after chunk, each of all heads.
template <class Element, template <class> class Statistic>
__device__ __forceinline__ void reduce(const ChannelTensor& tensor, uint32_t tag, int block) {
  const int chunk = block / tensor.heads, head = block % tensor.heads;
  const int head_dim = tensor.head_dim;
  const Place place(head_dim);
  const int real = edge(tensor.edges, tensor.sequences, tensor.tokens);
  const int begin = chunk * tensor.chunk_tokens, end = min(begin + tensor.chunk_tokens, real);
  float* partials = tensor.partials + static_cast<long long>(head) * tensor.chunks * head_dim;
  const auto join = [](float a, float b) { return Statistic<Element>::join(a, b); };

  float values[kVector];
  over_chunk<Element, Statistic<Element>>(tensor, place, head, begin, end).get(values);
  join_slots(values, place, head_dim, join,
             [&](int channel, float value) { __stcg(partials + chunk * head_dim + channel, value); });
  const common::TicketCounter tickets(tensor.tickets + head, tag);
  if (arrive(tickets) + 1 < tensor.chunks) return;
  if (threadIdx.x == 0) tickets.release();

#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = 0.0f;
  join_chunks(tensor, place, partials, values, join);
  join_slots(values, place, head_dim, join, [&](int channel, float value) {
    tensor.results[head * head_dim + channel] = Statistic<Element>::result(value, real);
  });
}

template <class Element>
__device__ __forceinline__ void reduce(const StatisticsParams& params) {
  const int block = blockIdx.x, value_blocks = params.value_scales.chunks * params.value_scales.heads;
  if (block < value_blocks) {
    reduce<Element, Largest>(params.value_scales, params.tag, block);
  } else {
    reduce<Element, Sum>(params.key_means, params.tag, block - value_blocks);
  }
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 5)
    KERNEL_NAME(const __grid_constant__ sage::StatisticsParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (params.is_fp16) {
    sage::reduce<__half>(params);
  } else {
    sage::reduce<__nv_bfloat16>(params);
  }
}
