// Single-instruction arithmetic.
#pragma once
#include <cstdint>

namespace ptx {

// 2^x, about 2 ulp; 2^-inf = 0, denormal results flushed.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x of two packed halves, relative error 2^-9.9.
__device__ __forceinline__ uint32_t exp2_approx_fp16x2(uint32_t x) {
  uint32_t y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The larger one, NaN where either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// log2(x), about 1 ulp.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// n / d for n from 0 to 2^20: the half keeps the quotient farther from whole numbers than it can be wrong.
__device__ __forceinline__ int divide_small(int n, int d) {
  return static_cast<int>((static_cast<float>(n) + .5f) * reciprocal_approx(static_cast<float>(d)));
}

// Divides by a number that is known long before what it divides: a division proper takes about 150 cycles.
//
// n / d = (n + n * multiplier / 2^32) / 2^shift for n below 2^31, with 2^(shift - 1) < d <= 2^shift and the multiplier
// what 2^32 * 2^shift / d exceeds 2^32 by, rounded up (Granlund and Montgomery, Division by Invariant Integers).
class Divisor {
 public:
  __device__ explicit Divisor(int d)
      : shift_(32 - __clz(d - 1)),
        multiplier_(static_cast<uint32_t>((((1ull << shift_) - d) << 32) / static_cast<uint32_t>(d)) + 1) {}

  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((__umulhi(n, multiplier_) + static_cast<uint32_t>(n)) >> shift_);
  }

  __device__ __forceinline__ int divide_up(int n) const { return n == 0 ? 0 : divide(n - 1) + 1; }

 private:
  int shift_;
  uint32_t multiplier_;
};

// Two floats rounded to nearest even and packed, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_fp16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float2 unpack_fp16x2(uint32_t packed) {
  float2 unpacked;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(unpacked.x), "=f"(unpacked.y)
      : "r"(packed));
  return unpacked;
}

// Four floats rounded to nearest even, clamped to the largest e4m3 value and packed, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Four e4m3 values as fp16, which holds them exactly, NaN included.
__device__ __forceinline__ uint2 e4m3x4_to_fp16x4(uint32_t packed) {
  uint2 converted;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(converted.x), "=r"(converted.y)
      : "r"(packed));
  return converted;
}

}  // namespace ptx
