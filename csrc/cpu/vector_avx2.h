// Eight floats or ints of AVX2, as rows.h, weight_rows.h and fake_rows.h take them. For isa_avx2.cpp, whose flags it
// needs.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "cpu/each.h"

namespace pyquant::cpu {
namespace {

// In assembler because g++ 12 would add the products to each other first, run out of registers, and copy the sums back
// and forth.
PYQ_INLINE void add_s32(__m256i& sum, __m256i products) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products)); }
PYQ_INLINE void add_s16(__m256i& sum, __m256i products) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products)); }

struct V {
  using F = __m256;
  using I = __m256i;
  static constexpr int64_t W = 8;
  static F set(float v) { return _mm256_set1_ps(v); }
  static I set_i(int32_t v) { return _mm256_set1_epi32(v); }
  static __m128i half(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static F load_f32(const float* p) { return _mm256_loadu_ps(p); }
  static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(half(p)); }
  static F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p)), 16));
  }
  static I load_i(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
  static I load_s8(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f32(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store_f16(uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bf16(uint16_t* p, F v) {
    const I u = _mm256_castps_si256(v);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    I h = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    h = _mm256_blendv_epi8(h, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store_i(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<I*>(p), v); }
  static void store_bytes(uint8_t* p, const I* q, int32_t qmin, int32_t qmax, uint8_t flip) {
    // The two packs work within 128-bit lanes; the permutation puts the eight dwords back in order.
    I v = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    v = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    v = _mm256_max_epi8(v, _mm256_set1_epi8(static_cast<char>(qmin)));
    v = _mm256_min_epi8(v, _mm256_set1_epi8(static_cast<char>(qmax)));
    _mm256_storeu_si256(reinterpret_cast<I*>(p), _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(flip))));
  }
  // Every lane and the one Step away from it, exchanged.
  template <int Step>
  static F swapped(F v) {
    if constexpr (Step == 4) return _mm256_permute2f128_ps(v, v, 1);
    return _mm256_permute_ps(v, Step == 2 ? 0x4e : 0xb1);
  }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static I bits(F v) { return _mm256_castps_si256(v); }
  static F mul_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I mul_i(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
  static I magnitude_bits(F v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); }
  static I to_int(F v) { return _mm256_cvtps_epi32(v); }
  static I to_int_nan_zero(F v) { return _mm256_cvtps_epi32(_mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q))); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  // Past the caches; fence() before another thread may read.
  static void stream_f32(float* p, F v) { _mm256_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }
  static uint64_t equal_bits(F a, F b) {
    return static_cast<uint64_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }
  static I bits_to_lanes(uint64_t bits) {
    const I each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each), each);
  }
  static F sub_where(F a, F b, uint64_t bits) {
    return _mm256_sub_ps(a, _mm256_and_ps(b, _mm256_castsi256_ps(bits_to_lanes(bits))));
  }
  static void keep32(void* to, const void* from, uint64_t bits) {
    for (int j = 0; j < 8; ++j) {
      const I v = _mm256_loadu_si256(static_cast<const I*>(from) + j);
      _mm256_storeu_si256(static_cast<I*>(to) + j, _mm256_and_si256(v, bits_to_lanes(bits >> (8 * j) & 255)));
    }
  }
  static void keep16(void* to, const void* from, uint64_t bits) {
    const I each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    for (int j = 0; j < 4; ++j) {
      const I v = _mm256_loadu_si256(static_cast<const I*>(from) + j);
      const I own = _mm256_and_si256(_mm256_set1_epi16(static_cast<int16_t>(bits >> (16 * j))), each);
      _mm256_storeu_si256(static_cast<I*>(to) + j, _mm256_and_si256(v, _mm256_cmpeq_epi16(own, each)));
    }
  }
  static int32_t reduce_max_i(I v) {
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
  }
  static float reduce_min(F v) {
    __m128 h = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_min_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_min_ss(h, _mm_movehdup_ps(h)));
  }
  static float reduce_max(F v) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
  }
  static float reduce_add(F v) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
  }
  static constexpr bool kLooksUp = false;
  static void transpose(const float* from, int64_t ld, float* to, int64_t ldt) {
    F a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * ld);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + i * ldt, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
      _mm256_storeu_ps(to + (i + 4) * ldt, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
  }
  static F spread(const float* p, int64_t count, I index) {
    const I lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const I own = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
    return _mm256_permutevar8x32_ps(_mm256_maskload_ps(p, own), index);
  }
  static F nibble(I v, int at) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 28 - 4 * at), 28)); }
};

}  // namespace
}  // namespace pyquant::cpu
