// Blocks of tokens: which tokens a column of scales is about, and quantising some columns.
#pragma once
#include "sage_quantize/numbers.cuh"
#include "sage_quantize/params.h"

namespace sage {

// First token of a sequence, or the end of the last one, never outside the tensor.
__device__ __forceinline__ int edge(const int* edges, int sequence, int tokens) {
  if (edges == nullptr) return sequence ? tokens : 0;
  return min(max(__ldg(edges + sequence), 0), tokens);
}

// The rows of a column: `tokens` of them are real, and `rows` are written.
struct Span {
  int begin;
  int tokens;
  int rows;
};

// Columns in order. Rows behind the last sequence count as a sequence of padding, so that every row has a column;
// some columns have no rows, and those of padding may lie behind the last scale.
template <int kBlock>
class Walk {
 public:
  __device__ Walk(const BlockTensor& tensor, int column) : tensor_(tensor), column_(column) {
    int low = 0, high = tensor.sequences;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_column(middle) <= column) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    sequence_ = low;
  }

  __device__ __forceinline__ Span next() {
    while (sequence_ < tensor_.sequences && first_column(sequence_ + 1) <= column_) ++sequence_;
    const bool is_padding = sequence_ == tensor_.sequences;
    const long long local = static_cast<long long>(column_ - first_column(sequence_)) * kBlock;
    const long long begin = start(sequence_) + local;
    const long long end = is_padding ? tensor_.tokens : start(sequence_ + 1);
    const int rows = static_cast<int>(min(max(end - begin, 0ll), static_cast<long long>(kBlock)));
    ++column_;
    return {static_cast<int>(begin), is_padding ? 0 : rows, rows};
  }

 private:
  __device__ __forceinline__ int start(int sequence) const {
    return edge(tensor_.edges, sequence, tensor_.tokens);
  }
  __device__ __forceinline__ int first_column(int sequence) const { return start(sequence) / kBlock + sequence; }

  const BlockTensor& tensor_;
  int column_;
  int sequence_;
};

// What one thread has of some consecutive columns: 8 channels of every row, in registers.
template <class Element, int kBlock>
class Columns {
 public:
  static constexpr int kCount = kBlock < 8 ? 8 / kBlock : 1;  // enough loads in flight

  // `vector` counts 8 channels each through a row of all heads. The last reader of the input says so.
  __device__ __forceinline__ Columns(const BlockTensor& tensor, int first_column, int vector, int row_vectors,
                                     bool is_last_use)
      : tensor_(tensor), first_column_(first_column), vector_(vector), row_vectors_(row_vectors) {
    Walk<kBlock> walk(tensor, first_column);
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
      spans_[column] = walk.next();
#pragma unroll
      for (int row = 0; row < kBlock; ++row) {
        uint4& loaded = rows_[column * kBlock + row];
        loaded = uint4{};
        if (row >= spans_[column].tokens) continue;
        const auto* address = static_cast<const uint4*>(tensor.input) + offset(column, row);
        loaded = is_last_use ? __ldcs(address) : __ldcg(address);
      }
    }
  }

  // Adds the finite values of the real rows.
  __device__ __forceinline__ void add_to(float (&sums)[kVector]) const {
#pragma unroll
    for (const uint4& row : rows_) {  // rows that are not real are zero
      float values[kVector];
      unpack<Element>(row, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += zero_unless_finite(values[i]);
    }
  }

  // Writes scales and rows. The threads of a warp have the channels of whole heads, and all of them take part.
  __device__ __forceinline__ void quantize(const float (&means)[kVector], const Format& format) const {
    const int head_lanes = format.head_dim / kVector;
    const int head = vector_ / head_lanes;
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
      uint32_t amax = 0;
#pragma unroll
      for (int row = 0; row < kBlock; ++row) {
        if (row >= spans_[column].tokens) continue;
        float values[kVector];
        centred(column, row, means, values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) amax = max(amax, magnitude_bits(values[i]));
      }
      for (int lane = head_lanes / 2; lane > 0; lane /= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, lane));

      // A block with NaN or infinity has no scale. Saying so leaves a trace in the result of its sequence only.
      const bool is_finite = amax < kInfinityBits;
      const float scale = scale_of(__uint_as_float(amax), format.range);
      const float inverse = 1.0f / scale;
#pragma unroll
      for (int row = 0; row < kBlock; ++row) {
        if (row >= spans_[column].rows) continue;
        uint2 packed{};
        if (is_finite && row < spans_[column].tokens) {
          float values[kVector];
          centred(column, row, means, values);
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] = __fmul_rn(values[i], inverse);
          packed = pack(values, format.is_e4m3);
        }
        __stcs(static_cast<uint2*>(tensor_.output) + offset(column, row), packed);
      }
      const int index = first_column_ + column;
      if (vector_ % head_lanes == 0 && index < tensor_.columns) {
        tensor_.scales[static_cast<long long>(head) * tensor_.columns + index] =
            is_finite ? scale : __uint_as_float(0x7fffffff);
      }
    }
  }

 private:
  __device__ __forceinline__ long long offset(int column, int row) const {
    return static_cast<long long>(spans_[column].begin + row) * row_vectors_ + vector_;
  }

  __device__ __forceinline__ void centred(int column, int row, const float (&means)[kVector],
                                          float (&values)[kVector]) const {
    unpack<Element>(rows_[column * kBlock + row], values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] -= means[i];
  }

  const BlockTensor& tensor_;
  int first_column_;
  int vector_;
  int row_vectors_;
  Span spans_[kCount];
  uint4 rows_[kCount * kBlock];
};

// Calls work.template operator()<Element, kBlock>() for the types of a tensor.
template <class Work>
__device__ __forceinline__ void dispatch(int block, bool is_fp16, const Work& work) {
  const auto with_element = [&]<class Element>() {
    switch (block) {
      case 1: return work.template operator()<Element, 1>();
      case 4: return work.template operator()<Element, 4>();
      default: return work.template operator()<Element, 16>();
    }
  };
  if (is_fp16) {
    with_element.template operator()<__half>();
  } else {
    with_element.template operator()<__nv_bfloat16>();
  }
}

}  // namespace sage
