// A counter in global memory that nobody has to initialise.
#pragma once
#include <cstdint>

namespace common {

// Tickets without a counter that somebody must have zeroed. The word holds (tag, count); a word with another tag is
// foreign content, and the first block to swap it out starts the count. Whoever draws the last ticket puts 0 back,
// which is nobody's tag: a graph replay, whose tag is that of the recording, finds foreign content again.
class TicketCounter {
 public:
  __device__ TicketCounter(unsigned long long* word, uint32_t tag) : word_(word), tag_(tag) {}

  // A block's first ticket. Foreign content is swapped as a whole: who added to it would keep others from swapping it,
  // and where blocks draw one after another, all of them would wait for the last.
  __device__ __forceinline__ int draw_first() const {
    unsigned long long seen = 0;  // what is there most often
    while (tag_of(seen) != tag_) {
      const unsigned long long found = atomicCAS(word_, seen, static_cast<unsigned long long>(tag_) << 32 | 1);
      if (found == seen) return 0;
      seen = found;
    }
    return draw_next();
  }

  // Any later one: the word is the launch's already.
  __device__ __forceinline__ int draw_next() const { return static_cast<int>(atomicAdd(word_, 1ull)); }

  __device__ __forceinline__ void release() const { *static_cast<volatile unsigned long long*>(word_) = 0; }

 private:
  static __device__ __forceinline__ uint32_t tag_of(unsigned long long word) {
    return static_cast<uint32_t>(word >> 32);
  }

  unsigned long long* word_;
  uint32_t tag_;
};

}  // namespace common
