// What a fused convolution is asked to do, on which memory: the codes under each window times the matrix of a Linear.
// docs/numerics.md 11.
#pragma once
#include "core/dtype.h"
#include "core/window.h"

namespace pyquant {

struct ConvOperands {
  Window window;
  const void* x = nullptr;  // f32, f16, bf16: quantised here; s8: codes of the static scale, or of x_scale
  DType x_type = DType::f32;
  int64_t batch = 0, channels = 0, height = 0, width = 0;
  bool channels_last = false;             // x and out as [batch][height][width][channels], else channels before pixels
  const float* x_scale = nullptr;         // [batch], of codes under dynamic inputs
  const int32_t* x_zero_point = nullptr;  // likewise; null: 0
  const void* residual = nullptr;         // [batch][height][width][n] of the result's size; null: none
  DType residual_type = DType::f32;
  void* out = nullptr;
  DType out_type = DType::f32;  // f32, f16, bf16; s8 when spec.codes_out
};

}  // namespace pyquant
