// One quantised Linear, as the fused op sees it: LinearSpec (thirteen-odd integers that travel as int[] through the
// op) and the single buffer ("packed") that holds codes, sums, scales and bias in the layout of one device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace pyquant {

enum class InputMode : int32_t { dynamic_per_token = 0, static_per_tensor = 1 };
enum class Layout : int32_t { rows = 0, cpu_blocked = 1 };  // rows: [n, k_padded] as the CUDA kernels read it

struct LinearSpec {
  int64_t n = 0, k = 0;
  int32_t w_bits = 8;        // 8 or 4
  int64_t group_size = 0;    // 0 = per channel; divides k
  InputMode input = InputMode::dynamic_per_token;
  int32_t x_qmin = -127, x_qmax = 127;
  bool x_symmetric = true;   // dynamic affine rows: zero point from the row's range
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;
  bool has_bias = false;
  bool codes_out = false;    // out = int8 codes of the static output scale held in the buffer
  int32_t out_qmin = -127, out_qmax = 127;
  Layout layout = Layout::cpu_blocked;
};

// Order of the int[] that carries a LinearSpec (pyquant/ops/spec.py holds the same list; a test compares them).
// clamp limits travel as the bit pattern of the float.
enum SpecField {
  kSpecN, kSpecK, kSpecWBits, kSpecGroupSize, kSpecInput, kSpecXQmin, kSpecXQmax, kSpecXSymmetric, kSpecActivation,
  kSpecClampMin, kSpecClampMax, kSpecHasBias, kSpecCodesOut, kSpecOutQmin, kSpecOutQmax, kSpecLayout, kSpecFields
};

// Sources of a packed buffer. Codes are row-major: int8 [n, k], or for w_bits = 4 packed uint8 [n, ceil(k / 2)].
struct LinearWeights {
  const void* codes = nullptr;
  const float* w_scale = nullptr;          // [n] or [n, k / group_size]
  const float* bias = nullptr;             // [n] or null
  const float* x_scale = nullptr;          // [1] for static input, else null
  const int32_t* x_zero_point = nullptr;   // [1] or null (0)
  const float* out_scale = nullptr;        // [1] when codes_out
  const int32_t* out_zero_point = nullptr; // [1] or null (0)
};

}  // namespace pyquant
