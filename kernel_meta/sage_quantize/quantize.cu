// Query, key and value of Sage attention to 8 bits. See params.h for what may run beside `statistics`.
#include "common/ptx/grid.cuh"
#include "sage_quantize/columns.cuh"

namespace sage {

constexpr int kThreads = 128;

// In one pass: a thread keeps its rows until their scale is known. `means` may be null.
template <class Element>
__device__ __forceinline__ void quantize_blocks(const BlockTensor& tensor, const float* means, const Format& format,
                                                int block) {
  const unsigned thread = block * kThreads + threadIdx.x;
  const unsigned row_vectors = tensor.heads * tensor.head_dim / kVector;
  const unsigned vector = thread % row_vectors;
  dispatch(tensor.block, [&]<int kBlock>() {
    using Columns = Columns<Element, kBlock>;
    const int first_column = thread / row_vectors * Columns::kCount;
    Columns columns(tensor, first_column, vector, row_vectors);
    if (means == nullptr) return columns.quantize(format);
    ptx::grid_dependency_wait();
    float found[kVector];
    load8(means + vector * kVector, found);
    columns.quantize(found, format);
  });
}

// With one scale for each head and channel.
template <class Element>
__device__ __forceinline__ void quantize_value(const QuantizeParams& params, int block) {
  const BlockTensor& key = params.key;  // value has its tokens
  const unsigned thread = block * kThreads + threadIdx.x;
  const unsigned row_vectors = key.heads * params.value_head_dim / kVector;
  const unsigned vector = thread % row_vectors;
  const long long first = static_cast<long long>(thread / row_vectors) * kRows;
  const int real = edge(key.edges, key.sequences, key.tokens);
  const auto* input = static_cast<const uint4*>(params.value) + vector;
  auto* output = static_cast<uint2*>(params.value_output) + vector;

  uint4 rows[kRows] = {};  // those of padding stay zero
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const long long token = first + i;
    if (token < real) rows[i] = __ldcs(input + token * row_vectors);
  }
  ptx::grid_dependency_wait();
  float factors[kVector];
  load8(params.value_scales + vector * kVector, factors);
#pragma unroll
  for (int i = 0; i < kVector; ++i) factors[i] = 1.0f / factors[i];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const long long token = first + i;
    float scaled[kVector];
    unpack<Element>(rows[i], scaled);
#pragma unroll
    for (int n = 0; n < kVector; ++n) scaled[n] = __fmul_rn(scaled[n], factors[n]);
    if (token < key.tokens) __stcs(output + token * row_vectors, pack</*kIsE4m3=*/true>(scaled));
  }
}

// How many of key's blocks come before a block. They take turns with others: the first blocks of each kind stand still
// for a while, as if they waited for their code, and kinds that follow each other do so one after the other
// (fmha_sm90/NOTES.md).
__device__ __forceinline__ int key_blocks_before(const QuantizeParams& params, int block) {
  const unsigned turn = max(block - params.key_start, 0);
  return min(static_cast<int>(static_cast<unsigned long long>(turn) * params.key_share >> 31), params.key_blocks);
}

// What waits goes backwards: `statistics` read the end last, so that it may still be in the L2 cache.
template <class Element>
__device__ __forceinline__ void quantize(const QuantizeParams& params) {
  const int block = blockIdx.x;
  const int before = key_blocks_before(params, block);
  if (key_blocks_before(params, block + 1) > before) {
    const int key_block = params.key_means != nullptr ? params.key_blocks - 1 - before : before;
    return quantize_blocks<Element>(params.key, params.key_means, params.format, key_block);
  }
  const int other = block - before;
  if (other < params.query_blocks) return quantize_blocks<Element>(params.query, nullptr, params.format, other);
  quantize_value<Element>(params, gridDim.x - params.key_blocks - 1 - other);
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 5)
    KERNEL_NAME(const __grid_constant__ sage::QuantizeParams params) {
  ptx::grid_launch_dependents();
  if (params.format.is_fp16) {
    sage::quantize<__half>(params);
  } else {
    sage::quantize<__nv_bfloat16>(params);
  }
}
