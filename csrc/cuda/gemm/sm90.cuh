// GEMM for Hopper (sm_90a): CUTLASS 3.x TMA warp-specialised main loop on wgmma, epilogue of our own (store90.cuh).
//   partition: one producer warp feeds shared memory by TMA, consumer warpgroups multiply (schedule90.cuh).
//   limits: rows of x and w on 16-byte boundaries; any M, N, K (TMA fills the tails), any output, any residual.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"

namespace pyquant::cuda {

// Operands of a family.
struct Sm90S8S8 {
  using Element = int8_t;
  using Acc = int32_t;
};
struct Sm90F16 {
  using Element = cutlass::half_t;
  using Acc = float;
};
struct Sm90BF16 {
  using Element = cutlass::bfloat16_t;
  using Acc = float;
};

template <class Types, int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90 {
  using Element = typename Types::Element;
  using Acc = typename Types::Acc;
  static constexpr bool kSwapped = Schedule::kSwapped;
  using Tile = cute::Shape<cute::Int<kSwapped ? N : M>, cute::Int<kSwapped ? M : N>, cute::Int<K>>;
  using Cluster =
      cute::Shape<cute::Int<kSwapped ? ClusterN : ClusterM>, cute::Int<kSwapped ? ClusterM : ClusterN>, cute::_1>;
  using Epilogue = Epilogue90<Acc, kSwapped>;
  static constexpr int kAlign = 16 / static_cast<int>(sizeof(Element));
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, kAlign, Element,
      cutlass::layout::ColumnMajor, kAlign, Acc, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Main>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, Epilogue,
                                                      typename Schedule::Scheduler>;

  static typename Kernel::Arguments arguments(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const auto* x = static_cast<const Element*>(call.operands.x);
    const auto* w = static_cast<const Element*>(call.operands.w);
    typename Kernel::Arguments a = common_arguments90<Kernel>(call, kSwapped ? p.n : p.m, kSwapped ? p.m : p.n);
    a.mainloop.ptr_A = kSwapped ? w : x;
    a.mainloop.dA = {kSwapped ? p.ldw : p.ldx, {}, {}};
    a.mainloop.ptr_B = kSwapped ? x : w;
    a.mainloop.dB = {kSwapped ? p.ldx : p.ldw, {}, {}};
    return a;
  }

  static Workspace workspace(const GemmCall& call) { return workspace90<Kernel>(arguments(call)); }
  static void run(const GemmCall& call) { launch90<Kernel>(call, arguments(call)); }
};

}  // namespace pyquant::cuda
