// The packed buffer of the fused Linear on the CPU (linear_cpu.cpp); CUDA's is laid out in pyquant/ops/rows_layout.py.
#pragma once
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

Tensor pack_linear_cpu(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                       MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                       std::vector<int64_t> spec);
Tensor unpack_linear_cpu(const Tensor& packed, std::vector<int64_t> spec);

// Rows sorted by layer, those of packed[i] end before ends[i]; each gives what qlinear gives with its layer, those from
// the last end on zeros. rows: which rows of x they are.
Tensor grouped_linear_cpu(const Tensor& x, std::vector<Tensor> packed, const Tensor& ends, std::vector<int64_t> spec,
                          MaybeTensor rows, MaybeTensor x_scale, MaybeTensor x_zero_point,
                          std::optional<ScalarType> out_dtype, Text kernel);

}  // namespace pyquant::bind
