// GEMM of many experts for Hopper of int4 or int8 weights as in a checkpoint and 16-bit activations, of many rows an
// expert (experts90.cuh says which block takes what): a tile is that of the kernel for one matrix that rounds scaled
// weights to 16 bits (sm90_weight_only.cuh). Every sum runs over the whole of K in one order, whatever the tile, so
// that a row's result depends on nothing but the row and its expert. K is not divided: experts make tiles enough.
//   partition: as sm90_weight_only.cuh; a tile is one expert's, blocks of a cluster have its neighbouring channels.
//   limits: as sm90_weight_only.cuh, and K > 0; rows of x and of the result lie in the order of experts.
//   addresses: operands of an expert are tensors of their own: four distances an expert, 16 KiB of parameters.
#pragma once
#include "cuda/gemm/experts90.cuh"
#include "cuda/gemm/sm90_weight_only.cuh"

namespace pyquant::cuda {

template <class Tiles>
struct WeightOnlyExpertsParams90 {
  typename Tiles::TmaX tma_x;
  typename Tiles::TmaExpertsW tma_w;
  const float* w_scale;  // of expert 0, as w_zero_point and the epilogue's bias
  const int32_t* w_zero_point;
  EpilogueParams epilogue;  // of the scaled sum
  int32_t depth = 0, row_bytes = 0, groups = 1, group_codes = 0, steps = 0, places = 1;
  ExpertWork90 work = {};  // whose places are the numbers of experts
  int32_t place[kExpertsAtOnce] = {};
  int64_t to_scale[kExpertsAtOnce] = {}, to_zero_point[kExpertsAtOnce] = {}, to_bias[kExpertsAtOnce] = {};
};

// What the main loop asks of a tile.
struct WeightOnlyExpertTile90 {
  struct Channels {
    int32_t n;
  };
  const float* w_scale;
  const int32_t* w_zero_point;
  Channels epilogue;
  int32_t groups, group_codes;
};

template <class Tiles>
struct WeightOnlyExpertsKernel90 : WeightOnlyKernel90<Tiles> {
  using Plain = WeightOnlyKernel90<Tiles>;
  using typename Plain::Pipeline, typename Plain::SharedStorage, typename Plain::State, typename Plain::Warps;
  using Params = WeightOnlyExpertsParams90<Tiles>;
  using Main = MainRounded90<Tiles, WeightOnlyExpertTile90>;
  using Tile = cute::Shape<cute::Int<Tiles::kChannels>, cute::Int<Tiles::kTokens>, cute::Int<Tiles::kDepth>>;
  using Cluster = typename Tiles::ClusterShape;
  using Scheduler = ExpertScheduler90<Tile, Cluster, true>;
  static_assert(Tiles::kWideners == 0 && Tiles::kParts == 1, "warps that multiply widen 64 bytes of a channel");

  // One warp.
  CUTLASS_DEVICE static void produce(const Params& p, SharedStorage& shared, Pipeline& pipeline) {
    const auto slice_x = p.tma_x.get_slice(Plain::rank());
    const auto slice_w = p.tma_w.get_slice(0);
    const auto to_x =
        slice_x.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(shared.tensors)));
    const auto to_w = slice_w.partition_D(Tiles::shared_w(shared.tensors));
    const auto every = cute::make_coord(cute::_, cute::_);
    const auto x = p.tma_x.get_tma_tensor(cute::make_shape(p.epilogue.m, p.depth));
    const auto w = p.tma_w.get_tma_tensor(cute::make_shape(p.epilogue.n, p.row_bytes, p.places));
    State state = cutlass::make_producer_start_state<Pipeline>();
    Scheduler scheduler(p.work);
    for (auto work = scheduler.initial_work_tile_info(Cluster{}); work.is_valid(); work = scheduler.advance()) {
      if (work.rows().are_ownerless()) continue;
      if (cute::elect_one_sync()) {
        const auto tiles_x = cute::local_tile(cute::domain_offset(cute::make_coord(work.rows().begin, 0), x),
                                              typename Tiles::TileX{}, every);
        const auto tiles_w = cute::local_tile(w(cute::_, cute::_, p.place[work.L_idx]), typename Tiles::TileW{}, every);
        const auto from_x = slice_x.partition_S(tiles_x(cute::_, cute::_, 0, cute::_));
        const auto from_w = slice_w.partition_S(tiles_w(cute::_, cute::_, work.M_idx, cute::_));
        State fetched = state;
        for (int32_t step = 0; step < p.steps; ++step, ++fetched) {
          pipeline.producer_acquire(fetched);
          uint64_t* barrier = pipeline.producer_get_barrier(fetched);
          cute::copy(p.tma_w.with(*barrier), from_w(cute::_, cute::_, cute::_, step),
                     to_w(cute::_, cute::_, cute::_, fetched.index()));
          Tiles::copy_x(p.tma_x, barrier, from_x(cute::_, cute::_, cute::_, step),
                        to_x(cute::_, cute::_, cute::_, fetched.index()));
        }
      }
      state.advance(static_cast<uint32_t>(p.steps));
    }
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  CUTLASS_DEVICE static void multiply(const Params& p, SharedStorage& shared, Pipeline& pipeline, int thread) {
    constexpr int kChannels = Tiles::kChannels;
    const int32_t zero = zero_after_predecessor();
    WeightOnlyExpertTile90 tile{p.w_scale, p.w_zero_point, {p.epilogue.n}, p.groups, p.group_codes};
    Main main(tile, shared.tensors, pipeline, shared.pipeline, thread);
    typename Main::Sum sum;
    Scheduler scheduler(p.work);
    for (auto work = scheduler.initial_work_tile_info(Cluster{}); work.is_valid(); work = scheduler.advance()) {
      const ExpertRows90 rows = work.rows();
      const int32_t n0 = work.M_idx * kChannels, expert = work.L_idx;
      if (rows.are_ownerless()) {
        write_no_expert<Tiles::kTokens, kChannels>(p.epilogue, rows.begin, rows.end(), n0, thread, 256);
        continue;
      }
      tile.w_scale = shifted(p.w_scale, p.to_scale[expert]);
      tile.w_zero_point = shifted(p.w_zero_point, p.to_zero_point[expert]);
      main.run(sum, n0 + zero, 0, p.steps);
      if (scheduler.is_last_tile(work)) release_successor();
      if (n0 >= p.epilogue.n) continue;  // of a cluster's last block
      EpilogueParams finish = p.epilogue;
      finish.m = rows.end();
      finish.bias = shifted(finish.bias, p.to_bias[expert]);
      if (p.to_bias[expert] % 8 != 0) finish.plain90 = PlainOut::none;  // which reads it by twos
      Store90<float, true, 0, true>(finish).store(sum, main.own(), n0, rows.begin);
    }
  }

