// Main loops for Hopper over integer weights as in a checkpoint, under 16-bit activations, one for each kind of warps.
//   Widener90: loads weights from shared memory, widens them less their zero points, which is exact, and stores them
//   there again as the tensor cores read floats. A lane has eight neighbouring codes at a time, so nothing is
//   exchanged. MainWeightOnly90: multiplies, and adds the float products of groups, scaled: weights are never rounded.
// Both in one warpgroup would wait for each other: what widens has the instructions of a step, what multiplies its
// registers, and operands from registers would hold a warp up until the instruction before them is done. How int4
// weights come from there all the same: main90_weight_only_registers.cuh.
#pragma once
#include <cutlass/arch/barrier.h>

#include "cuda/gemm/group_scales90.cuh"
#include "cuda/gemm/order.cuh"
#include "cuda/gemm/weight_only_tiles90.cuh"

namespace pyquant::cuda {

template <class Math, int Tokens>
using WidenedCopies90 = WeightOnlyCopies90<Math, Tokens, 128, 64, 1>;

// Steps of widened weights. Beyond 64 tokens registers allow a second product no more, nor as many warps that widen: no
// step waits for them then.
constexpr int widened_steps90(int tokens) { return tokens <= 64 ? 4 : 2; }
constexpr int kWidenedBytes90 = 128 * 128 * 2;  // of one

template <class Math, int Tokens>
struct WeightOnlyTiles90 : WeightOnlyBuffers90<WidenedCopies90<Math, Tokens>,
                                               stages_weight_only90(WidenedCopies90<Math, Tokens>::kTransactionBytes,
                                                                    widened_steps90(Tokens) * kWidenedBytes90)> {
  using Copies = WidenedCopies90<Math, Tokens>;
  using typename Copies::X;
  static constexpr bool kTwoProducts = Tokens <= 64;
  static constexpr int kWideners = kTwoProducts ? 2 : 1;
  static constexpr int kReady = widened_steps90(Tokens), kReadyBytes = kWidenedBytes90;
  static_assert(kReady % kWideners == 0, "a buffer is always the same warpgroup's");
  // Of an odd number of stages each widening warpgroup takes every one. A barrier tells only two phases apart: who
  // missed one would take the phase before it for its own, so both wait for every step, and none is overwritten before.
  static constexpr bool kAllSee = WeightOnlyTiles90::kStages % kWideners != 0;
  using LayoutReady = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<X>{},
      cute::make_shape(cute::Int<Copies::kChannels>{}, cute::Int<Copies::kDepth>{}, cute::Int<kReady>{})));
  using Ready = cutlass::PipelineAsync<kReady>;
  using ReadyState = cutlass::PipelineState<kReady>;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<X, cute::cosize_v<typename WeightOnlyTiles90::LayoutX>, 1024> x;
    cute::array_aligned<X, cute::cosize_v<LayoutReady>, 1024> ready;
    cute::array_aligned<uint8_t, cute::cosize_v<typename WeightOnlyTiles90::LayoutW>, 1024> w;
  };

  CUTLASS_DEVICE static auto shared_ready(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.ready.data()), LayoutReady{});
  }
};

// One of one or two warpgroups, which take steps in turns.
template <class Tiles>
class Widener90 {
  using Math = typename Tiles::Math;
  using Offset = typename Math::Offset;
  static constexpr int kParts = Tiles::kParts;
  static constexpr bool kNibbles = is_packed(Math::kW);
  static constexpr int kEights = kNibbles ? 4 : 2;  // of codes in a piece of 16 bytes
  static constexpr int kRows = 4;                   // of a lane, eight apart

 public:
  using Params = WeightOnlyParams90<Tiles>;
  using Storage = typename Tiles::TensorStorage;

  CUTLASS_DEVICE Widener90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                           typename Tiles::Ready& ready, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        ready_(ready),
        row_(thread % 128 / 32 * 8 * kRows + thread % 8),
        piece_(thread % 32 / 8),
        is_first_(thread % 32 == 0),
        turn_(thread / 128),
        ready_state_(cutlass::make_producer_start_state<typename Tiles::Ready>()) {}

