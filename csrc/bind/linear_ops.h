// The fused quantised Linear, once for all backends: check, allocate, call the backend, whose buffer and order of work
// are its own (linear_cpu.cpp, linear_cuda.cpp).
#pragma once
#include "bind/check.h"

namespace pyquant::bind {

template <class Backend>
struct LinearOps {
  static Tensor qlinear(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                        std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point) {
    const LinearCall call = linear_call(x, packed, residual, spec, out_dtype, x_scale, x_zero_point);
    Backend::check_layout(call.spec);
    const Backend on(x);
    on.check_input(call, packed, count_of(x_zero_point));
    Tensor out = on.empty(call.out_shape, call.out_type);
    if (out.numel() != 0) on.linear(call, x, packed, out.mutable_data_ptr());
    return out;
  }
};

}  // namespace pyquant::bind
