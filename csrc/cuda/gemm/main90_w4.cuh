// Main loop for Hopper with int4 weights in the layout blocked128 (core/blocked128.h), in the shape in which CUTLASS's
// warp-specialised kernels take one, so that their schedulers serve it.
//   partition: the producer thread fetches a block of weights by one bulk copy and a tile of x by TMA; consumer
//   warpgroups load their 16-byte words, widen them in registers and multiply (weights are the left operand).
//   Codes become bytes of 16 times their value: two registers of a fragment are the two nibbles of a word, three
//   instructions for 8 codes. The accumulator holds 16 times the sum; the epilogue shifts (AccShift = 4).
//   Codes with steps (kSteps) are multiplied by them instead (steps.cuh): seven instructions for 8, and the sum itself.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/detail/layout.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "core/blocked128.h"
#include "cuda/gemm/order.cuh"
#include "cuda/gemm/steps.cuh"
#include "cuda/gemm/wgmma90.cuh"

namespace pyquant::cuda {

// The words of a thread, 4 for each half of 64 codes, to the fragments of two 64 x 32 steps.
template <class Fragment>
__device__ __forceinline__ void widen_codes(const uint4& words, Fragment&& step0, Fragment&& step1) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  auto first = cute::recast<uint32_t>(step0), second = cute::recast<uint32_t>(step1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first(2 * i) = (word[i] << 4) & 0xf0f0f0f0u;
    first(2 * i + 1) = word[i] & 0xf0f0f0f0u;
    second(2 * i) = (word[2 + i] << 4) & 0xf0f0f0f0u;
    second(2 * i + 1) = word[2 + i] & 0xf0f0f0f0u;
  }
}

// The same of codes times steps, which are the products themselves: the steps of channels g and g + 8 for a half.
template <class Fragment>
__device__ __forceinline__ void widen_products(const uint4& words, const Step& low, const Step& high, Fragment&& step0,
                                               Fragment&& step1) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  auto first = cute::recast<uint32_t>(step0), second = cute::recast<uint32_t>(step1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first(2 * i) = times_step(word[i], low);
    first(2 * i + 1) = times_step(word[i] >> 4, high);
    second(2 * i) = times_step(word[2 + i], low);
    second(2 * i + 1) = times_step(word[2 + i] >> 4, high);
  }
}

// Bytes of a block, with its steps or without.
constexpr int blocked_bytes90(bool has_steps) {
  return static_cast<int>(blocked128_bytes(kBlocked128Side, kBlocked128Side, has_steps));
}

