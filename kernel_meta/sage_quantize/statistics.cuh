// Statistics over all tokens, and a second pass that uses them, in one launch.
//
// Work is cut into items, each for a group of channels and a chunk of tokens: first passes that reduce, second passes
// that quantise. Blocks draw tickets for them in an order that has the first pass lead by about what is in flight, so
// that the second one finds its input in the L2 cache. An item depends on lower tickets only, whose blocks are running
// already; so waiting ends, however many blocks are resident.
#pragma once
#include "sage_quantize/columns.cuh"

namespace sage {

constexpr int kThreads = 256;
constexpr int kPartialsInFlight = 4;

// Shared memory of a block.
struct Shared {
  float joined[kVector][kThreads];
  unsigned ticket;
  bool is_last;
};

struct Item {
  bool is_first_pass;
  int group;
  int chunk;
};

// The items of a block, one after the other.
class Queue {
 public:
  __device__ Queue(const Items& items, Shared& shared) : items_(items), shared_(shared) {
    if (threadIdx.x == 0) upcoming_ = atomicAdd(items_.counters, 1u);
  }

  // Whether there is another item. All threads of the block ask.
  __device__ __forceinline__ bool draw(Item& item) {
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_.ticket = upcoming_;
      upcoming_ = atomicAdd(items_.counters, 1u);  // needed next time: nobody waits for it
    }
    __syncthreads();
    const unsigned ticket = shared_.ticket, count = items_.groups * items_.chunks, ahead = items_.ahead;
    const unsigned behind = ticket - ahead;  // counted from where both passes alternate
    if (ticket < ahead) {
      item = of(true, ticket);
    } else if (behind < 2 * (count - ahead)) {
      item = behind % 2 ? of(false, behind / 2) : of(true, ahead + behind / 2);
    } else {
      item = of(false, ticket - count);
    }
    return ticket < 2 * count;
  }

 private:
  __device__ __forceinline__ Item of(bool is_first_pass, unsigned number) const {
    return {is_first_pass, static_cast<int>(number / items_.chunks), static_cast<int>(number % items_.chunks)};
  }

  const Items& items_;
  Shared& shared_;
  unsigned upcoming_ = 0;
};

// Where a thread stands in an item: 8 channels, and which of the rows that the block has at a time.
struct Place {
  int lane;
  int slot;
  int slots;
  int vector;  // 8 channels each, counted through all groups

  __device__ Place(const Items& items, int group)
      : lane(threadIdx.x % items.lanes),
        slot(threadIdx.x / items.lanes),
        slots(kThreads / items.lanes),
        vector(group * items.lanes + lane) {}
};

// 8 floats that another block reads, or has written, in the same launch.
__device__ __forceinline__ void store8(float* address, const float (&v)[kVector]) {
  __stcg(reinterpret_cast<float4*>(address), float4{v[0], v[1], v[2], v[3]});
  __stcg(reinterpret_cast<float4*>(address) + 1, float4{v[4], v[5], v[6], v[7]});
}

__device__ __forceinline__ void load8(const float* address, float (&values)[kVector]) {
  const float4 low = __ldcg(reinterpret_cast<const float4*>(address));
  const float4 high = __ldcg(reinterpret_cast<const float4*>(address) + 1);
  const float loaded[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = loaded[i];
}

// One thread of a block does these for all of it, between barriers of the block.
__device__ __forceinline__ unsigned add_acq_rel(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__device__ __forceinline__ void store_release(unsigned* flag, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Joins the values of all slots in the threads of slot 0, always in the same order.
template <class Join>
__device__ __forceinline__ void join_slots(float (&values)[kVector], const Items& items, const Place& place,
                                           Shared& shared, Join join) {
  for (int half = place.slots / 2; half > 0; half /= 2) {
    if (place.slot >= half && place.slot < 2 * half) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) shared.joined[i][threadIdx.x] = values[i];
    }
    __syncthreads();
    if (place.slot < half) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = join(values[i], shared.joined[i][threadIdx.x + half * items.lanes]);
      }
    }
    __syncthreads();
  }
}

// Ends an item of the first pass with what the threads have found. In the block that ends a group's last one, the
// threads of slot 0 call `finish(values)` with the values over all tokens, and leave what the second pass waits for.
template <class Join, class Finish>
__device__ __forceinline__ void end_first_pass(const Items& items, const Item& item, const Place& place,
                                               Shared& shared, float (&values)[kVector], Join join, Finish finish) {
  const int stride = items.lanes * kVector;
  float* partials = items.partials + static_cast<long long>(item.group) * items.chunks * stride + place.lane * kVector;
  join_slots(values, items, place, shared, join);
  if (place.slot == 0) store8(partials + static_cast<long long>(item.chunk) * stride, values);
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = add_acq_rel(items.counters + 1 + item.group) + 1 == items.chunks;
  __syncthreads();
  if (!shared.is_last) return;

#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = 0.0f;  // neutral for sums, and for maxima of magnitudes
  for (int chunk = place.slot; chunk < items.chunks; chunk += kPartialsInFlight * place.slots) {
    float found[kPartialsInFlight][kVector];
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
      const int other = chunk + n * place.slots;
      const bool exists = other < items.chunks;
      load8(partials + static_cast<long long>(exists ? other : 0) * stride, found[n]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) found[n][i] = exists ? found[n][i] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kPartialsInFlight; ++n) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = join(values[i], found[n][i]);
    }
  }
  join_slots(values, items, place, shared, join);
  if (place.slot == 0) finish(values);
  __syncthreads();
  if (threadIdx.x == 0) store_release(items.counters + 1 + items.groups + item.group, 1);
}

// Blocks until the group's statistics are there.
__device__ __forceinline__ void wait_for_statistics(const Items& items, int group) {
  if (threadIdx.x == 0) {
    while (!load_acquire(items.counters + 1 + items.groups + group)) __nanosleep(32);
  }
  __syncthreads();
}

}  // namespace sage
