// The experts of a mixture under CUTLASS's warp-specialised kernels for sm_90a: what takes the place of its scheduler
// and epilogue, and the launch. Rows of x are sorted by expert; how many each has, a block reads on the device.
//   partition: as many blocks as there are multiprocessors take tiles one after another, those of an expert next to one
//   another: of up to kRowsAbreast tiles of rows the same channels first, so that weights come from main memory once.
//   Blocks of a cluster share a tile of rows and have channels side by side.
//   addresses: a tile begins at any row of x, behind its expert's last row it holds those of others, which nobody
//   stores. Weights of experts lie anywhere: their distances have a power of two in common, the stride of a third
//   dimension of the tensor map, along which each expert has its place.
#pragma once
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "cuda/gemm/experts.cuh"
#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/store90.cuh"

namespace pyquant::cuda {

// The rows of a tile, where CUTLASS has a number of one. Those of no expert are a tile, too.
struct ExpertRows90 {
  int32_t begin, behind;  // to the expert's last; of no expert: less than 0

  CUTLASS_DEVICE bool are_ownerless() const { return behind < 0; }
  CUTLASS_DEVICE int32_t end() const { return are_ownerless() ? ~behind : behind; }
};

// Distances of experts' operands: expert e has its own `unit * at[e] + least` bytes behind those of expert 0.
struct ExpertPlaces90 {
  int64_t least = 0, unit = 16, count = 1;  // places that a tensor map knows
  int32_t at[kExpertsAtOnce] = {};

  explicit ExpertPlaces90(const char* name, const ExpertTable& table) {
    int64_t most = table.shift[0], mixed = 0;
    least = most;
    for (int32_t e = 1; e < table.count; ++e) {
      least = std::min(least, table.shift[e]);
      most = std::max(most, table.shift[e]);
      mixed |= table.shift[e] ^ table.shift[0];
    }
    // Their differences are multiples of the lowest bit in which any two differ; strides of tensor maps are below 2^40.
    if (mixed != 0) unit = std::min<int64_t>(mixed & -mixed, int64_t{1} << 36);
    count = (most - least) / unit + 1;
    if (unit % 16 != 0 || count > INT32_MAX)
      throw std::runtime_error(std::string(name) + ": experts lie " + std::to_string(most - least) +
                               " bytes apart, in steps of " + std::to_string(unit) +
                               "; allowed: steps of a multiple of 16, at most 2147483647 of them");
    for (int32_t e = 0; e < table.count; ++e) at[e] = static_cast<int32_t>((table.shift[e] - least) / unit);
  }
};

// The scheduler's parameters: the ends as `find_expert` reads them, and places.
struct ExpertWork90 {
  const int32_t* ends = nullptr;
  int32_t first = 0, count = 0;
  bool rest = false;
  int32_t rows = 0;
  int32_t each = 0;  // clusters for a tile of rows
  int32_t place[kExpertsAtOnce] = {};
};

inline ExpertWork90 work_of(const Experts& experts, const ExpertPlaces90& places) {
  ExpertWork90 work{experts.ends, experts.first, experts.count, experts.rest, experts.rows, experts.tiles_n, {}};
  std::copy_n(places.at, experts.count, work.place);
  return work;
}

template <bool kSwapped>
struct ExpertsTag90 {};

template <class Tile, class Cluster, bool kSwapped>
class ExpertScheduler90 : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  static constexpr int kTokens = cute::size<kSwapped ? 1 : 0>(Tile{});
  static constexpr int kAbreast = cute::size<kSwapped ? 0 : 1>(Cluster{});  // blocks of a cluster
  static constexpr int32_t kRowsAbreast = 16;
  static_assert(cute::size(Cluster{}) == kAbreast, "blocks of a cluster have the same rows");

 public:
  using Params = ExpertWork90;
  using Arguments = ExpertWork90;
  struct WorkTileInfo {
    cute::conditional_t<kSwapped, int32_t, ExpertRows90> M_idx{};
    cute::conditional_t<kSwapped, ExpertRows90, int32_t> N_idx{};
    int32_t L_idx = -1;  // the expert's place; no tile: less than 0

    CUTLASS_DEVICE bool is_valid() const { return L_idx >= 0; }
    CUTLASS_DEVICE int32_t reduction_subtile_idx() const { return -1; }
    CUTLASS_DEVICE const ExpertRows90& rows() const {
      if constexpr (kSwapped)
        return N_idx;
      else
        return M_idx;
    }
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem, Tile, Cluster, const cutlass::KernelHardwareInfo&,
                                        const Arguments& arguments, void*, uint32_t) {
    return arguments;
  }
  template <class ProblemShape, class Acc>
  static size_t get_workspace_size(const Arguments&, ProblemShape, const cutlass::KernelHardwareInfo&, uint32_t,
                                   uint32_t = 1, uint32_t = 1) {
    return 0;
  }

