// gelu (erf and tanh forms) and silu in fp32 with explicit fma: one source, the same bits on host and device, selects
// instead of branches so that a loop over them vectorises. Formulas, bounds and special values: docs/activations.md.
//
// All three are x * S(x) with S(-a) = tail(a) = exp(-z) * rational and S(a) = 1 - tail(a), a = |x|. The tail is carried
// as mantissa * 2^n with a mantissa of two fp32 (high + low), so that the result is rounded once, at the end.
#pragma once
#include "core/arith.h"

namespace pyquant {
namespace activation_detail {

// Fitted or split by tools/fit_activations.py. X = kXHigh + kXLow where a constant needs more than 24 bits.
constexpr float kLog2E = 1.44269502f;
constexpr float kLn2High = 0.693147182f;
constexpr float kLn2Low = -1.90465421e-09f;
constexpr float kTanhSlopeHigh = 1.59576893f;  // 2 sqrt(2 / pi), 21 bits
constexpr float kTanhSlopeLow = 1.93077895e-07f;
constexpr float kTanhCubicHigh = 0.0713548139f;  // 0.044715 of it
constexpr float kTanhCubicLow = 2.39883247e-09f;
constexpr float kExp2 = 0.49999994f;
constexpr float kExp3 = 0.166665211f;
constexpr float kExp4 = 0.041668281f;
constexpr float kExp5 = 0.0083686905f;
constexpr float kExp6 = 0.00138194906f;
constexpr float kErf0High = 0.495655864f;
constexpr float kErf0Low = 2.66350231e-09f;
constexpr float kErf1 = -0.139302894f;
constexpr float kErf2 = 0.0450944155f;
constexpr float kErf3 = 0.0106730713f;
constexpr float kErf4 = -0.0244811792f;
constexpr float kErf5 = 0.0158173051f;
constexpr float kErf6 = -0.0048770234f;
constexpr float kErf7 = -0.00014298239f;
constexpr float kErf8 = 0.000646859f;
constexpr float kErf9 = -7.47865197e-05f;
constexpr float kErf10 = -6.92248941e-05f;

// Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low mantissa bits.
constexpr float kRoundToInteger = 12582912.f;
constexpr float kTwo100 = 1.2676506002282294e30f;
constexpr float kTwoMinus100 = 7.888609052210118e-31f;

// Caps 2^n from below where only 1 + 2^n or x - x 2^n matter: smaller powers would be subnormal, which is slow.
constexpr float kTwo36 = 68719476736.f;

// Beyond these magnitudes the negative side rounds to -0.
constexpr float kErfLimit = 14.5f;
constexpr float kTanhLimit = 12.f;
constexpr float kSiluLimit = 120.f;

// value = (high + low) * 2^-100 * scaled_power: 2^n alone leaves the exponent range before the result does.
struct ScaledPair {
  float high, low, scaled_power;
};

// 2^n, at least 2^-64.
PYQ_HD inline float capped_power(ScaledPair value) {
  return fmul(value.scaled_power > kTwo36 ? value.scaled_power : kTwo36, kTwoMinus100);
}

PYQ_HD inline float magnitude(float x) { return float_from_bits(bits_from_float(x) & 0x7fffffffu); }

// exp(-(z_high + z_low)) for 0 <= z_high <= 150, |z_low| below half an ulp of z_high.
PYQ_HD inline ScaledPair exp_negative(float z_high, float z_low) {
  const float shifted = ffma(z_high, -kLog2E, kRoundToInteger);
  const float n = fsub(shifted, kRoundToInteger);
  const float r = ffma(n, -kLn2High, -z_high);  // exact: it fits 24 bits
  const float r_low = ffma(n, -kLn2Low, -z_low);
  float q = ffma(kExp6, r, kExp5);
  q = ffma(q, r, kExp4);
  q = ffma(q, r, kExp3);
  q = ffma(q, r, kExp2);
  const float curved = fmul(fmul(r, r), q);
  const float u = fadd(r, curved);  // exp(r) - 1 = u + u_low
  const float u_low = fadd(fsub(r, u), curved);
  const float high = fadd(1.f, u);
  const float low = ffma(r_low, high, fadd(fadd(fsub(1.f, high), u), u_low));
  return {high, low, float_from_bits((bits_from_float(shifted) + 227u) << 23)};
}

// (numerator) / (divisor_high + divisor_low), given recip = 1 / divisor_high.
PYQ_HD inline ScaledPair divide(ScaledPair numerator, float divisor_high, float divisor_low, float recip) {
  const float high = fmul(numerator.high, recip);
  const float rest = ffma(-high, divisor_low, fadd(ffma(-high, divisor_high, numerator.high), numerator.low));
  return {high, fmul(rest, recip), numerator.scaled_power};
}

// e / (1 + e) with e = exp(-z): the logistic function of -z.
PYQ_HD inline ScaledPair logistic_tail(float z_high, float z_low) {
  const ScaledPair e = exp_negative(z_high, z_low);
  const float power = capped_power(e);
  const float e_high = fmul(e.high, power);
  const float divisor = fadd(1.f, e_high);
  const float divisor_low = ffma(e.low, power, fadd(fsub(1.f, divisor), e_high));
  return divide(e, divisor, divisor_low, fdiv(1.f, divisor));
}

// x * tail for x < 0, x * (1 - tail) otherwise. Works on magnitudes and gives the sign of x back at the end, which
// keeps -0. Above limit x itself is right, and an infinity or NaN passes through.
PYQ_HD inline float times_tail(float x, float a, float limit, ScaledPair tail) {
  const bool negative = x < 0.f;
  const float factor = negative ? a : -fmul(a, capped_power(tail));
  const float base = negative ? 0.f : a;
  const float y = ffma(factor, tail.high, base);
  const float y_low = ffma(factor, tail.low, ffma(factor, tail.high, fsub(base, y)));
  const float sum = fadd(y, y_low);
  const float power = a < limit ? tail.scaled_power : 0.f;  // an exact zero costs nothing, an underflow does
  const float scaled = fmul(fmul(sum, negative ? power : kTwo100), kTwoMinus100);
  const float signed_sum = float_from_bits(bits_from_float(scaled) | (bits_from_float(x) & 0x80000000u));
  return x <= limit ? signed_sum : x;
}

PYQ_HD inline float clamped_magnitude(float x, float limit) {
  const float a = magnitude(x);
  return a > limit ? limit : a;
}

}  // namespace activation_detail

// x / (1 + exp(-x)).
PYQ_HD inline float silu(float x) {
  using namespace activation_detail;
  const float a = clamped_magnitude(x, kSiluLimit);
  return times_tail(x, a, kSiluLimit, logistic_tail(a, 0.f));
}

// x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
PYQ_HD inline float gelu_tanh(float x) {
  using namespace activation_detail;
  const float a = clamped_magnitude(x, kTanhLimit);
  const float square = fmul(a, a);
  const float square_low = ffma(a, a, -square);
  const float w = ffma(kTanhCubicHigh, square, kTanhSlopeHigh);
  const float w_exact_part = fsub(w, kTanhSlopeHigh);  // exact: see kTanhSlopeHigh
  float w_low = fadd(ffma(kTanhCubicHigh, square, -w_exact_part), kTanhSlopeLow);
  w_low = ffma(kTanhCubicHigh, square_low, w_low);
  w_low = ffma(kTanhCubicLow, square, w_low);
  const float z = fmul(a, w);
  const float z_low = ffma(a, w_low, ffma(a, w, -z));
  return times_tail(x, a, kTanhLimit, logistic_tail(z, z_low));
}

// x * Phi(x), Phi the normal distribution function: Phi(-a) = exp(-a^2 / 2) G(t) / (a + 1.25), t = (a - 4) / (a + 4).
PYQ_HD inline float gelu_erf(float x) {
  using namespace activation_detail;
  const float a = clamped_magnitude(x, kErfLimit);
  const float half = fmul(a, 0.5f);
  const float z = fmul(a, half);
  const ScaledPair e = exp_negative(z, ffma(a, half, -z));
  const float divisor = fadd(a, 1.25f);
  const float divisor_low = fsub(a, fsub(divisor, 1.25f));
  const float pole = fadd(a, 4.f);
  const float recip_both = fdiv(1.f, fmul(divisor, pole));  // one division serves two quotients
  const float recip_pole = fmul(recip_both, divisor);
  const float zero = fsub(a, 4.f);
  const float quotient = fmul(zero, recip_pole);
  const float t = ffma(ffma(-quotient, pole, zero), recip_pole, quotient);
  float g = ffma(kErf10, t, kErf9);
  g = ffma(g, t, kErf8);
  g = ffma(g, t, kErf7);
  g = ffma(g, t, kErf6);
  g = ffma(g, t, kErf5);
  g = ffma(g, t, kErf4);
  g = ffma(g, t, kErf3);
  g = ffma(g, t, kErf2);
  g = ffma(g, t, kErf1);
  g = ffma(g, t, kErf0Low);
  const float g_high = fadd(kErf0High, g);
  const float g_low = fadd(fsub(kErf0High, g_high), g);
  const float product = fmul(e.high, g_high);
  const float product_low = ffma(e.low, g_high, ffma(e.high, g_low, ffma(e.high, g_high, -product)));
  const ScaledPair tail = divide({product, product_low, e.scaled_power}, divisor, divisor_low, fmul(recip_both, pole));
  return times_tail(x, a, kErfLimit, tail);
}

}  // namespace pyquant
