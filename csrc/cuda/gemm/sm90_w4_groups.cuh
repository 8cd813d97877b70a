// GEMM for Hopper with group scales: int4 weights in the layout blocked128, 8-bit activations. The sum over groups is a
// float sum in ascending order, each product and addition rounded (docs/numerics.md 4), so K is not divided and
// CUTLASS's kernels, which keep one accumulator, do not serve.
//   partition: a persistent block takes tiles of 128 channels; one thread of the first warpgroup fetches (as
//   main90_w4.cuh), two warpgroups own 64 channels each and multiply and add group by group (main90_groups.cuh).
//   limits: as sm90_w4_blocked.cuh; the group size is a multiple of 64, K of the group size.
#pragma once
#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/main90_groups.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"
#include "cuda/overlap.cuh"

namespace pyquant::cuda {

constexpr int kGroupsThreads90 = 384;

template <class Tiles, class Pipeline_>
struct GroupsStorage90 {
  using Pipeline = Pipeline_;
  typename Tiles::TensorStorage tensors;
  typename Pipeline::SharedStorage pipeline;
};

// The jobs of the warps: one of the first warpgroup calls produce(pipeline), with so many registers, two warpgroups
// consume(pipeline, thread).
template <class Tiles, int kProducerRegisters, class Storage, class Produce, class Consume>
CUTLASS_DEVICE void run_groups90(Storage& shared, Produce produce, Consume consume) {
  using Pipeline = typename Storage::Pipeline;
  const int warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
  typename Pipeline::Params options;
  options.transaction_bytes = Tiles::kTransactionBytes;
  options.role = warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  options.is_leader = threadIdx.x % 128 == 0;
  options.num_consumers = kGroupsThreads90 - 128;
  Pipeline pipeline(shared.pipeline, options, cute::Shape<cute::_1, cute::_1, cute::_1>{});
  __syncthreads();
  constexpr int kConsumerRegisters = 252 - kProducerRegisters / 2;
  static_assert(
      registers_suffice(kGroupsThreads90, 128 * kProducerRegisters + (kGroupsThreads90 - 128) * kConsumerRegisters));
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == 0) produce(pipeline);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume(pipeline, static_cast<int>(threadIdx.x) - 128);
  }
}

template <class Tiles>
struct GroupsKernel {
  static constexpr int kThreads = kGroupsThreads90;
  using Main = MainGroups90<Tiles>;
  using Params = typename Main::Params;
  using Pipeline = typename Main::Pipeline;
  using State = typename Main::State;
  using SharedStorage = GroupsStorage90<Tiles, Pipeline>;

  // One thread.
  CUTLASS_DEVICE static void produce(const Params& p, SharedStorage& shared, Pipeline& pipeline) {
    const int first_row = static_cast<int>(blockIdx.x) % p.tiles_n;
    const int64_t row_bytes = p.blocks_k * kBlocked128BlockBytes;
    // The weights' first blocks come into the L2 while the kernel that writes x still runs.
    for (int k = 0; k < Tiles::kStages && k < p.blocks_k; ++k)
      cute::SM90_BULK_COPY_G2S::PREFETCH::copy(p.w + first_row * row_bytes + k * kBlocked128BlockBytes,
                                               static_cast<int32_t>(kBlocked128BlockBytes));
    wait_for_predecessor();
    const auto slice = p.tma_x.get_slice(0);
    const auto to = slice.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(shared.tensors)));
    const auto x = cute::local_tile(p.tma_x.get_tma_tensor(cute::make_shape(p.epilogue.m, p.depth, 1)),
                                    typename Tiles::TileShape{}, cute::make_coord(cute::_, cute::_, cute::_),
                                    cute::Step<cute::Underscore, cute::_1, cute::_1>{});
    State state = cutlass::make_producer_start_state<Pipeline>();
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const auto from = slice.partition_S(x(cute::_, cute::_, tile / p.tiles_n, cute::_, 0));
      const uint8_t* w = p.w + tile % p.tiles_n * row_bytes;
      for (int k = 0; k < p.blocks_k; ++k, ++state) {
        pipeline.producer_acquire(state);
        Tiles::fetch(p.tma_x, w + k * kBlocked128BlockBytes, from, to, shared.tensors,
                     pipeline.producer_get_barrier(state), k, state.index());
      }
    }
    pipeline.producer_tail(state);
  }

  CUTLASS_DEVICE static void consume(const Params& p, SharedStorage& shared, Pipeline& pipeline, int thread) {
    const int32_t zero = zero_after_predecessor();
    Main main(p, shared.tensors, pipeline, thread);
    typename Main::Sum sum;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int32_t row0 = tile % p.tiles_n * 128, column0 = tile / p.tiles_n * Main::kTokens;
      main.run(sum, row0 + zero, column0 + zero);
      if (tile + static_cast<int>(gridDim.x) >= p.tiles) release_successor();
      Store90<float, true>(p.epilogue).store(sum, main.own(), row0, column0);
    }
  }

  CUTLASS_DEVICE static void run(const Params& p, char* raw) {
    auto& shared = *reinterpret_cast<SharedStorage*>(raw);
    run_groups90<Tiles, 24>(  // one thread fetches; a warp that searches, too, needs 40
        shared,
        [&](Pipeline& pipeline) {
          if (cute::elect_one_sync()) produce(p, shared, pipeline);
        },
        [&](Pipeline& pipeline, int thread) { consume(p, shared, pipeline, thread); });
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_groups90_kernel(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) char groups90_shared[];
  Kernel::run(params, groups90_shared);
}

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90W4Groups : NoWorkspace {
  static_assert(Schedule::kSwapped && !Schedule::kSplits && K == kBlocked128Side && ClusterM * ClusterN == 1);
  using Tiles = BlockedTiles90<N, M, stages_blocked90(M)>;
  using Kernel = GroupsKernel<Tiles>;

  static typename Kernel::Params params(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    typename Kernel::Params params{Tiles::tensor_map_x(static_cast<const int8_t*>(call.operands.x),
                                                       static_cast<int>(p.m), static_cast<int>(p.k), {p.ldx, {}, 0}),
                                   static_cast<const uint8_t*>(call.operands.w),
                                   {call.operands.w_scale, p.has_zero_point ? call.operands.w_sum : nullptr,
                                    static_cast<int32_t>(p.n), static_cast<int32_t>(p.k / p.group_size)},
                                   p.has_zero_point ? call.operands.x_zero_point : nullptr,
                                   epilogue_params(call)};
    params.epilogue.w_scale = nullptr;
    params.epilogue.x_zero_point = nullptr;
    params.epilogue.plain90 = plain_out90(params.epilogue, p.out_align);  // zero points and scales are in the sums
    params.depth = static_cast<int32_t>(p.k);
    params.blocks_k = static_cast<int32_t>(blocked128_padded(p.k) / kBlocked128Side);
    params.halves = static_cast<int32_t>(p.group_size / 64);
    params.tiles_n = static_cast<int32_t>(blocked128_padded(p.n) / kBlocked128Side);
    params.tiles = params.tiles_n * static_cast<int32_t>((p.m + M - 1) / M);
    return params;
  }

  static void run(const GemmCall& call) {
    const DeviceGuard guard(call.context.device);  // whose tensor maps are looked up
    const typename Kernel::Params params = GemmSm90W4Groups::params(call);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(params.tiles < call.device.sm_count ? params.tiles : call.device.sm_count));
    shape.block = dim3(Kernel::kThreads);
    shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
    shape.overlaps = true;
    launch<gemm_groups90_kernel<Kernel>>(call.name, shape, call.context, params);
  }
};

}  // namespace pyquant::cuda
