// The shared-memory plan of a block.
#pragma once
#include "common/ptx/mbarrier.cuh"
#include "config.h"
#include "tile.cuh"

namespace fmha {

constexpr int kTileSlots = 3;

// A warpgroup's finished tile, for the warp that stores it.
struct StoreRequest {
  int row;   // of the out tensor
  int head;  // negative: no more tiles
};

// What a consumer warp still has to know about its previous tile when it finishes it (registers are scarcer).
struct PendingTile {
  int token;  // the warpgroup's first, in the sequence
  int q_start;
  int q_len;
  int head;
  int slot;  // split: of its part; negative: the keys are not divided
};

// Which key blocks a consumer has a use for, counted over all tiles; for the loader of V (skip.cuh).
struct alignas(8) Choices {
  uint32_t made;
  uint32_t weighing;  // the latest 32, one a bit, the last one lowest
};

// Blocks that a consumer's rows see.
struct SkipTally {
  uint32_t left_out;
  uint32_t all;
};

// Where V lands that is converted before the product. With 16-bit Q and K there is no room for two stages.
constexpr int kStagesLanding = !kConvertsValues ? 0 : ptx::kElementBytes<kQueryType> == 1 ? 2 : 1;
constexpr int kLandingColumns = 128;
constexpr int kConverterWarps = 2;

constexpr int kStagesScales = kSage ? kStagesK : 0;  // they travel with K
constexpr int kScaleArrivals = kSage ? 32 : 0;       // of the lanes that load them

struct alignas(1024) Storage {
  // Q of each consumer; where Q moves to registers, the same bytes then stage the output of the tile before.
  uint8_t q[kConsumers][kChunksQK][kWarpgroupRows][kSpanQK];
  uint8_t k[kStagesK][kChunksQK][kTileKV][kSpanQK];
  uint16_t v[kStagesV][kChunksV][kTileKV][kChunk];
  uint8_t landing[kStagesLanding][kHeadDimV / kLandingColumns][kTileKV][kLandingColumns];
  alignas(16) float k_scales[kStagesScales][kTileKV];  // see sage.cuh

  // `full`: the data has landed. `empty`: every reader is done.
  ptx::Mbarrier q_full[kConsumers], q_empty[kConsumers];
  ptx::Mbarrier k_full[kStagesK], k_empty[kStagesK];
  ptx::Mbarrier v_full[kStagesV], v_empty[kStagesV];
  ptx::Mbarrier landing_full[kStagesLanding], landing_empty[kStagesLanding];
  ptx::Mbarrier tile_full[kTileSlots], tile_empty[kTileSlots];
  ptx::Mbarrier store_full[kConsumers];
  ptx::Mbarrier near_end;  // the loader is about to run out of work: time to draw the next tile

  Tile tiles[kTileSlots];
  StoreRequest store[kConsumers];
  PendingTile pending[kConsumerWarps];

  Choices choices[kSkipsSoftmax ? kConsumers : 0];
  SkipTally skipped[kSkipsSoftmax ? kConsumers : 0];
  bool landed[kSkipsSoftmax ? kStagesLanding : 0];  // whether the stage holds values
};

constexpr int kQBytes = sizeof(Storage::q) / kConsumers;

constexpr int kReservedPerBlock = 1024;  // by the system
static_assert(kBlocksPerSM * (sizeof(Storage) + kReservedPerBlock) <= 233472,
              "a multiprocessor of compute capability 9.0 has 228 KiB of shared memory");
static_assert(!kStagesOutput || kChunksV * kRowBytes <= kRowBytesQK, "the output is staged in the bytes of Q");

__device__ __forceinline__ Storage& storage() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<Storage*>(dynamic_shared_memory);
}

// Position in a ring of stages; `parity` is what a reader waits for, `parity ^ 1` what a writer waits for.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void init_barriers(Storage& s) {
  constexpr int kStoreWarpArrivals = 4;  // the store warp stands in for the four warps of a consumer
  for (int i = 0; i < kConsumers; ++i) {
    ptx::mbarrier_init(s.q_full[i], 1);
    ptx::mbarrier_init(s.q_empty[i], kStoreWarpArrivals);
    ptx::mbarrier_init(s.store_full[i], 4);
  }
  for (int i = 0; i < kStagesK; ++i) {
    ptx::mbarrier_init(s.k_full[i], 1 + kScaleArrivals);
    ptx::mbarrier_init(s.k_empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kStagesV; ++i) {
    ptx::mbarrier_init(s.v_full[i], kConvertsValues ? kConverterWarps : 1);
    ptx::mbarrier_init(s.v_empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    ptx::mbarrier_init(s.tile_full[i], 1);
    ptx::mbarrier_init(s.tile_empty[i], kConsumerWarps + (kConvertsValues ? kConverterWarps : 0) + 1);
  }
  for (int i = 0; i < kStagesLanding; ++i) {
    ptx::mbarrier_init(s.landing_full[i], 1);
    ptx::mbarrier_init(s.landing_empty[i], kConverterWarps);
  }
  ptx::mbarrier_init(s.near_end, 1);
  if constexpr (kSkipsSoftmax) {
    for (Choices& choices : s.choices) choices = {0, 1};
    for (SkipTally& tally : s.skipped) tally = {0, 0};
  }
  ptx::fence_mbarrier_init();
}

}  // namespace fmha
