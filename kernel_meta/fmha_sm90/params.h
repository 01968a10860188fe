// The kernel's one argument, ABI "fmha_sm90/1". cubin_runtime/families/fmha_sm90.py packs it, field by field.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/ptx/tma.cuh"

namespace fmha {

struct Params {
  // (64 elements, tokens, heads, head_dim / 64), 128-byte swizzle; boxes (64, rows, 1, head_dim / 64).
  ptx::TensorMap query_map;  // rows = 64
  ptx::TensorMap key_map;    // rows = kTileKV
  ptx::TensorMap value_map;  // rows = kTileKV
  ptx::TensorMap out_map;    // rows = 64

  void* out;                         // [total_q, num_heads_q, head_dim_v]
  float* lse;                        // [total_q, num_heads_q] or null
  const int32_t* cum_seq_lens_q;     // [batch_size + 1]
  const int32_t* cum_seq_lens_kv;    // [batch_size + 1]
  const float* attention_sinks;      // [num_heads_q] or null
  const float* bmm1_scale_pointer;   // one float, or null: bmm1_scale holds
  const float* bmm2_scale_pointer;   // one float, or null: bmm2_scale holds
  unsigned long long* tile_counter;  // in the workspace, contents undefined on entry

  int64_t out_stride_token;  // elements
  int64_t out_stride_head;
  int64_t lse_stride_token;
  int64_t lse_stride_head;

  uint32_t launch_tag;  // never 0; differs between launches, see scheduler.cuh
  int32_t batch_size;
  int32_t total_q;   // tokens of the query tensor: cum_seq_lens_q is clamped to it
  int32_t total_kv;  // tokens of the key tensor
  int32_t num_heads_q;
  int32_t heads_per_kv_head;
  int32_t window_left;  // keys to the left of the diagonal that a row sees; sliding rows only
  float bmm1_scale;
  float bmm2_scale;
};

static_assert(offsetof(Params, out) == 512 && offsetof(Params, out_stride_token) == 576 &&
                  offsetof(Params, launch_tag) == 608 && offsetof(Params, bmm2_scale) == 640 && sizeof(Params) == 704,
              "the layout is an ABI: a change needs a new name and a new packer");

}  // namespace fmha
