// Sixteen floats or ints of AVX-512, as rows.h, weight_rows.h and fake_rows.h take them. For isa_avx512_vnni.cpp, whose
// flags it needs.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "cpu/each.h"

namespace pyquant::cpu {
namespace {

// In assembler because g++ 12 copies the accumulator of the intrinsic back and forth, at half the speed. For the same
// reason every loop over accumulators is unrolled by name: they have to become registers before the loop over K is
// looked at.
PYQ_INLINE void dot(__m512i& acc, __m512i u8, __m512i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8)); }

struct V {
  using F = __m512;
  using I = __m512i;
  static constexpr int64_t W = 16;
  static F set(float v) { return _mm512_set1_ps(v); }
  static I set_i(int32_t v) { return _mm512_set1_epi32(v); }
  static F load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
  static I load_s8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f32(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store_f16(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bf16(uint16_t* p, F v) {
    const I u = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    I h = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    h = _mm512_mask_mov_epi32(h, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(h));
  }
  static void store_i(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
  static void store_bytes(uint8_t* p, const I* q, int32_t qmin, int32_t qmax, uint8_t flip) {
    // The two packs work within 128-bit lanes; the permutation puts the sixteen dwords back in order.
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    I v = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    v = _mm512_permutexvar_epi32(order, v);
    v = _mm512_max_epi8(v, _mm512_set1_epi8(static_cast<char>(qmin)));
    v = _mm512_min_epi8(v, _mm512_set1_epi8(static_cast<char>(qmax)));
    _mm512_storeu_si512(p, _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(flip))));
  }
  // Every lane and the one Step away from it, exchanged.
  template <int Step>
  static F swapped(F v) {
    if constexpr (Step >= 4) return _mm512_shuffle_f32x4(v, v, Step == 8 ? 0x4e : 0xb1);
    return _mm512_permute_ps(v, Step == 2 ? 0x4e : 0xb1);
  }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static I bits(F v) { return _mm512_castps_si512(v); }
  static F mul_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
  static I magnitude_bits(F v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)); }
  static I to_int(F v) { return _mm512_cvtps_epi32(v); }
  static I to_int_nan_zero(F v) { return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  // Past the caches; fence() before another thread may read.
  static void stream_f32(float* p, F v) { _mm512_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }
  static uint64_t equal_bits(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static F sub_where(F a, F b, uint64_t bits) { return _mm512_mask_sub_ps(a, static_cast<__mmask16>(bits), a, b); }
  static void keep32(void* to, const void* from, uint64_t bits) {
    for (int j = 0; j < 4; ++j)
      _mm512_storeu_si512(static_cast<I*>(to) + j, _mm512_maskz_loadu_epi32(static_cast<__mmask16>(bits >> (16 * j)),
                                                                            static_cast<const I*>(from) + j));
  }
  static void keep16(void* to, const void* from, uint64_t bits) {
    for (int j = 0; j < 2; ++j)
      _mm512_storeu_si512(static_cast<I*>(to) + j, _mm512_maskz_loadu_epi16(static_cast<__mmask32>(bits >> (32 * j)),
                                                                            static_cast<const I*>(from) + j));
  }
  static int32_t reduce_max_i(I v) { return _mm512_reduce_max_epi32(v); }
  static float reduce_min(F v) { return _mm512_reduce_min_ps(v); }
  static float reduce_max(F v) { return _mm512_reduce_max_ps(v); }
  static float reduce_add(F v) { return _mm512_reduce_add_ps(v); }
  static void transpose(const float* from, int64_t ld, float* to, int64_t ldt) {
    F a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * ld);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    // Column 4 l + j of the rows i to i + 3 in lane l of a[i + j].
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F low = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), odd = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd);
      const F high = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88),
              last = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd);
      _mm512_storeu_ps(to + j * ldt, _mm512_shuffle_f32x4(low, high, 0x88));
      _mm512_storeu_ps(to + (j + 4) * ldt, _mm512_shuffle_f32x4(odd, last, 0x88));
      _mm512_storeu_ps(to + (j + 8) * ldt, _mm512_shuffle_f32x4(low, high, 0xdd));
      _mm512_storeu_ps(to + (j + 12) * ldt, _mm512_shuffle_f32x4(odd, last, 0xdd));
    }
  }
  static F spread(const float* p, int64_t count, I index) {
    return _mm512_permutexvar_ps(index, _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p));
  }
  // The instruction reads the low four bits of a lane only.
  static constexpr bool kLooksUp = true;
  static F int4_codes() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1); }
  static F look_up(F table, I v, int at) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(v, static_cast<unsigned>(4 * at)), table);
  }
  static F nibble(I v, int at) { return look_up(int4_codes(), v, at); }
};

}  // namespace
}  // namespace pyquant::cpu
