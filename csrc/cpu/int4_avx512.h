// Products of int4 in AVX-512 with VNNI, a scale a channel or in groups. For isa_avx512_vnni.cpp, whose flags it needs.
#pragma once
#include "cpu/int8_avx512.h"

namespace pyquant::cpu {
namespace {

// Bytes ahead of a stream of int4: the prefetchers of the machine stop at the end of a page.
constexpr int64_t kPage = 4096;

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
      _mm_prefetch(reinterpret_cast<const char*>(p + kPage + j * 64), _MM_HINT_T0);
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

PYQ_INLINE __m512i low_nibbles(const uint8_t* p, __m512i low) { return _mm512_and_si512(_mm512_loadu_si512(p), low); }

// (v >> 4 & 15) ^ 8: code + 8 of the high nibbles.
PYQ_INLINE __m512i high_nibbles(const uint8_t* p, __m512i low, __m512i eight) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), low, eight, 0x6a);
}

PYQ_INLINE void add_scaled(float* to, __m512i c, __m512 scale, bool first) {
  const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
  _mm512_storeu_ps(to, _mm512_add_ps(before, _mm512_mul_ps(_mm512_cvtepi32_ps(c), scale)));
}

// One group of int4 for one tile of rows.
struct GroupTile {
  const uint8_t* a;
  int64_t lda;
  const uint8_t* b;
  int64_t octs;
  const int32_t* a_sum;  // a row every a_sum_step
  int64_t a_sum_step;
  const int32_t* x_zero;
  int64_t x_zero_step;
  const int32_t* w_sum;
  const float* w_scale;
  float* sum;
  bool first;
  const uint8_t* ahead;  // as in tile_s8
  int8_t* codes;         // where kKeeps leaves the codes of b, one a byte
};

// One oct from nibbles, whose codes are kept.
template <int R>
PYQ_INLINE void multiply_and_keep(const uint8_t* a, int64_t lda, const uint8_t* p, int8_t* codes, __m512i low,
                                  __m512i eight, __m512i (&c)[R][4]) {
  __m512i w[4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      w[j] = half ? high_nibbles(p + j * 64, low, eight) : low_nibbles(p + j * 64, low);
      w[j] = _mm512_sub_epi8(w[j], eight);
      _mm512_storeu_si512(codes + half * kStep + j * 64, w[j]);
    }
    multiply(a + half * 4, lda, w[0], w[1], w[2], w[3], c);
  }
}

