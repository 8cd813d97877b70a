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

  static void transform(float* x, int64_t n, const Hadamard& by) {
    const HadamardOrder order = by.order;
    const int64_t block = size_of(order);
    const bool whole = order.log2 >= kLaneSteps;
    for (int64_t at = 0; at < n; at += block) {
      if (whole)
        of_vectors(x + at, order, by.scale);
      else
        of_numbers(x + at, order, by.scale);
    }
  }

 private:
  // Runs shorter than a vector: at most 28 * 8 numbers.
  static void of_numbers(float* x, HadamardOrder order, float scale) {
    const int64_t run = int64_t{1} << order.log2, block = size_of(order);
    for (int64_t j = 0; j < block; ++j)
      if (hadamard_flips(static_cast<uint32_t>(j))) x[j] = -x[j];
    if (order.base > 1) {
      for (int64_t i = 0; i < run; ++i) {
        float t[28];
        for (int a = 0; a < order.base; ++a) t[a] = x[a * run + i];
        for (int b = 0; b < order.base; ++b) {
          const auto term = [&](int a) { return hadamard_is_negative(order.base, a, b) ? -t[a] : t[a]; };
          float total = 0.f;
          for (int a = 0; a < order.base; a += 4)
            total = fadd(total, fadd(fadd(term(a), term(a + 1)), fadd(term(a + 2), term(a + 3))));
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
    for (int64_t j = 0; j < block; ++j) x[j] = fadd(fmul(x[j], scale), 0.f);
  }

  // The steps in the order of docs/numerics.md 15: down to 512, 64 to 16, then 256 and 128, then 8 to 1.
  static void of_vectors(float* x, HadamardOrder order, float scale) {
    const int64_t run = int64_t{1} << order.log2, block = size_of(order);
    flip(x, block);
    switch (order.base) {
      case 12: base_sums<12>(x, run); break;
      case 20: base_sums<20>(x, run); break;
      case 28: base_sums<28>(x, run); break;
      default: break;
    }
    const int log2 = order.log2;
    steps(x, block, log2, 9);
    steps(x, block, log2 < 7 ? log2 : 7, 4);
    if (W == 16 && log2 > 7) {  // what follows are vectors that lie 128 apart, and then their lanes
      if (log2 == 8)
        last<1>(x, block, scale);
      else
        last<2>(x, block, scale);
      return;
    }
    steps(x, block, log2 < 9 ? log2 : 9, 7);
    steps(x, block, log2 < 4 ? log2 : 4, kLaneSteps);
    last<0>(x, block, scale);
  }

  // Steps 2^(from - 1) down to 2^to, as many at a time as the registers hold.
  static void steps(float* x, int64_t block, int from, int to) {
    while (from > to) {
      const int some = (from - to - 1) % kSteps + 1;
      from -= some;
      butterflies(x, block, int64_t{1} << from, some);
    }
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

  // Four runs have eight sums but for signs: every column is made of one of each four runs.
  template <int Base>
  static void base_sums(float* x, int64_t run) {
    for (int64_t i = 0; i < run; i += W) {
      F four[Base / 4][8];
      for (int g = 0; g < Base / 4; ++g) {
        F t[4];
        for (int a = 0; a < 4; ++a) t[a] = V::load_f32(x + (4 * g + a) * run + i);
        const F left[2] = {V::add(t[0], t[1]), V::sub(t[0], t[1])}, right[2] = {V::add(t[2], t[3]), V::sub(t[2], t[3])};
        for (int pair = 0; pair < 4; ++pair) {
          four[g][2 * pair] = V::add(left[pair / 2], right[pair % 2]);
          four[g][2 * pair + 1] = V::sub(left[pair / 2], right[pair % 2]);
        }
      }
      columns<Base>(four, x + i, run, std::make_integer_sequence<int, Base>());
    }
  }
  template <int Base, int... Column>
  static void columns(const F (&four)[Base / 4][8], float* to, int64_t run, std::integer_sequence<int, Column...>) {
    (V::store_f32(to + Column * run, column<Base, Column>(four, std::make_integer_sequence<int, Base / 4>())), ...);
  }
  template <int Base, int Column, int... Group>
  static F column(const F (&four)[Base / 4][8], std::integer_sequence<int, Group...>) {
    F total = V::set(0.f);
    ((total = term<Base, Column, Group>(total, four[Group])), ...);
    return total;
  }
  template <int Base, int Column, int Group>
  static F term(F total, const F (&sums)[8]) {
    constexpr HadamardFour kFour = hadamard_four(Base, 4 * Group, Column, false);
    if constexpr (kFour.negative)
      return V::sub(total, sums[kFour.sum]);
    else
      return V::add(total, sums[kFour.sum]);
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
        between<Steps>(v);
        for (int e = 0; e < kCount; ++e) V::store_f32(x + i + e * least, v[e]);
      }
    }
  }
  template <int Steps>
  static void between(F (&v)[1 << Steps]) {
    for (int step = (1 << Steps) / 2; step > 0; step /= 2)
      for (int e = 0; e < 1 << Steps; ++e) {
        if (e & step) continue;
        const F a = v[e], b = v[e + step];
        v[e] = V::add(a, b);
        v[e + step] = V::sub(a, b);
      }
  }

  // Steps between vectors 128 apart, the steps between lanes, and the scale. a * 1 + b and b * -1 + a round once: the
  // sums themselves.
  template <int Apart>
  static void last(float* x, int64_t block, float by) {
    constexpr int kCount = 1 << Apart;
    constexpr int64_t kApart = Apart == 0 ? W : 128;  // between vectors that are in registers together
    const F scale = V::set(by), zero = V::set(0.f);
    alignas(64) float signs[4][W];
    for (int bit = 0; bit < kLaneSteps; ++bit)
      for (int64_t lane = 0; lane < W; ++lane) signs[bit][lane] = lane >> bit & 1 ? -1.f : 1.f;
    for (int64_t from = 0; from < block; from += kCount * kApart) {
      for (int64_t j = from; j < from + kApart; j += W) {
        F v[kCount];
        for (int e = 0; e < kCount; ++e) v[e] = V::load_f32(x + j + e * kApart);
        between<Apart>(v);
        for (int e = 0; e < kCount; ++e) {
          if constexpr (kLaneSteps > 3) v[e] = V::mul_add(v[e], V::load_f32(signs[3]), V::template swapped<8>(v[e]));
          if constexpr (kLaneSteps > 2) v[e] = V::mul_add(v[e], V::load_f32(signs[2]), V::template swapped<4>(v[e]));
          if constexpr (kLaneSteps > 1) v[e] = V::mul_add(v[e], V::load_f32(signs[1]), V::template swapped<2>(v[e]));
          if constexpr (kLaneSteps > 0) v[e] = V::mul_add(v[e], V::load_f32(signs[0]), V::template swapped<1>(v[e]));
          V::store_f32(x + j + e * kApart, V::add(V::mul(v[e], scale), zero));
        }
      }
    }
  }
};

}  // namespace pyquant::cpu
