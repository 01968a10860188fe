// Blocks of tokens: which tokens a column of scales is about, and quantising some columns.
#pragma once
#include "sage_quantize/numbers.cuh"
#include "sage_quantize/params.h"

namespace sage {

constexpr int kRows = 8;  // that a thread loads at a time, if a block has no more: enough bytes in flight

// First token of a sequence, or the end of the last one, never outside the tensor.
__device__ __forceinline__ int edge(const int* edges, int sequence, int tokens) {
  if (edges == nullptr) return sequence ? tokens : 0;
  return min(max(__ldg(edges + sequence), 0), tokens);
}

// Rows of some consecutive columns, as bits: row r of column c is bit c * kBlock + r.
template <int kCount>
struct Rows {
  int begins[kCount];  // first row of each column
  unsigned real;       // belong to sequences
  unsigned written;    // exist
};

// Which rows columns have. Rows behind the last sequence count as a sequence of padding, so that every row has a
// column; some columns have no rows, and those of padding may lie behind the last scale.
template <int kBlock>
class Walk {
 public:
  __device__ __forceinline__ Walk(const BlockTensor& tensor, int column) : tensor_(tensor) {
    int low = 0, high = tensor.sequences;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (start(middle) / kBlock + middle <= column) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    enter(low);
  }

  template <int kCount>
  __device__ __forceinline__ Rows<kCount> rows(int column) {
    Rows<kCount> rows{};
    if (column + kCount <= next_column_) {  // mostly: nothing more to look up
      const int first = add(column, kCount * kBlock, 0, rows.real, rows.written);
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows.begins[i] = first + i * kBlock;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        while (next_column_ <= column + i) enter(sequence_ + 1);
        rows.begins[i] = add(column + i, kBlock, i * kBlock, rows.real, rows.written);
      }
    }
    return rows;
  }

 private:
  __device__ __forceinline__ int start(int sequence) const {
    return edge(tensor_.edges, sequence, tensor_.tokens);
  }

  __device__ __forceinline__ void enter(int sequence) {
    is_padding_ = sequence == tensor_.sequences;
    sequence_ = sequence;
    begin_ = start(sequence);
    end_ = is_padding_ ? tensor_.tokens : start(sequence + 1);
    column_ = begin_ / kBlock + sequence;
    next_column_ = is_padding_ ? INT_MAX : end_ / kBlock + sequence + 1;
  }

  // Up to `most` rows, those that the sequence has from a column on, as bits from `bit` on. Returns the first row.
  __device__ __forceinline__ int add(int column, int most, int bit, unsigned& real, unsigned& written) const {
    const long long begin = begin_ + static_cast<long long>(column - column_) * kBlock;
    const int count = static_cast<int>(min(max(end_ - begin, 0ll), static_cast<long long>(most)));
    const unsigned bits = ((1u << count) - 1) << bit;
    written |= bits;
    if (!is_padding_) real |= bits;
    return static_cast<int>(begin);
  }

  const BlockTensor& tensor_;
  int sequence_;
  bool is_padding_;
  int begin_;
  int end_;
  int column_;       // the sequence's first one
  int next_column_;  // that of the sequence behind it
};

// The largest of each column over the lanes of a head. A lane has a value for every column and gets the result for
// one: its lane % kCount. Each step halves what a lane still answers for.
template <int kCount>
__device__ __forceinline__ uint32_t largest_of_head(uint32_t (&values)[kCount], int head_lanes) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool is_upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const uint32_t kept = is_upper ? values[i + half] : values[i];
      const uint32_t given = is_upper ? values[i] : values[i + half];
      values[i] = max(kept, __shfl_xor_sync(~0u, given, half));
    }
  }
  for (int lane = kCount; lane < head_lanes; lane *= 2) {
    values[0] = max(values[0], __shfl_xor_sync(~0u, values[0], lane));
  }
  return values[0];
}

// What one thread has of some consecutive columns: 8 channels of every row, in registers.
template <class Element, int kBlock>
class Columns {
 public:
  static constexpr int kCount = kBlock < kRows ? kRows / kBlock : 1;
  static_assert(kCount <= 64 / kVector, "a lane of a head answers for one column");