  ExpertScheduler90() = default;
  CUTLASS_DEVICE explicit ExpertScheduler90(const Params& params) : work_(&params) {}

  // Every warp searches for itself, one tile ahead.
  template <class AnyCluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(AnyCluster) {
    search_.base = zero_after_predecessor();  // the ends are a kernel's results
    number_ = static_cast<int32_t>(kSwapped ? blockIdx.x / kAbreast : blockIdx.x);
    WorkTileInfo work;
    CUTLASS_PRAGMA_NO_UNROLL  // a search is long
        for (int turn = 0; turn < 2; ++turn) {
      work = next_;
      if (turn == 0 || work.is_valid()) next_ = tile_of_number();
    }
    return work;
  }
  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(const WorkTileInfo&, Pipeline&&...) {
    return cute::make_tuple(advance(), true);
  }
  CUTLASS_DEVICE bool is_last_tile(const WorkTileInfo&, uint32_t = 1) const { return !next_.is_valid(); }
  CUTLASS_DEVICE WorkTileInfo advance() {
    const WorkTileInfo work = next_;
    if (work.is_valid()) next_ = tile_of_number();
    return work;
  }

  // A tile of no expert's rows is multiplied once, whatever comes out: main loops know no product of nothing.
  template <class Problem, class TileShape>
  CUTLASS_DEVICE static int32_t get_work_k_tile_count(const WorkTileInfo& work, const Problem& problem, TileShape) {
    const int32_t all = cute::ceil_div(static_cast<int32_t>(cute::get<2>(problem)), cute::size<2>(TileShape{}));
    return work.rows().are_ownerless() ? 1 : all;
  }
  CUTLASS_DEVICE static uint32_t get_work_k_tile_start(const WorkTileInfo&) { return 0; }
  CUTLASS_DEVICE static bool compute_epilogue(const WorkTileInfo&, const Params&) { return true; }
  CUTLASS_DEVICE static bool requires_separate_reduction(const Params&) { return false; }
  CUTLASS_DEVICE static bool valid_warpgroup_in_work_tile(const WorkTileInfo&) { return true; }
  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(const Params&, const WorkTileInfo&, Accumulators&, uint32_t, uint32_t) {}

 private:
  // And goes on to the block's next number.
  CUTLASS_DEVICE WorkTileInfo tile_of_number() {
    __syncwarp();
    ExpertShare share;
    WorkTileInfo work;
    const int32_t number = number_;
    number_ += static_cast<int32_t>(kSwapped ? gridDim.x / kAbreast : gridDim.x);
    if (!find_expert<kTokens>(*work_, number, work_->each, search_, share)) return work;
    const int32_t block = share.number / (kRowsAbreast * work_->each) * kRowsAbreast;  // of tiles of rows
    const int32_t within = share.number - block * work_->each, abreast = min(share.tiles - block, kRowsAbreast);
    const int32_t column = within / abreast, row = block + within - column * abreast;
    const bool are_ownerless = share.expert == work_->count;
    const ExpertRows90 rows{share.begin + row * kTokens, are_ownerless ? ~share.end : share.end};
    const int32_t channels = column * kAbreast + static_cast<int32_t>(kSwapped ? blockIdx.x % kAbreast : blockIdx.y);
    if constexpr (kSwapped)
      work.M_idx = channels, work.N_idx = rows;
    else
      work.M_idx = rows, work.N_idx = channels;
    work.L_idx = are_ownerless ? 0 : work_->place[share.expert];
    return work;
  }

  const Params* work_ = nullptr;
  int32_t number_ = 0;
  ExpertSearch search_;
  WorkTileInfo next_;
};

}  // namespace pyquant::cuda

template <bool kSwapped, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<pyquant::cuda::ExpertsTag90<kSwapped>, cutlass::arch::Sm90,
                                                            Tile, Cluster, Stages> {
  using Scheduler = pyquant::cuda::ExpertScheduler90<Tile, Cluster, kSwapped>;
};

namespace pyquant::cuda {

// The epilogue's operands, those that are an expert's of the expert at place 0.
struct ExpertEpilogueParams90 : EpilogueParams {
  int64_t least, unit;
};

template <class Acc, bool kSwapped, int kAccShift>
class ExpertStore90 : public Store90<Acc, kSwapped, kAccShift, true> {
  using Base = Store90<Acc, kSwapped, kAccShift, true>;

