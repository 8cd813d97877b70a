// Weights one at a time, wherever they lie: what kernels that assume nothing of memory multiply by.
#pragma once
#include "core/steps.h"
#include "cuda/gemm/call.h"

namespace pyquant::cuda {

// Code k of a row, a byte or a nibble.
__device__ __forceinline__ uint8_t code_at(const uint8_t* row, int32_t k, bool packed) {
  if (!packed) return __ldg(row + k);
  const int32_t nibble = (__ldg(row + k / 2) >> (4 * (k & 1))) & 15;
  return static_cast<uint8_t>((nibble ^ 8) - 8);
}

struct ByteWeights {
  const uint8_t* w;
  int64_t ld_bytes;
  bool packed;          // two s4 codes per byte
  const uint8_t* step;  // core/steps.h, or null
  int32_t step_size, step_row;

  explicit ByteWeights(const GemmCall& call)
      : w(static_cast<const uint8_t*>(call.operands.w)),
        ld_bytes(columns_of(call.problem.w, call.problem.ldw)),
        packed(is_packed(call.problem.w)),
        step(call.problem.step_size ? call.operands.w_step : nullptr),
        step_size(static_cast<int32_t>(call.problem.step_size)),
        step_row(static_cast<int32_t>(pyquant::step_row(call.problem.n))) {}

  // A weight's code, times its step: a byte too.
  __device__ __forceinline__ uint8_t at(int64_t n, int32_t k) const {
    const uint8_t code = code_at(w + n * ld_bytes, k, packed);
    if (step == nullptr) return code;
    return static_cast<uint8_t>(code * __ldg(step + static_cast<int64_t>(k / step_size) * step_row + step_place(n)));
  }
};

}  // namespace pyquant::cuda
