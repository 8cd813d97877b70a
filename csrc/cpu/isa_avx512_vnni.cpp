// processors: x86_64, flags: -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mprfchw -mprefer-vector-width=512
// AVX-512 with VNNI: vpdpbusd adds four u8 x s8 products to an int32 exactly, without saturation.
// g++ 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/finish_avx512.h"
#include "cpu/row_table.h"
#include "cpu/taps_avx512.h"
#include "cpu/tile_rows.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block

int32_t quad(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

template <int R>
PYQ_INLINE void multiply(const uint8_t* a, int64_t lda, __m512i w0, __m512i w1, __m512i w2, __m512i w3,
                         __m512i (&c)[R][4]) {
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
PYQ_INLINE void multiply_quad(const uint8_t* a, int64_t lda, const int8_t* b, __m512i (&c)[R][4]) {
  multiply(a, lda, _mm512_loadu_si512(b), _mm512_loadu_si512(b + 64), _mm512_loadu_si512(b + 128),
           _mm512_loadu_si512(b + 192), c);
}

template <int R>
PYQ_INLINE void zero(__m512i (&c)[R][4]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) c[r][0] = c[r][1] = c[r][2] = c[r][3] = _mm512_setzero_si512();
}

template <int R>
PYQ_INLINE void add_to(__m512i (&c)[R][4], const int32_t* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) c[r][j] = _mm512_add_epi32(c[r][j], _mm512_loadu_si512(acc + r * kBlockN + j * 16));
  }
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

// Few rows: the weights stream through once, in order, which the prefetchers of the machine follow best alone; two sets
// of accumulators hide the latency.
template <int R>
void stream_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add) {
  __m512i c[R][4], d[R][4];
  zero(c);
  zero(d);
  int64_t q = 0;
  for (; q + 2 <= quads; q += 2) {
    const int8_t* w = b + q * kStep;
    multiply_quad(a + q * 4, lda, w, c);
    multiply_quad(a + q * 4 + 4, lda, w + kStep, d);
  }
  if (q < quads) multiply_quad(a + q * 4, lda, b + q * kStep, c);
  finish(c, acc, add);
  finish(d, acc, true);
}

// What a tile of rows does besides its product.
struct Besides {
  const int8_t* weights;  // of the next chunk, to be called into the second-level cache; null: none
  int64_t step;           // bytes of them with every quad, up to 128
  const Ahead* out;       // lines of results to be owned; null: none
  const Finish* finish;   // null: sums are left in acc
  int64_t row;            // first of the tile
};

// Results are called in this many quads before the end of a tile, a line with each: earlier they would be gone again by
// then, and all at once they would hold up the weights.
constexpr int64_t kOwnQuads = 48;

// Calling weights in pays where they come from the third level or from memory, as they do between the layers of a
// model; where one small layer runs again and again and they are there already, it costs a little.
template <int R, bool kAhead>
void tile_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add, const Besides& to) {
  __m512i c[R][4];
  zero(c);
  const int64_t own = to.out && quads > kOwnQuads ? quads - kOwnQuads : quads;
  if (to.out && own == quads) to.out->call_out(to.row, R);
  const int8_t* weights = to.weights;
  const int64_t step = to.step;
  const bool twice = step > 64;
  int64_t q = 0;
  const auto next = [&]() __attribute__((always_inline)) {
    if constexpr (kAhead) {
      _mm_prefetch(reinterpret_cast<const char*>(weights), _MM_HINT_T1);
      if (twice) _mm_prefetch(reinterpret_cast<const char*>(weights + 64), _MM_HINT_T1);
      weights += step;
    }
    multiply_quad(a + q * 4, lda, b + q * kStep, c);
    ++q;
  };
  while (q < own) next();
  for (int64_t line = 0; q < quads; ++line) {
    if (line < R * Ahead::kRowLines) to.out->call_line(to.row, line);
    next();
  }
  if (to.finish && to.finish->is_plain()) {
    if (add) add_to(c, acc);
    return to.finish->from_registers(c, to.row);
  }
  finish(c, acc, add);
  if (to.finish) to.finish->rows(to.row, to.row + R);
}

