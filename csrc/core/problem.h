// What a GEMM is asked to do (GemmProblem), on which memory (GemmOperands), and what happens to the
// accumulator (Epilogue). Plain structs: no torch, no CUDA. Formulas: docs/numerics.md.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace pyquant {

enum class Activation : int32_t { none = 0, relu = 1, clamp = 2, gelu = 3, gelu_tanh = 4, silu = 5 };

// y[m, n] = epilogue(sum_k x_q[m, k] * w_q[n, k]); leading strides count elements (for s4: nibbles).
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  DType x = DType::s8;     // s8, u8 (shifted by -128 on load), s4 (codes in [-8, 7] carried one per byte)
  DType w = DType::s8;     // s8 [n, k] row-major; s4 packed two per byte, low nibble = even k
  DType out = DType::f32;  // f16, bf16, f32; s32 = accumulator after the zero-point term; s8 = requantised codes
  int64_t ldx = 0, ldw = 0, ldo = 0, ldr = 0;
  int64_t group_size = 0;        // codes along k that share a weight scale; 0 = one scale per channel
  bool per_token_scale = false;  // x_scale has m entries (else one)
  bool per_token_zero_point = false;
  bool has_zero_point = false;
  DType residual = DType::f32;  // meaningful when operands carry a residual
  int32_t x_align = 16, w_align = 16, out_align = 16,
          residual_align = 16;  // bytes: largest power of two <= 16 dividing pointer and row stride
};

// Null means absent. Absent scale = 1, absent zero point = 0, absent bias or residual = not added.
struct GemmOperands {
  const void* x = nullptr;
  const void* w = nullptr;
  const float* x_scale = nullptr;         // [m] or [1]
  const int32_t* x_zero_point = nullptr;  // [m] or [1]
  const float* w_scale = nullptr;         // [n] or [n, k / group_size]
  const int32_t* w_sum = nullptr;         // [n] (groups: [n, k / group_size]) sum of codes; required with a zero point
  const float* bias = nullptr;            // [n]
  const void* residual = nullptr;         // [m, n], type problem.residual, row stride ldr
  void* out = nullptr;                    // [m, n], row stride ldo
  const float* out_scale = nullptr;       // [1], out == s8
  const int32_t* out_zero_point = nullptr;  // [1] or null
};

struct Epilogue {
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;   // used by Activation::clamp
  int32_t out_qmin = -127, out_qmax = 127;  // code limits when out == s8
};

}  // namespace pyquant
