// Between 16-bit floats, float32 and 8 bits. Every rounding is one that torch does, too, so that results agree bit
// for bit with the reference.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cstdint>
#include <type_traits>

namespace sage {

constexpr int kVector = 8;  // elements of a 16-byte load
constexpr float kLeastAmax = 1e-3f;
constexpr float kE4m3Max = 448.0f;
constexpr uint32_t kInfinityBits = 0x7f800000;

// 1.5 * 2^23: adding it rounds to an integer, to nearest even, which is then in the low bits.
constexpr float kRoundToInteger = 12582912.0f;

template <class Element>
__device__ __forceinline__ float2 unpack2(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <class Element>
__device__ __forceinline__ void unpack(const uint4& vector, float (&values)[kVector]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 pair = unpack2<Element>(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void load8(const float* address, float (&values)[kVector]) {
  const float4 low = __ldcg(reinterpret_cast<const float4*>(address));
  const float4 high = __ldcg(reinterpret_cast<const float4*>(address) + 1);
  const float loaded[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = loaded[i];
}

// An instruction on two pairs of 16-bit floats, for both kinds of them.
#define SAGE_DEFINE_PAIRWISE(NAME, INSTRUCTION)                                             \
  template <class Element>                                                                  \
  __device__ __forceinline__ uint32_t NAME(uint32_t a, uint32_t b) {                        \
    uint32_t result;                                                                        \
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                                 \
      asm(INSTRUCTION ".bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));               \
    } else {                                                                                \
      asm(INSTRUCTION ".f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));                \
    }                                                                                       \
    return result;                                                                          \
  }

// The larger magnitudes, with any signs; NaN is larger than anything.
SAGE_DEFINE_PAIRWISE(larger2, "max.NaN.xorsign.abs")

// The lesser, and the greater; NaN if one of two is.
SAGE_DEFINE_PAIRWISE(lesser2, "min.NaN")
SAGE_DEFINE_PAIRWISE(greater2, "max.NaN")

#undef SAGE_DEFINE_PAIRWISE

template <class Element>
__device__ __forceinline__ uint4 larger_magnitudes(const uint4& a, const uint4& b) {
  return {larger2<Element>(a.x, b.x), larger2<Element>(a.y, b.y), larger2<Element>(a.z, b.z),
          larger2<Element>(a.w, b.w)};
}

__device__ __forceinline__ uint4 select(bool is_first, const uint4& a, const uint4& b) {
  return {is_first ? a.x : b.x, is_first ? a.y : b.y, is_first ? a.z : b.z, is_first ? a.w : b.w};
}

template <class Element>
__device__ __forceinline__ uint4 lesser(const uint4& a, const uint4& b) {
  return {lesser2<Element>(a.x, b.x), lesser2<Element>(a.y, b.y), lesser2<Element>(a.z, b.z),
          lesser2<Element>(a.w, b.w)};
}

template <class Element>
__device__ __forceinline__ uint4 greater(const uint4& a, const uint4& b) {
  return {greater2<Element>(a.x, b.x), greater2<Element>(a.y, b.y), greater2<Element>(a.z, b.z),
          greater2<Element>(a.w, b.w)};
}

// As integers, magnitudes are in order and NaN is above infinity, so that a maximum does not lose it.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

// The largest of 8 magnitudes, as such an integer.
template <class Element>
__device__ __forceinline__ uint32_t largest_bits(const uint4& magnitudes) {
  const uint32_t low = larger2<Element>(magnitudes.x, magnitudes.y);
  const uint32_t high = larger2<Element>(magnitudes.z, magnitudes.w);
  const float2 pair = unpack2<Element>(larger2<Element>(low, high));
  return max(magnitude_bits(pair.x), magnitude_bits(pair.y));
}

__device__ __forceinline__ float zero_unless_finite(float x) {
  return magnitude_bits(x) < kInfinityBits ? x : 0.0f;
}

__device__ __forceinline__ float scale_of(float amax, float range) { return fmaxf(amax, kLeastAmax) / range; }

// Saturates; NaN stays NaN.
__device__ __forceinline__ uint32_t pack4_e4m3(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<uint32_t>(high) << 16 | low;
}

// For magnitudes below 127.5.
__device__ __forceinline__ uint32_t pack4_int8(float a, float b, float c, float d) {
  const auto integer = [](float x) { return __float_as_uint(__fadd_rn(x, kRoundToInteger)); };
  const uint32_t low = __byte_perm(integer(a), integer(b), 0x0040);
  const uint32_t high = __byte_perm(integer(c), integer(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

template <bool kIsE4m3>
__device__ __forceinline__ uint2 pack(const float (&v)[kVector]) {
  return kIsE4m3 ? uint2{pack4_e4m3(v[0], v[1], v[2], v[3]), pack4_e4m3(v[4], v[5], v[6], v[7])}
                 : uint2{pack4_int8(v[0], v[1], v[2], v[3]), pack4_int8(v[4], v[5], v[6], v[7])};
}

}  // namespace sage
