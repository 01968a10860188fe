// Entries that between them show every fact that cubin.inspect reads. The .cubin files beside this one:
//
//   nvcc 13.0.88, for arch in sm_90 sm_90a sm_100 sm_100f sm_103a sm_120f:
//     nvcc -cubin -arch=$arch -o facts_13.0_$arch.cubin facts.cu
//   and for sm_90a also, with -DLARGE: large_13.0_sm_90a.cubin
//
//   facts.ptx, with $arch and an ISA that has it in the first two lines, by the ptxas of
//   CUDA 11.8.89 for sm_80; 12.8.93 for sm_90 and sm_90a; 12.9.86 for sm_90a, sm_100a, sm_100f and sm_103a:
//     ptxas -arch $arch -o facts_$cuda_$arch.cubin facts.ptx

#ifdef LARGE

struct Large {
  int words[4100];
};

extern "C" __global__ void large(const __grid_constant__ Large large, int *out) { out[0] = large.words[out[1]]; }

#else

struct alignas(64) Params {
  char maps[256];
  int *out;
  float scale;
};

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 196608;
extern "C" __device__ const unsigned int fmha_other_constant = 0;

extern "C" __global__ void __launch_bounds__(384, 1) by_value(const __grid_constant__ Params params) {
  __shared__ int staged[100];
  extern __shared__ int dynamic[];
  staged[threadIdx.x % 100] = params.maps[threadIdx.x % 256];
  dynamic[threadIdx.x] = static_cast<int>(params.scale);
  __syncthreads();
  params.out[threadIdx.x] = staged[(threadIdx.x + 1) % 100] + dynamic[threadIdx.x ^ 1];
}

extern "C" __global__ void several(int a, const __grid_constant__ int4 b, char c, double d, int *out) {
  out[0] = a + b.y + c + static_cast<int>(d);
}

extern "C" __global__ void none() {}

extern "C" __global__ void local_array(int *out) {
  int values[40];
#pragma unroll 1
  for (int i = 0; i < 40; i++) values[i] = out[i];
#pragma unroll 1
  for (int i = 0; i < 40; i++) out[i] = values[out[i + 40] % 40];
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __block_size__((128, 2, 1), (2, 1, 1)) fixed_block(int *out) { out[threadIdx.x] = 1; }
#endif

#endif
