// The Hadamard transform of a row (docs/numerics.md 15) over a vector type V (isa_*.cpp), in place: the sums of the
// base matrix, then butterflies between vectors, several steps while they are in registers, then within them.
#pragma once
#include <cstdint>
#include <utility>

#include "core/hadamard.h"

namespace pyquant::cpu {

template <class V>
struct HadamardRows {
  using F = typename V::F;
  static constexpr int64_t W = V::W;
  static constexpr int kLaneSteps = W == 16 ? 4 : W == 8 ? 3 : 0;
  static_assert(int64_t{1} << kLaneSteps == W, "");
  // Steps that are done at a time: 2^steps vectors and a spare one fit in the registers.
  static constexpr int kSteps = W == 16 ? 4 : 3;

  static void transform(float* x, int64_t n, HadamardOrder order) {
    const int64_t block = size_of(order);
    const bool whole = order.log2 >= kLaneSteps;
    for (int64_t at = 0; at < n; at += block) {
      if (whole)
        of_vectors(x + at, order);
      else
        of_numbers(x + at, order);
    }
  }

 private:
  // Runs shorter than a vector: at most 28 * 8 numbers.
  static void of_numbers(float* x, HadamardOrder order) {
    const int64_t run = int64_t{1} << order.log2, block = size_of(order);
    for (int64_t j = 0; j < block; ++j)
      if (hadamard_flips(static_cast<uint32_t>(j))) x[j] = -x[j];
    if (order.base > 1) {
      for (int64_t i = 0; i < run; ++i) {
        float t[28];
        for (int a = 0; a < order.base; ++a) t[a] = x[a * run + i];
        for (int b = 0; b < order.base; ++b) {
          float total = hadamard_is_negative(order.base, 0, b) ? -t[0] : t[0];
          for (int a = 1; a < order.base; ++a)
            total = hadamard_is_negative(order.base, a, b) ? fsub(total, t[a]) : fadd(total, t[a]);
          x[b * run + i] = total;
        }
      }
    }
    for (int64_t step = run / 2; step > 0; step /= 2) {
      for (int64_t i = 0; i < block; ++i) {
        if (i & step) continue;
        const float a = x[i], b = x[i + step];
        x[i] = fadd(a, b);
        x[i + step] = fsub(a, b);
      }
    }
    const float factor = hadamard_factor(order);
    for (int64_t j = 0; j < block; ++j) x[j] = fmul(x[j], factor);
  }

  static void of_vectors(float* x, HadamardOrder order) {
    const int64_t run = int64_t{1} << order.log2, block = size_of(order);
    flip(x, block);
    switch (order.base) {
      case 12: base_sums<12>(x, run); break;
      case 20: base_sums<20>(x, run); break;
      case 28: base_sums<28>(x, run); break;
      default: break;
    }
    for (int bits = order.log2; bits > kLaneSteps;) {
      const int some = (bits - kLaneSteps - 1) % kSteps + 1;
      bits -= some;
      butterflies(x, block, int64_t{1} << bits, some);
    }
    within(x, block, hadamard_factor(order));
  }

  // The signs of the columns. Those of a vector are one of four patterns: they depend on the pairs of ones within its
  // number, and on the pair between that number and the lane.
  static void flip(float* x, int64_t block) {
    alignas(64) float patterns[4][W];
    for (uint32_t p = 0; p < 4; ++p)
      for (uint32_t lane = 0; lane < W; ++lane) {
        const uint32_t between = W > 1 ? p & 1 & lane >> (kLaneSteps > 0 ? kLaneSteps - 1 : 0) : 0;
        patterns[p][lane] = hadamard_flips(lane) ^ between ^ p >> 1 ? -1.f : 1.f;
      }
    for (int64_t j = 0; j < block; j += W) {
      const auto v = static_cast<uint32_t>(j / W);
      const F signs = V::load_f32(patterns[(v & 1) + 2 * hadamard_flips(v)]);
      V::store_f32(x + j, V::mul(V::load_f32(x + j), signs));
    }
  }

  template <int Base>
  static void base_sums(float* x, int64_t run) {
    for (int64_t i = 0; i < run; i += W) {
      F t[Base];
      for (int a = 0; a < Base; ++a) t[a] = V::load_f32(x + a * run + i);
      columns<Base>(t, x + i, run, std::make_integer_sequence<int, Base>());
    }
  }
  template <int Base, int... Column>
  static void columns(const F* t, float* to, int64_t run, std::integer_sequence<int, Column...>) {
    (V::store_f32(to + Column * run, column<Base, Column>(t, std::make_integer_sequence<int, Base - 1>())), ...);
  }
  template <int Base, int Column, int... Row>
  static F column(const F* t, std::integer_sequence<int, Row...>) {
    F total = hadamard_is_negative(Base, 0, Column) ? V::mul(t[0], V::set(-1.f)) : t[0];
    ((total = term<hadamard_is_negative(Base, Row + 1, Column)>(total, t[Row + 1])), ...);
    return total;
  }
  template <bool kNegative>
  static F term(F total, F v) {
    if constexpr (kNegative)
      return V::sub(total, v);
    else
      return V::add(total, v);
  }

  static void butterflies(float* x, int64_t block, int64_t least, int steps) {
    switch (steps) {
      case 1: return butterflies_of<1>(x, block, least);
      case 2: return butterflies_of<2>(x, block, least);
      case 3: return butterflies_of<3>(x, block, least);
      default: return butterflies_of<kSteps>(x, block, least);
    }
  }
  // The steps least * 2^(Steps - 1), ..., least.
  template <int Steps>
  static void butterflies_of(float* x, int64_t block, int64_t least) {
    constexpr int kCount = 1 << Steps;
    for (int64_t from = 0; from < block; from += least * kCount) {
      for (int64_t i = from; i < from + least; i += W) {
        F v[kCount];
        for (int e = 0; e < kCount; ++e) v[e] = V::load_f32(x + i + e * least);
        for (int step = kCount / 2; step > 0; step /= 2)
          for (int e = 0; e < kCount; ++e) {
            if (e & step) continue;
            const F a = v[e], b = v[e + step];
            v[e] = V::add(a, b);
            v[e + step] = V::sub(a, b);
          }
        for (int e = 0; e < kCount; ++e) V::store_f32(x + i + e * least, v[e]);
      }
    }
  }

  // The steps between lanes, and the factor. a * 1 + b and b * -1 + a round once: the sums themselves.
  static void within(float* x, int64_t block, float by) {
    const F factor = V::set(by);
    alignas(64) float signs[4][W];
    for (int bit = 0; bit < kLaneSteps; ++bit)
      for (int64_t lane = 0; lane < W; ++lane) signs[bit][lane] = lane >> bit & 1 ? -1.f : 1.f;
    for (int64_t j = 0; j < block; j += W) {
      F v = V::load_f32(x + j);
      if constexpr (kLaneSteps > 3) v = V::mul_add(v, V::load_f32(signs[3]), V::template swapped<8>(v));
      if constexpr (kLaneSteps > 2) v = V::mul_add(v, V::load_f32(signs[2]), V::template swapped<4>(v));
      if constexpr (kLaneSteps > 1) v = V::mul_add(v, V::load_f32(signs[1]), V::template swapped<2>(v));
      if constexpr (kLaneSteps > 0) v = V::mul_add(v, V::load_f32(signs[0]), V::template swapped<1>(v));
      V::store_f32(x + j, V::mul(v, factor));
    }
  }
};

}  // namespace pyquant::cpu
