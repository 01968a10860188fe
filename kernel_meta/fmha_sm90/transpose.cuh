// Values of 8 bits on their way to a product of 8-bit elements, which takes them transposed: the keys of one
// instruction (32) of a column lie together.
//
// ldmatrix transposes 16-bit elements, here pairs of columns of a key; byte permutations take the pairs apart, and
// stmatrix writes rows of 32 keys. What the instructions bring to the wrong place stays there:
// - Byte 16 h + 4 t + 2 i + e of 32 keys is key 16 h + 8 i + 2 t + e. That is the order in which a thread holds its
//   logits, so P becomes an operand without moving between threads.
// - Row 16 a + 8 o + g of V^T is column 16 a + 2 g + o, which the epilogue undoes: a thread holds four neighbouring
//   columns of O, where it would hold two pairs.
#pragma once
#include "common/ptx/matrix.cuh"
#include "storage.cuh"

namespace fmha {

constexpr int kColumnGroup = 16;  // bytes of a key: one 8 x 8 matrix of 16-bit elements is 8 keys of them
constexpr int kColumnGroupsPerWarp = kHeadDimV / kColumnGroup / kValueWarps;
static_assert(!kTransposesValues || (kHeadDimV == kLandingColumns && kColumnGroupsPerWarp == 4),
              "the swizzle's unit of a group is first_group ^ i ^ lane % 8");

// Loads before the first store, past which the compiler moves none.
constexpr int kGroupsInFlight = 4;

// Clears the keys behind the first `count` of 32.
__device__ __forceinline__ void keep_valid(uint32_t (&pairs)[4], int count) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int key = 8 * j + 2 * (threadIdx.x & 3);
    pairs[j] &= (key < count ? 0xFFFF : 0) | (key + 1 < count ? 0xFFFF0000 : 0);
  }
}

// This warp's share of one block. Rows behind the sequence become 0: their probabilities are 0, but 0 * NaN is NaN.
template <bool kWhole>
__device__ __forceinline__ void transpose_block(int landing_stage, int stage, int valid_rows, int warp) {
  Storage& s = storage();
  const uint32_t lane = threadIdx.x & 31;
  // A lane gives ldmatrix the address of one key's 16 columns, and stmatrix that of 16 keys of one column. The swizzles
  // permute such units, of 128 and of 32 bytes.
  const uint32_t first_group = warp * kColumnGroupsPerWarp;
  uint32_t source = ptx::shared_address(s.landing[landing_stage][0][lane]) + ((first_group ^ lane % 8) << 4);
  const uint32_t row = first_group * kColumnGroup + lane / 16 * 8 + lane % 8;
  uint32_t target = ptx::shared_address(s.v[stage][0]) + row * kStepBytes + ((lane / 8 ^ row / 4) % 2 << 4);
#pragma unroll 1
  for (int key = 0; key < kTileKV; key += kStepKeys) {
#pragma unroll
    for (int first = 0; first < kColumnGroupsPerWarp; first += kGroupsInFlight) {
      // Of 8 keys each: this thread's keys 2 t and 2 t + 1, columns 2 g and 2 g + 1.
      uint32_t pairs[kGroupsInFlight][4];
#pragma unroll
      for (int i = 0; i < kGroupsInFlight; ++i) ptx::ldmatrix_x4_trans(pairs[i], source ^ (first + i) << 4);
#pragma unroll
      for (int i = 0; i < kGroupsInFlight; ++i) {
        if constexpr (!kWhole) keep_valid(pairs[i], valid_rows - key);
        constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;
        ptx::stmatrix_x4(target + (first + i) * kColumnGroup * kStepBytes,
                         __byte_perm(pairs[i][0], pairs[i][1], kEven), __byte_perm(pairs[i][2], pairs[i][3], kEven),
                         __byte_perm(pairs[i][0], pairs[i][1], kOdd), __byte_perm(pairs[i][2], pairs[i][3], kOdd));
      }
    }
    source += kStepKeys * kLandingColumns;
    target += kHeadDimV * kStepBytes;
  }
}

}  // namespace fmha