  CUTLASS_DEVICE static void run(const Params& p, char* raw) {
    auto& shared = *reinterpret_cast<SharedStorage*>(raw);
    const int warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
    Pipeline pipeline(shared.pipeline, Plain::pipeline_options(warpgroup), Cluster{});
    Plain::meet();
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Warps::kFetch>();
      if (warp == 0) produce(p, shared, pipeline);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Warps::kMultiply>();
      multiply(p, shared, pipeline, static_cast<int>(threadIdx.x) - 128);
    }
  }
};

template <template <class> class Math, int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90WeightOnlyExperts : NoWorkspace {
  static_assert(Schedule::kSwapped && !Schedule::kSplits && N == 128 && ClusterM == 1);

  template <class Float>
  static void run_as(const GemmCall& call) {
    using Tiles = typename RoundedWeights90<Math<Float>, M, K, ClusterN>::Tiles;
    using Kernel = WeightOnlyExpertsKernel90<Tiles>;
    using Params = typename Kernel::Params;
    const GemmProblem& p = call.problem;
    const DeviceGuard guard(call.context.device);  // whose tensor maps are looked up
    const int64_t codes_per_byte = 8 / bits_of(Tiles::Math::kW);
    const auto rows = static_cast<int>(p.m), channels = static_cast<int>(p.n), depth = static_cast<int>(p.k);
    const auto row_bytes = static_cast<int>(ceil_div(p.k, codes_per_byte));
    for_experts(call, M, N * ClusterN, [&](const Experts& experts, int64_t tiles) {
      const ExpertPlaces90 places(call.name, experts);
      const auto* w = shifted(static_cast<const uint8_t*>(call.operands.w), places.least);
      const auto* x = static_cast<const typename Tiles::X*>(call.operands.x);
      Params q{Tiles::tensor_map_x(x, rows, depth, p.ldx),
               Tiles::tensor_map_experts_w(w, channels, row_bytes, static_cast<int>(places.count),
                                           p.ldw / codes_per_byte, places.unit),
               call.operands.w_scale, p.has_w_zero_point ? call.operands.w_zero_point : nullptr, epilogue_params(call)};
      q.epilogue.w_scale = nullptr;
      q.epilogue.plain90 = plain_out90(q.epilogue, p.out_align);  // scales are in the sums
      q.depth = depth, q.row_bytes = row_bytes;
      q.groups = p.group_size == 0 ? 1 : static_cast<int32_t>(p.k / p.group_size);
      q.steps = static_cast<int32_t>(ceil_div(p.k, K));
      q.group_codes = static_cast<int32_t>(p.group_size == 0 ? int64_t{q.steps} * K : p.group_size);
      q.places = static_cast<int32_t>(places.count);
      q.work = work_of(experts, places);
      std::copy_n(q.work.place, kExpertsAtOnce, q.place);
      for (int32_t e = 0; e < experts.count; ++e) q.work.place[e] = e;
      int64_t* const tables[] = {q.to_scale, q.to_zero_point, q.to_bias};
      for (int i = 0; i < 3; ++i)
        std::copy_n(call.operands.expert_shifts + (i + 1) * p.experts + experts.first, experts.count, tables[i]);
      const int64_t clusters = std::min<int64_t>(tiles, std::max(call.device.sm_count / ClusterN, 1));
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(clusters * ClusterN));
      shape.cluster = dim3(ClusterN);
      shape.block = dim3(Kernel::kThreads);
      shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
      shape.overlaps = true;
      launch<gemm_weight_only90_kernel<Kernel>>(call.name, shape, call.context, q);
    });
  }

  static void run(const GemmCall& call) {
    call.problem.x == DType::f16 ? run_as<__half>(call) : run_as<__nv_bfloat16>(call);
  }
};

}  // namespace pyquant::cuda
