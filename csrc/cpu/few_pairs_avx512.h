// A few rows of bfloat16 times channels of integer weights whose codes become bfloat16 in registers, less their zero
// points, which is exact; products of pairs are added up in float32, and the sum of a group meets its scale. For
// isa_avx512_bf16.cpp, whose flags it needs.
//   int4: nibbles look up the two bytes of their numbers, and both are interleaved: a vector then has sixteen pairs of
//   every second code. int8: sixteen codes become floats, of which the upper halves are taken.
//   Rows lie in the order that this gives (order_pairs): a pair is two codes that no step has to bring together.
#pragma once
#include <array>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

// A piece is 64 bytes of a channel.
template <DType T>
constexpr int64_t kPieceCodes = 512 / bits_of(T);
template <DType T>
constexpr int kHalfVectors = static_cast<int>(kPieceCodes<T>) / 64;  // of pairs

PYQ_INLINE void multiply_pairs(__m512& acc, V::I w, V::I x) {  // in assembler for the reason of dot
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

// The upper halves of floats are bfloat16s where the lower ones are zero.
constexpr uint32_t float_bits_of(int value) {
  if (value == 0) return 0;
  uint32_t magnitude = static_cast<uint32_t>(value < 0 ? -value : value), exponent = 127;
  while (magnitude >> (exponent - 127) > 1) ++exponent;
  const uint32_t fraction = magnitude << (23 - (exponent - 127)) & 0x7fffff;
  return (value < 0 ? 0x80000000u : 0u) | exponent << 23 | fraction;
}

// Bytes of code - zero_point as bfloat16, by zero point + 8 and nibble.
using NibbleBytes = std::array<std::array<uint8_t, 16>, 16>;
constexpr NibbleBytes nibble_bytes(int shift) {
  NibbleBytes bytes{};
  for (int zero = 0; zero < 16; ++zero)
    for (int nibble = 0; nibble < 16; ++nibble) {
      const int code = nibble < 8 ? nibble : nibble - 16;
      bytes[static_cast<size_t>(zero)][static_cast<size_t>(nibble)] =
          static_cast<uint8_t>(float_bits_of(code - (zero - 8)) >> shift);
    }
  return bytes;
}
alignas(64) constexpr NibbleBytes kLowBytes = nibble_bytes(16), kHighBytes = nibble_bytes(24);

PYQ_INLINE __m512i bytes_of_zero(const NibbleBytes& table, int32_t zero_point) {
  const auto* from = table[static_cast<size_t>(zero_point + 8)].data();
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
}

// One channel: its scales and zero points, a group at a time.
template <DType T, bool kZero>
struct PairChannel {
  const uint8_t* codes;
  const float* scales;
  const int32_t* zeros;
  __m512 scale;
  __m512i low, high;  // int4: the bytes that nibbles look up
  __m512 zero;        // int8

  void start(const WeightRun& run, int64_t channel) {
    codes = static_cast<const uint8_t*>(run.w) + channel * run.ldw;
    scales = run.scale + channel * run.ld_scale;
    if constexpr (kZero) zeros = run.zero_point + channel * run.ld_scale;
  }

  void take_group(int64_t group) {
    scale = V::set(scales[group]);
    const int32_t own = kZero ? zeros[group] : 0;
    if constexpr (T == DType::s4) {
      low = bytes_of_zero(kLowBytes, own);
      high = bytes_of_zero(kHighBytes, own);
    } else {
      zero = V::set(static_cast<float>(own));
    }
  }

  // int4: groups of 32 or 64 codes, each in one or two quarters of a vector.
  void take_groups(int64_t first, int64_t lanes, int64_t last) {
    alignas(64) float factors[16];
    alignas(64) uint8_t lows[64], highs[64];
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      const int64_t group = first + quarter / lanes < last ? first + quarter / lanes : last;
      const auto own = static_cast<size_t>((kZero ? zeros[group] : 0) + 8);
      for (int64_t i = 0; i < 4; ++i) factors[4 * quarter + i] = scales[group];
      std::memcpy(lows + 16 * quarter, kLowBytes[own].data(), 16);
      std::memcpy(highs + 16 * quarter, kHighBytes[own].data(), 16);
    }
    scale = V::load_f32(factors);
    low = _mm512_load_si512(lows);
    high = _mm512_load_si512(highs);
  }

  // Where the piece is; `bytes` of it exist, behind them are zero codes.
  const uint8_t* piece(int64_t at, int64_t bytes, uint8_t* padded) const {
    if (bytes >= 64) return codes + 64 * at;
    std::memset(padded, 0, 64);
    std::memcpy(padded, codes + 64 * at, static_cast<size_t>(bytes));
    return padded;
  }

  // Half of a piece as pairs.
  void take_half(const uint8_t* from, int half, V::I (&w)[kHalfVectors<T>]) const {
    if constexpr (T == DType::s4) {
      const __m512i packed = _mm512_loadu_si512(from), shifted = half ? _mm512_srli_epi16(packed, 4) : packed;
      const __m512i nibbles = _mm512_and_si512(shifted, _mm512_set1_epi8(15));
      const __m512i lower = _mm512_shuffle_epi8(low, nibbles), upper = _mm512_shuffle_epi8(high, nibbles);
      w[0] = _mm512_unpacklo_epi8(lower, upper);
      w[1] = _mm512_unpackhi_epi8(lower, upper);
    } else {
      __m512 two[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        two[j] = V::to_float(V::load_s8(reinterpret_cast<const int8_t*>(from) + 32 * half + 16 * j));
        if constexpr (kZero) two[j] = V::sub(two[j], zero);
      }
      w[0] = _mm512_or_si512(_mm512_srli_epi32(V::bits(two[0]), 16), V::bits(two[1]));
    }
  }
};

