// Main loop for Hopper over integer weights as in a checkpoint, under 16-bit activations: a consumer warpgroup's part
// of a tile. Weights are the left operand: read from shared memory, widened in registers less their zero points, which
// is exact, and multiplied; scales are multiplied with the float sums of groups, so that weights are never rounded.
//   Tensor cores are fed by two warpgroups in turns: while they work for one, the other adds its sums and widens its next
//   weights. No register of a product is touched between its start and the wait for it (ptxas: C7514).
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
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
template <class Math_, class Pieces_, int Tokens, int Cluster_>
struct WeightOnlyTiles90 {
  using Math = Math_;
  using Pieces = Pieces_;
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
  using LayoutW = decltype(cute::tile_to_shape(
      typename Pieces::Layout{},
      cute::make_shape(cute::Int<kChannels>{}, cute::Int<kRowBytes>{}, cute::Int<kParts * kStages>{})));
  using TileX = cute::Shape<cute::Int<Tokens>, cute::Int<kDepth>>;
  using TileW = cute::Shape<cute::Int<kChannels>, cute::Int<kRowBytes>>;
  using Stride = cute::Stride<int64_t, cute::_1>;
  using CopyX = cute::conditional_t<kCluster == 1, cute::SM90_TMA_LOAD, cute::SM90_TMA_LOAD_MULTICAST>;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<X, cute::cosize_v<LayoutX>, 1024> x;
    cute::array_aligned<uint8_t, cute::cosize_v<LayoutW>, 1024> w;
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
  using Pieces = typename Tiles::Pieces;
  static constexpr int kTokens = Tiles::kTokens, kParts = Tiles::kParts;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<X, X, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr int kInstructions = Tiles::kDepth / 16;  // of a step
  using Fragment = decltype(Mma{}.get_thread_slice(0).partition_fragment_A(
      cute::make_tensor(static_cast<X*>(nullptr), cute::Layout<cute::Shape<cute::_128, cute::Int<Tiles::kDepth>>>{})));

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
        pieces_(thread) {
    if (warpgroup_ == 1) pass_turn();
  }

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
    Groups groups(p_.groups, row0 + row(), group);
    if (p_.group_codes == 32)
      multiply<4>(sum, groups, 0, count);
    else if (p_.group_codes == 64)
      multiply<2>(sum, groups, 0, count);
    else
      multiply<1>(sum, groups, (group + 1) * (p_.group_codes / Tiles::kDepth) - first, count);
  }

 private:
  using Groups = GroupScales<false>;

  // Of the thread's channels the first one, within a tile.
  CUTLASS_DEVICE int row() const { return 64 * warpgroup_ + thread_ % 128 / 32 * 16 + thread_ % 32 / 4; }

  CUTLASS_DEVICE auto x_of() const {
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    return slice.make_fragment_B(slice.partition_B(Tiles::shared_x(storage_)));
  }

  // What a lane has of a step's codes: of channels g and g + 8.
  struct Codes {
    typename Pieces::Words part[2][kParts];
  };

  // Waits for the step of `state`.
  CUTLASS_DEVICE void read(Codes& codes, const State& state) const {
    pipeline_.consumer_wait(state);
    const uint8_t* rows = storage_.w.data() + state.index() * Tiles::kWBytes + row() * Tiles::kRowBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kParts; ++i)
      pieces_.read(rows + (i / 2 * Tiles::kChannels + i % 2 * 8) * Tiles::kRowBytes, codes.part[i % 2][i / 2]);
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

  // The codes of a step as floats.
  template <int Count>
  CUTLASS_DEVICE static void widen(const Codes& codes, const Factors<Count>& factors, Fragment& w) {
    auto to = cute::recast<uint32_t>(w);
    constexpr int kEights = Tiles::kDepth / 8;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kEights; ++e) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        to(4 * (e / 2) + 2 * (e % 2) + h) =
            Pieces::pair(codes.part[h][e / Pieces::kEights], e % Pieces::kEights,
                         factors.offset[e * Count / kEights][h]);
    }
    // Here, not behind the fence of the tensor cores, where the compiler would need another one.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kEights; ++i) cute::warpgroup_fence_operand(to(i));
  }

  // Starts kCount instructions of a step.
  template <int kCount>
  CUTLASS_DEVICE void start(const Fragment& w, int first, Sum& product, bool adds) const {
    const auto x = x_of();
    const int stage = state_.index();
    Mma mma;
    mma.accumulate_ = adds ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(product);
    await_turn();
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      cute::gemm(mma, w(cute::_, cute::_, first + i), x(cute::_, cute::_, first + i, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    pass_turn();
  }

  // Adds a group's product, which has ended.
  CUTLASS_DEVICE static void add(Sum& product, Sum& sum, const GroupFactors& group) {
    cute::warpgroup_fence_operand(product);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = ffma(product(i), group.scale[i / 2 % 2], sum(i));
  }

  // Count: groups of a step; 1: a group is a step or several, `left` of them the first one.
  template <int Count>
  CUTLASS_DEVICE void multiply(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    Sum product;
    Fragment w;
    Codes codes;
    Factors<Count> now;
    State ahead = state_;  // of the step that is read next
    int32_t taken = Count;
    bool adds = false;
    now.take(groups, 0);
    read(codes, ahead);
    ++ahead;
    widen(codes, now, w);
    if (count > 1) read(codes, ahead);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 0; step < count; ++step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i + 1 < Count; ++i) {
        start<kInstructions / Count>(w, i * kInstructions / Count, product, false);
        cute::warpgroup_wait<0>();
        add(product, sum, now.group[i]);
      }
      start<kInstructions / Count>(w, (Count - 1) * kInstructions / Count, product, adds);
      cute::warpgroup_wait<0>();
      release();
      const bool more = step + 1 < count;
      // A share may end in the middle of a group.
      const bool ends = Count > 1 || --left == 0 || !more;
      adds = !ends;
      if (ends) add(product, sum, now.group[Count - 1]);
      if (!more) break;
      if (Count > 1 || left == 0) {
        now.take(groups, taken);
        taken += Count;
        left = p_.group_codes / Tiles::kDepth;
      }
      widen(codes, now, w);
      ++ahead;
      if (step + 2 < count) read(codes, ahead);
    }
  }

  // The warpgroups take turns at the tensor cores: while they work for one, the other adds and widens. Left alone both
  // would do the same at the same time.
  CUTLASS_DEVICE void await_turn() const {
    cutlass::arch::NamedBarrier::sync(256, static_cast<uint32_t>(kTurns + warpgroup_));
  }
  CUTLASS_DEVICE void pass_turn() const {
    cutlass::arch::NamedBarrier::arrive(256, static_cast<uint32_t>(kTurns + 1 - warpgroup_));
  }

  CUTLASS_DEVICE void release() {
    pipeline_.consumer_release(state_);
    ++state_;
  }

  static constexpr int kTurns = 2;  // barriers 0 and 1 are those of a warpgroup's own threads (sm90_weight_only.cuh)
  const Params& p_;
  Storage& storage_;
  Pipeline& pipeline_;
  const int thread_, warpgroup_;
  const Pieces pieces_;
  State state_;
};

}  // namespace pyquant::cuda
