// A few rows of bfloat16 times channels of integer weights whose codes become bfloat16 in registers, less their zero
// points, which is exact; products of pairs are added up in float32, and the sum of a group meets its scale. For
// isa_avx512_bf16.cpp, whose flags it needs.
//   int4: the lowest nibbles of all halves of dwords look up their numbers; three shifts bring the others there. int8:
//   a product with 1 takes one code of each dword out and its zero point off; of two such floats the upper halves.
//   Rows lie in the order that this gives (order_pairs): a pair is two codes that no step has to bring together.
#pragma once
#include <array>
#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

// A piece is 64 bytes of a channel.
template <DType T>
constexpr int64_t kPieceCodes = 512 / bits_of(T);

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

// code - zero_point as bfloat16, by zero point + 8 and nibble; twice, as the instruction that looks up takes a bit more
// of its index, which is the next nibble's.
using NibbleNumbers = std::array<std::array<uint16_t, 32>, 16>;
constexpr NibbleNumbers nibble_numbers() {
  NibbleNumbers numbers{};
  for (int zero = 0; zero < 16; ++zero)
    for (int i = 0; i < 32; ++i) {
      const int nibble = i % 16, code = nibble < 8 ? nibble : nibble - 16;
      numbers[static_cast<size_t>(zero)][static_cast<size_t>(i)] =
          static_cast<uint16_t>(float_bits_of(code - (zero - 8)) >> 16);
    }
  return numbers;
}
alignas(64) constexpr NibbleNumbers kNumbers = nibble_numbers();

// What a piece holds: a part of a group, one whole group, or several (int4 in groups of 32 or 64 codes, which are one
// or two quarters of it).
enum class Holds { part, one, several };

// One channel: its scales and zero points, a group at a time.
template <DType T, bool kZero, Holds kHolds>
struct PairChannel {
  const uint8_t* codes;
  const float* scales;
  const int32_t* zeros;
  __m512 scale;
  V::I table, upper;  // int4; upper: the third and fourth quarter's
  V::I less;          // int8: the zero point, negative

  void start(const WeightRun& run, int64_t channel) {
    codes = static_cast<const uint8_t*>(run.w) + channel * run.ldw;
    scales = run.scale + channel * run.ld_scale;
    if constexpr (kZero) zeros = run.zero_point + channel * run.ld_scale;
    if constexpr (T == DType::s4 && !kZero) table = _mm512_load_si512(kNumbers[8].data());
  }

  void take_group(int64_t group) {
    scale = V::set(scales[group]);
    if constexpr (kZero && T == DType::s4)
      table = _mm512_load_si512(kNumbers[static_cast<size_t>(zeros[group] + 8)].data());
    else if constexpr (kZero)
      less = V::set_i(-zeros[group]);
  }

  // As many groups as `present` has bits; lanes: which of them each lane has. Behind the last one come zero codes.
  void take_groups(int64_t first, __mmask16 present, V::I lanes, int64_t quarters) {
    scale = _mm512_permutexvar_ps(lanes, _mm512_maskz_loadu_ps(present, scales + first));
    if constexpr (kZero) {
      const int64_t last = first + 31 - __builtin_clz(present);
      const auto of = [&](int64_t quarter) __attribute__((always_inline)) {
        const int64_t group = first + quarter / quarters < last ? first + quarter / quarters : last;
        const auto* words = kNumbers[static_cast<size_t>(zeros[group] + 8)].data();
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
      };
      table = _mm512_inserti64x4(_mm512_castsi256_si512(of(0)), of(1), 1);
      upper = _mm512_inserti64x4(_mm512_castsi256_si512(of(2)), of(3), 1);
    }
  }

  // The piece, of which so many bytes exist; behind them are zero codes.
  template <bool kWhole>
  V::I take(int64_t at, int64_t bytes) const {
    const uint8_t* from = codes + 64 * at;
    return kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, from);
  }

  // The i-th vector of pairs of a piece.
  V::I pairs(V::I piece, int i) const {
    if constexpr (T == DType::s4) {
      const V::I nibbles = i == 0 ? piece : _mm512_srli_epi16(piece, static_cast<unsigned>(4 * i));
      if constexpr (!(kHolds == Holds::several && kZero)) return _mm512_permutexvar_epi16(nibbles, table);
      // quarter * 16 + nibble: (nibbles & 15) | quarters
      const V::I quarters = _mm512_set_epi64(kQuarter3, kQuarter3, kQuarter2, kQuarter2, kQuarter1, kQuarter1, 0, 0);
      const V::I index = _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi16(15), quarters, 0xea);
      return _mm512_permutex2var_epi16(table, index, upper);
    }
    __m512 two[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      V::I sum = kZero ? less : _mm512_setzero_si512();
      dot(sum, V::set_i(1 << (16 * i + 8 * j)), piece);
      two[j] = V::to_float(sum);
    }
    return _mm512_or_si512(_mm512_srli_epi32(V::bits(two[0]), 16), V::bits(two[1]));
  }

 private:
  static constexpr int64_t kQuarter1 = 0x0010001000100010, kQuarter2 = 2 * kQuarter1, kQuarter3 = 3 * kQuarter1;
};

