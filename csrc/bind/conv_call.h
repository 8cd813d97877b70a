// The fused convolution: every rule of its arguments (pyquant/ops/conv_shapes.py), once for all backends.
#pragma once
#include "bind/check.h"
#include "core/conv.h"

namespace pyquant::bind {

// x and residual as they lie, or copies that `keep` owns; out is the caller's to make.
struct ConvCall {
  LinearSpec spec;
  ConvOperands operands;
  Shape out_shape;  // [batch, n, height, width]
  ScalarType out_type = ScalarType::Float;
  std::vector<Tensor> keep;
};
ConvCall conv_call(const Tensor& x, const Tensor& packed, const MaybeTensor& residual, const std::vector<int64_t>& spec,
                   const std::vector<int64_t>& window, std::optional<ScalarType> out_dtype, const MaybeTensor& x_scale,
                   const MaybeTensor& x_zero_point);

// [batch, height, width, channels] as [batch, channels, height, width], where it lies.
Tensor channels_first(const Tensor& image);

}  // namespace pyquant::bind
