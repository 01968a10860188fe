// Parameters of the quantiser's kernels, as packed by cubin_runtime/families/sage_quantize.py.
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

// How a pass over all tokens for statistics, and one that uses them, are cut into items of work: groups of
// channels, and chunks of the tokens in each.
struct Items {
  unsigned* counters;  // 0 at first: tickets, then for each group arrivals, then for each group readiness
  float* partials;     // [groups, chunks, 8 * lanes], contents undefined
  int groups;
  int chunks;
  int lanes;  // threads along a group's channels, 8 channels each; a power of two
  int ahead;  // items that the first pass leads by, at least `chunks`
};

struct BlocksParams {
  BlockTensor query;
  BlockTensor key;
  unsigned* counters;  // [counter_count], zeroed for the kernels that follow
  int counter_count;
  int query_blocks;  // thread blocks for query; those behind them are for key
  Format format;
};

struct KeyParams {
  BlockTensor key;
  float* means;  // [heads, head_dim]
  Items items;
  Format format;
};

struct ValueParams {
  const void* input;  // [tokens, heads, head_dim]
  void* output;       // the same shape, e4m3
  float* scales;      // [heads, head_dim]
  const int* edges;   // as in BlockTensor
  int tokens;
  int sequences;
  int heads;
  Items items;
  Format format;
};

}  // namespace sage
