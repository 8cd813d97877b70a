// The step of least squared error of short rows over a vector type V (isa_*.cpp): a row stays in cache and registers
// while it is rounded at every candidate. docs/calibration.md 2.4.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/arith.h"
#include "core/least_squares.h"
#include "cpu/kernels.h"

namespace pyquant::cpu {

template <class V>
struct LeastSquaresRows {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int64_t W = V::W;
  static constexpr int64_t kParts = kStepLanes / W;        // vectors of partial sums
  static constexpr int kAtOnce = W == kStepLanes ? 4 : 2;  // candidates, so that one's chain of sums hides another's

  struct Row {
    alignas(64) float real[kLongestRow];  // magnitudes below 1; zeros up to a multiple of kStepLanes
    int64_t n;
    F low, high;
  };

  static float sum_of(const F (&lanes)[kParts]) {
    F v[kParts];
    for (int64_t i = 0; i < kParts; ++i) v[i] = lanes[i];
    for (int64_t half = kParts / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) v[i] = V::add(v[i], v[i + half]);
    if constexpr (W > 8) v[0] = V::add(v[0], V::template swapped<8>(v[0]));
    if constexpr (W > 4) {
      v[0] = V::add(v[0], V::template swapped<4>(v[0]));
      v[0] = V::add(v[0], V::template swapped<2>(v[0]));
      v[0] = V::add(v[0], V::template swapped<1>(v[0]));
    }
    alignas(64) float first[W];
    V::store_f32(first, v[0]);
    return first[0];
  }

  static F code_of(F real, F recip, const Row& row) {
    const F limited = V::min(row.high, V::max(row.low, V::mul(real, recip)));
    return V::to_float(V::to_int(limited));
  }

  // The squared errors of the row under kAtOnce steps.
  static void errors_of(const Row& row, const double* steps, float* errors) {
    F recip[kAtOnce], step[kAtOnce], sums[kAtOnce][kParts];
    for (int c = 0; c < kAtOnce; ++c) {
      recip[c] = V::set(static_cast<float>(1.0 / steps[c]));
      step[c] = V::set(static_cast<float>(steps[c]));
      for (int64_t i = 0; i < kParts; ++i) sums[c][i] = V::set(0.f);
    }
    for (int64_t at = 0; at < row.n; at += kStepLanes) {
      for (int64_t i = 0; i < kParts; ++i) {
        const F real = V::load_f32(row.real + at + i * W);
        for (int c = 0; c < kAtOnce; ++c) {
          const F off = V::sub(V::mul(code_of(real, recip[c], row), step[c]), real);
          sums[c][i] = V::add(sums[c][i], V::mul(off, off));
        }
      }
    }
    for (int c = 0; c < kAtOnce; ++c) errors[c] = sum_of(sums[c]);
  }

  // count steps, of which some more are readable and some more errors writable.
  static void errors_of(const Row& row, const double* steps, int64_t count, float* errors) {
    for (int64_t c = 0; c < count; c += kAtOnce) errors_of(row, steps + c, errors + c);
  }

  // The kCount smallest, in ascending order; of equal ones the first.
  template <int64_t kCount>
  static void smallest(const float* errors, int64_t count, int64_t (&found)[kCount]) {
    for (int64_t i = 0; i < kCount; ++i) {
      int64_t best = -1;
      for (int64_t c = 0; c < count; ++c) {
        bool is_new = true;
        for (int64_t j = 0; j < i; ++j) is_new = is_new && found[j] != c;
        if (is_new && (best < 0 || errors[c] < errors[best])) best = c;
      }
      found[i] = best;
    }
  }

