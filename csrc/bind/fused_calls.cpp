// The rules of the ops that norm, gate or transform a row before they quantise it (pyquant/ops/shapes.py holds the
// same).
#include <cmath>
#include <cstdio>
#include <limits>

#include "bind/check.h"

namespace pyquant::bind {

static void channels(const char* argument, const MaybeTensor& t, const Tensor& x, int64_t k) {
  if (!t) return;
  floats(argument, *t);
  same_device(argument, *t, x);
  shape_is(argument, *t, {k});
}

NormCall norm_call(bool subtract_mean, const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight,
                   const MaybeTensor& bias, double eps, bool symmetric, int64_t qmin, int64_t qmax) {
  floats("x", x);
  min_dim("x", x, 1);
  const int64_t k = x.size(x.dim() - 1);
  if (residual) {
    dtype_in("residual", *residual, {x.scalar_type()});
    same_device("residual", *residual, x);
    shape_is("residual", *residual, shape_of(x));
  }
  channels("weight", weight, x, k);
  channels("bias", bias, x, k);
  if (!(eps >= 0) || !std::isfinite(eps)) refuse("eps", std::to_string(eps), "a finite number from 0");
  dynamic_code_range(symmetric, qmin, qmax);
  NormCall call;
  call.x = matrix(x);
  call.scale_shape = lead_of(x);
  call.norm.subtract_mean = subtract_mean;
  call.norm.eps = static_cast<float>(eps);
  call.norm.weight = dense(weight, call.keep);
  call.norm.bias = dense(bias, call.keep);
  if (weight) call.norm.weight_type = dtype_of(*weight);
  if (bias) call.norm.bias_type = dtype_of(*bias);
  if (residual) {
    const Matrix r = matrix(*residual);
    call.keep.push_back(r.keep);
    call.norm.residual = r.data;
    call.norm.ldr = r.ld;
  }
  return call;
}

GateCall silu_mul_call(const Tensor& x, bool symmetric, int64_t qmin, int64_t qmax) {
  floats("x", x);
  min_dim("x", x, 1);
  GateCall call;
  call.out_shape = shape_of(x);
  if (call.out_shape.back() % 2 != 0) refuse("x", describe(x), "an even last dimension, gates then ups");
  call.out_shape.back() /= 2;
  dynamic_code_range(symmetric, qmin, qmax);
  call.x = matrix(x);
  call.x.cols /= 2;
  call.gate.up = static_cast<const unsigned char*>(call.x.data) + call.x.cols * bytes_of(call.x.type);
  call.gate.ldu = call.x.ld;
  return call;
}

GateCall gate_call(const Tensor& x, const Tensor& up, const std::string& activation, double clamp_min, double clamp_max,
                   bool symmetric, int64_t qmin, int64_t qmax) {
  floats("x", x);
  min_dim("x", x, 1);
  dtype_in("up", up, {x.scalar_type()});
  same_device("up", up, x);
  shape_is("up", up, shape_of(x));
  GateCall call;
  call.gate.activation = activation_of(activation, clamp_min, clamp_max);
  call.gate.clamp_min = static_cast<float>(clamp_min);
  call.gate.clamp_max = static_cast<float>(clamp_max);
  dynamic_code_range(symmetric, qmin, qmax);
  call.x = matrix(x);
  call.up = matrix(up);
  call.gate.up = call.up.data;
  call.gate.ldu = call.up.ld;
  call.out_shape = shape_of(x);
  return call;
}

Hadamard hadamard_call(const Tensor& x, int64_t block, std::optional<double> scale) {
  floats("x", x);
  min_dim("x", x, 1);
  const HadamardOrder order = hadamard_order(block);
  const int64_t columns = x.size(x.dim() - 1);
  if (order.base == 0 || columns % block != 0)
    refuse("block", std::to_string(block),
           "m * 2^k that divides the " + std::to_string(columns) + " columns of x, with m one of 1, 12, 20, 28");
  if (scale && !(*scale >= std::numeric_limits<float>::denorm_min() && *scale <= std::numeric_limits<float>::max())) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", *scale);
    refuse("scale", text, "a number above 0 that float32 has, or None");
  }
  return hadamard_of(block, scale);
}

}  // namespace pyquant::bind