// What the main loops over blocked weights share: shared memory, tensor map of x, the producer's copies.
template <int Channels, int Tokens, int Stages_, bool kSteps = false>
struct BlockedTiles90 {
  static_assert(Channels == 128, "a tile is one block wide");
  static constexpr int kStages = Stages_;
  static constexpr int kDepth = kBlocked128Side;
  static constexpr int kBlockBytes = blocked_bytes90(kSteps);
  static constexpr uint32_t kTransactionBytes = kBlockBytes + Tokens * kDepth;
  using TileShape = cute::Shape<cute::Int<Channels>, cute::Int<Tokens>, cute::Int<kDepth>>;
  using LayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<int8_t>{},
                                   cute::make_shape(cute::Int<Tokens>{}, cute::Int<kDepth>{}, cute::Int<kStages>{})));
  using StrideX = cute::Stride<int64_t, cute::_1, int64_t>;
  using TiledMma = decltype(cute::make_tiled_mma(wgmma_of<Tokens, kDepth>(),
                                                 cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<int8_t, cute::cosize_v<LayoutX>, 1024> x;
    cute::array_aligned<uint8_t, kBlockBytes * kStages, 128> w;
  };

  static auto tensor_map_x(const int8_t* x, int tokens, int depth, StrideX stride) {
    return cute::make_tma_copy(
        cute::SM90_TMA_LOAD{}, cute::make_tensor(x, cute::make_layout(cute::make_shape(tokens, depth, 1), stride)),
        LayoutX{}(cute::_, cute::_, cute::Int<0>{}), cute::Shape<cute::Int<Tokens>, cute::Int<kDepth>>{}, cute::_1{});
  }
  using TmaX = decltype(tensor_map_x(nullptr, 0, 0, StrideX{}));

  // x as the tensor cores address it.
  CUTLASS_DEVICE static auto shared_x(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.x.data()), LayoutX{});
  }

  // One stage: block k of the weights, tile k of x. Called by one thread.
  template <class Source, class Destination>
  CUTLASS_DEVICE static void fetch(const TmaX& tma, const uint8_t* block, const Source& x, const Destination& shared_x,
                                   TensorStorage& storage, uint64_t* barrier, int k, int stage) {
    cute::SM90_BULK_COPY_G2S::copy(block, barrier, storage.w.data() + stage * kBlockBytes, kBlockBytes);
    cute::copy(tma.with(*barrier, uint16_t{0}), x(cute::_, cute::_, cute::_, k),
               shared_x(cute::_, cute::_, cute::_, stage));
  }

  // The 16 bytes of a consumer thread in half `half` (64 codes) of a stage.
  CUTLASS_DEVICE static uint4 words_of(const TensorStorage& storage, int stage, int thread, int half) {
    const auto* block = reinterpret_cast<const uint4*>(storage.w.data() + stage * kBlockBytes);
    return block[(thread / 128 * 2 + half) * 128 + thread % 128];
  }

  // The steps of its channels: of each half of the codes those of g and g + 8.
  CUTLASS_DEVICE static uint32_t steps_of(const TensorStorage& storage, int stage, int thread) {
    const auto* steps =
        reinterpret_cast<const uint32_t*>(storage.w.data() + stage * kBlockBytes + kBlocked128BlockBytes);
    return steps[thread / 4];
  }
};

// Buffers of a main loop over blocked weights: what fits, leaving 3 KiB for barriers and the scheduler.
constexpr int stages_blocked90(int tokens, bool has_steps = false) {
  const int fit = (227 * 1024 - 3 * 1024) / (blocked_bytes90(has_steps) + tokens * kBlocked128Side);
  return fit < 12 ? fit : 12;
}

template <int Channels, int Tokens, int Stages, class KernelSchedule, bool kSteps = false>
struct MainBlocked90 {
  using Tiles = BlockedTiles90<Channels, Tokens, Stages, kSteps>;
  using DispatchPolicy =
      cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<Stages, cute::Shape<cute::_1, cute::_1, cute::_1>,
                                                             KernelSchedule>;
  using ArchTag = cutlass::arch::Sm90;
  using TileShape = typename Tiles::TileShape;
  using TiledMma = typename Tiles::TiledMma;
  using ElementA = int8_t;
  using ElementB = int8_t;
  using ElementAccumulator = int32_t;
  using StrideA = typename Tiles::StrideX;  // never read: blocks have no strides
  using StrideB = typename Tiles::StrideX;
  using MainloopPipeline = cutlass::PipelineTmaAsync<Stages>;
  using PipelineState = cutlass::PipelineState<Stages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;
  using TensorStorage = typename Tiles::TensorStorage;
  static constexpr int NumProducerThreadEvents = 1;

  struct Arguments {
    const uint8_t* w = nullptr;
    const int8_t* x = nullptr;
    StrideB stride_x{};
  };
  struct Params {
    typename Tiles::TmaX tma_x;
    const uint8_t* w;
    uint32_t tma_transaction_bytes;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem, const Arguments& arguments, void*) {
    return {Tiles::tensor_map_x(arguments.x, cute::get<1>(problem), cute::get<2>(problem), arguments.stride_x),
            arguments.w, Tiles::kTransactionBytes};
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(params.tma_x.get_tma_descriptor());
  }

