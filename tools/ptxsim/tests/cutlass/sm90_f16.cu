// sm_90a fp16 GEMMs through the collective builder.
#include "sm90_gemm.h"
using T = cutlass::half_t;
namespace g = cutlass::gemm;
namespace e = cutlass::epilogue;
#define ARGS int M, int N, int K, int L, const void *A, const void *B, const void *C, void *D, float alpha, float beta
#define PASS M, N, K, L, A, B, C, D, alpha, beta

extern "C" int sm90_f16_pingpong_1x1(ARGS) {
  return PlainGemm<T, RowMajor, T, ColumnMajor, T, float, float, Shape<_64, _128, _64>, Shape<_1, _1, _1>,
                   g::KernelTmaWarpSpecializedPingpong, e::TmaWarpSpecialized>::run(PASS);
}
extern "C" int sm90_f16_coop_2x1(ARGS) {
  return PlainGemm<T, RowMajor, T, ColumnMajor, T, float, float, Shape<_128, _128, _64>, Shape<_2, _1, _1>,
                   g::KernelTmaWarpSpecializedCooperative, e::TmaWarpSpecializedCooperative>::run(PASS);
}
#ifndef SM90_FEW
extern "C" int sm90_f16_coop_1x2_nt(ARGS) {  // both operands MN-major: transposed wgmma operands
  return PlainGemm<T, ColumnMajor, T, RowMajor, T, float, float, Shape<_128, _128, _64>, Shape<_1, _2, _1>,
                   g::KernelTmaWarpSpecializedCooperative, e::TmaWarpSpecializedCooperative>::run(PASS);
}
extern "C" int sm90_f16_coop_streamk(ARGS, int splits) {
  return PlainGemm<T, RowMajor, T, ColumnMajor, T, float, float, Shape<_128, _128, _64>, Shape<_2, _1, _1>,
                   g::KernelTmaWarpSpecializedCooperative, e::TmaWarpSpecializedCooperative,
                   g::StreamKScheduler>::run(PASS, splits);
}
extern "C" int sm90_f16_nosmem(ARGS) {  // epilogue without shared memory, cp.async free
  return PlainGemm<T, RowMajor, T, ColumnMajor, T, float, float, Shape<_64, _64, _64>, Shape<_1, _1, _1>,
                   g::KernelTmaWarpSpecialized, e::NoSmemWarpSpecialized>::run(PASS);
}
#endif
