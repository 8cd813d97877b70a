// GEMM for Hopper with int4 weights in the layout blocked128 and 8-bit activations: our main loop (main90_w4.cuh) under
// CUTLASS's persistent and stream-K kernels.
//   partition: as sm90_w4.cuh.
//   steps (kSteps): docs/numerics.md 4.1; each lies in its block.
//   limits: rows of x on 16-byte boundaries, w on 16 bytes; any M, N, K: padded codes are 0 and so is x beyond K.
#pragma once
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/main90_w4.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"

namespace pyquant::cuda {

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule, bool kSteps = false>
struct GemmSm90W4Blocked {
  static_assert(Schedule::kSwapped && K == kBlocked128Side && ClusterM * ClusterN == 1);
  using Main = MainBlocked90<N, M, stages_blocked90(M, kSteps), typename Schedule::Main, kSteps>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main,
                                           Epilogue90<int32_t, true, kSteps ? 0 : 4>, typename Schedule::Scheduler>;

  static typename Kernel::Arguments arguments(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    typename Kernel::Arguments a = common_arguments90<Kernel>(call, p.n, p.m);
    a.mainloop.w = static_cast<const uint8_t*>(call.operands.w);
    a.mainloop.x = static_cast<const int8_t*>(call.operands.x);
    a.mainloop.stride_x = {p.ldx, {}, 0};
    return a;
  }

  static Workspace workspace(const GemmCall& call) { return workspace90<Kernel>(arguments(call)); }
  static void run(const GemmCall& call) { launch90<Kernel>(call, arguments(call)); }
};

}  // namespace pyquant::cuda
