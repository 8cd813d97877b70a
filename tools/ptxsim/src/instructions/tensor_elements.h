// Elements of tensor-core operands and their products.
// Integer results are exact. Floating-point products are exact, each instruction sums its K
// products and the accumulator in double precision and rounds once to the accumulator format.
#pragma once
#include "translate/translator.h"
#include <cstdio>

namespace ptxsim {

// m16n8k32
inline bool parseShape(const std::string& s, int& M, int& N, int& K) {
  return sscanf(s.c_str(), "m%dn%dk%d", &M, &N, &K) == 3;
}

inline double elemF(Ty ty, u32 r, int k) {
  switch (ty) {
    case Ty::F16: return h2f((u16)(r >> 16 * k));
    case Ty::BF16: return b2f((u16)(r >> 16 * k));
    case Ty::TF32: return tf32Trunc(r);
    case Ty::E4M3: return g_fp8.e4m3[r >> 8 * k & 255];
    case Ty::E5M2: return g_fp8.e5m2[r >> 8 * k & 255];
    default: return bitsf(r);
  }
}
inline s16 elemI(Ty ty, u32 r, int k) {
  switch (ty) {
    case Ty::S8: return (s8)(r >> 8 * k);
    case Ty::U8: return (u8)(r >> 8 * k);
    case Ty::S4: return (s16)((s32)(r << (28 - 4 * k)) >> 28);
    case Ty::U4: return (s16)(r >> 4 * k & 15);
    default: return 0;
  }
}
// Products of row |a| with eight rows of |b| (Stride elements apart); K is a multiple of 16.
template <int Stride>
inline void dots8(const s16* a, const s16* b, int K, s32* out) {
  __m256i v[8];
  for (int n = 0; n < 8; ++n) {
    __m256i s = _mm256_setzero_si256();
    for (int k = 0; k < K; k += 16)
      s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_load_si256((const __m256i*)(a + k)),
                                                _mm256_load_si256((const __m256i*)(b + n * Stride + k))));
    v[n] = s;
  }
  for (int n = 0; n < 4; ++n) v[n] = _mm256_hadd_epi32(v[2 * n], v[2 * n + 1]);
  v[0] = _mm256_hadd_epi32(v[0], v[1]);
  v[1] = _mm256_hadd_epi32(v[2], v[3]);
  _mm256_storeu_si256((__m256i*)out, _mm256_add_epi32(_mm256_permute2x128_si256(v[0], v[1], 0x20),
                                                      _mm256_permute2x128_si256(v[0], v[1], 0x31)));
}
// The registers of four neighbouring lanes, 16 bytes, hold consecutive k of one row: widen them to 16 bits.
inline void widen(Ty ty, const u32* s, s16* out) {
  const __m128i x = _mm_loadu_si128((const __m128i*)s);
  if (ty == Ty::S8 || ty == Ty::U8) {
    _mm256_store_si256((__m256i*)out, ty == Ty::S8 ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x));
    return;
  }
  const __m128i f = _mm_set1_epi8(15), lo = _mm_and_si128(x, f), hi = _mm_and_si128(_mm_srli_epi16(x, 4), f);
  const __m256i e = _mm256_set1_epi16(ty == Ty::S4 ? 8 : 0);
  auto put = [&](int k, __m128i v) {
    _mm256_store_si256((__m256i*)(out + k), _mm256_sub_epi16(_mm256_xor_si256(_mm256_cvtepu8_epi16(v), e), e));
  };
  put(0, _mm_unpacklo_epi8(lo, hi));
  put(16, _mm_unpackhi_epi8(lo, hi));
}

}  // namespace ptxsim
