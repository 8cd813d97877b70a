// CUTLASS 2.x GEMM for sm_80: int4 x int4 (row.col), 32-bit integer result.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm.h>

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

extern "C" int sm80_s4_128x128(int M, int N, int K, const void* A, const void* B, int32_t* C, int alpha, int beta) {
  using Gemm = cutlass::gemm::device::Gemm<cutlass::int4b_t, RowMajor, cutlass::int4b_t, ColumnMajor, int32_t, RowMajor,
                                           int32_t, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
                                           cutlass::gemm::GemmShape<128, 128, 128>,
                                           cutlass::gemm::GemmShape<64, 64, 128>, cutlass::gemm::GemmShape<16, 8, 64>,
                                           cutlass::epilogue::thread::LinearCombination<int32_t, 4, int32_t, int32_t>,
                                           cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
  Gemm g;
  typename Gemm::Arguments args({M, N, K}, {(cutlass::int4b_t const*)A, K}, {(cutlass::int4b_t const*)B, K}, {C, N},
                                {C, N}, {alpha, beta});
  if (Gemm::can_implement(args) != cutlass::Status::kSuccess) return 100;
  if (g.initialize(args) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}