  // Tiles of coordinates (the kernel reads their counts) and of x.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
    const auto [n, m, k, l] = problem;
    const auto w = cute::make_identity_tensor(cute::make_shape(n, k, l));
    const auto x = params.tma_x.get_tma_tensor(cute::make_shape(m, k, l));
    const auto every = cute::make_coord(cute::_, cute::_, cute::_);
    return cute::make_tuple(
        cute::local_tile(w, TileShape{}, every, cute::Step<cute::_1, cute::Underscore, cute::_1>{}),
        cute::local_tile(x, TileShape{}, every, cute::Step<cute::Underscore, cute::_1, cute::_1>{}));
  }

  template <class TilesW, class TilesX, class BlockAt, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState state,
                           const cute::tuple<TilesW, TilesX>& inputs, const BlockAt& at, KTiles k_tile,
                           int k_tile_count, int, uint32_t, TensorStorage& storage) {
    const auto [row, column, unused, batch] = at;
    load_tile(params, params.w, cute::size<3>(cute::get<0>(inputs)), row,
              cute::get<1>(inputs)(cute::_, cute::_, column, cute::_, batch), pipeline, state, k_tile, k_tile_count,
              storage);
  }

  // w: the first block of the matrix, of which blocks_k make a row of blocks. x: the tokens of the tile, [_, _, k].
  template <class TileX, class KTiles>
  CUTLASS_DEVICE static void load_tile(const Params& params, const uint8_t* w, int blocks_k, int row, const TileX& x,
                                       MainloopPipeline pipeline, PipelineState state, KTiles k_tile, int k_tile_count,
                                       TensorStorage& storage) {
    if (!cute::elect_one_sync()) return;
    const auto slice = params.tma_x.get_slice(0);
    const auto from = slice.partition_S(x);
    const auto to = slice.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(storage)));
    w += static_cast<int64_t>(row) * blocks_k * Tiles::kBlockBytes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tile_count > 0; --k_tile_count, ++k_tile, ++state) {
      pipeline.producer_acquire(state);
      const int k = *k_tile;
      Tiles::fetch(params.tma_x, w + int64_t{k} * Tiles::kBlockBytes, from, to, storage,
                   pipeline.producer_get_barrier(state), k, state.index());
    }
  }

  // Until consumers have taken everything: a block of a cluster must not leave before.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  // While the tensor cores work on a tile, the next one is widened into the other fragment.
  template <class Accumulator>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Accumulator& acc, int k_tile_count,
                          int thread, TensorStorage& storage, const Params&) {
    TiledMma mma;
    const int group = __shfl_sync(0xffffffffu, thread / 128, 0);
    const auto x =
        mma.get_slice(128 * group).make_fragment_B(mma.get_slice(128 * group).partition_B(Tiles::shared_x(storage)));
    using Fragment = decltype(mma.get_thread_slice(thread).partition_fragment_A(cute::make_tensor(
        static_cast<int8_t*>(nullptr), cute::Layout<cute::Shape<cute::Int<Channels>, cute::_128>>{})));
    Fragment even, odd;
    PipelineState behind = state;
    bool first = true;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    const auto tile = [&](Fragment& w) {
      pipeline.consumer_wait(state);
      keep_order();
      const int stage = state.index();
      const uint4 low = Tiles::words_of(storage, stage, thread, 0), high = Tiles::words_of(storage, stage, thread, 1);
      if constexpr (kSteps) {
        const uint32_t steps = Tiles::steps_of(storage, stage, thread);
        widen_products(low, step_of(steps, 0), step_of(steps, 1), w(cute::_, 0, 0), w(cute::_, 0, 1));
        widen_products(high, step_of(steps, 2), step_of(steps, 3), w(cute::_, 0, 2), w(cute::_, 0, 3));
      } else {
        widen_codes(low, w(cute::_, 0, 0), w(cute::_, 0, 1));
        widen_codes(high, w(cute::_, 0, 2), w(cute::_, 0, 3));
      }
      cute::warpgroup_fence_operand(acc);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        cute::gemm(mma, w(cute::_, cute::_, i), x(cute::_, cute::_, i, stage), acc);
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(acc);
      ++state;
      if (!first) {
        pipeline.consumer_release(behind);
        ++behind;
      }
      first = false;
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tile_count > 1; k_tile_count -= 2) {
      tile(even);
      tile(odd);
    }
    if (k_tile_count > 0) tile(even);
  }

  // The last tile's buffer is free once its products are done.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState state, int k_tile_count) {
    cute::warpgroup_wait<0>();
    state.advance(k_tile_count - 1);
    pipeline.consumer_release(state);
  }
};

}  // namespace pyquant::cuda
