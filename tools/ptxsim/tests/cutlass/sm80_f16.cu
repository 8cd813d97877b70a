// CUTLASS 2.x GEMMs for sm_80: fp16/bf16/tf32, plain, serial and parallel split-K, stream-K.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm.h>
#include <cutlass/gemm/device/gemm_splitk_parallel.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/util/device_memory.h>

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;
using half_t = cutlass::half_t;
using TB = cutlass::gemm::GemmShape<128, 128, 32>;
using WP = cutlass::gemm::GemmShape<64, 64, 32>;
using Epi = cutlass::epilogue::thread::LinearCombination<half_t, 8, float, float>;

template <class Gemm, class Args>
static int go(Args const& args) {
  Gemm g;
  if (Gemm::can_implement(args) != cutlass::Status::kSuccess) return 100;
  size_t ws = Gemm::get_workspace_size(args);
  cutlass::device_memory::allocation<uint8_t> work(ws);
  if (g.initialize(args, work.get()) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}

// A row-major, B column-major
extern "C" int sm80_f16_tn(int M, int N, int K, const half_t* A, const half_t* B, half_t* C, float alpha, float beta,
                           int splitk) {
  using Gemm = cutlass::gemm::device::Gemm<half_t, RowMajor, half_t, ColumnMajor, half_t, RowMajor, float,
                                           cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, WP,
                                           cutlass::gemm::GemmShape<16, 8, 16>, Epi,
                                           cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3, 8, 8, true>;
  typename Gemm::Arguments args({M, N, K}, {A, K}, {B, K}, {C, N}, {C, N}, {alpha, beta}, splitk);
  return go<Gemm>(args);
}
// A column-major, B row-major (ldmatrix.trans paths)
extern "C" int sm80_f16_nt(int M, int N, int K, const half_t* A, const half_t* B, half_t* C, float alpha, float beta) {
  using Gemm = cutlass::gemm::device::Gemm<half_t, ColumnMajor, half_t, RowMajor, half_t, RowMajor, float,
                                           cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, WP,
                                           cutlass::gemm::GemmShape<16, 8, 16>, Epi,
                                           cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
  typename Gemm::Arguments args({M, N, K}, {A, M}, {B, N}, {C, N}, {C, N}, {alpha, beta});
  return go<Gemm>(args);
}
extern "C" int sm80_f16_streamk(int M, int N, int K, const half_t* A, const half_t* B, half_t* C, float alpha,
                                float beta, int avail_sms) {
  using Gemm = cutlass::gemm::device::GemmUniversal<half_t, RowMajor, half_t, ColumnMajor, half_t, RowMajor, float,
                                                    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, WP,
                                                    cutlass::gemm::GemmShape<16, 8, 16>, Epi,
                                                    cutlass::gemm::threadblock::ThreadblockSwizzleStreamK, 3>;
  typename Gemm::Arguments args(cutlass::gemm::GemmUniversalMode::kGemm, {M, N, K}, 1, {alpha, beta}, A, B, C, C,
                                (int64_t)M * K, (int64_t)N * K, (int64_t)M * N, (int64_t)M * N, K, K, N, N, avail_sms);
  return go<Gemm>(args);
}
extern "C" int sm80_f16_splitk_parallel(int M, int N, int K, const half_t* A, const half_t* B, half_t* C, float alpha,
                                        float beta, int splitk) {
  using Gemm = cutlass::gemm::device::GemmSplitKParallel<half_t, RowMajor, half_t, ColumnMajor, half_t, RowMajor, float,
                                                         cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TB, WP,
                                                         cutlass::gemm::GemmShape<16, 8, 16>, Epi>;
  typename Gemm::Arguments args({M, N, K}, {A, K}, {B, K}, {C, N}, {C, N}, {alpha, beta}, splitk);
  Gemm g;
  size_t ws = Gemm::get_workspace_size(args);
  cutlass::device_memory::allocation<uint8_t> work(ws);
  if (g.initialize(args, work.get()) != cutlass::Status::kSuccess) return 101;
  if (g() != cutlass::Status::kSuccess) return 102;
  return (int)cudaDeviceSynchronize();
}
using bf16 = cutlass::bfloat16_t;
extern "C" int sm80_bf16_tn(int M, int N, int K, const bf16* A, const bf16* B, float* C, float alpha, float beta) {
  using Gemm = cutlass::gemm::device::Gemm<
      bf16, RowMajor, bf16, ColumnMajor, float, RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      TB, WP, cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<float, 4, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
  typename Gemm::Arguments args({M, N, K}, {A, K}, {B, K}, {C, N}, {C, N}, {alpha, beta});
  return go<Gemm>(args);
}
using tf32 = cutlass::tfloat32_t;
extern "C" int sm80_tf32_tn(int M, int N, int K, const tf32* A, const tf32* B, float* C, float alpha, float beta) {
  using Gemm = cutlass::gemm::device::Gemm<
      tf32, RowMajor, tf32, ColumnMajor, float, RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      cutlass::gemm::GemmShape<128, 128, 16>, cutlass::gemm::GemmShape<64, 64, 16>, cutlass::gemm::GemmShape<16, 8, 8>,
      cutlass::epilogue::thread::LinearCombination<float, 4, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
  typename Gemm::Arguments args({M, N, K}, {A, K}, {B, K}, {C, N}, {C, N}, {alpha, beta});
  return go<Gemm>(args);
}
