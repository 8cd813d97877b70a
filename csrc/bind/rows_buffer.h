// A layer whose buffer is padded rows (core/rows_layout.h) as the operands of a product: Linears and convolutions on
// CUDA.
#pragma once
#include "bind/check.h"
#include "core/rows_layout.h"

namespace pyquant::bind {

// The sections of a packed buffer.
struct RowsBuffer {
  RowsLayout at;
  const char* base;
  RowsBuffer(const LinearSpec& s, const Tensor& packed)
      : at(rows_layout(s)), base(static_cast<const char*>(packed.const_data_ptr())) {}
  template <class T>
  const T* section(int64_t offset) const {
    return reinterpret_cast<const T*>(base + offset);
  }
  const float* x_scale() const { return section<float>(at.scalars); }
  const int32_t* x_zero_point() const { return section<int32_t>(at.scalars + 4); }
  const float* out_scale() const { return section<float>(at.scalars + 8); }
  const int32_t* out_zero_point() const { return section<int32_t>(at.scalars + 12); }
};

// The problem as the caller has it.
void set_operands(const LinearCall& call, const RowsBuffer& buffer, GemmProblem* problem, GemmOperands* operands);
// What of the product is the layer's: the form of its inputs, its epilogue.
Epilogue set_inputs(const LinearCall& call, const RowsBuffer& buffer, GemmProblem* problem, GemmOperands* operands);

}  // namespace pyquant::bind
