// One quantised Linear, as the fused op sees it: LinearSpec (five integers that travel as int[] through the op: each
// costs a call about 50 ns) and the single buffer ("packed") that holds codes, sums, scales and bias in the layout of
// one device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/arith.h"
#include "core/bounds.h"
#include "core/problem.h"

namespace pyquant {

enum class InputMode : int32_t { dynamic_per_token = 0, static_per_tensor = 1 };
// rows: [n, k_padded] as most CUDA kernels read it; rows_blocked128: the same buffer with its int4 codes in
// WeightLayout::blocked128, for the kernels of sm_90.
enum class Layout : int32_t { rows = 0, cpu_blocked = 1, rows_blocked128 = 2 };

struct LinearSpec {
  int64_t n = 0, k = 0;
  const CodeType* w = &code_type(DType::s8);  // null: a wire asked for bits that no type of weights has
  int64_t group_size = 0;                     // 0 = per channel; divides k
  bool two_level = false;                     // groups have whole-number steps, channels scales: numerics.md 4.1
  InputMode input = InputMode::dynamic_per_token;
  int32_t x_qmin = -127, x_qmax = 127;
  bool x_symmetric = true;  // dynamic affine rows: zero point from the row's range
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;
  bool has_bias = false;
  bool codes_out = false;  // out = int8 codes of the static output scale held in the buffer
  int32_t out_qmin = -127, out_qmax = 127;
  Layout layout = Layout::cpu_blocked;
};

// The largest magnitude of what a product multiplies: a code, or a code times its step.
inline int64_t product_largest(const LinearSpec& s) { return s.two_level ? kStepProductMax : s.w->largest(); }

// The int[] that carries a LinearSpec: n, k, group_size, the small fields as bits of one word, the clamp limits as the
// patterns of two floats. pyquant/ops/spec.py writes it; tests/ops compare the two.
enum WireField { kWireN, kWireK, kWireGroupSize, kWireModes, kWireClamp, kWireFields };

inline int64_t wire_w_bits(const int64_t* wire) { return wire[kWireModes] & 15; }

inline LinearSpec spec_from_wire(const int64_t* wire) {
  const auto bits = [&](int at, int count) {
    return static_cast<int32_t>(wire[kWireModes] >> at & ((1 << count) - 1));
  };
  const auto real = [&](int at) { return float_from_bits(static_cast<uint32_t>(wire[kWireClamp] >> at)); };
  LinearSpec s;
  s.n = wire[kWireN];
  s.k = wire[kWireK];
  s.group_size = wire[kWireGroupSize];
  s.w = weight_type(wire_w_bits(wire));
  s.activation = static_cast<Activation>(bits(4, 4));
  s.input = static_cast<InputMode>(bits(8, 1));
  s.x_symmetric = bits(9, 1);
  s.has_bias = bits(10, 1);
  s.codes_out = bits(11, 1);
  s.layout = static_cast<Layout>(bits(12, 2));
  s.two_level = bits(14, 1);
  s.x_qmin = bits(16, 8) - 128;
  s.x_qmax = bits(24, 8) - 128;
  s.out_qmin = bits(32, 8) - 128;
  s.out_qmax = bits(40, 8) - 128;
  s.clamp_min = real(0);
  s.clamp_max = real(32);
  return s;
}

// Sources of a packed buffer. Codes are row-major: [n, columns_of(type, k)].
struct LinearWeights {
  const void* codes = nullptr;
  const float* w_scale = nullptr;           // [n] or [n, k / group_size]
  const float* bias = nullptr;              // [n] or null
  const float* x_scale = nullptr;           // [1] for static input, else null
  const int32_t* x_zero_point = nullptr;    // [1] or null (0)
  const float* out_scale = nullptr;         // [1] when codes_out
  const int32_t* out_zero_point = nullptr;  // [1] or null (0)
};

}  // namespace pyquant
