// The fused quantised Linear on CUDA (linear_cuda.cpp).
#pragma once
#include "bind/check.h"

namespace pyquant::bind {

Tensor qlinear_cuda(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                    std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point);

}  // namespace pyquant::bind
