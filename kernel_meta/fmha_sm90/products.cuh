// What a consumer warpgroup multiplies: Q, K, V, the logits, the probabilities and O, and the products between them.
//
// Products run asynchronously. Whoever issues one has to see that its operands stay until it has arrived.
#pragma once
#include <utility>

#include "compress.cuh"
#include "epilogue.cuh"
#include "long_sum.cuh"
#include "pair.cuh"
#include "sage.cuh"

namespace fmha {

constexpr bool kTakesTurns = kRowGroups == 2 && !kE4m3P;
constexpr bool kFetchesScalesEarly = kSage && !kE4m3P;  // under every Q K^T
constexpr int kTurnBarrier = 1;       // + warpgroup: it may issue its products
constexpr int kWarpgroupBarrier = 3;  // + warpgroup: its 128 threads
constexpr int kConsumerThreads = 128 * kConsumers;

constexpr ptx::Major kMajorV = kTransposesValues ? ptx::Major::K : ptx::Major::MN;

// Where Q K^T accumulates: in the logits themselves, if they are floats.
template <class Products>
struct LogitProducts {
  Products integers;

  __device__ __forceinline__ Products& of(Logits&) { return integers; }
  __device__ __forceinline__ Products& anew(Logits&) {
    ptx::drop_registers(integers);
    return integers;
  }
};

template <>
struct LogitProducts<Logits> {
  __device__ __forceinline__ Logits& of(Logits& s) { return s; }
  __device__ __forceinline__ Logits& anew(Logits& s) { return s; }
};

// How the logits of a block are treated: each is visible or not to a row, all are visible, or two of four count.
enum class Block { masked, whole, pruned, none };

class ConsumerProducts {
 protected:
  __device__ __forceinline__ ConsumerProducts(const Params& params, int warpgroup, float bmm1_scale)
      : params_(params),
        warpgroup_(warpgroup),
        warp_((threadIdx.x >> 5) & 3),
        lane_(threadIdx.x & 31),
        // Masked logits are -inf, which a factor of 0 would turn into NaN.
        softmax_(kSage ? 1.f : fmaxf(fabsf(bmm1_scale) * kLog2E, __FLT_MIN__)),
        negative_scale_(!kSage && bmm1_scale < 0.f) {
    if constexpr (kPairs) k_ring_.stage = v_ring_.stage = warpgroup;
  }

  // ---- products

  __device__ __forceinline__ void take_turn() {
    ptx::mbarrier_wait(storage().k_full[k_ring_.stage], k_ring_.parity);
    if constexpr (kTakesTurns) wait_for_turn();
  }

