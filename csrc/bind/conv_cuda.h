// The fused convolution on CUDA (conv_cuda.cpp); its buffer is that of a Linear with k = taps * channels.
#pragma once
#include "bind/check.h"

namespace pyquant::bind {

Tensor qconv2d_cuda(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                    std::vector<int64_t> window, std::optional<ScalarType> out_dtype, MaybeTensor x_scale,
                    MaybeTensor x_zero_point);

}  // namespace pyquant::bind