  // `vector` counts 8 channels each through a row of all heads.
  __device__ __forceinline__ Columns(const BlockTensor& tensor, int first_column, int vector, int row_vectors)
      : tensor_(tensor),
        first_column_(first_column),
        vector_(vector),
        row_vectors_(row_vectors),
        input_(static_cast<const char*>(tensor.input) + vector * sizeof(uint4)),
        output_(static_cast<char*>(tensor.output) + vector * sizeof(uint2)) {
    where_ = Walk<kBlock>(tensor, first_column).template rows<kCount>(first_column);
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
#pragma unroll
      for (int row = 0; row < kBlock; ++row) {
        uint4& loaded = rows_[column * kBlock + row];
        loaded = uint4{};
        if (!is_real(column, row)) continue;
        loaded = __ldcs(reinterpret_cast<const uint4*>(input_ + token(column, row) * input_stride()));
      }
    }
  }

  // Writes scales and rows. The threads of a warp have the channels of whole heads, and all of them take part.
  __device__ __forceinline__ void quantize(const Format& format) const {
    uint32_t amax[kCount];
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
      uint4 largest = rows_[column * kBlock];
#pragma unroll
      for (int row = 1; row < kBlock; ++row) {
        largest = larger_magnitudes<Element>(largest, rows_[column * kBlock + row]);
      }
      amax[column] = largest_bits<Element>(largest);
    }
    write(amax, [](float (&)[kVector]) {}, format);
  }

  // The same of the rows without their means. Rounding keeps the order of differences, so that the largest is that of
  // an extreme row.
  __device__ __forceinline__ void quantize(const float (&means)[kVector], const Format& format) {
    const auto centre = [&](float (&values)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] -= means[i];
    };
    uint32_t amax[kCount] = {};
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
      const uint4 first = rows_[column * kBlock];
      uint4 low = first, high = first;
#pragma unroll
      for (int row = 1; row < kBlock; ++row) {
        const uint4 other = select(is_real(column, row), rows_[column * kBlock + row], first);
        low = lesser<Element>(low, other);
        high = greater<Element>(high, other);
      }
      float lows[kVector], highs[kVector];
      unpack<Element>(low, lows);
      unpack<Element>(high, highs);
      centre(lows);
      centre(highs);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        amax[column] = max(amax[column], max(magnitude_bits(lows[i]), magnitude_bits(highs[i])));
      }
      if (!is_real(column, 0)) amax[column] = 0;
    }
    // Hides that `write` computes the same again: the compiler would keep all differences, in local memory.
#pragma unroll
    for (uint4& row : rows_) asm volatile("" : "+r"(row.x), "+r"(row.y), "+r"(row.z), "+r"(row.w));
    write(amax, centre, format);
  }

 private:
  template <class Centre>
  __device__ __forceinline__ void write(uint32_t (&amax)[kCount], Centre centre, const Format& format) const {
    // A block with NaN or infinity has no scale. Saying so leaves a trace in the result of its sequence only.
    const int head_lanes = tensor_.head_dim / kVector;
    const uint32_t largest = largest_of_head(amax, head_lanes);
    const bool is_finite = largest < kInfinityBits;
    const float scale = scale_of(__uint_as_float(largest), format.range);
    const int lane = vector_ & (head_lanes - 1);
    const float inverse = is_finite && is_real(lane % kCount, 0) ? 1.0f / scale : 0.0f;
    const int head = vector_ >> (__ffs(head_lanes) - 1);
    const int index = first_column_ + lane;
    if (lane < kCount && index < tensor_.columns) {
      tensor_.scales[static_cast<long long>(head) * tensor_.columns + index] =
          is_finite ? scale : __uint_as_float(0x7fffffff);
    }
    if (format.is_e4m3) {
      write_rows<true>(inverse, centre);
    } else {
      write_rows<false>(inverse, centre);
    }
  }

  // `inverse` is that of column lane % kCount, 0 where there is none, and for padding.
  template <bool kIsE4m3, class Centre>
  __device__ __forceinline__ void write_rows(float inverse, Centre centre) const {
#pragma unroll
    for (int column = 0; column < kCount; ++column) {
      const float factor = __shfl_sync(~0u, inverse, column, kCount);
#pragma unroll
      for (int row = 0; row < kBlock; ++row) {
        if (!(where_.written >> (column * kBlock + row) & 1)) continue;  // before the work: needs fewer registers
        float values[kVector];
        unpack<Element>(rows_[column * kBlock + row], values);
        centre(values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = __fmul_rn(values[i], factor);
        const uint2 packed = pack<kIsE4m3>(values);
        auto* address = reinterpret_cast<uint2*>(output_ + token(column, row) * output_stride());
        __stcs(address, factor != 0.0f ? packed : uint2{});
      }
    }
  }

  __device__ __forceinline__ bool is_real(int column, int row) const {
    return where_.real >> (column * kBlock + row) & 1;
  }

  __device__ __forceinline__ unsigned long long token(int column, int row) const {
    return static_cast<unsigned>(where_.begins[column] + row);
  }
  __device__ __forceinline__ unsigned input_stride() const { return row_vectors_ * sizeof(uint4); }
  __device__ __forceinline__ unsigned output_stride() const { return row_vectors_ * sizeof(uint2); }

  const BlockTensor& tensor_;
  int first_column_;
  int vector_;
  int row_vectors_;
  const char* input_;  // of the first token
  char* output_;
  Rows<kCount> where_;
  uint4 rows_[kCount * kBlock];
};

// Calls work.template operator()<kBlock>() for the size of a tensor's blocks.
template <class Work>
__device__ __forceinline__ void dispatch(int block, const Work& work) {
  switch (block) {
    case 1: return work.template operator()<1>();
    case 4: return work.template operator()<4>();
    default: return work.template operator()<16>();
  }
}

}  // namespace sage
