// How the warps of a sm_90a kernel share the work, by the words of cmake/kernels.cmake.
//   plain        one consumer warpgroup;  pingpong  two, each with a tile of its own: one stores, the other multiplies;
//   cooperative  two halves of one tile;  streamk   cooperative, tiles divided along K so that every SM has work.
//   swapped_*    weights are the left operand: few tokens fill a narrow tile.
#pragma once
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

namespace pyquant::cuda::schedule90 {

template <class MainSchedule, bool Swaps, bool Splits>
struct Schedule {
  using Main = MainSchedule;
  using Scheduler = cute::conditional_t<Splits, cutlass::gemm::StreamKScheduler, cutlass::gemm::PersistentScheduler>;
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
