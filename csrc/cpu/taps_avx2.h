// taps.h in AVX2, with the products of isa_avx2.cpp: even and odd bytes widened to s16, then vpmaddwd.
#pragma once
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/vector_avx2.h"

namespace pyquant::cpu {
namespace {

template <Spread kSpread>
inline __m256i tap_codes(const uint8_t* at, __m256i index) {
  if constexpr (kSpread == Spread::side_by_side) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  if constexpr (kSpread == Spread::one) {
    int32_t dword;
    std::memcpy(&dword, at, 4);
    return _mm256_set1_epi32(dword);
  }
  if constexpr (kSpread == Spread::near)
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), index);
  return _mm256_i32gather_epi32(reinterpret_cast<const int*>(at), index, 4);
}

// Sixteen channels from `channel` on, P pixels.
template <Spread kSpread, int P>
__attribute__((noinline)) void tap_tile(const TapRun& run, int64_t pixel, int64_t channel) {
  __m256i c[P][2], index[2];
  const uint8_t* codes[2];
  each<2>(PYQ_EACH(v) {
    const int32_t* dwords = run.dwords + channel + v * 8;
    codes[v] = run.codes + pixel * run.step +
               (kSpread == Spread::side_by_side ? (channel + v * 8) * 4 : int64_t{dwords[0]} * 4);
    index[v] = _mm256_sub_epi32(V::load_i(dwords), _mm256_set1_epi32(dwords[0]));
    each<P>(PYQ_EACH(p) { c[p][v] = _mm256_setzero_si256(); });
  });
  const __m256i low = _mm256_set1_epi16(0x00ff);
  const int8_t* weights = run.weights + channel * 4;
  const int64_t step = run.step;
  for (int64_t t = 0; t < run.taps; ++t, weights += kBlockN * 4) {
    const int64_t offset = run.offsets[t];
    each<2>(PYQ_EACH(v) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + v * 32));
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), odd = _mm256_srai_epi16(w, 8);
      each<P>(PYQ_EACH(p) {
        const __m256i a = tap_codes<kSpread>(codes[v] + offset + p * step, index[v]);
        add_s32(c[p][v], _mm256_madd_epi16(_mm256_and_si256(a, low), even));
        add_s32(c[p][v], _mm256_madd_epi16(_mm256_srli_epi16(a, 8), odd));
      });
    });
  }
  each<P>(
      PYQ_EACH(p) { each<2>(PYQ_EACH(v) { V::store_i(run.acc + (pixel + p) * run.ld + channel + v * 8, c[p][v]); }); });
}

}  // namespace
}  // namespace pyquant::cpu

#include "cpu/taps_by_four.h"

namespace pyquant::cpu {
namespace {

template <int L>
void interleave_lines(const Interleave& given) {
  const Interleave run = given;  // what is written are bytes, which may be anything
  for (int64_t p = 0; p < run.pixels; ++p)
    for (int64_t c = 0; c < run.channels; c += 16) {
      __m128i line[4];
      for (int i = 0; i < 4; ++i)
        line[i] = i < L ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(run.lines[i] + p * run.strides[i] + c))
                        : _mm_setzero_si128();
      const __m128i low_a = _mm_unpacklo_epi8(line[0], line[1]), low_b = _mm_unpacklo_epi8(line[2], line[3]);
      const __m128i high_a = _mm_unpackhi_epi8(line[0], line[1]), high_b = _mm_unpackhi_epi8(line[2], line[3]);
      auto* out = reinterpret_cast<__m128i*>(run.to + p * run.step + c * 4);
      _mm_storeu_si128(out, _mm_unpacklo_epi16(low_a, low_b));
      _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low_a, low_b));
      _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high_a, high_b));
      _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high_a, high_b));
    }
}

void interleave(const Interleave& run) {
  switch (run.count) {
    case 1: return interleave_lines<1>(run);
    case 2: return interleave_lines<2>(run);
    case 3: return interleave_lines<3>(run);
    default: interleave_lines<4>(run);
  }
}

}  // namespace
}  // namespace pyquant::cpu
