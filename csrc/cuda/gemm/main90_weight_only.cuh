// Main loop for Hopper over integer weights as in a checkpoint, under 16-bit activations: a consumer warpgroup's part
// of a tile. Weights are the left operand: read from shared memory, widened in registers less their zero points, which
// is exact, and multiplied; scales are multiplied with the float sums of groups, so that weights are never rounded.
//   While the tensor cores work on 64 codes, a warpgroup widens the next ones; while it adds a group's sums, they work
//   for the other warpgroup. No register of a product is touched between its start and the wait for it (ptxas: C7514).
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cutlass/pipeline/pipeline.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/group_scales90.cuh"
#include "cuda/gemm/quad_pieces90.cuh"

namespace pyquant::cuda {

template <class Float>
struct WgmmaFloat {
  using type = cutlass::half_t;
};
template <>
struct WgmmaFloat<__nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};

// Shared memory of a tile, 128 channels wide, and its copies: steps of 128 codes.
template <class Math_, int Tokens, int Cluster_>
struct WeightOnlyTiles90 {
  using Math = Math_;
  using X = typename WgmmaFloat<typename Math::X>::type;
  static constexpr int kChannels = 128, kTokens = Tokens, kDepth = 128, kCluster = Cluster_;
  static constexpr int kRowBytes = 64;  // of weights that lie together: other rows of a quarter warp are in other banks
  static constexpr int kParts = kDepth * bits_of(Math::kW) / 8 / kRowBytes;
  static constexpr int kWBytes = kChannels * kRowBytes * kParts, kXBytes = Tokens * kDepth * 2;
  static constexpr uint32_t kTransactionBytes = kWBytes + kXBytes;
  static constexpr int kFit = (227 * 1024 - 3 * 1024) / (kWBytes + kXBytes), kStages = kFit < 8 ? kFit : 8;
  using LayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<X>{},
                                   cute::make_shape(cute::Int<Tokens>{}, cute::Int<kDepth>{}, cute::Int<kStages>{})));
  using LayoutW = cute::Layout<cute::Shape<cute::Int<kChannels>, cute::Int<kRowBytes>, cute::Int<kParts * kStages>>,
                               cute::Stride<cute::Int<kRowBytes>, cute::_1, cute::Int<kChannels * kRowBytes>>>;
  using TileX = cute::Shape<cute::Int<Tokens>, cute::Int<kDepth>>;
  using TileW = cute::Shape<cute::Int<kChannels>, cute::Int<kRowBytes>>;
  using Stride = cute::Stride<int64_t, cute::_1>;
  using CopyX = cute::conditional_t<kCluster == 1, cute::SM90_TMA_LOAD, cute::SM90_TMA_LOAD_MULTICAST>;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<X, cute::cosize_v<LayoutX>, 1024> x;
    cute::array_aligned<uint8_t, cute::cosize_v<LayoutW>, 128> w;
  };

  static auto tensor_map_x(const X* x, int tokens, int depth, int64_t ld) {
    return cute::make_tma_copy(CopyX{},
                               cute::make_tensor(x, cute::make_layout(cute::make_shape(tokens, depth), Stride{ld, {}})),
                               LayoutX{}(cute::_, cute::_, cute::Int<0>{}), TileX{}, cute::Int<kCluster>{});
  }
  static auto tensor_map_w(const uint8_t* w, int channels, int bytes, int64_t ld) {
    return cute::make_tma_copy(
        cute::SM90_TMA_LOAD{},
        cute::make_tensor(w, cute::make_layout(cute::make_shape(channels, bytes), Stride{ld, {}})),
        LayoutW{}(cute::_, cute::_, cute::Int<0>{}), TileW{}, cute::_1{});
  }
  using TmaX = decltype(tensor_map_x(nullptr, 0, 0, 0));
  using TmaW = decltype(tensor_map_w(nullptr, 0, 0, 0));

  CUTLASS_DEVICE static auto shared_x(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.x.data()), LayoutX{});
  }
  CUTLASS_DEVICE static auto shared_w(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.w.data()), LayoutW{});
  }
};