  CUTLASS_DEVICE void run(int32_t row0, int32_t first, int32_t count) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = first; step < first + count; ++step) {
      if (turn_ == 0) {
        widen_step(row0, step);
      } else if (Tiles::kAllSee) {
        pipeline_.consumer_wait(state_);
        pipeline_.consumer_release(state_);
      }
      ++ready_state_;
      ++state_;
      turn_ = (turn_ + 1) % Tiles::kWideners;
    }
  }

 private:
  CUTLASS_DEVICE void widen_step(int32_t row0, int32_t step) {
    int32_t zero_point[kRows][kParts] = {};
    if (p_.w_zero_point) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kParts; ++i) {
        const int32_t n = row0 + row_ + i / kParts * 8;
        const int32_t group = (step * Tiles::kDepth + i % kParts * 64 + piece_ * 8 * kEights) / p_.group_codes;
        if (n < p_.epilogue.n && group < p_.groups)
          zero_point[i / kParts][i % kParts] = __ldg(p_.w_zero_point + int64_t{n} * p_.groups + group);
      }
    }
    pipeline_.consumer_wait(state_);
    ready_.producer_acquire(ready_state_);
    keep_order();
    const uint8_t* w =
        storage_.w.data() + state_.index() * Tiles::kWBytes + row_ * Tiles::kRowBytes + (piece_ ^ (row_ / 2 % 4)) * 16;
    auto* to =
        reinterpret_cast<uint8_t*>(storage_.ready.data()) + ready_state_.index() * Tiles::kReadyBytes + row_ * 128;
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint4 words[kRows];
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < kRows; ++row)
        words[row] = *reinterpret_cast<const uint4*>(w + (part * Tiles::kChannels + row * 8) * Tiles::kRowBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const Offset offset = Math::offset(zero_point[row][part]);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kEights; ++e) {
          // Of the 16 eights of a step: halves of 128 rows of 128 bytes each, whose pieces trade places by row.
          const int eight = kNibbles ? 4 * piece_ + e : 8 * part + 2 * piece_ + e;
          *reinterpret_cast<uint4*>(to + eight / 8 * (Tiles::kReadyBytes / 2) + row * 8 * 128 +
                                    (eight % 8 ^ row_ % 8) * 16) = widen(words[row], e, offset);
        }
      }
    }
    keep_order();
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (is_first_) ready_.producer_commit(ready_state_);
    pipeline_.consumer_release(state_);
  }

  // Eight neighbouring codes as floats.
  CUTLASS_DEVICE static uint4 widen(const uint4& words, int e, const Offset& offset) {
    uint32_t out[4];
    if constexpr (kNibbles) {
      // Math takes the low nibbles of both halves: of a byte, and of it shifted.
      const uint32_t word = word_of(words, e), shifted = word >> 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pair[4];
        Math::weights(make_uint4(__byte_perm(word, shifted, 0x0400 + 0x0101 * i), 0, 0, 0), 0, offset, pair);
        out[i] = pair[0];
      }
    } else {
      Math::weights(words, e, offset, out);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  const Params& p_;
  Storage& storage_;
  typename Tiles::Pipeline& pipeline_;
  typename Tiles::Ready& ready_;
  const int row_, piece_;
  const bool is_first_;
  int turn_;  // 0: the next step is this warpgroup's
  typename Tiles::State state_;
  typename Tiles::ReadyState ready_state_;
};

// One of two warpgroups, for 64 channels.
template <class Tiles>
class MainWeightOnly90 {
  using X = typename Tiles::X;
  static constexpr int kTokens = Tiles::kTokens;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<X, X, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr int kInstructions = Tiles::kDepth / 16;  // of a step