  __device__ __forceinline__ void wait_for_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + warpgroup_, kConsumerThreads);
  }

  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTakesTurns) ptx::named_barrier_arrive(kTurnBarrier + (1 - warpgroup_), kConsumerThreads);
  }

  __device__ __forceinline__ void issue_logits() { issue_logits<kTileKV>(products_.anew(s_)); }

  template <int kKeys>
  __device__ __forceinline__ void issue_logits(typename ptx::Wgmma<kQueryType, kKeys>::Accumulators& s) {
    issue_logits<kKeys>(s, [](int) {});
  }

  // s = Q K^T, of the block's first kKeys. `between(i)` is done behind the issue of step i.
  template <int kKeys, class Between>
  __device__ __forceinline__ void issue_logits(typename ptx::Wgmma<kQueryType, kKeys>::Accumulators& s,
                                               const Between& between) {
    using Product = ptx::Wgmma<kQueryType, kKeys>;
    constexpr int kStepsPerChunk = kSpanQK / kStepBytes;
    const uint64_t k = ptx::matrix_descriptor<kSpanQK>(ptx::shared_address(storage().k[k_ring_.stage]), 0);
    ptx::hold_registers(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRowBytesQK / kStepBytes; ++i) {
      const int chunk = i / kStepsPerChunk, step = i % kStepsPerChunk * kStepBytes;
      const uint64_t b = ptx::advance_descriptor(k, chunk * (kTileKV * kSpanQK) + step);
      if constexpr (kQInRegisters) {
        if (i == 0) {
          Product::template rs<ptx::Major::K, false>(s, q_[0], q_[1], q_[2], q_[3], b);
        } else {
          Product::template rs<ptx::Major::K, true>(s, q_[4 * i], q_[4 * i + 1], q_[4 * i + 2], q_[4 * i + 3], b);
        }
      } else {
        const uint64_t q = ptx::matrix_descriptor<kSpanQK>(ptx::shared_address(storage().q[q_stage()][row_group()]), 0);
        const uint64_t a = ptx::advance_descriptor(q, chunk * (kWarpgroupRows * kSpanQK) + step);
        if (i == 0) {
          Product::template ss<false>(s, a, b);
        } else {
          Product::template ss<true>(s, a, b);
        }
      }
      between(i);
    }
    ptx::wgmma_commit();
  }

  // o += P V of the block before, of its first kKeys. Only `valid_rows` rows of V belong to the sequence.
  template <Block kBlock, int kKeys = kTileKV>
  __device__ __forceinline__ void issue_output(int valid_rows) {
    Storage& s = storage();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    if (kSeamless && has_foreign_values(valid_rows)) clear_foreign_values(valid_rows);
    const uint32_t values = ptx::shared_address(s.v[v_ring_.stage]);
    const uint64_t v = kTransposesValues ? ptx::matrix_descriptor<kStepBytes>(values, 0)
                                         : ptx::matrix_descriptor<kRowBytes>(values, kTileKV * kRowBytes);
    ptx::hold_registers(o_);
    ptx::hold_registers(p_);
    if constexpr (kCompressesKeys) ptx::hold_registers(metadata_);
    ptx::wgmma_fence();
    if constexpr (kBlock == Block::pruned) {
      issue_sparse_products(v, std::make_integer_sequence<int, kTileKV / 32>());
    } else {
      issue_products<kKeys>(v);
    }
    ptx::wgmma_commit();
  }

  template <int kKeys>
  __device__ __forceinline__ void issue_products(uint64_t v) {
#pragma unroll
    for (int i = 0; i < kKeys / kStepKeys; ++i) {
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kProductN) {
        using Columns = float[kProductN / 2];
        using Product = ptx::Wgmma<kProductType, kProductN>;
        Columns& o = reinterpret_cast<Columns&>(o_[column / 2]);
        const uint32_t* p = p_ + 4 * i;
        if constexpr (kTransposesValues) {
          const uint64_t b = ptx::advance_descriptor(v, i * kHeadDimV * kStepBytes);
          Product::template rs<kMajorV>(o, p[0], p[1], p[2], p[3], b, i != 0 || long_sum_.accumulates());
        } else {
          const uint64_t b = ptx::advance_descriptor(v, i * 16 * kRowBytes + column / kChunk * (kTileKV * kRowBytes));
          Product::template rs<kMajorV, true>(o, p[0], p[1], p[2], p[3], b);
        }
      }
    }
  }

  template <int... kSteps>
  __device__ __forceinline__ void issue_sparse_products(uint64_t v, std::integer_sequence<int, kSteps...>) {
    static_assert(kProductN == kHeadDimV);
    (ptx::SparseWgmma<kHeadDimV>::template rs<kSteps % 2>(o_, p_[4 * kSteps], p_[4 * kSteps + 1], p_[4 * kSteps + 2],
                                                          p_[4 * kSteps + 3],
                                                          ptx::advance_descriptor(v, kSteps * 32 * kRowBytes),
                                                          metadata_[kSteps / 2]),
     ...);
  }

  // Key behind which V may hold something else than the sequence's values and zeros. Where the tensor ends with the
  // sequence, the copy engine fills in zeros; only where tiles are few is it worth to find that out.
  __device__ __forceinline__ int end_of_values(const Tile& tile, const Tile& shared) const {
    constexpr int kNowhere = 0x7fffffff;
    if constexpr (!kPairs) return tile.kv_len;
    return shuffled(shared.kv_start) + tile.kv_len == params_.total_kv ? kNowhere : tile.kv_len;
  }

  // True of a tile's first block at most, which holds the sequence's last keys.
  static __device__ __forceinline__ bool has_foreign_values(int valid_rows) {
    return !kPreparesValues && valid_rows < kTileKV;
  }

  // Where tiles have 64 rows, while there are logits to wait for.
  template <int kKeys = kTileKV>
  __device__ __forceinline__ void clear_first_values() {
    if (!has_foreign_values(first_valid_rows_)) return;
    ptx::mbarrier_wait(storage().v_full[v_ring_.stage], v_ring_.parity);
    clear_foreign_values<kKeys>(first_valid_rows_);
  }

  // Rows of V behind the sequence meet probabilities of 0, but 0 * NaN is NaN: they must not reach the product.
  template <int kKeys = kTileKV>
  __device__ __forceinline__ void clear_foreign_values(int valid_rows) {
    constexpr int kVectorsPerRow = kHeadDimV / 8;
    Storage& s = storage();
    for (int i = threadIdx.x & 127; i < (kKeys - valid_rows) * kVectorsPerRow; i += 128) {
      const int row = valid_rows + i / kVectorsPerRow, vector = i % kVectorsPerRow;
      reinterpret_cast<uint4*>(s.v[v_ring_.stage][vector / 8][row])[vector % 8] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
  }

  // Sage, while Q K^T is under way; for masked blocks behind it, where registers are scarce.
  __device__ __forceinline__ void fetch_group_scales() {
#pragma unroll
    for (int i = 0; i < kTileKV / kGroup; ++i) group_scales_[i] = storage().k_scales[k_ring_.stage][i];
  }

  // Behind the wait for Q K^T, and before K's stage is given back.
  __device__ __forceinline__ void complete_logits() { completed_logits([] {}); }

  // What `use` does with them is scheduled together with what makes them.
  template <class Use>
  __device__ __forceinline__ auto completed_logits(Use use) {
    ptx::hold_registers(products_.of(s_));
    if constexpr (kSage) {
      if (one_scale_per_group(params_)) {
        if constexpr (!kFetchesScalesEarly) fetch_group_scales();
        make_exponents<true, false>(s_, products_.of(s_), key_scales(), group_scales_, softmax_);
        return use();
      }
      make_exponents<false, false>(s_, products_.of(s_), key_scales(), group_scales_, softmax_);
    }
    return use();
  }

  __device__ __forceinline__ const float (&key_scales() const)[kTileKV] { return storage().k_scales[k_ring_.stage]; }

  __device__ __forceinline__ void logits_arrived(bool last_of_tile) {
    ptx::hold_registers(s_);
    keys_read(last_of_tile);
  }

  __device__ __forceinline__ void keys_read(bool last_of_tile) {
    arrive(storage().k_empty[k_ring_.stage]);
    k_ring_.advance();
    if (!kQInRegisters && last_of_tile) release_query();
  }

  // kYounger: products issued behind P V, which go on.
  template <int kYounger = 0>
  __device__ __forceinline__ void wait_for_output() {
    ptx::wgmma_wait<kYounger>();
    ptx::hold_registers(o_);
    ptx::hold_registers(p_);
    if constexpr (kCompressesKeys) ptx::hold_registers(metadata_);
  }

  template <int kYounger = 0>
  __device__ __forceinline__ void output_arrived() {
    wait_for_output<kYounger>();
    arrive(storage().v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  // V of a block that is left out.
  __device__ __forceinline__ void pass_values() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.v_full[v_ring_.stage], v_ring_.parity);
    arrive(s.v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  // Logits that softmax turns into probabilities: those of the block, or what pruning leaves of them.
  template <Block kNow>
  __device__ __forceinline__ decltype(auto) that_count() {
    if constexpr (kNow == Block::pruned) {
      return keep_two_of_four(s_, one_);
    } else {
      return (s_);
    }
  }

  static __device__ __forceinline__ Logits& numbers(Logits& s) { return s; }
  static __device__ __forceinline__ auto& numbers(Kept& kept) { return kept.s; }

  // The accumulator layout of two neighbouring 8-column groups is the A operand layout of 16 columns of 16 bits; with
  // the keys in the order of transpose.cuh, that of four groups is the layout of 32 columns of 8 bits.
  template <int kCount>
  __device__ __forceinline__ void probabilities_to_operand(const float (&p)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount * ptx::kElementBytes<kProductType> / 4; ++i) {
      if constexpr (kE4m3P) {
        const float* four = p + 8 * (i / 2) + 2 * (i % 2);
        p_[i] = ptx::pack_e4m3x4(four[0], four[1], four[4], four[5]);
      } else {
        p_[i] = pack<kProductType>(p[2 * i], p[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void probabilities_to_operand(Kept& kept) {
    probabilities_to_operand(kept.s);
    ptx::hold_registers(kept.places);
    ptx::hold_registers(kept.of_other_pair);
#pragma unroll
    for (int i = 0; i < kPlaceWords; ++i) metadata_[i] = metadata(kept.places[i], kept.of_other_pair[i]);
  }

  // Behind `output_added`: what has left the accumulator is corrected later.
  __device__ __forceinline__ void rescale_output() {
    if constexpr (kE4m3P) {
      long_sum_.rescale(softmax_.correction);
      if (!long_sum_.accumulates()) return;
    }
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o_[i] *= softmax_.correction[(i / 2) % 2];
  }

  __device__ __forceinline__ void start_output() {
    if constexpr (kE4m3P) {
      long_sum_.clear();
    } else {
      clear(o_);
    }
  }

  __device__ __forceinline__ void output_added() {
    if constexpr (kE4m3P) long_sum_.block_added(o_);
  }

  // ---- query

  __device__ __forceinline__ void wait_for_query() {
    Storage& s = storage();
    ptx::mbarrier_wait(s.q_full[next_q_.stage()][row_group()], next_q_.parity());
    next_q_.advance();
    if constexpr (kStagesQ > 1) next_q_.position = shuffled(next_q_.position);
    if constexpr (kQInRegisters) {
      load_query_registers();
    } else if (negative_scale_) {
      negate_query_in_place();
    }
  }

  __device__ __forceinline__ void load_query_registers() {
    const int row = warp_ * 16 + (lane_ & 15);
    const uint32_t row_address = ptx::shared_address(storage().q[q_stage()][row_group()]) + row * kSpanQK;
    // The swizzle permutes a span's 16-byte units by the number of the 128-byte line that they lie in.
    constexpr int kUnits = kSpanQK / 16;
    const uint32_t pattern = row * kSpanQK / 128 % kUnits;
#pragma unroll
    for (int i = 0; i < kRowBytesQK / kStepBytes; ++i) {
      const uint32_t unit = 2 * i % kUnits + (lane_ >> 4);
      uint32_t fragment[4];
      ptx::ldmatrix_x4(fragment,
                       row_address + 2 * i / kUnits * (kWarpgroupRows * kSpanQK) + ((unit ^ pattern) << 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) q_[4 * i + j] = fragment[j];
    }
    if (negative_scale_) {
#pragma unroll
      for (uint32_t& word : q_) word ^= kSignBits;
    }
  }

  // The softmax wants a positive scale.
  __device__ __forceinline__ void negate_query_in_place() {
    uint32_t* words = reinterpret_cast<uint32_t*>(storage().q[q_stage()][row_group()]);
    constexpr int kSharing = 128 * kShares;  // threads
    for (int i = threadIdx.x & (kSharing - 1); i < kQBytes / 4; i += kSharing) words[i] ^= kSignBits;
    ptx::fence_proxy_async();
    if constexpr (kPairs) {
      wait_for_both();
    } else {
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    }
  }

  // Of the tile's Q.
  __device__ __forceinline__ uint32_t q_stage() const { return kStagesQ - 1 - next_q_.stage(); }

  // Where Q moves to registers, to be called behind the product that reads these.
  __device__ __forceinline__ void release_query() { arrive(storage().q_empty[q_stage()][row_group()]); }

  // Pairs: the other consumer has keys for it.
  __device__ __forceinline__ void skip_query() {
    ptx::mbarrier_wait(storage().q_full[0][0], next_q_.parity());
    next_q_.advance();
    if (!kQInRegisters && negative_scale_) negate_query_in_place();
    release_query();
  }

  // ---- small things

  // One arrival per warp, behind everything that its lanes did.
  __device__ __forceinline__ void arrive(ptx::Mbarrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(barrier);
  }

  // Of the tile's rows.
  __device__ __forceinline__ int row_group() const { return kPairs ? 0 : warpgroup_; }

  __device__ __forceinline__ static int shuffled(int value) { return __shfl_sync(~0u, value, 0); }

  static __device__ __forceinline__ void clear(Output& o) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.f;
  }

  static constexpr uint32_t kSignBits = ptx::kElementBytes<kQueryType> == 1 ? 0x80808080 : 0x80008000;

  const Params& params_;
  const int warpgroup_, warp_, lane_;
  Softmax softmax_;
  const bool negative_scale_;
  float group_scales_[kTileKV / kGroup];  // Sage: where keys share them

  Logits s_;
  LogitProducts<ptx::Wgmma<kQueryType, kTileKV>::Accumulators> products_;
  Output o_;
  LongSum long_sum_;
  static constexpr int kPWords = kTileKV * ptx::kElementBytes<kProductType> / 8;
  uint32_t p_[kPWords];
  uint32_t q_[kQInRegisters ? kRowBytesQK / 8 : 1];

  Ring<kStagesK, kShares> k_ring_;
  Ring<kStagesV, kShares> v_ring_;
  SmallRing<kStagesQ> next_q_{0};
  int first_valid_rows_ = 0;  // of the tile's first block, where tiles have 64 rows

  // A pruned block has half as many probabilities in p_, and says where they belong.
  uint32_t metadata_[kCompressesKeys ? kPlaceWords : 1];
  const uint32_t one_ = unknown_one();
};

}  // namespace fmha
