// Key in blocks of tokens, without its means. From the end: what `statistics` read last is still in the L2 cache.
#include "common/ptx/grid.cuh"
#include "sage_quantize/columns.cuh"

constexpr int kThreads = 128;

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(kThreads, 5)
    KERNEL_NAME(const __grid_constant__ sage::KeyParams params) {
  ptx::grid_launch_dependents();
  const unsigned thread = (gridDim.x - 1 - blockIdx.x) * kThreads + threadIdx.x;
  const unsigned row_vectors = params.key.heads * params.format.head_dim / sage::kVector;
  const unsigned vector = thread % row_vectors;
  sage::dispatch(params.key.block, params.format.is_fp16, [&]<class Element, int kBlock>() {
    using Columns = sage::Columns<Element, kBlock>;
    const int first_column = thread / row_vectors * Columns::kCount;
    Columns columns(params.key, first_column, vector, row_vectors);  // see params.h: before the wait
    ptx::grid_dependency_wait();
    float means[sage::kVector];
    sage::load8(params.means + vector * sage::kVector, means);
    columns.quantize(means, params.format);
  });
}
