// spcompress: of each four consecutive keys of an interior block only the two largest logits count, and P V runs on the
// sparse tensor cores.
//
// A thread has to hold whole groups of four. So K of such a block lies in shared memory with its keys permuted: the
// first half of the rows are the first two keys of every group, the second half the other two (producer.cuh). Thread c
// of a quad, whose accumulator has columns 8 j + 2 c and the next, then holds group 4 j + c in columns j of both
// halves, and what it keeps of it are the two elements that the sparse product wants from it, with V in natural order.
//
// A logit carries its place in the group in its lowest bits, so that the maxima and minima that choose it move both at
// once. It does not need these bits: a product of 8-bit elements keeps about 13.
#pragma once
#include "softmax.cuh"

namespace fmha {

constexpr int kGroupsPerRow = kTileKV / 16;   // of a thread
constexpr int kPlaceWords = kTileKV / 64;     // 32 bits are the places of eight groups
static_assert(!kCompressesKeys || kTileKV % 64 == 0, "the sparse product takes 32 keys at a time, metadata serve two");

// What is left of a block's logits, in the layout that softmax.cuh describes for half as many columns, and their places
// in the groups, short of the last step of the exchange between threads (metadata): operands of a product may not be
// made while another one runs.
struct Kept {
  float s[kTileKV / 4];
  uint32_t places[kPlaceWords], of_other_pair[kPlaceWords];
};

// 1, which the compiler does not know: an instruction takes one constant that it knows, so that to clear some bits and
// set others would be two. Nor may it know that all lanes have the same: what it keeps for all of them, it copies for
// each use.
__device__ __forceinline__ uint32_t unknown_one() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return 1 + lane / 32;
}

// Bits 0 and 1 are the place. Bits 2 and 3 tell two chosen ones that are in the wrong order: a bit of the first is then
// set that is not set in the second. The first is never in a later half than the second.
template <uint32_t kPlace>
__device__ __forceinline__ float marked(float x, uint32_t one) {
  constexpr uint32_t kMarks[] = {0b0000, 0b0101, 0b0110, 0b1111};
  constexpr bool kSetsAll = kMarks[kPlace] == 15;
  return __uint_as_float((__float_as_uint(x) & ~15u) | kMarks[kPlace] * (kSetsAll ? 1 : one));
}

struct Pair {
  float first, second;
};

// The two largest of four, in the order of their places.
__device__ __forceinline__ Pair two_largest(float a0, float a1, float a2, float a3, uint32_t one) {
  a0 = marked<0>(a0, one), a1 = marked<1>(a1, one), a2 = marked<2>(a2, one), a3 = marked<3>(a3, one);
  const float x = fmaxf(fmaxf(a0, a1), fminf(a2, a3)), y = fmaxf(fmaxf(a2, a3), fminf(a0, a1));
  const bool swapped = __float_as_uint(x) & ~__float_as_uint(y) & 0b1100;
  return {swapped ? y : x, swapped ? x : y};
}

// A thread's eight places become those that the product wants from it. Before, nibble 4 r + 2 t + h of thread c is the
// group c of row r in half h of the keys of product t; afterwards, nibble 4 r + c of thread 2 t + h is. First h changes
// places with the lower bit of c, then t with the upper one.
__device__ __forceinline__ void exchange_places(uint32_t& places, uint32_t& of_other_pair) {
  const bool odd = threadIdx.x & 1;
  const uint32_t stays = odd ? 0xF0F0F0F0 : 0x0F0F0F0F;
  const uint32_t neighbour = __shfl_xor_sync(~0u, places, 1);
  places = (places & stays) | (__funnelshift_l(neighbour, neighbour, odd ? 28 : 4) & ~stays);
  of_other_pair = __shfl_xor_sync(~0u, places, 2);
}

__device__ __forceinline__ uint32_t metadata(uint32_t places, uint32_t of_other_pair) {
  return __byte_perm(places, of_other_pair, threadIdx.x & 2 ? 0x3715 : 0x6240);
}

__device__ __forceinline__ Kept keep_two_of_four(const Logits& s, uint32_t one) {
  Kept kept;
#pragma unroll
  for (int word = 0; word < kPlaceWords; ++word) {
    uint32_t places = 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
      for (int j = 4 * word; j < 4 * word + 4; ++j) {
        const int i = 4 * j + 2 * r, other_half = 4 * kGroupsPerRow;
        const Pair pair = two_largest(s[i], s[i + 1], s[other_half + i], s[other_half + i + 1], one);
        kept.s[i] = pair.first;
        kept.s[i + 1] = pair.second;
        places = __funnelshift_r(places, __float_as_uint(pair.first), 2);
        places = __funnelshift_r(places, __float_as_uint(pair.second), 2);
      }
    }
    kept.places[word] = places;
    exchange_places(kept.places[word], kept.of_other_pair[word]);
  }
  return kept;
}

}  // namespace fmha
