// processors: x86_64, flags: -mavx2 -mfma -mf16c -mprfchw
// AVX2: even and odd bytes widened to s16, then vpmaddwd. vpmaddubsw would be shorter and would saturate.
#include <immintrin.h>

#include <cstring>

#include "cpu/row_table.h"
#include "cpu/taps_avx2.h"

namespace pyquant::cpu {
namespace {

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

constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block

__m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// R rows by 16 columns: 2 vectors of eight columns, each split into its even and odd bytes.
template <int R>
void tile_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add) {
  __m256i c[R][2];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) c[r][j] = add ? load(acc + r * kBlockN + j * 8) : _mm256_setzero_si256();
  const __m256i low = _mm256_set1_epi16(0x00ff);
  for (int64_t q = 0; q < quads; ++q) {
    const __m256i w0 = load(b + q * kStep), w1 = load(b + q * kStep + 32);
    const __m256i even0 = _mm256_srai_epi16(_mm256_slli_epi16(w0, 8), 8), odd0 = _mm256_srai_epi16(w0, 8);
    const __m256i even1 = _mm256_srai_epi16(_mm256_slli_epi16(w1, 8), 8), odd1 = _mm256_srai_epi16(w1, 8);
    for (int r = 0; r < R; ++r) {
      int32_t quad;
      std::memcpy(&quad, a + r * lda + q * 4, 4);
      const __m256i x = _mm256_set1_epi32(quad);
      const __m256i even = _mm256_and_si256(x, low), odd = _mm256_srli_epi16(x, 8);
      c[r][0] =
          _mm256_add_epi32(c[r][0], _mm256_add_epi32(_mm256_madd_epi16(even, even0), _mm256_madd_epi16(odd, odd0)));
      c[r][1] =
          _mm256_add_epi32(c[r][1], _mm256_add_epi32(_mm256_madd_epi16(even, even1), _mm256_madd_epi16(odd, odd1)));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) V::store_i(acc + r * kBlockN + j * 8, c[r][j]);
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  for (int64_t done = 0; done < rows;) {
    const int64_t r = rows - done >= 4 ? 4 : rows - done;
    ahead.call_out(done, r);
    for (int64_t n = 0; n < kBlockN; n += 16) switch (r) {
        case 1: tile_s8<1>(a, lda, b + n * 4, quads, acc + n, add); break;
        case 2: tile_s8<2>(a, lda, b + n * 4, quads, acc + n, add); break;
        case 3: tile_s8<3>(a, lda, b + n * 4, quads, acc + n, add); break;
        default: tile_s8<4>(a, lda, b + n * 4, quads, acc + n, add);
      }
    a += r * lda;
    acc += r * kBlockN;
    done += r;
  }
}

void unpack_s4(const uint8_t* b, int64_t octs, int8_t* out) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  const __m256i mask = _mm256_set1_epi8(15);
  for (int64_t o = 0; o < octs; ++o)
    for (int64_t i = 0; i < kStep; i += 32) {
      const __m256i v = load(b + o * kStep + i);
      auto* low = reinterpret_cast<__m256i*>(out + 2 * o * kStep + i);
      auto* high = reinterpret_cast<__m256i*>(out + (2 * o + 1) * kStep + i);
      _mm256_storeu_si256(low, _mm256_sub_epi8(_mm256_and_si256(v, mask), _mm256_set1_epi8(8)));
      _mm256_storeu_si256(high, _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), mask)));
    }
}

void gemm_s4(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc) {
  constexpr int64_t kChunk = 16;  // 8 KiB of unpacked weights stay in L1
  alignas(32) int8_t quads[kChunk * 2 * kStep];
  if (octs == 0) gemm_s8(a, lda, rows, quads, 0, acc, false, {});
  for (int64_t o = 0; o < octs; o += kChunk) {
    const int64_t n = octs - o < kChunk ? octs - o : kChunk;
    unpack_s4(b + o * kStep, n, quads);
    gemm_s8(a + o * 8, lda, rows, quads, 2 * n, acc, o > 0, {});
  }
}

}  // namespace

// Reads like that of every other set; the functions are those of this file alone.
const Kernels& kernels_avx2() {
  static constexpr Kernels table = [] {
    Kernels k = row_table<V>(Isa::avx2);
    k.row_block = 16;
    k.gemm_s8 = gemm_s8;
    k.gemm_s4 = gemm_s4;
    k.unpack_s4 = unpack_s4;
    k.taps = taps;
    k.interleave = interleave;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
