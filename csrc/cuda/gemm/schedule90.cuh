// How the warps of a sm_90a kernel share the work, by the words of cmake/kernels.cmake.
//   plain        one consumer warpgroup;  pingpong  two, each with a tile of its own: one stores, the other multiplies;
//   cooperative  two halves of one tile;  streamk   cooperative, tiles divided along K so that every SM has work.
//   swapped_*    weights are the left operand: few tokens fill a narrow tile.
//   swapped_splitk  cooperative, K divided over blocks, of which the last one of a tile adds all sums.
#pragma once
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include <type_traits>

#include "cuda/overlap.cuh"

namespace pyquant::cuda::schedule90 {

// CUTLASS's stream-K scheduler, told what our launches never ask for: batches, split K, units that only add sums, the
// other order of additions, and blocks of a cluster where there are none. It stands in a kernel once for every kind of
// warp, so that this is a fifth of its code. Its fixup reads semaphores that the predecessor in the stream has cleared.
template <class Tile, class Cluster>
class StreamK : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<Tile, Cluster> {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<Tile, Cluster>;

 public:
  using typename Base::Params;
  using typename Base::WorkTileInfo;

  StreamK() = default;
  CUTLASS_DEVICE explicit StreamK(const Params& params) : Base(narrowed(params)) {}

  // Asked for by kernels with programmatic dependent launch, and in 4.2 it does not compile (a const member binds one
  // of its fields to a reference that may write). It may say no of the last one: the successor then starts a little
  // later.
  CUTLASS_DEVICE bool is_last_tile(const WorkTileInfo& work, uint32_t = 1) const {
    const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
    return work.k_tile_remaining == work.k_tile_count &&
           (fetched_ + 1) * blocks + block() >= this->scheduler_params.units_per_problem_;
  }

  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&&...) {
    if (this->continue_current_work(work)) return cute::make_tuple(work, true);
    this->advance_to_next_work();
    ++fetched_;
    return cute::make_tuple(this->get_current_work(), true);
  }

  CUTLASS_DEVICE static bool compute_epilogue(const WorkTileInfo& work, const Params& params) {
    return Base::compute_epilogue(work, narrowed(params));
  }
  CUTLASS_DEVICE static bool requires_separate_reduction(const Params&) { return false; }
  CUTLASS_DEVICE static bool valid_warpgroup_in_work_tile(const WorkTileInfo&) { return true; }

  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(const Params& params, const WorkTileInfo& work, Accumulators& accumulators,
                                   uint32_t barriers, uint32_t barrier) {
    if (!Base::requires_fixup(params, work)) return;
    wait_for_predecessor();
    Params p = narrowed(params);
    p.reduction_mode_ = reduction_mode<typename Accumulators::value_type>;
    WorkTileInfo adds = work;
    adds.is_separate_reduction = false;
    Base::fixup(p, adds, accumulators, barriers, barrier);
  }

  // Integer sums are the same in any order; float sums are added in the order of K, whoever comes first.
  template <class Acc>
  static constexpr auto reduction_mode =
      std::is_integral_v<Acc> ? Params::ReductionMode::Nondeterministic : Params::ReductionMode::Deterministic;

 private:
  // Of the first tile of a block, in the scheduler's order.
  CUTLASS_DEVICE uint64_t block() const {
    return this->scheduler_params.raster_order_ == Base::RasterOrder::AlongN
               ? blockIdx.x + uint64_t{blockIdx.y} * gridDim.x
               : uint64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  }
  CUTLASS_DEVICE static Params narrowed(Params p) {
    p.separate_reduction_units_ = 0;
    p.ktile_start_alignment_count_ = 1;
    p.divmod_splits_.divisor = 1;
    p.divmod_batch_.multiplier = 0;  // a quotient of 0
    p.divmod_batch_.shift_right = 63;
    if constexpr (cute::size(Cluster{}) == 1) {
      p.divmod_cluster_shape_major_.divisor = p.divmod_cluster_shape_minor_.divisor = 1;
      p.divmod_cluster_shape_major_.shift_right = p.divmod_cluster_shape_minor_.shift_right = 0;
    }
    return p;
  }

  uint32_t fetched_ = 0;
};

struct StreamKTag {};

template <class MainSchedule, bool Swaps, bool Splits>
struct Schedule {
  using Main = MainSchedule;
  using Scheduler = cute::conditional_t<Splits, StreamKTag, cutlass::gemm::PersistentScheduler>;
  static constexpr bool kSwapped = Swaps, kSplits = Splits;
};

using plain = Schedule<cutlass::gemm::KernelTmaWarpSpecialized, false, false>;
using pingpong = Schedule<cutlass::gemm::KernelTmaWarpSpecializedPingpong, false, false>;
using cooperative = Schedule<cutlass::gemm::KernelTmaWarpSpecializedCooperative, false, false>;
using streamk = Schedule<cutlass::gemm::KernelTmaWarpSpecializedCooperative, false, true>;
using swapped_pingpong = Schedule<cutlass::gemm::KernelTmaWarpSpecializedPingpong, true, false>;
using swapped_cooperative = Schedule<cutlass::gemm::KernelTmaWarpSpecializedCooperative, true, false>;
using swapped_splitk = swapped_cooperative;
using swapped_streamk = Schedule<cutlass::gemm::KernelTmaWarpSpecializedCooperative, true, true>;

}  // namespace pyquant::cuda::schedule90

template <class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<pyquant::cuda::schedule90::StreamKTag, cutlass::arch::Sm90,
                                                            Tile, Cluster, Stages> {
  using Scheduler = pyquant::cuda::schedule90::StreamK<Tile, Cluster>;
};
