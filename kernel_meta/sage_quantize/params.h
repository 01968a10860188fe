// Parameters of the quantiser's kernels, as packed by cubin_runtime/families/sage_quantize.py.
//
// `statistics` waits for what came before the call, and lets `quantize` start only after that. So the blocks of
// `quantize` read the call's inputs right away, and those that need no statistics write, too, while `statistics` may
// still be running. The others wait for its end.
#pragma once
#include <cstdint>

namespace sage {

// What is the same in all tensors of a call.
struct Format {
  int is_fp16;  // the inputs, else bf16
  int is_e4m3;  // query's and key's outputs, else int8
  float range;  // largest magnitude of those
};

// A number for each head and channel over all tokens of a tensor.
struct ChannelTensor {
  const void* input;            // [tokens, heads, head_dim]
  float* results;               // [heads, head_dim]
  float* partials;              // [heads, chunks, head_dim], contents undefined
  unsigned long long* tickets;  // [heads], a TicketCounter each
  const int* edges;             // as in BlockTensor
  int tokens;
  int sequences;
  int heads;
  int head_dim;
  int chunk_tokens;
  int chunks;
};

// The grid has a block for each chunk of each head, first those of value.
struct StatisticsParams {
  ChannelTensor value_scales;
  ChannelTensor key_means;  // has blocks where key is smoothed
  int is_fp16;
  uint32_t tag;  // of the tickets
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
  int head_dim;
  int columns;
  int block;  // 1, 4 or 16
};

// The grid has blocks for query, then for value, which has the tokens, sequences and heads of key. Key's take turns with
// them from some block on.
struct QuantizeParams {
  BlockTensor query;
  BlockTensor key;
  const float* key_means;     // [heads, head_dim], or null
  const void* value;          // [tokens, heads, head_dim]
  void* value_output;         // the same shape, e4m3
  const float* value_scales;  // [heads, head_dim]
  int value_head_dim;
  int query_blocks;
  int key_blocks;
  int key_start;       // so many others come before key's
  uint32_t key_share;  // of the blocks that follow, as long as there are any of key; in 2^-31
  Format format;
};

}  // namespace sage
