// Float rows times integer weights on the CPU.
#pragma once
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

Tensor weight_only_linear_cpu(const Tensor& x, const Tensor& w, const Tensor& w_scale, MaybeTensor w_zero_point,
                              MaybeTensor bias, MaybeTensor residual, int64_t w_bits, int64_t group_size,
                              Text activation, double clamp_min, double clamp_max, std::optional<ScalarType> out_dtype);

}  // namespace pyquant::bind
