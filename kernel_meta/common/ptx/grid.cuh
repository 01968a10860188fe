// Programmatic dependent launch, and the per-warpgroup register budget.
#pragma once

namespace ptx {

// Blocks until the kernels that this launch depends on have completed and their writes are visible. No-op
// where the launch carries no such dependency.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the dependent kernel start its blocks once every block of this grid has said so or ended.
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