// The accumulators begin at minus the term of the zero point and, where nibbles become code + 8, of that 8. Adds
// float(dots) * scale to sum. A function of its own, because g++ 12 keeps the accumulators on the stack where it is
// inlined.
template <int R, int kLines, bool kKeeps>
__attribute__((noinline)) void group_s4(const GroupTile& t) {
  const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
  const __m512i s0 = _mm512_loadu_si512(t.w_sum), s1 = _mm512_loadu_si512(t.w_sum + 16);
  const __m512i s2 = _mm512_loadu_si512(t.w_sum + 32), s3 = _mm512_loadu_si512(t.w_sum + 48);
  const __m512i shared = _mm512_set1_epi32(-t.x_zero[0]);  // the zero point of all rows, or of the first
  const __m512i z0 = _mm512_mullo_epi32(shared, s0), z1 = _mm512_mullo_epi32(shared, s1);
  const __m512i z2 = _mm512_mullo_epi32(shared, s2), z3 = _mm512_mullo_epi32(shared, s3);
  __m512i c[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    c[r][0] = z0;
    c[r][1] = z1;
    c[r][2] = z2;
    c[r][3] = z3;
    if (t.x_zero_step) {
      const __m512i zero_point = _mm512_set1_epi32(-t.x_zero[r * t.x_zero_step]);
      c[r][0] = _mm512_mullo_epi32(zero_point, s0);
      c[r][1] = _mm512_mullo_epi32(zero_point, s1);
      c[r][2] = _mm512_mullo_epi32(zero_point, s2);
      c[r][3] = _mm512_mullo_epi32(zero_point, s3);
    }
    if constexpr (!kKeeps) {
      const __m512i eights = _mm512_set1_epi32(8 * t.a_sum[r * t.a_sum_step]);
      c[r][0] = _mm512_sub_epi32(c[r][0], eights);
      c[r][1] = _mm512_sub_epi32(c[r][1], eights);
      c[r][2] = _mm512_sub_epi32(c[r][2], eights);
      c[r][3] = _mm512_sub_epi32(c[r][3], eights);
    }
  }
  const uint8_t *a = t.a, *b = t.b;
  const int64_t lda = t.lda, octs = t.octs;
  for (int64_t o = 0; o < octs; ++o) {
    const uint8_t* p = b + o * kStep;
#pragma GCC unroll 4
    for (int j = 0; j < kLines; ++j)
      _mm_prefetch(reinterpret_cast<const char*>(t.ahead + (o * kLines + j) * 64), _MM_HINT_T1);
    if constexpr (kKeeps) {
      multiply_and_keep(a + o * 8, lda, p, t.codes + 2 * o * kStep, low, eight, c);
      continue;
    }
    multiply(a + o * 8, lda, low_nibbles(p, low), low_nibbles(p + 64, low), low_nibbles(p + 128, low),
             low_nibbles(p + 192, low), c);
    multiply(a + o * 8 + 4, lda, high_nibbles(p, low, eight), high_nibbles(p + 64, low, eight),
             high_nibbles(p + 128, low, eight), high_nibbles(p + 192, low, eight), c);
  }
  const __m512 f0 = _mm512_loadu_ps(t.w_scale), f1 = _mm512_loadu_ps(t.w_scale + 16);
  const __m512 f2 = _mm512_loadu_ps(t.w_scale + 32), f3 = _mm512_loadu_ps(t.w_scale + 48);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* to = t.sum + r * kBlockN;
    add_scaled(to, c[r][0], f0, t.first);
    add_scaled(to + 16, c[r][1], f1, t.first);
    add_scaled(to + 32, c[r][2], f2, t.first);
    add_scaled(to + 48, c[r][3], f3, t.first);
  }
}

template <int R>
void group_s4(const GroupTile& t) {
  t.ahead ? group_s4<R, 2, false>(t) : group_s4<R, 0, false>(t);
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

// One block of int4 in groups, a byte a code.
struct GroupBlock {
  const int8_t* codes;
  int64_t octs, groups;
};

// A tile of rows through all groups. The accumulators begin at minus the term of the zero point; between groups the
// sums of the tile are in memory, few enough to stay near. A function of its own as group_s4 is, and one product in its
// loop: with two g++ 12 keeps the accumulators on the stack.
template <int R, bool kAhead>
__attribute__((noinline)) void tile_groups(const uint8_t* a, int64_t lda, const GroupBlock& b, const Tile& tile,
                                           float* sum, const Besides& to) {
  // The zero point of all rows, or of the first.
  const __m512i shared = _mm512_set1_epi32(-tile.x_zero[to.row * tile.x_zero_step]);
  const int64_t quads = 2 * b.octs;
  // A row of results is called in with each of the last groups: with single quads that would be a branch in each.
  if (to.out && b.groups < R) to.out->call_out(to.row, R - b.groups);
  const int8_t *ahead = to.weights, *codes = b.codes;
  const int64_t step = to.step;
  for (int64_t g = 0, q = 0; g < b.groups; ++g) {
    if (const int64_t r = g + R - b.groups; to.out && r >= 0) to.out->call_out(to.row + r, 1);
    __m512i c[R][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i w_sum = _mm512_loadu_si512(tile.w_sum + g * kBlockN + j * 16);
      c[0][j] = _mm512_mullo_epi32(shared, w_sum);
#pragma GCC unroll 8
      for (int r = 1; r < R; ++r) c[r][j] = c[0][j];
      if (tile.x_zero_step) {
#pragma GCC unroll 8
        for (int r = 1; r < R; ++r) c[r][j] = _mm512_mullo_epi32(_mm512_set1_epi32(-tile.x_zero[to.row + r]), w_sum);
      }
    }
    for (const int64_t end = q + quads; q < end; ++q) {
      if constexpr (kAhead) _mm_prefetch(reinterpret_cast<const char*>(ahead + q * step), _MM_HINT_T1);
      multiply_quad(a + q * 4, lda, codes + q * kStep, c);
    }
    const float* scale = tile.w_scale + g * kBlockN;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        add_scaled(sum + r * kBlockN + j * 16, c[r][j], _mm512_loadu_ps(scale + j * 16), g == 0);
    }
  }
}

