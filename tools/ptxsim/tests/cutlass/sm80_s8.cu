// CUTLASS 2.x GEMMs for sm_80: int8 (row.col), 32-bit integer result.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm.h>

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

template <class TB, class Warp, int Stages>
static int run(int M, int N, int K, const int8_t* A, const int8_t* B, int32_t* C, const int32_t* S, int alpha,
               int beta) {
  using Gemm = cutlass::gemm::device::Gemm<int8_t, RowMajor, int8_t, ColumnMajor, int32_t, RowMajor, int32_t,
                                           cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, Warp,
                                           cutlass::gemm::GemmShape<16, 8, 32>,
                                           cutlass::epilogue::thread::LinearCombination<int32_t, 4, int32_t, int32_t>,
                                           cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, Stages>;
  Gemm g;
  typename Gemm::Arguments args({M, N, K}, {A, K}, {B, K}, {S, N}, {C, N}, {alpha, beta});
  if (Gemm::can_implement(args) != cutlass::Status::kSuccess) return 100;
  if (g.initialize(args) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}

extern "C" int sm80_s8_128x128(int M, int N, int K, const int8_t* A, const int8_t* B, int32_t* C, const int32_t* S,
                               int alpha, int beta) {
  return run<cutlass::gemm::GemmShape<128, 128, 64>, cutlass::gemm::GemmShape<64, 64, 64>, 3>(M, N, K, A, B, C, S,
                                                                                              alpha, beta);
}
extern "C" int sm80_s8_64x64(int M, int N, int K, const int8_t* A, const int8_t* B, int32_t* C, const int32_t* S,
                             int alpha, int beta) {
  return run<cutlass::gemm::GemmShape<64, 64, 64>, cutlass::gemm::GemmShape<32, 32, 64>, 5>(M, N, K, A, B, C, S, alpha,
                                                                                            beta);
}
