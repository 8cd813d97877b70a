// What the main loops for Hopper over integer weights as in a checkpoint share (main90_weight_only.cuh,
// main90_weight_only_registers.cuh): buffers and tensor maps of both operands, parameters of a launch.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cutlass/pipeline/pipeline.hpp>

#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace pyquant::cuda {

template <class Float>
struct WgmmaFloat {
  using type = cutlass::half_t;
};
template <>
struct WgmmaFloat<__nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};

// Buffers of `bytes` each, at most eight, beside `others` and 3 KiB for barriers.
constexpr int stages_weight_only90(int bytes, int others) {
  const int fit = (227 * 1024 - 3 * 1024 - others) / bytes;
  return fit < 8 ? fit : 8;
}

// Steps of Depth codes of 128 channels and of Tokens tokens. RowBytes: of a channel's weights that lie together, 64 or
// 128. Cluster: blocks of as many neighbouring channels, each of which fetches its share of the tokens for all.
template <class Math_, int Tokens, int Depth, int RowBytes, int Cluster>
struct WeightOnlyCopies90 {
  using Math = Math_;
  using X = typename WgmmaFloat<typename Math::X>::type;
  static constexpr int kChannels = 128, kTokens = Tokens, kDepth = Depth, kRowBytes = RowBytes, kCluster = Cluster;
  static constexpr int kParts = kDepth * bits_of(Math::kW) / 8 / kRowBytes;
  static constexpr int kWBytes = kChannels * kRowBytes * kParts, kXBytes = Tokens * kDepth * 2;
  static constexpr uint32_t kTransactionBytes = kWBytes + kXBytes;
  using AtomW = cute::conditional_t<kRowBytes == 64, cute::GMMA::Layout_K_SW64_Atom<uint8_t>,
                                    cute::GMMA::Layout_K_SW128_Atom<uint8_t>>;
  using CopyX = cute::conditional_t<Cluster == 1, cute::SM90_TMA_LOAD, cute::SM90_TMA_LOAD_MULTICAST>;
  using ClusterShape = cute::Shape<cute::Int<Cluster>, cute::_1, cute::_1>;
  using TileX = cute::Shape<cute::Int<Tokens>, cute::Int<kDepth>>;
  using TileW = cute::Shape<cute::Int<kChannels>, cute::Int<kRowBytes>>;
  using Stride = cute::Stride<int64_t, cute::_1>;

  template <int Stages>
  using BuffersX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<X>{},
                                   cute::make_shape(cute::Int<Tokens>{}, cute::Int<kDepth>{}, cute::Int<Stages>{})));
  template <int Stages>
  using BuffersW = decltype(cute::tile_to_shape(
      AtomW{}, cute::make_shape(cute::Int<kChannels>{}, cute::Int<kRowBytes>{}, cute::Int<kParts * Stages>{})));

  static auto tensor_map_x(const X* x, int tokens, int depth, int64_t ld) {
    return cute::make_tma_copy(CopyX{},
                               cute::make_tensor(x, cute::make_layout(cute::make_shape(tokens, depth), Stride{ld, {}})),
                               BuffersX<1>{}(cute::_, cute::_, cute::Int<0>{}), TileX{}, cute::Int<Cluster>{});
  }
  static auto tensor_map_w(const uint8_t* w, int channels, int bytes, int64_t ld) {
    return cute::make_tma_copy(
        cute::SM90_TMA_LOAD{},
        cute::make_tensor(w, cute::make_layout(cute::make_shape(channels, bytes), Stride{ld, {}})),
        BuffersW<1>{}(cute::_, cute::_, cute::Int<0>{}), TileW{}, cute::_1{});
  }
  // Of the weights of many experts, `unit` bytes from one place to the next.
  static auto tensor_map_experts_w(const uint8_t* w, int channels, int bytes, int places, int64_t ld, int64_t unit) {
    return cute::make_tma_copy(cute::SM90_TMA_LOAD{},
                               cute::make_tensor(w, cute::make_layout(cute::make_shape(channels, bytes, places),
                                                                      cute::make_stride(ld, cute::_1{}, unit))),
                               BuffersW<1>{}(cute::_, cute::_, cute::Int<0>{}), TileW{}, cute::_1{});
  }
  using TmaX = decltype(tensor_map_x(nullptr, 0, 0, 0));
  using TmaW = decltype(tensor_map_w(nullptr, 0, 0, 0));
  using TmaExpertsW = decltype(tensor_map_experts_w(nullptr, 0, 0, 0, 0, 0));

  // Of one thread: a block's share of x to all blocks of its cluster.
  template <class Source, class Destination>
  CUTLASS_DEVICE static void copy_x(const TmaX& tma, uint64_t* barrier, const Source& from, Destination&& to) {
    if constexpr (Cluster == 1)
      cute::copy(tma.with(*barrier), from, cute::forward<Destination>(to));
    else
      cute::copy(tma.with(*barrier, uint16_t{(1 << Cluster) - 1}), from, cute::forward<Destination>(to));
  }
};

// The same with `Stages` buffers of each operand.
template <class Copies, int Stages>
struct WeightOnlyBuffers90 : Copies {
  static constexpr int kStages = Stages;
  using LayoutX = typename Copies::template BuffersX<Stages>;
  using LayoutW = typename Copies::template BuffersW<Stages>;
  using Pipeline = cutlass::PipelineTmaAsync<Stages>;
  using State = cutlass::PipelineState<Stages>;

  // storage: with members `x` and `w`.
  template <class Storage>
  CUTLASS_DEVICE static auto shared_x(Storage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.x.data()), LayoutX{});
  }
  template <class Storage>
  CUTLASS_DEVICE static auto shared_w(Storage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.w.data()), LayoutW{});
  }
};

template <class Tiles>
struct WeightOnlyParams90 {
  typename Tiles::TmaX tma_x;
  typename Tiles::TmaW tma_w;
  const float* w_scale;         // [n, groups] or null
  const int32_t* w_zero_point;  // likewise
  EpilogueParams epilogue;      // of the scaled sum
  int32_t depth = 0, row_bytes = 0;
  int32_t groups = 1, group_codes = 0;  // codes: a multiple of 128, 64 or 32
  int32_t tiles = 0, tiles_n = 0;       // of whole clusters; the latter along n
  int32_t steps = 0, shares = 1, share_steps = 0;
  uint32_t* arrivals = nullptr;  // [tile][block of its cluster][warpgroup], cleared before the launch
  float4* partials = nullptr;    // [tile][block][warpgroup][share][quarter of a thread's sums][thread]
};

}  // namespace pyquant::cuda
