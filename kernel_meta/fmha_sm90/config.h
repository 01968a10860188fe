// Everything that the build fixes: the columns of a table row, as macros, and what follows from them.
#pragma once
#include <cstdint>

#include "common/ptx/wgmma.cuh"

namespace fmha {

using DType = ptx::Element;
enum class MaskType { dense, causal, sliding };
enum class Scheduler { persistent, split, pair };

constexpr DType kQueryType = DTYPE_Q;  // and that of the keys
constexpr DType kValueType = DTYPE_V;
constexpr DType kOutType = DTYPE_O;
constexpr MaskType kMask = MASK_TYPE;
constexpr int kHeadDimQK = HEAD_DIM_QK;
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kTileQ = TILE_Q;
constexpr int kTileKV = TILE_KV;
constexpr int kStagesK = STAGES_K;
constexpr int kStagesV = STAGES_V;
constexpr int kBlocksPerSM = BLOCKS_PER_SM;
constexpr bool kFp16Softmax = FP16_SOFTMAX;
constexpr bool kCompressesKeys = USES_SPCOMPRESS;
constexpr bool kSkipsSoftmax = SKIPS_SOFTMAX;
constexpr bool kSage = USES_SAGE;
constexpr bool kE4m3P = E4M3_P;

// Few query rows and long keys: the keys of a tile may be divided among blocks that leave partial results.
constexpr bool kSplit = SCHEDULER == Scheduler::split;
static_assert(!kSplit || kMask != MaskType::sliding, "a window leaves few keys to divide");
static_assert(!kSplit || !kSkipsSoftmax, "a part does not know the running maximum of the others");

// Few query rows over few keys: two consumers of a block have the same rows, and each half of their keys (pair.cuh).
constexpr bool kPairs = SCHEDULER == Scheduler::pair;

// Where a tile of theirs has no more, they are the keys of its products.
constexpr int kFewKeys = 16;

constexpr bool kLeavesRows = kSplit || kPairs;  // some of a tile may be unused

static_assert(DTYPE_K == kQueryType, "Q and K are the operands of one product");
static_assert(ptx::kElementBytes<kOutType> == 2);
static_assert(kQueryType != DType::int8 || kSage, "int8 means nothing without scales");

// Values of 8 bits are converted to fp16 on their way to the product (values.cuh), or transposed for a product of
// 8-bit elements (transpose.cuh). Either way they land elsewhere first.
constexpr bool kPreparesValues = ptx::kElementBytes<kValueType> == 1;
constexpr bool kTransposesValues = kE4m3P;
constexpr DType kProductType = kPreparesValues && !kTransposesValues ? DType::fp16 : kValueType;
static_assert(!kE4m3P || (kValueType == DType::e4m3 && ptx::kElementBytes<kQueryType> == 1 && !kSplit));
static_assert(!kSage || (kPreparesValues && !kSplit), "scales go with values of 8 bits, and into no partial result");

// Tiles lie in shared memory as [chunk][row][span]: a row of a chunk is one span of the swizzle. Q and K have the
// widest span that their rows are whole multiples of.
constexpr int kRowBytesQK = kHeadDimQK * ptx::kElementBytes<kQueryType>;
constexpr int kSpanQK = kRowBytesQK % 128 == 0 ? 128 : 64;  // bytes
constexpr int kChunksQK = kRowBytesQK / kSpanQK;
static_assert(kRowBytesQK % kSpanQK == 0, "rows of Q and K are whole spans");

// V, as the product takes it, and the output.
constexpr int kChunk = 64;  // 16-bit elements
constexpr int kRowBytes = kChunk * 2;
constexpr int kChunksV = kHeadDimV / kChunk;
static_assert(kHeadDimV % kChunk == 0, "rows of V are whole spans");

// Values of 8 bits mostly come with Q and K of 8 bits, whose product is too short to cover the softmax: it looks for a
// row's maximum only when it has to (softmax.cuh). There are no registers for that beside 128 accumulators of O, and no
// use where every block's maximum decides whether the block counts (skip.cuh).
constexpr bool kAssumesReference = kPreparesValues && kHeadDimV <= 128 && !kSkipsSoftmax;

static_assert(!kSkipsSoftmax || (!kSage && !kCompressesKeys), "its steps know neither");

// Where steps are arranged for blocks that count (skip.cuh). Beside 128 accumulators of O there are no registers for
// that; with values of 8 bits it is no faster.
constexpr bool kExpectsToCount = kSkipsSoftmax && kHeadDimV <= 128 && !kPreparesValues;

constexpr int kStepBytes = 32;  // of a row of Q or K: the K of one instruction
constexpr int kStepKeys = kStepBytes / ptx::kElementBytes<kProductType>;  // of P V

constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup: the M of wgmma
constexpr int kRowGroups = kTileQ / kWarpgroupRows;  // of a tile
static_assert(kRowGroups == 1 || kRowGroups == 2, "two groups take turns, one has nobody to wait for");
static_assert(!kPairs || kRowGroups == 1, "a pair shares its rows");
constexpr int kConsumers = kPairs ? 2 : kRowGroups;
constexpr int kShares = kConsumers / kRowGroups;  // of a tile's keys
constexpr bool kSeamless = kRowGroups == 2;  // the last products of a tile run beside the first ones of the next
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);

