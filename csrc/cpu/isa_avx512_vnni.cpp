// AVX-512 with VNNI: vpdpbusd adds four u8 x s8 products to an int32 exactly, without saturation.
#include <immintrin.h>

#include <cstring>

#include "cpu/fake_rows.h"
#include "cpu/rows.h"

#define PYQ_INLINE __attribute__((always_inline)) inline

namespace pyquant::cpu {
namespace {

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
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
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
};

constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block
constexpr int64_t kPrefetch = 1024;     // bytes ahead of the weight stream

void nothing(int64_t) {}

int32_t quad(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// In assembler because g++ 12 copies the accumulator of the intrinsic back and forth, at half the speed. For the same
// reason every loop over accumulators is unrolled by name: they have to become registers before the loop over K is
// looked at.
PYQ_INLINE void dot(__m512i& acc, __m512i u8, __m512i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8)); }

template <int R>
PYQ_INLINE void multiply_quad(const uint8_t* a, int64_t lda, const int8_t* b, __m512i (&c)[R][4]) {
  const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
  const __m512i w2 = _mm512_loadu_si512(b + 128), w3 = _mm512_loadu_si512(b + 192);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512i x = _mm512_set1_epi32(quad(a + r * lda));
    dot(c[r][0], x, w0);
    dot(c[r][1], x, w1);
    dot(c[r][2], x, w2);
    dot(c[r][3], x, w3);
  }
}

template <int R>
PYQ_INLINE void zero(__m512i (&c)[R][4]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) c[r][0] = c[r][1] = c[r][2] = c[r][3] = _mm512_setzero_si512();
}

template <int R>
PYQ_INLINE void finish(const __m512i (&c)[R][4], int32_t* acc, bool add) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int32_t* to = acc + r * kBlockN + j * 16;
      _mm512_storeu_si512(to, add ? _mm512_add_epi32(_mm512_loadu_si512(to), c[r][j]) : c[r][j]);
    }
  }
}

// Few rows: the weights stream through once, so they are fetched ahead, and two sets of accumulators hide the latency.
template <int R>
void stream_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add) {
  __m512i c[R][4], d[R][4];
  zero(c);
  zero(d);
  int64_t q = 0;
  for (; q + 2 <= quads; q += 2) {
    const int8_t* w = b + q * kStep;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetch + j * 64), _MM_HINT_T0);
    multiply_quad(a + q * 4, lda, w, c);
    multiply_quad(a + q * 4 + 4, lda, w + kStep, d);
  }
  if (q < quads) multiply_quad(a + q * 4, lda, b + q * kStep, c);
  finish(c, acc, add);
  finish(d, acc, true);
}

// fetch: these weights come from memory, so the ones after them are called in ahead.
template <int R>
void tile_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add, bool fetch) {
  __m512i c[R][4];
  zero(c);
  if (fetch) {
    for (int64_t q = 0; q < quads; ++q) {
      const int8_t* w = b + q * kStep;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetch + j * 64), _MM_HINT_T0);
      multiply_quad(a + q * 4, lda, w, c);
    }
  } else {
    for (int64_t q = 0; q < quads; ++q) multiply_quad(a + q * 4, lda, b + q * kStep, c);
  }
  finish(c, acc, add);
}

void rows_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add) {
  bool fetch = true;
  for (; rows > 0;) {
    // Seven to eleven rows are split evenly: 4 + 4 is faster than 6 + 2.
    const int64_t r = rows >= 12 || rows == 6 ? 6 : rows > 6 ? (rows + 1) / 2 : rows;
    switch (r) {
      case 1: tile_s8<1>(a, lda, b, quads, acc, add, fetch); break;
      case 2: tile_s8<2>(a, lda, b, quads, acc, add, fetch); break;
      case 3: tile_s8<3>(a, lda, b, quads, acc, add, fetch); break;
      case 4: tile_s8<4>(a, lda, b, quads, acc, add, fetch); break;
      case 5: tile_s8<5>(a, lda, b, quads, acc, add, fetch); break;
      default: tile_s8<6>(a, lda, b, quads, acc, add, fetch);
    }
    fetch = false;
    a += r * lda;
    acc += r * kBlockN;
    rows -= r;
  }
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add) {
  if (rows == 1) return stream_s8<1>(a, lda, b, quads, acc, add);
  if (rows == 2) return stream_s8<2>(a, lda, b, quads, acc, add);
  // 16 KiB of weights at a time: they stay in the first-level cache for all rows.
  constexpr int64_t kChunk = 64;
  if (rows <= 6 || quads <= kChunk) return rows_s8(a, lda, rows, b, quads, acc, add);
  for (int64_t q = 0; q < quads; q += kChunk)
    rows_s8(a + q * 4, lda, rows, b + q * kStep, quads - q < kChunk ? quads - q : kChunk, acc, add || q > 0);
}