template <int R>
void tile_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add, const Besides& to) {
  if (!to.weights)
    tile_s8<R, false>(a, lda, b, quads, acc, add, to);
  else
    tile_s8<R, true>(a, lda, b, quads, acc, add, to);
}

constexpr int64_t kTileRows = 6;

// All tiles of rows call in as much of what is read next, so that memory is busy while all of them multiply: of so many
// bytes a quad, what each of its quads calls in. In fewer tiles memory, which brings 10 to 25 GB a second, would be
// asked for more than it can give, and the loads of what is multiplied wait behind that.
int64_t bytes_a_quad(int64_t bytes, int64_t rows) {
  constexpr int64_t kUnit = 8;
  const int64_t tiles = std::max<int64_t>((rows + kTileRows - 1) / kTileRows, 2);
  return (bytes / kUnit + tiles - 1) / tiles * kUnit;
}

void rows_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead, const Finish* finish) {
  const auto* weights = static_cast<const int8_t*>(ahead.weights);
  const int64_t step = bytes_a_quad(kStep, rows);
  int64_t done = 0;
  for (int pass = 0; done < rows; ++pass) {
    const int64_t r = tile_rows(rows - done);
    const Besides to{weights && pass * step < kStep ? weights + pass * quads * step : nullptr, step,
                     ahead.out ? &ahead : nullptr, finish, done};
    switch (r) {
      case 1: tile_s8<1>(a, lda, b, quads, acc, add, to); break;
      case 2: tile_s8<2>(a, lda, b, quads, acc, add, to); break;
      case 3: tile_s8<3>(a, lda, b, quads, acc, add, to); break;
      case 4: tile_s8<4>(a, lda, b, quads, acc, add, to); break;
      case 5: tile_s8<5>(a, lda, b, quads, acc, add, to); break;
      default: tile_s8<6>(a, lda, b, quads, acc, add, to);
    }
    a += r * lda;
    acc += r * kBlockN;
    done += r;
  }
}

void product_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
                const Ahead& ahead, const Finish* finish) {
  if (rows <= 2) {
    ahead.call_out(0, rows);
    if (rows == 1)
      stream_s8<1>(a, lda, b, quads, acc, add);
    else
      stream_s8<2>(a, lda, b, quads, acc, add);
    if (finish) finish->rows(0, rows);
    return;
  }
  if (rows <= 6) {
    Ahead without_weights = ahead;
    without_weights.weights = nullptr;
    return rows_s8(a, lda, rows, b, quads, acc, add, without_weights, finish);
  }
  // 64 KiB of weights at a time stay in the second-level cache for all rows, from which a tile of six reads less than
  // half of what the cache gives; sums go to memory only between chunks. Chunks of one size, so that what each calls in
  // is what the one after it needs.
  constexpr int64_t kMost = 256;
  const int64_t chunks = quads > kMost ? (quads + kMost - 1) / kMost : 1, chunk = (quads + chunks - 1) / chunks;
  for (int64_t done = 0; done < quads || done == 0; done += chunk) {
    const int64_t now = quads - done < chunk ? quads - done : chunk;
    const int8_t* w = b + done * kStep;
    const bool last = done + now >= quads;
    rows_s8(a + done * 4, lda, rows, w, now, acc, add || done > 0,
            last ? ahead : Ahead{ahead.first_use ? w + now * kStep : nullptr}, last ? finish : nullptr);
    if (quads == 0) return;
  }
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  product_s8(a, lda, rows, b, quads, acc, add, ahead, nullptr);
}

void linear_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, const Tile& tile, int32_t* acc,
               const Ahead& ahead) {
  const Finish finish(tile);
  product_s8(a, lda, tile.rows, b, quads, acc, false, ahead, &finish);
}

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