template <int R>
void tile_groups(const uint8_t* a, int64_t lda, const GroupBlock& b, const Tile& tile, float* sum, const Besides& to) {
  if (to.weights)
    tile_groups<R, true>(a, lda, b, tile, sum, to);
  else
    tile_groups<R, false>(a, lda, b, tile, sum, to);
}

void linear_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int8_t* codes, bool fill, int64_t octs, int64_t groups,
               const Tile& tile, float* sum, const Ahead& ahead) {
  Tile summed = tile;
  summed.acc = nullptr;
  summed.sum = sum;
  const Finish finish(summed);
  const auto* weights = static_cast<const int8_t*>(ahead.weights);
  const GroupBlock block{codes, octs, groups};
  const Ahead* const out = ahead.out ? &ahead : nullptr;
  const int64_t first = fill ? kTileRows : 0, step = bytes_a_quad(kStep / 2, tile.rows - first);
  int64_t done = first;
  if (fill) {
    ahead.call_out(0, kTileRows);
    for (int64_t g = 0; g < groups; ++g)
      group_s4<kTileRows, 0, true>({a + g * octs * 8, lda, b + g * octs * kStep, octs, nullptr, 0, tile.x_zero,
                                    tile.x_zero_step, tile.w_sum + g * kBlockN, tile.w_scale + g * kBlockN, sum, g == 0,
                                    nullptr, codes + 2 * g * octs * kStep});
    finish.rows(0, kTileRows);
  }
  for (int64_t pass = 0; done < tile.rows; ++pass) {
    const int64_t r = tile_rows(tile.rows - done);
    const Besides to{weights && pass * step < kStep / 2 ? weights + pass * 2 * octs * groups * step : nullptr, step,
                     out, &finish, done};
    const uint8_t* rows = a + done * lda;
    float* sums = sum + done * kBlockN;
    switch (r) {
      case 1: tile_groups<1>(rows, lda, block, tile, sums, to); break;
      case 2: tile_groups<2>(rows, lda, block, tile, sums, to); break;
      case 3: tile_groups<3>(rows, lda, block, tile, sums, to); break;
      case 4: tile_groups<4>(rows, lda, block, tile, sums, to); break;
      case 5: tile_groups<5>(rows, lda, block, tile, sums, to); break;
      default: tile_groups<6>(rows, lda, block, tile, sums, to);
    }
    finish.rows(done, done + r);
    done += r;
  }
}

void groups_s4(const uint8_t* a, int64_t lda, const int32_t* a_sum, const uint8_t* b, int64_t octs, int64_t groups,
               const Tile& tile, float* sum, const Ahead& ahead) {
  for (int64_t g = 0; g < groups; ++g, a += octs * 8, b += octs * kStep) {
    const bool last = g + 1 == groups;
    const uint8_t* next = last              ? static_cast<const uint8_t*>(ahead.weights)
                          : ahead.first_use ? b + octs * kStep
                                            : nullptr;
    if (tile.rows <= 6) next = nullptr;
    int64_t done = 0;
    for (int pass = 0; done < tile.rows; ++pass) {
      const int64_t r = tile_rows(tile.rows - done);
      if (last) ahead.call_out(done, r);
      const GroupTile t{a + done * lda,
                        lda,
                        b,
                        octs,
                        a_sum + done * groups + g,
                        groups,
                        tile.x_zero + done * tile.x_zero_step,
                        tile.x_zero_step,
                        tile.w_sum + g * kBlockN,
                        tile.w_scale + g * kBlockN,
                        sum + done * kBlockN,
                        g == 0,
                        next && pass < 2 ? next + pass * octs * 128 : nullptr,
                        nullptr};
      switch (r) {
        case 1: group_s4<1>(t); break;
        case 2: group_s4<2>(t); break;
        case 3: group_s4<3>(t); break;
        case 4: group_s4<4>(t); break;
        case 5: group_s4<5>(t); break;
        default: group_s4<6>(t);
      }
      done += r;
    }
  }
}

}  // namespace
}  // namespace pyquant::cpu
