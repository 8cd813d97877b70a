// The arguments of the fake quantisers, for every backend.
#include <torch/csrc/stable/ops.h>

#include "bind/check.h"

namespace pyquant::bind {

static Matrix rows_of(const Tensor& x) { return matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x); }

FakeCall fake_call(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const std::string& granularity,
                   int64_t group_size, int64_t qmin, int64_t qmax) {
  floats("x", x);
  FakeCall call{granularity_of(granularity, x, group_size), {}, nullptr, nullptr, {}};
  qparams(x, scale, zero_point, granularity, call.q);
  code_range_with(zero_point, qmin, qmax);
  call.x = rows_of(x);
  call.scale = static_cast<const float*>(dense(scale, call.keep));
  call.zero_point = static_cast<const int32_t*>(dense(zero_point, call.keep));
  return call;
}

FakeCall fake_dynamic_call(const Tensor& x, const std::string& granularity, int64_t group_size, bool symmetric,
                           int64_t qmin, int64_t qmax) {
  floats("x", x);
  FakeCall call{granularity_of(granularity, x, group_size), {}, nullptr, nullptr, {}};
  dynamic_code_range(symmetric, qmin, qmax);
  call.x = rows_of(x);
  return call;
}

Shape mask_shape(const Tensor& x) { return {(x.numel() + 7) / 8}; }

void fake_out_apart(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const Tensor& y,
                    const Tensor& mask) {
  apart("y", y, "x", x, true);
  apart("y", y, "scale", scale);
  apart("mask", mask, "x", x);
  apart("mask", mask, "y", y);
  apart("mask", mask, "scale", scale);
  if (!zero_point) return;
  apart("y", y, "zero_point", *zero_point);
  apart("mask", mask, "zero_point", *zero_point);
}

void fake_dynamic_out_apart(const Tensor& x, const Tensor& y, const Tensor& scale, const Tensor& zero_point) {
  apart("y", y, "x", x, true);
  apart("scale", scale, "x", x);
  apart("scale", scale, "y", y);
  apart("zero_point", zero_point, "x", x);
  apart("zero_point", zero_point, "y", y);
  apart("zero_point", zero_point, "scale", scale);
}

void fake_backward_check(const Tensor& grad, const Tensor& mask) {
  floats("grad", grad);
  dtype_in("mask", mask, {ScalarType::Byte});
  same_device("mask", mask, grad, "grad");
  shape_is("mask", mask, mask_shape(grad));
}

void lsq_check(const Tensor& grad, const Tensor& x) {
  dtype_in("grad", grad, {x.scalar_type()});
  same_device("grad", grad, x);
  shape_is("grad", grad, shape_of(x));
}

}  // namespace pyquant::bind