// out[i] = the sum of v[i], in one order for any C.
template <int C>
PYQ_INLINE void store_sums(const __m512 (&v)[C], float* out) {
  const __m512 a = v[0], b = v[C > 1 ? 1 : 0], c = v[C > 2 ? 2 : 0], d = v[C > 3 ? 3 : 0];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_mask_storeu_ps(out, (1 << C) - 1, sums);
}

// Rows of x whose addresses are a sum that an instruction forms: g++ would keep an offset for each row and vector.
class FourRows {
 public:
  PYQ_INLINE FourRows(const uint16_t* x, int64_t ldx) : x_(reinterpret_cast<const char*>(x)), step_(2 * ldx) {
    asm("" : "+r"(x_), "+r"(step_));
    three_ = 3 * step_;
  }
  PYQ_INLINE V::I load(int row, int vector) const {
    return _mm512_loadu_si512(x_ + 64 * vector + (row == 3 ? three_ : row * step_));
  }

 private:
  const char* x_;
  int64_t step_, three_;
};

// Sums over groups: in registers where these also have room for those of a group; otherwise in memory that g++ cannot
// see through, as it would take registers for it and move all of them about.
template <int R, int C>
class SumsOfGroups {
 public:
  PYQ_INLINE SumsOfGroups() {
    asm("" : "+r"(far_));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) put(r, c, _mm512_setzero_ps());
  }
  SumsOfGroups(const SumsOfGroups&) = delete;
  PYQ_INLINE void add(int r, int c, __m512 acc, __m512 scale) { put(r, c, V::mul_add(acc, scale, get(r, c))); }
  PYQ_INLINE __m512 get(int r, int c) const {
    if constexpr (kFits) return near_[r][c];
    return _mm512_load_ps(far_ + (r * C + c) * 16);
  }

 private:
  static constexpr bool kFits = R * C <= 8;
  PYQ_INLINE void put(int r, int c, __m512 v) {
    if constexpr (kFits)
      near_[r][c] = v;
    else
      _mm512_store_ps(far_ + (r * C + c) * 16, v);
  }
  __m512 near_[kFits ? R : 1][kFits ? C : 1];
  alignas(64) float memory_[kFits ? 1 : R * C * 16];
  float* far_ = memory_;
};

template <DType T, bool kZero, Holds kHolds, int R, int C>
void few_pairs_tile(const WeightRun& run, int64_t channel, const uint16_t* x, int64_t ldx, float* out, int64_t ldo) {
  constexpr int64_t kCodes = kPieceCodes<T>;
  constexpr bool kSeveral = kHolds == Holds::several;
  const int64_t row_bytes = columns_of(T, run.k), whole = row_bytes / 64,
                tail = kHolds == Holds::one ? 0 : row_bytes % 64;
  const int64_t pieces = whole + (tail != 0);
  const int64_t each = kHolds != Holds::part ? 1 : run.group_size == 0 ? pieces : run.group_size / kCodes;
  const int64_t quarters = kSeveral ? run.group_size / 32 : 1;  // of a group
  const int64_t together = 4 / quarters;                        // groups of a piece
  V::I lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  if (quarters == 2) lanes = _mm512_srli_epi32(lanes, 1);
  PairChannel<T, kZero, kHolds> channels[C];
  SumsOfGroups<R, C> sum;
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) channels[c].start(run, channel + c);
  for (int64_t piece = 0, group = 0; piece < pieces; ++group) {
    __m512 acc[R][C];
    const int64_t groups_left = kSeveral ? run.k / run.group_size - group * together : 1;
    const auto present = static_cast<__mmask16>((1 << (groups_left < together ? groups_left : together)) - 1);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if constexpr (kSeveral)
        channels[c].take_groups(group * together, present, lanes, quarters);
      else
        channels[c].take_group(group);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][c] = _mm512_setzero_ps();
    }
    const auto step = [&](auto is_whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(is_whole)::value;
      const FourRows first(x + piece * kCodes, ldx), second(x + piece * kCodes + 4 * ldx, ldx);
      V::I codes[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        codes[c] = channels[c].template take<kWhole>(piece, tail);
        __builtin_prefetch(channels[c].codes + 64 * piece + C * run.ldw, 0, 2);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kCodes / 32; ++i) {
        V::I w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) w[c] = channels[c].pairs(codes[c], i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const V::I v = r < 4 ? first.load(r, i) : second.load(r - 4, i);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) multiply_pairs(acc[r][c], w[c], v);
        }
      }
      ++piece;
    };
    const int64_t end = piece + each;
    if constexpr (kHolds == Holds::one) {
      step(std::true_type());
    } else {
      for (const int64_t here = end < whole ? end : whole; piece < here;) step(std::true_type());
      if (piece == whole && piece < end && tail != 0) step(std::false_type());
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum.add(r, c, acc[r][c], channels[c].scale);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    __m512 v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = sum.get(r, c);
    store_sums(v, out + r * ldo + channel);
  }
}

