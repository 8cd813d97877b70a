// The activations of the epilogue: the list, and of each its formula, which the CPU kernels, the CUDA kernels and the
// bindings read from here. gelu (erf and tanh forms) and silu are in fp32 with explicit fma: one source, the same bits
// on host and device, selects instead of branches so that a loop over them vectorises. Formulas, bounds and special
// values: docs/activations.md.
//
// All three curves are x * S(x) with S(-a) = tail(a) and S(a) = 1 - tail(a), a = |x|: few operations, since they run on
// every element of a layer's output.
#pragma once
#include "core/arith.h"

// X(name): by value, in the order of pyquant.core.names.ACTIVATIONS. Namespace `activations` below has a struct for
// each name.
#define PYQUANT_ACTIVATIONS(X) X(none) X(relu) X(clamp) X(gelu) X(gelu_tanh) X(silu)

namespace pyquant {

enum class Activation : int32_t {
#define PYQUANT_ACTIVATION(NAME) NAME,
  PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
};

constexpr const char* kActivationNames[] = {
#define PYQUANT_ACTIVATION(NAME) #NAME,
    PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
};
constexpr int32_t kActivations = sizeof kActivationNames / sizeof *kActivationNames;

namespace activation_detail {

// Fitted or split by tools/fit_activations.py. 2^f / 2 = 1/2 + f (kPower1 + kPower2 f + ...), and the tails of the
// gelus are 2^(p(a) a) / 2 with p = k...1 + k...2 a + ...
constexpr float kLog2EHigh = 1.44269502f;
constexpr float kLog2ELow = 1.925963033e-08f;
constexpr float kPower1 = 0.346573591f;
constexpr float kPower2 = 0.120113239f;
constexpr float kPower3 = 0.0277517997f;
constexpr float kPower4 = 0.00480925292f;
constexpr float kPower5 = 0.000669540314f;
constexpr float kPower6 = 7.66323137e-05f;
constexpr float kErf1 = -1.15110421f;
constexpr float kErf2 = -0.459222347f;
constexpr float kErf3 = -0.0524293222f;
constexpr float kErf4 = 0.00691471854f;
constexpr float kErf5 = 4.22290323e-05f;
constexpr float kErf6 = -0.000310628733f;
constexpr float kErf7 = 9.0003603e-05f;
constexpr float kErf8 = -1.45911781e-05f;
constexpr float kErf9 = 1.44152273e-06f;
constexpr float kErf10 = -8.06066893e-08f;
constexpr float kErf11 = 1.95265604e-09f;
constexpr float kTanh1 = -1.15110445f;
constexpr float kTanh2 = -0.459216148f;
constexpr float kTanh3 = -0.0515296273f;
constexpr float kTanh4 = 0.00785140041f;
constexpr float kTanh5 = -0.000337579811f;
constexpr float kTanh6 = -0.000183460899f;
constexpr float kTanh7 = -5.74643127e-05f;
constexpr float kTanh8 = -0.000156531241f;
constexpr float kTanh9 = 0.000119651173f;
constexpr float kTanh10 = -3.51552844e-05f;
constexpr float kTanh11 = 5.32517288e-06f;
constexpr float kTanh12 = -4.1745804e-07f;
constexpr float kTanh13 = 1.34895952e-08f;

// Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low mantissa bits.
constexpr float kRoundToInteger = 12582912.f;

// Beyond these magnitudes the negative side is -0; there the gelus are above -5e-15 and -1e-10, silu above -4e-36.
constexpr float kErfLimit = 8.f;
constexpr float kTanhLimit = 6.f;
constexpr float kSiluLimit = 86.f;

PYQ_HD inline float magnitude(float x) { return float_from_bits(bits_from_float(x) & 0x7fffffffu); }

// 2^(f + n) / 2 for |f| <= 1/2, shifted = n + kRoundToInteger.
PYQ_HD inline float half_power(float f, float shifted) {
  float q = ffma(kPower6, f, kPower5);
  q = ffma(q, f, kPower4);
  q = ffma(q, f, kPower3);
  q = ffma(q, f, kPower2);
  q = ffma(q, f, kPower1);
  return float_from_bits(bits_from_float(ffma(q, f, 0.5f)) + (bits_from_float(shifted) << 23));
}

// 2^(p a) / 2.
PYQ_HD inline float gelu_tail(float p, float a) {
  const float shifted = ffma(p, a, kRoundToInteger);
  return half_power(ffma(p, a, -fsub(shifted, kRoundToInteger)), shifted);
}

// half / sum for sum = 1/2 + half, from an estimate of 1 / sum: the quotient rounded once, whatever the last two places
// of the estimate (tests/csrc/quotient_sweep.cpp has all of them).
PYQ_HD inline float quotient_of_half(float half, float sum, float estimate) {
  const float r = ffma(ffma(-sum, estimate, 1.f), estimate, estimate);
  const float q = fmul(half, r);
  return ffma(ffma(-sum, q, half), r, q);
}

// half / (1/2 + half). A GPU's division first asks whether anything may overflow, which it cannot here: that is a
// branch an element, behind which no other element's work goes on.
PYQ_HD inline float silu_tail(float half) {
  const float sum = fadd(0.5f, half);
#if defined(__CUDA_ARCH__)
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(sum));
  return quotient_of_half(half, sum, estimate);
#else
  return fdiv(half, sum);
#endif
}

// x * tail for x < 0, x * (1 - tail) otherwise: one fma, which gives both the sign of x, -0 included. Beyond the limit,
// where the tail means nothing, and for NaN it is x itself or -0.
PYQ_HD inline float times_tail(float x, float a, float limit, float tail) {
  const float base = x < 0.f ? -0.f : x;
  float product = ffma(-a, tail, base);
#if defined(__CUDA_ARCH__)
  // The compiler would make a branch of the choice and put all of the tail behind it: element by element, one
  // operation waiting for the other.
  asm("" : "+f"(product));
#endif
  return a < limit ? product : base;
}

}  // namespace activation_detail

