// taps.h in AVX-512 with VNNI. For isa_avx512_vnni.cpp, whose flags it needs.
#pragma once
#include <cstring>

#include "cpu/finish_avx512.h"
#include "cpu/kernels.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

// V16 vectors of sixteen channels, P pixels.
template <Spread kSpread, int V16, int P>
PYQ_INLINE void tap_tile(const TapRun& run, int64_t pixel, const Finish* finish) {
  __m512i c[P][V16], index[V16];
  int64_t base[V16];
#pragma GCC unroll 4
  for (int v = 0; v < V16; ++v) {
    base[v] = kSpread == Spread::side_by_side ? v * 64 : int64_t{run.dwords[v * 16]} * 4;
    if constexpr (kSpread == Spread::near || kSpread == Spread::far)
      index[v] = _mm512_sub_epi32(_mm512_loadu_si512(run.dwords + v * 16), _mm512_set1_epi32(run.dwords[v * 16]));
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) c[p][v] = _mm512_setzero_si512();
  }
  const uint8_t* codes = run.codes + pixel * run.step;
  const int8_t* weights = run.weights;
  for (int64_t t = 0; t < run.taps; ++t, weights += kBlockN * 4) {
    const uint8_t* x = codes + run.offsets[t];
#pragma GCC unroll 4
    for (int v = 0; v < V16; ++v) {
      const __m512i w = _mm512_loadu_si512(weights + v * 64);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const uint8_t* at = x + p * run.step + base[v];
        __m512i a;
        if constexpr (kSpread == Spread::side_by_side) {
          a = _mm512_loadu_si512(at);
        } else if constexpr (kSpread == Spread::one) {
          int32_t dword;
          std::memcpy(&dword, at, 4);
          a = _mm512_set1_epi32(dword);
        } else if constexpr (kSpread == Spread::near) {
          a = _mm512_permutexvar_epi32(index[v], _mm512_loadu_si512(at));
        } else {
          a = _mm512_i32gather_epi32(index[v], at, 4);
        }
        dot(c[p][v], a, w);
      }
    }
  }
  // Four vectors are a row of the epilogue, whichever pixels they are of.
  constexpr int kRows = P * V16 / 4;
  if constexpr (kRows * 4 == P * V16 && V16 != 3) {
    if (finish && finish->is_plain()) {
      __m512i rows[kRows][4];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
        for (int v = 0; v < V16; ++v) rows[(p * V16 + v) / 4][(p * V16 + v) % 4] = c[p][v];
      return finish->from_registers(rows, pixel * V16 / 4);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < V16; ++v) _mm512_storeu_si512(run.acc + (pixel + p) * run.ld + v * 16, c[p][v]);
  if (finish && (P == 4 || run.ld == kBlockN)) finish->rows(pixel * run.ld / kBlockN, (pixel + P) * run.ld / kBlockN);
}

template <Spread kSpread, int V16>
void tap_pixels(const TapRun& run, const Finish* finish) {
  int64_t pixel = 0;
  for (; pixel + 4 <= run.pixels; pixel += 4) tap_tile<kSpread, V16, 4>(run, pixel, finish);
  for (; pixel < run.pixels; ++pixel) tap_tile<kSpread, V16, 1>(run, pixel, finish);
}

template <Spread kSpread>
void tap_channels(const TapRun& run, const Finish* finish) {
  switch (run.channels / 16) {
    case 1: return tap_pixels<kSpread, 1>(run, finish);
    case 2: return tap_pixels<kSpread, 2>(run, finish);
    case 3: return tap_pixels<kSpread, 3>(run, finish);
    default: return tap_pixels<kSpread, 4>(run, finish);
  }
}

void tap_spread(const TapRun& run, const Finish* finish) {
  switch (run.spread) {
    case Spread::side_by_side: return tap_channels<Spread::side_by_side>(run, finish);
    case Spread::one: return tap_channels<Spread::one>(run, finish);
    case Spread::near: return tap_channels<Spread::near>(run, finish);
    case Spread::far: return tap_channels<Spread::far>(run, finish);
  }
}

void taps(const TapRun& run) { tap_spread(run, nullptr); }

void linear_taps(const TapRun& run, const Tile& tile) {
  const Finish finish(tile);
  tap_spread(run, &finish);
}

__m128i line_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Lines that there are, and the zeros of the others. Two unpacks turn four vectors into dwords, within lanes of 16
// bytes: so that vector v gets channels 16 v and on, its dwords are fetched from all four lanes first.
template <int L>
PYQ_INLINE void interleave_64(const uint8_t* const (&lines)[4], uint8_t* to) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i line[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    line[i] = i < L ? _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lines[i])) : _mm512_setzero_si512();
  const __m512i low_a = _mm512_unpacklo_epi8(line[0], line[1]), low_b = _mm512_unpacklo_epi8(line[2], line[3]);
  const __m512i high_a = _mm512_unpackhi_epi8(line[0], line[1]), high_b = _mm512_unpackhi_epi8(line[2], line[3]);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low_a, low_b));
  _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low_a, low_b));
  _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high_a, high_b));
  _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high_a, high_b));
}

// A line a lane: dwords change places, then the bytes of every sixteen.
template <int L>
PYQ_INLINE void interleave_16(const uint8_t* const (&lines)[4], uint8_t* to) {
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m512i v = _mm512_zextsi128_si512(line_16(lines[0]));
  if constexpr (L > 1) v = _mm512_inserti32x4(v, line_16(lines[1]), 1);
  if constexpr (L > 2) v = _mm512_inserti32x4(v, line_16(lines[2]), 2);
  if constexpr (L > 3) v = _mm512_inserti32x4(v, line_16(lines[3]), 3);
  _mm512_storeu_si512(to, _mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, v), bytes));
}

template <int L>
void interleave_lines(const Interleave& given) {
  const Interleave run = given;  // what is written are bytes, which may be anything
  const uint8_t* lines[4] = {run.lines[0], run.lines[1], run.lines[2], run.lines[3]};
  uint8_t* to = run.to;
  for (int64_t p = 0; p < run.pixels; ++p, to += run.step) {
    if (run.channels == 64)
      interleave_64<L>(lines, to);
    else
      for (int64_t c = 0; c < run.channels; c += 16) {
        const uint8_t* at[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) at[i] = i < L ? lines[i] + c : nullptr;
        interleave_16<L>(at, to + c * 4);
      }
#pragma GCC unroll 4
    for (int i = 0; i < L; ++i) lines[i] += run.strides[i];
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
