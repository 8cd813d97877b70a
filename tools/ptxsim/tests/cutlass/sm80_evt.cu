// sm_80 int8 GEMM with a visitor-tree epilogue: D = half(acc * scale_m[m] * scale_n[n] + bias[n]),
// and a mixed-input fp16 x int8 GEMM.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>
using namespace cute;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using half_t = cutlass::half_t;
namespace f = cutlass::epilogue::threadblock;

struct Evt {
  using TB = cutlass::gemm::GemmShape<128, 128, 64>;
  using WP = cutlass::gemm::GemmShape<64, 64, 64>;
  using MM = cutlass::gemm::GemmShape<16, 8, 32>;
  static constexpr auto R = cutlass::FloatRoundStyle::round_to_nearest;
  static constexpr int Stages = 3, EpiStages = 1;
  using Map = f::OutputTileThreadLayout<TB, WP, half_t, 8, EpiStages>;
  using Acc = f::VisitorAccFetch;
  using RowS = f::VisitorColBroadcast<Map, float, cute::Stride<_1, _0, int64_t>>;  // per row m
  using ColS = f::VisitorRowBroadcast<Map, float, cute::Stride<_0, _1, int64_t>>;  // per column n
  using Bias = f::VisitorRowBroadcast<Map, float, cute::Stride<_0, _1, int64_t>>;
  using MulN = f::Sm80EVT<f::VisitorCompute<cutlass::multiplies, float, float, R>, Acc, ColS>;
  using MulM = f::Sm80EVT<f::VisitorCompute<cutlass::multiplies, float, float, R>, MulN, RowS>;
  using Add = f::Sm80EVT<f::VisitorCompute<cutlass::plus, half_t, float, R>, MulM, Bias>;
  using Store = f::VisitorAuxStore<Map, half_t, R, cute::Stride<int64_t, _1, int64_t>>;
  using Tree = f::Sm80EVT<Store, Add>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      int8_t, RowMajor, cutlass::ComplexTransform::kNone, 16, int8_t, ColumnMajor, cutlass::ComplexTransform::kNone, 16,
      half_t, RowMajor, 8, int32_t, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, WP, MM, Tree,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, Stages, cutlass::arch::OpMultiplyAddSaturate,
      EpiStages>::GemmKernel;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};
extern "C" int sm80_s8_evt(int M, int N, int K, const int8_t* A, const int8_t* B, void* D, float* sm, float* sn,
                           float* bias) {
  using E = Evt;
  typename E::Tree::Arguments t{
      {{{{}, {sn, 0.f, {_0{}, _1{}, (int64_t)N}}, {}}, {sm, 0.f, {_1{}, _0{}, (int64_t)M}}, {}},
       {bias, 0.f, {_0{}, _1{}, (int64_t)N}},
       {}},
      {(half_t*)D, {(int64_t)N, _1{}, (int64_t)M * N}}};
  typename E::Gemm::Arguments a(cutlass::gemm::GemmUniversalMode::kGemm, {M, N, K}, 1, t, A, B, nullptr, nullptr,
                                (int64_t)M * K, (int64_t)N * K, 0, 0, K, K, 0, 0);
  E::Gemm g;
  if (g.can_implement(a) != cutlass::Status::kSuccess) return 100;
  if (g.initialize(a, nullptr) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}
extern "C" int sm80_f16_s8_mixed(int M, int N, int K, const half_t* A, const int8_t* B, float* D) {
  using Gemm = cutlass::gemm::device::GemmUniversal<
      half_t, RowMajor, int8_t, ColumnMajor, float, RowMajor, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 64>, cutlass::gemm::GemmShape<64, 64, 64>,
      cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<float, 4, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 4, 8, 16,
      cutlass::arch::OpMultiplyAddMixedInputUpcast>;
  typename Gemm::Arguments a(cutlass::gemm::GemmUniversalMode::kGemm, {M, N, K}, 1, {1.f, 0.f}, A, B, D, D,
                             (int64_t)M * K, (int64_t)N * K, (int64_t)M * N, (int64_t)M * N, K, K, N, N);
  Gemm g;
  if (Gemm::can_implement(a) != cutlass::Status::kSuccess) return 100;
  if (g.initialize(a) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}
