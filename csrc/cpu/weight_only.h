// Float rows times integer weights: the pieces that bind/weight_only_cpu.cpp puts together.
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "cpu/float_epilogue.h"

namespace pyquant::cpu {

// Weights as a checkpoint stores them: s8, or s4 two a byte, low nibble first.
struct IntegerWeights {
  const void* codes = nullptr;
  DType type = DType::s8;
  int64_t n = 0, k = 0, row_bytes = 0;
  int64_t group_size = 0;               // 0: per channel; divides k
  const float* scale = nullptr;         // [n] or [n, k / group_size]
  const int32_t* zero_point = nullptr;  // likewise; null: 0
};

// Length of the rows that follow: k, rounded up; the rest is zeros.
int64_t ordered_columns(const IntegerWeights& w);
// x f32, f16 or bf16 [m, k], ldx elements apart -> float32 [m, ordered_columns] in the order that the kernels read.
void order_rows(const IntegerWeights& w, const void* x, DType type, int64_t m, int64_t ldx, float* out);
// The whole layer; x as order_rows makes it.
void weight_only(const IntegerWeights& w, const float* x, int64_t m, const FloatEpilogue& epilogue);

}  // namespace pyquant::cpu
