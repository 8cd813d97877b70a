// Main loop for Hopper over groups of int4 weights in the layout blocked128: a consumer warpgroup's part of a tile.
//   A group's product is int32, 16 times the sum (widen_codes); it becomes float and is added, scaled, to float sums,
//   three instructions (I2FP has half the rate of an addition, so counting up from a float's bits would save nothing).
//   While the tensor cores work on one product, a warpgroup adds the one before and widens weights: two products are
//   alive beside the sums, of two groups, or, where registers do not allow two of all tokens, of two parts of the
//   tokens. No register of a product is touched between its start and the wait for it, on any way through the loop:
//   else ptxas waits after every instruction (C7514).
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/group_scales90.cuh"
#include "cuda/gemm/main90_w4.cuh"
#include "cuda/gemm/order.cuh"

namespace pyquant::cuda {

template <class Tiles>
struct GroupsParams {
  typename Tiles::TmaX tma_x;
  const uint8_t* w;
  GroupTables groups;
  const int32_t* x_zero_point;
  EpilogueParams epilogue;          // of the scaled sum: knows neither of the above
  int32_t depth = 0, blocks_k = 0;  // codes along k, and blocks of 128
  int32_t halves = 0;               // steps of 64 codes in a group
  int32_t tiles = 0, tiles_n = 0;
};

// Params_: at least GroupsParams's groups, x_zero_point, depth and halves, and of its epilogue's m and
// x_zero_point_step.
template <class Tiles, class Params_ = GroupsParams<Tiles>>
class MainGroups90 {
 public:
  static constexpr int kTokens = cute::size<1>(typename Tiles::TileShape{});
  using Params = Params_;
  using Pipeline = cutlass::PipelineTmaAsync<Tiles::kStages>;
  using State = cutlass::PipelineState<Tiles::kStages>;
  using Storage = typename Tiles::TensorStorage;

 private:
  template <int Tokens>
  using MmaOf = decltype(cute::make_tiled_mma(wgmma_of<Tokens, Tiles::kDepth>(),
                                              cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  template <int Tokens>
  using ProductOf = decltype(cute::partition_fragment_C(MmaOf<Tokens>{}, cute::Shape<cute::_128, cute::Int<Tokens>>{}));
  static constexpr int kParts = kTokens > 80 ? 2 : 1;
  static constexpr int kFirst1 = kParts == 2 ? 64 : 0;  // first token of the second product
  static constexpr int kTokens0 = kParts == 2 ? kFirst1 : kTokens, kTokens1 = kTokens - kFirst1;
  static constexpr int kRowUnits = Tiles::kDepth / 16;  // addresses of the tensor cores count 16 bytes
  using Mma = MmaOf<kTokens>;
  using Mma0 = MmaOf<kTokens0>;
  using Mma1 = MmaOf<kTokens1>;
  using Fragment = decltype(Mma{}.get_thread_slice(0).partition_fragment_A(cute::make_tensor(
      static_cast<int8_t*>(nullptr), cute::Layout<cute::Shape<cute::_128, cute::Int<Tiles::kDepth>>>{})));
  using Yes = cute::true_type;
  using No = cute::false_type;

 public:
  using Sum = decltype(cute::make_fragment_like<float>(ProductOf<kTokens>{}));

  CUTLASS_DEVICE MainGroups90(const Params& params, Storage& storage, Pipeline& pipeline, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)) {}

  // Coordinates of the thread's sums within a tile.
  CUTLASS_DEVICE auto own() const {
    return Mma{}.get_thread_slice(thread_).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  }

  // The sums of the tile that starts at channel row0 and token column0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t column0) {
    const auto at = own();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokens / 4; ++i) {
      const int32_t m = column0 + cute::get<1>(at(cute::make_coord(i % 2, 0, i / 2), 0, 0));
      correction_[i] = corrects() && m < p_.epilogue.m
                           ? -16 * __ldcg(p_.x_zero_point + static_cast<int64_t>(m) * p_.epilogue.x_zero_point_step)
                           : 0;
    }
    cute::fill(sum, 0.f);
    GroupScales<true> scales(p_.groups, row0 + cute::get<0>(at(cute::make_coord(0, 0, 0), 0, 0)));
    if (p_.halves == 2)
      short_groups<2>(sum, scales);
    else if (p_.halves == 1)
      short_groups<1>(sum, scales);
    else
      long_groups(sum, scales);
  }

