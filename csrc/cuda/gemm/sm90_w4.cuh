// GEMM for Hopper with int4 weights as they lie in a checkpoint (two per byte along k) and 8-bit activations: CUTLASS's
// mixed-input main loop. Weights come through registers, where they are widened, so they are the left operand.
//   partition: as sm90.cuh, always swapped: rows of the accumulator are channels.
//   limits: rows of x and w on 16-byte boundaries; any M, N, K: nibbles of w beyond K meet zeros of x, which TMA fills
//   in.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"

namespace pyquant::cuda {

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90W4 {
  static_assert(Schedule::kSwapped, "weights are the left operand");
  using Tile = cute::Shape<cute::Int<N>, cute::Int<M>, cute::Int<K>>;
  using Cluster = cute::Shape<cute::Int<ClusterN>, cute::Int<ClusterM>, cute::_1>;
  using Epilogue = Epilogue90<int32_t, true>;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<cutlass::int4b_t>, cutlass::layout::RowMajor, 32,
      int8_t, cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Main>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, Epilogue,
                                                      typename Schedule::Scheduler>;

  static typename Kernel::Arguments arguments(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    typename Kernel::Arguments a = common_arguments90<Kernel>(call, p.n, p.m);
    a.mainloop.ptr_A = static_cast<const cutlass::int4b_t*>(call.operands.w);
    a.mainloop.dA = {p.ldw, {}, {}};
    a.mainloop.ptr_B = static_cast<const int8_t*>(call.operands.x);
    a.mainloop.dB = {p.ldx, {}, {}};
    return a;
  }

  static Workspace workspace(const GemmCall& call) { return workspace90<Kernel>(arguments(call)); }
  static void run(const GemmCall& call) { launch90<Kernel>(call, arguments(call)); }
};

}  // namespace pyquant::cuda
