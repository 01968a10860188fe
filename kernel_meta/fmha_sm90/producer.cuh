// The producer warpgroup: one warp loads K and V, one schedules and loads Q; the others prepare values of 8 bits, or
// store the outputs, one per consumer. Pairs: one warp loads K and V for each consumer.
#pragma once
#include "common/ptx/grid.cuh"
#include "common/ptx/tma.cuh"
#include "params.h"
#include "sage.cuh"
#include "scheduler.cuh"
#include "skip.cuh"
#include "storage.cuh"
#include "values.cuh"

namespace fmha {

// The next tile is drawn when this many K loads of the current one are left to issue: as late as possible, but in time
// for its Q. Blocks of 128 rows of 16-bit products take longest. Where keys are divided, most blocks have few tiles.
constexpr int kDrawAheadBlocks = kRowGroups == 2 && !kSplit && ptx::kElementBytes<kQueryType> == 2 ? 1 : 2;

// A tile's blocks, where V has to wait for the consumers' choices (skip.cuh). K is loaded as far ahead as its stages
// allow. `first_number`: of the tile's blocks.
template <class ValueRing, class LoadK, class LoadV>
__device__ __forceinline__ void load_on_demand(const BlockRange& blocks, uint32_t first_number, ValueRing& v_ring,
                                               const LoadK& load_k, const LoadV& load_v) {
  Storage& s = storage();
  auto pass_v = [&](auto& full, auto& empty) {
    ptx::mbarrier_wait(empty[v_ring.stage], v_ring.parity ^ 1);
    ptx::mbarrier_arrive(full[v_ring.stage]);
    v_ring.advance();
  };
  int key_block = blocks.end - 1;
  auto load_keys_to = [&](int block) {
    for (; key_block >= max(block, blocks.begin); --key_block) {
      const bool nears_end = key_block - blocks.begin + 1 == kDrawAheadBlocks;
      if (nears_end && key_block < blocks.end - 1) ptx::mbarrier_arrive(s.near_end);
      load_k(key_block);
    }
  };
  for (int block = blocks.end - 1; block >= blocks.begin; --block) {
    const uint32_t number = first_number + blocks.end - 1 - block;
    load_keys_to(block - (kStagesK - 1));
    // The first block always counts for some row.
    const bool is_first = block == blocks.end - 1;
    // With two stages the next K would come late. This block's stage is free before the choice about it is made.
    const bool expected = is_first || Demand(number).any;
    if (kStagesK == 2 && !expected) load_keys_to(block - kStagesK);
    const bool loads = expected || has_use(number);
    if constexpr (kPreparesValues) {
      ptx::mbarrier_wait(s.landing_empty[v_ring.stage], v_ring.parity ^ 1);
      s.landed[v_ring.stage] = loads;
      if (!loads) pass_v(s.landing_full, s.landing_empty);
    } else if (!loads) {
      pass_v(s.v_full, s.v_empty);
    }
    if (loads) load_v(block);
  }
}

// Keys for compress.cuh: the first two of every four, then the other two.
__device__ __forceinline__ void load_permuted_keys(const Params& params, Ring<kStagesK, kShares>& ring, int token,
                                                   int kv_head, uint64_t policy) {
  Storage& s = storage();
  ptx::mbarrier_wait(s.k_empty[ring.stage], ring.parity ^ 1);
  ptx::mbarrier_arrive_expect(s.k_full[ring.stage], sizeof(s.k[0]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int chunk = 0; chunk < kChunksQK; ++chunk) {
      ptx::tma_load_5d(s.k[ring.stage][chunk][half * (kTileKV / 2)], permuted_key_map(params), s.k_full[ring.stage],
                       policy, 0, token + 2 * half, 0, kv_head, chunk);
    }
  }
  ring.advance();
}

// One thread; with scales of keys to load, one warp. Loads each tile's blocks from the last to the first, K one block
// ahead of V, which is the order of their products. `share`: pairs, of which consumer.
__device__ __forceinline__ void load_keys_and_values(const Params& params, int share) {
  Storage& s = storage();
  const uint64_t once = ptx::l2_policy_evict_first(), again = ptx::l2_policy_evict_last();
  const bool leader = !kSage || (threadIdx.x & 31) == 0;
  Ring<kStagesK, kShares> k_ring{share};
  Ring<kPreparesValues ? kStagesLanding : kStagesV, kShares> v_ring{share};
  Ring<kTileSlots> slot;
  [[maybe_unused]] uint32_t first_number = 0;  // of a tile's blocks

  for (;; slot.advance()) {
    ptx::mbarrier_wait(s.tile_full[slot.stage], slot.parity);
    Tile tile;
    if constexpr (kSage) {
      tile = read_tile<&Tile::q_block, &Tile::q_len, &Tile::kv_len, &Tile::work, &Tile::head, &Tile::kv_start,
                       &Tile::sequence>(s.tiles[slot.stage], threadIdx.x & 31);
    } else {
      tile = s.tiles[slot.stage];
    }
    if (tile.work == 0) return;

    const int tokens = tile_tokens(params);
    const BlockRange blocks = share_of(block_range(tile, tile.q_block * tokens, tokens, params), share);
    // Where queries are few, one tile often has all that see the keys.
    const bool is_only_reader = kSplit && tile.q_len <= tokens && params.heads_per_kv_head == params.tile_heads;
    const uint64_t policy = is_only_reader ? once : again;
    // The quick way, where the first keys are waited for. In other kernels it gave nothing (NOTES.md).
    const int kv_head =
        kSplit ? ptx::divide_small(tile.head, params.heads_per_kv_head) : tile.head / params.heads_per_kv_head;
    auto load = [&](auto& stages, const ptx::TensorMap& map, auto& full, auto& empty, auto& ring, int block) {
      ptx::mbarrier_wait(empty[ring.stage], ring.parity ^ 1);
      if (leader) {
        ptx::mbarrier_arrive_expect(full[ring.stage], sizeof(stages[0]));
        ptx::tma_load_4d(stages[ring.stage], map, full[ring.stage], policy, 0, tile.kv_start + block * kTileKV, kv_head,
                         0);
      }
      ring.advance();
    };
    auto load_k = [&](int block) {
      if constexpr (kCompressesKeys) {
        if (pruned_blocks(tile, params).contains(block)) {
          load_permuted_keys(params, k_ring, tile.kv_start + block * kTileKV, kv_head, policy);
          return;
        }
      }
      const int stage = k_ring.stage;
      load(s.k, params.key_map, s.k_full, s.k_empty, k_ring, block);
      if constexpr (kSage) load_key_scales(params, tile, kv_head, block, stage);
    };
    auto load_v = [&](int block) {
      if constexpr (kPreparesValues) {
        load(s.landing, params.value_map, s.landing_full, s.landing_empty, v_ring, block);
      } else {
        load(s.v, params.value_map, s.v_full, s.v_empty, v_ring, block);
      }
    };

    const int count = blocks.end - blocks.begin;
    if (leader && count <= kDrawAheadBlocks) ptx::mbarrier_arrive(s.near_end);
    if constexpr (kSkipsSoftmax) {
      if (count > 0) load_on_demand(blocks, first_number, v_ring, load_k, load_v);
      first_number += count;
    } else if (count > 0) {
      load_k(blocks.end - 1);
      // Where tiles have 64 rows, the first V is looked at while the first logits are made.
      if constexpr (!kSeamless) load_v(blocks.end - 1);
      for (int block = blocks.end - 2; block >= blocks.begin; --block) {
        if (leader && block - blocks.begin + 1 == kDrawAheadBlocks) ptx::mbarrier_arrive(s.near_end);
        load_k(block);
        if (kSeamless || block + 1 < blocks.end - 1) load_v(block + 1);
      }
      if (kSeamless || count > 1) load_v(blocks.begin);
    }
    if (leader) ptx::mbarrier_arrive(s.tile_empty[slot.stage]);
  }
}

__device__ __forceinline__ void load_query(const Params& params, const Tile& tile, int stage, int consumer,
                                           int token, uint64_t policy) {
  Storage& s = storage();
  // Rows land as [head][token].
  ptx::mbarrier_arrive_expect(s.q_full[stage][consumer], params.tile_tokens * params.tile_heads * kRowBytesQK);
  const bool leaves_rows = kPairs && params.tile_tokens * params.tile_heads < kWarpgroupRows;
  for (int chunk = 0; chunk < kChunksQK; chunk += leaves_rows ? 1 : kQueryBoxChunks) {
    ptx::tma_load_4d(s.q[stage][consumer][chunk], params.query_map, s.q_full[stage][consumer], policy, 0,
                     tile.q_start + token, tile.head, chunk);
  }
}

// For combine.cu.
__device__ __forceinline__ void describe_part(const Params& params, const Tile& tile) {
  if (tile.parts <= 1) return;
  const int token = tile.q_block * tile_tokens(params);
  params.divided.parts[tile.first_slot + tile.part] = {
      tile.q_start + token, tile.q_len - token, tile.head, tile.first_slot, tile.part, tile.parts, {}};
}

// One warp.
__device__ __forceinline__ void schedule_and_load_queries(const Params& params) {
  Storage& s = storage();
  const bool leader = (threadIdx.x & 31) == 0;
  const uint64_t policy = ptx::l2_policy_evict_first();
  SmallRing<kStagesQ> free_q[kRowGroups];
  for (auto& ring : free_q) ring.position = kStagesQ;
  Ring<kTileSlots> slot;
  uint32_t near_end_parity = 0;
  TileScheduler scheduler(params);

  ptx::grid_dependency_wait();

  for (;; slot.advance(), near_end_parity ^= 1) {
    const Tile tile = scheduler.current();
    if (leader) {
      ptx::mbarrier_wait(s.tile_empty[slot.stage], slot.parity ^ 1);
      s.tiles[slot.stage] = tile;
      ptx::mbarrier_arrive(s.tile_full[slot.stage]);
      if constexpr (kSplit) describe_part(params, tile);
    }
    if (tile.work == 0) break;
    if (leader) {
#pragma unroll
      for (int w = 0; w < kRowGroups; ++w) {
        const int token = tile.q_block * tile_tokens(params) + w * params.tile_tokens;
        if (block_range(tile, token, params.tile_tokens, params).empty()) continue;
        ptx::mbarrier_wait(s.q_empty[free_q[w].stage()][w], free_q[w].parity());
        const int stage = free_q[w].stage();
        free_q[w].advance();
        load_query(params, tile, stage, w, token, policy);
      }
      ptx::mbarrier_wait(s.near_end, near_end_parity);
    }
    scheduler.advance();
  }
  scheduler.finish();
}

// One thread per consumer: sends the tiles that the consumer staged in its Q buffer, then hands the buffer on to
// the next Q in place of the consumer's four warps.
__device__ __forceinline__ void store_outputs(const Params& params, int consumer) {
  Storage& s = storage();
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(s.store_full[consumer], parity);
    const StoreRequest request = s.store[consumer];
    if (request.head < 0) break;
    ptx::tma_store_4d(params.out_map, s.q[0][consumer], 0, request.row, request.head, 0);
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
    ptx::mbarrier_arrive_many<4>(s.q_empty[0][consumer]);
  }
  ptx::tma_store_wait();
}

__device__ __forceinline__ void run_producer(const Params& params) {
  const int warp = (threadIdx.x >> 5) & 3;
  const bool leader = (threadIdx.x & 31) == 0;
  if (warp == 1) {
    schedule_and_load_queries(params);
    return;
  }
  ptx::grid_dependency_wait();
  if (warp == 0) {
    if (kSage || leader) load_keys_and_values(params, 0);
  } else if constexpr (kPairs) {
    if (warp == 2 && leader) load_keys_and_values(params, 1);
  } else if constexpr (kPreparesValues) {
    prepare_values(params, warp - 2);
  } else if (kStagesOutput && warp - 2 < kConsumers && leader) {
    store_outputs(params, warp - 2);
  }
}

}  // namespace fmha
