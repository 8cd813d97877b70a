// Largest K for which no int32 accumulator can overflow (docs/numerics.md 3; reliability table: s8 full range
// x s8 full range 131071, u8 x s8 65793, s8 x s4 2097151, s4 x s4 33554431), and products checked in 64 bits.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int64_t kInt32Max = 2147483647;

// max |x code| and max |w code| of the ranges in use. u8 codes count as they are (255), not shifted.
constexpr int64_t k_max(int64_t x_abs_max, int64_t w_abs_max) {
  return (x_abs_max == 0 || w_abs_max == 0) ? INT64_MAX : kInt32Max / (x_abs_max * w_abs_max);
}

// Bound that also holds for acc - zero_point * w_sum: |x_q - zero_point| <= qmax - qmin for every code, so the
// corrected accumulator is bounded by (qmax - qmin) * |w|max * K; the partial term by |zero_point| * |w|max * K.
constexpr int64_t k_max_affine(int64_t x_qmin, int64_t x_qmax, int64_t w_abs_max) {
  return k_max(x_qmax - x_qmin, w_abs_max);
}

// The largest magnitude of a code times its step (docs/numerics.md 4.1).
constexpr int64_t kStepProductMax = 127;

inline bool mul_overflows(int64_t a, int64_t b, int64_t* out) { return __builtin_mul_overflow(a, b, out); }

}  // namespace pyquant
