// gelu and silu in fp32 with explicit fma, one source for host and device, selects only: a loop over them vectorises.
#pragma once
#include "core/arith.h"

namespace pyquant {

namespace activation_detail {

PYQ_HD inline float magnitude(float x) { return float_from_bits(bits_from_float(x) & 0x7fffffffu); }

// exp(-z), z >= 0.
PYQ_HD inline float exp_neg(float z) {
  z = z > 104.f ? 104.f : z;
  const float t = ffma(z, -1.44269504f, 12582912.f);
  const float n = fsub(t, 12582912.f);
  const float r = ffma(n, -1.90465421e-9f, ffma(n, -0.693147182f, -z));
  float q = 1.98756911e-4f;
  q = ffma(q, r, 1.39819994e-3f);
  q = ffma(q, r, 8.33345205e-3f);
  q = ffma(q, r, 4.16657947e-2f);
  q = ffma(q, r, 1.66666657e-1f);
  q = ffma(q, r, 0.5f);
  const float p = fadd(1.f, ffma(fmul(r, r), q, r));
  return fmul(fmul(p, float_from_bits((bits_from_float(t) + 227u) << 23)), 7.88860905e-31f);
}

PYQ_HD inline float sigmoid_times(float x, float z) {
  const float e = exp_neg(magnitude(z));
  const float y = fdiv(fmul(x, x < 0.f ? e : 1.f), fadd(1.f, e));
  return x <= 104.f ? (x < -120.f ? -0.f : y) : x;
}

}  // namespace activation_detail

PYQ_HD inline float silu(float x) { return activation_detail::sigmoid_times(x, x); }

PYQ_HD inline float gelu_tanh(float x) {
  const float c = x < -13.f ? -13.f : x;
  return activation_detail::sigmoid_times(x, fmul(c, ffma(fmul(c, c), 0.0713548163f, 1.59576912f)));
}

PYQ_HD inline float gelu_erf(float x) {
  using namespace activation_detail;
  float a = magnitude(x);
  a = a > 15.f ? 15.f : a;
  const float t = fdiv(1.f, ffma(a, 0.231641888f, 1.f));
  float q = 1.061405429f;
  q = ffma(q, t, -1.453152027f);
  q = ffma(q, t, 1.421413741f);
  q = ffma(q, t, -0.284496736f);
  q = ffma(q, t, 0.254829592f);
  const float tail = fmul(fmul(0.5f, fmul(q, t)), exp_neg(fmul(fmul(a, a), 0.5f)));
  const float y = x < 0.f ? fmul(-a, tail) : fmul(x, fsub(1.f, tail));
  return x <= 14.f ? y : x;
}

}  // namespace pyquant
