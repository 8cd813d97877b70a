// sm_90a int8 GEMM with a fused dequantising epilogue:
//   D[m,n] = half(acc * scale_m[m] * scale_n[n] + bias[n] (+ C[m,n]))
#include "sm90_gemm.h"
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
namespace f = cutlass::epilogue::fusion;
using half_t = cutlass::half_t;

template <class Tile, class Cluster, class MainSched, class EpiSched, bool Residual>
struct Evt {
  static constexpr auto R = cutlass::FloatRoundStyle::round_to_nearest;
  using EpiTile = cutlass::epilogue::collective::EpilogueTileAuto;
  using RowScale = f::Sm90ColBroadcast<0, Tile, float, float, Stride<_1, _0, _0>>;  // one value per row m
  using ColScale = f::Sm90RowBroadcast<0, Tile, float, float, Stride<_0, _1, _0>>;  // one value per column n
  using Bias = f::Sm90RowBroadcast<0, Tile, float, float, Stride<_0, _1, _0>>;
  using MulN = f::Sm90EVT<f::Sm90Compute<cutlass::multiplies, float, float, R>, ColScale, f::Sm90AccFetch>;
  // (scale_m * (scale_n * acc)) + bias
  using Fma = f::Sm90EVT<
      f::Sm90Compute<cutlass::homogeneous_multiply_add, std::conditional_t<Residual, float, half_t>, float, R>,
      RowScale, MulN, Bias>;
  using Res = f::Sm90EVT<f::Sm90Compute<cutlass::plus, half_t, float, R>, f::Sm90SrcFetch<half_t>, Fma>;
  using Tree = std::conditional_t<Residual, Res, Fma>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpiTile, int32_t, float,
      std::conditional_t<Residual, half_t, void>, RowMajor, 8, half_t, RowMajor, 8, EpiSched, Tree>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, RowMajor, 16, int8_t, ColumnMajor, 16, int32_t, Tile,
      Cluster, cutlass::gemm::collective::StageCountAutoCarveout<(int)sizeof(typename Epilogue::SharedStorage)>,
      MainSched>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static int run(int M, int N, int K, const int8_t* A, const int8_t* B, const void* C, void* D, const float* sm,
                 const float* sn, const float* bias) {
    auto sa = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {M, K, 1});
    auto sb = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {N, K, 1});
    auto sd = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {M, N, 1});
    typename Gemm::Arguments a{
        cutlass::gemm::GemmUniversalMode::kGemm, {M, N, K, 1}, {A, sa, B, sb}, {{}, nullptr, {}, (half_t*)D, sd}};
    typename Fma::Arguments fma{{sm}, {{sn}, {}, {}}, {bias}, {}};
    if constexpr (Residual) {
      a.epilogue.thread = {{}, fma, {}};
      a.epilogue.ptr_C = (half_t const*)C;
      a.epilogue.dC = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {M, N, 1});
    } else
      a.epilogue.thread = fma;
    return launch<Gemm>(a);
  }
};
#define ARGS                                                                                                       \
  int M, int N, int K, const int8_t *A, const int8_t *B, const void *C, void *D, const float *sm, const float *sn, \
      const float *bias
#define PASS M, N, K, A, B, C, D, sm, sn, bias
namespace g = cutlass::gemm;
namespace e = cutlass::epilogue;
extern "C" int sm90_s8_evt_coop_2x1(ARGS) {
  return Evt<Shape<_128, _128, _128>, Shape<_2, _1, _1>, g::KernelTmaWarpSpecializedCooperative,
             e::TmaWarpSpecializedCooperative, false>::run(PASS);
}
extern "C" int sm90_s8_evt_pingpong_1x2_residual(ARGS) {
  return Evt<Shape<_64, _128, _128>, Shape<_1, _2, _1>, g::KernelTmaWarpSpecializedPingpong, e::TmaWarpSpecialized,
             true>::run(PASS);
}