// int4: the offset of the low nibbles, 8 times the sum of their activations, is one more dot product; the high nibbles
// count sixteenfold. kGroupOcts keep that product within int32. The sums end up in low.
template <int R>
PYQ_INLINE void multiply_octs(const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs, __m512i (&low)[R][4]) {
  const __m512i low_mask = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8(-16), eight = _mm512_set1_epi8(8);
  __m512i high[R][4], offset[R][4];
  zero(low);
  zero(high);
  zero(offset);
  for (int64_t o = 0; o < octs; ++o) {
    const uint8_t* p = b + o * kStep;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetch + j * 64), _MM_HINT_T0);
      const __m512i v = _mm512_loadu_si512(p + j * 64);
      const __m512i w0 = _mm512_and_si512(v, low_mask), w1 = _mm512_and_si512(v, high_mask);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const __m512i x = _mm512_set1_epi32(quad(a + r * lda + o * 8));
        if (j == 0) dot(offset[r][0], x, eight);
        dot(low[r][j], x, w0);
        dot(high[r][j], _mm512_set1_epi32(quad(a + r * lda + o * 8 + 4)), w1);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      low[r][j] = _mm512_add_epi32(_mm512_sub_epi32(low[r][j], offset[r][0]), _mm512_srai_epi32(high[r][j], 4));
}

template <int R>
void direct_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs, int32_t* acc) {
  for (int64_t done = 0; done < octs || done == 0; done += kGroupOcts) {
    __m512i c[R][4];
    multiply_octs(a + done * 8, lda, b + done * kStep, octs - done < kGroupOcts ? octs - done : kGroupOcts, c);
    finish(c, acc, done > 0);
  }
}

void gemm_s4(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc) {
  // Two rows at a time fill the registers; the second pass over the nibbles finds them in the cache.
  for (; rows >= 2; rows -= 2, a += 2 * lda, acc += 2 * kBlockN) direct_s4<2>(a, lda, b, octs, acc);
  if (rows) direct_s4<1>(a, lda, b, octs, acc);
}

void gemv_s4(const uint8_t* a, const uint8_t* b, int64_t octs, int64_t groups, const Tile& tile, float* sum) {
  __m512 t[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  const __m512i x_zero = _mm512_set1_epi32(tile.x_zero[0]);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i c[1][4];
    multiply_octs(a + g * octs * 8, 0, b + g * octs * kStep, octs, c);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t at = g * kBlockN + j * 16;
      const __m512i term = _mm512_mullo_epi32(x_zero, _mm512_loadu_si512(tile.w_sum + at));
      const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(c[0][j], term));
      t[j] = _mm512_add_ps(t[j], _mm512_mul_ps(value, _mm512_loadu_ps(tile.w_scale + at)));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) _mm512_storeu_ps(sum + j * 16, t[j]);
}

void unpack_s4(const uint8_t* b, int64_t octs, int8_t* out) {
  const __m512i mask = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  for (int64_t o = 0; o < octs; ++o)
    for (int j = 0; j < 4; ++j) {
      const __m512i v = _mm512_loadu_si512(b + o * kStep + j * 64);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
      _mm512_storeu_si512(out + 2 * o * kStep + j * 64, _mm512_sub_epi8(_mm512_and_si512(v, mask), eight));
      _mm512_storeu_si512(out + (2 * o + 1) * kStep + j * 64, _mm512_shuffle_epi8(table, high));
    }
}

}  // namespace

const Kernels& kernels_avx512_vnni() {
  static constexpr Kernels table{Isa::avx512_vnni,
                                 48,
                                 nothing,
                                 nothing,
                                 gemm_s8,
                                 gemm_s4,
                                 gemv_s4,
                                 unpack_s4,
                                 Rows<V>::stats,
                                 Rows<V>::quantize,
                                 Rows<V>::dequantize,
                                 Rows<V>::widen,
                                 Rows<V>::narrow,
                                 Rows<V>::silu_mul,
                                 Rows<V>::accumulate,
                                 Rows<V>::epilogue,
                                 FakeRows<V>::given,
                                 FakeRows<V>::dynamic,
                                 FakeRows<V>::keep,
                                 FakeRows<V>::learned};
  return table;
}

}  // namespace pyquant::cpu
