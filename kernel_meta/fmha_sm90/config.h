// Everything that the build fixes: the columns of a table row, as macros, and what follows from them.
#pragma once
#include <cstdint>

#include "common/ptx/wgmma.cuh"

namespace fmha {

using DType = ptx::Element;
enum class MaskType { dense, causal, sliding };
enum class Scheduler { persistent, split };

constexpr DType kDType = DTYPE_Q;
constexpr MaskType kMask = MASK_TYPE;
constexpr int kHeadDimQK = HEAD_DIM_QK;
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kTileQ = TILE_Q;
constexpr int kTileKV = TILE_KV;
constexpr int kStagesK = STAGES_K;
constexpr int kStagesV = STAGES_V;
constexpr int kBlocksPerSM = BLOCKS_PER_SM;

// Few query rows and long keys: the keys of a tile may be divided among blocks that leave partial results.
constexpr bool kSplit = SCHEDULER == Scheduler::split;
static_assert(!kSplit || kMask != MaskType::sliding, "a window leaves few keys to divide");

static_assert(DTYPE_K == kDType && DTYPE_V == kDType && DTYPE_O == kDType, "this kernel has one dtype throughout");

// Tiles lie in shared memory as [chunk][row][64 elements]: a row of a chunk is the 128 bytes of one swizzle span.
constexpr int kChunk = 64;
constexpr int kChunksQK = kHeadDimQK / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
constexpr int kRowBytes = kChunk * 2;
static_assert(kHeadDimQK % kChunk == 0 && kHeadDimV % kChunk == 0, "head dims are whole 64-element chunks");

constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup: the M of wgmma
constexpr int kConsumers = kTileQ / kWarpgroupRows;
static_assert(kConsumers == 1 || kConsumers == 2, "two consumers take turns, one has nobody to wait for");
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);

static_assert(kTileKV % 16 == 0 && kTileKV * kRowBytes % 1024 == 0, "a chunk of K or V starts on a swizzle atom");

// Chunks that one copy of Q moves. Rows that do not fill a chunk's 64 (split only) would shift the next chunk.
constexpr int kQueryBoxChunks = kSplit ? 1 : kChunksQK;

// Q in registers halves what a product reads from shared memory, and frees Q's for the output. It does not fit beside
// 128 accumulators of O, nor into the registers of one block of several; and 48 registers of it leave none for parts.
constexpr bool kQInRegisters = kHeadDimV <= 128 && kBlocksPerSM == 1 && (!kSplit || kHeadDimQK <= 128);

// A multiprocessor has 65,536 registers; setmaxnreg takes multiples of 8. With 48 registers of Q two consumers need
// the last eight, and the scheduler warp spills a little instead, off every critical path.
constexpr bool kConsumersAreTight = kQInRegisters && kHeadDimQK > 128;
constexpr int kProducerRegisters = kConsumersAreTight ? 24 : 40;
constexpr int kConsumerRegisters = kBlocksPerSM == 2 ? 216 : kConsumersAreTight ? 240 : 232;
static_assert(kBlocksPerSM * 128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "register file");

// Columns of one P V product. Registers at launch bound the operands of an instruction, whatever setmaxnreg adds.
constexpr int kProductN = kBlocksPerSM == 1 ? kHeadDimV : 128;

}  // namespace fmha
