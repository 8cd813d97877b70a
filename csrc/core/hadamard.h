// The Hadamard transform in blocks (docs/numerics.md 15): which orders there are, the signs of its matrices, and which
// sums they have in common.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>

#include "core/arith.h"

namespace pyquant {

// base * 2^log2 neighbours; base is 1, 12, 20 or 28, or 0 where a number is no order.
struct HadamardOrder {
  int32_t base = 0, log2 = 0;
};

inline HadamardOrder hadamard_order(int64_t n) {
  if (n < 1) return {};
  int32_t twos = 0;
  for (; n % 2 == 0; n /= 2) ++twos;
  if (n == 1) return {1, twos};
  if (twos < 2 || (n != 3 && n != 5 && n != 7)) return {};
  return {static_cast<int32_t>(4 * n), twos - 2};
}

inline int64_t size_of(HadamardOrder order) { return static_cast<int64_t>(order.base) << order.log2; }

// A transform: its order, and what its sums are multiplied by.
struct Hadamard {
  HadamardOrder order;
  float scale = 1.f;
};

// With which the map is orthogonal: the float32 nearest to 1 / sqrt(n).
inline float hadamard_scale(HadamardOrder order) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(size_of(order))));
}

// Blocks of n, an order; scale: none for that of an orthogonal map.
inline Hadamard hadamard_of(int64_t n, std::optional<double> scale) {
  const HadamardOrder order = hadamard_order(n);
  return {order, scale ? static_cast<float>(*scale) : hadamard_scale(order)};
}

// 1 where the sign of column j is -1: Rudin and Shapiro's sequence.
PYQ_HD constexpr uint32_t hadamard_flips(uint32_t j) {
  return static_cast<uint32_t>(__builtin_popcount(j & j >> 1)) & 1;
}

// 1 where i is a square modulo the prime q, 0 where q divides it, else -1.
PYQ_HD constexpr int quadratic_character(int i, int q) {
  i = (i % q + q) % q;
  if (i == 0) return 0;
  for (int j = 1; j < q; ++j)
    if (j * j % q == i) return 1;
  return -1;
}

// Whether an entry of the matrix of order 12, 20 or 28 is -1. Source: Paley, "On orthogonal matrices", 1933.
PYQ_HD constexpr bool hadamard_is_negative(int base, int row, int column) {
  if (base != 28) {
    const int q = base - 1;
    if (row == 0 || column == 0) return row > 0;
    return row != column && quadratic_character(row - column, q) < 0;
  }
  const int i = row / 2, j = column / 2;
  const int conference = i == j ? 0 : i == 0 || j == 0 ? 1 : quadratic_character(i - j, 13);
  const int diagonal = i == j ? 1 : 0;
  const int entry = row % 2 == 0 ? (column % 2 == 0 ? conference + diagonal : conference - diagonal)
                                 : (column % 2 == 0 ? conference - diagonal : -conference - diagonal);
  return entry < 0;
}

// Entries row .. row + 3 of a column, s0 to s3, as s0 ((t0 + s0 s1 t1) + s0 s2 (t2 + s2 s3 t3)): which of the eight
// sums in brackets it is.
struct HadamardFour {
  bool negative;
  int sum;  // 4 [s0 s1 < 0] + 2 [s2 s3 < 0] + [s0 s2 < 0]
};
// flips: with the signs of the rows' own numbers, too.
PYQ_HD constexpr HadamardFour hadamard_four(int base, int row, int column, bool flips) {
  int s[4] = {};
  for (int i = 0; i < 4; ++i) {
    const bool flipped = flips && hadamard_flips(static_cast<uint32_t>(row + i)) != 0;
    s[i] = hadamard_is_negative(base, row + i, column) != flipped ? 1 : 0;
  }
  return {s[0] != 0, 4 * (s[0] ^ s[1]) + 2 * (s[2] ^ s[3]) + (s[0] ^ s[2])};
}
// Those of all columns, four bits each: constants in an unrolled loop, of one call a group of rows.
template <int Base>
struct HadamardFours {
  uint64_t bits[2];
  constexpr HadamardFour operator[](int column) const {
    const int four = static_cast<int>(bits[column / 16] >> (4 * (column % 16)) & 15);
    return {four >= 8, four & 7};
  }
};
template <int Base>
constexpr HadamardFours<Base> hadamard_fours(int row) {
  HadamardFours<Base> all = {};
  for (int column = 0; column < Base; ++column) {
    const HadamardFour four = hadamard_four(Base, row, column, true);
    all.bits[column / 16] |= static_cast<uint64_t>(four.negative ? 8 + four.sum : four.sum) << (4 * (column % 16));
  }
  return all;
}

}  // namespace pyquant
