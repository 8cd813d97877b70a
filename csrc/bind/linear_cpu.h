// The packed buffer of the fused Linear on the CPU (linear_cpu.cpp); CUDA's is laid out in pyquant/ops/rows_layout.py.
#pragma once
#include "bind/check.h"

namespace pyquant::bind {

Tensor pack_linear_cpu(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                       MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                       std::vector<int64_t> spec);
Tensor unpack_linear_cpu(const Tensor& packed, std::vector<int64_t> spec);

// x [rows, K] sorted by layer, rows[i] of them for packed[i]; each row gives what qlinear gives with its layer.
Tensor grouped_linear_cpu(const Tensor& x, std::vector<Tensor> packed, std::vector<int64_t> rows,
                          std::vector<int64_t> spec, MaybeTensor x_scale, MaybeTensor x_zero_point,
                          std::optional<ScalarType> out_dtype);

}  // namespace pyquant::bind