// Two rows of four channels, or four of two: registers hold two sums of each, and rows are read once for all channels.
template <DType T, bool kZero, Holds kHolds, int R>
void few_pairs_rows(const WeightRun& run, const uint16_t* x, int64_t ldx, float* out, int64_t ldo) {
  constexpr int C = R <= 2 ? 4 : 2;
  int64_t channel = 0;
  for (; channel + C <= run.channels; channel += C)
    few_pairs_tile<T, kZero, kHolds, R, C>(run, channel, x, ldx, out, ldo);
  for (; channel < run.channels; ++channel) few_pairs_tile<T, kZero, kHolds, R, 1>(run, channel, x, ldx, out, ldo);
}

// So many rows at a time: with a scale for each piece up to four, whose sums over groups fit into registers, too.
constexpr int64_t rows_together(int64_t left, bool is_long) {
  if (left <= 4) return left;
  if (is_long) return left == 8 || left == 6 ? left : left == 5 ? 3 : 4;
  return left < 7 ? 3 : 4;
}

template <DType T, bool kZero, Holds kHolds>
void few_pairs_of(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
  constexpr bool kLong = kHolds == Holds::part;
  for (int64_t done = 0; done < rows;) {
    const int64_t now = rows_together(rows - done, kLong);
    const uint16_t* from = x + done * ldx;
    float* to = out + done * ldo;
    switch (now) {
      case 1: few_pairs_rows<T, kZero, kHolds, 1>(run, from, ldx, to, ldo); break;
      case 2: few_pairs_rows<T, kZero, kHolds, 2>(run, from, ldx, to, ldo); break;
      case 3: few_pairs_rows<T, kZero, kHolds, 3>(run, from, ldx, to, ldo); break;
      case 6: few_pairs_rows<T, kZero, kHolds, (3 << kLong)>(run, from, ldx, to, ldo); break;
      case 8: few_pairs_rows<T, kZero, kHolds, (4 << kLong)>(run, from, ldx, to, ldo); break;
      default: few_pairs_rows<T, kZero, kHolds, 4>(run, from, ldx, to, ldo);
    }
    done += now;
  }
}

template <bool kZero>
void few_pairs_by_groups(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
  const auto of = [&](auto type) {
    constexpr DType T = decltype(type)::value;
    if (run.group_size == kPieceCodes<T>) return few_pairs_of<T, kZero, Holds::one>(run, x, rows, ldx, out, ldo);
    if (is_packed(T) && run.group_size != 0 && run.group_size < kPieceCodes<T>)
      return few_pairs_of<DType::s4, kZero, Holds::several>(run, x, rows, ldx, out, ldo);
    few_pairs_of<T, kZero, Holds::part>(run, x, rows, ldx, out, ldo);
  };
  if (run.type == DType::s8) return of(std::integral_constant<DType, DType::s8>());
  of(std::integral_constant<DType, DType::s4>());
}

void few_pairs(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
  run.zero_point ? few_pairs_by_groups<true>(run, x, rows, ldx, out, ldo)
                 : few_pairs_by_groups<false>(run, x, rows, ldx, out, ldo);
}

// One row. int4: the i-th vector of 128 has of each eight codes the i-th and the (4 + i)-th. int8: the i-th of 64 has
// of each four codes the (2 i)-th and the next.
void order_pairs(DType weights, const uint16_t* x, int64_t k, uint16_t* out) {
  const bool nibbles = is_packed(weights);
  alignas(64) uint16_t order[32];
  for (uint16_t i = 0; i < 32; ++i)
    order[i] = static_cast<uint16_t>(nibbles ? i / 2 % 4 * 8 + i / 8 + i % 2 * 4 : i / 16 * 2 + i / 2 % 8 * 4 + i % 2);
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
    } else {  // halves of two
      const __m512i a = v[0];
      v[0] = _mm512_shuffle_i64x2(a, v[1], 0x44);
      v[1] = _mm512_shuffle_i64x2(a, v[1], 0xee);
    }
    for (int64_t i = 0; i < piece / 32; ++i) _mm512_storeu_si512(out + at + 32 * i, v[i]);
  }
}

}  // namespace
}  // namespace pyquant::cpu
