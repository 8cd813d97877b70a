// processors: x86_64, flags: -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mprfchw -mprefer-vector-width=512
// The kernels of processors that have AVX-512 with VNNI.
// g++ 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "cpu/int4_avx512.h"
#include "cpu/int8_avx512.h"
#include "cpu/row_table.h"
#include "cpu/taps_avx512.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

void code_sums(const uint8_t* a, int64_t group, int64_t groups, int32_t* sums) {
  const __m512i one = _mm512_set1_epi8(1);
  for (int64_t g = 0; g < groups; ++g, a += group) {
    __m512i s = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= group; i += 64) dot(s, _mm512_loadu_si512(a + i), one);
    if (i < group) dot(s, _mm512_maskz_loadu_epi8((__mmask64{1} << (group - i)) - 1, a + i), one);
    sums[g] = _mm512_reduce_add_epi32(s);
  }
}

}  // namespace

const Kernels& kernels_avx512_vnni() {
  static constexpr Kernels table = [] {
    Kernels k = row_table<V>(Isa::avx512_vnni);
    k.row_block = 96;
    k.gemm_s8 = gemm_s8;
    k.linear_s8 = linear_s8;
    k.gemm_s4 = gemm_s4;
    k.gemv_s4 = gemv_s4;
    k.groups_s4 = groups_s4;
    k.linear_s4 = linear_s4;
    k.code_sums = code_sums;
    k.unpack_s4 = unpack_s4;
    k.taps = taps;
    k.linear_taps = linear_taps;
    k.interleave = interleave;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
