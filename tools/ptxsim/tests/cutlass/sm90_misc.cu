// sm_90a GEMMs in bf16, fp8 (e4m3), tf32 and int8 through the collective builder.
#include "sm90_gemm.h"
namespace g = cutlass::gemm;
namespace e = cutlass::epilogue;
#define ARGS(S) int M, int N, int K, int L, const void *A, const void *B, const void *C, void *D, S alpha, S beta
#define PASS M, N, K, L, A, B, C, D, alpha, beta

extern "C" int sm90_bf16_pingpong_1x2(ARGS(float)) {
  using T = cutlass::bfloat16_t;
  return PlainGemm<T, RowMajor, T, ColumnMajor, T, float, float, Shape<_64, _128, _64>, Shape<_1, _2, _1>,
                   g::KernelTmaWarpSpecializedPingpong, e::TmaWarpSpecialized>::run(PASS);
}
extern "C" int sm90_e4m3_coop_1x1(ARGS(float)) {
  using T = cutlass::float_e4m3_t;
  return PlainGemm<T, RowMajor, T, ColumnMajor, cutlass::half_t, float, float, Shape<_128, _128, _128>,
                   Shape<_1, _1, _1>, g::KernelTmaWarpSpecializedCooperative,
                   e::TmaWarpSpecializedCooperative>::run(PASS);
}
extern "C" int sm90_s8_coop_2x1(ARGS(int)) {
  return PlainGemm<int8_t, RowMajor, int8_t, ColumnMajor, int32_t, int32_t, int32_t, Shape<_128, _128, _128>,
                   Shape<_2, _1, _1>, g::KernelTmaWarpSpecializedCooperative,
                   e::TmaWarpSpecializedCooperative>::run(PASS);
}
extern "C" int sm90_s8_pingpong_1x1(ARGS(int)) {
  return PlainGemm<int8_t, RowMajor, int8_t, ColumnMajor, int32_t, int32_t, int32_t, Shape<_64, _256, _128>,
                   Shape<_1, _1, _1>, g::KernelTmaWarpSpecializedPingpong, e::TmaWarpSpecialized>::run(PASS);
}
