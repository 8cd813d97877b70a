// GEMM of many experts for Hopper with group scales (experts90.cuh says which block takes what): a tile is that of the
// kernel for one matrix (sm90_w4_groups.cuh), so that every row has the bits of its expert's own product.
//   partition: as sm90_w4_groups.cuh; a tile is one expert's.
//   limits: as sm90_w4_groups.cuh, and K > 0; x, out and what is of a token lie in the order of the sorted rows.
#pragma once
#include "cuda/gemm/experts90.cuh"
#include "cuda/gemm/sm90_w4_groups.cuh"

namespace pyquant::cuda {

template <class Tiles>
struct GroupsExpertsParams90 {
  GroupsParams<Tiles> of_first;  // operands of the expert at place 0, or all experts'
  int64_t least, unit;
  ExpertWork90 work;
};

// What the main loop asks of a tile.
struct GroupsExpertTile90 {
  struct Tokens {
    int32_t m, x_zero_point_step;
  };
  GroupTables groups;
  const int32_t* x_zero_point;
  Tokens epilogue;
  int32_t depth, halves;
};

template <class Tiles>
struct GroupsExpertsKernel {
  static constexpr int kThreads = kGroupsThreads90;
  using Params = GroupsExpertsParams90<Tiles>;
  using Main = MainGroups90<Tiles, GroupsExpertTile90>;
  using Pipeline = typename Main::Pipeline;
  using State = typename Main::State;
  using SharedStorage = GroupsStorage90<Tiles, Pipeline>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Scheduler = ExpertScheduler90<typename Tiles::TileShape, Cluster, true>;

  // One warp.
  CUTLASS_DEVICE static void produce(const Params& q, SharedStorage& shared, Pipeline& pipeline) {
    const GroupsParams<Tiles>& p = q.of_first;
    const int64_t row_bytes = p.blocks_k * kBlocked128BlockBytes;
    const auto slice = p.tma_x.get_slice(0);
    const auto to = slice.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(shared.tensors)));
    const auto x = p.tma_x.get_tma_tensor(cute::make_shape(p.epilogue.m, p.depth, 1));
    State state = cutlass::make_producer_start_state<Pipeline>();
    Scheduler scheduler(q.work);
    for (auto work = scheduler.initial_work_tile_info(Cluster{}); work.is_valid(); work = scheduler.advance()) {
      if (work.rows().are_ownerless()) continue;
      if (cute::elect_one_sync()) {
        const auto tiles = cute::local_tile(cute::domain_offset(cute::make_coord(work.rows().begin, 0, 0), x),
                                            typename Tiles::TileShape{}, cute::make_coord(cute::_, cute::_, cute::_),
                                            cute::Step<cute::Underscore, cute::_1, cute::_1>{});
        const auto from = slice.partition_S(tiles(cute::_, cute::_, 0, cute::_, 0));
        const uint8_t* w = p.w + q.unit * work.L_idx + work.M_idx * row_bytes;
        State fetched = state;
        for (int k = 0; k < p.blocks_k; ++k, ++fetched) {
          pipeline.producer_acquire(fetched);
          Tiles::fetch(p.tma_x, w + k * kBlocked128BlockBytes, from, to, shared.tensors,
                       pipeline.producer_get_barrier(fetched), k, fetched.index());
        }
      }
      state.advance(p.blocks_k);
    }
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  CUTLASS_DEVICE static void consume(const Params& q, SharedStorage& shared, Pipeline& pipeline, int thread) {
    const GroupsParams<Tiles>& p = q.of_first;
    const int32_t zero = zero_after_predecessor();
    GroupsExpertTile90 tile{p.groups, p.x_zero_point, {p.epilogue.m, p.epilogue.x_zero_point_step}, p.depth, p.halves};
    Main main(tile, shared.tensors, pipeline, thread);
    typename Main::Sum sum;
    Scheduler scheduler(q.work);
    for (auto work = scheduler.initial_work_tile_info(Cluster{}); work.is_valid(); work = scheduler.advance()) {
      const ExpertRows90 rows = work.rows();
      const int32_t n0 = work.M_idx * 128;
      if (rows.are_ownerless()) {
        write_no_expert<Main::kTokens, 128>(p.epilogue, rows.begin, rows.end(), n0, thread, kThreads - 128);
        continue;
      }
      const int64_t shift = q.least + q.unit * work.L_idx;
      tile.groups.scale = shifted(p.groups.scale, shift);
      tile.groups.term = shifted(p.groups.term, shift);
      if (p.epilogue.x_zero_point_step == 0) tile.x_zero_point = shifted(p.x_zero_point, shift);
      tile.epilogue.m = rows.end();
      main.run(sum, n0 + zero, rows.begin + zero);
      if (scheduler.is_last_tile(work)) release_successor();
      EpilogueParams finish = p.epilogue;
      take_expert(finish, shift, rows.end());
      Store90<float, true, 0, true>(finish).store(sum, main.own(), n0, rows.begin);
    }
  }

  CUTLASS_DEVICE static void run(const Params& q, char* raw) {
    auto& shared = *reinterpret_cast<SharedStorage*>(raw);
    run_groups90<Tiles, 40>(
        shared, [&](Pipeline& pipeline) { produce(q, shared, pipeline); },
        [&](Pipeline& pipeline, int thread) { consume(q, shared, pipeline, thread); });
  }
};

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90W4GroupsExperts : NoWorkspace {
  using Plain = GemmSm90W4Groups<M, N, K, ClusterM, ClusterN, Schedule>;
  using Tiles = typename Plain::Tiles;
  using Kernel = GroupsExpertsKernel<Tiles>;

  static void run(const GemmCall& call) {
    const DeviceGuard guard(call.context.device);  // whose tensor maps are looked up
    for_experts(call, M, N, [&](const Experts& experts, int64_t tiles) {
      const ExpertPlaces90 places(call.name, experts);
      typename Kernel::Params q{Plain::params(call), places.least, places.unit, work_of(experts, places)};
      q.of_first.w += places.least;
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(tiles, call.device.sm_count)));
      shape.block = dim3(Kernel::kThreads);
      shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
      shape.overlaps = true;
      launch<gemm_groups90_kernel<Kernel>>(call.name, shape, call.context, q);
    });
  }
};

}  // namespace pyquant::cuda
