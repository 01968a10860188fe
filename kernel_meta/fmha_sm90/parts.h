// What the parts of divided tiles leave in the workspace for combine.cu. Contents undefined on entry.
#pragma once
#include <cstdint>

namespace fmha {

// One part of one tile, as its block found it.
struct alignas(16) Part {
  int32_t first_row;   // of the tile's first token in the query tensor
  int32_t tokens;      // of the sequence, from that one on
  int32_t head;        // the tile's first
  int32_t first_slot;  // of the tile's parts, which lie side by side
  int32_t part;
  int32_t parts;
  int32_t unused[2];
};

struct DividedKeys {
  Part* parts;     // [slots]
  int32_t* count;  // slots in use
  // [slots][tile rows][head_dim_v] sums of 2^(scale * (s - m)) v, then [slots][tile rows] pairs (scale * m, row sum).
  float* sums;
  float2* statistics;
};

}  // namespace fmha