template <DType T, bool kZero, int R, int C>
void few_pairs_tile(const WeightRun& run, int64_t channel, const uint16_t* x, int64_t ldx, float* out, int64_t ldo) {
  constexpr int64_t kCodes = kPieceCodes<T>;
  const int64_t pieces = (run.k + kCodes - 1) / kCodes, row_bytes = columns_of(T, run.k);
  const int64_t each = run.group_size == 0 ? pieces : run.group_size < kCodes ? 1 : run.group_size / kCodes;
  const bool has_several = run.group_size != 0 && run.group_size < kCodes;
  PairChannel<T, kZero> channels[C];
  __m512 sum[R][C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    channels[c].start(run, channel + c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][c] = _mm512_setzero_ps();
  }
  for (int64_t piece = 0, group = 0; piece < pieces; ++group) {
    const int64_t end = piece + each < pieces ? piece + each : pieces;
    __m512 acc[R][C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if (has_several)
        channels[c].take_groups(group * (kCodes / run.group_size), run.group_size / 32, run.k / run.group_size - 1);
      else
        channels[c].take_group(group);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][c] = _mm512_setzero_ps();
    }
    for (; piece < end; ++piece) {
      const uint16_t* row = x + piece * kCodes;
      const int64_t bytes = row_bytes - 64 * piece;
      alignas(64) uint8_t padded[C][64];
      const uint8_t* from[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        from[c] = channels[c].piece(piece, bytes, padded[c]);
        __builtin_prefetch(channels[c].codes + 64 * piece + C * run.ldw, 0, 2);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        V::I w[C][kHalfVectors<T>];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) channels[c].take_half(from[c], half, w[c]);
#pragma GCC unroll 2
        for (int i = 0; i < kHalfVectors<T>; ++i)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const V::I v = _mm512_loadu_si512(row + r * ldx + 32 * (half * kHalfVectors<T> + i));
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) multiply_pairs(acc[r][c], w[c][i], v);
          }
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = V::mul_add(acc[r][c], channels[c].scale, sum[r][c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) out[r * ldo + channel + c] = V::reduce_add(sum[r][c]);
}

