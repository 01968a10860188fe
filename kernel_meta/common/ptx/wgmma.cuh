// Warpgroup matrix products: D[64, N] (+)= A[64, K] * B[K, N], K = 32 bytes of elements. Accumulators are float32, of
// int8 elements int32.
//
// The instruction is asynchronous: between issue and wait nothing may touch its registers. The caller brackets a
// chain of products with wgmma_fence() ... wgmma_commit() ... wgmma_wait<n>() and ties the arrays with
// hold_registers() on both sides, so that the compiler moves no access into the chain.
#pragma once
#include <cstdint>

namespace ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(int32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// The contents no longer matter. A product that overwrites them counts as a reader, and would keep them alive.
template <int kCount>
__device__ __forceinline__ void drop_registers(int32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=r"(values[i]));
}

// Shared-memory operand with rows of `kSpan` bytes, the span of its swizzle (PTX ISA, "Matrix Descriptor Format").
// `leading_bytes` separates chunks of such rows of an operand that is not K-major and is ignored for a K-major one;
// groups of 8 rows follow each other in both.
template <int kSpan>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared, uint32_t leading_bytes) {
  static_assert(kSpan == 128 || kSpan == 64 || kSpan == 32);
  constexpr uint64_t kGroupOf8Rows = 8 * kSpan >> 4;
  constexpr uint64_t kSwizzle = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
  return static_cast<uint64_t>((shared & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         kGroupOf8Rows << 32 | kSwizzle << 62;
}

// A descriptor moved by `bytes` inside its operand.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

enum class Element { bf16, fp16, e4m3, int8 };

template <Element kElement>
constexpr int kElementBytes = kElement == Element::e4m3 || kElement == Element::int8 ? 1 : 2;

enum class Major { K, MN };

// Wgmma<element, N>::rs: A from registers; ::ss: A and B from shared memory. kAccumulate false overwrites D; a second
// rs takes it at run time.
// Operands of 8-bit elements are always K-major.
template <Element kElement, int kN>
struct Wgmma;

// D[64, N] += A[64, 32] * B[32, N] in fp16, where A has two non-zero elements in each group of four along K: a0 ... a3
// hold those in the layout of an A of 16 columns, and `metadata` two bits for each, its place in its group (PTX ISA,
// "Sparse wgmma"). Lanes 2 * kSelector and 2 * kSelector + 1 of a quad give the metadata of K 0-15 and K 16-31: four bits
// a group, those of row g below those of row g + 8.
template <int kN>
struct SparseWgmma;

#define PTX_ACC_FROM(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define PTX_ACC_8(c, d) PTX_ACC_FROM(c, d, 0)
#define PTX_ACC_32(c, d) PTX_ACC_FROM(c, d, 0), PTX_ACC_FROM(c, d, 8), PTX_ACC_FROM(c, d, 16), PTX_ACC_FROM(c, d, 24)
#define PTX_ACC_40(c, d) PTX_ACC_32(c, d), PTX_ACC_FROM(c, d, 32)
#define PTX_ACC_64(c, d) PTX_ACC_40(c, d), PTX_ACC_FROM(c, d, 40), PTX_ACC_FROM(c, d, 48), PTX_ACC_FROM(c, d, 56)
#define PTX_ACC_128(c, d) \
  PTX_ACC_64(c, d), PTX_ACC_FROM(c, d, 64), PTX_ACC_FROM(c, d, 72), PTX_ACC_FROM(c, d, 80), PTX_ACC_FROM(c, d, 88), \
      PTX_ACC_FROM(c, d, 96), PTX_ACC_FROM(c, d, 104), PTX_ACC_FROM(c, d, 112), PTX_ACC_FROM(c, d, 120)

#define PTX_REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PTX_REGS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_REGS_40 PTX_REGS_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define PTX_REGS_64 \
  PTX_REGS_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
  "%57, %58, %59, %60, %61, %62, %63"
#define PTX_REGS_128 \
  PTX_REGS_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// The numbers of the operands behind the accumulators depend on N, hence the explicit %n. Floating-point products also
// state whether to negate their operands (1: no).
#define PTX_DEFINE_WGMMA(ELEMENT, SUM, BIND, TYPES, N, COUNT, P0, P1, P2, P3, P4, P5, OPTIONS_RS, OPTIONS_SS)          \
  template <>                                                                                                          \
  struct Wgmma<Element::ELEMENT, N> {                                                                                  \
    using Accumulators = SUM[COUNT];                                                                                   \
    template <Major kMajorB, bool kAccumulate>                                                                         \
    static __device__ __forceinline__ void rs(Accumulators& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,     \
                                              uint64_t b) {                                                            \
      static_assert(kMajorB == Major::K || kElementBytes<Element::ELEMENT> == 2);                                      \
      asm volatile("{.reg .pred accumulate;\nsetp.ne.b32 accumulate, " P5 ", 0;\n"                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N TYPES "{" PTX_REGS_##COUNT "}, "                             \
                   "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", accumulate" OPTIONS_RS ";}"                              \
                   : PTX_ACC_##COUNT(BIND, d)                                                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kAccumulate), "n"(kMajorB == Major::MN));         \
    }                                                                                                                  \
    template <Major kMajorB>                                                                                           \
    static __device__ __forceinline__ void rs(Accumulators& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,     \
                                              uint64_t b, bool accumulates) {                                          \
      static_assert(kMajorB == Major::K || kElementBytes<Element::ELEMENT> == 2);                                      \
      asm volatile("{.reg .pred accumulate;\nsetp.ne.b32 accumulate, " P5 ", 0;\n"                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N TYPES "{" PTX_REGS_##COUNT "}, "                             \
                   "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", accumulate" OPTIONS_RS ";}"                              \
                   : PTX_ACC_##COUNT(BIND, d)                                                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulates)),                   \
                     "n"(kMajorB == Major::MN));                                                                       \
    }                                                                                                                  \
    template <bool kAccumulate>                                                                                        \
    static __device__ __forceinline__ void ss(Accumulators& d, uint64_t a, uint64_t b) {                               \
      asm volatile("{.reg .pred accumulate;\nsetp.ne.b32 accumulate, " P2 ", 0;\n"                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N TYPES "{" PTX_REGS_##COUNT "}, "                             \
                   P0 ", " P1 ", accumulate" OPTIONS_SS ";}"                                                           \
                   : PTX_ACC_##COUNT(BIND, d)                                                                          \
                   : "l"(a), "l"(b), "n"(kAccumulate));                                                                \
    }                                                                                                                  \
  };

#define PTX_DEFINE_SPARSE_WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6, P7)                                            \
  template <>                                                                                                       \
  struct SparseWgmma<N> {                                                                                           \
    template <int kSelector>                                                                                        \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                              uint64_t b, uint32_t metadata) {                                      \
      asm volatile("{.reg .pred accumulate;\nsetp.ne.b32 accumulate, " P6 ", 0;\n"                                  \
                   "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32.f16.f16 {" PTX_REGS_##COUNT "}, "             \
                   "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", " P5 ", " P7 ", accumulate, 1, 1, 1;}"                \
                   : PTX_ACC_##COUNT("+f", d)                                                                             \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(metadata), "n"(1), "n"(kSelector));            \
    }                                                                                                               \
  };

#define PTX_DEFINE_WGMMAS(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                        \
  PTX_DEFINE_WGMMA(bf16, float, "+f", "k16.f32.bf16.bf16 ", N, COUNT, P0, P1, P2, P3, P4, P5, ", 1, 1, " P6,           \
                   ", 1, 1, 0, 0")                                                                                     \
  PTX_DEFINE_WGMMA(fp16, float, "+f", "k16.f32.f16.f16 ", N, COUNT, P0, P1, P2, P3, P4, P5, ", 1, 1, " P6,             \
                   ", 1, 1, 0, 0")                                                                                     \
  PTX_DEFINE_WGMMA(e4m3, float, "+f", "k32.f32.e4m3.e4m3 ", N, COUNT, P0, P1, P2, P3, P4, P5, ", 1, 1", ", 1, 1")      \
  PTX_DEFINE_WGMMA(int8, int32_t, "+r", "k32.s32.s8.s8 ", N, COUNT, P0, P1, P2, P3, P4, P5, "", "")

PTX_DEFINE_WGMMAS(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
PTX_DEFINE_WGMMAS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
PTX_DEFINE_WGMMAS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
PTX_DEFINE_WGMMAS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
PTX_DEFINE_WGMMAS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

PTX_DEFINE_SPARSE_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
PTX_DEFINE_SPARSE_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")

#undef PTX_DEFINE_WGMMAS
#undef PTX_DEFINE_SPARSE_WGMMA
#undef PTX_DEFINE_WGMMA
#undef PTX_REGS_128
#undef PTX_REGS_64
#undef PTX_REGS_40
#undef PTX_REGS_32
#undef PTX_REGS_8
#undef PTX_ACC_128
#undef PTX_ACC_64
#undef PTX_ACC_40
#undef PTX_ACC_32
#undef PTX_ACC_8
#undef PTX_ACC_FROM

}  // namespace ptx
