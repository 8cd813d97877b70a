// Helpers shared by the sm_90a CUTLASS 3.x test kernels.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/collective/default_epilogue.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler_params.h>
#include <cutlass/util/device_memory.h>
#include <cutlass/util/packed_stride.hpp>

using namespace cute;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

template <class Gemm>
static int launch(typename Gemm::Arguments const& args) {
  Gemm g;
  if (g.can_implement(args) != cutlass::Status::kSuccess) return 100;
  size_t ws = Gemm::get_workspace_size(args);
  cutlass::device_memory::allocation<uint8_t> work(ws);
  if (g.initialize(args, work.get()) != cutlass::Status::kSuccess) return 101;
  if (g.run() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}

// D = alpha * A @ B + beta * C
template <class EA, class LA, class EB, class LB, class ED, class EAcc, class EComp, class Tile, class Cluster,
          class MainSched, class EpiSched, class TileSched = void>
struct PlainGemm {
  static constexpr int AlA = 128 / cutlass::sizeof_bits<EA>::value;
  static constexpr int AlB = 128 / cutlass::sizeof_bits<EB>::value;
  static constexpr int AlD = 128 / cutlass::sizeof_bits<ED>::value;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, EAcc, EComp, ED, RowMajor, AlD, ED, RowMajor, AlD,
      EpiSched>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, EA, LA, AlA, EB, LB, AlB, EAcc, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<(int)sizeof(typename Epilogue::SharedStorage)>,
      MainSched>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, TileSched>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static int run(int M, int N, int K, int L, const void* A, const void* B, const void* C, void* D, EComp alpha,
                 EComp beta, int splits = 1) {
    auto sa = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {M, K, L});
    auto sb = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {N, K, L});
    auto sd = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {M, N, L});
    typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGemm,
                                  {M, N, K, L},
                                  {(EA const*)A, sa, (EB const*)B, sb},
                                  {{alpha, beta}, (ED const*)C, sd, (ED*)D, sd}};
    if constexpr (std::is_same_v<TileSched, cutlass::gemm::StreamKScheduler>) {
      args.scheduler.splits = splits;
    }
    return launch<Gemm>(args);
  }
};
