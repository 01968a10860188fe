// The kernel's one argument, ABI "fmha_sm90/3". cubin_runtime/families/fmha_sm90.py packs it, field by field.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/ptx/tma.cuh"
#include "parts.h"

namespace fmha {

// Sage: one scale per head and block of tokens of Q and K, one per kv head and channel of V. Local token t of
// sequence b has the scale of column (cum_seq_lens[b] >> block_log2) + b + (t >> block_log2).
struct SageScales {
  const float* scales_q;  // [num_heads_q, columns_q]
  const float* scales_k;  // [num_heads_kv, columns_k]
  const float* scales_v;  // [num_heads_kv, head_dim_v]
  int32_t columns_q;
  int32_t columns_k;
  int32_t block_q_log2;  // tokens
  int32_t block_k_log2;
};

// Kernels that skip the softmax of negligible blocks.
struct SkipSoftmax {
  unsigned long long* counts;  // [2]: blocks left out, and all blocks, are added to it; or null
  float factor;                // the threshold of a sequence is factor / kv_len
};

struct Params {
  // (elements of a span, tokens, heads, spans of a row). A span has 128 bytes, or 64 where rows are no multiple of 128,
  // and as wide a swizzle; values that are converted have none.
  ptx::TensorMap query_map;  // box (span, tile_tokens, tile_heads, kQueryBoxChunks or, with rows unused, 1)
  ptx::TensorMap key_map;    // box (span, kTileKV, 1, spans)
  ptx::TensorMap value_map;  // box (span, kTileKV, 1, spans)
  ptx::TensorMap out_map;    // box (span, tile_tokens, tile_heads, spans); not for few rows, see below

  void* out;                         // [total_q, num_heads_q, head_dim_v]
  float* lse;                        // [total_q, num_heads_q] or null
  const int32_t* cum_seq_lens_q;     // [batch_size + 1]
  const int32_t* cum_seq_lens_kv;    // [batch_size + 1]
  const float* attention_sinks;      // [num_heads_q] or null
  const float* bmm1_scale_pointer;   // one float, or null: bmm1_scale holds
  const float* bmm2_scale_pointer;   // one float, or null: bmm2_scale holds
  unsigned long long* tile_counter;  // in the workspace, contents undefined on entry
  DividedKeys divided;               // split: where parts leave their results; unused where no tile is divided

  int64_t out_stride_token;  // elements
  int64_t out_stride_head;
  int64_t lse_stride_token;
  int64_t lse_stride_head;

  uint32_t launch_tag;  // of no other launch, and nothing that memory holds by chance: see tickets.cuh
  int32_t batch_size;
  int32_t total_q;   // tokens of the query tensor: cum_seq_lens_q is clamped to it
  int32_t total_kv;  // tokens of the key tensor
  int32_t num_heads_q;
  int32_t heads_per_kv_head;
  int32_t window_left;  // keys to the left of the diagonal that a row sees; sliding kernels only
  float bmm1_scale;
  float bmm2_scale;

  // The 64 rows of a consumer are those of some tokens in some heads that share a kv head: row
  // head * tile_tokens + token. Where there are many, they fill it: tile_tokens * tile_heads = 64.
  int32_t tile_tokens;
  int32_t tile_heads;  // a divisor of heads_per_kv_head

  int32_t least_blocks_per_part;  // split: key blocks; 0: no tile is divided

  SageScales sage;
  SkipSoftmax skip;
};

// Kernels with spcompress store no output through a tensor map. In its place they have the keys as (elements of a span,
// tokens, groups of four tokens from there, heads, spans of a row), box (span, 2, kTileKV / 4, 1, 1).
__host__ __device__ inline const ptx::TensorMap& permuted_key_map(const Params& params) { return params.out_map; }

static_assert(offsetof(Params, out) == 512 && offsetof(Params, out_stride_token) == 608 &&
                  offsetof(Params, launch_tag) == 640 && offsetof(Params, tile_tokens) == 676 && sizeof(Params) == 768,
              "the layout is an ABI: a change needs a new name and a new packer");

}  // namespace fmha