// x / (1 + exp(-x)).
PYQ_HD inline float silu(float x) {
  using namespace activation_detail;
  const float a = magnitude(x);
  const float shifted = ffma(a, -kLog2EHigh, kRoundToInteger);
  const float n = fsub(shifted, kRoundToInteger);
  const float half = half_power(ffma(a, -kLog2ELow, ffma(a, -kLog2EHigh, -n)), shifted);
  return times_tail(x, a, kSiluLimit, silu_tail(half));
}

// x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
PYQ_HD inline float gelu_tanh(float x) {
  using namespace activation_detail;
  const float a = magnitude(x);
  float p = ffma(kTanh13, a, kTanh12);
  p = ffma(p, a, kTanh11);
  p = ffma(p, a, kTanh10);
  p = ffma(p, a, kTanh9);
  p = ffma(p, a, kTanh8);
  p = ffma(p, a, kTanh7);
  p = ffma(p, a, kTanh6);
  p = ffma(p, a, kTanh5);
  p = ffma(p, a, kTanh4);
  p = ffma(p, a, kTanh3);
  p = ffma(p, a, kTanh2);
  p = ffma(p, a, kTanh1);
  return times_tail(x, a, kTanhLimit, gelu_tail(p, a));
}

// x * Phi(x), Phi the normal distribution function. Horner's scheme again, with the coefficients of this form spelled
// out as above: an array and a loop would leave unrolling, and with it the vectorised code, to each compiler.
PYQ_HD inline float gelu_erf(float x) {
  using namespace activation_detail;
  const float a = magnitude(x);
  float p = ffma(kErf11, a, kErf10);
  p = ffma(p, a, kErf9);
  p = ffma(p, a, kErf8);
  p = ffma(p, a, kErf7);
  p = ffma(p, a, kErf6);
  p = ffma(p, a, kErf5);
  p = ffma(p, a, kErf4);
  p = ffma(p, a, kErf3);
  p = ffma(p, a, kErf2);
  p = ffma(p, a, kErf1);
  return times_tail(x, a, kErfLimit, gelu_tail(p, a));
}

// One struct an activation, in the list's order. of(t, low, high): the formula; the limits are clamp's. kHasVectors:
// the CPU calls vectors<V>(t, low, high) on vectors of V (csrc/cpu/rows.h), whose max and min give the second operand
// where one is NaN; else a loop over `of`, which compilers vectorise.
namespace activations {
namespace {

struct none {
  static constexpr bool kHasVectors = true;
  PYQ_HD_MEMBER float of(float t, float, float) { return t; }
  template <class V>
  static typename V::F vectors(typename V::F t, float, float) {
    return t;
  }
};

struct relu {
  static constexpr bool kHasVectors = true;
  PYQ_HD_MEMBER float of(float t, float, float) { return t < 0.f ? 0.f : t; }
  template <class V>
  static typename V::F vectors(typename V::F t, float, float) {
    return V::max(V::set(0.f), t);
  }
};

struct clamp {
  static constexpr bool kHasVectors = true;
  PYQ_HD_MEMBER float of(float t, float low, float high) {
    t = t < low ? low : t;
    return t > high ? high : t;
  }
  template <class V>
  static typename V::F vectors(typename V::F t, float low, float high) {
    return V::min(V::set(high), V::max(V::set(low), t));
  }
};

struct gelu {
  static constexpr bool kHasVectors = false;
  PYQ_HD_MEMBER float of(float t, float, float) { return gelu_erf(t); }
};

struct gelu_tanh {
  static constexpr bool kHasVectors = false;
  PYQ_HD_MEMBER float of(float t, float, float) { return pyquant::gelu_tanh(t); }
};

struct silu {
  static constexpr bool kHasVectors = false;
  PYQ_HD_MEMBER float of(float t, float, float) { return pyquant::silu(t); }
};

}  // namespace
}  // namespace activations

}  // namespace pyquant
