// The scalar formulas of docs/numerics.md, once, for host and device. Every step is one separately rounded fp32
// operation: device code uses the _rn intrinsics, host code is compiled with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>

#include "core/activation_math.h"
#include "core/arith.h"
#include "core/problem.h"

namespace pyquant {

// Largest absolute value below which a row counts as all zero: its reciprocal would leave fp32.
constexpr float kAmaxFloor = 7.888609052210118e-31f;  // 2^-100

// Symmetric scale of an absolute maximum (numerics.md 2.1). NaN or infinity gives NaN: a row is poisoned, never made
// plausible.
PYQ_HD inline float scale_from_amax(float amax, int32_t qmax) {
  if (!(amax < kInfinity)) return kNaN;
  return amax < kAmaxFloor ? 1.f : fdiv(amax, static_cast<float>(qmax));
}

// Affine scale of a range widened to contain zero (numerics.md 2.1). Divides before it subtracts, so that no finite
// range overflows.
PYQ_HD inline float scale_from_range(float low, float high, int32_t qmin, int32_t qmax) {
  low = low < 0.f ? low : (low == low ? 0.f : low);
  high = high > 0.f ? high : (high == high ? 0.f : high);
  const float steps = static_cast<float>(qmax - qmin);
  const float amax = high > -low ? high : -low;
  if (!(amax < kInfinity) || low != low || high != high) return kNaN;
  return amax < kAmaxFloor ? 1.f : fsub(fdiv(high, steps), fdiv(low, steps));
}

// qmin - rint(low / scale), clamped: the code of real zero. A NaN scale gives 0.
PYQ_HD inline int32_t zero_point_from_range(float low, float recip, int32_t qmin, int32_t qmax) {
  low = low < 0.f ? low : 0.f;
  const float v = fround_even(fmul(low, recip));  // <= 0
  const float steps = static_cast<float>(qmax - qmin);
  return v == v ? qmin - static_cast<int32_t>(v < -steps ? -steps : v) : 0;
}

PYQ_HD inline float scale_recip(float scale) { return fdiv(1.f, scale); }

// clamp(rint(x * recip) + zero_point, qmin, qmax); NaN gives zero_point (numerics.md 2.2). The clamp is taken before
// the addition, on exact small integers, so that no conversion can overflow.
PYQ_HD inline int32_t code_from_real(float x, float recip, int32_t zero_point, int32_t qmin, int32_t qmax) {
  float v = fround_even(fmul(x, recip));
  const float low = static_cast<float>(qmin - zero_point), high = static_cast<float>(qmax - zero_point);
  v = v < low ? low : v;
  v = v > high ? high : v;
  return (v == v ? static_cast<int32_t>(v) : 0) + zero_point;
}

PYQ_HD inline float real_from_code(int32_t q, float scale, int32_t zero_point) {
  return fmul(static_cast<float>(q - zero_point), scale);
}

PYQ_HD inline float activate(float t, Activation activation, float clamp_min, float clamp_max) {
  switch (activation) {
#define PYQUANT_ACTIVATION(NAME) \
  case Activation::NAME: return activations::NAME::of(t, clamp_min, clamp_max);
    PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
  }
  return t;
}

}  // namespace pyquant