// Two rows of four channels, or four of two: registers hold two sums of each, and rows are read once for all channels.
template <DType T, bool kZero, int R>
void few_pairs_rows(const WeightRun& run, const uint16_t* x, int64_t ldx, float* out, int64_t ldo) {
  constexpr int C = R <= 2 ? 4 : 2;
  int64_t channel = 0;
  for (; channel + C <= run.channels; channel += C) few_pairs_tile<T, kZero, R, C>(run, channel, x, ldx, out, ldo);
  for (; channel < run.channels; ++channel) few_pairs_tile<T, kZero, R, 1>(run, channel, x, ldx, out, ldo);
}

template <DType T, bool kZero>
void few_pairs_of(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done, now = left <= 4 ? left : left < 7 ? 3 : 4;
    const uint16_t* from = x + done * ldx;
    float* to = out + done * ldo;
    switch (now) {
      case 1: few_pairs_rows<T, kZero, 1>(run, from, ldx, to, ldo); break;
      case 2: few_pairs_rows<T, kZero, 2>(run, from, ldx, to, ldo); break;
      case 3: few_pairs_rows<T, kZero, 3>(run, from, ldx, to, ldo); break;
      default: few_pairs_rows<T, kZero, 4>(run, from, ldx, to, ldo);
    }
    done += now;
  }
}

void few_pairs(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
  if (run.type == DType::s8) {
    run.zero_point ? few_pairs_of<DType::s8, true>(run, x, rows, ldx, out, ldo)
                   : few_pairs_of<DType::s8, false>(run, x, rows, ldx, out, ldo);
  } else {
    run.zero_point ? few_pairs_of<DType::s4, true>(run, x, rows, ldx, out, ldo)
                   : few_pairs_of<DType::s4, false>(run, x, rows, ldx, out, ldo);
  }
}

// One row: of each 32 codes the even ones, then the odd ones, and of 128 the firsts of these eights of every 32 (int4);
// of each 32 the pairs of those 16 apart (int8).
void order_pairs(DType weights, const uint16_t* x, int64_t k, uint16_t* out) {
  const bool nibbles = is_packed(weights);
  alignas(64) uint16_t order[32];
  for (uint16_t i = 0; i < 32; ++i)
    order[i] = static_cast<uint16_t>(nibbles ? i % 16 * 2 + i / 16 : i % 2 * 16 + i / 2);
  const __m512i by = _mm512_load_si512(order);
  const int64_t piece = nibbles ? kPieceCodes<DType::s4> : kPieceCodes<DType::s8>;
  for (int64_t at = 0; at < k; at += piece) {
    __m512i v[4];
    for (int64_t i = 0; i < piece / 32; ++i) {
      const int64_t left = k - at - 32 * i;
      const __mmask32 here = left >= 32 ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0;
      v[i] = _mm512_permutexvar_epi16(by, _mm512_maskz_loadu_epi16(here, x + at + 32 * i));
    }
    if (nibbles) {  // quarters of four vectors, transposed
      const __m512i a = _mm512_shuffle_i64x2(v[0], v[1], 0x44), b = _mm512_shuffle_i64x2(v[2], v[3], 0x44);
      const __m512i c = _mm512_shuffle_i64x2(v[0], v[1], 0xee), d = _mm512_shuffle_i64x2(v[2], v[3], 0xee);
      v[0] = _mm512_shuffle_i64x2(a, b, 0x88);
      v[1] = _mm512_shuffle_i64x2(a, b, 0xdd);
      v[2] = _mm512_shuffle_i64x2(c, d, 0x88);
      v[3] = _mm512_shuffle_i64x2(c, d, 0xdd);
    }
    for (int64_t i = 0; i < piece / 32; ++i) _mm512_storeu_si512(out + at + 32 * i, v[i]);
  }
}

}  // namespace
}  // namespace pyquant::cpu
