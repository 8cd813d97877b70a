// Layers whose activations stay floats, on CUDA (float_cuda.cpp).
#pragma once
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

Tensor float_linear_cuda(const Tensor& x, const Tensor& w, MaybeTensor bias, MaybeTensor residual, Text activation,
                         double clamp_min, double clamp_max, std::optional<ScalarType> out_dtype);

Tensor weight_only_linear_cuda(const Tensor& x, const Tensor& w, const Tensor& w_scale, MaybeTensor w_zero_point,
                               MaybeTensor bias, MaybeTensor residual, int64_t w_bits, int64_t group_size,
                               Text activation, double clamp_min, double clamp_max,
                               std::optional<ScalarType> out_dtype);

// Rows sorted by layer, in one launch: those of w[i] end before ends[i], which the device alone knows; rows from the
// last end on become zeros. w_zero_point, bias: one a layer, or none. rows: which rows of x they are.
Tensor grouped_weight_only_cuda(const Tensor& x, std::vector<Tensor> w, std::vector<Tensor> w_scale,
                                std::vector<Tensor> w_zero_point, std::vector<Tensor> bias, const Tensor& ends,
                                int64_t w_bits, int64_t group_size, Text activation, double clamp_min, double clamp_max,
                                MaybeTensor rows);

}  // namespace pyquant::bind
