// How the warps of a sm_90a kernel share the work, by the words of cmake/kernels.cmake.
//   plain        one consumer warpgroup;  pingpong  two, each with a tile of its own: one stores, the other multiplies;
//   cooperative  two halves of one tile;  streamk   cooperative, tiles divided along K so that every SM has work.
//   swapped_*    weights are the left operand: few tokens fill a narrow tile.
#pragma once
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "cuda/overlap.cuh"

namespace pyquant::cuda::schedule90 {

// CUTLASS's stream-K scheduler. Its own is_last_tile, which a kernel with programmatic dependent launch asks, does not
// compile in 4.2 (a const member binds one of its fields to a reference that may write). Its fixup reads semaphores
// that the predecessor in the stream has cleared.
template <class Tile, class Cluster>
class StreamK : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<Tile, Cluster> {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<Tile, Cluster>;

 public:
  using Base::Base;
  CUTLASS_DEVICE bool is_last_tile(typename Base::WorkTileInfo work, uint32_t advance_count = 1) const {
    Base next = *this;
    if (next.continue_current_work(work)) return false;
    next.advance_to_next_work(advance_count);
    return !next.get_current_work().is_valid();
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(typename Base::Params const& params, typename Base::WorkTileInfo const& work,
                                   Accumulators& accumulators, uint32_t barriers, uint32_t barrier) {
    wait_for_predecessor();
    Base::fixup(params, work, accumulators, barriers, barrier);
  }
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
using swapped_streamk = Schedule<cutlass::gemm::KernelTmaWarpSpecializedCooperative, true, true>;

}  // namespace pyquant::cuda::schedule90

template <class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<pyquant::cuda::schedule90::StreamKTag, cutlass::arch::Sm90,
                                                            Tile, Cluster, Stages> {
  using Scheduler = pyquant::cuda::schedule90::StreamK<Tile, Cluster>;
};
