// Query and key in blocks of tokens, in one pass: a thread keeps its rows until their scale is known.
#include "common/ptx/grid.cuh"
#include "sage_quantize/columns.cuh"

constexpr int kThreads = 128;

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    KERNEL_NAME(const __grid_constant__ sage::BlocksParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < params.counter_count; i += kThreads) params.counters[i] = 0;
  }
  const bool is_query = blockIdx.x < params.query_blocks;
  const sage::BlockTensor& tensor = is_query ? params.query : params.key;
  const unsigned block = is_query ? blockIdx.x : blockIdx.x - params.query_blocks;
  const unsigned thread = block * kThreads + threadIdx.x;
  const unsigned row_vectors = tensor.heads * params.format.head_dim / sage::kVector;
  sage::dispatch(tensor.block, params.format.is_fp16, [&]<class Element, int kBlock>() {
    using Columns = sage::Columns<Element, kBlock>;
    const int first_column = thread / row_vectors * Columns::kCount;
    const Columns columns(tensor, first_column, thread % row_vectors, row_vectors);
    columns.quantize(params.format);
  });
}
