// What a GEMM is asked to do (GemmProblem), on which memory (GemmOperands), and what happens to the
// accumulator (Epilogue); what a norm in front of a quantiser reads (NormOperands). Plain structs: no torch, no CUDA.
// Formulas: docs/numerics.md.
#pragma once
#include <cstdint>

#include "core/activation_math.h"
#include "core/dtype.h"

namespace pyquant {

// Order of the weights' codes in memory. natural: rows of n, k ascending. blocked128: int4 only, the order of the
// Hopper kernels' registers (core/blocked128.h).
enum class WeightLayout : int32_t { natural = 0, blocked128 = 1 };

constexpr uint32_t layout_bit(WeightLayout layout) { return 1u << static_cast<int32_t>(layout); }

// Rows of x that lie in images and are read through a window: no matrix of patches exists. Row m is pixel (i, j) of the
// result of one image, and its code k = (r * taps + s) * channels + c the one at
//   image * image_step + i * window_step[0] + j * window_step[1] + r * tap_step[0] + s * tap_step[1] + c
// Steps count codes. Every code is there: padding is memory that holds zero points.
struct ImageRows {
  int64_t channels = 0;  // 0: x is a matrix
  int64_t taps = 1;      // in a row of the window
  int64_t out_height = 1, out_width = 1;
  int64_t image_step = 0, window_step[2] = {0, 0}, tap_step[2] = {0, 0};
};

// y[m, n] = epilogue(sum_k x_q[m, k] * w_q[n, k]); leading strides count elements (for s4: nibbles).
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  DType x = DType::s8;  // codes s8, u8, s4 (one per byte unless x_packed), or f16, bf16
  DType w = DType::s8;  // s8 [n, k] row-major; s4 packed two per byte, low nibble = even k; f16, bf16 as x
  // f16, bf16, f32; s32 = accumulator after the zero-point term; s8 = requantised codes; s4 = the same, two per byte,
  // low nibble = even n, the high nibble after an odd n is 0
  DType out = DType::f32;
  bool x_packed = false;  // s4 activations are two per byte, low nibble = even k
  WeightLayout w_layout = WeightLayout::natural;
  int64_t ldx = 0, ldw = 0, ldo = 0, ldr = 0;
  int64_t group_size = 0;        // codes along k that share a weight scale; 0 = one scale per channel
  int64_t step_size = 0;         // s4 weights: codes along k that share a step (docs/numerics.md 4.1); 0 = no steps
  ImageRows image;               // how x lies where it is no matrix; ldx then says nothing
  int64_t experts = 0;           // matrices of weights, each for rows of its own (GemmOperands); 0 = one for all
  bool chooses_rows = false;     // experts: GemmOperands::x_rows says which row of x each row is
  bool per_token_scale = false;  // x_scale has m entries (else one)
  bool per_token_zero_point = false;
  bool has_zero_point = false;
  bool exact_weights = false;     // under floats: no row that rounds what codes and scales give
  bool has_w_zero_point = false;  // f16, bf16 activations only: (w_q - w_zero_point) * w_scale
  DType residual = DType::f32;    // meaningful when operands carry a residual
  int32_t x_align = 16, w_align = 16, out_align = 16,
          residual_align = 16;  // bytes: largest power of two <= 16 dividing pointer and row stride
};

// Null means absent. Absent scale = 1, absent zero point = 0, absent bias or residual = not added.
struct GemmOperands {
  const void* x = nullptr;
  const void* w = nullptr;
  const float* x_scale = nullptr;         // [m] or [1]
  const int32_t* x_zero_point = nullptr;  // [m] or [1]
  const uint8_t* w_step = nullptr;        // [k / step_size], rows of core/steps.h; null: blocks of weights hold theirs
  const float* w_scale = nullptr;         // [n] or [n, k / group_size]
  // [n] (groups: [n, k / group_size]) sum of codes (times their steps); required with a zero point
  const int32_t* w_sum = nullptr;
  const int32_t* w_zero_point = nullptr;  // [n] or [n, k / group_size]
  const float* bias = nullptr;            // [n]
  // Experts: row r is of expert e where expert_ends[e - 1] <= r < expert_ends[e], int32 [experts] on the device; rows
  // beyond are no expert's and become zeros. w, w_scale, w_sum, bias and an x_scale or x_zero_point of one number are
  // of expert 0; the others' lie expert_shifts[e] bytes further, [experts] on the host. Under floats each operand lies
  // by itself: [4][experts], of w, w_scale, w_zero_point and bias.
  const int32_t* expert_ends = nullptr;
  const int64_t* expert_shifts = nullptr;
  // Experts under floats: which row of x each row is, [m] on the device; null: row r of x is row r.
  const int64_t* x_rows = nullptr;
  const void* residual = nullptr;           // [m, n], type problem.residual, row stride ldr
  void* out = nullptr;                      // [m, n], row stride ldo
  const float* out_scale = nullptr;         // [1], out == s8 or s4
  const int32_t* out_zero_point = nullptr;  // [1] or null
  void* workspace = nullptr;                // cuda::workspace of the row, 256-byte aligned, need not be cleared
  bool counters_are_zero = false;           // of the workspace; else a kernel in front clears them
};

struct Epilogue {
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;   // used by Activation::clamp
  int32_t out_qmin = -127, out_qmax = 127;  // code limits when out == s8 or s4
};

// A norm in front of a quantiser (docs/numerics.md 9). With a residual the rows are x + residual, rounded to x's type
// and also written to sum [rows, cols], dense.
struct NormOperands {
  bool subtract_mean = false;  // LayerNorm; else RMSNorm
  const void* weight = nullptr;
  const void* bias = nullptr;  // [cols] or null
  DType weight_type = DType::f32, bias_type = DType::f32;
  float eps = 0.f;
  const void* residual = nullptr;  // of x's type, row stride ldr, or null
  int64_t ldr = 0;
  void* sum = nullptr;
};

}  // namespace pyquant
