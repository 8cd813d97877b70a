// The fake quantisers of torch.ops.pyquant, once for all backends: check, allocate, call the backend.
#pragma once
#include <torch/csrc/stable/library.h>

#include "bind/boxed.h"
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

template <class Backend>
struct FakeQuantiseOps {
  using Range = typename Backend::Range;

  static Range range(bool symmetric, int64_t qmin, int64_t qmax) {
    return {static_cast<int32_t>(qmin), static_cast<int32_t>(qmax), symmetric};
  }

  static std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point,
                                                  Text granularity, int64_t group_size, int64_t qmin, int64_t qmax) {
    const FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
    const Backend on(x);
    check_values(on, call, scale, zero_point, qmin, qmax);
    const Tensor y = on.empty(shape_of(x), x.scalar_type()), mask = on.empty(mask_shape(x), ScalarType::Byte);
    write(on, call, group_size, qmin, qmax, y, mask);
    return {y, mask};
  }

  static void fake_quantize_out(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                                int64_t group_size, int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& mask) {
    const FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
    const Backend on(x);
    check_values(on, call, scale, zero_point, qmin, qmax);
    buffer("y", y, x, x.scalar_type(), shape_of(x));
    buffer("mask", mask, x, ScalarType::Byte, mask_shape(x));
    fake_out_apart(x, scale, zero_point, y, mask);
    write(on, call, group_size, qmin, qmax, y, mask);
  }

  static std::tuple<Tensor, Tensor, Tensor> fake_quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size,
                                                                  bool symmetric, int64_t qmin, int64_t qmax) {
    const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
    const Backend on(x);
    const Tensor y = on.empty(shape_of(x), x.scalar_type());
    const Tensor scale = on.empty(call.q.scale_shape, ScalarType::Float);
    const Tensor zero_point = on.empty(call.q.scale_shape, ScalarType::Int);
    on.fake_quantize_dynamic(call, group_size, range(symmetric, qmin, qmax), y.mutable_data_ptr(),
                             params(scale, zero_point));
    return {y, scale, zero_point};
  }

  static void fake_quantize_dynamic_out(const Tensor& x, Text granularity, int64_t group_size, bool symmetric,
                                        int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& scale,
                                        const Tensor& zero_point) {
    const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
    buffer("y", y, x, x.scalar_type(), shape_of(x));
    buffer("scale", scale, x, ScalarType::Float, call.q.scale_shape);
    buffer("zero_point", zero_point, x, ScalarType::Int, call.q.scale_shape);
    fake_dynamic_out_apart(x, y, scale, zero_point);
    const Backend on(x);
    on.fake_quantize_dynamic(call, group_size, range(symmetric, qmin, qmax), y.mutable_data_ptr(),
                             params(scale, zero_point));
  }

  static Tensor fake_quantize_backward(const Tensor& grad, const Tensor& mask) {
    fake_backward_check(grad, mask);
    const Backend on(grad);
    const Tensor out = on.empty(shape_of(grad), grad.scalar_type());
    write_backward(on, grad, mask, out);
    return out;
  }

  static void fake_quantize_backward_in_place(const Tensor& grad, const Tensor& mask) {
    fake_backward_check(grad, mask);
    buffer("grad", grad, grad, grad.scalar_type(), shape_of(grad));
    apart("grad", grad, "mask", mask);
    const Backend on(grad);
    write_backward(on, grad, mask, grad);
  }

  static std::tuple<Tensor, Tensor> fake_quantize_lsq_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                               MaybeTensor zero_point, Text granularity,
                                                               int64_t group_size, int64_t qmin, int64_t qmax) {
    FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
    const Backend on(x);
    check_values(on, call, scale, zero_point, qmin, qmax);
    lsq_check(grad, x);
    const Tensor grad_x = on.empty(shape_of(x), x.scalar_type());
    const Tensor grad_scale = on.empty(shape_of(scale), ScalarType::Float);
    on.fake_quantize_lsq_backward(dense(grad, call.keep), dense(x, call.keep), call, group_size,
                                  range(true, qmin, qmax), grad_x.mutable_data_ptr(),
                                  static_cast<float*>(grad_scale.mutable_data_ptr()));
    return {grad_x, grad_scale};
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("fake_quantize", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize));
    m.impl("fake_quantize_out", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_out));
    m.impl("fake_quantize_dynamic", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_dynamic));
    m.impl("fake_quantize_dynamic_out", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_dynamic_out));
    m.impl("fake_quantize_backward", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_backward));
    m.impl("fake_quantize_backward_", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_backward_in_place));
    m.impl("fake_quantize_lsq_backward", PYQUANT_BOX(&FakeQuantiseOps::fake_quantize_lsq_backward));
  }

 private:
  static typename Backend::Params params(const Tensor& scale, const Tensor& zero_point) {
    return {static_cast<float*>(scale.mutable_data_ptr()), static_cast<int32_t*>(zero_point.mutable_data_ptr())};
  }

  static void check_values(const Backend& on, const FakeCall& call, const Tensor& scale, const MaybeTensor& zero_point,
                           int64_t qmin, int64_t qmax) {
    on.check_scales(call.scale, scale.numel());
    on.check_zero_points("zero_point", call.zero_point, count_of(zero_point), qmin, qmax);
  }

  static void write(const Backend& on, const FakeCall& call, int64_t group_size, int64_t qmin, int64_t qmax,
                    const Tensor& y, const Tensor& mask) {
    on.fake_quantize(call, group_size, range(true, qmin, qmax), y.mutable_data_ptr(),
                     static_cast<uint8_t*>(mask.mutable_data_ptr()));
  }

  static void write_backward(const Backend& on, const Tensor& grad, const Tensor& mask, const Tensor& out) {
    std::vector<Tensor> keep;
    on.fake_quantize_backward(dense(grad, keep), dtype_of(grad), grad.numel(),
                              static_cast<const uint8_t*>(dense(mask, keep)), out.mutable_data_ptr());
  }
};

}  // namespace pyquant::bind