template <class Tiles>
struct WeightOnlyParams90 {
  typename Tiles::TmaX tma_x;
  typename Tiles::TmaW tma_w;
  GroupTables groups;
  EpilogueParams epilogue;  // of the scaled sum
  int32_t depth = 0, row_bytes = 0;
  int32_t group_codes = 0;         // a multiple of 128, 64 or 32
  int32_t tiles = 0, tiles_n = 0;  // of a cluster, which has neighbouring channels
  int32_t steps = 0, shares = 1, share_steps = 0;
  uint32_t* arrivals = nullptr;  // [tile of a block][warpgroup], cleared before the launch
  float4* partials = nullptr;    // [tile of a block][warpgroup][share][quarter of a thread's sums][thread]
};

template <class Tiles>
class MainWeightOnly90 {
  using Math = typename Tiles::Math;
  using X = typename Tiles::X;
  using Offset = typename Math::Offset;
  using Pieces = QuadPieces<Math>;
  static constexpr int kTokens = Tiles::kTokens, kParts = Tiles::kParts;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<X, X, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr int kHalfCodes = 64, kInstructions = 4;  // of a half of a step: of 16 codes
  using Fragment = decltype(Mma{}.get_thread_slice(0).partition_fragment_A(
      cute::make_tensor(static_cast<X*>(nullptr), cute::Layout<cute::Shape<cute::_128, cute::Int<kHalfCodes>>>{})));

