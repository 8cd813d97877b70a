// The fused quantised Linear on the CPU (linear_cpu.cpp).
#pragma once
#include "bind/check.h"

namespace pyquant::bind {

Tensor pack_linear_cpu(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                       MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                       std::vector<int64_t> spec);
Tensor unpack_linear_cpu(const Tensor& packed, std::vector<int64_t> spec);
Tensor qlinear_cpu(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                   std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point);

}  // namespace pyquant::bind
