// Everything that the build fixes: the columns of a table row, as macros, and what follows from them.
#pragma once
#include <cstdint>

#include "common/ptx/wgmma.cuh"

namespace fmha {

using DType = ptx::Element;
enum class MaskType { dense, causal, sliding };

constexpr DType kDType = DTYPE_Q;
constexpr MaskType kMask = MASK_TYPE;
constexpr int kHeadDimQK = HEAD_DIM_QK;
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kTileQ = TILE_Q;
constexpr int kTileKV = TILE_KV;
constexpr int kStagesK = STAGES_K;
constexpr int kStagesV = STAGES_V;

static_assert(DTYPE_K == kDType && DTYPE_V == kDType && DTYPE_O == kDType, "this kernel has one dtype throughout");

// Tiles lie in shared memory as [chunk][row][64 elements]: a row of a chunk is the 128 bytes of one swizzle span.
constexpr int kChunk = 64;
constexpr int kChunksQK = kHeadDimQK / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
constexpr int kRowBytes = kChunk * 2;
static_assert(kHeadDimQK % kChunk == 0 && kHeadDimV % kChunk == 0, "head dims are whole 64-element chunks");

constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup: the M of wgmma
constexpr int kConsumers = kTileQ / kWarpgroupRows;
static_assert(kConsumers == 2, "the hand-over between consumers is written for two warpgroups");
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);

static_assert(kTileKV % 16 == 0 && kTileKV * kRowBytes % 1024 == 0, "a chunk of K or V starts on a swizzle atom");

// Q in registers frees its shared memory for the output; beside 128 accumulators of O it does not fit.
constexpr bool kQInRegisters = kHeadDimV <= 128;

// 65,536 registers: one producer warpgroup, two consumers; setmaxnreg takes multiples of 8. With 48 registers of Q the
// consumers need the last eight, and the scheduler warp spills a little instead, off every critical path.
constexpr bool kConsumersAreTight = kQInRegisters && kHeadDimQK > 128;
constexpr int kProducerRegisters = kConsumersAreTight ? 24 : 40;
constexpr int kConsumerRegisters = kConsumersAreTight ? 240 : 232;
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "register file");

}  // namespace fmha