 private:
  CUTLASS_DEVICE bool corrects() const { return p_.x_zero_point != nullptr; }

  // x as the tensor cores address it, from token `kFirst` of each tile on.
  template <int kFirst>
  CUTLASS_DEVICE auto x_from() const {
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    const auto x = slice.make_fragment_B(slice.partition_B(Tiles::shared_x(storage_)));
    return cute::make_tensor(x.data() + kFirst * kRowUnits, x.layout());
  }

  // Starts a product of kHalves times 64 codes, from half `half` of a stage on.
  template <int kHalves, int kFirst, class MmaOfProduct, class Product>
  CUTLASS_DEVICE void start(MmaOfProduct mma, const Fragment& w, int stage, int half, Product& product,
                            bool adds = false) const {
    const auto x = x_from<kFirst>();
    mma.accumulate_ = adds ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(product);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kHalves; ++i) {
      cute::gemm(mma, w(cute::_, cute::_, i), x(cute::_, cute::_, 2 * half + i, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  // Adds a group's product, which has ended, to the sums of tokens from kFirst on.
  template <int kFirst, class Product>
  CUTLASS_DEVICE void add(Product& product, Sum& sum, const GroupFactors& group) const {
    cute::warpgroup_fence_operand(product);
    const auto each = [](auto body) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(Product{}); ++i) body(i / 4, i / 2 % 2, i % 2);
    };
    const auto at = [](int j, int h, int v) { return cute::make_coord(cute::make_coord(v, h, j), 0, 0); };
    if (corrects()) {
      each([&](int j, int h, int v) { product(at(j, h, v)) += correction_[2 * (kFirst / 8 + j) + v] * group.term[h]; });
    }
    if (group.shifts) each([&](int j, int h, int v) { product(at(j, h, v)) >>= 4; });
    each([&](int j, int h, int v) {
      float& total = sum(at(kFirst / 8 + j, h, v));
      total = fadd(total, fmul(__int2float_rn(product(at(j, h, v))), group.scale[h]));
    });
  }

  // The weights of units, 64 codes (half a stage) or 128, a unit ahead of `state_`, the stage that is released next.
  template <int kHalves>
  struct Ahead {
    State state;
    uint4 words[kHalves];
  };

  // Waits for a unit; its stage.
  template <int kHalves, class IsOdd>
  CUTLASS_DEVICE int read(Ahead<kHalves>& ahead, IsOdd is_odd) const {
    if (kHalves == 2 || !is_odd) pipeline_.consumer_wait(ahead.state);
    keep_order();
    const int stage = ahead.state.index();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHalves; ++i)
      ahead.words[i] = Tiles::words_of(storage_, stage, thread_, kHalves == 1 && is_odd ? 1 : i);
    if (kHalves == 2 || is_odd) ++ahead.state;
    return stage;
  }
  template <int kHalves>
  CUTLASS_DEVICE static void widen(const Ahead<kHalves>& ahead, Fragment& w) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHalves; ++i) widen_codes(ahead.words[i], w(cute::_, 0, 2 * i), w(cute::_, 0, 2 * i + 1));
  }

  // Groups of one unit each.
  template <int kHalves>
  CUTLASS_DEVICE void short_groups(Sum& sum, GroupScales<true>& scales) {
    const int units = p_.groups.groups;
    Fragment even, odd;
    ProductOf<kTokens0> product0;
    ProductOf<kTokens1> product1;
    Ahead<kHalves> ahead{state_, {}};
    int stage = read(ahead, No{}), next_stage = stage;
    widen(ahead, even);
    start<kHalves, 0>(Mma0{}, even, stage, 0, product0);
    if (units > 1) {
      next_stage = read(ahead, Yes{});
      widen(ahead, odd);
    }
    // Unit u, of which one product is under way: the other one, if it has two.
    const auto finish_start = [&](auto is_odd, const Fragment& w, const GroupFactors& group) {
      if constexpr (kParts == 2) {
        start<kHalves, kFirst1>(Mma1{}, w, stage, kHalves == 1 && is_odd ? 1 : 0, product1);
        cute::warpgroup_wait<1>();
        add<0>(product0, sum, group);
      }
    };
    // Starts the next unit, whose weights are `next`, ends unit u, and widens those of u + 2 into its registers.
    const auto pass_on = [&](int u, auto is_odd, Fragment& w, const Fragment& next, const GroupFactors& group) {
      constexpr bool kSwaps = kParts == 1 && !is_odd;  // the products are of units
      const int half = kHalves == 1 && !is_odd ? 1 : 0;
      if constexpr (kSwaps)
        start<kHalves, 0>(Mma1{}, next, next_stage, half, product1);
      else
        start<kHalves, 0>(Mma0{}, next, next_stage, half, product0);
      stage = next_stage;
      const bool reads = u + 2 < units;
      if (reads) next_stage = read(ahead, is_odd);
      cute::warpgroup_wait<1>();
      if (kHalves == 2 || is_odd) release();
      if (reads) widen(ahead, w);
      if constexpr (kSwaps)
        add<0>(product0, sum, group);
      else
        add<kFirst1>(product1, sum, group);
    };
    GroupFactors group;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int u = 0;; ++u) {
      group = scales.take(u);
      finish_start(No{}, even, group);
      if (u + 1 == units) {
        cute::warpgroup_wait<0>();
        break;
      }
      pass_on(u, No{}, even, odd, group);
      group = scales.take(++u);
      finish_start(Yes{}, odd, group);
      if (u + 1 == units) {
        cute::warpgroup_wait<0>();
        break;
      }
      pass_on(u, Yes{}, odd, even, group);
    }
    release();
    if (kParts == 1 && units % 2 == 1)
      add<0>(product0, sum, group);
    else
      add<kFirst1>(product1, sum, group);
  }

  // Any other groups, 64 codes at a time: one product, added where a group ends.
  CUTLASS_DEVICE void long_groups(Sum& sum, GroupScales<true>& scales) {
    const int steps = p_.depth / 64;
    ProductOf<kTokens> product;
    Fragment w;
    int done = 0, group = 0;
    pipeline_.consumer_wait(state_);
    keep_order();
    uint4 words = Tiles::words_of(storage_, state_.index(), thread_, 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      const int half = step % 2;
      State next = state_;
      if (half == 1) ++next;
      widen_codes(words, w(cute::_, 0, 0), w(cute::_, 0, 1));
      // Here, not behind the fence of the tensor cores, where the compiler would need another one.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) cute::warpgroup_fence_operand(cute::recast<uint32_t>(w)(i));
      start<1, 0>(Mma{}, w, state_.index(), half, product, done > 0);
      if (step + 1 < steps) {
        if (half == 1) pipeline_.consumer_wait(next);
        keep_order();
        words = Tiles::words_of(storage_, next.index(), thread_, 1 - half);
      }
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(product);
      if (half == 1 || step + 1 == steps) release();
      if (++done < p_.halves) continue;
      done = 0;
      add<0>(product, sum, scales.take(group++));
    }
  }

  CUTLASS_DEVICE void release() {
    pipeline_.consumer_release(state_);
    ++state_;
  }

  const Params& p_;
  Storage& storage_;
  Pipeline& pipeline_;
  const int thread_, warpgroup_;
  State state_;
  int32_t correction_[kTokens / 4];  // of 16 times a sum, for codes whose sum is 1
};

}  // namespace pyquant::cuda
