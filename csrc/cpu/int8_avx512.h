// Products of int8 in AVX-512 with VNNI: vpdpbusd adds four u8 x s8 products to an int32 exactly, without saturation.
// For isa_avx512_vnni.cpp, whose flags it needs.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/finish_avx512.h"
#include "cpu/tile_rows.h"

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

}  // namespace
}  // namespace pyquant::cpu
