// Many layers of one spec in one product on CUDA (linear_cuda.cpp).
#pragma once
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

// As grouped_linear_cpu. Nothing waits for the device: values of ends and rows are not looked at. kernel: the name of a
// row, or empty for the plan's.
Tensor grouped_linear_cuda(const Tensor& x, std::vector<Tensor> packed, const Tensor& ends, std::vector<int64_t> spec,
                           MaybeTensor rows, MaybeTensor x_scale, MaybeTensor x_zero_point,
                           std::optional<ScalarType> out_dtype, Text kernel);

}  // namespace pyquant::bind