 public:
  using Params = WeightOnlyParams90<Tiles>;
  using Storage = typename Tiles::TensorStorage;
  using Sum = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_128, cute::Int<kTokens>>{}));

  CUTLASS_DEVICE MainWeightOnly90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                                  typename Tiles::Ready& ready, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        ready_(ready),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)) {}

  // Coordinates of the thread's sums within a tile.
  CUTLASS_DEVICE auto own() const {
    return Mma{}.get_thread_slice(thread_).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  }

  // The sums over `count` steps, from step `first` on, of the tile that starts at channel row0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t first, int32_t count) {
    cute::fill(sum, 0.f);
    if (count <= 0) return;
    const int32_t group = first * Tiles::kDepth / p_.group_codes;
    const int32_t row = 64 * warpgroup_ + thread_ % 128 / 32 * 16 + thread_ % 32 / 4;
    Groups groups({p_.w_scale, nullptr, p_.epilogue.n, p_.groups}, row0 + row, group);
    if (p_.groups == 1)
      multiply_through(sum, groups.take(0), count);
    else if (p_.group_codes == 32)
      multiply<4>(sum, groups, 0, count);
    else if (p_.group_codes == 64)
      multiply<2>(sum, groups, 0, count);
    else if constexpr (Tiles::kTwoProducts)
      multiply_ahead(sum, groups, (group + 1) * (p_.group_codes / Tiles::kDepth) - first, count);
    else
      multiply<1>(sum, groups, (group + 1) * (p_.group_codes / Tiles::kDepth) - first, count);
  }

 private:
  using Groups = GroupScales<false>;

  // Starts part `part` of a step's instructions, one of Count; `first`: whether they begin a sum, or go on with one.
  template <int Count>
  CUTLASS_DEVICE void start(int part, Sum& product, cute::GMMA::ScaleOut first = cute::GMMA::ScaleOut::Zero) {
    if (part == 0) {
      ready_.consumer_wait(busy_ready_);
      pipeline_.consumer_wait(busy_);
    }
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    const auto w = slice.make_fragment_A(slice.partition_A(Tiles::shared_ready(storage_)));
    const auto x = slice.make_fragment_B(slice.partition_B(Tiles::shared_x(storage_)));
    const int stage = busy_.index(), ready = busy_ready_.index();
    constexpr int kEach = kInstructions / Count;
    Mma mma;
    mma.accumulate_ = first;
    cute::warpgroup_fence_operand(product);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = part * kEach; i < (part + 1) * kEach; ++i) {
      cute::gemm(mma, w(cute::_, cute::_, i, ready), x(cute::_, cute::_, i, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    if (part == Count - 1) {
      ++busy_;
      ++busy_ready_;
    }
  }

  static CUTLASS_DEVICE void add(Sum& product, Sum& sum, const GroupFactors& group) {
    cute::warpgroup_fence_operand(product);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = ffma(product(i), group.scale[i / 2 % 2], sum(i));
  }

  // One scale a channel: the tensor cores add up all steps, one is always under way, and nothing waits for a product
  // but the buffers of the one before it.
  CUTLASS_DEVICE void multiply_through(Sum& sum, const GroupFactors& channel, int32_t count) {
    start<1>(0, sum);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 1; step < count; ++step) {
      start<1>(0, sum, cute::GMMA::ScaleOut::One);
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sum);
      release();
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(sum);
    release();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = fmul(sum(i), channel.scale[i / 2 % 2]);
  }

  // Parts of steps, Count each, one after another. `left`: steps of the first group, where groups are steps or several.
  template <int Count>
  CUTLASS_DEVICE void multiply(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    Sum product;
    GroupFactors group = groups.take(0);
    int32_t taken = 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 0; step < count; ++step) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < Count; ++part) {
        start<Count>(part, product);
        cute::warpgroup_wait<0>();
        if (part == Count - 1) release();
        add(product, sum, group);
        if (Count > 1 || --left == 0) {
          group = groups.take(taken++);
          left = p_.group_codes / Tiles::kDepth;
        }
      }
    }
  }

  // Whole steps: while one is added, the next one is multiplied.
  CUTLASS_DEVICE void multiply_ahead(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    Sum even, odd;
    GroupFactors group = groups.take(0);
    int32_t taken = 1;
    const auto pass_on = [&](Sum& product, Sum& next) {
      start<1>(0, next);
      cute::warpgroup_wait<1>();
      release();
      add(product, sum, group);
      if (--left == 0) {
        group = groups.take(taken++);
        left = p_.group_codes / Tiles::kDepth;
      }
    };
    start<1>(0, even);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 1;; ++step) {
      if (step == count) {
        cute::warpgroup_wait<0>();
        break;
      }
      pass_on(even, odd);
      if (++step == count) {
        cute::warpgroup_wait<0>();
        break;
      }
      pass_on(odd, even);
    }
    release();
    if (count % 2 == 1)
      add(even, sum, group);
    else
      add(odd, sum, group);
  }

  CUTLASS_DEVICE void release() {
    if (thread_ % 32 == 0) ready_.consumer_release(ready_state_);
    pipeline_.consumer_release(state_);
    ++ready_state_;
    ++state_;
  }

  const Params& p_;
  Storage& storage_;
  typename Tiles::Pipeline& pipeline_;
  typename Tiles::Ready& ready_;
  const int thread_, warpgroup_;
  typename Tiles::State state_, busy_;  // of the step that is released next, of the one that is multiplied next
  typename Tiles::ReadyState ready_state_, busy_ready_;
};

}  // namespace pyquant::cuda
