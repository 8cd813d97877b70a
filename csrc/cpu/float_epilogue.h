// The ordered epilogue (docs/numerics.md 4, from the bias on) of a float accumulator.
#pragma once
#include <cstdint>

#include "core/problem.h"

namespace pyquant::cpu {

struct FloatEpilogue {
  int64_t n = 0;
  const float* bias = nullptr;  // [n]; null: none
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;
  const void* residual = nullptr;  // [m, n], ldr elements apart; null: none
  DType residual_type = DType::f32;
  int64_t ldr = 0;
  void* out = nullptr;  // [m, n] dense
  DType out_type = DType::f32;
};

// Channels [channel, channel + columns) of rows [row, row + rows): acc [rows][ld] holds them. columns <= 64, and 64
// numbers of each row of acc can be read.
void float_tile(const FloatEpilogue& epilogue, const float* acc, int64_t ld, int64_t row, int64_t rows, int64_t channel,
                int64_t columns);
// All of it: acc [m, n].
void float_epilogue(const FloatEpilogue& epilogue, const float* acc, int64_t m);

}  // namespace pyquant::cpu