static_assert(kTileKV % 16 == 0 && kTileKV % kStepKeys == 0,
              "a chunk of K or V starts on a swizzle atom, and P V takes so many keys at a time");

// Chunks that one copy of Q moves, where its rows fill a chunk's 64: others would shift the next chunk.
constexpr int kQueryBoxChunks = kSplit ? 1 : kChunksQK;

// Q in registers halves what a product reads from shared memory, and frees Q's for the output. It does not fit beside
// 128 accumulators of O, nor beside as much of O inside and outside of the accumulator (long_sum.cuh), nor into the
// registers of one block of several; and 48 registers of it leave none for parts, nor for the warps that convert
// values.
constexpr bool kQFits = kRowBytesQK <= 256 || (!kSplit && !kPreparesValues);
constexpr bool kQInRegisters = kHeadDimV <= 128 && kBlocksPerSM == 1 && kQFits && !kE4m3P;

// Rows may be in two tiles (scheduler.cuh) where their bits do not depend on the tile: sums of 8-bit products leave the
// accumulator by blocks of the tile, and choices are made for its rows together.
constexpr bool kFillsTiles =
    kSeamless && !kSplit && !kPreparesValues && !kSkipsSoftmax && kMask != MaskType::sliding;

// Scales of keys and both bounds of a window beside as much of O inside and outside of the accumulator: a thread does
// not keep its mask in registers, and a masked block waits for the product that reads P from there.
constexpr bool kScalesAreTight = kSage && kE4m3P && kMask == MaskType::sliding;

// The warps that would store staged output prepare values, where there are any to prepare.
constexpr bool kStagesOutput = kQInRegisters && !kSplit && !kPairs && !kPreparesValues;

// A multiprocessor has 65,536 registers; setmaxnreg takes multiples of 8. With 48 registers of Q two consumers need
// the last eight, and the scheduler warp spills a little instead, off every critical path. With tiles of 64 rows there
// are enough, and short work waits for the producers.
constexpr bool kConsumersAreTight = kQInRegisters && kRowBytesQK > 256;
constexpr int kProducerRegisters = kRowGroups == 1 ? 56 : kConsumersAreTight ? 24 : 40;
constexpr int kConsumerRegisters =
    kBlocksPerSM == 2 ? 200 : kPairs ? 224 : kConsumers == 1 || kConsumersAreTight ? 240 : 232;
static_assert(kBlocksPerSM * 128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "register file");

// Columns of one P V product. Registers at launch bound the operands of an instruction, whatever setmaxnreg adds.
constexpr int kProductN = kBlocksPerSM == 1 ? kHeadDimV : 128;

}  // namespace fmha
