// Parameters of the quantiser's kernels, as packed by cubin_runtime/families/sage_quantize.py.
//
// The kernels of a call follow each other, `blocks` first, and each may start while the one before is still running.
// `blocks` waits for what came before the call, and lets its successor start only after that. So the other kernels
// read the call's inputs right away; they wait before they touch what kernels of the call, or earlier ones, write.
#pragma once

namespace sage {

// What is the same in all tensors of a call.
struct Format {
  int head_dim;
  int is_fp16;  // the inputs, else bf16
  int is_e4m3;  // query's and key's outputs, else int8
  float range;  // largest magnitude of those
};

// A tensor with one scale for each head and `block` tokens of a sequence.
struct BlockTensor {
  const void* input;  // [tokens, heads, head_dim]
  void* output;       // the same shape
  float* scales;      // [heads, columns]
  const int* edges;   // [sequences + 1], where each sequence begins, and the end; null = one sequence
  int tokens;
  int sequences;
  int heads;
  int columns;
  int block;  // 1, 4 or 16
};

struct BlocksParams {
  BlockTensor query;
  BlockTensor key;
  unsigned* counters;  // [counter_count], zeroed for `statistics`
  int counter_count;
  int query_blocks;  // thread blocks for query; those behind them are for key
  Format format;
};

struct KeyParams {
  BlockTensor key;
  const float* means;  // [heads, head_dim]
  Format format;
};

// The grid is [heads, chunks of tokens].
struct StatisticsParams {
  const void* input;   // [tokens, heads, head_dim]
  float* results;      // [heads, head_dim]
  const int* edges;    // as in BlockTensor
  float* partials;     // [heads, chunks, head_dim], contents undefined
  unsigned* counters;  // [heads], 0 before and after
  int tokens;
  int sequences;
  int heads;
  int chunk_tokens;
  int is_mean;  // else the scale of value
  Format format;
};

struct ValueParams {
  const void* input;    // [tokens, heads, head_dim]
  void* output;         // the same shape, e4m3
  const float* scales;  // [heads, head_dim]
  const int* edges;     // as in BlockTensor
  int tokens;
  int sequences;
  int heads;
  Format format;
};

}  // namespace sage