 public:
  using Arguments = ExpertEpilogueParams90;
  using Params = ExpertEpilogueParams90;
  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }

  CUTLASS_HOST_DEVICE explicit ExpertStore90(const Params& params,
                                             const typename Base::SharedStorage& = typename Base::SharedStorage())
      : Base(params), params_(&params) {}

  template <class Tile, class Accumulator, class TiledMma>
  CUTLASS_DEVICE void store_tile(Tile tile, const ExpertRows90& rows, int32_t channels, int32_t place,
                                 const Accumulator& acc, TiledMma mma, int thread) const {
    constexpr int kTokens = cute::size<kSwapped ? 1 : 0>(Tile{}), kChannels = cute::size<kSwapped ? 0 : 1>(Tile{});
    const int32_t n0 = channels * kChannels;
    if (n0 >= params_->n) return;  // of a cluster's last block
    EpilogueParams p = *params_;
    if (rows.are_ownerless())
      return write_no_expert<kTokens, kChannels>(p, rows.begin, rows.end(), n0, thread, cute::size(TiledMma{}));
    take_expert(p, params_->least + params_->unit * place, rows.end());
    const auto own = mma.get_thread_slice(thread).partition_C(cute::make_identity_tensor(cute::take<0, 2>(tile)));
    Base(p).store(acc, own, kSwapped ? n0 : rows.begin, kSwapped ? rows.begin : n0);
  }

 private:
  const Params* params_;
};

template <class Acc, bool kSwapped, int kAccShift = 0>
class ExpertEpilogue90 : public cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
                             ExpertStore90<Acc, kSwapped, kAccShift>> {
  using Base =
      cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<ExpertStore90<Acc, kSwapped, kAccShift>>;

 public:
  using Base::Base;

  // CUTLASS's own computes with the tile's coordinates.
  template <class Loads, class LoadState, class Stores, class StoreState, class Problem, class Tile, class TileAt,
            class Accumulator, class TiledMma>
  CUTLASS_DEVICE auto store(Loads, LoadState load_state, Stores, StoreState store_state, Problem, Tile tile, TileAt at,
                            const Accumulator& acc, TiledMma mma, int thread, typename Base::TensorStorage&, int = -1) {
    constexpr int kRows = kSwapped ? 1 : 0;
    this->store_tile(tile, cute::get<kRows>(at), cute::get<1 - kRows>(at), cute::get<3>(at), acc, mma, thread);
    return cute::make_tuple(load_state, store_state);
  }
};

// launch_one(arguments but the main loop's, places) for every share of the experts that a launch takes.
template <class Kernel, bool kSwapped, class MainOf>
void launch_experts90(const GemmCall& call, MainOf main_of) {
  using Tile = typename Kernel::TileShape;
  using Cluster = typename Kernel::ClusterShape;
  constexpr int kRows = kSwapped ? 1 : 0, kTokens = cute::size<kRows>(Tile{}), kAbreast = cute::size(Cluster{});
  constexpr int kClusterChannels = cute::size<1 - kRows>(Tile{}) * kAbreast;
  const GemmProblem& p = call.problem;
  const DeviceGuard guard(call.context.device);  // whose tensor maps are looked up
  for_experts(call, kTokens, kClusterChannels, [&](const Experts& experts, int64_t tiles) {
    const ExpertPlaces90 places(call.name, experts);
    const auto rows = static_cast<int>(p.m), channels = static_cast<int>(p.n);
    typename Kernel::Arguments a{};
    a.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    a.problem_shape = {kSwapped ? channels : rows, kSwapped ? rows : channels, static_cast<int>(p.k), 1};
    a.hw_info = {call.context.device, call.device.sm_count};
    static_cast<EpilogueParams&>(a.epilogue) = epilogue_params(call);
    a.epilogue.least = places.least, a.epilogue.unit = places.unit;
    a.mainloop = main_of(places);
    a.scheduler = work_of(experts, places);
    const typename Kernel::Params params = Kernel::to_underlying_arguments(a, call.operands.workspace);
    const auto clusters = static_cast<unsigned>(std::min<int64_t>(tiles, std::max(call.device.sm_count / kAbreast, 1)));
    LaunchShape shape;
    shape.cluster = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
    shape.grid = dim3(clusters * shape.cluster.x, shape.cluster.y);
    shape.block = Kernel::get_block_shape();
    shape.shared_bytes = Kernel::SharedStorageSize;
    shape.overlaps = true;
    launch<cutlass::device_kernel<Kernel>>(call.name, shape, call.context, params);
  });
}

}  // namespace pyquant::cuda
