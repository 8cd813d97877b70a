// sm_90a mixed-input GEMM: fp16 activations (row-major M x K) times int4 weights (N x K, packed along
// K) with fp16 scales per group of K (scale[k / group][n]). Operands are swapped inside, so that the
// narrow type passes through registers.
#include "sm90_gemm.h"
using half_t = cutlass::half_t;
using s4 = cutlass::int4b_t;

template <class Tile, class Cluster, class MainSched, class EpiSched>
struct Mixed {
  using LA = cutlass::layout::LayoutTranspose<RowMajor>::type;
  using LB = cutlass::layout::LayoutTranspose<ColumnMajor>::type;
  using LD = cutlass::layout::LayoutTranspose<RowMajor>::type;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, half_t, LD, 8, half_t, LD, 8,
      EpiSched>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<s4, half_t>, LB, 32, half_t, LA, 8, float, Tile,
      Cluster, cutlass::gemm::collective::StageCountAutoCarveout<(int)sizeof(typename Epilogue::SharedStorage)>,
      MainSched>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static int run(int M, int N, int K, int group, const void* A, const void* B, const void* scale, void* D) {
    auto da = cutlass::make_cute_packed_stride(cutlass::detail::TagToStrideA_t<RowMajor>{}, {M, K, 1});
    auto db = cutlass::make_cute_packed_stride(cutlass::detail::TagToStrideB_t<ColumnMajor>{}, {N, K, 1});
    auto dd = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {N, M, 1});
    auto ds = cutlass::make_cute_packed_stride(typename Mainloop::StrideScale{}, {N, (K + group - 1) / group, 1});
    typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGemm,
                                  {N, M, K, 1},
                                  {(s4 const*)B, db, (half_t const*)A, da, (half_t const*)scale, ds, group},
                                  {{1.f, 0.f}, (half_t const*)D, dd, (half_t*)D, dd}};
    return launch<Gemm>(args);
  }
};
namespace g = cutlass::gemm;
namespace e = cutlass::epilogue;
#define ARGS int M, int N, int K, int group, const void *A, const void *B, const void *scale, void *D
extern "C" int sm90_mixed_coop(ARGS) {
  return Mixed<Shape<_128, _128, _64>, Shape<_1, _1, _1>, g::KernelTmaWarpSpecializedCooperative,
               e::TmaWarpSpecializedCooperative>::run(M, N, K, group, A, B, scale, D);
}
extern "C" int sm90_mixed_pingpong_2x1(ARGS) {
  return Mixed<Shape<_64, _128, _64>, Shape<_2, _1, _1>, g::KernelTmaWarpSpecializedPingpong,
               e::TmaWarpSpecialized>::run(M, N, K, group, A, B, scale, D);
}