 public:
  using Params = WeightOnlyParams90<Tiles>;
  using Pipeline = cutlass::PipelineTmaAsync<Tiles::kStages>;
  using State = cutlass::PipelineState<Tiles::kStages>;
  using Storage = typename Tiles::TensorStorage;
  using Sum = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_128, cute::Int<kTokens>>{}));

  CUTLASS_DEVICE MainWeightOnly90(const Params& params, Storage& storage, Pipeline& pipeline, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)),
        exchange_(thread) {}

  // Coordinates of the thread's sums within a tile.
  CUTLASS_DEVICE auto own() const {
    return Mma{}.get_thread_slice(thread_).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  }

  // The sums over `count` steps, from step `first` on, of the tile that starts at channel row0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t first, int32_t count) {
    cute::fill(sum, 0.f);
    if (count <= 0) return;
    const int32_t channel = row0 + 64 * warpgroup_ + thread_ % 128 / 32 * 16 + thread_ % 32 / 4;
    const int32_t group = first * Tiles::kDepth / p_.group_codes;
    Groups groups(p_.groups, channel, group);
    if (p_.group_codes == 32)
      short_groups<2>(sum, groups, count);
    else if (p_.group_codes == 64)
      short_groups<1>(sum, groups, count);
    else
      long_groups(sum, groups, (group + 1) * (p_.group_codes / Tiles::kDepth) - first, count);
  }

 private:
  using Groups = GroupScales<false>;
  // What a lane has of a step's codes: of channels g and g + 8.
  struct Codes {
    uint32_t word[2][kParts][4];
  };

  CUTLASS_DEVICE auto x_of() const {
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    return slice.make_fragment_B(slice.partition_B(Tiles::shared_x(storage_)));
  }

  // Waits for the step of `state`.
  CUTLASS_DEVICE void read(Codes& codes, const State& state) const {
    pipeline_.consumer_wait(state);
    const int row = warpgroup_ * 64 + thread_ % 128 / 32 * 16 + thread_ % 32 / 4;
    const auto* pieces = reinterpret_cast<const uint4*>(storage_.w.data()) + state.index() * (Tiles::kWBytes / 16) +
                         row * 4 + thread_ % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kParts; ++i) {
      const uint4 v = pieces[i / 2 * Tiles::kChannels * 4 + i % 2 * 32];
      uint32_t (&word)[4] = codes.word[i % 2][i / 2];
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
      exchange_(word);
    }
  }

  // Half `Half` of a step; offset: of each of its groups, channels g and g + 8.
  template <int Half, int Count>
  CUTLASS_DEVICE static void widen(const Codes& codes, const Offset (&offset)[Count][2], Fragment& w) {
    auto to = cute::recast<uint32_t>(w);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 8; ++c) {
      constexpr int kFirst = Pieces::kEights == 16 ? 8 * Half : 0;  // of the codes that lie together
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row)
        to(4 * (c / 2) + 2 * (c % 2) + row) =
            Pieces::pair(codes.word[row][kParts == 2 ? Half : 0], kFirst + c, offset[c * Count / 8][row]);
    }
    // Here, not behind the fence of the tensor cores, where the compiler would need another one.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 16; ++i) cute::warpgroup_fence_operand(to(i));
  }

  // Starts instructions [kFrom, kFrom + kCount) of a half.
  template <int kFrom = 0, int kCount = kInstructions>
  CUTLASS_DEVICE void start(const Fragment& w, int stage, int half, Sum& product, bool adds) const {
    const auto x = x_of();
    Mma mma;
    mma.accumulate_ = adds ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(product);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = kFrom; i < kFrom + kCount; ++i) {
      cute::gemm(mma, w(cute::_, cute::_, i), x(cute::_, cute::_, kInstructions * half + i, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  // Adds a group's product, which has ended.
  CUTLASS_DEVICE static void add(Sum& product, Sum& sum, const GroupFactors& group) {
    cute::warpgroup_fence_operand(product);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = ffma(product(i), group.scale[i / 2 % 2], sum(i));
  }

  template <int Count>
  struct Factors {
    GroupFactors group[Count];
    Offset offset[Count][2];

    CUTLASS_DEVICE void take(Groups& groups, int32_t first) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) {
        group[i] = groups.take(first + i);
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) offset[i][h] = Math::offset(group[i].term[h]);
      }
    }
  };

  // Groups of whole steps; `left`: steps of the first one.
  CUTLASS_DEVICE void long_groups(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    Sum product;
    Fragment low, high;
    Codes codes;
    Factors<1> now;
    int32_t taken = 0;
    bool adds = false;
    now.take(groups, taken++);
    read(codes, state_);
    widen<0>(codes, now.offset, low);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 0; step < count; ++step) {
      const int stage = state_.index();
      start(low, stage, 0, product, adds);
      widen<1>(codes, now.offset, high);
      start(high, stage, 1, product, true);
      const GroupFactors ended = now.group[0];
      const bool more = step + 1 < count, ends = --left == 0 || !more;  // a share may end in the middle of a group
      if (more) {
        State next = state_;
        ++next;
        read(codes, next);
        if (left == 0) now.take(groups, taken++);
        cute::warpgroup_wait<1>();
        widen<0>(codes, now.offset, low);
      }
      cute::warpgroup_wait<0>();
      release();
      adds = !ends;
      if (!ends) continue;
      left = p_.group_codes / Tiles::kDepth;
      add(product, sum, ended);
    }
  }

  // Count groups to half a step.
  template <int Count>
  CUTLASS_DEVICE void short_groups(Sum& sum, Groups& groups, int32_t count) {
    constexpr int kEach = kInstructions / Count;
    Sum product;
    Fragment low, high;
    Codes codes;
    Factors<Count> now;
    int32_t taken = 0;
    now.take(groups, taken);
    read(codes, state_);
    widen<0>(codes, now.offset, low);
    // One half, and what comes after it is made ready meanwhile.
    const auto half = [&](auto is_high, const Fragment& w, bool more, auto prepare) {
      Factors<Count> next = now;
      if constexpr (Count == 2) {
        start<0, kEach>(w, state_.index(), is_high, product, false);
        if (more) next.take(groups, taken += Count);
        cute::warpgroup_wait<0>();
        add(product, sum, now.group[0]);
        start<kEach, kEach>(w, state_.index(), is_high, product, false);
      } else {
        start(w, state_.index(), is_high, product, false);
        if (more) next.take(groups, taken += Count);
      }
      if (more) prepare(next);
      cute::warpgroup_wait<0>();
      if (is_high) release();
      add(product, sum, now.group[Count - 1]);
      now = next;
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 0; step < count; ++step) {
      half(cute::false_type{}, low, true, [&](const Factors<Count>& next) { widen<1>(codes, next.offset, high); });
      half(cute::true_type{}, high, step + 1 < count, [&](const Factors<Count>& next) {
        State ahead = state_;
        ++ahead;
        read(codes, ahead);
        widen<0>(codes, next.offset, low);
      });
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
  const typename Pieces::Exchange exchange_;
  State state_;
};

}  // namespace pyquant::cuda