  // The best step for the codes that a step gives, the codes of that one, and again.
  static double polished(const Row& row, double step, double first) {
    for (int64_t round = 0; round < kPolishRounds; ++round) {
      const F recip = V::set(static_cast<float>(1.0 / step));
      F squares[kParts], products[kParts];
      for (int64_t i = 0; i < kParts; ++i) squares[i] = products[i] = V::set(0.f);
      for (int64_t at = 0; at < row.n; at += kStepLanes) {
        for (int64_t i = 0; i < kParts; ++i) {
          const F real = V::load_f32(row.real + at + i * W), code = code_of(real, recip, row);
          squares[i] = V::add(squares[i], V::mul(code, code));
          products[i] = V::add(products[i], V::mul(code, real));
        }
      }
      const double square = static_cast<double>(sum_of(squares));
      const double better = static_cast<double>(sum_of(products)) / (square > 0 ? square : 1.0);
      if (square > 0 && better > 0) step = lesser(better, first);
    }
    return step;
  }

  static double step_of(const LeastSquaresRun& run, const float* weights) {
    Row row;
    row.n = (run.n + kStepLanes - 1) / kStepLanes * kStepLanes;
    row.low = V::set(static_cast<float>(run.qmin));
    row.high = V::set(static_cast<float>(run.qmax));
    std::memset(row.real + row.n - kStepLanes, 0, kStepLanes * sizeof(float));
    std::memcpy(row.real, weights, static_cast<size_t>(run.n) * sizeof(float));
    I top = V::set_i(0);
    for (int64_t at = 0; at < row.n; at += W) top = V::max_i(top, V::magnitude_bits(V::load_f32(row.real + at)));
    const float amax = float_from_bits(static_cast<uint32_t>(V::reduce_max_i(top)));
    if (!(amax > 0.f) || !(amax < kInfinity)) return 0.0;

    // Magnitudes below 1, whose squares are normal numbers: by two powers of two, each of which float32 holds.
    int exponent;
    const auto largest = static_cast<double>(std::frexp(amax, &exponent));
    const int half = exponent / 2;
    const F down[2] = {V::set(power(-half)), V::set(power(half - exponent))};
    for (int64_t at = 0; at < row.n; at += W)
      V::store_f32(row.real + at, V::mul(V::mul(V::load_f32(row.real + at), down[0]), down[1]));

    const double first = largest / static_cast<double>(run.qmax);
    constexpr int64_t kAround = kStepsKept * (2 * kStepsBeside + 1);
    constexpr int64_t kMost = (kMostRatios > kAround ? kMostRatios : kAround) + kAtOnce;
    double steps[kMost];
    float errors[kMost];
    const auto fill = [&](double* from) {
      for (int c = 0; c < kAtOnce; ++c) from[c] = first;
    };
    int64_t kept[kStepsKept], best[kStepsPolished];
    for (int64_t c = 0; c < run.points; ++c) steps[c] = first * run.ratios[c];
    fill(steps + run.points);
    errors_of(row, steps, run.points, errors);
    smallest(errors, run.points, kept);
    double around[kStepsKept];
    for (int64_t i = 0; i < kStepsKept; ++i) around[i] = steps[kept[i]];
    const double width = 1.0 / run.ratios[1] - 1.0;
    int64_t count = 0;
    for (const double centre : around) {
      for (int64_t j = -kStepsBeside; j <= kStepsBeside; ++j) {
        const double factor = 1.0 + width * static_cast<double>(j) / static_cast<double>(kStepsBeside);
        steps[count++] = lesser(centre * factor, first);
      }
    }
    fill(steps + count);
    errors_of(row, steps, count, errors);
    smallest(errors, count, best);
    double ends[kStepsPolished + kAtOnce];
    for (int64_t i = 0; i < kStepsPolished; ++i) ends[i] = polished(row, steps[best[i]], first);
    fill(ends + kStepsPolished);
    errors_of(row, ends, kStepsPolished, errors);
    int64_t least[1];
    smallest(errors, kStepsPolished, least);
    return std::ldexp(ends[least[0]], exponent);
  }

  static double lesser(double a, double b) { return b < a ? b : a; }
  static float power(int exponent) { return float_from_bits(static_cast<uint32_t>(exponent + 127) << 23); }

  static void run(const LeastSquaresRun& run) {
    for (int64_t r = run.begin; r < run.end; ++r) run.out[r] = step_of(run, run.rows + r * run.n);
  }
};

}  // namespace pyquant::cpu
