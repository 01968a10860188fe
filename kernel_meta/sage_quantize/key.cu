// Key in blocks of tokens, after its mean over all tokens has been subtracted: a pass for the means, and one that
// quantises.
#include "common/ptx/grid.cuh"
#include "sage_quantize/statistics.cuh"

namespace sage {

template <class Element, int kBlock>
__device__ __forceinline__ void smooth(const KeyParams& params, Shared& shared) {
  const BlockTensor& key = params.key;
  const int row_vectors = key.heads * params.format.head_dim / kVector;
  const float tokens = max(edge(key.edges, key.sequences, key.tokens), 1);
  Queue queue(params.items, shared);
  Item item;
  while (queue.draw(item)) {
    const Place place(params.items, item.group);
    const int first_column = (item.chunk * place.slots + place.slot) * Columns<Element, kBlock>::kCount;
    const Columns<Element, kBlock> columns(key, first_column, place.vector, row_vectors, !item.is_first_pass);
    float values[kVector] = {};
    if (item.is_first_pass) {
      columns.add_to(values);
      const auto add = [](float a, float b) { return a + b; };
      const auto write_means = [&](const float(&sums)[kVector]) {
        float means[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) means[i] = sums[i] / tokens;
        store8(params.means + place.vector * kVector, means);
      };
      end_first_pass(params.items, item, place, shared, values, add, write_means);
    } else {
      wait_for_statistics(params.items, item.group);
      load8(params.means + place.vector * kVector, values);
      columns.quantize(values, params.format);
    }
  }
}

}  // namespace sage

extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 0;

extern "C" __global__ void __launch_bounds__(sage::kThreads, 2)
    KERNEL_NAME(const __grid_constant__ sage::KeyParams params) {
  __shared__ sage::Shared shared;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  sage::dispatch(params.key.block, params.format.is_fp16,
                 [&]<class Element, int kBlock>() { sage::smooth<Element, kBlock>(params, shared); });
}
