// The shared-memory plan of a block.
#pragma once
#include <type_traits>

#include "common/ptx/mbarrier.cuh"
#include "config.h"
#include "mask.cuh"
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

// Where V lands that is prepared for the product. With 16-bit Q and K there is no room for two stages.
constexpr int kStagesLanding = !kPreparesValues ? 0 : ptx::kElementBytes<kQueryType> == 1 ? 2 : 1;
constexpr int kLandingColumns = 128;
constexpr int kValueWarps = 2;  // prepare it

// A block of V as the product takes it: by columns, or transposed by the keys of an instruction.
using Values = std::conditional_t<kTransposesValues, uint8_t[kTileKV / kStepKeys][kHeadDimV][kStepBytes],
                                  uint16_t[kChunksV][kTileKV][kChunk]>;

// Where P has 8 bits, Q stays in shared memory until a tile's last Q K^T, and there is room for the next one beside it.
constexpr int kStagesQ = kE4m3P ? 2 : 1;

constexpr int kStagesScales = kSage ? kStagesK : 0;  // they travel with K
constexpr int kScaleArrivals = kSage ? 32 : 0;       // of the lanes that load them
constexpr int kWarpsWithScales = kSage ? kConsumerWarps : 0;

struct alignas(1024) Storage {
  // Q of each consumer, or of both; where Q moves to registers, the same bytes then stage the output of the tile
  // before.
  uint8_t q[kStagesQ][kRowGroups][kChunksQK][kWarpgroupRows][kSpanQK];
  uint8_t k[kStagesK][kChunksQK][kTileKV][kSpanQK];
  Values v[kStagesV];
  uint8_t landing[kStagesLanding][kHeadDimV / kLandingColumns][kTileKV][kLandingColumns];
  alignas(16) float k_scales[kStagesScales][kTileKV];      // see sage.cuh
  alignas(16) float v_scales[kWarpsWithScales][kHeadDimV];  // of the pending tile

  // `full`: the data has landed. `empty`: every reader is done.
  ptx::Mbarrier q_full[kStagesQ][kRowGroups], q_empty[kStagesQ][kRowGroups];
  ptx::Mbarrier k_full[kStagesK], k_empty[kStagesK];
  ptx::Mbarrier v_full[kStagesV], v_empty[kStagesV];
  ptx::Mbarrier landing_full[kStagesLanding], landing_empty[kStagesLanding];
  ptx::Mbarrier tile_full[kTileSlots], tile_empty[kTileSlots];
  ptx::Mbarrier store_full[kConsumers];
  ptx::Mbarrier near_end;  // the loader is about to run out of work: time to draw the next tile

  Tile tiles[kTileSlots];
  StoreRequest store[kConsumers];
  PendingTile pending[kConsumerWarps];
  Mask masks[kScalesAreTight ? 128 * kConsumers : 0];  // of the threads' current tile

  // Numbers of a consumer's blocks: the last that a warp knew to count, or that each warp could leave out.
  uint32_t counting[kSkipsSoftmax && !kExpectsToCount ? kConsumers : 0];
  alignas(16) uint32_t dispensable[kExpectsToCount ? kConsumers : 0][4];
  Choices choices[kSkipsSoftmax ? kConsumers : 0];
  SkipTally skipped[kSkipsSoftmax ? kConsumers : 0];
  bool landed[kSkipsSoftmax ? kStagesLanding : 0];  // whether the stage holds values

  // Pairs, see there: a consumer's sums of the columns that the other one finishes, by threads; reference and sum of
  // each row.
  float4 sent_sums[kPairs ? kConsumers : 0][kHeadDimV / 16][128];
  float2 sent_statistics[kPairs ? kConsumers : 0][kWarpgroupRows];
};

constexpr int kQBytes = sizeof(Storage::q) / (kStagesQ * kRowGroups);

constexpr int kReservedPerBlock = 1024;  // by the system
static_assert(kBlocksPerSM * (sizeof(Storage) + kReservedPerBlock) <= 233472,
              "a multiprocessor of compute capability 9.0 has 228 KiB of shared memory");
static_assert(!kStagesOutput || kChunksV * kRowBytes <= kRowBytesQK, "the output is staged in the bytes of Q");

__device__ __forceinline__ Storage& storage() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<Storage*>(dynamic_shared_memory);
}

// Position in a ring of stages; `parity` is what a reader waits for, `parity ^ 1` what a writer waits for. Of stages
// that kStep rings share, each has every kStep-th.
template <int kStages, int kStep = 1>
struct Ring {
  static_assert(kStages % kStep == 0);
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if constexpr (kStep > 1) {
      stage += kStep;
      if (stage < kStages) return;
      stage -= kStages;
      parity ^= 1;
    } else if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One or two stages, in one register.
template <int kStages>
struct SmallRing {
  static_assert(kStages <= 2);
  uint32_t position;  // of 2 * kStages, for both parities

  __device__ __forceinline__ uint32_t stage() const { return position % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return position / kStages; }
  __device__ __forceinline__ void advance() { position = kStages == 1 ? position ^ 1 : (position + 1) % 4; }
};

__device__ __forceinline__ void init_barriers(Storage& s) {
  constexpr int kWarpsPerRow = kConsumerWarps / kRowGroups;  // the store warp stands in for those of a consumer
  constexpr int kWarpsPerKey = kConsumerWarps / kShares;
  for (int i = 0; i < kRowGroups; ++i) {
    for (int stage = 0; stage < kStagesQ; ++stage) {
      ptx::mbarrier_init(s.q_full[stage][i], 1);
      ptx::mbarrier_init(s.q_empty[stage][i], kWarpsPerRow);
    }
    ptx::mbarrier_init(s.store_full[i], 4);
  }
  for (int i = 0; i < kStagesK; ++i) {
    ptx::mbarrier_init(s.k_full[i], 1 + kScaleArrivals);
    ptx::mbarrier_init(s.k_empty[i], kWarpsPerKey);
  }
  for (int i = 0; i < kStagesV; ++i) {
    ptx::mbarrier_init(s.v_full[i], kPreparesValues ? kValueWarps : 1);
    ptx::mbarrier_init(s.v_empty[i], kWarpsPerKey);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    ptx::mbarrier_init(s.tile_full[i], 1);
    ptx::mbarrier_init(s.tile_empty[i], kConsumerWarps + (kPreparesValues ? kValueWarps : 0) + kShares);
  }
  for (int i = 0; i < kStagesLanding; ++i) {
    ptx::mbarrier_init(s.landing_full[i], 1);
    ptx::mbarrier_init(s.landing_empty[i], kValueWarps);
  }
  ptx::mbarrier_init(s.near_end, kShares);
  if constexpr (kSkipsSoftmax) {
    for (uint32_t& number : s.counting) number = 0;
    for (auto& numbers : s.dispensable) {
      for (uint32_t& number : numbers) number = 0;
    }
    for (Choices& choices : s.choices) choices = {0, 1};
    for (SkipTally& tally : s.skipped) tally = {0, 0};
  }
  ptx::fence_mbarrier_init();
}

}  // namespace fmha
